"""The offsets of a view between two times, as Kafka looks up offsets by time."""

from __future__ import annotations

from collections.abc import Sequence

from embedlog.api.offset_range import OffsetRange
from embedlog.root.root import Root
from embedlog.times import When, milliseconds

Between = tuple[When, When]


def limit(
    root: Root,
    topic: str,
    ranges: Sequence[OffsetRange],
    since: When | None,
    between: Between | None,
) -> list[OffsetRange]:
    """Return the part of some ranges that a view from or between two times covers.

    In each partition that is from the first record at or after the start, up to the first
    record at or after the end.

    Raises:
        ValueError, TypeError: Both arguments are passed, or one is no time.
    """
    if since is not None and between is not None:
        raise ValueError("Pass since or between, not both")
    if between is not None and (not isinstance(between, tuple | list) or len(between) != 2):
        raise TypeError(f"between must be a pair of times, got {between!r}")
    start, end = between if between is not None else (since, None)
    now_ms = root.clock()
    bounds = [None if when is None else milliseconds(when, now_ms) for when in (start, end)]
    return [_limit_one(root, topic, part, *bounds) for part in ranges]


def _limit_one(
    root: Root, topic: str, part: OffsetRange, start_ms: int | None, end_ms: int | None
) -> OffsetRange:
    log = root.partition(topic, part.partition)

    def offset(time_ms: int) -> int:
        record = log.offset_for_timestamp(time_ms)
        return part.stop if record is None else min(max(record.offset, part.start), part.stop)

    start = part.start if start_ms is None else offset(start_ms)
    stop = part.stop if end_ms is None else offset(end_ms)
    return OffsetRange(part.partition, start, max(start, stop))
