"""The rows of a DataFrame as those of a typed topic: checked before tasks begin, and in a task.

A DataFrame has the topic's columns, or one struct of them, `value`, as a reader gives them; and
perhaps the columns ``partition``, ``headers``, ``timestamp`` and ``_tombstone``.  What else a
reader gives is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from embedlog.batch.key_bytes import key_bytes
from embedlog.batch.wire import headers_type, timestamp_type
from embedlog.errors import InvalidConfigError, SerializationError
from embedlog.lazy import pa, pc
from embedlog.producer.typed_rows import TypedColumns, of_table
from embedlog.schemas.conform import conform
from embedlog.schemas.evolution import convert
from embedlog.schemas.reading import TOMBSTONE
from embedlog.schemas.segment_schema import absent, segment_schema
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.spark import typed_columns
from embedlog.spark.typed_columns import RECORD_TYPES, VALUE, from_spark, type_name

_IGNORED = ("topic", "offset", "timestampType")
"""Columns of a reader that mean nothing to a writer; ``partition`` is used elsewhere."""


def check_frame(fields: Sequence[dict[str, Any]], schema: TopicSchema, topic: str) -> None:
    """Refuse a DataFrame whose columns a typed topic cannot take.

    Args:
        fields: Its columns: the fields of Spark's schema, as JSON.
        schema: The current version of the topic's schema.
        topic: The name of the topic.

    Raises:
        InvalidConfigError: A column is missing, or one of those of every record has another type.
        SerializationError: The topic has no such column, or one of a type that cannot be cast.
    """
    own, columns = [], []
    names = _names([field["name"] for field in fields], schema)
    fields = [{**field, "name": name} for field, name in zip(fields, names, strict=True)]
    for field in fields:
        name, field_type = field["name"], type_name(field["type"])
        if name in RECORD_TYPES:
            if field_type not in (RECORD_TYPES[name], "void"):
                raise InvalidConfigError(
                    f"{name} must be a(n) {RECORD_TYPES[name]}",
                    todo=f"It is {field_type}: cast it or leave it out.",
                )
        elif typed_columns.is_struct_of_columns(field):
            own += field["type"]["fields"]
        else:
            own.append(field)
    for field in own:
        columns.append(pa.field(field["name"], _arrow_type(field, topic)))
    names = [column.name for column in columns]
    # On no rows: the types alone say what cannot be cast.
    empty = [pa.chunked_array([], column.type) for column in columns]
    conform(_with_stored_types(pa.table(empty, names=names), schema, topic), schema, topic)
    for column in schema.columns:
        required = not column.nullable or column.name == schema.timestamp
        if required and column.name not in names and column.name not in schema.defaults:
            raise InvalidConfigError(
                f"The DataFrame has no column {column.name}, which must not be null in topic "
                f"{topic}",
                todo=f"It has {', '.join(names) or 'none of the topic'}.",
            )
    if TOMBSTONE in (field["name"] for field in fields) and not schema.key:
        raise InvalidConfigError(
            f"The DataFrame has the column {TOMBSTONE}, and topic {topic} has no key column",
            todo="Leave the column out.",
        )


def _names(names: list[str], schema: TopicSchema) -> list[str]:
    """Return the names of columns, or those of the topic for what ``VALUES`` of SQL calls them."""
    columns = schema.columns.names
    unnamed = [f"col{number}" for number in range(1, len(columns) + 1)]
    return columns if names == unnamed and not {*unnamed} & {*columns} else names


def _arrow_type(field: dict[str, Any], topic: str) -> Any:
    try:
        return typed_columns.arrow_type(field["type"])
    except (KeyError, ValueError) as error:
        raise SerializationError(
            f"Column {field['name']} is {type_name(field['type'])}, which a topic cannot store",
            topic=topic,
            column=field["name"],
            todo="Cast it or leave it out.",
        ) from error


def topic_rows(
    table: Any, schema: TopicSchema, topic: str, now_ms: int
) -> Iterator[tuple[TypedColumns, Any]]:
    """Yield rows of a topic, each time with the rows of the DataFrame that they are.

    Args:
        table: A `pyarrow.Table` with the columns of the DataFrame.
        schema: The version of the topic's schema that the rows get.
        topic: The name of the topic, for errors.
        now_ms: The timestamp of rows without one.

    Raises:
        SerializationError: The rows do not fit the topic.
    """
    # In one chunk: sorting the rows of several is slow, and a batch is one.
    table = _flat(table.combine_chunks(), topic)
    table = table.rename_columns(_names(table.column_names, schema))
    deleted = table.column(TOMBSTONE) if TOMBSTONE in table.column_names else None
    ignored = [name for name in (*_IGNORED, TOMBSTONE) if name in table.column_names]
    values = _with_stored_types(_with_headers(table.drop_columns(ignored)), schema, topic)
    if deleted is not None and pc.any(deleted).as_py():
        yield _with_tombstones(values, deleted, schema, topic, now_ms), table
        return
    start = 0
    for rows in of_table(values, topic, schema, now_ms):
        count = rows.columns.num_rows
        yield rows, table.slice(start, count)
        start += count


def _flat(table: Any, topic: str) -> Any:
    """Return rows with the fields of a struct `value` as columns."""
    if VALUE not in table.column_names or not pa.types.is_struct(table.column(VALUE).type):
        return table
    value = table.column(VALUE)
    if value.null_count:
        row = pc.index(pc.is_null(value), True).as_py()
        raise SerializationError(
            f"Row {row} has no {VALUE}",
            topic=topic,
            column=VALUE,
            row=row,
            todo=f"Leave it out; a tombstone has its key in {VALUE}, and true in {TOMBSTONE}.",
        )
    table = table.drop_columns([VALUE])
    for field, column in zip(value.type, value.flatten(), strict=True):
        table = table.append_column(field.name, column)
    return table


def _with_headers(table: Any) -> Any:
    """Return rows with checked headers, and without that column if no row has any."""
    if "headers" not in table.column_names:
        return table
    column = table.column("headers")
    if pa.types.is_null(column.type) or not pc.sum(pc.list_value_length(column)).as_py():
        return table.drop_columns(["headers"])
    check_headers(column)
    return table


def check_headers(column: Any) -> None:
    """Refuse a header that is null or has no key: Arrow would store the former."""
    headers = pc.list_flatten(column)
    if headers.null_count or pc.struct_field(headers, "key").null_count:
        raise SerializationError(
            "A header has no key", todo="Give each header a key, or leave the header out."
        )


def _with_stored_types(table: Any, schema: TopicSchema, topic: str) -> Any:
    """Return rows with times of day where Spark has intervals, so that `conform` casts the rest."""
    for index, name in enumerate(table.column_names):
        if name not in schema.columns.names:
            continue
        try:
            column = from_spark(table.column(index), schema.columns.field(name).type)
        except pa.ArrowInvalid as error:
            raise SerializationError(
                f"Column {name} cannot become {schema.columns.field(name).type}: {error}",
                topic=topic,
                column=name,
                todo="Correct the value, or cast the column yourself.",
            ) from error
        if column is not table.column(index):
            table = table.set_column(index, name, column)
    return table


# Tombstones


def _with_tombstones(
    table: Any, deleted: Any, schema: TopicSchema, topic: str, now_ms: int
) -> TypedColumns:
    """Return rows some of which are tombstones, in their order."""
    is_deleted = deleted.combine_chunks().fill_null(False)
    target = segment_schema(schema, headers="headers" in table.column_names, tombstones=True)
    parts = [_tombstones(table.filter(is_deleted), schema, topic, now_ms, target)]
    for rows in of_table(table.filter(pc.invert(is_deleted)), topic, schema, now_ms):
        columns = convert(rows.columns, schema, schema, target)
        parts.append(TypedColumns(columns, rows.keys, schema))
    columns = pa.Table.from_batches([part.columns for part in parts]).combine_chunks()
    places = [pc.indices_nonzero(mask) for mask in (is_deleted, pc.invert(is_deleted))]
    order = pc.sort_indices(pa.concat_arrays(places))
    keys = pa.concat_arrays([part.keys for part in parts])
    return TypedColumns(columns.to_batches()[0], keys, schema).take(order)


def _tombstones(
    table: Any, schema: TopicSchema, topic: str, now_ms: int, target: Any
) -> TypedColumns:
    """Return tombstones with the columns of a segment: of the values only key and timestamp."""
    times = pa.nulls(table.num_rows, timestamp_type())
    if "timestamp" in table.column_names:
        times = table.column("timestamp").cast(timestamp_type(), safe=False).combine_chunks()
    times = times.fill_null(pa.scalar(now_ms).cast(timestamp_type()))
    names = [*schema.key, *([] if schema.timestamp is None else [schema.timestamp])]
    present = table.select([name for name in names if name in table.column_names])
    if schema.timestamp is not None:
        present = _with_time(present, schema, times)
    only = [schema.columns.field(name) for name in dict.fromkeys(names)]
    reduced = TopicSchema(
        schema.version, pa.schema(only), schema.key, schema.timestamp, schema.next_id
    )
    values = conform(present, reduced, topic).combine_chunks()
    keys = key_bytes([_one_chunk(values.column(name)) for name in schema.key])
    if keys.null_count:
        raise SerializationError(
            "A tombstone has no key",
            topic=topic,
            column=schema.key[0],
            todo=f"Set {', '.join(schema.key)}, or leave the row out.",
        )
    arrays = []
    for field in target:
        if field.name in values.column_names:
            arrays.append(_one_chunk(values.column(field.name)))
        elif field.name == "_timestamp":
            arrays.append(times)
        elif field.name == TOMBSTONE:
            arrays.append(pc.invert(absent(field, table.num_rows)))
        elif field.name == "_headers":
            arrays.append(_one_chunk(table.column("headers").cast(headers_type())))
        else:
            arrays.append(pa.nulls(table.num_rows, field.type))
    return TypedColumns(pa.RecordBatch.from_arrays(arrays, schema=target), keys, schema)


def _with_time(present: Any, schema: TopicSchema, times: Any) -> Any:
    """Return rows with a timestamp column of the topic that has no nulls."""
    name = schema.timestamp
    times = pa.chunked_array([times.cast(schema.columns.field(name).type, safe=False)])
    if name not in present.column_names:
        return present.append_column(name, times)
    column = present.column(name)
    if pa.types.is_null(column.type):
        return present.set_column(present.column_names.index(name), name, times)
    if column.null_count:
        column = pc.coalesce(column, times.cast(column.type, safe=False))
    return present.set_column(present.column_names.index(name), name, column)


def _one_chunk(column: Any) -> Any:
    chunks = column.combine_chunks()
    return pa.concat_arrays(chunks.chunks) if isinstance(chunks, pa.ChunkedArray) else chunks
