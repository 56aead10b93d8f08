"""Opens the log of a command, waits for changes of it, and selects partitions and offsets in it."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import embedlog
from embedlog.errors import (
    InvalidConfigError,
    NotALogError,
    OffsetOutOfRangeError,
    StorageError,
)

# All else is imported in the functions: the help of a command needs none of it.
if TYPE_CHECKING:
    from datetime import datetime

    from embedlog.api import Log
    from embedlog.api.offset_range import OffsetRange
    from embedlog.api.topic import TopicView
    from embedlog.partition import Durability, PartitionLog

_WAIT_SECONDS = 60.0
_NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)


def root_of(args: argparse.Namespace) -> str:
    """Return the directory of the log."""
    if not args.root:
        raise InvalidConfigError(
            "No log directory was given", todo="Use --root DIR, or set EMBEDLOG_ROOT."
        )
    from embedlog.root.location import directory_of

    return directory_of(str(args.root))


def is_log(root: str) -> bool:
    """Whether a directory is a log."""
    from embedlog.files.paths import FORMAT_FILE

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
    from embedlog.files.paths import is_there

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
        # Read before the records: a change during the round ends the wait.
        seen = wake.value()
        yield
        if not follow:
            return
        wake.wait(seen, _WAIT_SECONDS)


# What arguments select


def partitions(log: Log, topic: str, numbers: list[int]) -> list[PartitionLog]:
    """Return the named partitions of a topic, without names all.

    Raises:
        UnknownTopicOrPartitionError: There is no such topic or partition.
    """
    return [log.partition(topic, n) for n in numbers or range(log.root.partitions(topic))]


def view_of(log: Log, topic: str, ranges: Sequence[OffsetRange]) -> TopicView[Any, Any]:
    """Return some records; those of a topic of bytes as they are stored."""
    from embedlog.api.topic import TopicView

    if log.root.topic(topic).schema_version:
        from embedlog.api.typed_topic import TypedTopicView

        return TypedTopicView(log.root, topic, ranges)
    return TopicView(log.root, topic, ranges, raw=True)


def first_at(partition: PartitionLog, time: datetime) -> tuple[int, int | None]:
    """Return the first offset at or after a time, and its timestamp; else the log end and None."""
    from embedlog.times import to_timestamp

    record = partition.offset_for_timestamp(to_timestamp(time))
    return (partition.end_offset(), None) if record is None else record[:2]


def offset_range(
    partition: PartitionLog, first: int | datetime | None, stop: int | datetime | None
) -> OffsetRange:
    """Return the offsets from a point to another one, as far as the log has them."""
    from embedlog.api.offset_range import OffsetRange

    start, end = partition.start_offset(), partition.end_offset()

    def offset(point: int | datetime | None, default: int) -> int:
        if not isinstance(point, int | None):
            return first_at(partition, point)[0]
        return default if point is None else min(max(point, start), end)

    begin = offset(first, start)
    return OffsetRange(partition.partition, begin, max(begin, offset(stop, end)))


def deletion_point(partition: PartitionLog, before: int | datetime) -> int:
    """Return the offset below which records are to be deleted.

    Raises:
        OffsetOutOfRangeError: It is past the log end.
    """
    start, end = partition.start_offset(), partition.end_offset()
    if not isinstance(before, int):
        return first_at(partition, before)[0]
    if before > end:
        raise OffsetOutOfRangeError(
            f"The log ends at {end}",
            topic=partition.topic,
            partition=partition.partition,
            offset=before,
            todo="Nothing was deleted.",
        )
    return max(before, start)
