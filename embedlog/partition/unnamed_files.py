"""Segment files that the manifest does not name, but a row does.

*Uncommitted* files are on their way into the manifest or out of it, by a row of `state`.  While
it is there no process takes the file for garbage, and after a crash the next process knows what
to remove.

*Pending deletes* are files that the manifest no longer names: they are unlinked after a delay,
by the next sweep.  During the delay, a reader that looked up a file before its name was dropped
can still open it.  Rows in `live` say which files are to be unlinked, and when.  A power cut takes
these rows too; then a file that the manifest does not name is garbage, as always.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from embedlog import catalog, kv
from embedlog.catalog import SegmentInfo
from embedlog.files import Files
from embedlog.keyspace import PENDING_DELETES, SEGMENTS, UNCOMMITTED_FILES
from embedlog.partition import leases
from embedlog.partition.state import Context
from embedlog.segment import key_index_path

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog


def new_file(log: PartitionLog, segment: SegmentInfo) -> SegmentInfo:
    """Return a segment with a new id, whose file may be created now: it is uncommitted."""

    def step(txn: kv.Txn) -> SegmentInfo:
        new = segment._replace(id=catalog.next_number(txn, "segment"))
        UNCOMMITTED_FILES.put(txn, log.key, *new.key, value=None)
        return new

    return log.context.state.write(step)


def uncommitted(log: PartitionLog) -> list[SegmentInfo]:
    """Return the uncommitted files of a partition, as the disk has them too."""

    def step(txn: kv.Txn) -> list[SegmentInfo]:
        segments = catalog.uncommitted_files(txn, log.key)
        for segment in segments:
            UNCOMMITTED_FILES.put(txn, log.key, *segment.key, value=None)
        return segments

    # A commit, though it changes nothing: after a commit that failed it is unknown what is
    # on the disk, and a file must not be unlinked if a power cut may bring its name back.
    return log.context.state.write(step)


def drop_names(txn: kv.Txn, key: bytes, segments: Sequence[SegmentInfo]) -> None:
    """Take segments off the manifest, in a transaction of `state`; `discard` removes the files."""
    for segment in segments:
        catalog.drop_segment(txn, key, segment)
        UNCOMMITTED_FILES.put(txn, key, *segment.key, value=None)


def discard(log: PartitionLog, segments: Sequence[SegmentInfo]) -> None:
    """Unlink files that were never in the manifest, or that no reader can be looking for."""
    for segment in segments:
        unlink(log.context.files, log.path_of(segment))
    if segments:
        forget(log, segments)


def unlink(files: Files, path: str) -> None:
    """Unlink a segment file and its key index, which may be missing."""
    files.unlink(key_index_path(path), missing_ok=True)
    files.unlink(path, missing_ok=True)


def forget(log: PartitionLog, segments: Sequence[SegmentInfo]) -> None:
    """Delete the rows of files that are unlinked, or that a row of `live` says to unlink."""

    def step(txn: kv.Txn) -> None:
        for segment in segments:
            UNCOMMITTED_FILES.delete(txn, log.key, *segment.key)

    # After that, not before: a row that is deleted first would leave garbage behind.
    log.context.state.write(step)


# Pending deletes


LITTLE_SPACE = 64 << 20
"""Free bytes below which a disk counts as full: then no file waits for its delay."""


class PendingDelete(NamedTuple):
    """A file to unlink."""

    key: tuple[bytes, int, int]
    """Partition, base offset and id of the segment."""
    due_ms: int
    """In milliseconds since boot."""
    end_offset: int
    path: str


def delete_due_ms(log: PartitionLog) -> int:
    """Return when to unlink a file that this partition drops now, in ms since boot."""
    return log.context.files.uptime_ms() + log.config.file_delete_delay_ms


def schedule_delete(txn: kv.Txn, log: PartitionLog, info: SegmentInfo, due_ms: int) -> None:
    """Schedule the unlinking of a segment's file, in a transaction of `live`."""
    row = due_ms, info.next_offset or 0, log.path_of(info)
    PENDING_DELETES.put(txn, log.key, *info.key, value=row)


def pending_paths(live: kv.Store) -> set[str]:
    """Return the paths of the files to unlink.

    If a process died in the middle, the manifest still names some of them.
    """
    return {row.path for row in live.read(_pending)}


def not_pending(files: Files, live: kv.Store, paths: Sequence[str]) -> list[str]:
    """Return those of the files that the manifest does not name which are not to be deleted."""
    # Read after the manifest, since a name is dropped later than its row is written.
    pending = pending_paths(live) if paths else set()
    pending |= {key_index_path(path) for path in pending}
    return [path for path in paths if path not in pending and files.exists(path)]


def _pending(txn: kv.Txn, *prefix: bytes) -> list[PendingDelete]:
    return [PendingDelete((*key,), *value) for key, value in PENDING_DELETES.scan(txn, *prefix)]


def sweep(context: Context, partition: bytes | None = None, *, early: bool = False) -> int:
    """Unlink the files whose delay is over and that no lease covers, and return how many.

    Args:
        context: The open log.
        partition: Its key; all of them by default.
        early: Also those whose delay is not over, as on a full disk.

    Raises:
        StorageError: A file cannot be unlinked; the next sweep tries again.
    """
    now_ms, prefix = context.files.uptime_ms(), () if partition is None else (partition,)

    def is_held(txn: kv.Txn, row: PendingDelete) -> bool:
        # The holder of a lease may have looked up the file before its name was dropped.
        holds = leases.held_in(txn, row.key[0], now_ms)
        return any(hold.offset < row.end_offset for hold in holds)

    def step(txn: kv.Txn) -> list[PendingDelete]:
        rows = [row for row in _pending(txn, *prefix) if early or row.due_ms <= now_ms]
        return [row for row in rows if not is_held(txn, row)]

    ready = context.live.read(step)
    # A process that died before it dropped the name leaves that to the next one.
    named = context.state.read(lambda txn: {row for row in ready if SEGMENTS.exists(txn, *row.key)})
    rows = [row for row in ready if row not in named]
    if not rows:
        return 0
    for row in rows:
        unlink(context.files, row.path)
    for directory in sorted({row.path.rpartition("/")[0] for row in rows}):
        if context.files.exists(directory):
            context.files.sync_directory(directory)

    def forget(txn: kv.Txn) -> None:
        for row in rows:
            PENDING_DELETES.delete(txn, *row.key)

    context.live.write(forget)
    return len(rows)


def sweep_due(context: Context) -> None:
    """Sweep all partitions; on a full disk early, and the reserve may be used.

    Raises:
        StorageError: As `sweep`.
    """
    full = _is_full(context)
    context.reserve.used_by(lambda: sweep(context, early=full))


def sweep_soon(log: PartitionLog) -> None:
    """Unlink what a partition just dropped, if it has no delay or the disk is full.

    Raises:
        StorageError: As `sweep`.
    """
    full = _is_full(log.context)
    if full or not log.config.file_delete_delay_ms:
        log.context.reserve.used_by(lambda: sweep(log.context, log.key, early=full))


def _is_full(context: Context) -> bool:
    return context.reserve.short or context.files.free_bytes() < LITTLE_SPACE
