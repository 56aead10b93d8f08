"""What aiokafka's clients share: their settings, and the log that they open when they start."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any, Self

from embedlog.kafka.aiokafka.answers import LogBrokers
from embedlog.kafka.aiokafka.errors import kafka_errors
from embedlog.kafka.aiokafka.library import aiokafka, util
from embedlog.kafka.bootstrap import LogAddress, LogHandle, attach, log_address
from embedlog.kafka.client_type import Client, log_ignored
from embedlog.tasks import in_thread

_NETWORK = "sasl_", "ssl_", "security_"
"""What the names of settings begin with that a log ignores."""


class LogClient(Client):
    """A client of aiokafka on a log."""

    _handle: LogHandle | None = None
    """None before `start`."""
    _closed: bool | None = None

    @classmethod
    def _address_of(cls, args: tuple[Any, ...], configs: Mapping[str, Any]) -> LogAddress | None:
        with kafka_errors():
            return log_address(configs.get("bootstrap_servers"))

    def _set_up(self, args: tuple[Any, ...], configs: Mapping[str, Any]) -> dict[str, Any]:
        """Return all settings, which the constructor of aiokafka's class declares."""
        given = inspect.signature(self._original.__init__).bind(self, *args, **configs)
        given.apply_defaults()
        settings = dict(given.arguments)
        self._loop = settings["loop"] or util.get_running_loop()
        if any(configs.get(name) is not None for name in ("loop", "api_version")):
            text = "The parameters `loop` and `api_version` are deprecated, as in aiokafka"
            warnings.warn(text, DeprecationWarning, stacklevel=4)
        # It checks what a log ignores, and connects to nothing before `bootstrap`.
        network = {name: settings[name] for name in settings if name.startswith(_NETWORK)}
        aiokafka.AIOKafkaClient(loop=self._loop, **network)
        log_ignored({name for name in configs if name.startswith(_NETWORK)})
        self._address = self._address_of(args, configs)
        self._closed = False
        return settings

    async def _open(self) -> LogHandle:
        assert self._address is not None, "the constructor returned a client of brokers"
        try:
            handle = await in_thread(self._attach, self._address)
        except BaseException:
            await self._give_back()
            raise
        self._client = LogBrokers(handle.log)
        return handle

    def _attach(self, address: LogAddress) -> LogHandle:
        # Noted by the thread: a task that is cancelled gets nothing from it.
        self._handle = attach(address, self)
        return self._handle

    async def _give_back(self) -> None:
        if self._handle is not None:
            await in_thread(self._handle.close)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def start(self) -> None:
        """Open the log."""
        raise NotImplementedError
