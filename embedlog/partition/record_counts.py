"""How many records a range of offsets has, and which offset the n-th of them has.

In a segment without gaps that is arithmetic.  The manifest says which segments have gaps,
left by compaction, repair and copies.  For those, the record counts in the headers of
their batches are read, and cached while the segment exists.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec

from embedlog import catalog
from embedlog.batch import Batch
from embedlog.catalog import SegmentInfo
from embedlog.errors import StorageError

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

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
