"""What the three clients of kafka-python share: their settings, and the log that they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from embedlog.catalog import check_topic_name
from embedlog.errors import InvalidTopicError
from embedlog.kafka.bootstrap import LogAddress, attach, log_address
from embedlog.kafka.client_type import Client, log_ignored
from embedlog.kafka.cluster import BROKER_VERSION, LogCluster
from embedlog.kafka.errors import kafka_errors
from embedlog.kafka.kafka_python import kafka
from embedlog.serializers import Action, Adapter, Field, adapt

_SHARED = {
    *("allow_auto_create_topics", "bootstrap_servers", "client_id", "metadata_max_age_ms"),
    *("max_in_flight_requests_per_connection", "metrics_enabled", "request_timeout_ms"),
    "retry_backoff_ms",
}
NETWORK_SETTINGS: frozenset[str] = frozenset(
    kafka.KafkaProducer.DEFAULT_CONFIG.keys() & kafka.KafkaConsumer.DEFAULT_CONFIG.keys() - _SHARED
)
"""The settings of all clients that are about connections; a log ignores them."""


def adapted(serializer: Any, action: Action, field: Field) -> Adapter | None:
    """Return a serializer or deserializer of kafka-python as the log calls it; None if not set.

    Raises:
        TypeError: It is neither callable, nor an object with such a method.
    """
    if serializer is None:
        return None
    try:
        return adapt(serializer, action, field, pass_none=True)
    except ValueError as error:
        raise TypeError(f"{field}_{action}r: {error}") from None


def check_topics(topics: Iterable[Any]) -> None:
    """Check names of topics.

    Raises:
        ValueError: No topic can have one of them.
        TypeError: One is not a str.
    """
    for topic in topics:
        if not isinstance(topic, str):
            raise TypeError(f"A topic must be a str, got {topic!r}")
        try:
            check_topic_name(topic)
        except InvalidTopicError as error:
            raise ValueError(str(error)) from error


class LogClient(Client):
    """A client of kafka-python on a log."""

    DEFAULT_CONFIG: ClassVar[Mapping[str, Any]]

    config: dict[str, Any]
    """All settings, as in kafka-python."""

    @classmethod
    def _address_of(cls, args: tuple[Any, ...], configs: Mapping[str, Any]) -> LogAddress | None:
        with kafka_errors():
            return log_address(configs.get("bootstrap_servers"))

    def _open(self, configs: Mapping[str, Any]) -> None:
        """Set `config` and attach to the log."""
        self.config = {**self.DEFAULT_CONFIG, **configs}
        self.config["api_version"] = self.config["api_version"] or BROKER_VERSION
        address = self._address_of((), configs)
        assert address is not None, "the constructor returned a client of brokers"
        log_ignored(configs.keys() & NETWORK_SETTINGS)
        with kafka_errors():
            self._handle = attach(address, self)
        self._log = self._handle.log
        self._client = self._manager = LogCluster(self._log)
        self._closed = False

    def bootstrap_connected(self) -> bool:
        """Return whether the log is open."""
        return not self._closed and not self._log.root.closed

    def _close_serializers(self, *names: str) -> None:
        for name in names:
            close = getattr(self.config[name], "close", None)
            if callable(close):
                close()
