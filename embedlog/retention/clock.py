"""The clock of the housekeeping: each call is one step of a clock that is doubted (P17).

A round deletes at most what is an hour older than the machine's uptime says, so
that an administrator who notices a wrong clock in time loses little.
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
    """Milliseconds since 1970, as far as they are believed; one per log, in `live`.

    Args:
        live: Where it is kept what was seen last, by whichever process.
        clock: The wall clock.
        uptime: Milliseconds since boot.
    """

    def __init__(self, live: kv.Store, clock: Callable[[], int], uptime: Callable[[], int]) -> None:
        self._live, self._clock, self._uptime = live, clock, uptime

    def __call__(self) -> int:
        """Return the time to go by in one round; each call is one step."""
        wall_ms, uptime_ms = self._clock(), self._uptime()
        before = last_reading(self._live)
        believed = wall_ms if before is None else before.bound(wall_ms, uptime_ms)
        if believed < wall_ms:
            _log.warning(
                "the clock jumped %.1f hours ahead; retention goes after it in small steps",
                (wall_ms - believed) / 3_600_000,
            )
        self._keep(ClockReading(believed, uptime_ms))
        return believed

    def begin(self) -> None:
        """Keep a first reading, if there is none: a jump is seen by comparing with one."""
        if last_reading(self._live) is None:
            self._keep(ClockReading(self._clock(), self._uptime()))

    def _keep(self, reading: ClockReading) -> None:
        self._live.write(lambda txn: CLOCK_READING.put(txn, value=reading))
