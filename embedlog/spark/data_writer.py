"""Writes the rows of one task: as finished batches in a staged file, which no reader sees yet.

A task may be killed at any time, run twice, or run on a host that only shares
the directory; so it opens no database and takes no lock.  The driver reads what
a task needs to know about the topics, and Spark pickles it with the task.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from embedlog import errors
from embedlog.batch import BatchLimits
from embedlog.batch.arrays import data, numbers
from embedlog.catalog import MAX_PARTITIONS
from embedlog.partitioner import partitions_for_keys
from embedlog.producer.row_batches import encode_columns, slice_bounds, table_rows
from embedlog.producer.typed_rows import DECODED_BYTES, TypedColumns
from embedlog.publish.staging import StagedFile, StagedFileWriter
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.spark import typed_sink
from embedlog.spark.partition_reader import freeze_gc, open_files

COMBINED_ROWS = 64 * 1024
COMBINED_BYTES = 16 << 20
"""Rows to partition at once: Spark passes 10,000, of which each partition gets few."""
BATCH_BYTES = 1 << 20
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
            for table in combine_batches(batches):
                partitioner.add(table)
            return StagedRows(writer.finish(), partitioner.placed_by_key)
        except BaseException:
            writer.abandon()
            raise
        finally:
            files.close_all()


def combine_batches(batches: Iterable[Any]) -> Iterator[Any]:
    """Combine small record batches to tables of many rows."""
    pending: list[Any] = []
    rows = size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        pending.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= COMBINED_ROWS or size >= COMBINED_BYTES:
            yield pa.Table.from_batches(pending)
            pending, rows, size = [], 0, 0
    if pending:
        yield pa.Table.from_batches(pending)


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
                raise errors.UnknownTopicOrPartitionError(
                    "There is no such topic", topic=topic, todo="Create it before the write starts."
                )
            if target.is_typed:
                self._add_typed(target, rows)
                continue
            limit = target.limits.record_bytes(BATCH_BYTES)
            for partition, columns in self._by_partition(target, rows):
                for start, stop in slice_bounds(columns, limit):
                    piece = columns.slice(start, stop - start)
                    for batch in encode_columns(piece, target.compression, target.limits):
                        self._writer.add(target.name, target.id, partition, batch)

    def _add_typed(self, target: TargetTopic, table: Any) -> None:
        if target.schema is None:
            raise errors.InvalidConfigError(
                f"The values of topic {target.name} are columns",
                todo="Write its rows by themselves, with the option topic.",
            )
        now_ms = time.time_ns() // 1_000_000
        for rows, part in typed_sink.topic_rows(table, target.schema, target.name, now_ms):
            partitions = self._partitions(target, part, rows.keys)
            for partition, of_partition in _typed_by_partition(rows, partitions):
                batches = of_partition.batches(
                    target.limits.record_bytes(DECODED_BYTES),
                    DECODED_BYTES,
                    target.compression,
                    target.limits,
                    target.text_statistics,
                )
                for batch in batches:
                    self._writer.add(target.name, target.id, partition, batch)

    def _by_topic(self, table: Any) -> Iterator[tuple[str, Any]]:
        if self._task.topic is not None:
            yield self._task.topic, table
            return
        column = table.column("topic")
        if column.null_count:
            raise errors.InvalidRecordError(
                "Null topic present in the data. Use the topic option for setting a topic"
            )
        topics = pc.unique(column).to_pylist()
        for topic in topics:
            scalar = data(topic.encode(), column.type)
            yield topic, table if len(topics) == 1 else table.filter(pc.equal(column, scalar))

    def _by_partition(self, target: TargetTopic, table: Any) -> Iterator[tuple[int, Any]]:
        columns = _record_columns(table)
        partitions = self._partitions(target, table, columns.column("key"))
        if partitions is None:
            yield 0, columns
            return
        order, ranges = _sorted_by_partition(partitions)
        columns = columns.take(order)
        for partition, start, stop in ranges:
            yield partition, columns.slice(start, stop - start)

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


def _sorted_by_partition(partitions: Any) -> tuple[Any, list[tuple[int, int, int]]]:
    """Return the order of rows by their partitions, and (partition, start, stop) in that order."""
    order = partitions.argsort(kind="stable")
    bounds = partitions[order].searchsorted(range(partitions.max() + 2)).tolist()
    ranges = [(number, *rows) for number, rows in enumerate(pairwise(bounds)) if rows[0] < rows[1]]
    return numbers(order, pa.int64()), ranges


def _typed_by_partition(rows: TypedColumns, partitions: Any) -> Iterator[tuple[int, TypedColumns]]:
    """Yield the rows of each partition; ``partitions`` is None if the topic has only one."""
    if partitions is None:
        yield 0, rows
        return
    order, ranges = _sorted_by_partition(partitions)
    rows = rows.take(order)
    for partition, start, stop in ranges:
        yield partition, rows.slice(start, stop)


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
        raise errors.UnknownTopicOrPartitionError(
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
        typed_sink.check_headers(table.column("headers"))
    now_ms = time.time_ns() // 1_000_000
    columns = table_rows(table.select(names), None, None, None, now_ms).table
    # In one chunk: sorting the rows of several is slow, and a batch is one.
    return columns.combine_chunks().to_batches()[0]
