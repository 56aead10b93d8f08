"""Plans the queries and writes of one Spark session; `planner` calls it for Spark's driver.

Every argument and result is JSON.  A call that failed halfway may be repeated: those of readers
change no log, except for leases and for offsets that are committed to a group, and a publication
is recognised by its version.  Three must not be repeated: `QueryPlanner.publish_batch` without a
version, and `QueryPlanner.create_table` and `QueryPlanner.alter_columns`, which would find the
topic or the column that they have created.
"""

from __future__ import annotations

import itertools
import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from embedlog.errors import EmbedlogError, IllegalStateError, InvalidConfigError
from embedlog.forks import new_lock
from embedlog.partition.leases import release_all
from embedlog.record import TopicPartition
from embedlog.spark import options as spark_options
from embedlog.spark.input_partitions import plan_batch
from embedlog.spark.micro_batch import MicroBatchStream, StreamState
from embedlog.spark.options import OptionReader, SinkOptions, SourceOptions
from embedlog.spark.plan import plan_to_json
from embedlog.spark.query_schemas import check_topics, current_schemas
from embedlog.spark.source import batch_lease_prefix
from embedlog.spark.stream_offset import StreamOffset
from embedlog.spark.topic_tables import TopicTables

if TYPE_CHECKING:
    from embedlog.spark.data_writer import StagedRows

Json = dict[str, Any]

_MAX_OPTIONS = 64
"""Options of so many writers are kept, so that a stream checks its own, and warns, once."""

_logger = logging.getLogger("embedlog.spark")


class QueryPlanner(TopicTables):
    """The open streams and logs of a Spark session, and the methods that Spark's driver calls.

    Any thread may call it, but the calls for one stream must not overlap.  A log that was written
    to stays open for the next write.  Everything that needs pyarrow is imported by the first query
    or write that needs it.
    """

    METHODS = (
        *("check_reader", "plan_batch", "open_stream", "initial_offset", "latest_offset"),
        *("report_latest_offset", "prepare_for_available_now", "plan_micro_batch", "commit"),
        *("close_stream", "check_table", "table_reader_options", "table_writer_options"),
        *("tables", "table", "create_table", "alter_table", "alter_columns", "drop_table"),
        *("is_typed_topic", "plan_write", "publish_batch", "publish_micro_batch", "discard"),
    )

    def __init__(self) -> None:
        super().__init__()
        self._lock = new_lock()
        self._sink_options: dict[tuple[tuple[str, str], ...], SinkOptions] = {}
        self._session = str(uuid.uuid4())
        self._streams: dict[int, MicroBatchStream] = {}
        self._stream_numbers = itertools.count(1)

    def close(self) -> None:
        """Release the leases of all queries, and close the logs."""
        for stream in list(self._streams):
            try:
                self.close_stream(stream)
            except EmbedlogError as error:
                _logger.warning("A lease is left to its time limit: %s", error)
        for log in self.logs.open_logs():
            try:
                release_all(log.root.context, batch_lease_prefix(self._session))
            except EmbedlogError as error:
                _logger.warning("A lease is left to its time limit: %s", error)
        self.logs.close()

    def is_open(self, stream: object) -> bool:
        """Whether this is the number of an open stream."""
        return isinstance(stream, int) and stream in self._streams

    def check_reader(self, options: Json, schema: str | None = None) -> Json:
        """Check all options of a reader; of the log, only whether its topics are typed.

        Args:
            options: The options of the reader.
            schema: The columns that the user asks for, as the JSON of a ``StructType``; None is
                all.

        Returns:
            The columns to read as "schema"; the names of the topics for descriptions; whether the
            loss of records fails the query; and as "typed" what `QuerySchemas.to_json` returns.
        """
        parsed = SourceOptions.parse(options)
        spark_options.warn_of_ignored(parsed.ignored)
        names, pattern, assigned = parsed.subscription
        return {
            **self._check_columns(parsed, schema),
            "topics": ",".join(names or assigned or ()) if pattern is None else pattern,
            "fail_on_data_loss": parsed.fail_on_data_loss,
        }

    def _check_columns(self, options: SourceOptions, schema: str | None) -> Json:
        fields = None if schema is None else json.loads(schema)["fields"]
        schemas = current_schemas(options, self.logs, fields)
        columns = json.dumps(schemas.columns()) if schema is None else schema
        return {"schema": columns, "typed": schemas.to_json()}

    def plan_batch(
        self,
        options: Json,
        filters: Sequence[Sequence[Any]] = (),
        limit: int | None = None,
        cores: int | None = None,
        column_filters: Sequence[Sequence[Any]] = (),
    ) -> Json:
        """Return the plan of a batch query.

        Args:
            options: The options of the reader.
            filters: ``(column, op, value)``, as in `filters`.
            limit: The query needs this many of the records, no matter which.
            cores: How many tasks run at once.
            column_filters: Those on the columns of typed topics, as in `filters`.
        """
        parsed = SourceOptions.parse(options)
        parsed.check_batch()
        partitions = plan_batch(
            *(parsed, filters, limit, cores, self.logs, self._session),
            column_filters=column_filters,
        )
        return plan_to_json(parsed.path, partitions)

    def open_stream(self, options: Json, state: Json | None = None) -> Json:
        """Begin a streaming query, or continue with one of a planner that was killed.

        Args:
            options: The options of the reader.
            state: None for a new query.  Else "lease" as it was returned here, "initial", which
                is the initial offset, and "available_now", which are the targets; each may be
                missing or null.

        Returns:
            The number of the "stream", its "limit" for each micro-batch and its "lease".
        """
        parsed = SourceOptions.parse(options)
        parsed.check_stream()
        stream = MicroBatchStream(parsed, state=_stream_state(state or {}), cache=self.logs)
        number = next(self._stream_numbers)
        self._streams[number] = stream
        limit = parsed.limit
        if limit is not None and limit[0] == "min_rows":
            limit = (*limit, parsed.max_trigger_delay_ms)  # type: ignore[assignment]
        return {"stream": number, "limit": limit, "lease": stream.state.lease_name}

    def initial_offset(self, stream: int) -> Json:
        """Return where a new query starts."""
        return self._stream(stream).initial_offset()

    def latest_offset(self, stream: int, start: Json, limited: bool) -> Json:
        """Return where the next micro-batch ends."""
        return self._stream(stream).latest_offset(_offset(start), limited)

    def report_latest_offset(self, stream: int) -> Json:
        """Return the end of the log."""
        return self._stream(stream).report_latest_offset()

    def prepare_for_available_now(self, stream: int) -> Json:
        """Have the query read no further than the log goes now, and return these targets."""
        query = self._stream(stream)
        query.prepare_for_available_now()
        return StreamOffset(query.state.available_now or {}).to_json()

    def plan_micro_batch(
        self, stream: int, start: Json, end: Json, cores: int | None = None
    ) -> Json:
        """Return the plan of the micro-batch between two offsets, for so many cores."""
        query = self._stream(stream)
        partitions = query.plan_input_partitions(_offset(start), _offset(end), cores)
        return plan_to_json(query.options.path, partitions)

    def commit(self, stream: int, end: Json) -> None:
        """Note that the records before an offset were processed."""
        self._stream(stream).commit(_offset(end))

    def close_stream(self, stream: int) -> None:
        """Release the lease of a stream; does nothing if it is not open."""
        if self.is_open(stream):
            self._streams.pop(stream).close()

    def check_table(self, options: Json, schema: str | None = None) -> Json:
        """Check all options of a table, and return its columns as `check_reader` does.

        Args:
            options: The options of the table, for reading and for writing.
            schema: The columns that its user declared, as the JSON of a ``StructType``; None is
                all.
        """
        parsed = spark_options.check_table(options)
        fields = [] if schema is None else json.loads(schema)["fields"]
        check_topics(self.logs, parsed, [field["name"] for field in fields])
        return self._check_columns(parsed, schema)

    def table_reader_options(self, options: Json, of_query: Json) -> Json:
        """Return the options with which a query reads a table."""
        return spark_options.reader_options(options, of_query)

    def table_writer_options(self, options: Json, of_query: Json) -> Json:
        """Return the options with which a query writes to a table."""
        return spark_options.writer_options(options, of_query)

    def is_typed_topic(self, options: Json, schema: str | None = None) -> bool:
        """Whether the topic of a writer exists and is typed: then Python writes to it.

        Says nothing about wrong options, unless it gets the columns of the rows: Spark wraps what
        the source in Python raises.

        Args:
            options: The options of the writer.
            schema: The columns of the rows to check, as ``StructType.json()``.

        Raises:
            InvalidConfigError, SerializationError: The typed topic cannot take these columns, or
                an option is wrong.
        """
        reader = OptionReader(options)
        try:
            path, topic = reader.root(), reader.raw("topic")
            with self.logs.using(path) as log:
                info = None if topic is None else log.root.topics().get(topic)
                columns = None if info is None else log.root.context.catalog.schema(info)
        except EmbedlogError:
            return False
        if columns is not None and schema is not None:
            # Not for topics of bytes: it needs pyarrow.
            from embedlog.spark.data_writer import check_frame

            SinkOptions.parse(options)
            check_frame(json.loads(schema)["fields"], columns, str(topic))
        return columns is not None

    def plan_write(self, options: Json, schema: str, batch: bool, overwrite: bool) -> Json:
        """Check a write, create its topic if that is possible now, and plan its tasks.

        Args:
            options: The options of the writer.
            schema: The columns of the rows, as ``StructType.json()``.
            batch: Whether it is a write of one DataFrame, not a micro-batch.
            overwrite: Whether the mode of a batch is ``overwrite``.

        Returns:
            The "root" of the log, the "directory" of the staged files in it, the "topic" of all
            rows or None, the "targets", which are the topics with their ids, numbers of
            partitions, limits and compressions, and whether a publication is "repeatable".
        """
        from embedlog.spark import batch_write

        parsed = self._parse(options)
        if batch:
            parsed.check_batch(overwrite)
        task = batch_write.plan_write(parsed, json.loads(schema)["fields"], keep=True)
        return {
            "root": task.path,
            "directory": task.directory,
            "topic": task.topic,
            "targets": [
                [target.name, target.id, target.partitions, *target.limits, target.compression]
                for target in task.targets.values()
            ],
            "repeatable": parsed.txn_app_id is not None,
        }

    def publish_batch(self, options: Json, staged: Sequence[Json], topics: Sequence[int]) -> Json:
        """Publish what the tasks of a batch write staged: all of it, or nothing.

        Must not be called again if the result is unknown, unless the options have a ``txnAppId``.

        Args:
            options: The options of the writer.
            staged: What each task staged, in the order of the tasks.
            topics: The ids of topics that count as written to even without rows.

        Returns:
            How many "records" were published: none if this version was published before.
        """
        from embedlog.spark import batch_write

        parsed = self._parse(options)
        publication = batch_write.batch_publication(parsed, topics)
        result = batch_write.publish(parsed, _staged_rows(staged), publication, keep=True)
        return {"records": result.records}

    def publish_micro_batch(
        self,
        options: Json,
        staged: Sequence[Json],
        batch_id: int,
        query_id: str,
        run_id: str | None = None,
    ) -> Json:
        """Publish what the tasks of a micro-batch staged, unless it was published before.

        Args:
            options: The options of the writer.
            staged: What each task staged, in the order of the tasks.
            batch_id: The number of the micro-batch.
            query_id: The id of the query, which the checkpoint keeps.
            run_id: The id of this run of the query, for messages.

        Returns:
            How many "records" were published.
        """
        from embedlog.spark import batch_write

        parsed = self._parse(options)
        publication = batch_write.micro_batch_publication(parsed, query_id, run_id, batch_id)
        result = batch_write.publish(parsed, _staged_rows(staged), publication, keep=True)
        return {"records": result.records}

    def discard(self, options: Json, staged: Sequence[Json]) -> None:
        """Remove what the tasks of a write staged; what was published is a copy, and stays."""
        from embedlog.spark import batch_write

        batch_write.discard(self._parse(options), _staged_rows(staged))

    def _parse(self, options: Mapping[str, str]) -> SinkOptions:
        key = tuple(sorted(options.items()))
        with self._lock:
            parsed = self._sink_options.get(key)
        if parsed is None:
            parsed = SinkOptions.parse(options)
            with self._lock:
                if len(self._sink_options) >= _MAX_OPTIONS:
                    self._sink_options.clear()
                self._sink_options[key] = parsed
        return parsed

    def _stream(self, number: int) -> MicroBatchStream:
        if not self.is_open(number):
            raise IllegalStateError(
                f"The planner has no open stream {number!r}", todo="Start the query again."
            )
        return self._streams[number]


def _stream_state(state: Json) -> StreamState:
    targets: dict[TopicPartition, int] | None = None
    if state.get("available_now") is not None:
        targets = dict(StreamOffset.from_json(_offset(state["available_now"])).offsets)
    initial = state.get("initial")
    lease_name = state.get("lease") or str(uuid.uuid4())
    return StreamState(lease_name, None if initial is None else _offset(initial), targets)


def _offset(value: Mapping[str, Any]) -> Json:
    """Return an offset that may come from a checkpoint.

    Raises:
        InvalidConfigError: It is no offset of a log.
    """
    try:
        StreamOffset.from_json(value)
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidConfigError(
            f"The checkpoint holds an offset that is not a position in a log: {value!r}",
            todo="Use the checkpoint of a query that read a log, or an empty directory.",
        ) from error
    return dict(value)


def _staged_rows(staged: Sequence[Json]) -> list[StagedRows]:
    """Return the rows that tasks staged, as `StagedRows.java` writes them."""
    from embedlog.publish.staging import StagedBatch, StagedFile
    from embedlog.spark.data_writer import StagedRows

    return [
        StagedRows(
            StagedFile(
                task["path"],
                tuple((topic, topic_id, number) for topic, topic_id, number in task["partitions"]),
                tuple(StagedBatch(*batch) for batch in task["batches"]),
                task["records"],
            ),
            task["placed_by_key"],
        )
        for task in staged
    ]
