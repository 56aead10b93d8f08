"""What the two ends of a mirror must do.

A mirror copies encoded batches: a source returns them with the offsets of their records, and a
target writes them.  The position of a mirror in a partition is always kept by its target,
in the same step that makes records visible there, so that a mirror that was killed continues
exactly where it was.  A target with the offsets of the source needs nothing for that: the
position is its log end offset.

Offsets, epochs and partitions are those of the source, except where `MirrorTarget` says otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from embedlog.batch import PlacedBatch
from embedlog.record import OffsetAndMetadata, TopicPartition

if TYPE_CHECKING:
    from embedlog.registry.schema_copies import RegistryCopy
    from embedlog.schemas.topic_schema import TopicSchema

KAFKA_SCHEME = "kafka://"
"""Begins the address of an end that is a Kafka cluster."""


@dataclass(frozen=True)
class SourceTopic:
    """A topic of a source."""

    name: str
    id: str
    """Differs from that of an earlier topic of the same name."""
    partitions: int
    config: Mapping[str, object]
    """The settings that a copy takes, by Kafka's names, without defaults."""
    schemas: tuple[TopicSchema, ...] = ()
    """The versions of the schema of a typed topic, in order."""
    path: tuple[str, ...] = ()
    """If the topic is a copy itself: the site ids that its records were at before, in order."""
    copy_of: str | None = None
    """If the topic is a copy, or was until a failover: its source, as `source_name` names it."""
    registry: RegistryCopy | None = None
    """The schemas that its records name by ids, if they are Avro."""


class Fetch(NamedTuple):
    """What a source has from an offset on."""

    batches: Sequence[PlacedBatch]
    """In order; there may be gaps before, between and after them, and within those that have a
    column of offsets."""
    next_offset: int
    """Where to fetch next; nothing below it is missing in the batches."""
    end_offset: int
    """The log end offset (of a transactional source: the last stable offset), for the lag."""
    leader_epoch: int = 0
    """The epoch of the source in which the batches were read; see `MirrorSource.fetch`."""
    topic: SourceTopic | None = None
    """The topic as of after the read, with every schema that the batches have; None if unknown."""

    @property
    def records(self) -> int:
        """The number of records."""
        return sum(batch.count for _, batch in self.batches)

    @property
    def bytes(self) -> int:
        """The size of the batches, as stored."""
        return sum(batch.size for _, batch in self.batches)


class Bounds(NamedTuple):
    """The offsets of a partition."""

    start_offset: int
    end_offset: int


class MirrorPosition(NamedTuple):
    """Where a mirror continues in a partition, as its target knows it."""

    offset: int
    """The next offset of the source to copy."""
    leader_epoch: int | None = None
    """The epoch of the source in which the records before it were read; None if unknown."""


class MirrorSource(Protocol):
    """The end of a mirror that is copied from.  One thread uses it at a time."""

    address: str
    """As the user wrote it, or the absolute path of a root."""
    site_id: str
    """Identifies the log or cluster, wherever it is: the id of a root, or of a Kafka cluster."""

    def topics(self) -> dict[str, SourceTopic]:
        """Return the topics by name, without internal ones."""

    def bounds(self, topic: str, partition: int) -> Bounds:
        """Return the start and the end of a partition."""

    def is_current(self, topic: str, partition: int, position: MirrorPosition) -> bool:
        """Return whether the records below a position are certainly those that were read.

        If not, such as in a later epoch, the next `fetch` tells, also at the end.
        """

    def fetch(self, topic: str, partition: int, position: MirrorPosition, max_bytes: int) -> Fetch:
        """Return the batches from a position on: about ``max_bytes``, none at the end.

        Does not wait.  All records of the batches are at or above the offset.

        Raises:
            OffsetOutOfRangeError: Retention deleted records at the offset, or the source ends
                below it.
            LogTruncatedError: The source was truncated below the offset since the epoch of the
                position, at ``next_offset``.
        """

    def wait(self, seconds: float) -> None:
        """Return once there may be something new, or after some time."""

    def groups(self) -> list[str]:
        """Return the names of the consumer groups that have committed offsets."""

    def committed(self, group: str) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the committed offsets of a group by partition."""

    def close(self) -> None:
        """Close it."""


class MirrorTarget(ABC):
    """The end of a mirror that is copied to.  One thread uses it at a time.

    Some methods have a default, for targets that have offsets of their own.
    """

    address: str
    """As the user wrote it, or the absolute path of a root."""
    site_id: str
    """Identifies the log or cluster, wherever it is."""

    @abstractmethod
    def exclusive(self, mirror: str) -> AbstractContextManager[None]:
        """Keep other processes from running the same mirror, until the ``with`` block ends.

        Raises:
            LockTimeoutError: Another process runs it.
        """

    @abstractmethod
    def prepare(self, topic: SourceTopic, name: str, source: MirrorSource) -> bool:
        """Create the topic ``name`` as a copy of a topic, or make it like the source again.

        That is: the number of partitions, the settings, and the schema.  Returns whether the topic
        is copied: False if records of the topic were at this site before.

        Raises:
            MirrorConflictError: There is a topic of that name that is not a copy of this one.
        """

    def is_copy(self, name: str) -> bool:
        """Return whether a topic that was prepared is a copy still, which a failover ends."""
        return True

    @abstractmethod
    def position(self, name: str, partition: int) -> MirrorPosition | None:
        """Return where the mirror continues; None if nothing was copied to the partition yet."""

    @abstractmethod
    def append(self, name: str, partition: int, fetch: Fetch) -> int:
        """Write what was fetched at `position`, and move the position to its ``next_offset``.

        Both happen or none.  Returns how many records were written: a target that merges sites
        leaves out the records that were there before.

        Raises:
            MirrorConflictError: The position is not the one at which the batches were fetched.
            LogTruncatedError: It was moved back, since the target lost records.
        """

    def move_start(self, name: str, partition: int, offset: int) -> None:
        """Follow the log start offset of the source, as far as the target has such offsets."""
        return

    @abstractmethod
    def skip_to(self, name: str, partition: int, offset: int) -> None:
        """Move the position forward to where the source begins now, without records."""

    def translate(self, name: str, partition: int, offset: int) -> int | None:
        """Return the target's offset for an offset of the source; None if it is unknown.

        A reader that continues there reads every record that it would read from ``offset`` on at
        the source, and perhaps some before it.
        """
        return None

    def commit(
        self, group: str, positions: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> dict[TopicPartition, int]:
        """Commit offsets of the target for a group; return those that were committed.

        Moves no commit back, and changes nothing for a group that has members here, or in topics
        that are not copies any more.
        """
        return {}

    def flush(self) -> None:
        """Put what was written on the disk."""
        return

    def close(self) -> None:
        """Close it."""
        return
