"""How many records of a batch are in which window of time: counted in columns."""

from __future__ import annotations

from typing import Any

from embedlog.batch import compression
from embedlog.batch.arrays import in_ms
from embedlog.batch.encode import EncodedBatch
from embedlog.batch.wire import (
    COMPRESSED,
    ENTRY,
    EXPLICIT_OFFSETS,
    TYPED,
    bytes_layout,
    find_message,
    layout_of,
)
from embedlog.lazy import np, pa

MINUTE_MS = 60_000

Windows = list[tuple[int, Any]]
"""Runs of windows: the number of the first (its start divided by the width), and a numpy array of
how many records are in it and in those after it."""

_MAX_EMPTY = 4
"""Windows per record up to which all windows between the first and the last are counted."""
_SAMPLE = 512
_JOIN = 1024
"""Empty windows that may be between two runs that become one."""


def count_windows(times: Any, width_ms: int, low: int, high: int) -> Windows:
    """Return how many of the times are in which window.

    Args:
        times: A numpy array of milliseconds since 1970, not empty, in any order.
        width_ms: How many milliseconds a window has.
        low: The smallest time.
        high: The largest time.
    """
    first, last = low // width_ms, high // width_ms
    if last - first > _MAX_EMPTY * len(times):
        windows, counts = np.unique(times // width_ms, return_counts=True)
        return list(zip(windows.tolist(), counts.reshape(-1, 1), strict=True))
    if last - first < len(times) // 4 and _in_order(times[::_SAMPLE]) and _in_order(times):
        ends = times.searchsorted(np.arange(first + 1, last + 2) * width_ms)
        ends[1:] -= ends[:-1].copy()
        return [(first, ends)]
    numbers = times - first * width_ms
    return [(first, np.bincount(np.floor_divide(numbers, width_ms, out=numbers)))]


def _in_order(times: Any) -> bool:
    """Return whether times go up, as they usually do."""
    return bool((times[1:] >= times[:-1]).all())


def as_dict(windows: Windows) -> dict[int, int]:
    """Return the records of each window that has some."""
    result: dict[int, int] = {}
    for first, counts in windows:
        for row in counts.nonzero()[0].tolist():
            result[first + row] = result.get(first + row, 0) + int(counts[row])
    return result


def added(windows: Windows) -> Windows:
    """Return the sums of windows, as runs that do not overlap."""
    runs: list[list[Any]] = []
    for piece in sorted(windows, key=lambda run: run[0]):
        # Not only what overlaps: long runs are added up faster than many short ones.
        if runs and piece[0] <= runs[-1][1] + _JOIN:
            runs[-1][1] = max(runs[-1][1], piece[0] + len(piece[1]))
            runs[-1][2].append(piece)
        else:
            runs.append([piece[0], piece[0] + len(piece[1]), [piece]])
    result: Windows = []
    for first, stop, pieces in runs:
        total = np.zeros(stop - first, np.int64)
        for begin, counts in pieces:
            total[begin - first : begin - first + len(counts)] += counts
        result.append((first, total))
    return result


def windows_of(batch: EncodedBatch, append_time: int | None = None) -> int | Windows:
    """Return the minute of all records of a batch, or how many of them are in which minute.

    Args:
        batch: The batch.
        append_time: The log append time in ms, if the topic stamps records with it.
    """
    if append_time is not None:
        return append_time // MINUTE_MS
    low, high = batch.min_timestamp, batch.max_timestamp
    minute = low // MINUTE_MS
    if high // MINUTE_MS == minute:
        return minute
    return count_windows(_times(batch), MINUTE_MS, low, high)


def _times(batch: EncodedBatch) -> Any:
    """Return the timestamps of a batch in ms, as a numpy array."""
    body = batch.body
    if not batch.flags & (COMPRESSED | TYPED):
        # The times are the first column, and a column without nulls begins with its values.
        return np.frombuffer(body[0], np.int64, batch.count)
    layout = bytes_layout(batch.has_headers, bool(batch.flags & EXPLICIT_OFFSETS))
    if batch.flags & TYPED:
        layout = layout_of(batch.stored_schema())
    index = layout.time
    if batch.flags & COMPRESSED:
        data = body[0] if len(body) == 1 else b"".join(body)
        buffer = data if isinstance(data, pa.Buffer) else pa.py_buffer(data)
        head = memoryview(batch.head)
        columns = compression.columns(
            head, buffer, find_message(head), layout, (index,), batch.count
        )
        column = columns[0]
    else:
        begin = ENTRY.unpack_from(batch.table, ENTRY.size * (index - 1))[0] if index else 0
        data = pa.py_buffer(body[0]).slice(begin, 8 * batch.count)
        column = pa.Array.from_buffers(layout.schema.field(index).type, batch.count, [None, data])
    if not layout.time_in_ms:
        column = in_ms(column)
    return np.frombuffer(column.buffers()[1], np.int64, batch.count, 8 * column.offset)
