"""How the schema of a topic may change, and how rows of one version are seen through another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from embedlog.errors import InvalidSchemaError
from embedlog.lazy import pa, pc
from embedlog.schemas.column_types import is_widening
from embedlog.schemas.segment_schema import absent
from embedlog.schemas.topic_schema import (
    TopicSchema,
    check_columns,
    check_schema,
    field_id,
    with_id,
)
from embedlog.schemas.values import arrow_array, checker_of


def changed_schema(
    before: TopicSchema,
    columns: pa.Schema,
    rename: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    earlier: Sequence[TopicSchema] = (),
) -> TopicSchema:
    """Return the next version of a schema; the same object if nothing changes.

    Args:
        before: The current version.
        columns: The columns that the topic is to have.
        rename: Old names of columns, and their new ones.
        defaults: Values of added columns for the rows that were written before.
        earlier: The versions before the current one, of which rows may be stored.

    Raises:
        InvalidSchemaError: Readers could not see every row through the new version; the text
            says why, and what would work.
    """
    rename, values = dict(rename or {}), dict(defaults or {})
    timestamp = before.timestamp
    if timestamp is not None:
        timestamp = rename.get(timestamp, timestamp)
    fields = check_columns(columns, timestamp)
    names = {field.name for field in fields}
    _check_renames(before, rename, names)
    next_id, changed = before.next_id, []
    # By the name in the new version.
    known = {rename.get(field.name, field.name): field for field in before.columns}
    for field in fields:
        old = known.get(field.name)
        if old is None:
            default = _default_of(field, values)
            changed.append(with_id(field, next_id, default))
            next_id += 1
        else:
            _check_change(before, old, field)
            _check_fields(field, old, earlier)
            if field.name in values:
                raise InvalidSchemaError(
                    f"Column {field.name} exists, so it cannot get a default",
                    column=field.name,
                    todo="Pass defaults for added columns only.",
                )
            default = before.defaults.get(old.name)
            if default is not None:
                default = default.cast(field.type)
            changed.append(with_id(field, field_id(old), default))
    if values.keys() - names:
        name = min(values.keys() - names)
        raise InvalidSchemaError(f"There is no column {name!r} for the default", column=name)
    _check_dropped(before, set(known) - names, rename)
    schema = pa.schema(changed)
    if schema.equals(before.columns, check_metadata=True):
        return before
    key = tuple(rename.get(name, name) for name in before.key)
    return check_schema(TopicSchema(before.version + 1, schema, key, timestamp, next_id))


def renamed(columns: pa.Schema, rename: Mapping[str, str]) -> pa.Schema:
    """Return columns with other names."""
    return pa.schema([field.with_name(rename.get(field.name, field.name)) for field in columns])


def _check_renames(before: TopicSchema, rename: Mapping[str, str], names: set[str]) -> None:
    for old, new in rename.items():
        if old not in before.columns.names:
            raise InvalidSchemaError(f"There is no column {old!r} to rename", column=old)
        if new not in names or (old in names and old not in rename.values()):
            raise InvalidSchemaError(
                f"Column {old} is to become {new}, but the schema has "
                f"{'both' if new in names else f'no column {new!r}'}",
                column=old,
                todo="Pass a schema with the new names.",
            )
        if new in before.columns.names and new not in rename:
            raise InvalidSchemaError(
                f"Column {old} is to become {new}, and there is a column {new} already",
                column=old,
                todo=f"Drop or rename {new} first, with a call of its own.",
            )
    if len(set(rename.values())) < len(rename):
        raise InvalidSchemaError("Two columns are renamed to the same name")


def _default_of(field: Any, values: Mapping[str, Any]) -> Any:
    """Return the default of an added column as an array of one row; None without one."""
    value = values.get(field.name)
    if value is None:
        if not field.nullable:
            raise InvalidSchemaError(
                f"The rows that are stored have no {field.name}, and it must not be null",
                column=field.name,
                todo=f"Make the column nullable, or pass defaults={{{field.name!r}: …}}.",
            )
        return None
    try:
        return arrow_array([checker_of(field.type)(value)], field.type)
    except (TypeError, ValueError) as error:
        raise InvalidSchemaError(
            f"The default of column {field.name} is no {field.type}: {error}", column=field.name
        ) from error


def _check_change(before: TopicSchema, old: Any, new: Any) -> None:
    name = new.name
    if old.nullable and not new.nullable:
        raise InvalidSchemaError(
            f"Column {name} may have nulls already, so it must stay nullable", column=name
        )
    if old.type == new.type:
        return
    if old.name in before.key:
        raise InvalidSchemaError(
            f"Column {name} is part of the key: as {new.type}, its keys would have other bytes "
            f"than as {old.type}",
            column=name,
            todo="Create a new topic with that key.",
        )
    if not is_widening(old.type, new.type):
        raise InvalidSchemaError(
            f"Column {name} is {old.type}, and not all of its values can become {new.type}",
            column=name,
            todo="Integers, floats, decimals and dates can become wider types; for another "
            "type, add a column of another name.",
        )


def _check_fields(field: Any, old: Any, earlier: Sequence[TopicSchema]) -> None:
    """Raise if a field inside of a column was dropped before: stored rows still have it.

    Unlike columns, the fields of structs have no ids, so it would be taken for the old one.
    """
    added = _field_names(field.type) - _field_names(old.type)
    if not added:
        return
    for schema in earlier:
        name = schema.ids.get(field_id(old))
        again = added & _field_names(schema.columns.field(name).type) if name else None
        if again:
            raise InvalidSchemaError(
                f"Column {field.name} had a field {min(again)} in version {schema.version}, which "
                "was dropped, and stored rows may have it",
                column=field.name,
                todo="Give the new field another name.",
            )


def _field_names(data_type: Any, path: str = "") -> set[str]:
    """Return the paths of all fields of structs inside of a type."""
    types, names = pa.types, set()
    if types.is_struct(data_type):
        for field in data_type:
            inner = f"{path}.{field.name}" if path else field.name
            names |= {inner} | _field_names(field.type, inner)
    elif types.is_map(data_type):
        names = _field_names(data_type.item_type, f"{path}[]")
    elif types.is_list(data_type) or types.is_fixed_size_list(data_type):
        names = _field_names(data_type.value_type, f"{path}[]")
    return names


def _check_dropped(before: TopicSchema, dropped: set[str], rename: Mapping[str, str]) -> None:
    for role, names in (("key", before.key), ("timestamp", (before.timestamp,))):
        for name in names:
            if name is not None and rename.get(name, name) in dropped:
                raise InvalidSchemaError(
                    f"Column {name} is the {role} column and cannot be dropped",
                    column=name,
                    todo=f"To rename it, pass rename={{{name!r}: …}}.",
                )


# Seeing rows of one version through another


class ColumnSource(NamedTuple):
    """Where a column of one version comes from in rows of another."""

    name: str | None
    """The name there; None if the rows do not have it."""
    type: Any
    """The type that it must be cast to; None if it has it."""


@lru_cache(maxsize=1024)
def column_sources(before: TopicSchema, after: TopicSchema) -> dict[str, ColumnSource]:
    """Return, for each column of ``after``, where it comes from in rows of ``before``."""
    sources = {}
    for field in after.columns:
        name = before.ids.get(field_id(field))
        if name is None:
            sources[field.name] = ColumnSource(None, field.type)
        else:
            same = before.columns.field(name).type == field.type
            sources[field.name] = ColumnSource(name, None if same else field.type)
    return sources


def convert(columns: Any, before: TopicSchema, after: TopicSchema, target: Any) -> Any:
    """Return rows with the columns of another segment.

    Args:
        columns: A `pyarrow.RecordBatch` or `pyarrow.Table` with the columns of a segment.
        before: The version of the schema that it has.
        after: The version that it is to have.
        target: The Arrow schema of the other segment, of that version.  It has at least the
            columns of embedlog's own that ``columns`` has.
    """
    count, names, sources = columns.num_rows, columns.schema.names, column_sources(before, after)
    arrays = []
    for field in target:
        source = sources.get(field.name)
        if source is None:
            present = field.name in names
            arrays.append(columns.column(field.name) if present else absent(field, count))
        elif source.name is None:
            arrays.append(_missing(columns, after, field.name))
        else:
            column = columns.column(source.name)
            arrays.append(column if source.type is None else column.cast(source.type))
    return type(columns).from_arrays(arrays, schema=target)


def _missing(columns: Any, schema: TopicSchema, name: str) -> Any:
    """Return a column that rows do not have; null in tombstones, which have no values."""
    column = schema.missing(name, columns.num_rows)
    if name in schema.defaults and "_tombstone" in columns.schema.names:
        null = pa.nulls(1, column.type)[0]
        column = pc.if_else(columns.column("_tombstone"), null, column)
    return column
