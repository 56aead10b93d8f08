"""Several batches as one Arrow table, with the offset and partition of each row.

For a few megabytes of batches at once: adding two columns batch by batch takes twice as long as
checking and decoding all the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

from embedlog.batch.arrays import number, repeated
from embedlog.batch.decode import Batch, offset_range
from embedlog.batch.decode_run import BatchRun
from embedlog.lazy import pa, pc

BatchRows = tuple[Batch, int, int]
"""A batch, and which of its rows: ``[first, last)``."""
PieceRows = tuple[Batch | BatchRun, int, int]
"""A batch or a run of batches, and which of its rows."""

_Batch = TypeVar("_Batch", bound=Batch | BatchRun)

OFFSET, PARTITION = "offset", "partition"
_GROUP_BATCHES, _GROUP_BYTES = 4, 512 << 10


def combined(batches: Iterable[Any], max_rows: int, max_bytes: int) -> Iterator[Any]:
    """Yield record batches in order, as tables of about so many rows or bytes."""
    pending: list[Any] = []
    rows = size = 0
    for batch in batches:
        pending.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= max_rows or size >= max_bytes:
            yield pa.Table.from_batches(pending)
            pending, rows, size = [], 0, 0
    if pending:
        yield pa.Table.from_batches(pending)


def table(batches: Sequence[PieceRows], partition: int, schema: Any) -> Any:
    """Return the rows of batches of one segment as a `pyarrow.Table`; nothing is copied.

    Checks and decodes only the columns of ``schema``.  A column that the segment does not have
    is null.

    Raises:
        CorruptBatchError: A batch is not as written.
    """
    stored = set(batches[0][0].schema.names)
    names = [name for name in schema.names if name in stored and name not in (OFFSET, PARTITION)]
    columns: dict[str, Any] = {}
    if names:
        parts = []
        for batch, first, last in batches:
            part = batch.columns(names)
            parts.append(part if last - first == batch.count else part.slice(first, last - first))
        columns = dict(zip(names, pa.Table.from_batches(parts).columns, strict=True))
    return with_positions(batches, partition, schema, columns)


def in_groups(batches: Sequence[BatchRows]) -> Iterator[Sequence[BatchRows]]:
    """Yield batches to decode together: all, or a few small ones if they are compressed.

    Compressed batches may be a hundred times larger when decoded.
    """
    if not any(batch.is_compressed for batch, _, _ in batches):
        yield batches
        return
    group: list[BatchRows] = []
    size = 0
    for rows in batches:
        if len(group) == _GROUP_BATCHES or (group and size + rows[0].size > _GROUP_BYTES):
            yield group
            group, size = [], 0
        group.append(rows)
        size += rows[0].size
    yield group


def with_positions(
    batches: Sequence[PieceRows], partition: int, schema: Any, columns: Mapping[str, Any]
) -> Any:
    """Return columns as a `pyarrow.Table` with the offset and the partition of each row.

    Args:
        batches: Where the rows come from.
        partition: The number of the partition.
        schema: The columns of the table; those that are missing are null.
        columns: The others, by name.
    """
    count = sum(last - first for _, first, last in batches)
    arrays = []
    for field in schema:
        if field.name == OFFSET:
            arrays.append(pa.chunked_array(_offsets(batches), pa.int64()))
        elif field.name == PARTITION:
            partitions = _constants(partition, 1 << (count - 1).bit_length()).slice(0, count)
            arrays.append(pa.chunked_array([partitions], pa.int32()))
        elif field.name in columns:
            arrays.append(columns[field.name])
        else:
            arrays.append(pa.chunked_array([pa.nulls(count, field.type)], field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def rows_in_range(
    batches: Sequence[_Batch], start: int, stop: int
) -> list[tuple[_Batch, int, int]]:
    """Return the batches that have rows in ``[start, stop)``, each with those rows."""
    if start <= batches[0].base_offset and batches[-1].next_offset <= stop:
        return [(batch, 0, batch.count) for batch in batches if batch.count]
    rows = [(batch, *_rows(batch, start, stop)) for batch in batches if batch.base_offset < stop]
    return [(batch, first, last) for batch, first, last in rows if first < last]


def _rows(batch: Batch | BatchRun, start: int, stop: int) -> tuple[int, int]:
    """Return the rows ``[first, last)`` of a batch whose offsets are in ``[start, stop)``."""
    if not batch.has_offsets:
        return max(start - batch.base_offset, 0), min(stop - batch.base_offset, batch.count)
    offsets = batch.offsets()
    bounds = number(start, pa.int64()), number(stop, pa.int64())
    below = [pc.sum(pc.less(offsets, bound)).as_py() or 0 for bound in bounds]
    return below[0], below[1]


def _offsets(batches: Sequence[PieceRows]) -> list[Any]:
    """Return the offsets of the rows: one array if they have no gaps, else one per batch."""
    dense = not any(batch.has_offsets for batch, _, _ in batches) and all(
        # Of a typed topic the rows of tombstones are left out, also at the ends of a batch.
        a.base_offset + last == b.base_offset + first
        for (a, _, last), (b, first, _) in pairwise(batches)
    )
    if dense:
        (begin, first, _), (end, _, last) = batches[0], batches[-1]
        return [offset_range(begin.base_offset + first, end.base_offset + last)]
    return [batch.offsets().slice(first, last - first) for batch, first, last in batches]


@lru_cache(maxsize=8)
def _constants(value: int, count: int) -> Any:
    """Return the same memory at each call: it was written once and is in the CPU's cache."""
    return repeated(value, pa.int32(), count)
