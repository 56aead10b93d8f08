"""The columns of a topic from what a user passes as a schema: Arrow, a frame, or a dataclass."""

from __future__ import annotations

import dataclasses
import enum
import re
import types
import typing
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from embedlog.errors import InvalidSchemaError
from embedlog.lazy import pa

SchemaLike = Any
"""A `pyarrow.Schema`, something else with ``__arrow_c_schema__``, a frame, or a dataclass."""
INDEX = re.compile(r"__index_level_\d+__")
"""The name that pandas gives to the column of an index without a name."""
_READ = ("offset", "partition", "timestamp")
"""Columns that every table read from a log has, and every file of `embedlog export`."""


def columns_of(schema: Any) -> pa.Schema:
    """Return the columns that a user passed as a schema.

    Args:
        schema: A `pyarrow.Schema` or another object with ``__arrow_c_schema__``; a frame or a
            table as an example; or a dataclass.  If it was read from a topic, the columns that
            come with every record are left out.

    Raises:
        InvalidSchemaError: It is none of these, or has a type that Arrow does not have.
    """
    if isinstance(schema, pa.Schema):
        return _own_columns(schema)
    if dataclasses.is_dataclass(schema):
        return _of_dataclass(schema if isinstance(schema, type) else type(schema))
    known = ("__arrow_c_stream__", "__arrow_c_array__", "__arrow_c_schema__")
    if not any(hasattr(schema, name) for name in known):
        raise InvalidSchemaError(
            f"schema must be a pyarrow.Schema, a frame or a dataclass, got {schema!r}"
        )
    try:
        if hasattr(schema, "__arrow_c_stream__"):
            columns = pa.RecordBatchReader.from_stream(schema).schema
        elif hasattr(schema, "__arrow_c_array__"):
            columns = pa.record_batch(schema).schema
        else:
            columns = pa.schema(schema)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise InvalidSchemaError(f"Arrow cannot read the schema: {error}") from error
    return _own_columns(pa.schema([f for f in columns if not INDEX.fullmatch(f.name)]))


def _own_columns(columns: pa.Schema) -> pa.Schema:
    if not set(_READ).issubset(columns.names):
        return columns
    return pa.schema([f for f in columns if f.name not in (*_READ, "topic", "headers")])


def _simple_types() -> Mapping[Any, Any]:
    return {
        bool: pa.bool_(),
        int: pa.int64(),
        float: pa.float64(),
        str: pa.string(),
        bytes: pa.binary(),
        datetime: pa.timestamp("us", tz="UTC"),
        date: pa.date32(),
        time: pa.time64("us"),
        timedelta: pa.duration("us"),
        UUID: pa.string(),
    }


def _of_dataclass(owner: type) -> pa.Schema:
    try:
        hints = typing.get_type_hints(owner, include_extras=True)
    except NameError as error:
        raise InvalidSchemaError(
            f"The types of {owner.__name__} cannot be resolved: {error}",
            todo="Define them at the top of a module.",
        ) from error
    names = [field.name for field in dataclasses.fields(owner)]
    return pa.schema([_field(name, hints[name], f"{owner.__name__}.{name}") for name in names])


def _field(name: str, hint: Any, where: str) -> Any:
    data_type, nullable = _type_of(hint, where)
    return pa.field(name, data_type, nullable)


def _type_of(hint: Any, where: str) -> tuple[Any, bool]:
    """Return the Arrow type of a type hint, and whether it may be None."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        chosen = [extra for extra in arguments[1:] if isinstance(extra, pa.DataType)]
        if chosen:
            return chosen[0], _is_optional(arguments[0])
        return _type_of(arguments[0], where)
    if origin in (typing.Union, types.UnionType):
        others = [argument for argument in arguments if argument is not types.NoneType]
        if len(others) == 1:
            return _type_of(others[0], where)[0], len(others) < len(arguments)
    elif origin is typing.Literal:
        kinds = {type(argument) for argument in arguments}
        if len(kinds) == 1:
            return _type_of(kinds.pop(), where)
    elif origin in (list, tuple, Sequence) and arguments and arguments[1:] in ((), (...,)):
        return pa.list_(_field("item", arguments[0], where)), False
    elif origin in (dict, Mapping) and len(arguments) == 2:
        return pa.map_(
            _type_of(arguments[0], where)[0], _field("value", arguments[1], where)
        ), False
    elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return pa.struct(list(_of_dataclass(hint))), False
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _type_of(type(next(iter(hint)).value), where)
    elif hint in _simple_types():
        return _simple_types()[hint], False
    elif hint is Decimal:
        raise InvalidSchemaError(
            f"{where} is a Decimal without a precision",
            todo="Write Annotated[Decimal, pyarrow.decimal128(12, 2)].",
        )
    raise InvalidSchemaError(
        f"{where} has the type {hint}, for which Arrow has no type",
        todo="Use Annotated[…, pyarrow.…] to say which Arrow type it has.",
    )


def _is_optional(hint: Any) -> bool:
    return types.NoneType in typing.get_args(hint)
