"""Calls the handler in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
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
