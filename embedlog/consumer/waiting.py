"""Sleeping until there is something to return, without using the processor."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import monotonic
from typing import TypeVar

from embedlog.config import ConsumerConfig
from embedlog.consumer.calls import Guard
from embedlog.errors import ClosedError, WakeupError
from embedlog.log.root import Root

T = TypeVar("T")

_NAP_SECONDS = 1.0
"""The longest sleep: a Ctrl-C that came just before it must not wait for a record."""
_SHORT_NAP_SECONDS = 0.05
"""The same where `wakeup` cannot ring, since the log was opened to read only."""


class Waiter:
    """Waits on the log's wake page, which every append of every process advances."""

    def __init__(self, root: Root, config: ConsumerConfig, guard: Guard) -> None:
        self._root, self._config, self._guard = root, config, guard
        self.woken = False
        """Whether `wakeup` was called, and nobody heard it yet."""

    def repeat(self, step: Callable[[], T], timeout_ms: float | None) -> T:
        """Repeat a step until it gives something or the time is over.

        A waiter reads the wake page before it looks, so what is published
        between the look and the sleep ends the sleep.

        Raises:
            WakeupError: `wakeup` was called.
            ClosedError: The consumer was closed.
        """
        deadline = inf if timeout_ms is None else monotonic() + timeout_ms / 1000
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
                return found
            left = deadline - monotonic()
            if left <= 0:
                return found
            wake.wait(seen, min(left, self._nap()))

    def _nap(self) -> float:
        """How long to sleep at most, in seconds."""
        config = self._config
        nap = _NAP_SECONDS if self._root.context.files.writable else _SHORT_NAP_SECONDS
        if config.fetch_min_bytes > 1:
            nap = min(nap, config.fetch_max_wait_ms / 1000)
        return min(nap, max(config.metadata_max_age_ms, 1) / 1000)

    def wakeup(self) -> None:
        """End the wait of another thread, or the next one here."""
        self.woken = True
        self.ring()

    def ring(self) -> None:
        """Have whoever waits look again."""
        if self._root.context.files.writable:
            self._root.wake.advance()
