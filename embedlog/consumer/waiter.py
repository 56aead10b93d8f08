"""Waits for records by sleeping in the kernel, without using CPU time."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import monotonic
from typing import TypeVar

from embedlog.config import ConsumerConfig
from embedlog.consumer.arguments import SingleThreadGuard
from embedlog.errors import ClosedError, WakeupError
from embedlog.files import WakePage
from embedlog.root.root import Root

T = TypeVar("T")

_MAX_SLEEP_SECONDS = 1.0
"""The longest sleep: a Ctrl-C just before it must not wait for a record."""
_MAX_SLEEP_UNWAKEABLE_SECONDS = 0.05
"""The same where `wakeup` cannot wake it, because the wake page is read-only."""


class Waiter:
    """Waits on the log's wake page, which every append of every process advances."""

    def __init__(self, root: Root, config: ConsumerConfig, guard: SingleThreadGuard) -> None:
        self._root, self._config, self._guard = root, config, guard
        self._joined_page: WakePage | None = None
        """The page on which this waiter is counted; a forked child has another page."""
        self.wakeup_pending = False
        """Whether `wakeup` was called and no call has raised `WakeupError` since."""

    def repeat(self, step: Callable[[], T], timeout_ms: float | None) -> T:
        """Repeat a step until it returns something or the time is over.

        A waiter joins the wake page and reads its value before the step, so an append
        between the step and the sleep ends the sleep.  The first step runs before joining,
        since a waiter that never sleeps need not join.  After a sleep it stays joined until
        a first step returns something, since most callers that wait soon wait again.

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
                wake.wait(value, min(left, self._max_sleep_seconds()))
            else:
                wake.join()
                self._joined_page = wake

    def leave_page(self) -> None:
        """Stop being counted as a waiter, so that appends need not wake this one."""
        page, self._joined_page = self._joined_page, None
        if page is not None:
            page.leave()

    def _max_sleep_seconds(self) -> float:
        config, wakeable = self._config, self._root.wake.rings
        seconds = _MAX_SLEEP_SECONDS if wakeable else _MAX_SLEEP_UNWAKEABLE_SECONDS
        if config.fetch_min_bytes > 1:
            seconds = min(seconds, config.fetch_max_wait_ms / 1000)
        return min(seconds, max(config.metadata_max_age_ms, 1) / 1000)

    def wakeup(self) -> None:
        """Make the current or the next `repeat` raise `WakeupError`; from any thread."""
        self.wakeup_pending = True
        self.wake_all()

    def wake_all(self) -> None:
        """Wake all waiters of the log."""
        if self._root.wake.rings:
            self._root.wake.advance()
