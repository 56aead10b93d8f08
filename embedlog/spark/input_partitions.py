"""Plans the input partitions of a query, of about the same size; no data is read.

A task costs 17 to 75 ms whatever it reads, so small ranges share tasks, as many
as there are cores; large ranges are split, at the start of a batch if possible.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from heapq import heapreplace
from typing import Any

from embedlog.errors import OffsetOutOfRangeError
from embedlog.files import process_id
from embedlog.partition import PartitionLog
from embedlog.record import TopicPartition
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.spark import filters as query_filters
from embedlog.spark.log_cache import LogCache
from embedlog.spark.options import EARLIEST, LATEST, OffsetBound, SourceOptions
from embedlog.spark.plan import LogInputPartition
from embedlog.spark.query_schemas import QuerySchemas
from embedlog.spark.source import LogSource
from embedlog.splits.locate import locate, split, split_counts, topic_versions
from embedlog.splits.slices import PartitionOffsets, PartitionSlice

_MAX_LEASE_ATTEMPTS = 10
"""Attempts to lease records while retention deletes the first of them."""
MIN_SPLIT_BYTES = 8 << 20
"""Ranges are not split into smaller parts for the sake of idle cores."""


def plan_batch(
    options: SourceOptions,
    filters: Iterable[Sequence[Any]] = (),
    limit: int | None = None,
    cores: int | None = None,
    cache: LogCache | None = None,
    session: str | None = None,
    schemas: QuerySchemas | None = None,
    column_filters: Sequence[Sequence[Any]] = (),
) -> list[LogInputPartition]:
    """Return the input partitions of a batch query, which read what is in the log now.

    Args:
        options: The options of the reader.
        filters: ``(column, op, value)``, as in `embedlog.spark.filters`.
        limit: The query needs this many of the records, no matter which.
        cores: How many tasks run at once; by default the cores that this process may use.
        cache: Where the log stays open for other queries.
        session: The Spark session, whose batch queries share leases; by default the JVM that
            started this process.
        schemas: Those of typed topics; by default the current ones.
        column_filters: Filters on the columns of typed topics, as in `embedlog.spark.filters`; the
            query applies them again.

    Raises:
        NotALogError: There is no log at the path.
        UnknownTopicOrPartitionError: A topic named in the options does not exist.
        InvalidConfigError: Offsets are given for other partitions than are read, a filter
            cannot be applied, or a topic does not have the columns of the query.
        OffsetOutOfRangeError: The query starts after its end, or ends past the end of the log.
        DataLossError: It starts at deleted records, and failOnDataLoss is true.
    """
    pushed = query_filters.parse(filters)
    # Of the records before the limit, a filter that Spark applies again may leave too few.
    limit = limit if pushed.exact and not column_filters else None
    with closing(LogSource(options, durable=False, cache=cache)) as source:
        source.check_topics()
        schemas = schemas or QuerySchemas(options)
        schemas.update(source.log.root)
        session = session or str(process_id.ancestor("java") or process_id.process())
        for _ in range(_MAX_LEASE_ATTEMPTS):
            ranges = _resolve_ranges(source)
            # Only now: the same offsets are refused with filters as without.
            ranges = pushed.narrow(source.partitions(), ranges)
            if source.hold_for_batch(session, _starts(ranges)):
                break
        logs, by_topic = source.partitions(), schemas.schemas
        if column_filters and by_topic:
            ranges = query_filters.narrow(column_filters, by_topic, logs, ranges)
        return plan_input_partitions(options, logs, ranges, cores, limit, by_topic)


def _starts(ranges: Iterable[PartitionOffsets]) -> dict[TopicPartition, int]:
    """Return the first offset of each partition to read; the ranges are in order."""
    starts: dict[TopicPartition, int] = {}
    for key, start, until in ranges:
        if start < until:
            starts.setdefault(key, start)
    return starts


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
    ranges: Iterable[PartitionOffsets],
    cores: int | None = None,
    limit: int | None = None,
    schemas: Mapping[str, TopicSchema] | None = None,
) -> list[LogInputPartition]:
    """Return the input partitions that read some ranges of offsets; skips empty ranges.

    Args:
        options: The options of the reader.
        logs: The partitions.
        ranges: What to read of them.
        cores: As in `plan_batch`.
        limit: As in `plan_batch`.
        schemas: The versions through which typed topics are read, by the topics' names.
    """
    located = list(locate(logs, ranges, limit))
    sizes = [part.size for part in located]
    wanted = task_count(sizes, cores or len(os.sched_getaffinity(0)), options)
    slices: list[PartitionSlice] = []
    for part, size, count in zip(located, sizes, split_counts(sizes, wanted), strict=True):
        count = max(count, -(-size // options.max_bytes_per_partition))
        slices += split(part, count, options.max_records_per_partition)
    tasks = [[part] for part in slices]
    if options.max_records_per_partition is None:
        tasks = pack_slices(slices, wanted)
    versions = topic_versions(logs, slices, schemas or {})
    return [
        LogInputPartition(
            options.path,
            tuple(task),
            {part.topic: versions[part.topic] for part in task if part.topic in versions},
        )
        for task in tasks
    ]


def task_count(sizes: Sequence[int], cores: int, options: SourceOptions) -> int:
    """Return how many tasks to use for ranges of these sizes in bytes."""
    total = sum(sizes)
    return max(
        min(len(sizes), cores),
        min(total // MIN_SPLIT_BYTES, cores),
        -(-total // options.max_bytes_per_partition),
        options.min_partitions or 0,
    )


def pack_slices(slices: Sequence[PartitionSlice], max_tasks: int) -> list[list[PartitionSlice]]:
    """Distribute slices over tasks of about the same size, the largest slices first.

    The slices of a partition are in the order of the tasks: a sink publishes what tasks
    wrote in that order, so a copy of a topic keeps the order of its records.
    """
    if len(slices) <= max_tasks:
        return [[part] for part in slices]
    tasks_of: dict[tuple[str, int], list[int]] = {}
    sizes = [(0, number) for number in range(max_tasks)]
    for part in sorted(slices, key=lambda part: -part.size):
        size, smallest = sizes[0]
        tasks_of.setdefault((part.topic, part.partition), []).append(smallest)
        heapreplace(sizes, (size + max(part.size, 1), smallest))
    for numbers in tasks_of.values():
        numbers.sort(reverse=True)
    tasks: list[list[PartitionSlice]] = [[] for _ in range(max_tasks)]
    # The slices of a partition are about equal, so any of them may go to any of its tasks.
    for part in sorted(slices, key=lambda part: (part.topic, part.partition, part.from_offset)):
        tasks[tasks_of[part.topic, part.partition].pop()].append(part)
    return [task for task in tasks if task]
