"""The log of a partition with replicas: acknowledgements, and taking over from a leader."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

from embedlog import catalog, kv
from embedlog.batch import EncodedBatch
from embedlog.catalog import PartitionInfo, SegmentInfo, TopicInfo
from embedlog.errors import (
    CorruptionError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    StorageError,
)
from embedlog.files import Files
from embedlog.partition import journal, leader_epochs, recovery
from embedlog.partition.append_condition import AppendCondition
from embedlog.partition.partition_log import PartitionLog, ReplicaPlacement
from embedlog.partition.state import Context
from embedlog.partition.tail import Tail, peek_tail
from embedlog.record import Appended
from embedlog.replication import mend
from embedlog.replication.controller import Controller, offline_error
from embedlog.replication.directory import LogDirectory
from embedlog.replication.files import ReplicatedFiles
from embedlog.replication.isr import PartitionAssignment
from embedlog.replication.mend import end_of_copy
from embedlog.segment import SegmentFile

T = TypeVar("T")

_logger = logging.getLogger("embedlog.replication")


class LeaderAndEpoch(NamedTuple):
    """The leader of a partition, and the epoch of its log."""

    leader: int
    epoch: int


class Leadership(NamedTuple):
    """Which leader has taken over, by the metadata of which epoch."""

    metadata_epoch: int
    leader_epoch: int


class _Append(threading.local):
    """The append of a thread."""

    needs_min_isr = True
    leader_epoch: int | None = None
    """Of the leader at which the records were published, once they are."""


class ReplicatedPartition(PartitionLog):
    """The log of a partition in several directories.

    Every operation writes to the in-sync replicas, by `ReplicatedFiles`.  What is left to do
    here: an append with ``acks="all"`` needs `min.insync.replicas`, and the first to take the
    partition's lock after an election begins the new leader's epoch.  Its holder continues if
    another leader is elected meanwhile: one that was in sync has the same bytes, and what was
    written for another one is not published.
    """

    def __init__(
        self, context: Context, topic: TopicInfo, partition: int, controller: Controller
    ) -> None:
        super().__init__(context, topic, partition)
        self.controller = controller
        self._leadership = Leadership(-1, -1)
        self._checked = -1, -1
        """The epoch of the metadata, and the version of the settings, by which enough replicas
        were last seen to be in sync."""
        self._owner: int | None = None
        """The thread that holds the partition's lock."""
        self._epoch_of_owner = -1
        """The epoch of the metadata when it took the lock."""
        self._append = _Append()

    @property
    def placement(self) -> ReplicaPlacement:
        """As `PartitionLog.placement`; without a leader it is offline."""
        assignment = self.controller.assignment(self.key)
        if assignment is None:
            return ReplicaPlacement(None, (), ())
        isr = tuple(each for each in assignment.isr if each in assignment.replicas)
        return ReplicaPlacement(assignment.leader, assignment.replicas, isr)

    @property
    def assignment(self) -> PartitionAssignment:
        """Its replicas.

        Raises:
            ReplicaNotAvailableError: It has no leader.
        """
        assignment = self.controller.assignment(self.key)
        if assignment is None:
            self.refresh()  # says that the topic was deleted
            raise CorruptionError(
                "The database state has lost the assignment of the partition", **self.where
            )
        if assignment.leader is None:
            raise offline_error(self.controller.image, assignment, self.where)
        return assignment

    # Acknowledgements

    def append(
        self,
        encoded: Sequence[EncodedBatch],
        *,
        durability: str | None = None,
        timeout: float | None = None,
        acks: int | str = "all",
        condition: AppendCondition | None = None,
    ) -> list[Appended]:
        """As `PartitionLog.append`.

        Args:
            encoded: The batches.
            durability: ``"os"`` or ``"fsync"``.
            timeout: Seconds to wait for the partition's lock.
            acks: With ``"all"`` at least `min.insync.replicas` must be in sync.  In any case the
                batches are in all in-sync replicas before a consumer can read them.
            condition: What must be so in the leader's log.

        Raises:
            NotEnoughReplicasError: Too few are in sync for ``acks="all"``.  Nothing was
                written.
            NotEnoughReplicasAfterAppendError: Copies failed in the flush; the records are there.
            ReplicaNotAvailableError: The partition has no leader.
        """
        append = partial(
            super().append, encoded, durability=durability, timeout=timeout, condition=condition
        )
        if acks in ("all", -1):
            return self._append_to_all(append, durability)
        self._append.needs_min_isr = False
        try:
            return self._repeat(append)
        finally:
            self._append.needs_min_isr = True

    def append_at(
        self, placed: Sequence[tuple[int, EncodedBatch]], **options: Any
    ) -> list[Appended]:
        """As `PartitionLog.append_at`, to all in-sync replicas."""
        append = partial(super().append_at, placed, **options)
        return self._append_to_all(append, options.get("durability"))

    def roll(self) -> bool:
        """As `PartitionLog.roll`."""
        return self._repeat(super().roll)

    def _append_to_all(
        self, append: Callable[[], list[Appended]], durability: str | None
    ) -> list[Appended]:
        is_flushed = (durability or self.context.durability) == "fsync"

        def append_once() -> list[Appended]:
            self.check_replicas()
            self._append.leader_epoch = None
            receipts = append()
            if is_flushed:
                self._check_flushed_replicas()
            return receipts

        return self._repeat(append_once)

    def _repeat(self, operation: Callable[[], T]) -> T:
        """Repeat an operation whose leader broke, or is damaged, with the next one, or mended."""
        mended = False
        while True:
            epoch = self.controller.epoch
            try:
                return operation()
            except (CorruptionError, NotLeaderOrFollowerError, StorageError) as error:
                segments: list[SegmentInfo] | None = [self.active_segment]
                if isinstance(error, StorageError):
                    if not error.missing:
                        raise
                    segments = None  # a whole copy may just be being deleted
                # Each leader breaks once at most.
                if self.controller.current().epoch == epoch:
                    if mended or not self.mend(segments):
                        # The directory may be in the middle of being deleted.
                        self.controller.check_directories()
                        if self.controller.epoch == epoch:
                            raise
                    mended = True

    def check_replicas(self) -> None:
        """Raise unless as many copies are in sync as the topic requires.

        Raises:
            NotEnoughReplicasError: They are not; nothing was written.
            ReplicaNotAvailableError: The partition has no leader.
        """
        # Newer settings, and a new epoch, are found under the lock.
        epoch = self.controller.epoch  # before: the assignment may be of a later one
        if self._checked != (epoch, self.snapshot_version):
            self.refresh()
            version = self.snapshot_version
            self.assignment.check_min_isr(self.config.min_insync_replicas, **self.where)
            self._checked = epoch, version

    def _check_flushed_replicas(self) -> None:
        """Raise if copies failed in the flush, and too few are left, or none."""
        assignment, leader_epoch = self.assignment, self._append.leader_epoch
        if leader_epoch not in (None, assignment.leader_epoch) and assignment.leader_recovering:
            raise self.reassigned()
        try:
            self.check_replicas()
        except NotEnoughReplicasError as error:
            raise NotEnoughReplicasAfterAppendError(
                f"The records were written, but {error.what[0].lower()}{error.what[1:]}",
                todo=error.todo,
                **error.facts,
            ) from None

    def commit_locked(
        self,
        file: SegmentFile,
        buffers: list[Any],
        position: int,
        log_end_offset: int,
        publish: kv.Step[T],
        synced: bool = False,
    ) -> T:
        """As `PartitionLog.commit_locked`; afterwards a follower that was slow leaves the ISR."""
        publish = partial(self._publish_if_kept, publish)
        result = super().commit_locked(file, buffers, position, log_end_offset, publish, synced)
        files, max_lag_ms = self.context.files, self.config.replica_lag_time_max_ms
        assert isinstance(files, ReplicatedFiles)
        assert file.fd is not None
        if slow := files.slow_followers(file.fd, max_lag_ms / 1000):
            # One slow disk must not hold up all writers.
            for each in slow:
                _logger.warning(
                    "%s-%d: directory %d leaves the ISR: a write took longer than "
                    "replica.lag.time.max.ms=%d",
                    *(self.topic, self.partition, each, max_lag_ms),
                )
            self.controller.change_assignment(self.key, lambda before: before.shrink(slow))
        return result

    def _publish_if_kept(self, publish: kv.Step[T], txn: kv.Txn) -> T:
        """Publish what was written, unless copies failed meanwhile, and too few have it.

        Raises:
            NotEnoughReplicasError: Fewer are left than the topic requires.
            NotLeaderOrFollowerError: Another leader was elected, which does not have it.
        """
        # The store has just checked that the image is the newest; this must not write.
        epoch, (metadata_epoch, leader_epoch) = self.controller.epoch, self._leadership
        if metadata_epoch != epoch or self._checked != (epoch, self.snapshot_version):
            assignment = self.controller.image.assignments.get(self.key)
            if assignment is not None:
                if self._append.needs_min_isr:
                    assignment.check_min_isr(self.config.min_insync_replicas, **self.where)
                if assignment.leader_epoch != leader_epoch and assignment.leader_recovering:
                    raise self.reassigned()
        self._append.leader_epoch = leader_epoch
        return publish(txn)

    # Copies

    def open_segment(self, info: SegmentInfo, **options: Any) -> SegmentFile:
        """As `PartitionLog.open_segment`; where the leader lacks the file, another one leads."""
        try:
            return super().open_segment(info, **options)
        except StorageError as error:
            if not error.missing or "files" in options or not options.get("mend", True):
                raise
            # It may just have been compacted or deleted.
            named = self.context.state.read(lambda txn: journal.file_names(txn, self.key))
            if info.file_name not in named or self.reread(info, 0, 0) is None:
                raise
        return super().open_segment(info, **options)

    def mend(self, segments: Collection[SegmentInfo] | None = None) -> bool:
        """As `PartitionLog.mend`; a log that may not write continues at another copy."""
        if not self.assignment.in_sync_followers:
            return False
        if not self.context.files.writable:
            self.forget_copy()
            return self.controller.read_elsewhere(self.key)
        with nullcontext() if self._is_owner() else self.locked():
            mend.mend_copies(self, segments)
        return True

    def leader_and_epoch(self) -> LeaderAndEpoch:
        """Return the leader, once it has taken over, and the epoch of its log.

        Raises:
            ReplicaNotAvailableError: There is no leader.
        """
        leader = self.assignment.leader
        assert leader is not None
        # After the leader: if another one is elected in between, the two never belong together.
        return LeaderAndEpoch(leader, self.tail().leader_epoch)

    @contextmanager
    def locked_under(self, leader: LeaderAndEpoch, follower: LogDirectory) -> Iterator[Tail]:
        """Hold the partition's lock, to copy something from a leader to a follower.

        Published records never change under one leader, but one that was elected out of sync may
        lack some, and has others at their positions.  A directory that went offline and came back
        may be on another disk, or may have lost what was copied to it before.

        Raises:
            NotLeaderOrFollowerError: Another leader has taken over, the log was truncated, the
                partition has no copy in the follower's directory any more, or that directory went
                offline meanwhile.
        """
        with self.owned() as tail:
            assignment, opened = self.assignment, self.controller.directories.get(follower.id)
            is_same = (assignment.leader, tail.leader_epoch) == leader and opened is follower
            if not is_same or follower.id not in assignment.replicas:
                raise self.reassigned()
            yield tail

    def reassigned(self) -> NotLeaderOrFollowerError:
        """Return the error of a copy that was begun before the leader, or the replicas, changed."""
        return NotLeaderOrFollowerError(
            "The partition has another leader, or other replicas, than before",
            **self.where,
            todo="Try again.",
        )

    def remove_unnamed(self, files: Files) -> int:
        """Remove the segment files of a copy that the manifest does not name; return how many.

        For a copy that was not in sync, so that what was deleted or replaced meanwhile is still
        there; under the lock.  Also the key indexes, which may be of what the copy had before, and
        the uncommitted files: they are unlinked where copies are in sync, and this one may be too
        late for that.  A file that is still being written is written again.
        """

        def named(txn: kv.Txn) -> set[str]:
            return {info.file_name for info in catalog.segments(txn, self.key)}

        names, removed = self.context.state.read(named), 0
        path = f"{self.directory}/{self.partition}"
        for name in files.list(path):
            if catalog.SEGMENT_FILES.fullmatch(name) and name not in names:
                files.unlink(f"{path}/{name}")
                removed += 1
        return removed

    # Leadership

    def acquire(self, timeout: float | None = None, *, escalated: bool = False) -> None:
        """As `PartitionLog.acquire`; a new leader has taken over when this returns."""
        super().acquire(timeout, escalated=escalated)
        self._owner = threading.get_ident()
        try:
            # First: what is not in the database that is read is truncated.
            if self.controller.live.even_epoch != self.controller.epoch:
                self.controller.live.make_even()
            if self._leadership.metadata_epoch != self.controller.epoch:
                self._lead()
        except BaseException:
            self.release()
            raise
        self._epoch_of_owner = self.controller.epoch

    def release(self) -> None:
        """As `PartitionLog.release`."""
        self._owner = None
        super().release()

    def _is_owner(self) -> bool:
        """Whether this thread holds the partition's lock."""
        return self._owner == threading.get_ident()

    def check_leader(self, error: BaseException) -> None:
        """As `PartitionLog.check_leader`.

        Raises:
            NotLeaderOrFollowerError: The leader broke meanwhile, and the next one lacks a file.
        """
        is_missing = isinstance(error, StorageError) and error.missing
        if is_missing and self.controller.current().epoch != self._epoch_of_owner:
            raise self.reassigned() from error

    def tail(self) -> Tail:
        """As `PartitionLog.tail`, of the present leader."""
        tail = super().tail()
        epoch = self.controller.current().epoch
        if self._leadership.metadata_epoch == epoch or self._is_owner():
            return tail
        assignment = self.assignment
        if not self.context.files.writable:
            return tail
        if tail.leader_epoch < assignment.leader_epoch:
            with self.owned() as tail:
                return tail
        self._leadership = Leadership(epoch, assignment.leader_epoch)
        return tail

    def has_same_leader(self, tail: Tail) -> bool:
        """As `PartitionLog.has_same_leader`."""
        if not self.context.files.writable:
            return True  # it cannot truncate the copy of a new leader, and reads what that has
        return self.tail().leader_epoch == tail.leader_epoch

    def _lead(self) -> None:
        """Make the leader's log that of the partition, if it was elected since; under the lock."""
        while (epoch := self.controller.current().epoch) != self._leadership.metadata_epoch:
            assignment = self.assignment
            # Without a tail recovery finds what the leader has.
            tail = peek_tail(self.context.live, self.key)
            if tail is not None and tail.leader_epoch < assignment.leader_epoch:
                try:
                    self._take_over(assignment)
                except NotLeaderOrFollowerError:
                    if self.controller.current().epoch == epoch:
                        raise
                    continue  # that leader broke, too
            self._leadership = Leadership(epoch, assignment.leader_epoch)

    def _take_over(self, assignment: PartitionAssignment) -> None:
        """Begin the epoch of a leader; killed or refused in the middle, the next one repeats it."""

        def note_epoch(txn: kv.Txn) -> None:
            info = catalog.PARTITIONS.get(txn, self.key) or PartitionInfo()
            if info.leader_epoch < assignment.leader_epoch - 1:
                info = info._replace(leader_epoch=assignment.leader_epoch - 1)
                catalog.PARTITIONS.put(txn, self.key, value=info)

        self.forget_copy()
        self.context.state.catch_up()
        self.context.live.catch_up()
        self.refresh()
        # A publication that is committed is only found at the end at which it began, in the epoch
        # of the leader before; past it, it would be lost in this partition and stay in the others.
        journal.finish_committed(self.context, [self.key])
        tail = peek_tail(self.context.live, self.key)
        assert tail is not None
        end = end_of_copy(self, tail).offset if assignment.leader_recovering else None
        if end is None:
            # `state` first: a batch must not have an epoch that recovery does not know.
            leader_epochs.begin(self, tail, assignment.leader_epoch, tail.log_end_offset)
        else:
            # It was not in sync, and lacks what was acknowledged since it was.
            _logger.warning(
                "%s-%d: the new leader, directory %s, ends at offset %d; the one before had %d",
                *(self.topic, self.partition, assignment.leader, end, tail.log_end_offset),
            )
            # The epoch that the truncation begins must be that of the leader.
            self.context.state.write(note_epoch)
            recovery.truncate_locked(self, tail, end)
        if assignment.leader_recovering:
            self.remove_unnamed(self.context.files)
        self.context.wake.advance()
