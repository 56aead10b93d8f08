"""Reads an input partition in an executor: the files of the plan, as rows in Arrow.

An executor may be killed at any time, may run on another host that mounts the log's
disk, and may be used again for another query; so it opens no database, takes no lock
and starts no thread.  The batches of a log are mostly small; they are combined for Spark, which
compares the schema of the first batch strictly: names, order, types and nullability.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import groupby
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from embedlog import batch as batches
from embedlog.batch import Batch
from embedlog.batch.arrays import data, number, repeated
from embedlog.batch.tables import PieceRows, table
from embedlog.errors import (
    InvalidRecordError,
)
from embedlog.schemas.reading import HEADERS, OFFSET, TIMESTAMP, TOMBSTONE, TypedReader
from embedlog.schemas.topic_schema import TopicSchema, field_id
from embedlog.spark.columns import (
    RECORD_COLUMNS,
    VALUE,
    arrow_type,
    is_nanoseconds,
    to_spark,
)
from embedlog.spark.plan import LogInputPartition
from embedlog.splits.read_slice import MAX_ROWS, LogRoots, row_groups, row_tables
from embedlog.splits.slices import PartitionSlice, TopicVersions


@cache
def freeze_gc() -> None:
    """Exclude all loaded modules from garbage collection, once per process.

    Spark runs a collection after each task, which took 18 of a task's 25 ms.
    """
    gc.collect()
    gc.freeze()


def read_input_partition(
    partition: LogInputPartition,
    names: tuple[str, ...],
    fail_on_data_loss: bool,
    fields: Sequence[dict[str, Any]] = (),
) -> Iterator[Any]:
    """Yield the rows of an input partition as record batches of the named columns.

    Args:
        partition: What to read.
        names: The columns.
        fail_on_data_loss: As in `row_groups`.
        fields: For typed topics, the columns as fields of Spark's schema, in JSON.

    Raises:
        EmbedlogError: As `row_groups`.
        InvalidRecordError: A value does not fit Spark's type.
    """
    freeze_gc()
    directories = LogRoots(partition.root)
    try:
        for part in partition.slices:
            versions = partition.schemas.get(part.topic)
            if versions is None:
                reader = SliceReader(part, names)
            else:
                reader = TypedSliceReader(part, fields, versions)
            groups = row_groups(directories, part, versions, fail_on_data_loss)
            yield from _read_slice(groups, reader)
    finally:
        directories.close()


def _read_slice(groups: Iterable[list[PieceRows]], reader: SliceReader) -> Iterator[Any]:
    by_type = groupby(groups, lambda group: int(group[0][0].is_log_append_time))
    for timestamp_type, same_type in by_type:
        for rows in row_tables(same_type, reader.table):
            for start in range(0, rows.num_rows, MAX_ROWS):
                yield from reader.batches(rows.slice(start, MAX_ROWS), timestamp_type)


_SPARK_TYPES = {"key": "binary", "value": "binary", **RECORD_COLUMNS}
_SEGMENT_FIELDS = {field.name: field.with_nullable(True) for field in batches.schema(headers=True)}
_WITH_ROWS = (TIMESTAMP, HEADERS, TOMBSTONE)


class SliceReader:
    """Decodes the rows of a part of a partition of a topic of bytes.

    Args:
        part: Which part it is.
        names: The columns, in Spark's order.
    """

    def __init__(self, part: PartitionSlice, names: Sequence[str]) -> None:
        self._part = part
        self._schema = pa.schema([(name, arrow_type(_SPARK_TYPES[name])) for name in names])
        stored = [_SEGMENT_FIELDS[name] for name in names if name in _SEGMENT_FIELDS]
        self._stored = pa.schema([*stored, pa.field(OFFSET, pa.int64())])

    def table(self, rows: list[PieceRows]) -> Any:
        """Return the rows of batches of one segment as a `pyarrow.Table` of stored columns.

        Raises:
            CorruptBatchError: A column that is read is damaged.
        """
        return table(rows, self._part.partition, self._stored)

    def batches(self, stored: Any, timestamp_type: int) -> Iterator[Any]:
        """Yield rows as record batches for Spark, usually as one.

        Args:
            stored: What `table` returned.
            timestamp_type: 0 if the producer set the timestamps, 1 if the log did.

        Raises:
            InvalidRecordError: A value does not fit Spark's type.
        """
        constants: dict[str, str | int] = {
            "topic": self._part.topic,
            "partition": self._part.partition,
            "timestampType": timestamp_type,
        }
        for rows in stored.combine_chunks().to_batches():
            arrays = [
                _constant(constants[field.name], field.type, rows.num_rows)
                if field.name in constants
                else self._column(rows, field)
                for field in self._schema
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _column(self, rows: Any, field: Any) -> Any:
        part, column = self._part, rows.column(field.name)
        if field.name == "timestamp":
            try:
                return column.cast(field.type)
            except pa.ArrowInvalid as error:
                raise InvalidRecordError(
                    f"A record has a timestamp that Spark cannot hold: {error}",
                    topic=part.topic,
                    partition=part.partition,
                    todo="Leave the column out: .schema('key binary, value binary').",
                ) from error
        if field.name == "headers":
            # With Spark's names of the fields; null for a record without any, as in Kafka's source.
            is_empty = pc.equal(pc.list_value_length(column), number(0, pa.int32()))
            if pc.any(is_empty).as_py():
                column = pc.if_else(is_empty, pa.nulls(1, column.type)[0], column)
            return column.cast(field.type)
        return column


def _constant(value: str | int, arrow_type: Any, count: int) -> Any:
    """Return a column that has the same value in each row."""
    # Built for the next power of two and sliced, so that one cached array serves many batches.
    return _constants(value, arrow_type, 1 << max(count - 1, 0).bit_length()).slice(0, count)


@lru_cache(maxsize=16)
def _constants(value: str | int, arrow_type: Any, count: int) -> Any:
    if isinstance(value, int):
        return repeated(value, arrow_type, count)
    return pa.repeat(data(value.encode(), arrow_type), count)


class TypedSliceReader(SliceReader):
    """The same for a typed topic.

    Args:
        part: Which part it is.
        fields: The columns: fields of Spark's schema, as JSON.
        versions: The schemas of the topic.
    """

    def __init__(
        self, part: PartitionSlice, fields: Sequence[dict[str, Any]], versions: TopicVersions
    ) -> None:
        self._part, self._versions = part, versions
        self._schema = pa.schema(
            [(field["name"], arrow_type(field["type"]), field["nullable"]) for field in fields]
        )
        # Always the offset, so that there are as many rows.
        names = [OFFSET]
        for field in fields:
            if field["name"] == VALUE:
                names += [part["name"] for part in field["type"]["fields"]]
            elif field["name"] in _WITH_ROWS or field["name"] not in RECORD_COLUMNS:
                names.append(field["name"])
        self._reader = TypedReader(_widest(versions))
        self._read = self._reader.select(names)

    def table(self, rows: list[PieceRows]) -> Any:
        """See `SliceReader.table`."""
        whole = cast("list[tuple[Batch, int, int]]", rows)
        return self._reader.table(whole, self._part.partition, self._read)

    def _column(self, rows: Any, field: Any) -> Any:
        name = field.name
        if name == VALUE:
            parts = [self._own_column(rows, inner.name, inner.type) for inner in field.type]
            return pa.StructArray.from_arrays(parts, fields=list(field.type))
        if name in (OFFSET, *_WITH_ROWS):
            return super()._column(rows, field)
        column = self._own_column(rows, name, field.type)
        if column.null_count and not field.nullable:
            raise InvalidRecordError(
                f"A record has no {name}, and the query's schema says that all have one",
                topic=self._part.topic,
                partition=self._part.partition,
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
