"""Defaults of Avro's fields, which are JSON, in Avro's binary encoding."""

from __future__ import annotations

import struct
from typing import Any

from embedlog.avro.schema import NO_DEFAULT, AvroType


def encode_json_value(schema: AvroType, value: Any) -> bytes:
    """Return a default, encoded.

    Args:
        schema: The type of the field; a default of a union is of one of its types.
        value: What `json.loads` returned.

    Raises:
        TypeError, ValueError, KeyError: It is not a default of this type.
    """
    kind = schema.kind
    if kind == "union":
        # Before Avro 1.12 only the first type may have the default.
        for index, branch in enumerate(schema.branches):
            try:
                return _varint(index) + encode_json_value(branch, value)
            except (TypeError, ValueError, KeyError):
                continue
        raise ValueError("no type of the union has such a value")
    _check(kind, value)
    if kind == "null":
        return b""
    if kind == "boolean":
        return b"\1" if value else b"\0"
    if kind in ("int", "long"):
        if not -(1 << 63) <= value < 1 << 63:
            raise ValueError("it has more than 64 bits")
        return _varint(value)
    if kind in ("float", "double"):
        return struct.pack("<f" if kind == "float" else "<d", value)
    if kind == "string":
        return _with_length(value.encode())
    if kind == "bytes":
        # Each character stands for a byte.
        return _with_length(value.encode("latin-1"))
    if kind == "fixed":
        data: bytes = value.encode("latin-1")
        if len(data) != schema.size:
            raise ValueError(f"it does not have {schema.size} bytes")
        return data
    if kind == "enum":
        return _varint(schema.symbols.index(value))
    if kind == "record":
        return b"".join(
            encode_json_value(field.type, _member(value, field.name, field.default))
            for field in schema.fields
        )
    if kind == "map":
        parts = [
            _with_length(name.encode()) + encode_json_value(schema.inner, item)
            for name, item in value.items()
        ]
    else:
        parts = [encode_json_value(schema.inner, item) for item in value]
    return (_varint(len(parts)) + b"".join(parts) if parts else b"") + b"\0"


def _member(value: dict[str, Any], name: str, default: Any) -> Any:
    if name in value:
        return value[name]
    if default is NO_DEFAULT:
        raise KeyError(name)
    return default


def _check(kind: str, value: Any) -> None:
    expected: Any = {
        "null": type(None),
        "boolean": bool,
        "int": int,
        "long": int,
        "float": (int, float),
        "double": (int, float),
        "array": list,
        "map": dict,
        "record": dict,
    }.get(kind, str)
    if not isinstance(value, expected) or (isinstance(value, bool) and kind != "boolean"):
        raise TypeError(f"{value!r} is not of the type {kind}")


def _with_length(data: bytes) -> bytes:
    return _varint(len(data)) + data


def _varint(number: int) -> bytes:
    zigzag = number << 1 if number >= 0 else (-number << 1) - 1
    groups = bytearray()
    while zigzag > 0x7F:
        groups.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    groups.append(zigzag)
    return bytes(groups)
