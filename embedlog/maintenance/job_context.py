"""The row of the maintenance owner, and what a job gets to run with."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from embedlog import keyspace, kv
from embedlog.errors import FencedError
from embedlog.maintenance import activity
from embedlog.root.root import Root


class MaintenanceOwner(NamedTuple):
    """The process that does the maintenance of a log."""

    epoch: int
    """Grows with each change of the owner."""
    deadline_ms: int
    """In milliseconds since boot; after it another process may take over."""
    pid: int


OWNER = keyspace.MAINTENANCE_OWNER.typed(MaintenanceOwner)


def owner_in(txn: kv.Txn | kv.Store) -> MaintenanceOwner:
    """Return the owner in a transaction of `live`; without one, epoch 0 with a deadline of 0."""
    return OWNER.get(txn) or MaintenanceOwner(0, 0, 0)


def current_owner(root: Root) -> MaintenanceOwner | None:
    """Return the maintenance owner of a log; None if there was none since the boot."""
    return OWNER.get(root.context.live)


class JobContext:
    """What a job gets: the log, the time, and whether to continue.

    Args:
        root: The open log.
        epoch: The epoch of this owner.
        clock: Returns milliseconds since 1970; called once per round.
        should_stop: Whether the job must end; a fork may happen during this call.
        timeout: Seconds to wait for the lock of a partition; by default as for any lock.
    """

    def __init__(
        self,
        root: Root,
        epoch: int,
        clock: Callable[[], int],
        should_stop: Callable[[], bool],
        timeout: float | None = None,
    ) -> None:
        self.root, self.epoch, self.clock = root, epoch, clock
        self.should_stop, self.timeout = should_stop, timeout

    def report(self, events: Sequence[activity.Event]) -> None:
        """Append events to the activity topic of the log; failures are only logged."""
        activity.report(self.root, events, os.getpid())

    def fence(self, txn: kv.Txn) -> None:
        """Check in a transaction of `live` that this process still is the owner.

        Raises:
            FencedError: Another process took over.
        """
        if owner_in(txn).epoch != self.epoch:
            raise FencedError(
                "Another process took over the maintenance of the log",
                path=self.root.path,
                todo="Nothing to do: it continues there.",
            )


class MaintenanceJob(NamedTuple):
    """A job that one process does at regular intervals."""

    name: str
    every_seconds: float
    run: Callable[[JobContext], object]
    """Must call `JobContext.should_stop` often, and `JobContext.fence` wherever it deletes."""
    threads: int = 1
    """How many threads may run it at the same time."""
