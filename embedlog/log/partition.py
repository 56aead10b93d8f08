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
from typing import Any

from sortedcontainers import SortedDict

from embedlog import catalog, index, kv
from embedlog import batch as batches
from embedlog.batch import EncodedBatch
from embedlog.catalog import PartitionInfo, SegmentInfo, TopicInfo
from embedlog.config import TopicConfig
from embedlog.errors import (
    CorruptionError,
    DurabilityError,
    InvalidRecordError,
    LockTimeoutError,
    OffsetOutOfRangeError,
    RecordBatchTooLargeError,
    RecordTooLargeError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.log import lookup, recovery, sequence, tail
from embedlog.log.context import Context
from embedlog.log.draft import Draft
from embedlog.log.reader import PartitionReader
from embedlog.log.tail import Tail
from embedlog.record import Appended, OffsetAndTimestamp
from embedlog.segment import END_MARK, SegmentFile, create, path_of


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
        self._lock = threading.Lock()
        self._flush_lock = threading.Lock()
        self._lock_fd: int | None = None
        # A snapshot of the manifest and the settings, replaced whole when the
        # catalogue's version moves; readers take what they need from one.
        self._version = -1
        self.config: TopicConfig = topic.config
        self.segments: SortedDict[int, SegmentInfo] = SortedDict()
        self._active: tuple[int, SegmentFile] | None = None
        self._entry_synced: int | None = None
        self.dirty = False

    def __repr__(self) -> str:
        return f"<PartitionLog {self.topic}-{self.partition}>"

    # What is there

    def tail(self) -> Tail:
        """Return the end of the partition now, recovering it first if nobody did."""
        row = self.context.live.get(self.tail_key)
        if row is not None:
            return tail.unpack(row)
        if not self.context.files.writable:
            return recovery.preview(self)
        self.acquire()
        try:
            return self.tail_locked()
        finally:
            self.release()

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
        return min(now.durable_offset, now.end_offset) if durable else now.end_offset

    def size_bytes(self) -> int:
        """Bytes of all its segment files."""
        self.refresh()
        sealed = sum(info.size for info in self.segments.values() if info.sealed)
        return sealed + self.tail().end_position

    def refresh(self) -> None:
        """Take a new snapshot of the manifest and settings if anything changed.

        Raises:
            UnknownTopicOrPartitionError: The topic was deleted, or re-created.
        """
        version = self.context.catalog.version()
        if version == self._version:
            return
        topic = self.context.catalog.topic(self.topic)
        if topic.id != self.topic_id:
            raise UnknownTopicOrPartitionError(
                "the topic was deleted and created again",
                topic=self.topic,
                partition=self.partition,
                todo="open it anew; its offsets begin at 0",
            )
        found = self.context.state.read(lambda txn: catalog.segments(txn, self.key))
        self.segments = SortedDict({info.base_offset: info for info in found})
        self.config, self._version = topic.config, version

    # Appending

    def append(
        self, encoded: Sequence[EncodedBatch], *, durability: str | None = None
    ) -> list[Appended]:
        """Write batches at the end, publish them, and return their offsets.

        Batches are whole and in order; from many threads and processes one
        call's at a time.  Returns once ``durability`` holds.  When a roll falls
        between two of them, those before it may be published although the call
        fails later; repeating the call with the same sequences is answered
        with the offsets they got (G16).

        Raises:
            RecordTooLargeError: A batch over ``max.message.bytes`` (A4).
            OutOfOrderSequenceError, InvalidProducerEpochError: G16, G17.
            DiskFullError, StorageError: Nothing of the failed write can be seen.
            DurabilityError: A flush failed, now or before (P9).
            LockTimeoutError: Another process holds the partition.
        """
        if not encoded:
            return []
        self.context.check_writable()
        self.refresh()
        self._check(encoded)
        synced = (durability or self.context.durability) == "fsync"
        self.acquire()
        try:
            now = self._tail_for_append_locked()
            receipts, now = self._append_locked(now, encoded, synced)
        finally:
            self.release()
        self.dirty = True
        if synced or self._flush_due(now):
            self._flush_to(now)
        self.context.wake.advance()
        return receipts

    def _check(self, encoded: Sequence[EncodedBatch]) -> None:
        most, segment = self.config.max_message_bytes, self.config.segment_bytes
        for one in encoded:
            if one.size > most:
                raise RecordTooLargeError(
                    f"a batch of {one.size} bytes is over max.message.bytes {most}",
                    topic=self.topic,
                    partition=self.partition,
                    todo="send less at once, or raise max.message.bytes of the topic",
                )
            if one.size > segment:
                raise RecordBatchTooLargeError(
                    f"a batch of {one.size} bytes is over segment.bytes {segment}",
                    topic=self.topic,
                    partition=self.partition,
                    todo="send less at once, or raise segment.bytes of the topic",
                )
        if self.config.message_timestamp_type == "CreateTime":
            self._check_times(encoded)

    def _check_times(self, encoded: Sequence[EncodedBatch]) -> None:
        before = self.config.message_timestamp_before_max_ms
        after = self.config.message_timestamp_after_max_ms
        if min(before, after) >= (1 << 63) - 1:
            return
        now = self.context.clock()
        for one in encoded:
            if one.min_timestamp < now - before or one.max_timestamp > now + after:
                raise InvalidRecordError(
                    f"timestamps {one.min_timestamp} to {one.max_timestamp} are not within "
                    f"{now - before} to {now + after}",
                    topic=self.topic,
                    partition=self.partition,
                    todo="see message.timestamp.before.max.ms and .after.max.ms",
                )

    def _append_locked(
        self, now: Tail, encoded: Sequence[EncodedBatch], synced: bool
    ) -> tuple[list[Appended], Tail]:
        assert self._lock.locked()
        draft = Draft(self, now, publish=not synced)
        for one in encoded:
            repeated = draft.repeated(one)
            if repeated is not None:
                draft.receipts.append(repeated)
                continue
            if self._roll_due(draft.tail, one):
                self._commit_locked(draft)
                draft.begin(self._roll_locked(draft.tail, one.has_headers, synced))
            draft.add(one)
        self._commit_locked(draft)
        return draft.receipts, draft.tail

    def _commit_locked(self, draft: Draft) -> None:
        """Write what the draft holds and publish it; on any failure cut it back off."""
        if not draft.buffers:
            return
        file = self._active_file()
        try:
            file.write(draft.buffers, draft.position)
            self.context.live.write(draft.publish)
        except BaseException:
            # A dead disk may refuse even this: then the next writer cuts it.
            try:
                file.truncate(draft.position)
            except StorageError:
                pass
            raise
        draft.begin(draft.tail)

    def _roll_due(self, now: Tail, one: EncodedBatch) -> bool:
        config = self.config
        info = self.segments.peekitem(-1)[1]
        if one.has_headers and not info.headers:
            return True
        if now.timestamp is None:
            return False
        if now.position - self._active_file().start + one.size > config.segment_bytes:
            return True
        limit = config.segment_ms
        if "compact" in config.cleanup_policy:
            limit = min(limit, config.max_compaction_lag_ms)
        if config.segment_jitter_ms:
            # Fixed for a segment, spread over segments (A16).
            limit -= info.id * 2654435761 % (config.segment_jitter_ms + 1)
        return one.max_timestamp - now.first_timestamp > limit

    def tail_locked(self) -> Tail:
        """The tail, with a roll finished that its process did not live to finish."""
        self.refresh()
        row = self.context.live.get(self.tail_key)
        if row is None:
            return recovery.rebuild(self)
        now = tail.unpack(row)
        active = self.segments.peekitem(-1)[1]
        if now.segment_id == active.id:
            return now
        before = self.segments.get(now.base_offset)
        if before is not None and before.id == now.segment_id and before.sealed:
            return self._start_segment_locked(now, active)
        return recovery.rebuild(self)

    def _tail_for_append_locked(self) -> Tail:
        now = self.tail_locked()
        if now.failed:
            raise self._failed()
        file = self._active_file()
        size = file.size()
        if size > now.position:
            file.truncate(now.position)
        elif size < now.position:
            raise CorruptionError(
                f"the file ends at byte {size}, {now.position} were written",
                topic=self.topic,
                partition=self.partition,
                path=file.path,
                position=size,
                todo="run `embedlog repair`; it tells first",
            )
        return now

    def _failed(self) -> DurabilityError:
        return DurabilityError(
            "a flush failed; what was written since the last good one may be lost",
            topic=self.topic,
            partition=self.partition,
            todo="check the disk, then run `embedlog repair`",
        )

    def _active_file(self) -> SegmentFile:
        info = self.segments.peekitem(-1)[1]
        if self._active is None or self._active[0] != info.id:
            self._active = info.id, self.open_segment(info, write=self.context.files.writable)
        return self._active[1]

    def active_file(self, segment_id: int) -> SegmentFile | None:
        """The open active segment, if it is that one."""
        active = self._active
        return active[1] if active is not None and active[0] == segment_id else None

    def open_segment(self, info: SegmentInfo, *, write: bool = False) -> SegmentFile:
        """Open one of its segment files."""
        return SegmentFile(self.context.files, self.path_of(info), write=write)

    def path_of(self, info: SegmentInfo) -> str:
        """Where a segment is, from the root."""
        return path_of(self.directory, self.partition, info.file_name)

    # Rolling

    def roll(self) -> bool:
        """Seal the active segment and begin the next; False if it is empty (A13)."""
        self.context.check_writable()
        self.acquire()
        try:
            now = self._tail_for_append_locked()
            if now.empty:
                return False
            self.roll_locked(now)
            return True
        finally:
            self.release()

    def roll_locked(self, now: Tail) -> Tail:
        """As `roll`, for somebody who has the lock and the tail."""
        headers = self.segments.peekitem(-1)[1].headers
        return self._roll_locked(now, headers, self.context.durability == "fsync")

    def _roll_locked(self, now: Tail, headers: bool, synced: bool) -> Tail:
        """Seal the active segment and open the next one after it (A14, A15)."""
        assert self._lock.locked()
        old = self.segments.peekitem(-1)[1]
        file = self._active_file()
        found = self.context.live.read(lambda txn: index.entries(txn, self.key, old.id))
        if not now.empty:
            file.write([END_MARK], now.position)
        if synced:
            self._sync_files(now, file)
        producers = self._producers() if synced else {}
        sealed = old._replace(
            next_offset=now.next_offset,
            size=now.position + len(END_MARK),
            end_position=now.position,
            max_timestamp=now.timestamp,
        )

        def step(txn: kv.Txn) -> SegmentInfo:
            number = catalog.next_number(txn, b"segment")
            new = SegmentInfo(now.next_offset, number, self.context.clock(), headers=headers)
            if now.empty:
                catalog.drop_segment(txn, self.key, old)
            else:
                catalog.put_segment(txn, self.key, sealed)
                catalog.put_index_blob(txn, self.key, sealed, index.pack(found))
            catalog.put_segment(txn, self.key, new)
            if synced:
                self._put_recovery_point(txn, now.next_offset, producers)
            return new

        # Name it first, create it second: a missing empty tail can be made
        # again, but a file that the manifest does not name is garbage.
        new = self.context.state.write(step)
        self.refresh()
        after = self._start_segment_locked(now, new, synced)
        if now.empty:
            self.context.files.unlink(self.path_of(old), missing_ok=True)
        return after

    def _start_segment_locked(self, now: Tail, new: SegmentInfo, synced: bool = False) -> Tail:
        """Create the file the manifest names and move the tail into it."""
        file = self.create_segment(new, synced)
        after = Tail(
            new.id,
            new.base_offset,
            now.next_offset,
            file.start,
            now.next_offset,
            file.start,
            now.next_offset if synced else now.durable_offset,
            now.start_offset,
            now.leader_epoch,
            created_ms=new.created_ms,
            flushed_ms=now.flushed_ms,
        )

        def step(txn: kv.Txn) -> None:
            txn.put(self.tail_key, after.pack())
            index.remove(txn, self.key, now.segment_id)

        self.context.live.write(step)
        return after

    def create_segment(self, info: SegmentInfo, synced: bool) -> SegmentFile:
        """Make the empty file of a segment that the manifest names."""
        files = self.context.files
        files.make_directory(self.directory)
        files.make_directory(f"{self.directory}/{self.partition}")
        file = create(files, self.path_of(info), self.schema_of(info))
        self._active = info.id, file
        if synced:
            file.sync()
            self.sync_entries(info.id)
        return file

    def schema_of(self, info: SegmentInfo) -> Any:
        """Return the Arrow schema that a segment file of this partition begins with."""
        metadata = {
            b"embedlog.version": b"1",
            b"embedlog.topic": self.topic.encode(),
            b"embedlog.partition": str(self.partition).encode(),
            b"embedlog.base_offset": str(info.base_offset).encode(),
        }
        return batches.schema(headers=info.headers, metadata=metadata)

    # Flushing

    def flush(self) -> None:
        """Put everything written so far on the disk and move the recovery point (A22)."""
        self.context.check_writable()
        self.refresh()
        now = self.tail()
        if now.failed:
            raise self._failed()
        self._flush_to(now)
        self.acquire()
        try:
            current = self.tail_locked()
            # A truncation in between raised the epoch: then the point stays.
            if current.leader_epoch == now.leader_epoch:
                producers = self._producers()
                self.context.state.write(
                    lambda txn: self._put_recovery_point(txn, now.next_offset, producers)
                )
        finally:
            self.release()
        self.dirty = False

    def _flush_due(self, now: Tail) -> bool:
        config = self.config
        waiting = now.next_offset - now.durable_offset
        if waiting >= config.flush_messages:
            return True
        if config.flush_ms >= (1 << 63) - 1:
            return False
        return self.context.clock() - now.flushed_ms >= config.flush_ms

    def _flush_to(self, mine: Tail) -> None:
        """Return once everything up to ``mine`` is on the disk, and published.

        The first of several waiting threads flushes for all of them: what they
        wrote before its flush began is covered by it (group commit).
        """
        with self._flush_lock:
            current = self.tail()
            if current.durable_offset >= mine.next_offset:
                return
            if current.failed:
                raise self._failed()
            # The segment may have been sealed meanwhile, by a process that
            # does not flush: then its file is among the older ones.
            try:
                self._sync_files(current, self._file_of(current))
            except StorageError as error:
                self._fail(current)
                raise self._failed() from error
            self.context.live.write(lambda txn: self._publish_durable(txn, current))

    def _file_of(self, current: Tail) -> SegmentFile:
        self.refresh()
        file = self.active_file(current.segment_id)
        if file is not None:
            return file
        info = self.segments.get(current.base_offset)
        if info is None or info.id != current.segment_id:
            raise OffsetOutOfRangeError(
                "the log was cut while it was flushed", topic=self.topic, partition=self.partition
            )
        return self.open_segment(info, write=True)

    def _sync_files(self, now: Tail, file: SegmentFile) -> None:
        """Flush the older segments that nobody flushed, the active one, and their names."""
        if now.durable_offset < now.base_offset:
            for info in list(self.segments.values()):
                if info.sealed and now.durable_offset < info.next_offset <= now.base_offset:
                    self.open_segment(info, write=True).sync()
        file.sync()
        if self._entry_synced != now.segment_id:
            self.sync_entries(now.segment_id)

    def sync_entries(self, segment_id: int) -> None:
        """Flush the names of new files: without it a power cut loses the whole file."""
        for directory in (f"{self.directory}/{self.partition}", self.directory, "topics"):
            self.context.files.sync_directory(directory)
        self._entry_synced = segment_id

    def _publish_durable(self, txn: kv.Txn, flushed: Tail) -> None:
        row = txn.get(self.tail_key)
        if row is None:
            return
        now = tail.unpack(row)
        if now.leader_epoch != flushed.leader_epoch or now.failed:
            return
        durable = max(now.durable_offset, flushed.next_offset)
        now = now._replace(durable_offset=durable, flushed_ms=self.context.clock())
        if now.segment_id == flushed.segment_id and now.end_offset < flushed.next_offset:
            now = now._replace(end_offset=flushed.next_offset, end_position=flushed.position)
        txn.put(self.tail_key, now.pack())

    def _fail(self, seen: Tail) -> None:
        """Make the partition read-only for every process, up to the durable end (P9)."""

        def step(txn: kv.Txn) -> None:
            row = txn.get(self.tail_key)
            if row is not None:
                txn.put(self.tail_key, tail.unpack(row)._replace(failed=True).pack())

        self.context.live.write(step)

    def _producers(self) -> dict[int, sequence.Producer]:
        prefix = sequence.ROWS + self.key

        def step(txn: kv.Txn) -> dict[int, sequence.Producer]:
            return {
                int.from_bytes(row_key[-8:], "big"): sequence.unpack(row)
                for row_key, row in kv.rows(txn, prefix)
            }

        return self.context.live.read(step)

    def _put_recovery_point(
        self, txn: kv.Txn, offset: int, producers: dict[int, sequence.Producer]
    ) -> None:
        info = catalog.partition(txn, self.key) or PartitionInfo()
        if offset > info.recovery_offset:
            catalog.put_partition(txn, self.key, info._replace(recovery_offset=offset))
            catalog.put_producers_blob(txn, self.key, sequence.pack_all(producers))

    # Cutting

    def truncate_to(self, offset: int) -> bool:
        """Remove every record at or past ``offset``; False if there is none (A34-A36).

        A batch that straddles ``offset`` goes entirely.  The leader epoch
        grows, so a reader that was past the cut learns of it.

        Raises:
            ValueError: The offset is negative.
        """
        if offset < 0:
            raise ValueError(f"offset {offset} is negative")
        self.context.check_writable()
        self.acquire()
        try:
            now = self.tail_locked()
            if offset >= now.next_offset:
                return False
            recovery.cut(self, now, offset)
            return True
        finally:
            self.release()
            self.context.wake.advance()

    # Reading

    def reader(self, offset: int) -> PartitionReader:
        """Return a reader that begins at ``offset``.

        Raises:
            OffsetOutOfRangeError: Below the start, or past the end (A17).
        """
        return PartitionReader(self, offset)

    def offset_for_timestamp(self, timestamp: int) -> OffsetAndTimestamp | None:
        """Return the first record, in offset order, at or after ``timestamp`` ms (B10)."""
        self.refresh()
        return lookup.offset_for_timestamp(self, self.tail(), timestamp)

    # The lock

    def acquire(self) -> None:
        timeout = self.context.lock_timeout
        if not self._lock.acquire(timeout=timeout):
            raise LockTimeoutError("another thread holds the partition", path=self._lock_path)
        try:
            if self._lock_fd is None:
                self._lock_fd = self.context.files.open(self._lock_path, write=True, create=True)
            self.context.files.lock(self._lock_fd, timeout)
        except BaseException:
            self._lock.release()
            raise

    def release(self) -> None:
        assert self._lock_fd is not None
        self.context.files.unlock(self._lock_fd)
        self._lock.release()

    @property
    def _lock_path(self) -> str:
        return f"locks/{self.topic_id}-{self.partition}"

    def close(self) -> None:
        """Let the files go; readers that have one keep it."""
        self._active = None
        fd, self._lock_fd = self._lock_fd, None
        if fd is not None:
            self.context.files.close(fd)


