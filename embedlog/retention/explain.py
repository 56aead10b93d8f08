"""Retention in words: what is deleted when, and what keeps the rest.

People read ``retention.ms`` as "deleted after"; it means "kept at least this long".
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from embedlog.catalog import Catalog
from embedlog.config import TopicConfig
from embedlog.retention import policy
from embedlog.retention.policy import RetainedSegment
from embedlog.retention.retain import PartitionView, inspect
from embedlog.root.root import Root

_DURATIONS = ((86_400_000, "days"), (3_600_000, "hours"), (60_000, "minutes"), (1000, "seconds"))
_SIZES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def describe(root: Root, topic: str, now_ms: int) -> list[str]:
    """Return in words what is deleted of a topic, when, and what keeps the rest.

    Changes nothing; what it says about the next round is as of ``now_ms``.
    """
    info = root.topic(topic)
    lines = [f"{topic}: {line}" for line in _describe_rules(info.config, root.context.catalog)]
    for log in root.partition_logs([info]):
        log.refresh()
        view = inspect(log, now_ms)
        lines += [
            f"partition {log.partition}: {line}" for line in _describe_partition(view, now_ms)
        ]
    return lines


def _describe_rules(config: TopicConfig, catalog: Catalog) -> Iterator[str]:
    if not config.deletes:
        yield (
            "nothing is deleted by time or size, only what compaction and delete_records leave "
            "behind (cleanup.policy=compact)"
        )
    elif config.retention_ms < 0:
        yield "nothing is deleted by time (retention.ms=-1)"
    else:
        yield _describe_time_rule(config)
    if config.deletes and config.retention_bytes >= 0:
        yield (
            f"the oldest segments of a partition are deleted as long as at least "
            f"{_size(config.retention_bytes)} remain (retention.bytes)"
        )
    if config.deletes and config.retention_topic_bytes >= 0:
        yield (
            f"the oldest segments are deleted while all partitions together hold more than "
            f"{_size(config.retention_topic_bytes)} (retention.topic.bytes)"
        )
    budget = catalog.retention_bytes()
    if config.deletes and budget is not None:
        yield (
            f"the oldest segments are deleted while all topics together hold more than "
            f"{_size(budget)}"
        )
    if config.retention_min_consumed:
        yield (
            f"nothing is deleted before these groups have consumed it: "
            f"{config.retention_min_consumed}"
        )
    if config.retention_bytes_hard >= 0:
        yield (
            f"beyond {_size(config.retention_bytes_hard)} a partition keeps nothing for leases "
            f"and groups (retention.bytes.hard)"
        )


def _describe_time_rule(config: TopicConfig) -> str:
    retention = _duration(config.retention_ms)
    delay = f"up to {_duration(config.segment_ms)} (segment.ms) and the time between two rounds"
    if config.retention_clock == "record":
        return (
            f"a segment is deleted when its youngest record is older than {retention} "
            f"(retention.ms) by its own timestamp, whenever it was appended "
            f"(retention.clock=record); a record may stay {delay} longer, but one with an old "
            f"timestamp is deleted soon after it was appended"
        )
    return (
        f"a segment is deleted {retention} (retention.ms) after the last append to it, or after "
        f"the timestamp of its youngest record if that is later (retention.clock=append); so a "
        f"record stays at least that long after it was appended, and {delay} longer"
    )


def _describe_partition(view: PartitionView, now_ms: int) -> Iterator[str]:
    """Describe the segments that will be deleted, those that stay although due, and the rest."""
    if not view.segments:
        yield "is empty"
        return
    config = view.log.config
    due = policy.count_due(view.segments, config, now_ms)
    deletable = view.count_deletable(now_ms)
    if deletable:
        yield f"{_range(view, view.segments[:deletable])} will be deleted in the next round"
    if deletable < due:
        end = view.segments[due - 1].next_offset
        why = "; ".join(limit.why for limit in view.constraints if limit.offset < end)
        yield f"{_range(view, view.segments[deletable:due])} stay although due: {why}"
    yield from _describe_rest(view.segments[due:], config)


def _range(view: PartitionView, segments: list[RetainedSegment]) -> str:
    count, size = len(segments), _size(sum(segment.size for segment in segments))
    first = max(segments[0].base_offset, view.tail.start_offset)
    plural = "s" * (count != 1)
    return f"offsets [{first}, {segments[-1].next_offset}) ({count} segment{plural}, {size})"


def _describe_rest(segments: list[RetainedSegment], config: TopicConfig) -> Iterator[str]:
    """Say when the oldest of the other segments is due; later ones are not deleted before."""
    if not segments:
        return
    where = f"offsets [{segments[0].base_offset}, {segments[-1].next_offset}) stay"
    if not config.deletes or config.retention_ms < 0:
        yield where
        return
    yield f"{where}: {_describe_oldest(segments[0], config)}"
    for segment in segments:
        where = f"offsets [{segment.base_offset}, {segment.next_offset})"
        if segment.future:
            yield (
                f"a record of {where} has a timestamp in the future; the time of the last append "
                f"to its segment counts instead"
            )
        if segment.uncertain and (segment.by_append or config.retention_clock == "append"):
            yield (
                f"the clock was wrong at the last append to {where}, or is wrong now: it showed "
                f"a later time before; the time when a later segment was created counts instead"
            )


def _describe_oldest(segment: RetainedSegment, config: TopicConfig) -> str:
    if segment.timestamp is None:
        return (
            "the age of the first segment is unknown, and those after it wait for it; "
            "if the clock is right now, delete them with delete_records or retention.bytes"
        )
    reason = "the last append to it was at" if segment.by_append else "its youngest record is from"
    return (
        f"the first segment will be deleted after "
        f"{_moment(segment.timestamp + config.retention_ms)}, because {reason} "
        f"{_moment(segment.timestamp)}; those after it later"
    )


def _moment(ms: int) -> str:
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{ms} ms after 1970"


def _duration(ms: int) -> str:
    for unit, name in _DURATIONS:
        if ms >= unit:
            return f"{ms / unit:g} {name if ms != unit else name[:-1]}"
    return f"{ms} ms"


def _size(count: int) -> str:
    for unit, name in _SIZES:
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"
