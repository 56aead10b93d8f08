"""Appending at offsets that somebody else gave: a mirror keeps those of its source (A8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from embedlog.batch import EncodedBatch
from embedlog.errors import OffsetsOutOfOrderError, UnexpectedAppendOffsetError
from embedlog.partition import roll
from embedlog.partition.tail import Tail

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

Run = tuple[int, list[EncodedBatch]]
"""Batches to be written without a gap between them, and the offset of the first."""
_MOST = (1 << 63) - 1
"""Offsets are signed in the rows that keep them."""


def runs_of(log: PartitionLog, placed: Sequence[tuple[int, EncodedBatch]]) -> list[Run]:
    """Return batches in pieces without gaps; one that has a sequence ends its piece.

    For it may be a repeat, which is not written, and what follows it keeps its offset.

    Raises:
        OffsetsOutOfOrderError: One begins before the one in front of it ends, or too high.
    """
    runs: list[Run] = []
    due, numbered = 0, False
    for offset, one in placed:
        if not due <= offset <= _MOST - one.count:
            raise OffsetsOutOfOrderError(
                f"a batch of {one.count} at offset {offset}, which is not in {due}..{_MOST}",
                topic=log.topic,
                partition=log.partition,
                offset=offset,
            )
        if not runs or offset > due or numbered:
            runs.append((offset, []))
        runs[-1][1].append(one)
        due, numbered = offset + one.count, one.producer_id is not None
    return runs


def check_first(log: PartitionLog, now: Tail, offset: int) -> None:
    """Refuse an offset that the log has given already."""
    if offset < now.log_end_offset:
        raise UnexpectedAppendOffsetError(
            f"the log goes on at offset {now.log_end_offset}",
            topic=log.topic,
            partition=log.partition,
            offset=offset,
            todo="append from there on",
        )


def skip_to(log: PartitionLog, now: Tail, offset: int) -> Tail:
    """Leave a gap up to ``offset``, where the next batch goes; under the partition's lock.

    The segment is sealed and says durably that it ends there: in an active one
    recovery could not tell the gap from lost records.
    """
    if offset == now.log_end_offset:
        return now
    beyond = now._replace(log_end_offset=offset, high_watermark=offset)
    return roll.roll(log, beyond, log.last.headers, True, gap=True)
