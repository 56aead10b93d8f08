"""A log as kafka-python's view of a cluster: one broker, which leads all partitions."""

from __future__ import annotations

import collections
import tomllib
from typing import TYPE_CHECKING, Any

from embedlog.errors import UnknownTopicOrPartitionError
from embedlog.kafka.installed import pick
from embedlog.keyspace import FORMAT_FILE

if TYPE_CHECKING:
    from embedlog.api import Log

NODE = 0
"""The id of the only broker."""
HOST, PORT = "localhost", 0

_Broker: Any = pick(
    "kafka.cluster",
    "BrokerMetadata",
    collections.namedtuple("BrokerMetadata", "node_id host port rack"),
)


def cluster_id(log: Log) -> str:
    """Return the id of a log."""
    text = log.root.context.files.read_file(FORMAT_FILE).decode()
    return str(tomllib.loads(text)["id"])


class LogCluster:
    """What partitioners and programs ask kafka-python's ``ClusterMetadata``."""

    def __init__(self, log: Log) -> None:
        self._log = log

    @property
    def cluster(self) -> LogCluster:
        """Itself, since kafka-python's connections have this attribute."""
        return self

    def brokers(self) -> set[Any]:
        """Return the only broker."""
        return {_Broker(NODE, HOST, PORT, None)}

    def least_loaded_node(self) -> int:
        """Return the id of the only broker."""
        return NODE

    def topics(self, exclude_internal_topics: bool = True) -> set[str]:
        """Return the names of all topics."""
        return set(self._log.topics(internal=not exclude_internal_topics))

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        """Return the partition numbers of a topic, None if it does not exist."""
        try:
            return set(range(self._log.root.partitions(topic)))
        except UnknownTopicOrPartitionError:
            return None

    available_partitions_for_topic = partitions_for_topic

    def leader_for_partition(self, partition: Any) -> int | None:
        """Return the id of the only broker, None if the partition does not exist."""
        return NODE if partition[1] in (self.partitions_for_topic(partition[0]) or ()) else None
