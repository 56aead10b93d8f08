"""Moving the copies of partitions to other directories.

A reassignment is in the metadata from its beginning to its end, so any process can finish it.
`run` copies in the process of the caller, at the caller's pace; meanwhile it holds a lock, by
which the housekeeping leaves the new copies alone.  If the process is killed, the lock is free,
and the housekeeping goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

from embedlog.catalog import TopicInfo
from embedlog.errors import (
    CorruptionError,
    InvalidReplicationAssignmentError,
    InvalidReplicationFactorError,
    LockTimeoutError,
    NotLeaderOrFollowerError,
    ReplicaNotAvailableError,
    UnknownTopicOrPartitionError,
)
from embedlog.files.throttle import Throttle
from embedlog.hints import Hint
from embedlog.record import TopicPartition
from embedlog.replication.copies import remove_copies
from embedlog.replication.isr import PartitionAssignment, check_replicas
from embedlog.replication.metadata import MetadataImage
from embedlog.replication.partition import ReplicatedPartition
from embedlog.replication.reassignment import lead_evenly, reassign, resize
from embedlog.replication.recovery import HasDirectories, copy_partition

Moves = Mapping[TopicPartition, Sequence[int]]
"""The new replicas of partitions, the preferred leader first."""
Progress = Callable[[int, int], object]

_LOCK = "locks/reassignment"
_RETRY_SECONDS = 0.1
_CHANGED = (NotLeaderOrFollowerError, ReplicaNotAvailableError, UnknownTopicOrPartitionError)
"""What says that a partition has another leader, or none, or was deleted meanwhile."""


def assignments(root: HasDirectories) -> Iterator[tuple[TopicInfo, int, PartitionAssignment]]:
    """Yield all partitions with their assignments."""
    for info in root.topics().values():
        for partition in range(info.partitions):
            assignment = root.controller.assignment(info.key(partition))
            if assignment is not None:
                yield info, partition, assignment


def plan(
    root: HasDirectories,
    without: Collection[int] = (),
    replication_factors: Mapping[str, int] | None = None,
) -> dict[TopicPartition, tuple[int, ...]]:
    """Return the fewest moves that make the copies even over the directories.

    With ``without`` nothing else moves: a partition gets new copies where the fewest are, and keeps
    the others.  With ``replication_factors`` the partitions that get more or fewer copies are made
    even among themselves, and no others move.

    Args:
        root: The log.
        without: Directories that must not have copies any more.  If too few others are online
            for a partition, it gets fewer copies; one that had all its copies there, and can
            get none, keeps them.
        replication_factors: How many copies the partitions of topics are to have; without one, as
            many as they have.  A partition with a copy in a directory that is offline keeps them.

    Raises:
        InvalidReplicationFactorError: There are not so many directories online.
        UnknownTopicOrPartitionError: There is no such topic.
    """
    image, factors = root.controller.current().image, replication_factors or {}
    racks = {each: rack for each, rack in image.racks.items() if each not in without}
    for topic, factor in factors.items():
        root.topic(topic)
        if not 1 <= factor <= len(racks):
            raise InvalidReplicationFactorError(
                f"A partition has 1 to {len(racks)} copies, one in each directory that is online, "
                f"got {factor}",
                topic=topic,
            )
    current = {
        TopicPartition(info.name, number): assignment.target_replicas
        for info, number, assignment in assignments(root)
    }
    if not (factors or without):
        # A directory that is offline, and may come back, keeps its copies.
        return reassign(_within(current, racks), racks)
    kept, counts = {}, {}
    for partition, replicas in current.items():
        left = kept[partition] = tuple(each for each in replicas if each not in without)
        offline = sum(each not in racks for each in left)
        wanted = len(replicas) if offline else factors.get(partition.topic, len(replicas))
        counts[partition] = min(wanted, len(racks) + offline)
    resized = resize(kept, counts, racks)
    changed = [each for each in resized if resized[each] not in ((), current[each])]
    if without:
        resized |= lead_evenly(_within(resized, racks), racks, changed)
    else:
        resized |= reassign(_within({each: resized[each] for each in changed}, racks), racks)
    return {each: resized[each] for each in changed}


def _within(
    replicas: Mapping[TopicPartition, tuple[int, ...]], directories: Collection[int]
) -> dict[TopicPartition, tuple[int, ...]]:
    """Return the partitions that have all replicas in some directories."""
    return {each: found for each, found in replicas.items() if found and {*found} <= {*directories}}


def begin(root: HasDirectories, moves: Moves) -> int:
    """Begin to move copies; `run`, or the housekeeping, ends it.  Returns how many change.

    Raises:
        InvalidReplicationAssignmentError: There is no such directory, or one occurs twice.
        UnknownTopicOrPartitionError: There is no such partition.  Nothing was changed.
    """
    replicas = check(root, moves)

    def begin_one(
        key: bytes, before: PartitionAssignment, image: MetadataImage
    ) -> PartitionAssignment:
        _check_directories(image, replicas[key])  # one may have been removed meanwhile
        return before.begin_reassignment(replicas[key])

    return len(root.controller.change_assignments(replicas, begin_one))


def check(root: HasDirectories, moves: Moves) -> dict[bytes, tuple[int, ...]]:
    """Return the new replicas by the keys of the partitions.

    Raises:
        InvalidReplicationAssignmentError, UnknownTopicOrPartitionError: As `begin`.
    """
    image = root.controller.current().image
    keys = {}
    for partition, replicas in moves.items():
        log = root.partition(*partition)
        _check_directories(image, replicas, **log.where)
        check_replicas(replicas)
        keys[log.key] = tuple(replicas)
    return keys


def _check_directories(image: MetadataImage, replicas: Sequence[int], **where: Any) -> None:
    unknown = [each for each in replicas if each not in image.directories]
    if unknown:
        raise InvalidReplicationAssignmentError(
            f"The log has no directory {unknown[0]}",
            **where,
            todo=Hint("See log.replicas().", "See `embedlog replicas list`."),
        )


def cancel(root: HasDirectories, partitions: Collection[TopicPartition]) -> int:
    """Keep the old copies of partitions that move, and give up the new ones; return how many.

    Raises:
        IllegalStateError: Only new copies are in sync.
        UnknownTopicOrPartitionError: There is no such partition.  Nothing was changed.
    """
    logs = {log.key: log for log in (root.partition(*each) for each in partitions)}
    new_copies: set[int] = set()

    def cancel_one(
        _key: bytes, moving: PartitionAssignment, image: MetadataImage
    ) -> PartitionAssignment:
        new_copies.update(moving.adding_replicas)
        return moving.cancel_reassignment(image.online)

    image, count = root.controller.current().image, 0
    for key in logs:
        moving = root.controller.assignment(key)
        if moving is not None:
            cancel_one(key, moving, image)  # or raises, before any is changed
    for key, log in logs.items():
        new_copies.clear()
        assert isinstance(log, ReplicatedPartition)
        with ExitStack() as held:
            # Those that are in sync are written to by the holder of the lock.
            with suppress(ReplicaNotAvailableError):
                held.enter_context(log.locked())
            count += len(root.controller.change_assignments([key], cancel_one))
        remove_copies(root.controller, key, log.directory, new_copies)
    return count


class Outcome(NamedTuple):
    """Which partitions were not moved."""

    pending: list[TopicPartition]
    """A directory is offline; the housekeeping moves them when it comes back."""
    superseded: list[TopicPartition]
    """Another process cancelled the move, replaced it by another one, or deleted the topic."""


def run(
    root: HasDirectories,
    moves: Moves,
    *,
    throttle: Throttle | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Move copies, and those whose move had begun, in this process.

    Args:
        root: The log.
        moves: The new replicas.
        throttle: Limits the copying.
        progress: Called with the bytes that are copied, and all bytes.

    Raises:
        InvalidReplicationAssignmentError, UnknownTopicOrPartitionError: As `begin`.
        LockTimeoutError: Another process runs a reassignment.
        CorruptionError: A leader's copy is damaged.  All other partitions were moved.
    """
    with lock(root, root.lock_timeout):
        begin(root, moves)
        targets = {
            TopicPartition(info.name, number): assignment.target_replicas
            for info, number, assignment in assignments(root)
            if assignment.is_reassigning
        }
        targets |= {TopicPartition(*each): tuple(replicas) for each, replicas in moves.items()}
        total = sum(_bytes_to_copy(root, partition) for partition in targets)
        copied = 0

        def count(size: int) -> None:
            nonlocal copied
            copied += size
            if progress is not None:
                progress(copied, max(total, copied))

        outcome, damaged = Outcome([], []), list[CorruptionError]()
        for partition, target in targets.items():
            try:
                left = _move(root, partition, target, throttle, count)
            except CorruptionError as error:
                damaged.append(error)
                continue
            if left is None or left.target_replicas != target:
                outcome.superseded.append(partition)
            elif left.is_reassigning:
                outcome.pending.append(partition)
        if damaged:
            raise damaged[0]
        return outcome


@contextmanager
def lock(root: HasDirectories, timeout: float | None = None) -> Iterator[bool]:
    """Hold the lock of the process that makes new copies.

    Yields whether it was free; with a timeout, waits for that.

    Raises:
        LockTimeoutError: It was not free in time.
    """
    files = root.context.files
    with files.opened(_LOCK, write=True, create=True) as fd:
        if timeout is None:
            yield files.try_lock(fd)
            return
        try:
            files.lock(fd, timeout)
        except LockTimeoutError as error:
            raise LockTimeoutError(
                "Another process moves copies", todo="Wait until it is done, or stop it."
            ) from error
        yield True


def _bytes_to_copy(root: HasDirectories, partition: TopicPartition) -> int:
    with suppress(ReplicaNotAvailableError, UnknownTopicOrPartitionError):
        log = root.partition(*partition)
        assignment = root.controller.assignment(log.key)
        if assignment is not None:
            missing = set(assignment.target_replicas) - set(assignment.isr)
            return log.size_bytes() * len(missing) if missing else 0
    return 0


def _move(
    root: HasDirectories,
    partition: TopicPartition,
    target: tuple[int, ...],
    throttle: Throttle | None,
    count: Callable[[int], object],
) -> PartitionAssignment | None:
    """Finish the reassignment of one partition, as far as possible; return its state after that.

    It is None if the topic was deleted, and of other replicas than ``target`` if another process
    cancelled the reassignment, or began another one.
    """
    try:
        log = root.partition(*partition)
    except UnknownTopicOrPartitionError:
        return None  # it was deleted
    assert isinstance(log, ReplicatedPartition)
    pause = threading.Event()
    while True:
        assignment = root.controller.assignment(log.key)
        if assignment is None or assignment.target_replicas != target:
            return assignment
        missing = [each for each in target if each not in assignment.isr]
        directories = root.controller.opened(missing)
        can_move = assignment.leader is not None and len(directories) == len(missing)
        if not (assignment.is_reassigning and can_move):
            return assignment
        joined = sum(
            copy_partition(log, directory, throttle=throttle, progress=count)
            for directory in directories
        )
        if joined or not missing:
            finish(root, [partition])
        else:
            pause.wait(_RETRY_SECONDS)  # a copy that another process had begun to make


def finish(root: HasDirectories, partitions: Collection[TopicPartition] | None = None) -> int:
    """End the reassignments whose new copies are in sync; delete the old copies.

    Returns how many ended.
    """
    controller, finished = root.controller, 0
    for info, number, before in list(assignments(root)):
        partition = TopicPartition(info.name, number)
        if not before.is_reassigning or (partitions is not None and partition not in partitions):
            continue
        if before.leader is None or not set(before.target_replicas) <= set(before.isr):
            continue
        key = info.key(number)
        with suppress(*_CHANGED), root.partition(*partition).locked():
            changed = controller.change_assignments(
                [key], lambda _, before, image: before.finish_reassignment(image.online)
            )
            after = controller.assignment(key)
            if not changed or after is None or after.is_reassigning:
                continue
            finished += 1
            old_copies = set(before.replicas) - set(after.replicas)
            remove_copies(controller, key, info.directory, old_copies)
    return finished


def elect_preferred(
    root: HasDirectories, partitions: Collection[TopicPartition] | None = None
) -> list[TopicPartition]:
    """Elect the preferred leaders of partitions, by default of all; return which changed."""
    elected = []
    for info, number, before in list(assignments(root)):
        partition = TopicPartition(info.name, number)
        if partitions is not None and partition not in partitions:
            continue
        if before.leader is None or before.elect_preferred(root.controller.image.online) is before:
            continue
        with suppress(*_CHANGED), root.partition(*partition).locked():
            if root.controller.change_assignments(
                [info.key(number)], lambda _, before, image: before.elect_preferred(image.online)
            ):
                elected.append(partition)
    return elected
