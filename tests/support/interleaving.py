"""Every place where one thread can be stopped in a call, with another call run there.

A call runs in a thread that is traced line by line.  At one of its lines it stops
until a second call, in a thread of its own, has returned or waits for a lock; then it
goes on.  Locks are real ones that also say when somebody has to wait for them, so
nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from support.patience import patient

MORE_THAN_ENOUGH = 60.0
A_MOMENT = 0.02
"""Seconds to leave a call that waits for something that is no lock, such as progress."""

_allocate = threading.Lock


class _Second(threading.local):
    """What the thread of a second call sets when it has to wait."""

    waits: threading.Event | None = None


_second = _Second()


class WatchedLock:
    """A lock that tells when a second call waits for it."""

    def __init__(self) -> None:
        lock = _allocate()
        self._lock, self.release, self.locked = lock, lock.release, lock.locked

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._lock.acquire(False):
            return True
        if not blocking:
            return False
        if _second.waits is not None:
            _second.waits.set()
        return self._lock.acquire(True, timeout)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@contextmanager
def watched_locks() -> Iterator[None]:
    """Let what is made meanwhile have locks that are watched."""
    threading.Lock = WatchedLock  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        threading.Lock = _allocate  # type: ignore[misc]


class Pair:
    """Two calls, the second of which runs while the first one stands still."""

    def __init__(
        self, first: Callable[[], Any], second: Callable[[], Any], place: str, line: int
    ) -> None:
        self.calls, self.place, self.line = (first, second), place, line
        self.seen = 0
        """How many lines of the package ``place`` the first call came to."""
        self.where = "after the end"
        self.errors: list[BaseException | None] = [None, None]
        self._second: threading.Thread | None = None
        self._waits = threading.Event()

    def run(self) -> None:
        """Run both to their ends."""
        first = threading.Thread(target=self._run_first, daemon=True)
        first.start()
        first.join(patient(MORE_THAN_ENOUGH))
        if self._second is not None:
            self._second.join(patient(MORE_THAN_ENOUGH))
        alive = first.is_alive() or self._second is None or self._second.is_alive()
        assert not alive, f"a deadlock: stopped at {self.where}"

    def _run_first(self) -> None:
        sys.settrace(self._calls)
        try:
            self._call(0)
        finally:
            sys.settrace(None)
            if self._second is None:
                self._start_second()

    def _call(self, number: int) -> None:
        try:
            self.calls[number]()
        except BaseException as error:  # noqa: BLE001 - kept for the judge
            self.errors[number] = error

    def _calls(self, frame: FrameType, event: str, argument: Any) -> Any:
        here = frame.f_globals["__name__"].startswith(self.place)
        return self._lines if here and self._second is None else None

    def _lines(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and self._second is None:
            self.seen += 1
            if self.seen > self.line:
                self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                self._start_second()
        return self._lines

    def _start_second(self) -> None:
        self._second = threading.Thread(target=self._run_second, daemon=True)
        self._second.start()
        self._waits.wait(A_MOMENT)

    def _run_second(self) -> None:
        _second.waits = self._waits
        try:
            self._call(1)
        finally:
            self._waits.set()
