"""One member's part in its group: to join, to look, to take, to commit, to release, to leave."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

from embedlog import assignor, kv
from embedlog.assignor import Assignor, RebalanceStep
from embedlog.errors import CommitFailedError, FencedInstanceIdError, UnknownMemberIdError
from embedlog.group import Group, Partitions, Positions
from embedlog.groups import offsets, ownership
from embedlog.groups.membership import LOCKS, MemberInfo, Membership
from embedlog.groups.offsets import COMMITTED
from embedlog.groups.ownership import NOBODY, NOWHERE, OWNERS, PartitionOwner
from embedlog.keyspace import PARTITION_KEY
from embedlog.record import OffsetAndMetadata, TopicPartition

UNSETTLED = -1
"""Stands for the version of a group that is not settled."""
LONGEST_NAME = 100
"""Characters of a client or instance id that go before a member's id: it is part of keys."""

_NO_PART_OF_IDS = re.compile("[^A-Za-z0-9._-]+")


class StartPosition(NamedTuple):
    """Where a member that takes a partition begins."""

    committed: OffsetAndMetadata | None
    end: int | None
    """Without a commit: where a group that reads from the end began with this partition."""


class MemberAssignment(NamedTuple):
    """What a member finds when it looks at its group."""

    generation: int
    assignor: str
    step: RebalanceStep


OwnershipClaim = tuple[bytes, int]
"""The row of a partition, and the epoch it is owned by."""


class MemberView(NamedTuple):
    """A share, and what else one transaction told a member."""

    share: MemberAssignment
    version: int
    """`UNSETTLED` if that is so: then there is more to do."""
    held: dict[TopicPartition, OwnershipClaim]
    """Of what it took, what the rows say it owns."""
    strays: list[OwnershipClaim]
    """What the rows say it owns, but it never took, and is not to have."""


def join(
    group: Group,
    topics: Iterable[str],
    assignors: Iterable[str],
    *,
    session_ms: int,
    instance_id: str | None = None,
    client_id: str = "",
    user_data: bytes | None = None,
    most: int | None = None,
) -> GroupMember:
    """Become a member; it owns nothing before `GroupMember.take`.

    Args:
        group: What to join.
        topics: What it subscribes to; those that do not exist are waited for.
        assignors: The names of those it can use, best first.
        session_ms: How long it may be silent.
        instance_id: The name of a static member; a living one of that name is fenced.
        client_id: Goes before the member's id, where there is no instance id.
        user_data: For an assignor of the user's own.
        most: The most members there may be.

    Raises:
        InconsistentGroupProtocolError, GroupMaxSizeReachedError: See `Membership.admit`.
    """
    secret = uuid.uuid4()
    info = MemberInfo(
        id=f"{_name(instance_id or client_id)}-{secret}",
        instance_id=instance_id,
        client_id=client_id,
        pid=os.getpid(),
        lock=f"{LOCKS}{secret.hex}",
        topics=tuple(sorted(topics)),
        assignors=tuple(assignors),
        session_ms=session_ms,
        joined_ms=group.shared.clock(),
        user_data=None if user_data is None else user_data.decode("latin-1"),
    )
    files = group.shared.files
    # Held before anybody can know of it: a lock that is free means a dead member.
    lock = files.open(info.lock, write=True, create=True)
    try:
        files.lock(lock, 0)
        before = group.insist(lambda txn, now: group.admit(txn, now, info, most))
    except BaseException:
        files.close(lock)
        group.drop_lock(info.lock)
        raise
    if before is not None:
        group.drop_lock(before.lock)
    return GroupMember(group, info, lock)


def _name(given: str) -> str:
    return _NO_PART_OF_IDS.sub("-", given)[:LONGEST_NAME] or "consumer"


class GroupMember:
    """One member's hold on its group: what it owns, by which epochs.

    For one thread at a time, except `beat`.  Whatever says that it is no member
    any more raises `UnknownMemberIdError` (or `FencedInstanceIdError`): then all
    it owned is lost, and it must join anew.
    """

    def __init__(self, group: Group, info: MemberInfo, lock: int) -> None:
        self.group, self.info, self.id = group, info, info.id
        self.generation = -1
        """That of the target it looked at last."""
        self._lock: int | None = lock
        self._epochs: dict[TopicPartition, OwnershipClaim] = {}
        """What it took and did not release, as far as it knows."""
        self._seen = -1

    @property
    def owned(self) -> set[TopicPartition]:
        """What it took and did not release."""
        return set(self._epochs)

    def changed(self) -> bool:
        """Whether anything happened in the group since the last `look`; one read."""
        return self.group.version() != self._seen

    def look_again(self) -> None:
        """Have `changed` say yes: what the last `look` asked for was not done."""
        self._seen = -1

    def look(self, assignors: Mapping[str, Assignor]) -> MemberAssignment:
        """Say what it may go on with, what it must release, and what it may take or awaits.

        Raises:
            UnknownMemberIdError, FencedInstanceIdError: It is no member any more.
            AssignorError: See `Group.settle`.
        """
        view = self.group.shared.live.read(self._look)
        if view.version == UNSETTLED:
            self.group.settle(assignors)
            view = self.group.shared.live.read(self._look)
        while view.strays:
            # Else nobody ever gets them: it cannot release what it does not know of.
            self.group.change(partial(self._give_up, view.strays))
            view = self.group.shared.live.read(self._look)
        self._epochs, self._seen = view.held, view.version
        self.generation = view.share.generation
        return view.share

    def _look(self, txn: kv.Txn) -> MemberView:
        group = self.group.document(txn)
        self._check(group)
        meant = set(group.target.get(self.id, ()))
        topics = {topic: number for topic, (number, _) in group.topics.items()}
        keys = {PARTITION_KEY.pack(topics[one.topic], one.partition) for one in meant}
        have: set[TopicPartition] = set()
        others: set[TopicPartition] = set()
        held, strays = {}, []
        for row_key, owner in ownership.concerning(txn, self.group.key, self.id, keys):
            one = ownership.where(row_key, owner)
            # Of a topic that was deleted, and created again perhaps, nothing is left to keep.
            there = topics.get(one.topic) == ownership.topic_id(row_key)
            claim = (row_key, owner.epoch)
            if owner.member == self.id and self._epochs.get(one) == claim:
                held[one] = claim
            elif owner.member == self.id and not (there and one in meant):
                strays.append(claim)
                continue
            if owner.member != NOBODY and there:
                (have if owner.member == self.id else others).add(one)
        step = assignor.step(meant, have, others)
        kept = set(step.kept) & held.keys()
        # What a static member before it owned is its own, but was not told to it yet (M13).
        untold = set(step.kept) - kept
        step = RebalanceStep(
            tuple(sorted(kept)),
            tuple(sorted(held.keys() - kept)),
            tuple(sorted({*step.added, *untold})),
            step.awaited,
        )
        version = group.version if group.settled else UNSETTLED
        return MemberView(
            MemberAssignment(group.generation, group.assignor or "", step), version, held, strays
        )

    def take(self, *, from_end: bool) -> dict[TopicPartition, StartPosition]:
        """Own what is meant for it and free, and say where to begin with each.

        Args:
            from_end: Without a commit it begins at the end, as of this transaction (E1); with
                a partition that came while the group was reading, at its start.
        """

        def step(
            txn: kv.Txn, group: Membership
        ) -> dict[TopicPartition, tuple[bytes, int, StartPosition]]:
            self._check(group)
            taken = {}
            for one in group.target.get(self.id, ()):
                key = PARTITION_KEY.pack(group.topics[one.topic][0], one.partition)
                edge = int(not group.came_later(one)) if from_end else None
                found = self._take(txn, one, key, edge)
                if found is not None:
                    taken[one] = found
            if taken:
                group.touch()
            return taken

        taken = self.group.change(step)
        self._epochs.update({one: (row_key, epoch) for one, (row_key, epoch, _) in taken.items()})
        return {one: start for one, (_, _, start) in taken.items()}

    def _take(
        self, txn: kv.Txn, one: TopicPartition, key: bytes, edge: int | None
    ) -> tuple[bytes, int, StartPosition] | None:
        """Own one, if it is free; ``edge`` is where to begin: 0 its start, 1 its end."""
        row_key = OWNERS.key(self.group.key, key)
        owner = ownership.get(txn, row_key)
        if owner.member not in (NOBODY, self.id) or one in self._epochs:
            return None
        row = COMMITTED.get(txn, self.group.key, key)
        start = owner.start
        if row is None and edge is not None and start == NOWHERE:
            known = self.group.ends(txn, key)
            start = NOWHERE if known is None else known[edge]
        ownership.put(txn, row_key, PartitionOwner(owner.epoch + 1, start, self.id, one.topic))
        committed = None if row is None else row.position
        end = start if edge is not None and start != NOWHERE else None
        return row_key, owner.epoch + 1, StartPosition(committed, end)

    def release(self, partitions: Partitions) -> None:
        """Own these no more: whoever they are meant for may take them now."""
        gone = set(partitions)
        if gone:
            self.group.change(partial(self._give_up, [self._epochs[one] for one in gone]))
        for one in gone:
            del self._epochs[one]

    def _give_up(self, claims: Iterable[OwnershipClaim], txn: kv.Txn, group: Membership) -> None:
        for row_key, epoch in claims:
            owner = ownership.get(txn, row_key)
            if (owner.member, owner.epoch) == (self.id, epoch):
                ownership.put(txn, row_key, owner._replace(member=NOBODY))
                group.touch()

    def commit(self, positions: Positions) -> None:
        """Commit positions of partitions that it owns: all of them, or none.

        A sign of life as well (M7).

        Raises:
            CommitFailedError: It does not own one of them any more, or never did (E23).
            ValueError, OffsetMetadataTooLargeError: Nothing was committed.
        """
        rows = self.group.rows(positions)
        # By partition key, not by name: the topic may be another one of that name by now.
        claims = [
            (one, OWNERS.key(self.group.key, key)) for one, key in zip(positions, rows, strict=True)
        ]

        def step(txn: kv.Txn) -> None:
            self._check_lives(txn)
            for one, row_key in claims:
                self._check_owned(txn, one, row_key)
            offsets.put(txn, self.group.key, rows)
            self.group.put_deadline(txn, self.info)

        try:
            self.group.shared.live.write(step)
        except (UnknownMemberIdError, FencedInstanceIdError) as error:
            raise self._refused(f"this consumer is no member any more ({error.what})") from error
        self.group.save()

    def _check_owned(self, txn: kv.Txn, one: TopicPartition, row_key: bytes) -> None:
        claimed, epoch = self._epochs.get(one, (None, 0))
        if claimed is None:
            raise self._refused("the partition is not assigned to this consumer", one)
        if claimed != row_key:
            raise self._refused("the topic was deleted and created again", one)
        if not ownership.is_owned(txn, row_key, self.id, epoch):
            owner = ownership.get(txn, row_key)
            whose = owner.member if owner.member != NOBODY else "nobody"
            raise self._refused(
                f"the partition belongs to {whose} by epoch {owner.epoch}, "
                f"no longer to this consumer by epoch {epoch}",
                one,
            )

    def _refused(self, what: str, one: TopicPartition | None = None) -> CommitFailedError:
        return CommitFailedError(
            what,
            group=self.group.name,
            member=self.id,
            topic=None if one is None else one.topic,
            partition=None if one is None else one.partition,
            todo="poll to get the partitions that are assigned now; records since the last "
            "commit come again, to whoever has them",
        )

    def beat(self) -> None:
        """Show that it lives (M7); from any thread.

        Raises:
            UnknownMemberIdError, FencedInstanceIdError: It is no member any more.
        """

        def step(txn: kv.Txn) -> None:
            self._check_lives(txn)
            self.group.put_deadline(txn, self.info)

        self.group.shared.live.write(step)

    def resubscribe(self, topics: Iterable[str]) -> None:
        """Want other topics from now on."""
        wanted = tuple(sorted(topics))

        def step(txn: kv.Txn, group: Membership) -> None:
            self._check(group)
            group.resubscribe(self.id, wanted)

        self.group.change(step)
        self.info = self.info._replace(topics=wanted)

    def leave(self) -> None:
        """Be no member any more.  A static one only lets go: it may come back in time (M13)."""
        lock, self._lock = self._lock, None
        if lock is None or self.info.pid != os.getpid():
            return  # in a forked child it is the parent's, and so is the number of its lock
        self._epochs.clear()
        files = self.group.shared.files
        try:
            if self.info.instance_id is None:
                self.group.remove_members([self.id])
        finally:
            files.close(lock)
        if self.info.instance_id is None:
            self.group.drop_lock(self.info.lock)

    def _check_lives(self, txn: kv.Txn) -> None:
        if not self.group.lives(txn, self.info):
            self._check(self.group.document(txn))

    def _check(self, group: Membership) -> None:
        group.check_member(self.id, self.info.instance_id, self.group.name)
