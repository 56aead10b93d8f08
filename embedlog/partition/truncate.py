"""Removing the records at and above an offset."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embedlog import catalog, kv
from embedlog.catalog import PartitionInfo
from embedlog.partition import roll
from embedlog.partition.recovery import rebuild
from embedlog.partition.tail import Tail

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog


def truncate_to(log: PartitionLog, offset: int) -> bool:
    """Remove every record at or above an offset; see `PartitionLog.truncate_to`."""
    if offset < 0:
        raise ValueError(f"offset must be at least 0, got {offset}")
    log.context.check_writable()
    try:
        with log.owned() as tail:
            if tail.failed:
                raise log.flush_failed()
            if offset < tail.log_end_offset:
                truncate_locked(log, tail, offset)
            return offset < tail.log_end_offset
    finally:
        log.context.wake.advance()


def truncate_locked(log: PartitionLog, tail: Tail, offset: int) -> None:
    """Remove every record at or above an offset, under the partition's lock."""

    def step(txn: kv.Txn) -> None:
        info = catalog.PARTITIONS.get(txn, log.key) or PartitionInfo()
        recovery_point = min(info.recovery_offset, offset)
        # The start in `live` is ahead if a move of it was not made durable; it never moves back.
        start = min(max(info.start_offset, tail.start_offset), offset)
        changed = PartitionInfo(
            start, recovery_point, info.leader_epoch, tail.appended_ms, tail.log_end_offset
        )
        catalog.PARTITIONS.put(txn, log.key, value=changed)
        catalog.clamp_cleaned_offset(txn, log.key, offset)

    log.context.state.write(step)
    # If this process dies from here on, the next one rebuilds the tail, and the log has
    # either all of the records or none of them.
    log.context.live.write(lambda txn: txn.delete(log.tail_key))
    after = rebuild(log, offset)
    if after.log_end_offset != offset:
        # The log must end at the offset, past the last batch (A34).  A sealed segment notes
        # that durably: otherwise recovery could not tell the gap from lost records.
        after = after._replace(log_end_offset=offset, high_watermark=offset, durable_offset=offset)
        roll.roll(log, after, synced=True, gap=True)
