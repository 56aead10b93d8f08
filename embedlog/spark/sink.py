"""The sink of ``format("embedlog")``: tasks stage, and the driver publishes, all or nothing.

Spark makes a writer in a process of the driver, pickles it for the tasks, and
commits a batch with the same one, but a micro-batch with another one that it
makes for that; so what a stream's commit has to know comes with the messages.
A batch that a query repeats, because its driver died before it had noted that
it was done, is known by the query's id and the number of the batch.
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
    raise ImportError("the sink needs pyspark 4.1 or newer") from error

QUERY, BATCH, RUN = "sql.streaming.queryId", "streaming.sql.batchId", "spark.jobGroup.id"
"""Local properties of a task that say which query it works for."""


@dataclass
class StagedMessage(WriterCommitMessage):
    """What a task tells the driver: what it staged, and which micro-batch it worked for."""

    staged: StagedFile
    number: int
    query: str | None = None
    batch: int | None = None
    run: str | None = None


def batch_writer(options: Mapping[str, str], schema: Any, overwrite: bool) -> BatchSink:
    """Return what `DataSource.writer` returns: writes a DataFrame, all of it at once.

    Args:
        options: As Spark gave them, names in any case.
        schema: Of the DataFrame.
        overwrite: Whether the mode is ``overwrite``, which a log refuses.

    Raises:
        InvalidConfigError: An option or a column that the sink does not take.
    """
    parsed = sink_options.parse(options)
    sink_options.check_batch(parsed, overwrite)
    sink_options.check_columns(schema, parsed.topic)
    return BatchSink(parsed)


def stream_writer(options: Mapping[str, str], schema: Any, overwrite: bool) -> StreamSink:
    """Return what `DataSource.streamWriter` returns: writes each micro-batch once.

    Args:
        options: As Spark gave them, names in any case.
        schema: Of the stream.
        overwrite: Whether the output mode is ``complete``; what that has is appended too.

    Raises:
        InvalidConfigError: An option or a column that the sink does not take.
    """
    parsed = sink_options.parse(options)
    sink_options.check_columns(schema, parsed.topic)
    return StreamSink(parsed)


class StagingWriter:
    """What both writers do in a task."""

    def __init__(self, options: SinkOptions, keep: bool) -> None:
        from embedlog.spark import batch_write

        self.options = options
        self.task = batch_write.plan(options, keep=keep)

    def write(self, iterator: Iterator[Any]) -> StagedMessage:
        """Stage the rows of a task."""
        context = TaskContext.get()
        number, attempt = (0, 0) if context is None else _numbers(context)
        staged = self.task.stage(iterator, number, attempt)
        if context is None:
            return StagedMessage(staged, number)
        batch = context.getLocalProperty(BATCH)
        return StagedMessage(
            staged,
            number,
            context.getLocalProperty(QUERY),
            None if batch is None else int(batch),
            context.getLocalProperty(RUN),
        )


def _numbers(context: Any) -> tuple[int, int]:
    return context.partitionId(), context.attemptNumber()


class BatchSink(StagingWriter, DataSourceArrowWriter):
    """Writes one DataFrame."""

    def __init__(self, options: SinkOptions) -> None:
        super().__init__(options, keep=False)

    def commit(self, messages: list[Any]) -> None:
        """Publish what all tasks staged."""
        from embedlog.spark import batch_write

        options, publication = self.options, None
        if options.application is not None and options.version is not None:
            # An empty frame counts as written to its topic.
            topics = () if options.topic is None else (self.task.targets[options.topic].id,)
            publication = Publication(options.application, options.version, topics=topics)
        batch_write.publish(options, _staged(messages), publication)

    def abort(self, messages: list[Any]) -> None:
        """Remove what tasks staged."""
        from embedlog.spark import batch_write

        batch_write.discard(self.options, _staged(messages))


class StreamSink(StagingWriter, DataSourceStreamArrowWriter):
    """Writes the micro-batches of a query, each of them once."""

    def __init__(self, options: SinkOptions) -> None:
        super().__init__(options, keep=True)

    def commit(self, messages: list[Any], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Publish what all tasks staged, unless this batch of the query was published before."""
        from embedlog.spark import batch_write

        options, told = self.options, [one for one in messages if one is not None]
        publication = _publication(options, told, batchId)
        batch_write.publish(options, _staged(told), publication, keep=True)

    def abort(self, messages: list[Any], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Remove what tasks staged; Spark also calls it for a batch whose commit has failed late.

        What was published is a copy, and stays.
        """
        from embedlog.spark import batch_write

        batch_write.discard(self.options, _staged(messages))


def _publication(options: SinkOptions, told: Sequence[StagedMessage], batch: int) -> Publication:
    queries = {(one.query, one.run) for one in told}
    if len(queries) != 1 or (query := next(iter(queries))[0]) is None:
        raise EmbedlogError(
            f"batch {batch} has tasks of {len(queries)} queries",
            todo="report this: nothing was published",
        )
    run = next(iter(queries))[1] or ""
    return Publication(options.application or query, batch, query, run, options.checkpoint)


def _staged(messages: Sequence[Any]) -> list[StagedFile]:
    """Return what tasks staged in the order of the tasks: a repetition has the same one."""
    told = [one for one in messages if isinstance(one, StagedMessage)]
    return [one.staged for one in sorted(told, key=lambda one: one.number)]
