"""Decodes the bytes of a batch into columns; checks only what is read."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NoReturn

from embedlog.batch import compression, decode_rows
from embedlog.batch.arrays import in_ms, numbers, repeated
from embedlog.batch.wire import (
    COLUMN_FLAGS,
    COMPRESSED,
    CONTINUATION,
    END_MAGIC,
    END_OF_STREAM,
    EXPLICIT_OFFSETS,
    HEADER,
    HEADERS,
    LOG_APPEND_TIME,
    MAGIC,
    MAX_HEAD_BYTES,
    MAX_MESSAGE_BYTES,
    MIN_BLOCK,
    PREFIX,
    SEAL,
    SEALED,
    TOMBSTONES,
    TRAILER,
    TYPED,
    VERSION,
    BufferLayout,
    ColumnSelection,
    decoded_size,
    find_message,
    layout_of,
    timestamp_type,
)
from embedlog.checksum import crc32c, extend
from embedlog.errors import CorruptBatchError, UnsupportedFormatError
from embedlog.hints import VERIFY_THEN_REPAIR
from embedlog.lazy import np, pa

_TABLE = 18
"""Where the column table begins in the fields of a block: (end, CRC, nulls) per column."""
_FEW_BYTES = 4096
"""Up to here bytes are copied: to create an Arrow buffer is slower after a sleep."""

Reread = Callable[[int, int], bytes | None]
"""Gets a position in a file, and a length, where something is damaged.

Returns the bytes that are there after another copy of the file was used; None if there is none.
"""


class BatchSource:
    """The bytes that batches are read from, and where they are in a file.

    Args:
        buffer: Bytes, a map of a file, or a `pyarrow.Buffer`.
        path: The file, for errors.
        shift: Position in the file minus position in the buffer.
        layout: Where the columns of the segment are.
        indexes: The columns whose bytes it has; None for all.
        reread: Returns the bytes of a batch with a wrong checksum, if another copy has it.
    """

    __slots__ = (
        *("_whole", "buffer", "indexes", "layout", "path", "reread"),
        *("shift", "slice", "slice_for_arrow", "view"),
    )

    def __init__(
        self,
        buffer: Any,
        path: str,
        shift: int,
        layout: BufferLayout,
        indexes: Collection[int] | None = None,
        reread: Reread | None = None,
    ) -> None:
        self.buffer, self.path, self.shift, self.indexes = buffer, path, shift, indexes
        self.layout, self.reread = layout, reread
        self.view = memoryview(buffer)
        # Both slices take a start and a length.
        if hasattr(buffer, "slice"):
            self.slice = self.slice_for_arrow = buffer.slice
            self.view = self.view.cast("B")  # Arrow's "b" does not compare equal to bytes
        else:
            self._whole: Any = None
            small = len(self.view) <= _FEW_BYTES
            self.slice_for_arrow = self._slice_as_buffer
            self.slice = self._slice_bytes if small else self._slice_as_buffer

    def _slice_bytes(self, start: int, length: int) -> bytes:
        return self.buffer[start : start + length]  # type: ignore[no-any-return]

    def _slice_as_buffer(self, start: int, length: int) -> Any:
        if self._whole is None:
            self._whole = pa.py_buffer(self.buffer)
        return self._whole.slice(start, length)

    def batches(self, start: int, stop: int, max_bytes: int) -> list[Batch]:
        """Return the batches of ``[start, stop)`` until they have ``max_bytes``.

        Stops before a damaged batch and at the end of the stream.

        Raises:
            CorruptBatchError: The first batch is damaged, as for `parse`.
            UnsupportedFormatError: A newer version of embedlog wrote the first batch.
        """
        batches: list[Batch] = []
        stop = min(stop, len(self.view))
        enough = start + max_bytes
        while start < stop:
            try:
                batch = Batch(self, start, stop)
            except (CorruptBatchError, UnsupportedFormatError):
                if batches or self.view[start : start + 8] == END_OF_STREAM:
                    break
                raise
            batches.append(batch)
            start += batch.size
            if start >= enough:
                break
        return batches

    def corrupt(self, start: int, reason: str) -> NoReturn:
        """Raise a `CorruptBatchError` for the batch at ``start`` of the buffer."""
        raise _corrupt(reason, self.path, start + self.shift)


class HeadLayout:
    """The lengths of the parts of a head, which are the same for nearly all batches of a segment.

    With them, one struct unpacks a whole head.
    """

    def __init__(self, layout: BufferLayout, extent: int, block_length: int) -> None:
        self.size, self.block = 8 + extent, 8 + extent - block_length
        columns = len(layout.names)
        sealed = block_length - SEAL.size
        self.unpack_parts = struct.Struct(f"<{self.block}s4sI{sealed}s").unpack_from
        """Prefix and flatbuffer, the block's magic and CRC, and what the CRC covers."""
        table = "QII" * columns
        filler = block_length - MIN_BLOCK - 16 * columns
        self.unpack_fields = struct.Struct(f"{SEALED.format}{table}{filler}x8x").unpack
        self.begin = PREFIX.pack(CONTINUATION, extent)
        self.end = TRAILER.pack(block_length, END_MAGIC)
        self.last: tuple[bytes, int, bool] = (b"", 0, False)
        """The last prefix and flatbuffer, its CRC, and whether it is uncompressed.

        Batches of equal sizes have equal ones, and comparing takes a tenth of a CRC.
        """


_head_layout = lru_cache(maxsize=256)(HeadLayout)
"""Returns the same object for the same lengths: those of compressed batches alternate."""


def _corrupt(reason: str, path: str, position: int) -> CorruptBatchError:
    return CorruptBatchError(
        f"The batch is damaged: {reason}",
        todo=VERIFY_THEN_REPAIR,
        path=path,
        position=position,
        reason=reason,
    )


class Batch:
    """One batch in a buffer, its head and block checked; the columns are decoded on demand.

    Offsets are ``[base_offset, next_offset)``, timestamps are ms since 1970, and ``position`` is
    that in the file.  The buffer stays alive as long as the batch or an uncompressed column.
    """

    __slots__ = (
        *("_block", "_body", "_fields", "_plain", "_source", "_start"),
        *("base_offset", "base_sequence", "count", "delete_horizon", "flags", "leader_epoch"),
        *("max_timestamp", "min_timestamp", "next_offset", "producer_epoch", "producer_id", "size"),
    )

    base_offset: int
    next_offset: int
    count: int
    size: int
    flags: int
    leader_epoch: int
    min_timestamp: int
    max_timestamp: int
    producer_id: int | None
    producer_epoch: int | None
    base_sequence: int | None
    delete_horizon: int | None

    def __init__(self, source: BatchSource, start: int, limit: int) -> None:
        self._source, self._start = source, start
        layout = source.layout
        fields = self._read_head_fast(layout.head_layout, limit) or self._read_head(limit)
        self._fields = fields
        (_, version, self.flags, self.count, columns, _, length,
         self.size, self.base_offset, self.next_offset,
         self.leader_epoch, epoch, _, sequence,
         self.min_timestamp, self.max_timestamp, producer, horizon,
        ) = fields[:_TABLE]  # fmt: skip
        if producer < 0:
            self.producer_id = self.producer_epoch = self.base_sequence = None
        else:
            self.producer_id, self.producer_epoch, self.base_sequence = producer, epoch, sequence
        self.delete_horizon = None if horizon < 0 else horizon
        span = self.next_offset - self.base_offset
        plausible = (
            version == VERSION
            and length == self._body - self._block
            and columns == len(layout.names)
            # Only compaction leaves gaps, or an empty batch (D11).
            and (self.count == span or (self.flags & EXPLICIT_OFFSETS and self.count <= span))
            and self.base_offset >= 0
            and self._body - start <= self.size <= MAX_MESSAGE_BYTES
            and not self.size & 7
            and self.flags & COLUMN_FLAGS == layout.flags
        )
        if not plausible:
            self._refuse(version, columns)
        if self.size > limit - start:
            source.corrupt(start, "truncated")

    def _read_head_fast(self, head_layout: HeadLayout | None, limit: int) -> tuple[Any, ...] | None:
        """Check the head and return its fields, as `_read_head` does; None if anything is unusual.

        Skips finding the lengths of its parts, which are those of the last batch.
        """
        start = self._start
        if head_layout is None or start + head_layout.size > limit:
            return None
        head, magic, crc, sealed = head_layout.unpack_parts(self._source.view, start)
        if magic != MAGIC or crc != extend(0, sealed) or not sealed.endswith(head_layout.end):
            return None
        fields: tuple[Any, ...] = head_layout.unpack_fields(sealed)
        last = head_layout.last
        if head != last[0]:
            if not head.startswith(head_layout.begin):
                return None
            last = head_layout.last = head, crc32c(head), self._source.layout.is_plain(head)
        if fields[0] != last[1]:
            return None
        self._block, self._body = start + head_layout.block, start + head_layout.size
        self._plain = last[2]
        return fields

    def _read_head(self, limit: int) -> tuple[Any, ...]:
        """Check the head and return its fields.

        Raises:
            CorruptBatchError: The reason says what is wrong.
        """
        source, start = self._source, self._start
        path, position, layout = source.path, self.position, source.layout
        size = head_length(source.view[start : min(start + 8, limit)], path=path, position=position)
        if size is None:
            source.corrupt(start, "no batch begins here")
        if size > limit - start:
            source.corrupt(start, "truncated")
        block = _block_of(source.view[start : start + size], path, position)
        self._body = start + size
        self._block = self._body - len(block)
        fields = SEALED.unpack_from(block, SEAL.size)
        head = source.view[start : self._block].tobytes()
        if fields[0] != crc32c(head):
            source.corrupt(start, "the metadata's CRC is wrong")
        self._plain = layout.is_plain(head)
        columns = len(layout.names)
        if fields[4] != columns or len(block) < MIN_BLOCK + 16 * columns:
            self._refuse(fields[1], fields[4])
        layout.head_layout = _head_layout(layout, size - 8, len(block))
        return fields + layout.table.unpack_from(block, HEADER.size)

    def _refuse(self, version: int, columns: int) -> NoReturn:
        source = self._source
        if version > VERSION:
            raise UnsupportedFormatError(
                f"A batch has format version {version}, which is too new",
                todo="Use a newer embedlog.",
                path=source.path,
            )
        if columns != len(source.layout.names):
            reason = f"it has {columns} columns, its segment {len(source.layout.names)}"
            source.corrupt(self._start, reason)
        source.corrupt(self._start, "its counts and lengths contradict each other")

    def __repr__(self) -> str:
        path = self._source.path
        return f"<Batch [{self.base_offset}, {self.next_offset}) at byte {self.position} of {path}>"

    @property
    def position(self) -> int:
        """The position of the batch in its file."""
        return self._start + self._source.shift

    @property
    def gap(self) -> int:
        """How many offsets between it and the batch before it never had a record here."""
        return int(self._fields[5] | self._fields[12] << 16)

    @property
    def has_headers(self) -> bool:
        """Whether the batch has the headers column."""
        return bool(self.flags & HEADERS)

    @property
    def has_offsets(self) -> bool:
        """Whether the last column holds the offsets (compacted segments)."""
        return bool(self.flags & EXPLICIT_OFFSETS)

    @property
    def is_log_append_time(self) -> bool:
        """Whether the log, not the producer, set the timestamps."""
        return bool(self.flags & LOG_APPEND_TIME)

    @property
    def is_compressed(self) -> bool:
        """Whether the columns take more memory than in the file."""
        return bool(self.flags & COMPRESSED)

    @property
    def schema(self) -> Any:
        """The columns as stored, without the segment's metadata."""
        return self._source.layout.schema

    @property
    def layout(self) -> BufferLayout:
        """Where its columns are; the same object for all batches of a segment."""
        return self._source.layout

    @property
    def codec(self) -> str:
        """The compression: ``none``, ``lz4`` or ``zstd``."""
        if not self.flags & COMPRESSED:
            return "none"
        return find_message(self._source.view[self._start : self._block]).codec

    @property
    def statistics(self) -> bytes:
        """The statistics in its block; empty if it has none."""
        begin = self._block + HEADER.size + 16 * len(self._source.layout.names)
        return self._source.view[begin : self._body - TRAILER.size].tobytes()

    def null_count_at(self, index: int) -> int:
        """Return how many rows of a column, by its index, are null."""
        return int(self._fields[_TABLE + 3 * index + 2])

    def null_count(self, name: str) -> int:
        """Return how many rows of a column are null; reads the block and decodes nothing."""
        return int(self._fields[_TABLE + 3 * self._source.layout.names.index(name) + 2])

    @property
    def is_typed(self) -> bool:
        """Whether the batch has the columns of a typed topic."""
        return bool(self.flags & TYPED)

    @property
    def may_lack_keys(self) -> bool:
        """Whether a record may have no key; reads the block and decodes nothing."""
        key = self._source.layout.key
        return not key or all(self.null_count(name) for name in key)

    @property
    def may_have_tombstones(self) -> bool:
        """Whether a record may be a tombstone; reads the block and decodes nothing."""
        if self.flags & TYPED:
            return bool(self.flags & TOMBSTONES)
        return self.null_count("value") > 0

    def keys(self, verify: bool = True) -> Any:
        """Return the key of each row as a `pyarrow.BinaryArray`.

        Raises:
            CorruptBatchError: As `columns`.
        """
        layout = self._source.layout
        if not layout.key:
            return pa.nulls(self.count, pa.binary())
        return layout.keys_of(self.columns(layout.key, verify))

    def timestamps(self, verify: bool = True) -> Any:
        """Return the timestamp of each row, in ms, as a `pyarrow.TimestampArray`.

        Raises:
            CorruptBatchError: As `columns`.
        """
        layout = self._source.layout
        column = self.columns((layout.names[layout.time],), verify).column(0)
        return column if layout.time_in_ms else in_ms(column)

    def times(self) -> Sequence[int]:
        """Return the timestamp of each row, in ms.

        Raises:
            CorruptBatchError: As `columns`.
        """
        is_small = 0 < self.count <= decode_rows.MANY_ROWS
        if self.flags & TYPED or not (self._plain and is_small and self.is_complete):
            return self.timestamps().view(pa.int64()).to_pylist()  # type: ignore[no-any-return]
        (times,) = self._rows(1, verify=True)
        return times

    def columns(self, names: Sequence[str] | None = None, verify: bool = True) -> Any:
        """Return columns as a `pyarrow.RecordBatch`; without ``names`` all but the offsets.

        Checks and decompresses only these columns; copies nothing if they are not compressed.

        Raises:
            CorruptBatchError: A column is damaged, or too large to decode.
            ValueError: There is no such column.
        """
        flags = self.flags
        selected = not flags & EXPLICIT_OFFSETS if names is None else tuple(names)
        selection = self._source.layout.select(selected)
        if self._source.indexes is not None:
            assert {*selection.indexes} <= {*self._source.indexes}, "a column was not read"
        if verify:
            self._check_crcs(selection.indexes)
        columns = self._decode(selection)
        # A compacted batch has records of several appends: the column has their timestamps.
        stamped = flags & (LOG_APPEND_TIME | EXPLICIT_OFFSETS) == LOG_APPEND_TIME
        if stamped and self._source.layout.time in selection.indexes:
            index = selection.indexes.index(self._source.layout.time)
            field = selection.schema.field(index)
            times = repeated(self.max_timestamp, timestamp_type(), self.count)
            columns = columns.set_column(index, field, times.cast(field.type))
        return columns

    @property
    def head_size(self) -> int:
        """The bytes before its columns."""
        return self._body - self._start

    def column_range(self, index: int) -> tuple[int, int]:
        """Return where a column, by its index, begins and ends, relative to the batch.

        Raises:
            CorruptBatchError: It is outside of the batch.
        """
        at, head = _TABLE + 3 * index, self.head_size
        end = self._fields[at]
        begin = self._fields[at - 3] if index else 0
        if not begin <= end <= self.size - head:
            self._source.corrupt(self._start, "its columns are outside of it")
        return head + begin, head + end

    def _check_crcs(self, indexes: Sequence[int]) -> None:
        source, start, fields = self._source, self._start, self._fields
        for i in indexes:
            begin, end = self.column_range(i)
            if extend(0, source.slice(start + begin, end - begin)) != fields[_TABLE + 3 * i + 1]:
                self._reread(f"the CRC of column {source.layout.names[i]} is wrong")
                self._check_crcs(indexes)
                return

    def _column_bytes(self, count: int, verify: bool) -> list[bytes]:
        """Return the bytes of the first columns, as they are in the file."""
        source, fields, body = self._source, self._fields, self._body
        columns, begin, size = [], 0, self._start + self.size - body
        for at in range(_TABLE, _TABLE + 3 * count, 3):
            end, crc = fields[at : at + 2]
            if not begin <= end <= size:
                source.corrupt(self._start, "its columns are outside of it")
            column = source.view[body + begin : body + end].tobytes()
            if verify and extend(0, column) != crc:
                name = source.layout.names[(at - _TABLE) // 3]
                self._reread(f"the CRC of column {name} is wrong")
                return self._column_bytes(count, verify)
            columns.append(column)
            begin = end
        return columns

    def _reread(self, reason: str) -> None:
        """Take the bytes of another copy.

        Raises:
            CorruptBatchError: There is none, or it is damaged as well.
        """
        source, reread = self._source, self._source.reread
        data = None if reread is None else reread(self.position, self.size)
        if data is None:
            source.corrupt(self._start, reason)
        # Without `reread`: what is damaged in this one is damaged.
        copy = BatchSource(data, source.path, self.position, source.layout)
        batch = Batch(copy, 0, len(data))
        for name in Batch.__slots__:
            setattr(self, name, getattr(batch, name))

    def check_crcs(self) -> None:
        """Check the CRC of every column; decodes nothing.

        Raises:
            CorruptBatchError: One is wrong.
        """
        self._check_crcs(self._source.layout.column_indexes)

    def _decode(self, selection: ColumnSelection) -> Any:
        source, start = self._source, self._start
        try:
            message = None if self._plain else find_message(source.view[start : self._block])
            if message is not None and message.compressed:
                head, body = source.view[start : self._block], self._body
                arrays = compression.columns(
                    head,
                    source.slice_for_arrow(body, start + self.size - body),
                    message,
                    source.layout,
                    selection.indexes,
                    self.count,
                )
                columns = pa.RecordBatch.from_arrays(arrays, schema=selection.schema)
            else:
                buffer = source.slice_for_arrow(start, self.size)
                columns = pa.ipc.read_record_batch(buffer, selection.leading)
                if selection.leading is not selection.schema:
                    columns = columns.select(selection.indexes)
            columns.validate()
        except (pa.ArrowException, ValueError, OSError, struct.error, IndexError) as error:
            source.corrupt(start, f"Arrow cannot read it: {error}")
        if columns.num_rows != self.count:
            source.corrupt(start, f"it has {columns.num_rows} rows, not {self.count}")
        return columns

    def decoded_bytes(self) -> int:
        """Return how many bytes all columns take when they are decoded, and decode nothing.

        Raises:
            CorruptBatchError: The batch contradicts itself.
        """
        if not self.is_compressed:
            return self.size
        source, start = self._source, self._start
        head, body = source.view[start : self._block], source.view[self._body : start + self.size]
        try:
            message = find_message(head)
            count = message.buffer_count
            ranges = struct.unpack_from(f"<{2 * count}q", head, message.buffers)
            return decoded_size(body, 0, ranges, range(count), message)
        except (struct.error, IndexError) as error:
            source.corrupt(start, f"its buffers are not in it: {error}")

    @property
    def is_complete(self) -> bool:
        """Whether all of its columns were read, or only some (`SegmentFile.read_columns`)."""
        return self._source.indexes is None

    @property
    def head_fields(self) -> tuple[int, ...]:
        """Everything that the block says: offsets, epochs, timestamps, and each column's CRC.

        Batches with equal fields have equal columns, as long as these have their checksums.
        """
        return self._fields

    def verify(self) -> None:
        """Check the CRC and the contents of every column.

        Raises:
            CorruptBatchError: The batch is damaged.
        """
        layout = self._source.layout
        self._check_crcs(range(len(layout.names)))
        columns = self._decode(layout.select(True))
        self.check(columns)
        end = self._fields[_TABLE + 3 * len(layout.names) - 3]
        if end != self.size - (self._body - self._start):
            self._source.corrupt(self._start, "its columns do not fill it")

    def check(self, columns: Any) -> None:
        """Raise a `CorruptBatchError` if columns of the batch are not valid."""
        try:
            columns.validate(full=True)
        except pa.ArrowException as error:
            self._source.corrupt(self._start, f"its columns are invalid: {error}")

    def offsets(self) -> Any:
        """Return the offset of each row as a `pyarrow.Int64Array`."""
        if self.flags & EXPLICIT_OFFSETS:
            return self.columns(self._source.layout.names[-1:]).column(0)
        return offset_range(self.base_offset, self.next_offset)

    def header_lists(self, verify: bool = True) -> list[list[tuple[str, bytes | None]]] | None:
        """Return the headers of each record; None if the batch has no such column."""
        if not self.flags & HEADERS:
            return None
        columns = self.columns((self._source.layout.added("headers"),), verify)
        self.check(columns)
        return header_lists(columns.column(0))

    def lists(self, verify: bool = True) -> decode_rows.RowLists:
        """Return timestamps, keys, values and headers as lists that have one item per record.

        Raises:
            CorruptBatchError: As `columns`.
        """
        few = decode_rows.FEW_ROWS if "pyarrow" in sys.modules else decode_rows.MANY_ROWS
        if not self._plain or not 0 < self.count <= few:
            columns = self.columns(("timestamp", "key", "value"), verify)
            self.check(columns)
            time, key, value = columns
            times = [self.min_timestamp] * self.count
            if self.min_timestamp != self.max_timestamp:
                times = time.view(pa.int64()).to_pylist()
            return times, key.to_pylist(), value.to_pylist(), self.header_lists(verify)
        assert self._source.indexes is None, "a column was not read"
        times, keys, values = self._rows(3, verify)
        return times, keys, values, self.header_lists(verify) if self.flags & HEADERS else None

    def _rows(self, count: int, verify: bool) -> list[list[Any]]:
        """Return the first columns of an uncompressed batch of bytes as lists, without Arrow."""
        columns = self._column_bytes(count, verify)
        source, start, fields = self._source, self._start, self._fields
        head = source.view[start : self._block].tobytes()
        ends = fields[_TABLE], fields[_TABLE + 3], fields[_TABLE + 6]
        starts = (0, *ends, start + self.size - self._body)
        try:
            rows = decode_rows.lists(head, columns, starts, self.count, source.layout.message)
        except (ValueError, struct.error) as error:
            source.corrupt(start, str(error))
        if self.flags & (LOG_APPEND_TIME | EXPLICIT_OFFSETS) == LOG_APPEND_TIME:
            rows[0] = [self.max_timestamp] * self.count
        return rows


def offset_range(start: int, stop: int) -> Any:
    """Return the offsets ``[start, stop)`` as a `pyarrow.Int64Array`."""
    return numbers(np.arange(start, stop), pa.int64())


def header_lists(column: Any) -> list[list[tuple[str, bytes | None]]]:
    """Return the headers of each row of a column of headers."""
    names, values = column.flatten().flatten()
    pairs = list(zip(names.to_pylist(), values.to_pylist(), strict=True))
    # Not fill_null: for that pyarrow imports pandas, which takes 300 ms.
    lengths = [length or 0 for length in column.value_lengths().to_pylist()]
    ends = [0, *accumulate(lengths)]
    return [pairs[begin:end] for begin, end in pairwise(ends)]


def head_length(prefix: Any, *, path: str, position: int) -> int | None:
    """Return how many bytes a batch has before its body; None at the end of the stream.

    ``prefix`` is at least its first 8 bytes, ``position`` their position in the file.

    Raises:
        CorruptBatchError: No batch begins here, or the prefix is truncated.
    """
    if len(prefix) < 8:
        raise _corrupt("truncated", path, position)
    marker, extent = PREFIX.unpack_from(prefix)
    if marker == CONTINUATION and extent == 0:
        return None
    if marker != CONTINUATION or not MIN_BLOCK < extent <= MAX_HEAD_BYTES or extent & 7:
        raise _corrupt("no batch begins here", path, position)
    return 8 + int(extent)


def message_length(head: Any, *, path: str, position: int) -> int:
    """Return how many bytes a batch takes in the file; ``head`` is what comes before the body.

    Raises:
        CorruptBatchError: The block is damaged, so its length cannot be trusted.
    """
    length = head_length(head, path=path, position=position)
    if length is None or len(head) < length:
        raise _corrupt("truncated", path, position)
    block = _block_of(memoryview(head)[:length], path, position)
    size = int(SEALED.unpack_from(block, SEAL.size)[7])
    if not length <= size <= MAX_MESSAGE_BYTES:
        raise _corrupt("its counts and lengths contradict each other", path, position)
    return size


def _block_of(head: memoryview, path: str, position: int) -> bytes:
    """Return the block at the end of a head, after a check of its CRC."""
    block_length, magic = TRAILER.unpack_from(head, len(head) - 8)
    if magic != END_MAGIC or not MIN_BLOCK <= block_length <= len(head) - 16:
        raise _corrupt("the block has no end", path, position)
    block = head[len(head) - block_length :].tobytes()
    magic, crc = SEAL.unpack_from(block)
    if magic != MAGIC or crc != extend(0, block[SEAL.size :]):
        raise _corrupt("the block's CRC is wrong", path, position)
    return block


def parse(buffer: Any, start: int, limit: int, *, path: str, position: int, schema: Any) -> Batch:
    """Check and return the batch at ``buffer[start]``, which must end by ``limit``.

    Args:
        buffer: As for `BatchSource`.
        start: Where the batch begins in the buffer.
        limit: Where the bytes end that may be read.
        path: The file, for errors.
        position: The position of ``buffer[start]`` in the file.
        schema: The schema of the segment.

    Raises:
        CorruptBatchError: The bytes are not a whole batch; the reason is ``"truncated"`` if it
            continues beyond ``limit``.
        UnsupportedFormatError: A newer version of embedlog wrote the batch.
    """
    source = BatchSource(buffer, path, position - start, layout_of(schema))
    return Batch(source, start, min(limit, len(source.view)))
