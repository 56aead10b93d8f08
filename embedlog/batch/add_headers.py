"""Operations on a batch that is encoded already: add headers, find null keys, copy it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from embedlog.batch.decode import Batch, parse
from embedlog.batch.encode import EncodedBatch, encode
from embedlog.batch.wire import (
    COMPRESSED,
    EXPLICIT_OFFSETS,
    HEADER,
    HEADERS_TYPE,
    ZSTD_FRAME,
    schema,
)


def add_headers(encoded: EncodedBatch) -> EncodedBatch:
    """Return the same records with an empty column of headers, and with the same codec.

    A segment has one schema: after a record with headers, all later batches in it need the
    column too.
    """
    message = _message(encoded)
    columns = _columns(encoded, message)
    arrays = [*columns.columns, pa.nulls(columns.num_rows, HEADERS_TYPE)]
    columns = pa.RecordBatch.from_arrays(arrays, schema=schema(headers=True))
    compression = "none"
    if encoded.flags & COMPRESSED:
        compression = "zstd" if ZSTD_FRAME in message else "lz4"
    timestamps = encoded.min_timestamp, encoded.max_timestamp
    result = encode(columns, compression, timestamps=timestamps)
    if encoded.producer_id is not None:
        assert encoded.producer_epoch is not None
        assert encoded.base_sequence is not None
        result.set_producer(encoded.producer_id, encoded.producer_epoch, encoded.base_sequence)
    return result


def rows_without_key(encoded: EncodedBatch) -> list[int]:
    """Return the rows that have a null key; slow, for the message of an error (A6)."""
    keys = decoded(encoded).column("key")
    return [row for row, is_null in enumerate(keys.is_null().to_pylist()) if is_null]


def decoded(encoded: EncodedBatch) -> Any:
    """Return the columns as an Arrow record batch."""
    return _columns(encoded, _message(encoded))


def _message(encoded: EncodedBatch) -> bytes:
    return b"".join(bytes(part) for part in encoded.stamp(0, 0))


def _columns(encoded: EncodedBatch, message: bytes) -> Any:
    has_offsets = bool(encoded.flags & EXPLICIT_OFFSETS)
    stored = schema(headers=encoded.has_headers, offsets=has_offsets)
    buffer = pa.py_buffer(message)
    batch = parse(buffer, 0, buffer.size, path="", position=0, schema=stored)
    return batch.columns(verify=False)


def to_encoded(batch: Batch) -> EncodedBatch:
    """Return a batch of a file as it was before it had offsets, to be written elsewhere.

    The body is neither copied nor checked: it keeps its checksums.
    """
    start, block, body = batch._start, batch._block, batch._body
    source = batch._source
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
    )
