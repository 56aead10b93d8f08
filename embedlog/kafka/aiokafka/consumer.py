"""`AIOKafkaConsumer`: aiokafka's consumer on a log."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import repeat
from typing import Any, ClassVar, Self

from embedlog import errors as log_errors
from embedlog.api import Log
from embedlog.batch import Batch
from embedlog.config import ConsumerConfig
from embedlog.consumer.consumer import Consumer
from embedlog.consumer.deserialize import RecordDecoder, RecordRun
from embedlog.consumer.rebalance_notifier import ConsumerRebalanceListener
from embedlog.consumer.waiter import Waiter
from embedlog.kafka.aiokafka.assignors import ProgramAssignor, assignors_of
from embedlog.kafka.aiokafka.client import LogClient
from embedlog.kafka.aiokafka.errors import kafka_errors, raises_kafka_errors, translated
from embedlog.kafka.aiokafka.internals import ConsumerInternals
from embedlog.kafka.aiokafka.library import aiokafka, errors, structs, util
from embedlog.kafka.client_type import or_uses_brokers
from embedlog.kafka.sized_rows import SizedRowLists
from embedlog.lazy import asyncio
from embedlog.record import TopicPartition as Partition
from embedlog.tasks import in_thread

_RETRY_SECONDS = 0.1
_LOGGER = logging.getLogger("embedlog.kafka")
TopicPartition = structs.TopicPartition
_ISOLATION = ("read_uncommitted", "read_committed")

consumers: weakref.WeakSet[AIOKafkaConsumer] = weakref.WeakSet()
"""Those that were started, whose members a transaction may commit for."""


class _RecordRun(RecordRun):
    """The records of one batch, as aiokafka's."""

    __slots__ = ()

    @staticmethod
    def make_records(
        columns: Any, values: Iterator[Any], partition: Partition, batch: Batch
    ) -> Iterator[Any]:
        """Return an iterator that makes a record of each row when it is taken."""
        return map(
            structs.ConsumerRecord,
            repeat(partition.topic),
            repeat(partition.partition),
            columns.offsets,
            columns.times,
            repeat(int(batch.is_log_append_time)),
            columns.keys,
            values,
            repeat(None),
            columns.key_sizes,
            columns.value_sizes,
            repeat(()) if columns.headers is None else map(tuple, columns.headers),
        )


class _RecordDecoder(RecordDecoder):
    rows_type = SizedRowLists
    run_type = _RecordRun


class _LogConsumer(Consumer):
    _decoder_type = _RecordDecoder

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        # Of its own: one that reads does not end what it waits for, nor the other way round.
        self._sleeper = Waiter(self._root, self.config, self._guard)

    async def join(self) -> None:
        """Join the group, and wait for what others let go, or look the topics up."""

        def step() -> bool:
            self._update_assignment()
            return self._group.is_complete or not self._group.subscribed

        while not await self._wait_async(step, self.config.session_timeout_ms):
            _LOGGER.warning("%s waits for the partitions of other members", self)

    async def follow(self) -> None:
        """Carry out what happens in the group, also while nobody reads, as aiokafka does.

        It is no poll: a program that does not read loses its partitions in time.
        """
        while not self._closed:
            try:
                await self._group.update_async()
                due_in = self._group.committer.seconds_to_auto_commit
                await self._sleeper.repeat_async(self._follow_once, None, due_in)
            except log_errors.EmbedlogError as error:
                # Whoever reads gets it; the group is asked again later, as aiokafka does.
                _LOGGER.debug("Following the group failed: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)

    def wake_follower(self) -> None:
        """Have `follow` look now: the program has changed what it subscribes to."""
        self._sleeper.wake_tasks()

    def _follow_once(self) -> bool:
        """Return whether a listener has to be awaited."""
        with self._guard:
            self._update_assignment()
        return self._group.must_await_listener()


class _Listener(ConsumerRebalanceListener):
    """Calls a listener of aiokafka, which may be asynchronous, with its type of partitions."""

    def __init__(self, listener: Any, announce: Callable[[set[Any]], None]) -> None:
        self._listener, self._announce = listener, announce

    async def on_partitions_revoked(self, revoked: set[Any]) -> None:  # type: ignore[override]
        """Call the listener."""
        await self._call(self._listener.on_partitions_revoked, revoked)

    async def on_partitions_assigned(self, assigned: set[Any]) -> None:  # type: ignore[override]
        """Call the listener, after the assignors."""
        self._announce(assigned)
        await self._call(self._listener.on_partitions_assigned, assigned)

    async def on_partitions_lost(self, lost: set[Any]) -> None:  # type: ignore[override]
        """Call the listener, which has no such method in aiokafka."""
        await self._call(self._listener.on_partitions_revoked, lost)

    @staticmethod
    async def _call(method: Callable[[set[Any]], Any], partitions: set[Any]) -> None:
        try:
            result = method(_set(partitions))
            if result is not None and hasattr(result, "__await__"):
                await result
        except Exception:  # as aiokafka does
            _LOGGER.exception("The rebalance listener raised an exception")


class AIOKafkaConsumer(LogClient):
    """Reads the log that ``bootstrap_servers`` names; see aiokafka's class."""

    _original: ClassVar[Any] = aiokafka.AIOKafkaConsumer

    @or_uses_brokers
    def __init__(self, *topics: str, **configs: Any) -> None:
        settings = self._settings = self._set_up(topics, configs)
        limit = settings["max_poll_records"]
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise ValueError("`max_poll_records` should be positive Integer")
        if settings["isolation_level"] not in _ISOLATION:
            raise ValueError("Incorrect isolation level {}".format(settings["isolation_level"]))
        self._group_id, self._max_poll_records = settings["group_id"], limit
        self._group_instance_id = settings["group_instance_id"]
        self._given = {name: value for name, value in settings.items() if name in configs}
        self._consumer: _LogConsumer | None = None
        self._begin: Callable[[_LogConsumer], object] | None = None
        """What `subscribe` or `assign` asked for before `start`."""
        self._coordinator = self._fetcher = self._subscription = ConsumerInternals(self)
        self._follower: asyncio.Task[None] | None = None
        if topics:
            self.subscribe(topics)

    def _own_settings(self, log: Log) -> dict[str, Any]:
        known, settings = ConsumerConfig.__settings__, self._settings
        own = {name: settings[name] for name in self._given if name in known}
        for field in ("key", "value"):
            own[f"{field}_deserializer"] = settings[f"{field}_deserializer"] or "bytes"
        own["client_id"] = settings["client_id"]
        own.pop("consumer_timeout_ms", None)  # of aiokafka's own loop
        if own.get("max_poll_records", 1) is None:
            del own["max_poll_records"]
        if self._group_id is None:
            own.pop("enable_auto_commit", None)
        strategies = settings["partition_assignment_strategy"]
        self._assignors = assignors_of(strategies, log)
        own["partition_assignment_strategy"] = self._assignors
        return own

    # Starting and stopping

    @raises_kafka_errors
    async def start(self) -> None:
        """Open the log, and join the group.

        Raises:
            UnknownTopicOrPartitionError: A topic does not exist, and is not created by itself.
        """
        assert self._loop is util.get_running_loop(), (
            "Please create objects with the same loop as running with"
        )
        assert self._consumer is None, "Did you call `start` twice?"
        handle = await self._open()
        try:
            for topic in self._topics() if self._begin is not None else ():
                await in_thread(handle.log.root.ensure_topic, topic)
            consumer = _LogConsumer(handle.log.root, **self._own_settings(handle.log))
            self._consumer = handle.log._adopt(consumer, "consumer")
            if self._begin is not None:
                self._begin(consumer)
                await consumer.join()
            if self._group_id is not None:
                self._follower = asyncio.ensure_future(consumer.follow())
        except BaseException:
            if self._consumer is not None:
                self._consumer.close()
                self._consumer = None
            await self._give_back()
            raise
        consumers.add(self)

    @raises_kafka_errors
    async def stop(self) -> None:
        """Commit what was read, if that is done automatically, leave the group, and close."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._follower is not None:
                self._follower.cancel()
            if self._consumer is not None:
                await in_thread(self._consumer.close)
        finally:
            await self._give_back()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _started(self) -> _LogConsumer:
        if self._closed:
            raise errors.ConsumerStoppedError
        assert self._consumer is not None, "The consumer was not started"
        return self._consumer

    # Assignment

    def subscribe(self, topics: Any = (), pattern: str | None = None, listener: Any = None) -> None:
        """Subscribe to topics, or to those whose names match a pattern.

        Raises:
            IllegalStateError: Partitions were assigned.
            TypeError, ValueError: The arguments are invalid.
        """
        if not (topics or pattern):
            raise TypeError("You should provide either `topics` or `pattern`")
        if topics and pattern:
            raise TypeError("You can't provide both `topics` and `pattern`")
        if listener is not None and not isinstance(listener, aiokafka.ConsumerRebalanceListener):
            raise TypeError("listener should be an instance of ConsumerRebalanceListener")
        if pattern is not None:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a valid pattern: {error}") from error
            pattern = f"(?:{pattern}).*"  # which need not match a name to its end
        elif not isinstance(topics, tuple | set | list):
            raise TypeError("Topics should be list of strings")
        adapter = None if listener is None else _Listener(listener, self._announce)
        self._do(lambda consumer: consumer.subscribe(topics, pattern, adapter))
        self._subscribed: frozenset[str] = frozenset(topics)

    def _announce(self, assigned: set[Any]) -> None:
        member_id = self._coordinator.member_id
        for assignor in self._assignors:
            if isinstance(assignor, ProgramAssignor):
                assignor.announce(member_id, assigned)

    def _topics(self) -> frozenset[str]:
        return getattr(self, "_subscribed", frozenset())

    def assign(self, partitions: Iterable[Any]) -> None:
        """Read exactly these partitions."""
        chosen = list(partitions)

        def assign(consumer: _LogConsumer) -> None:
            for topic, _ in chosen:
                consumer._root.ensure_topic(topic)
            consumer.assign(chosen)

        self._do(assign)

    def _do(self, call: Callable[[_LogConsumer], object]) -> None:
        if self._consumer is None:
            if self._begin is not None and not self._topics():
                raise errors.IllegalStateError("Partitions were assigned already")
            self._begin = call
        else:
            with kafka_errors():
                call(self._consumer)
            self._consumer.wake_follower()

    def assignment(self) -> Any:
        """Return the assigned partitions."""
        return frozenset(_set(self._consumer.assignment() if self._consumer else ()))

    def subscription(self) -> Any:
        """Return the topics that it subscribed to."""
        if self._consumer is None:
            return self._topics()
        return frozenset(self._consumer.subscription())

    def unsubscribe(self) -> None:
        """Leave the group, and remove all partitions from the assignment."""
        self._subscribed, self._begin = frozenset(), None
        if self._consumer is not None:
            with kafka_errors():
                self._consumer.unsubscribe()

    # Reading

    async def getone(self, *partitions: Any) -> Any:
        """Return the next record, and wait for it.

        Raises:
            ConsumerStoppedError: The consumer was stopped.
        """
        consumer = self._started()
        try:
            return await consumer.getone(*partitions)
        except log_errors.ClosedError as error:
            raise errors.ConsumerStoppedError from error
        except log_errors.EmbedlogError as error:
            raise translated(error) from error

    async def getmany(
        self, *partitions: Any, timeout_ms: float = 0, max_records: int | None = None
    ) -> dict[Any, list[Any]]:
        """Return the next records by partition.

        Args:
            partitions: Only of these; all by default.
            timeout_ms: How long to wait for a record.
            max_records: The maximum; by default ``max_poll_records``.
        """
        consumer = self._started()
        if max_records is not None and (not isinstance(max_records, int) or max_records < 1):
            raise ValueError("`max_records` must be a positive Integer")
        try:
            taken = await consumer.getmany(
                *partitions, timeout_ms=timeout_ms, max_records=max_records
            )
        except log_errors.ClosedError:
            return {}  # It was stopped meanwhile.
        except log_errors.EmbedlogError as error:
            raise translated(error) from error
        return {TopicPartition(*partition): records for partition, records in taken.items()}

    def __aiter__(self) -> Self:
        if self._closed:
            raise errors.ConsumerStoppedError
        return self

    async def __anext__(self) -> Any:
        try:
            return await self.getone()
        except errors.ConsumerStoppedError:
            raise StopAsyncIteration from None

    # Positions

    @raises_kafka_errors
    async def position(self, partition: Any) -> int:
        """Return the offset of the next record to be returned."""
        return self._started().position(partition)

    def highwater(self, partition: Any) -> int:
        """Return the offset that the next record in the partition will have."""
        assert partition in self.assignment(), "Partition is not assigned"
        return self._started()._root.partition(*partition).end_offset()

    last_stable_offset = highwater

    def last_poll_timestamp(self, partition: Any) -> int:
        """Return the time of the last look at the partition in milliseconds: now."""
        assert partition in self.assignment(), "Partition is not assigned"
        return self._started()._root.clock()

    def seek(self, partition: Any, offset: int) -> None:
        """Set the position."""
        if not isinstance(offset, int) or offset < 0:
            raise ValueError("Offset must be a positive integer")
        with kafka_errors():
            self._started().seek(partition, offset)

    async def seek_to_beginning(self, *partitions: Any) -> bool:
        """Continue at the first offsets of these partitions, or of all."""
        return self._seek_to(Consumer.seek_to_beginning, partitions)

    async def seek_to_end(self, *partitions: Any) -> bool:
        """Continue at the ends of these partitions, or of all."""
        return self._seek_to(Consumer.seek_to_end, partitions)

    def _seek_to(self, seek: Callable[..., None], partitions: Sequence[Any]) -> bool:
        consumer, chosen = self._started(), self._checked(partitions)
        with kafka_errors():
            seek(consumer, *chosen)
            for partition in chosen:
                consumer.position(partition)
        return True

    async def seek_to_committed(self, *partitions: Any) -> dict[Any, int | None]:
        """Continue at the commits of these partitions, or of all; return the offsets."""
        committed = {each: await self.committed(each) for each in self._checked(partitions)}
        for partition, offset in committed.items():
            if offset:
                self.seek(partition, offset)
        return committed

    def _checked(self, partitions: Sequence[Any]) -> Sequence[Any]:
        if not all(isinstance(each, TopicPartition) for each in partitions):
            raise TypeError("partitions must be TopicPartition instances")
        assigned = self.assignment()
        if not partitions:
            assert assigned, "No partitions are currently assigned"
            return list(assigned)
        if others := set(partitions) - assigned:
            raise errors.IllegalStateError(f"Partitions {others} are not assigned")
        return partitions

    def pause(self, *partitions: Any) -> None:
        """Return no records of these partitions until `resume`."""
        self._pause(Consumer.pause, partitions)

    def resume(self, *partitions: Any) -> None:
        """Return records of these partitions again."""
        self._pause(Consumer.resume, partitions)

    def _pause(self, call: Callable[..., None], partitions: Sequence[Any]) -> None:
        if not all(isinstance(each, TopicPartition) for each in partitions):
            raise TypeError("partitions must be TopicPartition namedtuples")
        with kafka_errors():
            call(self._started(), *partitions)

    def paused(self) -> set[Any]:
        """Return the partitions that are paused."""
        return _set(self._started().paused())

    # Commits

    @raises_kafka_errors
    async def commit(self, offsets: Mapping[Any, Any] | None = None) -> None:
        """Commit offsets, by default the positions."""
        self._check_group()
        consumer = self._started()
        if not self.assignment():
            subscribed = consumer._subscription is not None
            text = "No partitions assigned" if subscribed else "Not subscribed to any topics"
            raise errors.IllegalStateError(text)
        if offsets is not None:
            offsets = util.commit_structure_validate(offsets)
            for partition in offsets:
                if partition not in self.assignment():
                    raise errors.IllegalStateError(f"Partition {partition} is not assigned")
        await consumer.commit(offsets)

    @raises_kafka_errors
    async def committed(self, partition: Any) -> int | None:
        """Return the offset that the group committed last; None without a commit."""
        self._check_group()
        with suppress(log_errors.UnknownTopicOrPartitionError):
            return self._started().committed(partition)
        return None

    def _check_group(self) -> None:
        if self._group_id is None:
            raise errors.IllegalOperation("Requires group_id")

    # Topics and offsets of the log

    async def topics(self) -> set[str]:
        """Return the names of all topics."""
        return self._started().topics()

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        """Return the partition numbers of a topic; None if it does not exist."""
        return self._started().partitions_for_topic(topic)

    async def beginning_offsets(self, partitions: Iterable[Any]) -> dict[Any, int]:
        """Return the first offset of each partition."""
        with _unknown_is_timeout():
            return _by_partition(self._started().beginning_offsets(partitions))

    async def end_offsets(self, partitions: Iterable[Any]) -> dict[Any, int]:
        """Return the offset of the next record of each partition."""
        with _unknown_is_timeout():
            return _by_partition(self._started().end_offsets(partitions))

    async def offsets_for_times(self, timestamps: Mapping[Any, float]) -> dict[Any, Any]:
        """Return the first record at or after a time in each partition, or None."""
        times = {partition: int(time) for partition, time in timestamps.items()}
        with _unknown_is_timeout():
            found = self._started().offsets_for_times(times)
        return {
            TopicPartition(*partition): at and structs.OffsetAndTimestamp(at[0], at[1])
            for partition, at in found.items()
        }

    def __del__(self) -> None:
        if self._closed is False and self._consumer is not None:
            with suppress(Exception):
                self._original.__del__(self)


def _set(partitions: Iterable[Any]) -> set[Any]:
    return {TopicPartition(*partition) for partition in partitions}


def _by_partition(offsets: Mapping[Any, int]) -> dict[Any, int]:
    return {TopicPartition(*partition): offset for partition, offset in offsets.items()}


class _unknown_is_timeout:  # noqa: N801 - a context manager
    """Raise what aiokafka raises for partitions that stay unknown."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, log_errors.UnknownTopicOrPartitionError):
            raise errors.KafkaTimeoutError(str(error)) from error
        if isinstance(error, log_errors.EmbedlogError):
            raise translated(error) from error
