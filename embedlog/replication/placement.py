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
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from typing import TypeAlias

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
    _check(replication_factor, directories, offline)
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


def _check(replication_factor: int, directories: Racks, offline: Collection[int]) -> None:
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
