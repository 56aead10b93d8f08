"""Fetches that wait for records: one thread sleeps on the wake page for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from time import monotonic

from embedlog.errors import EmbedlogError
from embedlog.partition import PartitionLog
from embedlog.root.root import Root

_SLEEP_SECONDS = 1.0
"""The longest sleep, so that the thread ends in time where no process may wake it."""


def _never() -> bool:
    return False


Ends = Mapping[PartitionLog, int | None]
"""The end of each partition, None of one that is not there."""


class _Waiting:
    def __init__(self, ends: Ends, changed: Callable[[], bool]) -> None:
        self.ends, self.changed, self.woken = ends, changed, threading.Event()


class TailWatch:
    """Wakes threads when one of their partitions has grown, whichever process appended.

    The thread is there, and counted as a waiter of the page, while fetches wait.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._changed = threading.Condition()
        self._waiting: set[_Waiting] = set()
        self._thread: threading.Thread | None = None
        self._closed = False

    def wait(self, ends: Ends, deadline: float, changed: Callable[[], bool] = _never) -> bool:
        """Return once a partition has another end, or at a deadline; False once this is closed.

        Args:
            ends: The end of each partition that the caller has seen.
            deadline: On the monotonic clock.
            changed: Whether something else has changed that the caller waits for.
        """
        waiting = _Waiting(ends, changed)
        with self._changed:
            if self._closed:
                return False
            self._waiting.add(waiting)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="embedlog-server-wake", daemon=True
                )
                self._thread.start()
            self._changed.notify()
        # The thread may have looked, and gone to sleep, between the look of the caller and now.
        try:
            if not _due([waiting]):
                waiting.woken.wait(max(deadline - monotonic(), 0))
        finally:
            with self._changed:
                self._waiting.discard(waiting)
        return not self._closed

    def close(self) -> None:
        """Wake all that wait, and end the thread."""
        with self._changed:
            self._closed = True
            for waiting in self._waiting:
                waiting.woken.set()
            self._changed.notify()
        if not self._root.closed and self._root.wake.rings:
            self._root.wake.advance()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        page = None
        while True:
            with self._changed:
                if not self._waiting and not self._closed:
                    if page is not None:
                        page.leave()
                        page = None
                    self._changed.wait()
                if self._closed:
                    break
                waiting = list(self._waiting)
            try:
                if page is None:
                    page = self._root.wake
                    page.join()
                seen = page.value()
                due = _due(waiting)
                if not due:
                    page.wait(seen, _SLEEP_SECONDS)
            except EmbedlogError:
                # The log was closed, or deleted: those that wait find out when they look.
                due = waiting
            for each in due:
                each.woken.set()
            with self._changed:
                self._waiting.difference_update(due)
        if page is not None and not self._root.closed:
            page.leave()


def _due(waiting: list[_Waiting]) -> list[_Waiting]:
    """Return those that have what they wait for."""
    ends = {log: end_of(log) for log in {log for each in waiting for log in each.ends}}
    return [
        each
        for each in waiting
        if any(ends[log] != seen for log, seen in each.ends.items()) or each.changed()
    ]


def end_of(log: PartitionLog) -> int | None:
    """Return the end of a partition; None if it is not there any more."""
    try:
        return log.visible_end(log.tail())
    except EmbedlogError:
        return None
