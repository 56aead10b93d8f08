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

from embedlog.files import Files
from support.patience import patient

DEADLOCK_SECONDS = 60.0
WAIT_SECONDS = 0.02
"""How long to let the second call wait for something other than a lock, such as progress."""

_real_lock, _real_rlock = threading.Lock, threading.RLock
_lock_slowly = Files._lock_slowly


class _SecondCall(threading.local):
    """An event that the thread of the second call sets when it must wait."""

    waits: threading.Event | None = None


_second_call = _SecondCall()


class WatchedLock:
    """A lock that reports when the second call waits for it."""

    def __init__(self) -> None:
        lock: Any = _real_lock()
        self._lock, self.release, self.locked = lock, lock.release, lock.locked
        self._at_fork_reinit = lock._at_fork_reinit

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


class WatchedRLock(WatchedLock):
    """A reentrant lock that reports when the second call waits for it."""

    def __init__(self) -> None:
        lock: Any = _real_rlock()
        self._lock, self.release = lock, lock.release
        self._at_fork_reinit = lock._at_fork_reinit
        self._is_owned, self._release_save = lock._is_owned, lock._release_save
        self._acquire_restore = lock._acquire_restore


def _lock_file_slowly(files: Files, fd: int, timeout: float, shared: bool) -> None:
    """As `Files._lock_slowly`; reports that the second call waits."""
    if _second_call.waits is not None:
        _second_call.waits.set()
    _lock_slowly(files, fd, timeout, shared)


@contextmanager
def watched_locks() -> Iterator[None]:
    """Make the locks that are created meanwhile watched ones, and those of files."""
    threading.Lock = WatchedLock  # type: ignore[misc,assignment]
    threading.RLock = WatchedRLock  # type: ignore[misc,assignment]
    Files._lock_slowly = _lock_file_slowly  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Lock, threading.RLock = _real_lock, _real_rlock  # type: ignore[misc]
        Files._lock_slowly = _lock_slowly  # type: ignore[method-assign]


class Pair:
    """Two calls, the second of which is made while the first one is stopped."""

    def __init__(
        self,
        first: Callable[[], Any],
        second: Callable[[], Any],
        package: str | tuple[str, ...],
        line: int,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self.calls, self.package, self.line = (first, second), package, line
        self.wait_seconds = wait_seconds
        self.lines_seen = 0
        """How many lines of ``package`` the first call has reached."""
        self.places: list[str] = []
        """These lines."""
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
            place = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
            self.places.append(place)
            if self.lines_seen > self.line:
                self.stopped_at = place
                self._start_second()
        return self._trace_lines

    def _start_second(self) -> None:
        self._second = threading.Thread(target=self._run_second, daemon=True)
        self._second.start()
        self._waits.wait(self.wait_seconds)

    def _run_second(self) -> None:
        _second_call.waits = self._waits
        try:
            self._call(1)
        finally:
            self._waits.set()
