"""The copies of a segment in several directories: which has what whole, and where each ends.

All copies have the same bytes, and each batch has checksums.  So a segment is read in pieces of
whole batches: each is right as the first copy has it in which the batches have their checksums.
Whoever makes copies equal writes these pieces to those that have other bytes there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from itertools import chain
from typing import Any, NamedTuple

from embedlog import batch as batches
from embedlog import catalog
from embedlog.catalog import SegmentInfo
from embedlog.errors import CorruptionError, EmbedlogError, StorageError
from embedlog.files import Files
from embedlog.partition import PartitionLog, leader_epochs, roll
from embedlog.partition.tail import Tail
from embedlog.replication.directory import LogDirectory
from embedlog.replication.files import make_parents
from embedlog.segment import END_MARK, SegmentFile

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
    schemas = [roll.schema_of(log, info, offsets) for offsets in (False, True)]
    expected = {schema.serialize().to_pybytes() for schema in schemas}
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
