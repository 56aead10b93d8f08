"""Appending batches to a partition.  Order is the algorithm.

An append takes the partition's lock (thread, then `flock`), reads the tail row, which
another process may have moved, truncates what a killed writer left past it, writes the bytes,
and publishes them with one transaction on `live`.  With ``durability="fsync"`` it releases
the lock before it flushes, so that concurrent appends share the flush, and publishes after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from embedlog import catalog, index, kv
from embedlog.batch import EXPLICIT_OFFSETS, HEADERS, MAX_GAP, TOMBSTONES, EncodedBatch
from embedlog.batch.add_headers import with_timestamp
from embedlog.config import LONG_MAX
from embedlog.errors import (
    ConflictError,
    DiskFullError,
    FencedLeaderEpochError,
    NotLeaderOrFollowerError,
    OffsetsOutOfOrderError,
    UnexpectedAppendOffsetError,
)
from embedlog.index import IndexEntry
from embedlog.partition import (
    append_condition,
    flush,
    leader_epochs,
    lookup,
    preallocation,
    producer_state,
    roll,
    validation,
)
from embedlog.partition.append_condition import AppendCondition
from embedlog.partition.append_fast import append_fast
from embedlog.partition.producer_state import PRODUCERS, ProducerState
from embedlog.partition.tail import CachedTail, Tail, next_append_time, unpack
from embedlog.record import Appended
from embedlog.segment import SegmentFile

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

_MAX_CACHED_PRODUCERS = 64
"""Cache the rows of up to this many producers from one append to the next."""


def append(
    log: PartitionLog,
    encoded: Sequence[EncodedBatch],
    durability: str | None,
    timeout: float | None,
    condition: AppendCondition | None = None,
    again: bool = True,
) -> list[Appended]:
    """Write batches at the end and publish them; see `PartitionLog.append`.

    With ``again`` it tries twice on a full disk, if preallocated space can be given back.
    """
    if not encoded:
        return []
    log.context.check_appendable()
    if condition is not None:
        condition.look_up(log)
    synced, before = (durability or log.context.durability) == "fsync", None
    try:
        with log.owned(timeout) as tail:
            before = tail
            file, receipt = log.file_at(tail), None
            if condition is not None and not _is_repeated(log, tail, encoded[0]):
                condition.check(log, tail)
            if synced and log.preallocated < encoded[0].size:
                preallocation.extend(log, file, tail, encoded)
            if len(encoded) == 1 and (not synced or flush.is_alone(log, tail, encoded[0])):
                batch = encoded[0]
                # Kafka may count 16 bytes more for a record than it takes here (`batch.limits`).
                if batch.size + 16 * batch.count <= log.rules.fast_max_bytes:
                    receipt = append_fast(log, file, tail, batch, synced)
            if receipt is None:
                validation.check(log, encoded)
                pending = append_locked(log, file, tail, encoded, synced)
    except DiskFullError:
        if again and _is_room_again(log, before):
            return append(log, encoded, durability, timeout, condition, again=False)
        log.context.reserve.mark_full()
        raise
    except ConflictError:
        append_condition.publish_found(log, before)
        raise
    if receipt is not None:
        log.context.wake.advance()
        return [receipt]
    finish(log, encoded, pending.tail, synced)
    return pending.receipts


def _is_repeated(log: PartitionLog, tail: Tail, batch: EncodedBatch) -> bool:
    """Whether a batch was sent before: then its condition held, and may not hold any more."""
    return PendingAppend(log, tail, publish=False).receipt_of_repeated(batch) is not None


def _is_room_again(log: PartitionLog, before: Tail | None) -> bool:
    """Give preallocated space back; whether that helps an append that has published nothing.

    Args:
        log: The partition.
        before: Its tail when the append began; None if that was not known yet.
    """
    given = preallocation.give_back(log)
    return given and (before is None or log.tail().log_end_offset == before.log_end_offset)


def append_locked(
    log: PartitionLog,
    file: SegmentFile,
    tail: Tail,
    encoded: Sequence[EncodedBatch],
    synced: bool,
) -> PendingAppend:
    """Append batches after a tail; rolls as often as needed.

    With ``synced`` they are written, and a flush must publish them.
    """
    assert log.thread_lock.locked()
    pending = PendingAppend(log, tail, publish=not synced)
    for batch in validation.in_current_schema(log, encoded):
        receipt = pending.receipt_of_repeated(batch)
        if receipt is not None:
            pending.receipts.append(receipt)
            continue
        if roll.is_due(log, file, pending.tail, batch):
            commit(log, file, pending)
            pending.begin(roll.roll(log, pending.tail, roll.columns_of(batch), synced=synced))
            file = log.active_file()
        pending.add(validation.with_columns_of(log, log.active_segment, batch))
    commit(log, file, pending)
    return pending


def commit(log: PartitionLog, file: SegmentFile, pending: PendingAppend) -> None:
    """Write the pending batches and publish them.

    To continue with others, `PendingAppend.begin` must follow.
    """
    end = pending.tail.log_end_offset
    if pending.buffers:
        log.commit_locked(file, pending.buffers, pending.position, end, pending.publish)
        log.note_published(pending.published)
    elif pending.publish_repeated():
        log.context.live.write(pending.publish)


def finish(log: PartitionLog, encoded: Sequence[EncodedBatch], tail: Tail, synced: bool) -> None:
    """Flush what was appended, if required, and wake readers; without the partition's lock."""
    note_appended(log, encoded)
    if synced or flush.is_due(log, tail):
        flush.flush_to(log, tail)
    log.context.wake.advance()


def note_appended(log: PartitionLog, encoded: Sequence[EncodedBatch]) -> None:
    """Note that the next flush has work, and warn of records that retention deletes soon.

    Must be called without the partition's lock.
    """
    log.mark_dirty()
    validation.warn_if_overdue(log, encoded)


class PendingAppend:
    """Batches stamped with their offsets, and the rows that will make them visible.

    Lives under the partition's lock, for one append.

    Args:
        log: The partition.
        tail: The tail that the batches go after.
        publish: Move the high watermark too; False if a flush must come first.
    """

    def __init__(self, log: PartitionLog, tail: Tail, *, publish: bool) -> None:
        self._log, self._publish = log, publish
        self._now_ms = log.context.clock()
        self.receipts: list[Appended] = []
        self.published: CachedTail
        self.begin(tail)

    def begin(self, tail: Tail) -> None:
        """Start at another tail, with no batches."""
        self.tail = tail
        cached = self._log.cached_tail
        if cached is None or cached.tail is not tail:
            cached = CachedTail(-1, tail.pack(), tail, {})
        # Rows of producers change only under the partition's lock: those read before are valid.
        self._version, self._row, _, self._cached = cached
        self.position = tail.log_end_position
        self._appended_ms = next_append_time(tail.appended_ms, self._now_ms)
        self.buffers: list[Any] = []
        self.entries: list[IndexEntry] = []
        self._producers: dict[int, ProducerState] = {}

    def publish_repeated(self) -> bool:
        """Move the high watermark past repeated batches; return whether that was necessary.

        The process that wrote one may have died before its flush, and a repetition without
        a flush would get a receipt for a record that cannot be read.
        """
        tail = self.tail
        repeated = [receipt.next_offset for receipt in self.receipts if receipt.duplicate]
        if not self._publish or max(repeated, default=0) <= tail.high_watermark:
            return False
        self.tail = tail._replace(
            high_watermark=tail.log_end_offset, high_watermark_position=tail.log_end_position
        )
        return True

    def receipt_of_repeated(self, batch: EncodedBatch) -> Appended | None:
        """Return the first receipt of a batch that was sent before; None if it was not.

        Raises:
            OutOfOrderSequenceError, InvalidProducerEpochError: As `PartitionLog.append`.
        """
        if batch.producer_id is None:
            return None
        assert batch.producer_epoch is not None
        assert batch.base_sequence is not None
        sent = producer_state.check(
            self._producer(batch.producer_id),
            batch.producer_epoch,
            batch.base_sequence,
            batch.count if batch.span is None else batch.span,
        )
        return None if sent is None else Appended(sent.base_offset, sent.next_offset, None, True)

    def _producer(self, producer_id: int) -> ProducerState | None:
        producer = self._producers.get(producer_id) or self._cached.get(producer_id)
        if producer is None:
            producer = PRODUCERS.get(self._log.context.live, self._log.key, producer_id)
            if producer is not None:
                self._cached[producer_id] = producer
        return producer

    def add(self, batch: EncodedBatch, offset: int | None = None, identical: bool = False) -> None:
        """Add a batch after the others.

        Args:
            batch: The batch, with the columns of the active segment.
            offset: Where it begins, if not at the end of the batch before.
            identical: Whether it keeps its leader epoch and its timestamps.
        """
        log, tail = self._log, self.tail
        append_time = self._now_ms if log.rules.uses_append_time else None
        expected, position = tail.log_end_offset, tail.log_end_position
        base, epoch = expected if offset is None else offset, tail.leader_epoch
        if identical:
            append_time = None
            epoch = epoch if batch.leader_epoch is None else batch.leader_epoch
        elif append_time is not None and batch.flags & EXPLICIT_OFFSETS:
            batch = with_timestamp(batch, append_time)
        count = batch.count if batch.span is None else batch.span
        next_offset, end = base + count, position + batch.size
        self.buffers += batch.stamp(base, epoch, append_time, gap=base - expected)
        timestamp = batch.max_timestamp if append_time is None else append_time
        newest = tail.max_timestamp
        unindexed = tail.unindexed
        if unindexed > log.config.index_interval_bytes:
            self.entries.append(IndexEntry(base, position, newest))
            unindexed = 0
        if batch.producer_id is not None:
            producer_epoch, first = batch.producer_epoch, batch.base_sequence
            assert producer_epoch is not None
            assert first is not None
            sent = first, producer_state.after(first, count - 1), base, next_offset
            producer = self._producer(batch.producer_id)
            # The batches of another log were checked there; here their producer may be fenced.
            if producer is None or producer_epoch >= producer.epoch:
                producer = producer_state.note(producer, producer_epoch, sent, self._now_ms)
                self._producers[batch.producer_id] = producer
        first, visible = tail.base_offset, (next_offset, end)
        if not self._publish:
            visible = tail.high_watermark, tail.high_watermark_position
        self.tail = Tail(
            *(tail.segment_id, first, next_offset, end, *visible),
            *(tail.durable_offset, tail.start_offset, tail.leader_epoch),
            timestamp if timestamp > newest else newest,
            timestamp if expected == first else tail.first_timestamp,
            tail.created_ms,
            self._appended_ms,
            unindexed + batch.size,
            tail.flushed_ms,
        )
        self.receipts.append(Appended(base, next_offset, append_time))

    def publish(self, txn: kv.Txn) -> None:
        """Make the batches part of the log, in a transaction of `live`.

        Raises:
            DurabilityError: A flush failed meanwhile.
        """
        log, version = self._log, txn.id()
        # Versions have no gaps: the next one after the tail's means that nothing came between.
        if version != self._version + 1:
            row = txn.get(log.tail_key)
            if row is not None and row != self._row:
                # A flush, which works without the partition's lock, changed it meanwhile.
                current, before = unpack(row), unpack(self._row)
                if current.failed:
                    raise log.flush_failed()
                if current[:4] != before[:4]:
                    # Only where another directory is read now, which lacks a write of before.
                    raise NotLeaderOrFollowerError(
                        f"The log ends at offset {current.log_end_offset}, and ended at "
                        f"{before.log_end_offset} when the append began",
                        **log.where,
                        todo="Try again.",
                    )
                self.tail = self.tail.with_flush(current)
        packed = self.tail.pack()
        txn.put(log.tail_key, packed)
        for entry in self.entries:
            index.put(txn, log.key, self.tail.segment_id, entry)
        cached, changed = self._cached, self._producers
        if changed:
            for producer_id, producer in changed.items():
                txn.put(producer_state.key(log.key, producer_id), producer.row)
            cached = {**cached, **changed} if len(cached) < _MAX_CACHED_PRODUCERS else changed
        self.published = CachedTail(version, packed, self.tail, cached)


# Appending at given offsets, as a copy of another log does.
#
# A batch says in its head how many offsets before it have no record.  So the active segment
# takes batches with gaps before them, and recovery can tell a gap from lost records: the batch
# after a gap names the end of the batch before it.  Order:
#
# 1. If the manifest says that each offset of the active segment has a record, that is
#    corrected, in a transaction of its own.
# 2. The batches are written and published, as by every append.
#
# Killed between the two, the log has a segment without gaps whose records are counted all the
# same.


Placed = Sequence[tuple[int, EncodedBatch]]
"""The offset of the first record, and the batch; in order."""


def append_at(
    log: PartitionLog,
    placed: Placed,
    durability: str | None,
    timeout: float | None,
    identical: bool,
    mirror: str,
    expected_end: int | None,
    again: bool = True,
) -> list[Appended]:
    """Write batches at the offsets given with them; see `PartitionLog.append_at` and `append`."""
    if not placed:
        return []
    log.context.check_appendable()
    _check_order(log, placed, identical)
    synced, before = (durability or log.context.durability) == "fsync", None
    try:
        with log.owned(timeout) as tail:
            before, file, end = tail, log.file_at(tail), tail.log_end_offset
            if placed[0][0] < end or expected_end not in (None, end):
                raise UnexpectedAppendOffsetError(
                    f"The log end is offset {end}",
                    **log.where,
                    offset=placed[0][0],
                    todo="Append at the log end.",
                )
            placed = validation.of_this_topic(log, placed, identical)
            encoded = [batch for _, batch in placed]
            if identical:
                validation.check_writer(log, mirror)
                validation.check_kind(log, encoded)
                _check_epoch(log, tail, encoded[0])
            else:
                validation.check(log, encoded, offsets=True)
            if synced:
                preallocation.extend(log, file, tail, encoded)
            pending = _append_at_locked(log, file, tail, placed, synced, identical)
    except DiskFullError:
        if again and _is_room_again(log, before):
            how = durability, timeout, identical, mirror, expected_end
            return append_at(log, placed, *how, again=False)
        log.context.reserve.mark_full()
        raise
    finish(log, encoded, pending.tail, synced)
    return pending.receipts


def skip_to(log: PartitionLog, offset: int, mirror: str) -> None:
    """Advance the log end to an offset; see `PartitionLog.skip_to`."""
    log.context.check_appendable()
    with log.owned() as tail:
        log.file_at(tail)
        validation.check_writer(log, mirror)
        if offset > tail.log_end_offset:
            # The sealed segment notes durably that it ends there.
            beyond = tail._replace(log_end_offset=offset, high_watermark=offset)
            roll.roll(log, beyond, synced=True, gap=True)
    log.context.wake.advance()


def _check_order(log: PartitionLog, placed: Placed, identical: bool) -> None:
    """Raise unless offsets and, if they are kept, leader epochs are in order.

    Raises:
        OffsetsOutOfOrderError: A batch begins before the one in front of it ends, or too high.
        FencedLeaderEpochError: A batch has an earlier epoch than the one in front of it.
    """
    expected = epoch = 0
    for offset, batch in placed:
        span = batch.count if batch.span is None else batch.span
        if not expected <= offset <= LONG_MAX - span:
            raise OffsetsOutOfOrderError(
                f"A batch of {span} at offset {offset}, which is not in {expected}..{LONG_MAX}",
                **log.where,
                offset=offset,
            )
        expected = offset + span
        if identical and batch.leader_epoch is not None:
            if batch.leader_epoch < epoch:
                raise _fenced(log, offset, batch.leader_epoch, epoch)
            epoch = batch.leader_epoch


def _fenced(log: PartitionLog, offset: int, epoch: int, later: int) -> FencedLeaderEpochError:
    return FencedLeaderEpochError(
        f"A batch of leader epoch {epoch}, after one of epoch {later}",
        **log.where,
        offset=offset,
        todo="Truncate the log to where the histories part, and copy from there on.",
    )


def _check_epoch(log: PartitionLog, tail: Tail, batch: EncodedBatch) -> None:
    """Raise if the log has a batch of a later epoch: recovery would take this one for stale.

    The epoch of the tail may be later, since a recovery begins one.
    """
    if batch.leader_epoch is not None and batch.leader_epoch < tail.leader_epoch:
        last = _last_epoch(log, tail)
        if batch.leader_epoch < last:
            raise _fenced(log, tail.log_end_offset, batch.leader_epoch, last)


def _last_epoch(log: PartitionLog, tail: Tail) -> int:
    """Return the leader epoch of the last batch; 0 if there is none."""
    for info in reversed(log.segments.values()):
        if not tail.has_made(info):
            continue
        file, epoch = log.open_shared(info), None
        stop = info.end_position if info.sealed else tail.log_end_position
        entries = lookup.searchable(log, info)
        for batch in file.heads(entries[-1].position if entries else file.start, stop):
            epoch = batch.leader_epoch
        if epoch is not None:
            return epoch
    return 0


def _append_at_locked(
    log: PartitionLog, file: SegmentFile, tail: Tail, placed: Placed, synced: bool, identical: bool
) -> PendingAppend:
    """Write and publish batches after a tail; as `append.append_locked`, at their offsets."""
    pending = PendingAppend(log, tail, publish=not synced)
    for offset, batch in placed:
        if not identical:
            receipt = pending.receipt_of_repeated(batch)
            if receipt is not None:
                pending.receipts.append(receipt)
                continue
        elif batch.leader_epoch is not None and batch.leader_epoch > pending.tail.leader_epoch:
            commit(log, file, pending)
            pending.begin(leader_epochs.begin(log, pending.tail, batch.leader_epoch, offset))
        gap = offset - pending.tail.log_end_offset
        if gap > MAX_GAP:
            commit(log, file, pending)
            # The sealed segment notes durably that it ends there.
            beyond = pending.tail._replace(log_end_offset=offset, high_watermark=offset)
            file = _roll(log, pending, beyond, batch, synced=True, gap=True)
        elif _is_roll_due(log, file, pending.tail, batch, identical):
            commit(log, file, pending)
            file = _roll(log, pending, pending.tail, batch, synced=synced, gap=False)
        if offset > pending.tail.log_end_offset and log.active_segment.dense:
            commit(log, file, pending)
            _note_gaps(log)
            pending.begin(pending.tail)
        pending.add(validation.with_columns_of(log, log.active_segment, batch), offset, identical)
    commit(log, file, pending)
    return pending


def _is_roll_due(
    log: PartitionLog, file: SegmentFile, tail: Tail, batch: EncodedBatch, identical: bool
) -> bool:
    if not identical:
        return roll.is_due(log, file, tail, batch)
    # A column that is added would make it another batch.
    columns = batch.flags & (HEADERS | TOMBSTONES)
    other = columns != log.active_segment.column_flags
    return other or roll.is_due(log, file, tail, batch, batch.max_timestamp)


def _roll(
    log: PartitionLog,
    pending: PendingAppend,
    tail: Tail,
    batch: EncodedBatch,
    *,
    synced: bool,
    gap: bool,
) -> SegmentFile:
    """Begin a segment with the columns of a batch."""
    offsets = bool(batch.flags & EXPLICIT_OFFSETS)
    columns = roll.columns_of(batch)
    pending.begin(roll.roll(log, tail, columns, synced=synced, gap=gap, offsets=offsets))
    return log.active_file()


def _note_gaps(log: PartitionLog) -> None:
    """Note in the manifest that not every offset of the active segment has a record."""
    gapped = log.active_segment._replace(dense=False)
    log.context.state.write(lambda txn: catalog.put_segment(txn, log.key, gapped))
    log.refresh()
