"""The log of one partition: the methods that other packages, and `embedlog.Topic`, call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from embedlog.batch import EncodedBatch
from embedlog.partition import append, append_at, extents, flush, lookup, recovery, roll, truncate
from embedlog.partition.reader import PartitionReader
from embedlog.partition.record_counts import RecordCounts
from embedlog.partition.state import PartitionState
from embedlog.partition.tail import Tail
from embedlog.record import Appended, OffsetAndTimestamp

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


class PartitionLog(PartitionState):
    """The log of one partition, shared with every process that has the root open.

    Any thread may call any method.  A forked child makes a new one.

    It inherits from `PartitionState`, so that a log is what the operations of other
    packages take (`flush.flush`, `replace.Replacement`), and no call has an indirection.
    """

    @cached_property
    def record_counts(self) -> RecordCounts:
        """Counts the records between two offsets."""
        return RecordCounts(self)

    @property
    def placement(self) -> ReplicaPlacement:
        """The directories of its copies; a log in one directory has only this one."""
        return ReplicaPlacement(ONLY_DIRECTORY, (ONLY_DIRECTORY,), (ONLY_DIRECTORY,))

    def __repr__(self) -> str:
        return f"<PartitionLog {self.topic}-{self.partition}>"

    # What it holds

    def tail(self) -> Tail:
        """Return where the partition ends; recovers it first if no process has done so."""
        return recovery.current_tail(self)

    def start_offset(self) -> int:
        """Return the first offset that can be read."""
        self.refresh()
        return recovery.current_tail(self).start_offset

    def end_offset(self) -> int:
        """Return the offset of the next record that will be visible (the high watermark)."""
        self.refresh()
        return self.visible_end(recovery.current_tail(self))

    def size_bytes(self) -> int:
        """Return how many bytes its segment files have."""
        return extents.size_bytes(self)

    # Writing

    def append(
        self,
        encoded: Sequence[EncodedBatch],
        *,
        durability: str | None = None,
        timeout: float | None = None,
        acks: int | str = "all",
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

        Raises:
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
        return append.append(self, encoded, durability, timeout)

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
            MirrorConflictError: The topic is no copy of that one, or not any more.
            Exception: As `append`.
        """
        return append_at.append_at(
            self, placed, durability, timeout, identical, mirror, expected_end
        )

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
        append_at.skip_to(self, offset, mirror)

    def roll(self) -> bool:
        """Seal the active segment and begin the next; False if it is empty."""
        self.context.check_writable()
        with self.locked():
            _, tail = append.end_locked(self)
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
        return truncate.truncate_to(self, offset)

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
