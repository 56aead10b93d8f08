"""Walking a whole root and telling what is not as it should be; nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from embedlog import catalog, index, kv
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
from embedlog.partition import journal, lookup, pending_deletes, tail
from embedlog.partition.context import Context
from embedlog.partition.partition_log import PartitionLog
from embedlog.partition.recovery import tail_locked
from embedlog.partition.tail import Tail
from embedlog.root import startup
from embedlog.segment import END_MARK, SegmentFile

if TYPE_CHECKING:
    from embedlog.root.root import Root

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
    """Check every partition of every topic, and that no other files are there."""
    try:
        logs = [log for info in root.topics().values() for log in _partitions(root, info)]
    except ClosedError:
        raise
    except EmbedlogError as error:
        return [Finding("", 0, error.path or root.path, error.position or 0, str(error))]
    total, done = sum(_bytes_of(log) for log in logs) if progress else 0, 0
    found: list[Finding] = []
    for log in logs:
        for step in verify_partition(log):
            if isinstance(step, Finding):
                found.append(step)
            elif progress:
                done += step
                progress(done, total)
    return found + list(_strays(root))


def _partitions(root: Root, topic: TopicInfo) -> list[PartitionLog]:
    try:
        return [root.partition(topic.name, number) for number in range(topic.partitions)]
    except UnknownTopicOrPartitionError:
        return []  # deleted since the look at the topics


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

    Other processes may append, roll, cut, delete and compact meanwhile.  So what looks
    wrong is looked at again under the partition's lock, where nothing moves, and only
    what is still wrong then is a finding.
    """
    suspects = []
    try:
        view = _view(log)
    except EmbedlogError as error:
        if not _is_deleted(log):
            yield _finding(log, error.path or log.directory, error.position or 0, str(error))
        return
    for step in _verify_view(log, view):
        if isinstance(step, Finding):
            suspects.append(step)
        else:
            yield step
    if suspects:
        yield from _confirmed(log, suspects)


def _confirmed(log: PartitionLog, suspects: list[Finding]) -> list[Finding]:
    """Return the findings that a look under the partition's lock makes as well."""
    paths = {finding.path for finding in suspects}
    locked = False
    try:
        # A reading handle has no lock, and a stopped process may hold it: then the second
        # look is made beside the writers, as the first one was.
        with suppress(LockTimeoutError, ReadOnlyError):
            log.acquire()
            locked = True
        again = {step for step in _verify_view(log, _view(log), paths) if isinstance(step, Finding)}
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


def _view(log: PartitionLog) -> PartitionSnapshot:
    now = log.tail()

    def step(txn: kv.Txn) -> tuple[Tail, list[IndexEntry]]:
        row = txn.get(log.tail_key)
        seen = now if row is None else tail.unpack(row)
        return seen, index.entries(txn, log.key, seen.segment_id)

    # The tail first: a segment that is rolled after it is looked at as sealed.
    now, entries = log.context.live.read(step)
    log.refresh()
    segments = list(log.segments.values())
    # What is published, though its process died before it could be seen, is whole.
    return PartitionSnapshot(journal.seen_done(log, now), segments, entries)


def _verify_view(
    log: PartitionLog, view: PartitionSnapshot, paths: Collection[str] | None = None
) -> Iterator[Finding | int]:
    """Compare the files with a view: all of them, or those of ``paths``."""
    now, segments = view.tail, view.segments
    if now.failed:
        yield _finding(log, log.directory, 0, "a flush failed; the partition is read-only")
    for place, segment in enumerate(segments):
        if paths is not None and log.path_of(segment) not in paths:
            continue
        yield from _verify_order(log, segments, place, now)
        if segment is segments[-1] and _rolling(segments, now):
            continue
        try:
            yield from _verify_segment(log, segment, view)
        except EmbedlogError as error:
            if isinstance(error, StorageError) and error.missing and not _named(log, segment):
                continue  # dropped since the look at the manifest
            yield _finding(log, log.path_of(segment), error.position or 0, str(error))


def _named(log: PartitionLog, segment: SegmentInfo) -> bool:
    log.refresh()
    now = log.segments.get(segment.base_offset)
    return now is not None and now.id == segment.id


def _rolling(segments: list[SegmentInfo], now: Tail) -> bool:
    """Whether a roll named the last segment and did not get there yet; its process may be dead.

    The file is perhaps not created, and holds nothing: the next append goes on there.
    """
    if len(segments) < 2 or segments[-1].id == now.segment_id:
        return False
    old, new = segments[-2:]
    # More than the tail's, if it leaves a gap (A8).
    return old.id == now.segment_id and old.next_offset == new.base_offset >= now.log_end_offset


def _verify_order(
    log: PartitionLog, segments: list[SegmentInfo], place: int, now: Tail
) -> Iterator[Finding]:
    segment, path = segments[place], log.path_of(segments[place])
    last = place == len(segments) - 1
    if segment.sealed is last:
        yield _finding(log, path, 0, "only the last segment of a partition is active")
    if not last and segment.next_offset is not None:
        following = segments[place + 1].base_offset
        if segment.next_offset != following:
            what = f"ends at offset {segment.next_offset}, the next begins at {following}"
            yield _finding(log, path, 0, what)
    if last and segment.id != now.segment_id and not _rolling(segments, now):
        yield _finding(log, path, 0, f"the tail is in segment {now.segment_id}")


def _verify_segment(
    log: PartitionLog, segment: SegmentInfo, view: PartitionSnapshot
) -> Iterator[Finding | int]:
    path, now = log.path_of(segment), view.tail
    if not segment.sealed and now.empty and not log.context.files.exists(path):
        return  # named and not needed yet: the first append makes it
    file = log.open_segment(segment)
    size = file.size()
    # Also what is written and waits for its flush: the index knows it already.
    stop = segment.end_position if segment.sealed else now.log_end_position
    if size < stop:
        yield _finding(log, path, size, f"the file is cut short: {stop} bytes were written")
        return
    if segment.sealed and size != segment.size:
        yield _finding(log, path, size, f"the file was sealed with {segment.size} bytes")
    if segment.sealed and file.bytes(stop, len(END_MARK)) != END_MARK:
        yield _finding(log, path, stop, "the end mark is missing")
    found = lookup.entries(log, segment) if segment.sealed else view.entries
    entries = {entry.position: entry for entry in found}
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
    latest: int | None = None
    position = file.start
    for one in file.scan(position, stop):
        one.verify()
        position = one.position + one.size
        if one.base_offset < expected:
            what = f"offset {one.base_offset} follows offset {expected - 1}"
            yield _finding(log, path, one.position, what)
        for what in gaps(segment, one, expected):
            yield _finding(log, path, one.position, what)
        entry = entries.pop(one.position, None)
        if entry is not None and (entry.offset, entry.timestamp_before) != (
            one.base_offset,
            latest,
        ):
            yield _finding(log, path, one.position, f"the index is wrong here: {entry}")
        expected = one.next_offset
        latest = one.max_timestamp if latest is None else max(latest, one.max_timestamp)
        yield one.size
    if segment.dense and segment.sealed and expected != segment.next_offset:
        what = f"ends at offset {expected}, the manifest says {segment.next_offset}, without gaps"
        yield _finding(log, path, position, what)
    if segment.next_offset is not None and expected > segment.next_offset:
        what = f"holds offset {expected - 1}, the manifest says {segment.next_offset}"
        yield _finding(log, path, position, what)
    if segment.sealed and latest != segment.max_timestamp:
        what = f"its largest timestamp is {latest}, the manifest says {segment.max_timestamp}"
        yield _finding(log, path, 0, what)


def gaps(segment: SegmentInfo, batch: Batch, expected: int) -> list[str]:
    """Return what is wrong about the offsets of a batch in a segment that is to have no gaps."""
    if not segment.dense:
        return []
    found = []
    if batch.base_offset > expected:
        found.append(f"offsets {expected} to {batch.base_offset - 1} are missing")
    if batch.count != batch.next_offset - batch.base_offset:
        found.append(f"{batch.count} records have the offsets from {batch.base_offset} on")
    return [f"{what}; the manifest says that it has no gaps" for what in found]


def _strays(root: Root) -> Iterator[Finding]:
    try:
        found = unnamed(root.context)
    except EmbedlogError as error:
        yield Finding("", 0, error.path or root.path, 0, str(error))
        return
    for path in found:
        yield Finding("", 0, path, 0, "the manifest does not name it")


def unnamed(context: Context) -> list[str]:
    """Return the files that nothing names, but for those that retention is about to unlink."""
    # Before the look, and after it: they may be unlinked, or become doomed, while it goes on.
    leaving = pending_deletes.doomed(context.live)
    found = startup.strays(context.files, context.state, leaving)
    leaving = pending_deletes.doomed(context.live) if found else set()
    return [path for path in found if path not in leaving and context.files.exists(path)]


def _finding(log: PartitionLog, path: str, position: int, what: str) -> Finding:
    return Finding(log.topic, log.partition, path, position, what)


def rebuild_index(root: Root, topic: str | None = None) -> int:
    """Make the index of a topic, or of all, from its segments (A28, B5).

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
        now = tail_locked(log)
        count = 0
        for segment in log.segments.values():
            if now.has_made(segment):
                count += rebuild_segment(log, segment, segment.end_position or now.log_end_position)
        return count
    finally:
        log.release()


def rebuild_segment(log: PartitionLog, segment: SegmentInfo, stop: int) -> int:
    """Make the index of one segment; under the partition's lock."""
    found = index_of(log, segment, stop)
    _store(log, segment, found)
    return len(found)


def index_is_wrong(log: PartitionLog, segment: SegmentInfo) -> bool:
    """Whether a sealed segment, itself whole, has an index that could mislead a read.

    Missing entries only make it slower (B5); that of the active one is made anew
    with every recovery.
    """
    if not segment.sealed:
        return False
    try:
        entries = lookup.entries(log, segment)
        file = log.open_segment(segment)
        latest, right = -(1 << 63), set()
        for one in file.scan(file.start, segment.end_position):
            right.add((one.base_offset, one.position, latest))
            latest = max(latest, one.max_timestamp)
    except EmbedlogError:
        return True
    return not right.issuperset(entries)


def index_of(log: PartitionLog, segment: SegmentInfo, stop: int) -> list[IndexEntry]:
    """Return the entries that appending the segment's batches would have made (B1)."""
    file = log.open_segment(segment)
    found: list[IndexEntry] = []
    unindexed, latest = 0, -(1 << 63)
    for one in file.scan(file.start, stop):
        if unindexed > log.config.index_interval_bytes:
            found.append(IndexEntry(one.base_offset, one.position, latest))
            unindexed = 0
        unindexed += one.size
        latest = max(latest, one.max_timestamp)
    return found


def _store(log: PartitionLog, segment: SegmentInfo, found: list[IndexEntry]) -> None:
    key = log.key
    if segment.sealed:
        blob = index.pack(found)
        log.context.state.write(lambda txn: catalog.put_index_blob(txn, key, segment, blob))
        return

    def step(txn: object) -> None:
        index.remove(txn, key)
        for entry in found:
            index.put(txn, key, segment.id, entry)

    log.context.live.write(step)
