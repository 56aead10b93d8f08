"""Directories that come back, are added, or differ after a power cut."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from embedlog import catalog, kv
from embedlog.catalog import PartitionInfo
from embedlog.errors import (
    CorruptionError,
    DiskFullError,
    EmbedlogError,
    IllegalStateError,
    NotALogError,
    ReplicasDivergedError,
    StorageError,
)
from embedlog.failures import Failures
from embedlog.files import Files
from embedlog.files.paths import FORMAT_FILE, is_directory, is_mount_point, real_path
from embedlog.partition import unnamed_files
from embedlog.replication.controller import Controller
from embedlog.replication.copies import remove_copies
from embedlog.replication.directory import LogDirectory, describe
from embedlog.replication.member_file import (
    DirectoryMember,
    check_apart,
    is_member,
    read_member,
    write_member,
)
from embedlog.replication.metadata import (
    DIRECTORIES,
    DirectoryInfo,
    MetadataImage,
    paths_of,
)
from embedlog.root import startup
from embedlog.root.root import Root, check_format
from embedlog.segment import path_of

JUST_ADDED = "it was just added"
"""Why a directory is offline that was never online."""

_MIN_FREE_BYTES = 1 << 20
"""What a directory must have free to come back."""

_logger = logging.getLogger("embedlog.replication")


class BaseReplicatedRoot(Root):
    """A log over several directories, as far as its `ReplicatedRoot` does not open or close it."""

    controller: Controller
    cluster_id = ""
    to_add: Sequence[str] = ()
    """Directories that a process which was killed had begun to add."""

    def write_members(self) -> None:
        """Have each directory that is online know where all of them are."""
        paths = {each: info.path for each, info in self.controller.image.directories.items()}
        to_add = tuple(path for path in self.to_add if path not in paths.values())
        for directory in self.controller.online:
            with suppress(StorageError):
                member = DirectoryMember(self.cluster_id, directory.id, paths, to_add)
                write_member(directory.files, member)


def take_over(
    root: BaseReplicatedRoot, failures: Failures | None = None, *, only_used: bool = False
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


def add_directory(root: BaseReplicatedRoot, path: str, rack: str | None = None) -> int:
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
    root: BaseReplicatedRoot, directory_id: int, failed: Mapping[int, Exception] | None = None
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
    files = root.files(path, writable=True, unsafe_filesystem=root.unsafe_filesystem)
    directory = LogDirectory(directory_id, path, files)
    try:
        _prepare(root, directory)
        was_offline = controller.bring_online(directory, failed)
    finally:
        if controller.directories.get(directory_id) is not directory:
            directory.close()
    if not was_offline:
        controller.refresh()
        return False
    controller.elect()  # partitions of which it has the only copy
    root.write_members()
    _sweep(root, directory)
    level = logging.INFO if info.reason == JUST_ADDED else logging.WARNING
    _logger.log(level, "Directory %s is online", path)
    return True


def _prepare(root: BaseReplicatedRoot, directory: LogDirectory) -> None:
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
    with directory.locked_root(root.lock_timeout):
        if _is_new(root, directory):  # Check again: under the lock nobody else makes a log there.
            infos = root.controller.image.directories
            paths = {each: info.path for each, info in infos.items()}
            write_member(files, DirectoryMember(root.cluster_id, directory.id, paths))
        try:
            directory.attach(root.lock_timeout)
        except CorruptionError as error:
            # Everything in it is in the others, too.
            _logger.warning("%s: its databases are replaced: %s", directory.path, error)
            for name in ("state", "live"):
                kv.discard(files, name)
            directory.attach(root.lock_timeout)
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


def _is_new(root: BaseReplicatedRoot, directory: LogDirectory) -> bool:
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


def _sweep(root: BaseReplicatedRoot, directory: LogDirectory) -> None:
    """Remove the files of what was deleted, replaced or moved while the directory was offline."""
    with suppress(StorageError):
        pending = unnamed_files.pending_paths(directory.live)
        for path in startup.strays(directory.files, directory.state, pending):
            startup.remove_stray(directory.files, path)
        for topic in directory.state.read(lambda txn: list(catalog.topics(txn))):
            for partition in range(topic.partitions):
                key = topic.key(partition)
                remove_copies(root.controller, key, topic.directory, [directory.id])


def try_bring_back(root: BaseReplicatedRoot, failures: Failures | None = None) -> list[int]:
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


def _note_reason(root: BaseReplicatedRoot, directory_id: int, reason: str) -> None:
    """Note why a directory stays offline until a person decides."""

    def step(txn: kv.Txn, image: MetadataImage) -> bool:
        info = image.directories.get(directory_id)
        if info is None or info.online or info.reason == reason:
            return False
        DIRECTORIES.put(txn, directory_id, value=info._replace(reason=reason))
        return True

    root.controller.change(step)


def regain_quorum(root: BaseReplicatedRoot, failed: Mapping[int, Exception]) -> bool:
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
