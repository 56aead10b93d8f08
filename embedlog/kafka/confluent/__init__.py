"""confluent_kafka's clients, on a log: change the import, and name a log instead of brokers.

>>> import tempfile
>>> from embedlog.kafka.confluent import Consumer, Producer
>>> log = "embedlog://" + tempfile.mkdtemp()
>>> producer = Producer({"bootstrap.servers": log})
>>> producer.produce("greetings", "hello", key="you")
>>> producer.flush()
0
>>> settings = {"group.id": "readers", "auto.offset.reset": "earliest"}
>>> with Consumer({"bootstrap.servers": log, **settings}) as consumer:
...     consumer.subscribe(["greetings"])
...     consumer.poll(5).value()
b'hello'

With ``host:port`` the constructors return confluent_kafka's own clients.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any
from zlib import crc32

from embedlog.kafka.confluent import admin, error, schema_registry, serialization
from embedlog.kafka.confluent.common_types import *  # noqa: F403 - confluent_kafka's names
from embedlog.kafka.confluent.common_types import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    OFFSET_STORED,
    TIMESTAMP_CREATE_TIME,
    TIMESTAMP_LOG_APPEND_TIME,
    TIMESTAMP_NOT_AVAILABLE,
)
from embedlog.kafka.confluent.common_types import __all__ as _types
from embedlog.kafka.confluent.consumer import Consumer, ShareConsumer
from embedlog.kafka.confluent.message import Message
from embedlog.kafka.confluent.producer import Producer
from embedlog.kafka.confluent.serializing import DeserializingConsumer, SerializingProducer
from embedlog.kafka.installed import find_original, installed
from embedlog.partitioner import partition_for_key

__version__ = "2.16.1"
"""The version of confluent_kafka whose interface this is."""


def version() -> Any:
    """Return confluent_kafka's version; newer ones return a str."""
    package = installed("confluent_kafka")
    return __version__ if package is None else package.version()


def libversion() -> tuple[str, int]:
    """Return librdkafka's version; there is none in use here."""
    package = installed("confluent_kafka")
    return ("none", 0) if package is None else package.libversion()


def murmur2(key: bytes, partition_count: int) -> int:
    """Return the partition that the partitioner ``murmur2`` chooses."""
    return partition_for_key(key, partition_count)


def consistent(key: bytes, partition_count: int) -> int:
    """Return the partition that the partitioner ``consistent`` chooses."""
    return crc32(key) % partition_count


__all__ = [
    *_types,
    "OFFSET_BEGINNING",
    "OFFSET_END",
    "OFFSET_INVALID",
    "OFFSET_STORED",
    "TIMESTAMP_CREATE_TIME",
    "TIMESTAMP_LOG_APPEND_TIME",
    "TIMESTAMP_NOT_AVAILABLE",
    "Consumer",
    "DeserializingConsumer",
    "Message",
    "Producer",
    "SerializingProducer",
    "ShareConsumer",
    "admin",
    "consistent",
    "error",
    "libversion",
    "murmur2",
    "schema_registry",
    "serialization",
    "version",
]


CLIENTS = {
    "confluent_kafka": (
        *("Consumer", "DeserializingConsumer", "Producer", "SerializingProducer", "ShareConsumer"),
    ),
    "confluent_kafka.admin": ("AdminClient",),
}
"""Where confluent_kafka has its clients."""


def modules() -> dict[str, ModuleType]:
    """Return what `embedlog.kafka.patch` puts in the place of confluent_kafka's modules.

    A patched program can import others, such as `confluent_kafka.schema_registry.avro` and
    `confluent_kafka.aio`, which use the clients of this package then.
    """
    return {
        "confluent_kafka": _replacement("confluent_kafka"),
        "confluent_kafka.admin": admin,
        "confluent_kafka.cimpl": _replacement("confluent_kafka.cimpl"),
        "confluent_kafka.error": error,
        "confluent_kafka.schema_registry": _schema_registry(),
        "confluent_kafka.serialization": serialization,
    }


def _replacement(name: str) -> ModuleType:
    """Return a module of confluent_kafka with the names of this one in the place of its own."""
    module, original = ModuleType(name, __doc__), installed(name)
    for attribute, value in ({} if original is None else vars(original)).items():
        # The package has the modules that were imported from it; those use its own clients.
        if not isinstance(value, ModuleType):
            setattr(module, attribute, value)
    for public in __all__:
        setattr(module, public, globals()[public])
    return module


def _schema_registry() -> ModuleType:
    """Return confluent_kafka's package with the client of this one; it loads when it is used.

    Its import takes a third of a second, which most programs need not spend.
    """
    name, package = "confluent_kafka.schema_registry", installed("confluent_kafka")
    if package is None:
        return schema_registry
    module = ModuleType(name, schema_registry.__doc__)

    def load(attribute: str) -> Any:
        if sys.modules.get(name) is module:
            del sys.modules[name]
            original = importlib.import_module(name)
            # Before it is replaced: for programs that name a registry of Confluent's.
            find_original(name, "SchemaRegistryClient")
            vars(original)["SchemaRegistryClient"] = schema_registry.SchemaRegistryClient
            vars(module).update(vars(original), __getattr__=load)
        try:
            return vars(module)[attribute]
        except KeyError:
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}") from None

    vars(module)["__getattr__"] = load
    # An import of one of its modules asks for it, which has to load the package.
    del module.__spec__
    return module


# Before `patch` puts other modules under these names.
installed("confluent_kafka.cimpl")
