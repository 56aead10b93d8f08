"""A batch query on the log: its tasks, from what is there when it is planned."""

from __future__ import annotations

import uuid

from embedlog.errors import OffsetOutOfRangeError
from embedlog.spark.input_partitions import PartitionOffsets, plan
from embedlog.spark.partition_reader import LogInputPartition
from embedlog.spark.source import LogSource
from embedlog.spark.source_options import EARLIEST, LATEST, OffsetBound, SourceOptions

_TRIES = 10
"""Looks at a log whose beginning is deleted each time before it is held."""


def works(options: SourceOptions) -> list[LogInputPartition]:
    """Return the tasks of a batch query.

    Raises:
        NotALogError: There is no log.
        UnknownTopicOrPartitionError: A topic that is named is not there.
        InvalidConfigError: Offsets are given for other partitions than are read.
        OffsetOutOfRangeError: It would end before it begins, or past the end.
        DataLossError: It would begin at what is deleted, unless that is not to fail.
    """
    source = LogSource(options, durable=False)
    try:
        source.check_topics()
        ranges = _held(source)
        return plan(options.path, ranges, source.partitions().__getitem__, options)
    finally:
        source.close()


def _held(source: LogSource) -> list[PartitionOffsets]:
    """Return what to read, with a lease on it: planned again if retention was quicker."""
    name = str(uuid.uuid4())
    for _ in range(_TRIES):
        ranges = _ranges(source)
        if source.hold(name, {one.where: one.first for one in ranges if one.first < one.stop}):
            break
    return ranges


def _ranges(source: LogSource) -> list[PartitionOffsets]:
    options = source.options
    # First where it ends: what is appended meanwhile moves a start to the end, and no further.
    stops = source.stops(options.ending or OffsetBound("offset", LATEST))
    starts = source.starts(options.starting or OffsetBound("offset", EARLIEST))
    ranges = [
        PartitionOffsets(one, starts[one], stops[one]) for one in sorted(starts.keys() & stops)
    ]
    _check(ranges, options)
    return ranges


def _check(ranges: list[PartitionOffsets], options: SourceOptions) -> None:
    """Refuse to begin behind the end, where offsets say so; by times that is merely nothing."""
    both = (options.starting, options.ending)
    if not all(one is not None and one.by == "offset" for one in both):
        return
    for one, first, stop in ranges:
        if first > stop:
            raise OffsetOutOfRangeError(
                f"the query begins behind its end, which is {stop}",
                topic=one.topic,
                partition=one.partition,
                offset=first,
            )
