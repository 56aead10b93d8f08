"""The rows of a typed topic as Arrow batches for Spark, in a task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from embedlog.batch import Batch
from embedlog.batch.tables import PieceRows
from embedlog.errors import InvalidRecordError
from embedlog.schemas.reading import HEADERS, OFFSET, TIMESTAMP, TOMBSTONE, TypedReader
from embedlog.schemas.segment_schema import segment_schema
from embedlog.schemas.topic_schema import TopicSchema, field_id
from embedlog.spark import arrow_columns
from embedlog.spark.plan import FileChunk, PartitionSlice, TopicVersions
from embedlog.spark.typed_columns import (
    RECORD_COLUMNS,
    VALUE,
    arrow_type,
    is_nanoseconds,
    to_spark,
)

_WITH_ROWS = (TIMESTAMP, HEADERS, TOMBSTONE)


class TypedSliceReader:
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
        self._schema = pa.schema(
            [(field["name"], arrow_type(field["type"]), field["nullable"]) for field in fields]
        )
        self._reader = TypedReader(_widest(versions))
        self._read = self._reader.select(self._stored_names())

    def _stored_names(self) -> list[str]:
        """Return the columns to decode; always the offset, so that there are as many rows."""
        names = [OFFSET]
        for field in self._fields:
            if field["name"] == VALUE:
                names += [part["name"] for part in field["type"]["fields"]]
            elif field["name"] in _WITH_ROWS or field["name"] not in RECORD_COLUMNS:
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
        return self._reader.table(batches, self._part.partition, self._read)

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
        column, read = rows.column(name), self._versions.read.columns.field(name).type
        if column.type != read:
            column = self._narrowed(column, read, name)
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

    def _narrowed(self, column: Any, read: Any, name: str) -> Any:
        """Return a column that was widened since the query began, as the type of the query."""
        try:
            narrowed = column.cast(read)
            if _is_same(narrowed.cast(column.type), column):
                return narrowed
            problem = "a value would be changed"
        except pa.ArrowInvalid as error:
            problem = str(error)
        raise InvalidRecordError(
            f"Column {name} was {read} when the query began and is {column.type} now: {problem}",
            topic=self._part.topic,
            partition=self._part.partition,
            todo="Load the topic again, or restart the query.",
        )


def _widest(versions: TopicVersions) -> TopicSchema:
    """Return the schema of the query, with the types that its columns have by now.

    Records that are newer than the query may have wider types, which older ones are cast to.
    """
    read = versions.read
    newest = max(versions.stored.values(), key=lambda schema: schema.version, default=read)
    if newest.version <= read.version:
        return read
    fields = {field_id(field): field for field in newest.columns}
    columns = [fields.get(field_id(field), field).with_name(field.name) for field in read.columns]
    return TopicSchema(newest.version, pa.schema(columns), read.key, read.timestamp, read.next_id)


def _is_same(one: Any, other: Any) -> bool:
    if not pa.types.is_floating(other.type):
        return bool(one.equals(other))
    # NaN is not equal to itself.
    return pc.all(pc.or_(pc.equal(one, other), pc.is_nan(other))).as_py() is not False
