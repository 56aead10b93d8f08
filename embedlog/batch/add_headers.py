"""Operations on a batch that is encoded already: add headers, change columns, copy, trim it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from embedlog.batch.arrays import number, repeated
from embedlog.batch.decode import Batch, parse
from embedlog.batch.encode import EncodedBatch, PlacedBatch, encode
from embedlog.batch.wire import (
    EXPLICIT_OFFSETS,
    HEADER,
    INHERITED,
    TRAILER,
    headers_type,
    schema,
    timestamp_type,
)
from embedlog.lazy import pa, pc


def add_headers(encoded: EncodedBatch) -> EncodedBatch:
    """Return the same records with an empty column of headers, and with the same codec.

    A segment has one schema: after a record with headers, all later batches in it need the
    column too.
    """
    batch = to_batch(encoded)
    columns = batch.columns(batch.layout.names, verify=False)
    time, key, value, *offset = columns.columns
    arrays = [time, key, value, pa.nulls(columns.num_rows, headers_type()), *offset]
    target = schema(headers=True, offsets=batch.has_offsets)
    columns = pa.RecordBatch.from_arrays(arrays, schema=target)
    timestamps = encoded.min_timestamp, encoded.max_timestamp
    result = encode(columns, batch.codec, timestamps=timestamps)
    return like(result, encoded)


def with_timestamp(encoded: EncodedBatch, timestamp: int) -> EncodedBatch:
    """Return the same records, all with one timestamp in their column.

    For a batch with a column of offsets: readers take its timestamps from the column, since a
    compacted batch has records of several appends.
    """
    batch = to_batch(encoded)
    columns = batch.columns(batch.layout.names, verify=False)
    index = batch.layout.time
    field = columns.schema.field(index)
    times = repeated(timestamp, timestamp_type(), columns.num_rows).cast(field.type)
    result = encode(
        columns.set_column(index, field, times),
        batch.codec,
        timestamps=(timestamp, timestamp),
        statistics=batch.statistics,
    )
    return like(result, encoded)


def with_columns(encoded: EncodedBatch, change: Callable[[Any], Any]) -> EncodedBatch:
    """Return the same records of a topic of bytes with other keys or values.

    Args:
        encoded: The batch.
        change: Returns the columns to write, both as a `pyarrow.RecordBatch`.
    """
    batch = to_batch(encoded)
    columns = change(batch.columns(batch.layout.names, verify=False))
    timestamps = encoded.min_timestamp, encoded.max_timestamp
    result = encode(columns, batch.codec, timestamps=timestamps)
    return like(result, encoded)


def like(result: EncodedBatch, encoded: EncodedBatch) -> EncodedBatch:
    """Give a batch what another one of the same records says about them, and return it."""
    result.flags |= encoded.flags & INHERITED
    result.producer_id, result.producer_epoch = encoded.producer_id, encoded.producer_epoch
    result.base_sequence, result.delete_horizon = encoded.base_sequence, encoded.delete_horizon
    result.span, result.leader_epoch = encoded.span, encoded.leader_epoch
    return result


def rows_without_key(encoded: EncodedBatch) -> list[int]:
    """Return the rows that have a null key; slow, for the message of an error."""
    keys = to_batch(encoded).keys(verify=False)
    return [row for row, is_null in enumerate(keys.is_null().to_pylist()) if is_null]


def rows_outside(encoded: EncodedBatch, first: int, last: int) -> list[int]:
    """Return the rows whose timestamps are not within two times; slow, for an error."""
    return [row for row, time in enumerate(to_batch(encoded).times()) if not first <= time <= last]


def decoded(encoded: EncodedBatch) -> Any:
    """Return the columns as an Arrow record batch."""
    return to_batch(encoded).columns(verify=False)


def to_batch(encoded: EncodedBatch) -> Batch:
    """Return an encoded batch as one that was read, to decode it; it is copied."""
    message = pa.py_buffer(b"".join(encoded.stamp(0, 0, next_offset=encoded.count)))
    return parse(message, 0, message.size, path="", position=0, schema=encoded.stored_schema())


def to_encoded(batch: Batch) -> EncodedBatch:
    """Return a batch of a file as it was before it had offsets, to be written elsewhere.

    The body is neither copied nor checked: it keeps its checksums.
    """
    source, start, block, body = batch._source, batch._start, batch._block, batch._body
    return EncodedBatch(
        source.view[start:block].tobytes(),
        source.view[block + HEADER.size : body].tobytes(),
        (source.slice(body, start + batch.size - body),),
        batch._fields[0],
        batch.count,
        batch.size,
        batch.flags,
        batch.min_timestamp,
        batch.max_timestamp,
        statistics_bytes=len(batch.statistics) if batch.is_typed else 0,
    )


def placed(batch: Batch) -> PlacedBatch:
    """Return a batch of a file as one to write at the same offset elsewhere.

    It keeps its leader epoch, producer, timestamps and delete horizon.  Its body is not copied.

    Raises:
        CorruptBatchError: A column does not have its checksum.
    """
    batch.check_crcs()
    source, start, block, body = batch._source, batch._start, batch._block, batch._body
    view, flags = source.view, batch.flags
    return PlacedBatch(
        batch.base_offset,
        EncodedBatch(
            view[start:block].tobytes(),
            view[block + HEADER.size : body].tobytes(),
            (source.slice(body, start + batch.size - body),),
            batch._fields[0],
            batch.count,
            batch.size,
            flags,
            batch.min_timestamp,
            batch.max_timestamp,
            batch.producer_id,
            batch.producer_epoch,
            batch.base_sequence,
            batch.delete_horizon,
            body - block - HEADER.size - TRAILER.size - 16 * len(source.layout.names),
            batch.next_offset - batch.base_offset if flags & EXPLICIT_OFFSETS else None,
            batch.leader_epoch,
        ),
    )


def trimmed(batch: Batch, offset: int) -> EncodedBatch:
    """Return the records of a batch at and above an offset inside it, to be written there.

    Raises:
        CorruptBatchError: A column is damaged.
    """
    whole, names = placed(batch).batch, batch.layout.names
    columns, statistics = (
        batch.columns(names),
        whole.table[-TRAILER.size - whole.statistics_bytes :],
    )
    if batch.has_offsets:
        columns = columns.filter(pc.greater_equal(columns.column(-1), number(offset, pa.int64())))
    else:
        columns = columns.slice(offset - batch.base_offset)
    # The statistics of all rows hold for some of them.
    result = encode(columns, batch.codec, statistics=statistics[: whole.statistics_bytes])
    skipped = offset - batch.base_offset
    if whole.base_sequence is not None:
        whole.base_sequence = whole.base_sequence + skipped & 0x7FFFFFFF
    result = like(result, whole)
    if whole.span is not None:
        result.span = whole.span - skipped
    return result
