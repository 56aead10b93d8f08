"""What a producer knows about a topic: its settings and partitions, and the sizes that follow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from embedlog.batch import BatchLimits
from embedlog.catalog import TopicInfo
from embedlog.lazy import logging
from embedlog.producer.row_batches import CHUNK_BYTES, DECODED_BYTES, Encoding
from embedlog.serializers import adapt_for_topic

if TYPE_CHECKING:
    from embedlog.producer.batcher import Batcher
    from embedlog.schemas.rows import RowEncoder

COLUMN_BYTES = 1 << 20
"""How large batches of columns are without a ``batch_size``: more rows share a batch's cost."""
HEAD_BYTES = 1024
"""More than a batch takes besides its records."""
KAFKA_BYTES = 96
"""The same as Kafka counts (`batch.limits`)."""


class TopicSettings:
    """The settings of one topic, which `refresh` reads again after a change.

    Args:
        batcher: What the producer shares.
        topic: The topic.
        changed: Called with this object at first and after each change.
    """

    def __init__(
        self, batcher: Batcher, topic: str, changed: Callable[[TopicSettings], None]
    ) -> None:
        self._batcher, self._topic, self._changed = batcher, topic, changed
        self._refresh_lock = threading.Lock()
        self.version = -1
        """The version of the catalog that the settings are from."""
        self.current_version = batcher.root.context.catalog.version
        """Returns the version that the catalog has now."""
        self.info: TopicInfo
        self.refresh()

    def refresh(self) -> TopicInfo:
        """Read the topic's settings and partitions again; cheap if nothing changed."""
        # One thread at a time: a slow one must not overwrite newer settings with older ones.
        with self._refresh_lock:
            root = self._batcher.root
            version = root.version()
            info: TopicInfo = root.ensure_topic(self._topic)
            if info is not getattr(self, "info", None):
                self._apply(info)
            # Last, since a drain relies on it.  It was read before `ensure_topic`, so
            # it may be older than the settings, but never newer.
            self.version = version
            return info

    def _apply(self, info: TopicInfo) -> None:
        before: TopicInfo | None = getattr(self, "info", None)
        if before is not None and before.partitions != info.partitions:
            self._batcher.log(
                logging.WARNING,
                "%s has %d partitions instead of %d: keys go to other partitions from now on",
                *(self._topic, info.partitions, before.partitions),
            )
        batcher, config = self._batcher, info.config
        schema = batcher.root.context.catalog.schema(info)
        self.row_encoder: RowEncoder | None = None
        """What checks the records for a typed topic; None if values are bytes."""
        statistics: frozenset[str] | None = None
        if schema is not None:
            from embedlog.schemas.rows import RowEncoder
            from embedlog.schemas.statistics import text_columns_of

            self.row_encoder = RowEncoder(info.name, schema)
            statistics = text_columns_of(config)
        producer, self.info = batcher.config, info
        adapt = partial(
            adapt_for_topic,
            info.name,
            action="serialize",
            allow_pickle=producer.allow_pickle or batcher.root.allow_pickle,
            bind=batcher.bind,
        )
        self.key_serializer = adapt(batcher.key_serializer, config.key_serializer, field="key")
        """None if keys are bytes already, likewise for values."""
        self.value_serializer = adapt(
            batcher.value_serializer, config.value_serializer, field="value"
        )
        self.serializes = bool(self.key_serializer or self.value_serializer)
        self.compacts = config.compacts
        from_producer = config.compression_type == "producer"
        compression = (producer if from_producer else config).compression_type
        limits = BatchLimits(config.max_message_bytes, config.segment_bytes)
        # A topic may refuse batches as large as the producer would make them.
        # The null bitmaps are not counted: two bits for each 16 bytes or more.
        accepted = min(
            limits.message - limits.message // 64 - KAFKA_BYTES,
            limits.segment - limits.segment // 64 - HEAD_BYTES,
        )
        asked = batcher.explicit_batch_size
        decoded = max(asked or DECODED_BYTES, 1)
        self.encoding = Encoding(
            compression,
            limits,
            max(min(producer.batch_size, accepted), 1),
            max(min(asked or COLUMN_BYTES, accepted), 1),
            max(min(decoded, accepted), 1),
            decoded,
            statistics,
        )
        self.drain_bytes = min(self.encoding.list_bytes * info.partitions, CHUNK_BYTES)
        """How much is collected before `send` drains it."""
        self._changed(self)
