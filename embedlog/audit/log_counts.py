"""What the log has: counted from the heads of its batches.

The head of a batch has its records, its smallest and largest timestamp and its producer.  The
columns of timestamps and offsets are read only of batches that span windows, or of which a part
is counted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection
from typing import Any

from embedlog.batch import CONTROL, Batch, count_windows
from embedlog.batch.time_windows import as_dict
from embedlog.batch.wire import BufferLayout
from embedlog.lazy import np
from embedlog.partition import PartitionLog

_READ_BYTES = 64 << 20
"""Read this much of a file at once: of large batches only the heads and two columns."""
_ALL = slice(None)

_Cell = tuple[int, int, int, int, int, int]
"""Its first offset, window, records, bytes, and the id and the epoch of its producer."""


def _columns(layout: BufferLayout) -> set[int]:
    """Return the columns of timestamps and offsets."""
    return {layout.time, len(layout.names) - 1} if layout.has_offsets else {layout.time}


def _arrays(batch: Batch) -> tuple[Any, Any]:
    """Return the offsets and the timestamps of a batch."""
    offsets, times = batch.offsets(), batch.timestamps()
    return tuple(
        np.frombuffer(column.buffers()[1], np.int64, batch.count, 8 * column.offset)
        for column in (offsets, times)
    )  # type: ignore[return-value]


class PartitionCounts:
    """The records of a partition by window and producer, in cells between given offsets.

    Args:
        log: The partition.
        width_ms: The width of a window.
        limits: The first window, and the one after the last; None for no limit.
        cuts: Offsets at which ranges begin or end that will be counted.
    """

    def __init__(
        self,
        log: PartitionLog,
        width_ms: int,
        limits: tuple[int | None, int | None],
        cuts: Collection[int],
    ) -> None:
        since, until = limits
        log.refresh()
        self.start = log.start_offset()
        """The first offset that the log has; retention deleted those before it."""
        # The first batch may begin below it.
        self._width_ms, self._cuts = width_ms, sorted({self.start, *cuts})
        cells: list[_Cell] = []
        reader = log.reader(max(self.start, _first_offset(log, since, width_ms)))
        while batches := reader.read(_READ_BYTES, columns=_columns):
            for batch in batches:
                if batch.count and not batch.flags & CONTROL:
                    self._add(cells, batch)
        self.end = reader.offset
        """The end of the log when it was counted."""
        cells = [cell for cell in cells if cell[0] >= self.start]
        if since is not None:
            cells = [cell for cell in cells if cell[1] >= since]
        if until is not None:
            cells = [cell for cell in cells if cell[1] < until]
        columns = zip(*cells, strict=True) if cells else [()] * 6
        self.first, self.window, self.records, self.size, self.producer_id, self.epoch = (
            np.array(column, np.int64) for column in columns
        )

    def _add(self, cells: list[_Cell], batch: Batch) -> None:
        base, stop, count = batch.base_offset, batch.next_offset, batch.count
        producer, epoch = batch.producer_id, batch.producer_epoch
        who = (-1, -1) if producer is None or epoch is None else (producer, epoch)
        window = batch.min_timestamp // self._width_ms
        cuts = self._cuts
        begin = bisect_right(cuts, base)
        whole = begin == len(cuts) or cuts[begin] >= stop
        if whole and batch.max_timestamp // self._width_ms == window:
            cells.append((base, window, count, batch.size, *who))
            return
        offsets, times = _arrays(batch)
        edges = [base, *cuts[begin : bisect_left(cuts, stop)], stop]
        rows = offsets.searchsorted(edges).tolist()
        for edge, row, end in zip(edges, rows, rows[1:], strict=False):
            if row < end:
                part = times[row:end]
                windows = count_windows(part, self._width_ms, int(part.min()), int(part.max()))
                for number, records in as_dict(windows).items():
                    cells.append((edge, number, records, batch.size * records // count, *who))

    def between(self, first: int, stop: int) -> slice:
        """Return the slice of cells between two of the given offsets."""
        return slice(*self.first.searchsorted((first, stop)).tolist())

    def by_window(self, cells: slice = _ALL, chosen: Any = None) -> dict[int, int]:
        """Return the records of cells by window.

        Args:
            cells: The cells.
            chosen: Which of them, as a numpy array of booleans; None for all.
        """
        windows, records = self.window[cells], self.records[cells]
        if chosen is not None:
            windows, records = windows[chosen], records[chosen]
        return sums(windows, records)

    def sizes(self, chosen: Any = _ALL) -> dict[int, int]:
        """Return the bytes of cells by window; of all, or of those that are chosen."""
        return sums(self.window[chosen], self.size[chosen])


def sums(windows: Any, values: Any) -> dict[int, int]:
    """Return the sum of the values of each window."""
    if not len(windows):
        return {}
    distinct, numbers = np.unique(windows, return_inverse=True)
    totals = np.zeros(len(distinct), np.int64)
    np.add.at(totals, numbers, values)
    return dict(zip(distinct.tolist(), totals.tolist(), strict=True))


def _first_offset(log: PartitionLog, since: int | None, width_ms: int) -> int:
    """Return where the first segment begins that may have records of a window or a later one."""
    if since is None:
        return 0
    base = 0
    for segment in log.segments.values():
        base = segment.base_offset
        newest = segment.max_timestamp
        if not segment.sealed or newest is None or newest // width_ms >= since:
            break
    return int(base)
