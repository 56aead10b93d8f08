"""Staged files: batches that are ready to be published, and not part of the log yet.

A process that stages opens no database and takes no lock, so it may be killed at any
time, and may run where only the directory is shared.  No row names its file:
`transaction.publish` gets the path and copies the contents; before and after that, any
process may remove the file.

    staging/<owner>/<job>/<name>

The *owner* is a process on which all processes of a job depend, such as the driver of a
Spark application: once it is dead, its files will not be published.  Its name contains
boot, process namespace, pid and start time, which tell it from any other process with the
same pid.  The name of a job begins with its start time, which counts if it is unknown
whether the owner is alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import accumulate
from typing import Any, NamedTuple

from embedlog import batch as batches
from embedlog.batch import EncodedBatch
from embedlog.batch.wire import layout_of
from embedlog.errors import StorageError
from embedlog.files import Files, process_id
from embedlog.lazy import pa
from embedlog.schemas.segment_schema import segment_schema
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.schemas.typed_batch import typed

STAGING = "staging"
MAX_AGE_MS = 24 * 60 * 60 * 1000
"""Older jobs are removed if it is unknown whether their owner is alive."""
_MAX_AGE_WITH_OWNER_MS = 7 * MAX_AGE_MS
"""Older jobs are removed even if their owner is alive."""


StagedPartition = tuple[str, int, int]
"""Topic, the topic's id, and partition."""


class StagedBatch(NamedTuple):
    """One batch in a staged file, and the partition that it is for."""

    partition: int
    """The index of its partition in `StagedFile.partitions`."""
    position: int
    size: int
    headers: bool
    schema_version: int = 0
    """The version of the topic's schema that its columns have; 0 for a topic of bytes."""
    tombstones: bool = False
    """Whether it has a column that marks tombstones, as typed topics have."""


class StagedFile(NamedTuple):
    """A finished file, which `transaction.publish` takes."""

    path: str
    """Relative to the root; empty if there was nothing to stage."""
    partitions: tuple[StagedPartition, ...]
    batches: tuple[StagedBatch, ...]
    records: int


class StagedFileWriter:
    """Writes one staged file; for one thread.

    Args:
        files: The files of the root; the writer does not close them.
        directory: The job's directory, from `job_directory`.
        name: The name of the file, unique among all attempts.
    """

    def __init__(self, files: Files, directory: str, name: str) -> None:
        self._files, self._directory = files, directory
        self._path = f"{directory}/{name}"
        self._fd: int | None = None
        self._position = self._records = 0
        self._partitions: dict[StagedPartition, int] = {}
        self._batches: list[StagedBatch] = []

    def add(self, topic: str, topic_id: int, partition: int, batch: EncodedBatch) -> None:
        """Write a batch; the batches of a partition keep their order.

        Raises:
            StorageError: The caller must call `abandon`.
        """
        if self._fd is None:
            make_directories(self._files, self._directory)
            self._fd = self._files.open(self._path, write=True, create=True, exclusive=True)
        index = self._partitions.setdefault((topic, topic_id, partition), len(self._partitions))
        self._batches.append(
            StagedBatch(
                *(index, self._position, batch.size, batch.has_headers),
                *(batch.schema_version, bool(batch.flags & batches.TOMBSTONES)),
            )
        )
        self._position += self._files.write(self._fd, batch.stamp(0, 0), self._position)
        self._records += batch.count

    def finish(self) -> StagedFile:
        """Close the file and return its contents.

        It is not flushed: `publish` copies it, and flushes the copy.
        """
        path = self._path if self._close() else ""
        return StagedFile(path, tuple(self._partitions), tuple(self._batches), self._records)

    def abandon(self) -> None:
        """Remove the file; if that fails, `sweep` removes it later."""
        if self._close():
            with suppress(StorageError):
                self._files.unlink(self._path, missing_ok=True)

    def _close(self) -> bool:
        """Close the file; return whether it was open."""
        fd, self._fd = self._fd, None
        if fd is not None:
            self._files.close(fd)
        return fd is not None


def read(
    files: Files,
    staged: StagedFile,
    schema_of: Callable[[StagedPartition, int], TopicSchema | None] = lambda partition, version: (
        None
    ),
) -> Iterator[tuple[StagedPartition, EncodedBatch]]:
    """Yield the batches of a staged file with their partitions; they refer to a map of the file.

    Args:
        files: The files of the root.
        staged: The file.
        schema_of: Returns a version of the schema of a partition's topic; None if it is bytes.

    Raises:
        CorruptBatchError: The file is not the one that was written.
        StorageError: It is missing: `sweep` removed it, because its owner seemed dead.
    """
    if not staged.batches:
        return
    fd = files.open(staged.path)
    try:
        whole = pa.py_buffer(files.map(fd, files.size(fd)))
    finally:
        files.close(fd)
    sources: dict[Any, batches.BatchSource] = {}
    for index, position, size, headers, version, tombstones in staged.batches:
        partition = staged.partitions[index]
        schema = schema_of(partition, version) if version else None
        key = schema, headers, tombstones
        if key not in sources:
            columns = batches.schema(headers=headers)
            if schema is not None:
                columns = segment_schema(schema, headers=headers, tombstones=tombstones)
            sources[key] = batches.BatchSource(whole, staged.path, 0, layout_of(columns))
        batch = batches.to_encoded(batches.Batch(sources[key], position, position + size))
        yield partition, batch if schema is None else typed(batch, schema)


# The directories of jobs, and when they may be removed


def job_directory(owner: str, began_ms: int, job: str) -> str:
    """Return the directory of a job; all of its processes use the same one."""
    return f"{STAGING}/{owner}/{began_ms:013d}-{job}"


def make_directories(files: Files, directory: str) -> None:
    """Make a directory and its parents."""
    for path in accumulate(directory.split("/"), "{}/{}".format):
        files.make_directory(path)


def remove(files: Files, staged: Iterable[StagedFile]) -> None:
    """Remove the directories of staged files, with what failed attempts left there.

    If that fails, `sweep` removes them later.
    """
    for directory in {file.path.rpartition("/")[0] for file in staged if file.path}:
        remove_job(files, directory)


def remove_job(files: Files, directory: str) -> None:
    """Remove a job's directory, and the owner's if it was the last one; ignores failures."""
    assert directory.startswith(f"{STAGING}/")
    with suppress(StorageError):
        for name in files.list(directory):
            files.unlink(f"{directory}/{name}", missing_ok=True)
        files.remove_directory(directory)
        files.remove_directory(directory.rpartition("/")[0])


def job_directories(files: Files) -> list[str]:
    """Return the directories of all jobs that have staged something."""
    paths: list[str] = []
    with suppress(StorageError):
        for owner in files.list(STAGING):
            paths += [f"{STAGING}/{owner}/{job}" for job in files.list(f"{STAGING}/{owner}")]
    return paths


def sweep(files: Files, now_ms: int) -> list[str]:
    """Remove the jobs that will not be published any more; return their directories."""
    paths = [path for path in job_directories(files) if is_orphaned(path, now_ms)]
    for path in paths:
        remove_job(files, path)
    return paths


def is_orphaned(path: str, now_ms: int) -> bool:
    """Return whether what a job staged will not be published any more.

    Its owner is dead, or it is unknown whether the owner is alive and the job is old.

    Args:
        path: The job's directory.
        now_ms: The time, in milliseconds since 1970.
    """
    _, owner, job = path.split("/")
    began = job.partition("-")[0]
    # A directory that is not named as a job counts as old.
    age_ms = now_ms - int(began) if began.isdecimal() else _MAX_AGE_WITH_OWNER_MS + 1
    process = process_id.parse(owner)
    if process is not None and process.here:
        # A long-lived driver may not have removed what it aborted.
        return not process.alive or age_ms > _MAX_AGE_WITH_OWNER_MS
    return age_ms > MAX_AGE_MS
