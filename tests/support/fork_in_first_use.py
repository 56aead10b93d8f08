"""A fresh process forks while another of its threads imports libraries (P18).

As a program, it runs one case: `python fork_in_first_use.py ROOT PROGRAM MOMENT` forks once so
many imports have begun in other threads; with a moment of -1 it prints how many there are.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import embedlog

PATIENCE = 6.0
"""Seconds until a child counts as hung, on an idle machine."""


class ImportCounter(MetaPathFinder):
    """Counts the modules that are looked up by other threads than the main thread."""

    def __init__(self, moment: int) -> None:
        self.count, self._moment = 0, moment
        self.reached = threading.Event()

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if threading.current_thread() is not threading.main_thread():
            if self.count == self._moment:
                self.reached.set()
            self.count += 1


class Program:
    """What the parent does in another thread, and the child while that runs or after it."""

    def __init__(self, root: str) -> None:
        self.log = embedlog.open(root)
        self.log.create_topic("t", exist_ok=True)
        self.producer = self.log.producer()

    def send(self, value: bytes) -> None:
        # With a header, since a record without any loads no library.
        self.producer.send("t", value, headers=[("from", value)]).result(PATIENCE)

    def read(self, _: bytes = b"") -> None:
        self.log.topic("t").to_arrow()

    def to_pandas(self, _: bytes = b"") -> None:
        # Not Polars, whose threads a child must not use.
        self.log.topic("t").to_pandas()


PROGRAMS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "send-send": (Program.send, Program.send),
    "send-read": (Program.send, Program.read),
    "frame-frame": (Program.to_pandas, Program.to_pandas),
}


def count_imports(directory: Path, program: str) -> int:
    """Return how many imports a program makes in threads."""
    return int(_run(directory / "count", program, -1))


def check(directory: Path, program: str, moment: int) -> None:
    """Fork at one moment; fail if the child hangs, or loses or repeats a record."""
    _run(directory, program, moment)
    sends = sum("send" in word for word in program.split("-"))
    with embedlog.open(directory) as log:
        assert len(log.topic("t")) == sends
        assert log.housekeeping.verify() == []


def _run(directory: Path, program: str, moment: int) -> str:
    from support.children import run_python

    return run_python(__file__, directory, program, moment, seconds=2 * PATIENCE)


def main(root: str, name: str, moment: int) -> None:
    """Run one case."""
    from support import forks

    program, (in_parent, in_child) = Program(root), PROGRAMS[name]
    counter = ImportCounter(moment)
    sys.meta_path.insert(0, counter)
    thread = threading.Thread(target=in_parent, args=(program, b"from the parent"))
    thread.start()
    if moment < 0:
        thread.join()
        sys.stdout.write(f"{counter.count}\n")
    else:
        assert counter.reached.wait(PATIENCE)
        forks.call(lambda: in_child(program, b"from the child"))
        thread.join()
    program.log.close()


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
