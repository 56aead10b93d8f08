"""The sink of ``format("embedlog")``: tasks stage files, and the driver publishes all or none.

Spark makes a writer in a process of the driver and pickles it for the tasks.
A batch write is committed by the same writer, a micro-batch by another one that
Spark makes for it; so what a stream's commit has to know is in the commit
messages.  A micro-batch that a query repeats, because its driver died before
Spark noted that it was done, is recognised by the query's id and the batch id.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from embedlog.errors import EmbedlogError
from embedlog.publish.transaction import Publication
from embedlog.spark.data_writer import StagedRows
from embedlog.spark.options import SinkOptions

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
except ImportError as error:
    raise ImportError("The sink needs pyspark 4.1 or newer") from error

_QUERY_ID, _BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
_RUN_ID = "spark.jobGroup.id"
"""Local properties of a task that identify the query it works for."""


@dataclass
class StagedCommitMessage(WriterCommitMessage):
    """A task's message to the driver: what it staged, and the micro-batch it belongs to."""

    staged_rows: StagedRows
    partition_id: int
    query_id: str | None = None
    batch_id: int | None = None
    run_id: str | None = None


class StagingWriter:
    """The work of a task, and what the driver does alike for batches and for streams."""

    keep_log = False
    """Whether the log stays open in the driver's process."""

    def __init__(self, options: SinkOptions, fields: Sequence[dict[str, Any]]) -> None:
        from embedlog.spark import batch_write

        self.options = options
        self.task = batch_write.plan_write(options, fields, keep=self.keep_log)

    def write(self, iterator: Iterator[Any]) -> StagedCommitMessage:
        """Stage the rows of a task."""
        context = TaskContext.get()
        assert context is not None, "Spark calls this in a task"
        partition_id = context.partitionId()
        staged_rows = self.task.stage(iterator, partition_id, context.attemptNumber())
        batch_id = context.getLocalProperty(_BATCH_ID)
        return StagedCommitMessage(
            staged_rows,
            partition_id,
            context.getLocalProperty(_QUERY_ID),
            None if batch_id is None else int(batch_id),
            context.getLocalProperty(_RUN_ID),
        )

    def publish(self, messages: Sequence[Any], publication: Publication | None) -> None:
        """Publish what all tasks staged."""
        from embedlog.spark import batch_write

        staged = _staged_rows(messages)
        batch_write.publish(self.options, staged, publication, keep=self.keep_log)

    def abort(self, messages: list[Any], batchId: int | None = None) -> None:  # noqa: N803
        """Remove what tasks staged.

        Spark also calls this if a commit failed after it had published; what was published
        is a copy of the staged files, and stays.
        """
        from embedlog.spark import batch_write

        batch_write.discard(self.options, _staged_rows(messages))


class BatchSink(StagingWriter, DataSourceArrowWriter):
    """Writes one DataFrame."""

    def commit(self, messages: list[Any]) -> None:
        """Publish what all tasks staged."""
        from embedlog.spark import batch_write

        # An empty DataFrame counts as written to its topic, if that exists.
        topic = self.options.topic
        target = None if topic is None else self.task.targets[topic]
        topics = () if target is None or target.is_new else (target.id,)
        self.publish(messages, batch_write.batch_publication(self.options, topics))


class StreamSink(StagingWriter, DataSourceStreamArrowWriter):
    """Writes each micro-batch of a query once."""

    keep_log = True

    def commit(self, messages: list[Any], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Publish what all tasks staged, unless this batch of the query was published before."""
        from embedlog.spark import batch_write

        messages = [message for message in messages if message is not None]
        queries = {(message.query_id, message.run_id) for message in messages}
        query_id, run_id = next(iter(queries)) if len(queries) == 1 else (None, None)
        if query_id is None:
            raise EmbedlogError(
                f"Micro-batch {batchId} has tasks of {len(queries)} queries; nothing was published",
                todo="Report this as a bug of embedlog.",
            )
        self.publish(
            messages, batch_write.micro_batch_publication(self.options, query_id, run_id, batchId)
        )


def _staged_rows(messages: Sequence[Any]) -> list[StagedRows]:
    """Return the staged rows in the order of the tasks, which a retry repeats."""
    staged = [message for message in messages if isinstance(message, StagedCommitMessage)]
    staged.sort(key=lambda message: message.partition_id)
    return [message.staged_rows for message in staged]
