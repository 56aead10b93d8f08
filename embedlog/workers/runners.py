"""What calls the handler: threads, or the tasks of an event loop in a thread."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from time import monotonic
from types import FrameType
from typing import Any

from embedlog.callbacks import check_ran
from embedlog.workers.in_flight import InFlight, InFlightRecord

Done = Callable[[InFlightRecord, Any], None]
"""Called with what the handler returned for a record."""
Failed = Callable[[InFlightRecord, Exception], None]
"""Called with what it raised."""


class ThreadRunner:
    """Calls the handler in threads.

    Args:
        in_flight: The records.
        handler: Called with each.
        concurrency: The number of threads.
        done: Called in these threads, as is ``failed``.
        failed: Any other error than an `Exception` ends the run.
    """

    def __init__(
        self,
        in_flight: InFlight,
        handler: Callable[[Any], Any],
        concurrency: int,
        done: Done,
        failed: Failed,
    ) -> None:
        self._in_flight, self._handler = in_flight, handler
        self._done, self._failed = done, failed
        self._available = threading.Condition(in_flight.lock)
        in_flight.notify = self._notify
        self._has_leader = False
        """Whether a thread waits until the next record is due; the others wait until notified."""
        self._threads = [
            threading.Thread(target=self._run, name=f"embedlog-handler-{number}", daemon=True)
            for number in range(concurrency)
        ]

    def start(self, initializer: Callable[[], Any] | None) -> None:
        """Call the initializer, and then begin."""
        if initializer is not None:
            check_ran(initializer(), "initializer")
        for thread in self._threads:
            thread.start()

    def join(self, seconds: float) -> None:
        """Wait for the handlers that run, after `InFlight.close`, for so long at most."""
        until = monotonic() + seconds
        for thread in self._threads:
            thread.join(max(until - monotonic(), 0.0))

    def _run(self) -> None:
        in_flight, this = self._in_flight, threading.get_ident()
        while (record := self._take()) is not None:
            record.runner = this
            try:
                if record.error is not None:
                    raise record.error
                result = self._handler(record.record)
            except Exception as error:  # noqa: BLE001 - the policy says what becomes of it
                self._guarded(self._failed, record, error)
            except BaseException as error:  # noqa: BLE001 - it ends the run
                in_flight.fail(error, record)
            else:
                self._guarded(self._done, record, result)

    def _guarded(self, what: Callable[..., None], record: InFlightRecord, *result: Any) -> None:
        """Call what must not fail; an error of it ends the run, and not only this thread."""
        try:
            what(record, *result)
        except BaseException as error:  # noqa: BLE001 - it ends the run
            self._in_flight.fail(error, record)

    def _notify(self, ready: int) -> None:
        self._has_leader = False  # what is due next may be another record
        self._available.notify(ready)

    def _take(self) -> InFlightRecord | None:
        """Wait for the next record; None at the end."""
        in_flight = self._in_flight
        with in_flight.lock:
            while not in_flight.closed:
                now = monotonic()
                record, due = in_flight.take(now), in_flight.next_due()
                if record is not None:
                    if in_flight.has_ready() or (due is not None and not self._has_leader):
                        self._available.notify()
                    return record
                if due is None or self._has_leader:
                    self._available.wait()
                else:
                    self._has_leader = True
                    self._available.wait(max(due - now, 0.0))
                    self._has_leader = False
        return None


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


def stack_of(runner: int | asyncio.Task[None]) -> str:
    """Return where the handler of a record is, as text."""
    if isinstance(runner, int):
        frame = sys._current_frames().get(runner)
        return "" if frame is None else "".join(traceback.format_stack(frame))
    lines = [
        line
        for frame in _awaiting(runner.get_coro())
        for line in traceback.format_list([_summary(frame)])
    ]
    return "".join(lines)


def _summary(frame: FrameType) -> traceback.FrameSummary:
    code = frame.f_code
    return traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name)


def _awaiting(awaited: Any) -> Iterator[FrameType]:
    """Yield the frames of a coroutine and of those that it awaits, the innermost last."""
    while awaited is not None:
        for prefix in ("cr", "gi", "ag"):
            frame = getattr(awaited, f"{prefix}_frame", None)
            if frame is not None:
                yield frame
                awaited = getattr(
                    awaited, f"{prefix}_await", getattr(awaited, "gi_yieldfrom", None)
                )
                break
        else:
            return
