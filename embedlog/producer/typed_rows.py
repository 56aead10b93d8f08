"""Makes batches of the records of a typed topic, from rows that were sent and from tables."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from embedlog.batch import BatchLimits
from embedlog.batch.arrays import number, repeated
from embedlog.batch.key_bytes import key_bytes
from embedlog.batch.wire import HEADERS, TOMBSTONES, headers_type, layout_of, timestamp_type
from embedlog.catalog import TopicInfo
from embedlog.errors import SerializationError, UnknownTopicOrPartitionError
from embedlog.lazy import pa, pc
from embedlog.producer.row_batches import CHUNK_BYTES, Rows
from embedlog.schemas.conform import conform, decoded
from embedlog.schemas.evolution import convert
from embedlog.schemas.rows import TypedRow
from embedlog.schemas.segment_schema import segment_schema
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.schemas.typed_batch import TypedBatch, encode_typed

_CHUNK_ROWS = 1 << 16
"""Chunks with fewer rows than this are copied to larger ones."""
DECODED_BYTES = 4 << 20
"""How large the columns of a batch are without a ``batch_size``, before its compression."""
_BATCH_ROWS = 1 << 16
"""The most rows of a batch: a consumer converts all of them to objects."""


class TypedColumns(NamedTuple):
    """Records of a typed topic as columns."""

    columns: Any
    """A `pyarrow.RecordBatch` with the columns of a segment."""
    keys: Any
    """The key of each record, as a `pyarrow.BinaryArray`."""
    schema: TopicSchema
    timestamp: int | None = None
    """The timestamp of all records in ms, if they came without one."""

    def take(self, rows: Any) -> TypedColumns:
        """Return some of the records, by their rows."""
        return self._replace(columns=self.columns.take(rows), keys=self.keys.take(rows))

    def batches(
        self,
        limit: int,
        decoded_limit: int,
        compression: str,
        limits: BatchLimits,
        text_statistics: frozenset[str] | None,
    ) -> Iterator[TypedBatch]:
        """Yield batches within the limits of the topic.

        The first batch says how well the rows can be compressed; the next ones are as large as
        that allows, since a reader of a few columns takes as long for a small batch.

        Args:
            limit: About how many bytes a batch may have, as it is stored.
            decoded_limit: About how many its columns may take, decompressed.
            compression: ``none``, ``lz4`` or ``zstd``.
            limits: What the topic accepts.
            text_statistics: The columns of text that get statistics; None for no statistics.
        """
        count = self.columns.num_rows
        row_bytes = max(self.columns.nbytes / max(count, 1), 1)
        step = first_step = max(min(int(limit / row_bytes), _BATCH_ROWS), 1)
        times = None if self.timestamp is None else (self.timestamp, self.timestamp)
        encode = partial(
            encode_typed,
            schema=self.schema,
            compression=compression,
            timestamps=times,
            text_statistics=text_statistics,
        )
        start = 0
        while start < count:
            part = self.columns.slice(start, min(step, count - start))
            for encoded in limits.split(part, encode):
                yield encoded
            start += part.num_rows
            stored_rows = 7 * limit * encoded.count // (8 * encoded.size)
            step = max(first_step, min(stored_rows, int(decoded_limit / row_bytes), _BATCH_ROWS))

    def slice(self, start: int, stop: int) -> TypedColumns:
        """Return the records ``[start, stop)``."""
        count = stop - start
        columns, keys = self.columns.slice(start, count), self.keys.slice(start, count)
        return self._replace(columns=columns, keys=keys)


def split_rows(rows: Rows, topic: TopicInfo) -> Iterator[TypedColumns]:
    """Yield the rows of a `send_batch`, at most about `CHUNK_BYTES` at a time."""
    start = size = 0
    for stop, row in enumerate(rows.values):
        size += row.encoder.size_of(row)
        if size > CHUNK_BYTES and start < stop:
            yield of_rows(rows.slice(start, stop), topic)
            start, size = stop, row.encoder.size_of(row)
    if start < len(rows.values):
        yield of_rows(rows.slice(start, len(rows.values)), topic)


def of_rows(rows: Rows, topic: TopicInfo) -> TypedColumns:
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
        parts.append(TypedColumns(columns, keys, encoder.schema))
        start = stop
    return parts[0] if len(parts) == 1 else _in_last_schema(parts)


def _in_last_schema(parts: list[TypedColumns]) -> TypedColumns:
    schema, flags = parts[-1].schema, 0
    for part in parts:
        flags |= layout_of(part.columns.schema).flags
    target = segment_schema(
        schema, headers=bool(flags & HEADERS), tombstones=bool(flags & TOMBSTONES)
    )
    columns = [convert(part.columns, part.schema, schema, target) for part in parts]
    table = pa.Table.from_batches(columns).combine_chunks()
    keys = pa.concat_arrays([part.keys for part in parts])
    return TypedColumns(table.to_batches()[0], keys, schema)


def of_table(table: Any, topic: str, schema: TopicSchema, now_ms: int) -> Iterator[TypedColumns]:
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
    for batch in _in_large_chunks(pa.table(columns, schema=target)).to_batches():
        keys = pa.nulls(batch.num_rows, pa.binary())
        if schema.key:
            keys = key_bytes([batch.column(name) for name in schema.key])
        yield TypedColumns(batch, keys, schema, one_time)


def _in_large_chunks(table: Any) -> Any:
    """Return a table of few chunks, since each becomes batches of its own."""
    chunks = max(column.num_chunks for column in table.columns)
    return table.combine_chunks() if table.num_rows < chunks * _CHUNK_ROWS else table


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
