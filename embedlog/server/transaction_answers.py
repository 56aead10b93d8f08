"""Answers the requests of producers with transactions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from embedlog.consumer.open_group import open_group
from embedlog.errors import GroupIdNotFoundError, raised_in_body
from embedlog.group import Group
from embedlog.record import ConsumerGroupMetadata, TopicPartition
from embedlog.server.answers import (
    Answers,
    Caller,
    Fields,
    by_topic,
    has_group,
    numbers_by_topic,
    partitions_of,
    position_of,
)
from embedlog.server.classic_groups import ClassicGroups
from embedlog.server.error_codes import ApiError, ErrorCode
from embedlog.server.patterns import matching
from embedlog.server.remote_members import RemoteMembers
from embedlog.server.transaction_coordinator import STATES, TransactionCoordinator
from embedlog.server.workers import Workers

_FENCED, _ABORTABLE = ErrorCode.PRODUCER_FENCED, ErrorCode.TRANSACTION_ABORTABLE
_EPOCH, _MAPPING = ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.INVALID_PRODUCER_ID_MAPPING
_NEVER = 1 << 15
_NEWER: dict[str, dict[ErrorCode, tuple[Any, ...]]] = {
    "InitProducerId": {_FENCED: (4, _EPOCH)},
    "AddPartitionsToTxn": {_FENCED: (2, _EPOCH), _ABORTABLE: (_NEVER, _MAPPING)},
    "AddOffsetsToTxn": {_FENCED: (2, _EPOCH), _ABORTABLE: (4, _MAPPING)},
    "EndTxn": {_FENCED: (2, _EPOCH), _ABORTABLE: (4, _MAPPING)},
    "TxnOffsetCommit": {
        _FENCED: (_NEVER, _EPOCH),
        ErrorCode.STALE_MEMBER_EPOCH: (_NEVER, ErrorCode.ILLEGAL_GENERATION),
        _ABORTABLE: (4, ErrorCode.UNKNOWN_MEMBER_ID),
    },
    # librdkafka takes an older epoch for the end of the producer.  Streams goes on after that, and
    # not after a transaction that it has to abort.
    "Produce": {_FENCED: (_NEVER, _EPOCH), _ABORTABLE: (11, ErrorCode.INVALID_TXN_STATE, _EPOCH)},
}
"""Codes that came with a version of an API, what clients of versions before take for them, and
perhaps what later ones do."""


@contextmanager
def known_errors(api: str, version: int) -> Iterator[None]:
    """Give errors a code that the client of a request knows."""
    try:
        yield
    except ApiError as error:
        since, older, *newer = _NEWER[api].get(error.code, (0, error.code))
        code = older if version < since else (newer or [error.code])[0]
        raise ApiError(code, error.text) from raised_in_body(error)


class TransactionAnswers:
    """Answers requests.

    Args:
        answers: Of the log.
        transactions: The coordinator.
        groups: The groups that are in memory.
        members: The members of groups of the log that are clients.
        workers: Those of the server.
    """

    def __init__(
        self,
        answers: Answers,
        transactions: TransactionCoordinator,
        groups: ClassicGroups,
        members: RemoteMembers,
        workers: Workers,
    ) -> None:
        self._answers, self._log, self._workers = answers, answers.log, workers
        self._transactions, self._groups, self._members = transactions, groups, members

    def _outcome(self, api: str, caller: Caller, call: Callable[[], Fields | None]) -> Fields:
        return self._answers.outcome(known_errors(api, caller.version)(call))

    # Producers

    def init_producer_id(self, request: Any, caller: Caller) -> Fields:
        """Answer: the id and the epoch of a producer; older ones of its name are fenced."""

        def new() -> Fields:
            name, before = request.transactional_id, (request.producer_id, request.producer_epoch)
            if (before[0] < 0) != (before[1] < 0):
                text = "A producer has both an id and an epoch, or neither"
                raise ApiError(ErrorCode.INVALID_REQUEST, text)
            if name is None:
                number, epoch = self._log.root.producer_identity(None)
            else:
                number, epoch = self._transactions.initialize(
                    name, request.transaction_timeout_ms, None if before[0] < 0 else before
                )
            return {"producer_id": number, "producer_epoch": epoch}

        return {"producer_epoch": -1, **self._outcome("InitProducerId", caller, new)}

    def add_partitions_to_txn(self, request: Any, caller: Caller) -> Fields:
        """Answer: adds partitions to a transaction, all or none."""
        topics = request.v3_and_below_topics
        partitions = [TopicPartition(each.name, n) for each in topics for n in each.partitions]
        unknown = set(partitions).difference(self._answers.service.existing(partitions))

        def add() -> None:
            name = request.v3_and_below_transactional_id
            identity = request.v3_and_below_producer_id, request.v3_and_below_producer_epoch
            self._transactions.add_partitions(name, identity, partitions)

        code = int(ErrorCode.OPERATION_NOT_ATTEMPTED)
        if not unknown:
            code = self._outcome("AddPartitionsToTxn", caller, add)["error_code"]
        missing = int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        results = (
            (part, {"partition_error_code": missing if part in unknown else code})
            for part in partitions
        )
        found = by_topic(results, partitions="results_by_partition")
        return {"results_by_topic_v3_and_below": found}

    def add_offsets_to_txn(self, request: Any, caller: Caller) -> Fields:
        """Answer: has a transaction commit offsets of a group."""

        def add() -> None:
            open_group(self._log.root, request.group_id)  # The name must be valid.
            identity = request.producer_id, request.producer_epoch
            self._transactions.add_group(request.transactional_id, identity, request.group_id)

        return self._outcome("AddOffsetsToTxn", caller, add)

    def txn_offset_commit(self, request: Any, caller: Caller) -> Fields:
        """Answer: adds offsets to a transaction, if the member may commit them."""
        positions = {part: position_of(item) for part, item in partitions_of(request.topics)}

        def check(part: TopicPartition) -> None:
            open_group(self._log.root, request.group_id).encode({part: positions[part]})

        def add() -> None:
            member = self._committer(request, valid)
            identity, version = (request.producer_id, request.producer_epoch), caller.version
            self._transactions.add_offsets(
                request.transactional_id, identity, valid, member, version
            )

        codes = {part: self._answers.outcome(check, part)["error_code"] for part in positions}
        valid = {part: each for part, each in positions.items() if not codes[part]}
        code = self._outcome("TxnOffsetCommit", caller, add)["error_code"] if valid else 0
        results = ((part, {"error_code": each or code}) for part, each in codes.items())
        return {"topics": by_topic(results)}

    def _committer(
        self, request: Any, positions: Collection[TopicPartition]
    ) -> ConsumerGroupMetadata:
        """Return who commits, as the log checks it at the commit.

        Raises:
            ApiError: The caller is not a member, or one of an older generation.
        """
        generation, member = request.generation_id, request.member_id
        group, instance = request.group_id, request.group_instance_id
        who = group, generation, member, instance
        # Clients before KIP-447 do not say who they are.
        is_named = generation >= 0 or bool(member) or instance is not None
        if self._groups.find(group) is None:
            of_log = self._members.group(group)
            if not is_named:
                return _owner(of_log, positions)
            members = of_log.read().members
            is_kept = any(each.stands_for_others for each in members.values())
            if is_kept and self._workers.check_committer(*who):
                return ConsumerGroupMetadata(group)
            info = members.get(member) if member else None
            if info is not None and info.remote is not None:
                self._members.check_reader(of_log, member, generation)
            if info is not None:
                # Of the group of the log: the commit checks what it owns.
                return ConsumerGroupMetadata(*who)
            if generation >= 0:
                exists = has_group(self._log, group)
                code = ErrorCode.UNKNOWN_MEMBER_ID if exists else ErrorCode.ILLEGAL_GENERATION
                raise ApiError(code, f"The group {group} has no such member")
        elif is_named:
            try:
                self._groups.check_committer(*who)
            except ApiError as error:
                # Other commits must wait for the assignment, but not those of transactions.
                if error.code != ErrorCode.REBALANCE_IN_PROGRESS:
                    raise
        return ConsumerGroupMetadata(group)

    def end_txn(self, request: Any, caller: Caller) -> Fields:
        """Answer: commits or aborts a transaction."""

        def end() -> Fields:
            identity, version = (request.producer_id, request.producer_epoch), caller.version
            number, epoch = self._transactions.end(
                request.transactional_id, identity, version, commit=request.committed
            )
            return {"producer_id": number, "producer_epoch": epoch}

        return self._outcome("EndTxn", caller, end)

    # What others see

    def list_transactions(self, request: Any, caller: Caller) -> Fields:
        """Answer: the producers that had transactions since the machine was started."""
        unknown = [each for each in request.state_filters if each not in STATES]
        if request.state_filters and len(unknown) == len(request.state_filters):
            return {"unknown_state_filters": unknown}
        cluster = self._answers.cluster
        known = {
            name: seen
            for name, seen in self._transactions.known().items()
            if cluster.coordinator(name) == caller.node
        }
        pattern = request.transactional_id_pattern
        named = matching(pattern, list(known)) if pattern else list(known)
        states, ids = request.state_filters, request.producer_id_filters
        now_ms, least_ms = self._log.root.clock(), request.duration_filter
        return {
            "unknown_state_filters": unknown,
            "transaction_states": [
                {
                    "transactional_id": name,
                    "producer_id": seen.identity[0],
                    "transaction_state": seen.state,
                }
                for name, seen in ((name, known[name]) for name in named)
                if (not states or seen.state in states)
                and (not ids or seen.identity[0] in ids)
                and (least_ms < 0 or 0 <= seen.began_ms < now_ms - least_ms)
            ],
        }

    def describe_transactions(self, request: Any, caller: Caller) -> Fields:
        """Answer: producers, and the partitions of the transactions that have begun."""
        known = self._transactions.known()

        def describe(name: str) -> Fields:
            if not name:
                raise ApiError(ErrorCode.INVALID_REQUEST, "A transactional.id is not empty")
            if name not in known:
                raise ApiError(ErrorCode.TRANSACTIONAL_ID_NOT_FOUND)
            seen = known[name]
            return {
                "transaction_state": seen.state,
                "transaction_timeout_ms": seen.timeout_ms,
                "transaction_start_time_ms": seen.began_ms,
                "producer_id": seen.identity[0],
                "producer_epoch": seen.identity[1],
                "topics": numbers_by_topic(seen.partitions, "topic"),
            }

        return {
            "transaction_states": [
                {"transactional_id": name, **self._answers.outcome(describe, name)}
                for name in request.transactional_ids
            ]
        }


def _owner(group: Group, partitions: Collection[TopicPartition]) -> ConsumerGroupMetadata:
    """Return who commits if it does not say so, as clients before KIP-447: who has the partitions.

    The commit checks that it has them still.
    """
    with suppress(GroupIdNotFoundError):
        seen = group.snapshot()
        owners = {seen.owners.get(each, "") for each in partitions}
        if len(owners) == 1 and any(owners):
            return ConsumerGroupMetadata(group.name, seen.generation, *owners)
    return ConsumerGroupMetadata(group.name)
