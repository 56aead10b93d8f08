"""The sparse index: at which batch to start reading, by offset or by time.

It is derived: reads give the same answers whether it is complete, empty or missing,
only slower, and on any doubt it is rebuilt from the segments.  Entries of the
active segment are rows in `live`; those of a sealed one are a single value in `state`,
written once at the roll.  An entry stands for the batch that begins at ``position``:
its base offset, and the largest timestamp of all batches before it in the segment,
which makes a lookup by time a bisection.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from embedlog import keyspace, kv

_ENTRY = struct.Struct("<QQq")
_OFFSET = struct.Struct("<Q")
_ENTRIES = keyspace.INDEX_ENTRIES
_ROW = _ENTRIES.value_layout.head


class IndexEntry(NamedTuple):
    """One indexed batch of a segment."""

    offset: int
    position: int
    timestamp_before: int
    """The largest timestamp of the batches before this one; a first batch has no entry."""


def put(txn: kv.Txn, key: bytes, segment_id: int, entry: IndexEntry) -> None:
    """Add an entry of the active segment; offsets only grow."""
    _ENTRIES.put(txn, key, segment_id, entry.offset, value=entry[1:])


def entries(txn: kv.Txn, key: bytes, segment_id: int) -> list[IndexEntry]:
    """Return the entries of the active segment, in offset order.

    Leaves out damaged rows: reads are slower without them.
    """
    rows = _ENTRIES.scan_valid(txn, key, segment_id)
    return [IndexEntry(offset, *fields) for (_, _, offset), fields in rows]


def remove(txn: kv.Txn, key: bytes, segment_id: int | None = None) -> None:
    """Delete the entries of a segment, or those of the whole partition."""
    _ENTRIES.delete_all(txn, key, *([] if segment_id is None else [segment_id]))


def pack(index: Iterable[IndexEntry]) -> bytes:
    """Return the entries of a segment as one value, which is written at the roll."""
    return b"".join(_ENTRY.pack(*entry) for entry in index)


def unpack(blob: bytes) -> list[IndexEntry]:
    """Return the entries of a sealed segment, without what remains of one that was truncated."""
    whole = len(blob) // _ENTRY.size * _ENTRY.size
    return [IndexEntry(*fields) for fields in _ENTRY.iter_unpack(blob[:whole])]


class SealedIndex(Sequence[IndexEntry]):
    """A packed index as a sequence: a bisection looks at a few entries of many thousands."""

    def __init__(self, blob: bytes) -> None:
        self._blob = blob

    def __len__(self) -> int:
        return len(self._blob) // _ENTRY.size

    def __getitem__(self, position: Any) -> Any:
        start = range(len(self))[position] * _ENTRY.size
        return IndexEntry._make(_ENTRY.unpack_from(self._blob, start))

    def offset(self, position: int) -> int:
        """Return the offset of an entry: a bisection reads a dozen of them, and nothing else."""
        offset: int = _OFFSET.unpack_from(self._blob, position * _ENTRY.size)[0]
        return offset


def position_of_offset(index: Sequence[IndexEntry], offset: int) -> int | None:
    """Return where the last indexed batch at or below ``offset`` begins."""
    if isinstance(index, SealedIndex):
        after = bisect_right(range(len(index)), offset, key=index.offset)
    else:
        after = bisect_right(index, offset, key=attrgetter("offset"))
    return index[after - 1].position if after else None


def position_from_offset(index: Sequence[IndexEntry], offset: int) -> int | None:
    """Return where the first indexed batch at or past ``offset`` begins."""
    after = bisect_left(index, offset, key=attrgetter("offset"))
    return index[after].position if after < len(index) else None


def position_of_time(index: Sequence[IndexEntry], timestamp: int) -> int | None:
    """Return a position before which every record is older than ``timestamp``."""
    after = bisect_left(index, timestamp, key=attrgetter("timestamp_before"))
    return index[after - 1].position if after else None


def active_position_of_offset(txn: kv.Txn, key: bytes, segment_id: int, offset: int) -> int | None:
    """As `position_of_offset`, in the rows of the active segment, by one seek."""
    with txn.cursor() as cursor:
        has_row = cursor.set_range(_ENTRIES.key(key, segment_id, offset + 1))
        has_row = cursor.prev() if has_row else cursor.last()
        if not has_row or not cursor.key().startswith(_ENTRIES.prefix(key, segment_id)):
            return None
        return _position(cursor.value())


def active_position_from_offset(
    txn: kv.Txn, key: bytes, segment_id: int, offset: int
) -> int | None:
    """As `position_from_offset`, in the rows of the active segment, by one seek."""
    rows = kv.rows(txn, _ENTRIES.prefix(key, segment_id), _ENTRIES.key(key, segment_id, offset))
    return next((_position(row) for _, row in rows), None)


def active_position_of_time(txn: kv.Txn, key: bytes, segment_id: int, timestamp: int) -> int | None:
    """As `position_of_time`, in the rows of the active segment; it unpacks few of them."""
    rows = [row for _, row in kv.rows(txn, _ENTRIES.prefix(key, segment_id))]
    rows = [row for row in rows if len(row) == _ROW.size]
    number = bisect_left(rows, timestamp, key=lambda row: _ROW.unpack(row)[1])
    return _position(rows[number - 1]) if number else None


def _position(row: bytes) -> int | None:
    """Return the position in a row; None if that is damaged, as if there were no entry."""
    return _ROW.unpack(row)[0] if len(row) == _ROW.size else None
