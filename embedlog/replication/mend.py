"""The copies of a segment in several directories: which has what whole, and where each ends.

All copies have the same bytes, and each batch has checksums.  So a segment is read in pieces of
whole batches: each is right as the first copy has it in which the batches have their checksums.
The process that makes copies equal writes these pieces to those that have other bytes there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from embedlog import batch as batches
from embedlog import catalog
from embedlog.catalog import PartitionInfo, SegmentInfo
from embedlog.errors import (
    ClosedError,
    CorruptionError,
    EmbedlogError,
    LockTimeoutError,
    NotLeaderOrFollowerError,
    ReadOnlyError,
    ReplicaNotAvailableError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.files import Files
from embedlog.partition import PartitionLog, leader_epochs, roll
from embedlog.partition.tail import Tail, peek_tail
from embedlog.record import TopicPartition
from embedlog.replication.directory import LogDirectory
from embedlog.replication.files import make_parents
from embedlog.replication.isr import PartitionAssignment
from embedlog.replication.metadata import ASSIGNMENTS
from embedlog.segment import END_MARK, SegmentFile

if TYPE_CHECKING:
    from embedlog.replication.partition import ReplicatedPartition
    from embedlog.replication.root import ReplicatedRoot

T = TypeVar("T")
Progress = Callable[[int, int], object]
_logger = logging.getLogger("embedlog.replication")
_MESSAGE_START = END_MARK[:4]


class Piece(NamedTuple):
    """Consecutive bytes of a segment: its schema, about a chunk of whole batches, or its end."""

    position: int
    offset: int
    """That of its first record, or the next one."""
    data: bytes | None
    """What is right there; None if no copy has it whole."""
    source: SegmentCopy | None = None
    """The copy that has it; None if it is damaged in all of them, or is the end mark."""


class SegmentCopy:
    """The file of a segment in one directory, which may be damaged or missing."""

    def __init__(self, log: PartitionLog, info: SegmentInfo, directory: LogDirectory) -> None:
        self.directory, self.path, self._log = directory, log.path_of(info), log
        self.file: SegmentFile | None = None
        self.header, self.schema = b"", None
        """What it begins with, if that is the schema of the segment."""
        self._fd: int | None = None
        """What it is written by, if it is."""
        try:
            self.file = log.open_segment(info, files=directory.files)
            self.header, self.schema = self.file.bytes(0, self.file.start), self.file.schema
        except CorruptionError:
            pass
        except StorageError as error:
            if not error.missing:
                raise
            self.file = None  # it was named, and deleted before it was opened
        self.size = 0 if self.file is None else self.file.size()

    def assume(self, schema: Any) -> None:
        """Read its batches by a schema, whatever it begins with."""
        # Its own, if it may be deleted meanwhile: what is open stays so.
        if self.file is not None and self.schema is not schema:
            self.file.close()
            self.file = SegmentFile(self.directory.files, self.path, schema=schema)

    def read(self, start: int, stop: int) -> bytes:
        """Return a range of the file, as far as it has it."""
        return b"" if self.file is None else self.file.bytes(start, stop - start)

    def has(self, piece: Piece) -> bool:
        """Whether its bytes are right there; behind an end mark there must not be any."""
        assert piece.data is not None
        stop = piece.position + len(piece.data) + (piece.source is None)
        return self.read(piece.position, stop) == piece.data

    def whole(self, position: int, stop: int, offset: int) -> tuple[int, int] | None:
        """Return the end of the batches that have their checksums, about a chunk of them.

        Returns the position and the offset after them; None if the first batch has not its
        checksums, or begins below an offset.
        """
        found = None
        # A run of small batches counts as damaged if one of them is.
        for read in () if self.file is None else (self.file.read_fast, self.file.read):
            with suppress(CorruptionError):
                for batch in read(position, stop):
                    batch.check_crcs()
                    if batch.base_offset < offset:
                        break
                    offset = batch.next_offset
                    found = batch.position + batch.size, offset
            if found is not None:
                break
        return found

    def next_whole(self, position: int, stop: int, offset: int) -> int | None:
        """Return where the next batch begins, past a position, that has its checksums."""
        data, at = self.read(position, stop), 0
        while (at := data.find(_MESSAGE_START, at + 1)) >= 0:
            if (position + at) & 7 or self.file is None:
                continue  # batches are aligned
            with suppress(EmbedlogError):
                batch = batches.parse(
                    *(data, at, len(data)),
                    path=self.path,
                    position=position + at,
                    schema=self.file.schema,
                )
                batch.check_crcs()
                if batch.base_offset >= offset:
                    return position + at
        return None

    def write(self, piece: Piece) -> None:
        """Write a piece to the file, which may be missing."""
        self.directory.files.write(self._open(), [piece.data], piece.position)

    def truncate(self, size: int) -> None:
        """Truncate the file."""
        self.directory.files.truncate(self._open(), size)

    def _open(self) -> int:
        if self._fd is None:
            make_parents(self.directory.files, self.path)
            self._fd = self.directory.files.open(self.path, write=True, create=True)
        return self._fd

    def close(self, *, flush: bool = False) -> None:
        """Flush what was written, or with ``flush`` all of it, and close the file."""
        files, fd, self._fd = self.directory.files, self._fd, None
        if self.file is not None:
            with closing(self.file):
                if flush:
                    self.file.sync()
        if fd is not None:
            try:
                files.sync(fd)
            finally:
                files.close(fd)
            for path in self._log.directories if self.file is None else ():
                files.sync_directory(path)


def pieces(
    log: PartitionLog, info: SegmentInfo, copies: Sequence[SegmentCopy], stop: int, start: int = 0
) -> Iterator[Piece]:
    """Yield the pieces of a segment, as some of its copies have them; the first ones are preferred.

    Args:
        log: The partition.
        info: The segment.
        copies: The copies.
        stop: Where the batches end.
        start: Where to begin: at a batch, or at the beginning.
    """
    header = _copy_with_schema(log, info, copies)
    if header is None:
        yield Piece(0, info.base_offset, None)
        return
    for copy in copies:
        copy.assume(header.schema)
    if not start:
        yield Piece(0, info.base_offset, header.header, header)
    position, offset = max(start, len(header.header)), info.base_offset
    while position < stop:
        for copy in copies:
            end = copy.whole(position, stop, offset)
            if end is not None:
                yield Piece(position, offset, copy.read(position, end[0]), copy)
                position, offset = end
                break
        else:
            yield Piece(position, offset, None)
            after = [copy.next_whole(position, stop, offset) for copy in copies]
            position = min((each for each in after if each is not None), default=stop)
    if info.sealed and info.size:
        yield Piece(info.end_position, info.next_offset or 0, END_MARK)


def _copy_with_schema(
    log: PartitionLog, info: SegmentInfo, copies: Sequence[SegmentCopy]
) -> SegmentCopy | None:
    """Return a copy that begins with the schema of the segment.

    No checksum covers that, but it says what the segment is, and is written by a known rule.
    """
    expected = {roll.head_of(log, info, offsets) for offsets in (False, True)}
    named = [copy for copy in copies if copy.header]
    return next(chain((copy for copy in named if copy.header in expected), named), None)


class CopyEnd(NamedTuple):
    """How much of a log a copy has."""

    records: int
    offset: int | None
    """Where it ends; None if it has all of the log."""


def end_of_copy(log: PartitionLog, tail: Tail | None, files: Files | None = None) -> CopyEnd:
    """Return how much of the log a copy has, which may not be in sync.

    It may lack whole segments, and may have led before: what it has of an epoch that the log
    does not have there is of another history.

    Args:
        log: The partition.
        tail: Where the log ends; None if that is not known.
        files: The directory of the copy; without it, that of the leader.

    Raises:
        StorageError: The directory cannot be read.
    """
    segments, epochs = log.context.state.read(
        lambda txn: (catalog.segments(txn, log.key), catalog.epochs(txn, log.key))
    )
    records = 0
    for info in segments:
        if not info.sealed and tail is not None and info.id != tail.segment_id:
            continue  # a roll that is finished next
        stop = info.end_position if info.sealed else tail and tail.log_end_position
        offset, position = info.base_offset, 0
        try:
            # A file that ends, or differs, in the middle of a batch or before the first one.
            with suppress(CorruptionError), closing(log.open_segment(info, files=files)) as file:
                size = file.size()
                position = file.start
                for batch in file.heads(position, size if stop is None else min(size, stop)):
                    end = batch.position + batch.size
                    epoch = leader_epochs.epoch_at(epochs, batch.base_offset)
                    if end > size or epoch not in (None, batch.leader_epoch):
                        break
                    offset, position, records = batch.next_offset, end, records + batch.count
        except StorageError as error:
            if not error.missing:
                raise
        if position != stop:
            return CopyEnd(records, offset)
    return CopyEnd(records, None)


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


def mend_copies(log: ReplicatedPartition, segments: Collection[SegmentInfo] | None = None) -> None:
    """Write again what in-sync copies lack or have damaged, under the partition's lock.

    Args:
        log: The partition.
        segments: The segments to read; without them those that a recovery reads, which are
            above the recovery point or not as long as they must be.
    """
    _repeat(log, lambda: _mend(log, segments))


def _repeat(log: ReplicatedPartition, step: Callable[[], T]) -> T:
    """Run an operation on the copies; repeat it without a directory that turns out to be broken."""
    while True:
        try:
            return step()
        except ClosedError:
            if log.context.closed:
                raise  # otherwise a directory just went offline
        except StorageError as error:
            if not log.controller.offline_if_broken(error):
                raise


def _mend(log: ReplicatedPartition, segments: Collection[SegmentInfo] | None) -> None:
    tail = peek_tail(log.context.live, log.key)
    every = _segments(log)
    incomplete, torn = _incomplete(log, every if segments is None else segments)
    whole = [each.id for each in _in_sync(log) if each.id not in incomplete]
    if segments is None:
        info = log.context.state.read(lambda txn: catalog.PARTITIONS.get(txn, log.key))
        flushed = (info or PartitionInfo()).recovery_offset
        segments = [
            each
            for each in every
            if each.id in torn
            or not (whole and each.sealed and each.size and (each.next_offset or 0) <= flushed)
        ]
    # The incomplete ones may have what is damaged in the others.
    _compare(log, segments, tail, mend=True, keep=incomplete if whole else ())

    def leave(before: PartitionAssignment) -> PartitionAssignment:
        good = [each for each in before.isr if each in whole]
        return before.elect(good) if good else before

    if incomplete and log.controller.change_assignment(log.key, leave):
        _logger.warning(
            "%s-%d: segment files of directories %s are missing or truncated; they are copied "
            "again from directory %d",
            *(log.topic, log.partition, sorted(incomplete), whole[0]),
        )


def examine(log: ReplicatedPartition, *, mend: bool = False) -> Comparison:
    """Compare all that the in-sync copies of a partition have.

    Other processes may append, roll, compact and fail meanwhile.  So what looks damaged is read
    again under the partition's lock, if that can be taken; and is mended then, with ``mend``.
    """

    def compare() -> Comparison:
        tail = None
        with suppress(CorruptionError):  # what is damaged is found next
            tail = log.tail()
        return _compare(log, _segments(log), tail, mend=False)

    def confirm() -> Comparison:
        found = compare()
        differing = {each.copy for each in found.differences}
        for directory in log.controller.online if log.context.files.writable else ():
            if directory.path in differing:
                # Its disk may have failed a moment ago, and lost what was not flushed.
                directory.probe()
        return found

    with suppress(StorageError):  # perhaps of a file that was just deleted
        found = _repeat(log, compare)
        if not found.differences:
            return found
    with ExitStack() as lock:
        # Of a log that was opened to read only, there is no lock.
        with suppress(*(() if mend else (LockTimeoutError, ReadOnlyError))):
            log.acquire()
            lock.callback(log.release)
        found = _repeat(log, confirm)
        if mend and found.differences:
            mend_copies(log, _segments(log))
        return found


def verify_copies(
    root: ReplicatedRoot, progress: Progress | None = None
) -> list[ReplicaDifference]:
    """Return where the in-sync copies of each partition are damaged or differ; changes nothing.

    ``progress`` gets the number of partitions that are done, and of all.
    """
    return [each for _, found in examine_all(root, progress) for each in found.differences]


def examine_all(
    root: ReplicatedRoot,
    progress: Progress | None = None,
    *,
    mend: bool = False,
) -> Iterator[tuple[TopicPartition, Comparison]]:
    """Yield what is found in the copies of each partition in which something is wrong."""
    partitions = list(root.assignments())
    for done, (info, number, _) in enumerate(partitions):
        if progress is not None:
            progress(done, len(partitions))
        # It may be deleted, moved or offline by now.
        with suppress(
            NotLeaderOrFollowerError, ReplicaNotAvailableError, UnknownTopicOrPartitionError
        ):
            found = examine(
                cast("ReplicatedPartition", root.partition(info.name, number)), mend=mend
            )
            if found.differences:
                yield TopicPartition(info.name, number), found


def _segments(log: PartitionLog) -> list[SegmentInfo]:
    """Return the segments that the manifest names now."""
    return log.context.state.read(lambda txn: catalog.segments(txn, log.key))


def _incomplete(
    log: ReplicatedPartition, segments: Collection[SegmentInfo]
) -> tuple[set[int], set[int]]:
    """Return the copies that lack files, or their ends, which another in-sync copy has.

    Returns the ids of the directories, and those of the segments that are truncated somewhere.
    """
    directories, incomplete, torn = _in_sync(log), set(), set()
    for info in segments:
        path, least = log.path_of(info), info.end_position or 1
        ends = {each.id: _end(each, path, info) for each in directories}
        # All may lack an end of padding, which is read as if it was there.
        longest = max((size for size, _ in ends.values()), default=0)
        short = {each for each, (size, _) in ends.items() if size < min(least, longest)}
        if len(short) < len(ends):
            incomplete |= short
            if any(ends[each][0] > 0 for each in short):
                torn.add(info.id)
        # A roll does not flush the end mark.
        if any(size >= least and not marked for size, marked in ends.values()):
            torn.add(info.id)
    return incomplete, torn


def _end(directory: LogDirectory, path: str, info: SegmentInfo) -> tuple[int, bool]:
    """Return the size of a file, -1 if it is missing, and whether a sealed one has its end mark."""
    files = directory.files
    try:
        with files.opened(path) as fd:
            at = info.end_position
            marked = not info.size or files.read(fd, len(END_MARK), at) == END_MARK
            return files.size(fd), marked
    except StorageError as error:
        if error.missing:
            return -1, False
        raise


def _in_sync(log: ReplicatedPartition) -> list[LogDirectory]:
    """Return the directories of the in-sync copies, the leader's first."""
    # Not that of the image: one that may not write leaves out there what it has found damaged.
    assignment = log.controller.state.read(lambda txn: ASSIGNMENTS.get(txn, log.key))
    if assignment is None or assignment.leader is None:
        return []
    return log.controller.opened([assignment.leader, *assignment.in_sync_followers])


def _compare(
    log: ReplicatedPartition,
    segments: Collection[SegmentInfo],
    tail: Tail | None,
    *,
    mend: bool,
    keep: Collection[int] = (),
) -> Comparison:
    """Compare segments in all in-sync copies.

    Args:
        log: The partition.
        segments: The segments.
        tail: Where the log ends; None if a recovery is about to find that.
        mend: Whether to write what a copy lacks; under the partition's lock.
        keep: The directories in which nothing is written.
    """
    directories, first, is_lost = _in_sync(log), dict[str, ReplicaDifference](), False
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
