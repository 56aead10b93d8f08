"""What goes into an assignor and what comes out, and holding the one against the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from embedlog.errors import AssignorError, EmbedlogError
from embedlog.record import TopicPartition

_SHOWN = 5
"""So many problems are told in an error's sentence; all of them are in its `problems`."""


class Member(NamedTuple):
    """One member of a group, as an assignor sees it."""

    id: str
    topics: frozenset[str]
    """What it subscribed to; topics that do not exist are ignored (M27)."""

    owned: frozenset[TopicPartition] = frozenset()
    """What it claims to own; where claims differ, the higher `generation` is believed."""

    generation: int = -1
    """The generation in which it got what it claims."""

    instance_id: str | None = None
    """The name of a static member, which stays when its id changes (M13)."""

    user_data: bytes | None = None
    """What the member tells a user's own assignor."""


Assignment: TypeAlias = dict[str, tuple[TopicPartition, ...]]
"""Member id to its partitions, sorted; every member is there, if with nothing."""


class Assignor(Protocol):
    """A way to share partitions out: any object with a name and these methods will do.

    It must depend on nothing but its arguments: every member may run it, and
    all must come to the same answer.
    """

    @property
    def name(self) -> str:
        """What members vote for; two assignors with one name must do the same."""

    @property
    def cooperative(self) -> bool:
        """Whether members keep what they keep during a rebalance (M20), or give up all (M19)."""

    def assign(self, partitions: Mapping[str, int], members: Sequence[Member]) -> Assignment:
        """Share out every partition of every subscribed topic.

        Args:
            partitions: How many partitions each topic has.
            members: The group, in the order of `ordered`.
        """


def ordered(members: Iterable[Member]) -> list[Member]:
    """Sort members as Kafka does: static ones by instance id, then the others by id (M26).

    >>> static = Member("b", frozenset(), instance_id="second")
    >>> [each.id for each in ordered([Member("a", frozenset()), static])]
    ['b', 'a']
    """
    return sorted(members, key=lambda each: (each.instance_id is None, each.instance_id or each.id))


def target(
    assignor: Assignor, partitions: Mapping[str, int], members: Collection[Member]
) -> Assignment:
    """Ask an assignor who should have what, and hold the answer against the rules.

    This is how a group asks any assignor.  A user's own runs in here: call it
    outside transactions and locks.

    Raises:
        AssignorError: It failed, or it left something out, gave something twice
            or to a member that did not subscribe.
    """
    group = ordered(members)
    try:
        found = assignor.assign(partitions, group)
        given = {each.id: tuple(sorted(found.get(each.id, ()))) for each in group}
        strangers = {each: tuple(found[each]) for each in found if each not in given}
    except EmbedlogError:
        raise
    except Exception as error:
        raise AssignorError(
            f"assignor {assignor.name!r} failed: {error!r}",
            todo="Mend the assignor, or choose another with `partition_assignment_strategy`.",
            assignor=assignor.name,
        ) from error
    check(given | strangers, partitions, group, assignor=assignor.name)
    return given


def check(
    assignment: Mapping[str, Iterable[TopicPartition]],
    partitions: Mapping[str, int],
    members: Iterable[Member],
    *,
    assignor: str = "a user's own",
) -> None:
    """See that each partition of a subscribed topic went to one subscriber, and nothing else did.

    Raises:
        AssignorError: It names the assignor and says what is wrong; `problems` lists it all.
    """
    problems = list(_problems(assignment, partitions, list(members)))
    if problems:
        more = f", and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise AssignorError(
            f"assignor {assignor!r} answered wrongly: {'; '.join(problems[:_SHOWN])}{more}",
            todo="Mend the assignor, or choose another with `partition_assignment_strategy`.",
            assignor=assignor,
            problems=tuple(problems),
        )


def _problems(
    assignment: Mapping[str, Iterable[TopicPartition]],
    partitions: Mapping[str, int],
    members: Sequence[Member],
) -> Iterator[str]:
    topics_of = {each.id: each.topics for each in members}
    wanted = set(everything(partitions, members))
    times: Counter[TopicPartition] = Counter()
    for member, taken in assignment.items():
        if member not in topics_of:
            yield f"{member} is no member"
        for tp in taken:
            times[tp] += 1
            if tp not in wanted:
                yield f"{_shown(tp)} does not exist, or nobody subscribed to it"
            elif tp.topic not in topics_of.get(member, ()):
                yield f"{_shown(tp)} went to {member}, which did not subscribe"
    yield from (f"{_shown(tp)} was given {n} times" for tp, n in sorted(times.items()) if n > 1)
    yield from (f"nobody got {_shown(tp)}" for tp in sorted(wanted - times.keys()))


def _shown(tp: TopicPartition) -> str:
    return f"{tp.topic}-{tp.partition}"


def everything(partitions: Mapping[str, int], members: Iterable[Member]) -> list[TopicPartition]:
    """List the partitions of the subscribed topics, by topic and number."""
    topics = set().union(*{each.topics for each in members}) & partitions.keys()
    return [TopicPartition(each, n) for each in sorted(topics) for n in range(partitions[each])]


def subscribers(partitions: Mapping[str, int], members: Sequence[Member]) -> dict[str, list[int]]:
    """Map each subscribed topic, by name, to the positions of its subscribers among the members."""
    found: dict[str, list[int]] = {}
    for position, member in enumerate(members):
        for topic in member.topics:
            found.setdefault(topic, []).append(position)
    return {topic: found[topic] for topic in sorted(found.keys() & partitions.keys())}


def tidy(members: Sequence[Member], given: Sequence[Iterable[TopicPartition]]) -> Assignment:
    """Make an assignment of what each member, by position, is given."""
    return {each.id: tuple(sorted(taken)) for each, taken in zip(members, given, strict=True)}
