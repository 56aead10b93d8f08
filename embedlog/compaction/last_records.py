"""The last record of each key, whether or not compaction has run: a topic as a table."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedlog.batch import CONTROL, Batch
from embedlog.batch.arrays import bits, data, nulls
from embedlog.compaction.key_hash import KeyHasher
from embedlog.compaction.offset_map import SLOT_BYTES, OffsetMap
from embedlog.compaction.scanner import ScannedBatches, filter_rows, offsets_of
from embedlog.partition import PartitionLog, key_index
from embedlog.partition.key_index import DecodedBatch, FoundRecord
from embedlog.schemas.reading import TypedReader

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


def last_record(
    log: PartitionLog, key: bytes, start: int, stop: int, reader: TypedReader | None = None
) -> FoundRecord | None:
    """Return the last record of one key in ``[start, stop)``, or None.

    By the key index if the topic has one; otherwise it reads the keys of the newest segment
    first, and stops when it finds the key.  A typed topic needs a ``reader``.
    """
    log.refresh()
    if key_index.is_enabled(log.config):
        return next(iter(log.key_index.find(key, start, stop, reader, 1)), None)
    for segment in reversed(log.segments.values()):
        first = max(segment.base_offset, start)
        end = stop if segment.next_offset is None else min(segment.next_offset, stop)
        for batch, rows in deque(_matches(log, key, first, end), 1):
            return FoundRecord(log.partition, DecodedBatch(batch, reader), rows[-1])
    return None


def all_records(
    log: PartitionLog, key: bytes, start: int, stop: int, reader: TypedReader | None = None
) -> list[FoundRecord]:
    """Return all records of one key in ``[start, stop)``, in order.

    By the key index if the topic has one; otherwise it reads all keys.
    """
    log.refresh()
    if key_index.is_enabled(log.config):
        return log.key_index.find(key, start, stop, reader)[::-1]
    found = list[FoundRecord]()
    for batch, rows in _matches(log, key, start, stop):
        decoded = DecodedBatch(batch, reader)
        found += [FoundRecord(log.partition, decoded, row) for row in rows]
    return found


def _matches(
    log: PartitionLog, key: bytes, start: int, stop: int
) -> Iterator[tuple[Batch, list[int]]]:
    """Yield the batches that have a key in ``[start, stop)``, with its rows."""
    key_scalar = data(key, pa.binary())
    for first, batches in _read(log, start, stop) if start < stop else ():
        for batch in batches:
            same = pc.equal(batch.keys(), key_scalar)
            rows = np.flatnonzero(bits(same.buffers()[1], same) & ~nulls(same))
            if len(rows) and not batch.flags & CONTROL:
                offsets = offsets_of(batch)[rows]
                rows = rows[(offsets >= first) & (offsets < stop)]
                if len(rows):
                    yield batch, rows.tolist()
