"""What `Files` needs to know of its surroundings: paths, errors, file systems, processes."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
from itertools import chain
from typing import Final

from embedlog.errors import DiskFullError, StorageError, UnsupportedFilesystemError
from embedlog.hints import Hint

OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_CAP_SYS_RESOURCE: Final = 1 << 24
_ALL_USERS: Final = ["0", "0", "4294967295"]
_RESERVING: Final = ("ext4", "f2fs", "overlay")
"""File systems that reserve blocks for root, and overlays, which are usually on one of them."""

FILESYSTEMS: Final = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0x01021994: "tmpfs",
    0x794C7630: "overlay",
}
REMOTE_FILESYSTEMS: Final = {
    0x6969: "nfs",
    0x517B: "smb",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x01021997: "9p",
    0x65735546: "fuse",
    0x00C36400: "ceph",
    0x5346414F: "afs",
    0x6B414653: "afs",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x19830326: "beegfs",
    0x20030528: "orangefs",
    0xAAD7AAEA: "panfs",
    0x73757245: "coda",
    0x564C: "ncp",
    0x01161970: "gfs2",
    0x7461636F: "ocfs2",
    0x786F4256: "vboxsf",
    0xBACBACBC: "vmhgfs",
    0x7C7C6673: "prl_fs",
}
"""File systems by the magic number that statfs reports, from linux/magic.h and GNU's stat."""

_libc = ctypes.CDLL(None, use_errno=True)
_statx = getattr(_libc, "statx", None)
_EMPTY_PATH, _LINK_COUNT, _Status = 0x1000, 4, ctypes.c_char * 256
"""From linux/stat.h: the file of the descriptor, what to return of it, and room for that."""


def storage_error(
    error: OSError, operation: str, path: str, kind: type[StorageError] | None = None
) -> StorageError:
    """Return the error to raise for one of the operating system, with its errno kept."""
    number = error.errno or errno.EIO
    if kind is None:
        kind = DiskFullError if number in _FULL else StorageError
    reason = error.strerror or os.strerror(number)
    what = f"{operation} failed: {reason} ({errno.errorcode.get(number, number)})"
    todo = None
    if number == errno.EACCES:
        todo = "Run it as the user who owns the log." + Hint(
            "share(group) lets Spark's executors of other users read and stage.",
            "`embedlog share GROUP` lets Spark's executors of other users read and stage.",
        )
    return kind(what, errno=number, operation=operation, path=path, todo=todo)


def refuse_remote(magic: int, path: str) -> None:
    """Raise `UnsupportedFilesystemError` if another host may have the file system, too.

    Two hosts do not see each other's maps and locks of a database: a mere reader breaks it.

    Args:
        magic: The magic number of the file system.
        path: The directory, for the error.
    """
    if magic in REMOTE_FILESYSTEMS:
        raise UnsupportedFilesystemError(
            f"Opening a log over a remote file system ({REMOTE_FILESYSTEMS[magic]}) can destroy it",
            todo="Open it on the host that has its disk; Spark executors on other hosts read and "
            "write it through their mounts."
            + Hint("Pass unsafe_filesystem=True only if no other host opens it.", ""),
            path=path,
        )


def refuse_public(mode: int, path: str) -> None:
    """Raise `UnsupportedFilesystemError` if any user may replace the files of a directory.

    Args:
        mode: Its permissions, as `os.stat` returns them.
        path: The directory, for the error.
    """
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise UnsupportedFilesystemError(
            "Anyone may replace the files of this directory",
            todo=Hint(
                "Run chmod o-w on it, or pass unsafe_filesystem=True.", "Run chmod o-w on it."
            ),
            path=path,
        )


def parts(path: str) -> list[str]:
    """Split a path; raise if it could lead out of the root."""
    parts = path.split("/") if path else []
    if any(part in ("", ".", "..") for part in parts):
        raise OSError(errno.EINVAL, "not a path below the root")
    return parts


def without_first(views: list[memoryview], count: int) -> list[memoryview]:
    """Return the views without their first `count` bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []


_LISTINGS: Final = 3
"""How often the locks are listed before one counts as free."""


def lock_holder(fd: int) -> int | None:
    """Return the process that holds the file's flock; None if the kernel does not say."""
    status = os.fstat(fd)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    inode = str(status.st_ino)
    holder = None
    # The kernel lists them page by page, and skips some if others are freed meanwhile.
    for line in chain.from_iterable(proc_file("locks").splitlines() for _ in range(_LISTINGS)):
        # "1: FLOCK  ADVISORY  WRITE 123 08:01:456 0 EOF"; one that waits has "->" first.
        fields = line.split()
        if len(fields) < 6 or fields[1] != "FLOCK":
            continue
        where, _, number = fields[5].rpartition(":")
        if number == inode:
            holder = int(fields[4])
            if where == device:
                break
    # Overlays report another device than stat does, so the inode alone must do then;
    # a holder in a process namespace that is not ours has no number here.
    return holder if holder is not None and holder > 0 else None


def process_state(pid: int) -> str | None:
    """Return the letter of proc(5) for what the process does ("T": stopped), None if gone."""
    status = proc_file(f"{pid}/stat")
    return status.rpartition(")")[2].split()[0] if status else None


def link_count(fd: int) -> int:
    """Return how many names an open file has.

    Not by `fstat`: it asks for the file's times, and since Linux 6.13 the next write then has to
    record a new one in the inode, so that its flush takes half as long again.
    """
    status = _Status()
    if _statx is None or _statx(fd, b"", _EMPTY_PATH, _LINK_COUNT, status):
        return os.fstat(fd).st_nlink
    return int.from_bytes(status.raw[16:20], sys.byteorder)


def thread_names() -> set[str]:
    """Return the names of the threads of this process, also of those that Python does not know."""
    return {
        proc_file(f"self/task/{thread}/comm").strip() for thread in os.listdir("/proc/self/task")
    }


def proc_file(name: str) -> str:
    """Return a file of `/proc`; empty if it is gone."""
    try:
        with open(f"/proc/{name}", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def free_blocks(status: os.statvfs_result, magic: int) -> int:
    """Return how many blocks this process may still use, of what `os.fstatvfs` returned.

    ext4 lets root, and processes with CAP_SYS_RESOURCE, use the blocks that it reserves.
    Both count only in the first user namespace: root of a container with its own namespace is
    another user.  Users that the options ``resuid`` and ``resgid`` allow are not counted.
    """
    if status.f_bfree == status.f_bavail or FILESYSTEMS.get(magic) not in _RESERVING:
        return status.f_bavail
    return status.f_bfree if _may_use_reserved_blocks() else status.f_bavail


def _may_use_reserved_blocks() -> bool:
    if proc_file("self/uid_map").split() != _ALL_USERS:
        return False
    if os.geteuid() == 0:
        return True
    # Capabilities are those of a thread.
    lines = proc_file("thread-self/status").splitlines()
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) & _CAP_SYS_RESOURCE)


def filesystem_magic(directory: int) -> int:
    """Return the number statfs gives for the file system of an open directory."""
    buffer = ctypes.create_string_buffer(256)
    if _libc.fstatfs(directory, buffer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    # The first field is a long, and every magic number is one of 32 bits.
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF
