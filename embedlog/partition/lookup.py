"""Finding where in the segments an offset, a time, a byte or the n-th record is."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from operator import attrgetter
from typing import TYPE_CHECKING, Concatenate, NamedTuple, ParamSpec

from embedlog import catalog, index, keyspace, kv
from embedlog.batch import Batch
from embedlog.batch.arrays import number, true
from embedlog.catalog import SegmentInfo
from embedlog.errors import CorruptionError, StorageError
from embedlog.lazy import pa, pc
from embedlog.partition.tail import NO_TIME, Tail
from embedlog.record import OffsetAndTimestamp

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

_FEW_ROWS = 256
"""Up to here Python finds a row of a batch as fast as Arrow, which need not be loaded then."""


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
    if batch.count <= _FEW_ROWS and not batch.has_offsets:
        first = max(offset - batch.base_offset, 0)
        for row, time in enumerate(batch.times()[first:], batch.base_offset + first):
            if time >= timestamp:
                return OffsetAndTimestamp(row, time, batch.leader_epoch)
        return None
    times = batch.timestamps().view(pa.int64())
    offsets = batch.offsets()
    since, start = number(timestamp, pa.int64()), number(offset, pa.int64())
    matches = pc.and_(pc.greater_equal(times, since), pc.greater_equal(offsets, start))
    row = pc.index(matches, true()[0]).as_py()
    if row < 0:
        return None
    return OffsetAndTimestamp(offsets[row].as_py(), times[row].as_py(), batch.leader_epoch)


# Bytes: which of which files hold a range of offsets, from manifest and index, no data read.  For
# programs that pass parts of a log to other processes, which map the files and use neither
# databases nor locks.


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

    Reads the index of at most two segments: those in which the range begins and ends.
    """
    begin = bisect_right(whole, first, key=attrgetter("stop"))
    parts = list(whole[begin : bisect_left(whole, stop, begin, key=attrgetter("first"))])
    if parts and parts[0].first < first:
        head = parts[0]
        position = position_of_offset(log, head.info, first) or 0
        parts[0] = head._replace(first=first, position=max(head.position, position))
    if parts and parts[-1].stop > stop:
        last = parts[-1]
        end = position_from_offset(log, last.info, stop) or last.end_position
        parts[-1] = last._replace(stop=stop, end_position=min(last.end_position, end))
    return parts


def offset_near(log: PartitionLog, extent: Extent, position: int, tolerance: int) -> int:
    """Return an offset whose record is about at a byte of an extent.

    If an indexed batch begins within ``tolerance`` bytes, this is its first offset, so that
    no two readers need the same batch; otherwise it is interpolated.
    """
    entries = searchable(log, extent.info)
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
            entries = searchable(log, extent.info)
            wanted = extent.position + max(max_bytes, 1)
            number = bisect_left(entries, wanted, key=attrgetter("position"))
            while number < len(entries) and entries[number].offset <= first:
                number += 1
            return min(entries[number].offset, stop) if number < len(entries) else stop
        max_bytes -= extent.size
    return stop


# Records: how many a range of offsets has, and which offset the n-th of them has.
#
# In a segment without gaps that is arithmetic.  The manifest says which segments have gaps,
# left by compaction, repair and copies.  For those, the record counts in the headers of
# their batches are read, and cached while the segment exists.


_READ_BYTES = 64 << 20
"""Scan this much of a mapped file at once: only the headers of batches are touched."""
_ATTEMPTS = 20
"""How often a count starts again because compaction or retention removes a file meanwhile."""


class SegmentCounts:
    """The published batches of a segment: their offsets, and how many records precede them."""

    def __init__(self, log: PartitionLog, info: SegmentInfo) -> None:
        self._log, self._info = log, info
        self._bases, self._stops = array("q"), array("q")
        self._before, self._positions = array("q"), array("q")
        self._records = 0
        self._end_position = 0
        """How far the file was scanned."""
        self._decoded: tuple[int, list[int]] = (-1, [])
        """The last batch whose offsets had to be read, and these offsets."""

    def extend(self, end_position: int) -> None:
        """Scan the batches that were not scanned yet, up to a position."""
        while self._end_position < end_position:
            batches = self._read(self._end_position, end_position, _READ_BYTES)
            if not batches:
                return  # an empty segment
            for batch in batches:
                self._bases.append(batch.base_offset)
                self._stops.append(batch.next_offset)
                self._positions.append(batch.position)
                self._before.append(self._records)
                self._records += batch.count
            self._end_position = batches[-1].position + batches[-1].size

    def count(self, first: int, stop: int) -> int:
        """Return how many records the offsets ``[first, stop)`` have."""
        return self.below(stop) - self.below(first)

    def below(self, offset: int) -> int:
        """Return how many records are below an offset."""
        number = bisect_right(self._stops, offset)
        if number == len(self._stops):
            return self._records
        count = self._before[number]
        if self._bases[number] < offset:
            count += bisect_left(self._offsets(number), offset)
        return count

    def offset(self, record: int) -> int:
        """Return the offset of a record, by its number."""
        # Empty batches have the same number before them as the next one: take the last.
        number = bisect_right(self._before, record) - 1
        return self._offsets(number)[record - self._before[number]]

    def _offsets(self, number: int) -> range | list[int]:
        base, stop = self._bases[number], self._stops[number]
        after = self._before[number + 1] if number + 1 < len(self._before) else self._records
        if after - self._before[number] == stop - base:
            return range(base, stop)
        if self._decoded[0] != number:
            batch = self._read(self._positions[number], self._end_position, 1)[0]
            self._decoded = number, batch.offsets().to_pylist()
        return self._decoded[1]

    def _read(self, position: int, stop: int, max_bytes: int) -> list[Batch]:
        file = self._log.open_shared(self._info)
        read = file.mapped if self._info.sealed else file.read
        return read(position or file.start, stop, max_bytes)


P = ParamSpec("P")


def _repeated(
    step: Callable[Concatenate[RecordCounts, P], int],
) -> Callable[Concatenate[RecordCounts, P], int]:
    """Run a method under the lock; again if compaction or retention removed a file meanwhile."""

    @wraps(step)
    def run(counts: RecordCounts, /, *args: P.args, **options: P.kwargs) -> int:
        with counts._lock:
            for _ in range(_ATTEMPTS - 1):
                try:
                    return step(counts, *args, **options)
                except StorageError as error:
                    if not error.missing:
                        raise
                    counts._version = -1
            return step(counts, *args, **options)

    return run


class RecordCounts:
    """Counts the records of one partition; for any thread."""

    def __init__(self, log: PartitionLog) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._version = -1
        self._with_gaps: list[SegmentInfo] = []
        self._segments: dict[tuple[int, int], SegmentCounts] = {}
        """By segment and leader epoch: the active segment may be truncated and grow again."""

    @_repeated
    def count(self, first: int, stop: int) -> int:
        """Return how many records the offsets ``[first, stop)`` have.

        Raises:
            CorruptBatchError: A batch is damaged, in a segment that has gaps.
        """
        missing = 0
        for segment, begin, end in self._parts(first, stop):
            missing += end - begin - segment.count(begin, end)
        return stop - first - missing

    @_repeated
    def after(self, first: int, stop: int, count: int) -> int:
        """Return the end of the first ``count`` records of a range; its end if it has fewer.

        Raises:
            CorruptBatchError: As `count`.
        """
        if not count:
            return first
        offset, left = first, count
        for segment, begin, end in self._parts(first, stop):
            if left <= begin - offset:
                break
            left -= begin - offset
            records = segment.count(begin, end)
            if left <= records:
                return segment.offset(segment.below(begin) + left - 1) + 1
            left, offset = left - records, end
        return min(offset + left, stop)

    @_repeated
    def before(self, first: int, stop: int, count: int) -> int:
        """Return where the last ``count`` records of a range begin; its start if it has fewer.

        Raises:
            CorruptBatchError: As `count`.
        """
        if not count:
            return stop
        offset, left = stop, count
        for segment, begin, end in self._parts(first, stop, backwards=True):
            if left <= offset - end:
                break
            left -= offset - end
            records = segment.count(begin, end)
            if left <= records:
                return segment.offset(segment.below(end) - left)
            left, offset = left - records, begin
        return max(offset - left, first)

    def _parts(
        self, first: int, stop: int, *, backwards: bool = False
    ) -> Iterator[tuple[SegmentCounts, int, int]]:
        """Yield the segments with gaps in a range, with the part of the range that they hold."""
        if first >= stop:
            return  # without a tail: a partition that was never written to stays as it is
        # The tail first: a segment that is rolled meanwhile then counts as sealed.
        tail = self._log.tail()
        segments = self._segments_with_gaps()
        for info in reversed(segments) if backwards else segments:
            end = stop if info.next_offset is None else min(stop, info.next_offset)
            begin = max(first, info.base_offset)
            if begin < end and tail.has_made(info):
                key = info.id, -1 if info.sealed else tail.leader_epoch
                segment = self._segments.setdefault(key, SegmentCounts(self._log, info))
                segment.extend(info.end_position if info.sealed else tail.high_watermark_position)
                yield segment, begin, end

    def _segments_with_gaps(self) -> list[SegmentInfo]:
        log = self._log
        log.refresh()
        if self._version != log.snapshot_version:
            version = log.snapshot_version
            self._with_gaps = log.context.state.read(
                lambda txn: catalog.gapped_segments(txn, log.key)
            )
            ids = {info.id for info in self._with_gaps}
            self._segments = {
                key: segment for key, segment in self._segments.items() if key[0] in ids
            }
            self._version = version
        return self._with_gaps
