"""The filters of a query that Spark passes to the planner, which narrows what is read.

A filter compares a column of metadata (topic, partition, offset, timestamp) with a value,
never with null.  Those on topic, partition and offset are applied exactly, so Spark need not
repeat them.  Of those on the timestamp, lower bounds move the start of a range past records
that are older; Spark applies them again, because timestamps need not be in order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from embedlog.errors import InvalidConfigError
from embedlog.partition import PartitionLog
from embedlog.record import TopicPartition
from embedlog.spark.plan import PartitionOffsets

_MATCHES: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, values: value in values,
}
COLUMNS = {"topic": str, "partition": int, "offset": int, "timestamp": int}
"""What filters may compare, and the type of the value."""
_ALL_OFFSETS = range(1 << 63)


class Filter(NamedTuple):
    """Records must have such a value in a column."""

    column: str
    """One of `COLUMNS`."""
    op: str
    """One of ``=``, ``<``, ``<=``, ``>``, ``>=``, and ``in``, whose value is a list."""
    value: Any
    """For a timestamp in microseconds since 1970, as in Spark."""


@dataclass(frozen=True, slots=True)
class PushedFilters:
    """The filters of a query, which must all hold; made by `parse`."""

    partition_filters: tuple[Filter, ...]
    """Those on topic and partition."""
    offset_ranges: tuple[range, ...]
    """The offsets that the filters select, ascending."""
    earliest_ms: int | None
    """Records with an older timestamp do not match; None if the filters say nothing about it."""
    exact: bool
    """Whether every record that is left by `narrow` matches: there are none on the timestamp."""

    def narrow(
        self, logs: Mapping[TopicPartition, PartitionLog], ranges: Iterable[PartitionOffsets]
    ) -> list[PartitionOffsets]:
        """Return the parts of ranges that may have matching records, in the same order.

        The ranges must be valid; this raises no error about offsets that are out of range.
        """
        return [
            part
            for partition_range in ranges
            if self._selects(partition_range.topic_partition)
            for part in self._parts(logs[partition_range.topic_partition], partition_range)
        ]

    def _selects(self, topic_partition: TopicPartition) -> bool:
        return all(
            _MATCHES[op](getattr(topic_partition, column), value)
            for column, op, value in self.partition_filters
        )

    def _parts(self, log: PartitionLog, whole: PartitionOffsets) -> list[PartitionOffsets]:
        key, first, until = whole
        clipped = ((max(first, part.start), min(until, part.stop)) for part in self.offset_ranges)
        parts = [PartitionOffsets(key, start, stop) for start, stop in clipped if start < stop]
        if not parts or self.earliest_ms is None:
            return parts
        # Every record before the one that is found is older, in whatever order the times are:
        # it is the first in the order of offsets that is not.
        match = log.offset_for_timestamp(self.earliest_ms)
        if match is None:
            return []
        return [
            part._replace(from_offset=max(part.from_offset, match.offset))
            for part in parts
            if part.until_offset > match.offset
        ]


def parse(filters: Iterable[Sequence[Any]]) -> PushedFilters:
    """Return filters that are given as ``(column, op, value)``.

    Raises:
        InvalidConfigError: A column or an operator is unknown, or a value has another type.
    """
    parsed = [_filter(*fields) for fields in filters]
    times = [part for part in parsed if part.column == "timestamp"]
    bounds = [bound for part in times for bound in _earliest_ms(part)]
    return PushedFilters(
        tuple(part for part in parsed if part.column in ("topic", "partition")),
        tuple(_offset_ranges([part for part in parsed if part.column == "offset"])),
        max(bounds, default=None),
        exact=not times,
    )


def _filter(column: str, op: str, value: Any) -> Filter:
    if column not in COLUMNS or op not in _MATCHES:
        raise InvalidConfigError(
            f"A filter on {column} with the operator {op} cannot be pushed down",
            todo=f"Push filters on {', '.join(COLUMNS)}, with {', '.join(_MATCHES)}.",
        )
    kind, values = COLUMNS[column], value if op == "in" else [value]
    if not isinstance(values, Iterable) or any(type(part) is not kind for part in values):
        raise InvalidConfigError(
            f"A filter on {column} with the operator {op} cannot have the value {value!r}",
            todo=f"Pass {'a list of ' if op == 'in' else ''}{kind.__name__} values.",
        )
    return Filter(column, op, frozenset(values) if op == "in" else value)


def _earliest_ms(part: Filter) -> Iterator[int]:
    """Yield the oldest timestamp in ms that a filter may select; nothing if it has no bound.

    Records have whole milliseconds, filters microseconds; so bounds are rounded up.
    """
    if part.op == ">":
        yield part.value // 1000 + 1
    elif part.op in ("=", ">="):
        yield -(-part.value // 1000)
    elif part.op == "in" and part.value:
        yield -(-min(part.value) // 1000)


def _offset_ranges(filters: Sequence[Filter]) -> Iterator[range]:
    """Yield the ranges of the offsets that all of the filters select."""
    start, stop = _ALL_OFFSETS.start, _ALL_OFFSETS.stop
    listed: frozenset[int] | None = None
    for _, op, value in filters:
        if op == "in":
            listed = value if listed is None else listed & value
        if op in ("=", ">=", ">"):
            start = max(start, value + (op == ">"))
        if op in ("=", "<=", "<"):
            stop = min(stop, value + (op != "<"))
    if listed is None:
        yield range(start, stop)
        return
    offsets = sorted(offset for offset in listed if start <= offset < stop)
    # Consecutive offsets have the same distance from their places in the list.
    for _, run in groupby(enumerate(offsets), lambda numbered: numbered[1] - numbered[0]):
        consecutive = [offset for _, offset in run]
        yield range(consecutive[0], consecutive[-1] + 1)
