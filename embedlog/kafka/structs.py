"""The tuples of kafka-python: its own if it is installed, otherwise with the same fields."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from embedlog import record
from embedlog.kafka.installed import pick


class _States:
    UNJOINED = "<unjoined>"
    REBALANCING = "<rebalancing>"
    STABLE = "<stable>"


def _tuple(module: str, name: str, fields: Sequence[str], defaults: Sequence[Any] = ()) -> Any:
    """Return kafka-python's tuple if it has these fields, otherwise one of our own."""
    installed = pick(module, name, None)
    if getattr(installed, "_fields", None) == tuple(fields):
        return installed
    return collections.namedtuple(name, fields, defaults=defaults)


if TYPE_CHECKING:
    # kafka-python's have no types, and the same fields.
    from embedlog.record import OffsetAndMetadata as OffsetAndMetadata
    from embedlog.record import OffsetAndTimestamp as OffsetAndTimestamp
    from embedlog.record import TopicPartition as TopicPartition
else:
    TopicPartition = pick("kafka.structs", "TopicPartition", record.TopicPartition)
    OffsetAndMetadata = pick("kafka.structs", "OffsetAndMetadata", record.OffsetAndMetadata)
    OffsetAndTimestamp = pick("kafka.structs", "OffsetAndTimestamp", record.OffsetAndTimestamp)
MemberState: Any = pick("kafka.structs", "MemberState", _States)

TopicPartitionReplica: Any = _tuple(
    "kafka.structs", "TopicPartitionReplica", ("topic", "partition", "broker_id")
)
ConsumerGroupMetadata: Any = _tuple(
    "kafka.structs",
    "ConsumerGroupMetadata",
    ("group_id", "generation_id", "member_id", "group_instance_id", "state"),
    (None, -1, "", None, MemberState.UNJOINED),
)

_SIZES = ("serialized_key_size", "serialized_value_size", "serialized_header_size")

RecordMetadata: Any = _tuple(
    "kafka.producer.future",
    "RecordMetadata",
    ("topic", "partition", "topic_partition", "offset", "timestamp", "checksum", *_SIZES),
)
ConsumerRecord: Any = _tuple(
    "kafka.consumer.fetcher",
    "ConsumerRecord",
    (
        *("topic", "partition", "leader_epoch", "offset", "timestamp", "timestamp_type"),
        *("key", "value", "headers", "checksum", *_SIZES),
    ),
)
