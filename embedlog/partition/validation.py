"""Checking batches against the limits of a topic (A4, A6, A7), and warning of overdue ones (C2)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate
from typing import cast

from embedlog import batch as batches
from embedlog.batch import TYPED, EncodedBatch
from embedlog.catalog import SegmentInfo
from embedlog.errors import (
    InvalidRecordError,
    MirrorConflictError,
    MirroredTopicError,
    RecordBatchTooLargeError,
    RecordTooLargeError,
)
from embedlog.partition.state import PartitionState
from embedlog.schemas.statistics import text_columns_of
from embedlog.schemas.typed_batch import TypedBatch

_logger = logging.getLogger("embedlog.partition")
_warned: set[tuple[str, int]] = set()
"""The topics that this process has warned of: the path of the root, and the topic's id."""


def in_current_schema(
    log: PartitionState, encoded: Sequence[EncodedBatch]
) -> Sequence[EncodedBatch]:
    """Return batches of a typed topic in the current version of its schema.

    Their producer may have encoded them before the schema changed.  Those of a topic of bytes
    are returned as they are.
    """
    schema = log.schema
    if schema is None:
        return encoded
    statistics = text_columns_of(log.config)
    return [cast("TypedBatch", batch).fitted(schema, 0, statistics) for batch in encoded]


def with_columns_of(log: PartitionState, info: SegmentInfo, batch: EncodedBatch) -> EncodedBatch:
    """Return a batch with the columns that a segment has.

    A segment has one schema: batches after one with headers get the column too, and those of a
    typed topic that after a tombstone.
    """
    missing = info.column_flags & ~batch.flags
    if not missing:
        return batch
    if batch.flags & TYPED:
        typed = cast("TypedBatch", batch)
        assert typed.schema is not None
        return typed.fitted(typed.schema, missing, text_columns_of(log.config))
    return batches.add_headers(batch)


def _is_of_other_topic(log: PartitionState, batch: EncodedBatch) -> bool:
    schema = cast("TypedBatch", batch).schema
    return schema is not None and schema.is_of_other_topic(log.topic_id)


def check_form(log: PartitionState, batch: EncodedBatch) -> None:
    """Raise unless a batch has columns if the topic does.

    Raises:
        InvalidRecordError: It has columns, and the topic is one of bytes, or the other way round.
    """
    is_typed = log.schema is not None
    if bool(batch.flags & TYPED) is not is_typed:
        raise InvalidRecordError(
            f"The batch has {'bytes' if is_typed else 'columns'}, and the values of the topic "
            f"are {'columns' if is_typed else 'bytes'}",
            **log.where,
            todo="Was the topic deleted and created again? Send the records again.",
        )


def check_mirrored(log: PartitionState, source: str, encoded: Sequence[EncodedBatch]) -> None:
    """Raise unless a mirror may write batches, which were valid at its source.

    They are not checked against the limits of the topic: those of the source may have changed
    since, and what it holds must be in the copy too.

    Args:
        log: The partition.
        source: The topic that is copied, as in the setting ``mirror.source``.
        encoded: The batches.

    Raises:
        MirrorConflictError: The topic is no copy of that one, or not any more.
        InvalidRecordError: The batches are not those of such a topic.
    """
    if log.rules.mirror_source != source:
        raise MirrorConflictError(
            f"The topic is no copy of {source}, or not any more: its setting mirror.source is "
            f"{log.rules.mirror_source!r}",
            **log.where,
            todo="After a failover, mirror into the other direction.",
        )
    for batch in encoded:
        check_form(log, batch)


def check(log: PartitionState, encoded: Sequence[EncodedBatch]) -> None:
    """Raise if the topic's settings do not allow one of the batches.

    Raises:
        RecordTooLargeError: A batch is over ``max.message.bytes`` (A4).
        RecordBatchTooLargeError: A batch takes more than ``segment.bytes`` on the disk (A4).
        InvalidRecordError: A6, A7; or the batch has columns, and the topic is one of bytes, or
            the other way round.
        MirroredTopicError: Only a mirror may write to the topic.
    """
    if log.rules.mirror_source:
        raise MirroredTopicError(
            f"The topic is a copy of {log.rules.mirror_source}, and only its mirror writes to it",
            **log.where,
            source=log.rules.mirror_source,
            todo="Write to the source; if that is lost, run `embedlog failover` here first.",
        )
    config, is_typed = log.config, log.schema is not None
    for batch in encoded:
        check_form(log, batch)
        if is_typed and _is_of_other_topic(log, batch):
            raise InvalidRecordError(
                "The batch was made for a topic of this name that was deleted",
                **log.where,
                todo="Send the records again to write them to the topic that has the name now.",
            )
        if batches.is_over(batch, config.max_message_bytes):
            raise RecordTooLargeError(
                f"A batch of {batches.kafka_size(batch)} bytes, as Kafka counts them, is over "
                f"max.message.bytes {config.max_message_bytes}",
                **log.where,
                todo="Send fewer records at once, or raise max.message.bytes of the topic.",
            )
        if batch.size > config.segment_bytes:
            raise RecordBatchTooLargeError(
                f"A batch that takes {batch.size} bytes on the disk is over segment.bytes "
                f"{config.segment_bytes}",
                **log.where,
                todo="Send fewer records at once, or raise segment.bytes of the topic.",
            )
        if log.rules.checks_timestamps:
            now_ms = log.context.clock()
            oldest = now_ms - config.message_timestamp_before_max_ms
            newest = now_ms + config.message_timestamp_after_max_ms
            if batch.min_timestamp < oldest or batch.max_timestamp > newest:
                raise InvalidRecordError(
                    f"Timestamps {batch.min_timestamp} to {batch.max_timestamp} are not within "
                    f"{oldest} to {newest}",
                    **log.where,
                    todo="See message.timestamp.before.max.ms and .after.max.ms.",
                )
    if log.rules.requires_keys and any(batch.null_keys for batch in encoded):
        raise _keys_missing(log, encoded)


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
        **log.where,
        indices=rows,
        todo="Give them keys.",
    )


def warn_if_overdue(log: PartitionState, encoded: Sequence[EncodedBatch]) -> None:
    """Warn, once per topic and process, of records that retention deletes at its next round.

    Under ``retention.clock=record``, which is Kafka's rule, records with old timestamps are
    older than ``retention.ms`` when they arrive, and nothing else reports it.  Must be
    called without the partition's lock: a logging handler may be slow.
    """
    age_ms, topic = log.rules.overdue_age_ms, (log.context.root, log.topic_id)
    if age_ms is None:
        return
    oldest = log.context.clock() - age_ms
    if topic not in _warned:
        if not any(0 <= batch.max_timestamp < oldest for batch in encoded):
            return
        _warned.add(topic)
        _logger.warning(
            "%s-%d: records were appended whose timestamps are older than retention.ms (%d); "
            "with retention.clock=record they are deleted soon, once their segment has no newer "
            "ones. To keep them for retention.ms after they were appended, set "
            "retention.clock=append.",
            log.topic,
            log.partition,
            age_ms,
        )
    log.rules.overdue_age_ms = None
