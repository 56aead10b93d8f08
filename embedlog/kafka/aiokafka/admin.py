"""`AIOKafkaAdminClient`: aiokafka's admin client on a log, whose directories are brokers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from embedlog.kafka.aiokafka.client import LogClient
from embedlog.kafka.aiokafka.errors import raises_kafka_errors
from embedlog.kafka.aiokafka.library import admin
from embedlog.kafka.client_type import or_uses_brokers
from embedlog.kafka.library import public_name


def __getattr__(name: str) -> Any:
    """Return a class of ``aiokafka.admin``."""
    return public_name(admin, name)


class AIOKafkaAdminClient(LogClient, admin.AIOKafkaAdminClient):  # type: ignore[misc]
    """Administers the log that ``bootstrap_servers`` names; its methods are aiokafka's own.

    A log in one directory is a cluster of one broker, number 0, which leads all partitions; in
    several, each directory is a broker.
    """

    _original: ClassVar[Any] = admin.AIOKafkaAdminClient

    @or_uses_brokers
    def __init__(self, **configs: Mapping[str, Any]) -> None:
        settings = self._set_up((), configs)
        self._request_timeout_ms = settings["request_timeout_ms"]
        self._started, self._version_info = False, dict[Any, Any]()

    @raises_kafka_errors
    async def start(self) -> None:
        """Open the log."""
        if not self._started:
            await self._open()
            self._started = True

    async def close(self) -> None:
        """Close the client."""
        if not self._closed:
            self._closed = True
            await self._give_back()

    async def __aexit__(self, *_: object) -> None:
        await self.close()
