"""Appending at given offsets, as a mirror of another log does (A8)."""

from __future__ import annotations

from collections.abc import Sequence

from embedlog.batch import EncodedBatch
from embedlog.config import LONG_MAX
from embedlog.errors import DiskFullError, OffsetsOutOfOrderError, UnexpectedAppendOffsetError
from embedlog.partition import roll, validation
from embedlog.partition.append import append_locked, end_locked, finish
from embedlog.partition.state import PartitionState
from embedlog.record import Appended

Run = tuple[int, list[EncodedBatch]]
"""The offset of the first of several batches without gaps, and the batches."""


def append_at(
    log: PartitionState,
    placed: Sequence[tuple[int, EncodedBatch]],
    durability: str | None,
    timeout: float | None,
) -> list[Appended]:
    """Write batches at the offsets given with them; see `PartitionLog.append_at`."""
    if not placed:
        return []
    log.context.check_appendable()
    encoded = [batch for _, batch in placed]
    runs, receipts = _runs_of(log, placed), []
    synced = (durability or log.context.durability) == "fsync"
    log.acquire(timeout)
    try:
        _, tail = end_locked(log)
        if runs[0][0] < tail.log_end_offset:
            raise UnexpectedAppendOffsetError(
                f"The log goes on at offset {tail.log_end_offset}",
                **log.where,
                offset=runs[0][0],
                todo="Append from there on.",
            )
        validation.check(log, encoded)
        for offset, run in runs:
            if offset > tail.log_end_offset:
                # The sealed segment notes durably that it ends at the offset: in an active
                # segment recovery could not tell the gap from lost records.
                beyond = tail._replace(log_end_offset=offset, high_watermark=offset)
                tail = roll.roll(log, beyond, synced=True, gap=True)
            pending = append_locked(log, log.active_file(), tail, run, synced)
            tail = pending.tail
            receipts += pending.receipts
    except DiskFullError:
        log.context.reserve.mark_full()
        raise
    finally:
        log.release()
    finish(log, encoded, tail, synced)
    return receipts


def _runs_of(log: PartitionState, placed: Sequence[tuple[int, EncodedBatch]]) -> list[Run]:
    """Return the batches in runs without gaps; a batch with a sequence number ends its run.

    If it is a repeat, it is not written, and the batch after it must not move down.

    Raises:
        OffsetsOutOfOrderError: A batch begins before the one in front of it ends, or too high.
    """
    runs: list[Run] = []
    expected, sequenced = 0, False
    for offset, batch in placed:
        if not expected <= offset <= LONG_MAX - batch.count:
            raise OffsetsOutOfOrderError(
                f"A batch of {batch.count} at offset {offset}, which is not in "
                f"{expected}..{LONG_MAX}",
                **log.where,
                offset=offset,
            )
        if not runs or offset > expected or sequenced:
            runs.append((offset, []))
        runs[-1][1].append(batch)
        expected, sequenced = offset + batch.count, batch.producer_id is not None
    return runs
