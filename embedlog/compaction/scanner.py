"""Reads sealed segments for compaction: keys first, other columns only where rows are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from embedlog.batch import CONTROL, Batch
from embedlog.batch.arrays import bits, nulls, numbers
from embedlog.catalog import SegmentInfo
from embedlog.compaction.key_hash import BoolArray, Int64Array, KeyHasher, UInt64Array
from embedlog.compaction.offset_map import OffsetMap
from embedlog.forks import cached_property
from embedlog.partition import PartitionLog, lookup

_SMALL_BATCH_BYTES, _FEW_ROWS = 4096, 64
_MAX_CHUNK_ROWS = 1 << 17
"""Intermediate results take about 200 bytes per row of a chunk."""


class ScannedBatches:
    """Some batches of a segment, with the key's hash and the offset of each of their rows.

    Args:
        batches: At least one.
        hasher: Hashes the keys.
        whole: Whether the other columns are needed too.  Then small batches are decoded
            as a whole when their keys are: a second call would double the cost.
    """

    def __init__(self, batches: list[Batch], hasher: KeyHasher, *, whole: bool = False) -> None:
        self.batches = batches
        self._whole = whole
        self._decoded: dict[int, Any] = {}
        self.ends: Int64Array = np.cumsum([batch.count for batch in batches])
        """Per batch, the index after its last row."""
        self._hasher = hasher
        first, next_offset = batches[0].base_offset, batches[-1].next_offset
        self.offsets: Int64Array
        if next_offset - first == self.ends[-1]:
            self.offsets = np.arange(first, next_offset, dtype=np.int64)
        else:
            self.offsets = np.concatenate([offsets_of(batch) for batch in batches])
        self.valid: BoolArray | None = None
        """Which rows have a key; None if all have."""
        if any(batch.may_lack_keys for batch in batches):
            self.valid = ~nulls(self._keys)

    @cached_property
    def _keys(self) -> Any:
        keys = []
        for index, batch in enumerate(self.batches):
            if self._whole and batch.size <= _SMALL_BATCH_BYTES and not batch.is_typed:
                columns = self._decoded[index] = batch.columns()
                keys.append(columns.column(1))
            else:
                keys.append(batch.keys())
        return keys[0] if len(keys) == 1 else pa.concat_arrays(keys)

    @cached_property
    def hashes(self) -> tuple[UInt64Array, UInt64Array]:
        """The two halves of the hash of each key."""
        return self._hasher.keys(self._keys)

    def last_rows(self, offset_map: OffsetMap) -> BoolArray:
        """Return a mask of the rows whose key has no later offset in the map."""
        offsets = self.offsets
        if len(offsets):
            start, stop = int(offsets[0]), int(offsets[-1]) + 1
            replaced = offset_map.replaced(start, stop)
            if replaced is not None:
                # Noted when the keys were read; they need not be read again.
                dense = len(replaced) == len(offsets)
                return ~replaced if dense else ~replaced[offsets - start]
        return offset_map.ends(*self.hashes) <= offsets + 1

    def data_rows(self) -> BoolArray | None:
        """Return a mask of the rows that are not transaction markers; None if none is one."""
        markers = [bool(batch.flags & CONTROL) for batch in self.batches]
        if not any(markers):
            return None
        return np.repeat(~np.array(markers), np.diff(self.ends, prepend=0))

    def keyed_rows(self, start: int, stop: int) -> BoolArray | None:
        """Return a mask of the records with a key in ``[start, stop)``; None if all are."""
        rows, offsets, records = self.valid, self.offsets, self.data_rows()
        if records is not None:
            rows = records if rows is None else rows & records
        if len(offsets) and not start <= offsets[0] <= offsets[-1] < stop:
            within = (offsets >= start) & (offsets < stop)
            rows = within if rows is None else rows & within
        return rows

    def keys(self, start: int, stop: int) -> tuple[UInt64Array, UInt64Array, Int64Array]:
        """Return the hashes and the offsets of the records with a key in ``[start, stop)``."""
        (high, low), offsets = self.hashes, self.offsets
        rows = self.keyed_rows(start, stop)
        return (high, low, offsets) if rows is None else (high[rows], low[rows], offsets[rows])

    def start(self, index: int) -> int:
        """Return the index of the first row of a batch."""
        return int(self.ends[index]) - self.batches[index].count

    def table(
        self, rows: list[tuple[int, BoolArray]], read: Callable[[Batch], Any] = Batch.columns
    ) -> Any:
        """Return some rows of some batches as a `pyarrow.Table` with their offsets.

        Args:
            rows: The index of a batch, and a mask of its rows.
            read: Returns the columns of a batch; by default those that are stored.
        """
        decoded = [
            self._decoded[index] if index in self._decoded else read(self.batches[index])
            for index, _ in rows
        ]
        table = pa.Table.from_batches(decoded)
        offsets = [self.offsets[self.start(index) : self.ends[index]] for index, _ in rows]
        name = self.batches[0].layout.added("offset") if read is Batch.columns else "offset"
        table = table.append_column(name, numbers(np.concatenate(offsets), pa.int64()))
        if table.num_rows < _FEW_ROWS * len(rows):
            table = table.combine_chunks()  # Arrow has a high cost per chunk.
        mask = np.concatenate([mask for _, mask in rows])
        return table if mask.all() else filter_rows(table, mask)


# Not `to_numpy` and `pa.array`: they import pandas if it is installed, which takes 300 ms.


def filter_rows(table: Any, mask: BoolArray) -> Any:
    """Return the rows of a `pyarrow.Table` that a mask selects."""
    bits = pa.py_buffer(np.packbits(mask, bitorder="little"))
    return table.filter(pa.Array.from_buffers(pa.bool_(), len(mask), [None, bits], 0))


def offsets_of(batch: Batch) -> Int64Array:
    """Return the offsets of the rows of a batch."""
    if not batch.has_offsets:
        return np.arange(batch.base_offset, batch.next_offset, dtype=np.int64)
    column = batch.offsets()
    if not len(column):
        return np.empty(0, np.int64)
    return np.frombuffer(column.buffers()[1], np.int64, len(column), 8 * column.offset)


def tombstone_rows(batch: Batch) -> BoolArray:
    """Return a mask of the tombstones of a batch."""
    if not batch.is_typed:
        return nulls(batch.columns(("value",)).column(0))
    if not batch.may_have_tombstones:
        return np.zeros(batch.count, bool)
    column = batch.columns(("_tombstone",)).column(0)
    return bits(column.buffers()[1], column)


class SegmentScanner:
    """Reads segments of a partition.

    Args:
        log: The partition.
        chunk_bytes: How much to read at once.
        before_chunk: Called with the size of each chunk before it is used; it may wait or raise.
    """

    def __init__(
        self, log: PartitionLog, chunk_bytes: int, before_chunk: Callable[[int], None]
    ) -> None:
        self._log, self._chunk_bytes, self._before_chunk = log, chunk_bytes, before_chunk
        self._hasher = KeyHasher()

    def chunks(
        self, segment: SegmentInfo, offset: int = 0, *, whole: bool = False
    ) -> Iterator[ScannedBatches]:
        """Yield the batches of a sealed segment from an offset on, many at a time."""
        file = self._log.open_segment(segment)
        position = file.start
        if offset > segment.base_offset:
            position = lookup.position_of_offset(self._log, segment, offset) or position
        while position < segment.end_position:
            batches = file.read(position, segment.end_position, self._chunk_bytes)
            end = batches[-1].position + batches[-1].size
            self._before_chunk(end - position)
            position = end
            for part in _split([batch for batch in batches if batch.next_offset > offset]):
                yield ScannedBatches(part, self._hasher, whole=whole)


def _split(batches: list[Batch]) -> Iterator[list[Batch]]:
    """Split a chunk to bound the memory: compressed batches may be much larger decoded."""
    part: list[Batch] = []
    rows = 0
    for batch in batches:
        if part and (rows + batch.count > _MAX_CHUNK_ROWS or batch.is_compressed):
            yield part
            part, rows = [], 0
        part.append(batch)
        rows += batch.count
    if part:
        yield part
