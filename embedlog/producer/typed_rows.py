"""Records of typed topics as columns: rows that were sent, tables, and rows with tombstones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter
from typing import Any

from embedlog.batch.arrays import number, repeated
from embedlog.batch.key_bytes import key_bytes
from embedlog.batch.wire import HEADERS, TOMBSTONES, headers_type, layout_of, timestamp_type
from embedlog.catalog import TopicInfo
from embedlog.errors import SerializationError, UnknownTopicOrPartitionError
from embedlog.lazy import pa, pc
from embedlog.producer.row_batches import CHUNK_BYTES, ColumnRows, Rows
from embedlog.schemas.conform import conform, decoded
from embedlog.schemas.evolution import convert
from embedlog.schemas.reading import TOMBSTONE
from embedlog.schemas.segment_schema import absent, segment_schema
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.schemas.typed_row import TypedRow

_CHUNK_ROWS = 1 << 16
"""Chunks with fewer rows than this are copied to larger ones."""


def split_rows(rows: Rows, topic: TopicInfo) -> Iterator[ColumnRows]:
    """Yield the rows of a `send_batch`, at most about `CHUNK_BYTES` at a time."""
    start = size = 0
    for stop, row in enumerate(rows.values):
        size += row.encoder.size_of(row)
        if size > CHUNK_BYTES and start < stop:
            yield of_rows(rows.slice(start, stop), topic)
            start, size = stop, row.encoder.size_of(row)
    if start < len(rows.values):
        yield of_rows(rows.slice(start, len(rows.values)), topic)


def of_rows(rows: Rows, topic: TopicInfo) -> ColumnRows:
    """Return records that `send` collected; the schema may have changed between them.

    Raises:
        UnknownTopicOrPartitionError: Some are for another topic that had the name before.
    """
    parts, start = [], 0
    if any(
        type(row) is not TypedRow or row.encoder.schema.is_of_other_topic(topic.id)
        for row in rows.values
    ):
        raise UnknownTopicOrPartitionError(
            "The topic was deleted before the records were written",
            topic=topic.name,
            todo="Send the records again to write them to the topic that has the name now.",
        )
    timestamps = rows.timestamps
    assert not isinstance(timestamps, int)
    for encoder, group in groupby(rows.values, key=attrgetter("encoder")):
        values: list[Any] = list(group)
        stop = start + len(values)
        headers = None if rows.headers is None else rows.headers[start:stop]
        columns = encoder.columns(values, timestamps[start:stop], headers)
        keys = encoder.key_bytes([row.key for row in values])
        parts.append(ColumnRows(columns, keys, encoder.schema))
        start = stop
    return parts[0] if len(parts) == 1 else _in_last_schema(parts)


def _in_last_schema(parts: list[Any]) -> ColumnRows:
    schema, flags = parts[-1].schema, 0
    for part in parts:
        flags |= layout_of(part.columns.schema).flags
    target = segment_schema(
        schema, headers=bool(flags & HEADERS), tombstones=bool(flags & TOMBSTONES)
    )
    columns = [convert(part.columns, part.schema, schema, target) for part in parts]
    table = pa.Table.from_batches(columns).combine_chunks()
    keys = pa.concat_arrays([part.keys for part in parts])
    return ColumnRows(table.to_batches()[0], keys, schema)


def of_table(table: Any, topic: str, schema: TopicSchema, now_ms: int) -> Iterator[ColumnRows]:
    """Yield the rows of a user's table, some at a time.

    A column ``headers`` has the headers of the records, and ``timestamp`` their timestamps if the
    topic has no timestamp column; without it all get ``now_ms``.

    Raises:
        SerializationError: The rows do not fit the topic.  Nothing was yielded.
    """
    headers = _own_column(table, "headers", headers_type(), topic)
    time = None
    if schema.timestamp is None:
        time = _own_column(table, "timestamp", timestamp_type(), topic)
    own = [name for name in ("headers", "timestamp") if name in table.column_names]
    values = conform(table.drop_columns(own), schema, topic)
    target = segment_schema(schema, headers=headers is not None)
    columns = list(values.columns)
    if schema.timestamp is None:
        if time is None:
            columns.insert(0, repeated(now_ms, timestamp_type(), values.num_rows))
        else:
            columns.insert(0, time.fill_null(number(now_ms, timestamp_type())))
    if headers is not None:
        columns.append(headers)
    one_time = now_ms if schema.timestamp is None and time is None else None
    whole = pa.table(columns, schema=target)
    # Each chunk becomes batches of its own.
    if whole.num_rows < _CHUNK_ROWS * max(column.num_chunks for column in whole.columns):
        whole = whole.combine_chunks()
    for batch in whole.to_batches():
        keys = pa.nulls(batch.num_rows, pa.binary())
        if schema.key:
            keys = key_bytes([batch.column(name) for name in schema.key])
        yield ColumnRows(batch, keys, schema, one_time)


def _own_column(table: Any, name: str, data_type: Any, topic: str) -> Any:
    """Return a column of embedlog's own; None if the table does not have it."""
    if name not in table.column_names:
        return None
    column = table.column(name)
    try:
        options = pc.CastOptions.safe(data_type)
        options.allow_time_truncate = True
        return decoded(column).cast(options=options)
    except pa.ArrowException as error:
        raise SerializationError(
            f"Column {name} is {column.type}: {error}", topic=topic, column=name
        ) from error


# Tombstones


def with_tombstones(
    present: Any, tombstones: Any, is_deleted: Any, schema: TopicSchema, topic: str, now_ms: int
) -> ColumnRows:
    """Return rows some of which are tombstones, in their order.

    Args:
        present: The other rows, as `of_table` takes them.
        tombstones: A table with the key columns of the tombstones, and perhaps ``headers``, if
            the other rows have them, and ``timestamp``.
        is_deleted: A `pyarrow.BooleanArray`: which of all rows are tombstones.
        schema: The version of the topic's schema that the rows get.
        topic: The name of the topic, for errors.
        now_ms: The timestamp of rows without one.

    Raises:
        SerializationError: The rows do not fit the topic.
    """
    target = segment_schema(schema, headers="headers" in present.column_names, tombstones=True)
    parts = [_tombstones(tombstones, schema, topic, now_ms, target)]
    for rows in of_table(present, topic, schema, now_ms):
        columns = convert(rows.columns, schema, schema, target)
        parts.append(ColumnRows(columns, rows.keys, schema))
    columns = pa.Table.from_batches([part.columns for part in parts]).combine_chunks()
    places = [pc.indices_nonzero(mask) for mask in (is_deleted, pc.invert(is_deleted))]
    order = pc.sort_indices(pa.concat_arrays(places))
    keys = pa.concat_arrays([part.keys for part in parts])
    return ColumnRows(columns.to_batches()[0], keys, schema).take(order)


def _tombstones(
    table: Any, schema: TopicSchema, topic: str, now_ms: int, target: Any
) -> ColumnRows:
    """Return tombstones with the columns of a segment: of the values only key and timestamp."""
    times = pa.nulls(table.num_rows, timestamp_type())
    if "timestamp" in table.column_names:
        times = _one_chunk(table.column("timestamp").cast(timestamp_type(), safe=False))
    times = times.fill_null(number(now_ms, timestamp_type()))
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
    return ColumnRows(pa.RecordBatch.from_arrays(arrays, schema=target), keys, schema)


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
