"""The directories of a log, and moves of copies between them, as `Log` returns them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from embedlog.consumer.arguments import to_topic_partition
from embedlog.display import html_table, plural, text_table
from embedlog.errors import IllegalStateError, InvalidConfigError, InvalidPartitionError
from embedlog.files.throttle import Throttle
from embedlog.hints import ADD_REPLICA
from embedlog.progress import format_bytes
from embedlog.record import TopicPartition
from embedlog.root.root import Root

if TYPE_CHECKING:
    from embedlog.replication.describe import DirectoryDescription
    from embedlog.replication.mend import ReplicaDifference
    from embedlog.replication.root import ReplicatedRoot

_HEADS = ("id", "path", "rack", "state", "leaders", "replicas", "in sync", "size", "lag")


class DirectoryList(list["DirectoryDescription"]):
    """The directories of a log; see `Log.replicas`."""

    def __init__(
        self, directories: Iterable[DirectoryDescription], leaderless: Sequence[TopicPartition] = ()
    ) -> None:
        super().__init__(directories)
        self.leaderless = tuple(leaderless)
        """The partitions without a leader, which can neither be read nor written."""

    @property
    def title(self) -> str:
        """How many directories are online, and which partitions have no leader."""
        online = sum(directory.online for directory in self)
        title = f"{online} of {plural(len(self), 'directory', 'directories')} online"
        if self.leaderless:
            names = [f"{topic}-{number}" for topic, number in self.leaderless[:5]]
            more = ", …" if len(self.leaderless) > 5 else ""
            title += f"; without a leader: {', '.join(names)}{more}"
        return title

    def rows(self) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
        """Return the heads and the rows of the table."""
        return _HEADS, [_cells(directory) for directory in self]

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain dicts and lists, for JSON."""
        return {
            "directories": [directory._asdict() for directory in self],
            "leaderless": [partition._asdict() for partition in self.leaderless],
        }

    def __repr__(self) -> str:
        return "\n".join((self.title, *text_table(*self.rows())))

    def _repr_html_(self) -> str:
        """For notebooks."""
        return html_table(self.title, *self.rows())


def _cells(directory: DirectoryDescription) -> tuple[object, ...]:
    state = "online" if directory.online else f"offline: {directory.reason}"
    size, lag = directory.bytes, directory.lag_bytes
    return (
        *(directory.id, directory.path, directory.rack, state),
        *(directory.leaders, directory.replicas, directory.in_sync),
        None if size is None else format_bytes(size),
        None if lag is None else format_bytes(lag),
    )


class ReplicaMove(NamedTuple):
    """The replicas of a partition before and after a reassignment, the preferred leader first."""

    before: tuple[int, ...]
    after: tuple[int, ...]


class ReassignmentResult(dict[TopicPartition, ReplicaMove]):
    """What `Replicas.reassign` did, or would do: `ReplicaMove` by partition."""

    def __init__(
        self,
        moves: Mapping[TopicPartition, ReplicaMove],
        *,
        dry_run: bool = False,
        pending: Iterable[TopicPartition] = (),
        superseded: Iterable[TopicPartition] = (),
    ) -> None:
        super().__init__(moves)
        self.dry_run = dry_run
        self.pending = tuple(pending)
        """The partitions that move when a directory has come back."""
        self.superseded = tuple(superseded)
        """Those that did not move: meanwhile another process cancelled or replaced the move, or
        deleted the topic."""

    @property
    def copies(self) -> int:
        """How many copies are made."""
        return sum(len(set(move.after) - set(move.before)) for move in self.values())

    @property
    def title(self) -> str:
        """How much moves, and whether it was done."""
        if not self:
            return "Reassignment: nothing to move"
        copies = plural(self.copies, "new copy", "new copies")
        outcomes = []
        if self.pending:
            outcomes.append(f"{plural(len(self.pending), 'partition')} wait for a directory")
        if self.superseded:
            outcomes.append(
                f"{plural(len(self.superseded), 'move')} cancelled or replaced by another process"
            )
        outcome = "dry run, nothing was changed" if self.dry_run else "done"
        outcome = "; ".join(outcomes) or outcome
        return f"Reassignment of {plural(len(self), 'partition')}, {copies}: {outcome}"

    def rows(self) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
        """Return the heads and the rows of the table."""
        heads = ("topic", "partition", "before", "after", "state")
        states = dict.fromkeys(self.pending, "pending") | dict.fromkeys(
            self.superseded, "superseded"
        )
        return heads, [
            (
                *partition,
                ",".join(map(str, move.before)),
                ",".join(map(str, move.after)),
                states.get(partition),
            )
            for partition, move in self.items()
        ]

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain dicts and lists, for JSON."""
        return {
            "dry_run": self.dry_run,
            "moves": [
                {**partition._asdict(), "before": list(move.before), "after": list(move.after)}
                for partition, move in self.items()
            ],
            "pending": [partition._asdict() for partition in self.pending],
            "superseded": [partition._asdict() for partition in self.superseded],
        }

    def __repr__(self) -> str:
        return "\n".join((self.title, *text_table(*self.rows()))) if self else self.title

    def _repr_html_(self) -> str:
        """For notebooks."""
        return html_table(self.title, *self.rows())


# What `Log` does with the directories of its root


def several(root: Root) -> ReplicatedRoot:
    """Return the root of a log in several directories.

    Raises:
        IllegalStateError: The log has one directory.
    """
    from embedlog.replication.root import ReplicatedRoot

    if isinstance(root, ReplicatedRoot):
        return root
    raise IllegalStateError("The log has one directory", path=root.path, todo=ADD_REPLICA)


def directories_of(root: Root) -> tuple[list[DirectoryDescription], list[TopicPartition]]:
    """Return the directories, and the partitions without a leader."""
    from embedlog.replication import describe
    from embedlog.replication.reassign import partitions_where

    if not root.replicated:
        logs = list(root.partition_logs(root.topics().values()))
        return [describe.only_directory(root.path, logs)], []
    log = several(root)
    return describe.describe_directories(log), partitions_where(
        log, lambda assignment: assignment.leader is None
    )


def remove_directories(
    root: Root,
    paths: Sequence[str],
    *,
    force: bool,
    throttle: float | None,
    progress: Callable[[int, int], object] | None,
) -> None:
    """Remove directories; see `Log.replicas.remove`."""
    from embedlog.replication.reassign import check_left, partitions_where
    from embedlog.replication.recovery import take_over
    from embedlog.replication.root import ReplicatedRoot
    from embedlog.replication.unclean_election import elect_unclean

    log = several(root)
    if not force:
        log.context.check_writable()
    ids = [id_of(log, path) for path in paths]
    check_left(log.controller.image, ids)
    if log.mode == "r":
        # It cannot be opened to write while it needs the directories that are given up here.
        only = partitions_where(log, lambda each: set(each.isr) <= {*ids})
        log.close()
        writable = ReplicatedRoot(log.paths, given_up=ids, **{**log.options(), "mode": "rw"})
        try:
            elect_unclean(writable, only)
            left = [each for each in ids if each in writable.controller.image.directories]
            if left:
                _remove(writable, left, force, throttle, progress)
            else:
                take_over(writable)
        finally:
            writable.close()
        return
    _remove(log, ids, force, throttle, progress)


def _remove(
    root: ReplicatedRoot,
    ids: Sequence[int],
    force: bool,
    throttle: float | None,
    progress: Callable[[int, int], object] | None,
) -> None:
    from embedlog.replication.reassign import remove_directories

    remove_directories(root, ids, force=force, throttle=_throttle(throttle), progress=progress)


def id_of(root: ReplicatedRoot, path: str) -> int:
    """Return the id of a directory of the log."""
    from embedlog.files.paths import real_path

    directories = root.controller.current().image.directories
    for each, info in directories.items():
        if info.path in (path, real_path(path)):
            return each
    raise IllegalStateError(
        "The log has no such directory",
        path=path,
        todo=f"It has {', '.join(info.path for info in directories.values())}.",
    )


def _throttle(bytes_per_second: float | None) -> Throttle | None:
    if bytes_per_second is None:
        return None
    if not bytes_per_second > 0:
        raise InvalidConfigError(f"throttle must be more than 0, got {bytes_per_second!r}")
    return Throttle(bytes_per_second)


def elect_leaders(
    root: Root, partitions: Iterable[TopicPartition] | None, election: str
) -> list[TopicPartition]:
    """Elect leaders; see `Replicas.elect_leaders`."""
    if election not in ("preferred", "unclean"):
        raise InvalidConfigError(f"election must be preferred or unclean, got {election!r}")
    root.context.check_writable()
    chosen = _partitions(root, partitions)
    for partition in chosen:
        root.partition(*partition)  # or raises, before anything is changed
    if not root.replicated:
        return []
    from embedlog.replication.reassign import elect_preferred
    from embedlog.replication.unclean_election import elect_unclean

    elect = elect_unclean if election == "unclean" else elect_preferred
    return elect(several(root), chosen)


def _partitions(root: Root, partitions: Iterable[TopicPartition] | None) -> list[TopicPartition]:
    if partitions is not None:
        return _checked(partitions)
    return [
        TopicPartition(info.name, number)
        for info in root.topics().values()
        for number in range(info.partitions)
    ]


def _checked(partitions: object) -> list[TopicPartition]:
    """Return the partitions in an argument that should be a list of them.

    Raises:
        InvalidPartitionError: It is none, or one of them is no partition.
    """
    if isinstance(partitions, str | bytes | TopicPartition) or not isinstance(partitions, Iterable):
        raise InvalidPartitionError(
            f"partitions must be a list of TopicPartition, got {partitions!r}",
            todo='Pass a list, such as [TopicPartition("flights", 0)].',
        )
    return list(map(to_topic_partition, partitions))


def reassign(
    root: Root,
    moves: Mapping[TopicPartition, Sequence[int]] | None,
    *,
    replication_factor: int | Mapping[str, int] | None,
    throttle: float | None,
    dry_run: bool,
    progress: Callable[[int, int], object] | None,
) -> ReassignmentResult:
    """Move copies; see `Replicas.reassign`."""
    from embedlog.replication import reassign as replication

    log, limit = several(root), _throttle(throttle)
    if moves is not None and replication_factor is not None:
        raise InvalidConfigError("Pass moves or replication_factor, not both")
    if moves is None:
        factors = _replication_factors(log, replication_factor)
        moves = replication.plan(log, replication_factors=factors)
    before = {
        TopicPartition(info.name, number): assignment
        for info, number, assignment in replication.assignments(log)
    }
    replication.check(log, moves)
    changes = {
        TopicPartition(*partition): ReplicaMove(before[partition].target_replicas, tuple(replicas))
        for partition, replicas in moves.items()
        if partition in before and before[partition].target_replicas != tuple(replicas)
    }
    if dry_run:
        return ReassignmentResult(changes, dry_run=True)
    log.context.check_writable()
    outcome = replication.run(log, moves, throttle=limit, progress=progress)
    for partition, assignment in before.items():
        if assignment.is_reassigning and partition not in changes:
            replicas = tuple(
                each for each in assignment.replicas if each not in assignment.adding_replicas
            )
            changes[partition] = ReplicaMove(replicas, assignment.target_replicas)
    return ReassignmentResult(changes, **outcome._asdict())


def _replication_factors(
    root: Root, replication_factor: int | Mapping[str, int] | None
) -> Mapping[str, int]:
    """Return how many copies topics are to have, by name."""
    factors = {} if replication_factor is None else replication_factor
    if not isinstance(factors, Mapping):
        factors = dict.fromkeys(root.topics(), factors)
    for factor in factors.values():
        if isinstance(factor, bool) or not isinstance(factor, int):
            raise InvalidConfigError(
                f"replication_factor must be an int, or ints by topic, got {replication_factor!r}"
            )
    return factors


def cancel_reassignment(root: Root, partitions: Iterable[TopicPartition] | None) -> int:
    """Keep the old copies of partitions that move; see `Replicas.cancel_reassignment`."""
    from embedlog.replication import reassign as replication

    log = several(root)
    log.context.check_writable()
    return replication.cancel(log, _partitions(log, partitions))


def verify_replicas(
    root: Root, progress: Callable[[int, int], object] | None
) -> list[ReplicaDifference]:
    """Compare copies; see `Housekeeping.verify`."""
    if not root.replicated:
        return []
    from embedlog.replication.verify_copies import verify_copies

    return verify_copies(several(root), progress)
