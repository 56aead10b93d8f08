"""The bytes of the keys of a typed topic: those that Kafka's own serializers give.

Text is UTF-8; integers, floats, dates and timestamps are big-endian numbers of their width, as
from Kafka's ``IntegerSerializer``, ``LongSerializer``, ``ShortSerializer``, ``FloatSerializer``
and ``DoubleSerializer``; a boolean is one byte.  So a key goes to the partition to which Kafka's
clients send it.  The key of several columns has, for each, the length of its bytes as a
big-endian int32 (-1 for null), and the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from embedlog.batch.arrays import data
from embedlog.lazy import np, pa, pc

_LENGTH = struct.Struct(">i")


def is_key_type(data_type: Any) -> bool:
    """Return whether a column of a stored type may be a key."""
    types = pa.types
    return bool(
        _is_bytes(data_type)
        or types.is_fixed_size_binary(data_type)
        or types.is_boolean(data_type)
        or _is_number(data_type)
    )


def _is_bytes(data_type: Any) -> bool:
    return bool(pa.types.is_string(data_type) or pa.types.is_binary(data_type))


def _is_number(data_type: Any) -> bool:
    types = pa.types
    return bool(
        types.is_integer(data_type)
        or types.is_floating(data_type)
        or types.is_date32(data_type)
        or types.is_time(data_type)
        or types.is_timestamp(data_type)
        or types.is_duration(data_type)
    )


def key_bytes(columns: Sequence[Any]) -> Any:
    """Return the keys of rows as a `pyarrow.BinaryArray`.

    A key of one column is null where the column is; of several, where all of them are.

    Args:
        columns: The key columns, each a `pyarrow.Array`.
    """
    parts = [_bytes_of(column) for column in columns]
    if len(parts) == 1:
        return parts[0]
    none, empty = data(_LENGTH.pack(-1), pa.binary()), data(b"", pa.binary())
    framed: list[Any] = []
    for part in parts:
        lengths = np.diff(_offsets(part)).astype(">i4")
        framed += [
            pc.if_else(pc.is_valid(part), _fixed(lengths.tobytes(), 4, len(part)), none),
            pc.coalesce(part, empty),
        ]
    joined = pc.binary_join_element_wise(*framed, empty)
    all_null = pc.is_null(parts[0])
    for part in parts[1:]:
        all_null = pc.and_(all_null, pc.is_null(part))
    null = pa.nulls(1, pa.binary())[0]
    return pc.if_else(all_null, null, joined) if pc.any(all_null).as_py() else joined


def key_of_bytes(data: bytes, data_type: Any) -> Any:
    """Return the key of one column of text or integers from its bytes; others stay bytes."""
    types = pa.types
    if types.is_string(data_type):
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data
    if types.is_integer(data_type) and len(data) * 8 == data_type.bit_width:
        return int.from_bytes(data, "big", signed=not types.is_unsigned_integer(data_type))
    return data


def _offsets(array: Any) -> Any:
    return np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, 4 * array.offset)


def _bytes_of(column: Any) -> Any:
    kind = column.type
    if pa.types.is_binary(kind):
        return column
    if pa.types.is_string(kind):
        return column.view(pa.binary())
    count = len(column)
    if pa.types.is_fixed_size_binary(kind):
        width = kind.byte_width
        packed = column.buffers()[1].slice(column.offset * width, count * width)
        return _fixed(packed, width, count, column)
    if pa.types.is_boolean(kind):
        packed = np.frombuffer(column.buffers()[1], np.uint8)
        bits = np.unpackbits(packed, bitorder="little")[column.offset : column.offset + count]
        return _fixed(bits.tobytes(), 1, count, column)
    width = kind.bit_width // 8
    numbers = np.frombuffer(column.buffers()[1], f"<u{width}", count, column.offset * width)
    return _fixed(numbers.astype(f">u{width}").tobytes(), width, count, column)


def _fixed(packed: Any, width: int, count: int, like: Any = None) -> Any:
    """Return items of one width; where ``like`` is null, null."""
    ends = pa.py_buffer(np.arange(count + 1, dtype=np.int32) * np.int32(width))
    column = pa.Array.from_buffers(pa.binary(), count, [None, ends, pa.py_buffer(packed)], 0)
    if like is None or not like.null_count:
        return column
    return pc.if_else(pc.is_valid(like), column, pa.nulls(1, pa.binary())[0])
