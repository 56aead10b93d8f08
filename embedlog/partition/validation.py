"""Checking batches against the limits of a topic (A4, A6, A7)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from embedlog import batch as batches
from embedlog.batch import EncodedBatch
from embedlog.errors import InvalidRecordError, RecordBatchTooLargeError, RecordTooLargeError
from embedlog.partition.state import PartitionState


def check(log: PartitionState, encoded: Sequence[EncodedBatch]) -> None:
    """Raise if the topic's settings do not allow one of the batches.

    Raises:
        RecordTooLargeError: A batch is over ``max.message.bytes`` (A4).
        RecordBatchTooLargeError: A batch takes more than ``segment.bytes`` on the disk (A4).
        InvalidRecordError: A6, A7.
    """
    for batch in encoded:
        _check_batch(log, batch)
    if log.rules.requires_keys and any(batch.null_keys for batch in encoded):
        raise _keys_missing(log, encoded)


def _check_batch(log: PartitionState, batch: EncodedBatch) -> None:
    size, config = batch.size, log.config
    if batches.is_over(batch, config.max_message_bytes):
        raise RecordTooLargeError(
            f"A batch of {batches.kafka_size(batch)} bytes, as Kafka counts them, is over "
            f"max.message.bytes {config.max_message_bytes}",
            topic=log.topic,
            partition=log.partition,
            todo="Send fewer records at once, or raise max.message.bytes of the topic.",
        )
    if size > config.segment_bytes:
        raise RecordBatchTooLargeError(
            f"A batch that takes {size} bytes on the disk is over segment.bytes "
            f"{config.segment_bytes}",
            topic=log.topic,
            partition=log.partition,
            todo="Send fewer records at once, or raise segment.bytes of the topic.",
        )
    if log.rules.checks_timestamps:
        _check_timestamps(log, batch)


def _check_timestamps(log: PartitionState, batch: EncodedBatch) -> None:
    now_ms, config = log.context.clock(), log.config
    oldest = now_ms - config.message_timestamp_before_max_ms
    newest = now_ms + config.message_timestamp_after_max_ms
    if batch.min_timestamp < oldest or batch.max_timestamp > newest:
        raise InvalidRecordError(
            f"Timestamps {batch.min_timestamp} to {batch.max_timestamp} are not within "
            f"{oldest} to {newest}",
            topic=log.topic,
            partition=log.partition,
            todo="See message.timestamp.before.max.ms and .after.max.ms.",
        )


def _keys_missing(log: PartitionState, encoded: Sequence[EncodedBatch]) -> InvalidRecordError:
    """Return the error that names the records without a key, counted over all batches (A6)."""
    firsts = accumulate((batch.count for batch in encoded), initial=0)
    rows = [
        first + row
        for first, batch in zip(firsts, encoded, strict=False)
        for row in batches.rows_without_key(batch)
    ]
    return InvalidRecordError(
        f"Records {rows[:20]}{'…' if len(rows) > 20 else ''} have no key, "
        "and the topic keeps the last record of each key",
        topic=log.topic,
        partition=log.partition,
        indices=rows,
        todo="Give them keys.",
    )
