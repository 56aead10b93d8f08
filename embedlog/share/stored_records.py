"""Reads the records at any offsets of a partition, as the members of a share group need them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from embedlog.batch import CONTROL, Batch
from embedlog.consumer.deserialize import RecordDecoder, RecordRun, TupleRecord
from embedlog.errors import CorruptBatchError, OffsetOutOfRangeError
from embedlog.partition import PartitionLog
from embedlog.partition.reader import PartitionReader
from embedlog.record import Record, TopicPartition


class RowsByOffset(Protocol):
    """The rows of a batch, however decoded."""

    @property
    def offsets(self) -> Any:
        """Their offsets, in order."""


R = TypeVar("R", bound=RowsByOffset)

_MOST_DECODED = 8
"""Batches that are kept decoded: the next offsets that a member acquires are often in one of them,
behind some that others have acquired."""


class ShareRecord(TupleRecord):
    """A `Record` that a share group has delivered."""

    delivery_count: int = 1
    """How often it was delivered, this time included."""

    # What the consumer notes of a record that it has acquired.
    _key: bytes
    """That of the partition."""
    _stop: int
    """The next offset with a record that was acquired with it."""
    _until: int
    """When its lock ends."""
    _verdict: tuple[int, int] | None = None
    """What the program does with it, and the milliseconds before it may be delivered again."""
    _caller: object = None
    """The task or thread that has it; None before it is returned."""

    def _replace(self, **fields: Any) -> ShareRecord:
        return share_record(super()._replace(**fields), self.delivery_count)

    def __reduce__(self) -> tuple[Any, ...]:
        return share_record, (tuple(self), self.delivery_count)


def share_record(fields: Iterable[Any], delivery_count: int) -> ShareRecord:
    """Return the record with these fields that was delivered so often."""
    record: ShareRecord = ShareRecord(fields)
    record.delivery_count = delivery_count
    return record


class StoredRecords:
    """The records of one partition, with keys and values as they are stored.

    Args:
        log: The partition.
        decoder: Decodes its batches.
        max_bytes: About how much to read at once.
        most: How many batches are kept decoded.
    """

    def __init__(
        self,
        log: PartitionLog,
        decoder: RecordDecoder,
        max_bytes: int,
        most: int = _MOST_DECODED,
    ) -> None:
        self.log, self._decoder, self._max_bytes, self._most = log, decoder, max_bytes, most
        self.partition = TopicPartition(log.topic, log.partition)
        self._seen = -1, -1
        """The leader epoch, and the version of the catalog, when the batches were read."""
        self._reader: PartitionReader | None = None
        self._from = 0
        """The offset at which the batches were read."""
        self._batches: list[Batch] = []
        self._decoded: dict[int, Any] = {}
        """The rows of batches by base offset, those used last at the end."""

    def read(self, first: int, stop: int, epoch: int) -> tuple[list[Record], int]:
        """Return the records between two offsets, and the offset of the next one, or below it.

        Args:
            first: The first offset.
            stop: The offset after the last one.
            epoch: The leader epoch of the partition.

        Raises:
            CorruptBatchError: The first batch is damaged.
            UnknownTopicOrPartitionError: The topic was deleted.
        """
        records: list[Record] = []
        parts, following = self.parts(first, stop, epoch, self._lists)
        for batch, rows, part in parts:
            columns = rows.part(part)
            values = iter(columns.values)
            records += RecordRun.make_records(columns, values, self.partition, batch)
        return records, following

    def parts(
        self, first: int, stop: int, epoch: int, decode: Callable[[Batch], R]
    ) -> tuple[list[tuple[Batch, R, slice]], int]:
        """Return batches, decoded, with their rows between two offsets; otherwise as `read`.

        Args:
            first: The first offset.
            stop: The offset after the last one.
            epoch: The leader epoch of the partition.
            decode: Decodes a batch.
        """
        seen = epoch, self.log.context.catalog.version()
        if seen != self._seen:
            # There may be other records since, or compaction may have removed some.
            self._seen, self._reader, self._batches, self._decoded = seen, None, [], {}
        parts: list[tuple[Batch, R, slice]] = []
        offset = first
        while offset < stop:
            try:
                batch = self._batch_at(offset)
                if batch is None:
                    # There is none up to the end.
                    return parts, max(offset, min(stop, self.log.end_offset()))
                rows = self._rows_of(batch, decode)
            except OffsetOutOfRangeError:
                start = self.log.start_offset()
                if start <= offset:
                    break
                offset = start  # Retention has deleted those below.
                continue
            except CorruptBatchError:
                if parts:
                    break
                raise
            low, high = (bisect_left(rows.offsets, each) for each in (offset, stop))
            if low < high:
                parts.append((batch, rows, slice(low, high)))
            offset = batch.next_offset if high == len(rows.offsets) else int(rows.offsets[high])
        return parts, offset

    def _batch_at(self, offset: int) -> Batch | None:
        """Return the batch that holds an offset, or else the next one; None at the end."""
        if not (self._batches and self._from <= offset < self._batches[-1].next_offset):
            if self._reader is None or self._reader.offset != offset:
                self._reader = self.log.reader(offset)
            self._batches, self._from = [], offset
            while not self._batches:
                batches = self._reader.read(self._max_bytes)
                if not batches:
                    return None
                self._batches = [
                    each for each in batches if each.count and not each.flags & CONTROL
                ]
        ends = [batch.next_offset for batch in self._batches]
        return self._batches[bisect_right(ends, offset)]

    def _rows_of(self, batch: Batch, decode: Callable[[Batch], R]) -> R:
        found = self._decoded.pop(batch.base_offset, None)
        if found is None or found[:2] != (batch, decode):
            found = batch, decode, decode(batch)
        self._decoded[batch.base_offset] = found
        if len(self._decoded) > self._most:
            del self._decoded[next(iter(self._decoded))]
        rows: R = found[2]
        return rows

    def _lists(self, batch: Batch) -> Any:
        decoder = self._decoder
        typed = decoder.deserializers(self.partition.topic).typed
        return decoder.rows_type(batch, batch.base_offset, decoder.verify, typed)
