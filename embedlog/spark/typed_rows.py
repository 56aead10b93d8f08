"""The rows of a typed topic as Arrow batches for Spark, in a task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from embedlog.batch import Batch
from embedlog.batch.tables import PieceRows
from embedlog.errors import InvalidRecordError
from embedlog.schemas.reading import OFFSET, TypedReader
from embedlog.schemas.segment_schema import absent, segment_schema
from embedlog.spark import arrow_columns
from embedlog.spark.plan import FileChunk, PartitionSlice, TopicVersions
from embedlog.spark.typed_columns import (
    RECORD_COLUMNS,
    TOMBSTONE,
    VALUE,
    arrow_type,
    is_nanoseconds,
    to_spark,
)

_TOMBSTONE_FIELD = pa.field(TOMBSTONE, pa.bool_())


class TypedRows:
    """Decodes the rows of a part of a partition, with the columns of a query.

    Args:
        fields: The columns: fields of Spark's schema, as JSON.
        part: Which part it is.
        versions: The schemas of the topic.
    """

    def __init__(
        self, fields: Sequence[dict[str, Any]], part: PartitionSlice, versions: TopicVersions
    ) -> None:
        self._part, self._versions = part, versions
        self._fields = fields
        self._with_tombstones = any(field["name"] == TOMBSTONE for field in fields)
        self._schema = pa.schema(
            [(field["name"], arrow_type(field["type"]), field["nullable"]) for field in fields]
        )
        self._reader = TypedReader(versions.read)
        self._read = self._reader.select(self._stored_names())

    def _stored_names(self) -> list[str]:
        """Return the columns to decode; always the offset, so that there are as many rows."""
        names = [OFFSET]
        for field in self._fields:
            if field["name"] == VALUE:
                names += [part["name"] for part in field["type"]["fields"]]
            elif field["name"] in ("timestamp", "headers") or field["name"] not in RECORD_COLUMNS:
                names.append(field["name"])
        return names

    def stored_schemas(self, chunk: FileChunk) -> tuple[Any, ...]:
        """Return the schemas that a file may have."""
        stored = self._versions.stored[chunk.schema_version]
        return tuple(
            segment_schema(
                stored, headers=chunk.headers, tombstones=chunk.tombstones, offsets=offsets
            )
            for offsets in (False, True)
        )

    def table(self, rows: list[PieceRows]) -> Any:
        """Return the rows of batches of one segment as a `pyarrow.Table` of stored columns.

        Raises:
            CorruptBatchError: A column that is read is damaged.
        """
        batches = cast("list[tuple[Batch, int, int]]", rows)
        table = self._reader.table(batches, self._part.partition, self._read)
        tombstones = _tombstones(batches)
        if self._with_tombstones:
            if tombstones is None:
                tombstones = pa.chunked_array([absent(_TOMBSTONE_FIELD, table.num_rows)])
            return table.append_column(_TOMBSTONE_FIELD, tombstones)
        return table if tombstones is None else table.filter(pc.invert(tombstones))

    def batches(self, table: Any, timestamp_type: int) -> Iterator[Any]:
        """Yield rows as record batches for Spark, usually as one.

        Args:
            table: What `table` returned.
            timestamp_type: 0 if the producer set the timestamps, 1 if the log did.

        Raises:
            InvalidRecordError: A value does not fit Spark's type.
        """
        constants: dict[str, str | int] = {
            "topic": self._part.topic,
            "partition": self._part.partition,
            "timestampType": timestamp_type,
        }
        for rows in table.combine_chunks().to_batches():
            arrays = [
                arrow_columns.constant(constants[field.name], field.type, rows.num_rows)
                if field.name in constants
                else self._column(rows, field)
                for field in self._schema
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _column(self, rows: Any, field: Any) -> Any:
        part, name = self._part, field.name
        if name == "timestamp":
            return arrow_columns.microseconds(rows.column(name), part.topic, part.partition)
        if name == "headers":
            return arrow_columns.headers(rows.column(name))
        if name == VALUE:
            parts = [self._own_column(rows, inner.name, inner.type) for inner in field.type]
            return pa.StructArray.from_arrays(parts, fields=list(field.type))
        if name in (OFFSET, TOMBSTONE):
            return rows.column(name)
        column = self._own_column(rows, name, field.type)
        if column.null_count and not field.nullable:
            raise InvalidRecordError(
                f"A record has no {name}, and the query's schema says that all have one",
                topic=part.topic,
                partition=part.partition,
                todo="Leave NOT NULL out of .schema(…).",
            )
        return column

    def _own_column(self, rows: Any, name: str, target: Any) -> Any:
        column = rows.column(name)
        try:
            return to_spark(column, target)
        except pa.ArrowInvalid as error:
            todo = "Leave the column out: name the others in .schema(…)."
            if is_nanoseconds(column.type):
                todo = f"Read its nanoseconds as a number: .schema('{name} bigint')."
            raise InvalidRecordError(
                f"Column {name} has a value that Spark cannot hold: {error}",
                topic=self._part.topic,
                partition=self._part.partition,
                todo=todo,
            ) from error


def _tombstones(rows: Sequence[tuple[Batch, int, int]]) -> Any:
    """Return which rows are tombstones, as a `pyarrow.ChunkedArray`; None if none can be."""
    if not any(batch.may_have_tombstones for batch, _, _ in rows):
        return None
    parts = [
        (
            batch.columns((TOMBSTONE,)).column(0).slice(first, last - first)
            if batch.may_have_tombstones
            else absent(_TOMBSTONE_FIELD, last - first)
        )
        for batch, first, last in rows
    ]
    return pa.chunked_array(parts, pa.bool_())
