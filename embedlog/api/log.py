"""`open` and `Log`: the log root as its users see it."""

from __future__ import annotations

import atexit
import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
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
    overload,
)

from embedlog.api.housekeeping import Housekeeping, Progress, now_ms
from embedlog.api.opening import check_choice, open_root
from embedlog.catalog import (
    INTERNAL,
    refuse_differences,
    refuse_internal,
    refuse_other_schema,
)
from embedlog.config import MaintenanceConfig, TopicConfig
from embedlog.display import plural, public_names
from embedlog.errors import (
    EmbedlogError,
    IllegalStateError,
    InvalidConfigError,
    ReplicaNotAvailableError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
    no_attribute,
)
from embedlog.files import Files
from embedlog.forks import new_lock
from embedlog.lazy import logging
from embedlog.partition import (
    DURABILITIES,
    VISIBILITIES,
    Durability,
    PartitionLog,
    Visibility,
)
from embedlog.partition.tail import Tail, peek_tail
from embedlog.record import K, TopicPartition, V
from embedlog.root.root import Root, check_root
from embedlog.serializers import SerializerName
from embedlog.tasks import in_thread

if TYPE_CHECKING:
    from datetime import timedelta

    import polars

    from embedlog.api.at import LogAt
    from embedlog.api.consumer_group import Groups
    from embedlog.api.dead_letters import DeadLetters
    from embedlog.api.failover import Mirrors
    from embedlog.api.replicas import Replicas
    from embedlog.api.snapshots import Snapshots
    from embedlog.api.topic import Topic
    from embedlog.api.transaction_block import Transaction
    from embedlog.audit.comparison import AuditResult
    from embedlog.config.options import (
        ConsumerOptions,
        MaintenanceOptions,
        ProducerOptions,
        ShareConsumerOptions,
        TopicOptions,
    )
    from embedlog.consumer.consumer import Consumer
    from embedlog.convert import ConversionResult
    from embedlog.metrics import Metrics, Sample
    from embedlog.producer import Producer
    from embedlog.registry.schema_registry import SchemaRegistry
    from embedlog.root.verify import Finding
    from embedlog.schemas.infer import SchemaLike
    from embedlog.schemas.topic_schema import TopicSchema
    from embedlog.share.share_consumer import ShareConsumer
    from embedlog.snapshots.backup import BackupResult
    from embedlog.snapshots.snapshot import Snapshot
    from embedlog.times import When

Client = TypeVar("Client")
"""A producer, a consumer, or a server."""
_logger = logging.getLogger("embedlog.api")
_HINTS = {
    "create_topics": "call log.create_topic(name, partitions, config) for each",
    "delete_topics": "call log.delete_topic(name) for each",
    "list_topics": "call log.topics()",
    "send": "call log.producer(), and send(topic, value) of what it returns",
    "subscribe": "call log.consumer(topic, ...)",
    "group": "use log.groups[name]",
    "list_consumer_groups": "use log.groups",
    "describe_consumer_groups": "call log.groups[name].describe()",
    "delete_consumer_groups": "call log.groups[name].delete()",
    "schemas": "use log.schema_registry",
    "failover": "call log.mirrors.failover()",
    "add_replica": "call log.replicas.add(path)",
    "remove_replica": "call log.replicas.remove(path)",
    "maintain": "call log.housekeeping.run()",
    **{
        name: f"call log.housekeeping.{name}()"
        for name in ("compact", "hold", "leases", "rebuild_index", "repair", "share", "verify")
    },
    **{
        name: f"call log.replicas.{name}()"
        for name in ("cancel_reassignment", "elect_leaders", "reassign")
    },
}
"""What to call instead of methods of Kafka's clients, and of those that a noun has."""
_open_logs: weakref.WeakSet[Log] = weakref.WeakSet()


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


class Log:
    """An open log root, with its topics and consumer groups; returned by `open`.

    Any thread may use it, and a forked child may continue to use it.  It pickles as its
    path and options.
    """

    def __init__(
        self, root: Root | None = None, maintenance_config: MaintenanceConfig | None = None
    ) -> None:
        self.root = check_root(root, "embedlog.open(path)")
        self._housekeeping = Housekeeping(self.root, maintenance_config)
        self._children: weakref.WeakSet[Any] = weakref.WeakSet()
        self._client_ids: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        """Producers and consumers, with their names in the metrics."""
        self._client_numbers = itertools.count(1)
        self._clients_lock = new_lock()
        self._transactional: dict[str, list[tuple[Any, Producer[Any, Any]]]] = {}
        """The producers of `transaction`, with their settings, by name: one for each, but for the
        empty one all that are in no block."""
        self._transactional_lock = new_lock()
        _open_logs.add(self)

    @property
    def path(self) -> str:
        """The directory."""
        return self.root.path

    @property
    def durability(self) -> Durability:
        """``"os"`` or ``"fsync"``; see `open`."""
        return self.root.durability

    # Nouns

    @property
    def groups(self) -> Groups:
        """The consumer groups by name: describe them, and reset or delete their offsets."""
        from embedlog.api.consumer_group import Groups

        return Groups(self.root)

    @property
    def replicas(self) -> Replicas:
        """The directories of the log: list, add and remove them, and move copies among them."""
        from embedlog.api.replicas import Replicas

        return Replicas(self)

    @property
    def mirrors(self) -> Mirrors:
        """The mirrors that copy to this log, and the failover to what they copied."""
        from embedlog.api.failover import Mirrors

        return Mirrors(self.root)

    @property
    def schema_registry(self) -> SchemaRegistry:
        """The schema registry of the log: subjects, their versions, and compatibility."""
        from embedlog.registry.schema_registry import SchemaRegistry

        return SchemaRegistry(self.root)

    @property
    def housekeeping(self) -> Housekeeping:
        """The background jobs, compaction and leases, and the check and repair of the files."""
        return self._housekeeping

    @property
    def snapshots(self) -> Snapshots:
        """The snapshots by name: list and delete them; `snapshot` takes one."""
        from embedlog.api.snapshots import Snapshots

        return Snapshots(self.root)

    def dead_letters(self, topic: str) -> DeadLetters:
        """Return the records that groups gave up and put into a topic, to look at and to replay.

        Raises:
            UnknownTopicOrPartitionError: There is no such topic.
        """
        from embedlog.api.dead_letters import DeadLetters

        return DeadLetters(self, topic)

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
            from embedlog.schemas.infer import columns_of
            from embedlog.schemas.settings import check_typed_config
            from embedlog.schemas.topic_schema import first_version

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
        from embedlog.schemas.evolution import changed_schema, renamed
        from embedlog.schemas.infer import columns_of
        from embedlog.schemas.settings import check_typed_config

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
        from embedlog.api.topic import Topic

        info = self.root.topic(name)
        self._housekeeping._start()
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

    # Topics as they were

    def snapshot(
        self,
        name: str,
        topics: str | Iterable[str] | None = None,
        *,
        expires: timedelta | str | None = "7d",
    ) -> Snapshot:
        """Take a snapshot: the ends of all partitions as of one instant, and keep their records.

        Neither retention nor compaction removes a record of it until it expires or is deleted,
        also after a reboot; ``retention.bytes.hard`` and `delete_records` ignore it.  Its records
        are flushed, and described in the file ``snapshots/NAME.json``, which
        `embedlog.open_snapshot` reads from any host.

        Args:
            name: At most 200 letters, digits, '.', '_' and '-'.
            topics: The topics; by default all but internal ones.
            expires: How long to keep it, such as ``"12h"``; None until it is deleted.

        Returns:
            The snapshot, whose records `at` shows.

        Raises:
            SnapshotAlreadyExistsError: There is one of this name.
            UnknownTopicOrPartitionError: There is no such topic.
            InvalidConfigError: The name, or the time, is not valid.
            DurabilityError, StorageError: A flush or a write failed; no snapshot was taken.
        """
        from embedlog.api.snapshots import take

        return take(self.root, name, topics, expires)

    def backup(
        self,
        target: str | os.PathLike[str],
        *,
        verify: bool = False,
        max_bytes_per_second: float | None = None,
        progress: Progress | None = None,
    ) -> BackupResult:
        """Write a backup of all topics, groups, producers and schemas as of one instant.

        `embedlog.restore` makes a log of it.  Writers and readers continue.  If the target has
        backups of this log, only what is new is copied: sealed segments once.  If it is killed,
        repeat it: it continues.

        Args:
            target: A directory, or a URL for fsspec, such as ``s3://bucket/backup``, for which
                the extra ``embedlog[fsspec]`` must be installed.
            verify: Also read all files that the target has already, and copy those again whose
                checksums differ.
            max_bytes_per_second: How fast to copy at most.
            progress: Called with the bytes done, and all bytes.

        Raises:
            IllegalStateError: The target is a log, or has backups of another one.
            StorageError: A file could not be read or written; nothing else was changed.
            LockTimeoutError: Another process makes a backup.
        """
        from embedlog.api.snapshots import back_up

        return back_up(self.root, target, verify, max_bytes_per_second, progress)

    def clone(self, path: str | os.PathLike[str]) -> None:
        """Make another log of this one as of now; it shares the bytes of the sealed segments.

        By hard links, or by blocks that are copied when they change, where the file system can;
        otherwise they are copied.  Both logs go on by themselves.  If it is killed, repeat it.

        Args:
            path: A new or empty directory.

        Raises:
            NotALogError, IllegalStateError: The directory holds files, or a log.
            StorageError: A file could not be made.
        """
        from embedlog.api.snapshots import clone

        clone(self.root, path)

    def at(self, when: Snapshot | When) -> LogAt:
        """Return the topics as they were: of a snapshot, or before a time.

        They do not move: however often they are read, they have the same records.  Those of a
        snapshot are kept; of those before a time, retention and compaction may remove some.

        Args:
            when: A snapshot, or a time, as in `TopicView.between`: in each partition, the records
                before the first one at or after it, of those that there are now.

        Raises:
            ValueError, TypeError: It is no time.
        """
        from embedlog.api.at import LogAt

        return LogAt(self, when)

    def partition(self, topic: str, number: int) -> PartitionLog:
        """Return the log of one partition, which producers and consumers use."""
        self._housekeeping._start()
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

        frame = sql(self._views(), query, files=files)
        return collect(frame) if eager else frame

    def _views(self) -> dict[str, Topic]:
        views = {}
        for name in self.topics(internal=True):
            with suppress(UnknownTopicOrPartitionError):  # It was deleted meanwhile.
                views[name] = self.topic(name)
        return views

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
            TopicAlreadyExistsError, IllegalStateError: The target was not made by this conversion.
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
                f"Settings must be passed by name, got {refused[0]!r}; call "
                "log.producer(acks=1), or log.producer(**config), and pass the topic to send()"
            )
        return self._adopt(Producer(self.root, **config), "producer")

    def transaction(
        self, name: str = "", **config: Unpack[ProducerOptions[K, V]]
    ) -> Transaction[K, V]:
        """Return a context manager for a transaction; its block sends with the producer it yields.

        What the block sends, in any topics, and the positions that it passes to
        ``commit_offsets``, become visible in one step at its end, or, after an exception or a
        kill, not at all.

            with log.transaction("billing") as t:
                t.send("invoices", invoice, key=customer)
                t.commit_offsets(consumer)

        In a task it is ``async with``; ``await`` begins the transaction, and returns the producer.
        A task that is cancelled before the commit begins has published nothing.

        Args:
            name: The ``transactional_id``: a program that uses it later fences those that used
                it before.  Without a name only members of groups fence each other.
            config: Other settings of the producer, which is kept for the next transaction.

        Raises:
            IllegalStateError: A transaction of this name is open.
            InvalidProducerEpochError: Another program has begun to use the name.
            CommitFailedError: The consumer lost a partition; nothing was committed.
            ConflictError: Somebody was faster than a record with a condition, likewise.
        """
        from embedlog.api.transaction_block import Transaction

        return Transaction(
            partial(self._take_transactional, name, config),
            partial(self._give_back, name, config),
        )

    def _take_transactional(self, name: str, config: Any) -> Producer[Any, Any]:
        """Return a producer whose transactions are initialized: that of a name, or a free one."""
        with self._transactional_lock:
            for_name = self._transactional.setdefault(name, [])
            before, kept = for_name.pop() if for_name else (None, None)
            if kept is None or before != config or kept._closed:
                producer = self.producer(**{**config, "transactional_id": name})
                producer.init_transactions()
                if kept is not None:
                    kept.close()
                kept = producer
            if name:
                for_name.append((config, kept))
            return kept

    def _give_back(self, name: str, config: Any, producer: Producer[Any, Any]) -> None:
        if not name:
            with self._transactional_lock:
                self._transactional[name].append((config, producer))

    def consumer(self, *topics: str, **config: Unpack[ConsumerOptions[K, V]]) -> Consumer[K, V]:
        """Return a consumer; `embedlog.config.ConsumerConfig` has its settings (kafka-python's)."""
        from embedlog.consumer.consumer import Consumer

        return self._adopt(Consumer(self.root, *topics, **config), "consumer")

    def share_consumer(
        self, *topics: str, group: str, **config: Unpack[ShareConsumerOptions[K, V]]
    ) -> ShareConsumer[K, V]:
        """Return a consumer of a share group: records one by one, to any number of consumers.

        Its settings are those of `embedlog.config.ShareConsumerConfig`, and of consumers;
        ``log.groups[group].alter`` sets those of the group.
        """
        from embedlog.share.share_consumer import ShareConsumer

        return self._adopt(ShareConsumer(self.root, *topics, group=group, **config), "consumer")

    def _adopt(self, client: Client, kind: str) -> Client:
        """Close a producer, consumer or server with this log, and include it in its metrics."""
        self._housekeeping._start()
        with self._clients_lock:
            number = next(self._client_numbers)
            config = getattr(client, "config", None)  # A server has none.
            name = (config and config.client_id) or f"{kind}-{number}"
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

    # Maintenance and retention

    def delete_records(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Delete the records below an offset of each partition; -1 is the log end.

        Takes effect immediately and durably, ignoring leases and consumer groups.  Returns
        the new log start offsets.

        Raises:
            OffsetOutOfRangeError: An offset is past the end; partitions before it in the
                order of ``offsets`` are done.
        """
        from embedlog.consumer.arguments import to_topic_partition
        from embedlog.retention import delete_records

        below = {to_topic_partition(each): offset for each, offset in offsets.items()}
        return {
            partition: delete_records(self.root.partition(*partition), offset)
            for partition, offset in below.items()
        }

    def metrics(self) -> Metrics:
        """Return metrics by name, in groups, with the names of Kafka's exporters.

        There are groups for each partition (``"kafka.log.orders-0"``), consumer group
        (``"consumergroup.billing.orders-0"``) and background job.  The metrics of open producers
        and consumers that this handle created, and of servers of it, follow, with their client ids
        before the group (``"producer-1.producer-metrics"``); streams of a consumer are numbered
        (``"consumer-2-stream-1.consumer-metrics"``).  The page on monitoring lists all names.

        Raises:
            LogDeletedError: The log was deleted while it was open, so its numbers stay as they are.
        """
        from embedlog.metrics import nested

        return nested(self._samples())

    def prometheus(self, labels: Mapping[str, str] | None = None) -> str:
        """Return the same metrics in Prometheus' text format, for an HTTP endpoint or a file.

        Args:
            labels: Labels to add to each sample, such as ``{"log": "orders"}``.

        Raises:
            InvalidConfigError: A label's name is not valid.
            LogDeletedError: As `metrics`.
        """
        from embedlog.metrics import prometheus_text

        return prometheus_text(self._samples(), labels or {})

    def _samples(self) -> Iterator[Sample]:
        from embedlog.api.log_metrics import log_samples

        yield from log_samples(self.root)
        with self._clients_lock:
            clients = list(self._open_clients())
        for client, name in clients:
            for sample in client._samples():
                yield sample._replace(labels={"client_id": name, **sample.labels})

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
            tiers: Only these of ``log``, ``producer``, ``copy``, ``group``, ``pipeline`` and
                ``mirror``.

        Raises:
            UnknownTopicOrPartitionError: There is no such topic.
            InvalidConfigError: The window, a time or a tier is not valid.
            CorruptBatchError: A batch is damaged.
        """
        from embedlog.audit.comparison import audit
        from embedlog.times import time_argument

        now_ms = self.root.clock()
        since_ms = None if since is None else time_argument("since", since, now_ms)
        until_ms = None if until is None else time_argument("until", until, now_ms)
        return audit(self.root, topic, _width_ms(window), since_ms, until_ms, tiers)

    def report(self, findings: Sequence[Finding] | None = None) -> str:
        """Return a page of HTML about the log, which needs no other file, and has no scripts.

        It has the topics, the segments of each partition, consumer groups with their lags,
        directories, mirrors, and damage that was recorded.  What cannot be read is named there.

        Args:
            findings: What ``log.housekeeping.verify()`` returned, to show it too.

        Raises:
            LogDeletedError: The log was deleted while it was open.
        """
        from embedlog.api.log_report import report_html

        return report_html(self, findings)

    # Closing

    def close(self) -> None:
        """Flush and close producers, consumers and the log; later calls raise `ClosedError`."""
        self._closing(autocommit=True).close()

    def _closing(self, autocommit: bool) -> ExitStack:
        """Return a stack of closers: the last one runs first, and all run if one raises."""
        closing = ExitStack()
        if self.root.closed:
            return closing
        self._housekeeping._stop_opening()
        closing.callback(_open_logs.discard, self)
        closing.callback(self.root.close)
        for child in list(self._children):
            is_consumer = hasattr(child, "poll")
            closing.callback(child.close, **({"autocommit": autocommit} if is_consumer else {}))
        closing.callback(self._housekeeping._stop)
        return closing

    def _check_no_clients(self) -> None:
        """Raise if this handle has clients or servers: it is about to be opened again."""
        with self._clients_lock:
            if next(self._open_clients(), None) is not None:
                raise IllegalStateError(
                    "The log has open producers, consumers or servers, and must be opened again",
                    path=self.path,
                    todo="Close them, repeat this, and create them again.",
                )

    def _close_to_reopen(self) -> None:
        """Close the root, which `reopen` then opens again."""
        self._check_no_clients()
        self._housekeeping._stop()
        self.root.close()

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

    async def aclose(self) -> None:
        """Do as `close`; for tasks."""
        await self._aclose(None)

    async def _aclose(self, error: BaseException | None) -> None:
        for child in list(self._children):
            if hasattr(child, "poll"):  # Its listener may be asynchronous.
                await child.aclose(autocommit=error is None)
        await in_thread(self.__exit__, None, error, None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        await self._aclose(error)

    def __reduce__(
        self,
    ) -> tuple[Callable[..., Log], tuple[Callable[[], Root], MaintenanceConfig | None]]:
        open_root, _ = self.root.__reduce__()
        return _reopen, (open_root, self._housekeeping._config)

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
        from embedlog.display import html_table

        if self.root.closed:
            return html_table(f"Log {self.path}: closed", (), ())
        cells = [_topic_cells(self.topic(name)) for name in self.topics()]
        title = f"Log {self.path}{'' if cells else ': no topics'}"
        tables = html_table(title, _TOPIC_HEADS, cells)
        return tables + (self.groups._repr_html_() if self.groups else "")


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
    directories = plural(len(image.directories), "directory", "directories")
    return f", {len(image.online)} of {directories} online"


def _described(schema: TopicSchema) -> SchemaDescription:
    from embedlog.schemas.values import python_values

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


def _topic_cells(topic: Topic) -> tuple[object, ...]:
    from embedlog.progress import format_bytes

    policy = topic.config["cleanup.policy"]
    size = format_bytes(topic.size_bytes())
    return topic.name, topic.partitions, f"{len(topic):,}", size, policy


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
    from datetime import timedelta

    from embedlog.times import parse_duration

    width = parse_duration(window) if isinstance(window, str) else window
    if isinstance(width, timedelta):
        return width // timedelta(milliseconds=1)
    if type(width) is not int:
        raise InvalidConfigError(f"window must be a duration such as '1h', got {window!r}")
    return width


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
        clock=clock or now_ms,
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
        log._housekeeping._start()
    else:
        log._housekeeping._start_soon()
    return log


def open_logs() -> list[Log]:
    """Return the logs that this process has open."""
    return list(_open_logs)


@atexit.register
def _close_all() -> None:
    for log in open_logs():
        try:
            # An error, Ctrl-C or `sys.exit` may have ended the program amid a record.
            log._closing(autocommit=False).close()
        except EmbedlogError as error:
            # At the exit of the interpreter there is no caller to raise it to.
            _logger.error("Cannot close %s: %s", log.path, error)
