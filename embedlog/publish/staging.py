"""Batches that are ready to be published, in files that are nobody's part of the log yet.

Whoever stages opens no database and takes no lock, so it may be killed at any
instant, and may run where only the directory is shared.  Its file is named by
nothing: `publishing` is given its path, and copies what is in it; until then,
and after, anybody may remove it.

    staging/<owner>/<job>/<name>

The *owner* is a process that all who stage for a job depend on, as the driver
of a Spark application is: once that is dead, nobody will publish what is there.
Its name says which boot, process namespace, process and start it is, so that
another process of the same number is not taken for it, nor is one of another
machine.  A job's name begins with when it was begun, for those cases in which
the owner cannot be asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

import pyarrow as pa

from embedlog import batch as batches
from embedlog.batch import EncodedBatch
from embedlog.errors import StorageError
from embedlog.files import Files, process_id

STAGING = "staging"
KEPT_MS = 24 * 60 * 60 * 1000
"""Older jobs are removed when nobody can tell whether their owner lives."""
_LONGER = 7
"""So many times older ones also when it does."""


class StagedBatch(NamedTuple):
    """One batch in a staged file, and where it is to go."""

    place: int
    """Which of the file's `StagedFile.places`."""
    position: int
    size: int
    headers: bool


class StagedFile(NamedTuple):
    """A finished file: what `publishing.publish` is given, however it got there."""

    path: str
    """From the root; empty if there was nothing to stage."""
    places: tuple[tuple[str, int, int], ...]
    """Topic, the topic's id, and partition."""
    parts: tuple[StagedBatch, ...]
    records: int


class StagedFileWriter:
    """Writes one staged file; made where the records are, by one thread.

    Args:
        files: The seam of the root; not closed by this.
        directory: The job's, as `job_directory` named it.
        name: Of the file, which no other attempt has.
    """

    def __init__(self, files: Files, directory: str, name: str) -> None:
        self._files, self._directory = files, directory
        self._path = f"{directory}/{name}"
        self._fd: int | None = None
        self._position = self._records = 0
        self._places: dict[tuple[str, int, int], int] = {}
        self._parts: list[StagedBatch] = []

    def add(self, topic: str, topic_id: int, partition: int, one: EncodedBatch) -> None:
        """Write a batch; those of a partition keep their order.

        Raises:
            StorageError: `abandon` what was written.
        """
        if self._fd is None:
            make_directories(self._files, self._directory)
            self._fd = self._files.open(self._path, write=True, create=True, exclusive=True)
        place = self._places.setdefault((topic, topic_id, partition), len(self._places))
        self._parts.append(StagedBatch(place, self._position, one.size, one.has_headers))
        self._position += self._files.write(self._fd, one.stamp(0, 0), self._position)
        self._records += one.count

    def finish(self) -> StagedFile:
        """Close the file and say what is in it.

        It is not flushed: whoever publishes it copies it, and flushes that.
        """
        path = self._path if self._fd is not None else ""
        self._close()
        return StagedFile(path, tuple(self._places), tuple(self._parts), self._records)

    def abandon(self) -> None:
        """Remove what was written; what cannot be removed now is swept up later."""
        if self._fd is not None:
            self._close()
            with suppress(StorageError):
                self._files.unlink(self._path, missing_ok=True)

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            self._files.close(fd)


def read(files: Files, staged: StagedFile) -> Iterator[tuple[tuple[str, int, int], EncodedBatch]]:
    """Yield the batches of a staged file, and where each goes; over a map, nothing is copied.

    Raises:
        CorruptBatchError: The file is not the one that was written.
        StorageError: It is gone: swept up, for its owner seemed dead.
    """
    if not staged.parts:
        return
    fd = files.open(staged.path)
    try:
        whole = pa.py_buffer(files.map(fd, files.size(fd)))
    finally:
        files.close(fd)
    sources = {
        headers: batches.BatchSource(whole, staged.path, 0, batches.schema(headers=headers))
        for headers in {part.headers for part in staged.parts}
    }
    for place, position, size, headers in staged.parts:
        one = batches.Batch(sources[headers], position, position + size)
        yield staged.places[place], batches.to_encoded(one)


# Names and who may remove them


def job_directory(owner: str, began_ms: int, job: str) -> str:
    """Return where a job stages: the same for all who take part in it."""
    return f"{STAGING}/{owner}/{began_ms:013d}-{job}"


def make_directories(files: Files, directory: str) -> None:
    """Make a directory and those it lies in."""
    parts = directory.split("/")
    for depth in range(1, len(parts) + 1):
        files.make_directory("/".join(parts[:depth]))


def remove(files: Files, staged: Iterable[StagedFile]) -> None:
    """Remove staged files that nobody needs any more, and their job's directory with them.

    Attempts that nobody heard of may have left others beside them.  What cannot
    be removed is left to the sweep.
    """
    for directory in {each.path.rpartition("/")[0] for each in staged if each.path}:
        remove_job(files, directory)


def remove_job(files: Files, directory: str) -> None:
    """Remove a job's directory, and its owner's with the last one; failures do not matter."""
    assert directory.startswith(f"{STAGING}/")
    with suppress(StorageError):
        for name in files.list(directory):
            files.unlink(f"{directory}/{name}", missing_ok=True)
        files.remove_directory(directory)
        files.remove_directory(directory.rpartition("/")[0])


def discard(files: Files, staged: StagedFile) -> None:
    """Remove one staged file; that it is gone already does not matter."""
    if staged.path:
        with suppress(StorageError):
            files.unlink(staged.path, missing_ok=True)


def left(files: Files) -> list[str]:
    """Return the directories of all jobs that have staged something."""
    found: list[str] = []
    with suppress(StorageError):
        for owner in files.list(STAGING):
            found += [f"{STAGING}/{owner}/{job}" for job in files.list(f"{STAGING}/{owner}")]
    return found


def sweep(files: Files, now_ms: int, kept_ms: int = KEPT_MS) -> list[str]:
    """Remove the jobs whose owner is dead, or is of elsewhere and began long ago; return them."""
    found = [path for path in left(files) if orphaned(path, now_ms, kept_ms)]
    for path in found:
        remove_job(files, path)
    return found


def orphaned(path: str, now_ms: int, kept_ms: int = KEPT_MS) -> bool:
    """Whether nobody will publish what a job staged.

    Args:
        path: The job's directory.
        now_ms: The clock.
        kept_ms: How long a job is left alone whose owner cannot be seen from here.
    """
    _, owner, job = path.split("/")
    began = job.partition("-")[0]
    age_ms = now_ms - int(began) if began.isdigit() else kept_ms * _LONGER + 1
    known = process_id.parse(owner)
    if known is not None and known.here:
        # A driver that lives long may have forgotten what failed, and what it aborted.
        return not known.alive or age_ms > kept_ms * _LONGER
    return age_ms > kept_ms
