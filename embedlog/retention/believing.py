"""A wall clock that is doubted when it jumps (P17).

Somebody sets a clock two years ahead, and every record is older than a week.
How long a machine runs is told by a clock that nobody sets.  Time that passed
by the one, and not by the other, is believed in small steps: so a round
deletes at most what is that much older, and whoever notices in time loses
little.  A step back is believed at once, for it deletes nothing.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable

from embedlog import kv

SEEN = b"K"
"""The key in `live` of what both clocks said last."""
MOST_AHEAD_MS = 3_600_000
"""How much more than the uptime's part of it is believed in one look."""

_ROW = struct.Struct(">qQ")
_log = logging.getLogger("embedlog")


class BelievedClock:
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
        told, up = self._clock(), self._uptime()
        row = self._live.get(SEEN)
        believed = told
        if row is not None:
            before, up_before = _ROW.unpack(row)
            believed = min(told, before + max(up - up_before, 0) + MOST_AHEAD_MS)
        if believed < told:
            _log.warning(
                "the clock jumped %.1f hours ahead; retention goes after it in small steps",
                (told - believed) / 3_600_000,
            )
        packed = _ROW.pack(believed, up)
        self._live.write(lambda txn: txn.put(SEEN, packed))
        return believed
