"""The library confluent_kafka, whose types and errors the clients of this package use."""

from __future__ import annotations

from typing import Any

from embedlog.kafka.library import load
from embedlog.record import OffsetAndMetadata
from embedlog.record import TopicPartition as Partition

confluent_kafka: Any = load("confluent_kafka")
"""The package; untyped, since its older versions have no types."""
admin: Any = load("confluent_kafka.admin")
cimpl: Any = load("confluent_kafka.cimpl")
error: Any = load("confluent_kafka.error")
serialization: Any = load("confluent_kafka.serialization")

OFFSET_INVALID: int = confluent_kafka.OFFSET_INVALID


class PartitionResult(confluent_kafka.TopicPartition):  # type: ignore[misc]
    """A `TopicPartition` whose `error` can be set."""

    error: Any = None


def filled(item: Any, **fields: Any) -> Any:
    """Return an object of the library after setting fields of it."""
    for name, value in fields.items():
        setattr(item, name, value)
    return item


def committed_partition(
    partition: Partition,
    position: OffsetAndMetadata | None,
    kind: Any = confluent_kafka.TopicPartition,
) -> Any:
    """Return a `TopicPartition` with a committed position; with `OFFSET_INVALID` without one."""
    if position is None:
        return kind(*partition, OFFSET_INVALID)
    offset, metadata, epoch = position
    # The type refuses None.
    options: dict[str, Any] = {"metadata": metadata} if metadata else {}
    if epoch is not None:
        options["leader_epoch"] = epoch
    return kind(*partition, offset, **options)
