"""What a producer counts: per batch and append, never per record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from embedlog.metrics import PRODUCER, PRODUCER_TOPIC, Sample, average
from embedlog.producer.buffer_pool import BufferPool


class TopicCounts:
    """Counts for one topic.

    The outcomes of records are counted under the producer's lock; appends and the time before
    them by the only thread that drains the topic.
    """

    __slots__ = (
        *("append_seconds", "appends", "batches", "bytes", "duplicates", "errors"),
        *("longest_append", "longest_wait", "records", "retried", "wait_seconds", "waits"),
    )

    def __init__(self) -> None:
        self.records = self.batches = self.bytes = self.duplicates = self.errors = self.retried = 0
        self.appends = self.waits = 0
        self.append_seconds = self.longest_append = 0.0
        self.wait_seconds = self.longest_wait = 0.0
        """How long open batches waited for a drain."""

    def count_append(self, seconds: float) -> None:
        """Count an append of one or more batches."""
        self.appends += 1
        self.append_seconds += seconds
        if seconds > self.longest_append:
            self.longest_append = seconds

    def count_wait(self, seconds: float) -> None:
        """Count an open batch, and the time since its first record."""
        self.waits += 1
        self.wait_seconds += seconds
        if seconds > self.longest_wait:
            self.longest_wait = seconds


def samples(
    topics: Mapping[str, TopicCounts], pool: BufferPool, unretrieved: int
) -> Iterator[Sample]:
    """Yield the metrics of a producer, as a whole and by topic."""
    by_topic = dict(topics)  # another thread may add one
    counts = list(by_topic.values())
    records = sum(topic.records for topic in counts)
    size = sum(topic.bytes for topic in counts)
    batches = sum(topic.batches for topic in counts)
    appends = sum(topic.appends for topic in counts)
    append_ms = 1000 * sum(topic.append_seconds for topic in counts)
    wait_ms = 1000 * sum(topic.wait_seconds for topic in counts)
    totals = {
        "record-send-total": records,
        "record-error-total": sum(topic.errors for topic in counts),
        "record-unretrieved-error-total": unretrieved,
        "record-retry-total": sum(topic.retried for topic in counts),
        "byte-total": size,
        "batch-total": batches,
        "batch-duplicate-total": sum(topic.duplicates for topic in counts),
        "batch-size-avg": average(size, batches),
        "request-total": appends,
        "records-per-request-avg": average(records, appends),
        "request-latency-avg": average(append_ms, appends),
        "request-latency-max": 1000 * max((topic.longest_append for topic in counts), default=0),
        "record-queue-time-avg": average(wait_ms, sum(topic.waits for topic in counts)),
        "record-queue-time-max": 1000 * max((topic.longest_wait for topic in counts), default=0),
        "buffer-total-bytes": pool.memory,
        "buffer-available-bytes": pool.memory - pool.buffered,
    }
    for name, value in totals.items():
        yield Sample(PRODUCER, name, value, {})
    for topic, count in by_topic.items():
        labels = {"topic": topic}
        yield Sample(PRODUCER_TOPIC, "record-send-total", count.records, labels)
        yield Sample(PRODUCER_TOPIC, "record-error-total", count.errors, labels)
        yield Sample(PRODUCER_TOPIC, "record-retry-total", count.retried, labels)
        yield Sample(PRODUCER_TOPIC, "byte-total", count.bytes, labels)
