"""A log as a cluster: each directory is a broker.

A log in one directory is one broker, number 0.  In several, the brokers have the ids of the
directories (`Log.replicas`), and those are alive that are online.  A `Cluster` is what a server
shows of that, which may have several processes (`workers`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple
from uuid import NAMESPACE_OID, UUID, uuid5
from zlib import crc32

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


def topic_id(log: Log, number: int) -> UUID:
    """Return the id of a topic, which no topic of another log has, by that in the catalog."""
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


class Cluster:
    """The brokers that clients of a server see.

    Each worker of a server is a broker if the log is in one directory.  Otherwise the directories
    are, as without workers, and each has the address of a worker.

    Args:
        log: The log.
        ports: Those of the workers; by default there is only one, where clients have connected to.
        worker: The number of the worker whose cluster this is.
    """

    def __init__(self, log: Log, ports: tuple[int, ...] = (), worker: int = 0) -> None:
        self._log, self._ports, self.worker = log, ports, worker
        self._count = max(len(ports), 1)
        self._shows_workers = self._count > 1 and not log.root.replicated

    def nodes(self) -> dict[int, DirectoryNode]:
        """Return the brokers that are alive, by id."""
        if not self._shows_workers:
            return nodes(self._log)
        return {n: DirectoryNode(n, self._log.path, None) for n in range(self._count)}

    def placement(self, topic: str, partition: int) -> ReplicaPlacement:
        """Return the brokers of a partition: clients send its requests to the leader.

        Any other worker answers them as well.
        """
        if not self._shows_workers:
            return placement(self._log, topic, partition)
        leader = (crc32(topic.encode()) + partition) % self._count
        return ReplicaPlacement(leader, (leader,), (leader,))

    def port(self, node: int) -> int | None:
        """Return the port of a broker; None if it is that which a client has connected to."""
        return self._ports[node % self._count] if self._count > 1 else None

    def node(self, worker: int | None = None) -> int:
        """Return a broker that has the address of a worker, by default of this one.

        It is the controller if none has, as when directories are offline.
        """
        worker = self.worker if worker is None else worker
        if self._shows_workers:
            return worker
        controller = controller_id(self._log)
        if self._count == 1 or controller % self._count == worker:
            return controller
        own = (each for each in nodes(self._log) if each % self._count == worker)
        return next(own, controller)

    def worker_of(self, key: str) -> int:
        """Return the worker that has a group, or a ``transactional.id``, in its memory."""
        return crc32(key.encode()) % self._count

    def coordinator(self, key: str) -> int:
        """Return the broker to which clients send requests of a group or transactional id."""
        return self.node(self.worker_of(key))
