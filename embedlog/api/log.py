"""`open` and `Log`: the log root as its users see it."""

from __future__ import annotations

import atexit
import grp
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    Never,
    NotRequired,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from embedlog import audit
from embedlog.api.topic import Topic
from embedlog.catalog import (
    INTERNAL,
    refuse_differences,
    refuse_internal,
    refuse_other_schema,
)
from embedlog.config import MaintenanceConfig, TopicConfig
from embedlog.display import html_table, plural, public_names
from embedlog.errors import (
    EmbedlogError,
    FencedError,
    IllegalStateError,
    InvalidConfigError,
    ReplicaNotAvailableError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
    no_attribute,
)
from embedlog.files import Files
from embedlog.hints import Hint, alter_topic
from embedlog.metrics import Metrics, Sample, nested, prometheus_text
from embedlog.partition import (
    DURABILITIES,
    VISIBILITIES,
    Durability,
    PartitionLog,
    Visibility,
)
from embedlog.partition.leases import Lease, LeaseInfo, hold, leases
from embedlog.partition.tail import Tail, peek_tail
from embedlog.progress import ProgressBar, format_bytes
from embedlog.record import K, TopicPartition, V
from embedlog.root.location import directory_of
from embedlog.root.repair import repair_root
from embedlog.root.root import HasReplicasError, Root, check_root
from embedlog.root.verify import Finding, rebuild_index, verify_root
from embedlog.schemas.evolution import changed_schema, renamed
from embedlog.schemas.infer import SchemaLike, columns_of
from embedlog.schemas.settings import check_typed_config
from embedlog.schemas.topic_schema import TopicSchema, first_version
from embedlog.schemas.values import python_values
from embedlog.serializers import SerializerName
from embedlog.times import When, parse_duration, time_argument

if TYPE_CHECKING:
    import polars

    from embedlog.api.consumer_group import ConsumerGroup
    from embedlog.api.failover import FailoverResult, Strategy
    from embedlog.api.replicas import DirectoryList, ReassignmentResult
    from embedlog.audit.comparison import AuditResult
    from embedlog.compaction import CleanResult
    from embedlog.compaction.rebatch import RebatchResult
    from embedlog.config.options import (
        ConsumerOptions,
        MaintenanceOptions,
        ProducerOptions,
        TopicOptions,
    )
    from embedlog.consumer import Consumer
    from embedlog.convert import ConversionResult
    from embedlog.maintenance import Maintenance
    from embedlog.maintenance.activity import Event
    from embedlog.mirrors.status import MirrorStatus
    from embedlog.producer import Producer
    from embedlog.registry import SchemaRegistry
    from embedlog.replication.mend import ReplicaDifference
    from embedlog.retention.retain import RetentionResult

Client = TypeVar("Client", bound="Producer[Any, Any] | Consumer[Any, Any]")
Progress = Callable[[int, int], None]
"""Called with how much is done, and how much there is: bytes, or records of a conversion."""

_logger = logging.getLogger("embedlog.api")
_HINTS = {
    "create_topics": "call create_topic(name, partitions, config) for each",
    "delete_topics": "call delete_topic(name) for each",
    "list_topics": "call topics()",
    "send": "call producer(), and send(topic, value) of what it returns",
    "subscribe": "call consumer(topic, ...)",
}
"""What to call instead of methods of Kafka's clients."""
_open_logs: weakref.WeakSet[Log] = weakref.WeakSet()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class PartitionSummary(TypedDict):
    """One partition, as of now; in the result of `Log.describe_topic`."""

    partition: int
    start_offset: int
    end_offset: int
    bytes: int
    segments: int
    leader_epoch: int
    leader: int | None
    """The id of the directory that is read; None while no copy can be."""
    replicas: list[int]
    """The directories with a copy, the preferred leader first."""
    isr: list[int]
    """Those whose copy is in sync."""


class ColumnDescription(TypedDict):
    """A column of a typed topic; in the result of `Log.describe_topic`."""

    name: str
    type: str
    nullable: bool
    default: NotRequired[Any]
    """The value of records that do not have the column."""


class SchemaDescription(TypedDict):
    """The current schema of a typed topic; in the result of `Log.describe_topic`."""

    version: int
    columns: list[ColumnDescription]
    key: list[str]
    """The names of the key columns."""
    timestamp: str | None
    """The name of the column of timestamps."""


class TopicDescription(TypedDict):
    """The result of `Log.describe_topic`."""

    name: str
    id: int
    created_ms: int
    config: dict[str, Any]
    """All settings, by Kafka's names."""
    overrides: dict[str, Any]
    """The settings that differ from their defaults."""
    schema: NotRequired[SchemaDescription]
    """The columns of a typed topic."""
    partitions: list[PartitionSummary]


class MaintenanceResults(TypedDict):
    """The results of the jobs; see `Log.maintain`."""

    retention: list[RetentionResult]
    """What was deleted."""
    flush: list[PartitionLog]
    """The partitions that were flushed, since ``flush.ms`` had passed."""
    checkpoint: int
    """The number of committed offsets that were saved for after a power cut."""
    offsets: int
    """The number of committed offsets of unused groups that were deleted."""
    producers: int
    """The number of idle producers that were forgotten."""
    compaction: NotRequired[list[CleanResult]]
    """What was compacted; without ``log_cleaner_enable`` there is no such result."""
    rebatch: NotRequired[list[RebatchResult]]
    """Where small batches were gathered; without ``log_cleaner_enable`` there is no such result."""
    activity: list[Event]
    """The changes that were found."""


class Log:
    """An open log root, with its topics and consumer groups; returned by `open`.

    Any thread may use it, and a forked child may continue to use it.  It pickles as its
    path and options.
    """

    def __init__(
        self, root: Root | None = None, maintenance_config: MaintenanceConfig | None = None
    ) -> None:
        self.root = check_root(root, "embedlog.open(path)")
        self._maintenance_config = maintenance_config
        """None if this process must not run the maintenance jobs in the background."""
        self._maintenance: Maintenance | None = None
        self._maintenance_lock = threading.Lock()
        self._close_lock = threading.Lock()
        """Held until the log is closed, if there is a thread that waits for that."""
        self._opening: threading.Thread | None = None
        self._children: weakref.WeakSet[Any] = weakref.WeakSet()
        self._client_ids: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        """Producers and consumers, with their names in the metrics."""
        self._client_numbers = itertools.count(1)
        self._clients_lock = threading.Lock()
        _open_logs.add(self)

    @property
    def path(self) -> str:
        """The directory."""
        return self.root.path

    @property
    def durability(self) -> Durability:
        """``"os"`` or ``"fsync"``; see `open`."""
        return self.root.durability

    @property
    def maintenance(self) -> Maintenance:
        """The background jobs of this handle; created at the first use."""
        from embedlog.maintenance import Maintenance, jobs_of

        with self._maintenance_lock:
            if self._maintenance is None:
                self._maintenance = Maintenance(
                    self.root,
                    jobs_of(
                        self._maintenance_config or MaintenanceConfig(),
                        replicated=self.root.replicated,
                    ),
                    bound_clock=self.root.clock is _now_ms,
                    background=self._maintenance_config is not None,
                )
                # If the program drops the log without closing it, the threads must end too.
                weakref.finalize(self, self._maintenance.request_stop).atexit = False
            return self._maintenance

    def _start_maintenance(self) -> None:
        """Start the background jobs, unless the log was opened without them."""
        root = self.root
        if self._maintenance_config is not None and root.mode == "rw" and not root.closed:
            (self._maintenance or self.maintenance).start()

    def _start_maintenance_soon(self) -> None:
        """Start the background jobs, also if the program only has the log open, and waits.

        In a thread, since their import takes as long as the rest of `open`, which a program
        that ends within a second need not wait for.
        """
        if self._maintenance_config is not None and self.root.mode == "rw":
            self._close_lock.acquire()
            arguments = weakref.ref(self), self._close_lock
            thread = threading.Thread(
                name="embedlog-open", target=_start_later, args=arguments, daemon=True
            )
            with suppress(RuntimeError):  # if no thread can be started, the first use starts them
                thread.start()
                self._opening = thread

    # Topics

    def create_topic(
        self,
        name: str,
        partitions: int | None = None,
        config: TopicOptions | Mapping[str, object] | None = None,
        *,
        key: str | Sequence[str] | None = None,
        value: SerializerName | None = None,
        schema: SchemaLike | None = None,
        timestamp: str | None = None,
        replication_factor: int | None = None,
        replicas: Sequence[Sequence[int]] | None = None,
        exist_ok: bool = False,
    ) -> Topic:
        """Create a topic and return a view of it.

        With a ``schema`` it is a typed topic: its values are rows with these columns, each of
        which is stored and read by itself.

        Args:
            name: At most 200 letters, digits, '.', '_' and '-'.
            partitions: The number of partitions, at most 20,000, by default 1; it can grow
                later, but not shrink.
            config: Kafka's topic settings, with dots or underscores.
            key: How keys are stored, such as ``"str"``: the setting ``key.serializer``.  With a
                ``schema``, the name of the key column, or a list of several.
            value: How values are stored, such as ``"json"``: the setting ``value.serializer``.
            schema: The columns of a typed topic: a `pyarrow.Schema`, anything else that has
                ``__arrow_c_schema__``, a frame as an example, or a dataclass.
            timestamp: The column of a typed topic that has the timestamps of the records.
            replication_factor: In how many directories each partition is; by default three, or as
                many as the log has.
            replicas: The directories of each partition by their ids, the preferred leader first;
                instead of ``partitions`` and ``replication_factor``.
            exist_ok: If the topic exists already, return it, unless it has another number
                of partitions or other settings than those given here (None means the
                default of a setting).

        Raises:
            InvalidTopicError, InvalidPartitionsError, InvalidConfigError: Nothing was created.
            InvalidSchemaError, InvalidReplicationFactorError: Likewise.
            InvalidReplicationAssignmentError: Likewise.
            TopicAlreadyExistsError: The topic exists; with ``exist_ok``, it differs.  Nothing
                was changed; the error names the `differences` and the calls to apply them.
        """
        columns = None
        if schema is not None:
            columns = first_version(columns_of(schema), key, timestamp)
            key = None
        elif timestamp is not None:
            raise InvalidConfigError("timestamp names a column, so it needs a schema", topic=name)
        serializers = {"key.serializer": key, "value.serializer": value}
        settings = _merged(config or {}, {n: v for n, v in serializers.items() if v is not None})
        refuse_internal(name)
        while True:
            info = self.root.topics().get(name) if exist_ok else None
            if info is not None:
                refuse_differences(info, partitions, settings)
                refuse_other_schema(info, self.root.context.catalog.schema(info), columns)
                return self.topic(name)
            count = len(replicas or (0,)) if partitions is None else partitions
            try:
                parsed = TopicConfig.parse(settings)
                if columns is not None:
                    check_typed_config(name, parsed, columns)
                self.root.create_topic(
                    *(name, count, parsed, columns),
                    replication_factor=replication_factor,
                    replicas=replicas,
                )
                return self.topic(name)
            except TopicAlreadyExistsError:
                # With exist_ok: another process has just created it, so compare with that.
                if not exist_ok:
                    raise

    def delete_topic(self, name: str) -> None:
        """Delete a topic, its records, and the offsets committed for it.

        Readers can finish with the files they have open.
        """
        refuse_internal(name)
        self.root.delete_topic(name)

    def create_partitions(self, name: str, total: int) -> None:
        """Increase the number of partitions to ``total``; keys may move to other ones.

        Raises:
            MirroredTopicError: The topic is a copy, whose mirror adds the partitions of the source.
        """
        refuse_internal(name)
        self.root.grow_topic(name, total)

    def alter_topic(
        self,
        name: str,
        config: TopicOptions | Mapping[str, object] | None = None,
        *,
        schema: SchemaLike | None = None,
        rename: Mapping[str, str] | None = None,
        defaults: Mapping[str, object] | None = None,
    ) -> None:
        """Change settings of a topic, or the schema of a typed topic.

        A new schema may add columns that are nullable or have a default, make types wider
        (integers, floats, decimals, dates to timestamps), let columns be null, rename columns,
        and drop them.  Every record, old or new, is then seen through it.

        Args:
            name: The topic.
            config: The settings; None sets one back to its default.
            schema: The columns, as in `create_topic`.
            rename: The old and the new name of each column that is renamed.
            defaults: The value of each added column in the records that are stored already.

        Raises:
            InvalidConfigError: A setting is not valid.  Nothing was changed.
            InvalidSchemaError: The change is not possible; the error says why, and what would
                work.  Nothing was changed.
        """
        info = self.root.topic(name)
        if schema is not None or rename or defaults:
            if config:
                raise InvalidConfigError(
                    "Change the settings and the schema of a topic in two calls", topic=name
                )
            columns = None if schema is None else columns_of(schema)

            def change(before: TopicSchema, earlier: Sequence[TopicSchema]) -> TopicSchema:
                new = renamed(before.plain, rename or {}) if columns is None else columns
                return changed_schema(before, new, rename, defaults, earlier)

            self.root.alter_schema(name, change)
            return
        before = self.root.context.catalog.schema(info)
        if before is not None:
            check_typed_config(name, info.config.changed(config or {}), before)
        self.root.alter_topic(name, config or {})

    def topics(self, *, internal: bool = False) -> list[str]:
        """Return the names of all topics, sorted.

        Args:
            internal: Include those that begin with ``__``, such as ``__activity``.
        """
        names = self.root.topics()
        return [name for name in names if internal or not name.startswith(INTERNAL)]

    def describe_topic(self, name: str) -> TopicDescription:
        """Return a topic's id, settings and columns, and offsets, bytes and segments by partition.

        A topic of bytes has no ``"schema"``.  The directories of partitions are named by their
        ids in `replicas`.
        """
        info = self.root.topic(name)
        schema = self.root.context.catalog.schema(info)
        logs = [self.root.partition(name, number) for number in range(info.partitions)]
        description: TopicDescription = {
            "name": info.name,
            "id": info.id,
            "created_ms": info.created_ms,
            "config": info.config.to_dict(),
            "overrides": info.config.overrides(),
            "partitions": [_summary(log) for log in logs],
        }
        if schema is not None:
            description["schema"] = _described(schema)
        return description

    @overload
    def topic(self, name: str, *, raw: Literal[False] = False) -> Topic: ...
    @overload
    def topic(self, name: str, *, raw: Literal[True]) -> Topic[bytes | None, bytes | None]: ...
    @overload
    def topic(self, name: str, *, raw: bool) -> Topic: ...
    def topic(self, name: str, *, raw: bool = False) -> Topic:
        """Return a view of a topic, to slice, count and turn into tables.

        Args:
            name: The topic.
            raw: Return keys and values as bytes, whatever the serializers of the topic.

        Raises:
            UnknownTopicOrPartitionError: There is no such topic; the error names the most
                similar one.
        """
        info = self.root.topic(name)
        self._start_maintenance()
        if not info.schema_version:
            return Topic(self.root, name, raw=raw)
        from embedlog.api.typed_topic import TypedTopic, no_bytes

        if raw:
            raise no_bytes(name)
        return TypedTopic(self.root, name)

    def __getitem__(self, name: str) -> Topic:
        """The same as `topic`."""
        return self.topic(name)

    def __contains__(self, name: object) -> bool:
        """Whether there is such a topic.

        Raises:
            TypeError: The name is not a str.
        """
        if not isinstance(name, str):
            raise TypeError(f"topic must be the name of a topic as a str, got {name!r}")
        return name in self.root.topics()

    if not TYPE_CHECKING:
        # Type checkers must not take every name for an attribute.

        def __getattr__(self, name: str) -> Any:
            """Raise an AttributeError; it may say what to call, such as for the name of a topic."""
            root, hint = self.__dict__.get("root"), _HINTS.get(name, "")
            if root is not None and not name.startswith("_"):
                with suppress(EmbedlogError):
                    hint = f"call log.topic({name!r})" if name in root.topics() else hint
            raise no_attribute(self, name, hint)

    def partition(self, topic: str, number: int) -> PartitionLog:
        """Return the log of one partition, which producers and consumers use."""
        self._start_maintenance()
        return self.root.partition(topic, number)

    # SQL

    @overload
    def sql(
        self, query: str, *, eager: Literal[True] = ..., files: bool = ...
    ) -> polars.DataFrame: ...
    @overload
    def sql(self, query: str, *, eager: Literal[False], files: bool = ...) -> polars.LazyFrame: ...
    @overload
    def sql(
        self, query: str, *, eager: bool, files: bool = ...
    ) -> polars.DataFrame | polars.LazyFrame: ...
    def sql(
        self, query: str, *, eager: bool = True, files: bool = False
    ) -> polars.DataFrame | polars.LazyFrame:
        """Return the result of a query, in Polars' SQL; every topic is a table.

        Only the topics that the query names are read, and of these only the columns, and with
        filters the segments, that it needs: see `TopicView.scan`, which also says what columns
        there are.  A name with other characters than letters, digits and ``_`` is written in
        double quotes.

        Args:
            query: One SELECT.
            eager: Return a DataFrame; with False a LazyFrame, which reads when it is collected.
            files: Let the query read any file or URL that this process can read, with Polars'
                table functions such as ``read_csv``.  By default it reads the log's topics only.

        Raises:
            InvalidQueryError: The query is wrong, is not one that reads, or reads a file.
            UnknownTopicOrPartitionError: There is no such topic; the error names those that
                there are.
            EmbedlogError: Polars is not installed.
        """
        from embedlog.api.sql import collect, sql

        views = {}
        for name in self.topics(internal=True):
            with suppress(UnknownTopicOrPartitionError):  # It was deleted meanwhile.
                views[name] = self.topic(name)
        frame = sql(views, query, files=files)
        return collect(frame) if eager else frame

    # Groups

    def groups(self) -> list[str]:
        """Return the names of all consumer groups with members or commits, sorted."""
        from embedlog.group import group_ids

        return group_ids(self.root.context.live, self.root.context.state)

    def group(self, name: str) -> ConsumerGroup:
        """Return a view of a consumer group, to describe it and reset its offsets.

        The group need not exist: `ConsumerGroup.reset_offsets` sets where a new one begins.

        Raises:
            InvalidGroupIdError: The name is not valid.
        """
        from embedlog.api.consumer_group import ConsumerGroup

        return ConsumerGroup(self.root, name)

    # Mirrors

    def mirrors(self) -> list[MirrorStatus]:
        """Return the mirrors that copy to this log, as they last reported; see `embedlog.mirror`.

        A reboot forgets those that do not run.
        """
        from embedlog.mirrors.status import mirror_statuses

        return mirror_statuses(self.root)

    def failover(
        self,
        group: str | Iterable[str] | None = None,
        strategy: Strategy = "offsets",
        *,
        at: When | None = None,
        topics: str | Iterable[str] | None = None,
        dry_run: bool = True,
    ) -> FailoverResult:
        """Let programs write to topics that are copies, and say where consumer groups continue.

        From then on the mirror of these topics is refused.  The result says for each group and
        partition how many offsets are, or may be, read again or never.

        Args:
            group: A group, or several; None only makes the topics writable.  One that does not
                exist here needs ``topics``, and a strategy other than ``"offsets"``.
            strategy: ``"offsets"``: where the mirror copied the commits of the group from the
                source (``groups`` of `embedlog.mirror`); ``"time"``: at the first record at or
                after ``at``; ``"earliest"`` or ``"latest"``; or offsets by partition, in all others
                as ``"offsets"``.
            at: A time as in `ConsumerGroup.reset_offsets`, such as ``"10m"`` for ten minutes ago.
            topics: Only these copies; by default those in which the groups have committed offsets,
                or ``strategy`` has some, and without a group all of the log.
            dry_run: Change nothing.

        Raises:
            NonEmptyGroupError: A group has members here; also raised for a dry run.
            GroupIdNotFoundError: There is no such group; likewise.
            IllegalStateError: The log has no copies, or a group has no commits in one of them and
                no topics are named.
            UnknownTopicOrPartitionError: There is no such copy or partition.
            InvalidConfigError, OffsetOutOfRangeError: The strategy is not possible.
            InvalidGroupIdError, InvalidPartitionError: A name is not valid.
        """
        from embedlog.api.failover import Failover

        return Failover(self.root, group, strategy, at, topics).run(dry_run=dry_run)

    # Schemas

    @property
    def schemas(self) -> SchemaRegistry:
        """The schema registry of the log: subjects, their versions, and compatibility."""
        from embedlog.registry import SchemaRegistry

        return SchemaRegistry(self.root)

    # Converting

    def convert(
        self,
        source: str,
        target: str,
        *,
        to: Literal["typed", "avro", "json"] | None = None,
        key: str | Sequence[str] | None = None,
        timestamp: str | None = None,
        partitions: int | None = None,
        schema: SchemaLike | None = None,
        rename: Mapping[str, str] | None = None,
        skip_invalid: bool = False,
        progress: Progress | None = None,
    ) -> ConversionResult:
        """Copy the records of a topic to one of another form: of Avro or JSON to columns, or back.

        Each record is copied once, whatever happens: a conversion that was interrupted continues
        when it is repeated, and a complete one copies what has been appended since.  Keys,
        timestamps, headers and tombstones stay the same, and so do the partitions of records if
        their number and the bytes of the keys do.

        Args:
            source: The topic to read.
            target: The topic to write; it is created with the settings of the source.
            to: The form of the target; by default ``"typed"``, and ``"avro"`` if the source is a
                typed topic.
            key: The column, or columns, of a typed target with the keys of the records.  One
                that the values do not have is added.
            timestamp: The column of a typed target that has the timestamps of the records, which
                then replace those of the source.
            partitions: The number of partitions; by default that of the source.
            schema: The columns of values that are JSON; by default they are inferred.
            rename: Names of columns by those of the fields of the values.
            skip_invalid: Leave out records that do not fit, instead of ending with an error.
            progress: Called with the number of records that are done, and of all.

        Raises:
            SerializationError: A record does not fit; the error says where.  The records of its
                partition before it were copied, and none after it.
            InvalidConfigError, InvalidSchemaError: The conversion is not possible.
            UnknownSchemaError: The registry has no schema for the values.
            TopicAlreadyExistsError, IllegalStateError: The target is no topic of this conversion.
            LockTimeoutError: Another process converts to the same topic.
        """
        from embedlog.convert import Conversion, ConversionOptions

        options = ConversionOptions(
            *(to, key, timestamp, partitions, schema, rename or {}, skip_invalid)
        )
        return Conversion(self.root, source, target, options).run(progress)

    # Writing and reading

    def producer(self, *refused: Never, **config: Unpack[ProducerOptions[K, V]]) -> Producer[K, V]:
        """Return a producer; `embedlog.config.ProducerConfig` has its settings (kafka-python's).

        Raises:
            InvalidConfigError: There is no such setting, or it has no such value.
            TypeError: The settings are not passed by name.
        """
        from embedlog.producer import Producer

        if refused:
            raise TypeError(
                f"Settings must be passed by name, got {refused[0]!r}; call producer(acks=1), or "
                "producer(**config), and pass the topic to send()"
            )
        return self._adopt(Producer(self.root, **config), "producer")

    def consumer(self, *topics: str, **config: Unpack[ConsumerOptions[K, V]]) -> Consumer[K, V]:
        """Return a consumer; `embedlog.config.ConsumerConfig` has its settings (kafka-python's)."""
        from embedlog.consumer import Consumer

        return self._adopt(Consumer(self.root, *topics, **config), "consumer")

    def _adopt(self, client: Client, kind: str) -> Client:
        """Close a producer or consumer with this log, and include it in its metrics."""
        self._start_maintenance()
        with self._clients_lock:
            number = next(self._client_numbers)
            name = client.config.client_id or f"{kind}-{number}"
            is_taken = any(name == taken for _, taken in self._open_clients())
            self._client_ids[client] = f"{name}-{number}" if is_taken else name
            self._children.add(client)
        return client

    def _open_clients(self) -> Iterator[tuple[Any, str]]:
        """Yield producers, consumers and the streams of these, with their names."""
        for client, name in self._client_ids.items():
            if not client._closed:
                yield client, name
                for number, stream in enumerate(getattr(client, "_streams", ()), 1):
                    if not stream._closed:
                        yield stream, f"{name}-stream-{number}"

    def flush(self) -> None:
        """Write everything appended with this handle to the disk."""
        for child in list(self._children):
            if hasattr(child, "flush"):
                child.flush()
        self.root.flush()

    def share(self, group: str | int, mode: Literal["rw", "r", "none"] = "rw") -> None:
        """Let Spark's executors of other users read the log's records, and stage others.

        The setting is kept in the permissions of the log's directories, so it holds for all
        processes and for files that are made later.  A log is opened by the user who owns it, who
        must be in the group.

        Args:
            group: The name or number of the group of these users.
            mode: ``"r"`` to let them only read; ``"none"`` to end the sharing.

        Raises:
            InvalidConfigError: There is no such group, or mode.
            StorageError: The log belongs to another user, or its user is not in the group.
        """
        check_choice("mode", mode, ("rw", "r", "none"))
        self.root.context.check_writable()
        try:
            number = group if isinstance(group, int) else grp.getgrnam(group).gr_gid
        except KeyError as error:
            raise InvalidConfigError(
                f"There is no group {group!r} on this host", todo="Create it, or pass its number."
            ) from error
        self.root.context.files.share(number, mode)

    # Directories and copies

    def replicas(self) -> DirectoryList:
        """Return the directories of the log, with their leaders, copies, sizes and lags.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as disk, open([f"{disk}/a", f"{disk}/b"]) as log:
        ...     topic = log.create_topic("flights", partitions=4)
        ...     [(each.id, each.online, each.leaders, each.in_sync) for each in log.replicas()]
        [(1, True, 2, 4), (2, True, 2, 4)]
        """
        from embedlog.api.replicas import DirectoryList, directories_of

        directories, leaderless = directories_of(self.root)
        return DirectoryList(directories, leaderless)

    def add_replica(self, path: str | os.PathLike[str], rack: str | None = None) -> int:
        """Add a directory to the log, and return its id.

        New topics get copies there; `reassign` moves some of the others, and begins to copy
        topics that had too few directories.  A log in one directory becomes one in several: then
        views of topics and groups must be made anew.

        Args:
            path: A new or empty directory, on a disk of its own.
            rack: What fails together with it, such as a controller or a machine: the copies of a
                partition are in different racks, as with Kafka's `broker.rack`.

        Raises:
            NotALogError: The directory has other files, or is a log.
            IllegalStateError: It belongs to the log already; or this handle has producers or
                consumers, and the log has one directory.
            LockTimeoutError: The log has one directory, and other processes have it open.
        """
        directory = directory_of(path)
        self.root.context.check_writable()
        if not self.root.replicated:
            return self._add_second(directory, rack)
        from embedlog.api.replicas import several
        from embedlog.replication.recovery import add_directory

        return add_directory(several(self.root), directory, rack)

    def _check_no_clients(self) -> None:
        """Raise if this handle has producers or consumers: it is about to be opened again."""
        with self._clients_lock:
            if next(self._open_clients(), None) is not None:
                raise IllegalStateError(
                    "The log has open producers or consumers, and must be opened again",
                    path=self.path,
                    todo="Close them, repeat this, and create them again.",
                )

    def _add_second(self, path: str, rack: str | None) -> int:
        """Reopen the log in two directories."""
        from embedlog.api.replicas import id_of, several
        from embedlog.files.paths import real_path

        self._check_no_clients()
        before, path = self.root, real_path(path)
        with self._maintenance_lock:
            if self._maintenance is not None:
                self._maintenance.close()
                self._maintenance = None
        before.close()
        try:
            self.root = open_root([before.path, path], racks={path: rack}, **before.options())
        except BaseException:
            self.root = open_root(before.path, **before.options())
            raise
        self._start_maintenance()
        return id_of(several(self.root), path)

    def remove_replica(
        self,
        *paths: str | os.PathLike[str],
        force: bool = False,
        throttle: float | None = None,
        progress: Progress | bool = True,
    ) -> None:
        """Remove directories from the log; their copies are made in the others first.

        A topic with as many copies as there were directories has one less afterwards.  The files
        of a removed directory that can be written are deleted.

        Args:
            paths: The directories; they need not exist any more.
            force: Give up directories that will never return, also if they have the only copy of
                records, or if too few are left to decide.  In that case, when the log cannot be
                opened to write, call this on one that was opened with ``mode="r"``.
            throttle: Bytes per second to copy at most.
            progress: Called with the bytes done, and all bytes.  By default a progress bar
                in terminals and notebooks; False shows none.

        Raises:
            IllegalStateError: It is the last directory that works, or none of the log.
            ReplicaNotAvailableError: It cannot be used, and has the only copy of a partition.
            NotEnoughReplicasError: Too few directories would be left to decide; with ``force``,
                give up more.  Or another process cancelled the moves: repeat the call.
            EligibleLeadersNotAvailableError: With ``force``: the directory was removed, and had
                all in-sync copies of a partition, which has no leader now, since a directory that
                is offline has more records than each that could lead; see `elect_leaders`.
        """
        from embedlog.api.replicas import remove_directories

        before = self.root
        is_reopened = before.mode == "r" and not before.closed
        if is_reopened:
            self._check_no_clients()
        try:
            with ProgressBar("remove") as bar:
                remove_directories(
                    before,
                    [directory_of(path) for path in paths],
                    force=force,
                    throttle=throttle,
                    progress=bar if progress is True else progress or None,
                )
        finally:
            if is_reopened and before.closed:
                self.root = open_root(before.path, **before.options())

    def elect_leaders(
        self,
        partitions: Iterable[TopicPartition] | None = None,
        *,
        election: Literal["preferred", "unclean"] = "preferred",
    ) -> list[TopicPartition]:
        """Elect leaders; return the partitions that got another one.

        Args:
            partitions: By default all of them.
            election: ``"preferred"`` elects the first replica of each partition, if it is in sync,
                so that the leaders are even again.  ``"unclean"`` elects for partitions
                without a leader a replica that is not in sync, of those in directories that are
                online the one with the most records: records that only the others have are lost.

        Raises:
            EligibleLeadersNotAvailableError: A directory that is offline has a copy with more
                records, and can be read.  No leader was elected.
            UnknownTopicOrPartitionError: There is no such partition.
            InvalidPartitionError: ``partitions`` is no list of partitions.
            InvalidConfigError: There is no such kind of election.
        """
        from embedlog.api.replicas import elect_leaders

        return elect_leaders(self.root, partitions, election)

    def reassign(
        self,
        moves: Mapping[TopicPartition, Sequence[int]] | None = None,
        *,
        replication_factor: int | Mapping[str, int] | None = None,
        throttle: float | None = None,
        dry_run: bool = False,
        progress: Progress | bool = True,
    ) -> ReassignmentResult:
        """Move copies to other directories, in this thread; the records stay readable meanwhile.

        Also finishes moves that had begun.  If it is interrupted, the housekeeping continues.  The
        result names the moves that wait for a directory (``pending``), and those that another
        process cancelled or replaced (``superseded``).

        Args:
            moves: The ids of the directories of each partition, the preferred leader first; more
                or fewer than before change how many copies it has.  By default the fewest moves
                that make the copies even over all directories.
            replication_factor: How many copies to have, of all topics or by the name of the topic,
                instead of as many as there are; not with ``moves``.  A partition with a copy in a
                directory that is offline keeps its number.
            throttle: Bytes per second to copy at most.
            dry_run: Change nothing.
            progress: Called with the bytes done, and all bytes.  By default a progress bar
                in terminals and notebooks; False shows none.

        Raises:
            InvalidReplicationAssignmentError: There is no such directory, or one occurs twice.
            InvalidReplicationFactorError: There are not so many directories online.
            UnknownTopicOrPartitionError: There is no such partition.
            LockTimeoutError: Another process moves copies.
        """
        from embedlog.api.replicas import reassign

        with ProgressBar("reassign") as bar:
            return reassign(
                self.root,
                moves,
                replication_factor=replication_factor,
                dry_run=dry_run,
                throttle=throttle,
                progress=bar if progress is True else progress or None,
            )

    def cancel_reassignment(self, partitions: Iterable[TopicPartition] | None = None) -> int:
        """Keep the old copies of partitions that are being moved; return how many these are.

        Args:
            partitions: By default all that are being moved.

        Raises:
            IllegalStateError: Only new copies of a partition are in sync.
            UnknownTopicOrPartitionError: There is no such partition.
            InvalidPartitionError: ``partitions`` is no list of partitions.
        """
        from embedlog.api.replicas import cancel_reassignment

        return cancel_reassignment(self.root, partitions)

    # Maintenance and retention

    def maintain(self) -> MaintenanceResults:
        """Run every maintenance job once, now, by the log's clock; return the results by job.

        Works with ``maintenance=False`` as well.  If another process runs the jobs in the
        background, it pauses during this call.

        Raises:
            EmbedlogError: A job failed; all others were run.
        """
        return cast("MaintenanceResults", self.maintenance.maintain())

    def delete_records(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Delete the records below an offset of each partition; -1 is the log end.

        Takes effect immediately and durably, ignoring leases and consumer groups.  Returns
        the new log start offsets.

        Raises:
            OffsetOutOfRangeError: An offset is past the end; partitions before it in the
                order of ``offsets`` are done.
        """
        from embedlog.retention import delete_records

        return {
            partition: delete_records(self.root.partition(*partition), offset)
            for partition, offset in offsets.items()
        }

    def hold(
        self,
        name: str,
        offsets: Mapping[TopicPartition, int] | None = None,
        *,
        seconds: float = 60.0,
    ) -> Lease:
        """Keep records from being deleted for some time, for a long query or as a snapshot.

        Returns a `Lease`: `renew` it in time, `release` it, or use it in a ``with`` block.
        It ends with a reboot.  ``retention.bytes.hard`` limits what leases keep, and
        `delete_records` ignores them.

        Args:
            name: The name of the lease; an existing one of that name is replaced.
            offsets: The first offset to keep in each partition; by default all log start
                offsets.
            seconds: How long the lease lasts unless it is renewed.

        Raises:
            OffsetOutOfRangeError: Some of the records are deleted already; no lease was made.
        """
        if offsets is None:
            partitions = [
                TopicPartition(topic, number)
                for topic in self.topics()
                for number in range(self.root.partitions(topic))
            ]
            offsets = {part: self.root.partition(*part).start_offset() for part in partitions}
        return hold(self.root, name, offsets, seconds)

    def leases(self) -> list[LeaseInfo]:
        """Return the current leases, by name; see `hold`."""
        return list(leases(self.root))

    @property
    def retention_bytes(self) -> int | None:
        """How many bytes all topics together may hold; None means no limit.

        Above the limit the oldest sealed segments of all topics with ``cleanup.policy=delete``
        are deleted.  Setting it applies to all processes, durably, from the next round on.
        """
        return self.root.context.catalog.retention_bytes()

    @retention_bytes.setter
    def retention_bytes(self, limit: int | None) -> None:
        if limit is not None and (not isinstance(limit, int) or limit < 0):
            raise InvalidConfigError(
                f"retention_bytes must be a number of bytes or None, got {limit!r}"
            )
        self.root.context.check_writable()
        self.root.context.catalog.put_retention_bytes(limit)

    # Health

    @overload
    def verify(
        self, *, replicas: Literal[False] = False, progress: Progress | None = None
    ) -> list[Finding]: ...
    @overload
    def verify(
        self, *, replicas: Literal[True], progress: Progress | None = None
    ) -> list[ReplicaDifference]: ...
    def verify(
        self, *, replicas: bool = False, progress: Progress | None = None
    ) -> list[Finding] | list[ReplicaDifference]:
        """Read everything and check all checksums; ``[]`` means healthy.  Changes nothing.

        Of a partition with several copies, only that of the leader is read.

        Args:
            replicas: Instead, read all copies that are in sync, and return the first offset at
                which one is damaged, lacks something, or differs.
            progress: Called with the bytes done, and all bytes; with ``replicas``, with the
                number of partitions.
        """
        if replicas:
            from embedlog.api.replicas import verify_replicas

            return verify_replicas(self.root, progress)
        return verify_root(self.root, progress)

    def repair(self, *, dry_run: bool = True, progress: Progress | None = None) -> list[str]:
        """Repair what `verify` finds; return in words what is dropped, or would be.

        Damaged records are dropped; the records around them keep their offsets.  The damaged
        files are moved to ``quarantine/``.  In a log over several directories, what a copy has
        damaged or lacks is first written again from another copy that is in sync; only records
        that are damaged in all of them are dropped.  If it is killed, repeat it.

        Args:
            dry_run: Change nothing.
            progress: Called with the bytes done, and all bytes.
        """
        messages: list[str] = []
        mended: set[TopicPartition] = set()
        if self.root.replicated:
            from embedlog.api.replicas import several
            from embedlog.replication.verify_copies import repair_copies

            messages, mended = repair_copies(several(self.root), dry_run=dry_run)
        return messages + repair_root(self.root, dry_run, progress, without=mended)

    def rebuild_index(self, topic: str | None = None) -> int:
        """Rebuild the sparse index from the segments; return the number of its entries."""
        return rebuild_index(self.root, topic)

    def metrics(self) -> Metrics:
        """Return metrics by name, in groups, with the names of Kafka's exporters.

        There are groups for each partition (``"kafka.log.orders-0"``), consumer group
        (``"consumergroup.billing.orders-0"``) and background job.  The metrics of open producers
        and consumers that this handle created follow, with their client ids before the group
        (``"producer-1.producer-metrics"``); streams of a consumer are numbered
        (``"consumer-2-stream-1.consumer-metrics"``).  The page on monitoring lists all names.

        Raises:
            LogDeletedError: The log was deleted while it was open, so its numbers stay as they are.
        """
        return nested(self._samples())

    def prometheus(self, labels: Mapping[str, str] | None = None) -> str:
        """Return the same metrics in Prometheus' text format, for an HTTP endpoint or a file.

        Args:
            labels: Labels to add to each sample, such as ``{"log": "orders"}``.

        Raises:
            InvalidConfigError: A label's name is not valid.
            LogDeletedError: As `metrics`.
        """
        return prometheus_text(self._samples(), labels or {})

    def _samples(self) -> Iterator[Sample]:
        from embedlog.api.metrics import log_samples

        yield from log_samples(self.root)
        with self._clients_lock:
            clients = list(self._open_clients())
        for client, name in clients:
            for sample in client._samples():
                yield sample._replace(labels={"client_id": name, **sample.labels})

    # Compaction

    def compact(
        self,
        topic: str,
        *,
        force: bool = False,
        progress: Progress | bool = True,
        settings: MaintenanceOptions | Mapping[str, object] | None = None,
    ) -> list[CleanResult]:
        """Compact a topic now, in this thread: keep the last record of each key, at its offset.

        Reading and writing continue meanwhile.  Returns a result for each partition that was
        due, in numbers and, as ``why``, in words.

        Args:
            topic: A topic whose ``cleanup.policy`` has ``compact``.
            force: Compact partitions that are not due too, and the records in the active
                segment, which is rolled first; also remove tombstones that have expired
                where nothing is dirty.
            progress: Called with the bytes done, and all bytes.  By default a progress bar
                in terminals and notebooks; False shows none.
            settings: Kafka's ``log.cleaner.dedupe.buffer.size``, ``.io.buffer.size``,
                ``.io.buffer.load.factor`` and ``.io.max.bytes.per.second``.

        Raises:
            InvalidConfigError: The topic is not compacted, or a setting is unknown.
            CorruptionError, StorageError: A partition could not be compacted; the others were.
        """
        from embedlog.compaction import CleanOptions, select_due, try_clean

        root = self.root
        root.context.check_writable()
        info = root.topic(topic)
        if not info.config.compacts:
            call = alter_topic(topic, {"cleanup.policy": "compact"})
            raise InvalidConfigError(
                f"The topic is not compacted: cleanup.policy is {info.config.cleanup_policy!r}",
                topic=topic,
                todo=Hint(f"Call {call}.", f"Run `{call.shell}`."),
            )
        config = MaintenanceConfig.parse(settings or {})
        logs = [root.partition(topic, number) for number in range(info.partitions)]
        failed: dict[PartitionLog, EmbedlogError] = {}
        if not force:
            logs = [cleanable.log for cleanable in select_due(logs, root.clock(), failed)]
        results: list[CleanResult] = []

        def report(done: int, total: int) -> None:
            # As if all partitions had the same size.
            shown(len(results) * total + done, len(logs) * total)

        with ProgressBar(f"compact {topic}") as bar:
            shown = bar if isinstance(progress, bool) else progress
            options = CleanOptions(settings=config, progress=report if progress else None)
            for log in logs:
                # With force, roll first: the active segment is never cleaned.
                results.append(try_clean(log, root.clock(), options, roll=force))
        # All partitions were tried before the first error is raised.
        for error in (*failed.values(), *(result.error for result in results)):
            if error is not None and not isinstance(error, FencedError):
                raise error
        return results

    def audit(
        self,
        topic: str,
        window: timedelta | str | int = "1h",
        *,
        since: When | None = None,
        until: When | None = None,
        tiers: Iterable[str] | None = None,
    ) -> AuditResult:
        """Compare what producers, consumer groups and others counted of a topic with the log.

        The result has a row per window of record time and tier, its ``differences`` name each
        difference in a sentence, and ``to_pandas()``, ``to_polars()`` and ``to_arrow()`` return a
        frame.  Producers and groups count only if the topic has ``audit=true``.

        Args:
            topic: The topic.
            window: The width of a window, of whole minutes, such as ``"1h"``; an int is
                milliseconds.
            since: Only windows that end after this time, such as ``"2d"`` (ago).
            until: Only windows that begin before this time.
            tiers: Only these of ``log``, ``producer``, ``group``, ``pipeline`` and ``mirror``.

        Raises:
            UnknownTopicOrPartitionError: There is no such topic.
            InvalidConfigError: The window, a time or a tier is not valid.
            CorruptBatchError: A batch is damaged.
        """
        from embedlog.audit.comparison import audit

        now_ms = self.root.clock()
        since_ms = None if since is None else time_argument("since", since, now_ms)
        until_ms = None if until is None else time_argument("until", until, now_ms)
        return audit(self.root, topic, _width_ms(window), since_ms, until_ms, tiers)

    # Closing

    def close(self) -> None:
        """Flush and close producers, consumers and the log; later calls raise `ClosedError`."""
        self._closing(autocommit=True).close()

    def _closing(self, autocommit: bool) -> ExitStack:
        """Return a stack of closers: the last one runs first, and all run if one raises."""
        closing = ExitStack()
        if self.root.closed:
            return closing
        opening, self._opening = self._opening, None
        if opening is not None:
            # First: after it there are background jobs, or never will be.
            self._close_lock.release()
            opening.join()
        closing.callback(_open_logs.discard, self)
        closing.callback(self.root.close)
        for child in list(self._children):
            is_consumer = hasattr(child, "poll")
            closing.callback(child.close, **({"autocommit": autocommit} if is_consumer else {}))
        if self._maintenance is not None:
            closing.callback(self._maintenance.close)
        return closing

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # As of a consumer: after an error its last record may not be processed.
        closing = self._closing(autocommit=error is None)
        # Pass the error on: otherwise it would be missing in the traceback of an error of closing.
        closing.__exit__(exc_type, error, traceback)

    def __reduce__(
        self,
    ) -> tuple[Callable[..., Log], tuple[Callable[[], Root], MaintenanceConfig | None]]:
        open_root, _ = self.root.__reduce__()
        return _reopen, (open_root, self._maintenance_config)

    def __dir__(self) -> list[str]:
        """Return the names that completion offers."""
        return public_names(self)

    def __repr__(self) -> str:
        if self.root.closed:
            return f"<Log {self.path}: closed>"
        names = self.topics()
        shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        topics = f"{plural(len(names), 'topic')}: {shown}" if names else "no topics"
        mode = f"durability={self.durability!r}, mode={self.root.mode!r}"
        return f"<Log {self.path}: {topics}; {mode}{_online(self.root)}>"

    def _repr_html_(self) -> str:
        """For notebooks: the topics, and the consumer groups if there are any."""
        if self.root.closed:
            return html_table(f"Log {self.path}: closed", (), ())
        topics, groups = map(self.topic, self.topics()), map(self.group, self.groups())
        cells = list(map(_topic_cells, topics))
        title = f"Log {self.path}{'' if cells else ': no topics'}"
        tables = html_table(title, _TOPIC_HEADS, cells)
        rows = list(map(_group_cells, groups))
        return tables + (html_table("Consumer groups", _GROUP_HEADS, rows) if rows else "")


_FIRST_SECONDS = 1.0
"""When a log that is open and was not used yet starts its background jobs."""
_UNKNOWN = Tail(-1, -1, -1, -1, -1, -1, -1, -1, -1)


def _summary(log: PartitionLog) -> PartitionSummary:
    placement = log.placement
    try:
        tail, start, end, size = log.tail(), log.start_offset(), log.end_offset(), log.size_bytes()
    except ReplicaNotAvailableError:
        # What is known of it without its files.
        tail = peek_tail(log.context.live, log.key) or _UNKNOWN
        start, end = tail.start_offset, tail.high_watermark
        size = sum(segment.size for segment in log.segments.values())
    return {
        "partition": log.partition,
        "start_offset": start,
        "end_offset": end,
        "bytes": size,
        "segments": len(log.segments),
        "leader_epoch": tail.leader_epoch,
        "leader": placement.leader,
        "replicas": list(placement.replicas),
        "isr": list(placement.isr),
    }


def _online(root: Root) -> str:
    """Return how many directories of several are online."""
    if not root.replicated:
        return ""
    from embedlog.api.replicas import several

    image = several(root).controller.current().image
    return f", {len(image.online)} of {len(image.directories)} directories online"


def _described(schema: TopicSchema) -> SchemaDescription:
    columns: list[ColumnDescription] = []
    for field in schema.columns:
        column: ColumnDescription = {
            "name": field.name,
            "type": str(field.type),
            "nullable": field.nullable,
        }
        if field.name in schema.defaults:
            (column["default"],) = python_values(schema.defaults[field.name])
        columns.append(column)
    return {
        "version": schema.version,
        "columns": columns,
        "key": list(schema.key),
        "timestamp": schema.timestamp,
    }


_TOPIC_HEADS = ("topic", "partitions", "records", "size", "cleanup.policy")
_GROUP_HEADS = ("group", "state", "members", "lag")


def _topic_cells(topic: Topic) -> tuple[object, ...]:
    policy = topic.config["cleanup.policy"]
    size = format_bytes(topic.size_bytes())
    return topic.name, topic.partitions, f"{len(topic):,}", size, policy


def _group_cells(group: ConsumerGroup) -> tuple[object, ...]:
    members, lag = len(group.members()), sum(lag or 0 for lag in group.lag().values())
    return group.name, group.state, members, f"{lag:,}"


def _merged(config: Mapping[str, object], more: Mapping[str, object]) -> dict[str, object]:
    """Return settings with more of them, none of which may be among the first ones.

    Raises:
        InvalidConfigError: One is.
    """
    names = {name.replace("_", ".") for name in config}
    for name in more:
        if name in names:
            raise InvalidConfigError(
                f"{name} is given twice, also as {name.partition('.')[0]}", setting=name
            )
    return {**config, **more}


def _width_ms(window: timedelta | str | int) -> int:
    """Return the width of a window in ms.

    Raises:
        InvalidConfigError: It is not a duration.
    """
    width = parse_duration(window) if isinstance(window, str) else window
    if isinstance(width, timedelta):
        return width // timedelta(milliseconds=1)
    if type(width) is not int:
        raise InvalidConfigError(f"window must be a duration such as '1h', got {window!r}")
    return width


def _start_later(log: weakref.ref[Log], close_lock: threading.Lock) -> None:
    """Start the background jobs in a moment, unless the log is closed, or garbage, before."""
    if not close_lock.acquire(timeout=_FIRST_SECONDS) and (opened := log()) is not None:
        opened._start_maintenance()


def _reopen(open_root: Callable[[], Root], maintenance_config: MaintenanceConfig | None) -> Log:
    return Log(open_root(), maintenance_config)


def open(  # noqa: A001 - as in `embedlog.open`, like `shelve.open` and `lmdb.open`
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    mode: Literal["rw", "r"] = "rw",
    durability: Durability = "os",
    visibility: Visibility = "append",
    clock: Callable[[], int] | None = None,
    auto_create_topics: bool = True,
    lock_timeout: float = 10.0,
    maintenance: bool | MaintenanceOptions | Mapping[str, object] = True,
    unsafe_filesystem: bool = False,
    allow_pickle: bool = False,
    racks: Mapping[str | os.PathLike[str], str | None] | None = None,
    must_exist: bool = False,
    files: Callable[..., Files] = Files,
) -> Log:
    """Open a log, or create it; any number of processes may have it open.

    Args:
        path: A directory on a local disk, also as ``file:///path`` or ``embedlog:///path``; or
            several, each on a disk of its own, among which the partitions and their copies are
            spread.  Any directory of a log opens the whole log.
        mode: ``"rw"``, or ``"r"`` to read only.
        durability: What an acknowledged record survives: ``"os"`` the death of any process
            at any instant, ``"fsync"`` also a power cut.
        visibility: When consumers of this handle see a record: ``"append"`` as soon as it
            is acknowledged, ``"durable"`` once it would survive a power cut.
        clock: Returns milliseconds since 1970; by default the system's clock.
        auto_create_topics: Create a topic with default settings at the first write to it.
        lock_timeout: Seconds to wait for another process before `LockTimeoutError`.
        maintenance: Whether this process may run the maintenance jobs: retention, compaction
            and others.  One process at a time runs them, with its own settings, which are
            Kafka's for brokers, such as ``{"log.cleaner.threads": 2}``.
        unsafe_filesystem: Allow NFS, SMB, 9p, FUSE and other remote file systems: only safe
            while no other host opens the log, not even with ``mode="r"``.
        allow_pickle: Read topics whose serializer is ``"pickle"``: reading one can run any code
            that its writers chose.
        racks: The racks of directories of a log over several, by path, as Kafka's `broker.rack`:
            what fails together has the same, and the copies of a partition are in different ones.
            They are kept in the log.
        must_exist: Create no log where there is none, such as where its disk is not mounted.
        files: The file system; for tests.

    Raises:
        NotALogError: The path is a file, a directory with other contents, or an address such
            as ``localhost:9092`` or ``s3://bucket``; or there is no log, and it must exist.
        UnsupportedFormatError: Another version of embedlog wrote it, with another format.
        UnsupportedFilesystemError: It is a remote file system, or any user may replace its
            files.
        CorruptionError: The catalog is damaged and has no copy.
        StorageError: The file system refused an operation; ``errno`` says why.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory, open(directory) as log:
    ...     log.create_topic("flights", partitions=4)
    ...     log.topics()
    <Topic flights: 4 partitions, 0 records>
    ['flights']
    """
    for name, value, choices in (
        ("mode", mode, ("rw", "r")),
        ("durability", durability, DURABILITIES),
        ("visibility", visibility, VISIBILITIES),
    ):
        check_choice(name, value, choices)
    config = None
    if maintenance is not False:
        config = MaintenanceConfig.parse({} if maintenance is True else maintenance)
    root = open_root(
        path,
        mode=mode,
        durability=durability,
        visibility=visibility,
        clock=clock or _now_ms,
        lock_timeout=lock_timeout,
        auto_create=auto_create_topics,
        unsafe_filesystem=unsafe_filesystem,
        files=files,
        allow_pickle=allow_pickle,
        racks=racks,
        must_exist=must_exist,
    )
    log = Log(root, config)
    if root.replicated:
        # Without it, no process would bring back a directory to which nothing is written.
        log._start_maintenance()
    else:
        log._start_maintenance_soon()
    return log


LogPath = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""One directory of a log, or several."""


def open_root(
    path: LogPath,
    *,
    racks: Mapping[str | os.PathLike[str], str | None] | None = None,
    **options: Any,
) -> Root:
    """Open the root of a log in one directory, or in several."""
    if isinstance(path, list | tuple):
        paths = [directory_of(each) for each in path]
    else:
        try:
            return audit.subscribe(Root(directory_of(cast("str", path)), **options))
        except HasReplicasError:
            paths = [directory_of(cast("str", path))]
    # Imported here: most logs are in one directory.
    from embedlog.files.paths import real_path
    from embedlog.replication.member_file import real_paths
    from embedlog.replication.root import ReplicatedRoot

    labels = {real_path(directory_of(each)): rack for each, rack in (racks or {}).items()}
    return audit.subscribe(ReplicatedRoot(real_paths(paths), racks=labels, **options))


def open_logs() -> list[Log]:
    """Return the logs that this process has open."""
    return list(_open_logs)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise unless an argument is one of some texts.

    Raises:
        InvalidConfigError: It is not.
    """
    if value not in choices:
        raise InvalidConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


@atexit.register
def _close_all() -> None:
    for log in open_logs():
        try:
            # An error, Ctrl-C or `sys.exit` may have ended the program amid a record.
            log._closing(autocommit=False).close()
        except EmbedlogError as error:
            # At the exit of the interpreter there is no caller to raise it to.
            _logger.error("Cannot close %s: %s", log.path, error)
