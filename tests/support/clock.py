"""A clock that stands still until a test moves it."""

from __future__ import annotations

from embedlog.files import Files

START = 1_700_000_000_000


class ManualClock:
    """Milliseconds since 1970, as `engine` and the rooms below it take them."""

    def __init__(self, now: int = START) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now

    def advance(self, ms: int) -> int:
        """Move by so many milliseconds, forwards or backwards, and return the new time."""
        self.now += ms
        return self.now

    def set(self, ms: int) -> None:
        self.now = ms


class MovedUptime(Files):
    """Files of a machine whose uptime is ahead by as much as a test says."""

    ms = 0

    def uptime_ms(self) -> int:
        return super().uptime_ms() + MovedUptime.ms
