"""Writes the batches of one producer to one partition: in order, numbered, and with retries.

The caller holds the drain lock of the topic's queue.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Any

from embedlog.config import ProducerConfig, TopicConfig
from embedlog.errors import (
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
from embedlog.producer.future import ProducerBatch
from embedlog.record import Appended

if TYPE_CHECKING:
    from embedlog.producer.batcher import Batcher
    from embedlog.producer.transactions import Transactions

MAX_BACKOFF = 1.0
_STAGED = Appended(-1, -1, None)
LONG_WAIT = 1.0
"""Seconds of retries, of one append, or of a `send` without memory, that are worth a warning."""


class TopicCounts:
    """What a producer counts for one topic: per batch and append, never per record.

    The outcomes of records are counted under the producer's lock; appends and the time before
    them by the only thread that drains the topic.
    """

    def __init__(self) -> None:
        self.records = self.batches = self.bytes = self.duplicates = self.errors = self.retried = 0
        self.appends = self.waits = 0
        self.append_seconds = self.longest_append = 0.0
        self.wait_seconds = self.longest_wait = 0.0
        """How long deliveries waited for a drain."""

    def count_append(self, seconds: float) -> None:
        """Count an append of one or more batches."""
        self.appends += 1
        self.append_seconds += seconds
        if seconds > self.longest_append:
            self.longest_append = seconds

    def count_wait(self, seconds: float) -> None:
        """Count a delivery, and the time since its first record."""
        self.waits += 1
        self.wait_seconds += seconds
        if seconds > self.longest_wait:
            self.longest_wait = seconds

    def add(self, other: TopicCounts) -> None:
        """Add the counts of another topic."""
        for name, value in vars(other).items():
            before = getattr(self, name)
            setattr(self, name, max(before, value) if "longest" in name else before + value)


class PartitionWriter:
    """Batches that wait for one partition, and the producer's sequence numbers there.

    A batch gets its sequence number at the first attempt and keeps it in retries, so
    that the log can tell whether it has the batch.  When a batch fails for good, the log is
    asked which batches it has, and the next batch continues there: no gap is left.
    """

    def __init__(self, batcher: Batcher, log: PartitionLog) -> None:
        self.log, self._where = log, (log.topic, log.partition)
        self._acks = batcher.config.acks
        self.waiting: deque[ProducerBatch] = deque()
        self.retry_at = 0.0
        self._batcher = batcher
        self._counts = batcher.counts(log.topic)
        self._idempotent = batcher.config.enable_idempotence
        self._durability = batcher.durability
        self._identity: tuple[int, int] | None = None
        self._next_sequence: int | None = None
        self._attempts = self._short_attempts = 0
        """Attempts to append the first waiting batch, and those of them with a lock timeout
        shorter than that of an append, which do not count against ``retries``."""
        self._gave_way = False
        """Whether the last attempt was such a short one."""
        self._failing_since = 0.0
        """When the first of the attempts that failed since the last success began, if any did."""
        self._warned = False
        """The log has a warning that appends fail."""
        # One append waits request_timeout_ms for its locks, but no longer than other appends do.
        self._lock_timeout = min(batcher.config.request_timeout_ms / 1000, log.context.lock_timeout)
        self._listeners: tuple[Listener, ...] = ()
        """Those of the topic."""
        self._append_singly = 0
        """How many batches to append one by one, to find the one that the log refuses."""

    # Sequence numbers

    def resume(self) -> ProducerState | None:
        """Continue the numbering where the log ends, and return its producer state."""
        identity = self._batcher.identity()
        state = None
        if self._identity != identity:
            if self._batcher.config.producer_name is not None:
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
        if self._batcher.transactions is not None:
            return  # They hear of what is published.
        client, before = self._batcher.client, self._listeners
        self._listeners = self._batcher.root.listeners.of(config, client)
        for listener in before:
            if listener not in self._listeners:
                listener.ceased(self.log)
        if self._identity is not None:
            for listener in self._listeners:
                if listener not in before:
                    listener.identified(self.log, self._identity)

    def _find_written(self, group: list[ProducerBatch]) -> dict[int | None, SentBatch]:
        """Return the batches that the log has, by sequence; number the others again."""
        self._next_sequence = None
        try:
            state = None if self._identity is None else read_producer(self.log, self._identity[0])
        except EmbedlogError:
            # With a new identity no batch can be mistaken for a repeat.
            self._batcher.drop_identity()
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
        if self._batcher.transactions is not None:
            self._stage(self._batcher.transactions)
            return
        if lock_timeout is None or lock_timeout > self._lock_timeout:
            lock_timeout = self._lock_timeout
        while self.waiting and not (self.retry_at and monotonic() < self.retry_at):
            # No more batches at once than the log remembers, to detect repeats.
            group = list(islice(self.waiting, REMEMBERED if self._idempotent else 1))
            if self._append_singly:
                self._append_singly -= 1
                del group[1:]
            elif len(group) > 1 and any(batch.delivery.condition for batch in group):
                # A condition is about what is in the log, and not about batches beside it.
                del group[1:]
            condition = group[0].delivery.condition
            began = monotonic()
            try:
                if self._idempotent and (self._next_sequence is None or self._identity is None):
                    self.resume()
                    began = monotonic()
                sequence, identity, encoded = self._next_sequence, self._identity, []
                for batch in group:
                    if sequence is not None and identity is not None:
                        if batch.sequence is None:
                            batch.sequence = sequence
                        self._next_sequence = sequence = (
                            batch.sequence + batch.count & LAST_SEQUENCE
                        )
                        batch.encoded.set_producer(*identity, batch.sequence)
                    encoded.append(batch.encoded)
                receipts = self.log.append(
                    encoded,
                    durability=self._durability,
                    timeout=lock_timeout,
                    acks=self._acks,
                    condition=condition,
                )
            except Exception as error:  # noqa: BLE001 - kept, and raised by the futures
                self._failed(group, error, lock_timeout < self._lock_timeout, began)
                continue
            seconds = monotonic() - began
            self._attempts = self._short_attempts = 0
            self.retry_at = 0.0
            if self._failing_since:
                failed_for, self._failing_since = monotonic() - self._failing_since, 0.0
                if self._warned:
                    self._warned = False
                    text = "Appends to %s-%d succeed again after %.1f s"
                    self._batcher.log(logging.INFO, text, *self._where, failed_for)
            self._counts.count_append(seconds)
            if seconds > LONG_WAIT:
                text = "An append to %s-%d took %.1f s; it waited for the disk or a lock"
                self._batcher.warn_of_wait(text, *self._where, seconds)
            for receipt in receipts:
                self._finish_first(receipt)

    def retry_without_pause(self) -> None:
        """Have the next attempt made at once if the last one did not wait long for the lock."""
        if self._gave_way:
            self._gave_way, self.retry_at = False, 0.0

    def _stage(self, transactions: Transactions) -> None:
        """Add the waiting batches to a transaction; their offsets are not known before its end."""
        while self.waiting:
            try:
                batch = self.waiting[0]
                transactions.stage(self.log, batch.encoded, batch.delivery.condition)
            except Exception as error:  # noqa: BLE001 - kept, and raised by the commit
                self._finish_first(error=error)
            else:
                self._finish_first(_STAGED)

    def _finish_first(
        self, receipt: Appended | None = None, error: BaseException | None = None
    ) -> None:
        """Set the outcome of the first waiting batch, count it, and remove it."""
        batch, batcher, counts = self.waiting[0], self._batcher, self._counts
        delivery = batch.delivery
        if error is not None:
            failed = batcher.failed(self.log.topic, self.log.partition, batch.count, error)
            batcher.failures.append(failed)
            delivery.failed = {**(delivery.failed or {}), batch.start: failed}
            batch.error = error
        elif receipt is not None:
            for listener in self._listeners:
                listener.written(self.log, receipt, batch.encoded, self._identity)
        with batcher.lock:
            if receipt is not None:
                batch.receipt = receipt
                counts.batches += 1
                counts.records += batch.count
                counts.bytes += batch.size
                counts.duplicates += receipt.duplicate
            batcher.release_locked(batch.held, delivery)
        self.waiting.popleft()
        # It must be garbage with its futures, even if the frames of a drain are kept.
        del batch.encoded, batch.delivery

    # Failing

    def _failed(
        self, group: list[ProducerBatch], error: Exception, short: bool, began: float
    ) -> None:
        if isinstance(error, InvalidProducerEpochError):
            self._batcher.fenced = error
            self.fail_all(error)
        elif getattr(error, "retriable", False):
            self._gave_way = short and isinstance(error, LockTimeoutError)
            self._short_attempts += self._gave_way
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
        config, now = self._batcher.config, monotonic()
        self._attempts += 1
        counted = self._attempts - self._short_attempts
        if counted <= config.retries and now < group[0].deadline:
            exponent = min(self._attempts - 1, 30)
            backoff = min(config.retry_backoff_ms / 1000 * 2**exponent, MAX_BACKOFF)
            self.retry_at = min(now + backoff, group[0].deadline)
            self._counts.retried += sum(batch.count for batch in group)
            failing = now - self._failing_since
            if failing > LONG_WAIT and not self._warned:
                self._warned = True
                self._batcher.log(
                    logging.WARNING,
                    "Appends to %s-%d have failed for %.1f s and are retried until"
                    " delivery_timeout_ms %d has passed: %s",
                    *(*self._where, failing, config.delivery_timeout_ms, error),
                )
            self._batcher.wake()
            return
        attempts, self._attempts, self._short_attempts, self.retry_at = self._attempts, 0, 0, 0.0
        expired = [batch for batch in group if now >= batch.deadline]
        written = self._find_written(list(self.waiting)) if self._idempotent else {}
        for batch in expired or group:
            sent = written.get(batch.sequence)
            if batch.done():
                continue  # It failed with an earlier batch of its delivery.
            if sent is not None and not self._batcher.synced:
                self._finish_first(Appended(sent.base_offset, sent.next_offset, None, True))
            else:
                seconds = monotonic() - batch.deadline + self._batcher.delivery_timeout
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
