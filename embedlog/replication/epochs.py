"""Leader epochs, and where the histories of two copies part (KIP-101, KIP-279).

Each leader has an epoch of its own, and begins it in its log at the end that it found.  The
cache of a log lists each epoch that it has with the offset where it starts, both increasing
(A37).  Two copies that have a record of the same epoch at the same offset have the same
record there, and the same ones before, since both have them of the same leader.  So a
follower must truncate to the end of what both have of the last epoch that they share: not
to the high watermark, which it may know late, and not to the other log's end, which says
nothing about what lies below.

A new leader must add its epoch to its cache before it appends.  Otherwise it would not know
where the epochs before it end, and followers with records of those would keep them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

EpochCache: TypeAlias = Sequence[tuple[int, int]]
"""(leader epoch, its first offset), both strictly increasing, as `catalog.epochs` returns."""


class EpochEnd(NamedTuple):
    """The end of an epoch: the offset after its last record."""

    epoch: int
    end_offset: int


def end_offset_for(epochs: EpochCache, log_end_offset: int, epoch: int) -> EpochEnd | None:
    """Return the largest epoch up to ``epoch`` that the log has, and where it ends.

    It ends where the next one starts, or at the log end.  Below the first epoch that the log
    still has, ``epoch`` itself ends where that one starts: what came before was deleted.

    Args:
        epochs: The epochs of the log.
        log_end_offset: Where the log ends.
        epoch: The epoch that a follower, or a consumer, asks for.

    Returns:
        None if the log has no epochs, or only smaller ones: then its copy is not up to date.

    >>> end_offset_for([(0, 10), (2, 13), (4, 17)], 20, 3)
    EpochEnd(epoch=2, end_offset=17)
    """
    at = bisect_right(epochs, epoch, key=_epoch)
    if at == len(epochs):
        return EpochEnd(epoch, log_end_offset) if at and epochs[-1][0] == epoch else None
    return EpochEnd(epochs[at - 1][0] if at else epoch, epochs[at][1])


def truncation_point(
    follower: EpochCache, follower_end: int, leader: EpochCache, leader_end: int
) -> int:
    """Return the offset to which a follower must truncate: where the histories part.

    Below it both logs have the same records, as far as both still have them.  It is
    ``follower_end`` if the follower has nothing that the leader has not.

    Kafka's follower asks the leader for the end of its last epoch.  If the answer is of an
    epoch that it does not have, it truncates to the end of the largest one below, and asks
    again for that one.  A log without epochs has had one, 0, as in `catalog.epochs`.

    Args:
        follower: The epochs of the follower.
        follower_end: Its log end offset.
        leader: The epochs of the leader.
        leader_end: Its log end offset.
    """
    follower, leader = follower or [(0, 0)], leader or [(0, 0)]
    while True:
        # A leader that was restored from an old copy may have smaller epochs only.
        asked = min(follower[-1][0], leader[-1][0])
        answer = end_offset_for(leader, leader_end, asked)
        own = end_offset_for(follower, follower_end, answer.epoch) if answer else None
        assert answer is not None, "the leader has the epoch, or a larger one"
        assert own is not None, "the follower has the epoch, or a larger one"
        follower_end = min(follower_end, own.end_offset)
        if own.epoch == answer.epoch:
            return min(follower_end, answer.end_offset)
        follower = [entry for entry in follower if entry[0] <= own.epoch]


def _epoch(entry: tuple[int, int]) -> int:
    return entry[0]
