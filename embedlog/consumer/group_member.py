"""One member of a group: joins, checks its assignment, acquires, commits, releases, leaves."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from embedlog import assignor, kv
from embedlog.assignor import Assignor, RebalanceStep
from embedlog.errors import CommitFailedError, FencedInstanceIdError, UnknownMemberIdError
from embedlog.group import Group, Partitions, Positions
from embedlog.groups import LOCKS, offsets, ownership
from embedlog.groups.membership import SESSIONS, MemberInfo, MemberSession, Membership
from embedlog.groups.offsets import COMMITTED
from embedlog.groups.ownership import NO_OWNER, NO_START, OWNERS, PartitionOwner, is_owned
from embedlog.keyspace import PARTITION_KEY
from embedlog.record import OffsetAndMetadata, TopicPartition, random_id

REBALANCE_NEEDED = -1
"""The `MemberAssignment.version` of a group whose target must be computed again."""
MAX_ID_PREFIX = 100
"""Characters of the client or instance id in a member id, which is part of LMDB keys."""

_NOT_IN_IDS = re.compile("[^A-Za-z0-9._-]+")


class StartPosition(NamedTuple):
    """Where a member that acquires a partition begins to read."""

    committed: OffsetAndMetadata | None
    end: int | None
    """Without a commit: where a group with "latest" began to read this partition."""


OwnershipClaim = tuple[bytes, int]
"""The key of a partition's row, and the ownership epoch under which the member owns it."""


class MemberAssignment(NamedTuple):
    """What a member reads of its group in one transaction; see `GroupMember.check_assignment`."""

    generation: int
    version: int
    """The version of the group, or `REBALANCE_NEEDED`."""
    step: RebalanceStep
    owned: dict[TopicPartition, OwnershipClaim]
    """Partitions that it acquired and, according to the rows, still owns."""
    orphans: list[OwnershipClaim]
    """Partitions that it owns according to the rows, but never acquired and is not assigned."""


def join(
    group: Group,
    topics: Iterable[str],
    assignors: Iterable[str],
    *,
    session_ms: int,
    instance_id: str | None = None,
    client_id: str = "",
    max_members: int | None = None,
) -> GroupMember:
    """Join a group; the member owns no partitions before `GroupMember.acquire`.

    Args:
        group: The group.
        topics: The subscription; topics that do not exist yet are allowed.
        assignors: The names of the supported assignors, in order of preference.
        session_ms: The session timeout.
        instance_id: The id of a static member; a live member with that id is fenced.
        client_id: The prefix of the member id if there is no instance id.
        max_members: The maximum number of members.

    Raises:
        InconsistentGroupProtocolError, GroupMaxSizeReachedError: See `Membership.admit`.
    """
    unique = random_id()
    prefix = _NOT_IN_IDS.sub("-", instance_id or client_id)[:MAX_ID_PREFIX] or "consumer"
    info = MemberInfo(
        id=f"{prefix}-{unique}",
        instance_id=instance_id,
        client_id=client_id,
        pid=os.getpid(),
        lock=f"{LOCKS}{unique.replace('-', '')}",
        topics=tuple(sorted(topics)),
        assignors=tuple(assignors),
        session_ms=session_ms,
        joined_ms=group.context.clock(),
    )
    lock = hold(
        group,
        info.lock,
        lambda: group.update_without_dead_members(
            lambda txn, document: group.admit(txn, document, info, max_members)
        ),
    )
    return GroupMember(group, info, lock)


def hold(group: Group, path: str, step: Callable[[], MemberInfo | None]) -> int:
    """Return the lock of a member's file, which it has before a step makes the member visible.

    Args:
        group: The group.
        path: The file.
        step: Returns the member that is replaced, whose file is deleted.
    """
    files = group.context.files
    # Locked before the member is visible to others: a free lock means that it is dead.
    lock = files.open(path, write=True, create=True)
    try:
        files.lock(lock, 0)
        replaced = step()
    except BaseException:
        files.close(lock)
        group.delete_lock_files(path)
        raise
    if replaced is not None:
        group.delete_lock_files(replaced.lock)
    return lock


class GroupMember:
    """A member of a group, with the partitions that it owns and their ownership epochs.

    Use it from one thread at a time, except `heartbeat`.  Every method that finds that the
    member was removed raises `UnknownMemberIdError` (or `FencedInstanceIdError`): then all
    its partitions are lost, and it must join again.
    """

    def __init__(self, group: Group, info: MemberInfo, lock: int) -> None:
        self.group, self.info, self.id = group, info, info.id
        self.generation = -1
        """The generation of the last assignment that it checked."""
        self._lock: int | None = lock
        self._session_key = SESSIONS.key(group.key, info.id)
        self._claims: dict[TopicPartition, OwnershipClaim] = {}
        """Partitions that it acquired and has not released, as far as it knows."""
        self._checked_version = -1

    @property
    def owned(self) -> set[TopicPartition]:
        """The partitions that it acquired and has not released."""
        return set(self._claims)

    def changed(self) -> bool:
        """Return whether the group changed since the last `check_assignment`; one read."""
        return self.group.version() != self._checked_version

    def require_check(self) -> None:
        """Make `changed` return True: the last assignment was not carried out completely."""
        self._checked_version = -1

    def check_assignment(self, assignors: Mapping[str, Assignor]) -> MemberAssignment:
        """Return the partitions to keep, release, acquire and wait for; rebalance if needed.

        Raises:
            UnknownMemberIdError, FencedInstanceIdError: It was removed.
            AssignorError: See `Group.rebalance`.
        """
        read = partial(self.group.context.live.read, self._read_assignment)
        assignment = read()
        if assignment.version == REBALANCE_NEEDED:
            self.group.rebalance(assignors)
            assignment = read()
        while assignment.orphans:
            # Otherwise no member ever gets them: it cannot release what it never acquired.
            self.group.update(partial(self._release, assignment.orphans))
            assignment = read()
        self._claims, self._checked_version = assignment.owned, assignment.version
        self.generation = assignment.generation
        return assignment

    def _read_assignment(self, txn: kv.Txn) -> MemberAssignment:
        group = self.group.load(txn)
        self._check_member(group)
        target = set(group.target.get(self.id, ()))
        topic_ids = {topic: topic_id for topic, (topic_id, _) in group.topics.items()}
        keys = {PARTITION_KEY.pack(topic_ids[tp.topic], tp.partition) for tp in target}
        owned: dict[TopicPartition, OwnershipClaim] = {}
        current, owned_by_others, orphans = set(), set(), []
        for row_key, owner in ownership.owned_or_assigned(txn, self.group.key, self.id, keys):
            tp = ownership.topic_partition(row_key, owner)
            # Nothing is kept of a topic that was deleted, even if it was created again.
            exists = topic_ids.get(tp.topic) == ownership.topic_id(row_key)
            claim = (row_key, owner.epoch)
            if owner.member != self.id:
                if owner.member != NO_OWNER and exists:
                    owned_by_others.add(tp)
            elif self._claims.get(tp) == claim:
                owned[tp] = claim
                if exists:
                    current.add(tp)
            # A static member takes over what its predecessor owned, but must acquire it (M13).
            elif not (exists and tp in target):
                orphans.append(claim)
        step = assignor.next_step(target, current, owned_by_others)
        step = step._replace(revoked=tuple(sorted(owned.keys() - step.kept)))
        version = group.version if group.target_is_current else REBALANCE_NEEDED
        return MemberAssignment(group.generation, version, step, owned, orphans)

    def acquire(self, *, from_end: bool) -> dict[TopicPartition, StartPosition]:
        """Acquire assigned partitions that are free; return where to begin with each.

        Args:
            from_end: Without a commit, begin at the end as of this transaction; a
                partition that was added while the group was reading begins at its start.
        """

        def step(
            txn: kv.Txn, group: Membership
        ) -> dict[TopicPartition, tuple[OwnershipClaim, StartPosition]]:
            self._check_member(group)
            acquired = {}
            for tp in group.target.get(self.id, ()):
                key = PARTITION_KEY.pack(group.topics[tp.topic][0], tp.partition)
                row_key = OWNERS.key(self.group.key, key)
                owner = ownership.get(txn, row_key)
                if owner.member not in (NO_OWNER, self.id) or tp in self._claims:
                    continue
                committed, start = COMMITTED.get(txn, self.group.key, key), owner.start
                if from_end and committed is None and start == NO_START:
                    bounds = self.group.ends(txn, key)
                    if bounds is not None:
                        start = bounds[0] if group.came_later(tp) else bounds[1]
                epoch = owner.epoch + 1
                offsets.check_settled(txn, self.group.key, [key])
                owner = PartitionOwner(epoch, start, group.generation, self.id, tp.topic)
                ownership.put(txn, row_key, owner)
                position = StartPosition(
                    None if committed is None else committed.position,
                    start if from_end and start != NO_START else None,
                )
                acquired[tp] = (row_key, epoch), position
            if acquired:
                group.touch()
            return acquired

        acquired = self.group.update(step)
        self._claims.update({tp: claim for tp, (claim, _) in acquired.items()})
        return {tp: position for tp, (_, position) in acquired.items()}

    def release(self, partitions: Partitions) -> None:
        """Release partitions, so that the members they are assigned to may acquire them."""
        released = {tp: self._claims[tp] for tp in partitions}
        if released:
            self.group.update(partial(self._release, released.values()))
        for tp in released:
            del self._claims[tp]

    def _release(self, claims: Iterable[OwnershipClaim], txn: kv.Txn, group: Membership) -> None:
        for row_key, epoch in claims:
            owner = ownership.get(txn, row_key)
            if (owner.member, owner.epoch) == (self.id, epoch):
                ownership.put(txn, row_key, owner._replace(member=NO_OWNER))
                group.touch()

    def commit(self, positions: Positions, timeout: float | None = None) -> None:
        """Commit positions of owned partitions, all or none; counts as a heartbeat.

        Waits ``timeout`` seconds for each lock, by default the ``lock_timeout`` of the log.

        Raises:
            CommitFailedError: It does not own one of the partitions.
            ValueError, OffsetMetadataTooLargeError: A position is invalid; nothing was committed.
        """
        rows = self.group.encode(positions)
        # Prepared once: commits are frequent.
        prefix, member = OWNERS.prefix(self.group.key), ownership.member_field(self.id)

        def step(txn: kv.Txn) -> None:
            self._renew_session(txn)
            for tp, key in zip(positions, rows, strict=True):
                claimed_key, epoch = self._claims.get(tp, (None, 0))
                # By key, not by name: there may be another topic of that name now.
                if claimed_key != prefix + key or not is_owned(txn, claimed_key, member, epoch):
                    raise self._not_owned(txn, tp, prefix + key)
            offsets.put(txn, self.group.key, rows)

        live = self.group.context.live
        live.check_linked()
        try:
            self.group.settled(lambda: live.write(step, timeout))
        except (UnknownMemberIdError, FencedInstanceIdError) as error:
            raise self._commit_failed(
                f"This consumer is no longer a member of its group ({error.what})"
            ) from error
        self.group.checkpoint(timeout=timeout)

    def _not_owned(self, txn: kv.Txn, tp: TopicPartition, row_key: bytes) -> CommitFailedError:
        """Return the error for a partition that is not owned."""
        claimed_key, epoch = self._claims.get(tp, (None, 0))
        if claimed_key is None:
            return self._commit_failed("The partition is not assigned to this consumer", tp)
        if claimed_key != row_key:
            return self._commit_failed("The topic was deleted and created again", tp)
        owner = ownership.get(txn, row_key)
        return self._commit_failed(
            f"This consumer no longer owns the partition with epoch {epoch}; "
            f"the owner is {owner.member or 'no member'} with epoch {owner.epoch}",
            tp,
        )

    def _commit_failed(self, what: str, tp: TopicPartition | None = None) -> CommitFailedError:
        return CommitFailedError(
            what,
            group=self.group.name,
            member=self.id,
            **({} if tp is None else tp._asdict()),
            todo="Call poll to get the current assignment; the owners of the partitions read "
            "the records since the last commit again.",
        )

    def is_in_group(self, txn: kv.Txn) -> bool:
        """Return whether the group has this member, in a transaction of `live`."""
        return txn.get(self._session_key) is not None

    def heartbeat(self) -> None:
        """Renew the session; may be called from any thread.

        Raises:
            UnknownMemberIdError, FencedInstanceIdError: It was removed.
        """
        self.group.context.live.write(self._renew_session)

    def _renew_session(self, txn: kv.Txn) -> None:
        if txn.get(self._session_key) is None:
            self._check_member(self.group.load(txn))
        deadline_ms = self.group.uptime() + self.info.session_ms
        txn.put(self._session_key, SESSIONS.pack(MemberSession(deadline_ms)))

    def resubscribe(self, topics: Iterable[str]) -> None:
        """Replace the subscription."""
        subscribed = tuple(sorted(topics))

        def step(txn: kv.Txn, group: Membership) -> None:
            self._check_member(group)
            group.resubscribe(self.id, subscribed)

        self.group.update(step)
        self.info = self.info._replace(topics=subscribed)

    def leave(self) -> None:
        """Leave the group; a static member only unlocks its file, since it may return."""
        lock, self._lock = self._lock, None
        if lock is None or self.info.pid != os.getpid():
            return  # in a forked child the member and its file descriptor are the parent's
        self._claims.clear()
        files = self.group.context.files
        try:
            if self.info.instance_id is None:
                self.group.remove_members([self.id])
        finally:
            files.close(lock)
        if self.info.instance_id is None:
            self.group.delete_lock_files(self.info.lock)

    def unlock(self) -> None:
        """Unlock the file, as the end of the process does: the others see a dead member."""
        lock, self._lock = self._lock, None
        if lock is not None and self.info.pid == os.getpid():
            self.group.context.files.close(lock)

    def _check_member(self, group: Membership) -> None:
        group.check_member(self.id, self.info.instance_id, self.group.name)
