"""Space ahead of the log end, so that a flush of a small append commits no journal.

An append that extends its file changes the file's size, so each ``fdatasync`` has to commit the
journal of the file system, which takes longer than to write the record.  So an append that is
flushed first writes zeros ahead of the end, and those after it overwrite them.  (Space that
``fallocate`` reserves helps less: the first write to each of its blocks is committed, too.)

Zeros behind the tail mean nothing: a batch, like an end mark, begins with other bytes.  Recovery
and rolls truncate them, and Arrow takes them for the end of the stream.  So they need no order of
writes, and no note of how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING

from embedlog.batch import EncodedBatch
from embedlog.errors import DiskFullError, EmbedlogError
from embedlog.partition.tail import Tail, peek_tail
from embedlog.segment import MOST_AHEAD, SegmentFile

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

LEAST_AHEAD = 64 << 10
"""Bytes ahead of the end: as many as the file has, at least so many, at most `MOST_AHEAD`."""
_LARGE = 4
"""A batch of more than a quarter of that gains nothing: it would be written twice."""
_SHARE = 64
"""At most this part of the free space is taken."""

_SIZE = attrgetter("size")


def extend(
    log: PartitionLog, file: SegmentFile, tail: Tail, encoded: Sequence[EncodedBatch]
) -> None:
    """Write zeros ahead, unless batches fit in those that are there.

    Under the partition's lock, after `PartitionLog.file_at`.  Does nothing for a large append,
    for one that begins another segment, and on a disk that is nearly full.

    Raises:
        StorageError: The disk refuses it, for another reason than that it is full.
    """
    files, end, size = log.context.files, tail.log_end_position, sum(map(_SIZE, encoded))
    if size <= log.preallocated or not files.preallocates:
        return
    present = end + log.preallocated
    ahead = min(max(end, LEAST_AHEAD), MOST_AHEAD)
    stop = min(end + ahead, file.start + log.config.segment_bytes)
    if end + size > stop or size * _LARGE > ahead or ahead * _SHARE > files.free_bytes():
        return
    try:
        file.write([bytes(stop - present)], present)
    except DiskFullError:
        file.truncate(present)


def give_back(log: PartitionLog) -> bool:
    """Truncate what is preallocated in the whole log, on a full disk; return whether any was.

    Must be called without the lock of a partition.  Leaves out partitions that are in use.
    """
    context, given = log.context, False
    if context.files.preallocates:
        for topic in context.catalog.topics().values():
            for partition in range(topic.partitions):
                with suppress(EmbedlogError):
                    given |= _give_back(type(log)(context, topic, partition))
    return given


def _give_back(log: PartitionLog) -> bool:
    # One that this boot has not recovered has nothing, or costs a scan.
    if peek_tail(log.context.live, log.key) is None:
        return False
    try:
        with log.owned(timeout=0) as tail:
            file = log.file_at(tail)
            given = file.size() > tail.log_end_position
            if given:
                file.truncate(tail.log_end_position)
            return given
    finally:
        log.close_files_locked()
