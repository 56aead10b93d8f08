"""What kafka-python's clients ask of a cluster, of a log whose directories are its brokers."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

from embedlog.errors import UnknownTopicOrPartitionError
from embedlog.server.cluster import NO_LEADER, controller_id, nodes, placement

if TYPE_CHECKING:
    from embedlog.api import Log

HOST, PORT = "localhost", 0

BROKER_VERSION = (4, 1)
"""The release of Kafka whose behavior clients can expect; in ``config["api_version"]``."""
Broker = collections.namedtuple("Broker", "node_id host port rack")


class LogCluster:
    """What partitioners and programs ask kafka-python's ``ClusterMetadata``."""

    def __init__(self, log: Log) -> None:
        self._log = log

    @property
    def cluster(self) -> LogCluster:
        """Itself, since kafka-python's connections have this attribute."""
        return self

    def brokers(self) -> set[Any]:
        """Return the brokers."""
        return {Broker(node.id, HOST, PORT, node.rack) for node in nodes(self._log).values()}

    def least_loaded_node(self) -> int:
        """Return the id of a broker."""
        return controller_id(self._log)

    def topics(self, exclude_internal_topics: bool = True) -> set[str]:
        """Return the names of all topics."""
        return set(self._log.topics(internal=not exclude_internal_topics))

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        """Return the partition numbers of a topic, None if it does not exist."""
        try:
            return set(range(self._log.root.partitions(topic)))
        except UnknownTopicOrPartitionError:
            return None

    def available_partitions_for_topic(self, topic: str) -> set[int] | None:
        """Return the numbers of the partitions that have a leader, None without the topic."""
        numbers = self.partitions_for_topic(topic)
        if numbers is None or not self._log.root.replicated:
            return numbers
        return {each for each in numbers if placement(self._log, topic, each).leader is not None}

    def leader_for_partition(self, partition: Any) -> int | None:
        """Return the id of the leader; -1 if there is none, None if there is no such partition."""
        if partition[1] not in (self.partitions_for_topic(partition[0]) or ()):
            return None
        leader = placement(self._log, *partition).leader
        return NO_LEADER if leader is None else leader
