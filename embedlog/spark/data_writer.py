"""Writes the rows of one task: as finished batches in a staged file, which no reader sees yet.

A task may be killed at any time, run twice, or run on a host that only shares
the directory; so it opens no database and takes no lock.  The driver reads what
a task needs to know about the topics, and Spark pickles it with the task.

For a typed topic a DataFrame has the topic's columns, or one struct of them, `value`, as a reader
gives them; and perhaps the columns ``partition``, ``headers``, ``timestamp`` and ``_tombstone``.
What else a reader gives is left out.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from embedlog.batch import BatchLimits
from embedlog.batch.arrays import data
from embedlog.batch.tables import combined
from embedlog.catalog import MAX_PARTITIONS
from embedlog.errors import (
    InvalidConfigError,
    InvalidRecordError,
    SerializationError,
    UnknownTopicOrPartitionError,
)
from embedlog.partitioner import partitions_for_keys
from embedlog.producer.row_batches import ColumnRows, batches_by_partition
from embedlog.producer.table_rows import table_rows
from embedlog.producer.typed_rows import of_table, with_tombstones
from embedlog.publish.staging import StagedFile, StagedFileWriter
from embedlog.schemas.conform import conform
from embedlog.schemas.reading import TOMBSTONE
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.spark.columns import (
    RECORD_TYPES,
    VALUE,
    arrow_type,
    from_spark,
    is_struct_of_columns,
    type_name,
)
from embedlog.spark.partition_reader import freeze_gc
from embedlog.splits.read_slice import open_files

COMBINED_ROWS = 64 * 1024
COMBINED_BYTES = 16 << 20
"""Rows to partition at once: Spark passes 10,000, of which each partition gets few."""
_COLUMNS = ("key", "value", "headers", "timestamp")


NEW_TOPIC_ID = -1
"""The id, until it is published to, of a topic that will be created then."""


@dataclass(frozen=True, slots=True)
class TargetTopic:
    """What a task needs to know about a topic."""

    name: str
    id: int
    partitions: int
    limits: BatchLimits
    compression: str
    is_typed: bool = False
    """Whether its values are columns."""
    schema: TopicSchema | None = None
    """Those columns, if all rows are for this topic."""
    text_statistics: frozenset[str] | None = frozenset()
    """Its columns of text that get statistics."""

    @property
    def is_new(self) -> bool:
        """Whether the topic is to be created, with at least one partition and as many as needed."""
        return self.id == NEW_TOPIC_ID


class StagedRows(NamedTuple):
    """What one task staged."""

    file: StagedFile
    placed_by_key: bool = False
    """Whether rows of a new topic are in partition 0 because that is the partition of any key
    if there is only one."""


@dataclass(frozen=True, slots=True)
class WriteTask:
    """What all tasks of a write need to know; made on the driver, and pickled."""

    path: str
    """The log root."""
    directory: str
    """The directory of the staged files, relative to the log root."""
    topic: str | None
    """The topic of all rows; None if their column says it."""
    targets: dict[str, TargetTopic]

    def stage(self, batches: Iterable[Any], partition_id: int, attempt_number: int) -> StagedRows:
        """Write record batches to a staged file.

        Args:
            batches: Batches of `pyarrow` with the columns of the DataFrame.
            partition_id: The number of the task in its stage.
            attempt_number: The number of the task's attempt, for the name of the file.

        Raises:
            NotALogError: The log is not on this host.
            EmbedlogError: A row cannot be written; the staged file is removed.
        """
        freeze_gc()
        files = open_files(self.path, writable=True)
        # Each application numbers its tasks from 0, and each stage its attempts.
        name = f"{partition_id:05d}-{attempt_number}-{uuid.uuid4().hex[:12]}"
        writer = StagedFileWriter(files, self.directory, name)
        try:
            partitioner = TaskPartitioner(self, writer, partition_id)
            full = (batch for batch in batches if batch.num_rows)
            for table in combined(full, COMBINED_ROWS, COMBINED_BYTES):
                partitioner.add(table)
            return StagedRows(writer.finish(), partitioner.placed_by_key)
        except BaseException:
            writer.abandon()
            raise
        finally:
            files.close_all()


class TaskPartitioner:
    """Writes the rows of a task by topic and partition; those of a partition keep their order."""

    def __init__(self, task: WriteTask, writer: StagedFileWriter, partition_id: int) -> None:
        self._task, self._writer = task, writer
        # Rows without a key stay together in a partition, which differs from task to task;
        # a repeated task chooses the same partitions.
        self._keyless_partition = partition_id
        self.placed_by_key = False
        """See `StagedRows`."""

    def add(self, table: Any) -> None:
        """Write rows."""
        for topic, rows in self._by_topic(table):
            target = self._task.targets.get(topic)
            if target is None:
                raise UnknownTopicOrPartitionError(
                    "There is no such topic", topic=topic, todo="Create it before the write starts."
                )
            for columns, part, keys in self._columns(target, rows):
                partitions = self._partitions(target, part, keys)
                for partition, batch in batches_by_partition(
                    columns, partitions, target.limits, target.compression, target.text_statistics
                ):
                    self._writer.add(target.name, target.id, partition, batch)

    def _columns(self, target: TargetTopic, table: Any) -> Iterator[tuple[Any, Any, Any]]:
        """Yield rows as columns to encode, as they came, and their keys."""
        if not target.is_typed:
            columns = _record_columns(table)
            yield columns, table, columns.column("key")
            return
        if target.schema is None:
            raise InvalidConfigError(
                f"The values of topic {target.name} are columns",
                todo="Write its rows by themselves, with the option topic.",
            )
        now_ms = time.time_ns() // 1_000_000
        for typed, part in topic_rows(table, target.schema, target.name, now_ms):
            yield typed, part, typed.keys

    def _by_topic(self, table: Any) -> Iterator[tuple[str, Any]]:
        if self._task.topic is not None:
            yield self._task.topic, table
            return
        column = table.column("topic")
        if column.null_count:
            raise InvalidRecordError(
                "Null topic present in the data. Use the topic option for setting a topic"
            )
        topics = pc.unique(column).to_pylist()
        for topic in topics:
            scalar = data(topic.encode(), column.type)
            yield topic, table if len(topics) == 1 else table.filter(pc.equal(column, scalar))

    def _partitions(self, target: TargetTopic, table: Any, keys: Any) -> Any:
        """Return the partition of each row as a numpy array; None if the topic has only one."""
        column: Any = table.column("partition") if "partition" in table.column_names else None
        has_partitions = column is not None and column.null_count < len(column)
        if target.is_new and not self.placed_by_key:
            self.placed_by_key = _any_placed_by_key(keys, column)
        if target.partitions == 1 and not has_partitions:
            return None
        partitions = partitions_for_keys(keys, target.partitions)
        partitions[partitions < 0] = self._keyless_partition % target.partitions
        self._keyless_partition += 1
        if has_partitions:
            explicit = column.combine_chunks().cast(pa.int32())
            is_explicit = explicit.is_valid().to_numpy(zero_copy_only=False)
            partitions[is_explicit] = explicit.drop_null().to_numpy()
            _check_partitions(target, partitions)
        return partitions


def _any_placed_by_key(keys: Any, partitions: Any) -> bool:
    """Return whether a row has a key and no partition."""
    keyed = pc.is_valid(keys)
    return bool(
        pc.any(keyed if partitions is None else pc.and_(keyed, pc.is_null(partitions))).as_py()
    )


def _check_partitions(target: TargetTopic, partitions: Any) -> None:
    count = MAX_PARTITIONS if target.is_new else target.partitions
    invalid = partitions[(partitions < 0) | (partitions >= count)]
    if len(invalid):
        problem = f"A topic has at most {count} partitions, from 0"
        if not target.is_new:
            problem = f"The topic has partitions 0 to {count - 1}"
        raise UnknownTopicOrPartitionError(
            problem,
            topic=target.name,
            partition=int(invalid[0]),
            todo="Correct the column 'partition' or leave it out, or add partitions.",
        )


def _record_columns(table: Any) -> Any:
    """Return rows with the columns of a batch; headers only if a row has some."""
    names = [name for name in _COLUMNS if name in table.column_names]
    if "headers" in names and not pc.sum(pc.list_value_length(table.column("headers"))).as_py():
        names.remove("headers")
    if "headers" in names:
        check_headers(table.column("headers"))
    now_ms = time.time_ns() // 1_000_000
    columns, _ = table_rows(table.select(names), None, None, None, now_ms)
    # In one chunk: sorting the rows of several is slow, and a batch is one.
    return columns.combine_chunks().to_batches()[0]


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
        elif is_struct_of_columns(field):
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
        return arrow_type(field["type"])
    except (KeyError, ValueError) as error:
        raise SerializationError(
            f"Column {field['name']} is {type_name(field['type'])}, which a topic cannot store",
            topic=topic,
            column=field["name"],
            todo="Cast it or leave it out.",
        ) from error


def topic_rows(
    table: Any, schema: TopicSchema, topic: str, now_ms: int
) -> Iterator[tuple[ColumnRows, Any]]:
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
        is_deleted = deleted.combine_chunks().fill_null(False)
        present, gone = (values.filter(mask) for mask in (pc.invert(is_deleted), is_deleted))
        yield with_tombstones(present, gone, is_deleted, schema, topic, now_ms), table
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
