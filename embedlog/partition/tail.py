"""Where a partition ends: the one row in `live` that publishes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from embedlog import keyspace
from embedlog.kv import Store, Txn
from embedlog.partition.producer_state import ProducerState

if TYPE_CHECKING:
    from embedlog.catalog import SegmentInfo

pack = keyspace.TAILS.value_layout.head.pack
"""Returns the row for the fields of a tail."""
NO_TIME = -(1 << 63)
"""The timestamp of a segment without records: below every other."""
_TOLERATED_MS = 3_600_000
"""A clock that goes back by at most this much, as in a correction, is still trusted."""


class Tail(NamedTuple):
    """The end of a partition as every process sees it, at one instant.

    *Written* is where the next batch goes; *published* is how far readers may
    read; they differ only while an append with ``durability="fsync"`` waits
    for its flush.  What is *durable* survives a power cut.
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
    max_timestamp: int = NO_TIME
    """The largest timestamp in the active segment."""
    first_timestamp: int = NO_TIME
    """The largest timestamp of its first batch: its age counts from there."""
    created_ms: int = 0
    appended_ms: int = 0
    """The time of the last append to the active segment; that of its creation while it is empty.

    0 if unknown.  Negative if uncertain, because the clock has gone back by hours since it
    showed that time: see `next_append_time`."""
    unindexed: int = 0
    """Bytes since the last index entry."""
    flushed_ms: int = 0
    failed: bool = False
    """A flush failed: no process may append until `repair`."""

    def pack(self) -> bytes:
        """Return its row."""
        return pack(*self)

    @property
    def timestamp(self) -> int | None:
        """The largest timestamp of the active segment, if it has a batch."""
        return None if self.max_timestamp == NO_TIME else self.max_timestamp

    @property
    def empty(self) -> bool:
        """Whether the active segment has no batch."""
        return self.log_end_offset == self.base_offset

    def with_flush(self, current: Tail) -> Tail:
        """Return this tail with what ``current`` has of a flush or a move of the start.

        These change the row without the partition's lock.  ``current`` is the row that this
        tail replaces.
        """
        position = self.high_watermark_position
        if self.segment_id == current.segment_id:
            position = max(position, current.high_watermark_position)
        return self._replace(
            high_watermark=max(self.high_watermark, current.high_watermark),
            high_watermark_position=position,
            durable_offset=max(self.durable_offset, current.durable_offset),
            start_offset=max(self.start_offset, current.start_offset),
            flushed_ms=max(self.flushed_ms, current.flushed_ms),
            failed=current.failed,
        )

    def has_made(self, info: SegmentInfo) -> bool:
        """Whether a segment's file exists: a roll names it, creates it, and moves the tail into it.

        A segment that is neither sealed nor the tail's is newer than this tail, or was
        named by a process that died before it created the file.
        """
        return info.sealed or info.id == self.segment_id


TAILS = keyspace.TAILS.typed(Tail)
unpack = TAILS.unpack


class Unflushed(NamedTuple):
    """From where on a partition has transactions that wait for a checkpoint.

    No other flush makes anything durable, or visible, from there on (`partition/checkpoint.py`).
    """

    offset: int
    position: int


UNFLUSHED = keyspace.UNFLUSHED.typed(Unflushed)


def peek_tail(txn: Txn | Store, key: bytes) -> Tail | None:
    """Return the tail of a partition as `live` has it: no recovery, no lock.

    Args:
        txn: A transaction of `live`, or `live`.
        key: The partition's.

    Returns:
        The tail; None if the partition was not recovered in this boot yet.
    """
    row = txn.get(TAILS.key(key))
    return None if row is None else unpack(row)


class CachedTail(NamedTuple):
    """A tail row as of one version of `live`: as long as that is current, the tail is too."""

    version: int
    row: bytes
    tail: Tail
    producers: dict[int, ProducerState]
    """Producers whose rows were read as well; they only change with the tail's version."""


def next_append_time(before: int, now_ms: int) -> int:
    """Return the append time of a segment after an append at ``now_ms``.

    It never goes back.  If the clock shows much less than before, it was wrong then or is
    wrong now: the time is uncertain until the clock has passed it again.

    Args:
        before: The append time until now, as in `Tail.appended_ms`.
        now_ms: What the clock shows.
    """
    latest = abs(before)
    if now_ms >= latest:
        return now_ms
    return latest if latest - now_ms <= _TOLERATED_MS else -latest


def creation_time(tail: Tail, now_ms: int) -> int:
    """Return when the segment after this tail's was created; 0 if unknown.

    A clock that was in doubt for a whole segment is trusted from then on.
    """
    doubted = next_append_time(tail.appended_ms, now_ms) < 0
    return 0 if doubted and tail.created_ms else now_ms


def first_append_time(created_ms: int, before: int) -> int:
    """Return the append time of an empty segment, after one with the append time ``before``."""
    return created_ms or -abs(before)


def latest_append_time(times: Iterable[int]) -> int:
    """Return the append time of several segments together: uncertain if one of them is."""
    times = list(times)
    latest = max(map(abs, times))
    return latest if min(times) > 0 else -latest


def ends(txn: Txn, key: bytes, *, durable: bool = False) -> tuple[int, int] | None:
    """Return where a partition starts and ends; None if it was not recovered in this boot yet.

    Args:
        txn: A transaction of `live`.
        key: The partition's.
        durable: Return the end that survives a power cut, for readers that see no more.
    """
    tail = peek_tail(txn, key)
    return None if tail is None else ends_of(tail, durable=durable)


def ends_of(tail: Tail | None, *, durable: bool = False) -> tuple[int, int]:
    """Return where a partition starts and ends by its tail; (0, 0) without one."""
    if tail is None:
        return 0, 0
    end = min(tail.durable_offset, tail.high_watermark) if durable else tail.high_watermark
    return tail.start_offset, end
