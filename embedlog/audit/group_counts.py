"""What a member of a consumer group counts: the records that it committed, by minute.

What a poll returns is *pending*: counted by batch, in ranges of offsets.  A commit takes the
part below its offset, which is reported.  What is still pending when the partition goes to
another member is reported as given back, since that member will read it again.

Only heads of batches are looked at, since reading a batch as columns costs less than counting
its timestamps would.  So the records of a batch that spans minutes are reported without the
minute, which the audit takes from the log, by their offsets.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from embedlog.audit.audit_topic import (
    COUNT,
    RETURN,
    SKIP,
    START,
    Report,
)
from embedlog.audit.producer_counts import CountedRun
from embedlog.audit.reporter import Counts
from embedlog.batch import MINUTE_MS, Batch
from embedlog.errors import EmbedlogError
from embedlog.listeners import NO_MINUTE
from embedlog.partition import PartitionLog

_MAX_PENDING = 1000
"""Ranges that are pending one by one; of a consumer that never commits they are joined."""
_log = logging.getLogger("embedlog.audit")


class ReadRange:
    """Records that were read: offsets ``[first, stop)``."""

    __slots__ = ("first", "minute", "records", "size", "stop")

    def __init__(self, first: int, stop: int, minute: int, records: int, size: int) -> None:
        self.first, self.stop, self.records, self.size = first, stop, records, size
        self.minute = minute
        """Of all records, or `NO_MINUTE`."""

    def split(self, offset: int, log: PartitionLog) -> ReadRange:
        """Remove the part below an offset, and return it."""
        records = offset - self.first
        if self.records != self.stop - self.first:
            records = min(_count(log, self.first, offset), self.records)  # compaction left gaps
        size = self.size * records // self.records if self.records else 0
        part = ReadRange(self.first, offset, self.minute, records, size)
        self.first, self.records, self.size = offset, self.records - records, self.size - size
        return part

    def add_to(self, run: CountedRun) -> None:
        """Count it in a run that ends where it begins."""
        run.stop = self.stop
        run.add(self.minute, self.records, self.size)


class ReadCounts:
    """What a member of a group read of one partition; the caller holds the lock of the group."""

    def __init__(
        self, counts: GroupCounts, log: PartitionLog, committed: int | None, late: bool
    ) -> None:
        self._group, self.log, self._late = counts, log, late
        self._pending: list[ReadRange] = []
        self._committed: CountedRun | None = None
        """What was committed and is not reported."""
        self._reports: list[Report] = []
        self._end = self._settled = committed
        """The committed offset, and that of the last `_settle`; None before the first commit."""
        self._unsettled = self._marked = False
        """Whether there was a commit since then, and whether any was reported to come."""

    def add(self, first: int, stop: int, minute: int, records: int, size: int) -> None:
        """Count records that a poll returns."""
        if self._unsettled and self._end is not None and first < self._end:
            # It reads again what is committed, which counts again with the next commit only.
            self._settle()
        pending = self._pending
        if pending:
            last = pending[-1]
            if last.stop == first and last.minute == minute:
                last.stop, last.records, last.size = stop, last.records + records, last.size + size
                return
            if len(pending) >= _MAX_PENDING:
                self._settle()
                self._join()
        self._pending.append(ReadRange(first, stop, minute, records, size))

    def _join(self) -> None:
        """Join the older pending ranges that follow each other."""
        half = _MAX_PENDING // 2
        if len(self._pending) < half:
            return
        joined: list[ReadRange] = []
        for read in self._pending[:half]:
            last = joined[-1] if joined else None
            if last is not None and last.stop == read.first:
                last.stop, last.minute = read.stop, NO_MINUTE
                last.records, last.size = last.records + read.records, last.size + read.size
            else:
                joined.append(read)
        if len(joined) == half:
            # It seeks back again and again: the oldest are given up.
            joined = joined[half // 2 :]
        self._pending[:half] = joined

    def recall(self, offset: int) -> None:
        """Take back the last records of the batch that was counted last; they are read again."""
        if self._pending:
            last = self._pending[-1]
            if last.first >= offset:
                del self._pending[-1]
            elif last.stop > offset:
                self._pending[-1] = last.split(offset, self.log)

    def start_before(self, offset: int) -> Report | None:
        """Return the report that must precede the first commit of an offset, if any."""
        first = next((read.first for read in self._pending if read.first < offset), None)
        if self._marked or first is None:
            return None
        self._marked = True
        # What was committed before, or read before the topic was audited, is no gap.
        kind = START if self._end is None and not self._late else COUNT
        if self._end is None:
            self._end = self._settled = first
        return self._report(kind, first, first)

    def commit(self, offset: int) -> None:
        """Note that an offset is committed."""
        end = self._end
        if end is not None and offset < end:
            self._settle()
            self._settled = offset
        self._end, self._unsettled = offset, True

    def _settle(self) -> None:
        """Take what was read below the committed offset from what is pending."""
        if not self._unsettled or self._end is None:
            return
        offset, end = self._end, self._settled
        self._settled, self._unsettled = offset, False
        left: list[ReadRange] = []
        for read in self._pending:
            if read.first >= offset:
                left.append(read)
                continue
            if read.stop > offset:
                part = read.split(offset, self.log)
                left.append(read)
            else:
                part = read
            if end is not None and end < part.first:
                self._reports.append(self._report(SKIP, end, part.first))
            committed = self._committed
            if committed is None or committed.stop != part.first:
                self._finish()
                committed = self._committed = CountedRun(part.first)
            part.add_to(committed)
            end = part.stop
        if end is not None and end < offset:
            self._reports.append(self._report(SKIP, end, offset))
        self._pending = left

    def _finish(self) -> None:
        """Report the range that was committed."""
        committed, self._committed = self._committed, None
        if committed is not None:
            self._reports.append(self._report_run(COUNT, committed))

    def take(self) -> list[Report]:
        """Return the commits since the last call."""
        self._settle()
        self._finish()
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> list[Report]:
        """Return the last counts: the partition goes to another member, or to none."""
        reports = self.take()
        returned: list[CountedRun] = []
        for read in self._pending:
            if not returned or returned[-1].stop != read.first:
                returned.append(CountedRun(read.first))
            read.add_to(returned[-1])
        self._pending = []
        return reports + [self._report_run(RETURN, run) for run in returned]

    def _report_run(self, kind: str, run: CountedRun) -> Report:
        return self._group.report(kind, self.log, run.first, run.stop, run.minutes())

    def _report(self, kind: str, first: int, stop: int) -> Report:
        return self._group.report(kind, self.log, first, stop)


class GroupCounts(Counts):
    """What a consumer counts for its group, in all partitions of audited topics."""

    def restart(self) -> None:
        """See `Counts.restart`."""
        super().restart()
        self._partitions: dict[tuple[str, int], ReadCounts] = {}
        self._finished: list[Report] = []
        self._new: set[ReadCounts] = set()
        """Those without a commit by this member yet."""

    # Reading

    def assigned(self, log: PartitionLog, committed: int | None, *, late: bool) -> None:
        """Begin to count a partition."""
        counts = ReadCounts(self, log, committed, late)
        with self.lock:
            self._partitions[log.topic, log.partition] = counts
            self._new.add(counts)
        self.reporter.add(self)

    def read(self, log: PartitionLog, batch: Batch, first: int, stop: int) -> None:
        """Count the records of a batch in a range of offsets, which a poll returns."""
        counts = self._partitions.get((log.topic, log.partition))
        if counts is None:
            return  # assigned to a parent, which counts it
        records, size, base = batch.count, batch.size, batch.base_offset
        if first > base or stop < batch.next_offset:
            records = _records_between(log, batch, max(first, base), stop)
            size = size * records // batch.count
        minute = batch.min_timestamp // MINUTE_MS
        if batch.max_timestamp // MINUTE_MS != minute:
            minute = NO_MINUTE
        with self.lock:
            counts.add(first, stop, minute, records, size)

    def recalled(self, log: PartitionLog, offset: int) -> None:
        """Take back the records from an offset on, of the batch that was counted last."""
        with self.lock:
            counts = self._partitions.get((log.topic, log.partition))
            if counts is not None:
                counts.recall(offset)

    def ceased(self, log: PartitionLog) -> None:
        """Report what is left of a partition, which is not assigned or audited any more."""
        with self.lock:
            counts = self._partitions.pop((log.topic, log.partition), None)
            if counts is not None:
                self._finished += counts.close()
                self._new.discard(counts)

    # Commits

    def committing(self, positions: Mapping[Any, Any]) -> None:
        """Report, before its first commit, where this member begins.

        So what is committed can be counted, even if this process is killed after the commit.
        """
        if not self._new:
            return
        with self.lock:
            reports = []
            for partition, position in positions.items():
                counts = self._partitions.get(partition)
                start = None if counts is None else counts.start_before(position.offset)
                if counts is not None and start is not None:
                    reports.append(start)
                    self._new.discard(counts)
        if reports:
            self.reporter.report(reports=reports)

    def committed(self, positions: Mapping[Any, Any]) -> None:
        """Count what was committed."""
        partitions = self._partitions
        if not partitions:
            return
        with self.lock:
            for partition, position in positions.items():
                counts = partitions.get(partition)
                if counts is not None:
                    counts.commit(position.offset)

    # Reports

    def take_reports(self) -> list[Report]:
        """Return the counts since the last call."""
        with self.lock:
            reports, self._finished = self._finished, []
            for counts in self._partitions.values():
                reports += counts.take()
        return reports


def _records_between(log: PartitionLog, batch: Batch, first: int, stop: int) -> int:
    """Return how many records of a batch are in a range of its offsets."""
    if batch.count == batch.next_offset - batch.base_offset:
        return stop - first
    return min(_count(log, first, stop), batch.count)


def _count(log: PartitionLog, first: int, stop: int) -> int:
    """Return how many records the log has between two offsets."""
    try:
        return log.record_counts.count(first, stop)
    except EmbedlogError as error:
        # The log was closed, or is damaged there; the program continues.
        _log.warning("Cannot count what was read of %s-%d: %s", log.topic, log.partition, error)
        return stop - first
