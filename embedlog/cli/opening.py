"""Opening the log that a command is about."""

from __future__ import annotations

import argparse
import errno
import os
from typing import TYPE_CHECKING

from embedlog.errors import InvalidConfigError, NotALogError, StorageError

if TYPE_CHECKING:
    from embedlog.engine import Log

FORMAT_FILE = "embedlog.toml"
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS)


def root_of(args: argparse.Namespace) -> str:
    """Return the directory that was named."""
    if not args.root:
        raise InvalidConfigError("which log?", todo="Name it with --root DIR or EMBEDLOG_ROOT")
    return os.path.abspath(os.path.expanduser(args.root))


def is_log(root: str) -> bool:
    """Whether there is a log."""
    return os.path.isfile(os.path.join(root, FORMAT_FILE))


def to_read(args: argparse.Namespace) -> Log:
    """Open a log that exists, changing nothing."""
    import embedlog

    return embedlog.open(root_of(args), mode="r")


def to_write(args: argparse.Namespace, *, create: bool = False, durability: str = "os") -> Log:
    """Open a log to change it; only ``create`` makes one that is not there."""
    import embedlog

    root = root_of(args)
    if not create and not is_log(root):
        raise NotALogError("there is no log here", path=root)
    return embedlog.open(root, durability=durability)


def to_follow(args: argparse.Namespace) -> Log:
    """Open a log to read it for long: attached, if this user may, else from outside."""
    try:
        return to_write(args)
    except StorageError as error:
        if error.errno not in _NOT_OURS:
            raise
        return to_read(args)
