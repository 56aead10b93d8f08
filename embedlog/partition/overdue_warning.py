"""Warning of records that retention deletes at its next round (C2).

Under ``retention.clock=record``, which is Kafka's rule, records with old timestamps are
older than ``retention.ms`` when they arrive, and nothing else reports it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from embedlog.batch import EncodedBatch
from embedlog.config import TopicConfig

_logger = logging.getLogger("embedlog")
_warned: set[tuple[str, int]] = set()
"""The topics that this process has warned of: the path of the root, and the topic's id."""


class OverdueWarning:
    """Warns once per topic and process of records that are past retention when appended.

    Args:
        root: The path of the log root.
        topic: The topic's name.
        topic_id: The topic's id.
        partition: The partition that records are appended to.
    """

    def __init__(self, root: str, topic: str, topic_id: int, partition: int) -> None:
        self._topic, self._partition = topic, partition
        self._warning = root, topic_id
        self.age_ms: int | None = None
        """The age from which on a record is reported; None if none is."""

    def configure(self, config: TopicConfig) -> None:
        """Follow a change of the topic's settings."""
        by_record = config.retention_clock == "record" and config.deletes
        by_record = by_record and config.message_timestamp_type != "LogAppendTime"
        limited = config.retention_ms >= 0 and self._warning not in _warned
        self.age_ms = config.retention_ms if by_record and limited else None

    def warn(self, batches: Sequence[EncodedBatch], clock: Callable[[], int]) -> None:
        """Warn if one of the appended batches is past retention already.

        Must be called without the partition's lock: a logging handler may be slow.
        """
        if self.age_ms is None or self._warning in _warned:
            return
        oldest = clock() - self.age_ms
        if not any(0 <= batch.max_timestamp < oldest for batch in batches):
            return
        retention_ms, self.age_ms = self.age_ms, None
        _warned.add(self._warning)
        _logger.warning(
            "%s-%d: records were appended whose timestamps are older than retention.ms (%d); "
            "with retention.clock=record they are deleted soon, once their segment has no newer "
            "ones. To keep them for retention.ms after they were appended, set "
            "retention.clock=append.",
            self._topic,
            self._partition,
            retention_ms,
        )
