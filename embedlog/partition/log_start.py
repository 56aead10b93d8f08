"""Moving the start of a partition forward, and dropping the segments that lie before it.

Order is the algorithm (R5).  The start moves in `live` first,
in the transaction that looks at who may not be overtaken; there, too, stands
which files are `dooming`'s.  Then one transaction of `state` makes the start
durable and drops the names.  Only then are files unlinked, at once or after
``file.delete.delay.ms``, by whoever sweeps next.

Killed before the first transaction, nothing happened; between the two, readers
see the new log, and the next trim drops the names; after the second, the files
are in nobody's way, and the rows say who they are.  After a power cut `live`
is gone: the log is the old one or the new one, and what the manifest does not
name is garbage, as always.

A reader that is overtaken finishes with the file it holds, or is told that its
offset is out of range (A21, P20).  What is known of producers stays: they are
forgotten by time only, so that a repetition is still known as one (G19).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from embedlog import catalog, kv
from embedlog.catalog import PartitionInfo, SegmentInfo
from embedlog.errors import OffsetOutOfRangeError
from embedlog.partition import flush, pending_deletes, tail
from embedlog.partition.tail import Tail

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

_AT_ONCE = 1_000
"""Names to drop in one transaction: so few that a full disk has room for its pages."""

Limit = Callable[[kv.Txn], int]
"""Tells, in the transaction of `live` that moves the start, how far it may move; or raises."""


class LogStartChange(NamedTuple):
    """What a trim did."""

    start_offset: int
    """The first offset that can be read now."""
    segments: int = 0
    """How many were dropped."""
    bytes: int = 0
    """What their files hold; the disk has it back once they are unlinked."""


def trim(
    log: PartitionLog,
    offset: int,
    *,
    whole: bool = False,
    epoch: int | None = None,
    limit: Limit | None = None,
    timeout: float | None = None,
) -> LogStartChange:
    """Make ``offset`` the first that can be read, and drop what lies wholly before it.

    Durable when it returns.  The start never moves back (A30).  The active
    segment is dropped only if all of it is asked for: it is rolled first, so
    that numbering goes on (C4).

    Args:
        log: The partition.
        offset: Where the log is to begin; at most its end.
        whole: Move only so far as whole segments go, as retention does (C1).
        epoch: Do nothing unless the log is still in this leader epoch: ``offset``
            was chosen by looking at segments that a cut may have replaced.
        limit: Asked under the lock, and in the transaction that moves the start.
        timeout: Seconds to wait for the partition; as long as for any lock by default.

    Raises:
        OffsetOutOfRangeError: Past the end of what is published (A30).
        DurabilityError: A flush failed, so nothing may change until `repair` (P9).
        LockTimeoutError: Another process holds the partition.
        DiskFullError, StorageError: The start may have moved; the next trim goes on.
        Exception: Whatever ``limit`` raised; nothing was changed.
    """
    log.context.check_writable()
    log.acquire(timeout)
    try:
        now = log.tail_locked()
        if now.failed:
            raise flush.failed(log)
        _check(log, now, offset)
        if epoch is not None and now.leader_epoch != epoch:
            return LogStartChange(now.start_offset)
        done = _trim_locked(log, now, offset, whole, limit)
    finally:
        log.release()
    if done.segments:
        pending_deletes.sweep_soon(log)
    if done.start_offset != now.start_offset:
        log.context.wake.advance()
    return done


def _check(log: PartitionLog, now: Tail, offset: int) -> None:
    if not 0 <= offset <= now.high_watermark:
        raise OffsetOutOfRangeError(
            f"the log ends at offset {now.high_watermark}",
            topic=log.topic,
            partition=log.partition,
            offset=offset,
            todo="nothing was deleted",
        )


def _trim_locked(
    log: PartitionLog, now: Tail, offset: int, whole: bool, limit: Limit | None
) -> LogStartChange:
    goal = _goal(log, now, offset, whole, log.context.live.read(limit) if limit else offset)
    if goal == now.log_end_offset and not now.empty:
        now = log.roll_locked(now)
    if goal == now.start_offset and not _before(log, goal):
        return LogStartChange(goal)
    due = pending_deletes.due(log)

    def step(txn: kv.Txn) -> int:
        here = tail.unpack(txn.get(log.tail_key))
        start = goal
        if limit is not None:
            start = min(goal, _goal(log, here, goal, whole, limit(txn)))
        # Nothing before the start is there to be lost, so all of it counts as durable.
        durable = max(here.durable_offset, start)
        txn.put(log.tail_key, here._replace(start_offset=start, durable_offset=durable).pack())
        for info in _before(log, start):
            pending_deletes.put(txn, log, info, due)
        return start

    start = log.context.live.write(step)
    dropped = _before(log, start)
    # The first ones first: what is left after a crash lies below the start, and goes next time.
    for place in range(0, max(len(dropped), 1), _AT_ONCE):
        some = dropped[place : place + _AT_ONCE]
        _drop_some(log, start, some)
    return LogStartChange(start, len(dropped), sum(info.size for info in dropped))


def _goal(log: PartitionLog, now: Tail, offset: int, whole: bool, most: int) -> int:
    """How far the start may go: never back, and to where a segment begins if so asked."""
    goal = min(offset, most)
    if whole and goal < now.log_end_offset:
        bases = log.segments.keys()
        place = log.segments.bisect_right(goal)
        goal = bases[place - 1] if place else now.start_offset
    return max(goal, now.start_offset)


def _before(log: PartitionLog, start: int) -> list[SegmentInfo]:
    """Return the sealed segments that end at or below an offset."""
    found = []
    for info in log.segments.values():
        if info.next_offset is None or info.next_offset > start:
            break
        found.append(info)
    return found


def _drop_some(log: PartitionLog, start: int, segments: list[SegmentInfo]) -> None:
    log.context.state.write(lambda txn: _drop(txn, log.key, start, segments))


def _drop(txn: kv.Txn, key: bytes, start: int, segments: list[SegmentInfo]) -> None:
    """Make the start durable, and forget the segments before it with all that is theirs."""
    info = catalog.partition(txn, key) or PartitionInfo()
    catalog.put_partition(txn, key, info._replace(start_offset=max(info.start_offset, start)))
    for segment in segments:
        catalog.drop_segment(txn, key, segment)
    known = catalog.epochs(txn, key)
    # The last one that began before the start is the first one's epoch now (A37).
    kept = [entry for entry in known if entry[1] > start]
    if len(kept) + 1 < len(known):
        catalog.put_epochs(txn, key, [(known[-len(kept) - 1][0], start), *kept])
