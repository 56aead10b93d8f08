"""The members of a group and their target assignment: one document per group.

Values only: no clock, no lock, no database.  `group` reads the document, takes one of
the steps below, and writes it back, all in one transaction.

A *target* is the assignment that a *generation* should reach; an assignor computes it.  The
rows of `ownership` have the current owners, which follow the target one partition at a
time.  When the members change, the target is out of date until the next member that
checks it computes a new target.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from embedlog import assignor as assignors
from embedlog import keyspace
from embedlog.errors import FencedInstanceIdError, GroupMaxSizeReachedError, UnknownMemberIdError
from embedlog.record import TopicPartition

CONSUMER, SHARE = "consumer", "share"
"""The kinds of groups: one member for each partition, or any number."""
CLASSIC, MODERN = "classic", "consumer"
"""Kafka's names for the protocols of its clients."""
IN_MEMORY = "(in the memory of a server)"
"""The only assignor of a member that stands for those of a group in the memory of a server."""
Topics = dict[str, tuple[int, int]]
"""Topic to its id, which a re-created one does not keep, and its number of partitions."""


class RemoteClient(NamedTuple):
    """What a group knows besides of a member that is a client of a server, not a process here.

    It holds no lock: it lives until the deadline of its session.
    """

    protocol: str
    """``CLASSIC``, ``MODERN`` for that of KIP-848, or ``SHARE`` for that of KIP-932."""
    host: str
    rack: str | None
    topics: tuple[str, ...]
    """The topics that it names; `MemberInfo.topics` has those that match its pattern, too."""
    pattern: str | None
    rebalance_ms: int
    """How long it may take to do what it is told."""


class MemberSession(NamedTuple):
    """How long a member lives, and how far a client of a server is."""

    deadline_ms: int
    """Since boot; no member is removed earlier."""
    due_ms: int = 0
    """When a client must have done what it was told, such as to give up partitions; 0 if it has."""
    epoch: int = 0
    """The generation whose assignment the client has."""
    previous_epoch: int = 0
    """The one before: the client may not have got the answer with the new one."""


class MemberInfo(NamedTuple):
    """What a group knows of a member."""

    id: str
    instance_id: str | None
    """The name of a static member, which outlives the process."""
    client_id: str
    pid: int
    lock: str
    """The file whose lock it holds for as long as it lives.  For a client servers do so while they
    have records of a share group: their files, with spaces between them; otherwise it is empty."""
    topics: tuple[str, ...]
    assignors: tuple[str, ...]
    """The names of the assignors that it supports, in order of preference."""
    session_ms: int
    """0 if only its lock says whether it lives."""
    joined_ms: int
    user_data: str | None = None
    """What it passes to a custom assignor; bytes as Latin-1, for JSON."""
    remote: RemoteClient | None = None
    """None of a process on the directory."""

    @property
    def where(self) -> str:
        """Where it runs, for messages."""
        return f"process {self.pid}" if self.remote is None else f"client at {self.remote.host}"

    @property
    def stands_for_others(self) -> bool:
        """Whether it only keeps others out of the group."""
        return self.assignors == (IN_MEMORY,)

    @property
    def subscription(self) -> tuple[object, ...]:
        """What the target depends on."""
        return self.topics, self.assignors, self.user_data


def _type_of(members: Iterable[MemberInfo]) -> str:
    """Return the type of a group: clients with the protocol of KIP-848 make it one of that type."""
    clients = (info.remote for info in members)
    is_modern = any(client is not None and client.protocol == MODERN for client in clients)
    return MODERN if is_modern else CLASSIC


class Membership:
    """One group, as of one transaction.

    Args:
        fields: Its attributes; by default those of a group that has never had a member.
    """

    def __init__(self, **fields: Any) -> None:
        self.kind = CONSUMER
        self.version = 0
        """Grows with every change, also of owners; see `touch`."""
        self.generation = 0
        """The number of the target; grows with every target while the group exists.  That of a
        share group grows when a client asks after a change, as all have all partitions."""
        self.target_is_current = True
        """Whether the target was made for the current members and topics."""
        self.assignor: str | None = None
        self.members: dict[str, MemberInfo] = {}
        """By id, in the order they joined; the first is what Kafka calls the leader."""
        self.target: dict[str, tuple[TopicPartition, ...]] = {}
        self.topics: Topics = {}
        """The topics as of the target."""
        self.newest: int | None = None
        """The highest topic id when the group, empty until then, got its first target."""
        self.began: dict[str, int] = {}
        """The number of partitions of each topic when the group first read it."""
        self.emptied_ms = 0
        """When the last member left."""
        self.last_type = CLASSIC
        """What the members were when they left, by `type`."""
        vars(self).update(fields)

    # Steps

    def touch(self) -> None:
        """Make all members check the group again."""
        self.version += 1

    def become(self, kind: str) -> None:
        """Change the kind of a group without members and offsets."""
        self.kind = kind

    def admit(self, member: MemberInfo, max_members: int | None = None) -> MemberInfo | None:
        """Add a member; return the member with the same instance id that it replaces.

        Raises:
            InconsistentGroupProtocolError: It has no assignor in common with the others.
            GroupMaxSizeReachedError: The group has ``max_members`` members already.
        """
        replaced = self._instance(member.instance_id)
        others = {
            other.id: other.assignors for other in self.members.values() if other is not replaced
        }
        assignors.select_assignor(others | {member.id: member.assignors})
        self.touch()
        if replaced is not None:
            ids = {replaced.id: member.id}
            self.members = {
                ids.get(id_, id_): member if info is replaced else info
                for id_, info in self.members.items()
            }
            self.target = {ids.get(id_, id_): assigned for id_, assigned in self.target.items()}
            # With the same subscription it gets the same partitions: no other member notices.
            self.target_is_current &= replaced.subscription == member.subscription
            return replaced
        if max_members is not None and len(others) >= max_members:
            raise GroupMaxSizeReachedError(
                f"The group already has {max_members} members, its limit"
            )
        self.members[member.id] = member
        self.target_is_current = False
        return None

    def _instance(self, instance_id: str | None) -> MemberInfo | None:
        if instance_id is None:
            return None
        members = (info for info in self.members.values() if info.instance_id == instance_id)
        return next(members, None)

    def remove(self, ids: Collection[str], now_ms: int) -> list[MemberInfo]:
        """Remove members, and return those that were in the group."""
        removed = [self.members.pop(member) for member in ids if member in self.members]
        for member in removed:
            self.target.pop(member.id, None)
        if removed:
            self.touch()
            self.target_is_current = False
            if not self.members:
                # The target of an empty group is a separate generation (M2).
                self.set_target(None, {}, {}, 0)
                self.newest, self.began, self.emptied_ms = None, {}, now_ms
                self.last_type = _type_of(removed)
        return removed

    def resubscribe(self, member: str, topics: Iterable[str]) -> None:
        """Change what a member subscribes to."""
        self.change(self.members[member]._replace(topics=tuple(sorted(topics))))

    def change(self, member: MemberInfo) -> None:
        """Replace what is known of a member.

        Raises:
            InconsistentGroupProtocolError: It has no assignor in common with the others.
        """
        before = self.members[member.id]
        if before == member:
            return
        if before.assignors != member.assignors:
            lists = {other.id: other.assignors for other in self.members.values()}
            assignors.select_assignor(lists | {member.id: member.assignors})
        self.touch()
        self.members[member.id] = member
        self.target_is_current &= before.subscription == member.subscription

    def notice(self, topics: Topics) -> None:
        """Request a new target if the subscribed topics are not those of the target."""
        if self.target_is_current and topics != self.topics:
            self.touch()
            self.target_is_current = False

    def set_target(
        self,
        name: str | None,
        topics: Topics,
        target: dict[str, tuple[TopicPartition, ...]],
        newest: int,
    ) -> None:
        """Set a new target, made when ``newest`` was the highest topic id."""
        self.touch()
        self.generation += 1
        self.assignor, self.topics, self.target = name, topics, target
        self._note_begin(topics, newest)
        self.target_is_current = True

    def count(self) -> None:
        """Count a client with epochs that is about to join.

        As in Kafka, a group begins with the epoch 1, and each of two that join at once counts.
        """
        self.generation = max(self.generation + (not self.target_is_current), 1)

    def assign_all(self) -> None:
        """Have the members of a share group assigned all partitions of their topics."""
        if not self.target_is_current:
            self.touch()
            self.generation += 1
            self.target_is_current = True

    def begin(self, topics: Topics, newest: int) -> None:
        """Note the topics of a share group, when ``newest`` was the highest topic id."""
        if topics != self.topics:
            self.touch()
            self.topics, self.target_is_current = topics, False
            self._note_begin(topics, newest)

    def _note_begin(self, topics: Topics, newest: int) -> None:
        self.newest = newest if self.newest is None else self.newest
        for topic, (_, count) in topics.items():
            self.began.setdefault(topic, count)

    # Questions

    @property
    def type(self) -> str:
        """Kafka's name for the type of the group, which it keeps without members."""
        if self.kind == SHARE:
            return SHARE
        return _type_of(self.members.values()) if self.members else self.last_type

    def came_later(self, partition: TopicPartition) -> bool:
        """Whether a partition was created while the group was reading: it must read all of it."""
        topic_id, count = self.topics[partition.topic][0], self.began.get(partition.topic)
        new = self.newest is not None and topic_id > self.newest
        return new or (count is not None and partition.partition >= count)

    @property
    def subscribed(self) -> set[str]:
        """Every topic that a member subscribes to."""
        return set().union(*(member.topics for member in self.members.values()))

    def candidates(self) -> list[assignors.Member]:
        """Return the members as an assignor sees them.

        Each owns what the last target assigned to it, whether it has taken that yet or not:
        a change during a rebalance must not undo the moves under way.
        """
        return [
            assignors.Member(
                member.id,
                frozenset(member.topics),
                owned=frozenset(self.target.get(member.id, ())),
                generation=self.generation if member.id in self.target else -1,
                instance_id=member.instance_id,
                user_data=None if member.user_data is None else member.user_data.encode("latin-1"),
            )
            for member in self.members.values()
        ]

    def check_member(self, member: str, instance_id: str | None, group: str) -> None:
        """Raise unless ``member`` is still in the group.

        Raises:
            FencedInstanceIdError: Another member took over its instance id.
            UnknownMemberIdError: It was removed: silent for too long, or by an administrator.
        """
        if member in self.members:
            return
        other = self._instance(instance_id)
        if other is not None:
            raise FencedInstanceIdError(
                f"Another member, {other.where}, took over the group_instance_id {instance_id!r}",
                group=group,
                member=member,
                todo="Give each running member a different group_instance_id.",
            )
        raise UnknownMemberIdError(
            "This member was removed from the group",
            group=group,
            member=member,
            todo="Poll to join the group again, as a new member.",
        )

    # As stored

    def to_fields(self) -> dict[str, Any]:
        """Return the document, for JSON."""
        fields = dict(vars(self))
        fields["members"] = list(self.members.values())
        fields["target"] = {
            member: {
                topic: [tp.partition for tp in group]
                for topic, group in groupby(sorted(partitions), attrgetter("topic"))
            }
            for member, partitions in self.target.items()
        }
        return fields


def from_fields(fields: dict[str, Any]) -> Membership:
    """Return the group of a document."""
    members = [_member(MemberInfo._make(row)) for row in fields["members"]]
    return Membership(
        **fields
        | {
            "members": {info.id: info for info in members},
            "topics": {topic: tuple(facts) for topic, facts in fields["topics"].items()},
            "target": {
                member: tuple(TopicPartition(topic, n) for topic, ns in topics.items() for n in ns)
                for member, topics in fields["target"].items()
            },
        }
    )


def _member(stored: MemberInfo) -> MemberInfo:
    """Return a member of a document, whose lists JSON has for tuples."""
    remote = stored.remote and RemoteClient._make(stored.remote)
    return stored._replace(
        topics=tuple(stored.topics),
        assignors=tuple(stored.assignors),
        remote=remote and remote._replace(topics=tuple(remote.topics)),
    )


SESSIONS = keyspace.MEMBER_SESSIONS.typed(MemberSession)
GROUPS = keyspace.GROUPS.typed(from_fields, lambda group: (group.to_fields(),))
