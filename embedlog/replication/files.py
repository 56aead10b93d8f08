"""The files of a log over several directories: what is written to a partition goes to its ISR.

A file below `topics` belongs to a partition.  It is read from the partition's leader, and
every change is made in all in-sync replicas, in the leader's last, so a reader sees nothing
that a follower lacks.  The copies are equal byte for byte.

A lock is taken in every directory that is online, in the order of their ids.  Two processes
exclude each other as long as they know one common directory that is online, and both look at
the epoch once they have the lock.  All other files are the controller's.

An operation that a directory refuses, because its disk is broken, takes it offline
(`Controller.take_offline`), and is repeated with those that are left.

An open file keeps the directories of the epoch in which it was last used.  The ISR of a
partition grows only under its lock, so it is enough to look for a new epoch where a lock is
taken, and where something is published.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from time import monotonic
from typing import Any, Final, TypeVar, cast

from embedlog import catalog
from embedlog.errors import (
    EmbedlogError,
    LogDeletedError,
    NotEnoughReplicasError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.files import Files, WakePage
from embedlog.keyspace import PARTITION_KEY
from embedlog.partition import journal
from embedlog.replication.controller import Controller, offline_error
from embedlog.replication.directory import LogDirectory
from embedlog.replication.metadata import MetadataImage
from embedlog.root import startup
from embedlog.segment import CHUNK_BYTES

F = TypeVar("F", bound=Callable[..., Any])
_list = list  # `Files.list` hides it in the class

Copies = list[tuple[LogDirectory, int]]
"""Directories, and the descriptors of a file in them."""

_FIRST_HANDLE = 1 << 32
"""Descriptors of the system are smaller."""
_EVERYWHERE = "locks/", "topics", "quarantine"


class _Handle:
    """A file that is open in several directories."""

    __slots__ = "copies", "how", "image", "kept", "key", "path", "seconds"

    def __init__(self, path: str, **how: bool) -> None:
        self.path, self.key, self.how, self.kept = path, partition_of(path), how, False
        self.image: MetadataImage | None = None
        """The metadata by which `copies` was looked up."""
        self.seconds: dict[int, float] = {}
        """How long the last write took in each directory but the leader's."""
        self.copies: Copies = []
        """The directories and their descriptors; the one that is read comes first."""


def _repeated(operation: F) -> F:
    """Return an operation that is repeated without the directories that turn out to be broken."""

    @wraps(operation)
    def repeat(self: ReplicatedFiles, *arguments: Any, **options: Any) -> Any:
        while True:
            try:
                return operation(self, *arguments, **options)
            except StorageError as error:
                if not self.may_repeat(error):
                    raise

    return cast("F", repeat)


def _at_leader(name: str) -> Any:
    """Return the operation of `Files` on an open file, in the copy that is read."""

    # Not `_repeated`, since each append asks for the size.
    def operation(self: ReplicatedFiles, fd: int, *arguments: Any, **options: Any) -> Any:
        while True:
            try:
                directory, copy = self.copies(fd)[0]
                return getattr(directory.files, name)(copy, *arguments, **options)
            except StorageError as error:
                if not self.may_repeat(error):
                    raise

    return operation


def _in_each_copy(operate: Callable[..., object]) -> Any:
    """Return an operation on an open file, in all copies, in the leader's last."""

    @_repeated
    def operation(self: ReplicatedFiles, fd: int, *arguments: Any) -> None:
        for directory, copy in reversed(self.all_copies(fd)):
            operate(directory.files, copy, *arguments)

    return operation


def _where_read(name: str) -> Any:
    """Return the operation of `Files` on a path, where it is read."""

    @_repeated
    def operation(self: ReplicatedFiles, path: str) -> Any:
        return getattr(self.directories(path)[0].files, name)(path)

    return operation


def _in_all(operate: Callable[..., Any], *, may_be_missing: bool = True) -> Any:
    """Return an operation on a path, in all directories that have it, in the leader's last.

    It returns what ``operate`` does in the last one, or raises if the path is missing in all.
    """

    @_repeated
    def operation(self: ReplicatedFiles, path: str, *arguments: Any, **options: Any) -> Any:
        results, missing = [], None
        for directory in reversed(self.directories(path)):
            try:
                results.append(operate(directory.files, path, *arguments, **options))
            except StorageError as error:
                if not (may_be_missing and error.missing) or directory.is_broken_by(error):
                    raise
                missing = error
        if missing is not None and not results:
            raise missing
        return results[-1]

    return operation


def _of_controller(name: str) -> Any:
    """Return an operation on the root that is one on the controller's directory."""
    return lambda self: getattr(self._controller.directory.files, name)()


def _least(name: str) -> Any:
    """Return an operation on the root that is the least of those on all directories."""

    @_repeated
    def operation(self: ReplicatedFiles) -> Any:
        return min(getattr(each.files, name)() for each in self._controller.current().online)

    return operation


def _make_directory(files: Files, path: str, exist_ok: bool = True) -> None:
    make_parents(files, path)
    files.make_directory(path, exist_ok)


def _truncate(files: Files, fd: int, size: int) -> None:
    """Truncate a file to so many bytes, if it has more."""
    if files.size(fd) > size:
        files.truncate(fd, size)


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

    def directories(self, path: str) -> _list[LogDirectory]:
        """Return the directories that have a file; the one that is read comes first.

        Raises:
            ReplicaNotAvailableError: It belongs to a partition without a leader.
        """
        controller, key = self._controller.current(), partition_of(path)
        assignment = None if key is None else controller.assignment(key)
        if key is None or assignment is None:  # no partition has it, or a deleted one
            first = controller.directory
            if key is None and not path.startswith(_EVERYWHERE):
                return [first]
            return [first, *(each for each in controller.online if each is not first)]
        leader = assignment.leader
        if leader in controller.unopened:
            with suppress(NotEnoughReplicasError):
                controller.refresh()
        found = [] if leader is None else controller.opened([leader, *assignment.in_sync_followers])
        if not found or found[0].id != leader:
            topic = path.split("/")[1].rpartition("-")[0]
            where = {"topic": topic, "partition": PARTITION_KEY.unpack(key)[1]}
            raise offline_error(controller.image, assignment, where)
        return found

    def may_repeat(self, error: StorageError) -> bool:
        """Take the directory offline that an error says is broken; return whether one is.

        Also true if the file was moved to other directories meanwhile.  In both cases the
        operation must be repeated; else its caller raises the error, since a frame that raises its
        argument is part of a cycle, which keeps the files of all callers open.
        """
        controller = self._controller
        if controller.offline_if_broken(error):
            return True
        directory = controller.directory_of(error) if error.missing else None
        if directory is None:
            return False
        key = partition_of((error.path or "")[len(directory.files.root) + 1 :])
        assignment = None if key is None else controller.assignment(key)
        return assignment is not None and directory.id not in assignment.replicas

    # Opening

    def open(
        self,
        path: str,
        *,
        write: bool = False,
        create: bool = False,
        exclusive: bool = False,
        counted: bool = False,
    ) -> int:
        """As `Files.open`; the descriptor is one of this object only.

        Raises:
            UnknownTopicOrPartitionError: To write, the topic was just deleted.
        """
        handle = _Handle(path, write=write, create=create, exclusive=exclusive, counted=counted)
        while True:
            try:
                self._open_copies(handle)
                break
            except BaseException as error:
                _close_each(handle.copies)
                handle.copies = []
                if not isinstance(error, StorageError) or not self.may_repeat(error):
                    raise
        if handle.key is not None:
            # From now on it exists.
            handle.how = {**handle.how, "create": False, "exclusive": False}
        with self._handles_lock:
            number, self._next = self._next, self._next + 1
            self._handles[number] = handle
        return number

    def copies(self, fd: int) -> Copies:
        """Return the open copies of a file as of the present epoch; the one that is read first."""
        handle = self._handles[fd]
        if handle.image is not self._controller.image:
            try:
                self._open_copies(handle)
            except StorageError as error:
                is_open = handle.copies and handle.copies[0][0] in self._controller.online
                if handle.how["write"] and error.missing and self._is_named(handle):
                    # The leader's directory is just being deleted.
                    what = "A file was deleted while it was open"
                    raise LogDeletedError(what, path=error.path) from error
                if handle.how["write"] or not error.missing or not is_open:
                    raise
                # It was unlinked since: its reader finishes with what it has open.
                handle.image = self._controller.image
        return handle.copies

    def all_copies(self, fd: int) -> Copies:
        """As `copies`, to write.

        Raises:
            NotEnoughReplicasError: This process cannot open one, nor take it offline.
        """
        if self._controller.unopened:
            self._open_all()
        return self.copies(fd)

    def _open_all(self) -> None:
        while self._controller.unopened:
            self._controller.refresh()

    def _open_copies(self, handle: _Handle) -> None:
        """Have a file open where it is now, and nowhere else.

        What is open already stays, unless it was deleted: a copy that was moved away may have
        come back, as another file.
        """
        controller, is_lock = self._controller.current(), handle.path.startswith("locks/")
        changes = handle.how["write"] or handle.how["create"]
        if handle.how["create"]:
            self._open_all()
        if changes and handle.key is not None:
            self._check_exists(handle.key)
        image = controller.image
        directories = controller.online if is_lock else self.directories(handle.path)
        if is_lock and not (handle.how["create"] or handle.copies):
            self._find(handle.path)  # it must exist somewhere
        opened, copies = dict(handle.copies), Copies()
        for directory in directories if changes or is_lock else directories[:1]:
            fd = opened.get(directory)
            if fd is None or not _is_linked(directory, fd):
                handle.copies = [*copies, *opened.items()]  # if it cannot be opened
                unlinked = [] if fd is None else [(directory, fd)]
                fd = self._open_copy(handle, directory, is_leader=directory is directories[0])
                if handle.kept:
                    directory.files.keep(fd)
                _close_each(unlinked)
            opened.pop(directory, None)
            copies.append((directory, fd))
        _close_each(opened.items())
        handle.copies, handle.image = copies, image
        if changes:
            self._remove_if_moved(handle, [directory.id for directory, _ in copies])

    _find = _in_all(lambda files, path: files.close(files.open(path)))

    def _open_copy(self, handle: _Handle, directory: LogDirectory, *, is_leader: bool) -> int:
        """Open a file in one directory; a follower may lack it."""
        files, how = directory.files, handle.how
        if handle.path.startswith("locks/"):
            return files.open(handle.path, write=files.writable, create=files.writable)
        try:
            return files.open(handle.path, **how)
        except StorageError as error:
            if not error.missing or not (how["create"] or (how["write"] and not is_leader)):
                raise
            make_parents(files, handle.path)
            fd = files.open(handle.path, **{**how, "create": True})
            # A file that is created after it was deleted elsewhere would stay for ever.
            if how["create"] or handle.key is None or self._is_named(handle):
                return fd
            files.close(fd)
            files.unlink(handle.path, missing_ok=True)
            self._remove_if_moved(handle, [directory.id])
            raise

    def _is_named(self, handle: _Handle) -> bool:
        """Whether the manifest names a file: its name is removed before the file is."""
        key, name = handle.key, handle.path.rpartition("/")[2]
        return key is not None and name in self._controller.state.read(
            lambda txn: journal.file_names(txn, key)
        )

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

    def close(self, fd: int) -> None:
        """As `Files.close`."""
        handle = self._handles.pop(fd, None)
        if handle is not None:
            _close_each(handle.copies)

    def keep(self, fd: int) -> None:
        """As `Files.keep`."""
        handle = self._handles[fd]
        handle.kept = True
        for directory, copy in handle.copies:
            directory.files.keep(copy)

    # Open files

    read = _at_leader("read")
    read_into = _at_leader("read_into")
    map = _at_leader("map")
    map_data = _at_leader("map_data")
    size = _at_leader("size")
    check_linked = _at_leader("check_linked")
    truncate = _in_each_copy(_truncate)
    allocate = _in_each_copy(lambda files, fd, size: files.allocate(fd, size))
    sync = _in_each_copy(lambda files, fd: files.sync(fd))
    drop_cache = _in_each_copy(lambda files, fd: files.drop_cache(fd))

    def write(self, fd: int, buffers: Sequence[Any], position: int) -> int:
        """As `Files.write`, to the followers first."""
        while True:
            try:
                if self._controller.unopened:
                    self._open_all()
                (leader, leader_fd), *followers = copies = self.copies(fd)
                seconds = self._handles[fd].seconds = {}
                for directory, copy in reversed(followers):
                    began, files = monotonic(), directory.files
                    if files.size(copy) != position:
                        _complete(copies[0], (directory, copy), position)
                    files.write(copy, buffers, position)
                    seconds[directory.id] = monotonic() - began
                return leader.files.write(leader_fd, buffers, position)
            except StorageError as error:
                if not self.may_repeat(error):
                    raise

    def slow_followers(self, fd: int, seconds: float) -> _list[int]:
        """Return the directories in which the last write took longer, the leader's left out."""
        return [each for each, taken in self._handles[fd].seconds.items() if taken > seconds]

    @_repeated
    def complete(self, fd: int, position: int) -> None:
        """As `Files.complete`: also of a copy that joined the ISR since the file was written."""
        parent = self._handles[fd].path.rpartition("/")[0]
        leader, *followers = self.all_copies(fd)
        for directory, copy in reversed(followers):
            if directory.files.size(copy) != position:
                _complete(leader, (directory, copy), position)
                directory.files.sync(copy)
                directory.files.sync_directory(parent)

    # Names

    exists = _where_read("exists")
    make_directory = _in_all(_make_directory, may_be_missing=False)
    remove_directory = _in_all(lambda files, path: files.remove_directory(path))
    rename = _in_all(lambda files, old, new: files.rename(old, new))
    unlink = _in_all(lambda files, path, missing_ok=False: files.unlink(path, missing_ok))
    sync_directory = _in_all(lambda files, path: files.sync_directory(path))
    _list_where_read = _where_read("list")
    _share = _in_all(lambda files, _, *how: files.share(*how), may_be_missing=False)

    def share(self, group: int, mode: str) -> None:
        """As `Files.share`, in every directory that is online."""
        self._share("topics", group, mode)

    def list(self, path: str) -> _list[str]:
        """As `Files.list`; of the directory of a topic, what any directory has."""
        key = partition_of(path)
        assignment = None if key is None else self._controller.assignment(key)
        if not path.startswith("topics") or (assignment and assignment.leader is not None):
            names: _list[str] = self._list_where_read(path)
            return names
        found: set[str] = set()
        self._collect(path, found)
        return sorted(found)

    _collect = _in_all(lambda files, path, found: found.update(files.list(path)))

    # Locks

    def lock(self, fd: int, timeout: float, shared: bool = False) -> bool:
        """As `Files.lock`, in every directory that is online."""
        while True:
            waited = False
            try:
                for directory, copy in self.copies(fd):
                    waited |= directory.files.lock(copy, timeout, shared)
            except BaseException as error:
                self.unlock(fd)
                if not isinstance(error, StorageError) or not self.may_repeat(error):
                    raise
                continue
            if self._controller.moved():
                self._controller.refresh()
            if self._handles[fd].image is self._controller.image:
                return waited
            # The directories changed before the lock was taken.
            self.unlock(fd)

    def try_lock(self, fd: int, shared: bool = False) -> bool:
        """As `Files.try_lock`: free in every directory that is online."""
        self._controller.current()
        while True:
            held: Copies = []
            try:
                for directory, copy in self.copies(fd):
                    if not directory.files.try_lock(copy, shared):
                        return False
                    held.append((directory, copy))
                held = []
                return True
            except StorageError as error:
                if not self.may_repeat(error):
                    raise
            finally:
                _unlock_each(held)

    def unlock(self, fd: int) -> None:
        """As `Files.unlock`; a broken disk still frees its locks."""
        _unlock_each(self._handles[fd].copies)

    # The root and its file system

    def path(self, relative: str) -> str:
        """As `Files.path`: where the file is read."""
        return self.directories(relative)[0].files.path(relative)

    def directories_of(self, relative: str) -> tuple[str, ...]:
        """As `Files.directories_of`: those with in-sync replicas."""
        return tuple(each.path for each in self.directories(relative))

    def is_in_place(self) -> bool:
        """As `Files.is_in_place`, of any directory that is online."""
        return any(each.files.is_in_place() for each in self._controller.current().online)

    identity = _of_controller("identity")
    filesystem = _of_controller("filesystem")
    free_bytes = _least("free_bytes")
    total_bytes = _least("total_bytes")

    def close_all(self) -> None:
        """Close every directory."""
        self._controller.close()


def _is_linked(directory: LogDirectory, fd: int) -> bool:
    """Whether an open file still has a name."""
    try:
        directory.files.check_linked(fd)
    except LogDeletedError:
        return False
    except StorageError:
        pass  # the next operation finds that, too
    return True


def _close_each(copies: Iterable[tuple[LogDirectory, int]]) -> None:
    for directory, fd in copies:
        with suppress(EmbedlogError):
            directory.files.close(fd)


def _unlock_each(copies: Copies) -> None:
    for directory, fd in copies:
        with suppress(StorageError):
            directory.files.unlock(fd)


def _complete(
    leader: tuple[LogDirectory, int], follower: tuple[LogDirectory, int], position: int
) -> None:
    """Have a follower's file end at a position: truncate it, or copy what it lacks.

    A killed writer may have left more in it; a follower that joined the ISR after the file was
    created may lack it.

    Raises:
        StorageError: The leader's file ends before the position.
    """
    (source, source_fd), (directory, fd) = leader, follower
    size = directory.files.size(fd)
    if size > position:
        directory.files.truncate(fd, position)
    while size < position:
        chunk = source.files.read(source_fd, min(CHUNK_BYTES, position - size), size)
        if not chunk:
            raise StorageError(
                "The file of the leader ends too early", path=source.path, operation="copy"
            )
        size += directory.files.write(fd, [chunk], size)


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


LONGEST_WAIT: Final = 0.2
"""Seconds after which a waiter checks whether there is another controller, whose page counts."""


class ReplicatedWake(WakePage):
    """The pages of all directories; has the methods of `WakePage`."""

    def __init__(self, controller: Controller) -> None:
        # Not that of `WakePage`: it opens a page.
        self._controller = controller
        self._pages: dict[LogDirectory, WakePage] = {}
        self._joined_pages: list[WakePage] = []

    @property
    def _page(self) -> WakePage:
        while True:
            directory = self._controller.current().directory
            page = self._pages.get(directory)
            if page is not None:
                return page
            try:
                self._pages[directory] = WakePage(directory.files)
            except StorageError as error:
                if not directory.is_broken_by(error):
                    raise
                self._controller.take_offline({directory.id: error})

    rings = property(lambda self: self._page.rings)

    def join(self) -> None:
        """As `WakePage.join`."""
        page = self._page
        page.join()
        self._joined_pages.append(page)

    def leave(self) -> None:
        """As `WakePage.leave`."""
        with suppress(IndexError):
            self._joined_pages.pop().leave()

    def value(self) -> int:
        """As `WakePage.value`."""
        return self._page.value()

    def published(self) -> int:
        """As `WakePage.published`."""
        return self._page.published()

    def advance(self) -> None:
        """As `WakePage.advance`; what was committed stays so if too few directories are left."""
        with suppress(NotEnoughReplicasError):  # waiters look by themselves after a short time
            self._page.advance()

    def wait(self, seen: int, timeout: float) -> None:
        """As `WakePage.wait`, for a short time: then the caller looks again."""
        self._page.wait(seen, min(timeout, LONGEST_WAIT))

    def close(self) -> None:
        """As `WakePage.close`."""
        for page in self._pages.values():
            with suppress(EmbedlogError):
                page.close()


def remove_copies(
    controller: Controller, key: bytes, topic: str, directories: Iterable[int] | None = None
) -> None:
    """Remove the files of a partition from directories that have no copy of it, or not any more.

    A process that is making such a copy removes it itself.

    Args:
        controller: Knows the assignment.
        key: The key of the partition.
        topic: The directory of its topic.
        directories: The directories; by default all.
    """
    path = f"{topic}/{PARTITION_KEY.unpack(key)[1]}"
    for each in list(controller.directories) if directories is None else directories:
        directory = controller.directories.get(each)
        if (
            directory is not None
            and _is_unassigned(controller, key, each)
            and directory.files.exists(path)
        ):
            with suppress(StorageError), lock_copy(directory, key) as free:
                # Checked again under the lock: it may have been assigned again meanwhile.
                if free and _is_unassigned(controller, key, each):
                    startup.remove_folder(directory.files, path)
                    if controller.assignment(key) is None:
                        directory.files.remove_directory(topic)


def _is_unassigned(controller: Controller, key: bytes, directory: int) -> bool:
    """Whether a partition has no copy in a directory, or was deleted."""
    assignment = controller.assignment(key)
    if assignment is not None:
        return directory not in assignment.replicas
    topic_id = PARTITION_KEY.unpack(key)[0]
    topics = controller.state.read(lambda txn: list(catalog.topics(txn)))
    return all(topic.id != topic_id for topic in topics)


@contextmanager
def lock_copy(directory: LogDirectory, key: bytes) -> Iterator[bool]:
    """Hold the lock of who makes a copy; yields False if another process or thread has it."""
    topic_id, partition = PARTITION_KEY.unpack(key)
    path = f"locks/{topic_id}-{partition}.copy"
    with directory.files.opened(path, write=True, create=True) as lock:
        yield directory.files.try_lock(lock)
