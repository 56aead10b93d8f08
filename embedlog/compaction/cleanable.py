"""Which part of a partition can be compacted, and which partition is next (D1-D6, D14)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from embedlog import keyspace
from embedlog.catalog import SegmentInfo
from embedlog.config import LONG_MAX
from embedlog.errors import EmbedlogError, StorageError
from embedlog.partition import PartitionLog, leases
from embedlog.partition.leases import LeaseHold


class CleanableRange(NamedTuple):
    """What compaction sees of a partition: ``[start, first_dirty)`` clean, then the dirty part.

    Of that ``[first_dirty, first_uncleanable)`` can be cleaned now; the active
    segment never is, nor what a lease holds.
    """

    log: PartitionLog
    segments: list[SegmentInfo]
    """Those that can be rewritten: clean ones, then those that can be cleaned."""
    start: int
    first_dirty: int
    first_uncleanable: int
    clean_bytes: int
    cleanable_bytes: int
    lagging: int
    """Dirty bytes that are younger than ``min.compaction.lag.ms``."""
    overdue: bool
    """A dirty record is older than ``max.compaction.lag.ms``."""
    lease: LeaseHold | None
    """Whose segments are left alone, from its offset on."""
    leader_epoch: int
    """A cut raises it: what was found of the log before is not to be believed then."""

    @property
    def ratio(self) -> float:
        """Cleanable bytes, as a share of them and the clean ones (D3)."""
        total = self.clean_bytes + self.cleanable_bytes
        return self.cleanable_bytes / total if total else 0.0

    @property
    def due(self) -> bool:
        """Whether the partition wants to be cleaned (D3, D5)."""
        if not self.log.config.compacts or not self.cleanable_bytes:
            return False
        return self.overdue or self.ratio > self.log.config.min_cleanable_dirty_ratio


def inspect(log: PartitionLog, now_ms: int) -> CleanableRange:
    """Return what could be compacted of a partition at a time; reads no records.

    Raises:
        CorruptionError: The manifest, or the beginning of a dirty segment, is damaged.
    """
    start, now = log.start_offset(), log.tail()
    sealed = [
        info
        for info in log.segments.values()
        if info.next_offset is not None and start < info.next_offset <= now.high_watermark
    ]
    stop = max((info.next_offset or 0 for info in sealed), default=start)
    first_dirty = _first_dirty(log, start, stop, now.log_end_offset)
    dirty = [info for info in sealed if (info.next_offset or 0) > first_dirty]
    lease = leases.held_from(log)
    most = LONG_MAX if lease is None else lease.offset
    ripe = _ripe(dirty, now_ms - log.config.min_compaction_lag_ms, log)
    cleanable = [info for info in ripe if (info.next_offset or 0) <= most]
    end = (cleanable[-1].next_offset if cleanable else None) or first_dirty
    return CleanableRange(
        log,
        [info for info in sealed if (info.next_offset or 0) <= min(end, most)],
        start,
        first_dirty,
        end,
        sum(info.size for info in sealed[: len(sealed) - len(dirty)]),
        sum(info.size for info in cleanable),
        sum(info.size for info in dirty[len(ripe) :]),
        _overdue(log, dirty, now_ms),
        lease,
        now.leader_epoch,
    )


def _first_dirty(log: PartitionLog, start: int, stop: int, end: int) -> int:
    """Return the checkpoint, or the start of the log where it cannot be right (D1)."""
    found = log.context.state.read(lambda txn: keyspace.CLEANED_OFFSETS.get(txn, log.key))
    if found is None or not start <= found <= end:
        return start
    return min(found, stop)


def _ripe(dirty: list[SegmentInfo], latest: int, log: PartitionLog) -> list[SegmentInfo]:
    """Return the dirty segments before the first one with a record that is too young (D2)."""
    if not log.config.min_compaction_lag_ms:
        return dirty
    young = (
        place
        for place, info in enumerate(dirty)
        if info.max_timestamp is not None and info.max_timestamp > latest
    )
    return dirty[: next(young, len(dirty))]


def _overdue(log: PartitionLog, dirty: list[SegmentInfo], now_ms: int) -> bool:
    """Whether the oldest dirty record, by the first batch of each segment, waited too long."""
    most = log.config.max_compaction_lag_ms
    if most == LONG_MAX:
        return False
    return any(_first_time(log, info) < now_ms - most for info in dirty)


def _first_time(log: PartitionLog, info: SegmentInfo) -> int:
    try:
        file = log.open_segment(info)
    except StorageError as error:
        if not error.missing:
            raise
        return LONG_MAX  # replaced since the look
    for one in file.scan(file.start, info.end_position):
        if one.count:
            return one.min_timestamp
    return LONG_MAX


def choose(
    logs: Iterable[PartitionLog], now_ms: int, failed: dict[PartitionLog, EmbedlogError]
) -> list[CleanableRange]:
    """Return the partitions that are to be cleaned, in the order in which to do it (D3, D4).

    Overdue ones first, for a busy partition must not keep them waiting for ever;
    then the dirtiest.

    Args:
        logs: Of topics that are compacted, and others, which are left out.
        now_ms: The time.
        failed: Partitions to leave out; those that cannot be looked at are added.
    """
    found = []
    for log in logs:
        if log in failed:
            continue
        try:
            log.refresh()
            if log.config.compacts and (section := inspect(log, now_ms)).due:
                found.append(section)
        except EmbedlogError as error:
            failed[log] = error
    return sorted(found, key=lambda one: (not one.overdue, -one.ratio))


def explain(log: PartitionLog, now_ms: int) -> str:
    """Say in words what compaction will do with a partition, or why it does nothing."""
    log.refresh()
    name, config = f"{log.topic}-{log.partition}", log.config
    if not config.compacts:
        return f"{name}: not compacted: cleanup.policy is {config.cleanup_policy!r}."
    section = inspect(log, now_ms)
    return f"{name}: {_verdict(section)} {_state(section)}"


def _verdict(section: CleanableRange) -> str:
    config = section.log.config
    if section.overdue and section.due:
        return "will be compacted: a record is older than max.compaction.lag.ms."
    if section.due:
        return (
            f"will be compacted: {section.ratio:.0%} of its bytes are dirty, "
            f"more than min.cleanable.dirty.ratio {config.min_cleanable_dirty_ratio:.0%}."
        )
    if section.cleanable_bytes:
        return (
            f"waits: {section.ratio:.0%} of its bytes are dirty, not more than "
            f"min.cleanable.dirty.ratio {config.min_cleanable_dirty_ratio:.0%}."
        )
    lease = section.lease
    if lease is not None and lease.offset < section.log.segments.keys()[-1]:
        return (
            f"waits: lease {lease.name!r} holds offset {lease.offset} and all after it "
            f"for another {lease.ms_left // 1000} s."
        )
    if section.lagging:
        return (
            f"waits: its dirty segments have records that are younger than "
            f"min.compaction.lag.ms {config.min_compaction_lag_ms}."
        )
    if section.log.end_offset() > section.first_dirty:
        return (
            "waits: what is dirty is in the active segment, which is never compacted; "
            f"it is rolled at segment.bytes {config.segment_bytes} or "
            f"segment.ms {config.segment_ms}, or by compact(force=True)."
        )
    return "nothing to do: all of it is compacted."


def _state(section: CleanableRange) -> str:
    active = max(section.log.size_bytes() - section.clean_bytes - section.cleanable_bytes, 0)
    return (
        f"Offsets {section.start} to {section.first_dirty} are clean "
        f"({section.clean_bytes:,} bytes), up to {section.first_uncleanable} can be cleaned "
        f"({section.cleanable_bytes:,} bytes), up to {section.log.end_offset()} cannot yet "
        f"({max(active, section.lagging):,} bytes)."
    )
