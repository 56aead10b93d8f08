"""Typed topics for the tests of topics of bytes: their values are in the column ``data``."""

from __future__ import annotations

from functools import cache
from typing import Any

import pyarrow as pa

from embedlog.batch import Batch, EncodedBatch
from embedlog.batch.add_headers import decoded
from embedlog.batch.wire import COMPRESSED
from embedlog.schemas.segment_schema import segment_schema
from embedlog.schemas.topic_schema import TopicSchema, first_version
from embedlog.schemas.typed_batch import TypedBatch, encode_typed

KEY = "id"


@cache
def first_schema() -> TopicSchema:
    """The schema of such a topic; one of no topic, so that each append converts the batch."""
    return first_version(pa.schema([(KEY, pa.binary()), ("data", pa.binary())]), KEY, None)


def wider_schema(version: int) -> pa.Schema:
    """A schema that it may get: one column more for each version."""
    extra = [(f"extra {number}", pa.int32()) for number in range(version)]
    return pa.schema([*first_schema().plain, *extra])


def as_typed(encoded: EncodedBatch, schema: TopicSchema | None = None) -> TypedBatch:
    """Return a batch of bytes as one of such a topic; what has no value is a tombstone."""
    schema, columns = schema or first_schema(), decoded(encoded)
    arrays = [columns.column(name) for name in ("timestamp", "key", "value")]
    tombstones = bool(columns.column("value").null_count)
    if tombstones:
        arrays.append(columns.column("value").is_null())
    if encoded.has_headers:
        arrays.append(columns.column("headers"))
    target = segment_schema(schema, headers=encoded.has_headers, tombstones=tombstones)
    codec = "zstd" if encoded.flags & COMPRESSED else "none"
    result = encode_typed(
        pa.RecordBatch.from_arrays(arrays, schema=target),
        schema,
        codec,
        timestamps=(encoded.min_timestamp, encoded.max_timestamp),
    )
    if encoded.producer_id is not None:
        result.set_producer(encoded.producer_id, encoded.producer_epoch, encoded.base_sequence)
    return result


def lists(batch: Batch) -> tuple[Any, Any, Any, Any]:
    """Return timestamps, keys, values and headers of a batch of either kind."""
    if not batch.is_typed:
        return batch.lists()
    times = batch.timestamps().view(pa.int64()).to_pylist()
    values = batch.columns(("data",)).column(0).to_pylist()
    return times, batch.keys().to_pylist(), values, batch.header_lists()
