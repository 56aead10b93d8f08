"""Makes batches of converted records, and chooses their partitions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from embedlog.batch import BatchLimits, EncodedBatch
from embedlog.batch.arrays import bitmap, numbers
from embedlog.batch.key_bytes import key_bytes
from embedlog.batch.wire import schema as batch_schema
from embedlog.catalog import TopicInfo
from embedlog.convert.stored_rows import StoredRows, times
from embedlog.errors import RecordTooLargeError
from embedlog.lazy import np, pa, pc
from embedlog.partitioner import partitions_for_keys
from embedlog.producer.row_batches import encode_columns, slice_bounds
from embedlog.producer.typed_rows import DECODED_BYTES, TypedColumns
from embedlog.schemas.conform import conform
from embedlog.schemas.segment_schema import segment_schema
from embedlog.schemas.statistics import text_columns_of
from embedlog.schemas.topic_schema import TopicSchema

_BATCH_BYTES = 1 << 20

Batches = list[tuple[int, EncodedBatch]]
"""Pairs of a partition and a batch."""


class BatchMaker(NamedTuple):
    """Makes the batches of a topic."""

    topic: TopicInfo
    same_partitions: bool
    """Whether a record whose key stays the same stays in its partition."""

    def typed(self, rows: StoredRows, columns: TypedColumns) -> Batches:
        """Return the batches of records of a typed topic."""
        result: Batches = []
        texts = text_columns_of(self.topic.config)
        for partition, indices in self._by_partition(rows, columns.keys):
            part = columns if indices is None else columns.take(indices)
            limits = self._limits()
            most = limits.record_bytes(DECODED_BYTES)
            batches = part.batches(most, DECODED_BYTES, self._codec(rows), limits, texts)
            result += [(partition, self._checked(batch)) for batch in batches]
        return result

    def plain(self, rows: StoredRows, values: Any) -> Batches:
        """Return the batches of records of a topic of bytes.

        Args:
            rows: The records, of which everything but the values stays the same.
            values: Their values, as a `pyarrow.BinaryArray`.
        """
        headers = rows.headers()
        arrays = [times(rows), rows.keys, values, *([] if headers is None else [headers])]
        columns = pa.RecordBatch.from_arrays(
            arrays, schema=batch_schema(headers=headers is not None)
        )
        result: Batches = []
        for partition, indices in self._by_partition(rows, rows.keys):
            part = columns if indices is None else columns.take(indices)
            for start, stop in slice_bounds(part, self._limits().record_bytes(_BATCH_BYTES)):
                piece = part.slice(start, stop - start)
                batches = encode_columns(piece, self._codec(rows), self._limits())
                result += [(partition, self._checked(batch)) for batch in batches]
        return result

    def _limits(self) -> BatchLimits:
        config = self.topic.config
        return BatchLimits(config.max_message_bytes, config.segment_bytes)

    def _codec(self, rows: StoredRows) -> str:
        codec = self.topic.config.compression_type
        return rows.compression if codec == "producer" else codec

    def _checked(self, batch: EncodedBatch) -> EncodedBatch:
        if batch.count == 1 and not self._limits().accepts(batch):
            raise RecordTooLargeError(
                f"The record takes {batch.size} bytes, and the limits of topic {self.topic.name} "
                f"are max.message.bytes={self._limits().message} and "
                f"segment.bytes={self._limits().segment}"
            )
        return batch

    def _by_partition(self, rows: StoredRows, keys: Any) -> Iterator[tuple[int, Any]]:
        """Yield each partition with the rows for it; None for all."""
        count = self.topic.partitions
        if count == 1:
            yield 0, None
            return
        partitions = partitions_for_keys(keys, count)
        keyless = partitions < 0
        partitions[keyless] = rows.partition % count
        if self.same_partitions:
            same = pc.fill_null(pc.equal(keys, rows.keys), pa.scalar(False))
            partitions[same.to_numpy(zero_copy_only=False)] = rows.partition
        if (partitions == partitions[0]).all():
            yield int(partitions[0]), None
            return
        order = partitions.argsort(kind="stable")
        bounds = partitions[order].searchsorted(range(count + 1)).tolist()
        for number, (start, stop) in enumerate(pairwise(bounds)):
            if start < stop:
                yield number, numbers(order[start:stop], pa.int64())


def typed_columns(
    rows: StoredRows, values: Any, deleted_keys: list[Any], schema: TopicSchema, topic: str
) -> TypedColumns:
    """Return records with the columns of a segment of a typed topic.

    Args:
        rows: The records.
        values: The values of those that are no tombstones, as a `pyarrow.RecordBatch`.
        deleted_keys: The key columns of the tombstones.
        schema: The columns of the topic.
        topic: Its name, for errors.

    Raises:
        SerializationError: A value does not fit the topic.
    """
    table = conform(pa.Table.from_batches([values]), schema, topic)
    columns = {name: _one_chunk(table.column(name)) for name in table.column_names}
    timestamps, headers = times(rows), rows.headers()
    has_tombstones = bool(rows.deleted.any())
    if has_tombstones:
        (present,), (deleted,) = np.nonzero(~rows.deleted), np.nonzero(rows.deleted)
        order = numbers(np.argsort(np.concatenate([present, deleted])), pa.int64())
        keys = dict(zip(schema.key, deleted_keys, strict=True))
        for name, column in columns.items():
            added = keys.get(name)
            if name == schema.timestamp:
                time = timestamps.take(numbers(deleted, pa.int64()))
                added = time.cast(column.type, safe=False)
            if added is None:
                added = pa.nulls(len(deleted), column.type)
            columns[name] = pa.concat_arrays([column, added.cast(column.type)]).take(order)
    own = {
        "_timestamp": timestamps,
        "_headers": headers,
        "_tombstone": pa.Array.from_buffers(pa.bool_(), rows.size, [None, bitmap(rows.deleted)]),
    }
    target = segment_schema(schema, headers=headers is not None, tombstones=has_tombstones)
    arrays = [columns[name] if name in columns else own[name] for name in target.names]
    batch = pa.RecordBatch.from_arrays(arrays, schema=target)
    stored_keys = pa.nulls(rows.size, pa.binary())
    if schema.key:
        stored_keys = key_bytes([columns[name] for name in schema.key])
    return TypedColumns(batch, stored_keys, schema)


def _one_chunk(column: Any) -> Any:
    chunks = column.combine_chunks()
    if not isinstance(chunks, pa.ChunkedArray):
        return chunks
    return pa.concat_arrays(chunks.chunks) if chunks.num_chunks else pa.nulls(0, column.type)
