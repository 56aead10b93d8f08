"""Answers the requests of groups.

Consumers with Kafka's own assignors are members of groups of the log, whose rows all programs share
(`classic_members`).  A group whose members know more of their assignments than that is in memory
(`classic_groups`).
"""

from __future__ import annotations

from functools import partial
from itertools import repeat
from typing import Any

from embedlog.assignor.select import BUILT_IN
from embedlog.errors import EmbedlogError, InvalidGroupIdError, UnknownMemberIdError
from embedlog.groups.membership import MODERN, SHARE
from embedlog.server.answers import (
    Answers,
    Caller,
    Fields,
    has_group,
    is_listed,
    offsets_committed,
    unknown_group,
    with_operations,
)
from embedlog.server.classic_groups import ClassicGroups, MemberIdRequiredError
from embedlog.server.classic_members import ClassicMembers, may_be_assigned
from embedlog.server.error_codes import ApiError, ErrorCode
from embedlog.server.remote_members import RemoteMembers
from embedlog.server.subscriptions import consumer_metadata

_COORDINATED = 0, 1
"""Kafka's numbers for coordinators: of groups, and of transactions."""
_NULL_PROTOCOL_SINCE = 7
"""The version of JoinGroup."""
_EPOCHS_SINCE = 9
"""The version of OffsetCommit."""


class GroupAnswers:
    """Answers requests.

    Args:
        answers: Of the log.
        groups: The groups that are in memory.
        members: The members of groups of the log that are clients.
    """

    def __init__(self, answers: Answers, groups: ClassicGroups, members: RemoteMembers) -> None:
        self._answers, self._groups, self._log = answers, groups, answers.log
        self._members, self._classic = members, ClassicMembers(answers, members)

    def find_coordinator(self, request: Any, caller: Caller) -> Fields:
        """Answer: the server itself, or one of its workers."""

        def find(key: str) -> Fields:
            if request.key_type not in _COORDINATED:
                text = "Only groups and transactions have a coordinator"
                raise ApiError(ErrorCode.INVALID_REQUEST, text)
            node = self._answers.cluster.coordinator(key)
            return {"node_id": node, **self._answers.address(node, caller)}

        def found(key: str) -> Fields:
            return {"key": key, "node_id": -1, **self._answers.outcome(find, key)}

        return found(request.key) | {"coordinators": list(map(found, request.coordinator_keys))}

    # Members

    def join_group(self, request: Any, caller: Caller) -> Fields:
        """Answer: the generation, and for the leader of a group in memory the members."""
        try:
            joined = self._groups if self._is_in_memory(request) else self._classic
            return joined.join(request, caller)
        except (ApiError, EmbedlogError) as error:
            told = error.member_id if isinstance(error, MemberIdRequiredError) else None
            return {
                **self._answers.failure(error),
                "generation_id": -1,
                "protocol_name": None if caller.version >= _NULL_PROTOCOL_SINCE else "",
                "member_id": told or request.member_id,
            }

    def _is_in_memory(self, request: Any) -> bool:
        """Whether a member that joins is, or would be, in a group in memory.

        Raises:
            ApiError: The group is not, and cannot have this member.
        """
        if self._groups.has(request.group_id):
            return True
        group = self._members.group(request.group_id)
        document = group.read()
        if document.members and self._log.root.context.files.writable:
            group.remove_dead_members(exclude=request.member_id)
            document = group.read()
        members = document.members.values()
        if any(each.stands_for_others for each in members):
            raise ApiError(
                ErrorCode.COORDINATOR_NOT_AVAILABLE,
                f"The members of the group {group.name} are in the memory of another server",
            )
        if not members and document.kind != SHARE:
            return not may_be_assigned(request, only=True)
        if not may_be_assigned(request, only=False):
            raise ApiError(
                ErrorCode.INCONSISTENT_GROUP_PROTOCOL,
                f"The partitions of the group {group.name} are assigned by its server, which knows "
                f"only {', '.join(BUILT_IN)}",
            )
        return False

    def _of(self, group: str) -> ClassicGroups | ClassicMembers:
        """Return what has the classic members of a group."""
        return self._classic if self._groups.find(group) is None else self._groups

    def sync_group(self, request: Any, caller: Caller) -> Fields:
        """Answer: the assignment of a member."""
        return self._answers.outcome(self._of(request.group_id).sync, request)

    def heartbeat(self, request: Any, caller: Caller) -> Fields:
        """Answer: whether the member must join again."""
        return self._answers.outcome(self._of(request.group_id).heartbeat, request)

    def leave_group(self, request: Any, caller: Caller) -> Fields:
        """Answer: removes members."""
        if not request.group_id:
            raise ApiError(ErrorCode.INVALID_GROUP_ID, "A group has a name")
        leave = self._of(request.group_id).leave
        if caller.version < 3:
            return self._answers.outcome(leave, request.group_id, request.member_id, None)

        def remove(member: Any) -> None:
            leave(request.group_id, member.member_id, member.group_instance_id)

        names = "member_id", "group_instance_id"
        return {"members": self._answers.each(request.members, names, remove)}

    # Offsets

    def offset_commit(self, request: Any, caller: Caller) -> Fields:
        """Answer: commits offsets, if the caller may do so."""
        epoch, commit = request.generation_id_or_member_epoch, None
        member, instance = request.member_id, request.group_instance_id
        try:
            group = self._members.group(request.group_id)
            if self._groups.find(request.group_id) is not None:
                self._groups.check_committer(request.group_id, epoch, member, instance)
            elif epoch >= 0 or (member and group.read().members):
                if caller.version < _EPOCHS_SINCE:
                    client = self._members.info(group, member, instance).remote
                    if client is not None and client.protocol == MODERN:
                        text = f"Members of KIP-848 commit with version {_EPOCHS_SINCE} or above"
                        raise ApiError(ErrorCode.UNSUPPORTED_VERSION, text)
                commit = partial(self._members.commit, group, member, instance, epoch)
            return self._answers.offset_commit(request, caller, commit)
        except (ApiError, EmbedlogError) as error:
            told = error
            if epoch >= 0 and not has_group(self._log, request.group_id):
                told = unknown_group(request.group_id)
                if caller.version < _EPOCHS_SINCE:
                    told = ApiError(ErrorCode.ILLEGAL_GENERATION, told.text)
            return offsets_committed(request, repeat(self._answers.failure(told)))

    def offset_fetch(self, request: Any, caller: Caller) -> Fields:
        """Answer: the committed offsets of groups, if who asks as a member is one."""

        def check(asked: Any) -> None:
            if asked.member_id is not None and self._groups.find(asked.group_id) is None:
                try:
                    group = self._members.group(asked.group_id)
                    self._members.check_reader(group, asked.member_id, asked.member_epoch)
                except (InvalidGroupIdError, UnknownMemberIdError):
                    if has_group(self._log, asked.group_id):
                        raise
                    # As in Kafka, a group that does not exist has no offsets, whoever asks.

        return self._answers.offset_fetch(request, caller, check)

    def offset_delete(self, request: Any, caller: Caller) -> Fields:
        """Answer: deletes offsets of topics that no member reads."""
        group = self._groups.find(request.group_id)
        topics = {topic.name for topic in request.topics}
        read = set[str]() if group is None else _read_by(group, topics)
        return self._answers.outcome(self._answers.offset_delete, request, caller, read)

    # Administration

    def list_groups(self, request: Any, caller: Caller) -> Fields:
        """Answer: the groups of the server, and those of the log."""
        listed = self._answers.list_groups(request, caller)["groups"]
        by_name = {each["group_id"]: each for each in listed}
        for group in self._groups.with_members():
            by_name.pop(group.name, None)
            if is_listed(request, group.state, "classic"):
                facts = {"group_id": group.name, "protocol_type": group.protocol_type}
                by_name[group.name] = {**facts, "group_state": group.state, "group_type": "classic"}
        return {"groups": list(by_name.values())}

    def describe_groups(self, request: Any, caller: Caller) -> Fields:
        """Answer: groups with their members."""
        described = [
            self._groups.described(name) or self._answers.described_group(name, caller)
            for name in request.groups
        ]
        return {"groups": with_operations(described, request)}


def _read_by(group: Any, topics: set[str]) -> set[str]:
    """Return which topics the consumers of a group may have subscribed to."""
    read = set[str]()
    if group.protocol_type != "consumer":
        return read
    for member in list(group.members.values()):
        for metadata in member.protocols.values():
            try:
                read.update(consumer_metadata(metadata).topics)
            except ApiError:
                return topics  # Other clients may put other bytes there, which can mean each.
    return read & topics
