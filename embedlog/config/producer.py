"""The settings of a producer."""

from __future__ import annotations

from typing import Any, Literal

from embedlog.config.settings import Settings
from embedlog.config.values import (
    INT_MAX,
    accepted,
    checked,
    compression,
    label,
    number,
    optional_ms,
    optional_text,
    serializer,
    switch,
)
from embedlog.errors import InvalidConfigError

_ACKS = {"all": "all", "-1": "all", "0": 0, "1": 1}


def _acks(value: object) -> object:
    if isinstance(value, bool) or str(value) not in _ACKS:
        raise ValueError("one of 0, 1, all")
    return _ACKS[str(value)]


class ProducerConfig(Settings):
    """The settings of a producer.

    >>> ProducerConfig.parse({"acks": "1", "linger.ms": 5}).enable_idempotence
    False
    """

    acks: Literal[0, 1, "all"] = checked("all", _acks)
    """When a send is acknowledged: 0, once buffered; 1, once written and visible; ``"all"``, once
    as durable as the ``durability`` of the log."""
    batch_size: int = number(256 << 10, 0, INT_MAX)
    """A batch is full at this many bytes; larger than Kafka's 16384, for columns."""
    linger_ms: int = number(0, 0)
    """Wait this long for more records before a batch is written."""
    buffer_memory: int = number(32 << 20, 0)
    """``send`` waits while this many bytes are not written yet."""
    max_block_ms: int = number(60_000, 0)
    """How long ``send`` waits before it raises."""
    max_request_size: int = number(1 << 20, 0, INT_MAX)
    """Refuse larger records, by the estimate of Kafka's producer."""
    compression_type: Literal["none", "lz4", "zstd"] = checked("none", compression)
    """``none``, ``lz4`` or ``zstd``; ``gzip`` means ``zstd``, and ``snappy`` ``lz4``."""
    enable_idempotence: bool = switch(None)
    """Whether batches get sequence numbers, so that a retry is not written twice.

    On by default, unless other settings exclude it; an error if set together with those.
    """
    producer_name: str | None = optional_text()
    """embedlog's own: a persistent identity; a new producer with it fences the older one."""
    transactional_id: str | None = accepted(
        None, lambda value: value is None or isinstance(value, str), "a str"
    )
    """Send in transactions only; a new producer with the same id fences the older one.

    With an empty one no producer is fenced, but for what positions of a group fence.
    """
    key_serializer: Any = serializer("serialize", "key")
    """Converts keys to bytes; None uses the serializer of the topic, and ``"bytes"`` none."""
    value_serializer: Any = serializer("serialize", "value")
    """Converts values to bytes, likewise."""
    allow_pickle: bool = switch(False)
    """Whether a serializer, or that of a topic, may be ``"pickle"``."""
    partitioner: Any = accepted(
        None,
        lambda value: value in (None, "round_robin") or callable(value),
        "None, 'round_robin' or a callable(key, partitions, available)",
    )
    """None: by key, without a key sticky; ``"round_robin"``; or kafka-python's
    ``callable(key_bytes, all_partitions, available_partitions)``."""
    partitioner_ignore_keys: bool = switch(False)
    """Distribute records with keys as if they had none."""
    partitioner_sticky_bytes: int = number(16 << 10, 1, INT_MAX)
    """embedlog's own: records without a key move on to another partition after this many bytes,
    or ``batch_size`` if less.

    The default is that of Kafka's ``batch.size``; batches are larger here, and never split.
    """
    partitioner_sticky_ms: int = number(100, 0)
    """embedlog's own: and after this time, so that slow streams reach all partitions."""
    partitioner_adaptive_partitioning_enable: bool = switch(True)
    """Choose partitions with longer queues less often."""
    retries: int = number(INT_MAX, 0, INT_MAX)
    """How often a failed append is retried; after that the record fails with the last error."""
    retry_backoff_ms: int = number(100, 0)
    """How long to wait before a retry."""
    delivery_timeout_ms: int = checked(None, optional_ms)
    """A record fails if it is not written this long after ``send``.

    By default two minutes, or ``linger_ms`` plus ``request_timeout_ms`` if that is more.
    """
    request_timeout_ms: int = number(30_000, 0, INT_MAX)
    """How long an append waits for its locks."""
    max_in_flight_requests_per_connection: int = number(5, 1, INT_MAX)
    """An upper limit, which is kept at any value: appends are made one at a time.  More
    than 5 exclude idempotence, as in Kafka."""
    metadata_max_age_ms: int = number(300_000, 0)
    """An upper limit, which is kept at any value: a change of a topic is seen immediately."""
    client_id: str = label()
    """A name for display."""
    strict: bool = switch(False)
    """embedlog's own: refuse settings for connections to brokers, such as ``bootstrap_servers``,
    which are otherwise ignored with one line in the log of the program."""

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        self._check_pickle(self.allow_pickle, "key_serializer", "value_serializer")
        shortest = self.linger_ms + self.request_timeout_ms
        if self.delivery_timeout_ms is None:
            self._set("delivery_timeout_ms", max(120_000, shortest))
        if self.delivery_timeout_ms < shortest:
            raise InvalidConfigError(
                f"delivery_timeout_ms {self.delivery_timeout_ms} must not be less than linger_ms "
                f"{self.linger_ms} plus request_timeout_ms {self.request_timeout_ms}",
                todo="Raise delivery_timeout_ms, or lower request_timeout_ms.",
                settings=("delivery_timeout_ms", "linger_ms", "request_timeout_ms"),
            )
        conflicts = {
            "acks": self.acks != "all",
            "retries": self.retries == 0,
            "max_in_flight_requests_per_connection": self.max_in_flight_requests_per_connection > 5,
        }
        conflict = next((name for name, conflicting in conflicts.items() if conflicting), None)
        if self.transactional_id is not None and self.producer_name is not None:
            self._contradict("transactional_id", "cannot be combined with", "producer_name")
        named = self.producer_name is not None or self.transactional_id is not None
        required, explicit = self.enable_idempotence or named, self.enable_idempotence
        if self.enable_idempotence is None:
            self._set("enable_idempotence", required or conflict is None)
        if required and not self.enable_idempotence:
            conflict = "enable_idempotence"
        if required and conflict:
            name = "producer_name" if self.producer_name else "enable_idempotence"
            if named and not (self.producer_name or explicit):
                name = "transactional_id"
            self._contradict(name, "cannot be combined with", conflict)
