"""What a member of a consumer group counts: the records that it committed, by minute.

What a poll returns is *pending*: counted by batch, in ranges of offsets.  A commit takes the
part below its offset, which is reported.  What is still pending when the partition goes to
another member is reported as given back, since that member will read it again.

The methods of `ReadCounts` are for the thread of the consumer; only what was committed is also
used by the reporter's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from embedlog.audit.audit_topic import COUNT, GROUP, RETURN, SKIP, START, Report
from embedlog.audit.log_counts import arrays, count_range
from embedlog.audit.producer_counts import Run
from embedlog.audit.reporter import reporter_of, this_client
from embedlog.batch import MINUTE_MS, Batch, count_windows
from embedlog.batch.time_windows import Windows
from embedlog.errors import CorruptBatchError, EmbedlogError
from embedlog.partition import PartitionLog
from embedlog.root.root import Root

_log = logging.getLogger("embedlog.audit")
_MAX_PENDING = 256
"""Ranges that are pending one by one; of a consumer that never commits they are joined."""


class ReadRange:
    """Records that were read: offsets ``[first, stop)``, in one minute or in several."""

    __slots__ = ("first", "minute", "offsets", "records", "size", "stop", "times", "windows")

    def __init__(self, first: int, stop: int, minute: int | None, records: int, size: int) -> None:
        self.first, self.stop, self.minute = first, stop, minute
        """The minute is that of all records; there is one for each offset.  Else it is None."""
        self.records, self.size = records, size
        self.offsets: Any = None
        self.times: Any = None
        """Of each record, in the last batch that was read: its offset, and its timestamp."""
        self.windows: Windows = []
        """Without offsets and times: records by minute."""

    def fold(self) -> None:
        """Forget the single records."""
        if self.times is not None:
            self.windows = count_windows(self.times, MINUTE_MS)
            self.offsets = self.times = None

    def below(self, offset: int, log: PartitionLog) -> ReadRange:
        """Remove the part below an offset, and return it."""
        if self.minute is not None:
            records, windows = offset - self.first, []
        elif self.times is not None:
            records = int(self.offsets.searchsorted(offset))
            windows = count_windows(self.times[:records], MINUTE_MS) if records else []
        else:
            windows = count_range(log, self.first, offset)
            records = sum(count for _, count in windows)
        size = self.size * records // self.records if self.records else 0
        part = ReadRange(self.first, offset, self.minute, records, size)
        part.windows = windows
        if self.times is not None:
            self.offsets, self.times = self.offsets[records:], self.times[records:]
            if not len(self.times):
                self.times = None
        elif self.minute is None:
            left = dict(self.windows)
            for minute, count in windows:
                left[minute] = left.get(minute, 0) - count
            self.windows = [item for item in left.items() if item[1] > 0]
        self.first, self.records, self.size = offset, self.records - records, self.size - size
        return part

    def add_to(self, run: Run) -> None:
        """Add it to the counts of a run that ends where it begins."""
        self.fold()
        run.stop = self.stop
        if self.minute is not None:
            run.add(self.minute, self.records, self.size)
        elif self.windows:
            run.add_windows(self.windows, self.size)


class ReadCounts:
    """What a member of a group read of one partition."""

    def __init__(self, group: GroupCounts, log: PartitionLog) -> None:
        self._group, self._log = group, log
        self._pending: list[ReadRange] = []
        self._run: Run | None = None
        """What was committed and is not reported; guarded by the lock of the group."""
        self._end: int | None = None
        """Where the committed records end; None before the first commit."""

    def resume(self, offset: int) -> None:
        """Begin where the group has committed."""
        self._end = offset

    def add(self, batch: Batch, first: int, stop: int) -> None:
        """Count the records of a batch in a range of offsets, which a poll returns."""
        minute, count = batch.min_timestamp // MINUTE_MS, batch.count
        last = self._pending[-1] if self._pending else None
        base = batch.base_offset
        dense = base <= first and batch.next_offset - base == count
        if dense and batch.max_timestamp // MINUTE_MS == minute:
            records = stop - first
            size = batch.size if records == count else batch.size * records // count
            if last is not None and last.minute == minute and last.stop == first:
                last.stop, last.records, last.size = stop, last.records + records, last.size + size
                return
            self._append(ReadRange(first, stop, minute, records, size))
            return
        try:
            offsets, times = arrays(batch)
        except CorruptBatchError:
            # The program may have read other columns; those are counted in the first minute.
            read = ReadRange(first, stop, None, count, batch.size)
            read.windows = [(minute, count)]
            self._append(read)
            return
        begin, end = offsets.searchsorted((first, stop)).tolist()
        read = ReadRange(first, stop, None, end - begin, batch.size * (end - begin) // count)
        if begin < end:
            read.offsets, read.times = offsets[begin:end], times[begin:end]
        self._append(read)

    def _append(self, read: ReadRange) -> None:
        if self._pending:
            self._pending[-1].fold()
        self._pending.append(read)
        if len(self._pending) > _MAX_PENDING:
            self._join()

    def _join(self) -> None:
        """Join pending ranges that follow each other."""
        joined: list[Run] = []
        *older, last = self._pending
        for read in older:
            if not joined or joined[-1].stop != read.first:
                joined.append(Run(read.first))
            read.add_to(joined[-1])
        self._pending = []
        for run in joined:
            records, size = (sum(part) for part in zip(*run.minutes.values(), strict=True))
            read = ReadRange(run.first, run.stop, None, records, size)
            read.windows = [(minute, count[0]) for minute, count in run.minutes.items()]
            self._pending.append(read)
        self._pending.append(last)

    def recall(self, offset: int) -> None:
        """Take back the last records of the batch that was counted last; they are read again."""
        last = self._pending.pop() if self._pending else None
        if last is not None and last.first < offset:
            self._pending.append(last.below(offset, self._log) if offset < last.stop else last)

    # Commits

    def start_before(self, offset: int) -> Report | None:
        """Return the report that must precede the first commit of an offset, if any."""
        read = [read.first for read in self._pending if read.first < offset]
        if self._end is not None or not read:
            return None
        self._end = read[0]
        return self._report(START, read[0], read[0])

    def commit(self, offset: int) -> list[Report]:
        """Take what was read below an offset, which is committed; return what was skipped.

        The caller holds the lock of the group.
        """
        taken, left = [], []
        for read in self._pending:
            if read.first >= offset:
                left.append(read)
            elif read.stop <= offset:
                taken.append(read)
            else:
                taken.append(read.below(offset, self._log))
                left.append(read)
        self._pending = left
        reports: list[Report] = []
        run, end = self._run, self._end
        for read in taken:
            if end is not None and end < read.first:
                reports.append(self._report(SKIP, end, read.first))
            if run is None or run.stop != read.first:
                if run is not None:
                    reports.append(self._report(COUNT, run.first, run.stop, run.minutes))
                run = Run(read.first)
            read.add_to(run)
            end = read.stop
        if end is not None and end < offset:
            reports.append(self._report(SKIP, end, offset))
        self._run, self._end = run, offset
        return reports

    def take(self) -> list[Report]:
        """Return what was committed since the last call; the caller holds the group's lock."""
        run, self._run = self._run, None
        return [] if run is None else [self._report(COUNT, run.first, run.stop, run.minutes)]

    def close(self) -> None:
        """Report what is left: the partition goes to another member, or to none."""
        runs: list[Run] = []
        for read in self._pending:
            if not runs or runs[-1].stop != read.first:
                runs.append(Run(read.first))
            read.add_to(runs[-1])
        self._pending = []
        reports = [self._report(RETURN, run.first, run.stop, run.minutes) for run in runs]
        self._group.remove(self, reports)

    def _report(
        self, kind: str, first: int, stop: int, minutes: Mapping[int, list[int]] | None = None
    ) -> Report:
        log = self._log
        where = log.topic, log.topic_id, log.partition, first, stop
        return Report(self._group.client, kind, *where, minutes or {})


class GroupCounts:
    """What a consumer counts for its group, in all partitions of audited topics.

    Args:
        root: The log.
        group: The id of the group.
        client_id: The ``client_id`` of the consumer.
    """

    def __init__(self, root: Root, group: str, client_id: str) -> None:
        self._root, self._name = root, (group, client_id)
        self.restart()

    def restart(self) -> None:
        """Begin without counts, at first or in a forked child."""
        self._lock = threading.Lock()
        self.client = this_client(GROUP, *self._name)
        self._partitions: dict[tuple[str, int], ReadCounts] = {}
        self._finished: list[Report] = []
        self._reporting = False

    def partition(self, log: PartitionLog) -> ReadCounts:
        """Return new counts for a partition that was assigned."""
        counts = ReadCounts(self, log)
        with self._lock:
            self._partitions[log.topic, log.partition] = counts
        if not self._reporting:
            self._reporting = True
            reporter_of(self._root).add(self)
        return counts

    def remove(self, counts: ReadCounts, reports: list[Report]) -> None:
        """Keep the last reports about a partition, which is not assigned any more."""
        with self._lock:
            self._finished += [*counts.take(), *reports]
            for where, other in list(self._partitions.items()):
                if other is counts:
                    del self._partitions[where]

    def _chosen(self, positions: Mapping[Any, Any]) -> Iterable[tuple[ReadCounts, int]]:
        for partition, position in positions.items():
            counts = self._partitions.get(partition)
            if counts is not None:
                yield counts, position.offset

    def before_commit(self, positions: Mapping[Any, Any]) -> None:
        """Report, before a commit, where a group begins that had no commit.

        So what is committed can be counted, even if this process is killed after the commit.
        """
        if self._partitions:
            starts = (counts.start_before(offset) for counts, offset in self._chosen(positions))
            reports = [report for report in starts if report is not None]
            if reports:
                reporter_of(self._root).report(reports=reports)

    def after_commit(self, positions: Mapping[Any, Any]) -> None:
        """Count what was committed."""
        if self._partitions:
            with self._lock:
                for counts, offset in self._chosen(positions):
                    try:
                        self._finished += counts.commit(offset)
                    except EmbedlogError as error:
                        # The commit was made.
                        _log.warning("Cannot count what %s committed: %s", self.client.name, error)

    def take_reports(self) -> list[Report]:
        """Return what was counted since the last call."""
        with self._lock:
            reports, self._finished = self._finished, []
            for counts in self._partitions.values():
                reports += counts.take()
        return reports

    def close(self) -> None:
        """Report what was counted; does nothing if no topic is audited."""
        if self._reporting:
            self._reporting = False
            reporter_of(self._root).remove(self)
