"""Serializes the columns of a table for a topic with serializers, without a loop over its rows.

Numbers and text become JSON column by column; only nested values, times and text that has to be
escaped take a call of Python's encoder each.
"""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from embedlog.batch.arrays import data
from embedlog.errors import SerializationError
from embedlog.producer.validation import Serializers, serialize_all
from embedlog.schemas.conform import decoded, decoded_array
from embedlog.serializers import Adapter, Field, encode_json, json_text

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
    serializers: Serializers,
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
        serializers: Those of the topic.
        key, value, timestamp: The arguments of `Producer.append_table`.

    Raises:
        SerializationError: An item cannot be serialized, or it is not clear what the values are.
    """
    key_name, value_name = key or "key", value or "value"
    serializer = serializers.value_serializer
    kind = None if serializer is None else serializer.name
    if kind in ("json", "avro") and value is None:
        taken = {key_name, timestamp or "timestamp", "headers"}
        fields = [name for name in table.column_names if name not in taken]
        fields = [name for name in fields if not _INDEX.fullmatch(name)]
        if kind == "avro" and value_name in fields:
            fields = [] if _is_binary(_plain_type(table.schema.field(value_name).type)) else fields
        if fields and (kind == "avro" or not _is_serialized(table, value_name, fields, topic)):
            rows = table.select(fields)
            objects = _json_objects(rows, topic) if kind == "json" else _structs(rows)
            names = [name for name in table.column_names if name not in fields]
            table = table.select(names).append_column(value_name, objects)
    table = _with_bytes(table, key_name, topic, serializers.key_serializer, "key")
    return _with_bytes(table, value_name, topic, serializers.value_serializer, "value")


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


def _structs(table: pa.Table) -> pa.ChunkedArray:
    """Return each row as a struct."""
    rows = [batch.to_struct_array() for batch in table.to_batches()]
    return pa.chunked_array(rows, pa.struct(list(table.schema)))


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
    except (TypeError, ValueError) as error:
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
