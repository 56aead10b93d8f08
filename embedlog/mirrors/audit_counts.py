"""What a mirror reports to the audit of the log that it copies from."""

from __future__ import annotations

import logging
from time import monotonic

from embedlog.audit.audit_topic import MIRROR
from embedlog.audit.range_counts import RangeCount, count_batches, report_ranges, report_starts
from embedlog.errors import EmbedlogError
from embedlog.mirrors.ends import Fetch, MirrorSource
from embedlog.mirrors.root_source import RootSource

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
