"""The rebalance listener of a program, and how it is called."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from embedlog.callbacks import check_callback
from embedlog.errors import IllegalStateError
from embedlog.lazy import asyncio
from embedlog.record import TopicPartition
from embedlog.tasks import current_caller, has_running_loop


class ConsumerRebalanceListener:
    """Notified when partitions are assigned and revoked; derive from it, and override methods.

    All methods run on the polling thread, inside `poll`, iteration, `unsubscribe` and
    `close`.  They may commit, seek, pause, and ask for positions.  If they are ``async def``,
    the consumer is used with ``await`` and ``async for`` only.
    """

    def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        """Called before partitions go to other members: finish processing, and commit."""

    def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        """Called after partitions were assigned: seek, unless the committed offset is right."""

    def on_partitions_lost(self, lost: set[TopicPartition]) -> None:
        """Called when other members may own partitions already; by default, as revoked."""
        self.on_partitions_revoked(lost)


_REQUIRED = ("on_partitions_revoked", "on_partitions_assigned")
"""A listener of another library, such as kafka-python, has these too."""


class RebalanceNotifier:
    """Calls a listener, and keeps its first error until the rebalance is complete."""

    def __init__(self, listener: ConsumerRebalanceListener | None = None) -> None:
        if listener is not None and not all(hasattr(listener, name) for name in _REQUIRED):
            raise TypeError(f"listener must be a ConsumerRebalanceListener, got {listener!r}")
        self.is_async = False
        """Whether a call of the listener may wait: then only a task may follow the group."""
        for name in (*_REQUIRED, "on_partitions_lost"):
            if hasattr(listener, name):
                if has_running_loop() and asyncio.iscoroutinefunction(getattr(listener, name)):
                    self.is_async = True
                else:
                    check_callback(getattr(listener, name), f"{name} of the listener")
        self.has_listener = listener is not None
        self._listener = ConsumerRebalanceListener() if listener is None else listener
        self._error: BaseException | None = None
        self._caller: object = None

    @property
    def in_callback(self) -> bool:
        """Whether this thread, or this task, is inside a call of the listener."""
        return self._caller is not None and self._caller == current_caller()

    def check_not_in_callback(self, operation: str) -> None:
        """Refuse an operation that a listener may not call.

        Raises:
            IllegalStateError: The listener called it.
        """
        if self.in_callback:
            raise IllegalStateError(f"A rebalance listener must not call {operation}")

    async def revoked(self, partitions: Collection[TopicPartition]) -> None:
        """Call `on_partitions_revoked`."""
        await self._call(self._listener.on_partitions_revoked, partitions)

    async def assigned(self, partitions: Collection[TopicPartition]) -> None:
        """Call `on_partitions_assigned`."""
        await self._call(self._listener.on_partitions_assigned, partitions)

    async def lost(self, partitions: Collection[TopicPartition]) -> None:
        """Call `on_partitions_lost`, unless no partition was lost."""
        if partitions:
            # Listeners that were written before Kafka had this callback do not have it.
            revoked = self._listener.on_partitions_revoked
            await self._call(getattr(self._listener, "on_partitions_lost", revoked), partitions)

    async def _call(
        self,
        callback: Callable[[set[TopicPartition]], Awaitable[None] | None],
        partitions: Collection[TopicPartition],
    ) -> None:
        self._caller = current_caller()
        try:
            result = callback(set(partitions))
            if result is not None and self.is_async:
                await result
        except BaseException as error:  # kept, and raised after the rebalance
            if self.is_async and isinstance(error, asyncio.CancelledError):
                raise
            self._error = self._error or error
        finally:
            self._caller = None

    def raise_error(self) -> None:
        """Raise the first error of the listener, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error
