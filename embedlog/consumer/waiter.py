"""Waits for records by sleeping in the kernel, without using CPU time."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from embedlog.config import ConsumerConfig
from embedlog.consumer.arguments import SingleThreadGuard
from embedlog.errors import ClosedError, WakeupError
from embedlog.files import WakePage, WakeThread
from embedlog.files.wake_thread import set_done, wake_soon
from embedlog.lazy import asyncio
from embedlog.root.root import Root

if TYPE_CHECKING:
    from asyncio import Future

T = TypeVar("T")

_MAX_SLEEP_SECONDS = 1.0
"""The longest sleep: a Ctrl-C just before it must not wait for a record."""
_MAX_SLEEP_UNWAKEABLE_SECONDS = 0.05
"""The same where `wakeup` cannot wake it, because the wake page is read-only."""


_LONGEST_SECONDS = 86400.0
"""A timer of a loop may have a limit, as that of asyncio has."""


def _never() -> float:
    return _LONGEST_SECONDS


class Waiter:
    """Waits on the log's wake page, which every append of every process advances."""

    def __init__(self, root: Root, config: ConsumerConfig, guard: SingleThreadGuard) -> None:
        self._root, self._config, self._guard = root, config, guard
        self._joined_page: WakePage | None = None
        """The page on which this waiter is counted; a forked child has another page."""
        self._joined_thread: WakeThread | None = None
        """Likewise, of a consumer that tasks use."""
        self._sleeping: set[Future[None]] = set()
        """Done to wake the tasks that wait, each in its loop."""
        self.wakeup_pending = False
        """Whether `wakeup` was called and no call has raised `WakeupError` since."""

    def repeat(
        self, step: Callable[[], T], timeout_ms: float | None, due_in: Callable[[], float] = _never
    ) -> T:
        """Repeat a step until it returns something or the time is over.

        A waiter joins the wake page and reads its value before the step, so an append
        between the step and the sleep ends the sleep.  The first step runs before joining,
        since a waiter that never sleeps need not join.  After a sleep it stays joined until
        a first step returns something, since most callers that wait soon wait again.

        Args:
            step: Looks for something.
            timeout_ms: How long to wait; None waits forever.
            due_in: Returns after how many seconds to look at the latest.

        Raises:
            WakeupError: `wakeup` was called.
            ClosedError: The consumer was closed.
            LogDeletedError: The log was deleted, so no record will come.
        """
        deadline = inf if timeout_ms is None else monotonic() + timeout_ms / 1000
        slept = False
        while True:
            # First: a close or wakeup after the checks below advances the page as well.
            wake = self._root.wake
            value = wake.value()
            if self._guard.closed:
                raise ClosedError("The consumer was closed")
            if self.wakeup_pending:
                self.wakeup_pending = False
                raise WakeupError("wakeup() was called", todo="Poll again to continue.")
            result = step()
            if result:
                if not slept:
                    self.leave_page()
                return result
            self._root.context.state.check_linked()
            left = deadline - monotonic()
            if left <= 0:
                return result
            if self._joined_page is wake:
                slept = True
                wake.wait(value, min(left, self._max_sleep_seconds(), due_in()))
            else:
                wake.join()
                self._joined_page = wake

    def leave_page(self) -> None:
        """Stop being counted as a waiter, so that appends need not wake this one."""
        page, self._joined_page = self._joined_page, None
        if page is not None:
            page.leave()
        thread, self._joined_thread = self._joined_thread, None
        if thread is not None:
            thread.leave()

    async def repeat_async(
        self, look: Callable[[], T], deadline: float | None, due_in: Callable[[], float]
    ) -> T:
        """Do as `repeat`, in a task; the thread of the page sleeps for all tasks of the log.

        A cancellation takes effect while it sleeps only, and then nothing was taken.

        Args:
            look: A `repeat` of the step that does not wait, with what surrounds it.
            deadline: On the monotonic clock; None to wait forever.
            due_in: Returns after how many seconds to look at the latest.
        """
        # Without the timer of `repeat`: a thousand tasks would have a thousand.  A new topic
        # changes the page as well.
        deadline = inf if deadline is None else deadline
        slept = False
        while True:
            wake = self._root.wake
            value = wake.value()
            result = look()
            left = deadline - monotonic()
            if result or left <= 0:
                if result and not slept and not self._sleeping:
                    self.leave_page()
                return result
            if self._joined_thread is wake.thread:
                slept = True
                await self._sleep(wake.thread, value, min(left, self._fetch_seconds(), due_in()))
            else:
                wake.thread.join()
                self._joined_thread = wake.thread

    async def _sleep(self, thread: WakeThread, value: int, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._sleeping.add(future)
        thread.add(future, value, self._root.context.state.check_linked)
        timer = loop.call_later(seconds, set_done, [future])
        try:
            # Another thread may have called before there was a future to wake.
            if not (self._guard.closed or self.wakeup_pending):
                await future
        finally:
            timer.cancel()
            thread.discard(future)
            self._sleeping.discard(future)

    def wake_tasks(self) -> None:
        """Wake the tasks that wait here; may be called from any thread."""
        for future in list(self._sleeping):
            wake_soon(future.get_loop(), [future])

    def _max_sleep_seconds(self) -> float:
        seconds = _MAX_SLEEP_SECONDS if self._root.wake.rings else _MAX_SLEEP_UNWAKEABLE_SECONDS
        return min(seconds, self._fetch_seconds(), max(self._config.metadata_max_age_ms, 1) / 1000)

    def _fetch_seconds(self) -> float:
        """Return after how many seconds fewer than fetch_min_bytes are returned."""
        config = self._config
        return config.fetch_max_wait_ms / 1000 if config.fetch_min_bytes > 1 else _LONGEST_SECONDS

    def wakeup(self) -> None:
        """Make the current or the next `repeat` raise `WakeupError`; from any thread."""
        self.wakeup_pending = True
        self.wake_tasks()
        self.wake_all()

    def wake_all(self) -> None:
        """Wake all waiters of the log."""
        if self._root.wake.rings:
            self._root.wake.advance()
