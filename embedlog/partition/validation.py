"""Checking batches against the limits of a topic, and warning of overdue ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, cast

from embedlog import batch as batches
from embedlog.batch import EXPLICIT_OFFSETS, TYPED, EncodedBatch, PlacedBatch
from embedlog.catalog import SegmentInfo
from embedlog.errors import (
    CorruptionError,
    InvalidRecordError,
    InvalidTimestampError,
    MirrorConflictError,
    MirroredTopicError,
    RecordBatchTooLargeError,
    RecordTooLargeError,
)
from embedlog.hints import FAILOVER
from embedlog.lazy import logging

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog
    from embedlog.schemas.topic_schema import TopicSchema
    from embedlog.schemas.typed_batch import TypedBatch

_logger = logging.getLogger("embedlog.partition")
_warned: set[tuple[str, int]] = set()
"""The topics that this process has warned of: the path of the root, and the topic's id."""


def in_current_schema(log: PartitionLog, encoded: Sequence[EncodedBatch]) -> Sequence[EncodedBatch]:
    """Return batches of a typed topic in the current version of its schema.

    Their producer may have encoded them before the schema changed.  Those of a topic of bytes
    are returned as they are.
    """
    schema = log.schema
    if schema is None:
        return encoded
    from embedlog.schemas.statistics import text_columns_of

    statistics = text_columns_of(log.config)
    return [cast("TypedBatch", batch).fitted(schema, 0, statistics) for batch in encoded]


def with_columns_of(log: PartitionLog, info: SegmentInfo, batch: EncodedBatch) -> EncodedBatch:
    """Return a batch with the columns that a segment has.

    A segment has one schema: batches after one with headers get the column too, and those of a
    typed topic that after a tombstone.
    """
    missing = info.column_flags & ~batch.flags
    if not missing:
        return batch
    if batch.flags & TYPED:
        from embedlog.schemas.statistics import text_columns_of

        typed = cast("TypedBatch", batch)
        assert typed.schema is not None
        return typed.fitted(typed.schema, missing, text_columns_of(log.config))
    return batches.add_headers(batch)


def of_this_topic(
    log: PartitionLog, placed: Sequence[tuple[int, EncodedBatch]], identical: bool
) -> Sequence[tuple[int, EncodedBatch]]:
    """Return batches that may come from another log as batches of this topic.

    Those of a typed topic get the topic's own schema of the same version; with ``identical``
    also those of no topic.  Those of a topic of bytes are returned as they are.

    Raises:
        InvalidRecordError: The topic has no such version, or it has other columns.
    """
    if log.schema is None:
        return placed
    from embedlog.schemas.topic_schema import OTHER_LOG
    from embedlog.schemas.typed_batch import typed

    own: dict[int, TopicSchema] = {}
    result: list[tuple[int, EncodedBatch]] = []
    for offset, batch in placed:
        schema = cast("TypedBatch", batch).schema if batch.flags & TYPED else None
        others = (OTHER_LOG, None) if identical else (OTHER_LOG,)
        if schema is not None and schema.topic_id in others:
            if id(schema) not in own:
                own[id(schema)] = _own_schema(log, schema)
            batch = typed(batch, own[id(schema)])
        result.append(PlacedBatch(offset, batch))
    return result


def _own_schema(log: PartitionLog, schema: TopicSchema) -> TopicSchema:
    catalog, own = log.context.catalog, None
    with suppress(CorruptionError):
        own = catalog.schema(catalog.topic(log.topic), schema.version)
    if own is None or not own.has_columns_of(schema):
        raise InvalidRecordError(
            f"The batch has version {schema.version} of the schema of another log, "
            f"which this topic does not have",
            **log.where,
            todo="Give the topic the same versions of its schema first.",
        )
    return own


def _is_of_other_topic(log: PartitionLog, batch: EncodedBatch) -> bool:
    schema = cast("TypedBatch", batch).schema
    return schema is not None and schema.is_of_other_topic(log.topic_id)


def check_writer(log: PartitionLog, mirror: str = "") -> None:
    """Raise if the topic is a copy, and the writer is not its mirror.

    Args:
        log: The partition.
        mirror: The topic that a mirror copies, as in the setting ``mirror.source``; empty for any
            other writer.

    Raises:
        MirroredTopicError: Only a mirror may write to the topic.
        MirrorConflictError: The mirror copies another topic: this one is not a copy of it, or not
            any more.
    """
    source = log.rules.mirror_source
    if source == mirror:
        return
    if mirror:
        raise MirrorConflictError(
            f"The topic is not a copy of {mirror}, or not any more: its setting mirror.source is "
            f"{source!r}",
            **log.where,
            todo="After a failover, mirror in the other direction.",
        )
    raise MirroredTopicError(
        f"The topic is a copy of {source}, and only its mirror writes to it",
        **log.where,
        source=source,
        todo=FAILOVER,
    )


def check_kind(log: PartitionLog, encoded: Sequence[EncodedBatch], *, offsets: bool = True) -> None:
    """Raise if one of the batches does not have the kind of columns that the topic has.

    Raises:
        InvalidRecordError: It has columns, and the topic is one of bytes, or the other way round;
            or it has a column of offsets, and ``offsets`` is False.
    """
    is_typed = log.schema is not None
    for batch in encoded:
        if bool(batch.flags & TYPED) is not is_typed:
            raise InvalidRecordError(
                f"The batch has {'bytes' if is_typed else 'columns'}, and the values of the topic "
                f"are {'columns' if is_typed else 'bytes'}",
                **log.where,
                todo="Was the topic deleted and created again? Send the records again.",
            )
        if is_typed and _is_of_other_topic(log, batch):
            raise InvalidRecordError(
                "The batch was made for a topic of this name that was deleted",
                **log.where,
                todo="Send the records again to write them to the topic that has the name now.",
            )
        if batch.flags & EXPLICIT_OFFSETS and not offsets:
            raise InvalidRecordError(
                "The batch has a column of offsets, so it cannot be appended at others",
                **log.where,
                todo="Call append_at.",
            )


def check(log: PartitionLog, encoded: Sequence[EncodedBatch], *, offsets: bool = False) -> None:
    """Raise if the topic's settings do not allow one of the batches.

    Args:
        log: The partition.
        encoded: The batches.
        offsets: Whether they may have a column of offsets.

    Raises:
        RecordTooLargeError: A batch is over ``max.message.bytes``.
        RecordBatchTooLargeError: A batch takes more than ``segment.bytes`` on the disk.
        InvalidRecordError: A record lacks its key or has a timestamp out of range, or as
            `check_kind`.
        MirroredTopicError: As `check_writer`.
    """
    if log.rules.mirror_source:
        check_writer(log)
    config = log.config
    check_kind(log, encoded, offsets=offsets)
    for batch in encoded:
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
                rows = _rows(encoded, partial(batches.rows_outside, first=oldest, last=newest))
                raise InvalidTimestampError(
                    f"Timestamps {batch.min_timestamp} to {batch.max_timestamp} are not within "
                    f"{oldest} to {newest}",
                    **log.where,
                    indices=rows,
                    todo="See message.timestamp.before.max.ms and .after.max.ms.",
                )
    if log.rules.requires_keys and any(batch.null_keys for batch in encoded):
        raise _keys_missing(log, encoded)


def _keys_missing(log: PartitionLog, encoded: Sequence[EncodedBatch]) -> InvalidRecordError:
    """Return the error that names the records without a key."""
    rows = _rows(encoded, batches.rows_without_key)
    return InvalidRecordError(
        f"Records {rows[:20]}{'…' if len(rows) > 20 else ''} have no key, "
        "and the topic keeps the last record of each key",
        **log.where,
        indices=rows,
        todo="Give them keys.",
    )


def _rows(
    encoded: Sequence[EncodedBatch], rows_of: Callable[[EncodedBatch], list[int]]
) -> list[int]:
    """Return the rows that a function returns for each batch, counted over all batches."""
    firsts = accumulate((batch.count for batch in encoded), initial=0)
    return [
        first + row for first, batch in zip(firsts, encoded, strict=False) for row in rows_of(batch)
    ]


def warn_if_overdue(log: PartitionLog, encoded: Sequence[EncodedBatch]) -> None:
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
