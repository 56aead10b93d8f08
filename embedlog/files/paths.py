"""Paths outside of any root: where the directories of a log are."""

from __future__ import annotations

import os

from embedlog.files.filesystem import storage_error

FORMAT_FILE = "embedlog.toml"
"""What each root has; here, because a reader without LMDB looks for it."""
MANIFESTS = "snapshots"
"""The directory of the manifests of snapshots, which a root and a backup may have."""


def real_path(path: str | os.PathLike[str]) -> str:
    """Return an absolute path without links."""
    return os.path.realpath(os.fspath(path))


def is_inside(path: str, directory: str) -> bool:
    """Whether a path is inside of a directory; both as `real_path` returns them."""
    return path.startswith(f"{directory.rstrip(os.sep)}{os.sep}") and path != directory


def is_directory(path: str) -> bool:
    """Whether there is a directory."""
    return os.path.isdir(path)


def exists(path: str) -> bool:
    """Whether there is anything at a path."""
    return os.path.exists(path)


def identity_at(path: str) -> tuple[int, int]:
    """Return device and inode of a directory; raises `OSError` if there is none."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


def is_there(path: str) -> bool:
    """Whether there is anything at a path, as `exists`, but not False for lack of permission.

    Raises:
        StorageError: This user may not look.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise storage_error(error, "look up", path) from error
    return True


def is_mount_point(path: str) -> bool:
    """Whether a file system is mounted at a path."""
    return os.path.ismount(path)
