"""The metrics of clients, servers and logs: their names, which are Kafka's, and their forms.

A part that counts yields samples.  `nested` makes of them the dict that ``metrics()`` returns,
and `prometheus_text` what Prometheus reads; OpenTelemetry takes the samples.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from math import nan
from typing import Literal, NamedTuple

from embedlog.errors import InvalidConfigError

Metrics = dict[str, dict[str, float]]
"""Values by the name of the metric, by the key of its group."""


class Metric(NamedTuple):
    """The definition of one metric."""

    name: str
    kind: Literal["counter", "gauge"]
    text: str
    """What the value is: the beginning of a sentence."""
    exporter_name: str = ""
    """The name in Prometheus, if it is not made of the group's ``prefix`` and the name."""

    def exported(self, group: MetricGroup) -> str:
        """Return the name for Prometheus.

        >>> group = MetricGroup("producer-metrics", "kafka_producer_producer_metrics", ())
        >>> Metric("record-send-total", "counter", "").exported(group)
        'kafka_producer_producer_metrics_record_send_total'
        """
        return self.exporter_name or f"{group.prefix}_{self.name.replace('-', '_').lower()}"


class MetricGroup(NamedTuple):
    """Metrics with the same labels."""

    key: str
    """The key in the dict of ``metrics()``, with the labels in braces."""
    prefix: str
    """The prefix of the names in Prometheus, as Kafka's JMX exporter makes it."""
    metrics: tuple[Metric, ...]


class Sample(NamedTuple):
    """The value of a metric at one moment."""

    key: str
    """The key of its `MetricGroup`."""
    name: str
    value: float
    labels: dict[str, str]
    """What the braces in the key stand for; and ``client_id``, if the sample is one of several
    clients'."""


def nested(samples: Iterable[Sample]) -> Metrics:
    """Return samples as kafka-python's ``metrics()`` has them.

    >>> nested([Sample("producer-topic-metrics.{topic}", "byte-total", 7, {"topic": "orders"})])
    {'producer-topic-metrics.orders': {'byte-total': 7}}
    """
    metrics: Metrics = {}
    for key, name, value, labels in samples:
        client = f"{labels['client_id']}." if "client_id" in labels else ""
        metrics.setdefault(client + key.format_map(labels), {})[name] = value
    return metrics


def average(total: float, count: int) -> float:
    """Return an average; NaN of nothing, as in Kafka."""
    return total / count if count else nan


PRODUCER = "producer-metrics"
PRODUCER_TOPIC = "producer-topic-metrics.{topic}"
CONSUMER = "consumer-metrics"
COORDINATOR = "consumer-coordinator-metrics"
FETCH = "consumer-fetch-manager-metrics"
FETCH_TOPIC = "consumer-fetch-manager-metrics.{topic}"
FETCH_PARTITION = "consumer-fetch-manager-metrics.{topic}-{partition}"
LOG = "kafka.log.{topic}-{partition}"
TOPIC = "kafka.topic.{topic}"
GROUP = "consumergroup.{consumergroup}"
GROUP_TOPIC = "consumergroup.{consumergroup}.{topic}"
GROUP_PARTITION = "consumergroup.{consumergroup}.{topic}-{partition}"
MAINTENANCE = "maintenance"
MAINTENANCE_JOB = "maintenance.{job}"
REPLICA_MANAGER = "kafka.server.ReplicaManager"
CONTROLLER = "kafka.controller.KafkaController"
LOG_MANAGER = "kafka.log.LogManager"
LOG_DIRECTORY = "kafka.log.LogManager.{logDirectory}"
MIRROR = "mirror.{mirror}"
MIRROR_TOPIC = "mirror.{mirror}.{topic}"
REQUESTS = "kafka.network.RequestMetrics.{request}"
ERRORS = "kafka.network.RequestMetrics.errors.{error}"
SOCKETS = "socket-server-metrics"

# No part of the dict has two metrics of one name, although two keys may turn out equal: of topic
# "a-0", and of partition 0 of topic "a".
GROUPS = (
    MetricGroup(
        PRODUCER,
        "kafka_producer_producer_metrics",
        (
            Metric("record-send-total", "counter", "Records written"),
            Metric("record-error-total", "counter", "Records that were refused or failed"),
            Metric(
                *("record-unretrieved-error-total", "counter"),
                "Those of them that no caller looked at, and that were logged (embedlog only)",
            ),
            Metric("record-retry-total", "counter", "Records in batches that were tried again"),
            Metric("byte-total", "counter", "Bytes of the batches written, as stored"),
            Metric("batch-total", "counter", "Batches written (embedlog only)"),
            Metric(
                *("batch-duplicate-total", "counter"),
                "Batches that the log had already, and did not write again (embedlog only)",
            ),
            Metric("batch-size-avg", "gauge", "Average bytes of a batch, as stored"),
            Metric("request-total", "counter", "Appends that succeeded; one may have 5 batches"),
            Metric("records-per-request-avg", "gauge", "Average number of records of an append"),
            Metric("request-latency-avg", "gauge", "Average time of an append, in ms"),
            Metric("request-latency-max", "gauge", "Longest time of an append, in ms"),
            Metric(
                *("record-queue-time-avg", "gauge"),
                "Average time that records of `send` waited before they were encoded, in ms",
            ),
            Metric("record-queue-time-max", "gauge", "Longest such time, in ms"),
            Metric("buffer-total-bytes", "gauge", "The setting `buffer_memory`"),
            Metric("buffer-available-bytes", "gauge", "Bytes of it that no unwritten record holds"),
        ),
    ),
    MetricGroup(
        PRODUCER_TOPIC,
        "kafka_producer_producer_topic_metrics",
        (
            Metric("record-send-total", "counter", "Records written to the topic"),
            Metric("record-error-total", "counter", "Records that were refused or failed"),
            Metric("record-retry-total", "counter", "Records in batches that were tried again"),
            Metric("byte-total", "counter", "Bytes of the batches written, as stored"),
        ),
    ),
    MetricGroup(
        CONSUMER,
        "kafka_consumer_consumer_metrics",
        (
            Metric(
                *("last-poll-seconds-ago", "gauge"),
                "Seconds since the last poll or step of an iteration began; -1 before the first",
            ),
            Metric("time-between-poll-avg", "gauge", "Average time from poll to poll, in ms"),
            Metric("time-between-poll-max", "gauge", "Longest time from poll to poll, in ms"),
        ),
    ),
    MetricGroup(
        COORDINATOR,
        "kafka_consumer_consumer_coordinator_metrics",
        (
            Metric("assigned-partitions", "gauge", "Partitions assigned to the consumer"),
            Metric("rebalance-total", "counter", "Generations of the group that it took part in"),
            Metric(
                *("last-rebalance-seconds-ago", "gauge"),
                "Seconds since the last of them; -1 before the first",
            ),
            Metric("commit-total", "counter", "Commits, automatic ones too, without failed ones"),
            Metric("commit-latency-avg", "gauge", "Average time of a commit, in ms"),
            Metric("commit-latency-max", "gauge", "Longest time of a commit, in ms"),
            Metric("heartbeat-total", "counter", "Heartbeats; commits renew the session as well"),
            Metric(
                *("last-heartbeat-seconds-ago", "gauge"),
                "Seconds since the last of them; -1 before the first",
            ),
        ),
    ),
    MetricGroup(
        FETCH,
        "kafka_consumer_consumer_fetch_manager_metrics",
        (
            Metric("records-consumed-total", "counter", "Records returned"),
            Metric("bytes-consumed-total", "counter", "Bytes of these records, as stored"),
            Metric("fetch-total", "counter", "Reads of a partition that returned records"),
            Metric("fetch-size-avg", "gauge", "Average bytes of such a read"),
            Metric("fetch-size-max", "gauge", "Most bytes of such a read"),
            Metric("records-per-request-avg", "gauge", "Average number of records returned of it"),
            Metric("records-lag-max", "gauge", "The largest `records-lag` of a partition now"),
            Metric("records-lead-min", "gauge", "The smallest `records-lead` of a partition now"),
        ),
    ),
    MetricGroup(
        FETCH_TOPIC,
        "kafka_consumer_consumer_fetch_manager_metrics_topic",
        (
            Metric("records-consumed-total", "counter", "Records of the topic returned"),
            Metric("bytes-consumed-total", "counter", "Bytes of these records, as stored"),
            Metric("fetch-size-avg", "gauge", "Average bytes of a read that returned records"),
            Metric("fetch-size-max", "gauge", "Most bytes of such a read"),
            Metric("records-per-request-avg", "gauge", "Average number of records returned of it"),
        ),
    ),
    MetricGroup(
        FETCH_PARTITION,
        "kafka_consumer_consumer_fetch_manager_metrics_partition",
        (
            Metric("records-lag", "gauge", "Offsets from the position to the log end"),
            Metric("records-lead", "gauge", "Offsets from the log start to the position"),
        ),
    ),
    MetricGroup(
        LOG,
        "kafka_log_log",
        (
            Metric("Size", "gauge", "Bytes of the segment files"),
            Metric("NumLogSegments", "gauge", "Segment files"),
            Metric(
                *("LogStartOffset", "gauge", "The first offset that can be read"),
                "kafka_topic_partition_oldest_offset",
            ),
            Metric(
                *("LogEndOffset", "gauge", "The offset of the next record"),
                "kafka_topic_partition_current_offset",
            ),
            Metric(
                *("Offline", "gauge"),
                "1 if it is damaged, or refuses appends after a failed flush, else 0 "
                "(embedlog only)",
            ),
        ),
    ),
    MetricGroup(TOPIC, "kafka_topic", (Metric("partitions", "gauge", "Partitions of the topic"),)),
    MetricGroup(
        GROUP,
        "kafka_consumergroup",
        (Metric("members", "gauge", "Members of the group whose process is alive"),),
    ),
    MetricGroup(
        GROUP_TOPIC,
        "kafka_consumergroup",
        (
            Metric("lag_sum", "gauge", "Sum of `lag` over the partitions of the topic"),
            Metric("current_offset_sum", "gauge", "Sum of `current_offset` over them"),
        ),
    ),
    MetricGroup(
        GROUP_PARTITION,
        "kafka_consumergroup",
        (
            Metric("lag", "gauge", "Offsets from the committed one to the log end"),
            Metric("current_offset", "gauge", "The offset that the group committed"),
        ),
    ),
    MetricGroup(
        MAINTENANCE,
        "embedlog_maintenance",
        (
            Metric("owner-count", "gauge", "1 if a process runs the background jobs, else 0"),
            Metric("owner-pid", "gauge", "That process; 0 without one"),
            Metric("owner-epoch", "gauge", "Grows whenever another process takes over"),
        ),
    ),
    MetricGroup(
        MAINTENANCE_JOB,
        "embedlog_maintenance_job",
        (
            Metric(
                *("time-since-last-run-ms", "gauge"),
                "Milliseconds since any process ran the job last, or first waited to run it; only "
                "of jobs with an interval of at least 3 s",
            ),
        ),
    ),
    MetricGroup(
        MIRROR,
        "embedlog_mirror",
        (
            Metric("running", "gauge", "1 while a process runs the mirror, else 0"),
            Metric("record-total", "counter", "Records copied since the mirror was started"),
            Metric("byte-total", "counter", "Bytes of their batches, as stored"),
            Metric("record-rate", "gauge", "Records copied per second, as last reported"),
            Metric("byte-rate", "gauge", "Bytes copied per second, as last reported"),
            Metric("record-lag", "gauge", "Offsets of the source that are not copied yet"),
            Metric(
                *("record-skipped-total", "counter"),
                "Offsets that retention deleted at the source before they were copied",
            ),
            Metric(
                *("record-dropped-total", "counter"),
                "Records left out by a merging mirror, since they were at the target before",
            ),
            Metric("error-total", "counter", "Errors since the mirror was started"),
            Metric("last-copy-seconds-ago", "gauge", "Seconds since the last copy; -1 before it"),
        ),
    ),
    MetricGroup(
        MIRROR_TOPIC,
        "embedlog_mirror_topic",
        (
            Metric("record-total", "counter", "Records of the topic copied"),
            Metric("record-lag", "gauge", "Offsets of it at the source that are not copied yet"),
            Metric(
                *("record-skipped-total", "counter"),
                "Offsets of it that retention deleted at the source before they were copied",
            ),
        ),
    ),
    MetricGroup(
        REPLICA_MANAGER,
        "kafka_server_replicamanager",
        (
            Metric("PartitionCount", "gauge", "Copies of partitions, in all directories"),
            Metric("LeaderCount", "gauge", "Partitions that have a leader"),
            Metric(
                *("UnderReplicatedPartitions", "gauge"),
                "Partitions with copies out of sync",
            ),
            Metric(
                *("UnderMinIsrPartitionCount", "gauge"),
                "Partitions that refuse `acks=all`: fewer are in sync than `min.insync.replicas`",
            ),
            Metric(
                *("AtMinIsrPartitionCount", "gauge"),
                "Partitions that would do so with one copy less",
            ),
            Metric("OfflineReplicaCount", "gauge", "Copies in directories that are offline"),
            Metric("ReassigningPartitions", "gauge", "Partitions that are being moved"),
            Metric(
                *("isr-shrinks-total", "counter", "Copies that left an ISR since the boot"),
                "kafka_server_replicamanager_isrshrinks_total",
            ),
            Metric(
                *("isr-expands-total", "counter", "Copies that joined an ISR since the boot"),
                "kafka_server_replicamanager_isrexpands_total",
            ),
        ),
    ),
    MetricGroup(
        CONTROLLER,
        "kafka_controller_kafkacontroller",
        (
            Metric("ActiveBrokerCount", "gauge", "Directories that are online"),
            Metric("FencedBrokerCount", "gauge", "Directories that are offline"),
            Metric(
                *("OfflinePartitionsCount", "gauge"),
                "Partitions without a leader, which can neither be read nor written",
            ),
            Metric(
                *("PreferredReplicaImbalanceCount", "gauge"),
                "Partitions that are not led by their first replica",
            ),
            Metric(
                *("leader-elections-total", "counter", "Changes of leaders since the boot"),
                "kafka_controller_controllerstats_leaderelections_total",
            ),
            Metric(
                *("unclean-leader-elections-total", "counter"),
                "Those of them with a leader that was not in sync, so that records are lost",
                "kafka_controller_controllerstats_uncleanleaderelections_total",
            ),
        ),
    ),
    MetricGroup(
        LOG_MANAGER,
        "kafka_log_logmanager",
        (Metric("OfflineLogDirectoryCount", "gauge", "Directories that are offline"),),
    ),
    MetricGroup(
        LOG_DIRECTORY,
        "kafka_log_logmanager",
        (
            Metric("LogDirectoryOffline", "gauge", "1 if the directory is offline, else 0"),
            Metric("LeaderCount", "gauge", "Partitions that are read from it (embedlog only)"),
            Metric("PartitionCount", "gauge", "Copies of partitions in it (embedlog only)"),
        ),
    ),
    MetricGroup(
        REQUESTS,
        "kafka_network_requestmetrics",
        (
            Metric("requests-total", "counter", "Requests that were answered"),
            Metric(
                *("request-bytes-total", "counter", "Bytes of these requests"),
                "kafka_network_requestmetrics_requestbytes_total",
            ),
            Metric(
                *("response-bytes-total", "counter", "Bytes of the answers"),
                "kafka_network_requestmetrics_responsebytes_total",
            ),
            Metric(
                *("total-time-ms-total", "counter"),
                "Time from the end of a request to the end of its answer, in ms; a fetch waits for "
                "records in it, and a join for other members",
                "kafka_network_requestmetrics_totaltimems_total",
            ),
            Metric(
                *("total-time-ms-max", "gauge", "Longest such time, in ms"),
                "kafka_network_requestmetrics_totaltimems_max",
            ),
        ),
    ),
    MetricGroup(
        ERRORS,
        "kafka_network_requestmetrics",
        (
            Metric(
                *("errors-total", "counter"),
                "Answers for a topic, a partition, a group and so on that were this error",
            ),
        ),
    ),
    MetricGroup(
        SOCKETS,
        "kafka_server_socket_server_metrics",
        (
            Metric("connection-count", "gauge", "Open connections of clients"),
            Metric("connection-creation-total", "counter", "Connections that were accepted"),
            Metric("connection-close-total", "counter", "Those of them that have ended"),
            Metric(
                *("connection-refused-total", "counter"),
                "Connections that were refused: of other users, or too many (embedlog only)",
            ),
            Metric(
                *("MemoryPoolAvailable", "gauge"),
                "Bytes that requests may still take in memory",
                "kafka_network_socketserver_memorypoolavailable",
            ),
            Metric(
                *("memory-pool-depleted-time-total", "counter"),
                "Time that requests waited for memory, in ms",
                "kafka_server_socket_server_metrics_memorypooldepletedtime_total",
            ),
        ),
    ),
)


# Prometheus

_LABEL = re.compile("[a-zA-Z_][a-zA-Z0-9_]*")


def prometheus_text(samples: Iterable[Sample], labels: Mapping[str, str]) -> str:
    """Return samples in Prometheus' text format, version 0.0.4.

    Args:
        samples: The samples.
        labels: Labels to add to each of them.

    Raises:
        InvalidConfigError: A name is not valid for a label.
    """
    check_labels(labels)
    return "".join(f"{line}\n" for line in _prometheus_lines(samples, labels))


def check_labels(names: Iterable[str]) -> None:
    """Check the names of labels.

    Raises:
        InvalidConfigError: A name is not valid.
    """
    for name in names:
        if not _LABEL.fullmatch(name):
            raise InvalidConfigError(
                f"The name of a label must be letters, digits and underscores, got {name!r}"
            )


def _prometheus_lines(samples: Iterable[Sample], common_labels: Mapping[str, str]) -> Iterator[str]:
    values: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        values.setdefault((sample.key, sample.name), []).append(sample)
    for group in GROUPS:
        for metric in group.metrics:
            name = metric.exported(group)
            for number, sample in enumerate(values.get((group.key, metric.name), ())):
                if not number:
                    yield f"# HELP {name} {_escape(metric.text)}"
                    yield f"# TYPE {name} {metric.kind}"
                labels = {**common_labels, **sample.labels}.items()
                texts = ((label, _escape(text).replace('"', r"\"")) for label, text in labels)
                pairs = ",".join(f'{label}="{text}"' for label, text in texts)
                braces = f"{{{pairs}}}" if pairs else ""
                yield f"{name}{braces} {sample.value}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
