"""What a producer knows about a topic: its settings and partitions, and the sizes that follow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from embedlog.batch import BatchLimits
from embedlog.catalog import TopicInfo
from embedlog.config import TopicConfig
from embedlog.lazy import logging
from embedlog.producer.context import ProducerContext
from embedlog.producer.row_batches import CHUNK_BYTES, DECODED_BYTES
from embedlog.serializers import adapt_for_topic

COLUMN_BYTES = 1 << 20
"""How large batches of columns are without a ``batch_size``: more rows share a batch's cost."""
HEAD_BYTES = 1024
"""More than a batch takes besides its records."""
ONE_RECORD_BYTES = 512
"""More than a batch of one record takes besides its key and value."""
KAFKA_BYTES = 96
"""The same as Kafka counts (`batch.limits`)."""


class TopicSettings:
    """The settings of one topic, which `refresh` reads again after a change.

    Args:
        context: What the producer shares.
        topic: The topic.
        changed: Called with this object at first and after each change.
    """

    def __init__(
        self, context: ProducerContext, topic: str, changed: Callable[[TopicSettings], None]
    ) -> None:
        self._context, self._topic, self._changed = context, topic, changed
        self._refresh_lock = threading.Lock()
        self.version = -1
        """The version of the catalog that the settings are from."""
        self.current_version = context.root.context.catalog.version
        """Returns the version that the catalog has now."""
        self.info: TopicInfo
        self.refresh()

    def refresh(self) -> TopicInfo:
        """Read the topic's settings and partitions again; cheap if nothing changed."""
        # One thread at a time: a slow one must not overwrite newer settings with older ones.
        with self._refresh_lock:
            root = self._context.root
            version = root.version()
            info: TopicInfo = root.ensure_topic(self._topic)
            if info is not getattr(self, "info", None):
                self._apply(info)
            # Last, since `_send_one_fast` relies on it.  It was read before `ensure_topic`, so
            # it may be older than the settings, but never newer.
            self.version = version
            return info

    def _apply(self, info: TopicInfo) -> None:
        before: TopicInfo | None = getattr(self, "info", None)
        if before is not None and before.partitions != info.partitions:
            self._context.reports.log(
                logging.WARNING,
                "%s has %d partitions instead of %d: keys go to other partitions from now on",
                *(self._topic, info.partitions, before.partitions),
            )
        context, config = self._context, info.config
        schema = context.root.context.catalog.schema(info)
        self.row_encoder: RowEncoder | None = None
        """What checks the records for a typed topic; None if values are bytes."""
        if schema is not None:
            from embedlog.schemas.rows import RowEncoder

            self.row_encoder = RowEncoder(info.name, schema)
        self._adapt(info.name, config)
        producer, self.info = context.config, info
        self.compacts = config.compacts
        from_producer = config.compression_type == "producer"
        self.compression = (producer if from_producer else config).compression_type
        self.uncompressed = self.compression == "none"
        self.limits = limits = BatchLimits(config.max_message_bytes, config.segment_bytes)
        self.one_record_bytes = min(limits.message - KAFKA_BYTES, limits.segment - ONE_RECORD_BYTES)
        """A record of up to this size can be written as a batch of its own, unchecked."""
        # A topic may refuse batches as large as the producer would make them.
        # The null bitmaps are not counted: two bits for each 16 bytes or more.
        accepted = min(
            limits.message - limits.message // 64 - KAFKA_BYTES,
            limits.segment - limits.segment // 64 - HEAD_BYTES,
        )
        self.batch_bytes = max(min(producer.batch_size, accepted), 1)
        """How large a batch of `send` or of lists becomes."""
        column_bytes = max(context.explicit_batch_size or COLUMN_BYTES, 1)
        self.column_batch_bytes = max(min(column_bytes, accepted), 1)
        """How large a batch of columns becomes."""
        self.decoded_batch_bytes = max(context.explicit_batch_size or DECODED_BYTES, 1)
        """How large a batch of a typed topic becomes, before its compression."""
        self.typed_batch_bytes = max(min(self.decoded_batch_bytes, accepted), 1)
        """How large it becomes, as it is stored."""
        self.drain_bytes = min(self.batch_bytes * info.partitions, CHUNK_BYTES)
        """How much is collected before `send` drains it."""
        self.reservation_bytes = min(context.reservation_bytes, self.drain_bytes)
        self._changed(self)

    def _adapt(self, topic: str, config: TopicConfig) -> None:
        context, settings = self._context, self._context.config
        adapt = partial(
            adapt_for_topic,
            topic,
            action="serialize",
            allow_pickle=settings.allow_pickle or context.root.allow_pickle,
            bind=context.bind,
        )
        self.key_serializer = adapt(context.key_serializer, config.key_serializer, field="key")
        """None if keys are bytes already, likewise for values."""
        self.value_serializer = adapt(
            context.value_serializer, config.value_serializer, field="value"
        )
        self.serializes = bool(self.key_serializer or self.value_serializer)
