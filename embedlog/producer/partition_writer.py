"""Writes the batches of one producer to one partition: in order, numbered, and with retries.

The caller holds the drain lock of the topic's queue.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from time import monotonic
from typing import Any

from embedlog.batch import EncodedBatch
from embedlog.config import ProducerConfig, TopicConfig
from embedlog.errors import (
    ClosedError,
    DurabilityError,
    EmbedlogError,
    InvalidProducerEpochError,
    LockTimeoutError,
)
from embedlog.lazy import logging
from embedlog.listeners import Listener
from embedlog.partition import PartitionLog, producer_state
from embedlog.partition.producer_state import (
    LAST_SEQUENCE,
    REMEMBERED,
    ProducerState,
    SentBatch,
    fence_producer,
    read_producer,
)
from embedlog.producer.context import ProducerContext
from embedlog.producer.delivery import OpenBatch, ProducerBatch
from embedlog.producer.delivery_reports import LONG_WAIT
from embedlog.record import Appended, RecordMetadata

MAX_BACKOFF = 1.0


class PartitionWriter:
    """Batches that wait for one partition, and the producer's sequence numbers there.

    A batch gets its sequence number at the first attempt and keeps it in retries, so
    that the log can tell whether it has the batch.  When a batch fails for good, the log is
    asked which batches it has, and the next batch continues there: no gap is left.
    """

    def __init__(self, context: ProducerContext, log: PartitionLog) -> None:
        self.log, self._where = log, (log.topic, log.partition)
        self._acks = context.config.acks
        self.waiting: deque[ProducerBatch] = deque()
        self.retry_at = 0.0
        self._context, self._reports = context, context.reports
        self._counts = context.reports.counts(log.topic)
        self._idempotent = context.config.enable_idempotence
        self._durability = context.durability
        self._identity: tuple[int, int] | None = None
        self._next_sequence: int | None = None
        self._attempts = self._short_attempts = 0
        """Attempts to append the first waiting batch, and those of them with a lock timeout
        shorter than that of an append, which do not count against ``retries``."""
        self._failing_since = 0.0
        """When the first of the attempts that failed since the last success began, if any did."""
        self._warned = False
        """The log has a warning that appends fail."""
        # One append waits request_timeout_ms for its locks, but no longer than other appends do.
        self._lock_timeout = min(context.config.request_timeout_ms / 1000, log.context.lock_timeout)
        self._listeners: tuple[Listener, ...] = ()
        """Those of the topic."""
        self._append_singly = 0
        """How many batches to append one by one, to find the one that the log refuses."""

    # Sequence numbers

    def resume(self) -> ProducerState | None:
        """Continue the numbering where the log ends, and return its producer state."""
        identity = self._context.identity()
        state = None
        if self._identity != identity:
            if self._context.config.producer_name is not None:
                state = fence_producer(self.log, *identity, self._lock_timeout)
            self._identity = identity
            for listener in self._listeners:
                listener.identified(self.log, identity)
        else:
            state = read_producer(self.log, identity[0])
        last = state.batches[-1].last_sequence if state is not None and state.batches else None
        self._next_sequence = 0 if last is None else producer_state.after(last, 1)
        return state

    def update_listeners(self, config: TopicConfig) -> None:
        """Take the listeners that have subscribed to a topic with these settings."""
        client, before = self._context.client, self._listeners
        self._listeners = self._context.root.listeners.of(config, client)
        for listener in before:
            if listener not in self._listeners:
                listener.ceased(self.log)
        if self._identity is not None:
            for listener in self._listeners:
                if listener not in before:
                    listener.identified(self.log, self._identity)

    def _assign_sequences(self, group: list[ProducerBatch]) -> None:
        if self._next_sequence is None or self._identity is None:
            self.resume()
        assert self._next_sequence is not None
        assert self._identity is not None
        for batch in group:
            if batch.sequence is None:
                batch.sequence = self._next_sequence
            self._next_sequence = producer_state.after(batch.sequence, batch.count)
            assert batch.encoded is not None
            batch.encoded.set_producer(*self._identity, batch.sequence)

    def _find_written(self, group: list[ProducerBatch]) -> dict[int | None, SentBatch]:
        """Return the batches that the log has, by sequence; number the others again."""
        self._next_sequence = None
        try:
            state = None if self._identity is None else read_producer(self.log, self._identity[0])
        except EmbedlogError:
            # With a new identity no batch can be mistaken for a repeat.
            self._context.drop_identity()
            self._identity, state = None, None
        in_log = {} if state is None else {sent.first_sequence: sent for sent in state.batches}
        written: dict[int | None, SentBatch] = {}
        for batch in group:
            sent = None if batch.sequence is None else in_log.get(batch.sequence)
            if sent is not None and sent.last_sequence == producer_state.after(
                sent.first_sequence, batch.count - 1
            ):
                written[batch.sequence] = sent
            elif not batch.explicit:
                batch.sequence = None
        return written

    # Appending

    def write(self, lock_timeout: float | None = None) -> None:
        """Append the waiting batches in order, until none is left or one must be retried later.

        Args:
            lock_timeout: Seconds to wait for the partition's lock, if shorter than usual.
        """
        if lock_timeout is None or lock_timeout > self._lock_timeout:
            lock_timeout = self._lock_timeout
        while self.waiting and not (self.retry_at and monotonic() < self.retry_at):
            # No more batches at once than the log remembers, to detect repeats.
            group = list(islice(self.waiting, REMEMBERED if self._idempotent else 1))
            if self._append_singly:
                self._append_singly -= 1
                del group[1:]
            began = monotonic()
            try:
                if self._idempotent:
                    self._assign_sequences(group)
                began = monotonic()
                receipts = self.log.append(
                    [batch.encoded for batch in group if batch.encoded is not None],
                    durability=self._durability,
                    timeout=lock_timeout,
                    acks=self._acks,
                )
            except Exception as error:  # noqa: BLE001 - kept, and raised by the futures
                self._failed(group, error, lock_timeout < self._lock_timeout, began)
            else:
                seconds = monotonic() - began
                self._attempts, self._short_attempts, self.retry_at = 0, 0, 0.0
                if self._failing_since:
                    self._succeeded_again()
                self._counts.count_append(seconds)
                if seconds > LONG_WAIT:
                    self._warn_of_slow_append(seconds)
                for _, receipt in zip(group, receipts, strict=True):
                    self._finish_first(receipt)

    def can_write_fast(self) -> bool:
        """Return whether no batch waits or is retried, and the next sequence number is known."""
        is_numbered = self._next_sequence is not None or not self._idempotent
        return is_numbered and not self.waiting and not self._failing_since

    def write_one_fast(
        self, open_batch: OpenBatch, encoded: EncodedBatch, lock_timeout: float | None
    ) -> None:
        """Append one record as `write` does, if `can_write_fast`.

        Skips the waiting queue: a `ProducerBatch` is created only if the append fails.
        """
        if lock_timeout is None or lock_timeout > self._lock_timeout:
            lock_timeout = self._lock_timeout
        sequence = self._next_sequence
        if sequence is not None and self._identity is not None:
            encoded.set_producer(*self._identity, sequence)
            self._next_sequence = sequence + 1 & LAST_SEQUENCE
        log, counts = self.log, self._counts
        try:
            began = monotonic()
            counts.count_wait(began - open_batch.opened_at)
            receipt = log.append(
                [encoded], durability=self._durability, timeout=lock_timeout, acks=self._acks
            )[0]
            timestamp = receipt.timestamp
            if timestamp is None:
                timestamp = open_batch.timestamps[0]
            fields = log.topic, log.partition, receipt.base_offset, timestamp
            # A third of the time of the named tuple's own constructor, which is in Python.
            open_batch.metadata = tuple.__new__(RecordMetadata, fields)
        except BaseException as error:
            batch = open_batch.add_batch(log.partition, encoded)
            batch.sequence = sequence
            self.waiting.append(batch)
            open_batch.seal()
            self._context.buffer_pool.release(open_batch.reserved - encoded.size)
            if not isinstance(error, Exception):
                raise
            # It must be garbage with its futures, even if this frame is kept.
            del open_batch
            self._failed([batch], error, lock_timeout < self._lock_timeout, began)
        else:
            open_batch.seal()
            seconds = monotonic() - began
            counts.count_append(seconds)
            if seconds > LONG_WAIT:
                self._warn_of_slow_append(seconds)
            self._reports.record_written(open_batch, counts, encoded.size, receipt.duplicate)
            for listener in self._listeners:
                listener.written(log, receipt, encoded, self._identity)

    def _finish_first(
        self, receipt: Appended | None = None, error: BaseException | None = None
    ) -> None:
        """Set the outcome of the first waiting batch, remove it, and report it."""
        batch = self.waiting[0]
        if receipt is not None and batch.encoded is not None:
            for listener in self._listeners:
                listener.written(self.log, receipt, batch.encoded, self._identity)
        batch.receipt = receipt
        if error is not None:
            self._reports.batch_failed(batch, error)
        self.waiting.popleft()
        batch.encoded = None
        self._reports.batch_done(batch)

    # Failing

    def _failed(
        self, group: list[ProducerBatch], error: Exception, short: bool, began: float
    ) -> None:
        if isinstance(error, InvalidProducerEpochError):
            self._context.fenced = error
            self.fail_all(error)
        elif getattr(error, "retriable", False):
            self._short_attempts += short and isinstance(error, LockTimeoutError)
            self._failing_since = self._failing_since or began
            self._retry_later(group, error)
        elif len(group) > 1 and not isinstance(error, DurabilityError):
            self._find_written(group)
            self._append_singly = len(group)
        else:
            if self._idempotent:
                self._find_written(list(self.waiting))
            self._fail(group, error)

    def _retry_later(self, group: list[ProducerBatch], error: Exception) -> None:
        """Schedule the next attempt; if there is none, fail the batches that the log does not have.

        Batches that fail are never written later.  With "fsync" a batch in the log fails,
        too, unless it was flushed; its error says so.
        """
        config, now = self._context.config, monotonic()
        self._attempts += 1
        counted = self._attempts - self._short_attempts
        if counted <= config.retries and now < group[0].deadline:
            exponent = min(self._attempts - 1, 30)
            backoff = min(config.retry_backoff_ms / 1000 * 2**exponent, MAX_BACKOFF)
            self.retry_at = min(now + backoff, group[0].deadline)
            self._counts.retried += sum(batch.count for batch in group)
            self._warn_if_failing(error)
            self._context.sender.wake()
            return
        attempts, self._attempts, self._short_attempts, self.retry_at = self._attempts, 0, 0, 0.0
        expired = [batch for batch in group if now >= batch.deadline]
        written = self._find_written(list(self.waiting)) if self._idempotent else {}
        for batch in expired or group:
            sent = written.get(batch.sequence)
            if batch.done():
                continue  # It failed with an earlier batch of its delivery.
            if sent is not None and not self._context.synced:
                self._finish_first(Appended(sent.base_offset, sent.next_offset, None, True))
            else:
                seconds = monotonic() - batch.deadline + self._context.delivery_timeout
                self._fail(
                    [batch],
                    final_error(error, config, attempts, seconds, self.log.where, sent is not None),
                )

    def _fail(self, group: list[ProducerBatch], error: BaseException) -> None:
        """Fail the first waiting batches, and those that must follow them without a gap."""
        delivery, explicit = group[-1].delivery, group[-1].explicit
        for _ in group:
            self._finish_first(error=error)
        while explicit and self.waiting and self.waiting[0].delivery is delivery:
            self._finish_first(error=error)

    def fail_all(self, error: BaseException) -> None:
        """Fail everything that waits."""
        while self.waiting:
            self._finish_first(error=error)

    # Lines for the log

    def _warn_if_failing(self, error: Exception) -> None:
        seconds = monotonic() - self._failing_since
        if seconds > LONG_WAIT and not self._warned:
            self._warned = True
            self._reports.log(
                logging.WARNING,
                "Appends to %s-%d have failed for %.1f s and are retried until"
                " delivery_timeout_ms %d has passed: %s",
                *(*self._where, seconds),
                *(self._context.config.delivery_timeout_ms, error),
            )

    def _succeeded_again(self) -> None:
        seconds, self._failing_since = monotonic() - self._failing_since, 0.0
        if self._warned:
            self._warned = False
            text = "Appends to %s-%d succeed again after %.1f s"
            self._reports.log(logging.INFO, text, *self._where, seconds)

    def _warn_of_slow_append(self, seconds: float) -> None:
        text = "An append to %s-%d took %.1f s; it waited for the disk or a lock"
        self._reports.warn_of_wait(text, *self._where, seconds)


def closed_early(topic: str) -> ClosedError:
    """Return the error of a record whose producer was closed before the record was written."""
    return ClosedError("The producer was closed before the record was written", topic=topic)


def final_error(
    error: Exception,
    config: ProducerConfig,
    attempts: int,
    seconds: float,
    where: dict[str, Any],
    written: bool = False,
) -> EmbedlogError:
    """Return the error of records that are not retried any more: that of their last attempt.

    Its text also says how long they waited, and which setting ended that.

    Args:
        error: The error of the last attempt.
        config: The settings of the producer.
        attempts: How many attempts there were.
        seconds: How long ago the first record was sent.
        where: The topic, and the partition if it is known.
        written: Whether the log has the records, and only the flush failed.
    """
    assert isinstance(error, EmbedlogError), "only retriable errors are retried"
    limit = f"retries {config.retries}"
    if seconds >= config.delivery_timeout_ms / 1000:
        limit = f"delivery_timeout_ms {config.delivery_timeout_ms}"
    todo = "The record will not appear later; send it again."
    if written:
        todo = "The record is in the log: call flush() of the log instead of sending it again."
    failed = type(error)(
        f"{error.what}; the record was not {'flushed' if written else 'written'} after {attempts} "
        f"attempt{'' if attempts == 1 else 's'} in {seconds:.3f} s ({limit})",
        todo=f"{error.todo} {todo}" if error.todo else todo,
        **{**where, **error.facts},
    )
    failed.__cause__ = error
    return failed
