"""From the bytes of a batch to columns, checking what is looked at and nothing else."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from embedlog.batch import decode_small
from embedlog.batch.arrays import numbers, repeated
from embedlog.batch.wire import (
    COMPRESSED,
    CONTINUATION,
    CONTROL,
    END_MAGIC,
    END_OF_STREAM,
    EXPLICIT_OFFSETS,
    HEADER,
    HEADERS,
    I64,
    LOG_APPEND_TIME,
    MAGIC,
    MAX_BATCH_BYTES,
    MAX_HEAD_BYTES,
    MAX_MESSAGE_BYTES,
    MIN_BLOCK,
    PREFIX,
    SEAL,
    SEALED,
    SKELETON,
    TIMESTAMP,
    TRAILER,
    VERSION,
    ZSTD_FRAME,
    BufferLayout,
    ColumnSelection,
    Message,
    decoded_size,
    find_message,
    layout_of,
)
from embedlog.checksum import crc32c, extend
from embedlog.errors import CorruptBatchError, UnsupportedFormatError

_TABLE = 18
"""Where the column table begins in the fields of a block: (end, CRC, nulls) a column."""
_SHAPES = 16
"""Lengths of heads to remember for a schema: compressed batches have another one."""


class BatchSource:
    """The bytes batches are read from, and what to say about them in an error.

    Args:
        whole: A `pyarrow.Buffer`, or bytes that are few.
        path: The file, for errors.
        shift: What to add to a place in the buffer to get that in the file.
        schema: The segment's.
    """

    __slots__ = ("layout", "message", "path", "shift", "slice", "view", "whole")

    def __init__(self, whole: Any, path: str, shift: int, schema: Any) -> None:
        self.whole, self.path, self.shift = whole, path, shift
        self.layout = layout_of(schema)
        self.view = memoryview(whole)
        # Both from where, and how long; Arrow reads a batch from the second.
        if type(whole) is bytes:
            self.slice, self.message = self._copy, self._buffer
        else:
            self.slice = self.message = whole.slice
            self.view = self.view.cast("B")  # Arrow says "b", which equals no bytes

    def _copy(self, start: int, length: int) -> bytes:
        return self.whole[start : start + length]  # type: ignore[no-any-return]

    def _buffer(self, start: int, length: int) -> Any:
        return pa.py_buffer(self.whole).slice(start, length)

    def batches(self, start: int, stop: int, max_bytes: int) -> list[Batch]:
        """Return the batches of ``[start, stop)``, or the first few that fill ``max_bytes``.

        Fewer up to a damaged one, or the end of the stream.

        Raises:
            CorruptBatchError: The first one is damaged, as for `parse`.
            UnsupportedFormatError: A newer version of embedlog wrote it.
        """
        found: list[Batch] = []
        stop = min(stop, len(self.view))
        enough = start + max_bytes
        while start < stop:
            try:
                batch = Batch(self, start, stop)
            except (CorruptBatchError, UnsupportedFormatError):
                if found or self.view[start : start + 8] == END_OF_STREAM:
                    break
                raise
            found.append(batch)
            start += batch.size
            if start >= enough:
                break
        return found

    def corrupt(self, start: int, reason: str) -> NoReturn:
        """Raise: the bytes at ``start`` of the buffer are not those written."""
        raise _corrupt(reason, self.path, start + self.shift)


class HeadLayout:
    """How long the heads of a segment are: the same for nearly every batch of it.

    So one struct takes a head apart, which otherwise is done length by length.
    """

    __slots__ = ("begin", "block", "end", "fields", "known", "parts", "size")

    def __init__(self, extent: int, block_length: int, columns: int) -> None:
        self.size, self.block = 8 + extent, 8 + extent - block_length
        rest = block_length - SEAL.size
        self.parts = struct.Struct(f"<{self.block}s4sI{rest}s").unpack_from
        """Prefix and flatbuffer, the block's magic and CRC, what that covers."""
        table = "QII" * columns
        filler = block_length - MIN_BLOCK - 16 * columns
        self.fields = struct.Struct(f"{SEALED.format}{table}{filler}x8x").unpack
        self.begin = PREFIX.pack(CONTINUATION, extent)
        self.end = TRAILER.pack(block_length, END_MAGIC)
        self.known: tuple[bytes, int, bool] = (b"", 0, False)
        """The last prefix and flatbuffer, its CRC, and whether it is plain.

        Batches of equal sizes have equal ones: to compare takes a tenth of a CRC.
        """


def _shape(layout: BufferLayout, extent: int, block_length: int) -> HeadLayout:
    shapes: dict[tuple[int, int], HeadLayout] = layout.shapes
    found = shapes.get((extent, block_length))
    if found is None:
        if len(shapes) >= _SHAPES:
            shapes.clear()
        made = HeadLayout(extent, block_length, len(layout.names))
        found = shapes[extent, block_length] = made
    return found


def _is_plain(head: bytes, layout: BufferLayout) -> bool:
    """Whether a flatbuffer certainly says "not compressed"; if not, it must be looked at."""
    if len(head) < 8 + SKELETON.size:
        return False
    return bool(SKELETON.unpack_from(head, 8) == layout.plain)


def _corrupt(reason: str, path: str, position: int) -> CorruptBatchError:
    return CorruptBatchError(
        f"this is not the batch that was written: {reason}",
        todo="Run verify, then repair, on the log",
        path=path,
        position=position,
        reason=reason,
    )


class Batch:
    """One batch in a buffer, its head and block checked; the columns are decoded on demand.

    Offsets are ``[base_offset, next_offset)``; times are ms since 1970;
    ``position`` is the place in the file.  The buffer stays alive as long as
    the batch or an uncompressed column of it.
    """

    __slots__ = (
        "_block",
        "_body",
        "_fields",
        "_plain",
        "_source",
        "_start",
        "base_offset",
        "base_sequence",
        "count",
        "delete_horizon",
        "flags",
        "leader_epoch",
        "max_timestamp",
        "min_timestamp",
        "next_offset",
        "producer_epoch",
        "producer_id",
        "size",
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
        fields = self._quickly(layout.shape, limit) or self._examine(limit)
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
        ordinary = (
            version == VERSION
            and length == self._body - self._block
            and columns == len(layout.names)
            and self.count == self.next_offset - self.base_offset > 0 <= self.base_offset
            and self._body - start <= self.size <= MAX_MESSAGE_BYTES
            and not self.size & 7
            and not self.flags & layout.foreign_flags
        )
        if not ordinary:
            self._judge(version, length, columns)
        if self.size > limit - start:
            source.corrupt(start, "truncated")

    def _quickly(self, shape: HeadLayout | None, limit: int) -> tuple[Any, ...] | None:
        """Check the head and return its fields, if it is as long as the one before; else None."""
        start = self._start
        if shape is None or start + shape.size > limit:
            return None
        head, magic, crc, sealed = shape.parts(self._source.view, start)
        if magic != MAGIC or crc != extend(0, sealed) or not sealed.endswith(shape.end):
            return None
        fields: tuple[Any, ...] = shape.fields(sealed)
        known = shape.known
        if head != known[0]:
            if not head.startswith(shape.begin):
                return None
            known = shape.known = head, crc32c(head), _is_plain(head, self._source.layout)
        if fields[0] != known[1]:
            return None
        self._block, self._body, self._plain = start + shape.block, start + shape.size, known[2]
        return fields

    def _examine(self, limit: int) -> tuple[Any, ...]:
        """Check the head step by step and return its fields; say what is wrong with it."""
        source, start = self._source, self._start
        view, layout = source.view, source.layout
        if limit - start < 8:
            source.corrupt(start, "truncated")
        marker, extent = PREFIX.unpack_from(view, start)
        if marker != CONTINUATION or not MIN_BLOCK < extent <= MAX_HEAD_BYTES or extent & 7:
            source.corrupt(start, "no batch begins here")
        if extent + 8 > limit - start:
            source.corrupt(start, "truncated")
        end = start + 8 + extent
        block_length, magic = TRAILER.unpack_from(view, end - 8)
        if magic != END_MAGIC or not MIN_BLOCK <= block_length <= extent - 8:
            source.corrupt(start, "the block has no end")
        self._body, self._block = end, end - block_length
        block = view[self._block : end].tobytes()
        magic, crc = SEAL.unpack_from(block)
        if magic != MAGIC or crc != crc32c(block[SEAL.size :]):
            source.corrupt(start, "the block's CRC is wrong")
        fields = SEALED.unpack_from(block, SEAL.size)
        head = view[start : self._block].tobytes()
        if fields[0] != crc32c(head):
            source.corrupt(start, "the metadata's CRC is wrong")
        self._plain = _is_plain(head, layout)
        columns = len(layout.names)
        if fields[4] != columns or block_length < MIN_BLOCK + 16 * columns:
            self._refuse(fields[1], fields[4])
        layout.shape = _shape(layout, extent, block_length)
        return fields + layout.table.unpack_from(block, HEADER.size)

    def _judge(self, version: int, length: int, columns: int) -> None:
        """Accept the rare kind of batch (with gaps, or empty: D11), and refuse all others."""
        span = self.next_offset - self.base_offset
        plausible = (
            version == VERSION
            and length == self._body - self._block
            and columns == len(self._source.layout.names)
            and (self.count == span or (self.flags & EXPLICIT_OFFSETS and self.count <= span))
            and self.base_offset >= 0
            and self._body - self._start <= self.size <= MAX_MESSAGE_BYTES
            and not self.size & 7
            and not self.flags & self._source.layout.foreign_flags
        )
        if not plausible:
            self._refuse(version, columns)

    def _refuse(self, version: int, columns: int) -> NoReturn:
        source = self._source
        if version > VERSION:
            raise UnsupportedFormatError(
                f"a batch has format version {version}",
                todo="Use a newer embedlog",
                path=source.path,
            )
        if columns != len(source.layout.names):
            reason = f"it has {columns} columns, its segment {len(source.layout.names)}"
            source.corrupt(self._start, reason)
        source.corrupt(self._start, "its counts and lengths contradict each other")

    def __repr__(self) -> str:
        place = f"{self._source.path} at byte {self.position}"
        return f"<Batch [{self.base_offset}, {self.next_offset}) of {place}>"

    @property
    def position(self) -> int:
        """Where the batch begins in its file."""
        return self._start + self._source.shift

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
        """Whether the log, not the producer, set the timestamps (A7)."""
        return bool(self.flags & LOG_APPEND_TIME)

    @property
    def is_compressed(self) -> bool:
        """Whether its columns take more memory than they take in the file."""
        return bool(self.flags & COMPRESSED)

    @property
    def schema(self) -> Any:
        """The columns as stored, without the segment's metadata."""
        return self._source.layout.schema

    @property
    def codec(self) -> str:
        """What it is compressed with: ``none``, ``lz4`` or ``zstd``."""
        if not self.flags & COMPRESSED:
            return "none"
        body = self._source.view[self._body : self._start + self.size]
        return "zstd" if ZSTD_FRAME in bytes(body) else "lz4"

    def null_count(self, name: str) -> int:
        """How many rows of a column are null, from the block: nothing is decoded."""
        return int(self._fields[_TABLE + 3 * self._source.layout.names.index(name) + 2])

    def columns(self, names: Sequence[str] | None = None, verify: bool = True) -> Any:
        """Return the columns named as a `pyarrow.RecordBatch`; None is all but the offsets.

        Checks the CRC of these columns only, and decompresses no others; without
        compression nothing is copied.

        Raises:
            CorruptBatchError: A column is not as written, or too large to decode.
            ValueError: There is no such column.
        """
        flags = self.flags
        chosen = not flags & EXPLICIT_OFFSETS if names is None else tuple(names)
        pick = self._source.layout.pick(chosen)
        if verify:
            self._check(pick.indexes)
        columns = self._decode(pick)
        # What was compacted into one batch had times of its own, which the column tells.
        stamped = flags & (LOG_APPEND_TIME | EXPLICIT_OFFSETS) == LOG_APPEND_TIME
        if stamped and self._source.layout.time in pick.indexes:
            columns = self._with_append_time(columns, pick)
        return columns

    def _check(self, indexes: Sequence[int]) -> None:
        source, body, fields = self._source, self._body, self._fields
        size, slice_ = self.size - (body - self._start), source.slice
        for i in indexes:
            at = _TABLE + 3 * i
            end = fields[at]
            begin = fields[at - 3] if i else 0
            if not begin <= end <= size:
                source.corrupt(self._start, "its columns lie outside it")
            if extend(0, slice_(body + begin, end - begin)) != fields[at + 1]:
                source.corrupt(self._start, f"the CRC of column {source.layout.names[i]} is wrong")

    def _decode(self, pick: ColumnSelection) -> Any:
        source, start = self._source, self._start
        try:
            found = None if self._plain else find_message(source.view[start : self._block])
            if found is not None and found.compressed:
                columns = pa.ipc.read_record_batch(self._reduced(found, pick), pick.schema)
            else:
                message = source.message(start, self.size)
                columns = pa.ipc.read_record_batch(message, pick.leading)
                if pick.leading is not pick.schema:
                    columns = columns.select(pick.indexes)
            columns.validate()
        except (pa.ArrowException, OSError, struct.error, IndexError) as error:
            source.corrupt(start, f"Arrow cannot read it: {error}")
        if columns.num_rows != self.count:
            source.corrupt(start, f"it has {columns.num_rows} rows, not {self.count}")
        return columns

    def _reduced(self, found: Message, pick: ColumnSelection) -> Any:
        """Return the message with only the picked columns, so that only they are decompressed."""
        layout, view = self._source.layout, self._source.view
        if (found.node_count, found.buffer_count) != (layout.nodes[-1], layout.buffers[-1]):
            raise struct.error("the number of buffers is not that of the schema")
        head = bytearray(view[self._start : self._block])
        ranges = struct.unpack_from(f"<{2 * found.buffer_count}q", head, found.buffers)
        body = view[self._body : self._start + self.size]
        if decoded_size(body, 0, ranges, pick.buffers, found) > MAX_BATCH_BYTES:
            raise struct.error(f"it would decompress to more than {MAX_BATCH_BYTES} bytes")
        pieces: list[Any] = []
        place = 0
        for new, old in enumerate(pick.buffers):
            begin, length = ranges[2 * old], ranges[2 * old + 1]
            struct.pack_into("<qq", head, found.buffers + 16 * new, place, length)
            pieces += [body[begin : begin + length], bytes(-length & 7)]
            place += length + 7 & ~7
        nodes = [found.nodes + 16 * old for old in pick.nodes]
        picked = b"".join([view[self._start + node : self._start + node + 16] for node in nodes])
        head[found.nodes : found.nodes + len(picked)] = picked
        struct.pack_into("<I", head, found.nodes - 4, len(pick.nodes))
        struct.pack_into("<I", head, found.buffers - 4, len(pick.buffers))
        if found.body_length:
            I64.pack_into(head, found.body_length, place)
        PREFIX.pack_into(head, 0, CONTINUATION, len(head) - 8)
        return pa.py_buffer(b"".join([head, *pieces]))

    def _with_append_time(self, columns: Any, pick: ColumnSelection) -> Any:
        at = pick.indexes.index(self._source.layout.time)
        kind = pick.schema.field(at).type
        times = repeated(self.max_timestamp, TIMESTAMP, self.count)
        return columns.set_column(at, pick.schema.field(at), times.cast(kind))

    def verify(self) -> None:
        """Check every column's CRC and contents.

        Raises:
            CorruptBatchError: The batch is not as written.
        """
        layout = self._source.layout
        self._check(range(len(layout.names)))
        columns = self._decode(layout.pick(True))
        self._validate(columns)
        if self._fields[_TABLE + 3 * len(layout.names) - 3] != self.size - (
            self._body - self._start
        ):
            self._source.corrupt(self._start, "its columns do not fill it")

    def _validate(self, columns: Any) -> None:
        try:
            columns.validate(full=True)
        except pa.ArrowException as error:
            self._source.corrupt(self._start, f"its columns contradict themselves: {error}")

    def offsets(self) -> Any:
        """Return each row's offset as a `pyarrow.Int64Array`."""
        if self.flags & EXPLICIT_OFFSETS:
            return self.columns(self._source.layout.names[-1:]).column(0)
        return offset_range(self.base_offset, self.next_offset)

    def to_arrow(self, partition: int, names: Sequence[str] | None = None) -> Any:
        """Return a `pyarrow.RecordBatch` with offset and partition before the columns."""
        columns = self.columns(names)
        prefix = "" if self._source.layout.names[0] == "timestamp" else "_"
        arrays = [self.offsets(), repeated(partition, pa.int32(), self.count)]
        all_names = [prefix + "offset", prefix + "partition", *columns.schema.names]
        return pa.RecordBatch.from_arrays([*arrays, *columns.columns], names=all_names)

    def lists(
        self, verify: bool = True
    ) -> tuple[
        list[int],
        list[bytes | None],
        list[bytes | None],
        list[list[tuple[str, bytes | None]]] | None,
    ]:
        """Return timestamps, keys, values and headers of a topic of bytes, one item a record."""
        if self.count <= decode_small.MOST and self._plain and not self.flags & ~CONTROL:
            source, start = self._source, self._start
            if verify:
                self._check(source.layout.every)
            stop, plain = start + self.size, source.layout.plain
            assert plain is not None, "that is what makes a head plain"
            rows = decode_small.lists(
                source.view, start, self._block, self._body, stop, self.count, plain
            )
            if rows is not None:
                return rows
        columns = self.columns(verify=verify)
        self._validate(columns)
        time, key, value = (columns.column(i) for i in range(3))
        headers = _header_lists(columns.column(3)) if self.flags & HEADERS else None
        if self.min_timestamp == self.max_timestamp:
            # Often, for records sent at once, and a tenth of what a record takes.
            times = [self.min_timestamp] * self.count
        else:
            times = time.view(pa.int64()).to_pylist()
        return times, key.to_pylist(), value.to_pylist(), headers


def offset_range(start: int, stop: int) -> Any:
    """Return the offsets ``[start, stop)`` as a `pyarrow.Int64Array`."""
    return numbers(np.arange(start, stop), pa.int64())


def _header_lists(column: Any) -> list[list[tuple[str, bytes | None]]]:
    names, values = column.flatten().flatten()
    pairs = list(zip(names.to_pylist(), values.to_pylist(), strict=True))
    # Not fill_null: pyarrow imports pandas for it, which takes 300 ms.
    lengths = [length or 0 for length in column.value_lengths().to_pylist()]
    ends = [0, *accumulate(lengths)]
    return [pairs[begin:end] for begin, end in pairwise(ends)]


def head_length(prefix: Any, *, path: str, position: int) -> int | None:
    """Return how many bytes a batch has before its body; None is the end of the stream.

    ``prefix`` is its first 8 bytes or more, ``position`` their place in the file.

    Raises:
        CorruptBatchError: No batch begins here, or the prefix is cut off.
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
    """Return how many bytes a batch takes in the file, from its bytes before the body.

    Raises:
        CorruptBatchError: The block is not as written, so its length cannot be believed.
    """
    extent = head_length(head, path=path, position=position)
    if extent is None or len(head) < extent:
        raise _corrupt("truncated", path, position)
    block_length, magic = TRAILER.unpack_from(head, extent - 8)
    if magic != END_MAGIC or not MIN_BLOCK <= block_length <= extent - 16:
        raise _corrupt("the block has no end", path, position)
    block = bytes(memoryview(head)[extent - block_length : extent])
    fields = HEADER.unpack_from(block)
    if fields[0] != MAGIC or fields[1] != crc32c(block[8:]):
        raise _corrupt("the block's CRC is wrong", path, position)
    size = int(fields[9])
    if not extent <= size <= MAX_MESSAGE_BYTES:
        raise _corrupt("its counts and lengths contradict each other", path, position)
    return size


def parse(buffer: Any, start: int, limit: int, *, path: str, position: int, schema: Any) -> Batch:
    """Check and return the batch at ``buffer[start]``, which must end by ``limit``.

    Args:
        buffer: A `pyarrow.Buffer`, or bytes that are few.
        start: Where the batch begins in the buffer.
        limit: Where the bytes that may be read end.
        path: The file, for errors.
        position: Where ``buffer[start]`` is in the file.
        schema: The segment's.

    Raises:
        CorruptBatchError: These bytes are not a batch as it was written; the
            reason is ``"truncated"`` if it is cut off at ``limit``.
        UnsupportedFormatError: A newer version of embedlog wrote it.
    """
    source = BatchSource(buffer, path, position - start, schema)
    return Batch(source, start, min(limit, len(source.view)))
