"""The sink of ``format("embedlog")``: tasks stage files, and the driver publishes all or none.

Spark makes a writer in a process of the driver and pickles it for the tasks.
A batch write is committed by the same writer, a micro-batch by another one that
Spark makes for it; so what a stream's commit has to know is in the commit
messages.  A micro-batch that a query repeats, because its driver died before
Spark noted that it was done, is recognised by the query's id and the batch id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from embedlog.errors import EmbedlogError
from embedlog.publish.staging import StagedFile
from embedlog.publish.transaction import Publication
from embedlog.spark import sink_options
from embedlog.spark.sink_options import SinkOptions

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
except ImportError as error:
    raise ImportError("The sink needs pyspark 4.1 or newer") from error

_QUERY_ID, _BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
_RUN_ID = "spark.jobGroup.id"
"""Local properties of a task that identify the query it works for."""


@dataclass
class StagedCommitMessage(WriterCommitMessage):
    """A task's message to the driver: its staged file, and the micro-batch it belongs to."""

    staged_file: StagedFile
    partition_id: int
    query_id: str | None = None
    batch_id: int | None = None
    run_id: str | None = None


def batch_writer(options: Mapping[str, str], schema: Any, overwrite: bool) -> BatchSink:
    """Return the writer of a DataFrame; ``overwrite`` is the mode of that name.

    Raises:
        InvalidConfigError: An option is invalid, a column is missing or has another type, or
            the mode is ``overwrite``.
    """
    parsed = sink_options.parse(options)
    sink_options.check_batch(parsed, overwrite)
    sink_options.check_columns(schema, parsed.topic)
    return BatchSink(parsed)


def stream_writer(options: Mapping[str, str], schema: Any, overwrite: bool) -> StreamSink:
    """Return the writer of a stream; ``overwrite`` is complete mode, whose rows are appended too.

    Raises:
        InvalidConfigError: An option is invalid, or a column is missing or has another type.
    """
    parsed = sink_options.parse(options)
    sink_options.check_columns(schema, parsed.topic)
    return StreamSink(parsed)


class StagingWriter:
    """What the writers of batches and of streams share: the work of a task.

    Args:
        options: The options of the writer.
        keep: Whether the log stays open in this process.
    """

    def __init__(self, options: SinkOptions, keep: bool) -> None:
        from embedlog.spark import batch_write

        self.options = options
        self.task = batch_write.plan_write(options, keep=keep)

    def write(self, iterator: Iterator[Any]) -> StagedCommitMessage:
        """Stage the rows of a task."""
        context = TaskContext.get()
        if context is None:
            return StagedCommitMessage(self.task.stage(iterator, 0, 0), 0)
        partition_id = context.partitionId()
        staged_file = self.task.stage(iterator, partition_id, context.attemptNumber())
        batch_id = context.getLocalProperty(_BATCH_ID)
        return StagedCommitMessage(
            staged_file,
            partition_id,
            context.getLocalProperty(_QUERY_ID),
            None if batch_id is None else int(batch_id),
            context.getLocalProperty(_RUN_ID),
        )


class BatchSink(StagingWriter, DataSourceArrowWriter):
    """Writes one DataFrame."""

    def __init__(self, options: SinkOptions) -> None:
        super().__init__(options, keep=False)

    def commit(self, messages: list[Any]) -> None:
        """Publish what all tasks staged."""
        from embedlog.spark import batch_write

        options, publication = self.options, None
        if options.txn_app_id is not None and options.txn_version is not None:
            # An empty DataFrame counts as written to its topic.
            topics = () if options.topic is None else (self.task.targets[options.topic].id,)
            publication = Publication(options.txn_app_id, options.txn_version, topics=topics)
        batch_write.publish(options, _staged_files(messages), publication)

    def abort(self, messages: list[Any]) -> None:
        """Remove what tasks staged."""
        from embedlog.spark import batch_write

        batch_write.discard(self.options, _staged_files(messages))


class StreamSink(StagingWriter, DataSourceStreamArrowWriter):
    """Writes each micro-batch of a query once."""

    def __init__(self, options: SinkOptions) -> None:
        super().__init__(options, keep=True)

    def commit(self, messages: list[Any], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Publish what all tasks staged, unless this batch of the query was published before."""
        from embedlog.spark import batch_write

        messages = [message for message in messages if message is not None]
        publication = _publication(self.options, messages, batchId)
        batch_write.publish(self.options, _staged_files(messages), publication, keep=True)

    def abort(self, messages: list[Any], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Remove what tasks staged.

        Spark also calls this if a commit failed after it had published; what was published
        is a copy of the staged files, and stays.
        """
        from embedlog.spark import batch_write

        batch_write.discard(self.options, _staged_files(messages))


def _publication(
    options: SinkOptions, messages: Sequence[StagedCommitMessage], batch_id: int
) -> Publication:
    queries = {(message.query_id, message.run_id) for message in messages}
    if len(queries) != 1 or (query_id := next(iter(queries))[0]) is None:
        raise EmbedlogError(
            f"Micro-batch {batch_id} has tasks of {len(queries)} queries; nothing was published",
            todo="Report this as a bug of embedlog.",
        )
    run_id = next(iter(queries))[1] or ""
    application = options.txn_app_id or query_id
    return Publication(application, batch_id, query_id, run_id, options.checkpoint_location)


def _staged_files(messages: Sequence[Any]) -> list[StagedFile]:
    """Return the staged files in the order of the tasks, which a repetition has as well."""
    staged = [message for message in messages if isinstance(message, StagedCommitMessage)]
    return [
        message.staged_file for message in sorted(staged, key=lambda message: message.partition_id)
    ]
