"""The classes that Spark calls for ``format("embedlog")``, from planning to tasks.

Spark makes these objects in other processes, pickles them and throws them
away; so they hold options, and open the log where it is needed.  They do not
implement `pushFilters`: Spark 4.3.0 applies the filters of one query to others.
Options limit the offsets and times instead.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)

from embedlog.errors import SparkSetupError
from embedlog.forks import cached_property
from embedlog.spark.options import SinkOptions, SourceOptions, warn_of_ignored

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from embedlog.spark.micro_batch import MicroBatchStream
    from embedlog.spark.query_schemas import QuerySchemas

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


class EmbedlogDataSource(DataSource):
    """A log as a source and a sink of Spark, with the options and columns of Kafka's.

    Typed topics have the topic's own columns.
    """

    _schemas: QuerySchemas | None = None
    """Those with which `schema` was called; Spark pickles this object afterwards."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "embedlog"

    def schema(self) -> StructType:
        """Check all options of a reader, and return the columns of the source.

        Spark asks for the schema in `load`, so that is where a wrong option is reported.
        """
        from pyspark.sql.types import StructType

        from embedlog.spark.query_schemas import current_schemas

        if "provider" in self.options:
            # This is CREATE TABLE.  Spark would create it, and then use it without its options.
            raise SparkSetupError(
                "CREATE TABLE needs the jar of embedlog in this session",
                todo="Start the session with embedlog.spark.session(), or with "
                ".config('spark.jars', embedlog.spark.jar_path()); without the jar, "
                "CREATE TEMPORARY VIEW … USING embedlog OPTIONS (…) works.",
            )
        options = SourceOptions.parse(self.options)
        warn_of_ignored(options.ignored)
        self._schemas = current_schemas(options)
        return StructType.fromJson(self._schemas.columns())

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch query."""
        return BatchReader(SourceOptions.parse(self.options), schema, self._schemas)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return the reader of a streaming query."""
        return StreamReader(self.options, schema, self._schemas)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a DataFrame; ``overwrite`` is the mode of that name."""
        from embedlog.spark import sink

        options = SinkOptions.parse(self.options)
        options.check_batch(overwrite)
        return sink.BatchSink(options, schema.jsonValue()["fields"])

    def streamWriter(  # noqa: N802 - Spark's name
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        """Return the writer of a stream; in complete mode (``overwrite``) rows are appended too."""
        from embedlog.spark import sink

        options = SinkOptions.parse(self.options)
        return sink.StreamSink(options, schema.jsonValue()["fields"])


class LogReader:
    """What the readers of batches and of streams share: the work of a task."""

    options: SourceOptions
    fields: list[dict[str, Any]]
    """The columns to read: fields of Spark's schema, as JSON."""

    def read(self, partition: Any) -> Iterator[Any]:
        """Yield the rows of an input partition as Arrow record batches."""
        from embedlog.spark.partition_reader import read_input_partition

        # If there are no input partitions, Spark makes one with the value None.
        if partition is None or partition.value is None:
            return iter(())
        names = tuple(field["name"] for field in self.fields)
        loss = self.options.fail_on_data_loss
        return read_input_partition(partition.value, names, loss, self.fields)


class BatchReader(LogReader, DataSourceReader):
    """Reads the log once, between two offsets."""

    def __init__(
        self, options: SourceOptions, schema: StructType, schemas: QuerySchemas | None = None
    ) -> None:
        from embedlog.spark.query_schemas import QuerySchemas

        self.options = options
        self.fields = schema.jsonValue()["fields"]
        self._schemas = QuerySchemas(options) if schemas is None else schemas
        self._schemas.select(self.fields)
        options.check_batch()

    def partitions(self) -> list[InputPartition]:
        """Return the input partitions as of now; Spark asks once for each `load`."""
        from embedlog.spark.input_partitions import plan_batch

        partitions = plan_batch(self.options, schemas=self._schemas)
        return [InputPartition(partition) for partition in partitions]


class StreamReader(LogReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the log as it grows, micro-batch by micro-batch.

    Options and columns are checked when they are first used: Spark's process calls `stop`
    even if the constructor raises, and then fails with another error about that.
    """

    def __init__(
        self,
        options: Mapping[str, str],
        schema: StructType,
        schemas: QuerySchemas | None = None,
    ) -> None:
        self._unchecked_options, self._schemas = options, schemas
        self.fields = schema.jsonValue()["fields"]

    @cached_property
    def options(self) -> SourceOptions:  # type: ignore[override]
        """The options, checked."""
        options = SourceOptions.parse(self._unchecked_options)
        options.check_stream()
        return options

    @cached_property
    def _stream(self) -> MicroBatchStream:
        from embedlog.spark.micro_batch import MicroBatchStream

        options = self.options
        # Spark ends this process with SIGTERM and no earlier call; without this, the lease
        # would last for its full time.  The exception unwinds to `stop`, between two steps.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        stream = MicroBatchStream(options, schemas=self._schemas)
        # The first task would be late to report a wrong column.
        stream.select(self.fields)
        return stream

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options, "fields": self.fields}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return where a new query starts."""
        return self._stream.initial_offset()

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, Any]:  # noqa: N802
        """Return where the next micro-batch ends; Spark before 4.2 passes no arguments."""
        limited = not isinstance(limit, ReadAllAvailable)
        return self._stream.latest_offset(start, limited)

    def getDefaultReadLimit(self) -> Any:  # noqa: N802 - Spark's name
        """Return a limit other than "all" if the options have one; Spark passes it back."""
        limits = {"rows": ReadMaxRows, "bytes": ReadMaxBytes, "min_rows": ReadMinRows}
        limit = self.options.limit
        return ReadAllAvailable() if limit is None else limits[limit[0]](limit[1])

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the end of the log; see `offsets_behind_latest`."""
        return self._stream.report_latest_offset()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Read no further than the log goes now."""
        self._stream.prepare_for_available_now()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the input partitions of a micro-batch."""
        return [InputPartition(value) for value in self._stream.plan_input_partitions(start, end)]

    def commit(self, end: dict[str, Any]) -> None:
        """Note that the records before an offset were processed."""
        self._stream.commit(end)

    def stop(self) -> None:
        """Release the lease and close the log; Spark's process calls it when its socket closes."""
        if "_stream" not in self.__dict__:
            return
        # The socket is closed and the signal sent at about the same time: it must not interrupt.
        previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            self._stream.close()
        finally:
            signal.signal(signal.SIGTERM, previous)
