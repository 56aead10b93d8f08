"""The audit: what is in the Parquet files, hour by hour, against what is in the log.

Every offset of the log up to where it was loaded must be there, each once, and
the hours of the records must agree.  What retention or compaction took from the
log since cannot be compared, and is counted apart.  What an earlier audit has
compared (`known`) is not read again while nothing of it has changed.
"""

from __future__ import annotations

import os
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from embedlog.api.offset_range import OffsetRange
from embedlog.api.topic import TopicView
from embedlog.errors import OffsetOutOfRangeError, UnknownTopicOrPartitionError
from embedlog.pipeline.audit_progress import NOTHING, AuditedTopic, look
from embedlog.record import TopicPartition

if TYPE_CHECKING:
    from embedlog.api import Log

_HOUR_MS = 3_600_000
_PAGE_BITS = 20
_COLUMNS = ("partition", "offset", "timestamp")
_LEASE_SECONDS = 3600.0
_TRIES = 10
"""Looks at a log whose beginning is deleted each time before it is held."""

Numbers = Any
"""An array of int64; numpy's own type for it says no more."""


class HourCounts:
    """A set of offsets; a byte for each, where there are some.

    >>> marks = Marks()
    >>> marks.add(np.array([7, 8, 7])), marks.add(np.array([8, 9]))
    (array([7, 8]), array([9]))
    >>> marks.lack(np.array([7, 10, 99_000_000]))
    2
    """

    def __init__(self) -> None:
        self._pages: dict[int, Numbers] = {}

    def add(self, offsets: Numbers) -> Numbers:
        """Mark offsets, and return those that were not marked before, each once."""
        fresh = [offsets[:0]]
        for page, some in self._split(_distinct(offsets)):
            bits = self._pages.setdefault(page, np.zeros(1 << _PAGE_BITS, bool))
            places = some & ((1 << _PAGE_BITS) - 1)
            fresh.append(some[~bits[places]])
            bits[places] = True
        return np.concatenate(fresh)

    def lack(self, offsets: Numbers) -> int:
        """Return how many of these are not marked."""
        lacking = 0
        for page, some in self._split(offsets):
            bits = self._pages.get(page)
            places = some & ((1 << _PAGE_BITS) - 1)
            lacking += len(some) if bits is None else int((~bits[places]).sum())
        return lacking

    def _split(self, offsets: Numbers) -> Iterator[tuple[int, Numbers]]:
        pages = offsets >> _PAGE_BITS
        for page in _distinct(pages):
            yield int(page), offsets[pages == page]


@dataclass(slots=True)
class RecordCount:
    """One topic in the files and in the log."""

    files: Counter[int] = field(default_factory=Counter)
    """Records by their hour (since 1970, UTC), as they are in the files."""

    compared: Counter[int] = field(default_factory=Counter)
    """Of these, those whose offsets the log may still have."""

    log: Counter[int] = field(default_factory=Counter)
    """Records of the log by their hour, up to where it was loaded."""

    lost: int = 0
    """Offsets of the log that are in no file."""

    twice: int = 0
    """Rows whose offset was in a file already."""

    beyond: int = 0
    """Rows with offsets past what was loaded, or past the end of the log."""

    compacts: bool = False
    """Whether compaction may have taken some out of the log."""

    known: int = 0
    """Records in the files that an earlier audit has compared."""

    def by_hour(self) -> dict[int, tuple[int, int, int]]:
        """Return the records in the files, of these compared, and in the log."""
        return {
            hour: (self.files[hour], self.compared[hour], self.log[hour])
            for hour in sorted(self.files | self.log)
        }

    def problems(self, topic: str) -> list[str]:
        """Return what does not agree, each as a sentence."""
        told = [
            f"{topic}: {count:,} record{'s' * (count != 1)} {what}"
            for count, what in (
                (self.lost, "of the log are in no file"),
                (self.twice, "are in the files again"),
                (self.beyond, "in the files are past what was loaded from the log"),
            )
            if count
        ]
        for hour in sorted(self.compared | self.log):
            here, there = self.compared[hour], self.log[hour]
            if here < there or (here > there and not self.compacts):
                told.append(f"{topic}: {moment(hour)} has {here:,} in the files, {there:,} in log")
        return told


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What was loaded, and whether it is what the log has."""

    loaded: int
    """Records of this run."""

    topics: Mapping[str, RecordCount]
    ends: Mapping[TopicPartition, int]
    seen: Mapping[str, AuditedTopic] = field(default_factory=dict)
    """What was compared, for the next audit."""

    @property
    def known(self) -> int:
        """Records in the files that an earlier audit has compared, and this one did not read."""
        return sum(counts.known for counts in self.topics.values())

    @property
    def records(self) -> int:
        """Records in the files."""
        return sum(sum(counts.files.values()) for counts in self.topics.values())

    @property
    def gone(self) -> int:
        """Records in the files that the log did not have any more when they were compared."""
        both = sum(sum(counts.log.values()) - counts.lost for counts in self.topics.values())
        return self.records - sum(each.twice + each.beyond for each in self.topics.values()) - both

    @property
    def problems(self) -> list[str]:
        """What does not agree, each as a sentence; empty is how it should be."""
        return [told for topic, each in self.topics.items() for told in each.problems(topic)]

    def hours(self) -> Iterator[tuple[str, str, int, int]]:
        """Yield topic, hour, records in the files, and what the log had when it was compared."""
        for topic, counts in self.topics.items():
            for hour in sorted(counts.files | counts.log):
                yield topic, moment(hour), counts.files[hour], counts.log[hour]

    def to_json(self) -> dict[str, Any]:
        """Return it for a program."""
        hours = [
            {"topic": topic, "hour": hour, "records": records, "log": log}
            for topic, hour, records, log in self.hours()
        ]
        facts = {"loaded": self.loaded, "records": self.records, "gone": self.gone}
        return {**facts, "known": self.known, "problems": self.problems, "hours": hours}


def moment(hour: int) -> str:
    """Return an hour for people.

    >>> moment(0)
    '1970-01-01 00:00'
    """
    return str(np.datetime64(hour, "h")).replace("T", " ") + ":00"


def audit(
    log: Log,
    into: str,
    ends: Mapping[TopicPartition, int],
    loaded: int = 0,
    known: Mapping[str, AuditedTopic] | None = None,
) -> AuditReport:
    """Compare what is in the files with what is in the log below these offsets.

    Args:
        log: Opened in any mode; what is read of it is held meanwhile if it may be written.
        into: The directory of the files.
        ends: Up to where each partition was loaded.
        loaded: For the report.
        known: What an earlier audit saw, by topic: is not read again, if it is as it was.
    """
    topics, seen = {}, {}
    for topic in sorted({one.topic for one in ends}):
        folder = os.path.join(into, f"topic={topic}")
        own = {one.partition: end for one, end in ends.items() if one.topic == topic}
        now = look(log, topic, folder, own)
        before = (known or {}).get(topic, NOTHING)
        counts = _audit_topic(log, folder, topic, now, before if before.still(now) else NOTHING)
        if counts.known and counts.problems(topic):
            # All of it tells what is wrong, and where.
            counts = _audit_topic(log, folder, topic, now, NOTHING)
        topics[topic], seen[topic] = counts, replace(now, hours=counts.by_hour())
    return AuditReport(loaded, topics, ends, seen)


def _audit_topic(
    log: Log, folder: str, topic: str, now: AuditedTopic, known: AuditedTopic
) -> RecordCount:
    counts = RecordCount(*known.counters())
    counts.known = sum(counts.files.values())
    counts.compacts = topic in log and log.root.topic(topic).config.compacts
    marks = {partition: HourCounts() for partition in now.ends}
    paths = [os.path.join(folder, name) for name in sorted(now.files.keys() - known.files.keys())]
    with _held(log, topic, now.ends, known.ends) as ranges:
        for partition, offsets, hours in _rows(paths):
            since = known.ends.get(partition, 0)
            counts.twice += int((offsets < since).sum())
            there = ranges.get(partition)
            _add_files(counts, marks.get(partition), offsets, hours, there)
        for one in ranges.values():
            if one.start >= one.stop:
                continue
            for batch in TopicView(log.root, topic, [one]).batches(["offset", "timestamp"]):
                counts.lost += marks[one.partition].lack(np.asarray(batch["offset"]))
                counts.log += _counted(_hours(batch["timestamp"]))
    return counts


@contextmanager
def _held(
    log: Log, topic: str, ends: Mapping[int, int], since: Mapping[int, int]
) -> Iterator[dict[int, OffsetRange]]:
    """Hold what the log still has of what was loaded since, while it is compared (C1, D22)."""
    name, lease = f"pipeline-{uuid.uuid4()}", None
    for _ in range(_TRIES):
        ranges = _ranges(log, topic, ends, since)
        starts = {
            TopicPartition(topic, one.partition): one.start
            for one in ranges.values()
            if one.start < one.stop
        }
        if log.root.mode != "rw" or not starts:
            break
        try:
            lease = log.hold(name, starts, seconds=_LEASE_SECONDS)
            break
        except (OffsetOutOfRangeError, UnknownTopicOrPartitionError):
            continue  # retention was quicker
    try:
        yield ranges
    finally:
        if lease is not None:
            lease.release()


def _ranges(
    log: Log, topic: str, ends: Mapping[int, int], since: Mapping[int, int]
) -> dict[int, OffsetRange]:
    """Return what there is to compare; empty where it is gone or known."""
    there = {one.partition: one for one in log.topic(topic).ranges()} if topic in log else {}
    ranges = {}
    for number, end in ends.items():
        one = there.get(number, OffsetRange(number, end, end))
        ranges[number] = OffsetRange(
            number, max(one.start, since.get(number, 0)), min(end, one.stop)
        )
    return ranges


def _add_files(
    counts: RecordCount,
    marks: HourCounts | None,
    offsets: Numbers,
    hours: Numbers,
    there: OffsetRange | None,
) -> None:
    counts.files += _counted(hours)
    if marks is None or there is None:
        counts.beyond += len(offsets)
        return
    fresh = marks.add(offsets)
    counts.twice += len(offsets) - len(fresh)
    counts.beyond += int((offsets >= there.stop).sum())
    counts.compared += _counted(hours[(offsets >= there.start) & (offsets < there.stop)])


def _rows(paths: list[str]) -> Iterator[tuple[int, Numbers, Numbers]]:
    """Yield the rows of files, some of one partition at a time."""
    if not paths:
        return
    from pyarrow import dataset  # imports pandas

    for batch in dataset.dataset(paths, format="parquet").to_batches(columns=list(_COLUMNS)):
        partitions, offsets = np.asarray(batch["partition"]), np.asarray(batch["offset"])
        hours = _hours(batch["timestamp"])
        for partition in _distinct(partitions):
            own = partitions == partition
            yield int(partition), offsets[own], hours[own]


def _distinct(numbers: Numbers) -> Numbers:
    """Return each number once, in order.

    `numpy.unique` hashes them since 2.3, which for offsets, nearly in order as they are, takes
    thirty times as long as to sort them: it was four fifths of an audit.
    """
    ordered = np.sort(numbers)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]


def _hours(times: pa.Array) -> Numbers:
    milliseconds = times.cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64())
    return np.asarray(milliseconds) // _HOUR_MS


def _counted(hours: Numbers) -> Counter[int]:
    values, counts = np.unique(hours, return_counts=True)
    return Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))
