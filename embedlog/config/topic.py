"""The settings of a topic."""

from __future__ import annotations

from typing import Literal

from embedlog.config.settings import Settings
from embedlog.config.values import (
    INT_MAX,
    LONG_MAX,
    checked,
    choice,
    compression,
    number,
    only,
    switch,
)
from embedlog.serializers import NAMES, SerializerName


def _cleanup_policy(value: object) -> str:
    words = value.split(",") if isinstance(value, str) else value
    policy = {str(word).strip() for word in words} if isinstance(words, list | tuple | set) else ()
    if not policy or not set(policy) <= {"compact", "delete"}:
        raise ValueError("one of delete, compact, compact,delete")
    return ",".join(sorted(policy))


def _groups(value: object) -> str:
    words = [] if value == "" else value.split(",") if isinstance(value, str) else value
    if not isinstance(words, list | tuple | set):
        raise ValueError('"", "all", or names of groups separated by commas')
    names = [str(word).strip() for word in words]
    if not all(names) or ("all" in names and len(names) > 1):
        raise ValueError('names of groups separated by commas, or "all" alone')
    return ",".join(names)


def _columns(value: object) -> str:
    words = [] if value == "" else value.split(",") if isinstance(value, str) else value
    if not isinstance(words, list | tuple | set | frozenset):
        raise ValueError('"", "none", or names of columns separated by commas')
    names = [str(word).strip() for word in words]
    if not all(names) or ("none" in names and len(names) > 1):
        raise ValueError('names of columns separated by commas, or "none" alone')
    return ",".join(names)


def _mirror_source(value: object) -> str:
    site, separator, topic = value.rpartition("/") if isinstance(value, str) else ("", "", "")
    if value != "" and not (site and separator and topic):
        raise ValueError('"", or SITE/TOPIC')
    return str(value)


class TopicConfig(Settings):
    """The settings of a topic.

    >>> config = TopicConfig.parse({"retention.ms": "60000"})
    >>> config.retention_ms
    60000
    >>> config.changed({"cleanup_policy": "compact"}).overrides()
    {'retention.ms': 60000, 'cleanup.policy': 'compact'}
    """

    segment_bytes: int = number(1 << 30, 1)
    """Roll the active segment before it grows larger than this."""
    segment_ms: int = number(7 * 86_400_000, 1)
    """Roll the active segment once it spans more time than this."""
    segment_jitter_ms: int = number(0, 0)
    """Subtract up to this from ``segment_ms``, so that partitions do not roll at the same time."""
    segment_index_bytes: int = only(10 << 20, "the index is in LMDB and is never full")
    """Only the default: the index is in LMDB and grows as needed, so it ends no segment."""
    segment_max_offset_span: int = number(INT_MAX, 1)
    """Roll the active segment before it spans more offsets than this (embedlog's own)."""
    index_interval_bytes: int = number(64 << 10, 0, INT_MAX)
    """Add an index entry after this many bytes; larger than Kafka's 4096, as batches are."""
    flush_messages: int = number(LONG_MAX, 1)
    """Flush a partition once this many records are not on the disk."""
    flush_ms: int = number(LONG_MAX, 0)
    """Flush a partition once a record has not been on the disk for this long."""
    retention_ms: int = number(7 * 86_400_000, -1)
    """Delete a segment this long after the time that ``retention_clock`` says; -1 is never."""
    retention_clock: Literal["append", "record"] = choice("append", "record")
    """``append``: ``retention_ms`` counts from the last append to a segment, or from the
    timestamp of its youngest record if that is later (embedlog's own); ``record``: from the
    timestamp of its youngest record, whenever that was appended, as in Kafka."""
    retention_bytes: int = number(-1, -1)
    """Delete the oldest segments as long as a partition keeps this much; -1 is never."""
    retention_topic_bytes: int = number(-1, -1)
    """Delete the oldest segments while all partitions hold more; -1 is never (embedlog's own)."""
    retention_min_consumed: str = checked("", _groups)
    """Delete nothing that these groups (separated by commas), or ``all`` groups with a commit in
    the partition, have not consumed, up to ``retention_bytes_hard`` (embedlog's own)."""
    retention_bytes_hard: int = number(-1, -1)
    """While a partition holds more, delete what is due in spite of leases and of
    ``retention_min_consumed``; -1 is never (embedlog's own)."""
    max_message_bytes: int = number(1_048_588, 0, INT_MAX)
    """Refuse larger batches, as Kafka counts: compressed, in its format; a new typed topic
    gets 4 MiB unless another limit is given."""
    cleanup_policy: Literal["delete", "compact", "compact,delete"] = checked(
        "delete", _cleanup_policy
    )
    """``delete``, ``compact`` or ``compact,delete``."""
    min_cleanable_dirty_ratio: float = number(0.5, 0, 1)
    """Compact a partition once more than this fraction of its bytes is dirty."""
    delete_retention_ms: int = number(86_400_000, 0)
    """Keep a tombstone this long after the first compaction that saw it."""
    min_compaction_lag_ms: int = number(0, 0)
    """Do not compact records younger than this."""
    max_compaction_lag_ms: int = number(LONG_MAX, 1)
    """Compact records older than this, whatever the dirty ratio."""
    file_delete_delay_ms: int = number(60_000, 0)
    """Unlink the file of a deleted segment after this delay."""
    compression_type: Literal["producer", "none", "lz4", "zstd"] = checked(
        "producer", lambda value: value if value == "producer" else compression(value)
    )
    """``none``, ``lz4`` or ``zstd`` (``gzip`` means ``zstd``, ``snappy`` ``lz4``), whatever the
    producer uses; or ``producer``: as it does."""
    key_serializer: SerializerName = choice(*NAMES)
    """How keys are stored: producers, consumers and views without a (de)serializer of their own use
    this one; ``bytes`` converts nothing (embedlog's own)."""
    value_serializer: SerializerName = choice(*NAMES)
    """How values are stored, likewise."""
    statistics_columns: str = checked("", _columns)
    """The columns of text (separated by commas) of a typed topic whose smallest and largest values
    are kept, so that reads skip batches by them; those of numbers, times and booleans always are,
    except with ``none`` (embedlog's own)."""
    rebatch_min_rows: int = number(-1, -1)
    """Gather the batches of a sealed segment into larger ones if they have fewer records than this
    on average; 0 is never, -1 is 1000 for a typed topic and never for others (embedlog's own)."""
    key_index_enable: bool | None = switch(None)
    """Whether sealed segments get an index of their keys, so that looking up a key reads one
    record; by default where ``cleanup_policy`` has ``compact`` (embedlog's own)."""
    audit: bool = switch(False)
    """Whether producers and consumer groups count what they write and read, in the topic
    ``__audit``, so that `Log.audit` can compare them with the log (embedlog's own)."""
    errors_deadletterqueue_group_enable: bool = switch(False)
    """Whether groups may put their dead letters into the topic."""
    preallocate: bool = only(False, "durable appends preallocate by themselves")
    """Only the default: appends with ``durability="fsync"`` preallocate up to 1 MiB by themselves,
    others let segments grow."""
    message_timestamp_type: Literal["CreateTime", "LogAppendTime"] = choice(
        "CreateTime", "LogAppendTime"
    )
    """Whether timestamps come from the producer or from the clock of the log."""
    message_timestamp_before_max_ms: int = number(LONG_MAX, 0)
    """Refuse records whose timestamp is further in the past than this."""
    message_timestamp_after_max_ms: int = number(LONG_MAX, 0)
    """Refuse records whose timestamp is further in the future than this."""
    mirror_source: str = checked("", _mirror_source)
    """``SITE/TOPIC``: the topic is a copy of that topic of the log, or Kafka cluster, with the id
    ``SITE``, and only the mirror may write to it; a failover sets it back to ``""``
    (embedlog's own)."""
    producer_id_expiration_ms: int = number(86_400_000, 1)
    """Forget a producer after this long without an append; in Kafka a broker setting."""
    min_insync_replicas: int = number(1, 1)
    """Refuse appends with ``acks="all"`` while fewer copies are in sync; a partition with
    fewer replicas requires all of them."""
    unclean_leader_election_enable: bool = only(
        False, "a copy that is not in sync leads only after an unclean election"
    )
    """Only the default: a copy that is not in sync leads only after an operator's command."""
    replica_lag_time_max_ms: int = number(30_000, 1)
    """A copy that has not caught up for this long is not in sync any more; in Kafka a broker
    setting."""

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        above = "must not be more than"
        if self.segment_jitter_ms > self.segment_ms:
            self._contradict("segment_jitter_ms", above, "segment_ms")
        if self.min_compaction_lag_ms > self.max_compaction_lag_ms:
            self._contradict("min_compaction_lag_ms", above, "max_compaction_lag_ms")

    @property
    def compacts(self) -> bool:
        """Whether ``cleanup_policy`` has ``compact``."""
        return "compact" in self.cleanup_policy

    @property
    def deletes(self) -> bool:
        """Whether ``cleanup_policy`` has ``delete``."""
        return "delete" in self.cleanup_policy
