"""A wall clock that is not believed when it jumps (P17).

If a clock is set two years ahead, every record is older than a week and every
producer has been idle for long.  How long a machine runs is shown by a clock
that is never set.  Time that passed by the wall clock only is believed up to an
hour; a step back is believed at once, because it deletes nothing.

What both clocks showed is kept in `live` by the housekeeping.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from embedlog import kv
from embedlog.partition.context import Context

SEEN = b"K"
"""The key in `live` of what both clocks showed at the last look."""
MOST_AHEAD_MS = 3_600_000
"""How much of the time that passed by the wall clock only is believed at one look."""

_ROW = struct.Struct(">qQ")


class ClockReading(NamedTuple):
    """What both clocks showed at one instant."""

    believed_ms: int
    """Milliseconds since 1970, as far as they are believed."""
    uptime_ms: int

    def pack(self) -> bytes:
        """Return the row as stored."""
        return _ROW.pack(*self)

    def bound(self, wall_ms: int, uptime_ms: int) -> int:
        """Return how much is believed of what the wall clock shows now."""
        elapsed = max(uptime_ms - self.uptime_ms, 0)
        return min(wall_ms, self.believed_ms + elapsed + MOST_AHEAD_MS)


def last_reading(live: kv.Store) -> ClockReading | None:
    """Return the last reading; None if no process did housekeeping since the boot.

    A row that cannot be one counts as none: values in `live` have no checksum, and
    recovery, which asks for this, must not depend on them.
    """
    row = live.get(SEEN)
    if row is None or len(row) != _ROW.size:
        return None
    return ClockReading._make(_ROW.unpack(row))


def bounded_ms(context: Context) -> int:
    """Return the time for decisions that forget something; changes nothing.

    The clock of the log as it is, where the housekeeping keeps no readings: it does
    not doubt a clock that a program passed.
    """
    wall_ms, reading = context.clock(), last_reading(context.live)
    if reading is None:
        return wall_ms
    return reading.bound(wall_ms, context.files.uptime_ms())
