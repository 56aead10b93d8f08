"""The size of a batch, as Kafka counts it and as it is on the disk, and its limits.

``max.message.bytes`` limits the record batch (version 2) that Kafka would make of the same
records, so it means what it means in Kafka, although embedlog stores columns, which take more
bytes for a few records and fewer for many.  For a compressed batch, the compressed bytes count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from embedlog.batch.add_headers import decoded
from embedlog.batch.encode import EncodedBatch
from embedlog.batch.wire import COMPRESSED, ENTRY, HEADERS, TYPED
from embedlog.lazy import np

Encoded = TypeVar("Encoded", bound=EncodedBatch)

BATCH_OVERHEAD = 61
"""Bytes of a Kafka batch before its records."""
RECORD_OVERHEAD = 21
"""The most that a Kafka record takes besides key, value and headers, as its producer estimates."""
_STORED_OVERHEAD = 8 << 10
"""An upper bound for what a batch takes besides its records."""


class BatchLimits(NamedTuple):
    """The limits of a topic: ``max.message.bytes`` and ``segment.bytes``."""

    message: int
    segment: int

    def accepts(self, batch: EncodedBatch) -> bool:
        """Return whether a batch is within both limits."""
        return batch.size <= self.segment and not is_over(batch, self.message)

    def record_bytes(self, most: int) -> int:
        """Return how many bytes of records a batch of at most ``most`` bytes may have."""
        return max(min(most, *self) - _STORED_OVERHEAD, 1)

    def split(self, columns: Any, encode: Callable[[Any], Encoded]) -> Iterator[Encoded]:
        """Yield the batch of columns, or several, halved until they are within the limits.

        A batch of one record is yielded in any case: the append refuses it.
        """
        encoded = encode(columns)
        if encoded.count == 1 or self.accepts(encoded):
            yield encoded
            return
        half = encoded.count // 2
        yield from self.split(columns.slice(0, half), encode)
        yield from self.split(columns.slice(half), encode)


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
    """Return the size of one record that Kafka compares with ``max_request_size``."""
    size = BATCH_OVERHEAD + RECORD_OVERHEAD + _field_size(key) + _field_size(value)
    size += varint_size(len(headers or ()))
    for name, data in headers or ():
        size += _field_size(name.encode(errors="surrogatepass")) + _field_size(data)
    return size


def _field_size(data: bytes | None) -> int:
    return 1 if data is None else varint_size(len(data)) + len(data)


def is_over(batch: EncodedBatch, limit: int) -> bool:
    """Return whether a batch is larger than ``limit``; rarely looks at its records."""
    return _upper_bound(batch) > limit and kafka_size(batch) > limit


def kafka_size(batch: EncodedBatch) -> int:
    """Return the bytes of Kafka's batch of the same records, without a loop over them.

    For a typed topic, whose records Kafka could not have, it is what the columns take here.
    For a compressed batch that is the compressed size here plus Kafka's header, since Kafka
    compresses another layout; or the uncompressed size if that is smaller.
    """
    if not batch.count:
        return BATCH_OVERHEAD
    if batch.flags & TYPED:
        return _upper_bound(batch)
    columns = decoded(batch)
    times = columns.column("timestamp")
    deltas = np.frombuffer(times.buffers()[1], np.int64, batch.count, times.offset * 8)
    deltas = deltas - deltas[0]
    sizes = 2 + _varints(deltas << 1 ^ deltas >> 63) + _varints(np.arange(batch.count) << 1)
    sizes += _fields(columns.column("key")) + _fields(columns.column("value"))
    if batch.has_headers:
        # A record without headers has the count 0, whose byte is counted above.
        sizes += _header_fields(columns.column("headers"))
    records = BATCH_OVERHEAD + int((sizes + _varints(sizes << 1)).sum())
    return min(records, _upper_bound(batch)) if batch.flags & COMPRESSED else records


def _upper_bound(batch: EncodedBatch) -> int:
    """Return a size that `kafka_size` does not exceed, in constant time."""
    end = len(batch.table) - 8 - batch.statistics_bytes
    body = int(ENTRY.unpack_from(batch.table, end - ENTRY.size)[0])
    if batch.flags & (COMPRESSED | TYPED):
        return BATCH_OVERHEAD + body
    count, has_headers = batch.count, bool(batch.flags & HEADERS)
    # The timestamps and the Arrow offsets of keys and values are not data.
    data = max(body - 16 * count - 8, 0)
    span = varint_size(batch.max_timestamp - batch.min_timestamp)
    record = 1 + span + varint_size(count) + 2 * varint_size(data) + (5 if has_headers else 1)
    # Besides its data a header takes 8 bytes here, and two lengths in Kafka.
    names = data // 32 if has_headers else 0
    return BATCH_OVERHEAD + data + names + count * (record + varint_size(record + data))


def _varints(numbers: Any) -> Any:
    """Return the varint sizes of numbers that are zigzag-encoded already."""
    unsigned = numbers.astype(np.uint64)
    largest, sizes = int(unsigned.max(initial=0)), np.ones(len(unsigned), np.int64)
    for bits in range(7, 64, 7):
        if largest < 1 << bits:
            break
        sizes += unsigned >= np.uint64(1 << bits)
    return sizes


def _fields(column: Any) -> Any:
    """Return the size of each item of a binary column with its length; a null takes a byte."""
    lengths = _lengths(column)
    return lengths + _varints(lengths << 1)


def _lengths(column: Any) -> Any:
    """Return the length of each item of a binary or a list column; that of a null is 0."""
    count = len(column)
    offsets = np.frombuffer(column.buffers()[1], np.int32, count + 1, column.offset * 4)
    lengths = np.diff(offsets).astype(np.int64)
    if column.null_count:
        lengths[column.is_null().to_numpy(zero_copy_only=False)] = 0
    return lengths


def _header_fields(column: Any) -> Any:
    """Return the size of the headers of each record, except the first byte of their count."""
    counts, pairs = _lengths(column), column.flatten()
    sizes = np.zeros(len(pairs) + 1, np.int64)
    if len(pairs):
        names, data = pairs.flatten()
        np.cumsum(_fields(names) + _fields(data), out=sizes[1:])
    ends = np.concatenate([[0], counts.cumsum()])
    return np.diff(sizes[ends]) + _varints(counts << 1) - 1
