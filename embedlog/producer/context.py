"""What the topic queues and partition writers of one producer share."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from embedlog.config import ProducerConfig
from embedlog.errors import EmbedlogError
from embedlog.listeners import PRODUCER, Client
from embedlog.producer import sender
from embedlog.producer.buffer_pool import BufferPool
from embedlog.producer.delivery import DeliveryQueue
from embedlog.producer.delivery_reports import DeliveryReports
from embedlog.producer.validation import MAX_RECORD_BYTES
from embedlog.registry import binder
from embedlog.root.root import Root
from embedlog.serializers import adapt_own

REQUEST_BYTES = 81
"""The most that Kafka's producer counts for a record above what ``buffer_memory`` counts."""
RESERVATION_BYTES = 64 << 10
"""An open batch reserves memory in steps of this size, so that few sends have to."""


class ProducerContext:
    """Settings, memory, reports, background thread and identity of one producer.

    Args:
        owner: The producer.  Futures and queues keep it alive through this reference, so that
            its finalizer does not close it while a future is pending.
        root: The log root to write to.
        options: The settings that the program gave, by name.
    """

    def __init__(self, owner: object, root: Root, options: Mapping[str, object]) -> None:
        self.owner = owner
        self.root = root
        self.config = config = ProducerConfig.parse(options)
        self.explicit_batch_size = config.batch_size if "batch_size" in options else None
        self.linger = max(config.linger_ms / 1000, sender.TICK)
        """In seconds, like `delivery_timeout`."""
        self.delivery_timeout = config.delivery_timeout_ms / 1000
        self.always_allowed_bytes = min(config.max_request_size - REQUEST_BYTES, MAX_RECORD_BYTES)
        """A record of up to this size, as ``buffer_memory`` counts it, is within all limits."""
        # Not more than a record that is always allowed: then a record that is too large always
        # needs a reservation, which checks its size.
        self.reservation_bytes = max(min(RESERVATION_BYTES, self.always_allowed_bytes), 0)
        self.bind = binder(root)
        """Connects serializers that need a schema registry to the one of the log."""
        self.key_serializer = adapt_own(config.key_serializer, "serialize", "key")
        self.value_serializer = adapt_own(config.value_serializer, "serialize", "value")
        self.durability = None if config.acks == "all" else "os"
        self.synced = (self.durability or root.durability) == "fsync"
        """Whether each append waits for a flush."""

    def start(self, queues: Mapping[str, DeliveryQueue]) -> None:
        """Create what a forked child must not share with its parent; called again in a child."""
        self.queues = queues
        """The topics that were sent to, by name."""
        self.buffer_pool = BufferPool(self.config.buffer_memory)
        self.lock = self.buffer_pool.lock
        self._identity: tuple[int, int] | None = None
        self._identity_lock = threading.Lock()
        self.abandoned = False
        """The producer was closed: what is not written fails."""
        self.fenced: EmbedlogError | None = None
        """The error that says that a newer producer has the name of this one."""
        self.reports = DeliveryReports(self.buffer_pool)
        self.sender = sender.Sender(self.lock, queues)
        config = self.config
        self.client = Client(PRODUCER, config.producer_name or "", config.client_id or "")
        """What listeners know of the producer."""

    def identity(self) -> tuple[int, int]:
        """Return the producer id and epoch, which the log assigns when they are first needed."""
        with self._identity_lock:
            if self._identity is None:
                self._identity = self.root.producer_identity(self.config.producer_name)
            return self._identity

    def drop_identity(self) -> None:
        """Have a new identity assigned when it is next needed."""
        self._identity = None
