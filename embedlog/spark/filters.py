"""The filters of a query that Spark passes to the planner, which narrows what is read.

A filter compares a column with a value, never with null.  Of the columns of metadata, filters on
topic, partition and offset are applied exactly, so Spark need not repeat them.  Of those on the
timestamp, lower bounds move the start of a range past records that are older; Spark applies them
again, because timestamps need not be in order.  By filters on the columns of typed topics a plan
leaves out segments and batches; Spark applies those again, so one that cannot be used here is left
out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from operator import and_
from typing import Any, NamedTuple

from embedlog.errors import InvalidConfigError
from embedlog.lazy import pa, pc
from embedlog.partition import PartitionLog
from embedlog.partition.segment_statistics import ranges_to_read
from embedlog.record import TopicPartition
from embedlog.schemas.pruning import Pruner
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.splits.slices import PartitionOffsets

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


_PER_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}


def narrow(
    filters: Sequence[Sequence[Any]],
    schemas: Mapping[str, TopicSchema],
    logs: Mapping[TopicPartition, PartitionLog],
    ranges: Iterable[PartitionOffsets],
) -> list[PartitionOffsets]:
    """Return the parts of ranges that may have a row for which all filters are true.

    Args:
        filters: ``(column, op, value)``, where the op is one of ``= < <= > >= in``; of times the
            value is a number of microseconds, of dates one of days.
        schemas: The versions through which typed topics are read, by the topics' names.
        logs: The partitions.
        ranges: What the query reads without them.
    """
    pruners = {name: _pruner(filters, schema) for name, schema in schemas.items()}
    narrowed: list[PartitionOffsets] = []
    for part in ranges:
        key, start, until = part
        pruner = pruners.get(key.topic)
        if pruner is None or start >= until:
            narrowed.append(part)
            continue
        log = logs[key]
        log.refresh()
        narrowed += [
            PartitionOffsets(key, *bounds) for bounds in ranges_to_read(log, start, until, pruner)
        ]
    return narrowed


def _pruner(filters: Iterable[Sequence[Any]], schema: TopicSchema) -> Pruner | None:
    """Return a pruner that skips segments by statistics, or None."""
    conditions = [_condition(name, op, value, schema) for name, op, value in filters]
    usable = [condition for condition in conditions if condition is not None]
    return Pruner(reduce(and_, usable), schema) if usable else None


def _condition(name: str, op: str, value: Any, schema: TopicSchema) -> Any:
    if name not in schema.columns.names:
        return None
    kind, column = schema.columns.field(name).type, pc.field(name)
    literals = [_literal(one, kind) for one in (value if op == "in" else [value])]
    if any(literal is None for literal in literals):
        return None
    first = literals[0]
    if op == "in":
        return reduce(lambda one, other: one | other, [column == literal for literal in literals])
    compared = {
        "=": column == first,
        "<": column < first,
        "<=": column <= first,
        ">": column > first,
        ">=": column >= first,
    }
    return compared[op]


def _literal(value: Any, kind: Any) -> Any:
    """Return a value of Spark as a scalar of a column's type; None if it has not exactly this."""
    types = pa.types
    if types.is_boolean(kind):
        return pa.scalar(value) if isinstance(value, bool) else None
    if types.is_string(kind):
        return pa.scalar(value) if isinstance(value, str) else None
    if isinstance(value, bool | str):
        return None
    if kind in (pa.float32(), pa.float64()):
        return pa.scalar(float(value), kind)
    if not isinstance(value, int):
        return None
    if types.is_timestamp(kind):
        value, remainder = divmod(value * _PER_SECOND[kind.unit], 1_000_000)
        if remainder:
            return None
    elif not (types.is_integer(kind) or types.is_date32(kind)):
        return None
    stored = {8: "int8", 16: "int16", 32: "int32", 64: "int64"}[kind.bit_width]
    if types.is_unsigned_integer(kind):
        stored = f"u{stored}"
    try:
        return pa.array([value], stored).view(kind)[0]
    except (pa.ArrowInvalid, OverflowError):
        return None
