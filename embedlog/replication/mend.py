"""Finding what is damaged in the copies of a partition, and writing it again from a good copy.

All in-sync copies have the same bytes, and each batch has checksums.  So a segment is read in
all copies together, batch by batch.  Where a copy has other bytes, those of the first copy are
right whose batch has its checksums, the leader's before the followers'.  What no copy has whole
stays as it is, for `repair` to drop.

A copy that lacks whole files, or ends before the end of a sealed segment, leaves the ISR
instead, if another one has them, and catches up as that of a directory that comes back.

Order: nothing is truncated, and a copy is only written where another one has a whole batch.  Killed
in between, it is as damaged as before, or less, and the next to read it begins again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from typing import NamedTuple, TypeVar

from embedlog import catalog
from embedlog.catalog import PartitionInfo, SegmentInfo
from embedlog.errors import (
    ClosedError,
    CorruptionError,
    LockTimeoutError,
    ReadOnlyError,
    StorageError,
)
from embedlog.partition import PartitionLog
from embedlog.partition.tail import Tail, peek_tail
from embedlog.replication.controller import Controller
from embedlog.replication.directory import LogDirectory
from embedlog.replication.isr import PartitionAssignment
from embedlog.replication.metadata import ASSIGNMENTS
from embedlog.replication.segment_copies import Piece, SegmentCopy, pieces

T = TypeVar("T")
_logger = logging.getLogger("embedlog.replication")


class ReplicaDifference(NamedTuple):
    """The first offset at which a copy is damaged, or differs from another one."""

    topic: str
    partition: int
    offset: int
    copy: str
    reference: str | None
    """The copy that it differs from; None if it is damaged, whatever the others have."""
    what: str

    def __str__(self) -> str:
        other = "" if self.reference is None else f" differs from {self.reference}"
        where = f"{self.topic}-{self.partition}: {self.copy}{other} at offset {self.offset}"
        return f"{where}: {self.what}"


class Comparison(NamedTuple):
    """The differences of the copies of a partition."""

    differences: list[ReplicaDifference]
    """The first one of each copy."""
    is_lost: bool = False
    """Whether something is damaged in all copies."""


def mend_copies(
    log: PartitionLog, controller: Controller, segments: Collection[SegmentInfo] | None = None
) -> None:
    """Write again what in-sync copies lack or have damaged, under the partition's lock.

    Args:
        log: The partition.
        controller: Knows its copies.
        segments: The segments to read; without them those that a recovery reads, which are
            above the recovery point or not as long as they must be.
    """
    _repeat(log, controller, lambda: _mend(log, controller, segments))


def _repeat(log: PartitionLog, controller: Controller, step: Callable[[], T]) -> T:
    """Do something with the copies; again if a directory turns out to be broken, without it."""
    while True:
        try:
            return step()
        except ClosedError:
            if log.context.closed:
                raise  # otherwise a directory just went offline
        except StorageError as error:
            if not controller.offline_if_broken(error):
                raise


def _mend(
    log: PartitionLog, controller: Controller, segments: Collection[SegmentInfo] | None
) -> None:
    tail = peek_tail(log.context.live, log.key)
    every = _segments(log)
    incomplete, torn = _incomplete(log, controller, every if segments is None else segments)
    whole = [each.id for each in _in_sync(log, controller) if each.id not in incomplete]
    if segments is None:
        segments = [
            each for each in every if each.id in torn or not (whole and _is_flushed(log, each))
        ]
    # The incomplete ones may have what is damaged in the others.
    _compare(log, controller, segments, tail, mend=True, keep=incomplete if whole else ())

    def leave(before: PartitionAssignment) -> PartitionAssignment:
        good = [each for each in before.isr if each in whole]
        return before.elect(good) if good else before

    if incomplete and controller.change_assignment(log.key, leave):
        _logger.warning(
            "%s-%d: segment files of directories %s are missing or truncated; they are copied "
            "again from directory %d",
            *(log.topic, log.partition, sorted(incomplete), whole[0]),
        )


def examine(log: PartitionLog, controller: Controller, *, mend: bool = False) -> Comparison:
    """Compare all that the in-sync copies of a partition have.

    Other processes may append, roll, compact and fail meanwhile.  So what looks damaged is read
    again under the partition's lock, if that can be taken; and is mended then, with ``mend``.
    """

    def compare() -> Comparison:
        tail = None
        with suppress(CorruptionError):  # what is damaged is found next
            tail = log.tail()
        return _compare(log, controller, _segments(log), tail, mend=False)

    with suppress(StorageError):  # perhaps of a file that was just deleted
        found = _repeat(log, controller, compare)
        if not found.differences:
            return found
    with ExitStack() as lock:
        # Of a log that was opened to read only, there is no lock.
        with suppress(*(() if mend else (LockTimeoutError, ReadOnlyError))):
            log.acquire()
            lock.callback(log.release)
        found = _repeat(log, controller, compare)
        if mend and found.differences:
            mend_copies(log, controller, _segments(log))
        return found


def _segments(log: PartitionLog) -> list[SegmentInfo]:
    """Return the segments that the manifest names now."""
    return log.context.state.read(lambda txn: catalog.segments(txn, log.key))


def _is_flushed(log: PartitionLog, info: SegmentInfo) -> bool:
    """Whether a segment is below the recovery point, so that a recovery does not read it."""
    partition = log.context.state.read(lambda txn: catalog.PARTITIONS.get(txn, log.key))
    recovery_offset = (partition or PartitionInfo()).recovery_offset
    return info.sealed and info.size > 0 and (info.next_offset or 0) <= recovery_offset


def _incomplete(
    log: PartitionLog, controller: Controller, segments: Collection[SegmentInfo]
) -> tuple[set[int], set[int]]:
    """Return the copies that lack files, or their ends, which another in-sync copy has.

    Returns the ids of the directories, and those of the segments that are truncated somewhere.
    """
    directories, incomplete, torn = _in_sync(log, controller), set(), set()
    for info in segments:
        path, least = log.path_of(info), info.end_position or 1
        sizes = {each.id: _size(each, path) for each in directories}
        short = {each for each, size in sizes.items() if size < least}
        if len(short) < len(sizes):
            incomplete |= short
            if any(sizes[each] > 0 for each in short):
                torn.add(info.id)
    return incomplete, torn


def _size(directory: LogDirectory, path: str) -> int:
    """Return the size of a file; -1 if it is missing."""
    try:
        with directory.files.opened(path) as fd:
            return directory.files.size(fd)
    except StorageError as error:
        if error.missing:
            return -1
        raise


def _in_sync(log: PartitionLog, controller: Controller) -> list[LogDirectory]:
    """Return the directories of the in-sync copies, the leader's first."""
    # Not that of the image: one that may not write leaves out there what it has found damaged.
    assignment = controller.state.read(lambda txn: ASSIGNMENTS.get(txn, log.key))
    if assignment is None or assignment.leader is None:
        return []
    return controller.opened([assignment.leader, *assignment.in_sync_followers])


def _compare(
    log: PartitionLog,
    controller: Controller,
    segments: Collection[SegmentInfo],
    tail: Tail | None,
    *,
    mend: bool,
    keep: Collection[int] = (),
) -> Comparison:
    """Compare segments in all in-sync copies.

    Args:
        log: The partition.
        controller: Knows its copies.
        segments: The segments.
        tail: Where the log ends; None if a recovery is about to find that.
        mend: Whether to write what a copy lacks; under the partition's lock.
        keep: The directories in which nothing is written.
    """
    directories, first, is_lost = _in_sync(log, controller), dict[str, ReplicaDifference](), False
    if len(directories) < 2:
        return Comparison([])
    for info in segments:
        if not info.sealed and tail is not None and info.id != tail.segment_id:
            continue  # a roll is under way; its file has nothing yet
        copies = [SegmentCopy(log, info, each) for each in directories]
        if tail is not None and tail.empty and not info.sealed:
            # The first append creates it where it is missing.
            copies = [copy for copy in copies if copy.file is not None]
        try:
            end = 0
            for piece in pieces(log, info, copies, _stop(info, tail, copies)):
                # In a recovery, the log ends where no copy has a whole batch.
                damaged = piece.data is None and (tail is not None or info.sealed)
                is_lost |= damaged
                if piece.data is not None:
                    end = piece.position + len(piece.data)
                for copy in copies:
                    differs = piece.data is not None and not copy.has(piece)
                    if damaged or differs:
                        difference = _difference(log, copy, piece)
                        first.setdefault(difference.copy, difference)
                    if differs and mend and copy.directory.id not in keep:
                        copy.write(piece)
                        if piece.source is None and copy.size > end:
                            copy.truncate(end)
            if mend and tail is None and not info.sealed and copies:
                # Otherwise what a recovery truncates at the leader would stay in a longer follower.
                size = max(copies[0].size, end)
                for copy in copies:
                    if copy.size > size:
                        copy.truncate(size)
        finally:
            for copy in copies:
                copy.close()
    return Comparison(sorted(first.values(), key=lambda each: (each.offset, each.copy)), is_lost)


def _stop(info: SegmentInfo, tail: Tail | None, copies: Collection[SegmentCopy]) -> int:
    """Return where the batches end."""
    if not info.end_position and tail is not None and not info.sealed:
        return tail.log_end_position
    return info.end_position or max((copy.size for copy in copies), default=0)


def _difference(log: PartitionLog, copy: SegmentCopy, piece: Piece) -> ReplicaDifference:
    """Return the first batch of a piece that a copy does not have."""
    source, offset, other = piece.source, piece.offset, None
    if piece.data is None:
        what = "damaged, as in all other copies"
    elif copy.file is None:
        what = "the file is missing"
    elif source is None:
        what = "its end mark is missing"
    elif piece.position == 0:
        what = "it does not begin with its schema"
    else:
        what, other = "it has another batch there", source.directory.path
        assert source.file is not None
        for batch in source.file.scan(piece.position, piece.position + len(piece.data)):
            begin, end, offset = batch.position, batch.position + batch.size, batch.base_offset
            if copy.read(begin, end) != source.read(begin, end):
                if copy.size < end:
                    what, other = f"the file is truncated at byte {copy.size}", None
                elif copy.whole(begin, end, offset) is None:
                    what, other = f"the batch at byte {begin} is damaged", None
                break
    return ReplicaDifference(log.topic, log.partition, offset, copy.directory.path, other, what)
