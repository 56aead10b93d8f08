"""Plans the input partitions of a query, of about the same size; no data is read.

A task costs 17 to 75 ms whatever it reads, so small ranges share tasks, as many
as there are cores; large ranges are split, at the start of a batch if possible.
"""

from __future__ import annotations

import os
import uuid
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import accumulate, pairwise
from typing import NamedTuple

from embedlog.errors import OffsetOutOfRangeError
from embedlog.partition import PartitionLog
from embedlog.partition.extents import extents, offset_near
from embedlog.record import TopicPartition
from embedlog.spark.partition_reader import FileChunk, LogInputPartition, PartitionSlice
from embedlog.spark.source import LogSource
from embedlog.spark.source_options import EARLIEST, LATEST, OffsetBound, SourceOptions

_MAX_LEASE_ATTEMPTS = 10
"""Attempts to lease records while retention deletes the first of them."""
MIN_SPLIT_BYTES = 8 << 20
"""Ranges are not split into smaller parts for the sake of idle cores."""


class PartitionOffsets(NamedTuple):
    """The offsets ``[from_offset, until_offset)`` of a partition."""

    topic_partition: TopicPartition
    from_offset: int
    until_offset: int


def plan_batch(options: SourceOptions) -> list[LogInputPartition]:
    """Return the input partitions of a batch query, which read what is in the log now.

    Raises:
        NotALogError: There is no log at the path.
        UnknownTopicOrPartitionError: A topic named in the options does not exist.
        InvalidConfigError: Offsets are given for other partitions than are read.
        OffsetOutOfRangeError: The query starts after its end, or ends past the end of the log.
        DataLossError: It starts at deleted records, and failOnDataLoss is true.
    """
    with closing(LogSource(options, durable=False)) as source:
        source.check_topics()
        lease_name = str(uuid.uuid4())
        for _ in range(_MAX_LEASE_ATTEMPTS):
            ranges = _resolve_ranges(source)
            starts = {key: start for key, start, until in ranges if start < until}
            if source.hold(lease_name, starts):
                break
        return plan_input_partitions(options, source.partitions(), ranges)


def _resolve_ranges(source: LogSource) -> list[PartitionOffsets]:
    starting, ending = source.options.starting_offsets, source.options.ending_offsets
    # The ends first: records appended in between move a start to its end, not past it.
    ends = source.resolve(ending or OffsetBound("offset", LATEST), "ending")
    starts = source.resolve(starting or OffsetBound("offset", EARLIEST), "starting")
    ranges = [PartitionOffsets(key, starts[key], ends[key]) for key in sorted(starts.keys() & ends)]
    # A start after the end is a mistake if both are offsets; with timestamps it is an empty range.
    if all(bound is not None and bound.by == "offset" for bound in (starting, ending)):
        for topic_partition, start, until in ranges:
            if start > until:
                raise OffsetOutOfRangeError(
                    f"The query starts after its end, offset {until}",
                    **topic_partition._asdict(),
                    offset=start,
                    todo="Set startingOffsets at or below endingOffsets.",
                )
    return ranges


def plan_input_partitions(
    options: SourceOptions,
    logs: Mapping[TopicPartition, PartitionLog],
    ranges: Sequence[PartitionOffsets],
) -> list[LogInputPartition]:
    """Return the input partitions that read some ranges of offsets; skips empty ranges."""
    ranges = [part for part in ranges if part.from_offset < part.until_offset]
    whole = [_slice(logs[key], start, until) for key, start, until in ranges]
    sizes = [part.size for part in whole]
    wanted = task_count(sizes, len(os.sched_getaffinity(0)), options)
    slices: list[PartitionSlice] = []
    for (key, _, _), part, count in zip(ranges, whole, split_counts(sizes, wanted), strict=True):
        count = max(count, -(-part.size // options.max_bytes_per_partition))
        slices += _split(logs[key], part, count, options.max_records_per_partition)
    if options.max_records_per_partition is not None:
        return [LogInputPartition(options.path, (part,)) for part in slices]
    return [LogInputPartition(options.path, tuple(task)) for task in pack_slices(slices, wanted)]


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
    large = [size for size in sizes if _share(size, total, wanted) > 1]
    large_total, remaining = sum(large), max(wanted - len(sizes) + len(large), 1)
    # Equal sizes have equal shares, so a size tells whether it is large.
    return [_share(size, large_total, remaining) if size in large else 1 for size in sizes]


def _share(size: int, total: int, wanted: int) -> int:
    """Return the share of ``size`` in the wanted parts, rounded, at least 1."""
    return max((2 * size * wanted + total) // (2 * total), 1) if total else 1


def pack_slices(slices: Sequence[PartitionSlice], max_tasks: int) -> list[list[PartitionSlice]]:
    """Distribute slices over tasks of about the same size, the largest slices first.

    The slices of a partition are in the order of the tasks: a sink publishes what tasks
    wrote in that order, so a copy of a topic keeps the order of its records.
    """
    if len(slices) <= max_tasks:
        return [[part] for part in slices]
    tasks_of: dict[tuple[str, int], list[int]] = {}
    sizes = [0] * max_tasks
    for part in sorted(slices, key=lambda part: -part.size):
        smallest = sizes.index(min(sizes))
        tasks_of.setdefault((part.topic, part.partition), []).append(smallest)
        sizes[smallest] += max(part.size, 1)
    for numbers in tasks_of.values():
        numbers.sort(reverse=True)
    tasks: list[list[PartitionSlice]] = [[] for _ in range(max_tasks)]
    # The slices of a partition are about equal, so any of them may go to any of its tasks.
    for part in sorted(slices, key=lambda part: (part.topic, part.partition, part.from_offset)):
        tasks[tasks_of[part.topic, part.partition].pop()].append(part)
    return [task for task in tasks if task]


def _slice(log: PartitionLog, from_offset: int, until_offset: int) -> PartitionSlice:
    # The epoch first: if the log is truncated after this, new batches have a later epoch.
    epoch = log.tail().leader_epoch
    parts = extents(log, from_offset, until_offset)
    chunks = tuple(
        FileChunk(part.path, part.info.sealed, part.info.headers, part.position, part.end_position)
        for part in parts
    )
    size = sum(part.size for part in parts)
    return PartitionSlice(log.topic, log.partition, from_offset, until_offset, epoch, chunks, size)


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
        number = bisect_right(ends, target)
        position = pieces[number].end_position - (ends[number] - target)
        offsets.add(offset_near(log, pieces[number], position, reach))
    return sorted(cut for cut in offsets if whole.from_offset < cut < whole.until_offset)
