"""Answers share fetches and acknowledgements: records of share groups, one by one (KIP-932)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

from embedlog.consumer.heartbeat import CHECKPOINT_SECONDS
from embedlog.errors import UnknownMemberIdError
from embedlog.server.answers import Caller, Fields, by_topic
from embedlog.server.error_codes import ApiError, ErrorCode
from embedlog.server.fetch import LONGEST_WAIT_SECONDS, Fetcher
from embedlog.server.remote_members import RemoteMembers
from embedlog.server.subscriptions import check_member_id
from embedlog.server.tail_watch import TailWatch, end_of
from embedlog.server.wire_share_session import INITIAL, Place, WireShareSession, items_of

_FINAL = -1
"""The epoch of a request that ends a session."""
_LAST_EPOCH = (1 << 31) - 1
_MAX_SESSIONS = 16
"""Of one connection: each holds a lock.  Kafka's clients have one."""
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
        self._fetcher, self._members, self._watch = fetcher, members, watch
        self._numbers, self._sessions = numbers, dict[tuple[str, str], WireShareSession]()

    def share_fetch(self, request: Any, caller: Caller) -> Fields:
        """Answer: records for this client alone, and what became of its acknowledgements.

        Raises:
            ApiError: The request is not the next one of a session, or begins none.
        """
        sizes = request.max_bytes, request.min_bytes, request.max_records, request.max_wait_ms
        if (request.is_renew_ack and any(sizes)) or request.share_acquire_mode not in _MODES:
            text = "Who renews locks asks for no records; and there are two modes to acquire them"
            raise ApiError(ErrorCode.INVALID_REQUEST, text)
        deadline = monotonic() + min(max(request.max_wait_ms, 0) / 1000, LONGEST_WAIT_SECONDS)

        def fetched(session: WireShareSession) -> dict[Place, Fields]:
            fields = self._acquired(session, request, deadline)
            # As in Kafka, whether there are records.
            if request.share_session_epoch == INITIAL and request.max_records:
                fields = dict.fromkeys(session.places.values(), _NOTHING) | fields
            for place, code in session.codes.items():
                said = {f"acknowledge_{name}": value for name, value in code.items()}
                fields[place] = fields.get(place, _NOTHING) | said
            return fields

        return self._in_session(request, fetched, deadline)

    def _acquired(
        self, session: WireShareSession, request: Any, deadline: float
    ) -> dict[Place, Fields]:
        """Acknowledge; return records once there are any, or at a deadline, and errors."""
        is_last = request.share_session_epoch == _FINAL
        errors = {} if is_last else session.follow(request)
        limit = 0 if is_last or request.is_renew_ack else request.max_records
        grant = partial(self._fetcher.grant, request.max_bytes)

        while True:
            self._fetcher.sent()
            ends = {each.log: end_of(each.log) for each in session.partitions.values()}
            outcome = session.step(limit)
            found, failed = session.read(outcome, grant, max(request.batch_size or limit, 1))
            session.write_letters(outcome)
            session.checkpoint_after(CHECKPOINT_SECONDS)
            if found or failed or limit <= 0 or monotonic() >= deadline:
                break
            if outcome.acquired or session.must_reap:
                continue  # There was no record at what was acquired, or somebody may have died.
            until = min(deadline, monotonic() + session.due_in())
            changed = partial(session.group.has_changed, list(session.partitions))
            if not self._watch.wait(ends, until, changed):
                break
        error = ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "The group has not begun there")
        if limit:
            failed |= {key: self._fetcher.answers.failure(error) for key in outcome.missing}
        errors |= {session.places[key]: each for key, each in failed.items()}
        fields = {place: _NOTHING | each for place, each in errors.items()}
        return fields | {session.places[key]: each for key, each in found.items()}

    def share_acknowledge(self, request: Any, caller: Caller) -> Fields:
        """Answer: what became of acknowledgements.

        Raises:
            ApiError: The request is not the next one of a session.
        """
        if request.share_session_epoch == INITIAL:
            raise ApiError(ErrorCode.INVALID_SHARE_SESSION_EPOCH)

        def acknowledged(session: WireShareSession) -> dict[Place, Fields]:
            session.write_letters(session.step(0))
            return session.codes

        return self._in_session(request, acknowledged, 0.0)

    # Sessions

    def _in_session(
        self,
        request: Any,
        answer: Callable[[WireShareSession], dict[Place, Fields]],
        deadline: float,
    ) -> Fields:
        """Return an answer in the session that a request begins, continues or ends."""
        try:
            session = self._session(request)
            session.hear(request)
            fields = answer(session)
        except UnknownMemberIdError as error:
            self._forget(request)
            said = (item.acknowledgement_batches for _, item in items_of(request))
            if request.share_session_epoch == _FINAL and not any(said):
                return {}  # librdkafka leaves the group before it ends the session.
            # The client does not know it yet, and would ask again and again.
            self._watch.wait({}, deadline)
            raise ApiError(ErrorCode.SHARE_SESSION_NOT_FOUND, str(error)) from error
        if request.share_session_epoch == _FINAL:
            self._forget(request)
        return {
            "acquisition_lock_timeout_ms": session.group.config().share_record_lock_duration_ms,
            "responses": by_topic(fields.items(), "topic_id"),
        }

    def _session(self, request: Any) -> WireShareSession:
        group, member, epoch = request.group_id, request.member_id, request.share_session_epoch
        if not group or not member:
            raise ApiError(ErrorCode.INVALID_REQUEST, "A group and a member must be named")
        check_member_id(member)
        session = self._sessions.get((group, member))
        if epoch == INITIAL:
            if any(item.acknowledgement_batches for _, item in items_of(request)):
                text = "The first request of a session acknowledges nothing"
                raise ApiError(ErrorCode.INVALID_REQUEST, text)
            self._forget(request)
            if len(self._sessions) >= _MAX_SESSIONS:
                raise ApiError(ErrorCode.SHARE_SESSION_LIMIT_REACHED)
            answers = self._fetcher.answers
            session = WireShareSession(answers, self._members, group, member, self._numbers)
            self._sessions[group, member] = session
        elif session is None:
            raise ApiError(ErrorCode.SHARE_SESSION_NOT_FOUND)
        elif epoch not in (session.epoch, _FINAL):
            raise ApiError(ErrorCode.INVALID_SHARE_SESSION_EPOCH)
        session.epoch = session.epoch % _LAST_EPOCH + 1
        return session

    def _forget(self, request: Any) -> None:
        session = self._sessions.pop((request.group_id, request.member_id), None)
        if session is not None:
            session.end()

    def close(self) -> None:
        """End all sessions."""
        while self._sessions:
            self._sessions.popitem()[1].end()
