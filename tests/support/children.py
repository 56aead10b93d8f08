"""Child processes that stop or die, and threads that run beside a test."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from support import forks
from support.patience import patient


def in_child(work: Callable[[], Any]) -> Any:
    """Run `work` in a forked child and return what it returned; its error is raised here."""

    def result_or_error() -> tuple[Any, BaseException | None]:
        try:
            return work(), None
        except BaseException as error:  # noqa: BLE001 - raised again in the parent
            return None, error

    result, error = forks.call(result_or_error)
    if error is not None:
        raise error
    return result


class PausedChild:
    """A forked child that runs `work` until it calls its argument, and waits there."""

    def __init__(self, work: Callable[[Callable[[], None]], Any]) -> None:
        paused, pause = os.pipe()
        self._child: forks.Child | None = forks.Child(
            lambda: work(lambda: (os.write(pause, b"x"), time.sleep(60), None)[-1])
        )
        self.pid = self._child.pid
        os.close(pause)
        assert os.read(paused, 1) == b"x", "the child did not get there"
        os.close(paused)

    def __enter__(self) -> PausedChild:
        return self

    def stop(self) -> None:
        """Stop it (SIGSTOP), and wait until it is."""
        assert self._child is not None
        self._child.stop()
        assert self._child.stopped()

    def kill(self) -> None:
        """Kill it (SIGKILL), and wait until it is gone."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def __exit__(self, *_: object) -> None:
        self.kill()


def assert_killed(work: Callable[[], Any]) -> None:
    """Run `work` in a forked child that a fault must kill (a `kill_at`)."""
    assert forks.run(work).killed, "it was not killed"


def run_python(*arguments: object, seconds: float = 60, **options: Any) -> str:
    """Run a Python program, and return its output; fail with its errors."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=patient(seconds),
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def in_threads(*works: Callable[[], Any], done: threading.Event | None = None) -> Iterator[None]:
    """Run functions in a thread each beside the block, and wait for them.

    Raises their first error.  ``done`` is set at the end of the block.
    """
    errors: list[BaseException] = []

    def run(work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        if done is not None:
            done.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


@contextmanager
def meanwhile(work: Callable[[], Any], count: int = 1) -> Iterator[None]:
    """Let threads repeat `work` until the block ends; the first error of one is raised."""
    done = threading.Event()

    def repeat() -> None:
        while not done.is_set():
            work()

    with in_threads(*[repeat] * count, done=done):
        yield
