"""Random groups for the assignors, and an independent measure of an assignment.

Groups differ in subscriptions and in who owns what; several members may claim the same
partition in one or several generations; some members are gone, and others are new.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from random import Random
from typing import NamedTuple

from embedlog.assignor import Assignment, Member, by_name
from embedlog.record import TopicPartition

Topics = dict[str, int]
Given = Mapping[str, Iterable[TopicPartition]]


class Quality(NamedTuple):
    """How even and how sticky an assignment is; larger is better."""

    balance: int
    """Kafka's score: the differences between the loads of all pairs of members, negated."""
    retained: int
    """Partitions that stay with the member that has the newest claim on them."""
    claimed: int
    """Partitions that a member gets which claims them, in whatever generation."""


def quality(assignment: Given, members: Sequence[Member]) -> Quality:
    """Measure an assignment."""
    owners, loads = newest_claims(members), []
    retained = claimed = 0
    for member in members:
        partitions = list(assignment.get(member.id, ()))
        loads.append(len(partitions))
        retained += sum(owners.get(tp) == member.id for tp in partitions)
        claimed += sum(tp in member.owned for tp in partitions)
    return Quality(
        -sum(abs(first - second) for first, second in combinations(loads, 2)), retained, claimed
    )


def newest_claims(members: Sequence[Member]) -> dict[TopicPartition, str]:
    """Return the subscriber with the newest claim on each partition; none if two are as new."""
    claims: dict[TopicPartition, list[tuple[int, str]]] = {}
    for member in members:
        for tp in member.owned:
            if tp.topic in member.topics:
                claims.setdefault(tp, []).append((member.generation, member.id))
    newest = {tp: max(generation for generation, _ in its) for tp, its in claims.items()}
    return {
        tp: ids[0]
        for tp, its in claims.items()
        if len(ids := [who for generation, who in its if generation == newest[tp]]) == 1
    }


def best_quality(topics: Topics, members: Sequence[Member]) -> tuple[int, int]:
    """Return the best possible quality, by trying all assignments."""
    partitions = [
        (tp, able)
        for tp in (TopicPartition(topic, n) for topic in topics for n in range(topics[topic]))
        if (able := [n for n, member in enumerate(members) if tp.topic in member.topics])
    ]
    owners, positions = newest_claims(members), {member.id: n for n, member in enumerate(members)}
    home = [positions.get(owners.get(tp, "")) for tp, _ in partitions]
    pairs = list(combinations(range(len(members)), 2))
    best, scores = (-(1 << 30), 0), {}
    for takers in product(*(able for _, able in partitions)):
        loads = tuple(map(takers.count, range(len(members))))
        if loads not in scores:
            scores[loads] = -sum(abs(loads[first] - loads[second]) for first, second in pairs)
        if scores[loads] >= best[0]:
            retained = sum(owner == taker for owner, taker in zip(home, takers, strict=True))
            best = max(best, (scores[loads], retained))
    return best


def random_group(
    rng: Random, *, most_topics: int = 6, most_members: int = 7
) -> tuple[Topics, list[Member]]:
    """Return topics with their numbers of partitions, and members."""
    most = rng.choice((3, 4, 8))
    topics = {f"t{n}": rng.randint(1, most) for n in range(rng.randint(1, most_topics))}
    kind = rng.choice(
        (_exclusive, _claims_of_all_kinds, _one_stale, _after_changes, _after_changes)
    )
    shared = _some(rng, topics) if rng.random() < 0.2 else None
    members = kind(rng, topics, rng.randint(1, most_members), shared)
    rng.shuffle(members)
    return topics, members


def _some(rng: Random, topics: Topics) -> frozenset[str]:
    return frozenset(rng.sample(sorted(topics), rng.randint(1, len(topics))))


def _all_of(topics: Topics) -> list[TopicPartition]:
    return [TopicPartition(topic, n) for topic in sorted(topics) for n in range(topics[topic])]


def _new(rng: Random, who: str, topics: Topics, shared: frozenset[str] | None) -> Member:
    return Member(who, shared or _some(rng, topics))


def _exclusive(
    rng: Random, topics: Topics, count: int, shared: frozenset[str] | None
) -> list[Member]:
    """Each partition has one owner, or none."""
    members = [_new(rng, f"C{n}", topics, shared) for n in range(count)]
    owner = {tp: rng.randrange(count + 2) for tp in _all_of(topics)}
    return [
        member._replace(
            owned=frozenset(tp for tp in owner if owner[tp] == n and tp.topic in member.topics),
            generation=1,
        )
        for n, member in enumerate(members)
    ]


def _claims_of_all_kinds(
    rng: Random, topics: Topics, count: int, shared: frozenset[str] | None
) -> list[Member]:
    """Any member claims any partition, sometimes of topics it is not subscribed to."""
    members = []
    for n in range(count):
        member, some = _new(rng, f"C{n}", topics, shared), rng.choice((0.2, 0.4))
        owned = [tp for tp in _all_of(topics) if rng.random() < some]
        owned = [tp for tp in owned if tp.topic in member.topics or rng.random() < 0.1]
        members.append(member._replace(owned=frozenset(owned), generation=rng.randint(1, 3)))
    return members


def _one_stale(
    rng: Random, topics: Topics, count: int, shared: frozenset[str] | None
) -> list[Member]:
    """One member claims, with an older generation, what others own now."""
    members = _exclusive(rng, topics, count, shared)
    index = rng.randrange(count)
    stale = [tp for tp in _all_of(topics) if tp.topic in members[index].topics]
    owned = frozenset(tp for tp in stale if rng.random() < 0.5)
    members[index] = members[index]._replace(owned=owned, generation=0)
    return members


def _after_changes(
    rng: Random, topics: Topics, count: int, shared: frozenset[str] | None
) -> list[Member]:
    """Claims of earlier assignments; then members left, joined, or changed subscriptions."""
    members = [_new(rng, f"C{n}", topics, shared) for n in range(count)]
    for generation in range(1, rng.randint(2, 3)):
        present = [member for member in members if rng.random() < 0.9] or members
        assigned: Assignment = by_name("sticky").assign(topics, present)
        members = [
            member._replace(owned=frozenset(assigned[member.id]), generation=generation)
            if member.id in assigned
            else member
            for member in members
        ]
    members = [member for member in members if rng.random() < 0.8] or members
    members += [_new(rng, f"N{n}", topics, shared) for n in range(rng.randint(0, 3))]
    if rng.random() < 0.4:
        members = [
            member._replace(topics=_some(rng, topics)) if rng.random() < 0.3 else member
            for member in members
        ]
    return members
