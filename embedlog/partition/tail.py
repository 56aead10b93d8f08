"""Where a partition ends: the one row in `live` that publishes."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from embedlog.kv import Txn
from embedlog.partition.producer_state import ProducerState

if TYPE_CHECKING:
    from embedlog.catalog import SegmentInfo

ROWS = b"E"
_ROW = struct.Struct(">QQQQQQQQIqqqqQqB")
ROW_BYTES = _ROW.size
pack = _ROW.pack
"""Return the fields of a tail as stored."""
_NO_TIME = -(1 << 63)
_TOLERATED_MS = 3_600_000
"""A clock may be set back by so much, as it is by a correction, and is still believed."""


class Tail(NamedTuple):
    """The end of a partition as every process sees it, at one instant.

    *Written* is where the next batch goes; *published* is how far anybody may
    read; they differ only while an append with ``durability="fsync"`` waits
    for its flush.  *Durable* is how far a power cut cannot reach.
    """

    segment_id: int
    base_offset: int
    log_end_offset: int
    log_end_position: int
    high_watermark: int
    high_watermark_position: int
    durable_offset: int
    start_offset: int
    leader_epoch: int
    max_timestamp: int = _NO_TIME
    """The largest timestamp in the active segment."""
    first_timestamp: int = _NO_TIME
    """The largest timestamp of its first batch: its age counts from there (A12)."""
    created_ms: int = 0
    appended_ms: int = 0
    """The time of the last append to the active segment; that of its creation while it is empty.

    0 is not known.  Negative is uncertain, because the clock went back by hours since it
    showed that time: see `next_append_time`."""
    unindexed: int = 0
    """Bytes since the last index entry (B1)."""
    flushed_ms: int = 0
    failed: bool = False
    """A flush failed: nobody may append until `repair` (P9)."""

    def pack(self) -> bytes:
        """Return the row as stored."""
        return pack(*self)

    @property
    def timestamp(self) -> int | None:
        """The largest timestamp of the active segment, if it has a batch."""
        return None if self.max_timestamp == _NO_TIME else self.max_timestamp

    @property
    def empty(self) -> bool:
        """Whether the active segment has no batch."""
        return self.log_end_offset == self.base_offset

    def has_made(self, info: SegmentInfo) -> bool:
        """Whether a segment's file is there: a roll names it, makes it, and moves the tail into it.

        One that is neither sealed nor the tail's is younger than this tail, or was
        named by a process that died before it made it.
        """
        return info.sealed or info.id == self.segment_id


class CachedTail(NamedTuple):
    """A tail row as of one version of `live`: while that stands, nobody moved the tail."""

    version: int
    row: bytes
    tail: Tail
    producers: dict[int, ProducerState]
    """Those whose rows are known as well; they only change with the tail's version."""


def next_append_time(before: int, now_ms: int) -> int:
    """Return the append time of a segment after an append at ``now_ms``.

    It never goes back.  If the clock shows much less than it did, it was wrong then or is
    wrong now, and which of the two is not known: then the time is uncertain, until the
    clock has passed it again.

    Args:
        before: The append time until now, as in `Tail.appended_ms`.
        now_ms: What the clock shows.
    """
    latest = abs(before)
    if now_ms >= latest:
        return now_ms
    return latest if latest - now_ms <= _TOLERATED_MS else -latest


def creation_time(now: Tail, now_ms: int) -> int:
    """Return when the segment after this tail's was created; 0 is not known.

    A clock that was doubted through a whole segment is believed from then on.
    """
    doubted = next_append_time(now.appended_ms, now_ms) < 0
    return 0 if doubted and now.created_ms else now_ms


def first_append_time(created_ms: int, before: int) -> int:
    """Return the append time of an empty segment, after one with the append time ``before``."""
    return created_ms or -abs(before)


def latest_append_time(times: Iterable[int]) -> int:
    """Return the append time of several segments together: uncertain if one of them is."""
    times = list(times)
    latest = max(map(abs, times))
    return latest if min(times) > 0 else -latest


def unpack(row: bytes) -> Tail:
    """Return a stored row."""
    return tuple.__new__(Tail, _ROW.unpack(row))  # as `_make`, which is in Python


def ends(txn: Txn, key: bytes, *, durable: bool = False) -> tuple[int, int] | None:
    """Return where the partition of a key starts and ends, if this boot knows it already.

    Args:
        txn: A transaction of `live`.
        key: The partition's.
        durable: Where it ends for those who see only what a power cut would leave.
    """
    row = txn.get(ROWS + key)
    if row is None:
        return None
    now = unpack(row)
    return now.start_offset, min(
        now.durable_offset, now.high_watermark
    ) if durable else now.high_watermark
