"""The settings by name, for type checkers and editors.

Made from the configs by tests/support/option_types.py.  None means the default of a setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, Protocol, TypedDict

from embedlog.record import K, TopicPartition, V
from embedlog.serializers import Deserializer, Serializer, SerializerName

Partitioner = Callable[[bytes | None, list[int], list[int]], int]
"""Called with the bytes of a key, all partitions, and the available ones (again all)."""


class CustomAssignor(Protocol):
    """An assignor of a program; see `embedlog.assignor.Assignor`."""

    @property
    def name(self) -> str:
        """The name that members vote for."""

    @property
    def cooperative(self) -> bool:
        """Whether a rebalance revokes only partitions that move."""

    def assign(
        self, partitions: Mapping[str, int], members: Sequence[Any], /
    ) -> Mapping[str, Iterable[TopicPartition]]:
        """Return the partitions of each member, by its id."""


Assignors = str | CustomAssignor | Sequence[str | CustomAssignor]
"""Names, which a str separates by commas, or assignors; the preferred one first."""


class ProducerOptions(TypedDict, Generic[K, V], total=False):
    """The settings of a producer."""

    acks: Literal[0, 1, -1, "all"] | None
    """When a send is acknowledged: 0, once buffered; 1, once written and visible; ``"all"``, once
    as durable as the ``durability`` of the log."""
    batch_size: int | None
    """A batch is full at this many bytes; larger than Kafka's 16384, for columns."""
    linger_ms: int | None
    """Wait this long for more records before a batch is written."""
    buffer_memory: int | None
    """``send`` waits while this many bytes are not written yet."""
    max_block_ms: int | None
    """How long ``send`` waits before it raises."""
    max_request_size: int | None
    """Refuse larger records, by the estimate of Kafka's producer."""
    compression_type: Literal["none", "gzip", "snappy", "lz4", "zstd"] | None
    """``none``, ``lz4`` or ``zstd``; ``gzip`` means ``zstd``, and ``snappy`` ``lz4``."""
    enable_idempotence: bool | None
    """Whether batches get sequence numbers, so that a retry is not written twice.

    On by default, unless other settings exclude it; an error if set together with those."""
    producer_name: str | None
    """embedlog's own: a persistent identity; a new producer with it fences the older one."""
    transactional_id: str | None
    """Send in transactions only; a new producer with the same id fences the older one.

    With an empty one no producer is fenced, but for what positions of a group fence."""
    key_serializer: Serializer[K] | SerializerName | None
    """Converts keys to bytes; None uses the serializer of the topic, and ``"bytes"`` none."""
    value_serializer: Serializer[V] | SerializerName | None
    """Converts values to bytes, likewise."""
    allow_pickle: bool | None
    """Whether a serializer, or that of a topic, may be ``"pickle"``."""
    partitioner: Literal["round_robin"] | Partitioner | None
    """None: by key, without a key sticky; ``"round_robin"``; or kafka-python's
    ``callable(key_bytes, all_partitions, available_partitions)``."""
    partitioner_ignore_keys: bool | None
    """Distribute records with keys as if they had none."""
    partitioner_sticky_bytes: int | None
    """embedlog's own: records without a key move on to another partition after this many bytes,
    or ``batch_size`` if less.

    The default is that of Kafka's ``batch.size``; batches are larger here, and never split."""
    partitioner_sticky_ms: int | None
    """embedlog's own: and after this time, so that slow streams reach all partitions."""
    partitioner_adaptive_partitioning_enable: bool | None
    """Choose partitions with longer queues less often."""
    retries: int | None
    """How often a failed append is retried; after that the record fails with the last error."""
    retry_backoff_ms: int | None
    """How long to wait before a retry."""
    delivery_timeout_ms: int | None
    """A record fails if it is not written this long after ``send``.

    By default two minutes, or ``linger_ms`` plus ``request_timeout_ms`` if that is more."""
    request_timeout_ms: int | None
    """How long an append waits for its locks."""
    max_in_flight_requests_per_connection: int | None
    """An upper limit, which is kept at any value: appends are made one at a time.  More
    than 5 exclude idempotence, as in Kafka."""
    metadata_max_age_ms: int | None
    """An upper limit, which is kept at any value: a change of a topic is seen immediately."""
    client_id: str | None
    """A name for display."""
    strict: bool | None
    """embedlog's own: refuse settings for connections to brokers, such as ``bootstrap_servers``,
    which are otherwise ignored with one line in the log of the program."""


class GroupOptions(TypedDict, Generic[K, V], total=False):
    """The settings of a consumer in a group."""

    group_instance_id: str | None
    """The name of a static member, which keeps its partitions over a restart."""
    partition_assignment_strategy: Assignors | None
    """Names of assignors, or assignor objects, the preferred one first."""
    auto_offset_reset: Literal["latest", "earliest", "none"] | None
    """Where to start without a committed offset, or if it is out of range."""
    auto_commit_interval_ms: int | None
    """The interval of these commits."""
    max_poll_records: int | None
    """Return at most this many records from one ``poll``."""
    max_poll_interval_ms: int | None
    """The consumer loses its partitions if ``poll`` is not called for this long."""
    session_timeout_ms: int | None
    """The consumer loses its partitions if its process hangs for this long; a crash is detected
    at once."""
    heartbeat_interval_ms: int | None
    """The interval of heartbeats."""
    fetch_min_bytes: int | None
    """Wait for at least this many bytes."""
    fetch_max_bytes: int | None
    """Read at most this much at once, but at least one batch."""
    fetch_max_wait_ms: int | None
    """How long to wait for ``fetch_min_bytes``."""
    max_partition_fetch_bytes: int | None
    """Read at most this much of one partition at once, but at least one batch."""
    key_deserializer: Deserializer[K] | SerializerName | None
    """Converts bytes to keys; None uses the serializer of the topic, and ``"bytes"`` none."""
    value_deserializer: Deserializer[V] | SerializerName | None
    """Converts bytes to values, likewise."""
    allow_pickle: bool | None
    """Whether a deserializer, or that of a topic, may be ``"pickle"``, which can run any code."""
    check_crcs: bool | None
    """Verify the checksum of every column that is read."""
    isolation_level: Literal["read_uncommitted", "read_committed"] | None
    """Both are kept: unpublished records are never visible."""
    exclude_internal_topics: bool | None
    """Whether patterns ignore internal topics."""
    allow_auto_create_topics: bool | None
    """Whether to create a subscribed topic that does not exist."""
    metadata_max_age_ms: int | None
    """The interval of the check for new topics and partitions; Kafka's 300000 saves requests."""
    request_timeout_ms: int | None
    """How long a commit waits for its lock, unless the ``lock_timeout`` of the log is less."""
    default_api_timeout_ms: int | None
    """The same, for a commit without a ``timeout_ms``; the shortest of the three counts."""
    retry_backoff_ms: int | None
    """How long to wait before a retry."""
    client_id: str | None
    """A name for display."""
    strict: bool | None
    """embedlog's own: refuse settings for connections to brokers, such as ``bootstrap_servers``,
    which are otherwise ignored with one line in the log of the program."""


class RunGroupOptions(GroupOptions[K, V], total=False):
    """The settings of a group of `run_group`, and of its consumers."""

    errors_deadletterqueue_topic_name: str | None
    """The topic of the records that the group gave up; the same as ``dead_letter`` of
    `embedlog.Retry`."""
    errors_deadletterqueue_copy_record_enable: bool | None
    """Whether a dead letter has the key, the value and the headers of its record, or only says
    where that is; Kafka's default is false."""
    errors_deadletterqueue_auto_create_topics_enable: bool | None
    """Whether the topic is created if it does not exist; in Kafka a broker setting, and false."""


class ConsumerOptions(GroupOptions[K, V], total=False):
    """The settings of a consumer."""

    group_id: str | None
    """The consumer group; with None the consumer is in no group and commits nothing."""
    enable_auto_commit: bool | None
    """Commit the records that ``poll`` returned, in later calls of ``poll``."""
    consumer_timeout_ms: float | None
    """Iteration ends if no record comes for this long; None waits without a limit."""


class _ReadingOptions(TypedDict, Generic[K, V], total=False):
    """The settings of consumers that share consumers have, too."""

    max_poll_records: int | None
    """Return at most this many records from one ``poll``."""
    fetch_min_bytes: int | None
    """Wait for at least this many bytes."""
    fetch_max_bytes: int | None
    """Read at most this much at once, but at least one batch."""
    fetch_max_wait_ms: int | None
    """How long to wait for ``fetch_min_bytes``."""
    max_partition_fetch_bytes: int | None
    """Read at most this much of one partition at once, but at least one batch."""
    key_deserializer: Deserializer[K] | SerializerName | None
    """Converts bytes to keys; None uses the serializer of the topic, and ``"bytes"`` none."""
    value_deserializer: Deserializer[V] | SerializerName | None
    """Converts bytes to values, likewise."""
    allow_pickle: bool | None
    """Whether a deserializer, or that of a topic, may be ``"pickle"``, which can run any code."""
    check_crcs: bool | None
    """Verify the checksum of every column that is read."""
    isolation_level: Literal["read_uncommitted", "read_committed"] | None
    """Both are kept: unpublished records are never visible."""
    metadata_max_age_ms: int | None
    """The interval of the check for new topics and partitions; Kafka's 300000 saves requests."""
    request_timeout_ms: int | None
    """How long a commit waits for its lock, unless the ``lock_timeout`` of the log is less."""
    default_api_timeout_ms: int | None
    """The same, for a commit without a ``timeout_ms``; the shortest of the three counts."""
    retry_backoff_ms: int | None
    """How long to wait before a retry."""
    client_id: str | None
    """A name for display."""
    strict: bool | None
    """embedlog's own: refuse settings for connections to brokers, such as ``bootstrap_servers``,
    which are otherwise ignored with one line in the log of the program."""
    consumer_timeout_ms: float | None
    """Iteration ends if no record comes for this long; None waits without a limit."""


class ShareConsumerOptions(_ReadingOptions[K, V], total=False):
    """The settings of a share consumer."""

    share_acknowledgement_mode: Literal["implicit", "explicit"] | None
    """``implicit``: records are accepted when more are asked for, unless the program says
    otherwise; ``explicit``: the program acknowledges each before it asks for more."""
    share_acquire_mode: Literal["batch_optimized", "record_limit"] | None
    """Both are ``record_limit``: a poll never returns more than ``max_poll_records``."""


class _UnderscoredTopicOptions(TypedDict, total=False):
    """The settings of a topic, with underscores."""

    segment_bytes: int | None
    """Roll the active segment before it grows larger than this."""
    segment_ms: int | None
    """Roll the active segment once it spans more time than this."""
    segment_jitter_ms: int | None
    """Subtract up to this from ``segment_ms``, so that partitions do not roll at the same time."""
    segment_index_bytes: Literal[10485760] | None
    """Only the default: the index is in LMDB and grows as needed, so it ends no segment."""
    segment_max_offset_span: int | None
    """Roll the active segment before it spans more offsets than this (embedlog's own)."""
    index_interval_bytes: int | None
    """Add an index entry after this many bytes; larger than Kafka's 4096, as batches are."""
    flush_messages: int | None
    """Flush a partition once this many records are not on the disk."""
    flush_ms: int | None
    """Flush a partition once a record has not been on the disk for this long."""
    retention_ms: int | None
    """Delete a segment this long after the time that ``retention_clock`` says; -1 is never."""
    retention_clock: Literal["append", "record"] | None
    """``append``: ``retention_ms`` counts from the last append to a segment, or from the
    timestamp of its youngest record if that is later (embedlog's own); ``record``: from the
    timestamp of its youngest record, whenever that was appended, as in Kafka."""
    retention_bytes: int | None
    """Delete the oldest segments as long as a partition keeps this much; -1 is never."""
    retention_topic_bytes: int | None
    """Delete the oldest segments while all partitions hold more; -1 is never (embedlog's own)."""
    retention_min_consumed: str | None
    """Delete nothing that these groups (separated by commas), or ``all`` groups with a commit in
    the partition, have not consumed, up to ``retention_bytes_hard`` (embedlog's own)."""
    retention_bytes_hard: int | None
    """While a partition holds more, delete what is due in spite of leases and of
    ``retention_min_consumed``; -1 is never (embedlog's own)."""
    max_message_bytes: int | None
    """Refuse larger batches, as Kafka counts: compressed, in its format; a new typed topic
    gets 4 MiB unless another limit is given."""
    cleanup_policy: Literal["delete", "compact", "compact,delete", "delete,compact"] | None
    """``delete``, ``compact`` or ``compact,delete``."""
    min_cleanable_dirty_ratio: float | None
    """Compact a partition once more than this fraction of its bytes is dirty."""
    delete_retention_ms: int | None
    """Keep a tombstone this long after the first compaction that saw it."""
    min_compaction_lag_ms: int | None
    """Do not compact records younger than this."""
    max_compaction_lag_ms: int | None
    """Compact records older than this, whatever the dirty ratio."""
    file_delete_delay_ms: int | None
    """Unlink the file of a deleted segment after this delay."""
    compression_type: Literal["producer", "none", "gzip", "snappy", "lz4", "zstd"] | None
    """``none``, ``lz4`` or ``zstd`` (``gzip`` means ``zstd``, ``snappy`` ``lz4``), whatever the
    producer uses; or ``producer``: as it does."""
    key_serializer: SerializerName | None
    """How keys are stored: producers, consumers and views without a (de)serializer of their own use
    this one; ``bytes`` converts nothing (embedlog's own)."""
    value_serializer: SerializerName | None
    """How values are stored, likewise."""
    statistics_columns: str | None
    """The columns of text (separated by commas) of a typed topic whose smallest and largest values
    are kept, so that reads skip batches by them; those of numbers, times and booleans always are,
    except with ``none`` (embedlog's own)."""
    rebatch_min_rows: int | None
    """Gather the batches of a sealed segment into larger ones if they have fewer records than this
    on average; 0 is never, -1 is 1000 for a typed topic and never for others (embedlog's own)."""
    key_index_enable: bool | None
    """Whether sealed segments get an index of their keys, so that looking up a key reads one
    record; by default where ``cleanup_policy`` has ``compact`` (embedlog's own)."""
    audit: bool | None
    """Whether producers and consumer groups count what they write and read, in the topic
    ``__audit``, so that `Log.audit` can compare them with the log (embedlog's own)."""
    errors_deadletterqueue_group_enable: bool | None
    """Whether groups may put their dead letters into the topic."""
    preallocate: Literal[False] | None
    """Only the default: appends with ``durability="fsync"`` preallocate up to 1 MiB by themselves,
    others let segments grow."""
    message_timestamp_type: Literal["CreateTime", "LogAppendTime"] | None
    """Whether timestamps come from the producer or from the clock of the log."""
    message_timestamp_before_max_ms: int | None
    """Refuse records whose timestamp is further in the past than this."""
    message_timestamp_after_max_ms: int | None
    """Refuse records whose timestamp is further in the future than this."""
    mirror_source: str | None
    """``SITE/TOPIC``: the topic is a copy of that topic of the log, or Kafka cluster, with the id
    ``SITE``, and only the mirror may write to it; a failover sets it back to ``""``
    (embedlog's own)."""
    producer_id_expiration_ms: int | None
    """Forget a producer after this long without an append; in Kafka a broker setting."""
    min_insync_replicas: int | None
    """Refuse appends with ``acks="all"`` while fewer copies are in sync; a partition with
    fewer replicas requires all of them."""
    unclean_leader_election_enable: Literal[False] | None
    """Only the default: a copy that is not in sync leads only after an operator's command."""
    replica_lag_time_max_ms: int | None
    """A copy that has not caught up for this long is not in sync any more; in Kafka a broker
    setting."""


_DottedTopicOptions = TypedDict(
    "_DottedTopicOptions",
    {
        "segment.bytes": "int | None",
        "segment.ms": "int | None",
        "segment.jitter.ms": "int | None",
        "segment.index.bytes": "Literal[10485760] | None",
        "segment.max.offset.span": "int | None",
        "index.interval.bytes": "int | None",
        "flush.messages": "int | None",
        "flush.ms": "int | None",
        "retention.ms": "int | None",
        "retention.clock": "Literal['append', 'record'] | None",
        "retention.bytes": "int | None",
        "retention.topic.bytes": "int | None",
        "retention.min.consumed": "str | None",
        "retention.bytes.hard": "int | None",
        "max.message.bytes": "int | None",
        "cleanup.policy": 'Literal["delete", "compact", "compact,delete", "delete,compact"] | None',
        "min.cleanable.dirty.ratio": "float | None",
        "delete.retention.ms": "int | None",
        "min.compaction.lag.ms": "int | None",
        "max.compaction.lag.ms": "int | None",
        "file.delete.delay.ms": "int | None",
        "compression.type": 'Literal["producer", "none", "gzip", "snappy", "lz4", "zstd"] | None',
        "key.serializer": "SerializerName | None",
        "value.serializer": "SerializerName | None",
        "statistics.columns": "str | None",
        "rebatch.min.rows": "int | None",
        "key.index.enable": "bool | None",
        "audit": "bool | None",
        "errors.deadletterqueue.group.enable": "bool | None",
        "preallocate": "Literal[False] | None",
        "message.timestamp.type": "Literal['CreateTime', 'LogAppendTime'] | None",
        "message.timestamp.before.max.ms": "int | None",
        "message.timestamp.after.max.ms": "int | None",
        "mirror.source": "str | None",
        "producer.id.expiration.ms": "int | None",
        "min.insync.replicas": "int | None",
        "unclean.leader.election.enable": "Literal[False] | None",
        "replica.lag.time.max.ms": "int | None",
    },
    total=False,
)


class TopicOptions(_UnderscoredTopicOptions, _DottedTopicOptions, total=False):
    """The settings of a topic, with dots or underscores."""


class _UnderscoredMaintenanceOptions(TypedDict, total=False):
    """The settings of the maintenance jobs, with underscores."""

    log_retention_check_interval_ms: int | None
    """The interval of retention; Kafka's 300000 would save nothing here."""
    offsets_retention_minutes: int | None
    """Delete the offsets of a group that was not used for this long."""
    offsets_retention_check_interval_ms: int | None
    """The interval of the check for such groups."""
    producer_id_expiration_check_interval_ms: int | None
    """The interval of the check for producers idle for ``producer_id_expiration_ms``."""
    log_cleaner_enable: bool | None
    """Whether to compact topics with ``cleanup.policy=compact``."""
    log_cleaner_threads: int | None
    """The number of partitions to compact at the same time."""
    log_cleaner_backoff_ms: int | None
    """The interval of the check for partitions to compact."""
    log_cleaner_dedupe_buffer_size: int | None
    """Bytes for the offset map, 24 per key; if too small, compaction takes more passes."""
    log_cleaner_io_buffer_load_factor: float | None
    """How full the offset map may become."""
    log_cleaner_io_buffer_size: int | None
    """Bytes to read at once; larger than Kafka's 512 KiB, as batches are."""
    log_cleaner_io_max_bytes_per_second: float | None
    """Limits what all compaction threads together read and write."""
    auto_leader_rebalance_enable: bool | None
    """Whether to elect preferred leaders again, where too many partitions have others."""
    leader_imbalance_per_broker_percentage: int | None
    """How many of the partitions that prefer a directory may be led by another one, in percent."""
    leader_imbalance_check_interval_seconds: int | None
    """The interval of the check for preferred leaders."""
    follower_replication_throttled_rate: float | None
    """Limits the bytes per second that are copied to directories that catch up; appends with
    ``acks="all"`` are not limited."""


_DottedMaintenanceOptions = TypedDict(
    "_DottedMaintenanceOptions",
    {
        "log.retention.check.interval.ms": "int | None",
        "offsets.retention.minutes": "int | None",
        "offsets.retention.check.interval.ms": "int | None",
        "producer.id.expiration.check.interval.ms": "int | None",
        "log.cleaner.enable": "bool | None",
        "log.cleaner.threads": "int | None",
        "log.cleaner.backoff.ms": "int | None",
        "log.cleaner.dedupe.buffer.size": "int | None",
        "log.cleaner.io.buffer.load.factor": "float | None",
        "log.cleaner.io.buffer.size": "int | None",
        "log.cleaner.io.max.bytes.per.second": "float | None",
        "auto.leader.rebalance.enable": "bool | None",
        "leader.imbalance.per.broker.percentage": "int | None",
        "leader.imbalance.check.interval.seconds": "int | None",
        "follower.replication.throttled.rate": "float | None",
    },
    total=False,
)


class MaintenanceOptions(_UnderscoredMaintenanceOptions, _DottedMaintenanceOptions, total=False):
    """The settings of the maintenance jobs, with dots or underscores."""
