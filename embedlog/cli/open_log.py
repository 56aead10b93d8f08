"""Opens the log of a command, and waits for changes of it."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import embedlog
from embedlog.errors import InvalidConfigError, NotALogError, StorageError
from embedlog.files.paths import FORMAT_FILE, is_there
from embedlog.root.location import directory_of

if TYPE_CHECKING:
    from embedlog.api import Log
    from embedlog.partition import Durability

_WAIT_SECONDS = 60.0
_NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)


def root_of(args: argparse.Namespace) -> str:
    """Return the directory of the log."""
    if not args.root:
        raise InvalidConfigError(
            "No log directory was given", todo="Use --root DIR, or set EMBEDLOG_ROOT."
        )
    return directory_of(str(args.root))


def is_log(root: str) -> bool:
    """Whether a directory is a log."""
    return os.path.isfile(os.path.join(root, FORMAT_FILE))


def to_read(args: argparse.Namespace) -> Log:
    """Open an existing log read-only."""
    return embedlog.open(existing(args), mode="r")


def to_write(
    args: argparse.Namespace, *, create: bool = False, durability: Durability = "os"
) -> Log:
    """Open a log for writing; create it only with ``create``."""
    root = root_of(args) if create and not args.must_exist else existing(args)
    # Without maintenance, so that a command deletes nothing on its own.
    return embedlog.open(
        root, durability=durability, maintenance=False, must_exist=not create or args.must_exist
    )


@contextmanager
def existing_topic(log: Log, name: str) -> Iterator[bool]:
    """Create a topic if there is none, and yield whether there was none.

    After an error it is deleted again if it is new, and still empty.
    """
    is_new = name not in log
    log.root.ensure_topic(name)
    try:
        yield is_new
    except BaseException:
        if is_new and not any(part.stop for part in log.topic(name).ranges()):
            log.delete_topic(name)
        raise


def existing(args: argparse.Namespace) -> str:
    """Return the directory of the log; raise `NotALogError` if there is none."""
    root = root_of(args)
    if not (is_there(root) and os.path.isdir(root)):
        raise NotALogError("There is no such directory", path=root)
    if not is_log(root) and os.access(root, os.R_OK | os.X_OK):
        raise NotALogError("There is no log in this directory", path=root)
    return root


def to_follow(args: argparse.Namespace) -> Log:
    """Open a log to read it for long: attached if this user may write, else read-only."""
    try:
        return to_write(args)
    except StorageError as error:
        if error.errno not in _NO_PERMISSION:
            raise
        return to_read(args)


def rounds(log: Log, *, follow: bool) -> Iterator[None]:
    """Yield once; with ``follow`` also after each change of the log, without an end."""
    wake = log.root.wake
    if follow:
        wake.join()
    while True:
        # Read before the records: a change during the round ends the wait at once.
        seen = wake.value()
        yield
        if not follow:
            return
        wake.wait(seen, _WAIT_SECONDS)
