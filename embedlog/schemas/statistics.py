"""The smallest and the largest value of the columns of a batch, by which reads skip it.

They lie in the block of a batch, behind the column table, and for sealed segments in `state`.
Each entry takes 24 bytes, or 72 for text::

    column: u16 | kind: u8 | unused: u8 | length of low, of high: u8 | padding to 8 bytes
    low, high: 8 bytes each (integers, floats), or 32 bytes each (text, truncated and padded)

Nulls are not counted here: the column table of a batch does.  A column without an entry may
have any value.  The bounds of text are a prefix that is not larger than the smallest value, and
one that is not smaller than the largest.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any, NamedTuple

from embedlog.batch import Batch
from embedlog.batch.arrays import min_max
from embedlog.config import TopicConfig
from embedlog.lazy import pa, pc

_INT, _UINT, _FLOAT, _TEXT = 1, 2, 3, 4
_ENTRY = struct.Struct("<HBxBB2x")
_BOUNDS = {
    _INT: struct.Struct("<qq"),
    _UINT: struct.Struct("<QQ"),
    _FLOAT: struct.Struct("<dd"),
    _TEXT: struct.Struct("<32s32s"),
}
_TEXT_BYTES = 32
_COUNTS = struct.Struct("<QI4x")
_NULLS = struct.Struct("<Q")

Bound = int | float | bytes
"""A value of a column: of times and decimals the integer that is stored."""
Ranges = dict[int, tuple[Bound, Bound]]
"""The bounds of columns, by their index in the segment."""


class RowStatistics(NamedTuple):
    """What is known about the rows of a batch or of a segment."""

    count: int  # type: ignore[assignment]
    """The number of rows."""
    nulls: tuple[int, ...]
    """The number of nulls in each column."""
    ranges: Ranges
    """The bounds of the columns that have some."""


# Which columns


def text_columns_of(config: TopicConfig) -> frozenset[str] | None:
    """Return the columns of text that get statistics in a topic; None if no column gets any."""
    names = config.statistics_columns
    return None if names == "none" else frozenset(names.split(",")) - {""}


@lru_cache(maxsize=256)
def _kinds(schema: Any, text_columns: frozenset[str] | None) -> tuple[tuple[int, int], ...]:
    """Return the index and the kind of each column that gets statistics."""
    if text_columns is None:
        return ()
    kinds = ((index, _kind_of(field, text_columns)) for index, field in enumerate(schema))
    return tuple((index, kind) for index, kind in kinds if kind)


def _kind_of(field: Any, text_columns: frozenset[str]) -> int:
    types, kind = pa.types, field.type
    if field.name.startswith("_") and field.name in ("_offset", "_tombstone", "_headers"):
        return 0
    if types.is_unsigned_integer(kind):
        return _UINT
    if types.is_floating(kind):
        return _FLOAT
    if types.is_string(kind) or types.is_binary(kind):
        return _TEXT if field.name in text_columns else 0
    numbers = types.is_primitive(kind) or types.is_decimal128(kind)
    return _INT if numbers else 0


# Writing


def pack(columns: Any, text_columns: frozenset[str] | None) -> bytes:
    """Return the statistics of rows, for the block of their batch.

    Args:
        columns: A `pyarrow.RecordBatch` with the columns of a segment.
        text_columns: The names of columns of text or bytes that get statistics, besides
            numbers, times and booleans; None for no statistics at all.
    """
    entries = []
    for index, kind in _kinds(columns.schema, text_columns):
        bounds = _bounds(columns.column(index), kind)
        if bounds is not None:
            entries.append(_pack_entry(index, kind, *bounds))
    return b"".join(entries)


def _pack_entry(index: int, kind: int, low: Bound, high: Bound) -> bytes:
    sizes = (len(low), len(high)) if isinstance(low, bytes) and isinstance(high, bytes) else (0, 0)
    return _ENTRY.pack(index, kind, *sizes) + _BOUNDS[kind].pack(low, high)


def _bounds(column: Any, kind: int) -> tuple[Bound, Bound] | None:
    """Return the bounds of a column; None if it has no values, or none that can be compared."""
    if column.null_count == len(column):
        return None
    if pa.types.is_decimal(column.type):
        return _decimal_bounds(column)
    if kind == _TEXT:
        bounds = pc.min_max(column)
        return _text_bounds(*(bounds[end].as_buffer().to_pybytes() for end in ("min", "max")))
    if pa.types.is_boolean(column.type) or column.null_count or column.type == pa.float16():
        if kind == _FLOAT:
            column = column.cast(pa.float64())
        elif not pa.types.is_boolean(column.type):
            column = column.view(_integer_type(column.type))
        bounds = pc.min_max(column)
        low, high = bounds["min"].as_py(), bounds["max"].as_py()
        has_nan = kind == _FLOAT and pc.any(pc.is_nan(column)).as_py()
        return None if has_nan else (low, high)
    low, high = min_max(column, {_INT: "i", _UINT: "u", _FLOAT: "f"}[kind])
    return None if low != low else (low, high)


def _integer_type(kind: Any) -> Any:
    if pa.types.is_unsigned_integer(kind):
        return kind
    return {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[kind.bit_width]


def _decimal_bounds(column: Any) -> tuple[int, int] | None:
    bounds = pc.min_max(column)
    low, high = (int(bounds[end].as_py().scaleb(column.type.scale)) for end in ("min", "max"))
    return (low, high) if -(1 << 63) <= low <= high < 1 << 63 else None


def _text_bounds(low: bytes, high: bytes) -> tuple[bytes, bytes] | None:
    low = _prefix(low)
    if len(high) <= _TEXT_BYTES:
        return low, high
    # The next text after all that begin with the prefix.
    prefix = _prefix(high).rstrip(b"\x7f") if high.isascii() else b""
    if not prefix:
        return None
    return low, prefix[:-1] + bytes([prefix[-1] + 1])


def _prefix(text: bytes) -> bytes:
    """Return at most 32 bytes, without a part of a character at the end."""
    if len(text) <= _TEXT_BYTES:
        return text
    end = _TEXT_BYTES
    while end and text[end] & 0xC0 == 0x80:
        end -= 1
    return text[:end]


# Reading


def unpack(data: bytes) -> Ranges:
    """Return the ranges that `pack` encoded; entries of an unknown kind end the list."""
    ranges: Ranges = {}
    position = 0
    while position + _ENTRY.size <= len(data):
        index, kind, low_size, high_size = _ENTRY.unpack_from(data, position)
        bounds = _BOUNDS.get(kind)
        if bounds is None:
            break
        low, high = bounds.unpack_from(data, position + _ENTRY.size)
        if kind == _TEXT:
            low, high = low[:low_size], high[:high_size]
        ranges[index] = low, high
        position += _ENTRY.size + bounds.size
    return ranges


def of_batch(batch: Batch) -> RowStatistics:
    """Return the statistics in the block of a batch."""
    nulls = tuple(map(batch.null_count_at, range(len(batch.layout.names))))
    return RowStatistics(batch.count, nulls, unpack(batch.statistics))


def merged(parts: Iterable[RowStatistics]) -> RowStatistics | None:
    """Return the statistics of all rows of batches of one segment; None without any."""
    count, nulls, ranges = 0, (), None  # type: tuple[int, tuple[int, ...], Ranges | None]
    for part in parts:
        if not part.count:
            continue
        if ranges is None:
            count, nulls, ranges = part.count, part.nulls, dict(part.ranges)
            empty = {i for i, number in enumerate(nulls) if number == count}
            continue
        for index in range(len(nulls)):
            bounds = part.ranges.get(index)
            if bounds is None:
                if part.nulls[index] < part.count:
                    ranges.pop(index, None)
                    empty.discard(index)
            elif index in empty:
                ranges[index] = bounds
                empty.discard(index)
            elif index in ranges:
                low, high = ranges[index]
                ranges[index] = min(low, bounds[0]), max(high, bounds[1])
        count += part.count
        nulls = tuple(a + b for a, b in zip(nulls, part.nulls, strict=True))
    return None if ranges is None else RowStatistics(count, nulls, ranges)


def pack_rows(statistics: RowStatistics, schema: Any) -> bytes:
    """Return the statistics of a segment as one value of `state`."""
    kinds = dict(_all_kinds(schema))
    entries = [
        _pack_entry(index, kinds[index], *bounds) for index, bounds in statistics.ranges.items()
    ]
    head = _COUNTS.pack(statistics.count, len(statistics.nulls))
    return b"".join([head, *map(_NULLS.pack, statistics.nulls), *entries])


def _all_kinds(schema: Any) -> Sequence[tuple[int, int]]:
    return _kinds(schema, frozenset(schema.names))


def unpack_rows(value: bytes) -> RowStatistics:
    """Inverse of `pack_rows`."""
    count, columns = _COUNTS.unpack_from(value)
    end = _COUNTS.size + columns * _NULLS.size
    nulls = tuple(number for (number,) in _NULLS.iter_unpack(value[_COUNTS.size : end]))
    return RowStatistics(count, nulls, unpack(value[end:]))


def bound_scalar(value: Bound, data_type: Any) -> Any:
    """Return a bound as a `pyarrow.Scalar` of the type of its column."""
    types = pa.types
    if types.is_boolean(data_type):
        return pa.scalar(bool(value))
    if types.is_decimal(data_type):
        return pa.scalar(Decimal(int(value)).scaleb(-data_type.scale), data_type)
    if types.is_string(data_type):
        assert isinstance(value, bytes)
        return pa.scalar(value.decode("utf-8", "ignore"), data_type)
    return pa.scalar(value, data_type)
