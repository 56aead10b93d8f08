"""`Log.replicas`: the directories of a log, and moves of copies between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

from embedlog.api.live_list import LiveList
from embedlog.api.opening import reopen
from embedlog.consumer.arguments import to_topic_partition
from embedlog.display import html_table, plural, public_names, text_table
from embedlog.errors import (
    ClosedError,
    IllegalStateError,
    InvalidConfigError,
    InvalidPartitionError,
)
from embedlog.files.throttle import Throttle
from embedlog.hints import ADD_REPLICA
from embedlog.progress import ProgressBar, format_bytes
from embedlog.record import TopicPartition
from embedlog.root.location import directory_of
from embedlog.root.root import Root

if TYPE_CHECKING:
    from embedlog.api.housekeeping import Progress
    from embedlog.api.log import Log
    from embedlog.replication.describe import DirectoryDescription
    from embedlog.replication.root import ReplicatedRoot

_HEADS = ("id", "path", "rack", "state", "leaders", "replicas", "in sync", "size", "lag")


class Replicas(LiveList["DirectoryDescription"]):
    """The directories of a log, with their leaders, copies, sizes and lags, as of each use.

    >>> import tempfile, embedlog
    >>> with tempfile.TemporaryDirectory() as disk:
    ...     with embedlog.open([f"{disk}/a", f"{disk}/b"]) as log:
    ...         topic = log.create_topic("flights", partitions=4)
    ...         [(each.id, each.online, each.leaders, each.in_sync) for each in log.replicas]
    [(1, True, 2, 4), (2, True, 2, 4)]
    """

    def __init__(self, log: Log) -> None:
        self._log = log

    def _items(self) -> list[DirectoryDescription]:
        from embedlog.replication import describe

        root = self._log.root
        if root.replicated:
            return describe.describe_directories(several(root))
        logs = list(root.partition_logs(root.topics().values()))
        return [describe.only_directory(root.path, logs)]

    @property
    def leaderless(self) -> tuple[TopicPartition, ...]:
        """The partitions without a leader, which can neither be read nor written."""

        root = self._log.root
        if not root.replicated:
            return ()
        return tuple(several(root).partitions_where(lambda each: each.leader is None))

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

    # Changes

    def add(self, path: str | os.PathLike[str], rack: str | None = None) -> int:
        """Add a directory to the log, and return its id.

        New topics get copies there; `reassign` moves some of the others, and begins to copy
        topics that had too few directories.  A log in one directory becomes one in several.

        Args:
            path: A new or empty directory, on a disk of its own.
            rack: What fails together with it, such as a controller or a machine: the copies of a
                partition are in different racks, as with Kafka's `broker.rack`.

        Raises:
            NotALogError: The directory has other files, or is a log.
            ClosedError: The log was closed.
            IllegalStateError: It belongs to the log already; or this handle has producers or
                consumers, and the log has one directory.
            LockTimeoutError: The log has one directory, and other processes have it open.
        """
        from embedlog.files.paths import real_path
        from embedlog.replication.root import add_directory

        root, directory = self._log.root, directory_of(path)
        if root.closed:
            raise ClosedError("The log was closed", path=root.path)
        root.context.check_writable()
        if root.replicated:
            return add_directory(several(root), directory, rack)
        directory = real_path(directory)
        if directory == real_path(root.path):
            raise IllegalStateError("The directory belongs to the log already", path=directory)
        self._log._close_to_reopen()
        try:
            reopen(root, [root.path, directory], {directory: rack})
        finally:
            self._log.housekeeping._start()
        return id_of(several(root), directory)

    def remove(
        self,
        *paths: str | os.PathLike[str],
        force: bool = False,
        throttle: float | None = None,
        progress: Progress | bool = True,
    ) -> None:
        """Remove directories from the log; their copies are made in the others first.

        A topic with as many copies as there were directories has one less afterwards.  The files
        of a removed directory that can be written are deleted.

        Args:
            paths: The directories; they need not exist any more.
            force: Give up directories that will never return, also if they have the only copy of
                records, or if too few are left to decide.  In that case, when the log cannot be
                opened to write, call this on one that was opened with ``mode="r"``.
            throttle: Bytes per second to copy at most.
            progress: Called with the bytes done, and all bytes.  By default a progress bar
                in terminals and notebooks; False shows none.

        Raises:
            TypeError: No directory is named.
            IllegalStateError: It is the last directory that works, or none of the log.
            ReplicaNotAvailableError: It cannot be used, and has the only copy of a partition.
            NotEnoughReplicasError: Too few directories would be left to decide; with ``force``,
                give up more.  Or a partition would get fewer copies because another directory is
                offline.  Or another process cancelled the moves: repeat the call.
            EligibleLeadersNotAvailableError: With ``force``: the directory was removed, and had
                all in-sync copies of a partition, which has no leader now, since a directory that
                is offline has more records than each that could lead; see `elect_leaders`.
        """
        from embedlog.replication import reassign

        root = several(self._log.root)
        if not paths:
            raise TypeError("remove() needs the path of at least one directory")
        if not force:
            root.context.check_writable()
        if root.mode == "r":
            self._log._check_no_clients()
        ids = [id_of(root, directory_of(path)) for path in paths]
        reassign.check_left(root.controller.image, ids)
        with ProgressBar("remove") as bar:
            remove = partial(
                reassign.remove_directories,
                force=force,
                throttle=_throttle(throttle),
                progress=bar if progress is True else progress or None,
            )
            if root.mode == "r":
                self._give_up(root, ids, remove)
            else:
                remove(root, ids)

    def _give_up(
        self, root: ReplicatedRoot, ids: Sequence[int], remove: Callable[..., None]
    ) -> None:
        # It cannot be opened to write while it needs the directories that are given up here.
        from embedlog.replication.reassign import elect_unclean
        from embedlog.replication.root import ReplicatedRoot, take_over

        only = root.partitions_where(lambda each: set(each.isr) <= {*ids})
        self._log._close_to_reopen()
        try:
            options = {**root.options(), "mode": "rw"}
            with closing(ReplicatedRoot(root.paths, given_up=ids, **options)) as writable:
                elect_unclean(writable, only)
                left = [each for each in ids if each in writable.controller.image.directories]
                if left:
                    remove(writable, left)
                else:
                    take_over(writable)
        finally:
            reopen(root, [root.path])

    def elect_leaders(
        self,
        partitions: Iterable[TopicPartition] | None = None,
        *,
        election: Literal["preferred", "unclean"] = "preferred",
    ) -> list[TopicPartition]:
        """Elect leaders; return the partitions that got another one.

        Args:
            partitions: By default all of them.
            election: ``"preferred"`` elects the first replica of each partition, if it is in sync,
                so that the leaders are even again.  ``"unclean"`` elects for partitions
                without a leader a replica that is not in sync, of those in directories that are
                online the one with the most records: records that only the others have are lost.

        Raises:
            EligibleLeadersNotAvailableError: A directory that is offline has a copy with more
                records, and can be read.  No leader was elected.
            UnknownTopicOrPartitionError: There is no such partition.
            InvalidPartitionError: ``partitions`` is not a list of partitions.
            InvalidConfigError: There is no such kind of election.
        """
        from embedlog.replication.reassign import elect_preferred, elect_unclean

        root = self._log.root
        if election not in ("preferred", "unclean"):
            raise InvalidConfigError(f"election must be preferred or unclean, got {election!r}")
        root.context.check_writable()
        chosen = _partitions(root, partitions)
        for partition in chosen:
            root.partition(*partition)  # or raises, before anything is changed
        if not root.replicated:
            return []
        elect = elect_unclean if election == "unclean" else elect_preferred
        return elect(several(root), chosen)

    def reassign(
        self,
        moves: Mapping[TopicPartition, Sequence[int]] | None = None,
        *,
        replication_factor: int | Mapping[str, int] | None = None,
        throttle: float | None = None,
        dry_run: bool = False,
        progress: Progress | bool = True,
    ) -> ReassignmentResult:
        """Move copies to other directories, in this thread; the records stay readable meanwhile.

        Also finishes moves that had begun.  If it is interrupted, the housekeeping continues.  The
        result names the moves that wait for a directory (``pending``), and those that another
        process cancelled or replaced (``superseded``).

        Args:
            moves: The ids of the directories of each partition, the preferred leader first; more
                or fewer than before change how many copies it has.  By default the fewest moves
                that make the copies even over all directories.
            replication_factor: How many copies to have, of all topics or by the name of the topic,
                instead of as many as there are; not with ``moves``.  A partition with a copy in a
                directory that is offline keeps its number.
            throttle: Bytes per second to copy at most.
            dry_run: Change nothing.
            progress: Called with the bytes done, and all bytes.  By default a progress bar
                in terminals and notebooks; False shows none.

        Raises:
            InvalidReplicationAssignmentError: There is no such directory, or one occurs twice.
            InvalidReplicationFactorError: There are not so many directories online.
            UnknownTopicOrPartitionError: There is no such partition.
            LockTimeoutError: Another process moves copies.
        """
        from embedlog.replication import reassign

        log, limit = several(self._log.root), _throttle(throttle)
        if moves is not None and replication_factor is not None:
            raise InvalidConfigError("Pass moves or replication_factor, not both")
        if moves is None:
            factors = _replication_factors(log, replication_factor)
            moves = reassign.plan(log, replication_factors=factors)
        moves = {to_topic_partition(each): replicas for each, replicas in moves.items()}
        before = {
            TopicPartition(info.name, number): assignment
            for info, number, assignment in log.assignments()
        }
        reassign.check(log, moves)
        changes = {
            TopicPartition(*partition): ReplicaMove(
                before[partition].target_replicas, tuple(replicas)
            )
            for partition, replicas in moves.items()
            if partition in before and before[partition].target_replicas != tuple(replicas)
        }
        if dry_run:
            return ReassignmentResult(changes, dry_run=True)
        log.context.check_writable()
        with ProgressBar("reassign") as bar:
            shown = bar if progress is True else progress or None
            outcome = reassign.run(log, moves, throttle=limit, progress=shown)
        for partition, assignment in before.items():
            if assignment.is_reassigning and partition not in changes:
                replicas = tuple(
                    each for each in assignment.replicas if each not in assignment.adding_replicas
                )
                changes[partition] = ReplicaMove(replicas, assignment.target_replicas)
        return ReassignmentResult(changes, **outcome._asdict())

    def cancel_reassignment(self, partitions: Iterable[TopicPartition] | None = None) -> int:
        """Keep the old copies of partitions that are being moved; return how many these are.

        Args:
            partitions: By default all that are being moved.

        Raises:
            IllegalStateError: Only new copies of a partition are in sync.
            UnknownTopicOrPartitionError: There is no such partition.
            InvalidPartitionError: ``partitions`` is not a list of partitions.
        """
        from embedlog.replication import reassign

        log = several(self._log.root)
        log.context.check_writable()
        return reassign.cancel(log, _partitions(log, partitions))

    def __dir__(self) -> list[str]:
        """Return the names that completion offers."""
        return public_names(self)


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
        InvalidPartitionError: It is none, or one of them is not a partition.
    """
    if isinstance(partitions, str | bytes | TopicPartition) or not isinstance(partitions, Iterable):
        raise InvalidPartitionError(
            f"partitions must be a list of TopicPartition, got {partitions!r}",
            todo='Pass a list, such as [TopicPartition("flights", 0)].',
        )
    return list(map(to_topic_partition, partitions))


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
