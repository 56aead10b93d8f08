"""Finding where in the segments an offset or a time is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from embedlog import index, keyspace, kv
from embedlog.batch import Batch
from embedlog.batch.arrays import number, true
from embedlog.catalog import SegmentInfo
from embedlog.errors import CorruptionError, StorageError
from embedlog.lazy import pa, pc
from embedlog.partition.tail import NO_TIME, Tail
from embedlog.record import OffsetAndTimestamp

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

# Offsets


def entries(log: PartitionLog, info: SegmentInfo) -> list[index.IndexEntry]:
    """Return the index of one segment, from `live` or `state`; empty if it is lost."""
    if info.sealed:
        return index.unpack(_packed(log, info))
    return log.context.live.read(lambda txn: index.entries(txn, log.key, info.id))


def searchable(log: PartitionLog, info: SegmentInfo) -> Sequence[index.IndexEntry]:
    """Return the index of one segment, which unpacks only the entries that a search reads."""
    if not info.sealed:
        return entries(log, info)
    try:
        return index.SealedIndex(_packed(log, info))
    except CorruptionError:
        return ()  # A damaged index counts as lost: slower, and the same answers (B5).


def _packed(log: PartitionLog, info: SegmentInfo) -> bytes:
    table, key = keyspace.SEGMENT_INDEXES, info.key
    return log.context.state.read(lambda txn: table.get(txn, log.key, *key)) or b""


def position_of_offset(log: PartitionLog, info: SegmentInfo, offset: int) -> int | None:
    """Return where to start reading for ``offset``; None for the segment's beginning."""
    return _search(log, info, offset, index.position_of_offset, index.active_position_of_offset)


def position_from_offset(log: PartitionLog, info: SegmentInfo, offset: int) -> int | None:
    """Return where the first indexed batch at or above ``offset`` begins; None if none does."""
    return _search(log, info, offset, index.position_from_offset, index.active_position_from_offset)


def _search(
    log: PartitionLog,
    info: SegmentInfo,
    target: int,
    sealed: Callable[[Sequence[index.IndexEntry], int], int | None],
    active: Callable[[kv.Txn, bytes, int, int], int | None],
) -> int | None:
    """Search an index: by ``sealed``, or, in rows of `live`, by its twin ``active``."""
    if info.sealed:
        return sealed(searchable(log, info), target)
    return log.context.live.read(lambda txn: active(txn, log.key, info.id, target))


# Times


def offset_for_timestamp(log: PartitionLog, timestamp: int) -> OffsetAndTimestamp | None:
    """Return the first record, in offset order, at or after ``timestamp`` ms."""
    while True:
        log.refresh()
        # The tail first: a segment that is rolled meanwhile then counts as sealed.
        tail = log.tail()
        log.refresh()
        version = log.snapshot_version
        try:
            return _first_at_time(log, tail, timestamp)
        except StorageError as error:
            # Compaction replaced the file, or retention deleted it during the lookup.
            if not error.missing:
                raise
            log.refresh()
            unchanged = log.tail().start_offset == tail.start_offset
            if unchanged and log.context.catalog.version() == version:
                raise


def _first_at_time(log: PartitionLog, tail: Tail, timestamp: int) -> OffsetAndTimestamp | None:
    end = log.visible_end(tail)
    for info in list(log.segments.values()):
        if not tail.has_made(info):
            break
        newest = info.max_timestamp if info.sealed else tail.timestamp
        if newest is None or newest < timestamp:
            continue
        if info.next_offset is not None and info.next_offset <= tail.start_offset:
            continue
        file = log.open_segment(info)
        stop = info.end_position if info.sealed else tail.high_watermark_position
        by_time = index.position_of_time, index.active_position_of_time
        start = _search(log, info, timestamp, *by_time) or file.start
        for batch in file.scan(start, stop):
            if batch.max_timestamp >= timestamp and batch.next_offset > tail.start_offset:
                record = first_record(batch, tail.start_offset, timestamp)
                if record is not None:
                    return record if record.offset < end else None
    return None


def first_record(batch: Batch, offset: int, timestamp: int = NO_TIME) -> OffsetAndTimestamp | None:
    """Return the first record of a batch at or above an offset and a time; None if it has none."""
    times = batch.timestamps().view(pa.int64())
    offsets = batch.offsets()
    since, start = number(timestamp, pa.int64()), number(offset, pa.int64())
    matches = pc.and_(pc.greater_equal(times, since), pc.greater_equal(offsets, start))
    row = pc.index(matches, true()[0]).as_py()
    if row < 0:
        return None
    return OffsetAndTimestamp(offsets[row].as_py(), times[row].as_py(), batch.leader_epoch)
