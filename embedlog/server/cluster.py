"""A log as a cluster: each directory is a broker.

A log in one directory is one broker, number 0.  In several, the brokers have the ids of the
directories (`Log.replicas`), and those are alive that are online.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple
from uuid import NAMESPACE_OID, UUID, uuid5

from embedlog.catalog import TopicInfo
from embedlog.partition.partition_log import ReplicaPlacement
from embedlog.replication.root import ReplicatedRoot

if TYPE_CHECKING:
    from embedlog.api import Log

NODE = 0
"""The id of the broker of a log in one directory."""
NO_LEADER = -1


class DirectoryNode(NamedTuple):
    """A directory as a broker."""

    id: int
    path: str
    rack: str | None


def cluster_id(log: Log) -> str:
    """Return the id of a log."""
    return log.root.cluster_id if isinstance(log.root, ReplicatedRoot) else log.root.id


def topic_id(log: Log, info: TopicInfo) -> UUID:
    """Return the id of a topic, which no topic of another log has."""
    return topic_uuid(log, info.id)


def topic_uuid(log: Log, number: int) -> UUID:
    """Return the id of a topic for clients, by that in the catalog."""
    return _topic_id(cluster_id(log), number)


@lru_cache(maxsize=4096)
def _topic_id(cluster: str, number: int) -> UUID:
    return uuid5(NAMESPACE_OID, f"embedlog:{cluster}/{number}")


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
