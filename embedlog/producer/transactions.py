"""Transactions: records that become visible together, with offsets that a group commits, or never.

A transaction is one publication.  What is sent in it is encoded as by any producer, and then kept
here instead of appended, in memory and, beyond half of ``buffer_memory``, in a staged file.  Each
publication has a version, in which the producer's id and epoch come first: once a newer producer
with the same ``transactional_id`` has begun, an older one finds its own version taken, and is
fenced.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from functools import partial
from typing import NoReturn, Protocol

from embedlog.batch import EncodedBatch
from embedlog.config import ProducerConfig
from embedlog.errors import (
    ClosedError,
    CommitFailedError,
    ConflictError,
    EmbedlogError,
    IllegalStateError,
    InvalidGroupIdError,
    InvalidProducerEpochError,
)
from embedlog.files import process_id
from embedlog.group import Group
from embedlog.lazy import logging
from embedlog.listeners import PRODUCER, Client
from embedlog.partition import PartitionLog, checkpoint, journal, tail
from embedlog.partition.append_condition import AppendCondition
from embedlog.producer.batcher import not_begun
from embedlog.publish import app_versions, live_commit, staging
from embedlog.publish.staging import StagedFile, StagedFileWriter, StagedPartition
from embedlog.publish.transaction import GroupOffsets, Publication, publish
from embedlog.record import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition
from embedlog.root.root import Root

_LOGGER = logging.getLogger("embedlog.producer")

SOURCE = "transactional.id "
"""Begins the names of rows of transactions."""
Positions = Mapping[TopicPartition, OffsetAndMetadata]


class GroupConsumer(Protocol):
    """A `Consumer`, whose package is beside this one."""

    def _offsets_for_transaction(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata | int] | None = None
    ) -> tuple[Positions, ConsumerGroupMetadata, Client]:
        """Return what a transaction commits of it, and who does."""


class Transactions:
    """The transactions of one producer, one after another; any thread may call it.

    Args:
        root: The log.
        name: The ``transactional_id``; if it is empty, only members of groups are fenced.
        config: The settings of the producer.
    """

    def __init__(self, root: Root, name: str, config: ProducerConfig) -> None:
        self._root, self._name, self._config = root, name, config
        self._run, self._source = uuid.uuid4().hex, f"{SOURCE}{name}"
        self._lock = threading.Lock()
        self._version: int | None = None
        """That of the last transaction; None before `initialize`."""
        self._ended: EmbedlogError | None = None
        """What every later call raises: another producer fenced this one, or it was closed."""
        self._reset()

    def _reset(self) -> None:
        self._begun = False
        self._batches: list[tuple[StagedPartition, EncodedBatch]] = []
        """Those in memory, which follow those in the file."""
        self._bytes = 0
        """What they hold."""
        self._conditions: list[tuple[PartitionLog, AppendCondition]] = []
        """What must be so at the commit, in the log without these batches."""
        self._writer: StagedFileWriter | None = None
        self._staged: list[StagedFile] = []
        """The file, once it is finished."""
        self._tried = False
        """Whether a commit has failed."""
        self._published = False
        """Whether it was published, or that was tried, because it is too large for `live`."""
        self._records = 0
        self._failure: BaseException | None = None
        """The error of the first record that failed: the transaction must be aborted."""
        self._offsets: GroupOffsets | None = None
        self._positions: dict[TopicPartition, OffsetAndMetadata] = {}
        """What the group commits."""
        self._consumers: set[Client] = set()
        """What listeners know of the consumers whose positions these are."""

    def check(self, begun: bool | None = None) -> None:
        """Check that a transaction has begun, or, if that is False, that none has.

        Raises:
            IllegalStateError: The calls are not in order.
            InvalidProducerEpochError, ClosedError: There are no transactions any more.
        """
        if self._ended is not None:
            raise self._ended
        if begun is not None and self._version is None:
            raise IllegalStateError(
                "The producer has no transactions yet", todo="Call init_transactions first."
            )
        if begun is True and not self._begun:
            raise not_begun()
        if begun is False and self._begun:
            raise IllegalStateError(
                "A transaction has begun already", todo="Commit or abort it first."
            )

    def initialize(self, before: tuple[int, int] | None = None) -> None:
        """Fence older producers of this name.

        Args:
            before: The (id, epoch) that the last producer of the name must have.

        Raises:
            InvalidProducerEpochError: It has another one.
        """
        with self._lock:
            self.check()
            if self._version is None:
                version = 0
                if self._name:
                    version = version_of(self._root.producer_identity(self._name, before))
                    context = self._root.context
                    last = app_versions.get(context.state, self._source)
                    self._publish(version)
                    self._reset()
                    if last is not None:
                        # Its process may have died after it was committed.
                        journal.finish_committed(context, [key for key, _, _ in last.ends])
                    live_commit.fence(context, self._source, parts(version))
                    checkpoint.take(context)
                self._version = version

    def begin(self) -> None:
        """Begin a transaction."""
        with self._lock:
            self.check(begun=False)
            assert self._version is not None
            # Each transaction has its own version: if an aborted one was published after all,
            # since its commit failed late, the next one is not taken for its repetition.
            self._version += 1
            self._begun = True

    def stage(
        self, log: PartitionLog, batch: EncodedBatch, condition: AppendCondition | None
    ) -> None:
        """Add a batch to the transaction, and a condition of its commit.

        Raises:
            StorageError: It could not be written to the staged file.
        """
        with self._lock:
            self.check(begun=True)
            self._batches.append(((log.topic, log.topic_id, log.partition), batch))
            if condition is not None:
                self._conditions.append((log, condition))
            self._bytes += batch.size
            self._records += batch.count
            if self._bytes > self._config.buffer_memory // 2:
                self._spill()

    def _spill(self) -> None:
        try:
            if self._writer is None:
                directory = staging.job_directory(
                    str(process_id.process()), self._root.clock(), uuid.uuid4().hex[:12]
                )
                self._writer = StagedFileWriter(self._root.context.files, directory, "transaction")
            for (topic, topic_id, partition), batch in self._batches:
                self._writer.add(topic, topic_id, partition, batch)
        except EmbedlogError as error:
            # Some batches may be in the file already.
            self.note_failure(error)
            raise
        self._batches, self._bytes = [], 0

    def note_failure(self, error: BaseException) -> None:
        """Note that a record of the transaction failed: then it cannot be committed."""
        self._failure = self._failure or error

    def add_offsets(
        self, positions: Positions, member: ConsumerGroupMetadata, client: Client | None = None
    ) -> None:
        """Have a group commit positions with the transaction.

        Args:
            positions: The next offset to read, by partition.
            member: Who commits, as of when it read the records.
            client: What listeners know of the consumer.

        Raises:
            IllegalStateError: Another group commits with the same transaction.
            InvalidGroupIdError: The consumer has no group.
            UnknownTopicOrPartitionError, ValueError, OffsetMetadataTooLargeError: A position is
                invalid.
        """
        with self._lock:
            self.check(begun=True)
            if not member.group_id:
                raise InvalidGroupIdError("The consumer has no group", todo="Set group_id.")
            group, before = Group(self._root.context, member.group_id, tail.ends), self._offsets
            if before is not None and before.group.key != group.key:
                raise IllegalStateError(
                    f"The group {before.group.name} commits with this transaction already",
                    group=group.name,
                    todo="Use a transaction for each group.",
                )
            rows = {**(before.rows if before else {}), **group.encode(positions)}
            self._offsets = GroupOffsets(group, member, rows)
            self._positions |= positions
            if client is not None:
                self._consumers.add(client)

    def commit_for_group(self, offsets: GroupOffsets) -> None:
        """Have a group change its rows with the transaction, as `GroupOffsets` say."""
        with self._lock:
            self.check(begun=True)
            self._offsets = offsets

    def commit(self) -> None:
        """Make all of the transaction visible; after a failure it may be repeated.

        Raises:
            InvalidProducerEpochError: A newer producer has the same ``transactional_id``.
            CommitFailedError: The member does not own a partition of the offsets any more; the
                transaction must be aborted.
            ConflictError: Somebody was faster than a record with a condition, likewise.
            Exception: That of a record that failed, likewise, or of the publication.
        """
        with self._lock:
            self.check(begun=True)
            if self._failure is not None:
                raise self._failure
            assert self._version is not None
            if self._writer is not None:
                self._staged, self._writer = [self._writer.finish()], None
            listeners = [listener for each in self._consumers for listener in each.listeners]
            for listener in listeners:
                listener.committing(self._positions)
            try:
                self._publish(self._version)
            except BaseException as error:
                # Without a version a repetition could publish again what was published.
                if isinstance(error, (CommitFailedError, ConflictError)) or not self._name:
                    self._failure = error
                raise
            for listener in listeners:
                listener.committed(self._positions)
            self._end()

    def abort(self) -> None:
        """Drop the transaction.

        Raises:
            InvalidProducerEpochError: A newer producer has the same ``transactional_id``.
        """
        with self._lock:
            self.check(begun=True)
            is_empty = not self._records and self._offsets is None
            self._end()
            last = app_versions.get(self._root.context.state, self._source)
            if not is_empty and last is not None and last.version > (self._version or 0):
                self._fence()

    def close(self) -> None:
        """Abort the transaction that has begun, with a warning, and refuse further ones."""
        with self._lock:
            records = self._records
            self._end()
            self._ended = self._ended or ClosedError("The producer was closed")
        if records:
            _LOGGER.warning(
                "A producer was closed in a transaction; records of transactional.id %s that are "
                "dropped: %d",
                *(self._name, records),
            )

    def _end(self) -> None:
        if self._writer is not None:
            self._staged.append(self._writer.finish())
        staging.remove(self._root.context.files, self._staged)
        self._reset()

    def _publish(self, version: int) -> None:
        client = Client(PRODUCER, self._name, self._config.client_id)
        report = partial(self._root.listeners.published, client)
        name, publication = self._source if self._name else "", None
        again, self._tried = self._tried, True
        if self._begun and not (self._staged or self._published or self._root.replicated):
            done = live_commit.commit(
                self._root,
                self._batches,
                name,
                parts(version),
                conditions=self._conditions,
                offsets=self._offsets,
                report=report,
                again=again,
            )
            if done is False:
                self._fence()
            if done:
                return
        # From now on a repetition must find what this one published.
        self._published = True
        if self._name:
            publication = Publication(name, version, name, self._run)
        before = publish(
            self._root,
            self._staged,
            publication,
            batches=self._batches,
            conditions=self._conditions,
            offsets=self._offsets,
            report=report,
        ).repeated
        # An attempt of this producer may have failed after it was committed.
        if before is not None and (before.version, before.run) != (version, self._run):
            self._fence()

    def _fence(self) -> NoReturn:
        self._end()
        self._ended = InvalidProducerEpochError(
            f"A newer producer has the transactional.id {self._name!r}",
            todo="Close this producer.",
        )
        raise self._ended


def version_of(identity: tuple[int, int]) -> int:
    """Return the version before the first transaction of a producer's (id, epoch)."""
    producer_id, epoch = identity
    return producer_id << 64 | epoch << 32


def parts(version: int) -> tuple[int, int]:
    """Return a version as rows have it: the producer's id, and its epoch with the count."""
    return version >> 64, version & (1 << 64) - 1
