"""Kafka's transactions, as publications: their records become visible together or never.

Records wait in memory until the commit, which stages and publishes them.  Each publication has
a version, in which the producer's id and epoch come first: once a newer producer with the same
``transactional_id`` has begun, an older one finds its own version taken, and is fenced.
"""

from __future__ import annotations

import random
import threading
import uuid
from functools import partial
from typing import Any, NoReturn

from embedlog.batch import BatchLimits
from embedlog.batch.limits import request_size
from embedlog.catalog import refuse_internal
from embedlog.config import ProducerConfig
from embedlog.errors import (
    ClosedError,
    EmbedlogError,
    IllegalStateError,
    InvalidProducerEpochError,
    RecordBatchTooLargeError,
)
from embedlog.files import process_id
from embedlog.lazy import logging
from embedlog.listeners import PRODUCER, Client
from embedlog.partitioner import partition_for_key
from embedlog.producer.future import RecordFuture
from embedlog.producer.row_batches import Encoding, Rows
from embedlog.producer.validation import check_headers, check_partition, check_size, to_bytes
from embedlog.publish import app_versions, staging
from embedlog.publish.staging import StagedFile, StagedFileWriter
from embedlog.publish.transaction import Publication, publish
from embedlog.record import RecordMetadata
from embedlog.root.root import Root

_LOGGER = logging.getLogger("embedlog.producer")

NO_OFFSETS = (
    "A log cannot commit offsets in the transaction of the records; commit them with the consumer, "
    "after commit_transaction"
)
"""Why ``send_offsets_to_transaction`` is refused."""

_Row = tuple[Any, Any, int, Any]
"""Value, key, timestamp and headers."""


class Transactions:
    """The transactions of one producer, one after another; any thread may send.

    Args:
        root: The log.
        name: The ``transactional_id``.
        config: The settings of the log's own producer; ``buffer_memory`` limits a transaction.
    """

    def __init__(self, root: Root, name: str, config: ProducerConfig) -> None:
        self._root, self._name, self._config = root, name, config
        self._run, self._source = uuid.uuid4().hex, f"transactional.id {name}"
        self._lock = threading.Lock()
        self._version: int | None = None
        """That of the last transaction; None before `initialize`."""
        self._rows: dict[tuple[str, int], list[_Row]] | None = None
        """By topic and partition; None outside of a transaction."""
        self._bytes = 0
        """What the rows hold."""
        self._ended: EmbedlogError | None = None
        """What every later call raises: another producer fenced this one, or it was closed."""
        self._random = random.Random()
        self._keyless: dict[str, int] = {}
        """The partition of records without a key, by topic, in this transaction."""

    def initialize(self) -> None:
        """Fence older producers of this name."""
        with self._lock:
            self._check()
            if self._version is None:
                producer_id, epoch = self._root.producer_identity(self._name)
                version = producer_id << 64 | epoch << 32
                self._publish([], version)
                self._version = version

    def begin(self) -> None:
        """Begin a transaction."""
        with self._lock:
            self._check()
            if self._version is None:
                raise IllegalStateError(
                    "The producer has no transactions yet", todo="Call init_transactions first."
                )
            if self._rows is not None:
                raise IllegalStateError(
                    "A transaction has begun already", todo="Commit or abort it first."
                )
            # Each transaction has its own version: if an aborted one was published after all,
            # since its commit failed late, the next one is not taken for its repetition.
            self._version += 1
            self._rows, self._keyless, self._bytes = {}, {}, 0

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _current(self) -> dict[tuple[str, int], list[_Row]]:
        self._check()
        if self._rows is None:
            raise IllegalStateError(
                "No transaction has begun", todo="Call begin_transaction first."
            )
        return self._rows

    def send(
        self,
        topic: str,
        value: Any,
        key: Any,
        headers: Any = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> RecordFuture:
        """Add a record to the transaction; its offset is not known before the commit.

        Raises:
            RecordTooLargeError: The record is over ``max_request_size``.
            RecordBatchTooLargeError: The transaction is over ``buffer_memory``.
        """
        self._current()
        refuse_internal(topic)
        info = self._root.ensure_topic(topic)
        if info.schema_version:
            raise IllegalStateError(
                "A transaction writes to topics of bytes only, and this one has columns",
                topic=topic,
                todo="Send its records with a producer that has no transactional id.",
            )
        count = info.partitions
        value, key, headers = to_bytes(value, "value"), to_bytes(key, "key"), check_headers(headers)
        if partition is not None:
            check_partition(topic, partition, count)
        elif key is not None:
            partition = partition_for_key(key, count)
        else:
            partition = self._keyless.setdefault(topic, self._random.randrange(count))
        timestamp = self._root.clock() if timestamp_ms is None else timestamp_ms
        size = request_size(value, key, headers)
        check_size(topic, size, size, self._config.max_request_size)
        with self._lock:
            rows, limit = self._current(), self._config.buffer_memory
            if self._bytes + size > limit:
                raise RecordBatchTooLargeError(
                    f"The records of the transaction wait in memory for its commit, and would be "
                    f"over the {limit} bytes that a producer may buffer",
                    todo="Commit more often, or abort the transaction.",
                    topic=topic,
                )
            self._bytes += size
            rows.setdefault((topic, partition), []).append((value, key, timestamp, headers))
        return RecordFuture._completed(RecordMetadata(topic, partition, -1, timestamp))

    def commit(self) -> None:
        """Make the records of the transaction visible; after a failure it may be repeated.

        Raises:
            InvalidProducerEpochError: A newer producer has the same ``transactional_id``.
        """
        with self._lock:
            rows, version = self._current(), self._version
            assert version is not None
            staged = [self._stage(rows)] if rows else []
            try:
                self._publish(staged, version)
            finally:
                staging.remove(self._root.context.files, staged)
            self._rows = None

    def abort(self) -> None:
        """Drop the records of the transaction.

        Raises:
            InvalidProducerEpochError: A newer producer has the same ``transactional_id``.
        """
        with self._lock:
            rows, self._rows = self._current(), None
            last = app_versions.get(self._root.context.state, self._source)
            if rows and last is not None and last.version > (self._version or 0):
                self._fence()

    def close(self) -> None:
        """Abort the transaction that has begun, with a warning, and refuse further ones."""
        with self._lock:
            rows, self._rows = self._rows, None
            self._ended = self._ended or ClosedError("The producer was closed")
        if rows:
            _LOGGER.warning(
                "A producer was closed in a transaction; records of transactional.id %s that are "
                "dropped: %d",
                self._name,
                sum(map(len, rows.values())),
            )

    def _stage(self, rows: dict[tuple[str, int], list[_Row]]) -> StagedFile:
        directory = staging.job_directory(
            str(process_id.process()), self._root.clock(), uuid.uuid4().hex[:12]
        )
        writer = StagedFileWriter(self._root.context.files, directory, "transaction")
        try:
            for (topic, partition), of_partition in rows.items():
                self._stage_partition(writer, topic, partition, of_partition)
        except BaseException:
            writer.abandon()
            raise
        return writer.finish()

    def _stage_partition(
        self, writer: StagedFileWriter, topic: str, partition: int, rows: list[_Row]
    ) -> None:
        info = self._root.topic(topic)
        compression = info.config.compression_type
        if compression == "producer":
            compression = self._config.compression_type
        limits = BatchLimits(info.config.max_message_bytes, info.config.segment_bytes)
        values, keys, timestamps, headers = map(list, zip(*rows, strict=True))
        columns = Rows(values, keys, timestamps, headers if any(headers) else None).measured()
        size = self._config.batch_size
        for batch in columns.batches(Encoding(compression, limits, size, size, size)):
            writer.add(topic, info.id, partition, batch)

    def _publish(self, staged: list[StagedFile], version: int) -> None:
        client = Client(PRODUCER, self._name, self._config.client_id)
        before = publish(
            self._root,
            staged,
            Publication(self._source, version, self._source, self._run),
            report=partial(self._root.listeners.published, client),
        ).repeated
        # An attempt of this producer may have failed after it was committed.
        if before is not None and (before.version, before.run) != (version, self._run):
            self._fence()

    def _fence(self) -> NoReturn:
        self._rows = None
        self._ended = InvalidProducerEpochError(
            f"A newer producer has the transactional.id {self._name!r}",
            todo="Close this producer.",
        )
        raise self._ended
