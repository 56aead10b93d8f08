"""`Message`: a record of the log, a delivery report, or an event."""

from __future__ import annotations

from typing import Any

from embedlog.kafka.confluent.library import confluent_kafka
from embedlog.record import Record

TIMESTAMP_CREATE_TIME: int = confluent_kafka.TIMESTAMP_CREATE_TIME
TIMESTAMP_NOT_AVAILABLE: int = confluent_kafka.TIMESTAMP_NOT_AVAILABLE


class Message:
    """A record as confluent_kafka's clients return it, with methods for its fields.

    Also a delivery report, and, with an `error`, an event such as the end of a partition.
    """

    __slots__ = ("_error", "_latency", "_record")

    def __init__(
        self,
        topic: str | None = None,
        partition: int | None = None,
        offset: int | None = None,
        key: Any = None,
        value: Any = None,
        headers: Any = None,
        error: Any = None,
        timestamp: tuple[int, int] | None = None,
        latency: float | None = None,
        leader_epoch: int | None = None,
        delivery_count: int | None = None,
    ) -> None:
        kind, time = timestamp or (TIMESTAMP_NOT_AVAILABLE, 0)
        fields: Any = (topic, partition, offset, time, kind - 1, key, value, headers, leader_epoch)
        self._record = Record._make(fields)
        self._error, self._latency = error, latency

    def topic(self) -> str | None:
        """Return the topic."""
        return self._record.topic

    def partition(self) -> int | None:
        """Return the number of the partition."""
        return self._record.partition

    def offset(self) -> int | None:
        """Return the offset."""
        return self._record.offset

    def key(self) -> Any:
        """Return the key, as bytes unless it was deserialized."""
        return self._record.key

    def value(self) -> Any:
        """Return the value, as bytes unless it was deserialized."""
        return self._record.value

    deserialized_key, deserialized_value = key, value

    def headers(self) -> Any:
        """Return the headers as a list of pairs; None if there are none."""
        return self._record.headers or None

    def timestamp(self) -> tuple[int, int]:
        """Return the type and the milliseconds since 1970."""
        return self._record.timestamp_type + TIMESTAMP_CREATE_TIME, self._record.timestamp

    def leader_epoch(self) -> int | None:
        """Return the leader epoch of the record."""
        return self._record.leader_epoch

    def latency(self) -> float | None:
        """Return the seconds from `produce` to the delivery; None for consumed records."""
        return self._latency

    def delivery_count(self) -> int | None:
        """Return how often a share group has delivered it; None of other records."""
        return getattr(self._record, "delivery_count", None)

    def error(self) -> Any:
        """Return the `KafkaError` of an event or failed delivery; None for a record."""
        return self._error

    def set_error(self, error: Any) -> None:
        """Replace the error."""
        self._error = error

    def set_topic(self, topic: str) -> None:
        """Replace the topic."""
        self._record = self._record._replace(topic=topic)

    def set_key(self, key: Any) -> None:
        """Replace the key."""
        self._record = self._record._replace(key=key)

    def set_value(self, value: Any) -> None:
        """Replace the value."""
        self._record = self._record._replace(value=value)

    def set_headers(self, headers: Any) -> None:
        """Replace the headers."""
        self._record = self._record._replace(headers=headers)

    def __len__(self) -> int:
        """Return the length of the value; so a tombstone is false, as in confluent_kafka.

        For the dict of a typed topic it is the number of its columns.
        """
        value = self._record.value
        return 0 if value is None else len(value)


_new = Message.__new__


def consumed(record: Record) -> Message:
    """Return the message of a record; runs once for each."""
    message = _new(Message)
    message._record, message._error, message._latency = record, None, None
    return message
