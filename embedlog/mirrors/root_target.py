"""A log root as the target of a mirror: copies have the offsets of their source.

So the position of a mirror in a partition is the log end offset of the copy, which moves in the
transaction that makes records visible.  Nothing else has to be kept, and a mirror that was killed
continues after the last record that it wrote.

Preparing a topic takes several transactions of `state`, in this order: the topic is created with
its setting ``mirror.source``; its row of `MIRRORED_TOPICS` is written; and once the first offset
of each partition is decided, that is noted in the row.  Killed in between, the next mirror
repeats what is missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager

from embedlog.catalog import SchemaChange, TopicInfo
from embedlog.config import TopicConfig
from embedlog.consumer.open_group import open_group
from embedlog.errors import (
    LockTimeoutError,
    LogTruncatedError,
    MirrorConflictError,
    MirrorDivergedError,
    UnexpectedAppendOffsetError,
    UnknownTopicOrPartitionError,
)
from embedlog.hints import AS_SITE, MIRRORS, Hint, alter_topic
from embedlog.listeners import COPY, Client
from embedlog.mirrors.avro_ids import SchemaIds, prepare_schemas
from embedlog.mirrors.ends import Fetch, MirrorPosition, MirrorSource, MirrorTarget, SourceTopic
from embedlog.mirrors.mirrored_topic import (
    MIRRORED_TOPICS,
    MirroredTopic,
    changed_settings,
    source_name,
    would_loop,
)
from embedlog.mirrors.publications import PublicationCopier
from embedlog.mirrors.root_source import RootSource
from embedlog.partition import PartitionLog, flush, log_start
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.root.root import Root
from embedlog.schemas.topic_schema import TopicSchema

_LOCK_SECONDS = 1.0
_RETENTION = (
    *("retention.ms", "retention.bytes", "retention.topic.bytes", "retention.clock"),
    "cleanup.policy",
)
"""The settings that say how much a copy keeps: if they are those of the source, it follows the
log start offset of the source."""


class LogTarget(MirrorTarget):
    """A log root to copy to.

    Args:
        root: The open log; the caller closes it.
        durability: What a copied record survives, as in `embedlog.open`; None for that of the log.
    """

    def __init__(self, root: Root, durability: str | None = None) -> None:
        root.context.check_writable()
        self.root, self.address, self.site_id = root, root.path, root.id
        self._durability, self._client = durability, Client(COPY, "")
        self._schema_ids: dict[str, SchemaIds | None] = {}

    @contextmanager
    def exclusive(self, mirror: str) -> Iterator[None]:
        """Hold the lock of a mirror; see `MirrorTarget.exclusive`."""
        self._client = Client(COPY, mirror)
        with hold_lock(self.root, mirror), closing(self._client):
            yield

    def _log(self, name: str, partition: int) -> PartitionLog:
        log = self.root.partition(name, partition)
        log.refresh()
        return log

    def _visible_log(self, name: str, partition: int) -> PartitionLog:
        """Return a partition of which readers see all records.

        An append that was killed, or failed, before its flush leaves some for the next flush.
        """
        log = self._log(name, partition)
        tail = log.tail()
        if log.visible_end(tail) < tail.log_end_offset:
            flush.flush_to(log, tail)
        return log


class RootTarget(LogTarget):
    """A log root to copy to, at the offsets of the source; see `LogTarget`."""

    def __init__(self, root: Root, durability: str | None = None) -> None:
        super().__init__(root, durability)
        self._copies: dict[str, MirroredTopic] = {}
        """By the name of the copy: its row, as it is in `state`."""
        self._publications: PublicationCopier | None = None
        self._ends: dict[tuple[str, int], int] = {}
        """Where the copies ended when they were last looked at, or written to."""

    # Topics

    def prepare(self, topic: SourceTopic, name: str, source: MirrorSource) -> bool:
        """Make the topic ``name`` a copy of a topic; see `MirrorTarget.prepare`.

        Raises:
            MirrorConflictError: There is a topic of that name that is not a copy of this one.
            MirrorDivergedError: It is a copy of an earlier topic of that name.
        """
        if would_loop(self.site_id, source.site_id, topic.path):
            return False
        wanted = MirroredTopic(
            source_name(source.site_id, topic.name),
            source.address,
            topic.id,
            [*topic.path, source.site_id],
            dict(topic.config),
        )
        info = self.root.topics().get(name)
        if info is None:
            info = self._create(topic, name, wanted)
        elif not info.config.mirror_source:
            info = self._adopt(info, topic, wanted)
        elif info.config.mirror_source != wanted.source:
            raise MirrorConflictError(
                f"The topic is a copy of {info.config.mirror_source}, not of {wanted.source}",
                topic=name,
                todo=Hint(
                    "Mirror as another site, which becomes a part of the names of the copies.",
                    "Pass another name with --as, which becomes a part of the names of the copies.",
                ),
            )
        copy = MIRRORED_TOPICS.get(self.root.context.state, info.id)
        if copy is None:
            copy = wanted
        elif copy.source_topic_id != topic.id:
            raise MirrorDivergedError(
                "The topic of the source was deleted and created again since it was copied",
                topic=name,
                next_offset=0,
                todo="Delete the copy to begin a new one.",
            )
        self._update(info, topic, copy)
        copy.config, copy.address, copy.path = wanted.config, wanted.address, wanted.path
        copy.ends = []
        self._put(name, copy)
        self._schema_ids[name] = prepare_schemas(self.root, topic, name, own=False)
        if copy.begun < topic.partitions:
            self._begin(name, topic, copy, source)
        if isinstance(source, RootSource):
            if self._publications is None:
                self._publications = PublicationCopier(source.root, self.root)
            self._publications.add(int(topic.id), self.root.topic(name))
            self._publications.copy()
        return True

    def _create(self, topic: SourceTopic, name: str, copy: MirroredTopic) -> TopicInfo:
        root = self.root
        config = TopicConfig.parse({**topic.config, "mirror.source": copy.source})
        schema = topic.schemas[0] if topic.schemas else None
        return root.create_topic(name, topic.partitions, config, schema, typed_defaults=False)

    def _adopt(self, info: TopicInfo, topic: SourceTopic, copy: MirroredTopic) -> TopicInfo:
        """Make a topic a copy that has no record yet.

        Raises:
            MirrorConflictError: It has records, or was a copy until a failover.
        """
        before = MIRRORED_TOPICS.get(self.root.context.state, info.id)
        if before is not None and before.source == copy.source:
            again = alter_topic(info.name, {"mirror.source": copy.source})
            raise MirrorConflictError(
                f"The topic is not a copy of {copy.source} any more, since a failover",
                topic=info.name,
                todo="Mirror in the other direction now. To make it a copy again, delete it."
                # In both forms, since the status of the mirror keeps it as text.
                f" Or, if nothing was written to it since, call {again}, or run `{again.shell}`.",
            )
        logs = [self.root.partition(info.name, number) for number in range(info.partitions)]
        if any(log.tail().log_end_offset for log in logs) or (
            bool(info.schema_version) is not bool(topic.schemas)
        ):
            todo: str = AS_SITE
            if topic.copy_of == source_name(self.site_id, info.name):
                todo = (
                    "The topic of the source was a copy of it until a failover. To make it the "
                    "copy, stop its writers, save what was never copied if you need it, delete "
                    "it, and mirror again."
                )
            raise MirrorConflictError(
                "There is such a topic, which is not a copy, and has records of its own",
                topic=info.name,
                todo=todo,
            )
        changes = changed_settings(info.config.overrides(), topic.config)
        return self.root.alter_topic(info.name, {**changes, "mirror.source": copy.source})

    def _update(self, info: TopicInfo, topic: SourceTopic, copy: MirroredTopic) -> None:
        """Apply what changed at the source: partitions, settings, schema."""
        name = info.name
        if info.partitions < topic.partitions:
            self.root.grow_topic(name, topic.partitions, mirror=copy.source)
        changes = changed_settings(copy.config, topic.config)
        if changes:
            self.root.alter_topic(name, changes)
        versions = self.root.context.catalog.schema_versions(info)
        for version, schema in zip(versions, topic.schemas, strict=False):
            if not version.has_columns_of(schema) or version.version != schema.version:
                raise MirrorDivergedError(
                    f"Version {schema.version} of the schema is another one at the source",
                    topic=name,
                    next_offset=0,
                    todo="Delete the copy to begin a new one.",
                )
        for schema in topic.schemas[len(versions) :]:
            self.root.alter_schema(name, _next_version(schema))

    def _begin(
        self, name: str, topic: SourceTopic, copy: MirroredTopic, source: MirrorSource
    ) -> None:
        """Begin new partitions where the source begins."""
        for partition in range(copy.begun, topic.partitions):
            start = source.bounds(topic.name, partition).start_offset
            log = self.root.partition(name, partition)
            if start > log.tail().log_end_offset:
                self.skip_to(name, partition, start)
            if start > log.tail().start_offset:
                log_start.move_log_start(log, start)
        copy.begun = topic.partitions
        self._put(name, copy)

    def _put(self, name: str, copy: MirroredTopic) -> None:
        self._copies[name] = copy
        state, topic_id = self.root.context.state, self.root.topic(name).id
        if MIRRORED_TOPICS.get(state, topic_id) != copy:
            state.write(lambda txn: MIRRORED_TOPICS.put(txn, topic_id, value=copy))

    def is_copy(self, name: str) -> bool:
        """Return whether no failover made it a topic of its own; see `MirrorTarget.is_copy`."""
        try:
            info = self.root.topic(name)
        except UnknownTopicOrPartitionError:
            return False
        return info.config.mirror_source == self._copies[name].source

    # Records

    def position(self, name: str, partition: int) -> MirrorPosition | None:
        """Return the log end offset of the copy."""
        end = self._visible_log(name, partition).tail().log_end_offset
        self._ends[name, partition] = end
        return MirrorPosition(end, self._copies[name].epoch(partition))

    def append(self, name: str, partition: int, fetch: Fetch) -> int:
        """Write batches at the offsets that they have at the source; see `MirrorTarget.append`."""
        copy = self._copies[name]
        if copy.epoch(partition) != fetch.leader_epoch:
            # Before the records: when they were read, it was checked that nothing below them was
            # truncated, and with the older epoch the next start would take them for ones that were.
            copy.set_epoch(partition, fetch.leader_epoch)
            self._put(name, copy)
        if not fetch.batches:
            return 0
        key, log = (name, partition), self._log(name, partition)
        batches, ids = fetch.batches, self._schema_ids[name]
        if ids is not None:
            batches = list(map(ids.of_batch, batches))
        try:
            receipts = log.append_at(
                batches,
                identical=True,
                mirror=copy.source,
                durability=self._durability,
                expected_end=self._ends[key],
            )
        except UnexpectedAppendOffsetError as error:
            expected, end = self._ends[key], log.tail().log_end_offset
            if end < expected:
                raise LogTruncatedError(
                    f"The copy ended at offset {expected}, and has lost records since",
                    topic=name,
                    partition=partition,
                    next_offset=end,
                    todo="A mirror that follows copies them again; otherwise mirror again.",
                ) from error
            raise MirrorConflictError(
                "Another process wrote to the copy",
                topic=name,
                partition=partition,
                offset=error.offset,
                todo="Is another mirror running that copies the same topic?",
            ) from error
        self._ends[key] = receipts[-1].next_offset
        for listener in self.root.listeners.of(log.config, self._client):
            for receipt, (_, batch) in zip(receipts, batches, strict=True):
                listener.written(log, receipt, batch, None)
        if self._publications is not None:
            self._publications.copy()
        return fetch.records

    def move_start(self, name: str, partition: int, offset: int) -> None:
        """Follow the log start offset of the source, while the copy has its retention settings."""
        config, copied = self.root.topic(name).config.to_dict(), self._copies[name].config
        defaults = TopicConfig().to_dict()
        if any(config[key] != copied.get(key, defaults[key]) for key in _RETENTION):
            return
        log = self._log(name, partition)
        tail = log.tail()
        if tail.start_offset < offset:
            log_start.move_log_start(log, min(offset, tail.high_watermark), whole=True)

    def skip_to(self, name: str, partition: int, offset: int) -> None:
        """Move the log end offset forward, without records."""
        copy = self._copies[name]
        self._log(name, partition).skip_to(offset, mirror=copy.source)
        if copy.epoch(partition) is not None:
            # Of what is skipped nothing was read, so nothing of it can differ.
            copy.set_epoch(partition, -1)
            self._put(name, copy)
        self.position(name, partition)

    # Groups

    def translate(self, name: str, partition: int, offset: int) -> int | None:
        """Return the same offset, or the end of the copy if that is lower."""
        return min(offset, self._log(name, partition).end_offset())

    def commit(
        self, group: str, positions: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> dict[TopicPartition, int]:
        """Commit offsets for a group; see `MirrorTarget.commit`."""
        client = open_group(self.root, group)
        # Before the look: a failover makes the topics no copies first, and commits then.
        known = client.committed(positions)
        copied = {part: known[part] for part in positions if self.is_copy(part.topic)}
        return client.advance({part: positions[part] for part in copied}, copied)

    # The end

    def flush(self) -> None:
        """Put what was written on the disk."""
        self.root.flush()


def _next_version(schema: TopicSchema) -> SchemaChange:
    return lambda before, earlier: schema


@contextmanager
def hold_topic_lock(root: Root, name: str, topic: str, source: str) -> Iterator[None]:
    """Hold the lock of a name, so that one mirror at a time copies a source to a topic.

    Raises:
        LockTimeoutError: Another mirror does; the error names the topic and the source.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(hold_lock(root, name))
        except LockTimeoutError as error:
            process = "" if error.pid is None else f" (process {error.pid})"
            raise LockTimeoutError(
                f"Another mirror{process} copies from {source} to the topic",
                topic=topic,
                pid=error.pid,
                state=error.state,
                todo="Run one mirror of a source and a topic." + MIRRORS,
            ) from error
        yield


@contextmanager
def hold_lock(root: Root, name: str) -> Iterator[None]:
    """Hold the lock of the name of a mirror, so that one process at a time runs it.

    Raises:
        LockTimeoutError: Another process holds it.
    """
    files = root.context.files
    lock = files.open(lock_path(name), write=True, create=True)
    try:
        try:
            # Not immediately: `is_held` takes it for a moment.
            files.lock(lock, _LOCK_SECONDS)
        except LockTimeoutError as error:
            raise LockTimeoutError(
                f"Another process runs the mirror {name}",
                **error.facts,
                todo=MIRRORS,
            ) from error
        yield
    finally:
        files.close(lock)


def is_held(root: Root, name: str) -> bool:
    """Return whether a process holds the lock of a name."""
    files = root.context.files
    if not files.exists(lock_path(name)):
        return False
    lock = files.open(lock_path(name))
    try:
        return not files.try_lock(lock, shared=True)
    finally:
        files.close(lock)


def lock_path(name: str) -> str:
    """Return the path of the lock file of a name, which may have any characters."""
    return f"locks/{hashlib.sha256(name.encode()).hexdigest()[:32]}.mirror"
