"""Encodes records as a batch before the lock is taken, and stamps it under the lock."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from copy import copy
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, Self

from embedlog.batch.arrays import numbers
from embedlog.batch.compression import serialize
from embedlog.batch.wire import (
    COMPRESSED,
    CONTINUATION,
    END_MAGIC,
    ENTRY,
    EXPLICIT_OFFSETS,
    HEADERS,
    I64,
    LOG_APPEND_TIME,
    MAGIC,
    MAX_BATCH_BYTES,
    MERGED,
    MIN_BLOCK,
    PREFIX,
    SEAL,
    SEALED,
    TRAILER,
    VERSION,
    Message,
    bytes_layout,
    decoded_size,
    find_message,
    headers_type,
    layout_of,
    schema,
    timestamp_type,
)
from embedlog.checksum import crc32c, extend
from embedlog.errors import RecordTooLargeError, SerializationError
from embedlog.lazy import np, pa

_PAIR = struct.Struct("<ii")
JOIN_BYTES = 4096
"""Up to this size one buffer is written 0.5 µs faster than five, in spite of the copy."""
FEW_ROWS = 256
"""Up to here Python adds and compares as fast as numpy, which need not be loaded then."""
PADDING = tuple(bytes(-i & 7) for i in range(8))
_RANGES = struct.Struct("<16q")
_NODES = struct.Struct("<6q")
TABLE3 = struct.Struct("<QIIQIIQIII4s")


class EncodedBatch:
    """A batch that is ready to be written except for its offsets.

    Timestamps are milliseconds since 1970.  ``size`` is in bytes, in the file.  Only one thread
    may use it at a time; it may be stamped repeatedly.

    Args:
        statistics_bytes: How many bytes of ``table`` are statistics, behind the column table.
        span: How many offsets it takes, if it has a column of offsets; None if as many as records.
        leader_epoch: The epoch of the log that it was read from; None if it is new.
    """

    __slots__ = (
        *("base_sequence", "body", "count", "delete_horizon", "flags", "head", "leader_epoch"),
        *("max_timestamp", "metadata_crc", "min_timestamp", "producer_epoch", "producer_id"),
        *("size", "span", "statistics_bytes", "table"),
    )

    def __init__(
        self,
        head: bytes,
        table: bytes,
        body: tuple[Any, ...],
        metadata_crc: int,
        count: int,
        size: int,
        flags: int,
        min_timestamp: int,
        max_timestamp: int,
        producer_id: int | None = None,
        producer_epoch: int | None = None,
        base_sequence: int | None = None,
        delete_horizon: int | None = None,
        statistics_bytes: int = 0,
        span: int | None = None,
        leader_epoch: int | None = None,
    ) -> None:
        self.head, self.table, self.body, self.metadata_crc = head, table, body, metadata_crc
        self.count, self.size, self.flags = count, size, flags
        self.min_timestamp, self.max_timestamp = min_timestamp, max_timestamp
        self.producer_id, self.producer_epoch = producer_id, producer_epoch
        self.base_sequence, self.delete_horizon = base_sequence, delete_horizon
        self.statistics_bytes, self.span, self.leader_epoch = statistics_bytes, span, leader_epoch

    def changed(self, **fields: Any) -> Self:
        """Return a copy with other fields."""
        batch = copy(self)
        for name, value in fields.items():
            setattr(batch, name, value)
        return batch

    schema_version: ClassVar[int] = 0
    """The version of the topic's schema; 0 for a topic of bytes."""

    def stored_schema(self) -> Any:
        """Return the columns that it has."""
        return schema(headers=self.has_headers, offsets=bool(self.flags & EXPLICIT_OFFSETS))

    @property
    def has_headers(self) -> bool:
        """Whether the schema has the headers column."""
        return bool(self.flags & HEADERS)

    @property
    def null_keys(self) -> int:
        """How many records have no key: the null count in the column table."""
        return int(ENTRY.unpack_from(self.table, ENTRY.size)[2])

    def set_producer(self, producer_id: int, producer_epoch: int, base_sequence: int) -> None:
        """Set the producer of the batch, and the sequence number of its first record."""
        self.producer_id, self.producer_epoch = producer_id, producer_epoch
        self.base_sequence = base_sequence

    def set_span(self, span: int) -> None:
        """Set how many offsets it takes, of which its column of offsets has some."""
        self.span = span

    def set_merged(self) -> None:
        """Say that a mirror that merges wrote the records."""
        self.flags |= MERGED

    def forget_origin(self) -> None:
        """Drop producer and leader epoch: those of the log that it was read from."""
        self.producer_id = self.producer_epoch = self.base_sequence = self.leader_epoch = None

    def stamp(
        self,
        base_offset: int,
        leader_epoch: int,
        append_time: int | None = None,
        *,
        next_offset: int | None = None,
        gap: int = 0,
    ) -> list[Any]:
        """Return the buffers to write, now that the offsets are known.

        Args:
            base_offset: The offset of the first record.
            leader_epoch: The leader epoch of the log.
            append_time: The log append time in ms, if the topic stamps records with it.
            next_offset: The first offset after the batch; by default that after its `span`.
            gap: How many offsets between it and the batch before have no record.
        """
        if next_offset is None:
            next_offset = base_offset + (self.count if self.span is None else self.span)
        flags, low, high = self.flags, self.min_timestamp, self.max_timestamp
        if append_time is not None:
            flags, low, high = flags | LOG_APPEND_TIME, append_time, append_time
        table, producer = self.table, self.producer_id
        sealed = (
            SEALED.pack(
                self.metadata_crc,
                VERSION,
                flags,
                self.count,
                (len(table) - 8 - self.statistics_bytes) // 16,
                gap & 0xFFFF,
                len(table) + 96,
                self.size,
                base_offset,
                next_offset,
                leader_epoch,
                -1 if producer is None else self.producer_epoch,
                gap >> 16,
                -1 if producer is None else self.base_sequence,
                low,
                high,
                -1 if producer is None else producer,
                -1 if self.delete_horizon is None else self.delete_horizon,
            )
            + table
        )
        seal = SEAL.pack(MAGIC, extend(0, sealed))
        if self.size <= JOIN_BYTES:
            return [b"".join((self.head, seal, sealed, *self.body))]
        return [self.head, seal + sealed, *self.body]


class PlacedBatch(NamedTuple):
    """An encoded batch, and the offset at which it begins."""

    offset: int
    batch: EncodedBatch


def encode(
    columns: Any,
    compression: str = "none",
    *,
    timestamps: tuple[int, int] | None = None,
    statistics: bytes = b"",
) -> EncodedBatch:
    """Encode an Arrow record batch that has the columns of its segment, in order.

    Args:
        columns: A `pyarrow.RecordBatch`.
        compression: ``"none"``, ``"lz4"`` or ``"zstd"``.
        timestamps: The smallest and the largest, in ms; by default those of the columns.
        statistics: What readers skip the batch by, in a multiple of 8 bytes (`schemas.statistics`).

    Raises:
        RecordTooLargeError: The columns take more than `MAX_BATCH_BYTES`.
    """
    layout = layout_of(columns.schema)
    message = serialize(columns, compression)
    extent = 8 + PREFIX.unpack_from(message)[1]
    head = message.slice(0, extent).to_pybytes()
    fields = layout.message if layout.is_plain(head) else find_message(head)
    ranges = struct.unpack_from(f"<{2 * fields.buffer_count}q", head, fields.buffers)
    nodes = struct.unpack_from(f"<{2 * fields.node_count}q", head, fields.nodes)
    decoded = message.size - extent
    if fields.compressed:
        decoded = decoded_size(message, extent, ranges, range(fields.buffer_count), fields)
    if decoded > MAX_BATCH_BYTES:
        raise _too_large(decoded)
    body, table, count = message.slice(extent), b"", columns.num_rows
    begin = 0
    for i in range(len(layout.names)):
        first = layout.buffers[i + 1]
        end = ranges[2 * first] if first < fields.buffer_count else body.size
        crc = crc32c(body.slice(begin, end - begin))
        table += ENTRY.pack(end, crc, nodes[2 * layout.nodes[i] + 1])
        begin = end
    if timestamps is None:
        position = ranges[2 * layout.buffers[layout.time] + 2]
        nulls = nodes[2 * layout.nodes[layout.time] + 1]
        if layout.time_in_ms and count and not fields.compressed and not nulls:
            # From the message: creating the column object costs three times the search.
            timestamps = _extremes(np.frombuffer(message, np.int64, count, extent + position))
        else:
            timestamps = _time_range(columns.column(layout.time))
    flags = layout.flags | (COMPRESSED if fields.compressed else 0)
    table += statistics
    block_length = len(table) + MIN_BLOCK
    head = PREFIX.pack(CONTINUATION, extent - 8 + block_length) + head[8:]
    table += TRAILER.pack(block_length, END_MAGIC)
    size = extent + block_length + body.size
    encoded = EncodedBatch(head, table, (body,), crc32c(head), count, size, flags, *timestamps)
    encoded.statistics_bytes = len(statistics)
    return encoded


def _too_large(size: int) -> RecordTooLargeError:
    return RecordTooLargeError(
        f"A batch of {size} bytes is larger than {MAX_BATCH_BYTES}", todo="Send smaller batches."
    )


_PER_MS = {"s": (1000, 1), "us": (1, 1000), "ns": (1, 1_000_000)}


def _extremes(times: Any) -> tuple[int, int]:
    # The array's methods do the same, but call a Python function each.
    return int(np.minimum.reduce(times)), int(np.maximum.reduce(times))


def _time_range(column: Any) -> tuple[int, int]:
    """Return the smallest and largest timestamp of a column in ms; -1 if it has none."""
    nulls, count = column.null_count, len(column)
    if nulls == count:
        return -1, -1
    if nulls:
        return _time_range(column.drop_null())
    data_type = column.type
    if not pa.types.is_timestamp(data_type):
        return _time_range(column.cast(timestamp_type()))
    times = np.frombuffer(column.buffers()[1], np.int64, count, column.offset * 8)
    low, high = _extremes(times)
    if data_type.unit == "ms":
        return low, high
    up, down = _PER_MS[data_type.unit]
    return low * up // down, high * up // down


# From lists of bytes.  Arrow's builders take as long, and would accept str as bytes.


def offsets_of(lengths: list[int]) -> tuple[bytes, int]:
    """Return the running sums of lengths as int32, padded to 8 bytes, and the total."""
    count, first = len(lengths), lengths[0]
    if count == 1 and first <= MAX_BATCH_BYTES:
        return _PAIR.pack(0, first), first
    if lengths.count(first) == count <= 4096 and first * count <= MAX_BATCH_BYTES:
        return _equal_offsets(count, first), first * count
    total = sum(lengths)
    if total > MAX_BATCH_BYTES:
        raise _too_large(total)
    if count <= FEW_ROWS:
        ends = accumulate(lengths, initial=0)
        return struct.pack(f"<{count + 1}i" if count & 1 else f"<{count + 1}i4x", *ends), total
    padded = np.zeros(count + 2 - (count & 1), np.int32)
    # struct reads a list of ints three times as fast as numpy does.
    np.cumsum(
        np.frombuffer(struct.pack(f"{count}i", *lengths), np.int32), out=padded[1 : count + 1]
    )
    return padded.tobytes(), total


Lengths = list[int] | None


def lengths_of(items: Sequence[Any]) -> Lengths:
    """Return the length of each item of a list; None if an item has none, such as a None."""
    try:
        return list(map(len, items))
    except TypeError:
        return None


def row_ends(count: int, fixed: int, sizes: Sequence[int | list[int]]) -> Any:
    """Return where each row ends.

    Args:
        count: The number of rows.
        fixed: Bytes that each row takes.
        sizes: More bytes that each row takes: an int for all rows, or a list of one per row.
    """
    ends = np.full(count, fixed, np.int64)
    for size in sizes:
        ends += size
    return ends.cumsum(out=ends)


@lru_cache(maxsize=32)
def _equal_offsets(count: int, length: int) -> bytes:
    """Return the offsets of items of equal length: many topics have fixed-size keys or values."""
    ends = [i * length for i in range(count + 1)]
    return struct.pack(f"<{count + 1}i" if count & 1 else f"<{count + 1}i4x", *ends)


class BinaryColumn(NamedTuple):
    """A binary column in Arrow's layout: validity, offsets and data, each padded to 8 bytes."""

    buffers: bytes
    nulls: int
    validity_bytes: int
    data_bytes: int


@lru_cache(maxsize=32)
def all_null(count: int) -> BinaryColumn:
    """Return a column of nulls."""
    bitmap = count + 7 >> 3
    return BinaryColumn(bytes((bitmap + 7 & ~7) + (4 * count + 11 & ~7)), count, bitmap, 0)


def binary_column(
    values: Sequence[bytes | None] | None, count: int, lengths: Lengths = None
) -> BinaryColumn:
    """Return keys or values, of which ``lengths`` are the lengths if they are known."""
    if values is None or not count:
        return all_null(count)
    assert len(values) == count
    if lengths is None:
        try:
            lengths = list(map(len, values))  # type: ignore[arg-type]
        except TypeError:
            return _nullable(values, count)
    offsets, total = offsets_of(lengths)
    return BinaryColumn(_joined(offsets, values, total), 0, 0, total)


def _nullable(values: Sequence[bytes | None], count: int) -> BinaryColumn:
    """Return a column that has a None."""
    try:
        lengths = [-1 if value is None else len(value) for value in values]
    except TypeError as error:
        raise not_bytes(values) from error
    nulls = lengths.count(-1)
    if nulls == count:
        return all_null(count)
    # The last row is the highest bit.
    present = "".join("0" if length < 0 else "1" for length in reversed(lengths))
    bits = int(present, 2).to_bytes(count + 7 >> 3, "little")
    offsets, total = offsets_of([0 if length < 0 else length for length in lengths])
    items = [value for value in values if value is not None]
    before = bits + bytes(-len(bits) & 7) + offsets
    return BinaryColumn(_joined(before, items, total), nulls, count + 7 >> 3, total)


def _joined(before: bytes, values: Sequence[Any], total: int) -> bytes:
    """Return the bytes of a column; the join also checks that all values are bytes."""
    try:
        chunk = b"".join([before, *values, PADDING[total & 7]])
    except TypeError as error:
        raise not_bytes(values) from error
    if len(chunk) != len(before) + (total + 7 & ~7):
        raise not_bytes(values)
    return chunk


def not_bytes(items: Sequence[Any]) -> SerializationError:
    """Return the error of a list of keys or values that has an item of another type."""
    allowed = bytes | bytearray | memoryview | None
    wrong = next((item for item in items if not isinstance(item, allowed)), None)
    return SerializationError(
        f"Keys and values must be bytes or None, got {type(wrong).__name__}",
        todo="Serialize them, pass a serializer, or pass a data frame to append_table.",
    )


def time_column(timestamps: Sequence[int] | int, count: int) -> tuple[bytes, int, int]:
    """Return the timestamp column, the smallest and the largest timestamp."""
    assert count, "a batch has at least one record"
    try:
        if isinstance(timestamps, int):
            return I64.pack(timestamps) * count, timestamps, timestamps
        if count == 1:
            (only,) = timestamps
            return I64.pack(only), only, only
        # "n" is an int64 too, and packed faster than "q"; it requires exactly `count` of them.
        chunk = struct.pack(f"{count}n", *timestamps)
        if count <= FEW_ROWS:
            return chunk, int(min(timestamps)), int(max(timestamps))
    except (struct.error, TypeError, ValueError, OverflowError) as error:
        raise SerializationError(
            f"There must be {count} timestamps, each an int of ms: {error}"
        ) from error
    return chunk, *_extremes(np.frombuffer(chunk, np.int64))


@cache
def _template() -> tuple[bytes, Message]:
    """Return the flatbuffer for the three usual columns, and where its fields are."""
    layout = bytes_layout()
    extent = len(layout.head) - 8 + MIN_BLOCK + 3 * ENTRY.size
    return PREFIX.pack(CONTINUATION, extent) + layout.head[8:], layout.message


def encode_lists(
    values: Sequence[bytes | None],
    keys: Sequence[bytes | None] | None,
    timestamps: Sequence[int] | int,
    headers: Sequence[Sequence[tuple[str, bytes | None]] | None] | None = None,
    compression: str = "none",
    lengths: tuple[Lengths, Lengths] = (None, None),
) -> EncodedBatch:
    """Encode lists that have one item per record, to the bytes of `encode(from_lists(...))`.

    ``lengths`` are those of the values and of the keys, if they are already known.

    Raises:
        SerializationError: A key or value is not bytes, or a timestamp is not an int64.
        RecordTooLargeError: All values, or all keys, take more than `MAX_BATCH_BYTES`.
    """
    if headers is not None or compression != "none":
        return encode(from_lists(values, keys, timestamps, headers, lengths), compression)
    count = len(values)
    time, low, high = time_column(timestamps, count)
    key, key_nulls, key_validity, key_bytes = binary_column(keys, count, lengths[1])
    value, value_nulls, value_validity, value_bytes = binary_column(values, count, lengths[0])
    head, crc, end1, end2, end3 = head_of(
        count, key_nulls, key_validity, key_bytes, value_nulls, value_validity, value_bytes
    )
    table = TABLE3.pack(
        end1, crc32c(time), 0,
        end2, crc32c(key), key_nulls,
        end3, crc32c(value), value_nulls,
        MIN_BLOCK + 48, END_MAGIC,
    )  # fmt: skip
    size = len(head) + MIN_BLOCK + 48 + end3
    return EncodedBatch(head, table, (time, key, value), crc, count, size, 0, low, high)


@lru_cache(maxsize=256)
def head_of(
    count: int,
    key_nulls: int,
    key_validity: int,
    key_bytes: int,
    value_nulls: int,
    value_validity: int,
    value_bytes: int,
) -> tuple[bytes, int, int, int, int]:
    """Return the flatbuffer of a batch of this shape, its CRC, and where its columns end."""
    step = 4 * count + 11 & ~7
    end1 = 8 * count
    key1 = end1 + (key_validity + 7 & ~7)
    end2 = key1 + step + (key_bytes + 7 & ~7)
    value1 = end2 + (value_validity + 7 & ~7)
    end3 = value1 + step + (value_bytes + 7 & ~7)
    if end3 > MAX_BATCH_BYTES:
        raise _too_large(end3)
    template, fields = _template()
    head = bytearray(template)
    I64.pack_into(head, fields.body_length, end3)
    I64.pack_into(head, fields.length, count)
    _RANGES.pack_into(
        head, fields.buffers,
        0, 0, 0, end1,
        end1, key_validity, key1, 4 * count + 4, key1 + step, key_bytes,
        end2, value_validity, value1, 4 * count + 4, value1 + step, value_bytes,
    )  # fmt: skip
    _NODES.pack_into(head, fields.nodes, count, 0, count, key_nulls, count, value_nulls)
    flatbuffer = bytes(head)
    return flatbuffer, crc32c(flatbuffer), end1, end2, end3


def from_lists(
    values: Sequence[bytes | None],
    keys: Sequence[bytes | None] | None,
    timestamps: Sequence[int] | int,
    headers: Sequence[Sequence[tuple[str, bytes | None]] | None] | None = None,
    lengths: tuple[Lengths, Lengths] = (None, None),
) -> Any:
    """Return lists that have one item per record as a `pyarrow.RecordBatch` of `schema`.

    Without ``keys`` all keys are null.  Without ``headers`` there is no such column; None for a
    record means no headers.  ``lengths`` are as in `encode_lists`.

    Raises:
        SerializationError: A key or value is not bytes, or a timestamp is not an int64.
    """
    count = len(values)
    time = pa.py_buffer(time_column(timestamps, count)[0])
    arrays = [
        pa.Array.from_buffers(timestamp_type(), count, [None, time], 0),
        binary_array(keys, count, lengths[1]),
        binary_array(values, count, lengths[0]),
    ]
    if headers is not None:
        assert len(headers) == count
        arrays.append(headers_array(headers))
    return pa.RecordBatch.from_arrays(arrays, schema=bytes_layout(headers is not None).original)


def binary_array(values: Sequence[bytes | None] | None, count: int, lengths: Lengths = None) -> Any:
    """Return a `pyarrow.Array` of bytes; all null without ``values``.

    Raises:
        SerializationError, RecordTooLargeError: As `encode_lists`.
    """
    column, nulls, validity_bytes, data_bytes = binary_column(values, count, lengths)
    whole = pa.py_buffer(column)
    first, step = validity_bytes + 7 & ~7, 4 * count + 11 & ~7
    validity = whole.slice(0, validity_bytes) if nulls else None
    offsets, data = whole.slice(first, 4 * count + 4), whole.slice(first + step, data_bytes)
    return pa.Array.from_buffers(pa.binary(), count, [validity, offsets, data], nulls)


def headers_array(headers: Sequence[Sequence[tuple[str, bytes | None]] | None]) -> Any:
    """Return headers, a list of pairs or None for each record, as a `pyarrow.ListArray`.

    Raises:
        SerializationError: A header is no pair of str and bytes.
    """
    ends = [0, *accumulate(len(record) if record else 0 for record in headers)]
    pairs = [pair for record in headers if record for pair in record]
    try:
        encoded = [None if name is None else name.encode() for name, _ in pairs]
        names = binary_array(encoded, len(pairs)).view(pa.string())
        values = binary_array([value for _, value in pairs], len(pairs))
    except (AttributeError, TypeError, ValueError) as error:
        raise SerializationError(f"Headers must be pairs of str and bytes: {error}") from error
    if names.null_count:
        raise SerializationError("The key of a header must not be None", todo="Pass a str.")
    items = pa.StructArray.from_arrays([names, values], fields=list(headers_type().value_type))
    return pa.ListArray.from_arrays(numbers(ends, pa.int32()), items, type=headers_type())
