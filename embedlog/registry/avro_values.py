"""Values of Avro: what fastavro would convert in silence is refused, and values become JSON.

fastavro truncates 1.5 to the int 1 and takes a str for a list of its letters.  `checker_of` and
`parser_of` compile a schema to functions once, so that a record costs little.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any
from uuid import UUID

from embedlog.display import need

Check = Callable[[Any], None]
Parse = Callable[[Any], Any]

_INT_BITS = {"int": 32, "long": 64}
_DAY_MS, _FIRST_DAY, _LAST_DAY = 86_400_000, -719_162, 2_932_896
_FIRST_MS, _LAST_MS = _FIRST_DAY * _DAY_MS, (_LAST_DAY + 1) * _DAY_MS - 1
_LOGICAL_RANGES = {
    ("int", "date"): (_FIRST_DAY, _LAST_DAY),
    ("int", "time-millis"): (0, _DAY_MS - 1),
    ("long", "time-micros"): (0, _DAY_MS * 1000 - 1),
    **{
        ("long", f"{prefix}timestamp-{unit}"): (_FIRST_MS * factor, _LAST_MS * factor + factor - 1)
        for prefix in ("", "local-")
        for unit, factor in (("millis", 1), ("micros", 1000))
    },
}
"""The ints of logical types that fastavro can read: those of Python's years 1 to 9999."""
_NUMPY_BOOLS = "bool", "bool_"
_LARGEST_FLOAT = 3.4028234663852886e38
_NAMED = ("record", "error", "enum", "fixed")
_TIMES = datetime.date | datetime.time | str


def type_and_attributes(schema: Any) -> tuple[str, Any]:
    """Return the type of a schema and its attributes; a union is the type ``union``."""
    if isinstance(schema, list):
        return "union", schema
    if isinstance(schema, str):
        return schema, {}
    kind = schema["type"]
    # A type in parentheses, such as {"type": {"type": "array", ...}}.
    return type_and_attributes(kind) if isinstance(kind, dict | list) else (kind, schema)


# Checks


def checker_of(schema: Any) -> Check | None:
    """Return a check that raises for a value that fastavro would change, or None.

    The function raises TypeError or ValueError, whose text names the field.

    Args:
        schema: As fastavro has parsed it.
    """
    return _checker(schema, "", {})


def _checker(schema: Any, path: str, named: dict[str, Check | None]) -> Check | None:
    kind, attributes = type_and_attributes(schema)
    logical = attributes.get("logicalType") if isinstance(attributes, dict) else None
    if kind in _INT_BITS:
        return _int_checker(kind, logical, path)
    if (kind, logical) == ("string", "uuid"):
        return _uuid_checker(path)
    if kind in ("float", "double"):
        return _float_checker(_LARGEST_FLOAT if kind == "float" else float("inf"), path)
    if kind == "boolean":
        return _boolean_checker(path)
    if kind == "union":
        return _optional_checker(attributes, path, named)
    if kind == "array":
        return _array_checker(_checker(attributes["items"], f"{path}[]", named), path)
    if kind == "map":
        return _map_checker(_checker(attributes["values"], f"{path}{{}}", named))
    if kind in ("record", "error"):
        return _record_checker(attributes, path, named)
    if kind in named:
        return lambda value: None if (check := named[kind]) is None else check(value)
    # fastavro checks the others.
    return None


def _where(path: str) -> str:
    return f"{path.removeprefix('.')}: " if path else ""


def _wrong(value: object, expected: str, path: str) -> TypeError:
    return TypeError(
        f"{_where(path)}{expected} is expected, not {type(value).__name__} ({value!r:.50})"
    )


def _int_checker(kind: str, logical: str | None, path: str) -> Check:
    bits = _INT_BITS[kind]
    low, high = _LOGICAL_RANGES.get((kind, logical or ""), (-1 << bits - 1, (1 << bits - 1) - 1))

    def check(value: Any) -> None:
        if type(value) is int and low <= value <= high:
            return
        if type(value) is not int:
            if logical is not None and isinstance(value, _TIMES):
                if logical == "date" and isinstance(value, datetime.datetime):
                    raise _wrong(value, "a date", path)
                return
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise _wrong(value, "an int", path)
        if not low <= value <= high:
            raise ValueError(f"{_where(path)}{value} is not between {low} and {high}")

    return check


def _uuid_checker(path: str) -> Check:
    def check(value: Any) -> None:
        if not isinstance(value, UUID):
            if not isinstance(value, str):
                raise _wrong(value, "a UUID", path)
            UUID(value)

    return check


def _float_checker(largest: float, path: str) -> Check:
    def check(value: Any) -> None:
        if type(value) is float and -largest <= value <= largest:
            return
        if isinstance(value, bool) or not hasattr(value, "__float__"):
            raise _wrong(value, "a float", path)
        if largest < abs(value) < float("inf"):
            raise ValueError(f"{_where(path)}{value} is too large for a float of 32 bits")

    return check


def _boolean_checker(path: str) -> Check:
    def check(value: Any) -> None:
        # That of numpy has one of these names.
        if value is not True and value is not False and type(value).__name__ not in _NUMPY_BOOLS:
            raise _wrong(value, "a bool", path)

    return check


def _array_checker(check_item: Check | None, path: str) -> Check:
    def check(value: Any) -> None:
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            raise _wrong(value, "a list", path)
        if check_item is not None:
            for item in value:
                check_item(item)

    return check


def _map_checker(check_item: Check | None) -> Check | None:
    if check_item is None:
        return None

    def check(value: Any) -> None:
        for item in value.values():
            check_item(item)

    return check


def _optional_checker(
    branches: list[Any], path: str, named: dict[str, Check | None]
) -> Check | None:
    """Check a union of null and a type; to find the branch of others, fastavro checks values."""
    others = [branch for branch in branches if branch != "null"]
    # Compiled in any case, since others may refer to names inside of it.
    checks = [_checker(branch, path, named) for branch in others]
    check_value = checks[0] if len(checks) == 1 else None
    if check_value is None:
        return None

    def check(value: Any) -> None:
        # A tuple, or a dict with "-type", names the branch (fastavro).
        if value is not None and type(value) is not tuple:
            check_value(value)

    return check


def _record_checker(
    attributes: Mapping[str, Any], path: str, named: dict[str, Check | None]
) -> Check:
    fields: list[tuple[str, Check]] = []

    def check(value: Any) -> None:
        # The first condition is for speed.
        if type(value) is not dict and not isinstance(value, Mapping):
            raise _wrong(value, "a dict", path)
        for name, check_field in fields:
            if name in value:
                check_field(value[name])

    named[attributes["name"]] = check
    for field in attributes["fields"]:
        check_field = _checker(field["type"], f"{path}.{field['name']}", named)
        if check_field is not None:
            fields.append((field["name"], check_field))
    return check


# JSON


def json_default(value: Any) -> str:
    """Return a value that JSON does not have as text; `json` calls it."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal | UUID):
        return str(value)
    raise TypeError(f"JSON has no {type(value).__name__}")


json_text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=json_default).encode
"""Returns a value of Avro as JSON text: bytes as in Avro's JSON, a character for each byte;
decimals, dates, times and UUIDs as text."""


def parser_of(schema: Any) -> Parse:
    """Return a converter of JSON values, as `json_text` writes them, to Avro's.

    The function raises TypeError or ValueError.

    Args:
        schema: As fastavro has parsed it.
    """
    return _parser(schema, {})


def _parser(schema: Any, named: dict[str, Parse]) -> Parse:
    kind, attributes = type_and_attributes(schema)
    logical = attributes.get("logicalType") if isinstance(attributes, dict) else None
    parse = _LOGICAL.get((kind, logical)) or _PRIMITIVE.get(kind)
    if kind in _NAMED and parse is not None:
        named[attributes["name"]] = parse
    if parse is not None:
        return parse
    if kind == "union":
        return _union_parser(attributes, named)
    if kind == "array":
        parse_item = _parser(attributes["items"], named)
        return lambda value: list(map(parse_item, value)) if isinstance(value, list) else value
    if kind == "map":
        parse_value = _parser(attributes["values"], named)
        return lambda value: (
            {name: parse_value(item) for name, item in value.items()}
            if isinstance(value, dict)
            else value
        )
    if kind in ("record", "error"):
        return _record_parser(attributes, named)
    return lambda value: named[kind](value)


def _record_parser(attributes: Mapping[str, Any], named: dict[str, Parse]) -> Parse:
    fields: dict[str, Parse] = {}

    def parse(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        # What is no field is left for fastavro to refuse.
        return {name: fields.get(name, _as_it_is)(item) for name, item in value.items()}

    named[attributes["name"]] = parse
    for field in attributes["fields"]:
        fields[field["name"]] = _parser(field["type"], named)
    return parse


def _union_parser(branches: list[Any], named: dict[str, Parse]) -> Parse:
    others = [branch for branch in branches if branch != "null"]
    parsers = [_parser(branch, named) for branch in others]
    if len(parsers) == 1:
        return lambda value: None if value is None else parsers[0](value)
    validate = need("fastavro.validation").validate

    def parse(value: Any) -> Any:
        for parse_branch, branch in zip(parsers, others, strict=True):
            try:
                parsed = parse_branch(value)
                if validate(parsed, branch, raise_errors=False):
                    return parsed
            except (TypeError, ValueError):
                continue
        return value  # fastavro refuses it, and says why

    return parse


def _as_it_is(value: Any) -> Any:
    return value


def _from_text(parse: Callable[[str], Any]) -> Parse:
    """Return a converter of text that leaves other values for fastavro to check."""
    return lambda value: parse(value) if isinstance(value, str) else value


def _parse_float(value: Any) -> Any:
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def _parse_decimal(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return value
    try:
        return Decimal(str(value))
    except InvalidOperation:
        raise ValueError(f"{value!r:.50} is not a decimal number") from None


_parse_bytes = _from_text(lambda text: text.encode("latin-1"))
_parse_date = _from_text(datetime.date.fromisoformat)
_parse_time = _from_text(datetime.time.fromisoformat)
_parse_timestamp = _from_text(datetime.datetime.fromisoformat)
_PRIMITIVE: dict[str, Parse] = {
    **dict.fromkeys(("null", "boolean", "int", "long", "string", "enum"), _as_it_is),
    **dict.fromkeys(("float", "double"), _parse_float),
    **dict.fromkeys(("bytes", "fixed"), _parse_bytes),
}
_LOGICAL: dict[tuple[str, str | None], Parse] = {
    ("bytes", "decimal"): _parse_decimal,
    ("fixed", "decimal"): _parse_decimal,
    ("int", "date"): _parse_date,
    ("int", "time-millis"): _parse_time,
    ("long", "time-micros"): _parse_time,
    **{
        ("long", f"{prefix}timestamp-{unit}"): _parse_timestamp
        for prefix in ("", "local-")
        for unit in ("millis", "micros")
    },
}
