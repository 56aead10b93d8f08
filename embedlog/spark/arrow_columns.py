"""The rows of a log as Arrow batches with the columns of the source.

Spark compares the schema of the first batch strictly: names, order, types
and nullability.  So the Arrow types are listed here, as Spark maps its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from embedlog import batch as batches
from embedlog.batch.arrays import data, number, repeated
from embedlog.errors import InvalidRecordError

_HEADERS = pa.list_(pa.field("element", pa.struct([("key", pa.string()), ("value", pa.binary())])))
_ARROW_TYPES = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestampType": pa.int32(),
    "headers": _HEADERS,
}
_SEGMENT_FIELDS = {field.name: field.with_nullable(True) for field in batches.schema(headers=True)}


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
                arrays.append(constant(constants[name], _ARROW_TYPES[name], count))
            elif name == "timestamp":
                arrays.append(microseconds(rows.column(name), topic, partition))
            elif name == "headers":
                arrays.append(headers(rows.column(name)))
            else:
                arrays.append(rows.column(name))
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def constant(value: str | int, arrow_type: Any, count: int) -> Any:
    """Return a column that has the same value in each row."""
    # Built for the next power of two and sliced, so that one cached array serves many batches.
    return _constants(value, arrow_type, 1 << max(count - 1, 0).bit_length()).slice(0, count)


@lru_cache(maxsize=16)
def _constants(value: str | int, arrow_type: Any, count: int) -> Any:
    if isinstance(value, int):
        return repeated(value, arrow_type, count)
    return pa.repeat(data(value.encode(), arrow_type), count)


def microseconds(column: Any, topic: str, partition: int) -> Any:
    """Return the timestamps of records as Spark's.

    Raises:
        InvalidRecordError: One does not fit.
    """
    try:
        return column.cast(_ARROW_TYPES["timestamp"])
    except pa.ArrowInvalid as error:
        raise InvalidRecordError(
            f"A record has a timestamp that Spark cannot hold: {error}",
            topic=topic,
            partition=partition,
            todo="Leave the column out: .schema('key binary, value binary').",
        ) from error


def headers(column: Any) -> Any:
    """Return headers with Spark's field names; null for a record without any, as in Kafka's."""
    is_empty = pc.equal(pc.list_value_length(column), number(0, pa.int32()))
    if pc.any(is_empty).as_py():
        column = pc.if_else(is_empty, pa.nulls(1, column.type)[0], column)
    return column.cast(_HEADERS)
