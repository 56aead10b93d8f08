"""Sleeping until there is something to return, without using the processor."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import monotonic
from typing import TypeVar

from embedlog.config import ConsumerConfig
from embedlog.consumer.arguments import SingleThreadGuard
from embedlog.errors import ClosedError, WakeupError
from embedlog.files import WakePage
from embedlog.root.root import Root

T = TypeVar("T")

_NAP_SECONDS = 1.0
"""The longest sleep: a Ctrl-C that came just before it must not wait for a record."""
_SHORT_NAP_SECONDS = 0.05
"""The same where `wakeup` cannot ring, since the wake page may not be written."""


class Waiter:
    """Waits on the log's wake page, which every append of every process advances."""

    def __init__(self, root: Root, config: ConsumerConfig, guard: SingleThreadGuard) -> None:
        self._root, self._config, self._guard = root, config, guard
        self._joined: WakePage | None = None
        """Where this waiter is counted; a forked child has another page."""
        self.woken = False
        """Whether `wakeup` was called, and nobody heard it yet."""

    def repeat(self, step: Callable[[], T], timeout_ms: float | None) -> T:
        """Repeat a step until it gives something or the time is over.

        A waiter joins the wake page and reads it before it looks, so what is published
        between the look and the sleep ends the sleep.  One that never sleeps need not
        join, so the first look comes before it; one that slept does not leave until it
        finds something at once, since most who wait come back and wait again.

        Raises:
            WakeupError: `wakeup` was called.
            ClosedError: The consumer was closed.
        """
        deadline = inf if timeout_ms is None else monotonic() + timeout_ms / 1000
        slept = False
        while True:
            # First: who closes or wakes it after the looks below advances the page as well.
            wake = self._root.wake
            seen = wake.value()
            if self._guard.closed:
                raise ClosedError("the consumer was closed")
            if self.woken:
                self.woken = False
                raise WakeupError("wakeup() was called", todo="poll again to go on")
            found = step()
            if found:
                if not slept:
                    self.leave()
                return found
            left = deadline - monotonic()
            if left <= 0:
                return found
            if self._joined is wake:
                slept = True
                wake.wait(seen, min(left, self._nap()))
            else:
                wake.join()
                self._joined = wake

    def leave(self) -> None:
        """Let whoever publishes know that nobody waits here."""
        page, self._joined = self._joined, None
        if page is not None:
            page.leave()

    def end(self) -> None:
        """Wait no more, and let nobody in any more; for who has seized the guard to close."""
        self.leave()
        self._guard.let_go()

    def _nap(self) -> float:
        """How long to sleep at most, in seconds."""
        config = self._config
        nap = _NAP_SECONDS if self._root.wake.rings else _SHORT_NAP_SECONDS
        if config.fetch_min_bytes > 1:
            nap = min(nap, config.fetch_max_wait_ms / 1000)
        return min(nap, max(config.metadata_max_age_ms, 1) / 1000)

    def wakeup(self) -> None:
        """End the wait of another thread, or the next one here."""
        self.woken = True
        self.ring()

    def ring(self) -> None:
        """Have whoever waits look again."""
        if self._root.wake.rings:
            self._root.wake.advance()
