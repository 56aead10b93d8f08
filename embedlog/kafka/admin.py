"""`KafkaAdminClient`: kafka-python's admin client on a log, whose directories are brokers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from embedlog.kafka import errors
from embedlog.kafka.broker_answers import LogBrokers
from embedlog.kafka.client import LogClient
from embedlog.kafka.client_type import or_uses_brokers
from embedlog.kafka.kafka_python import kafka
from embedlog.kafka.library import public_name


def __getattr__(name: str) -> Any:
    """Return a class of ``kafka.admin``."""
    return public_name(kafka.admin, name)


class KafkaAdminClient(LogClient, kafka.KafkaAdminClient):  # type: ignore[misc]
    """Administers the log that ``bootstrap_servers`` names; its methods are kafka-python's own.

    A log in one directory is a cluster of one broker, number 0, which leads all partitions; in
    several, each directory is a broker.  What only a cluster can answer, such as its users, quotas
    and features, is refused with `UnsupportedVersionError`.
    """

    _original = kafka.KafkaAdminClient

    DEFAULT_CONFIG: ClassVar[Mapping[str, Any]] = kafka.KafkaAdminClient.DEFAULT_CONFIG

    @or_uses_brokers
    def __init__(self, **configs: Any) -> None:
        if unknown := configs.keys() - self.DEFAULT_CONFIG.keys():
            raise errors.KafkaConfigurationError(f"Unrecognized configs: {unknown}")
        self._open(configs)
        self._manager = self._net = LogBrokers(self._log)
        self._controller_id: int | None = None

    def close(self) -> None:
        """Close the client."""
        if not self._closed:
            self._closed = True
            self._handle.close()

    def __exit__(self, *_: object) -> None:
        self.close()
