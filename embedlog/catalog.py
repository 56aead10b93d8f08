"""Topics, their settings, and the manifest: which segment files exist.

The manifest in `state` decides which files exist: a file that it does not name is
garbage, a named empty active segment that is missing is created again, and a named
sealed segment that is missing is an error.  Hence the order: name a file, then create
it; drop the name, then unlink the file.

A function that takes a transaction is one step of the caller's transaction.  The rows
are declared in `keyspace`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from embedlog import keyspace, kv
from embedlog.batch.wire import HEADERS, TOMBSTONES
from embedlog.config import TopicConfig
from embedlog.errors import (
    CorruptionError,
    InvalidPartitionError,
    InvalidPartitionsError,
    InvalidProducerEpochError,
    InvalidSchemaError,
    InvalidTopicError,
    MirroredTopicError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
)
from embedlog.hints import FAILOVER, VERIFY, Hint, alter_topic
from embedlog.keyspace import (
    COUNTERS,
    PARTITION_KEY,
    SCHEMAS,
    SEGMENTS,
    TOPICS,
    UNCOMMITTED_FILES,
)

if TYPE_CHECKING:
    from embedlog.schemas.topic_schema import TopicSchema

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
SEGMENT_NAME = re.compile(r"(\d{20})-(\d+)\.arrows")
SEGMENT_FILES = re.compile(r"\d{20}-\d+\.(arrows|keys)")
"""A segment file, or its key index."""
"""A `SegmentInfo.file_name`: the base offset, and the id."""
FORBIDDEN_ENDS = (".tmp", ".deleted")
INTERNAL = "__"
"""Prefix of internal topics, which are listed on request only."""
ACTIVITY = "__activity"
"""The internal topic of what happened; see `maintenance.activity`."""
AUDIT = "__audit"
"""The internal topic of what producers and groups counted; see `audit`."""
OWN_TOPICS = (ACTIVITY, AUDIT)
"""The topics that only embedlog itself creates and writes to."""

MAX_PARTITIONS = 20_000
"""Of one topic.  To create this many takes a third of a second, during which no other process
can create a topic or roll a segment."""

_SEALED, _HAS_TIMESTAMP, _DENSE = 1, 2, 4
"""Flags of a segment's row."""
_FLAGS_AT = 4
"""Position of the flags in a row, behind the checksum."""
_MAX_OFFSET = (1 << 63) - 1


class TopicInfo(NamedTuple):
    """A topic; its ``id`` tells it from an earlier topic of the same name."""

    name: str
    id: int
    partitions: int
    created_ms: int
    config: TopicConfig
    schema_version: int = 0
    """The current version of its schema; 0 for a topic of bytes."""

    @property
    def directory(self) -> str:
        """The directory of its partitions, below the root."""
        return f"topics/{self.name}-{self.id}"

    def key(self, partition: int) -> bytes:
        """The part of keys that the rows of one partition share."""
        return PARTITION_KEY.pack(self.id, partition)

    def lock_path(self, partition: int) -> str:
        """The lock file of one partition, below the root."""
        return f"locks/{self.id}-{partition}"

    def put(self, txn: kv.Txn) -> None:
        """Write its row."""
        fields: dict[str, Any] = {
            "id": self.id,
            "partitions": self.partitions,
            "created_ms": self.created_ms,
            "config": self.config.overrides(),
        }
        if self.schema_version:
            fields["schema_version"] = self.schema_version
        TOPICS.put(txn, self.name, value=fields)


@lru_cache(maxsize=1024)
def _topic(key: bytes, row: bytes) -> TopicInfo:
    """Return the topic of a row; cached, since the same rows are read again and again."""
    fields: dict[str, Any] = TOPICS.load(key, row)
    fields["config"] = TopicConfig.parse(fields["config"])
    return TopicInfo(*TOPICS.parse_key(key), **fields)


class SegmentInfo(NamedTuple):
    """One line of the manifest; the active segment has no ``next_offset`` yet."""

    base_offset: int
    id: int
    created_ms: int
    next_offset: int | None = None
    size: int = 0
    """Bytes of the file, with its end marker; only known once sealed."""
    end_position: int = 0
    """Where the batches end, and the end marker begins."""
    max_timestamp: int | None = None
    headers: bool = False
    appended_ms: int = 0
    """When its last batch was appended, as `Tail.appended_ms`; only known once sealed."""
    dense: bool = False
    """Whether each of its offsets has a record; if not, records must be counted."""
    tombstones: bool = False
    """Whether it has a column that marks tombstones, as typed topics have."""
    schema_version: int = 0
    """The version of the topic's schema that its batches have; 0 for a topic of bytes."""

    @property
    def column_flags(self) -> int:
        """The flags of the columns that its batches have besides those of every segment."""
        return (HEADERS if self.headers else 0) | (TOMBSTONES if self.tombstones else 0)

    @property
    def key(self) -> tuple[int, int]:
        """The fields that name it in keys, after the partition."""
        return self[:2]

    @property
    def sealed(self) -> bool:
        """Whether the file is complete and never written again."""
        return self.next_offset is not None

    @property
    def file_name(self) -> str:
        """Begins with the base offset at a fixed width, so that `ls` sorts by offset."""
        return f"{self.base_offset:020d}-{self.id}.arrows"


class PartitionInfo(NamedTuple):
    """The durable facts about a partition, besides its segments."""

    start_offset: int = 0
    recovery_offset: int = 0
    """Everything below was flushed: recovery need not look at it."""
    leader_epoch: int = 0
    appended_ms: int = 0
    """When everything below `appended_offset` was appended at the latest, as `Tail.appended_ms`."""
    appended_offset: int = 0


PARTITIONS = keyspace.PARTITIONS.typed(PartitionInfo)


def check_topic_name(name: object) -> str:
    """Return a valid topic name.

    Raises:
        InvalidTopicError: Kafka refuses the name, or a path could escape through it.
    """
    if not isinstance(name, str):
        raise InvalidTopicError(f"Topic name must be a str, got {type(name).__name__}")
    if not NAME.fullmatch(name) or name.endswith(FORBIDDEN_ENDS):
        raise InvalidTopicError(
            f"{name!r} is not a valid topic name",
            todo="Use 1 to 200 letters, digits, '.', '_' or '-', not starting with '.' or '-'.",
        )
    return name


def refuse_internal(name: str) -> None:
    """Raise for the topics that only embedlog itself creates and writes to.

    Raises:
        InvalidTopicError: It is one of them.
    """
    if name in OWN_TOPICS:
        raise InvalidTopicError(
            f"Only embedlog itself creates, writes to and deletes {name}",
            todo="You can read it and change its settings.",
            topic=name,
        )


def check_partition(topic: str, number: object) -> None:
    """Raise unless ``number`` is an int.

    Raises:
        InvalidPartitionError: It is not.
    """
    if isinstance(number, bool) or not isinstance(number, int):
        raise InvalidPartitionError(
            f"partition must be an int, got {number!r}",
            topic=topic,
            todo="Partitions are numbered from 0.",
        )


SchemaChange: TypeAlias = "Callable[[TopicSchema, Sequence[TopicSchema]], TopicSchema]"
"""Returns the next version of a schema, given the current one and those before."""


NewPartitions = Callable[[kv.Txn, TopicInfo, int], None]
"""Gets a topic that was just created or has grown, and the number of its first new partition."""


class Catalog:
    """Reads and changes the catalog; each call is one transaction on `state`."""

    def __init__(self, state: kv.Store) -> None:
        self._state = state
        self.version = state.version
        """Returns a number that grows with every change of anything in `state`."""
        self._version = -1
        self._cache: dict[str, TopicInfo] = {}
        self._schemas: dict[tuple[int, int], TopicSchema] = {}
        """By the topic's id and the version."""

    def topics(self) -> dict[str, TopicInfo]:
        """Return every topic by name, sorted."""
        return self._state.read(lambda txn: {topic.name: topic for topic in topics(txn)})

    def topic(self, name: str) -> TopicInfo:
        """Return a topic; from memory while nothing has changed.

        Raises:
            UnknownTopicOrPartitionError: There is no such topic; the error suggests a similar name.
        """
        version = self._state.version()
        if version != self._version:
            self._cache, self._version = {}, version
        # A local reference: another thread may start the cache of a later version before
        # the topic that is read here is stored.
        cache = self._cache
        topic = cache.get(name)
        if topic is None:
            check_topic_name(name)
            # Not `get`: this is rare, and `read` checks whether the database is whole.
            topic = self._state.read(lambda txn: find_topic(txn, name))
            if topic is None:
                from difflib import get_close_matches

                similar = get_close_matches(name, self.topics(), n=1)
                todo: str = Hint(
                    f"Create it with log.create_topic({name!r}).",
                    f"Create it with `embedlog topics create {name}`.",
                )
                if similar:
                    todo = f"Did you mean {similar[0]!r}?"
                if name == ACTIVITY:
                    todo = "Housekeeping creates it with the first event."
                elif name == AUDIT:
                    todo = "It begins with the first client of a topic that has audit=true."
                raise UnknownTopicOrPartitionError("There is no such topic", topic=name, todo=todo)
            cache[name] = topic
        return topic

    def schema(self, topic: TopicInfo, version: int | None = None) -> TopicSchema | None:
        """Return a version of a topic's schema, by default the current one; None if it is bytes.

        Raises:
            CorruptionError: The row is damaged, or missing.
        """
        version = topic.schema_version if version is None else version
        if not version:
            return None
        key = topic.id, version
        schema = self._schemas.get(key)
        if schema is None:
            packed = SCHEMAS.get(self._state, *key)
            if packed is None:
                raise CorruptionError(
                    f"Version {version} of the topic's schema is missing",
                    topic=topic.name,
                    todo=VERIFY,
                )
            # A version never changes, so it is never read again.
            from embedlog.schemas.topic_schema import TopicSchema

            schema = TopicSchema.unpack(version, packed).changed(topic_id=topic.id)
            schema = self._schemas.setdefault(key, schema)
        return schema

    def schema_versions(self, topic: TopicInfo) -> list[TopicSchema]:
        """Return all versions of a topic's schema, in order; none for a topic of bytes."""
        versions = self._state.read(lambda txn: list(SCHEMAS.keys(txn, topic.id)))
        schemas = [self.schema(topic, version) for _, version in versions]
        return [schema for schema in schemas if schema is not None]

    def alter_schema(self, name: str, change: SchemaChange) -> TopicInfo:
        """Add the next version of a typed topic's schema.

        Args:
            name: The topic.
            change: Returns the next version, given the current one and those before; the current
                one if nothing changes.

        Raises:
            InvalidSchemaError: The topic is of bytes.
        """

        def changed(txn: kv.Txn, topic: TopicInfo) -> TopicInfo:
            if not topic.schema_version:
                raise InvalidSchemaError(
                    "The values of the topic are bytes, so it has no schema",
                    topic=name,
                    todo=Hint(
                        "Create a typed topic with log.create_topic(…, schema=…), and copy it.",
                        "Create a typed topic with `embedlog topics create TOPIC --schema-from "
                        "FILE`, and copy it.",
                    ),
                )
            *earlier, before = schema_versions(txn, topic.id)
            after = change(before, earlier)
            if after is before:
                return topic
            SCHEMAS.put(txn, topic.id, after.version, value=after.pack())
            return topic._replace(schema_version=after.version)

        return self._change(name, changed)

    def create_topic(
        self,
        name: str,
        partitions: int,
        config: TopicConfig,
        now_ms: int,
        schema: TopicSchema | None = None,
        *,
        assign: NewPartitions | None = None,
    ) -> TopicInfo:
        """Add a topic with one empty segment in each partition; the first use creates the files."""
        check_topic_name(name)
        check_partition_count(partitions)

        def step(txn: kv.Txn) -> TopicInfo:
            if TOPICS.exists(txn, name):
                raise TopicAlreadyExistsError(
                    "The topic already exists",
                    topic=name,
                    todo=Hint("To use it, pass exist_ok=True.", "To use it, add --if-not-exists."),
                )
            number, version = next_number(txn, "topic"), 0 if schema is None else schema.version
            topic = TopicInfo(name, number, partitions, now_ms, config, version)
            topic.put(txn)
            if schema is not None:
                SCHEMAS.put(txn, number, version, value=schema.pack())
            _add_partitions(txn, topic, 0, now_ms)
            if assign is not None:
                assign(txn, topic, 0)
            return topic

        return self._state.write(step)

    def grow_topic(
        self,
        name: str,
        partitions: int,
        now_ms: int,
        *,
        assign: NewPartitions | None = None,
        mirror: str = "",
    ) -> TopicInfo:
        """Add partitions to a topic; existing records stay where they are.

        Raises:
            MirroredTopicError: The topic is a copy, and the caller is not its ``mirror``.
        """
        check_partition_count(partitions)

        def grown(txn: kv.Txn, topic: TopicInfo) -> TopicInfo:
            if topic.config.mirror_source not in ("", mirror):
                raise MirroredTopicError(
                    f"The topic is a copy of {topic.config.mirror_source}, and only its mirror "
                    "adds partitions",
                    topic=name,
                    source=topic.config.mirror_source,
                    todo=FAILOVER,
                )
            if partitions < topic.partitions:
                raise InvalidPartitionsError(
                    f"A topic of {topic.partitions} partitions cannot shrink to {partitions}",
                    topic=name,
                    todo="The number of partitions can only grow.",
                )
            larger = topic._replace(partitions=partitions)
            _add_partitions(txn, larger, topic.partitions, now_ms)
            if assign is not None:
                assign(txn, larger, topic.partitions)
            return larger

        return self._change(name, grown)

    def alter_topic(self, name: str, changes: Mapping[str, object]) -> TopicInfo:
        """Change settings; None resets a setting to its default."""
        return self._change(
            name, lambda txn, topic: topic._replace(config=topic.config.changed(changes))
        )

    def _change(self, name: str, change: Callable[[kv.Txn, TopicInfo], TopicInfo]) -> TopicInfo:
        check_topic_name(name)

        def step(txn: kv.Txn) -> TopicInfo:
            topic = find_topic(txn, name)
            if topic is None:
                raise UnknownTopicOrPartitionError("There is no such topic", topic=name)
            changed = change(txn, topic)
            changed.put(txn)
            return changed

        return self._state.write(step)

    def retention_bytes(self) -> int | None:
        """Return how many bytes all topics together may hold; None if there is no limit."""
        return keyspace.RETENTION_BYTES.get(self._state)

    def put_retention_bytes(self, limit: int | None) -> None:
        """Set what `retention_bytes` returns."""

        table = keyspace.RETENTION_BYTES
        self._state.write(table.delete if limit is None else partial(table.put, value=limit))

    def delete_topic(
        self, info: TopicInfo, *, unassign: Callable[[kv.Txn], None] | None = None
    ) -> TopicInfo:
        """Delete the rows of a topic and its partitions, and note that its files must be deleted.

        Returns the topic as it was last; it may have more partitions than ``info``.

        Args:
            info: The topic.
            unassign: Called in the transaction.

        Raises:
            UnknownTopicOrPartitionError: Another process deleted it, and may have created
                another topic of that name.
        """

        def step(txn: kv.Txn) -> TopicInfo:
            topic = find_topic(txn, info.name)
            if topic is None or topic.id != info.id:
                raise UnknownTopicOrPartitionError("The topic was just deleted", topic=info.name)
            TOPICS.delete(txn, topic.name)
            keyspace.delete_partitions(txn, keyspace.STATE, map(topic.key, range(topic.partitions)))
            fields = {"name": topic.name, "partitions": topic.partitions}
            keyspace.DELETED_TOPICS.put(txn, topic.id, value=fields)
            if unassign is not None:
                unassign(txn)
            return topic

        return self._state.write(step)

    def named_producer(self, name: str) -> tuple[int, int] | None:
        """Return the (id, epoch) of the last producer of a name."""
        identity = keyspace.NAMED_PRODUCERS.get(self._state, name)
        return None if identity is None else (identity.producer_id, identity.producer_epoch)

    def producer_identity(
        self, name: str | None, before: tuple[int, int] | None = None
    ) -> tuple[int, int]:
        """Return a new producer's (id, epoch); a named one keeps its id, and its epoch grows.

        The epoch fences an older producer of the same name (KIP-98).

        Args:
            name: The name; None for a producer without one.
            before: What the last producer of the name must have.

        Raises:
            InvalidProducerEpochError: It has another; nothing was changed.
        """

        def step(txn: kv.Txn) -> tuple[int, int]:
            if name is None:
                return next_number(txn, "producer"), 0
            identity = keyspace.NAMED_PRODUCERS.get(txn, name)
            if before is not None and identity != before:
                raise InvalidProducerEpochError(
                    f"A newer producer has the name {name!r}", todo="Close this producer."
                )
            # Kafka assigns a new id when the epoch is exhausted (KIP-360).
            if identity is None or identity.producer_epoch >= 0x7FFE:
                identity = (next_number(txn, "producer"), 0)
            else:
                identity = (identity.producer_id, identity.producer_epoch + 1)
            keyspace.NAMED_PRODUCERS.put(txn, name, value=identity)
            return identity

        return self._state.write(step)


def check_partition_count(partitions: object) -> None:
    """Raise unless a topic may have this number of partitions.

    Raises:
        InvalidPartitionsError: It is not an int from 1 to `MAX_PARTITIONS`.
    """
    if not isinstance(partitions, int) or isinstance(partitions, bool):
        raise InvalidPartitionsError(f"partitions must be an int, got {partitions!r}")
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise InvalidPartitionsError(
            f"partitions must be from 1 to {MAX_PARTITIONS}, got {partitions}"
        )


def refuse_differences(
    info: TopicInfo, partitions: int | None, settings: Mapping[str, object]
) -> None:
    """Raise unless a topic has these settings and, if given, this number of partitions.

    Raises:
        InvalidPartitionsError, InvalidConfigError: They are not valid.
        TopicAlreadyExistsError: It has others; the error says which calls would apply these.
    """
    differences: dict[str, tuple[object, object]] = {}
    calls: list[Hint] = []
    if partitions is not None:
        check_partition_count(partitions)
        if partitions != info.partitions:
            differences["partitions"] = info.partitions, partitions
            call = f"log.create_partitions({info.name!r}, {partitions})"
            calls.append(Hint(call, f"embedlog topics alter {info.name} -p {partitions}"))
    before, after = info.config.to_dict(), info.config.changed(settings).to_dict()
    changes: dict[str, object] = {}
    for spelling, value in settings.items():
        name = str(spelling).replace("_", ".")
        if before[name] != after[name]:
            differences[name] = before[name], after[name]
            changes[name] = None if value is None else after[name]
    if changes:
        calls.append(alter_topic(info.name, changes))
    if not differences:
        return
    todo = _apply("To apply what was asked for", calls)
    if partitions is not None and partitions < info.partitions:
        todo = Hint("A topic cannot lose partitions.", "A topic cannot lose partitions.")
        if changes:
            todo = _apply("A topic cannot lose partitions; to apply the rest", calls[-1:])
    if changes.keys() & {"key.serializer", "value.serializer"}:
        todo += "A new serializer does not convert the records that are stored."
    settings_now = (f"{name} is {its!r}, not {new!r}" for name, (its, new) in differences.items())
    raise TopicAlreadyExistsError(
        f"The topic exists with other settings: {'; '.join(settings_now)}",
        todo=todo,
        topic=info.name,
        differences=differences,
    )


def _apply(why: str, calls: Sequence[Hint]) -> Hint:
    commands = " and ".join(f"`{call.shell}`" for call in calls)
    return Hint(f"{why}, call {' and '.join(calls)}.", f"{why}, run {commands}.")


def refuse_other_schema(
    info: TopicInfo, schema: TopicSchema | None, asked: TopicSchema | None
) -> None:
    """Raise unless a topic that exists has the schema that was asked for, if any was.

    Raises:
        TopicAlreadyExistsError: It has another.
    """
    if asked is None:
        return
    same = schema is not None and (
        schema.plain.equals(asked.plain)
        and schema.key == asked.key
        and schema.timestamp == asked.timestamp
    )
    if same:
        return
    columns = "bytes" if schema is None else str(schema.plain).replace("\n", ", ")
    raise TopicAlreadyExistsError(
        f"The topic exists with another schema: {columns}",
        todo=Hint(
            f"To change it, call log.alter_topic({info.name!r}, schema=…).",
            "To change it, use alter_topic in Python.",
        )
        if schema is not None
        else "Choose another name: a topic of bytes cannot become a typed one.",
        topic=info.name,
        differences={"schema": (schema, asked)},
    )


def _add_partitions(txn: kv.Txn, topic: TopicInfo, first: int, now_ms: int) -> None:
    for partition in range(first, topic.partitions):
        new_segment(txn, topic.key(partition), now_ms, topic.schema_version)
        PARTITIONS.put(txn, topic.key(partition), value=PartitionInfo())


# Steps of a caller's transaction


def topics(txn: kv.Txn) -> Iterator[TopicInfo]:
    """Yield all topics, by name."""
    return (_topic(*row) for row in kv.rows(txn, TOPICS.prefix()))


def find_topic(txn: kv.Txn, name: str) -> TopicInfo | None:
    """Return a topic, or None."""
    key = TOPICS.key(name)
    row = txn.get(key)
    return None if row is None else _topic(key, row)


def next_number(txn: kv.Txn, counter: str) -> int:
    """Return the next number of a counter, which is never returned again; it starts at 1."""
    number = last_number(txn, counter) + 1
    COUNTERS.put(txn, counter, value=number)
    return number


def last_number(txn: kv.Txn, counter: str) -> int:
    """Return the last number that `next_number` returned; 0 if there is none."""
    return COUNTERS.get(txn, counter) or 0


def raise_number(txn: kv.Txn, counter: str, number: int) -> None:
    """Make sure that `next_number` does not return ``number``."""
    if last_number(txn, counter) < number:
        COUNTERS.put(txn, counter, value=number)


def new_segment(txn: kv.Txn, key: bytes, now_ms: int, schema_version: int = 0) -> None:
    """Add the first segment of a partition to the manifest."""
    number = next_number(txn, "segment")
    segment = SegmentInfo(0, number, now_ms, dense=True, schema_version=schema_version)
    put_segment(txn, key, segment)


def adopt_topic(txn: kv.Txn, name: str, topic_id: int, partitions: int) -> bool:
    """Add a topic whose row was lost, but whose files exist; False if the name is taken.

    The caller adds its segments to the manifest.
    """
    topic = TopicInfo(name, topic_id, partitions, 0, TopicConfig())
    raise_number(txn, "topic", topic_id)
    if TOPICS.exists(txn, name):
        return False
    topic.put(txn)
    for partition in range(partitions):
        PARTITIONS.put(txn, topic.key(partition), value=PartitionInfo())
    return True


def deleted_topics(txn: kv.Txn) -> list[TopicInfo]:
    """Return the deleted topics of which files or rows may be left, without their settings."""
    return [
        TopicInfo(fields["name"], topic_id, fields["partitions"], 0, TopicConfig())
        for (topic_id,), fields in keyspace.DELETED_TOPICS.scan(txn)
    ]


def adopt_schema(txn: kv.Txn, name: str, schema: TopicSchema | None) -> None:
    """Add a version of a topic's schema that was lost, but that a segment has; None is none."""
    topic = find_topic(txn, name)
    if schema is None or topic is None or SCHEMAS.exists(txn, topic.id, schema.version):
        return
    SCHEMAS.put(txn, topic.id, schema.version, value=schema.pack())
    versions = schema_versions(txn, topic.id)
    # A segment does not name columns that were dropped, whose ids must not be used again.
    next_id = max(version.next_id for version in versions)
    last = versions[-1].changed(next_id=next_id)
    SCHEMAS.put(txn, topic.id, last.version, value=last.pack())
    if last.version > topic.schema_version:
        topic._replace(schema_version=last.version).put(txn)


def schema_versions(txn: kv.Txn, topic_id: int) -> list[TopicSchema]:
    """Return the versions of a topic's schema that the catalog has, in order."""
    from embedlog.schemas.topic_schema import TopicSchema

    versions = []
    for _, version in sorted(SCHEMAS.keys(txn, topic_id)):
        packed = SCHEMAS.get(txn, topic_id, version)
        assert packed is not None
        versions.append(TopicSchema.unpack(version, packed))
    return versions


# The manifest


def segments(txn: kv.Txn, key: bytes) -> list[SegmentInfo]:
    """Return a partition's part of the manifest, in offset order."""
    return [_segment(*row) for row in kv.rows(txn, SEGMENTS.prefix(key))]


def gapped_segments(txn: kv.Txn, key: bytes) -> list[SegmentInfo]:
    """Return the segments of a partition that are not dense, in offset order.

    Reads only one byte of the others, of which there may be thousands.
    """
    return [
        _segment(row_key, row)
        for row_key, row in kv.rows(txn, SEGMENTS.prefix(key))
        if not row[_FLAGS_AT] & _DENSE
    ]


def segment_at(txn: kv.Txn, key: bytes, offset: int) -> SegmentInfo | None:
    """Return the segment that contains ``offset``, or the first one if it is lower; by one seek.

    None if the partition has no segments: its topic was deleted.
    """
    prefix = SEGMENTS.prefix(key)
    with txn.cursor() as cursor:
        above = cursor.set_range(SEGMENTS.prefix(key, offset + 1))
        below = cursor.prev() if above else cursor.last()
        if below and cursor.key().startswith(prefix):
            return _segment(*cursor.item())
    return next((_segment(*row) for row in kv.rows(txn, prefix)), None)


def segments_between(txn: kv.Txn, key: bytes, first: int, stop: int) -> list[SegmentInfo]:
    """Return the segments with offsets in ``[first, stop)``, in offset order; by one scan.

    The first segment of the partition counts as one that holds every offset below it.
    """
    prefix, end = SEGMENTS.prefix(key), SEGMENTS.prefix(key, stop)
    with txn.cursor() as cursor:
        above = cursor.set_range(SEGMENTS.prefix(key, first + 1))
        below = cursor.prev() if above else cursor.last()
        start = cursor.key() if below and cursor.key().startswith(prefix) else prefix
    return [_segment(*row) for row in kv.rows_between(txn, start, end)]


def segment_after(txn: kv.Txn, key: bytes, base_offset: int) -> SegmentInfo | None:
    """Return the segment that follows the one at ``base_offset``; None if that is the last."""
    rows = kv.rows(txn, SEGMENTS.prefix(key), SEGMENTS.prefix(key, base_offset + 1))
    row = next(rows, None)
    return None if row is None else segment_at(txn, key, _segment(*row).base_offset)


def count_after(txn: kv.Txn, key: bytes, base_offset: int) -> int:
    """Return how many segments begin after ``base_offset``."""
    rows = kv.rows(txn, SEGMENTS.prefix(key), SEGMENTS.prefix(key, base_offset + 1))
    return sum(1 for _ in rows)


def last_segment(txn: kv.Txn, key: bytes) -> SegmentInfo | None:
    """Return the active segment; None if the topic was deleted."""
    return segment_at(txn, key, _MAX_OFFSET)


def is_new(txn: kv.Txn, key: bytes) -> bool:
    """Whether no record was ever flushed in a partition or moved to another segment."""
    segment, info = last_segment(txn, key), PARTITIONS.get(txn, key)
    return segment is not None and not segment.base_offset and not (info and info.recovery_offset)


def _segment(row_key: bytes, row: bytes) -> SegmentInfo:
    # The value first: the checksum covers the key, whose length may be damaged.
    (flags, end, created, latest, appended, size, position,
     columns, schema_version) = SEGMENTS.load(row_key, row)  # fmt: skip
    _, base, number = SEGMENTS.parse_key(row_key)
    next_offset = end if flags & _SEALED else None
    max_timestamp = latest if flags & _HAS_TIMESTAMP else None
    dense = flags & _DENSE != 0
    numbers = base, number, created, next_offset, size, position, max_timestamp
    # As `_make`, which is in Python: a plan reads thousands of them.
    new: Callable[..., SegmentInfo] = tuple.__new__
    headers, tombstones = columns & HEADERS != 0, columns & TOMBSTONES != 0
    return new(SegmentInfo, (*numbers, headers, appended, dense, tombstones, schema_version))


def put_segment(txn: kv.Txn, key: bytes, segment: SegmentInfo) -> None:
    """Write one line of the manifest."""
    base_offset, number, created, end, size, position, latest, _, appended, dense = segment[:10]
    flags = _SEALED if segment.sealed else 0
    flags |= _HAS_TIMESTAMP if latest is not None else 0
    flags |= _DENSE if dense else 0
    columns = segment.column_flags, segment.schema_version
    fields = (flags, end or 0, created, latest or 0, appended, size, position, *columns)
    SEGMENTS.put(txn, key, base_offset, number, value=fields)


def drop_segment(txn: kv.Txn, key: bytes, segment: SegmentInfo) -> None:
    """Delete one line of the manifest, and its index; the caller then unlinks the file."""
    SEGMENTS.delete(txn, key, *segment.key)
    keyspace.SEGMENT_INDEXES.delete(txn, key, *segment.key)
    if segment.schema_version:
        keyspace.SEGMENT_STATISTICS.delete(txn, key, *segment.key)


def uncommitted_files(txn: kv.Txn, key: bytes) -> list[SegmentInfo]:
    """Return the files of a partition on their way into the manifest or out of it.

    Only their base offsets and ids are known.
    """
    return [SegmentInfo(base, number, 0) for _, base, number in UNCOMMITTED_FILES.keys(txn, key)]


# Rows of partitions


def clamp_cleaned_offset(txn: kv.Txn, key: bytes, end: int) -> None:
    """Lower the cleaned offset to ``end``: appends after a truncation are not compacted."""
    if (keyspace.CLEANED_OFFSETS.get(txn, key) or 0) > end:
        keyspace.CLEANED_OFFSETS.put(txn, key, value=end)


def epochs(txn: kv.Txn, key: bytes) -> list[tuple[int, int]]:
    """Return (leader epoch, its first offset), both strictly increasing."""
    return keyspace.LEADER_EPOCHS.get(txn, key) or [(0, 0)]
