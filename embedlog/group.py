"""Consumer groups without a coordinator: every step is one transaction of a member.

A group is rows in `live`: its document (`membership`), the deadline of each member's
session, the owner of each partition (`ownership`), and the committed offsets
(`offsets`).  The work of a coordinator is done by whichever member looks at the group
next: it removes dead members, runs the assignor, and acquires the free partitions that
are assigned to it.

A partition never has two owners: a member acquires it only if its row names no owner,
releases only what it owns, and loses its partitions only together with its membership.
A commit is checked against that row in the transaction that writes it, so a commit of a
member that was stopped and replaced meanwhile is refused.

The kernel reports the death of a process: each member holds the lock of its own file.  A
member that sends no heartbeat within its session timeout is removed as well, by
a clock that keeps running while the machine sleeps (CLOCK_BOOTTIME).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple, Protocol, TypeVar

from embedlog import assignor, kv
from embedlog.assignor import Assignor
from embedlog.catalog import Catalog, TopicInfo
from embedlog.config import ShareGroupConfig
from embedlog.display import plural
from embedlog.errors import (
    CommitFailedError,
    FencedInstanceIdError,
    GroupIdNotFoundError,
    GroupMaxSizeReachedError,
    GroupSubscribedToTopicError,
    InconsistentGroupProtocolError,
    NonEmptyGroupError,
    StorageError,
    UnknownMemberIdError,
    UnknownTopicOrPartitionError,
)
from embedlog.files import Files, WakePage
from embedlog.groups import membership, offsets, ownership, share_state
from embedlog.groups.membership import (
    CONSUMER,
    GROUPS,
    SESSIONS,
    SHARE,
    MemberInfo,
    MemberSession,
    Membership,
)
from embedlog.groups.offsets import COMMITTED, CommittedOffset, Ends, PendingOffsetsError
from embedlog.groups.ownership import NO_START, OWNERS, PartitionOwner
from embedlog.groups.share_state import ShareState
from embedlog.hints import Hint
from embedlog.keyspace import GROUP_CONFIGS, GROUP_VERSIONS, PARTITION_KEY
from embedlog.lazy import logging
from embedlog.record import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition

_logger = logging.getLogger("embedlog.group")
T = TypeVar("T")
Step = Callable[[kv.Txn, Membership], T]
Partitions = Iterable[TopicPartition]
Positions = Mapping[TopicPartition, OffsetAndMetadata]

SHARE_MARK = b'"kind":"share"'
"""In the document of a share group."""
_FOREVER_MS = (1 << 63) - 1

_MEMBER_ERRORS = (
    CommitFailedError,
    GroupMaxSizeReachedError,
    GroupSubscribedToTopicError,
    InconsistentGroupProtocolError,
    NonEmptyGroupError,
)
"""Errors of steps that members prevent; dead members may be the only reason."""


class GroupContext(Protocol):
    """The parts of an open log that a group needs."""

    files: Files
    state: kv.Store
    live: kv.Store
    catalog: Catalog
    wake: WakePage
    durability: str

    @property
    def clock(self) -> Callable[[], int]:
        """The clock of the log: returns milliseconds since 1970."""

    def settle_offsets(
        self, group: bytes, partitions: Collection[bytes], *, abort: bool = True
    ) -> None:
        """Finish or drop the publications that are about to commit offsets of partitions."""

    def checkpoint(self, timeout: float | None = None) -> int:
        """Make what groups have committed survive a power cut."""


class GroupSnapshot(NamedTuple):
    """A group at one instant, as an observer sees it."""

    group: str
    type: str
    """Kafka's name: classic, consumer (KIP-848) or share."""
    state: str
    """Kafka's name: Empty, PreparingRebalance, CompletingRebalance or Stable."""
    generation: int
    """0 if the group has never had members since the machine was started."""
    assignor: str | None
    members: tuple[MemberInfo, ...]
    owners: dict[TopicPartition, str]
    """Member ids."""
    committed: dict[TopicPartition, CommittedOffset]
    ends: dict[TopicPartition, tuple[int, int]]
    """Start and end of each partition that is owned or has a position, unless unknown."""
    shares: dict[TopicPartition, ShareState] | None
    """The state of each partition in a share group; None of other groups."""


class Group:
    """One consumer group of one open log.

    Args:
        context: The log's context.
        name: The id of the group.
        ends: Returns the start and end of a partition from a transaction of `live`.
        uptime: Returns milliseconds since boot, by a clock that is never set.

    Raises:
        InvalidGroupIdError: The name is not valid.
    """

    kind = CONSUMER

    def __init__(
        self, context: GroupContext, name: str, ends: Ends, uptime: Callable[[], int] | None = None
    ) -> None:
        self.name, self.key = name, offsets.check_group_id(name)
        self.context, self.ends = context, ends
        self.uptime = uptime or context.files.uptime_ms
        self._document, self._version = GROUPS.key(self.key), GROUP_VERSIONS.key(self.key)

    # Reading

    def load(self, txn: kv.Txn) -> Membership:
        """Return the group as of a transaction of `live`."""
        return GROUPS.get(txn, self.key) or Membership()

    def read(self) -> Membership:
        """Return the group as it is now."""
        return self.load(self.context.live)

    def version(self) -> int:
        """Return a number that grows with every change of members or owners."""
        row = self.context.live.get(self._version)
        return 0 if row is None else GROUP_VERSIONS.unpack(row)

    def exists(self) -> bool:
        """Whether the group has commits, or has had members since the machine was started."""
        # In this order: the first is empty once the group is in use.
        return bool(self._checkpointed()) or self.context.live.get(self._document) is not None

    def snapshot(self) -> GroupSnapshot:
        """Return the whole group at one instant, without members that are dead.

        Changes nothing: dead members are removed by the next member that checks.

        Raises:
            GroupIdNotFoundError: The group does not exist.
        """
        topics, checkpointed = self.context.catalog.topics(), self._checkpointed()
        names = {info.id: name for name, info in topics.items()}
        now_ms, dead = self.uptime(), self._dead_members()

        def step(txn: kv.Txn) -> GroupSnapshot | None:
            group = GROUPS.get(txn, self.key)
            commits = checkpointed if group is None else offsets.of_group(txn, self.key)
            if group is None and not commits:
                return None
            group = group or Membership(kind=kind_of(commits))
            group.remove(dead | self._expired_members(txn, now_ms), self.context.clock())
            owners = {
                ownership.topic_partition(row_key, owner): owner.member
                for row_key, owner in ownership.of_group(txn, self.key)
                if owner.member in group.members and ownership.topic_id(row_key) in names
            }
            committed: dict[TopicPartition, CommittedOffset] = {}
            shares: dict[TopicPartition, ShareState] = {}
            for partition_key, offset in commits.items():
                topic_id, partition = PARTITION_KEY.unpack(partition_key)
                if topic_id in names:
                    tp, position = TopicPartition(names[topic_id], partition), offset.position
                    if group.kind == SHARE:
                        shares[tp] = ShareState(position.offset, position.metadata)
                        offset = offset._replace(position=position._replace(metadata=""))
                    committed[tp] = offset
            ends = {
                tp: self.ends(txn, topics[tp.topic].key(tp.partition))
                for tp in sorted(committed.keys() | owners.keys())
                if tp.topic in topics
            }
            return GroupSnapshot(
                group=self.name,
                type=group.type,
                state=_state(group, owners),
                generation=group.generation,
                assignor=group.assignor,
                members=tuple(group.members.values()),
                owners=dict(sorted(owners.items())),
                committed=dict(sorted(committed.items())),
                ends={tp: bounds for tp, bounds in ends.items() if bounds is not None},
                shares=shares if group.kind == SHARE else None,
            )

        snapshot = self.context.live.read(step)
        if snapshot is None:
            raise GroupIdNotFoundError(
                "The group does not exist",
                group=self.name,
                todo=Hint("See log.groups.", "See `embedlog groups list`."),
            )
        return snapshot

    # Members

    def admit(
        self, txn: kv.Txn, group: Membership, info: MemberInfo, max_members: int | None = None
    ) -> MemberInfo | None:
        """Add a member; return the member that it replaces, which had the same instance id.

        Raises:
            InconsistentGroupProtocolError, GroupMaxSizeReachedError: See `Membership.admit`.
        """
        self._check_kind(group, begin=not self._has_offsets(txn))
        replaced = group.admit(info, max_members)
        if replaced is not None:
            SESSIONS.delete(txn, self.key, replaced.id)
            ownership.hand_over(txn, self.key, replaced.id, info.id)
        until_ms = self.uptime() + info.session_ms if info.session_ms else _FOREVER_MS
        SESSIONS.put(txn, self.key, info.id, value=MemberSession(until_ms))
        return replaced

    def _check_kind(self, group: Membership, *, begin: bool = False) -> None:
        """Raise unless the group is one of this kind; if it may ``begin``, an empty one becomes it.

        Raises:
            InconsistentGroupProtocolError: It is one of the other kind.
        """
        if begin and not group.members:
            group.become(self.kind)
        if group.kind != self.kind:
            raise InconsistentGroupProtocolError(
                f"The group is a {group.kind} group, not a {self.kind} group",
                group=self.name,
                todo="Use another group, or delete this one first.",
            )

    def remove_dead_members(self, exclude: str | None = None) -> list[str]:
        """Remove members whose process died or whose session is over; return their ids.

        A static member stays until its session is over, even if its process died, and so does a
        client of a server.

        Args:
            exclude: The id of a member that is alive.
        """
        now_ms, dead = self.uptime(), self._dead_members(exclude)

        def select(txn: kv.Txn) -> set[str]:
            return (dead | self._expired_members(txn, now_ms)) - {exclude}

        removed = self._remove(select) if self.context.live.read(select) else []
        if removed:
            _logger.info("Group %s: removed dead members %s", self.name, ", ".join(removed))
        return removed

    def remove_members(self, ids: Collection[str]) -> list[str]:
        """Remove members, so that others get their partitions; return the ids of those removed."""
        return self._remove(lambda txn: ids)

    def _remove(self, select: Callable[[kv.Txn], Collection[str]]) -> list[str]:
        """Remove the members that ``select`` returns in the transaction that removes them."""

        def step(txn: kv.Txn, group: Membership) -> list[MemberInfo]:
            removed = group.remove(select(txn), self.context.clock())
            for info in removed:
                SESSIONS.delete(txn, self.key, info.id)
            if removed:
                freed = {info.id for info in removed}
                ownership.free(txn, self.key, freed, forget_start=not group.members)
            return removed

        removed = self.update(step)
        for info in removed:
            self.delete_lock_files(info.lock)
        return [info.id for info in removed]

    def delete_lock_files(self, paths: str) -> None:
        """Delete the lock files of a member that was removed, if it has any."""
        for path in paths.split():
            self.context.files.unlink(path, missing_ok=True)

    def _expired_members(self, txn: kv.Txn, now_ms: int) -> set[str]:
        """Return the ids of members whose session is over."""
        sessions = SESSIONS.scan(txn, self.key)
        return {member for (_, member), session in sessions if session.deadline_ms <= now_ms}

    def _dead_members(self, exclude: str | None = None) -> set[str]:
        """Return the ids of members that no longer hold their locks."""
        members = self.read().members.values()
        return {info.id for info in members if info.id != exclude and self._is_dead(info)}

    def _is_dead(self, info: MemberInfo) -> bool:
        """Return whether a dynamic member no longer holds the lock that it holds for life."""
        return info.instance_id is None and info.remote is None and self.is_free(info.lock)

    def is_free(self, path: str) -> bool:
        """Return whether no living member holds the lock of a file."""
        files = self.context.files
        try:
            lock = files.open(path)
        except StorageError as error:
            return error.missing
        try:
            # Shared: two that check at the same time must not mistake each other for the member.
            return files.try_lock(lock, shared=True)
        finally:
            files.close(lock)

    def check_empty(self, members: Iterable[MemberInfo], operation: str) -> None:
        """Check that a group has no members, since they would not notice the operation.

        Raises:
            NonEmptyGroupError: It has; the error names them.
        """
        present = list(members)
        if not present:
            return
        names = ", ".join(f"{info.id} ({info.where})" for info in present)
        # A closed static member is still a member, so waiting for it to leave may not help.
        static = any(info.instance_id is not None for info in present)
        rest = "; static ones stay until their session ends or they are removed" if static else ""
        raise NonEmptyGroupError(
            f"The group has members: {names}",
            group=self.name,
            todo=f"Close its members to {operation}{rest}.",
        )

    # Rebalancing

    def rebalance(self, assignors: Mapping[str, Assignor]) -> None:
        """Compute a new target if the members or their topics changed since the last one.

        The assignor runs outside of transactions, since it may be slow or custom code; if
        the group changes meanwhile, it runs again.

        Raises:
            AssignorError: The assignor failed; the group is not changed.
        """
        while not (group := self.read()).target_is_current:
            name = assignor.select_assignor(
                {info.id: info.assignors for info in group.members.values()}
            )
            if name not in assignors:
                return  # the caller was removed from the group; its next check raises that
            self._compute_target(group, name, assignors[name])

    def _compute_target(self, group: Membership, name: str, chosen: Assignor) -> None:
        """Compute a target, and install it unless the group has changed meanwhile."""
        catalog = self.context.catalog.topics()
        topics = subscribed_topics(group, catalog)
        counts = {topic: count for topic, (_, count) in topics.items()}
        target = assignor.compute_target(chosen, counts, group.candidates())
        existing = {info.id for info in catalog.values()}

        def install(txn: kv.Txn, current: Membership) -> int | None:
            if current.version != group.version:
                return None
            current.set_target(name, topics, target, max(existing, default=0))
            subscribed = {topic_id for topic_id, _ in topics.values()}
            ownership.forget(txn, self.key, subscribed, existing)
            return current.generation

        generation = self.update(install)
        if generation is not None:
            _logger.info(
                "Group %s, generation %d: %s assigns %s to %s",
                *(self.name, generation, name),
                *(plural(sum(counts.values()), "partition"), plural(len(group.members), "member")),
            )

    def check_topics(self) -> None:
        """Request a rebalance if the subscribed topics are not those of the target any more."""
        group = self.read()
        topics = subscribed_topics(group, self.context.catalog.topics())
        if group.target_is_current and topics != group.topics:
            self.update(lambda txn, group: group.notice(topics))

    # Committed offsets

    def committed(self, partitions: Partitions) -> dict[TopicPartition, CommittedOffset | None]:
        """Return the last commit of each partition, None without one.

        Raises:
            UnknownTopicOrPartitionError: A partition does not exist.
        """
        chosen = list(partitions)
        keys = dict(zip(chosen, self._keys(chosen), strict=True))
        checkpointed = self._checkpointed()
        # Who continues there must not repeat what a publication has committed.
        self.context.settle_offsets(self.key, keys.values(), abort=False)

        def step(txn: kv.Txn) -> dict[TopicPartition, CommittedOffset | None]:
            if txn.get(self._document) is None:
                return {tp: checkpointed.get(key) for tp, key in keys.items()}
            return {tp: COMMITTED.get(txn, self.key, key) for tp, key in keys.items()}

        return self.context.live.read(step)

    def commit(self, positions: Positions, timeout: float | None = None) -> None:
        """Commit for a group without being a member, which only an empty group accepts.

        Waits ``timeout`` seconds for each lock, by default the ``lock_timeout`` of the log.

        Raises:
            CommitFailedError: The group has members.
            ValueError, OffsetMetadataTooLargeError: A position is invalid; nothing was committed.
        """
        rows = self.encode(positions)

        def step(txn: kv.Txn, group: Membership) -> None:
            self._check_kind(group)
            self._check_no_members(group)
            offsets.put(txn, self.key, rows)

        self.update_without_dead_members(step, timeout)
        self.checkpoint(timeout=timeout)

    def announce(
        self, member: ConsumerGroupMetadata, rows: dict[bytes, bytes], number: int
    ) -> dict[bytes, bytes]:
        """Check that a member may commit offsets with a publication, and note that it will.

        From then on nobody takes one of the partitions over before the publication is decided.

        Args:
            member: Who commits, as of when it read the records.
            rows: As `encode` returns them.
            number: Of the publication.

        Returns:
            The rows to commit.

        Raises:
            CommitFailedError: It is no member, or lost a partition; or it says that it is no
                member, and the group has some.
        """

        def step(txn: kv.Txn, group: Membership) -> None:
            self._check_committer(txn, group, member, rows)
            offsets.check_written(txn, self.key, rows)
            offsets.note(txn, self.key, rows, number)

        self.update_without_dead_members(step)
        return rows

    def commit_with(
        self,
        member: ConsumerGroupMetadata,
        rows: Mapping[bytes, bytes],
        write: Callable[[kv.Txn], T],
        *,
        visible: bool,
    ) -> T:
        """Commit offsets in one transaction of `live` with what ``write`` does there.

        Args:
            member: Who commits, as of when it read the records.
            rows: As `encode` returns them.
            write: May run more than once.
            visible: Whether the offsets become visible now, or with the next checkpoint.

        Raises:
            CommitFailedError: As `announce`.
        """

        def step(txn: kv.Txn, group: Membership) -> T:
            self._check_committer(txn, group, member, rows)
            return commit(txn)

        def commit(txn: kv.Txn) -> T:
            offsets.write(txn, self.key, rows, visible=visible)
            return write(txn)

        def step_of_committer(txn: kv.Txn) -> tuple[T] | None:
            return (commit(txn),) if self._is_committer(txn, member, rows) else None

        # The document, which is JSON, takes as long to read as all the rest.
        done = self.settled(lambda: self.context.live.write(step_of_committer))
        return self.update_without_dead_members(step) if done is None else done[0]

    def _is_committer(
        self, txn: kv.Txn, member: ConsumerGroupMetadata, partitions: Collection[bytes]
    ) -> bool:
        """Whether the rows of a group show that `_check_committer` would pass."""
        document = txn.get(self._document)
        if document is None or SHARE_MARK in document:
            return False
        if not member.member_id:
            return not SESSIONS.any(txn, self.key)
        owners = [OWNERS.get(txn, self.key, partition) for partition in partitions]
        return all(
            owner is not None
            and owner.member == member.member_id
            and owner.generation <= member.generation_id
            for owner in owners
        )

    def _check_committer(
        self,
        txn: kv.Txn,
        group: Membership,
        member: ConsumerGroupMetadata,
        partitions: Collection[bytes],
    ) -> None:
        self._check_kind(group)
        owners = {key: OWNERS.get(txn, self.key, key) or PartitionOwner() for key in partitions}
        owned = {key: owner for key, owner in owners.items() if owner.epoch > 0}
        if not member.member_id:
            if owned:
                self._check_no_members(group)
            return
        try:
            group.check_member(member.member_id, member.group_instance_id, self.name)
        except (UnknownMemberIdError, FencedInstanceIdError) as error:
            raise CommitFailedError(
                f"This consumer is no longer a member of its group ({error.what})",
                group=self.name,
                member=member.member_id,
                todo="Call poll, which joins the group again, and begin at its committed offsets.",
            ) from error
        for partition, owner in owned.items():
            # One that was lost and came back has the generation in which it came back.
            if owner.member != member.member_id or owner.generation > member.generation_id:
                raise CommitFailedError(
                    f"The consumer does not own the partition since generation "
                    f"{member.generation_id}; the owner is {owner.member or 'no member'}, since "
                    f"generation {owner.generation}",
                    group=self.name,
                    member=member.member_id,
                    partition=PARTITION_KEY.unpack(partition)[1],
                    todo="Call poll to get the current assignment, and begin at the committed "
                    "offsets.",
                )

    def _check_no_members(self, group: Membership) -> None:
        members = [info for info in group.members.values() if not info.stands_for_others]
        if members:
            raise CommitFailedError(
                f"This consumer is not a member of the group, which has members ({len(members)})",
                group=self.name,
                todo="Subscribe instead of assigning, or use another group_id.",
            )

    def advance(
        self, positions: Positions, known: Mapping[TopicPartition, CommittedOffset | None]
    ) -> dict[TopicPartition, int]:
        """Move commits of a group without members forward, as a mirror does; return what moved.

        A commit that is as far already stays, and nothing changes in a group with members.

        Args:
            positions: Where to move them.
            known: The commits as the caller knows them: one that was changed since stays.

        Raises:
            ValueError, OffsetMetadataTooLargeError: A position is invalid; nothing was committed.
            UnknownTopicOrPartitionError: A partition does not exist.
        """
        rows = self.encode(positions)
        partitions = dict(zip(rows, positions, strict=True))
        dead, now_ms = self._dead_members(), self.uptime()

        def step(txn: kv.Txn, group: Membership) -> dict[TopicPartition, int]:
            self._check_kind(group)
            if set(group.members) - dead - self._expired_members(txn, now_ms):
                return {}
            ahead = {}
            for key, partition in partitions.items():
                committed = COMMITTED.get(txn, self.key, key)
                if committed != known[partition]:
                    continue
                if committed is None or committed.position.offset < positions[partition].offset:
                    ahead[key] = rows[key]
            offsets.put(txn, self.key, ahead)
            return {partitions[key]: positions[partitions[key]].offset for key in ahead}

        return self.update(step) if positions else {}

    def encode(self, positions: Positions) -> dict[bytes, bytes]:
        """Return the rows that store positions, by the key of the partition, in the same order.

        Raises:
            ValueError, OffsetMetadataTooLargeError: See `offsets.encode`.
            UnknownTopicOrPartitionError: A partition does not exist.
        """
        now_ms = self.context.clock()
        rows = [offsets.encode(position, now_ms) for position in positions.values()]
        return dict(zip(self._keys(positions), rows, strict=True))

    def _keys(self, partitions: Collection[TopicPartition]) -> list[bytes]:
        """Return the current keys of partitions.

        Raises:
            UnknownTopicOrPartitionError: A partition does not exist.
        """
        # Each topic is looked up once: that was a third of a commit of four partitions.
        topics = {name: self.context.catalog.topic(name) for name in {tp[0] for tp in partitions}}
        keys = []
        for name, partition in partitions:
            topic = topics[name]
            if not 0 <= partition < topic.partitions:
                raise UnknownTopicOrPartitionError(
                    f"The topic has partitions 0 to {topic.partitions - 1}",
                    topic=name,
                    partition=partition,
                )
            keys.append(PARTITION_KEY.pack(topic.id, partition))
        return keys

    def checkpoint(self, *, always: bool = False, timeout: float | None = None) -> None:
        """Make commits survive a power cut, if the log's durability is "fsync" or ``always``."""
        if always or self.context.durability == "fsync":
            self.context.checkpoint(timeout)

    # Administration

    def config(self) -> ShareGroupConfig:
        """Return the settings of the group, if it is a share group."""
        return ShareGroupConfig.parse(GROUP_CONFIGS.get(self.context.state, self.key) or {})

    def alter(self, changes: Mapping[str, object]) -> ShareGroupConfig:
        """Change settings of a share group, durably; None resets one.

        Raises:
            InvalidConfigError: A setting is unknown, or has no such value; nothing was changed.
        """

        def step(txn: kv.Txn) -> ShareGroupConfig:
            before = ShareGroupConfig.parse(GROUP_CONFIGS.get(txn, self.key) or {})
            config = before.changed(changes)
            GROUP_CONFIGS.put(txn, self.key, value=config.overrides())
            return config

        config = self.context.state.write(step)
        self.context.wake.advance()
        return config

    def reset(self, positions: Positions) -> None:
        """Commit positions for a group without members; durable when this returns.

        Raises:
            NonEmptyGroupError: The group has members, which would not notice.
        """
        rows, now_ms = self.encode(positions), self.context.clock()

        def step(txn: kv.Txn, group: Membership) -> None:
            self.check_empty(group.members.values(), "reset its offsets")
            if self.kind == SHARE:
                self._check_kind(group, begin=not self._has_offsets(txn))
            if group.kind == SHARE:
                fresh = (
                    position._replace(metadata=share_state.PREFIX)
                    for position in positions.values()
                )
                rows.update(zip(rows, (offsets.pack(each, now_ms) for each in fresh), strict=True))
            offsets.put(txn, self.key, rows)

        self.update_without_dead_members(step)
        self.checkpoint(always=True)

    def delete_offsets(self, partitions: Partitions) -> None:
        """Delete the committed offsets of partitions, durably.

        Raises:
            GroupSubscribedToTopicError: A member is subscribed to one of the topics.
        """
        chosen = list(partitions)
        keys = self._keys(chosen)

        def step(txn: kv.Txn, group: Membership) -> None:
            subscribed = sorted({tp.topic for tp in chosen} & group.subscribed)
            if subscribed:
                raise GroupSubscribedToTopicError(
                    f"Members of the group are subscribed to {', '.join(subscribed)}",
                    group=self.name,
                    todo="Close them first.",
                )
            self._delete_offsets(txn, keys)

        self.update_without_dead_members(step)
        self.checkpoint(always=True)

    def _delete_offsets(self, txn: kv.Txn, keys: Collection[bytes]) -> None:
        """Delete committed offsets, and the offsets at which readers with "latest" began."""
        offsets.remove(txn, self.key, keys)
        for key in keys:
            owner = OWNERS.get(txn, self.key, key)
            if owner is not None and owner.start != NO_START:
                OWNERS.put(txn, self.key, key, value=owner._replace(start=NO_START))

    def delete(self) -> None:
        """Delete the group and all its committed offsets.

        Raises:
            NonEmptyGroupError: The group has members.
            GroupIdNotFoundError: The group does not exist.
        """
        self.snapshot()

        def step(txn: kv.Txn, group: Membership) -> None:
            self.check_empty(group.members.values(), "delete it")
            offsets.check_settled(
                txn, self.key, [p for _, p in offsets.PENDING.keys(txn, self.key)]
            )
            offsets.remove(txn, self.key, offsets.of_group(txn, self.key))

        self.update_without_dead_members(step)
        self._delete_if_unused()
        if GROUP_CONFIGS.exists(self.context.state, self.key):
            self.context.state.write(lambda txn: GROUP_CONFIGS.delete(txn, self.key))

    def _delete_if_unused(self) -> None:
        def step(txn: kv.Txn) -> None:
            group = GROUPS.get(txn, self.key)
            # A member may have joined or committed meanwhile.
            if group is None or group.members or self._has_offsets(txn):
                return
            OWNERS.delete_all(txn, self.key)
            GROUPS.delete(txn, self.key)
            GROUP_VERSIONS.delete(txn, self.key)

        # First the checkpoint, from which the group would be restored; then the rows of this boot.
        self.checkpoint(always=True)
        self.context.live.write(step)

    def expire_offsets(self, now_ms: int, retention_ms: int) -> int:
        """Delete commits older than that, but of subscribed topics; return how many."""
        topics = {info.id: name for name, info in self.context.catalog.topics().items()}

        def expired(txn: kv.Txn, group: Membership) -> list[bytes]:
            # In an empty group the time counts from when the last member left.
            since_ms = 0 if group.members else group.emptied_ms
            return [
                key
                for key, row in offsets.of_group(txn, self.key).items()
                if now_ms - max(row.committed_ms, since_ms) > retention_ms
                and topics.get(ownership.topic_id(key)) not in group.subscribed
            ]

        keys = self.context.live.read(lambda txn: expired(txn, self.load(txn)))
        if keys:
            self.update(lambda txn, group: self._delete_offsets(txn, expired(txn, group)))
            self._delete_if_unused()
        return len(keys)

    # Writing

    def update(self, step: Step[T], timeout: float | None = None) -> T:
        """Run a step in one transaction; if it changed the group, wake all waiting members."""
        checkpointed = self._checkpointed()

        def run(txn: kv.Txn) -> tuple[T, bool]:
            stored = GROUPS.get(txn, self.key)
            if stored is None:
                offsets.adopt(txn, self.key, checkpointed, self.ends)
            kind = kind_of(checkpointed)
            group = stored or Membership(emptied_ms=self.context.clock(), kind=kind)
            version = group.version
            result = step(txn, group)
            changed = group.version != version
            # A step that finds and changes nothing, such as a late leave, creates no group.
            if changed or (stored is None and (checkpointed or self._has_offsets(txn))):
                GROUPS.put(txn, self.key, value=group)
                GROUP_VERSIONS.put(txn, self.key, value=group.version)
            return result, changed

        self.context.live.check_linked()
        result, changed = self.settled(lambda: self.context.live.write(run, timeout))
        if changed:
            self.context.wake.advance()
        return result

    def settled(self, write: Callable[[], T]) -> T:
        """Run a transaction; if it needs offsets that are about to change, decide that first."""
        while True:
            try:
                return write()
            except PendingOffsetsError as pending:
                self.context.settle_offsets(self.key, pending.partitions)

    def _has_offsets(self, txn: kv.Txn) -> bool:
        return COMMITTED.any(txn, self.key) or offsets.PENDING.any(txn, self.key)

    def update_without_dead_members(self, step: Step[T], timeout: float | None = None) -> T:
        """Run a step as `update`; if members prevent it, remove the dead ones and try again."""
        try:
            return self.update(step, timeout)
        except _MEMBER_ERRORS:
            if not self.remove_dead_members():
                raise
        return self.update(step, timeout)

    def _checkpointed(self) -> dict[bytes, CommittedOffset]:
        """Return the rows of the last checkpoint; none if the group was used since the boot."""
        if self.context.live.get(self._document) is not None:
            return {}
        return self.context.state.read(
            lambda txn: offsets.of_group(txn, self.key, offsets.CHECKPOINTS)
        )


def kind_of(commits: Mapping[bytes, CommittedOffset]) -> str:
    """Return the kind of the group that has committed these offsets."""
    is_share = any(share_state.is_share(each.position.metadata) for each in commits.values())
    return SHARE if is_share else CONSUMER


def subscribed_topics(group: Membership, catalog: Mapping[str, TopicInfo]) -> membership.Topics:
    """Return the topics that members subscribe to and that exist."""
    names = sorted(group.subscribed & catalog.keys())
    return {name: (catalog[name].id, catalog[name].partitions) for name in names}


def _state(group: Membership, owners: Mapping[TopicPartition, str]) -> str:
    """Return Kafka's name for the state of a group."""
    if not group.members:
        return "Empty"
    if group.kind == SHARE:
        return "Stable"
    if not group.target_is_current:
        return "PreparingRebalance"
    target = {tp: member for member, partitions in group.target.items() for tp in partitions}
    return "Stable" if target == owners else "CompletingRebalance"


def group_ids(live: kv.Store, state: kv.Store) -> list[str]:
    """Return the ids of all groups that have members or committed offsets, sorted."""
    used = live.read(lambda txn: {name for (name,) in GROUPS.keys(txn)})
    return sorted(used.union(state.read(lambda txn: list(offsets.CHECKPOINTS.first_fields(txn)))))
