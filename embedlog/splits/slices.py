"""Which bytes of which files hold some offsets: what one process plans, and others read.

Planned from metadata, and read in other processes, in Python or, as JSON, in Java.  So that a
planner starts quickly, this does not import pyarrow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from embedlog.record import TopicPartition

if TYPE_CHECKING:
    from embedlog.schemas.topic_schema import TopicSchema


class PartitionOffsets(NamedTuple):
    """The offsets ``[from_offset, until_offset)`` of a partition."""

    topic_partition: TopicPartition
    from_offset: int
    until_offset: int


class FileChunk(NamedTuple):
    """A part of one segment file; a plan has one or more for each segment, so they are tuples."""

    path: str
    """Relative to the log root."""
    sealed: bool
    headers: bool
    """Whether the file has a column of headers."""
    position: int
    """Where to start to read; 0 is the first batch."""
    end_position: int
    schema_version: int = 0
    """The version of the topic's schema that the file has; 0 for a topic of bytes."""
    tombstones: bool = False
    """Whether the file of a typed topic has the column that marks tombstones."""


@dataclass(frozen=True, slots=True)
class PartitionSlice:
    """The offsets ``[from_offset, until_offset)`` of one partition, and the files with them."""

    topic: str
    partition: int
    from_offset: int
    until_offset: int
    leader_epoch: int
    """The log's epoch when this was planned: batches of a later one are not part of the plan."""
    chunks: tuple[FileChunk, ...]
    size: int = 0
    """About how many bytes to read."""
    rows: int | None = None
    """How many records there are; None if offsets may lack records, as after compaction."""
    directories: tuple[str, ...] = ()
    """The log roots with the files, in a log of several directories: that of the leader comes
    first, and the others are read if it fails."""

    def to_json(self) -> list[Any]:
        """Return it as a list for `json.dumps`, with a list for each chunk."""
        return [
            *(self.topic, self.partition, self.from_offset, self.until_offset),
            *(self.leader_epoch, self.size, self.rows, self.chunks, self.directories),
        ]


class TopicVersions(NamedTuple):
    """The schemas of a typed topic that a task needs."""

    read: TopicSchema
    """The version through which the query sees all records."""
    stored: Mapping[int, TopicSchema]
    """The versions that the files have, by their numbers."""
