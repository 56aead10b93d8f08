"""Who owns what already, as far as it can be believed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from embedlog.assignor.members import Member
from embedlog.record import TopicPartition


class Claims(NamedTuple):
    """Who owns what already, by position among the members."""

    home: dict[TopicPartition, int]
    earlier: dict[TopicPartition, int]
    """Who claims a partition from an older generation than the one that is believed."""


def settle(members: Sequence[Member], wanted: Iterable[TopicPartition]) -> Claims:
    """Believe the claim with the highest generation; two equal ones are both dropped.

    Claims on what does not exist, or on topics no longer subscribed to, count for nothing.
    """
    claimed: dict[TopicPartition, list[tuple[int, int]]] = {tp: [] for tp in wanted}
    for position, member in enumerate(members):
        for tp in member.owned:
            if tp in claimed and tp.topic in member.topics:
                claimed[tp].append((-member.generation, position))
    home, earlier = {}, {}
    for tp, claims in claimed.items():
        claims.sort()
        # A tie of two proves that one of them is stale, not which one.
        if claims and (len(claims) == 1 or claims[0][0] != claims[1][0]):
            home[tp] = claims[0][1]
            if len(claims) > 1:
                earlier[tp] = claims[1][1]
    return Claims(home, earlier)
