"""A process forks while another of its threads is at any line of a call (P18)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pyarrow as pa

import embedlog
from support import forks
from support.patience import patient

PATIENCE = 10.0
"""Seconds until a child counts as hung, on an idle machine."""
# Made here, since it makes Arrow import pandas: see `fork_in_first_use`.
ROWS = pa.table({"id": [1, 2], "name": ["a", None]})
KEYED = pa.table({"key": [b"k"] * 3, "value": [b"v"] * 3})


class Handles:
    """What the threads of the parent and the child share, of a log that was just opened."""

    def __init__(self, root: Path) -> None:
        self.log = embedlog.open(root)
        self.log.create_topic("t", exist_ok=True)
        self.log.create_topic("rows", schema=ROWS.schema, exist_ok=True)
        self.log.create_topic("keys", config={"cleanup.policy": "compact"}, exist_ok=True)
        self.producer = self.log.producer()

    def send(self) -> None:
        self.producer.send("t", b"value", key=b"key").result(PATIENCE)

    def write_table(self) -> None:
        self.producer.append_table("rows", ROWS)

    def read(self) -> None:
        assert self.log.topic("t").to_arrow().num_rows > 0

    def read_rows(self) -> None:
        assert self.log.topic("rows").to_arrow().num_rows > 0

    def consume(self) -> None:
        with self.log.consumer("t", group_id="g") as consumer:
            consumer.poll(0.01)
            consumer.commit()

    def compact(self) -> None:
        self.producer.append_table("keys", KEYED)
        self.log.housekeeping.run()


CALLS: dict[str, Callable[[Handles], None]] = {
    call.__name__: call
    for call in (
        Handles.send,
        Handles.write_table,
        Handles.read,
        Handles.read_rows,
        Handles.consume,
        Handles.compact,
    )
}


class Line(NamedTuple):
    """Fork at the `n`-th line of a call."""

    call: str
    n: int


class Lines:
    """Counts the lines that a thread runs; at one of them it lets another thread fork."""

    def __init__(self, n: int) -> None:
        self.count, self._n = 0, n
        self.reached, self.forked = threading.Event(), threading.Event()

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            if self.count == self._n:
                self.reached.set()
                # Not for ever: a fork waits for the end of some steps.
                self.forked.wait(0.05)
            self.count += 1
        return self.trace


def _traced(handles: Handles, name: str, lines: Lines) -> threading.Thread:
    def run() -> None:
        sys.settrace(lines.trace)
        try:
            CALLS[name](handles)
        finally:
            sys.settrace(None)
            lines.reached.set()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def count_lines(root: Path, name: str) -> int:
    """Return how many lines the call runs, the first time after the log was opened."""

    def work() -> int:
        lines = Lines(-1)
        _traced(Handles(_root(root)), name, lines).join()
        return lines.count

    return int(forks.call(work))


def _root(root: Path) -> Path:
    with embedlog.open(root) as log:
        if not log.topics():
            handles = Handles(root)
            handles.send()
            handles.write_table()
            handles.log.close()
    return root


def check(case: Line, *, root: Path) -> bool:
    """Fork at one line of the call; whether it got that far.  The child makes the same call."""

    def work() -> bool:
        handles, lines = Handles(_root(root)), Lines(case.n)
        thread = _traced(handles, case.call, lines)
        assert lines.reached.wait(patient(PATIENCE))
        child = forks.Child(lambda: CALLS[case.call](handles))
        lines.forked.set()
        end = child.end(PATIENCE)
        assert end.finding() is None, f"{case}: {end.finding()}"
        thread.join(patient(PATIENCE))
        assert not thread.is_alive(), f"{case}: the parent hangs"
        CALLS[case.call](handles)
        return lines.count > case.n

    return bool(forks.call(work))
