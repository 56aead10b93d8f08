"""Groups for tests: a clock for sessions that a test moves, members that crash, and rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from embedlog.assignor import Assignor, configured
from embedlog.config import TopicConfig
from embedlog.group import Group
from embedlog.groups import member, offsets, ownership
from embedlog.groups.member import GroupMember, StartPosition
from embedlog.groups.ownership import NOBODY, PartitionOwner
from embedlog.partition import tail
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.root.root import Root

SESSION_MS = 1000
RANGE = configured(["range"])
STICKY = configured(["cooperative-sticky"])


class Uptime:
    """Milliseconds since boot, which only a test lets go by."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def advance(self, ms: int) -> None:
        self.now += ms


def make_topics(root: Root, **partitions: int) -> None:
    """Create topics, and find the end of each partition, as a first reader would."""
    for name, count in partitions.items():
        root.create_topic(name, count, TopicConfig())
        for number in range(count):
            root.partition(name, number).tail()


def make_group(root: Root, name: str = "g", uptime: Callable[[], int] | None = None) -> Group:
    return Group(root.context, name, tail.ends, uptime=uptime or Uptime())


def join(group: Group, topics: Iterable[str] = ("t",), **options: Any) -> GroupMember:
    """Join with the range assignor and a session of one second, unless told otherwise."""
    chosen = {"assignors": list(RANGE), "session_ms": SESSION_MS, **options}
    return member.join(group, topics, **chosen)


def follow(
    one: GroupMember, assignors: dict[str, Assignor] = RANGE, *, from_end: bool = False
) -> dict[TopicPartition, StartPosition]:
    """Do what the group asks for, once: look, release, take; returns what was taken."""
    one.release(one.look(assignors).step.revoked)
    return one.take(from_end=from_end)


def settle(*members: GroupMember, assignors: dict[str, Assignor] = RANGE) -> None:
    """Have members follow until nothing happens any more."""
    for _ in range(20):
        for one in members:
            follow(one, assignors)
        if not any(one.changed() and one.look(assignors).step.added for one in members):
            return
    raise AssertionError("the group does not settle")


def crash(one: GroupMember) -> None:
    """Let go of a member's lock, as the kernel does for a process that was killed."""
    lock, one._lock = one._lock, None
    assert lock is not None
    one.group.shared.files.close(lock)


def owner_rows(group: Group) -> dict[bytes, PartitionOwner]:
    """Every row of who owns what, by key."""
    return group.shared.live.read(lambda txn: dict(ownership.of_group(txn, group.key)))


def owners(group: Group) -> dict[TopicPartition, str]:
    """Who owns what, by the rows."""
    rows = owner_rows(group).items()
    return {
        ownership.where(key, owner): owner.member for key, owner in rows if owner.member != NOBODY
    }


def positions(group: Group) -> dict[bytes, OffsetAndMetadata]:
    """Every committed position of this boot, by the key of its partition."""
    rows = group.shared.live.read(lambda txn: offsets.of_group(txn, group.key))
    return {key: row.position for key, row in rows.items()}


def at(offset: int, partition: int = 0, topic: str = "t") -> dict[TopicPartition, Any]:
    """A position to commit, without a note."""
    return {TopicPartition(topic, partition): OffsetAndMetadata(offset)}
