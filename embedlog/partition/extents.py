"""Which bytes of which files hold a range of offsets: from manifest and index, no data read.

For programs that pass parts of a log to other processes, which map the files and
use neither databases nor locks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from embedlog.catalog import SegmentInfo
from embedlog.partition import lookup

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog


class Extent(NamedTuple):
    """The part of one segment that holds offsets ``[first, stop)``, and perhaps some around."""

    info: SegmentInfo
    path: str
    """Relative to the root."""
    first: int
    stop: int
    position: int
    """Where to begin to read; 0 is the first batch, wherever that is."""
    end_position: int
    """Where to stop; batches end here."""

    @property
    def size(self) -> int:
        """How many bytes to read."""
        return max(self.end_position - self.position, 0)

    @property
    def dense(self) -> bool:
        """Whether each of its offsets has a record."""
        return self.info.dense


def size_bytes(log: PartitionLog) -> int:
    """Return how many bytes the partition's segment files have."""
    tail = log.tail()
    log.refresh()
    base = tail.base_offset
    older: int = sum(info.size for info in log.segments.values() if info.base_offset < base)
    return older + tail.high_watermark_position


def extents(log: PartitionLog, first: int, stop: int) -> list[Extent]:
    """Return where the offsets ``[first, stop)`` are now, in order.

    Offsets below the start of the log are left out; nothing else is checked.
    """
    # The tail first: a segment that is rolled meanwhile then counts as sealed.
    tail = log.tail()
    log.refresh()
    result: list[Extent] = []
    for info in log.segments_between(first, stop):
        # A segment without a file was begun after the tail was read, so it is above the range.
        if not tail.has_made(info):
            break
        end, end_position = info.next_offset, info.end_position
        if end is None:
            end, end_position = tail.high_watermark, tail.high_watermark_position
        result.append(Extent(info, log.path_of(info), info.base_offset, end, 0, end_position))
    return narrow(log, result, first, stop)


def narrow(log: PartitionLog, whole: Sequence[Extent], first: int, stop: int) -> list[Extent]:
    """Return the parts of extents that hold the offsets ``[first, stop)``.

    Reads the index of at most two segments: those that the range cuts.
    """
    begin = bisect_right(whole, first, key=attrgetter("stop"))
    parts = list(whole[begin : bisect_left(whole, stop, begin, key=attrgetter("first"))])
    if parts and parts[0].first < first:
        head = parts[0]
        position = lookup.position_of_offset(log, head.info, first) or 0
        parts[0] = head._replace(first=first, position=max(head.position, position))
    if parts and parts[-1].stop > stop:
        last = parts[-1]
        end = lookup.position_from_offset(log, last.info, stop) or last.end_position
        parts[-1] = last._replace(stop=stop, end_position=min(last.end_position, end))
    return parts


def offset_near(log: PartitionLog, extent: Extent, position: int, tolerance: int) -> int:
    """Return an offset whose record is about at a byte of an extent.

    If an indexed batch begins within ``tolerance`` bytes, this is its first offset, so that
    no two readers need the same batch; otherwise it is interpolated.
    """
    entries = lookup.searchable(log, extent.info)
    number = bisect_right(entries, position, key=attrgetter("position"))
    before = (extent.first, extent.position)
    after = (extent.stop, extent.end_position)
    if number:
        before = max(before, entries[number - 1][:2])
    if number < len(entries):
        after = min(after, entries[number][:2])
    for offset, batch_position in sorted((before, after), key=lambda end: abs(end[1] - position)):
        close = abs(batch_position - position) <= tolerance
        if close and extent.first < offset < extent.stop:
            return offset
    span = max(after[1] - before[1], 1)
    return before[0] + (after[0] - before[0]) * (position - before[1]) // span


def end_within(log: PartitionLog, first: int, stop: int, max_bytes: int) -> int:
    """Return how far to read from ``first`` so that it is about ``max_bytes``.

    At least as far as the next indexed batch, at most up to ``stop``.
    """
    for extent in extents(log, first, stop):
        if extent.size > max_bytes:
            entries = lookup.searchable(log, extent.info)
            wanted = extent.position + max(max_bytes, 1)
            number = bisect_left(entries, wanted, key=attrgetter("position"))
            while number < len(entries) and entries[number].offset <= first:
                number += 1
            return min(entries[number].offset, stop) if number < len(entries) else stop
        max_bytes -= extent.size
    return stop
