"""The statistics of the sealed segments of a typed topic: rows of `state`.

They are written when a segment is sealed or replaced, and by housekeeping where that did not
happen.  They are optional: a segment without them is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from embedlog import catalog, keyspace, kv
from embedlog.batch import EncodedBatch
from embedlog.batch.wire import ENTRY
from embedlog.catalog import SegmentInfo
from embedlog.errors import CorruptionError
from embedlog.schemas.statistics import (
    RowStatistics,
    merged,
    of_batch,
    pack_rows,
    unpack,
    unpack_rows,
)

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

MAX_BATCHES_AT_ROLL = 10_000
"""A roll computes the statistics of a segment with at most this many batches, which takes up to
0.1 s under the partition's lock; housekeeping those of others."""
_ALL = 1 << 62


def statistics_of(log: PartitionLog, info: SegmentInfo) -> RowStatistics | None:
    """Return the statistics of a sealed segment; None if there are none, or they are damaged."""
    table, key = keyspace.SEGMENT_STATISTICS, info.key
    try:
        value = log.context.state.read(lambda txn: table.get(txn, log.key, *key))
        return None if value is None else unpack_rows(value)
    except keyspace.DAMAGE:
        return None


def compute(log: PartitionLog, info: SegmentInfo, max_batches: int = _ALL) -> bytes | None:
    """Return the statistics of a segment from the blocks of its batches, as `state` has them.

    None for a topic of bytes, and if there are more batches, or damage.
    """
    if not info.schema_version:
        return None
    file, rows = log.open_segment(info), []
    try:
        for number, batch in enumerate(file.scan(file.start, info.end_position)):
            if number >= max_batches:
                return None
            rows.append(of_batch(batch))
    except CorruptionError:
        return None
    return packed(log, info, rows)


def add(log: PartitionLog, info: SegmentInfo) -> bool:
    """Write the statistics of a sealed segment; False if it has none, or was replaced."""
    statistics = compute(log, info)
    if statistics is None:
        return False

    def step(txn: kv.Txn) -> bool:
        if catalog.segment_at(txn, log.key, info.base_offset) != info:
            return False
        put(txn, log, info, statistics)
        return True

    return log.context.state.write(step)


def packed(log: PartitionLog, info: SegmentInfo, rows: Iterable[RowStatistics]) -> bytes | None:
    """Return the statistics of all batches of a segment, as `state` has them; None without any."""
    statistics = merged(rows)
    return None if statistics is None else pack_rows(statistics, log.schema_of(info, offsets=True))


def of_encoded(batch: EncodedBatch) -> RowStatistics:
    """Return the statistics of a batch that is being written."""
    end = len(batch.table) - 8 - batch.statistics_bytes
    nulls = tuple(number for _, _, number in ENTRY.iter_unpack(batch.table[:end]))
    return RowStatistics(batch.count, nulls, unpack(batch.table[end:-8]))


def put(txn: kv.Txn, log: PartitionLog, info: SegmentInfo, statistics: bytes | None) -> None:
    """Write the statistics of a segment that is sealed, or delete those of an earlier sealing."""
    if not info.schema_version:
        return
    table, key = keyspace.SEGMENT_STATISTICS, info.key
    if statistics is None:
        table.delete(txn, log.key, *key)
    else:
        table.put(txn, log.key, *key, value=statistics)
