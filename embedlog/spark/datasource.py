"""What Spark calls: `format("embedlog")`, from its planning to its tasks.

Spark makes these objects in processes of its own, pickles them and throws them
away; so they hold options, and open the log where it is needed.  Filters are
not taken from Spark (`pushFilters`): 4.3.0 lets those of one query leak into
others.  Options bound offsets and times instead.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)

from embedlog.spark.source_options import SourceOptions, check_batch, parse

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadMaxBytes,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:  # Spark 4.0 and 4.1 ask for the latest offset without a limit
    ReadAllAvailable = type(None)  # type: ignore[misc, assignment]
    SupportsTriggerAvailableNow = object  # type: ignore[misc, assignment]

_logger = logging.getLogger("embedlog")


class EmbedlogDataSource(DataSource):
    """A log as a source and a sink of Spark, with the options and columns of Kafka's."""

    @classmethod
    def name(cls) -> str:
        """What `format` is given."""
        return "embedlog"

    def schema(self) -> str:
        """Return the columns of the source, having checked all options.

        Spark asks for it in `load`, so that is where a wrong option is told.
        """
        from embedlog.spark.kafka_columns import ddl

        options = parse(self.options)
        if options.ignored:
            _logger.warning(
                "these options are about brokers, and have no effect: %s",
                ", ".join(options.ignored),
            )
        return ddl(options.include_headers)

    def reader(self, schema: Any) -> DataSourceReader:
        """Return what reads a batch."""
        return BatchReader(parse(self.options), schema)

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return what reads a stream."""
        return StreamReader(parse(self.options), schema)

    def writer(self, schema: Any, overwrite: bool) -> Any:
        """Return what writes a batch."""
        from embedlog.spark.sink import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        """Return what writes a stream."""
        from embedlog.spark.sink import stream_writer

        return stream_writer(self.options, schema, overwrite)


class RowIterator:
    """What both readers do in an executor."""

    def __init__(self, options: SourceOptions, schema: Any) -> None:
        from embedlog.spark.kafka_columns import chosen

        self.options = options
        fields = [(field.name, field.dataType.simpleString()) for field in schema.fields]
        self.names = chosen(fields, options.include_headers)

    def read(self, partition: Any) -> Iterator[Any]:
        """Yield the rows of a task as Arrow record batches."""
        from embedlog.spark.partition_reader import read

        # Spark makes a task of None where there are no tasks.
        if partition is None or partition.value is None:
            return iter(())
        return read(partition.value, self.names, self.options.fail_on_data_loss)


class BatchReader(RowIterator, DataSourceReader):
    """Reads the log once, from one place to another."""

    def __init__(self, options: SourceOptions, schema: Any) -> None:
        super().__init__(options, schema)
        for name in check_batch(options):
            _logger.warning("the option %r is for streams, and has no effect here", name)

    def partitions(self) -> list[InputPartition]:
        """Return the tasks, as of now: Spark asks once for each `load`."""
        from embedlog.spark.batch_scan import works

        return [InputPartition(work) for work in works(self.options)]


class StreamReader(RowIterator, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the log as it grows, micro-batch by micro-batch."""

    @cached_property
    def _stream(self) -> Any:
        from embedlog.spark.micro_batch import MicroBatchStream

        # Spark ends this process with a signal and says nothing before: what is held would
        # be held for another hour.  As an exception it ends in `stop`, between two steps.
        signal.signal(signal.SIGTERM, _leave)
        return MicroBatchStream(self.options)

    def __init__(self, options: SourceOptions, schema: Any) -> None:
        from embedlog.spark.source_options import check_stream

        super().__init__(options, schema)
        check_stream(options)

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options, "names": self.names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return where a new query begins."""
        found: dict[str, Any] = self._stream.initial()
        return found

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, Any]:  # noqa: N802
        """Return where the next micro-batch ends; before Spark 4.2 there are no limits."""
        found: dict[str, Any] = self._stream.latest(start, not isinstance(limit, ReadAllAvailable))
        return found

    def getDefaultReadLimit(self) -> Any:  # noqa: N802 - Spark's name
        """Return something else than "all" if there is a limit: Spark hands it back.

        It knows no limit of two kinds, so `latestOffset` looks at the options.
        """
        options = self.options
        if options.max_offsets is not None:
            return ReadMaxRows(options.max_offsets)
        if options.max_bytes is not None:
            return ReadMaxBytes(options.max_bytes)
        if options.min_offsets is not None:
            return ReadMinRows(options.min_offsets)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return how far the log goes; see `offsets_behind_latest`."""
        found: dict[str, Any] = self._stream.reported()
        return found

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Read no further than what is there now."""
        self._stream.freeze()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the tasks of a micro-batch."""
        return [InputPartition(work) for work in self._stream.plan(start, end)]

    def commit(self, end: dict[str, Any]) -> None:
        """Note that everything up to there was processed."""
        self._stream.commit(end)

    def stop(self) -> None:
        """Let the log go; Spark's source process calls it when its socket is closed."""
        if "_stream" not in self.__dict__:
            return
        # It is closed and signalled at about the same time: what is let go is let go whole.
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            self._stream.close()
        finally:
            signal.signal(signal.SIGTERM, before)


def _leave(*_: object) -> None:
    raise SystemExit(0)
