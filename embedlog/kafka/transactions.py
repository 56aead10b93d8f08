"""kafka-python's transactions, as publications: their records become visible together or never.

Records wait in memory until the commit, which stages and publishes them.  Each publication has
a version, in which the producer's id and epoch come first: once a newer producer with the same
``transactional_id`` has begun, an older one finds its own version taken, and is fenced.
"""

from __future__ import annotations

import random
import uuid
from typing import Any

from embedlog.batch import BatchLimits
from embedlog.config import ProducerConfig
from embedlog.files import process_id
from embedlog.kafka import errors
from embedlog.partitioner import partition_for_key
from embedlog.producer.future import RecordFuture
from embedlog.producer.row_batches import Rows, chunks, encode_rows
from embedlog.producer.validation import check_partition, to_bytes
from embedlog.publish import staging
from embedlog.publish.staging import StagedFile, StagedFileWriter
from embedlog.publish.transaction import Publication, publish
from embedlog.record import RecordMetadata
from embedlog.root.root import Root

_Row = tuple[Any, Any, int, Any]
"""Value, key, timestamp and headers."""


class Transactions:
    """The transactions of one producer, one after another.

    Args:
        root: The log.
        name: The ``transactional_id``.
        config: The settings of the log's own producer.
    """

    def __init__(self, root: Root, name: str, config: ProducerConfig) -> None:
        self._root, self._name, self._config = root, name, config
        self._version: int | None = None
        """That of the last publication; None before `initialize`."""
        self._rows: dict[tuple[str, int], list[_Row]] | None = None
        """By topic and partition; None outside of a transaction."""
        self._keyless: dict[str, int] = {}
        """The partition of records without a key, by topic, in this transaction."""

    def initialize(self) -> None:
        """Fence older producers of this name."""
        if self._version is None:
            producer_id, epoch = self._root.producer_identity(self._name)
            self._version = producer_id << 64 | epoch << 32
            self._publish([])

    def begin(self) -> None:
        """Begin a transaction."""
        if self._version is None or self._rows is not None:
            raise errors.IllegalStateError(
                "A transaction begins after init_transactions, and after the end of the last one"
            )
        self._rows, self._keyless = {}, {}

    def _current(self) -> dict[tuple[str, int], list[_Row]]:
        if self._rows is None:
            raise errors.IllegalStateError("No transaction has begun; call begin_transaction")
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
        """Add a record to the transaction; its offset is not known before the commit."""
        rows, count = self._current(), self._root.ensure_topic(topic).partitions
        value, key = to_bytes(value, "value"), to_bytes(key, "key")
        if partition is not None:
            check_partition(topic, partition, count)
        elif key is not None:
            partition = partition_for_key(key, count)
        else:
            partition = self._keyless.setdefault(topic, random.Random().randrange(count))
        timestamp = self._root.clock() if timestamp_ms is None else timestamp_ms
        rows.setdefault((topic, partition), []).append((value, key, timestamp, headers))
        return RecordFuture._completed(RecordMetadata(topic, partition, -1, timestamp))

    def commit(self) -> None:
        """Make the records of the transaction visible.

        Raises:
            ProducerFencedError: A newer producer has the same ``transactional_id``.
        """
        rows = self._current()
        owner = staging.job_directory(
            str(process_id.process()), self._root.clock(), uuid.uuid4().hex[:12]
        )
        writer = StagedFileWriter(self._root.context.files, owner, "transaction")
        try:
            for (topic, partition), of_partition in rows.items():
                self._stage(writer, topic, partition, of_partition)
        except BaseException:
            writer.abandon()
            raise
        staged = [writer.finish()]
        try:
            self._publish(staged)
        finally:
            staging.remove(self._root.context.files, staged)
        self._rows = None

    def abort(self) -> None:
        """Drop the records of the transaction."""
        self._current()
        self._rows = None

    def _stage(
        self, writer: StagedFileWriter, topic: str, partition: int, rows: list[_Row]
    ) -> None:
        info = self._root.topic(topic)
        compression = info.config.compression_type
        if compression == "producer":
            compression = self._config.compression_type
        limits = BatchLimits(info.config.max_message_bytes, info.config.segment_bytes)
        values, keys, timestamps, headers = map(list, zip(*rows, strict=True))
        columns = Rows(values, keys, timestamps, headers if any(headers) else None)
        for chunk in chunks(columns, self._config.batch_size, None):
            for batch in encode_rows(chunk.measured(), compression, limits):
                writer.add(topic, info.id, partition, batch)

    def _publish(self, staged: list[StagedFile]) -> None:
        assert self._version is not None
        source = f"transactional.id {self._name}"
        result = publish(self._root, staged, Publication(source, self._version + 1, source))
        if result.repeated is not None:
            raise errors.ProducerFencedError(
                f"A newer producer has the transactional_id {self._name!r}; close this one"
            )
        self._version += 1
