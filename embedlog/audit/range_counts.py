"""What a pipeline or a mirror counts: the ranges of offsets that it copied, by minute."""

from __future__ import annotations

from embedlog.audit.audit_topic import COUNT, Report
from embedlog.audit.producer_counts import CountedRun
from embedlog.audit.reporter import Counts
from embedlog.listeners import CopiedRange
from embedlog.partition import PartitionLog


class RangeCounts(Counts):
    """What a pipeline or a mirror copied; all ranges of one name together must cover the log."""

    def restart(self) -> None:
        """See `Counts.restart`."""
        super().restart()
        self._begun: set[tuple[int, int]] = set()
        self._runs: list[tuple[PartitionLog, CountedRun]] = []

    def began(self, log: PartitionLog, offset: int) -> None:
        """Report where it begins, before the first range of a partition.

        So the first range is counted, even if the process dies before it reports it.
        """
        key = log.topic_id, log.partition
        if key not in self._begun:
            self._begun.add(key)
            super().began(log, offset)

    def copied(self, copied: CopiedRange) -> None:
        """Count a range whose records are safe where they went."""
        with self.lock:
            for log, run in self._runs:
                if log is copied.log and run.stop == copied.first_offset:
                    break
            else:
                run = CountedRun(copied.first_offset)
                self._runs.append((copied.log, run))
            run.stop = copied.next_offset
            for minute, (records, size) in copied.minutes.items():
                run.add(minute, records, size)
        self.reporter.add(self)

    def take_reports(self) -> list[Report]:
        """Return the counts since the last call."""
        with self.lock:
            runs, self._runs = self._runs, []
        return [
            self.report(COUNT, log, run.first, run.stop, run.minutes())
            for log, run in runs
            if run.first < run.stop
        ]
