"""A clock that stands still until a test moves it."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta


class ManualClock:
    """The clock of a log under test: stands still until `advance` or `set` moves it.

    It decides about timestamps, retention, compaction and segment ages.  Timeouts, such as
    those of ``poll`` and of sessions, use real time.

    Args:
        now: Where it starts, as in `set`; by default at the current time.
    """

    def __init__(self, now: datetime | str | int | None = None) -> None:
        self._lock = threading.Lock()
        self._now_ms = time.time_ns() // 1_000_000 if now is None else _milliseconds(now)

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

    def set(self, now: datetime | str | int) -> int:
        """Move to a time and return it in milliseconds since 1970.

        Args:
            now: Milliseconds since 1970, or a datetime or an ISO 8601 text; without a zone
                it is in UTC.
        """
        milliseconds = _milliseconds(now)
        with self._lock:
            self._now_ms = milliseconds
        return milliseconds

    def advance(self, seconds: float = 0, **units: float) -> int:
        """Move forwards and return the time in milliseconds since 1970.

        Args:
            seconds: How far; negative is backwards.
            units: Other units of `datetime.timedelta`, such as ``days=8`` or ``milliseconds=5``.
        """
        milliseconds = timedelta(seconds=seconds, **units) // timedelta(milliseconds=1)
        with self._lock:
            self._now_ms += milliseconds
            return self._now_ms

    def __repr__(self) -> str:
        return f"<ManualClock {self.now.isoformat()}>"


def _milliseconds(now: datetime | str | int) -> int:
    if isinstance(now, int):
        return now
    moment = datetime.fromisoformat(now) if isinstance(now, str) else now
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - datetime.fromtimestamp(0, UTC)) // timedelta(milliseconds=1)
