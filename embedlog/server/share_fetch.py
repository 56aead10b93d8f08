"""Answers share fetches and acknowledgements: records of share groups, one by one (KIP-932)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from time import monotonic
from typing import Any

from embedlog.consumer.heartbeat import CHECKPOINT_SECONDS
from embedlog.errors import EmbedlogError, UnknownMemberIdError
from embedlog.groups.share_state import ACCEPT, GAP, REJECT, RELEASE, RENEW
from embedlog.server.answers import Answers, Caller, Fields
from embedlog.server.error_codes import ApiError, ErrorCode
from embedlog.server.fetch import LONGEST_WAIT_SECONDS, MAX_ANSWER_BYTES, Fetcher
from embedlog.server.remote_members import RemoteMembers
from embedlog.server.share_session import FINAL, INITIAL, Place, ShareSession, partition_at
from embedlog.server.subscriptions import check_member_id
from embedlog.server.tail_watch import TailWatch
from embedlog.share.share_group import Acknowledgement, StepOutcome

_MAX_SESSIONS = 16
"""Of one connection: each holds a lock.  Kafka's clients have one."""
_VERDICTS = GAP, ACCEPT, RELEASE, REJECT, RENEW
"""By Kafka's numbers."""
_NOTHING: Fields = {"records": b""}
"""Of a partition without records: clients take no null."""
_MODES = 0, 1
"""``batch_optimized``, in which more records may come than were asked for, and ``record_limit``.
Both are the same here."""


class ShareFetcher:
    """Answers the requests of one connection.

    Args:
        fetcher: Answers its other fetches, and knows how large answers may be.
        members: The members of groups of the log that are clients.
        watch: Wakes requests that wait for records.
        numbers: Those of all sessions of this server, in states.
    """

    def __init__(
        self, fetcher: Fetcher, members: RemoteMembers, watch: TailWatch, numbers: set[int]
    ) -> None:
        self._fetcher, self._answers = fetcher, fetcher.answers
        self._members, self._watch, self._numbers = members, watch, numbers
        self._sessions: dict[tuple[str, str], ShareSession] = {}

    def share_fetch(self, request: Any, caller: Caller) -> Fields:
        """Answer: records for this client alone, and what became of its acknowledgements.

        Raises:
            ApiError: The request is not the next one of a session, or begins none.
        """
        renews, epoch = request.is_renew_ack, request.share_session_epoch
        sizes = request.max_bytes, request.min_bytes, request.max_records, request.max_wait_ms
        if (renews and any(sizes)) or request.share_acquire_mode not in _MODES:
            text = "Who renews locks asks for no records; and there are two modes to acquire them"
            raise ApiError(ErrorCode.INVALID_REQUEST, text)
        deadline = monotonic() + min(max(request.max_wait_ms, 0) / 1000, LONGEST_WAIT_SECONDS)
        try:
            session = self._session(request)
            if epoch != FINAL:
                session.change(request)
            items = [each for each in _items(request) if each[1].acknowledgement_batches]
            said = _Acknowledging(self._answers, session, request, items)
            fields = self._acquired(session, said, request, deadline)
        except UnknownMemberIdError as error:
            # The client does not know it yet, and would ask again and again.
            self._forget(request)
            self._watch.wait({}, deadline)
            raise ApiError(ErrorCode.SHARE_SESSION_NOT_FOUND, str(error)) from error
        if epoch == FINAL:
            self._forget(request)
        for place, code in said.codes.items():
            more = {f"acknowledge_{name}": value for name, value in code.items()}
            fields[place] = fields.get(place, _NOTHING) | more
        return _answer(session, fields)

    def _acquired(
        self, session: ShareSession, said: _Acknowledging, request: Any, deadline: float
    ) -> dict[Place, Fields]:
        """Acknowledge; return records once there are any, or at a deadline, and errors."""
        is_last = request.is_renew_ack or request.share_session_epoch == FINAL
        limit = 0 if is_last else request.max_records
        errors = session.follow()
        places = {key: place for place, key in session.places.items() if key is not None}

        def grant() -> int:
            return self._fetcher.grant(min(max(request.max_bytes, 1), MAX_ANSWER_BYTES))

        while True:
            ends = session.ends()
            outcome = said.step(limit)
            self._fetcher.sent()
            found, failed = session.read(outcome, grant)
            session.write_letters(outcome)
            session.checkpoint_after(CHECKPOINT_SECONDS)
            if found or failed or limit <= 0 or monotonic() >= deadline:
                break
            if outcome.acquired or session.must_reap:
                continue  # There was no record at what was acquired, or somebody may have died.
            until = min(deadline, monotonic() + session.due_in())
            if not self._watch.wait(ends, until, session.has_changed):
                break
        unknown = ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "The group has not begun there")
        failed |= dict.fromkeys(outcome.missing & places.keys(), self._answers.failure(unknown))
        errors |= {places[key]: error for key, error in failed.items()}
        fields = {place: _NOTHING | error for place, error in errors.items()}
        for key, (records, acquired) in found.items():
            fields[places[key]] = {"records": b"".join(records), "acquired_records": acquired}
        return fields

    def share_acknowledge(self, request: Any, caller: Caller) -> Fields:
        """Answer: what became of acknowledgements.

        Raises:
            ApiError: The request is not the next one of a session.
        """
        try:
            if request.share_session_epoch == INITIAL:
                raise ApiError(ErrorCode.INVALID_SHARE_SESSION_EPOCH)
            session = self._session(request)
            said = _Acknowledging(self._answers, session, request, _items(request))
            session.write_letters(said.step(0))
        except UnknownMemberIdError as error:
            self._forget(request)
            raise ApiError(ErrorCode.SHARE_SESSION_NOT_FOUND, str(error)) from error
        if request.share_session_epoch == FINAL:
            self._forget(request)
        return _answer(session, said.codes)

    # Sessions

    def _session(self, request: Any) -> ShareSession:
        """Return the session that a request begins, continues or ends.

        Raises:
            ApiError: The session is not known, or this is not its next request.
            UnknownMemberIdError: The client is no member of the group.
        """
        group, member, epoch = request.group_id, request.member_id, request.share_session_epoch
        if not group or not member:
            raise ApiError(ErrorCode.INVALID_REQUEST, "A group and a member must be named")
        check_member_id(member)
        session = self._sessions.get((group, member))
        if epoch == INITIAL:
            if any(item.acknowledgement_batches for _, item in _items(request)):
                text = "The first request of a session acknowledges nothing"
                raise ApiError(ErrorCode.INVALID_REQUEST, text)
            self._forget(request)
            if len(self._sessions) >= _MAX_SESSIONS:
                raise ApiError(ErrorCode.SHARE_SESSION_LIMIT_REACHED)
            session = ShareSession(self._answers, self._members, group, member, self._numbers)
            self._sessions[group, member] = session
        elif session is None:
            raise ApiError(ErrorCode.SHARE_SESSION_NOT_FOUND)
        elif epoch not in (session.epoch, FINAL):
            raise ApiError(ErrorCode.INVALID_SHARE_SESSION_EPOCH)
        session.advance()
        return session

    def _forget(self, request: Any) -> None:
        session = self._sessions.pop((request.group_id, request.member_id), None)
        if session is not None:
            session.end()

    def close(self) -> None:
        """End all sessions."""
        while self._sessions:
            self._sessions.popitem()[1].end()


class _Acknowledging:
    """The acknowledgements of one request: by partition, all or none."""

    def __init__(
        self,
        answers: Answers,
        session: ShareSession,
        request: Any,
        items: Iterable[tuple[Place, Any]],
    ) -> None:
        self._answers, self._session = answers, session
        self.codes: dict[Place, Fields] = {}
        """What became of them."""
        self._places: dict[bytes, Place] = {}
        self._said: dict[bytes, list[Acknowledgement]] = {}
        for place, item in items:
            try:
                key = partition_at(answers, place).key
                said = list(_acknowledgements(item.acknowledgement_batches, request.is_renew_ack))
                self._check_renewals(said)
            except (EmbedlogError, ApiError) as error:
                self.codes[place] = answers.failure(error)
                continue
            self.codes[place] = {"error_code": 0}
            self._places[key], self._said[key] = place, said

    def _check_renewals(self, said: list[Acknowledgement]) -> None:
        may_renew = self._session.group.config().share_renew_acknowledge_enable
        if not may_renew and any(each.verdict == RENEW for each in said):
            raise ApiError(ErrorCode.INVALID_RECORD_STATE, "Consumers must not renew their locks")

    def step(self, limit: int) -> StepOutcome:
        """Take a step of the session; the first one acknowledges."""
        session, said, self._said = self._session, self._said, {}
        outcome = session.take(said, limit, whole=True)
        for key in {key for key, *_ in outcome.refused}:
            error = ApiError(
                ErrorCode.INVALID_RECORD_STATE,
                "The client does not have all of these records: their locks have ended, or they "
                "were acknowledged before",
            )
            self.codes[self._places[key]] = self._answers.failure(error)
        if said and session.group.context.durability == "fsync":
            session.checkpoint_after(0.0)
        return outcome


def _items(request: Any) -> Iterator[tuple[Place, Any]]:
    for topic in request.topics:
        for item in topic.partitions:
            yield (topic.topic_id, item.partition_index), item


def _acknowledgements(batches: Any, may_renew: bool) -> Iterator[Acknowledgement]:
    """Yield what a client says of ranges of offsets.

    Raises:
        ApiError: It makes no sense.
    """
    least = 0
    for batch in batches:
        first, stop, types = batch.first_offset, batch.last_offset + 1, batch.acknowledge_types
        known = _VERDICTS if may_renew else _VERDICTS[:-1]
        if (
            not least <= first < stop
            or len(types) not in (1, stop - first)
            or not all(0 <= each < len(known) for each in types)
        ):
            raise ApiError(ErrorCode.INVALID_REQUEST, "The acknowledgements make no sense")
        least = stop
        if len(types) == 1:
            yield Acknowledgement(first, stop, known[types[0]])
            continue
        for number, run in groupby(types):
            count = sum(1 for _ in run)
            yield Acknowledgement(first, first + count, known[number])
            first += count


def _answer(session: ShareSession, fields: dict[Place, Fields]) -> Fields:
    topics: dict[Any, list[Fields]] = {}
    for (topic, number), each in fields.items():
        topics.setdefault(topic, []).append({"partition_index": number, **each})
    return {
        "acquisition_lock_timeout_ms": session.group.config().share_record_lock_duration_ms,
        "responses": [
            {"topic_id": topic, "partitions": partitions} for topic, partitions in topics.items()
        ],
    }
