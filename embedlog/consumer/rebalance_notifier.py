"""The rebalance listener of a program, and how it is called."""

from __future__ import annotations

from collections.abc import Callable, Collection
from threading import get_ident

from embedlog.callbacks import check_callback
from embedlog.errors import IllegalStateError
from embedlog.record import TopicPartition


class ConsumerRebalanceListener:
    """Notified when partitions are assigned and revoked; derive from it, and override methods.

    All methods run on the polling thread, inside `poll`, iteration, `unsubscribe` and
    `close`.  They may commit, seek, pause, and ask for positions.
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
        for name in (*_REQUIRED, "on_partitions_lost"):
            if hasattr(listener, name):
                check_callback(getattr(listener, name), f"{name} of the listener")
        self.has_listener = listener is not None
        self._listener = ConsumerRebalanceListener() if listener is None else listener
        self._error: BaseException | None = None
        self._calling_thread: int | None = None

    @property
    def in_callback(self) -> bool:
        """Whether this thread is inside a call of the listener."""
        return self._calling_thread == get_ident()

    def check_not_in_callback(self, operation: str) -> None:
        """Refuse an operation that a listener may not call.

        Raises:
            IllegalStateError: The listener called it.
        """
        if self.in_callback:
            raise IllegalStateError(f"A rebalance listener must not call {operation}")

    def revoked(self, partitions: Collection[TopicPartition]) -> None:
        """Call `on_partitions_revoked`."""
        self._call(self._listener.on_partitions_revoked, partitions)

    def assigned(self, partitions: Collection[TopicPartition]) -> None:
        """Call `on_partitions_assigned`."""
        self._call(self._listener.on_partitions_assigned, partitions)

    def lost(self, partitions: Collection[TopicPartition]) -> None:
        """Call `on_partitions_lost`, unless no partition was lost."""
        if partitions:
            # Listeners that were written before Kafka had this callback do not have it.
            revoked = self._listener.on_partitions_revoked
            self._call(getattr(self._listener, "on_partitions_lost", revoked), partitions)

    def _call(
        self,
        callback: Callable[[set[TopicPartition]], None],
        partitions: Collection[TopicPartition],
    ) -> None:
        self._calling_thread = get_ident()
        try:
            callback(set(partitions))
        except BaseException as error:  # noqa: BLE001 - kept, and raised after the rebalance
            self._error = self._error or error
        finally:
            self._calling_thread = None

    def raise_error(self) -> None:
        """Raise the first error of the listener, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error
