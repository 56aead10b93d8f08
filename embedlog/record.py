"""What a program and its log exchange: records, positions and receipts.

Field names are kafka-python's, so that a program can move to Kafka and back.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # has defaults before Python 3.13

    K = TypeVar("K", default=Any)
    V = TypeVar("V", default=Any)
    K_co = TypeVar("K_co", default=Any, covariant=True)
    V_co = TypeVar("V_co", default=Any, covariant=True)
else:
    from typing import TypeVar

    K, V = TypeVar("K"), TypeVar("V")
    K_co, V_co = TypeVar("K_co", covariant=True), TypeVar("V_co", covariant=True)


def random_id() -> str:
    """Return a random UUID as text; the module uuid takes as long to import as ten others."""
    number = int.from_bytes(os.urandom(16), "big")
    # Version 4, and the variant of RFC 9562.
    number = number & ~(0xF000 << 64 | 0xC000 << 48) | 4 << 76 | 0x8000 << 48
    text = f"{number:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


class TopicPartition(NamedTuple):
    """One partition of one topic."""

    topic: str
    partition: int


class OffsetAndTimestamp(NamedTuple):
    """The result of a lookup by time."""

    offset: int
    timestamp: int
    leader_epoch: int | None = None


class OffsetAndMetadata(NamedTuple):
    """A committed position: the next offset to read, and a note."""

    offset: int
    metadata: str = ""
    leader_epoch: int | None = None


class ConsumerGroupMetadata(NamedTuple):
    """The identity of a consumer in its group, with the fields of kafka-python."""

    group_id: str | None
    generation_id: int = -1
    member_id: str = ""
    group_instance_id: str | None = None


class RecordMetadata(NamedTuple):
    """Where a record was written; ``offset`` is -1 with ``acks=0``."""

    topic: str
    partition: int
    offset: int
    timestamp: int | None

    @property
    def topic_partition(self) -> TopicPartition:
        """The partition the record went to."""
        return TopicPartition(self.topic, self.partition)


class Record(NamedTuple, Generic[K_co, V_co]):
    """One record as a consumer reads it; ``timestamp`` is in milliseconds since 1970.

    ``timestamp_type`` is 0 for the producer's timestamp and 1 for the log append time.
    For type checkers, ``Record[str, Order]`` has such a key and value.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    timestamp_type: int
    key: K_co
    value: V_co
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
    """The log append time in ms, if the topic stamps records with it."""
    duplicate: bool = False
    """The batch was written before; these are its offsets."""
