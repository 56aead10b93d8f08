"""Metrics: what producers, consumers and logs count, under Kafka's names, and for whom."""

from __future__ import annotations

import json
import math
import threading

import pytest
from support.children import run_python

import embedlog
from embedlog.metrics import GROUPS, Metric, Sample, nested
from embedlog.record import TopicPartition


@pytest.fixture
def log(tmp_path):
    with embedlog.open(tmp_path, maintenance=False) as log:
        log.create_topic("orders", partitions=2)
        yield log
        assert log.verify() == []


def names(metrics):
    """Return the names by the key of their group, with the topic and so on left out."""
    return {key: set(values) for key, values in metrics.items()}


def defined(key):
    """Return the names that the table of metrics has for a group."""
    (group,) = (group for group in GROUPS if group.key == key)
    return {metric.name for metric in group.metrics}


# Producers


def test_a_producer_counts_records_bytes_and_appends(log):
    """Kafka's names, nested as kafka-python nests them."""
    with log.producer() as producer:
        for number in range(10):
            producer.send("orders", b"%d" % number, partition=0)
        producer.flush()
        producer.send("orders", b"alone").result()
        producer.send_batch("orders", [b"v"] * 5, partition=1)
        metrics = producer.metrics()

    total, topic = metrics["producer-metrics"], metrics["producer-topic-metrics.orders"]
    assert total["record-send-total"] == topic["record-send-total"] == 16
    assert total["byte-total"] == topic["byte-total"] == log.topic("orders").size_bytes
    assert total["batch-total"] == total["request-total"] == 3
    assert total["batch-size-avg"] == total["byte-total"] / 3
    assert total["records-per-request-avg"] == 16 / 3
    assert total["record-error-total"] == total["record-retry-total"] == 0
    assert 0 < total["request-latency-avg"] <= total["request-latency-max"] < 60_000
    assert 0 < total["record-queue-time-avg"] <= total["record-queue-time-max"] < 60_000
    assert total["buffer-available-bytes"] == total["buffer-total-bytes"] == 32 << 20
