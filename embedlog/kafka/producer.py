"""`KafkaProducer`: kafka-python's producer on a log."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from embedlog import errors as log_errors
from embedlog import record
from embedlog.config import ProducerConfig
from embedlog.kafka import errors
from embedlog.kafka.client import (
    NETWORK_SETTINGS,
    LogClient,
    adapted,
    check_topics,
)
from embedlog.kafka.client_type import or_uses_brokers
from embedlog.kafka.errors import kafka_errors, raises_kafka_errors, translated
from embedlog.kafka.kafka_python import kafka
from embedlog.kafka.structs import RecordMetadata, TopicPartition
from embedlog.kafka.typed import explained, key_of_row, schema_of, size_of
from embedlog.producer.future import RecordFuture

_OWN = ("key_serializer", "value_serializer", "partitioner", "metadata_max_age_ms")
"""Settings that the client itself handles."""
_BUILT_IN_PARTITIONERS = ("DefaultPartitioner", "StickyPartitioner")
"""Partitioners of kafka-python that do what the log does by default."""
_sequence = itertools.count(1)


class FutureRecordMetadata:
    """The outcome of one `KafkaProducer.send`."""

    __slots__ = ("_future", "_sizes")

    def __init__(self, future: RecordFuture, sizes: tuple[int, int, int]) -> None:
        self._future, self._sizes = future, sizes

    def get(self, timeout: float | None = None) -> Any:
        """Return the `RecordMetadata`, or raise the error of the record.

        Args:
            timeout: In seconds.

        Raises:
            KafkaTimeoutError: The record was not written in that time; it still may be.
        """
        try:
            return self._metadata(self._future.result(timeout))
        except log_errors.EmbedlogError as error:
            raise translated(error) from error

    def _metadata(self, written: Any) -> Any:
        topic, partition, offset, timestamp = written
        where = TopicPartition(topic, partition)
        return RecordMetadata(topic, partition, where, offset, timestamp, None, *self._sizes)

    @property
    def is_done(self) -> bool:
        """Whether the record was written, or failed for good."""
        return self._future.done()

    def succeeded(self) -> bool:
        """Return whether the record was written."""
        return self._future.succeeded()

    def failed(self) -> bool:
        """Return whether the record failed for good."""
        return self._future.failed()

    @property
    def value(self) -> Any:
        """The `RecordMetadata`, or None if there is none (yet)."""
        written = self._future.value
        return None if written is None else self._metadata(written)

    @property
    def exception(self) -> BaseException | None:
        """The error, or None if there is none (yet)."""
        error = self._future.exception
        return None if error is None else translated(error)

    def retriable(self) -> bool:
        """Return whether the record failed with an error that sending it again may avoid."""
        return bool(getattr(self.exception, "retriable", False))

    def add_callback(self, function: Callable[..., object], *args: Any, **named: Any) -> Self:
        """Call ``function(*args, metadata, **named)`` once the record is written, or now."""
        self._future.add_callback(lambda done: function(*args, self._metadata(done), **named))
        return self

    def add_errback(self, function: Callable[..., object], *args: Any, **named: Any) -> Self:
        """Call ``function(*args, error, **named)`` once the record failed, or now."""
        self._future.add_errback(lambda error: function(*args, translated(error), **named))
        return self

    def add_both(self, function: Callable[..., object], *args: Any, **named: Any) -> Self:
        """Call ``function(*args, metadata or error, **named)`` once the record is done."""
        return self.add_callback(function, *args, **named).add_errback(function, *args, **named)


class KafkaProducer(LogClient):
    """Sends records to the log that ``bootstrap_servers`` names; see kafka-python's class.

    Settings are those of kafka-python 3.  Batches have the size that suits a log, unless
    ``batch_size`` is set; gzip is stored as zstd, and snappy as lz4.
    """

    _original = kafka.KafkaProducer

    DEFAULT_CONFIG: ClassVar[Mapping[str, Any]] = kafka.KafkaProducer.DEFAULT_CONFIG

    @or_uses_brokers
    def __init__(self, **configs: Any) -> None:
        if unknown := {name: configs[name] for name in configs if name not in self.DEFAULT_CONFIG}:
            raise ValueError(f"Unrecognized configs: {unknown}")
        self._open(configs)
        config = self.config
        if config["client_id"] is None:
            config["client_id"] = f"kafka-python-producer-{next(_sequence)}"
        if config["acks"] == "all":
            config["acks"] = -1
        with self._handle.closed_after_error(), kafka_errors():
            self._serialize_key = adapted(config["key_serializer"], "serialize", "key")
            self._serialize_value = adapted(config["value_serializer"], "serialize", "value")
            self._plain = self._serialize_key is None and self._serialize_value is None
            self._partition: Callable[..., int] | None = None
            self._producer = self._handle.producer(**self._settings(configs))
        # Other settings may have switched it off.
        config["enable_idempotence"] = self._producer.config.enable_idempotence

    def _settings(self, configs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings for the log's own producer."""
        known = ProducerConfig.__settings__
        settings = {
            name: value
            for name, value in configs.items()
            if name in known and name not in _OWN and name not in NETWORK_SETTINGS
        }
        # The client serializes, since a future has the sizes; topics keep theirs for others.
        settings |= {"key_serializer": "bytes", "value_serializer": "bytes"}
        settings["client_id"] = self.config["client_id"]
        if self.config["transactional_id"] is not None:
            if not self.config["enable_idempotence"]:
                raise errors.KafkaConfigurationError("transactional_id needs enable_idempotence")
            settings["enable_idempotence"] = True
        partitioner = configs.get("partitioner")
        if partitioner is not None and type(partitioner).__name__ not in _BUILT_IN_PARTITIONERS:
            if hasattr(partitioner, "partition"):
                self._partition = partitioner.partition
            else:
                settings["partitioner"] = partitioner
        return settings

    def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        headers: list[tuple[str, bytes]] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> FutureRecordMetadata:
        """Send a record, and return its future.

        Raises:
            IllegalStateError: The producer is closed.
            TypeError: A serialized key or value is not bytes, or a header not (str, bytes).
            ValueError: Neither key nor value is set, there is no such partition, or no topic can
                have this name.
            KafkaTimeoutError: The memory for unwritten records stayed full.
            MessageSizeTooLargeError: The record is larger than ``max_request_size``.
        """
        if value is None and key is None:
            raise ValueError("Need at least one: key or value")
        header_size = -1 if not headers else _check_headers(headers)
        if not self._plain or self._partition is not None:
            raw_key, raw_value = key, value
            if self._serialize_key is not None:
                key = self._serialize_key.convert(topic, headers or [], key)
            if self._serialize_value is not None:
                value = self._serialize_value.convert(topic, headers or [], value)
            if self._partition is not None and partition is None:
                partition = self._choose(topic, raw_key, key, raw_value, value)
        try:
            if key is not None and type(value) is not bytes:
                schema = schema_of(self._log.root, topic)
                key = key if schema is None else key_of_row(topic, schema, value, key)
            future = self._producer.send(topic, value, key, headers, partition, timestamp_ms)
        except log_errors.UnknownTopicOrPartitionError as error:
            if partition is None:
                raise translated(error) from error
            raise ValueError(str(error)) from error
        except log_errors.InvalidTopicError as error:
            check_topics([topic])
            raise translated(error) from error
        except log_errors.EmbedlogError as error:
            raise translated(explained(self._log.root, error, topic, value)) from error
        # A record that is refused alone, and no other, has no row in a batch.
        if future._row is None and isinstance(future.exception, log_errors.RecordTooLargeError):
            raise translated(future.exception) from future.exception
        return FutureRecordMetadata(future, (size_of(key), size_of(value), header_size))

    def _choose(self, topic: str, raw_key: Any, key: Any, raw_value: Any, value: Any) -> int:
        assert self._partition is not None
        with kafka_errors():
            self._producer.partitions_for(topic)
        partition = self._partition(topic, raw_key, key, raw_value, value, self._client)
        if partition is None:
            raise ValueError(f"Partitioner did not assign a partition for topic {topic}!")
        return partition

    @raises_kafka_errors
    def flush(self, timeout: float | None = None) -> None:
        """Return once everything that was sent is written or failed.

        Raises:
            KafkaTimeoutError: Not everything was written within ``timeout`` seconds.
        """
        self._producer.flush(timeout)

    @raises_kafka_errors
    def partitions_for(self, topic: str) -> set[int]:
        """Return the partitions of a topic; creates it if the log allows that."""
        check_topics([topic])
        return self._producer.partitions_for(topic)

    @classmethod
    def max_usable_produce_magic(cls, api_version: Any = None) -> int:
        """Return the version of Kafka's format of records that has what a log keeps."""
        return 2

    def metrics(self, raw: bool = False) -> dict[str, Any] | None:
        """Return the producer's metrics by group and name."""
        return self._producer.metrics() if self.config["metrics_enabled"] else None

    def close(self, timeout: float | None = None, null_logger: bool = False) -> None:
        """Write what was sent, for at most ``timeout`` seconds, and close the producer."""
        if timeout is not None and timeout < 0:
            raise ValueError(f"Invalid timeout: {timeout}")
        if self._closed:
            return
        self._closed = True
        try:
            with kafka_errors():
                self._producer.close(timeout)
        finally:
            self._handle.close()
            self._close_serializers("key_serializer", "value_serializer")

    # Transactions

    @raises_kafka_errors
    def init_transactions(self) -> None:
        """Fence older producers with the same ``transactional_id``."""
        self._producer.init_transactions()

    @raises_kafka_errors
    def begin_transaction(self) -> None:
        """Begin a transaction: what is sent becomes visible with its commit."""
        self._producer.begin_transaction()

    @raises_kafka_errors
    def commit_transaction(self) -> None:
        """Make the records of the transaction visible, all at once.

        Raises:
            ProducerFencedError: A newer producer has the same ``transactional_id``.
            CommitFailedError: The consumer of the offsets lost a partition: abort.
        """
        self._producer.commit_transaction()

    @raises_kafka_errors
    def abort_transaction(self) -> None:
        """Drop the records of the transaction."""
        self._producer.abort_transaction()

    @raises_kafka_errors
    def send_offsets_to_transaction(self, offsets: Mapping[Any, Any], group_metadata: Any) -> None:
        """Commit offsets of a group with the transaction, which checks the member.

        Args:
            offsets: The next offset to read, as `OffsetAndMetadata`, by partition.
            group_metadata: What the consumer's ``group_metadata()`` returned; or the name of a
                group that has no members.
        """
        if not isinstance(group_metadata, str):
            group_metadata = record.ConsumerGroupMetadata(*group_metadata[:4])
        positions = {
            record.TopicPartition(*partition): record.OffsetAndMetadata(*position)
            for partition, position in offsets.items()
        }
        self._producer.send_offsets_to_transaction(positions, group_metadata)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        client, transactional = self.config["client_id"], self.config["transactional_id"]
        return f"<KafkaProducer client_id={client} transactional_id={transactional}>"


def _check_headers(headers: Any) -> int:
    """Return the size of headers in bytes.

    Raises:
        TypeError: They are not a list of (str, bytes).
    """
    if not isinstance(headers, list):
        raise TypeError("headers must be list-type")
    size = 0
    for item in headers:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
            raise TypeError("All headers items must be (str, bytes) tuples")
        if not isinstance(item[1], bytes):
            raise TypeError("All headers items must be (str, bytes) tuples")
        size += len(item[0].encode()) + len(item[1])
    return size
