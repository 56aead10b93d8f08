"""A position in one partition, and the batches from there on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from embedlog import catalog
from embedlog.batch import Batch
from embedlog.catalog import SegmentInfo
from embedlog.errors import (
    CorruptBatchError,
    LogTruncatedError,
    OffsetOutOfRangeError,
    StorageError,
)
from embedlog.partition import lookup
from embedlog.partition.tail import Tail
from embedlog.segment import CHUNK_BYTES, SegmentFile

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

_TRIES = 20
"""Looks at a log that others cut and delete, one after the other, before it is an error."""


class PartitionReader:
    """Reads a partition batch by batch; cheap to ask again at the end.

    Keeps its place in the file between calls.  Not for two threads at once.
    """

    def __init__(self, log: PartitionLog, offset: int, leader_epoch: int | None = None) -> None:
        self._log = log
        self.offset = offset
        """The next offset to return."""
        self.leader_epoch = leader_epoch
        """The epoch of the log in which `offset` was known to be right; None is today's."""
        self._info: SegmentInfo | None = None
        self._file: SegmentFile | None = None
        self._using = threading.Lock()
        """Held by `read`: only between two reads may another thread close the file."""
        self._position = 0
        self._version = -1
        """That of the manifest by which `_info` was last found to be current."""
        log.refresh()
        self._check_range(log.tail())

    def _check_range(self, now: Tail) -> int:
        if now.leader_epoch != self.leader_epoch:
            self._check_epoch(now)
        end = self._log.visible_end(now)
        if now.start_offset <= self.offset <= end:
            return end
        raise OffsetOutOfRangeError(
            f"the log holds offsets {now.start_offset} to {end}",
            topic=self._log.topic,
            partition=self._log.partition,
            offset=self.offset,
            todo="seek to one of them",
        )

    def _check_epoch(self, now: Tail) -> None:
        """Follow the log into another epoch, unless it was cut below the position (A36, A37)."""
        if self.leader_epoch is not None:
            log, mine = self._log, self.leader_epoch
            epochs = log.context.state.read(lambda txn: catalog.epochs(txn, log.key))
            cut = min((start for epoch, start in epochs if epoch > mine), default=self.offset)
            if cut < self.offset:
                raise LogTruncatedError(
                    f"the log was cut at offset {cut} after the position was read",
                    topic=log.topic,
                    partition=log.partition,
                    offset=self.offset,
                    next_offset=cut,
                    todo=f"seek to {cut}",
                )
        self.leader_epoch = now.leader_epoch

    def read(self, max_bytes: int = CHUNK_BYTES, known: Tail | None = None) -> list[Batch]:
        """Return the next batches, about ``max_bytes`` of them; ``[]`` at the end.

        The first may begin below `offset`, where that lies inside a batch: not only at
        the first read, for compaction may have merged batches since the last one.
        ``known`` is an end that the caller has just read: believed where it allows
        to go on, and read again before anything is found wrong.

        Raises:
            OffsetOutOfRangeError: Retention overtook this reader.
            LogTruncatedError: The log was cut below its offset.
            CorruptBatchError: The next batch is damaged; a reader may
                begin past it.
        """
        with self._using:
            return self._read_next(max_bytes, known)

    def release_files(self) -> bool:
        """Close the file for now, unless a read goes on; the next read finds its place again."""
        if not self._using.acquire(False):
            return False
        self._info = self._file = None
        self._using.release()
        return True

    def _read_next(self, max_bytes: int, known: Tail | None) -> list[Batch]:
        log = self._log
        for attempt in range(_TRIES):
            log.refresh()
            now, known = known, None
            end = None if now is None else self._end_by(now)
            guessed = end is not None
            if now is None or end is None:
                now = log.tail()
                end = self._check_range(now)
            if self.offset == end:
                return []
            try:
                found = self._read(now, end, max_bytes)
            except CorruptBatchError as error:
                if guessed:
                    continue
                raise self._located(error) from error
            except StorageError:
                # Retention unlinks after it drops the name: look again.
                self._info = self._file = None
                if attempt == _TRIES - 1:
                    raise
                continue
            if found is not None:
                return found
        return []

    def _end_by(self, known: Tail) -> int | None:
        """How far to read by an end that the caller read; None if it is not to be believed.

        It is if it is of this epoch, and has not overtaken this reader.
        """
        end = self._log.visible_end(known)
        believed = known.leader_epoch == self.leader_epoch
        return end if believed and known.start_offset <= self.offset <= end else None

    def is_at_end(self, now: Tail) -> bool:
        """Whether it has come as far as this end of the partition allows."""
        return self.offset == self._log.visible_end(now)

    def _read(self, now: Tail, end: int, max_bytes: int) -> list[Batch] | None:
        """Read from the segment that holds the offset; None if it moved on meanwhile."""
        outdated = self._info is None or self._version != self._log.version
        if outdated and not self._find(now):
            return None
        while True:
            assert self._info is not None
            assert self._file is not None
            if self._info.sealed:
                stop = self._info.end_position
                found = self._file.mapped(self._position, stop, max_bytes)
            elif self._info.id == now.segment_id:
                found = self._file.read(self._position, now.high_watermark_position, max_bytes)
            else:
                return None
            if not found:
                if not self._info.sealed or not self._next_segment(now):
                    return None
                continue
            wanted = self._take(found, end)
            if wanted or found[-1].next_offset > end:
                return wanted

    def _take(self, found: list[Batch], end: int) -> list[Batch]:
        """Move past what was found, and return the part that is asked for."""
        last = found[-1]
        if last is found[0] and self.offset < last.next_offset <= end:
            # One batch, all of it: what a reader finds that slept.
            self._position, self.offset = last.position + last.size, last.next_offset
            return found
        wanted = [one for one in found if self.offset < one.next_offset <= end]
        if last.next_offset <= end:
            self._position = last.position + last.size
        elif wanted:
            self._position = wanted[-1].position + wanted[-1].size
        if wanted:
            self.offset = wanted[-1].next_offset
        return wanted

    def _find(self, now: Tail) -> bool:
        """Have the segment of `offset` open, at a position at or before it; False if it is gone."""
        log, info, version = self._log, self._info, self._log.version
        if info is not None:
            current = log.segment_at(info.base_offset)
            if current.id == info.id:
                if current != info:
                    # It was sealed meanwhile: the same bytes, from now on mapped.
                    self._info, self._file = current, log.open_segment(current)
                self._version = version
                return True
        found_info = log.segment_at(self.offset)
        if found_info.base_offset > self.offset or not now.has_made(found_info):
            # Dropped or begun since the look at the tail: the next look tells which.
            self._info = self._file = None
            return False
        self._open(found_info)
        assert self._info is not None
        assert self._file is not None
        found = lookup.position_of_offset(log, self._info, self.offset)
        self._position = self._file.start if found is None else found
        # Of before the look: if the manifest moved on since, the next read looks again.
        self._version = version
        return True

    def _open(self, info: SegmentInfo) -> None:
        active = None if info.sealed else self._log.open_active(info.id)
        self._info, self._file = info, active or self._log.open_segment(info)
        self._position = self._file.start
        self._log.context.open_files.opened(self)

    def _next_segment(self, now: Tail) -> bool:
        assert self._info is not None
        following = self._log.segment_after(self._info)
        # Segments leave no gap: what does not follow at once replaced, or outlived, what did.
        if (
            following is None
            or following.base_offset != self._info.next_offset
            or not now.has_made(following)
        ):
            self._info = self._file = None
            return False
        self._open(following)
        return True

    def _located(self, error: CorruptBatchError) -> CorruptBatchError:
        place = {
            "topic": self._log.topic,
            "partition": self._log.partition,
            "offset": self.offset,
        }
        good = self._good_after(error.position or 0)
        todo = f"seek to {good}, which can be read again, and run `embedlog verify`"
        facts = {**error.facts, **place, "next_offset": good}
        return CorruptBatchError(error.what, todo=todo, **facts)

    def _good_after(self, position: int) -> int:
        """Where reading can go on: damage hides where the batch ends, the index does not."""
        info = self._info
        assert info is not None
        for entry in lookup.entries(self._log, info):
            if entry.position > position:
                return entry.offset
        return self._log.end_offset() if info.next_offset is None else info.next_offset
