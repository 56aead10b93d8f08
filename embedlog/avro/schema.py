"""Avro schemas as trees: names are resolved, and every part is checked for its form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from embedlog.errors import InvalidSchemaError

PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
ARROW_TYPE, ARROW_NAME = "arrow.type", "arrow.name"
"""Properties that embedlog adds: the Arrow type of a value, and the name of a column, where
Avro has no such type or does not allow the name."""
NO_DEFAULT: Any = object()
"""The default of a field that has none; None is the default null."""
_LOGICAL_TYPES = {
    "decimal": ("bytes", "fixed"),
    "date": ("int",),
    "time-millis": ("int",),
    "time-micros": ("long",),
    "timestamp-millis": ("long",),
    "timestamp-micros": ("long",),
    "timestamp-nanos": ("long",),
    "local-timestamp-millis": ("long",),
    "local-timestamp-micros": ("long",),
    "local-timestamp-nanos": ("long",),
}
"""The logical types that have a type of Arrow, and the types that they annotate; other ones are
ignored, as Avro demands."""


@dataclass(frozen=True)
class AvroField:
    """A field of a record."""

    name: str
    type: AvroType
    aliases: tuple[str, ...] = ()
    default: Any = NO_DEFAULT
    column: str = ""
    """The name of the column: that of the field, unless Avro does not allow it."""


@dataclass(frozen=True)
class AvroType:
    """A type of an Avro schema."""

    kind: str
    """One of `PRIMITIVES`, or ``fixed``, ``enum``, ``array``, ``map``, ``record``, ``union``."""
    logical: str | None = None
    """The logical type, if it has a type of Arrow."""
    precision: int = 0
    scale: int = 0
    arrow: str | None = None
    """The text of the property ``arrow.type``."""
    name: str = ""
    """The full name of a record, an enum or a fixed type."""
    size: int = 0
    """The bytes of a fixed type."""
    symbols: tuple[str, ...] = ()
    default: str | None = None
    """The symbol of an enum that stands for those that a reader does not know."""
    fields: tuple[AvroField, ...] = ()
    items: AvroType | None = None
    """The items of an array, or the values of a map."""
    branches: tuple[AvroType, ...] = ()
    properties: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """What else the schema says."""

    @property
    def inner(self) -> AvroType:
        """The type of the items of an array, or of the values of a map."""
        assert self.items is not None
        return self.items


def parse(schema: str | Mapping[str, Any] | list[Any]) -> AvroType:
    """Return an Avro schema as a tree.

    Args:
        schema: JSON as text, or what `json.loads` made of it.

    Raises:
        InvalidSchemaError: It is not an Avro schema, or it is recursive.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError:
            # The name of a primitive type need not be in quotes.
            pass
    return _Parser().parse(schema, "", "")


class _Parser:
    def __init__(self) -> None:
        self._named: dict[str, AvroType | None] = {}
        """By full name; None while a type is being parsed."""

    def parse(self, schema: Any, namespace: str, where: str) -> AvroType:
        if isinstance(schema, str):
            return self._by_name(schema, namespace, where)
        if isinstance(schema, list):
            return AvroType(
                "union", branches=tuple(self.parse(branch, namespace, where) for branch in schema)
            )
        if not isinstance(schema, dict) or "type" not in schema:
            _refuse(f"{schema!r} is not an Avro schema", where)
        kind = schema["type"]
        if not isinstance(kind, str):
            # An annotation such as {"type": {"type": "long"}}.
            return self.parse(kind, namespace, where)
        if kind in ("record", "error", "enum", "fixed"):
            return self._named_type(kind, schema, namespace, where)
        properties = _properties(schema)
        if kind == "array" and "items" in schema:
            items = self.parse(schema["items"], namespace, f"{where}[]")
            return AvroType(kind, items=items, arrow=_text(schema, ARROW_TYPE))
        if kind == "map" and "values" in schema:
            items = self.parse(schema["values"], namespace, f"{where}{{}}")
            return AvroType(kind, items=items, arrow=_text(schema, ARROW_TYPE))
        if kind in PRIMITIVES:
            return AvroType(
                kind,
                **_logical(kind, schema),
                arrow=_text(schema, ARROW_TYPE),
                properties=properties,
            )
        return self._by_name(kind, namespace, where)

    def _by_name(self, name: str, namespace: str, where: str) -> AvroType:
        if name in PRIMITIVES:
            return AvroType(name)
        full = name if "." in name or not namespace else f"{namespace}.{name}"
        full = full if full in self._named else name
        if full not in self._named:
            _refuse(f"There is no type {name!r}", where)
        known = self._named[full]
        if known is None:
            _refuse(
                f"The type {full} contains itself, and columns cannot be recursive",
                where,
                "Store these values as JSON or bytes, or leave the field out of the schema.",
            )
        return known

    def _named_type(
        self, kind: str, schema: dict[str, Any], namespace: str, where: str
    ) -> AvroType:
        name = schema.get("name")
        if not isinstance(name, str) or not name:
            _refuse(f"A type {kind} has no name", where)
        if "." in name:
            namespace = name.rpartition(".")[0]
        else:
            namespace = schema.get("namespace", namespace) or ""
        full = name if "." in name or not namespace else f"{namespace}.{name}"
        self._named[full] = None
        arrow = _text(schema, ARROW_TYPE)
        if kind == "enum":
            symbols = schema.get("symbols")
            if not isinstance(symbols, list) or not all(isinstance(s, str) for s in symbols):
                _refuse(f"The enum {full} has no symbols", where)
            result = AvroType(
                kind,
                name=full,
                arrow=arrow,
                symbols=tuple(symbols),
                default=_text(schema, "default"),
            )
        elif kind == "fixed":
            size = schema.get("size")
            if not isinstance(size, int) or size < 0:
                _refuse(f"The fixed type {full} has no size", where)
            result = AvroType(kind, name=full, arrow=arrow, size=size, **_logical(kind, schema))
        else:
            fields = schema.get("fields")
            if not isinstance(fields, list):
                _refuse(f"The record {full} has no fields", where)
            parsed = tuple(self._field(item, namespace, where) for item in fields)
            properties = _properties(schema)
            result = AvroType(
                "record", name=full, arrow=arrow, fields=parsed, properties=properties
            )
        self._named[full] = result
        return result

    def _field(self, schema: Any, namespace: str, where: str) -> AvroField:
        if not isinstance(schema, dict) or not isinstance(schema.get("name"), str):
            _refuse(f"{schema!r} is not a field of a record", where)
        name = schema["name"]
        column = _text(schema, ARROW_NAME) or name
        inner = f"{where}.{column}" if where else column
        if "type" not in schema:
            _refuse(f"The field {name} has no type", inner)
        return AvroField(
            name,
            self.parse(schema["type"], namespace, inner),
            tuple(alias for alias in schema.get("aliases", ()) if isinstance(alias, str)),
            schema.get("default", NO_DEFAULT),
            column,
        )


def _logical(kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the logical type of a schema, if it is valid; Avro demands to ignore others."""
    logical = schema.get("logicalType")
    if kind not in _LOGICAL_TYPES.get(str(logical), ()):
        return {}
    if logical != "decimal":
        return {"logical": logical}
    precision, scale = schema.get("precision"), schema.get("scale", 0)
    is_valid = isinstance(precision, int) and isinstance(scale, int) and 0 <= scale <= precision
    if not is_valid or precision == 0:
        return {}
    return {"logical": logical, "precision": precision, "scale": scale}


_KNOWN = {"type", "name", "namespace", "fields", "aliases", "doc", ARROW_TYPE}


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name not in _KNOWN}


def _text(schema: dict[str, Any], name: str) -> str | None:
    value = schema.get(name)
    return value if isinstance(value, str) else None


def _refuse(what: str, where: str, todo: str | None = None) -> NoReturn:
    place = f"In {where}: " if where else ""
    raise InvalidSchemaError(
        place + what, column=where or None, todo=todo or "Pass a valid Avro schema."
    )
