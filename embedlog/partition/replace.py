"""Replacing sealed segments by new ones that hold the same records, or some of them.

The files are written without a lock, where no reader looks; then one transaction on
`state` takes the old names off the manifest and puts the new ones on it, with their
indexes.  Killed before that, the log is the old one; after it, the new one.  In order:

1. Add the new file to the uncommitted files in `state`, then create it: no process takes
   it for garbage, and after a crash the next process knows what to remove.
2. Write it, flush it, likewise its key index, if it gets one, and flush the directory.
3. Under the partition's lock: call the fence, check that the segments are still those
   that were read, complete the new file in copies that are in sync since, and commit.
   The old files are uncommitted from here on.
4. Add the old files to the pending deletes in `live`, then delete their rows in `state`.
   Readers finish with the files they have open, and a reader that has looked up a name
   has time to open it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from embedlog import catalog, index, keyspace, kv
from embedlog.batch import EncodedBatch
from embedlog.catalog import SegmentInfo
from embedlog.errors import (
    DiskFullError,
    DurabilityError,
    EmbedlogError,
    FencedError,
    LockTimeoutError,
    StorageError,
)
from embedlog.index import IndexEntry
from embedlog.partition import key_index, leases, roll, segment_statistics, unnamed_files
from embedlog.partition.key_index import SegmentKeys
from embedlog.partition.tail import NO_TIME, Tail, latest_append_time
from embedlog.schemas.statistics import RowStatistics
from embedlog.segment import END_MARK, create

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

Fence = Callable[[], None]
"""Raises `FencedError` if its caller lost the right to change the log."""


def no_fence() -> None:
    """The fence of a caller that needs no right but the partition's lock."""


@contextmanager
def rewrite_lock(log: PartitionLog) -> Iterator[bool]:
    """Hold the lock for rewriting a partition's segments; yields whether it was free.

    One process at a time: two would do the same work, and one swap would be refused.
    Removes the uncommitted files of a process that was killed or gave up.
    """
    log.context.check_writable()
    files = log.context.files
    fd = files.open(f"locks/{log.topic_id}-{log.partition}.rewrite", write=True, create=True)
    try:
        free = files.try_lock(fd)
        if free and log.context.state.read(lambda txn: catalog.uncommitted_files(txn, log.key)):
            # A truncation in progress has such files too, and holds the partition's lock.  If
            # that is not free immediately, the next rewrite, or the last close, removes the files.
            with suppress(LockTimeoutError), log.locked(0):
                unnamed_files.discard(log, unnamed_files.uncommitted(log))
        yield free
    finally:
        files.close(fd)


def _retire(log: PartitionLog, segments: Sequence[SegmentInfo]) -> None:
    """Add replaced files to the pending deletes."""
    due = unnamed_files.delete_due_ms(log)

    def step(txn: kv.Txn) -> None:
        for segment in segments:
            unnamed_files.schedule_delete(txn, log, segment, due)

    log.context.live.write(step)
    unnamed_files.forget(log, segments)
    unnamed_files.sweep_soon(log)


class Replacement:
    """A new segment that will replace one or several.

    Used by one thread, which holds `rewrite_lock`; it must call `abandon` unless `swap`
    returned.  The batches cover the offsets of the segment without a gap, so that a reader
    at the end of the last batch is at the end of the segment.

    Args:
        log: The partition.
        base_offset: The base offset of the first segment that it replaces.
        columns: A segment that has the columns that it is to have.
        offsets: Whether it has a column of offsets, without which it cannot have gaps.
    """

    def __init__(
        self, log: PartitionLog, base_offset: int, columns: SegmentInfo, *, offsets: bool = True
    ) -> None:
        self._log = log
        self._uncommitted = True
        self._old: Sequence[SegmentInfo] = ()
        new = roll.with_columns(SegmentInfo(base_offset, 0, log.context.clock()), columns)
        self.info = unnamed_files.new_file(log, new)
        """Its row of the manifest; complete once it is swapped in."""
        head = roll.head_of(log, self.info, offsets)
        try:
            self._file = create(log.context.files, log.path_of(self.info), head)
            self.size = self._file.start
            """How many bytes were written so far."""
        except BaseException:
            self.abandon()
            raise
        self._entries: list[IndexEntry] = []
        self._unindexed, self._newest = 0, NO_TIME
        self._records = 0
        self._rows: list[RowStatistics] = []
        """The statistics of its batches, if the topic is typed."""

    def write(self, batch: EncodedBatch, base_offset: int, next_offset: int, epoch: int) -> None:
        """Write a batch that covers ``[base_offset, next_offset)``."""
        if self._unindexed > self._log.config.index_interval_bytes:
            self._entries.append(IndexEntry(base_offset, self.size, self._newest))
            self._unindexed = 0
        buffers = batch.stamp(base_offset, epoch, next_offset=next_offset)
        self.size += self._file.write(buffers, self.size)
        self._unindexed += batch.size
        self._records += batch.count
        if self.info.schema_version:
            self._rows.append(segment_statistics.of_encoded(batch))
        self._newest = max(self._newest, batch.max_timestamp)

    def _seal(self, old: Sequence[SegmentInfo], next_offset: int) -> None:
        self._file.write([END_MARK], self.size)
        try:
            self._file.sync()
        except DurabilityError as error:
            # Nothing is lost: the log is still in the old files.
            raise StorageError(error.what, **error.facts) from error
        self.info = self.info._replace(
            # As old as the first one: what is before it was sealed then (D12, C2).
            created_ms=old[0].created_ms,
            # And as new as the newest.
            appended_ms=latest_append_time(info.appended_ms for info in old),
            next_offset=next_offset,
            size=self.size + len(END_MARK),
            end_position=self.size,
            max_timestamp=None if self._newest == NO_TIME else self._newest,
            dense=self._records == next_offset - self.info.base_offset,
        )

    def swap(
        self,
        old: Sequence[SegmentInfo],
        *,
        fence: Fence = no_fence,
        cleaned: int | None = None,
        epoch: int | None = None,
        keys: SegmentKeys | None = None,
    ) -> None:
        """Replace consecutive sealed segments by this one.

        Args:
            old: The segments, as they were read.
            fence: Called under the partition's lock, right before the commit.
            cleaned: Up to which offset the log is compacted now, noted in the same transaction.
            epoch: The leader epoch in which it was decided which records to leave out: a
                truncation since may have removed the records that superseded them.
            keys: The keys of the new segment, for its key index.

        Raises:
            FencedError: Raised by the fence, or the segments were changed meanwhile.
            StorageError, LockTimeoutError: Nothing was changed.
        """
        log, self._old, end = self._log, old, old[-1].next_offset
        assert end is not None, "only sealed segments are replaced"
        self._seal(old, end)
        if keys is not None:
            # Housekeeping tries again what fails.
            with suppress(StorageError):
                key_index.write(log, self.info, keys)
        log.sync_directory(f"{log.directory}/{log.partition}")
        # A recovery that is due comes first: it would read the files that are replaced.
        with log.owned() as tail:
            _check_epoch(log, tail, epoch)
            fence()
            lease = leases.held_from(log)
            if lease is not None and lease.offset < end:
                raise _fenced(log, f"lease {lease.name!r} holds it")
            assert self._file.fd is not None
            log.context.files.complete(self._file.fd, self.info.size)
            log.context.state.write(lambda txn: self._swap(txn, old, cleaned))
        self._uncommitted = False
        # The swap is done; what fails here is left to the next sweep.
        with suppress(EmbedlogError):
            try:
                _retire(log, old)
            except DiskFullError:
                # There is no room for the rows: unlinking now makes room.
                unnamed_files.discard(log, old)

    def _swap(self, txn: kv.Txn, old: Sequence[SegmentInfo], cleaned: int | None) -> None:
        key = self._log.key
        _check_segments(self._log, txn, old)
        unnamed_files.drop_names(txn, key, old)
        keyspace.UNCOMMITTED_FILES.delete(txn, key, *self.info.key)
        catalog.put_segment(txn, key, self.info)
        keyspace.SEGMENT_INDEXES.put(txn, key, *self.info.key, value=index.pack(self._entries))
        segment_statistics.put(
            txn, self._log, self.info, segment_statistics.packed(self._log, self.info, self._rows)
        )
        if cleaned is not None:
            keyspace.CLEANED_OFFSETS.put(txn, key, value=cleaned)

    def abandon(self) -> None:
        """Remove the file, unless it was swapped in; a failure is left to the next sweep."""
        if self._uncommitted:
            self._uncommitted = False
            # `state` knows whether it was swapped in.  The result of a commit may have been
            # lost, as when Ctrl-C comes right after it, and then the old files are removed.
            with suppress(EmbedlogError):
                ids = {self.info.id, *(segment.id for segment in self._old)}
                # A truncation neither has the new file nor still needs the old ones.
                files = unnamed_files.uncommitted(self._log)
                unnamed_files.discard(self._log, [file for file in files if file.id in ids])


def _check_epoch(log: PartitionLog, tail: Tail, epoch: int | None) -> None:
    if epoch not in (None, tail.leader_epoch):
        raise _fenced(log, "it was truncated meanwhile")


def _check_segments(log: PartitionLog, txn: kv.Txn, old: Sequence[SegmentInfo]) -> None:
    """Raise if the segments were changed, or recovery would still scan them."""
    info = catalog.PARTITIONS.get(txn, log.key)
    current = {segment.base_offset: segment for segment in catalog.segments(txn, log.key)}
    if info is None or any(current.get(segment.base_offset) != segment for segment in old):
        raise _fenced(log, "its segments were changed meanwhile")
    # Above the recovery point, a recovery would take gaps for lost records.
    end = old[-1].next_offset if old else 0
    if end is None or end > info.recovery_offset:
        raise _fenced(log, "its segments are not on the disk yet")


def _fenced(log: PartitionLog, reason: str) -> FencedError:
    return FencedError(
        f"The partition was not rewritten: {reason}",
        **log.where,
        todo="Nothing was changed; the next round tries again.",
    )


def note_cleaned(
    log: PartitionLog,
    offset: int,
    last: Sequence[SegmentInfo],
    *,
    fence: Fence = no_fence,
    epoch: int | None = None,
) -> None:
    """Note how far the log is compacted after a pass that rewrote nothing.

    Args:
        log: The partition.
        offset: Up to which offset.
        last: The segment that holds this offset, or none.
        fence: As in `Replacement.swap`.
        epoch: As in `Replacement.swap`.

    Raises:
        FencedError: Raised by the fence, or the log was truncated meanwhile, so that
            what follows is dirty.
    """

    def step(txn: kv.Txn) -> None:
        _check_segments(log, txn, last)
        keyspace.CLEANED_OFFSETS.put(txn, log.key, value=offset)

    with log.owned() as tail:
        _check_epoch(log, tail, epoch)
        fence()
        log.context.state.write(step)
