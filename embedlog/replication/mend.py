"""Finding what is damaged in the copies of a partition, and writing it again from a good copy.

All in-sync copies have the same bytes, and each batch has checksums.  So a segment is read in
all copies at once, batch by batch.  Where a copy has other bytes, those of the first copy are
right whose batch has its checksums, the leader's before the followers'.  What no copy has whole
stays as it is, for `repair` to drop.

A copy that lacks whole files, or ends before the end of a sealed segment, leaves the ISR
instead, if another one has them, and catches up as that of a directory that comes back.

Order: nothing is cut, and a copy is only written where another one has a whole batch.  Killed
in between, it is as damaged as before, or less, and the next to read it begins again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from typing import Any, NamedTuple

from embedlog import batch as batches
from embedlog import catalog
from embedlog.catalog import PartitionInfo, SegmentInfo
from embedlog.errors import (
    ClosedError,
    CorruptionError,
    EmbedlogError,
    LockTimeoutError,
    ReadOnlyError,
    StorageError,
)
from embedlog.partition import PartitionLog, roll
from embedlog.partition.tail import TAILS, Tail
from embedlog.replication.controller import Controller
from embedlog.replication.directory import LogDirectory
from embedlog.replication.files import make_parents
from embedlog.replication.isr import PartitionAssignment
from embedlog.replication.metadata import ASSIGNMENTS
from embedlog.segment import END_MARK, SegmentFile

_MESSAGE_START = END_MARK[:4]
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
    while True:
        try:
            _mend(log, controller, segments)
            return
        except StorageError as error:
            if not controller.offline_if_broken(error):
                raise


def _mend(
    log: PartitionLog, controller: Controller, segments: Collection[SegmentInfo] | None
) -> None:
    tail = TAILS.get(log.context.live, log.key)
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
            "%s-%d: segment files of directories %s are missing or cut short; they are copied "
            "again from directory %d",
            *(log.topic, log.partition, sorted(incomplete), whole[0]),
        )


def examine(log: PartitionLog, controller: Controller, *, mend: bool = False) -> Comparison:
    """Compare all that the in-sync copies of a partition have.

    Other processes may append, roll, compact and fail meanwhile.  So what looks damaged is read
    again under the partition's lock, if that can be taken; and is mended then, with ``mend``.
    """
    with suppress(StorageError):  # perhaps of a file that was just deleted
        found = _examine_once(log, controller)
        if found is not None and not found.differences:
            return found
    with ExitStack() as lock:
        # Of a log that was opened to read only, there is no lock.
        with suppress(*(() if mend else (LockTimeoutError, ReadOnlyError))):
            log.acquire()
            lock.callback(log.release)
        found = _examine_once(log, controller) or Comparison([])
        if mend and found.differences:
            mend_copies(log, controller, _segments(log))
        return found


def _examine_once(log: PartitionLog, controller: Controller) -> Comparison | None:
    """Compare the copies; None if a directory has just gone offline."""
    tail = None
    with suppress(CorruptionError):  # what is damaged is found next
        tail = log.tail()
    try:
        return _compare(log, controller, _segments(log), tail, mend=False)
    except ClosedError:
        if log.context.closed:
            raise
    except StorageError as error:
        if not controller.offline_if_broken(error):
            raise
    return None


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
    """Return what lacks files, or their ends, which another in-sync copy has.

    Returns the ids of the directories, and those of the segments that are cut short somewhere.
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
        segment = _Segment(log, info, tail, directories, keep)
        try:
            for difference in segment.differences(mend):
                first.setdefault(difference.copy, difference)
        finally:
            segment.close()
        is_lost |= segment.is_lost
    return Comparison(sorted(first.values(), key=lambda each: (each.offset, each.copy)), is_lost)


class _Good(NamedTuple):
    """Consecutive batches that have their checksums."""

    stop: int
    next_offset: int


class _Copy:
    """A segment file in one directory, which may be damaged or missing."""

    def __init__(self, log: PartitionLog, info: SegmentInfo, directory: LogDirectory) -> None:
        self.directory, self.path = directory, log.path_of(info)
        self.file: SegmentFile | None = None
        self.header, self.schema = b"", None
        """What it begins with, if that is the schema of the segment."""
        self._changed = False
        try:
            self.file = log.open_segment(info, files=directory.files)
            self.header, self.schema = self.file.bytes(0, self.file.start), self.file.schema
        except CorruptionError:
            pass
        except StorageError as error:
            if not error.missing:
                raise
        self.size = 0 if self.file is None else self.file.size()

    def assume(self, schema: Any) -> None:
        """Read its batches by a schema, whatever it begins with."""
        if self.file is not None:
            self.file.close()
            self.file = SegmentFile(self.directory.files, self.path, schema=schema)

    def read(self, start: int, stop: int) -> bytes:
        """Return a range of the file, as far as it has it."""
        return b"" if self.file is None else self.file.bytes(start, stop - start)

    def good(self, position: int, stop: int, offset: int) -> _Good | None:
        """Return the batches from a position on that have their checksums, about a chunk of them.

        None if the first one has not, or begins below an offset.
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
                    found = _Good(batch.position + batch.size, offset)
            if found is not None:
                break
        return found

    def next_good(self, position: int, stop: int, offset: int) -> int | None:
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

    def write(self, data: bytes, position: int) -> None:
        """Replace bytes of the file, which may be missing."""
        files = self.directory.files
        make_parents(files, self.path)
        self._changed = True
        with files.opened(self.path, write=True, create=True) as fd:
            files.write(fd, [data], position)

    def truncate(self, size: int) -> None:
        """Cut the file."""
        self._changed = True
        with self.directory.files.opened(self.path, write=True) as fd:
            self.directory.files.truncate(fd, size)

    def close(self, directories: Sequence[str]) -> None:
        """Flush what was written."""
        if self.file is not None:
            self.file.close()
        if self._changed:
            files = self.directory.files
            with files.opened(self.path, write=True) as fd:
                files.sync(fd)
            for path in directories if self.file is None else ():
                files.sync_directory(path)


class _Segment:
    """A segment in all in-sync copies."""

    def __init__(
        self,
        log: PartitionLog,
        info: SegmentInfo,
        tail: Tail | None,
        directories: Sequence[LogDirectory],
        keep: Collection[int],
    ) -> None:
        self._log, self._info, self._tail, self._keep = log, info, tail, keep
        self._copies = [_Copy(log, info, each) for each in directories]
        if tail is not None and tail.empty and not info.sealed:
            # The first append creates it where it is missing.
            self._copies = [copy for copy in self._copies if copy.file is not None]
        self.is_lost = False

    def close(self) -> None:
        """Close the files, and flush what was written."""
        for copy in self._copies:
            copy.close(self._log.directories)

    def differences(self, mend: bool) -> Iterator[ReplicaDifference]:
        """Yield where copies are damaged, lack something, or differ; with ``mend`` writes that."""
        source = self._source_of_header()
        if source is None:
            yield from self._lost(self._info.base_offset)
            return
        for copy in self._copies:
            copy.assume(source.schema)
        header, offset = source.header, self._info.base_offset
        position, stop = len(header), self._stop()
        for copy in self._copies:
            if copy.read(0, position) != header:
                yield self._difference(copy, offset, "it does not begin with its schema")
                if mend and copy.directory.id not in self._keep:
                    copy.write(header, 0)
        end = position
        while position < stop:
            found = self._first_good(position, stop, offset)
            if found is None:
                if self._tail is not None or self._info.sealed:
                    yield from self._lost(offset)
                after = [each.next_good(position, stop, offset) for each in self._copies]
                position = min((each for each in after if each is not None), default=stop)
                continue
            source, good = found
            yield from self._others(source, position, good, offset, mend)
            position, offset = good
            end = position
        yield from self._end(end, mend)

    def _source_of_header(self) -> _Copy | None:
        """Return a copy that begins with the schema of the segment.

        No checksum covers that, but it says what the segment is, and is written by a known rule.
        """
        schemas = [roll.schema_of(self._log, self._info, offsets) for offsets in (False, True)]
        expected = {schema.serialize().to_pybytes() for schema in schemas}
        named = [copy for copy in self._copies if copy.header]
        return next(chain((copy for copy in named if copy.header in expected), named), None)

    def _stop(self) -> int:
        """Return where the batches end."""
        if self._info.end_position:
            return self._info.end_position
        if self._tail is not None and not self._info.sealed:
            return self._tail.log_end_position
        return max((copy.size for copy in self._copies), default=0)

    def _first_good(self, position: int, stop: int, offset: int) -> tuple[_Copy, _Good] | None:
        for copy in self._copies:
            good = copy.good(position, stop, offset)
            if good is not None:
                return copy, good
        return None

    def _others(
        self, source: _Copy, position: int, good: _Good, offset: int, mend: bool
    ) -> Iterator[ReplicaDifference]:
        """Compare some whole batches of one copy with what the others have there."""
        data = source.read(position, good.stop)
        for copy in self._copies:
            if copy is not source and copy.read(position, good.stop) != data:
                yield self._first_difference(source, copy, position, good, offset)
                if mend and copy.directory.id not in self._keep:
                    copy.write(data, position)

    def _first_difference(
        self, source: _Copy, copy: _Copy, position: int, good: _Good, offset: int
    ) -> ReplicaDifference:
        """Return the first batch that a copy has not, of some that another one has."""
        assert source.file is not None
        for batch in source.file.scan(position, good.stop):
            begin, end, offset = batch.position, batch.position + batch.size, batch.base_offset
            if copy.read(begin, end) == source.read(begin, end):
                continue
            if copy.file is None:
                return self._difference(copy, offset, "the file is missing")
            if copy.size < end:
                return self._difference(copy, offset, f"the file is cut short at byte {copy.size}")
            if copy.good(begin, end, offset) is None:
                return self._difference(copy, offset, f"the batch at byte {begin} is damaged")
            break
        return self._difference(copy, offset, "it has another batch there", source)

    def _end(self, end: int, mend: bool) -> Iterator[ReplicaDifference]:
        """Compare what follows the last batch: the end mark of a sealed segment."""
        if self._info.sealed and self._info.size:
            mark, size = self._info.end_position, self._info.size
            for copy in self._copies:
                if copy.size == size and copy.read(mark, size) == END_MARK:
                    continue
                yield self._difference(copy, self._info.next_offset or 0, "its end mark is missing")
                if mend and copy.directory.id not in self._keep:
                    copy.write(END_MARK, mark)
                    copy.truncate(size)
        elif mend and self._tail is None and self._copies:
            # Otherwise what a recovery cuts at the leader would stay in a longer follower.
            size = max(self._copies[0].size, end)
            for copy in self._copies:
                if copy.size > size:
                    copy.truncate(size)

    def _lost(self, offset: int) -> Iterator[ReplicaDifference]:
        """Yield a difference for each copy, since all of them are damaged."""
        self.is_lost = True
        for copy in self._copies:
            yield self._difference(copy, offset, "damaged, as in all other copies")

    def _difference(
        self, copy: _Copy, offset: int, what: str, reference: _Copy | None = None
    ) -> ReplicaDifference:
        path = None if reference is None else reference.directory.path
        return ReplicaDifference(
            *(self._log.topic, self._log.partition, offset, copy.directory.path, path, what)
        )
