"""A limit of bytes per second for work in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from math import inf

_MAX_WAIT_SECONDS = 0.1
"""How long to wait at most before the guard is called again."""


class Throttle:
    """Limits the bytes per second of all threads that share it.

    Args:
        bytes_per_second: The limit.
        wait: Waits for this many seconds.
        monotonic: The clock, in seconds.
    """

    def __init__(
        self,
        bytes_per_second: float = inf,
        wait: Callable[[float], object] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bytes_per_second, self._monotonic = bytes_per_second, monotonic
        self._wait, self._lock = wait or threading.Event().wait, threading.Lock()
        self._free_at = monotonic()
        """When the bytes noted so far fit into the limit."""

    def spend(self, size: int, guard: Callable[[], object] = bool) -> None:
        """Note ``size`` bytes read or written, and wait until they fit into the limit.

        ``guard`` is called before each wait of at most 0.1 s; its exception ends the wait.
        """
        if self._bytes_per_second == inf:
            return
        with self._lock:
            start = max(self._free_at, self._monotonic())
            self._free_at = free_at = start + size / self._bytes_per_second
        while (seconds := free_at - self._monotonic()) > 0:
            guard()
            self._wait(min(seconds, _MAX_WAIT_SECONDS))
