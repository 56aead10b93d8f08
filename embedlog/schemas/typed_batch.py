"""Encodes the rows of a typed topic as batches, and fits batches to a segment."""

from __future__ import annotations

from typing import Any

from embedlog.batch import EncodedBatch, encode, parse
from embedlog.batch.add_headers import like
from embedlog.batch.wire import EXPLICIT_OFFSETS, HEADERS, TOMBSTONES
from embedlog.lazy import pa
from embedlog.schemas import statistics
from embedlog.schemas.evolution import convert
from embedlog.schemas.segment_schema import segment_schema
from embedlog.schemas.topic_schema import TopicSchema


class TypedBatch(EncodedBatch):
    """An encoded batch of a typed topic."""

    __slots__ = ("schema",)

    schema: TopicSchema | None
    """The version of the topic's schema that its columns have."""

    @property
    def schema_version(self) -> int:  # type: ignore[override]
        """The number of that version."""
        assert self.schema is not None
        return self.schema.version

    @property
    def has_tombstones(self) -> bool:
        """Whether the batch has a column that marks tombstones."""
        return bool(self.flags & TOMBSTONES)

    def stored_schema(self) -> Any:
        """Return the columns that it has."""
        assert self.schema is not None
        return segment_schema(
            self.schema,
            headers=self.has_headers,
            tombstones=self.has_tombstones,
            offsets=bool(self.flags & EXPLICIT_OFFSETS),
        )

    def _batch(self) -> Any:
        message = pa.py_buffer(b"".join(self.stamp(0, 0, next_offset=self.count)))
        return parse(message, 0, message.size, path="", position=0, schema=self.stored_schema())

    @property
    def null_keys(self) -> int:
        """How many records have no key."""
        return int(self._batch().keys(verify=False).null_count)

    def fitted(
        self,
        schema: TopicSchema,
        flags: int,
        text_statistics: frozenset[str] | None = frozenset(),
    ) -> TypedBatch:
        """Return the same records in another version of the schema, and with other columns.

        Args:
            schema: The version.
            flags: Which columns a segment has besides the user's: `HEADERS` and `TOMBSTONES`.
            text_statistics: The columns of text that get statistics; see `statistics.pack`.
        """
        assert self.schema is not None
        flags |= self.flags & (HEADERS | TOMBSTONES)
        own = self.schema
        same = schema is own or (
            own.topic_id is not None
            and (own.topic_id, own.version) == (schema.topic_id, schema.version)
        )
        if same and flags == self.flags & (HEADERS | TOMBSTONES):
            return self
        batch = self._batch()
        columns = batch.columns(batch.layout.names, verify=False)
        target = segment_schema(
            schema,
            headers=bool(flags & HEADERS),
            tombstones=bool(flags & TOMBSTONES),
            offsets=batch.has_offsets,
        )
        columns = convert(columns, self.schema, schema, target)
        result = encode_typed(
            columns,
            schema,
            batch.codec,
            self.time_range,
            text_statistics,
        )
        like(result, self)
        return result

    @property
    def time_range(self) -> tuple[int, int]:
        """The smallest and the largest timestamp, in ms."""
        return self.min_timestamp, self.max_timestamp


def typed(encoded: EncodedBatch, schema: TopicSchema) -> TypedBatch:
    """Return an encoded batch as one of a version of a schema, which it must have."""
    batch = TypedBatch.__new__(TypedBatch)
    for name in EncodedBatch.__slots__:
        setattr(batch, name, getattr(encoded, name))
    batch.schema = schema
    return batch


def encode_typed(
    columns: Any,
    schema: TopicSchema,
    compression: str = "none",
    timestamps: tuple[int, int] | None = None,
    text_statistics: frozenset[str] | None = frozenset(),
) -> TypedBatch:
    """Encode rows of a typed topic.

    Args:
        columns: A `pyarrow.RecordBatch` with the columns of `segment_schema`.
        schema: The version of the topic's schema.
        compression: ``"none"``, ``"lz4"`` or ``"zstd"``.
        timestamps: The smallest and the largest, in ms; by default those of the columns.
        text_statistics: The columns of text that get statistics; see `statistics.pack`.

    Raises:
        RecordTooLargeError: The columns take more than `MAX_BATCH_BYTES`.
    """
    packed = statistics.pack(columns, text_statistics)
    encoded = encode(columns, compression, timestamps=timestamps, statistics=packed)
    return typed(encoded, schema)
