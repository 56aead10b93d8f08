"""Avro's types as those of Arrow, and back.

| Arrow | Avro |
|---|---|
| bool, int32, int64, float, double, string, binary, date32 | the type of that meaning |
| int8, int16, uint8, uint16; uint32 | int; long |
| uint64 | decimal of 20 digits |
| float16 | float |
| decimal with a scale from 0 | decimal in bytes |
| decimal with a negative scale | bytes with the unscaled number |
| fixed_size_binary | fixed |
| time32[s], time32[ms]; time64[us]; time64[ns] | time-millis; time-micros; long |
| timestamp with a zone, in s and ms, us, ns | timestamp-millis, -micros, -nanos |
| timestamp without a zone | local-timestamp-millis, -micros, -nanos |
| duration | long, a count of its unit |
| list, fixed_size_list | array |
| map with keys of text; with other keys | map; array of records of key and value |
| struct | record |

If the way back would give another Arrow type, the property ``arrow.type`` has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from embedlog.errors import InvalidSchemaError
from embedlog.lazy import pa
from embedlog.registry.avro_schema import parse_stored
from embedlog.registry.avro_values import type_and_attributes

ARROW_TYPE, ARROW_NAME = "arrow.type", "arrow.name"
"""Properties that embedlog adds: the Arrow type of a value, and the name of a column, where
Avro has no such type or does not allow the name."""
MOST_DIGITS = 76
"""The digits of Arrow's largest decimal."""
_LOGICAL_TYPES = {
    "decimal": ("bytes", "fixed"),
    "date": ("int",),
    "time-millis": ("int",),
    "time-micros": ("long",),
    **{
        f"{prefix}timestamp-{unit}": ("long",)
        for prefix in ("", "local-")
        for unit in ("millis", "micros", "nanos")
    },
}
"""The logical types that have a type of Arrow, and the types that they annotate; other ones are
ignored, as Avro demands."""
_UNITS = {"s": "millis", "ms": "millis", "us": "micros", "ns": "nanos"}
_MAP = "map"
_FIXED_SIZE_LIST = re.compile(r"fixed_size_list\[(\d+)\]")
_DECIMAL = re.compile(r"decimal(128|256)\((\d+), (-?\d+)\)")
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:, tz=(.+))?\]")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SMALL_INTEGERS = ("int8", "int16", "uint8", "uint16")


# From Avro


def parse(text: str) -> Any:
    """Return a schema in which the definition of each type stands in the place of its name.

    A union is a list, and any other type a dict with its attributes.

    Args:
        text: A schema of the registry, as JSON.

    Raises:
        InvalidSchemaError: It is recursive.
    """
    parsed = parse_stored(text).parsed
    named = parsed.get("__named_schemas", {}) if isinstance(parsed, dict) else {}
    return _inlined(parsed, named, "", ())


def _inlined(schema: Any, named: Mapping[str, Any], where: str, outer: tuple[str, ...]) -> Any:
    kind, attributes = type_and_attributes(schema)
    if kind == "union":
        return [_inlined(branch, named, where, outer) for branch in attributes]
    if kind in named and not attributes:
        kind, attributes = type_and_attributes(named[kind])
    name = attributes.get("name")
    if name in outer:
        _refuse(
            f"The type {name} contains itself, and columns cannot be recursive",
            where,
            "Store these values as JSON or bytes, or leave the field out of the schema.",
        )
    result = {**attributes, "type": "record" if kind == "error" else kind}
    for part, suffix in (("items", "[]"), ("values", "{}")):
        if part in attributes:
            result[part] = _inlined(attributes[part], named, where + suffix, outer)
    if "fields" in attributes:
        result["fields"] = [
            {
                **field,
                "type": _inlined(
                    field["type"], named, path(where, column_name(field)), (*outer, name)
                ),
            }
            for field in attributes["fields"]
        ]
    return result


def path(where: str, name: str) -> str:
    """Return the path of a field."""
    return f"{where}.{name}" if where else name


def column_name(field: Mapping[str, Any]) -> str:
    """Return the name of the column of a field, which Avro may not allow for the field."""
    name: str = field.get(ARROW_NAME) or field["name"]
    return name


def columns_of(schema: Any) -> pa.Schema:
    """Return the columns of a record.

    Raises:
        InvalidSchemaError: It is not a record, or has a type that no column can have.
    """
    kind = "union" if isinstance(schema, list) else schema["type"]
    if kind != "record":
        _refuse(
            f"The values are of the type {kind}, and not records",
            "",
            "A typed topic needs records, whose fields become its columns.",
        )
    return pa.schema([_column_of(field) for field in schema["fields"]])


def _column_of(field: Mapping[str, Any]) -> Any:
    name = column_name(field)
    return pa.field(name, arrow_type(field["type"], name), _is_nullable(field["type"]))


def _is_nullable(schema: Any) -> bool:
    return any(branch["type"] == "null" for branch in branches(schema))


def branches(schema: Any) -> list[Any]:
    """Return the types of a union; of another type only that."""
    return schema if isinstance(schema, list) else [schema]


def value_type(schema: Any, where: str) -> dict[str, Any]:
    """Return the type of values that are not null.

    Raises:
        InvalidSchemaError: It is null, or a union of several types.
    """
    others = [branch for branch in branches(schema) if branch["type"] != "null"]
    if not others and not isinstance(schema, list):
        _refuse("The field is always null", where, "Leave it out of the schema, or give it a type.")
    if len(others) != 1:
        kinds = ", ".join(branch.get("name", branch["type"]) for branch in others) or "null only"
        _refuse(
            f"The field is a union of {kinds}, and a column has one type",
            where,
            'Register a version of the schema in which it is a union of "null" and one type, such '
            "as a record with a field for each of these types, or string.",
        )
    result: dict[str, Any] = others[0]
    return result


def logical_type(schema: Mapping[str, Any]) -> str | None:
    """Return the logical type of a type, if there is one of Arrow for it."""
    logical = schema.get("logicalType")
    if logical == "decimal" and not schema.get("precision"):
        return None
    return logical if schema["type"] in _LOGICAL_TYPES.get(str(logical), ()) else None


def arrow_type(schema: Any, where: str) -> Any:
    """Return the Arrow type of the values of a type.

    Args:
        schema: The type, as `parse` returns it.
        where: The path of the field, for errors.

    Raises:
        InvalidSchemaError: No column can have this type.
    """
    schema = value_type(schema, where)
    declared = _declared(schema, where)
    if declared is not None:
        return declared
    if logical_type(schema) is not None:
        return _logical_arrow_type(schema, where)
    kind = schema["type"]
    if kind == "record":
        if not schema["fields"]:
            _refuse("The record has no fields", where, "Give it one, or leave it out.")
        return pa.struct(
            [
                (column_name(field), arrow_type(field["type"], path(where, column_name(field))))
                for field in schema["fields"]
            ]
        )
    if kind == "array":
        return pa.list_(arrow_type(schema["items"], f"{where}[]"))
    if kind == "map":
        return pa.map_(pa.string(), arrow_type(schema["values"], f"{where}{{}}"))
    if kind == "fixed":
        return pa.binary(schema["size"])
    return _plain_types()[kind]


def _plain_types() -> dict[str, Any]:
    return {
        "boolean": pa.bool_(),
        "int": pa.int32(),
        "long": pa.int64(),
        "float": pa.float32(),
        "double": pa.float64(),
        "bytes": pa.binary(),
        "string": pa.string(),
        "enum": pa.string(),
    }


def _logical_arrow_type(schema: Mapping[str, Any], where: str) -> Any:
    logical = str(logical_type(schema))
    if logical == "decimal":
        precision = schema["precision"]
        if precision > MOST_DIGITS:
            _refuse(
                f"The decimal has {precision} digits, and Arrow's have at most {MOST_DIGITS}",
                where,
                "Register a version of the schema with fewer digits, or with string.",
            )
        decimal = pa.decimal128 if precision <= 38 else pa.decimal256
        return decimal(precision, schema.get("scale", 0))
    name, _, precision = logical.rpartition("-")
    unit = {"millis": "ms", "micros": "us", "nanos": "ns"}.get(precision, "")
    if logical == "date":
        return pa.date32()
    if name == "time":
        return pa.time32(unit) if unit == "ms" else pa.time64(unit)
    return pa.timestamp(unit, tz="UTC" if name == "timestamp" else None)


def _declared(schema: Mapping[str, Any], where: str) -> Any:
    """Return the type that the property ``arrow.type`` names, if the Avro type holds its values."""
    text = schema.get(ARROW_TYPE)
    if not isinstance(text, str):
        return None
    if schema["type"] == "array":
        items = schema["items"]
        if match := _FIXED_SIZE_LIST.fullmatch(text):
            return pa.list_(arrow_type(items, f"{where}[]"), int(match[1]))
        if text == _MAP and not isinstance(items, list) and len(items.get("fields", ())) == 2:
            key, value = (arrow_type(field["type"], f"{where}{{}}") for field in items["fields"])
            return pa.map_(key, value)
        return None
    data_type = _named_type(text)
    if data_type is None or pa.types.is_nested(data_type):
        return None
    same = _AvroNames("x").type_of(data_type, "x")
    if not isinstance(same, dict) or same.get(ARROW_TYPE) != text:
        return None
    form = ("type", "logicalType", "precision", "scale", "size")
    is_same = all(same.get(name) == schema.get(name) for name in form)
    return data_type if is_same else None


def _named_type(text: str) -> Any:
    """Return a type of Arrow without others inside, by its text; None if there is none."""
    try:
        if match := _DECIMAL.fullmatch(text):
            decimal = pa.decimal128 if match[1] == "128" else pa.decimal256
            return decimal(int(match[2]), int(match[3]))
        if match := _TIMESTAMP.fullmatch(text):
            return pa.timestamp(match[1], tz=match[2])
        return pa.type_for_alias(text)
    except ValueError:
        return None


# To Avro


def avro_schema(
    columns: pa.Schema,
    name: str,
    properties: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> str:
    """Return the schema of a record with these columns, as JSON.

    Args:
        columns: In the types of typed topics.
        name: What the record is named after.
        properties: What the record says besides.
        defaults: The defaults of columns, as arrays of one row; those that JSON cannot hold are
            left out.

    Raises:
        InvalidSchemaError: A type has no form in Avro; those of typed topics all have one.
    """
    names = _AvroNames(valid_name(name))
    fields = names.fields(list(columns), names.record, defaults or {})
    record = {"type": "record", "name": names.record, "fields": fields, **(properties or {})}
    return json.dumps(record, ensure_ascii=False)


def valid_name(name: str) -> str:
    """Return a name with ``_`` in place of the characters that Avro does not allow."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return name if _NAME.fullmatch(name) else f"_{name}"


class _AvroNames:
    """Makes types of Avro, with names that are unique within one schema.

    Args:
        record: The name of the outermost record.
    """

    def __init__(self, record: str) -> None:
        self.record = record
        self._used = {record}

    def fields(
        self, fields: list[Any], parent: str, defaults: Mapping[str, Any], nullable: bool = False
    ) -> list[dict[str, Any]]:
        """Return columns, or the fields of a struct, as fields of a record."""
        used = {field.name for field in fields if _NAME.fullmatch(field.name)}
        result = []
        for field in fields:
            name = field.name
            if not _NAME.fullmatch(name):
                name = _unused(valid_name(name), used)
            inner = self.type_of(field.type, f"{parent}_{name}")
            entry: dict[str, Any] = {"name": name, "type": inner}
            default = _json_default(defaults.get(field.name))
            if field.nullable or nullable:
                # The default of a union is of its first branch.
                entry["type"] = [inner, "null"] if default is not None else ["null", inner]
                entry["default"] = default
            elif default is not None:
                entry["default"] = default
            if name != field.name:
                entry[ARROW_NAME] = field.name
            result.append(entry)
        return result

    def type_of(self, data_type: Any, path: str) -> Any:
        """Return the type of values that are not null."""
        types = pa.types
        if types.is_struct(data_type):
            name = _unused(path, self._used)
            return {
                "type": "record",
                "name": name,
                "fields": self.fields(list(data_type), name, {}, nullable=True),
            }
        if types.is_map(data_type):
            return self._map(data_type, path)
        if types.is_fixed_size_list(data_type):
            items = ["null", self.type_of(data_type.value_type, f"{path}_item")]
            size = f"fixed_size_list[{data_type.list_size}]"
            return {"type": "array", "items": items, ARROW_TYPE: size}
        if types.is_list(data_type):
            items = ["null", self.type_of(data_type.value_type, f"{path}_item")]
            return {"type": "array", "items": items}
        entry = self._scalar(data_type, path)
        if len(entry) == 1:
            kind: str = entry["type"]
            return kind
        return entry

    def _map(self, data_type: Any, path: str) -> dict[str, Any]:
        value = ["null", self.type_of(data_type.item_type, f"{path}_value")]
        if pa.types.is_string(data_type.key_type):
            return {"type": "map", "values": value}
        fields = [
            {"name": "key", "type": self.type_of(data_type.key_type, f"{path}_key")},
            {"name": "value", "type": value, "default": None},
        ]
        pair = {"type": "record", "name": _unused(f"{path}_entry", self._used), "fields": fields}
        return {"type": "array", "items": pair, ARROW_TYPE: _MAP}

    def _scalar(self, data_type: Any, path: str) -> dict[str, Any]:
        types, text = pa.types, str(data_type)
        plain = {str(kind): name for name, kind in _plain_types().items() if name != "enum"}
        if text in plain:
            return {"type": plain[text]}
        own = {ARROW_TYPE: text}
        if types.is_integer(data_type) and not types.is_uint64(data_type):
            return {"type": "int" if text in _SMALL_INTEGERS else "long"} | own
        if types.is_uint64(data_type):
            return {"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 0} | own
        if types.is_float16(data_type):
            return {"type": "float"} | own
        if types.is_fixed_size_binary(data_type):
            name = _unused(path, self._used)
            return {"type": "fixed", "name": name, "size": data_type.byte_width}
        if types.is_decimal(data_type):
            return self._decimal(data_type)
        if types.is_date32(data_type):
            return {"type": "int", "logicalType": "date"}
        if types.is_time(data_type) and data_type.unit != "ns":
            precision = _UNITS[data_type.unit]
            kind = "int" if precision == "millis" else "long"
            entry = {"type": kind, "logicalType": f"time-{precision}"}
            return entry | own if data_type.unit == "s" else entry
        if types.is_timestamp(data_type):
            prefix = "local-" if data_type.tz is None else ""
            logical = f"{prefix}timestamp-{_UNITS[data_type.unit]}"
            is_default = data_type.unit != "s" and data_type.tz in (None, "UTC")
            return {"type": "long", "logicalType": logical} | ({} if is_default else own)
        if not types.is_time(data_type) and not types.is_duration(data_type):
            _refuse(f"The type {data_type} has no form in Avro", path, "Cast the column first.")
        return {"type": "long"} | own

    def _decimal(self, data_type: Any) -> dict[str, Any]:
        precision, scale = data_type.precision, data_type.scale
        own = {ARROW_TYPE: str(data_type)}
        if scale < 0:
            # Avro has no negative scales.
            return {"type": "bytes"} | own
        entry = {
            "type": "bytes",
            "logicalType": "decimal",
            "precision": max(precision, scale),
            "scale": scale,
        }
        is_default = (data_type.bit_width == 128) == (precision <= 38) and scale <= precision
        return entry if is_default else entry | own


def _unused(name: str, used: set[str]) -> str:
    number, unused = 1, name
    while unused in used:
        number += 1
        unused = f"{name}_{number}"
    used.add(unused)
    return unused


def _json_default(default: Any) -> Any:
    """Return a default as Avro writes it in JSON; None if it is not simple."""
    if default is None:
        return None
    types, data_type = pa.types, default.type
    is_simple = types.is_boolean(data_type) or types.is_string(data_type)
    if not is_simple and not (types.is_integer(data_type) and not types.is_uint64(data_type)):
        return None
    return default[0].as_py()


def _refuse(what: str, where: str, todo: str) -> NoReturn:
    raise InvalidSchemaError(
        f"{f'In {where}: ' if where else ''}{what}", column=where or None, todo=todo
    )
