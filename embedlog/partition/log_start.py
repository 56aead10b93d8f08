"""Moving the log start offset forward, and dropping the segments below it.

Order is the algorithm.  The start moves in `live` first, in the transaction that
reads the leases and other limits; the same transaction adds the files to the pending
deletes.  Then one transaction of `state` makes the start durable and drops the names.
Only then are files unlinked, immediately or after ``file.delete.delay.ms``.

If the process is killed before the first transaction, nothing has happened; between the
two, readers see the new log, and the next call drops the names; after the second, the
pending deletes say which files are left.  After a power cut, which takes `live`, the log is
the old one or the new one, and files that the manifest does not name are garbage, as always.

A reader of deleted records finishes with the file it has open, or gets
`OffsetOutOfRangeError`.  The rows of producers stay: they only expire with
time, so that a repetition is still recognized.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from embedlog import catalog, keyspace, kv
from embedlog.catalog import PartitionInfo, SegmentInfo
from embedlog.errors import OffsetOutOfRangeError
from embedlog.partition import unnamed_files
from embedlog.partition.roll import roll
from embedlog.partition.tail import TAILS, Tail, unpack

if TYPE_CHECKING:
    from sortedcontainers import SortedDict

    from embedlog.partition.partition_log import PartitionLog

_NAMES_PER_COMMIT = 1_000
"""Names to drop in one transaction: few enough that a full disk has room for its pages."""

Limit = Callable[[kv.Txn], int]
"""Returns how far the start may move, in the transaction of `live` that moves it; or raises."""


class LogStartChange(NamedTuple):
    """What `move_log_start` did."""

    start_offset: int
    """The first offset that can be read now."""
    segments: int = 0
    """How many were dropped."""
    bytes: int = 0
    """The size of their files, which becomes free space once they are unlinked."""


def move_log_start(
    log: PartitionLog,
    offset: int,
    *,
    whole: bool = False,
    epoch: int | None = None,
    limit: Limit | None = None,
    timeout: float | None = None,
) -> LogStartChange:
    """Make ``offset`` the first that can be read, and drop the segments that end below it.

    Durable when it returns.  The start never moves back.  The active segment is
    dropped only if all of its records are below the offset: it is rolled first, so that
    numbering continues.

    Args:
        log: The partition.
        offset: Where the log is to begin; at most its end.
        whole: Move the start only to the beginning of a segment, as retention does.
        epoch: Do nothing unless the log is still in this leader epoch: ``offset``
            was chosen from segments that a truncation may have replaced.
        limit: Called under the lock, and in the transaction that moves the start.
        timeout: Seconds to wait for the partition; ``lock_timeout`` by default.

    Raises:
        OffsetOutOfRangeError: Past the high watermark.
        DurabilityError: A flush failed, so nothing may change until `repair`.
        LockTimeoutError: Another process holds the partition.
        DiskFullError, StorageError: The start may have moved; the next call continues.
        Exception: What ``limit`` raised; nothing was changed.
    """
    log.context.check_writable()
    with log.owned(timeout) as tail:
        if tail.failed:
            raise log.flush_failed()
        if not 0 <= offset <= tail.high_watermark:
            raise OffsetOutOfRangeError(
                f"The log ends at offset {tail.high_watermark}",
                **log.where,
                offset=offset,
                todo="Nothing was deleted.",
            )
        if epoch is not None and tail.leader_epoch != epoch:
            return LogStartChange(tail.start_offset)
        change = _move_locked(log, tail, offset, whole, limit)
    if change.segments:
        unnamed_files.sweep_soon(log)
    if change.start_offset != tail.start_offset:
        log.context.wake.advance()
    return change


def _move_locked(
    log: PartitionLog, tail: Tail, offset: int, whole: bool, limit: Limit | None
) -> LogStartChange:
    highest = log.context.live.read(limit) if limit else offset
    goal = _goal(log.segments, tail, offset, whole, highest)
    if goal == tail.log_end_offset and not tail.empty:
        tail = roll(log, tail)
    # Before the write: in a transaction of `live` nothing may read `state`.
    segments = log.segments
    if goal == tail.start_offset and not _before(segments, goal):
        return LogStartChange(goal)
    due = unnamed_files.delete_due_ms(log)

    def step(txn: kv.Txn) -> int:
        current = unpack(txn.get(log.tail_key))
        start = goal
        if limit is not None:
            start = min(goal, _goal(segments, current, goal, whole, limit(txn)))
        # Nothing below the start can be lost any more, so all of it counts as durable.
        durable = max(current.durable_offset, start)
        changed = current._replace(start_offset=start, durable_offset=durable)
        TAILS.put(txn, log.key, value=changed)
        for info in _before(segments, start):
            unnamed_files.schedule_delete(txn, log, info, due)
        return start

    start = log.context.live.write(step)
    dropped = _before(segments, start)
    # In offset order: what a crash leaves is below the start, and the next call drops it.
    for number in range(0, max(len(dropped), 1), _NAMES_PER_COMMIT):

        def drop(txn: kv.Txn, number: int = number) -> None:
            _drop(txn, log.key, start, dropped[number : number + _NAMES_PER_COMMIT])

        log.context.state.write(drop)
    return LogStartChange(start, len(dropped), sum(info.size for info in dropped))


def _goal(
    segments: SortedDict[int, SegmentInfo], tail: Tail, offset: int, whole: bool, highest: int
) -> int:
    """Return how far the start may move: never back, and with ``whole`` to a segment's base."""
    goal = min(offset, highest)
    if whole and goal < tail.log_end_offset:
        base: int = segments.peekitem(max(segments.bisect_right(goal) - 1, 0))[0]
        goal = min(goal, base)
    return max(goal, tail.start_offset)


def _before(segments: SortedDict[int, SegmentInfo], start: int) -> list[SegmentInfo]:
    """Return the sealed segments that end at or below an offset."""
    sealed = takewhile(lambda info: info.sealed, segments.values())
    return list(takewhile(lambda info: info.next_offset <= start, sealed))


def _drop(txn: kv.Txn, key: bytes, start: int, segments: list[SegmentInfo]) -> None:
    """Make the start durable, and drop the segments below it with their rows."""
    info = catalog.PARTITIONS.get(txn, key) or PartitionInfo()
    info = info._replace(start_offset=max(info.start_offset, start))
    catalog.PARTITIONS.put(txn, key, value=info)
    for segment in segments:
        catalog.drop_segment(txn, key, segment)
    epochs = catalog.epochs(txn, key)
    # The last epoch that began before the start is the epoch of the first record now (A37).
    later = [entry for entry in epochs if entry[1] > start]
    if len(later) + 1 < len(epochs):
        keyspace.LEADER_EPOCHS.put(txn, key, value=[(epochs[-len(later) - 1][0], start), *later])
