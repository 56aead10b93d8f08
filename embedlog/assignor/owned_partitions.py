"""Who owns what already, as far as it can be believed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from embedlog.assignor.members import Member
from embedlog.record import TopicPartition


class OwnedPartitions(NamedTuple):
    """Who owns what already, by position among the members."""

    home: dict[TopicPartition, int]
    """By topic and number, as the partitions were given."""
    others: dict[TopicPartition, tuple[int, ...]]
    """Who else claims a partition: from an older generation, or as one of two equals."""
    contradictory: bool
    """Whether any partition is claimed twice, also by members that did not subscribe to it."""


def settle(members: Sequence[Member], wanted: Sequence[TopicPartition]) -> OwnedPartitions:
    """Believe the claim with the highest generation; two equal ones are both dropped.

    Claims on what does not exist, or on topics no longer subscribed to, count for nothing.
    """
    exists = set(wanted)
    claims: dict[TopicPartition, tuple[int, int]] = {}
    more: dict[TopicPartition, list[tuple[int, int]]] = {}
    for position, member in enumerate(members):
        topics, claim = member.topics, (-member.generation, position)
        for tp in member.owned & exists:
            if tp.topic not in topics:
                continue
            if claims.setdefault(tp, claim) is not claim:
                more.setdefault(tp, [claims[tp]]).append(claim)
    # In the order of what is wanted: that of a set is another one in each process.
    home = {tp: claims[tp][1] for tp in wanted if tp in claims}
    others = {}
    for tp, its in more.items():
        its.sort()
        # A tie of two proves that one of them is stale, not which one.
        if its[0][0] == its[1][0]:
            del home[tp]
        else:
            home[tp] = its.pop(0)[1]
        others[tp] = tuple(sorted(position for _, position in its))
    different = set().union(*(member.owned for member in members))
    return OwnedPartitions(
        home, others, len(different) < sum(len(member.owned) for member in members)
    )
