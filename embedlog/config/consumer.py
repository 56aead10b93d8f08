"""The settings of a consumer."""

from __future__ import annotations

import re
from typing import Any, Literal

from embedlog.config.settings import Settings
from embedlog.config.values import (
    INT_MAX,
    accepted,
    checked,
    choice,
    label,
    number,
    optional_ms,
    optional_text,
    serializer,
    switch,
)


def _is_instance_id(value: object) -> bool:
    legal = isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9._-]{1,249}", value)
    return value is None or (bool(legal) and value not in (".", ".."))


def _assignors(value: Any) -> tuple[Any, ...]:
    items = [value] if isinstance(value, str) or not hasattr(value, "__iter__") else list(value)
    names = [name.strip() for item in items if isinstance(item, str) for name in item.split(",")]
    objects = [item for item in items if not isinstance(item, str)]
    if not items or not all(names) or not all(hasattr(item, "assign") for item in objects):
        raise ValueError("names of assignors, or objects with a method assign")
    return tuple(items) if objects else tuple(names)


class ConsumerConfig(Settings):
    """The settings of a consumer.

    >>> ConsumerConfig.parse({"group_id": "delays"}).auto_offset_reset
    'latest'
    """

    group_id: str | None = optional_text()
    """The consumer group; with None the consumer is in no group and commits nothing."""
    group_instance_id: str | None = accepted(
        None, _is_instance_id, "1 to 249 letters, digits, '.', '_' and '-'"
    )
    """The name of a static member, which keeps its partitions over a restart."""
    partition_assignment_strategy: Any = checked(("range", "cooperative-sticky"), _assignors)
    """Names of assignors, or assignor objects, the preferred one first."""
    auto_offset_reset: Literal["latest", "earliest", "none"] = choice("latest", "earliest", "none")
    """Where to start without a committed offset, or if it is out of range."""
    enable_auto_commit: bool = switch(True)
    """Commit the records that ``poll`` returned, in later calls of ``poll``."""
    auto_commit_interval_ms: int = number(5000, 0)
    """The interval of these commits."""
    max_poll_records: int = number(500, 1, INT_MAX)
    """Return at most this many records from one ``poll``."""
    max_poll_interval_ms: int = number(300_000, 1, INT_MAX)
    """The consumer loses its partitions if ``poll`` is not called for this long."""
    session_timeout_ms: int = number(45_000, 1, INT_MAX)
    """The consumer loses its partitions if its process hangs for this long; a crash is detected
    at once."""
    heartbeat_interval_ms: int = number(3000, 1, INT_MAX)
    """The interval of heartbeats."""
    fetch_min_bytes: int = number(1, 0, INT_MAX)
    """Wait for at least this many bytes."""
    fetch_max_bytes: int = number(50 << 20, 1, INT_MAX)
    """Read at most this much at once, but at least one batch."""
    fetch_max_wait_ms: int = number(500, 0, INT_MAX)
    """How long to wait for ``fetch_min_bytes``."""
    max_partition_fetch_bytes: int = number(1 << 20, 1, INT_MAX)
    """Read at most this much of one partition at once, but at least one batch."""
    consumer_timeout_ms: int | None = checked(None, optional_ms)
    """Iteration ends if no record comes for this long; None waits without a limit."""
    key_deserializer: Any = serializer("deserialize", "key")
    """Converts bytes to keys; None uses the serializer of the topic, and ``"bytes"`` none."""
    value_deserializer: Any = serializer("deserialize", "value")
    """Converts bytes to values, likewise."""
    allow_pickle: bool = switch(False)
    """Whether a deserializer, or that of a topic, may be ``"pickle"``, which can run any code."""
    check_crcs: bool = switch(True)
    """Verify the checksum of every column that is read."""
    isolation_level: Literal["read_uncommitted", "read_committed"] = choice(
        "read_uncommitted", "read_committed"
    )
    """Both are kept: unpublished records are never visible."""
    exclude_internal_topics: bool = switch(True)
    """Whether patterns ignore internal topics."""
    allow_auto_create_topics: bool = switch(True)
    """Whether to create a subscribed topic that does not exist."""
    metadata_max_age_ms: int = number(1000, 0)
    """The interval of the check for new topics and partitions; Kafka's 300000 saves requests."""
    request_timeout_ms: int = number(30_000, 0, INT_MAX)
    """How long a commit waits for its lock, unless the ``lock_timeout`` of the log is less."""
    default_api_timeout_ms: int = number(60_000, 0, INT_MAX)
    """The same, for a commit without a ``timeout_ms``; the shortest of the three counts."""
    retry_backoff_ms: int = number(100, 0)
    """How long to wait before a retry."""
    client_id: str = label()
    """A name for display."""
    strict: bool = switch(False)
    """embedlog's own: refuse settings for connections to brokers, such as ``bootstrap_servers``,
    which are otherwise ignored with one line in the log of the program."""

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        self._check_pickle(self.allow_pickle, "key_deserializer", "value_deserializer")
        if self.heartbeat_interval_ms >= self.session_timeout_ms:
            self._contradict("heartbeat_interval_ms", "must be less than", "session_timeout_ms")
        if self.group_instance_id is not None and self.group_id is None:
            self._contradict("group_instance_id", "needs a group, but there is", "group_id")


class ShareConsumerConfig(Settings):
    """The settings that only share consumers have; the others are those of a `ConsumerConfig`."""

    share_acknowledgement_mode: Literal["implicit", "explicit"] = choice("implicit", "explicit")
    """``implicit``: records are accepted when more are asked for, unless the program says
    otherwise; ``explicit``: the program acknowledges each before it asks for more."""
    share_acquire_mode: Literal["batch_optimized", "record_limit"] = choice(
        "batch_optimized", "record_limit"
    )
    """Both are ``record_limit``: a poll never returns more than ``max_poll_records``."""
