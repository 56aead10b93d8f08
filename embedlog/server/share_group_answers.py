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
from embedlog.groups.membership import SHARE, MemberInfo, MemberSession
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.server.answers import Caller, Fields, by_topic
from embedlog.server.cluster import topic_id
from embedlog.server.error_codes import ApiError, ErrorCode
from embedlog.server.heartbeat_answers import (
    JOIN,
    LEAVE,
    HeartbeatAnswers,
    alive,
    check_epoch,
    check_fields,
    described_member,
    stored,
)
from embedlog.share.letter_writer import LetterWriter
from embedlog.share.share_group import ShareGroup


class ShareGroupAnswers(HeartbeatAnswers):
    """Answers requests; see `HeartbeatAnswers`."""

    # Heartbeats

    def share_group_heartbeat(self, request: Any, caller: Caller) -> Fields:
        """Answer: the epoch of a member, and its partitions if they have changed."""
        return self._answers.outcome(self._heartbeat, request, caller)

    def _heartbeat(self, request: Any, caller: Caller) -> Fields:
        _check(request)
        group, member = ShareGroup(self._log.root, request.group_id), request.member_id
        epoch, names = request.member_epoch, request.subscribed_topic_names
        self._check_group(group)
        if epoch == LEAVE:
            return self._leave(group, request)
        if names is None and self._members.is_unchanged(group, member, epoch):
            return alive(member, epoch)
        check = partial(check_epoch, epoch, ())
        if epoch == JOIN:
            info = self._joining(member, request, caller, SHARE, (SHARE,))
            self._members.admit(group, _subscribed(info, names))
        elif names is not None:
            changed = partial(_subscribed, names=names)
            self._members.change(group, member, None, changed, check)
        infos = self._topics(self._members.info(group, member))
        group.begin(infos)
        LetterWriter(group, self._log.root).prepare(infos)
        answer = alive(member, self._members.renew(group, member, check))
        # Who knows the epoch has got it with the partitions.
        if names is not None or answer["member_epoch"] != epoch:
            keys = {info.key(number) for info in infos for number in range(info.partitions)}
            answer |= self._assignment(keys)
        return answer

    def _topics(self, info: MemberInfo) -> list[TopicInfo]:
        """Return the topics of a member that exist."""
        known = self._log.root.topics()
        return [known[name] for name in info.topics if name in known]

    # Administration

    def share_group_describe(self, request: Any, caller: Caller) -> Fields:
        """Answer: groups with their members."""
        return self._described_by(self._described, request)

    def _described(self, name: str) -> Fields:
        group = ShareGroup(self._log.root, name)
        snapshot, (document, sessions) = _snapshot(group), stored(group)
        no_session = MemberSession(0, epoch=document.generation)
        return {
            "group_state": snapshot.state,
            "group_epoch": document.generation + (not document.target_is_current),
            "assignment_epoch": document.generation,
            "assignor_name": "simple",
            "members": [
                described_member(info, sessions.get(info.id, no_session).epoch)
                | {"assignment": self._assigned(info)}
                for info in snapshot.members
            ],
        }

    def _assigned(self, info: MemberInfo) -> Fields:
        infos = self._topics(info)
        every = [TopicPartition(each.name, n) for each in infos for n in range(each.partitions)]
        return self._named(every, {each.name: each.id for each in infos})

    def describe_share_group_offsets(self, request: Any, caller: Caller) -> Fields:
        """Answer: where groups begin in partitions, and how many records they have not done."""

        def described(asked: Any) -> Fields:
            rows, lags, found = dict[TopicPartition, Any](), dict[TopicPartition, Any](), []
            with suppress(GroupIdNotFoundError):
                rows = _snapshot(ShareGroup(self._log.root, asked.group_id)).committed
                lags = self._log.groups[asked.group_id].lag()
            wanted: Iterable[TopicPartition] = rows
            if asked.topics is not None:
                topics = asked.topics
                wanted = [TopicPartition(t.topic_name, n) for t in topics for n in t.partitions]
            for tp in wanted:
                fields: Fields = {"start_offset": -1, "lag": -1}
                if tp in rows:
                    offset, _, epoch = rows[tp].position
                    fields = {"start_offset": offset, "lag": lags.get(tp, -1)}
                    fields["leader_epoch"] = epoch or 0
                found.append((tp, fields))
            return {"topics": self._with_ids(by_topic(found, "topic_name"))}

        return {"groups": self._answers.each(request.groups, ("group_id",), described)}

    def alter_share_group_offsets(self, request: Any, caller: Caller) -> Fields:
        """Answer: sets where a group without members begins."""

        def alter(partition: TopicPartition, item: Any) -> None:
            if item.start_offset < 0:
                raise ApiError(ErrorCode.INVALID_REQUEST, "An offset must not be negative")
            group.reset({partition: OffsetAndMetadata(item.start_offset)})

        group = ShareGroup(self._log.root, request.group_id)
        with suppress(GroupIdNotFoundError):
            group.check_empty(_snapshot(group).members, "set where it begins")
        altered = self._answers.each_partition(request.topics, alter, "topic_name")
        return {"responses": self._with_ids(altered)}

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
        return [
            {**each, "topic_id": topic_id(self._log, known[each["topic_name"]].id)}
            if each["topic_name"] in known
            else each
            for each in topics
        ]


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
        "SubscribedTopicNames must be set in first request.": epoch == JOIN
        and not request.subscribed_topic_names,
        "MemberEpoch is invalid.": epoch < LEAVE,
    }
    check_fields(wrong, request.member_id)
