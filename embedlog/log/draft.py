"""What one append is about to write and publish, worked out before either."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from embedlog import index, kv
from embedlog.batch import EncodedBatch
from embedlog.index import Entry
from embedlog.log import flushing, sequence, tail
from embedlog.log.sequence import Producer, Sent
from embedlog.log.tail import Known, Tail
from embedlog.record import Appended

if TYPE_CHECKING:
    from embedlog.log.partition import PartitionLog


_REMEMBERED = 64
"""Producers whose rows are kept from one append to the next."""


class Draft:
    """Batches stamped for their offsets, and the rows that will make them visible.

    Lives under the partition's lock, for one append.

    Args:
        now: The tail the batches go after.
        publish: Move the published end too; not while a flush is to come first.
    """

    def __init__(self, log: PartitionLog, now: Tail, *, publish: bool) -> None:
        self._log, self._publish = log, publish
        self.receipts: list[Appended] = []
        self.begin(now)

    def begin(self, now: Tail) -> None:
        """Start anew at a tail: nothing is held yet."""
        self.tail = self._before = now
        known = self._log.known
        current = known is not None and known.tail is now
        self.row = known.row if known is not None and current else now.pack()
        self.position = now.position
        self.buffers: list[Any] = []
        self._entries: list[Entry] = []
        self._producers: dict[int, Producer] = {}
        self._read = dict(known.producers) if known is not None and current else {}

    def reveal(self) -> bool:
        """Publish what is written if a batch of it was repeated; whether there is such a batch.

        The process that wrote it may have died before its flush, and who repeats
        it without one would be told of a record that nobody can read.
        """
        now = self.tail
        hidden = any(one.next_offset > now.end_offset for one in self.receipts if one.duplicate)
        if hidden and self._publish:
            self.tail = now._replace(end_offset=now.next_offset, end_position=now.position)
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
        sent = sequence.check(known, one.producer_epoch, one.base_sequence, one.count)
        if sent is None:
            return None
        return Appended(sent.base_offset, sent.next_offset, None, True)

    def _known(self, producer_id: int) -> Producer | None:
        known = self._producers.get(producer_id) or self._read.get(producer_id)
        if known is None:
            row = self._log.context.live.get(sequence.key(self._log.key, producer_id))
            if row is not None:
                known = self._read[producer_id] = sequence.unpack(row)
        return known

    def add(self, one: EncodedBatch) -> None:
        """Put a batch at the end of the draft."""
        log, now = self._log, self.tail
        append_time = None
        if log.config.message_timestamp_type == "LogAppendTime":
            append_time = log.context.clock()
        base, following = now.next_offset, now.next_offset + one.count
        self.buffers += one.stamp(base, now.leader_epoch, append_time)
        latest = one.max_timestamp if append_time is None else append_time
        unindexed = now.unindexed
        if unindexed > log.config.index_interval_bytes:
            self._entries.append(Entry(base, now.position, now.max_timestamp))
            unindexed = 0
        if one.producer_id is not None:
            self._note(one, base, following)
        position = now.position + one.size
        self.tail = Tail(
            now.segment_id,
            now.base_offset,
            following,
            position,
            following if self._publish else now.end_offset,
            position if self._publish else now.end_position,
            now.durable_offset,
            now.start_offset,
            now.leader_epoch,
            max(now.max_timestamp, latest),
            latest if now.empty else now.first_timestamp,
            now.created_ms,
            unindexed + one.size,
            now.flushed_ms,
        )
        self.receipts.append(Appended(base, following, append_time))

    def _note(self, one: EncodedBatch, base: int, following: int) -> None:
        assert one.producer_id is not None
        assert one.producer_epoch is not None
        assert one.base_sequence is not None
        last = sequence.after(one.base_sequence, one.count - 1)
        self._producers[one.producer_id] = sequence.note(
            self._known(one.producer_id),
            one.producer_epoch,
            Sent(one.base_sequence, last, base, following),
            self._log.context.clock(),
        )

    def publish(self, txn: kv.Txn) -> None:
        """The step that makes the draft's batches part of the log.

        Raises:
            DurabilityError: A flush failed meanwhile.
        """
        key, tail_key = self._log.key, self._log.tail_key
        row = txn.get(tail_key)
        if row is not None and row != self.row:
            self._adopt(tail.unpack(row))
        packed = self.tail.pack()
        txn.put(tail_key, packed)
        self._read.update(self._producers)
        remembered = self._read if len(self._read) <= _REMEMBERED else self._producers
        self.published = Known(txn.id(), packed, self.tail, remembered)
        for entry in self._entries:
            index.put(txn, key, self.tail.segment_id, entry)
        for producer_id, producer in self._producers.items():
            txn.put(sequence.key(key, producer_id), producer.pack())

    def _adopt(self, now: Tail) -> None:
        """Keep what a flush, which works without the partition's lock, noted meanwhile."""
        if now.failed:
            raise flushing.failed(self._log)
        before, mine = self._before, self.tail
        assert now[:4] == before[:4], "only who has the lock moves the end"
        self.tail = mine._replace(
            end_offset=max(mine.end_offset, now.end_offset),
            end_position=max(mine.end_position, now.end_position),
            durable_offset=max(mine.durable_offset, now.durable_offset),
            start_offset=max(mine.start_offset, now.start_offset),
            flushed_ms=max(mine.flushed_ms, now.flushed_ms),
        )
