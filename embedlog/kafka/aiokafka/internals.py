"""What frameworks read of the objects inside of aiokafka's consumer: one object stands for all."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embedlog.kafka.aiokafka.consumer import AIOKafkaConsumer


class ConsumerInternals:
    """The coordinator, the fetcher and the subscription state of a consumer of a log."""

    coordinator_id = 0
    active = True

    def __init__(self, consumer: AIOKafkaConsumer) -> None:
        self._consumer = consumer
        self._subscriptions = self.subscription = self.assignment = self

    # The coordinator

    @property
    def generation(self) -> int:
        """The generation of the group; -1 before it has joined."""
        return self._consumer._started().group_metadata().generation_id

    @property
    def member_id(self) -> str:
        """The id of the member."""
        return self._consumer._started().group_metadata().member_id

    @property
    def _metadata_snapshot(self) -> dict[str, int]:
        """The number of partitions by topic."""
        root = self._consumer._started()._root
        return {name: info.partitions for name, info in root.topics().items()}

    async def close(self) -> None:
        """Close the consumer."""
        await self._consumer.stop()

    # The fetcher

    @property
    def _closed(self) -> bool:
        return bool(self._consumer._closed)

    def fetch_context(self) -> AbstractContextManager[None]:
        """Return the block in which records are fetched."""
        return nullcontext()

    async def fetched_records(
        self, partitions: Iterable[Any], timeout: float | None = 0, max_records: int | None = None
    ) -> dict[Any, list[Any]]:
        """Return the next records of these partitions."""
        milliseconds = 1000 * (timeout or 0)
        return await self._consumer.getmany(
            *partitions, timeout_ms=milliseconds, max_records=max_records
        )

    # The subscription

    @property
    def topics(self) -> Any:
        """The topics."""
        return self._consumer.subscription()

    @property
    def tps(self) -> Any:
        """The assigned partitions."""
        return self._consumer.assignment()

    def state_value(self, partition: Any) -> Any:
        """Return the position and the end of an assigned partition."""
        consumer = self._consumer._started()
        cursor = next((c for c in consumer._assignment.snapshot if c.partition == partition), None)
        if cursor is None:
            return None
        return SimpleNamespace(
            position=cursor.known_position,
            highwater=self._consumer.highwater(partition),
            timestamp=self._consumer.last_poll_timestamp(partition),
            has_valid_position=cursor.known_position is not None,
        )
