"""Directories that come back, are added, or differ after a power cut."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

from embedlog import catalog, kv
from embedlog.catalog import TopicInfo
from embedlog.errors import (
    CorruptionError,
    DiskFullError,
    EmbedlogError,
    IllegalStateError,
    NotALogError,
    NotLeaderOrFollowerError,
    ReplicaNotAvailableError,
    ReplicasDivergedError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.failures import Failures
from embedlog.files import Files
from embedlog.files.paths import FORMAT_FILE, is_directory, is_mount_point, real_path
from embedlog.files.throttle import Throttle
from embedlog.partition import PartitionLog, pending_deletes
from embedlog.partition.state import Context
from embedlog.replication.catch_up import History, ReplicaCopy
from embedlog.replication.controller import Controller
from embedlog.replication.copies import lock_copy, remove_copies
from embedlog.replication.directory import LogDirectory, describe
from embedlog.replication.files import BrokenDirectoryError
from embedlog.replication.member_file import (
    DirectoryMember,
    check_apart,
    is_member,
    read_member,
    write_member,
)
from embedlog.replication.metadata import (
    ASSIGNMENTS,
    DIRECTORIES,
    DirectoryInfo,
    MetadataImage,
    paths_of,
)
from embedlog.replication.partition import ReplicatedPartition
from embedlog.root import startup
from embedlog.root.root import check_format

T = TypeVar("T")
JUST_ADDED = "it was just added"
"""Why a directory is offline that was never online."""

Copy = tuple[bytes, int]
"""The copy of a partition: its key, and the directory."""

_MIN_FREE_BYTES = 1 << 20
"""What a directory must have free to come back."""

_logger = logging.getLogger("embedlog.replication")


class HasDirectories(Protocol):
    """What is needed of a `ReplicatedRoot`."""

    controller: Controller
    cluster_id: str
    files: Callable[..., Files]
    lock_timeout: float
    unsafe_filesystem: bool

    @property
    def context(self) -> Context:
        """As `Root.context`."""

    def topics(self) -> Mapping[str, TopicInfo]:
        """As `Root.topics`."""

    def topic(self, name: str) -> TopicInfo:
        """As `Root.topic`."""

    def partition(self, topic: str, number: int) -> PartitionLog:
        """As `Root.partition`."""

    def partition_logs(self, topics: Iterable[TopicInfo]) -> Iterator[PartitionLog]:
        """As `Root.partition_logs`."""

    def write_members(self) -> None:
        """As `ReplicatedRoot.write_members`."""


def add_directory(root: HasDirectories, path: str, rack: str | None = None) -> int:
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
    check_apart([path, *paths_of(image.directories.values())])
    Files.create_root(path)
    files = root.files(path, writable=True, unsafe_filesystem=root.unsafe_filesystem)
    try:
        member = read_member(files)
        if member is not None and member.cluster_id == root.cluster_id:
            raise NotALogError(
                "The directory was removed from the log, and has what it had then",
                path=path,
                todo=f"The log is in {', '.join(paths_of(image.directories.values()))}; delete the "
                "files of the directory to add it again.",
            )
        if files.exists(FORMAT_FILE):
            raise NotALogError(
                "The directory is a log of its own",
                path=path,
                todo="Name a new or empty directory; a mirror copies other logs.",
            )
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
        info = DirectoryInfo(path, rack, False, JUST_ADDED, image.epoch + 1)
        DIRECTORIES.put(txn, directory_id, value=info)
        return True

    controller.change(step)
    bring_back(root, added[0])
    return added[0]


def bring_back(
    root: HasDirectories, directory_id: int, failed: Mapping[int, Exception] | None = None
) -> dict[bytes, History]:
    """Bring a directory online that is not: it gets all metadata, and every write from now on.

    With ``failed`` it takes the place of directories that do not work.

    Returns what it knew of its copies, by the key of the partition; `ReplicaCopy` compares that
    with the leader's log.

    Raises:
        StorageError, CorruptionError: It cannot be used yet.
        NotALogError: Another directory is at its path.
    """
    controller = root.controller
    info = controller.current().image.directories.get(directory_id)
    if info is None:
        return {}  # it was just removed
    path = info.path
    if info.is_mount_point and not is_mount_point(path):
        # Otherwise everything would be copied to the disk that has the mount point.
        raise StorageError("No file system is mounted there", path=path, operation="open")
    files = root.files(path, writable=True, unsafe_filesystem=root.unsafe_filesystem)
    directory = LogDirectory(directory_id, path, files)
    try:
        _prepare(root, directory)
        histories = directory.state.read(partial(_histories, directory_id))
        was_offline = controller.bring_online(directory, failed)
        if not was_offline:
            directory.close()
            controller.refresh()
            return {}
    except BaseException:
        if controller.directories.get(directory_id) is not directory:
            directory.close()
        raise
    controller.elect()  # partitions of which it has the only copy
    root.write_members()
    _sweep(root, directory)
    level = logging.INFO if info.reason == JUST_ADDED else logging.WARNING
    _logger.log(level, "Directory %s is online", path)
    return histories


def _prepare(root: HasDirectories, directory: LogDirectory) -> None:
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
    lock = files.open("locks/root", write=True, create=True)
    files.lock(lock, root.lock_timeout)
    try:
        if _is_new(root, directory):  # Check again: under the lock nobody else makes a log there.
            infos = root.controller.image.directories
            paths = {each: info.path for each, info in infos.items()}
            write_member(files, DirectoryMember(root.cluster_id, directory.id, paths))
        directory.attached = files.open("locks/attached", write=True, create=True)
        if files.try_lock(directory.attached):
            kv.close_unused()
            try:
                startup.check_databases(files)
            except CorruptionError as error:
                # Everything in it is in the others, too.
                _logger.warning("%s: its databases are replaced: %s", directory.path, error)
                for name in ("state", "live"):
                    kv.discard(files, name)
                startup.check_databases(files)
        directory.share_attached(root.lock_timeout)
    finally:
        files.unlock(lock)
        files.close(lock)
    directory.open_stores(root.lock_timeout)


def _is_new(root: HasDirectories, directory: LogDirectory) -> bool:
    """Return whether nothing is in a directory, rather than what the log had there.

    Raises:
        NotALogError: It belongs to another log, or is one.
    """
    files = directory.files
    if is_member(files, root.cluster_id, directory.id):
        return False
    if read_member(files) is not None or startup.has_state(files):
        raise NotALogError(
            f"This is not directory {directory.id} of the log: another log is there",
            path=directory.path,
            todo="Move it to another path.",
        )
    return True


def _histories(directory_id: int, txn: kv.Txn) -> dict[bytes, History]:
    """Return what a directory knows of the partitions of which its copy was in sync.

    Of the others it may know more than its files have: when it comes online, it gets the rows
    of other directories at once, and the records later.
    """
    histories = {}
    for topic in catalog.topics(txn):
        for partition in range(topic.partitions):
            key = topic.key(partition)
            info, assignment = catalog.PARTITIONS.get(txn, key), ASSIGNMENTS.get(txn, key)
            if info and assignment and directory_id in assignment.isr:
                histories[key] = History(catalog.epochs(txn, key), info.recovery_offset)
    return histories


def _sweep(root: HasDirectories, directory: LogDirectory) -> None:
    """Remove the files of what was deleted, replaced or moved while the directory was offline."""
    with suppress(StorageError):
        pending = pending_deletes.paths(directory.live)
        for path in startup.strays(directory.files, directory.state, pending):
            startup.remove_stray(directory.files, path)
        for topic in directory.state.read(lambda txn: list(catalog.topics(txn))):
            for partition in range(topic.partitions):
                key = topic.key(partition)
                remove_copies(root.controller, key, topic.directory, [directory.id])


def copy_partition(
    log: ReplicatedPartition,
    directory: LogDirectory,
    *,
    history: History | None = None,
    throttle: Throttle | None = None,
    stopped: Callable[[], bool] = lambda: False,
    progress: Callable[[int], object] = bool,
) -> bool:
    """Make one copy equal to the leader's, and have it join the ISR.

    Returns False if it was stopped, if another process makes this copy, or if another leader was
    elected.  If the directory, or that of the leader, turns out to be broken, it goes offline.

    Raises:
        CorruptionError: The leader's copy is damaged.
    """

    def make() -> bool:
        with lock_copy(directory, log.key) as free:
            # Another process may have finished it before the lock was taken; what is in sync
            # already must not be cut without the partition's lock.
            assignment = log.assignment
            if (
                not free
                or directory.id in assignment.isr
                or directory.id not in assignment.replicas
            ):
                return False
            copy = ReplicaCopy(
                *(log, directory), throttle=throttle, stopped=stopped, progress=progress
            )
            if not copy.catch_up(history):
                return False
            copy.join()
            return True

    joined = _guarded(log, make) or False
    # A process that moved the copy away meanwhile could not remove it: this one held the lock.
    with suppress(EmbedlogError):
        remove_copies(log.controller, log.key, log.directory, [directory.id])
    return joined


def _guarded(log: ReplicatedPartition, step: Callable[[], T]) -> T | None:
    """Run a step; if a directory turns out to be broken, take it offline and return None."""
    epoch = log.controller.epoch
    try:
        return step()
    except BrokenDirectoryError as broken:
        log.controller.take_offline({broken.directory.id: broken.error})
        return None
    except (NotLeaderOrFollowerError, ReplicaNotAvailableError, UnknownTopicOrPartitionError):
        return None  # it changed meanwhile
    except StorageError as error:
        found = log.controller.find_broken(error)
        if found is not None:
            log.controller.take_offline({found.id: error})
        elif log.controller.current().epoch == epoch:
            raise  # no other process has taken the directory offline meanwhile, either
        return None


def try_bring_back(
    root: HasDirectories, failures: Failures | None = None
) -> dict[int, dict[bytes, History]]:
    """Bring back the directories that work again; return what `bring_back` returns, by id.

    ``failures`` notes those that are there, and cannot be used.
    """
    results, failures = {}, failures or Failures(_logger)
    for each, info in root.controller.current().image.directories.items():
        work = f"Return of directory {info.path}"
        if info.online or not is_directory(info.path):
            continue
        try:
            results[each] = bring_back(root, each)
            failures.end(work)
        except (EmbedlogError, OSError) as error:
            failures.note(work, error)
            if isinstance(error, (NotALogError, ReplicasDivergedError)):
                with suppress(EmbedlogError):
                    _note_reason(root, each, describe(error))
    return results


def _note_reason(root: HasDirectories, directory_id: int, reason: str) -> None:
    """Note why a directory stays offline until a person decides."""

    def step(txn: kv.Txn, image: MetadataImage) -> bool:
        info = image.directories.get(directory_id)
        if info is None or info.online or info.reason == reason:
            return False
        DIRECTORIES.put(txn, directory_id, value=info._replace(reason=reason))
        return True

    info = root.controller.current().image.directories.get(directory_id)
    if info is not None and info.reason != reason:
        root.controller.change(step)


def regain_quorum(root: HasDirectories, failed: Mapping[int, Exception]) -> bool:
    """Bring a directory back while too few others work; return whether one came back.

    Also one that still counts as online, if another disk is at its path now.
    """
    controller = root.controller
    for each, info in controller.image.directories.items():
        opened = controller.directories.get(each)
        if info.online and (each not in failed or opened is None or opened.is_in_place()):
            continue
        if not is_directory(info.path):
            continue
        try:
            bring_back(root, each, failed)
        except (EmbedlogError, OSError) as error:
            _logger.debug("Directory %s stays offline: %s", info.path, describe(error))
        else:
            return True
    return False


def replicate(
    root: HasDirectories,
    histories: Mapping[int, MutableMapping[bytes, History]] | None = None,
    *,
    throttle: Throttle | None = None,
    stopped: Callable[[], bool] = lambda: False,
    with_new: bool = True,
    damaged: MutableMapping[Copy, CorruptionError] | None = None,
    failures: Failures | None = None,
) -> int:
    """Have all replicas that are online and not in sync catch up; return how many did.

    Args:
        root: The log.
        histories: By directory, what `bring_back` returned.  What is said of copies that are in
            sync is removed: they may lose something later.
        throttle: Limits the copying.
        stopped: Whether to end early.
        with_new: Also make the new copies of reassignments.
        damaged: Gets the errors of copies that cannot be made; those that it has are left out.
        failures: Notes the copies that fail for another reason, such as a lock of a stopped
            process; they do not stop the others.

    Raises:
        EmbedlogError: Without ``failures``: the first error of these copies.
        CorruptionError: Without ``damaged``: a leader's copy is damaged.  The copies of other
            partitions were made all the same.
    """
    joined, errors = 0, {} if damaged is None else damaged
    noted = failures or Failures(_logger)
    with noted.collecting(raises=failures is None) as part:
        for log in root.partition_logs(root.topics().values()):
            assert isinstance(log, ReplicatedPartition)
            try:
                assignment = log.assignment
            except ReplicaNotAvailableError:
                continue
            for each in assignment.replicas:
                known = (histories or {}).get(each, {})
                if each in assignment.isr:
                    known.pop(log.key, None)
                    continue
                directory = log.controller.directories.get(each)
                is_left_out = each in assignment.given_up_replicas or (
                    each in assignment.adding_replicas and not with_new
                )
                if directory is None or is_left_out or (log.key, each) in errors or stopped():
                    continue
                with part(f"Copying {log.topic}-{log.partition} to directory {each}"):
                    try:
                        if copy_partition(
                            *(log, directory),
                            history=known.get(log.key),
                            throttle=throttle,
                            stopped=stopped,
                        ):
                            joined += 1
                            known.pop(log.key, None)
                    except CorruptionError as error:
                        errors[log.key, each] = error
    if damaged is None and errors:
        raise next(iter(errors.values()))
    return joined
