"""Files that the manifest no longer names: they are unlinked after a delay, by the next sweep.

During the delay, a reader that looked up a file before its name was dropped can still open
it.  Rows in `live` say which files are to be unlinked, and when.  A power cut takes these
rows too; then a file that the manifest does not name is garbage, as always.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from embedlog import kv
from embedlog.catalog import SegmentInfo
from embedlog.keyspace import PENDING_DELETES, SEGMENTS
from embedlog.partition import leases
from embedlog.partition.state import Context

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

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


def due(log: PartitionLog) -> int:
    """Return when to unlink a file that this partition drops now, in ms since boot."""
    return log.context.files.uptime_ms() + log.config.file_delete_delay_ms


def put(txn: kv.Txn, log: PartitionLog, info: SegmentInfo, due_ms: int) -> None:
    """Schedule the unlinking of a segment's file, in a transaction of `live`."""
    row = due_ms, info.next_offset or 0, log.path_of(info)
    PENDING_DELETES.put(txn, log.key, *info.key, value=row)


def paths(live: kv.Store) -> set[str]:
    """Return the paths of the files to unlink, which are no strays.

    If a process died in the middle, the manifest still names some of them.
    """
    return {row.path for row in live.read(_pending)}


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
        context.files.unlink(row.path, missing_ok=True)
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
