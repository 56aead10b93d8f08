"""The columns of a table in a catalog of topics as those of a typed topic, and their changes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from embedlog.errors import InvalidConfigError, InvalidSchemaError
from embedlog.lazy import pa
from embedlog.schemas.evolution import renamed
from embedlog.spark import typed_columns
from embedlog.spark.kafka_columns import SPARK_TYPES
from embedlog.spark.sink_options import COLUMNS as WRITER_COLUMNS
from embedlog.spark.typed_columns import (
    RECORD_COLUMNS,
    RECORD_TYPES,
    is_struct_of_columns,
    type_name,
)

Json = Any

_COLLATIONS = "__COLLATIONS"
"""Where Spark has the collations in a column: in the metadata of its field, or of those inside."""


def is_of_bytes(fields: Sequence[Json]) -> bool:
    """Whether the columns of a new table are those of a topic of bytes.

    Args:
        fields: The fields of a ``StructType``, as JSON.  Of a topic of bytes they may be any that
            a reader gives or a writer takes, since ``CREATE TABLE … AS SELECT`` passes those of
            the query.

    Raises:
        InvalidConfigError: A column has the name of one of them, and another type.
    """
    if any(field["name"] not in SPARK_TYPES or is_struct_of_columns(field) for field in fields):
        return False
    for field in fields:
        name, spark_type = field["name"], type_name(field["type"])
        if spark_type != SPARK_TYPES[name] and spark_type not in WRITER_COLUMNS.get(name, ()):
            columns = ", ".join(f"{name} {spark_type}" for name, spark_type in SPARK_TYPES.items())
            raise InvalidConfigError(
                f"A topic has no column {name} of type {spark_type}",
                todo=f"Give the column another name: a topic of bytes has {columns}.",
            )
    return True


def topic_columns(fields: Iterable[Json]) -> Any:
    """Return the columns of a new typed topic as a `pyarrow.Schema`.

    The columns that come with every record are left out, and those of a struct ``value`` are
    columns, as in what a reader gives.

    Args:
        fields: The fields of a ``StructType``, as JSON.

    Raises:
        InvalidSchemaError: A topic has no such type.
    """
    return pa.schema([_arrow_field(field) for field in _own_fields(fields)])


def _own_fields(fields: Iterable[Json]) -> Iterator[Json]:
    for field in fields:
        if is_struct_of_columns(field):
            yield from field["type"]["fields"]
        elif type_name(field["type"]) != RECORD_TYPES.get(field["name"]):
            yield field


def _arrow_field(field: Json) -> Any:
    name = field["name"]
    if _COLLATIONS in json.dumps(field):
        raise InvalidSchemaError(
            f"Column {name} is text with a collation, which a topic does not have",
            column=name,
            todo="Leave out COLLATE, or cast the column to STRING.",
        )
    return pa.field(name, typed_columns.stored_type(field["type"], name), field["nullable"])


def changed_columns(columns: Any, changes: Iterable[Json]) -> tuple[Any, dict[str, str]]:
    """Return columns after changes, and the old and new names of those that are renamed.

    Args:
        columns: The columns of a topic: a `pyarrow.Schema`.
        changes: What `ColumnChanges.java` makes of ``ALTER TABLE``: objects with a "change" and the
            path of the "column".

    Raises:
        InvalidConfigError: There is no such column, or there is one already.
        InvalidSchemaError: A topic has no such type.
    """
    rename: dict[str, str] = {}
    for change in changes:
        columns = _CHANGES[change["change"]](columns, _column(change["column"]), change, rename)
    return columns, rename


def _column(path: Sequence[str]) -> str:
    if len(path) > 1:
        raise InvalidConfigError(
            f"{'.'.join(path)} is inside of a column, which ALTER TABLE cannot change",
            todo="Pass the column with its new type in Python: log.alter_topic(name, schema=…).",
        )
    return path[0]


def _index(columns: Any, name: str) -> int:
    index: int = columns.get_field_index(name)
    if index < 0:
        which = "comes with every record" if name in RECORD_COLUMNS else "is not one of the topic"
        raise InvalidConfigError(
            f"The column {name} {which}, so it cannot be changed",
            todo=f"The columns of the topic are {', '.join(columns.names)}.",
        )
    return index


def _refuse_present(columns: Any, name: str) -> None:
    if name in columns.names:
        raise InvalidConfigError(f"The topic has a column {name} already")


def _add(columns: Any, name: str, change: Json, rename: dict[str, str]) -> Any:
    _refuse_present(columns, name)
    place = _place(columns, change["position"], len(columns))
    return columns.insert(place, _arrow_field(_field(change)))


def _place(columns: Any, position: Sequence[str] | None, default: int) -> int:
    """Return the index of a position: None, ``[]`` for the first place, or the column before."""
    if position is None:
        return default
    return _index(columns, position[0]) + 1 if position else 0


def _field(change: Json) -> Json:
    (field,) = json.loads(change["schema"])["fields"]
    return field


def _drop(columns: Any, name: str, change: Json, rename: dict[str, str]) -> Any:
    if change["if_exists"] and name not in columns.names:
        return columns
    return columns.remove(_index(columns, name))


def _rename(columns: Any, name: str, change: Json, rename: dict[str, str]) -> Any:
    _index(columns, name)
    _refuse_present(columns, change["name"])
    rename[name] = change["name"]
    return renamed(columns, {name: change["name"]})


def _change_type(columns: Any, name: str, change: Json, rename: dict[str, str]) -> Any:
    index = _index(columns, name)
    field, wanted = columns.field(index), _field(change)
    if type_name(typed_columns.spark_type(field.type, name)) == type_name(wanted["type"]):
        return columns
    return columns.set(index, field.with_type(_arrow_field(wanted).type))


def _change_nullability(columns: Any, name: str, change: Json, rename: dict[str, str]) -> Any:
    index = _index(columns, name)
    return columns.set(index, columns.field(index).with_nullable(change["nullable"]))


def _move(columns: Any, name: str, change: Json, rename: dict[str, str]) -> Any:
    index = _index(columns, name)
    others = columns.remove(index)
    return others.insert(_place(others, change["position"], index), columns.field(index))


_CHANGES = {
    "add": _add,
    "drop": _drop,
    "rename": _rename,
    "type": _change_type,
    "nullable": _change_nullability,
    "position": _move,
}
