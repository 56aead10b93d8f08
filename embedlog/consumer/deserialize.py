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
from embedlog.batch.arrays import repeated
from embedlog.config import ConsumerConfig
from embedlog.errors import CorruptBatchError, RecordDeserializationError
from embedlog.record import Record, TopicPartition

COLUMNS = ("offset", "partition", "timestamp", "key", "value")
"""What a record batch of `Consumer.iter_batches` has, unless it is told otherwise."""

TOPIC = b"embedlog.topic"

_LONG = 8192
"""Rows of a column that is cut into many."""

_FIELDS = {
    "offset": pa.field("offset", pa.int64(), nullable=False),
    "partition": pa.field("partition", pa.int32(), nullable=False),
    **{field.name: field for field in batches.schema(headers=True)},
}


class _Tuple(tuple):  # type: ignore[type-arg]
    __slots__ = ()
    # In the class itself, Python takes tuple's C function for the constructor.
    __new__ = tuple.__new__


class TupleRecord(_Tuple, Record):
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


class RecordRun:
    """The records of one batch on their way out.

    `records` may be taken from bit by bit, by whoever holds it; the run knows
    from what is left of it where the consumer is, so nobody counts records.
    """

    __slots__ = ("_left", "_offsets", "_values", "next_offset", "records")

    def __init__(
        self, columns: RowLists, where: TopicPartition, batch: Batch, next_offset: int
    ) -> None:
        self._offsets, self._values = columns.offsets, columns.values
        self._left = iter(columns.values)
        self.next_offset = next_offset
        """The position once all were taken."""
        kind = int(batch.is_log_append_time)
        self.records: Iterator[Record] = map(
            TupleRecord,
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


class RowLists:
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


class RecordDecoder:
    """Decodes batches the way one consumer's settings say."""

    def __init__(self, config: ConsumerConfig) -> None:
        self._verify = config.check_crcs
        self._key, self._value = config.key_deserializer, config.value_deserializer

    def run(self, batch: Batch, where: TopicPartition, position: int) -> RecordRun:
        """Return the records of a batch from ``position`` on, up to one that cannot be decoded.

        Raises:
            CorruptBatchError: A column is not as written (E14).
            RecordDeserializationError: The first of them cannot be decoded (E10).
        """
        try:
            columns = RowLists(batch, position, self._verify)
        except CorruptBatchError as error:
            raise located(error, batch, where, position) from error
        if self._key is None and self._value is None:
            return RecordRun(columns, where, batch, batch.next_offset)
        next_offset = self._deserialize(columns, where, batch.next_offset)
        return RecordRun(columns, where, batch, next_offset)

    def _deserialize(self, columns: RowLists, where: TopicPartition, end: int) -> int:
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

    def table(self, where: TopicPartition, names: tuple[str, ...]) -> ArrowDecoder:
        """Return what makes Arrow columns of the batches of one partition."""
        return ArrowDecoder(where, names, self._verify)


class ArrowDecoder:
    """Makes Arrow record batches of the stored batches of one partition.

    The columns of offsets and of the partition's number are slices of long
    ones, made once for many batches.
    """

    def __init__(self, where: TopicPartition, names: tuple[str, ...], verify: bool) -> None:
        self.names, self._where, self._verify = names, where, verify
        self._schema = pa.schema([_FIELDS[name] for name in names], {TOPIC: where.topic.encode()})
        stored = tuple(name for name in names if name not in ("offset", "partition"))
        self._stored = tuple(name for name in stored if name != "headers"), stored
        self._usual = names == ("offset", "partition", *stored)
        self._start, self._offsets = 0, batches.offset_range(0, 0)
        self._constant = repeated(0, pa.int32(), 0)

    def rows(self, batch: Batch, rows: slice | None) -> Any:
        """Return some rows as a `pyarrow.RecordBatch`, or all; nothing stored is copied.

        Raises:
            CorruptBatchError: A column is not as written (E14).
        """
        stored = self._stored[batch.has_headers]
        found = batch.columns(stored, self._verify).columns if stored else []
        if self._usual and len(found) + 2 == len(self.names):
            arrays = [self._offsets_of(batch), self._numbers(batch.count), *found]
        else:
            have = dict(zip(stored, found, strict=True))
            arrays = [self._column(name, have, batch) for name in self.names]
        made = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        return made if rows is None else made.slice(rows.start, rows.stop - rows.start)

    def _column(self, name: str, have: dict[str, Any], batch: Batch) -> Any:
        if name == "offset":
            return self._offsets_of(batch)
        if name == "partition":
            return self._numbers(batch.count)
        if name not in have:
            return pa.nulls(batch.count, _FIELDS[name].type)
        return have[name]

    def _offsets_of(self, batch: Batch) -> Any:
        if batch.has_offsets:
            return batch.offsets()
        base, count = batch.base_offset, batch.count
        first = base - self._start
        if not 0 <= first <= len(self._offsets) - count:
            first, self._start = 0, base
            self._offsets = batches.offset_range(base, base + max(count, _LONG))
        return self._offsets.slice(first, count)

    def _numbers(self, count: int) -> Any:
        if len(self._constant) < count:
            long = max(count, _LONG)
            self._constant = repeated(self._where.partition, pa.int32(), long)
        return self._constant.slice(0, count)


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
    """Return the rows of the offsets ``[start, stop)``, which are not all it has."""
    if not batch.has_offsets:
        base = batch.base_offset
        return slice(max(start - base, 0), min(stop - base, batch.count))
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
