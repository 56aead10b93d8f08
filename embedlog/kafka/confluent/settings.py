"""librdkafka's settings: which ones a log honors, and what embedlog calls them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from time import time as clock
from typing import Any

from embedlog.config import INT_MAX
from embedlog.errors import InvalidConfigError
from embedlog.kafka.bootstrap import LogAddress, log_address
from embedlog.kafka.client_type import log_ignored
from embedlog.kafka.confluent.kafka_errors import KafkaException, exception

_ALIASES = {
    "metadata.broker.list": "bootstrap.servers",
    "request.required.acks": "acks",
    "queue.buffering.max.ms": "linger.ms",
    "compression.codec": "compression.type",
    "delivery.timeout.ms": "message.timeout.ms",
    "message.send.max.retries": "retries",
    "max.in.flight": "max.in.flight.requests.per.connection",
    "auto.commit.enable": "enable.auto.commit",
    "max.partition.fetch.bytes": "fetch.message.max.bytes",
    "topic.metadata.refresh.interval.ms": "metadata.max.age.ms",
}

_USED = frozenset(
    "acks linger.ms batch.size message.max.bytes compression.type enable.idempotence "
    "message.timeout.ms retries retry.backoff.ms max.in.flight.requests.per.connection "
    "request.timeout.ms queue.buffering.max.messages queue.buffering.max.kbytes partitioner "
    "sticky.partitioning.linger.ms on_delivery transactional.id "
    "group.id group.instance.id partition.assignment.strategy session.timeout.ms "
    "heartbeat.interval.ms max.poll.interval.ms enable.auto.commit auto.commit.interval.ms "
    "enable.auto.offset.store fetch.min.bytes fetch.wait.max.ms fetch.max.bytes "
    "fetch.message.max.bytes auto.offset.reset enable.partition.eof check.crcs "
    "allow.auto.create.topics isolation.level on_commit "
    "bootstrap.servers client.id error_cb stats_cb throttle_cb logger "
    "statistics.interval.ms".split()
)
"""The others have no effect on a log."""
_LAST = "embedlog.last"
"""A setting that does not exist."""

_RESETS = {
    **dict.fromkeys(("smallest", "earliest", "beginning"), "earliest"),
    **dict.fromkeys(("largest", "latest", "end"), "latest"),
    "error": "none",
}
PARTITIONERS = ("random", "consistent", "consistent_random", "murmur2", "murmur2_random")


@dataclass
class ClientSettings:
    """The settings of one client, with librdkafka's names, and as text or of their type."""

    address: LogAddress
    values: dict[str, Any] = field(repr=False)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting as the program passed it."""
        return self.values.get(name, default)

    def number(self, name: str, default: int) -> int:
        """Return a whole number, rounded up."""
        return math.ceil(float(self.values.get(name, default)))

    def switch(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        return str(self.values.get(name, default)).lower() in ("true", "t", "1")

    def renamed(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Return the settings of embedlog for those that are passed on as they are."""
        return {name: self.values[key] for key, name in names.items() if key in self.values}


def merged(args: Sequence[Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a constructor: a dict, keyword arguments, or both."""
    if len(args) > 1 or (args and not isinstance(args[0], Mapping)):
        raise TypeError("expected configuration dict")
    settings = {**(args[0] if args else {}), **config}
    settings = {**(settings.pop("default.topic.config", None) or {}), **settings}
    return {_ALIASES.get(name, name): value for name, value in settings.items()}


def names_servers(settings: Mapping[str, Any]) -> bool:
    """Return whether ``bootstrap.servers`` is among the settings."""
    return not settings.keys().isdisjoint(("bootstrap.servers", "metadata.broker.list"))


def address_of(args: Sequence[Any], config: Mapping[str, Any]) -> LogAddress | None:
    """Return the log that ``bootstrap.servers`` names; None if it names brokers."""
    servers = merged(args, config).get("bootstrap.servers")
    try:
        return log_address(servers)
    except InvalidConfigError as error:
        raise exception("_INVALID_ARG", str(error)) from error


def client_settings(
    original: Callable[[dict[str, Any]], Any], args: tuple[Any, ...], config: Mapping[str, Any]
) -> ClientSettings:
    """Have librdkafka check the settings of a client on a log.

    Args:
        original: The library's own client.
        args: The positional arguments of the constructor.
        config: The others.

    Raises:
        KafkaException: librdkafka has no setting of that name (``_INVALID_ARG``), or a value is
            not valid.
        TypeError, ValueError: Those of confluent_kafka for callbacks and a missing ``group.id``.
    """
    values, address = merged(args, config), address_of(args, config)
    if address is None:
        raise TypeError(
            "A class that extends a client of embedlog.kafka.confluent uses brokers if the dict of "
            "settings is among the arguments of its own constructor: add it there, or extend the "
            "class of confluent_kafka"
        )
    try:
        # It checks each setting before it makes anything, and makes nothing because of the last.
        original({**values, "bootstrap.servers": "localhost", _LAST: ""})
    except KafkaException as error:
        if _LAST not in error.args[0].str():
            raise
    log_ignored(values.keys() - _USED)
    return ClientSettings(address, values)


def producer_config(settings: ClientSettings) -> dict[str, Any]:
    """Return embedlog's settings of a producer."""
    linger = settings.number("linger.ms", 5)
    # librdkafka's 0 is no limit.
    delivery = min(settings.number("message.timeout.ms", 300_000) or INT_MAX, INT_MAX)
    config = settings.renamed(
        {
            "acks": "acks",
            "enable.idempotence": "enable_idempotence",
            "batch.size": "batch_size",
            "retries": "retries",
            "retry.backoff.ms": "retry_backoff_ms",
            "max.in.flight.requests.per.connection": "max_in_flight_requests_per_connection",
            "client.id": "client_id",
        }
    )
    if settings.get("transactional.id"):
        if not settings.switch("enable.idempotence", True):
            raise exception("_INVALID_ARG", "transactional.id requires enable.idempotence")
        longest = settings.number("transaction.timeout.ms", 60_000)
        if settings.number("message.timeout.ms", 0) > longest:
            text = f"message.timeout.ms must not be over transaction.timeout.ms, {longest}"
            raise exception("_INVALID_ARG", text)
        name = str(settings.get("transactional.id"))
        config |= {"enable_idempotence": True, "transactional_id": name}
    return config | {
        "linger_ms": min(linger, delivery),
        "delivery_timeout_ms": delivery,
        "request_timeout_ms": min(
            settings.number("request.timeout.ms", 30_000), max(delivery - linger, 0)
        ),
        "compression_type": str(settings.get("compression.type", "none")),
        # Not the serializers of the topic: programs for confluent_kafka send bytes.
        "key_serializer": "bytes",
        "value_serializer": "bytes",
        "max_request_size": settings.number("message.max.bytes", 1_000_000),
        "buffer_memory": settings.number("queue.buffering.max.kbytes", 1_048_576) * 1024,
        # `produce` never waits: it raises BufferError.
        "max_block_ms": 0,
        "partitioner_sticky_ms": settings.number("sticky.partitioning.linger.ms", 10),
    }


def consumer_config(settings: ClientSettings) -> dict[str, Any]:
    """Return embedlog's settings of a consumer; commits are made by the wrapper."""
    session = settings.number("session.timeout.ms", 45_000)
    strategy = str(settings.get("partition.assignment.strategy", "range,roundrobin"))
    config = settings.renamed(
        {
            "group.id": "group_id",
            "group.instance.id": "group_instance_id",
            "max.poll.interval.ms": "max_poll_interval_ms",
            "fetch.min.bytes": "fetch_min_bytes",
            "fetch.wait.max.ms": "fetch_max_wait_ms",
            "check.crcs": "check_crcs",
            "isolation.level": "isolation_level",
            "client.id": "client_id",
        }
    )
    heartbeat = settings.number("heartbeat.interval.ms", 3000)
    # Partitions are fetched one by one.
    largest = settings.number("fetch.max.bytes", 52_428_800)
    return config | {
        "max_partition_fetch_bytes": min(
            settings.number("fetch.message.max.bytes", 1_048_576), largest
        ),
        "session_timeout_ms": session,
        # librdkafka does not compare the two.
        "heartbeat_interval_ms": min(heartbeat, max(session // 3, 1)),
        "partition_assignment_strategy": strategy,
        "auto_offset_reset": _RESETS[str(settings.get("auto.offset.reset", "largest")).lower()],
        "allow_auto_create_topics": settings.switch("allow.auto.create.topics", False),
        "enable_auto_commit": False,
        "key_deserializer": "bytes",
        "value_deserializer": "bytes",
    }


class Statistics:
    """Calls ``stats_cb`` with JSON every ``statistics.interval.ms``, from `poll`."""

    def __init__(self, settings: ClientSettings, kind: str) -> None:
        self._callback: Callable[[str], object] | None = settings.get("stats_cb")
        self._interval = settings.number("statistics.interval.ms", 0) / 1000
        self._kind, self._client_id = kind, settings.get("client.id", "rdkafka")
        self.enabled = self._callback is not None and self._interval > 0
        self._due = monotonic() + self._interval

    def call_if_due(self, **counts: int) -> None:
        """Call it with some numbers, named as librdkafka's, if it is time."""
        if not self.enabled or monotonic() < self._due:
            return
        self._due = monotonic() + self._interval
        now = clock()
        statistics = {
            "name": self._client_id,
            "client_id": self._client_id,
            "type": self._kind,
            "ts": int(monotonic() * 1e6),
            "time": int(now),
            **counts,
        }
        assert self._callback is not None
        self._callback(json.dumps(statistics))
