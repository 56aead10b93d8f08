"""Metrics: what producers, consumers and logs count, under Kafka's names, and for whom."""

from __future__ import annotations

import errno
import json
import math
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import forks
from support.faulty_files import FaultyFiles

import embedlog
from embedlog.cli import main
from embedlog.errors import DiskFullError, DurabilityError, EmbedlogError
from embedlog.metrics import (
    CONSUMER,
    COORDINATOR,
    FETCH,
    FETCH_PARTITION,
    FETCH_TOPIC,
    GROUPS,
    PRODUCER,
    PRODUCER_TOPIC,
    Sample,
    prometheus_text,
)
from embedlog.record import TopicPartition

ORDERS = [TopicPartition("orders", 0), TopicPartition("orders", 1)]

NEVER = 3_600_000
"""linger_ms in milliseconds: only the test's own thread writes, so all is counted at once."""


@pytest.fixture
def log(tmp_path):
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("orders", partitions=2)
        yield log
        if not log.root.closed:
            assert log.housekeeping.verify() == []


def fill(log, count=10, partition=0):
    """Append one batch of records."""
    with log.producer() as producer:
        producer.send_batch("orders", [b"v"] * count, partition=partition)


def stored_bytes(log):
    """Return the bytes of all batches, without the headers of the files."""
    readers = [log.partition("orders", number).reader(0) for number in range(2)]
    return sum(batch.size for reader in readers for batch in reader.read(1 << 20))


def names_of(samples):
    """Return the names of metrics by the key of their group."""
    names = {}
    for sample in samples:
        names.setdefault(sample.key, set()).add(sample.name)
    return names


DEFINED = {group.key: {metric.name for metric in group.metrics} for group in GROUPS}


# Producers


def test_a_producer_counts_records_bytes_and_appends(log):
    """Kafka's names, nested as kafka-python nests them."""
    with log.producer(linger_ms=NEVER) as producer:
        for number in range(10):
            producer.send("orders", b"%d" % number, partition=0)
        producer.flush()
        producer.send("orders", b"alone", key=b"k").result()
        producer.send_batch("orders", [b"v"] * 5, partition=1)
        metrics = producer.metrics()

    total, topic = metrics["producer-metrics"], metrics["producer-topic-metrics.orders"]
    assert total["record-send-total"] == topic["record-send-total"] == 16
    assert total["byte-total"] == topic["byte-total"] == stored_bytes(log)
    assert total["batch-total"] == total["request-total"] == 3
    assert total["batch-size-avg"] == total["byte-total"] / 3
    assert total["records-per-request-avg"] == 16 / 3
    assert total["record-error-total"] == total["record-retry-total"] == 0
    assert 0 < total["request-latency-avg"] <= total["request-latency-max"] < 60_000
    assert 0 < total["record-queue-time-avg"] <= total["record-queue-time-max"] < 60_000
    assert total["buffer-available-bytes"] == total["buffer-total-bytes"] == 32 << 20
    assert names_of(producer._samples()) == {
        key: DEFINED[key] for key in (PRODUCER, PRODUCER_TOPIC)
    }


def test_the_fast_path_counts_as_the_general_one(log):
    """A record whose caller waits is counted as one in a batch of one is."""
    with log.producer(linger_ms=NEVER) as fast, log.producer(linger_ms=NEVER) as general:
        for producer in (fast, general):
            for _ in range(3):
                future = producer.send("orders", b"v", partition=0 if producer is general else None)
                future.result()
        counts = [producer.metrics() for producer in (fast, general)]

    timed = {name for name in DEFINED[PRODUCER] if re.search("time|latency", name)}
    for metrics in counts:
        assert all(metrics["producer-metrics"].pop(name) > 0 for name in timed)
    assert counts[0] == counts[1]


def test_an_average_of_nothing_is_not_a_number(log):
    """As in Kafka; a total of nothing is 0."""
    with log.producer() as producer:
        total = producer.metrics()["producer-metrics"]
    assert math.isnan(total["batch-size-avg"]) and math.isnan(total["request-latency-avg"])
    assert total["record-send-total"] == total["request-latency-max"] == 0


def test_errors_and_retries_are_counted_in_records(log):
    """As in Kafka: those that a record brings upon itself, and those of a batch."""
    log.create_topic("state", config={"cleanup.policy": "compact"})
    with log.producer(retry_backoff_ms=1, request_timeout_ms=1) as producer:
        assert producer.send("state", b"no key").failed()
        assert producer.send("orders", bytes(20 << 20)).failed()
        with log.partition("orders", 0).locked():
            futures = [producer.send("orders", b"v", partition=0) for _ in range(3)]
            with pytest.raises(EmbedlogError):
                producer.flush(0.05)
        producer.flush()
        metrics = producer.metrics()

    assert all(future.succeeded() for future in futures)
    orders, state = (metrics[f"producer-topic-metrics.{name}"] for name in ("orders", "state"))
    assert orders["record-retry-total"] >= 3 and orders["record-retry-total"] % 3 == 0
    assert (state["record-error-total"], orders["record-error-total"]) == (1, 1)
    assert metrics["producer-metrics"]["record-error-total"] == 2
    assert metrics["producer-metrics"]["record-retry-total"] == orders["record-retry-total"]


def test_a_repeated_batch_is_counted_as_a_duplicate(log):
    """The application's own numbers (G16)."""
    with log.producer(producer_name="loader") as producer:
        for _ in range(2):
            producer.send_batch("orders", [b"v"] * 4, partition=0, sequence=0)
        assert producer.metrics()["producer-metrics"]["batch-duplicate-total"] == 1


def test_the_counts_of_a_forked_child_begin_at_0(log):
    """The parent writes, and counts, what was sent before the fork."""
    with log.producer(linger_ms=NEVER) as producer:
        producer.send("orders", b"v").result()
        child = forks.call(lambda: producer.metrics()["producer-metrics"]["record-send-total"])
        assert (child, producer.metrics()["producer-metrics"]["record-send-total"]) == (0, 1)


# Consumers


def test_a_consumer_counts_what_it_returned(log):
    """Not what it fetched or decoded ahead: a record is counted when the program takes it."""
    fill(log, 10, partition=0)
    with log.consumer(auto_offset_reset="earliest") as consumer:
        consumer.assign(ORDERS)
        consumer.poll(0, max_records=4)
        some = consumer.metrics()
        consumer.poll(0)
        every = consumer.metrics()

    fetched, topic = (some[f"consumer-fetch-manager-metrics{end}"] for end in ("", ".orders"))
    assert fetched["records-consumed-total"] == topic["records-consumed-total"] == 4
    assert fetched["fetch-total"] == 1 and fetched["records-per-request-avg"] == 4
    size = fetched["fetch-size-max"]
    assert topic["fetch-size-avg"] == size == stored_bytes(log)
    assert fetched["bytes-consumed-total"] == round(size * 4 / 10)
    assert some["consumer-fetch-manager-metrics.orders-0"] == {"records-lag": 6, "records-lead": 4}
    assert some["consumer-fetch-manager-metrics.orders-1"] == {"records-lag": 0, "records-lead": 0}
    assert (fetched["records-lag-max"], fetched["records-lead-min"]) == (6, 0)
    fetched = every["consumer-fetch-manager-metrics"]
    assert (fetched["records-consumed-total"], fetched["bytes-consumed-total"]) == (10, size)
    assert "consumer-coordinator-metrics" not in every


@pytest.mark.parametrize("how", ["poll", "iterate", "poll_batches", "iter_batches"])
def test_each_way_to_read_is_counted(log, how):
    """Records, bytes and reads, for each way."""
    for _ in range(3):
        fill(log, 5)
    with log.consumer("orders", auto_offset_reset="earliest") as consumer:
        if how == "poll":
            assert sum(map(len, consumer.poll(0).values())) == 15
        elif how == "iterate":
            assert len(list(consumer.iter_records(until="end"))) == 15
        elif how == "poll_batches":
            assert sum(rows.num_rows for rows in consumer.poll_batches(0)[ORDERS[0]]) == 15
        else:
            assert sum(rows.num_rows for rows in consumer.iter_batches(until="end")) == 15
        fetched = consumer.metrics()["consumer-fetch-manager-metrics"]

    assert fetched["records-consumed-total"] == 15 and fetched["fetch-total"] == 1
    assert fetched["bytes-consumed-total"] == stored_bytes(log)


def test_records_that_are_recalled_count_when_they_are_returned_again(log):
    """A seek or pause takes back what an iterator holds."""
    fill(log, 10)
    with log.consumer("orders", auto_offset_reset="earliest") as consumer:
        taken = [next(consumer) for _ in range(3)]
        consumer.pause(ORDERS[0])
        assert consumer.metrics()["consumer-fetch-manager-metrics"]["records-consumed-total"] == 3
        consumer.resume(ORDERS[0])
        taken += consumer.poll(0)[ORDERS[0]]
        fetched = consumer.metrics()["consumer-fetch-manager-metrics"]

    assert [record.offset for record in taken] == list(range(10))
    assert fetched["records-consumed-total"] == 10
    assert fetched["bytes-consumed-total"] == stored_bytes(log)


def test_a_group_member_counts_commits_rebalances_and_heartbeats(log):
    """Under Kafka's names of the coordinator; -1 for what did not happen yet."""
    fill(log)
    config = {"group_id": "g", "auto_offset_reset": "earliest", "heartbeat_interval_ms": 10}
    with log.consumer("orders", **config) as consumer:
        before = consumer.metrics()
        consumer.poll(0)
        consumer.commit()
        forks.until(
            lambda: consumer.metrics()["consumer-coordinator-metrics"]["heartbeat-total"] > 1
        )
        after = consumer.metrics()
        assert names_of(consumer._samples()) == {
            key: DEFINED[key]
            for key in (CONSUMER, COORDINATOR, FETCH, FETCH_TOPIC, FETCH_PARTITION)
        }

    group, poll = before["consumer-coordinator-metrics"], before["consumer-metrics"]
    ago = ("last-rebalance-seconds-ago", "last-heartbeat-seconds-ago")
    assert [group[name] for name in ago] == [-1, -1] and poll["last-poll-seconds-ago"] == -1
    assert group["assigned-partitions"] == group["commit-total"] == group["rebalance-total"] == 0
    group = after["consumer-coordinator-metrics"]
    assert (group["assigned-partitions"], group["rebalance-total"]) == (2, 1)
    assert group["commit-total"] == 1
    assert 0 < group["commit-latency-avg"] == group["commit-latency-max"]
    assert all(0 <= group[name] < 3600 for name in ago)


def test_the_time_between_polls_is_measured(log):
    """From the beginning of one to the beginning of the next, as in Kafka."""
    with log.consumer("orders") as consumer:
        consumer.poll(0)
        one = consumer.metrics()["consumer-metrics"]
        consumer.poll(20)
        consumer.poll(0)
        three = consumer.metrics()["consumer-metrics"]

    assert math.isnan(one["time-between-poll-avg"]) and one["time-between-poll-max"] == 0
    assert three["time-between-poll-max"] >= 20
    assert 10 <= three["time-between-poll-avg"] <= three["time-between-poll-max"]
    assert 0 <= three["last-poll-seconds-ago"] < 60


def test_metrics_of_a_consumer_may_be_asked_for_by_another_thread(log):
    """And after the topic was deleted, or the log closed: then only the lag is left out."""
    fill(log)
    consumer = log.consumer("orders", auto_offset_reset="earliest")
    consumer.poll(0, max_records=5)
    with consumer._guard, ThreadPoolExecutor() as other:  # in the middle of a poll
        metrics = other.submit(consumer.metrics).result()
    assert metrics["consumer-fetch-manager-metrics.orders-0"]["records-lag"] == 5
    log.delete_topic("orders")
    deleted = consumer.metrics()
    log.close()
    for metrics in (deleted, consumer.metrics()):
        assert "consumer-fetch-manager-metrics.orders-0" not in metrics
        assert metrics["consumer-fetch-manager-metrics"]["records-consumed-total"] == 5


# Logs


def test_a_log_has_sizes_offsets_lags_and_the_owner_of_maintenance(log):
    """What an exporter for Kafka shows, by partition and by group."""
    fill(log, 10)
    log.groups["billing"].reset_offsets("earliest", topics="orders", dry_run=False)
    log.housekeeping.run()
    metrics = log.metrics()

    part = metrics["kafka.log.orders-0"]
    assert part["Size"] == log.partition("orders", 0).size_bytes() > 0
    assert (part["LogStartOffset"], part["LogEndOffset"]) == (0, 10)
    assert (part["NumLogSegments"], part["Offline"]) == (1, 0)
    assert metrics["kafka.topic.orders"] == {"partitions": 2}
    assert metrics["consumergroup.billing"] == {"members": 0}
    assert metrics["consumergroup.billing.orders-0"] == {"lag": 10, "current_offset": 0}
    assert metrics["consumergroup.billing.orders"] == {"lag_sum": 10, "current_offset_sum": 0}
    assert metrics["maintenance"]["owner-epoch"] == 1
    assert metrics["maintenance"]["owner-count"] == metrics["maintenance"]["owner-pid"] == 0
    assert 0 <= metrics["maintenance.retention"]["time-since-last-run-ms"] < 60_000


def test_a_log_names_the_clients_of_its_handle(log):
    """With their client ids, or numbered as Kafka numbers them, while they are open."""
    with log.producer() as producer, log.producer(client_id="web"), log.producer(client_id="web"):
        producer.send_batch("orders", [b"v"])
        with log.consumer("orders", client_id="reader"):
            metrics = log.metrics()
    clients = [
        key.removesuffix(".producer-metrics") for key in metrics if "producer-metrics" in key
    ]
    assert sorted(clients) == ["producer-1", "web", "web-3"]
    assert metrics["producer-1.producer-topic-metrics.orders"]["record-send-total"] == 1
    assert "reader.consumer-metrics" in metrics
    with log.producer(client_id="web"):
        assert [key for key in log.metrics() if ".producer-metrics" in key] == [
            "web.producer-metrics"
        ]


def test_a_log_has_the_metrics_of_streams(log):
    """Each has its own, until it is closed."""
    with log.producer() as producer:
        producer.send("orders", b"v").result()
    consumer = log.consumer(group_id="g", auto_offset_reset="earliest")
    first, second = consumer.create_message_streams({"orders": 2})["orders"]
    records = sum(len(part) for stream in (first, second) for part in stream.poll(0).values())
    metrics = log.metrics()
    key = "consumer-2-stream-{}.consumer-fetch-manager-metrics"
    counts = [metrics[key.format(number)]["records-consumed-total"] for number in (1, 2)]
    assert sum(counts) == records == 1
    first.close()
    assert key.format(1) not in log.metrics() and key.format(2) in log.metrics()
    consumer.close()
    assert not any("stream" in name for name in log.metrics())


def test_two_keys_that_are_equal_lose_nothing(log):
    """Partition 0 of topic "a", and topic "a-0", have one key, but no metric in common."""
    for name in ("a", "a-0"):
        log.create_topic(name)
        with log.producer() as producer:
            producer.send(name, b"v").result()
    with log.consumer("a", "a-0", auto_offset_reset="earliest") as consumer:
        consumer.poll(0)
        metrics = consumer.metrics()["consumer-fetch-manager-metrics.a-0"]
    assert metrics["records-lag"] == 0 and metrics["records-consumed-total"] == 1
    by_family = {}
    for group in GROUPS:
        family = group.key.split("{")[0].rstrip(".")
        by_family.setdefault(family, []).extend(metric.name for metric in group.metrics)
    for family in ("consumergroup", "kafka.log", "kafka.topic"):
        assert max(Counter(by_family[family]).values()) == 1


def test_a_damaged_partition_does_not_hide_the_others(log):
    """It is offline: an alarm must not end the monitoring."""
    fill(log)
    log.root.partition("orders", 0).flush()
    state = log.root.partition("orders", 1)

    def refuse():
        raise DiskFullError("The disk is full", path="x")

    state.size_bytes = refuse
    metrics = log.metrics()
    assert metrics["kafka.log.orders-1"] == {"Offline": 1}
    assert metrics["kafka.log.orders-0"]["LogEndOffset"] == 10


def test_a_partition_whose_flush_failed_is_offline(tmp_path):
    """It refuses appends until a repair, so it needs an alarm."""
    with embedlog.open(tmp_path / "log", maintenance=False, files=FaultyFiles) as log:
        log.create_topic("orders", partitions=2)
        fill(log, 1)
        files = log.root.context.files
        files.fail_at(0, errno.EIO, only=("sync",))
        with pytest.raises(DurabilityError):
            log.partition("orders", 0).flush()
        files.heal()
        metrics = log.metrics()
        assert [metrics[f"kafka.log.orders-{part}"]["Offline"] for part in (0, 1)] == [1, 0]
        log.housekeeping.repair(dry_run=False)
        assert log.metrics()["kafka.log.orders-0"]["Offline"] == 0


# The command line


def prometheus(path, *options):
    """Return what the command prints, parsed by Prometheus' own client."""
    command = [sys.executable, "-m", "embedlog", "metrics", "-r", str(path)]
    done = subprocess.run(
        [*command, "--format", "prometheus", *options], capture_output=True, text=True, check=True
    )
    return {family.name: family for family in text_string_to_metric_families(done.stdout)}


def test_the_command_line_prints_what_prometheus_reads(log):
    """Names, types, labels and help, for node_exporter's textfile collector."""
    fill(log, 10)
    log.groups["billing"].reset_offsets("earliest", topics="orders", dry_run=False)

    families = prometheus(log.path, "--label", "log=main")

    size = families["kafka_log_log_size"]
    assert (size.type, size.documentation) == ("gauge", "Bytes of the segment files")
    sample = size.samples[0]
    assert sample.labels == {"log": "main", "topic": "orders", "partition": "0"}
    assert sample.value == log.partition("orders", 0).size_bytes()
    (lag, _) = families["kafka_consumergroup_lag"].samples
    assert (lag.value, lag.labels["consumergroup"]) == (10, "billing")
    assert families["kafka_topic_partition_current_offset"].samples[0].value == 10
    assert families["embedlog_maintenance_owner_count"].samples[0].value == 0


def test_any_group_name_survives_prometheus_quoting():
    """Names of groups are free text: quotes, backslashes and line ends are escaped."""
    name = 'a"b\\c\nd\\n{x="y"}'
    samples = [Sample("consumergroup.{consumergroup}", "members", 1, {"consumergroup": name})]
    text = prometheus_text(samples, {})
    (family,) = text_string_to_metric_families(text)
    assert family.samples[0].labels == {"consumergroup": name}


def test_every_metric_has_a_name_that_prometheus_accepts():
    """No two share one, a counter ends in _total, and every line of help is parsed."""
    exported = [metric.exported(group) for group in GROUPS for metric in group.metrics]
    assert all(re.fullmatch("[a-z_][a-z0-9_]*", name) for name in exported)
    assert len(set(exported)) == len(exported)
    names = ("topic", "partition", "consumergroup", "job", "mirror", "logDirectory")
    names += ("request", "error")
    labels = dict.fromkeys(names, "0")
    samples = [
        Sample(group.key, metric.name, number, labels)
        for group in GROUPS
        for number, metric in enumerate(group.metrics)
    ]
    text = prometheus_text(samples, {})
    families = list(text_string_to_metric_families(text))
    assert len(families) == len(exported)
    for group in GROUPS:
        for metric in group.metrics:
            assert (metric.kind == "counter") == metric.name.endswith("-total")


def test_the_command_line_prints_json_and_a_table(log, capsys):
    """JSON is what `Log.metrics` returns; the table is for people."""
    fill(log, 1234)
    metrics = log.metrics()
    metrics = {key: values for key, values in metrics.items() if "producer" not in key}
    for options in (["--json", "metrics"], ["metrics", "--format", "json"]):
        assert main(["-r", log.path, *options]) == 0
        assert json.loads(capsys.readouterr().out) == metrics
    assert main(["-r", log.path, "metrics"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["GROUP", "METRIC", "VALUE"]
    assert ["kafka.log.orders-0", "LogEndOffset", "1,234"] in [line.split() for line in lines]
    for label, message in (
        ("a-b=c", "The name of a label must be letters, digits and underscores, got 'a-b'"),
        ("a", "--label must be NAME=VALUE, got 'a'"),
    ):
        assert main(["-r", log.path, "metrics", "--label", label]) == 2
        assert message in capsys.readouterr().err
