"""What the producer, the consumer and the admin client have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from embedlog.api import Log
from embedlog.catalog import INTERNAL
from embedlog.kafka.bootstrap import LogAddress, attach
from embedlog.kafka.client_type import Client
from embedlog.kafka.cluster import (
    HOST,
    NO_LEADER,
    PORT,
    cluster_id,
    controller_id,
    nodes,
    placement,
)
from embedlog.kafka.confluent import admin_types as kinds
from embedlog.kafka.confluent.kafka_errors import kafka_error, translated
from embedlog.kafka.confluent.settings import address_of, client_settings, names_servers


class LogClient(Client):
    """A client of confluent_kafka on a log."""

    @classmethod
    def _address_of(cls, args: tuple[Any, ...], configs: Mapping[str, Any]) -> LogAddress | None:
        return address_of(args, configs)

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, **configs: Any) -> Any:
            """Return a client of the log, or of the brokers, that the settings name.

            That of a program's subclass has the settings among its arguments, or uses a log.
            """
            if "_original" not in vars(cls):
                dicts = [argument for argument in args if isinstance(argument, Mapping)]
                settings = [options for options in (*dicts, configs) if names_servers(options)]
                if settings and address_of(settings[:1], {}) is None:
                    kind = cls._with_base_for_brokers()
                    # Python calls its __init__, since it is an instance of ``cls``.
                    return kind.__new__(kind)
            return super().__new__(cls, *args, **configs)

    def __init__(self, *args: Any, **config: Any) -> None:
        self._settings = client_settings(args, config)
        with translated(InvalidConfigError="_INVALID_ARG"):
            self._handle = attach(self._settings.address, self)

    @property
    def _log(self) -> Log:
        return self._handle.log

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        """Return the `ClusterMetadata`: the brokers, and the topics or the one that is named."""
        with translated():
            return cluster_metadata(self._log, topic)

    def cluster_id(self, timeout: float = -1) -> str:
        """Return the id of the log."""
        with translated():
            return cluster_id(self._log)

    def set_sasl_credentials(self, username: str, password: str) -> None:
        """Do nothing: a log has no connections."""


def cluster_metadata(log: Log, topic: str | None) -> Any:
    """Return the metadata of the log as that of a cluster."""
    metadata: Any = kinds.ClusterMetadata()
    metadata.cluster_id = cluster_id(log)
    controller = controller_id(log)
    metadata.controller_id = metadata.orig_broker_id = controller
    metadata.orig_broker_name = f"{log.path}/{controller}"
    for node in nodes(log):
        broker: Any = kinds.BrokerMetadata()
        broker.id, broker.host, broker.port = node, HOST, PORT
        metadata.brokers[node] = broker
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
            leader, replicas, isr = placement(log, name, number)
            partition.id, partition.leader = number, NO_LEADER if leader is None else leader
            partition.replicas, partition.isrs = list(replicas), list(isr)
            if leader is None:
                partition.error = kafka_error("LEADER_NOT_AVAILABLE")
            entry.partitions[number] = partition
        metadata.topics[name] = entry
    return metadata
