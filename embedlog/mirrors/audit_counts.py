"""What a mirror reports to the audits of the log that it copies from, and of that it copies to."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from embedlog.audit.audit_topic import COPY, COUNT, MIRROR, Report
from embedlog.audit.producer_counts import CountedRun
from embedlog.audit.range_counts import (
    RangeCount,
    count_batches,
    report_ranges,
    report_skips,
    report_starts,
)
from embedlog.audit.reporter import reporter_of, this_client
from embedlog.batch import EncodedBatch
from embedlog.errors import EmbedlogError
from embedlog.mirrors.ends import Fetch, MirrorSource
from embedlog.mirrors.root_source import RootSource
from embedlog.partition import PartitionLog
from embedlog.record import Appended
from embedlog.root.root import Root

REPORT_SECONDS = 5.0
"""How often counts are appended to the topic of the audit."""

_logger = logging.getLogger("embedlog.mirrors")


class AuditCounts:
    """Counts what a mirror copied of topics with ``audit=true``, by partition and minute.

    Only a source that is a log of embedlog has an audit; for others this does nothing.
    """

    def __init__(self, source: MirrorSource, mirror: str) -> None:
        self._root = source.root if isinstance(source, RootSource) else None
        self._mirror = mirror
        self._begun: set[tuple[str, int]] = set()
        self._counts: dict[tuple[str, int], tuple[int, int, dict[int, list[int]]]] = {}
        """The range of offsets of each partition that is not reported yet, and its counts."""
        self._reported_at = monotonic()

    def begin(self, topic: str, partition: int, offset: int) -> None:
        """Report where the mirror begins, before its first copy of a partition.

        So what it copies is counted even if it is killed before it reports.
        """
        key = topic, partition
        if self._root is None or key in self._begun:
            return
        self._begun.add(key)
        log = self._root.partition(topic, partition)
        log.refresh()
        if log.config.audit and self._root.mode == "rw":
            self._counts[key] = offset, offset, {}
            report_starts(self._root, MIRROR, self._mirror, [RangeCount(log, offset, offset, {})])

    def add(self, topic: str, partition: int, fetch: Fetch) -> None:
        """Count what was copied; it is safe at the target."""
        count = self._counts.get((topic, partition))
        if count is None:
            return
        first, _, minutes = count
        for minute, (records, size) in count_batches(batch for _, batch in fetch.batches).items():
            total = minutes.setdefault(minute, [0, 0])
            total[0] += records
            total[1] += size
        self._counts[topic, partition] = first, fetch.next_offset, minutes
        self.report_if_due()

    def skip(self, topic: str, partition: int, offset: int) -> None:
        """Report that the mirror goes on at an offset, since what is before was deleted."""
        key = topic, partition
        if key not in self._counts:
            return
        self.report()
        assert self._root is not None
        first, stop, minutes = self._counts[key]
        if first == stop:
            self._counts[key] = offset, offset, minutes
            log = self._root.partition(topic, partition)
            report_skips(self._root, MIRROR, self._mirror, [RangeCount(log, stop, offset, {})])

    def report_if_due(self) -> None:
        """Report what was counted, if the last report was some seconds ago."""
        if monotonic() - self._reported_at >= REPORT_SECONDS:
            self.report()

    def report(self) -> None:
        """Report what was counted since the last time; a failure is only logged."""
        self._reported_at = monotonic()
        if self._root is None or self._root.closed:
            return
        ranges = []
        for (topic, partition), (first, stop, minutes) in self._counts.items():
            if first < stop:
                ranges.append(
                    RangeCount(self._root.partition(topic, partition), first, stop, minutes)
                )
        try:
            report_ranges(self._root, MIRROR, self._mirror, ranges)
        except EmbedlogError as error:
            # The next report has these counts, too.
            _logger.warning("Mirror %s: cannot report to the audit: %s", self._mirror, error)
            return
        self._counts = {key: (stop, stop, {}) for key, (_, stop, _) in self._counts.items()}


class CopyCounts:
    """Counts what a mirror writes to topics with ``audit=true`` of a log, by partition and minute.

    The reporter of the log takes the counts from time to time, in a thread of its own.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._client = this_client(COPY, "")
        self._lock = threading.Lock()
        self._runs: list[tuple[PartitionLog, CountedRun]] = []
        self._reporting = False

    @contextmanager
    def of(self, mirror: str) -> Iterator[None]:
        """Count for a mirror; at the end, report what is left."""
        self._client = this_client(COPY, mirror)
        try:
            yield
        finally:
            if self._reporting:
                self._reporting = False
                reporter_of(self._root).remove(self)

    def add(
        self, log: PartitionLog, receipts: Sequence[Appended], batches: Sequence[EncodedBatch]
    ) -> None:
        """Count batches that were written one after the other, with their offsets."""
        if not log.config.audit or not receipts:
            return
        run = CountedRun(receipts[0].base_offset)
        for receipt, batch in zip(receipts, batches, strict=True):
            run.add_batch(receipt, batch)
        with self._lock:
            self._runs.append((log, run))
        if not self._reporting:
            self._reporting = True
            reporter_of(self._root).add(self)

    def take_reports(self) -> list[Report]:
        """Return what was counted since the last call."""
        with self._lock:
            runs, self._runs = self._runs, []
        return [
            Report(
                *(self._client, COUNT, log.topic, log.topic_id, log.partition),
                *(run.first, run.stop, run.minutes()),
            )
            for log, run in runs
        ]
