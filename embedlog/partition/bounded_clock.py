"""A wall clock that is not trusted when it jumps.

If a clock is set two years ahead, every record seems older than a week and every
producer idle for long.  The uptime of the machine comes from a clock that is never set.
Time that passed by the wall clock only counts up to an hour; a step back counts at
once, because it deletes nothing.

Housekeeping keeps what both clocks showed in `live`; `Context.bounded_ms` reads it.
"""

from __future__ import annotations

from typing import NamedTuple

from embedlog import keyspace, kv

MOST_AHEAD_MS = 3_600_000
"""How much of the time that passed by the wall clock only counts at one reading."""


class ClockReading(NamedTuple):
    """What both clocks showed at one instant."""

    believed_ms: int
    """Milliseconds since 1970, as far as they are trusted."""
    uptime_ms: int

    def bound(self, wall_ms: int, uptime_ms: int) -> int:
        """Return how far to trust what the wall clock shows now."""
        elapsed = max(uptime_ms - self.uptime_ms, 0)
        return min(wall_ms, self.believed_ms + elapsed + MOST_AHEAD_MS)


CLOCK_READING = keyspace.CLOCK_READING.typed(ClockReading)


def last_reading(live: kv.Store) -> ClockReading | None:
    """Return the last reading; None if no process did housekeeping since the boot.

    A damaged row counts as none: values in `live` have no checksum, and recovery, which
    calls this, must not depend on them.
    """
    key = CLOCK_READING.key()
    row = live.get(key)
    return None if row is None else CLOCK_READING.load_if_valid(key, row)
