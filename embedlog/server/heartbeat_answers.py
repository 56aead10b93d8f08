"""What the answers to members of consumer groups and of share groups have in common.

One request does all: a heartbeat says what the client subscribes to and has, and is answered with
its epoch and the partitions that it may read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from embedlog.group import Group
from embedlog.groups.membership import (
    MODERN,
    SESSIONS,
    MemberInfo,
    MemberSession,
    Membership,
    RemoteClient,
)
from embedlog.keyspace import PARTITION_KEY
from embedlog.record import TopicPartition
from embedlog.server.answers import (
    Answers,
    Caller,
    Fields,
    check_group,
    numbers_by_topic,
    with_operations,
)
from embedlog.server.classic_groups import ClassicGroups
from embedlog.server.cluster import topic_id
from embedlog.server.error_codes import ApiError, ErrorCode
from embedlog.server.remote_members import LEFT, Keys, RemoteMembers
from embedlog.server.subscriptions import check_member_id, remote_info

SESSION_MS = 45_000
"""How long a client may be silent, as ``group.consumer.session.timeout.ms``."""
HEARTBEAT_MS = 1_000
"""How often clients are told to ask.  Kafka says 5 s; here a partition that a member in Python gave
up must not wait so long."""
JOIN, LEAVE = 0, -1
"""Epochs with a meaning of their own."""
_TYPE_OF_CLASSIC, _TYPE_OF_OTHERS = 0, 1
_CUSTOM = (
    "an unsupported custom assignor is in use. Please refer to the documentation or switch to a "
    "default assignor before re-attempting the upgrade."
)
"""Kafka's words, which clients show."""


class HeartbeatAnswers:
    """Answers requests of one connection.

    Args:
        answers: Of the log.
        groups: The groups that are in memory, which no such client can join.
        members: The members of groups of the log that are clients.
    """

    def __init__(self, answers: Answers, groups: ClassicGroups, members: RemoteMembers) -> None:
        self._answers, self._groups, self._log = answers, groups, answers.log
        self._members = members
        self._told: dict[tuple[str, str], Keys] = {}
        """The assignment that this connection's client was told last: said again if changed."""

    # Heartbeats

    def _check_group(self, group: Group) -> None:
        """Raise if a group is in memory.

        Raises:
            ApiError: It is.
        """
        if self._groups.find(group.name) is not None:
            text = f"Cannot upgrade classic group {group.name} to consumer group because {_CUSTOM}"
            raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, text)

    def _joining(
        self, member: str, request: Any, caller: Caller, protocol: str, assignors: Collection[str]
    ) -> MemberInfo:
        """Return what is known of a client that joins, but for its topics."""
        client = RemoteClient(protocol, caller.client_host, request.rack_id, (), None, 0)
        instance, now_ms = getattr(request, "instance_id", None), self._log.root.clock()
        return remote_info(member, instance, client, caller, assignors, SESSION_MS, now_ms)

    def _leave(self, group: Group, request: Any) -> Fields:
        member, epoch = request.member_id, request.member_epoch
        self._members.info(group, member, getattr(request, "instance_id", None))
        if epoch == LEFT:
            self._members.leave_for_now(group, member)
        else:
            self._members.leave(group, member)
        return {"member_id": member, "member_epoch": epoch}

    def _assignment(self, keys: Keys) -> Fields:
        """Return partitions as a heartbeat is answered with them."""
        topics = numbers_by_topic(map(PARTITION_KEY.unpack, keys), "id")
        named = [{**each, "topic_id": topic_id(self._log, each["id"])} for each in topics]
        return {"assignment": {"topic_partitions": named}}

    # Administration

    def _described_by(self, described: Callable[[str], Fields], request: Any) -> Fields:
        """Return the answer to a request to describe groups."""

        def existing(name: str) -> Fields:
            check_group(self._log, name)
            return described(name)

        outcome = self._answers.outcome
        groups = [{"group_id": name, **outcome(existing, name)} for name in request.group_ids]
        return {"groups": with_operations(groups, request)}

    def _named(self, partitions: Iterable[TopicPartition], ids: Mapping[str, int]) -> Fields:
        """Return partitions of topics that have ids, as groups are described with them."""
        return {
            "topic_partitions": [
                {**each, "topic_id": topic_id(self._log, ids[each["topic_name"]])}
                for each in numbers_by_topic(partitions, "topic_name")
                if each["topic_name"] in ids
            ]
        }


def stored(group: Group) -> tuple[Membership, dict[str, MemberSession]]:
    """Return a group and the sessions of its members, at one instant."""
    return group.context.live.read(
        lambda txn: (
            group.load(txn),
            {member: each for (_, member), each in SESSIONS.scan(txn, group.key)},
        )
    )


def described_member(info: MemberInfo, epoch: int) -> Fields:
    """Return what is said of a member with an epoch, but for its partitions."""
    client = info.remote
    is_modern = client is None or client.protocol == MODERN
    return {
        "member_id": info.id,
        "instance_id": info.instance_id,
        "rack_id": client and client.rack,
        "member_epoch": epoch,
        "client_id": info.client_id,
        "client_host": f"/{client.host}" if client else "/127.0.0.1",
        "subscribed_topic_names": list(client.topics if client else info.topics),
        "subscribed_topic_regex": (client and client.pattern) or "",
        "member_type": _TYPE_OF_OTHERS if is_modern else _TYPE_OF_CLASSIC,
    }


def check_epoch(received: int, owned: Keys | None, session: MemberSession, keys: Keys) -> None:
    """Raise unless a client is in a session; it says that it has some partitions, or nothing.

    Raises:
        ApiError: Its epoch is another one.
    """
    if received in (session.epoch, JOIN):
        return
    # The client did not get the answer with its epoch: it has no more than it had.
    is_repeated = received == session.previous_epoch and owned is not None
    if not is_repeated or not set(owned or ()) <= set(keys):
        raise ApiError(
            ErrorCode.FENCED_MEMBER_EPOCH,
            f"The epoch of the member is {session.epoch}, not {received}: it must give up all "
            "partitions, and join again",
        )


def check_fields(wrong: Mapping[str, bool], member: str) -> None:
    """Raise the first of some errors that a heartbeat of a member has.

    Raises:
        ApiError: It has one.
    """
    for text, is_wrong in wrong.items():
        if is_wrong:
            raise ApiError(ErrorCode.INVALID_REQUEST, text)
    check_member_id(member)


def alive(member: str, epoch: int) -> Fields:
    """Return what each heartbeat is answered."""
    return {"member_id": member, "member_epoch": epoch, "heartbeat_interval_ms": HEARTBEAT_MS}
