"""How many records of a batch are in which window of time: counted in columns."""

from __future__ import annotations

from typing import Any

from embedlog.batch import decompress
from embedlog.batch.arrays import in_ms
from embedlog.batch.encode import EncodedBatch
from embedlog.batch.wire import COMPRESSED, ENTRY, find_message, layout_of
from embedlog.lazy import np, pa

MINUTE_MS = 60_000

Windows = list[tuple[int, int]]
"""Windows by their number (their start divided by their width), and how many records are in each."""

_MAX_EMPTY = 4
"""Windows per record up to which all windows between the first and the last are counted."""


def count_windows(times: Any, width_ms: int) -> Windows:
    """Return how many of the times are in which window, without the empty ones.

    Args:
        times: A numpy array of milliseconds since 1970, not empty, in any order.
        width_ms: How many milliseconds a window has.
    """
    low, high, count = int(np.minimum.reduce(times)), int(np.maximum.reduce(times)), len(times)
    first, last = low // width_ms, high // width_ms
    if first == last:
        return [(first, count)]
    if last - first > _MAX_EMPTY * count:
        windows, counts = np.unique(times // width_ms, return_counts=True)
        return list(zip(windows.tolist(), counts.tolist(), strict=True))
    if last - first < count and (times[1:] >= times[:-1]).all():
        edges = np.arange(first + 1, last + 1) * width_ms
        counts = np.diff(times.searchsorted(edges), prepend=0, append=count)
    else:
        # An integer division takes several times as long.  The half keeps what is divisible from
        # being rounded down: the error of a product is smaller by many powers of ten.
        numbers = ((times - first * width_ms) + 0.5) * (1 / width_ms)
        counts = np.bincount(numbers.astype(np.int64))
    present = counts.nonzero()[0]
    return list(zip((present + first).tolist(), counts[present].tolist(), strict=True))


def windows_of(batch: EncodedBatch, append_time: int | None = None) -> int | Windows:
    """Return the minute of all records of a batch, or how many of them are in which minute.

    Args:
        batch: The batch.
        append_time: The log append time in ms, if the topic stamps records with it (A7).
    """
    if append_time is not None:
        return append_time // MINUTE_MS
    minute = batch.min_timestamp // MINUTE_MS
    if batch.max_timestamp // MINUTE_MS == minute:
        return minute
    return count_windows(_times(batch), MINUTE_MS)


def _times(batch: EncodedBatch) -> Any:
    """Return the timestamps of a batch in ms, as a numpy array."""
    layout = layout_of(batch.stored_schema())
    index, body = layout.time, batch.body
    if batch.flags & COMPRESSED:
        data = body[0] if len(body) == 1 else b"".join(body)
        buffer = data if isinstance(data, pa.Buffer) else pa.py_buffer(data)
        head = memoryview(batch.head)
        columns = decompress.columns(
            head, buffer, find_message(head), layout, (index,), batch.count
        )
        column = columns[0]
    else:
        # A column without nulls begins with its values, and that of the times has none.  If the
        # body is in several parts, the columns of a topic of bytes, the times come first.
        begin = ENTRY.unpack_from(batch.table, ENTRY.size * (index - 1))[0] if index else 0
        data = pa.py_buffer(body[0]).slice(begin, 8 * batch.count)
        column = pa.Array.from_buffers(layout.schema.field(index).type, batch.count, [None, data])
    if not layout.time_in_ms:
        column = in_ms(column)
    return np.frombuffer(column.buffers()[1], np.int64, batch.count, 8 * column.offset)
