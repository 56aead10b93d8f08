"""Decodes the rows of a small uncompressed batch of bytes to lists, without Arrow.

A program that reads a few records need not load pyarrow, and for a reader that waits for single
records, whose caches are cold after a sleep, the calls of Arrow cost the most.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from embedlog.batch.wire import Message

Items = list[bytes | None]
RowLists = tuple[list[int], Items, Items, list[list[tuple[str, bytes | None]]] | None]
"""Timestamps, keys, values and headers."""


FEW_ROWS, MANY_ROWS = 8, 256
"""Up to here to slice the items takes no longer than Arrow; and no longer than a thousandth of
the import of Arrow."""

_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from
_INT64S = tuple(struct.Struct(f"<{count}q").unpack_from for count in range(MANY_ROWS + 1))
_OFFSETS = tuple(struct.Struct(f"<{count + 1}I").unpack_from for count in range(MANY_ROWS + 1))


class ItemColumn(NamedTuple):
    """Where a column of keys or values has its buffers, from its beginning."""

    nulls: int
    validity_at: int
    offsets_at: int
    data_at: int
    data_bytes: int


def lists(
    head: bytes, columns: Sequence[bytes], starts: tuple[int, ...], count: int, message: Message
) -> list[list[Any]]:
    """Return timestamps, keys and values, or as many of these columns as there are.

    Args:
        head: The batch up to the end of its flatbuffer.
        columns: The bytes of the first columns.
        starts: Where the first three begin in the body, where the last one ends, and the body.
        count: How many rows there must be.
        message: Where the fields of the head are.

    Raises:
        ValueError, struct.error: The head, or a column, contradicts the others.
    """
    times_at, *places = _places(head, starts, count, message)
    rows: list[list[Any]] = [list(_INT64S[count](columns[0], times_at))]
    for column, place in zip(columns[1:], places, strict=False):
        rows.append(_items(column, place, count))
    return rows


@lru_cache(maxsize=64)
def _places(
    head: bytes, starts: tuple[int, ...], count: int, message: Message
) -> tuple[int, ItemColumn, ItemColumn]:
    """Return where timestamps, keys and values are; cached, since equal sizes have equal heads."""
    body, rows = (_U64(head, at)[0] for at in (message.body_length, message.length))
    counts = [_U32(head, at - 4)[0] for at in (message.nodes, message.buffers)]
    if body != starts[4] or counts != [message.node_count, message.buffer_count]:
        raise ValueError("it does not have the buffers of its columns")
    ranges = struct.unpack_from("<16Q", head, message.buffers)
    times, null_times, *nodes = struct.unpack_from("<6Q", head, message.nodes)
    if not count == rows == times == nodes[0] == nodes[2] or null_times:
        raise ValueError(f"it does not have {count} rows")
    least = 0, 8 * count, 0, 4 * count + 4, 0, 0, 4 * count + 4, 0
    places = []
    for number, needed in enumerate(least):
        position, length = ranges[2 * number : 2 * number + 2]
        begin, end = starts[(number + 1) // 3 : (number + 1) // 3 + 2]
        if position % 8 or not begin <= position <= position + length <= end:
            raise ValueError("a buffer is outside of its column")
        if length < needed:
            raise ValueError("a buffer is too short")
        places.append(position - begin)
    for validity, nulls in ((2, nodes[1]), (5, nodes[3])):
        if nulls and ranges[2 * validity + 1] < count + 7 >> 3:
            raise ValueError("a bitmap is too short")
    keys, values = (
        ItemColumn._make((nulls, *places[first : first + 3], ranges[2 * first + 5]))
        for first, nulls in ((2, nodes[1]), (5, nodes[3]))
    )
    return places[1], keys, values


def _items(column: bytes, place: ItemColumn, count: int) -> Items:
    nulls, validity_at, offsets_at, data_at, data_bytes = place
    offsets = _OFFSETS[count](column, offsets_at)
    last = offsets[-1]
    if last > data_bytes:
        raise ValueError("an item is outside of its column")
    if offsets[0] > last or (count > 1 and tuple(sorted(offsets)) != offsets):
        raise ValueError("the items of a column are not in order")
    data = column[data_at : data_at + last]
    if not nulls:
        return [data[begin:end] for begin, end in pairwise(offsets)]
    valid = int.from_bytes(column[validity_at : validity_at + (count + 7 >> 3)], "little")
    valid &= (1 << count) - 1
    if count - valid.bit_count() != nulls:
        raise ValueError("the nulls of a column are not as many as it says")
    if nulls == count:
        return [None] * count
    present = f"{valid:0{count}b}"[::-1]
    return [
        data[begin:end] if bit == "1" else None
        for bit, (begin, end) in zip(present, pairwise(offsets), strict=True)
    ]
