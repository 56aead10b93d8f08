"""The partitions and offsets that arguments of commands select."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from embedlog.api import Log, TopicView
from embedlog.api.offset_range import OffsetRange
from embedlog.cli import argument_types as types
from embedlog.cli.parser import CommandParser, add_option
from embedlog.errors import OffsetOutOfRangeError
from embedlog.partition import PartitionLog
from embedlog.times import to_timestamp


def add_rows(command: CommandParser) -> None:
    """Add the options for columns and rows of a typed topic."""
    about = "only these columns of a typed topic"
    add_option(command, "--columns", "NAME,NAME", about, type=types.column_names)
    add_option(command, "--where", "CONDITION", "only rows for which this SQL is true")


def partitions(log: Log, topic: str, numbers: list[int]) -> list[PartitionLog]:
    """Return the named partitions of a topic, without names all.

    Raises:
        UnknownTopicOrPartitionError: There is no such topic or partition.
    """
    return [log.partition(topic, n) for n in numbers or range(log.root.partitions(topic))]


def view_of(log: Log, topic: str, ranges: Sequence[OffsetRange]) -> TopicView[Any, Any]:
    """Return some records; those of a topic of bytes as they are stored."""
    if log.root.topic(topic).schema_version:
        from embedlog.api.typed_topic import TypedTopicView

        return TypedTopicView(log.root, topic, ranges)
    return TopicView(log.root, topic, ranges, raw=True)


def first_at(partition: PartitionLog, time: datetime) -> tuple[int, int | None]:
    """Return the first offset at or after a time, and its timestamp; else the log end and None."""
    record = partition.offset_for_timestamp(to_timestamp(time))
    return (partition.end_offset(), None) if record is None else record[:2]


def offset_range(
    partition: PartitionLog, first: int | datetime | None, stop: int | datetime | None
) -> OffsetRange:
    """Return the offsets from a point to another one, as far as the log has them."""
    start, end = partition.start_offset(), partition.end_offset()

    def offset(point: int | datetime | None, default: int) -> int:
        if isinstance(point, datetime):
            return first_at(partition, point)[0]
        return default if point is None else min(max(point, start), end)

    begin = offset(first, start)
    return OffsetRange(partition.partition, begin, max(begin, offset(stop, end)))


def deletion_point(partition: PartitionLog, before: int | datetime) -> int:
    """Return the offset below which records are to be deleted.

    Raises:
        OffsetOutOfRangeError: It is past the log end.
    """
    start, end = partition.start_offset(), partition.end_offset()
    if isinstance(before, datetime):
        return first_at(partition, before)[0]
    if before > end:
        raise OffsetOutOfRangeError(
            f"The log ends at {end}",
            topic=partition.topic,
            partition=partition.partition,
            offset=before,
            todo="Nothing was deleted.",
        )
    return max(before, start)
