"""`patch`: programs that import ``kafka`` or ``confluent_kafka`` run on a log, unchanged."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from types import ModuleType
from typing import Any, Self

from embedlog.kafka import bootstrap
from embedlog.kafka.installed import broker_client, kafka_python

_CLIENTS = {
    "KafkaAdminClient": ("kafka", "kafka.admin", "kafka.admin.client"),
    "KafkaConsumer": ("kafka", "kafka.consumer", "kafka.consumer.group"),
    "KafkaProducer": ("kafka", "kafka.producer", "kafka.producer.kafka"),
}
"""Where kafka-python has its clients."""

_MODULES = {
    "kafka": "embedlog.kafka",
    "kafka.admin": "embedlog.kafka.admin",
    "kafka.admin.client": "embedlog.kafka.admin",
    "kafka.consumer": "embedlog.kafka.consumer",
    "kafka.consumer.fetcher": "embedlog.kafka.structs",
    "kafka.consumer.group": "embedlog.kafka.consumer",
    "kafka.consumer.subscription_state": "embedlog.kafka.listeners",
    "kafka.errors": "embedlog.kafka.errors",
    "kafka.producer": "embedlog.kafka.producer",
    "kafka.producer.future": "embedlog.kafka.producer",
    "kafka.producer.kafka": "embedlog.kafka.producer",
    "kafka.serializer": "embedlog.kafka.serializer",
    "kafka.structs": "embedlog.kafka.structs",
}
"""What stands for kafka-python where it is not installed."""

_CONFLUENT = "embedlog.kafka.confluent"


class Patch:
    """The effect of a call of `patch`, until `unpatch` or the end of a ``with`` block."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def undo(self) -> None:
        """Take back what was replaced; may be repeated."""
        if self in _patches:
            _patches.remove(self)
        self._undo.close()

    def redirect(self, address: bootstrap.LogAddress) -> None:
        """Have every address name one log."""
        self._undo.callback(bootstrap.redirect, bootstrap.redirection())
        bootstrap.redirect(address)

    def replace_clients(self, module: ModuleType) -> None:
        """Have the client classes of kafka-python make clients of a log."""
        for name, places in _CLIENTS.items():
            original, client = broker_client(name), getattr(module, name)
            for place in map(kafka_python, places):
                if getattr(place, name, None) is original:
                    self._undo.callback(setattr, place, name, original)
                    setattr(place, name, client)
            # For programs that have imported the class already.
            self._undo.callback(delattr, original, "__new__")
            original.__new__ = _leads_to(original, client)

    def replace_modules(self, modules: Mapping[str, ModuleType]) -> None:
        """Have modules imported in place of others."""
        for name, module in modules.items():
            before = sys.modules.get(name)
            if before is None:
                self._undo.callback(sys.modules.pop, name, None)
            else:
                self._undo.callback(sys.modules.__setitem__, name, before)
            sys.modules[name] = module


_patches: list[Patch] = []


def _leads_to(original: Any, client: Any) -> Any:
    """Return a ``__new__`` of kafka-python's class that makes clients of a log."""

    def new(cls: Any, *args: Any, **configs: Any) -> Any:
        if cls is original and bootstrap.log_address(configs.get("bootstrap_servers")) is not None:
            return client(*args, **configs)
        return object.__new__(cls)

    return staticmethod(new)


def patch(servers: Any = None) -> Patch:
    """Have programs that import ``kafka`` or ``confluent_kafka`` use a log, unchanged.

    Args:
        servers: The log that every address names from now on, as ``"embedlog:///path"`` or a
            directory.  Without it, only addresses of that form lead to a log.

    Returns:
        A context manager, which takes everything back; so does `unpatch`.

    Raises:
        KafkaConfigurationError: ``servers`` does not name a log.
    """
    from embedlog.kafka import errors

    address = None
    if servers is not None:
        with errors.kafka_errors():
            address = bootstrap.log_address(servers)
        if address is None:
            raise errors.KafkaConfigurationError(f"{servers!r} does not name a log")
    kafka = importlib.import_module("embedlog.kafka")
    applied = Patch()
    try:
        if address is not None:
            applied.redirect(address)
        if kafka_python() is not None:
            if not _patches:
                applied.replace_clients(kafka)
        else:
            modules = {name: importlib.import_module(path) for name, path in _MODULES.items()}
            applied.replace_modules(modules)
        applied.replace_modules(importlib.import_module(_CONFLUENT).MODULES)
    except BaseException:
        applied.undo()
        raise
    _patches.append(applied)
    return applied


def unpatch() -> None:
    """Take back what `patch` did."""
    while _patches:
        _patches[-1].undo()
