"""Skipping segments and batches of a typed topic that have no row for which an expression is true.

By the statistics of segments in `state`, and those of batches in their blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from embedlog.batch import Batch
from embedlog.catalog import SegmentInfo
from embedlog.errors import CorruptBatchError, CorruptionError, StorageError
from embedlog.partition.segment_statistics import statistics_of
from embedlog.schemas.pruning import Pruner
from embedlog.schemas.statistics import RowStatistics, of_batch
from embedlog.segment import joined

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

_ALL = 1 << 62

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
    batches = file.mapped(file.start, info.end_position, _ALL)
    last = batches[-1] if batches else None
    if last is not None and last.position + last.size != info.end_position:
        raise CorruptBatchError("A batch is damaged", path=file.path)
    return batches
