"""`AIOKafkaProducer`: aiokafka's producer on a log."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Self

from embedlog import errors as log_errors
from embedlog import record
from embedlog.config import ProducerConfig
from embedlog.kafka.aiokafka.client import LogClient
from embedlog.kafka.aiokafka.consumer import consumers
from embedlog.kafka.aiokafka.errors import kafka_errors, raises_kafka_errors, translated
from embedlog.kafka.aiokafka.library import aiokafka, errors, structs, util
from embedlog.kafka.client_type import or_uses_brokers
from embedlog.lazy import asyncio
from embedlog.tasks import in_thread

if TYPE_CHECKING:
    from embedlog.producer import Producer

_missing: Any = aiokafka.producer.producer._missing
_sequence = itertools.count(1)


class AIOKafkaProducer(LogClient):
    """Sends records to the log that ``bootstrap_servers`` names; see aiokafka's class.

    Batches have the size that suits a log; gzip is stored as zstd, and snappy as lz4.
    """

    _original: ClassVar[Any] = aiokafka.AIOKafkaProducer
    _PRODUCER_CLIENT_ID_SEQUENCE = 0
    """The constructor for brokers counts here, under `patch`: it finds the class by its name."""

    @or_uses_brokers
    def __init__(self, **configs: Any) -> None:
        settings = self._settings = self._set_up((), configs)
        acks = settings["acks"]
        if acks not in (0, 1, -1, "all", _missing):
            raise ValueError("Invalid ACKS parameter")
        if settings["compression_type"] not in ("gzip", "snappy", "lz4", "zstd", None):
            raise ValueError("Invalid compression type!")
        self._transactional = settings["transactional_id"] is not None
        if self._transactional or settings["enable_idempotence"]:
            if acks not in ("all", -1, _missing):
                raise ValueError(f"acks={acks} not supported if enable_idempotence=True")
            settings["enable_idempotence"] = True
        if settings["client_id"] is None:
            settings["client_id"] = f"aiokafka-producer-{next(_sequence)}"
        self._given = {name: value for name, value in settings.items() if name in configs}
        self._partitioner = settings["partitioner"]
        self._chooses = "partitioner" in configs and not isinstance(
            self._partitioner, aiokafka.partitioner.DefaultPartitioner
        )
        self._producer: Producer[Any, Any] | None = None
        self._in_transaction = False
        self._written: deque[tuple[asyncio.Future[Any], Any]] = deque()
        """Futures of records whose outcome is known, and the outcome, until the loop sets it."""

    def _own_settings(self) -> dict[str, Any]:
        known, settings = ProducerConfig.__settings__, self._settings
        own = {name: settings[name] for name in self._given if name in known}
        own.pop("partitioner", None)
        own |= {"key_serializer": "bytes", "value_serializer": "bytes"}
        own["client_id"] = settings["client_id"]
        if settings["acks"] in (_missing, -1):
            own.pop("acks", None)  # `all`
        if self._transactional or settings["enable_idempotence"]:
            own["enable_idempotence"] = True
        else:
            own.pop("enable_idempotence", None)  # a log numbers batches, if `acks` allows it
        return own

    # Starting and stopping

    @raises_kafka_errors
    async def start(self) -> None:
        """Open the log."""
        assert self._loop is util.get_running_loop(), (
            "Please create objects with the same loop as running with"
        )
        handle = await self._open()
        self.client = self._client
        try:
            self._producer = handle.producer(**self._own_settings())
            if self._transactional:
                await in_thread(self._producer.init_transactions)
        except BaseException:
            await self._give_back()
            raise

    async def stop(self) -> None:
        """Write what was sent, and close."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._producer is not None:
                await self._producer.aclose()
        finally:
            await self._give_back()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _started(self) -> Producer[Any, Any]:
        if self._closed:
            raise errors.ProducerClosed
        assert self._producer is not None, "The producer was not started"
        return self._producer

    @raises_kafka_errors
    async def flush(self) -> None:
        """Return once everything that was sent is written or failed."""
        await self._started().aflush()

    @raises_kafka_errors
    async def partitions_for(self, topic: str) -> set[int]:
        """Return the partitions of a topic; creates it if the log allows that."""
        return self._started().partitions_for(topic)

    # Sending

    async def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Iterable[tuple[str, bytes]] | None = None,
    ) -> asyncio.Future[Any]:
        """Add a record to the batch that is written next, and return its future.

        Raises:
            MessageSizeTooLargeError: The record is larger than ``max_request_size``.
            KafkaTimeoutError: The memory for unwritten records stayed full.
            IllegalOperation: No transaction has begun.
        """
        assert not (value is None and key is None), "Need at least one: key or value"
        producer, settings = self._started(), self._settings
        if self._transactional and not self._in_transaction:
            raise errors.IllegalOperation("Can't send messages while not in transaction")
        if settings["key_serializer"] is not None:
            key = settings["key_serializer"](key)
        if settings["value_serializer"] is not None:
            value = settings["value_serializer"](value)
        try:
            if partition is None and self._chooses:
                partition = self._partition(topic, None, None, None, key, value)
            pairs = list(headers) if headers else None
            sent = producer.send(topic, value, key, pairs, partition, timestamp_ms)
        except log_errors.UnknownTopicOrPartitionError as error:
            assert partition is None, "Unrecognized partition"
            raise translated(error) from error
        except log_errors.EmbedlogError as error:
            raise translated(error) from error
        if sent._row is None and isinstance(sent.exception, log_errors.RecordTooLargeError):
            raise translated(sent.exception) from sent.exception
        done: asyncio.Future[Any] = self._loop.create_future()
        sent._observe(self._note, sent, done)
        if not settings["linger_ms"] and not sent.done():
            sent._drain_soon(self._loop)
        return done

    def _partition(
        self,
        topic: str,
        partition: int | None,
        key: Any,
        value: Any,
        serialized_key: bytes | None,
        serialized_value: bytes | None,
    ) -> int:
        """Return the partition of a record, which frameworks ask for."""
        if partition is not None:
            return partition
        numbers = sorted(self._started().partitions_for(topic))
        return self._partitioner(serialized_key, numbers, numbers)  # type: ignore[no-any-return]

    def _note(self, sent: Any, done: asyncio.Future[Any], outcome: Any) -> None:
        """Have the loop set the outcome of a future, with all others that it has not set yet."""
        if isinstance(outcome, BaseException):
            sent.failed()  # The program learns of it from the future.
        waits = bool(self._written)
        self._written.append((done, outcome))
        if not waits:
            with suppress(RuntimeError):  # The loop was closed.
                self._loop.call_soon_threadsafe(self._set_written)

    def _set_written(self) -> None:
        while self._written:
            done, outcome = self._written.popleft()
            if done.done():
                continue
            if isinstance(outcome, BaseException):
                done.set_exception(translated(outcome))
            else:
                done.set_result(self._metadata(*outcome))

    def _metadata(self, topic: str, partition: int, offset: int, timestamp: int | None) -> Any:
        if self._settings["acks"] == 0:
            return None
        where = structs.TopicPartition(topic, partition)
        config = self._client._log.root.topic(topic).config
        kind = int(config.message_timestamp_type == "LogAppendTime")
        return structs.RecordMetadata(topic, partition, where, offset, timestamp, kind, None)

    async def send_and_wait(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Iterable[tuple[str, bytes]] | None = None,
    ) -> Any:
        """Send a record, and return its `RecordMetadata` once it is written."""
        return await (await self.send(topic, value, key, partition, timestamp_ms, headers))

    def create_batch(self) -> LogBatch:
        """Return an empty batch, to be filled and given to `send_batch`."""
        return LogBatch(self._settings)

    async def send_batch(
        self, batch: LogBatch, topic: str, *, partition: int
    ) -> asyncio.Future[Any]:
        """Write a batch, and return a future of the `RecordMetadata` of its first record."""
        producer = self._started()
        if self._transactional and not self._in_transaction:
            raise errors.IllegalOperation("Can't send messages while not in transaction")
        batch.close()
        done: asyncio.Future[Any] = self._loop.create_future()
        values, keys, headers, times = batch.columns()
        with kafka_errors():
            written = await in_thread(
                producer.send_batch, topic, values, keys, headers, times, partition
            )
            first, *_ = await written
        offset = -1 if first.base_offset is None else first.base_offset
        done.set_result(self._metadata(topic, first.partition, offset, first.timestamp))
        return done

    # Transactions

    def _check_transactional(self, begun: bool | None = None) -> Producer[Any, Any]:
        if not self._transactional:
            raise errors.IllegalOperation(
                "You need to configure transaction_id to use transactions"
            )
        return self._started()

    @raises_kafka_errors
    async def begin_transaction(self) -> None:
        """Begin a transaction: what is sent becomes visible with its commit."""
        self._check_transactional().begin_transaction()
        self._in_transaction = True

    @raises_kafka_errors
    async def commit_transaction(self) -> None:
        """Make the records of the transaction visible, all at once."""
        await self._end(self._check_transactional().commit_transaction)

    @raises_kafka_errors
    async def abort_transaction(self) -> None:
        """Drop the records of the transaction."""
        await self._end(self._check_transactional().abort_transaction)

    async def _end(self, call: Callable[[], None]) -> None:
        self._in_transaction = False  # at once: nothing is sent from now on
        await in_thread(call)

    def transaction(self) -> _Transaction:
        """Return a context manager for a transaction."""
        return _Transaction(self)

    @raises_kafka_errors
    async def send_offsets_to_transaction(self, offsets: Mapping[Any, Any], group_id: str) -> None:
        """Commit offsets of a group with the transaction.

        Args:
            offsets: By partition.
            group_id: The group; the consumer of this program that owns the partitions is its
                member, and without one it must have no members.
        """
        producer = self._check_transactional()
        if not self._in_transaction:
            raise errors.IllegalOperation("Not in the middle of a transaction")
        if not group_id or not isinstance(group_id, str):
            raise ValueError(group_id)
        positions = {
            record.TopicPartition(*partition): record.OffsetAndMetadata(*position)
            for partition, position in util.commit_structure_validate(offsets).items()
        }
        members = (
            each._consumer.group_metadata()
            for each in list(consumers)
            if each._group_id == group_id
            and not each._closed
            and each._client._log is self._client._log
            and each._consumer is not None
            and each.assignment() >= positions.keys()
        )
        producer.send_offsets_to_transaction(positions, next(members, group_id))

    def __del__(self) -> None:
        if self._closed is False and self._producer is not None:
            with suppress(Exception):
                self._original.__del__(self)


class _Transaction:
    def __init__(self, producer: AIOKafkaProducer) -> None:
        self._producer = producer

    async def __aenter__(self) -> Self:
        await self._producer.begin_transaction()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is None:
            await self._producer.commit_transaction()
            return
        with suppress(errors.ProducerFenced):
            await self._producer.abort_transaction()


class LogBatch:
    """Records that are written together: what aiokafka's ``BatchBuilder`` is for a log."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._rows: list[tuple[Any, Any, Any, int | None]] = []
        self._size, self._closed = 0, False

    def append(self, *, timestamp: int | None, key: Any, value: Any, headers: Any = ()) -> Any:
        """Add a record; return its metadata, or None if the batch is full or closed."""
        for name, item in (("key", key), ("value", value)):
            serializer = self._settings[f"{name}_serializer"]
            if serializer is not None and item is not None:
                item = serializer(item)
            key, value = (item, value) if name == "key" else (key, item)
        size = len(key or b"") + len(value or b"") + 32
        if self._closed or (self._rows and self._size + size > self._settings["max_batch_size"]):
            return None
        self._rows.append((value, key, list(headers) or None, timestamp))
        self._size += size
        return structs.RecordMetadata("", -1, None, len(self._rows) - 1, timestamp, 0, None)

    def close(self) -> None:
        """Accept no more records."""
        self._closed = True

    def size(self) -> int:
        """Return the size of the batch in bytes, about."""
        return self._size

    def record_count(self) -> int:
        """Return the number of records."""
        return len(self._rows)

    def columns(self) -> tuple[Any, Any, Any, Any]:
        """Return the values, keys, headers and timestamps."""
        values, keys, headers, times = map(list, zip(*self._rows, strict=True))
        now = None if None in times else times
        return values, keys, headers if any(headers) else None, now
