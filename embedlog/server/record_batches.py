"""Kafka's record batches (version 2) to the columns of embedlog's, and back.

Only the lengths of the records are a chain: where a record begins is known from those before it.
All else is read and written a column at a time, by numpy and pyarrow; a few records are faster in
plain Python.  The base offset and the leader epoch of a batch are not covered by its CRC.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Self

from embedlog.batch import Batch, EncodedBatch, encode, encode_lists, from_lists, schema
from embedlog.batch.arrays import numbers
from embedlog.batch.encode import headers_array
from embedlog.batch.wire import timestamp_type
from embedlog.checksum import crc32c
from embedlog.config import INT_MAX
from embedlog.lazy import np, pa
from embedlog.server.codecs import NAMES, decompress
from embedlog.server.error_codes import ApiError, ErrorCode

HEAD = struct.Struct(">qiibIhiqqqhii")
_CRC_AT, _COVERED_AT, _LENGTH_AT = 17, 21, 12
"""Where the CRC is, what it covers begins, and what the length of the batch counts begins."""
_FEW = 24
"""So many records are read, or written, faster in plain Python."""
_LEAST_RECORD = 7
"""A record without key, value and headers."""
_CODEC, _LOG_APPEND_TIME, _TRANSACTIONAL, _CONTROL = 7, 8, 16, 32
_MAX_VARINT = 10
_MAX_SPAN = INT_MAX
"""The most offsets of a batch of the wire."""
_MAX_DECODED = 1 << 20
"""The most bytes of columns in a batch of the wire that is made of several: one that is compressed
may be a thousand times as large when it is decoded."""
WireParts = tuple[bytearray, Any]
"""A batch for the wire: its head, and a buffer of its records, which is sent without a copy."""
Headers = list[tuple[str, bytes | None]]
Lists = tuple[list[Any], list[Any], list[int], list[Headers] | None]
"""Values, keys, timestamps, and headers if a record has any."""


def _corrupt(text: str) -> ApiError:
    return ApiError(ErrorCode.CORRUPT_MESSAGE, text)


def _invalid(text: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_RECORD, text)


# From the wire


class WireBatch(NamedTuple):
    """A record batch as a producer sent it, checked except for its records."""

    base_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int
    codec: str
    records: memoryview
    """As they came, perhaps compressed."""
    raw: memoryview
    """The whole batch."""
    is_transactional: bool = False

    def lists(self) -> Lists:
        """Return values, keys, timestamps and headers; no headers if no record has any.

        Raises:
            ApiError: The records are damaged.
        """
        lists: Lists = self._read(_read_lists)
        return lists

    def columns(self) -> Any:
        """Return a `pyarrow.RecordBatch` with the columns of `embedlog.batch.schema`.

        Raises:
            ApiError: The records are damaged.
        """
        if self.record_count <= _FEW:
            return from_lists(*self.lists())
        return self._read(_read_columns)

    def encoded(self, compression: str) -> EncodedBatch:
        """Return the batch as a log has it.

        Args:
            compression: Of the stored batch: ``none``, ``lz4`` or ``zstd``.

        Raises:
            ApiError: The records are damaged.
            RecordTooLargeError: They are too large for a batch of the log.
        """
        if self.record_count <= _FEW:
            return encode_lists(*self.lists(), compression=compression)
        return encode(self.columns(), compression)

    def _read(self, read: Callable[[bytes, int, int], Any]) -> Any:
        count, plain = self.record_count, decompress(self.codec, self.records)
        if count * _LEAST_RECORD > len(plain):
            raise _invalid(f"The batch has fewer than {count} records")
        try:
            return read(plain, count, self.base_timestamp)
        except (IndexError, OverflowError, ValueError, pa.ArrowException) as error:
            raise _invalid(f"The records of the batch are damaged: {error}") from error


def read_batch(records: memoryview | None) -> WireBatch:
    """Return the one batch that a producer may send to a partition at once.

    Raises:
        ApiError: It is not one whole batch of version 2, or not one that a producer may send.
    """
    if not records:
        raise _invalid("A produce request must have a record batch for each partition")
    if len(records) < HEAD.size:
        if len(records) > 16 and records[16] < 2:
            raise _invalid(f"Message format {records[16]} is too old: batches have version 2")
        raise _invalid(f"A batch has at least {HEAD.size} bytes, got {len(records)}")
    fields = HEAD.unpack_from(records)
    _, length, _, magic, crc, attributes, last_delta, base_timestamp, _ = fields[:9]
    producer_id, producer_epoch, sequence, count = fields[9:]
    if magic != 2:
        refused = _corrupt if magic > 2 else _invalid
        raise refused(f"Message format {magic} is not supported: batches must have version 2")
    end = _LENGTH_AT + length
    if not HEAD.size <= end <= len(records):
        refused = _invalid if end > len(records) else _corrupt
        raise refused(f"The batch says that it has {end} bytes, and {len(records)} came")
    if end < len(records):
        raise _invalid("A produce request must have exactly one record batch for each partition")
    if crc32c(records[_COVERED_AT:]) != crc:
        raise _corrupt("The CRC of the batch is wrong")
    if attributes & _CONTROL:
        raise _invalid("Clients cannot write control batches")
    if attributes & _LOG_APPEND_TIME:
        raise ApiError(ErrorCode.INVALID_TIMESTAMP, "Producers cannot set the log append time")
    if attributes & _CODEC >= len(NAMES):
        raise ApiError(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, "The batch has an unknown codec")
    if producer_id >= 0 and sequence < 0:
        raise _invalid("The batch of an idempotent producer has no sequence number")
    if count <= 0 or last_delta != count - 1:
        raise _invalid(f"The batch has {count} records with offsets up to {last_delta}")
    codec = NAMES[attributes & _CODEC]
    producer = producer_id, producer_epoch, sequence
    plain = records[HEAD.size :]
    is_transactional = bool(attributes & _TRANSACTIONAL)
    return WireBatch(base_timestamp, *producer, count, codec, plain, records, is_transactional)


def _read_varint(plain: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = plain[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return (value >> 1) ^ -(value & 1), at
        shift += 7
        if shift >= 7 * _MAX_VARINT:
            raise ValueError("a varint is too long")


def _read_bytes(plain: bytes, at: int) -> tuple[bytes | None, int]:
    size, at = _read_varint(plain, at)
    if size < 0:
        return None, at
    if size > len(plain) - at:
        raise ValueError(f"a field of {size} bytes where {len(plain) - at} are left")
    return plain[at : at + size], at + size


def _read_headers(plain: bytes, at: int, count: int) -> tuple[Headers, int]:
    if not 0 <= count <= len(plain) - at:
        raise ValueError(f"a record with {count} headers")
    headers: Headers = []
    for _ in range(count):
        name, at = _read_bytes(plain, at)
        if name is None:
            raise ValueError("a header without a name")
        value, at = _read_bytes(plain, at)
        headers.append((name.decode(), value))
    return headers, at


def _read_lists(plain: bytes, count: int, base_timestamp: int) -> Lists:
    values, keys, times, headers, at = [], [], [], [], 0
    for number in range(count):
        length, at = _read_varint(plain, at)
        stop = at + length
        delta, at = _read_varint(plain, at + 1)
        offset, at = _read_varint(plain, at)
        key, at = _read_bytes(plain, at)
        value, at = _read_bytes(plain, at)
        size, at = _read_varint(plain, at)
        of_record, at = _read_headers(plain, at, size)
        if at != stop or offset != number:
            raise ValueError(f"record {number} does not fit its length, or its place")
        keys.append(key)
        values.append(value)
        times.append(base_timestamp + delta)
        headers.append(of_record)
    if at != len(plain):
        raise ValueError("bytes follow the records")
    return values, keys, times, headers if any(headers) else None


def _read_columns(plain: bytes, count: int, base_timestamp: int) -> Any:
    content = np.frombuffer(plain, np.uint8)
    begins, ends = _records(plain, content, count)
    deltas, at = _varints(content, begins + 1)
    offsets, at = _varints(content, at)
    key_sizes, key_at = _varints(content, at)
    key_ends = key_at + np.maximum(key_sizes, 0)
    value_sizes, value_at = _varints(content, key_ends)
    value_ends = value_at + np.maximum(value_sizes, 0)
    header_counts, at = _varints(content, value_ends)
    with_headers = np.flatnonzero(header_counts)
    headers: list[Headers] = [[]] * count if len(with_headers) else []
    for row in with_headers.tolist():
        headers[row], at[row] = _read_headers(plain, int(at[row]), int(header_counts[row]))
    for delta in (int(deltas.min()), int(deltas.max())):
        if not -(1 << 63) <= base_timestamp + delta < 1 << 63:
            raise ValueError("a timestamp does not fit in 64 bits")
    if (at != ends).any() or (offsets != np.arange(count)).any():
        raise ValueError("a record does not fit its length, or its place")
    arrays = [
        numbers(deltas + base_timestamp, timestamp_type()),
        _gathered(plain, key_at, key_ends, key_sizes < 0),
        _gathered(plain, value_at, value_ends, value_sizes < 0),
    ]
    if headers:
        arrays.append(headers_array(headers))
    return pa.RecordBatch.from_arrays(arrays, schema=schema(headers=bool(headers)))


def _records(plain: bytes, content: Any, count: int) -> tuple[Any, Any]:
    """Return where each record begins, after its length, and where it ends."""
    begins, sizes, row, at = np.empty(count, np.int64), np.empty(count, np.int64), 0, 0
    while row < count:
        size, begin = _read_varint(plain, at)
        width = begin - at
        step = width + size
        if size < _LEAST_RECORD - 1 or step > len(plain) - at:
            raise ValueError(f"record {row} has {size} bytes")
        # Of records of one length, which are frequent, all are found at once.
        run = min(count - row, (len(plain) - at) // step)
        if run > 8:
            lengths = content[at : at + run * step].reshape(run, step)[:, :width]
            other = np.flatnonzero((lengths != content[at:begin]).any(axis=1))
            run = int(other[0]) if len(other) else run
        else:
            run = 1
        begins[row : row + run] = begin + step * np.arange(run)
        sizes[row : row + run] = size
        row += run
        at += run * step
    if at != len(plain):
        raise ValueError("bytes follow the records")
    return begins, begins + sizes


def _varints(content: Any, at: Any) -> tuple[Any, Any]:
    """Return the varint at each position, and the position after it."""
    byte = content[at]
    value, at = (byte & 127).astype(np.int64), at + 1
    active, shift = np.flatnonzero(byte > 127), 7
    while len(active):
        if shift >= 7 * _MAX_VARINT:
            raise ValueError("a varint is too long")
        byte = content[at[active]]
        value[active] |= (byte & 127).astype(np.int64) << shift
        at[active] += 1
        active, shift = active[byte > 127], shift + 7
    # The lowest bit is the sign: the shift must not drag the highest one along.
    return (value >> 1 & 0x7FFF_FFFF_FFFF_FFFF) ^ -(value & 1), at


def _gathered(plain: bytes, starts: Any, ends: Any, nulls: Any) -> Any:
    """Return the bytes of ranges as a column, and null where there is none."""
    count = len(starts)
    if nulls.all():
        return pa.nulls(count, pa.binary())
    if (ends > len(plain)).any():
        raise ValueError("a field is longer than its batch")
    # An array of all bytes, of which every second item is one of the ranges.
    bounds = np.empty(2 * count + 1, np.int32)
    bounds[:-1:2], bounds[1::2], bounds[-1] = starts, ends, len(plain)
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(plain)]
    items = pa.Array.from_buffers(pa.binary(), 2 * count, buffers, 0)
    indices: Any = numbers(np.arange(0, 2 * count, 2), pa.int32())
    if nulls.any():
        valid = pa.py_buffer(np.packbits(~nulls, bitorder="little").tobytes())
        indices = pa.Array.from_buffers(pa.int32(), count, [valid, indices.buffers()[1]])
    return items.take(indices)


# To the wire


class WireRows(NamedTuple):
    """Records that one batch of the wire holds, as columns."""

    columns: Any
    """A `pyarrow.RecordBatch` of timestamps, keys, values and perhaps headers."""
    offsets: Any
    """As a numpy array."""
    next_offset: int
    kind: tuple[int, bool]
    """As of `_kind`."""

    @classmethod
    def of(cls, batch: Batch, rows_of: Any = None) -> Self:
        """Return the records of a batch of a log; ``rows_of`` as in `write_batches`.

        Raises:
            CorruptBatchError: It is damaged.
        """
        columns = (rows_of or Batch.columns)(batch)
        return cls(columns, _offsets_of(batch), batch.next_offset, _kind(batch))

    def part(self, rows: slice) -> Self:
        """Return some of the records."""
        offsets = self.offsets[rows]
        columns = self.columns.slice(rows.start, len(offsets))
        return self._replace(columns=columns, offsets=offsets, next_offset=int(offsets[-1]) + 1)


def write_batches(batches: Sequence[Batch], rows_of: Any = None) -> Iterator[WireParts]:
    """Yield batches of the wire with the records of batches of a log; small ones are merged.

    Offsets, timestamps and leader epochs stay.  They are not compressed.

    Args:
        batches: Those of one partition, in order.
        rows_of: Returns the columns of a batch of a typed topic.

    Raises:
        CorruptBatchError: A batch is damaged.
    """
    for run in _runs(batches):
        if rows_of is None and sum(batch.count for batch in run) <= _FEW:
            yield _written_lists(run)
            continue
        columns = list(map(rows_of or Batch.columns, run))
        merged = columns[0]
        if len(columns) > 1:
            # Some may have no headers.
            alike = [list(each) for _, each in groupby(columns, lambda each: each.num_columns)]
            table = pa.concat_tables(map(pa.Table.from_batches, alike), promote_options="default")
            (merged,) = table.combine_chunks().to_batches()
        offsets = np.concatenate(list(map(_offsets_of, run)))
        yield write_rows(WireRows(merged, offsets, run[-1].next_offset, _kind(run[0])))


def end_of(parts: Sequence[Any]) -> int:
    """Return the offset after the last one of batches of the wire, each given as two parts."""
    base, _, _, _, _, _, last, *_ = HEAD.unpack(parts[-2])
    return int(base + last + 1)


def _runs(batches: Sequence[Batch]) -> Iterator[list[Batch]]:
    """Yield batches that one of the wire can hold."""
    run, size = list[Batch](), 0
    for batch in batches:
        decoded = batch.decoded_bytes()
        if run and (
            _kind(batch) != _kind(run[0])
            or batch.next_offset - run[0].base_offset > _MAX_SPAN
            or size + decoded > _MAX_DECODED
        ):
            yield run
            run, size = [], 0
        run.append(batch)
        size += decoded
    yield run


def _kind(batch: Batch) -> tuple[int, bool]:
    """Return what all records of a batch of the wire have in common."""
    return batch.leader_epoch, batch.is_log_append_time


def _offsets_of(batch: Batch) -> Any:
    if batch.has_offsets:
        return batch.offsets().to_numpy()
    return np.arange(batch.base_offset, batch.next_offset)


def _written_lists(run: Sequence[Batch]) -> WireParts:
    base, base_time, out, last_time = run[0].base_offset, 0, bytearray(), -(1 << 63)
    count = 0
    for batch in run:
        times, keys, values, headers = batch.lists()
        offsets: Sequence[int] = range(batch.base_offset, batch.next_offset)
        if batch.has_offsets:
            offsets = batch.offsets().to_pylist()
        base_time = base_time if count else times[0]
        last_time = max(last_time, *times)
        for row, offset in enumerate(offsets):
            record = bytearray(1)
            _put_varint(record, times[row] - base_time)
            _put_varint(record, offset - base)
            _put_bytes(record, keys[row])
            _put_bytes(record, values[row])
            of_record = headers[row] if headers else ()
            _put_varint(record, len(of_record))
            for name, value in of_record:
                _put_bytes(record, name.encode())
                _put_bytes(record, value)
            _put_varint(out, len(record))
            out += record
            count += 1
    times_of_all = base_time, last_time
    return _sealed(out, base, run[-1].next_offset, _kind(run[0]), times_of_all, count)


def _put_varint(out: bytearray, value: int) -> None:
    value = (value << 1) ^ (value >> 63)
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)


def _put_bytes(out: bytearray, value: bytes | None) -> None:
    if value is None:
        out.append(1)
    else:
        _put_varint(out, len(value))
        out += value


def _sealed(
    records: Any, base: int, stop: int, kind: tuple[int, bool], times: tuple[int, int], count: int
) -> WireParts:
    """Return a batch of encoded records; ``times`` are the first one and the greatest one."""
    epoch, is_append_time = kind
    attributes = _LOG_APPEND_TIME if is_append_time else 0
    size = HEAD.size - _LENGTH_AT + len(records)
    head = bytearray(
        HEAD.pack(
            *(base, size, epoch, 2, 0, attributes, stop - 1 - base),
            *(*times, -1, -1, -1, count),
        )
    )
    crc = crc32c(records, crc32c(head[_COVERED_AT:]))
    struct.pack_into(">I", head, _CRC_AT, crc)
    return head, records


def write_rows(rows: WireRows) -> WireParts:
    """Return a batch of the wire with records."""
    columns, count = rows.columns, rows.columns.num_rows
    times = np.frombuffer(
        columns.column(0).buffers()[1], np.int64, count, columns.column(0).offset * 8
    )
    base, base_time = int(rows.offsets[0]), int(times[0])
    keys, values = columns.column(1), columns.column(2)
    headers = _encoded_headers(columns.column(3)) if columns.num_columns == 4 else None
    key_sizes, value_sizes = _sizes(keys), _sizes(values)
    before = [
        np.zeros(count, np.uint64),  # The attributes of a record, which has none.
        _zigzag(times - base_time),
        _zigzag(rows.offsets - base),
        _zigzag(key_sizes),
    ]
    between = _zigzag(value_sizes)
    bodies = sum(map(_varint_sizes, before)) + _varint_sizes(between)
    bodies += np.maximum(key_sizes, 0) + np.maximum(value_sizes, 0)
    bodies += 1 if headers is None else _sizes(headers)
    before.insert(0, _zigzag(bodies))
    if keys.null_count == count:
        columns_before = [_varint_column([*before, between])]
    else:
        columns_before = [_varint_column(before), keys, _varint_column([between])]
    if headers is None:
        headers = pa.array([b"\0"], pa.binary())
    ends, content = _joined(*columns_before, values, headers)
    return _sealed(
        content.slice(0, int(ends[-1])),
        *(base, rows.next_offset, rows.kind, (base_time, int(times.max())), count),
    )


def _encoded_headers(column: Any) -> Any:
    """Return the count and the headers of each record, encoded, as a column."""
    bounds = column.offsets
    counts = np.frombuffer(bounds.buffers()[1], np.int32, len(bounds), bounds.offset * 4)
    counts = np.diff(counts).astype(np.int64)
    if column.null_count:
        counts = np.where(column.is_null().to_numpy(zero_copy_only=False), 0, counts)
    names, values = column.flatten().flatten()
    names = names.cast(pa.binary())
    sizes = [_varint_column([_zigzag(_sizes(each))]) for each in (names, values)]
    ends, content = _joined(sizes[0], names, sizes[1], values)
    pairs = _binary(ends[np.append(0, np.cumsum(counts))], content)
    return _binary(*_joined(_varint_column([_zigzag(counts)]), pairs))


def _joined(*columns: Any) -> tuple[Any, Any]:
    """Return the items of columns, joined row by row: where each row ends, after 0, and the bytes.

    Null is nothing, and a column of one item has it in each row.
    """
    count = max(map(len, columns))
    places, first = np.empty((count, len(columns)), np.int32), 0
    for number, column in enumerate(columns):
        places[:, number] = np.arange(first, first + count) if len(column) == count else first
        first += len(column)
    items = pa.concat_arrays(columns).take(numbers(places.ravel(), pa.int32()))
    _, bounds, content = items.buffers()
    return np.frombuffer(bounds, np.int32)[: len(items) + 1 : len(columns)], content


def _binary(ends: Any, content: Any) -> Any:
    """Return a column, by where its items end, after 0, and their bytes."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(ends)), content]
    return pa.Array.from_buffers(pa.binary(), len(ends) - 1, buffers, 0)


def _sizes(column: Any) -> Any:
    """Return how many bytes each item of a column has; -1 for null."""
    count = len(column)
    if not count or column.null_count == count:
        return np.full(count, -1, np.int64)
    bounds = np.frombuffer(column.buffers()[1], np.int32, count + 1, column.offset * 4)
    sizes = np.diff(bounds).astype(np.int64)
    if column.null_count:
        sizes[column.is_null().to_numpy(zero_copy_only=False)] = -1
    return sizes


def _zigzag(values: Any) -> Any:
    return ((values << 1) ^ (values >> 63)).astype(np.uint64)


def _varint_sizes(values: Any) -> Any:
    """Return how many bytes the varint of each number takes."""
    sizes, largest = np.ones(len(values), np.int64), int(values.max(initial=0))
    for bits in range(7, 64, 7):
        if largest < 1 << bits:
            break
        sizes += values >= np.uint64(1 << bits)
    return sizes


def _varint_column(groups: Sequence[Any]) -> Any:
    """Return a column in which each item has the varints of a row, one of each group."""
    count = len(groups[0])
    widths = [max(1, -(-int(values.max(initial=0)).bit_length() // 7)) for values in groups]
    # Each byte that a row may have, and whether it has it.
    places = np.empty((sum(widths), count), np.uint8)
    present, at = np.ones(places.shape, np.bool_), 0
    for values, width in zip(groups, widths, strict=True):
        for number in range(width):
            places[at] = values >> np.uint64(7 * number)
            if number + 1 < width:
                more = np.greater_equal(values, 1 << 7 * (number + 1), out=present[at + 1])
                places[at] = places[at] & 127 | more.view(np.uint8) << 7
            at += 1
    ends = np.zeros(count + 1, np.int32)
    np.cumsum(present.sum(axis=0), out=ends[1:])
    return _binary(ends, pa.py_buffer(places.T[present.T]))
