"""Disks that break under the directories of a log: `Files` that fail for one directory, from some
operation on.

>>> disks = FailingDisks()                                            # doctest: +SKIP
>>> log = embedlog.open([first, second], files=disks)                # doctest: +SKIP
>>> disks.break_disk(second, errno.EIO, after=3)                     # doctest: +SKIP

LMDB does not use `Files`.  A disk whose databases fail too refuses the locks of their writes.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from embedlog import kv
from embedlog.errors import DurabilityError
from embedlog.files import Files
from embedlog.files.filesystem import storage_error

CHANGES = (
    *("write", "truncate", "allocate", "sync", "make_directory", "remove_directory"),
    *("rename", "unlink", "sync_directory"),
)
READS = ("read", "read_into", "map", "list")
READABLE = frozenset({errno.EROFS, errno.ENOSPC})
"""The errors of disks that can be read nevertheless."""
_FREES_SPACE = frozenset({"truncate", "unlink", "remove_directory"})
_DATABASE_LOCKS = frozenset({"locks/state", "locks/live"})


class BrokenDisk:
    """How a disk fails."""

    def __init__(
        self, number: int, after: int, times: int, databases: bool, folder: str = ""
    ) -> None:
        self.number, self.left, self.times, self.databases = number, after, times, databases
        self.folder = folder

    def fails(self, operation: str, changes: bool) -> bool:
        """Whether an operation fails; counts it."""
        if not changes and self.number in READABLE:
            return False
        if self.number == errno.ENOSPC and operation in _FREES_SPACE:
            return False
        if self.left > 0:
            self.left -= 1
            return False
        self.times -= 1
        return self.times >= 0


class FailingDisks:
    """Makes the files of directories, each on a disk of its own."""

    def __init__(self) -> None:
        self.broken: dict[str, BrokenDisk] = {}
        self.boot: str | None = None
        self.operations = 0
        """How many operations there were, in all directories."""
        self.kill_at: int | None = None
        """The operation before which the process is killed."""
        self.hidden: set[str] = set()
        """Directories that cannot be opened."""

    def __call__(self, path: str | os.PathLike[str], **options: Any) -> DiskFiles:
        return DiskFiles(self, path, **options)

    def break_disk(
        self,
        path: str,
        number: int,
        *,
        after: int = 0,
        times: int = 1 << 30,
        databases: bool = True,
        folder: str = "",
    ) -> None:
        """Let the operations in a directory fail.

        Args:
            path: The directory.
            number: The ``errno``.
            after: How many operations work before.
            times: How many fail; all, by default.
            databases: Whether the databases cannot be written either.
            folder: What the paths of files that fail begin with.
        """
        self.broken[path] = BrokenDisk(number, after, times, databases, folder)

    def repair(self, path: str) -> None:
        """Let a disk work again."""
        self.broken.pop(path, None)

    def begin(self, root: str, operation: str, changes: bool, path: str = "") -> None:
        """Raise the error of an operation, if it must fail.

        Raises:
            OSError: The disk is broken.
        """
        self.point()
        disk = self.broken.get(root)
        if disk is not None and path.startswith(disk.folder) and disk.fails(operation, changes):
            raise OSError(disk.number, os.strerror(disk.number))

    def point(self) -> None:
        """Count an operation; die here if that was ordered."""
        self.operations += 1
        if self.operations == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


class DiskFiles(Files):
    """The files of one directory on a disk of `FailingDisks`."""

    def __init__(self, disks: FailingDisks, path: str | os.PathLike[str], **options: Any) -> None:
        self._disks = disks
        real = os.path.realpath(path)
        if real in disks.hidden:
            self._root_fd, self._paths = -1, {}
            self._in_use = set()
            raise storage_error(OSError(errno.EIO, "hidden"), "open the root", real)
        super().__init__(path, **options)

    def _begin(self, operation: str, where: int | str, changes: bool) -> None:
        try:
            path = where if isinstance(where, str) else self._paths.get(where, "")
            self._disks.begin(self.root, operation, changes, path)
        except OSError as error:
            kind = DurabilityError if operation.startswith("sync") else None
            raise self._failed(error, operation, where, kind) from error

    def open(self, path: str, **options: Any) -> int:
        """As `Files.open`."""
        changes = bool(options.get("write"))
        disk = self._disks.broken.get(self.root)
        if changes and disk is not None and disk.number == errno.ENOSPC:
            # An existing file can be opened on a full disk, and counts as a read.
            changes = not super().exists(path)
        self._begin("open", path, changes)
        return super().open(path, **options)

    def lock(self, fd: int, timeout: float, shared: bool = False) -> bool:
        """As `Files.lock`."""
        disk = self._disks.broken.get(self.root)
        if disk is not None and disk.databases and self._paths.get(fd) in _DATABASE_LOCKS:
            self._begin("lock", fd, True)
        else:
            self._disks.point()
        return super().lock(fd, timeout, shared)

    def boot_id(self) -> str:
        """As `Files.boot_id`."""
        return self._disks.boot or super().boot_id()


def _failing(name: str, changes: bool) -> Callable[..., Any]:
    method = getattr(Files, name)

    def operation(self: DiskFiles, where: int | str, *arguments: Any, **options: Any) -> Any:
        self._begin(name, where, changes)
        return method(self, where, *arguments, **options)

    return operation


for _name in CHANGES:
    setattr(DiskFiles, _name, _failing(_name, True))
for _name in READS:
    setattr(DiskFiles, _name, _failing(_name, False))


class _CountedTxn:
    """A transaction of LMDB whose commit is a point at which the process may be killed."""

    def __init__(self, txn: Any, disks: FailingDisks) -> None:
        self._txn, self._disks, self.id = txn, disks, txn.id

    def commit(self) -> None:
        self._disks.point()
        self._txn.commit()


def count_commits(disks: FailingDisks) -> None:
    """Count the commits of databases as operations too, in this process."""
    commit_all, transact = kv._commit_all, kv.LmdbStore.transact_locked

    def commit_each(stores: Sequence[Any], fan_out: Any) -> Any:
        fan_out.txns = [_CountedTxn(txn, disks) for txn in fan_out.txns]
        failed = commit_all(stores, fan_out)
        disks.point()
        return failed

    def transact_locked(self: kv.LmdbStore, step: Any) -> Any:
        disks.point()
        result = transact(self, step)
        disks.point()
        return result

    kv._commit_all = commit_each
    kv.LmdbStore.transact_locked = transact_locked  # type: ignore[method-assign]
