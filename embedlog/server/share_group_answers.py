"""Answers the requests of share consumers to the coordinator of their group (KIP-932).

Each member may have records of all partitions of its topics, as a share consumer in Python: a
heartbeat tells it which these are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from embedlog.catalog import TopicInfo
from embedlog.errors import GroupIdNotFoundError
from embedlog.groups.membership import SESSIONS, SHARE, MemberInfo, MemberSession, RemoteClient
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.server.answers import Answers, Caller, Fields, by_topic, with_operations
from embedlog.server.classic_groups import ClassicGroups
from embedlog.server.cluster import topic_id
from embedlog.server.consumer_group_answers import (
    SESSION_MS,
    alive,
    assignment,
    check_epoch,
    described_member,
)
from embedlog.server.error_codes import ApiError, ErrorCode
from embedlog.server.remote_members import RemoteMembers
from embedlog.server.subscriptions import check_member_id, remote_info
from embedlog.share.letter_writer import LetterWriter
from embedlog.share.share_group import ShareGroup

_JOIN, _LEAVE = 0, -1
"""Epochs with a meaning of their own."""


class ShareGroupAnswers:
    """Answers requests.

    Args:
        answers: Of the log.
        groups: The groups that are in memory, which no such client can join.
        members: The members of groups of the log that are clients.
    """

    def __init__(self, answers: Answers, groups: ClassicGroups, members: RemoteMembers) -> None:
        self._answers, self._groups, self._log = answers, groups, answers.log
        self._members = members
        self._told: dict[tuple[str, str], Collection[bytes]] = {}
        """The assignment that this connection's client was told last: said again if changed."""

    # Heartbeats

    def share_group_heartbeat(self, request: Any, caller: Caller) -> Fields:
        """Answer: the epoch of a member, and its partitions if they have changed."""
        return self._answers.outcome(self._heartbeat, request, caller)

    def _heartbeat(self, request: Any, caller: Caller) -> Fields:
        _check(request)
        group, member = ShareGroup(self._log.root, request.group_id), request.member_id
        epoch, names = request.member_epoch, request.subscribed_topic_names
        if self._groups.find(group.name) is not None:
            raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, "The group is not a share group")
        if epoch == _LEAVE:
            self._members.leave(group, self._members.info(group, member).id)
            return {"member_id": member, "member_epoch": _LEAVE}
        told, is_told = (group.name, member), names is None and (group.name, member) in self._told
        if is_told and self._members.is_unchanged(group, member, epoch):
            return alive(member, epoch)
        check = partial(check_epoch, epoch, ())
        if epoch == _JOIN:
            info = self._joining(request, caller)
            self._members.admit(group, info)
        else:
            info = self._members.info(group, member)
            if names is not None and set(names) != set(info.topics):
                info = _subscribed(info, names)
                changed = partial(_subscribed, names=names)
                self._members.change(group, member, None, changed, check)
        known = self._log.root.topics()
        infos = [known[name] for name in info.topics if name in known]
        group.begin(infos)
        LetterWriter(group, self._log.root).prepare(infos)
        answer = alive(member, self._members.renew(group, member, check))
        keys = {info.key(number) for info in infos for number in range(info.partitions)}
        if names is not None or self._told.get(told) != keys:
            answer["assignment"] = assignment(self._log, keys)
        self._told = {told: keys}
        return answer

    def _joining(self, request: Any, caller: Caller) -> MemberInfo:
        client = RemoteClient(SHARE, caller.client_host, request.rack_id, (), None, 0)
        info = remote_info(
            *(request.member_id, None, client),
            topics=(),
            assignors=(SHARE,),
            client_id=caller.client_id,
            session_ms=SESSION_MS,
            joined_ms=self._log.root.clock(),
        )
        return _subscribed(info, request.subscribed_topic_names)

    # Administration

    def share_group_describe(self, request: Any, caller: Caller) -> Fields:
        """Answer: groups with their members."""
        outcome = self._answers.outcome
        described = [
            {"group_id": name, **outcome(self._described, name)} for name in request.group_ids
        ]
        return {"groups": with_operations(described, request)}

    def _described(self, name: str) -> Fields:
        group = ShareGroup(self._log.root, name)
        snapshot = _snapshot(group)
        version, sessions = group.context.live.read(
            lambda txn: (
                group.load(txn).version,
                {member: each for (_, member), each in SESSIONS.scan(txn, group.key)},
            )
        )
        return {
            "group_state": snapshot.state,
            "group_epoch": version,
            "assignment_epoch": version,
            "assignor_name": "simple",
            "members": [
                described_member(info, sessions.get(info.id, MemberSession(0, epoch=version)))
                | {"assignment": {"topic_partitions": self._partitions(info.topics)}}
                for info in snapshot.members
            ],
        }

    def _partitions(self, topics: Iterable[str]) -> list[Fields]:
        known = self._log.root.topics()
        infos = [known[name] for name in topics if name in known]
        return [
            {"topic_name": info.name, "partitions": list(range(info.partitions)), **self._id(info)}
            for info in infos
        ]

    def _id(self, info: TopicInfo | None) -> Fields:
        return {} if info is None else {"topic_id": topic_id(self._log, info)}

    def describe_share_group_offsets(self, request: Any, caller: Caller) -> Fields:
        """Answer: where groups begin in partitions, and how many records they have not done."""

        def described(asked: Any) -> Fields:
            rows, lags, found = dict[TopicPartition, Any](), dict[TopicPartition, Any](), []
            with suppress(GroupIdNotFoundError):
                rows = _snapshot(ShareGroup(self._log.root, asked.group_id)).committed
                lags = self._log.groups[asked.group_id].lag()
            wanted: Iterable[TopicPartition] = rows
            if asked.topics is not None:
                every = [(each.topic_name, each.partitions) for each in asked.topics]
                wanted = [TopicPartition(name, n) for name, numbers in every for n in numbers]
            for tp in wanted:
                fields: Fields = {"start_offset": -1, "lag": -1}
                if tp in rows:
                    offset, _, epoch = rows[tp].position
                    fields = {"start_offset": offset, "leader_epoch": epoch or 0}
                    fields["lag"] = lags.get(tp, -1)
                found.append((tp, fields))
            return {"topics": self._with_ids(by_topic(found))}

        return {"groups": self._answers.each(request.groups, ("group_id",), described)}

    def alter_share_group_offsets(self, request: Any, caller: Caller) -> Fields:
        """Answer: sets where a group without members begins."""

        def alter(partition: TopicPartition, offset: int) -> None:
            if offset < 0:
                raise ApiError(ErrorCode.INVALID_REQUEST, "An offset must not be negative")
            group.reset({partition: OffsetAndMetadata(offset)})

        group = ShareGroup(self._log.root, request.group_id)
        with suppress(GroupIdNotFoundError):
            group.check_empty(_snapshot(group).members, "set where it begins")
        found = [
            (part, self._answers.outcome(alter, part, item.start_offset))
            for topic in request.topics
            for item in topic.partitions
            for part in [TopicPartition(topic.topic_name, item.partition_index)]
        ]
        return {"responses": self._with_ids(by_topic(found))}

    def delete_share_group_offsets(self, request: Any, caller: Caller) -> Fields:
        """Answer: lets a group without members begin anew in topics."""

        def delete(topic: Any) -> None:
            info = self._log.root.topic(topic.topic_name)
            begun = [tp for tp in snapshot.committed if tp.topic == info.name]
            group.delete_offsets(begun)

        group = ShareGroup(self._log.root, request.group_id)
        snapshot = _snapshot(group)
        group.check_empty(snapshot.members, "delete its offsets")
        deleted = self._answers.each(request.topics, ("topic_name",), delete)
        return {"responses": self._with_ids(deleted)}

    def _with_ids(self, topics: list[Fields]) -> list[Fields]:
        known = self._log.root.topics()
        named = [(each, each.pop("topic_name", None) or each.pop("name")) for each in topics]
        return [{"topic_name": name, **each, **self._id(known.get(name))} for each, name in named]


def _snapshot(group: ShareGroup) -> Any:
    """Return a share group.

    Raises:
        GroupIdNotFoundError: There is none of that name.
    """
    snapshot = group.snapshot()
    if snapshot.shares is None:
        raise GroupIdNotFoundError("The group is not a share group", group=group.name)
    return snapshot


def _subscribed(info: MemberInfo, names: Collection[str]) -> MemberInfo:
    topics, client = tuple(sorted(set(names))), info.remote
    return info._replace(topics=topics, remote=client and client._replace(topics=topics))


def _check(request: Any) -> None:
    """Raise unless the fields of a heartbeat fit each other.

    Raises:
        ApiError: They do not.
    """
    epoch = request.member_epoch
    wrong = {
        "MemberId can't be empty.": not request.member_id,
        "GroupId can't be empty.": not request.group_id,
        "RackId can't be empty.": request.rack_id == "",
        "SubscribedTopicNames must be set in first request.": epoch == _JOIN
        and not request.subscribed_topic_names,
        "MemberEpoch is invalid.": epoch < _LEAVE,
    }
    for text, is_wrong in wrong.items():
        if is_wrong:
            raise ApiError(ErrorCode.INVALID_REQUEST, text)
    check_member_id(request.member_id)
