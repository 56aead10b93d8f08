"""`embedlog serve --workers N`: starts the workers, and starts them again when they die."""

from __future__ import annotations

import multiprocessing
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from embedlog.errors import EmbedlogError
from embedlog.lazy import logging
from embedlog.server.workers import Worker

_logger = logging.getLogger("embedlog.cli")

Served = Callable[[Worker], AbstractContextManager[object]]
_PAUSE_SECONDS = 1.0
"""Before a worker is started again that has died before it served."""
_STOP_SECONDS = 30.0
"""Workers that take longer to end are killed."""


def serve_by(workers: list[Worker], served: Served, announce: Callable[[], None]) -> None:
    """Serve by a process for each worker until SIGINT or SIGTERM.

    They end with this process, whatever ends it.  It has the sockets where they listen, too, so
    that clients of a worker that has died wait for the next one there.

    Args:
        workers: What each of them listens at.
        served: Opens the log, and serves it; it can be pickled.
        announce: Is called once all of them serve.

    Raises:
        EmbedlogError, OSError: A worker cannot begin to serve.
    """
    stopped, stop = socket.socketpair()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.send(b"\0"))
    # A fork would copy locks that threads hold.
    context = multiprocessing.get_context("spawn")
    running: dict[Connection, tuple[Worker, BaseProcess]] = {}
    starting, is_announced = set[Connection](), False

    def start(worker: Worker) -> None:
        status, theirs = context.Pipe()
        process = context.Process(target=_work, args=(served, worker, theirs))
        process.start()
        theirs.close()
        running[status] = worker, process
        starting.add(status)

    try:
        for worker in workers:
            start(worker)
        while stopped not in (ready := wait([stopped, *running])):
            for status in ready:
                assert isinstance(status, Connection)
                try:
                    error = status.recv()
                except (EOFError, ConnectionError):
                    worker, process = running.pop(status)
                    status.close()
                    process.join()
                    _logger.warning(
                        "Worker %d has ended with the code %s, and is started again",
                        *(worker.number, process.exitcode),
                    )
                    if status in starting and wait([stopped], _PAUSE_SECONDS):
                        return
                    starting.discard(status)
                    start(worker)
                    continue
                if error is None:
                    starting.discard(status)
                elif not is_announced:
                    raise error
                else:
                    _logger.warning("Worker %d: %s", running[status][0].number, error)
            if not starting and not is_announced:
                announce()
                is_announced = True
    finally:
        for status in running:
            status.close()
        for worker in workers:
            worker.close()
        for _, process in running.values():
            process.join(_STOP_SECONDS)
            process.kill()
        stopped.close()
        stop.close()


def _work(served: Served, worker: Worker, status: Connection) -> None:
    """Serve as a worker, until the other end of a connection is closed, or SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent gets it, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        with served(worker):
            status.send(None)
            with suppress(EOFError):
                status.recv()
    except (EmbedlogError, OSError) as error:
        with suppress(OSError):
            status.send(error)
