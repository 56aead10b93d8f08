"""Several batches as one Arrow table, with each row's offset and partition before its columns.

Made for a few megabytes of batches at once: to add two columns batch by batch
takes twice as long as to check and decode all the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from embedlog.batch.arrays import number, repeated
from embedlog.batch.decode import Batch, offset_range

Rows = tuple[Batch, int, int]
"""A batch, and which of its rows are meant: ``[first, last)``."""

OFFSET, PARTITION = "offset", "partition"


def table(found: Sequence[Rows], partition: int, schema: Any) -> Any:
    """Return the rows of batches of one segment as a `pyarrow.Table`; nothing is copied.

    Checks and decodes the columns of ``schema`` and no others.  A column that
    the segment does not have is null.

    Raises:
        CorruptBatchError: A batch is not as written.
    """
    count = sum(last - first for _, first, last in found)
    stored = set(found[0][0].schema.names)
    names = [name for name in schema.names if name in stored and name not in (OFFSET, PARTITION)]
    columns: dict[str, Any] = {}
    if names:
        columns = dict(zip(names, _stored(found, names).columns, strict=True))
    arrays = []
    for field in schema:
        if field.name == OFFSET:
            arrays.append(pa.chunked_array(_offsets(found), pa.int64()))
        elif field.name == PARTITION:
            arrays.append(pa.chunked_array([_constant(partition, count)], pa.int32()))
        elif field.name in columns:
            arrays.append(columns[field.name])
        else:
            arrays.append(pa.chunked_array([pa.nulls(count, field.type)], field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def covered(found: Sequence[Batch], start: int, stop: int) -> list[Rows]:
    """Return batches that lie in ``[start, stop)``, each with the rows of it that do."""
    if start <= found[0].base_offset and found[-1].next_offset <= stop:
        return [(one, 0, one.count) for one in found if one.count]
    rows = [(one, *_rows(one, start, stop)) for one in found if one.base_offset < stop]
    return [row for row in rows if row[1] < row[2]]


def _rows(batch: Batch, start: int, stop: int) -> tuple[int, int]:
    """Return which rows of a batch lie in a range."""
    if not batch.has_offsets:
        return max(start - batch.base_offset, 0), min(stop - batch.base_offset, batch.count)
    offsets = batch.offsets()
    edges = number(start, pa.int64()), number(stop, pa.int64())
    below = [pc.sum(pc.less(offsets, edge)).as_py() or 0 for edge in edges]
    return below[0], below[1]


def _stored(found: Sequence[Rows], names: list[str]) -> Any:
    decoded = []
    for batch, first, last in found:
        columns = batch.columns(names)
        whole = last - first == batch.count
        decoded.append(columns if whole else columns.slice(first, last - first))
    return pa.Table.from_batches(decoded)


def _offsets(found: Sequence[Rows]) -> list[Any]:
    """Return the rows' offsets: in one piece where they have no gaps, else a piece a batch."""
    dense = all(one.next_offset == two.base_offset for (one, _, _), (two, _, _) in pairwise(found))
    if dense and not any(batch.has_offsets for batch, _, _ in found):
        (begin, first, _), (end, _, last) = found[0], found[-1]
        return [offset_range(begin.base_offset + first, end.base_offset + last)]
    return [batch.offsets().slice(first, last - first) for batch, first, last in found]


def _constant(value: int, count: int) -> Any:
    return _constants(value, 1 << (count - 1).bit_length()).slice(0, count)


@lru_cache(maxsize=8)
def _constants(value: int, count: int) -> Any:
    """The same memory again and again: it was written once and is in the cache."""
    return repeated(value, pa.int32(), count)
