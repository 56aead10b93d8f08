"""Holding compaction back to so many bytes a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from math import inf

_SLICE_SECONDS = 0.1
"""How long to wait before asking again whether to go on."""


class Throttle:
    """Holds its callers, from any thread, back to so many bytes a second.

    Args:
        bytes_per_second: How many.
        wait: Waits for so many seconds.
        monotonic: The clock.
    """

    def __init__(
        self,
        bytes_per_second: float = inf,
        wait: Callable[[float], object] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate, self._monotonic = bytes_per_second, monotonic
        self._wait, self._paying = wait or threading.Event().wait, threading.Lock()
        self._free = monotonic()
        """When what was done so far is paid for."""

    def spend(self, size: int, guard: Callable[[], object] = bool) -> None:
        """Note that so many bytes were read or written, and wait until they are paid for.

        ``guard`` is called now and then meanwhile; what it raises ends the wait.
        """
        if self._rate == inf:
            return
        with self._paying:
            self._free = max(self._free, self._monotonic()) + size / self._rate
            paid = self._free
        while (left := paid - self._monotonic()) > 0:
            guard()
            self._wait(min(left, _SLICE_SECONDS))
