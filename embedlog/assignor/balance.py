"""Sharing out where members subscribe to different topics.

Kafka's general algorithm, in its order of work: keep what is owned; give what
is free to the least loaded, topics with few subscribers first.  If no partition
could go to a member that has two fewer than its owner, that is balanced, and
no member loses anything.  Otherwise move from the loaded to the less loaded while
that helps.  Kafka ends there, with an assignment that depends on the order of
the moves; `min_cost_flow` finds the best one from there.

Kafka compares every partition with every member, again after each move.  Here
topics with the same subscribers are one *class*, and two heaps of a class say
who gives and who takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import groupby
from operator import attrgetter

from embedlog.assignor.members import Member, subscribers
from embedlog.assignor.min_cost_flow import optimize
from embedlog.assignor.owned_partitions import OwnedPartitions
from embedlog.record import TopicPartition


def level(
    members: Sequence[Member], wanted: Sequence[TopicPartition], claims: OwnedPartitions
) -> list[list[TopicPartition]]:
    """Share the wanted partitions out among members, each by its position."""
    audience = subscribers(Counter(tp.topic for tp in wanted), members)
    board = AssignmentBoard(audience, len(members))
    board.keep(claims)
    board.place(tp for tp in wanted if tp not in claims.home)
    # Where claims contradict each other, Kafka may take a partition from the owner that is
    # believed here, and so end with an assignment that is more even.
    if not claims.contradictory and board.is_balanced():
        return board.given()
    # What was free anyway moves first: that costs nobody anything (KIP-341).
    board.level(strangers_only=True)
    board.level(strangers_only=False)
    return optimize(board.given(), audience, claims)


class AssignmentBoard:
    """Who holds what while it is being moved about.

    Args:
        audience: The positions of each topic's subscribers.
        count: How many members there are.
    """

    __slots__ = ("_class_of", "_classes", "_held", "_loads", "_own")

    def __init__(self, audience: dict[str, list[int]], count: int) -> None:
        numbers = {positions: n for n, positions in enumerate(map(tuple, audience.values()))}
        self._class_of = {topic: numbers[tuple(each)] for topic, each in audience.items()}
        self._classes = {n: positions for positions, n in numbers.items()}
        self._loads = [0] * count
        # By member and class: its own first, low ones first, then the strangers.  What is
        # taken is the last, so that a stranger goes before what was here before.
        self._held: list[dict[int, list[TopicPartition]]] = [{} for _ in range(count)]
        self._own: list[Counter[int]] = [Counter() for _ in range(count)]

    def given(self) -> list[list[TopicPartition]]:
        """Return what each member holds."""
        return [[tp for held in pools.values() for tp in held] for pools in self._held]

    def keep(self, claims: OwnedPartitions) -> None:
        """Give everybody what it owns, high partitions last: those are the first to go."""
        # They come by topic and number, and the sort is stable.
        for tp in sorted(claims.home, key=attrgetter("partition")):
            position, which = claims.home[tp], self._class_of[tp.topic]
            self._held[position].setdefault(which, []).append(tp)
            self._loads[position] += 1
            self._own[position][which] += 1

    def place(self, free: Iterable[TopicPartition]) -> None:
        """Give each to the least loaded subscriber, what few can have before what many can."""
        sizes = {topic: len(self._classes[which]) for topic, which in self._class_of.items()}
        # They come by topic and number, and the sort is stable.
        by_few = sorted(free, key=lambda tp: sizes[tp.topic])
        for which, group in groupby(by_few, lambda tp: self._class_of[tp.topic]):
            takers = self._takers(which)
            for tp in group:
                load, position = takers[0]
                self._give(tp, position)
                heapreplace(takers, (load + 1, position))

    def is_balanced(self) -> bool:
        """Whether no partition could go to a member that has two fewer than its owner."""
        for which, positions in self._classes.items():
            most = max((self._loads[n] for n in positions if self._held[n].get(which)), default=0)
            if most - min(self._loads[n] for n in positions) >= 2:
                return False
        return True

    def level(self, *, strangers_only: bool) -> None:
        """Move partitions until no move helps.

        Args:
            strangers_only: Leave everybody what it came with.
        """
        # The widest gap first: a chain of small moves may then prove needless.  Not `any`,
        # which would go back to the first class after each one that changed.
        while sum(self._level_class(each, strangers_only) for each in self._by_gap()):
            pass

    def _by_gap(self) -> list[int]:
        """List the classes where a move could help, the most uneven first."""
        loads, uneven = self._loads.__getitem__, []
        for which, positions in self._classes.items():
            gap = max(map(loads, positions)) - min(map(loads, positions))
            if gap >= 2:
                uneven.append((-gap, which))
        return [which for _, which in sorted(uneven)]

    def _level_class(self, which: int, strangers_only: bool) -> bool:
        """Move partitions of one class until no move helps; say whether any did."""
        takers, givers = self._takers(which), self._givers(which, strangers_only)
        moved = False
        # Who gives has two more than the least, so it cannot become the least, nor can
        # who takes become the most: nobody is in both roles, and no entry needs mending.
        while givers and -givers[0][0] - takers[0][0] >= 2:
            giver, taker = -givers[0][2], takers[0][1]
            self._give(self._held[giver][which].pop(), taker)
            self._loads[giver] -= 1
            left = len(self._held[giver][which])
            self._own[giver][which] = min(self._own[giver][which], left)
            heapreplace(takers, (self._loads[taker], taker))
            if left > (self._own[giver][which] if strangers_only else 0):
                heapreplace(givers, self._giver(which, giver))
            else:
                heappop(givers)
            moved = True
        return moved

    def _takers(self, which: int) -> list[tuple[int, int]]:
        """Return a heap of a class's subscribers, the least loaded on top."""
        takers = [(self._loads[position], position) for position in self._classes[which]]
        heapify(takers)
        return takers

    def _givers(self, which: int, strangers_only: bool) -> list[tuple[int, bool, int]]:
        """Return a heap of who can give of a class, the most loaded on top."""
        givers = [
            self._giver(which, each)
            for each in self._classes[which]
            if len(self._held[each].get(which, ()))
            > (self._own[each][which] if strangers_only else 0)
        ]
        heapify(givers)
        return givers

    def _giver(self, which: int, position: int) -> tuple[int, bool, int]:
        """Order by load; between equals, who has strangers gives, and then the last."""
        only_own = len(self._held[position][which]) == self._own[position][which]
        return -self._loads[position], only_own, -position

    def _give(self, tp: TopicPartition, position: int) -> None:
        self._held[position].setdefault(self._class_of[tp.topic], []).append(tp)
        self._loads[position] += 1
