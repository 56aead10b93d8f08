"""One partition: append, roll, flush, truncate.  Order is the algorithm.

An append takes the partition's lock (thread, then `flock`), reads the tail row
(another process may have moved it), cuts what a killed writer left past it,
writes the bytes, and publishes them with one transaction on `live`.  With
``durability="fsync"`` it lets the lock go before it flushes, so that
concurrent appends share the flush, and publishes after.

Lock order: thread lock → partition `flock` → `state` or `live`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, TypeVar

from sortedcontainers import SortedDict

from embedlog import batch as batches
from embedlog import catalog, kv
from embedlog.batch import EncodedBatch
from embedlog.catalog import SegmentInfo, TopicInfo
from embedlog.config import INT_MAX, TopicConfig
from embedlog.errors import (
    ClosedError,
    CorruptionError,
    DiskFullError,
    EmbedlogError,
    LockTimeoutError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.partition import (
    append_at,
    append_fast,
    flush,
    lookup,
    overdue_warning,
    recovery,
    roll,
    tail,
    validation,
)
from embedlog.partition.append import PendingAppend
from embedlog.partition.context import Context
from embedlog.partition.journal import settle
from embedlog.partition.reader import PartitionReader
from embedlog.partition.record_counts import RecordCounts
from embedlog.partition.tail import CachedTail, Tail
from embedlog.record import Appended, OffsetAndTimestamp
from embedlog.segment import SegmentFile, path_of

T = TypeVar("T")


class PartitionLog:
    """The log of one partition, shared with every process that has the root open.

    Any thread may call any method.  After a fork the child makes a new one.
    """

    def __init__(self, context: Context, topic: TopicInfo, partition: int) -> None:
        self.context, self.topic, self.partition = context, topic.name, partition
        self.key = topic.key(partition)
        self.directory = topic.directory
        self.topic_id = topic.id
        self.tail_key = tail.ROWS + self.key
        self._lock_path = topic.lock_path(partition)
        self._lock = threading.Lock()
        self.flush_lock = threading.Lock()
        self._lock_fd: int | None = None
        # A snapshot of the manifest and the settings, replaced whole when the
        # catalogue's version moves; readers take what they need from one.  Of
        # the manifest only the last line is read, until somebody asks for more:
        # a lookup costs the same whether a partition has four segments or 4,000.
        self._snapshot_lock = threading.Lock()
        self.version = self.settled = -1
        self.config: TopicConfig = topic.config
        self._segments: SortedDict[int, SegmentInfo] | None = None
        self.last: SegmentInfo
        self._most_alone = self.roll_ms = 0
        self.bounds_times, self.needs_keys, self.stamps = False, False, False
        self.overdue_ms: int | None = None
        self.known: CachedTail | None = None
        self._previewed: tuple[tuple[int, int], Tail] | None = None
        self.active: tuple[int, SegmentFile] | None = None
        self.record_counts = RecordCounts(self)
        self.entry_synced: int | None = None
        self.dirty = False

    def __repr__(self) -> str:
        return f"<PartitionLog {self.topic}-{self.partition}>"

    # What is there

    def tail(self) -> Tail:
        """Return the end of the partition now, recovering it first if nobody did."""
        now = self._tail_row()
        if now is not None:
            return now
        if not self.context.files.writable:
            return self._preview()
        self.acquire()
        try:
            return self.tail_locked()
        finally:
            self.release()

    def _preview(self) -> Tail:
        """Where the log would end, for a reader after a reboot that nobody recovered from yet."""
        seen = self.context.catalog.version(), self.context.wake.published()
        if self._previewed is None or self._previewed[0] != seen:
            self._previewed = seen, recovery.preview(self)
        return self._previewed[1]

    def _tail_row(self) -> Tail | None:
        """The row in `live`, from memory while nothing was committed there."""
        live = self.context.live
        known = self.known
        if known is not None and live.stands(known.version):
            return known.tail
        row, version = live.get_at(self.tail_key)
        if known is not None and known.version == version:
            return known.tail
        if row is None:
            return None
        now = tail.unpack(row)
        self.known = CachedTail(version, row, now, {})
        return now

    def start_offset(self) -> int:
        """The first offset that can be read."""
        self.refresh()
        return self.tail().start_offset

    def end_offset(self) -> int:
        """The offset the next visible record will have (the high watermark)."""
        self.refresh()
        return self.visible_end(self.tail())

    def visible_end(self, now: Tail) -> int:
        """How far readers of this handle may go, by its ``visibility``."""
        durable = self.context.visibility == "durable"
        return min(now.durable_offset, now.high_watermark) if durable else now.high_watermark

    def size_bytes(self) -> int:
        """Bytes of all its segment files."""
        now = self.tail()
        self.refresh()
        base = now.base_offset
        older: int = sum(info.size for info in self.segments.values() if info.base_offset < base)
        return older + now.high_watermark_position

    def refresh(self) -> None:
        """Take a new snapshot of the manifest and settings if anything changed.

        Raises:
            UnknownTopicOrPartitionError: The topic was deleted, or re-created.
        """
        if self.context.catalog.version() != self.version:
            # One at a time: a slow thread may not put an older snapshot over a newer
            # one, for whoever appends takes the active segment from it.
            with self._snapshot_lock:
                self._refresh_locked(self.context.catalog.version())

    def _refresh_locked(self, version: int, whole: bool = False) -> None:
        topic = self.context.catalog.topic(self.topic)
        if topic.id != self.topic_id:
            raise UnknownTopicOrPartitionError(
                "the topic was deleted and created again",
                topic=self.topic,
                partition=self.partition,
                todo="open it anew; its offsets begin at 0",
            )
        read = self.context.state.read
        if whole:
            found = read(lambda txn: catalog.segments(txn, self.key))
        else:
            found = [self._there(read(lambda txn: catalog.last_segment(txn, self.key)))]
        self.last = self._there(found[-1] if found else None)
        self._segments = SortedDict({one.base_offset: one for one in found}) if whole else None
        self.config = topic.config
        self._take_settings(topic.config)
        self.version = version

    def _take_settings(self, config: TopicConfig) -> None:
        """Work out once what every append asks of them, and of the active segment."""
        self.roll_ms = roll.longest_ms(config, self.last)
        self.bounds_times, self.needs_keys = validation.bounds_times(config), config.compacts
        self.stamps = config.message_timestamp_type == "LogAppendTime"
        self.overdue_ms = overdue_warning.age_ms(self, config)
        demanding = self.stamps or self.bounds_times or self.needs_keys or self.last.headers
        demanding = demanding or config.segment_max_offset_span < INT_MAX
        # How large a batch `alone` may append: none where there is more to ask of it than that.
        self._most_alone = min(config.max_message_bytes, config.segment_bytes)
        if demanding or flush.by_itself(config):
            self._most_alone = -1

    def _there(self, found: SegmentInfo | None) -> SegmentInfo:
        if found is None:
            raise UnknownTopicOrPartitionError(
                "the topic was just deleted", topic=self.topic, partition=self.partition
            )
        return found

    @property
    def segments(self) -> SortedDict[int, SegmentInfo]:
        """The whole manifest by base offset, read when it is first asked for.

        It and `last` are always of one instant: where the manifest moved on
        since `refresh`, this is another one.
        """
        found = self._segments
        while found is None:
            with self._snapshot_lock:
                if self._segments is None:
                    self._refresh_locked(self.context.catalog.version(), whole=True)
                found = self._segments
        return found

    def segment_at(self, offset: int) -> SegmentInfo:
        """Return the segment that an offset lies in, or the first one if it lies below.

        As of the last `refresh`, or later.
        """
        known, last = self._segments, self.last
        if known is not None:
            info: SegmentInfo = known.peekitem(max(known.bisect_right(offset) - 1, 0))[1]
            return info
        if last.base_offset <= offset:
            return last
        return self._there(
            self.context.state.read(lambda txn: catalog.segment_at(txn, self.key, offset))
        )

    def segment_after(self, info: SegmentInfo) -> SegmentInfo | None:
        """Return the segment that follows one, as of the last `refresh` or later."""
        known, base = self._segments, info.base_offset
        if known is None:
            return self.context.state.read(lambda txn: catalog.segment_after(txn, self.key, base))
        place = known.bisect_right(base)
        return None if place == len(known) else known.peekitem(place)[1]

    # Appending

    def append(
        self,
        encoded: Sequence[EncodedBatch],
        *,
        durability: str | None = None,
        timeout: float | None = None,
    ) -> list[Appended]:
        """Write batches at the end, publish them, and return their offsets.

        Batches are whole and in order; from many threads and processes one
        call's at a time.  Returns once ``durability`` holds.  When a roll falls
        between two of them, those before it may be published although the call
        fails later; repeating the call with the same sequences is answered
        with the offsets they got (G16).  Waits ``timeout`` seconds for the
        partition, or as long as for any lock.

        Raises:
            RecordTooLargeError: A batch over ``max.message.bytes`` (A4).
            InvalidRecordError: A record without a key where the topic is compacted
                (A6, ``indices`` say which), or from too far away a time (A7).
            OutOfOrderSequenceError, InvalidProducerEpochError: G16, G17.
            DiskFullError, StorageError: Nothing of the failed write can be seen.
            DurabilityError: A flush failed, now or before (P9).
            LockTimeoutError: Another process holds the partition.
        """
        if not encoded:
            return []
        self.context.check_appendable()
        synced = (durability or self.context.durability) == "fsync"
        self.acquire(timeout)
        try:
            file, now = self._end_for_append_locked()
            receipt = None
            if len(encoded) == 1 and not synced:
                one = encoded[0]
                # Kafka may count 16 bytes more for a record than it takes here (`batch.limits`).
                if one.size + 16 * one.count <= self._most_alone:
                    receipt = append_fast.append_fast(self, file, now, one)
            if receipt is None:
                validation.check(self, encoded)
                draft = self._append_locked(file, now, encoded, synced)
        except DiskFullError:
            self.context.reserve.short = True
            raise
        finally:
            self.release()
        self.dirty = True
        if receipt is None:
            overdue_warning.warn(self, encoded)
            if synced or flush.due(self, draft.tail):
                flush.flush_to(self, draft.tail)
        self.context.wake.advance()
        return draft.receipts if receipt is None else [receipt]

    def append_at(
        self,
        placed: Sequence[tuple[int, EncodedBatch]],
        *,
        durability: str | None = None,
        timeout: float | None = None,
    ) -> list[Appended]:
        """Write batches at the offsets given with them, as a mirror of another log does (A8).

        Offsets may be left out, at the beginning and between two batches; each such
        gap begins a new segment and flushes the one before.  Otherwise as `append`;
        a batch with a sequence that was sent before leaves a gap.  After a failure
        some may be there: `end_offset` tells where to go on.

        Args:
            placed: Offset of the first record, and batch; in order.
            durability: As in `append`.
            timeout: As in `append`.

        Raises:
            UnexpectedAppendOffsetError: The first one is below the end; nothing was written.
            OffsetsOutOfOrderError: They overlap, go back, or do not fit 63 bits; nothing
                was written.
            Exception: As `append`.
        """
        if not placed:
            return []
        self.context.check_appendable()
        runs, receipts = append_at.runs_of(self, placed), []
        synced = (durability or self.context.durability) == "fsync"
        self.acquire(timeout)
        try:
            _, now = self._end_for_append_locked()
            append_at.check_first(self, now, runs[0][0])
            validation.check(self, [one for _, one in placed])
            for offset, encoded in runs:
                now = append_at.skip_to(self, now, offset)
                draft = self._append_locked(self.active_file(), now, encoded, synced)
                now = draft.tail
                receipts += draft.receipts
        except DiskFullError:
            self.context.reserve.short = True
            raise
        finally:
            self.release()
        self.dirty = True
        overdue_warning.warn(self, [one for _, one in placed])
        if synced or flush.due(self, now):
            flush.flush_to(self, now)
        self.context.wake.advance()
        return receipts

    def _append_locked(
        self, file: SegmentFile, now: Tail, encoded: Sequence[EncodedBatch], synced: bool
    ) -> PendingAppend:
        assert self._lock.locked()
        draft = PendingAppend(self, now, publish=not synced)
        for one in encoded:
            repeated = draft.repeated(one)
            if repeated is not None:
                draft.receipts.append(repeated)
                continue
            if roll.is_due(self, file, draft.tail, one):
                self._commit_locked(file, draft)
                draft.begin(roll.roll(self, draft.tail, one.has_headers, synced))
                file = self.active_file()
            # A segment has one schema: what comes after a record with headers has the column.
            wide = self.last.headers and not one.has_headers
            draft.add(batches.with_headers(one) if wide else one)
        self._commit_locked(file, draft)
        return draft

    def _commit_locked(self, file: SegmentFile, draft: PendingAppend) -> None:
        """Write what the draft holds and publish it."""
        if not draft.buffers:
            if draft.reveal():
                self.context.live.write(draft.publish)
            return
        self.commit_locked(
            file, draft.buffers, draft.position, draft.tail.log_end_offset, draft.publish
        )
        self.known = draft.published

    def commit_locked(
        self,
        file: SegmentFile,
        buffers: list[Any],
        position: int,
        next_offset: int,
        publish: kv.Step[T],
    ) -> T:
        """Write bytes, which end at an offset, and publish them; on any failure cut them off."""
        try:
            file.write(buffers, position)
            return self.context.live.write(publish)
        except BaseException:
            self._cut_back(file, position, next_offset)
            raise

    def _cut_back(self, file: SegmentFile, position: int, next_offset: int) -> None:
        try:
            # An interrupt can come after the commit: what is published stays.
            row = self.context.live.get(self.tail_key)
            if row is None or tail.unpack(row).log_end_offset < next_offset:
                file.truncate(position)
                # Or a power cut could bring it back, behind what is written next.
                flush.sync(self, file)
        except EmbedlogError:
            pass  # A dead disk may refuse even this: then the next writer cuts it.

    def tail_locked(self) -> Tail:
        """The tail, with a roll finished that its process did not live to finish."""
        # Bytes are cut by what is read here: a commit that a killed process left
        # to be seen later would then point at bytes that are gone.
        self.context.state.settle()
        self.context.live.settle()
        self.refresh()
        settle(self)
        now = self._tail_row()
        if now is None:
            return recovery.rebuild(self)
        active = self.last
        if now.segment_id == active.id or now.failed:
            return now
        before, end = self.segments.get(now.base_offset), (now.segment_id, now.log_end_offset)
        if before is not None and (before.id, before.next_offset) == end:
            return roll.start_segment(self, now, active)
        return recovery.rebuild(self)

    def _end_for_append_locked(self) -> tuple[SegmentFile, Tail]:
        """Where to append: the file, and its tail, with what a dead writer left cut off."""
        context, known, active = self.context, self.known, self.active
        if (
            active is not None
            and known is not None
            and known.tail.segment_id == active[0] == self.last.id
            and not known.tail.failed
            and context.live.stands(known.version)
            and context.state.stands(self.version)
        ):
            now, file = known.tail, active[1]
        else:
            now = self.tail_locked()
            if now.failed:
                raise flush.failed(self)
            file = self.active_file()
        size = file.size()
        if size > now.log_end_position:
            file.truncate(now.log_end_position)
            # Or a power cut could bring it back, behind what is written next.
            flush.sync(self, file)
        elif size < now.log_end_position:
            raise CorruptionError(
                f"the file ends at byte {size}, {now.log_end_position} were written",
                topic=self.topic,
                partition=self.partition,
                path=file.path,
                position=size,
                todo="run `embedlog repair`; it tells first",
            )
        return file, now

    def active_file(self) -> SegmentFile:
        """The active segment, open for writing where that is allowed."""
        active, last = self.active, self.last
        if active is None or active[0] != last.id:
            file = self.open_segment(last, write=self.context.files.writable)
            active = self.active = last.id, file
            self.context.open_files.opened(self)
        return active[1]

    def open_active(self, segment_id: int) -> SegmentFile | None:
        """The active segment, if it is open and that one."""
        active = self.active
        return active[1] if active is not None and active[0] == segment_id else None

    def open_segment(self, info: SegmentInfo, *, write: bool = False) -> SegmentFile:
        """Open one of its segment files."""
        expected = roll.columns_of(info)
        return SegmentFile(self.context.files, self.path_of(info), write=write, expected=expected)

    def path_of(self, info: SegmentInfo) -> str:
        """Where a segment is, from the root."""
        return path_of(self.directory, self.partition, info.file_name)

    # Rolling

    def roll(self) -> bool:
        """Seal the active segment and begin the next; False if it is empty (A13)."""
        self.context.check_writable()
        self.acquire()
        try:
            _, now = self._end_for_append_locked()
            if now.empty:
                return False
            self.roll_locked(now)
            return True
        finally:
            self.release()

    def roll_locked(self, now: Tail) -> Tail:
        """As `roll`, for somebody who has the lock and the tail."""
        return roll.roll(self, now, self.last.headers, self.context.durability == "fsync")

    def flush(self) -> None:
        """Put everything written so far on the disk and move the recovery point (A22)."""
        self.context.check_writable()
        flush.flush([self])

    # Cutting

    def truncate_to(self, offset: int) -> bool:
        """Remove every record at or past ``offset``; False if there is none (A34-A36).

        A batch that straddles ``offset`` goes entirely.  The leader epoch
        grows, so a reader that was past the cut learns of it.

        Raises:
            ValueError: The offset is negative.
            DurabilityError: A flush failed before (P9).
        """
        if offset < 0:
            raise ValueError(f"offset {offset} is negative")
        self.context.check_writable()
        self.acquire()
        try:
            now = self.tail_locked()
            if now.failed:
                raise flush.failed(self)
            if offset >= now.log_end_offset:
                return False
            recovery.cut(self, now, offset)
            return True
        finally:
            self.release()
            self.context.wake.advance()

    # Reading

    def reader(self, offset: int, leader_epoch: int | None = None) -> PartitionReader:
        """Return a reader that begins at ``offset``.

        Args:
            offset: The first to return.
            leader_epoch: The epoch in which that offset was read or noted, by whoever
                kept it: then a cut below it since is told.

        Raises:
            OffsetOutOfRangeError: Below the start, or past the end (A17).
            LogTruncatedError: The log was cut below it since that epoch (A36).
        """
        return PartitionReader(self, offset, leader_epoch)

    def offset_for_timestamp(self, timestamp: int) -> OffsetAndTimestamp | None:
        """Return the first record, in offset order, at or after ``timestamp`` ms (B10)."""
        while True:
            start = self.start_offset()
            # The tail first: a segment that is rolled after it is looked at as sealed.
            now = self.tail()
            self.refresh()
            version = self.version
            try:
                return lookup.offset_for_timestamp(self, now, timestamp)
            except StorageError as error:
                # Its file was replaced by compaction, or retention overtook the look.
                same = self.start_offset() == start and self.context.catalog.version() == version
                if not error.missing or same:
                    raise

    # The lock

    def acquire(self, timeout: float | None = None) -> None:
        """Take the right to append, before every other process and thread."""
        if timeout is None:
            timeout = self.context.lock_timeout
        if not self._lock.acquire(False) and not self._lock.acquire(timeout=timeout):
            raise LockTimeoutError("another thread holds the partition", path=self._lock_path)
        try:
            if self._lock_fd is None:
                if self.context.closed:
                    raise ClosedError("the log was closed", path=self.context.root)
                self._lock_fd = self.context.files.open(self._lock_path, write=True, create=True)
                self.context.open_files.opened(self)
            self.context.files.lock(self._lock_fd, timeout)
        except BaseException:
            self._lock.release()
            raise

    def release(self) -> None:
        """Give it back."""
        assert self._lock_fd is not None
        self.context.files.unlock(self._lock_fd)
        self._lock.release()

    def close(self) -> None:
        """Let the files go; readers that have one keep it.

        Waits for an append of another thread, whose lock must not be closed under it.
        """
        waited = self._lock.acquire(timeout=self.context.lock_timeout)
        try:
            self._close_files()
        finally:
            if waited:
                self._lock.release()

    def release_files(self) -> bool:
        """Close the files for now, unless an operation holds the partition's lock."""
        if not self._lock.acquire(False):
            return False
        try:
            self._close_files()
        finally:
            self._lock.release()
        return True

    def _close_files(self) -> None:
        self.active = None
        fd, self._lock_fd = self._lock_fd, None
        if fd is not None:
            self.context.files.close(fd)
