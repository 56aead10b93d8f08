"""Encode: from lists and columns to batches of a fitting size, each with its partition.

Nothing here touches single records, except where there are only a few.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import groupby
from operator import itemgetter
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from embedlog.batch import BatchLimits, EncodedBatch, encode, encode_lists, encode_one, from_lists
from embedlog.batch.arrays import numbers
from embedlog.batch.encode import Lengths, binary_array, lengths_of, not_bytes, row_ends
from embedlog.batch.encode_headers import encode_headers
from embedlog.config import ProducerConfig
from embedlog.lazy import pa
from embedlog.partitioner import (
    StickyPartitioner,
    partition_for_key,
    partitions_for_keys,
    sorted_by_partition,
)

if TYPE_CHECKING:
    from embedlog.schemas.topic_schema import TopicSchema

Batches = Iterator[tuple[int, EncodedBatch]]
"""Pairs of a partition and a batch."""
ROW_BYTES = 16
"""What a record takes besides key and value: its timestamp, and two Arrow offsets.

``buffer_memory`` counts the same.
"""
CHUNK_BYTES = 16 << 20
"""Lists are handled in chunks of this size: memory stays small, and Arrow's int32 large enough."""
DECODED_BYTES = 4 << 20
"""How large the columns of a typed batch are without a ``batch_size``, before its compression."""
FEW_ROWS = 32
"""Rows that are sorted by partition, and whose headers are encoded, in Python: fewer than numpy and
Arrow are worth."""
MAX_LIST_ROWS = 8192
"""Rows that are sorted as lists; more are converted to columns first.  Measured with values of
100 bytes and four partitions, lists took 0.6 of the time of columns for 1,000 rows, 0.9 for
8,192, 1.1 for 16,000, and 1.4 to 1.6 for 100,000."""
_BATCH_ROWS = 1 << 16
"""The most rows of a typed batch: a consumer converts all of them to objects."""
_BATCH_BYTES = 1 << 20
"""About how large batches of bytes are that no producer's ``batch_size`` limits."""


class Encoding(NamedTuple):
    """How the rows of a topic become batches; sizes are in bytes."""

    compression: str
    limits: BatchLimits
    list_bytes: int
    """How large a batch of `send` or of lists becomes."""
    column_bytes: int
    """How large a batch of columns becomes."""
    typed_bytes: int
    """How large a batch of a typed topic becomes, as it is stored."""
    decoded_bytes: int = DECODED_BYTES
    """How large its columns become, decompressed."""
    text_statistics: frozenset[str] | None = frozenset()
    """The columns of text that get statistics; None for no statistics."""


class Rows(NamedTuple):
    """Records as lists; without ``keys`` or ``headers`` no record has one."""

    values: Sequence[Any]
    """Bytes or None, or the rows of a typed topic."""
    keys: Sequence[bytes | None] | None
    timestamps: Sequence[int] | int
    """In ms; an int is the timestamp of all records."""
    headers: Sequence[Any] | None = None
    lengths: tuple[Lengths, Lengths] = (None, None)
    """Of values and of keys; None if not measured, or if an item has no length."""

    @property
    def row_count(self) -> int:
        """How many records there are."""
        return len(self.values)

    def measured(self) -> Rows:
        """Return the rows with their lengths, which both splitting and encoding need."""
        values, keys, timestamps, headers, (value_lengths, key_lengths) = self
        if keys is not None:
            key_lengths = key_lengths or lengths_of(keys)
        lengths = value_lengths or lengths_of(values), key_lengths
        return Rows(values, keys, timestamps, headers, lengths)

    def size(self) -> int:
        """Return about how many bytes the rows will take."""
        count = len(self.values)
        sizes = (size * count if isinstance(size, int) else sum(size) for size in self._sizes())
        return ROW_BYTES * count + sum(sizes)

    def _sizes(self) -> list[int | list[int]]:
        """Return the lengths of the values, and of the keys if any; an int if all are equal.

        Items of other types may have a length: the encoder refuses them.
        """
        sizes: list[int | list[int]] = []
        for items, lengths in zip((self.values, self.keys), self.lengths, strict=True):
            if items is not None:
                if lengths is None:
                    try:
                        lengths = [0 if item is None else len(item) for item in items]
                    except TypeError as error:
                        raise not_bytes(items) from error
                sizes.append(lengths[0] if lengths and _all_equal(lengths) else lengths)
        return sizes

    def slice(self, start: int, stop: int) -> Rows:
        """Return the rows ``[start, stop)``."""
        value_lengths, key_lengths = self.lengths
        lengths = (
            None if value_lengths is None else value_lengths[start:stop],
            None if key_lengths is None else key_lengths[start:stop],
        )
        return self._picked(itemgetter(slice(start, stop)), lengths)

    def take(self, order: Any) -> Rows:
        """Return the rows, of which there are several, in another order."""
        # The lengths of any rows are those of the first ones if all are equal.
        lengths = tuple(each if each and _all_equal(each) else None for each in self.lengths)
        # In C, several times as fast as a comprehension.
        return self._picked(itemgetter(*order), lengths)

    def _picked(self, pick: Callable[[Any], Any], lengths: Any) -> Rows:
        values, keys, timestamps, headers, _ = self
        return Rows(
            pick(values),
            None if keys is None else pick(keys),
            timestamps if isinstance(timestamps, int) else pick(timestamps),
            None if headers is None else pick(headers),
            lengths,
        )

    def chunks(self, limit: int, size: int | None = None) -> Iterator[Rows]:
        """Split rows of ``size`` bytes into chunks of at most ``limit``, but at least one row."""
        if (self.size() if size is None else size) <= limit:
            yield self
            return
        ends = row_ends(len(self.values), ROW_BYTES, self._sizes())
        start = used = 0
        while start < len(self.values):
            stop = max(int(ends.searchsorted(used + limit, "right")), start + 1)
            yield self.slice(start, stop)
            start, used = stop, int(ends[stop - 1])

    def batches(self, encoding: Encoding, size: int | None = None) -> Iterator[EncodedBatch]:
        """Yield batches of the rows, which take ``size`` bytes if that is known."""
        for chunk in self.chunks(encoding.list_bytes, size):
            yield from encode_rows(chunk, encoding.compression, encoding.limits)


def _all_equal(lengths: list[int]) -> bool:
    # Items often have one length; counting takes a tenth of the time of adding up.
    return lengths.count(lengths[0]) == len(lengths)


def encode_rows(rows: Rows, compression: str, limits: BatchLimits) -> list[EncodedBatch]:
    """Encode rows as one batch, or as several if one would be over the limits."""
    values, keys, timestamps, headers, lengths = rows
    if headers is not None and compression == "none" and len(values) <= FEW_ROWS and any(headers):
        encoded = encode_headers(values, keys, timestamps, headers)
    else:
        encoded = encode_lists(values, keys, timestamps, headers, compression, lengths)
    if encoded.count == 1 or limits.accepts(encoded):
        return [encoded]
    half = encoded.count // 2
    first, second = rows.slice(0, half), rows.slice(half, encoded.count)
    return encode_rows(first, compression, limits) + encode_rows(second, compression, limits)


class ColumnRows(NamedTuple):
    """Records as columns, of a topic of bytes or of a typed one."""

    columns: Any
    """A `pyarrow.RecordBatch` with the columns of a segment."""
    keys: Any
    """The key of each record, as a `pyarrow.BinaryArray`."""
    schema: TopicSchema | None = None
    """The version of the schema of a typed topic."""
    timestamp: int | None = None
    """The timestamp of all records in ms, if they came without one."""

    @property
    def row_count(self) -> int:
        """How many records there are."""
        return int(self.columns.num_rows)

    def size(self) -> int:
        """Return how many bytes the columns take."""
        return int(self.columns.nbytes)

    def take(self, order: Any) -> ColumnRows:
        """Return some of the records, by their rows."""
        rows = numbers(order, pa.int64())
        return self._replace(columns=self.columns.take(rows), keys=self.keys.take(rows))

    def slice(self, start: int, stop: int) -> ColumnRows:
        """Return the records ``[start, stop)``."""
        count = stop - start
        columns, keys = self.columns.slice(start, count), self.keys.slice(start, count)
        return self._replace(columns=columns, keys=keys)

    def batches(self, encoding: Encoding, size: int | None = None) -> Iterator[EncodedBatch]:
        """Yield batches within the limits of the topic."""
        times = None if self.timestamp is None else (self.timestamp, self.timestamp)
        if self.schema is not None:
            yield from self._typed_batches(encoding, times)
            return
        make = partial(encode, compression=encoding.compression, timestamps=times)
        for start, stop in slice_bounds(self.columns, encoding.column_bytes):
            yield from encoding.limits.split(self.columns.slice(start, stop - start), make)

    def _typed_batches(self, encoding: Encoding, times: Any) -> Iterator[EncodedBatch]:
        """Yield batches of a typed topic.

        The first batch says how well the rows can be compressed; the next ones are as large as
        that allows, since a reader of a few columns takes as long for a small batch.
        """
        from embedlog.schemas.typed_batch import encode_typed

        assert self.schema is not None
        count, limit = self.columns.num_rows, encoding.typed_bytes
        row_bytes = max(self.columns.nbytes / max(count, 1), 1)
        step = first_step = max(min(int(limit / row_bytes), _BATCH_ROWS), 1)
        most_rows = min(int(encoding.decoded_bytes / row_bytes), _BATCH_ROWS)
        make = partial(
            encode_typed,
            schema=self.schema,
            compression=encoding.compression,
            timestamps=times,
            text_statistics=encoding.text_statistics,
        )
        start = 0
        while start < count:
            part = self.columns.slice(start, min(step, count - start))
            for encoded in encoding.limits.split(part, make):
                yield encoded
            start += part.num_rows
            stored_rows = 7 * limit * encoded.count // (8 * encoded.size)
            step = max(first_step, min(stored_rows, most_rows))


AnyRows = Rows | ColumnRows


def slice_bounds(columns: Any, limit: int) -> Iterator[tuple[int, int]]:
    """Split columns as `Rows.chunks` does lists, and yield (start, stop).

    Reads Arrow's offsets and copies nothing.
    """
    rows = columns.num_rows
    keys, values = _offsets(columns.column(1)), _offsets(columns.column(2))

    def used(row: int) -> int:
        ends: int = keys[row] + values[row]
        return ends + ROW_BYTES * row

    start = step = 0
    while start < rows:
        end, stop = used(start) + limit, start + step
        # Rows often have one size: then the last step fits again.
        if not start < stop < rows or not used(stop) <= end < used(stop + 1):
            candidates = range(start + 1, min(rows, start + limit // ROW_BYTES) + 1)
            stop = start + max(bisect_right(candidates, end, key=used), 1)
        yield start, stop
        start, step = stop, stop - start


def _offsets(array: Any) -> Any:
    """Return Arrow's offsets of a binary column: where its items begin and end."""
    offsets = array.buffers()[1]
    return memoryview(offsets).cast("i")[array.offset : array.offset + len(array) + 1]


class RowPartitioner:
    """Chooses the partition of each row of a topic, and makes the batches of each partition.

    The caller holds the queue's drain lock, since the sticky partition is a state.

    Args:
        config: The settings of the producer.
        waiting: The batches that wait for each partition that has a writer.
    """

    def __init__(self, config: ProducerConfig, waiting: Mapping[int, Sized]) -> None:
        self._ignores_keys, self._waiting = config.partitioner_ignore_keys, waiting
        self._sticky = StickyPartitioner(
            max(min(config.batch_size, config.partitioner_sticky_bytes), 1),
            longest=config.partitioner_sticky_ms / 1000,
            adaptive=config.partitioner_adaptive_partitioning_enable,
        )
        self.partitions = 0
        """How many partitions the topic has; the queue sets it, and the next."""
        self.encoding: Encoding

    def split(
        self, rows: AnyRows, explicit: Mapping[int, int], size: int | None = None
    ) -> tuple[Any, Batches]:
        """Return the order of the rows in the batches (None: as they are), and the batches.

        Args:
            rows: The rows.
            explicit: The partitions of rows whose caller named one.
            size: How many bytes the rows take, if that is known.
        """
        keyless = self._ignores_keys or rows.keys is None
        if self.partitions == 1 or (keyless and not explicit):
            return None, self.to(rows, 0 if self.partitions == 1 else None, size)
        if isinstance(rows, Rows) and rows.row_count > FEW_ROWS:
            rows = rows.measured()
            if rows.row_count > MAX_LIST_ROWS:
                columns = from_lists(*rows)
                rows = ColumnRows(columns, columns.column(1))
        order, bounds = self._sort(rows, explicit, keyless)
        if len(bounds) == 1:
            return None, self.to(rows, bounds[0][0], size)
        rows = rows.take(order)
        parts = ((partition, rows.slice(start, stop)) for partition, start, stop in bounds)
        return order, (
            pair
            for partition, part in parts
            for pair in self.to(part.measured() if isinstance(part, Rows) else part, partition)
        )

    def split_one(
        self, value: bytes | None, key: bytes | None, timestamp: int, headers: Any, explicit: Any
    ) -> tuple[int, EncodedBatch]:
        """Return the partition of one record, and its batch; ``explicit`` is as in `split`."""
        compression, partition = self.encoding.compression, explicit.get(0)
        if headers or compression != "none":
            rows = Rows([value], [key], timestamp, headers and [headers])
            (batch,) = encode_rows(rows, compression, self.encoding.limits)
        else:
            batch = encode_one(value, key, timestamp)
        if partition is None:
            if self.partitions == 1:
                return 0, batch
            if key is not None and not self._ignores_keys:
                return partition_for_key(key, self.partitions), batch
            partition = self._sticky_partition()
            self._sticky.added(batch.size, batch_closed=True)
        return partition, batch

    def to(self, rows: AnyRows, partition: int | None, size: int | None = None) -> Batches:
        """Yield the batches of rows for a partition, or for the sticky one if it is None."""
        for batch in rows.batches(self.encoding, size):
            yield self._sticky_partition() if partition is None else partition, batch
            if partition is None:
                self._sticky.added(batch.size, batch_closed=True)

    def _sticky_partition(self) -> int:
        queues, waiting = None, self._waiting
        if any(waiting.values()):
            queues = [len(waiting.get(number, ())) for number in range(self.partitions)]
        return self._sticky.choose(self.partitions, queues=queues, now=monotonic())

    def _sort(
        self, rows: AnyRows, explicit: Mapping[int, int], keyless: bool
    ) -> tuple[Any, list[tuple[int, int, int]]]:
        """Return the rows sorted by partition, and the partitions with their ``[start, stop)``."""
        count, partitions = rows.row_count, self.partitions
        keys = rows.keys
        if isinstance(rows, Rows) and count <= FEW_ROWS:
            try:
                few = [
                    -1 if keyless or key is None else partition_for_key(key, partitions)
                    for key in keys or [None] * count
                ]
            except TypeError as error:
                raise not_bytes(keys or ()) from error
            for row, partition in explicit.items():
                few[row] = partition
            if missing := few.count(-1):
                sticky = self._sticky_for(rows, missing)
                few = [sticky if partition < 0 else partition for partition in few]
            in_order = sorted(range(count), key=few.__getitem__)
            ranges, stop = [], 0
            for partition, group in groupby(in_order, key=few.__getitem__):
                start, stop = stop, stop + len(list(group))
                ranges.append((partition, start, stop))
            return in_order, ranges
        if keyless:
            keys = pa.nulls(count, pa.binary())
        elif isinstance(rows, Rows):
            keys = binary_array(keys, count, rows.lengths[1])
        # All keys at once.
        chosen = partitions_for_keys(keys, partitions)
        chosen = chosen.astype("int16" if partitions < 1 << 15 else "int32")
        if explicit:
            chosen[list(explicit)] = list(explicit.values())
        without = chosen < 0
        if without.any():
            chosen[without] = self._sticky_for(rows, int(without.sum()))
        order, bounds = sorted_by_partition(chosen)
        return order.tolist() if isinstance(rows, Rows) else order, bounds

    def _sticky_for(self, rows: AnyRows, count: int) -> int:
        """Return the sticky partition for ``count`` of the rows, which go there."""
        partition = self._sticky_partition()
        self._sticky.added(rows.size() * count // rows.row_count, batch_closed=True)
        return partition

    def split_all(
        self,
        parts: Iterable[AnyRows],
        partition: int | None,
        choose: Callable[[bytes | None], int] | None,
    ) -> Batches:
        """Yield the batches of rows; the iterator encodes each one as it yields it.

        Args:
            parts: The rows.
            partition: The partition of all of them; None to choose it by key.
            choose: Returns the partition for a key, if the program chooses it.
        """
        for rows in parts:
            if partition is not None:
                yield from self.to(rows, partition)
            else:
                keys = key_list(rows) if choose else ()
                explicit = {row: choose(key) for row, key in enumerate(keys)} if choose else {}
                yield from self.split(rows, explicit)[1]


def key_list(rows: AnyRows) -> Sequence[bytes | None]:
    """Return the key of each row."""
    if isinstance(rows, ColumnRows):
        keys: list[bytes | None] = rows.keys.to_pylist()
        return keys
    return [None] * len(rows.values) if rows.keys is None else rows.keys


# For writers that choose the partitions themselves


def batches_by_partition(
    rows: Any,
    partitions: Any,
    limits: BatchLimits,
    compression: str,
    text_statistics: frozenset[str] | None = frozenset(),
) -> Batches:
    """Yield rows as batches, each with its partition; rows of a partition keep their order.

    Args:
        rows: `ColumnRows`, or a `pyarrow.RecordBatch` with the columns of a topic of bytes.
        partitions: The partition of each row, as a numpy array; None if it is 0 for all.
        limits: Those of the topic.
        compression: ``none``, ``lz4`` or ``zstd``.
        text_statistics: As in `Encoding`.
    """
    if not isinstance(rows, ColumnRows):
        rows = ColumnRows(rows, rows.column(1))
    bytes_, typed = (limits.record_bytes(most) for most in (_BATCH_BYTES, DECODED_BYTES))
    encoding = Encoding(compression, limits, bytes_, bytes_, typed, text_statistics=text_statistics)
    order: Any = None
    bounds = [(0, 0, rows.row_count)]
    if partitions is not None:
        order, bounds = sorted_by_partition(partitions)
    for partition, start, stop in bounds:
        part = rows if len(bounds) == 1 else rows.take(order[start:stop])
        for batch in part.batches(encoding):
            yield partition, batch
