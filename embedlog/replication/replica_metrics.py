"""The metrics of directories and copies, with the names of Kafka's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from embedlog.keyspace import REPORTED_REPLICAS
from embedlog.metrics import CONTROLLER, LOG_DIRECTORY, LOG_MANAGER, REPLICA_MANAGER, Sample
from embedlog.replication import reassign
from embedlog.replication.election import preferred_leaders
from embedlog.replication.recovery import BaseReplicatedRoot

DIRECTORIES_KEY = 0
"""Of the row of directories and counts, which has the number of no topic."""


def replica_samples(root: BaseReplicatedRoot) -> Iterator[Sample]:
    """Yield the metrics of a log in several directories."""
    image = root.controller.current().image
    counts, leaders, copies = Counter[str](), Counter[int | None](), Counter[int]()
    partitions = {}
    for info, number, assignment in reassign.assignments(root):
        partitions[info.name, number] = assignment
        in_sync, required = len(assignment.isr), info.config.min_insync_replicas
        required = min(required, len(assignment.replicas))
        leaders[assignment.leader] += 1
        copies.update(assignment.replicas)
        counts["UnderReplicatedPartitions"] += assignment.is_under_replicated
        counts["UnderMinIsrPartitionCount"] += assignment.is_under_min_isr(required)
        counts["AtMinIsrPartitionCount"] += assignment.leader is not None and in_sync == required
        counts["OfflineReplicaCount"] += len(set(assignment.replicas) - set(image.online))
        counts["ReassigningPartitions"] += assignment.is_reassigning
    changes = (REPORTED_REPLICAS.get(root.context.live, DIRECTORIES_KEY) or {}).get("changes", {})
    offline = len(image.directories) - len(image.online)
    for name, value in {
        "PartitionCount": copies.total(),
        "LeaderCount": len(partitions) - leaders[None],
        **{
            name: counts[name]
            for name in (
                *("UnderReplicatedPartitions", "UnderMinIsrPartitionCount"),
                *("AtMinIsrPartitionCount", "OfflineReplicaCount", "ReassigningPartitions"),
            )
        },
        "isr-shrinks-total": changes.get("shrinks", 0),
        "isr-expands-total": changes.get("expands", 0),
    }.items():
        yield Sample(REPLICA_MANAGER, name, value, {})
    for name, value in {
        "ActiveBrokerCount": len(image.online),
        "FencedBrokerCount": offline,
        "OfflinePartitionsCount": leaders[None],
        "PreferredReplicaImbalanceCount": len(
            preferred_leaders(partitions, set(image.directories))
        ),
        "leader-elections-total": changes.get("elections", 0),
        "unclean-leader-elections-total": changes.get("unclean", 0),
    }.items():
        yield Sample(CONTROLLER, name, value, {})
    yield Sample(LOG_MANAGER, "OfflineLogDirectoryCount", offline, {})
    for each, directory in image.directories.items():
        labels = {"logDirectory": directory.path}
        yield Sample(LOG_DIRECTORY, "LogDirectoryOffline", int(not directory.online), labels)
        yield Sample(LOG_DIRECTORY, "LeaderCount", leaders[each], labels)
        yield Sample(LOG_DIRECTORY, "PartitionCount", copies[each], labels)
