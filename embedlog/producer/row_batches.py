"""From tables and lists to batches of a fitting size, without touching single records."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import pyarrow as pa

from embedlog import batch
from embedlog.batch import (
    TIMESTAMP,
    BatchLimits,
    EncodedBatch,
    Lengths,
    encode,
    encode_lists,
    lengths_of,
)
from embedlog.batch.arrays import number, repeated
from embedlog.errors import SerializationError

ROW_BYTES = 16
"""What a record takes besides key and value: its timestamp, and two Arrow offsets."""

PIECE_BYTES = 16 << 20
"""Work on lists in pieces of this size, so that memory stays small and Arrow's int32 large."""


class Rows(NamedTuple):
    """Records as lists; ``keys`` and ``headers`` may be absent, one time may be for all."""

    values: Sequence[bytes | None]
    keys: Sequence[bytes | None] | None
    timestamps: Sequence[int] | int
    headers: Sequence[Any] | None = None
    lengths: tuple[Lengths, Lengths] = (None, None)
    """Of values and keys; None if not measured, or if an item has none."""

    def measured(self) -> Rows:
        """Return them with their lengths, which both the splitting and the encoding need."""
        values, keys, times, headers, (of_values, of_keys) = self
        if keys is not None:
            of_keys = of_keys or lengths_of(keys)
        return Rows(values, keys, times, headers, (of_values or lengths_of(values), of_keys))

    def slice(self, start: int, stop: int) -> Rows:
        """Return some of them."""
        if start == 0 and stop == len(self.values):
            return self
        times = self.timestamps
        return Rows(
            self.values[start:stop],
            None if self.keys is None else self.keys[start:stop],
            times if isinstance(times, int) else times[start:stop],
            None if self.headers is None else self.headers[start:stop],
            (_part(self.lengths[0], start, stop), _part(self.lengths[1], start, stop)),
        )

    def pick(self, order: Sequence[int]) -> Rows:
        """Return them in another order, or some of them."""
        picked, times = _picker(order), self.timestamps
        return Rows(
            picked(self.values),
            None if self.keys is None else picked(self.keys),
            times if isinstance(times, int) else picked(times),
            None if self.headers is None else picked(self.headers),
            (_alike(self.lengths[0], len(order)), _alike(self.lengths[1], len(order))),
        )

    def columns(self) -> Any:
        """Return them as an Arrow record batch."""
        return batch.from_lists(*self)

    def key_column(self) -> Any:
        """Return the keys as an Arrow array."""
        return batch.binary_array(self.keys, len(self.values), self.lengths[1])


def _part(lengths: Lengths, start: int, stop: int) -> Lengths:
    return None if lengths is None else lengths[start:stop]


def _alike(lengths: Lengths, count: int) -> Lengths:
    """Return the lengths of any so many of the items, if that is easily told."""
    return lengths[:count] if lengths and _even(lengths) else None


def _even(lengths: list[int]) -> bool:
    # Often the items are of one length; to count takes a tenth of the time to add up.
    return lengths.count(lengths[0]) == len(lengths)


def _picker(order: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    # In C, several times as fast as a comprehension; but of one index it makes no tuple.
    if len(order) > 1:
        return itemgetter(*order)
    return lambda items: [items[row] for row in order]


def size_of(rows: Rows) -> int:
    """Return about how many bytes rows will take."""
    values, keys = rows.lengths
    return ROW_BYTES * len(rows.values) + _sum(rows.values, values) + _sum(rows.keys, keys)


def _sum(items: Sequence[Any] | None, lengths: Lengths) -> int:
    if items is None:
        return 0
    if lengths and _even(lengths):
        return lengths[0] * len(lengths)
    return sum(_lengths(items, lengths))


def _lengths(items: Sequence[Any], lengths: Lengths) -> list[int]:
    if lengths is not None:
        return lengths
    try:
        return [0 if item is None else len(item) for item in items]
    except TypeError as error:
        # What has a length is told by the encoder, which looks at the types.
        kind = next(type(one).__name__ for one in items if one is not None and not _sized(one))
        raise SerializationError(
            f"a key or a value is bytes or None, not {kind}",
            todo="serialize it, or give a data frame to append_table",
        ) from error


def _sized(item: object) -> bool:
    return hasattr(item, "__len__")


def pieces(rows: Rows, limit: int, size: int | None = None) -> Iterator[Rows]:
    """Split rows so that each piece has at most ``limit`` bytes, but at least one row."""
    count = len(rows.values)
    if (size_of(rows) if size is None else size) <= limit:
        yield rows
        return
    each = [
        lengths[0] if lengths and _even(lengths) else _lengths(items, lengths)
        for items, lengths in zip((rows.values, rows.keys), rows.lengths, strict=True)
        if items is not None
    ]
    ends = batch.row_ends(count, ROW_BYTES, each)
    start = used = 0
    while start < count:
        stop = max(int(ends.searchsorted(used + limit, "right")), start + 1)
        yield rows.slice(start, stop)
        start, used = stop, int(ends[stop - 1])


def cuts(columns: Any, limit: int) -> Iterator[tuple[int, int]]:
    """Split columns likewise; yield (start, stop).  Reads Arrow's offsets, copies nothing."""
    rows = columns.num_rows
    keys, values = _ends(columns.column(1)), _ends(columns.column(2))

    def used(row: int) -> int:
        ends: int = keys[row] + values[row]
        return ends + ROW_BYTES * row

    start = step = 0
    while start < rows:
        top, stop = used(start) + limit, start + step
        # Rows are often of one size: then the last step fits again.
        if not start < stop < rows or not used(stop) <= top < used(stop + 1):
            candidates = range(start + 1, min(rows, start + limit // ROW_BYTES) + 1)
            stop = start + max(bisect_right(candidates, top, key=used), 1)
        yield start, stop
        start, step = stop, stop - start


def _ends(array: Any) -> Any:
    """Return where the items of a binary column end, as Arrow keeps it."""
    offsets = array.buffers()[1]
    return memoryview(offsets).cast("i")[array.offset : array.offset + len(array) + 1]


def encode_rows(rows: Rows, compression: str, limits: BatchLimits) -> list[EncodedBatch]:
    """Encode rows as one batch; as more, if one would be over the limits (G13)."""
    values, keys, timestamps, headers, lengths = rows
    one = encode_lists(values, keys, timestamps, headers, compression, lengths)
    if one.count == 1 or limits.takes(one):
        return [one]
    first, second = rows.slice(0, one.count // 2), rows.slice(one.count // 2, one.count)
    return encode_rows(first, compression, limits) + encode_rows(second, compression, limits)


def encode_columns(
    columns: Any,
    compression: str,
    limits: BatchLimits,
    timestamps: tuple[int, int] | None = None,
) -> Iterator[EncodedBatch]:
    """Encode columns likewise; ``timestamps`` are the smallest and largest, if known."""
    one = encode(columns, compression, timestamps=timestamps)
    if one.count == 1 or limits.takes(one):
        yield one
        return
    half = one.count // 2
    yield from encode_columns(columns.slice(0, half), compression, limits, timestamps)
    yield from encode_columns(columns.slice(half), compression, limits, timestamps)


# Tables


class TableRows(NamedTuple):
    """A table in the columns of a topic, and the one time of all rows if they have none."""

    table: Any
    now: int | None


def source_of(
    given: Any, key: str | None, value: str | None, timestamp: str | None, now: int
) -> TableRows:
    """Return a table's columns in the types and order of a batch.

    Text becomes its UTF-8 bytes, without a copy where Arrow lays it out alike.

    Raises:
        SerializationError: No table, no such column, or a column of another type.
    """
    table = _table(given)
    rows = table.num_rows
    columns = [
        _times(table, timestamp, now),
        _binary(table, "key", key),
        _binary(table, "value", value),
    ]
    if columns[1] is None:
        columns[1] = pa.nulls(rows, pa.binary())
    if columns[2] is None:
        raise SerializationError(
            f"no column is called value; there are {', '.join(table.column_names)}",
            todo="Name one: append_table(..., value='…')",
        )
    own_time = columns[0] is not None
    if not own_time:
        columns[0] = repeated(now, TIMESTAMP, rows)
    headers = "headers" in table.column_names
    schema = batch.schema(headers=headers)
    if headers:
        columns.append(_cast(table.column("headers"), schema.field("headers").type, "headers"))
    return TableRows(pa.table(columns, schema=schema), None if own_time else now)


def _table(given: Any) -> Any:
    if isinstance(given, pa.Table):
        return given
    if isinstance(given, pa.RecordBatchReader):
        return given.read_all()
    if isinstance(given, pa.RecordBatch):
        return pa.Table.from_batches([given])
    if hasattr(given, "__arrow_c_stream__") or hasattr(given, "__arrow_c_array__"):
        return pa.table(given)
    raise SerializationError(
        f"a {type(given).__name__} is no table",
        todo="give a pyarrow Table or RecordBatch, or a pandas or Polars DataFrame",
    )


def _column(table: Any, usual: str, name: str | None) -> Any:
    wanted = usual if name is None else name
    if wanted in table.column_names:
        return table.column(wanted)
    if name is None:
        return None
    raise SerializationError(
        f"no column is called {name}; there are {', '.join(table.column_names)}"
    )


def _binary(table: Any, usual: str, name: str | None) -> Any:
    column = _column(table, usual, name)
    return None if column is None else _cast(column, pa.binary(), name or usual)


def _times(table: Any, name: str | None, now: int) -> Any:
    column = _column(table, "timestamp", name)
    if column is None:
        return None
    if pa.types.is_integer(column.type):
        column = column.cast(pa.int64())
    column = _cast(column, TIMESTAMP, name or "timestamp")
    return column.fill_null(number(now, TIMESTAMP)) if column.null_count else column


def _cast(column: Any, wanted: Any, name: str) -> Any:
    kind = column.type
    if kind == wanted:
        return column
    types = pa.types
    if wanted == pa.binary():
        if types.is_dictionary(kind):
            return _cast(column.cast(kind.value_type), wanted, name)
        if types.is_string_view(kind) or types.is_large_string(kind):
            column = column.cast(pa.string())
        elif not (types.is_string(kind) or "binary" in str(kind) or types.is_null(kind)):
            raise SerializationError(
                f"column {name} is {kind}, not binary or text", todo="Cast it first"
            )
    try:
        # Nanoseconds are cut to milliseconds: that is what a record's time has.
        return column.cast(wanted, safe=not types.is_temporal(kind))
    except pa.ArrowException as error:
        raise SerializationError(f"column {name} is {kind}: {error}") from error
