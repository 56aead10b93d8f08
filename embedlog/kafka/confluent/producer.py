"""`Producer` with confluent_kafka's interface, on embedlog's producer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import inf
from random import Random
from time import monotonic
from typing import Any
from zlib import crc32

from embedlog.errors import (
    BufferExhaustedError,
    ClosedError,
    EmbedlogError,
    IllegalStateError,
    SerializationError,
    TimeoutError,  # noqa: A004 - it is one
    UnknownTopicOrPartitionError,
)
from embedlog.forks import new_lock
from embedlog.kafka.confluent.client import LogClient
from embedlog.kafka.confluent.kafka_errors import (
    KafkaException,
    error_of,
    exception,
    kafka_error,
    translated,
)
from embedlog.kafka.confluent.library import confluent_kafka
from embedlog.kafka.confluent.message import TIMESTAMP_CREATE_TIME, Message
from embedlog.kafka.confluent.settings import (
    PARTITIONERS,
    ClientSettings,
    Statistics,
    producer_config,
)
from embedlog.kafka.typed import explained, key_of_row, schema_of
from embedlog.partitioner import partition_for_key
from embedlog.record import OffsetAndMetadata, RecordMetadata
from embedlog.record import TopicPartition as Partition

_IDLE_SECONDS = 0.01
"""How long `Producer.poll` sleeps at a time while there is nothing to report."""

_FULL_SECONDS = 1.0
"""How long `Producer.poll` writes at most while its queue is half full."""

DeliveryCallback = Callable[[Any, Message], object]


_Report = tuple[Any, DeliveryCallback | None, str, bytes | None, bytes | None, float]
"""A record on its way: its `RecordFuture` or `_Refused`, its callback, topic, key and value, and
when it was produced.  A plain tuple: one is made for each record."""


class _Refused:
    """The future of a record that embedlog's producer did not take."""

    value = None

    def __init__(self, error: EmbedlogError) -> None:
        self.exception = error

    def failed(self) -> bool:
        """Return True."""
        return True

    def result(self, timeout: float) -> None:
        """Raise the error."""
        raise self.exception


class Producer(LogClient):
    """Sends records to a log; any thread may use it.

    ``Producer({"bootstrap.servers": "embedlog:///data/log"})`` or a directory uses the log;
    with ``host:port`` the constructor returns confluent_kafka's own producer.

    A record counts towards ``queue.buffering.max.messages`` until `poll` or `flush` reported
    its delivery, also without a callback, as in librdkafka.
    """

    _original = confluent_kafka.Producer

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        with self._handle.closed_after_error():
            self._start(self._settings)

    def _start(self, settings: ClientSettings) -> None:
        self._config = producer_config(settings)
        self._largest: int = self._config["max_request_size"]
        self._capacity = settings.number("queue.buffering.max.messages", 100_000) or inf
        self._on_delivery: DeliveryCallback | None = settings.get("on_delivery")
        name = str(settings.get("partitioner", "consistent_random"))
        if name not in PARTITIONERS:  # librdkafka has others too
            text = f'Invalid value "{name}" for configuration property "partitioner"'
            raise exception("_INVALID_ARG", text)
        self._partitioner = name
        self._pending: deque[_Report] = deque()
        self._serving = new_lock()
        self._statistics = Statistics(settings, "producer")
        self._closing = threading.Event()
        self._random = Random()
        self._partitions = self._log.root.partitions
        self._open()

    def _open(self) -> None:
        with translated(InvalidConfigError="_INVALID_ARG"):
            self._inner = self._handle.producer(**self._config)
        self._send: Callable[..., Any] = self._inner.send

    def produce(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        partition: int = -1,
        callback: DeliveryCallback | None = None,
        on_delivery: DeliveryCallback | None = None,
        timestamp: int = 0,
        headers: Any = None,
    ) -> None:
        """Add a record to the queue; a background thread writes it after ``linger.ms``.

        Args:
            topic: The topic; created if the log may do that.
            value: Bytes, or a str that is encoded as UTF-8; for a typed topic a dict.
            key: Likewise; of a typed topic it is in the value.
            partition: The partition; -1 leaves it to the ``partitioner``.
            callback: Called as ``callback(error, message)`` by a later `poll` or `flush`.
            on_delivery: The same as ``callback``.
            timestamp: Milliseconds since 1970; 0 is now.
            headers: A dict, or a list of pairs.

        Raises:
            BufferError: The queue is full: call `poll`, which reports deliveries.
            KafkaException: The record is too large (``MSG_SIZE_TOO_LARGE``), or the topic has no
                such partition (``_UNKNOWN_PARTITION``).
        """
        value = value.encode() if type(value) is str else value
        key = key.encode() if type(key) is str else key
        pending = self._pending
        if len(pending) >= self._capacity:
            raise BufferError("Local: Queue full")
        if type(value) is bytes and len(value) > self._largest:
            raise exception(
                "MSG_SIZE_TOO_LARGE", "Unable to produce message: Broker: Message size too large"
            )
        future: Any
        try:
            schema = None
            if type(value) is not bytes and (schema := schema_of(self._log.root, topic)):
                key = None if key is None else key_of_row(topic, schema, value, key)
                chosen = None if partition < 0 else partition
            elif partition < 0:
                chosen = None if key is None else self._partition_for(topic, key)
            else:
                chosen = partition
            if chosen is None and headers is None and not timestamp:
                future = self._send(topic, value, key)
            else:
                future = self._send(topic, value, key, _headers(headers), chosen, timestamp or None)
        except EmbedlogError as error:
            future = self._refused(explained(self._log.root, error, topic, value))
        callback = callback or on_delivery or self._on_delivery
        pending.append((future, callback, topic, key, value, monotonic()))

    def _refused(self, error: EmbedlogError) -> _Refused:
        """Raise what `produce` raises; return what is reported later."""
        if isinstance(error, BufferExhaustedError):
            raise BufferError("Local: Queue full") from error
        if isinstance(error, ClosedError):
            self._check_open()
            if self._log.root.closed:
                raise RuntimeError(f"The log of the producer was closed: {self._log.path}")
        if isinstance(error, SerializationError):
            raise TypeError(str(error)) from error
        if self._is_transactional:
            # Reported later, it would be missing from a transaction that is committed meanwhile.
            fenced = error_of(error, InvalidProducerEpochError="_FATAL")
            raise KafkaException(fenced) from error
        if isinstance(error, UnknownTopicOrPartitionError) and error.partition is not None:
            text = "Unable to produce message: Local: Unknown partition"
            raise exception("_UNKNOWN_PARTITION", text) from error
        return _Refused(error)

    def _partition_for(self, topic: str, key: Any) -> int | None:
        """Return the partition of a key; None if the log may choose one."""
        name = self._partitioner
        if name == "murmur2_random":
            return None  # as embedlog itself
        try:
            count = self._partitions(topic)
        except UnknownTopicOrPartitionError:
            return None  # it is created with one partition, or refused
        if count == 1:
            return None
        if name == "murmur2":
            return partition_for_key(key, count)
        if name == "random" or (name == "consistent_random" and not key):
            return self._random.randrange(count)
        return crc32(key) % count

    def produce_batch(
        self,
        topic: str,
        messages: list[dict[str, Any]],
        partition: int = -1,
        on_delivery: DeliveryCallback | None = None,
    ) -> int:
        """Produce many records, each a dict of the arguments of `produce`.

        A record that is refused gets its error as ``_error``.  Returns how many were accepted.
        """
        count = 0
        for message in messages:
            arguments = {
                name: message[name]
                for name in ("value", "key", "timestamp", "headers")
                if message.get(name) is not None
            }
            callback = message.get("callback") or message.get("on_delivery") or on_delivery
            number = message.get("partition", partition)
            try:
                self.produce(topic, partition=number, on_delivery=callback, **arguments)
                count += 1
            except BufferError:
                message["_error"] = kafka_error("_QUEUE_FULL")
            except KafkaException as error:
                message["_error"] = error.args[0]
        return count

    # Reports

    def poll(self, timeout: float | None = None) -> int:
        """Report deliveries to their callbacks; wait for one up to ``timeout`` seconds.

        Without a timeout it waits until there is one.  Returns how many were reported.
        """
        self._check_open()
        if self._statistics.enabled:
            self._statistics.call_if_due(msg_cnt=len(self._pending))
        if len(self._pending) > self._capacity / 2:
            # Rather than have `produce` raise: the thread that writes needs the interpreter too.
            with translated(), suppress(TimeoutError):
                self._inner.flush(_FULL_SECONDS)
        served = self._serve()
        if served or timeout == 0:
            return served
        deadline = inf if timeout is None or timeout < 0 else monotonic() + timeout
        while not (served := self._serve()) and (remaining := deadline - monotonic()) > 0:
            with suppress(EmbedlogError, IndexError):
                self._pending[0][0].result(min(remaining, 1.0))
            if not self._pending:
                self._closing.wait(min(remaining, _IDLE_SECONDS))
        return served

    def flush(self, timeout: float | None = None) -> int:
        """Write everything, and report it; return how many records are still in the queue."""
        self._check_open()
        deadline = inf if timeout is None or timeout < 0 else monotonic() + timeout
        while self._pending:
            remaining = max(deadline - monotonic(), 0.0)
            with translated(), suppress(TimeoutError):
                self._inner.flush(None if remaining == inf else remaining)
            if not self._serve() and remaining <= 0:
                break
        return len(self._pending)

    def _serve(self) -> int:
        """Report the deliveries at the front of the queue that are done."""
        served, pending = 0, self._pending
        while pending:
            try:
                report = pending[0]
            except IndexError:
                break
            future = report[0]
            metadata = future.value
            if metadata is None and not future.failed():
                break
            with self._serving:
                # Unless another thread reports it.
                if not pending or pending[0] is not report:
                    continue
                pending.popleft()
            served += 1
            callback = report[1]
            if callback is not None:
                callback(*_delivered(report, metadata))
        return served

    def __len__(self) -> int:
        """Return how many records are not reported yet."""
        return len(self._pending)

    def __bool__(self) -> bool:
        return True

    def purge(self, in_queue: bool = True, in_flight: bool = True, blocking: bool = True) -> None:
        """Drop what is not written yet; later reports say so (``_PURGE_QUEUE``)."""
        self._check_open()
        if in_queue and not self._is_transactional:
            with translated():
                self._inner.close(timeout=0)
            self._open()

    # Transactions

    def init_transactions(self, timeout: float = -1) -> None:
        """Fence older producers with the same ``transactional.id``."""
        with translated():
            self._in_transactions().init_transactions()

    def begin_transaction(self) -> None:
        """Begin a transaction: what is produced becomes visible with its commit."""
        with translated():
            self._in_transactions().begin_transaction()

    def commit_transaction(self, timeout: float = -1) -> None:
        """Make the records of the transaction visible, all at once.

        Raises:
            KafkaException: A newer producer has the same ``transactional.id`` (``_FENCED``);
                after another error the call may be repeated, or the transaction aborted.
        """
        producer = self._in_transactions()
        self.flush(timeout)
        try:
            producer.commit_transaction()
        except EmbedlogError as error:
            raise KafkaException(_commit_error(error)) from error

    def abort_transaction(self, timeout: float = -1) -> None:
        """Drop the records of the transaction."""
        producer = self._in_transactions()
        self.flush(timeout)
        with translated():
            producer.abort_transaction()

    def send_offsets_to_transaction(
        self, positions: list[Any], group_metadata: Any, timeout: float = -1
    ) -> None:
        """Commit offsets of a group with the transaction, which checks the member.

        Args:
            positions: The next offsets to read; those without an offset are left out.
            group_metadata: What the consumer's ``consumer_group_metadata()`` returned.
            timeout: Not needed by a log.
        """
        offsets = {
            Partition(each.topic, each.partition): OffsetAndMetadata(
                each.offset, each.metadata or "", each.leader_epoch
            )
            for each in positions
            if each.offset >= 0
        }
        producer = self._in_transactions()
        try:
            producer.send_offsets_to_transaction(offsets, group_metadata)
        except EmbedlogError as error:
            raise KafkaException(_commit_error(error)) from error

    @property
    def _is_transactional(self) -> bool:
        return bool(self._settings.get("transactional.id"))

    def _in_transactions(self) -> Any:
        self._check_open()
        if not self._is_transactional:
            raise exception(
                "_NOT_CONFIGURED",
                "The Transactional API requires transactional.id to be configured",
            )
        return self._inner

    # Closing

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise RuntimeError("Producer has been closed")

    def close(self, timeout: float = -1) -> bool:
        """Flush, report what was delivered, and close."""
        if not self._closing.is_set():
            self.flush(timeout)
            self._closing.set()
            try:
                with translated():
                    self._inner.close()
            finally:
                self._handle.close()
        return True

    def __exit__(self, *_: object) -> None:
        self.close()


def _commit_error(error: EmbedlogError) -> Any:
    """Return the `KafkaError` of a commit that failed: to be repeated, or aborted."""
    known = error_of(error)
    if known.fatal() or known.retriable() or isinstance(error, IllegalStateError):
        return known
    return kafka_error(known.name(), known.str(), txn_requires_abort=True)


def _headers(headers: Any) -> list[tuple[str, bytes | None]] | None:
    if headers is None:
        return None
    if not isinstance(headers, Mapping | list | tuple):
        kind = type(headers).__name__
        raise TypeError(f"expected headers to be dict or list of (key, value) tuples, not {kind}")
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    return [(name, value.encode() if isinstance(value, str) else value) for name, value in pairs]


def _delivered(report: _Report, metadata: RecordMetadata | None) -> tuple[Any, Message]:
    """Return the error and the message of a delivery report."""
    future, _, topic, key, value, produced_at = report
    latency = monotonic() - produced_at
    if metadata is not None:
        _, partition, offset, timestamp = metadata
        # Before the commit of a transaction it is -1.
        known = None if offset < 0 else offset
        times = (TIMESTAMP_CREATE_TIME, timestamp or 0)
        return None, Message(topic, partition, known, key, value, None, None, times, latency)
    error = error_of(
        future.exception,
        TimeoutError="_MSG_TIMED_OUT",
        ClosedError="_PURGE_QUEUE",
        UnknownTopicOrPartitionError="_UNKNOWN_TOPIC",
    )
    return error, Message(topic, -1, None, key, value, None, error, None, latency)
