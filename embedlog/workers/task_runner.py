"""Awaits the handler in tasks of an event loop, which runs in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from embedlog.workers.in_flight import InFlight, InFlightRecord
from embedlog.workers.thread_runner import Done, Failed


class TaskRunner:
    """Awaits an async handler in tasks of an event loop, which has a thread of its own.

    The arguments are those of `ThreadRunner`, with the number of tasks; ``done`` and ``failed``
    are called on the loop.
    """

    def __init__(
        self,
        in_flight: InFlight,
        handler: Callable[[Any], Any],
        concurrency: int,
        done: Done,
        failed: Failed,
    ) -> None:
        self._in_flight, self._handler, self._concurrency = in_flight, handler, concurrency
        self._done, self._failed = done, failed
        self._loop: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: list[asyncio.Future[None]] = []
        """What the tasks without a record wait for."""
        self._timer: asyncio.TimerHandle | None = None
        """Wakes an idle task when the next record is due."""
        self._thread = threading.Thread(target=self._run, name="embedlog-loop", daemon=True)
        self._initialized = threading.Event()
        self._initializer: Callable[[], Any] | None = None
        self._error: BaseException | None = None

    def start(self, initializer: Callable[[], Any] | None) -> None:
        """Call the initializer on the loop, or await it, and then begin."""
        self._initializer = initializer
        self._thread.start()
        self._initialized.wait()
        if self._error is not None:
            raise self._error

    def join(self, seconds: float) -> None:
        """Wait for the handlers that run, after `InFlight.close`, for so long at most."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001 - `start` raises it, or it ends the run
            self._error = error
            self._in_flight.fail(error)
        finally:
            self._initialized.set()

    async def _main(self) -> None:
        in_flight = self._in_flight
        self._loop, self._closed = asyncio.get_running_loop(), asyncio.Event()
        in_flight.notify = self._notify
        if self._initializer is not None:
            result = self._initializer()
            if asyncio.iscoroutine(result):
                await result
        self._initialized.set()
        await self._closed.wait()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _notify(self, ready: int) -> None:
        """Have records handled by tasks that are idle, or new; any thread may call it."""
        if threading.get_ident() == self._thread.ident:
            self._wake(ready)
        else:
            self._loop.call_soon_threadsafe(self._wake, ready)

    def _wake(self, ready: int) -> None:
        if self._in_flight.closed:
            self._closed.set()
            ready = len(self._idle)
        for _ in range(ready):
            if self._idle:
                idle = self._idle.pop()
                if not idle.done():
                    idle.set_result(None)
            elif len(self._tasks) < self._concurrency:
                task = self._loop.create_task(self._work())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                return

    async def _work(self) -> None:
        """Handle one record after another."""
        this, in_flight = asyncio.current_task(), self._in_flight
        while not in_flight.closed:
            now = monotonic()
            with in_flight.lock:
                record, due = in_flight.take(now), in_flight.next_due()
            if due is not None and (self._timer is None or due < self._timer.when()):
                self._set_timer(due)
            if record is not None:
                if in_flight.has_ready():
                    self._wake(1)
                record.runner = this
                await self._handle(record)
                continue
            idle = self._loop.create_future()
            self._idle.append(idle)
            await idle

    def _set_timer(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # The clock of the loop is the monotonic one, too.
        self._timer = self._loop.call_at(due, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self._wake(1)

    async def _handle(self, record: InFlightRecord) -> None:
        try:
            try:
                if record.error is not None:
                    raise record.error
                result = await self._handler(record.record)
            except Exception as error:  # noqa: BLE001 - the policy says what becomes of it
                self._failed(record, error)
            else:
                self._done(record, result)
        except BaseException as error:  # noqa: BLE001 - it ends the run
            self._in_flight.fail(error, record)
