"""The keys of records as columns of a typed topic.

A key that has the bytes of its columns, as `batch.key_bytes` makes them, is not decoded.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from embedlog.avro.arrow_types import arrow_type
from embedlog.avro.record_decoder import AvroDecoder, RowError
from embedlog.avro.schema import AvroField, AvroType, parse
from embedlog.batch.key_bytes import key_bytes
from embedlog.convert.stored_values import wire_ids
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
                schema = self._schema(int(wire_ids(keys)[0]))
                fields = {field.column: field.type for field in schema.fields}
                if schema.kind != "record" or name in fields:
                    return arrow_type(fields.get(name, schema), name)
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

    def _schema(self, schema_id: int) -> AvroType:
        return parse(self._schema_of(schema_id))

    def _avro_columns(self, keys: Any, fields: Sequence[Any]) -> list[Any]:
        present = np.nonzero(keys.is_valid().to_numpy(zero_copy_only=False))[0]
        values = keys.take(pa.array(present))
        ids = wire_ids(values)
        parts, order = [], []
        for schema_id in np.unique(ids).tolist():
            (rows,) = np.nonzero(ids == schema_id)
            try:
                schema = self._schema(schema_id)
            except (UnknownSchemaError, InvalidSchemaError) as error:
                raise RowError(int(present[rows[0]]), "", error.what) from error
            if schema.kind != "record":
                # A record of one field has the same encoding as its field.
                field = AvroField(fields[0].name, schema, column=fields[0].name)
                schema = AvroType("record", fields=(field,))
            names = [field.column for field in schema.fields]
            if sorted(names) != sorted(field.name for field in fields):
                raise RowError(
                    int(present[rows[0]]), "", f"the key has the fields {', '.join(names)}"
                )
            batch = AvroDecoder(schema).decode(values.take(pa.array(rows)), 5)
            columns = [batch.column(field.name).cast(field.type) for field in fields]
            parts.append(columns)
            order.append(present[rows])
        if not parts:
            return [pa.nulls(len(keys), field.type) for field in fields]
        where = np.full(len(keys), -1)
        joined = np.concatenate(order)
        where[joined] = np.arange(len(joined))
        indices = pa.array(where, mask=where < 0)
        return [pa.concat_arrays(list(column)).take(indices) for column in zip(*parts, strict=True)]


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
