"""What the settings ask to delete: pure functions of the segments of a partition."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple, TypeVar

from embedlog.catalog import SegmentInfo
from embedlog.config import TopicConfig
from embedlog.partition.tail import Tail

Key = TypeVar("Key")


class RetainedSegment(NamedTuple):
    """A segment as retention sees it; it is deleted entirely or not at all."""

    base_offset: int
    next_offset: int
    size: int
    timestamp: int | None
    """The time from which `retention.ms` counts; None if unknown, so the segment is kept."""
    active: bool = False
    future: bool = False
    """Whether the youngest record has a timestamp in the future."""
    by_append: bool = False
    """Whether `timestamp` is the time of the last append, not that of the youngest record."""
    uncertain: bool = False
    """Whether the time of the last append is unknown, or later than now."""


def retained_segments(
    segments: Sequence[SegmentInfo], tail: Tail, now_ms: int, clock: str = "append"
) -> list[RetainedSegment]:
    """Return the segments that hold records, in offset order.

    Args:
        segments: The manifest, read after the tail.
        tail: The tail.
        now_ms: The time.
        clock: The topic's ``retention.clock``.
    """
    retained = []
    sealed_ms: int | None = None
    for info in reversed(segments):
        if info.sealed:
            retained.append(retained_segment(info, now_ms, clock, sealed_ms))
        elif (
            info.id == tail.segment_id
            and not tail.empty
            and tail.high_watermark == tail.log_end_offset
        ):
            retained.append(retained_segment(up_to_tail(info, tail), now_ms, clock, active=True))
        # It was created when the segment before it was sealed, so no record there is younger.
        if 0 < info.created_ms <= now_ms:
            sealed_ms = info.created_ms
    return retained[::-1]


def up_to_tail(active: SegmentInfo, tail: Tail) -> SegmentInfo:
    """Return the active segment with what the manifest has of sealed ones only."""
    return active._replace(
        next_offset=tail.log_end_offset,
        size=tail.high_watermark_position,
        max_timestamp=tail.timestamp,
        appended_ms=tail.appended_ms,
    )


def retained_segment(
    info: SegmentInfo, now_ms: int, clock: str, sealed_ms: int | None = None, active: bool = False
) -> RetainedSegment:
    """Return a segment with the time from which `retention.ms` counts.

    With ``append`` that is the last append, or the largest timestamp if later; with
    ``record`` the largest timestamp.  If the records have no timestamp, or one in the
    future, the last append counts: otherwise one wrong clock would keep all segments after
    it for ever.  If the time of the append is impossible, that of the sealing counts.

    Args:
        info: The segment; the active one as `up_to_tail` returns it.
        now_ms: The time.
        clock: The topic's ``retention.clock``.
        sealed_ms: When it was sealed, or a later segment was created; None if unknown.
        active: Whether it is the active segment.
    """
    assert info.next_offset is not None
    record_ms, append_ms = info.max_timestamp, info.appended_ms
    future = record_ms is not None and record_ms > now_ms
    if record_ms is not None and not 0 <= record_ms <= now_ms:
        record_ms = None
    uncertain = not 0 < append_ms <= now_ms
    appended_ms = sealed_ms if uncertain else append_ms
    by_append = record_ms is None or (
        clock == "append" and (appended_ms is None or appended_ms > record_ms)
    )
    timestamp = appended_ms if by_append else record_ms
    return RetainedSegment(
        *(info.base_offset, info.next_offset, info.size, timestamp),
        *(active, future, by_append, uncertain),
    )


def count_by_size(segments: Sequence[RetainedSegment], retention_bytes: int) -> int:
    """Return how many of the oldest to delete so that at least this many bytes stay."""
    if retention_bytes < 0:
        return 0
    excess, count = sum(segment.size for segment in segments) - retention_bytes, 0
    while count < len(segments) and excess >= segments[count].size:
        excess -= segments[count].size
        count += 1
    return count


def count_by_time(segments: Sequence[RetainedSegment], retention_ms: int, now_ms: int) -> int:
    """Return how many of the oldest are older than ``retention_ms``: all before the first that
    is not."""
    if retention_ms < 0:
        return 0
    due = takewhile(
        lambda segment: segment.timestamp is not None and now_ms - segment.timestamp > retention_ms,
        segments,
    )
    return sum(1 for _ in due)


def count_due(segments: Sequence[RetainedSegment], config: TopicConfig, now_ms: int) -> int:
    """Return how many of the oldest to delete by size, then by time."""
    if not config.deletes:
        return 0
    count = count_by_size(segments, config.retention_bytes)
    return count + count_by_time(segments[count:], config.retention_ms, now_ms)


def start_after(segments: Sequence[RetainedSegment], count: int) -> int:
    """Return the log start offset once the first ``count`` are deleted; 0 if none are."""
    return segments[count - 1].next_offset if count else 0


def apply_budget(
    segments: Mapping[Key, Sequence[RetainedSegment]],
    counts: Mapping[Key, int],
    keep_from: Mapping[Key, int],
    max_bytes: int,
) -> dict[Key, int]:
    """Return how many to delete in each partition so that all together hold the budget.

    The oldest sealed segments of all partitions are deleted first.

    Args:
        segments: By partition.
        counts: How many are deleted in any case.
        keep_from: The offset at and above which each partition must keep everything.
        max_bytes: The budget; negative means no limit.
    """
    counts = dict(counts)
    if max_bytes < 0:
        return counts
    total = sum(
        segment.size
        for key, candidates in segments.items()
        for segment in candidates[counts[key] :]
    )
    oldest: list[tuple[int, int, Key]] = []

    def push(number: int, key: Key) -> None:
        """Add the oldest segment left of a partition, if it may be deleted."""
        candidates, count = segments[key], counts[key]
        if (
            count < len(candidates)
            and not candidates[count].active
            and candidates[count].next_offset <= keep_from[key]
        ):
            # Segments of unknown time are deleted last.
            timestamp = candidates[count].timestamp
            heapq.heappush(oldest, (1 << 63 if timestamp is None else timestamp, number, key))

    for number, key in enumerate(segments):
        push(number, key)
    while total > max_bytes and oldest:
        _, number, key = heapq.heappop(oldest)
        total -= segments[key][counts[key]].size
        counts[key] += 1
        push(number, key)
    return counts
