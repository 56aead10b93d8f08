"""A log as a cluster: each directory is a broker.

A log in one directory is one broker, number 0.  In several, the brokers have the ids of the
directories (`Log.replicas`), and those are alive that are online.
"""

from __future__ import annotations

import collections
import tomllib
from typing import TYPE_CHECKING, Any, NamedTuple

from embedlog.errors import UnknownTopicOrPartitionError
from embedlog.files.paths import FORMAT_FILE
from embedlog.partition.partition_log import ReplicaPlacement
from embedlog.replication.root import ReplicatedRoot

if TYPE_CHECKING:
    from embedlog.api import Log

NODE = 0
"""The id of the broker of a log in one directory."""
HOST, PORT = "localhost", 0
NO_LEADER = -1

BROKER_VERSION = (4, 1)
"""The release of Kafka whose behavior clients can expect; in ``config["api_version"]``."""
Broker = collections.namedtuple("Broker", "node_id host port rack")


class DirectoryNode(NamedTuple):
    """A directory as a broker."""

    id: int
    path: str
    rack: str | None


def cluster_id(log: Log) -> str:
    """Return the id of a log."""
    if isinstance(log.root, ReplicatedRoot):
        return log.root.cluster_id
    text = log.root.context.files.read_file(FORMAT_FILE).decode()
    return str(tomllib.loads(text)["id"])


def nodes(log: Log) -> dict[int, DirectoryNode]:
    """Return the brokers that are alive, by id."""
    if not isinstance(log.root, ReplicatedRoot):
        return {NODE: DirectoryNode(NODE, log.path, None)}
    image = log.root.controller.current().image
    infos = {each: image.directories[each] for each in image.online}
    return {each: DirectoryNode(each, info.path, info.rack) for each, info in infos.items()}


def controller_id(log: Log) -> int:
    """Return the id of the controller."""
    if not isinstance(log.root, ReplicatedRoot):
        return NODE
    return log.root.controller.current().directory.id


def placement(log: Log, topic: str, partition: int) -> ReplicaPlacement:
    """Return the brokers of a partition."""
    if not isinstance(log.root, ReplicatedRoot):
        return ReplicaPlacement(NODE, (NODE,), (NODE,))
    return log.root.partition(topic, partition).placement


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
