"""One producer's way to one partition: batches in order, numbered, and tried again.

Everything here runs under the drain lock of the topic's queue.
"""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import TYPE_CHECKING

from embedlog.errors import (
    ClosedError,
    DiskFullError,
    DurabilityError,
    EmbedlogError,
    InvalidProducerEpochError,
    LockTimeoutError,
    TimeoutError,  # noqa: A004 - it is one
)
from embedlog.partition import PartitionLog, producer_state
from embedlog.partition.fence_producer import fence_producer, known
from embedlog.partition.producer_state import LAST_SEQUENCE, REMEMBERED, SentBatch
from embedlog.producer.future import ProducerBatch
from embedlog.record import Appended, RecordMetadata

if TYPE_CHECKING:
    from embedlog.batch import EncodedBatch
    from embedlog.partition.producer_state import ProducerState as Known
    from embedlog.producer import Producer
    from embedlog.producer.topic_queue import OpenBatch

MAX_BACKOFF = 1.0


class PartitionWriter:
    """Batches that wait for one partition, and the producer's numbering there.

    A number is given to a batch when it is first tried, and kept when it is
    tried again (G12): so the log can tell whether it has it.  After a failure
    for good the log is asked what it has, and the next batch goes on there, so
    no gap is left.
    """

    def __init__(self, producer: Producer, log: PartitionLog) -> None:
        self.log = log
        self.waiting: deque[ProducerBatch] = deque()
        self.retry_at = 0.0
        self._producer, self._reports = producer, producer.reports
        self._numbers = producer.config.enable_idempotence
        self._durability = producer.durability
        self._identity: tuple[int, int] | None = None
        self._next: int | None = None
        self._tries = self._hurried = 0
        """How often the first of the waiting was tried, and how often of these with less
        patience than an append has: such a try does not count against ``retries``."""
        # One append gets request_timeout_ms for its locks, but no more than others do.
        self._patience = min(producer.config.request_timeout_ms / 1000, log.context.lock_timeout)
        self._singly = 0
        """How many batches to append one by one, to find the one that is refused."""

    # Numbers

    def begin(self) -> Known | None:
        """Take the numbering over, or up again; return what the log knows of it (G15, G17)."""
        identity = self._producer.identity()
        found = None
        if self._identity != identity:
            if self._producer.config.producer_name is not None:
                found = fence_producer(self.log, *identity, self._patience)
            self._identity = identity
        else:
            found = known(self.log, identity[0])
        last = found.batches[-1].last_sequence if found is not None and found.batches else None
        self._next = 0 if last is None else producer_state.after(last, 1)
        return found

    def _number(self, group: list[ProducerBatch]) -> None:
        if self._next is None or self._identity is None:
            self.begin()
        assert self._next is not None
        assert self._identity is not None
        for parcel in group:
            if parcel.sequence is None:
                parcel.sequence = self._next
            self._next = producer_state.after(parcel.sequence, parcel.count)
            assert parcel.encoded is not None
            parcel.encoded.sequence(*self._identity, parcel.sequence)

    def _recall(self, group: list[ProducerBatch]) -> dict[int, SentBatch]:
        """Ask the log which of a group it has (by sequence); the others get new numbers."""
        self._next = None
        try:
            found = None if self._identity is None else known(self.log, self._identity[0])
        except EmbedlogError:
            # A new identity instead: nothing can be mistaken for a repeat then.
            self._producer.forget_identity()
            self._identity, found = None, None
        theirs = {} if found is None else {sent.first_sequence: sent for sent in found.batches}
        sent_now: dict[int, SentBatch] = {}
        for parcel in group:
            sent = theirs.get(-1 if parcel.sequence is None else parcel.sequence)
            if sent is not None and producer_state.after(sent.first_sequence, parcel.count - 1) == (
                sent.last_sequence
            ):
                sent_now[sent.first_sequence] = sent
            elif not parcel.explicit:
                parcel.sequence = None
        return sent_now

    # Appending

    def ship(self, patience: float | None = None) -> None:
        """Append what waits, in order, until done or something must be tried again later.

        Args:
            patience: Seconds to wait for the partition's lock, if fewer than usual.
        """
        if patience is None or patience > self._patience:
            patience = self._patience
        while self.waiting and not (self.retry_at and monotonic() < self.retry_at):
            group = self._group()
            try:
                if self._numbers:
                    self._number(group)
                receipts = self.log.append(
                    [parcel.encoded for parcel in group if parcel.encoded is not None],
                    durability=self._durability,
                    timeout=patience,
                )
            except Exception as error:  # noqa: BLE001 - kept, and raised by the futures
                self._failed(group, error, patience < self._patience)
            else:
                self._written(group, receipts)

    def calm(self) -> bool:
        """Whether nothing waits, is tried again, or must be asked first."""
        return not (self.waiting or self.retry_at or (self._numbers and self._next is None))

    def ship_alone(
        self, gathering: OpenBatch, encoded: EncodedBatch, patience: float | None
    ) -> None:
        """As `ship`, for one record and a lane that is `calm`: a parcel is made if this fails."""
        if patience is None or patience > self._patience:
            patience = self._patience
        number = self._next
        if number is not None and self._identity is not None:
            encoded.producer_id, encoded.producer_epoch = self._identity
            encoded.base_sequence = number
            self._next = number + 1 & LAST_SEQUENCE
        log = self.log
        try:
            receipt = log.append([encoded], durability=self._durability, timeout=patience)[0]
            at = gathering.timestamps[0] if receipt.timestamp is None else receipt.timestamp
            found = log.topic, log.partition, receipt.base_offset, at
            # A third of the time of the named tuple's own constructor, which is in Python.
            gathering.alone = tuple.__new__(RecordMetadata, found)
        except BaseException as error:
            parcel = gathering.add(log.partition, encoded)
            parcel.sequence = number
            self.waiting.append(parcel)
            gathering.seal()
            self._producer.room.release(gathering.granted - encoded.size)
            if not isinstance(error, Exception):
                raise
            self._failed([parcel], error, patience < self._patience)
        else:
            gathering.seal()
            self._reports.written_alone(gathering, encoded.size, receipt.duplicate)

    def _group(self) -> list[ProducerBatch]:
        """Return the batches for one append: no more than the log remembers, for a repeat."""
        most = 1
        if self._singly:
            self._singly -= 1
        elif self._numbers:
            most = REMEMBERED
        if most == 1 or len(self.waiting) == 1:
            return [self.waiting[0]]
        return [self.waiting[i] for i in range(min(most, len(self.waiting)))]

    def _written(self, group: list[ProducerBatch], receipts: list[Appended]) -> None:
        self._tries, self._hurried, self.retry_at = 0, 0, 0.0
        for parcel, receipt in zip(group, receipts, strict=True):
            parcel.receipt = receipt
            self._settle()

    def _settle(self) -> None:
        """The first of the waiting is written, or failed: let it go."""
        parcel = self.waiting.popleft()
        parcel.encoded = None
        self._reports.settled(parcel)

    # Failing

    def _failed(self, group: list[ProducerBatch], error: Exception, hurried: bool) -> None:
        if isinstance(error, InvalidProducerEpochError):
            self._producer.fenced = error
            self.give_up(error)
        elif getattr(error, "retriable", False):
            self._hurried += hurried and isinstance(error, LockTimeoutError)
            self._try_later(group, error)
        elif len(group) > 1 and not isinstance(error, DurabilityError):
            self._recall(group)
            self._singly = len(group)
        else:
            if self._numbers:
                self._recall(list(self.waiting))
            self._drop(group, error)

    def _try_later(self, group: list[ProducerBatch], error: Exception) -> None:
        config, now = self._producer.config, monotonic()
        self._tries += 1
        counted = self._tries - self._hurried
        if counted <= config.retries and now < group[0].deadline:
            exponent = min(self._tries - 1, 30)
            pause = min(config.retry_backoff_ms / 1000 * 2**exponent, MAX_BACKOFF)
            self.retry_at = min(now + pause, group[0].deadline)
            self._producer.reports.retried()
            return
        tries, self._tries, self._hurried, self.retry_at = self._tries, 0, 0, 0.0
        late = [parcel for parcel in group if now >= parcel.deadline]
        self._expire(late or group, error, tries)

    def _expire(self, late: list[ProducerBatch], error: Exception, tries: int) -> None:
        """Fail what is not in the log, so that it never will be (G11)."""
        sent = self._recall(list(self.waiting)) if self._numbers else {}
        for parcel in late:
            found = sent.get(-1 if parcel.sequence is None else parcel.sequence)
            # With "fsync" being in the log is not enough, and nobody said more.
            if found is not None and not self._producer.synced:
                parcel.receipt = Appended(found.base_offset, found.next_offset, None, True)
                self._settle()
            else:
                self._drop([parcel], self._given_up(parcel, error, tries))

    def _given_up(self, parcel: ProducerBatch, error: Exception, tries: int) -> EmbedlogError:
        """Return the error of a batch that is not tried again, as Kafka's producer does.

        That of the last try when ``retries`` are used up, a `TimeoutError` when
        ``delivery_timeout_ms`` is over; that a disk is full is said in any case.
        """
        assert isinstance(error, EmbedlogError), "no other is tried again"
        config, count = self._producer.config, f"{tries} {'try' if tries == 1 else 'tries'}"
        passed = monotonic() - parcel.deadline + self._producer.patience
        over = passed >= self._producer.patience
        after = f"{count} in {passed:.3f} s"
        limit = (
            f"delivery_timeout_ms {config.delivery_timeout_ms}"
            if over
            else (f"retries {config.retries}")
        )
        todo = "The record will not appear later; send it again"
        failed: EmbedlogError
        if over and not isinstance(error, DiskFullError):
            what = f"not written after {after} ({limit}): {error}"
            place = {"topic": self.log.topic, "partition": self.log.partition}
            failed = TimeoutError(what, todo=todo, **place)
        else:
            what = f"{error.what}; not written after {after} ({limit})"
            todo = f"{error.todo.rstrip('.')}. {todo}" if error.todo else todo
            failed = type(error)(what, todo=todo, **error.facts)
        failed.__cause__ = error
        return failed

    def _drop(self, group: list[ProducerBatch], error: BaseException) -> None:
        """Fail some batches, and what was to follow them without a gap."""
        for parcel in group:
            parcel.error = error
            self._settle()
        if not group[-1].explicit:
            return
        while self.waiting and self.waiting[0].delivery is group[-1].delivery:
            self.waiting[0].error = error
            self._settle()

    def give_up(self, error: BaseException) -> None:
        """Fail everything that waits."""
        while self.waiting:
            self.waiting[0].error = error
            self._settle()


def closed_early(topic: str) -> ClosedError:
    """Say that a record was not written because the producer was closed first."""
    return ClosedError("the producer was closed before the record was written", topic=topic)
