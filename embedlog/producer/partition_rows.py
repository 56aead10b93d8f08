"""Which partition each record goes to, and the batches that are made of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from time import monotonic
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from embedlog.batch import EncodedBatch
from embedlog.batch.arrays import numbers
from embedlog.partitioner import StickyPartitioner, partition_for_key, partitions_for_keys
from embedlog.producer.row_batches import (
    PIECE_BYTES,
    Rows,
    TableRows,
    cuts,
    encode_columns,
    encode_rows,
    pieces,
    size_of,
)

if TYPE_CHECKING:
    from embedlog.producer.topic_queue import TopicQueue

Batches = Iterator[tuple[int, EncodedBatch]]
FEW = 8192
"""Rows that are sorted as lists; more are made columns first.  Measured with values of 100
bytes and four partitions, lists took 0.6 of the time of columns for 1,000 rows, 0.9 for 8,192,
1.1 for 16,000, and 1.4 to 1.6 for 100,000."""


class RowPartitioner:
    """Splits what goes to one topic; under the queue's drain lock, for partitions stick."""

    def __init__(self, queue: TopicQueue) -> None:
        self._queue, self._config = queue, queue.producer.config
        config = self._config
        self._sticky = StickyPartitioner(
            max(min(config.batch_size, config.partitioner_sticky_bytes), 1),
            longest=config.partitioner_sticky_ms / 1000,
            adaptive=config.partitioner_adaptive_partitioning_enable,
        )

    def split(self, rows: Rows, size: int, chosen: dict[int, int]) -> tuple[Any, Batches]:
        """Return the order of the rows in the batches (None: as they are), and the batches."""
        only = self._only(rows, chosen)
        if only is not None:
            return None, self._to_one(rows, size, only)
        config = self._config
        if not chosen and (rows.keys is None or config.partitioner_ignore_keys):
            return None, self._stick(rows, size)
        if len(rows.values) <= FEW:
            return self._scatter_rows(rows, size, chosen)
        return self._scatter(rows.columns(), chosen)

    def _only(self, rows: Rows, chosen: dict[int, int]) -> int | None:
        """Return the partition that all rows go to, if that is easily seen."""
        partitions = self._queue.info.partitions
        if partitions == 1:
            return 0
        count = len(rows.values)
        if len(chosen) == count:
            different = set(chosen.values())
            return different.pop() if len(different) == 1 else None
        if count > 1 or rows.keys is None or rows.keys[0] is None:
            return None
        if self._config.partitioner_ignore_keys:
            return None
        return partition_for_key(rows.keys[0], partitions)

    def _to_one(self, rows: Rows, size: int, partition: int) -> Batches:
        compression = self._queue.compression
        for piece in pieces(rows, self._queue.limit, size):
            for encoded in encode_rows(piece, compression, self._queue.limits):
                yield partition, encoded

    def _stick(self, rows: Rows, size: int) -> Batches:
        compression = self._queue.compression
        for piece in pieces(rows, self._queue.limit, size):
            partition = self.stay()
            for encoded in encode_rows(piece, compression, self._queue.limits):
                yield partition, encoded
                self.stayed(encoded.size)

    def stay(self) -> int:
        """Return where a record without a key goes now."""
        partitions, lanes = self._queue.info.partitions, self._queue.lanes
        queues = None
        if any(lane.waiting for lane in lanes.values()):
            queues = [len(lanes[i].waiting) if i in lanes else 0 for i in range(partitions)]
        return self._sticky.choose(partitions, queues=queues, now=monotonic())

    def stayed(self, size: int) -> None:
        """Count a batch that went there."""
        self._sticky.added(size, batch_closed=True)

    def _scatter_rows(self, rows: Rows, size: int, chosen: dict[int, int]) -> tuple[Any, Batches]:
        """Hash the keys all at once, and bring the rows of each partition together."""
        order, bounds = self._sorted(rows.key_column(), size, chosen)
        return order, self._row_parts(rows.pick(order.tolist()), bounds)

    def _row_parts(self, rows: Rows, bounds: list[int]) -> Batches:
        for partition, (start, stop) in enumerate(pairwise(bounds)):
            if start < stop:
                part = rows.slice(start, stop).measured()
                yield from self._to_one(part, size_of(part), partition)

    def _scatter(self, columns: Any, chosen: dict[int, int]) -> tuple[Any, Batches]:
        """As `_scatter_rows`, for whole columns."""
        order, bounds = self._sorted(columns.column(1), columns.nbytes, chosen)
        return order, self._parts(columns.take(numbers(order, pa.int64())), bounds)

    def _sorted(self, keys: Any, size: int, chosen: dict[int, int]) -> tuple[Any, list[int]]:
        """Return rows in the order of their partitions, and where each partition begins."""
        partitions, rows = self._queue.info.partitions, len(keys)
        if self._config.partitioner_ignore_keys:
            keys = pa.nulls(rows, pa.binary())
        where = partitions_for_keys(keys, partitions)
        where = where.astype("int16" if partitions < 1 << 15 else "int32")
        if chosen:
            where[list(chosen)] = list(chosen.values())
        keyless = where < 0
        if keyless.any():
            where[keyless] = self.stay()
            self.stayed(size * int(keyless.sum()) // rows)
        order = where.argsort(kind="stable")
        return order, where[order].searchsorted(range(partitions + 1)).tolist()

    def _parts(self, columns: Any, bounds: list[int]) -> Batches:
        for partition, (start, stop) in enumerate(pairwise(bounds)):
            if start < stop:
                for encoded in self._cut(columns.slice(start, stop - start), None):
                    yield partition, encoded

    def _cut(self, columns: Any, times: tuple[int, int] | None) -> Iterator[EncodedBatch]:
        compression = self._queue.compression
        for start, stop in cuts(columns, self._queue.wide):
            piece = columns.slice(start, stop - start)
            yield from encode_columns(piece, compression, self._queue.limits, times)

    def split_rows(self, rows: Rows, size: int, partition: int | None) -> Batches:
        """Return the batches of rows that came as lists, made as they are asked for."""
        if partition is not None:
            yield from self._to_one(rows, size, partition)
            return
        if size <= self._queue.limit:
            # A list: what is not bytes is found before the first batch is on its way.
            yield from list(self.split(rows, size, {})[1])
            return
        many = self._queue.info.partitions > 1 and rows.keys is not None
        for piece in pieces(rows, PIECE_BYTES, size) if many else (rows,):
            yield from self.split(piece, size, {})[1]

    def split_groups(self, rows: Rows, groups: dict[int, list[int]]) -> Batches:
        """Return the batches of rows that a partitioner put into groups."""
        for partition, members in groups.items():
            part = rows.pick(members).measured()
            yield from self._to_one(part, size_of(part), partition)

    def split_source(self, source: TableRows, partition: int | None) -> Batches:
        """Return the batches of a table, made as they are asked for."""
        times = None if source.now is None else (source.now, source.now)
        for columns in source.table.to_batches():
            keyless = columns.column(1).null_count == columns.num_rows
            if partition is not None or self._queue.info.partitions == 1:
                for encoded in self._cut(columns, times):
                    yield partition or 0, encoded
            elif keyless or self._config.partitioner_ignore_keys:
                for encoded in self._cut(columns, times):
                    yield self.stay(), encoded
                    self.stayed(encoded.size)
            else:
                yield from self._scatter(columns, {})[1]
