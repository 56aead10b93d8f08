"""How many records a range of offsets has, and which offset the n-th of them has.

In a segment without gaps that is arithmetic; the manifest names the segments that have
gaps (compaction, repair and mirrors leave them).  Of those the headers of the batches
are read, which say how many records each batch has, and cached while the segment exists.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple

from embedlog import catalog
from embedlog.batch import Batch
from embedlog.catalog import SegmentInfo
from embedlog.errors import StorageError
from embedlog.partition.recovery import current_tail
from embedlog.partition.state import PartitionState
from embedlog.partition.tail import Tail
from embedlog.segment import SegmentFile

_READ_BYTES = 64 << 20
"""How much of a mapped file is scanned at once: only the headers of batches are touched."""
_ATTEMPTS = 20
"""How often a count starts again because compaction or retention removes a file meanwhile."""


class SegmentBatches:
    """The published batches of a segment; its file is opened when a batch is read."""

    def __init__(self, log: PartitionState, info: SegmentInfo, tail: Tail) -> None:
        self._log, self._info = log, info
        self.end_position = info.end_position if info.sealed else tail.high_watermark_position
        self._file: SegmentFile | None = None

    def _open(self) -> SegmentFile:
        if self._file is None:
            active = None if self._info.sealed else self._log.open_active(self._info.id)
            self._file = active or self._log.open_segment(self._info)
        return self._file

    @property
    def start(self) -> int:
        """Where the first batch begins."""
        return self._open().start

    def read(self, position: int, max_bytes: int) -> list[Batch]:
        """Return batches from a position on, at least one."""
        file = self._open()
        read = file.mapped if self._info.sealed else file.read
        return read(position, self.end_position, max_bytes)


class SegmentCounts:
    """The batches of one segment: their offsets, and how many records are before each."""

    def __init__(self) -> None:
        self._bases, self._stops = array("q"), array("q")
        self._before, self._positions = array("q"), array("q")
        self._records = 0
        self._position = 0
        """How far the file was scanned."""
        self._decoded: tuple[int, list[int]] = (-1, [])
        """The last batch whose offsets had to be read, and these offsets."""

    def extend(self, file: SegmentBatches) -> None:
        """Scan the batches that were not scanned yet."""
        while self._position < file.end_position:
            batches = file.read(self._position or file.start, _READ_BYTES)
            if not batches:
                return  # an empty segment
            for batch in batches:
                self._bases.append(batch.base_offset)
                self._stops.append(batch.next_offset)
                self._positions.append(batch.position)
                self._before.append(self._records)
                self._records += batch.count
            self._position = batches[-1].position + batches[-1].size

    def below(self, file: SegmentBatches, offset: int) -> int:
        """Return how many records are below an offset."""
        number = bisect_right(self._stops, offset)
        if number == len(self._stops):
            return self._records
        count = self._before[number]
        if self._bases[number] < offset:
            count += bisect_left(self._offsets(file, number), offset)
        return count

    def offset(self, file: SegmentBatches, record: int) -> int:
        """Return the offset of a record, by its number."""
        # Empty batches have the same number before them as the next one: take the last.
        number = bisect_right(self._before, record) - 1
        return self._offsets(file, number)[record - self._before[number]]

    def _offsets(self, file: SegmentBatches, number: int) -> range | list[int]:
        base, stop = self._bases[number], self._stops[number]
        after = self._before[number + 1] if number + 1 < len(self._before) else self._records
        if after - self._before[number] == stop - base:
            return range(base, stop)
        if self._decoded[0] != number:
            batch = file.read(self._positions[number], 1)[0]
            self._decoded = number, batch.offsets().to_pylist()
        return self._decoded[1]


class CountedRange(NamedTuple):
    """The offsets ``[first, stop)`` of a segment with gaps."""

    segment: SegmentCounts
    file: SegmentBatches
    first: int
    stop: int

    @property
    def records(self) -> int:
        """How many records the range has."""
        below = self.segment.below
        return below(self.file, self.stop) - below(self.file, self.first)

    def after(self, count: int) -> int:
        """Return the offset after its first ``count`` records, at least one."""
        record = self.segment.below(self.file, self.first) + count - 1
        return self.segment.offset(self.file, record) + 1

    def before(self, count: int) -> int:
        """Return the offset of the first of its last ``count`` records, at least one."""
        return self.segment.offset(self.file, self.segment.below(self.file, self.stop) - count)


class RecordCounts:
    """Counts the records of one partition; for any thread."""

    def __init__(self, log: PartitionState) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._version = -1
        self._with_gaps: list[SegmentInfo] = []
        self._segments: dict[tuple[int, int], SegmentCounts] = {}
        """By segment and leader epoch: the active segment may be truncated and grow again."""

    def count(self, first: int, stop: int) -> int:
        """Return how many records the offsets ``[first, stop)`` have.

        Raises:
            CorruptBatchError: A batch is damaged, in a segment that has gaps.
        """

        def count() -> int:
            parts = self._parts(first, stop)
            missing = sum(part.stop - part.first - part.records for part in parts)
            return stop - first - missing

        return self._repeat(count)

    def after(self, first: int, stop: int, count: int) -> int:
        """Return the end of the first ``count`` records of a range; its end if it has fewer.

        Raises:
            CorruptBatchError: As `count`.
        """

        def after() -> int:
            offset, left = first, count
            for part in self._parts(first, stop):
                if left <= part.first - offset:
                    break
                left -= part.first - offset
                if left <= (records := part.records):
                    return part.after(left)
                left, offset = left - records, part.stop
            return min(offset + left, stop)

        return self._repeat(after) if count else first

    def before(self, first: int, stop: int, count: int) -> int:
        """Return where the last ``count`` records of a range begin; its start if it has fewer.

        Raises:
            CorruptBatchError: As `count`.
        """

        def before() -> int:
            offset, left = stop, count
            for part in self._parts(first, stop, backwards=True):
                if left <= offset - part.stop:
                    break
                left -= offset - part.stop
                if left <= (records := part.records):
                    return part.before(left)
                left, offset = left - records, part.first
            return max(offset - left, first)

        return self._repeat(before) if count else stop

    def _repeat(self, step: Callable[[], int]) -> int:
        """Run a step; again if compaction or retention removed a file meanwhile."""
        with self._lock:
            for attempt in range(_ATTEMPTS):
                try:
                    return step()
                except StorageError as error:
                    if not error.missing or attempt == _ATTEMPTS - 1:
                        raise
                    self._version = -1
        raise AssertionError("unreachable")

    def _parts(self, first: int, stop: int, *, backwards: bool = False) -> Iterator[CountedRange]:
        """Yield the parts of a range that are in segments with gaps."""
        # The tail first: a segment that is rolled after it is looked at as sealed.
        tail = current_tail(self._log)
        segments = self._segments_with_gaps() if first < stop else []
        for info in reversed(segments) if backwards else segments:
            end = stop if info.next_offset is None else min(stop, info.next_offset)
            begin = max(first, info.base_offset)
            if begin < end and tail.has_made(info):
                yield self._part(info, tail, begin, end)

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

    def _part(self, info: SegmentInfo, tail: Tail, first: int, stop: int) -> CountedRange:
        key = info.id, -1 if info.sealed else tail.leader_epoch
        segment = self._segments.setdefault(key, SegmentCounts())
        file = SegmentBatches(self._log, info, tail)
        segment.extend(file)
        return CountedRange(segment, file, first, stop)
