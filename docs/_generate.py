"""Makes the pages of the reference from the code, when the site is built.

mkdocs runs this file as a hook (see mkdocs.yml).  The tables below hold what the
code does not say; tests/test_docs.py checks that each of them is complete.
"""

from __future__ import annotations

import argparse
import inspect
import os
import pydoc
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from embedlog import errors
from embedlog.config import (
    ConsumerConfig,
    GroupConfig,
    MaintenanceConfig,
    ProducerConfig,
    ShareConsumerConfig,
    ShareGroupConfig,
    TopicConfig,
)
from embedlog.config.documentation import field_docstrings
from embedlog.config.settings import Settings
from embedlog.metrics import GROUPS

DOCS = Path(__file__).parent
OWN = "embedlog only"
SAME = "the same"

# Settings

CONFIGS = {
    "topic": (
        TopicConfig,
        "Topic settings",
        "Given to `log.create_topic(name, config={...})`, `log.alter_topic` and "
        "`embedlog topics create -c NAME=VALUE`.",
    ),
    "producer": (
        ProducerConfig,
        "Producer settings",
        "Given to `log.producer(...)` as keyword arguments.",
    ),
    "consumer": (
        ConsumerConfig,
        "Consumer settings",
        "Given to `log.consumer(...)` as keyword arguments.",
    ),
    "group": (
        GroupConfig,
        "Group settings",
        "Given to `embedlog.run_group` as keyword arguments, beside those of its consumers.",
    ),
    "share_consumer": (
        ShareConsumerConfig,
        "Share consumer settings",
        "Given to `log.share_consumer(...)` as keyword arguments, beside those of consumers that are "
        "not about groups.",
    ),
    "share_group": (
        ShareGroupConfig,
        "Share group settings",
        "Given to `log.groups[name].alter({...})` and `embedlog groups alter`, as are the group "
        "settings above.",
    ),
    "maintenance": (
        MaintenanceConfig,
        "Maintenance settings",
        "Given to `embedlog.open(path, maintenance={...})`. In Kafka they belong to the broker.",
    ),
}

KAFKA_DEFAULTS: dict[str, dict[str, str]] = {
    "share_consumer": dict.fromkeys(ShareConsumerConfig.__settings__, SAME),
    "share_group": dict.fromkeys(ShareGroupConfig.__annotations__, SAME),
    "topic": {
        "index_interval_bytes": "`4096`",
        "key_serializer": OWN,
        "mirror_source": OWN,
        "replica_lag_time_max_ms": "the same (of the broker)",
        "message_timestamp_after_max_ms": "`3600000` (1 h)",
        "producer_id_expiration_ms": "the same (of the broker)",
        "audit": OWN,
        "errors_deadletterqueue_group_enable": "the same; since Kafka 4.4",
        "key_index_enable": OWN,
        "rebatch_min_rows": OWN,
        "retention_bytes_hard": OWN,
        "retention_clock": OWN,
        "retention_min_consumed": OWN,
        "retention_topic_bytes": OWN,
        "segment_max_offset_span": OWN,
        "statistics_columns": OWN,
        "value_serializer": OWN,
        **dict.fromkeys(
            [
                *("cleanup_policy", "compression_type", "delete_retention_ms"),
                *("file_delete_delay_ms", "flush_messages", "flush_ms", "max_compaction_lag_ms"),
                *("max_message_bytes", "message_timestamp_before_max_ms"),
                *("message_timestamp_type", "min_cleanable_dirty_ratio", "min_compaction_lag_ms"),
                *("min_insync_replicas", "preallocate", "retention_bytes", "retention_ms"),
                *("segment_bytes", "segment_index_bytes", "segment_jitter_ms", "segment_ms"),
                "unclean_leader_election_enable",
            ],
            SAME,
        ),
    },
    "producer": {
        "batch_size": "`16384` (16 KiB)",
        "linger_ms": "`5`; `0` before Kafka 4.0",
        "allow_pickle": OWN,
        "partitioner_sticky_bytes": OWN,
        "partitioner_sticky_ms": OWN,
        "producer_name": OWN,
        "strict": OWN,
        **dict.fromkeys(
            [
                *("acks", "buffer_memory", "client_id", "compression_type", "delivery_timeout_ms"),
                *("enable_idempotence", "key_serializer", "max_block_ms"),
                *("max_in_flight_requests_per_connection", "max_request_size"),
                *("metadata_max_age_ms", "partitioner", "partitioner_adaptive_partitioning_enable"),
                *("partitioner_ignore_keys", "request_timeout_ms", "retries", "retry_backoff_ms"),
                *("transactional_id", "value_serializer"),
            ],
            SAME,
        ),
    },
    "consumer": {
        "allow_pickle": OWN,
        "consumer_timeout_ms": "the same (kafka-python)",
        "strict": OWN,
        "metadata_max_age_ms": "`300000` (5 min)",
        **dict.fromkeys(
            [
                *("allow_auto_create_topics", "auto_commit_interval_ms", "auto_offset_reset"),
                *("check_crcs", "client_id", "default_api_timeout_ms", "enable_auto_commit"),
                *("exclude_internal_topics", "fetch_max_bytes", "fetch_max_wait_ms"),
                *("fetch_min_bytes", "group_id", "group_instance_id", "heartbeat_interval_ms"),
                *("isolation_level", "key_deserializer", "max_partition_fetch_bytes"),
                *("max_poll_interval_ms", "max_poll_records", "partition_assignment_strategy"),
                *("request_timeout_ms", "retry_backoff_ms", "session_timeout_ms"),
                "value_deserializer",
            ],
            SAME,
        ),
    },
    "group": {
        "errors_deadletterqueue_topic_name": SAME,
        "errors_deadletterqueue_copy_record_enable": "`false`",
        "errors_deadletterqueue_auto_create_topics_enable": "`false` (of the broker)",
    },
    "maintenance": {
        "log_cleaner_io_buffer_size": "`524288` (512 KiB)",
        "log_retention_check_interval_ms": "`300000` (5 min)",
        **dict.fromkeys(
            [
                *("log_cleaner_backoff_ms", "log_cleaner_dedupe_buffer_size", "log_cleaner_enable"),
                *("log_cleaner_io_buffer_load_factor", "log_cleaner_io_max_bytes_per_second"),
                *("log_cleaner_threads", "offsets_retention_check_interval_ms"),
                *("offsets_retention_minutes", "producer_id_expiration_check_interval_ms"),
                *("auto_leader_rebalance_enable", "leader_imbalance_per_broker_percentage"),
                *("leader_imbalance_check_interval_seconds", "follower_replication_throttled_rate"),
            ],
            SAME,
        ),
    },
}
"""What Kafka 4 has as the default of each setting."""

VALUES = {
    ("topic", "cleanup_policy"): "`delete`, `compact` or `compact,delete`",
    ("topic", "compression_type"): "`producer`, `none`, `lz4` or `zstd`",
    ("topic", "key_serializer"): "the name of a [serializer](../values.md#serializers)",
    ("topic", "message_timestamp_type"): "`CreateTime` or `LogAppendTime`",
    ("topic", "mirror_source"): "`SITE/TOPIC`, or empty",
    ("topic", "retention_clock"): "`append` or `record`",
    ("topic", "retention_min_consumed"): "names of groups, separated by commas, or `all`",
    ("topic", "statistics_columns"): "names of columns, separated by commas, or `none`",
    ("topic", "value_serializer"): "the name of a [serializer](../values.md#serializers)",
    ("producer", "acks"): "`0`, `1` or `all`",
    ("producer", "client_id"): "str",
    ("producer", "compression_type"): "`none`, `lz4` or `zstd`",
    ("producer", "key_serializer"): "a [serializer](../values.md#serializers)",
    ("producer", "partitioner"): "`None`, `round_robin` or callable",
    ("producer", "producer_name"): "str or `None`",
    ("producer", "transactional_id"): "str or `None`",
    ("producer", "value_serializer"): "a [serializer](../values.md#serializers)",
    ("group", "errors_deadletterqueue_topic_name"): "str or `None`",
    ("consumer", "auto_offset_reset"): "`latest`, `earliest` or `none`",
    ("consumer", "client_id"): "str",
    ("consumer", "group_id"): "str or `None`",
    ("consumer", "group_instance_id"): "str or `None`",
    ("consumer", "isolation_level"): "`read_uncommitted` or `read_committed`",
    ("share_group", "share_auto_offset_reset"): (
        "`latest`, `earliest`, or `by_duration:` and a duration, such as `PT1H`"
    ),
    ("consumer", "key_deserializer"): "a [deserializer](../values.md#serializers)",
    ("consumer", "partition_assignment_strategy"): "names of assignors, or assignors",
    ("consumer", "value_deserializer"): "a [deserializer](../values.md#serializers)",
}
"""What a setting takes where its type alone does not say so."""

KEPT = {
    ("producer", "max_in_flight_requests_per_connection"): (
        "Appends are made one at a time. More than 5 exclude idempotence, as in Kafka."
    ),
    ("producer", "metadata_max_age_ms"): "A change of a topic is seen immediately.",
    ("consumer", "isolation_level"): "No reader sees records that were not published.",
    ("share_consumer", "share_acquire_mode"): (
        "A poll never returns more than `max_poll_records`, as with `record_limit`."
    ),
    ("share_group", "share_isolation_level"): "No reader sees records that were not published.",
}
"""Settings that are limits or promises which embedlog keeps at any value, and why."""

_UNITS = {
    "bytes": [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")],
    "ms": [(86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s")],
    "minutes": [(1440, "d")],
}
_NEVER = {(1 << 63) - 1, float("inf")}


def settings_page() -> str:
    """Return the page of all settings."""
    parts = [
        "# Settings",
        "Every setting has two spellings, `retention.ms` and `retention_ms`, and both are accepted "
        "everywhere. An unknown name is refused, and the error names the nearest known one. "
        "No setting is ignored in silence. *Kept at any value* means that the setting is a limit "
        "or a promise that embedlog keeps whatever its value is. *Only the default* means that "
        "embedlog does not have the feature, and refuses other values.",
        "Producers and consumers ignore the settings for connections to brokers, such as "
        "`bootstrap_servers`, `security_protocol` and all that begin with `sasl_`, `ssl_` or "
        "`socket_`: a log has no network. "
        "Each producer and consumer logs one line at INFO that lists what it ignores; "
        "`strict=True` refuses these settings instead.",
        "*Kafka's default* is that of Kafka 4.",
    ]
    for kind, (config, title, use) in CONFIGS.items():
        parts += [f"## {title}", use, _settings_table(kind, config)]
    return "\n\n".join(parts) + "\n"


def _settings_table(kind: str, config: type[Settings]) -> str:
    rows = ["| setting | default | Kafka's default | effect |", "|---|---|---|---|"]
    effects = field_docstrings(config)
    defaults = config()
    for name in (each for each in config.__annotations__ if each in config.__settings__):
        spelling = (
            name if kind in ("producer", "consumer", "share_consumer") else name.replace("_", ".")
        )
        effect = effects.get(name, "")
        if reason := KEPT.get((kind, name)):
            effect = f"**Kept at any value.** {reason}"
        takes = VALUES.get((kind, name)) or config.__annotations__[name].replace(
            " | None", " or `None`"
        )
        default = shown(name, getattr(defaults, name))
        in_kafka = KAFKA_DEFAULTS[kind][name]
        first = f'<span id="{kind}.{name}"></span>`{spelling}`<br>{takes}'
        rows.append(f"| {first} | {default} | {in_kafka} | {cell(effect)} |")
    return "\n".join(rows)


def shown(name: str, value: Any) -> str:
    """Return a default as a reader wants it: as it is typed, and in a larger unit.

    >>> shown("segment_bytes", 1 << 30)
    '`1073741824` (1\\xa0GiB)'
    """
    if isinstance(value, tuple):
        return "`" + ",".join(map(str, value)) + "`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value in _NEVER:
        return "no limit"
    if value == "":
        return "empty"
    unit = "bytes" if name.endswith(("_size", "_memory")) else name.rpartition("_")[2]
    for size, word in _UNITS.get(unit, ()):
        if isinstance(value, int) and value >= size and value % size == 0:
            return f"`{value}` ({value // size}\N{NO-BREAK SPACE}{word})"
    return f"`{value}`"


# Errors

ERRORS: dict[str, dict[str, str]] = {
    "Usage": {
        "ClosedError": "Open the log again, or make a new producer or consumer.",
        "IllegalStateError": "Follow the error's text: it names the call that has to come first.",
        "ReadOnlyError": 'Open the log with `mode="rw"`.',
        "InvalidTopicError": "Choose another name.",
        "InvalidConfigError": "Correct the setting that the error names; see the settings.",
        "InvalidSchemaError": "Correct the schema, or the column that the error names.",
        "IncompatibleSchemaError": "Change the schema as its `reasons` require, such as by a "
        "default, or set another compatibility level.",
        "UnknownSnapshotError": "Take another one; `log.snapshots` lists what there is.",
        "SnapshotAlreadyExistsError": "Delete it with `log.snapshots.delete(name)`, or take another name.",
        "UnknownSchemaError": "Register the schema; `log.schema_registry.subjects()` lists what there is.",
        "InvalidQueryError": "Correct the query, or the filter, as the error says.",
        "InvalidPartitionsError": "Ask for at least as many partitions as the topic has.",
        "InvalidPartitionError": "Pass an int, or a `TopicPartition`.",
        "InvalidRecordError": "Correct the records in `indices`, and send them again.",
        "InvalidTimestampError": "Correct the timestamps, or the settings of the topic.",
        "OffsetsOutOfOrderError": "Sort the batches by offset before the call.",
        "UnexpectedAppendOffsetError": "Continue at the end of the log.",
        "FencedLeaderEpochError": "Truncate the copy to where the histories part, and copy from "
        "there on.",
        "SerializationError": "Encode to bytes, or give the producer a serializer.",
        "RecordTooLargeError": "Send less in one record, or raise the limit that is named.",
        "RecordBatchTooLargeError": "Send fewer records in one call, or raise `segment.bytes`.",
        "TopicAlreadyExistsError": "Apply the `differences` with the calls that the error names, "
        "or leave them out of `create_topic`.",
        "UnknownTopicOrPartitionError": "Create the topic, or add partitions; check the spelling.",
        "OffsetOutOfRangeError": "Seek to an offset between the start and the end of the log.",
        "NoOffsetForPartitionError": "`seek`, or set `auto_offset_reset`.",
        "LogTruncatedError": "Continue at `next_offset`, and undo what came from records past it.",
        "RecordDeserializationError": "Handle the bytes in the error; `seek` past the record.",
        "WakeupError": "Nothing: this is how `wakeup` ends a call that waits.",
    },
    "Groups": {
        "InconsistentGroupProtocolError": "Give all members a common assignor in "
        "`partition_assignment_strategy`.",
        "InvalidGroupIdError": "Set `group_id` to 1 to 360 bytes.",
        "UnknownMemberIdError": "`poll`: the consumer joins again as a new member.",
        "MaxPollExceededError": "`poll` more often, or raise `max_poll_interval_ms`.",
        "FencedInstanceIdError": "Close this consumer; give each process its own "
        "`group_instance_id`.",
        "FencedError": "Stop the work: another process does it now.",
        "CommitFailedError": "`poll` to get the new assignment; records since the last commit are "
        "delivered to their new owner.",
        "OffsetMetadataTooLargeError": "Commit shorter metadata.",
        "NonEmptyGroupError": "Close the members that the error names, or use `remove_members`.",
        "InvalidRecordStateError": "Take fewer records at a time, or renew their locks; other consumers "
        "have those that the error names.",
        "GroupSubscribedToTopicError": "Wait until no member subscribes to the topic.",
        "GroupIdNotFoundError": "Check the name: `log.groups` lists all groups.",
        "GroupMaxSizeReachedError": "Close another member first.",
        "ProcessDiedError": "Look for what kills the processes, such as a lack of memory; then run "
        "again: it continues at the last commit.",
        "AssignorError": "Correct the assignor; `problems` says what is wrong.",
    },
    "Spark": {
        "DataLossError": "Plan splits again. In Spark, decide whether the loss is acceptable; then "
        "set `failOnDataLoss` to `false`, or start again with a new checkpoint.",
        "SparkSetupError": "Install or set what the error names.",
        "SparkQueryError": "Read the first line; Spark's own exception is the `__cause__`.",
    },
    "Producing": {
        "TimeoutError": "Try again, or allow more time.",
        "BufferExhaustedError": "Send more slowly, or raise `buffer_memory` or `max_block_ms`.",
        "DeliveryFailedError": "Act on its `errors`, and send the records again if these allow it.",
        "ConflictError": "Read what was appended, from `offset` on, and decide anew.",
        "OutOfOrderSequenceError": "Ask `last_sequence` where to continue.",
        "InvalidProducerEpochError": "Close this producer: a newer one has its name.",
        "RestartedApplicationError": "Use another name, or allow the restart "
        '(`.option("allowRestart", "true")` in Spark).',
    },
    "Replication": {
        "InvalidReplicationFactorError": "Ask for fewer replicas, or add a directory.",
        "InvalidReplicationAssignmentError": "Name each directory once; `embedlog replicas list` "
        "prints their ids.",
        "NotEnoughReplicasError": "Bring the other directories back, or send with `acks=1`.",
        "NotEnoughReplicasAfterAppendError": "Bring the other directories back.",
        "NotLeaderOrFollowerError": "Repeat the call.",
        "ReplicaNotAvailableError": "Bring one of its `replicas` back, or elect a leader that is "
        "not in sync.",
        "EligibleLeadersNotAvailableError": "Bring back the directory with more records, or give "
        "it up with `embedlog replicas remove PATH --force`.",
        "ReplicasDivergedError": "Open the directory that counts alone, remove the other one, and "
        "add it again, empty.",
    },
    "Mirrors": {
        "MirroredTopicError": "Write to the source; if that is lost, make the copy writable with "
        "`log.mirrors.failover`.",
        "MirrorConflictError": "Mirror as a site, or delete the topic that is in the way; after a "
        "failover, mirror in the other direction.",
        "KafkaClusterError": "Check that the brokers run and can be reached; run the mirror again, "
        "or let one that follows try again by itself.",
        "MirrorDivergedError": "Truncate the copy at `next_offset`, or delete it, and start the "
        "mirror again.",
    },
    "Storage": {
        "StorageError": "Look up `errno`; the log is as it was before the call.",
        "DiskFullError": "Make room: delete records, or lower the retention. Appends continue by "
        "themselves.",
        "DurabilityError": "Check the disk, then run `embedlog repair --yes`.",
        "LogDeletedError": "Close the log, restore its directory if you have a copy, and open it "
        "again.",
        "LockTimeoutError": "Look at the process `pid`: continue or end it. Or raise "
        "`lock_timeout`.",
        "CorruptionError": "Run `embedlog verify`, then `embedlog repair`; restore the file from a "
        "backup if there is one.",
        "CorruptBatchError": "As for `CorruptionError`; a consumer may seek past the batch.",
        "UnsupportedFilesystemError": "Open the log on the host that has its disk, or "
        "pass `unsafe_filesystem=True` if no other host opens it.",
        "UnsupportedFormatError": "Use the version of embedlog that wrote the log.",
        "NotALogError": "Check the path; an empty or a new directory becomes a log.",
    },
}
"""What to do about each error."""


def error_classes() -> dict[str, type[errors.EmbedlogError]]:
    """Return all errors but their root, by name."""
    members = vars(errors).values()
    kinds = [member for member in members if inspect.isclass(member)]
    kinds = [kind for kind in kinds if issubclass(kind, errors.EmbedlogError)]
    return {kind.__name__: kind for kind in kinds if kind is not errors.EmbedlogError}


def errors_page() -> str:
    """Return the page of all errors."""
    parts = [
        "# Errors",
        "All of them are in `embedlog.errors` and derive from `EmbedlogError`. Their text says "
        "what happened, where, and what to do; `topic`, `partition`, `offset`, `path`, `position`, "
        "`group` and `member` say where as fields, and are `None` if unknown. They survive "
        "pickling, so they can cross processes.",
        "*Retry* says whether the same call may succeed later without any change: "
        "`error.retriable`.",
    ]
    classes = error_classes()
    for title, kinds in ERRORS.items():
        rows = ["| error | raised when | retry | what to do |", "|---|---|---|---|"]
        for name, todo in kinds.items():
            kind = classes[name]
            bases = [f"`{base.__name__}`" for base in kind.__bases__]
            bases = [base for base in bases if base != "`EmbedlogError`"]
            also = f"<br>a {', '.join(bases)}" if bases else ""
            retry = "yes" if kind.retriable else "no"
            when = cell(inspect.getdoc(kind) or "")
            rows.append(f'| <span id="{name}"></span>`{name}`{also} | {when} | {retry} | {todo} |')
        parts += [f"## {title}", "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


# The command line


def commands() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each command that can be run, with its parser."""
    from embedlog.cli.parser import parser

    yield from _leaves("embedlog", parser())


def _leaves(
    name: str, parser: argparse.ArgumentParser
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                yield from _leaves(f"{name} {word}", below)
            return
    yield name, parser


def command_line_page() -> str:
    """Return the page of all commands with their help."""
    from embedlog.cli.parser import parser
    from embedlog.pipeline.__main__ import parser as pipeline

    parts = [
        "# Command line",
        "Records go to standard output, everything else to standard error. The directory of the "
        "log is `--root DIR`, before or after the command, or the environment variable "
        "`EMBEDLOG_ROOT`.",
        "## embedlog",
        _help(parser()),
        *(part for name, command in commands() for part in (f"## {name}", _help(command))),
        "## python -m embedlog.pipeline",
        _help(pipeline()),
    ]
    return "\n\n".join(parts) + "\n"


def _help(parser: argparse.ArgumentParser) -> str:
    before = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR")}
    os.environ.update(COLUMNS="92", NO_COLOR="1")
    try:
        return f"```text\n{parser.format_help().rstrip()}\n```"
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# Metrics

METRIC_GROUPS = {
    "producer": "Producers: `Producer.metrics()`, and `Log.metrics()` with the client id before "
    "the group (`producer-1.producer-metrics`)",
    "consumer": "Consumers: `Consumer.metrics()`, and `Log.metrics()` with the client id before "
    "the group (`consumer-1.consumer-metrics`)",
    "log": "Logs: `Log.metrics()` and `embedlog metrics`",
    "server": "Servers: `KafkaServer.metrics()`, and `Log.metrics()` with a name before the group "
    "(`server-1.socket-server-metrics`)",
}
"""The parts of the page, with the title of each."""


def metrics_page() -> str:
    """Return the page of all metrics."""
    parts = [
        "# Metrics",
        "How to use them is on the page on [monitoring](../monitoring.md). Under the key of a "
        "group, `metrics()` has a dict of its metrics; what stands in braces is replaced. In "
        "Prometheus and OpenTelemetry these parts are labels.",
    ]
    titles = dict(METRIC_GROUPS)
    for group in GROUPS:
        if title := titles.pop(_part_of(group.key), None):
            parts.append(f"## {title.partition(':')[0]}\n\n{title.partition(': ')[2]}.")
        rows = ["| metric | meaning | in Prometheus |", "|---|---|---|"]
        for metric in group.metrics:
            exported = f"`{metric.exported(group)}`<br>{metric.kind}"
            rows.append(f"| `{metric.name}` | {cell(metric.text)} | {exported} |")
        parts += [f"### `{group.key}`", "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def _part_of(key: str) -> str:
    if key.startswith(("kafka.network", "socket-server")):
        return "server"
    part = key.partition("-")[0]
    return part if part in METRIC_GROUPS else "log"


# The API

API = {
    "log": (
        "Log and topics",
        ["embedlog.open", "embedlog.Log", "embedlog.Topic", "embedlog.Split"],
    ),
    "schemas": (
        "Schemas",
        [
            *("embedlog.SchemaRegistry", "embedlog.RegisteredSchema"),
            *("embedlog.AvroSerializer", "embedlog.AvroDeserializer"),
        ],
    ),
    "producer": ("Producer", ["embedlog.Producer"]),
    "consumer": (
        "Consumer",
        ["embedlog.Consumer", "embedlog.ConsumerRebalanceListener", "embedlog.ShareConsumer"],
    ),
    "groups": (
        "Groups",
        [
            *("embedlog.Groups", "embedlog.ConsumerGroup"),
            *("embedlog.run_group", "embedlog.GroupRun", "embedlog.Retry"),
            *("embedlog.DeadLetters", "embedlog.DeadLetter"),
        ],
    ),
    "replicas": ("Directories and copies", ["embedlog.Replicas"]),
    "housekeeping": ("Housekeeping", ["embedlog.Housekeeping"]),
    "snapshots": (
        "Snapshots and backup",
        [
            *("embedlog.Snapshot", "embedlog.Snapshots", "embedlog.LogAt"),
            *("embedlog.open_snapshot", "embedlog.OpenSnapshot", "embedlog.restore"),
        ],
    ),
    "mirrors": (
        "Mirrors",
        ["embedlog.Mirrors", "embedlog.mirror", "embedlog.MirrorRun"],
    ),
    "server": ("Server", ["embedlog.serve", "embedlog.KafkaServer"]),
    "records": (
        "Records",
        [
            *("embedlog.Record", "embedlog.RecordMetadata", "embedlog.TopicPartition"),
            "embedlog.ShareRecord",
            *("embedlog.OffsetAndMetadata", "embedlog.OffsetAndTimestamp", "embedlog.TopicConfig"),
        ],
    ),
    "spark": (
        "Spark and Parquet",
        [
            *("embedlog.spark.session", "embedlog.spark.register", "embedlog.spark.jar_path"),
            *("embedlog.spark.recommended_conf", "embedlog.spark.offsets_behind_latest"),
            *("embedlog.pipeline.load", "embedlog.pipeline.audit", "embedlog.pipeline.AuditReport"),
        ],
    ),
}
"""Pages of the API: their title, and what is on them."""


def api_page(title: str, names: list[str]) -> str:
    """Return a page whose text mkdocstrings takes from the docstrings."""
    return f"# {title}\n\n" + "\n\n".join(f"::: {name}" for name in names) + "\n"


# Shared


def cell(text: str) -> str:
    """Return a docstring as the content of a cell of a table."""
    text = re.sub(r"``(.+?)``", r"`\1`", text)
    text = re.sub(r"`embedlog\.[\w.]+`", lambda code: code[0], text)
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


@cache
def rule_codes() -> frozenset[str]:
    """Return the codes that the page of rules defines."""
    text = (DOCS / "semantics.md").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^- \*\*([A-Z][0-9]+[a-z]?)\*\* ", text, re.MULTILINE))


def pages() -> dict[str, str]:
    """Return all pages that are made: path without its ending, and text."""
    made = {f"reference/{name}": api_page(*page) for name, page in API.items()}
    changes = (DOCS.parent / "CHANGELOG.md").read_text(encoding="utf-8")
    return {
        **made,
        "reference/settings": settings_page(),
        "reference/errors": errors_page(),
        "reference/metrics": metrics_page(),
        "reference/command-line": command_line_page(),
        "changes": re.sub(r"\]\(docs/", "](", changes),
    }


# All pages as text, for language models: https://llmstxt.org

_SENTENCE = re.compile(r"^(?![#|>:!-])\S.*?[.](?=\s|$)", re.MULTILINE)
_DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)


def api_text(name: str) -> str:
    """Return the signatures and docstrings of a function, or of a class and its methods."""
    found: Any = pydoc.locate(name)
    members = {name: found}
    if inspect.isclass(found):
        # Names that only raise what to call instead are not there.
        names = [each for each in dir(found) if not each.startswith("_") and hasattr(found, each)]
        members |= {f"{name}.{each}": getattr(found, each) for each in names}
    parts = []
    for title, member in members.items():
        if callable(member) or isinstance(member, property):
            signature = inspect.signature(member) if callable(member) else ""
            parts.append(f"## `{title}{signature}`\n\n{inspect.getdoc(member) or ''}")
    return "\n\n".join(parts)


def navigated(nav: list[Any], section: str = "Pages") -> Iterator[tuple[str, str]]:
    """Yield the section and the path of each page, in the order of the navigation."""
    for entry in nav:
        for title, inside in entry.items() if isinstance(entry, dict) else [("", entry)]:
            yield from navigated(inside, title) if isinstance(inside, list) else [(section, inside)]


def texts_for_models(nav: list[Any], description: str) -> dict[str, str]:
    """Return `llms.txt`, a list of the pages, and `llms-full.txt`, which has their text."""
    made, full = pages(), []
    sections: dict[str, list[str]] = {}
    for section, path in navigated(nav):
        written = DOCS / path
        text = written.read_text(encoding="utf-8") if written.exists() else made[path[:-3]]
        title, body = text.removeprefix("# ").split("\n", 1)
        sentence = _SENTENCE.search(re.sub(r"```.*?```", "", body, flags=re.DOTALL))
        about = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", f": {sentence[0]}" if sentence else "")
        sections.setdefault(section, []).append(f"- [{title}]({path[:-3]}.html){about}")
        full.append(f"<!-- {path} -->\n\n{_DIRECTIVE.sub(lambda name: api_text(name[1]), text)}")
    head = f"# embedlog\n\n> {description}\n\nAll pages as one text: [llms-full.txt](llms-full.txt)"
    lists = ["\n".join([f"## {section}\n", *lines]) for section, lines in sections.items()]
    return {"llms.txt": "\n\n".join([head, *lists, ""]), "llms-full.txt": "\n".join(full)}


# Hooks of mkdocs

_RULE = re.compile(r"<li>(<p>)?<strong>([A-Z]\d+[a-z]?)</strong>")
_CITED = re.compile(r"\(([^()]*\b[A-Z]\d+[a-z]?)\)")
_CODE = re.compile(r"\b[A-Z]\d+[a-z]?\b")
_ERROR = re.compile(r"<code>(\w+Error)</code>(?!</a>)")
_OUTSIDE = re.compile(
    r"\[([^\]]+)\]\(\.\./(?:\.\./)?((?:examples|bench|tests|embedlog)/[\w./-]+|[A-Z]+\.md)\)"
)


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the pages that are made from the code."""
    from mkdocs.structure.files import File

    for name, text in pages().items():
        files.append(File.generated(config, f"{name}.md", content=text))
    return files


def on_post_build(config: Any, **_: Any) -> None:
    """Write the texts for language models beside the pages."""
    for name, text in texts_for_models(config["nav"], config["site_description"]).items():
        (Path(config["site_dir"]) / name).write_text(text, encoding="utf-8")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Name files outside of the docs instead of linking to them; list what the reference has."""
    markdown = _OUTSIDE.sub(
        lambda link: f"`{link[2]}`" if link[1] == link[2] else f"{link[1]} (`{link[2]}`)",
        markdown,
    )
    if page.file.src_uri != "reference/index.md":
        return markdown
    entries = [(name, title) for name, (title, _) in API.items()]
    entries += [("settings", "Settings"), ("errors", "Errors")]
    entries += [("metrics", "Metrics"), ("command-line", "Command line")]
    return markdown + "\n" + "\n".join(f"- [{title}]({name}.md)" for name, title in entries) + "\n"


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Give each rule an anchor, and link the codes that are cited to it."""
    if page.file.src_uri == "semantics.md":
        return _RULE.sub(r'<li id="\2">\1<strong>\2</strong>', html)
    up = "../" * page.file.src_uri.count("/")

    def link(code: re.Match[str]) -> str:
        if code[0] not in rule_codes():
            return code[0]
        return f'<a href="{up}semantics.html#{code[0]}">{code[0]}</a>'

    def error_link(error: re.Match[str]) -> str:
        if error[1] not in error_classes():
            return error[0]
        return f'<a href="{up}reference/errors.html#{error[1]}">{error[0]}</a>'

    parts = re.split(r"(<pre.*?</pre>|<code.*?</code>|<[^>]+>)", html, flags=re.DOTALL)
    linked = [
        part if index % 2 else _CITED.sub(lambda cited: f"({_CODE.sub(link, cited[1])})", part)
        for index, part in enumerate(parts)
    ]
    html = "".join(linked)
    return html if page.file.name == "errors" else _ERROR.sub(error_link, html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Load the one script that the theme takes from elsewhere from beside the page."""
    up = "../" * page.file.src_uri.count("/")
    return output.replace("https://unpkg.com/iframe-worker/shim", f"{up}assets/iframe-worker.js")


def on_post_template(output_content: str, **_: Any) -> str:
    """Do the same for pages without a source, such as the one for wrong addresses."""
    return output_content.replace(
        "https://unpkg.com/iframe-worker/shim", "/assets/iframe-worker.js"
    )
