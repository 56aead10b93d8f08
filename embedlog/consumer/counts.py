"""What a consumer counts: per poll, fetch, batch and commit, never per record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf, nan
from time import monotonic
from typing import NamedTuple

from embedlog.metrics import (
    CONSUMER,
    COORDINATOR,
    FETCH,
    FETCH_PARTITION,
    FETCH_TOPIC,
    Sample,
    average,
)
from embedlog.record import TopicPartition


class FetchCounts:
    """Counts for one topic."""

    __slots__ = ("bytes", "fetched_bytes", "fetches", "largest_fetch", "records")

    def __init__(self) -> None:
        self.records, self.bytes = 0, 0.0
        """Of the batches that were decoded, less what was recalled before it was returned."""
        self.fetches = self.fetched_bytes = self.largest_fetch = 0

    def count_fetch(self, size: int) -> None:
        """Count a read that returned records."""
        self.fetches += 1
        self.fetched_bytes += size
        if size > self.largest_fetch:
            self.largest_fetch = size


class ConsumerCounts:
    """Counts of one consumer."""

    def __init__(self) -> None:
        self._topics: dict[str, FetchCounts] = {}
        self._polls, self._first_poll, self._last_poll, self._longest_between = 0, 0.0, inf, 0.0
        self._commits, self._commit_seconds, self._longest_commit = 0, 0.0, 0.0
        self._rebalances = self._heartbeats = 0
        self._last_rebalance = self._last_heartbeat = inf

    def topic(self, name: str) -> FetchCounts:
        """Return the counts for a topic, which begin at 0."""
        return self._topics.setdefault(name, FetchCounts())

    def count_poll(self) -> None:
        """Count the beginning of a poll."""
        now = monotonic()
        between = now - self._last_poll
        if between > self._longest_between:
            self._longest_between = between
        if not self._polls:
            self._first_poll = now
        self._polls += 1
        self._last_poll = now

    def count_commit(self, seconds: float) -> None:
        """Count a commit that succeeded."""
        self._commits += 1
        self._commit_seconds += seconds
        self._longest_commit = max(self._longest_commit, seconds)

    def count_rebalance(self) -> None:
        """Count a generation of the group."""
        self._rebalances += 1
        self._last_rebalance = monotonic()

    def count_heartbeat(self) -> None:
        """Count a heartbeat of the background thread."""
        self._heartbeats += 1
        self._last_heartbeat = monotonic()

    # Samples

    def poll_samples(self) -> Iterator[Sample]:
        """Yield the metrics of polls."""
        between_ms = 1000 * (self._last_poll - self._first_poll) if self._polls else 0.0
        values = {
            "last-poll-seconds-ago": _seconds_since(self._last_poll),
            "time-between-poll-avg": average(between_ms, max(self._polls - 1, 0)),
            "time-between-poll-max": 1000 * self._longest_between,
        }
        yield from _samples(CONSUMER, values)

    def coordinator_samples(self, assigned: int) -> Iterator[Sample]:
        """Yield the metrics of a group member, given the number of its partitions."""
        values = {
            "assigned-partitions": assigned,
            "rebalance-total": self._rebalances,
            "last-rebalance-seconds-ago": _seconds_since(self._last_rebalance),
            "commit-total": self._commits,
            "commit-latency-avg": average(1000 * self._commit_seconds, self._commits),
            "commit-latency-max": 1000 * self._longest_commit,
            "heartbeat-total": self._heartbeats,
            "last-heartbeat-seconds-ago": _seconds_since(self._last_heartbeat),
        }
        yield from _samples(COORDINATOR, values)

    def fetch_samples(self, partitions: Mapping[TopicPartition, Progress]) -> Iterator[Sample]:
        """Yield the metrics of what was read: of all, by topic, and of the partitions now."""
        rows = []
        for topic, counts in dict(self._topics).items():
            parts = [progress for part, progress in partitions.items() if part.topic == topic]
            records = counts.records - sum(part.untaken for part in parts)
            size = counts.bytes - sum(part.untaken_bytes for part in parts)
            row = (records, round(size), counts.fetches, counts.fetched_bytes, counts.largest_fetch)
            rows.append(row)
            yield from _samples(FETCH_TOPIC, _fetch_values(*row), topic=topic)
        records, size, fetches, fetched = (sum(row[column] for row in rows) for column in range(4))
        largest = max((row[4] for row in rows), default=0)
        lags = [part.lag for part in partitions.values() if part.lag is not None]
        leads = [part.lead for part in partitions.values() if part.lead is not None]
        values = {
            **_fetch_values(records, size, fetches, fetched, largest),
            "fetch-total": fetches,
            "records-lag-max": max(lags, default=nan),
            "records-lead-min": min(leads, default=nan),
        }
        yield from _samples(FETCH, values)
        for (topic, number), part in partitions.items():
            labels = {"topic": topic, "partition": str(number)}
            if part.lag is not None and part.lead is not None:
                lag_lead = {"records-lag": part.lag, "records-lead": part.lead}
                yield from _samples(FETCH_PARTITION, lag_lead, **labels)


class Progress(NamedTuple):
    """How far a consumer is in an assigned partition."""

    untaken: int
    """Records that were decoded, and that the program has not taken yet."""
    untaken_bytes: float
    lag: int | None
    """None without a position, or if the log or the topic is gone; `lead` too."""
    lead: int | None


def _fetch_values(
    records: int, size: int, fetches: int, fetched_bytes: int, largest_fetch: int
) -> dict[str, float]:
    return {
        "records-consumed-total": records,
        "bytes-consumed-total": size,
        "fetch-size-avg": average(fetched_bytes, fetches),
        "fetch-size-max": largest_fetch,
        "records-per-request-avg": average(records, fetches),
    }


def _samples(key: str, values: Mapping[str, float], **labels: str) -> Iterator[Sample]:
    return (Sample(key, name, value, labels) for name, value in values.items())


def _seconds_since(moment: float) -> float:
    return -1.0 if moment == inf else monotonic() - moment
