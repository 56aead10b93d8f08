"""What a topic refuses to take, and how it is told (A4, A6, A7)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from embedlog import batch as batches
from embedlog.batch import EncodedBatch
from embedlog.config import TopicConfig
from embedlog.errors import InvalidRecordError, RecordBatchTooLargeError, RecordTooLargeError

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog


def check(log: PartitionLog, encoded: Sequence[EncodedBatch]) -> None:
    """Refuse batches that the topic's settings do not allow.

    Raises:
        RecordTooLargeError: A batch over ``max.message.bytes`` (A4).
        InvalidRecordError: A6, A7.
    """
    for one in encoded:
        _check_one(log, one)
    if log.needs_keys and any(one.null_keys for one in encoded):
        raise _no_key(log, encoded)


def _check_one(log: PartitionLog, one: EncodedBatch) -> None:
    size, config = one.size, log.config
    if batches.is_over(one, config.max_message_bytes):
        raise RecordTooLargeError(
            f"a batch of {batches.kafka_size(one)} bytes, as Kafka counts them, is over "
            f"max.message.bytes {config.max_message_bytes}",
            topic=log.topic,
            partition=log.partition,
            todo="send less at once, or raise max.message.bytes of the topic",
        )
    if size > config.segment_bytes:
        raise RecordBatchTooLargeError(
            f"a batch that takes {size} bytes on the disk is over segment.bytes "
            f"{config.segment_bytes}",
            topic=log.topic,
            partition=log.partition,
            todo="send less at once, or raise segment.bytes of the topic",
        )
    if log.bounds_times:
        _check_times(log, one)


def _check_times(log: PartitionLog, one: EncodedBatch) -> None:
    now, config = log.context.clock(), log.config
    oldest = now - config.message_timestamp_before_max_ms
    newest = now + config.message_timestamp_after_max_ms
    if one.min_timestamp < oldest or one.max_timestamp > newest:
        raise InvalidRecordError(
            f"timestamps {one.min_timestamp} to {one.max_timestamp} are not within "
            f"{oldest} to {newest}",
            topic=log.topic,
            partition=log.partition,
            todo="see message.timestamp.before.max.ms and .after.max.ms",
        )


def _no_key(log: PartitionLog, encoded: Sequence[EncodedBatch]) -> InvalidRecordError:
    """Say which records cannot be compacted, counted from the first one given (A6)."""
    firsts = accumulate((one.count for one in encoded), initial=0)
    rows = [
        first + row
        for first, one in zip(firsts, encoded, strict=False)
        for row in batches.rows_without_key(one)
    ]
    return InvalidRecordError(
        f"records {rows[:20]}{'…' if len(rows) > 20 else ''} have no key, "
        "and the topic keeps the last record of each key",
        topic=log.topic,
        partition=log.partition,
        indices=rows,
        todo="give them keys",
    )


def bounds_times(config: TopicConfig) -> bool:
    """Whether a topic refuses timestamps far from the clock."""
    narrow = min(config.message_timestamp_before_max_ms, config.message_timestamp_after_max_ms)
    return config.message_timestamp_type == "CreateTime" and narrow < (1 << 63) - 1
