"""The operations of a log on its files, directories and locks.

One `Files` serves one log root.  It opens the root directory once and reaches
every file from there, part by part and without following symbolic links, so
that a link placed inside the root cannot lead out of it.  Paths are relative
to the root, with "/" between the parts; "" is the root itself.

Every error of the operating system comes out as a `StorageError` that keeps
the errno and names the path and the operation.  The tests replace `Files` by a
subclass that injects faults.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import resource
import select
import stat
import struct
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from embedlog.errors import (
    ClosedError,
    DurabilityError,
    LockTimeoutError,
    LogDeletedError,
    NotALogError,
    ReadOnlyError,
    StorageError,
    raised_in_body,
)
from embedlog.files.filesystem import (
    FILESYSTEMS,
    OPEN_DIRECTORY,
    REMOTE_FILESYSTEMS,
    filesystem_magic,
    free_blocks,
    link_count,
    lock_holder,
    parts,
    process_state,
    refuse_public,
    refuse_remote,
    storage_error,
    without_first,
)
from embedlog.files.paths import identity_at
from embedlog.files.sharing import share, share_as
from embedlog.forks import finished_before_forks
from embedlog.lazy import pa

IOV_MAX: Final = 1024
"""The kernel accepts this many buffers in one vectored write; more fail with EINVAL."""

READ_UNCHECKED: Final = 16 << 20
"""A longer read is first clamped to the file, since Python allocates before it reads."""

MANY_DESCRIPTORS: Final = 1 << 20
"""Returned where there is no limit."""

_boot_id = ""
"""That of the kernel, once it was read: a process does not outlive its boot."""
LINK_CHECK_SECONDS: Final = 0.00025
"""How often appends, commits and polls check that their files were not deleted.  To check each
time would take a microsecond of the 33 of an append; to delete a whole log takes longer."""

FIRST_SLEEP: Final = 20e-6
LONGEST_SLEEP: Final = 1e-3
"""Seconds between two attempts to take a lock: doubled from the first to the longest."""

_FILE_MODE: Final = 0o600
_DIRECTORY_MODE: Final = 0o700
_OPEN_FILE: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_EXCLUSIVE: Final = fcntl.LOCK_EX | fcntl.LOCK_NB
_SHARED: Final = fcntl.LOCK_SH | fcntl.LOCK_NB
_list = list  # `Files.list` hides it in the class
_WAITING, _DONE, _ANY = (
    struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 1, 0)
    for kind in (fcntl.F_RDLCK, fcntl.F_UNLCK, fcntl.F_WRLCK)
)
"""Locks of the first byte of a file: one who waits for the file's lock has it, shared."""
_FICLONE: Final = 0x40049409
"""The ioctl that shares the blocks of a whole file."""
_NOT_A_DIRECTORY: Final = "A log is a directory, and this is a file"


class Files:
    """One log root on one file system.

    Args:
        root: The directory of the log; it must exist (`create_root` makes it).
        writable: Whether anything may be changed; if not, changes raise `ReadOnlyError`.
        unsafe_filesystem: Whether to accept a remote file system or a root anyone may write to;
            safe for callers that neither open a database nor rely on locks.
        maps_segments: Whether sealed segments may be mapped.

    Raises:
        NotALogError: `root` is not a directory.
        UnsupportedFilesystemError: Locks and maps cannot be trusted there.
        StorageError: The directory cannot be opened.
    """

    maps_segments = True
    """Whether sealed segments may be mapped; never on a remote file system."""

    preallocates = True
    """Whether segments are extended ahead of the log end."""

    # The subclass in the tests replaces this, to write less than it was asked to.
    _pwritev = staticmethod(os.pwritev)

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        writable: bool = True,
        unsafe_filesystem: bool = False,
        maps_segments: bool = True,
    ) -> None:
        self._root_fd = -1
        self._paths: dict[int, str] = {}
        self._in_use: set[int] = set()
        self.root = os.path.realpath(root)
        self.writable = writable
        try:
            self._root_fd = os.open(self.root, OPEN_DIRECTORY)
        except NotADirectoryError as error:
            raise NotALogError(_NOT_A_DIRECTORY, path=self.root) from error
        except FileNotFoundError as error:
            raise StorageError(
                "There is no such directory",
                errno=errno.ENOENT,
                operation="open the root",
                path=self.root,
                todo="Check the path; a log is created by opening it without mode='r'.",
            ) from error
        except OSError as error:
            raise storage_error(error, "open the root", self.root) from error
        try:
            magic = self._magic()
            if not unsafe_filesystem:
                refuse_remote(magic, self.root)
                if writable:
                    refuse_public(self._root_status().st_mode, self.root)
            # Another host may delete a file under its map, which is a SIGBUS.
            self.maps_segments = maps_segments and magic not in REMOTE_FILESYSTEMS
        except BaseException:
            self.close_all()
            raise
        _instances.add(self)

    def __del__(self) -> None:
        # A program that opens logs and closes none must not run out of descriptors.
        self.close_all()

    @classmethod
    def create_root(cls, path: str | os.PathLike[str]) -> None:
        """Make the directory of a log, for its user only, durably; an existing one is kept.

        Raises:
            NotALogError: The path is a file.
            StorageError: The directory cannot be made.
        """
        real = os.path.realpath(path)
        try:
            try:
                os.makedirs(real, mode=_DIRECTORY_MODE)
                parent = os.open(os.path.dirname(real), OPEN_DIRECTORY)
                try:
                    os.fsync(parent)  # makes the name of the new directory durable
                finally:
                    os.close(parent)
            except FileExistsError:
                if not stat.S_ISDIR(os.stat(real).st_mode):
                    raise NotALogError(_NOT_A_DIRECTORY, path=real) from None
        except OSError as error:
            raise storage_error(error, "create the root", real) from error

    # Files

    @finished_before_forks
    def open(
        self,
        path: str,
        *,
        write: bool = False,
        create: bool = False,
        exclusive: bool = False,
        counted: bool = False,
    ) -> int:
        """Open a regular file and return its descriptor.

        Links, FIFOs and devices are refused (ELOOP, ENOTDIR, EINVAL), and for writing
        also a file with a second name, which may belong to another program.

        Args:
            path: Relative to the root.
            write: Open it for reading and writing.
            create: Create it if it is missing, with 0600, or as its directory is shared; its name
                is durable only after `sync_directory`.
            exclusive: The file must be new.
            counted: Allow writing in a read-only log; for the wake page, where being
                counted as a waiter changes no log.
        """
        flags = _OPEN_FILE | (os.O_RDWR if write else os.O_RDONLY)
        if create:
            flags |= os.O_CREAT | (os.O_EXCL if exclusive else 0)
        changes = (write and not counted) or create
        with self._parent(path, "open", changes=changes) as (directory, name):
            fd = os.open(name, flags, _FILE_MODE, dir_fd=directory)
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode) or (write and status.st_nlink > 1):
                    raise OSError(errno.EINVAL, "not a regular file with one name")
                if create and "/" in path:
                    share_as(directory, fd, 0o666)
            except OSError:
                os.close(fd)
                raise
        self._paths[fd] = path
        return fd

    @contextmanager
    def opened(self, path: str, *, write: bool = False, create: bool = False) -> Iterator[int]:
        """Open a file for the body of a ``with``; the arguments are those of `open`."""
        fd = self.open(path, write=write, create=create)
        try:
            yield fd
        finally:
            self.close(fd)

    def write(self, fd: int, buffers: Sequence[Any], position: int) -> int:
        """Write all bytes of `buffers` at `position`; return how many.

        The buffers are bytes, bytearrays, flat memoryviews of bytes or Arrow buffers.
        After an error some of the bytes may be in the file: the caller must truncate it.
        """
        if len(buffers) <= IOV_MAX:
            try:
                written = self._pwritev(fd, buffers, position)
            except OSError as error:
                raise self._failed(error, "write", fd) from error
            # A small append has one buffer.
            if written == (len(buffers[0]) if len(buffers) == 1 else sum(map(len, buffers))):
                return written
        else:
            written = 0
        # A full disk first shortens a write and refuses only the next one, so
        # the rest must be tried to get the error.
        return self._write_rest(fd, buffers, position, written)

    def _write_rest(self, fd: int, buffers: Sequence[Any], position: int, written: int) -> int:
        rest = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        total = sum(map(len, rest))
        rest = without_first(rest, written)
        while rest:
            with self._errors("write", fd):
                step = self._pwritev(fd, rest[:IOV_MAX], position + written)
                if step <= 0:
                    raise OSError(errno.EIO, "wrote nothing")
            written += step
            rest = without_first(rest, step)
        assert written == total
        return written

    def read(self, fd: int, length: int, position: int) -> bytes:
        """Return the `length` bytes at `position`, or fewer where the file ends."""
        if length > READ_UNCHECKED:
            length = max(0, min(length, self.size(fd) - position))
        try:
            data = os.pread(fd, length, position)
            while len(data) < length:
                more = os.pread(fd, length - len(data), position + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise self._failed(error, "read", fd) from error
        return data

    def read_into(self, fd: int, memory: Any, position: int) -> int:
        """Fill a buffer from `position`; return how many bytes, fewer at the end of the file."""
        view = memoryview(memory).cast("B")
        done = 0
        try:
            while done < len(view) and (more := os.preadv(fd, [view[done:]], position + done)):
                done += more
        except OSError as error:
            raise self._failed(error, "read", fd) from error
        return done

    def map(self, fd: int, length: int, *, write: bool = False) -> mmap.mmap:
        """Map the first `length` bytes; the file must never shrink again (SIGBUS).

        A map outlives the descriptor.  Only the wake page is ever mapped to `write`.
        """
        access = mmap.ACCESS_WRITE if write else mmap.ACCESS_READ
        with self._errors("map", fd):
            try:
                return mmap.mmap(fd, length, access=access)
            except ValueError as error:
                what = f"the file is shorter than {length} bytes"
                raise OSError(errno.EINVAL, what) from error

    def map_data(self, fd: int, length: int) -> Any:
        """As `map`, to read only; a `pyarrow.Buffer`, once pyarrow is loaded.

        That keeps no descriptor, as a `mmap` does.
        """
        if "pyarrow" not in sys.modules:
            return self.map(fd, length)
        try:
            with pa.memory_map(f"/proc/self/fd/{fd}") as file:
                return file.read_buffer(length)
        except OSError:
            return pa.py_buffer(self.map(fd, length))

    def size(self, fd: int) -> int:
        """Return how many bytes the file has."""
        try:
            # A fifth of the time of fstat; the descriptor's own position is not used.
            return os.lseek(fd, 0, os.SEEK_END)
        except OSError as error:
            raise self._failed(error, "size", fd) from error

    def allocated_bytes(self, fd: int) -> int:
        """Return for how many bytes of the file the disk has room."""
        with self._errors("stat", fd):
            return os.fstat(fd).st_blocks * 512

    def check_linked(self, fd: int) -> None:
        """Raise if the file has no name any more: what is written to it is lost when it is closed.

        Raises:
            LogDeletedError: It was deleted, perhaps with the whole log.
        """
        try:
            linked = link_count(fd)
        except OSError as error:
            raise self._failed(error, "stat", fd) from error
        if not linked:
            raise LogDeletedError(
                "The files of the log were deleted while it was open",
                path=self._absolute(fd),
                todo="Close the log, restore its directory if you have a copy, and open it again.",
            )

    def truncate(self, fd: int, size: int) -> None:
        """Truncate the file to `size` bytes, or extend it with zeros."""
        with self._errors("truncate", fd):
            os.ftruncate(fd, size)

    def allocate(self, fd: int, size: int) -> None:
        """Reserve `size` bytes for the file; its present bytes stay, the others are zeros."""
        with self._errors("allocate", fd):
            os.posix_fallocate(fd, 0, size)

    def sync(self, fd: int) -> None:
        """Return once the file's bytes and size are on the disk.

        Raises:
            DurabilityError: They may be lost, and a retry would only hide it.
        """
        try:
            os.fdatasync(fd)
        except OSError as error:
            raise self._failed(error, "sync", fd, DurabilityError) from error

    def complete(self, fd: int, position: int) -> None:
        """Make every copy of the file exactly this long and flush it; here there is only one.

        For a file that was written without the lock of its partition, by the holder of the lock.
        """

    def drop_cache(self, fd: int) -> None:
        """Drop the cached pages that are on the disk, so that later reads come from the disk."""
        with self._errors("drop the cache", fd):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self, fd: int) -> None:
        """Close a descriptor, which frees its lock; ignores one that this object did not open."""
        path = self._paths.pop(fd, None)
        if path is None:
            return
        self._in_use.discard(fd)
        try:
            os.close(fd)
        except OSError as error:
            raise self._failed(error, "close", path) from error

    def keep(self, fd: int) -> None:
        """Have `close_all` leave a descriptor open, since its user may be in a read.

        If it was closed during the read, its number could already be that of another file.
        """
        self._in_use.add(fd)

    def read_file(self, path: str) -> bytes:
        """Return all bytes of a file."""
        with self.opened(path) as fd:
            return self.read(fd, self.size(fd), 0)

    def write_file(self, path: str, data: bytes | Iterable[Any]) -> None:
        """Replace the contents of a file, durably and atomically: a reader sees old or new.

        A killed process leaves a ``<path>.<n>.tmp`` behind, never half a file.  The data may be in
        parts: those of a list are written at once, others one by one.
        """
        for number in itertools.count():
            temporary = f"{path}.{number}.tmp"
            try:
                fd = self.open(temporary, write=True, create=True, exclusive=True)
                break
            except StorageError as error:
                # Another process writes to that file, or left it behind.
                if error.errno != errno.EEXIST:
                    raise
        try:
            try:
                written = 0
                for parts in self._written_at_once(data):
                    written += self.write(fd, parts, written)
                # The bytes before the name: a rename may reach the disk first.
                self.sync(fd)
            finally:
                self.close(fd)
            self.rename(temporary, path)
        except BaseException:
            with suppress(StorageError):
                self.unlink(temporary, missing_ok=True)
            raise
        self.sync_directory(path.rpartition("/")[0])

    def copy_on_write(self, source: int, path: str, size: int) -> bool:
        """Make a file of the first bytes of another one, which share their blocks until a change.

        Durable, and as a whole, as `write_file`.  Returns False if the file system cannot do that.

        Args:
            source: The descriptor of the other file, which need not be one of these.
            path: The new file.
            size: How many bytes.
        """
        temporary = f"{path}.cow.tmp"
        self.unlink(temporary, missing_ok=True)
        fd = self.open(temporary, write=True, create=True, exclusive=True)
        try:
            try:
                fcntl.ioctl(fd, _FICLONE, source)
            except OSError:
                self.unlink(temporary)
                return False
            self.truncate(fd, size)
            self.sync(fd)
        finally:
            self.close(fd)
        self.rename(temporary, path)
        self.sync_directory(path.rpartition("/")[0])
        return True

    def hard_link(self, source: str, path: str) -> bool:
        """Give a file that never changes a second name; return False if that is not possible.

        Args:
            source: The absolute path of the file.
            path: The new name.
        """
        try:
            with self._parent(path, "link", changes=True) as (directory, name):
                os.link(source, name, dst_dir_fd=directory, follow_symlinks=False)
        except StorageError as error:
            if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                return False
            raise
        self.sync_directory(path.rpartition("/")[0])
        return True

    @staticmethod
    def _written_at_once(data: bytes | Iterable[Any]) -> Iterable[Sequence[Any]]:
        if isinstance(data, bytes | _list):
            return [[data] if isinstance(data, bytes) else data]
        return ([part] for part in data)

    def share(self, group: int, mode: str) -> None:
        """Let a group read segments and stage files; see `sharing.share`."""
        with self._errors("share with a group", ""):
            share(self.root, group, mode)

    # Names

    def make_directory(self, path: str, exist_ok: bool = True) -> None:
        """Make one directory in a parent that exists; durable after `sync_directory`.

        Its permissions are 0700, or those of a parent that is shared.
        """
        with self._parent(path, "make directory", changes=True) as (directory, name):
            try:
                os.mkdir(name, _DIRECTORY_MODE, dir_fd=directory)
                if "/" in path:
                    made = os.open(name, OPEN_DIRECTORY, dir_fd=directory)
                    try:
                        share_as(directory, made, 0o7777)
                    finally:
                        os.close(made)
            except FileExistsError:
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if not exist_ok or not stat.S_ISDIR(status.st_mode):
                    raise

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        with self._parent(path, "remove directory", changes=True) as (directory, name):
            os.rmdir(name, dir_fd=directory)

    def list(self, path: str) -> list[str]:
        """Return the names in a directory, sorted."""
        with self._directory(path, "list") as directory:
            return sorted(os.listdir(directory))

    def exists(self, path: str) -> bool:
        """Return whether there is a file, directory or link of that name."""
        if not path:
            return True
        try:
            with self._parent(path, "look up") as (directory, name):
                os.stat(name, dir_fd=directory, follow_symlinks=False)
        except StorageError as error:
            if error.missing:
                return False
            raise
        return True

    def rename(self, old: str, new: str) -> None:
        """Rename, replacing a file at `new` atomically; durable once its directory is synced."""
        with (
            self._parent(old, "rename", changes=True) as (source, name),
            self._parent(new, "rename") as (target, new_name),
        ):
            os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=target)

    def unlink(self, path: str, missing_ok: bool = False) -> None:
        """Remove a file's name; processes that have it open or mapped keep its bytes."""
        try:
            with self._parent(path, "unlink", changes=True) as (directory, name):
                os.unlink(name, dir_fd=directory)
        except StorageError as error:
            if not missing_ok or not error.missing:
                raise

    def sync_directory(self, path: str) -> None:
        """Return once the names in the directory are on the disk.

        Raises:
            DurabilityError: They may be lost, and a retry would only hide it.
        """
        with (
            self._directory(path, "sync directory") as directory,
            self._errors("sync directory", path, DurabilityError),
        ):
            os.fsync(directory)

    # Locks

    def lock(self, fd: int, timeout: float, shared: bool = False) -> bool:
        """Take the file's lock (flock); waits up to `timeout` seconds of the monotonic clock.

        Returns whether it had to wait.  A second descriptor of the same file conflicts, in
        this process too.  A lock ends with `unlock`, `close`, or the process; a forked child
        shares it until it closes its copies, see `after_fork`.

        Raises:
            LockTimeoutError: Another holder; the error has its process and state.
        """
        try:
            fcntl.flock(fd, _SHARED if shared else _EXCLUSIVE)
        except BlockingIOError:
            self._lock_slowly(fd, timeout, shared)
            return True
        except OSError as error:
            raise self._failed(error, "lock", fd) from error
        return False

    def _lock_slowly(self, fd: int, timeout: float, shared: bool) -> None:
        deadline = time.monotonic() + timeout
        pause = FIRST_SLEEP
        with suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WAITING)
        try:
            while (left := deadline - time.monotonic()) > 0:
                # select, since time.sleep never ends under a faked wall clock.
                select.select((), (), (), min(pause, left))
                if self.try_lock(fd, shared):
                    return
                pause = min(2 * pause, LONGEST_SLEEP)
        finally:
            with suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _DONE)
        pid = lock_holder(fd)
        state = None if pid is None else process_state(pid)
        holder = "Another process" if pid is None else f"Process {pid} (state {state or 'unknown'})"
        raise LockTimeoutError(
            f"{holder} held the lock for {timeout:g} s",
            todo="A process in state T is stopped: continue it, or end it.",
            path=self._absolute(fd),
            pid=pid,
            state=state,
        )

    def is_awaited(self, fd: int) -> bool:
        """Whether others wait in `lock` for the file's lock, or the file system does not say."""
        try:
            return not fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _ANY).startswith(_DONE[:2])
        except OSError:
            return True

    def try_lock(self, fd: int, shared: bool = False) -> bool:
        """Take the file's lock if it is free; return whether it was."""
        with self._errors("lock", fd):
            try:
                fcntl.flock(fd, _SHARED if shared else _EXCLUSIVE)
            except BlockingIOError:
                return False
        return True

    def unlock(self, fd: int) -> None:
        """Free the file's lock; never on a descriptor inherited through a fork."""
        try:
            fcntl.flock(fd, fcntl.LOCK_UN)
        except OSError as error:
            raise self._failed(error, "unlock", fd) from error

    # The root and its file system

    def uptime_ms(self) -> int:
        """Return milliseconds since the boot, sleep included; this clock cannot be set."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000

    def path(self, relative: str) -> str:
        """Return the absolute path, for a library that opens files itself (LMDB)."""
        with self._errors("name a path for a library", relative):
            return "/".join([self.root, *parts(relative)])

    def directories_of(self, relative: str) -> tuple[str, ...]:
        """Return the directories that hold the file, the leader's first."""
        return ()

    def identity(self) -> tuple[int, int]:
        """Return device and inode of the root; those of a copy or another mount differ."""
        status = self._root_status()
        return status.st_dev, status.st_ino

    def is_in_place(self) -> bool:
        """Whether the root's path still leads to it, and not to a directory created since."""
        identity = self.identity()
        try:
            return identity_at(self.root) == identity
        except OSError:
            return False

    def boot_id(self) -> str:
        """Return the kernel's id of this boot; it changes with every restart."""
        global _boot_id
        if not _boot_id:
            with (
                self._errors("read the boot id of", ""),
                open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file,
            ):
                _boot_id = file.read().strip()
        return _boot_id

    def free_bytes(self) -> int:
        """Return how many more bytes this process may store, as far as the file system reports.

        Quotas are not counted: only an allocation shows whether there is space.
        """
        status = self._disk_status()
        return free_blocks(status, self._magic()) * status.f_frsize

    def most_descriptors(self) -> int:
        """Return how many descriptors this process may have open."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return MANY_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft

    def total_bytes(self) -> int:
        """Return how many bytes the file system of the root can store."""
        status = self._disk_status()
        return status.f_blocks * status.f_frsize

    def _disk_status(self) -> os.statvfs_result:
        with self._errors("statvfs", ""):
            return os.fstatvfs(self._open_root_fd("statvfs"))

    def _root_status(self) -> os.stat_result:
        with self._errors("stat", ""):
            return os.fstat(self._open_root_fd("stat"))

    def filesystem(self) -> str:
        """Return the name of the root's file system, or its magic number in hex."""
        magic = self._magic()
        return FILESYSTEMS.get(magic) or REMOTE_FILESYSTEMS.get(magic) or hex(magic)

    def _magic(self) -> int:
        with self._errors("statfs", ""):
            return filesystem_magic(self._open_root_fd("get the file system of"))

    # Closing

    def close_all(self) -> None:
        """Close every descriptor but those passed to `keep`; later calls raise `ClosedError`."""
        in_use = {fd: self._paths.pop(fd) for fd in list(self._in_use) if fd in self._paths}
        self._close_descriptors()
        self._paths.update(in_use)
        root, self._root_fd = self._root_fd, -1
        if root >= 0:
            os.close(root)

    def after_fork(self) -> None:
        """In a forked child: close what was inherited, so that its owner opens it again.

        Closing leaves the parent its locks; unlocking would take them from it.
        The root stays open: it carries neither lock nor position.
        """
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._in_use.clear()
        while self._paths:
            fd, _ = self._paths.popitem()
            # The descriptor is gone even if close fails; the others must be closed too.
            with suppress(OSError):
                os.close(fd)

    # Paths and errors

    def _open_root_fd(self, operation: str) -> int:
        if self._root_fd < 0:
            raise ClosedError(f"The files were closed before: {operation}", path=self.root)
        return self._root_fd

    @contextmanager
    def _parent(
        self, path: str, operation: str, changes: bool = False
    ) -> Iterator[tuple[int, str]]:
        """Open the directory that holds `path`; yields it and the name of `path` in it.

        The body must be one operation on `path`: its errors become `StorageError`.  One that
        `changes` anything raises `ReadOnlyError` in a log that was opened to read.
        """
        if changes and not self.writable:
            raise ReadOnlyError(
                f"The log was opened to read: {operation}", path=self._absolute(path)
            )
        parent, _, name = path.rpartition("/")
        if name in ("", ".", ".."):
            raise self._failed(OSError(errno.EINVAL, "not a name"), operation, path)
        root = self._root_fd  # another thread may close it, and its number may be another file's
        directory = self._walk(parent, operation)
        try:
            yield directory, name
        except OSError as error:
            raise self._failed(error, operation, path) from raised_in_body(error)
        finally:
            if directory != root:
                os.close(directory)

    @contextmanager
    def _directory(self, path: str, operation: str) -> Iterator[int]:
        """Open the directory itself, never the root's shared descriptor, for one operation."""
        root = self._root_fd
        directory = self._walk(path, operation)
        try:
            if directory == root:
                directory = os.open(".", OPEN_DIRECTORY, dir_fd=directory)
            yield directory
        except OSError as error:
            raise self._failed(error, operation, path) from raised_in_body(error)
        finally:
            if directory != root:
                os.close(directory)

    def _walk(self, path: str, operation: str) -> int:
        """Open a directory part by part, since O_NOFOLLOW guards only the last part."""
        directory = root = self._open_root_fd(operation)
        try:
            for part in parts(path):
                inner = os.open(part, OPEN_DIRECTORY, dir_fd=directory)
                if directory != root:
                    os.close(directory)
                directory = inner
        except OSError as error:
            if directory != root:
                os.close(directory)
            raise self._failed(error, operation, path) from error
        return directory

    def _absolute(self, where: int | str) -> str:
        """Return the path of a descriptor, or of a path relative to the root, for errors."""
        relative = self._paths.get(where) if isinstance(where, int) else where
        if relative is None:
            return f"{self.root}, descriptor {where}"
        return f"{self.root}/{relative}" if relative else self.root

    @contextmanager
    def _errors(
        self, operation: str, where: int | str, kind: type[StorageError] | None = None
    ) -> Iterator[None]:
        """Convert errors of the operating system; costs 1 µs, so appends do without it."""
        try:
            yield
        except OSError as error:
            raise self._failed(error, operation, where, kind) from raised_in_body(error)

    def _failed(
        self,
        error: OSError,
        operation: str,
        where: int | str,
        kind: type[StorageError] | None = None,
    ) -> StorageError | ClosedError:
        """Return the error to raise for one of the operating system."""
        if self._root_fd < 0:
            return ClosedError(f"The files were closed before: {operation}", path=self.root)
        return storage_error(error, operation, self._absolute(where), kind)


_instances: weakref.WeakSet[Files] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # Also those of a log that another thread was opening.
    for files in list(_instances):
        files.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
