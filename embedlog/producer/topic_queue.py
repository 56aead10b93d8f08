"""The records of one topic between `send` and the log: collected, encoded, and written."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Any

from embedlog.batch import encode_one
from embedlog.batch.limits import request_size
from embedlog.errors import (
    BufferExhaustedError,
    ClosedError,
    EmbedlogError,
    IllegalStateError,
    InvalidRecordError,
    RecordTooLargeError,
    TimeoutError,  # noqa: A004 - it is one
    UnknownTopicOrPartitionError,
)
from embedlog.partition import producer_state
from embedlog.partition.producer_state import REMEMBERED
from embedlog.partitioner import RoundRobinPartitioner, partition_for_key
from embedlog.producer.context import ProducerContext
from embedlog.producer.delivery import Callback, Delivery, DeliveryQueue, OpenBatch, ProducerBatch
from embedlog.producer.delivery_reports import LONG_WAIT
from embedlog.producer.partition_rows import Batches, RowPartitioner
from embedlog.producer.partition_writer import PartitionWriter, closed_early, final_error
from embedlog.producer.row_batches import CHUNK_BYTES
from embedlog.producer.topic_settings import TopicSettings
from embedlog.producer.validation import check_size
from embedlog.record import Appended
from embedlog.schemas.typed_row import TypedRow

WRITE_BYTES = 2 << 20
"""The most that one append writes of a table.  Larger writes took longer per byte where it was
measured (Linux 6.18, ext4): 5 MiB at once from a tenth longer to three times as long."""
SHORT_WAIT = 0.05
"""Seconds that `send` waits for a partition if it must drain; then another thread drains it."""


class TopicQueue:
    """What one producer sends to one topic.

    The producer's lock guards ``open_batch``.  ``drain_lock`` guards everything else: batches
    are encoded and appended under it, so that they stay in order.
    """

    def __init__(self, context: ProducerContext, topic: str) -> None:
        self.context, self.topic = context, topic
        self.drain_lock = threading.Lock()
        self.open_batch = OpenBatch(self)
        self.full: deque[OpenBatch] = deque()
        self.encoding: deque[OpenBatch] = deque()
        """Taken by a drain, but not with the writers yet; filled under the producer's lock."""
        self.closed = False
        self.writers: dict[int, PartitionWriter] = {}
        self.ignores_keys = context.config.partitioner_ignore_keys
        """Whether records with keys are distributed like those without."""
        self.round_robin = RoundRobinPartitioner()
        self._retry_at = 0.0
        self._attempts = 0
        """Failed attempts to make batches of what was collected first."""
        self._general = context.config.partitioner is not None or context.config.acks == 0
        self.settings = TopicSettings(context, topic, self._settings_changed)
        self.row_partitioner = RowPartitioner(context.config, self.settings, self.writers)

    def _settings_changed(self, settings: TopicSettings) -> None:
        typed = settings.row_encoder is not None
        self.plain = not (self._general or settings.serializes or typed)
        """Whether `send` may add a record of bytes as it is."""
        for writer in list(self.writers.values()):
            writer.update_listeners(settings.info.config)

    # Memory

    def reserve(
        self,
        size: int,
        value: bytes | None,
        key: bytes | None,
        headers: Sequence[tuple[str, bytes | None]] | None = None,
    ) -> tuple[OpenBatch, int]:
        """Return an open batch that a record fits in, and the bytes that it has free after it.

        The caller holds the producer's lock, which is released while a full batch is drained
        and while memory is waited for.

        Raises:
            RecordTooLargeError: The record is larger than any may be.
            BufferExhaustedError: ``max_block_ms`` passed.
            ClosedError: The producer was closed.
        """
        context = self.context
        if size > context.always_allowed_bytes:
            kafka_bytes = request_size(value, key, headers)
            check_size(self.topic, size, kafka_bytes, context.config.max_request_size)
        open_batch, pool = self.open_batch, context.buffer_pool
        if not open_batch.reserved and not self.closed:
            # The first record of a batch, as every record is that a caller waits for.
            reservation = self.settings.reservation_bytes
            if size <= reservation <= pool.memory - pool.buffered:
                self._reserve(open_batch, reservation)
                return open_batch, reservation - size
        began, drained = None, context.synced
        while not self.closed:
            open_batch = self.open_batch
            collected = open_batch.reserved - open_batch.free
            if open_batch.free >= size:
                return open_batch, open_batch.free - size
            if collected >= self.settings.drain_bytes and not drained:
                drained = True
                self._drain_unlocked([self], SHORT_WAIT)
            elif collected + size > CHUNK_BYTES and open_batch.values:
                self.start_open_batch()
            elif self._try_reserve(open_batch, size, self.settings.drain_bytes - collected):
                return open_batch, open_batch.free - size
            else:
                now = monotonic()
                if began is None:
                    began = now
                self._wait_for_memory(now - began)
        raise ClosedError("The producer was closed", topic=self.topic)

    def _try_reserve(self, open_batch: OpenBatch, size: int, until_drain: int) -> bool:
        """Reserve memory for at least one more record, if there is enough."""
        pool, step = self.context.buffer_pool, self.context.reservation_bytes
        if 0 < until_drain < step:
            step = until_drain
        added = min(max(size, step) - open_batch.free, pool.memory - pool.buffered)
        if open_batch.free + added < size:
            return False
        self._reserve(open_batch, added)
        return True

    def _reserve(self, open_batch: OpenBatch, size: int) -> None:
        context = self.context
        if not open_batch.values:
            # Not needed for later records: the thread sleeps only while nothing is collected.
            # First, because the record is refused if no thread can be started.
            if context.sender.idle:
                context.sender.start()
            open_batch.opened_at = now = monotonic()
            open_batch.deadline = now + context.delivery_timeout
        context.buffer_pool.buffered += size
        open_batch.reserved += size
        open_batch.free += size

    def _wait_for_memory(self, waited: float) -> None:
        context, pool = self.context, self.context.buffer_pool
        seconds_left = context.config.max_block_ms / 1000 - waited
        if waited > LONG_WAIT:
            # The drain below logs it.
            context.reports.warn_of_wait(
                "send to %s has waited %.1f s for buffer_memory, of which %d bytes are unwritten"
                " (max_block_ms %d)",
                *(self.topic, waited, pool.buffered, context.config.max_block_ms),
            )
        if seconds_left <= 0:
            raise BufferExhaustedError(
                f"{pool.buffered} of {pool.memory} bytes of buffer_memory are unwritten "
                f"after max_block_ms {context.config.max_block_ms}",
                topic=self.topic,
                todo="Flush, raise buffer_memory, or find out what holds the partition.",
            )
        before = pool.buffered
        self._drain_unlocked(list(context.queues.values()), min(seconds_left, SHORT_WAIT))
        if pool.buffered >= before:
            context.sender.wake()
            pool.wait_locked(min(seconds_left, SHORT_WAIT))

    def _drain_unlocked(self, queues: Sequence[DeliveryQueue], lock_timeout: float) -> None:
        self.context.lock.release()
        try:
            for queue in queues:
                queue.drain(lock_timeout, wait=False)
        finally:
            self.context.lock.acquire()

    def start_open_batch(self) -> None:
        """Start a new open batch, and have the last one drained.  The caller holds the lock."""
        self.full.append(self.open_batch)
        self.open_batch = OpenBatch(self)

    # Draining

    def pending(self) -> bool:
        """Return whether any record is unwritten; a guess without the ``drain_lock``."""
        if self.full or self.encoding or self.open_batch.values:
            return True
        return any(writer.waiting for writer in list(self.writers.values()))

    def due_at(self) -> float | None:
        """Return when to drain, on the monotonic clock; None if there is nothing to drain."""
        times = [writer.retry_at for writer in list(self.writers.values()) if writer.waiting]
        open_batch = self.open_batch
        if open_batch.values:
            times.append(open_batch.opened_at + self.context.linger)
        if self.full or self.encoding:
            times.append(self._retry_at)
        return min(times, default=None)

    def drain(self, lock_timeout: float | None = None, *, wait: bool = True) -> bool:
        """Write what was collected, in this thread; False if another thread is draining.

        Args:
            lock_timeout: Seconds to wait for the other thread, and for a partition's lock if
                that is shorter than usual; None to wait as long as it takes.
            wait: Whether to wait for the other thread.
        """
        drain_timeout = -1 if lock_timeout is None else lock_timeout
        drains = self.drain_lock.acquire(timeout=drain_timeout if wait else 0)
        if drains:
            try:
                self.drain_locked(lock_timeout)
            finally:
                self.drain_lock.release()
        # Also of the other thread, which may be retrying for minutes.
        self.context.reports.notify()
        return drains

    def drain_locked(self, lock_timeout: float | None) -> None:
        """Encode what was collected, and append it.  The caller holds the ``drain_lock``.

        Args:
            lock_timeout: Seconds to wait for a partition's lock, if shorter than usual.
        """
        if self._send_one_fast(lock_timeout):
            return
        if self.encoding:
            self._put_back()
        if monotonic() >= self._retry_at:
            self._take_open_batches()
            # In order: a batch that cannot be encoded now holds up those after it.
            while self.encoding and self._encode(self.encoding[0]):
                self.encoding.popleft()
            if self.encoding:
                self._put_back()
        for writer in list(self.writers.values()):
            if writer.waiting:
                writer.write(lock_timeout)
        if self.context.abandoned:
            self.abandon_locked()

    def _send_one_fast(self, lock_timeout: float | None) -> bool:
        """Write the only record of the queue; False if there is more to do.

        For ``send(...).result()`` in a loop.  Skips partitioning, splitting and queueing, which
        would cost as much as the append.  Leaves anything unusual to the general way of
        `drain_locked`, which also reports the errors.
        """
        settings = self.settings
        # `send` adds a record in several steps, and its thread may be stopped between any two.
        with self.context.lock:
            open_batch = self.open_batch
            if (
                len(open_batch.values) != 1
                or self.full
                or self.encoding
                or open_batch.headers
                or open_batch.explicit_partitions
                or not settings.uncompressed
                or type(open_batch.values[0]) is TypedRow
                or self.context.abandoned
                or settings.version != settings.current_version()
            ):
                return False
            key, partitions, sticky = open_batch.keys[0], settings.info.partitions, False
            if partitions == 1:
                partition = 0
            elif key is None or self.ignores_keys:
                partition, sticky = self.row_partitioner.sticky_partition(), True
            else:
                partition = partition_for_key(key, partitions)
            writer = self.writers.get(partition)
            if (
                writer is None
                or not writer.can_write_fast()
                or (key is None and settings.compacts)
                or open_batch.reserved - open_batch.free > settings.one_record_bytes
            ):
                return False
            self.encoding.append(open_batch)
            self.open_batch = OpenBatch(self)
        encoded = encode_one(open_batch.values[0], key, open_batch.timestamps[0])
        if sticky:
            self.row_partitioner.sent_sticky(encoded.size)
        try:
            writer.write_one_fast(open_batch, encoded, lock_timeout)
        finally:
            self.encoding.clear()
            # If it failed, it must be garbage with its futures, even if this frame is kept.
            del open_batch
        return True

    def _take_open_batches(self) -> None:
        with self.context.lock:
            self.encoding.extend(self.full)
            self.full.clear()
            if self.open_batch.values:
                self.encoding.append(self.open_batch)
                self.open_batch = OpenBatch(self)

    def _put_back(self) -> None:
        """Put records back that a drain took and could not encode, or was interrupted at."""
        with self.context.lock:
            while self.encoding:
                open_batch = self.encoding[-1]
                if open_batch.sealed:
                    self._hand_to_writers(open_batch)
                else:
                    open_batch.batches, open_batch.starts = [], []
                    self.full.appendleft(open_batch)
                self.encoding.pop()

    def _encode(self, open_batch: OpenBatch) -> bool:
        """Make batches of an open batch and hand them to the writers, or fail its records.

        Returns False if it must be tried again later.
        """
        waited = monotonic() - open_batch.opened_at
        try:
            self.settings.refresh()
            rows = open_batch.rows()
            self.check_keys(rows.keys, len(rows.values))
            size = open_batch.reserved - open_batch.free
            order, batches = self.row_partitioner.split(rows, size, open_batch.explicit_partitions)
            open_batch.order, encoded = order, list(batches)
            for partition in {partition for partition, _ in encoded}:
                self.writer(partition)
        except Exception as error:  # noqa: BLE001 - kept, and raised by the futures
            config, now = self.context.config, monotonic()
            self._attempts += 1
            if isinstance(error, EmbedlogError) and error.retriable:
                if now < open_batch.deadline:
                    if waited - self.context.linger > LONG_WAIT:
                        self.context.reports.warn_of_wait(
                            "Records for %s have waited %.1f s to be encoded, which is retried"
                            " until delivery_timeout_ms %d has passed: %s",
                            *(self.topic, waited, config.delivery_timeout_ms, error),
                        )
                    self._retry_at = now + config.retry_backoff_ms / 1000
                    self.context.sender.wake()
                    return False
                seconds = now - open_batch.deadline + self.context.delivery_timeout
                where = {"topic": self.topic}
                error = final_error(error, config, self._attempts, seconds, where)
            self._attempts = 0
            self.context.reports.not_encoded(open_batch, error)
            return True
        self._attempts = 0
        self.context.reports.counts(self.topic).count_wait(waited)
        size = sum(open_batch.add_batch(partition, batch).size for partition, batch in encoded)
        self.context.buffer_pool.release(open_batch.reserved - size)
        open_batch.seal()
        self._hand_to_writers(open_batch)
        return True

    def _hand_to_writers(self, open_batch: OpenBatch) -> None:
        """Queue its batches, except those that were queued before an interruption."""
        for batch in open_batch.batches:
            waiting = self.writers[batch.partition].waiting
            if not batch.done() and batch not in waiting:
                waiting.append(batch)

    def writer(self, partition: int) -> PartitionWriter:
        """Return the writer of a partition, a new one if the topic was deleted and created."""
        log = self.context.root.partition(self.topic, partition)
        writer = self.writers.get(partition)
        if writer is None or writer.log is not log:
            if writer is not None:
                writer.write()
                error = UnknownTopicOrPartitionError(
                    "The topic was deleted before the record was written",
                    topic=self.topic,
                    partition=partition,
                    todo="Send the record again to write it to the topic that has the name now.",
                )
                writer.fail_all(error)
            writer = PartitionWriter(self.context, log)
            writer.update_listeners(self.settings.info.config)
            self.writers[partition] = writer
        return writer

    def check_keys(self, keys: Any, count: int) -> None:
        """Refuse records without a key if the topic is compacted.

        Raises:
            InvalidRecordError: ``indices`` are the records without a key.
        """
        if not self.settings.info.config.compacts or (keys is not None and None not in keys):
            return
        indices = [row for row in range(count) if keys is None or keys[row] is None]
        raise no_key(self.topic, indices)

    # Whole batches

    def send_batches(self, batches: Batches, numbered: tuple[int, int, int] | None) -> Delivery:
        """Append batches now, in this thread, after everything that was sent before.

        Args:
            batches: Pairs of a partition and a batch.
            numbered: The partition, the first sequence number and the number of records, if the
                application numbers them.
        """
        delivery = Delivery(self, monotonic() + self.context.delivery_timeout)
        try:
            with self.drain_lock:
                self.drain_locked(None)
                self._write_batches(delivery, batches, numbered)
            return delivery
        finally:
            delivery.sealed = True
            # As in `_send_one_fast`.
            del delivery
            self.context.reports.notify()

    def _write_batches(
        self, delivery: Delivery, batches: Batches, numbered: tuple[int, int, int] | None
    ) -> None:
        writer, sequence, written_below = None, None, 0
        if numbered is not None:
            partition, sequence, count = numbered
            writer = self.writer(partition)
            self._write_all(writer)
            state = writer.resume()
            # If the call includes batches that the log remembers (G16), it repeats a call whose
            # answer was lost: then the log has the records before those batches, too.
            if state is not None and state.batches:
                oldest = state.batches[0].first_sequence
                written_below = oldest if oldest < sequence + count else 0
        for partition, encoded in batches:
            if writer is None or writer.log.partition != partition:
                writer = self.writer(partition)
            waiting = writer.waiting
            if len(waiting) >= REMEMBERED or (
                waiting and sum(batch.size for batch in waiting) + encoded.size > WRITE_BYTES
            ):
                self._write_all(writer)
                if _cannot_continue(delivery):
                    del delivery
                    return
            batch = delivery.add_batch(partition, encoded)
            if sequence is not None:
                batch.sequence, batch.explicit = sequence, True
                sequence = producer_state.after(sequence, batch.count)
                if batch.sequence + batch.count <= written_below:
                    batch.encoded, batch.receipt = None, Appended(-1, -1, None, True)
                    continue
            with self.context.lock:
                self.context.buffer_pool.buffered += batch.size
            waiting.append(batch)
        del delivery
        for writer in self.writers.values():
            if writer.waiting:
                writer.write()

    def _write_all(self, writer: PartitionWriter) -> None:
        """Append what waits before more is encoded, which keeps memory small."""
        writer.write()
        while writer.waiting:
            if self.context.abandoned:
                writer.fail_all(closed_early(self.topic))
                return
            self.context.buffer_pool.wait(writer.retry_at - monotonic())
            writer.write()

    # Waiting and giving up

    def wait_for_progress(self, deadline: float | None) -> None:
        """Wait until another attempt may succeed, or until the deadline."""
        due = self.due_at()
        until = monotonic() + 0.05 if due is None else due
        if deadline is not None:
            until = min(until, deadline)
        self.context.buffer_pool.wait(until - monotonic())

    def flush(self, deadline: float | None) -> None:
        """Return once all that was sent before is written or failed.

        Raises:
            TimeoutError: The deadline passed before.
        """
        with self.context.lock:
            unfinished: list[Any] = [*self.encoding, *self.full, *self._waiting_batches()]
            if self.open_batch.values:
                unfinished.append(self.open_batch)
        while True:
            drained = self.drain(None if deadline is None else max(deadline - monotonic(), 0.0))
            unfinished = [batch for batch in unfinished if not batch.done()]
            if drained and not unfinished:
                return
            if deadline is not None and monotonic() >= deadline:
                raise TimeoutError(
                    "Not everything was written in time",
                    topic=self.topic,
                    todo="The rest may still be written; flush again.",
                )
            self.wait_for_progress(deadline)

    def add_callback(self, callback: Callback) -> bool:
        """Keep a callback for later; False if its record is done."""
        future = callback[0]
        with self.context.lock:
            if future._delivery.outcome(future._row) is not None:
                return False
            future._delivery.callbacks.append(callback)
            return True

    def _waiting_batches(self) -> list[ProducerBatch]:
        writers = list(self.writers.values())
        return [batch for writer in writers for batch in tuple(writer.waiting)]

    def unsent_records(self) -> int:
        """Return how many records are not written yet."""
        collected = sum(
            len(batch.values) for batch in (*self.encoding, *self.full, self.open_batch)
        )
        return collected + sum(batch.count for batch in self._waiting_batches())

    def after_fork(self) -> None:
        """Fail, in a forked child, the records that the parent writes."""
        error = IllegalStateError(
            "The record was sent before the fork", topic=self.topic, todo="The parent writes it."
        )
        for open_batch in (*self.encoding, *self.full, self.open_batch):
            open_batch.error = error
        for batch in self._waiting_batches():
            batch.error = error

    def abandon(self) -> None:
        """Fail everything that is not written; what another thread is writing, after that."""
        self._close()
        if self.drain_lock.acquire(timeout=0.1):
            try:
                self.abandon_locked()
            finally:
                self.drain_lock.release()

    def abandon_locked(self) -> None:
        """Fail what is not written.  The caller holds the ``drain_lock``."""
        self._put_back()
        self._close()
        for writer in self.writers.values():
            writer.fail_all(closed_early(self.topic))

    def _close(self) -> None:
        """Fail what was collected, and accept no more."""
        with self.context.lock:
            unsent = [*self.full, self.open_batch]
            self.full.clear()
            self.open_batch, self.closed = OpenBatch(self), True
        error = closed_early(self.topic)
        for open_batch in unsent:
            if open_batch.values:
                self.context.reports.not_encoded(open_batch, error)


def no_key(topic: str, indices: list[int]) -> InvalidRecordError:
    """Return the error of records that cannot be compacted."""
    return InvalidRecordError(
        f"Records {indices[:20]}{'…' if len(indices) > 20 else ''} have no key, "
        "but the topic is compacted",
        todo="Give each record a key.",
        topic=topic,
        indices=indices,
    )


def _cannot_continue(delivery: Delivery) -> bool:
    """Return whether the rest need not be tried: a batch failed, not because of its records."""
    own_fault = (RecordTooLargeError, InvalidRecordError)
    return any(
        batch.error is not None and (batch.explicit or not isinstance(batch.error, own_fault))
        for batch in delivery.batches[-REMEMBERED:]
    )
