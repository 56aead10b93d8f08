"""What can be set: per topic, per producer, per consumer.

Names, units and defaults are Kafka's unless a field
says otherwise.  Every setting has one name in two spellings: ``retention.ms``
in a topic's configuration and ``retention_ms`` in Python; both are accepted
everywhere.  A config is checked once, when it is made, and never changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from embedlog.config.settings import Settings
from embedlog.errors import InvalidConfigError

LONG_MAX = (1 << 63) - 1
"""Kafka's "never" and "without limit"."""

INT_MAX = (1 << 31) - 1

_ACKS = {"all": "all", "-1": "all", "0": 0, "1": 1}
_FALSE_TRUE = {"false": False, "true": True}


# Kinds of values: each takes what the user gave and returns what the field
# holds, or raises ValueError with what it wanted.


def _number(default: int | float, least: float, most: float = LONG_MAX) -> Any:
    """Declare a number between two bounds, both included, of the default's type."""

    def check(value: object) -> int | float:
        # kafka-python writes infinity where Java writes its largest number.
        unlimited = value == inf and most >= INT_MAX
        number = most if unlimited else _as_number(type(default), value)
        if not least <= number <= most:
            raise ValueError(f"not in {least}..{most}")
        return type(default)(number)

    return field(default=default, metadata={"check": check})


def _as_number(kind: type, value: object) -> int | float:
    if isinstance(value, bool) or (kind is int and isinstance(value, float) and value % 1):
        raise ValueError("not a whole number" if kind is int else "not a number")
    try:
        number: int | float = kind(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("not a whole number" if kind is int else "not a number") from None
    return number


def _switch(default: bool | None) -> Any:
    """Declare a yes or no; a default of None is settled by the other settings."""

    def check(value: object) -> bool | None:
        if value is None and default is None:
            return None
        known = _FALSE_TRUE.get(str(value).lower())
        if known is None:
            raise ValueError("neither true nor false")
        return known

    return field(default=default, metadata={"check": check})


def _choice(default: str, *others: str, **aliases: str) -> Any:
    """Declare one of some words."""
    words = {word: word for word in (default, *others)} | aliases

    def check(value: object) -> str:
        chosen = words.get(str(value))
        if chosen is None:
            raise ValueError(f"not one of {', '.join(words)}")
        return chosen

    return field(default=default, metadata={"check": check})


def _checked(default: object, check: Callable[[Any], object]) -> Any:
    return field(default=default, metadata={"check": check})


def _text(value: object) -> str | None:
    if value is None or (isinstance(value, str) and value):
        return value
    raise ValueError("not a text of at least one character")


def _label(value: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError("not a text")


def _serializer(value: object) -> object:
    if value is None or callable(value) or hasattr(value, "serialize"):
        return value
    raise ValueError("neither callable nor has it a method serialize(topic, value)")


def _deserializer(value: object) -> object:
    if value is None or callable(value) or hasattr(value, "deserialize"):
        return value
    raise ValueError("neither callable nor has it a method deserialize(topic, bytes)")


def _partitioner(value: object) -> object:
    if value in (None, "round_robin") or callable(value):
        return value
    raise ValueError("neither None, 'round_robin' nor callable(key, partitions, available)")


def _acks(value: object) -> object:
    if isinstance(value, bool) or str(value) not in _ACKS:
        raise ValueError("not one of 0, 1, all")
    return _ACKS[str(value)]


def _compression(value: object) -> str:
    known = {"None": "none", "none": "none", "uncompressed": "none", "lz4": "lz4", "zstd": "zstd"}
    if str(value) not in known:
        raise ValueError("not one of none, lz4, zstd (Arrow has no other)")
    return known[str(value)]


def _topic_compression(value: object) -> str:
    return "producer" if value == "producer" else _compression(value)


def _cleanup_policy(value: object) -> str:
    words = value.split(",") if isinstance(value, str) else value
    policy = {str(word).strip() for word in words} if isinstance(words, list | tuple | set) else ()
    if not policy or not set(policy) <= {"compact", "delete"}:
        raise ValueError("not one of delete, compact, compact,delete")
    return ",".join(sorted(policy))


def _groups(value: object) -> str:
    words = [] if value == "" else value.split(",") if isinstance(value, str) else value
    if not isinstance(words, list | tuple | set):
        raise ValueError('not "", "all", or names of groups with commas between them')
    names = [str(word).strip() for word in words]
    if not all(names) or ("all" in names and len(names) > 1):
        raise ValueError('not names of groups, or "all" alone')
    return ",".join(names)


def _patience(value: object) -> int | None:
    """Return milliseconds; None, infinity and -1 (Kafka 0.8) all mean for ever."""
    if value is None or value in (inf, -1, "-1"):
        return None
    number = _as_number(int, value)
    if number < 0:
        raise ValueError("not None or at least 0")
    return int(number)


def _instance(value: object) -> str | None:
    legal = isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9._-]{1,249}", value)
    if value is None or (legal and value not in (".", "..")):
        return value if isinstance(value, str) else None
    raise ValueError("not 1 to 249 letters, digits, '.', '_' and '-'")


def _strategies(value: Any) -> tuple[Any, ...]:
    given = [value] if isinstance(value, str) or not hasattr(value, "__iter__") else list(value)
    named = [part.strip() for each in given if isinstance(each, str) for part in each.split(",")]
    objects = [each for each in given if not isinstance(each, str)]
    if not given or not all(named) or not all(hasattr(each, "assign") for each in objects):
        raise ValueError("not names of assignors, or objects with a method assign")
    return tuple(given) if objects else tuple(named)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicConfig(Settings):
    """How each partition of a topic keeps its records.

    >>> config = TopicConfig.parse({"retention.ms": "60000"})
    >>> config.retention_ms
    60000
    >>> config.changed({"cleanup_policy": "compact"}).overrides()
    {'retention.ms': 60000, 'cleanup.policy': 'compact'}
    """

    segment_bytes: int = _number(1 << 30, 1)
    """Start a new segment rather than let the active one grow past this (A11)."""

    segment_ms: int = _number(7 * 86_400_000, 1)
    """Start a new segment once the active one spans more time than this (A11, A12)."""

    segment_jitter_ms: int = _number(0, 0)
    """Take up to this much off ``segment_ms``, so that partitions do not roll together."""

    segment_index_bytes: int = _number(10 << 20, 4, INT_MAX)
    """Accepted and ignored: the index is in LMDB and grows as it must."""

    segment_max_offset_span: int = _number(INT_MAX, 1)
    """Start a new segment rather than span more offsets than this (embedlog's own; A11)."""

    index_interval_bytes: int = _number(64 << 10, 0, INT_MAX)
    """Index one batch in this many bytes; larger than Kafka's 4096, as batches are (B1)."""

    flush_messages: int = _number(LONG_MAX, 1)
    """Sync a partition once this many records are not on the disk."""

    flush_ms: int = _number(LONG_MAX, 0)
    """Sync a partition once a record is not on the disk for this long."""

    retention_ms: int = _number(7 * 86_400_000, -1)
    """Delete a segment so long after ``retention_clock`` counts it as written; -1 is never (C2)."""

    retention_clock: str = _choice("append", "record")
    """``append``: ``retention_ms`` counts from the last append to a segment, or from the time of
    its youngest record if that is later (embedlog's own); ``record``: from the time of its
    youngest record whenever that was appended, as in Kafka (C2)."""

    retention_bytes: int = _number(-1, -1)
    """Delete old segments down to no less than this, per partition; -1 is never (C3)."""

    retention_topic_bytes: int = _number(-1, -1)
    """Delete the oldest segments while all partitions together hold more (embedlog's own)."""

    retention_min_consumed: str = _checked("", _groups)
    """Delete nothing that these groups (commas between them), or ``all`` that committed here,
    have not consumed, up to ``retention_bytes_hard`` (embedlog's own)."""

    retention_bytes_hard: int = _number(-1, -1)
    """Once a partition holds more, what is due goes although somebody still wants it: a lease, or
    a group of ``retention_min_consumed``; -1 is never (embedlog's own)."""

    max_message_bytes: int = _number(1_048_588, 0, INT_MAX)
    """Refuse a batch that is larger as Kafka counts: its format's bytes, compressed (A4)."""

    cleanup_policy: str = _checked("delete", _cleanup_policy)
    """``delete``, ``compact`` or ``compact,delete`` (C6)."""

    min_cleanable_dirty_ratio: float = _number(0.5, 0, 1)
    """Compact once this share of the bytes was written since the last time."""

    delete_retention_ms: int = _number(86_400_000, 0)
    """Keep a tombstone for so long after compaction first met it."""

    min_compaction_lag_ms: int = _number(0, 0)
    """Do not compact a record that is younger than this."""

    max_compaction_lag_ms: int = _number(LONG_MAX, 1)
    """Compact before a record is older than this, whatever the dirty ratio."""

    file_delete_delay_ms: int = _number(60_000, 0)
    """Unlink a deleted segment's file after this."""

    compression_type: str = _checked("producer", _topic_compression)
    """``none``, ``lz4`` or ``zstd``, whatever a producer is set to; or ``producer``: as it is."""

    preallocate: bool = _switch(False)
    """Reserve the disk space of a segment when it is created."""

    message_timestamp_type: str = _choice("CreateTime", "LogAppendTime")
    """Whose clock a record carries: the producer's or the log's (A7)."""

    message_timestamp_before_max_ms: int = _number(LONG_MAX, 0)
    """Refuse a record whose time is further in the past than this (A7)."""

    message_timestamp_after_max_ms: int = _number(LONG_MAX, 0)
    """Refuse a record whose time is further in the future than this (A7)."""

    producer_id_expiration_ms: int = _number(86_400_000, 1)
    """Forget a producer's numbers after so long without an append (G19); in Kafka of a broker."""

    min_insync_replicas: int = _number(1, 1, INT_MAX)
    """With ``acks="all"``, refuse to append while fewer replicas are in sync (H1)."""

    unclean_leader_election_enable: bool = _switch(False)
    """Let a replica lead that has not got every acknowledged record."""

    def __post_init__(self) -> None:
        self._check_each()
        self._require(
            self.segment_jitter_ms <= self.segment_ms,
            *("segment_jitter_ms", "is more than", "segment_ms"),
        )
        self._require(
            self.min_compaction_lag_ms <= self.max_compaction_lag_ms,
            *("min_compaction_lag_ms", "is more than", "max_compaction_lag_ms"),
        )

    @property
    def compacts(self) -> bool:
        """Whether only the last record of each key is kept."""
        return "compact" in self.cleanup_policy

    @property
    def deletes(self) -> bool:
        """Whether old segments are deleted, by time and by size."""
        return "delete" in self.cleanup_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceConfig(Settings):
    """How a process keeps house, while it is the one that does: settings of a broker in Kafka.

    >>> MaintenanceConfig.parse({"log.cleaner.threads": 2}).log_cleaner_threads
    2
    """

    log_retention_check_interval_ms: int = _number(30_000, 1)
    """Look for what is to be deleted so often; Kafka's 300000 saves nothing here (C11)."""

    offsets_retention_minutes: int = _number(10_080, 1)
    """Forget the offsets of a group that nobody used for so long (M15)."""

    offsets_retention_check_interval_ms: int = _number(600_000, 1)
    """Look for such groups so often."""

    producer_id_expiration_check_interval_ms: int = _number(600_000, 1)
    """Look so often for producers that were idle for ``producer_id_expiration_ms`` (G19)."""

    log_cleaner_enable: bool = _switch(True)
    """Compact topics that ask for it."""

    log_cleaner_threads: int = _number(1, 1, 64)
    """Compact so many partitions at a time."""

    log_cleaner_backoff_ms: int = _number(15_000, 1)
    """Look for what is to be compacted so often."""

    log_cleaner_dedupe_buffer_size: int = _number(128 << 20, 1)
    """Bytes for the offsets of keys, 24 a key; with less than it needs it takes several passes."""

    log_cleaner_io_buffer_load_factor: float = _number(0.9, 0.01, 1.0)
    """How full that may become."""

    log_cleaner_io_buffer_size: int = _number(4 << 20, 1)
    """Bytes to read at once; larger than Kafka's 512 KiB, as batches are."""

    log_cleaner_io_max_bytes_per_second: float = _number(inf, 1.0, inf)
    """Read and write no more than this, all threads together."""

    def __post_init__(self) -> None:
        self._check_each()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerConfig(Settings):
    """How a producer gathers, encodes and acknowledges records.

    >>> ProducerConfig.parse({"acks": "1", "linger.ms": 5}).enable_idempotence
    False
    """

    acks: int | str = _checked("all", _acks)
    """0: buffered; 1: written and published; ``"all"``: as durable as the log promises."""

    batch_size: int = _number(256 << 10, 0, INT_MAX)
    """Close a batch at this many bytes; larger than Kafka's 16384, for columns (G6)."""

    linger_ms: int = _number(0, 0)
    """Hold a batch back for so long, in the hope of more records (G6)."""

    buffer_memory: int = _number(32 << 20, 0)
    """Block ``send`` while this many bytes are unwritten (G8)."""

    max_block_ms: int = _number(60_000, 0)
    """Give up such a ``send`` after this (G8)."""

    max_request_size: int = _number(1 << 20, 0, INT_MAX)
    """Refuse a single record that is larger by the estimate of Kafka's producer (G7)."""

    compression_type: str = _checked("none", _compression)
    """``none``, ``lz4`` or ``zstd``."""

    enable_idempotence: bool = _switch(None)
    """Number the batches, so that a retry is not written twice (G15).

    On, unless other settings rule it out; asked for together with such, an error (G20).
    """

    producer_name: str | None = _checked(None, _text)
    """embedlog's own: an identity that outlives the process and fences its older holder (G17)."""

    key_serializer: Any = _checked(None, _serializer)
    """Makes bytes of a key: a callable, or an object with ``serialize(topic, key)``."""

    value_serializer: Any = _checked(None, _serializer)
    """Makes bytes of a value, likewise."""

    partitioner: Any = _checked(None, _partitioner)
    """None: by key, else sticky (G1, G3); ``"round_robin"`` (G4); or kafka-python's
    ``callable(key_bytes, all_partitions, available_partitions)``."""

    partitioner_ignore_keys: bool = _switch(False)
    """Spread records with keys as if they had none (G1)."""

    partitioner_sticky_bytes: int = _number(16 << 10, 1, INT_MAX)
    """embedlog's own: records without a key go to another partition after so many bytes, or
    ``batch_size`` if that is less (G3).

    Kafka's 16384, its ``batch.size``; here batches are larger than that, and one is never split.
    """

    partitioner_sticky_ms: int = _number(100, 0)
    """embedlog's own: and after so long, so that a slow stream reaches all partitions soon."""

    partitioner_adaptive_partitioning_enable: bool = _switch(True)
    """Send less to partitions that are slower (G3)."""

    retries: int = _number(INT_MAX, 0, INT_MAX)
    """How often a failed append is tried again; then the record fails with its last error."""

    retry_backoff_ms: int = _number(100, 0)
    """Wait so long before it is."""

    delivery_timeout_ms: int = _checked(None, _patience)
    """Fail a record that is not written so long after ``send`` (G11).

    Two minutes; more, if ``linger_ms`` and ``request_timeout_ms`` together are more.
    """

    request_timeout_ms: int = _number(30_000, 0, INT_MAX)
    """Give one append so long to get its locks."""

    max_in_flight_requests_per_connection: int = _number(5, 1, INT_MAX)
    """Accepted and checked (G20); appends happen in order, one at a time (G12)."""

    metadata_max_age_ms: int = _number(300_000, 0)
    """Accepted and ignored: what topics there are is read where it is kept."""

    client_id: str = _checked("", _label)
    """A name to show."""

    def __post_init__(self) -> None:
        self._check_each()
        self._settle_delivery()
        asked = self.enable_idempotence or self.producer_name is not None
        if self.enable_idempotence is None:
            self._settle("enable_idempotence", asked or not self._conflict())
        if asked:
            self._refuse_conflict()

    def _settle_delivery(self) -> None:
        slowest = self.linger_ms + self.request_timeout_ms
        if self.delivery_timeout_ms is None:
            self._settle("delivery_timeout_ms", max(120_000, slowest))
        if self.delivery_timeout_ms < slowest:
            raise InvalidConfigError(
                f"delivery_timeout_ms {self.delivery_timeout_ms} is less than linger_ms "
                f"{self.linger_ms} and request_timeout_ms {self.request_timeout_ms} together",
                settings=("delivery_timeout_ms", "linger_ms", "request_timeout_ms"),
            )

    def _conflict(self) -> str | None:
        """Name the first setting under which batches cannot be numbered (G20)."""
        if self.acks != "all":
            return "acks"
        if self.retries == 0:
            return "retries"
        if self.max_in_flight_requests_per_connection > 5:
            return "max_in_flight_requests_per_connection"
        return None

    def _refuse_conflict(self) -> None:
        asker = "producer_name" if self.producer_name else "enable_idempotence"
        self._require(
            bool(self.enable_idempotence), "producer_name", "does not go with", "enable_idempotence"
        )
        if conflict := self._conflict():
            self._require(False, asker, "does not go with", conflict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerConfig(Settings):
    """How a consumer reads, commits and shares partitions with its group.

    >>> ConsumerConfig.parse({"group_id": "delays"}).auto_offset_reset
    'latest'
    """

    group_id: str | None = _checked(None, _text)
    """The group it belongs to; None reads alone and commits nothing."""

    group_instance_id: str | None = _checked(None, _instance)
    """A member name that outlives the process: it keeps its partitions for a session (M13)."""

    partition_assignment_strategy: Any = _checked(("range", "cooperative-sticky"), _strategies)
    """How partitions are shared out, best first: names, or assignors of your own."""

    auto_offset_reset: str = _choice("latest", "earliest", "none")
    """Where to start without a position, or when it is gone (E1)."""

    enable_auto_commit: bool = _switch(True)
    """Commit the positions of what ``poll`` returned, from later calls of it."""

    auto_commit_interval_ms: int = _number(5000, 0)
    """So often."""

    max_poll_records: int = _number(500, 1, INT_MAX)
    """Return at most this many records from one ``poll``."""

    max_poll_interval_ms: int = _number(300_000, 1, INT_MAX)
    """Lose the partitions if ``poll`` is not called for so long."""

    session_timeout_ms: int = _number(45_000, 1, INT_MAX)
    """Lose the partitions if the process hangs for so long; a crash is noticed at once."""

    heartbeat_interval_ms: int = _number(3000, 1, INT_MAX)
    """Show so often that the process does not hang."""

    fetch_min_bytes: int = _number(1, 0, INT_MAX)
    """Wait for so many bytes before returning any."""

    fetch_max_bytes: int = _number(50 << 20, 1, INT_MAX)
    """Read no more than this at once, but at least one batch."""

    fetch_max_wait_ms: int = _number(500, 0, INT_MAX)
    """Wait no longer than this for ``fetch_min_bytes``."""

    max_partition_fetch_bytes: int = _number(1 << 20, 1, INT_MAX)
    """Read no more than this of one partition at once, but at least one batch."""

    consumer_timeout_ms: int | None = _checked(None, _patience)
    """End iteration when no record came for so long; None waits for ever."""

    key_deserializer: Any = _checked(None, _deserializer)
    """Makes a key of bytes: a callable, or an object with ``deserialize(topic, bytes)``."""

    value_deserializer: Any = _checked(None, _deserializer)
    """Makes a value of bytes, likewise."""

    check_crcs: bool = _switch(True)
    """Verify the checksum of every column that is read."""

    isolation_level: str = _choice("read_uncommitted", "read_committed")
    """The same here: what was not committed is visible to nobody (G23)."""

    exclude_internal_topics: bool = _switch(True)
    """Leave internal topics out of what a pattern subscribes to."""

    allow_auto_create_topics: bool = _switch(True)
    """Create a topic that is subscribed to and does not exist."""

    metadata_max_age_ms: int = _number(1000, 0)
    """Look so often for new topics and partitions; Kafka's 300000 saves requests."""

    request_timeout_ms: int = _number(30_000, 0, INT_MAX)
    """Give one operation so long to get its locks."""

    default_api_timeout_ms: int = _number(60_000, 0, INT_MAX)
    """Give up a call without a timeout of its own after this."""

    retry_backoff_ms: int = _number(100, 0)
    """Wait so long before an operation is tried again."""

    client_id: str = _checked("", _label)
    """A name to show."""

    def __post_init__(self) -> None:
        self._check_each()
        self._require(
            self.heartbeat_interval_ms < self.session_timeout_ms,
            *("heartbeat_interval_ms", "is not less than", "session_timeout_ms"),
        )
        self._require(
            self.group_instance_id is None or self.group_id is not None,
            *("group_instance_id", "needs a group, but here is", "group_id"),
        )
