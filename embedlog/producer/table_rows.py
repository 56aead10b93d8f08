"""Tables that programs append: what they may be, and their columns as bytes.

For a topic with serializers numbers and text become JSON column by column; only nested values,
times and text that has to be escaped take a call of Python's encoder each.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from functools import partial
from typing import Any, Protocol

from embedlog.batch import schema
from embedlog.batch.arrays import data, number, repeated
from embedlog.batch.wire import headers_type, timestamp_type
from embedlog.errors import SerializationError
from embedlog.lazy import pa, pc
from embedlog.producer.topic_settings import TopicSettings
from embedlog.producer.validation import serialize_all
from embedlog.schemas.conform import decoded, decoded_array
from embedlog.serializers import Adapter, Field, encode_json, json_text


class ArrowStream(Protocol):
    """A table that speaks Arrow: of pyarrow, pandas, Polars, DuckDB and others."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> object:
        """Return the batches as a PyCapsule."""


class ArrowArray(Protocol):
    """A batch of rows that speaks Arrow."""

    def __arrow_c_array__(self, requested_schema: Any = None) -> object:
        """Return the columns as PyCapsules."""


def table_rows(
    table: Any, key: str | None, value: str | None, timestamp: str | None, now_ms: int
) -> tuple[Any, int | None]:
    """Return a table with the columns of a batch, and the timestamp of all rows if it had none.

    Text becomes its UTF-8 bytes, without a copy where Arrow's layout is the same.

    Args:
        table: A `pyarrow.Table`.
        key, value, timestamp: Names of columns; None means the default name, if the table has it.
        now_ms: The timestamp of rows without one.

    Raises:
        SerializationError: A column has another type, or there are no values.
    """
    rows = table.num_rows
    times = _column(table, "timestamp", timestamp, timestamp_type())
    keys = _column(table, "key", key, pa.binary())
    values = _column(table, "value", value, pa.binary())
    if values is None:
        raise SerializationError(
            f"There is no column value, only {', '.join(table.column_names)}",
            todo="Name the column: append_table(..., value='…').",
        )
    one_time = now_ms if times is None else None
    if times is None:
        times = repeated(now_ms, timestamp_type(), rows)
    elif times.null_count:
        times = times.fill_null(number(now_ms, timestamp_type()))
    columns = [times, pa.nulls(rows, pa.binary()) if keys is None else keys, values]
    headers = _column(table, "headers", None, headers_type())
    if headers is not None:
        columns.append(headers)
    return pa.table(columns, schema=schema(headers=headers is not None)), one_time


def arrow_table(source: Any, topic: str) -> Any:
    """Return a `pyarrow.Table` of anything that is a table for Arrow.

    Raises:
        SerializationError: It is none, or has values for which Arrow has no type.
    """
    if isinstance(source, pa.Table):
        return source
    if hasattr(source, "__arrow_c_stream__") or hasattr(source, "__arrow_c_array__"):
        try:
            return pa.table(source)
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            raise _no_arrow_type(source, error, topic) from error
    raise SerializationError(
        f"A {type(source).__name__} is not a table",
        todo="Pass a pyarrow Table or RecordBatch, or a pandas or Polars DataFrame.",
    )


def _no_arrow_type(source: Any, error: Exception, topic: str) -> SerializationError:
    """Return the error of a frame that Arrow cannot convert; of pandas, with column and row."""
    what = f"Arrow cannot convert the {type(source).__name__}"
    facts: dict[str, Any] = {}
    for name, column in source.items() if hasattr(source, "items") else ():
        row = bisect_left(range(len(column)), True, key=partial(_fails, column))
        if row < len(column):
            what = f"Arrow has no type for row {row} of column {name} with the rows before it"
            facts = {"column": str(name), "row": row}
            break
    return SerializationError(
        f"{what}: {error.args[0] if isinstance(error, pa.ArrowException) else error}",
        topic=topic,
        todo="Convert the column to one type that Arrow has.",
        **facts,
    )


def _fails(column: Any, row: int) -> bool:
    """Return whether Arrow cannot convert the rows of a pandas Series up to one of them."""
    try:
        pa.array(column.iloc[: row + 1], from_pandas=True)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return True
    return False


def check_columns(table: Any, *names: str | None) -> None:
    """Raise a `SerializationError` if a table has no column of a name; None is no name."""
    for name in names:
        if name is not None and name not in table.column_names:
            raise SerializationError(
                f"There is no column {name}, only {', '.join(table.column_names)}"
            )


def _column(table: Any, default: str, name: str | None, target: Any) -> Any:
    """Return a column as type ``target``; None if it is not named and there is no default one."""
    name_or_default = default if name is None else name
    if name_or_default in table.column_names:
        return _cast(table.column(name_or_default), target, name_or_default)
    return None


def _cast(column: Any, target: Any, name: str) -> Any:
    types, column_type = pa.types, column.type
    if column_type == target:
        return column
    try:
        column = decoded(column)
        column_type = column.type
        if target == pa.binary():
            if types.is_large_string(column_type):
                column = column.cast(pa.string())
            elif not (
                types.is_string(column_type)
                or "binary" in str(column_type)
                or types.is_null(column_type)
            ):
                raise SerializationError(
                    f"Column {name} must be binary or text, got {column_type}",
                    todo="Cast it first.",
                )
        if types.is_integer(column_type):
            column = column.cast(pa.int64())
        # Nanoseconds are truncated to milliseconds, the unit of a record's timestamp.
        return column.cast(target, safe=not types.is_temporal(column_type))
    except pa.ArrowException as error:
        raise SerializationError(f"Column {name} is {column_type}: {error}") from error


# Serializers

_TEXT_NAMES = (None, "bytes", "str", "json", "uuid")
"""The serializers whose bytes are text, or may be: a column of text is written as it is."""
_STORED = ("offset", "partition")
"""The columns of a table that was read from a log, which do not matter when it is written."""
_INDEX = re.compile(r"__index_level_\d+__")
"""The name that pandas gives to the column of an index without a name."""
_SLICE_ROWS = 1 << 16
_ESCAPED = r'["\\\x00-\x1f]'


def serialize_table(
    table: pa.Table,
    topic: str,
    settings: TopicSettings,
    key: str | None,
    value: str | None,
    timestamp: str | None,
) -> pa.Table:
    """Return a table whose columns of keys and values are bytes, or text as it is stored.

    Without a column of values, and with ``"json"`` or ``"avro"``, each row becomes an object of
    the other columns, in the column ``value``.

    Args:
        table: The table.
        topic: The topic.
        settings: Those of the topic, with its serializers.
        key, value, timestamp: The arguments of `Producer.append_table`.

    Raises:
        SerializationError: An item cannot be serialized, or it is not clear what the values are.
    """
    key_name, value_name = key or "key", value or "value"
    serializer = settings.value_serializer
    kind = None if serializer is None else serializer.name
    if kind in ("json", "avro") and value is None:
        taken = {key_name, timestamp or "timestamp", "headers"}
        fields = [name for name in table.column_names if name not in taken]
        fields = [name for name in fields if not _INDEX.fullmatch(name)]
        if kind == "avro" and value_name in fields:
            fields = [] if _is_binary(_plain_type(table.schema.field(value_name).type)) else fields
        if fields and (kind == "avro" or not _is_serialized(table, value_name, fields, topic)):
            rows = table.select(fields)
            if kind == "json":
                objects = _json_objects(rows, topic)
            else:
                structs = [batch.to_struct_array() for batch in rows.to_batches()]
                objects = pa.chunked_array(structs, pa.struct(list(rows.schema)))
            names = [name for name in table.column_names if name not in fields]
            table = table.select(names).append_column(value_name, objects)
    table = _with_bytes(table, key_name, topic, settings.key_serializer, "key")
    return _with_bytes(table, value_name, topic, settings.value_serializer, "value")


def _with_bytes(
    table: pa.Table, name: str, topic: str, serializer: Adapter | None, field: Field
) -> pa.Table:
    if serializer is None or name not in table.column_names:
        return table
    column = _serialized(table.column(name), topic, serializer, field, name)
    return table.set_column(table.column_names.index(name), name, column)


def _is_serialized(table: pa.Table, name: str, fields: list[str], topic: str) -> bool:
    """Whether a column holds the values, as JSON already."""
    if name not in fields:
        return False
    kind = _plain_type(table.schema.field(name).type)
    if _is_text(kind) and set(fields) - {name, *_STORED}:
        raise SerializationError(
            "The table has a column value of text, and other columns",
            todo="Pass value='value' if it holds JSON, or rename it if it is one field of several.",
            topic=topic,
        )
    return _is_text(kind) or _is_binary(kind)


def _serialized(
    column: pa.ChunkedArray, topic: str, serializer: Adapter, field: Field, name: str
) -> pa.ChunkedArray:
    """Return keys or values as bytes or text."""
    kind = _plain_type(column.type)
    if kind != column.type:
        column = decoded(column)
    if _is_binary(kind) or pa.types.is_null(kind):
        return column
    if _is_text(kind) and serializer.name in _TEXT_NAMES:
        return column
    if serializer.name == "json":
        texts = [_json_or_null(chunk, name, topic) for chunk in column.chunks]
        return pa.chunked_array(texts, pa.string())
    items = column.to_pylist()
    keys = items if field == "key" else None
    serialized = serialize_all(serializer, topic, None, items, field, keys)
    return pa.chunked_array([pa.array(serialized, pa.binary())])


def _plain_type(kind: Any) -> Any:
    encoded = pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind)
    return _plain_type(kind.value_type) if encoded else kind


def _is_text(kind: pa.DataType) -> bool:
    return str(kind) in ("string", "large_string", "string_view")


def _is_binary(kind: pa.DataType) -> bool:
    # A list of binary items is not.
    return str(kind).startswith(("binary", "large_binary", "fixed_size_binary"))


def _json_objects(table: pa.Table, topic: str) -> pa.ChunkedArray:
    """Return each row as the text of a JSON object."""
    rows = []
    for batch in table.to_batches(max_chunksize=_SLICE_ROWS):
        parts: list[Any] = []
        for name, column in zip(table.column_names, batch.columns, strict=True):
            texts = pc.coalesce(_json_or_null(column, name, topic), _scalar("null"))
            parts += [_scalar(f"{',' if parts else '{'}{json_text(name)}:"), texts]
        rows.append(pc.binary_join_element_wise(*parts, _scalar("}"), _scalar("")))
    return pa.chunked_array(rows, pa.string())


def _scalar(text: str) -> Any:
    return data(text.encode(), pa.string())


def _json_or_null(column: pa.Array, name: str, topic: str) -> pa.Array:
    """Return each item of a column as JSON text; null stays null."""
    try:
        return _json_texts(column)
    except (TypeError, ValueError, RecursionError) as error:
        raise SerializationError(
            f"The column {name} cannot be written as JSON: {error}",
            todo="Convert the column, or leave it out.",
            topic=topic,
            column=name,
        ) from error


def _json_texts(column: pa.Array) -> pa.Array:
    types, kind = pa.types, column.type
    if _plain_type(kind) != kind:
        return _json_texts(decoded_array(column))
    if types.is_null(kind) or types.is_integer(kind) or types.is_boolean(kind):
        return column.cast(pa.string())
    if types.is_floating(kind):
        if not pc.all(pc.is_finite(column)).as_py() and column.null_count < len(column):
            raise ValueError("it has NaN or infinity")
        texts = column.cast(pa.float64()).cast(pa.string())
        # Arrow writes 5.0 as 5, which would come back as an int.
        return pc.replace_substring_regex(texts, r"^(-?\d+)$", r"\1.0")
    if _is_text(kind):
        texts = column.cast(pa.string())
        if not pc.any(pc.match_substring_regex(texts, _ESCAPED)).as_py():
            quote = _scalar('"')
            return pc.binary_join_element_wise(quote, texts, quote, _scalar(""))
    items = column.to_pylist()
    return pa.array(
        [None if item is None else encode_json(item).decode() for item in items], pa.string()
    )
