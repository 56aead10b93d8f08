"""Where the replicas of a topic are: evenly, on distinct directories, racks alternating.

Kafka's placement (`AdminUtils.assignReplicasToBrokers`, KIP-36):

1. The directories are put in an order in which racks alternate.
2. The first replica of each partition, its preferred leader, is assigned round robin, from a
   random start.
3. The others follow at a distance that grows by one each time that all directories have had a
   turn, so that the partitions of one leader have their followers in different places.  A
   directory is passed over while its rack has a replica and another rack has none.

As in Kafka's `StripedReplicaPlacer`, directories without a rack share one, and a directory
that is offline never gets a preferred leader, and a replica only if no other directory of its
rack is left.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice, pairwise, zip_longest
from typing import TypeAlias, TypeVar

from embedlog.assignor.min_cost_flow import cancel_cycles
from embedlog.errors import InvalidPartitionsError, InvalidReplicationFactorError

Racks: TypeAlias = Mapping[int, str | None]
"""The rack of each directory, by its id."""


def assign_replicas(
    partitions: int,
    replication_factor: int,
    directories: Racks,
    *,
    first_partition: int = 0,
    start: int = 0,
    rng: random.Random | None = None,
    offline: Collection[int] = (),
) -> dict[int, tuple[int, ...]]:
    """Return the replicas of each new partition; the first one is the preferred leader.

    Leaders are even within 1.  Without racks, or with racks of equal size, replicas are even
    too whenever the partitions are a multiple of the directories.  Each partition is in as
    many racks as possible.

    Args:
        partitions: How many partitions to assign.
        replication_factor: How many replicas each partition has.
        directories: The rack of each directory, by its id.
        first_partition: The number of the first partition; not 0 if a topic has some already.
        start: Where the round robin begins, and the first distance, as in Kafka's tests.
        rng: If given, chooses both at random instead.
        offline: Directories that cannot be written at present.

    Raises:
        InvalidPartitionsError: ``partitions`` is less than 1.
        InvalidReplicationFactorError: It is less than 1, or larger than the number of
            directories; or all directories are offline.

    >>> assign_replicas(4, 2, {0: "a", 1: "a", 2: "b", 3: "b"})
    {0: (0, 2), 1: (2, 1), 2: (1, 3), 3: (3, 0)}
    """
    if partitions < 1:
        raise InvalidPartitionsError(f"partitions must be at least 1, got {partitions}")
    if replication_factor < 1:
        raise InvalidReplicationFactorError(
            f"replication_factor must be at least 1, got {replication_factor}"
        )
    if replication_factor > len(directories):
        raise InvalidReplicationFactorError(
            f"replication_factor {replication_factor} is larger than the number of "
            f"directories, {len(directories)}",
            todo="Add a directory, or ask for fewer replicas.",
        )
    if all(directory in offline for directory in directories):
        raise InvalidReplicationFactorError(
            "All directories are offline", todo="Bring one of them back first."
        )
    order = alternate_racks(directories)
    leaders = [directory for directory in order if directory not in offline]
    shift = start
    if rng is not None:
        start, shift = rng.randrange(len(leaders)), rng.randrange(len(leaders))
    racks = len(set(directories.values()))
    assignment = {}
    for partition in range(first_partition, first_partition + partitions):
        leader = leaders[(partition + start) % len(leaders)]
        distance = (shift + partition // len(leaders)) * racks
        others = _others(order, leader, distance)
        followers = _followers(leader, others, directories, offline)
        assignment[partition] = (leader, *islice(followers, replication_factor - 1))
    return assignment


def alternate_racks(directories: Racks) -> list[int]:
    """Return the directories in an order in which racks alternate as long as possible.

    >>> alternate_racks({0: "rack1", 1: "rack3", 2: "rack3", 3: "rack2", 4: "rack2", 5: "rack1"})
    [0, 3, 1, 5, 4, 2]
    """
    by_rack: dict[str | None, list[int]] = {}
    for directory in sorted(directories):
        by_rack.setdefault(directories[directory], []).append(directory)
    racks = sorted(by_rack, key=lambda rack: (rack is not None, rack or ""))
    rounds = zip_longest(*(by_rack[rack] for rack in racks))
    return [directory for turn in rounds for directory in turn if directory is not None]


def _others(order: Sequence[int], leader: int, distance: int) -> list[int]:
    """Return all directories but the leader's, in a circle that begins at a distance from it."""
    if len(order) == 1:
        return []
    at = order.index(leader)
    others = [*order[at + 1 :], *order[:at]]
    turn = distance % len(others)
    return [*others[turn:], *others[:turn]]


def _followers(
    leader: int, others: list[int], directories: Racks, offline: Collection[int]
) -> Iterator[int]:
    """Yield the others, those in a rack without a replica first, and the offline ones last.

    The search for the next one continues in the circle where the last one was found.
    """
    missing = set(directories.values()) - {directories[leader]}
    while others:
        at = min(
            range(len(others)),
            key=lambda n: (
                bool(missing) and directories[others[n]] not in missing,
                others[n] in offline,
            ),
        )
        yield others[at]
        missing.discard(directories[others[at]])
        others = [*others[at + 1 :], *others[:at]]


P = TypeVar("P", bound=Hashable)

_SINK = -1
"""The node that the load of each directory flows to, at a cost that grows with the load."""


def reassign(current: Mapping[P, Sequence[int]], directories: Racks) -> dict[P, tuple[int, ...]]:
    """Return the new replicas of each partition that must change, the preferred leader first.

    Loads are counted over all partitions that are passed in: those of one topic, as Kafka
    does, or those of a whole log.  A replica that is replaced keeps its rank for the new one.

    Args:
        current: The replicas of each partition, all in these directories.
        directories: The rack of each directory; those that are new are to be filled.

    >>> reassign({"t-0": (1, 2), "t-1": (2, 1), "t-2": (1, 2)}, {1: None, 2: None, 3: None})
    {'t-0': (2, 3), 't-1': (3, 1)}
    """
    before = [tuple(replicas) for replicas in current.values()]
    moved = _Flow(before, [directories] * len(before), directories).optimize()
    ranked = map(_keep_ranks, before, moved)
    after = lead_evenly(dict(zip(current, ranked, strict=True)), directories)
    return {partition: new for partition, new in after.items() if new != tuple(current[partition])}


def lead_evenly(
    current: Mapping[P, Sequence[int]], directories: Racks, movable: Collection[P] | None = None
) -> dict[P, tuple[int, ...]]:
    """Return the replicas with preferred leaders as even as possible, by the fewest changes.

    Args:
        current: The replicas of each partition.
        directories: The directories.
        movable: The partitions whose leaders may change, by default all; the others only count.
    """
    replicas = [tuple(each) for each in current.values()]
    allowed = [
        each if movable is None or partition in movable else ()
        for partition, each in zip(current, replicas, strict=True)
    ]
    flow = _Flow([each[:1] for each in replicas], allowed, dict.fromkeys(directories))
    return dict(zip(current, map(_lead, replicas, flow.optimize()), strict=True))


def resize(
    current: Mapping[P, Sequence[int]], factors: Mapping[P, int], directories: Racks
) -> dict[P, tuple[int, ...]]:
    """Return the replicas of each partition, with more or fewer of them for some partitions.

    New ones are in other racks than those before, as far as there are any, and then where the
    fewest replicas are; the last ones are given up.

    Args:
        current: The replicas of each partition.
        factors: How many replicas to have, at most as many as there are directories.
        directories: The rack of each directory that may have replicas.

    >>> resize({"t-0": (1,), "t-1": (2, 1)}, {"t-0": 2, "t-1": 1}, {1: "a", 2: "a", 3: "b"})
    {'t-0': (1, 3), 't-1': (2,)}
    """
    loads = Counter(each for replicas in current.values() for each in replicas)
    resized = {}
    for partition, replicas in current.items():
        factor = factors.get(partition, len(replicas))
        chosen = list(replicas[:factor])
        while len(chosen) < factor:
            racks = {directories[each] for each in chosen if each in directories}
            new = min(
                directories.keys() - set(chosen),
                key=lambda each: (directories[each] in racks, loads[each], each),
            )
            loads[new] += 1
            chosen.append(new)
        resized[partition] = tuple(chosen)
    return resized


def _keep_ranks(before: tuple[int, ...], after: Collection[int]) -> tuple[int, ...]:
    """Order the replicas after a move: those that stay keep their ranks."""
    new = iter(sorted(set(after) - set(before)))
    return tuple(replica if replica in after else next(new) for replica in before)


def _lead(replicas: tuple[int, ...], leader: Sequence[int]) -> tuple[int, ...]:
    """Exchange the first replica with the one that becomes the preferred leader."""
    first = replicas[0]
    exchange = {first: leader[0], leader[0]: first}
    return tuple(exchange.get(replica, replica) for replica in replicas)


class _Flow:
    """What each partition has where, and the cheapest moves from each directory to each other.

    Args:
        before: The directories that each partition uses.
        allowed: The directories that it may use.
        directories: The rack of each directory that may be used at all.
    """

    def __init__(
        self,
        before: Sequence[Sequence[int]],
        allowed: Sequence[Collection[int]],
        directories: Racks,
    ) -> None:
        self._original = before
        self._allowed = allowed
        self._directories = directories
        self._used = [list(each) for each in before]
        self._loads = Counter(each for used in before for each in used)
        self._nodes = [_SINK, *sorted(directories)]
        self._edges: list[list[tuple[int, int]]] = []
        """The edges from each node, with their costs, as of when a search began."""
        total = self._loads.total()
        # Each of these outweighs all that the one before can add up to.
        self._uneven = total + 1
        self._rack = self._uneven * (total * total + 1)
        self._moves: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """By source and target, a heap of (cost, partition); outdated ones are left in it."""
        for partition in range(len(before)):
            for edge, cost in self._possible(partition):
                self._moves.setdefault(edge, []).append((cost, partition))
        for heap in self._moves.values():
            heapify(heap)

    def optimize(self) -> list[list[int]]:
        """Return the best assignment."""
        cancel_cycles(self, len(self._nodes))
        return self._used

    def starts(self) -> Iterable[int]:
        """As `Network.starts`: all nodes."""
        self._edges = [
            [
                (follower, cost)
                for follower, target in enumerate(self._nodes)
                if target != source and (cost := self._edge(source, target)) is not None
            ]
            for source in self._nodes
        ]
        return range(len(self._nodes))

    def moves_from(self, node: int, cost: int) -> Iterable[tuple[int, int]]:
        """As `Network.moves_from`."""
        return [(follower, cost + more) for follower, more in self._edges[node]]

    def move_along(self, cycle: Sequence[int]) -> bool:
        """As `Network.move_along`; as often as it helps, such as from a full directory to a new."""
        edges = list(pairwise(self._nodes[node] for node in (*cycle, cycle[0])))
        improved = False
        while self._apply(edges):
            improved = True
        return improved

    def _possible(self, partition: int) -> Iterator[tuple[tuple[int, int], int]]:
        """Yield the source and target of each move of a partition, with its cost."""
        for source in self._used[partition]:
            for target in self._allowed[partition]:
                cost = self._cost(partition, source, target)
                if cost is not None:
                    yield (source, target), cost

    def _cost(self, partition: int, source: int, target: int) -> int | None:
        """Return the cost of a move, less than 0 if it is for the better; None if impossible."""
        used, original, racks = self._used[partition], self._original[partition], self._directories
        if source not in used or target in used:
            return None
        others = [racks[each] for each in used if each != source]
        cost = (target not in original) - (source not in original)
        if racks[source] not in others:
            cost += self._rack
        return cost if racks[target] in others else cost - self._rack

    def _cheapest(self, source: int, target: int) -> tuple[int, int] | None:
        """Return the cost of the cheapest move between two directories, and its partition."""
        heap = self._moves.get((source, target), [])
        while heap:
            cost, partition = heap[0]
            if self._cost(partition, source, target) == cost:
                return cost, partition
            heappop(heap)
        return None

    def _edge(self, source: int, target: int) -> int | None:
        """Return the cost of the cheapest move, or of a load; None if there is none."""
        if source == _SINK:
            load = self._loads[target]
            return (1 - 2 * load) * self._uneven if load else None
        if target == _SINK:
            return (1 + 2 * self._loads[source]) * self._uneven
        cheapest = self._cheapest(source, target)
        return None if cheapest is None else cheapest[0]

    def _apply(self, cycle: Sequence[tuple[int, int]]) -> bool:
        """Make the moves of a cycle; if that is not for the better, undo them and return False.

        Two moves of one partition may cost more together than each one alone.
        """
        costs = [self._edge(*edge) for edge in cycle if _SINK in edge]
        moves: list[tuple[int, int, int]] = []
        for source, target in cycle:
            if _SINK in (source, target):
                continue
            cheapest = self._cheapest(source, target)
            costs.append(cheapest and cheapest[0])
            if cheapest is None:
                break
            moves.append((cheapest[1], source, target))
            self._move(*moves[-1])
        if None not in costs and sum(filter(None, costs)) < 0:
            return True
        for partition, source, target in reversed(moves):
            self._move(partition, target, source)
        return False

    def _move(self, partition: int, source: int, target: int) -> None:
        used = self._used[partition]
        used[used.index(source)] = target
        self._loads[source] -= 1
        self._loads[target] += 1
        for edge, cost in self._possible(partition):
            heappush(self._moves.setdefault(edge, []), (cost, partition))
