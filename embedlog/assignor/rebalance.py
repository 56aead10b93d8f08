"""From current owners to the target: what each member keeps, revokes and adds (KIP-429)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from embedlog.record import TopicPartition

Partitions = tuple[TopicPartition, ...]


class RebalanceStep(NamedTuple):
    """What one member does now; each field is sorted."""

    kept: Partitions
    """Partitions that it owns and keeps."""

    revoked: Partitions
    """Partitions that it owns and must release: they are assigned to others, or to no member."""

    added: Partitions
    """Partitions that it may acquire now: they have no owner."""

    awaited: Partitions
    """Partitions that it may acquire once their owner has released them."""


def next_steps(
    target: Mapping[str, Iterable[TopicPartition]],
    owned: Mapping[str, Iterable[TopicPartition]],
) -> dict[str, RebalanceStep]:
    """Return what each member may do now, so that no partition ever has two owners (M22).

    Kafka removes awaited partitions from the assignment and runs the assignor again after
    they were released.  Here the target stays the same and the steps are computed again
    after each release, so a partition reaches its new owner even if the group changes
    in between.

    >>> tp = TopicPartition("t", 0)
    >>> steps = next_steps({"old": [], "new": [tp]}, {"old": [tp]})
    >>> steps["old"].revoked == steps["new"].awaited == (tp,)
    True
    >>> next_steps({"old": [], "new": [tp]}, {})["new"].added == (tp,)
    True

    Args:
        target: The partitions that each member should own.
        owned: The partitions that each member owns; one without a target must release all.
    """
    owned_sets = {member: set(partitions) for member, partitions in owned.items()}
    all_owned = set().union(*owned_sets.values())
    steps = {}
    for member in sorted(target.keys() | owned_sets.keys()):
        own = owned_sets.get(member, set())
        steps[member] = next_step(set(target.get(member, ())), own, all_owned - own)
    return steps


def next_step(
    target: Set[TopicPartition], owned: Set[TopicPartition], owned_by_others: Set[TopicPartition]
) -> RebalanceStep:
    """Return what one member may do now; see `next_steps`.

    Args:
        target: The partitions that it should own.
        owned: The partitions that it owns.
        owned_by_others: The partitions that others own, at least those in `target`.
    """
    missing = target - owned
    return RebalanceStep(
        kept=tuple(sorted(target & owned)),
        revoked=tuple(sorted(owned - target)),
        added=tuple(sorted(missing - owned_by_others)),
        awaited=tuple(sorted(missing & owned_by_others)),
    )
