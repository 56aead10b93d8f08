"""Plans the queries of one Spark session; `planner` calls it for Spark's driver in the JVM.

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
from typing import Any, TypeVar

from embedlog.errors import EmbedlogError, IllegalStateError, InvalidConfigError
from embedlog.partition.leases import release_all
from embedlog.record import TopicPartition
from embedlog.spark import (
    kafka_columns,
    query_schemas,
    sink_options,
    table_options,
    topic_tables,
)
from embedlog.spark.input_partitions import plan_batch
from embedlog.spark.log_cache import LogCache
from embedlog.spark.micro_batch import MicroBatchStream, StreamState
from embedlog.spark.option_reader import OptionReader
from embedlog.spark.plan import plan_to_json
from embedlog.spark.source import batch_lease_prefix
from embedlog.spark.source_options import SourceOptions, check_batch, check_stream, parse
from embedlog.spark.stream_offset import StreamOffset
from embedlog.spark.write_planner import WritePlanner

Json = dict[str, Any]
T = TypeVar("T")

_logger = logging.getLogger("embedlog.spark")


class QueryPlanner(WritePlanner):
    """The open streams and logs of a Spark session, and the methods that Spark's driver calls.

    Any thread may call it, but the calls for one stream must not overlap.
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
        self._logs = LogCache()
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
        for log in self._logs.open_logs():
            try:
                release_all(log.root.context, batch_lease_prefix(self._session))
            except EmbedlogError as error:
                _logger.warning("A lease is left to its time limit: %s", error)
        self._logs.close()

    def is_open(self, stream: object) -> bool:
        """Whether this is the number of an open stream."""
        return isinstance(stream, int) and stream in self._streams

    def check_reader(
        self,
        options: Json,
        fields: Sequence[Sequence[str]] | None = None,
        schema: str | None = None,
    ) -> Json:
        """Check all options of a reader; of the log, only whether its topics are typed.

        Args:
            options: The options of the reader.
            fields: The columns that the user asks for, as pairs of name and type; None is all.
            schema: The same as the JSON of a ``StructType``.

        Returns:
            The columns to read, as such pairs, or as "schema" if the topics are typed; the names
            of the topics for descriptions; whether the loss of records fails the query; and as
            "typed" what `typed_reader` returns, or None.
        """
        parsed = parse(options)
        if parsed.ignored:
            _logger.warning(
                "These options are about brokers and have no effect: %s", ", ".join(parsed.ignored)
            )
        names, pattern, assigned = parsed.subscription
        return {
            **self._check_columns(parsed, fields, schema),
            "topics": ",".join(names or assigned or ()) if pattern is None else pattern,
            "fail_on_data_loss": parsed.fail_on_data_loss,
        }

    def _check_columns(
        self, options: SourceOptions, fields: Sequence[Sequence[str]] | None, schema: str | None
    ) -> Json:
        typed = query_schemas.typed_reader(self._logs, options, schema)
        if typed is not None:
            return typed
        if fields is None:
            names = kafka_columns.columns(options.include_headers)
        else:
            pairs = [(name, spark_type) for name, spark_type in fields]
            names = kafka_columns.projected_columns(pairs, options.include_headers)
        types = [[name, kafka_columns.SPARK_TYPES[name]] for name in names]
        return {"columns": types, "typed": None}

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
            filters: ``(column, op, value)``, as in `pushed_filters`.
            limit: The query needs this many of the records, no matter which.
            cores: How many tasks run at once.
            column_filters: Those on the columns of typed topics, as in `column_filters`.
        """
        parsed = parse(options)
        for name in check_batch(parsed):
            _logger.warning("The option %r is for streams and has no effect here", name)
        partitions = plan_batch(
            *(parsed, filters, limit, cores, self._logs, self._session),
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
        parsed = parse(options)
        check_stream(parsed)
        stream = MicroBatchStream(parsed, state=_stream_state(state or {}), cache=self._logs)
        number = next(self._stream_numbers)
        self._streams[number] = stream
        return {"stream": number, "limit": _limit(parsed), "lease": stream.state.lease_name}

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

    def check_table(
        self,
        options: Json,
        fields: Sequence[Sequence[str]] | None = None,
        schema: str | None = None,
    ) -> Json:
        """Check all options of a table, and return its columns as `check_reader` does.

        Args:
            options: The options of the table, for reading and for writing.
            fields: The columns that its user declared, as pairs of name and type; None is all.
            schema: The same as the JSON of a ``StructType``.
        """
        parsed = table_options.check(options)
        query_schemas.check_topics(self._logs, parsed, [name for name, _ in fields or ()])
        return self._check_columns(parsed, fields, schema)

    def table_reader_options(self, options: Json, of_query: Json) -> Json:
        """Return the options with which a query reads a table."""
        return table_options.reader_options(options, of_query)

    def table_writer_options(self, options: Json, of_query: Json) -> Json:
        """Return the options with which a query writes to a table."""
        return table_options.writer_options(options, of_query)

    def tables(self, options: Json) -> list[str]:
        """Return the topics of a log, which are the tables of a catalog with these options."""
        return topic_tables.topics(self._logs, options)

    def table(self, options: Json, topic: str) -> Json | None:
        """Return the properties of a topic; None if there is no such topic."""
        return topic_tables.properties(self._logs, options, topic)

    def create_table(
        self, options: Json, topic: str, schema: str, properties: Json, for_query: bool = False
    ) -> str:
        """Create a topic; see `topic_tables.create_topic`.

        Args:
            options: The options of the catalog.
            topic: The name.
            schema: The columns, as the JSON of a ``StructType``.
            properties: The properties of the table.
            for_query: Whether the rows of a query are written to it next.
        """
        fields = json.loads(schema)["fields"]
        return topic_tables.create_topic(self._logs, options, topic, fields, properties, for_query)

    def alter_table(self, options: Json, topic: str, properties: Json) -> bool:
        """Change the properties of a topic; return False if there is no such topic."""
        return topic_tables.alter_topic(self._logs, options, topic, properties)

    def alter_columns(self, options: Json, topic: str, changes: Sequence[Json]) -> bool:
        """Change the columns of a topic; return False if there is no such topic."""
        return topic_tables.alter_columns(self._logs, options, topic, changes)

    def drop_table(self, options: Json, topic: str) -> bool:
        """Delete a topic; return False if there is no such topic."""
        return topic_tables.delete_topic(self._logs, options, topic)

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
        topic = OptionReader(options).raw("topic")
        try:
            log = self._logs.acquire(OptionReader(options).root())
        except EmbedlogError:
            return False
        try:
            info = None if topic is None else log.root.topics().get(topic)
            if info is None or not info.schema_version:
                return False
            if schema is not None:
                # Not for topics of bytes: it needs pyarrow.
                from embedlog.spark.typed_sink import check_frame

                sink_options.parse(options)
                columns = log.root.context.catalog.schema(info)
                assert columns is not None
                check_frame(json.loads(schema)["fields"], columns, info.name)
            return True
        finally:
            self._logs.release(log)

    def _stream(self, number: int) -> MicroBatchStream:
        if not self.is_open(number):
            raise IllegalStateError(
                f"The planner has no open stream {number!r}", todo="Start the query again."
            )
        return self._streams[number]


def _limit(options: SourceOptions) -> list[Any] | None:
    """Return the limit to show to Spark, which passes it back unless it is to be ignored."""
    if options.max_offsets_per_trigger is not None:
        return ["rows", options.max_offsets_per_trigger]
    if options.max_bytes_per_trigger is not None:
        return ["bytes", options.max_bytes_per_trigger]
    if options.min_offsets_per_trigger is not None:
        return ["min_rows", options.min_offsets_per_trigger, options.max_trigger_delay_ms]
    return None


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
