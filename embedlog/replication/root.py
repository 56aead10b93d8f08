"""Attaching to a log over several directories.

Order: each directory is opened and checked as a root of its own; their metadata says which one
counts, and which others have the same; then they are one log.  A directory that is missing,
broken or behind is taken offline, and the housekeeping brings it back (`recovery`).
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from time import monotonic
from typing import Any

from embedlog import catalog, kv
from embedlog.catalog import NewPartitions, TopicInfo
from embedlog.errors import (
    DiskFullError,
    EmbedlogError,
    InvalidReplicationAssignmentError,
    LockTimeoutError,
    NotALogError,
    NotEnoughReplicasError,
    StorageError,
)
from embedlog.files import Files
from embedlog.files.paths import FORMAT_FILE, exists, is_directory, is_mount_point, is_there
from embedlog.keyspace import LIVE_VERSION
from embedlog.partition.state import Context
from embedlog.replication import recovery
from embedlog.replication.controller import Controller
from embedlog.replication.directory import DATABASE_ERRORS, LogDirectory
from embedlog.replication.files import ReplicatedFiles
from embedlog.replication.history import diverged, extra_writes, histories
from embedlog.replication.isr import PartitionAssignment
from embedlog.replication.member_file import (
    DirectoryMember,
    find_members,
    is_member,
    new_cluster_id,
    paths_to_add,
    read_listed,
    write_member,
)
from embedlog.replication.metadata import (
    ASSIGNMENTS,
    DIRECTORIES,
    METADATA_VERSION,
    DirectoryInfo,
    MetadataImage,
    MetadataVersion,
    check_quorum,
    put_epoch,
)
from embedlog.replication.partition import ReplicatedPartition
from embedlog.replication.placement import assign_replicas
from embedlog.replication.wake import ReplicatedWake
from embedlog.root import startup
from embedlog.root.root import Root, check_format

_logger = logging.getLogger("embedlog.replication")

REGAIN_SECONDS = 0.1
"""How often a process that has too few directories checks whether one came back."""
DEFAULT_REPLICATION_FACTOR = 3
"""A topic has this many copies, or as many as there are directories."""


class _FirstRoot(Root):
    """A log in one directory that is about to get more."""

    def _check_format(self, files: Files) -> None:
        check_format(files, replicated=True, must_exist=self.must_exist)


class ReplicatedRoot(recovery.BaseReplicatedRoot):
    """One handle on a log over several directories.

    Args:
        paths: The directories; those that the log has besides are opened, too.
        racks: The racks of directories, by path, as Kafka's `broker.rack`: one that differs from
            that in the metadata replaces it.
        given_up: Directories that will never come back; they are removed.
        options: As those of `Root`.
    """

    replicated = True

    def __init__(
        self,
        paths: Sequence[str],
        *,
        racks: Mapping[str, str | None] | None = None,
        given_up: Collection[int] = (),
        **options: Any,
    ) -> None:
        self.paths, self._racks = tuple(paths), dict(racks or {})
        self._given_up = frozenset(given_up)
        self._regaining, self._regain_at = threading.Lock(), 0.0
        super().__init__(self.paths[0], **options)

    def after_fork(self) -> None:
        """As `Root.after_fork`."""
        super().after_fork()
        self._regaining = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ReplicatedRoot, self.paths, **self.options()), ()

    # Topics and partitions

    def _new_partition(self, context: Context, info: TopicInfo, number: int) -> ReplicatedPartition:
        return ReplicatedPartition(context, info, number, self.controller)

    def _assign_replicas(
        self, replication_factor: int | None, replicas: Sequence[Sequence[int]] | None = None
    ) -> NewPartitions:
        def assign(txn: kv.Txn, topic: TopicInfo, first: int) -> None:
            image = MetadataImage.load(txn)
            if replicas is not None:
                _check_replicas(topic, replicas, image)
                put(txn, topic, dict(enumerate(replicas)), image)
                return
            factor = replication_factor
            if factor is None and first:
                # As the partitions that the topic has.
                before = ASSIGNMENTS.get(txn, topic.key(0))
                factor = None if before is None else len(before.target_replicas)
            if factor is None:
                # One that is offline gets its copy when it comes back.
                factor = min(DEFAULT_REPLICATION_FACTOR, len(image.directories))
            racks = {each: info.rack for each, info in image.directories.items()}
            offline = racks.keys() - set(image.online)
            assigned = assign_replicas(
                topic.partitions - first,
                factor,
                racks,
                first_partition=first,
                # Chance that is the same if the transaction runs again.
                rng=random.Random(topic.id),
                offline=offline,
            )
            put(txn, topic, assigned, image)

        def put(
            txn: kv.Txn,
            topic: TopicInfo,
            assigned: Mapping[int, Sequence[int]],
            image: MetadataImage,
        ) -> None:
            for partition, chosen in assigned.items():
                assignment = PartitionAssignment.create(chosen, image.online)
                ASSIGNMENTS.put(txn, topic.key(partition), value=assignment)
            put_epoch(txn, image.epoch + 1, image.controller_id)

        return assign

    def _unassign_replicas(self) -> Callable[[kv.Txn], None]:
        def unassign(txn: kv.Txn) -> None:
            # With the old image, others would continue to move copies, and to wait for them.
            image = MetadataImage.load(txn)
            put_epoch(txn, image.epoch + 1, image.controller_id)

        return unassign

    # Attaching

    def _attach(self) -> Context:
        with self._lock:
            attached = self._context is not None
            context = super()._attach()
            if not attached and self._is_new_live:
                self._is_new_live = False
                # Makes the copies equal again, past what had been flushed.
                recovery.take_over(self)
            return context

    def _open_files(self, writable: bool) -> Files:
        self._unopened = {}
        with ExitStack() as undo:
            opened = self._open_each(self.paths, writable)
            for files in opened.values():
                undo.callback(files.close_all)
            cluster, paths = find_members(self.paths, opened)
            if cluster != self.cluster_id and self.cluster_id:
                # After a fork; or else a new log would be begun here.
                raise NotALogError("None of the directories has the log any more", path=self.path)
            if cluster is None:
                listed = [path for files in opened.values() for path in read_listed(files)]
                self.paths = (*self.paths, *(path for path in listed if path not in self.paths))
                opened |= self._open_each([each for each in listed if each not in opened], writable)
                self._require_log(opened, writable)
                self._begin(self._first_path())
                undo.close()
                return self._open_files(writable)
            self.cluster_id = cluster
            more = [path for path in paths.values() if path not in opened]
            for path, files in self._open_each(more, writable).items():
                opened[path] = files
                undo.callback(files.close_all)
            _, paths = find_members([*self.paths, *opened], opened, cluster)
            self.to_add = paths_to_add(cluster, opened.values())
            directories = self._check_each(paths, opened, undo)
            if not directories:
                raise NotALogError("None of the directories can be opened", path=self.path)
            self._unprepared = paths.keys() - directories.keys()
            self.controller = Controller(
                directories, self._open_directory, self._regain_quorum, self._given_up
            )
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
                self._is_new_live = not self.controller.live.get(_LIVE_VERSION_KEY)
                self._update_directories(paths)
            undo.pop_all()
            for directory_id, directory in directories.items():
                if self.controller.directories.get(directory_id) is not directory:
                    directory.close()
            return ReplicatedFiles(self.controller)

    _unopened: dict[str, StorageError]
    """Directories that exist, and could not be opened when the log was."""
    _is_first = False
    """Whether no other process had the log open."""
    _is_new_live = False
    """Whether this process found `live` of an earlier boot, so that the copies may differ."""

    _unprepared: Collection[int] = frozenset()
    """Directories that failed in the startup.  It must not use one that works again a moment
    later: its databases were not checked, and may still be marked as closed."""

    def _open_each(self, paths: Iterable[str], writable: bool) -> dict[str, Files]:
        """Open the directories that are there."""
        opened = {}
        for path in paths:
            try:
                if path not in opened and is_there(path) and is_directory(path):
                    opened[path] = self.files(
                        path, writable=writable, unsafe_filesystem=self.unsafe_filesystem
                    )
            except StorageError as error:
                _logger.warning("Directory %s cannot be opened: %s", path, error)
                self._unopened[path] = error
        return opened

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

    def _first_path(self) -> str:
        """Return the directory that is a log already; by default the first one."""
        logs = [path for path in self.paths if exists(f"{path}/{FORMAT_FILE}")]
        return (logs or self.paths)[0]

    def _begin(self, path: str) -> None:
        """Make a log in one directory the first of several."""
        _FirstRoot(path, **self.options()).close()  # creates it, and finishes what was left
        files = self.files(path, writable=True, unsafe_filesystem=self.unsafe_filesystem)
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
            # Otherwise the next open would take the new rows for damage.
            startup.remove_clean_mark(files)
            rack = self._racks.get(path)
            with closing(
                kv.LmdbStore(files, "state", durable=True, timeout=self.lock_timeout)
            ) as state:
                state.write(partial(_put_first_directory, path, rack))
            # Last: without it this is a log in one directory, whose other rows do no harm.
            to_add = tuple(each for each in self.paths if each != path)
            write_member(files, DirectoryMember(new_cluster_id(), 1, {1: path}, to_add))
        finally:
            files.close_all()

    def _check_each(
        self, paths: dict[int, str], opened: dict[str, Files], undo: ExitStack
    ) -> dict[int, LogDirectory]:
        """Check the directories, as the first process to attach does, and open their databases."""
        directories: dict[int, LogDirectory] = {}
        reports = []
        with ExitStack() as locks:
            for directory_id, path in sorted(paths.items()):
                if path not in opened:
                    continue
                directory = LogDirectory(directory_id, path, opened[path])
                undo.callback(directory.close)
                try:
                    report = self._attach_to(directory, locks)
                except (*DATABASE_ERRORS, NotALogError) as error:
                    _give_up(directory, error)
                else:
                    directories[directory_id] = directory
                    reports.append(report)
            # So many processes may attach at once, and one of them is the first one.
            self._is_first = bool(reports) and reports[0] is not None
            for directory, report in zip(directories.values(), reports, strict=True):
                self.startup_report += [
                    f"{directory.path}: {line}" for line in (report or ([],))[0]
                ]
            if self._is_first and any(report and report[1] for report in reports):
                self._sweep([directory.files for directory in directories.values()])
        images = {
            each: directory.state.read(MetadataImage.load)
            for each, directory in directories.items()
        }
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
        left = [each for each in images if images[each].epoch and each not in self._given_up]
        if not left:
            return
        ends = {each: histories(directories[each])[0].end for each in left}
        newest = max(left, key=lambda each: (images[each].epoch, ends[each]))
        named = [each for each in left if directories[each].path == self.paths[0]]
        base = directories[named[0] if named and self.mode == "r" else newest]
        for each, other in list(directories.items()):
            if not (extra_writes(other, base) and extra_writes(base, other)):
                continue
            with suppress(NotEnoughReplicasError):
                check_quorum(images[each], images[each].online)
                error = diverged(base, other)
                if self.mode == "rw" and each not in self._given_up:
                    raise error
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
        if not is_member(files, self.cluster_id, directory.id):
            raise NotALogError(
                f"This is not directory {directory.id} of the log", path=directory.path
            )
        report = None
        if files.writable:
            for name in ("locks", "topics"):
                files.make_directory(name)
            locks.enter_context(directory.locked_root(self.lock_timeout))
            report = directory.attach(self.lock_timeout)
        else:
            directory.share(self.lock_timeout)
        live = files.writable or startup.live_is_valid(files)
        directory.open_stores(self.lock_timeout, live=live)
        return report

    def _sweep(self, roots: Sequence[Files]) -> None:
        """Remove what killed processes left; a directory that fails is found to be broken later."""
        try:
            self.startup_report += startup.sweep_all(roots)
        except DATABASE_ERRORS as error:
            _logger.warning("What killed processes left is not removed yet: %s", error)

    def _regain_quorum(self, failed: Mapping[int, Exception]) -> bool:
        """Check whether a directory came back, for a process that has too few of them."""
        # One thread at a time, and not while it is bringing one back.
        if not self._regaining.acquire(blocking=False):
            return False
        try:
            now = monotonic()
            if now < self._regain_at:
                return False
            self._regain_at = now + REGAIN_SECONDS
            return recovery.regain_quorum(self, failed)
        finally:
            self._regaining.release()

    def _open_directory(self, directory_id: int, path: str) -> LogDirectory:
        """Open a directory that another process has brought online."""
        files = self.files(
            path, writable=self.mode == "rw", unsafe_filesystem=self.unsafe_filesystem
        )
        try:
            if directory_id in self._unprepared:
                raise StorageError(
                    "The directory could not be used when the log was opened",
                    path=path,
                    operation="open",
                )
            if not is_member(files, self.cluster_id, directory_id):
                raise StorageError(
                    f"This is not directory {directory_id} of the log",
                    path=path,
                    operation="open",
                )
            directory = LogDirectory(directory_id, path, files)
            directory.share(self.lock_timeout)
            directory.open_stores(self.lock_timeout)
        except BaseException:
            files.close_all()
            raise
        return directory

    def _update_directories(self, paths: Mapping[int, str]) -> None:
        """Note where the directories are now, and the racks that were passed."""

        def changes(image: MetadataImage) -> dict[int, DirectoryInfo]:
            found = {}
            for each, info in image.directories.items():
                path = paths.get(each, info.path)
                changed = info._replace(path=path, rack=self._racks.get(path, info.rack))
                if changed != info:
                    found[each] = changed
            return found

        def step(txn: kv.Txn, image: MetadataImage) -> bool:
            for each, info in changes(image).items():
                DIRECTORIES.put(txn, each, value=info)
            return bool(changes(image))

        if changes(self.controller.image):
            self.controller.change(step)
        self.write_members()

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
                    recovery.add_directory(self, path, self._racks.get(path))
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
                locks.enter_context(directory.locked_root(self.lock_timeout))
            # Each is asked: that frees its lock.
            are_last = [directory.is_last() for directory in online]
            if all(are_last):
                with suppress(DiskFullError):
                    startup.remove_uncommitted_files(context.files, context.state)
                    for directory in online:
                        startup.copy_state(directory.files, directory.state)
                    context.state.close()
                    for directory in online:
                        startup.mark_clean(directory.files)


_LIVE_VERSION_KEY = LIVE_VERSION.key()


def _check_replicas(
    topic: TopicInfo, replicas: Sequence[Sequence[int]], image: MetadataImage
) -> None:
    """Raise unless these are replicas for all partitions of a topic.

    Raises:
        InvalidReplicationAssignmentError: They are not.
    """
    unknown = {each for chosen in replicas for each in chosen} - image.directories.keys()
    if unknown or len(replicas) != topic.partitions:
        raise InvalidReplicationAssignmentError(
            f"The log has no directory {min(unknown)}"
            if unknown
            else f"There are replicas for {len(replicas)} of {topic.partitions} partitions",
            topic=topic.name,
        )


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
