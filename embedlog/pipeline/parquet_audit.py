"""The audit: compares the Parquet files with the log, offset by offset and hour by hour.

Every offset of the log below the end of what was loaded must be in the files
once, and the records of each hour must be as many.  What retention or
compaction has since removed from the log cannot be compared, and is counted
separately.  What an earlier audit has compared is not read again unless it changed.
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
from embedlog.pipeline.audit_progress import NOT_AUDITED, AuditedTopic, current_state
from embedlog.record import TopicPartition

if TYPE_CHECKING:
    from embedlog.api import Log

_HOUR_MS = 3_600_000
_PAGE_BITS = 20
_COLUMNS = ("partition", "offset", "timestamp")
_LEASE_SECONDS = 3600.0
_MAX_LEASE_ATTEMPTS = 10
"""Attempts to lease records while retention deletes the first of them."""

Int64Array = Any
"""A numpy array of int64; numpy's own types say no more."""


class OffsetSet:
    """A set of offsets: a byte for each, in pages that exist where there are some.

    >>> offsets = OffsetSet()
    >>> offsets.add(np.array([7, 8, 7])), offsets.add(np.array([8, 9]))
    (array([7, 8]), array([9]))
    >>> offsets.count_missing(np.array([7, 10, 99_000_000]))
    2
    """

    def __init__(self) -> None:
        self._pages: dict[int, Int64Array] = {}

    def add(self, offsets: Int64Array) -> Int64Array:
        """Add offsets, and return those that are new, each once."""
        added = [offsets[:0]]
        for page, page_offsets in self._by_page(_distinct(offsets)):
            present = self._pages.setdefault(page, np.zeros(1 << _PAGE_BITS, bool))
            positions = page_offsets & ((1 << _PAGE_BITS) - 1)
            added.append(page_offsets[~present[positions]])
            present[positions] = True
        return np.concatenate(added)

    def count_missing(self, offsets: Int64Array) -> int:
        """Return how many of these offsets are not in the set."""
        missing = 0
        for page, page_offsets in self._by_page(offsets):
            present = self._pages.get(page)
            positions = page_offsets & ((1 << _PAGE_BITS) - 1)
            missing += len(positions) if present is None else int((~present[positions]).sum())
        return missing

    def _by_page(self, offsets: Int64Array) -> Iterator[tuple[int, Int64Array]]:
        pages = offsets >> _PAGE_BITS
        for page in _distinct(pages):
            yield int(page), offsets[pages == page]


@dataclass(slots=True)
class TopicAudit:
    """The counts of one topic in the files and in the log."""

    files: Counter[int] = field(default_factory=Counter)
    """Records in the files, by hour since 1970 (UTC)."""

    compared: Counter[int] = field(default_factory=Counter)
    """Those of them whose offsets the log may still have."""

    log: Counter[int] = field(default_factory=Counter)
    """Records in the log by hour, below the end of what was loaded."""

    missing: int = 0
    """Offsets of the log that are in no file."""

    duplicates: int = 0
    """Rows whose offset is in the files more than once."""

    beyond: int = 0
    """Rows whose offset is past the end of what was loaded, or of the log."""

    compacted: bool = False
    """Whether compaction may have removed records from the log."""

    known: int = 0
    """Records in the files that an earlier audit compared."""

    def by_hour(self) -> dict[int, tuple[int, int, int]]:
        """Return the records of each hour in the files, of these compared, and in the log."""
        return {
            hour: (self.files[hour], self.compared[hour], self.log[hour])
            for hour in sorted(self.files | self.log)
        }

    def problems(self, topic: str) -> list[str]:
        """Return the differences, each as a sentence."""
        problems = [
            f"{topic}: {count:,} record{'s' * (count != 1)} {problem}"
            for count, problem in (
                (self.missing, "of the log are in no file"),
                (self.duplicates, "are in the files again"),
                (self.beyond, "in the files are past what was loaded from the log"),
            )
            if count
        ]
        for hour in sorted(self.compared | self.log):
            in_files, in_log = self.compared[hour], self.log[hour]
            if in_files < in_log or (in_files > in_log and not self.compacted):
                problems.append(
                    f"{topic}: {hour_text(hour)} has {in_files:,} in the files, {in_log:,} in log"
                )
        return problems


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What was loaded, and whether the files agree with the log."""

    loaded: int
    """Records loaded by this run."""

    topics: Mapping[str, TopicAudit]
    ends: Mapping[TopicPartition, int]
    """The next offset to load of each partition."""

    seen: Mapping[str, AuditedTopic] = field(default_factory=dict)
    """What was compared, for the next audit."""

    @property
    def known(self) -> int:
        """Records in the files that an earlier audit compared and this one did not read."""
        return sum(audit.known for audit in self.topics.values())

    @property
    def records(self) -> int:
        """Records in the files."""
        return sum(sum(audit.files.values()) for audit in self.topics.values())

    @property
    def gone(self) -> int:
        """Records in the files that were no longer in the log when they were compared."""
        audits = self.topics.values()
        in_both = sum(sum(audit.log.values()) - audit.missing for audit in audits)
        return self.records - sum(audit.duplicates + audit.beyond for audit in audits) - in_both

    @property
    def problems(self) -> list[str]:
        """The differences, each as a sentence; empty if files and log agree."""
        return [
            problem for topic, audit in self.topics.items() for problem in audit.problems(topic)
        ]

    def hours(self) -> Iterator[tuple[str, str, int, int]]:
        """Yield topic, hour, records in the files, and records in the log when it was compared."""
        for topic, audit in self.topics.items():
            for hour in sorted(audit.files | audit.log):
                yield topic, hour_text(hour), audit.files[hour], audit.log[hour]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {
            "loaded": self.loaded,
            "records": self.records,
            "gone": self.gone,
            "known": self.known,
            "problems": self.problems,
            "hours": [
                {"topic": topic, "hour": hour, "records": records, "log": log}
                for topic, hour, records, log in self.hours()
            ],
        }


def hour_text(hour: int) -> str:
    """Return an hour since 1970 as text.

    >>> hour_text(0)
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
    """Compare the files with the log below the offsets in ``ends``.

    Args:
        log: Opened in any mode; if it is writable, a lease keeps the records while they
            are compared.
        into: The directory of the files.
        ends: The next offset to load of each partition.
        loaded: The number of records loaded, for the report.
        known: What an earlier audit compared, by topic; it is not read again unless it changed.
    """
    topics, seen = {}, {}
    for topic in sorted({topic_partition.topic for topic_partition in ends}):
        directory = os.path.join(into, f"topic={topic}")
        topic_ends = {key.partition: end for key, end in ends.items() if key.topic == topic}
        current = current_state(log, topic, directory, topic_ends)
        previous = (known or {}).get(topic, NOT_AUDITED)
        if not previous.is_prefix_of(current):
            previous = NOT_AUDITED
        result = _audit_topic(log, directory, topic, current, previous)
        if result.known and result.problems(topic):
            # Only an audit of everything can say what is wrong, and where.
            result = _audit_topic(log, directory, topic, current, NOT_AUDITED)
        topics[topic], seen[topic] = result, replace(current, hours=result.by_hour())
    return AuditReport(loaded, topics, ends, seen)


def _audit_topic(
    log: Log, directory: str, topic: str, current: AuditedTopic, previous: AuditedTopic
) -> TopicAudit:
    result = TopicAudit(*previous.counters())
    result.known = sum(result.files.values())
    result.compacted = topic in log and log.root.topic(topic).config.compacts
    in_files = {partition: OffsetSet() for partition in current.ends}
    new_files = sorted(current.files.keys() - previous.files.keys())
    paths = [os.path.join(directory, name) for name in new_files]
    with _leased_ranges(log, topic, current.ends, previous.ends) as ranges:
        for partition, offsets, hours in _read_files(paths):
            result.duplicates += int((offsets < previous.ends.get(partition, 0)).sum())
            _add_file_rows(result, in_files.get(partition), offsets, hours, ranges.get(partition))
        for offset_range in ranges.values():
            if offset_range.start >= offset_range.stop:
                continue
            offsets_in_files = in_files[offset_range.partition]
            view = TopicView(log.root, topic, [offset_range])
            for batch in view.batches(["offset", "timestamp"]):
                result.missing += offsets_in_files.count_missing(np.asarray(batch["offset"]))
                result.log += _count_by_hour(_hours(batch["timestamp"]))
    return result


@contextmanager
def _leased_ranges(
    log: Log, topic: str, ends: Mapping[int, int], since: Mapping[int, int]
) -> Iterator[dict[int, OffsetRange]]:
    """Lease what the log still has of the new offsets while they are compared (C1, D22)."""
    name, lease = f"pipeline-{uuid.uuid4()}", None
    for _ in range(_MAX_LEASE_ATTEMPTS):
        ranges = _ranges(log, topic, ends, since)
        starts = {
            TopicPartition(topic, each.partition): each.start
            for each in ranges.values()
            if each.start < each.stop
        }
        if log.root.mode != "rw" or not starts:
            break
        try:
            lease = log.hold(name, starts, seconds=_LEASE_SECONDS)
            break
        except (OffsetOutOfRangeError, UnknownTopicOrPartitionError):
            continue  # retention was faster
    try:
        yield ranges
    finally:
        if lease is not None:
            lease.release()


def _ranges(
    log: Log, topic: str, ends: Mapping[int, int], since: Mapping[int, int]
) -> dict[int, OffsetRange]:
    """Return the offsets to compare; an empty range where they are gone or were compared."""
    existing = {each.partition: each for each in log.topic(topic).ranges()} if topic in log else {}
    ranges = {}
    for partition, end in ends.items():
        in_log = existing.get(partition, OffsetRange(partition, end, end))
        start = max(in_log.start, since.get(partition, 0))
        ranges[partition] = OffsetRange(partition, start, min(end, in_log.stop))
    return ranges


def _add_file_rows(
    result: TopicAudit,
    in_files: OffsetSet | None,
    offsets: Int64Array,
    hours: Int64Array,
    offset_range: OffsetRange | None,
) -> None:
    result.files += _count_by_hour(hours)
    if in_files is None or offset_range is None:
        result.beyond += len(offsets)
        return
    result.duplicates += len(offsets) - len(in_files.add(offsets))
    start, stop = offset_range.start, offset_range.stop
    result.beyond += int((offsets >= stop).sum())
    result.compared += _count_by_hour(hours[(offsets >= start) & (offsets < stop)])


def _read_files(paths: list[str]) -> Iterator[tuple[int, Int64Array, Int64Array]]:
    """Yield a partition and the offsets and hours of rows of it, in the order of the files."""
    if not paths:
        return
    from pyarrow import dataset  # imports pandas

    for batch in dataset.dataset(paths, format="parquet").to_batches(columns=list(_COLUMNS)):
        partitions, offsets = np.asarray(batch["partition"]), np.asarray(batch["offset"])
        hours = _hours(batch["timestamp"])
        for partition in _distinct(partitions):
            selected = partitions == partition
            yield int(partition), offsets[selected], hours[selected]


def _distinct(numbers: Int64Array) -> Int64Array:
    """Return each number once, in order.

    `numpy.unique` hashes since 2.3, which for nearly sorted offsets takes thirty times
    as long as sorting: it was four fifths of an audit.
    """
    ordered = np.sort(numbers)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]


def _hours(timestamps: pa.Array) -> Int64Array:
    milliseconds = timestamps.cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64())
    return np.asarray(milliseconds) // _HOUR_MS


def _count_by_hour(hours: Int64Array) -> Counter[int]:
    values, counts = np.unique(hours, return_counts=True)
    return Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))
