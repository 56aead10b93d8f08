"""The producer: sends records to topics, in batches, with a future for each record."""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Generic, Self, Unpack

from embedlog.catalog import refuse_internal
from embedlog.config import describe_network_settings
from embedlog.display import html_table, plural, public_names
from embedlog.errors import (
    ClosedError,
    EmbedlogError,
    IllegalStateError,
    InvalidProducerEpochError,
    InvalidRecordError,
    RecordTooLargeError,
    SerializationError,
    TimeoutError,  # noqa: A004 - it is one
    hint_at_missing,
)
from embedlog.metrics import PRODUCER_TOPIC, Metrics, Sample, nested
from embedlog.partition.append_condition import AppendCondition
from embedlog.partition.producer_state import LAST_SEQUENCE
from embedlog.producer.batcher import Batcher, TopicQueue, no_key
from embedlog.producer.future import LOGGER, BatchFuture, Delivery, RecordFuture
from embedlog.producer.row_batches import CHUNK_BYTES, ROW_BYTES, AnyRows, ColumnRows, Rows
from embedlog.producer.validation import (
    check_all_bytes,
    check_expected,
    check_headers,
    check_partition,
    check_timestamp,
    serialize,
    serialize_all,
    to_bytes,
)
from embedlog.progress import format_bytes
from embedlog.record import (
    ConsumerGroupMetadata,
    K,
    OffsetAndMetadata,
    RecordMetadata,
    TopicPartition,
    V,
)
from embedlog.root.root import Root, check_root
from embedlog.tasks import in_thread

if TYPE_CHECKING:
    from embedlog.config.options import ProducerOptions
    from embedlog.producer.table_rows import ArrowArray, ArrowStream
    from embedlog.producer.transactions import GroupConsumer, Transactions
    from embedlog.publish.transaction import GroupOffsets

_HINTS = {
    "produce": "call send(topic, value, key=...)",
    "poll": "leave it out: callbacks of futures run by themselves",
}
"""What to call instead of methods of Kafka's other producers."""


class Producer(Generic[K, V]):
    """Sends records to topics of one log; any thread may call any method.

    Settings are kafka-python's (see `embedlog.config.ProducerConfig`).  Batches are numbered
    (idempotent): a retry is not written twice.  With a ``producer_name`` the numbers outlive the
    process, and an older producer of that name is fenced in a partition once this one appends
    there.

    The calling thread writes in `flush`, in `send_batch`, in ``result`` of a future, and
    whenever a batch is full.  Otherwise a background thread writes once ``linger_ms``, and at
    least about a millisecond, has passed.

    Use it in a ``with`` block, or `close` it: then the unwritten records are flushed.  A task
    ``await``s the futures, and uses ``async with``, `aflush` and `aclose`.
    """

    def __init__(self, root: Root | None = None, **config: Unpack[ProducerOptions[K, V]]) -> None:
        self.root = root = check_root(root, "embedlog.open(path).producer(...)")
        self._options = config
        self._batcher = Batcher(self, root, config)
        self.config = settings = self._batcher.config
        if ignored := describe_network_settings(config):
            LOGGER.info("The producer has no network, and ignores %s", ignored)
        self._clock = root.clock
        self._no_acks = settings.acks == 0
        self._start()
        _producers.add(self)

    def _start(self) -> None:
        """Begin without records and identity, at first or in a forked child."""
        self._queues = self._batcher.queues
        self._lock = self._batcher.lock
        self._acquire, self._release = self._lock.acquire, self._lock.release
        self._closed = False

    def __dir__(self) -> list[str]:
        """Return the names that completion offers."""
        return public_names(self)

    def __repr__(self) -> str:
        name = self.config.producer_name or self.config.client_id
        closed = ", closed" if self._closed else ""
        return f"<Producer {f'{name!r} ' if name else ''}of {self.root.path}{closed}>"

    def _repr_html_(self) -> str:
        """For notebooks: what was written to each topic, what failed, and what is unsent."""
        queues = dict(self._queues)
        values: dict[str, dict[str, float]] = {topic: {} for topic in queues}
        for key, name, value, labels in self._samples():
            if key == PRODUCER_TOPIC:
                values.setdefault(labels["topic"], {})[name] = value
        rows = (
            (
                topic,
                f"{counts.get('record-send-total', 0):,}",
                format_bytes(counts.get("byte-total", 0)),
                f"{counts.get('record-error-total', 0):,}",
                f"{queues[topic].unsent_records() if topic in queues else 0:,}",
            )
            for topic, counts in values.items()
        )
        return html_table(repr(self)[1:-1], ("topic", "records", "size", "errors", "unsent"), rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Producer, self.root, **self._options), ()

    # Sending one record

    def send(
        self,
        topic: str,
        value: V | None = None,
        key: K | None = None,
        headers: Sequence[tuple[str, bytes | None]] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        # Not keyword-only: each call would look up their defaults, which takes 50 of 700 ns.
        expected_offset: int | None = None,
        expected_key_offset: int | EllipsisType | None = ...,
    ) -> RecordFuture:
        """Add a record to the batch that is written next, and return its future.

        ``value`` and ``key`` are bytes or None, or what the serializers accept.  Without a
        ``partition`` the key decides, and without a key the sticky partition is used.

        A record with a condition is written now, in this thread, after all that this producer
        sent before, and only if nobody else was faster: otherwise nothing is written, and its
        future raises `ConflictError` with the ``offset`` that was found.  In a transaction that is
        done by the commit.

        Args:
            topic: The topic.
            value: The value.
            key: The key.
            headers: Pairs of a name and bytes.
            partition: The partition.
            timestamp_ms: In milliseconds since 1970; now by default.
            expected_offset: The log end offset of the partition, at which the record is written.
            expected_key_offset: The offset of the last record of ``key`` in its partition; None
                if the key must be new, or deleted.  Any by default (``...``).

        Raises:
            ClosedError: The producer, or the log, is closed.
            SerializationError: A key, value or header is not bytes.
            UnknownTopicOrPartitionError: There is no such topic or partition.
            InvalidPartitionError: The partition is not an int.
            InvalidTopicError: The topic is one of embedlog's own.
            BufferExhaustedError: ``buffer_memory`` stayed full for ``max_block_ms``.
            InvalidRecordError: An expected offset is no int from 0, or the record has no key.
            IllegalStateError: A condition needs ``enable_idempotence``, and a record whose
                partition the key or the caller chooses.
        """
        queue = self._queues.get(topic) or self._open(topic)
        if expected_offset is not None or expected_key_offset is not ...:
            record = value, key, headers, partition, timestamp_ms
            return self._send_if(queue, record, expected_offset, expected_key_offset)
        plain = (
            type(value) is bytes
            and (key is None or type(key) is bytes)
            and headers is None
            and partition is None
            and timestamp_ms is None
            and queue.plain
        )
        if not plain:
            value, key, headers, partition, timestamp_ms, size = self._converted(  # type: ignore[assignment]
                queue, value, key, headers, partition, timestamp_ms
            )
        else:
            size = ROW_BYTES + len(value) + (len(key) if key else 0)  # type: ignore[arg-type]
            timestamp_ms = self._clock()
        if key is None and (queue.settings.compacts or not plain) and queue.needs_key(value):
            return self._refuse(topic, no_key(topic, [0]))
        try:
            self._acquire()  # takes half as long as `with`, which matters only here
            try:
                delivery = queue.open
                if delivery.free < size:
                    delivery = queue.reserve(size, value, key, headers)  # type: ignore[arg-type]
                delivery.free -= size
                values = delivery.values
                row = len(values)
                if not plain:
                    delivery.note(row, headers, partition)
                delivery.keys.append(key)  # type: ignore[arg-type]
                delivery.timestamps.append(timestamp_ms)
                # Last: `drop_partial_row` takes a record without a value for an interrupted one.
                values.append(value)
            except BaseException:  # as Ctrl-C: the next record would get the key of this one
                queue.open.drop_partial_row()
                raise
            finally:
                self._release()
        except RecordTooLargeError as error:
            return self._refuse(topic, error)
        if not plain and self._no_acks:
            return self._unacknowledged(topic, partition, timestamp_ms)
        future = RecordFuture()
        future._delivery, future._row = delivery, row
        return future

    def _unacknowledged(self, topic: str, partition: int | None, timestamp: int) -> RecordFuture:
        """Return the future of a record that nobody waits for (``acks=0``)."""
        place = RecordMetadata(topic, -1 if partition is None else partition, -1, timestamp)
        return RecordFuture._completed(place)

    def _send_if(
        self, queue: TopicQueue, record: tuple[Any, ...], end: Any, key_offset: Any
    ) -> RecordFuture:
        """Do as `send` for a record with a condition."""
        topic, config = queue.topic, self.config
        if end is not None:
            check_expected(topic, "expected_offset", end)
        if key_offset not in (None, ...):
            check_expected(topic, "expected_key_offset", key_offset)
        if not config.enable_idempotence:
            raise IllegalStateError(
                "A record with a condition needs enable_idempotence, or a retry would find itself",
                topic=topic,
                todo='Make the producer with acks="all" and enable_idempotence=True.',
            )
        value, key, *others, size = self._converted(queue, *record)
        if key is None and key_offset is not ...:
            raise InvalidRecordError(
                "A record without a key has no last record of its key",
                topic=topic,
                todo="Pass a key, or expected_offset.",
            )
        is_keyed = key is not None and not config.partitioner_ignore_keys
        if (
            record[3] is None
            and queue.settings.info.partitions > 1
            and (not is_keyed or config.partitioner == "round_robin")
        ):
            raise IllegalStateError(
                "A record with a condition needs a partition that is known",
                topic=topic,
                todo="Pass the partition, or a key that chooses it.",
            )
        if key is None and queue.needs_key(value):
            return self._refuse(topic, no_key(topic, [0]))
        condition = AppendCondition(end, *(() if key_offset is ... else (key, key_offset)))
        future = RecordFuture()
        try:
            queue.check_size(size, value, key, others[0])
            future._delivery, future._row = queue.send_if(condition, value, key, *others), 0
        except RecordTooLargeError as error:
            return self._refuse(topic, error)
        return future

    def _converted(
        self, queue: TopicQueue, value: Any, key: Any, headers: Any, partition: Any, timestamp: Any
    ) -> tuple[Any, bytes | None, Any, int | None, int, int]:
        """Return what `send` adds for a record that has more than a key and a value of bytes.

        That is the value, the key, the headers, the partition, the timestamp, and the size.
        """
        self._check_open()
        settings, now_ms = queue.settings, self._clock()
        if settings.version != settings.current_version():
            # The topic may have got another serializer, or more partitions.
            settings.refresh()
        check_timestamp(timestamp)
        encoder = settings.row_encoder
        if encoder is not None:
            value = encoder.row(value, key, timestamp, now_ms)
            (key,) = encoder.key_bytes([value.key]).to_pylist() if value.key else (None,)
            size = ROW_BYTES + encoder.size_of(value)
            of_row = encoder.timestamp_ms(value)
            timestamp = timestamp if of_row is None else of_row
        else:
            if settings.serializes:
                headers = [*headers] if headers else []
                key, value = serialize(settings, queue.topic, headers, key, value)
            else:
                key, value = to_bytes(key, "key"), to_bytes(value, "value")
            size = ROW_BYTES + len(value or b"") + len(key or b"")
        if partition is not None:
            check_partition(queue.topic, partition, settings.info.partitions)
        elif self.config.partitioner is not None:
            partition = self._partition_for(queue, key)
        headers = check_headers(headers)
        for name, data in headers or ():
            # A character takes up to four bytes.
            size += ROW_BYTES + 4 * len(name) + len(data or b"")
        return value, key, headers, partition, now_ms if timestamp is None else timestamp, size

    def _open(self, topic: str) -> TopicQueue:
        """Create the queue of a topic, and the topic if that is allowed."""
        self._check_open()
        refuse_internal(topic)
        queue = TopicQueue(self._batcher, topic)
        with self._lock:
            self._check_open()
            queue.closed = not self._batcher.accepting
            return self._queues.setdefault(topic, queue)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("The producer was closed", path=self.root.path)
        if self._batcher.fenced is not None:
            raise self._batcher.fenced

    def _partition_for(self, queue: TopicQueue, key: bytes | None) -> int:
        """Return the partition that the ``partitioner`` of the settings chooses."""
        partitioner, partitions = self.config.partitioner, queue.settings.info.partitions
        if partitioner == "round_robin":
            return queue.round_robin.choose(partitions)
        all_partitions = list(range(partitions))
        partition = partitioner(key, all_partitions, all_partitions)
        check_partition(queue.topic, partition, partitions)
        return int(partition)

    def _refuse(self, topic: str, error: EmbedlogError) -> RecordFuture:
        """Return a failed future, for a record that was refused by itself."""
        return RecordFuture._completed(error, self._batcher.failed(topic, None, 1, error))

    # Sending many records

    def send_batch(
        self,
        topic: str,
        values: Sequence[V | None],
        keys: Sequence[K | None] | None = None,
        headers: Sequence[Sequence[tuple[str, bytes | None]] | None] | None = None,
        timestamps: Sequence[int] | int | None = None,
        partition: int | None = None,
        sequence: int | None = None,
    ) -> BatchFuture:
        """Write many records now, in this thread, and return a future of `BatchRange`.

        Args:
            topic: The topic.
            values: One per record; bytes or None, or what the serializer accepts.
            keys: One per record, or None for no keys.
            headers: A list of pairs or None per record, or None for no headers.
            timestamps: One per record, in ms; an int for all records, or None for now.
            partition: The partition of all records; without it as with `send`.
            sequence: The application's own number of the first record, such as its line in a
                file; the other records are numbered from there.  If a named producer repeats a
                call, even after a restart, nothing is written twice and the ranges are those of
                the first call, flagged ``duplicate``; `last_sequence` says where to continue.
                Numbers must have no gaps, and all records go to one partition.

        Raises:
            SerializationError: A key, value or header is not bytes; nothing was written.
            InvalidRecordError: The topic is compacted, and the records at ``indices`` have no
                key; or the lists differ in length, or ``sequence`` is not a valid number.
                Nothing was written.
            OutOfOrderSequenceError: From ``result``: the numbers have a gap, or the call repeats
                only a part of another one.
        """
        queue = self._queue_for(topic, partition)
        for name, column in (("values", values), ("keys", keys)):
            if isinstance(column, str | bytes | dict | set):
                # Their characters, numbers or keys would become records.
                raise InvalidRecordError(
                    f"{name} must be a list with one item per record, got {type(column).__name__}",
                    topic=topic,
                    todo="To write one record, call send.",
                )
        columns: dict[str, Any] = {"keys": keys, "headers": headers, "timestamps": timestamps}
        for name, each in columns.items():
            if each is not None and not isinstance(each, int) and len(each) != len(values):
                raise InvalidRecordError(
                    f"There are {len(values)} values, but {len(each)} {name}", topic=topic
                )
        if queue.settings.row_encoder is not None:
            from embedlog.producer.typed_rows import split_rows

            typed = self._typed_rows(queue, values, keys, headers, timestamps)
            return self._write(
                queue, list(split_rows(typed, queue.settings.info)), partition, sequence
            )
        rows = self._rows(queue, values, keys, headers, timestamps)
        size = rows.size()
        is_small = size <= queue.settings.encoding.list_bytes
        if not is_small or self.config.partitioner is not None:
            check_all_bytes(rows)
        parts = [rows] if size <= CHUNK_BYTES else list(rows.chunks(CHUNK_BYTES, size))
        return self._write(queue, parts, partition, sequence, at_once=is_small)

    def append_table(
        self,
        topic: str,
        table: ArrowStream | ArrowArray,
        key: str | None = None,
        value: str | None = None,
        timestamp: str | None = None,
        partition: int | None = None,
        sequence: int | None = None,
    ) -> BatchFuture:
        """Write the rows of a table now, without converting them to Python objects.

        Accepts what speaks Arrow: pyarrow's Table, RecordBatch and RecordBatchReader, DataFrames
        of pandas and Polars, and others.

        Binary and text columns are written as they are.  If the producer or the topic has
        serializers, other columns of keys and values are serialized; and with the serializer
        ``"json"`` a table without a column of values is written with one JSON object per row, of
        all columns except those of keys, timestamps and headers.

        Args:
            topic: The topic.
            table: The rows.
            key: The column of keys, binary or text; by default ``"key"`` if there is one.
            value: The column of values, binary or text; by default ``"value"``.
            timestamp: The column of timestamps; by default ``"timestamp"`` if there is one, else
                all rows get the current time.
            partition: The partition of all rows; without it as with `send`.
            sequence: As in `send_batch`.

        Raises:
            SerializationError: There is no such column, or it has another type.
            InvalidRecordError: As `send_batch`.
        """
        from embedlog.producer import table_rows, typed_rows

        queue = self._queue_for(topic, partition)
        table, settings = table_rows.arrow_table(table, topic), queue.settings
        encoder, now_ms = settings.row_encoder, self._clock()
        if encoder is not None:
            if any(name is not None for name in (key, value, timestamp)):
                raise SerializationError(
                    "The topic's schema says which columns are key and timestamp",
                    topic=topic,
                    todo="Leave out key, value and timestamp.",
                )
            parts = list(typed_rows.of_table(table, topic, encoder.schema, now_ms))
        else:
            table_rows.check_columns(table, key, value, timestamp)
            if settings.serializes:
                table = table_rows.serialize_table(table, topic, settings, key, value, timestamp)
            rows, time = table_rows.table_rows(table, key, value, timestamp, now_ms)
            parts = [ColumnRows(part, part.column(1), None, time) for part in rows.to_batches()]
        return self._write(queue, parts, partition, sequence)

    def _write(
        self,
        queue: TopicQueue,
        parts: Sequence[AnyRows],
        partition: int | None,
        sequence: int | None,
        at_once: bool = False,
    ) -> BatchFuture:
        """Write records now; nothing is written if one of them is refused.

        Args:
            queue: That of the topic.
            parts: The records.
            partition: The partition of all of them; None if their keys decide.
            sequence: The application's number of the first one.
            at_once: Whether to encode everything before the first batch is written.
        """
        count = sum(part.row_count for part in parts)
        if not count:
            return BatchFuture._completed([])
        queue.check_keys(parts)
        numbered = self._numbered(queue, partition, sequence, count)
        if numbered is not None:
            partition = numbered[0]
        choose = None
        if self.config.partitioner is not None and partition is None:
            choose = partial(self._partition_for, queue)
        batches = queue.row_partitioner.split_all(parts, partition, choose)
        # A value that is not bytes is found as the rows are encoded.
        ready = iter(list(batches)) if at_once else batches
        # Not kept in a variable: it must be garbage with its future, even if this frame is kept.
        return self._future(queue.send_batches(lambda _: ready, numbered))

    def _future(self, delivery: Delivery) -> BatchFuture:
        if self._no_acks:
            return BatchFuture._completed([])
        future = BatchFuture()
        future._delivery = delivery
        return future

    def _typed_rows(
        self, queue: TopicQueue, values: Any, keys: Any, headers: Any, timestamps: Any
    ) -> Rows:
        """Return the arguments of `send_batch` as rows of a typed topic."""
        encoder, count, now_ms = queue.settings.row_encoder, len(values), self._clock()
        assert encoder is not None
        if timestamps is None or isinstance(timestamps, int):
            timestamps = [timestamps] * count
        rows = []
        for number, (value, key, time) in enumerate(
            zip(values, keys or [None] * count, timestamps, strict=True)
        ):
            check_timestamp(time)
            try:
                rows.append(encoder.row(value, key, time, now_ms))
            except (SerializationError, InvalidRecordError) as error:
                what = f"Record {number}: {error.what}"
                raise type(error)(what, todo=error.todo, **error.facts, row=number) from error
        of_rows = [encoder.timestamp_ms(row) for row in rows]
        times = [
            (now_ms if time is None else time) if own is None else own
            for own, time in zip(of_rows, timestamps, strict=True)
        ]
        pairs = None if headers is None else [check_headers(each) for each in headers]
        return Rows(rows, None, times, pairs if pairs and any(pairs) else None)

    def _queue_for(self, topic: str, partition: int | None) -> TopicQueue:
        queue = self._queues.get(topic) or self._open(topic)
        self._check_open()
        info = queue.settings.refresh()
        if partition is not None:
            check_partition(topic, partition, info.partitions)
        return queue

    def _rows(
        self, queue: TopicQueue, values: Any, keys: Any, headers: Any, timestamps: Any
    ) -> Rows:
        topic, items, settings = queue.topic, keys, queue.settings
        serializers = settings.key_serializer, settings.value_serializer
        if any(serializer is not None and serializer.uses_headers for serializer in serializers):
            # Lists of their own, since a serializer may add to them.
            headers = [list(pairs or ()) for pairs in headers or [()] * len(values)]
        if settings.key_serializer is not None and keys is not None:
            keys = serialize_all(settings.key_serializer, topic, headers, keys, "key", items)
        if settings.value_serializer is not None:
            values = serialize_all(
                settings.value_serializer, topic, headers, values, "value", items
            )
        if timestamps is None:
            timestamps = self._clock()
        if headers is not None:
            headers = [check_headers(pairs) for pairs in headers]
        headers = headers if headers and any(headers) else None
        return Rows(values, keys, timestamps, headers).measured()

    def _numbered(
        self, queue: TopicQueue, partition: int | None, sequence: int | None, count: int
    ) -> tuple[int, int, int] | None:
        """Return partition, first sequence and count of a numbered call; None without numbers."""
        if sequence is None:
            return None
        if not self.config.enable_idempotence or self._batcher.transactions is not None:
            raise IllegalStateError("sequence needs enable_idempotence, and no transactional_id")
        if partition is None and queue.settings.info.partitions > 1:
            raise IllegalStateError(
                "Records with a sequence must go to one partition",
                topic=queue.topic,
                todo="Pass the partition.",
            )
        if type(sequence) is not int or not 0 <= sequence <= LAST_SEQUENCE:
            raise InvalidRecordError(
                f"sequence must be an int from 0 to {LAST_SEQUENCE}, got {sequence!r}",
                topic=queue.topic,
            )
        return partition or 0, sequence, count

    def last_sequence(self, topic: str, partition: int = 0) -> int | None:
        """Return the number of this producer's last record in a partition; None if there is none.

        With a ``producer_name`` that is the last record of any producer of that name, and older
        ones are fenced there: continue with the record after it.
        """
        queue = self._queue_for(topic, partition)
        with queue.drain_lock:
            queue.drain_locked(None)
            state = queue.writer(partition).resume()
        self._batcher.notify()
        return state.batches[-1].last_sequence if state is not None and state.batches else None

    def partitions_for(self, topic: str) -> set[int]:
        """Return the partition numbers of a topic; creates it as `send` does.

        Raises:
            UnknownTopicOrPartitionError: There is no such topic.
        """
        return set(range(self._queue_for(topic, None).settings.info.partitions))

    # Transactions

    def init_transactions(self) -> None:
        """Fence older producers with the same ``transactional_id``, before the first transaction.

        Raises:
            IllegalStateError: The producer has no ``transactional_id``.
            InvalidProducerEpochError: A newer producer has the same one.
        """
        with self._fencing() as transactions:
            transactions.initialize()

    def begin_transaction(self) -> None:
        """Begin a transaction: what is sent becomes visible with its commit, or never.

        The futures of its records say when they are accepted; their offset is -1.

        Raises:
            IllegalStateError: One has begun already, or `init_transactions` was not called.
        """
        with self._fencing() as transactions:
            transactions.begin()
            self._batcher.accept(True)

    def commit_offsets(
        self,
        consumer: GroupConsumer,
        offsets: Mapping[TopicPartition, OffsetAndMetadata | int] | None = None,
    ) -> None:
        """Commit positions of a consumer with the transaction: with its records, or not at all.

        Args:
            consumer: A member of a group, or one whose group has no members; without
                ``enable_auto_commit``.
            offsets: The next offset to read, by partition; None is all resolved positions.

        Raises:
            IllegalStateError: No transaction has begun, or the consumer commits by itself.
            InvalidGroupIdError: The consumer has no group.
        """
        with self._fencing() as transactions:
            transactions.add_offsets(*consumer._offsets_for_transaction(offsets))

    def _commit_for_group(self, offsets: GroupOffsets) -> None:
        """Have a share group change the states of records with the transaction."""
        with self._fencing() as transactions:
            transactions.commit_for_group(offsets)

    def send_offsets_to_transaction(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata | int],
        group_metadata: ConsumerGroupMetadata | str,
    ) -> None:
        """Commit offsets of a group with the transaction, as `commit_offsets` does; Kafka's name.

        Args:
            offsets: The next offset to read, by partition.
            group_metadata: What the consumer's ``group_metadata()`` returned after it read the
                records; or the name of a group that has no members.
        """
        if isinstance(group_metadata, str):
            group_metadata = ConsumerGroupMetadata(group_metadata)
        positions = {
            TopicPartition(*partition): OffsetAndMetadata(at) if isinstance(at, int) else at
            for partition, at in offsets.items()
        }
        with self._fencing() as transactions:
            transactions.add_offsets(positions, group_metadata)

    def commit_transaction(self) -> None:
        """Make the records of the transaction visible, and its offsets committed, all at once.

        It can be repeated after a failure that does not demand an abort.

        Raises:
            InvalidProducerEpochError: A newer producer has the same ``transactional_id``.
            CommitFailedError: The consumer does not own a partition any more; abort, and begin
                again at the committed offsets.
            ConflictError: Somebody was faster than a record with a condition; abort.
            Exception: That of a record that failed; abort.
        """
        with self._fencing() as transactions:
            transactions.check(begun=True)
            self._batcher.accept(False)
            self.flush()
            transactions.commit()

    def abort_transaction(self) -> None:
        """Drop what was sent in the transaction.

        Raises:
            InvalidProducerEpochError: A newer producer has the same ``transactional_id``.
        """
        with self._fencing() as transactions:
            transactions.check(begun=True)
            self._batcher.accept(False)
            self.flush()
            transactions.abort()

    @contextmanager
    def _fencing(self) -> Iterator[Transactions]:
        """Yield the transactions; once a newer producer fenced this one, nothing is accepted."""
        transactions = self._batcher.transactions
        if transactions is None:
            raise IllegalStateError(
                "The producer has no transactions", todo="Set transactional_id."
            )
        try:
            yield transactions
        except InvalidProducerEpochError as error:
            self._batcher.accept(False)
            self._batcher.fenced = error
            raise

    # Finishing

    def flush(self, timeout: float | None = None, raise_errors: bool = False) -> None:
        """Return once everything that was sent before this call is written, or failed.

        Writes in this thread, and does not wait for what other threads send meanwhile.

        Args:
            timeout: In seconds; None to wait as long as it takes.
            raise_errors: Raise if any record failed since the producer was created, except
                those whose error a program got from a future or in a callback, and those that
                an earlier call with ``raise_errors`` raised.

        Raises:
            TimeoutError: Not everything was written within ``timeout`` seconds.
            DeliveryFailedError: With ``raise_errors``: its ``errors`` say why, and ``topics``
                how many records of which topics.
        """
        deadline = None if timeout is None else monotonic() + timeout
        with self._batcher.unretrieved.raised(raise_errors):
            for queue in list(self._queues.values()):
                queue.flush(deadline)
            self._batcher.run_callbacks(wait=True)

    async def aflush(self, raise_errors: bool = False) -> None:
        """Do as `flush`; for tasks."""
        await in_thread(self.flush, None, raise_errors)

    async def aclose(self) -> None:
        """Do as `close`; for tasks."""
        await in_thread(self.close)

    def close(self, timeout: float | None = None, raise_errors: bool = False) -> None:
        """Write the unwritten records, for at most ``timeout`` seconds, and stop.

        Records that are not written then fail with `ClosedError`; with 0, all of them do.  May
        be repeated, and may be called from a callback.

        Args:
            timeout: In seconds; None to wait as long as it takes.
            raise_errors: Raise as `flush` does, once the producer is closed.

        Raises:
            DeliveryFailedError: With ``raise_errors``: records failed.
        """
        with self._batcher.unretrieved.raised(raise_errors):
            self._close(timeout)

    def _close(self, timeout: float | None) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            if timeout != 0:
                self.flush(timeout)
        except TimeoutError:
            pass
        finally:
            if self._batcher.transactions is not None:
                self._batcher.transactions.close()
            self._batcher.abandoned = True
            for queue in list(self._queues.values()):
                queue.abandon()
            with self._lock:
                self._queues.clear()
            self._batcher.notify()
            self._batcher.stop_thread()
            self._batcher.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if getattr(self, "_closed", True):
            return
        if self._batcher.buffered:
            unsent = sum(queue.unsent_records() for queue in self._queues.values())
            warnings.warn(
                f"{self!r} was not closed; {plural(unsent, 'record')} unsent",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )
            if not self.root.closed:
                self.close(5.0)
        self._batcher.stop_thread(0)

    def metrics(self) -> Metrics:
        """Return counts, sizes and times by name, in Kafka's groups, as kafka-python does.

        ``metrics()["producer-metrics"]["record-send-total"]`` is the number of records written,
        and ``["producer-topic-metrics.orders"]`` has those of a topic.  The page on monitoring
        lists all names.  Averages and maxima are over the life of the producer; an average of
        nothing is NaN.
        """
        return nested(self._samples())

    def _samples(self) -> Iterator[Sample]:
        return self._batcher.samples()

    def _after_fork(self) -> None:
        """Start again in a forked child: the parent writes the records that were sent before."""
        closed = self._closed
        for queue in self._queues.values():
            queue.after_fork()
        self._batcher.start()
        self._start()
        self._closed = closed


hint_at_missing(Producer, _HINTS)


# The end of the process, and forks

_producers: weakref.WeakSet[Producer] = weakref.WeakSet()


def flush_producers(root: Root, timeout: float | None = None) -> None:
    """Flush every producer of this process that writes to a root; see `Producer.flush`."""
    for producer in list(_producers):
        if producer.root is root and not producer._closed:
            producer.flush(timeout)


def _at_exit() -> None:
    for producer in list(_producers):
        try:
            if not producer.root.closed:
                producer.close(30.0)
        except EmbedlogError:
            LOGGER.exception("%r could not be flushed at exit", producer)


def _after_fork_in_child() -> None:
    for producer in list(_producers):
        producer._after_fork()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
