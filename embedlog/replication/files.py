"""The files of a log over several directories: what is written to a partition goes to its ISR.

A file below `topics` belongs to a partition.  It is read from the partition's leader, and
every change is made in all in-sync replicas, in the leader's last, so a reader sees nothing
that a follower lacks.  The copies are equal byte for byte.

A lock is taken in every directory that is online, in the order of their ids.  Two processes
exclude each other as long as they know one common directory that is online, and both look at
the epoch once they have the lock.  All other files are the controller's.

An operation that a directory refuses, because its disk is broken, takes it offline
(`Controller.take_offline`), and is repeated with those that are left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from operator import methodcaller
from time import monotonic
from typing import Any, TypeVar

from embedlog import catalog, kv
from embedlog.catalog import SegmentInfo
from embedlog.errors import (
    EmbedlogError,
    LockTimeoutError,
    LogDeletedError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.files import Files
from embedlog.keyspace import PARTITION_KEY
from embedlog.partition import journal
from embedlog.replication.controller import Controller, offline_error
from embedlog.replication.copies import remove_copies
from embedlog.replication.directory import LogDirectory
from embedlog.segment import CHUNK_BYTES

T = TypeVar("T")
_list = list  # `Files.list` hides it in the class

Copies = list[tuple[LogDirectory, int]]
"""Directories, and the descriptors of a file in them."""

_FIRST_HANDLE = 1 << 32
"""Descriptors of the system are smaller."""


class _Handle:
    """A file that is open in several directories."""

    __slots__ = (
        *("copies", "epoch", "first_epoch", "kept", "key"),
        *("leader_checked", "path", "seconds", "write"),
    )

    def __init__(self, path: str, key: bytes | None, write: bool, epoch: int) -> None:
        self.path, self.key, self.write, self.kept = path, key, write, False
        self.first_epoch = epoch
        """The epoch in which it was opened."""
        self.epoch = -1
        """The epoch in which `copies` was looked up."""
        self.leader_checked = False
        """Whether the leader, which may be a new one, was found to have what comes before."""
        self.seconds: dict[int, float] = {}
        """How long the last write took in each directory but the leader's."""
        self.copies: Copies = []
        """The directories and their descriptors; the one that is read comes first."""

    @property
    def directory_ids(self) -> list[int]:
        """Where it is open."""
        return [directory.id for directory, _ in self.copies]


class ReplicatedFiles(Files):
    """The files of all directories; has the methods of `Files`.

    Args:
        controller: Says which directories are online, and who leads which partition.
    """

    maps_segments = False
    """To touch a map of a file on a broken disk is a SIGBUS."""

    def __init__(self, controller: Controller) -> None:
        # Not that of `Files`: it opens a directory.
        self._controller = controller
        self._handles: dict[int, _Handle] = {}
        self._next = _FIRST_HANDLE
        self._handles_lock = threading.Lock()
        self._root_fd = -1
        self._paths, self._in_use = {}, set()

    def __del__(self) -> None:
        """Leave closing to the directories."""

    @property
    def root(self) -> str:  # type: ignore[override]
        """The controller's directory."""
        return self._controller.directory.path

    @property
    def writable(self) -> bool:  # type: ignore[override]
        """Whether anything may be changed."""
        return self._controller.directory.files.writable

    # Where a file is

    def _directories(self, path: str, key: bytes | None) -> _list[LogDirectory]:
        """Return the directories that have a file; the one that is read comes first."""
        controller = self._controller.current()
        first = controller.directory
        if path.startswith(("locks/", "topics", "quarantine")) and key is None:
            return [first, *(each for each in controller.online if each is not first)]
        if key is None:
            return [first]
        assignment = controller.assignment(key)
        if assignment is None:  # of a deleted topic
            return [first, *(each for each in controller.online if each is not first)]
        leader = assignment.leader
        found = [] if leader is None else controller.opened([leader, *assignment.in_sync_followers])
        if not found or found[0].id != leader:
            if leader in controller.unopened:
                with suppress(NotEnoughReplicasError):
                    controller.refresh()
                if leader not in controller.unopened:
                    return self._directories(path, key)
            topic = path.split("/")[1].rpartition("-")[0]
            where = {"topic": topic, "partition": PARTITION_KEY.unpack(key)[1]}
            raise offline_error(controller.image, assignment, where)
        return found

    def read_elsewhere(self, key: bytes) -> bool:
        """Read a partition from its next in-sync copy, without telling others; False if none."""
        found = self._controller.read_elsewhere(key)
        for handle in list(self._handles.values()) if found else ():
            handle.epoch = -1
        return found

    def _repeat(self, operation: Callable[[], T]) -> T:
        """Repeat an operation without the directories that turn out to be broken."""
        while True:
            try:
                return operation()
            except BrokenDirectoryError as broken:
                self._controller.take_offline({broken.directory.id: broken.error})
            except StorageError as error:
                directory = self._lost_copy(error) if error.missing else None
                if directory is not None:
                    self._controller.take_offline({directory.id: error})
                elif not (error.missing and self._is_elsewhere(error)):
                    raise

    def _is_elsewhere(self, error: StorageError) -> bool:
        """Whether a file is missing in a directory from which its copy was moved meanwhile."""
        for directory in self._controller.online:
            path = (error.path or "").removeprefix(f"{directory.path}/")
            key = partition_of(f"{path}/")
            if key is not None and path != error.path:
                assignment = self._controller.assignment(key)
                return assignment is not None and directory.id not in assignment.replicas
        return False

    def _lost_copy(self, error: StorageError) -> LogDirectory | None:
        """Return the directory of which someone deleted a segment file that others in sync have.

        Another process may have unlinked it as well, but then the manifest does not name it.
        """
        controller = self._controller
        for directory in controller.online:
            path = (error.path or "").removeprefix(f"{directory.path}/")
            name = path.split("/", 3)[3] if path.count("/") > 2 else None
            key = partition_of(f"{path}/" if name is None else path)
            assignment = None if path == error.path or key is None else controller.assignment(key)
            if key is None or assignment is None or directory.id not in assignment.isr:
                continue
            segments = controller.state.read(partial(_segments, key))
            names = [info.file_name for info in segments if name in (None, info.file_name)]
            folder = path if name is None else path.rpartition("/")[0]
            others = [each for each in controller.online if each.id in assignment.isr]
            for other in others:
                if other is not directory and any(
                    _has(other, f"{folder}/{each}") for each in names
                ):
                    return directory
        return None

    def _in_all(
        self, path: str, operation: Callable[[Files], T], *, some_may_lack_it: bool = False
    ) -> T:
        """Do something with a path in every directory that has it, in the leader's last."""
        key, epoch = partition_of(path), self._controller.current().epoch

        def once() -> T:
            results: list[T] = []
            missing: StorageError | None = None
            for directory in reversed(self._directories(path, key)):
                try:
                    results.append(_attempt(directory, operation))
                except StorageError as error:
                    if not some_may_lack_it or not error.missing:
                        raise
                    missing = error
            if not results and missing is not None:
                if key is not None and self._controller.epoch != epoch:
                    raise _new_leader(path) from missing
                raise missing
            return results[-1]

        return self._repeat(once)

    def _in_first(self, path: str, operation: Callable[[Files], T]) -> T:
        """Do something with a path where it is read."""
        key = partition_of(path)
        return self._repeat(lambda: _attempt(self._directories(path, key)[0], operation))

    # Files

    def open(
        self,
        path: str,
        *,
        write: bool = False,
        create: bool = False,
        exclusive: bool = False,
        counted: bool = False,
    ) -> int:
        """As `Files.open`; the descriptor is one of this object only."""
        handle = _Handle(path, partition_of(path), write, self._controller.current().epoch)
        if create and handle.key is not None:
            self._check_exists(handle.key)

        def open_in(files: Files) -> int:
            return files.open(
                path, write=write, create=create, exclusive=exclusive, counted=counted
            )

        def once() -> None:
            handle.epoch = self._controller.current().epoch
            directories = self._directories(path, handle.key)
            try:
                for directory in directories if write or create else directories[:1]:
                    fd = self._open_in(directory, open_in, path, create)
                    handle.copies.append((directory, fd))
                if create:
                    self._remove_if_moved(handle, handle.directory_ids)
            except BaseException:
                self._close_copies(handle)
                raise

        if path.startswith("locks/"):
            self._repeat(lambda: self._open_lock(handle, create))
        elif write and not create and handle.key is not None:
            self._repeat(lambda: self._open_copies(handle))
        else:
            self._repeat(once)
        with self._handles_lock:
            number, self._next = self._next, self._next + 1
            self._handles[number] = handle
        return number

    def _open_in(
        self, directory: LogDirectory, open_file: Callable[[Files], int], path: str, create: bool
    ) -> int:
        """Open a file in one directory."""
        try:
            return _attempt(directory, open_file)
        except StorageError as error:
            if not (create and error.missing):
                raise
            # It became the leader since the directories above the file were made.
            _attempt(directory, partial(make_parents, path=path))
            return _attempt(directory, open_file)

    def _open_copies(self, handle: _Handle) -> None:
        """Open the copies of a file that exists at the leader; a follower may lack it."""
        epoch = self._controller.current().epoch
        if handle.write and handle.key is not None:
            self._check_exists(handle.key)
        lacks_one = handle.write and bool(self._controller.unopened)
        directories = self._directories(handle.path, handle.key)
        leader = directories[0]
        may_have_failed_over = bool(handle.copies) or epoch != handle.first_epoch

        def open_copy(directory: LogDirectory) -> int:
            open_file = partial(_open_file, path=handle.path, write=handle.write, create=False)
            try:
                fd = _attempt(directory, open_file)
            except StorageError as error:
                if not error.missing or not handle.write:
                    raise
                if directory is not leader:
                    fd = self._create_copy(directory, handle, error)
                elif may_have_failed_over and self._lost_copy(error) is None:
                    # It was elected in this operation, though it was not in sync.
                    raise _new_leader(handle.path) from error
                else:
                    raise
            if handle.kept:
                directory.files.keep(fd)
            return fd

        _reopen(handle, directories if handle.write else directories[:1], open_copy)
        if handle.write:
            self._remove_if_moved(handle, handle.directory_ids)
        handle.epoch, handle.leader_checked = -1 if lacks_one else epoch, False

    def _create_copy(self, directory: LogDirectory, handle: _Handle, error: StorageError) -> int:
        """Create a file that a follower lacks; raise ``error`` if it was just deleted everywhere.

        Who deletes a file first removes its name from the manifest, then the file in the followers.
        A file that is created after that would stay for ever.

        Raises:
            UnknownTopicOrPartitionError: The topic was deleted.
        """
        _attempt(directory, partial(make_parents, path=handle.path))
        fd = _attempt(directory, partial(_open_file, path=handle.path, write=True, create=True))
        key = handle.key
        assert key is not None
        named = self._controller.state.read(lambda txn: journal.file_names(txn, key))
        if handle.path.rpartition("/")[2] in named:
            return fd
        _close_each([(directory, fd)])
        _attempt(directory, methodcaller("unlink", handle.path, True))
        self._remove_if_moved(handle, [directory.id])
        raise error

    def _remove_if_moved(self, handle: _Handle, directories: Iterable[int]) -> None:
        """Remove the file where the partition has no copy any more: it was just created there.

        Raises:
            UnknownTopicOrPartitionError: The topic was deleted.
        """
        if handle.key is not None:
            topic = "/".join(handle.path.split("/")[:2])
            remove_copies(self._controller, handle.key, topic, directories)
            self._check_exists(handle.key)

    def _check_exists(self, key: bytes) -> None:
        """Raise if the topic of a partition was deleted: a file of it would stay for ever."""
        if self._controller.assignment(key) is None:
            raise UnknownTopicOrPartitionError(
                "The topic was just deleted", partition=PARTITION_KEY.unpack(key)[1]
            )

    def _copies(self, fd: int) -> Copies:
        """Return the open copies of a file as of the present epoch."""
        handle = self._handles[fd]
        controller = self._controller
        if controller.moved():
            controller.refresh()
        if handle.epoch != controller.epoch:
            try:
                self._open_copies(handle)
            except StorageError as error:
                if (
                    handle.write
                    or not error.missing
                    or handle.copies[0][0] not in controller.online
                ):
                    raise
                # It was unlinked since: its reader finishes with what it has open.
                handle.epoch = controller.epoch
        return handle.copies

    def _all_copies(self, fd: int) -> Copies:
        """Return the open copies of a file, without leaving one in sync out.

        Raises:
            NotEnoughReplicasError: This process cannot open one, nor take it offline.
        """
        while True:
            copies = self._copies(fd)
            if self._handles[fd].epoch == self._controller.epoch:
                return copies
            self._controller.refresh()

    def write(self, fd: int, buffers: Sequence[Any], position: int) -> int:
        """As `Files.write`, to the followers first."""

        def once() -> int:
            copies = self._all_copies(fd)
            leader, leader_fd = copies[0]
            if not self._handles[fd].leader_checked:
                self._check_leader(self._handles[fd], position)
            seconds = self._handles[fd].seconds = {}
            for directory, copy in reversed(copies[1:]):
                began = monotonic()
                self._catch_up(copies[0], (directory, copy), position)
                _attempt(directory, methodcaller("write", copy, buffers, position))
                seconds[directory.id] = monotonic() - began
            return _attempt(leader, lambda files: files.write(leader_fd, buffers, position))

        return self._repeat(once)

    def slow_followers(self, fd: int, seconds: float) -> _list[int]:
        """Return the directories in which the last write took longer, the leader's left out."""
        return [each for each, taken in self._handles[fd].seconds.items() if taken > seconds]

    def _check_leader(self, handle: _Handle, position: int) -> None:
        """Raise if the leader lacks bytes before a position: it was elected in this operation."""
        directory, fd = handle.copies[0]
        if _attempt(directory, methodcaller("size", fd)) < position:
            raise _new_leader(handle.path)
        handle.leader_checked = True

    def _catch_up(
        self, leader: tuple[LogDirectory, int], follower: tuple[LogDirectory, int], position: int
    ) -> bool:
        """Make a follower's file equal to the leader's up to a position, and end there.

        Returns whether it was not.
        """
        directory, fd = follower
        size = _attempt(directory, lambda files: files.size(fd))
        if size > position:
            _attempt(directory, lambda files: files.truncate(fd, position))
        elif size < position:
            copy_range(leader, follower, size, position)
        return size != position

    def complete(self, fd: int, position: int) -> None:
        """As `Files.complete`: also of a copy that joined the ISR since the file was written.

        Raises:
            NotLeaderOrFollowerError: Another leader was elected, and lacks something of it.
        """

        def once() -> None:
            copies = self._all_copies(fd)
            self._check_leader(self._handles[fd], position)
            for directory, copy in reversed(copies[1:]):
                if self._catch_up(copies[0], (directory, copy), position):
                    _attempt(directory, methodcaller("sync", copy))
                    parent = self._handles[fd].path.rpartition("/")[0]
                    _attempt(directory, methodcaller("sync_directory", parent))

        self._repeat(once)

    def _first(self, fd: int, operation: Callable[[Files, int], T]) -> T:
        """Do something with the copy that is read."""

        def once() -> T:
            directory, copy = self._copies(fd)[0]
            return _attempt(directory, lambda files: operation(files, copy))

        return self._repeat(once)

    def _each(self, fd: int, operation: Callable[[Files, int], object]) -> None:
        """Do something with every copy, with the leader's last."""

        def once() -> None:
            for directory, copy in reversed(self._all_copies(fd)):
                _attempt(directory, partial(_of_copy, operation, copy))

        self._repeat(once)

    def read(self, fd: int, length: int, position: int) -> bytes:
        """As `Files.read`."""
        return self._first(fd, lambda files, copy: files.read(copy, length, position))

    def read_into(self, fd: int, memory: Any, position: int) -> int:
        """As `Files.read_into`."""
        return self._first(fd, lambda files, copy: files.read_into(copy, memory, position))

    def map(self, fd: int, length: int, *, write: bool = False) -> Any:
        """As `Files.map`."""
        return self._first(fd, lambda files, copy: files.map(copy, length, write=write))

    def size(self, fd: int) -> int:
        """As `Files.size`."""
        return self._first(fd, lambda files, copy: files.size(copy))

    def longest(self, fd: int) -> int:
        """As `Files.longest`: a killed writer may have written to followers only."""

        def once() -> int:
            sizes: _list[int] = [
                _attempt(directory, methodcaller("size", copy))
                for directory, copy in self._all_copies(fd)
            ]
            return max(sizes)

        return self._repeat(once)

    def check_linked(self, fd: int) -> None:
        """As `Files.check_linked`."""
        self._first(fd, lambda files, copy: files.check_linked(copy))

    def truncate(self, fd: int, size: int) -> None:
        """Cut the copies to `size` bytes; a shorter copy stays as it is."""
        self._each(fd, lambda files, copy: _cut(files, copy, size))

    def allocate(self, fd: int, size: int) -> None:
        """As `Files.allocate`."""
        self._each(fd, lambda files, copy: files.allocate(copy, size))

    def sync(self, fd: int) -> None:
        """As `Files.sync`."""
        self._each(fd, lambda files, copy: files.sync(copy))

    def drop_cache(self, fd: int) -> None:
        """As `Files.drop_cache`."""
        self._each(fd, lambda files, copy: files.drop_cache(copy))

    def close(self, fd: int) -> None:
        """As `Files.close`."""
        handle = self._handles.pop(fd, None)
        if handle is not None:
            self._close_copies(handle)

    def _close_copies(self, handle: _Handle) -> None:
        copies, handle.copies = handle.copies, []
        _close_each(copies)

    def keep(self, fd: int) -> None:
        """As `Files.keep`."""
        handle = self._handles[fd]
        handle.kept = True
        for directory, copy in handle.copies:
            directory.files.keep(copy)

    # Names

    def make_directory(self, path: str, exist_ok: bool = True) -> None:
        """As `Files.make_directory`."""

        def make(files: Files) -> None:
            make_parents(files, path)
            files.make_directory(path, exist_ok)

        self._in_all(path, make)

    def share(self, group: int, mode: str) -> None:
        """As `Files.share`, in every directory that is online."""
        self._in_all("topics", lambda files: files.share(group, mode))

    def remove_directory(self, path: str) -> None:
        """As `Files.remove_directory`."""
        self._in_all(path, lambda files: files.remove_directory(path), some_may_lack_it=True)

    def list(self, path: str) -> _list[str]:
        """As `Files.list`; of the directory of a topic, what any directory has."""
        if not path.startswith("topics") or self._leader_of(path) is not None:
            return self._in_first(path, lambda files: files.list(path))
        names: set[str] = set()

        def collect(files: Files) -> None:
            names.update(files.list(path))

        self._in_all(path, collect, some_may_lack_it=True)
        return sorted(names)

    def _leader_of(self, path: str) -> int | None:
        key = partition_of(path)
        assignment = None if key is None else self._controller.assignment(key)
        return None if assignment is None else assignment.leader

    def exists(self, path: str) -> bool:
        """As `Files.exists`."""
        return self._in_first(path, lambda files: files.exists(path))

    def rename(self, old: str, new: str) -> None:
        """As `Files.rename`."""
        self._in_all(old, lambda files: files.rename(old, new), some_may_lack_it=True)

    def unlink(self, path: str, missing_ok: bool = False) -> None:
        """As `Files.unlink`; in followers the file may be missing."""
        self._in_all(path, lambda files: files.unlink(path, missing_ok), some_may_lack_it=True)

    def sync_directory(self, path: str) -> None:
        """As `Files.sync_directory`."""
        self._in_all(path, lambda files: files.sync_directory(path), some_may_lack_it=True)

    # Locks

    def lock(self, fd: int, timeout: float, shared: bool = False) -> bool:
        """As `Files.lock`, in every directory that is online."""

        def once() -> bool:
            waited, held = False, []
            copies = self._lock_copies(fd)
            try:
                for directory, copy in copies:
                    waited |= _attempt(directory, methodcaller("lock", copy, timeout, shared))
                    held.append((directory, copy))
            except BaseException:
                for directory, copy in held:
                    directory.files.unlock(copy)
                raise
            return waited

        while True:
            waited = self._repeat(once)
            handle = self._handles[fd]
            if handle.epoch == self._controller.current().epoch:
                return waited
            # The directories changed before the lock was taken.
            self.unlock(fd)

    def _lock_copies(self, fd: int) -> Copies:
        handle = self._handles[fd]
        if handle.epoch != self._controller.current().epoch:
            self._open_lock(handle)
        return handle.copies

    def _open_lock(self, handle: _Handle, create: bool = True) -> None:
        """Open a lock file in every directory that is online now, in the order of their ids.

        Where it is missing, it is created; without ``create`` it must exist in one of them.
        """
        epoch, online = self._controller.current().epoch, self._controller.online
        if not create and not handle.copies:
            self._in_all(handle.path, partial(_check_exists, handle.path), some_may_lack_it=True)

        def open_copy(directory: LogDirectory) -> int:
            write = directory.files.writable
            return _attempt(
                directory, partial(_open_file, path=handle.path, write=write, create=write)
            )

        _reopen(handle, online, open_copy)
        handle.epoch = epoch

    def try_lock(self, fd: int, shared: bool = False) -> bool:
        """As `Files.try_lock`: free in every directory that is online."""

        def once() -> bool:
            held: Copies = []
            try:
                for directory, copy in self._lock_copies(fd):
                    if not _attempt(directory, methodcaller("try_lock", copy, shared)):
                        return False
                    held.append((directory, copy))
                held = []
                return True
            finally:
                for directory, copy in held:
                    directory.files.unlock(copy)

        return self._repeat(once)

    def unlock(self, fd: int) -> None:
        """As `Files.unlock`; a broken disk still frees its locks."""
        for directory, copy in self._handles[fd].copies:
            with suppress(StorageError):
                directory.files.unlock(copy)

    # The root and its file system

    def path(self, relative: str) -> str:
        """As `Files.path`: where the file is read."""
        key = partition_of(f"{relative}/") or partition_of(relative)
        return self._directories(relative, key)[0].files.path(relative)

    def directories_of(self, relative: str) -> tuple[str, ...]:
        """As `Files.directories_of`: those with in-sync replicas."""
        return tuple(each.path for each in self._directories(relative, partition_of(relative)))

    def identity(self) -> tuple[int, int]:
        """As `Files.identity`, of the controller's directory."""
        return self._controller.directory.files.identity()

    def is_in_place(self) -> bool:
        """As `Files.is_in_place`, of any directory that is online."""
        return any(each.files.is_in_place() for each in self._controller.current().online)

    def boot_id(self) -> str:
        """As `Files.boot_id`."""
        return self._controller.directory.files.boot_id()

    def free_bytes(self) -> int:
        """As `Files.free_bytes`, of the fullest directory that is online."""
        return self._repeat(lambda: min(self._from_online(Files.free_bytes)))

    def total_bytes(self) -> int:
        """As `Files.total_bytes`, of the smallest directory that is online."""
        return self._repeat(lambda: min(self._from_online(Files.total_bytes)))

    def _from_online(self, operation: Callable[[Files], T]) -> _list[T]:
        return [_attempt(each, operation) for each in self._controller.current().online]

    def filesystem(self) -> str:
        """As `Files.filesystem`, of the controller's directory."""
        return self._controller.directory.files.filesystem()

    # Closing

    def close_all(self) -> None:
        """Close every directory."""
        self._controller.close()


class BrokenDirectoryError(Exception):
    """A directory refused an operation because its disk is broken."""

    def __init__(self, directory: LogDirectory, error: Exception) -> None:
        super().__init__(directory, error)
        self.directory, self.error = directory, error


def _reopen(
    handle: _Handle,
    directories: Sequence[LogDirectory],
    open_copy: Callable[[LogDirectory], int],
) -> None:
    """Have a file open in these directories, and in no others.

    What is open already stays, unless it was deleted: a copy that was moved away may have come
    back, as another file.  If ``open_copy`` raises, nothing is closed.
    """
    opened, copies = dict(handle.copies), []
    for directory in directories:
        fd = opened.get(directory)
        if fd is None or not _is_linked(directory, fd):
            copies.append((directory, open_copy(directory)))
            _close_each([] if fd is None else [(directory, fd)])
        else:
            copies.append((directory, fd))
        opened.pop(directory, None)
        handle.copies = [*copies, *opened.items()]
    _close_each(opened.items())
    handle.copies = copies


def _is_linked(directory: LogDirectory, fd: int) -> bool:
    """Whether an open file still has a name."""
    try:
        directory.files.check_linked(fd)
    except LogDeletedError:
        return False
    except StorageError:
        pass  # the next operation finds that, too
    return True


def _cut(files: Files, fd: int, size: int) -> None:
    """Cut a file to so many bytes, if it has more."""
    if files.size(fd) > size:
        files.truncate(fd, size)


def _close_each(copies: Iterable[tuple[LogDirectory, int]]) -> None:
    for directory, fd in copies:
        with suppress(EmbedlogError):
            directory.files.close(fd)


def _of_copy(operation: Callable[[Files, int], T], copy: int, files: Files) -> T:
    return operation(files, copy)


def _new_leader(path: str) -> NotLeaderOrFollowerError:
    return NotLeaderOrFollowerError(
        "Another directory became the leader, and lacks what the one before had",
        path=path,
        todo="Repeat the call.",
    )


def _open_file(files: Files, path: str, write: bool, create: bool) -> int:
    return files.open(path, write=write, create=create)


def _segments(key: bytes, txn: kv.Txn) -> list[SegmentInfo]:
    return catalog.segments(txn, key)


def _has(directory: LogDirectory, path: str) -> bool:
    """Whether a directory has a file that is not empty."""
    with suppress(StorageError), directory.files.opened(path) as fd:
        return directory.files.size(fd) > 0
    return False


def _check_exists(path: str, files: Files) -> None:
    files.close(files.open(path))


def _attempt(directory: LogDirectory, operation: Callable[[Files], T]) -> T:
    """Do something in one directory.

    Raises:
        BrokenDirectoryError: Its disk is broken.
        StorageError: Another error, which is the caller's.
    """
    try:
        return operation(directory.files)
    except LockTimeoutError:
        raise
    except StorageError as error:
        if directory.is_broken_by(error):
            raise BrokenDirectoryError(directory, error) from error
        raise


def copy_range(
    source: tuple[LogDirectory, int],
    target: tuple[LogDirectory, int],
    start: int,
    stop: int,
    guard: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> int:
    """Copy bytes of a file from one directory to another; return how many.

    Args:
        source: The directory that is read, and the file's descriptor there.
        target: The directory that is written, and the file's descriptor there.
        start: The first byte.
        stop: Where to end.
        guard: Makes what is held around each write, between the read of the bytes and the next.

    Raises:
        StorageError: The source ends before ``stop``.
    """
    position = start
    while position < stop:
        length = min(CHUNK_BYTES, stop - position)
        chunk = _attempt(source[0], methodcaller("read", source[1], length, position))
        if not chunk:
            raise StorageError(
                "The file of the leader ends too early", path=source[0].path, operation="copy"
            )
        with guard():
            _attempt(target[0], methodcaller("write", target[1], [chunk], position))
        position += len(chunk)
    return position - start


def partition_of(path: str) -> bytes | None:
    """Return the key of the partition that a path belongs to; None for all other files.

    >>> partition_of("topics/flights-7/2/00000000000000000000-00000001.arrows")
    b'\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x07\\x00\\x00\\x00\\x02'
    >>> partition_of("topics/flights-7")
    """
    parts = path.split("/", 3)
    if len(parts) < 3 or parts[0] != "topics":
        return None
    topic_id = parts[1].rpartition("-")[2]
    if not topic_id.isdecimal() or not parts[2].isdecimal():
        return None
    return PARTITION_KEY.pack(int(topic_id), int(parts[2]))


def make_parents(files: Files, path: str) -> None:
    """Make the directories above a path."""
    parts = path.split("/")[:-1]
    for count in range(1, len(parts) + 1):
        files.make_directory("/".join(parts[:count]))
