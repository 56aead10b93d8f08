"""A log root as the source of a mirror."""

from __future__ import annotations

from embedlog.catalog import INTERNAL, TopicInfo
from embedlog.consumer.open_group import open_group
from embedlog.errors import GroupIdNotFoundError
from embedlog.group import group_ids
from embedlog.mirrors.ends import Bounds, Fetch, MirrorPosition, SourceTopic
from embedlog.mirrors.mirrored_topic import MIRRORED_TOPICS
from embedlog.partition import PartitionLog
from embedlog.partition.reader import PartitionReader
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.registry.schema_copies import all_schemas, registry_of
from embedlog.root.root import Root

_NOT_COPIED = "mirror.source"
"""The setting that a copy does not take."""


class RootSource:
    """A log root to copy from.

    Args:
        root: The open log; the caller closes it.
    """

    def __init__(self, root: Root) -> None:
        self.root, self.address, self.site_id = root, root.path, root.id
        self._readers: dict[tuple[str, int], tuple[PartitionLog, PartitionReader]] = {}
        self._topics: dict[str, SourceTopic] = {}
        self._version = -1
        root.wake.join()
        self._seen = root.wake.value()

    def topics(self) -> dict[str, SourceTopic]:
        """Return the topics by name, without internal ones."""
        version = self.root.version()
        if version != self._version:
            infos, schemas = self.root.topics().values(), all_schemas(self.root)
            self._topics = {
                info.name: self._described(info, schemas)
                for info in infos
                if not info.name.startswith(INTERNAL)
            }
            self._version = version
        return self._topics

    def _topic(self, name: str) -> SourceTopic:
        """Return a topic as it is now."""
        if self.root.version() == self._version:
            return self._topics[name]
        return self._described(self.root.topic(name), all_schemas(self.root))

    def _described(self, info: TopicInfo, schemas: tuple[tuple[int, str], ...]) -> SourceTopic:
        catalog, state = self.root.context.catalog, self.root.context.state
        config = info.config.overrides()
        copied = MIRRORED_TOPICS.get(state, info.id)
        # Since a failover it has records of its own, which were nowhere before.
        path = copied.path if copied is not None and info.config.mirror_source else ()
        return SourceTopic(
            info.name,
            str(info.id),
            info.partitions,
            {name: value for name, value in config.items() if name != _NOT_COPIED},
            tuple(catalog.schema_versions(info)) if info.schema_version else (),
            tuple(path),
            None if copied is None else copied.source,
            registry_of(self.root, info.name, config, schemas),
        )

    def bounds(self, topic: str, partition: int) -> Bounds:
        """Return the start and the end of a partition, as readers of this handle see them."""
        log = self.root.partition(topic, partition)
        log.refresh()
        tail = log.tail()
        return Bounds(tail.start_offset, log.visible_end(tail))

    def is_current(self, topic: str, partition: int, position: MirrorPosition) -> bool:
        """Return whether the log is in the epoch of a position, as of the last `bounds`."""
        tail = self.root.partition(topic, partition).tail()
        return position.leader_epoch in (None, tail.leader_epoch)

    def fetch(self, topic: str, partition: int, position: MirrorPosition, max_bytes: int) -> Fetch:
        """Return the batches from a position on; see `MirrorSource.fetch`.

        Raises:
            OffsetOutOfRangeError, LogTruncatedError: As for `MirrorSource.fetch`.
            CorruptBatchError: A batch does not have its checksums.
        """
        log = self.root.partition(topic, partition)
        # Taken out: after an error the next call begins with a new one.
        known, reader = self._readers.pop((topic, partition), (None, None))
        if reader is None or known is not log or reader.offset != position.offset:
            reader = log.reader(position.offset, position.leader_epoch)
        batches = reader.read_encoded(max_bytes)
        self._readers[topic, partition] = log, reader
        for _, batch in batches:
            # The copy numbers its producers and its epochs itself: those of the source would be
            # mixed up with them.
            batch.forget_origin()
        assert reader.leader_epoch is not None
        end = log.visible_end(log.tail())
        return Fetch(batches, reader.offset, end, reader.leader_epoch, self._topic(topic))

    def wait(self, seconds: float) -> None:
        """Return once something was written since the last call, or after some time."""
        self.root.wake.wait(self._seen, seconds)
        self._seen = self.root.wake.value()

    def groups(self) -> list[str]:
        """Return the names of the consumer groups."""
        return group_ids(self.root.context.live, self.root.context.state)

    def committed(self, group: str) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the committed offsets of a group; none if it does not exist."""
        try:
            snapshot = open_group(self.root, group).snapshot()
        except GroupIdNotFoundError:
            return {}
        return {partition: commit.position for partition, commit in snapshot.committed.items()}

    def close(self) -> None:
        """Stop waiting for changes."""
        self._readers.clear()
        if not self.root.closed:
            self.root.wake.leave()
