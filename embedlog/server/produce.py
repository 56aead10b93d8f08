"""Answers produce requests: batches of the wire become batches of the log."""

from __future__ import annotations

from typing import Any

from embedlog.batch import EncodedBatch
from embedlog.catalog import refuse_internal
from embedlog.config.values import compression
from embedlog.errors import InvalidRecordError, InvalidTimestampError
from embedlog.partition import PartitionLog
from embedlog.server.answers import Answers, Caller, Fields
from embedlog.server.error_codes import ApiError, ErrorCode
from embedlog.server.record_batches import WireBatch, read_batch
from embedlog.server.tail_cache import TailCache
from embedlog.server.transaction_answers import known_errors
from embedlog.server.transaction_coordinator import TransactionCoordinator

_ZSTD_SINCE = 7
"""The first version of produce requests in which clients may use zstd."""
_INVALID_TIMESTAMP = "One or more records have been rejected due to invalid timestamp"
"""Kafka's words; the errors of the records say which timestamps are valid."""


class Producers:
    """Answers produce requests.

    Args:
        answers: Of the log.
        cache: Gets the batches that were appended.
        transactions: Gets those that belong to a transaction.
    """

    def __init__(
        self, answers: Answers, cache: TailCache, transactions: TransactionCoordinator
    ) -> None:
        self._answers, self._log, self._cache = answers, answers.log, cache
        self._transactions = transactions

    def produce(self, request: Any, caller: Caller) -> Fields | None:
        """Answer: appends a batch to each partition; None if the client wants no answer."""
        topics = []
        for topic in request.topic_data:
            partitions = []
            for item in topic.partition_data:
                args = (topic.name, topic.topic_id, item, request, caller)
                outcome = self._answers.outcome(self._append, *args)
                partitions.append({"index": item.index, "base_offset": -1, **outcome})
            named = {"name": topic.name, "topic_id": topic.topic_id}
            topics.append({**named, "partition_responses": partitions})
        if request.acks:
            return {"responses": topics}
        codes = (part["error_code"] for each in topics for part in each["partition_responses"])
        if any(codes):
            # The end of the connection is all that the client can notice.
            raise ApiError(ErrorCode.INVALID_REQUEST, "a produce request without acks failed")
        return None

    def _append(
        self, name: str | None, number: Any, item: Any, request: Any, caller: Caller
    ) -> Fields | None:
        if request.acks not in (-1, 0, 1):
            raise ApiError(ErrorCode.INVALID_REQUIRED_ACKS, f"acks cannot be {request.acks}")
        name = self._answers.named(name, number)
        refuse_internal(name)
        log = self._answers.partition(name, item.index)
        batch = read_batch(item.records)
        if batch.codec == "zstd" and caller.version < _ZSTD_SINCE:
            text = f"Produce requests of version {caller.version} cannot have zstd"
            raise ApiError(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, text)
        try:
            encoded = self._encoded(log, batch)
            if batch.is_transactional:
                return self._staged(log, encoded, batch, request.transactional_id, caller)
            if batch.producer_id >= 0:
                encoded.set_producer(batch.producer_id, batch.producer_epoch, batch.base_sequence)
            acks = "all" if request.acks == -1 else request.acks
            (receipt,) = log.append([encoded], acks=acks)
        except InvalidRecordError as error:
            rows = getattr(error, "indices", None) or ()
            text = str(error)
            errors = [{"batch_index": row, "batch_index_error_message": text} for row in rows]
            outcome = {**self._answers.failure(error), "record_errors": errors}
            if isinstance(error, InvalidTimestampError):
                outcome["error_message"] = _INVALID_TIMESTAMP
            return outcome
        tail = log.tail()
        if receipt.timestamp is None and not receipt.duplicate and log.schema is None:
            self._cache.put(log, receipt.base_offset, tail.leader_epoch, batch)
        return {
            "base_offset": receipt.base_offset,
            "log_append_time_ms": -1 if receipt.timestamp is None else receipt.timestamp,
            "log_start_offset": tail.start_offset,
        }

    def _staged(
        self, log: PartitionLog, encoded: EncodedBatch, batch: WireBatch, name: Any, caller: Caller
    ) -> Fields:
        """Add a batch to the transaction of its producer."""
        if name is None:
            text = "A batch of a transaction came without a transactional.id"
            raise ApiError(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, text)
        with known_errors("Produce", caller.version):
            offset = self._transactions.stage(name, log, encoded, batch, caller.version)
        return {"base_offset": offset, "log_start_offset": log.tail().start_offset}

    def _encoded(self, log: PartitionLog, batch: WireBatch) -> EncodedBatch:
        log.refresh()
        codec: str = log.config.compression_type
        if codec == "producer":
            # The log has no gzip and no snappy.
            codec = compression(batch.codec)
        if log.schema is None:
            return batch.encoded(codec)
        from embedlog.server.typed_json import from_wire

        return from_wire(batch.columns(), log.topic, log.schema, log.config, codec)
