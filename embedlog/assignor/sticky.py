"""Sticky: as even as possible, and then with as few moves of owned partitions as possible.

KIP-54 and KIP-341, with claims resolved as in KIP-792.  If all members have the same
subscription, the size of each share is fixed and one pass finds the fewest moves;
otherwise see `_balance`.  No assignment of Kafka's is more even, and none that is
as even keeps more partitions with their owners.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace
from itertools import groupby
from operator import attrgetter

from embedlog.assignor.members import (
    Assignment,
    Member,
    OwnedPartitions,
    all_partitions,
    resolve_claims,
    sort_members,
    subscribers,
    to_assignment,
)
from embedlog.assignor.min_cost_flow import optimize
from embedlog.record import TopicPartition


class StickyAssignor:
    """Balance first, then stickiness.

    With equal subscriptions the shares differ by at most one partition; a member that
    leaves causes no other partition to move, and one that joins takes no more than its
    share.  With different subscriptions no partition could move to a member that has at
    least two fewer than its owner.  If the owned partitions are balanced in this sense,
    none of them moves; otherwise no assignment is more even, and none that is as even
    keeps more.  Applied to its own result, it changes nothing.

    >>> t = [TopicPartition("t", n) for n in range(4)]
    >>> old = Member("old", frozenset("t"), owned=frozenset(t), generation=3)
    >>> assignment = StickyAssignor().assign({"t": 4}, [Member("new", frozenset("t")), old])
    >>> {id: [tp.partition for tp in assigned] for id, assigned in assignment.items()}
    {'new': [2, 3], 'old': [0, 1]}
    """

    name = "sticky"
    cooperative = False

    def assign(self, partitions: Mapping[str, int], members: Sequence[Member]) -> Assignment:
        """Assign; 1,000 members and 10,000 partitions take a fraction of a second."""
        members = sort_members(members)
        subscribed = all_partitions(partitions, members)
        owned = resolve_claims(members, subscribed)
        subscriptions = {topics.intersection(partitions) for topics in {m.topics for m in members}}
        assign = _assign_evenly if len(subscriptions) <= 1 else _balance
        return to_assignment(members, assign(members, subscribed, owned))


class CooperativeStickyAssignor(StickyAssignor):
    """The same assignment as sticky, for groups that keep reading while partitions move.

    Kafka's leaves out partitions that still have another owner; this returns the whole
    target, and `next_step` says which part of it may happen now.
    """

    name = "cooperative-sticky"
    cooperative = True


def _assign_evenly(
    members: Sequence[Member], subscribed: Sequence[TopicPartition], owned: OwnedPartitions
) -> list[list[TopicPartition]]:
    """Assign partitions to members that all have the same subscription."""
    assigned = owned.by_member(len(members))
    if not members:
        return assigned
    min_share, extra = divmod(len(subscribed), len(members))
    for partitions in assigned:
        # Shares of one more go to members that already have that many, while they last.
        larger = extra > 0 and len(partitions) > min_share
        extra -= larger
        del partitions[min_share + larger :]
    below = deque(n for n, partitions in enumerate(assigned) if len(partitions) < min_share)
    at_min = deque(n for n, partitions in enumerate(assigned) if len(partitions) == min_share)
    retained = set().union(*assigned)
    for tp in (tp for tp in subscribed if tp not in retained):
        receivers = below or at_min
        index = receivers.popleft()
        assigned[index].append(tp)
        if receivers is below:
            (at_min if len(assigned[index]) == min_share else below).append(index)
    if not owned.other_claimants:
        return assigned
    # Owners keep as much as possible; claims of other members were not considered yet.
    topics = Counter(tp.topic for tp in subscribed)
    return optimize(assigned, subscribers(topics, members), owned)


def _balance(
    members: Sequence[Member], subscribed: Sequence[TopicPartition], owned: OwnedPartitions
) -> list[list[TopicPartition]]:
    """Assign partitions to members that subscribe to different topics.

    Kafka's general algorithm, in its order: keep owned partitions; assign the others to the
    least loaded members, topics with few subscribers first.  If no partition could move to a
    member that has at least two fewer than its owner, the assignment is balanced and no
    member loses anything.  Otherwise Kafka moves single partitions while that helps, and stops
    at a result that depends on the order of the moves.  Here `min_cost_flow` finds the best
    assignment; it begins with one in which no member keeps more than an even share.
    """
    subscribers_of = subscribers(Counter(tp.topic for tp in subscribed), members)
    assigned = owned.by_member(len(members))
    _assign_free(assigned, subscribed, subscribers_of)
    # With contradictory claims Kafka may take a partition from the owner accepted here, and
    # end with a more even assignment.
    if not owned.contradictory and _is_balanced(assigned, subscribers_of):
        return assigned
    even_share = -(-len(subscribed) // len(members))
    assigned = [partitions[:even_share] for partitions in owned.by_member(len(members))]
    _assign_free(assigned, subscribed, subscribers_of)
    return optimize(assigned, subscribers_of, owned)


def _assign_free(
    assigned: Sequence[list[TopicPartition]],
    subscribed: Sequence[TopicPartition],
    subscribers_of: Mapping[str, Sequence[int]],
) -> None:
    """Assign the free ones to the least loaded subscribers, topics with few subscribers first."""
    retained = set().union(*assigned)
    free = [tp for tp in subscribed if tp not in retained]
    # `subscribed` is ordered by topic and number, and the sort is stable.
    free.sort(key=lambda tp: len(subscribers_of[tp.topic]))
    for topic, partitions in groupby(free, attrgetter("topic")):
        receivers = [(len(assigned[index]), index) for index in subscribers_of[topic]]
        heapify(receivers)
        for tp in partitions:
            load, index = receivers[0]
            assigned[index].append(tp)
            heapreplace(receivers, (load + 1, index))


def _is_balanced(
    assigned: Sequence[Sequence[TopicPartition]], subscribers_of: Mapping[str, Sequence[int]]
) -> bool:
    """Whether no partition could move to a member with at least two fewer than its owner."""
    loads = [len(partitions) for partitions in assigned]
    lowest = {topic: min(loads[n] for n in indices) for topic, indices in subscribers_of.items()}
    return all(
        load - lowest[topic] < 2
        for load, partitions in zip(loads, assigned, strict=True)
        for topic in {tp.topic for tp in partitions}
    )
