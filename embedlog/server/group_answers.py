"""Answers the requests of groups: members are classic, offsets are rows of the log."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any

from embedlog.consumer.open_group import open_group
from embedlog.errors import EmbedlogError, GroupSubscribedToTopicError, NonEmptyGroupError
from embedlog.server.answers import Answers, Caller, Fields
from embedlog.server.classic_groups import ClassicGroups, MemberIdRequiredError
from embedlog.server.cluster import controller_id
from embedlog.server.error_codes import ApiError, ErrorCode
from embedlog.server.protocol import MalformedMessageError, decode

_GROUP, _TRANSACTION = 0, 1
"""Kafka's numbers for coordinators."""


class GroupAnswers:
    """Answers requests.

    Args:
        answers: Of the log: it knows the groups whose members are programs in Python.
        groups: The groups of the server.
    """

    def __init__(self, answers: Answers, groups: ClassicGroups) -> None:
        self._answers, self._groups, self._log = answers, groups, answers.log

    def find_coordinator(self, request: Any, caller: Caller) -> Fields:
        """Answer: the server itself."""

        def find() -> Fields:
            if request.key_type not in (_GROUP, _TRANSACTION):
                raise ApiError(ErrorCode.INVALID_REQUEST, "Only groups have a coordinator")
            if request.key_type == _TRANSACTION:
                raise ApiError(ErrorCode.INVALID_REQUEST, "This server has no transactions yet")
            return {
                "node_id": controller_id(self._log),
                "host": caller.host,
                "port": caller.port,
            }

        found = self._answers.outcome(find)
        if found["error_code"]:
            found["node_id"] = -1
        return {
            **found,
            "coordinators": [{"key": key, **found} for key in request.coordinator_keys],
        }

    # Members

    def join_group(self, request: Any, caller: Caller) -> Fields:
        """Answer: the generation, and for the leader the members."""
        try:
            self._refuse_group_of_log(request.group_id)
            return self._groups.join(request, caller.version, caller.client_id, caller.client_host)
        except MemberIdRequiredError as error:
            return {"error_code": int(error.code), "member_id": error.member_id}
        except (ApiError, EmbedlogError) as error:
            failed = self._answers.failure(error)
            return {**failed, "generation_id": -1, "member_id": request.member_id}

    def _refuse_group_of_log(self, name: str) -> None:
        group = open_group(self._log.root, name)
        if group.read().members and self._log.root.context.files.writable:
            group.remove_dead_members()
        if group.read().members:
            raise ApiError(
                ErrorCode.INCONSISTENT_GROUP_PROTOCOL,
                f"The group {name} has members that are Python programs on the directory: "
                "clients on the wire cannot join it yet",
            )

    def sync_group(self, request: Any, caller: Caller) -> Fields:
        """Answer: the assignment of a member."""
        return self._answers.outcome(self._groups.sync, request)

    def heartbeat(self, request: Any, caller: Caller) -> Fields:
        """Answer: whether the member must join again."""
        return self._answers.outcome(self._groups.heartbeat, request)

    def leave_group(self, request: Any, caller: Caller) -> Fields:
        """Answer: removes members."""
        if caller.version < 3:
            leave = self._groups.leave
            return self._answers.outcome(leave, request.group_id, request.member_id, None)

        def remove(member: Any) -> None:
            self._groups.leave(request.group_id, member.member_id, member.group_instance_id)

        if self._groups.find(request.group_id) is None:
            with suppress(EmbedlogError):
                return self._answers.leave_group(request, caller)
        names = "member_id", "group_instance_id"
        return {"members": self._answers.each(request.members, names, remove)}

    # Offsets

    def offset_commit(self, request: Any, caller: Caller) -> Fields:
        """Answer: commits offsets, if the caller may do so."""
        try:
            self._groups.check_committer(request)
            return self._answers.offset_commit(request, caller)
        except (ApiError, EmbedlogError) as error:
            code = self._answers.failure(error)
            return {
                "topics": [
                    {
                        "name": topic.name,
                        "topic_id": topic.topic_id,
                        "partitions": [
                            {"partition_index": each.partition_index, **code}
                            for each in topic.partitions
                        ],
                    }
                    for topic in request.topics
                ]
            }

    def offset_delete(self, request: Any, caller: Caller) -> Fields:
        """Answer: deletes offsets of topics that no member reads."""
        group = self._groups.find(request.group_id)
        subscribed = set[str]() if group is None else _subscribed(group)

        def delete() -> Fields:
            taken = sorted(subscribed & {topic.name for topic in request.topics})
            if taken:
                raise GroupSubscribedToTopicError(
                    f"Members of the group are subscribed to {', '.join(taken)}",
                    group=request.group_id,
                )
            return self._answers.offset_delete(request, caller)

        return self._answers.outcome(delete)

    # Administration

    def list_groups(self, request: Any, caller: Caller) -> Fields:
        """Answer: the groups of the server, and those of the log."""
        listed = self._answers.list_groups(request, caller)["groups"]
        by_name = {each["group_id"]: each for each in listed}
        for name in self._groups.names():
            group = self._groups.find(name)
            if group is None:
                continue
            by_name.pop(name, None)
            states, types = request.states_filter, request.types_filter
            if (not states or group.state in states) and (not types or "classic" in types):
                facts = {"group_id": name, "protocol_type": group.protocol_type}
                by_name[name] = {**facts, "group_state": group.state, "group_type": "classic"}
        return {"groups": list(by_name.values())}

    def describe_groups(self, request: Any, caller: Caller) -> Fields:
        """Answer: groups with their members."""
        described = [
            self._groups.described(name) or self._answers.described_group(name, caller)
            for name in request.groups
        ]
        return {"groups": described}

    def delete_groups(self, request: Any, caller: Caller) -> Fields:
        """Answer: deletes groups that have no members."""

        def delete(name: str) -> None:
            if self._groups.find(name) is not None:
                raise NonEmptyGroupError("The group has members", group=name)
            self._log.groups[name].delete()

        names = request.groups_names
        outcome = self._answers.outcome
        return {"results": [{"group_id": name, **outcome(delete, name)} for name in names]}


def _subscribed(group: Any) -> set[str]:
    """Return the topics that the consumers of a group have subscribed to."""
    topics = set[str]()
    if group.protocol_type != "consumer":
        return topics
    for member in list(group.members.values()):
        for metadata in member.protocols.values():
            # Other clients may put other bytes there.
            with suppress(MalformedMessageError, struct.error):
                (version,) = struct.unpack_from(">h", metadata)
                version = min(max(version, 0), 3)
                topics.update(decode("ConsumerProtocolSubscription", version, metadata[2:]).topics)
    return topics
