"""Filters of Spark on the columns of typed topics, by which a plan leaves out segments and batches.

Spark applies them again to each row, so a filter that cannot be used here is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import and_
from typing import Any

from embedlog.lazy import pa, pc
from embedlog.partition import PartitionLog
from embedlog.partition.segment_statistics import ranges_to_read
from embedlog.record import TopicPartition
from embedlog.schemas.pruning import Pruner
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.spark.plan import PartitionOffsets

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
