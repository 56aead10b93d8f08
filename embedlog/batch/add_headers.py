"""Operations on a batch that is encoded already: add headers, find null keys, copy it."""

from __future__ import annotations

from typing import Any

from embedlog.batch.decode import Batch, parse
from embedlog.batch.encode import EncodedBatch, encode
from embedlog.batch.wire import HEADER, headers_type, schema
from embedlog.lazy import pa


def add_headers(encoded: EncodedBatch) -> EncodedBatch:
    """Return the same records with an empty column of headers, and with the same codec.

    A segment has one schema: after a record with headers, all later batches in it need the
    column too.
    """
    batch = _to_batch(encoded)
    columns = batch.columns(verify=False)
    arrays = [*columns.columns, pa.nulls(columns.num_rows, headers_type())]
    columns = pa.RecordBatch.from_arrays(arrays, schema=schema(headers=True))
    timestamps = encoded.min_timestamp, encoded.max_timestamp
    result = encode(columns, batch.codec, timestamps=timestamps)
    result.producer_id, result.producer_epoch = encoded.producer_id, encoded.producer_epoch
    result.base_sequence = encoded.base_sequence
    return result


def rows_without_key(encoded: EncodedBatch) -> list[int]:
    """Return the rows that have a null key; slow, for the message of an error (A6)."""
    keys = _to_batch(encoded).keys(verify=False)
    return [row for row, is_null in enumerate(keys.is_null().to_pylist()) if is_null]


def decoded(encoded: EncodedBatch) -> Any:
    """Return the columns as an Arrow record batch."""
    return _to_batch(encoded).columns(verify=False)


def _to_batch(encoded: EncodedBatch) -> Batch:
    message = pa.py_buffer(b"".join(encoded.stamp(0, 0)))
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
