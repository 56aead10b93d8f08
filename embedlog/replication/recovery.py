"""Directories that come back, are added, or differ after a power cut."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from embedlog import catalog, kv
from embedlog.errors import (
    EmbedlogError,
    IllegalStateError,
    NotALogError,
    NotLeaderOrFollowerError,
    ReplicaNotAvailableError,
    StorageError,
)
from embedlog.files import Files
from embedlog.keyspace import FORMAT_FILE
from embedlog.replication.catch_up import ReplicaCopy, Throttle
from embedlog.replication.directory import (
    DATABASE_ERRORS,
    LogDirectory,
    describe,
)
from embedlog.replication.epochs import truncation_point
from embedlog.replication.files import BrokenDirectoryError
from embedlog.replication.members import Member, read_member, write_member
from embedlog.replication.metadata import (
    DIRECTORIES,
    METADATA_VERSION,
    DirectoryInfo,
    MetadataImage,
)
from embedlog.replication.partition import ReplicatedPartition
from embedlog.root import startup
from embedlog.root.root import check_format

if TYPE_CHECKING:
    from embedlog.replication.root import ReplicatedRoot

_logger = logging.getLogger("embedlog.replication")


class History(NamedTuple):
    """What a directory knew of a partition before it came back."""

    epochs: list[tuple[int, int]]
    recovery_offset: int
    """What is below was flushed."""


def add_directory(root: ReplicatedRoot, path: str, rack: str | None = None) -> int:
    """Add a new or empty directory to a log; return its id.

    It has no copies yet: new topics get some there, and `reassign` moves others to it.

    Raises:
        NotALogError: The directory holds other files, or belongs to another log.
        IllegalStateError: It belongs to this log already.
    """
    path = os.path.realpath(path)
    controller = root.controller
    if path in {info.path for info in controller.current().image.directories.values()}:
        raise IllegalStateError("The directory belongs to the log already", path=path)
    Files.create_root(path)
    files = root.files(path, writable=True, unsafe_filesystem=root.unsafe_filesystem)
    try:
        if files.exists(FORMAT_FILE):
            raise NotALogError(
                "The directory is a log of its own",
                path=path,
                todo="Name a new or empty directory; `embedlog mirror` copies other logs.",
            )
        check_format(files, replicated=True)
    finally:
        files.close_all()

    added: list[int] = []

    def step(txn: kv.Txn, image: MetadataImage) -> bool:
        directory_id = catalog.next_number(txn, "directory")
        while directory_id in image.directories:
            directory_id = catalog.next_number(txn, "directory")
        added[:] = [directory_id]
        info = DirectoryInfo(path, rack, False, "it was just added", image.epoch + 1)
        DIRECTORIES.put(txn, directory_id, value=info)
        return True

    controller.change(step)
    bring_back(root, added[0])
    return added[0]


def bring_back(
    root: ReplicatedRoot, directory_id: int, failed: Mapping[int, Exception] | None = None
) -> dict[bytes, int]:
    """Bring a directory online that is not: it gets all metadata, and every write from now on.

    With ``failed`` it takes the place of directories that do not work.

    Returns the offsets, by the key of the partition, below which its segments are those of the
    leader; `ReplicaCopy` makes the rest equal.

    Raises:
        StorageError, CorruptionError: It cannot be used yet.
        NotALogError: Another directory is at its path.
    """
    controller = root.controller
    path = controller.current().image.directories[directory_id].path
    files = root.files(path, writable=True, unsafe_filesystem=root.unsafe_filesystem)
    directory = LogDirectory(directory_id, path, files)
    try:
        _prepare(root, directory)
        histories = directory.state.read(_histories)
        directory.probe()
        lost = _is_older(root, directory, failed or {})
        controller.bring_online(directory, lost=lost, failed=failed)
    except BaseException:
        if controller.directories.get(directory_id) is not directory:
            directory.close()
        raise
    controller.elect()  # partitions of which it has the only copy
    root.write_members()
    _sweep(directory)
    _logger.warning("Directory %s is online again", path)
    return _trusted_offsets(root, histories)


def _prepare(root: ReplicatedRoot, directory: LogDirectory) -> None:
    """Check a directory that no process uses, or make an empty one a directory of the log."""
    files, controller = directory.files, root.controller
    check_format(files, replicated=True)
    paths = {each: info.path for each, info in controller.image.directories.items()}
    member = read_member(files)
    if member is None:
        write_member(files, Member(root.cluster_id, directory.id, paths))
    elif (member.cluster_id, member.directory_id) != (root.cluster_id, directory.id):
        raise NotALogError(f"This is not directory {directory.id} of the log", path=directory.path)
    for name in ("locks", "topics"):
        files.make_directory(name)
    lock = files.open("locks/root", write=True, create=True)
    files.lock(lock, root.lock_timeout)
    try:
        directory.attached = files.open("locks/attached", write=True, create=True)
        if files.try_lock(directory.attached):
            kv.close_unused()
            try:
                startup.prepare(files)
            except DATABASE_ERRORS as error:
                # Everything in it is in the others, too.
                _logger.warning("%s: its databases are replaced: %s", directory.path, error)
                for name in ("state", "live"):
                    kv.discard(files, name)
                startup.prepare(files)
        directory.share_attached(root.lock_timeout)
    finally:
        files.unlock(lock)
        files.close(lock)
    directory.open_stores(root.lock_timeout)


def _is_older(
    root: ReplicatedRoot, directory: LogDirectory, failed: Mapping[int, Exception]
) -> bool:
    """Whether a directory lacks what it had when it went offline: it is new, or an old copy."""
    own = METADATA_VERSION.get(directory.state)
    info = root.controller.image.directories[directory.id]
    last = info.version
    if info.online:
        # It counts as online since too few others are left to change that.
        for other in root.controller.online:
            if other.id not in failed and (version := METADATA_VERSION.get(other.state)):
                last = max(last, version.version)
    return own is None or own.version < last - 1


def _histories(txn: kv.Txn) -> dict[bytes, History]:
    """Return what a directory knows of all partitions."""
    histories = {}
    for topic in catalog.topics(txn):
        for partition in range(topic.partitions):
            key = topic.key(partition)
            info = catalog.PARTITIONS.get(txn, key)
            if info is not None:
                histories[key] = History(catalog.epochs(txn, key), info.recovery_offset)
    return histories


def _trusted_offsets(root: ReplicatedRoot, histories: dict[bytes, History]) -> dict[bytes, int]:
    """Return up to where the histories are those of the leaders, and were flushed."""

    def read(txn: kv.Txn) -> dict[bytes, int]:
        offsets = {}
        for key, history in histories.items():
            info = catalog.PARTITIONS.get(txn, key)
            if info is not None:
                # Both ends are at least where the flushed part of the directory's log ends.
                end = history.recovery_offset
                point = truncation_point(history.epochs, end, catalog.epochs(txn, key), end)
                offsets[key] = min(point, end)
        return offsets

    return root.controller.state.read(read)


def _sweep(directory: LogDirectory) -> None:
    """Remove what the directory has of topics that were deleted meanwhile."""
    with suppress(StorageError):
        for path in startup.strays(directory.files, directory.state):
            if path.count("/") == 1:
                startup.remove_stray(directory.files, path)


def compare_copies(log: ReplicatedPartition) -> None:
    """Make the in-sync copies equal, past what had been flushed, after a power cut."""
    log.tail()
    info = log.context.state.read(lambda txn: catalog.PARTITIONS.get(txn, log.key))
    trusted = 0 if info is None else info.recovery_offset
    for each in log.assignment.in_sync_followers:
        directory = log.controller.directories.get(each)
        if directory is not None:
            copy_partition(log, directory, trusted_offset=trusted)


def copy_partition(
    log: ReplicatedPartition,
    directory: LogDirectory,
    *,
    trusted_offset: int = 0,
    throttle: Throttle | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> bool:
    """Make one copy equal to the leader's, and have it join the ISR; False if it was stopped.

    If its directory, or that of the leader, turns out to be broken, it goes offline.
    """
    copy = ReplicaCopy(
        log, directory, trusted_offset=trusted_offset, throttle=throttle, stopped=stopped
    )
    try:
        if not copy.catch_up():
            return False
        copy.join()
    except BrokenDirectoryError as broken:
        log.controller.take_offline({broken.directory.id: broken.error})
        return False
    except (NotLeaderOrFollowerError, ReplicaNotAvailableError):
        return False  # its leader broke meanwhile
    except StorageError as error:
        found = log.controller.find_broken(error)
        if found is None:
            raise
        log.controller.take_offline({found.id: error})
        return False
    return True


def try_bring_back(root: ReplicatedRoot) -> dict[int, dict[bytes, int]]:
    """Bring back the directories that work again; return what `bring_back` returns, by id."""
    results = {}
    for each, info in root.controller.current().image.directories.items():
        if info.online or not os.path.isdir(info.path):
            continue
        try:
            results[each] = bring_back(root, each)
        except (EmbedlogError, OSError) as error:
            _logger.debug("Directory %s stays offline: %s", info.path, describe(error))
    return results


def regain_quorum(root: ReplicatedRoot, failed: Mapping[int, Exception]) -> bool:
    """Bring a directory back while too few others work; return whether one came back.

    Also one that still counts as online, if another disk is at its path now.
    """
    controller = root.controller
    for each, info in controller.image.directories.items():
        opened = controller.directories.get(each)
        if info.online and (each not in failed or opened is None or opened.is_in_place()):
            continue
        if not os.path.isdir(info.path):
            continue
        try:
            bring_back(root, each, failed)
        except (EmbedlogError, OSError) as error:
            _logger.debug("Directory %s stays offline: %s", info.path, describe(error))
        else:
            return True
    return False


def replicate(
    root: ReplicatedRoot,
    trusted: dict[int, dict[bytes, int]] | None = None,
    *,
    throttle: Throttle | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Have all replicas that are online and not in sync catch up; return how many did."""
    joined = 0
    for log in root.partition_logs(root.topics().values()):
        assert isinstance(log, ReplicatedPartition)
        try:
            assignment = log.assignment
        except ReplicaNotAvailableError:
            continue
        for each in assignment.replicas:
            directory = log.controller.directories.get(each)
            if each in assignment.isr or directory is None or stopped():
                continue
            offsets = (trusted or {}).get(each, {})
            joined += copy_partition(
                log,
                directory,
                trusted_offset=offsets.get(log.key, 0),
                throttle=throttle,
                stopped=stopped,
            )
    return joined
