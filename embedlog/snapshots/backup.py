"""Backups: a snapshot of all topics, with its files, in a directory or at a URL.

A backup has the layout of a log: segment files below ``topics/``, and a manifest in
``snapshots/``, which `open_snapshot` reads.  The manifest of a backup also has the rows of `state`
that are not about segments, and the size and checksum of each file.

In order: the snapshot is taken, files are copied that the last manifest does not have, each as a
whole, and then the manifest is written.  So a manifest names only files that are there, and one
that was killed leaves files that the next one finds.  A sealed segment is copied once.  Of the
active one its first bytes are copied, each time; they never change, so the longer file serves the
earlier manifests as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from embedlog.catalog import INTERNAL
from embedlog.checksum import crc32c
from embedlog.errors import CorruptionError, IllegalStateError, StorageError
from embedlog.files import Files
from embedlog.files.paths import FORMAT_FILE, MANIFESTS
from embedlog.files.throttle import Throttle
from embedlog.root.root import Root
from embedlog.segment import CHUNK_BYTES
from embedlog.snapshots import manifest, snapshot
from embedlog.snapshots.export import StateExport
from embedlog.snapshots.manifest import Json

Progress = Callable[[int, int], None]

_LOCK = "locks/backup"
_NAME = f"{INTERNAL}backup"
"""The snapshot of the log that holds the records during the copy."""
_HELD_MS = 7 * 24 * 60 * 60 * 1000


class BackupResult(NamedTuple):
    """What a backup did."""

    name: str
    """Of its manifest."""
    files: int
    """How many files it consists of."""
    bytes: int
    copied_files: int
    """How many of them were copied now."""
    copied_bytes: int


@contextmanager
def held(root: Root) -> Iterator[Json]:
    """Take a snapshot of all topics for the body; yield its manifest, with the rows of `state`.

    Raises:
        LockTimeoutError: Another process makes a backup, or a clone.
    """
    context = root.context
    context.check_writable()
    with context.files.opened(_LOCK, write=True, create=True) as lock:
        context.files.lock(lock, context.lock_timeout)
        topics = list(root.topics().values())
        export = StateExport(root, topics)
        _, document = snapshot.take(root, _NAME, topics, _HELD_MS, replace=True, export=export)
        try:
            rows = export.rows.items()
            document["rows"] = [[manifest.text_of(key), manifest.text_of(row)] for key, row in rows]
            yield document
        finally:
            snapshot.delete(context, _NAME)


def back_up(
    root: Root,
    target: Files,
    *,
    verify: bool = False,
    throttle: Throttle | None = None,
    progress: Progress | None = None,
) -> BackupResult:
    """Write a backup of a log; see `Log.backup`."""
    before = _last(root, target)
    with held(root) as document:
        # A name that sorts by time, also if the clock went back.
        document["created_ms"] = max(document["created_ms"], before["created_ms"] + 1)
        document |= {"name": f"backup-{document['created_ms']:015d}", "expires_ms": None}
        for partition in partitions(document):
            partition["directories"] = []
        result = _copy(root, target, document, before, verify, throttle, progress)
        manifest.write(target, document["name"], document)
        return result


def _last(root: Root, target: Files) -> Json:
    """Return the manifest of the last backup; one without files if this is the first."""
    if target.exists(FORMAT_FILE):
        raise IllegalStateError(
            "The target is a log", path=target.path(""), todo="Name another directory."
        )
    names = backups(target)
    if not names:
        return {"created_ms": -1, "files": {}}
    before = manifest.read(target, manifest.path_of(names[-1]))
    if before["log_id"] != root.id:
        raise IllegalStateError(
            "The target has backups of another log",
            path=target.path(""),
            todo="Name another target; a log that was restored is another log.",
        )
    return before


def backups(target: Files) -> list[str]:
    """Return the names of the backups, the oldest first."""
    if not target.exists(MANIFESTS):
        return []
    names = target.list(MANIFESTS)
    return [
        name.removesuffix(".json")
        for name in names
        if name.startswith("backup-") and name.endswith(".json")
    ]


def partitions(document: Json) -> Iterator[Json]:
    """Yield what a manifest says of each partition."""
    for topic in document["topics"].values():
        yield from topic["partitions"]


def bytes_of(segment: Json) -> int:
    """Return how many bytes of a segment file belong to a manifest."""
    size: int = segment["end_position"] if segment["next_offset"] is None else segment["size"]
    return size


def _copy(
    root: Root,
    target: Files,
    document: Json,
    before: Json,
    verify: bool,
    throttle: Throttle | None,
    progress: Progress | None,
) -> BackupResult:
    """Copy the files that the target does not have, and note all of them in the manifest."""
    found: dict[str, list[int]] = {}
    todo = [segment for partition in partitions(document) for segment in partition["segments"]]
    total, done, copied, copied_bytes = sum(map(bytes_of, todo)), 0, 0, 0
    source = root.context.files
    for segment in todo:
        path, size = segment["path"], bytes_of(segment)
        known = before["files"].get(path)
        if known is None or known[0] != size or not _has(target, path, known, verify):
            is_new, checksum = copy_file(source, target, path, path, size, throttle)
            known = [size, checksum]
            copied, copied_bytes = copied + is_new, copied_bytes + is_new * size
        found[path], done = known, done + size
        if progress is not None:
            progress(done, total)
    document["files"] = found
    return BackupResult(document["name"], len(todo), total, copied, copied_bytes)


def _has(target: Files, path: str, known: list[int], verify: bool) -> bool:
    """Return whether the target has a file of the last backup; with ``verify`` by its bytes."""
    try:
        with target.opened(path) as fd:
            if target.size(fd) < known[0]:
                return False
            return not verify or checksum_of(target, fd, known[0]) == known[1]
    except StorageError as error:
        if not error.missing:
            raise
        return False


def chunks_of(files: Files, fd: int, size: int) -> Iterator[bytes]:
    """Yield the first bytes of a file.

    Raises:
        CorruptionError: It is shorter.
    """
    for position in range(0, size, CHUNK_BYTES):
        chunk = files.read(fd, min(CHUNK_BYTES, size - position), position)
        if len(chunk) < min(CHUNK_BYTES, size - position):
            raise CorruptionError(
                f"The file ends before byte {size}, which was written",
                position=position + len(chunk),
            )
        yield chunk


def checksum_of(files: Files, fd: int, size: int) -> int:
    """Return the CRC-32C of the first bytes of a file."""
    checksum = 0
    for chunk in chunks_of(files, fd, size):
        checksum = crc32c(chunk, checksum)
    return checksum


def copy_file(
    source: Files,
    target: Files,
    path: str,
    new_path: str,
    size: int,
    throttle: Throttle | None = None,
    expected: int | None = None,
) -> tuple[bool, int]:
    """Copy the first bytes of a file, unless the target has the same; durable when it returns.

    Args:
        source: Where it is.
        target: Where the copy is made.
        path: The file.
        new_path: The copy.
        size: How many bytes.
        throttle: Limits the bytes per second.
        expected: The checksum of the bytes, if it is known.

    Returns:
        Whether it was copied, and the checksum.

    Raises:
        CorruptionError: The file is shorter, or has another checksum.
    """
    with source.opened(path) as fd:
        try:
            with target.opened(new_path) as copy:
                if target.size(copy) == size:
                    checksum = checksum_of(source, fd, size) if expected is None else expected
                    if checksum_of(target, copy, size) == checksum:
                        return False, checksum
        except StorageError as error:
            if not error.missing:
                raise
        checksum = 0

        def chunks() -> Iterator[bytes]:
            nonlocal checksum
            for chunk in chunks_of(source, fd, size):
                if throttle is not None:
                    throttle.spend(len(chunk))
                checksum = crc32c(chunk, checksum)
                yield chunk
            # Before the copy gets its name.
            if expected not in (None, checksum):
                raise CorruptionError(
                    "The file is not as it was backed up: its checksum is another one",
                    path=source.path(path),
                    todo="Restore an earlier backup, or from another copy of the target.",
                )

        make_directories(target, new_path)
        target.write_file(new_path, chunks())
        return True, checksum


def make_directories(files: Files, path: str) -> None:
    """Make the directories of a file, durably."""
    names = path.split("/")[:-1]
    for count in range(1, len(names) + 1):
        directory = "/".join(names[:count])
        if not files.exists(directory):
            files.make_directory(directory)
            files.sync_directory("/".join(names[: count - 1]))
