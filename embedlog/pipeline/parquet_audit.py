"""The audit: compares the Parquet files with the log, offset by offset and hour by hour.

Every offset of the log below the end of what was loaded must be in the files
once, and the records of each hour must be as many.  Records that retention or
compaction has removed from the log since cannot be compared; they are counted
separately.

An audit without problems notes what it compared, so that the next one need not
read it again.  A published file is never written again, and the records of a log
do not change.  So while the same files exist, with the same sizes and times, and
the log is the same one, they still agree.  In any doubt everything is read.
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
from embedlog.display import plural
from embedlog.errors import OffsetOutOfRangeError, UnknownTopicOrPartitionError
from embedlog.record import TopicPartition

if TYPE_CHECKING:
    from embedlog.api import Log

_HOUR_MS = 3_600_000
_PAGE_BITS = 20
_COLUMNS = ("partition", "offset", "timestamp")
_LEASE_SECONDS = 3600.0
_MAX_LEASE_ATTEMPTS = 10
"""Attempts to lease records while retention deletes the first of them."""

FileStamp = tuple[int, int]
"""The size of a file in bytes, and its modification time in nanoseconds."""

_JSON_VERSION = 1
_MAPS = ("ends", "epochs", "files", "hours")

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
        for page, page_offsets, positions in self._by_page(_distinct(offsets)):
            present = self._pages.setdefault(page, np.zeros(1 << _PAGE_BITS, bool))
            added.append(page_offsets[~present[positions]])
            present[positions] = True
        return np.concatenate(added)

    def count_missing(self, offsets: Int64Array) -> int:
        """Return how many of these offsets are not in the set."""
        missing = 0
        for page, _, positions in self._by_page(offsets):
            present = self._pages.get(page)
            missing += len(positions) if present is None else int((~present[positions]).sum())
        return missing

    def _by_page(self, offsets: Int64Array) -> Iterator[tuple[int, Int64Array, Int64Array]]:
        """Yield the number of each page, its offsets, and their positions in it."""
        pages = offsets >> _PAGE_BITS
        for page in _distinct(pages):
            page_offsets = offsets[pages == page]
            yield int(page), page_offsets, page_offsets & ((1 << _PAGE_BITS) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedTopic:
    """One topic, its log and its files, when they were compared."""

    topic_id: int | None = None
    ends: Mapping[int, int] = field(default_factory=dict)
    """The offset before which each partition was compared."""
    epochs: Mapping[int, int] = field(default_factory=dict)
    """The leader epoch of each partition: a new one begins where a log was truncated."""
    files: Mapping[str, FileStamp] = field(default_factory=dict)
    """The files of the topic, by their paths relative to its directory."""
    hours: Mapping[int, tuple[int, int, int]] = field(default_factory=dict)
    """Records by hour: in the files, those of them that were compared, and in the log."""

    def counters(self) -> tuple[Counter[int], Counter[int], Counter[int]]:
        """Return the three numbers of `hours` as counters by hour."""
        files, compared, log = (
            Counter({hour: counts[i] for hour, counts in self.hours.items() if counts[i]})
            for i in range(3)
        )
        return files, compared, log

    def is_prefix_of(self, current: AuditedTopic) -> bool:
        """Whether nothing of this has changed, though there may be more now."""
        return (
            self.topic_id == current.topic_id
            and self.files.items() <= current.files.items()
            and self.epochs.items() <= current.epochs.items()
            and all(end <= current.ends.get(number, 0) for number, end in self.ends.items())
        )

    def to_json(self) -> dict[str, Any]:
        """Return JSON for the file ``.pipeline/compared``."""
        return {
            "form": _JSON_VERSION,
            "topic_id": self.topic_id,
            **{name: list(getattr(self, name).items()) for name in _MAPS},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> AuditedTopic:
        """Inverse of `to_json`; `NOT_AUDITED` for another version of the JSON."""
        if value.get("form") != _JSON_VERSION:
            return NOT_AUDITED
        maps = {name: dict(value[name]) for name in _MAPS}
        # JSON has no tuples.
        maps["files"] = {name: (size, time_ns) for name, (size, time_ns) in maps["files"].items()}
        maps["hours"] = {
            hour: (files, both, log) for hour, (files, both, log) in maps["hours"].items()
        }
        return cls(topic_id=value["topic_id"], **maps)


NOT_AUDITED = AuditedTopic()


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
            f"{topic}: {plural(count, 'record')} {problem}"
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
        info = log.root.topics().get(topic)
        numbers = range(0 if info is None else info.partitions)
        # Before anything is compared: later changes are left to the next audit.
        current = AuditedTopic(
            topic_id=None if info is None else info.id,
            ends=topic_ends,
            epochs={n: log.root.partition(topic, n).tail().leader_epoch for n in numbers},
            files=visible_files(directory),
        )
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
            result.files += _count_by_hour(hours)
            if partition not in ranges:
                result.beyond += len(offsets)
                continue
            result.duplicates += len(offsets) - len(in_files[partition].add(offsets))
            _, start, stop = ranges[partition]
            result.beyond += int((offsets >= stop).sum())
            result.compared += _count_by_hour(hours[(offsets >= start) & (offsets < stop)])
        for partition, offset_range in ranges.items():
            if offset_range.start < offset_range.stop:
                view = TopicView(log.root, topic, [offset_range])
                for batch in view.batches(["offset", "timestamp"]):
                    offsets = np.asarray(batch["offset"])
                    result.missing += in_files[partition].count_missing(offsets)
                    result.log += _count_by_hour(_hours(batch["timestamp"]))
    return result


@contextmanager
def _leased_ranges(
    log: Log, topic: str, ends: Mapping[int, int], since: Mapping[int, int]
) -> Iterator[dict[int, OffsetRange]]:
    """Lease the new records that the log still has while they are compared.

    Yields the offsets to compare by partition; the range is empty if all records are deleted
    or were compared before.
    """
    name, lease = f"pipeline-{uuid.uuid4()}", None
    for _ in range(_MAX_LEASE_ATTEMPTS):
        in_log = log.topic(topic).ranges() if topic in log else []
        by_partition = {part.partition: part for part in in_log}
        ranges, starts = {}, {}
        for number, end in ends.items():
            _, start, stop = by_partition.get(number, OffsetRange(number, end, end))
            start, stop = max(start, since.get(number, 0)), min(end, stop)
            ranges[number] = OffsetRange(number, start, stop)
            if start < stop:
                starts[TopicPartition(topic, number)] = start
        if log.root.mode != "rw" or not starts:
            break
        try:
            lease = log.housekeeping.hold(name, starts, seconds=_LEASE_SECONDS)
            break
        except (OffsetOutOfRangeError, UnknownTopicOrPartitionError):
            continue  # Retention was faster.
    try:
        yield ranges
    finally:
        if lease is not None:
            lease.release()


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


def visible_files(directory: str) -> dict[str, FileStamp]:
    """Return the files below a directory that readers of Parquet data sets see."""
    stamps = {}
    for parent, directories, names in os.walk(directory):
        directories[:] = [name for name in directories if not is_hidden(name)]
        for name in names:
            if not is_hidden(name):
                path = os.path.join(parent, name)
                status = os.stat(path)
                stamps[os.path.relpath(path, directory)] = status.st_size, status.st_mtime_ns
    return stamps


def is_hidden(name: str) -> bool:
    """Whether readers of Parquet data sets skip a file or directory of that name."""
    return name.startswith((".", "_"))
