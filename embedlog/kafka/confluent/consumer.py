"""`Consumer` with confluent_kafka's interface, on embedlog's consumer."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from functools import wraps
from itertools import chain, islice
from math import inf
from threading import Event
from time import monotonic
from typing import Any, Concatenate, ParamSpec, TypeVar

from embedlog.consumer.arguments import check_topics
from embedlog.consumer.consumer import Consumer as LogConsumer
from embedlog.consumer.cursor import PartitionCursor
from embedlog.consumer.rebalance_notifier import ConsumerRebalanceListener
from embedlog.errors import (
    EmbedlogError,
    IllegalStateError,
    MaxPollExceededError,
    NoOffsetForPartitionError,
    OffsetOutOfRangeError,
    UnknownTopicOrPartitionError,
    WakeupError,
)
from embedlog.kafka.confluent.client import LogClient
from embedlog.kafka.confluent.kafka_errors import (
    KafkaError,
    KafkaException,
    error_of,
    exception,
    kafka_error,
    translated,
)
from embedlog.kafka.confluent.library import (
    OFFSET_INVALID,
    PartitionResult,
    committed_partition,
    confluent_kafka,
)
from embedlog.kafka.confluent.message import Message, consumed
from embedlog.kafka.confluent.settings import ClientSettings, Statistics, consumer_config
from embedlog.kafka.confluent.turns import Turns
from embedlog.record import OffsetAndMetadata, Record
from embedlog.record import TopicPartition as Partition
from embedlog.server.admin_service import MAX_TIMESTAMP, AdminService

_LOGGER = logging.getLogger("embedlog.kafka")

_MAX_MESSAGES = 1_000_000
_IDLE_SECONDS = 0.05
"""How long a consumer without a subscription waits at a time."""
_REFRESH_SECONDS = 1.0
"""Fetched records are returned for this long before the consumer follows its group again."""
TopicPartition: Any = confluent_kafka.TopicPartition
OFFSET_BEGINNING: int = confluent_kafka.OFFSET_BEGINNING
OFFSET_END: int = confluent_kafka.OFFSET_END
OFFSET_STORED: int = confluent_kafka.OFFSET_STORED
_BY_DEFAULT = (OFFSET_STORED, OFFSET_INVALID)
"""Offsets of an assignment that begins at the commit."""
_NO_POSITION: int = KafkaError._AUTO_OFFSET_RESET
_MISSING = "Subscribed topic not available: {}: Broker: Unknown topic or partition"

P = ParamSpec("P")
T = TypeVar("T")
Positions = dict[Partition, OffsetAndMetadata]
RebalanceCallback = Callable[["Consumer", list[Any]], object]


def _in_turn(
    method: Callable[Concatenate[Consumer, P], T],
) -> Callable[Concatenate[Consumer, P], T]:
    """Have other threads wait while one is in a method, and refuse all once it is closed.

    Errors of embedlog are raised as `KafkaException`.
    """

    @wraps(method)
    def call(self: Consumer, /, *args: P.args, **named: P.kwargs) -> T:
        with self._turns:
            self._check_open()
            try:
                return method(self, *args, **named)
            except EmbedlogError as error:
                raise KafkaException(error_of(error)) from error

    return call


class _PartitionReader(LogConsumer):
    """A consumer that is read one partition at a time; its positions are right at each record."""

    def next_partition(self, timeout_ms: float) -> PartitionCursor | None:
        """Return a partition with records that are fetched; None if none came in that time."""
        with self._guard:
            return self._wait_for(self._find_partition, timeout_ms)

    def _find_partition(self) -> PartitionCursor | None:
        if self.config.fetch_min_bytes > 1 and not self._has_min_bytes(self._fetchable()):
            return None
        return self._fetch_one(lambda cursor, _: cursor if cursor.next_run() else None, None)


class Consumer(LogClient):
    """Reads a log as a member of a group; any thread may use it.

    ``Consumer({"bootstrap.servers": "embedlog:///data/log", "group.id": "g"})`` or a directory
    uses the log; with ``host:port`` the constructor returns confluent_kafka's own consumer.

    Offsets are stored and committed as librdkafka does: stored when `poll` returns the record,
    or by `store_offsets`, and committed every ``auto.commit.interval.ms``, before partitions are
    revoked, and by `close`.
    """

    _original = confluent_kafka.Consumer

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        with self._handle.closed_after_error():
            self._start(self._settings)

    def _start(self, settings: ClientSettings) -> None:
        with translated(InvalidConfigError="_INVALID_ARG"):
            reader = _PartitionReader(self._log.root, **consumer_config(settings))
            self._inner: _PartitionReader = self._log._adopt(reader, "consumer")
        self._auto_store = settings.switch("enable.auto.offset.store", True)
        self._auto_commit = settings.switch("enable.auto.commit", True)
        self._commit_seconds = settings.number("auto.commit.interval.ms", 5000) / 1000
        self._commit_due = monotonic() + self._commit_seconds
        self._reports_eof = settings.switch("enable.partition.eof", False)
        self._creates_topics = settings.switch("allow.auto.create.topics", False)
        self._on_commit: Callable[[Any, list[Any]], object] | None = settings.get("on_commit")
        self._commit_reports: deque[tuple[Any, list[Any]]] = deque()
        self._statistics = Statistics(settings, "consumer")
        self._closing = Event()
        self._turns = Turns(self._inner.wakeup)
        self._subscribed = self._rebalancing = False
        self._reading: PartitionCursor | None = None
        """The partition whose records are returned now."""
        self._records: Iterator[Record] = iter(())
        """What is left of its records that were fetched."""
        self._events: deque[Message] = deque()
        """To be returned."""
        self._last: Record | None = None
        """The record returned last, unless its position is noted already."""
        self._refresh_at = 0.0
        self._positions: Positions = {}
        """After the last records that were returned."""
        self._stored: Positions = {}
        """To be committed."""
        self._reported_ends: dict[Partition, int] = {}
        self._paused: set[Partition] = set()
        """By the program; as in librdkafka also while they are assigned again."""
        self._errors: dict[Partition | None, int] = {}
        """The code of the last error of each partition that failed; None is that of the group."""
        self._retry_at = 0.0
        """When partitions that failed are read again."""
        self._missing_topics: set[str] = set()
        """Topics to report if they do not exist."""

    # Reading

    def poll(self, timeout: float | None = -1.0) -> Message | None:
        """Return the next record or event, or None if there was none for ``timeout`` seconds.

        An error is returned as a message with `Message.error`.  Calls the callbacks of
        rebalances and commits.
        """
        if monotonic() < self._refresh_at:
            for record in self._records:
                self._last = record
                return consumed(record)
        messages = self._take(1, timeout)
        return messages[0] if messages else None

    def consume(self, num_messages: int = 1, timeout: float | None = -1.0) -> list[Message]:
        """Return up to ``num_messages`` records and events; fewer after ``timeout`` seconds."""
        if not 0 <= num_messages <= _MAX_MESSAGES:
            raise ValueError("num_messages must be between 0 and 1000000 (1M)")
        return self._take(num_messages, timeout)

    @_in_turn
    def _take(self, count: int, timeout: float | None) -> list[Message]:
        now = monotonic()
        deadline = inf if timeout is None or timeout < 0 else now + timeout
        if now >= self._refresh_at:
            self._stop_reading()
        messages: list[Message] = []
        while len(messages) < count:
            if self._events:
                messages.append(self._events.popleft())
            elif records := list(islice(self._records, count - len(messages))):
                self._last = records[-1]
                messages += map(consumed, records)
            elif not self._fetch(deadline):
                break
        return messages

    def _next_batch(self) -> Iterator[Record] | None:
        """Return the records of the next batch that was fetched of the partition, or None."""
        with self._turns:
            run = None
            try:
                if self._reading is not None:
                    run = self._reading.next_run()
            except EmbedlogError:
                pass  # the next fetch meets it again, and reports it
            if run is None:
                self._note_position()
                self._reading = None
                return None
            return run.records

    def _fetch(self, deadline: float) -> bool:
        """Fetch records or events; return False if there are none before the deadline."""
        while True:
            self._turns.let_others_go_first()
            self._check_open()
            self._serve()
            self._report_missing_topics()
            if self._errors and monotonic() >= self._retry_at:
                self._set_paused(retry=True)
            remaining = max(deadline - monotonic(), 0.0)
            wait = 0.0 if self._events else min(remaining, _REFRESH_SECONDS)
            if not self._subscribed and not self._inner.assignment():
                # librdkafka waits too, where embedlog's consumer raises.
                self._closing.wait(min(wait, _IDLE_SECONDS))
                if self._events or monotonic() >= deadline:
                    return bool(self._events)
                continue
            try:
                # Without waiting first: a partition whose end was reached has an event.
                found = self._read(0.0)
                if not found and wait and not self._turns.wanted:
                    found = self._read(wait)
            except WakeupError:
                continue
            except EmbedlogError as error:
                self._fail(error, min(wait, _IDLE_SECONDS))
                found = bool(self._events)
            self._refresh_at = monotonic() + _REFRESH_SECONDS
            if found:
                return True
            if monotonic() >= deadline:
                return False

    def _read(self, seconds: float) -> bool:
        """Choose the next partition with records; return whether there is one, or an event."""
        # `_take` has noted the last record after the batch ended.
        self._note_position()
        try:
            self._reading = self._inner.next_partition(seconds * 1000)
        except WakeupError:
            # By another thread, perhaps each time: this one must get its records too.
            self._reading = self._inner.next_partition(0)
        if isinstance(removed := self._inner._group.take_removal(), MaxPollExceededError):
            self._events.append(_event(error_of(removed)))
        if self._errors:
            self._errors.pop(None, None)
            if self._reading is not None:
                self._errors.pop(self._reading.partition, None)
        if self._reports_eof:
            self._report_ends()
        # Several threads may take records: a batch that two of them ask for is the same one.
        self._records = chain.from_iterable(iter(self._next_batch, None))
        return self._reading is not None or bool(self._events)

    def _fail(self, error: EmbedlogError, seconds: float) -> None:
        """Add the event of an error, unless it is the last one that its partition had.

        The others are read on, and the partition again in a second; without a position not before
        it is assigned again.  After an error of the group this waits for ``seconds``.
        """
        known = error_of(error)
        if isinstance(error, OffsetOutOfRangeError | NoOffsetForPartitionError):
            text = f"{error.problem}. Assign the partition again, with an offset."
            known = kafka_error("_AUTO_OFFSET_RESET", text)
        partition = None
        if error.topic is not None and error.partition is not None:
            partition = Partition(error.topic, error.partition)
        if self._errors.get(partition) != known.code():
            self._errors[partition] = known.code()
            self._events.append(_event(known, error.topic, error.partition, error.offset))
        if partition in self._inner.assignment():
            self._inner.pause(partition)
            self._retry_at = monotonic() + _REFRESH_SECONDS
        elif not self._events:
            self._closing.wait(seconds)

    def _set_paused(self, *, retry: bool = False) -> None:
        """Read all but what the program paused, and what failed and is not to be tried again."""
        codes = self._errors.items()
        failed = {part for part, code in codes if not retry or code == _NO_POSITION}
        assigned = self._inner.assignment()
        paused = assigned & (self._paused | failed)
        self._inner.pause(*paused)
        self._inner.resume(*(assigned - paused))

    def _report_ends(self) -> None:
        """Add an event for each partition whose end is reached, once for each end."""
        for partition in sorted(self._inner.assignment() - self._inner.paused()):
            position = self._inner.position(partition)
            end = self._inner.end_offsets([partition])[partition]
            if position >= end and self._reported_ends.get(partition) != position:
                self._reported_ends[partition] = position
                reason = f"Reached end of partition at offset {position} (HighwaterMark {end})"
                error = kafka_error("_PARTITION_EOF", reason)
                self._events.append(_event(error, partition.topic, partition.partition, position))

    def _report_missing_topics(self) -> None:
        if self._missing_topics and not self._creates_topics:
            topics = self._log.root.topics()
            for topic in sorted(self._missing_topics - topics.keys()):
                error = kafka_error("UNKNOWN_TOPIC_OR_PART", _MISSING.format(topic))
                self._events.append(_event(error, topic))
        self._missing_topics = set()

    def _note_position(self) -> None:
        """Note the position after the last record; not for each record, which takes longer."""
        record, self._last = self._last, None
        if record is None:
            return
        partition = Partition(record.topic, record.partition)
        position = OffsetAndMetadata(record.offset + 1, "", record.leader_epoch)
        self._positions[partition] = position
        if self._auto_store:
            self._stored[partition] = position

    def _stop_reading(self) -> None:
        """Let the next `poll` choose a partition, and follow the group, before it returns records.

        Any call that changes positions or the assignment needs this first.
        """
        self._note_position()
        self._refresh_at = 0.0
        self._reading, self._records = None, iter(())

    # Subscription and assignment

    @_in_turn
    def subscribe(
        self,
        topics: list[str],
        on_assign: RebalanceCallback | None = None,
        on_revoke: RebalanceCallback | None = None,
        on_lost: RebalanceCallback | None = None,
    ) -> None:
        """Subscribe to topics, or to patterns, which begin with ``^``; replaces earlier ones.

        The callbacks are called as ``callback(consumer, partitions)`` by a later `poll`.
        ``on_assign`` may call `assign` with other offsets.

        Raises:
            KafkaException: A pattern is not a regular expression (``_INVALID_ARG``), or no topic
                can have one of the names (``TOPIC_EXCEPTION``).
        """
        if not isinstance(topics, list):
            raise TypeError("expected list of topic unicode strings")
        callbacks = {"on_assign": on_assign, "on_revoke": on_revoke, "on_lost": on_lost}
        for name, callback in callbacks.items():
            if callback is not None and not callable(callback):
                raise TypeError(f"{name} expects a callable")
        names = [str(topic) for topic in topics]
        if not all(names) or not names:
            raise exception(
                "_INVALID_ARG",
                "Failed to set subscription: Local: Invalid argument or configuration",
            )
        check_topics([name for name in names if not name.startswith("^")])
        pattern = _pattern(names)
        self._stop_reading()
        listener = _Listener(self, on_assign, on_revoke, on_lost)
        if not self._subscribed:
            self._drop(self._inner.assignment())
            self._inner.assign([])
        if any(name.startswith("^") for name in names):
            self._inner.subscribe(pattern=pattern, listener=listener)
        else:
            self._inner.subscribe(names, listener=listener)
        self._subscribed = True
        self._missing_topics = {name for name in names if not name.startswith("^")}

    @_in_turn
    def unsubscribe(self) -> None:
        """Leave the group, after committing what is stored, and drop the assignment."""
        self._stop_reading()
        if self._subscribed:
            self._subscribed = False
            self._inner.unsubscribe()
        else:
            self._drop(self._inner.assignment())
            self._inner.assign([])

    def assign(self, partitions: list[Any]) -> None:
        """Read exactly these partitions, from their offsets; by default from the commits.

        Partitions that are assigned already begin again, too.

        Raises:
            KafkaException: A group assigned others (``_STATE``).
        """
        self._change_assignment(lambda current, named: named, partitions, restart=True)

    @_in_turn
    def unassign(self) -> None:
        """Read nothing; in a group, until the next rebalance."""
        if self._subscribed and not self._rebalancing:
            self._stop_reading()
            # Like a partition without a position: not read before it is assigned again.
            self._errors |= dict.fromkeys(self._inner.assignment(), _NO_POSITION)
            self._set_paused()
        else:
            self._change_assignment(lambda current, named: named, [])

    def incremental_assign(self, partitions: list[Any]) -> None:
        """Read these partitions too.

        Raises:
            KafkaException: One is assigned already (``_CONFLICT``).
        """

        def add(current: set[Partition], named: set[Partition]) -> set[Partition]:
            for topic, number in sorted(current & named):
                text = f"{topic} [{number}] is already part of the current assignment"
                raise exception("_CONFLICT", text)
            return current | named

        self._change_assignment(add, partitions)

    def incremental_unassign(self, partitions: list[Any]) -> None:
        """Stop reading these partitions.

        Raises:
            KafkaException: One is not assigned (``_INVALID_ARG``).
        """

        def remove(current: set[Partition], named: set[Partition]) -> set[Partition]:
            for topic, number in sorted(named - current):
                raise exception(
                    "_INVALID_ARG",
                    f"{topic} [{number}] can't be unassigned since it is not in the current "
                    "assignment",
                )
            return current - named

        self._change_assignment(remove, partitions)

    @_in_turn
    def _change_assignment(
        self,
        change: Callable[[set[Partition], set[Partition]], set[Partition]],
        partitions: list[Any],
        restart: bool = False,
    ) -> None:
        offsets = _offsets_of(partitions)
        for part, offset in offsets.items():
            if offset < 0 and offset not in (OFFSET_BEGINNING, OFFSET_END, *_BY_DEFAULT):
                text = f"Failed to set assignment: {part.topic} [{part.partition}] at {offset}"
                raise exception("_INVALID_ARG", text)
        chosen = {part: offset for part, offset in offsets.items() if offset not in _BY_DEFAULT}
        if self._rebalancing:
            # The group assigns; a callback chooses where to begin.
            self._seek_all(chosen)
            return
        self._stop_reading()
        current = self._inner.assignment()
        wanted = change(current, set(offsets))
        if not self._subscribed:
            self._inner.assign(sorted(wanted))
        elif wanted != current:
            raise exception("_STATE", "The group assigns partitions: call unsubscribe first")
        self._drop(current if restart else current - wanted)
        for part in (current & wanted & offsets.keys()) - chosen.keys():
            committed = self._inner.committed(part)
            chosen[part] = OFFSET_INVALID if committed is None else committed
        self._seek_all({part: offset for part, offset in chosen.items() if part in wanted})
        self._set_paused()

    def _seek_all(self, offsets: dict[Partition, int]) -> None:
        """Continue at offsets; `OFFSET_INVALID` is what ``auto.offset.reset`` says."""
        for partition, offset in offsets.items():
            if offset >= 0:
                self._inner.seek(partition, offset)
            elif offset == OFFSET_BEGINNING:
                self._inner.seek_to_beginning(partition)
            elif offset == OFFSET_END:
                self._inner.seek_to_end(partition)
            else:
                self._inner._request_reset((partition,), self._inner.config.auto_offset_reset)
            self._positions.pop(partition, None)
            self._reported_ends.pop(partition, None)
            self._errors.pop(partition, None)

    def _drop(self, partitions: Collection[Partition], *, commit: bool = True) -> None:
        """Forget partitions that are no longer assigned, after committing what is stored."""
        stored = {part: self._stored.pop(part) for part in partitions if part in self._stored}
        if stored and commit and self._auto_commit:
            self._commit(stored)
        for partition in partitions:
            self._positions.pop(partition, None)
            self._reported_ends.pop(partition, None)
            self._errors.pop(partition, None)

    @_in_turn
    def assignment(self) -> list[Any]:
        """Return the assigned partitions; in a group, those as of the last poll."""
        return [TopicPartition(*partition) for partition in sorted(self._inner.assignment())]

    @_in_turn
    def pause(self, partitions: list[Any]) -> None:
        """Return no records of these partitions until `resume`, also after a rebalance."""
        self._stop_reading()
        self._paused |= self._inner.assignment() & _offsets_of(partitions).keys()
        self._set_paused()

    @_in_turn
    def resume(self, partitions: list[Any]) -> None:
        """Return records of these partitions again."""
        self._stop_reading()
        self._paused -= _offsets_of(partitions).keys()
        self._set_paused()

    # Positions

    @_in_turn
    def seek(self, partition: Any) -> None:
        """Continue at the offset of a `TopicPartition`.

        Raises:
            KafkaException: The partition is not assigned (``_UNKNOWN_PARTITION``), or had no
                position and must be assigned again (``_STATE``).
        """
        self._stop_reading()
        offsets = _offsets_of([partition])
        text = f"Failed to seek to offset {partition.offset}"
        if partition.offset == OFFSET_STORED:
            raise exception("_INVALID_ARG", f"{text}: assign begins at the commit, not seek")
        if self._errors.get(*offsets) == _NO_POSITION:
            raise exception("_STATE", f"{text}: the partition has no position; assign it again")
        try:
            self._seek_all(offsets)
            self._set_paused()
        except IllegalStateError:
            raise exception("_UNKNOWN_PARTITION", f"{text}: Local: Unknown partition") from None

    @_in_turn
    def position(self, partitions: list[Any]) -> list[Any]:
        """Return the offsets after the last records that were returned; -1001 without one."""
        self._note_position()
        return [
            committed_partition(part, self._positions.get(part)) for part in _offsets_of(partitions)
        ]

    @_in_turn
    def get_watermark_offsets(
        self, partition: Any, timeout: float | None = -1, cached: bool = False
    ) -> tuple[int, int]:
        """Return the log start offset and the log end offset."""
        [part] = _offsets_of([partition])
        with translated(UnknownTopicOrPartitionError="_UNKNOWN_PARTITION"):
            begin = self._inner.beginning_offsets([part])[part]
            return begin, self._inner.end_offsets([part])[part]

    @_in_turn
    def offsets_for_times(self, partitions: list[Any], timeout: float | None = -1) -> list[Any]:
        """Return the offsets of the first records at or after times; -1 if there is none.

        Args:
            partitions: With milliseconds since 1970 as their offsets; -1 is the end, -2 the
                beginning, and -3 the record with the largest time.
            timeout: Without effect.

        Raises:
            KafkaException: None of the partitions exists (``_UNKNOWN_PARTITION``), or there are no
                partitions, or no such times.
        """
        times = _offsets_of(partitions)
        if not times:
            raise exception("_INVALID_ARG", "Failed to get offsets: there are no partitions")
        if min(times.values()) < MAX_TIMESTAMP:
            raise exception("UNSUPPORTED_VERSION", "Failed to get offsets: a time is negative")
        results, lookup = [], AdminService(self._log).offset
        for part, time in times.items():
            try:
                results.append(TopicPartition(*part, lookup(*part, time)[0]))
            except UnknownTopicOrPartitionError as error:
                results.append(
                    _failed(part, error, time, UnknownTopicOrPartitionError="_UNKNOWN_PARTITION")
                )
        if all(result.error for result in results):
            raise KafkaException(results[0].error)
        return results

    # Commits

    @_in_turn
    def commit(
        self,
        /,
        message: Any = None,
        offsets: list[Any] | None = None,
        asynchronous: bool = True,
        **options: Any,
    ) -> list[Any] | None:
        """Commit the offset after a message, offsets, or what is stored.

        Returns the committed partitions, or None if ``asynchronous`` (also called ``async``);
        then ``on_commit`` gets the errors.

        Raises:
            KafkaException: Nothing is stored (``_NO_OFFSET``), or the commit failed.
        """
        asynchronous = options.pop("async", asynchronous)
        self._note_position()
        positions = self._positions_of(message, offsets)
        partitions: Iterable[Partition] = positions or ()
        if positions is None:
            positions, partitions = dict(self._stored), sorted(self._inner.assignment())
        if positions:
            error = self._commit(positions, log_errors=asynchronous)
        else:
            error = kafka_error("_NO_OFFSET", "Commit failed: Local: No offset stored")
        if asynchronous:
            return None
        if error is not None:
            raise KafkaException(error)
        return [
            committed_partition(partition, positions.get(partition)) for partition in partitions
        ]

    def _commit(self, positions: Positions, *, log_errors: bool = True) -> Any:
        """Commit; return the error, which ``on_commit`` gets too, or None."""
        error = None
        try:
            self._inner.commit(positions)
        except EmbedlogError as failure:
            error = error_of(failure)
            if log_errors and self._on_commit is None:
                _LOGGER.warning("A commit failed: %s", failure)
        except ValueError as failure:
            error = kafka_error("_INVALID_ARG", str(failure))
        else:
            for partition, position in positions.items():
                if self._stored.get(partition) == position:
                    del self._stored[partition]
        if self._on_commit is not None:
            results = [committed_partition(part, position) for part, position in positions.items()]
            self._commit_reports.append((error, results))
            self._refresh_at = min(self._refresh_at, monotonic())
        return error

    def _serve(self) -> None:
        """Commit if it is time, and call the callbacks of commits and statistics."""
        if self._auto_commit and monotonic() >= self._commit_due:
            self._commit_due = monotonic() + self._commit_seconds
            if self._stored:
                self._commit(dict(self._stored))
        self._report_commits()
        self._statistics.call_if_due(msg_cnt=len(self._events))

    def _report_commits(self) -> None:
        while self._commit_reports and self._on_commit is not None:
            self._on_commit(*self._commit_reports.popleft())

    @_in_turn
    def store_offsets(self, message: Any = None, offsets: list[Any] | None = None) -> None:
        """Store offsets, which the next automatic commit, or `commit`, commits.

        Raises:
            KafkaException: ``enable.auto.offset.store`` is not false, or a partition is not
                assigned.
        """
        positions = self._positions_of(message, offsets)
        if positions is None:
            raise ValueError("expected either message or offsets")
        if self._auto_store:
            text = "StoreOffsets failed: Local: Invalid argument or configuration"
            raise exception("_INVALID_ARG", text)
        if not positions.keys() <= self._inner.assignment():
            raise exception("_UNKNOWN_PARTITION", "StoreOffsets failed: Local: Unknown partition")
        self._stored.update(positions)

    def _positions_of(self, message: Any, offsets: list[Any] | None) -> Positions | None:
        """Return the positions that the arguments of a commit name; None without arguments."""
        if message is not None and offsets is not None:
            raise ValueError("message and offsets are mutually exclusive")
        if message is not None:
            if not hasattr(message, "offset"):
                raise TypeError("expected confluent_kafka.cimpl.Message")
            if message.error() is not None:
                raise exception("_INVALID_ARG", "The message is an event, which has no offset")
            partition = Partition(message.topic(), message.partition())
            epoch = message.leader_epoch()
            return {partition: OffsetAndMetadata(message.offset() + 1, "", epoch)}
        if offsets is None:
            return None
        _offsets_of(offsets)
        return {
            Partition(item.topic, item.partition): OffsetAndMetadata(
                item.offset, item.metadata or "", item.leader_epoch
            )
            for item in offsets
            if item.offset >= 0
        }

    @_in_turn
    def committed(self, partitions: list[Any], timeout: float | None = -1) -> list[Any]:
        """Return the offsets that the group committed; -1001 without a commit."""
        results = []
        for part in _offsets_of(partitions):
            try:
                results.append(
                    committed_partition(part, self._inner.committed(part, metadata=True))
                )
            except EmbedlogError as error:
                results.append(_failed(part, error))
        return results

    # The group

    @_in_turn
    def memberid(self) -> str | None:
        """Return the member id; None before the first poll."""
        return self._inner.group_metadata().member_id or None

    @_in_turn
    def consumer_group_metadata(self) -> Any:
        """Return the identity of this consumer in its group."""
        return self._inner.group_metadata()

    # Closing

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise RuntimeError("Consumer closed")
        if self._log.root.closed:
            raise RuntimeError(f"The log of the consumer was closed: {self._log.path}")

    def close(self) -> None:
        """Commit what is stored, leave the group, and close; may be repeated."""
        with self._turns:
            if self._log.root.closed:
                self._closing.set()  # the consumer left its group when the log was closed
            elif not self._closing.is_set():
                self._close()

    def _close(self) -> None:
        # All callbacks run, the last one first, even if some raise.
        with ExitStack() as closing:
            closing.callback(self._handle.close)
            closing.callback(self._closing.set)
            closing.callback(self._report_commits)
            closing.enter_context(translated())
            closing.callback(self._inner.close)
            self._stop_reading()
            if not self._subscribed:
                self._drop(self._inner.assignment())

    def __exit__(self, *_: object) -> None:
        self.close()


class _Listener(ConsumerRebalanceListener):
    """Calls the callbacks of a subscription; commits what is stored before it is revoked."""

    def __init__(
        self,
        consumer: Consumer,
        on_assign: RebalanceCallback | None,
        on_revoke: RebalanceCallback | None,
        on_lost: RebalanceCallback | None,
    ) -> None:
        self._consumer = consumer
        self._on_assign, self._on_revoke = on_assign, on_revoke
        self._on_lost = on_lost or on_revoke

    def _call(self, callback: RebalanceCallback | None, partitions: set[Partition]) -> None:
        if callback is None or not (partitions or callback is self._on_assign):
            return
        self._consumer._rebalancing = True
        try:
            callback(self._consumer, [TopicPartition(*part) for part in sorted(partitions)])
        finally:
            self._consumer._rebalancing = False

    def on_partitions_assigned(self, assigned: set[Partition]) -> None:
        """Call ``on_assign``; what the program paused before stays paused."""
        self._consumer._set_paused()
        self._call(self._on_assign, assigned)

    def on_partitions_revoked(self, revoked: set[Partition]) -> None:
        """Call ``on_revoke``, then commit and forget what is stored."""
        try:
            self._call(self._on_revoke, revoked)
        finally:
            self._consumer._drop(revoked)

    def on_partitions_lost(self, lost: set[Partition]) -> None:
        """Call ``on_lost``, or ``on_revoke`` without it; nothing can be committed."""
        try:
            self._call(self._on_lost, lost)
        finally:
            self._consumer._drop(lost, commit=False)


def _event(
    error: Any, topic: str | None = None, partition: int | None = None, offset: int | None = None
) -> Message:
    return Message(topic, partition, offset, None, str(error.str()).encode(), error=error)


def _offsets_of(partitions: Any) -> dict[Partition, int]:
    """Return the offsets of a list of `TopicPartition`, by partition."""
    if not isinstance(partitions, list):
        raise TypeError("requires list of TopicPartition")
    for item in partitions:
        if not hasattr(item, "offset") or not hasattr(item, "topic"):
            raise TypeError("expected cimpl.TopicPartition")
    return {Partition(item.topic, item.partition): item.offset for item in partitions}


def _failed(
    partition: Partition, error: EmbedlogError, offset: int = OFFSET_INVALID, **codes: str
) -> PartitionResult:
    result = PartitionResult(*partition, offset)
    result.error = error_of(error, **codes)
    return result


def _pattern(names: list[str]) -> str:
    """Return a pattern of whole names; librdkafka's need to match the beginning only.

    Raises:
        KafkaException: One is not a regular expression (``_INVALID_ARG``).
    """
    parts = [f"(?:{name[1:]}).*" if name.startswith("^") else re.escape(name) for name in names]
    for name, part in zip(names, parts, strict=True):
        try:
            re.compile(part)
        except re.error as error:
            text = f"Failed to set subscription: {name!r} is not a regular expression: {error.msg}"
            raise exception("_INVALID_ARG", text) from None
    return "|".join(parts)
