"""Checkpoints: transactions that are committed in `live` reach the disk together.

A small transaction is one commit of `live` (`publish/live_commit.py`), which moves the ends of its
partitions and the offsets of a group at once.  A process that dies takes nothing of that along, but
a power cut does: `live` is gone, and recovery would take whole batches for a part of the log that
belong to no transaction, or to one of which another partition has lost its batches.  So `state` has
a *rollback point* for each partition that such transactions write to, from before the first one:
recovery ends the partition there.

A checkpoint moves all rollback points at once, to the ends as of one instant, in this order:

1. One transaction of `live` reads the ends, and all offsets that are not in `state`.
2. The files are flushed up to these ends.
3. One transaction of `state` moves the recovery points and the rollback points there, and writes
   the offsets.  It starts over if another process has moved a rollback point meanwhile.
4. One transaction of `live` makes visible what waited for the flush: records and offsets of
   transactions with ``durability="fsync"``.

Where nothing was written since, and the partition's lock is free, housekeeping and `close` then
delete the rollback points.

It takes no lock of a partition, so a process that is stopped delays none, and the caller may hold
some.  A lock only keeps processes from doing the same work: who waited for it finds it done, so
transactions share a flush.

Everything else that is written to a partition comes after its rollback point was deleted: who takes
the lock of the partition takes a checkpoint first (`PartitionLog.finish_locked`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from embedlog import catalog, keyspace, kv
from embedlog.errors import (
    DurabilityError,
    EmbedlogError,
    UnknownTopicOrPartitionError,
)
from embedlog.groups import offsets
from embedlog.lazy import logging
from embedlog.partition import flush, producer_state
from embedlog.partition.producer_state import ProducerState
from embedlog.partition.state import Context
from embedlog.partition.tail import TAILS, UNFLUSHED, Tail, Unflushed, peek_tail

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

_logger = logging.getLogger("embedlog.partition")
CHECKPOINT_SECONDS = 1.0
"""How long transactions that are not flushed may wait for the next one, which then flushes them."""
_TURN_PATH = "locks/checkpoint"
_TURN_SECONDS = 1.0
"""How long to wait for the checkpoint of another process, which may be stopped."""


class RollbackPoint(NamedTuple):
    """Where a partition ends after a power cut, unless it ends before."""

    number: int
    """Of what wrote it; no other rollback point has it."""
    offset: int


Version = tuple[int, int]
"""Of a transaction: the id of its producer, and a number, which begins with the epoch of that."""


class LastTransaction(NamedTuple):
    """The last transaction of a producer's name: it fences all of older versions."""

    producer_id: int
    number: int
    committed: int
    """The version of `live` that committed it."""

    @property
    def version(self) -> Version:
        """Return its version."""
        return self[:2]


TRANSACTIONS = keyspace.TRANSACTIONS.typed(LastTransaction)
"""In `live`."""
ROLLBACK_POINTS = keyspace.ROLLBACK_POINTS.typed(RollbackPoint)
"""In `state`."""
Points = dict[bytes, RollbackPoint]
"""By the key of the partition."""


class Unsaved(NamedTuple):
    """What a checkpoint makes durable, as of one instant of `live`."""

    version: int
    """Of `live`."""
    tails: dict[bytes, Tail]
    """Without those of partitions that a failed flush has made read-only."""
    producers: dict[bytes, dict[int, ProducerState]]
    commits: offsets.Unsaved
    """Offsets that are visible, and not in `state`."""
    notes: dict[tuple[bytes, bytes], offsets.Note]
    """Offsets that transactions have committed, and that are not visible yet."""


def points_of(txn: kv.Txn) -> Points:
    """Return the rollback points of all partitions, from `state`."""
    return {key: point for (key,), point in ROLLBACK_POINTS.scan(txn)}


def begin(context: Context, ends: Mapping[PartitionLog, Tail]) -> None:
    """Write rollback points at the ends of partitions that have none; under their locks."""

    def step(txn: kv.Txn) -> None:
        number = catalog.next_number(txn, "publication")
        for log, tail in ends.items():
            point = RollbackPoint(number, tail.log_end_offset)
            ROLLBACK_POINTS.put(txn, log.key, value=point)

    context.state.write(step)
    for log in ends:
        log.note_rollback_point(True)


def note_written(txn: kv.Txn, log: PartitionLog, before: Tail) -> None:
    """Note that a transaction writes from this tail on, in the commit of `live` that does it."""
    if not UNFLUSHED.exists(txn, log.key):
        end = Unflushed(before.log_end_offset, before.log_end_position)
        UNFLUSHED.put(txn, log.key, value=end)


def forget(log: PartitionLog) -> None:
    """Delete the rollback point of a partition that was recovered, under its lock."""
    if ROLLBACK_POINTS.exists(log.context.state, log.key):
        log.context.state.write(lambda txn: ROLLBACK_POINTS.delete(txn, log.key))
    log.note_rollback_point(False)


# Taking one


def last_version(context: Context) -> int:
    """Return the version of `live` up to which transactions are flushed."""
    return keyspace.CHECKPOINTED.get(context.live) or 0


def take(context: Context, holder: PartitionLog | None = None, version: int | None = None) -> None:
    """Make transactions, and the offsets that groups committed, survive a power cut.

    Args:
        context: The log.
        holder: A partition whose lock the caller holds: its rollback point is deleted.
        version: Do nothing if the transactions up to this version of `live` are flushed.  For a
            transaction, which others will follow: the rollback points stay.

    A partition whose flush fails is read-only from now on, which is logged; its rollback point
    stays, and all others are flushed.

    Raises:
        StorageError: Nothing is lost, and the next one may succeed.
    """
    flushed = None
    while flushed is None:
        with _turn(context, version) as needed:
            flushed = _take(context) if needed else []
            if flushed is not None and version is None:
                _delete_points(context, flushed, holder)
        # Without the turn, for which others wait here too.
        context.wake.advance()


def take_if_due(context: Context, version: int) -> None:
    """Take a checkpoint if transactions have waited for one long enough."""
    if monotonic() < context.checkpoint_due:
        return
    context.checkpoint_due = monotonic() + CHECKPOINT_SECONDS
    # Of many processes, one takes it.
    before, context.checkpointed = context.checkpointed, last_version(context)
    if context.checkpointed == before:
        try:
            take(context, version=version)
        except EmbedlogError as error:
            # They are committed all the same, and the next one tries again.
            _logger.warning("Transactions are not flushed yet: %s", error)


@contextmanager
def _turn(context: Context, version: int | None) -> Iterator[bool]:
    """Wait for the checkpoints of other threads, and for a while for those of other processes.

    Yields:
        Whether one is needed still, for the transactions up to a version of `live`.
    """
    with (
        context.checkpointing,
        context.files.opened(_TURN_PATH, write=True, create=True) as fd,
    ):
        until, needed = monotonic() + _TURN_SECONDS, True
        context.wake.join()
        try:
            while True:
                seen = context.wake.value()
                if version is not None:
                    needed = last_version(context) < version
                if not needed or context.files.try_lock(fd) or monotonic() >= until:
                    break
                context.wake.wait(seen, until - monotonic())
        finally:
            context.wake.leave()
        yield needed


def _take(context: Context) -> list[PartitionLog] | None:
    """Take a checkpoint; return the partitions, or None if it must start over."""
    before = context.live.read(offsets.unsaved).keys()
    points, journaled = context.state.read(
        lambda txn: (points_of(txn), {key: offsets.JOURNAL.get(txn, *key) for key in before})
    )
    if not points:
        return []
    logs = {key: log for key in points if (log := context.partition_of(key)) is not None}
    oldest = {key: log.oldest_producer_ms() for key, log in logs.items()}
    unsaved, idle = context.live.read(lambda txn: _read(txn, oldest)), []
    # What began in between may have committed before it was read, which lacks its partitions.
    if unsaved.commits.keys() - before or context.state.read(points_of) != points:
        return None
    for key, point in points.items():
        # Flushed by the last one, and nothing was written since.
        tail = unsaved.tails.get(key)
        if tail is not None and tail.log_end_offset == point.offset <= tail.durable_offset:
            idle.append(logs[key])
            del unsaved.tails[key]
    _flush(context, logs, unsaved)

    def save(txn: kv.Txn) -> bool:
        if any(ROLLBACK_POINTS.get(txn, key) != point for key, point in points.items()):
            return False
        number = catalog.next_number(txn, "publication")
        for key, tail in unsaved.tails.items():
            flush.put_recovery_point(txn, key, tail, unsaved.producers[key])
            ROLLBACK_POINTS.put(txn, key, value=RollbackPoint(number, tail.log_end_offset))
        for commit, entry in journaled.items():
            # A publication has saved a newer offset, which `live` did not have when it was read.
            is_newer = entry is not None and entry.is_committed_by(unsaved.notes.get(commit))
            if is_newer or offsets.JOURNAL.get(txn, *commit) != entry:
                unsaved.commits.pop(commit, None)
        offsets.save(txn, unsaved.commits, unsaved.notes)
        return True

    if not context.state.write(save):
        return None
    context.live.write(lambda txn: _publish(txn, logs, unsaved))
    return [*idle, *(logs[key] for key in unsaved.tails)]


def _read(txn: kv.Txn, oldest: Mapping[bytes, int]) -> Unsaved:
    """Read what is to be made durable of partitions, in a transaction of `live`."""
    tails = {key: tail for key in oldest if (tail := peek_tail(txn, key)) is not None}
    producers = {key: producer_state.active_since(txn, key, oldest[key]) for key in tails}
    notes = dict(offsets.PENDING.scan(txn))
    return Unsaved(txn.id(), tails, producers, offsets.unsaved(txn), notes)


def _flush(context: Context, logs: Mapping[bytes, PartitionLog], unsaved: Unsaved) -> None:
    """Flush the partitions, and leave out those that are read-only, now or before."""
    failed = [logs[key] for key, tail in unsaved.tails.items() if tail.failed]
    for key in unsaved.tails.keys() - {log.key for log in failed}:
        try:
            flush.sync_one(logs[key], flush.sync_files)
        except UnknownTopicOrPartitionError:
            continue  # Its rollback point is deleted with it, so all of this starts over.
        except DurabilityError as error:
            _logger.error("Transactions are not flushed: %s", error)
            failed.append(logs[key])
    if failed:
        undone = context.live.write(lambda txn: _undo(txn, logs, failed))
        if undone:
            failed = list({*failed, *undone})
            unsaved.notes.clear()
        for log in failed:
            unsaved.tails.pop(log.key, None)


def _undo(
    txn: kv.Txn, logs: Mapping[bytes, PartitionLog], failed: Collection[PartitionLog]
) -> list[PartitionLog]:
    """Undo what waits for this flush, if a part of it cannot be flushed; in `live`.

    All partitions with such records are read-only from now on, and the repair removes them.

    Returns:
        These partitions.
    """
    waiting = []
    for key, log in logs.items():
        tail = peek_tail(txn, key)
        is_visible = tail is None or tail.high_watermark == tail.log_end_offset
        if tail is not None and not is_visible and UNFLUSHED.exists(txn, key):
            waiting.append((log, tail))
    if not any(log in failed for log, _ in waiting):
        return []
    for log, tail in waiting:
        TAILS.put(txn, log.key, value=tail._replace(failed=True))
        UNFLUSHED.delete(txn, log.key)
    offsets.drop_written(txn)
    done = keyspace.CHECKPOINTED.get(txn) or 0
    for name, last in list(TRANSACTIONS.scan(txn)):
        if last.committed > done:
            # Its producer may commit it again.
            TRANSACTIONS.put(txn, *name, value=last._replace(number=last.number - 1))
    return [log for log, _ in waiting]


def _publish(txn: kv.Txn, logs: Mapping[bytes, PartitionLog], unsaved: Unsaved) -> None:
    """Make what was flushed durable for readers, and visible, in a transaction of `live`."""
    for key, tail in unsaved.tails.items():
        end = Unflushed(tail.log_end_offset, tail.log_end_position)
        if (noted := UNFLUSHED.get(txn, key)) is not None and noted < end:
            UNFLUSHED.put(txn, key, value=end)
        flush.publish(logs[key], txn, tail)
    offsets.note_saved(txn, unsaved.commits, unsaved.notes)
    done = keyspace.CHECKPOINTED.get(txn) or 0
    keyspace.CHECKPOINTED.put(txn, value=max(done, unsaved.version))


def _delete_points(
    context: Context, logs: Collection[PartitionLog], holder: PartitionLog | None
) -> None:
    """Delete the rollback points after which nothing was written, where the lock is free."""
    with ExitStack() as locks:
        idle = []
        for log in logs:
            if holder is not None and log.key == holder.key:
                idle += [holder] if _is_idle(holder) else []
                continue
            with suppress(EmbedlogError):
                log.acquire(0)
                locks.callback(log.release)
                idle += [log] if _is_idle(log) else []
        if not idle:
            return
        # In this order: without a rollback point nobody looks for the other row.
        context.live.write(lambda txn: [UNFLUSHED.delete(txn, log.key) for log in idle])
        context.state.write(lambda txn: [ROLLBACK_POINTS.delete(txn, log.key) for log in idle])
        for log in idle:
            log.note_rollback_point(False)


def _is_idle(log: PartitionLog) -> bool:
    """Whether a partition ends at its rollback point; removes what a killed process left there."""
    log.context.live.catch_up()
    tail = peek_tail(log.context.live, log.key)
    point = ROLLBACK_POINTS.get(log.context.state, log.key)
    log.refresh()
    if tail is None or point is None or tail.failed or tail.segment_id != log.active_segment.id:
        return False
    if tail.log_end_offset != point.offset:
        return False
    log.file_at(tail)
    return True
