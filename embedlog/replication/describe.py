"""What the directories of a log, and the copies in them, are like at one moment, and as metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from embedlog.errors import EmbedlogError
from embedlog.files import Files
from embedlog.keyspace import REPORTED_REPLICAS
from embedlog.metrics import CONTROLLER, LOG_DIRECTORY, LOG_MANAGER, REPLICA_MANAGER, Sample
from embedlog.partition.partition_log import ONLY_DIRECTORY, PartitionLog
from embedlog.replication.root import ReplicatedRoot


class DirectoryDescription(NamedTuple):
    """A directory of a log, and how many copies it has."""

    id: int
    path: str
    rack: str | None
    online: bool
    reason: str | None
    """Why it is offline."""
    is_controller: bool
    """Whether its databases are the ones that are read."""
    leaders: int
    """How many partitions are read there, and written first."""
    replicas: int
    """How many partitions have a copy there."""
    in_sync: int
    """How many of these copies have all that was acknowledged."""
    bytes: int | None
    """The size of the segment files; None if it is offline."""
    lag_bytes: int | None
    """How much the copies lack of those of the leaders; None if it is offline."""


def describe_directories(root: ReplicatedRoot) -> list[DirectoryDescription]:
    """Return the directories of a log, in the order of their ids."""
    image, opened = root.controller.current().image, root.controller.directories
    leaders, replicas, in_sync, sizes, lags = (Counter[int | None]() for _ in range(5))
    for info, number, assignment in root.assignments():
        leaders[assignment.leader] += 1
        replicas.update(assignment.replicas)
        in_sync.update(set(assignment.isr) & set(assignment.replicas))
        path = f"{info.directory}/{number}"
        found = {
            each: segment_sizes(opened[each].files, path)
            for each in assignment.replicas
            if each in opened and each in image.online
        }
        whole = found.get(assignment.leader or 0, {})
        for each, files in found.items():
            sizes[each] += sum(files.values())
            lags[each] += sum(max(whole[name] - files.get(name, 0), 0) for name in whole)
    return [
        DirectoryDescription(
            id=each,
            path=info.path,
            rack=info.rack,
            online=info.online,
            reason=root.diverged.get(each, "" if info.online else info.reason) or None,
            is_controller=each == image.controller_id,
            leaders=leaders[each],
            replicas=replicas[each],
            in_sync=in_sync[each],
            bytes=sizes[each] if info.online else None,
            lag_bytes=lags[each] if info.online else None,
        )
        for each, info in image.directories.items()
    ]


def only_directory(path: str, logs: Sequence[PartitionLog]) -> DirectoryDescription:
    """Return the directory of a log that has only one."""
    return DirectoryDescription(
        id=ONLY_DIRECTORY,
        path=path,
        rack=None,
        online=True,
        reason=None,
        is_controller=True,
        leaders=len(logs),
        replicas=len(logs),
        in_sync=len(logs),
        bytes=sum(log.size_bytes() for log in logs),
        lag_bytes=0,
    )


def segment_sizes(files: Files, path: str) -> dict[str, int]:
    """Return the sizes of the files in the directory of a partition, by name."""
    sizes = {}
    with suppress(EmbedlogError):
        for name in files.list(path):
            with suppress(EmbedlogError), files.opened(f"{path}/{name}") as fd:  # or deleted
                sizes[name] = files.size(fd)
    return sizes


DIRECTORIES_KEY = 0
"""Of the row of directories and counts, which has the number of no topic."""
_COUNTS = (
    *("UnderReplicatedPartitions", "UnderMinIsrPartitionCount"),
    *("AtMinIsrPartitionCount", "OfflineReplicaCount", "ReassigningPartitions"),
)


def replica_samples(root: ReplicatedRoot) -> Iterator[Sample]:
    """Yield the metrics of a log in several directories."""
    image = root.controller.current().image
    leaders, copies, counts = Counter[int | None](), Counter[int](), dict.fromkeys(_COUNTS, 0)
    partitions = imbalanced = 0
    for info, _, assignment in root.assignments():
        partitions += 1
        imbalanced += assignment.elect_preferred(image.directories) is not assignment
        in_sync, required = len(assignment.isr), info.config.min_insync_replicas
        required = min(required, len(assignment.replicas))
        leaders[assignment.leader] += 1
        copies.update(assignment.replicas)
        existing = len(assignment.replicas) - len(assignment.adding_replicas)
        counts["UnderReplicatedPartitions"] += in_sync < existing
        counts["UnderMinIsrPartitionCount"] += assignment.is_under_min_isr(required)
        counts["AtMinIsrPartitionCount"] += assignment.leader is not None and in_sync == required
        counts["OfflineReplicaCount"] += len(set(assignment.replicas) - set(image.online))
        counts["ReassigningPartitions"] += assignment.is_reassigning
    changes = (REPORTED_REPLICAS.get(root.context.live, DIRECTORIES_KEY) or {}).get("changes", {})
    offline = len(image.directories) - len(image.online)
    for name, value in {
        "PartitionCount": copies.total(),
        "LeaderCount": partitions - leaders[None],
        **counts,
        "isr-shrinks-total": changes.get("shrinks", 0),
        "isr-expands-total": changes.get("expands", 0),
    }.items():
        yield Sample(REPLICA_MANAGER, name, value, {})
    for name, value in {
        "ActiveBrokerCount": len(image.online),
        "FencedBrokerCount": offline,
        "OfflinePartitionsCount": leaders[None],
        "PreferredReplicaImbalanceCount": imbalanced,
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
