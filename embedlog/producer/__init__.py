"""Sending records: gathered per topic, appended in batches, each with a future.

`future` is what callers hold, `queue` gathers and hands on, `splitting` chooses
partitions, `columns` makes batches of tables and lists, `lane` numbers, appends
and retries, `sender` is the thread that nobody has to wait for.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from embedlog.catalog import refuse_internal
from embedlog.config import ProducerConfig
from embedlog.errors import (
    ClosedError,
    EmbedlogError,
    IllegalStateError,
    InvalidRecordError,
    RecordTooLargeError,
    TimeoutError,  # noqa: A004 - it is one
)
from embedlog.partition.producer_state import LAST_SEQUENCE
from embedlog.producer import sender
from embedlog.producer.buffer_pool import BufferPool
from embedlog.producer.delivery_reports import DeliveryReports
from embedlog.producer.future import (
    BatchFuture,
    BatchRange,
    CompletedDelivery,
    Delivery,
    RecordFuture,
    settled,
)
from embedlog.producer.row_batches import Rows, size_of, source_of
from embedlog.producer.topic_queue import TopicQueue, no_key
from embedlog.producer.validation import (
    check_all_bytes,
    check_partition,
    check_time,
    checked_headers,
    serialized,
    to_bytes,
)
from embedlog.record import RecordMetadata

if TYPE_CHECKING:
    from embedlog.root.root import Root

RECORD_BYTES = 16
"""What a gathered record counts for besides its key and value."""


class Producer:
    """Sends records to topics of one log; any thread may call any method.

    Settings are kafka-python's (see `ProducerConfig`).  Batches are numbered
    (idempotent): one that is tried again is not written twice.  With a
    ``producer_name`` the numbers outlive the process, and an older producer
    of that name is refused from this one's first append to a partition on.

    Writes happen in the calling thread on `flush`, `send_batch`, a future's
    ``result`` and whenever a batch is full; else a thread of the producer's
    makes them once ``linger_ms``, and at least about a millisecond, passed.

    Use it in a ``with`` block, or `close` it: what it holds is flushed then.
    """

    def __init__(self, root: Root, **config: Any) -> None:
        self.root = root
        self.config = settings = ProducerConfig.parse(config)
        self._given = config
        # Columns come in larger batches, unless somebody asked for a size.
        self.batch_size = settings.batch_size if "batch_size" in config else None
        self.linger = max(settings.linger_ms / 1000, sender.TICK)
        self.patience = _seconds(settings.delivery_timeout_ms)
        self.durability = None if settings.acks == "all" else "os"
        self.synced = (self.durability or root.durability) == "fsync"
        self._clock = root.clock
        serializers = (settings.key_serializer, settings.value_serializer)
        self._plain = serializers == (None, None)
        # What callers would choose one by one is chosen at once when it is drained.
        self._choosy = settings.partitioner is not None
        self._silent = settings.acks == 0
        self._usual = self._plain and not self._choosy and not self._silent
        self._start()
        sender.watch(self)

    def _start(self) -> None:
        """Begin, or begin anew in a forked child."""
        self.room = BufferPool(self)
        self.lock = self.room.lock
        self._take, self._give = self.lock.acquire, self.lock.release
        self._queues: dict[str, TopicQueue] = {}
        self._identity: tuple[int, int] | None = None
        self._identity_lock = threading.Lock()
        self._closed = False
        self.abandoned = False
        self.fenced: EmbedlogError | None = None
        self.reports = DeliveryReports(self)
        self.sender = sender.Sender(self)

    def __repr__(self) -> str:
        name = self.config.producer_name or self.config.client_id
        return (
            f"<Producer {name!r} of {self.root.path}>"
            if name
            else f"<Producer of {self.root.path}>"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_again, (self.root, self._given)

    # Sending

    def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        headers: Sequence[tuple[str, bytes | None]] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> RecordFuture:
        """Gather a record to be written soon, and return its future.

        ``value`` and ``key`` are bytes or None, or what the serializers take.
        Without ``partition``, the key decides (G1), else the partition that is
        being filled (G3).

        Raises:
            ClosedError: The producer, or the log, is closed.
            SerializationError: A key, value or header is not bytes.
            UnknownTopicOrPartitionError: No such topic or partition.
            InvalidPartitionError: The partition is not an int.
            InvalidTopicError: embedlog's own topic, as Kafka refuses its own.
            BufferExhaustedError: ``buffer_memory`` stayed full for ``max_block_ms`` (G8).
        """
        queue = self._queues.get(topic) or self._open(topic)
        if (
            type(value) is not bytes
            or (key is not None and type(key) is not bytes)
            or headers is not None
            or partition is not None
            or timestamp_ms is not None
            or not self._usual
        ):
            return self._send_unusual(queue, value, key, headers, partition, timestamp_ms)
        if key is not None:
            size = RECORD_BYTES + len(value) + len(key)
        elif queue.compacts and queue.look().config.compacts:
            # Looked up again: the topic may be altered, and who is refused writes nothing.
            return self._refuse(no_key(topic, [0]))
        else:
            size = RECORD_BYTES + len(value)
        timestamp_ms = self._clock()
        # Half the price of `with`, in the one place where that is felt.
        self._take()
        try:
            gathering = queue.open
            left = gathering.left - size
            if left < 0:
                gathering, left = self.room.more(queue, size, value, key)
            gathering.left = left
            values = gathering.values
            row = len(values)
            gathering.keys.append(key)
            gathering.timestamps.append(timestamp_ms)
            values.append(value)
        except RecordTooLargeError as error:
            return self._refuse_locked(error)
        except BaseException:
            # Such as Ctrl-C between two lines: the next record would get this one's key.
            queue.open.trim()
            raise
        finally:
            self._give()
        future = RecordFuture()
        future._delivery, future._row = gathering, row
        return future

    def _send_unusual(
        self, queue: TopicQueue, value: Any, key: Any, headers: Any, partition: Any, timestamp: Any
    ) -> RecordFuture:
        """As `send`, for a record that has more than bytes for a key and a value."""
        value, key, headers, partition = self._convert(
            queue, value, key, headers, partition, timestamp
        )
        if key is None and queue.compacts and queue.look().config.compacts:
            return self._refuse(no_key(queue.topic, [0]))
        if timestamp is None:
            timestamp = self._clock()
        size = RECORD_BYTES + len(value or b"") + len(key or b"")
        for name, data in headers or ():
            # A character takes up to four bytes.
            size += RECORD_BYTES + 4 * len(name) + len(data or b"")
        with self.lock:
            try:
                gathering, left = self.room.more(queue, size, value, key, headers)
                gathering.left = left
                row = gathering.add_row(value, key, timestamp, headers, partition)
            except RecordTooLargeError as error:
                return self._refuse_locked(error)
            except BaseException:
                queue.open.trim()
                raise
        if self._silent:
            known = -1 if partition is None else partition
            metadata = RecordMetadata(queue.topic, known, -1, timestamp)
            return settled(RecordFuture(), metadata)
        future = RecordFuture()
        future._delivery, future._row = gathering, row
        return future

    def _open(self, topic: str) -> TopicQueue:
        """Begin to send to a topic; it is made if it may be."""
        self._check_open()
        refuse_internal(topic)
        queue = TopicQueue(self, topic)
        with self.lock:
            if self._closed:
                raise self._closed_error()
            return self._queues.setdefault(topic, queue)

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()
        if self.fenced is not None:
            raise self.fenced

    def _closed_error(self) -> ClosedError:
        return ClosedError("the producer was closed", path=self.root.path)

    def _convert(
        self, queue: TopicQueue, value: Any, key: Any, headers: Any, partition: Any, timestamp: Any
    ) -> tuple[Any, Any, Any, int | None]:
        """Bring a record that is not plain into the types of a batch."""
        self._check_open()
        config, topic = self.config, queue.topic
        value = to_bytes(serialized(config.value_serializer, topic, value), "value")
        key = to_bytes(serialized(config.key_serializer, topic, key), "key")
        if timestamp is not None:
            check_time(timestamp)
        partitions = queue.info.partitions
        if partition is not None:
            partitions = queue.look().partitions
            check_partition(topic, partition, partitions)
        elif self._choosy:
            partition = self._choose(queue, key, partitions)
        return value, key, checked_headers(headers), partition

    def _choose(self, queue: TopicQueue, key: bytes | None, partitions: int) -> int:
        chooser = self.config.partitioner
        if chooser == "round_robin":
            return queue.turns.choose(partitions)
        every = list(range(partitions))
        chosen = chooser(key, every, every)
        check_partition(queue.topic, chosen, partitions)
        return int(chosen)

    def _refuse(self, error: EmbedlogError) -> RecordFuture:
        """A record that fails alone and at once (G7)."""
        with self.lock:
            return self._refuse_locked(error)

    def _refuse_locked(self, error: EmbedlogError) -> RecordFuture:
        self.reports.counts["errors"] += 1
        return settled(RecordFuture(), error)

    # Sending many

    def send_batch(
        self,
        topic: str,
        values: Sequence[Any],
        keys: Sequence[Any] | None = None,
        headers: Sequence[Any] | None = None,
        timestamps: Sequence[int] | int | None = None,
        partition: int | None = None,
        sequence: int | None = None,
    ) -> BatchFuture:
        """Write many records now, in this thread, and return a future of `BatchRange`.

        Args:
            topic: Where to.
            values: One a record; bytes or None, or what the serializer takes.
            keys: As many, or None for no keys.
            headers: As many, each a list of pairs or None; or None for none.
            timestamps: As many, in ms, or one for all, or None for now.
            partition: Where all of them go; else as with `send`.
            sequence: The application's own number of the first record, such as
                its line in a file: records are numbered on from it.  A named
                producer that sends the same call again, also after a restart,
                gets the first offsets, flagged ``duplicate``, and nothing is
                written twice; `last_sequence` says where to go on.  Numbers
                have no gaps, and all records go to one partition.

        Raises:
            SerializationError: Something is not bytes; nothing was written.
            InvalidRecordError: ``indices`` have no key, in a topic that is
                compacted; nothing was written (A6).
                Also: lists of different lengths, or no number for ``sequence``.
            OutOfOrderSequenceError: ``result`` raises it for a gap in the
                numbers, or a call that repeats another only in part (G16).
        """
        queue = self._ready(topic, partition)
        rows = self._rows(queue, values, keys, headers, timestamps)
        count = len(rows.values)
        if not count:
            return settled(BatchFuture(), [])
        queue.check_keys(rows.keys, count)
        rows = rows.measured()
        size = size_of(rows)
        if size > queue.limit or self._choosy:
            check_all_bytes(rows)
        counted = self._counted(queue, partition, sequence, count)
        if self._choosy and partition is None and counted is None:
            return self._send_chosen(queue, rows)
        batches = queue.splitter.split_rows(rows, size, partition)
        return self._future(queue.deliver(batches, counted))

    def append_table(
        self,
        topic: str,
        table: Any,
        key: str | None = None,
        value: str | None = None,
        timestamp: str | None = None,
        partition: int | None = None,
        sequence: int | None = None,
    ) -> BatchFuture:
        """Write the rows of a table now, without making them Python objects.

        Takes what speaks Arrow: pyarrow's Table, RecordBatch and
        RecordBatchReader, DataFrames of pandas and Polars, and others.

        Args:
            topic: Where to.
            table: The rows.
            key: The column of keys: binary or text; ``"key"`` if there is one.
            value: The column of values, likewise; ``"value"`` if not given.
            timestamp: The column of times; ``"timestamp"`` if there is one, else now.
            partition: Where all rows go; else by key, or to the partition being filled.
            sequence: As in `send_batch`.

        Raises:
            SerializationError: There is no such column, or it is of another type.
            InvalidRecordError: As `send_batch` (A6).
        """
        queue = self._ready(topic, partition)
        source = source_of(table, key, value, timestamp, self._clock())
        count = source.table.num_rows
        if not count:
            return settled(BatchFuture(), [])
        found = source.table.column(1)
        if queue.info.config.compacts and found.null_count:
            queue.check_keys(found.to_pylist(), count)
        counted = self._counted(queue, partition, sequence, count)
        return self._future(queue.deliver(queue.splitter.split_source(source, partition), counted))

    def _ready(self, topic: str, partition: int | None) -> TopicQueue:
        queue = self._queues.get(topic) or self._open(topic)
        self._check_open()
        info = queue.look()
        if partition is not None:
            check_partition(topic, partition, info.partitions)
        return queue

    def _rows(
        self, queue: TopicQueue, values: Any, keys: Any, headers: Any, timestamps: Any
    ) -> Rows:
        config, topic = self.config, queue.topic
        if not self._plain:
            values = [serialized(config.value_serializer, topic, one) for one in values]
            if keys is not None:
                keys = [serialized(config.key_serializer, topic, one) for one in keys]
        if timestamps is None:
            timestamps = self._clock()
        if headers is not None:
            headers = [checked_headers(one) for one in headers]
        for name, column in (("keys", keys), ("headers", headers), ("timestamps", timestamps)):
            if column is not None and not isinstance(column, int) and len(column) != len(values):
                raise InvalidRecordError(
                    f"{len(values)} values, but {len(column)} {name}", topic=topic
                )
        return Rows(values, keys, timestamps, headers)

    def _counted(
        self, queue: TopicQueue, partition: int | None, first: int | None, count: int
    ) -> tuple[int, int, int] | None:
        """Check that an application's own numbers can be used."""
        if first is None:
            return None
        if not self.config.enable_idempotence:
            raise IllegalStateError("sequence needs enable_idempotence")
        if partition is None and queue.info.partitions > 1:
            raise IllegalStateError(
                "numbered records go to one partition", topic=queue.topic, todo="name it"
            )
        if type(first) is not int or not 0 <= first <= LAST_SEQUENCE:
            raise InvalidRecordError(
                f"sequence must be an int from 0 to {LAST_SEQUENCE}, got {first!r}",
                topic=queue.topic,
            )
        return partition or 0, first, count

    def _send_chosen(self, queue: TopicQueue, rows: Rows) -> BatchFuture:
        """Split by a partitioner of the user's, which knows single keys only."""
        partitions = queue.info.partitions
        keys = rows.keys or [None] * len(rows.values)
        groups: dict[int, list[int]] = {}
        for row, key in enumerate(keys):
            groups.setdefault(self._choose(queue, key, partitions), []).append(row)
        return self._future(queue.deliver(queue.splitter.split_groups(rows, groups), None))

    def _future(self, delivery: Delivery) -> BatchFuture:
        future = BatchFuture()
        future._delivery = CompletedDelivery([]) if self._silent else delivery
        return future

    def last_sequence(self, topic: str, partition: int = 0) -> int | None:
        """Return the number of the last record this producer has in a partition; None: none.

        With a ``producer_name`` that is the last of any producer of that name,
        and older ones are fenced there: go on with the record after it.
        """
        queue = self._ready(topic, partition)
        with queue.draining:
            queue.drain_locked(None)
            found = queue.lane(queue.info, partition).begin()
        self.reports.tell()
        return found.batches[-1].last_sequence if found is not None and found.batches else None

    # Finishing

    def flush(self, timeout: float | None = None) -> None:
        """Return once everything sent before this call is written, or failed (G10).

        Writes in this thread; what other threads send meanwhile is not waited for.

        Raises:
            TimeoutError: Not done after ``timeout`` seconds.
        """
        deadline = None if timeout is None else monotonic() + timeout
        for queue in list(self._queues.values()):
            queue.settle_all(deadline)
        self.reports.call_back(wait=True)

    def close(self, timeout: float | None = None) -> None:
        """Write what is gathered, for at most ``timeout`` seconds, and stop; idempotent (G10).

        What is not written then fails with `ClosedError`; with 0, everything.
        May be called from a callback.
        """
        with self.lock:
            if self._closed:
                return
            self._closed = True
        try:
            if timeout != 0:
                self.flush(timeout)
        except TimeoutError:
            pass
        finally:
            self._stop()

    def _stop(self) -> None:
        """Fail what is left, now or when the thread that is at it lets go."""
        self.abandoned = True
        for queue in list(self._queues.values()):
            queue.abandon()
        with self.lock:
            self._queues = {}
        self.reports.tell()
        self.sender.stop()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_closed", True):
            return
        if self.room.buffered:
            warnings.warn(
                f"{self!r} was not closed; {self._unsent()} records were unsent",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )
            if not self.root.closed:
                self.close(5.0)
        self.sender.stop(0)

    def _unsent(self) -> int:
        return sum(queue.count() for queue in self._queues.values())

    def metrics(self) -> dict[str, int]:
        """Return what was sent so far, and how many bytes are unwritten."""
        return {**self.reports.counts, "buffered": self.room.buffered}

    # What the queues and lanes call

    def identity(self) -> tuple[int, int]:
        """Return the producer id and epoch, taken from the log when first needed."""
        with self._identity_lock:
            if self._identity is None:
                self._identity = self.root.producer_identity(self.config.producer_name)
            return self._identity

    def forget_identity(self) -> None:
        """Take a new one when next needed."""
        self._identity = None

    def queues(self) -> list[TopicQueue]:
        """Return the topics that were sent to."""
        return list(self._queues.values())

    def after_fork(self) -> None:
        """In the child: what was gathered is the parent's to write; begin anew."""
        closed = self._closed
        for queue in self._queues.values():
            queue.disown()
        self._start()
        self._closed = closed


def _open_again(root: Root, config: dict[str, Any]) -> Producer:
    return Producer(root, **config)


def _seconds(ms: int | None) -> float:
    return float("inf") if ms is None else ms / 1000


__all__ = ["BatchFuture", "BatchRange", "Producer", "RecordFuture"]
