"""How large a batch may be: as Kafka counts its bytes, and as it is on the disk (A4).

``max.message.bytes`` bounds the record batch of version 2 that Kafka would make
of the same records, so a limit means what it means there, although a batch here
is laid out in columns and takes more for a few records and less for many.  Of a
batch that is compressed its compressed bytes count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from embedlog.batch.add_headers import decoded
from embedlog.batch.encode import EncodedBatch
from embedlog.batch.wire import COMPRESSED, ENTRY, HEADERS

BATCH_OVERHEAD = 61
"""Bytes of Kafka's batch before its records."""
RECORD_OVERHEAD = 21
"""The most that Kafka's record takes besides key, value and headers: its producer's estimate."""


class BatchLimits(NamedTuple):
    """What a topic takes: ``max.message.bytes`` and ``segment.bytes``."""

    message: int
    segment: int

    def takes(self, one: EncodedBatch) -> bool:
        """Whether a batch is within both limits."""
        return one.size <= self.segment and not is_over(one, self.message)


def varint_size(number: int) -> int:
    """Return how many bytes Kafka's zigzag varint of a number takes.

    >>> [varint_size(n) for n in (-1, 0, 63, 64, 8191, 8192)]
    [1, 1, 1, 2, 2, 3]
    """
    return max((number << 1 ^ number >> 63).bit_length() + 6, 7) // 7


def request_size(
    value: bytes | None,
    key: bytes | None,
    headers: Sequence[tuple[str, bytes | None]] | None = None,
) -> int:
    """Return what Kafka's producer compares with ``max_request_size`` for one record."""
    size = BATCH_OVERHEAD + RECORD_OVERHEAD + _field_size(key) + _field_size(value)
    size += varint_size(len(headers or ()))
    for name, data in headers or ():
        size += _field_size(name.encode(errors="surrogatepass")) + _field_size(data)
    return size


def _field_size(data: bytes | None) -> int:
    return 1 if data is None else varint_size(len(data)) + len(data)


def is_over(one: EncodedBatch, limit: int) -> bool:
    """Whether a batch is larger than ``max.message.bytes``; its records are rarely looked at."""
    return _at_most(one) > limit and kafka_size(one) > limit


def kafka_size(one: EncodedBatch) -> int:
    """Return the bytes of Kafka's batch of the same records, without a loop over them.

    Compressed, they are counted as they are here, with Kafka's header, unless
    they are smaller without compression: Kafka compresses another layout.
    """
    records = BATCH_OVERHEAD + records_size(decoded(one))
    return min(records, _at_most(one)) if one.flags & COMPRESSED else records


def _at_most(one: EncodedBatch) -> int:
    """Return a size that the batch does not exceed, in constant time."""
    body = int(ENTRY.unpack_from(one.table, len(one.table) - 8 - ENTRY.size)[0])
    if one.flags & COMPRESSED:
        return BATCH_OVERHEAD + body
    count, with_headers = one.count, bool(one.flags & HEADERS)
    # The column of times, and where the items of two columns begin, are no data.
    data = max(body - 16 * count - 8, 0)
    span = varint_size(one.max_timestamp - one.min_timestamp)
    record = 1 + span + varint_size(count) + 2 * varint_size(data) + (5 if with_headers else 1)
    # A header takes 8 bytes here besides its data, and two lengths there.
    names = data // 32 if with_headers else 0
    return BATCH_OVERHEAD + data + names + count * (record + varint_size(record + data))


def records_size(columns: Any) -> int:
    """Return how many bytes Kafka's format takes for the rows of a record batch."""
    count = columns.num_rows
    if not count:
        return 0
    times = columns.column("timestamp")
    since = np.frombuffer(times.buffers()[1], np.int64, count, times.offset * 8)
    since = since - since[0]
    sizes = 2 + _varints(since << 1 ^ since >> 63) + _varints(np.arange(count) << 1)
    sizes += _fields(columns.column("key")) + _fields(columns.column("value"))
    if "headers" in columns.schema.names:
        # A record without headers has a count of 0, which takes the byte counted above.
        sizes += _header_fields(columns.column("headers"))
    return int((sizes + _varints(sizes << 1)).sum())


def _varints(numbers: Any) -> Any:
    """Return the sizes of varints whose numbers were zigzagged."""
    unsigned = numbers.astype(np.uint64)
    most, sizes = int(unsigned.max(initial=0)), np.ones(len(unsigned), np.int64)
    for bits in range(7, 64, 7):
        if most < 1 << bits:
            break
        sizes += unsigned >= np.uint64(1 << bits)
    return sizes


def _fields(column: Any) -> Any:
    """Return what each item of a binary column takes with its length; a null takes a byte."""
    lengths = _lengths(column)
    return lengths + _varints(lengths << 1)


def _lengths(column: Any) -> Any:
    """Return how long each item of a binary column or of a list column is; nulls are 0."""
    count = len(column)
    ends = np.frombuffer(column.buffers()[1], np.int32, count + 1, column.offset * 4)
    lengths = np.diff(ends).astype(np.int64)
    if column.null_count:
        lengths[column.is_null().to_numpy(zero_copy_only=False)] = 0
    return lengths


def _header_fields(column: Any) -> Any:
    """Return what the headers of each record take, but for the first byte of their count."""
    counts, pairs = _lengths(column), column.flatten()
    sizes = np.zeros(len(pairs) + 1, np.int64)
    if len(pairs):
        names, data = pairs.flatten()
        np.cumsum(_fields(names) + _fields(data), out=sizes[1:])
    ends = np.concatenate([[0], counts.cumsum()])
    return np.diff(sizes[ends]) + _varints(counts << 1) - 1
