"""Who is in a group and what each should own: one document per group (M1-M17).

Values only: no clock, no lock, no database.  `group` reads the document, takes
one of the steps below, and writes it back, all in one transaction.

A *target* says who should own what; it belongs to a *generation* and is made
by an assignor.  Who does own what is told by the rows of `group`, which follow
the target one partition at a time.  While the members changed since the target
was made, the group is not *settled*, and whichever member looks next makes a
new one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from embedlog import assignor as assignors
from embedlog.errors import FencedInstanceIdError, GroupMaxSizeReachedError, UnknownMemberIdError
from embedlog.record import TopicPartition

LOCKS = "locks/member-"
"""How the path of a member's lock begins."""

Topics = dict[str, tuple[int, int]]
"""Topic to its id, which a re-created one does not keep, and how many partitions it has."""


class MemberInfo(NamedTuple):
    """What a group knows of a member."""

    id: str
    instance_id: str | None
    """The name of a static member, which outlives the process (M13)."""
    client_id: str
    pid: int
    lock: str
    """The file whose lock it holds for as long as it lives."""
    topics: tuple[str, ...]
    assignors: tuple[str, ...]
    """The names of those it can use, best first (M5)."""
    session_ms: int
    joined_ms: int
    user_data: str | None = None
    """What it tells an assignor of its user's own; bytes as Latin-1, for JSON."""

    @property
    def wish(self) -> tuple[object, ...]:
        """What the target depends on."""
        return self.topics, self.assignors, self.user_data


@dataclass(slots=True)
class Membership:
    """One group, as of one transaction."""

    version: int = 0
    """Grows with every change, also of who owns what: each step adds to it (`touch`)."""
    generation: int = 0
    """Which target this is; grows with each, as long as the group is there (M2)."""
    settled: bool = True
    """Whether the target was made for the members and topics as they are."""
    assignor: str | None = None
    members: dict[str, MemberInfo] = field(default_factory=dict)
    """By id, in the order they joined; the first is what Kafka calls the leader (M3)."""
    target: dict[str, tuple[TopicPartition, ...]] = field(default_factory=dict)
    topics: Topics = field(default_factory=dict)
    """The topics as they were when the target was made."""
    newest: int | None = None
    """The id of the last topic that was there when the group, then empty, got its first target."""
    began: dict[str, int] = field(default_factory=dict)
    """How many partitions each topic had when the group first read it."""
    emptied_ms: int = 0
    """When the last member left (M15)."""

    # Steps

    def touch(self) -> None:
        """Have everybody look again."""
        self.version += 1

    def admit(self, member: MemberInfo, most: int | None = None) -> MemberInfo | None:
        """Add a member; return the one with its instance id, whose place it takes (M13).

        Raises:
            InconsistentGroupProtocolError: It has no assignor in common with the others (M5).
            GroupMaxSizeReachedError: There are ``most`` members already (M12).
        """
        before = self._instance(member.instance_id)
        others = {each.id: each.assignors for each in self.members.values() if each is not before}
        assignors.select_assignor(others | {member.id: member.assignors})
        self.touch()
        if before is not None:
            self._succeed(before, member)
            return before
        if most is not None and len(others) >= most:
            raise GroupMaxSizeReachedError(f"the group has {most} members, the most it may have")
        self.members[member.id] = member
        self.settled = False
        return None

    def _succeed(self, before: MemberInfo, member: MemberInfo) -> None:
        renamed = {before.id: member.id}
        self.members = {
            renamed.get(each, each): member if each == before.id else info
            for each, info in self.members.items()
        }
        self.target = {renamed.get(each, each): given for each, given in self.target.items()}
        # With the same wish it gets the same partitions: nobody else notices.
        self.settled &= before.wish == member.wish

    def _instance(self, instance_id: str | None) -> MemberInfo | None:
        if instance_id is None:
            return None
        return next(
            (each for each in self.members.values() if each.instance_id == instance_id), None
        )

    def remove(self, ids: Collection[str], now_ms: int) -> list[MemberInfo]:
        """Take members out, and return those of them that were in."""
        gone = [self.members.pop(each) for each in ids if each in self.members]
        for each in gone:
            self.target.pop(each.id, None)
        if gone:
            self.touch()
            self.settled = False
            if not self.members:
                self._empty(now_ms)
        return gone

    def _empty(self, now_ms: int) -> None:
        """Nobody is there, so the target of nobody is made (M2: as a generation of its own)."""
        self.settle("", {}, {}, 0)
        self.newest, self.began = None, {}
        self.assignor, self.emptied_ms = None, now_ms

    def resubscribe(self, member: str, topics: Iterable[str]) -> None:
        """Note what a member subscribes to now."""
        info = self.members[member]
        wanted = tuple(sorted(topics))
        if info.topics != wanted:
            self.touch()
            self.members[member] = info._replace(topics=wanted)
            self.settled = False

    def notice(self, topics: Topics) -> None:
        """Note how the subscribed topics are now: others than before need a new target (M16)."""
        if self.settled and topics != self.topics:
            self.touch()
            self.settled = False

    def settle(
        self,
        name: str,
        topics: Topics,
        target: dict[str, tuple[TopicPartition, ...]],
        newest: int,
    ) -> None:
        """Take a new target, made when the newest topic of all had that id."""
        self.touch()
        self.generation += 1
        self.assignor, self.topics, self.target = name, topics, target
        self.newest = newest if self.newest is None else self.newest
        for topic, (_, count) in topics.items():
            self.began.setdefault(topic, count)
        self.settled = True

    # Questions

    def came_later(self, one: TopicPartition) -> bool:
        """Whether a partition came while the group was reading: all in it came after it began."""
        number, count = self.topics[one.topic][0], self.began.get(one.topic)
        new = self.newest is not None and number > self.newest
        return new or (count is not None and one.partition >= count)

    @property
    def subscribed(self) -> set[str]:
        """Every topic that a member wants."""
        return set().union(*(each.topics for each in self.members.values()))

    def candidates(self) -> list[assignors.Member]:
        """Return the members as an assignor sees them.

        Each owns what the last target gave it, whether it has that yet or not: a
        change in the middle of a move must not undo what is under way.
        """
        return [
            assignors.Member(
                each.id,
                frozenset(each.topics),
                owned=frozenset(self.target.get(each.id, ())),
                generation=self.generation if each.id in self.target else -1,
                instance_id=each.instance_id,
                user_data=None if each.user_data is None else each.user_data.encode("latin-1"),
            )
            for each in self.members.values()
        ]

    def check_member(self, member: str, instance_id: str | None, group: str) -> None:
        """Raise unless somebody is still a member.

        Raises:
            FencedInstanceIdError: Another one took its instance id (M13).
            UnknownMemberIdError: It was removed: silent for too long, or by an administrator.
        """
        if member in self.members:
            return
        other = self._instance(instance_id)
        if other is not None:
            raise FencedInstanceIdError(
                f"another member, process {other.pid}, took over the group_instance_id "
                f"{instance_id!r}",
                group=group,
                member=member,
                todo="give each running member a group_instance_id of its own",
            )
        raise UnknownMemberIdError(
            "the group does not have this member any more",
            group=group,
            member=member,
            todo="poll: that joins it again, as a new member",
        )

    # As stored

    def pack(self) -> bytes:
        """Return the document as JSON."""
        told: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        told["members"] = list(self.members.values())
        told["target"] = {each: _by_topic(given) for each, given in self.target.items()}
        return json.dumps(told, separators=(",", ":")).encode()


def unpack(row: bytes) -> Membership:
    """Return a stored document."""
    told: dict[str, Any] = json.loads(row)
    members = [_info(each) for each in told["members"]]
    told["members"] = {each.id: each for each in members}
    told["topics"] = {name: (each[0], each[1]) for name, each in told["topics"].items()}
    told["target"] = {
        each: tuple(TopicPartition(topic, n) for topic, ns in given.items() for n in ns)
        for each, given in told["target"].items()
    }
    return Membership(**told)


def _info(row: list[Any]) -> MemberInfo:
    info = MemberInfo._make(row)
    return info._replace(topics=tuple(info.topics), assignors=tuple(info.assignors))


def _by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for topic, partition in partitions:
        found.setdefault(topic, []).append(partition)
    return found
