"""The clock of the maintenance owner: follows a jump ahead of the wall clock in steps (P17).

A round deletes at most what is an hour older than the machine's uptime suggests, so that
an administrator who notices a wrong clock in time loses little.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from embedlog import kv
from embedlog.partition.bounded_clock import (
    CLOCK_READING,
    MOST_AHEAD_MS,
    ClockReading,
    last_reading,
)

__all__ = ["MOST_AHEAD_MS", "BoundedClock"]

_log = logging.getLogger("embedlog")


class BoundedClock:
    """Milliseconds since 1970, bounded by the uptime; one per log, in `live`.

    Args:
        live: Where all processes keep the last reading.
        clock: The wall clock.
        uptime: Milliseconds since boot.
    """

    def __init__(self, live: kv.Store, clock: Callable[[], int], uptime: Callable[[], int]) -> None:
        self._live, self._clock, self._uptime = live, clock, uptime

    def __call__(self) -> int:
        """Return the time for one round; each call moves the clock by one step."""
        wall_ms, uptime_ms = self._clock(), self._uptime()
        reading = last_reading(self._live)
        bounded_ms = wall_ms if reading is None else reading.bound(wall_ms, uptime_ms)
        if bounded_ms < wall_ms:
            _log.warning(
                "The clock jumped %.1f hours ahead; retention follows it in steps of an hour",
                (wall_ms - bounded_ms) / 3_600_000,
            )
        self._save(ClockReading(bounded_ms, uptime_ms))
        return bounded_ms

    def begin(self) -> None:
        """Save a first reading, if there is none: jumps are detected by comparing with one."""
        if last_reading(self._live) is None:
            self._save(ClockReading(self._clock(), self._uptime()))

    def _save(self, reading: ClockReading) -> None:
        self._live.write(lambda txn: CLOCK_READING.put(txn, value=reading))
