"""Reads the records of a topic in chunks, as columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from embedlog.batch import tables
from embedlog.batch.wire import headers_type, timestamp_type
from embedlog.lazy import np, pa, pc
from embedlog.root.root import Root
from embedlog.schemas.reading import TypedReader
from embedlog.schemas.topic_schema import TopicSchema

_READ_BYTES = 8 << 20
CHUNK_BYTES = 16 << 20
CHUNK_ROWS = 1 << 17
"""A chunk ends with the batch that reaches one of these; both are of decoded columns."""


class RowError(Exception):
    """A record cannot be converted.

    Args:
        row: Its number among those that were given.
        column: The path of the field.
        reason: Why, as the end of a sentence.
    """

    def __init__(self, row: int, column: str, reason: str) -> None:
        super().__init__(row, column, reason)
        self.row, self.column, self.reason = row, column, reason

    def among(self, rows: Sequence[int]) -> RowError:
        """Return the error with the number of its row among all, of which some were given."""
        return RowError(int(rows[self.row]), self.column, self.reason)


class StoredRows(NamedTuple):
    """Some consecutive records of a partition."""

    partition: int
    table: Any
    """A `pyarrow.RecordBatch`: timestamp, key and headers; the value, or the columns of a typed
    topic; and the offset."""
    deleted: Any
    """A numpy array: whether each record is a tombstone."""
    next_offset: int
    """Where the records after these begin."""
    compression: str
    """The codec of the first batch."""

    @property
    def size(self) -> int:
        """The number of records."""
        return int(self.table.num_rows)

    @property
    def keys(self) -> Any:
        """The key of each record as bytes."""
        return self.table.column("key")

    def offset(self, row: int) -> int:
        """Return the offset of a record."""
        return int(self.table.column("offset")[row].as_py())

    def slice(self, start: int, stop: int) -> StoredRows:
        """Return some of the records."""
        next_offset = self.next_offset if stop == self.size else self.offset(stop)
        table = self.table.slice(start, stop - start)
        return self._replace(table=table, deleted=self.deleted[start:stop], next_offset=next_offset)

    def headers(self) -> Any:
        """Return the headers; None if no record has any."""
        column = self.table.column("headers")
        return column if pc.any(pc.greater(pc.list_value_length(column), 0)).as_py() else None


def read_rows(
    root: Root, topic: str, partition: int, start: int, stop: int, schema: TopicSchema | None
) -> Iterator[StoredRows]:
    """Yield the records ``[start, stop)`` of a partition in chunks.

    Args:
        root: The log.
        topic: The name of the topic.
        partition: The partition.
        start: The first offset.
        stop: The offset after the last record.
        schema: The columns of a typed topic; None for a topic of bytes.
    """
    reader = root.partition(topic, partition).reader(start)
    parts: list[Any] = []
    rows = size = 0
    compression, next_offset = "none", start
    while start < stop:
        batches = reader.read(_READ_BYTES)
        if not batches:
            break
        for batch, first, last in tables.rows_in_range(batches, start, stop):
            part = _columns(batch, schema).slice(first, last - first)
            if not parts:
                compression = batch.codec
            parts.append(part)
            rows, size = rows + part.num_rows, size + part.nbytes
            next_offset = min(batch.next_offset, stop)
            if rows >= CHUNK_ROWS or size >= CHUNK_BYTES:
                yield _chunk(partition, parts, next_offset, compression, schema)
                parts, rows, size = [], 0, 0
        start = reader.offset
    if parts:
        yield _chunk(partition, parts, next_offset, compression, schema)


def _columns(batch: Any, schema: TopicSchema | None) -> Any:
    if schema is not None:
        columns = TypedReader(schema).keyed_columns(batch)
    else:
        columns = batch.columns(("timestamp", "key", "value"))
        headers = pa.nulls(batch.count, headers_type())
        if batch.has_headers:
            headers = batch.columns(("headers",)).column(0)
        columns = columns.append_column("headers", headers)
    return columns.append_column("offset", batch.offsets())


def _chunk(
    partition: int,
    parts: list[Any],
    next_offset: int,
    compression: str,
    schema: TopicSchema | None,
) -> StoredRows:
    table = pa.Table.from_batches(parts).combine_chunks().to_batches()[0]
    deleted = table.column("value").is_null() if schema is None else table.column("_tombstone")
    return StoredRows(
        partition,
        table,
        np.asarray(deleted.to_numpy(zero_copy_only=False), bool),
        next_offset,
        compression,
    )


def times(rows: StoredRows) -> Any:
    """Return the timestamps of records."""
    return rows.table.column("timestamp").cast(timestamp_type())
