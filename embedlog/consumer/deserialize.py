"""Decodes batches to what a consumer returns: records or Arrow columns.

No Python code runs per record: a record is a tuple that `zip` fills from the columns at
the moment when it is taken from the iterator.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import islice, repeat
from operator import length_hint
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from embedlog import batch as batches
from embedlog.batch import Batch
from embedlog.batch.arrays import repeated
from embedlog.config import ConsumerConfig, TopicConfig
from embedlog.errors import (
    CorruptBatchError,
    EmbedlogError,
    RecordDeserializationError,
    UnknownTopicOrPartitionError,
)
from embedlog.hints import VERIFY, Hint
from embedlog.lazy import pa
from embedlog.record import Record, TopicPartition
from embedlog.registry import binder
from embedlog.root.root import Root
from embedlog.serializers import (
    Adapter,
    Bind,
    Field,
    adapt_for_topic,
    adapt_own,
    shortened,
)

if TYPE_CHECKING:
    from embedlog.schemas.reading import TypedReader
    from embedlog.schemas.row_filter import Where
    from embedlog.schemas.topic_schema import TopicSchema

COLUMNS = ("offset", "partition", "timestamp", "key", "value")
"""The default columns of `Consumer.iter_batches`."""

TOPIC = b"embedlog.topic"

_CACHED_ROWS = 8192
"""The rows of the cached offset and partition columns, which batches get slices of."""


@cache
def _fields() -> dict[str, Any]:
    """Return the columns that `Consumer.iter_batches` can return, by name."""
    return {
        "offset": pa.field("offset", pa.int64(), nullable=False),
        "partition": pa.field("partition", pa.int32(), nullable=False),
        **{field.name: field for field in batches.schema(headers=True)},
    }


class _Tuple(tuple):  # type: ignore[type-arg]
    __slots__ = ()
    # Set in the class itself, so that Python calls tuple's C constructor directly.
    __new__ = tuple.__new__


class TupleRecord(_Tuple, Record):
    """A `Record` made from a tuple, in a quarter of the time of `Record(...)`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(Record._make(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return Record, tuple(self)


class _NoHeaders(list[Any]):
    """The headers of all records without headers: an empty list that cannot be changed."""

    __slots__ = ()

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError("All records without headers share this list; copy it before changing it")

    append = extend = insert = __iadd__ = __setitem__ = __imul__ = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ()


NO_HEADERS = _NoHeaders()


class RecordRun:
    """The records of one batch that are being returned.

    The program may hold the iterator `records`; the position follows from how many values
    are left in it, so no code counts records.
    """

    __slots__ = ("_offsets", "_remaining", "_values", "next_offset", "records")

    def __init__(
        self, columns: RowLists, partition: TopicPartition, batch: Batch, next_offset: int
    ) -> None:
        self._offsets, self._values = columns.offsets, columns.values
        self._remaining = iter(columns.values)
        self.next_offset = next_offset
        """The position after the last record."""
        self.records: Iterator[Any] = self.make_records(columns, self._remaining, partition, batch)

    @staticmethod
    def make_records(
        columns: Any, values: Iterator[Any], partition: TopicPartition, batch: Batch
    ) -> Iterator[Any]:
        """Return an iterator that makes a record of each row when it is taken."""
        return map(
            TupleRecord,
            zip(
                repeat(partition.topic),
                repeat(partition.partition),
                columns.offsets,
                columns.times,
                repeat(int(batch.is_log_append_time)),
                columns.keys,
                values,
                repeat(NO_HEADERS) if columns.headers is None else columns.headers,
                repeat(batch.leader_epoch),
            ),
        )

    @property
    def left(self) -> int:
        """How many records were not taken yet."""
        return length_hint(self._remaining)

    @property
    def position(self) -> int:
        """The offset of the next record, or `next_offset`."""
        # Another thread, which asks for metrics, may do so during a recall.
        offsets, left = self._offsets, length_hint(self._remaining)
        return offsets[len(offsets) - left] if 0 < left <= len(offsets) else self.next_offset

    def records_before(self, stop: int | None) -> Iterator[Record]:
        """Return the records below an offset; None is no limit."""
        if stop is None or stop >= self.next_offset:
            return self.records
        taken = len(self._offsets) - length_hint(self._remaining)
        return islice(self.records, bisect_left(self._offsets, stop) - taken)

    def recall(self) -> None:
        """End `records`, also for a program that still holds it."""
        self._offsets = self._offsets[len(self._offsets) :]
        self._values.clear()


class RowLists:
    """The rows of a batch from a position on, as lists."""

    __slots__ = ("headers", "keys", "offsets", "times", "values")

    def __init__(
        self, batch: Batch, position: int, verify: bool, typed: TypedReader | None = None
    ) -> None:
        rows: Any = batch.lists(verify) if typed is None else typed.lists(batch, verify)
        self.times, self.keys, self.values, self.headers = rows
        self.offsets = batch_offsets(batch)
        row = bisect_left(self.offsets, position)
        if row:
            self.keep(slice(row, None))

    def keep(self, rows: slice) -> None:
        """Drop all other rows."""
        self.offsets, self.times = self.offsets[rows], self.times[rows]
        self.keys, self.values = self.keys[rows], self.values[rows]
        if self.headers is not None:
            self.headers = self.headers[rows]

    def part(self, rows: slice) -> RowLists:
        """Return a copy of some rows."""
        part = RowLists.__new__(RowLists)
        part.offsets, part.times = self.offsets[rows], self.times[rows]
        part.keys, part.values = self.keys[rows], self.values[rows]
        part.headers = None if self.headers is None else self.headers[rows]
        return part


class Deserializers(NamedTuple):
    """What deserializes the records of a topic; None for keys or values that stay bytes."""

    key: Adapter | None
    value: Adapter | None
    typed: TypedReader | None = None
    """What reads the records of a typed topic: ``value`` then gets a dict, and not bytes."""

    def apply(self, rows: RowLists, partition: TopicPartition) -> RecordDeserializationError | None:
        """Deserialize rows in place; drop them from a failure on, and return its error."""
        keys, values = rows.keys, rows.values
        rows.keys, rows.values, failure = self.convert(partition.topic, rows.headers, keys, values)
        if failure is None:
            return None
        row = failure.row
        error = failure.error(keys[row], values[row], partition, rows.offsets[row])
        rows.keep(slice(row))
        return error

    def convert(
        self, topic: str, headers: Sequence[Any] | None, keys: list[Any], values: list[Any]
    ) -> tuple[list[Any], list[Any], FailedRow | None]:
        """Deserialize keys and values up to the first row that fails."""
        new_keys, key_error = convert(self.key, topic, headers, keys)
        new_values, value_error = convert(self.value, topic, headers, values)
        row = min(len(new_keys), len(new_values))
        if row == len(keys):
            return new_keys, new_values, None
        if key_error is not None and row == len(new_keys):
            return new_keys, new_values[:row], FailedRow(row, "key", key_error)
        assert value_error is not None
        return new_keys[:row], new_values, FailedRow(row, "value", value_error)


class FailedRow(NamedTuple):
    """The first of some rows that cannot be deserialized."""

    row: int
    field: Field
    cause: Exception

    def error(
        self,
        key: bytes | None,
        value: bytes | None,
        partition: TopicPartition,
        offset: int,
    ) -> RecordDeserializationError:
        """Return the error that says so."""
        cause, todo = (
            self.cause,
            Hint(
                "Seek past the record, correct the deserializer, or read the record as bytes.",
                "Use --raw to export the stored bytes.",
            ),
        )
        reason = str(cause)
        if isinstance(cause, EmbedlogError):
            reason, todo = cause.what, cause.todo + todo if cause.todo else todo
        with_key = f" with the key {shortened(key)}" if key and self.field == "value" else ""
        error = RecordDeserializationError(
            f"The {self.field} of the record{with_key} cannot be deserialized: "
            f"{type(cause).__name__}: {reason}",
            topic=partition.topic,
            partition=partition.partition,
            offset=offset,
            field=self.field,
            key_bytes=key,
            value_bytes=value,
            todo=todo,
        )
        error.__cause__ = cause
        return error


RAW = Deserializers(None, None)
"""Keys and values stay bytes."""


def topic_deserializers(
    topic: str,
    config: TopicConfig,
    allow_pickle: bool,
    bind: Bind,
    key: Adapter | None = None,
    value: Adapter | None = None,
    schema: TopicSchema | None = None,
) -> Deserializers:
    """Return the deserializers for a topic: those that are passed, or else the topic's.

    For a typed topic, which has a ``schema``, only a program's own are used: the built-in ones
    are for bytes.

    Raises:
        InvalidConfigError: The topic's is pickle, which is not allowed.
    """
    if schema is not None:
        from embedlog.schemas.reading import TypedReader

        key, value = (None if own is None or own.name else own for own in (key, value))
        return Deserializers(key, value, TypedReader(schema))
    adapt = partial(
        adapt_for_topic, topic, action="deserialize", allow_pickle=allow_pickle, bind=bind
    )
    deserializers = Deserializers(
        adapt(key, config.key_serializer, field="key"),
        adapt(value, config.value_serializer, field="value"),
    )
    return RAW if deserializers == RAW else deserializers


class RecordDecoder:
    """Decodes batches according to the settings of a consumer, and of their topics.

    A subclass may return other tuples than `Record`: it sets the types of the rows and runs.
    """

    rows_type = RowLists
    run_type = RecordRun

    def __init__(self, config: ConsumerConfig, root: Root) -> None:
        self.verify = config.check_crcs
        self._root = root
        self._allow_pickle = config.allow_pickle or root.allow_pickle
        self._bind = binder(root)
        self._key = adapt_own(config.key_deserializer, "deserialize", "key")
        self._value = adapt_own(config.value_deserializer, "deserialize", "value")
        self._version = -1
        self._topics: dict[str, Deserializers] = {}
        """By topic, as of that version of the catalog."""

    def decode(
        self, batch: Batch, partition: TopicPartition, position: int, deserializers: Deserializers
    ) -> RecordRun:
        """Return the records of a batch from ``position`` on, up to one that cannot be decoded.

        Raises:
            CorruptBatchError: The checksum of a column does not match.
            RecordDeserializationError: The first record cannot be decoded.
        """
        try:
            rows = self.rows_type(batch, position, self.verify, deserializers.typed)
        except CorruptBatchError as error:
            raise locate_error(error, batch, partition, position) from error
        if deserializers is RAW:
            return self.run_type(rows, partition, batch, batch.next_offset)
        failure = deserializers.apply(rows, partition)
        if failure is None:
            return self.run_type(rows, partition, batch, batch.next_offset)
        if not rows.offsets:
            raise failure
        assert failure.offset is not None
        return self.run_type(rows, partition, batch, failure.offset)

    def deserialize(
        self, partition: TopicPartition, stored: Sequence[Record]
    ) -> Iterator[tuple[Record, Record, RecordDeserializationError | None]]:
        """Yield each record as it is stored, and deserialized, or why that fails."""
        deserializers = self.deserializers(partition.topic)
        if deserializers.key is None and deserializers.value is None:
            yield from ((record, record, None) for record in stored)
            return
        while stored:
            headers = [record.headers for record in stored]
            keys, values = [record.key for record in stored], [record.value for record in stored]
            new_keys, new_values, failed = deserializers.convert(
                partition.topic, headers, keys, values
            )
            for each, key, value in zip(stored, new_keys, new_values, strict=False):
                yield each, TupleRecord((*each[:5], key, value, *each[7:])), None
            if failed is None:
                return
            row = failed.row
            error = failed.error(keys[row], values[row], partition, stored[row].offset)
            yield stored[row], stored[row], error
            stored = stored[row + 1 :]

    def deserializers(self, topic: str) -> Deserializers:
        """Return the deserializers for a topic.

        Raises:
            InvalidConfigError: The topic is pickled, which is not allowed.
        """
        version = self._root.version()
        if version != self._version:
            self._topics, self._version = {}, version
        deserializers = self._topics.get(topic)
        if deserializers is None:
            try:
                info = self._root.topic(topic)
                config, schema = info.config, self._root.context.catalog.schema(info)
            except UnknownTopicOrPartitionError:
                config, schema = TopicConfig(), None  # deleted since the batch was fetched
            deserializers = self._topics[topic] = topic_deserializers(
                *(topic, config, self._allow_pickle, self._bind, self._key, self._value, schema)
            )
        return deserializers


class ColumnQuery(NamedTuple):
    """Which columns of which rows a program asked a consumer for."""

    names: tuple[str, ...] | None
    """None is all but the headers."""
    where: Where | None
    """Only rows for which this is true; None is all."""


class ArrowDecoder:
    """Decodes the batches of one partition to `pyarrow.RecordBatch` objects.

    The columns of offsets and of the partition number are slices of long cached arrays.
    """

    typed = None

    def __init__(self, partition: TopicPartition, query: ColumnQuery, verify: bool) -> None:
        from embedlog.schemas.row_filter import row_filter

        self._selected = names = check_columns(query.names)
        self._condition = None
        if query.where is not None:
            columns = pa.schema(_fields().values())
            self._condition = row_filter(query.where, columns, partition.topic)
            names = tuple(dict.fromkeys([*names, *self._condition.columns]))
        self.names, self._partition, self._verify = names, partition, verify
        self.query = query
        metadata = {TOPIC: partition.topic.encode()}
        self._schema = pa.schema([_fields()[name] for name in names], metadata)
        stored = tuple(name for name in names if name not in ("offset", "partition"))
        self._stored = tuple(name for name in stored if name != "headers"), stored
        self._default_order = names == ("offset", "partition", *stored)
        self._first_offset, self._offsets = 0, batches.offset_range(0, 0)
        self._partition_numbers = repeated(0, pa.int32(), 0)

    def decode(self, batch: Batch, rows: slice | None) -> Any:
        """Return some rows, or all; no stored data is copied.

        Raises:
            CorruptBatchError: The checksum of a column does not match.
        """
        stored = self._stored[batch.has_headers]
        columns = batch.columns(stored, self._verify).columns if stored else []
        if self._default_order and len(columns) + 2 == len(self.names):
            arrays = [self._offset_column(batch), self._partition_column(batch.count), *columns]
        else:
            by_name = dict(zip(stored, columns, strict=True))
            arrays = [self._column(name, by_name, batch) for name in self.names]
        decoded = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        if rows is not None:
            decoded = decoded.slice(rows.start, rows.stop - rows.start)
        if self._condition is None:
            return decoded
        return self._condition.keep(decoded).select(list(self._selected))

    def _column(self, name: str, by_name: dict[str, Any], batch: Batch) -> Any:
        if name == "offset":
            return self._offset_column(batch)
        if name == "partition":
            return self._partition_column(batch.count)
        if name not in by_name:
            return pa.nulls(batch.count, _fields()[name].type)
        return by_name[name]

    def _offset_column(self, batch: Batch) -> Any:
        if batch.has_offsets:
            return batch.offsets()
        base, count = batch.base_offset, batch.count
        first = base - self._first_offset
        if not 0 <= first <= len(self._offsets) - count:
            first, self._first_offset = 0, base
            self._offsets = batches.offset_range(base, base + max(count, _CACHED_ROWS))
        return self._offsets.slice(first, count)

    def _partition_column(self, count: int) -> Any:
        if len(self._partition_numbers) < count:
            number, length = self._partition.partition, max(count, _CACHED_ROWS)
            self._partition_numbers = repeated(number, pa.int32(), length)
        return self._partition_numbers.slice(0, count)


class TypedArrowDecoder:
    """Decodes the batches of one partition of a typed topic to `pyarrow.RecordBatch` objects.

    Args:
        partition: The partition.
        query: Which columns and rows.
        reader: What reads the topic.

    Raises:
        ValueError: A column does not exist.
    """

    def __init__(self, partition: TopicPartition, query: ColumnQuery, reader: TypedReader) -> None:
        from embedlog.schemas.row_filter import row_filter

        self.query, self.typed, self._partition = query, reader, partition
        try:
            schema = reader.select(query.names)
        except KeyError as error:
            raise ValueError(error.args[0]) from None
        self._schema = schema.with_metadata({TOPIC: partition.topic.encode()})
        self._condition, names = None, schema.names
        if query.where is not None:
            columns = pa.schema(reader.result.values())
            self._condition = row_filter(query.where, columns, partition.topic)
            names = list(dict.fromkeys([*names, *self._condition.columns]))
        self._read = reader.select(names)

    def decode(self, batch: Batch, rows: slice | None) -> Any:
        """Return some rows, or all, that the query asks for.

        Raises:
            CorruptBatchError: The checksum of a column that is read does not match.
        """
        first, last = (0, batch.count) if rows is None else (rows.start, rows.stop)
        table = self.typed.table([(batch, first, last)], self._partition.partition, self._read)
        if self._condition is not None:
            table = self._condition.keep(table)
        table = table.select(self._schema.names).combine_chunks()
        columns = [
            column.chunk(0) if column.num_chunks else pa.nulls(0, column.type)
            for column in table.columns
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def check_columns(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the columns to return.

    Raises:
        ValueError: A column does not exist.
    """
    columns = COLUMNS if names is None else tuple(names)
    if unknown := [name for name in columns if name not in _fields()]:
        raise ValueError(f"There is no column {unknown[0]!r}; use {', '.join(_fields())}")
    return columns


def batch_offsets(batch: Batch) -> Sequence[int]:
    """Return the offsets of a batch's records."""
    if batch.has_offsets:
        offsets: list[int] = batch.offsets().to_pylist()
        return offsets
    return range(batch.base_offset, batch.next_offset)


def locate_error(
    error: CorruptBatchError, batch: Batch, partition: TopicPartition, position: int
) -> CorruptBatchError:
    """Return the error with topic, partition and offset, and how to continue."""
    after = batch.next_offset
    facts = {**error.facts, **partition._asdict(), "offset": position, "next_offset": after}
    todo = f"Seek to {after}, after the batch." + VERIFY
    return CorruptBatchError(error.what, todo=todo, **facts)


def convert(
    deserializer: Adapter | None, topic: str, headers: Sequence[Any] | None, items: list[Any]
) -> tuple[list[Any], Exception | None]:
    """Deserialize each item once, up to the first failure, which is returned too."""
    if deserializer is None:
        return items, None
    results: list[Any] = []
    try:
        # After a failure, extend keeps the results before it.
        results.extend(deserializer.convert_all(topic, headers, items))
    except Exception as error:  # noqa: BLE001 - the program's own; its next poll raises it
        return results, error
    return results, None
