"""Many small runs in forked children: on every core, with deaths as findings.

A check that runs in a child cannot kill the test, and a SIGBUS is a finding
like any other.  What a child has to say comes back pickled through a file,
since a pipe would make a child that says much wait for its parent.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from support.patience import patient

WORKERS = 2
ENOUGH = 3
"""Failures after which a worker stops: the first ones tell what is wrong."""
PATIENCE = 60.0
"""Seconds that a child may take on an idle machine before it is killed and counts as hung."""


@dataclass(slots=True)
class End:
    """How a child ended: with a value, an error in words, or by a signal."""

    value: Any = None
    error: str | None = None
    signal: int | None = None

    @property
    def killed(self) -> bool:
        """Whether it was killed with SIGKILL, as cruel files do it."""
        return self.signal == signal.SIGKILL

    def finding(self) -> str | None:
        """What is wrong with this end; None for a child that ended well."""
        if self.signal is not None:
            return f"died by {signal.Signals(self.signal).name}"
        return self.error


class Child:
    """A forked child that runs `work`; started by making it, awaited by `end`."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._answer = tempfile.TemporaryFile(dir=in_memory())  # noqa: SIM115 - closed by `end`
        self.pid = os.fork()
        if self.pid == 0:
            answer(work, self._answer)

    def end(self, patience: float = PATIENCE) -> End:
        """Wait until it is gone, and return how it went."""
        status = _wait(self.pid, patience)
        if status is None:
            self._answer.close()
            return End(error=f"hung for {patience} s")
        return read_end(status, self._answer)

    def kill(self) -> End:
        """Kill it, wait until it is gone, and return how it had ended before, if it had."""
        os.kill(self.pid, signal.SIGKILL)
        return self.end()

    def stopped(self) -> bool:
        """Wait until it is stopped (True) or gone (False); `end` must be called after."""
        # WNOWAIT leaves an end to be collected by `end`.
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        with open(f"/proc/{self.pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"

    def go_on(self) -> None:
        """Let a stopped one continue."""
        os.kill(self.pid, signal.SIGCONT)


def answer(work: Callable[[], Any], file: Any) -> NoReturn:
    """Run `work` in a child, write what it returned or raised into a file, and end the child."""
    gc.disable()
    said: Any
    try:
        said = work(), None
    except BaseException:  # noqa: BLE001 - it is told to the parent
        said = None, traceback.format_exc(limit=-8)
    try:
        file.write(pickle.dumps(said))
        file.flush()
    finally:
        os._exit(0)


def read_end(status: int, file: Any) -> End:
    """Return how a child ended that wrote its `answer` into a file, and close the file."""
    with file:
        if os.WIFSIGNALED(status):
            return End(signal=os.WTERMSIG(status))
        file.seek(0)
        said = file.read()
    return End(*pickle.loads(said)) if said else End(error="said nothing")


def _wait(pid: int, patience: float) -> int | None:
    """Return the status a child ended with; None if it had to be killed."""
    watch = os.pidfd_open(pid)
    ended = select.poll()
    ended.register(watch, select.POLLIN)
    try:
        if ended.poll(patient(patience) * 1000):
            return os.waitpid(pid, 0)[1]
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return None
    finally:
        os.close(watch)


def run(work: Callable[[], Any], patience: float = PATIENCE) -> End:
    """Run `work` in a child and return how it ended."""
    return Child(work).end(patience)


def spread(cases: Iterable[Any], check: Callable[[Any], Any], workers: int = WORKERS) -> list[Any]:
    """Run a check over many cases in forked workers; returns the values, in order of cases.

    A check that raises, or kills its worker, raises an AssertionError here that
    names the case.
    """
    listed = list(cases)
    gc.collect()
    gc.freeze()  # what is not touched by the collector is not copied in the children
    children = [
        Child(lambda part=listed[number::workers]: list(_each(check, part)))
        for number in range(workers)
    ]
    ends = [child.end(patience=3600) for child in children]
    gc.unfreeze()
    for end in ends:
        assert end.finding() is None, end.finding()
    failures = [error for end in ends for _, error in end.value if error is not None]
    told = "".join(failures)
    assert not failures, f"{len(failures)} or more of {len(listed)} cases failed\n{told}"
    results: list[Any] = [None] * len(listed)
    for number, end in enumerate(ends):
        results[number::workers] = [value for value, _ in end.value]
    return results


def _each(check: Callable[[Any], Any], cases: list[Any]) -> Iterator[tuple[Any, str | None]]:
    """Check the cases, until enough of them have failed."""
    failed = 0
    for case in cases:
        try:
            yield check(case), None
        except Exception:  # noqa: BLE001 - it is a finding
            yield None, f"--- {case}\n{traceback.format_exc(limit=-6)}"
            failed += 1
            if failed == ENOUGH:
                return


def evenly(cases: Sequence[Any], limit: int | None) -> list[Any]:
    """At most `limit` of the cases, from the first to the last; all of them without one."""
    if limit is None or len(cases) <= limit:
        return list(cases)
    return [cases[number * len(cases) // limit] for number in range(limit)]


def until(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Return what the condition gives once that is true."""
    deadline = time.monotonic() + patient(seconds)
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.0005)
    return found


def in_memory() -> str | None:
    """A directory in memory, for files that need no disk; None where there is none."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def tell(text: str) -> None:
    """Say in the output of a test how far it got."""
    sys.stdout.write(f"{text}\n")
