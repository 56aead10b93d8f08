"""A producer on the wire with a ``transactional.id``: what a transaction of it has so far."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from time import monotonic

from embedlog.batch import EncodedBatch
from embedlog.errors import (
    DurabilityError,
    EmbedlogError,
    IllegalStateError,
    InvalidProducerEpochError,
    OutOfOrderSequenceError,
    StorageError,
)
from embedlog.partition import PartitionLog, producer_state, validation
from embedlog.partition.producer_state import ProducerState
from embedlog.producer.resumable_transactions import (
    ABORTED,
    COMMITTED,
    EMPTY,
    ONGOING,
    ResumableTransactions,
)
from embedlog.record import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition
from embedlog.server.error_codes import ApiError, ErrorCode

FOREVER = float("inf")
Identity = tuple[int, int]
"""The id and the epoch of a producer."""


class WireProducer:
    """A producer; all is guarded by its lock."""

    def __init__(self, name: str) -> None:
        self.name, self.lock = name, threading.RLock()
        self.transactions: ResumableTransactions | None = None
        self.timeout_ms = 0
        self.counted = 0
        """Its part of what all transactions have in memory."""
        self.begins(None, EMPTY)

    def begins(
        self,
        transactions: ResumableTransactions | None,
        state: str,
        *,
        previous: Identity | None = None,
        known: bool = False,
    ) -> None:
        """Begin an epoch.

        Args:
            transactions: Those of the epoch; None if nobody has it yet.
            state: That of the last transaction; `ONGOING` if it was lost with another server.
            previous: The identity that the same producer had before.
            known: Whether the producer gets to know the epoch now, so that it is its first use.
        """
        self.transactions, self.previous = transactions, previous
        self.is_fresh = self.is_confirmed = known
        """Whether sequence numbers begin at 0; whether the producer knows its identity."""
        self.sequences: dict[bytes, ProducerState] = {}
        self.ends(state)
        self.is_lost = state == ONGOING

    def begin(self, now_ms: int) -> bool:
        """Begin a transaction, unless one has begun; return whether it did.

        Raises:
            InvalidProducerEpochError: A newer producer has the name.
        """
        if self.is_open:
            return False
        self.begun.begin()
        self.state, self.began_ms = ONGOING, now_ms
        self.deadline = monotonic() + self.timeout_ms / 1000
        return True

    def ends(self, state: str) -> None:
        """End the transaction, with this outcome."""
        self.state, self.deadline, self.began_ms, self.is_lost = state, FOREVER, -1, False
        self.partitions: dict[TopicPartition, tuple[int, int] | None] = {}
        """The end of each partition when its first batch came, and how many records it has got."""
        self.groups: set[str] = set()
        self.pending: Mapping[str, frozenset[TopicPartition]] = {}
        """The offsets that the transaction commits, by group; it is replaced, never changed."""

    def drop(self) -> None:
        """Drop the transaction, and all that is known of the producer."""
        if self.transactions is not None:
            self.transactions.close()
        self.begins(None, EMPTY)

    # What requests may ask of it

    @property
    def begun(self) -> ResumableTransactions:
        """The transactions of an epoch that has begun."""
        assert self.transactions is not None
        return self.transactions

    @property
    def identity(self) -> Identity:
        """Its id and epoch."""
        return self.begun.identity

    @property
    def is_open(self) -> bool:
        """Whether a transaction has begun in this process."""
        return self.deadline != FOREVER

    def is_retried(self, asked: Identity) -> bool:
        """Whether a request that ended the last transaction is repeated, which may have been
        answered, and may have raised the epoch."""
        return self.state in (COMMITTED, ABORTED) and asked == (self.previous or self.identity)

    def check(self, asked: Identity, *, aborts: bool = False) -> None:
        """Raise unless a request is of this producer, and its transaction is not lost.

        Raises:
            ApiError: It is of an older one; or the transaction is lost, unless it ``aborts`` it.
        """
        if asked != self.identity:
            raise fenced(f"The producer {self.name} has the epoch {self.identity[1]}")
        self.is_confirmed = True
        if self.is_lost and not aborts:
            raise ApiError(
                ErrorCode.TRANSACTION_ABORTABLE,
                f"The transaction of {self.name} was lost with the server that had it: abort it, "
                "and begin again",
            )

    # What a transaction has

    def stage(self, log: PartitionLog, batch: EncodedBatch, sequence: int) -> int:
        """Add a batch to the transaction, unless it has it.

        Args:
            log: The partition.
            batch: The batch.
            sequence: The sequence number of its first record.

        Returns:
            The offset that its first record will have if nobody else writes to the partition
            before the commit; -1 if somebody did.

        Raises:
            OutOfOrderSequenceError: It does not follow the batch before.
            EmbedlogError: The topic does not allow it; or it could not be written, and the
                transaction must be aborted.
        """
        state, (_, epoch), count = self.sequences.get(log.key), self.identity, batch.count
        if state is None and self.is_fresh and sequence:
            text = f"Epoch {epoch} begins at sequence {sequence}, not 0"
            raise OutOfOrderSequenceError(text)
        repeated = producer_state.check(state, epoch, sequence, count)
        if repeated is not None:
            return repeated.base_offset
        validation.check(log, [batch])
        self.begun.stage(log, batch, None)
        partition, end = TopicPartition(log.topic, log.partition), log.tail().log_end_offset
        first_end, staged = self.partitions.get(partition) or (end, 0)
        offset = end + staged if first_end == end else -1
        self.partitions[partition] = first_end, staged + count
        sent = sequence, producer_state.after(sequence, count - 1), offset, offset + count
        self.sequences[log.key] = producer_state.note(state, epoch, sent, 0)
        return offset

    def add_offsets(
        self, positions: Mapping[TopicPartition, OffsetAndMetadata], member: ConsumerGroupMetadata
    ) -> None:
        """Have a group commit offsets with the transaction.

        Raises:
            ApiError: Another group commits with it already.
            EmbedlogError: They are invalid.
        """
        try:
            self.begun.add_offsets(positions, member)
        except IllegalStateError as error:
            raise ApiError(ErrorCode.INVALID_REQUEST, str(error)) from error
        group = member.group_id or ""
        before = self.pending.get(group, frozenset())
        self.pending = {**self.pending, group: before | positions.keys()}

    # Its end

    def commit(self) -> None:
        """Commit the transaction.

        Raises:
            InvalidProducerEpochError: A newer producer has the name.
            ApiError: It is not committed: later it may be, or it must be aborted.
        """
        try:
            self.begun.commit()
        except InvalidProducerEpochError:
            raise
        except EmbedlogError as error:
            code = ErrorCode.TRANSACTION_ABORTABLE
            not_sure = isinstance(error, StorageError) and not isinstance(error, DurabilityError)
            if error.retriable or not_sure:
                # Kafka's coordinator has this code when it cannot write; clients try again.
                code = ErrorCode.COORDINATOR_NOT_AVAILABLE
            raise ApiError(code, str(error)) from error
        self.previous = None
        self.ends(COMMITTED)

    def abort(self) -> None:
        """Abort the transaction; without one, note that nothing was done in this epoch.

        Raises:
            InvalidProducerEpochError: A newer producer has the name.
        """
        if self.is_lost:
            self.begun.end_lost()
        else:
            if not self.is_open:
                self.begun.begin()
            elif self.begun.is_committed():
                self.begun.commit()  # It finds that, and forgets the records.
                self.ends(COMMITTED)
                raise self.not_possible(commit=False)
            self.begun.abort()
        self.previous = None
        self.ends(ABORTED)

    def not_possible(self, commit: bool) -> ApiError:
        """Return the error of a request to end a transaction that has not begun."""
        what = "committed" if commit else "aborted"
        text = f"The producer {self.name} is in the state {self.state}: nothing can be {what}"
        return ApiError(ErrorCode.INVALID_TXN_STATE, text)


def fenced(text: str) -> ApiError:
    """Return the error of a producer that is not the newest of its name."""
    return ApiError(ErrorCode.PRODUCER_FENCED, text)
