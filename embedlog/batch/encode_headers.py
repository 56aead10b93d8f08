"""Encodes a few records of which some have headers as a batch, without building Arrow arrays."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate, chain

from embedlog.batch.encode import (
    PADDING,
    EncodedBatch,
    binary_column,
    time_column,
)
from embedlog.batch.wire import (
    CONTINUATION,
    END_MAGIC,
    ENTRY,
    HEADERS,
    I64,
    MIN_BLOCK,
    PREFIX,
    TRAILER,
    Message,
    bytes_layout,
)
from embedlog.checksum import crc32c
from embedlog.errors import SerializationError


def encode_headers(
    values: Sequence[bytes | None],
    keys: Sequence[bytes | None] | None,
    timestamps: Sequence[int] | int,
    headers: Sequence[Sequence[tuple[str, bytes | None]] | None],
) -> EncodedBatch:
    """Encode lists that have one item per record, to the bytes of `encode(from_lists(...))`.

    At least one record has a header; the names and values of all are checked already.

    Raises:
        SerializationError: A key or value is not bytes, or a timestamp is not an int64.
        RecordTooLargeError: All values, or all keys, take more than `MAX_BATCH_BYTES`.
    """
    count, pairs = len(values), [pair for record in headers if record for pair in record]
    time, low, high = time_column(timestamps, count)
    key, *key_shape = binary_column(keys, count)
    value, *value_shape = binary_column(values, count)
    try:
        name, *name_shape = binary_column([name.encode() for name, _ in pairs], len(pairs))
    except UnicodeEncodeError as error:
        raise SerializationError(f"Headers must be pairs of str and bytes: {error}") from error
    data, *data_shape = binary_column([data for _, data in pairs], len(pairs))
    ends = accumulate((len(record) if record else 0 for record in headers), initial=0)
    offsets = struct.pack(f"<{count + 1}i", *ends)
    column = b"".join((offsets, PADDING[len(offsets) & 7], name, data))
    shapes = (*key_shape, *value_shape), (*name_shape, *data_shape)
    head, crc = _head(count, len(pairs), *shapes)
    body, end, table = (time, key, value, column), 0, b""
    for part, nulls in zip(body, (0, key_shape[0], value_shape[0], 0), strict=True):
        end += len(part)
        table += ENTRY.pack(end, crc32c(part), nulls)
    table += TRAILER.pack(MIN_BLOCK + len(table), END_MAGIC)
    size = len(head) + end + MIN_BLOCK - TRAILER.size + len(table)
    return EncodedBatch(head, table, body, crc, count, size, HEADERS, low, high)


@cache
def _template() -> tuple[bytes, Message]:
    layout = bytes_layout(headers=True)
    extent = len(layout.head) - 8 + MIN_BLOCK + 4 * ENTRY.size
    return PREFIX.pack(CONTINUATION, extent) + layout.head[8:], layout.message


@lru_cache(maxsize=256)
def _head(
    count: int, pairs: int, record: tuple[int, ...], header: tuple[int, ...]
) -> tuple[bytes, int]:
    """Return the flatbuffer of a batch of this shape, and its CRC.

    Args:
        count: How many records there are.
        pairs: How many headers they have.
        record: Of keys, then of values: the nulls, and the bytes of the validity and of the data.
        header: The same of the names and values of the headers.
    """
    ranges, position = [(0, 0), (0, 8 * count)], 8 * count

    def add(rows: int, nulls: int = 0, validity: int = 0, data: int = 0) -> None:
        """Add a column of rows of different lengths: validity, offsets, and data or a struct's."""
        nonlocal position
        for length in (validity if nulls else 0, 4 * rows + 4, data):
            ranges.append((position, length))
            position += length + 7 & ~7

    add(count, *record[:3])
    add(count, *record[3:])
    add(count)
    add(pairs, *header[:3])
    add(pairs, *header[3:])
    template, fields = _template()
    head = bytearray(template)
    I64.pack_into(head, fields.body_length, position)
    I64.pack_into(head, fields.length, count)
    nodes = [(count, 0), (count, record[0]), (count, record[3]), (count, 0), (pairs, 0)]
    nodes += [(pairs, header[0]), (pairs, header[3])]
    for where, numbers in ((fields.nodes, nodes), (fields.buffers, ranges)):
        struct.pack_into(f"<{2 * len(numbers)}q", head, where, *chain.from_iterable(numbers))
    flatbuffer = bytes(head)
    return flatbuffer, crc32c(flatbuffer)
