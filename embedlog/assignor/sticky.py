"""Sticky: as even as can be, and what is owned stays where it is as far as that allows.

KIP-54 and KIP-341, with claims as in KIP-792.  Where all subscribe to the same,
how much each may have is known beforehand, and the fewest moves are found in one
pass; where they do not, see `levelling`.  No assignment of Kafka's is more even, nor
keeps more where it is as even.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from operator import attrgetter

from embedlog.assignor.balance import level
from embedlog.assignor.members import Assignment, Member, everything, ordered, subscribers, tidy
from embedlog.assignor.min_cost_flow import optimize
from embedlog.assignor.owned_partitions import OwnedPartitions, settle
from embedlog.record import TopicPartition


class StickyAssignor:
    """Balanced first, then unmoved.

    Where all subscribe to the same, members differ by one partition at most; a
    member that leaves takes nothing from the others, and one that joins takes
    no more than its share.  Where they do not, no partition could go to a
    member that has two fewer than its owner; if that is so with all that is
    owned, nothing of it moves, and otherwise no assignment is more even, nor
    keeps more and is as even.  Asked again about its own answer it changes
    nothing.

    >>> t = [TopicPartition("t", n) for n in range(4)]
    >>> old = Member("old", frozenset("t"), owned=frozenset(t), generation=3)
    >>> shared = StickyAssignor().assign({"t": 4}, [Member("new", frozenset("t")), old])
    >>> {id: [each.partition for each in given] for id, given in shared.items()}
    {'new': [2, 3], 'old': [0, 1]}
    """

    name = "sticky"
    cooperative = False

    def assign(self, partitions: Mapping[str, int], members: Sequence[Member]) -> Assignment:
        """Share out; a thousand members and ten thousand partitions take a fraction of a second."""
        members = ordered(members)
        wanted = everything(partitions, members)
        claims = settle(members, wanted)
        alike = {each.intersection(partitions) for each in {member.topics for member in members}}
        share = _share_evenly if len(alike) <= 1 else level
        return tidy(members, share(members, wanted, claims))


class CooperativeStickyAssignor(StickyAssignor):
    """The same shares as sticky, for groups that go on reading while partitions move.

    Kafka's leaves out of its answer what has another owner still; here the
    answer is the whole target, and `steps` says what of it may happen now.
    """

    name = "cooperative-sticky"
    cooperative = True


def _share_evenly(
    members: Sequence[Member], wanted: Sequence[TopicPartition], claims: OwnedPartitions
) -> list[list[TopicPartition]]:
    """Share out among members that all subscribe to the same."""
    given = _owned(len(members), claims)
    if not members:
        return given
    least, most_count = divmod(len(wanted), len(members))
    hungry, content = _trim(given, least, most_count)
    kept = {tp for taken in given for tp in taken}
    free = deque(tp for tp in wanted if tp not in kept)
    while hungry:
        position = hungry.popleft()
        given[position].append(free.popleft())
        (content if len(given[position]) == least else hungry).append(position)
    while free:
        given[content.popleft()].append(free.popleft())
    if not claims.others:
        return given
    # As many as can be are with their owners; other claims were not looked at.
    return optimize(given, subscribers(Counter(tp.topic for tp in wanted), members), claims)


def _owned(count: int, claims: OwnedPartitions) -> list[list[TopicPartition]]:
    """List what each has, low partitions first: the last are the first to go."""
    given: list[list[TopicPartition]] = [[] for _ in range(count)]
    # They come by topic and number, and the sort is stable.
    for tp in sorted(claims.home, key=attrgetter("partition")):
        given[claims.home[tp]].append(tp)
    return given


def _trim(
    given: list[list[TopicPartition]], least: int, most_count: int
) -> tuple[deque[int], deque[int]]:
    """Cut each to its share, and say who has too little and who could take one more.

    The shares of one more go to those who have them already, as far as they reach.
    """
    hungry: deque[int] = deque()
    content: deque[int] = deque()
    for position, taken in enumerate(given):
        if len(taken) < least:
            hungry.append(position)
        elif len(taken) > least and most_count:
            most_count -= 1
            del taken[least + 1 :]
        else:
            del taken[least:]
            content.append(position)
    return hungry, content
