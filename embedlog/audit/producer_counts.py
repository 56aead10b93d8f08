"""What producers, pipelines and mirrors count, by minute.

A producer counts a batch once, when the log has answered for it: retries and duplicates do not
count.  The drain of a topic only adds a tuple per batch to a queue; what is in the queue is
put together when it is long, and for a report.
"""

from __future__ import annotations

import threading
from collections import deque

from embedlog.audit.audit_topic import COUNT, END, START, Report
from embedlog.audit.reporter import Counts
from embedlog.batch import EncodedBatch, windows_of
from embedlog.batch.time_windows import Windows, added, as_dict
from embedlog.listeners import COPY, CopiedRange, Identity
from embedlog.partition import PartitionLog
from embedlog.record import Appended

_MAX_QUEUED = 512
_MAX_WINDOWS = 64

_Written = tuple[Appended, "int | Windows", int, int, "Identity"]
"""Where a batch is, its minute or its records by minute, its records, bytes and producer."""


class CountedRun:
    """Counts in a range of offsets."""

    __slots__ = ("_minutes", "_windows", "_windows_size", "first", "identity", "stop")

    def __init__(self, first: int, identity: Identity = None) -> None:
        self.first = self.stop = first
        self.identity = identity
        self._minutes: dict[int, list[int]] = {}
        self._windows: Windows = []
        """Of batches that span minutes."""
        self._windows_size = 0

    def add(self, minute: int, records: int, size: int) -> None:
        """Count records of a minute."""
        count = self._minutes.get(minute)
        if count is None:
            self._minutes[minute] = [records, size]
        else:
            count[0] += records
            count[1] += size

    def add_windows(self, windows: Windows, size: int) -> None:
        """Count the records of a batch that spans minutes."""
        self._windows += windows
        self._windows_size += size
        if len(self._windows) > _MAX_WINDOWS:
            self._windows = added(self._windows)

    def minutes(self) -> dict[int, tuple[int, int]]:
        """Return records and bytes by minute; bytes of batches that span some are divided."""
        minutes = {minute: (count[0], count[1]) for minute, count in self._minutes.items()}
        windows = as_dict(added(self._windows))
        total, counted = sum(windows.values()), 0
        for minute, records in windows.items():
            before, counted = counted, counted + records
            size = self._windows_size * counted // total - self._windows_size * before // total
            more = minutes.get(minute, (0, 0))
            minutes[minute] = (more[0] + records, more[1] + size)
        return minutes


class WrittenCounts:
    """What a producer wrote to one partition, as far as it is not reported."""

    __slots__ = ("_end", "_exact", "_lock", "_runs", "log", "queue")

    def __init__(self, log: PartitionLog, exact: bool) -> None:
        self.log = log
        self._exact = exact
        """Whether a range must not have batches of others, as where no id tells them apart."""
        self.queue: deque[_Written] = deque()
        self._runs: list[CountedRun] = []
        self._lock = threading.Lock()
        # A batch that is found to be a duplicate below this end was counted before, by this
        # producer or, for one with a name, by an earlier one.
        self._end = log.end_offset()

    def merge(self) -> None:
        """Put together what is in the queue."""
        with self._lock:
            queue, runs = self.queue, self._runs
            run = runs[-1] if runs else None
            for _ in range(len(queue)):
                receipt, minute, records, size, identity = queue.popleft()
                first, stop, _, duplicate = receipt
                if duplicate and first < self._end:
                    continue
                if run is None or run.identity != identity or (self._exact and run.stop != first):
                    run = CountedRun(first, identity)
                    runs.append(run)
                run.stop = self._end = stop
                if type(minute) is int:
                    run.add(minute, records, size)
                else:
                    run.add_windows(minute, size)  # type: ignore[arg-type]

    def take(self) -> list[CountedRun]:
        """Return the counts since the last call."""
        self.merge()
        with self._lock:
            runs, self._runs = self._runs, []
        return runs


class ProducerCounts(Counts):
    """What a producer, a publication, or a mirror that writes, counts in all partitions."""

    def restart(self) -> None:
        """See `Counts.restart`."""
        super().restart()
        self._partitions: dict[PartitionLog, WrittenCounts] = {}
        self._started: dict[tuple[Identity, int], Report] = {}
        self._ended: list[Report] = []

    def _open(self, log: PartitionLog) -> WrittenCounts:
        """Return the counts for a partition; begin to count it, unless it is counted already."""
        counts = self._partitions.get(log)
        if counts is None:
            self.reporter.add(self)
            new = WrittenCounts(log, exact=self.process.tier == COPY)
            counts = self._partitions.setdefault(log, new)
        return counts

    def identified(self, log: PartitionLog, identity: tuple[int, int]) -> None:
        """Report, before the first batch for a topic, which producer has an id and an epoch.

        So the batches of a producer that is killed can be counted for it.
        """
        self._open(log)
        if (identity, log.topic_id) not in self._started:
            report = self._report(START, log, CountedRun(0, identity))
            self._started[identity, log.topic_id] = report
            self.reporter.report(reports=[report])

    def written(
        self, log: PartitionLog, receipt: Appended, batch: EncodedBatch, identity: Identity
    ) -> None:
        """Count a batch that the log has; one thread at a time calls it for a partition."""
        counts = self._partitions.get(log) or self._open(log)
        windows, queue = windows_of(batch, receipt.timestamp), counts.queue
        queue.append((receipt, windows, batch.count, batch.size, identity))
        if len(queue) > _MAX_QUEUED:
            counts.merge()

    def ceased(self, log: PartitionLog) -> None:
        """Note that a topic is not audited any more: its last report is not the end."""
        counts = self._partitions.pop(log, None)
        if counts is not None:
            self.reporter.report(reports=[self._report(COUNT, log, run) for run in counts.take()])
        for identity, topic_id in list(self._started):
            if topic_id == log.topic_id:
                self._started.pop((identity, topic_id), None)

    def _report(self, kind: str, log: PartitionLog, run: CountedRun) -> Report:
        report = self.report(kind, log, run.first, run.stop, run.minutes())
        producer_id, epoch = run.identity or (-1, -1)
        return report._replace(producer_id=producer_id, producer_epoch=epoch)

    def take_reports(self) -> list[Report]:
        """Return the counts since the last call."""
        partitions = list(self._partitions.values())
        reports = [
            self._report(COUNT, counts.log, run) for counts in partitions for run in counts.take()
        ]
        ended, self._ended = self._ended, []
        return reports + ended

    def closed(self) -> None:
        """Report what was counted, and that no more will be written."""
        # After the counts, in the same append.
        self._ended = [report._replace(kind=END) for report in self._started.values()]
        super().closed()


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
