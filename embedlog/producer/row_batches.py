"""Makes batches of a fitting size from lists and tables, without touching single records."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from embedlog.batch import BatchLimits, EncodedBatch, encode, encode_lists, schema
from embedlog.batch.arrays import number, repeated
from embedlog.batch.encode import Lengths, lengths_of, not_bytes, row_ends
from embedlog.batch.wire import headers_type, timestamp_type
from embedlog.errors import SerializationError
from embedlog.lazy import pa

ROW_BYTES = 16
"""What a record takes besides key and value: its timestamp, and two Arrow offsets.

``buffer_memory`` counts the same.
"""

DECODED_BYTES = 4 << 20
"""How large the columns of a batch of a typed topic are without a ``batch_size``, before its
compression."""
CHUNK_BYTES = 16 << 20
"""Lists are handled in chunks of this size: memory stays small, and Arrow's int32 large enough."""


class ArrowStream(Protocol):
    """A table that speaks Arrow: of pyarrow, pandas, Polars, DuckDB and others."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> object:
        """Return the batches as a PyCapsule."""


class ArrowArray(Protocol):
    """A batch of rows that speaks Arrow."""

    def __arrow_c_array__(self, requested_schema: Any = None) -> object:
        """Return the columns as PyCapsules."""


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

    def measured(self) -> Rows:
        """Return the rows with their lengths, which both splitting and encoding need."""
        value_lengths, key_lengths = self.lengths
        if self.keys is not None:
            key_lengths = key_lengths or lengths_of(self.keys)
        return self._replace(lengths=(value_lengths or lengths_of(self.values), key_lengths))

    def slice(self, start: int, stop: int) -> Rows:
        """Return the rows ``[start, stop)``."""
        if start == 0 and stop == len(self.values):
            return self
        pick, (value_lengths, key_lengths) = itemgetter(slice(start, stop)), self.lengths
        lengths = (
            None if value_lengths is None else pick(value_lengths),
            None if key_lengths is None else pick(key_lengths),
        )
        return self._picked(pick, lengths)

    def take(self, indices: Sequence[int]) -> Rows:
        """Return the rows at ``indices``, in that order."""
        count, (value_lengths, key_lengths) = len(indices), self.lengths
        lengths = _lengths_of_any(value_lengths, count), _lengths_of_any(key_lengths, count)
        # In C, several times as fast as a comprehension; but with one index it returns no tuple.
        pick = itemgetter(*indices) if count > 1 else lambda items: [items[row] for row in indices]
        return self._picked(pick, lengths)

    def _picked(self, pick: Callable[[Any], Any], lengths: tuple[Lengths, Lengths]) -> Rows:
        values, keys, timestamps, headers, _ = self
        return Rows(
            pick(values),
            None if keys is None else pick(keys),
            timestamps if isinstance(timestamps, int) else pick(timestamps),
            None if headers is None else pick(headers),
            lengths,
        )


def _lengths_of_any(lengths: Lengths, count: int) -> Lengths:
    """Return the lengths of any ``count`` of the items, if all items have one length."""
    return lengths[:count] if lengths and _all_equal(lengths) else None


def _all_equal(lengths: list[int]) -> bool:
    # Items often have one length; counting takes a tenth of the time of adding up.
    return lengths.count(lengths[0]) == len(lengths)


def size_of(rows: Rows) -> int:
    """Return about how many bytes rows will take."""
    count = len(rows.values)
    sizes = (size * count if isinstance(size, int) else sum(size) for size in _lengths(rows))
    return ROW_BYTES * count + sum(sizes)


def _lengths(rows: Rows) -> list[int | list[int]]:
    """Return the lengths of the values, and of the keys if there are any; an int if all are equal.

    Items of other types may have a length: the encoder refuses them.
    """
    all_lengths: list[int | list[int]] = []
    for items, lengths in zip((rows.values, rows.keys), rows.lengths, strict=True):
        if items is None:
            continue
        if lengths is None:
            try:
                lengths = [0 if item is None else len(item) for item in items]
            except TypeError as error:
                raise not_bytes(items) from error
        all_lengths.append(lengths[0] if lengths and _all_equal(lengths) else lengths)
    return all_lengths


def chunks(rows: Rows, limit: int, size: int | None) -> Iterator[Rows]:
    """Split rows of ``size`` bytes into chunks of at most ``limit`` bytes, but at least one row."""
    count = len(rows.values)
    if (size_of(rows) if size is None else size) <= limit:
        yield rows
        return
    ends = row_ends(count, ROW_BYTES, _lengths(rows))
    start = used = 0
    while start < count:
        stop = max(int(ends.searchsorted(used + limit, "right")), start + 1)
        yield rows.slice(start, stop)
        start, used = stop, int(ends[stop - 1])


def slice_bounds(columns: Any, limit: int) -> Iterator[tuple[int, int]]:
    """Split columns as `chunks` does, and yield (start, stop).

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


def encode_rows(rows: Rows, compression: str, limits: BatchLimits) -> list[EncodedBatch]:
    """Encode rows as one batch, or as several if one would be over the limits."""
    values, keys, timestamps, headers, lengths = rows
    encoded = encode_lists(values, keys, timestamps, headers, compression, lengths)
    if encoded.count == 1 or limits.accepts(encoded):
        return [encoded]
    half = encoded.count // 2
    first, second = rows.slice(0, half), rows.slice(half, encoded.count)
    return encode_rows(first, compression, limits) + encode_rows(second, compression, limits)


def encode_columns(
    columns: Any, compression: str, limits: BatchLimits, timestamps: tuple[int, int] | None = None
) -> Iterator[EncodedBatch]:
    """Encode columns as `encode_rows` does; ``timestamps`` are the extremes, if known."""
    return limits.split(columns, lambda part: encode(part, compression, timestamps=timestamps))


# Tables


class TableRows(NamedTuple):
    """A table in the schema of a batch, and the timestamp of all rows if it had no timestamps."""

    table: Any
    timestamp: int | None


def table_rows(
    table: Any, key: str | None, value: str | None, timestamp: str | None, now_ms: int
) -> TableRows:
    """Return the columns of a table in the types and order of a batch.

    Text becomes its UTF-8 bytes, without a copy where Arrow's layout is the same.

    Args:
        table: A `pyarrow.Table`.
        key, value, timestamp: Names of columns; None means the default name, if the table has it.
        now_ms: The timestamp of rows without one.

    Raises:
        SerializationError: A column has another type, or there are no values.
    """
    rows = table.num_rows
    times = _column(table, "timestamp", timestamp, timestamp_type())
    keys = _column(table, "key", key, pa.binary())
    values = _column(table, "value", value, pa.binary())
    if values is None:
        raise SerializationError(
            f"There is no column value, only {', '.join(table.column_names)}",
            todo="Name the column: append_table(..., value='…').",
        )
    one_time = now_ms if times is None else None
    if times is None:
        times = repeated(now_ms, timestamp_type(), rows)
    elif times.null_count:
        times = times.fill_null(number(now_ms, timestamp_type()))
    columns = [times, pa.nulls(rows, pa.binary()) if keys is None else keys, values]
    headers = _column(table, "headers", None, headers_type())
    if headers is not None:
        columns.append(headers)
    return TableRows(pa.table(columns, schema=schema(headers=headers is not None)), one_time)


def arrow_table(source: Any, topic: str) -> Any:
    """Return a `pyarrow.Table` of anything that is a table for Arrow.

    Raises:
        SerializationError: It is none, or has values for which Arrow has no type.
    """
    if isinstance(source, pa.Table):
        return source
    if hasattr(source, "__arrow_c_stream__") or hasattr(source, "__arrow_c_array__"):
        try:
            return pa.table(source)
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            raise _no_arrow_type(source, error, topic) from error
    raise SerializationError(
        f"A {type(source).__name__} is not a table",
        todo="Pass a pyarrow Table or RecordBatch, or a pandas or Polars DataFrame.",
    )


def _no_arrow_type(source: Any, error: Exception, topic: str) -> SerializationError:
    """Return the error of a frame that Arrow cannot convert; of pandas, with column and row."""
    what = f"Arrow cannot convert the {type(source).__name__}"
    facts: dict[str, Any] = {}
    for name, column in source.items() if hasattr(source, "items") else ():
        row = bisect_left(range(len(column)), True, key=partial(_fails, column))
        if row < len(column):
            what = f"Arrow has no type for row {row} of column {name} with the rows before it"
            facts = {"column": str(name), "row": row}
            break
    return SerializationError(
        f"{what}: {error.args[0] if isinstance(error, pa.ArrowException) else error}",
        topic=topic,
        todo="Convert the column to one type that Arrow has.",
        **facts,
    )


def _fails(column: Any, row: int) -> bool:
    """Return whether Arrow cannot convert the rows of a pandas Series up to one of them."""
    try:
        pa.array(column.iloc[: row + 1], from_pandas=True)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return True
    return False


def check_columns(table: Any, *names: str | None) -> None:
    """Raise a `SerializationError` if a table has no column of a name; None is no name."""
    for name in names:
        if name is not None and name not in table.column_names:
            raise SerializationError(
                f"There is no column {name}, only {', '.join(table.column_names)}"
            )


def _column(table: Any, default: str, name: str | None, target: Any) -> Any:
    """Return a column as type ``target``; None if it is not named and there is no default one."""
    name_or_default = default if name is None else name
    if name_or_default in table.column_names:
        return _cast(table.column(name_or_default), target, name_or_default)
    return None


def _cast(column: Any, target: Any, name: str) -> Any:
    from embedlog.schemas.conform import decoded

    types, column_type = pa.types, column.type
    if column_type == target:
        return column
    try:
        column = decoded(column)
        column_type = column.type
        if target == pa.binary():
            if types.is_large_string(column_type):
                column = column.cast(pa.string())
            elif not (
                types.is_string(column_type)
                or "binary" in str(column_type)
                or types.is_null(column_type)
            ):
                raise SerializationError(
                    f"Column {name} must be binary or text, got {column_type}",
                    todo="Cast it first.",
                )
        if types.is_integer(column_type):
            column = column.cast(pa.int64())
        # Nanoseconds are truncated to milliseconds, the unit of a record's timestamp.
        return column.cast(target, safe=not types.is_temporal(column_type))
    except pa.ArrowException as error:
        raise SerializationError(f"Column {name} is {column_type}: {error}") from error
