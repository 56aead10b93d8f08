"""Splits ranges of offsets into input partitions of about the same size; no data is read.

A task costs 17 to 75 ms whatever it reads, so small ranges share tasks, as many
as there are cores; large ranges are split, at the start of a batch if possible.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from embedlog.partition import PartitionLog
from embedlog.partition.extents import extents, offset_near
from embedlog.record import TopicPartition
from embedlog.spark.partition_reader import FileChunk, LogInputPartition, PartitionSlice
from embedlog.spark.source_options import SourceOptions

MIN_SPLIT_BYTES = 8 << 20
"""Ranges are not split into smaller parts for the sake of idle cores."""


class PartitionOffsets(NamedTuple):
    """The offsets ``[from_offset, until_offset)`` of a partition."""

    topic_partition: TopicPartition
    from_offset: int
    until_offset: int


def plan_input_partitions(
    root: str,
    ranges: Sequence[PartitionOffsets],
    log_of: Callable[[TopicPartition], PartitionLog],
    options: SourceOptions,
    cores: int | None = None,
) -> list[LogInputPartition]:
    """Return the input partitions that read the ranges.

    Args:
        root: The path of the log root.
        ranges: The offsets to read; empty ranges need no input partition.
        log_of: Returns the log of a partition.
        options: minPartitions, maxRecordsPerPartition and maxBytesPerPartition.
        cores: How many tasks run at once; the cores of this process by default.
    """
    whole = [_slice(log_of(each[0]), *each[1:]) for each in ranges if each[1] < each[2]]
    sizes = [each.size for each in whole]
    wanted = task_count(sizes, cores or len(os.sched_getaffinity(0)), options)
    slices: list[PartitionSlice] = []
    for each, parts in zip(whole, split_counts(sizes, wanted), strict=True):
        parts = max(parts, -(-each.size // options.max_bytes_per_partition))
        log = log_of(TopicPartition(each.topic, each.partition))
        slices += _split(log, each, parts, options.max_records_per_partition)
    if options.max_records_per_partition is not None:
        return [LogInputPartition(root, (each,)) for each in slices]
    return [LogInputPartition(root, tuple(packed)) for packed in pack_slices(slices, wanted)]


def task_count(sizes: Sequence[int], cores: int, options: SourceOptions) -> int:
    """Return how many tasks to use for ranges of these sizes in bytes."""
    total = sum(sizes)
    return max(
        min(len(sizes), cores),
        min(total // MIN_SPLIT_BYTES, cores),
        -(-total // options.max_bytes_per_partition),
        options.min_partitions or 0,
    )


def split_counts(sizes: Sequence[int], wanted: int) -> list[int]:
    """Return into how many parts to split each range, so that there are about ``wanted`` parts.

    As in Kafka's source, small ranges stay whole and the others share the remaining
    parts in proportion to their sizes.

    >>> split_counts([1000, 10, 10], 6)
    [4, 1, 1]
    >>> split_counts([10, 10, 10], 2)
    [1, 1, 1]
    """
    if wanted <= len(sizes):
        return [1] * len(sizes)
    total = sum(sizes)
    small = [_share(size, total, wanted) == 1 for size in sizes]
    large_total = total - sum(size for size, is_small in zip(sizes, small, strict=True) if is_small)
    remaining = max(wanted - sum(small), 1)
    return [
        1 if is_small else _share(size, large_total, remaining)
        for size, is_small in zip(sizes, small, strict=True)
    ]


def _share(size: int, total: int, wanted: int) -> int:
    """Return the share of ``size`` in the wanted parts, rounded, at least 1."""
    return max((2 * size * wanted + total) // (2 * total), 1) if total else 1


def pack_slices(slices: Sequence[PartitionSlice], max_tasks: int) -> list[list[PartitionSlice]]:
    """Distribute slices over tasks of about the same size, the largest slices first.

    The slices of a partition are in the order of the tasks: a sink publishes what tasks
    wrote in that order, so a copy of a topic keeps the order of its records.
    """
    if len(slices) <= max_tasks:
        return [[each] for each in slices]
    tasks_of: dict[tuple[str, int], list[int]] = {}
    sizes = [0] * max_tasks
    for each in sorted(slices, key=lambda each: -each.size):
        smallest = sizes.index(min(sizes))
        tasks_of.setdefault((each.topic, each.partition), []).append(smallest)
        sizes[smallest] += max(each.size, 1)
    for numbers in tasks_of.values():
        numbers.sort(reverse=True)
    tasks: list[list[PartitionSlice]] = [[] for _ in range(max_tasks)]
    # The slices of a partition are about equal, so any of them may go to any of its tasks.
    for each in sorted(slices, key=lambda each: (each.topic, each.partition, each.from_offset)):
        tasks[tasks_of[each.topic, each.partition].pop()].append(each)
    return [task for task in tasks if task]


def _slice(log: PartitionLog, from_offset: int, until_offset: int) -> PartitionSlice:
    # The epoch first: if the log is truncated after this, new batches have a later epoch.
    epoch = log.tail().leader_epoch
    chunks, size = [], 0
    for extent in extents(log, from_offset, until_offset):
        info = extent.info
        chunks.append(
            FileChunk(extent.path, info.sealed, info.headers, extent.position, extent.end_position)
        )
        size += extent.size
    return PartitionSlice(
        log.topic, log.partition, from_offset, until_offset, epoch, tuple(chunks), size
    )


def _split(
    log: PartitionLog, whole: PartitionSlice, parts: int, max_records: int | None
) -> Iterator[PartitionSlice]:
    """Split a slice into parts of about the same size, none with more offsets than allowed."""
    bounds = [whole.from_offset, *_split_offsets(log, whole, parts), whole.until_offset]
    if max_records is not None:
        starts = [
            start + (until - start) * part // count
            for start, until in pairwise(bounds)
            for count in [-(-(until - start) // max_records)]
            for part in range(count)
        ]
        bounds = [*starts, whole.until_offset]
    if len(bounds) == 2:
        yield whole
        return
    for start, until in pairwise(bounds):
        yield _slice(log, start, until)


def _split_offsets(log: PartitionLog, whole: PartitionSlice, parts: int) -> list[int]:
    """Return the offsets at which to split a slice into parts of about the same bytes."""
    parts = min(parts, whole.until_offset - whole.from_offset)
    if parts <= 1:
        return []
    pieces = extents(log, whole.from_offset, whole.until_offset)
    ends = list(accumulate(extent.size for extent in pieces))
    if not ends or not ends[-1]:
        return []
    reach = ends[-1] // parts // 8
    offsets: set[int] = set()
    for part in range(1, parts):
        target = ends[-1] * part // parts
        number = next(i for i, end in enumerate(ends) if target < end)
        extent = pieces[number]
        position = extent.end_position - (ends[number] - target)
        offsets.add(offset_near(log, extent, position, reach))
    return sorted(each for each in offsets if whole.from_offset < each < whole.until_offset)
