"""From current owners to the target: what each member keeps, revokes and adds (KIP-429)."""

from __future__ import annotations

from collections.abc import Set
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


def next_step(
    target: Set[TopicPartition], owned: Set[TopicPartition], owned_by_others: Set[TopicPartition]
) -> RebalanceStep:
    """Return the next step of one member, so that no partition ever has two owners.

    Kafka removes awaited partitions from the assignment and runs the assignor again after
    they were released.  Here the target stays the same and the steps are computed again
    after each release, so a partition reaches its new owner even if the group changes
    in between.

    >>> tp = {TopicPartition("t", 0)}
    >>> next_step(set(), tp, set()).revoked == next_step(tp, set(), tp).awaited == tuple(tp)
    True
    >>> next_step(tp, set(), set()).added == tuple(tp)
    True

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
