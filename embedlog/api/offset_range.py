"""Ranges of offsets, of which a view of a topic consists, and the files with their records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from embedlog.partition.lookup import extents
from embedlog.root.root import Root


class OffsetRange(NamedTuple):
    """Offsets ``[start, stop)`` of one partition."""

    partition: int
    start: int
    stop: int


class TopicFile(NamedTuple):
    """A segment file: an Arrow IPC stream, of which the first bytes are part of the log."""

    path: str
    partition: int
    base_offset: int
    """The offset of the first row, unless the file has a column of offsets."""
    start_offset: int
    """The first offset to read: the file may begin with records that were deleted."""
    end_offset: int
    """The offset after the last one to read."""
    size: int
    """How many bytes to read, of batches and the schema before them.

    The file that is appended to may have more: records that are not committed yet.
    """


def topic_files(root: Root, topic: str, ranges: Sequence[OffsetRange]) -> Iterator[TopicFile]:
    """Yield the files with the records of some ranges, in order; a partition's at one instant."""
    for part in ranges:
        if part.start >= part.stop:
            continue
        log = root.partition(topic, part.partition)
        for extent in extents(log, part.start, part.stop):
            yield TopicFile(
                root.context.files.path(extent.path),
                part.partition,
                extent.info.base_offset,
                max(extent.first, part.start),
                min(extent.stop, part.stop),
                extent.end_position,
            )
