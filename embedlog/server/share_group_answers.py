"""Answers the requests of share consumers to the coordinator of their group (KIP-932).

Each member may have records of all partitions of its topics, as a share consumer in Python: a
heartbeat tells it which these are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

from embedlog.catalog import TopicInfo
from embedlog.errors import GroupIdNotFoundError
from embedlog.groups.membership import SESSIONS, SHARE, MemberInfo, MemberSession, RemoteClient
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.server.answers import Answers, Caller, Fields, by_topic
from embedlog.server.classic_groups import ClassicGroups
from embedlog.server.cluster import topic_id
from embedlog.server.consumer_group_answers import SESSION_MS, alive, assignment, check_epoch
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
        if self._groups.find(group.name) is not None:
            text = f"The group {group.name} is not a share group"
            raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, text)
        if request.member_epoch == _LEAVE:
            self._members.leave(group, self._members.info(group, member).id)
            return {"member_id": member, "member_epoch": _LEAVE}
        told, says_all = (group.name, member), request.subscribed_topic_names is not None
        if (
            not says_all
            and told in self._told
            and self._members.is_unchanged(group, member, request.member_epoch)
        ):
            return alive(member, request.member_epoch)
        check = partial(check_epoch, request.member_epoch, ())
        infos = self._subscribed(group, request, caller)
        group.begin(infos)
        LetterWriter(group, self._log.root).prepare(infos)
        answer = alive(member, self._members.renew(group, member, check))
        keys = {info.key(number) for info in infos for number in range(info.partitions)}
        if says_all or self._told.get(told) != keys:
            answer["assignment"] = assignment(self._log, keys)
        self._told = {told: keys}
        return answer

    def _subscribed(self, group: ShareGroup, request: Any, caller: Caller) -> list[TopicInfo]:
        """Let a client join or change what it subscribes to; return the topics that exist."""
        member, names = request.member_id, request.subscribed_topic_names
        if request.member_epoch == _JOIN:
            client = RemoteClient(SHARE, caller.client_host, request.rack_id, tuple(names), None, 0)
            info = remote_info(
                *(member, None, client),
                topics=names,
                assignors=(SHARE,),
                client_id=caller.client_id,
                session_ms=SESSION_MS,
                joined_ms=self._log.root.clock(),
            )
            self._members.admit(group, info)
        else:
            info = self._members.info(group, member)
            if names is not None and set(names) != set(info.topics):
                check = partial(check_epoch, request.member_epoch, ())
                changed = partial(_resubscribed, names=names)
                self._members.change(group, member, None, changed, check)
            names = info.topics if names is None else names
        known = self._log.root.topics()
        return [known[name] for name in sorted(set(names)) if name in known]

    # Administration

    def share_group_describe(self, request: Any, caller: Caller) -> Fields:
        """Answer: groups with their members."""
        outcome = self._answers.outcome
        return {
            "groups": [
                {"group_id": name, **outcome(self._described, name)} for name in request.group_ids
            ]
        }

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
                {
                    "member_id": info.id,
                    "rack_id": info.remote and info.remote.rack,
                    "member_epoch": sessions.get(info.id, MemberSession(0)).epoch or version,
                    "client_id": info.client_id,
                    "client_host": f"/{info.remote.host if info.remote else '127.0.0.1'}",
                    "subscribed_topic_names": list(info.topics),
                    "assignment": {"topic_partitions": self._partitions(info.topics)},
                }
                for info in snapshot.members
            ],
        }

    def _partitions(self, topics: Iterable[str]) -> list[Fields]:
        known = self._log.root.topics()
        return [
            {
                "topic_id": topic_id(self._log, known[name]),
                "topic_name": name,
                "partitions": list(range(known[name].partitions)),
            }
            for name in topics
            if name in known
        ]

    def describe_share_group_offsets(self, request: Any, caller: Caller) -> Fields:
        """Answer: where groups begin in partitions, and how many records they have not done."""

        def described(asked: Any) -> Fields:
            snapshot = _snapshot(ShareGroup(self._log.root, asked.group_id))
            lags = self._log.groups[asked.group_id].lag()
            wanted: Iterable[TopicPartition] = snapshot.committed
            if asked.topics is not None:
                wanted = [
                    TopicPartition(topic.topic_name, number)
                    for topic in asked.topics
                    for number in topic.partitions
                ]
            found = []
            for tp in wanted:
                fields: Fields = {"start_offset": -1, "lag": -1}
                if (row := snapshot.committed.get(tp)) is not None:
                    epoch, lag = row.position.leader_epoch, lags.get(tp)
                    fields = {"start_offset": row.position.offset, "leader_epoch": epoch or 0}
                    fields["lag"] = -1 if lag is None else lag
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
        for topic in topics:
            name = topic.setdefault("topic_name", topic.pop("name", None))
            if name in known:
                topic["topic_id"] = topic_id(self._log, known[name])
        return topics


def _snapshot(group: ShareGroup) -> Any:
    """Return a share group.

    Raises:
        GroupIdNotFoundError: There is none of that name.
    """
    snapshot = group.snapshot()
    if snapshot.shares is None:
        raise GroupIdNotFoundError("The group is not a share group", group=group.name)
    return snapshot


def _resubscribed(info: MemberInfo, names: Collection[str]) -> MemberInfo:
    return info._replace(topics=tuple(sorted(set(names))))


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
