"""Range and round robin: what a member gets depends on who is there, not on what was."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from embedlog.assignor.members import Assignment, Member, ordered, subscribers, tidy
from embedlog.record import TopicPartition


class RangeAssignor:
    """Kafka's default: of each topic, every subscriber gets a run of neighbouring partitions.

    The first members get one more where it does not divide evenly, and get it
    in every topic: topics with equal counts are shared out alike, so that what
    has the same key meets in one member.

    >>> group = [Member("c1", frozenset({"t1"})), Member("c2", frozenset({"t1"}))]
    >>> shared = RangeAssignor().assign({"t1": 3}, group)
    >>> {id: [each.partition for each in given] for id, given in shared.items()}
    {'c1': [0, 1], 'c2': [2]}
    """

    name = "range"
    cooperative = False

    def assign(self, partitions: Mapping[str, int], members: Sequence[Member]) -> Assignment:
        """Share out each topic by itself; takes time in proportion to what there is."""
        members = ordered(members)
        given: list[list[TopicPartition]] = [[] for _ in members]
        for topic, positions in subscribers(partitions, members).items():
            share, extra = divmod(partitions[topic], len(positions))
            start = 0
            for turn, position in enumerate(positions):
                stop = start + share + (turn < extra)
                given[position] += [TopicPartition(topic, n) for n in range(start, stop)]
                start = stop
        return tidy(members, given)


class RoundRobinAssignor:
    """Deals the partitions of all topics in turn, past members that did not subscribe.

    Even where all subscribe to the same; it can be lopsided where they do not.

    >>> group = [Member("c1", frozenset({"t1"})), Member("c2", frozenset({"t1"}))]
    >>> shared = RoundRobinAssignor().assign({"t1": 3}, group)
    >>> {id: [each.partition for each in given] for id, given in shared.items()}
    {'c1': [0, 2], 'c2': [1]}
    """

    name = "roundrobin"
    cooperative = False

    def assign(self, partitions: Mapping[str, int], members: Sequence[Member]) -> Assignment:
        """Deal to the members in a circle; takes time in proportion to what there is."""
        members = ordered(members)
        given: list[list[TopicPartition]] = [[] for _ in members]
        turn = 0
        for topic, positions in subscribers(partitions, members).items():
            for n in range(partitions[topic]):
                # Searched, not walked: most members may have no interest in this topic.
                at = bisect_left(positions, turn)
                position = positions[at] if at < len(positions) else positions[0]
                given[position].append(TopicPartition(topic, n))
                turn = position + 1
        return tidy(members, given)
