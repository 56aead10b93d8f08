"""Consumer groups without a coordinator: every step is one transaction of a member.

A group is rows in `live`: its document (`membership`), the deadline of each
member's session, the owner of each partition (`ownership`), and the committed
positions (`offsets`).  What a coordinator would do next, the member that looks
next does: it removes the dead, has the target made, and takes what is free of
what is meant for it.

No partition has two owners: it is taken only where its row says that nobody
has it, released only by its owner, and taken from an owner only together with
its membership.  A commit is checked against that row in the transaction that
writes it, so that one of an owner which was stopped, and overtaken, never
lands (M22).

Death is seen by the kernel: each member holds the lock of a file of its own.
A member that is silent for longer than its session is removed as well, by the
clock that goes on while a machine sleeps (CLOCK_BOOTTIME).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from embedlog import assignor, kv
from embedlog.assignor import Assignor
from embedlog.catalog import Catalog, TopicInfo
from embedlog.errors import (
    CommitFailedError,
    GroupIdNotFoundError,
    GroupMaxSizeReachedError,
    GroupSubscribedToTopicError,
    InconsistentGroupProtocolError,
    NonEmptyGroupError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.files import Files, WakePage
from embedlog.groups import membership, offsets, ownership
from embedlog.groups.membership import GROUPS, MemberInfo, Membership
from embedlog.groups.offsets import COMMITTED, CommittedOffset, Ends
from embedlog.groups.ownership import NOWHERE, OWNERS
from embedlog.keyspace import GROUP_VERSIONS, MEMBER_DEADLINES, PARTITION_KEY
from embedlog.record import OffsetAndMetadata, TopicPartition

T = TypeVar("T")
Step = Callable[[kv.Txn, Membership], T]
Partitions = Iterable[TopicPartition]
Positions = Mapping[TopicPartition, OffsetAndMetadata]

_REFUSALS = (
    CommitFailedError,
    GroupMaxSizeReachedError,
    GroupSubscribedToTopicError,
    InconsistentGroupProtocolError,
    NonEmptyGroupError,
)
"""What a step raises that members are in the way of."""


class GroupContext(Protocol):
    """What a group needs of an open log."""

    files: Files
    state: kv.Store
    live: kv.Store
    catalog: Catalog
    wake: WakePage
    durability: str

    @property
    def clock(self) -> Callable[[], int]:
        """Return milliseconds since 1970."""


@dataclass(frozen=True, slots=True)
class GroupSnapshot:
    """A group in one instant, for whoever looks at it from outside."""

    group: str
    state: str
    """As Kafka names it: Empty, PreparingRebalance, CompletingRebalance or Stable (M1)."""
    generation: int
    assignor: str | None
    members: tuple[MemberInfo, ...]
    owners: dict[TopicPartition, str]
    """Member ids."""
    committed: dict[TopicPartition, CommittedOffset]
    ends: dict[TopicPartition, tuple[int, int]]
    """Start and end of each partition that is owned or has a position, where known."""


class Group:
    """One consumer group of one open log.

    Args:
        shared: The log's context.
        name: The group's id.
        ends: Where a partition starts and ends, from a transaction of `live`.
        uptime: Milliseconds since boot, by a clock that nobody sets.

    Raises:
        InvalidGroupIdError: It cannot be a name.
    """

    def __init__(
        self, shared: GroupContext, name: str, ends: Ends, uptime: Callable[[], int] | None = None
    ) -> None:
        self.name, self.key = name, offsets.check_group_id(name)
        self.shared, self.ends = shared, ends
        self.uptime = uptime or shared.files.uptime_ms
        self._document, self._version = GROUPS.key(self.key), GROUP_VERSIONS.key(self.key)

    # Members

    def admit(
        self, txn: kv.Txn, group: Membership, info: MemberInfo, most: int | None = None
    ) -> MemberInfo | None:
        """Let a member in, in the place of one of the same instance id; see `Membership.admit`."""
        before = group.admit(info, most)
        if before is not None:
            MEMBER_DEADLINES.delete(txn, self.key, before.id)
            ownership.hand_over(txn, self.key, before.id, info.id)
        self.put_deadline(txn, info)
        return before

    def put_deadline(self, txn: kv.Txn, info: MemberInfo) -> None:
        """Note that a member lives: its session begins anew."""
        deadline_ms = self.uptime() + info.session_ms
        MEMBER_DEADLINES.put(txn, self.key, info.id, value=deadline_ms)

    def lives(self, txn: kv.Txn, info: MemberInfo) -> bool:
        """Whether a member is still one."""
        return MEMBER_DEADLINES.exists(txn, self.key, info.id)

    def document(self, txn: kv.Txn) -> Membership:
        """Return the group, in a transaction."""
        return GROUPS.get(txn, self.key) or Membership()

    # Looking

    def read(self) -> Membership:
        """Return the group as it is now."""
        return self.document(self.shared.live)

    def version(self) -> int:
        """A number that grows whenever anything about members or owners changes."""
        row = self.shared.live.get(self._version)
        return 0 if row is None else GROUP_VERSIONS.unpack(row)

    def snapshot(self) -> GroupSnapshot:
        """Return everything about the group, as of one instant; members that died do not count.

        Changes nothing: whoever has to do with the group next removes them.

        Raises:
            GroupIdNotFoundError: There is no such group.
        """
        topics, saved = self.shared.catalog.topics(), self._saved()
        now, dead = self.uptime(), self._dead()

        def step(txn: kv.Txn) -> GroupSnapshot | None:
            group = GROUPS.get(txn, self.key)
            rows = saved if group is None else offsets.of_group(txn, self.key)
            if group is None and not rows:
                return None
            group = group or Membership()
            group.remove(dead | self._silent(now, txn), self.shared.clock())
            return self._snapshot(txn, group, rows, topics)

        found = self.shared.live.read(step)
        if found is None:
            raise GroupIdNotFoundError(
                "there is no such group", group=self.name, todo="see `embedlog groups list`"
            )
        return found

    def _snapshot(
        self,
        txn: kv.Txn,
        group: Membership,
        rows: Mapping[bytes, CommittedOffset],
        topics: Mapping[str, TopicInfo],
    ) -> GroupSnapshot:
        names = {info.id: name for name, info in topics.items()}
        committed: dict[TopicPartition, CommittedOffset] = {}
        for key, row in rows.items():
            number, partition = PARTITION_KEY.unpack(key)
            if number in names:
                committed[TopicPartition(names[number], partition)] = row
        owners = {
            ownership.where(row_key, owner): owner.member
            for row_key, owner in ownership.of_group(txn, self.key)
            if owner.member in group.members and ownership.topic_id(row_key) in names
        }
        ends = {
            one: self.ends(txn, topics[one.topic].key(one.partition))
            for one in sorted(committed.keys() | owners.keys())
            if one.topic in topics
        }
        return GroupSnapshot(
            group=self.name,
            state=_state(group, owners),
            generation=group.generation,
            assignor=group.assignor,
            members=tuple(group.members.values()),
            owners=dict(sorted(owners.items())),
            committed=dict(sorted(committed.items())),
            ends={one: known for one, known in ends.items() if known is not None},
        )

    # Housekeeping, done by whoever is there

    def settle(self, assignors: Mapping[str, Assignor]) -> None:
        """Have a target made, if the members or their topics are not those it was made for.

        The assignor runs outside of any transaction, for it may be slow, or the
        user's own; if the group changes meanwhile, it runs again.

        Raises:
            AssignorError: It failed; the group stays as it is.
        """
        while not (group := self.read()).settled:
            known = self.shared.catalog.topics()
            topics = _wanted(group, known)
            name = assignor.choose({each.id: each.assignors for each in group.members.values()})
            if name not in assignors:
                return  # who asks is no member any more, and is told so next
            counts = {topic: count for topic, (_, count) in topics.items()}
            target = assignor.target(assignors[name], counts, group.candidates())
            there = {info.id for info in known.values()}
            self.change(partial(self._settle, group.version, name, topics, target, there))

    def _settle(
        self,
        version: int,
        name: str,
        topics: membership.Topics,
        target: assignor.Assignment,
        there: set[int],
        txn: kv.Txn,
        group: Membership,
    ) -> None:
        if group.version == version:
            group.settle(name, topics, target, max(there, default=0))
            ownership.forget(txn, self.key, {number for number, _ in topics.values()}, there)

    def notice_topics(self) -> None:
        """Look whether the topics of the members are still those that the target was made for."""
        group = self.read()
        topics = _wanted(group, self.shared.catalog.topics())
        if group.settled and topics != group.topics:
            self.change(lambda txn, now: now.notice(topics))

    def sweep(self, but: str | None = None) -> list[str]:
        """Remove members that died, or were silent for longer than their session (M8, M10).

        A static member stays until its session is over even if its process
        died: that is what its name is for (M13).

        Args:
            but: One that is known to live.

        Returns:
            The ids of those that were removed.
        """
        now, members = self.uptime(), self.read().members.values()
        dead = {each.id for each in members if each.id != but and self._is_dead(each)}
        if not dead and not self.shared.live.read(partial(self._silent, now)) - {but}:
            return []

        def step(txn: kv.Txn, group: Membership) -> list[MemberInfo]:
            return self._remove((dead | self._silent(now, txn)) - {but}, txn, group)

        return self._drop_locks(self.change(step))

    def _silent(self, now: int, txn: kv.Txn) -> set[str]:
        """Return the members whose session is over."""
        deadlines = MEMBER_DEADLINES.scan(txn, self.key)
        return {member for (_, member), deadline_ms in deadlines if deadline_ms <= now}

    def _dead(self) -> set[str]:
        """Return the members that let go of their locks."""
        return {each.id for each in self.read().members.values() if self._is_dead(each)}

    def _is_dead(self, member: MemberInfo) -> bool:
        """Whether a dynamic member let go of the lock that it holds for life."""
        if member.instance_id is not None:
            return False
        files = self.shared.files
        try:
            lock = files.open(member.lock)
        except StorageError as error:
            return error.missing
        try:
            # Shared: those who look at the same time do not take each other for the member.
            return files.try_lock(lock, shared=True)
        finally:
            files.close(lock)

    def _drop_locks(self, removed: Iterable[MemberInfo]) -> list[str]:
        ids = []
        for each in removed:
            self.drop_lock(each.lock)
            ids.append(each.id)
        return ids

    def drop_lock(self, path: str) -> None:
        """Remove the file of a member that is gone."""
        self.shared.files.unlink(path, missing_ok=True)

    def remove_members(self, ids: Collection[str]) -> list[str]:
        """Take members out; their partitions go to the others.  Returns who was in."""
        return self._drop_locks(self.change(partial(self._remove, ids)))

    def _remove(self, ids: Collection[str], txn: kv.Txn, group: Membership) -> list[MemberInfo]:
        gone = group.remove(ids, self.shared.clock())
        for each in gone:
            MEMBER_DEADLINES.delete(txn, self.key, each.id)
        if gone:
            freed = {each.id for each in gone}
            ownership.free(txn, self.key, freed, forget_start=not group.members)
        return gone

    # Positions

    def committed(self, partitions: Partitions) -> dict[TopicPartition, CommittedOffset | None]:
        """Return what was committed last for each; None where nothing was (E4).

        Raises:
            UnknownTopicOrPartitionError: There is no such partition.
        """
        keys = {one: self.partition_key(one) for one in partitions}
        saved = self._saved()

        def step(txn: kv.Txn) -> dict[TopicPartition, CommittedOffset | None]:
            if txn.get(self._document) is None:
                return {one: saved.get(key) for one, key in keys.items()}
            return {one: COMMITTED.get(txn, self.key, key) for one, key in keys.items()}

        return self.shared.live.read(step)

    def commit(self, positions: Positions) -> None:
        """Commit without being a member, which only an empty group lets anybody do (M14).

        Raises:
            CommitFailedError: The group has members.
            ValueError, OffsetMetadataTooLargeError: Nothing was committed.
        """
        rows = self.rows(positions)

        def step(txn: kv.Txn, group: Membership) -> None:
            if group.members:
                raise CommitFailedError(
                    f"the group has {len(group.members)} members, and this consumer is none",
                    group=self.name,
                    todo="subscribe, or use a group_id of its own",
                )
            offsets.put(txn, self.key, rows)

        self.insist(step)
        self.save()

    def rows(self, positions: Positions) -> dict[bytes, CommittedOffset]:
        """Return positions as they are stored, by partition key.

        Raises:
            ValueError, OffsetMetadataTooLargeError: See `offsets.check`.
        """
        now = self.shared.clock()
        for position in positions.values():
            offsets.check(position)
        # Each topic is looked up once: that was a third of a commit of four partitions.
        topics = {name: self.shared.catalog.topic(name) for name in {one[0] for one in positions}}
        return {
            _key_in(topics[one.topic], one): CommittedOffset(position, now)
            for one, position in positions.items()
        }

    def save(self, *, always: bool = False) -> None:
        """Let commits survive a power cut: if that is the log's durability, or ``always``."""
        if always or self.shared.durability == "fsync":
            offsets.checkpoint(self.shared.live, self.shared.state)

    # Administration

    def reset(self, positions: Positions) -> None:
        """Commit in the place of a group that nobody is in; durable when this returns.

        Raises:
            NonEmptyGroupError: It has members, which would not notice.
        """
        rows = self.rows(positions)

        def step(txn: kv.Txn, group: Membership) -> None:
            self.check_empty(group.members.values(), "reset its offsets")
            offsets.put(txn, self.key, rows)

        self.insist(step)
        self.save(always=True)

    def delete_offsets(self, partitions: Partitions) -> None:
        """Forget what was committed for partitions, durably.

        Raises:
            GroupSubscribedToTopicError: A member reads the topic.
        """
        wanted = list(partitions)
        keys = list(map(self.partition_key, wanted))

        def step(txn: kv.Txn, group: Membership) -> None:
            read = sorted({one.topic for one in wanted} & group.subscribed)
            if read:
                raise GroupSubscribedToTopicError(
                    f"members of the group read {', '.join(read)}",
                    group=self.name,
                    todo="close them first",
                )
            self._forget(txn, keys)

        self.insist(step)
        self.save(always=True)

    def _forget(self, txn: kv.Txn, keys: Iterable[bytes]) -> None:
        """Drop positions, and where a reader of the end began."""
        for key in keys:
            offsets.remove(txn, self.key, [key])
            owner = OWNERS.get(txn, self.key, key)
            if owner is not None and owner.start != NOWHERE:
                OWNERS.put(txn, self.key, key, value=owner._replace(start=NOWHERE))

    def delete(self) -> None:
        """Forget the group and all it committed.

        Raises:
            NonEmptyGroupError: It has members.
            GroupIdNotFoundError: There is none.
        """
        self.snapshot()

        def step(txn: kv.Txn, group: Membership) -> None:
            self.check_empty(group.members.values(), "delete it")
            offsets.remove(txn, self.key, offsets.of_group(txn, self.key))

        self.insist(step)
        # First from where it would come back; the rows of this boot go last.
        self.save(always=True)
        self.shared.live.write(self._delete)

    def _delete(self, txn: kv.Txn) -> None:
        group = GROUPS.get(txn, self.key)
        # Somebody may have joined, or committed, meanwhile.
        if group is None or group.members or COMMITTED.any(txn, self.key):
            return
        OWNERS.delete_all(txn, self.key)
        GROUPS.delete(txn, self.key)
        GROUP_VERSIONS.delete(txn, self.key)

    def expire(self, now_ms: int, longest_ms: int) -> int:
        """Forget commits that are so old, of topics that no member reads; return how many (M15)."""
        topics = {info.id: name for name, info in self.shared.catalog.topics().items()}

        def old(txn: kv.Txn, group: Membership) -> list[bytes]:
            # What an empty group committed counts from when its last member left.
            since = 0 if group.members else group.emptied_ms
            return [
                key
                for key, row in offsets.of_group(txn, self.key).items()
                if now_ms - max(row.committed_ms, since) > longest_ms
                and topics.get(ownership.topic_id(key)) not in group.subscribed
            ]

        found = self.shared.live.read(lambda txn: old(txn, self.document(txn)))
        if found:
            self.change(lambda txn, group: self._forget(txn, old(txn, group)))
            self.save(always=True)
            self.shared.live.write(self._delete)
        return len(found)

    def check_empty(self, members: Iterable[MemberInfo], what: str) -> None:
        """Raise if a group has members, for they would not notice what is to be done.

        Raises:
            NonEmptyGroupError: It does; the error names them.
        """
        there = list(members)
        if not there:
            return
        told = ", ".join(f"{each.id} (process {each.pid})" for each in there)
        # A closed static member is still one: who does not know waits in vain.
        static = any(each.instance_id is not None for each in there)
        rest = "; static ones stay until their session is over, or are removed" if static else ""
        raise NonEmptyGroupError(
            f"the group is active: {told}",
            group=self.name,
            todo=f"close its members to {what}{rest}",
        )

    # Rows

    def insist(self, step: Step[T]) -> T:
        """Do one step as `change`; if members are in the way, then without those that died."""
        try:
            return self.change(step)
        except _REFUSALS:
            if not self.sweep():
                raise
        return self.change(step)

    def change(self, step: Step[T]) -> T:
        """Do one step in one transaction; if it changed the group, wake everybody who waits."""
        saved = self._saved()

        def run(txn: kv.Txn) -> tuple[T, bool]:
            found = GROUPS.get(txn, self.key)
            if found is None:
                offsets.adopt(txn, self.key, saved, self.ends)
            group = found or Membership(emptied_ms=self.shared.clock())
            before = group.version
            result = step(txn, group)
            changed = group.version != before
            # A step that finds nothing and changes nothing, a late leave perhaps, makes no group.
            if changed or (found is None and (saved or COMMITTED.any(txn, self.key))):
                GROUPS.put(txn, self.key, value=group)
                GROUP_VERSIONS.put(txn, self.key, value=group.version)
            return result, changed

        result, changed = self.shared.live.write(run)
        if changed:
            self.shared.wake.advance()
        return result

    def _saved(self) -> dict[bytes, CommittedOffset]:
        """Return what the last checkpoint has, if nobody used the group in this boot."""
        if self.shared.live.get(self._document) is not None:
            return {}
        return offsets.saved(self.shared.state, self.key)

    def partition_key(self, one: TopicPartition) -> bytes:
        """Return the key of a partition as it is now.

        Raises:
            UnknownTopicOrPartitionError: There is none.
        """
        return _key_in(self.shared.catalog.topic(one.topic), one)


def _key_in(topic: TopicInfo, one: TopicPartition) -> bytes:
    if not 0 <= one.partition < topic.partitions:
        raise UnknownTopicOrPartitionError(
            f"the topic has partitions 0 to {topic.partitions - 1}",
            topic=one.topic,
            partition=one.partition,
        )
    return topic.key(one.partition)


def _wanted(group: Membership, known: Mapping[str, TopicInfo]) -> membership.Topics:
    """Return the topics that the members want, as far as there are any (M27)."""
    wanted = sorted(group.subscribed & known.keys())
    return {topic: (known[topic].id, known[topic].partitions) for topic in wanted}


def _state(group: Membership, owners: Mapping[TopicPartition, str]) -> str:
    """Return Kafka's name for what a group is doing (M1)."""
    if not group.members:
        return "Empty"
    if not group.settled:
        return "PreparingRebalance"
    target = {one: member for member, given in group.target.items() for one in given}
    return "Stable" if target == owners else "CompletingRebalance"


def names(live: kv.Store, state: kv.Store) -> list[str]:
    """Return the ids of all groups that have members, or committed anything."""
    here = live.read(lambda txn: {name for (name,) in GROUPS.keys(txn)})
    return sorted(here | {name.decode() for name in offsets.groups(state)})
