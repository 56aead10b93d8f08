"""Kafka's log as a Python library: one directory, shared by any number of processes.

>>> import embedlog, tempfile
>>> log = embedlog.open(tempfile.mkdtemp())
>>> with log.producer() as producer:
...     producer.send("greetings", b"hello", key=b"you").result().offset
0
>>> log.topic("greetings")[0].value
b'hello'
>>> log.close()

Importing embedlog loads nothing heavy, nor do records of bytes: pyarrow is loaded for columns,
headers, compressed and large batches, and typed topics, when they are first used.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from embedlog.version import __version__ as __version__

if not sys.platform.startswith("linux"):
    raise ImportError(
        "embedlog runs on Linux only (also in WSL 2 and in containers), since it relies on locks "
        f"and shared memory of the kernel that {sys.platform} does not have"
    )

if TYPE_CHECKING:
    from embedlog import errors
    from embedlog.api import Log, open  # noqa: A004 - like `shelve.open`
    from embedlog.api.at import LogAt
    from embedlog.api.backups import restore
    from embedlog.api.consumer_group import ConsumerGroup, Groups
    from embedlog.api.dead_letters import DeadLetter, DeadLetters
    from embedlog.api.failover import Mirrors
    from embedlog.api.housekeeping import Housekeeping
    from embedlog.api.open_snapshot import OpenSnapshot, open_snapshot
    from embedlog.api.replicas import Replicas
    from embedlog.api.run_group import GroupRun, run_group
    from embedlog.api.run_mirror import MirrorRun, mirror
    from embedlog.api.snapshots import Snapshots
    from embedlog.api.topic import Topic
    from embedlog.config import TopicConfig
    from embedlog.consumer.consumer import Consumer
    from embedlog.consumer.rebalance_notifier import ConsumerRebalanceListener
    from embedlog.producer import Producer
    from embedlog.record import (
        OffsetAndMetadata,
        OffsetAndTimestamp,
        Record,
        RecordMetadata,
        TopicPartition,
    )
    from embedlog.registry.avro_serializers import AvroDeserializer, AvroSerializer
    from embedlog.registry.schema_registry import RegisteredSchema, SchemaRegistry
    from embedlog.retry import Retry
    from embedlog.server.server import KafkaServer, serve
    from embedlog.share.share_consumer import ShareConsumer
    from embedlog.share.stored_records import ShareRecord
    from embedlog.snapshots.snapshot import Snapshot
    from embedlog.splits.split import Split

_NAMES = {
    "api": "open Log",
    "api.topic": "Topic",
    "api.run_group": "run_group GroupRun",
    "api.run_mirror": "mirror MirrorRun",
    "api.consumer_group": "ConsumerGroup Groups",
    "api.dead_letters": "DeadLetter DeadLetters",
    "api.failover": "Mirrors",
    "api.housekeeping": "Housekeeping",
    "api.at": "LogAt",
    "api.backups": "restore",
    "api.open_snapshot": "OpenSnapshot open_snapshot",
    "api.snapshots": "Snapshots",
    "snapshots.snapshot": "Snapshot",
    "api.replicas": "Replicas",
    "producer": "Producer",
    "consumer.consumer": "Consumer",
    "consumer.rebalance_notifier": "ConsumerRebalanceListener",
    "config": "TopicConfig",
    "record": "Record RecordMetadata TopicPartition OffsetAndMetadata OffsetAndTimestamp",
    "splits.split": "Split",
    "registry.avro_serializers": "AvroDeserializer AvroSerializer",
    "registry.schema_registry": "RegisteredSchema SchemaRegistry",
    "retry": "Retry",
    "share.share_consumer": "ShareConsumer",
    "share.stored_records": "ShareRecord",
    "server.server": "KafkaServer serve",
}
"""The public names of each module."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "AvroDeserializer",
    "AvroSerializer",
    "Consumer",
    "ConsumerGroup",
    "ConsumerRebalanceListener",
    "DeadLetter",
    "DeadLetters",
    "GroupRun",
    "Groups",
    "Housekeeping",
    "KafkaServer",
    "Log",
    "LogAt",
    "MirrorRun",
    "Mirrors",
    "OffsetAndMetadata",
    "OffsetAndTimestamp",
    "OpenSnapshot",
    "Producer",
    "Record",
    "RecordMetadata",
    "RegisteredSchema",
    "Replicas",
    "Retry",
    "SchemaRegistry",
    "ShareConsumer",
    "ShareRecord",
    "Snapshot",
    "Snapshots",
    "Split",
    "Topic",
    "TopicConfig",
    "TopicPartition",
    "errors",
    "mirror",
    "open",
    "open_snapshot",
    "restore",
    "run_group",
    "serve",
]


# For type checkers every name would exist.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Load a public name when it is first used (PEP 562)."""
        if name in ("errors", "spark"):
            return importlib.import_module(f"embedlog.{name}")
        if name not in _MODULES:
            message = f"module 'embedlog' has no attribute {name!r}"
            if name.endswith("Error") and hasattr(importlib.import_module("embedlog.errors"), name):
                message += f"; it is embedlog.errors.{name}"
            raise AttributeError(message)
        value = getattr(importlib.import_module(f"embedlog.{_MODULES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
