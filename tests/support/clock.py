"""A clock that stands still until a test moves it."""

from __future__ import annotations

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
