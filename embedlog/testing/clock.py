"""A clock that stands still until a test moves it."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta

from embedlog.times import When, milliseconds


class ManualClock:
    """The clock of a log under test: stands still until `advance` or `set` moves it.

    It decides about timestamps, retention, compaction and segment ages.  Timeouts, such as
    those of ``poll`` and of sessions, use real time.

    Args:
        now: Where it starts, as in `set`; by default at the current time.
    """

    def __init__(self, now: When | None = None) -> None:
        self._lock = threading.Lock()
        real_ms = time.time_ns() // 1_000_000
        self._now_ms = real_ms if now is None else milliseconds(now, real_ms)

    def __call__(self) -> int:
        """Return the time in milliseconds since 1970."""
        return self._now_ms

    @property
    def now_ms(self) -> int:
        """The time in milliseconds since 1970."""
        return self._now_ms

    @property
    def now(self) -> datetime:
        """The time, in UTC."""
        return datetime.fromtimestamp(self._now_ms / 1000, UTC)

    def set(self, now: When) -> int:
        """Move to a time and return it in milliseconds since 1970.

        Args:
            now: As in `Topic.between`: milliseconds since 1970, or a datetime or an ISO 8601
                text (UTC without a zone).

        Raises:
            ValueError, TypeError: The value is no time.
        """
        with self._lock:
            self._now_ms = now_ms = milliseconds(now, self._now_ms)
        return now_ms

    def advance(self, seconds: float = 0, **units: float) -> int:
        """Move forwards and return the time in milliseconds since 1970.

        Args:
            seconds: How far; negative is backwards.
            units: Other units of `datetime.timedelta`, such as ``days=8`` or ``milliseconds=5``.
        """
        step_ms = timedelta(seconds=seconds, **units) // timedelta(milliseconds=1)
        with self._lock:
            self._now_ms += step_ms
            return self._now_ms

    def __repr__(self) -> str:
        return f"<ManualClock {self.now.isoformat()}>"
