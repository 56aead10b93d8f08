"""Groups for tests: a clock for sessions that a test moves, members that crash, and rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from embedlog.assignor import Assignor, configured
from embedlog.config import TopicConfig
from embedlog.consumer import group_member as members
from embedlog.consumer.group_member import GroupMember, StartPosition
from embedlog.group import Group
from embedlog.groups import offsets, ownership
from embedlog.groups.ownership import NO_OWNER, PartitionOwner
from embedlog.partition import tail
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.root.root import Root

SESSION_MS = 1000
RANGE = configured(["range"])
STICKY = configured(["cooperative-sticky"])


class Uptime:
    """Milliseconds since boot, which only the test advances."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def advance(self, ms: int) -> None:
        self.now += ms


def make_topics(root: Root, **partitions: int) -> None:
    """Create topics, and open each partition, as its first reader does."""
    for name, count in partitions.items():
        root.create_topic(name, count, TopicConfig())
        for number in range(count):
            root.partition(name, number).tail()


def make_group(root: Root, name: str = "g", uptime: Callable[[], int] | None = None) -> Group:
    return Group(root.context, name, tail.ends, uptime=uptime or Uptime())


def join(group: Group, topics: Iterable[str] = ("t",), **options: Any) -> GroupMember:
    """Join with the range assignor and a session of one second, by default."""
    arguments = {"assignors": list(RANGE), "session_ms": SESSION_MS, **options}
    return members.join(group, topics, **arguments)


def follow(
    member: GroupMember, assignors: dict[str, Assignor] = RANGE, *, from_end: bool = False
) -> dict[TopicPartition, StartPosition]:
    """Carry out the assignment once: check, release, acquire; return what was acquired."""
    member.release(member.check_assignment(assignors).step.revoked)
    return member.acquire(from_end=from_end)


def complete_rebalance(*group_members: GroupMember, assignors: dict[str, Assignor] = RANGE) -> None:
    """Have members follow until no assignment changes any more."""
    for _ in range(20):
        for member in group_members:
            follow(member, assignors)
        if not any(
            member.changed() and member.check_assignment(assignors).step.added
            for member in group_members
        ):
            return
    raise AssertionError("the assignment keeps changing")


def crash(member: GroupMember) -> None:
    """Release a member's lock, as the kernel does for a process that was killed."""
    lock, member._lock = member._lock, None
    assert lock is not None
    member.group.context.files.close(lock)


def owner_rows(group: Group) -> dict[bytes, PartitionOwner]:
    """All ownership rows by key."""
    return group.context.live.read(lambda txn: dict(ownership.of_group(txn, group.key)))


def owners(group: Group) -> dict[TopicPartition, str]:
    """The owner of each partition, according to the rows."""
    rows = owner_rows(group).items()
    return {
        ownership.topic_partition(key, owner): owner.member
        for key, owner in rows
        if owner.member != NO_OWNER
    }


def positions(group: Group) -> dict[bytes, OffsetAndMetadata]:
    """Every committed position of this boot, by the key of its partition."""
    rows = group.context.live.read(lambda txn: offsets.of_group(txn, group.key))
    return {key: row.position for key, row in rows.items()}


def at(offset: int, partition: int = 0, topic: str = "t") -> dict[TopicPartition, Any]:
    """A position to commit, without metadata."""
    return {TopicPartition(topic, partition): OffsetAndMetadata(offset)}
