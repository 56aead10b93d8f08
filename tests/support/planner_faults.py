"""Faults in the process that plans for Spark's JVM, where a test orders them.

An order is a file in the directory of faults of the session, with the name of a point: "start",
or "before" or "after" a method of `QueryPlanner`.  "After" is before the answer is written.  A
planner that comes to the point takes the order, so that each is used as often as it says, and
then acts.  In the directory is also a journal of the calls whose answers were written.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

VARIABLE = "EMBEDLOG_PLANNER_FAULTS"
"""The environment variable with the directory of faults."""
GARBAGE = (
    b'Welcome to Python!\n\xff\xfe\x00\n\n{}\n[1, 2]\n7\nnull\n{"hello": "world"}\n{"id": 999999}\n'
)
"""What a program may print on stdout before it is the planner."""


def order(
    directory: Path, point: str, fault: str = "kill", *, skip: int = 0, times: int = 1
) -> None:
    """Order a fault.

    Args:
        directory: The directory of faults.
        point: Where it happens.
        fault: "kill" or "stop" the planner by a signal, "exit", "sleep" for a while, "print"
            garbage on stdout, kill the "driver" (and go on until stdin ends), or kill "both".
        skip: How often the point is passed before it happens.
        times: How often it happens then.
    """
    directory.mkdir(exist_ok=True)
    (directory / "new order").write_text(json.dumps([fault, skip, times]))
    (directory / "new order").rename(directory / point)


def journal(directory: Path, method: str) -> list[Any]:
    """Return the results of a method that were answered, in order."""
    calls = [json.loads(line) for line in (directory / "journal").read_text().splitlines()]
    return [result for name, result in calls if name == method]


def _take(directory: Path, point: str) -> str | None:
    """Return the fault to act out now, if any."""
    path = directory / point
    if not path.exists():
        return None
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            return None
        # The file is empty if another module ordered it.
        fault, skip, times = json.loads(path.read_text() or '["kill", 0, 1]')
        if skip > 0:
            order(directory, point, fault, skip=skip - 1, times=times)
            return None
        if times > 1:
            order(directory, point, fault, times=times - 1)
        else:
            path.unlink()
    victims = {"java": "driver", "both": "both"}
    return victims.get(os.environ.get("KILL_DRIVER", ""), str(fault))


def _act(fault: str, stdout: int, end: bytes = b"") -> None:
    if fault in ("driver", "both"):
        os.kill(os.getppid(), signal.SIGKILL)
    if fault in ("kill", "both"):
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "sleep":
        time.sleep(5)
    if fault == "exit":
        os._exit(3)
    if fault == "print":
        os.write(stdout, GARBAGE + end)


def install() -> None:
    """Let this process act out the faults that are ordered for it."""
    directory = Path(os.environ[VARIABLE])
    # `main` lets 1 be another file.
    stdout = os.dup(1)

    def reach(point: str, end: bytes = b"") -> None:
        fault = _take(directory, point)
        if fault is not None:
            _act(fault, stdout, end)

    reach("start", b"no end of line")
    from embedlog.spark.query_planner import QueryPlanner

    def wrap(name: str) -> None:
        method = getattr(QueryPlanner, name)

        @functools.wraps(method)
        def wrapper(*args: Any, **params: Any) -> Any:
            reach(f"before {name}")
            result = method(*args, **params)
            reach(f"after {name}")
            if (directory / "journal").exists():
                with (directory / "journal").open("a") as file:
                    file.write(json.dumps([name, result]) + "\n")
            return result

        setattr(QueryPlanner, name, wrapper)

    for name in QueryPlanner.METHODS:
        wrap(name)
