"""Checking a whole root and reporting what is wrong; changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import NamedTuple

from embedlog import index, keyspace, kv
from embedlog.batch import Batch
from embedlog.catalog import SegmentInfo, TopicInfo
from embedlog.errors import (
    ClosedError,
    EmbedlogError,
    LockTimeoutError,
    ReadOnlyError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.index import IndexEntry
from embedlog.partition import journal, lookup, pending_deletes
from embedlog.partition import tail as tails
from embedlog.partition.partition_log import PartitionLog
from embedlog.partition.recovery import tail_locked
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
        logs = [log for info in root.topics().values() for log in _partitions(root, info)]
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
    return findings + list(_strays(root))


def _partitions(root: Root, topic: TopicInfo) -> list[PartitionLog]:
    try:
        return [root.partition(topic.name, number) for number in range(topic.partitions)]
    except UnknownTopicOrPartitionError:
        return []  # deleted since the topics were listed


def _bytes_of(log: PartitionLog) -> int:
    try:
        return log.size_bytes()
    except EmbedlogError:
        return 0


class PartitionSnapshot(NamedTuple):
    """A partition at one instant: what `verify_partition` compares its files with."""

    tail: Tail
    segments: list[SegmentInfo]
    entries: list[IndexEntry]
    """The index of the active segment, of the same instant as the tail."""


def verify_partition(log: PartitionLog) -> Iterator[Finding | int]:
    """Yield findings, and between them how many bytes were read since the last yield.

    Other processes may append, roll, truncate, delete and compact meanwhile.  So what looks
    wrong is checked again under the partition's lock, where nothing changes, and only
    what is still wrong then is a finding.
    """
    suspects = []
    try:
        snapshot = _snapshot(log)
    except EmbedlogError as error:
        if not _is_deleted(log):
            yield _finding(log, error.path or log.directory, error.position or 0, str(error))
        return
    for step in _verify_snapshot(log, snapshot):
        if isinstance(step, Finding):
            suspects.append(step)
        else:
            yield step
    if suspects:
        yield from _confirmed(log, suspects)


def _confirmed(log: PartitionLog, suspects: list[Finding]) -> list[Finding]:
    """Return the findings that a second check, under the partition's lock, makes too."""
    paths = {finding.path for finding in suspects}
    locked = False
    try:
        # A read-only handle has no lock, and a stopped process may hold it: then the second
        # check runs without it, like the first one.
        with suppress(LockTimeoutError, ReadOnlyError):
            log.acquire()
            locked = True
        again = {
            step
            for step in _verify_snapshot(log, _snapshot(log), paths)
            if isinstance(step, Finding)
        }
    except EmbedlogError:
        return [] if _is_deleted(log) else suspects
    finally:
        if locked:
            log.release()
    return [] if _is_deleted(log) else [finding for finding in suspects if finding in again]


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

    # The tail first: a segment that is rolled after it is looked at as sealed.
    tail, entries = log.context.live.read(step)
    log.refresh()
    segments = list(log.segments.values())
    # A publication that is committed, but not visible because its process died, is whole.
    return PartitionSnapshot(journal.visible_tail(log, tail), segments, entries)


def _verify_snapshot(
    log: PartitionLog, snapshot: PartitionSnapshot, paths: Collection[str] | None = None
) -> Iterator[Finding | int]:
    """Compare the files with a snapshot: all of them, or those of ``paths``."""
    tail, segments = snapshot.tail, snapshot.segments
    if tail.failed:
        yield _finding(log, log.directory, 0, "a flush failed; the partition is read-only")
    for number, segment in enumerate(segments):
        if paths is not None and log.path_of(segment) not in paths:
            continue
        yield from _verify_order(log, segments, number, tail)
        if segment is segments[-1] and _is_rolling(segments, tail):
            continue
        try:
            yield from _verify_segment(log, segment, snapshot)
        except EmbedlogError as error:
            if isinstance(error, StorageError) and error.missing and not _is_named(log, segment):
                continue  # dropped since the manifest was read
            yield _finding(log, log.path_of(segment), error.position or 0, str(error))


def _is_named(log: PartitionLog, segment: SegmentInfo) -> bool:
    log.refresh()
    current = log.segments.get(segment.base_offset)
    return current is not None and current.id == segment.id


def _is_rolling(segments: list[SegmentInfo], tail: Tail) -> bool:
    """Whether a roll has named the last segment and not moved the tail yet; it may be dead.

    The file may be missing or empty: the next append continues there.
    """
    if len(segments) < 2 or segments[-1].id == tail.segment_id:
        return False
    old, new = segments[-2:]
    # Above the end of the tail if it leaves a gap (A8).
    return old.id == tail.segment_id and old.next_offset == new.base_offset >= tail.log_end_offset


def _verify_order(
    log: PartitionLog, segments: list[SegmentInfo], number: int, tail: Tail
) -> Iterator[Finding]:
    segment, path = segments[number], log.path_of(segments[number])
    last = number == len(segments) - 1
    if segment.sealed is last:
        yield _finding(log, path, 0, "only the last segment of a partition is active")
    if not last and segment.next_offset is not None:
        following = segments[number + 1].base_offset
        if segment.next_offset != following:
            what = f"ends at offset {segment.next_offset}, the next begins at {following}"
            yield _finding(log, path, 0, what)
    if last and segment.id != tail.segment_id and not _is_rolling(segments, tail):
        yield _finding(log, path, 0, f"the tail is in segment {tail.segment_id}")


def _verify_segment(
    log: PartitionLog, segment: SegmentInfo, snapshot: PartitionSnapshot
) -> Iterator[Finding | int]:
    path, tail = log.path_of(segment), snapshot.tail
    if not segment.sealed and tail.empty and not log.context.files.exists(path):
        return  # named and not needed yet: the first append creates it
    file = log.open_segment(segment)
    size = file.size()
    # Including what is written and waits for its flush: it is in the index already.
    stop = segment.end_position if segment.sealed else tail.log_end_position
    if size < stop:
        yield _finding(log, path, size, f"the file is cut short: {stop} bytes were written")
        return
    if segment.sealed and size != segment.size:
        yield _finding(log, path, size, f"the file was sealed with {segment.size} bytes")
    if segment.sealed and file.bytes(stop, len(END_MARK)) != END_MARK:
        yield _finding(log, path, stop, "the end mark is missing")
    indexed = lookup.entries(log, segment) if segment.sealed else snapshot.entries
    entries = {entry.position: entry for entry in indexed}
    yield from _verify_batches(log, segment, file, stop, entries)
    for entry in entries.values():
        what = f"the index has offset {entry.offset} where no batch begins"
        yield _finding(log, path, entry.position, what)


def _verify_batches(
    log: PartitionLog,
    segment: SegmentInfo,
    file: SegmentFile,
    stop: int,
    entries: dict[int, IndexEntry],
) -> Iterator[Finding | int]:
    path, expected = log.path_of(segment), segment.base_offset
    newest: int | None = None
    position = file.start
    for batch in file.scan(position, stop):
        batch.verify()
        position = batch.position + batch.size
        if batch.base_offset < expected:
            what = f"offset {batch.base_offset} follows offset {expected - 1}"
            yield _finding(log, path, batch.position, what)
        for what in gaps(segment, batch, expected):
            yield _finding(log, path, batch.position, what)
        entry = entries.pop(batch.position, None)
        correct = batch.base_offset, newest
        if entry is not None and (entry.offset, entry.timestamp_before) != correct:
            yield _finding(log, path, batch.position, f"the index is wrong here: {entry}")
        expected = batch.next_offset
        newest = batch.max_timestamp if newest is None else max(newest, batch.max_timestamp)
        yield batch.size
    if segment.dense and segment.sealed and expected != segment.next_offset:
        what = f"ends at offset {expected}, the manifest says {segment.next_offset}, without gaps"
        yield _finding(log, path, position, what)
    if segment.next_offset is not None and expected > segment.next_offset:
        what = f"holds offset {expected - 1}, the manifest says {segment.next_offset}"
        yield _finding(log, path, position, what)
    if segment.sealed and newest != segment.max_timestamp:
        what = f"its largest timestamp is {newest}, the manifest says {segment.max_timestamp}"
        yield _finding(log, path, 0, what)


def gaps(segment: SegmentInfo, batch: Batch, expected: int) -> list[str]:
    """Return what is wrong with the offsets of a batch in a segment that must have no gaps."""
    if not segment.dense:
        return []
    problems = []
    if batch.base_offset > expected:
        problems.append(f"offsets {expected} to {batch.base_offset - 1} are missing")
    if batch.count != batch.next_offset - batch.base_offset:
        problems.append(f"{batch.count} records have the offsets from {batch.base_offset} on")
    return [f"{what}; the manifest says that it has no gaps" for what in problems]


def _strays(root: Root) -> Iterator[Finding]:
    try:
        paths = stray_files(root.context)
    except EmbedlogError as error:
        yield Finding("", 0, error.path or root.path, 0, str(error))
        return
    for path in paths:
        yield Finding("", 0, path, 0, "the manifest does not name it")


def stray_files(context: Context) -> list[str]:
    """Return the files that nothing names, without the pending deletes."""
    # Read before and after: files may be unlinked, or become pending deletes, meanwhile.
    pending = pending_deletes.paths(context.live)
    paths = startup.strays(context.files, context.state, pending)
    pending = pending_deletes.paths(context.live) if paths else set()
    return [path for path in paths if path not in pending and context.files.exists(path)]


def _finding(log: PartitionLog, path: str, position: int, what: str) -> Finding:
    return Finding(log.topic, log.partition, path, position, what)


def rebuild_index(root: Root, topic: str | None = None) -> int:
    """Rebuild the index of a topic, or of all topics, from the segments (A28, B5).

    Raises:
        UnknownTopicOrPartitionError: There is no such topic.
    """
    root.context.check_writable()
    count = 0
    for info in root.topics().values() if topic is None else [root.topic(topic)]:
        for number in range(info.partitions):
            count += _rebuild_partition(root.partition(info.name, number))
    return count


def _rebuild_partition(log: PartitionLog) -> int:
    log.acquire()
    try:
        tail = tail_locked(log)
        count = 0
        for segment in log.segments.values():
            if tail.has_made(segment):
                stop = segment.end_position or tail.log_end_position
                count += rebuild_segment(log, segment, stop)
        return count
    finally:
        log.release()


def rebuild_segment(log: PartitionLog, segment: SegmentInfo, stop: int) -> int:
    """Rebuild the index of one segment, under the partition's lock; return how many entries."""
    entries = index_of(log, segment, stop)
    _store(log, segment, entries)
    return len(entries)


def index_is_wrong(log: PartitionLog, segment: SegmentInfo) -> bool:
    """Whether the index of a sealed segment, itself whole, could mislead a read.

    Missing entries only make reads slower (B5); the index of the active segment is
    rebuilt with every recovery.
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
    return not correct.issuperset(entries)


def index_of(log: PartitionLog, segment: SegmentInfo, stop: int) -> list[IndexEntry]:
    """Return the entries that appending the segment's batches would have made (B1)."""
    file = log.open_segment(segment)
    entries: list[IndexEntry] = []
    unindexed, newest = 0, -(1 << 63)
    for batch in file.scan(file.start, stop):
        if unindexed > log.config.index_interval_bytes:
            entries.append(IndexEntry(batch.base_offset, batch.position, newest))
            unindexed = 0
        unindexed += batch.size
        newest = max(newest, batch.max_timestamp)
    return entries


def _store(log: PartitionLog, segment: SegmentInfo, entries: list[IndexEntry]) -> None:
    key = log.key
    if segment.sealed:
        blob = index.pack(entries)
        log.context.state.write(
            lambda txn: keyspace.SEGMENT_INDEXES.put(txn, key, *segment.key, value=blob)
        )
        return

    def step(txn: object) -> None:
        index.remove(txn, key)
        for entry in entries:
            index.put(txn, key, segment.id, entry)

    log.context.live.write(step)
