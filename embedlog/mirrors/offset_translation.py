"""Which offset a record of a log got in Kafka: kept exactly, by runs of records.

A mirror writes an `OffsetSync` for each of its transactions, as a part of it, to a topic of its
own.  A run is a stretch of consecutive offsets of the source whose records got consecutive
offsets; Kafka's markers of transactions, and gaps at the source, end one.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

_RUN = struct.Struct("<qqq")
_START = struct.Struct("<Bq")
_VERSION = 1
MOST_RUNS = 20_000
"""Of one sync, which is a message of at most 480 KB."""


class OffsetRun(NamedTuple):
    """Records with consecutive offsets on both sides."""

    source_offset: int
    target_offset: int
    records: int


class OffsetSync(NamedTuple):
    """What a transaction of a mirror did in a partition."""

    start: int
    """The offset of the source up to which earlier transactions came; what is between it and
    the first run has no record."""
    runs: Sequence[OffsetRun]

    def pack(self) -> bytes:
        """Return it as the value of a message."""
        runs = b"".join(_RUN.pack(*run) for run in self.runs)
        return _START.pack(_VERSION, self.start) + zlib.compress(runs, 1)

    @classmethod
    def unpack(cls, value: bytes) -> OffsetSync | None:
        """Inverse of `pack`; None if a later version packed it."""
        version, start = _START.unpack_from(value)
        if version != _VERSION:
            return None
        runs = _RUN.iter_unpack(zlib.decompress(value[_START.size :]))
        return cls(start, [OffsetRun(*run) for run in runs])

    def parts(self) -> Iterator[OffsetSync]:
        """Yield it as several that are small enough for a message."""
        start = self.start
        for first in range(0, max(len(self.runs), 1), MOST_RUNS):
            runs = self.runs[first : first + MOST_RUNS]
            yield OffsetSync(start, runs)
            if runs:
                start = runs[-1].source_offset + runs[-1].records


def stretches(offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the stretches of indexes without gaps between their offsets.

    >>> list(stretches([5, 6, 9]))
    [(0, 2), (2, 3)]
    """
    begin = 0
    for number, (before, offset) in enumerate(pairwise(offsets), 1):
        if offset != before + 1:
            yield begin, number
            begin = number
    yield begin, len(offsets)


def runs_of(source_offsets: Sequence[int], target_offset: int) -> Iterator[OffsetRun]:
    """Yield the runs of records that got consecutive offsets.

    >>> [tuple(run) for run in runs_of([5, 6, 9], 100)]
    [(5, 100, 2), (9, 102, 1)]
    """
    for begin, stop in stretches(source_offsets):
        yield OffsetRun(source_offsets[begin], target_offset + begin, stop - begin)


class OffsetTranslation:
    """The runs of one partition, in the order in which they were written."""

    def __init__(self) -> None:
        self._starts, self._sources = array("q"), array("q")
        self._targets, self._counts = array("q"), array("q")

    def add(self, sync: OffsetSync) -> None:
        """Add the runs of the next transaction."""
        start = sync.start
        if self._sources and start < self._sources[-1] + self._counts[-1]:
            # The topic was copied again from an earlier offset on.
            keep = bisect_left(self._sources, start)
            for column in (self._starts, self._sources, self._targets, self._counts):
                del column[keep:]
        for source, target, count in sync.runs:
            if self._sources and self._joins(start, source, target):
                self._counts[-1] += count
            else:
                self._starts.append(start)
                self._sources.append(source)
                self._targets.append(target)
                self._counts.append(count)
            start = source + count

    def _joins(self, start: int, source: int, target: int) -> bool:
        end = self._sources[-1] + self._counts[-1]
        return start == source == end and target == self._targets[-1] + self._counts[-1]

    def translate(self, offset: int) -> int | None:
        """Translate the position of a reader from the source's offset; None if unknown."""
        number = bisect_right(self._starts, offset) - 1
        if number < 0:
            return None
        source, count = self._sources[number], self._counts[number]
        if offset <= source:
            return self._targets[number]
        if offset < source + count:
            return self._targets[number] + offset - source
        # At the end of what was copied, or between two transactions of which one is not known.
        is_last = number == len(self._starts) - 1
        return self._targets[number] + count if is_last else None
