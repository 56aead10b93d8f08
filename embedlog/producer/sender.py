"""The thread that drains what nobody waits for; and what happens at a fork and at the exit."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from time import monotonic
from typing import TYPE_CHECKING

from embedlog.errors import EmbedlogError

if TYPE_CHECKING:
    from embedlog.producer import Producer

LOGGER = logging.getLogger("embedlog.producer")
TICK = 0.001
"""Seconds between two looks while records are sent; also the least a record lingers."""
QUIET_TICKS = 20
"""Looks that found nothing before the thread sleeps until it is woken."""
LONGEST = 0.1
FOREVER = threading.TIMEOUT_MAX

_producers: weakref.WeakSet[Producer] = weakref.WeakSet()


class Sender:
    """A daemon thread, started by the first `wake`; it does not keep its producer alive."""

    def __init__(self, producer: Producer) -> None:
        self.idle = True
        self._producer = weakref.ref(producer)
        self._event = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._stopped = False

    def wake(self) -> None:
        """See to it that the thread looks soon."""
        if self._thread is None:
            with self._starting:
                if self._thread is None and not self._stopped:
                    self.idle = False
                    thread = threading.Thread(target=_run, args=(self,), daemon=True)
                    thread.name = "embedlog-producer"
                    self._thread = thread
                    thread.start()
        self._event.set()

    def stop(self, timeout: float = 1.0) -> None:
        """End the thread; it may be the one that calls, or be busy with a last drain."""
        self._stopped = True
        self._event.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)


def _run(own: Sender) -> None:
    quiet = 0
    while not own._stopped:
        producer = own._producer()
        if producer is None:
            return
        due = _drain_due(producer)
        quiet = 0 if due is not None else quiet + 1
        pause = TICK if due is None else due
        if quiet >= QUIET_TICKS:
            quiet = 0
            pause = _fall_asleep(own, producer)
        del producer
        _sleep(own, pause)


def _fall_asleep(own: Sender, producer: Producer) -> float:
    """Be idle from now on, unless something was gathered just before."""
    # Under the lock of `send`: it looks at `idle` and gathers in one step.
    with producer.lock:
        own._event.clear()
        own.idle = not any(queue.pending() for queue in producer.queues())
    return FOREVER if own.idle else TICK


def _sleep(own: Sender, pause: float) -> None:
    own._event.wait(pause)
    own.idle = False
    own._event.clear()


def _drain_due(producer: Producer) -> float | None:
    """Drain what is due; return in how many seconds the next is, None if nothing is there."""
    now, next_due = monotonic(), None
    for queue in producer.queues():
        due = queue.due_at()
        if due is not None and due <= now:
            try:
                # If another thread is at it, it will also do what came since.
                queue.drain_if_free(None)
            except EmbedlogError:
                LOGGER.exception("draining %s failed", queue.topic)
            due = queue.due_at()
        if due is not None:
            next_due = due if next_due is None else min(next_due, due)
    if next_due is None:
        return None
    return min(max(next_due - monotonic(), TICK), LONGEST)


def watch(producer: Producer) -> None:
    """Flush a producer at the exit, and start it anew in a forked child."""
    _producers.add(producer)


def _at_exit() -> None:
    for producer in list(_producers):
        try:
            if not producer.root.closed:
                producer.close(30.0)
        except EmbedlogError:
            LOGGER.exception("%r could not be flushed at the exit", producer)


def _after_fork_in_child() -> None:
    for producer in list(_producers):
        producer.after_fork()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
