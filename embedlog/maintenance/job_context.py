"""What a job of the housekeeping gets, and by which right it changes anything."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from embedlog import keyspace, kv
from embedlog.errors import FencedError
from embedlog.maintenance import activity
from embedlog.root.root import Root


class MaintenanceOwner(NamedTuple):
    """Who owns the housekeeping."""

    epoch: int
    """Grows with each owner."""
    until: int
    """Its deadline, in milliseconds since boot."""
    pid: int


OWNER = keyspace.MAINTENANCE_OWNER.typed(MaintenanceOwner)


def owner_in(txn: kv.Txn | kv.Store) -> MaintenanceOwner:
    """Return who owns the housekeeping; with epoch 0 and deadline 0 if nobody ever did."""
    return OWNER.get(txn) or MaintenanceOwner(0, 0, 0)


def owner(root: Root) -> MaintenanceOwner | None:
    """Return who owns the housekeeping of a log; None if nobody ever did since the boot."""
    return OWNER.get(root.context.live)


class JobContext:
    """What a job gets: the log, the time, and how to ask whether to go on.

    Args:
        root: The open log.
        epoch: By which the process owns the housekeeping.
        clock: Milliseconds since 1970, as far as they are believed: one call for one round.
        stopping: Whether to end; also a moment in which a fork may happen.
        timeout: Seconds to wait for a partition; as long as for any lock by default.
    """

    def __init__(
        self,
        root: Root,
        epoch: int,
        clock: Callable[[], int],
        stopping: Callable[[], bool],
        timeout: float | None = None,
    ) -> None:
        self.root, self.epoch, self.clock = root, epoch, clock
        self.stopping, self.timeout = stopping, timeout

    def tell(self, events: Sequence[activity.Event]) -> None:
        """Write what was done to the log's activity, as far as that is possible."""
        activity.tell(self.root, events, os.getpid())

    def fence(self, txn: kv.Txn) -> None:
        """Raise unless this process owns the housekeeping, in a transaction of `live`.

        Raises:
            FencedError: Another one does.
        """
        if owner_in(txn).epoch != self.epoch:
            raise FencedError(
                "another process took the housekeeping over",
                path=self.root.path,
                todo="nothing: it goes on there",
            )


class MaintenanceJob(NamedTuple):
    """Something to be done every so often by one process."""

    name: str
    every_seconds: float
    run: Callable[[JobContext], object]
    """Asks `JobContext.stopping` between short pieces, and `JobContext.fence` in what deletes."""
    threads: int = 1
    """How many may do it at a time."""
