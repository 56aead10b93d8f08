"""The coordinator of transactions for clients on the wire.

A transaction of a client is one of the log (`producer.transactions`): its records are staged, and
become visible with its commit, together with the offsets of a group.  So the commit decides who has
the ``transactional.id``, whether that is a client on the wire or a program on the directory.

What has begun is in memory, and in staged files if it is large.  After the death of the server the
rows of the log say which transactions were lost with it (`producer.resumable_transactions`): their
producers are told to abort.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from time import monotonic
from typing import NamedTuple

from embedlog.api import Log
from embedlog.batch import EncodedBatch
from embedlog.errors import EmbedlogError, InvalidProducerEpochError, raised_in_body
from embedlog.lazy import logging
from embedlog.partition import PartitionLog
from embedlog.partition.checkpoint import TRANSACTIONS
from embedlog.producer.resumable_transactions import (
    ABORTED,
    COMMITTED,
    EMPTY,
    ONGOING,
    ResumableTransactions,
    state_of,
)
from embedlog.producer.transactions import SOURCE
from embedlog.record import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition
from embedlog.server.error_codes import ApiError, ErrorCode
from embedlog.server.record_batches import WireBatch
from embedlog.server.wire_producer import FOREVER, Identity, WireProducer, fenced

_logger = logging.getLogger("embedlog.server")

MAX_TIMEOUT_MS = 900_000
"""The longest ``transaction.timeout.ms``, as Kafka's ``transaction.max.timeout.ms``."""
MAX_NAME_BYTES = 380
"""So that a name is stored as it is."""
MAX_BUFFERED_BYTES = 64 << 20
"""What all transactions together may have in memory; beyond it they go to files."""
_MAX_IDLE = 1000
"""Producers without a transaction that are kept in memory; the log knows all."""
_BUSY_SECONDS, _PRODUCE_SECONDS = 0.2, 30.0
"""How long requests wait for another one of the same producer, which may be its commit."""
_RETRY_SECONDS = 0.5
IMPLICIT_PRODUCE, IMPLICIT_OFFSETS, RAISES_EPOCH = 12, 5, 5
"""The first versions of Produce, TxnOffsetCommit and EndTxn of KIP-890."""
STATES = (EMPTY, ONGOING, COMMITTED, ABORTED, "PrepareCommit", "PrepareAbort", "PrepareEpochFence")
"""Kafka's names of the states; a commit and an abort are one step here."""


class KnownProducer(NamedTuple):
    """A producer as others see it."""

    state: str
    identity: Identity
    timeout_ms: int = 0
    began_ms: int = -1
    """When its transaction began; -1 if none has begun."""
    partitions: tuple[TopicPartition, ...] = ()
    """Those of its transaction."""


class TransactionCoordinator:
    """The producers with transactions of a server; any thread may call it.

    Args:
        log: The log.
    """

    def __init__(self, log: Log) -> None:
        self._root = log.root
        self._producers: OrderedDict[str, WireProducer] = OrderedDict()
        self._lock, self._buffered = threading.Lock(), 0
        self._changed = threading.Condition(self._lock)
        self._timer: threading.Thread | None = None
        self._looks_at, self._closed = FOREVER, False
        """When the timer looks again."""

    def close(self) -> None:
        """Drop all transactions, and stop the timer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._timer is not None:
            self._timer.join()
        for producer in list(self._producers.values()):
            with producer.lock:
                producer.drop()

    # Producers

    @contextmanager
    def _locked(self, name: str, seconds: float = _BUSY_SECONDS) -> Iterator[WireProducer]:
        """Yield a producer that no other request uses meanwhile."""
        while True:
            with self._lock:
                producer = self._producers.get(name)
                if producer is None:
                    producer = self._producers[name] = WireProducer(name)
                self._producers.move_to_end(name)
            if not producer.lock.acquire(timeout=seconds):
                text = "Another request of the transactional.id is not finished"
                raise ApiError(ErrorCode.CONCURRENT_TRANSACTIONS, text)
            if self._producers.get(name) is producer:
                break
            producer.lock.release()  # It was forgotten meanwhile.
        try:
            yield producer
        finally:
            self._count(producer)
            producer.lock.release()
            self._forget_idle()

    def _count(self, producer: WireProducer) -> None:
        """Count what a producer has in memory."""
        transactions = producer.transactions
        buffered = 0 if transactions is None else transactions.buffered
        with self._lock:
            self._buffered += buffered - producer.counted
            producer.counted = buffered

    def _forget_idle(self) -> None:
        if len(self._producers) <= _MAX_IDLE:
            return
        with self._lock:
            for name, producer in list(self._producers.items()):
                if len(self._producers) <= _MAX_IDLE:
                    return
                if not producer.is_open and producer.lock.acquire(blocking=False):
                    del self._producers[name]
                    producer.lock.release()

    @contextmanager
    def _of(
        self, name: str, asked: Identity, seconds: float = _BUSY_SECONDS, *, ends: bool = False
    ) -> Iterator[WireProducer]:
        """Yield a producer as the log has it, with the identity that it has now.

        Raises:
            ApiError: There is none of this name and id; or, unless it is asked to end the
                transaction, `WireProducer.check` refuses it.
        """
        with self._locked(name, seconds) as producer:
            current = self._current(name)
            if current is not None:
                self._load(producer, current)
            if current is None or not (asked[0] == current[0] or producer.is_retried(asked)):
                text = f"The producer {name} does not have the id {asked[0]}"
                raise ApiError(ErrorCode.INVALID_PRODUCER_ID_MAPPING, text)
            if not ends:
                producer.check(asked)
            try:
                yield producer
            except InvalidProducerEpochError as error:
                producer.drop()
                raise fenced(str(error)) from raised_in_body(error)

    def _current(self, name: str) -> Identity | None:
        """Return the identity of the last producer of a name, wherever it is."""
        if not 0 < len(name.encode()) <= MAX_NAME_BYTES or "\0" in name:
            text = f"A transactional.id has 1 to {MAX_NAME_BYTES} bytes without NUL"
            raise ApiError(ErrorCode.INVALID_REQUEST, text)
        return self._root.context.catalog.named_producer(name)

    def _load(self, producer: WireProducer, current: Identity) -> None:
        """Read from the log what another process did as, or to, this producer."""
        if producer.transactions is not None and producer.identity == current:
            return
        producer.drop()
        transactions = ResumableTransactions(self._root, producer.name)
        state, identity = transactions.resume(current)
        if identity != current and state == ONGOING:
            # It took too long, and the epoch was raised; so nobody repeats a request of it.
            state, identity = ABORTED, current
        previous = None if identity == current else identity
        producer.begins(transactions, state, previous=previous)
        producer.timeout_ms = producer.timeout_ms or MAX_TIMEOUT_MS

    def initialize(self, name: str, timeout_ms: int, before: Identity | None) -> Identity:
        """Return a new identity; an older producer of this name is fenced, its transaction dropped.

        Args:
            name: The ``transactional.id``.
            timeout_ms: How long a transaction may take.
            before: The identity that the producer has, if it has one (KIP-360).

        Raises:
            ApiError: Another producer has the name, or an argument is invalid.
        """
        if not 0 < timeout_ms <= MAX_TIMEOUT_MS:
            text = f"transaction.timeout.ms must be from 1 to {MAX_TIMEOUT_MS}"
            raise ApiError(ErrorCode.INVALID_TRANSACTION_TIMEOUT, text)
        with self._locked(name) as producer:
            current = self._current(name)
            if before is not None and current is not None:
                self._load(producer, current)
                if before == producer.previous and producer.is_confirmed:
                    return producer.identity
                if before not in (current, producer.previous):
                    raise fenced(f"The producer {name} has the id and epoch {current}")
            producer.drop()
            transactions = ResumableTransactions(self._root, name)
            try:
                transactions.initialize(None if before is None else current)
            except InvalidProducerEpochError as error:
                raise fenced(str(error)) from error
            producer.begins(transactions, EMPTY, previous=before, known=True)
            producer.timeout_ms = timeout_ms
            return producer.identity

    # A transaction

    def _begin(self, producer: WireProducer) -> None:
        """Begin a transaction, unless one has begun."""
        if not producer.begin(self._root.clock()):
            return
        with self._changed:
            if self._timer is None and not self._closed:
                self._timer = threading.Thread(
                    target=self._run, name="embedlog-server-transactions", daemon=True
                )
                self._timer.start()
            if producer.deadline < self._looks_at:
                self._changed.notify_all()

    def add_partitions(self, name: str, asked: Identity, partitions: list[TopicPartition]) -> None:
        """Add partitions to a transaction, which begins with the first.

        Raises:
            ApiError: The producer is not the current one of its name, or its transaction was lost.
        """
        with self._of(name, asked) as producer:
            self._begin(producer)
            for partition in partitions:
                producer.partitions.setdefault(partition)

    def add_group(self, name: str, asked: Identity, group: str) -> None:
        """Have a transaction commit offsets of a group.

        Raises:
            ApiError: As `add_partitions`.
        """
        with self._of(name, asked) as producer:
            self._begin(producer)
            producer.groups.add(group)

    def stage(
        self,
        name: str,
        log: PartitionLog,
        encoded: EncodedBatch,
        batch: WireBatch,
        version: int,
    ) -> int:
        """Add a batch to a transaction.

        Args:
            name: The ``transactional.id``.
            log: The partition.
            encoded: The batch.
            batch: The same as it came from the producer.
            version: Of the request to produce.

        Returns:
            The offset of its first record, or -1, as `WireProducer.stage`.

        Raises:
            ApiError, EmbedlogError: It was not added.
        """
        asked = batch.producer_id, batch.producer_epoch
        with self._of(name, asked, _PRODUCE_SECONDS) as producer:
            if TopicPartition(log.topic, log.partition) not in producer.partitions:
                if version < IMPLICIT_PRODUCE:
                    text = f"The partition {log.topic}-{log.partition} is not in the transaction"
                    raise ApiError(ErrorCode.TRANSACTION_ABORTABLE, text)
                self._begin(producer)
            offset = producer.stage(log, encoded, batch.base_sequence)
            self._count(producer)
            if self._buffered > MAX_BUFFERED_BYTES:
                producer.begun.spill()
            return offset

    def add_offsets(
        self,
        name: str,
        asked: Identity,
        positions: Mapping[TopicPartition, OffsetAndMetadata],
        member: ConsumerGroupMetadata,
        version: int,
    ) -> None:
        """Add offsets to a transaction.

        Args:
            name: The ``transactional.id``.
            asked: The identity of the producer.
            positions: The next offset to read, by partition.
            member: The group, and who commits in it.
            version: Of the request to commit.

        Raises:
            ApiError, EmbedlogError: They were not added.
        """
        group = member.group_id or ""
        with self._of(name, asked) as producer:
            if group not in producer.groups:
                if version < IMPLICIT_OFFSETS:
                    text = f"The group {group} is not in the transaction"
                    raise ApiError(ErrorCode.INVALID_TXN_STATE, text)
                self._begin(producer)
                producer.groups.add(group)
            producer.add_offsets(positions, member)

    def end(self, name: str, asked: Identity, version: int, *, commit: bool) -> Identity:
        """Commit or abort a transaction; a repetition finds what became of it.

        Args:
            name: The ``transactional.id``.
            asked: The identity of the producer.
            version: Of the request.
            commit: Whether to commit it.

        Returns:
            The identity for the next transaction.

        Raises:
            ApiError: It was not ended.
        """
        raises_epoch, ended = version >= RAISES_EPOCH, COMMITTED if commit else ABORTED
        with self._of(name, asked, ends=True) as producer:
            if producer.is_retried(asked) and (raises_epoch or asked == producer.identity):
                if producer.state != ended:
                    raise producer.not_possible(commit)
                if raises_epoch and (asked == producer.identity or not producer.is_confirmed):
                    self._raise_epoch(producer, asked)
                return producer.identity
            producer.check(asked, aborts=not commit)
            begun = producer.is_open or producer.is_lost
            if not begun and (commit or not raises_epoch):
                raise producer.not_possible(commit)
            if commit:
                producer.commit()
            else:
                producer.abort()
            if raises_epoch:
                self._raise_epoch(producer, asked)
            return producer.identity

    def _raise_epoch(self, producer: WireProducer, before: Identity) -> None:
        transactions, state = producer.begun, producer.state
        # The transaction has ended, whoever has the name by now; the next request is told.
        with suppress(InvalidProducerEpochError):
            transactions.raise_epoch()
        producer.begins(transactions, state, previous=before, known=True)

    # What others see

    def unstable(self, group: str) -> set[TopicPartition]:
        """Return the partitions of a group whose offsets an open transaction commits."""
        with self._lock:
            pending = [each.pending.get(group) for each in self._producers.values()]
        return {partition for each in pending if each for partition in each}

    def known(self) -> dict[str, KnownProducer]:
        """Return the producers by name: those of the log, and what has begun here."""
        live, seen = self._root.context.live, dict[str, KnownProducer]()
        for (name,), last in live.read(lambda txn: list(TRANSACTIONS.scan(txn))):
            if name.startswith(SOURCE):
                identity = last.producer_id, last.number >> 32
                seen[name.removeprefix(SOURCE)] = KnownProducer(state_of(last), identity)
        with self._lock:
            producers = list(self._producers.values())
        for each in producers:
            transactions = each.transactions
            if transactions is not None and each.name in seen:
                facts = each.timeout_ms, each.began_ms, tuple(each.partitions)
                seen[each.name] = KnownProducer(each.state, transactions.identity, *facts)
        return seen

    # Time

    def _run(self) -> None:
        """Abort transactions that take too long."""
        while True:
            with self._changed:
                if self._closed:
                    return
                now = monotonic()
                late = [each for each in self._producers.values() if each.deadline <= now]
                if not late:
                    deadlines = (each.deadline for each in self._producers.values())
                    self._looks_at = min(deadlines, default=FOREVER)
                    self._changed.wait(None if self._looks_at == FOREVER else self._looks_at - now)
                    self._looks_at = 0.0
                    continue
            expired = [self._expire(producer) for producer in late]
            if not all(expired):
                with self._changed:
                    self._changed.wait(_RETRY_SECONDS)

    def _expire(self, producer: WireProducer) -> bool:
        """Abort a transaction that took too long, and raise the epoch; return whether it is done.

        A request that is being answered, such as its commit, is not disturbed.
        """
        if not producer.lock.acquire(blocking=False):
            return False
        try:
            transactions = producer.transactions
            if producer.deadline > monotonic() or transactions is None:
                return True
            _logger.warning(
                "Aborted the transaction of %s: it took longer than %d ms",
                *(producer.name, producer.timeout_ms),
            )
            with suppress(InvalidProducerEpochError):
                transactions.raise_epoch()
            producer.drop()
            return True
        except EmbedlogError as error:
            _logger.warning("The transaction of %s is not aborted yet: %s", producer.name, error)
            return False
        finally:
            self._count(producer)
            producer.lock.release()
