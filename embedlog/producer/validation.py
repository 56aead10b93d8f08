"""Checks of what a program sends: types, sizes and partitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from embedlog import catalog
from embedlog.batch.wire import MAX_BATCH_BYTES
from embedlog.errors import (
    EmbedlogError,
    InvalidRecordError,
    RecordTooLargeError,
    SerializationError,
    UnknownTopicOrPartitionError,
)
from embedlog.producer.row_batches import Rows
from embedlog.serializers import Adapter, Field, Headers, shortened

if TYPE_CHECKING:
    from embedlog.producer.topic_settings import TopicSettings

MAX_RECORD_BYTES = MAX_BATCH_BYTES - (1 << 20)


def serialize(
    settings: TopicSettings, topic: str, headers: Headers, key: Any, value: Any
) -> list[bytes | None]:
    """Return the bytes of the key and of the value of one record.

    Args:
        settings: Those of the topic, with its serializers.
        topic: The topic.
        headers: The headers of the record, to which the serializers may add some.
        key, value: What the program sends.

    Raises:
        SerializationError: A serializer failed, or returned something else than bytes.
    """
    items: list[bytes | None] = []
    # The key first, as in Kafka: the serializer of the value may use a header that this adds.
    parts: tuple[tuple[Field, Any, Adapter | None], ...] = (
        ("key", key, settings.key_serializer),
        ("value", value, settings.value_serializer),
    )
    for field, item, serializer in parts:
        if serializer is not None:
            try:
                item = serializer.convert(topic, headers, item)
            except Exception as error:
                raise failed(error, serializer, field, topic, key) from error
        items.append(to_bytes(item, field))
    return items


def serialize_all(
    serializer: Adapter, topic: str, headers: Any, items: Sequence[Any], field: Field, keys: Any
) -> list[Any]:
    """Return the serialized keys or values of many records.

    Args:
        serializer: The serializer.
        topic: The topic.
        headers: Those of each record, or None.
        items: The keys or values.
        field: Which of them.
        keys: The keys of the records as the program passed them, or None, for errors.

    Raises:
        SerializationError: The serializer failed.
    """
    serialized: list[Any] = []
    try:
        # After a failure, extend keeps the results before it.
        serialized.extend(serializer.convert_all(topic, headers, list(items)))
    except Exception as error:
        row = len(serialized)
        key = keys[row] if keys is not None and row < len(keys) else None
        raise failed(error, serializer, field, topic, key, row) from error
    return serialized


def failed(
    error: Exception,
    serializer: Adapter,
    field: Field,
    topic: str,
    key: Any,
    row: int | None = None,
) -> SerializationError:
    """Return the error of a record whose key or value cannot be serialized."""
    record = "the record" if row is None else f"record {row}"
    if key is not None and field == "value":
        record = f"{record} with the key {shortened(key)}"
    which = f"key {shortened(key)}" if field == "key" else field
    todo = f"Correct the {field}, or the {field}_serializer."
    if serializer.name is not None:
        todo = f"Pass a {field} that {serializer.name!r} can serialize."
        text = str(error)
        if isinstance(error, TypeError) and "bytes" in text and "bytes-like" not in text:
            todo = (
                f"Pass the {field} itself; to send it serialized, make the producer with "
                f'{field}_serializer="bytes".'
            )
    reason = str(error)
    if isinstance(error, EmbedlogError):
        reason, todo = error.what, error.todo or todo
    return SerializationError(
        f"The {which} of {record} cannot be serialized: {type(error).__name__}: {reason}",
        todo=todo,
        topic=topic,
        field=field,
        key=key,
        index=row,
    )


def to_bytes(item: Any, what: str) -> bytes | None:
    """Return bytes or None; an error says how to convert other types."""
    if item is None or type(item) is bytes:
        return item
    if isinstance(item, bytes | bytearray | memoryview):
        return bytes(item)
    todo = "Encode it." if isinstance(item, str) else "Pass bytes."
    if what != "header":
        name = "str" if isinstance(item, str) else "json"
        todo = (
            f'{todo[:-1]}, or set {what}_serializer="{name}" of the producer, or '
            f"{what}.serializer={name} of the topic."
        )
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
    """Return headers as pairs of str and bytes; None if there are none."""
    if not headers:
        return None
    for pair in headers:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise SerializationError(f"A header must be a pair of str and bytes, got {pair!r}")
    return [(name, to_bytes(value, "header")) for name, value in headers]


def check_timestamp(timestamp: object) -> None:
    """Refuse a timestamp of a record that is no int of 64 bits; None is none."""
    if timestamp is not None and (
        type(timestamp) is not int or not -(1 << 63) <= timestamp < 1 << 63
    ):
        raise SerializationError(
            f"A timestamp must be an int of milliseconds with 64 bits, got {timestamp!r}"
        )


def check_partition(topic: str, partition: Any, partitions: int) -> None:
    """Refuse a partition that the topic does not have."""
    catalog.check_partition(topic, partition)
    if not 0 <= partition < partitions:
        raise UnknownTopicOrPartitionError(
            f"The topic has partitions 0 to {partitions - 1}", topic=topic, partition=partition
        )


def check_expected(topic: str, name: str, offset: object) -> None:
    """Refuse an expected offset that is no int from 0.

    Raises:
        InvalidRecordError: It is not; ``name`` is that of the argument.
    """
    if type(offset) is not int or offset < 0:
        raise InvalidRecordError(
            f"{name} must be an int from 0, got {offset!r}",
            topic=topic,
            todo="Pass the offset that was read.",
        )


def check_size(topic: str, size: int, kafka_bytes: int, max_request_size: int) -> None:
    """Refuse a record that is too large.

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
