"""The thread that waits on a wake page for the tasks of event loops."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Final

from embedlog.errors import ClosedError, EmbedlogError

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future

    from embedlog.files.wake_page import WakePage

_SLEEP_SECONDS: Final = 1.0
"""The longest sleep on the page: one that is closed meanwhile does not end it."""
_PARK_SECONDS: Final = 10.0
"""How long the thread stays without anybody who waits."""


class WakeThread:
    """Wakes tasks when a page has changed: one thread for any number of them.

    A task joins, takes the page's value, looks for records, and if there are none adds a
    future, which is done once the value differs: the order of `WakePage`.  The thread sleeps on
    the page while tasks wait, and until the first change after that, since a task that was
    woken soon waits again.

    Args:
        page: The page; a forked child has another one.
    """

    def __init__(self, page: WakePage) -> None:
        self._page, self._pid = page, os.getpid()
        self._changed = threading.Condition()
        """Guards all below, and is notified when a parked thread is needed."""
        self._members = 0
        self._waiting: dict[Future[None], int] = {}
        """The futures, with the value that each has seen."""
        self._check: Callable[[], object] = page.value
        self._thread: threading.Thread | None = None
        self._parked = False

    def join(self) -> None:
        """Count a task as a waiter of the page until `leave`; call it before the look."""
        with self._changed:
            self._members += 1
            if self._members == 1:
                self._page.join()

    def leave(self) -> None:
        """End being counted; does nothing in a forked child, which was not counted."""
        if self._pid != os.getpid():
            return
        with self._changed:
            self._members -= 1
            if not self._members:
                self._page.leave()

    def add(self, future: Future[None], seen: int, check: Callable[[], object]) -> None:
        """Have a future done once the page's value differs from ``seen``.

        Args:
            future: Of a running loop.
            seen: The value before the look.
            check: Called once a second, or more often; all futures are done if it raises.

        Raises:
            RuntimeError: No thread can be started.
        """
        with self._changed:
            self._waiting[future], self._check = seen, check
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="embedlog-wake", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    del self._waiting[future]
                    raise
                self._thread = thread
            elif self._parked:
                self._changed.notify()

    def discard(self, future: Future[None]) -> None:
        """Forget a future that nobody waits for any more."""
        self._waiting.pop(future, None)

    def _run(self) -> None:
        while True:
            try:
                seen = self._page.value()
                _wake(self._take_due(seen))
                self._page.wait(seen, _SLEEP_SECONDS)
            except ClosedError:
                # Those that wait find out in their next look.
                with self._changed:
                    self._thread = None
                    due = self._take_due(None)
                _wake(due)
                return
            with self._changed:
                if not self._waiting:
                    self._parked = True
                    self._changed.wait(_PARK_SECONDS)
                    self._parked = False
                    if not self._waiting:
                        self._thread = None
                        return

    def _take_due(self, value: int | None) -> list[Future[None]]:
        """Remove and return the futures of those that have seen another value, or must look."""
        with self._changed:
            all_due = not _passes(self._check)
            waiting = list(self._waiting.items())
            due = [future for future, seen in waiting if all_due or seen != value]
            for future in due:
                self._waiting.pop(future, None)
            return due


def _passes(check: Callable[[], object]) -> bool:
    try:
        check()
    except EmbedlogError:
        return False
    return True


def _wake(futures: Collection[Future[None]]) -> None:
    """Have futures done, in one step of each loop."""
    by_loop: defaultdict[AbstractEventLoop, list[Future[None]]] = defaultdict(list)
    for future in futures:
        by_loop[future.get_loop()].append(future)
    for loop, of_loop in by_loop.items():
        wake_soon(loop, of_loop)


def wake_soon(loop: AbstractEventLoop, futures: Collection[Future[Any]]) -> None:
    """Have futures of a loop done; may be called from any thread."""
    try:
        loop.call_soon_threadsafe(set_done, futures)
    except RuntimeError:
        pass  # The loop was closed, and with it what waited.


def set_done(futures: Collection[Future[Any]]) -> None:
    """Have futures done, on the thread of their loop, unless they are."""
    for future in futures:
        if not future.done():
            future.set_result(None)
