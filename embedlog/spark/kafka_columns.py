"""The rows of a log as Arrow batches with the columns of Spark's Kafka source.

Spark compares the schema of the first batch strictly: names, order, types
and nullability.  So the Arrow types are listed here, as Spark maps its own.
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

_HEADERS = pa.list_(pa.field("element", pa.struct([("key", pa.string()), ("value", pa.binary())])))
_TYPES = {
    "key": ("binary", pa.binary()),
    "value": ("binary", pa.binary()),
    "topic": ("string", pa.string()),
    "partition": ("int", pa.int32()),
    "offset": ("bigint", pa.int64()),
    "timestamp": ("timestamp", pa.timestamp("us", tz="UTC")),
    "timestampType": ("int", pa.int32()),
    "headers": ("array<struct<key:string,value:binary>>", _HEADERS),
}
SPARK_TYPES = {name: spark_type for name, (spark_type, _) in _TYPES.items()}
"""Every column, with Spark's name of its type."""
_ARROW_TYPES = {name: arrow_type for name, (_, arrow_type) in _TYPES.items()}
_SEGMENT_FIELDS = {field.name: field.with_nullable(True) for field in batches.schema(headers=True)}


def schema_ddl(include_headers: bool) -> str:
    """Return the schema of the source, which is that of Kafka's."""
    names = [name for name in SPARK_TYPES if include_headers or name != "headers"]
    return ", ".join(f"{name} {SPARK_TYPES[name]}" for name in names)


def projected_columns(fields: Iterable[tuple[str, str]], include_headers: bool) -> tuple[str, ...]:
    """Return the columns of a user's schema, given as pairs of name and type.

    Raises:
        InvalidConfigError: There is no such column, or it has another type.
    """
    fields = tuple(fields)
    for name, spark_type in fields:
        if SPARK_TYPES.get(name) != spark_type:
            raise InvalidConfigError(
                f"The log has no column {name} of type {spark_type}",
                todo=f"Choose from: {schema_ddl(True)}; cast afterwards.",
            )
        if name == "headers" and not include_headers:
            raise InvalidConfigError(
                "The schema has the column headers", todo="Set includeHeaders to true."
            )
    return tuple(name for name, _ in fields)


def segment_schema(names: tuple[str, ...]) -> Any:
    """Return the schema of what to read from a segment for these columns."""
    fields = [_SEGMENT_FIELDS[name] for name in names if name in _SEGMENT_FIELDS]
    return pa.schema([*fields, pa.field("offset", pa.int64())])


def spark_batches(
    table: Any, names: tuple[str, ...], topic: str, partition: int, timestamp_type: int
) -> Iterator[Any]:
    """Yield the rows of a table as record batches for Spark, usually as one.

    Args:
        table: Rows of one partition, with the columns of `segment_schema`.
        names: The columns, in Spark's order.
        topic: The topic of the rows.
        partition: The partition of the rows.
        timestamp_type: 0 if the producer set the timestamps, 1 if the log did.

    Raises:
        InvalidRecordError: A timestamp does not fit Spark's microseconds.
    """
    schema = pa.schema([(name, _ARROW_TYPES[name]) for name in names])
    constants: dict[str, str | int]
    constants = {"topic": topic, "partition": partition, "timestampType": timestamp_type}
    for rows in table.combine_chunks().to_batches():
        count = rows.num_rows
        arrays = []
        for name in names:
            if name in constants:
                arrays.append(_constant(constants[name], _ARROW_TYPES[name], count))
            elif name == "timestamp":
                arrays.append(_microseconds(rows.column(name), topic, partition))
            elif name == "headers":
                arrays.append(_headers(rows.column(name)))
            else:
                arrays.append(rows.column(name))
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _constant(value: str | int, arrow_type: Any, count: int) -> Any:
    # Built for the next power of two and sliced, so that one cached array serves many batches.
    return _constants(value, arrow_type, 1 << max(count - 1, 0).bit_length()).slice(0, count)


@lru_cache(maxsize=16)
def _constants(value: str | int, arrow_type: Any, count: int) -> Any:
    if isinstance(value, int):
        return repeated(value, arrow_type, count)
    return pa.repeat(data(value.encode(), arrow_type), count)


def _microseconds(column: Any, topic: str, partition: int) -> Any:
    try:
        return column.cast(_ARROW_TYPES["timestamp"])
    except pa.ArrowInvalid as error:
        raise InvalidRecordError(
            f"A record has a timestamp that Spark cannot hold: {error}",
            topic=topic,
            partition=partition,
            todo="Leave the column out: .schema('key binary, value binary').",
        ) from error


def _headers(column: Any) -> Any:
    """Return headers with Spark's field names; null for a record without any, as in Kafka's."""
    is_empty = pc.equal(pc.list_value_length(column), number(0, pa.int32()))
    if pc.any(is_empty).as_py():
        column = pc.if_else(is_empty, pa.nulls(1, column.type)[0], column)
    return column.cast(_HEADERS)
