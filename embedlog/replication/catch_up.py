"""Making the copy of a partition in one directory equal to the leader's.

A directory that comes back may have less than the leader, or, if it led without the others, a
history of its own.  The leader epochs of both logs say where the histories part
(`epochs.truncation_offset`); below that, and below what had been flushed, a file is trusted.
What else it has is compared with the leader's bytes, and cut where they differ.  Then the rest
is copied, batch by batch, if the leader's checksums are right.

Published bytes never change while the same directory leads, so they are read without a lock.
Each write takes the partition's lock, and first sees that no other directory has taken over:
that one may lack what was read, and this one may even be the leader by now.  The last step keeps
the lock, copies what came meanwhile, flushes, and has the copy join the ISR.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from operator import attrgetter
from typing import NamedTuple

from embedlog import catalog
from embedlog.catalog import SegmentInfo
from embedlog.errors import CorruptionError, StorageError
from embedlog.files.throttle import Throttle
from embedlog.hints import REPAIR
from embedlog.partition import lookup, recovery
from embedlog.partition.tail import Tail
from embedlog.replication.directory import LogDirectory
from embedlog.replication.epochs import EpochCache, truncation_point
from embedlog.replication.files import copy_range, make_parents
from embedlog.replication.isr import PartitionAssignment
from embedlog.replication.partition import LeaderAndEpoch, ReplicatedPartition
from embedlog.segment import CHUNK_BYTES, END_MARK, SegmentFile

_MOST_PASSES = 100


class _StoppedError(Exception):
    """The copying was told to stop while it waited."""


class History(NamedTuple):
    """What a directory knew of a partition before it came back."""

    epochs: EpochCache
    recovery_offset: int
    """What is below was flushed."""


class ReplicaCopy:
    """The copy of one partition in one directory, while it catches up.

    Args:
        log: The partition.
        directory: The one that catches up; online, and not in sync.
        trusted_offset: Below it the segments of an in-sync copy are the leader's.
        throttle: Limits the copying.
        stopped: Whether to give up.
        progress: Called with the number of bytes after each chunk that was copied.
    """

    def __init__(
        self,
        log: ReplicatedPartition,
        directory: LogDirectory,
        *,
        trusted_offset: int = 0,
        throttle: Throttle | None = None,
        stopped: Callable[[], bool] = lambda: False,
        progress: Callable[[int], object] = bool,
    ) -> None:
        self.log, self.directory = log, directory
        self._trusted_offset, self._throttle = trusted_offset, throttle or Throttle()
        self._stopped, self._progress = stopped, progress
        self._leader: LeaderAndEpoch | None = None
        """Of whom the copy is."""
        self._guard: Callable[[], AbstractContextManager[object]] = self._locked
        """Makes what is held around each write."""
        self._done: dict[int, int] = {}
        """How many bytes of each segment, by its id, are known to be equal, and flushed."""
        self._mended: set[int] = set()
        """The segments in which damage was found at the leader, by their ids."""
        self.copied_bytes = self.compared_bytes = self.removed_files = 0

    def catch_up(self, history: History | None = None) -> bool:
        """Copy all that is missing; return False if it was told to stop.

        Args:
            history: What the directory knew of the partition, if its files may have something
                of it.

        Raises:
            NotLeaderOrFollowerError: Another leader was elected, and a new object compares what
                was copied; or the partition has no copy in the directory any more.
            CorruptionError: The leader's copy is damaged; nothing of that was copied.
        """
        self._leader = self.log.leader_and_epoch()
        if history is not None:
            self._trusted_offset = _trusted_offset(self.log, history)
        for _ in range(_MOST_PASSES):
            before = self.copied_bytes + self.compared_bytes
            try:
                self._pass(self.log.tail())
            except _StoppedError:
                return False
            if self.copied_bytes + self.compared_bytes - before < CHUNK_BYTES:
                break
        return True

    def join(self) -> None:
        """Copy the rest under the partition's lock, and have the copy join the ISR.

        Raises:
            NotLeaderOrFollowerError: Another leader was elected since `catch_up` began, or the
                partition has no copy in the directory any more.
        """
        log, this = self.log, self.directory.id
        with log.locked() if self._leader is None else log.locked_under(self._leader, this):
            tail = recovery.tail_locked(log)
            leader = log.assignment.leader
            assert leader is not None
            self._leader = LeaderAndEpoch(leader, tail.leader_epoch)
            self._throttle, self._stopped, self._guard = Throttle(), bool, nullcontext
            self._pass(tail)
            self.removed_files += log.remove_unnamed(self.directory.files)
            if log.context.durability == "fsync" or self.copied_bytes or self.removed_files:
                for path in (*reversed(log.directories),):
                    self.directory.files.sync_directory(path)

            def expand(assignment: PartitionAssignment) -> PartitionAssignment:
                # With another leader, or none, the next attempt begins again.
                may_join = assignment.leader == leader and this in assignment.replicas
                return assignment.expand([this]) if may_join else assignment

            log.controller.change_assignment(log.key, expand)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the partition's lock, if the leader is still the one of before."""
        self._check_stopped()
        assert self._leader is not None
        with self.log.locked_under(self._leader, self.directory.id):
            yield

    def _check_stopped(self) -> None:
        if self._stopped():
            raise _StoppedError

    def _pass(self, tail: Tail) -> None:
        segments = self.log.context.state.read(lambda txn: catalog.segments(txn, self.log.key))
        for info in segments:
            self._check_stopped()
            stop = info.size if info.sealed else tail.log_end_position
            if not info.sealed and info.id != tail.segment_id:
                continue  # a roll is under way; its file has nothing yet
            if self._done.get(info.id) != stop:
                self._copy(info, stop)

    def _copy(self, info: SegmentInfo, stop: int) -> None:
        """Make one file equal to the leader's up to a position."""
        path = self.log.path_of(info)
        assert self._leader is not None
        leader = self.log.controller.directories.get(self._leader.leader)
        if leader is None:
            raise self.log.reassigned()
        try:
            source = self.log.open_segment(info, files=leader.files)
        except StorageError as error:
            if error.missing:
                return  # compacted or deleted meanwhile; the next pass sees that
            raise
        files = self.directory.files
        try:
            make_parents(files, path)
            with files.opened(path, write=True, create=True) as target:
                self._copy_file(info, leader, source, target, stop)
                files.sync(target)
        finally:
            with suppress(StorageError):
                source.close()
        self._done[info.id] = stop

    def _copy_file(
        self, info: SegmentInfo, leader: LogDirectory, source: SegmentFile, target: int, stop: int
    ) -> None:
        fd, files = source.fd, self.directory.files
        assert fd is not None
        size = files.size(target)
        same = self._equal_bytes(info, (leader, fd), target, min(size, stop))
        if size > same:
            # All of it before the cut: of two copies that differ, the leader's may be the bad one.
            for _ in self._checked_ranges(info, leader, source, same, stop):
                self._check_stopped()
            with self._guard():
                files.truncate(target, same)
        for start, end in self._checked_ranges(info, leader, source, same, stop):
            self._throttle.spend(end - start, self._check_stopped)
            self.copied_bytes += copy_range(
                *((leader, fd), (self.directory, target), start, end), guard=self._guard
            )
            self._progress(end - start)

    def _checked_ranges(
        self, info: SegmentInfo, leader: LogDirectory, source: SegmentFile, start: int, stop: int
    ) -> Iterator[tuple[int, int]]:
        """Yield the ranges of ``[start, stop)`` of the leader's file, their batches checked.

        As Kafka's followers do, so that damage of one disk is not copied to the others.

        Raises:
            CorruptionError: The leader's copy is damaged.
        """
        batches_end = min(info.end_position, stop) if info.sealed else stop
        try:
            position = self._batch_start(info, source, start, batches_end)
            while position < batches_end:
                batches = source.read_fast(position, batches_end)
                for batch in batches:
                    batch.check_crcs()
                end = batches[-1].position + batches[-1].size
                yield start, end
                start = position = end
            mark = source.bytes(batches_end, stop - batches_end)
            if not END_MARK.endswith(mark):
                raise CorruptionError(f"The stream ends with {mark!r}")
        except CorruptionError as error:
            if info.id not in self._mended and self.log.mend([info]):
                self._mended.add(info.id)
                yield from self._checked_ranges(info, leader, source, start, stop)
                return
            with self._guard():  # raises if there is another leader by now, which may lack it
                raise CorruptionError(
                    f"The leader's copy is damaged, and is not copied: {error.what}",
                    **self.log.where,
                    path=f"{leader.path}/{source.path}",
                    todo="No other copy that is in sync has it." + REPAIR,
                ) from error
        if start < stop:
            yield start, stop

    def _batch_start(self, info: SegmentInfo, source: SegmentFile, position: int, stop: int) -> int:
        """Return where the batch at a position begins; batches end at ``stop``."""
        if position >= stop or self._done.get(info.id) == position:
            return position
        indexed = lookup.searchable(self.log, info)
        count = bisect_right(indexed, position, key=attrgetter("position"))
        start = indexed[count - 1].position if count else source.start
        if start < position:
            for batch in source.heads(start, stop):
                start = batch.position
                if start + batch.size > position:
                    break
        return start

    def _equal_bytes(
        self, info: SegmentInfo, source: tuple[LogDirectory, int], target: int, stop: int
    ) -> int:
        """Return how many bytes of the file are the leader's, up to a position."""
        position = min(self._done.get(info.id, 0), stop)
        if info.sealed and (info.next_offset or 0) <= self._trusted_offset:
            # Its batches.  Where the leader has the end mark, this one may have more of them.
            position = max(position, min(info.end_position, stop))
        while position < stop:
            length = min(CHUNK_BYTES, stop - position)
            theirs = source[0].files.read(source[1], length, position)
            ours = self.directory.files.read(target, length, position)
            self.compared_bytes += len(ours)
            if ours != theirs:
                return position + _common_length(ours, theirs)
            position += len(ours)
        return position


def _common_length(first: bytes, second: bytes) -> int:
    """Return how many bytes two strings have in common at their beginning.

    >>> _common_length(b"flights", b"fleet")
    2
    """
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _trusted_offset(log: ReplicatedPartition, history: History) -> int:
    """Return up to where a history is that of the log, and was flushed."""
    epochs = log.context.state.read(lambda txn: catalog.epochs(txn, log.key))
    # Both ends are at least where the flushed part of the directory's log ends.
    end = history.recovery_offset
    return min(truncation_point(history.epochs, end, epochs, end), end)
