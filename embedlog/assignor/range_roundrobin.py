"""Range and round robin: assignments that ignore who owned which partition before."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from embedlog.assignor.members import (
    Assignment,
    Member,
    sort_members,
    subscribers,
    to_assignment,
)
from embedlog.record import TopicPartition


class RangeAssignor:
    """Kafka's default: each subscriber of a topic gets a range of consecutive partitions.

    If the number of partitions does not divide evenly, the first members get one more, in
    every topic: topics with equal numbers of partitions are assigned alike, so records of
    the same key in different topics reach the same member.

    >>> group = [Member("c1", frozenset({"t1"})), Member("c2", frozenset({"t1"}))]
    >>> assignment = RangeAssignor().assign({"t1": 3}, group)
    >>> {id: [tp.partition for tp in assigned] for id, assigned in assignment.items()}
    {'c1': [0, 1], 'c2': [2]}
    """

    name = "range"
    cooperative = False

    def assign(self, partitions: Mapping[str, int], members: Sequence[Member]) -> Assignment:
        """Assign topic by topic, in time linear in partitions and subscriptions."""
        members = sort_members(members)
        assigned: list[list[TopicPartition]] = [[] for _ in members]
        for topic, indices in subscribers(partitions, members).items():
            share, extra = divmod(partitions[topic], len(indices))
            start = 0
            for rank, index in enumerate(indices):
                stop = start + share + (rank < extra)
                assigned[index] += [TopicPartition(topic, n) for n in range(start, stop)]
                start = stop
        return to_assignment(members, assigned)


class RoundRobinAssignor:
    """Assigns the partitions of all topics in turn, skipping members that are not subscribed.

    The result is even if all members have the same subscription; otherwise it may be uneven.

    >>> group = [Member("c1", frozenset({"t1"})), Member("c2", frozenset({"t1"}))]
    >>> assignment = RoundRobinAssignor().assign({"t1": 3}, group)
    >>> {id: [tp.partition for tp in assigned] for id, assigned in assignment.items()}
    {'c1': [0, 2], 'c2': [1]}
    """

    name = "roundrobin"
    cooperative = False

    def assign(self, partitions: Mapping[str, int], members: Sequence[Member]) -> Assignment:
        """Assign in a circle over the members, in nearly linear time."""
        members = sort_members(members)
        assigned: list[list[TopicPartition]] = [[] for _ in members]
        next_index = 0
        for topic, indices in subscribers(partitions, members).items():
            for n in range(partitions[topic]):
                # A search, not a walk: most members may not be subscribed to this topic.
                at = bisect_left(indices, next_index)
                index = indices[at] if at < len(indices) else indices[0]
                assigned[index].append(TopicPartition(topic, n))
                next_index = index + 1
        return to_assignment(members, assigned)
