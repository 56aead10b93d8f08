"""The keys of records as columns of a typed topic.

A key that has the bytes of its columns, as `batch.key_bytes` makes them, is not decoded.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from embedlog.batch.key_bytes import key_bytes
from embedlog.convert.avro_columns import AvroDecoder, to_columns
from embedlog.convert.avro_types import arrow_type, column_name, parse
from embedlog.convert.stored_rows import RowError
from embedlog.convert.stored_values import PREFIX, wire_id
from embedlog.errors import InvalidSchemaError, UnknownSchemaError
from embedlog.lazy import np, pa, pc

_LENGTH = struct.Struct(">i")
_TEXT = ("str", "uuid")


class KeyDecoder:
    """Returns the values of the key columns of records.

    Args:
        serializer: The name of the serializer of the keys.
        schema_of: Returns a schema of the registry by its id, as JSON.
    """

    def __init__(self, serializer: str, schema_of: Callable[[int], str]) -> None:
        self._serializer, self._schema_of = serializer, schema_of

    def added_type(self, name: str, keys: Any) -> Any:
        """Return the type of a column that values do not have, for the keys of records.

        Args:
            name: The name of the column.
            keys: Some keys, as a `pyarrow.BinaryArray` without nulls.

        Raises:
            InvalidSchemaError: It does not follow from the keys.
        """
        if self._serializer in _TEXT or not len(keys):
            return pa.binary() if self._serializer == "bytes" else pa.string()
        if self._serializer == "bytes":
            return pa.binary()
        is_short = len(keys[0].as_py()) == 4
        if self._serializer == "int":
            return pa.int32() if is_short else pa.int64()
        if self._serializer == "float":
            return pa.float32() if is_short else pa.float64()
        with suppress(RowError, ValueError):  # Of a first key that is neither Avro nor JSON.
            if self._serializer == "avro":
                schema = parse(self._schema_of(wire_id(keys[0].as_py())))
                if isinstance(schema, list) or schema["type"] != "record":
                    return arrow_type(schema, name)
                fields = {column_name(field): field["type"] for field in schema["fields"]}
                if name in fields:
                    return arrow_type(fields[name], name)
            if self._serializer == "json":
                key = json.loads(keys[0].as_py())
                key = key.get(name) if isinstance(key, dict) else key
                kinds = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
                if type(key) in kinds:
                    return kinds[type(key)]
        raise InvalidSchemaError(
            f"The values have no column {name}, and neither have the keys",
            column=name,
            todo="Name a column of the values as the key, or a field of the keys.",
        )

    def columns(self, keys: Any, fields: Sequence[Any]) -> list[Any]:
        """Return the key columns of records.

        Args:
            keys: A `pyarrow.BinaryArray`; of a null key every column is null.
            fields: The columns, as `pyarrow.Field`.

        Raises:
            RowError: A key does not have these columns.
        """
        if self._serializer == "avro":
            return self._avro_columns(keys, fields)
        decode = self._json_parts if self._serializer == "json" else self._parts
        rows: list[Sequence[Any]] = []
        for row, key in enumerate(keys.to_pylist()):
            try:
                rows.append([None] * len(fields) if key is None else decode(key, fields))
            except (ValueError, TypeError, KeyError, struct.error) as error:
                names = ", ".join(field.name for field in fields)
                raise RowError(row, names, f"the key {key!r} has no such value: {error}") from error
        columns = list(zip(*rows, strict=True)) or [()] * len(fields)
        arrays = []
        for field, items in zip(fields, columns, strict=True):
            try:
                arrays.append(_array(items, field.type))
            except (pa.ArrowException, OverflowError) as error:
                raise RowError(0, field.name, f"the key does not fit: {error}") from error
        return arrays

    def _json_parts(self, key: bytes, fields: Sequence[Any]) -> Sequence[Any]:
        value = json.loads(key)
        if isinstance(value, dict):
            names = [field.name for field in fields]
            others = set(value) - set(names)
            if others:
                raise ValueError(f"it also has {', '.join(sorted(others))}")
            return [value[name] for name in names]
        if len(fields) > 1:
            raise ValueError("it is not an object")
        return [value]

    def _parts(self, key: bytes, fields: Sequence[Any]) -> Sequence[Any]:
        if len(fields) == 1:
            return [_value_of(key, fields[0].type)]
        parts: list[Any] = []
        position = 0
        for field in fields:
            (length,) = _LENGTH.unpack_from(key, position)
            position += _LENGTH.size
            part = None
            if length >= 0:
                part = _value_of(key[position : position + length], field.type)
                position += length
            parts.append(part)
        if position != len(key):
            raise ValueError("it has another length")
        return parts

    def _avro_columns(self, keys: Any, fields: Sequence[Any]) -> list[Any]:
        rows_of: dict[int, list[int]] = {}
        stored = keys.to_pylist()
        for row, key in enumerate(stored):
            if key is not None:
                try:
                    rows_of.setdefault(wire_id(key), []).append(row)
                except RowError as error:
                    raise error.among([row]) from error
        parts, order = [[pa.nulls(1, field.type)] for field in fields], [-1]
        for schema_id, rows in rows_of.items():
            try:
                columns = self._columns_of(schema_id, [stored[row] for row in rows], fields)
            except RowError as error:
                raise error.among(rows) from error
            for part, column in zip(parts, columns, strict=True):
                part.append(column)
            order += rows
        # Of a row without a key the first one is taken, which is null.
        where = np.zeros(len(keys), np.int64)
        where[order[1:]] = np.arange(1, len(order))
        return [pa.concat_arrays(part).take(pa.array(where)) for part in parts]

    def _columns_of(self, schema_id: int, keys: list[bytes], fields: Sequence[Any]) -> list[Any]:
        """Return the columns of keys of one schema."""
        try:
            schema = parse(self._schema_of(schema_id))
            if isinstance(schema, list) or schema["type"] != "record":
                # A record of one field has the same encoding as its field.
                field = {"name": fields[0].name, "type": schema}
                schema = {"type": "record", "name": "key", "fields": [field]}
            names = list(map(column_name, schema["fields"]))
            if sorted(names) != sorted(field.name for field in fields):
                raise RowError(0, "", f"the key has the fields {', '.join(names)}")
            decoder = AvroDecoder(schema)
        except (UnknownSchemaError, InvalidSchemaError) as error:
            raise RowError(0, "", error.what) from error
        records = []
        for row, key in enumerate(keys):
            try:
                records.append(decoder.decode(key, PREFIX.size))
            except RowError as error:
                raise RowError(row, error.column, error.reason) from error
        batch = to_columns(records, schema)
        return [batch.column(field.name).cast(field.type) for field in fields]


def _value_of(data: bytes, data_type: Any) -> Any:
    """Return the value of a key column from the bytes of Kafka's serializers."""
    types = pa.types
    if types.is_string(data_type):
        return data.decode()
    if types.is_binary(data_type):
        return data
    width = data_type.byte_width if types.is_fixed_size_binary(data_type) else None
    if width is not None:
        if len(data) != width:
            raise ValueError(f"it does not have {width} bytes")
        return data
    if types.is_integer(data_type) and len(data) in (1, 2, 4, 8):
        # Kafka's clients for Java write an int32, others an int64.
        return int.from_bytes(data, "big", signed=not types.is_unsigned_integer(data_type))
    width = 1 if types.is_boolean(data_type) else data_type.bit_width // 8
    if len(data) != width:
        raise ValueError(f"it does not have {width} bytes")
    if types.is_boolean(data_type):
        return data != b"\0"
    if types.is_floating(data_type):
        (number,) = struct.unpack({2: ">e", 4: ">f", 8: ">d"}[width], data)
        return number
    return int.from_bytes(data, "big", signed=True)


def _array(items: Sequence[Any], data_type: Any) -> Any:
    if pa.types.is_temporal(data_type) and any(isinstance(item, int) for item in items):
        # As integers: Python has no nanoseconds.
        integers = pa.int32() if data_type.bit_width == 32 else pa.int64()
        return pa.array(items, integers).view(data_type)
    return pa.array(items, data_type)


def check_keys(
    keys: Any, columns: Mapping[str, Any], fields: Sequence[Any], decoder: KeyDecoder
) -> None:
    """Raise unless the keys of records are those of their columns.

    A record without a key gets that of its columns.

    Args:
        keys: The stored keys.
        columns: The values of the key columns, by name.
        fields: The key columns.
        decoder: Decodes keys of other bytes.

    Raises:
        RowError: A key has another value than its column.
    """
    own = key_bytes([columns[field.name] for field in fields])
    differs = pc.fill_null(pc.not_equal(keys, own), pa.scalar(True))
    differs = pc.and_(differs, pc.is_valid(keys)).to_numpy(zero_copy_only=False)
    (rows,) = np.nonzero(differs)
    if not len(rows):
        return
    indices = pa.array(rows)
    try:
        decoded = decoder.columns(keys.take(indices), fields)
    except RowError as error:
        raise RowError(int(rows[error.row]), error.column, error.reason) from error
    for field, column in zip(fields, decoded, strict=True):
        stored = columns[field.name].take(indices)
        same = pc.equal(column, stored)
        both_null = pc.and_(column.is_null(), stored.is_null())
        same = pc.or_(pc.fill_null(same, pa.scalar(False)), both_null)
        (wrong,) = np.nonzero(~same.to_numpy(zero_copy_only=False))
        if len(wrong):
            row = int(wrong[0])
            raise RowError(
                int(rows[row]),
                field.name,
                f"the key is {column[row].as_py()!r}, and the column {stored[row].as_py()!r}",
            )
