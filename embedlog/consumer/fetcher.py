"""Taking records of many partitions in turn (E9, E10)."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any, TypeVar

from embedlog.config import ConsumerConfig
from embedlog.consumer import taking
from embedlog.consumer.assignment import Assignment, PartitionCursor
from embedlog.errors import EmbedlogError
from embedlog.record import Record, TopicPartition

T = TypeVar("T")
Ends = dict[TopicPartition, int]


class Fetcher:
    """One look at an assignment for what can be returned.

    Args:
        config: How much at once.
        assignment: Whose turn it is.
        ready: Returns the partitions that may give records, the one served longest ago first.
        failed: Called with a partition that failed; raises, unless the partition just leaves.
    """

    def __init__(
        self,
        config: ConsumerConfig,
        assignment: Assignment,
        ready: Callable[[], list[PartitionCursor]],
        failed: Callable[[PartitionCursor, EmbedlogError], None],
    ) -> None:
        self._config, self._assignment = config, assignment
        self._ready, self._failed = ready, failed
        self._window = monotonic()
        """When fetch_max_wait_ms began (with fetch_min_bytes)."""

    def first(
        self, take: Callable[[PartitionCursor, int | None], T | None], ends: Ends | None
    ) -> T | None:
        """Return what the first partition gives that has something, below its end if it has one."""
        most = self._config.max_partition_fetch_bytes
        for feed in self._ready():
            try:
                stop = None if ends is None else ends.get(feed.where, 0)
                if stop is not None and feed.position() >= stop:
                    continue
                feed.fill(most)
                found = take(feed, stop)
            except EmbedlogError as error:
                self._failed(feed, error)
                continue
            if found is not None:
                self._assignment.served(feed)
                return found
        return None

    def gather(
        self, take: Callable[[PartitionCursor, int], tuple[list[Any], int] | None], most: int
    ) -> dict[TopicPartition, list[Any]]:
        """Let the partitions give in turn, up to ``most`` records in all (E9)."""
        found: dict[TopicPartition, list[Any]] = {}
        budget, each = self._config.fetch_max_bytes, self._config.max_partition_fetch_bytes
        feeds = self._ready()
        if self._config.fetch_min_bytes > 1 and not self._enough(feeds):
            return found
        for feed in feeds:
            try:
                budget -= feed.fill(min(budget, each))
                while most > 0 and (taken := take(feed, most)) is not None:
                    found.setdefault(feed.where, []).extend(taken[0])
                    most -= taken[1]
            except EmbedlogError as error:
                if found:
                    # Good records first; the next call meets the error again (E10).
                    self._assignment.first(feed)
                    break
                self._failed(feed, error)
                continue
            if feed.where in found:
                self._assignment.served(feed)
            if most <= 0 or budget <= 0:
                break
        return found

    def records(self, most: int) -> dict[TopicPartition, list[Record]]:
        """Gather records."""
        if most <= taking.FEW:
            return self.gather(taking.records, most)
        with taking.collector_held():
            return self.gather(taking.records, most)

    def _enough(self, feeds: list[PartitionCursor]) -> bool:
        """Whether fetch_min_bytes came, or fetch_max_wait_ms passed."""
        size, most = 0, self._config.max_partition_fetch_bytes
        for feed in feeds:
            try:
                feed.fetch(most)
            except EmbedlogError:
                return True  # whoever takes the records before it meets it again
            size += feed.buffered
        waited = (monotonic() - self._window) * 1000
        enough = size >= self._config.fetch_min_bytes or waited >= self._config.fetch_max_wait_ms
        if enough:
            self._window = monotonic()
        return enough
