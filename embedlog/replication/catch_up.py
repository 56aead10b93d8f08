"""Making the copy of a partition in one directory equal to the leader's.

A directory that comes back may have less than the leader, or, if another one was elected that
was not in sync, other records.  What it had flushed is noted when it comes online
(`PartitionAssignment.flushed`).  If the log still has the same leader epoch at the last of these
records, they are the log's, as in Kafka (KIP-101), and its sealed segments are trusted.
All else is compared with the leader's bytes, whose checksums are right, and written where it
differs.

Published bytes never change while the same directory leads, so they are read without a lock.
Each write takes the partition's lock, and first sees that no other directory has taken over:
that one may lack what was read, and this one may even be the leader by now.  The last step keeps
the lock, copies what came meanwhile, flushes, and has the copy join the ISR.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from embedlog import catalog
from embedlog.catalog import SegmentInfo
from embedlog.errors import (
    CorruptionError,
    EmbedlogError,
    NotLeaderOrFollowerError,
    ReplicaNotAvailableError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.failures import Failures
from embedlog.files.throttle import Throttle
from embedlog.hints import REPAIR
from embedlog.partition import leader_epochs
from embedlog.partition.tail import Tail
from embedlog.record import TopicPartition
from embedlog.replication.directory import LogDirectory
from embedlog.replication.files import lock_copy, remove_copies
from embedlog.replication.mend import Piece, SegmentCopy, examine_all, pieces
from embedlog.replication.partition import LeaderAndEpoch, ReplicatedPartition
from embedlog.replication.root import ReplicatedRoot
from embedlog.segment import CHUNK_BYTES

_MOST_PASSES = 100
PAUSES = (1.0, 60.0)
"""How many seconds a copy that failed is left out at first, and at most."""
_logger = logging.getLogger("embedlog.replication")


class _StoppedError(Exception):
    """The copying was told to stop while it waited."""


@dataclass
class ReplicaCopy:
    """The copy of one partition in one directory, while it catches up."""

    log: ReplicatedPartition
    directory: LogDirectory
    """The one that catches up; online, and not in sync."""
    throttle: Throttle = field(default_factory=Throttle)
    stopped: Callable[[], bool] = bool
    """Whether to give up."""
    progress: Callable[[int], object] = bool
    """Called with the number of bytes after each piece that was copied."""
    _leader: LeaderAndEpoch = field(init=False)
    """Of whom the copy is."""
    _is_locked: bool = False
    """Whether the partition's lock is held; otherwise it is taken for each write."""
    _trusted_offset: int = 0
    """Below it the sealed segments are the leader's."""
    _done: dict[int, int] = field(default_factory=dict)
    """How many bytes of each segment, by its id, are known to be equal, and flushed."""
    _mended: set[int] = field(default_factory=set)
    """The segments in which damage was found at the leader, by their ids."""

    def catch_up(self) -> bool:
        """Copy all that is missing; return False if it was told to stop.

        Raises:
            NotLeaderOrFollowerError: Another leader was elected, and a new object compares what
                was copied; or the partition has no copy in the directory any more.
            CorruptionError: The leader's copy is damaged; nothing of that was copied.
        """
        self._leader = self.log.leader_and_epoch()
        self._trusted_offset = self._flushed_offset()
        with suppress(_StoppedError):
            for _ in range(_MOST_PASSES):
                if self._pass(self.log.tail()) < CHUNK_BYTES:
                    break
            return True
        return False

    def _flushed_offset(self) -> int:
        """Return up to where the copy is the leader's, and was flushed, before it went offline."""
        for flushed in self.log.assignment.flushed:
            if flushed.directory == self.directory.id:
                epochs = self.log.context.state.read(lambda txn: catalog.epochs(txn, self.log.key))
                if leader_epochs.epoch_at(epochs, flushed.offset - 1) == flushed.leader_epoch:
                    return flushed.offset
        return 0

    def join(self) -> None:
        """Copy the rest under the partition's lock, and have the copy join the ISR.

        Raises:
            NotLeaderOrFollowerError: Another leader was elected since `catch_up` began, or the
                partition has no copy in the directory any more.
        """
        log, this, leader = self.log, self.directory.id, self._leader.leader
        with log.locked_under(self._leader, self.directory) as tail:
            self.throttle, self.stopped, self._is_locked = Throttle(), bool, True
            self._pass(tail)
            if not (tail.failed or tail.empty):
                log.file_at(tail)  # without what was preallocated while there was one copy
            if log.remove_unnamed(self.directory.files):
                self.directory.files.sync_directory(log.directories[0])

            # With another leader, or none, the next attempt begins again.
            log.controller.change_assignment(
                log.key, lambda now: now.expand(this) if now.leader == leader else now
            )

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Hold the partition's lock, if the leader is still the one of before."""
        self._check_stopped()
        locked = self.log.locked_under(self._leader, self.directory)
        with nullcontext() if self._is_locked else locked:
            yield

    def _check_stopped(self) -> None:
        if self.stopped():
            raise _StoppedError

    def _pass(self, tail: Tail) -> int:
        """Make all files equal to the leader's; return how many bytes were not yet known to be."""
        segments = self.log.context.state.read(lambda txn: catalog.segments(txn, self.log.key))
        count = 0
        for info in segments:
            self._check_stopped()
            stop = info.size if info.sealed else tail.log_end_position
            if not info.sealed and info.id != tail.segment_id:
                continue  # a roll is under way; its file has nothing yet
            if self._done.get(info.id) != stop:
                count += self._copy(info, stop)
        return count

    def _copy(self, info: SegmentInfo, stop: int) -> int:
        """Make one file equal to the leader's up to a position; return how much was compared."""
        directory = self.log.controller.directories.get(self._leader.leader)
        if directory is None:
            raise self.log.reassigned()
        start = self._done.get(info.id, 0)
        batches_end = min(info.end_position, stop) if info.sealed else stop
        if info.sealed and (info.next_offset or 0) <= self._trusted_offset:
            start = max(start, batches_end)
        leader = SegmentCopy(self.log, info, directory)
        target = SegmentCopy(self.log, info, self.directory)
        try:
            if leader.file is None:
                # Compacted or deleted meanwhile, or nothing was written to it yet; once nobody
                # else can write, it is damage, unless the copy is whole by itself.
                if stop and self._is_locked and not start == batches_end <= target.size:
                    self.log.mend([info])  # another one leads, if it has the file
                    raise self._damage(leader, 0)
                return 0
            start = _equal_end(info, leader, target, start, batches_end)
            for piece in pieces(self.log, info, [leader], batches_end, start):
                self._check_stopped()
                if piece.data is None and info.id not in self._mended and self.log.mend([info]):
                    self._mended.add(info.id)
                    return self._copy(info, stop)
                self._write(leader, target, piece)
            if target.size > stop:
                with self._guard():
                    target.truncate(stop)
        finally:
            leader.close()
            target.close(flush=True)  # what is equal may not have been flushed
        self._done[info.id] = stop
        return stop - start

    def _write(self, leader: SegmentCopy, target: SegmentCopy, piece: Piece) -> None:
        """Write a piece where it differs.

        Raises:
            CorruptionError: It is damaged at the leader.
        """
        if piece.data is None:
            with self._guard():  # raises if there is another leader by now, which may lack it
                raise self._damage(leader, piece.position)
        if not target.has(piece):
            self.throttle.spend(len(piece.data), self._check_stopped)
            with self._guard():
                target.write(piece)
            self.progress(len(piece.data))

    def _damage(self, leader: SegmentCopy, position: int) -> EmbedlogError:
        """Return the error of a leader's copy that is damaged, or of one that leads no more."""
        if self.log.assignment.leader != self._leader.leader:
            return self.log.reassigned()
        return CorruptionError(
            f"The leader's copy is damaged at byte {position}, and is not copied",
            **self.log.where,
            path=f"{leader.directory.path}/{leader.path}",
            todo="No other copy that is in sync has it." + REPAIR,
        )


def _equal_end(
    info: SegmentInfo, leader: SegmentCopy, target: SegmentCopy, start: int, stop: int
) -> int:
    """Return up to which batch a copy is known to be equal to the leader's, by comparing bytes.

    That is much faster than to read batches.  A copy that lacks the last ones ends with a batch.
    """
    same = start if start <= target.size else 0
    while same < min(stop, target.size):
        end = min(same + CHUNK_BYTES, stop, target.size)
        if target.read(same, end) != leader.read(same, end):
            break
        same = end
    return same if same == stop or leader.whole(same, stop, info.base_offset) else 0


def copy_partition(log: ReplicatedPartition, directory: LogDirectory, **options: Any) -> bool:
    """Make one copy equal to the leader's, and have it join the ISR.

    The options are those of `ReplicaCopy`.  Returns False if it was stopped, if another process
    makes this copy, or if another leader was elected.  If the directory, or that of the leader,
    turns out to be broken, it goes offline.

    Raises:
        CorruptionError: The leader's copy is damaged.
    """
    epoch, joined = log.controller.epoch, False
    try:
        with lock_copy(directory, log.key) as free:
            # Another process may have finished it before the lock was taken; what is in sync
            # already must not be written without the partition's lock.
            assignment = log.assignment
            if free and directory.id in set(assignment.replicas) - set(assignment.isr):
                copy = ReplicaCopy(log, directory, **options)
                if copy.catch_up():
                    copy.join()
                    joined = True
    except (NotLeaderOrFollowerError, ReplicaNotAvailableError, UnknownTopicOrPartitionError):
        pass  # it changed meanwhile
    except StorageError as error:
        # Another process may have taken the directory offline meanwhile.
        if not log.controller.offline_if_broken(error) and log.controller.current().epoch == epoch:
            raise
    # A process that moved the copy away meanwhile could not remove it: this one held the lock.
    with suppress(EmbedlogError):
        remove_copies(log.controller, log.key, log.directory, [directory.id])
    return joined


def replicate(
    root: ReplicatedRoot,
    *,
    throttle: Throttle | None = None,
    stopped: Callable[[], bool] = lambda: False,
    with_new: bool = True,
    failures: Failures | None = None,
) -> int:
    """Bring the replicas that are online and not in sync up to date; return how many were.

    Args:
        root: The log.
        throttle: Limits the copying.
        stopped: Whether to end early.
        with_new: Also make the new copies of reassignments.
        failures: Notes the copies that fail, since the leader's is damaged or for another reason,
            such as a lock of a stopped process, and leaves them out for a while.

    Raises:
        EmbedlogError: Without ``failures``: the first error of these copies.
    """
    joined = 0
    throttle = throttle or Throttle()
    with (failures or Failures(_logger)).collecting(raises=failures is None) as part:
        for log in root.partition_logs(root.topics().values()):
            assert isinstance(log, ReplicatedPartition)
            try:
                assignment = log.assignment
            except ReplicaNotAvailableError:
                continue
            left_out = {*assignment.isr, *assignment.given_up_replicas}
            if not with_new:
                left_out |= {*assignment.adding_replicas}
            for directory in log.controller.opened(assignment.replicas):
                if directory.id in left_out or stopped():
                    continue
                work = f"Copying {log.topic}-{log.partition} to directory {directory.id}"
                if failures is None or failures.is_due(work, *PAUSES):
                    with part(work):
                        joined += copy_partition(
                            log, directory, throttle=throttle or Throttle(), stopped=stopped
                        )
    return joined


def repair_copies(
    root: ReplicatedRoot, *, dry_run: bool = False
) -> tuple[list[str], set[TopicPartition]]:
    """Write again what copies have damaged or lack, from the copies that have it.

    Killed in between, it can be repeated.

    Returns messages about what is done, or would be, and the partitions of which no record is
    damaged in all copies.  The others must be repaired next, as those of a log in one directory.
    """
    messages, mended = [], set()
    for partition, found in examine_all(root, mend=not dry_run):
        messages += [
            f"{each}: the copy is made again from a good one" for each in found.differences
        ]
        if not found.is_lost:
            mended.add(partition)
    if not dry_run:
        # Copies that lacked whole files, and left the ISR; what fails is noted.
        replicate(root, failures=Failures(_logger))
    return messages, mended
