"""Plans the input partitions of a query, of about the same size; no data is read.

A task costs 17 to 75 ms whatever it reads, so small ranges share tasks, as many
as there are cores; large ranges are split, at the start of a batch if possible.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from heapq import heapreplace
from itertools import accumulate, compress, pairwise
from typing import Any, NamedTuple

from embedlog.errors import OffsetOutOfRangeError
from embedlog.files import process_id
from embedlog.partition import PartitionLog
from embedlog.partition.lookup import Extent, extents, narrow, offset_near
from embedlog.record import TopicPartition
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.spark import filters as query_filters
from embedlog.spark.log_cache import LogCache
from embedlog.spark.options import EARLIEST, LATEST, OffsetBound, SourceOptions
from embedlog.spark.plan import (
    FileChunk,
    LogInputPartition,
    PartitionOffsets,
    PartitionSlice,
    TopicVersions,
)
from embedlog.spark.query_schemas import QuerySchemas
from embedlog.spark.source import LogSource

_MAX_LEASE_ATTEMPTS = 10
"""Attempts to lease records while retention deletes the first of them."""
MIN_SPLIT_BYTES = 8 << 20
"""Ranges are not split into smaller parts for the sake of idle cores."""


class _LocatedRange(NamedTuple):
    """A range of offsets of one partition, and where they are."""

    log: PartitionLog
    from_offset: int
    until_offset: int
    leader_epoch: int
    extents: list[Extent]

    @property
    def size(self) -> int:
        """How many bytes to read."""
        return sum(extent.size for extent in self.extents)

    @property
    def rows(self) -> int | None:
        """How many rows it has; None if offsets may lack them."""
        known = sum(extent.stop - extent.first for extent in self.extents if _is_counted(extent))
        return known if known == self.until_offset - self.from_offset else None

    def between(self, from_offset: int, until_offset: int) -> _LocatedRange:
        """Return a part of it."""
        if (from_offset, until_offset) == (self.from_offset, self.until_offset):
            return self
        parts = narrow(self.log, self.extents, from_offset, until_offset)
        return self._replace(from_offset=from_offset, until_offset=until_offset, extents=parts)

    def first_records(self, count: int) -> tuple[_LocatedRange, int]:
        """Return the part that surely has the first ``count`` records, and how many it lacks.

        Offsets where records may be missing are not counted.
        """
        for extent in self.extents:
            if _is_counted(extent) and extent.stop - extent.first >= count:
                return self.between(self.from_offset, extent.first + count), 0
            count -= (extent.stop - extent.first) if _is_counted(extent) else 0
        return self, count

    def to_slice(self) -> PartitionSlice:
        """Return the slice that a task reads."""
        chunks = tuple(
            FileChunk(
                *(path, info.sealed, info.headers, position, end_position),
                *(info.schema_version, info.tombstones),
            )
            for info, path, _, _, position, end_position in self.extents
        )
        directories_of = self.log.context.files.directories_of
        return PartitionSlice(
            *(self.log.topic, self.log.partition, self.from_offset, self.until_offset),
            *(self.leader_epoch, chunks, self.size, self.rows),
            directories_of(chunks[0].path) if chunks else (),
        )


def _is_counted(extent: Extent) -> bool:
    """Whether each offset is a row: a query leaves out the tombstones of a typed topic."""
    return extent.dense and not extent.info.tombstones


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
    located = list(_locate(logs, ranges, limit))
    sizes = [part.size for part in located]
    wanted = task_count(sizes, cores or len(os.sched_getaffinity(0)), options)
    slices: list[PartitionSlice] = []
    for part, size, count in zip(located, sizes, split_counts(sizes, wanted), strict=True):
        count = max(count, -(-size // options.max_bytes_per_partition))
        slices += _split(part, count, options.max_records_per_partition)
    tasks = [[part] for part in slices]
    if options.max_records_per_partition is None:
        tasks = pack_slices(slices, wanted)
    versions = _versions(logs, slices, schemas or {})
    return [
        LogInputPartition(
            options.path,
            tuple(task),
            {part.topic: versions[part.topic] for part in task if part.topic in versions},
        )
        for task in tasks
    ]


def _versions(
    logs: Mapping[TopicPartition, PartitionLog],
    slices: Sequence[PartitionSlice],
    schemas: Mapping[str, TopicSchema],
) -> dict[str, TopicVersions]:
    """Return the schemas that tasks need to read slices of typed topics."""
    stored: dict[str, dict[int, TopicSchema]] = {name: {} for name in schemas}
    for part in slices:
        if part.topic not in schemas:
            continue
        of_topic = stored[part.topic]
        catalog = logs[TopicPartition(part.topic, part.partition)].context.catalog
        for version in {chunk.schema_version for chunk in part.chunks} - of_topic.keys():
            schema = catalog.schema(catalog.topic(part.topic), version)
            if schema is not None:
                of_topic[version] = schema
    return {name: TopicVersions(schemas[name], versions) for name, versions in stored.items()}


def _locate(
    logs: Mapping[TopicPartition, PartitionLog],
    ranges: Iterable[PartitionOffsets],
    limit: int | None,
) -> Iterator[_LocatedRange]:
    """Yield where the ranges are; with a limit, the first that surely have as many records."""
    for key, start, until in ranges:
        if limit == 0:
            return
        if start >= until:
            continue
        if limit is None:
            yield _located(logs[key], start, until)
            continue
        # Without gaps there are as many records as offsets, and the rest is not looked up.
        part = _located(logs[key], start, min(until, start + limit))
        if part.rows is None:
            part = _located(logs[key], start, until)
        part, limit = part.first_records(limit)
        yield part


def _located(log: PartitionLog, start: int, until: int) -> _LocatedRange:
    # The epoch first: if the log is truncated after this, new batches have a later epoch.
    epoch = log.tail().leader_epoch
    return _LocatedRange(log, start, until, epoch, extents(log, start, until))


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
    large = [_share(size, total, wanted) > 1 for size in sizes]
    large_total = sum(compress(sizes, large))
    remaining = max(wanted - len(sizes) + sum(large), 1)
    return [
        _share(size, large_total, remaining) if is_large else 1
        for size, is_large in zip(sizes, large, strict=True)
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


def _split(whole: _LocatedRange, parts: int, max_records: int | None) -> Iterator[PartitionSlice]:
    """Split a range into slices of about the same size, none with more offsets than allowed."""
    bounds = [whole.from_offset, *_split_offsets(whole, parts), whole.until_offset]
    if max_records is not None:
        starts = [
            start + (until - start) * part // count
            for start, until in pairwise(bounds)
            for count in [-(-(until - start) // max_records)]
            for part in range(count)
        ]
        bounds = [*starts, whole.until_offset]
    for start, until in pairwise(bounds):
        yield whole.between(start, until).to_slice()


def _split_offsets(whole: _LocatedRange, parts: int) -> list[int]:
    """Return the offsets at which to split a range into parts of about the same bytes."""
    parts = min(parts, whole.until_offset - whole.from_offset)
    ends = list(accumulate(extent.size for extent in whole.extents))
    if parts <= 1 or not ends or not ends[-1]:
        return []
    reach = ends[-1] // parts // 8
    offsets: set[int] = set()
    for part in range(1, parts):
        target = ends[-1] * part // parts
        number = bisect_right(ends, target)
        extent = whole.extents[number]
        position = extent.end_position - (ends[number] - target)
        offsets.add(offset_near(whole.log, extent, position, reach))
    return sorted(cut for cut in offsets if whole.from_offset < cut < whole.until_offset)
