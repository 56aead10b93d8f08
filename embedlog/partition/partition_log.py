"""The log of one partition: its state, and the methods that all other packages call.

Lock order: the lock of the log (`LogLock`), thread lock, then the partition's `flock`, then
`state` or `live`.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from embedlog import batch as batches
from embedlog import catalog, kv
from embedlog.batch import EncodedBatch
from embedlog.batch.wire import BufferLayout, bytes_layout, layout_of
from embedlog.catalog import SegmentInfo, TopicInfo
from embedlog.config import TopicConfig
from embedlog.errors import (
    ClosedError,
    CorruptionError,
    DurabilityError,
    EmbedlogError,
    LockTimeoutError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.files import Files
from embedlog.files.files import LINK_CHECK_SECONDS
from embedlog.forks import cached_property
from embedlog.hints import REPAIR
from embedlog.lazy import logging
from embedlog.partition import (
    append,
    flush,
    journal,
    leader_epochs,
    lookup,
    producer_state,
    recovery,
    roll,
)
from embedlog.partition import checkpoint as checkpoints
from embedlog.partition.lookup import RecordCounts
from embedlog.partition.producer_state import ProducerState
from embedlog.partition.reader import PartitionReader
from embedlog.partition.state import AppendRules, Context
from embedlog.partition.tail import TAILS, CachedTail, Tail, peek_tail
from embedlog.record import Appended, OffsetAndTimestamp
from embedlog.segment import SegmentFile, path_of

if TYPE_CHECKING:
    from sortedcontainers import SortedDict

    from embedlog.partition.append_condition import AppendCondition
    from embedlog.partition.key_index import KeyIndex
    from embedlog.schemas.topic_schema import TopicSchema

_logger = logging.getLogger("embedlog.partition")
T = TypeVar("T")

UNDISPUTED = 8
"""After so many appends of one thread, with none of others in between, it is alone."""
ONLY_DIRECTORY = 1
"""The id of the directory of a log in one directory, which it keeps if it gets others."""


class ReplicaPlacement(NamedTuple):
    """Where the copies of a partition are, by the ids of directories."""

    leader: int | None
    """The one that is read; None while no copy can be."""
    replicas: tuple[int, ...]
    """The preferred leader first."""
    isr: tuple[int, ...]
    """Those that are in sync."""


class Locked:
    """Holds the lock of a partition in a ``with`` statement; see `PartitionLog.locked`."""

    __slots__ = ("_log", "_timeout")

    def __init__(self, log: PartitionLog, timeout: float | None) -> None:
        self._log, self._timeout = log, timeout

    def __enter__(self) -> None:
        self._log.acquire(self._timeout)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._log.release()
            return
        try:
            self._log.check_leader(error)
        finally:
            self._log.release()


class Owned(Locked):
    """Holds the lock of a partition, and yields its tail; see `PartitionLog.owned`."""

    __slots__ = ()

    def __enter__(self) -> Tail:  # type: ignore[override]
        log = self._log
        log.acquire(self._timeout)
        try:
            context, cached, version = log.context, log.cached_tail, log.snapshot_version
            # Nothing changed since this handle's last append, which is what appends usually find.
            if (
                cached is not None
                and context.live.is_current(cached.version)
                and context.state.is_current(version)
                # A read may have taken the snapshot, without a look at what a killed process left.
                and log._journal_checked_version == version
                and cached.tail.segment_id == log.active_segment.id
                and not log.has_rollback_point
            ):
                return cached.tail
            return log.finish_locked()
        except BaseException as error:
            self.__exit__(None, error, None)
            raise


class PartitionLog:
    """The log of one partition, shared with every process that has the root open.

    One per partition and open log.  Any thread may call any method.  A forked child makes a new
    one.  The operations are functions over it, in files named after what they do; they read its
    fields, and change them by its methods only.

    There are three ways to read where it ends:

    - `peek_tail`, in a transaction: the row as it is, or None.  No recovery, no lock.
    - `tail`: recovers the partition first if no process has done so.
    - `owned`, a context manager: takes the lock, and finishes what a killed process left.  The
      tail stays the same until the holder moves it.
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
        self._appender = 0, -1, 0
        """The thread that made the last append with a flush, where that ended, and how many it
        made in succession before."""
        self._owned = Owned(self, None)

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
        """The tail as it was last read or published here, and the version of `live` then."""
        self._preview: tuple[tuple[int, int], Tail] | None = None
        """For a handle that may not write: the tail that recovery would write, and when it was
        computed, by the version of the catalogue and the time of the last publication."""
        self._open_segment_file: tuple[int, SegmentFile] | None = None
        """The id and the file of the active segment, while it is open."""

        self._check_linked_at = 0.0
        """When to check next that the active segment was not deleted, on the monotonic clock."""
        self._journal_checked_version = -1
        """The last snapshot for which the journal had no unfinished publication."""
        self.has_rollback_point = False
        """Whether transactions were written here since the last checkpoint, as of then."""
        self.named_segment_id: int | None = None
        """The newest segment whose directory entry this handle has flushed."""
        self.preallocated = 0
        """How many bytes the active segment had behind the log end, when `file_at` looked."""
        self.dirty = False
        """Whether this handle appended something since its last flush."""

    @property
    def where(self) -> dict[str, Any]:
        """The topic and the partition, as errors name them."""
        return {"topic": self.topic, "partition": self.partition}

    @property
    def directories(self) -> tuple[str, ...]:
        """The partition's directory and those above it, which a new file must be flushed with.

        Also the root: after a power cut an open may have made ``topics`` again.
        """
        return f"{self.directory}/{self.partition}", self.directory, "topics", ""

    # The right to append

    def acquire(self, timeout: float | None = None, *, escalated: bool = False) -> None:
        """Take the partition's lock, which excludes every other process and thread.

        Waits ``timeout`` seconds, or the ``lock_timeout`` of the log.  With ``escalated`` the
        caller holds the lock of the log exclusively.

        Raises:
            LockTimeoutError: Another process or thread holds it.
            ClosedError: The log was closed.
        """
        context = self.context
        if timeout is None:
            timeout = context.lock_timeout
        if not self.thread_lock.acquire(False) and not self.thread_lock.acquire(timeout=timeout):
            raise LockTimeoutError("Another thread holds the partition", path=self._lock_path)
        try:
            if self._lock_fd is None:
                if context.closed:
                    raise ClosedError("The log was closed", path=context.root)
                self._lock_fd = context.files.open(self._lock_path, write=True, create=True)
                context.open_files.opened(self)
            if context.files.lock(self._lock_fd, timeout):
                _logger.debug("%s-%d: waited for the lock of a process", self.topic, self.partition)
            log_lock = context.log_lock
            if context.state.is_current(log_lock.free_version) or escalated or log_lock.is_free():
                return
        except BaseException:
            self.thread_lock.release()
            raise
        PartitionLog.release(self)
        with log_lock.shared(timeout):
            pass
        PartitionLog.acquire(self, timeout)

    def release(self) -> None:
        """Release the partition's lock."""
        if self._lock_fd is not None:
            self.context.files.unlock(self._lock_fd)
        self.thread_lock.release()

    def locked(self, timeout: float | None = None) -> Locked:
        """Hold the partition's lock, for what needs no tail; see `acquire`."""
        return Locked(self, timeout)

    def owned(self, timeout: float | None = None) -> Owned:
        """Hold the partition's lock, and finish what a killed process left; see `acquire`.

        That is a publication that was prepared or committed, a roll, or a recovery.

        Returns:
            A context manager, which yields the tail.
        """
        return self._owned if timeout is None else Owned(self, timeout)

    def check_leader(self, error: BaseException) -> None:
        """Raise another error if an operation failed because the leader changed meanwhile.

        A log with one copy has no other leader.
        """

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
            from sortedcontainers import SortedDict

            segments = read(lambda txn: catalog.segments(txn, self.key))
            self.active_segment = self._existing(segments[-1] if segments else None)
            self._segments = SortedDict((segment.base_offset, segment) for segment in segments)
        else:
            active = read(lambda txn: catalog.last_segment(txn, self.key))
            self.active_segment, self._segments = self._existing(active), None
        self.config, self.schema = topic.config, self.context.catalog.schema(topic)
        self.rules = AppendRules(topic.config, self.active_segment)
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

    def tail(self) -> Tail:
        """Return where the partition ends; recovers it first if no process has done so.

        From memory if nothing was committed since.
        """
        cached = self.cached_tail
        if cached is not None and self.context.live.is_current(cached.version):
            return cached.tail
        tail = self._read_tail()
        if tail is None:
            if not self.context.files.writable:
                return self._tail_of_preview()
            with self.owned() as tail:
                pass
        return tail

    def _read_tail(self) -> Tail | None:
        cached = self.cached_tail
        row, version = self.context.live.get_at(self.tail_key)
        if cached is not None and cached.version == version:
            return cached.tail
        if row is None:
            return None
        tail = TAILS.unpack(row)
        self.cached_tail = CachedTail(version, row, tail, {})
        return tail

    def _tail_of_preview(self) -> Tail:
        version = self.context.catalog.version(), self.context.wake.published()
        if self._preview is None or self._preview[0] != version:
            self._preview = version, recovery.preview(self)
        return self._preview[1]

    def finish_locked(self, *, checkpoint: bool = True) -> Tail:
        """Return the tail, once what a killed process left is finished; under the lock.

        Args:
            checkpoint: Whether to flush transactions, so that what is appended or truncated next
                does not depend on them.  A transaction itself may follow others.
        """
        tail = self._finish_locked()
        if self.has_rollback_point and checkpoint and not tail.failed:
            checkpoints.take(self.context, self)
            return self.finish_locked()
        return tail

    def _finish_locked(self) -> Tail:
        context = self.context
        # Bytes are truncated by what is read here.  A commit of a killed process that becomes
        # visible later would then point at bytes that were truncated.
        context.state.catch_up()
        context.live.catch_up()
        self.refresh()
        changed = self._journal_checked_version != self.snapshot_version
        if changed:
            version = self.snapshot_version
            journal.finish_or_undo(self)
            self.has_rollback_point = checkpoints.ROLLBACK_POINTS.exists(context.state, self.key)
            self._journal_checked_version = version
        tail = self._read_tail()
        if tail is None:
            return recovery.rebuild(self)
        if changed and not tail.failed:
            tail = leader_epochs.finish(self, tail)
        active = self.active_segment
        if tail.segment_id == active.id or tail.failed:
            return tail
        sealed, end = self.segments.get(tail.base_offset), (tail.segment_id, tail.log_end_offset)
        if sealed is not None and (sealed.id, sealed.next_offset) == end:
            _logger.debug("%s-%d: finishing a roll of a killed process", self.topic, self.partition)
            return roll.start_segment(self, tail, active)
        return recovery.rebuild(self)

    def resolve_publication(self) -> None:
        """Finish or undo a publication in which this process has just failed; under the lock."""
        self._journal_checked_version = -1
        self.finish_locked()

    def note_rollback_point(self, exists: bool) -> None:
        """Note whether the partition has a rollback point, which was just written or deleted."""
        self.has_rollback_point = exists

    def note_published(self, tail: CachedTail) -> None:
        """Note the tail with which this handle has just published batches."""
        self.cached_tail = tail
        self.dirty = True

    def forget_copy(self) -> None:
        """Read tail, manifest and active segment again: another copy is read from now on."""
        self.cached_tail = self._open_segment_file = None
        self.snapshot_version = -1

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
            self.opened_active(active, file)
            self.context.open_files.opened(self)
        return file

    def opened_active(self, active: SegmentInfo, file: SegmentFile) -> None:
        """Note which file the active segment has, which was just opened or created."""
        self._open_segment_file = active.id, file

    def file_at(self, tail: Tail) -> SegmentFile:
        """Return the active segment's file to append to, under the lock.

        What a killed writer left behind the tail is truncated.  It begins at the tail and with a
        marker, since bytes are written in order; preallocated space is zeros.

        Raises:
            DurabilityError: A flush failed before.
            CorruptionError: The file is shorter than what was written.
            LogDeletedError: The file was deleted.
        """
        if tail.failed:
            raise self.flush_failed()
        opened = self._open_segment_file
        if opened is not None and opened[0] == tail.segment_id:
            file = opened[1]
        else:
            file = self.active_file()
        # Under the partition's lock only another program deletes the active segment.
        if (now := monotonic()) >= self._check_linked_at:
            file.check_linked()
            self._check_linked_at = now + LINK_CHECK_SECONDS
        size, end = file.size(), tail.log_end_position
        if size > end and not (self.context.files.preallocates and file.is_blank(end)):
            self.cut(file, end)
            size = end
        elif size < end:
            raise CorruptionError(
                f"The file ends at byte {size}, {end} were written",
                **self.where,
                path=file.path,
                position=size,
                todo=REPAIR,
            )
        self.preallocated = size - end
        return file

    def open_active(self, segment_id: int) -> SegmentFile | None:
        """Return the active segment's file if it is open and has this id."""
        opened = self._open_segment_file
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
        expected = partial(self._expected_layouts, info)
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
        from embedlog.schemas.segment_schema import segment_schema

        return segment_schema(
            schema,
            headers=info.headers,
            tombstones=info.tombstones,
            offsets=offsets,
            metadata=metadata,
        )

    def _expected_layouts(self, info: SegmentInfo) -> tuple[BufferLayout, ...]:
        """Return the layouts that a segment file may have."""
        if not info.schema_version:
            return tuple(bytes_layout(info.headers, offsets) for offsets in (False, True))
        return tuple(layout_of(self.schema_of(info, offsets)) for offsets in (False, True))

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
        self._open_segment_file = None
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
        synced: bool = False,
    ) -> T:
        """Write bytes that end at an offset, and publish them; after a failure truncate them.

        With ``synced`` they are flushed in between; if that fails, they stay until the repair.
        """
        try:
            file.write(buffers, position)
            if synced:
                self.sync(file)
            return self.context.live.write(publish)
        except BaseException as error:
            if synced and isinstance(error, DurabilityError):
                raise
            # A dead disk may refuse even this: then the next writer truncates it.
            with suppress(EmbedlogError):
                # An interrupt can come after the commit: what is published stays.
                tail = peek_tail(self.context.live, self.key)
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

    def note_names_synced(self, segment_id: int) -> None:
        """Note that the directory entries of segments up to this one are on the disk."""
        self.named_segment_id = segment_id

    def is_undisputed(self, end: int, next_end: int) -> bool:
        """Whether this thread made the last `UNDISPUTED` appends, and no process awaits the lock.

        For an append with a flush from ``end`` to ``next_end``, under the lock.
        """
        (thread, last_end, count), this = self._appender, threading.get_ident()
        count = count + 1 if (thread, last_end) == (this, end) else 0
        self._appender, fd = (this, next_end, count), self._lock_fd
        return count >= UNDISPUTED and fd is not None and not self.context.files.is_awaited(fd)

    def mark_dirty(self, dirty: bool = True) -> None:
        """Note that a flush is needed; or that one begins, which covers what was appended."""
        self.dirty = dirty

    def mark_flush_failed(self, error: StorageError) -> DurabilityError:
        """Make the partition read-only for every process, and return the error to raise."""

        def step(txn: kv.Txn) -> None:
            tail = peek_tail(txn, self.key)
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

    @cached_property
    def record_counts(self) -> RecordCounts:
        """Counts the records between two offsets."""
        return RecordCounts(self)

    @cached_property
    def key_index(self) -> KeyIndex:
        """Looks up keys, for a topic that indexes them."""
        from embedlog.partition.key_index import KeyIndex

        return KeyIndex(self)

    @property
    def placement(self) -> ReplicaPlacement:
        """The directories of its copies; a log in one directory has only this one."""
        return ReplicaPlacement(ONLY_DIRECTORY, (ONLY_DIRECTORY,), (ONLY_DIRECTORY,))

    def __repr__(self) -> str:
        return f"<PartitionLog {self.topic}-{self.partition}>"

    # What it holds

    def start_offset(self) -> int:
        """Return the first offset that can be read."""
        self.refresh()
        return self.tail().start_offset

    def end_offset(self) -> int:
        """Return the offset of the next record that will be visible (the high watermark)."""
        self.refresh()
        return self.visible_end(self.tail())

    def size_bytes(self) -> int:
        """Return how many bytes its segment files have."""
        return lookup.size_bytes(self)

    # Writing

    def append(
        self,
        encoded: Sequence[EncodedBatch],
        *,
        durability: str | None = None,
        timeout: float | None = None,
        acks: int | str = "all",
        condition: AppendCondition | None = None,
    ) -> list[Appended]:
        """Write batches at the end, publish them, and return their offsets.

        The batches of one call are written in order, and not mixed with those of other
        threads and processes.  Returns once ``durability`` holds.  If a roll falls between
        two of them, those before it may be published although the call fails later;
        repeating the call with the same sequence numbers returns their offsets.

        Args:
            encoded: The batches.
            durability: ``"os"`` or ``"fsync"``; that of the log by default.
            timeout: Seconds to wait for the partition; ``lock_timeout`` by default.
            acks: Which copies must have them; see `ReplicatedPartition`.
            condition: What must be so at that moment, unless the batches were appended before.

        Raises:
            ConflictError: The condition does not hold.
            RecordTooLargeError: A batch is over ``max.message.bytes``.
            InvalidRecordError: A record has no key and the topic is compacted
                (``indices`` has which), or has a timestamp too far from the clock.
            OutOfOrderSequenceError: The producer skipped sequence numbers, or repeated a part of
                a batch.
            InvalidProducerEpochError: A newer producer with the same name has taken over.
            DiskFullError, StorageError: Nothing of the failed write can be seen.
            DurabilityError: A flush failed, now or before.
            LockTimeoutError: Another process holds the partition.
        """
        return append.append(self, encoded, durability, timeout, condition)

    def append_at(
        self,
        placed: Sequence[tuple[int, EncodedBatch]],
        *,
        durability: str | None = None,
        timeout: float | None = None,
        identical: bool = False,
        mirror: str = "",
        expected_end: int | None = None,
    ) -> list[Appended]:
        """Write batches at the offsets given with them, as a copy of another log does.

        Offsets may be left out, at the beginning and between two batches.  Batches with a
        column of offsets, as compacted segments have, are written as they are.  Otherwise as
        `append`; a batch with a sequence number that was sent before leaves a gap.  After a
        failure some batches may be published: `end_offset` is where to continue.

        Args:
            placed: Offset of the first record, and batch; in order, as
                `PartitionReader.read_encoded` returns them.
            durability: As in `append`.
            timeout: As in `append`.
            identical: Write them as the replica of a partition does: with their own leader
                epochs, timestamps and columns, and without the checks that they passed where
                they were appended first.  The log takes note of their producers.
            mirror: With ``identical``: the topic that is copied, as in ``mirror.source``.
            expected_end: The log end offset that the caller goes by, if no other may be there.

        Raises:
            UnexpectedAppendOffsetError: The first one is below the end, or the end is not the
                expected one; nothing was written.
            OffsetsOutOfOrderError: They overlap, go back, or do not fit 63 bits; nothing
                was written.
            FencedLeaderEpochError: With ``identical``, one is of an earlier leader epoch than the
                batch before it; nothing was written.
            MirrorConflictError: The topic is not a copy of that one, or not any more.
            Exception: As `append`.
        """
        return append.append_at(self, placed, durability, timeout, identical, mirror, expected_end)

    def skip_to(self, offset: int, *, mirror: str = "") -> None:
        """Advance the log end to ``offset``, leaving a gap; durable when it returns.

        Does nothing if it has reached the offset.

        Args:
            offset: The offset of the next record.
            mirror: As in `append_at`.

        Raises:
            MirroredTopicError, MirrorConflictError: As `append_at`.
            StorageError: As `append`.
        """
        append.skip_to(self, offset, mirror)

    def roll(self) -> bool:
        """Seal the active segment and begin the next; False if it is empty."""
        self.context.check_writable()
        with self.owned() as tail:
            self.file_at(tail)
            if tail.empty:
                return False
            roll.roll(self, tail)
            return True

    def flush(self) -> None:
        """Put everything written so far on the disk, and move the recovery point."""
        self.context.check_writable()
        flush.flush([self])

    def truncate_to(self, offset: int) -> bool:
        """Remove every record at or above ``offset``; False if there is none.

        A batch that straddles ``offset`` is removed entirely.  The leader epoch
        grows, so a reader that was past that offset gets an error.

        Raises:
            ValueError: The offset is negative.
            DurabilityError: A flush failed before.
        """
        return recovery.truncate_to(self, offset)

    # Reading

    def reader(self, offset: int, leader_epoch: int | None = None) -> PartitionReader:
        """Return a reader that begins at ``offset``.

        Args:
            offset: The first offset to return.
            leader_epoch: The epoch in which the offset was read, if the caller kept it:
                the reader then raises if the log was truncated below the offset since.

        Raises:
            OffsetOutOfRangeError: Below the start, or past the end.
            LogTruncatedError: The log was truncated below it since that epoch.
        """
        return PartitionReader(self, offset, leader_epoch)

    def offset_for_timestamp(self, timestamp: int) -> OffsetAndTimestamp | None:
        """Return the first record, in offset order, at or after ``timestamp`` ms."""
        return lookup.offset_for_timestamp(self, timestamp)
