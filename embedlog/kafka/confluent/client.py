"""What the producer, the consumer and the admin client have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from embedlog.api import Log
from embedlog.kafka.bootstrap import LogAddress, attach
from embedlog.kafka.client_type import Client
from embedlog.kafka.cluster import HOST, PORT
from embedlog.kafka.confluent.kafka_errors import kafka_error, translated
from embedlog.kafka.confluent.library import admin, filled
from embedlog.kafka.confluent.settings import address_of, client_settings, names_servers
from embedlog.server.cluster import NO_LEADER, cluster_id, controller_id, nodes, placement


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
        self._settings = client_settings(self._original, args, config)
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
    brokers = {
        node: filled(admin.BrokerMetadata(), id=node, host=HOST, port=PORT) for node in nodes(log)
    }
    names = [topic] if topic else log.topics()
    controller = controller_id(log)
    return filled(
        admin.ClusterMetadata(),
        cluster_id=cluster_id(log),
        controller_id=controller,
        orig_broker_id=controller,
        orig_broker_name=f"{log.path}/{controller}",
        brokers=brokers,
        topics={name: _topic_metadata(log, name) for name in names},
    )


def _topic_metadata(log: Log, name: str) -> Any:
    entry, info = filled(admin.TopicMetadata(), topic=name), log.root.topics().get(name)
    if info is None:
        return filled(entry, error=kafka_error("UNKNOWN_TOPIC_OR_PART"))
    for number in range(info.partitions):
        leader, replicas, isr = placement(log, name, number)
        entry.partitions[number] = filled(
            admin.PartitionMetadata(),
            id=number,
            leader=NO_LEADER if leader is None else leader,
            replicas=list(replicas),
            isrs=list(isr),
            error=kafka_error("LEADER_NOT_AVAILABLE") if leader is None else None,
        )
    return entry
