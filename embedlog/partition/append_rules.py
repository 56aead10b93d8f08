"""What the settings of a topic require of an append, worked out once per change of the settings."""

from __future__ import annotations

from dataclasses import dataclass, replace

from embedlog.catalog import SegmentInfo
from embedlog.config import INT_MAX, TopicConfig

_NEVER = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
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


def append_rules(config: TopicConfig, active: SegmentInfo) -> AppendRules:
    """Return the rules for appends to a segment."""
    uses_append_time = config.message_timestamp_type == "LogAppendTime"
    rules = AppendRules(
        max_segment_ms(config, active),
        min(config.max_message_bytes, config.segment_bytes),
        not uses_append_time and _limits_timestamps(config),
        config.compacts,
        uses_append_time,
    )
    if (
        uses_append_time
        or rules.checks_timestamps
        or rules.requires_keys
        or active.headers
        or config.segment_max_offset_span < INT_MAX
        or has_flush_interval(config)
    ):
        return replace(rules, fast_max_bytes=-1)
    return rules


def max_segment_ms(config: TopicConfig, segment: SegmentInfo) -> int:
    """Return how far the timestamps of a segment may lie apart before it is rolled (A12)."""
    longest = config.segment_ms
    if "compact" in config.cleanup_policy:
        longest = min(longest, config.max_compaction_lag_ms)
    if config.segment_jitter_ms:
        # Fixed for a segment, spread over segments (A16), and always less than `longest` (D6).
        longest -= segment.id * 2654435761 % (min(config.segment_jitter_ms, longest - 1) + 1)
    return longest


def _limits_timestamps(config: TopicConfig) -> bool:
    limits = config.message_timestamp_before_max_ms, config.message_timestamp_after_max_ms
    return min(limits) < _NEVER


def has_flush_interval(config: TopicConfig) -> bool:
    """Whether flush.messages or flush.ms ever requires a flush; by default neither does."""
    return min(config.flush_messages, config.flush_ms) < _NEVER
