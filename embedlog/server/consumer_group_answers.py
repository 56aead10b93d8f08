"""Answers the requests of consumers with ``group.protocol=consumer`` (KIP-848)."""

from __future__ import annotations

from functools import partial
from typing import Any
from uuid import uuid4

from embedlog.groups.membership import MODERN, MemberInfo, MemberSession
from embedlog.keyspace import PARTITION_KEY
from embedlog.record import TopicPartition
from embedlog.server.answers import MODERN_STATES, Caller, Fields
from embedlog.server.cluster import topic_id
from embedlog.server.error_codes import ApiError, ErrorCode
from embedlog.server.heartbeat_answers import (
    JOIN,
    HeartbeatAnswers,
    alive,
    check_epoch,
    check_fields,
    described_member,
    stored,
)
from embedlog.server.patterns import matching
from embedlog.server.remote_members import LEFT

_UNIFORM = ("cooperative-sticky", "sticky", "range", "roundrobin")
_ASSIGNORS = {
    "uniform": _UNIFORM,
    "range": ("range", *(name for name in _UNIFORM if name != "range")),
}
"""Kafka's assignors of its server, and what they are here, in order of preference."""


class ConsumerGroupAnswers(HeartbeatAnswers):
    """Answers requests; see `HeartbeatAnswers`."""

    # Heartbeats

    def consumer_group_heartbeat(self, request: Any, caller: Caller) -> Fields:
        """Answer: the epoch of a member, and its assignment if it has changed."""
        return self._answers.outcome(self._heartbeat, request, caller)

    def _heartbeat(self, request: Any, caller: Caller) -> Fields:
        _check(request, caller.version)
        group, epoch = self._members.group(request.group_id), request.member_epoch
        self._check_group(group)
        if epoch < 0:
            return self._leave(group, request)
        member, instance = request.member_id or str(uuid4()), request.instance_id
        owned = self._owned(request)
        check, key = partial(check_epoch, epoch, owned), (group.name, member)
        # After a connection broke, the client may not have got its last assignment.
        is_short = key in self._told and _says_nothing(request)
        if epoch == JOIN:
            info = self._joining(member, request, caller, MODERN, _ASSIGNORS["uniform"])
            self._members.admit(group, self._changed(info, request))
        elif is_short and self._members.is_unchanged(group, member, epoch):
            return alive(member, epoch)
        else:
            changed = partial(self._changed, request=request)
            self._members.change(group, member, instance, changed, check)
        step = self._members.follow(group, member, instance, owned, check)
        answer, assigned = alive(member, step.epoch), set(step.assigned)
        if _says_all(request) or self._told.get(key) != assigned:
            answer |= self._assignment(assigned)
        self._told = {key: assigned}
        return answer

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
            topics.update(matching(client.pattern, self._log.topics()))
        if request.server_assignor is not None:
            info = info._replace(assignors=_ASSIGNORS[request.server_assignor])
        return info._replace(topics=tuple(sorted(topics)), remote=client)

    def _owned(self, request: Any) -> set[bytes] | None:
        """Return the keys of the partitions that a client says it has; None if it does not."""
        if request.topic_partitions is None:
            return None
        ids = {topic_id(self._log, info.id): info.id for info in self._log.root.topics().values()}
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
        return self._described_by(self._described, request)

    def _described(self, name: str) -> Fields:
        group = self._members.group(name)
        snapshot, (document, sessions) = group.snapshot(), stored(group)
        if snapshot.type != MODERN:
            raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, f"Group {name} is not a consumer group.")
        owned: dict[str, list[TopicPartition]] = {}
        for partition, member in snapshot.owners.items():
            owned.setdefault(member, []).append(partition)
        ids = {topic: number for topic, (number, _) in document.topics.items()}
        return {
            "group_state": MODERN_STATES.get(snapshot.state, snapshot.state),
            "group_epoch": document.generation + (not document.target_is_current),
            "assignment_epoch": document.generation,
            "assignor_name": "range" if document.assignor == "range" else "uniform",
            "members": [
                described_member(info, sessions.get(info.id, MemberSession(0)).epoch)
                | {
                    "assignment": self._named(owned.get(info.id, ()), ids),
                    "target_assignment": self._named(document.target.get(info.id, ()), ids),
                }
                for info in snapshot.members
            ],
        }


def _names_topics(request: Any) -> bool:
    said = request.subscribed_topic_names, request.subscribed_topic_regex
    return said != (None, None)


def _says_all(request: Any) -> bool:
    """Whether a request says everything, as after a failure: it is answered likewise."""
    has_partitions = request.topic_partitions is not None
    return has_partitions and request.rebalance_timeout_ms >= 0 and _names_topics(request)


def _says_nothing(request: Any) -> bool:
    """Whether a request only says that the client lives."""
    said = request.topic_partitions, request.server_assignor, request.rack_id
    is_silent = said == (None, None, None) and request.rebalance_timeout_ms < 0
    return is_silent and not _names_topics(request)


def _check(request: Any, version: int) -> None:
    """Raise unless the fields of a heartbeat fit each other.

    Raises:
        ApiError: They do not.
    """
    epoch, joins = request.member_epoch, request.member_epoch == JOIN
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
            joins and not _names_topics(request)
        ),
    }
    check_fields(wrong, request.member_id)
    if request.server_assignor is not None and request.server_assignor not in _ASSIGNORS:
        raise ApiError(
            ErrorCode.UNSUPPORTED_ASSIGNOR,
            f"ServerAssignor {request.server_assignor} is not supported. Supported assignors: "
            f"{', '.join(_ASSIGNORS)}.",
        )
