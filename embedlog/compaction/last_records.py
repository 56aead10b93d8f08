"""The last record of each key, whether or not compaction has run: a topic as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedlog.batch import CONTROL, Batch
from embedlog.batch.arrays import data
from embedlog.compaction.key_hash import KeyHasher
from embedlog.compaction.offset_map import SLOT_BYTES, OffsetMap
from embedlog.compaction.scanner import ScannedBatches, bits, filter_rows, nulls, offsets_of
from embedlog.partition import PartitionLog
from embedlog.partition.key_index import DecodedBatch, FoundRecord

_READ_BYTES = 4 << 20


def last_records(
    log: PartitionLog,
    start: int,
    stop: int,
    end: Callable[[], int] | None = None,
    read: Callable[[Batch], Any] = Batch.columns,
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
        read: Returns the columns of a batch, with those of the keys in ``key``; by default
            those that are stored.

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
        rows, keyed = chunk.last_rows(offset_map), chunk.keyed_rows(first, stop)
        if keyed is not None:
            rows &= keyed
        parts = [(i, rows[chunk.start(i) : chunk.ends[i]]) for i in range(len(batches))]
        if wanted := [(index, part) for index, part in parts if part.any()]:
            yielded.append(chunk.offsets[rows] + 1)
            yield chunk.table(wanted, read)
    missing = np.setdiff1d(offset_map.all_ends(), np.concatenate(yielded))
    if len(missing) and end is not None and end() > stop:
        for table in last_records(log, stop, end(), end, read):
            keys = hasher.keys(table["key"].combine_chunks())
            mask = np.isin(offset_map.ends(*keys), missing)
            if mask.any():
                yield filter_rows(table, mask)


def _map_keys(log: PartitionLog, start: int, stop: int, hasher: KeyHasher) -> OffsetMap:
    records = sum(batch.count for _, batches in _read(log, start, stop) for batch in batches)
    # Enough to note every replaced offset, unless there are far more offsets than records.
    memory = 16 * SLOT_BYTES * (records + 64)
    offset_map = OffsetMap(memory, 1.0, start, stop, max_keys=records)
    for first, batches in _read(log, start, stop):
        offset_map.add(*ScannedBatches(batches, hasher).keys(first, stop))
    return offset_map


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


class LastRecord(NamedTuple):
    """The last record of a key in a partition."""

    offset: int
    timestamp: int
    value: Any


ValueAt = Callable[[Batch, int], Any]
"""Returns the value in a row of a batch; None for a tombstone."""


def _bytes_at(batch: Batch, row: int) -> bytes | None:
    value: bytes | None = batch.columns(("value",)).column(0)[row].as_py()
    return value


def last_record(
    log: PartitionLog, key: bytes, start: int, stop: int, value_at: ValueAt | None = None
) -> LastRecord | None:
    """Return the last record of one key in ``[start, stop)``, or None.

    By the key index if the topic has one; otherwise it reads the keys of the newest segment
    first, and stops when it finds the key.  ``value_at`` is needed for a typed topic.
    """
    log.refresh()
    if log.indexes_keys:
        found = log.key_index.last(key, start, stop)
        return None if found is None else _record(found, value_at)
    value_at = value_at or _bytes_at
    key_scalar = data(key, pa.binary())
    for segment in reversed(log.segments.values()):
        first = max(segment.base_offset, start)
        end = stop if segment.next_offset is None else min(segment.next_offset, stop)
        record = None
        for read_from, batches in _read(log, first, end) if first < end else ():
            record = _last_in(batches, key_scalar, read_from, end, value_at) or record
        if record is not None:
            return record
    return None


def all_records(log: PartitionLog, key: bytes, start: int, stop: int) -> list[FoundRecord]:
    """Return all records of one key in ``[start, stop)``, in order.

    By the key index if the topic has one; otherwise it reads all keys.
    """
    log.refresh()
    if log.indexes_keys:
        return log.key_index.all(key, start, stop)
    found, key_scalar = list[FoundRecord](), data(key, pa.binary())
    for first, batches in _read(log, start, stop):
        for batch in batches:
            same = pc.equal(batch.keys(), key_scalar)
            rows = np.flatnonzero(bits(same.buffers()[1], same) & ~nulls(same))
            if len(rows) and not batch.flags & CONTROL:
                offsets, decoded = offsets_of(batch), DecodedBatch(batch)
                for row in rows.tolist():
                    if first <= offsets[row] < stop:
                        found.append(FoundRecord(int(offsets[row]), decoded, row))
    return found


def _record(found: FoundRecord, value_at: ValueAt | None) -> LastRecord:
    decoded, row = found.decoded, found.row
    value = decoded.values[row].as_py() if value_at is None else value_at(decoded.batch, row)
    return LastRecord(found.offset, found.timestamp, value)


def _last_in(
    batches: Sequence[Batch], key: Any, start: int, stop: int, value_at: ValueAt
) -> LastRecord | None:
    for batch in reversed(batches):
        same = pc.equal(batch.keys(), key)
        rows = np.flatnonzero(bits(same.buffers()[1], same) & ~nulls(same))
        if not len(rows) or batch.flags & CONTROL:
            continue
        offsets = offsets_of(batch)[rows]
        within = np.flatnonzero((offsets >= start) & (offsets < stop))
        if len(within):
            index = int(within[-1])
            row = int(rows[index])
            timestamp = batch.timestamps()[row].value
            return LastRecord(int(offsets[index]), timestamp, value_at(batch, row))
    return None
