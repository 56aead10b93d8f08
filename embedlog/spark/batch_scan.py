"""Plans a batch query: the input partitions that read what is in the log at that moment."""

from __future__ import annotations

import uuid

from embedlog.errors import OffsetOutOfRangeError
from embedlog.spark.input_partitions import PartitionOffsets, plan_input_partitions
from embedlog.spark.partition_reader import LogInputPartition
from embedlog.spark.source import LogSource
from embedlog.spark.source_options import EARLIEST, LATEST, OffsetBound, SourceOptions

_MAX_LEASE_ATTEMPTS = 10
"""Attempts to lease records while retention deletes the first of them."""


def plan_batch(options: SourceOptions) -> list[LogInputPartition]:
    """Return the input partitions of a batch query.

    Raises:
        NotALogError: There is no log at the path.
        UnknownTopicOrPartitionError: A topic named in the options does not exist.
        InvalidConfigError: Offsets are given for other partitions than are read.
        OffsetOutOfRangeError: The query starts after its end, or ends past the end of the log.
        DataLossError: It starts at deleted records, and failOnDataLoss is true.
    """
    source = LogSource(options, durable=False)
    try:
        source.check_topics()
        ranges = _leased_ranges(source)
        return plan_input_partitions(options.path, ranges, source.partitions().__getitem__, options)
    finally:
        source.close()


def _leased_ranges(source: LogSource) -> list[PartitionOffsets]:
    """Return the ranges to read, under a lease; if retention was faster, resolve them again."""
    lease_name = str(uuid.uuid4())
    for _ in range(_MAX_LEASE_ATTEMPTS):
        ranges = _resolve_ranges(source)
        if source.hold(lease_name, {key: start for key, start, until in ranges if start < until}):
            break
    return ranges


def _resolve_ranges(source: LogSource) -> list[PartitionOffsets]:
    options = source.options
    # The ends first: records appended in between move a start to its end, not past it.
    ends = source.ending_offsets(options.ending_offsets or OffsetBound("offset", LATEST))
    starts = source.starting_offsets(options.starting_offsets or OffsetBound("offset", EARLIEST))
    ranges = [PartitionOffsets(key, starts[key], ends[key]) for key in sorted(starts.keys() & ends)]
    bounds = (options.starting_offsets, options.ending_offsets)
    # A start after the end is a mistake if both are offsets; with timestamps it is an empty range.
    check_order = all(bound is not None and bound.by == "offset" for bound in bounds)
    for topic_partition, start, until in ranges:
        if check_order and start > until:
            raise OffsetOutOfRangeError(
                f"The query starts after its end, offset {until}",
                topic=topic_partition.topic,
                partition=topic_partition.partition,
                offset=start,
                todo="Set startingOffsets at or below endingOffsets.",
            )
    return ranges
