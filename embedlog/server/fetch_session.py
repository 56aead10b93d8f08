"""Fetch sessions: what a client fetches, which each of its requests only changes (KIP-227)."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any
from uuid import UUID

from embedlog.server.answers import Fields
from embedlog.server.error_codes import ApiError, ErrorCode

PartitionKey = tuple[str, UUID, int]
"""A partition as a request names it: by the name or the id of its topic."""
_FINAL, _INITIAL = -1, 0
"""The epochs of a request that ends a session, or is in none, and of one that begins a session."""
_LAST_EPOCH = (1 << 31) - 1
_MAX_PARTITIONS = 10_000
"""A client of more gets no session: it names all of them in each request."""
_IDS_SINCE = 13
"""The first version of requests that have the ids of topics."""


def partitions_of(request: Any) -> Iterator[tuple[PartitionKey, Any]]:
    """Yield the partitions that a request names, in order."""
    for topic in request.topics:
        for item in topic.partitions:
            yield (topic.topic, topic.topic_id, item.partition), item


class FetchSession:
    """A session, as of the last request.

    Args:
        uses_ids: Whether its requests name topics by their ids.
    """

    def __init__(self, uses_ids: bool) -> None:
        self.id = secrets.randbelow(_LAST_EPOCH) + 1
        self._epoch, self._uses_ids = _INITIAL, uses_ids
        self.partitions: OrderedDict[PartitionKey, Any] = OrderedDict()
        """What is asked for of each; those that had no records for the longest time come first."""
        self._answered: dict[PartitionKey, tuple[int, int]] = {}
        """The high watermark and the log start offset that the client knows."""

    @classmethod
    def of(cls, request: Any, version: int, current: FetchSession | None) -> FetchSession | None:
        """Return the session that a request begins or continues; None if it is in none.

        Args:
            request: The request.
            version: The version of the request.
            current: The session of the connection, if it has one.

        Raises:
            ApiError: The session is not known, or this is not its next request.
        """
        uses_ids, epoch = version >= _IDS_SINCE, request.session_epoch
        if epoch == _FINAL:
            return None
        if epoch == _INITIAL:
            current = cls(uses_ids)
        elif current is None or current.id != request.session_id:
            raise ApiError(ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
        elif epoch != current._epoch:
            raise ApiError(ErrorCode.INVALID_FETCH_SESSION_EPOCH)
        elif uses_ids != current._uses_ids:
            raise ApiError(ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR)
        current._change(request)
        if len(current.partitions) <= _MAX_PARTITIONS:
            return current
        if epoch == _INITIAL:
            return None
        raise ApiError(ErrorCode.FETCH_SESSION_ID_NOT_FOUND)

    def _change(self, request: Any) -> None:
        self._epoch = 1 if self._epoch == _LAST_EPOCH else self._epoch + 1
        self.partitions.update(partitions_of(request))
        for topic in request.forgotten_topics_data:
            for number in topic.partitions:
                key = topic.topic, topic.topic_id, number
                self.partitions.pop(key, None)
                self._answered.pop(key, None)

    def changed(
        self, found: Iterable[tuple[PartitionKey, Fields]]
    ) -> list[tuple[PartitionKey, Fields]]:
        """Return what the client does not know: records, errors, and new ends of partitions."""
        changed = []
        for key, fields in found:
            ends = fields["high_watermark"], fields.get("log_start_offset", -1)
            if fields["records"] or fields.get("error_code") or self._answered.get(key) != ends:
                changed.append((key, fields))
                self._answered[key] = ends
            if fields["records"]:
                # The others come first in the next answer, which may have no room for all.
                self.partitions.move_to_end(key)
        return changed
