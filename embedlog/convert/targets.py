"""Makes batches of converted records, and chooses their partitions."""

from __future__ import annotations

from typing import Any, NamedTuple

from embedlog.batch import BatchLimits, EncodedBatch
from embedlog.batch.wire import schema as batch_schema
from embedlog.catalog import TopicInfo
from embedlog.convert.stored_rows import StoredRows, times
from embedlog.errors import RecordTooLargeError
from embedlog.lazy import pa, pc
from embedlog.partitioner import partitions_for_keys
from embedlog.producer.row_batches import ColumnRows, batches_by_partition
from embedlog.producer.typed_rows import of_table, with_tombstones
from embedlog.schemas.statistics import text_columns_of
from embedlog.schemas.topic_schema import TopicSchema

Batches = list[tuple[int, EncodedBatch]]
"""Pairs of a partition and a batch."""


class BatchMaker(NamedTuple):
    """Makes the batches of a topic."""

    topic: TopicInfo
    same_partitions: bool
    """Whether a record whose key stays the same stays in its partition."""

    def plain(self, rows: StoredRows, values: Any) -> Batches:
        """Return the batches of records of a topic of bytes.

        Args:
            rows: The records, of which everything but the values stays the same.
            values: Their values, as a `pyarrow.BinaryArray`.
        """
        headers = rows.headers()
        arrays = [times(rows), rows.keys, values, *([] if headers is None else [headers])]
        target = batch_schema(headers=headers is not None)
        columns = pa.RecordBatch.from_arrays(arrays, schema=target)
        return self.batches(rows, columns, rows.keys)

    def batches(self, rows: StoredRows, columns: Any, keys: Any) -> Batches:
        """Return the batches of records with other columns and keys; see `batches_by_partition`."""
        config = self.topic.config
        limits = BatchLimits(config.max_message_bytes, config.segment_bytes)
        codec: str = config.compression_type
        if codec == "producer":
            codec = rows.compression
        result = list(
            batches_by_partition(
                columns, self._partitions(rows, keys), limits, codec, text_columns_of(config)
            )
        )
        for _, batch in result:
            if batch.count == 1 and not limits.accepts(batch):
                raise RecordTooLargeError(
                    f"The record takes {batch.size} bytes, and the limits of topic "
                    f"{self.topic.name} are max.message.bytes={limits.message} and "
                    f"segment.bytes={limits.segment}"
                )
        return result

    def _partitions(self, rows: StoredRows, keys: Any) -> Any:
        """Return the partition of each record; None if the topic has only one."""
        count = self.topic.partitions
        if count == 1:
            return None
        partitions = partitions_for_keys(keys, count)
        partitions[partitions < 0] = rows.partition % count
        if self.same_partitions:
            same = pc.fill_null(pc.equal(keys, rows.keys), pa.scalar(False))
            partitions[same.to_numpy(zero_copy_only=False)] = rows.partition
        return partitions


def typed_columns(
    rows: StoredRows, values: Any, deleted_keys: list[Any], schema: TopicSchema, topic: str
) -> ColumnRows:
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
    own, headers = {"timestamp": times(rows)}, rows.headers()
    if headers is not None:
        own["headers"] = headers
    present = pa.Table.from_batches([values])
    is_deleted = pa.array(rows.deleted)
    if not rows.deleted.any():
        (result,) = of_table(_with(present, own), topic, schema, 0)
        return result
    kept = {name: column.filter(pc.invert(is_deleted)) for name, column in own.items()}
    gone = pa.table(dict(zip(schema.key, deleted_keys, strict=True)))
    gone = _with(gone, {name: column.filter(is_deleted) for name, column in own.items()})
    return with_tombstones(_with(present, kept), gone, is_deleted, schema, topic, 0)


def _with(table: Any, columns: dict[str, Any]) -> Any:
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table
