"""Child processes that hold something, stop, or die, and what they have to say."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def in_child(work: Callable[[], Any]) -> Any:
    """Run `work` in a forked child and return what it returned; its error is raised here."""
    come, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer: tuple[bool, Any]
        try:
            answer = True, work()
        except BaseException as error:  # noqa: BLE001 - raised again in the parent
            answer = False, error
        try:
            with os.fdopen(go, "wb") as out:
                # At once: half an answer would be one.
                out.write(pickle.dumps(answer))
        finally:
            os._exit(0)
    os.close(go)
    with os.fdopen(come, "rb") as into:
        said = into.read()
    os.waitpid(pid, 0)
    assert said, "the child died before it answered"
    good, result = pickle.loads(said)
    if not good:
        raise result
    return result


class Held:
    """A forked child that runs `work` up to where it calls its argument, and stays there."""

    def __init__(self, work: Callable[[Callable[[], None]], Any]) -> None:
        come, self._go = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                work(lambda: (os.write(self._go, b"x"), time.sleep(60), None)[-1])
            finally:
                os._exit(1)
        os.close(self._go)
        assert os.read(come, 1) == b"x", "the child did not get there"
        os.close(come)

    def __enter__(self) -> Held:
        return self

    def stop(self) -> None:
        """Stop it (SIGSTOP), and wait until it is."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def kill(self) -> None:
        """Kill it (SIGKILL), and wait until it is gone."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0

    def __exit__(self, *_: object) -> None:
        self.kill()


def killed_in(work: Callable[[], Any]) -> None:
    """Run `work` in a forked child that is to be killed by what it does (a `kill_at`)."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, "it was not killed"


@contextmanager
def meanwhile(work: Callable[[], Any], count: int = 1) -> Iterator[None]:
    """Let threads do `work` again and again until the block ends; their first error is raised."""
    done = threading.Event()
    errors: list[BaseException] = []

    def again() -> None:
        while not done.is_set() and not errors:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised again below
                errors.append(error)

    running = [threading.Thread(target=again) for _ in range(count)]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in running:
            thread.join()
    if errors:
        raise errors[0]
