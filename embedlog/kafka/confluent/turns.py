"""`Turns`: threads use a consumer one after another, also while one of them waits for records."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

_WAKE_SECONDS = 0.1
"""A thread that waits wakes the one that has the turn again after this time."""


class Turns:
    """A reentrant lock that threads get in the order in which they asked for it.

    confluent_kafka's consumer may be used by several threads, and embedlog's by one at a time.
    A thread that waits for records lets the others go first.

    Args:
        wakeup: Ends the wait for records in another thread.
    """

    def __init__(self, wakeup: Callable[[], None]) -> None:
        self._wakeup = wakeup
        self._changed = threading.Condition()
        self._owner: int | None = None
        self._depth = 0
        self._queue: deque[object] = deque()

    def __enter__(self) -> None:
        with self._changed:
            thread = threading.get_ident()
            if self._owner == thread:
                self._depth += 1
            elif self._owner is None and not self._queue:
                self._owner, self._depth = thread, 1
            else:
                self._wait(wake=True)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._pass_on()

    @property
    def wanted(self) -> bool:
        """Whether another thread waits."""
        return bool(self._queue)

    def let_others_go_first(self) -> None:
        """Let each thread that waits have its turn, unless the caller entered more than once."""
        with self._changed:
            if self._queue and self._depth == 1:
                self._pass_on()
                # Two threads that wait for records do not wake each other again and again.
                self._wait(wake=False)

    def _pass_on(self) -> None:
        self._owner = None
        if self._queue:
            self._changed.notify_all()

    def _wait(self, *, wake: bool) -> None:
        ticket = object()
        self._queue.append(ticket)
        try:
            while self._owner is not None or self._queue[0] is not ticket:
                if wake:
                    self._wakeup()
                self._changed.wait(_WAKE_SECONDS)
        finally:
            self._queue.remove(ticket)
        self._owner, self._depth = threading.get_ident(), 1
