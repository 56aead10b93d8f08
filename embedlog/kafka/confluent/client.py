"""What the producer, the consumer and the admin client have in common."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar, Self

from embedlog.api import Log
from embedlog.catalog import INTERNAL
from embedlog.kafka.bootstrap import attach
from embedlog.kafka.confluent import admin_types as kinds
from embedlog.kafka.confluent.installed import broker_client
from embedlog.kafka.confluent.kafka_errors import kafka_error, translated
from embedlog.kafka.confluent.settings import address_of, client_settings

BROKER = 0
"""The id of the only broker in metadata."""


class Client:
    """A client of a log; its constructor returns confluent_kafka's own client for brokers."""

    _original: ClassVar[tuple[str, str]]
    """The module and name of confluent_kafka's class."""

    def __new__(cls, *args: Any, **config: Any) -> Any:
        """Return a client of the log, or of the brokers, that ``bootstrap.servers`` names."""
        if address_of(args, config) is None:
            if "_original" not in vars(cls):
                raise TypeError(
                    f"{cls.__name__} derives from embedlog's {cls._original[1]}, so it can only "
                    "use a log; derive it from confluent_kafka's class to use brokers"
                )
            return broker_client(*cls._original, args, config)
        return super().__new__(cls)

    def __init__(self, *args: Any, **config: Any) -> None:
        self._settings = client_settings(args, config)
        with translated(InvalidConfigError="_INVALID_ARG"):
            self._handle = attach(self._settings.address)
        # A program need not close its clients.
        self._release_log = weakref.finalize(self, self._handle.close)

    @property
    def _log(self) -> Log:
        return self._handle.log

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        """Return the `ClusterMetadata`: one broker, and the topics or the one that is named."""
        with translated():
            return cluster_metadata(self._log, topic)

    def cluster_id(self, timeout: float = -1) -> str:
        """Return the name of the log: its path."""
        return self._log.path

    def set_sasl_credentials(self, username: str, password: str) -> None:
        """Do nothing: a log has no connections."""

    def __enter__(self) -> Self:
        return self


def cluster_metadata(log: Log, topic: str | None) -> Any:
    """Return the metadata of the log as those of a cluster with one broker."""
    metadata: Any = kinds.ClusterMetadata()
    metadata.cluster_id = log.path
    metadata.controller_id = metadata.orig_broker_id = BROKER
    metadata.orig_broker_name = f"{log.path}/{BROKER}"
    broker: Any = kinds.BrokerMetadata()
    broker.id, broker.host, broker.port = BROKER, "localhost", 0
    metadata.brokers[BROKER] = broker
    topics = log.root.topics()
    names = [topic] if topic else [name for name in topics if not name.startswith(INTERNAL)]
    for name in names:
        info = topics.get(name)
        entry: Any = kinds.TopicMetadata()
        entry.topic = name
        if info is None:
            entry.error = kafka_error("UNKNOWN_TOPIC_OR_PART")
        for number in range(0 if info is None else info.partitions):
            partition: Any = kinds.PartitionMetadata()
            partition.id, partition.leader = number, BROKER
            partition.replicas, partition.isrs = [BROKER], [BROKER]
            entry.partitions[number] = partition
        metadata.topics[name] = entry
    return metadata
