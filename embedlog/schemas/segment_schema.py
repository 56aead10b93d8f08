"""The columns of a segment of a typed topic: the user's own, and those that embedlog adds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from embedlog.batch.wire import KEY, SCHEMA_VERSION, TIME, headers_type, timestamp_type
from embedlog.lazy import pa
from embedlog.schemas.topic_schema import FIELD_ID, TopicSchema, field_id


def segment_schema(
    schema: TopicSchema,
    *,
    headers: bool = False,
    tombstones: bool = False,
    offsets: bool = False,
    metadata: Mapping[bytes, bytes] | None = None,
) -> Any:
    """Return the Arrow schema of a segment of a typed topic.

    Args:
        schema: The version of the topic's schema.
        headers: Whether records have headers.
        tombstones: Whether some rows are tombstones: then every column except key and timestamp
            may be null.
        offsets: Whether it is compacted, so that its last column has the offsets.
        metadata: What the file says about itself besides.
    """
    columns = _segment_columns(schema, headers, tombstones, offsets)
    return columns if metadata is None else columns.with_metadata({**columns.metadata, **metadata})


def schema_of_segment(schema: Any) -> TopicSchema | None:
    """Return the version of a topic's schema that a segment file has; None for one of bytes.

    For a topic whose rows in `state` were lost.  In a segment with tombstones, columns that must
    not be null are not told from others.
    """
    metadata = schema.metadata or {}
    if SCHEMA_VERSION not in metadata:
        return None
    fields = [field for field in schema if field.metadata and FIELD_ID in field.metadata]
    time = metadata[TIME].decode()
    return TopicSchema(
        int(metadata[SCHEMA_VERSION]),
        pa.schema(fields),
        tuple(json.loads(metadata[KEY])),
        None if time == "_timestamp" else time,
        max(map(field_id, fields)) + 1,
    )


def absent(field: Any, count: int) -> Any:
    """Return a column of embedlog's own for rows of a segment that does not have it."""
    if field.name != "_tombstone":
        return pa.nulls(count, field.type)
    bits = pa.py_buffer(bytes(count + 7 >> 3))
    return pa.Array.from_buffers(pa.bool_(), count, [None, bits], 0)


@lru_cache(maxsize=512)
def _segment_columns(schema: TopicSchema, headers: bool, tombstones: bool, offsets: bool) -> Any:
    fields = []
    if schema.timestamp is None:
        fields.append(pa.field("_timestamp", timestamp_type(), nullable=False))
    required = {*schema.key, schema.timestamp}
    for field in schema.columns:
        nullable = field.nullable or (tombstones and field.name not in required)
        if field.name == schema.timestamp:
            nullable = False
        fields.append(field.with_nullable(nullable))
    if tombstones:
        fields.append(pa.field("_tombstone", pa.bool_(), nullable=False))
    if headers:
        fields.append(pa.field("_headers", headers_type()))
    if offsets:
        fields.append(pa.field("_offset", pa.int64(), nullable=False))
    metadata = {
        SCHEMA_VERSION: str(schema.version).encode(),
        TIME: (schema.timestamp or "_timestamp").encode(),
        KEY: json.dumps(schema.key).encode(),
    }
    return pa.schema(fields, metadata=metadata)
