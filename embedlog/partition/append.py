"""What one append is about to write and publish, worked out before either."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from embedlog import index, kv
from embedlog.batch import EncodedBatch
from embedlog.index import IndexEntry
from embedlog.partition import flush, producer_state, tail
from embedlog.partition.producer_state import ProducerState
from embedlog.partition.tail import CachedTail, Tail
from embedlog.record import Appended

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog


_REMEMBERED = 64
"""Producers whose rows are kept from one append to the next."""


class PendingAppend:
    """Batches stamped for their offsets, and the rows that will make them visible.

    Lives under the partition's lock, for one append.

    Args:
        now: The tail the batches go after.
        publish: Move the published end too; not while a flush is to come first.
    """

    __slots__ = (
        *("_appended_ms", "_before", "_log", "_now_ms", "_producers", "_publish", "_read"),
        "_version",
        *("buffers", "entries", "position", "published", "receipts", "row", "tail"),
    )

    def __init__(self, log: PartitionLog, now: Tail, *, publish: bool) -> None:
        self._log, self._publish = log, publish
        self._now_ms = log.context.clock()
        self.receipts: list[Appended] = []
        self.published: CachedTail | None = None
        self.begin(now)

    def begin(self, now: Tail) -> None:
        """Start anew at a tail: nothing is held yet."""
        self.tail = self._before = now
        known = self._log.known
        if known is None or known.tail is not now:
            known = CachedTail(-1, now.pack(), now, {})
        # Producers' rows change under the partition's lock only: what was read of them stands.
        self._version, self.row, _, self._read = known
        self.position = now.log_end_position
        self._appended_ms = tail.next_append_time(now.appended_ms, self._now_ms)
        self.buffers: list[Any] = []
        self.entries: list[IndexEntry] = []
        self._producers: dict[int, ProducerState] = {}

    def reveal(self) -> bool:
        """Publish what is written if a batch of it was repeated; whether there is such a batch.

        The process that wrote it may have died before its flush, and who repeats
        it without one would be told of a record that nobody can read.
        """
        now = self.tail
        hidden = any(one.next_offset > now.high_watermark for one in self.receipts if one.duplicate)
        if hidden and self._publish:
            self.tail = now._replace(
                high_watermark=now.log_end_offset, high_watermark_position=now.log_end_position
            )
        return hidden and self._publish

    def repeated(self, one: EncodedBatch) -> Appended | None:
        """Return the first receipt of a batch that was sent before (G16).

        Raises:
            OutOfOrderSequenceError, InvalidProducerEpochError: G16, G17.
        """
        if one.producer_id is None:
            return None
        assert one.producer_epoch is not None
        assert one.base_sequence is not None
        known = self._known(one.producer_id)
        sent = producer_state.check(known, one.producer_epoch, one.base_sequence, one.count)
        if sent is None:
            return None
        return Appended(sent.base_offset, sent.next_offset, None, True)

    def _known(self, producer_id: int) -> ProducerState | None:
        known = self._producers.get(producer_id) or self._read.get(producer_id)
        if known is None:
            row = self._log.context.live.get(producer_state.key(self._log.key, producer_id))
            if row is not None:
                known = self._read[producer_id] = producer_state.unpack(row)
        return known

    def add(self, one: EncodedBatch) -> None:
        """Put a batch at the end of the draft."""
        log, now = self._log, self.tail
        append_time = self._now_ms if log.stamps else None
        base, position = now.log_end_offset, now.log_end_position
        following, end = base + one.count, position + one.size
        self.buffers += one.stamp(base, now.leader_epoch, append_time)
        latest = one.max_timestamp if append_time is None else append_time
        newest = now.max_timestamp
        unindexed = now.unindexed
        if unindexed > log.config.index_interval_bytes:
            self.entries.append(IndexEntry(base, position, newest))
            unindexed = 0
        if one.producer_id is not None:
            self._note(one, base, following)
        publish, first = self._publish, now.base_offset
        self.tail = Tail(
            now.segment_id,
            first,
            following,
            end,
            following if publish else now.high_watermark,
            end if publish else now.high_watermark_position,
            now.durable_offset,
            now.start_offset,
            now.leader_epoch,
            latest if latest > newest else newest,
            latest if base == first else now.first_timestamp,
            now.created_ms,
            self._appended_ms,
            unindexed + one.size,
            now.flushed_ms,
        )
        self.receipts.append(Appended(base, following, append_time))

    def _note(self, one: EncodedBatch, base: int, following: int) -> None:
        producer_id, epoch, first = one.producer_id, one.producer_epoch, one.base_sequence
        assert producer_id is not None
        assert epoch is not None
        assert first is not None
        sent = first, producer_state.after(first, one.count - 1), base, following
        known = self._known(producer_id)
        self._producers[producer_id] = producer_state.note(known, epoch, sent, self._now_ms)

    def publish(self, txn: kv.Txn) -> None:
        """The step that makes the draft's batches part of the log.

        Raises:
            DurabilityError: A flush failed meanwhile.
        """
        log, number = self._log, txn.id()
        # Numbers have no gaps: the one after the tail's means that nobody came between.
        if number != self._version + 1:
            row = txn.get(log.tail_key)
            if row is not None and row != self.row:
                self._adopt(tail.unpack(row))
        packed = self.tail.pack()
        txn.put(log.tail_key, packed)
        for entry in self.entries:
            index.put(txn, log.key, self.tail.segment_id, entry)
        producers, mine = self._read, self._producers
        if mine:
            for producer_id, producer in mine.items():
                txn.put(producer_state.key(log.key, producer_id), producer.row)
            producers = {**producers, **mine} if len(producers) < _REMEMBERED else mine
        self.published = CachedTail(number, packed, self.tail, producers)

    def _adopt(self, now: Tail) -> None:
        """Keep what a flush, which works without the partition's lock, noted meanwhile."""
        if now.failed:
            raise flush.failed(self._log)
        before, mine = self._before, self.tail
        assert now[:4] == before[:4], "only who has the lock moves the end"
        self.tail = mine._replace(
            high_watermark=max(mine.high_watermark, now.high_watermark),
            high_watermark_position=max(mine.high_watermark_position, now.high_watermark_position),
            durable_offset=max(mine.durable_offset, now.durable_offset),
            start_offset=max(mine.start_offset, now.start_offset),
            flushed_ms=max(mine.flushed_ms, now.flushed_ms),
        )
