"""Checks of what a program sends: types, sizes and partitions."""

from __future__ import annotations

from typing import Any

from embedlog import catalog
from embedlog.batch.wire import MAX_BATCH_BYTES
from embedlog.errors import RecordTooLargeError, SerializationError, UnknownTopicOrPartitionError
from embedlog.producer.row_batches import Rows

MAX_RECORD_BYTES = MAX_BATCH_BYTES - (1 << 20)


def serialize(serializer: Any, topic: str, item: Any) -> Any:
    """Return the serialized key or value; without a serializer, the item itself."""
    if serializer is None:
        return item
    if hasattr(serializer, "serialize"):
        return serializer.serialize(topic, item)
    return serializer(item)


def to_bytes(item: Any, what: str) -> bytes | None:
    """Return bytes or None; an error says how to convert other types."""
    if item is None or type(item) is bytes:
        return item
    if isinstance(item, bytes | bytearray | memoryview):
        return bytes(item)
    todo = f"Pass bytes, or set {what}_serializer."
    if isinstance(item, str):
        todo = f"Encode it: {what}.encode(), or set {what}_serializer=str.encode."
    raise SerializationError(
        f"A {what} must be bytes or None, got {type(item).__name__}", todo=todo
    )


def check_all_bytes(rows: Rows) -> None:
    """Check all types before the first of several batches is written."""
    allowed = {bytes, type(None), bytearray, memoryview}
    for items, what in ((rows.values, "value"), (rows.keys, "key")):
        if items is not None and set(map(type, items)) - allowed:
            for item in items:
                to_bytes(item, what)


def check_headers(headers: Any) -> Any:
    """Return headers as pairs of str and bytes; None if there are none (A3)."""
    if not headers:
        return None
    for pair in headers:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise SerializationError(f"A header must be a pair of str and bytes, got {pair!r}")
    return [(name, to_bytes(value, "header")) for name, value in headers]


def check_partition(topic: str, partition: Any, partitions: int) -> None:
    """Refuse a partition that the topic does not have (G1)."""
    catalog.check_partition(topic, partition)
    if not 0 <= partition < partitions:
        raise UnknownTopicOrPartitionError(
            f"The topic has partitions 0 to {partitions - 1}", topic=topic, partition=partition
        )


def check_size(topic: str, size: int, kafka_bytes: int, max_request_size: int) -> None:
    """Refuse a record that is too large (G7).

    Args:
        topic: For the error.
        size: As ``buffer_memory`` counts it.
        kafka_bytes: As Kafka's producer counts it.
        max_request_size: The setting.

    Raises:
        RecordTooLargeError: The record is over ``max_request_size`` or `MAX_RECORD_BYTES`.
    """
    if kafka_bytes > max_request_size:
        raise RecordTooLargeError(
            f"A record of {kafka_bytes} bytes, as Kafka's producer counts them, is over "
            f"max_request_size {max_request_size}",
            todo="Raise max_request_size, and max.message.bytes of the topic.",
            topic=topic,
        )
    if size > MAX_RECORD_BYTES:
        raise RecordTooLargeError(
            f"A record of {size} bytes is larger than {MAX_RECORD_BYTES}",
            todo="Send smaller records.",
            topic=topic,
        )
