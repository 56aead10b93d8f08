"""Classic groups: Kafka's coordinator for members that assign partitions among themselves.

The members join until all have, or the time for it is over; one of them, the leader, gets the
subscriptions of all and assigns; each gets its assignment; then all send heartbeats, until a
member joins, leaves or is silent for its session, which begins the next generation.  What members
say of themselves, and what the leader assigns, is bytes that only they understand.

Members are in memory, as those of a coordinator that failed over: after a restart they join
again.  Committed offsets are rows of the log, and so is a *claim*, which keeps programs and other
servers out of the group.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any
from uuid import uuid4

from embedlog.consumer.group_member import GroupMember
from embedlog.errors import EmbedlogError
from embedlog.groups.offsets import check_group_id
from embedlog.lazy import logging
from embedlog.server.answers import Caller, Fields
from embedlog.server.error_codes import ApiError, ErrorCode

_logger = logging.getLogger("embedlog.server")

EMPTY, STABLE = "Empty", "Stable"
JOINING, SYNCING = "PreparingRebalance", "CompletingRebalance"
"""Kafka's names of the states."""
FIRST_JOIN_SECONDS = 0.1
"""How long an empty group waits for more members, as ``group.initial.rebalance.delay.ms``."""
MAX_SESSION_MS = 1_800_000
REQUIRES_ID_SINCE, _SKIPS_ASSIGNMENT_SINCE = 4, 9
_FOREVER = float("inf")


class ClassicMember:
    """A member of a group."""

    def __init__(self, member_id: str, request: Any, client_id: str, client_host: str) -> None:
        self.id, self.client_id, self.client_host = member_id, client_id, client_host
        self.instance_id: str | None = request.group_instance_id
        self.assignment = b""
        self.waits_for_join = False
        """Whether it has joined the generation that is being made."""
        self.has_synced = False
        self.deadline = _FOREVER
        """When its session ends, on the monotonic clock."""
        self.update(request)

    def update(self, request: Any) -> None:
        """Take over what a request to join says."""
        self.session_seconds = request.session_timeout_ms / 1000
        # Version 0 has no timeout of its own.
        rebalance_ms = request.rebalance_timeout_ms
        rebalance_ms = request.session_timeout_ms if rebalance_ms < 0 else rebalance_ms
        self.rebalance_seconds = min(rebalance_ms, MAX_SESSION_MS) / 1000
        self.protocols = {each.name: each.metadata for each in request.protocols}

    def heard(self) -> None:
        """Begin the session anew."""
        self.deadline = monotonic() + self.session_seconds


class ClassicGroup:
    """A group; all is guarded by the lock of `ClassicGroups`."""

    def __init__(self, name: str, lock: threading.RLock, claim: GroupMember) -> None:
        self.claim = claim
        self.name, self.state, self.generation = name, EMPTY, 0
        self.protocol_type, self.protocol = "", ""
        self.leader: str | None = None
        self.members: dict[str, ClassicMember] = {}
        self.pending: dict[str, float] = {}
        """Ids that were given to members that have not joined with them, and until when."""
        self.changed = threading.Condition(lock)
        """Notified when the generation or the state changes."""
        self.deadline = _FOREVER
        """When the members must have joined, or synced."""
        self.earliest = 0.0
        """When a first generation may begin."""

    # Changes of state

    def prepare(self) -> None:
        """Begin the next generation: all members must join."""
        if self.state == JOINING:
            return
        now = monotonic()
        first = self.state == EMPTY
        self.earliest = now + FIRST_JOIN_SECONDS if first else now
        timeout = max((each.rebalance_seconds for each in self.members.values()), default=0)
        self.deadline = now + max(timeout, FIRST_JOIN_SECONDS)
        self.state = JOINING
        self.changed.notify_all()

    def complete_if_joined(self) -> None:
        """Complete the generation if all have joined, or no time is left."""
        if self.state != JOINING:
            return
        now = monotonic()
        everyone = not self.pending and all(each.waits_for_join for each in self.members.values())
        if not (everyone and now >= self.earliest) and now < self.deadline:
            return
        for member in list(self.members.values()):
            # A static member may come back until its session ends.
            if not member.waits_for_join and member.instance_id is None:
                del self.members[member.id]
        self.generation += 1
        joined = [each for each in self.members.values() if each.waits_for_join]
        if not joined:
            self.deadline = now + 1 if self.members else _FOREVER
            if not self.members:
                self._become_empty()
            return
        if self.leader not in {each.id for each in joined}:
            self.leader = joined[0].id
        self.protocol = self._chosen_protocol()
        self.state = SYNCING
        self.deadline = now + max(each.rebalance_seconds for each in self.members.values())
        for member in self.members.values():
            if member.waits_for_join:
                member.heard()
            member.waits_for_join = member.has_synced = False
            member.assignment = b""
        self.changed.notify_all()
        _logger.debug(
            "Group %s: generation %d with %d members", self.name, self.generation, len(self.members)
        )

    def _become_empty(self) -> None:
        self.state, self.leader, self.protocol, self.deadline = EMPTY, None, "", _FOREVER
        self.changed.notify_all()

    def _chosen_protocol(self) -> str:
        """Return the protocol that most members prefer, of those that all have."""
        common = _common_protocols(self.members.values())
        votes: Counter[str] = Counter(
            next(name for name in each.protocols if name in common)
            for each in self.members.values()
        )
        return votes.most_common(1)[0][0]

    def remove(self, member_id: str) -> None:
        """Remove a member, and begin the next generation without it."""
        del self.members[member_id]
        if self.leader == member_id:
            self.leader = next(iter(self.members), None)
        if not self.members and not self.pending:
            self.generation += 1
            self._become_empty()
        elif self.state == JOINING:
            self.complete_if_joined()
        elif self.members:
            self.prepare()
        self.changed.notify_all()

    def static_member(self, instance_id: str | None) -> ClassicMember | None:
        """Return the member with an instance id."""
        if instance_id is None:
            return None
        every = self.members.values()
        return next((each for each in every if each.instance_id == instance_id), None)

    def next_due(self) -> float:
        """Return when something happens by itself, on the monotonic clock."""
        times = [each.deadline for each in self.members.values() if not each.waits_for_join]
        times += self.pending.values()
        times.append(self.deadline)
        if self.state == JOINING and monotonic() < self.earliest:
            times.append(self.earliest)
        return min(times)

    def expire(self) -> None:
        """Remove what was silent for too long, and complete what is due."""
        now = monotonic()
        for member_id in [each for each, until in self.pending.items() if until <= now]:
            del self.pending[member_id]
        for member in list(self.members.values()):
            silent = member.deadline <= now and not member.waits_for_join
            if silent and member.id in self.members:
                _logger.info("Group %s: the session of %s ended", self.name, member.id)
                self.remove(member.id)
        if self.state == SYNCING and self.deadline <= now:
            for member_id in [each.id for each in self.members.values() if not each.has_synced]:
                if member_id in self.members:
                    self.remove(member_id)
        self.complete_if_joined()
        if not self.members and not self.pending and self.state != EMPTY:
            self._become_empty()


class ClassicGroups:
    """The classic groups of a server, and what members ask of their coordinator.

    A call waits in the thread of its connection.

    Args:
        claim: Claims the group of a name; raises if it has members elsewhere.
    """

    def __init__(self, claim: Callable[[str], GroupMember]) -> None:
        self._claim = claim
        self._lock = threading.RLock()
        self._groups: dict[str, ClassicGroup] = {}
        self._timer: threading.Thread | None = None
        self._due_changed = threading.Condition(self._lock)
        self._closed = False

    def close(self) -> None:
        """End all calls that wait, and the timer."""
        with self._lock:
            self._closed = True
            for group in self._groups.values():
                group.changed.notify_all()
                _give_up(group)
            self._due_changed.notify_all()
        if self._timer is not None:
            self._timer.join()

    # What others see

    def with_members(self) -> list[ClassicGroup]:
        """Return the groups that have members."""
        with self._lock:
            return [group for group in self._groups.values() if group.members]

    def has(self, name: str) -> bool:
        """Return whether there is a group, which may have only members that are about to join."""
        with self._lock:
            return name in self._groups

    def find(self, name: str) -> ClassicGroup | None:
        """Return a group that has members."""
        with self._lock:
            group = self._groups.get(name)
            return group if group is not None and group.members else None

    def described(self, name: str) -> Fields | None:
        """Return a group as DescribeGroups has it; None if it has no members."""
        with self._lock:
            group = self.find(name)
            if group is None:
                return None
            is_settled = group.state == STABLE
            return {
                "group_id": name,
                "group_state": group.state,
                "protocol_type": group.protocol_type,
                "protocol_data": group.protocol if is_settled else "",
                "members": [
                    {
                        "member_id": each.id,
                        "group_instance_id": each.instance_id,
                        "client_id": each.client_id,
                        "client_host": f"/{each.client_host}",
                        "member_metadata": each.protocols.get(group.protocol, b"")
                        if is_settled
                        else b"",
                        "member_assignment": each.assignment if is_settled else b"",
                    }
                    for each in group.members.values()
                ],
            }

    # Joining

    def join(self, request: Any, caller: Caller) -> Fields:
        """Join a group; returns once the generation is complete.

        Raises:
            ApiError: The member cannot join.
        """
        check_group_id(request.group_id)
        if not 0 < request.session_timeout_ms <= MAX_SESSION_MS:
            raise ApiError(ErrorCode.INVALID_SESSION_TIMEOUT)
        if not request.protocol_type or not request.protocols:
            raise ApiError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
        with self._lock:
            group = self._groups.get(request.group_id)
            if group is None:
                if request.member_id:
                    raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
                claim = self._claim(request.group_id)
                group = ClassicGroup(request.group_id, self._lock, claim)
                self._groups[request.group_id] = group
            self._check_protocols(group, request)
            try:
                member = self._admit(group, request, caller)
                group.complete_if_joined()
                self._reschedule()
                return self._joined(group, member, caller.version)
            finally:
                self._forget_if_empty(group)

    def _check_protocols(self, group: ClassicGroup, request: Any) -> None:
        others = [each for each in group.members.values() if each.id != request.member_id]
        if not others:
            return
        offered = {each.name for each in request.protocols}
        has_common = bool(_common_protocols(others) & offered)
        if group.protocol_type != request.protocol_type or not has_common:
            raise ApiError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)

    def _admit(self, group: ClassicGroup, request: Any, caller: Caller) -> ClassicMember:
        """Add or update the member that joins, and begin a generation if one is needed."""
        instance_id, member_id = request.group_instance_id, request.member_id
        static = group.static_member(instance_id)
        if member_id:
            member = self._known(group, member_id, instance_id, pending=True)
            if member is not None:
                self._rejoin(group, member, request)
                return member
            del group.pending[member_id]
        else:
            member_id = f"{instance_id or caller.client_id or 'client'}-{uuid4()}"
            if static is not None:
                return self._replace(group, static, member_id, request)
            if instance_id is None and caller.version >= REQUIRES_ID_SINCE:
                group.pending[member_id] = monotonic() + request.session_timeout_ms / 1000
                self._reschedule()
                raise MemberIdRequiredError(member_id)
        member = ClassicMember(member_id, request, caller.client_id, caller.client_host)
        group.members[member_id] = member
        group.protocol_type = request.protocol_type
        group.leader = group.leader or member_id
        group.prepare()
        member.waits_for_join = True
        return member

    def _rejoin(self, group: ClassicGroup, member: ClassicMember, request: Any) -> None:
        protocols = {each.name: each.metadata for each in request.protocols}
        is_led = group.state == STABLE and group.leader != member.id
        # The member may have missed the answer to its last request.
        if protocols == member.protocols and (group.state == SYNCING or is_led):
            member.heard()
            return
        member.update(request)
        group.prepare()
        member.waits_for_join = True

    def _replace(
        self, group: ClassicGroup, old: ClassicMember, member_id: str, request: Any
    ) -> ClassicMember:
        """Give the place of a static member to the client that has its instance id now."""
        unchanged = {each.name: each.metadata for each in request.protocols} == old.protocols
        member = ClassicMember(member_id, request, old.client_id, old.client_host)
        member.assignment, member.has_synced = old.assignment, old.has_synced
        # In its place, so that the order of members stays.
        group.members = {
            member_id if name == old.id else name: member if name == old.id else each
            for name, each in group.members.items()
        }
        if group.leader == old.id:
            group.leader = member_id
        member.heard()
        group.changed.notify_all()
        if group.state != STABLE or not unchanged:
            group.prepare()
            member.waits_for_join = True
        return member

    def _joined(self, group: ClassicGroup, member: ClassicMember, version: int) -> Fields:
        """Wait until the member's generation is complete, and return the answer."""
        was_stable = group.state == STABLE and not member.waits_for_join
        while member.waits_for_join and group.members.get(member.id) is member:
            if self._closed:
                raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
            group.changed.wait()
        if group.members.get(member.id) is not member:
            fenced = group.static_member(member.instance_id) is not None
            raise ApiError(ErrorCode.FENCED_INSTANCE_ID if fenced else ErrorCode.UNKNOWN_MEMBER_ID)
        # A leader that comes back under another id must not assign again.
        skips = was_stable and group.leader == member.id
        leads = group.leader == member.id and not skips
        old_client = skips and version < _SKIPS_ASSIGNMENT_SINCE
        return {
            "generation_id": group.generation,
            "protocol_type": group.protocol_type,
            "protocol_name": group.protocol,
            "leader": "" if old_client else group.leader or "",
            "skip_assignment": skips,
            "member_id": member.id,
            "members": [
                {
                    "member_id": each.id,
                    "group_instance_id": each.instance_id,
                    "metadata": each.protocols[group.protocol],
                }
                for each in group.members.values()
            ]
            if leads or (skips and not old_client)
            else [],
        }

    # Members

    def sync(self, request: Any) -> Fields:
        """Take the assignments of the leader, and return that of the member once it is there.

        Raises:
            ApiError: The generation is over, or the caller is not a member.
        """
        with self._lock:
            group, member = self._asking(request)
            for ours, theirs in (
                (group.protocol_type, request.protocol_type),
                (group.protocol, request.protocol_name),
            ):
                if theirs is not None and ours != theirs and group.state != JOINING:
                    raise ApiError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
            member.has_synced = True
            member.heard()
            if group.state == SYNCING and group.leader == member.id:
                assignments = {each.member_id: each.assignment for each in request.assignments}
                for each in group.members.values():
                    each.assignment = assignments.get(each.id, b"")
                group.state, group.deadline = STABLE, _FOREVER
                group.changed.notify_all()
            while group.state == SYNCING and group.generation == request.generation_id:
                if self._closed:
                    raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
                member.deadline = _FOREVER
                group.changed.wait()
            member.heard()
            self._reschedule()
            self._asking(request)  # It may have been removed.
            if group.state != STABLE:
                raise ApiError(ErrorCode.REBALANCE_IN_PROGRESS)
            return {
                "protocol_type": group.protocol_type,
                "protocol_name": group.protocol,
                "assignment": member.assignment,
            }

    def heartbeat(self, request: Any) -> None:
        """Note that a member is alive.

        Raises:
            ApiError: It must join again.
        """
        with self._lock:
            group, member = self._asking(request)
            member.heard()
            if group.state == JOINING:
                raise ApiError(ErrorCode.REBALANCE_IN_PROGRESS)

    def check_committer(
        self, group_id: str, generation: int, member_id: str, instance_id: str | None
    ) -> None:
        """Raise unless the caller may commit offsets of a group.

        Raises:
            ApiError: It may not.
        """
        with self._lock:
            group, member = self._member(group_id, generation, member_id, instance_id)
            member.heard()
            if group.state == SYNCING:
                raise ApiError(ErrorCode.REBALANCE_IN_PROGRESS)

    def leave(self, group_id: str, member_id: str, instance_id: str | None) -> None:
        """Remove a member.

        Raises:
            ApiError: There is no such member.
        """
        with self._lock:
            group = self._groups.get(group_id)
            if group is None:
                raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
            static = group.static_member(instance_id)
            if not member_id and static is not None:
                member_id = static.id
            if group.pending.pop(member_id, None) is None:
                self._known(group, member_id, instance_id)
                group.remove(member_id)
            group.complete_if_joined()
            self._reschedule()
            self._forget_if_empty(group)

    def _asking(self, request: Any) -> tuple[ClassicGroup, ClassicMember]:
        check_group_id(request.group_id)
        who = request.generation_id, request.member_id, request.group_instance_id
        return self._member(request.group_id, *who)

    def _member(
        self, group_id: str, generation: int, member_id: str, instance_id: str | None
    ) -> tuple[ClassicGroup, ClassicMember]:
        group = self.find(group_id)
        if group is None:
            raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
        member = self._known(group, member_id, instance_id)
        assert member is not None
        if generation != group.generation:
            raise ApiError(ErrorCode.ILLEGAL_GENERATION)
        return group, member

    def _known(
        self,
        group: ClassicGroup,
        member_id: str,
        instance_id: str | None,
        *,
        pending: bool = False,
    ) -> ClassicMember | None:
        """Return a member by its id; None if the id was given out and was not used yet."""
        static = group.static_member(instance_id)
        if instance_id is not None:
            if static is None:
                raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
            if static.id != member_id:
                raise ApiError(ErrorCode.FENCED_INSTANCE_ID)
        member = group.members.get(member_id)
        if member is None and not (pending and member_id in group.pending):
            raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
        return member

    # Time

    def _forget_if_empty(self, group: ClassicGroup) -> None:
        is_empty = not group.members and not group.pending
        if is_empty and self._groups.pop(group.name, None) is not None:
            _give_up(group)

    def _reschedule(self) -> None:
        """Have the timer look at what is due, as a deadline may be earlier than those before."""
        if self._timer is None and not self._closed:
            self._timer = threading.Thread(
                target=self._run, name="embedlog-server-groups", daemon=True
            )
            self._timer.start()
        self._due_changed.notify_all()

    def _run(self) -> None:
        with self._lock:
            while not self._closed:
                for group in list(self._groups.values()):
                    group.expire()
                    self._forget_if_empty(group)
                due = min((each.next_due() for each in self._groups.values()), default=_FOREVER)
                timeout = None if due == _FOREVER else max(due - monotonic(), 0.001)
                self._due_changed.wait(timeout)


def _common_protocols(members: Iterable[ClassicMember]) -> set[str]:
    """Return the protocols that all members have."""
    return set.intersection(*(set(each.protocols) for each in members))


def _give_up(group: ClassicGroup) -> None:
    """Let others have a group."""
    try:
        group.claim.leave()
    except EmbedlogError as error:
        # Its lock is free, so that whoever joins removes it.
        _logger.warning("Group %s: %s", group.name, error)


class MemberIdRequiredError(ApiError):
    """A client must join again with the id that it gets, so that it does not join twice."""

    def __init__(self, member_id: str) -> None:
        super().__init__(ErrorCode.MEMBER_ID_REQUIRED)
        self.member_id = member_id
