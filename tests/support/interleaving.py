"""Stops a call at any of its lines, and makes another call there in a second thread.

The first call runs in a thread that is traced line by line.  It stops at one of its lines until
the second call has returned or waits for a lock, and then continues.  The locks are real, but
report when a thread must wait, so nothing depends on the speed of the machine.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from support.patience import patient

DEADLOCK_SECONDS = 60.0
WAIT_SECONDS = 0.02
"""How long to let the second call wait for something other than a lock, such as progress."""

_real_lock = threading.Lock


class _SecondCall(threading.local):
    """An event that the thread of the second call sets when it must wait."""

    waits: threading.Event | None = None


_second_call = _SecondCall()


class WatchedLock:
    """A lock that reports when the second call waits for it."""

    def __init__(self) -> None:
        lock = _real_lock()
        self._lock, self.release, self.locked = lock, lock.release, lock.locked

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._lock.acquire(False):
            return True
        if not blocking:
            return False
        if _second_call.waits is not None:
            _second_call.waits.set()
        return self._lock.acquire(True, timeout)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@contextmanager
def watched_locks() -> Iterator[None]:
    """Make the locks that are created meanwhile watched ones."""
    threading.Lock = WatchedLock  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        threading.Lock = _real_lock  # type: ignore[misc]


class Pair:
    """Two calls, the second of which is made while the first one is stopped."""

    def __init__(
        self, first: Callable[[], Any], second: Callable[[], Any], package: str, line: int
    ) -> None:
        self.calls, self.package, self.line = (first, second), package, line
        self.lines_seen = 0
        """How many lines of ``package`` the first call has reached."""
        self.stopped_at = "after the end"
        self.errors: list[BaseException | None] = [None, None]
        self._second: threading.Thread | None = None
        self._waits = threading.Event()

    def run(self) -> None:
        """Run both calls until they return."""
        first = threading.Thread(target=self._run_first, daemon=True)
        first.start()
        first.join(patient(DEADLOCK_SECONDS))
        if self._second is not None:
            self._second.join(patient(DEADLOCK_SECONDS))
        alive = first.is_alive() or self._second is None or self._second.is_alive()
        assert not alive, f"deadlock: the first call was stopped at {self.stopped_at}"

    def _run_first(self) -> None:
        sys.settrace(self._trace)
        try:
            self._call(0)
        finally:
            sys.settrace(None)
            if self._second is None:
                self._start_second()

    def _call(self, number: int) -> None:
        try:
            self.calls[number]()
        except BaseException as error:  # noqa: BLE001 - kept for the checks
            self.errors[number] = error

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        inside = frame.f_globals["__name__"].startswith(self.package)
        return self._trace_lines if inside and self._second is None else None

    def _trace_lines(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and self._second is None:
            self.lines_seen += 1
            if self.lines_seen > self.line:
                self.stopped_at = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                self._start_second()
        return self._trace_lines

    def _start_second(self) -> None:
        self._second = threading.Thread(target=self._run_second, daemon=True)
        self._second.start()
        self._waits.wait(WAIT_SECONDS)

    def _run_second(self) -> None:
        _second_call.waits = self._waits
        try:
            self._call(1)
        finally:
            self._waits.set()
