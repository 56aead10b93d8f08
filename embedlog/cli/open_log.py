"""Opening the log that a command is about."""

from __future__ import annotations

import argparse
import errno
import os
from typing import TYPE_CHECKING

from embedlog.errors import InvalidConfigError, NotALogError, StorageError
from embedlog.keyspace import FORMAT_FILE

if TYPE_CHECKING:
    from embedlog.api import Log

_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS)


def root_of(args: argparse.Namespace) -> str:
    """Return the directory that was named."""
    if not args.root:
        raise InvalidConfigError("no log is named", todo="Use --root DIR, or set EMBEDLOG_ROOT")
    return os.path.abspath(os.path.expanduser(str(args.root)))


def is_log(root: str) -> bool:
    """Whether there is a log."""
    return os.path.isfile(os.path.join(root, FORMAT_FILE))


def to_read(args: argparse.Namespace) -> Log:
    """Open a log that exists, changing nothing."""
    import embedlog

    return embedlog.open(_existing(args), mode="r")


def to_write(args: argparse.Namespace, *, create: bool = False, durability: str = "os") -> Log:
    """Open a log to change it; only ``create`` makes one that is not there."""
    import embedlog

    root = root_of(args) if create else _existing(args)
    # A command deletes nothing that it was not asked to.
    return embedlog.open(root, durability=durability, maintenance=False)


def _existing(args: argparse.Namespace) -> str:
    root = root_of(args)
    if not os.path.isdir(root):
        raise NotALogError("there is no log here", path=root)
    if not is_log(root) and os.access(root, os.R_OK | os.X_OK):
        raise NotALogError("there is no log in this directory", path=root)
    return root


def to_follow(args: argparse.Namespace) -> Log:
    """Open a log to read it for long: attached, if this user may, else from outside."""
    try:
        return to_write(args)
    except StorageError as error:
        if error.errno not in _NOT_OURS:
            raise
        return to_read(args)
