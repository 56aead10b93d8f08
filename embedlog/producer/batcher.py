"""What a producer has not written yet: the only place that knows, and what all its topics share.

A record is in one of three places, in this order: the open delivery of its topic, which `send`
fills under the producer's one lock; the full deliveries; or a batch that waits in a
`PartitionWriter`.  A drain moves the records of a topic from the first place to the last, and has
them written, in whatever thread it runs: a caller's that waits, or the producer's own.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from embedlog.batch import EncodedBatch
from embedlog.batch.limits import request_size
from embedlog.config import ProducerConfig
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
from embedlog.lazy import logging
from embedlog.listeners import PRODUCER, Client
from embedlog.metrics import PRODUCER as PRODUCER_METRICS
from embedlog.metrics import PRODUCER_TOPIC, Sample, average
from embedlog.partition import producer_state
from embedlog.partition.append_condition import AppendCondition
from embedlog.partition.producer_state import REMEMBERED
from embedlog.partitioner import RoundRobinPartitioner
from embedlog.producer.future import LOGGER, Delivery, ProducerBatch, run_callback
from embedlog.producer.partition_writer import LONG_WAIT, PartitionWriter, TopicCounts, final_error
from embedlog.producer.row_batches import CHUNK_BYTES, AnyRows, Batches, RowPartitioner, key_list
from embedlog.producer.topic_settings import TopicSettings
from embedlog.producer.unretrieved import FailedRecords, UnretrievedErrors
from embedlog.producer.validation import MAX_RECORD_BYTES, check_size
from embedlog.record import Appended
from embedlog.registry import binder
from embedlog.root.root import Root
from embedlog.serializers import adapt_own

if TYPE_CHECKING:
    from embedlog.producer.transactions import Transactions

PLAIN = (bytes, type(None))
"""What values are in a topic of bytes; in a typed topic they are rows."""
REQUEST_BYTES = 81
"""The most that Kafka's producer counts for a record above what ``buffer_memory`` counts."""
RESERVATION_BYTES = 64 << 10
"""A delivery reserves memory in steps of this size, so that few sends have to."""
WRITE_BYTES = 2 << 20
"""The most that one append writes of a table.  Larger writes took longer per byte where it was
measured (Linux 6.18, ext4): 5 MiB at once from a tenth longer to three times as long."""
SHORT_WAIT = 0.05
"""Seconds that `send` waits for a partition if it must drain; then another thread drains it."""
TASK_WAIT = 0.001
"""Seconds that the thread of a loop waits for a partition; then another thread does."""
WARNING_INTERVAL = 60.0
"""Seconds without a second warning about the same kind of wait."""

TICK = 0.001
"""Seconds between two rounds while records are sent; also the least time a record lingers."""
QUIET_ROUNDS = 20
"""Rounds without any work after which the thread sleeps until it is woken."""
MAX_PAUSE = 0.1
FOREVER = threading.TIMEOUT_MAX


class Batcher:
    """The unwritten records of one producer, its memory, counts and thread, and its identity.

    Lines for the log, callbacks, and what logs failures wait until `notify`, which is called
    without a lock: a handler or a callback may send with the same producer, and wait.

    Args:
        owner: The producer.  Futures and queues keep it alive through this reference, so that
            its finalizer does not close it while a future is pending.
        root: The log root to write to.
        options: The settings that the program gave, by name.
    """

    def __init__(self, owner: object, root: Root, options: Mapping[str, object]) -> None:
        self.owner, self.root = owner, root
        self.config = config = ProducerConfig.parse(options)
        self.explicit_batch_size = config.batch_size if "batch_size" in options else None
        self.linger = max(config.linger_ms / 1000, TICK)
        """In seconds, like `delivery_timeout`."""
        self.delivery_timeout = config.delivery_timeout_ms / 1000
        self.always_allowed_bytes = min(config.max_request_size - REQUEST_BYTES, MAX_RECORD_BYTES)
        """A record of up to this size, as ``buffer_memory`` counts it, is within all limits."""
        # Not more than a record that is always allowed: then a record that is too large always
        # needs a reservation, which checks its size.
        self.reservation_bytes = max(min(RESERVATION_BYTES, self.always_allowed_bytes), 0)
        self.bind = binder(root)
        """Connects serializers that need a schema registry to the one of the log."""
        self.key_serializer = adapt_own(config.key_serializer, "serialize", "key")
        self.value_serializer = adapt_own(config.value_serializer, "serialize", "value")
        self.durability = None if config.acks == "all" else "os"
        self.synced = (self.durability or root.durability) == "fsync"
        """Whether each append waits for a flush."""
        self.start()

    def start(self) -> None:
        """Create what a forked child must not share with its parent; called again in a child."""
        self.lock = threading.Lock()
        """Guards what `send` collects, and the counts."""
        self.queues: dict[str, TopicQueue] = {}
        self.buffered = 0
        """Bytes of ``buffer_memory`` that unwritten records hold."""
        self._waiters = 0
        self._progress = threading.Condition(self.lock)
        self._identity: tuple[int, int] | None = None
        self._identity_lock = threading.Lock()
        self.abandoned = False
        """The producer was closed: what is not written fails."""
        self.fenced: EmbedlogError | None = None
        """The error that says that a newer producer has the name of this one."""
        name = self.config.transactional_id
        self.transactions: Transactions | None = None
        """What batches are added to instead of the log."""
        if name is not None:
            from embedlog.producer.transactions import Transactions

            self.transactions = Transactions(self.root, name, self.config)
        self.accepting = name is None
        """Whether records are accepted; between two transactions none are."""
        name = self.config.producer_name or name or ""
        self.client = Client(PRODUCER, name, self.config.client_id or "")
        """What listeners know of the producer."""
        self._topics: dict[str, TopicCounts] = {}
        self.unretrieved = UnretrievedErrors()
        self.failures: deque[FailedRecords] = deque()
        """Kept until `notify`: they may log when they are dropped."""
        self.with_callbacks: deque[Delivery] = deque()
        self._callback_lock = threading.Lock()
        self._callback_thread: int | None = None
        self.lines: deque[tuple[int, str, *tuple[object, ...]]] = deque()
        """For the log: the level, the text and its arguments."""
        self._warned_at: dict[str, float] = {}
        self.idle = True
        """The thread sleeps, or was not started: a `send` must wake it."""
        self._event = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._stopped = False

    def identity(self) -> tuple[int, int]:
        """Return the producer id and epoch, which the log assigns when they are first needed."""
        with self._identity_lock:
            if self._identity is None:
                self._identity = self.root.producer_identity(self.config.producer_name)
            return self._identity

    def drop_identity(self) -> None:
        """Have a new identity assigned when it is next needed."""
        self._identity = None

    # Transactions

    def accept(self, accepting: bool) -> None:
        """Accept records, or refuse them from now on; those that were accepted are drained."""
        with self.lock:
            self.accepting = accepting
            for queue in self.queues.values():
                queue.closed = not accepting
                # Its memory is used up: `send` asks for more, and is refused.
                queue.close_open()

    def refusal(self, topic: str) -> EmbedlogError:
        """Return the error of records that are not accepted."""
        if self.fenced is not None:
            return self.fenced
        if self.transactions is None or self.abandoned:
            return ClosedError("The producer was closed", topic=topic)
        return not_begun()

    # Memory

    def release_locked(self, size: int, done: Delivery | None = None) -> None:
        """Stop counting bytes that are written or failed.  The caller holds the lock."""
        self.buffered -= size
        if done is not None:
            if self._waiters:
                self._progress.notify_all()
            if done.callbacks:
                self.with_callbacks.append(done)

    def wait(self, seconds: float) -> None:
        """Wait until records were written or failed, for at most ``seconds`` (and 0.1 s)."""
        if seconds > 0:
            with self.lock:
                self.wait_locked(min(seconds, 0.1))

    def wait_locked(self, seconds: float) -> None:
        """Wait for progress; the caller holds the lock, which is released meanwhile."""
        self._waiters += 1
        try:
            self._progress.wait(seconds)
        finally:
            self._waiters -= 1

    # Reports

    def counts(self, topic: str) -> TopicCounts:
        """Return the counts for a topic, which begin at 0."""
        counts = self._topics.get(topic)
        return self._topics.setdefault(topic, TopicCounts()) if counts is None else counts

    def failed(
        self, topic: str, partition: int | None, count: int, error: BaseException
    ) -> FailedRecords:
        """Count records that failed; return what their delivery must keep."""
        with self.lock:
            self.counts(topic).errors += count
        if self.transactions is not None:
            self.transactions.note_failure(error)
        return self.unretrieved.add(topic, partition, count, error)

    def fail(self, delivery: Delivery, error: BaseException) -> None:
        """Fail records that are in no batches."""
        topic, count = delivery.queue.topic, len(delivery.values)
        delivery.failed = {None: self.failed(topic, None, count, error)}
        self.failures.extend(delivery.failed.values())
        delivery.seal(error)
        with self.lock:
            self.release_locked(delivery.reserved, delivery)

    def log(self, level: int, text: str, *args: object) -> None:
        """Have the next `notify` log a line."""
        self.lines.append((level, text, *args))

    def warn_of_wait(self, text: str, *args: object) -> None:
        """Have the next `notify` warn of a `LONG_WAIT`, at most once a minute for each text."""
        now = monotonic()
        if now >= self._warned_at.get(text, now):
            self._warned_at[text] = now + WARNING_INTERVAL
            self.log(logging.WARNING, text, *args)

    def notify(self) -> None:
        """Log lines, drop failures and run callbacks.  The caller holds no lock."""
        while self.lines:
            try:
                line = self.lines.popleft()
            except IndexError:
                break  # Another thread took it.
            LOGGER.log(*line)
        self.failures.clear()
        if self.with_callbacks:
            self.run_callbacks()

    def run_callbacks(self, wait: bool = False) -> None:
        """Run the callbacks that are due, in order, one thread at a time.

        Args:
            wait: Wait for another thread that is running callbacks, then run the rest.
        """
        this_thread = threading.get_ident()
        if self._callback_thread == this_thread:
            return
        while self.with_callbacks or wait:
            if not self._callback_lock.acquire(blocking=wait):
                return
            try:
                self._callback_thread = this_thread
                while self.with_callbacks:
                    due = deque(self.with_callbacks.popleft().due_callbacks())
                    while due:
                        run_callback(due.popleft())
            finally:
                self._callback_thread = None
                self._callback_lock.release()
            wait = False

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of the producer, as a whole and by topic."""
        topics = dict(self._topics)  # another thread may add one
        total = TopicCounts()
        for counts in topics.values():
            total.add(counts)
        values = {
            "record-send-total": total.records,
            "record-error-total": total.errors,
            "record-unretrieved-error-total": self.unretrieved.logged,
            "record-retry-total": total.retried,
            "byte-total": total.bytes,
            "batch-total": total.batches,
            "batch-duplicate-total": total.duplicates,
            "batch-size-avg": average(total.bytes, total.batches),
            "request-total": total.appends,
            "records-per-request-avg": average(total.records, total.appends),
            "request-latency-avg": average(1000 * total.append_seconds, total.appends),
            "request-latency-max": 1000 * total.longest_append,
            "record-queue-time-avg": average(1000 * total.wait_seconds, total.waits),
            "record-queue-time-max": 1000 * total.longest_wait,
            "buffer-total-bytes": self.config.buffer_memory,
            "buffer-available-bytes": self.config.buffer_memory - self.buffered,
        }
        for name, value in values.items():
            yield Sample(PRODUCER_METRICS, name, value, {})
        for topic, counts in topics.items():
            labels = {"topic": topic}
            yield Sample(PRODUCER_TOPIC, "record-send-total", counts.records, labels)
            yield Sample(PRODUCER_TOPIC, "record-error-total", counts.errors, labels)
            yield Sample(PRODUCER_TOPIC, "record-retry-total", counts.retried, labels)
            yield Sample(PRODUCER_TOPIC, "byte-total", counts.bytes, labels)

    # The background thread, which drains records that no caller waits for

    def start_thread(self) -> None:
        """Make the thread look for work soon, and start it if it does not run yet.

        Raises:
            RuntimeError: No thread can be started; the next call tries again.
        """
        if self._thread is None:
            with self._starting:
                if self._thread is None and not self._stopped:
                    # It does not keep the producer alive.
                    arguments = weakref.ref(self), self._event
                    thread = threading.Thread(
                        name="embedlog-producer", target=_run, args=arguments, daemon=True
                    )
                    thread.start()
                    self._thread = thread
        self._event.set()

    def wake(self) -> None:
        """Do as `start_thread` for records that were accepted, which must not be refused."""
        try:
            self.start_thread()
        except RuntimeError as error:
            LOGGER.warning("Records are written by the next call of the producer only: %s", error)

    def stop_thread(self, timeout: float = 1.0) -> None:
        """End the thread, which may be the caller's own, or busy with a last drain."""
        self._stopped = True
        self._event.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def drain_due(self) -> float | None:
        """Drain what is due; return in how many seconds the next drain is, or None."""
        now, next_due = monotonic(), None
        for queue in list(self.queues.values()):
            due = queue.due_at()
            if due is not None and due <= now:
                try:
                    # If another thread is draining, it will also write what was sent since.
                    queue.drain(wait=False)
                except EmbedlogError:
                    LOGGER.exception("Draining %s failed", queue.topic)
                due = queue.due_at()
            if due is not None:
                next_due = due if next_due is None else min(next_due, due)
        if next_due is None:
            return None
        return min(max(next_due - monotonic(), TICK), MAX_PAUSE)


def _run(reference: weakref.ref[Batcher], event: threading.Event) -> None:
    """Drain what is due, until the batcher is stopped or garbage-collected."""
    quiet = 0
    while (batcher := reference()) is not None and not batcher._stopped:
        batcher.idle = False
        due_in = batcher.drain_due()
        quiet = 0 if due_in is not None else quiet + 1
        pause = TICK if due_in is None else due_in
        if quiet >= QUIET_ROUNDS:
            quiet = 0
            # Under the lock of `send`, which reads `idle` and adds its record in one step.
            with batcher.lock:
                event.clear()
                batcher.idle = all(q.due_at() is None for q in batcher.queues.values())
            # `stop_thread` may have set the event before it was cleared.
            pause = FOREVER if batcher.idle and not batcher._stopped else TICK
        del batcher
        event.wait(pause)
        event.clear()


class TopicQueue:
    """What one producer sends to one topic.

    The producer's lock guards ``open`` and the additions to ``full``.  ``drain_lock`` guards
    everything else: batches are encoded and appended under it, so that they stay in order.
    """

    def __init__(self, batcher: Batcher, topic: str) -> None:
        self.batcher, self.topic = batcher, topic
        self.drain_lock = threading.Lock()
        self.is_awaited = False
        """Whether a task waits for what was collected, which therefore does not linger."""
        self.open = Delivery(self)
        self.full: deque[Delivery] = deque()
        """Each until its batches are with the writers."""
        self.closed = not batcher.accepting
        """Whether it refuses records."""
        self.writers: dict[int, PartitionWriter] = {}
        self.round_robin = RoundRobinPartitioner()
        self._retry_at = 0.0
        self._attempts = 0
        """Failed attempts to make batches of what was collected first."""
        self._counts = batcher.counts(topic)
        self._general = batcher.config.partitioner is not None or batcher.config.acks == 0
        self._waiting: dict[int, deque[ProducerBatch]] = {}
        """By partition: what the writers have not written."""
        self.row_partitioner = RowPartitioner(batcher.config, self._waiting)
        self.settings = TopicSettings(batcher, topic, self._settings_changed)

    def _settings_changed(self, settings: TopicSettings) -> None:
        typed = settings.row_encoder is not None
        self.plain = not (self._general or settings.serializes or typed)
        """Whether `send` may add a record of bytes as it is."""
        self.row_partitioner.partitions = settings.info.partitions
        self.row_partitioner.encoding = settings.encoding
        for writer in list(self.writers.values()):
            writer.update_listeners(settings.info.config)

    # Memory

    def reserve(self, size: int, value: Any, key: bytes | None, headers: Any) -> Delivery:
        """Return the open delivery, once it has memory for a record of ``size`` bytes.

        The caller holds the producer's lock, which is released while a full delivery is drained
        and while memory is waited for.

        Raises:
            RecordTooLargeError: The record is larger than any may be.
            BufferExhaustedError: ``max_block_ms`` passed.
            ClosedError: The producer was closed.
        """
        batcher, drain_bytes = self.batcher, self.settings.drain_bytes
        self.check_size(size, value, key, headers)
        began, drained = None, batcher.synced
        while not self.closed:
            delivery = self.open
            if delivery.free >= size:
                return delivery
            used = delivery.reserved - delivery.free
            if used >= drain_bytes and not drained:
                drained = True
                self._drain_unlocked([self], SHORT_WAIT)
                continue
            if used + size > CHUNK_BYTES and delivery.values:
                self.close_open()
                continue
            step = batcher.reservation_bytes
            if 0 < drain_bytes - used < step:
                step = drain_bytes - used
            memory = batcher.config.buffer_memory - batcher.buffered
            added = min(max(size, step) - delivery.free, memory)
            if delivery.free + added >= size:
                if not delivery.values:
                    # First, because the record is refused if no thread can be started.  Not
                    # needed for later ones: the thread sleeps only while nothing is collected.
                    if batcher.idle:
                        batcher.start_thread()
                    delivery.opened_at = now = monotonic()
                    delivery.deadline = now + batcher.delivery_timeout
                batcher.buffered += added
                delivery.reserved += added
                delivery.free += added
                return delivery
            now = monotonic()
            began = now if began is None else began
            self._wait_for_memory(now - began)
        raise batcher.refusal(self.topic)

    def check_size(self, size: int, value: Any, key: bytes | None, headers: Any) -> None:
        """Refuse a record of ``size`` bytes if it is larger than any may be.

        Raises:
            RecordTooLargeError: It is.
        """
        batcher = self.batcher
        if size > batcher.always_allowed_bytes:
            kafka_bytes = request_size(value, key, headers) if type(value) in PLAIN else size
            check_size(self.topic, size, kafka_bytes, batcher.config.max_request_size)

    def _wait_for_memory(self, waited: float) -> None:
        batcher, config = self.batcher, self.batcher.config
        before = batcher.buffered
        if waited > LONG_WAIT:
            # The drain below logs it.
            batcher.warn_of_wait(
                "send to %s has waited %.1f s for buffer_memory, of which %d bytes are unwritten"
                " (max_block_ms %d)",
                *(self.topic, waited, before, config.max_block_ms),
            )
        seconds_left = config.max_block_ms / 1000 - waited
        if seconds_left <= 0:
            raise BufferExhaustedError(
                f"{before} of {config.buffer_memory} bytes of buffer_memory are unwritten "
                f"after max_block_ms {config.max_block_ms}",
                topic=self.topic,
                todo="Flush, raise buffer_memory, or find out what holds the partition.",
            )
        self._drain_unlocked(list(batcher.queues.values()), min(seconds_left, SHORT_WAIT))
        if batcher.buffered >= before:
            batcher.wake()
            batcher.wait_locked(min(seconds_left, SHORT_WAIT))

    def _drain_unlocked(self, queues: Iterable[TopicQueue], lock_timeout: float) -> None:
        self.batcher.lock.release()
        try:
            for queue in queues:
                queue.drain(lock_timeout, wait=False)
        finally:
            self.batcher.lock.acquire()

    def close_open(self) -> None:
        """Have the open delivery drained, and begin another one.  The caller holds the lock."""
        delivery = self.open
        # So that deliveries that wait hold only what they need.
        self.batcher.buffered -= delivery.free
        delivery.reserved -= delivery.free
        delivery.free = 0
        if delivery.values:
            self.full.append(delivery)
        self.open = Delivery(self)

    # Draining

    def due_at(self) -> float | None:
        """Return when to drain, on the monotonic clock; None if there is nothing to drain."""
        times = [writer.retry_at for writer in list(self.writers.values()) if writer.waiting]
        delivery = self.open
        if delivery.values:
            times.append(0.0 if self.is_awaited else delivery.opened_at + self.batcher.linger)
        if self.full:
            times.append(self._retry_at)
        return min(times, default=None)

    def drain(self, lock_timeout: float | None = None, *, wait: bool = True) -> bool:
        """Write what was collected, in this thread; False if another thread is draining.

        Args:
            lock_timeout: Seconds to wait for the other thread, and for a partition's lock if
                that is shorter than usual; None to wait as long as it takes.
            wait: Whether to wait for the other thread.
        """
        drains = self.drain_lock.acquire(
            wait, -1 if lock_timeout is None or not wait else lock_timeout
        )
        if drains:
            try:
                self.drain_locked(lock_timeout)
            finally:
                self.drain_lock.release()
        # Also of the other thread, which may be retrying for minutes.
        self._after_drain()
        return drains

    def drain_for_task(self) -> None:
        """Write what a task waits for in this thread, which is that of its loop, or in the other.

        An append without a flush takes less than to wake the other thread; what waits, for the
        disk or for a lock, is left to that one.
        """
        try:
            if not self.batcher.synced:
                self.drain(TASK_WAIT, wait=False)
        finally:
            for writer in list(self.writers.values()):
                writer.retry_without_pause()
            if self.due_at() is not None:
                self.is_awaited = True
                self.batcher.wake()

    def _after_drain(self) -> None:
        """Report what was done without the lock, and end what was closed meanwhile."""
        batcher = self.batcher
        if batcher.abandoned and not self.closed:
            self.abandon()
        if batcher.lines or batcher.failures or batcher.with_callbacks:
            batcher.notify()

    def drain_locked(self, lock_timeout: float | None) -> None:
        """Encode what was collected, and append it.  The caller holds the ``drain_lock``.

        Args:
            lock_timeout: Seconds to wait for a partition's lock, if shorter than usual.
        """
        self.is_awaited = False
        if self.open.values:
            # `send` adds a record in several steps, and its thread may be stopped between any two.
            with self.batcher.lock:
                self.close_open()
        # In order: a delivery that cannot be encoded now holds up those after it.
        while self.full and self._retry_at <= monotonic() and self._hand_over(self.full[0]):
            self.full.popleft()
        for writer in list(self.writers.values()):
            if writer.waiting:
                writer.write(lock_timeout)

    def _hand_over(self, delivery: Delivery) -> bool:
        """Make batches of a delivery and hand them to the writers, or fail its records.

        After an interruption anywhere it may be called again.  Returns False if it must be.
        """
        if not delivery.sealed:
            waited = monotonic() - delivery.opened_at
            try:
                if self.settings.version != self.settings.current_version():
                    self.settings.refresh()
                order, encoded = self._encode(delivery)
                for partition, _ in encoded:
                    self.writer(partition)
            except Exception as error:  # noqa: BLE001 - kept, and raised by the futures
                return self._not_encoded(delivery, error, waited)
            self._attempts = 0
            self._counts.count_wait(waited)
            delivery.put_in_batches(order, encoded)
        for batch in delivery.batches:
            waiting = self.writers[batch.partition].waiting
            if not batch.done() and batch not in waiting:
                waiting.append(batch)
        return True

    def _encode(self, delivery: Delivery) -> tuple[Any, list[tuple[int, EncodedBatch]]]:
        """Return the order of the rows of a delivery in batches (None: as is), and the batches."""
        values, settings = delivery.values, self.settings
        typed = settings.row_encoder is not None or type(values[0]) not in PLAIN
        if len(values) == 1 and not typed:
            key, headers = delivery.keys[0], delivery.headers.get(0)
            if key is None and settings.compacts:
                raise no_key(self.topic, [0])
            return None, [
                self.row_partitioner.split_one(
                    values[0], key, delivery.timestamps[0], headers, delivery.partitions
                )
            ]
        rows: AnyRows = delivery.rows()
        if typed:
            from embedlog.producer.typed_rows import of_rows

            rows = of_rows(delivery.rows(), settings.info)
        self.check_keys([rows])
        order, batches = self.row_partitioner.split(rows, delivery.partitions, delivery.reserved)
        return order, list(batches)

    def _not_encoded(self, delivery: Delivery, error: Exception, waited: float) -> bool:
        """Fail the records of a delivery, unless it is tried again later; then return False."""
        batcher, config, now = self.batcher, self.batcher.config, monotonic()
        self._attempts += 1
        if isinstance(error, EmbedlogError) and error.retriable:
            if now < delivery.deadline:
                if waited - batcher.linger > LONG_WAIT:
                    batcher.warn_of_wait(
                        "Records for %s have waited %.1f s to be encoded, which is retried"
                        " until delivery_timeout_ms %d has passed: %s",
                        *(self.topic, waited, config.delivery_timeout_ms, error),
                    )
                self._retry_at = now + config.retry_backoff_ms / 1000
                batcher.wake()
                return False
            seconds = now - delivery.deadline + batcher.delivery_timeout
            error = final_error(error, config, self._attempts, seconds, {"topic": self.topic})
        self._attempts = 0
        batcher.fail(delivery, error)
        return True

    def writer(self, partition: int) -> PartitionWriter:
        """Return the writer of a partition, another one if the topic was deleted and created."""
        writer = self.writers.get(partition)
        if writer is None or writer.log.topic_id != self.settings.info.id:
            log = self.batcher.root.partition(self.topic, partition)
            if writer is not None:
                writer.write()
                error = UnknownTopicOrPartitionError(
                    "The topic was deleted before the record was written",
                    topic=self.topic,
                    partition=partition,
                    todo="Send the record again to write it to the topic that has the name now.",
                )
                writer.fail_all(error)
            self.writers[partition] = writer = PartitionWriter(self.batcher, log)
            self._waiting[partition] = writer.waiting
            writer.update_listeners(self.settings.info.config)
        return writer

    def needs_key(self, value: Any) -> bool:
        """Return whether the topic refuses a record without a key."""
        if type(value) not in PLAIN and value.values is None:
            return True
        # Refreshed because the topic may have been altered, and a refusal writes nothing.
        return self.settings.compacts and self.settings.refresh().config.compacts

    def check_keys(self, parts: Sequence[AnyRows]) -> None:
        """Refuse records without a key if the topic is compacted.

        Raises:
            InvalidRecordError: ``indices`` are the records without a key.
        """
        if self.settings.compacts:
            keys = [key for part in parts for key in key_list(part)]
            if None in keys:
                raise no_key(self.topic, [row for row, key in enumerate(keys) if key is None])

    # Whole batches

    def send_if(
        self,
        condition: AppendCondition,
        value: Any,
        key: bytes | None,
        headers: Any,
        partition: int | None,
        timestamp: int,
    ) -> Delivery:
        """Append one record now, as `send_batches` does, unless a condition does not hold."""

        def encode(delivery: Delivery) -> Batches:
            delivery.condition = condition
            delivery.values, delivery.keys, delivery.timestamps = [value], [key], [timestamp]
            delivery.note(0, headers, partition)
            return iter(self._encode(delivery)[1])

        return self.send_batches(encode, None)

    def send_batches(
        self, batches: Callable[[Delivery], Batches], numbered: tuple[int, int, int] | None
    ) -> Delivery:
        """Append batches now, in this thread, after everything that was sent before.

        Args:
            batches: Returns pairs of a partition and a batch, for a delivery, once everything that
                was sent before is appended.
            numbered: The partition, the first sequence number and the number of records, if the
                application numbers them.
        """
        delivery = Delivery(self)
        delivery.deadline = monotonic() + self.batcher.delivery_timeout
        try:
            with self.drain_lock:
                self.drain_locked(None)
                if self.closed:
                    raise self.batcher.refusal(self.topic)
                self._write_batches(delivery, batches(delivery), numbered)
            return delivery
        finally:
            delivery.seal()
            # If it failed, it must be garbage with its futures, even if this frame is kept.
            del delivery
            self._after_drain()

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
                    batch.receipt = Appended(-1, -1, None, True)
                    del batch.encoded, batch.delivery
                    continue
            with self.batcher.lock:
                self.batcher.buffered += batch.held
            waiting.append(batch)
        del delivery
        for writer in self.writers.values():
            if writer.waiting:
                writer.write()

    def _write_all(self, writer: PartitionWriter) -> None:
        """Append what waits before more is encoded, which keeps memory small."""
        writer.write()
        while writer.waiting:
            if self.batcher.abandoned:
                writer.fail_all(closed_early(self.topic))
                return
            self.batcher.wait(writer.retry_at - monotonic())
            writer.write()

    # Waiting and giving up

    def wait_for_progress(self, deadline: float | None) -> None:
        """Wait until another attempt may succeed, or until the deadline."""
        due = self.due_at()
        until = monotonic() + 0.05 if due is None else due
        if deadline is not None:
            until = min(until, deadline)
        self.batcher.wait(until - monotonic())

    def flush(self, deadline: float | None) -> None:
        """Return once all that was sent before is written or failed.

        Raises:
            TimeoutError: The deadline passed before.
        """
        with self.batcher.lock:
            unfinished: list[Any] = [*self.full, *self._waiting_batches()]
            if self.open.values:
                unfinished.append(self.open)
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

    def _waiting_batches(self) -> list[ProducerBatch]:
        writers = list(self.writers.values())
        return [batch for writer in writers for batch in tuple(writer.waiting)]

    def unsent_records(self) -> int:
        """Return how many records are not written yet."""
        collected = sum(len(delivery.values) for delivery in (*self.full, self.open))
        return collected + sum(batch.count for batch in self._waiting_batches())

    def after_fork(self) -> None:
        """Fail, in a forked child, the records that the parent writes."""
        error = IllegalStateError(
            "The record was sent before the fork", topic=self.topic, todo="The parent writes it."
        )
        for delivery in (*self.full, self.open):
            delivery.seal(error)
        for batch in self._waiting_batches():
            batch.error = error

    def abandon(self) -> None:
        """Fail what is not written, and accept no more; what another thread drains, after that."""
        if not self.drain_lock.acquire(timeout=0.1):
            return
        try:
            with self.batcher.lock:
                self.closed = True
                self.close_open()
            error = closed_early(self.topic)
            for delivery in self.full:
                if delivery.sealed:
                    self._hand_over(delivery)
                else:
                    self.batcher.fail(delivery, error)
            self.full.clear()
            for writer in self.writers.values():
                writer.fail_all(error)
        finally:
            self.drain_lock.release()


def closed_early(topic: str) -> ClosedError:
    """Return the error of a record whose producer was closed before the record was written."""
    return ClosedError("The producer was closed before the record was written", topic=topic)


def not_begun() -> IllegalStateError:
    """Return the error of what is only possible in a transaction."""
    return IllegalStateError("No transaction has begun", todo="Call begin_transaction first.")


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
