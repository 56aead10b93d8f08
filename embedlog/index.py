"""The sparse index: which batch to start reading at, by offset or by time.

It is derived: reads give the same answers with it whole, empty or missing,
only slower (B5), and it is rebuilt from the segments on any doubt.  Entries of
the active segment are rows in `live`; those of a sealed one are a single blob
in `state`, written once at the roll.  An entry stands for the batch that
begins at ``position``: its base offset, and the largest timestamp of all
batches before it in the segment, which makes a time lookup a bisection (B8).
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from embedlog import kv

_KEY = struct.Struct(">QQ")
_ROW = struct.Struct(">Qq")
_ENTRY = struct.Struct("<QQq")
_U64 = struct.Struct("<Q")
ROWS = b"I"


class IndexEntry(NamedTuple):
    """One indexed batch of a segment."""

    offset: int
    position: int
    timestamp_before: int
    """The largest timestamp of the batches before this one; a first batch has no entry."""


def put(txn: kv.Txn, key: bytes, segment_id: int, entry: IndexEntry) -> None:
    """Add an entry of the active segment; offsets only grow (B3)."""
    row = _ROW.pack(entry.position, entry.timestamp_before)
    txn.put(ROWS + key + _KEY.pack(segment_id, entry.offset), row)


def entries(txn: kv.Txn, key: bytes, segment_id: int) -> list[IndexEntry]:
    """Return the entries of the active segment, in offset order.

    A damaged row, whose length is wrong, is left out: reads are slower without it (B5, B7).
    """
    prefix = ROWS + key + _KEY.pack(segment_id, 0)[:8]
    return [
        IndexEntry(_KEY.unpack(row_key[-16:])[1], *_ROW.unpack(row))
        for row_key, row in kv.rows(txn, prefix)
        if len(row) == _ROW.size and len(row_key) == len(prefix) + 8
    ]


def remove(txn: kv.Txn, key: bytes, segment_id: int | None = None) -> None:
    """Forget a segment's entries, or those of the whole partition."""
    number = b"" if segment_id is None else _KEY.pack(segment_id, 0)[:8]
    kv.remove(txn, ROWS + key + number)


def pack(found: Iterable[IndexEntry]) -> bytes:
    """Return the entries of a segment as the blob that is kept at the roll."""
    return b"".join(_ENTRY.pack(*entry) for entry in found)


def unpack(blob: bytes) -> list[IndexEntry]:
    """Return the entries of a sealed segment; a blob of odd length counts as empty (B7)."""
    whole = len(blob) // _ENTRY.size * _ENTRY.size
    return [IndexEntry(*fields) for fields in _ENTRY.iter_unpack(blob[:whole])]


class SealedIndex(Sequence[IndexEntry]):
    """A blob as a sequence: a bisection looks at a few entries, of many thousands."""

    def __init__(self, blob: bytes) -> None:
        self._blob = blob

    def __len__(self) -> int:
        return len(self._blob) // _ENTRY.size

    def __getitem__(self, place: Any) -> Any:
        return IndexEntry._make(
            _ENTRY.unpack_from(self._blob, range(len(self))[place] * _ENTRY.size)
        )

    def offset(self, place: int) -> int:
        """Return one entry's offset: a bisection asks for nothing else, a dozen times."""
        offset: int = _U64.unpack_from(self._blob, place * _ENTRY.size)[0]
        return offset


def position_of_offset(found: Sequence[IndexEntry], offset: int) -> int | None:
    """Return where the last indexed batch at or below ``offset`` begins (B2)."""
    if isinstance(found, SealedIndex):
        place = bisect_right(range(len(found)), offset, key=found.offset)
    else:
        place = bisect_right(found, offset, key=_offset)
    return found[place - 1].position if place else None


def position_from_offset(found: Sequence[IndexEntry], offset: int) -> int | None:
    """Return where the first indexed batch at or past ``offset`` begins."""
    place = bisect_left(found, offset, key=_offset)
    return found[place].position if place < len(found) else None


def position_of_time(found: Sequence[IndexEntry], timestamp: int) -> int | None:
    """Return a position before which every record is older than ``timestamp`` (B9)."""
    place = bisect_left(found, timestamp, key=_timestamp_before)
    return found[place - 1].position if place else None


def active_position_of_offset(txn: kv.Txn, key: bytes, segment_id: int, offset: int) -> int | None:
    """As `position_of_offset`, in the rows of the active segment, by one seek."""
    prefix = ROWS + key + _KEY.pack(segment_id, 0)[:8]
    with txn.cursor() as cursor:
        found = cursor.set_range(ROWS + key + _KEY.pack(segment_id, offset + 1))
        found = cursor.prev() if found else cursor.last()
        if not found or not cursor.key().startswith(prefix):
            return None
        return _position(cursor.value())


def active_position_from_offset(
    txn: kv.Txn, key: bytes, segment_id: int, offset: int
) -> int | None:
    """As `position_from_offset`, in the rows of the active segment, by one seek."""
    prefix = ROWS + key + _KEY.pack(segment_id, 0)[:8]
    with txn.cursor() as cursor:
        found = cursor.set_range(ROWS + key + _KEY.pack(segment_id, offset))
        if not found or not cursor.key().startswith(prefix):
            return None
        return _position(cursor.value())


def _position(row: bytes) -> int | None:
    """Return the position in a row; None if that is damaged, as if there were no entry."""
    return _ROW.unpack(row)[0] if len(row) == _ROW.size else None


def _offset(entry: IndexEntry) -> int:
    return entry.offset


def _timestamp_before(entry: IndexEntry) -> int:
    return entry.timestamp_before
