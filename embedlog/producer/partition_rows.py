"""Chooses the partition of each row, and makes the batches of each partition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING, Any

from embedlog.batch import EncodedBatch, from_lists
from embedlog.batch.arrays import numbers
from embedlog.batch.encode import binary_array
from embedlog.config import ProducerConfig
from embedlog.lazy import pa
from embedlog.partitioner import (
    StickyPartitioner,
    partition_for_key,
    partitions_for_keys,
    sorted_by_partition,
)
from embedlog.producer.partition_writer import PartitionWriter
from embedlog.producer.row_batches import (
    CHUNK_BYTES,
    Rows,
    TableRows,
    chunks,
    encode_columns,
    encode_rows,
    slice_bounds,
)
from embedlog.producer.topic_settings import TopicSettings
from embedlog.schemas.typed_row import TypedRow

if TYPE_CHECKING:
    from embedlog.producer.typed_rows import TypedColumns

Batches = Iterator[tuple[int, EncodedBatch]]
"""Pairs of a partition and a batch."""
MAX_LIST_ROWS = 8192
"""Rows that are sorted as lists; more are converted to columns first.  Measured with values of
100 bytes and four partitions, lists took 0.6 of the time of columns for 1,000 rows, 0.9 for
8,192, 1.1 for 16,000, and 1.4 to 1.6 for 100,000."""


class RowPartitioner:
    """Splits the rows for one topic into batches.

    The caller holds the queue's drain lock, since the sticky partition is a state.
    """

    def __init__(
        self,
        config: ProducerConfig,
        settings: TopicSettings,
        writers: Mapping[int, PartitionWriter],
    ) -> None:
        self._config, self._settings, self._writers = config, settings, writers
        self._sticky = StickyPartitioner(
            max(min(config.batch_size, config.partitioner_sticky_bytes), 1),
            longest=config.partitioner_sticky_ms / 1000,
            adaptive=config.partitioner_adaptive_partitioning_enable,
        )

    def split(
        self, rows: Rows, size: int, explicit_partitions: dict[int, int]
    ) -> tuple[Any, Batches]:
        """Return the order of the rows in the batches (None: as they are), and the batches."""
        settings = self._settings
        if settings.row_encoder is not None or type(rows.values[0]) is TypedRow:
            from embedlog.producer.typed_rows import of_rows

            return self._split_typed(of_rows(rows, settings.info), explicit_partitions)
        partition = self._single_partition(rows, explicit_partitions)
        if partition is not None:
            return None, self._encode(rows, size, partition)
        config = self._config
        if not explicit_partitions and (rows.keys is None or config.partitioner_ignore_keys):
            return None, self._encode(rows, size, None)
        if len(rows.values) > MAX_LIST_ROWS:
            return self._split_columns(from_lists(*rows), explicit_partitions)
        # Hash all keys at once, then bring the rows of each partition together.
        keys = binary_array(rows.keys, len(rows.values), rows.lengths[1])
        order, bounds = self._sort(keys, size, explicit_partitions)
        rows = rows.take(order.tolist())
        parts = (
            self._encode(rows.slice(start, stop).measured(), None, partition)
            for partition, start, stop in bounds
        )
        return order, chain.from_iterable(parts)

    def _single_partition(self, rows: Rows, explicit_partitions: dict[int, int]) -> int | None:
        """Return the partition of all rows, if that is cheap to see."""
        partitions = self._settings.info.partitions
        if partitions == 1:
            return 0
        count = len(rows.values)
        if len(explicit_partitions) == count:
            distinct = set(explicit_partitions.values())
            return distinct.pop() if len(distinct) == 1 else None
        if count > 1 or rows.keys is None or self._config.partitioner_ignore_keys:
            return None
        return None if rows.keys[0] is None else partition_for_key(rows.keys[0], partitions)

    def _encode(self, rows: Rows, size: int | None, partition: int | None) -> Batches:
        """Yield the batches of rows for a partition, or for the sticky one if it is None."""
        settings = self._settings
        compression = settings.compression
        for chunk in chunks(rows, settings.batch_bytes, size):
            target = self.sticky_partition() if partition is None else partition
            for encoded in encode_rows(chunk, compression, settings.limits):
                yield target, encoded
                if partition is None:
                    self.sent_sticky(encoded.size)

    def sticky_partition(self) -> int:
        """Return the partition for a record without a key."""
        partitions, writers = self._settings.info.partitions, self._writers
        queues = None
        if any(writer.waiting for writer in writers.values()):
            queues = [len(writers[n].waiting) if n in writers else 0 for n in range(partitions)]
        return self._sticky.choose(partitions, queues=queues, now=monotonic())

    def sent_sticky(self, size: int) -> None:
        """Count the bytes of a batch that went to the sticky partition."""
        self._sticky.added(size, batch_closed=True)

    def _sort(
        self, keys: Any, size: int, explicit_partitions: dict[int, int]
    ) -> tuple[Any, list[tuple[int, int, int]]]:
        """Return the rows sorted by partition, and the partitions with their ``[start, stop)``."""
        partitions, rows = self._settings.info.partitions, len(keys)
        if self._config.partitioner_ignore_keys:
            keys = pa.nulls(rows, pa.binary())
        chosen = partitions_for_keys(keys, partitions)
        chosen = chosen.astype("int16" if partitions < 1 << 15 else "int32")
        if explicit_partitions:
            chosen[list(explicit_partitions)] = list(explicit_partitions.values())
        keyless = chosen < 0
        if keyless.any():
            chosen[keyless] = self.sticky_partition()
            self.sent_sticky(size * int(keyless.sum()) // rows)
        return sorted_by_partition(chosen)

    def _split_columns(
        self, columns: Any, explicit_partitions: dict[int, int]
    ) -> tuple[Any, Batches]:
        """Do as `split` does for rows that must be sorted, with columns."""
        order, bounds = self._sort(columns.column(1), columns.nbytes, explicit_partitions)
        columns = columns.take(numbers(order, pa.int64()))
        parts = (
            self._encode_columns(columns.slice(start, stop - start), None, partition)
            for partition, start, stop in bounds
        )
        return order, chain.from_iterable(parts)

    def _encode_columns(
        self, columns: Any, timestamps: tuple[int, int] | None, partition: int | None
    ) -> Batches:
        """Yield the batches of columns for a partition, or for the sticky one if it is None."""
        settings = self._settings
        compression = settings.compression
        for start, stop in slice_bounds(columns, settings.column_batch_bytes):
            part = columns.slice(start, stop - start)
            for encoded in encode_columns(part, compression, settings.limits, timestamps):
                if partition is None:
                    yield self.sticky_partition(), encoded
                    self.sent_sticky(encoded.size)
                else:
                    yield partition, encoded

    def _split_typed(
        self, rows: TypedColumns, explicit_partitions: dict[int, int]
    ) -> tuple[Any, Batches]:
        """Do as `split` does, for records of a typed topic."""
        count = rows.columns.num_rows
        keyless = self._config.partitioner_ignore_keys or rows.keys.null_count == count
        if self._settings.info.partitions == 1:
            return None, self._encode_typed(rows, 0)
        if keyless and not explicit_partitions:
            return None, self._encode_typed(rows, None)
        order, bounds = self._sort(rows.keys, rows.columns.nbytes, explicit_partitions)
        rows = rows.take(numbers(order, pa.int64()))
        parts = (
            self._encode_typed(rows.slice(start, stop), partition)
            for partition, start, stop in bounds
        )
        return order, chain.from_iterable(parts)

    def _encode_typed(self, rows: TypedColumns, partition: int | None) -> Batches:
        """Yield the batches of records for a partition, or for the sticky one if it is None."""
        from embedlog.schemas.statistics import text_columns_of

        settings = self._settings
        encoded = rows.batches(
            settings.typed_batch_bytes,
            settings.decoded_batch_bytes,
            settings.compression,
            settings.limits,
            text_columns_of(settings.info.config),
        )
        for batch in encoded:
            if partition is None:
                yield self.sticky_partition(), batch
                self.sent_sticky(batch.size)
            else:
                yield partition, batch

    def split_typed(
        self,
        parts: Iterable[TypedColumns],
        partition: int | None,
        choose: Callable[[bytes | None], int] | None,
    ) -> Batches:
        """Yield the batches of records of a typed topic; each is encoded when it is asked for.

        Args:
            parts: The records.
            partition: The partition of all of them; None to choose it by key.
            choose: Returns the partition for a key, if the program chooses it.
        """
        for rows in parts:
            if partition is not None:
                yield from self._encode_typed(rows, partition)
            else:
                keys = [] if choose is None else rows.keys.to_pylist()
                explicit = {row: choose(key) for row, key in enumerate(keys)} if choose else {}
                yield from self._split_typed(rows, explicit)[1]

    def split_rows(self, rows: Rows, size: int, partition: int | None) -> Batches:
        """Yield the batches of rows that came as lists; each is encoded when it is asked for."""
        if partition is not None:
            yield from self._encode(rows, size, partition)
            return
        if size <= self._settings.batch_bytes:
            # A list: values that are not bytes are found before the first batch is written.
            yield from list(self.split(rows, size, {})[1])
            return
        in_chunks = self._settings.info.partitions > 1 and rows.keys is not None
        for chunk in chunks(rows, CHUNK_BYTES, size) if in_chunks else (rows,):
            yield from self.split(chunk, size, {})[1]

    def split_groups(self, rows: Rows, groups: dict[int, list[int]]) -> Batches:
        """Yield the batches of rows that a custom partitioner grouped by partition."""
        for partition, members in groups.items():
            yield from self._encode(rows.take(members).measured(), None, partition)

    def split_table(self, rows: TableRows, partition: int | None) -> Batches:
        """Yield the batches of a table; each is encoded when it is asked for."""
        timestamps = None if rows.timestamp is None else (rows.timestamp, rows.timestamp)
        if partition is None and self._settings.info.partitions == 1:
            partition = 0
        for columns in rows.table.to_batches():
            keyless = columns.column(1).null_count == columns.num_rows
            if partition is not None or keyless or self._config.partitioner_ignore_keys:
                yield from self._encode_columns(columns, timestamps, partition)
            else:
                yield from self._split_columns(columns, {})[1]
