"""What the settings of a topic require of an append, worked out once per change of the settings."""

from __future__ import annotations

from dataclasses import dataclass

from embedlog.catalog import SegmentInfo
from embedlog.config import INT_MAX, LONG_MAX, TopicConfig


@dataclass(slots=True)
class AppendRules:
    """The settings that each append looks at; those of the topic and of its active segment.

    Not a named tuple, whose fields take three times as long to read.
    """

    max_segment_ms: int
    """How far the timestamps of the active segment may lie apart before it is rolled."""
    fast_max_bytes: int
    """The largest batch that `append_fast` may write; -1 if the topic requires more of a batch."""
    checks_timestamps: bool
    requires_keys: bool
    uses_append_time: bool
    overdue_age_ms: int | None
    """The age from which on a record is reported by `validation.warn_if_overdue`, if any is."""


def append_rules(config: TopicConfig, active: SegmentInfo) -> AppendRules:
    """Return the rules for appends to a segment."""
    uses_append_time = config.message_timestamp_type == "LogAppendTime"
    farthest = min(config.message_timestamp_before_max_ms, config.message_timestamp_after_max_ms)
    checks_timestamps = not uses_append_time and farthest < LONG_MAX
    overdue_age_ms = None
    if config.retention_clock == "record" and config.deletes and not uses_append_time:
        overdue_age_ms = config.retention_ms if config.retention_ms >= 0 else None
    fast_max_bytes = min(config.max_message_bytes, config.segment_bytes)
    if (
        uses_append_time
        or checks_timestamps
        or config.compacts
        or active.headers
        or config.segment_max_offset_span < INT_MAX
        or has_flush_interval(config)
    ):
        fast_max_bytes = -1
    return AppendRules(
        max_segment_ms(config, active),
        fast_max_bytes,
        checks_timestamps,
        config.compacts,
        uses_append_time,
        overdue_age_ms,
    )


def max_segment_ms(config: TopicConfig, segment: SegmentInfo) -> int:
    """Return how far the timestamps of a segment may lie apart before it is rolled (A12)."""
    longest = config.segment_ms
    if config.compacts:
        longest = min(longest, config.max_compaction_lag_ms)
    if config.segment_jitter_ms:
        # Fixed for a segment, spread over segments (A16), and always less than `longest` (D6).
        longest -= segment.id * 2654435761 % (min(config.segment_jitter_ms, longest - 1) + 1)
    return longest


def has_flush_interval(config: TopicConfig) -> bool:
    """Whether flush.messages or flush.ms ever requires a flush; by default neither does."""
    return min(config.flush_messages, config.flush_ms) < LONG_MAX
