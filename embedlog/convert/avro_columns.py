"""Records of Avro as columns, and columns as such records.

fastavro reads and writes the records, in a form of the schema without logical types: numbers stay
numbers, which pyarrow takes for times as they are.  Maps are lists of pairs there, which have the
same encoding, since a dict would lose a key that is there twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Context
from io import BytesIO
from itertools import count
from typing import Any

from embedlog.convert.avro_types import (
    ARROW_TYPE,
    branches,
    column_name,
    columns_of,
    logical_type,
    path,
    value_type,
)
from embedlog.convert.stored_rows import RowError
from embedlog.display import need
from embedlog.errors import InvalidSchemaError
from embedlog.lazy import pa

_PROMOTIONS = {
    "int": ("int", "long", "float", "double"),
    "long": ("long", "float", "double"),
    "float": ("float", "double"),
    "string": ("string", "bytes"),
    "bytes": ("bytes", "string"),
}
"""By the type of a writer, the types as which a reader may read its values."""
_JSON_TYPES: dict[str, Any] = {
    "null": type(None),
    "boolean": bool,
    **dict.fromkeys(("int", "long"), int),
    **dict.fromkeys(("float", "double"), (int, float)),
    "array": list,
    **dict.fromkeys(("map", "record"), dict),
}
"""By a type of Avro, that of its defaults; others are text."""
_NOT_A_DEFAULT = TypeError, ValueError, KeyError
_NOT_OF_COLUMN = ValueError, TypeError, OverflowError
"""What pyarrow raises; its own errors are ValueErrors or TypeErrors."""
_EXACT = Context(prec=100)
"""More digits than any decimal of Arrow has."""


class AvroDecoder:
    """Decodes records of one schema to the columns of another one.

    Args:
        writer: The schema that the records were written with, as `avro_types.parse` returns it.
        reader: The schema of the columns; by default that of the writer.

    Raises:
        InvalidSchemaError: Avro's rules do not resolve the writer's schema to the reader's, or
            the reader's has a type that no column can have.
    """

    def __init__(self, writer: Any, reader: Any = None) -> None:
        columns_of(reader or writer)
        if reader is not None:
            _check_fields(writer, reader, "")
        self._read = need("fastavro").schemaless_reader
        is_same = reader is None or reader == writer  # which fastavro reads faster
        self._writer: Any = _for_fastavro(writer, as_columns=is_same)
        self._reader: Any = None if is_same else _for_fastavro(reader, as_columns=True)
        self._parsed = [_parsed(self._writer), self._reader and _parsed(self._reader)]

    def decode(self, data: bytes, skip: int = 0) -> dict[str, Any]:
        """Return a record as a dict of the values of columns, for `to_columns`.

        Args:
            data: The encoded record.
            skip: How many bytes precede the encoding.

        Raises:
            RowError: It does not have the schema; the row of the error is 0.
        """
        file = BytesIO(data)
        file.seek(skip)
        try:
            record: dict[str, Any] = self._read(file, *self._parsed)
        # fastavro has no error of its own for bytes that do not fit.
        except Exception as error:
            raise RowError(0, self._column(data, skip), _reason(error)) from error
        if file.tell() != len(data):
            raise RowError(0, "", "bytes follow the end of the record")
        return record

    def _column(self, data: bytes, skip: int) -> str:
        """Return the first field that cannot be read."""
        fields = self._writer["fields"]
        for number, field in enumerate(fields, 1):
            if not self._can_read(data, skip, {**self._writer, "fields": fields[:number]}, None):
                return str(field["name"])
        for field in self._reader["fields"] if self._reader is not None else ():
            if not self._can_read(data, skip, self._writer, {**self._reader, "fields": [field]}):
                return str(field["name"])
        return ""

    def _can_read(self, data: bytes, skip: int, writer: Any, reader: Any) -> bool:
        file = BytesIO(data)
        file.seek(skip)
        try:
            self._read(file, writer, reader)
        except Exception:  # noqa: BLE001 - see above
            return False
        return True


def _reason(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "the record ends too early"
    if isinstance(error, IndexError) and "range" in str(error):
        return "there is no such type of a union, or symbol of an enum"
    if isinstance(error, need("fastavro.read").SchemaResolutionError):
        return "it is null, or of a type or with a symbol that the field does not have"
    return str(error) or type(error).__name__


def _parsed(schema: Any) -> Any:
    return need("fastavro").parse_schema(schema)


# The schemas that fastavro is given


def _for_fastavro(schema: Any, *, as_columns: bool) -> Any:
    """Return a schema without logical types, with maps as arrays of pairs.

    Args:
        schema: As `avro_types.parse` returns it.
        as_columns: Whether fields have the names of their columns.
    """
    numbers = count()

    def named(kind: str, **attributes: Any) -> dict[str, Any]:
        # Types of one kind have one name, since the names of types do not matter; only the
        # namespaces differ, as they must within a schema.
        return {"type": kind, "name": f"n{next(numbers)}.{kind}", **attributes}

    def field_of(field: Mapping[str, Any]) -> dict[str, Any]:
        result = {"name": field["name"], "type": plain(field["type"])}
        if "aliases" in field:
            result["aliases"] = list(field["aliases"])
        if as_columns and column_name(field) != field["name"]:
            result["name"] = column_name(field)
            result["aliases"] = [field["name"], *field.get("aliases", ())]
        if as_columns and "default" in field:
            with suppress(*_NOT_A_DEFAULT):  # `_check_fields` refuses it where it is needed.
                result["default"] = _default(field["type"], field["default"])
        return result

    def plain(schema: Any) -> Any:
        if isinstance(schema, list):
            return list(map(plain, schema))
        kind = schema["type"]
        if kind == "record":
            return named(kind, fields=list(map(field_of, schema["fields"])))
        if kind == "array":
            return {"type": kind, "items": plain(schema["items"])}
        if kind == "map":
            pair = [("key", "string"), ("value", plain(schema["values"]))]
            fields = [{"name": name, "type": part} for name, part in pair]
            return {"type": "array", "items": named("record", fields=fields)}
        if kind == "fixed":
            return named(kind, size=schema["size"])
        if kind == "enum":
            default = {"default": schema["default"]} if "default" in schema else {}
            return named(kind, symbols=schema["symbols"], **default)
        return kind

    return plain(schema)


def _default(schema: Any, value: Any) -> Any:
    """Return a default, which is JSON, in the form of `_for_fastavro`; of bytes it stays text.

    Raises:
        TypeError, ValueError, KeyError: It is not of the type.
    """
    if isinstance(schema, list):
        for branch in schema:
            with suppress(*_NOT_A_DEFAULT):
                return _default(branch, value)
        raise ValueError("no type of the union has such a value")
    kind = schema["type"]
    if not isinstance(value, _JSON_TYPES.get(kind, str)) or (
        isinstance(value, bool) and kind != "boolean"
    ):
        raise TypeError(f"{value!r} is not of the type {kind}")
    if kind == "array":
        return [_default(schema["items"], item) for item in value]
    if kind == "map":
        values = schema["values"]
        return [{"key": key, "value": _default(values, item)} for key, item in value.items()]
    if kind == "record":
        return {
            column_name(field): _default(
                field["type"],
                value[field["name"]] if field["name"] in value else field["default"],
            )
            for field in schema["fields"]
        }
    if kind in ("bytes", "fixed") and len(value.encode("latin-1")) != schema.get(
        "size", len(value)
    ):
        raise ValueError(f"it does not have {schema['size']} bytes")
    if kind == "enum" and value not in schema["symbols"]:
        raise ValueError(f"there is no symbol {value!r}")
    return value


# The rules for schemas of readers


def _check_fields(writer: Mapping[str, Any], reader: Mapping[str, Any], where: str) -> None:
    """Refuse fields that fastavro would not read, or take for others.

    Raises:
        InvalidSchemaError: There is one.
    """
    written = {field["name"]: field["type"] for field in writer["fields"]}
    for field in reader["fields"]:
        column = path(where, column_name(field))
        names = [name for name in (field["name"], *field.get("aliases", ())) if name in written]
        if names:
            _check_value(written[names[0]], field["type"], column)
        elif "default" not in field:
            raise InvalidSchemaError(
                f"In {column}: the schema of some records does not have the field, and it has no "
                "default",
                column=column,
                todo="Register a version of the schema that gives it a default.",
            )
        else:
            try:
                _default(field["type"], field["default"])
            except _NOT_A_DEFAULT as error:
                raise InvalidSchemaError(
                    f"In {column}: the default {field['default']!r} is not of the field's type: "
                    f"{error}",
                    column=column,
                    todo="Register a version of the schema that corrects it.",
                ) from error


def _check_value(writer: Any, reader: Any, where: str) -> None:
    target = value_type(reader, where)
    written = [branch for branch in branches(writer) if branch["type"] != "null"]
    for branch in written:
        meanings = {_meaning(branch), _meaning(target)} - {None}
        if len(meanings) == 2:
            # The numbers would mean something else.
            todo = (
                "Avro does not convert one to the other: keep the logical type in all versions of "
                "the schema."
            )
            raise _mismatch(branch, target, where, todo)
    readable = [branch for branch in written if _is_readable(branch, target)]
    if written and not readable:
        todo = (
            "Register a version of the schema that can read all records, as the compatibility "
            "level BACKWARD demands."
        )
        raise _mismatch(written[0], target, where, todo)
    for branch in readable:
        if target["type"] == "record":
            _check_fields(branch, target, where)
        elif target["type"] == "array":
            _check_value(branch["items"], target["items"], f"{where}[]")
        elif target["type"] == "map":
            _check_value(branch["values"], target["values"], f"{where}{{}}")


def _is_readable(writer: Mapping[str, Any], reader: Mapping[str, Any]) -> bool:
    kind = writer["type"]
    if kind == reader["type"] == "fixed":
        return bool(writer["size"] == reader["size"])
    return reader["type"] in _PROMOTIONS.get(kind, (kind,))


def _meaning(schema: Mapping[str, Any]) -> tuple[str, int] | None:
    logical, arrow = logical_type(schema), schema.get(ARROW_TYPE)
    if logical is not None:
        return logical, schema.get("scale", 0)
    if schema["type"] not in ("long", "bytes") or not isinstance(arrow, str):
        return None
    return None if arrow.startswith(("int", "uint")) else (arrow, 0)


def _mismatch(writer: Any, reader: Any, where: str, todo: str) -> InvalidSchemaError:
    return InvalidSchemaError(
        f"In {where}: values that were written as {_description(writer)} cannot be read as "
        f"{_description(reader)}",
        column=where,
        todo=todo,
    )


def _description(schema: Mapping[str, Any]) -> str:
    logical = logical_type(schema)
    if logical == "decimal":
        return f"decimal({schema['precision']}, {schema.get('scale', 0)})"
    return str(logical or schema.get(ARROW_TYPE) or schema.get("name") or schema["type"])


# Columns


def to_columns(records: Sequence[Mapping[str, Any]], schema: Any) -> pa.RecordBatch:
    """Return decoded records as a `pyarrow.RecordBatch`.

    Args:
        records: What `AvroDecoder.decode` returned.
        schema: The reader's schema.

    Raises:
        RowError: A value does not fit its column.
    """
    columns = columns_of(schema)
    arrays = []
    for field in columns:
        values = [record[field.name] for record in records]
        try:
            arrays.append(_array(values, field.type))
        except _NOT_OF_COLUMN as error:
            raise _first_wrong(values, field) from error
    return pa.RecordBatch.from_arrays(arrays, names=columns.names)


def _array(values: Sequence[Any], data_type: Any) -> Any:
    convert = _each(data_type, _from_bytes)
    if convert is not None:
        values = [None if value is None else convert(value) for value in values]
    return pa.array(values, _mapped(data_type, _avro_type)).cast(data_type)


def _first_wrong(values: Sequence[Any], field: Any) -> RowError:
    for row, value in enumerate(values):
        try:
            _array([value], field.type)
        except _NOT_OF_COLUMN as error:
            return RowError(row, field.name, f"it is not {field.type}: {error}")
    raise AssertionError("each value fits, and all together do not")


def encode(columns: pa.RecordBatch, schema: Any, prefix: bytes = b"") -> Iterator[bytes]:
    """Yield rows as encoded records, each after a prefix.

    Args:
        columns: A `pyarrow.RecordBatch` with the columns that `avro_types.avro_schema` was given.
        schema: That schema, as `avro_types.parse` returns it.
        prefix: What precedes each record.

    Raises:
        pyarrow.ArrowInvalid: A time in seconds is too large to be given in milliseconds; the
            message begins with the name of the column.
    """
    parsed = _parsed(_for_fastavro(schema, as_columns=True))
    arrays = []
    for field, column in zip(parsed["fields"], columns.columns, strict=True):
        avro = _mapped(column.type, _avro_type)
        try:
            values = column.cast(avro).cast(_mapped(avro, _number_type, maps=False)).to_pylist()
        except pa.ArrowInvalid as error:
            raise pa.ArrowInvalid(f"{field['name']}: {error}") from error
        convert = _each(avro, _to_bytes)
        if convert is not None:
            values = [None if value is None else convert(value) for value in values]
        if isinstance(field["type"], list):
            # With the type of the union beside it fastavro need not try which one a value has.
            (kind,) = (branch for branch in field["type"] if branch != "null")
            name = kind if isinstance(kind, str) else kind.get("name", kind["type"])
            values = [None if value is None else (name, value) for value in values]
        arrays.append(values)
    write, names = need("fastavro").schemaless_writer, columns.schema.names
    for row in zip(*arrays, strict=True):
        file = BytesIO()
        file.write(prefix)
        write(file, parsed, dict(zip(names, row, strict=True)))
        yield file.getvalue()


def _mapped(data_type: Any, leaf: Callable[[Any], Any], *, maps: bool = True) -> Any:
    """Return a type with others in the places of those that have none inside.

    Args:
        data_type: The type.
        leaf: Returns the other type.
        maps: Whether maps stay such; otherwise they become lists of pairs.
    """

    def inner(data_type: Any) -> Any:
        return _mapped(data_type, leaf, maps=maps)

    types = pa.types
    if types.is_struct(data_type):
        return pa.struct([field.with_type(inner(field.type)) for field in data_type])
    if types.is_map(data_type):
        key, value = inner(data_type.key_type), inner(data_type.item_type)
        if maps:
            return pa.map_(key, value)
        return pa.list_(pa.struct([pa.field("key", key, False), ("value", value)]))
    if types.is_fixed_size_list(data_type):
        return pa.list_(inner(data_type.value_type), data_type.list_size)
    if types.is_list(data_type):
        return pa.list_(inner(data_type.value_type))
    return leaf(data_type)


def _avro_type(data_type: Any) -> Any:
    """Return the type that Avro has for the values: no seconds, and large integers as decimals."""
    types = pa.types
    if types.is_uint64(data_type):
        return pa.decimal128(20, 0)
    if types.is_time32(data_type):
        return pa.time32("ms")
    if types.is_timestamp(data_type) and data_type.unit == "s":
        return pa.timestamp("ms", tz=data_type.tz)
    return data_type


def _number_type(data_type: Any) -> Any:
    """Return the type of the numbers that times are, and other types as they are."""
    if pa.types.is_temporal(data_type):
        return pa.int32() if data_type.bit_width == 32 else pa.int64()
    return pa.float32() if pa.types.is_float16(data_type) else data_type


_Convert = Callable[[Any], Any] | None
"""Converts a value that is not None; None keeps all values."""


def _each(data_type: Any, leaf: Callable[[Any], _Convert]) -> _Convert:
    """Return a converter of a nested type, given the converters of its leaves."""
    types = pa.types
    if types.is_struct(data_type):
        return _each_member({field.name: _each(field.type, leaf) for field in data_type})
    if types.is_map(data_type):
        members = {"key": data_type.key_type, "value": data_type.item_type}
        convert = _each_member({name: _each(part, leaf) for name, part in members.items()})
    elif types.is_list(data_type) or types.is_fixed_size_list(data_type):
        convert = _each(data_type.value_type, leaf)
    else:
        return leaf(data_type)
    if convert is None:
        return None
    return lambda items: [None if item is None else convert(item) for item in items]


def _each_member(members: Mapping[str, _Convert]) -> _Convert:
    converts = [(name, convert) for name, convert in members.items() if convert is not None]
    if not converts:
        return None

    def convert_members(value: Mapping[str, Any]) -> Mapping[str, Any]:
        changed = {
            name: convert(value[name]) for name, convert in converts if value[name] is not None
        }
        return {**value, **changed}

    return convert_members


def _from_bytes(data_type: Any) -> _Convert:
    """Return a converter of the text of a default to bytes, and of bytes to decimals."""
    types = pa.types
    if types.is_binary(data_type) or types.is_fixed_size_binary(data_type):
        return _raw_bytes
    if not types.is_decimal(data_type) and not types.is_uint64(data_type):
        return None
    scale = 0 if types.is_uint64(data_type) else data_type.scale

    def convert(value: Any) -> Any:
        number = int.from_bytes(_raw_bytes(value), "big", signed=True)
        return _EXACT.scaleb(number, -scale)

    return convert


def _raw_bytes(value: Any) -> Any:
    # A default is text, with a character for each byte.
    return value.encode("latin-1") if isinstance(value, str) else value


def _to_bytes(data_type: Any) -> _Convert:
    """Return a converter of decimals to the bytes of their unscaled integers."""
    if not pa.types.is_decimal(data_type):
        return None

    def convert(value: Any) -> bytes:
        number = int(_EXACT.scaleb(value, data_type.scale))
        size = (number if number >= 0 else ~number).bit_length() // 8 + 1
        return number.to_bytes(size, "big", signed=True)

    return convert
