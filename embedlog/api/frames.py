"""Tables of topics that have serializers: decoded keys and values, and the fields of objects.

pyarrow's JSON reader is an order of magnitude faster than Python's, but it takes text that looks
like a date for one, and rounds large integers.  What it may have changed is read again in Python.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any
from uuid import UUID

from embedlog.batch.arrays import data
from embedlog.consumer.deserialize import FailedRow, convert
from embedlog.lazy import pa, pc
from embedlog.record import TopicPartition
from embedlog.registry.avro_serializers import AvroToJson
from embedlog.registry.avro_values import json_default
from embedlog.schemas.column_types import MAX_LEVELS, levels
from embedlog.schemas.json_columns import brackets_below
from embedlog.serializers import Bind, Field, adapt, adapt_for_topic, encode_json

MAX_FIELDS = 1000
"""Objects with more different fields than this, as with data in place of names, stay JSON text."""
STORED = ("offset", "partition", "timestamp", "key", "value", "headers")
"""The columns that every topic has; a field of this name gets a prefix."""
SERIALIZED: tuple[Field, Field] = ("key", "value")
"""The columns that serializers are for."""
_PREFIX = "value."
_FIRST_ROWS, _SLICE_BYTES = 1000, 64 << 20
_EXACT = float(1 << 53)
"""Below this a double holds every integer."""
_EMPTY = re.compile(r": null\b|: struct<>")
"""In the text of the type of a list, whether its items have no content."""


def stored_columns(names: Sequence[str] | None) -> list[str] | None:
    """Return the stored columns that some columns of a decoded table need; None for all."""
    if names is None:
        return None
    needed = {name if name in STORED else "value" for name in names}
    # Offset and partition say where a record is that cannot be decoded.
    return [name for name in STORED if name in {"offset", "partition"} | needed]


def decoded(
    table: pa.Table,
    topic: str,
    serializers: tuple[str, str],
    bind: Bind,
    names: Sequence[str] | None,
) -> pa.Table:
    """Return a table of stored records with decoded keys and values.

    Args:
        table: The stored columns.
        topic: The topic.
        serializers: The names of those of keys and values.
        bind: What connects Avro's to the registry of the log.
        names: The columns to return; None for all.

    Raises:
        KeyError: There is no such column.
        RecordDeserializationError: A key or value is not what its serializer writes.
    """
    key, value = serializers
    columns: dict[str, Any] = {}
    for name in table.column_names:
        if name == "value" and value == "json":
            columns |= _json_columns(table, topic, bind)
        elif name == "value" and value == "avro":
            columns |= _columns(_objects(table, topic, "value", value, bind))
        elif name in ("key", "value"):
            columns[name] = _column(table, topic, name, key if name == "key" else value, bind)
        else:
            columns[name] = table[name]
    if names is not None:
        if "value" in names and "value" not in columns:
            texts = decoded_items(table, topic, ("bytes", value), bind)
            columns["value"] = texts["value"]
        for name in names:
            if name not in columns:
                # Those that were not read exist as well.
                known = dict.fromkeys((*STORED[: STORED.index("headers")], *columns))
                raise KeyError(f"There is no column {name!r}, only {', '.join(known)}")
        columns = {name: columns[name] for name in names}
    return pa.table(columns)


def decoded_items(
    table: pa.Table, topic: str, serializers: tuple[str, str], bind: Bind
) -> pa.Table:
    """Return a table of stored records with decoded keys and values; JSON and Avro are JSON text.

    So the types of the columns depend on the serializers alone, not on the records.

    Args:
        table: Stored columns, offset and partition among them.
        topic: The topic.
        serializers: The names of those of keys and values.
        bind: What connects Avro's to the registry of the log.

    Raises:
        RecordDeserializationError: A key or value is not what its serializer writes.
    """
    for field, serializer in zip(SERIALIZED, serializers, strict=True):
        if field not in table.column_names:
            continue
        if serializer == "json":
            _objects(table, topic, field, serializer, bind)  # Raises if one is not JSON.
            column = table[field].cast(pa.string())
        elif serializer == "avro":
            column = pa.array(_objects(table, topic, field, AvroToJson(), bind), pa.string())
        else:
            column = _column(table, topic, field, serializer, bind)
        table = table.set_column(table.column_names.index(field), field, column)
    return table


def _column(table: pa.Table, topic: str, field: Field, serializer: str, bind: Bind) -> Any:
    """Return the keys or values as one column."""
    column = table[field]
    if serializer in ("bytes", "pickle"):
        return column
    if serializer == "str":
        try:
            return column.cast(pa.string())
        except pa.ArrowInvalid:
            pass  # found and reported below
    elif serializer == "json":
        typed = _parse(column)
        if typed is not None:
            return typed
    objects = _objects(table, topic, field, serializer, bind)
    if serializer in ("json", "avro"):
        return _typed(objects)
    if serializer == "uuid":
        objects = [None if item is None else str(item) for item in objects]
    types = {"int": pa.int64(), "float": pa.float64()}
    return pa.array(objects, types.get(serializer, pa.string()))


def _objects(
    table: pa.Table, topic: str, field: Field, serializer: str | AvroToJson, bind: Bind
) -> list[Any]:
    """Return the keys or values as Python's objects."""
    own = adapt(serializer, "deserialize", field)
    adapter = adapt_for_topic(topic, own, "bytes", "deserialize", field, True, bind)
    objects, failure = convert(adapter, topic, None, table[field].to_pylist())
    if failure is None:
        return objects
    row = table.slice(len(objects), 1).to_pylist()[0]
    partition = TopicPartition(topic, row["partition"])
    failed = FailedRow(len(objects), field, failure)
    raise failed.error(row.get("key"), row.get("value"), partition, row["offset"])


# JSON


def _json_columns(table: pa.Table, topic: str, bind: Bind) -> dict[str, Any]:
    """Return a column for each field of the values, or the column ``value``."""
    typed = _parse(table["value"])
    if typed is None:
        return _columns(_objects(table, topic, "value", "json", bind))
    if not pa.types.is_struct(typed.type):
        return {"value": typed}
    names = [_column_name(typed.type.field(row).name) for row in range(typed.type.num_fields)]
    return dict(zip(names, typed.flatten(), strict=True))


def _column_name(field: str) -> str:
    return _PREFIX + field if field in STORED or field.startswith(_PREFIX) else field


def _columns(values: list[Any]) -> dict[str, Any]:
    """Return columns of values that have no common type."""
    objects = [value for value in values if isinstance(value, dict)]
    names = dict.fromkeys(chain.from_iterable(objects))
    if not objects:
        return {"value": _typed(values)}
    if len(names) > MAX_FIELDS or not all(map(_is_unicode, names)):
        return {"value": _texts(values)}
    columns = {
        _column_name(name): _typed(
            [value.get(name) if isinstance(value, dict) else None for value in values]
        )
        for name in names
    }
    if len(objects) + values.count(None) < len(values):
        columns["value"] = _texts(values)
    return columns


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _typed(values: list[Any]) -> pa.Array:
    """Return a column of the values' type; of their JSON text if they have none in common.

    Likewise if values are inside of each other more than `MAX_LEVELS` times.
    """
    values = [str(value) if isinstance(value, UUID) else value for value in values]
    if any(isinstance(each, dict | list) and levels(each, _items) > MAX_LEVELS for each in values):
        return _texts(values)
    try:
        column = pa.array(values)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return _texts(values)
    return column.cast(pa.string()) if column.type == pa.null() else column


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _texts(values: list[Any]) -> pa.Array:
    return pa.array([None if value is None else _text(value) for value in values], pa.string())


def _text(value: Any) -> str:
    try:
        return encode_json(value).decode()
    except (TypeError, ValueError):
        # Values of Avro, and NaN, which other programs may have written.
        return json.dumps(value, default=json_default)


def _parse(column: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """Return the values of JSON in their type, with nothing changed; None if that fails."""
    if not all(map(_is_flat, column.chunks)):
        return None
    try:
        parts = []
        for lines in _lines(column.cast(pa.string())):
            part = _read(lines)
            if part.column_names != ["v"] or part.num_rows != len(lines):
                return None
            if not _is_usable(part.schema.types[0]):
                return None
            part.validate(full=True)
            parts.append(part)
        if not parts:
            return column.cast(pa.string())
        typed = pa.concat_tables(parts, promote_options="permissive")["v"]
    except pa.ArrowException:
        return None
    if not _is_usable(typed.type) or not all(map(_is_exact, typed.chunks)):
        return None
    return typed.cast(pa.string()) if typed.type == pa.null() else typed


def _is_flat(texts: pa.BinaryArray) -> bool:
    """Whether no text has values inside of each other that are more than `MAX_LEVELS` deep."""
    texts = texts.filter(pc.greater(pc.binary_length(texts), MAX_LEVELS))
    return not any(brackets_below(text.as_py()) for text in texts)


def _lines(texts: pa.ChunkedArray) -> Iterator[pa.StringArray]:
    """Yield the values as lines ``{"v": ...}``: few at first, then as many as fit in a slice."""
    head, null, tail, nothing = (
        data(text, pa.string()) for text in (b'{"v":', b"null", b"}\n", b"")
    )
    start, count = 0, _FIRST_ROWS
    while start < len(texts):
        part = pc.coalesce(texts.slice(start, count), null)
        lines = pc.binary_join_element_wise(head, part, tail, nothing)
        yield pa.concat_arrays(lines.chunks)
        start += count
        count = max(_SLICE_BYTES * start // max(texts.slice(0, start).nbytes, 1), 1)


def _read(lines: pa.StringArray) -> pa.Table:
    """Parse lines; text that looks like a date stays text."""
    table = _read_json(lines, None)
    kind = table.schema.types[0]
    without_dates = _without_dates(kind)
    if without_dates == kind:
        return table
    return _read_json(lines, pa.schema([("v", without_dates)]))


def _read_json(lines: pa.StringArray, schema: pa.Schema | None) -> pa.Table:
    from pyarrow import json as arrow_json

    offsets = memoryview(lines.buffers()[1]).cast("i")[lines.offset : lines.offset + len(lines) + 1]
    text = lines.buffers()[2].slice(offsets[0], offsets[-1] - offsets[0])
    return arrow_json.read_json(
        pa.BufferReader(text),
        # One block, for one inference of types.
        read_options=arrow_json.ReadOptions(use_threads=False, block_size=text.size + 1),
        parse_options=arrow_json.ParseOptions(explicit_schema=schema, newlines_in_values=True),
    )


def _without_dates(kind: pa.DataType) -> pa.DataType:
    """Return a type with text in place of times."""
    if pa.types.is_temporal(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_without_dates(kind.value_type))
    if pa.types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        return pa.struct([(field.name, _without_dates(field.type)) for field in fields])
    return kind


def _is_usable(kind: pa.DataType) -> bool:
    """Whether there are not too many fields, and no lists that pyarrow gets wrong.

    It miscounts the nulls in lists of nothing else or of empty objects (pyarrow 26).
    """
    if pa.types.is_struct(kind):
        fields = [kind.field(number).type for number in range(kind.num_fields)]
        return len(fields) <= MAX_FIELDS and all(map(_is_usable, fields))
    return not pa.types.is_list(kind) or not _EMPTY.search(str(kind))


def _is_exact(array: pa.Array) -> bool:
    """Whether no number may have been rounded to a double."""
    kind = array.type
    if pa.types.is_floating(kind):
        bounds = pc.min_max(array).as_py()
        return bounds["min"] is None or -_EXACT < bounds["min"] <= bounds["max"] < _EXACT
    if pa.types.is_list(kind):
        return _is_exact(array.flatten())
    return not pa.types.is_struct(kind) or all(map(_is_exact, array.flatten()))
