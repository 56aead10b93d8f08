"""The sticky assignment where members subscribe to different topics.

Kafka's general algorithm, in its order: keep owned partitions; assign the others to the
least loaded members, topics with few subscribers first.  If no partition could move to a
member that has at least two fewer than its owner, the assignment is balanced and no
member loses anything.  Otherwise move partitions from loaded to less loaded members while
that helps.  Kafka stops there, with a result that depends on the order of the moves;
`min_cost_flow` improves it to the best one.

Kafka compares every partition with every member after each move.  Here topics with the
same subscribers form one *class*, and two heaps per class find donor and receiver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import groupby
from operator import attrgetter

from embedlog.assignor.members import Member, subscribers
from embedlog.assignor.min_cost_flow import optimize
from embedlog.assignor.owned_partitions import OwnedPartitions
from embedlog.record import TopicPartition


def balance(
    members: Sequence[Member], subscribed: Sequence[TopicPartition], owned: OwnedPartitions
) -> list[list[TopicPartition]]:
    """Assign the subscribed partitions; return those of each member, by its index."""
    subscribers_of = subscribers(Counter(tp.topic for tp in subscribed), members)
    builder = AssignmentBuilder(subscribers_of, len(members))
    builder.keep_owned(owned)
    builder.assign_free(tp for tp in subscribed if tp not in owned.owner)
    # With contradictory claims Kafka may take a partition from the owner accepted here, and
    # end with a more even assignment.
    if not owned.contradictory and builder.is_balanced():
        return builder.assignment()
    # Partitions that had no owner move first: that costs no member anything (KIP-341).
    builder.balance(unowned_only=True)
    builder.balance(unowned_only=False)
    return optimize(builder.assignment(), subscribers_of, owned)


class AssignmentBuilder:
    """The partitions of each member while they are being moved.

    Args:
        subscribers_of: The indices of each topic's subscribers.
        count: The number of members.
    """

    __slots__ = ("_class_of", "_loads", "_owned", "_partitions", "_subscribers")

    def __init__(self, subscribers_of: Mapping[str, list[int]], count: int) -> None:
        numbers = {indices: n for n, indices in enumerate(map(tuple, subscribers_of.values()))}
        self._class_of = {topic: numbers[tuple(each)] for topic, each in subscribers_of.items()}
        self._subscribers = {n: indices for indices, n in numbers.items()}
        self._loads = [0] * count
        # By member and class: owned ones first, low numbers first, then the unowned.  The last
        # one is moved first, so an unowned partition moves before an owned one.
        self._partitions: list[dict[int, list[TopicPartition]]] = [{} for _ in range(count)]
        self._owned: list[Counter[int]] = [Counter() for _ in range(count)]

    def assignment(self) -> list[list[TopicPartition]]:
        """Return the partitions of each member."""
        return [[tp for tps in by_class.values() for tp in tps] for by_class in self._partitions]

    def keep_owned(self, owned: OwnedPartitions) -> None:
        """Assign owned partitions to their owners, high numbers last: they move first."""
        # `owner` is ordered by topic and number, and the sort is stable.
        for tp in sorted(owned.owner, key=attrgetter("partition")):
            index, class_ = owned.owner[tp], self._class_of[tp.topic]
            self._partitions[index].setdefault(class_, []).append(tp)
            self._loads[index] += 1
            self._owned[index][class_] += 1

    def assign_free(self, free: Iterable[TopicPartition]) -> None:
        """Assign each to the least loaded subscriber, topics with few subscribers first."""
        sizes = {topic: len(self._subscribers[c]) for topic, c in self._class_of.items()}
        # `free` is ordered by topic and number, and the sort is stable.
        by_size = sorted(free, key=lambda tp: sizes[tp.topic])
        for class_, partitions in groupby(by_size, lambda tp: self._class_of[tp.topic]):
            receivers = self._receivers(class_)
            for tp in partitions:
                load, index = receivers[0]
                self._assign(tp, index)
                heapreplace(receivers, (load + 1, index))

    def is_balanced(self) -> bool:
        """Whether no partition could move to a member with at least two fewer than its owner."""
        for class_, indices in self._subscribers.items():
            owning = (self._loads[n] for n in indices if self._partitions[n].get(class_))
            if max(owning, default=0) - min(self._loads[n] for n in indices) >= 2:
                return False
        return True

    def balance(self, *, unowned_only: bool) -> None:
        """Move partitions until no move helps.

        Args:
            unowned_only: Do not move partitions away from their owners.
        """
        # The largest gap first: it may make a chain of small moves unnecessary.  Not `any`,
        # which would go back to the first class after each one that changed.
        while sum(self._balance_class(class_, unowned_only) for class_ in self._by_gap()):
            pass

    def _by_gap(self) -> list[int]:
        """List the classes where a move could help, the most uneven first."""
        loads, uneven = self._loads.__getitem__, []
        for class_, indices in self._subscribers.items():
            gap = max(map(loads, indices)) - min(map(loads, indices))
            if gap >= 2:
                uneven.append((-gap, class_))
        return [class_ for _, class_ in sorted(uneven)]

    def _balance_class(self, class_: int, unowned_only: bool) -> bool:
        """Move partitions of one class until no move helps; return whether any was moved."""
        receivers, donors = self._receivers(class_), self._donors(class_, unowned_only)
        moved = False
        # A donor has at least two more than the lowest load, so it cannot become the lowest,
        # nor can a receiver become the highest: no member is both, and no entry gets stale.
        while donors and -donors[0][0] - receivers[0][0] >= 2:
            donor, receiver = -donors[0][2], receivers[0][1]
            self._assign(self._partitions[donor][class_].pop(), receiver)
            self._loads[donor] -= 1
            left = len(self._partitions[donor][class_])
            self._owned[donor][class_] = min(self._owned[donor][class_], left)
            heapreplace(receivers, (self._loads[receiver], receiver))
            if left > (self._owned[donor][class_] if unowned_only else 0):
                heapreplace(donors, self._donor(class_, donor))
            else:
                heappop(donors)
            moved = True
        return moved

    def _receivers(self, class_: int) -> list[tuple[int, int]]:
        """Return a heap of a class's subscribers, the least loaded on top."""
        receivers = [(self._loads[index], index) for index in self._subscribers[class_]]
        heapify(receivers)
        return receivers

    def _donors(self, class_: int, unowned_only: bool) -> list[tuple[int, bool, int]]:
        """Return a heap of members with partitions of a class to give, the most loaded on top."""
        donors = [
            self._donor(class_, index)
            for index in self._subscribers[class_]
            if len(self._partitions[index].get(class_, ()))
            > (self._owned[index][class_] if unowned_only else 0)
        ]
        heapify(donors)
        return donors

    def _donor(self, class_: int, index: int) -> tuple[int, bool, int]:
        """Order by load; of equal ones, those with unowned partitions first, then the last."""
        only_owned = len(self._partitions[index][class_]) == self._owned[index][class_]
        return -self._loads[index], only_owned, -index

    def _assign(self, tp: TopicPartition, index: int) -> None:
        self._partitions[index].setdefault(self._class_of[tp.topic], []).append(tp)
        self._loads[index] += 1
