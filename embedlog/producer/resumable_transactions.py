"""Transactions of a producer that is a client of a server, and may outlive its process.

In `live` is a row with the version of the last transaction of each name.  Here a transaction takes
two versions: the first one, which is odd, is written when it begins, and the second one when it
ends.  So a process that serves the producer next knows whether a transaction was lost with the
process before, or how the last one ended.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from embedlog.config import ProducerConfig
from embedlog.errors import EmbedlogError
from embedlog.partition import checkpoint, journal
from embedlog.partition.checkpoint import TRANSACTIONS, LastTransaction
from embedlog.producer.transactions import Transactions, parts, version_of
from embedlog.publish import app_versions, live_commit
from embedlog.publish.app_versions import name_field
from embedlog.root.root import Root

EMPTY, ONGOING = "Empty", "Ongoing"
COMMITTED, ABORTED = "CompleteCommit", "CompleteAbort"
"""Kafka's names of the states of a producer."""
_COUNT = (1 << 32) - 1


class LastOutcome(NamedTuple):
    """The last transaction of a producer."""

    state: str
    """`ONGOING` if it has begun, and was lost if its process is dead."""
    identity: tuple[int, int]
    """The id and the epoch with which it began."""


class ResumableTransactions(Transactions):
    """The transactions of one producer, one after another.

    Args:
        root: The log.
        name: The ``transactional_id``.
    """

    def __init__(self, root: Root, name: str) -> None:
        super().__init__(root, name, ProducerConfig(transactional_id=name))

    @property
    def identity(self) -> tuple[int, int]:
        """The id and the epoch of the producer."""
        producer_id, number = parts(self._version or 0)
        return producer_id, number >> 32

    @property
    def buffered(self) -> int:
        """How many bytes of the transaction are in memory."""
        return self._bytes

    def spill(self) -> None:
        """Write what is in memory to the staged file.

        Raises:
            StorageError: The transaction must be aborted.
        """
        with self._lock:
            self._spill()

    def resume(self, identity: tuple[int, int]) -> LastOutcome:
        """Continue as a producer that another process has served.

        If its last transaction has begun, nothing of it is left: `end_lost` must be called.

        Args:
            identity: The id and the epoch that it has now.
        """
        context = self._root.context
        published = app_versions.get(context.state, self._source)
        number = 0 if published is None else published.version
        if published is not None:
            journal.finish_committed(context, [key for key, _, _ in published.ends])
        last = self._last()
        if last is not None and last.committed and context.durability == "fsync":
            # A flush that fails undoes it.
            checkpoint.take(context, version=last.committed)
            last = self._last()
        self._version = max(version_of(identity), number)
        if last is None:
            # The machine was started again, which may have undone transactions.
            self._version += 2
            return LastOutcome(ONGOING, identity)
        version = last.producer_id << 64 | last.number
        if version % 2 and version + 1 == number:
            live_commit.fence(context, self._source, parts(number), published=True)
            last = last._replace(number=last.number + 1, committed=1)
        self._version = max(self._version, version + version % 2)
        return LastOutcome(state_of(last), (last.producer_id, last.number >> 32))

    def _last(self) -> LastTransaction | None:
        self._root.context.live.catch_up()
        return TRANSACTIONS.get(self._root.context.live, name_field(self._source))

    def end_lost(self) -> None:
        """End the transaction that was lost with its process.

        Raises:
            InvalidProducerEpochError: A newer producer has the same ``transactional_id``.
        """
        assert self._version is not None
        self._note(self._version)

    def raise_epoch(self) -> None:
        """Raise the epoch: nothing with the one before is accepted any more.

        Raises:
            InvalidProducerEpochError: A newer producer has the same ``transactional_id``.
        """
        identity = self._root.producer_identity(self._name, self.identity)
        with self._lock:
            self._version = version_of(identity)

    def begin(self) -> None:
        """Begin a transaction, and note that, for the process that serves the producer next.

        Raises:
            InvalidProducerEpochError: A newer producer has the same ``transactional_id``.
        """
        self.check(begun=False)
        assert self._version is not None
        self._note(self._version + 1)
        self._version += 1
        super().begin()

    def is_committed(self) -> bool:
        """Whether a commit of the transaction that failed has committed it after all."""
        if not self._tried:
            return False
        published, last = app_versions.get(self._root.context.state, self._source), self._last()
        assert self._version is not None
        if published is not None and published.version == self._version:
            return True
        return last is not None and last.version == parts(self._version)

    def abort(self) -> None:
        """Drop the transaction; see `Transactions.abort`."""
        version = self._version
        super().abort()
        assert version is not None
        self._note(version)

    def _publish(self, version: int) -> None:
        super()._publish(version)
        if self._begun and self._published:
            # Without this row the publication itself says that it is committed.
            with suppress(EmbedlogError):
                context = self._root.context
                live_commit.fence(context, self._source, parts(version), published=True)

    def _note(self, version: int) -> None:
        if not live_commit.fence(self._root.context, self._source, parts(version)):
            self._fence()


def state_of(last: LastTransaction) -> str:
    """Return the state of a producer whose last transaction this is."""
    count = last.number & _COUNT
    if last.committed:
        return COMMITTED
    if not count:
        return EMPTY
    return ONGOING if count % 2 else ABORTED
