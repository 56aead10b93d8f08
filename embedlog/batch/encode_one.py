"""One record as a batch, for whoever appends record by record.

A list of one takes the steps of many: here what depends on the two lengths
alone is kept, and the rest is done in line: 2.3 µs instead of 6.4.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from embedlog.batch.encode import (
    PADDING,
    TABLE3,
    Binary,
    EncodedBatch,
    all_null,
    head_of,
    offsets_of,
)
from embedlog.batch.wire import END_MAGIC, I64, MIN_BLOCK
from embedlog.checksum import extend


class OneRecordLayout(NamedTuple):
    """What the batches of one record with such lengths have in common."""

    head: bytes
    metadata_crc: int
    size: int
    key_before: bytes
    """What stands before the key in its column: validity, if there is none, and offsets."""
    key_after: bytes
    key_end: int
    key_nulls: int
    value_before: bytes
    value_after: bytes
    value_end: int
    value_nulls: int


@lru_cache(maxsize=256)
def _layout(key_length: int, value_length: int) -> OneRecordLayout:
    """Lay out a record; a length of -1 is that of a None."""
    key, value = _column(key_length), _column(value_length)
    head, crc, _, key_end, value_end = head_of(1, *key[1:], *value[1:])
    return OneRecordLayout(
        head,
        crc,
        len(head) + MIN_BLOCK + 48 + value_end,
        key.chunk,
        PADDING[key.total & 7],
        key_end,
        key.nulls,
        value.chunk,
        PADDING[value.total & 7],
        value_end,
        value.nulls,
    )


def _column(length: int) -> Binary:
    """Lay out a column of one item, without the item."""
    return all_null(1) if length < 0 else Binary(offsets_of([length])[0], 0, 0, length)


def encode_one(value: bytes | None, key: bytes | None, timestamp: int) -> EncodedBatch:
    """Encode one record; the bytes are those of `encode_lists` of lists of one.

    ``value`` and ``key`` are bytes, and nothing that looks like them: the caller
    has seen to it.

    Raises:
        RecordTooLargeError: It takes more than `MAX_BATCH_BYTES`.
    """
    head, crc, size, key1, key2, key_end, key_nulls, value1, value2, value_end, value_nulls = (
        _layout(-1 if key is None else len(key), -1 if value is None else len(value))
    )
    time = I64.pack(timestamp)
    key = b"".join((key1, key or b"", key2))
    value = b"".join((value1, value or b"", value2))
    table = TABLE3.pack(
        8, extend(0, time), 0,
        key_end, extend(0, key), key_nulls,
        value_end, extend(0, value), value_nulls,
        MIN_BLOCK + 48, END_MAGIC,
    )  # fmt: skip
    return EncodedBatch(head, table, (time, key, value), crc, 1, size, 0, timestamp, timestamp)
