"""An operator's commands: moving copies, removing directories, electing leaders.

A reassignment is in the metadata from its beginning to its end, so any process can finish it.
`run` copies in the process of the caller, at the caller's pace; meanwhile it holds a lock, by
which the housekeeping leaves the new copies alone.  If the process is killed, the lock is free,
and the housekeeping continues.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from embedlog.display import plural
from embedlog.errors import (
    EligibleLeadersNotAvailableError,
    EmbedlogError,
    IllegalStateError,
    InvalidReplicationFactorError,
    LockTimeoutError,
    NotALogError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    ReplicaNotAvailableError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.failures import Failures
from embedlog.files.paths import FORMAT_FILE
from embedlog.files.reserve import RESERVE_FILE
from embedlog.files.throttle import Throttle
from embedlog.hints import GIVE_UP, Hint
from embedlog.partition import PartitionLog
from embedlog.partition.tail import peek_tail
from embedlog.record import TopicPartition
from embedlog.replication.catch_up import copy_partition
from embedlog.replication.directory import EPOCH_FILE, PROBE_FILE, LogDirectory
from embedlog.replication.files import remove_copies
from embedlog.replication.isr import PartitionAssignment, check_replicas
from embedlog.replication.member_file import check_member
from embedlog.replication.mend import end_of_copy
from embedlog.replication.metadata import MetadataImage, check_quorum
from embedlog.replication.partition import ReplicatedPartition
from embedlog.replication.placement import lead_evenly, reassign, resize
from embedlog.replication.root import ReplicatedRoot, take_over
from embedlog.root import startup

Moves = Mapping[TopicPartition, Sequence[int]]
"""The new replicas of partitions, the preferred leader first."""
Progress = Callable[[int, int], object]

_logger = logging.getLogger("embedlog.replication")
_LOCK = "locks/reassignment"
_RETRY_SECONDS = 0.1
_CHANGED = (NotLeaderOrFollowerError, ReplicaNotAvailableError, UnknownTopicOrPartitionError)
"""What says that a partition has another leader, or none, or was deleted meanwhile."""


def plan(
    root: ReplicatedRoot,
    leaving: Collection[int] = (),
    replication_factors: Mapping[str, int] | None = None,
) -> dict[TopicPartition, tuple[int, ...]]:
    """Return the fewest moves that make the copies even over the directories.

    With ``leaving`` nothing else moves: a partition gets new copies where the fewest are, and keeps
    the others.  With ``replication_factors`` the partitions that get more or fewer copies are made
    even among themselves, and no others move.

    Args:
        root: The log.
        leaving: Directories that must not have copies any more.  If too few others are online
            for a partition, it gets fewer copies; one that had all its copies there, and can
            get none, keeps them.
        replication_factors: How many copies the partitions of topics are to have; without one, as
            many as they have.  A partition with a copy in a directory that is offline keeps them.

    Raises:
        InvalidReplicationFactorError: There are not so many directories online.
        UnknownTopicOrPartitionError: There is no such topic.
    """
    image, factors = root.controller.current().image, replication_factors or {}
    racks = {each: rack for each, rack in image.racks.items() if each not in leaving}
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
        for info, number, assignment in root.assignments()
    }
    if not (factors or leaving):
        # A directory that is offline, and may come back, keeps its copies.
        return reassign(_within(current, racks), racks)
    kept, counts = {}, {}
    for partition, replicas in current.items():
        left = kept[partition] = tuple(each for each in replicas if each not in leaving)
        offline = sum(each not in racks for each in left)
        wanted = len(replicas) if offline else factors.get(partition.topic, len(replicas))
        counts[partition] = min(wanted, len(racks) + offline)
    resized = resize(kept, counts, racks)
    changed = [each for each in resized if resized[each] not in ((), current[each])]
    if leaving:
        resized |= lead_evenly(_within(resized, racks), racks, changed)
    else:
        resized |= reassign(_within({each: resized[each] for each in changed}, racks), racks)
    return {each: resized[each] for each in changed}


def _within(
    replicas: Mapping[TopicPartition, tuple[int, ...]], directories: Collection[int]
) -> dict[TopicPartition, tuple[int, ...]]:
    """Return the partitions that have all replicas in some directories."""
    return {each: found for each, found in replicas.items() if found and {*found} <= {*directories}}


def begin(root: ReplicatedRoot, moves: Moves) -> int:
    """Begin to move copies; `run`, or the housekeeping, ends it.  Returns how many change.

    Raises:
        InvalidReplicationAssignmentError: There is no such directory, or one occurs twice.
        UnknownTopicOrPartitionError: There is no such partition.  Nothing was changed.
    """
    replicas = check(root, moves)

    def begin_one(
        key: bytes, before: PartitionAssignment, image: MetadataImage
    ) -> PartitionAssignment:
        image.check_directories(replicas[key])  # one may have been removed meanwhile
        return before.begin_reassignment(replicas[key])

    return len(root.controller.change_assignments(replicas, begin_one))


def check(root: ReplicatedRoot, moves: Moves) -> dict[bytes, tuple[int, ...]]:
    """Return the new replicas by the keys of the partitions.

    Raises:
        InvalidReplicationAssignmentError, UnknownTopicOrPartitionError: As `begin`.
    """
    image = root.controller.current().image
    keys = {}
    for partition, replicas in moves.items():
        log = root.partition(*partition)
        image.check_directories(replicas, **log.where)
        check_replicas(replicas)
        keys[log.key] = tuple(replicas)
    return keys


def cancel(root: ReplicatedRoot, partitions: Collection[TopicPartition]) -> int:
    """Keep the old copies of partitions that move, and give up the new ones; return how many.

    Raises:
        IllegalStateError: Only new copies are in sync.
        UnknownTopicOrPartitionError: There is no such partition.  Nothing was changed.
    """
    for each in partitions:
        root.partition(*each)
    cancel_one = PartitionAssignment.cancel_reassignment
    return len(_change_each(root, partitions, cancel_one, leaderless=True))


class Outcome(NamedTuple):
    """Which partitions were not moved."""

    pending: list[TopicPartition]
    """A directory is offline; the housekeeping moves them when it comes back."""
    superseded: list[TopicPartition]
    """Another process cancelled the move, replaced it by another one, or deleted the topic."""


def run(
    root: ReplicatedRoot,
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
        EmbedlogError: The first error of a partition, such as `CorruptionError` if its leader's
            copy is damaged.  All other partitions were moved.
    """
    with lock(root, root.lock_timeout):
        begin(root, moves)
        targets = {
            TopicPartition(info.name, number): assignment.target_replicas
            for info, number, assignment in root.assignments()
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

        outcome = Outcome([], [])
        with Failures(_logger).collecting() as part:
            for partition, target in targets.items():
                with part(f"Move of {partition.topic}-{partition.partition}"):
                    left = _move(root, partition, target, throttle or Throttle(), count)
                    if left is None or left.target_replicas != target:
                        outcome.superseded.append(partition)
                    elif left.is_reassigning:
                        outcome.pending.append(partition)
        return outcome


@contextmanager
def lock(root: ReplicatedRoot, timeout: float | None = None) -> Iterator[bool]:
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


def _bytes_to_copy(root: ReplicatedRoot, partition: TopicPartition) -> int:
    with suppress(ReplicaNotAvailableError, UnknownTopicOrPartitionError):
        log = root.partition(*partition)
        assignment = root.controller.assignment(log.key)
        if assignment is not None:
            missing = set(assignment.target_replicas) - set(assignment.isr)
            return log.size_bytes() * len(missing) if missing else 0
    return 0


def _move(
    root: ReplicatedRoot,
    partition: TopicPartition,
    target: tuple[int, ...],
    throttle: Throttle,
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


def finish(root: ReplicatedRoot, partitions: Collection[TopicPartition] | None = None) -> int:
    """End the reassignments whose new copies are in sync; delete the old copies.

    Returns how many ended.
    """
    return len(_change_each(root, partitions, PartitionAssignment.finish_reassignment))


def elect_preferred(
    root: ReplicatedRoot, partitions: Collection[TopicPartition] | None = None
) -> list[TopicPartition]:
    """Elect the preferred leaders of partitions, by default of all; return which changed."""
    return _change_each(root, partitions, PartitionAssignment.elect_preferred)


def _change_each(
    root: ReplicatedRoot,
    partitions: Collection[TopicPartition] | None,
    change: Callable[[PartitionAssignment, Collection[int]], PartitionAssignment],
    *,
    leaderless: bool = False,
) -> list[TopicPartition]:
    """Change the assignments of partitions, each under its lock, as the in-sync copies change.

    Those without a leader, which nobody can lock, are left out unless ``leaderless``.  Removes the
    copies that partitions do not have any more.  Returns those that changed; a change that raises
    does so before any was made.
    """
    controller, changed = root.controller, []
    changing = [
        (info, number, before)
        for info, number, before in root.assignments()
        if (partitions is None or (info.name, number) in partitions)
        and (leaderless or before.leader is not None)
        and change(before, controller.image.online) is not before
    ]
    for info, number, before in changing:
        with suppress(*_CHANGED), ExitStack() as held:
            if before.leader is not None:
                held.enter_context(root.partition(info.name, number).locked())
            if controller.change_assignments(
                [info.key(number)], lambda _, now, image: change(now, image.online)
            ):
                remove_copies(controller, info.key(number), info.directory)
                changed.append(TopicPartition(info.name, number))
    return changed


# Removing directories


def remove_directories(
    root: ReplicatedRoot,
    directories: Collection[int],
    *,
    force: bool = False,
    throttle: Throttle | None = None,
    progress: Progress | None = None,
) -> None:
    """Remove directories; their copies are made in the others first.

    Args:
        root: The log.
        directories: Their ids.
        force: Also remove those that cannot be used and have the only copy of a partition, and
            those without which too few would be left to decide: what only they have is lost.
            And although partitions get fewer copies while another directory is offline.
        throttle: Limits the copying.
        progress: Called with the bytes that are copied, and all bytes.

    Raises:
        IllegalStateError: No other directory is online.
        NotEnoughReplicasError: Too few others are online: to decide, also with ``force``, or for
            as many copies as partitions have.
        ReplicaNotAvailableError: They have the only copy of a partition.
        EligibleLeadersNotAvailableError: They were given up, and had all in-sync copies of a
            partition, which waits for an election: see `elect_unclean`.
    """
    controller, gone = root.controller, set(directories)
    image = controller.current().image
    check_left(image, gone)
    usable = {each.id for each in controller.opened(sorted(gone)) if each.works()}
    broken = gone - usable
    only = root.partitions_where(lambda each: set(each.isr) <= broken)
    if only and not force:
        paths = tuple(image.directories[each].path for each in broken)
        raise ReplicaNotAvailableError(
            f"Without {', '.join(paths)}, {plural(len(only), 'partition')} would have no copy: "
            + ", ".join(f"{name}-{number}" for name, number in only[:5])
            + (", …" if len(only) > 5 else ""),
            replicas=paths,
            todo="Bring the directory back."
            + Hint(
                "Or lose these records with log.replicas.remove(path, force=True).",
                "Or lose these records with `embedlog replicas remove PATH --force`.",
            ),
        )
    moves = _moves_from(root, gone, force=force)
    opened = {each: controller.directories.get(each) for each in gone}
    if force and broken:
        controller.give_up(broken)
        gone -= broken
        root.write_members()
        elect_unclean(root, only)
    else:
        check_quorum(image, set(image.online) - gone, gone)
    while True:
        outcome = run(root, moves, throttle=throttle, progress=progress)
        left = [
            f"{topic}-{number}"
            for topic, number in root.partitions_where(lambda each: bool(gone & {*each.replicas}))
            if (topic, number) in moves
        ]
        if left:
            why = "another process cancelled the moves" if outcome.superseded else "one is offline"
            raise NotEnoughReplicasError(
                f"{plural(len(left), 'partition')} still have copies in the directories, such as "
                f"{left[0]}: {why}",
                todo="Try again.",
            )
        if not gone or controller.remove(gone):
            break
        moves = _moves_from(root, gone, force=force)  # a topic was created meanwhile
    root.write_members()
    for directory in opened.values():
        if directory is not None and directory.id not in broken:
            with suppress(EmbedlogError):
                _clear(directory)
    take_over(root)


def _moves_from(
    root: ReplicatedRoot, directories: Collection[int], *, force: bool
) -> dict[TopicPartition, tuple[int, ...]]:
    """Return the moves from some directories to the others.

    Raises:
        NotEnoughReplicasError: A partition would get fewer copies since another directory is
            offline, and ``force`` is not set.
    """
    moves, image = plan(root, directories), root.controller.image
    left = image.directories.keys() - set(directories)
    fewer = [
        f"{info.name}-{number}"
        for info, number, assignment in root.assignments()
        if (target := moves.get(TopicPartition(info.name, number))) is not None
        and len(target) < min(len(assignment.target_replicas), len(left))
    ]
    if fewer and not force:
        away = [image.directories[each].path for each in sorted(left - set(image.online))]
        raise NotEnoughReplicasError(
            f"{plural(len(fewer), 'partition')} would have fewer copies, such as {fewer[0]}, since "
            f"{', '.join(away)} cannot be used",
            todo="Bring it back, or remove it, too."
            + Hint(
                "Or go on with fewer copies: log.replicas.remove(path, force=True).",
                "Or go on with fewer copies: `embedlog replicas remove PATH --force`.",
            ),
        )
    return moves


def check_left(image: MetadataImage, directories: Collection[int]) -> None:
    """Raise if no directory that is online would be left.

    Raises:
        IllegalStateError: That is so.
    """
    if set(image.online) <= set(directories):
        raise IllegalStateError(
            "No directory that is online would be left", todo="Bring another one online first."
        )


def _clear(directory: LogDirectory) -> None:
    """Delete what a directory has of a log that it does not belong to any more."""
    files = directory.files
    for topic in files.list("topics"):
        startup.remove_tree(files, f"topics/{topic}")
    for folder in ("topics", "state", "live", "state.copy", "locks"):
        startup.remove_folder(files, folder)
    for name in (PROBE_FILE, "wake", RESERVE_FILE, EPOCH_FILE, startup.CLEAN_FILE, FORMAT_FILE):
        files.unlink(name, missing_ok=True)


def elect_unclean(
    root: ReplicatedRoot, partitions: Collection[TopicPartition]
) -> list[TopicPartition]:
    """Elect leaders for those of some partitions that have none; return which got one.

    A partition without a copy in a directory that is online gets none, nor does one that
    another process changes meanwhile.  Records that only other copies have are lost.

    Raises:
        EligibleLeadersNotAvailableError: A copy in a directory that is offline has more records
            than each that could lead.  No leader was elected.
    """
    controller, chosen = root.controller, {}
    for partition in partitions:
        with suppress(UnknownTopicOrPartitionError):  # it was deleted
            log = root.partition(*partition)
            assignment = controller.assignment(log.key)
            if assignment is not None and assignment.leader is None:
                chosen[log.key] = partition, assignment, _longest(root, log, assignment)

    def elect(key: bytes, before: PartitionAssignment, image: MetadataImage) -> PartitionAssignment:
        _, counted, leader = chosen[key]
        if before != counted or leader is None or leader not in image.online:
            return before
        return before.elect_unclean(leader)

    elected = []
    for key in controller.change_assignments(chosen, elect):
        partition, _, leader = chosen[key]
        elected.append(partition)
        _logger.warning(
            "%s-%d: directory %d was elected, and was not in sync: what it lacks is lost",
            *(*partition, leader),
        )
    return elected


def _longest(
    root: ReplicatedRoot, log: PartitionLog, assignment: PartitionAssignment
) -> int | None:
    """Return the directory that is online and has the most records; None without one."""
    image = root.controller.image
    found = {each: _count_records(root, log, each) for each in assignment.replicas}
    counts = {each: count for each, count in found.items() if count is not None}
    able = [each for each in counts if each in image.online and each in root.controller.directories]
    if not able:
        return None
    leader, longest = (max(each, key=counts.__getitem__) for each in (able, counts))
    if counts[longest] > counts[leader]:
        paths = [image.directories[each].path for each in (leader, longest)]
        raise EligibleLeadersNotAvailableError(
            f"The copy in {paths[0]} has {plural(counts[leader], 'record')}, and that in "
            f"{paths[1]}, which is offline, has {counts[longest]:,}",
            **log.where,
            todo="Bring that directory back." + GIVE_UP,
        )
    return leader


def _count_records(root: ReplicatedRoot, log: PartitionLog, directory: int) -> int | None:
    """Return how many records of a partition a directory has; None if it cannot be read."""
    info = root.controller.image.directories.get(directory)
    with suppress(StorageError, NotALogError), ExitStack() as closing_files:
        if info is not None:
            files = root.files_at(info.path, writable=False)
            closing_files.callback(files.close_all)
            check_member(files, root.cluster_id, directory)
            return end_of_copy(log, peek_tail(log.context.live, log.key), files).records
    return None
