"""The background thread of a producer, which drains records that no caller waits for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from time import monotonic

from embedlog.errors import EmbedlogError
from embedlog.producer.delivery import LOGGER, DeliveryQueue

TICK = 0.001
"""Seconds between two rounds while records are sent; also the least time a record lingers."""
QUIET_ROUNDS = 20
"""Rounds without any work after which the thread sleeps until it is woken."""
MAX_PAUSE = 0.1
FOREVER = threading.TIMEOUT_MAX


class Sender:
    """A daemon thread that the first `start` starts; it does not keep its producer alive."""

    def __init__(self, lock: threading.Lock, queues: Mapping[str, DeliveryQueue]) -> None:
        self.idle = True
        """The thread sleeps, or was not started: a `send` must wake it."""
        self._lock, self._queues = lock, queues
        self._event = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._stopped = False

    def start(self) -> None:
        """Make the thread look for work soon, and start it if it does not run yet.

        Raises:
            RuntimeError: No thread can be started; the next call tries again.
        """
        if self._thread is None:
            with self._starting:
                if self._thread is None and not self._stopped:
                    arguments = weakref.ref(self), self._event
                    thread = threading.Thread(
                        name="embedlog-producer", target=_run, args=arguments, daemon=True
                    )
                    thread.start()
                    self._thread = thread
        self._event.set()

    def wake(self) -> None:
        """Do as `start` for records that are in the queue already, which must not be refused."""
        try:
            self.start()
        except RuntimeError as error:
            LOGGER.warning("Records are written by the next call of the producer only: %s", error)

    def stop(self, timeout: float = 1.0) -> None:
        """End the thread, which may be the caller's own, or busy with a last drain."""
        self._stopped = True
        self._event.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)


def _run(reference: weakref.ref[Sender], event: threading.Event) -> None:
    """Drain what is due, until the sender is stopped or garbage-collected."""
    quiet = 0
    while (sender := reference()) is not None and not sender._stopped:
        sender.idle = False
        due_in = _drain_due(list(sender._queues.values()))
        quiet = 0 if due_in is not None else quiet + 1
        pause = TICK if due_in is None else due_in
        if quiet >= QUIET_ROUNDS:
            quiet = 0
            # Under the lock of `send`, which reads `idle` and adds its record in one step.
            with sender._lock:
                event.clear()
                sender.idle = not any(queue.pending() for queue in sender._queues.values())
            # `stop` may have set the event before it was cleared.
            pause = FOREVER if sender.idle and not sender._stopped else TICK
        del sender
        event.wait(pause)
        event.clear()


def _drain_due(queues: list[DeliveryQueue]) -> float | None:
    """Drain what is due; return in how many seconds the next drain is, None if there is none."""
    now, next_due = monotonic(), None
    for queue in queues:
        due = queue.due_at()
        if due is not None and due <= now:
            try:
                # If another thread is draining, it will also write what was sent since.
                queue.drain(wait=False)
            except EmbedlogError:
                LOGGER.exception("Draining %s failed", queue.topic)
            due = queue.due_at()
        if due is not None:
            next_due = due if next_due is None else min(next_due, due)
    if next_due is None:
        return None
    return min(max(next_due - monotonic(), TICK), MAX_PAUSE)
