"""The rows of a small batch, without Arrow: for who waits for a record, objects cost the most.

A reader that slept runs with cold caches, so each call into Arrow costs it
several times what it costs in a loop: the rows of a batch of one record took
29 µs through columns and take 10 µs here, and three times that after a sleep.
Whatever looks unusual is left to Arrow, which knows what to say about it.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

from embedlog.batch.wire import find_message

MOST = 8
"""Rows: their validity is one byte."""

# How many buffers, place and length of each, how many nodes, length and nulls of
# each.  Unsigned, so that what is negative is too large.
_FACTS = struct.Struct("<I16Q4xI6Q").unpack_from
_NODES = 4 + 16 * 8 + 4
_ONE = struct.Struct("<q").unpack_from
_TIMES = tuple(struct.Struct(f"<{count}q").unpack_from for count in range(MOST + 1))
_ENDS = tuple(struct.Struct(f"<{count + 1}I").unpack_from for count in range(MOST + 1))

Items = list[bytes | None]


class SmallColumn(NamedTuple):
    """Where one column of keys or values has its buffers, from the body's begin."""

    nulls: int
    bits_at: int
    ends_at: int
    data_at: int
    data_bytes: int


def lists(
    view: Any, start: int, block: int, body: int, stop: int, count: int, plain: tuple[bytes, bytes]
) -> tuple[list[int], Items, Items, None] | None:
    """Return times, keys, values, and no headers, of an uncompressed batch of three columns.

    None if there is anything about it that Arrow should judge.

    Args:
        view: Bytes with the batch in them.
        start: Where it begins.
        block: Where its flatbuffer ends.
        body: Where its body begins.
        stop: Where it ends.
        count: How many rows there should be, at most `MOST`.
        plain: The skeleton that its head has.
    """
    try:
        told = _told(bytes(view[start:block]), stop - body, count, plain)
        if told is None:
            return None
        times_at, keys, values = told
        found_keys = _items(view, body, keys, count)
        found_values = _items(view, body, values, count)
        if found_keys is None or found_values is None:
            return None
        return list(_TIMES[count](view, body + times_at)), found_keys, found_values, None
    except (struct.error, IndexError, OverflowError):
        return None


@lru_cache(maxsize=64)
def _told(
    head: bytes, room: int, count: int, plain: tuple[bytes, bytes]
) -> tuple[int, SmallColumn, SmallColumn] | None:
    """Return where a head says that times, keys and values are; None if that is unusual.

    Remembered, for batches of equal sizes have equal heads: 5 µs, and more after a sleep.
    """
    places = _places(plain)
    if places is None:
        return None
    told = _ONE(head, places[0])[0], _ONE(head, places[1])[0]
    (buffers, *ranges, nodes, rows, nulls, keys, no_keys,
     values, no_values) = _FACTS(head, places[2])  # fmt: skip
    if told != (room, count) or (buffers, nodes, nulls) != (8, 3, 0):
        return None
    if not count == rows == keys == values or ranges[3] < 8 * count:
        return None
    for place, length in zip(ranges[::2], ranges[1::2], strict=True):
        if place + length > room or place % 8:
            return None
    found_keys = _column(ranges[4:10], no_keys, count)
    found_values = _column(ranges[10:], no_values, count)
    if found_keys is None or found_values is None:
        return None
    return ranges[2], found_keys, found_values


def _column(ranges: list[int], nulls: int, count: int) -> SmallColumn | None:
    bits_at, bits, ends_at, ends_bytes, data_at, data_bytes = ranges
    if ends_bytes < 4 * count + 4 or (nulls and not bits):
        return None
    return SmallColumn(nulls, bits_at, ends_at, data_at, data_bytes)


@lru_cache(maxsize=64)
def _places(plain: tuple[bytes, bytes]) -> tuple[int, int, int] | None:
    """Return where heads of this skeleton have the body's length, the rows, and the facts."""
    first, second = plain
    found = find_message(bytes(8) + first + bytes(8) + second + bytes(4096))
    usual = found.body_length and found.length and found.nodes - found.buffers == _NODES
    return (found.body_length, found.length, found.buffers - 4) if usual else None


def _items(view: Any, body: int, column: SmallColumn, count: int) -> Items | None:
    nulls, bits_at, ends_at, data_at, data_bytes = column
    ends = _ENDS[count](view, body + ends_at)
    if ends[-1] > data_bytes:
        return None
    valid = (1 << count) - 1
    if nulls:
        valid &= view[body + bits_at]
    if count - valid.bit_count() != nulls:
        return None
    found: Items = []
    begin, data_at = ends[0], body + data_at
    for end in ends[1:]:
        if end < begin:
            return None
        found.append(bytes(view[data_at + begin : data_at + end]) if valid & 1 else None)
        begin, valid = end, valid >> 1
    return found
