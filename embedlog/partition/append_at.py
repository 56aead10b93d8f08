"""Appending at given offsets, as a copy of another log does.

A batch says in its head how many offsets before it have no record.  So the active segment
takes batches with gaps before them, and recovery can tell a gap from lost records: the batch
after a gap names the end of the batch before it.  Order:

1. If the manifest says that each offset of the active segment has a record, that is
   corrected, in a transaction of its own.
2. The batches are written and published, as by every append.

Killed between the two, the log has a segment without gaps whose records are counted all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from embedlog import catalog
from embedlog.batch import EXPLICIT_OFFSETS, HEADERS, MAX_GAP, TOMBSTONES, EncodedBatch
from embedlog.config import LONG_MAX
from embedlog.errors import (
    DiskFullError,
    FencedLeaderEpochError,
    OffsetsOutOfOrderError,
    UnexpectedAppendOffsetError,
)
from embedlog.partition import leader_epochs, lookup, roll, validation
from embedlog.partition.append import PendingAppend, commit, finish
from embedlog.partition.tail import Tail
from embedlog.record import Appended
from embedlog.segment import SegmentFile

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

Placed = Sequence[tuple[int, EncodedBatch]]
"""The offset of the first record, and the batch; in order."""


def append_at(
    log: PartitionLog,
    placed: Placed,
    durability: str | None,
    timeout: float | None,
    identical: bool,
    mirror: str,
    expected_end: int | None,
) -> list[Appended]:
    """Write batches at the offsets given with them; see `PartitionLog.append_at`."""
    if not placed:
        return []
    log.context.check_appendable()
    _check_order(log, placed, identical)
    synced = (durability or log.context.durability) == "fsync"
    try:
        with log.owned(timeout) as tail:
            file, end = log.file_at(tail), tail.log_end_offset
            if placed[0][0] < end or expected_end not in (None, end):
                raise UnexpectedAppendOffsetError(
                    f"The log end is offset {end}",
                    **log.where,
                    offset=placed[0][0],
                    todo="Append at the log end.",
                )
            placed = validation.of_this_topic(log, placed, identical)
            encoded = [batch for _, batch in placed]
            if identical:
                validation.check_writer(log, mirror)
                validation.check_kind(log, encoded)
                _check_epoch(log, tail, encoded[0])
            else:
                validation.check(log, encoded, offsets=True)
            pending = _append_locked(log, file, tail, placed, synced, identical)
    except DiskFullError:
        log.context.reserve.mark_full()
        raise
    finish(log, encoded, pending.tail, synced)
    return pending.receipts


def skip_to(log: PartitionLog, offset: int, mirror: str) -> None:
    """Advance the log end to an offset; see `PartitionLog.skip_to`."""
    log.context.check_appendable()
    with log.owned() as tail:
        log.file_at(tail)
        validation.check_writer(log, mirror)
        if offset > tail.log_end_offset:
            # The sealed segment notes durably that it ends there.
            beyond = tail._replace(log_end_offset=offset, high_watermark=offset)
            roll.roll(log, beyond, synced=True, gap=True)
    log.context.wake.advance()


def _check_order(log: PartitionLog, placed: Placed, identical: bool) -> None:
    """Raise unless offsets and, if they are kept, leader epochs are in order.

    Raises:
        OffsetsOutOfOrderError: A batch begins before the one in front of it ends, or too high.
        FencedLeaderEpochError: A batch has an earlier epoch than the one in front of it.
    """
    expected = epoch = 0
    for offset, batch in placed:
        span = batch.count if batch.span is None else batch.span
        if not expected <= offset <= LONG_MAX - span:
            raise OffsetsOutOfOrderError(
                f"A batch of {span} at offset {offset}, which is not in {expected}..{LONG_MAX}",
                **log.where,
                offset=offset,
            )
        expected = offset + span
        if identical and batch.leader_epoch is not None:
            if batch.leader_epoch < epoch:
                raise _fenced(log, offset, batch.leader_epoch, epoch)
            epoch = batch.leader_epoch


def _fenced(log: PartitionLog, offset: int, epoch: int, later: int) -> FencedLeaderEpochError:
    return FencedLeaderEpochError(
        f"A batch of leader epoch {epoch}, after one of epoch {later}",
        **log.where,
        offset=offset,
        todo="Truncate the log to where the histories part, and copy from there on.",
    )


def _check_epoch(log: PartitionLog, tail: Tail, batch: EncodedBatch) -> None:
    """Raise if the log has a batch of a later epoch: recovery would take this one for stale.

    The epoch of the tail may be later, since a recovery begins one.
    """
    if batch.leader_epoch is not None and batch.leader_epoch < tail.leader_epoch:
        last = _last_epoch(log, tail)
        if batch.leader_epoch < last:
            raise _fenced(log, tail.log_end_offset, batch.leader_epoch, last)


def _last_epoch(log: PartitionLog, tail: Tail) -> int:
    """Return the leader epoch of the last batch; 0 if there is none."""
    for info in reversed(log.segments.values()):
        if not tail.has_made(info):
            continue
        file, epoch = log.open_shared(info), None
        stop = info.end_position if info.sealed else tail.log_end_position
        entries = lookup.searchable(log, info)
        for batch in file.heads(entries[-1].position if entries else file.start, stop):
            epoch = batch.leader_epoch
        if epoch is not None:
            return epoch
    return 0


def _append_locked(
    log: PartitionLog, file: SegmentFile, tail: Tail, placed: Placed, synced: bool, identical: bool
) -> PendingAppend:
    """Write and publish batches after a tail; as `append.append_locked`, at their offsets."""
    pending = PendingAppend(log, tail, publish=not synced)
    for offset, batch in placed:
        if not identical:
            receipt = pending.receipt_of_repeated(batch)
            if receipt is not None:
                pending.receipts.append(receipt)
                continue
        elif batch.leader_epoch is not None and batch.leader_epoch > pending.tail.leader_epoch:
            commit(log, file, pending)
            pending.begin(leader_epochs.begin(log, pending.tail, batch.leader_epoch, offset))
        gap = offset - pending.tail.log_end_offset
        if gap > MAX_GAP:
            commit(log, file, pending)
            # The sealed segment notes durably that it ends there.
            beyond = pending.tail._replace(log_end_offset=offset, high_watermark=offset)
            file = _roll(log, pending, beyond, batch, synced=True, gap=True)
        elif _is_roll_due(log, file, pending.tail, batch, identical):
            commit(log, file, pending)
            file = _roll(log, pending, pending.tail, batch, synced=synced, gap=False)
        if offset > pending.tail.log_end_offset and log.active_segment.dense:
            commit(log, file, pending)
            _note_gaps(log)
            pending.begin(pending.tail)
        pending.add(validation.with_columns_of(log, log.active_segment, batch), offset, identical)
    commit(log, file, pending)
    return pending


def _is_roll_due(
    log: PartitionLog, file: SegmentFile, tail: Tail, batch: EncodedBatch, identical: bool
) -> bool:
    if not identical:
        return roll.is_due(log, file, tail, batch)
    # A column that is added would make it another batch.
    columns = batch.flags & (HEADERS | TOMBSTONES)
    other = columns != log.active_segment.column_flags
    return other or roll.is_due(log, file, tail, batch, batch.max_timestamp)


def _roll(
    log: PartitionLog,
    pending: PendingAppend,
    tail: Tail,
    batch: EncodedBatch,
    *,
    synced: bool,
    gap: bool,
) -> SegmentFile:
    """Begin a segment with the columns of a batch."""
    offsets = bool(batch.flags & EXPLICIT_OFFSETS)
    columns = roll.columns_of(batch)
    pending.begin(roll.roll(log, tail, columns, synced=synced, gap=gap, offsets=offsets))
    return log.active_file()


def _note_gaps(log: PartitionLog) -> None:
    """Note in the manifest that not every offset of the active segment has a record."""
    gapped = log.active_segment._replace(dense=False)
    log.context.state.write(lambda txn: catalog.put_segment(txn, log.key, gapped))
    log.refresh()
