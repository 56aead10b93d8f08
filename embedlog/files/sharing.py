"""Lets a group read the records of a log, and stage others, without any other right.

A shared directory has the bit "set group id" and permissions for its group, which everything that
is made in it gets as well.  So the permissions of `topics` and `staging` are the setting: no
process has to read it, and the tasks on other hosts, which open no database, follow it too.
Databases and locks are never shared.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from embedlog.files.filesystem import OPEN_DIRECTORY

_PRIVATE = 0o700
_READ = stat.S_ISGID | 0o750
_STAGE = stat.S_ISGID | 0o770


def share_as(directory: int, fd: int, mask: int) -> None:
    """Give what was made in a directory the directory's permissions, if that is shared.

    Call it once the file exists: `share` changes a directory before it lists the files in it.

    Args:
        directory: The directory.
        fd: The file or directory that was made in it.
        mask: Which permissions it gets; those of a file are 0o666.
    """
    mode = os.fstat(directory).st_mode
    if mode & stat.S_ISGID:
        # Regardless of the umask.
        os.fchmod(fd, stat.S_IMODE(mode) & mask)


def share(root: str, group: int, mode: str) -> None:
    """Let a group use the files of a log, while processes have it open; repeat it after an error.

    Args:
        root: The directory of the log.
        group: The number of the group.
        mode: ``"r"`` to read records, ``"rw"`` to stage some as well, ``"none"`` for neither.

    Raises:
        OSError: The files belong to another user, or this one is not in the group.
    """
    top = os.open(root, OPEN_DIRECTORY)
    try:
        with suppress(FileExistsError):
            os.mkdir("staging", _PRIVATE, dir_fd=top)
        _share("staging", top, group, _STAGE if mode == "rw" else _PRIVATE)
        readable = _PRIVATE if mode == "none" else _READ
        _share("topics", top, group, readable, all_inside=True)
        os.fchown(top, -1, group)
        if mode != "none":
            os.fchmod(top, stat.S_IMODE(os.fstat(top).st_mode) | 0o050)
    finally:
        os.close(top)


def _share(name: str, parent: int, group: int, mode: int, *, all_inside: bool = False) -> None:
    """Change a directory, and then what is in it; a file has no right to execute."""
    directory = os.open(name, OPEN_DIRECTORY, dir_fd=parent)
    try:
        os.fchown(directory, -1, group)
        os.fchmod(directory, mode)
        for entry in os.scandir(directory) if all_inside else ():
            with suppress(FileNotFoundError):  # retention may delete it meanwhile
                if entry.is_dir(follow_symlinks=False):
                    _share(entry.name, directory, group, mode, all_inside=True)
                else:
                    os.chown(entry.name, -1, group, dir_fd=directory, follow_symlinks=False)
                    os.chmod(entry.name, mode & 0o666, dir_fd=directory)
    finally:
        os.close(directory)
