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
from embedlog.compaction.scanner import (
    ScannedBatches,
    Words,
    data_rows,
    nulls,
    offsets_of,
    where_last,
)
from embedlog.partition import PartitionLog

_READ_BYTES = 4 << 20


def last_records(
    log: PartitionLog, start: int, stop: int, now: Callable[[], int] | None = None
) -> Iterator[Any]:
    """Yield the last record of each key in ``[start, stop)``, tombstones too, as tables.

    In order of offset; the columns are those that are stored, and ``offset``.
    Records without a key are left out.  Takes up to 60 bytes of memory for each
    record there is, and reads the keys once and of the rest what is returned.

    Args:
        log: The partition.
        start: From here on.
        stop: The end, as far as it is known.
        now: Returns where it is by now: a compaction in the meantime may remove a record
            because of one that came after ``stop``, which is then yielded in its place.

    Raises:
        OffsetOutOfRangeError, CorruptBatchError: As when reading.
    """
    version = log.context.catalog.version
    while True:
        stop, before = stop if now is None else now(), version()
        hasher = KeyHasher()
        known = _last_offsets(log, start, stop, hasher)
        if now is None or version() == before or now() == stop:
            break  # Nothing was replaced while the keys were read.
    seen = [np.empty(0, np.int64)]
    for first, found in _reads(log, start, stop):
        chunk = ScannedBatches(found, hasher, whole=True)
        rows = _records(chunk, first, stop) & where_last(chunk, known)
        parts = [(at, rows[chunk.start(at) : chunk.ends[at]]) for at in range(len(found))]
        if wanted := [(at, part) for at, part in parts if part.any()]:
            seen.append(chunk.offsets[rows] + 1)
            yield chunk.table(wanted)
    gone = np.setdiff1d(known.all_ends(), np.concatenate(seen))
    if len(gone) and now is not None and now() > stop:
        yield from _replacing(log, stop, now, lambda keys: np.isin(known.ends(*keys), gone), hasher)


def _last_offsets(log: PartitionLog, start: int, stop: int, hasher: KeyHasher) -> OffsetMap:
    records = sum(one.count for _, found in _reads(log, start, stop) for one in found)
    # Room to note every offset, unless there are far more of them than records.
    room = 16 * SLOT_BYTES * (records + 64)
    known = OffsetMap(room, 1.0, start, stop, most=records)
    for first, found in _reads(log, start, stop):
        chunk = ScannedBatches(found, hasher)
        rows = _records(chunk, first, stop)
        high, low = chunk.hashes
        known.add(high[rows], low[rows], chunk.offsets[rows])
    return known


def _replacing(
    log: PartitionLog,
    start: int,
    now: Callable[[], int],
    wanted: Callable[[tuple[Words, Words]], Words],
    hasher: KeyHasher,
) -> Iterator[Any]:
    """Yield the last records of some keys that lie past what was read."""
    for table in last_records(log, start, now(), now):
        mask = wanted(hasher.keys(table["key"].combine_chunks()))
        bits = pa.py_buffer(np.packbits(mask, bitorder="little"))
        if mask.any():
            yield table.filter(pa.Array.from_buffers(pa.bool_(), len(mask), [None, bits], 0))


def _reads(log: PartitionLog, start: int, stop: int) -> Iterator[tuple[int, list[Batch]]]:
    """Yield batches of one segment at a time, and from which offset on they were not seen yet."""
    reader = log.reader(start)
    while (first := reader.offset) < stop:
        found = reader.read(_READ_BYTES)
        if not found:
            return
        some = [one for one in found if one.count and one.base_offset < stop]
        if some:
            yield first, some


def _records(chunk: ScannedBatches, start: int, stop: int) -> Words:
    """Return which rows are records with a key, within some offsets."""
    rows = (chunk.offsets >= start) & (chunk.offsets < stop)
    if chunk.valid is not None:
        rows &= chunk.valid
    data = data_rows(chunk)
    return rows if data is None else rows & data


class LastRecord(NamedTuple):
    """The last record of a key in a partition."""

    offset: int
    timestamp: int
    value: bytes | None


def last_record(log: PartitionLog, key: bytes, start: int, stop: int) -> LastRecord | None:
    """Return the last record of one key in ``[start, stop)``; None if it has none.

    Looks at the keys of the newest segment first, and at no others if it is there.
    """
    log.refresh()
    wanted = data(key, pa.binary())
    for info in reversed(log.segments.values()):
        first = max(info.base_offset, start)
        end = stop if info.next_offset is None else min(info.next_offset, stop)
        found = None
        for since, some in _reads(log, first, end) if first < end else ():
            found = _last_in(some, wanted, since, end) or found
        if found is not None:
            return found
    return None


def _last_in(found: Sequence[Batch], key: Any, start: int, stop: int) -> LastRecord | None:
    for one in reversed(found):
        rows = np.flatnonzero(_equal(one, key))
        if not len(rows) or one.flags & CONTROL:
            continue
        offsets = offsets_of(one)[rows]
        within = np.flatnonzero((offsets >= start) & (offsets < stop))
        if len(within):
            place = int(within[-1])
            times, values = one.columns(("timestamp", "value")).columns
            row = int(rows[place])
            return LastRecord(int(offsets[place]), times[row].value, values[row].as_py())
    return None


def _equal(one: Batch, key: Any) -> Words:
    same = pc.equal(one.columns(("key",)).column(0), key)
    bits = np.unpackbits(np.frombuffer(same.buffers()[1], np.uint8), bitorder="little")
    return (bits[same.offset : same.offset + len(same)] == 1) & ~nulls(same)
