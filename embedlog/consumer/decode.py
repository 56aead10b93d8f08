"""From batches to what a consumer hands out: records, or Arrow columns.

No Python runs per record: a record is a tuple that `zip` fills from the
columns, and it is made when it is taken, not before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, repeat
from operator import length_hint
from typing import Any, NoReturn

import pyarrow as pa

from embedlog import batch as batches
from embedlog.batch import Batch
from embedlog.config import ConsumerConfig
from embedlog.errors import CorruptBatchError, RecordDeserializationError
from embedlog.record import Record, TopicPartition

COLUMNS = ("offset", "partition", "timestamp", "key", "value")
"""What a record batch of `Consumer.iter_batches` has, unless it is told otherwise."""

TOPIC = b"embedlog.topic"

_FIELDS = {
    "offset": pa.field("offset", pa.int64(), nullable=False),
    "partition": pa.field("partition", pa.int32(), nullable=False),
    **{field.name: field for field in batches.schema(headers=True)},
}


class _Tuple(tuple):  # type: ignore[type-arg]
    __slots__ = ()
    # In the class itself, Python takes tuple's C function for the constructor.
    __new__ = tuple.__new__


class _Row(_Tuple, Record):
    """A `Record` that is made of a tuple, in a quarter of the time `Record(...)` takes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(Record._make(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return Record, tuple(self)


class _NoHeaders(list[Any]):
    """The headers of all records without any: an empty list that refuses to become longer."""

    __slots__ = ()

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError("these headers are shared by all records without any; copy them first")

    append = extend = insert = __iadd__ = __setitem__ = __imul__ = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ()


_NO_HEADERS = _NoHeaders()


class Run:
    """The records of one batch on their way out.

    `records` may be taken from bit by bit, by whoever holds it; the run knows
    from what is left of it where the consumer is, so nobody counts records.
    """

    __slots__ = ("_left", "_offsets", "_values", "next_offset", "records")

    def __init__(
        self, columns: _Columns, where: TopicPartition, batch: Batch, next_offset: int
    ) -> None:
        self._offsets, self._values = columns.offsets, columns.values
        self._left = iter(columns.values)
        self.next_offset = next_offset
        """The position once all were taken."""
        kind = int(batch.is_log_append_time)
        self.records: Iterator[Record] = map(
            _Row,
            zip(
                repeat(where.topic),
                repeat(where.partition),
                self._offsets,
                columns.times,
                repeat(kind),
                columns.keys,
                self._left,
                repeat(_NO_HEADERS) if columns.headers is None else columns.headers,
                repeat(batch.leader_epoch),
            ),
        )

    @property
    def position(self) -> int:
        """The offset of the next record, or where the batch ends."""
        left = length_hint(self._left)
        return self._offsets[len(self._offsets) - left] if left else self.next_offset

    def before(self, stop: int | None) -> Iterator[Record]:
        """Return the records, or those below an offset."""
        if stop is None or stop >= self.next_offset:
            return self.records
        taken = len(self._offsets) - length_hint(self._left)
        return islice(self.records, bisect_left(self._offsets, stop) - taken)

    def withdraw(self) -> None:
        """End `records` for whoever still holds it."""
        self._offsets = self._offsets[len(self._offsets) :]
        self._values.clear()


class _Columns:
    """The rows of a batch from some row on, as lists."""

    __slots__ = ("headers", "keys", "offsets", "times", "values")

    def __init__(self, batch: Batch, position: int, verify: bool) -> None:
        self.times, self.keys, self.values, self.headers = batch.lists(verify)
        self.offsets: Sequence[int] = (
            batch.offsets().to_pylist()
            if batch.has_offsets
            else range(batch.base_offset, batch.next_offset)
        )
        row = bisect_left(self.offsets, position)
        if row:
            self.cut(slice(row, None))

    def cut(self, rows: slice) -> None:
        self.offsets, self.times = self.offsets[rows], self.times[rows]
        self.keys, self.values = self.keys[rows], self.values[rows]
        if self.headers is not None:
            self.headers = self.headers[rows]


class Decoder:
    """Decodes batches the way one consumer's settings say."""

    def __init__(self, config: ConsumerConfig) -> None:
        self._verify = config.check_crcs
        self._key, self._value = config.key_deserializer, config.value_deserializer
        self._schemas: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._partitions: dict[int, Any] = {}

    def run(self, batch: Batch, where: TopicPartition, position: int) -> Run:
        """Return the records of a batch from ``position`` on, up to one that cannot be decoded.

        Raises:
            CorruptBatchError: A column is not as written (E14).
            RecordDeserializationError: The first of them cannot be decoded (E10).
        """
        try:
            columns = _Columns(batch, position, self._verify)
        except CorruptBatchError as error:
            raise located(error, batch, where, position) from error
        if self._key is None and self._value is None:
            return Run(columns, where, batch, batch.next_offset)
        next_offset = self._deserialize(columns, where, batch.next_offset)
        return Run(columns, where, batch, next_offset)

    def _deserialize(self, columns: _Columns, where: TopicPartition, end: int) -> int:
        """Replace keys and values; cut off what comes after a failure, and return its offset."""
        keys, values = columns.keys, columns.values
        columns.keys, key_error = _apply(self._key, where.topic, keys)
        columns.values, value_error = _apply(self._value, where.topic, values)
        good = min(len(columns.keys), len(columns.values))
        if good == len(keys):
            return end
        if good == 0:
            error = key_error if not columns.keys else value_error
            raise RecordDeserializationError(
                f"a deserializer failed: {error!r}",
                topic=where.topic,
                partition=where.partition,
                offset=columns.offsets[0],
                key_bytes=keys[0],
                value_bytes=values[0],
                todo="seek past the record, or mend the deserializer",
            ) from error
        bad: int = columns.offsets[good]
        columns.cut(slice(good))
        return bad

    def arrow(
        self, batch: Batch, where: TopicPartition, rows: slice, chosen: tuple[str, ...]
    ) -> Any:
        """Return some rows of a batch as a `pyarrow.RecordBatch`, without copying them.

        Raises:
            CorruptBatchError: A column is not as written (E14).
        """
        stored = [name for name in chosen if name not in ("offset", "partition")]
        if not batch.has_headers and "headers" in stored:
            stored.remove("headers")
        have: dict[str, Any] = {}
        if stored:
            have.update(zip(stored, batch.columns(stored, self._verify).columns, strict=True))
        if "offset" in chosen:
            have["offset"] = batch.offsets()
        if "partition" in chosen:
            have["partition"] = self._constant(where.partition, batch.count)
        if "headers" in chosen and "headers" not in have:
            have["headers"] = pa.nulls(batch.count, _FIELDS["headers"].type)
        arrays = [have[name] for name in chosen]
        made = pa.RecordBatch.from_arrays(arrays, schema=self._schema(where.topic, chosen))
        if rows.start or rows.stop < batch.count:
            return made.slice(rows.start, rows.stop - rows.start)
        return made

    def _schema(self, topic: str, names: tuple[str, ...]) -> Any:
        found = self._schemas.get((topic, names))
        if found is None:
            fields = [_FIELDS[name] for name in names]
            found = self._schemas[topic, names] = pa.schema(fields, {TOPIC: topic.encode()})
        return found

    def _constant(self, partition: int, count: int) -> Any:
        """Return a column of one number; a slice of the longest that was needed so far."""
        column = self._partitions.get(partition)
        if column is None or len(column) < count:
            column = pa.repeat(pa.scalar(partition, pa.int32()), max(count, 1024))
            self._partitions[partition] = column
        return column.slice(0, count)


def check_columns(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the columns to hand out.

    Raises:
        ValueError: There is no such column.
    """
    chosen = COLUMNS if names is None else tuple(names)
    if unknown := [name for name in chosen if name not in _FIELDS]:
        raise ValueError(f"there is no column {unknown[0]!r}; there are {', '.join(_FIELDS)}")
    return chosen


def rows_between(batch: Batch, start: int, stop: int) -> slice:
    """Return the rows of the offsets ``[start, stop)``."""
    if not batch.has_offsets:
        base = batch.base_offset
        return slice(max(start - base, 0), min(stop - base, batch.count))
    if start <= batch.base_offset and stop >= batch.next_offset:
        return slice(0, batch.count)
    offsets = batch.offsets().to_pylist()
    return slice(bisect_left(offsets, start), bisect_left(offsets, stop))


def located(
    error: CorruptBatchError, batch: Batch, where: TopicPartition, position: int
) -> CorruptBatchError:
    """Return the error with the place a consumer knows, and how to go on."""
    place = {"topic": where.topic, "partition": where.partition, "offset": position}
    todo = f"seek to {batch.next_offset}, behind the batch, and run `embedlog verify`"
    facts = {**error.facts, **place, "next_offset": batch.next_offset}
    return CorruptBatchError(error.what, todo=todo, **facts)


def _apply(deserializer: Any, topic: str, items: list[Any]) -> tuple[list[Any], Exception | None]:
    """Deserialize up to the first failure, each item once; None stays None, as in Kafka."""
    if deserializer is None:
        return items, None
    method = getattr(deserializer, "deserialize", None)
    function: Callable[[Any], Any] = deserializer if method is None else partial(method, topic)
    done: list[Any] = []
    try:
        # extend keeps what came before a failure.
        if None in items:
            done.extend(None if item is None else function(item) for item in items)
        else:
            done.extend(map(function, items))
    except Exception as error:  # noqa: BLE001 - the program's own; its next poll raises it
        return done, error
    return done, None
