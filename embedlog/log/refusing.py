"""What a topic refuses about records, and how it is told (A6, A7)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from embedlog import batch as batches
from embedlog.batch import EncodedBatch
from embedlog.errors import InvalidRecordError

if TYPE_CHECKING:
    from embedlog.log.partition import PartitionLog


def check_times(log: PartitionLog, one: EncodedBatch) -> None:
    """Refuse a batch with a timestamp too far from the clock (A7)."""
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


def no_key(log: PartitionLog, encoded: Sequence[EncodedBatch]) -> InvalidRecordError:
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
