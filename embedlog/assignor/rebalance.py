"""From what is owned to what should be: what each member keeps, gives up and gets (KIP-429)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from embedlog.record import TopicPartition

Partitions = tuple[TopicPartition, ...]


class RebalanceStep(NamedTuple):
    """What one member does now; each part sorted."""

    kept: Partitions
    """It owns these and goes on with them."""

    revoked: Partitions
    """It owns these and must release them: somebody else should have them, or nobody."""

    added: Partitions
    """It gets these at once: nobody owns them."""

    awaited: Partitions
    """It gets these once their owner has released them."""


def steps(
    target: Mapping[str, Iterable[TopicPartition]],
    owned: Mapping[str, Iterable[TopicPartition]],
) -> dict[str, RebalanceStep]:
    """Say what each member may do now, so that no partition ever has two owners (M22).

    Kafka takes what is awaited out of the assignment and runs the assignor once
    more when it has been released.  Here the target stands, and the same
    question is asked again after every release, so that a partition goes where
    it was meant to go even if the group changes meanwhile.

    >>> tp = TopicPartition("t", 0)
    >>> now = steps({"old": [], "new": [tp]}, {"old": [tp]})
    >>> now["old"].revoked == now["new"].awaited == (tp,)
    True
    >>> steps({"old": [], "new": [tp]}, {})["new"].added == (tp,)
    True

    Args:
        target: Who should have what.
        owned: Who has what; owners that are not in the target have to release all.
    """
    having = {each: set(given) for each, given in owned.items()}
    taken = set().union(*having.values())
    found = {}
    for each in sorted(target.keys() | having.keys()):
        have, want = having.get(each, set()), set(target.get(each, ()))
        found[each] = step(want, have, taken - have)
    return found


def step(
    want: Set[TopicPartition], have: Set[TopicPartition], others: Set[TopicPartition]
) -> RebalanceStep:
    """Say what one member may do now; see `steps`.

    Args:
        want: What it should have.
        have: What it has.
        others: What others have, at least of what it should have.
    """
    free = want - have
    return RebalanceStep(*map(_sorted, (want & have, have - want, free - others, free & others)))


def _sorted(given: Set[TopicPartition]) -> Partitions:
    return tuple(sorted(given))
