"""The rate of records over time, as a picture."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from embedlog.display import need
from embedlog.times import parse_duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WINDOWS = (
    *(1, 10, 100, 1000, 5000, 10_000, 30_000),
    *(60_000 * minutes for minutes in (1, 5, 10, 30, 60, 360, 1440, 10_080)),
)
"""Lengths of a window in ms to choose from."""
_MOST_WINDOWS = 200
_MOST_ROWS = 100_000
"""A window that makes more rows than this is refused."""


def records_per_window(
    timestamps: pa.ChunkedArray, window: timedelta | str | None
) -> tuple[list[int], list[int], int]:
    """Count records per window of time.

    Returns the starts of the windows in ms since 1970 (of all windows from the first record
    to the last one, also of empty ones), the number of records in each, and the length in ms.

    Raises:
        ValueError: The window is no positive duration, or there are too many windows.
    """
    times = timestamps.cast(pa.int64())
    if not len(times):
        return [], [], _length(window) if window is not None else _WINDOWS[0]
    bounds = pc.min_max(times)
    first, last = bounds["min"].as_py(), bounds["max"].as_py()
    if window is None:
        enough = (last - first) / _MOST_WINDOWS
        length = next((length for length in _WINDOWS if length >= enough), _WINDOWS[-1])
    else:
        length = _length(window)
    if (last - first) // length >= _MOST_ROWS:
        raise ValueError(
            f"A window of {length} ms makes more than {_MOST_ROWS:,} windows; pass a longer one, "
            "or a shorter time with since= or between="
        )
    numbers = pc.divide(pc.subtract(times, first - first % length), length)
    counts = [0] * ((last - first + first % length) // length + 1)
    for row in pc.value_counts(numbers).to_pylist():
        counts[row["values"]] = row["counts"]
    start = first - first % length
    return [start + length * number for number in range(len(counts))], counts, length


def _length(window: timedelta | str) -> int:
    duration = parse_duration(window) if isinstance(window, str) else window
    length = duration // timedelta(milliseconds=1) if isinstance(duration, timedelta) else 0
    if length < 1:
        raise ValueError(f"window must be a duration such as 1m or 30s, got {window!r}")
    return length


def plot_rate(
    title: str, timestamps: pa.ChunkedArray, window: timedelta | str | None, axes: Axes | None
) -> Axes:
    """Draw how many records there are per window of time; return the axes."""
    starts, counts, length = records_per_window(timestamps, window)
    need("matplotlib")
    chart: Any = axes if axes is not None else need("matplotlib.pyplot").subplots()[1]
    if starts:
        # The last window ends where the next one would begin.
        edges = pa.array([*starts, starts[-1] + length], pa.timestamp("ms"))
        moments = edges.to_numpy(zero_copy_only=False)
        heights = [*counts, counts[-1]]
        chart.step(moments, heights, where="post")
        chart.fill_between(moments, heights, step="post", alpha=0.3)
        dates = need("matplotlib.dates")
        chart.xaxis.set_major_formatter(dates.ConciseDateFormatter(chart.xaxis.get_major_locator()))
    else:
        # The axes would show times around 1970.
        chart.plot([], [])
        chart.set_xticks([])
    chart.set_ylim(bottom=0)
    chart.set_title(title)
    chart.set_ylabel(f"records per {_in_units(length)}")
    return chart  # type: ignore[no-any-return]


def _in_units(length_ms: int) -> str:
    units = {"d": 86_400_000, "h": 3_600_000, "min": 60_000, "s": 1000, "ms": 1}
    unit = next(name for name, milliseconds in units.items() if length_ms % milliseconds == 0)
    return f"{length_ms // units[unit]} {unit}"
