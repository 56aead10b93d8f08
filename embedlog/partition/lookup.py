"""Where in the segments an offset or a time is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from embedlog import catalog, index
from embedlog.batch import Batch
from embedlog.batch.arrays import TRUE, number
from embedlog.catalog import SegmentInfo
from embedlog.errors import CorruptionError
from embedlog.partition.tail import Tail
from embedlog.record import OffsetAndTimestamp
from embedlog.segment import SegmentFile

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

_ANY_TIME = -(1 << 63)


def entries(log: PartitionLog, info: SegmentInfo) -> list[index.IndexEntry]:
    """Return the index of one segment, wherever it is kept; empty when it is lost."""
    if not info.sealed:
        return log.context.live.read(lambda txn: index.entries(txn, log.key, info.id))
    blob = log.context.state.read(lambda txn: catalog.index_blob(txn, log.key, info))
    return [] if blob is None else index.unpack(blob)


def searchable(log: PartitionLog, info: SegmentInfo) -> Sequence[index.IndexEntry]:
    """As `entries`, but nothing is unpacked that a search does not look at."""
    if not info.sealed:
        return entries(log, info)
    try:
        blob = log.context.state.read(lambda txn: catalog.index_blob(txn, log.key, info))
    except CorruptionError:
        blob = None  # A damaged index is a lost one: slower, and the same answers (B5).
    return index.SealedIndex(blob or b"")


def position_of_offset(log: PartitionLog, info: SegmentInfo, offset: int) -> int | None:
    """Return where to start reading for ``offset``; None for the segment's beginning."""
    if info.sealed:
        return index.position_of_offset(searchable(log, info), offset)
    return log.context.live.read(
        lambda txn: index.active_position_of_offset(txn, log.key, info.id, offset)
    )


def position_from_offset(log: PartitionLog, info: SegmentInfo, offset: int) -> int | None:
    """Return where the first indexed batch at or past ``offset`` begins; None if none is."""
    if info.sealed:
        return index.position_from_offset(searchable(log, info), offset)
    return log.context.live.read(
        lambda txn: index.active_position_from_offset(txn, log.key, info.id, offset)
    )


def offset_for_timestamp(log: PartitionLog, now: Tail, timestamp: int) -> OffsetAndTimestamp | None:
    """Return the first record in offset order at or after a time (B10)."""
    end = log.visible_end(now)
    for info in list(log.segments.values()):
        if not now.has_made(info):
            break
        latest = info.max_timestamp if info.sealed else now.timestamp
        if latest is None or latest < timestamp:
            continue
        if info.next_offset is not None and info.next_offset <= now.start_offset:
            continue
        file = log.open_segment(info)
        stop = info.end_position if info.sealed else now.high_watermark_position
        start = index.position_of_time(searchable(log, info), timestamp) or file.start
        for found in _records_at(file, start, stop, timestamp, now.start_offset):
            return found if found.offset < end else None
    return None


def record_at(log: PartitionLog, offset: int) -> OffsetAndTimestamp | None:
    """Return the first record at or after an offset, with its time; None at the end.

    Raises:
        OffsetOutOfRangeError: There is nothing there any more, or not yet.
        CorruptionError: Its batch is damaged.
    """
    reader = log.reader(offset)
    while batches := reader.read(1):
        for one in batches:
            for found in _in_batch(one, _ANY_TIME, offset):
                return found
    return None


def _records_at(
    file: SegmentFile, start: int, stop: int, timestamp: int, first: int
) -> Iterator[OffsetAndTimestamp]:
    for one in file.scan(start, stop):
        if one.max_timestamp >= timestamp and one.next_offset > first:
            yield from _in_batch(one, timestamp, first)


def _in_batch(one: Batch, timestamp: int, first: int) -> Iterator[OffsetAndTimestamp]:
    times = one.columns(["timestamp"]).column(0).cast(pa.int64())
    offsets = one.offsets()
    since, start = number(timestamp, pa.int64()), number(first, pa.int64())
    fits = pc.and_(pc.greater_equal(times, since), pc.greater_equal(offsets, start))
    row = pc.index(fits, TRUE[0]).as_py()
    if row >= 0:
        yield OffsetAndTimestamp(offsets[row].as_py(), times[row].as_py(), one.leader_epoch)
