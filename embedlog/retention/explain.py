"""Retention in words: what goes when, and why something is still there (C9).

People read ``retention.ms`` as "deleted after"; it is "kept at least so long".
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from embedlog.catalog import Catalog
from embedlog.config import TopicConfig
from embedlog.retention import policy
from embedlog.retention.policy import RetainedSegment
from embedlog.retention.retain import PartitionView, look
from embedlog.root.root import Root

_UNITS = ((86_400_000, "days"), (3_600_000, "hours"), (60_000, "minutes"), (1000, "seconds"))
_SIZES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def describe(root: Root, topic: str, now_ms: int) -> list[str]:
    """Return in words what is deleted of a topic, when, and what keeps the rest.

    Changes nothing; what it says goes with the next round is as of ``now_ms``.
    """
    info = root.topic(topic)
    lines = [f"{topic}: {each}" for each in _rules(info.config, root.context.catalog)]
    for number in range(info.partitions):
        log = root.partition(topic, number)
        log.refresh()
        lines += [f"partition {number}: {each}" for each in _partition(look(log, now_ms), now_ms)]
    return lines


def _rules(config: TopicConfig, catalog: Catalog) -> Iterator[str]:
    if not config.deletes:
        yield (
            "nothing goes by time or size, only what compaction and delete_records leave behind "
            "(cleanup.policy=compact)"
        )
    elif config.retention_ms < 0:
        yield "nothing goes by time (retention.ms=-1)"
    else:
        yield _time_rule(config)
    if config.deletes and config.retention_bytes >= 0:
        yield (
            f"the oldest segments of a partition go while no less than "
            f"{_size(config.retention_bytes)} stay (retention.bytes)"
        )
    yield from _budgets(config, catalog)
    if config.retention_min_consumed:
        yield f"nothing goes before it is consumed by: {config.retention_min_consumed}"
    if config.retention_bytes_hard >= 0:
        yield (
            f"beyond {_size(config.retention_bytes_hard)} a partition keeps nothing for leases "
            f"and groups (retention.bytes.hard)"
        )


def _time_rule(config: TopicConfig) -> str:
    span = _span(config.retention_ms)
    longest = f"up to {_span(config.segment_ms)} (segment.ms) and the time between two rounds"
    if config.retention_clock == "record":
        return (
            f"a segment goes once its youngest record is older than {span} (retention.ms) by its "
            f"own timestamp, whenever it was appended (retention.clock=record); so a record stays "
            f"{longest} longer, but one of long ago goes soon after it was appended"
        )
    return (
        f"a segment goes {span} (retention.ms) after the last append to it, or after the time of "
        f"its youngest record if that is later (retention.clock=append); so a record stays at "
        f"least that long after it was appended, and {longest} longer"
    )


def _budgets(config: TopicConfig, catalog: Catalog) -> Iterator[str]:
    if config.deletes and config.retention_topic_bytes >= 0:
        yield (
            f"the oldest segments go while all partitions hold more than "
            f"{_size(config.retention_topic_bytes)} (retention.topic.bytes)"
        )
    most = catalog.retention_bytes()
    if config.deletes and most is not None:
        yield f"the oldest segments go while all topics hold more than {_size(most)}"


def _partition(one: PartitionView, now_ms: int) -> Iterator[str]:
    """Tell of each run of segments that have the same fate."""
    if not one.parts:
        yield "holds nothing"
        return
    config = one.log.config
    due = policy.due(one.parts, config, now_ms)
    free = one.free(due)
    if free:
        yield f"{_run(one, one.parts[:free])} with the next round"
    if free < due:
        why = "; ".join(each.why for each in one.keepers if each.offset < _end(one.parts[:due]))
        yield f"{_run(one, one.parts[free:due], 'stay')} although due: {why}"
    yield from _rest(one.parts[due:], config, now_ms)


def _end(parts: list[RetainedSegment]) -> int:
    return parts[-1].next_offset


def _run(one: PartitionView, parts: list[RetainedSegment], verb: str = "go") -> str:
    count, size = len(parts), _size(sum(part.size for part in parts))
    first = max(parts[0].base_offset, one.now.start_offset)
    return (
        f"offsets {first} to {_end(parts) - 1} ({count} segment{'s' * (count != 1)}, {size}) {verb}"
    )


def _rest(parts: list[RetainedSegment], config: TopicConfig, now_ms: int) -> Iterator[str]:
    """Tell what the oldest that stays waits for; all after it wait for it (C2)."""
    if not parts:
        return
    part = parts[0]
    where = f"offsets {part.base_offset} to {_end(parts) - 1} stay"
    if not config.deletes or config.retention_ms < 0:
        yield where
        return
    yield f"{where}: {_until(part, config)}"
    for each in parts:
        where = f"offsets {each.base_offset} to {each.next_offset - 1}"
        if each.future:
            yield (
                f"a record of {where} claims to be of the future; it counts from the last append "
                f"to its segment"
            )
        if each.uncertain and (each.by_append or config.retention_clock == "append"):
            yield (
                f"the clock was wrong at the last append to {where}, or is wrong now: it showed "
                f"a later time before; they count from when a later segment was begun"
            )


def _until(part: RetainedSegment, config: TopicConfig) -> str:
    if part.timestamp is None:
        return (
            "the first segment has no time that can be believed, and those after it wait for it; "
            "if the clock is right now, delete_records or retention.bytes deletes them"
        )
    first = f"the first segment goes after {_moment(part.timestamp + config.retention_ms)}"
    what = "the last append to it was at" if part.by_append else "its youngest record is of"
    return f"{first}, because {what} {_moment(part.timestamp)}; those after it later"


def _moment(ms: int) -> str:
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{ms} ms after 1970"


def _span(ms: int) -> str:
    for unit, name in _UNITS:
        if ms >= unit:
            return f"{ms / unit:g} {name if ms != unit else name[:-1]}"
    return f"{ms} ms"


def _size(count: int) -> str:
    for unit, name in _SIZES:
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"
