"""The cheapest flow, and by it the best assignment: as even as possible, then with few moves.

A flow has the least cost if no cycle of moves makes it cheaper (Klein 1967, "A Primal Method for
Minimal Cost Flows"), so `cancel_cycles` moves along such cycles until there is none.  The
assignments of groups are flows (`optimize`), and so are the copies of partitions in
directories (`replication.reassignment`).

Where subscriptions differ, moving one partition at a time can stop short of the best: a
member may have to give a partition to a second one, so that the second can give another
one to a third.  Such chains are paths in a flow from partitions to members, in which an
uneven load costs most, a partition that leaves its owner costs less, and one that is not
assigned to a member with a stale claim costs least:

1. *Balance.*  While a chain of moves leads from a member to one that has two fewer,
   apply it.  Without such a chain no assignment is more even, by whatever measure
   (Harvey et al. 2003, "Semi-Matchings for Bipartite Graphs and Load Balancing").
2. *Stickiness.*  While a cycle of moves returns more partitions to owners than it takes
   from them, apply it.  A cycle may pass from a member to one that has one fewer: the
   two loads are swapped, which is as even as before.

Partitions with the same subscribers are interchangeable, so they are only counted, unless
members other than the owner claim them.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from embedlog.assignor.members import OwnedPartitions
from embedlog.record import TopicPartition

_OWNED = 1 << 32
"""The cost of taking a partition from its owner; from another claimant it is 1."""


class Network(Protocol):
    """What a flow may change, as a graph whose nodes are numbered from 0."""

    def starts(self) -> Iterable[int]:
        """Return nodes of which each cycle of negative cost has one; begins a search for some."""

    def moves_from(self, node: int, cost: int) -> Iterable[tuple[int, int]]:
        """Return the nodes that may follow in a chain of moves, and the cost of the chain then.

        Args:
            node: Where the chain ends.
            cost: Its cost so far.
        """

    def move_along(self, cycle: Sequence[int]) -> bool:
        """Move along a cycle; return False if that is not cheaper any more."""


def cancel_cycles(network: Network, nodes: int) -> None:
    """Move along cycles of negative cost until there is none, or none that is possible.

    Args:
        network: The flow.
        nodes: How many nodes it has.
    """
    while cycles := _negative_cycles(network, nodes):
        moved = [network.move_along(cycle) for cycle in cycles]
        if not any(moved):
            break


def _negative_cycles(network: Network, nodes: int) -> list[list[int]]:
    """Find cycles with a negative cost, by the algorithm of Bellman and Ford.

    Returns:
        Cycles that have no node in common, each in order; empty if there are none.
    """
    costs, came_from = [0] * nodes, [-1] * nodes
    changed: Iterable[int] = network.starts()
    while changed:
        reached: dict[int, None] = {}
        for node in changed:
            for follower, cost in network.moves_from(node, costs[node]):
                if cost < costs[follower]:
                    costs[follower], came_from[follower] = cost, node
                    reached[follower] = None
        if cycles := _cycles(came_from, reached):
            return cycles
        changed = reached
    return []


class PartitionClass(NamedTuple):
    """What interchangeable partitions have in common."""

    subscribers: Sequence[int]
    claimants: tuple[int, ...] = ()
    owner: int | None = None
    """The owner; None without claimants, where the owner makes no difference."""


def optimize(
    assigned: list[list[TopicPartition]],
    subscribers_of: Mapping[str, Sequence[int]],
    owned: OwnedPartitions,
) -> list[list[TopicPartition]]:
    """Return the most even assignment, and of those one with the fewest moves.

    It is `assigned` itself if that is the best already.

    Args:
        assigned: The partitions of each member, by its index.
        subscribers_of: The indices of each topic's subscribers.
        owned: The owners and claimants of partitions.
    """
    topic_classes = [PartitionClass(tuple(indices)) for indices in subscribers_of.values()]
    numbers = {class_: n for n, class_ in enumerate(dict.fromkeys(topic_classes))}
    class_of_topic = {
        topic: numbers[class_] for topic, class_ in zip(subscribers_of, topic_classes, strict=True)
    }
    class_of: dict[TopicPartition, int] = {}
    for tp in (tp for partitions in assigned for tp in partitions):
        claimants = owned.other_claimants.get(tp)
        if claimants is None:
            class_of[tp] = class_of_topic[tp.topic]
        else:
            indices = tuple(subscribers_of[tp.topic])
            class_ = PartitionClass(indices, claimants, owned.owner.get(tp))
            class_of[tp] = numbers.setdefault(class_, len(numbers))
    flow = FlowNetwork(assigned, class_of, owned, list(numbers))
    flow.balance()
    flow.return_to_owners()
    holder = {tp: n for n, partitions in enumerate(assigned) for tp in partitions}
    # Classes in which nothing moved, too: a member may hold as many as it owns, but others.
    mixed = {class_of[tp] for tp, owner in owned.owner.items() if holder[tp] != owner}
    changed = flow.changed | mixed
    if not changed:
        return assigned
    result = [[tp for tp in partitions if class_of[tp] not in changed] for partitions in assigned]
    counts = [{c: n for c, n in counts.items() if c in changed} for counts in flow.counts]
    rest = sorted(tp for tp in holder if class_of[tp] in changed)
    # First to owners, then to holders, and at last to any members.
    for preferred in (owned.owner, holder):
        unassigned = []
        for tp in rest:
            index, number = preferred.get(tp), class_of[tp]
            if index is not None and counts[index].get(number):
                counts[index][number] -= 1
                result[index].append(tp)
            else:
                unassigned.append(tp)
        rest = unassigned
    by_class: dict[int, list[TopicPartition]] = defaultdict(list)
    for tp in reversed(rest):
        by_class[class_of[tp]].append(tp)
    for index, wanted in enumerate(counts):
        for number, count in wanted.items():
            result[index] += [by_class[number].pop() for _ in range(count)]
    return result


class FlowNetwork:
    """How many partitions of each class each member has.

    Members, by index, are the first nodes of a graph; classes come next; then levels.  A
    level is a set of members among which chains of moves run: their loads differ by at
    most one, and every partition that one of them could give another is held in the level.

    Args:
        assigned: The partitions of each member.
        class_of: The number of each partition's class.
        owned: The owners of partitions.
        classes: All classes, by number.
    """

    def __init__(
        self,
        assigned: Sequence[Sequence[TopicPartition]],
        class_of: Mapping[TopicPartition, int],
        owned: OwnedPartitions,
        classes: Sequence[PartitionClass],
    ) -> None:
        self.counts: list[dict[int, int]] = [
            dict(Counter(map(class_of.__getitem__, partitions))) for partitions in assigned
        ]
        """How many of each class each member has; no zeros."""
        self.changed: set[int] = set()
        """Classes with partitions that moved."""
        owned_counts: list[dict[int, int]] = [{} for _ in assigned]
        for tp, owner in owned.owner.items():
            owned_counts[owner][class_of[tp]] = owned_counts[owner].get(class_of[tp], 0) + 1
        self._owned = owned_counts
        self._surplus: list[dict[int, None]] = [dict.fromkeys(counts) for counts in self.counts]
        """The classes of which each member has more than it owns."""
        self._deficit: list[dict[int, None]] = [{} for _ in classes]
        """The members that own more of each class than they have."""
        for index, counts in enumerate(owned_counts):
            for class_ in counts:
                self._compare(index, class_)
        self._loads = [len(partitions) for partitions in assigned]
        self._receivers = [class_.subscribers for class_ in classes]
        self._claimants = [class_.claimants for class_ in classes]
        self._level_of = [-1] * len(assigned)
        self._tops: list[int] = []
        """The higher load of each level."""
        self._gains: dict[int, list[tuple[int, int]]] = {}
        """As `_all_gains`, as of when a search began."""

    def _compare(self, index: int, class_: int) -> None:
        surplus = self.counts[index].get(class_, 0) - self._owned[index].get(class_, 0)
        if surplus > 0:
            self._surplus[index][class_] = None
        else:
            self._surplus[index].pop(class_, None)
        if surplus < 0:
            self._deficit[class_][index] = None
        else:
            self._deficit[class_].pop(index, None)

    def _remove(self, index: int, class_: int) -> None:
        self.changed.add(class_)
        self._loads[index] -= 1
        self.counts[index][class_] -= 1
        if not self.counts[index][class_]:
            del self.counts[index][class_]
        self._compare(index, class_)

    def _add(self, index: int, class_: int) -> None:
        self._loads[index] += 1
        self.counts[index][class_] = self.counts[index].get(class_, 0) + 1
        self._compare(index, class_)

    # Balance

    def balance(self) -> None:
        """Move along chains until the loads are as even as possible; find the levels."""
        below = set(range(len(self._loads)))
        while below:
            top = max(self._loads[index] for index in below)
            came_from, end = self._reach(top, below)
            while end is not None and (move := came_from[end]) is not None:
                donor, class_ = move
                self._remove(donor, class_)
                self._add(end, class_)
                end = donor
            if end is None:
                for index in came_from:
                    self._level_of[index] = len(self._tops)
                self._tops.append(top)
                below -= came_from.keys()

    def _reach(
        self, top: int, below: set[int]
    ) -> tuple[dict[int, tuple[int, int] | None], int | None]:
        """Follow moves from the members with the highest load to one that has two fewer.

        Returns:
            The members reached, each with the donor and the class of the move to it; and
            the member with two fewer, or None.
        """
        came_from: dict[int, tuple[int, int] | None] = {
            index: None for index in sorted(below) if self._loads[index] == top
        }
        queue, seen = deque(came_from), set()
        while queue:
            donor = queue.popleft()
            for class_ in self.counts[donor]:
                if class_ in seen:
                    continue
                seen.add(class_)
                for receiver in self._receivers[class_]:
                    if receiver not in came_from and receiver in below:
                        came_from[receiver] = donor, class_
                        if self._loads[receiver] <= top - 2:
                            return came_from, receiver
                        queue.append(receiver)
        return came_from, None

    # Stickiness

    def return_to_owners(self) -> None:
        """Move along cycles until none returns more than it takes."""
        # No cycle leads back from a member of another level.
        level_of = {c: self._level_of[n] for n, counts in enumerate(self.counts) for c in counts}
        for class_, level in level_of.items():
            receivers = self._receivers[class_]
            self._receivers[class_] = [n for n in receivers if self._level_of[n] == level]
        cancel_cycles(self, len(self._loads) + len(self._receivers) + len(self._tops))

    def starts(self) -> Iterable[int]:
        """As `Network.starts`: the classes by which a member gains."""
        self._gains = self._all_gains()
        return [len(self._loads) + class_ for class_ in self._gains]

    def _all_gains(self) -> dict[int, list[tuple[int, int]]]:
        """Return who gains by a partition of each class, and the (negative) cost of that."""
        gains = {}
        for class_, deficit in enumerate(self._deficit):
            claimants = self._claimants[class_]
            if deficit or claimants:
                # Only members that can receive it.
                gains[class_] = [
                    (receiver, -(_OWNED if receiver in deficit else 0) - (receiver in claimants))
                    for receiver in self._receivers[class_]
                    if receiver in deficit or receiver in claimants
                ]
        return gains

    def moves_from(self, node: int, cost: int) -> list[tuple[int, int]]:
        """As `Network.moves_from`."""
        members, classes = len(self._loads), len(self._receivers)
        if node < members:
            # The member gives a partition away, or ends up with one more.
            surplus, claimants = self._surplus[node], self._claimants
            moves = [(members + class_, cost + (node in claimants[class_])) for class_ in surplus]
            if cost < -_OWNED:
                moves += [
                    (members + class_, cost + _OWNED + (node in claimants[class_]))
                    for class_ in self.counts[node]
                    if class_ not in surplus
                ]
            level = self._level_of[node]
            if self._loads[node] < self._tops[level]:
                moves.append((members + classes + level, cost))
        elif node < members + classes:
            # A member gets one of this class; a chain begins only where that is a gain.
            class_ = node - members
            moves = [(receiver, cost) for receiver in self._receivers[class_]] if cost < 0 else []
            moves += [(receiver, cost + gain) for receiver, gain in self._gains.get(class_, ())]
        else:
            # For a member with one more, another one of the level ends up with one fewer.
            level = node - members - classes
            moves = [
                (index, cost)
                for index, other_level in enumerate(self._level_of)
                if other_level == level and self._loads[index] == self._tops[level]
            ]
        return moves

    def move_along(self, cycle: Sequence[int]) -> bool:
        """As `Network.move_along`."""
        members, classes = len(self._loads), len(self._receivers)
        for node, follower in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            if node < members <= follower < members + classes:
                self._remove(node, follower - members)
            elif follower < members <= node < members + classes:
                self._add(follower, node - members)
        return True


def _cycles(came_from: Sequence[int], nodes: Iterable[int]) -> list[list[int]]:
    """Return the cycles that lead to these nodes, each in order."""
    cycles = []
    seen: dict[int, int] = {}
    for start in nodes:
        node = start
        while node >= 0 and node not in seen:
            seen[node] = start
            node = came_from[node]
        if node >= 0 and seen[node] == start:
            cycle = [node]
            while (before := came_from[cycle[-1]]) != node:
                cycle.append(before)
            cycles.append(cycle[::-1])
    return cycles
