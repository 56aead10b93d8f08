"""Answers the requests of consumers with ``group.protocol=consumer`` (KIP-848).

One request does all: a heartbeat says what the client subscribes to and has, and is answered with
its epoch and the partitions that it may read.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any
from uuid import UUID, uuid4

from embedlog.api import Log
from embedlog.errors import GroupIdNotFoundError
from embedlog.group import Group
from embedlog.groups.membership import (
    MODERN,
    SESSIONS,
    MemberInfo,
    MemberSession,
    Membership,
    RemoteClient,
    has_modern_members,
)
from embedlog.keyspace import PARTITION_KEY
from embedlog.record import TopicPartition
from embedlog.server.answers import MODERN_STATES, Answers, Caller, Fields, with_operations
from embedlog.server.classic_groups import ClassicGroups
from embedlog.server.cluster import topic_uuid
from embedlog.server.error_codes import ApiError, ErrorCode
from embedlog.server.remote_members import (
    LEFT,
    Keys,
    RemoteMembers,
)
from embedlog.server.subscriptions import check_member_id, matching_topics, remote_info

SESSION_MS = 45_000
"""How long a client may be silent, as ``group.consumer.session.timeout.ms``."""
HEARTBEAT_MS = 1_000
"""How often clients are told to ask.  Kafka says 5 s; here a partition that a member in Python gave
up must not wait so long."""
_JOIN, _LEAVE = 0, -1
"""Epochs with a meaning of their own."""
_UNIFORM = ("cooperative-sticky", "sticky", "range", "roundrobin")
_ASSIGNORS = {
    "uniform": _UNIFORM,
    "range": ("range", *(name for name in _UNIFORM if name != "range")),
}
"""Kafka's assignors of its server, and what they are here, in order of preference."""
_TYPE_OF_CLASSIC, _TYPE_OF_OTHERS = 0, 1


class ConsumerGroupAnswers:
    """Answers requests.

    Args:
        answers: Of the log.
        groups: The groups that are in memory, which no such client can join.
        members: The members of groups of the log that are clients.
    """

    def __init__(self, answers: Answers, groups: ClassicGroups, members: RemoteMembers) -> None:
        self._answers, self._groups, self._log = answers, groups, answers.log
        self._members = members
        self._told: dict[tuple[str, str], Keys] = {}
        """The assignments that this connection's clients were told last: said again if changed."""

    # Heartbeats

    def consumer_group_heartbeat(self, request: Any, caller: Caller) -> Fields:
        """Answer: the epoch of a member, and its assignment if it has changed."""
        return self._answers.outcome(self._heartbeat, request, caller)

    def _heartbeat(self, request: Any, caller: Caller) -> Fields:
        _check(request, caller.version)
        group = self._members.group(request.group_id)
        if self._groups.find(request.group_id) is not None:
            text = f"The group {group.name} has members that assign partitions among themselves"
            raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, text)
        member = request.member_id or str(uuid4())
        told = group.name, member
        if request.member_epoch < 0:
            return self._leave(group, request)
        if request.member_epoch == _JOIN:
            self._join(group, member, request, caller)
        elif (
            _says_nothing(request)
            # After a connection broke, the client may not have got its last assignment.
            and told in self._told
            and self._members.is_unchanged(group, member, request.member_epoch)
        ):
            return alive(member, request.member_epoch)
        else:
            self._update(group, member, request)
        owned = self._owned(request)
        check = partial(check_epoch, request.member_epoch, owned)
        step = self._members.follow(group, member, request.instance_id, owned, check)
        answer = alive(member, step.epoch)
        if _says_all(request) or self._told.get(told) != step.assigned.keys():
            answer["assignment"] = assignment(self._log, step.assigned)
        self._told = {told: set(step.assigned)}
        return answer

    def _join(self, group: Group, member: str, request: Any, caller: Caller) -> None:
        client = RemoteClient(MODERN, caller.client_host, None, (), None, 0)
        info = remote_info(
            *(member, request.instance_id, client),
            topics=(),
            assignors=_ASSIGNORS["uniform"],
            client_id=caller.client_id,
            session_ms=SESSION_MS,
            joined_ms=self._log.root.clock(),
        )

        def check(other: MemberInfo, session: MemberSession) -> None:
            is_modern = other.remote is not None and other.remote.protocol == MODERN
            # One whose time is over may be there still: nobody else may look.
            if is_modern and session.epoch != LEFT and session.deadline_ms > group.uptime():
                raise ApiError(
                    ErrorCode.UNRELEASED_INSTANCE_ID,
                    f"The member {other.id} has the instance id {other.instance_id}",
                )

        self._members.admit(group, self._changed(info, request), check)

    def _update(self, group: Group, member: str, request: Any) -> None:
        """Change what the group knows of a member, if the request or the topics say so."""
        info = group.read().members.get(member)
        if info is not None and info.remote is not None and self._changed(info, request) != info:
            check = partial(check_epoch, request.member_epoch, self._owned(request))
            changed = partial(self._changed, request=request)
            self._members.change(group, member, request.instance_id, changed, check)

    def _changed(self, info: MemberInfo, request: Any) -> MemberInfo:
        """Return what the group knows of a member after a request, which leaves out what stays."""
        client = info.remote
        assert client is not None
        names, pattern = request.subscribed_topic_names, request.subscribed_topic_regex
        if names is not None:
            client = client._replace(topics=tuple(sorted(names)))
        if pattern is not None:
            client = client._replace(pattern=pattern or None)
        if request.rack_id is not None:
            client = client._replace(rack=request.rack_id)
        if request.rebalance_timeout_ms >= 0:
            client = client._replace(rebalance_ms=request.rebalance_timeout_ms)
        topics = set(client.topics)
        if client.pattern is not None:
            topics |= matching_topics(client.pattern, self._log.root.topics())
        if request.server_assignor is not None:
            info = info._replace(assignors=_ASSIGNORS[request.server_assignor])
        return info._replace(topics=tuple(sorted(topics)), remote=client)

    def _leave(self, group: Group, request: Any) -> Fields:
        member, info = request.member_id, None
        document = group.read()
        document.check_member(member, request.instance_id, group.name)
        info = document.members[member]
        if info.remote is None:
            raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)
        if request.member_epoch == LEFT:
            self._members.leave_for_now(group, member)
        else:
            self._members.leave(group, member)
        return {"member_id": member, "member_epoch": request.member_epoch}

    def _owned(self, request: Any) -> set[bytes] | None:
        """Return the keys of the partitions that a client says it has; None if it does not."""
        if request.topic_partitions is None:
            return None
        ids = {topic_uuid(self._log, info.id): info.id for info in self._log.root.topics().values()}
        return {
            PARTITION_KEY.pack(ids[topic.topic_id], number)
            for topic in request.topic_partitions
            # It keeps nothing of a topic that was deleted.
            if topic.topic_id in ids
            for number in topic.partitions
            if number >= 0
        }

    # Administration

    def consumer_group_describe(self, request: Any, caller: Caller) -> Fields:
        """Answer: groups with their members."""
        outcome = self._answers.outcome
        described = [
            {"group_id": name, **outcome(self._described, name)} for name in request.group_ids
        ]
        return {"groups": with_operations(described, request)}

    def _described(self, name: str) -> Fields:
        group = self._members.group(name)
        snapshot = group.snapshot()
        document, sessions = group.context.live.read(
            lambda txn: (
                group.load(txn),
                {member: each for (_, member), each in SESSIONS.scan(txn, group.key)},
            )
        )
        if not has_modern_members(snapshot.members):
            raise GroupIdNotFoundError("No member has the protocol of KIP-848", group=name)
        owned: dict[str, list[TopicPartition]] = {}
        for partition, member in snapshot.owners.items():
            owned.setdefault(member, []).append(partition)
        return {
            "group_state": MODERN_STATES.get(snapshot.state, snapshot.state),
            "group_epoch": document.generation + (not document.target_is_current),
            "assignment_epoch": document.generation,
            "assignor_name": "range" if document.assignor == "range" else "uniform",
            "members": [
                described_member(info, sessions.get(info.id, MemberSession(0)))
                | {
                    "assignment": self._named(owned.get(info.id, ()), document),
                    "target_assignment": self._named(document.target.get(info.id, ()), document),
                }
                for info in snapshot.members
            ],
        }

    def _named(self, partitions: Iterable[TopicPartition], document: Membership) -> Fields:
        topics: dict[str, list[int]] = {}
        for topic, number in sorted(partitions):
            topics.setdefault(topic, []).append(number)
        return {
            "topic_partitions": [
                {
                    "topic_id": topic_uuid(self._log, document.topics[name][0]),
                    "topic_name": name,
                    "partitions": numbers,
                }
                for name, numbers in topics.items()
                if name in document.topics
            ]
        }


def described_member(info: MemberInfo, session: MemberSession) -> Fields:
    """Return what is said of a member, but for its partitions."""
    client = info.remote
    is_modern = client is None or client.protocol == MODERN
    return {
        "member_id": info.id,
        "instance_id": info.instance_id,
        "rack_id": client and client.rack,
        "member_epoch": session.epoch,
        "client_id": info.client_id,
        "client_host": f"/{client.host}" if client else "/127.0.0.1",
        "subscribed_topic_names": list(client.topics if client else info.topics),
        "subscribed_topic_regex": client and client.pattern,
        "member_type": _TYPE_OF_OTHERS if is_modern else _TYPE_OF_CLASSIC,
    }


def check_epoch(received: int, owned: Keys | None, session: MemberSession, keys: Keys) -> None:
    """Raise unless a client is in a session; it says that it has some partitions, or nothing.

    Raises:
        ApiError: Its epoch is another one.
    """
    if received in (session.epoch, _JOIN):
        return
    # The client did not get the answer with its epoch: it has no more than it had.
    is_repeated = received == session.previous_epoch and owned is not None
    if not is_repeated or not set(owned or ()) <= set(keys):
        raise ApiError(
            ErrorCode.FENCED_MEMBER_EPOCH,
            f"The epoch of the member is {session.epoch}, not {received}: it must give up all "
            "partitions, and join again",
        )


def alive(member: str, epoch: int) -> Fields:
    """Return what each heartbeat is answered."""
    return {"member_id": member, "member_epoch": epoch, "heartbeat_interval_ms": HEARTBEAT_MS}


def assignment(log: Log, partitions: Iterable[bytes]) -> Fields:
    """Return partitions, by their keys, as heartbeats are told them."""
    topics: dict[UUID, list[int]] = {}
    for key in sorted(partitions):
        number, partition = PARTITION_KEY.unpack(key)
        topics.setdefault(topic_uuid(log, number), []).append(partition)
    return {
        "topic_partitions": [
            {"topic_id": number, "partitions": partitions} for number, partitions in topics.items()
        ]
    }


def _says_all(request: Any) -> bool:
    """Whether a request says everything, as after a failure: it is answered likewise."""
    return request.topic_partitions is not None and (
        request.rebalance_timeout_ms >= 0
        and (
            request.subscribed_topic_names is not None or request.subscribed_topic_regex is not None
        )
    )


def _says_nothing(request: Any) -> bool:
    """Whether a request only says that the client lives."""
    return (
        request.topic_partitions is None
        and request.subscribed_topic_names is None
        and request.subscribed_topic_regex is None
        and request.server_assignor is None
        and request.rack_id is None
        and request.rebalance_timeout_ms < 0
    )


def _check(request: Any, version: int) -> None:
    """Raise unless the fields of a heartbeat fit each other.

    Raises:
        ApiError: They do not.
    """
    epoch, pattern = request.member_epoch, request.subscribed_topic_regex
    has_topics = request.subscribed_topic_names is not None or pattern is not None
    joins = epoch == _JOIN
    wrong = {
        "GroupId can't be empty.": not request.group_id,
        "MemberId can't be empty.": not request.member_id and (version > 0 or not joins),
        "InstanceId can't be empty.": request.instance_id == "",
        "RackId can't be empty.": request.rack_id == "",
        "MemberEpoch is invalid.": epoch < LEFT,
        "InstanceId can't be null.": epoch == LEFT and request.instance_id is None,
        "RebalanceTimeoutMs must be provided in first request.": joins
        and request.rebalance_timeout_ms < 0,
        "TopicPartitions must be empty when (re-)joining.": joins
        and request.topic_partitions != [],
        "Either SubscribedTopicNames or SubscribedTopicRegex must be non-null when (re-)joining.": (
            joins and not has_topics
        ),
    }
    for text, is_wrong in wrong.items():
        if is_wrong:
            raise ApiError(ErrorCode.INVALID_REQUEST, text)
    check_member_id(request.member_id)
    if request.server_assignor is not None and request.server_assignor not in _ASSIGNORS:
        raise ApiError(
            ErrorCode.UNSUPPORTED_ASSIGNOR,
            f"ServerAssignor {request.server_assignor} is not supported. Supported assignors: "
            f"{', '.join(_ASSIGNORS)}.",
        )
