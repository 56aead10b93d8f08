"""Which partitions get their preferred leaders again, so that the leaders are spread evenly.

The preferred leader of a partition is the first of its replicas.  It is elected again by hand, or
where more than `leader.imbalance.per.broker.percentage` of the partitions that prefer a directory
are led by others, as in Kafka.  `PartitionAssignment` has the elections themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from typing import TypeVar

from embedlog.replication.isr import PartitionAssignment

P = TypeVar("P", bound=Hashable)


def preferred_leaders(
    partitions: Mapping[P, PartitionAssignment], alive: Collection[int]
) -> dict[P, int]:
    """Return the preferred leader of each partition that it could lead, and does not lead.

    It could lead if it is in sync and its directory works.
    """
    return {
        partition: state.preferred_leader
        for partition, state in partitions.items()
        if state.elect_preferred(alive).leader != state.leader
    }


def imbalanced_leaders(
    partitions: Mapping[P, PartitionAssignment], alive: Collection[int], *, percentage: int = 10
) -> dict[P, int]:
    """Return the preferred leaders that must be elected for the balance of leaders.

    They are those of directories of which more than ``percentage`` of the partitions that
    prefer them are led by others, as Kafka does with `auto.leader.rebalance.enable` and
    `leader.imbalance.per.broker.percentage`.
    """
    states = partitions.values()
    preferred = Counter(state.preferred_leader for state in states)
    led = Counter(state.leader for state in states if state.leader == state.preferred_leader)
    return {
        partition: leader
        for partition, leader in preferred_leaders(partitions, alive).items()
        if (preferred[leader] - led[leader]) * 100 > preferred[leader] * percentage
    }
