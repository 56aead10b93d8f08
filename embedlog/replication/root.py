"""Attaching to a log over several directories, and directories that come back or are added.

Order: each directory is opened and checked as a root of its own; their metadata says which one
counts, and which others have the same; then they are one log.  A directory that is missing,
broken or behind is taken offline, and the housekeeping brings it back.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import chain
from time import monotonic
from typing import Any

from embedlog import catalog, kv
from embedlog.catalog import NewPartitions, PartitionInfo, TopicInfo
from embedlog.errors import (
    ClosedError,
    CorruptionError,
    DiskFullError,
    EmbedlogError,
    IllegalStateError,
    InvalidReplicationAssignmentError,
    LockTimeoutError,
    NotALogError,
    NotEnoughReplicasError,
    ReplicasDivergedError,
    StorageError,
)
from embedlog.failures import Failures
from embedlog.files import Files
from embedlog.files.paths import (
    FORMAT_FILE,
    exists,
    is_directory,
    is_mount_point,
    is_there,
    real_path,
)
from embedlog.keyspace import LIVE_VERSION
from embedlog.partition import unnamed_files
from embedlog.partition.state import Context
from embedlog.record import TopicPartition
from embedlog.replication.controller import Controller
from embedlog.replication.directory import (
    DATABASE_ERRORS,
    LogDirectory,
    describe,
    diverged,
    extra_writes,
    histories,
)
from embedlog.replication.files import ReplicatedFiles, ReplicatedWake, remove_copies
from embedlog.replication.isr import PartitionAssignment
from embedlog.replication.member_file import (
    DirectoryMember,
    check_apart,
    check_member,
    find_members,
    new_cluster_id,
    read_listed,
    read_member,
    write_member,
)
from embedlog.replication.metadata import (
    ASSIGNMENTS,
    DIRECTORIES,
    JUST_ADDED,
    METADATA_VERSION,
    DirectoryInfo,
    MetadataImage,
    MetadataVersion,
    check_quorum,
    paths_of,
    put_epoch,
)
from embedlog.replication.partition import ReplicatedPartition
from embedlog.replication.placement import assign_replicas
from embedlog.root import startup
from embedlog.root.root import Root, check_format, check_new
from embedlog.segment import path_of

_MIN_FREE_BYTES = 1 << 20
"""What a directory must have free to come back."""

_logger = logging.getLogger("embedlog.replication")


REGAIN_SECONDS = 0.1
"""How often a process that has too few directories checks whether one came back."""
DEFAULT_REPLICATION_FACTOR = 3
"""A topic has this many copies, or as many as there are directories."""


_ONLY_BEGUN = "It began an epoch that the others do not have; it is brought back"
"""Why a directory is not used when the log is opened, although it has not diverged."""


class _FirstRoot(Root):
    """A log in one directory that is about to get more."""

    def _check_format(self, files: Files) -> None:
        check_format(files, replicated=True, must_exist=self.must_exist)


class ReplicatedRoot(Root):
    """One handle on a log over several directories.

    Args:
        paths: The directories; those that the log has besides are opened, too.
        racks: The racks of directories, by path, as Kafka's `broker.rack`: one that differs from
            that in the metadata replaces it.
        given_up: Directories that will never come back; they are removed.
        options: As those of `Root`.
    """

    replicated = True
    controller: Controller
    cluster_id = ""
    to_add: Sequence[str] = ()
    """Directories that a process which was killed had begun to add."""

    def __init__(
        self,
        paths: Sequence[str],
        *,
        racks: Mapping[str, str | None] | None = None,
        given_up: Collection[int] = (),
        **options: Any,
    ) -> None:
        self.paths, self._racks = tuple(paths), dict(racks or {})
        self.given_up = frozenset(given_up)
        self._regaining, self._regain_at = threading.Lock(), 0.0
        super().__init__(self.paths[0], **options)

    def after_fork(self) -> None:
        """As `Root.after_fork`."""
        super().after_fork()
        self._regaining = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ReplicatedRoot, self.paths, **self.options()), ()

    # Topics and partitions

    def assignments(self) -> Iterator[tuple[TopicInfo, int, PartitionAssignment]]:
        """Yield all partitions with their assignments."""
        for info in self.topics().values():
            for partition in range(info.partitions):
                assignment = self.controller.assignment(info.key(partition))
                if assignment is not None:
                    yield info, partition, assignment

    def partitions_where(
        self, holds: Callable[[PartitionAssignment], bool]
    ) -> list[TopicPartition]:
        """Return the partitions of which something holds."""
        found = self.assignments()
        return [TopicPartition(info.name, number) for info, number, each in found if holds(each)]

    def _new_partition(self, context: Context, info: TopicInfo, number: int) -> ReplicatedPartition:
        return ReplicatedPartition(context, info, number, self.controller)

    def _assign_replicas(
        self, replication_factor: int | None, replicas: Sequence[Sequence[int]] | None = None
    ) -> NewPartitions:
        def assign(txn: kv.Txn, topic: TopicInfo, first: int) -> None:
            image = MetadataImage.load(txn)
            if replicas is not None:
                if len(replicas) != topic.partitions:
                    raise InvalidReplicationAssignmentError(
                        f"There are replicas for {len(replicas)} of {topic.partitions} partitions",
                        topic=topic.name,
                    )
                image.check_directories({*chain(*replicas)}, topic=topic.name)
                assigned: Mapping[int, Sequence[int]] = dict(enumerate(replicas))
            else:
                factor = replication_factor
                if factor is None and first:
                    # As the partitions that the topic has.
                    before = ASSIGNMENTS.get(txn, topic.key(0))
                    factor = None if before is None else len(before.target_replicas)
                if factor is None:
                    # One that is offline gets its copy when it comes back.
                    factor = min(DEFAULT_REPLICATION_FACTOR, len(image.directories))
                racks = {each: info.rack for each, info in image.directories.items()}
                assigned = assign_replicas(
                    topic.partitions - first,
                    factor,
                    racks,
                    first_partition=first,
                    # Chance that is the same if the transaction runs again.
                    rng=random.Random(topic.id),
                    offline=racks.keys() - set(image.online),
                )
            for partition, chosen in assigned.items():
                assignment = PartitionAssignment.create(chosen, image.online)
                ASSIGNMENTS.put(txn, topic.key(partition), value=assignment)
            put_epoch(txn, self.controller.next_epoch(image.epoch), image.controller_id)

        return assign

    def _unassign_replicas(self) -> Callable[[kv.Txn], None]:
        def unassign(txn: kv.Txn) -> None:
            # With the old image, others would continue to move copies, and to wait for them.
            image = MetadataImage.load(txn)
            put_epoch(txn, self.controller.next_epoch(image.epoch), image.controller_id)

        return unassign

    # Attaching

    def files_at(self, path: str, *, writable: bool = True) -> Files:
        """Return the files of a directory."""
        return self.files(path, writable=writable, unsafe_filesystem=self.unsafe_filesystem)

    def _attach(self) -> Context:
        with self._lock:
            attached = self._context is not None
            context = super()._attach()
            if not attached and self._is_new_live:
                self._is_new_live = False
                # Makes the copies equal again, past what had been flushed.
                take_over(self)
            return context

    def _open_files(self, writable: bool) -> Files:
        self._unopened, self.diverged = {}, {}
        with ExitStack() as undo:
            opened: dict[str, Files] = {}
            self._open_each(self.paths, writable, opened, undo)
            cluster, paths, _ = find_members(self.paths, opened)
            if cluster != self.cluster_id and self.cluster_id:
                # After a fork; or else a new log would be begun here.
                raise NotALogError("None of the directories has the log any more", path=self.path)
            if cluster is None:
                listed = [path for files in opened.values() for path in read_listed(files)]
                self.paths = (*self.paths, *(path for path in listed if path not in self.paths))
                self._open_each(listed, writable, opened, undo)
                self._require_log(opened, writable)
                # By default the first one.
                logs = [path for path in self.paths if exists(f"{path}/{FORMAT_FILE}")]
                self._begin((logs or self.paths)[0])
                undo.close()
                return self._open_files(writable)
            self.cluster_id = cluster
            self._open_each(paths.values(), writable, opened, undo)
            _, paths, self.to_add = find_members([*self.paths, *opened], opened, cluster)
            directories = self._check_each(paths, writable, opened, undo)
            if not directories:
                raise NotALogError("None of the directories can be opened", path=self.path)
            self._unprepared = paths.keys() - directories.keys()
            self.controller = Controller(self, directories)
            undo.callback(self.controller.close)
            self.controller.refresh()
            self._unprepared = frozenset()
            if writable:
                # Directories that a killed process left one write behind, or that broke
                # meanwhile: from here on all that are online have the same rows.
                self.controller.state.write(_nothing)
                self.controller.live.write(_nothing)
                if self._is_first:
                    # Which a copy of a directory from before does not have.
                    self.controller.change(lambda _txn, _image: True)
                if self._is_unclean:
                    # Not before: a directory that was behind names files that are replaced.
                    for directory in self.controller.online:
                        self.startup_report += _sweep(directory)
                self._is_new_live = not self.controller.live.get(_LIVE_VERSION_KEY)
                self._update_directories(paths)
            undo.pop_all()
            for directory_id, directory in directories.items():
                if self.controller.directories.get(directory_id) is not directory:
                    directory.close()
            return ReplicatedFiles(self.controller)

    diverged: dict[int, str]
    """Why directories are not used by this process, which may only read, or gives them up."""
    _unopened: dict[str, StorageError]
    """Directories that exist, and could not be opened when the log was."""
    _is_first = False
    """Whether no other process had the log open."""
    _is_unclean = False
    """Whether the last ones that had it open were killed."""
    _is_new_live = False
    """Whether this process found `live` of an earlier boot, so that the copies may differ."""

    _unprepared: Collection[int] = frozenset()
    """Directories that failed in the startup.  It must not use one that works again a moment
    later: its databases were not checked, and may still be marked as closed."""

    def _open_each(
        self, paths: Iterable[str], writable: bool, opened: dict[str, Files], undo: ExitStack
    ) -> None:
        """Open the directories that are there, and are not open yet; ``undo`` closes them."""
        for path in paths:
            try:
                if path not in opened and is_there(path) and is_directory(path):
                    opened[path] = self.files_at(path, writable=writable)
                    undo.callback(opened[path].close_all)
            except StorageError as error:
                _logger.warning("Directory %s cannot be opened: %s", path, error)
                self._unopened[path] = error

    def _require_log(self, opened: dict[str, Files], writable: bool) -> None:
        """Raise unless at most one of the directories is a log, to which others may be added."""
        for error in self._unopened.values():
            raise error  # what is there may be a directory of a log, whose others are not mounted
        logs = [path for path, files in opened.items() if files.exists(FORMAT_FILE)]
        if len(logs) > 1:
            raise NotALogError(
                f"{logs[0]} and {logs[1]} are two logs, not directories of one",
                path=logs[1],
                todo="Open one of them, with new or empty directories for the copies.",
            )
        if not writable:
            raise NotALogError("There is no log over several directories here", path=self.path)

    def _begin(self, path: str) -> None:
        """Make a log in one directory the first of several."""
        _FirstRoot(path, **self.options()).close()  # creates it, and finishes what was left
        files = self.files_at(path)
        try:
            attached = files.open("locks/attached", write=True, create=True)
            try:
                files.lock(attached, self.lock_timeout)
            except LockTimeoutError as error:
                raise LockTimeoutError(
                    "Other processes have the log open, and would write to one directory only",
                    path=path,
                    todo="Close them; then add the directories.",
                ) from error
            to_add = tuple(each for each in self.paths if each != path)
            # Before that is noted: from then on the log opens only together with these directories.
            for each in to_add:
                _new_files(self, each, [path, *to_add]).close_all()
            # Otherwise the next open would take the new rows for damage.
            startup.remove_clean_mark(files)
            rack = self._racks.get(path)
            with closing(
                kv.LmdbStore(files, "state", durable=True, timeout=self.lock_timeout)
            ) as state:
                state.write(partial(_put_first_directory, path, rack))
            # Last: without it this is a log in one directory, whose other rows do no harm.
            write_member(files, DirectoryMember(new_cluster_id(), 1, {1: path}, to_add))
        finally:
            files.close_all()

    def _check_each(
        self, paths: dict[int, str], writable: bool, opened: dict[str, Files], undo: ExitStack
    ) -> dict[int, LogDirectory]:
        """Check the directories, as the first process to attach does, and open their databases."""
        directories: dict[int, LogDirectory] = {}
        images: dict[int, MetadataImage] = {}
        reports = []
        with ExitStack() as locks:
            unchecked = sorted(paths.items())
            for directory_id, path in unchecked:
                if path not in opened:
                    continue
                directory = LogDirectory(directory_id, path, opened[path])
                undo.callback(directory.close)
                try:
                    report = self._attach_to(directory, locks)
                    image = directory.state.read(MetadataImage.load)
                except (*DATABASE_ERRORS, NotALogError) as error:
                    _give_up(directory, error)
                    continue
                directories[directory_id], images[directory_id] = directory, image
                reports.append(report)
                # What adds one may be killed after this, and before the others' files name it.
                for each, info in image.directories.items():
                    if each not in paths and info.path not in paths.values():
                        paths[each] = info.path
                        unchecked.append((each, info.path))
                self._open_each(paths.values(), writable, opened, undo)
            # Nobody else uses a directory that is offline: that alone does not make it the first.
            self._is_first = bool(reports) and None not in reports
            for directory, report in zip(directories.values(), reports, strict=True):
                self.startup_report += [
                    f"{directory.path}: {line}" for line in (report or ([],))[0]
                ]
            self._is_unclean = self._is_first and any(report and report[1] for report in reports)
        self._check_agreement(directories, images)
        for each, directory in directories.items():
            directory.opened_epoch = images[each].epoch
        return {each: directory for each, directory in directories.items() if images[each].epoch}

    def _check_agreement(
        self, directories: dict[int, LogDirectory], images: Mapping[int, MetadataImage]
    ) -> None:
        """Raise if two directories went on without each other; to read, use that of the first path.

        Raises:
            ReplicasDivergedError: Each has what the other lacks, and could decide without it.
        """
        left = [each for each in images if images[each].epoch and each not in self.given_up]
        if not left:
            return
        ends = {each: histories(directories[each])[0].end for each in left}
        newest = max(left, key=lambda each: (images[each].epoch, ends[each]))
        named = [each for each in left if directories[each].path == self.paths[0]]
        base = directories[named[0] if named and self.mode == "r" else newest]
        for other in [directories[each] for each in left]:
            if histories(other)[0].parted(histories(base)[0]) and not extra_writes(base, other):
                base = other  # that of before has only begun an epoch
        for each, other in list(directories.items()):
            if not (extra_writes(other, base) and extra_writes(base, other)):
                if histories(other)[0].parted(histories(base)[0]):
                    del directories[each]
                    _give_up(other, StorageError(_ONLY_BEGUN, path=other.path))
                continue
            with suppress(NotEnoughReplicasError):
                check_quorum(images[each], images[each].online)
                error = diverged(base, other)
                if self.mode == "rw" and each not in self.given_up:
                    raise error
                self.diverged[each] = describe(error)
                del directories[each]
                _give_up(other, error)

    def _attach_to(
        self, directory: LogDirectory, locks: ExitStack
    ) -> tuple[list[str], bool] | None:
        """Attach to a directory, and open its databases; return what their check returned, if any.

        Its lock is held by ``locks``.
        """
        files = directory.files
        check_format(files, replicated=True)
        check_member(files, self.cluster_id, directory.id)
        report = None
        if files.writable:
            for name in ("locks", "topics"):
                files.make_directory(name)
            locks.enter_context(directory.attachment.alone(self.lock_timeout))
            report = directory.attachment.attach(self.lock_timeout, startup.check_databases)
        else:
            directory.attachment.share(self.lock_timeout)
        live = files.writable or startup.live_is_valid(files)
        directory.open_stores(self.lock_timeout, live=live)
        return report

    def regain_quorum(self, failed: Mapping[int, Exception]) -> bool:
        """Bring a directory back while too few others work; return whether one came back.

        Also one that still counts as online, if another disk is at its path now, if it lacks the
        write that says so, since the disk or its process failed in that, or if it could not be used
        when the log was opened.
        """
        # One thread at a time, and not while it is bringing one back.
        if monotonic() < self._regain_at or not self._regaining.acquire(blocking=False):
            return False
        try:
            self._regain_at = monotonic() + REGAIN_SECONDS
            for each, info in self.controller.image.directories.items():
                opened = self.controller.directories.get(each)
                if opened is None:
                    is_used = each not in self._unprepared
                else:
                    is_used = opened.is_in_place() and not opened.lacks(info.since)
                if info.online and (each not in failed or is_used):
                    continue
                try:
                    if is_directory(info.path):
                        bring_back(self, each, failed)
                        return True
                except (EmbedlogError, OSError) as error:
                    _logger.debug("Directory %s stays offline: %s", info.path, describe(error))
            return False
        finally:
            self._regaining.release()

    def open_directory(self, directory_id: int, path: str) -> LogDirectory:
        """Open a directory that another process has brought online."""
        files = self.files_at(path, writable=self.mode == "rw")
        directory = LogDirectory(directory_id, path, files)
        try:
            if directory_id in self._unprepared:
                raise StorageError(
                    "The directory could not be used when the log was opened",
                    path=path,
                    operation="open",
                )
            check_member(files, self.cluster_id, directory_id)
            directory.attachment.share(self.lock_timeout)
            directory.open_stores(self.lock_timeout)
        except BaseException:
            # Its databases, too: without the lock of this process, another one takes them for
            # unused, and begins a table of readers again that does not have those of this one.
            directory.close()
            raise
        return directory

    def _update_directories(self, paths: Mapping[int, str]) -> None:
        """Note where the directories are now, and the racks that were passed."""

        def changes(image: MetadataImage) -> dict[int, DirectoryInfo]:
            found = {}
            for each, info in image.directories.items():
                path = paths.get(each, info.path)
                if path != info.path and not self._is_at(path, each):
                    path = info.path  # its disk was moved again since it was found
                found[each] = info._replace(path=path, rack=self._racks.get(path, info.rack))
            return {each: info for each, info in found.items() if info != image.directories[each]}

        def step(txn: kv.Txn, image: MetadataImage) -> bool:
            for each, info in changes(image).items():
                DIRECTORIES.put(txn, each, value=info)
            return bool(changes(image))

        if changes(self.controller.image):
            self.controller.change(step)
        self.write_members()

    def _is_at(self, path: str, directory_id: int) -> bool:
        """Return whether a directory of the log is at a path now."""
        with suppress(EmbedlogError):
            check_member(self.files_at(path, writable=False), self.cluster_id, directory_id)
            return True
        return False

    def write_members(self) -> None:
        """Have each directory that is online know where all of them are."""
        paths = {each: info.path for each, info in self.controller.image.directories.items()}
        to_add = tuple(path for path in self.to_add if path not in paths.values())
        for directory in self.controller.online:
            with suppress(StorageError):
                member = DirectoryMember(self.cluster_id, directory.id, paths, to_add)
                write_member(directory.files, member)

    def _join(self, files: Files) -> Context:
        assert isinstance(files, ReplicatedFiles)
        controller = self.controller
        live: kv.Store = (
            controller.live if "live" in controller.directory.stores else kv.EmptyStore()
        )
        context = self._context_of(files, controller.state, live, ReplicatedWake(controller))
        known = {info.path for info in self.controller.image.directories.values()}
        if files.writable:
            for path in dict.fromkeys([*self.paths, *self.to_add]):
                if path not in known:
                    add_directory(self, path, self._racks.get(path))
        return context

    # Detaching

    def _leave(self, context: Context) -> None:
        # Not one of them if the log was moved as a whole.
        if context.files.writable and any(each.is_in_place() for each in self.controller.online):
            with suppress(EmbedlogError):  # the next process to open the log finds out as well
                self.controller.check_directories()
        super()._leave(context)

    def _mark_clean(self, context: Context) -> None:
        online = [each for each in self.controller.online if each.is_in_place()]
        if not online:
            context.state.check_linked()
            self._warn_of_move()
            return
        with ExitStack() as locks:
            for directory in online:
                locks.enter_context(directory.attachment.alone(self.lock_timeout))
                locks.callback(directory.attachment.close)
            # Each is asked: that frees its lock.
            are_last = [directory.attachment.is_last() for directory in online]
            if all(are_last):
                with suppress(DiskFullError):
                    startup.remove_uncommitted_files(context.files, context.state)
                    for directory in online:
                        startup.copy_state(directory.files, directory.state)
                    context.state.close()
                    for directory in online:
                        startup.mark_clean(directory.files)


_LIVE_VERSION_KEY = LIVE_VERSION.key()


def _give_up(directory: LogDirectory, error: Exception) -> None:
    """Continue without a directory; frees its locks, so that it can be brought back."""
    _logger.warning("Directory %s cannot be used: %s", directory.path, error)
    directory.close()


def _nothing(txn: kv.Txn) -> None:
    """Change nothing."""


def _put_first_directory(path: str, rack: str | None, txn: kv.Txn) -> None:
    """Write the metadata of a log with one directory."""
    DIRECTORIES.put(
        txn, 1, value=DirectoryInfo(path, rack, since=1, is_mount_point=is_mount_point(path))
    )
    METADATA_VERSION.put(txn, value=MetadataVersion(0, 1, 1))
    put_epoch(txn, 1, 1)
    for topic in catalog.topics(txn):
        for partition in range(topic.partitions):
            assignment = PartitionAssignment((1,), (1,), 1)
            ASSIGNMENTS.put(txn, topic.key(partition), value=assignment)


# Directories that come back, or are added


def take_over(
    root: ReplicatedRoot, failures: Failures | None = None, *, only_used: bool = False
) -> None:
    """Make the log of each partition that of its leader, and recover it after a reboot.

    Programs that only read cannot do it.  Where it is not possible now, the next use does it.

    Args:
        root: The log.
        failures: Notes what fails.
        only_used: Leave out the partitions that were not used since the boot.
    """
    with (failures or Failures(_logger)).collecting(raises=False) as part:
        for log in root.partition_logs(root.topics().values()):
            with part(f"Takeover of {log.topic}-{log.partition}"):
                if not only_used or root.context.live.get(log.tail_key) is not None:
                    log.tail()


def _new_files(root: ReplicatedRoot, path: str, paths: Sequence[str]) -> Files:
    """Return the files of a directory that can be added to the log.

    Args:
        root: The log.
        path: The directory; it is created if it does not exist.
        paths: All directories of the log, with this one.

    Raises:
        NotALogError: It holds other files, is or was a directory of a log, or is inside another
            directory.
    """
    check_apart(paths)
    Files.create_root(path)
    files = root.files_at(path)
    try:
        member = read_member(files)
        if member is not None and member.cluster_id == root.cluster_id:
            others = ", ".join(each for each in paths if each != path)
            raise NotALogError(
                "The directory was removed from the log, and has what it had then",
                path=path,
                todo=f"The log is in {others}; delete the files of the directory to add it again.",
            )
        if files.exists(FORMAT_FILE):
            raise NotALogError(
                "The directory is a log of its own",
                path=path,
                todo="Name a new or empty directory; a mirror copies other logs.",
            )
        check_new(files)
    except BaseException:
        files.close_all()
        raise
    return files


def add_directory(root: ReplicatedRoot, path: str, rack: str | None = None) -> int:
    """Add a new or empty directory to a log; return its id.

    It has no copies yet: new topics get some there, and `reassign` moves others to it.

    Raises:
        NotALogError: The directory holds other files, belongs to another log, or is inside another
            directory.
        IllegalStateError: It belongs to this log already.
    """
    path = real_path(path)
    controller = root.controller
    image = controller.current().image
    if path in paths_of(image.directories.values()):
        raise IllegalStateError("The directory belongs to the log already", path=path)
    files = _new_files(root, path, [path, *paths_of(image.directories.values())])
    try:
        check_format(files, replicated=True)
    finally:
        files.close_all()

    added: list[int] = []

    def step(txn: kv.Txn, image: MetadataImage) -> bool:
        if path in paths_of(image.directories.values()):  # another process was faster
            raise IllegalStateError("The directory belongs to the log already", path=path)
        directory_id = catalog.next_number(txn, "directory")
        while directory_id in image.directories:
            directory_id = catalog.next_number(txn, "directory")
        added[:] = [directory_id]
        info = DirectoryInfo(path, rack, False, JUST_ADDED, controller.next_epoch(image.epoch))
        DIRECTORIES.put(txn, directory_id, value=info)
        return True

    controller.change(step)
    bring_back(root, added[0])
    return added[0]


def bring_back(
    root: ReplicatedRoot, directory_id: int, failed: Mapping[int, Exception] | None = None
) -> bool:
    """Bring a directory online that is not: it gets all metadata, and every write from now on.

    With ``failed`` it takes the place of directories that do not work.

    Returns False if another process or thread has done so, or has removed it.

    Raises:
        StorageError, CorruptionError: It cannot be used yet.
        NotALogError: Another directory is at its path.
    """
    controller = root.controller
    info = controller.current().image.directories.get(directory_id)
    if info is None:
        return False  # it was just removed
    path = info.path
    if info.is_mount_point and not is_mount_point(path):
        # Otherwise everything would be copied to the disk that has the mount point.
        raise StorageError("No file system is mounted there", path=path, operation="open")
    files = root.files_at(path)
    directory = LogDirectory(directory_id, path, files)
    try:
        _prepare(root, directory)
        was_offline = _bring_online(root, directory, failed)
    finally:
        # Once it was online other threads use it, and whoever takes it offline detaches it.
        if not directory.opened_epoch:
            directory.close()
    if not was_offline:
        controller.refresh()
        return False
    controller.elect()  # partitions of which it has the only copy
    root.write_members()
    _sweep(directory)
    _remove_copies(root, directory)
    level = logging.INFO if info.reason == JUST_ADDED else logging.WARNING
    _logger.log(level, "Directory %s is online", path)
    return True


def _bring_online(
    root: ReplicatedRoot, directory: LogDirectory, failed: Mapping[int, Exception] | None
) -> bool:
    """As `Controller.bring_online`; again if another directory turns out to be broken."""
    controller = root.controller
    while True:
        try:
            return controller.bring_online(directory, failed)
        except DATABASE_ERRORS as error:
            broken = controller.directory_of(error)
            if failed or broken is None or broken.path == directory.path:
                raise
            # It is of one of its databases, without which nothing can be written.
            controller.take_offline({broken.id: error})


def _prepare(root: ReplicatedRoot, directory: LogDirectory) -> None:
    """Check a directory that no process uses, or make an empty one a directory of the log."""
    files = directory.files
    check_format(files, replicated=True)
    _is_new(root, directory)  # or raises, before anything is written
    for name in ("locks", "topics"):
        files.make_directory(name)
    directory.probe()
    if files.free_bytes() < _MIN_FREE_BYTES:
        # The next append would take it offline again, and each time elect other leaders.
        raise DiskFullError(
            "There is too little space left",
            path=directory.path,
            operation="open",
            todo="Free some space; the directory is tried again by itself.",
        )
    with directory.attachment.alone(root.lock_timeout):
        if _is_new(root, directory):  # Check again: under the lock nobody else makes a log there.
            infos = root.controller.image.directories
            paths = {each: info.path for each, info in infos.items()}
            write_member(files, DirectoryMember(root.cluster_id, directory.id, paths))
        try:
            directory.attachment.attach(root.lock_timeout, startup.check_databases)
        except CorruptionError as error:
            # Everything in it is in the others, too.
            _logger.warning("%s: its databases are replaced: %s", directory.path, error)
            startup.begin_databases_again(files)
            directory.attachment.share(root.lock_timeout)
    directory.open_stores(root.lock_timeout)
    _drop_caches(directory)


def _drop_caches(directory: LogDirectory) -> None:
    """Have what was not flushed be read from the disk from now on.

    The kernel takes a page for clean whose write has failed.  So its cache may have what the disk
    lacks, and no later flush would write it.
    """

    def unflushed(txn: kv.Txn) -> Iterator[str]:
        for topic in catalog.topics(txn):
            for partition in range(topic.partitions):
                key = topic.key(partition)
                flushed = (catalog.PARTITIONS.get(txn, key) or PartitionInfo()).recovery_offset
                for info in catalog.segments(txn, key):
                    if not info.sealed or (info.next_offset or 0) > flushed:
                        yield path_of(topic.directory, partition, info.file_name)

    files = directory.files
    for path in directory.state.read(lambda txn: list(unflushed(txn))):
        with startup.ignore_missing(), files.opened(path, write=True) as fd:
            files.sync(fd)
            files.drop_cache(fd)


def _is_new(root: ReplicatedRoot, directory: LogDirectory) -> bool:
    """Return whether nothing is in a directory, rather than what the log had there.

    Raises:
        NotALogError: It belongs to another log, or is one.
    """
    files = directory.files
    # First: another process may just be making it a directory of the log, in the other order.
    has_state = startup.has_state(files)
    member = read_member(files)
    if member is not None and member[:2] == (root.cluster_id, directory.id):
        return False
    if member is not None or has_state:
        raise NotALogError(
            f"This is not directory {directory.id} of the log: another log is there",
            path=directory.path,
            todo="Move it to another path.",
        )
    return True


def _sweep(directory: LogDirectory) -> list[str]:
    """Remove the files of what was deleted or replaced meanwhile; return what was removed."""
    files, removed = directory.files, list[str]()
    try:
        paths = startup.strays(files, directory.state)
        for path in unnamed_files.not_pending(files, directory.live, paths):
            startup.remove_stray(files, path)
            removed.append(f"{files.root}: removed {path}: the manifest does not name it")
    except (*DATABASE_ERRORS, ClosedError) as error:  # it is broken, or just went offline again
        _logger.warning("What killed processes left is not removed yet: %s", error)
    return removed


def _remove_copies(root: ReplicatedRoot, directory: LogDirectory) -> None:
    """Remove the copies that were moved to other directories while this one was offline."""
    with suppress(StorageError, ClosedError):
        for topic in directory.state.read(lambda txn: list(catalog.topics(txn))):
            for partition in range(topic.partitions):
                key = topic.key(partition)
                remove_copies(root.controller, key, topic.directory, [directory.id])


def try_bring_back(root: ReplicatedRoot, failures: Failures | None = None) -> list[int]:
    """Bring back the directories that work again; return their ids.

    ``failures`` notes those that are there, and cannot be used.
    """
    returned, failures = [], failures or Failures(_logger)
    for each, info in root.controller.current().image.directories.items():
        work = f"Return of directory {info.path}"
        if info.online or not is_directory(info.path):
            continue
        try:
            if bring_back(root, each):
                returned.append(each)
            failures.end(work)
        except (EmbedlogError, OSError) as error:
            failures.note(work, error)
            if isinstance(error, (NotALogError, ReplicasDivergedError)):
                with suppress(EmbedlogError):
                    _note_reason(root, each, describe(error))
    return returned


def _note_reason(root: ReplicatedRoot, directory_id: int, reason: str) -> None:
    """Note why a directory stays offline until a person decides."""

    def step(txn: kv.Txn, image: MetadataImage) -> bool:
        info = image.directories.get(directory_id)
        # One that was just added must not count for the majority.
        if info is None or info.online or info.reason == JUST_ADDED:
            return False
        # Numbers in it may grow each time.
        if info.reason.split(":")[0] == reason.split(":")[0]:
            return False
        DIRECTORIES.put(txn, directory_id, value=info._replace(reason=reason))
        return True

    root.controller.change(step)
