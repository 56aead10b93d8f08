"""From an assignment to the best one: as even as possible, then with as little moved as possible.

Where subscriptions differ, moving one partition at a time can end short of that: a
member may have to give a partition to a second one, so that the second can give
another one to a third.  Such chains are paths in a flow from partitions to members,
in which an uneven load costs most, a partition that leaves its owner costs less, and
one that does not go to a member with a stale claim costs least.  A flow has the
least cost once no cycle makes it cheaper (Klein 1967), so this looks for them:

1. *Balance.*  While a chain of moves leads from a member to one that has two fewer,
   make it.  Without such a chain no assignment is more even, by whatever measure
   (Harvey et al. 2003, "Semi-Matchings for Bipartite Graphs and Load Balancing").
2. *Stickiness.*  While a cycle of moves returns more to owners than it takes from
   them, make it.  A cycle may pass from a member to one that has one fewer: the
   two loads are swapped, which is as even as before.

Partitions with the same subscribers are alike, and so only counted, unless members
other than the owner claim them.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from embedlog.assignor.owned_partitions import OwnedPartitions
from embedlog.record import TopicPartition

_OWNED = 1 << 32
"""What it costs to take a partition from its owner; from another claimant it costs 1."""


class PartitionClass(NamedTuple):
    """What partitions have in common that are only counted."""

    subscribers: Sequence[int]
    claimants: tuple[int, ...] = ()
    owner: int | None = None
    """Their owner; None where there are no claimants, as then the owner makes no difference."""


def optimize(
    given: list[list[TopicPartition]],
    audience: Mapping[str, Sequence[int]],
    claims: OwnedPartitions,
) -> list[list[TopicPartition]]:
    """Return the most even assignment, and of those one that moves least.

    It is `given` itself if that is the best already.

    Args:
        given: The partitions of each member, by its position.
        audience: The positions of each topic's subscribers.
        claims: Who owns, or claims to own, what.
    """
    kinds = [PartitionClass(tuple(positions)) for positions in audience.values()]
    numbers = {kind: n for n, kind in enumerate(dict.fromkeys(kinds))}
    kind_of_topic = {topic: numbers[kind] for topic, kind in zip(audience, kinds, strict=True)}
    kind_of: dict[TopicPartition, int] = {}
    for tp in (tp for partitions in given for tp in partitions):
        if tp in claims.others:
            kind = PartitionClass(tuple(audience[tp.topic]), claims.others[tp], claims.home.get(tp))
            kind_of[tp] = numbers.setdefault(kind, len(numbers))
        else:
            kind_of[tp] = kind_of_topic[tp.topic]
    flow = FlowNetwork(given, kind_of, claims, list(numbers))
    flow.balance()
    flow.return_to_owners()
    having = {tp: n for n, partitions in enumerate(given) for tp in partitions}
    # Also where nothing moved: what a member owns and what it has may be alike, but not the same.
    mixed = {kind_of[tp] for tp, owner in claims.home.items() if having[tp] != owner}
    return _distributed(given, flow, kind_of, claims, flow.changed | mixed)


def _distributed(
    given: list[list[TopicPartition]],
    flow: FlowNetwork,
    kind_of: Mapping[TopicPartition, int],
    claims: OwnedPartitions,
    kinds: set[int],
) -> list[list[TopicPartition]]:
    """Give each member so many of these kinds: its own first, then what it has, then the rest."""
    if not kinds:
        return given
    result = [[tp for tp in partitions if kind_of[tp] not in kinds] for partitions in given]
    wanted = [{kind: n for kind, n in its.items() if kind in kinds} for its in flow.counts]
    having = {
        tp: n for n, partitions in enumerate(given) for tp in partitions if kind_of[tp] in kinds
    }

    def left(pairs: Iterable[tuple[TopicPartition, int | None]]) -> list[TopicPartition]:
        """Give partitions to these members; return those that they do not want."""
        others = []
        for tp, position in pairs:
            kind = kind_of[tp]
            if position is not None and wanted[position].get(kind):
                wanted[position][kind] -= 1
                result[position].append(tp)
            else:
                others.append(tp)
        return others

    home = claims.home
    away = left((tp, n if home.get(tp) == n else None) for tp, n in having.items())
    unowned = left((tp, home.get(tp)) for tp in sorted(away))
    rest = left((tp, having[tp]) for tp in unowned)
    free: dict[int, list[TopicPartition]] = defaultdict(list)
    for tp in sorted(rest, reverse=True):
        free[kind_of[tp]].append(tp)
    for position, its in enumerate(wanted):
        for kind, count in its.items():
            result[position] += [free[kind].pop() for _ in range(count)]
    return result


class FlowNetwork:
    """How many partitions of each kind each member has.

    Members, by position, are the first nodes of a graph; kinds come next; then
    levels.  A level has the members among which chains of moves run: their loads
    differ by one at most, and they have all that any of them could give another.

    Args:
        given: The partitions of each member.
        kind_of: Their kinds, by number.
        claims: Whose they are.
        kinds: All kinds there are.
    """

    def __init__(
        self,
        given: Sequence[Sequence[TopicPartition]],
        kind_of: Mapping[TopicPartition, int],
        claims: OwnedPartitions,
        kinds: Sequence[PartitionClass],
    ) -> None:
        self.counts: list[dict[int, int]] = [
            dict(Counter(map(kind_of.__getitem__, partitions))) for partitions in given
        ]
        """How many of each kind each member has; no zeros."""
        self.changed: set[int] = set()
        """Kinds of which some went from one member to another."""
        own: list[dict[int, int]] = [{} for _ in given]
        for tp, owner in claims.home.items():
            own[owner][kind_of[tp]] = own[owner].get(kind_of[tp], 0) + 1
        self._own = own
        self._spare: list[dict[int, None]] = [dict.fromkeys(its) for its in self.counts]
        """Of which kinds each member has more than are its own."""
        self._missing: list[dict[int, None]] = [{} for _ in kinds]
        """Which members own more of each kind than they have."""
        self.kept = 0
        """How many partitions can be with their owners."""
        for position, its in enumerate(own):
            for kind, count in its.items():
                self.kept += min(self.counts[position].get(kind, 0), count)
                self._compare(position, kind)
        self._loads = [len(partitions) for partitions in given]
        self._takers = [kind.subscribers for kind in kinds]
        self._claimants = [kind.claimants for kind in kinds]
        self._level_of = [-1] * len(given)
        self._tops: list[int] = []
        """The higher load of each level."""

    def _compare(self, position: int, kind: int) -> None:
        more = self.counts[position].get(kind, 0) - self._own[position].get(kind, 0)
        if more > 0:
            self._spare[position][kind] = None
        else:
            self._spare[position].pop(kind, None)
        if more < 0:
            self._missing[kind][position] = None
        else:
            self._missing[kind].pop(position, None)

    def _take(self, position: int, kind: int) -> None:
        self.changed.add(kind)
        self.kept -= kind not in self._spare[position]
        self._loads[position] -= 1
        self.counts[position][kind] -= 1
        if not self.counts[position][kind]:
            del self.counts[position][kind]
        self._compare(position, kind)

    def _give(self, position: int, kind: int) -> None:
        self.kept += position in self._missing[kind]
        self._loads[position] += 1
        self.counts[position][kind] = self.counts[position].get(kind, 0) + 1
        self._compare(position, kind)

    # Balance

    def balance(self) -> None:
        """Move along chains until the loads are as even as can be; find the levels."""
        below = set(range(len(self._loads)))
        while below:
            top = max(self._loads[position] for position in below)
            came_from, end = self._reach(top, below)
            while end is not None and (step := came_from[end]) is not None:
                giver, kind = step
                self._take(giver, kind)
                self._give(end, kind)
                end = giver
            if end is None:
                for position in came_from:
                    self._level_of[position] = len(self._tops)
                self._tops.append(top)
                below -= came_from.keys()

    def _reach(
        self, top: int, below: set[int]
    ) -> tuple[dict[int, tuple[int, int] | None], int | None]:
        """Follow moves from the members with the highest load, until one has two fewer.

        Returns:
            Each member that was reached, with who would give it what kind; and the
            one with two fewer, if there is one.
        """
        came_from: dict[int, tuple[int, int] | None] = {
            position: None for position in sorted(below) if self._loads[position] == top
        }
        queue, seen = deque(came_from), set()
        while queue:
            giver = queue.popleft()
            for kind in self.counts[giver]:
                if kind in seen:
                    continue
                seen.add(kind)
                for taker in self._takers[kind]:
                    if taker not in came_from and taker in below:
                        came_from[taker] = giver, kind
                        if self._loads[taker] <= top - 2:
                            return came_from, taker
                        queue.append(taker)
        return came_from, None

    # Stickiness

    def return_to_owners(self) -> None:
        """Move along cycles until none returns more than it takes."""
        most_kept = None if any(self._claimants) else self._most_kept()
        if self.kept == most_kept:
            return
        self._stay_in_levels()
        while cycles := self._cheaper_cycles():
            for cycle in cycles:
                self._move_along(cycle)
            if self.kept == most_kept:
                return

    def _most_kept(self) -> int:
        """Return how many could be kept if no subscription were in the way, at these loads."""
        most = 0
        full, wanting = Counter[int](), Counter[int]()
        for position, level in enumerate(self._level_of):
            owned, top = sum(self._own[position].values()), self._tops[level]
            most += min(owned, top - 1)
            full[level] += self._loads[position] == top
            wanting[level] += owned >= top
        return most + sum(min(full[level], wanting[level]) for level in full)

    def _stay_in_levels(self) -> None:
        """Leave out moves to members of other levels: no cycle leads back from there."""
        level_of = {kind: self._level_of[n] for n, its in enumerate(self.counts) for kind in its}
        for kind, level in level_of.items():
            self._takers[kind] = [n for n in self._takers[kind] if self._level_of[n] == level]

    def _cheaper_cycles(self) -> list[list[int]]:
        """Find cycles of moves with a negative cost, by Bellman's and Ford's algorithm.

        Returns:
            Some that have no node in common, each in order; none if there are none.
        """
        members, kinds = len(self._loads), len(self._takers)
        costs = [0] * (members + kinds + len(self._tops))
        came_from = [-1] * len(costs)
        gains = self._gains()
        changed: Iterable[int] = [members + kind for kind in gains]
        while changed:
            reached: dict[int, None] = {}
            for node in changed:
                for follower, cost in self._moves_from(node, costs[node], gains):
                    if cost < costs[follower]:
                        costs[follower], came_from[follower] = cost, node
                        reached[follower] = None
            if cycles := _cycles(came_from, reached):
                return cycles
            changed = reached
        return []

    def _gains(self) -> dict[int, list[tuple[int, int]]]:
        """Return who gains by a partition of each kind, and the cost of that, which is below 0."""
        gains = {}
        for kind, missing in enumerate(self._missing):
            claimants = self._claimants[kind]
            if missing or claimants:
                # Only who can take it.
                gains[kind] = [
                    (taker, -(_OWNED if taker in missing else 0) - (taker in claimants))
                    for taker in self._takers[kind]
                    if taker in missing or taker in claimants
                ]
        return gains

    def _moves_from(
        self, node: int, cost: int, gains: Mapping[int, list[tuple[int, int]]]
    ) -> list[tuple[int, int]]:
        """Return what may follow a node in a chain of moves, and what the chain costs then."""
        members, kinds = len(self._loads), len(self._takers)
        if node < members:
            # The member gives a partition away, or ends up with one more.
            spare, claimants = self._spare[node], self._claimants
            moves = [(members + kind, cost + (node in claimants[kind])) for kind in spare]
            if cost < -_OWNED:
                moves += [
                    (members + kind, cost + _OWNED + (node in claimants[kind]))
                    for kind in self.counts[node]
                    if kind not in spare
                ]
            level = self._level_of[node]
            if self._loads[node] < self._tops[level]:
                moves.append((members + kinds + level, cost))
        elif node < members + kinds:
            # A member gets one of this kind; where none gains by that, no chain begins.
            kind = node - members
            moves = [(taker, cost) for taker in self._takers[kind]] if cost < 0 else []
            moves += [(taker, cost + gain) for taker, gain in gains.get(kind, ())]
        else:
            # For a member with one more, another one of the level ends up with one fewer.
            level = node - members - kinds
            moves = [
                (position, cost)
                for position, its in enumerate(self._level_of)
                if its == level and self._loads[position] == self._tops[level]
            ]
        return moves

    def _move_along(self, cycle: Sequence[int]) -> None:
        members, kinds = len(self._loads), len(self._takers)
        for node, follower in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            if node < members <= follower < members + kinds:
                self._take(node, follower - members)
            elif follower < members <= node < members + kinds:
                self._give(follower, node - members)


def _cycles(came_from: Sequence[int], nodes: Iterable[int]) -> list[list[int]]:
    """Return the cycles that come before these nodes, each in order."""
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
