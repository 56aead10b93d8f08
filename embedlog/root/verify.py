"""Checking a whole root and reporting what is wrong without changing it; rebuilding indexes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

from embedlog import index, keyspace, kv
from embedlog.batch import Batch
from embedlog.catalog import SegmentInfo
from embedlog.errors import (
    ClosedError,
    EmbedlogError,
    LockTimeoutError,
    ReadOnlyError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.index import IndexEntry
from embedlog.partition import journal, key_index, lookup, unnamed_files
from embedlog.partition import tail as tails
from embedlog.partition.partition_log import PartitionLog
from embedlog.partition.state import Context
from embedlog.partition.tail import Tail
from embedlog.root import startup
from embedlog.root.root import Root
from embedlog.segment import END_MARK, SegmentFile

Progress = Callable[[int, int], None]


class Finding(NamedTuple):
    """One thing that is wrong, and where."""

    topic: str
    partition: int
    path: str
    position: int
    what: str

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}: {self.path} at byte {self.position}: {self.what}"


def verify_root(root: Root, progress: Progress | None = None) -> list[Finding]:
    """Check every partition of every topic, and that there are no stray files."""
    try:
        logs = list(root.partition_logs(root.topics().values()))
    except ClosedError:
        raise
    except EmbedlogError as error:
        return [Finding("", 0, error.path or root.path, error.position or 0, str(error))]
    total, done = sum(_bytes_of(log) for log in logs) if progress else 0, 0
    findings: list[Finding] = []
    for log in logs:
        for step in verify_partition(log):
            if isinstance(step, Finding):
                findings.append(step)
            elif progress:
                done += step
                progress(done, total)
    try:
        strays = stray_files(root.context)
    except EmbedlogError as error:
        return [*findings, Finding("", 0, error.path or root.path, 0, str(error))]
    return findings + [Finding("", 0, path, 0, "the manifest does not name it") for path in strays]


def _bytes_of(log: PartitionLog) -> int:
    with suppress(EmbedlogError):
        return log.size_bytes()
    return 0


class PartitionSnapshot(NamedTuple):
    """What `verify_partition` compares the files of a partition with."""

    tail: Tail
    segments: list[SegmentInfo]
    entries: list[IndexEntry]
    """The index of the active segment, as of the same time as the tail."""


_Problem = tuple[int, str]
"""The position in a file, and what is wrong there."""


def verify_partition(log: PartitionLog) -> Iterator[Finding | int]:
    """Yield findings, and between them how many bytes were read since the last yield.

    Other processes may append, roll, truncate, delete and compact meanwhile.  So what looks
    wrong is checked again under the partition's lock, where nothing changes, and is only a
    finding if it is still wrong.
    """
    suspects = []
    try:
        snapshot = _snapshot(log)
    except EmbedlogError as error:
        if not _is_deleted(log):
            path, position = error.path or log.directory, error.position or 0
            yield Finding(log.topic, log.partition, path, position, str(error))
        return
    for step in _verify_snapshot(log, snapshot):
        if isinstance(step, Finding):
            suspects.append(step)
        else:
            yield step
    if suspects:
        yield from _confirmed(log, suspects)


def _confirmed(log: PartitionLog, suspects: list[Finding]) -> list[Finding]:
    """Return the findings that a second check, under the partition's lock, confirms."""
    try:
        with ExitStack() as lock:
            # A read-only handle has no lock, and a stopped process may hold it: then the second
            # check also runs without it.
            with suppress(LockTimeoutError, ReadOnlyError):
                log.acquire()
                lock.callback(log.release)
            paths = {finding.path for finding in suspects}
            again = set(_verify_snapshot(log, _snapshot(log), paths))
            suspects = [finding for finding in suspects if finding in again]
    except EmbedlogError:
        pass  # It could not be checked again.
    return [] if _is_deleted(log) else suspects


def _is_deleted(log: PartitionLog) -> bool:
    """Whether the topic was deleted since its partitions were listed."""
    try:
        return log.context.catalog.topic(log.topic).id != log.topic_id
    except UnknownTopicOrPartitionError:
        return True
    except EmbedlogError:
        return False


def _snapshot(log: PartitionLog) -> PartitionSnapshot:
    before = log.tail()

    def step(txn: kv.Txn) -> tuple[Tail, list[IndexEntry]]:
        row = txn.get(log.tail_key)
        tail = before if row is None else tails.unpack(row)
        return tail, index.entries(txn, log.key, tail.segment_id)

    # The tail first: a segment that is rolled after it is checked as a sealed one.
    tail, entries = log.context.live.read(step)
    log.refresh()
    segments = list(log.segments.values())
    # A publication that is committed counts, even if its process died before it was visible.
    visible = journal.visible_tail(log, tail)
    if visible.segment_id != tail.segment_id:
        entries = []  # Those of its last segment are not in `live` yet.
    return PartitionSnapshot(visible, segments, entries)


def _verify_snapshot(
    log: PartitionLog, snapshot: PartitionSnapshot, paths: Collection[str] | None = None
) -> Iterator[Finding | int]:
    """Compare the files with a snapshot: all of them, or those of ``paths``."""
    tail, segments = snapshot.tail, snapshot.segments
    finding = partial(Finding, log.topic, log.partition)
    if tail.failed:
        yield finding(log.directory, 0, "a flush failed; the partition is read-only")
    for segment, following in zip_longest(segments, segments[1:]):
        path = log.path_of(segment)
        if paths is not None and path not in paths:
            continue
        rolling = following is None and _is_rolling(segments, tail)
        for what in _verify_order(segment, following, tail, rolling):
            yield finding(path, 0, what)
        if rolling:
            continue
        try:
            for step in _verify_segment(log, segment, snapshot):
                yield step if isinstance(step, int) else finding(path, *step)
        except EmbedlogError as error:
            if isinstance(error, StorageError) and error.missing:
                log.refresh()
                current = log.segments.get(segment.base_offset)
                if current is None or current.id != segment.id:
                    continue  # dropped since the manifest was read
            yield finding(path, error.position or 0, str(error))


def _is_rolling(segments: list[SegmentInfo], tail: Tail) -> bool:
    """Whether a roll has named the last segment and not moved the tail yet.

    Its process may be dead, and the file missing or empty: the next append continues there.
    """
    new = segments[-1]
    if tail.empty and new.base_offset == tail.base_offset:
        # It has replaced the empty segment that the tail is in.
        return new.id != tail.segment_id
    if len(segments) < 2:
        return False
    old = segments[-2]
    # Above the end of the tail if it leaves a gap (A8).
    return old.id == tail.segment_id and old.next_offset == new.base_offset >= tail.log_end_offset


def _verify_order(
    segment: SegmentInfo, following: SegmentInfo | None, tail: Tail, rolling: bool
) -> Iterator[str]:
    """Yield what is wrong with the row of a segment, given the one that follows it."""
    if segment.sealed is (following is None):
        yield "only the last segment of a partition is active"
    if following is None:
        if segment.id != tail.segment_id and not rolling:
            yield f"the tail is in segment {tail.segment_id}"
    elif segment.sealed and segment.next_offset != following.base_offset:
        yield f"ends at offset {segment.next_offset}, the next begins at {following.base_offset}"


def _verify_segment(
    log: PartitionLog, segment: SegmentInfo, snapshot: PartitionSnapshot
) -> Iterator[_Problem | int]:
    tail = snapshot.tail
    if not segment.sealed and tail.empty and not log.context.files.exists(log.path_of(segment)):
        return  # not needed yet: the first append creates it
    file = log.open_segment(segment, mend=False)
    size = file.size()
    # Includes what is written but not flushed yet, since the index has it already.
    stop = segment.end_position if segment.sealed else tail.log_end_position
    if size < stop:
        yield size, f"the file is truncated: {stop} bytes were written"
        return
    if segment.sealed and size != segment.size:
        yield size, f"the file was sealed with {segment.size} bytes"
    if segment.sealed and file.bytes(stop, len(END_MARK)) != END_MARK:
        yield stop, "the end mark is missing"
    indexed = lookup.entries(log, segment) if segment.sealed else snapshot.entries
    entries = {entry.position: entry for entry in indexed}
    yield from _verify_batches(segment, file, stop, entries)
    if key_index.is_wrong(log, segment):
        yield 0, "its key index is damaged or wrong"
    for entry in entries.values():
        yield entry.position, f"the index has offset {entry.offset} where no batch begins"


def _verify_batches(
    segment: SegmentInfo, file: SegmentFile, stop: int, entries: dict[int, IndexEntry]
) -> Iterator[_Problem | int]:
    """Check the batches of a segment, and remove from ``entries`` those that refer to one."""
    position, expected = file.start, segment.base_offset
    newest: int | None = None
    for batch in file.scan(position, stop):
        batch.verify()
        position = batch.position + batch.size
        if batch.base_offset < expected:
            yield batch.position, f"offset {batch.base_offset} follows offset {expected - 1}"
        for what in gaps(segment, batch, expected):
            yield batch.position, what
        if batch.base_offset - batch.gap < expected <= batch.base_offset:
            last = batch.base_offset - batch.gap - 1
            yield batch.position, f"it follows offset {last}, and offset {expected - 1} is there"
        entry = entries.pop(batch.position, None)
        correct = batch.base_offset, newest
        if entry is not None and (entry.offset, entry.timestamp_before) != correct:
            yield batch.position, f"the index is wrong here: {entry}"
        expected = batch.next_offset
        newest = batch.max_timestamp if newest is None else max(newest, batch.max_timestamp)
        yield batch.size
    named = f"the manifest says {segment.next_offset}"
    if segment.dense and segment.sealed and expected != segment.next_offset:
        yield position, f"ends at offset {expected}, {named}, without gaps"
    if segment.next_offset is not None and expected > segment.next_offset:
        yield position, f"holds offset {expected - 1}, {named}"
    if segment.sealed and newest != segment.max_timestamp:
        yield 0, f"its largest timestamp is {newest}, the manifest says {segment.max_timestamp}"


def gaps(segment: SegmentInfo, batch: Batch, expected: int) -> list[str]:
    """Return the problems with a batch's offsets in a segment that must have no gaps."""
    if not segment.dense:
        return []
    problems = []
    if batch.base_offset > expected:
        problems.append(f"offsets [{expected}, {batch.base_offset}) are missing")
    if batch.count != batch.next_offset - batch.base_offset:
        problems.append(f"{batch.count} records have the offsets from {batch.base_offset} on")
    return [f"{what}; the manifest says that it has no gaps" for what in problems]


def stray_files(context: Context) -> list[str]:
    """Return the files that nothing names, without the pending deletes."""
    paths = startup.strays(context.files, context.state)
    return unnamed_files.not_pending(context.files, context.live, paths)


def rebuild_index(root: Root, topic: str | None = None) -> int:
    """Rebuild the index of a topic, or of all topics, from the segments.

    Returns how many entries it has.

    Raises:
        UnknownTopicOrPartitionError: There is no such topic.
    """
    root.context.check_writable()
    count = 0
    topics = root.topics().values() if topic is None else [root.topic(topic)]
    for log in root.partition_logs(topics):
        with log.owned() as tail:
            for segment in filter(tail.has_made, log.segments.values()):
                stop = segment.end_position or tail.log_end_position
                count += rebuild_segment(log, segment, stop)
    return count


def rebuild_segment(log: PartitionLog, segment: SegmentInfo, stop: int) -> int:
    """Rebuild the index of one segment, under the partition's lock; return how many entries.

    They are those that appending its batches would have made.
    """
    entries: list[IndexEntry] = []
    file, unindexed, newest = log.open_segment(segment), 0, -(1 << 63)
    for batch in file.scan(file.start, stop):
        if unindexed > log.config.index_interval_bytes:
            entries.append(IndexEntry(batch.base_offset, batch.position, newest))
            unindexed = 0
        unindexed += batch.size
        newest = max(newest, batch.max_timestamp)
    if segment.sealed:
        key, blob = (log.key, *segment.key), index.pack(entries)
        log.context.state.write(lambda txn: keyspace.SEGMENT_INDEXES.put(txn, *key, value=blob))
        if key_index.is_enabled(log.config) or key_index.is_wrong(log, segment):
            key_index.rebuild(log, segment)
        return len(entries)

    def step(txn: kv.Txn) -> None:
        index.remove(txn, log.key)
        for entry in entries:
            index.put(txn, log.key, segment.id, entry)

    log.context.live.write(step)
    return len(entries)


def index_is_wrong(log: PartitionLog, segment: SegmentInfo) -> bool:
    """Whether an index of a sealed segment, whose file is whole, could mislead a read.

    Missing entries only make reads slower; each recovery rebuilds the index of the
    active segment.
    """
    if not segment.sealed:
        return False
    try:
        entries = lookup.entries(log, segment)
        file = log.open_segment(segment)
        newest, correct = -(1 << 63), set()
        for batch in file.scan(file.start, segment.end_position):
            correct.add((batch.base_offset, batch.position, newest))
            newest = max(newest, batch.max_timestamp)
    except EmbedlogError:
        return True
    return not correct.issuperset(entries) or key_index.is_wrong(log, segment)
