"""What a job of the housekeeping gets, and by which right it changes anything."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from embedlog import kv
from embedlog.errors import FencedError
from embedlog.maintenance import activity
from embedlog.root.root import Root

OWNER = b"M"
"""The key in `live` of who owns it; with a job's name, of when that was done last."""

_ROW = struct.Struct(">QQI")


class MaintenanceOwner(NamedTuple):
    """Who owns the housekeeping."""

    epoch: int
    """Grows with each owner."""
    until: int
    """Its deadline, in milliseconds since boot."""
    pid: int

    def pack(self) -> bytes:
        """Return it as a row of `live`."""
        return _ROW.pack(*self)


def owner_in(row: bytes | None) -> MaintenanceOwner:
    """Return what `MaintenanceOwner.pack` made; without a row, nobody."""
    return MaintenanceOwner(0, 0, 0) if row is None else MaintenanceOwner._make(_ROW.unpack(row))


def owner(root: Root) -> MaintenanceOwner | None:
    """Return who owns the housekeeping of a log; None if nobody ever did since the boot."""
    row = root.context.live.get(OWNER)
    return None if row is None else owner_in(row)


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
        if owner_in(txn.get(OWNER)).epoch != self.epoch:
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
