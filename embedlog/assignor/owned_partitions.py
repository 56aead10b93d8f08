"""Who owns which partition already, according to the claims of the members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from embedlog.assignor.members import Member
from embedlog.record import TopicPartition


class OwnedPartitions(NamedTuple):
    """The owners of partitions, as indices of members."""

    owner: dict[TopicPartition, int]
    """In the order of the subscribed partitions: by topic and number."""
    other_claimants: dict[TopicPartition, tuple[int, ...]]
    """Other members that claim a partition: from an older generation, or in a tie."""
    contradictory: bool
    """Whether any partition is claimed twice, even by members not subscribed to it."""


def resolve_claims(
    members: Sequence[Member], subscribed: Sequence[TopicPartition]
) -> OwnedPartitions:
    """Accept the claim of the highest generation; of two equal claims neither is accepted.

    Claims to partitions that do not exist, or of topics that the member is no longer
    subscribed to, are ignored.
    """
    exists = set(subscribed)
    claims: dict[TopicPartition, tuple[int, int]] = {}
    conflicts: dict[TopicPartition, list[tuple[int, int]]] = {}
    for index, member in enumerate(members):
        topics, claim = member.topics, (-member.generation, index)
        for tp in member.owned & exists:
            if tp.topic not in topics:
                continue
            if claims.setdefault(tp, claim) is not claim:
                conflicts.setdefault(tp, [claims[tp]]).append(claim)
    # In the order of `subscribed`: the order of a set differs between processes.
    owner = {tp: claims[tp][1] for tp in subscribed if tp in claims}
    other_claimants = {}
    for tp, rivals in conflicts.items():
        rivals.sort()
        # A tie proves that one of the two claims is stale, but not which one.
        if rivals[0][0] == rivals[1][0]:
            del owner[tp]
        else:
            owner[tp] = rivals.pop(0)[1]
        other_claimants[tp] = tuple(sorted(index for _, index in rivals))
    distinct = set().union(*(member.owned for member in members))
    contradictory = len(distinct) < sum(len(member.owned) for member in members)
    return OwnedPartitions(owner, other_claimants, contradictory)
