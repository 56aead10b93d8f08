"""Giving a batch the headers column that its segment has and it has not."""

from __future__ import annotations

import pyarrow as pa

from embedlog.batch.reading import parse
from embedlog.batch.wire import COMPRESSED, HEADERS_TYPE, schema
from embedlog.batch.writing import EncodedBatch, encode

_ZSTD_FRAME = b"\x28\xb5\x2f\xfd"


def with_headers(one: EncodedBatch) -> EncodedBatch:
    """Return the same records with an empty column of headers.

    A segment has one schema: once a record with headers was there, the batches
    that follow in it need the column too.  The codec stays what it was.
    """
    message = b"".join(bytes(part) for part in one.stamp(0, 0))
    found = parse(
        pa.py_buffer(message), 0, len(message), path="", position=0, schema=schema()
    ).columns(verify=False)
    arrays = [*found.columns, pa.nulls(found.num_rows, HEADERS_TYPE)]
    columns = pa.RecordBatch.from_arrays(arrays, schema=schema(headers=True))
    compression = "none"
    if one.flags & COMPRESSED:
        compression = "zstd" if _ZSTD_FRAME in message else "lz4"
    wide = encode(columns, compression, timestamps=(one.min_timestamp, one.max_timestamp))
    if one.producer_id is not None:
        assert one.producer_epoch is not None
        assert one.base_sequence is not None
        wide.sequence(one.producer_id, one.producer_epoch, one.base_sequence)
    return wide
