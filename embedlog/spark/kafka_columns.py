"""The rows of a log as Spark wants them: the columns of its Kafka source, in Arrow.

Spark compares the schema of the first batch strictly: names, order, types
and nullability.  So types are spelled out here, as Spark translates its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from embedlog import batch as batches
from embedlog.batch.arrays import data, number, repeated
from embedlog.errors import InvalidConfigError, InvalidRecordError

KINDS = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
    "headers": "array<struct<key:string,value:binary>>",
}
"""Every column, with Spark's name of its type."""

_HEADERS = pa.list_(pa.field("element", pa.struct([("key", pa.string()), ("value", pa.binary())])))
_ARROW = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestampType": pa.int32(),
    "headers": _HEADERS,
}
_STORED = {field.name: field.with_nullable(True) for field in batches.schema(headers=True)}


def ddl(headers: bool) -> str:
    """Return the schema of the source, as Kafka's is."""
    names = [name for name in KINDS if headers or name != "headers"]
    return ", ".join(f"{name} {KINDS[name]}" for name in names)


def chosen(fields: Iterable[tuple[str, str]], headers: bool) -> tuple[str, ...]:
    """Return the columns that a user's schema, as pairs of name and type, asks for.

    Raises:
        InvalidConfigError: There is no such column, or it has another type.
    """
    names = []
    for name, kind in fields:
        if KINDS.get(name) != kind:
            raise InvalidConfigError(
                f"the log has no column {name} of type {kind}",
                todo=f"choose some of: {ddl(True)}; cast afterwards",
            )
        if name == "headers" and not headers:
            raise InvalidConfigError("the schema has headers", todo="set includeHeaders to true")
        names.append(name)
    return tuple(names)


def stored(names: tuple[str, ...]) -> Any:
    """Return the schema of what is to be read of a segment for these columns."""
    wanted = [_STORED[name] for name in names if name in _STORED]
    return pa.schema([*wanted, pa.field("offset", pa.int64())])


def rows(
    table: Any, names: tuple[str, ...], topic: str, partition: int, kind: int
) -> Iterator[Any]:
    """Yield a table of `stored` columns as record batches for Spark, in one piece mostly.

    Args:
        table: What was read, of one partition.
        names: The columns, in Spark's order.
        topic: Its topic.
        partition: Its partition.
        kind: Its timestampType: 0 is the producer's time, 1 the log's.

    Raises:
        InvalidRecordError: A time is too far away for Spark's microseconds.
    """
    schema = _schema(names)
    for each in table.combine_chunks().to_batches():
        count = each.num_rows
        arrays = []
        for name in names:
            if name == "topic":
                arrays.append(_constant(topic, _ARROW[name], count))
            elif name == "partition":
                arrays.append(_constant(partition, _ARROW[name], count))
            elif name == "timestampType":
                arrays.append(_constant(kind, _ARROW[name], count))
            else:
                arrays.append(_converted(name, each.column(name), topic, partition))
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


@lru_cache(maxsize=64)
def _schema(names: tuple[str, ...]) -> Any:
    return pa.schema([(name, _ARROW[name]) for name in names])


def _constant(value: str | int, kind: Any, count: int) -> Any:
    # Made for a power of two and cut, so that it is made once for many batches.
    return _constants(value, kind, 1 << max(count - 1, 0).bit_length()).slice(0, count)


@lru_cache(maxsize=16)
def _constants(value: str | int, kind: Any, count: int) -> Any:
    if isinstance(value, int):
        return repeated(value, kind, count)
    return pa.repeat(data(value.encode(), kind), count)


def _converted(name: str, column: Any, topic: str, partition: int) -> Any:
    if name == "timestamp":
        try:
            return column.cast(_ARROW[name])
        except pa.ArrowInvalid as error:
            raise InvalidRecordError(
                f"a record has a time that Spark cannot hold: {error}",
                topic=topic,
                partition=partition,
                todo="leave the column out: .schema('key binary, value binary')",
            ) from error
    return _headers(column) if name == "headers" else column


def _headers(column: Any) -> Any:
    """Return headers with Spark's names; of a record without any they are null, as Kafka's are."""
    none = pc.equal(pc.list_value_length(column), number(0, pa.int32()))
    if pc.any(none).as_py():
        column = pc.if_else(none, pa.nulls(1, column.type)[0], column)
    return column.cast(_HEADERS)
