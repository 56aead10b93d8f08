"""Members of the log's groups that are clients of a server: their steps, as rows of the log.

What a member in Python keeps in memory is here in rows: which partitions the client has (those that
it owns), and the generation whose assignment it has (its *epoch*).  So any server of the log takes
the next step of any client, also one that was started after the last step; and members in Python
share a group with clients.

A client learns what it must do from the answer to its next request, and confirms it with one after.
Until it has, a partition that it must give up is its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from time import monotonic
from typing import NamedTuple

from embedlog import kv
from embedlog.api import Log
from embedlog.assignor import by_name
from embedlog.assignor.select import BUILT_IN
from embedlog.consumer.group_member import GroupMember, hold, join
from embedlog.consumer.open_group import open_group
from embedlog.errors import EmbedlogError, UnknownMemberIdError
from embedlog.group import Group
from embedlog.groups import LOCKS, offsets, ownership
from embedlog.groups.membership import (
    CLASSIC,
    IN_MEMORY,
    MODERN,
    SESSIONS,
    MemberInfo,
    MemberSession,
    Membership,
)
from embedlog.groups.ownership import NO_OWNER, OWNERS, PartitionOwner
from embedlog.keyspace import PARTITION_KEY
from embedlog.record import OffsetAndMetadata, TopicPartition, random_id
from embedlog.server.error_codes import ApiError, ErrorCode

ASSIGNORS = {name: by_name(name) for name in BUILT_IN}
"""What a server runs; who has others in mind has a group in memory (`classic_groups`)."""
LEFT = -2
"""The epoch of a static member that left and may come back."""
_LOOK_SECONDS = 1.0
"""How often a server looks for dead members of a group."""

Keys = Collection[bytes]
"""Partitions, as `PARTITION_KEY` packs them."""
CheckEpoch = Callable[[MemberSession, Keys], None]
"""Raises `ApiError` if the client, which has these partitions, cannot be in a session."""


class Share(NamedTuple):
    """What the rows of a group say of one member; partitions are by key, with their topic."""

    kept: dict[bytes, TopicPartition]
    """Those that it owns and keeps."""
    revoked: dict[bytes, TopicPartition]
    """Those that it owns and must give up."""
    free: dict[bytes, TopicPartition]
    """Those that it may have now."""


class Step(NamedTuple):
    """Where a client is after a step."""

    epoch: int
    assigned: dict[bytes, TopicPartition]
    """The partitions that it may read."""
    is_revoking: bool
    """Whether it has partitions that it must give up."""
    must_join: bool
    """Whether a classic member must join again, to learn what changed."""


class _Seen(NamedTuple):
    """A client after its last request to this server: nothing is to be done until that changes."""

    versions: tuple[int, int]
    """Of the group and of the catalog."""
    session_ms: int


class RemoteMembers:
    """The steps of clients of a log, whose groups are rows.

    Args:
        log: The log.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        # Only to save work: lost with the server, and bounded by the members of groups.
        self._seen: dict[str, dict[str, _Seen]] = {}
        self._looked: dict[str, float] = {}

    def group(self, name: str) -> Group:
        """Return a group.

        Raises:
            InvalidGroupIdError: The name is not valid.
        """
        return open_group(self._log.root, name)

    def info(self, group: Group, member: str, instance: str | None = None) -> MemberInfo:
        """Return what a group knows of a client.

        Raises:
            UnknownMemberIdError, FencedInstanceIdError: No client is this member.
        """
        return _info(group, group.read(), member, instance)

    # Membership

    def admit(self, group: Group, info: MemberInfo, *, comes_back: bool = False) -> None:
        """Add a member, or change it; it replaces one with the same instance id.

        Args:
            group: The group.
            info: The member.
            comes_back: Whether it must be a member already.

        Raises:
            ApiError: Another kind of member has its id, or another client its instance id.
            UnknownMemberIdError, FencedInstanceIdError: It was removed.
            InconsistentGroupProtocolError: It has no assignor in common with the others, or the
                group is one of another kind.
        """

        def step(txn: kv.Txn, document: Membership) -> MemberInfo | None:
            if comes_back:
                document.check_member(info.id, info.instance_id, group.name)
            before = document.members.get(info.id)
            if before is None:
                _check_released(txn, group, document, info)
                client = info.remote
                if client is not None and client.protocol != CLASSIC and client.topics:
                    document.count()
                return group.admit(txn, document, info)
            if _kind(before) != _kind(info):
                raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID, "Another kind of member has this id")
            document.change(info._replace(joined_ms=before.joined_ms, lock=before.lock))
            return None

        replaced = group.update_without_dead_members(step)
        if replaced is not None:
            group.delete_lock_files(replaced.lock)

    def claim(self, name: str) -> GroupMember:
        """Keep a group for the members that it has in the memory of this server.

        Programs and other servers cannot join it, until the one that is returned leaves, or the
        server ends: it holds a lock.

        Raises:
            InconsistentGroupProtocolError: The group has members.
        """
        # It needs no heartbeat: the lock says that it lives.
        return join(self.group(name), (), [IN_MEMORY], session_ms=0, client_id="embedlog-serve")

    def hold(self, group: Group, member: str) -> GroupMember:
        """Let this process have records of a share group for a client, until that is unlocked.

        A client has such a lock with each worker, or directory, that it fetches from.

        Raises:
            UnknownMemberIdError: No client is this member.
        """
        path, info = f"{LOCKS}{random_id().replace('-', '')}", self.info(group, member)

        def step(txn: kv.Txn, document: Membership) -> MemberInfo:
            before = _info(group, document, member, None)
            free, held = list[str](), [path]
            for each in before.lock.split():
                (free if group.is_free(each) else held).append(each)
            document.change(before._replace(lock=" ".join(held)))
            return before._replace(lock=" ".join(free))

        lock = hold(group, path, lambda: group.update(step))
        return GroupMember(group, info._replace(lock=path, pid=os.getpid()), lock)

    def change(
        self,
        group: Group,
        member: str,
        instance: str | None,
        changed: Callable[[MemberInfo], MemberInfo],
        check: CheckEpoch,
    ) -> None:
        """Change what the group knows of a member, if it is one.

        Raises:
            ApiError: See ``check``.
            UnknownMemberIdError, FencedInstanceIdError: It was removed just now.
        """
        before = group.read().members.get(member)
        if before is None or before.remote is None or changed(before) == before:
            return

        def step(txn: kv.Txn, document: Membership) -> None:
            info, _, _ = _checked(txn, group, document, member, instance, check)
            document.change(changed(info))

        group.update(step)

    def leave(self, group: Group, member: str) -> None:
        """Remove a member."""
        self._forget(group, member)
        group.remove_members([member])

    def leave_for_now(self, group: Group, member: str) -> None:
        """Keep the partitions of a static member until its session ends."""

        def step(txn: kv.Txn, document: Membership) -> None:
            deadline_ms = group.uptime() + _info(group, document, member, None).session_ms
            SESSIONS.put(txn, group.key, member, value=MemberSession(deadline_ms, epoch=LEFT))

        self._forget(group, member)
        group.update(step)

    def _forget(self, group: Group, member: str) -> None:
        self._seen.get(group.name, {}).pop(member, None)

    # Assignments

    def follow(
        self,
        group: Group,
        member: str,
        instance: str | None,
        owned: Keys | None,
        check: CheckEpoch,
        *,
        confirms: bool = False,
    ) -> Step:
        """Take a member as far towards its target as its client has confirmed.

        Args:
            group: The group.
            member: Its id.
            instance: The instance id that the client has named.
            owned: The partitions that the client has; None if it does not say.
            check: Of its epoch.
            confirms: Whether the client has to confirm what it gets, by `look`.

        Raises:
            ApiError: See ``check``.
            UnknownMemberIdError, FencedInstanceIdError: It was removed.
        """

        def step(txn: kv.Txn, document: Membership) -> Step:
            info, session, share = _checked(txn, group, document, member, instance, check)
            is_revoking = bool(share.revoked) and (
                owned is None or not share.revoked.keys().isdisjoint(owned)
            )
            assigned = dict(share.kept)
            if not is_revoking:
                _release(txn, group, document, share.revoked)
                _acquire(txn, group, document, member, share.free)
                assigned.update(share.free)
                if confirms:
                    session = session._replace(due_ms=0)  # The time for that begins now.
                if session.epoch != document.generation:
                    session = session._replace(
                        epoch=document.generation, previous_epoch=session.epoch
                    )
            session = _renew(txn, group, info, session, is_due=is_revoking or confirms)
            return Step(session.epoch, assigned, is_revoking, is_revoking)

        return self._step(group, member, step)

    def look(self, group: Group, member: str, instance: str | None, check: CheckEpoch) -> Step:
        """Renew the session of a member; return where it is, without a change of its partitions.

        Raises:
            ApiError: See ``check``.
            UnknownMemberIdError, FencedInstanceIdError: It was removed.
        """

        def step(txn: kv.Txn, document: Membership) -> Step:
            info, session, share = _checked(txn, group, document, member, instance, check)
            is_late = session.epoch != document.generation
            must_join = is_late or bool(share.revoked) or bool(share.free)
            _renew(txn, group, info, session, is_due=must_join)
            return Step(session.epoch, share.kept, bool(share.revoked), must_join)

        return self._step(group, member, step)

    def _step(self, group: Group, member: str, step: Callable[[kv.Txn, Membership], Step]) -> Step:
        """Run a step once the group has a target for its members and topics."""
        catalog = self._log.root.version()
        self._remove_dead(group)
        group.check_topics()
        group.rebalance(ASSIGNORS)

        def run(txn: kv.Txn, document: Membership) -> tuple[Step, _Seen | None]:
            done = step(txn, document)
            if done.must_join or not document.target_is_current:
                return done, None
            session_ms = document.members[member].session_ms
            return done, _Seen((document.version, catalog), session_ms)

        done, seen = group.update(run)
        if seen is None:
            self._forget(group, member)
        else:
            self._seen.setdefault(group.name, {})[member] = seen
        return done

    def renew(self, group: Group, member: str, check: CheckEpoch) -> int:
        """Renew the session of a member of a share group; return its epoch, that of the group.

        Raises:
            ApiError: See ``check``.
            UnknownMemberIdError: It was removed.
        """
        catalog = self._log.root.version()
        self._remove_dead(group)

        def step(txn: kv.Txn, document: Membership) -> tuple[int, _Seen]:
            info, session, _ = _checked(txn, group, document, member, None, check)
            document.assign_all()
            if session.epoch != document.generation:
                epochs = {"epoch": document.generation, "previous_epoch": session.epoch}
                session = session._replace(**epochs)
            _renew(txn, group, info, session, is_due=False)
            return session.epoch, _Seen((document.version, catalog), info.session_ms)

        epoch, seen = group.update(step)
        self._seen.setdefault(group.name, {})[member] = seen
        return epoch

    def is_unchanged(self, group: Group, member: str, epoch: int) -> bool:
        """Renew the session of a member if nothing has changed since its last request; else False.

        That saves reading the group, for nearly all heartbeats.
        """
        seen = self._seen.get(group.name, {}).get(member)
        versions = group.version(), self._log.root.version()
        if seen is None or seen.versions != versions or self._is_look_due(group):
            return False

        def step(txn: kv.Txn) -> bool:
            session = SESSIONS.get(txn, group.key, member)
            if session is None or session.due_ms or session.epoch != epoch:
                return False
            renewed = session._replace(deadline_ms=group.uptime() + seen.session_ms)
            SESSIONS.put(txn, group.key, member, value=renewed)
            return True

        return group.context.live.write(step)

    def _is_look_due(self, group: Group) -> bool:
        return monotonic() >= self._looked.get(group.name, 0.0)

    def _remove_dead(self, group: Group) -> None:
        """Remove dead members now and then: who else would, in a group of clients only?

        Also who asks, if its time is over: it may be the one that asks most often.
        """
        if not self._is_look_due(group):
            return
        self._looked[group.name] = monotonic() + _LOOK_SECONDS
        group.remove_dead_members()
        members = group.read().members
        seen = self._seen.get(group.name, {})
        for gone in set(seen) - members.keys():  # Other threads add to it meanwhile.
            seen.pop(gone, None)
        if not members:
            self._seen.pop(group.name, None)
            self._looked.pop(group.name, None)

    # Committed offsets

    def commit(
        self,
        group: Group,
        member: str,
        instance: str | None,
        epoch: int,
        positions: Mapping[TopicPartition, OffsetAndMetadata],
    ) -> dict[TopicPartition, EmbedlogError | ApiError | None]:
        """Commit positions of a member; return the error of each partition, or None.

        A partition that nobody has owned may be committed by who has the current epoch.  Kafka
        takes any partition: so one that was missed, and has joined again, moves back what the
        others have committed meanwhile.

        Raises:
            ApiError: The epoch is none of the member's.
            UnknownMemberIdError, FencedInstanceIdError: It was removed.
        """
        outcomes: dict[TopicPartition, EmbedlogError | ApiError | None] = dict.fromkeys(positions)
        rows: dict[TopicPartition, dict[bytes, bytes]] = {}
        for partition, position in positions.items():
            try:
                rows[partition] = group.encode({partition: position})
            except EmbedlogError as error:
                outcomes[partition] = error

        def step(txn: kv.Txn) -> dict[TopicPartition, ApiError]:
            info = _info(group, group.load(txn), member, instance)
            stale = _stale_epoch(info, epoch)
            session = _session(txn, group, member)
            if epoch > session.epoch:
                raise stale
            _renew(txn, group, info, session, is_due=bool(session.due_ms))
            refused = {}
            for partition, row in rows.items():
                owner = OWNERS.get(txn, group.key, *row) or PartitionOwner()
                # One that was lost and came back has the generation in which it came back.
                own = owner.member == member and owner.generation <= epoch
                if own or (owner.epoch == 0 and epoch == session.epoch):
                    offsets.put(txn, group.key, row)
                else:
                    refused[partition] = stale
            return refused

        live = group.context.live
        live.check_linked()
        refused = group.settled(lambda: live.write(step))
        group.checkpoint()
        return outcomes | refused

    def check_reader(self, group: Group, member: str, epoch: int) -> None:
        """Raise unless a member may read committed offsets.

        Raises:
            ApiError: Its epoch is another one.
            UnknownMemberIdError: It was removed.
        """

        def step(txn: kv.Txn) -> tuple[MemberInfo, int]:
            info = _info(group, group.load(txn), member, None)
            return info, _session(txn, group, member).epoch

        info, current = group.context.live.read(step)
        if epoch != current:
            raise _stale_epoch(info, epoch)


def _kind(info: MemberInfo) -> tuple[str | None, str | None]:
    """Return what a member stays for as long as it lives."""
    return info.instance_id, info.remote and info.remote.protocol


def _check_released(txn: kv.Txn, group: Group, document: Membership, info: MemberInfo) -> None:
    """Raise if a client with the protocol of KIP-848 would replace one that lives.

    Raises:
        ApiError: It would.
    """
    kind = instance, protocol = _kind(info)
    if instance is None or protocol != MODERN:
        return
    for other in [each for each in document.members.values() if _kind(each) == kind]:
        session = _session(txn, group, other.id)
        # One whose time is over may be there still: nobody else may look.
        if session.epoch != LEFT and session.deadline_ms > group.uptime():
            text = f"The member {other.id} has the instance id {instance}"
            raise ApiError(ErrorCode.UNRELEASED_INSTANCE_ID, text)


def _stale_epoch(info: MemberInfo, epoch: int) -> ApiError:
    is_classic = info.remote is not None and info.remote.protocol == CLASSIC
    code = ErrorCode.ILLEGAL_GENERATION if is_classic else ErrorCode.STALE_MEMBER_EPOCH
    return ApiError(code, f"The member does not own the partition in generation {epoch}")


def _info(group: Group, document: Membership, member: str, instance: str | None) -> MemberInfo:
    """Return a member that is a client.

    Raises:
        UnknownMemberIdError, FencedInstanceIdError: There is none.
    """
    document.check_member(member, instance, group.name)
    info, is_other = document.members[member], document.kind != group.kind
    if is_other or info.remote is None or (instance is not None and info.instance_id != instance):
        raise UnknownMemberIdError("No client is this member", group=group.name, member=member)
    return info


def _checked(
    txn: kv.Txn,
    group: Group,
    document: Membership,
    member: str,
    instance: str | None,
    check: CheckEpoch,
) -> tuple[MemberInfo, MemberSession, Share]:
    """Return a member that is a client, once its epoch is checked.

    Raises:
        ApiError: See ``check``.
        UnknownMemberIdError, FencedInstanceIdError: It was removed.
    """
    info = _info(group, document, member, instance)
    session, share = _session(txn, group, member), _share(txn, group, document, member)
    check(session, share.kept.keys() | share.revoked.keys())
    return info, session, share


def _session(txn: kv.Txn, group: Group, member: str) -> MemberSession:
    return SESSIONS.get(txn, group.key, member) or MemberSession(0)


def _renew(
    txn: kv.Txn, group: Group, info: MemberInfo, session: MemberSession, *, is_due: bool
) -> MemberSession:
    """Begin a session anew, and return it; it ends when the client must have done what is due.

    So whoever looks for dead members removes one that does not do it.
    """
    assert info.remote is not None
    now_ms = group.uptime()
    due_ms = (session.due_ms or now_ms + info.remote.rebalance_ms) if is_due else 0
    deadline_ms = now_ms + info.session_ms
    renewed = session._replace(
        deadline_ms=min(deadline_ms, due_ms) if due_ms else deadline_ms, due_ms=due_ms
    )
    SESSIONS.put(txn, group.key, info.id, value=renewed)
    return renewed


def _share(txn: kv.Txn, group: Group, document: Membership, member: str) -> Share:
    ids = {topic: number for topic, (number, _) in document.topics.items()}
    assigned = document.target.get(member, ())
    target = {PARTITION_KEY.pack(ids[tp.topic], tp.partition): tp for tp in assigned}
    kept: dict[bytes, TopicPartition] = {}
    revoked: dict[bytes, TopicPartition] = {}
    taken = set()
    rows = ownership.owned_or_assigned(txn, group.key, member, target.keys())
    for row_key, owner in rows:
        key = row_key[-PARTITION_KEY.size :]
        if owner.member == member:
            kind = kept if key in target else revoked
            kind[key] = ownership.topic_partition(row_key, owner)
        elif owner.member != NO_OWNER:
            taken.add(key)
    free = {key: tp for key, tp in target.items() if key not in kept and key not in taken}
    return Share(kept, revoked, free)


def _release(txn: kv.Txn, group: Group, document: Membership, keys: Keys) -> None:
    for key in keys:
        owner = OWNERS.get(txn, group.key, key)
        if owner is not None:
            OWNERS.put(txn, group.key, key, value=owner._replace(member=NO_OWNER))
            document.touch()


def _acquire(
    txn: kv.Txn,
    group: Group,
    document: Membership,
    member: str,
    partitions: Mapping[bytes, TopicPartition],
) -> None:
    offsets.check_settled(txn, group.key, partitions)
    for key, tp in partitions.items():
        before = OWNERS.get(txn, group.key, key) or PartitionOwner()
        owner = PartitionOwner(
            before.epoch + 1, before.start, document.generation, member, tp.topic
        )
        OWNERS.put(txn, group.key, key, value=owner)
        document.touch()
