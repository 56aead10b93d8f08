"""What a task of a write does: rows to batches, and those to a file that nobody reads yet.

It opens no database and takes no lock, for it may be killed at any instant, run
twice, or run on another machine that only shares the directory.  Whatever it
asks of a topic was read on the driver, and comes along.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from embedlog.batch import BatchLimits
from embedlog.batch.arrays import data, numbers
from embedlog.errors import (
    EmbedlogError,
    InvalidRecordError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.files import Files
from embedlog.partitioner import partitions_for_keys
from embedlog.producer.row_batches import encode_columns, slice_bounds, table_rows
from embedlog.publish.staging import StagedFile, StagedFileWriter
from embedlog.spark import python_worker

GATHERED_ROWS = 64 * 1024
GATHERED_BYTES = 16 << 20
"""Work on so much at once: Spark hands out 10,000 rows, of which a partition gets a few."""
BATCH_BYTES = 1 << 20
_HEAD_BYTES = 8 << 10
"""What a batch takes besides its records, at most."""
_TAKEN = ("key", "value", "headers", "timestamp")


@dataclass(frozen=True, slots=True)
class TargetTopic:
    """A topic, as a task needs to know it."""

    name: str
    id: int
    partitions: int
    limits: BatchLimits
    """How large a batch may be."""
    compression: str


@dataclass(frozen=True, slots=True)
class WriteTask:
    """Which rows go where, for all tasks of a write; made on the driver, and pickled."""

    path: str
    directory: str
    """Where its files are staged, from the root."""
    topic: str | None
    """Where all rows go; None if their column says it."""
    targets: dict[str, TargetTopic]

    def stage(self, batches: Iterable[Any], number: int, attempt: int) -> StagedFile:
        """Stage record batches and say what was staged.

        Args:
            batches: Of `pyarrow`, with the columns of the DataFrame.
            number: Of the task among those of the write.
            attempt: Of the task among its own, for who looks at the files.

        Raises:
            EmbedlogError: A row cannot be written; what was staged is removed.
        """
        python_worker.freeze()
        files = _files(self.path)
        # Task numbers begin anew in each application, attempts in each stage.
        name = f"{number:05d}-{attempt}-{uuid.uuid4().hex[:12]}"
        stage = StagedFileWriter(files, self.directory, name)
        try:
            splitter = TaskPartitioner(self, stage, number)
            for gathered in gather(batches):
                splitter.add(gathered)
            return stage.finish()
        except BaseException:
            stage.abandon()
            raise
        finally:
            files.close_all()


def _files(path: str) -> Files:
    try:
        return Files(path)
    except (EmbedlogError, OSError) as error:
        raise StorageError(
            f"this executor (process {os.getpid()} on {os.uname().nodename}) cannot write to the "
            f"log's directory: {error}",
            path=path,
            todo="executors write to the directory of the log itself: run them on the same host, "
            "or share the directory under the same path",
        ) from error


def gather(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield tables of many rows from batches of few."""
    waiting: list[Any] = []
    rows = size = 0
    for one in batches:
        if not one.num_rows:
            continue
        waiting.append(one)
        rows, size = rows + one.num_rows, size + one.nbytes
        if rows >= GATHERED_ROWS or size >= GATHERED_BYTES:
            yield pa.Table.from_batches(waiting)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield pa.Table.from_batches(waiting)


class TaskPartitioner:
    """Brings the rows of each partition together, in the order they came in."""

    def __init__(self, task: WriteTask, stage: StagedFileWriter, number: int) -> None:
        self._task, self._stage = task, stage
        # Rows without a key stay together, but not those of all tasks in one partition;
        # the same task chooses the same partitions when it is done again.
        self._turn = number

    def add(self, table: Any) -> None:
        """Write rows."""
        for topic, rows in self._by_topic(table):
            target = self._task.targets.get(topic)
            if target is None:
                raise UnknownTopicOrPartitionError(
                    "there is no such topic",
                    topic=topic,
                    todo="create it before the write begins",
                )
            self._split(target, rows)

    def _by_topic(self, table: Any) -> Iterator[tuple[str, Any]]:
        if self._task.topic is not None:
            yield self._task.topic, table
            return
        column = table.column("topic")
        if column.null_count:
            raise InvalidRecordError(
                "null topic present in the data. Use the topic option for setting a topic"
            )
        topics = pc.unique(column).to_pylist()
        if len(topics) == 1:
            yield topics[0], table
            return
        for topic in topics:
            yield topic, table.filter(pc.equal(column, data(topic.encode(), column.type)))

    def _split(self, target: TargetTopic, table: Any) -> None:
        columns = _columns(table)
        where = self._partitions(target, table, columns.column("key"))
        if where is None:
            return self._put(target, 0, columns)
        order = where.argsort(kind="stable")
        bounds = where[order].searchsorted(range(target.partitions + 1)).tolist()
        columns = columns.take(numbers(order, pa.int64()))
        for partition, (start, stop) in enumerate(pairwise(bounds)):
            if start < stop:
                self._put(target, partition, columns.slice(start, stop - start))
        return None

    def _partitions(self, target: TargetTopic, table: Any, keys: Any) -> Any:
        """Return each row's partition, as numpy has it; None if there is only one."""
        given: Any = table.column("partition") if "partition" in table.column_names else None
        chosen = given is not None and given.null_count < len(given)
        if target.partitions == 1 and not chosen:
            return None
        where = partitions_for_keys(keys, target.partitions)
        where[where < 0] = self._turn % target.partitions
        self._turn += 1
        if chosen:
            picked = given.combine_chunks().cast(pa.int32())
            here = picked.is_valid().to_numpy(zero_copy_only=False)
            where[here] = picked.drop_null().to_numpy()
            wrong = where[(where < 0) | (where >= target.partitions)]
            if len(wrong):
                raise UnknownTopicOrPartitionError(
                    f"the topic has partitions 0 to {target.partitions - 1}",
                    topic=target.name,
                    partition=int(wrong[0]),
                    todo="correct the column 'partition' or leave it out, or add partitions",
                )
        return where

    def _put(self, target: TargetTopic, partition: int, columns: Any) -> None:
        limit = max(min(BATCH_BYTES, *target.limits) - _HEAD_BYTES, 1)
        for start, stop in slice_bounds(columns, limit):
            piece = columns.slice(start, stop - start)
            for one in encode_columns(piece, target.compression, target.limits):
                self._stage.add(target.name, target.id, partition, one)


def _columns(table: Any) -> Any:
    """Return rows in the columns of a batch; headers only where a row has some."""
    taken = [name for name in _TAKEN if name in table.column_names]
    if "headers" in taken and not _has_headers(table.column("headers")):
        taken.remove("headers")
    now = time.time_ns() // 1_000_000
    made = table_rows(table.select(taken), None, None, None, now).table
    # As one piece: to sort rows of several is slow, and a batch is one.
    return made.combine_chunks().to_batches()[0]


def _has_headers(column: Any) -> bool:
    return bool(pc.sum(pc.list_value_length(column)).as_py())
