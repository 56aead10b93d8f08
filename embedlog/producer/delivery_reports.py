"""Counts the outcomes of records, wakes the threads that wait for them, and runs callbacks.

Lines for the log are kept until no lock is held, too: a handler may send them with the same
producer, and wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from time import monotonic

from embedlog.lazy import logging
from embedlog.metrics import Sample
from embedlog.producer.buffer_pool import BufferPool
from embedlog.producer.counts import TopicCounts, samples
from embedlog.producer.delivery import (
    LOGGER,
    Callback,
    Delivery,
    OpenBatch,
    ProducerBatch,
    run_callback,
)
from embedlog.producer.unretrieved import FailedRecords, UnretrievedErrors

LONG_WAIT = 1.0
"""Seconds of retries, of one append, or of a `send` without memory, that are worth a warning."""
WARNING_INTERVAL = 60.0
"""Seconds without a second warning about the same kind of wait."""


class DeliveryReports:
    """Collects outcomes while a queue is drained; `notify` reports them once no lock is held."""

    def __init__(self, buffer_pool: BufferPool) -> None:
        self._topics: dict[str, TopicCounts] = {}
        self.unretrieved = UnretrievedErrors()
        self._buffer_pool = buffer_pool
        self._done: deque[tuple[Delivery, int]] = deque()
        """Deliveries that have an outcome, and the bytes of memory that are free again."""
        self._with_callbacks: deque[Delivery] = deque()
        self._callback_lock = threading.Lock()
        self._callback_thread: int | None = None
        self._lines: deque[tuple[int, str, *tuple[object, ...]]] = deque()
        """For the log: the level, the text and its arguments."""
        self._warned_at: dict[str, float] = {}

    def counts(self, topic: str) -> TopicCounts:
        """Return the counts for a topic, which begin at 0."""
        counts = self._topics.get(topic)
        return self._topics.setdefault(topic, TopicCounts()) if counts is None else counts

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of the producer."""
        return samples(self._topics, self._buffer_pool, self.unretrieved.logged)

    def record_written(
        self, open_batch: OpenBatch, counts: TopicCounts, size: int, duplicate: bool
    ) -> None:
        """Report a record that took no `ProducerBatch`; its callbacks run with `notify`."""
        pool = self._buffer_pool
        with pool.lock:
            counts.batches += 1
            counts.records += 1
            counts.bytes += size
            counts.duplicates += duplicate
            pool.buffered -= open_batch.reserved
            if pool.waiters:
                pool.progress.notify_all()
            if open_batch.callbacks:
                self._done.append((open_batch, 0))

    def batch_done(self, batch: ProducerBatch) -> None:
        """Count a batch that was written or failed; `notify` does the rest after the drain."""
        receipt, records, size = batch.receipt, batch.count, batch.size
        if receipt is not None:
            counts = self.counts(batch.delivery.queue.topic)
            with self._buffer_pool.lock:
                counts.batches += 1
                counts.records += records
                counts.bytes += size
                counts.duplicates += receipt.duplicate
        self._done.append((batch.delivery, size))
        del batch.delivery

    def batch_failed(self, batch: ProducerBatch, error: BaseException) -> None:
        """Set the error of a batch, and count its records."""
        delivery = batch.delivery
        records = self.failed(delivery.queue.topic, batch.partition, batch.count, error)
        if delivery.failed is None:
            delivery.failed = {}
        delivery.failed[batch.start] = records
        batch.error = error

    def not_encoded(self, open_batch: OpenBatch, error: BaseException) -> None:
        """Fail records that could not be made into batches, and count them."""
        topic, count = open_batch.queue.topic, len(open_batch.values)
        open_batch.failed = {None: self.failed(topic, None, count, error)}
        open_batch.error = error
        open_batch.seal()
        self._buffer_pool.release(open_batch.reserved)
        self._done.append((open_batch, 0))

    def failed(
        self, topic: str, partition: int | None, count: int, error: BaseException
    ) -> FailedRecords:
        """Count records that failed; return what their delivery must keep."""
        with self._buffer_pool.lock:
            self.counts(topic).errors += count
        return self.unretrieved.add(topic, partition, count, error)

    def log(self, level: int, text: str, *args: object) -> None:
        """Have the next `notify` log a line."""
        self._lines.append((level, text, *args))

    def warn_of_wait(self, text: str, *args: object) -> None:
        """Have the next `notify` warn of a `LONG_WAIT`, at most once a minute for each text."""
        now = monotonic()
        if now >= self._warned_at.get(text, now):
            self._warned_at[text] = now + WARNING_INTERVAL
            self.log(logging.WARNING, text, *args)

    def notify(self) -> None:
        """Wake the waiting threads, log lines and run callbacks.  The caller holds no lock."""
        if self._done:
            self._take_done()
        if self._lines:
            self._log_lines()
        if self._with_callbacks:
            self.run_callbacks()

    def _take_done(self) -> None:
        done, pool, with_callbacks = self._done, self._buffer_pool, self._with_callbacks
        popped: list[tuple[Delivery, int]] = []
        with pool.lock:
            freed, last = 0, None
            while done:
                delivery, size = item = done.popleft()
                # Kept: a delivery that failed may log when it is dropped, not under the lock.
                popped.append(item)
                freed += size
                if delivery.callbacks and delivery is not last:
                    with_callbacks.append(delivery)
                    last = delivery
            pool.buffered -= freed
            if pool.waiters:
                pool.progress.notify_all()

    def _log_lines(self) -> None:
        while self._lines:
            try:
                line = self._lines.popleft()
            except IndexError:
                return  # Another thread took it.
            LOGGER.log(*line)

    def run_callbacks(self, wait: bool = False) -> None:
        """Run the callbacks that are due, in order, one thread at a time.

        Args:
            wait: Wait for another thread that is running callbacks, then run the rest.
        """
        this_thread = threading.get_ident()
        if self._callback_thread == this_thread:
            return
        while self._with_callbacks or wait:
            if not self._callback_lock.acquire(blocking=wait):
                return
            self._callback_thread = this_thread
            try:
                while self._with_callbacks:
                    due = self._due_callbacks(self._with_callbacks.popleft())
                    while due:
                        run_callback(due.popleft())
            finally:
                self._callback_thread = None
                self._callback_lock.release()
            wait = False

    def _due_callbacks(self, delivery: Delivery) -> deque[Callback]:
        with self._buffer_pool.lock:
            due: deque[Callback] = deque()
            pending: list[Callback] = []
            for callback in delivery.callbacks:
                future = callback[0]
                done = delivery.outcome(future._row) is not None
                (due if done else pending).append(callback)
            delivery.callbacks = pending
        return due
