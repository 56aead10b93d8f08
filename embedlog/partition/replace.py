"""Swapping sealed segments for new ones that hold the same records, or some of them.

The files are made where no lock is held and nobody looks; then one transaction
on `state` takes the old names off the manifest and puts the new ones on it,
with their indexes.  Killed before that, the log is the old one; after it, the
new one.  In order (R5):

1. Name the new file as *passing* in `state`, then create it: whoever looks for
   garbage leaves it alone, and whoever comes after a crash knows what to remove.
2. Write it, flush it, flush the directory.
3. Under the partition's lock: the fence, a look whether the segments are still
   those that were read, and the commit.  The old names are passing from here on.
4. Doom the old files (`dooming`), then forget that they are passing.  Readers finish
   with what they have open, and who looked a name up has time to open it.
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
from embedlog.partition import flush, leases, pending_deletes, roll, tail
from embedlog.partition.tail import Tail
from embedlog.segment import END_MARK, create

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

Fence = Callable[[], None]
"""Raises `FencedError` if its caller may not change the log any more."""

_NO_TIME = -(1 << 63)


def anybody() -> None:
    """The fence of whoever needs no right but the partition's lock."""


@contextmanager
def claimed(log: PartitionLog) -> Iterator[bool]:
    """Have the right to rewrite a partition's segments, and say whether it was free.

    One process at a time: two would do the same work, of which one swap is refused.
    What one that was killed left of its files is removed first.
    """
    log.context.check_writable()
    files = log.context.files
    claim = files.open(f"locks/{log.topic_id}-{log.partition}.rewrite", write=True, create=True)
    try:
        free = files.try_lock(claim)
        if free:
            _sweep(log)
        yield free
    finally:
        files.close(claim)


def _sweep(log: PartitionLog) -> None:
    """Remove the files on their way, of a process that was killed or gave up; under the claim.

    A truncation that goes on has such files too, and holds the partition's lock.  If that
    is not free at once, the files are left to the next claim, or to the last close.
    """
    if not log.context.state.read(lambda txn: catalog.uncommitted_files(txn, log.key)):
        return
    with suppress(LockTimeoutError):
        log.acquire(0)
        try:
            _discard(log, _passing(log))
        finally:
            log.release()


def _passing(log: PartitionLog) -> list[SegmentInfo]:
    """Return the files on their way, as they are on the disk too."""

    def step(txn: kv.Txn) -> list[SegmentInfo]:
        left = catalog.uncommitted_files(txn, log.key)
        for segment in left:
            keyspace.UNCOMMITTED_FILES.put(txn, log.key, *segment.key, value=None)
        return left

    # A commit, though it says nothing new: after one that failed it is not known what is
    # on the disk, and a file must not go if a power cut may bring its name back.
    return log.context.state.write(step)


def _discard(log: PartitionLog, segments: Sequence[SegmentInfo]) -> None:
    """Unlink what never was in the manifest, and what nobody can be looking for any more."""
    for segment in segments:
        log.context.files.unlink(log.path_of(segment), missing_ok=True)
    forget(log, segments)


def forget(log: PartitionLog, segments: Sequence[SegmentInfo]) -> None:
    """Drop the notes of files on their way: they are gone by now, or doomed."""

    def step(txn: kv.Txn) -> None:
        for segment in segments:
            keyspace.UNCOMMITTED_FILES.delete(txn, log.key, *segment.key)

    # After the files are gone or doomed: a name forgotten first would leave garbage behind.
    log.context.state.write(step)


def _retire(log: PartitionLog, segments: Sequence[SegmentInfo]) -> None:
    """Let the files go that were replaced, once their time is over."""
    due = pending_deletes.due(log)

    def step(txn: kv.Txn) -> None:
        for segment in segments:
            pending_deletes.put(txn, log, segment, due)

    log.context.live.write(step)
    forget(log, segments)
    pending_deletes.sweep_soon(log)


class Replacement:
    """A segment on its way into the manifest, in the place of one or several.

    Belongs to one thread, which has the claim of `claimed`; `abandon` it unless
    `swap` returned.  Its batches lie in ``[base, next)`` offsets and cover it
    without a gap, so that a reader that comes to the end of the last one has
    come to the end of the segment.

    Args:
        log: The partition.
        base_offset: Of the first one that it replaces.
        headers: Whether it has the headers column.
    """

    def __init__(self, log: PartitionLog, base_offset: int, *, headers: bool) -> None:
        self._log = log

        def step(txn: kv.Txn) -> SegmentInfo:
            number = catalog.next_number(txn, "segment")
            new = SegmentInfo(base_offset, number, log.context.clock(), headers=headers)
            keyspace.UNCOMMITTED_FILES.put(txn, log.key, *new.key, value=None)
            return new

        self._passing = True
        self._old: Sequence[SegmentInfo] = ()
        self.info = log.context.state.write(step)
        """Its line of the manifest; complete once it is swapped in."""
        schema = roll.schema_of(log, self.info, offsets=True)
        try:
            self._file = create(log.context.files, log.path_of(self.info), schema)
        except BaseException:
            self.abandon()
            raise
        self._position = self._file.start
        self._entries: list[IndexEntry] = []
        self._unindexed, self._latest = 0, _NO_TIME
        self._records = 0

    @property
    def size(self) -> int:
        """Bytes that were written so far."""
        return self._position

    def write(self, one: EncodedBatch, base_offset: int, next_offset: int, epoch: int) -> None:
        """Write a batch that covers ``[base_offset, next_offset)``."""
        if self._unindexed > self._log.config.index_interval_bytes:
            self._entries.append(IndexEntry(base_offset, self._position, self._latest))
            self._unindexed = 0
        buffers = one.stamp(base_offset, epoch, next_offset=next_offset)
        self._position += self._file.write(buffers, self._position)
        self._unindexed += one.size
        self._records += one.count
        self._latest = max(self._latest, one.max_timestamp)

    def _seal(self, old: Sequence[SegmentInfo]) -> None:
        self._file.write([END_MARK], self._position)
        try:
            self._file.sync()
        except DurabilityError as error:
            # Nobody's loss: the log is on the old files still, and goes on.
            raise StorageError(error.what, **error.facts) from error
        next_offset = old[-1].next_offset
        assert next_offset is not None, "only sealed segments are replaced"
        self.info = self.info._replace(
            # As old as the first one: what lies before it was sealed then (D12, C2).
            created_ms=old[0].created_ms,
            # And as young as the youngest.
            appended_ms=tail.latest_append_time(info.appended_ms for info in old),
            next_offset=next_offset,
            size=self._position + len(END_MARK),
            end_position=self._position,
            max_timestamp=None if self._latest == _NO_TIME else self._latest,
            dense=self._records == next_offset - self.info.base_offset,
        )

    def swap(
        self,
        old: Sequence[SegmentInfo],
        *,
        fence: Fence = anybody,
        cleaned: int | None = None,
        epoch: int | None = None,
    ) -> None:
        """Put the segment in the place of a run of sealed ones.

        Args:
            old: The run, as it was read.
            fence: Called under the partition's lock, right before the commit.
            cleaned: How far compaction has come with this, noted in the same transaction.
            epoch: The leader epoch in which it was decided what to leave out: a cut since
                may have taken the records that others were left out for.

        Raises:
            FencedError: The fence's, or the segments were changed meanwhile.
            StorageError, LockTimeoutError: Nothing was changed.
        """
        log, self._old = self._log, old
        assert old[-1].next_offset is not None, "only sealed segments are replaced"
        self._seal(old)
        self._sync_names()
        log.acquire()
        try:
            # First of all: a recovery that is due would look for what is about to go.
            _check_epoch(log, log.tail_locked(), epoch)
            fence()
            _check_leases(log, old)
            log.context.state.write(lambda txn: self._swap(txn, old, cleaned))
        finally:
            log.release()
        self._passing = False
        # The swap stands; what fails here is left to whoever sweeps next.
        with suppress(EmbedlogError):
            try:
                _retire(log, old)
            except DiskFullError:
                # No room to doom them: they go at once, and make some.
                _discard(log, old)

    def _sync_names(self) -> None:
        log = self._log
        try:
            log.context.files.sync_directory(f"{log.directory}/{log.partition}")
        except DurabilityError as error:
            # The names of others were in it too, and nobody will be told again (P9).
            raise flush.fail(log, error) from error

    def _swap(self, txn: kv.Txn, old: Sequence[SegmentInfo], cleaned: int | None) -> None:
        key = self._log.key
        _check(self._log, txn, old)
        for segment in old:
            catalog.drop_segment(txn, key, segment)
            keyspace.UNCOMMITTED_FILES.put(txn, key, *segment.key, value=None)
        keyspace.UNCOMMITTED_FILES.delete(txn, key, *self.info.key)
        catalog.put_segment(txn, key, self.info)
        keyspace.SEGMENT_INDEXES.put(txn, key, *self.info.key, value=index.pack(self._entries))
        if cleaned is not None:
            keyspace.CLEANED_OFFSETS.put(txn, key, value=cleaned)

    def abandon(self) -> None:
        """Remove what was written, if it was not swapped in; what fails is left to the next one."""
        if self._passing:
            self._passing = False
            # `state` knows whether it was: the answer of a commit may have been lost, as
            # where Ctrl-C comes right after it, and then the old files are to go.
            with suppress(EmbedlogError):
                mine = {self.info.id, *(segment.id for segment in self._old)}
                # No truncation has the one, or still needs the others.
                _discard(self._log, [each for each in _passing(self._log) if each.id in mine])


def _check_epoch(log: PartitionLog, now: Tail, epoch: int | None) -> None:
    if epoch not in (None, now.leader_epoch):
        raise _overtaken(log, "it was cut meanwhile")


def _check_leases(log: PartitionLog, old: Sequence[SegmentInfo]) -> None:
    lease = leases.held_from(log)
    if lease is not None and lease.offset < (old[-1].next_offset or 0):
        raise _overtaken(log, f"lease {lease.name!r} holds it")


def _check(log: PartitionLog, txn: kv.Txn, old: Sequence[SegmentInfo]) -> None:
    """Refuse to replace what is not there any more, or what recovery would still look into."""
    info = catalog.PARTITIONS.get(txn, log.key)
    now = {segment.base_offset: segment for segment in catalog.segments(txn, log.key)}
    if info is None or any(now.get(segment.base_offset) != segment for segment in old):
        raise _overtaken(log, "its segments were changed meanwhile")
    # Past the recovery point a scan takes gaps for lost records.
    end = old[-1].next_offset if old else 0
    if end is None or end > info.recovery_offset:
        raise _overtaken(log, "its segments are not on the disk yet")


def _overtaken(log: PartitionLog, why: str) -> FencedError:
    return FencedError(
        f"the partition was not rewritten: {why}",
        topic=log.topic,
        partition=log.partition,
        todo="nothing was changed; the next round begins anew",
    )


def note_cleaned(
    log: PartitionLog,
    offset: int,
    last: Sequence[SegmentInfo],
    *,
    fence: Fence = anybody,
    epoch: int | None = None,
) -> None:
    """Note how far compaction has come where there was nothing to rewrite.

    Args:
        log: The partition.
        offset: How far.
        last: The segment that this lies in, or none.
        fence: As in `Replacement.swap`.
        epoch: The same.

    Raises:
        FencedError: The fence's, or the log was cut meanwhile: what follows the cut is dirty.
    """

    def step(txn: kv.Txn) -> None:
        _check(log, txn, last)
        keyspace.CLEANED_OFFSETS.put(txn, log.key, value=offset)

    log.acquire()
    try:
        _check_epoch(log, log.tail_locked(), epoch)
        fence()
        log.context.state.write(step)
    finally:
        log.release()


def flush_up_to(log: PartitionLog, upto: int) -> None:
    """Put the partition on the disk, and its producers' numbers: what is rewritten must be there.

    Does nothing where all below ``upto`` is there already.

    Raises:
        DurabilityError: It failed, now or before; nothing may be rewritten then.
    """
    info = log.context.state.read(lambda txn: catalog.PARTITIONS.get(txn, log.key))
    if info is None or info.recovery_offset < upto or log.tail().failed:
        flush.flush([log])
