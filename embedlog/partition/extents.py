"""Which bytes of which files hold a range of offsets: from manifest and index, no data read.

For those who hand parts of a log to other processes, which map the files and
know nothing of databases and locks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple

from embedlog import index
from embedlog.catalog import SegmentInfo
from embedlog.partition import lookup

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog


class Extent(NamedTuple):
    """The part of one segment that holds offsets ``[first, stop)``, and perhaps some around."""

    info: SegmentInfo
    path: str
    """From the root."""
    first: int
    stop: int
    position: int
    """Where to begin to read; 0 is the first batch, wherever that is."""
    end_position: int
    """Where to stop; batches end here."""

    @property
    def size(self) -> int:
        """How many bytes."""
        return max(self.end_position - self.position, 0)


def extents(log: PartitionLog, first: int, stop: int) -> list[Extent]:
    """Return where the offsets ``[first, stop)`` are, in order, as of now.

    What lies below the log's start is not there; nothing else is looked at.
    """
    # The tail first: a segment that is rolled after it is told as sealed.
    now = log.tail()
    log.refresh()
    found: list[Extent] = []
    info: SegmentInfo | None = log.segment_at(first) if first < stop else None
    while info is not None and info.base_offset < stop:
        if info.sealed:
            end, end_position = info.next_offset, info.end_position
        elif info.id == now.segment_id:
            end, end_position = now.high_watermark, now.high_watermark_position
        else:
            break  # younger than the tail, so past what was asked for
        assert end is not None
        if first < end:
            found.append(
                _extent(log, info, max(first, info.base_offset), min(stop, end), end, end_position)
            )
        info = log.segment_after(info)
    return found


def _extent(
    log: PartitionLog, info: SegmentInfo, first: int, stop: int, end: int, end_position: int
) -> Extent:
    position = None
    if first > info.base_offset:
        position = lookup.position_of_offset(log, info, first)
    if stop < end:
        end_position = lookup.position_from_offset(log, info, stop) or end_position
    return Extent(info, log.path_of(info), first, stop, position or 0, end_position)


def offset_near(log: PartitionLog, extent: Extent, position: int, reach: int) -> int:
    """Return an offset whose record is about at a byte of an extent.

    The beginning of an indexed batch if one is within ``reach`` bytes, so that
    no two readers need the same batch; else by interpolation.
    """
    known = lookup.searchable(log, extent.info)
    place = bisect_right(known, position, key=_position)
    before = (extent.first, extent.position)
    after = (extent.stop, extent.end_position)
    if place:
        before = max(before, known[place - 1][:2])
    if place < len(known):
        after = min(after, known[place][:2])
    for offset, there in sorted((before, after), key=lambda one: abs(one[1] - position)):
        if abs(there - position) <= reach and extent.first < offset < extent.stop:
            return offset
    span = max(after[1] - before[1], 1)
    return before[0] + (after[0] - before[0]) * (position - before[1]) // span


def end_within(log: PartitionLog, first: int, stop: int, max_bytes: int) -> int:
    """Return how far to read from ``first`` so that it is about ``max_bytes``.

    At least as far as the next indexed batch, at most up to ``stop``.
    """
    for extent in extents(log, first, stop):
        if extent.size > max_bytes:
            known = lookup.searchable(log, extent.info)
            place = bisect_left(known, extent.position + max(max_bytes, 1), key=_position)
            while place < len(known) and known[place].offset <= first:
                place += 1
            return min(known[place].offset, stop) if place < len(known) else stop
        max_bytes -= extent.size
    return stop


def _position(entry: index.IndexEntry) -> int:
    return entry.position
