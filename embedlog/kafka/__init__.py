"""The clients of Kafka that programs know, on a log.

`KafkaProducer`, `KafkaConsumer` and `KafkaAdminClient` have the interface of kafka-python 3:
``bootstrap_servers="embedlog:///path"`` or a directory uses a log, and ``host:port`` returns
kafka-python's own client.  The other names are kafka-python's own; the extra
``embedlog[kafka-python]`` installs it.

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

`embedlog.kafka.confluent` has the clients of confluent_kafka, and needs that library only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embedlog.kafka import admin, errors, serializer, structs
    from embedlog.kafka.admin import KafkaAdminClient
    from embedlog.kafka.consumer import KafkaConsumer
    from embedlog.kafka.patching import patch, unpatch
    from embedlog.kafka.producer import KafkaProducer

_OWN = {
    "KafkaAdminClient": "admin",
    "KafkaConsumer": "consumer",
    "KafkaProducer": "producer",
    "patch": "patching",
    "unpatch": "patching",
}
"""What this package has in the place of kafka-python's, and besides, by module."""
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
    if name in _OWN:
        value = getattr(importlib.import_module(f"embedlog.kafka.{_OWN[name]}"), name)
    elif name in __all__ or name == "__version__":
        kafka = importlib.import_module("embedlog.kafka.kafka_python").kafka
        # It has some of them in its modules only.
        places = (kafka, kafka.admin, kafka.structs)
        value = next(getattr(place, name) for place in places if hasattr(place, name))
    else:
        raise AttributeError(f"module 'embedlog.kafka' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
