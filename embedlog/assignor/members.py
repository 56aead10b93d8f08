"""The input and output of an assignor, the claims of members, and the check of a result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol, TypeAlias

from embedlog.errors import AssignorError, EmbedlogError
from embedlog.record import TopicPartition

_MAX_PROBLEMS_SHOWN = 5
"""Problems in the text of an `AssignorError`; its `problems` has all of them."""


class Member(NamedTuple):
    """One member of a group, as an assignor sees it."""

    id: str
    topics: frozenset[str]
    """The subscription; topics that do not exist are ignored."""

    owned: frozenset[TopicPartition] = frozenset()
    """Partitions that it claims to own; of conflicting claims the higher `generation` wins."""

    generation: int = -1
    """The generation in which it was assigned `owned`."""

    instance_id: str | None = None
    """The `group_instance_id` of a static member, which outlives its member id."""

    user_data: bytes | None = None
    """Data for a custom assignor."""


Assignment: TypeAlias = dict[str, tuple[TopicPartition, ...]]
"""Sorted partitions by member id; members without partitions are included."""


class Assignor(Protocol):
    """An assignment strategy: any object with these attributes.

    The result must depend only on the arguments: any member may run the assignor, and all
    of them must get the same result.
    """

    @property
    def name(self) -> str:
        """The name that members vote for; assignors of the same name must be the same."""

    @property
    def cooperative(self) -> bool:
        """Whether a rebalance revokes only partitions that move, or all of them."""

    def assign(self, partitions: Mapping[str, int], members: Sequence[Member]) -> Assignment:
        """Assign every partition of every subscribed topic.

        Args:
            partitions: The number of partitions of each topic.
            members: The group, in the order of `sort_members`.
        """


def sort_members(members: Iterable[Member]) -> list[Member]:
    """Sort members as Kafka does: static ones by instance id, then dynamic ones by id.

    >>> static = Member("b", frozenset(), instance_id="second")
    >>> [member.id for member in sort_members([Member("a", frozenset()), static])]
    ['b', 'a']
    """
    return sorted(
        members, key=lambda member: (member.instance_id is None, member.instance_id or member.id)
    )


def compute_target(
    assignor: Assignor, partitions: Mapping[str, int], members: Collection[Member]
) -> Assignment:
    """Run an assignor and validate its result.

    A custom assignor runs in here: do not call this inside a transaction or under a lock.

    Raises:
        AssignorError: The assignor failed, left a partition out, assigned one twice, or
            assigned one to a member that is not subscribed to its topic.
    """
    group = sort_members(members)
    try:
        result = assignor.assign(partitions, group)
        target = {member.id: tuple(sorted(result.get(member.id, ()))) for member in group}
        non_members = {id_: tuple(result[id_]) for id_ in result if id_ not in target}
    except EmbedlogError:
        raise
    except Exception as error:
        raise AssignorError(
            f"Assignor {assignor.name!r} failed: {error!r}",
            todo="Fix the assignor, or choose another with `partition_assignment_strategy`.",
            assignor=assignor.name,
        ) from error
    validate(target | non_members, partitions, group, assignor=assignor.name)
    return target


def validate(
    assignment: Mapping[str, Iterable[TopicPartition]],
    partitions: Mapping[str, int],
    members: Iterable[Member],
    *,
    assignor: str = "custom",
) -> None:
    """Check that each partition of a subscribed topic, and nothing else, has one subscriber.

    Raises:
        AssignorError: It names the assignor and the first problems; `problems` has all.
    """
    members = list(members)
    topics_of = {member.id: member.topics for member in members}
    subscribed = set(all_partitions(partitions, members))
    times: Counter[TopicPartition] = Counter()
    problems = []
    for member, assigned in assignment.items():
        if member not in topics_of:
            problems.append(f"{member} is not a member")
        for tp in assigned:
            times[tp] += 1
            if tp not in subscribed:
                problems.append(f"{_text(tp)} does not exist or has no subscriber")
            elif tp.topic not in topics_of.get(member, ()):
                name = _text(tp)
                problems.append(f"{name} is assigned to {member}, which is not subscribed to it")
    problems += [f"{_text(tp)} is assigned {n} times" for tp, n in sorted(times.items()) if n > 1]
    problems += [f"{_text(tp)} is not assigned" for tp in sorted(subscribed - times.keys())]
    if problems:
        hidden = len(problems) - _MAX_PROBLEMS_SHOWN
        more = f", and {hidden} more" if hidden > 0 else ""
        raise AssignorError(
            f"Assignor {assignor!r} returned an invalid assignment: "
            f"{'; '.join(problems[:_MAX_PROBLEMS_SHOWN])}{more}",
            todo="Fix the assignor, or choose another with `partition_assignment_strategy`.",
            assignor=assignor,
            problems=tuple(problems),
        )


def _text(tp: TopicPartition) -> str:
    return f"{tp.topic}-{tp.partition}"


def all_partitions(
    partitions: Mapping[str, int], members: Iterable[Member]
) -> list[TopicPartition]:
    """List the partitions of all subscribed topics, by topic and number."""
    topics = set().union(*{member.topics for member in members}) & partitions.keys()
    return [TopicPartition(topic, n) for topic in sorted(topics) for n in range(partitions[topic])]


def subscribers(partitions: Mapping[str, int], members: Sequence[Member]) -> dict[str, list[int]]:
    """Map each subscribed topic, sorted by name, to the indices of its subscribers."""
    by_topic: dict[str, list[int]] = {}
    for index, member in enumerate(members):
        for topic in member.topics:
            by_topic.setdefault(topic, []).append(index)
    return {topic: by_topic[topic] for topic in sorted(by_topic.keys() & partitions.keys())}


def to_assignment(
    members: Sequence[Member], partitions: Sequence[Iterable[TopicPartition]]
) -> Assignment:
    """Return the `Assignment` for lists of partitions in the order of the members."""
    return {
        member.id: tuple(sorted(assigned))
        for member, assigned in zip(members, partitions, strict=True)
    }


class OwnedPartitions(NamedTuple):
    """The owners of partitions, as indices of members."""

    owner: dict[TopicPartition, int]
    """In the order of the subscribed partitions: by topic and number."""
    other_claimants: dict[TopicPartition, tuple[int, ...]]
    """Other members that claim a partition: from an older generation, or in a tie."""
    contradictory: bool
    """Whether any partition is claimed twice, even by members not subscribed to it."""

    def by_member(self, count: int) -> list[list[TopicPartition]]:
        """List the partitions of each of ``count`` members, low numbers first."""
        partitions: list[list[TopicPartition]] = [[] for _ in range(count)]
        # `owner` is ordered by topic and number, and the sort is stable.
        for tp in sorted(self.owner, key=attrgetter("partition")):
            partitions[self.owner[tp]].append(tp)
        return partitions


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
