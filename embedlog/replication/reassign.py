"""Moving the copies of partitions to other directories."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from operator import methodcaller
from typing import TYPE_CHECKING

from embedlog import kv
from embedlog.errors import (
    InvalidReplicationAssignmentError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.record import TopicPartition
from embedlog.replication.controller import raised_epoch
from embedlog.replication.directory import LogDirectory
from embedlog.replication.metadata import ASSIGNMENTS, MetadataImage
from embedlog.replication.partition import ReplicatedPartition
from embedlog.replication.reassignment import reassign

if TYPE_CHECKING:
    from embedlog.replication.root import ReplicatedRoot


def plan(
    root: ReplicatedRoot, without: Sequence[int] = ()
) -> dict[TopicPartition, tuple[int, ...]]:
    """Return the fewest moves that make the copies even over the directories.

    Args:
        root: The log.
        without: Directories that must not have copies any more.
    """
    image = root.controller.current().image
    current = {}
    for info in root.topics().values():
        for partition in range(info.partitions):
            assignment = root.controller.assignment(info.key(partition))
            if assignment is not None:
                current[TopicPartition(info.name, partition)] = assignment.target_replicas
    racks = {each: rack for each, rack in image.racks.items() if each not in without}
    return reassign(current, racks)


def begin(root: ReplicatedRoot, moves: Mapping[TopicPartition, Sequence[int]]) -> int:
    """Begin to move copies; the housekeeping copies them, and ends it.  Returns how many move.

    Raises:
        InvalidReplicationAssignmentError: There is no such directory, or one occurs twice.
        UnknownTopicOrPartitionError: There is no such partition.  Nothing was changed.
    """
    keys = {}
    image = root.controller.current().image
    for partition, replicas in moves.items():
        info = root.topic(partition.topic)
        if not 0 <= partition.partition < info.partitions:
            raise UnknownTopicOrPartitionError(
                "There is no such partition", topic=info.name, partition=partition.partition
            )
        unknown = [each for each in replicas if each not in image.directories]
        if unknown:
            raise InvalidReplicationAssignmentError(
                f"The log has no directory {unknown[0]}",
                topic=info.name,
                partition=partition.partition,
                todo="`embedlog replicas list` shows the directories.",
            )
        keys[info.key(partition.partition)] = tuple(replicas)
    changed: list[bytes] = []

    def step(txn: kv.Txn, image: MetadataImage) -> bool:
        changed.clear()
        for key, replicas in keys.items():
            before = ASSIGNMENTS.get(txn, key)
            if before is None:
                continue
            after = raised_epoch(txn, key, before, before.begin_reassignment(replicas))
            if after != before:
                ASSIGNMENTS.put(txn, key, value=after)
                changed.append(key)
        return bool(changed)

    root.controller.change(step)
    return len(changed)


def finish(root: ReplicatedRoot) -> int:
    """End the reassignments whose new copies are in sync; delete the old copies.

    Returns how many ended.
    """
    controller, finished = root.controller, 0
    for info in root.topics().values():
        for partition in range(info.partitions):
            key = info.key(partition)
            before = controller.assignment(key)
            if before is None or not before.is_reassigning or before.leader is None:
                continue
            if not set(before.target_replicas) <= set(before.isr):
                continue
            online = controller.image.online
            log = root.partition(info.name, partition)
            assert isinstance(log, ReplicatedPartition)
            with log.locked():
                log.complete_followers()
                changed = controller.change_assignment(
                    key, methodcaller("finish_reassignment", online)
                )
            after = controller.assignment(key)
            if not changed or after is None or after.is_reassigning:
                continue
            finished += 1
            for each in set(before.replicas) - set(after.replicas):
                directory = controller.directories.get(each)
                if directory is not None:
                    with suppress(StorageError):
                        remove_copy(directory, f"{info.directory}/{partition}")
    return finished


def elect_preferred(
    root: ReplicatedRoot, partitions: Collection[TopicPartition] | None = None
) -> list[TopicPartition]:
    """Elect the preferred leaders of partitions, by default of all; return which changed.

    Nothing is lost, also not with ``acks=1``: the new leader is brought up to date first.
    """
    elected = []
    for log in root.partition_logs(root.topics().values()):
        assert isinstance(log, ReplicatedPartition)
        partition = TopicPartition(log.topic, log.partition)
        if partitions is not None and partition not in partitions:
            continue
        assignment = root.controller.assignment(log.key)
        online = root.controller.image.online
        if assignment is None or assignment.leader is None:
            continue
        if assignment.elect_preferred(online) == assignment:
            continue
        with log.locked():
            log.complete_followers()
            if root.controller.change_assignment(log.key, methodcaller("elect_preferred", online)):
                elected.append(partition)
    return elected


def remove_copy(directory: LogDirectory, path: str) -> None:
    """Remove the files of a partition from a directory that has no copy of it any more."""
    files = directory.files
    if files.exists(path):
        for name in files.list(path):
            files.unlink(f"{path}/{name}", missing_ok=True)
        files.remove_directory(path)
