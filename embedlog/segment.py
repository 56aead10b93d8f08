"""A segment file: an Arrow IPC stream of batches, appended to, sealed, then only read.

The active segment is read by `pread` and never mapped: it may be truncated after a failed
flush, and to touch a map beyond the end of its file is a SIGBUS.  A sealed segment is
mapped, so a batch becomes Arrow arrays without a copy, and stays readable after the file
is unlinked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

from embedlog import batch as batches
from embedlog.batch import Batch, BatchRun, BatchSource, Reread
from embedlog.batch.decode import head_length
from embedlog.batch.messages import is_of_bytes
from embedlog.batch.wire import BufferLayout, bytes_layout, layout_of
from embedlog.errors import CorruptBatchError, CorruptionError, UnsupportedFormatError
from embedlog.files import Files
from embedlog.forks import cached_property
from embedlog.hints import VERIFY, VERIFY_THEN_REPAIR
from embedlog.lazy import pa

END_MARK = b"\xff\xff\xff\xff\x00\x00\x00\x00"
CHUNK_BYTES = 1 << 20
MOST_AHEAD = 1 << 20
"""How many bytes of zeros an active segment may have behind its last batch."""
_LARGEST_SCHEMA = 1 << 20
_FIRST_BYTES = 8 << 10
"""Read at least this much at once: many small batches, or the head of a large one."""
_MAPPED_BYTES = 256 << 10
"""Map a sealed file for reads of at least this size."""
_HEAD_BYTES = 4096
"""Read at least this much of a batch for its head."""
_PARTLY_READ_BYTES = 32 << 10
"""From here on, some columns of a batch are read by themselves; less is read faster at once."""
_MANY_BYTES = 256 << 10
"""From here on data is read into Arrow's memory: malloc returns new pages for each read."""

_Piece = TypeVar("_Piece")
_Decode = Callable[[BatchSource, int, int, int], list[_Piece]]


class SegmentFile:
    """One open segment file.

    It closes itself when there are no references to it, so a reader can finish with a
    segment that its log has dropped.  Not shared across a fork.

    If given, ``schema`` overrides the one in the file (used when that one is damaged).
    If given, ``expected`` returns the layouts that it may have: no checksum covers its schema.
    If given, ``reread`` is called with what is damaged, before an error is raised.
    """

    def __init__(
        self,
        files: Files,
        path: str,
        *,
        write: bool = False,
        schema: pa.Schema | None = None,
        expected: Callable[[], tuple[BufferLayout, ...]] = tuple,
        reread: Reread | None = None,
    ) -> None:
        self.path, self._expected, self.reread = path, expected, reread
        self._files, self._pid = files, os.getpid()
        self.fd: int | None = files.open(path, write=write)
        files.keep(self.fd)
        self._map: BatchSource | None = None
        self._layout = None if schema is None else layout_of(schema)
        self._start = 0

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; maps in use stay valid."""
        fd, self.fd = getattr(self, "fd", None), None
        # In a forked child the descriptor may be another file's.
        if fd is not None and self._pid == os.getpid():
            self._files.close(fd)

    @property
    def layout(self) -> BufferLayout:
        """Where its batches have their columns."""
        if self._layout is None:
            self._read_schema()
            assert self._layout is not None
        return self._layout

    @property
    def schema(self) -> pa.Schema:
        """The columns of its batches."""
        return self.layout.original

    @cached_property
    def has_offsets(self) -> bool:
        """Whether its batches have an offset column, as in a compacted segment."""
        return self.layout.has_offsets

    @property
    def start(self) -> int:
        """Where its first batch begins."""
        if self._layout is None:
            self._read_schema()
        return self._start

    def _read_schema(self) -> None:
        try:
            self._decode_schema()
        except CorruptionError:
            if self.reread is None or self.reread(0, 0) is None:
                raise
            self._decode_schema()

    def _decode_schema(self) -> None:
        head = self._files.read(self._open_fd(), 4096, 0)
        length = 8 + int.from_bytes(head[4:8], "little") if len(head) >= 8 else 0
        if head[:4] != END_MARK[:4] or not 8 < length <= _LARGEST_SCHEMA:
            raise self._foreign("it does not begin with an Arrow schema")
        if length > len(head):
            head = self._files.read(self._open_fd(), length, 0)
        if is_of_bytes(head[:length]):
            layout = bytes_layout()
        else:
            try:
                layout = _layout_of(head[:length])
            except (pa.ArrowException, OSError, LookupError, TypeError, ValueError) as error:
                raise self._foreign(f"its schema is damaged: {error}") from error
        expected = self._expected()
        if expected and not any(map(layout.has_columns_of, expected)):
            raise self._foreign("its schema is damaged: these are not its columns")
        self._layout, self._start = layout, length

    def _foreign(self, what: str) -> CorruptionError:
        return CorruptionError(
            f"Not a segment of this log: {what}",
            path=self.path,
            position=0,
            todo=VERIFY,
        )

    def _open_fd(self) -> int:
        assert self.fd is not None, "the segment was closed"
        return self.fd

    # Writing; only under the partition's lock

    def write(self, buffers: list[Any], position: int) -> int:
        """Write at a position; return the number of bytes."""
        assert self.fd is not None, "the segment was closed"
        return self._files.write(self.fd, buffers, position)

    def size(self) -> int:
        """Return the length of the file."""
        assert self.fd is not None, "the segment was closed"
        return self._files.size(self.fd)

    def check_linked(self) -> None:
        """Raise `LogDeletedError` if the file was deleted."""
        self._files.check_linked(self._open_fd())

    def bytes(self, position: int, length: int) -> bytes:
        """Return raw bytes of the file."""
        return self._files.read(self._open_fd(), length, position)

    def is_blank(self, position: int, length: int = 8) -> bool:
        """Whether there are only zeros, as of preallocated space, or the file ends."""
        assert self.fd is not None, "the segment was closed"
        return not self._files.read(self.fd, length, position).strip(b"\0")

    def seal(self, position: int) -> None:
        """Write the end mark, after which the file ends."""
        end = position + self.write([END_MARK], position)
        if self.size() > end:
            self.truncate(end)

    def truncate(self, size: int) -> None:
        """Cut what lies past ``size``."""
        self._files.truncate(self._open_fd(), size)

    def sync(self) -> None:
        """Flush the file to the disk; a failure is final."""
        self._files.sync(self._open_fd())

    def drop_cache(self) -> None:
        """Drop the file from the page cache, to read what is on the disk."""
        self._files.drop_cache(self._open_fd())

    # Reading

    def read(self, position: int, stop: int, max_bytes: int = CHUNK_BYTES) -> list[Batch]:
        """Return whole batches from ``position``, at least one if there is one.

        Args:
            position: Where the first batch begins.
            stop: Where the published batches end; nothing beyond is read.
            max_bytes: About how much to read at once.

        Raises:
            CorruptBatchError: The first batch is damaged; a damaged batch behind good ones
                is left for the next call.
        """
        return self._decoded(BatchSource.batches, position, stop, max_bytes)

    def read_columns(
        self, position: int, stop: int, max_bytes: int, indexes: Collection[int]
    ) -> list[Batch]:
        """As `read`, but of large batches only the heads and some columns are read.

        The other columns of these batches cannot be decoded.

        Args:
            position: Where the first batch begins.
            stop: Where the published batches end.
            max_bytes: About how much to read at once; the columns left out count as well.
            indexes: The columns to read, by their index in `schema`.
        """
        size = min(max_bytes, stop - position)
        # Memory that is never touched takes none.
        memory = pa.allocate_buffer(size)
        view = memoryview(memory).cast("B")
        source = BatchSource(memory, self.path, position, self.layout, indexes, self.reread)
        read: list[Batch] = []
        start = 0
        # The next read reports an error, if it is its first batch.
        with suppress(CorruptionError, UnsupportedFormatError):
            while start < size:
                self._read_head(view[start:], position + start)
                batch = Batch(source, start, size)
                if batch.size < _PARTLY_READ_BYTES:
                    break
                for begin, end in joined(map(batch.column_range, sorted(indexes))):
                    part = view[start + begin : start + end]
                    if self._read_into(part, position + start + begin) < len(part):
                        raise self._ended(position + start)
                read.append(batch)
                start += batch.size
        return read or self.read(position, stop, max_bytes)

    def _read_head(self, view: memoryview, position: int) -> None:
        """Read what a batch has before its columns, and perhaps more; fewer bytes at the end."""
        length = self._read_into(view[:_HEAD_BYTES], position)
        whole = head_length(view[:length], path=self.path, position=position) or 0
        if whole > length:
            self._read_into(view[length:whole], position + length)

    def _read_into(self, view: memoryview, position: int) -> int:
        return self._files.read_into(self._open_fd(), view, position)

    def mapped(self, position: int, stop: int, max_bytes: int = CHUNK_BYTES) -> list[Batch]:
        """As `read`, over a map of the whole sealed file: no copies.

        Small reads are copied nevertheless: for a batch of 126 KB a copy takes 18 µs, a map
        and its page faults 24, and a copy is in the cache when it is checksummed.
        """
        return self._decoded_from_map(BatchSource.batches, position, stop, max_bytes)

    def read_fast(
        self, position: int, stop: int, max_bytes: int = CHUNK_BYTES
    ) -> list[Batch | BatchRun]:
        """As `read`, with each run of small batches as one."""
        return self._decoded(batches.batches_fast, position, stop, max_bytes)

    def mapped_fast(
        self, position: int, stop: int, max_bytes: int = CHUNK_BYTES
    ) -> list[Batch | BatchRun]:
        """As `mapped`, with each run of small batches as one."""
        return self._decoded_from_map(batches.batches_fast, position, stop, max_bytes)

    def _decoded(
        self,
        decode: _Decode[_Piece],
        position: int,
        stop: int,
        max_bytes: int,
        again: bool = True,
    ) -> list[_Piece]:
        want = min(max(max_bytes, _FIRST_BYTES), stop - position)
        try:
            while want > 0:
                data, last = self._read(want, position), want >= stop - position
                length = 0
                if not last:
                    # A batch that is longer than this, by its own header, is not decoded yet.
                    try:
                        length = batches.message_length(data, path=self.path, position=position)
                    except CorruptBatchError:
                        pass
                if length <= want:
                    whole = self._whole(decode, data, position, max_bytes, last)
                    if whole:
                        return whole
                    if last or bytes(data[:8]) == END_MARK:
                        raise self._ended(position)
                    length = want * 4
                want = min(length, stop - position)
        except CorruptBatchError:
            if not again or self.reread is None or self.reread(position, 0) is None:
                raise
            return self._decoded(decode, position, stop, max_bytes, again=False)
        return []

    def _read(self, length: int, position: int) -> Any:
        fd = self._open_fd()
        if length < _MANY_BYTES:
            return self._files.read(fd, length, position)
        memory = pa.allocate_buffer(max(0, min(length, self.size() - position)))
        return memory.slice(0, self._files.read_into(fd, memory, position))

    def _ended(self, position: int) -> CorruptBatchError:
        """Return the error for an end mark before ``stop``, which must not hide records."""
        return CorruptBatchError(
            "This is not the batch that was written: the stream ends here",
            todo=VERIFY_THEN_REPAIR,
            path=self.path,
            position=position,
            reason="an end mark before the end",
        )

    def _whole(
        self, decode: _Decode[_Piece], data: Any, position: int, max_bytes: int, last: bool
    ) -> list[_Piece]:
        source = BatchSource(data, self.path, position, self.layout, reread=self.reread)
        try:
            return decode(source, 0, len(data), max_bytes)
        except CorruptBatchError as error:
            if last or error.reason != "truncated":
                raise
        return []

    def _decoded_from_map(
        self, decode: _Decode[_Piece], position: int, stop: int, max_bytes: int
    ) -> list[_Piece]:
        size = self.size() if self._map is None else len(self._map.view)
        if stop > size and self.reread is not None and self.reread(size, 0) is not None:
            size = self.size()
        if stop > size:
            raise CorruptionError(
                f"The file ends at byte {size}, {stop} were published",
                path=self.path,
                position=size,
            )
        if self._map is None:
            if max_bytes < _MAPPED_BYTES or not self._files.maps_segments:
                return self._decoded(decode, position, stop, max_bytes)
            layout = self.layout  # read from the file before it is closed
            data = self._files.map_data(self._open_fd(), size)
            self._map = BatchSource(data, self.path, 0, layout, reread=self.reread)
            self.close()
        whole = decode(self._map, position, stop, max_bytes)
        if not whole and position < stop:
            raise self._ended(position)
        return whole

    def heads(self, position: int, stop: int) -> Iterator[Batch]:
        """Yield every batch of ``[position, stop)``, of which only the head was read.

        Their columns cannot be read; their offsets, counts and statistics can.

        Raises:
            CorruptBatchError: A head is damaged.
        """
        while position < stop:
            try:
                batch = self._head_at(position, stop)
            except CorruptBatchError:
                if self.reread is None or self.reread(position, 0) is None:
                    raise
                batch = self._head_at(position, stop)
            yield batch
            position += batch.size

    def _head_at(self, position: int, stop: int) -> Batch:
        data = self._files.read(self._open_fd(), min(_HEAD_BYTES, stop - position), position)
        length = head_length(data, path=self.path, position=position)
        if length is None:
            raise self._ended(position)
        if length > len(data):
            data = self._files.read(self._open_fd(), length, position)
        # The layout of the last head may be longer than this one.
        padded = bytes(data) + bytes(_HEAD_BYTES)
        return Batch(BatchSource(padded, self.path, position, self.layout), 0, stop - position)

    def scan(self, position: int, stop: int) -> Iterator[Batch]:
        """Yield every batch of ``[position, stop)``, headers checked, bodies not."""
        while position < stop:
            for batch in self.read(position, stop):
                yield batch
                position += batch.size


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges ``[start, stop)``, which are in order, with those as one that meet."""
    result: list[tuple[int, int]] = []
    for start, stop in ranges:
        if result and result[-1][1] == start:
            start, _ = result.pop()
        result.append((start, stop))
    return result


@lru_cache(maxsize=256)
def _layout_of(head: bytes) -> BufferLayout:
    """Decode a schema once: caches of what is derived from it use its identity."""
    return layout_of(pa.ipc.read_schema(pa.py_buffer(head)))


def path_of(directory: str, partition: int, file_name: str) -> str:
    """Return the path of a segment, below the root."""
    return f"{directory}/{partition}/{file_name}"


def key_index_path(path: str) -> str:
    """Return the path of the key index of a segment, given that of its file."""
    return path.removesuffix("arrows") + "keys"


def create(files: Files, path: str, head: bytes, reread: Reread | None = None) -> SegmentFile:
    """Create an empty segment, with the message of its schema only; a file there is truncated."""
    with files.opened(path, write=True, create=True) as fd:
        if files.size(fd):
            files.truncate(fd, 0)
            # Else a power cut could leave old batches behind the new schema.
            files.sync(fd)
        files.write(fd, [head], 0)
    return SegmentFile(files, path, write=True, reread=reread)
