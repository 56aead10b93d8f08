"""The process that plans queries for Spark's JVM: ``python -m embedlog.spark.planner``.

The driver's JVM starts one for a session.  A request is a line of JSON on stdin, an answer one
on stdout, not always in the order of the requests:

    {"id": 1, "method": "initial_offset", "params": {"stream": 1}}
    {"id": 1, "result": {"flights": {"0": 23}}}
    {"id": 1, "error": {"type": "DataLossError", "message": "…", "refused": false}}

The methods are those of `QueryPlanner`, and "ping", which is answered immediately.  The first line
on stdout tells the version, once everything is imported.  The process ends when stdin does, so it
never outlives the JVM; it releases its leases then.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

from embedlog import errors
from embedlog.errors import EmbedlogError, SparkSetupError
from embedlog.forks import new_lock
from embedlog.spark.query_planner import QueryPlanner
from embedlog.version import __version__

PING = "ping"
"""The method by which Spark's driver sees that this process is not stopped or stuck."""
MAX_BATCH_THREADS = 32
"""Batch queries that are planned at once; most of them wait for a disk or a lock."""
END_SECONDS = 30
"""Requests that were begun when stdin ends may take this long."""
TERMINATION_SECONDS = 5
"""How long after SIGTERM the planner waits for the end of stdin."""
_REFUSALS = (
    *(ValueError, TypeError, LookupError),
    *(errors.NotALogError, errors.TopicAlreadyExistsError, errors.MirroredTopicError),
)
"""Errors of what a query asks for; for Spark each is an ``AnalysisException``."""

_logger = logging.getLogger("embedlog.spark")


class Request(NamedTuple):
    """A request; see `parse_request`."""

    id: int | None
    method: str
    params: dict[str, Any]


def parse_request(line: bytes) -> Request:
    """Return the request in a line.

    Raises:
        SparkSetupError: It is not one.
    """
    try:
        value = json.loads(line)
        request = Request(value["id"], value["method"], value.get("params") or {})
        if isinstance(request.method, str) and isinstance(request.params, dict):
            return request
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise _misunderstood(f"{line[:200]!r} is not a request")


def _misunderstood(problem: str) -> SparkSetupError:
    return SparkSetupError(
        f"The planner of embedlog {__version__} cannot understand Spark's driver: {problem}",
        todo="Use the jar and the Python package of the same version of embedlog.",
    )


class RequestServer:
    """Reads requests until the input ends, and answers them from threads.

    The requests of a stream are answered one after the other; all others at the same time.
    """

    def __init__(self, planner: QueryPlanner, requests: BinaryIO, answers: BinaryIO) -> None:
        self._planner, self._requests, self._answers = planner, requests, answers
        self._write_lock = new_lock()
        self._batches = ThreadPoolExecutor(MAX_BATCH_THREADS, "planner")
        self._streams: dict[int, ThreadPoolExecutor] = {}
        """A thread for each open stream, by its number."""

    def run(self) -> None:
        """Answer requests until the input ends; an incomplete last line is left out."""
        for line in self._requests:
            if line.endswith(b"\n"):
                self._accept(line)

    def finish(self) -> None:
        """Wait for the answers to all requests so far."""
        for executor in (*self._streams.values(), self._batches):
            executor.shutdown()

    def _accept(self, line: bytes) -> None:
        try:
            request = parse_request(line)
        except SparkSetupError as error:
            self._send({"id": None, **_error(error)})
        else:
            if request.method == PING:
                self._send({"id": request.id, "result": None})
            else:
                self._executor(request.params.get("stream")).submit(self._answer, request)

    def _executor(self, stream: Any) -> ThreadPoolExecutor:
        if not isinstance(stream, int) or not self._planner.is_open(stream):
            return self._batches
        if stream not in self._streams:
            for number in [number for number in self._streams if not self._planner.is_open(number)]:
                self._streams.pop(number).shutdown(wait=False)
            self._streams[stream] = ThreadPoolExecutor(1, f"planner-stream-{stream}")
        return self._streams[stream]

    def _answer(self, request: Request) -> None:
        answer: dict[str, Any]
        try:
            answer = {"result": self._call(request)}
        except EmbedlogError as error:
            answer = _error(error)
        except Exception as error:
            _logger.exception("The planner failed in %s", request.method)
            answer = _error(
                EmbedlogError(
                    f"The planner failed in {request.method}: {type(error).__name__}: {error}",
                    todo="Report this, with the traceback in the log of Spark's driver.",
                )
            )
        self._send({"id": request.id, **answer})

    def _call(self, request: Request) -> Any:
        if request.method not in self._planner.METHODS:
            raise _misunderstood(f"there is no method {request.method!r}")
        method = getattr(self._planner, request.method)
        try:
            inspect.signature(method).bind(**request.params)
        except TypeError as error:
            raise _misunderstood(f"{request.method}: {error}") from error
        return method(**request.params)

    def _send(self, answer: dict[str, Any]) -> None:
        line = json.dumps(answer, separators=(",", ":")).encode() + b"\n"
        with self._write_lock:
            if self._answers.closed:
                return
            try:
                self._answers.write(line)
                self._answers.flush()
            except BrokenPipeError:
                # The JVM is gone.  Its end of stdin is closed too, which ends this process.
                with suppress(BrokenPipeError):
                    # Python 3.13 prints the error of a file that it cannot flush at the end.
                    self._answers.close()


def _error(error: EmbedlogError) -> dict[str, Any]:
    """Return an error with the name of its class in `embedlog.errors`, or of the nearest base."""
    names = (cls.__name__ for cls in type(error).__mro__)
    name = next(name for name in names if hasattr(errors, name))
    return {"error": {"type": name, "message": str(error), "refused": isinstance(error, _REFUSALS)}}


def _take_stdout() -> BinaryIO:
    """Return stdout for the answers; everything else that prints, prints to stderr from now on."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def _end_at_the_latest(seconds: float) -> None:
    """End the process after some time, whatever its threads do then."""

    def end() -> None:
        _logger.warning("The planner ends without releasing leases, which end by their time limit")
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def main() -> int:
    """Answer requests until stdin ends."""
    # Ctrl-C goes to the JVM as well, which decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # SIGTERM often does so, too.  If stdin continues, so do the queries: then another planner needs
    # the leases of this one.
    signal.signal(signal.SIGTERM, lambda *_: _end_at_the_latest(TERMINATION_SECONDS))
    answers = _take_stdout()
    planner = QueryPlanner()
    # On a line of its own, whatever was printed before.
    answers.write(b"\n" + json.dumps({"version": __version__}).encode() + b"\n")
    answers.flush()
    server = RequestServer(planner, sys.stdin.buffer, answers)
    try:
        server.run()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_at_the_latest(END_SECONDS)
        server.finish()
        planner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
