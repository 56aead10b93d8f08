"""The sticky assignment where members subscribe to different topics.

Kafka's general algorithm, in its order: keep owned partitions; assign the others to the
least loaded members, topics with few subscribers first.  If no partition could move to a
member that has at least two fewer than its owner, the assignment is balanced and no
member loses anything.  Otherwise Kafka moves single partitions while that helps, and stops
at a result that depends on the order of the moves.  Here `min_cost_flow` finds the best
assignment; it begins with one in which no member keeps more than an even share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace
from itertools import groupby
from operator import attrgetter

from embedlog.assignor.members import Member, OwnedPartitions, subscribers
from embedlog.assignor.min_cost_flow import optimize
from embedlog.record import TopicPartition


def balance(
    members: Sequence[Member], subscribed: Sequence[TopicPartition], owned: OwnedPartitions
) -> list[list[TopicPartition]]:
    """Assign the subscribed partitions; return those of each member, by its index."""
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
