"""`KafkaConsumer`: kafka-python's consumer on a log."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from threading import Event
from typing import Any, ClassVar

from embedlog import errors as log_errors
from embedlog.assignor.select import BUILT_IN
from embedlog.config import ConsumerConfig
from embedlog.consumer.consumer import Consumer
from embedlog.consumer.rebalance_notifier import ConsumerRebalanceListener
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
from embedlog.kafka.producer import FutureRecordMetadata
from embedlog.kafka.record_decoder import ConsumerRecordDecoder
from embedlog.kafka.structs import (
    ConsumerGroupMetadata,
    MemberState,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    TopicPartition,
)
from embedlog.producer.future import RecordFuture

_IDLE_MS = 1000
"""How long a poll without a subscription waits at most."""
_RESETS = {"smallest": "earliest", "largest": "latest"}
_ISOLATION = {"0": "read_uncommitted", "1": "read_committed"}


class _LogConsumer(Consumer):
    """A consumer whose records and errors, also while iterating, are kafka-python's."""

    _decoder_type = ConsumerRecordDecoder

    def _next(self, take: Any, ends: Any) -> Any:
        try:
            return super()._next(take, ends)
        except log_errors.EmbedlogError as error:
            raise translated(error) from error


class CommitFuture(FutureRecordMetadata):
    """The outcome of one `KafkaConsumer.commit_async`; the value of a success is None."""

    __slots__ = ()

    def _metadata(self, written: Any) -> None:
        return None


class KafkaConsumer(LogClient):
    """Reads the log that ``bootstrap_servers`` names; see kafka-python's class.

    Settings are those of kafka-python 3.
    """

    _original = kafka.KafkaConsumer

    DEFAULT_CONFIG: ClassVar[Mapping[str, Any]] = kafka.KafkaConsumer.DEFAULT_CONFIG

    @or_uses_brokers
    def __init__(self, *topics: str, **configs: Any) -> None:
        if unknown := configs.keys() - self.DEFAULT_CONFIG.keys():
            raise errors.KafkaConfigurationError(f"Unrecognized configs: {unknown}")
        check_topics(topics)
        self._open(configs)
        self._subscribed = bool(topics)
        self._iterator: Iterator[Any] | None = None
        self.config["auto_offset_reset"] = _RESETS.get(
            self.config["auto_offset_reset"], self.config["auto_offset_reset"]
        )
        with self._handle.closed_after_error(), kafka_errors():
            consumer = _LogConsumer(self._log.root, *topics, **self._settings(configs))
            self._consumer: _LogConsumer = self._log._adopt(consumer, "consumer")

    def _settings(self, configs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings for the log's own consumer."""
        known = ConsumerConfig.__settings__
        settings = {
            name: self.config[name]
            for name in configs
            if name in known and name not in NETWORK_SETTINGS
        }
        for field in ("key", "value"):
            name = f"{field}_deserializer"
            # Raw bytes by default, whatever serializer the topic keeps.
            settings[name] = adapted(self.config[name], "deserialize", field) or "bytes"
        for name in ("client_id", "partition_assignment_strategy"):
            settings[name] = self.config[name]
        if self.config["group_id"] is None:
            settings.pop("enable_auto_commit", None)
        strategy = settings["partition_assignment_strategy"]
        strategies = [strategy] if isinstance(strategy, str | type) else list(strategy)
        settings["partition_assignment_strategy"] = tuple(map(_assignor_name, strategies))
        level = settings.get("isolation_level", "0")
        level = str(getattr(level, "name", level)).lower()
        settings["isolation_level"] = _ISOLATION.get(level, level)
        return settings

    # Assignment

    @raises_kafka_errors
    def subscribe(
        self, topics: Sequence[str] = (), pattern: str | None = None, listener: Any = None
    ) -> None:
        """Subscribe to topics, or to those whose names match a pattern.

        Raises:
            IllegalStateError: Partitions were assigned, or topics and a pattern are set.
            ValueError: Neither topics nor a pattern are set, or no topic can have such a name.
            TypeError: ``topics`` is not a list.
        """
        if not topics and not pattern:
            raise ValueError("Must provide topics or pattern")
        if isinstance(topics, str) or not isinstance(topics, Collection):
            raise TypeError("Topics must be a list (or non-str sequence)")
        check_topics(topics)
        if pattern is not None:
            # Kafka's pattern need not match a name to its end.
            pattern = f"(?:{pattern}).*"
        adapter = None if listener is None else _Listener(listener)
        self._consumer.subscribe(topics, pattern, adapter)
        self._subscribed, self._iterator = True, None

    @raises_kafka_errors
    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions; none means `unsubscribe`."""
        chosen = list(partitions)
        if chosen:
            self._consumer.assign(chosen)
            self._iterator = None
        else:
            self.unsubscribe()

    @raises_kafka_errors
    def unsubscribe(self) -> None:
        """Leave the group, and remove all partitions from the assignment."""
        self._consumer.unsubscribe()
        self._subscribed, self._iterator = False, None

    @raises_kafka_errors
    def assignment(self) -> set[TopicPartition]:
        """Return the assigned partitions; may be called from any thread."""
        return set(map(_as_kafka, self._consumer.assignment()))

    def subscription(self) -> set[str] | None:
        """Return the topics that it subscribed to; None without a subscription."""
        return self._consumer.subscription() if self._subscribed else None

    # Reading

    def poll(
        self, timeout_ms: float = 0, max_records: int | None = None, update_offsets: bool = True
    ) -> dict[TopicPartition, list[Any]]:
        """Return the next records by partition.

        Args:
            timeout_ms: How long to wait for a record.
            max_records: The maximum over all partitions; by default ``max_poll_records``.
            update_offsets: If false, the positions stay, and the next poll returns the same.
        """
        if timeout_ms < 0:
            raise ValueError("Timeout must not be negative")
        if max_records is not None and not isinstance(max_records, int):
            raise TypeError("max_records must be an integer")
        if max_records is not None and max_records <= 0:
            raise ValueError("max_records must be positive")
        self._check_open()
        timeout = None if math.isinf(timeout_ms) else timeout_ms
        try:
            records = self._consumer.poll(timeout, max_records)
        except log_errors.EmbedlogError as error:
            if self._closed:
                return {}
            idle = not self._subscribed and type(error) is log_errors.IllegalStateError
            if idle and not self._consumer.assignment():
                # kafka-python waits too, where embedlog's consumer raises.
                Event().wait(min(timeout_ms, _IDLE_MS) / 1000)
                return {}
            raise translated(error) from error
        if not update_offsets:
            for partition, taken in records.items():
                self._consumer.seek(partition, taken[0].offset)
        return {TopicPartition(*partition): taken for partition, taken in records.items()}

    def _check_open(self) -> None:
        if self._closed:
            raise errors.IllegalStateError("KafkaConsumer is closed")

    def __iter__(self) -> Iterator[Any]:
        """Iterate over records until none came for ``consumer_timeout_ms``."""
        with kafka_errors():
            return iter(()) if self._closed else self._consumer.iter_records()

    def __next__(self) -> Any:
        if self._closed:
            raise StopIteration
        if self._iterator is None:
            self._iterator = iter(self)
        try:
            return next(self._iterator)
        except BaseException:
            self._iterator = None
            raise

    # Positions

    @raises_kafka_errors
    def position(self, partition: TopicPartition, timeout_ms: float | None = None) -> int:
        """Return the offset of the next record to be returned."""
        return self._consumer.position(_checked(partition))

    @raises_kafka_errors
    def highwater(self, partition: TopicPartition) -> int:
        """Return the offset that the next record in the partition will have."""
        return self._consumer.highwater(_checked(partition))

    @raises_kafka_errors
    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Set the position.

        Raises:
            ValueError: The offset is negative, or the partition is not assigned.
        """
        if not isinstance(offset, int) or offset < 0:
            raise ValueError("Offset must be int >= 0")
        self._check_assigned([_checked(partition)])
        self._consumer.seek(partition, offset)
        self._iterator = None

    @raises_kafka_errors
    def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        """Continue at the first offsets of these partitions, or of all."""
        self._check_assigned(list(map(_checked, partitions)))
        self._consumer.seek_to_beginning(*partitions)
        self._iterator = None

    @raises_kafka_errors
    def seek_to_end(self, *partitions: TopicPartition) -> None:
        """Continue at the ends of these partitions, or of all."""
        self._check_assigned(list(map(_checked, partitions)))
        self._consumer.seek_to_end(*partitions)
        self._iterator = None

    def _check_assigned(self, partitions: list[Any]) -> None:
        assigned = self._consumer.assignment()
        if not partitions and not assigned:
            raise ValueError("No partitions are currently assigned")
        for partition in partitions:
            if partition not in assigned:
                raise ValueError(f"Unassigned partition: {partition}")

    @raises_kafka_errors
    def pause(self, *partitions: TopicPartition) -> None:
        """Return no records of these partitions until `resume`."""
        self._consumer.pause(*map(_checked, partitions))

    @raises_kafka_errors
    def resume(self, *partitions: TopicPartition) -> None:
        """Return records of these partitions again."""
        self._consumer.resume(*map(_checked, partitions))

    @raises_kafka_errors
    def paused(self) -> set[TopicPartition]:
        """Return the partitions that are paused."""
        return set(map(_as_kafka, self._consumer.paused()))

    # Commits

    def _check_group(self) -> None:
        if self.config["group_id"] is None:
            raise errors.IllegalStateError("Requires group_id")

    @raises_kafka_errors
    def commit(
        self, offsets: Mapping[Any, Any] | None = None, timeout_ms: float | None = None
    ) -> None:
        """Commit offsets, by default the positions."""
        self._check_group()
        self._consumer.commit(offsets)

    @raises_kafka_errors
    def commit_async(
        self,
        offsets: Mapping[Any, Any] | None = None,
        callback: Callable[[Any, Any], object] | None = None,
    ) -> Any:
        """Commit offsets, and report the outcome to a future and ``callback(offsets, error)``."""
        self._check_group()
        report = callback or self.config["default_offset_commit_callback"]
        done = self._consumer.commit_async(
            offsets, lambda done, error: report(done, error and translated(error))
        )
        return CommitFuture(RecordFuture._completed(done.exception() or True), (0, 0, 0))

    @raises_kafka_errors
    def committed(
        self, partition: TopicPartition, metadata: bool = False, timeout_ms: float | None = None
    ) -> Any:
        """Return the offset that the group committed last, None without a commit.

        Args:
            partition: Any partition.
            metadata: Whether to return an `OffsetAndMetadata`.
            timeout_ms: Not needed by a log.
        """
        self._check_group()
        committed: Any = self._consumer.committed(_checked(partition), metadata=True)
        if committed is None:
            return None
        return _committed(committed) if metadata else committed.offset

    def group_metadata(self) -> Any:
        """Return the identity of the consumer in its group."""
        if self.config["group_id"] is None:
            return ConsumerGroupMetadata(None)
        identity = self._consumer.group_metadata()
        # No pause of the group stops its readers: a member is stable once it joined.
        state = MemberState.STABLE if identity.member_id else MemberState.UNJOINED
        return ConsumerGroupMetadata(*identity[:4], state)

    # Topics and offsets of the log

    @raises_kafka_errors
    def topics(self) -> set[str]:
        """Return the names of all topics."""
        return self._consumer.topics()

    @raises_kafka_errors
    def partitions_for_topic(self, topic: str) -> set[int]:
        """Return the partition numbers of a topic; none if it does not exist."""
        return self._consumer.partitions_for_topic(topic) or set()

    def beginning_offsets(
        self, partitions: Iterable[TopicPartition], timeout_ms: float | None = None
    ) -> dict[TopicPartition, int]:
        """Return the first offset of each partition."""
        with _unknown_is_timeout():
            return _by_partition(self._consumer.beginning_offsets(partitions))

    def end_offsets(
        self, partitions: Iterable[TopicPartition], timeout_ms: float | None = None
    ) -> dict[TopicPartition, int]:
        """Return the offset of the next record of each partition."""
        with _unknown_is_timeout():
            return _by_partition(self._consumer.end_offsets(partitions))

    def offsets_for_times(
        self, timestamps: Mapping[TopicPartition, float], timeout_ms: float | None = None
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return the first record at or after a time in each partition, or None."""
        times = {partition: int(time) for partition, time in timestamps.items()}
        with _unknown_is_timeout():
            offsets = self._consumer.offsets_for_times(times)
        return {
            _as_kafka(partition): None if offset is None else OffsetAndTimestamp(*offset)
            for partition, offset in offsets.items()
        }

    def bootstrap(self, timeout_ms: float | None = None, refresh: bool = False) -> None:
        """Return immediately: a log is there when it is open."""
        self._check_open()

    def metrics(self, raw: bool = False) -> dict[str, Any] | None:
        """Return the consumer's metrics by group and name."""
        return self._consumer.metrics() if self.config["metrics_enabled"] else None

    # Closing

    def close(self, autocommit: bool = True, timeout_ms: float | None = None) -> None:
        """Commit if auto-commit is enabled, leave the group, and close the consumer."""
        if self._closed:
            return
        self._closed = True
        try:
            with kafka_errors():
                self._consumer.close(autocommit, timeout_ms)
        finally:
            self._handle.close()
            self._close_serializers("key_deserializer", "value_deserializer")

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        # After an error the last record may not be processed: do not commit it.
        self.close(autocommit=exc_type is None)


class _Listener(ConsumerRebalanceListener):
    """Calls a listener of kafka-python, with its type of partitions; it may be asynchronous."""

    def __init__(self, listener: Any) -> None:
        for name in ("on_partitions_revoked", "on_partitions_assigned"):
            if not callable(getattr(listener, name, None)):
                raise TypeError(
                    "listener must be a ConsumerRebalanceListener or AsyncConsumerRebalanceListener"
                )
        self._listener = listener

    def on_partitions_revoked(self, revoked: set[Any]) -> None:
        """Call the listener."""
        self._call(self._listener.on_partitions_revoked, revoked)

    def on_partitions_assigned(self, assigned: set[Any]) -> None:
        """Call the listener."""
        self._call(self._listener.on_partitions_assigned, assigned)

    def on_partitions_lost(self, lost: set[Any]) -> None:
        """Call the listener; without this method, call its `on_partitions_revoked`."""
        method = getattr(self._listener, "on_partitions_lost", None)
        self._call(method or self._listener.on_partitions_revoked, lost)

    def _call(self, method: Callable[[set[Any]], Any], partitions: set[Any]) -> None:
        result = method(set(map(_as_kafka, partitions)))
        if inspect.iscoroutine(result):
            asyncio.run(result)


def _as_kafka(partition: Any) -> Any:
    return TopicPartition(*partition)


def _committed(position: Any) -> Any:
    epoch = -1 if position.leader_epoch is None else position.leader_epoch
    return OffsetAndMetadata(position.offset, position.metadata, epoch)


def _by_partition(offsets: Mapping[Any, int]) -> dict[Any, int]:
    return {_as_kafka(partition): offset for partition, offset in offsets.items()}


def _checked(partition: Any) -> Any:
    if not isinstance(partition, tuple) or len(partition) != 2:
        raise TypeError("partition must be a TopicPartition namedtuple")
    return partition


class _unknown_is_timeout:  # noqa: N801 - a context manager
    """Raise what kafka-python raises for partitions that stay unknown."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, log_errors.UnknownTopicOrPartitionError):
            raise errors.KafkaTimeoutError(str(error)) from error
        if isinstance(error, log_errors.EmbedlogError):
            raise translated(error) from error


def _assignor_name(assignor: Any) -> str:
    name = str(getattr(assignor, "name", assignor))
    if name not in BUILT_IN:
        raise errors.KafkaConfigurationError(
            f"A log assigns partitions by {', '.join(BUILT_IN)}, not by {assignor!r}"
        )
    return name
