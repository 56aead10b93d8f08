"""Which replica leads a partition.

The rules are Kafka's: the first replica of the assignment that is in sync and alive is
elected.  Preferred leaders, which are the first replicas, spread the leaders evenly; they are
elected again by hand, or where more than `leader.imbalance.per.broker.percentage` of the
partitions that prefer a directory are led by others.  No replica outside the ISR is elected
unless an operator asks for it (`unclean_election`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Protocol, TypeVar

P = TypeVar("P", bound=Hashable)


class LedPartition(Protocol):
    """What an election must know of a partition; `isr.PartitionAssignment` has it."""

    @property
    def replicas(self) -> Sequence[int]:
        """All replicas, the preferred leader first."""

    @property
    def isr(self) -> Collection[int]:
        """The in-sync replicas."""

    @property
    def leader(self) -> int | None:
        """The leader; None while there is none."""


def elect_leader(
    replicas: Sequence[int],
    isr: Sequence[int],
    alive: Collection[int],
    leader: int | None = None,
) -> tuple[int | None, tuple[int, ...]]:
    """Return the new leader, None if no replica may lead, and the in-sync replicas.

    Those that are alive remain in sync; all of them if none is, so that they can lead when they
    return.

    Args:
        replicas: All replicas, the preferred leader first.
        isr: The in-sync replicas.
        alive: The directories that work.
        leader: The present leader, which is kept if it may lead.

    >>> elect_leader([1, 2, 3], [2, 3], {3})
    (3, (3,))
    """
    in_sync = tuple(replica for replica in isr if replica in alive)
    for replica in replicas if leader is None else (leader, *replicas):
        if replica in in_sync and replica in replicas:
            return replica, in_sync
    return None, tuple(isr)


def preferred_leaders(partitions: Mapping[P, LedPartition], alive: Collection[int]) -> dict[P, int]:
    """Return the preferred leader of each partition that it could lead, and does not lead.

    It could lead if it is in sync and its directory works.
    """
    return {
        partition: state.replicas[0]
        for partition, state in partitions.items()
        if state.leader != state.replicas[0]
        and state.replicas[0] in state.isr
        and state.replicas[0] in alive
    }


def imbalanced_leaders(
    partitions: Mapping[P, LedPartition], alive: Collection[int], *, percentage: int = 10
) -> dict[P, int]:
    """Return the preferred leaders that must be elected for the balance of leaders.

    They are those of directories of which more than ``percentage`` of the partitions that
    prefer them are led by others, as Kafka does with `auto.leader.rebalance.enable` and
    `leader.imbalance.per.broker.percentage`.
    """
    preferred = Counter(state.replicas[0] for state in partitions.values())
    elsewhere = Counter(
        state.replicas[0] for state in partitions.values() if state.leader != state.replicas[0]
    )
    return {
        partition: leader
        for partition, leader in preferred_leaders(partitions, alive).items()
        if elsewhere[leader] * 100 > preferred[leader] * percentage
    }
