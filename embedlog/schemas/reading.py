"""Reads batches of a typed topic: every version of its schema is seen through one of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from embedlog.batch import Batch, tables
from embedlog.batch.wire import BufferLayout, headers_type, timestamp_type
from embedlog.forks import cached_property
from embedlog.lazy import pa, pc
from embedlog.schemas.rows import python_rows
from embedlog.schemas.segment_schema import absent
from embedlog.schemas.topic_schema import FIELD_ID, TopicSchema, field_id
from embedlog.schemas.values import python_values

OFFSET, PARTITION, TIMESTAMP, HEADERS = "offset", "partition", "timestamp", "headers"
"""The columns that come with every record, besides the user's own."""
TOMBSTONE = "_tombstone"
"""The column that says which rows are tombstones; a table without it leaves them out."""
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')


class StoredColumn(NamedTuple):
    """Where a column of the schema comes from in the batches of a segment."""

    name: str | None
    """The stored name; None if the segment does not have the column."""
    cast: Any
    """The type to cast it to; None if it has it."""


class TypedReader:
    """Decodes the batches of a topic to the columns of one version of its schema.

    Args:
        schema: The version, which may be older or newer than those of the batches.
    """

    def __init__(self, schema: TopicSchema) -> None:
        self.schema = schema

    @cached_property
    def result(self) -> dict[str, Any]:
        """The columns that a table can have, in order: those of every record, and the user's."""
        fields = [
            pa.field(OFFSET, pa.int64()),
            pa.field(PARTITION, pa.int32()),
            pa.field(TIMESTAMP, timestamp_type()),
            # In the row of a tombstone every column may be null.
            *(field.with_nullable(True) for field in self.schema.plain),
            pa.field(HEADERS, headers_type()),
            pa.field(TOMBSTONE, pa.bool_()),
        ]
        return {field.name: field for field in fields}

    def select(self, names: Sequence[str] | None, headers: bool = False) -> pa.Schema:
        """Return the columns of a table.

        Args:
            names: Their names; None for all but the one that marks tombstones.
            headers: Whether all includes the headers.

        Raises:
            KeyError: There is no such column.
        """
        if names is None:
            left_out = {TOMBSTONE} if headers else {TOMBSTONE, HEADERS}
            names = [name for name in self.result if name not in left_out]
        for name in names:
            if name not in self.result:
                raise KeyError(f"There is no column {name!r}, only {', '.join(self.result)}")
        return pa.schema([self.result[name] for name in names])

    def columns(self, batch: Batch, names: Sequence[str], verify: bool = True) -> dict[str, Any]:
        """Return some of the user's columns, and only their bytes are read.

        Raises:
            CorruptBatchError: One of them is damaged.
        """
        sources = _stored_columns(batch.layout, self.schema)
        wanted = {name: sources[name] for name in names}
        stored = [source.name for source in wanted.values() if source.name is not None]
        deletes = batch.may_have_tombstones and any(
            source.name is None and name in self.schema.defaults for name, source in wanted.items()
        )
        if deletes:
            stored.append(TOMBSTONE)
        columns: Any = batch.columns(stored, verify) if stored else None
        result = {}
        for name, source in wanted.items():
            if source.name is None:
                column = self.schema.missing(name, batch.count)
                if deletes and name in self.schema.defaults:
                    null = pa.nulls(1, column.type)[0]
                    column = pc.if_else(columns.column(TOMBSTONE), null, column)
            else:
                column = columns.column(source.name)
                if source.cast is not None:
                    column = column.cast(source.cast)
            result[name] = column
        return result

    def indexes(self, names: Sequence[str], layout: BufferLayout) -> set[int]:
        """Return the indexes of the stored columns that `table` needs.

        Args:
            names: The columns of the table.
            layout: Where the columns of a segment are.
        """
        sources = _stored_columns(layout, self.schema)
        needed = {sources[name].name for name in names if name in sources}
        needed |= {layout.added(name) for name in (HEADERS, "tombstone", OFFSET)}
        if TIMESTAMP in names:
            needed.add(layout.names[layout.time])
        return {index for index, name in enumerate(layout.names) if name in needed}

    def table(self, rows: Sequence[tables.BatchRows], partition: int, schema: pa.Schema) -> Any:
        """Return the rows of batches of one segment as a `pyarrow.Table` with some columns.

        Without the column ``_tombstone``, tombstones are left out.

        Args:
            rows: Batches, and which of their rows.
            partition: The number of the partition.
            schema: What `select` returned.

        Raises:
            CorruptBatchError: A column that is read is damaged.
        """
        names = [name for name in schema.names if name not in (OFFSET, PARTITION)]
        own = [name for name in names if name not in (TIMESTAMP, HEADERS, TOMBSTONE)]
        if TOMBSTONE not in names and any(batch.may_have_tombstones for batch, _, _ in rows):
            rows = _without_tombstones(rows)
            if not rows:
                return schema.empty_table()
        parts: dict[str, list[Any]] = {name: [] for name in names}
        for batch, first, last in rows:
            columns = self.columns(batch, own)
            if TIMESTAMP in parts:
                columns[TIMESTAMP] = batch.timestamps()
            if HEADERS in parts:
                columns[HEADERS] = _headers(batch)
            if TOMBSTONE in parts:
                columns[TOMBSTONE] = _tombstones(batch)
            for name, column in columns.items():
                parts[name].append(column.slice(first, last - first))
        chunks = {
            name: pa.chunked_array(part, schema.field(name).type) for name, part in parts.items()
        }
        return tables.with_positions(rows, partition, schema, chunks)

    def value_in(self, columns: dict[str, Any], row: int) -> dict[str, Any] | None:
        """Return the value in a row of the `row_columns`; None for a tombstone."""
        if columns[TOMBSTONE][row].as_py():
            return None
        return {
            # Six times as fast, which counts for look-ups of one row.
            name: columns[name][row].as_py()
            if is_plain
            else python_values(columns[name].slice(row, 1))[0]
            for name, is_plain in self._plain.items()
        }

    @cached_property
    def _plain(self) -> dict[str, bool]:
        """The names of the columns, and whether `python_values` does what pyarrow does."""
        types = pa.types
        same = types.is_integer, types.is_floating, types.is_string, types.is_binary
        return {
            field.name: any(check(field.type) for check in same) for field in self.schema.columns
        }

    def key_in(self, columns: dict[str, Any], row: int) -> Any:
        """Return the key in a row of the `row_columns`, as `lists` does."""
        values = [python_values(columns[name].slice(row, 1))[0] for name in self.schema.key]
        return tuple(values) if len(values) > 1 else values[0]

    def row_columns(self, batch: Batch) -> dict[str, Any]:
        """Return the user's columns, the stored keys as ``key``, and which are tombstones."""
        columns = self.columns(batch, self.schema.columns.names)
        columns["key"], columns[TOMBSTONE] = batch.keys(), _tombstones(batch)
        return columns

    def keyed_columns(self, batch: Batch) -> Any:
        """Return the `row_columns`, timestamps and headers as a `pyarrow.RecordBatch`."""
        columns = self.row_columns(batch)
        columns[TIMESTAMP], columns[HEADERS] = batch.timestamps(), _headers(batch)
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))

    def lists(self, batch: Batch, verify: bool = True) -> tuple[Any, Any, Any, Any]:
        """Return timestamps, keys, values and headers as lists that have one item per record.

        A value is a dict, or None in a tombstone.  A key is the value of the key column, a
        tuple of several, or None if the topic has none.

        Raises:
            CorruptBatchError: The batch is damaged.
        """
        names, key = self.schema.columns.names, self.schema.key
        columns = self.columns(batch, names, verify)
        record_batch = pa.RecordBatch.from_arrays(list(columns.values()), names=names)
        batch.check(record_batch)
        values: list[Any] = python_rows(record_batch, names)
        keys: list[Any] = [None] * batch.count
        if len(key) == 1:
            keys = [value[key[0]] for value in values]
        elif key:
            keys = [tuple(value[name] for name in key) for value in values]
        if batch.may_have_tombstones:
            for row in pc.indices_nonzero(_tombstones(batch)).to_pylist():
                values[row] = None
        times = batch.timestamps(verify).view(pa.int64()).to_pylist()
        return times, keys, values, batch.header_lists(verify)


def _headers(batch: Batch) -> Any:
    if not batch.has_headers:
        return pa.nulls(batch.count, headers_type())
    return batch.columns(("_headers",)).column(0)


def _tombstones(batch: Batch) -> Any:
    if not batch.may_have_tombstones:
        return absent(pa.field(TOMBSTONE, pa.bool_()), batch.count)
    return batch.columns((TOMBSTONE,)).column(0)


def _without_tombstones(rows: Sequence[tables.BatchRows]) -> list[tables.BatchRows]:
    """Return the rows of batches that are not tombstones, in runs."""
    kept: list[tables.BatchRows] = []
    for batch, first, last in rows:
        deleted = _tombstones(batch).slice(first, last - first)
        start = first
        for row in [first + row for row in pc.indices_nonzero(deleted).to_pylist()] + [last]:
            if start < row:
                kept.append((batch, start, row))
            start = row + 1
    return kept


@lru_cache(maxsize=1024)
def _stored_columns(layout: BufferLayout, schema: TopicSchema) -> dict[str, StoredColumn]:
    """Return where each column of a schema comes from in the segments of a layout."""
    by_id = {
        field_id(field): field
        for field in layout.original
        if field.metadata and FIELD_ID in field.metadata
    }
    sources = {}
    for field in schema.columns:
        stored = by_id.get(field_id(field))
        if stored is None:
            sources[field.name] = StoredColumn(None, None)
        else:
            cast = None if stored.type == field.type else field.type
            sources[field.name] = StoredColumn(stored.name, cast)
    return sources


def text_of(where: Any) -> str:
    """Return a condition as text, for people."""
    try:
        return str(where)
    except UnicodeDecodeError:
        return "of bytes"


def names_in(where: Any, names: Sequence[str]) -> list[str]:
    """Return the columns that a `pyarrow.compute.Expression` refers to, or a few more.

    Raises:
        ValueError: It refers to a column by its number, which is another one in each selection.
    """
    try:
        text = _TEXT.sub('""', whole := str(where))
    except UnicodeDecodeError:
        # pyarrow has no text for bytes in some places.  The names are in the stored form, too.
        stored = where.__reduce__()[1][0].to_pybytes()
        return [name for name in names if name.encode() in stored]
    if "FieldPath(" in text:
        raise ValueError(f"where must name its columns, got {where}")
    if '"' in "".join(names):
        text = whole
    return [name for name in names if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]
