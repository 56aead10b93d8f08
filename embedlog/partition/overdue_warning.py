"""Warning of records that retention deletes at its next round (C2).

Under ``retention.clock=record``, which is Kafka's rule, records of long ago are
older than ``retention.ms`` when they arrive, and nothing else says so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from embedlog.batch import EncodedBatch
from embedlog.config import TopicConfig

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

_logger = logging.getLogger("embedlog")
_warned: set[tuple[str, int]] = set()
"""The topics that this process has warned of: path of the root, and the topic's id."""


def age_ms(log: PartitionLog, config: TopicConfig) -> int | None:
    """Return the age of the youngest record from which on `warn` warns; None if it does not."""
    if config.retention_clock != "record" or not config.deletes or config.retention_ms < 0:
        return None
    stamped = config.message_timestamp_type == "LogAppendTime"
    return None if stamped or _mark(log) in _warned else config.retention_ms


def warn(log: PartitionLog, encoded: Sequence[EncodedBatch]) -> None:
    """Warn, once per topic and process, if a batch that was appended is due already.

    Call it without the partition's lock: a handler of the log may be slow.
    """
    if log.overdue_ms is None:
        return
    oldest = log.context.clock() - log.overdue_ms
    latest = [one.max_timestamp for one in encoded if 0 <= one.max_timestamp < oldest]
    if not latest or _mark(log) in _warned:
        return
    _warned.add(_mark(log))
    log.overdue_ms = None
    _logger.warning(
        "%s-%d: records were appended whose timestamps are older than retention.ms (%d); with "
        "retention.clock=record they are deleted soon, once their segment has no younger ones. "
        "To keep them for retention.ms after they were appended, set retention.clock=append.",
        log.topic,
        log.partition,
        log.config.retention_ms,
    )


def _mark(log: PartitionLog) -> tuple[str, int]:
    return log.context.root, log.topic_id
