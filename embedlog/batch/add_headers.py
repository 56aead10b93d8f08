"""Looking into a batch that is encoded: for what has no key, to give it headers, to move it."""

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


def with_headers(one: EncodedBatch) -> EncodedBatch:
    """Return the same records with an empty column of headers.

    A segment has one schema: once a record with headers was there, the batches
    that follow in it need the column too.  The codec stays what it was.
    """
    message = _message(one)
    found = _columns(one, message)
    arrays = [*found.columns, pa.nulls(found.num_rows, HEADERS_TYPE)]
    columns = pa.RecordBatch.from_arrays(arrays, schema=schema(headers=True))
    compression = "none"
    if one.flags & COMPRESSED:
        compression = "zstd" if ZSTD_FRAME in message else "lz4"
    wide = encode(columns, compression, timestamps=(one.min_timestamp, one.max_timestamp))
    if one.producer_id is not None:
        assert one.producer_epoch is not None
        assert one.base_sequence is not None
        wide.sequence(one.producer_id, one.producer_epoch, one.base_sequence)
    return wide


def rows_without_key(one: EncodedBatch) -> list[int]:
    """Return which of its rows have a null key; slow, for the message of an error (A6)."""
    keys = _columns(one, _message(one)).column("key")
    return [row for row, absent in enumerate(keys.is_null().to_pylist()) if absent]


def decoded(one: EncodedBatch) -> Any:
    """Return its columns as an Arrow record batch."""
    return _columns(one, _message(one))


def _message(one: EncodedBatch) -> bytes:
    return b"".join(bytes(part) for part in one.stamp(0, 0))


def _columns(one: EncodedBatch, message: bytes) -> Any:
    stored = schema(headers=one.has_headers, offsets=bool(one.flags & EXPLICIT_OFFSETS))
    whole = pa.py_buffer(message)
    found = parse(whole, 0, whole.size, path="", position=0, schema=stored)
    return found.columns(verify=False)


def unstamped(one: Batch) -> EncodedBatch:
    """Return a batch of a file as it was before it had offsets, to be written elsewhere.

    Its body is not copied, and not looked at: its checksums go along with it.
    """
    start, block, body = one._start, one._block, one._body
    source = one._source
    return EncodedBatch(
        source.view[start:block].tobytes(),
        source.view[block + HEADER.size : body].tobytes(),
        (source.slice(body, start + one.size - body),),
        one._fields[0],
        one.count,
        one.size,
        one.flags,
        one.min_timestamp,
        one.max_timestamp,
    )
