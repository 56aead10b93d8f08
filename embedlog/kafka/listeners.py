"""The rebalance listeners of kafka-python, which programs derive from."""

from __future__ import annotations

from typing import Any

from embedlog.consumer import ConsumerRebalanceListener as LogListener
from embedlog.kafka.installed import pick


class _AsyncListener:
    """A listener whose methods are coroutines."""

    async def on_partitions_revoked(self, revoked: Any) -> None:
        """Called before partitions go to other members."""

    async def on_partitions_assigned(self, assigned: Any) -> None:
        """Called after partitions were assigned."""

    async def on_partitions_lost(self, lost: Any) -> None:
        """Called when other members may own partitions already; by default, as revoked."""
        await self.on_partitions_revoked(lost)


ConsumerRebalanceListener: Any = pick("kafka", "ConsumerRebalanceListener", LogListener)
AsyncConsumerRebalanceListener: Any = pick(
    "kafka", "AsyncConsumerRebalanceListener", _AsyncListener
)
