"""Moving the start of a partition forward, and dropping the segments that lie before it.

Order is the algorithm (reliability, rule 5).  The start moves in `live` first,
in the transaction that looks at who may not be overtaken; there, too, stands
which files are *doomed*.  Then one transaction of `state` makes the start
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

import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from embedlog import catalog, kv
from embedlog.catalog import PartitionInfo, SegmentInfo
from embedlog.errors import OffsetOutOfRangeError
from embedlog.log import flushing, tail
from embedlog.log.tail import Tail

if TYPE_CHECKING:
    from embedlog.log.context import Context
    from embedlog.log.partition import PartitionLog

DOOMED = b"Z"
"""First letter of the keys in `live` of files that are to be unlinked."""

_SEGMENT = struct.Struct(">QQ")
_DUE = struct.Struct(">Q")

Limit = Callable[[kv.Txn], int]
"""Tells, in the transaction of `live` that moves the start, how far it may move; or raises."""


class Trimmed(NamedTuple):
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
) -> Trimmed:
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
            raise flushing.failed(log)
        _check(log, now, offset)
        if epoch is not None and now.leader_epoch != epoch:
            return Trimmed(now.start_offset)
        done = _trim_locked(log, now, offset, whole, limit)
    finally:
        log.release()
    if done.segments and not log.config.file_delete_delay_ms:
        sweep(log.context, log.key)
    if done.start_offset != now.start_offset:
        log.context.wake.advance()
    return done


def _check(log: PartitionLog, now: Tail, offset: int) -> None:
    if not 0 <= offset <= now.end_offset:
        raise OffsetOutOfRangeError(
            f"the log ends at offset {now.end_offset}",
            topic=log.topic,
            partition=log.partition,
            offset=offset,
            todo="nothing was deleted",
        )


def _trim_locked(
    log: PartitionLog, now: Tail, offset: int, whole: bool, limit: Limit | None
) -> Trimmed:
    goal = _goal(log, now, offset, whole, log.context.live.read(limit) if limit else offset)
    if goal == now.next_offset and not now.empty:
        now = log.roll_locked(now)
    if goal == now.start_offset and not _before(log, goal):
        return Trimmed(goal)
    due = log.context.files.uptime_ms() + log.config.file_delete_delay_ms

    def step(txn: kv.Txn) -> int:
        here = tail.unpack(txn.get(log.tail_key))
        start = goal
        if limit is not None:
            start = min(goal, _goal(log, here, goal, whole, limit(txn)))
        # Nothing before the start is there to be lost, so all of it counts as durable.
        durable = max(here.durable_offset, start)
        txn.put(log.tail_key, here._replace(start_offset=start, durable_offset=durable).pack())
        for info in _before(log, start):
            txn.put(_row_key(log.key, info), _DUE.pack(due) + log.path_of(info).encode())
        return start

    start = log.context.live.write(step)
    dropped = _before(log, start)
    log.context.state.write(lambda txn: _drop(txn, log.key, start, dropped))
    return Trimmed(start, len(dropped), sum(info.size for info in dropped))


def _goal(log: PartitionLog, now: Tail, offset: int, whole: bool, most: int) -> int:
    """How far the start may go: never back, and to where a segment begins if so asked."""
    goal = min(offset, most)
    if whole and goal < now.next_offset:
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


# Files that nothing names any more


def _row_key(key: bytes, info: SegmentInfo) -> bytes:
    return DOOMED + key + _SEGMENT.pack(info.base_offset, info.id)


def doomed(live: kv.Store | kv.Nothing) -> set[str]:
    """Return the paths of the files that are to be unlinked: no strays, though nothing names them.

    Some may still be named, where a process died in the middle.
    """
    return {path for _, _, path in live.read(lambda txn: list(_rows(txn, b"")))}


def _rows(txn: kv.Txn, key: bytes) -> Iterator[tuple[bytes, int, str]]:
    for row_key, row in kv.rows(txn, DOOMED + key):
        yield bytes(row_key), _DUE.unpack_from(row)[0], bytes(row[_DUE.size :]).decode()


def sweep(context: Context, key: bytes = b"", *, early: bool = False) -> int:
    """Unlink the files whose delay is over, and return how many.

    Args:
        context: The open log.
        key: Of one partition; of all of them by default.
        early: Also those whose delay is not over, as on a full disk.

    Raises:
        StorageError: One of them cannot be unlinked; the next sweep tries again.
    """
    now = context.files.uptime_ms()
    found = context.live.read(lambda txn: list(_rows(txn, key)))
    due = [(row_key, path) for row_key, at, path in found if early or at <= now]
    # Still named: its trim died before it dropped the name, and the next one will.
    named = context.state.read(lambda txn: {row for row, _ in due if _is_named(txn, row)})
    gone = [(row_key, path) for row_key, path in due if row_key not in named]
    if not gone:
        return 0
    for _, path in gone:
        context.files.unlink(path, missing_ok=True)
    for directory in sorted({path.rpartition("/")[0] for _, path in gone}):
        if context.files.exists(directory):
            context.files.sync_directory(directory)
    context.live.write(lambda txn: _forget(txn, [row_key for row_key, _ in gone]))
    return len(gone)


def _is_named(txn: kv.Txn, row_key: bytes) -> bool:
    return txn.get(catalog.SEGMENT + row_key[1:]) is not None


def _forget(txn: kv.Txn, row_keys: list[bytes]) -> None:
    for row_key in row_keys:
        txn.delete(row_key)
