"""confluent_kafka's types of arguments and errors, or equal ones if it is not installed."""

from __future__ import annotations

import base64
from enum import Enum, IntEnum
from typing import Any

from embedlog.kafka.confluent.error_codes import CODES, NAMES, text_of
from embedlog.kafka.installed import use_installed
from embedlog.record import OffsetAndMetadata
from embedlog.record import TopicPartition as Partition

OFFSET_BEGINNING, OFFSET_END = -2, -1
OFFSET_STORED, OFFSET_INVALID = -1000, -1001
TIMESTAMP_NOT_AVAILABLE, TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME = 0, 1, 2


class KafkaError:
    """A code of Kafka's or librdkafka's, with its text; equal to the code."""

    def __init__(
        self,
        error: int,
        reason: str | None = None,
        fatal: bool = False,
        retriable: bool = False,
        txn_requires_abort: bool = False,
    ) -> None:
        self._code, self._reason = error, reason
        self._fatal, self._retriable, self._abort = fatal, retriable, txn_requires_abort

    def code(self) -> int:
        """Return the number."""
        return self._code

    def name(self) -> str:
        """Return the name of the code."""
        return NAMES.get(self._code, f"ERR_{self._code}?")

    def str(self) -> str:
        """Return the text for people."""
        return text_of(self._code) if self._reason is None else self._reason

    def fatal(self) -> bool:
        """Return whether the client cannot be used any more."""
        return self._fatal

    def retriable(self) -> bool:
        """Return whether the call may succeed later."""
        return self._retriable

    def txn_requires_abort(self) -> bool:
        """Return whether the transaction must be aborted; a log has none."""
        return self._abort

    def __repr__(self) -> Any:
        fatal = "FATAL," if self._fatal else ""
        return f'KafkaError{{{fatal}code={self.name()},val={self._code},str="{self.str()}"}}'

    def __hash__(self) -> int:
        return self._code

    def __eq__(self, other: object) -> bool:
        return self._code == _code_of(other)

    def __lt__(self, other: object) -> bool:
        return self._code < _code_of(other)

    def __reduce__(self) -> tuple[Any, ...]:
        return KafkaError, (self._code, self._reason, self._fatal, self._retriable, self._abort)


def _code_of(error: Any) -> int:
    code: int = error.code() if isinstance(error, KafkaError) else error
    return code


for _name, _code in CODES.items():
    setattr(KafkaError, _name, _code)


class KafkaException(Exception):  # noqa: N818 - confluent_kafka's name
    """An error; ``args[0]`` is the `KafkaError`."""


class IllegalStateException(RuntimeError):  # noqa: N818
    """A call in the wrong state."""


class ConcurrentModificationException(RuntimeError):  # noqa: N818
    """A call from a second thread."""


class PartitionResult:
    """A partition with an offset, and the error of a call for it."""

    def __init__(
        self,
        topic: str,
        partition: int = -1,
        offset: int = OFFSET_INVALID,
        metadata: str | None = None,
        leader_epoch: int | None = None,
    ) -> None:
        self.topic, self.partition, self.offset = topic, partition, offset
        self.metadata, self.leader_epoch = metadata, leader_epoch
        self.error: Any = None

    def __repr__(self) -> str:
        return (
            f"TopicPartition{{topic={self.topic},partition={self.partition},offset={self.offset},"
            f"leader_epoch={self.leader_epoch},error={self.error}}}"
        )

    def _key(self) -> tuple[str, int]:
        return self.topic, self.partition

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return self._key() == (getattr(other, "topic", None), getattr(other, "partition", None))

    def __lt__(self, other: Any) -> bool:
        return self._key() < (other.topic, other.partition)


TopicPartition = PartitionResult


class Uuid:
    """The id of a topic."""

    def __init__(self, most_significant_bits: int, least_significant_bits: int) -> None:
        mask = (1 << 64) - 1
        self._bits = (most_significant_bits & mask) << 64 | least_significant_bits & mask

    def __str__(self) -> str:
        return base64.urlsafe_b64encode(self._bits.to_bytes(16, "big")).decode().rstrip("=")

    __repr__ = __str__

    def __int__(self) -> int:
        return self._bits

    def __hash__(self) -> int:
        return hash(self._bits)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Uuid) and self._bits == other._bits


class ThrottleEvent:
    """What ``throttle_cb`` would be called with; a log never throttles."""

    def __init__(self, broker_name: str, broker_id: int, throttle_time: float) -> None:
        self.broker_name, self.broker_id, self.throttle_time = broker_name, broker_id, throttle_time


class Node:
    """A broker: a directory of a log."""

    def __init__(self, id: int, host: str, port: int, rack: str | None = None) -> None:  # noqa: A002
        self.id, self.id_string, self.host, self.port, self.rack = id, str(id), host, port, rack


class ConsumerGroupTopicPartitions:
    """A group, and offsets of it."""

    def __init__(self, group_id: str, topic_partitions: list[Any] | None = None) -> None:
        self.group_id, self.topic_partitions = group_id, topic_partitions


class TopicCollection:
    """Names of topics."""

    def __init__(self, topic_names: list[str]) -> None:
        self.topic_names = topic_names


class TopicPartitionInfo:
    """A partition, and where it is."""

    def __init__(
        self,
        id: int,  # noqa: A002
        leader: Node | None,
        replicas: list[Node],
        isr: list[Node],
    ) -> None:
        self.id, self.leader, self.replicas, self.isr = id, leader, replicas, isr


class OrderedEnum(Enum):
    """An enum whose members are ordered by their values."""

    def __lt__(self, other: Any) -> bool:
        less: bool = self.value < other.value
        return less


class ConsumerGroupState(OrderedEnum):
    """The state of a group."""

    UNKNOWN = 0
    UNKOWN = 0
    PREPARING_REBALANCING = 1
    COMPLETING_REBALANCING = 2
    STABLE = 3
    DEAD = 4
    EMPTY = 5


class ConsumerGroupType(OrderedEnum):
    """The protocol of a group."""

    UNKNOWN = 0
    CONSUMER = 1
    CLASSIC = 2


class IsolationLevel(OrderedEnum):
    """Which records are visible; on a log both values mean the same."""

    READ_UNCOMMITTED = 0
    READ_COMMITTED = 1


class ElectionType(OrderedEnum):
    """The kind of an election of leaders, which a log does not have."""

    PREFERRED = 0
    UNCLEAN = 1


class AcknowledgeType(IntEnum):
    """How a share consumer acknowledges a record; a log has none."""

    ACCEPT = 1
    RELEASE = 2
    REJECT = 3


__all__ = [
    "AcknowledgeType",
    "ConcurrentModificationException",
    "ConsumerGroupState",
    "ConsumerGroupTopicPartitions",
    "ConsumerGroupType",
    "ElectionType",
    "IllegalStateException",
    "IsolationLevel",
    "KafkaError",
    "KafkaException",
    "Node",
    "ThrottleEvent",
    "TopicCollection",
    "TopicPartition",
    "TopicPartitionInfo",
    "Uuid",
]
use_installed(globals(), "confluent_kafka", __all__)


def committed_partition(partition: Partition, position: OffsetAndMetadata | None) -> Any:
    """Return a `TopicPartition` with a committed position; with `OFFSET_INVALID` without one."""
    if position is None:
        return TopicPartition(*partition, OFFSET_INVALID)
    offset, metadata, epoch = position
    # confluent_kafka's own type refuses None.
    options: dict[str, Any] = {"metadata": metadata} if metadata else {}
    if epoch is not None:
        options["leader_epoch"] = epoch
    return TopicPartition(*partition, offset, **options)
