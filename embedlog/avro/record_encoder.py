"""Columns as records in Avro's binary encoding: column by column, and no Python code per record.

Each column becomes an array of the encoded bytes of its values; those of a record are joined.
"""

from __future__ import annotations

from typing import Any

from embedlog.avro.schema import AvroType
from embedlog.batch.arrays import bitmap
from embedlog.lazy import np, pa, pc

_MOST_VARINT_BYTES = 10
_UNITS = {"s": 1000}
"""By a unit that Avro's times do not have, how many of Avro's units it is."""


def encode(columns: pa.RecordBatch, schema: AvroType) -> pa.BinaryArray:
    """Return rows as encoded records.

    Args:
        columns: A `pyarrow.RecordBatch` with the columns that `arrow_types.avro_schema` was
            given.
        schema: That schema, as a tree.

    Raises:
        pyarrow.ArrowInvalid: A time in seconds is too large to be given in milliseconds; the
            message begins with the name of the column.
    """
    parts = []
    for field, column in zip(schema.fields, columns.columns, strict=True):
        try:
            parts.append(_encode(field.type, column))
        except pa.ArrowInvalid as error:
            raise pa.ArrowInvalid(f"{field.column}: {error}") from error
    return _joined(parts, columns.num_rows)


def _joined(parts: list[Any], count: int) -> Any:
    if len(parts) == 1:
        return parts[0]
    return pc.binary_join_element_wise(*parts, _constant(b"", count))


def _encode(schema: AvroType, column: Any) -> Any:
    """Return the encoded values of a column, without nulls."""
    if schema.kind != "union":
        return _encode_values(schema, column)
    index = next(i for i, branch in enumerate(schema.branches) if branch.kind != "null")
    count = len(column)
    inner = _encode_values(schema.branches[index], column)
    # The index of a branch, 0 or 1, as Avro writes an int.
    present = _joined([_constant(bytes([index * 2]), count), inner], count)
    if not column.null_count:
        return present
    null = _constant(bytes([(1 - index) * 2]), count)
    return pc.if_else(column.is_valid(), present, null)


def _encode_values(schema: AvroType, column: Any) -> Any:
    """Return the encoded values; where the column is null, any bytes."""
    types, data_type = pa.types, column.type
    if types.is_struct(data_type):
        children = [column.field(index) for index in range(data_type.num_fields)]
        parts = [
            _encode(field.type, child) for field, child in zip(schema.fields, children, strict=True)
        ]
        return _joined(parts, len(column))
    if types.is_map(data_type) or types.is_list(data_type) or types.is_fixed_size_list(data_type):
        return _encode_items(schema, column)
    if types.is_string(data_type) or types.is_binary(data_type):
        return _with_length(pc.fill_null(column, "" if types.is_string(data_type) else b""))
    if types.is_fixed_size_binary(data_type):
        width = data_type.byte_width
        return _fixed_width(_values(column, np.uint8, width).tobytes(), width, len(column))
    if types.is_boolean(data_type):
        filled = pc.fill_null(column, False).cast(pa.uint8())
        return _fixed_width(filled.buffers()[1].slice(filled.offset, len(filled)), 1, len(filled))
    if types.is_floating(data_type):
        if types.is_float16(data_type):
            column = column.cast(pa.float32())
        width = column.type.bit_width // 8
        return _fixed_width(_values(column, np.uint8, width).tobytes(), width, len(column))
    if types.is_decimal(data_type):
        return _decimals(_values(column, np.uint8, column.type.bit_width // 8))
    if types.is_uint64(data_type):
        words = _values(column, "<u8", 1).reshape(-1, 1)
        return _decimals(np.ascontiguousarray(np.hstack([words, np.zeros_like(words)])).view("u1"))
    return varints(_integers(column))


def _integers(column: Any) -> Any:
    """Return integers and times as numpy integers of 64 bits, in the units of Avro."""
    types, data_type = pa.types, column.type
    column = pc.fill_null(column, pa.scalar(0, _integer_type(data_type)).cast(data_type))
    numbers = column.cast(_integer_type(data_type)).cast(pa.int64())
    if (types.is_time(data_type) or types.is_timestamp(data_type)) and data_type.unit in _UNITS:
        numbers = pc.multiply_checked(numbers, pa.scalar(_UNITS[data_type.unit], pa.int64()))
    return numbers.to_numpy(zero_copy_only=False)


def _integer_type(data_type: Any) -> Any:
    if pa.types.is_integer(data_type):
        return data_type
    return pa.int32() if data_type.bit_width == 32 else pa.int64()


def _encode_items(schema: AvroType, column: Any) -> Any:
    """Return lists and maps: the number of items, the items, and the end of the blocks."""
    types, data_type = pa.types, column.type
    count = len(column)
    if column.offset:
        column = column.take(pa.array(np.arange(count)))
    if types.is_fixed_size_list(data_type):
        ends = np.arange(count + 1, dtype=np.int64) * data_type.list_size
    else:
        ends = column.offsets.to_numpy().astype(np.int64)
    if types.is_map(data_type):
        is_pair = schema.kind == "array"
        key = schema.inner.fields[0].type if is_pair else AvroType("string")
        value = schema.inner.fields[1].type if is_pair else schema.inner
        parts = [_encode(key, column.keys), _encode(value, column.items)]
        items = _joined(parts, len(column.keys))
    else:
        items = _encode(schema.inner, column.values)
    content = _binary(items.buffers()[2], _offsets(items)[ends], count)
    lengths = np.diff(ends)
    # Without items there is no block.
    sizes = pc.if_else(_booleans(lengths > 0), varints(lengths), _constant(b"", count))
    return _joined([sizes, content, _constant(b"\0", count)], count)


# Bytes


def varints(numbers: Any) -> Any:
    """Return numpy integers of 64 bits as Avro encodes int and long."""
    zigzag = ((numbers << 1) ^ (numbers >> 63)).view(np.uint64)
    largest = int(zigzag.max()) if len(zigzag) else 0
    most = max((largest.bit_length() + 6) // 7, 1)
    assert most <= _MOST_VARINT_BYTES
    if most == 1:
        return _fixed_width(zigzag.astype(np.uint8).tobytes(), 1, len(zigzag))
    groups = np.empty((len(zigzag), most), np.uint8)
    lengths = np.ones(len(zigzag), np.int32)
    rest = zigzag
    for index in range(most):
        groups[:, index] = rest & np.uint64(0x7F)
        rest = rest >> np.uint64(7)
        has_more = rest > 0
        groups[:, index] |= has_more.astype(np.uint8) << 7
        lengths += has_more
    used = np.arange(most) < lengths[:, None]
    return _binary(pa.py_buffer(groups[used].tobytes()), _ends(lengths), len(zigzag))


def _decimals(little: Any) -> Any:
    """Return two's complement numbers, a row of bytes each, in as few bytes as they need."""
    big = little[:, ::-1]
    count, width = big.shape
    sign = (big[:, :1] >> 7) * np.uint8(0xFF)
    # A first byte is not needed if it only repeats the sign of the next one.
    redundant = (big[:, :-1] == sign) & ((big[:, 1:] >> 7) == (sign & 1))
    skipped = np.logical_and.accumulate(redundant, axis=1).sum(axis=1, dtype=np.int32)
    used = np.arange(width) >= skipped[:, None]
    content = _binary(pa.py_buffer(big[used].tobytes()), _ends(width - skipped), count)
    return _with_length(content)


def _with_length(column: Any) -> Any:
    """Return bytes or text, each after its length."""
    count = len(column)
    content = column.view(pa.binary())
    lengths = np.diff(_offsets(content)).astype(np.int64)
    return _joined([varints(lengths), content], count)


def _values(column: Any, kind: Any, width: int) -> Any:
    """Return the values of a column as a numpy array, with a row for each if they are bytes."""
    if not len(column):
        return np.zeros((0, width), kind)
    data = np.frombuffer(column.buffers()[1], np.uint8)
    size = column.type.bit_width // 8
    data = data[column.offset * size : (column.offset + len(column)) * size]
    return data.view(kind) if kind != np.uint8 else data.reshape(len(column), width)


def _offsets(column: Any) -> Any:
    if not len(column):
        return np.zeros(1, np.int32)
    return np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, 4 * column.offset)


def _ends(lengths: Any) -> Any:
    ends = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=ends[1:])
    return ends


def _fixed_width(data: Any, width: int, count: int) -> Any:
    ends = np.arange(count + 1, dtype=np.int32) * np.int32(width)
    return _binary(data if isinstance(data, pa.Buffer) else pa.py_buffer(data), ends, count)


def _binary(data: Any, ends: Any, count: int) -> Any:
    offsets = pa.py_buffer(np.ascontiguousarray(ends, np.int32))
    return pa.Array.from_buffers(pa.binary(), count, [None, offsets, data], 0)


def _booleans(mask: Any) -> Any:
    return pa.Array.from_buffers(pa.bool_(), len(mask), [None, bitmap(mask)], 0)


def _constant(data: bytes, count: int) -> Any:
    """Return the same bytes for all rows."""
    return _fixed_width(data * count, len(data), count)
