"""The plan of a query: which bytes of which files each task reads.

Made on the driver from metadata, read by tasks in other processes, in Python or, as JSON,
in Java.  So that a planner starts quickly, this imports neither pyarrow nor pyspark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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

    def to_json(self) -> dict[str, Any]:
        """Return it as an object for `json.dumps`.

        Returns:
            ``{"columns": columns_to_json(…), "segments": {version: segment_columns(…)}}``, with the
            functions of `embedlog.spark.columns`.
        """
        # Not for topics of bytes: they need no pyarrow.
        from embedlog.spark.columns import columns_to_json, segment_columns

        segments = {str(number): segment_columns(schema) for number, schema in self.stored.items()}
        return {"columns": columns_to_json(self.read), "segments": segments}


@dataclass(frozen=True, slots=True)
class LogInputPartition:
    """What one task reads; the value of a Spark `InputPartition`."""

    root: str
    slices: tuple[PartitionSlice, ...]
    schemas: Mapping[str, TopicVersions] = field(default_factory=dict)
    """Those of the typed topics, by their names."""


def plan_to_json(root: str, tasks: Sequence[LogInputPartition]) -> dict[str, Any]:
    """Return the plan of a query as an object for `json.dumps`.

    Returns:
        ``{"root": path, "size": bytes, "rows": number or None, "schemas": {...}, "tasks":
        [[slice, ...], ...]}``, with slices as `PartitionSlice.to_json` returns them, and schemas as
        `TopicVersions.to_json` does.  ``rows`` is None if that of a slice is.
    """
    versions = {topic: known for task in tasks for topic, known in task.schemas.items()}
    slices = [part for task in tasks for part in task.slices]
    counts = [part.rows for part in slices]
    return {
        "root": root,
        "size": sum(part.size for part in slices),
        "rows": None if None in counts else sum(count for count in counts if count is not None),
        "schemas": {topic: known.to_json() for topic, known in versions.items()},
        "tasks": [[part.to_json() for part in task.slices] for task in tasks],
    }
