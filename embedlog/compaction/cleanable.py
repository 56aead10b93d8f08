"""Which part of a partition can be compacted, and which partitions are due."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from typing import NamedTuple

from embedlog import keyspace
from embedlog.catalog import SegmentInfo
from embedlog.config import LONG_MAX
from embedlog.errors import EmbedlogError, StorageError
from embedlog.partition import PartitionLog, leases
from embedlog.partition.leases import LeaseHold


class CleanableRange(NamedTuple):
    """A partition as compaction sees it.

    Offsets ``[start, first_dirty)`` are clean, the rest is dirty.  Of the dirty part,
    ``[first_dirty, first_uncleanable)`` can be cleaned now: never the active segment,
    nor what a lease holds.
    """

    log: PartitionLog
    segments: list[SegmentInfo]
    """The segments that can be rewritten: clean ones, then cleanable ones."""
    start: int
    first_dirty: int
    first_uncleanable: int
    clean_bytes: int
    cleanable_bytes: int
    too_young_bytes: int
    """Bytes of dirty segments held back by ``min.compaction.lag.ms``."""
    overdue: bool
    """Whether a dirty record is older than ``max.compaction.lag.ms``."""
    lease: LeaseHold | None
    """The lease with the lowest offset; segments from its offset on are not rewritten."""
    leader_epoch: int
    """A truncation raises it and invalidates this object."""

    @property
    def cleanable_ratio(self) -> float:
        """The cleanable bytes as a fraction of the clean and cleanable ones."""
        total = self.clean_bytes + self.cleanable_bytes
        return self.cleanable_bytes / total if total else 0.0

    @property
    def due(self) -> bool:
        """Whether the partition should be cleaned."""
        if not self.log.config.compacts or not self.cleanable_bytes:
            return False
        return self.overdue or self.cleanable_ratio > self.log.config.min_cleanable_dirty_ratio


def inspect(log: PartitionLog, now_ms: int) -> CleanableRange:
    """Return the range of a partition that can be compacted now; reads no records.

    Raises:
        CorruptionError: The manifest, or the beginning of a dirty segment, is damaged.
    """
    start, tail = log.start_offset(), log.tail()
    sealed = [
        segment
        for segment in log.segments.values()
        if segment.next_offset is not None and start < segment.next_offset <= tail.high_watermark
    ]
    checkpoint = log.context.state.read(lambda txn: keyspace.CLEANED_OFFSETS.get(txn, log.key))
    if checkpoint is None or not start <= checkpoint <= tail.log_end_offset:
        checkpoint = start  # It is missing or invalid (D1).
    first_dirty = min(checkpoint, (sealed[-1].next_offset if sealed else None) or start)
    dirty = [segment for segment in sealed if (segment.next_offset or 0) > first_dirty]
    lease = leases.held_from(log)
    held_from = LONG_MAX if lease is None else lease.offset
    old_enough = _before_young(dirty, now_ms - log.config.min_compaction_lag_ms, log)
    cleanable = [segment for segment in old_enough if (segment.next_offset or 0) <= held_from]
    end = (cleanable[-1].next_offset if cleanable else None) or first_dirty
    return CleanableRange(
        log,
        [segment for segment in sealed if (segment.next_offset or 0) <= min(end, held_from)],
        start,
        first_dirty,
        end,
        sum(segment.size for segment in sealed[: len(sealed) - len(dirty)]),
        sum(segment.size for segment in cleanable),
        sum(segment.size for segment in dirty[len(old_enough) :]),
        _is_overdue(log, dirty, now_ms),
        lease,
        tail.leader_epoch,
    )


def _before_young(
    dirty: list[SegmentInfo], max_timestamp: int, log: PartitionLog
) -> list[SegmentInfo]:
    """Return the dirty segments before the first one with a younger record."""
    if not log.config.min_compaction_lag_ms:
        return dirty

    def is_old(segment: SegmentInfo) -> bool:
        return segment.max_timestamp is None or segment.max_timestamp <= max_timestamp

    return list(takewhile(is_old, dirty))


def _is_overdue(log: PartitionLog, dirty: list[SegmentInfo], now_ms: int) -> bool:
    """Whether the first batch of a dirty segment is older than ``max.compaction.lag.ms``."""
    max_lag_ms = log.config.max_compaction_lag_ms
    if max_lag_ms == LONG_MAX:
        return False
    for segment in dirty:
        try:
            file = log.open_segment(segment)
        except StorageError as error:
            if not error.missing:
                raise
            continue  # The segment was replaced meanwhile.
        batches = file.scan(file.start, segment.end_position)
        first = next((batch for batch in batches if batch.count), None)
        if first is not None and first.min_timestamp < now_ms - max_lag_ms:
            return True
    return False


def select_due(
    logs: Iterable[PartitionLog], now_ms: int, failed: dict[PartitionLog, EmbedlogError]
) -> list[CleanableRange]:
    """Return the partitions to clean, in the order to clean them.

    Overdue ones come first, so that a busy partition cannot starve them; then those with
    the highest cleanable ratio.

    Args:
        logs: The partitions; those of topics that are not compacted are skipped.
        now_ms: The time.
        failed: Partitions to skip; those that cannot be inspected are added.
    """
    due = []
    for log in logs:
        if log in failed:
            continue
        try:
            log.refresh()
            if log.config.compacts and (cleanable := inspect(log, now_ms)).due:
                due.append(cleanable)
        except EmbedlogError as error:
            failed[log] = error
    return sorted(due, key=lambda cleanable: (not cleanable.overdue, -cleanable.cleanable_ratio))


def explain(log: PartitionLog, now_ms: int) -> str:
    """Say in words whether compaction will clean a partition, and why or why not."""
    log.refresh()
    name, config = f"{log.topic}-{log.partition}", log.config
    if not config.compacts:
        return f"{name}: not compacted: cleanup.policy is {config.cleanup_policy!r}."
    cleanable = inspect(log, now_ms)
    cleaned_or_cleanable = cleanable.clean_bytes + cleanable.cleanable_bytes
    rest = max(log.size_bytes() - cleaned_or_cleanable, cleanable.too_young_bytes, 0)
    return (
        f"{name}: {_verdict(cleanable)} "
        f"Offsets [{cleanable.start}, {cleanable.first_dirty}) are clean "
        f"({cleanable.clean_bytes:,} bytes), up to {cleanable.first_uncleanable} can be cleaned "
        f"({cleanable.cleanable_bytes:,} bytes), up to {log.end_offset()} cannot yet "
        f"({rest:,} bytes)."
    )


def _verdict(cleanable: CleanableRange) -> str:
    config = cleanable.log.config
    ratio = (
        f"{cleanable.cleanable_ratio:.0%} of its bytes are dirty, {{}} than "
        f"min.cleanable.dirty.ratio {config.min_cleanable_dirty_ratio:.0%}."
    )
    if cleanable.overdue and cleanable.due:
        return "will be compacted: a record is older than max.compaction.lag.ms."
    if cleanable.due:
        return f"will be compacted: {ratio.format('more')}"
    if cleanable.cleanable_bytes:
        return f"waits: {ratio.format('not more')}"
    lease = cleanable.lease
    if lease is not None and lease.offset < cleanable.log.segments.keys()[-1]:
        return f"waits: {lease}, from offset {lease.offset} on."
    if cleanable.too_young_bytes:
        return (
            f"waits: its dirty segments have records that are younger than "
            f"min.compaction.lag.ms {config.min_compaction_lag_ms}."
        )
    if cleanable.log.end_offset() > cleanable.first_dirty:
        return (
            "waits: all dirty records are in the active segment, which is never compacted; "
            f"it is rolled at segment.bytes {config.segment_bytes} or "
            f"segment.ms {config.segment_ms}, or when a compaction is forced."
        )
    return "nothing to do: everything is compacted."
