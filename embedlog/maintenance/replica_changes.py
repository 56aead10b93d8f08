"""What changed in the directories and copies of a log, for `__activity` and the metrics.

As for topics, the process that does the maintenance compares the metadata with what it noted
the last time, so nothing is missed because a process was killed; several changes of a partition
between two rounds are one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from embedlog import catalog, kv
from embedlog.catalog import ACTIVITY
from embedlog.keyspace import REPORTED_REPLICAS
from embedlog.replication.describe import DIRECTORIES_KEY
from embedlog.replication.metadata import ASSIGNMENTS, DirectoryInfo
from embedlog.replication.root import ReplicatedRoot
from embedlog.root.root import Root


class ReplicaChange(NamedTuple):
    """What an event is made of."""

    kind: str
    key: str
    facts: dict[str, Any]


def detect_replica_changes(root: Root, fence: Callable[[kv.Txn], None]) -> list[ReplicaChange]:
    """Return the changes since the last call, and note them.

    Args:
        root: A log in several directories.
        fence: Raises if another process is the maintenance owner now.
    """
    assert isinstance(root, ReplicatedRoot)
    image = root.controller.current().image
    live = root.context.live
    noted = REPORTED_REPLICAS.get(live, DIRECTORIES_KEY)
    if noted is not None and noted["epoch"] >= image.epoch:
        return []
    topics = root.context.state.read(_topics)

    def step(txn: kv.Txn) -> list[ReplicaChange]:
        fence(txn)
        before = REPORTED_REPLICAS.get(txn, DIRECTORIES_KEY)
        changes = _directory_changes(image.directories, {} if before is None else before["online"])
        counts = Counter[str]({} if before is None else before["changes"])
        if before is None:
            changes.clear()  # all of them are new
        for topic_id, (name, partitions) in topics.items():
            reported = REPORTED_REPLICAS.get(txn, topic_id)
            if reported is not None and reported["partitions"] == partitions:
                continue
            REPORTED_REPLICAS.put(txn, topic_id, value={"partitions": partitions})
            # New partitions have no history.
            old = partitions if reported is None else reported["partitions"]
            for number, pair in enumerate(zip(old, partitions, strict=False)):
                if pair[0] != pair[1]:
                    changes += _partition_changes(name, number, *pair, counts)
        for (topic_id,) in list(REPORTED_REPLICAS.keys(txn)):
            if topic_id not in topics and topic_id != DIRECTORIES_KEY:
                REPORTED_REPLICAS.delete(txn, topic_id)
        online = {str(each): [info.path, info.online] for each, info in image.directories.items()}
        row = {"epoch": image.epoch, "online": online, "changes": counts}
        REPORTED_REPLICAS.put(txn, DIRECTORIES_KEY, value=row)
        return changes

    return live.write(step)


def _topics(txn: kv.Txn) -> dict[int, tuple[str, list[dict[str, Any]]]]:
    """Return the names of topics, and the assignments of their partitions, by topic id."""
    topics = {}
    for topic in catalog.topics(txn):
        partitions = []
        for number in range(topic.partitions):
            assignment = ASSIGNMENTS.get(txn, topic.key(number))
            if assignment is not None:
                partitions.append(
                    {
                        "leader": assignment.leader,
                        "epoch": assignment.leader_epoch,
                        "isr": sorted(assignment.isr),
                        "replicas": list(assignment.target_replicas),
                        "moving": assignment.is_reassigning,
                    }
                )
        topics[topic.id] = topic.name, partitions
    return topics


def _directory_changes(
    directories: Mapping[int, DirectoryInfo], before: Mapping[str, Any]
) -> list[ReplicaChange]:
    changes = []
    for each, info in directories.items():
        _, was_online = before.get(str(each), (info.path, not info.online))
        if info.online != was_online:
            facts: dict[str, Any] = {"directory": each, "path": info.path}
            if not info.online:
                facts["reason"] = info.reason
            changes.append(ReplicaChange("online" if info.online else "offline", info.path, facts))
    for name, (path, _) in before.items():
        if int(name) not in directories:
            changes.append(ReplicaChange("removed", path, {"directory": int(name), "path": path}))
    return changes


def _partition_changes(
    topic: str,
    number: int,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    counts: Counter[str],
) -> list[ReplicaChange]:
    """Return the changes of one partition, and count them."""
    where, key = {"topic": topic, "partition": number}, f"{topic}-{number}"
    changes = []
    if before["leader"] != after["leader"]:
        unclean = after["leader"] is not None and after["leader"] not in before["isr"]
        # A new copy that was made in the meantime was in sync when it was elected.
        unclean = unclean and after["leader"] in before["replicas"]
        counts["elections"] += 1
        counts["unclean"] += unclean
        facts = {
            "leader": after["leader"],
            "before": before["leader"],
            "leader_epoch": after["epoch"],
            "unclean": unclean,
        }
        changes.append(ReplicaChange("elected", key, where | facts))
    if before["isr"] != after["isr"]:
        counts["shrinks"] += len(set(before["isr"]) - set(after["isr"]))
        counts["expands"] += len(set(after["isr"]) - set(before["isr"]))
        facts = {"isr": after["isr"], "before": before["isr"]}
        changes.append(ReplicaChange("isr", key, where | facts))
    if not after["moving"] and (before["moving"] or before["replicas"] != after["replicas"]):
        facts = {"replicas": after["replicas"], "before": before["replicas"]}
        changes.append(ReplicaChange("reassigned", key, where | facts))
    # Nothing is reported about the activity topic itself, as in `activity`.
    return [] if topic == ACTIVITY else changes
