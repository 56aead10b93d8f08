"""What a program and its log exchange: records, positions and receipts.

Field names are kafka-python's, so that a program can move to Kafka and back.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class TopicPartition(NamedTuple):
    """One partition of one topic."""

    topic: str
    partition: int


class OffsetAndTimestamp(NamedTuple):
    """The result of a lookup by time (B13)."""

    offset: int
    timestamp: int
    leader_epoch: int | None = None


class OffsetAndMetadata(NamedTuple):
    """A committed position: the next offset to read, and a note."""

    offset: int
    metadata: str = ""
    leader_epoch: int | None = None


class RecordMetadata(NamedTuple):
    """Where a record was written; ``offset`` is -1 with ``acks=0`` (G9)."""

    topic: str
    partition: int
    offset: int
    timestamp: int | None

    @property
    def topic_partition(self) -> TopicPartition:
        """The partition the record went to."""
        return TopicPartition(self.topic, self.partition)


class Record(NamedTuple):
    """One record as a consumer reads it; ``timestamp`` is in milliseconds since 1970.

    ``timestamp_type`` is 0 for the producer's timestamp and 1 for the log append time (A7).
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    timestamp_type: int
    key: Any
    value: Any
    headers: list[tuple[str, bytes | None]]
    leader_epoch: int | None = None

    @property
    def topic_partition(self) -> TopicPartition:
        """The partition the record came from."""
        return TopicPartition(self.topic, self.partition)


class Appended(NamedTuple):
    """The result of appending one batch: offsets ``[base_offset, next_offset)``."""

    base_offset: int
    next_offset: int
    timestamp: int | None = None
    """The log append time in ms, if the topic stamps records with it (A7)."""
    duplicate: bool = False
    """The batch was written before; these are its offsets (G16)."""
