"""Which replica leads a partition.

The rules are Kafka's: the first replica of the assignment that is in sync and alive is
elected; an unclean election takes the first that is alive, and loses what only the others
have.  Preferred leaders, which are the first replicas, spread the leaders evenly; they are
elected again by hand, or where more than `leader.imbalance.per.broker.percentage` of the
partitions that prefer a directory are led by others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

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


class Election(NamedTuple):
    """The result of an election."""

    leader: int
    isr: tuple[int, ...]
    unclean: bool = False
    """Whether the leader was not in sync, so that acknowledged records may be lost."""


def elect_leader(
    replicas: Sequence[int],
    isr: Collection[int],
    alive: Collection[int],
    *,
    unclean: bool = False,
    leader: int | None = None,
) -> Election | None:
    """Return the new leader and in-sync replicas, or None if no replica may lead.

    After a clean election those that are alive remain in sync.  After an unclean one only the
    new leader is, since the others must truncate to its log first.

    Args:
        replicas: All replicas, the preferred leader first.
        isr: The in-sync replicas.
        alive: The directories that work.
        unclean: Whether a replica that is not in sync may lead if no other can
            (`unclean.leader.election.enable`).
        leader: The present leader, which is kept if it may lead.

    >>> elect_leader([1, 2, 3], [2, 3], {3})
    Election(leader=3, isr=(3,), unclean=False)
    """
    in_sync = tuple(replica for replica in isr if replica in alive)
    if leader in in_sync and leader in replicas:
        return Election(leader, in_sync)
    for replica in replicas:
        if replica in in_sync:
            return Election(replica, in_sync)
    if unclean:
        for replica in replicas:
            if replica in alive:
                return Election(replica, (replica,), unclean=True)
    return None


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


def leader_imbalance(partitions: Mapping[P, LedPartition]) -> dict[int, float]:
    """Return the share of partitions that prefer a directory and are not led by it, from 0 to 1.

    Directories that no partition prefers are left out.
    """
    preferred = Counter(state.replicas[0] for state in partitions.values())
    elsewhere = Counter(
        state.replicas[0] for state in partitions.values() if state.leader != state.replicas[0]
    )
    return {directory: elsewhere[directory] / count for directory, count in preferred.items()}


def imbalanced_leaders(
    partitions: Mapping[P, LedPartition], alive: Collection[int], *, percentage: int = 10
) -> dict[P, int]:
    """Return the preferred leaders that must be elected for the balance of leaders.

    They are those of directories whose imbalance is above ``percentage``, as Kafka does with
    `auto.leader.rebalance.enable` and `leader.imbalance.per.broker.percentage`.
    """
    imbalance = leader_imbalance(partitions)
    return {
        partition: leader
        for partition, leader in preferred_leaders(partitions, alive).items()
        if imbalance[leader] > percentage / 100
    }
