"""Reading sealed segments for compaction: keys first, the rest only where something is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from embedlog.batch import CONTROL, Batch
from embedlog.catalog import SegmentInfo
from embedlog.compaction.key_hash import KeyHasher
from embedlog.compaction.offset_map import OffsetMap
from embedlog.partition import PartitionLog, lookup

Words = Any

_SMALL_BYTES, _FEW_ROWS = 4096, 64
_MOST_ROWS = 1 << 17
"""In one chunk: what is worked out for them takes some 200 bytes a row."""


class ScannedBatches:
    """Some batches of a segment, and for each of their rows the key's hash and the offset.

    Args:
        batches: At least one.
        hasher: Hashes the keys.
        whole: Whether the other columns are wanted as well; if keys are, those of small
            batches are decoded with them, for a second call would double the price.
    """

    def __init__(self, batches: list[Batch], hasher: KeyHasher, *, whole: bool = False) -> None:
        self.batches = batches
        self._whole = whole
        self._decoded: dict[int, Any] = {}
        self.ends: Words = np.cumsum([one.count for one in batches])
        """Where each batch's rows end."""
        self._hasher = hasher
        self.offsets: Words = _all_offsets(batches)
        self.valid: Words | None = None
        """Which rows have a key; None is all of them."""
        if any(one.null_count("key") for one in batches):
            self.valid = ~nulls(self._keys)

    @cached_property
    def _keys(self) -> Any:
        keys = []
        for place, one in enumerate(self.batches):
            if self._whole and one.size <= _SMALL_BYTES:
                columns = self._decoded[place] = one.columns()
                keys.append(columns.column(1))
            else:
                keys.append(one.columns(("key",)).column(0))
        return keys[0] if len(keys) == 1 else pa.concat_arrays(keys)

    @cached_property
    def hashes(self) -> tuple[Words, Words]:
        """The two halves of the hash of each key."""
        return self._hasher.keys(self._keys)

    def start(self, place: int) -> int:
        """Where a batch's rows begin."""
        return int(self.ends[place]) - self.batches[place].count

    def table(self, rows: list[tuple[int, Words]]) -> Any:
        """Return some rows of some batches as a `pyarrow.Table`, with their offsets.

        Args:
            rows: Which batch, and which of its rows.
        """
        decoded = [
            self._decoded[place] if place in self._decoded else self.batches[place].columns()
            for place, _ in rows
        ]
        table = pa.Table.from_batches(decoded)
        offsets = [self.offsets[self.start(place) : self.ends[place]] for place, _ in rows]
        column = pa.py_buffer(np.concatenate(offsets))
        column = pa.Array.from_buffers(pa.int64(), table.num_rows, [None, column], 0)
        table = table.append_column("offset", column)
        if table.num_rows < _FEW_ROWS * len(rows):
            table = table.combine_chunks()  # Arrow takes its time for each chunk.
        mask = np.concatenate([wanted for _, wanted in rows])
        if mask.all():
            return table
        bits = pa.py_buffer(np.packbits(mask, bitorder="little"))
        return table.filter(pa.Array.from_buffers(pa.bool_(), len(mask), [None, bits], 0))


# Not `to_numpy` and `pa.array`: they import pandas if it is installed, which takes 300 ms.


def _all_offsets(batches: list[Batch]) -> Words:
    first, last = batches[0].base_offset, batches[-1].next_offset
    if last - first == sum(one.count for one in batches):
        return np.arange(first, last, dtype=np.int64)
    return np.concatenate([offsets_of(one) for one in batches])


def offsets_of(one: Batch) -> Words:
    """Return the offsets of the rows of a batch."""
    if not one.has_offsets:
        return np.arange(one.base_offset, one.next_offset, dtype=np.int64)
    column = one.offsets()
    if not len(column):
        return np.empty(0, np.int64)
    return np.frombuffer(column.buffers()[1], np.int64, len(column), 8 * column.offset)


def nulls(column: Any) -> Words:
    """Return which rows of a `pyarrow.Array` are null."""
    validity = column.buffers()[0]
    if validity is None:
        return np.zeros(len(column), bool)
    bits = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")
    return bits[column.offset : column.offset + len(column)] == 0


class SegmentScanner:
    """Reads segments of a partition, no faster than it may.

    Args:
        log: The partition.
        chunk_bytes: How much to read at once.
        before: Called with the bytes of each chunk before it is looked at; may raise.
    """

    def __init__(self, log: PartitionLog, chunk_bytes: int, before: Callable[[int], None]) -> None:
        self._log, self._chunk_bytes, self._before = log, chunk_bytes, before
        self.hasher = KeyHasher()

    def batches(self, info: SegmentInfo, offset: int = 0) -> Iterator[list[Batch]]:
        """Yield the batches of a sealed segment from an offset on, many at a time."""
        file = self._log.open_segment(info)
        position = None
        if offset > info.base_offset:
            position = lookup.position_of_offset(self._log, info, offset)
        position = file.start if position is None else position
        while position < info.end_position:
            found = file.read(position, info.end_position, self._chunk_bytes)
            end = found[-1].position + found[-1].size
            self._before(end - position)
            position = end
            yield from _shared_out([one for one in found if one.next_offset > offset])

    def chunks(
        self, info: SegmentInfo, offset: int = 0, *, whole: bool = False
    ) -> Iterator[ScannedBatches]:
        """Yield its records' keys, hashed; a batch without records has none."""
        for found in self.batches(info, offset):
            yield ScannedBatches(found, self.hasher, whole=whole)


def _shared_out(found: list[Batch]) -> Iterator[list[Batch]]:
    """Split what was read so that memory stays that of a few batches: compression hides much."""
    some: list[Batch] = []
    rows = 0
    for one in found:
        if some and (rows + one.count > _MOST_ROWS or one.is_compressed):
            yield some
            some, rows = [], 0
        some.append(one)
        rows += one.count
    if some:
        yield some


def where_last(chunk: ScannedBatches, known: OffsetMap) -> Words:
    """Return which rows have no later one of the same key, as far as the map knows."""
    offsets = chunk.offsets
    if len(offsets):
        start, stop = int(offsets[0]), int(offsets[-1]) + 1
        replaced = known.replaced(start, stop)
        if replaced is not None:
            # Noted while the keys were read: they need not be read again.
            dense = len(replaced) == len(offsets)
            return ~replaced if dense else ~replaced[offsets - start]
    return known.ends(*chunk.hashes) <= offsets + 1


def data_rows(chunk: ScannedBatches) -> Words | None:
    """Return which rows are records rather than markers of transactions; None is all (D21)."""
    markers = [bool(one.flags & CONTROL) for one in chunk.batches]
    if not any(markers):
        return None
    return np.repeat(~np.array(markers), np.diff(chunk.ends, prepend=0))
