"""Typed topics for the tests of topics of bytes.

The values are in the column ``data``, or bytes stand for the rows of random columns.
"""

from __future__ import annotations

import zlib
from functools import cache
from typing import Any, NamedTuple

import pyarrow as pa
from hypothesis import strategies as st

from embedlog.batch import Batch, EncodedBatch
from embedlog.batch.add_headers import decoded
from embedlog.batch.wire import COMPRESSED
from embedlog.schemas.segment_schema import segment_schema
from embedlog.schemas.topic_schema import TopicSchema, first_version
from embedlog.schemas.typed_batch import TypedBatch, encode_typed
from support.random_columns import KeyPart, arrow, canonical, key_of, key_types, or_none, types
from support.random_columns import values as values_of

KEY = "id"


@cache
def first_schema() -> TopicSchema:
    """The schema of such a topic; one of no topic, so that each append converts the batch."""
    return first_version(pa.schema([(KEY, pa.binary()), ("data", pa.binary())]), KEY, None)


def wider_schema(version: int) -> pa.Schema:
    """A schema that it may get: one column more for each version."""
    extra = [(f"extra {number}", pa.int32()) for number in range(version)]
    return pa.schema([*first_schema().plain, *extra])


class RandomTopic(NamedTuple):
    """A typed topic of random columns, and the rows that it may have."""

    schema: TopicSchema
    keys: dict[bytes, list[Any]]
    """The values of the key columns, by the key as Kafka writes it."""
    rows: dict[bytes, list[Any]]
    """The values of the other columns, by their `row_bytes`."""

    def key(self, some: bytes) -> bytes:
        """Return one of the keys; for equal bytes the same."""
        return list(self.keys)[zlib.crc32(some) % len(self.keys)]

    def value(self, some: bytes | None) -> bytes | None:
        """Return one of the rows; for equal bytes the same; None for a tombstone."""
        return None if some is None else list(self.rows)[zlib.crc32(some) % len(self.rows)]

    def arrays(self, keys: list[bytes | None], rows: list[bytes | None]) -> list[Any]:
        """Return the columns of records."""
        count = len(self.schema.key)
        items = {**self.keys, None: [None] * count}
        others = {**self.rows, None: [None] * (len(self.schema.plain) - count)}
        table = [items[key] + others[row] for key, row in zip(keys, rows, strict=True)]
        types_ = self.schema.plain.types
        return [arrow([row[at] for row in table], kind) for at, kind in enumerate(types_)]


def row_bytes(items: list[Any]) -> bytes:
    """Return bytes that stand for the values of some columns, equal for equal values."""
    return repr([canonical(item) for item in items]).encode()


@st.composite
def random_topics(draw: st.DrawFn) -> RandomTopic:
    """A topic with one or two key columns and up to three others, of any types."""
    kinds = draw(st.lists(key_types(), min_size=1, max_size=2))
    others = draw(st.lists(types(), max_size=3))
    names = [f"k{number}" for number in range(len(kinds))]
    fields = list(zip([*names, "x", "y", "z"], [*kinds, *others], strict=False))
    part = [values_of(kind).filter(lambda value: value == value) for kind in kinds]
    keys = st.tuples(*(part if len(part) == 1 else map(or_none, part))).filter(any_value)
    rows = st.tuples(*(or_none(values_of(kind)) for kind in others))
    some_keys, some_rows = (draw(st.lists(some, min_size=1, max_size=6)) for some in (keys, rows))
    return RandomTopic(
        first_version(pa.schema(fields), names, None),
        {key_of(list(map(KeyPart, key, kinds))): list(key) for key in some_keys},
        {row_bytes(list(row)): list(row) for row in some_rows},
    )


def any_value(key: tuple[Any, ...]) -> bool:
    """Whether a key has a part that is not null."""
    return any(part is not None for part in key)


def as_typed(
    encoded: EncodedBatch, schema: TopicSchema | None = None, topic: RandomTopic | None = None
) -> TypedBatch:
    """Return a batch of bytes as one of such a topic; what has no value is a tombstone."""
    schema, columns = topic.schema if topic else schema or first_schema(), decoded(encoded)
    arrays = [columns.column(name) for name in ("timestamp", "key", "value")]
    if topic is not None:
        arrays[1:] = topic.arrays(*(array.to_pylist() for array in arrays[1:]))
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
    columns = batch.columns([name for name in batch.layout.names if name != "_timestamp"])
    if "data" in columns.schema.names:
        values = columns.column("data").to_pylist()
    else:
        names = [name for name in columns.schema.names if name in "xyz"]
        values = [row_bytes([row[name] for name in names]) for row in columns.to_pylist()]
        if batch.may_have_tombstones:
            deleted = columns.column("_tombstone").to_pylist()
            values = [None if gone else row for gone, row in zip(deleted, values, strict=True)]
    return times, batch.keys().to_pylist(), values, batch.header_lists()
