"""From ranges of offsets to tasks of about the same number of bytes; no data is read.

A task costs 17 to 75 ms whatever it reads, so there are no more of them than
cores for what is small; what is large is cut, best where a batch begins.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from embedlog.partition import PartitionLog
from embedlog.partition.extents import Extent, extents, offset_near
from embedlog.record import TopicPartition
from embedlog.spark.partition_reader import FileChunk, LogInputPartition, PartitionSlice
from embedlog.spark.source_options import SourceOptions

SMALL_BYTES = 8 << 20
"""Not worth to be cut, for the sake of another core."""


class PartitionOffsets(NamedTuple):
    """Offsets ``[first, stop)`` of a partition."""

    where: TopicPartition
    first: int
    stop: int


def plan(
    root: str,
    ranges: Sequence[PartitionOffsets],
    log_of: Callable[[TopicPartition], PartitionLog],
    options: SourceOptions,
    slots: int | None = None,
) -> list[LogInputPartition]:
    """Return the tasks that read the ranges.

    Args:
        root: The directory of the log.
        ranges: What to read; empty ones make no task.
        log_of: Returns the log of a partition.
        options: minPartitions, maxRecordsPerPartition and maxBytesPerPartition.
        slots: How many tasks run at once; unless given, the cores of this process.
    """
    whole = [_piece(log_of(one.where), one) for one in ranges if one.first < one.stop]
    slots = slots or len(os.sched_getaffinity(0))
    sizes = [piece.size for piece in whole]
    wanted = tasks_for(sizes, slots, options)
    pieces: list[PartitionSlice] = []
    for piece, parts in zip(whole, parts_of(sizes, wanted), strict=True):
        parts = max(parts, -(-piece.size // options.max_bytes_per_partition))
        log = log_of(TopicPartition(piece.topic, piece.partition))
        pieces += _cut(log, piece, parts, options.max_records_per_partition)
    if options.max_records_per_partition is not None:
        return [LogInputPartition(root, (piece,)) for piece in pieces]
    return [LogInputPartition(root, tuple(some)) for some in packed(pieces, wanted)]


def tasks_for(sizes: Sequence[int], slots: int, options: SourceOptions) -> int:
    """Return how many tasks there should be for ranges of so many bytes."""
    total = sum(sizes)
    return max(
        min(len(sizes), slots),
        min(total // SMALL_BYTES, slots),
        -(-total // options.max_bytes_per_partition),
        options.min_partitions or 0,
    )


def parts_of(sizes: Sequence[int], wanted: int) -> list[int]:
    """Return in how many parts to cut each of some ranges, so that there are about ``wanted``.

    As Kafka's source does it: small ranges are left whole, and the others share
    what is left of the number in proportion.

    >>> parts_of([1000, 10, 10], 6)
    [4, 1, 1]
    >>> parts_of([10, 10, 10], 2)
    [1, 1, 1]
    """
    if wanted <= len(sizes):
        return [1] * len(sizes)
    total = sum(sizes)
    small = [_rounded(size, total, wanted) == 1 for size in sizes]
    large_total = total - sum(size for size, is_small in zip(sizes, small, strict=True) if is_small)
    left = max(wanted - sum(small), 1)
    return [
        1 if is_small else _rounded(size, large_total, left)
        for size, is_small in zip(sizes, small, strict=True)
    ]


def _rounded(size: int, total: int, wanted: int) -> int:
    return max((2 * size * wanted + total) // (2 * total), 1) if total else 1


def packed(pieces: Sequence[PartitionSlice], bins: int) -> list[list[PartitionSlice]]:
    """Return pieces in at most so many bins of about the same size, the largest first.

    Those of a partition are in the order of the bins: a sink publishes what tasks
    wrote in the order of the tasks, and a copy is to have the order of what it copies.
    """
    if len(pieces) <= bins:
        return [[piece] for piece in pieces]
    bins_of: dict[tuple[str, int], list[int]] = {}
    sizes = [0] * bins
    for piece in sorted(pieces, key=lambda piece: -piece.size):
        least = sizes.index(min(sizes))
        bins_of.setdefault((piece.topic, piece.partition), []).append(least)
        sizes[least] += max(piece.size, 1)
    for each in bins_of.values():
        each.sort(reverse=True)
    filled: list[list[PartitionSlice]] = [[] for _ in range(bins)]
    # Parts of a partition are about equal, so it does not matter which of them is in which bin.
    for piece in sorted(pieces, key=_place):
        filled[bins_of[piece.topic, piece.partition].pop()].append(piece)
    return [some for some in filled if some]


def _place(piece: PartitionSlice) -> tuple[str, int, int]:
    return piece.topic, piece.partition, piece.first


def _piece(log: PartitionLog, one: PartitionOffsets) -> PartitionSlice:
    # The epoch first: should the log be cut in between, what is written anew has a later one.
    epoch = log.tail().leader_epoch
    found = extents(log, one.first, one.stop)
    size = sum(extent.size for extent in found)
    chunks = tuple(_chunk(extent) for extent in found)
    return PartitionSlice(log.topic, log.partition, one.first, one.stop, epoch, chunks, size)


def _chunk(extent: Extent) -> FileChunk:
    info = extent.info
    return FileChunk(extent.path, info.sealed, info.headers, extent.position, extent.end_position)


def _cut(
    log: PartitionLog, piece: PartitionSlice, parts: int, most_rows: int | None
) -> Iterator[PartitionSlice]:
    """Cut a piece into parts of about the same size, none with more rows than allowed."""
    edges = [piece.first, *_edges(log, piece, parts), piece.stop]
    if most_rows is not None:
        edges = [edge for pair in pairwise(edges) for edge in _even(*pair, most_rows)]
        edges.append(piece.stop)
    if len(edges) == 2:
        yield piece
        return
    where = TopicPartition(piece.topic, piece.partition)
    for first, stop in pairwise(edges):
        yield _piece(log, PartitionOffsets(where, first, stop))


def _even(first: int, stop: int, most: int) -> list[int]:
    """Return where the parts of a range begin that have at most so many offsets each."""
    parts = -(-(stop - first) // most)
    return [first + (stop - first) * part // parts for part in range(parts)]


def _edges(log: PartitionLog, piece: PartitionSlice, parts: int) -> list[int]:
    """Return the offsets at which to cut a piece, by bytes."""
    parts = min(parts, piece.stop - piece.first)
    if parts <= 1:
        return []
    found = extents(log, piece.first, piece.stop)
    ends = list(accumulate(extent.size for extent in found))
    if not ends or not ends[-1]:
        return []
    reach = ends[-1] // parts // 8
    edges: set[int] = set()
    for part in range(1, parts):
        target = ends[-1] * part // parts
        place = next(i for i, end in enumerate(ends) if target < end)
        extent = found[place]
        position = extent.end_position - (ends[place] - target)
        edges.add(offset_near(log, extent, position, reach))
    return sorted(edge for edge in edges if piece.first < edge < piece.stop)
