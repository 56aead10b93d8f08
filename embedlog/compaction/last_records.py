"""The last record of each key, whether or not compaction has run: a topic as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedlog.batch import CONTROL, Batch
from embedlog.batch.arrays import data
from embedlog.compaction.key_hash import BoolArray, KeyHasher, UInt64Array
from embedlog.compaction.offset_map import SLOT_BYTES, OffsetMap
from embedlog.compaction.scanner import (
    ScannedBatches,
    data_rows,
    filter_rows,
    nulls,
    offsets_of,
    where_last,
)
from embedlog.partition import PartitionLog

_READ_BYTES = 4 << 20


def last_records(
    log: PartitionLog, start: int, stop: int, end: Callable[[], int] | None = None
) -> Iterator[Any]:
    """Yield the last record of each key in ``[start, stop)``, tombstones too, as tables.

    They come in the order of their offsets, with the stored columns and ``offset``.  Records
    without a key are left out.  Takes up to 60 bytes of memory per record in the range, and
    reads all keys once, and the other columns of the records that it yields.

    Args:
        log: The partition.
        start: The first offset.
        stop: The end of the offsets, or what ``end`` returned last.
        end: Returns the current end.  A compaction meanwhile may remove a record because of
            one at or after ``stop``; with ``end`` that one is yielded in its place.

    Raises:
        OffsetOutOfRangeError, CorruptBatchError: As when reading.
    """
    version = log.context.catalog.version
    while True:
        stop, version_before = stop if end is None else end(), version()
        hasher = KeyHasher()
        offset_map = _map_keys(log, start, stop, hasher)
        if end is None or version() == version_before or end() == stop:
            break  # No segment was replaced while the keys were read.
    yielded = [np.empty(0, np.int64)]
    for first, batches in _read(log, start, stop):
        chunk = ScannedBatches(batches, hasher, whole=True)
        rows = _keyed_rows(chunk, first, stop) & where_last(chunk, offset_map)
        parts = [(i, rows[chunk.start(i) : chunk.ends[i]]) for i in range(len(batches))]
        if wanted := [(index, part) for index, part in parts if part.any()]:
            yielded.append(chunk.offsets[rows] + 1)
            yield chunk.table(wanted)
    missing = np.setdiff1d(offset_map.all_ends(), np.concatenate(yielded))
    if len(missing) and end is not None and end() > stop:
        yield from _replacements(
            log, stop, end, lambda keys: np.isin(offset_map.ends(*keys), missing), hasher
        )


def _map_keys(log: PartitionLog, start: int, stop: int, hasher: KeyHasher) -> OffsetMap:
    records = sum(batch.count for _, batches in _read(log, start, stop) for batch in batches)
    # Enough to note every replaced offset, unless there are far more offsets than records.
    memory = 16 * SLOT_BYTES * (records + 64)
    offset_map = OffsetMap(memory, 1.0, start, stop, max_keys=records)
    for first, batches in _read(log, start, stop):
        chunk = ScannedBatches(batches, hasher)
        rows = _keyed_rows(chunk, first, stop)
        high, low = chunk.hashes
        offset_map.add(high[rows], low[rows], chunk.offsets[rows])
    return offset_map


def _replacements(
    log: PartitionLog,
    start: int,
    end: Callable[[], int],
    wanted: Callable[[tuple[UInt64Array, UInt64Array]], BoolArray],
    hasher: KeyHasher,
) -> Iterator[Any]:
    """Yield the last records of the wanted keys at or after ``start``."""
    for table in last_records(log, start, end(), end):
        mask = wanted(hasher.keys(table["key"].combine_chunks()))
        if mask.any():
            yield filter_rows(table, mask)


def _read(log: PartitionLog, start: int, stop: int) -> Iterator[tuple[int, list[Batch]]]:
    """Yield batches of one segment at a time, and the first offset not yielded before."""
    reader = log.reader(start)
    while (first := reader.offset) < stop:
        batches = reader.read(_READ_BYTES)
        if not batches:
            return
        batches = [batch for batch in batches if batch.count and batch.base_offset < stop]
        if batches:
            yield first, batches


def _keyed_rows(chunk: ScannedBatches, start: int, stop: int) -> BoolArray:
    """Return which rows are records with a key and an offset in ``[start, stop)``."""
    rows = (chunk.offsets >= start) & (chunk.offsets < stop)
    if chunk.valid is not None:
        rows &= chunk.valid
    records = data_rows(chunk)
    return rows if records is None else rows & records


class LastRecord(NamedTuple):
    """The last record of a key in a partition."""

    offset: int
    timestamp: int
    value: bytes | None


def last_record(log: PartitionLog, key: bytes, start: int, stop: int) -> LastRecord | None:
    """Return the last record of one key in ``[start, stop)``, or None.

    Reads the keys of the newest segment first, and goes on only until it finds the key.
    """
    log.refresh()
    key_scalar = data(key, pa.binary())
    for segment in reversed(log.segments.values()):
        first = max(segment.base_offset, start)
        end = stop if segment.next_offset is None else min(segment.next_offset, stop)
        record = None
        for read_from, batches in _read(log, first, end) if first < end else ():
            record = _last_in(batches, key_scalar, read_from, end) or record
        if record is not None:
            return record
    return None


def _last_in(batches: Sequence[Batch], key: Any, start: int, stop: int) -> LastRecord | None:
    for batch in reversed(batches):
        rows = np.flatnonzero(_has_key(batch, key))
        if not len(rows) or batch.flags & CONTROL:
            continue
        offsets = offsets_of(batch)[rows]
        within = np.flatnonzero((offsets >= start) & (offsets < stop))
        if len(within):
            index = int(within[-1])
            timestamps, values = batch.columns(("timestamp", "value")).columns
            row = int(rows[index])
            return LastRecord(int(offsets[index]), timestamps[row].value, values[row].as_py())
    return None


def _has_key(batch: Batch, key: Any) -> BoolArray:
    same = pc.equal(batch.columns(("key",)).column(0), key)
    bits = np.unpackbits(np.frombuffer(same.buffers()[1], np.uint8), bitorder="little")
    return (bits[same.offset : same.offset + len(same)] == 1) & ~nulls(same)
