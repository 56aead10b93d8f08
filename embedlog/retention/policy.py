"""What the settings ask to delete: pure functions over the segments of a partition."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from embedlog.catalog import SegmentInfo
from embedlog.config import TopicConfig
from embedlog.partition.tail import Tail

Key = TypeVar("Key")


class RetainedSegment(NamedTuple):
    """One segment as retention looks at it: it goes whole or stays (C1)."""

    base_offset: int
    next_offset: int
    size: int
    timestamp: int | None
    """When its youngest record counts as written; None is not known, so it stays."""
    active: bool = False
    future: bool = False
    """Whether that record claims to be of the future."""
    by_append: bool = False
    """Whether `timestamp` is that of the last append, and not the record's."""
    uncertain: bool = False
    """Whether the last append has a time that cannot be: later than now, or not known."""


def parts(
    segments: Sequence[SegmentInfo], now: Tail, now_ms: int, clock: str = "append"
) -> list[RetainedSegment]:
    """Return the segments that hold something, in offset order.

    Args:
        segments: The manifest, read after the tail.
        now: The tail.
        now_ms: The time.
        clock: The topic's ``retention.clock``.
    """
    found = []
    sealed_ms: int | None = None
    for info in reversed(segments):
        if info.next_offset is not None:
            part = RetainedSegment(info.base_offset, info.next_offset, info.size, None)
            times = info.max_timestamp, info.appended_ms, sealed_ms
            found.append(dated(part, *times, now_ms, clock))
        elif (
            info.id == now.segment_id and not now.empty and now.high_watermark == now.log_end_offset
        ):
            part = RetainedSegment(
                info.base_offset, now.log_end_offset, now.high_watermark_position, None, active=True
            )
            found.append(dated(part, now.timestamp, now.appended_ms, None, now_ms, clock))
        # It was created when the one before was sealed: no record of that is younger.
        if 0 < info.created_ms <= now_ms:
            sealed_ms = info.created_ms
    return found[::-1]


def dated(
    part: RetainedSegment,
    latest: int | None,
    appended_ms: int,
    sealed_ms: int | None,
    now_ms: int,
    clock: str,
) -> RetainedSegment:
    """Return a part with the time from which on `retention.ms` counts.

    With ``append`` that is the last append, or the largest timestamp if that is later;
    with ``record`` the largest timestamp.  Records without a time, or with one of the
    future, count from the last append: else one wrong clock keeps everything after them
    for ever.  If the append time itself cannot be right, the sealing counts in its place.

    Args:
        part: The part.
        latest: Its largest timestamp.
        appended_ms: When the last batch was appended to it.
        sealed_ms: When it was sealed, or a later segment was created; None is not known.
        now_ms: The time.
        clock: The topic's ``retention.clock``.
    """
    future = latest is not None and latest > now_ms
    uncertain = not 0 < appended_ms <= now_ms
    told = latest if latest is not None and 0 <= latest <= now_ms else None
    appended = sealed_ms if uncertain else appended_ms
    by_append = told is None or (clock == "append" and (appended is None or appended > told))
    when = appended if by_append else told
    return part._replace(timestamp=when, future=future, by_append=by_append, uncertain=uncertain)


def by_size(found: Sequence[RetainedSegment], most: int) -> int:
    """Return how many of the oldest go so that no less than ``most`` bytes stay (C3)."""
    if most < 0:
        return 0
    excess, count = sum(part.size for part in found) - most, 0
    while count < len(found) and excess >= found[count].size:
        excess -= found[count].size
        count += 1
    return count


def by_time(found: Sequence[RetainedSegment], longest_ms: int, now_ms: int) -> int:
    """Return how many of the oldest are older than that, up to the first that is not (C2)."""
    if longest_ms < 0:
        return 0
    for count, part in enumerate(found):
        if part.timestamp is None or now_ms - part.timestamp <= longest_ms:
            return count
    return len(found)


def over(found: Sequence[RetainedSegment], most: int) -> int:
    """Return how many sealed ones must go until no more than ``most`` bytes stay."""
    if most < 0:
        return 0
    total, count = sum(part.size for part in found), 0
    while count < len(found) and total > most and not found[count].active:
        total -= found[count].size
        count += 1
    return count


def due(found: Sequence[RetainedSegment], config: TopicConfig, now_ms: int) -> int:
    """Return how many of the oldest go by size, then by time (C1, C6)."""
    if not config.deletes:
        return 0
    count = by_size(found, config.retention_bytes)
    return count + by_time(found[count:], config.retention_ms, now_ms)


def offset_after(found: Sequence[RetainedSegment], count: int) -> int:
    """Return where the log begins once so many are gone; 0 if none goes."""
    return found[count - 1].next_offset if count else 0


def within(
    found: Mapping[Key, Sequence[RetainedSegment]],
    counts: Mapping[Key, int],
    floors: Mapping[Key, int],
    most: int,
) -> dict[Key, int]:
    """Return how many go of each partition so that all together hold no more than ``most``.

    The oldest sealed ones first, whatever partition they are of.

    Args:
        found: The segments of each.
        counts: How many go anyhow.
        floors: What may not be deleted in each: offsets from here on.
        most: Bytes; negative is any number.
    """
    counts = dict(counts)
    left = sum(part.size for key, its in found.items() for part in its[counts[key] :])
    if most < 0:
        return counts
    order: list[tuple[int, int, Key]] = []
    for number, key in enumerate(found):
        _offer(order, number, key, found[key], counts[key], floors[key])
    while left > most and order:
        _, number, key = heapq.heappop(order)
        left -= found[key][counts[key]].size
        counts[key] += 1
        _offer(order, number, key, found[key], counts[key], floors[key])
    return counts


def _offer(
    order: list[tuple[int, int, Key]],
    number: int,
    key: Key,
    its: Sequence[RetainedSegment],
    at: int,
    floor: int,
) -> None:
    """Put the oldest that is left of a partition into the order, if it may go."""
    if at < len(its) and not its[at].active and its[at].next_offset <= floor:
        # What is of no known time is kept longest.
        when = its[at].timestamp
        heapq.heappush(order, (1 << 63 if when is None else when, number, key))
