"""Classic members of the log's groups: they join and sync, but the server assigns.

Kafka's own coordinator answers clients in this way while a group moves to KIP-848: a join is
answered at once, and names no leader, so that no client assigns.  A client that must give up
partitions, or may have more, learns it by its heartbeat, and joins again.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from embedlog.assignor.select import BUILT_IN
from embedlog.group import Group
from embedlog.groups.membership import CLASSIC, MemberInfo, RemoteClient
from embedlog.keyspace import PARTITION_KEY
from embedlog.server.answers import Answers, Caller, Fields, numbers_by_topic, versioned
from embedlog.server.classic_groups import MAX_SESSION_MS, REQUIRES_ID_SINCE, MemberIdRequiredError
from embedlog.server.error_codes import ApiError, ErrorCode
from embedlog.server.remote_members import RemoteMembers, Step
from embedlog.server.subscriptions import Subscription, check_member_id, remote_info, subscription

PROTOCOL = "consumer"
"""The protocol type of consumers."""
_ASSIGNORS = {**{name: name for name in BUILT_IN}, "RoundRobinAssigner": "roundrobin"}
"""The assignors of clients, and their names in Kafka; kafkajs has one of its own."""


class ClassicMembers:
    """Answers classic members.

    Args:
        answers: Of the log.
        members: The members of its groups that are clients.
    """

    def __init__(self, answers: Answers, members: RemoteMembers) -> None:
        self._log, self._members = answers.log, members

    def join(self, request: Any, caller: Caller) -> Fields:
        """Join a group, or rejoin it with what the member has confirmed.

        Raises:
            ApiError: The member cannot join.
        """
        if not 0 < request.session_timeout_ms <= MAX_SESSION_MS:
            raise ApiError(ErrorCode.INVALID_SESSION_TIMEOUT)
        group = self._members.group(request.group_id)
        instance, member = request.group_instance_id, request.member_id
        check_member_id(member)
        if not member:
            member = f"{_prefix(instance or caller.client_id)}-{uuid4()}"
            if instance is None and caller.version >= REQUIRES_ID_SINCE:
                raise MemberIdRequiredError(member)
        said = subscription(request.protocols)
        # What a removed member still has may be another one's: it must give up all first.
        comes_back = bool(request.member_id) and (instance is not None or bool(said.owned))
        info = self._info(member, request, caller, said)
        self._members.admit(group, info, comes_back=comes_back)
        infos = self._log.root.topics()
        owned = {
            PARTITION_KEY.pack(infos[topic].id, number)
            for topic, number in said.owned
            if topic in infos and number >= 0
        }
        step = self._members.follow(group, member, instance, owned, lambda *_: None, confirms=True)
        chosen = group.read().assignor
        names = [each.name for each in request.protocols]
        return {
            "generation_id": step.epoch,
            "protocol_type": PROTOCOL,
            "protocol_name": next((n for n in names if _ASSIGNORS.get(n) == chosen), names[0]),
            "leader": "",
            "member_id": member,
            "members": [],
        }

    def _info(self, member: str, request: Any, caller: Caller, said: Subscription) -> MemberInfo:
        rebalance_ms = request.rebalance_timeout_ms
        # Version 0 has no timeout of its own.
        rebalance_ms = request.session_timeout_ms if rebalance_ms < 0 else rebalance_ms
        client = RemoteClient(
            CLASSIC, caller.client_host, said.rack, said.topics, None, rebalance_ms
        )
        named = [_ASSIGNORS[each.name] for each in request.protocols if each.name in _ASSIGNORS]
        instance, now_ms = request.group_instance_id, self._log.root.clock()
        session_ms = request.session_timeout_ms
        return remote_info(member, instance, client, caller, named, session_ms, now_ms)

    def sync(self, request: Any) -> Fields:
        """Return the partitions of a member.

        Raises:
            ApiError: It must join again.
        """
        group = self._members.group(request.group_id)
        if request.protocol_type not in (None, PROTOCOL):
            raise ApiError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
        step = self._look(group, request)
        info = group.read().members.get(request.member_id)
        if info is not None and request.protocol_name in BUILT_IN.keys() - {*info.assignors}:
            raise ApiError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
        if step.must_join and not step.is_revoking:
            raise ApiError(ErrorCode.REBALANCE_IN_PROGRESS)
        assigned = numbers_by_topic(step.assigned.values(), "topic")
        return {
            "protocol_type": PROTOCOL,
            "protocol_name": request.protocol_name,
            "assignment": versioned("ConsumerProtocolAssignment", assigned_partitions=assigned),
        }

    def heartbeat(self, request: Any) -> None:
        """Note that a member is alive.

        Raises:
            ApiError: It must join again.
        """
        group = self._members.group(request.group_id)
        if self._members.is_unchanged(group, request.member_id, request.generation_id):
            return
        if self._look(group, request).must_join:
            raise ApiError(ErrorCode.REBALANCE_IN_PROGRESS)

    def _look(self, group: Group, request: Any) -> Step:
        def check(session: Any, _: Any) -> None:
            if request.generation_id != session.epoch:
                raise ApiError(ErrorCode.ILLEGAL_GENERATION)

        return self._members.look(group, request.member_id, request.group_instance_id, check)

    def leave(self, group_id: str, member: str, instance: str | None) -> None:
        """Remove a member, by its id or its instance id.

        Raises:
            ApiError: There is no such member.
        """
        group = self._members.group(group_id)
        document = group.read()
        if not member and instance is not None:
            infos = document.members.values()
            member = next((each.id for each in infos if each.instance_id == instance), "")
        document.check_member(member, instance, group.name)
        if instance is not None and document.members[member].instance_id != instance:
            raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
        self._members.leave(group, member)


def may_be_assigned(request: Any, *, only: bool) -> bool:
    """Whether a server knows what the member that joins says, and one of its assignors.

    Args:
        request: The request to join.
        only: Whether it must know all of them.
    """
    names = {each.name for each in request.protocols}
    known = names & _ASSIGNORS.keys()
    if request.protocol_type != PROTOCOL or not known or (only and names != known):
        return False
    try:
        subscription(request.protocols)
    except ApiError:
        return False
    return True


def _prefix(name: str) -> str:
    """Return the beginning of a member id."""
    return "".join(each for each in name if each.isprintable())[:50] or "client"
