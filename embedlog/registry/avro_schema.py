"""Schemas of Avro: parsed, compared, and checked for compatibility by two libraries.

Both are imported when they are first used.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from embedlog.display import need
from embedlog.errors import InvalidSchemaError
from embedlog.forks import cached_property

Schema = str | Mapping[str, object] | Sequence[object]
"""A schema of Avro: its JSON as text or as Python's objects, or the name of a primitive type."""

_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
PRIMITIVES = frozenset("null boolean int long float double bytes string".split())


@dataclass(frozen=True, eq=False)
class AvroSchema:
    """A valid schema; `parse_avro` makes it."""

    text: str
    """As compact JSON, as it was written otherwise."""
    parsed: Any
    """As fastavro's functions take it: parsed once."""

    @cached_property
    def fingerprint(self) -> bytes:
        """What equal schemas have in common, whatever the order of their attributes."""
        text = json.dumps(_canonical(json.loads(self.text)), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()

    @cached_property
    def comparable(self) -> Any:
        """As Apache's checker of compatibility takes it."""
        return _parse_strictly(self.text)


def parse_avro(schema: object) -> AvroSchema:
    """Return a valid schema.

    Args:
        schema: JSON as text or as Python's objects, or the name of a primitive type.

    Raises:
        InvalidSchemaError: It is not a schema of Avro; the error says why.
        EmbedlogError: fastavro or avro is not installed.
    """
    if isinstance(schema, AvroSchema):
        return schema
    if not isinstance(schema, str | Mapping | list | tuple):
        raise _invalid(f"it must be JSON as a str, a dict or a list, got {type(schema).__name__}")
    try:
        is_json = isinstance(schema, str) and schema not in PRIMITIVES
        parsed = json.loads(cast("str", schema)) if is_json else schema
        text = json.dumps(parsed, separators=(",", ":"), ensure_ascii=False)
        _check_names(json.loads(text))
        result = parse_stored(text)
        _ = result.comparable  # raises if it is not valid
    except RecursionError as error:
        raise _invalid("its types are nested too deeply") from error
    except (TypeError, json.JSONDecodeError) as error:
        raise _invalid(f"it is not JSON ({error})") from error
    return result


def _canonical(schema: Any) -> Any:
    """Return a schema with ``"int"`` in the place of ``{"type": "int"}``, which is the same."""
    if isinstance(schema, list):
        return list(map(_canonical, schema))
    if not isinstance(schema, dict):
        return schema
    if schema.keys() == {"type"} and isinstance(schema["type"], str):
        return schema["type"]
    changed = {
        name: _canonical(schema[name]) for name in ("type", "items", "values") if name in schema
    }
    if "fields" in schema:
        changed["fields"] = [
            {**field, "type": _canonical(field["type"])} for field in schema["fields"]
        ]
    return {**schema, **changed}


def _check_names(schema: Any) -> None:
    """Refuse names of fields that neither library refuses."""
    if isinstance(schema, list):
        for branch in schema:
            _check_names(branch)
    elif isinstance(schema, dict):
        fields = schema.get("fields")
        for field in fields if isinstance(fields, list) else ():
            name = field.get("name") if isinstance(field, dict) else None
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise _invalid(
                    f"the name of a field must have letters, digits and _ only, got {name!r}"
                )
            _check_names(field.get("type"))
        for nested in ("type", "items", "values"):
            _check_names(schema.get(nested))


@lru_cache(maxsize=1024)
def parse_stored(text: str) -> AvroSchema:
    """Return a schema of its compact text; each text is parsed once.

    Raises:
        InvalidSchemaError: fastavro does not accept it.
        EmbedlogError: fastavro is not installed.
    """
    fastavro = need("fastavro.schema")
    refused = (fastavro.SchemaParseException, TypeError, ValueError, LookupError, AttributeError)
    try:
        parsed = fastavro.parse_schema(json.loads(text))
    except refused as error:
        raise _invalid(f"{type(error).__name__}: {error}") from error
    return AvroSchema(text, parsed)


def _parse_strictly(text: str) -> Any:
    """Return a schema as parsed by Apache's library, which is the stricter one."""
    avro, errors = need("avro.schema"), need("avro.errors")
    try:
        with warnings.catch_warnings():
            # Logical types that it does not know are those of their base types.
            warnings.simplefilter("ignore", errors.IgnoredLogicalType)
            return avro.parse(text)
    except (errors.AvroException, TypeError, ValueError, LookupError, AttributeError) as error:
        raise _invalid(str(error).rstrip(".")) from error


def _invalid(reason: str) -> InvalidSchemaError:
    return InvalidSchemaError(
        f"This is not a valid schema of Avro: {reason}",
        todo="Correct the schema; https://avro.apache.org/docs has the rules.",
    )


def reasons_not_readable(reader: AvroSchema, writer: AvroSchema) -> list[str]:
    """Return why what one schema wrote cannot be read with another; empty if it can."""
    checker = need("avro.compatibility").ReaderWriterCompatibilityChecker()
    result = checker.get_compatibility(reader.comparable, writer.comparable)
    if result.compatibility.name == "compatible":
        return []
    return sorted(map(_explained, result.messages))


def _explained(message: str) -> str:
    """Return a message of Apache's checker in words; some are only the name of what differs."""
    if message.isidentifier():
        return f"the field {message} has no default, and is not in what is read"
    if message.startswith("{"):
        return f"the enum lacks the symbols {message.strip('{}')}"
    if message.startswith("expected: "):
        return f"a named type has another name or size ({message})"
    return message
