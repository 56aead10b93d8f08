"""What a program is told about the partitions of its consumer (M18-M24)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from threading import get_ident

from embedlog.errors import IllegalStateError
from embedlog.record import TopicPartition


class ConsumerRebalanceListener:
    """Is told when partitions come and go; derive from it, and override what you need.

    All three run on the thread that polls, inside `poll`, iteration, `unsubscribe`
    and `close`.  They may commit, seek, pause, and ask for positions.
    """

    def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        """These go to another member as soon as this returns: finish, and commit."""

    def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        """These were given to this consumer: seek, if not to go on from what was committed."""

    def on_partitions_lost(self, lost: set[TopicPartition]) -> None:
        """These may have another owner by now; as `on_partitions_revoked`, unless overridden."""
        self.on_partitions_revoked(lost)


class RebalanceNotifier:
    """Calls a listener, and keeps the first error until the state is in order again (M24)."""

    def __init__(self, listener: ConsumerRebalanceListener | None = None) -> None:
        if listener is not None and not isinstance(listener, ConsumerRebalanceListener):
            raise TypeError(f"a listener is a ConsumerRebalanceListener, not {listener!r}")
        self._listener = listener
        self._error: BaseException | None = None
        self._inside: int | None = None
        """The thread in which it is being called."""

    def __bool__(self) -> bool:
        """Whether there is a listener."""
        return self._listener is not None

    def check_outside(self, what: str) -> None:
        """Raise if this is said by the listener, which is being called: it may not do this."""
        if self.inside:
            raise IllegalStateError(f"a rebalance listener may not {what}")

    @property
    def inside(self) -> bool:
        """Whether the listener is being called, in this thread."""
        return self._inside == get_ident()

    def revoked(self, partitions: Collection[TopicPartition]) -> None:
        """Tell that partitions are about to go."""
        if self._listener is not None:
            self._call(self._listener.on_partitions_revoked, partitions)

    def assigned(self, partitions: Collection[TopicPartition]) -> None:
        """Tell that partitions came."""
        if self._listener is not None:
            self._call(self._listener.on_partitions_assigned, partitions)

    def lost(self, partitions: Collection[TopicPartition]) -> None:
        """Tell that partitions are gone already."""
        if self._listener is not None and partitions:
            self._call(self._listener.on_partitions_lost, partitions)

    def _call(
        self,
        callback: Callable[[set[TopicPartition]], None],
        partitions: Collection[TopicPartition],
    ) -> None:
        self._inside = get_ident()
        try:
            callback(set(partitions))
        except BaseException as error:  # noqa: BLE001 - kept, and raised when all is in order
            self._error = self._error or error
        finally:
            self._inside = None

    def raise_failure(self) -> None:
        """Raise what the listener raised, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error
