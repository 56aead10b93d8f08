"""Reading a partition from an offset on, batch by batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from embedlog import catalog
from embedlog.batch import Batch, PlacedBatch, placed, trimmed
from embedlog.batch.wire import SCHEMA_VERSION, BufferLayout
from embedlog.catalog import SegmentInfo
from embedlog.config import TopicConfig
from embedlog.errors import (
    CorruptBatchError,
    CorruptionError,
    LogTruncatedError,
    NotLeaderOrFollowerError,
    OffsetOutOfRangeError,
    StorageError,
)
from embedlog.hints import VERIFY
from embedlog.partition import lookup
from embedlog.partition.tail import Tail
from embedlog.record import OffsetAndTimestamp
from embedlog.segment import CHUNK_BYTES, SegmentFile

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog
    from embedlog.schemas.topic_schema import TopicSchema

ColumnIndexes = Callable[[BufferLayout], Collection[int]]
"""Returns the columns of a schema that are needed, by their indexes."""

_ATTEMPTS = 20
"""How often a read starts again because other processes truncate and delete meanwhile."""


class PartitionReader:
    """A position in one partition, and the open file that it is in.

    A read at the end is cheap to repeat.  Not for two threads at once.
    """

    def __init__(self, log: PartitionLog, offset: int, leader_epoch: int | None = None) -> None:
        self._log = log
        self.offset = offset
        """The next offset to return."""
        self.leader_epoch = leader_epoch
        """The epoch of the log in which `offset` was valid; None is the current one."""
        self._info: SegmentInfo | None = None
        self._file: SegmentFile | None = None
        self._using = threading.Lock()
        """Held by `read`: only between two reads may another thread close the file."""
        self._position = 0
        self._version = -1
        """The snapshot by which `_info` was last checked to be current."""
        log.refresh()
        self._check_range(log.tail())

    def _check_range(self, tail: Tail) -> int:
        if tail.leader_epoch != self.leader_epoch:
            self._follow_epoch(tail)
        end = self._log.visible_end(tail)
        if tail.start_offset <= self.offset <= end:
            return end
        raise OffsetOutOfRangeError(
            f"Offset {self.offset} is outside {tail.start_offset}..{end}",
            **self._log.where,
            offset=self.offset,
            todo="Seek to an offset in that range.",
        )

    def _follow_epoch(self, tail: Tail) -> None:
        """Follow the log into another epoch, unless it was truncated below the position."""
        if self.leader_epoch is not None:
            log, own_epoch = self._log, self.leader_epoch
            epochs = log.context.state.read(lambda txn: catalog.epochs(txn, log.key))
            cut = min((start for epoch, start in epochs if epoch > own_epoch), default=self.offset)
            if cut < self.offset:
                raise LogTruncatedError(
                    f"The log was truncated at offset {cut} after the position was read",
                    **log.where,
                    offset=self.offset,
                    next_offset=cut,
                    todo=f"Seek to {cut}.",
                )
        self.leader_epoch = tail.leader_epoch

    def read(
        self,
        max_bytes: int = CHUNK_BYTES,
        tail: Tail | None = None,
        columns: ColumnIndexes | None = None,
    ) -> list[Batch]:
        """Return the next batches, about ``max_bytes`` of them; ``[]`` at the end.

        The first batch may begin below `offset`, if the offset lies inside it: not only at
        the first read, since compaction may have merged batches since the last one.

        Args:
            max_bytes: About how many bytes to read; at least one batch is returned.
            tail: A tail that the caller has just read.  It is used if it allows to read
                on, and the tail is read again before an error is raised.
            columns: Returns which columns of a schema are needed.  The others may be missing in
                the batches, and cannot be decoded then.

        Raises:
            OffsetOutOfRangeError: Retention deleted the records at the offset.
            LogTruncatedError: The log was truncated below the offset.
            CorruptBatchError: The next batch is damaged; another reader can
                begin after it.
        """
        with self._using:
            return self._read_next(max_bytes, tail, columns)

    @property
    def config(self) -> TopicConfig:
        """The settings of the topic, as of the last read."""
        return self._log.config

    def read_encoded(
        self, max_bytes: int = CHUNK_BYTES, tail: Tail | None = None
    ) -> list[PlacedBatch]:
        """Return the next batches as they are stored, to be written at the same offsets elsewhere.

        Their checksums are verified, their columns are not decoded.  Of a batch that begins
        below `offset` only the records from there on are returned.  They have their leader
        epochs, producers, timestamps and delete horizons.

        Args:
            max_bytes: As in `read`.
            tail: As in `read`.

        Raises:
            Exception: As `read`.
        """
        with self._using:
            offset = self.offset
            batches, result = self._read_next(max_bytes, tail, None), list[PlacedBatch]()
            for batch in batches:
                try:
                    if batch.base_offset < offset:
                        result.append(PlacedBatch(offset, trimmed(batch, offset)))
                    else:
                        result.append(placed(batch))
                except CorruptBatchError as error:
                    # The next call begins here.
                    self.offset, self._position = offset, batch.position
                    if not result:
                        raise self._located(error) from error
                    break
                offset = batch.next_offset
            if result and batches[0].is_typed:
                from embedlog.schemas.typed_batch import typed

                schema = self._stored_schema(batches[0])
                result = [PlacedBatch(begin, typed(batch, schema)) for begin, batch in result]
            return result

    def _stored_schema(self, batch: Batch) -> TopicSchema:
        """Return the version of a typed topic's schema that a batch has, for another log."""
        from embedlog.schemas.topic_schema import OTHER_LOG

        version = int(batch.layout.original.metadata[SCHEMA_VERSION])
        catalog = self._log.context.catalog
        schema = catalog.schema(catalog.topic(self._log.topic), version)
        assert schema is not None
        return schema.changed(topic_id=OTHER_LOG)

    def release_files(self) -> bool:
        """Close the file for now, unless a read is in progress; the next read opens it again."""
        if not self._using.acquire(False):
            return False
        self._info = self._file = None
        self._using.release()
        return True

    def _read_next(
        self, max_bytes: int, recent: Tail | None, columns: ColumnIndexes | None
    ) -> list[Batch]:
        log, offset = self._log, self.offset
        for attempt in range(_ATTEMPTS):
            log.refresh()
            tail, recent = recent, None
            end = None if tail is None else self._end_by(tail)
            guessed = end is not None
            if tail is None or end is None:
                tail = log.tail()
                end = self._check_range(tail)
            if self.offset == end:
                return []
            try:
                batches = self._read(tail, end, max_bytes, columns)
            except CorruptionError as error:
                if guessed or log.tail().leader_epoch != tail.leader_epoch:
                    # Perhaps truncated since, or a leader with fewer records was elected.
                    self._info = self._file = None
                    continue
                if isinstance(error, CorruptBatchError):
                    raise self._located(error) from error
                raise
            except (StorageError, NotLeaderOrFollowerError):
                # Retention unlinks after it drops the name, and a leader that was not in sync
                # may lack the file: look again.
                self._info = self._file = None
                if attempt == _ATTEMPTS - 1:
                    raise
                continue
            if batches is None:
                continue
            is_of_log = False
            try:
                # A leader that was elected meanwhile may have other records, and is truncated.
                is_of_log = log.has_same_leader(tail)
            finally:
                if not is_of_log:
                    self.offset, self._info, self._file = offset, None, None
            if is_of_log:
                return batches
        return []

    def _end_by(self, tail: Tail) -> int | None:
        """Return how far to read by the caller's tail; None if it must be read again.

        It is valid if it is of this epoch, and its start is not past this reader.
        """
        end = self._log.visible_end(tail)
        same_epoch = tail.leader_epoch == self.leader_epoch
        return end if same_epoch and tail.start_offset <= self.offset <= end else None

    def is_at_end(self, tail: Tail) -> bool:
        """Whether the position is at the end that readers see by this tail."""
        return self.offset == self._log.visible_end(tail)

    def _read(
        self, tail: Tail, end: int, max_bytes: int, columns: ColumnIndexes | None
    ) -> list[Batch] | None:
        """Read from the segment that holds the offset; None if the log changed meanwhile."""
        outdated = self._info is None or self._version != self._log.snapshot_version
        if outdated and not self._find(tail):
            return None
        while True:
            assert self._info is not None
            assert self._file is not None
            if self._info.sealed:
                stop = self._info.end_position
                batches = self._file.mapped(self._position, stop, max_bytes)
            elif self._info.id == tail.segment_id:
                batches = self._read_active(tail.high_watermark_position, max_bytes, columns)
            else:
                return None
            if not batches:
                if not self._info.sealed or not self._next_segment(tail):
                    return None
                continue
            wanted = self._advance(batches, end)
            if wanted or batches[-1].next_offset > end:
                return wanted

    def _read_active(self, stop: int, max_bytes: int, columns: ColumnIndexes | None) -> list[Batch]:
        file = self._file
        assert file is not None
        if columns is None:
            return file.read(self._position, stop, max_bytes)
        indexes = columns(file.layout)
        return file.read_columns(self._position, stop, max_bytes, indexes)

    def _advance(self, batches: list[Batch], end: int) -> list[Batch]:
        """Move past the batches, and return those that reach from the offset to the end."""
        last = batches[-1]
        if last is batches[0] and self.offset < last.next_offset <= end:
            # One whole batch: what a reader that was woken usually gets.
            self._position, self.offset = last.position + last.size, last.next_offset
            return batches
        wanted = [batch for batch in batches if self.offset < batch.next_offset <= end]
        if last.next_offset <= end:
            self._position = last.position + last.size
        elif wanted:
            self._position = wanted[-1].position + wanted[-1].size
        if wanted:
            self.offset = wanted[-1].next_offset
        return wanted

    def _find(self, tail: Tail) -> bool:
        """Open the segment of `offset`, at a position at or before it; False if it was dropped."""
        log, info, version = self._log, self._info, self._log.snapshot_version
        if info is not None:
            current = log.segment_at(info.base_offset)
            if current.id == info.id:
                if current != info:
                    # It was sealed meanwhile: the same bytes, from now on mapped.
                    self._info, self._file = current, log.open_segment(current)
                self._version = version
                return True
        segment = log.segment_at(self.offset)
        if segment.base_offset > self.offset or not tail.has_made(segment):
            # Dropped or begun since the tail was read: the next attempt reads it again.
            self._info = self._file = None
            return False
        self._open(segment)
        position = lookup.position_of_offset(log, segment, self.offset)
        if position is not None:
            self._position = position
        # As of before the lookup: if the manifest changed since, the next read checks it.
        self._version = version
        return True

    def _open(self, info: SegmentInfo) -> None:
        self._info, self._file = info, self._log.open_shared(info)
        self._position = self._file.start
        self._log.context.open_files.opened(self)

    def _next_segment(self, tail: Tail) -> bool:
        assert self._info is not None
        following = self._log.segment_after(self._info)
        # Segments leave no gap: if the next one does not follow directly, this segment was
        # replaced, or the segments between them were deleted.
        if (
            following is None
            or following.base_offset != self._info.next_offset
            or not tail.has_made(following)
        ):
            self._info = self._file = None
            return False
        self._open(following)
        return True

    def _located(self, error: CorruptBatchError) -> CorruptBatchError:
        """Return an error that names the partition, and the offset after the damage.

        The index says where reading can continue, since damage hides the end of a batch.
        """
        log, info, position = self._log, self._info, error.position or 0
        assert info is not None
        following = (entry for entry in lookup.entries(log, info) if entry.position > position)
        entry = next(following, None)
        next_good = info.next_offset if entry is None else entry.offset
        if next_good is None:
            log.refresh()
            next_good = log.visible_end(log.tail())
        facts = {**error.facts, **log.where, "offset": self.offset, "next_offset": next_good}
        todo = f"Seek to {next_good}, which can be read again." + VERIFY
        return CorruptBatchError(error.what, todo=todo, **facts)


def record_at(log: PartitionLog, offset: int) -> OffsetAndTimestamp | None:
    """Return the first record at or above an offset, with its time; None at the end.

    Raises:
        OffsetOutOfRangeError: The offset is below the start of the log, or above its end.
        CorruptBatchError: The batch is damaged.
    """
    reader = PartitionReader(log, offset)
    while batches := reader.read(1):
        for batch in batches:
            record = lookup.first_record(batch, offset)
            if record is not None:
                return record
    return None
