"""The statistics of the sealed segments of a typed topic, and what a filter need not read by them.

The statistics are rows of `state`, written when a segment is sealed or replaced, and by
housekeeping where that did not happen.  They are optional: a segment without them is read.
Those of batches are in their blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from embedlog import catalog, keyspace, kv
from embedlog.batch import Batch, EncodedBatch
from embedlog.batch.wire import ENTRY
from embedlog.catalog import SegmentInfo
from embedlog.errors import CorruptBatchError, CorruptionError, StorageError
from embedlog.schemas.pruning import Pruner
from embedlog.schemas.statistics import (
    RowStatistics,
    merged,
    of_batch,
    pack_rows,
    unpack,
    unpack_rows,
)
from embedlog.segment import joined

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


# Skipping segments and batches that have no row for which an expression is true


_ALL_BYTES = 1 << 62

Range = tuple[int, int]
"""Offsets ``[start, stop)``."""


def ranges_to_read(log: PartitionLog, start: int, stop: int, pruner: Pruner) -> list[Range]:
    """Return the offsets of ``[start, stop)`` that may have a row for which the filter is true.

    In order, and joined where they meet.  Sealed segments that cannot have one are not opened.
    """
    segments = log.segments_between(start, stop)
    if not segments or not pruner.names:
        return [(start, stop)]
    ranges: list[Range] = []
    for info, may_match in zip(segments, _segments_to_read(log, segments, pruner), strict=True):
        end = stop if info.next_offset is None else info.next_offset
        part = max(info.base_offset, start), min(end, stop)
        if may_match and part[0] < part[1]:
            ranges += _batches_to_read(log, info, part, pruner)
    return joined(ranges)


def _segments_to_read(
    log: PartitionLog, segments: Sequence[SegmentInfo], pruner: Pruner
) -> list[bool]:
    known: dict[tuple[bool, bool, int], list[tuple[SegmentInfo, RowStatistics]]] = {}
    for info in segments:
        statistics = statistics_of(log, info) if info.sealed and info.schema_version else None
        if statistics is not None:
            columns = info.headers, info.tombstones, info.schema_version
            known.setdefault(columns, []).append((info, statistics))
    skipped = set()
    for of_columns in known.values():
        stored = log.schema_of(of_columns[0][0], offsets=True)
        kept = pruner.keep([statistics for _, statistics in of_columns], stored)
        skipped |= {info.id for (info, _), keep in zip(of_columns, kept, strict=True) if not keep}
    return [info.id not in skipped for info in segments]


def _batches_to_read(
    log: PartitionLog, info: SegmentInfo, part: Range, pruner: Pruner
) -> list[Range]:
    """Return the ranges of a segment to read, by the blocks of its batches."""
    try:
        batches = _batches(log, info)
    except (CorruptionError, StorageError, struct.error):
        return [part]  # Reading it reports the damage, if it is in what is read.
    if len(batches) < 2 or batches[-1].next_offset < part[1]:
        return [part]
    kept = pruner.keep([of_batch(batch) for batch in batches], batches[0].layout.original)
    ranges = []
    for batch, keep in zip(batches, kept, strict=True):
        start, stop = max(batch.base_offset, part[0]), min(batch.next_offset, part[1])
        if keep and start < stop:
            ranges.append((start, stop))
    return ranges


def _batches(log: PartitionLog, info: SegmentInfo) -> list[Batch]:
    if not info.sealed:
        tail = log.tail()
        if tail.segment_id != info.id:
            return []  # It was sealed meanwhile.
        file = log.open_shared(info)
        return list(file.heads(file.start, tail.high_watermark_position))
    file = log.open_segment(info)
    batches = file.mapped(file.start, info.end_position, _ALL_BYTES)
    last = batches[-1] if batches else None
    if last is not None and last.position + last.size != info.end_position:
        raise CorruptBatchError("A batch is damaged", path=file.path)
    return batches
