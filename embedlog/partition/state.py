"""What the operations share: of an open log, its `Context`; of one partition, its `PartitionState`.

Append, roll, flush, recovery and the others are functions over a `PartitionState`, in
files named after what they do.  `PartitionLog` adds the public methods.

Lock order: the lock of the log (`log_lock`), thread lock, then the partition's `flock`, then
`state` or `live`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, Protocol, TypeVar, get_args

from sortedcontainers import SortedDict

from embedlog import batch as batches
from embedlog import catalog, kv
from embedlog.catalog import Catalog, PartitionInfo, SegmentInfo, TopicInfo
from embedlog.config import INT_MAX, LONG_MAX, TopicConfig
from embedlog.errors import (
    ClosedError,
    DurabilityError,
    EmbedlogError,
    LockTimeoutError,
    ReadOnlyError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.files import Files, WakePage
from embedlog.files.reserve import Reserve
from embedlog.hints import REPAIR
from embedlog.partition import producer_state
from embedlog.partition.bounded_clock import last_reading
from embedlog.partition.log_lock import LogLock
from embedlog.partition.open_files import OpenFiles
from embedlog.partition.producer_state import ProducerState
from embedlog.partition.tail import TAILS, CachedTail, Tail
from embedlog.schemas.segment_schema import segment_schema
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.segment import SegmentFile, path_of

_logger = logging.getLogger("embedlog.partition")
T = TypeVar("T")

Durability = Literal["os", "fsync"]
Visibility = Literal["append", "durable"]
DURABILITIES, VISIBILITIES = get_args(Durability), get_args(Visibility)


@dataclass(slots=True)
class Context:
    """The files, the databases and the options of one open log; `Root` creates it."""

    files: Files
    state: kv.Store
    live: kv.Store
    catalog: Catalog
    wake: WakePage
    log_lock: LogLock
    reserve: Reserve
    open_files: OpenFiles
    clock: Callable[[], int]
    durability: str
    visibility: str
    lock_timeout: float
    root: str
    closed: bool = False
    """Set before the files and databases are closed: no operation may begin any more."""

    def check_writable(self) -> None:
        """Raise unless the log may be changed."""
        if not self.files.writable:
            raise ReadOnlyError("The log was opened with mode='r'", path=self.root)

    def check_appendable(self) -> None:
        """Raise unless records may be added: the log is writable, and the disk is not full."""
        self.check_writable()
        if self.reserve.short:
            self.reserve.check()

    def bounded_ms(self) -> int:
        """Return the time for decisions that forget something (`bounded_clock`).

        It is the clock of the log as it is, if no process does housekeeping: a clock that a
        program passed is trusted.
        """
        wall_ms, reading = self.clock(), last_reading(self.live)
        return wall_ms if reading is None else reading.bound(wall_ms, self.files.uptime_ms())


@dataclass(slots=True)
class AppendRules:
    """The settings that every append reads: those of the topic and of its active segment.

    Not a named tuple, whose fields take three times as long to read.
    """

    max_segment_ms: int
    """How far the timestamps of the active segment may lie apart before it is rolled."""
    fast_max_bytes: int
    """The largest batch that `append_fast` may write; -1 if the topic requires more of a batch."""
    checks_timestamps: bool
    requires_keys: bool
    uses_append_time: bool
    overdue_age_ms: int | None
    """The age from which on a record is reported by `validation.warn_if_overdue`, if any is."""
    mirror_source: str = ""
    """The setting ``mirror.source``: if there is one, only the mirror of that topic may append."""


def append_rules(config: TopicConfig, active: SegmentInfo) -> AppendRules:
    """Return the rules for appends to a segment."""
    uses_append_time = config.message_timestamp_type == "LogAppendTime"
    farthest = min(config.message_timestamp_before_max_ms, config.message_timestamp_after_max_ms)
    checks_timestamps = not uses_append_time and farthest < LONG_MAX
    overdue_age_ms = None
    if config.retention_clock == "record" and config.deletes and not uses_append_time:
        overdue_age_ms = config.retention_ms if config.retention_ms >= 0 else None
    fast_max_bytes = min(config.max_message_bytes, config.segment_bytes)
    if (
        uses_append_time
        or checks_timestamps
        or config.compacts
        or active.column_flags
        or active.schema_version
        or config.segment_max_offset_span < INT_MAX
        or has_flush_interval(config)
        or config.mirror_source
    ):
        fast_max_bytes = -1
    return AppendRules(
        max_segment_ms(config, active),
        fast_max_bytes,
        checks_timestamps,
        config.compacts,
        uses_append_time,
        overdue_age_ms,
        config.mirror_source,
    )


def max_segment_ms(config: TopicConfig, segment: SegmentInfo) -> int:
    """Return how far the timestamps of a segment may lie apart before it is rolled."""
    longest = config.segment_ms
    if config.compacts:
        longest = min(longest, config.max_compaction_lag_ms)
    if config.segment_jitter_ms:
        # Fixed for a segment, spread over segments (A16), and always less than `longest` (D6).
        longest -= segment.id * 2654435761 % (min(config.segment_jitter_ms, longest - 1) + 1)
    return longest


def has_flush_interval(config: TopicConfig) -> bool:
    """Whether flush.messages or flush.ms ever requires a flush; by default neither does."""
    return min(config.flush_messages, config.flush_ms) < LONG_MAX


class PartitionState:
    """The fields that the operations on one partition share, and the primitives on them.

    One per partition and log handle, used by any thread.  A forked child makes a new one.
    """

    def __init__(self, context: Context, topic: TopicInfo, partition: int) -> None:
        self.context, self.topic, self.partition = context, topic.name, partition
        self.topic_id, self.directory = topic.id, topic.directory
        self.key = topic.key(partition)
        self.tail_key = TAILS.key(self.key)

        self.thread_lock = threading.Lock()
        self.flush_lock = threading.Lock()
        self._lock_path = topic.lock_path(partition)
        self._lock_fd: int | None = None

        # A snapshot of the manifest and the settings, replaced as a whole when the
        # catalogue's version changes.  Only the last line of the manifest is read until
        # `segments` is used: a lookup costs the same with four segments and with 4,000.
        self._snapshot_lock = threading.Lock()
        self.snapshot_version = -1
        self.config: TopicConfig = topic.config
        self.schema: TopicSchema | None = None
        """The current version of the schema of a typed topic; None if values are bytes."""
        self.rules: AppendRules
        self.active_segment: SegmentInfo
        self._segments: SortedDict[int, SegmentInfo] | None = None

        self.cached_tail: CachedTail | None = None
        self.cached_preview: tuple[tuple[int, int], Tail] | None = None
        """For a handle that may not write: the tail that recovery would write, and when it was
        computed, by the version of the catalogue and the time of the last publication."""
        self.open_segment_file: tuple[int, SegmentFile] | None = None
        """The id and the file of the active segment, while it is open."""

        self.check_linked_at = 0.0
        """When to check next that the active segment was not deleted, on the monotonic clock."""
        self.journal_checked_version = -1
        """The last snapshot for which the journal had no unfinished publication."""
        self.entry_synced_segment_id: int | None = None
        """The newest segment whose directory entry this handle has flushed."""
        self.dirty = False
        """Whether this handle appended something since its last flush."""

    @property
    def where(self) -> dict[str, Any]:
        """The topic and the partition, as errors name them."""
        return {"topic": self.topic, "partition": self.partition}

    @property
    def directories(self) -> tuple[str, str, str]:
        """The partition's directory and those above it, which a new file must be flushed with."""
        return f"{self.directory}/{self.partition}", self.directory, "topics"

    # The right to append

    def acquire(self, timeout: float | None = None, *, escalated: bool = False) -> None:
        """Take the partition's lock, which excludes every other process and thread.

        Waits ``timeout`` seconds, or the ``lock_timeout`` of the log.  With ``escalated`` the
        caller holds the lock of the log exclusively.

        Raises:
            LockTimeoutError: Another process or thread holds it.
            ClosedError: The log was closed.
        """
        if timeout is None:
            timeout = self.context.lock_timeout
        if not self.thread_lock.acquire(False) and not self.thread_lock.acquire(timeout=timeout):
            raise LockTimeoutError("Another thread holds the partition", path=self._lock_path)
        try:
            if self._lock_fd is None:
                if self.context.closed:
                    raise ClosedError("The log was closed", path=self.context.root)
                self._lock_fd = self.context.files.open(self._lock_path, write=True, create=True)
                self.context.open_files.opened(self)
            if self.context.files.lock(self._lock_fd, timeout):
                _logger.debug("%s-%d: waited for the lock of a process", self.topic, self.partition)
            log_lock = self.context.log_lock
            if (
                self.context.state.is_current(log_lock.free_version)
                or escalated
                or log_lock.is_free()
            ):
                return
        except BaseException:
            self.thread_lock.release()
            raise
        PartitionState.release(self)
        with log_lock.shared(timeout):
            pass
        PartitionState.acquire(self, timeout)

    def release(self) -> None:
        """Release the partition's lock."""
        if self._lock_fd is not None:
            self.context.files.unlock(self._lock_fd)
        self.thread_lock.release()

    @contextmanager
    def locked(self, timeout: float | None = None) -> Iterator[None]:
        """Hold the partition's lock; see `acquire`."""
        self.acquire(timeout)
        try:
            yield
        finally:
            self.release()

    def check_replicas(self) -> None:
        """Raise if too few copies are in sync for an append; a log in one directory has one."""

    # The snapshot of the manifest and the settings

    def refresh(self) -> None:
        """Take a new snapshot of the manifest and the settings if anything changed.

        Raises:
            UnknownTopicOrPartitionError: The topic was deleted, or re-created.
        """
        if self.context.catalog.version() != self.snapshot_version:
            # One thread at a time: an older snapshot must not replace a newer one, because
            # appends take the active segment from it.
            with self._snapshot_lock:
                self._refresh_locked(self.context.catalog.version())

    def _refresh_locked(self, version: int, whole: bool = False) -> None:
        topic = self.context.catalog.topic(self.topic)
        if topic.id != self.topic_id:
            raise UnknownTopicOrPartitionError(
                "The topic was deleted and created again",
                **self.where,
                todo="Open it again; its offsets begin at 0.",
            )
        read = self.context.state.read
        if whole:
            segments = read(lambda txn: catalog.segments(txn, self.key))
            self.active_segment = self._existing(segments[-1] if segments else None)
            self._segments = SortedDict((segment.base_offset, segment) for segment in segments)
        else:
            active = read(lambda txn: catalog.last_segment(txn, self.key))
            self.active_segment, self._segments = self._existing(active), None
        self.config, self.schema = topic.config, self.context.catalog.schema(topic)
        self.rules = append_rules(topic.config, self.active_segment)
        self.snapshot_version = version

    def _existing(self, segment: SegmentInfo | None) -> SegmentInfo:
        if segment is None:
            raise UnknownTopicOrPartitionError("The topic was just deleted", **self.where)
        return segment

    @property
    def segments(self) -> SortedDict[int, SegmentInfo]:
        """The whole manifest by base offset, read on first use.

        It and `active_segment` are always of one instant: if the manifest changed
        since `refresh`, this takes a new snapshot.
        """
        segments = self._segments
        while segments is None:
            with self._snapshot_lock:
                if self._segments is None:
                    self._refresh_locked(self.context.catalog.version(), whole=True)
                segments = self._segments
        return segments

    def segment_at(self, offset: int) -> SegmentInfo:
        """Return the segment that holds an offset, or the first one if the offset is below it.

        As of the last `refresh`, or later.
        """
        segments, active = self._segments, self.active_segment
        if segments is not None:
            info: SegmentInfo = segments.peekitem(max(segments.bisect_right(offset) - 1, 0))[1]
            return info
        if active.base_offset <= offset:
            return active
        return self._existing(
            self.context.state.read(lambda txn: catalog.segment_at(txn, self.key, offset))
        )

    def segments_between(self, first: int, stop: int) -> list[SegmentInfo]:
        """Return the segments with offsets in ``[first, stop)``, in order.

        As of the last `refresh`, or later.  There may be thousands, so they are read in one
        scan, and no snapshot of the whole manifest is made for them.
        """
        if first >= stop:
            return []
        if self.active_segment.base_offset <= first:
            return [self.active_segment]
        read = self.context.state.read
        segments = read(lambda txn: catalog.segments_between(txn, self.key, first, stop))
        if not segments:
            # All of them begin above the range, or the topic was deleted.
            self._existing(read(lambda txn: catalog.last_segment(txn, self.key)))
        return segments

    def segment_after(self, info: SegmentInfo) -> SegmentInfo | None:
        """Return the segment after another one, as of the last `refresh` or later."""
        segments, base = self._segments, info.base_offset
        if segments is None:
            return self.context.state.read(lambda txn: catalog.segment_after(txn, self.key, base))
        index = segments.bisect_right(base)
        return None if index == len(segments) else segments.peekitem(index)[1]

    # The tail

    def read_tail(self) -> Tail | None:
        """Return the tail, from memory if nothing was committed since; None if there is no row."""
        live = self.context.live
        cached = self.cached_tail
        if cached is not None and live.is_current(cached.version):
            return cached.tail
        row, version = live.get_at(self.tail_key)
        if cached is not None and cached.version == version:
            return cached.tail
        if row is None:
            return None
        tail = TAILS.unpack(row)
        self.cached_tail = CachedTail(version, row, tail, {})
        return tail

    def visible_end(self, tail: Tail) -> int:
        """Return how far readers of this handle may read, by its ``visibility``."""
        if self.context.visibility == "durable":
            return min(tail.durable_offset, tail.high_watermark)
        return tail.high_watermark

    # Producers

    def oldest_producer_ms(self) -> int:
        """Return when a producer must have appended, or been fenced, to be remembered."""
        return self.context.bounded_ms() - self.config.producer_id_expiration_ms + 1

    def remembered_producers(self) -> dict[int, ProducerState]:
        """Return the partition's producer states, without those idle too long."""
        oldest = self.oldest_producer_ms()
        return self.context.live.read(
            lambda txn: producer_state.active_since(txn, self.key, oldest)
        )

    # Files

    def active_file(self) -> SegmentFile:
        """Return the active segment's file, open for writing unless the log is read-only."""
        active = self.active_segment
        file = self.open_active(active.id)
        if file is None:
            file = self.open_segment(active, write=self.context.files.writable)
            self.open_segment_file = active.id, file
            self.context.open_files.opened(self)
        return file

    def open_active(self, segment_id: int) -> SegmentFile | None:
        """Return the active segment's file if it is open and has this id."""
        opened = self.open_segment_file
        return opened[1] if opened is not None and opened[0] == segment_id else None

    def open_shared(self, info: SegmentInfo) -> SegmentFile:
        """Return a segment's file for reading: the one that appends use, if it is open."""
        active = None if info.sealed else self.open_active(info.id)
        return active or self.open_segment(info)

    def open_segment(
        self,
        info: SegmentInfo,
        *,
        write: bool = False,
        files: Files | None = None,
        mend: bool = True,
    ) -> SegmentFile:
        """Open one of the partition's segment files.

        Args:
            info: The segment.
            write: Whether to write to it.
            files: Where, if the partition has several copies, and it is to be read there only.
            mend: Whether what is found to be damaged is replaced by what another copy has.
        """
        expected = partial(self._expected_schemas, info)
        reread = partial(self.reread, info) if mend and files is None else None
        files = self.context.files if files is None else files
        return SegmentFile(files, self.path_of(info), write=write, expected=expected, reread=reread)

    def mend(self, segments: Collection[SegmentInfo] | None = None) -> bool:
        """Write again what this copy of segments has damaged, from other copies.

        Returns whether there are other copies; a log in one directory has none.

        Args:
            segments: The segments; None for those that a recovery is about to read.
        """
        return False

    def reread(self, info: SegmentInfo, position: int, size: int) -> bytes | None:
        """Return bytes of a segment in which something is damaged, after `mend`.

        None if there is no other copy.
        """
        try:
            if not self.context.closed and self.mend([info]):
                with self.context.files.opened(self.path_of(info)) as fd:
                    return self.context.files.read(fd, size, position)
        except EmbedlogError as error:
            _logger.warning("%s-%d: damage stays: %s", self.topic, self.partition, error)
        return None

    def schema_of(
        self,
        info: SegmentInfo,
        offsets: bool = False,
        metadata: Mapping[bytes, bytes] | None = None,
    ) -> Any:
        """Return the Arrow schema of a segment's batches.

        Args:
            info: The segment.
            offsets: Whether it is compacted, so that its last column has the offsets.
            metadata: What the file says about itself.
        """
        schema = self.schema
        if schema is None or schema.version != info.schema_version:
            topic = self.context.catalog.topic(self.topic)
            schema = self.context.catalog.schema(topic, info.schema_version)
        if schema is None:
            return batches.schema(headers=info.headers, offsets=offsets, metadata=metadata)
        return segment_schema(
            schema,
            headers=info.headers,
            tombstones=info.tombstones,
            offsets=offsets,
            metadata=metadata,
        )

    def _expected_schemas(self, info: SegmentInfo) -> tuple[Any, ...]:
        """Return the schemas, without metadata, that a segment file may have."""
        if not info.schema_version:
            return _columns(info.headers)
        return tuple(self.schema_of(info, offsets) for offsets in (False, True))

    def path_of(self, info: SegmentInfo) -> str:
        """Return the path of a segment, relative to the root."""
        return path_of(self.directory, self.partition, info.file_name)

    def close(self) -> None:
        """Close the lock file and the active segment; readers keep the files they have open.

        Waits for an append of another thread, whose lock must not be closed during it.
        """
        if not self.release_files(self.context.lock_timeout):
            self.close_files_locked()

    def release_files(self, timeout: float = 0) -> bool:
        """Close the files for now, unless an operation holds the partition's lock."""
        if not self.thread_lock.acquire(timeout=timeout):
            return False
        try:
            self.close_files_locked()
        finally:
            self.thread_lock.release()
        return True

    def close_files_locked(self) -> None:
        """Close the files; the caller must hold the thread lock.

        This frees the partition's lock, so if that is held, the caller must hold the lock of the
        log exclusively.
        """
        self.open_segment_file = None
        fd, self._lock_fd = self._lock_fd, None
        if fd is not None:
            self.context.files.close(fd)

    # Writing

    def commit_locked(
        self,
        file: SegmentFile,
        buffers: list[Any],
        position: int,
        log_end_offset: int,
        publish: kv.Step[T],
    ) -> T:
        """Write bytes that end at an offset, and publish them; after a failure truncate them."""
        try:
            file.write(buffers, position)
            return self.context.live.write(publish)
        except BaseException:
            # A dead disk may refuse even this: then the next writer truncates it.
            with suppress(EmbedlogError):
                # An interrupt can come after the commit: what is published stays.
                tail = TAILS.get(self.context.live, self.key)
                if tail is None or tail.log_end_offset < log_end_offset:
                    self.cut(file, position)
            raise

    def cut(self, file: SegmentFile, position: int) -> None:
        """Truncate a file, and flush that.

        Otherwise a power cut could bring back what was truncated, behind what is written next.

        Raises:
            DurabilityError: As `sync`.
        """
        file.truncate(position)
        self.sync(file)

    def sync(self, file: SegmentFile) -> None:
        """Flush one file.

        Raises:
            DurabilityError: It failed; the partition is read-only from now on.
        """
        try:
            file.sync()
        except DurabilityError as error:
            raise self.mark_flush_failed(error) from error

    def sync_directory(self, path: str) -> None:
        """Flush the names in a directory.

        Raises:
            DurabilityError: It failed; the partition is read-only from now on, since the
                kernel reports the failure only once, and other names may be lost too.
            StorageError: The directory could not be opened, so nothing is lost.
        """
        try:
            self.context.files.sync_directory(path)
        except DurabilityError as error:
            raise self.mark_flush_failed(error) from error

    def mark_flush_failed(self, error: StorageError) -> DurabilityError:
        """Make the partition read-only for every process, and return the error to raise."""

        def step(txn: kv.Txn) -> None:
            tail = TAILS.get(txn, self.key)
            if tail is not None:
                TAILS.put(txn, self.key, value=tail._replace(failed=True))

        self.context.live.write(step)
        return self.flush_failed(error.errno)

    def has_same_leader(self, tail: Tail) -> bool:
        """Return whether the log still has the leader that it had when a tail was read.

        A leader that was just elected takes over first.  A log with one copy has no other one.
        """
        return True

    def flush_failed(self, errno: int | None = None) -> DurabilityError:
        """Return the error of a partition that a failed flush made read-only."""
        return DurabilityError(
            "A flush failed; what was written since the last good one may be lost",
            **self.where,
            errno=errno,
            todo="Check the disk." + REPAIR,
        )


# Flushing the files of one partition, and noting in `state` how far that has come


def sync_files(log: PartitionState, tail: Tail, file: SegmentFile) -> None:
    """Flush the older segments that were not flushed yet, the active one, and their names.

    Raises:
        DurabilityError: A flush failed; the partition is read-only from now on.
    """
    sync_data(log, tail, file)
    if log.entry_synced_segment_id != tail.segment_id:
        sync_entries(log, tail.segment_id)


def sync_data(log: PartitionState, tail: Tail, file: SegmentFile) -> None:
    """Flush the segments, as `sync_files` does, but not their names."""
    if tail.durable_offset < tail.base_offset:
        for info in list(log.segments.values()):
            if info.sealed and tail.durable_offset < info.next_offset <= tail.base_offset:
                _sync_sealed(log, info)
    log.sync(file)


def _sync_sealed(log: PartitionState, info: SegmentInfo) -> None:
    try:
        file = log.open_segment(info, write=True)
    except StorageError as error:
        log.refresh()
        current = log.segments.get(info.base_offset)
        if not error.missing or (current is not None and current.id == info.id):
            raise
        return  # Compacted meanwhile, which flushes first.
    log.sync(file)


def sync_entries(log: PartitionState, segment_id: int) -> None:
    """Flush the names of new files: without it a power cut loses the whole file.

    Raises:
        DurabilityError: A flush failed; the partition is read-only from now on.
        StorageError: A directory could not be opened, so nothing was tried and nothing is lost.
    """
    for directory in log.directories:
        log.sync_directory(directory)
    log.entry_synced_segment_id = segment_id


def put_recovery_point(
    txn: kv.Txn, key: bytes, flushed: Tail, producers: dict[int, ProducerState]
) -> None:
    """Note in `state` that everything below the end of a tail is on the disk.

    The recovery point only moves forward.
    """
    info, offset = catalog.PARTITIONS.get(txn, key) or PartitionInfo(), flushed.log_end_offset
    if offset > info.recovery_offset:
        changed = info._replace(
            recovery_offset=offset, appended_ms=flushed.appended_ms, appended_offset=offset
        )
        catalog.PARTITIONS.put(txn, key, value=changed)
        producer_state.SNAPSHOTS.put(txn, key, value=producers)


class Partitions(Protocol):
    """Gives the partitions of an open log to the packages below it; `root.root.Root` does."""

    @property
    def context(self) -> Context:
        """What the partitions share; another one in a forked child."""

    def partition(self, topic: str, number: int) -> PartitionState:
        """Return one partition.

        Raises:
            UnknownTopicOrPartitionError: There is no such partition.
        """


@cache
def _columns(headers: bool) -> tuple[Any, ...]:
    """Return the schemas, without metadata, that a segment file may have."""
    return tuple(batches.schema(headers=headers, offsets=offsets) for offsets in (False, True))
