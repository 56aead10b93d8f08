"""The clients of Kafka that programs know, on a log.

`KafkaProducer`, `KafkaConsumer` and `KafkaAdminClient` are those of kafka-python 3:
``bootstrap_servers="embedlog:///path"`` or a directory uses a log, and ``host:port`` returns
kafka-python's own client.

>>> import tempfile
>>> from embedlog.kafka import KafkaConsumer, KafkaProducer
>>> servers = f"embedlog://{tempfile.mkdtemp()}"
>>> with KafkaProducer(bootstrap_servers=servers) as producer:
...     producer.send("greetings", b"hello").get(timeout=60).offset
0
>>> with KafkaConsumer(
...     "greetings",
...     bootstrap_servers=servers,
...     auto_offset_reset="earliest",
...     consumer_timeout_ms=100,
... ) as consumer:
...     [record.value for record in consumer]
[b'hello']
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embedlog.kafka import admin, errors, serializer, structs
    from embedlog.kafka.admin import KafkaAdminClient
    from embedlog.kafka.admin_types import IsolationLevel, NewPartitions, NewTopic, OffsetSpec
    from embedlog.kafka.consumer import KafkaConsumer
    from embedlog.kafka.patching import patch, unpatch
    from embedlog.kafka.producer import KafkaProducer
    from embedlog.kafka.serializer import (
        DefaultSerializer,
        Deserializer,
        JsonSerializer,
        Serializer,
    )
    from embedlog.kafka.structs import (
        ConsumerGroupMetadata,
        OffsetAndMetadata,
        OffsetAndTimestamp,
        TopicPartition,
        TopicPartitionReplica,
    )

__version__ = "3.0.12"
"""The release of kafka-python whose interface this is."""

_MODULES = {
    "AsyncConsumerRebalanceListener": "listeners",
    "ConsumerGroupMetadata": "structs",
    "ConsumerRebalanceListener": "listeners",
    "DefaultSerializer": "serializer",
    "Deserializer": "serializer",
    "IsolationLevel": "admin_types",
    "JsonSerializer": "serializer",
    "KafkaAdminClient": "admin",
    "KafkaConsumer": "consumer",
    "KafkaProducer": "producer",
    "NewPartitions": "admin_types",
    "NewTopic": "admin_types",
    "OffsetAndMetadata": "structs",
    "OffsetAndTimestamp": "structs",
    "OffsetSpec": "admin_types",
    "Serializer": "serializer",
    "TopicPartition": "structs",
    "TopicPartitionReplica": "structs",
    "patch": "patching",
    "unpatch": "patching",
}
_SUBMODULES = ("admin", "consumer", "errors", "producer", "serializer", "structs")

__all__ = [
    "AsyncConsumerRebalanceListener",
    "ConsumerGroupMetadata",
    "ConsumerRebalanceListener",
    "DefaultSerializer",
    "Deserializer",
    "IsolationLevel",
    "JsonSerializer",
    "KafkaAdminClient",
    "KafkaConsumer",
    "KafkaProducer",
    "NewPartitions",
    "NewTopic",
    "OffsetAndMetadata",
    "OffsetAndTimestamp",
    "OffsetSpec",
    "Serializer",
    "TopicPartition",
    "TopicPartitionReplica",
    "admin",
    "errors",
    "patch",
    "serializer",
    "structs",
    "unpatch",
]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used (PEP 562)."""
    if name in _SUBMODULES:
        return importlib.import_module(f"embedlog.kafka.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'embedlog.kafka' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"embedlog.kafka.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
