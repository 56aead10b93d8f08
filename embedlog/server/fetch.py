"""Answers fetch requests: batches of the log become batches of the wire."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from time import monotonic
from typing import Any

from embedlog.batch import Batch
from embedlog.errors import EmbedlogError
from embedlog.partition import PartitionLog, PartitionReader
from embedlog.partition.tail import Tail
from embedlog.server.answers import Answers, Caller, Fields, check_epoch
from embedlog.server.fetch_session import FetchSession, PartitionKey, partitions_of
from embedlog.server.memory import MemoryBudget
from embedlog.server.record_batches import end_of, write_batches
from embedlog.server.tail_cache import CachedBatches, TailCache
from embedlog.server.tail_watch import TailWatch

_MAX_ANSWER_BYTES = 55 << 20
"""The most records in an answer, as Kafka's ``fetch.max.bytes``."""
READ_BYTES = 1 << 20
"""How much of a partition is converted at a time."""
_ZSTD_SINCE = 10
"""The first version of fetch requests whose clients know zstd."""
_MAX_READERS = 1000
"""How many partitions a connection reads on from where it was."""
_MAX_AHEAD = 16
"""How many partitions of an answer are read ahead: more would drop each other from the cache."""
LONGEST_WAIT_SECONDS = 300.0
"""Also if a client asks for more: its connection may have broken meanwhile."""


class Fetcher:
    """Answers the fetch requests of one connection.

    Args:
        answers: Of the log.
        cache: Batches that producers sent.
        ahead: Batches that were converted before consumers asked for them.
        watch: Wakes requests that wait for records.
        memory: What all answers together may take.
    """

    def __init__(
        self,
        answers: Answers,
        cache: TailCache,
        ahead: TailCache,
        watch: TailWatch,
        memory: MemoryBudget,
    ) -> None:
        self.answers, self._ahead = answers, ahead
        self._cache, self._watch, self._memory = cache, watch, memory
        self._readers: OrderedDict[bytes, PartitionReader] = OrderedDict()
        self._granted = 0
        self._full: list[tuple[PartitionLog, PartitionReader, int]] = []
        """Partitions of which the last answer could not hold all, and how many bytes it could."""
        self._session: FetchSession | None = None

    def fetch(self, request: Any, caller: Caller) -> Fields:
        """Answer: records, once there are enough of them, or at the end of the client's wait.

        A connection has one fetch session at most.

        Raises:
            ApiError: The request continues a session that this connection does not have.
        """
        session = self._session = FetchSession.of(request, caller.version, self._session)
        asked = list(partitions_of(request) if session is None else session.partitions.items())
        deadline = monotonic() + min(max(request.max_wait_ms, 0) / 1000, LONGEST_WAIT_SECONDS)
        while True:
            self.sent()
            answer = _Answer(self, request, caller)
            found = [(key, answer.partition(key, item)) for key, item in asked]
            enough = answer.size >= request.min_bytes or answer.failed or not answer.ends
            if enough or monotonic() >= deadline or not self._watch.wait(answer.ends, deadline):
                if session is None:
                    return {"responses": _by_topic(found)}
                return {"session_id": session.id, "responses": _by_topic(session.changed(found))}

    def grant(self, wanted: int) -> int:
        """Return how many of the bytes that a client wants an answer may have."""
        wanted = min(max(wanted, 1), _MAX_ANSWER_BYTES)
        self._granted += (granted := self._memory.take(wanted, least=READ_BYTES))
        return granted

    def sent(self) -> None:
        """Give back what the last answer took."""
        granted, self._granted = self._granted, 0
        self._memory.give_back(granted)

    def read_ahead(self) -> None:
        """Convert what follows a full answer while the client looks at that."""
        while self._full:
            log, reader, limit = self._full.pop()
            with suppress(EmbedlogError):  # The client meets it if it asks.
                offset, epoch = reader.offset, log.tail().leader_epoch
                if parts := self._converted(log, reader, limit):
                    facts = end_of(parts), epoch, "none", parts, sum(map(len, parts))
                    self._ahead.keep(log, offset, CachedBatches(*facts))

    def read(self, log: PartitionLog, tail: Tail, item: Any, limit: int, version: int) -> list[Any]:
        """Return the parts of batches of the wire from an offset on; none at the end."""
        offset, end = item.fetch_offset, log.visible_end(tail)
        if not tail.start_offset <= offset < end:
            log.reader(offset)  # It raises unless the offset is the end.
            return []
        epoch, zstd = tail.leader_epoch, version >= _ZSTD_SINCE
        found: list[Any] = self._cache.get(log, offset, end, epoch, limit, zstd=zstd)
        if found:
            return found
        found = self._ahead.get(log, offset, end, epoch, limit, zstd=zstd)
        if not found:
            reader = self._readers.pop(log.key, None)
            if reader is None or (reader.offset, reader.leader_epoch) != (offset, epoch):
                reader = log.reader(offset)
            found = self._converted(log, reader, limit)
        is_full = READ_BYTES >= limit <= sum(map(len, found)) and len(self._full) < _MAX_AHEAD
        reader = self._readers.get(log.key)
        if is_full and reader is not None and reader.offset == end_of(found):
            self._full.append((log, reader, limit))
        return found

    def _converted(self, log: PartitionLog, reader: PartitionReader, limit: int) -> list[Any]:
        """Return the next batches, and keep the reader, which may be beyond them."""
        rows_of = rows_of_typed(log)
        found, size = list[Any](), 0
        while size < limit and (batches := reader.read(min(limit - size, READ_BYTES))):
            for parts in write_batches(batches, rows_of):
                found += parts
                size += sum(map(len, parts))
                if size >= limit:
                    break
        self._readers[log.key] = reader
        if len(self._readers) > _MAX_READERS:
            self._readers.popitem(last=False)
        return found


def rows_of_typed(log: PartitionLog) -> Callable[[Batch], Any] | None:
    """Return what makes the columns of the wire of a batch of a typed topic; None of others."""
    if log.schema is None:
        return None
    from embedlog.server.typed_json import to_wire

    return partial(to_wire, schema=log.schema)


def _by_topic(found: Sequence[tuple[PartitionKey, Fields]]) -> list[Fields]:
    return [
        {"topic": name, "topic_id": number, "partitions": [fields for _, fields in partitions]}
        for (name, number), partitions in groupby(found, key=lambda each: each[0][:2])
    ]


class _Answer:
    """One look at the partitions of a fetch request."""

    def __init__(self, fetcher: Fetcher, request: Any, caller: Caller) -> None:
        self._fetcher, self._request, self._version = fetcher, request, caller.version
        self.size, self.failed = 0, False
        self.ends: dict[PartitionLog, int] = {}
        self._left: int | None = None

    def partition(self, key: PartitionKey, item: Any) -> Fields:
        """Return a partition of the answer."""
        # librdkafka refuses null in the place of no records.
        fields = {"partition_index": item.partition, "high_watermark": -1, "records": b""}
        outcome = self._fetcher.answers.outcome(self._read, key, item)
        self.failed = self.failed or outcome["error_code"] != 0
        return fields | outcome

    def _read(self, key: PartitionKey, item: Any) -> Fields:
        fetcher, answers = self._fetcher, self._fetcher.answers
        log = answers.partition(answers.named(*key[:2]), item.partition)
        log.refresh()
        tail = log.tail()
        check_epoch(log, item.current_leader_epoch)
        end = self.ends[log] = log.visible_end(tail)
        records = []
        if item.fetch_offset != end:
            if self._left is None:
                self._left = fetcher.grant(self._request.max_bytes)
            # The first batch of an answer is whole, however large it is (KIP-74).
            if self._left > 0:
                limit = max(min(self._left, item.partition_max_bytes), 1)
                records = fetcher.read(log, tail, item, limit, self._version)
                size = sum(map(len, records))
                self.size += size
                self._left -= size
        return {
            "high_watermark": end,
            "last_stable_offset": end,
            # What is not committed is in no partition.
            "aborted_transactions": [] if self._request.isolation_level else None,
            "log_start_offset": tail.start_offset,
            "records": records,
        }
