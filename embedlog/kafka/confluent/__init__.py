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

With ``host:port`` the constructors return confluent_kafka's own clients.  The types and errors
are confluent_kafka's own; the extra ``embedlog[confluent-kafka]`` installs it.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from embedlog.kafka.confluent import admin
from embedlog.kafka.confluent.consumer import Consumer
from embedlog.kafka.confluent.library import cimpl, confluent_kafka, error, serialization
from embedlog.kafka.confluent.message import Message as Message
from embedlog.kafka.confluent.producer import Producer
from embedlog.kafka.confluent.serializing import DeserializingConsumer, SerializingProducer
from embedlog.kafka.confluent.share_consumer import DeserializingShareConsumer, ShareConsumer
from embedlog.kafka.library import public_name

__version__ = confluent_kafka.__version__

_OWN = [
    *("Consumer", "DeserializingConsumer", "Message", "Producer", "SerializingProducer"),
    *("DeserializingShareConsumer", "ShareConsumer", "admin", "error", "serialization"),
]
"""What stands here for names of confluent_kafka."""
_REGISTRY = "confluent_kafka.schema_registry"

__all__ = [
    *_OWN,
    *(name for name in confluent_kafka.__all__ if hasattr(confluent_kafka, name)),
]


def __getattr__(name: str) -> Any:
    """Return a name of confluent_kafka, or load the client of the registry when it is used.

    That takes a third of a second, and needs more libraries.
    """
    if name == "schema_registry":
        return importlib.import_module("embedlog.kafka.confluent.schema_registry")
    return public_name(confluent_kafka, name)


def clients() -> list[Any]:
    """Return the clients that `embedlog.kafka.patch` puts in the place of confluent_kafka's."""
    kinds: list[Any] = [
        Consumer,
        DeserializingConsumer,
        DeserializingShareConsumer,
        Producer,
        SerializingProducer,
        ShareConsumer,
    ]
    if _REGISTRY in sys.modules:  # which needs more libraries
        kinds.append(__getattr__("schema_registry").SchemaRegistryClient)
    return [kind for kind in (*kinds, admin.AdminClient) if kind._original is not None]


def modules() -> dict[str, ModuleType]:
    """Return the modules with which `embedlog.kafka.patch` replaces confluent_kafka's.

    A patched program can import others, such as `confluent_kafka.schema_registry.avro` and
    `confluent_kafka.aio`, which use the clients of this package then.
    """
    return {
        "confluent_kafka": _replacement(confluent_kafka),
        "confluent_kafka.admin": admin,
        "confluent_kafka.cimpl": _replacement(cimpl),
        "confluent_kafka.error": error,
        _REGISTRY: _schema_registry(),
        "confluent_kafka.serialization": serialization,
    }


def _replacement(original: ModuleType) -> ModuleType:
    """Return a module of confluent_kafka with the names of this one in the place of its own."""
    module = ModuleType(original.__name__, __doc__)
    for attribute, value in vars(original).items():
        # The package has the modules that were imported from it; those use its own clients.
        if not isinstance(value, ModuleType):
            setattr(module, attribute, value)
    for public in _OWN:
        setattr(module, public, globals()[public])
    return module


def _schema_registry() -> ModuleType:
    """Return confluent_kafka's package with the client of this one; it loads when it is used."""
    module = ModuleType(_REGISTRY)

    def load(attribute: str) -> Any:
        if sys.modules.get(_REGISTRY) is module:
            del sys.modules[_REGISTRY]
            original = importlib.import_module(_REGISTRY)
            # It keeps the library's own client before that is replaced.
            ours = __getattr__("schema_registry").SchemaRegistryClient
            vars(original)["SchemaRegistryClient"] = ours
            vars(module).update(vars(original), __getattr__=load)
        try:
            return vars(module)[attribute]
        except KeyError:
            raise AttributeError(f"module {_REGISTRY!r} has no attribute {attribute!r}") from None

    vars(module)["__getattr__"] = load
    # An import of one of its modules asks for it, which has to load the package.
    del module.__spec__
    return module
