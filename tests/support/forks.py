"""Work in forked children, on all cores; the death of a child is a finding.

A check that runs in a child cannot kill the test, and a SIGBUS is a finding
like any other.  A child returns its result pickled in a file: through a pipe,
a child with a large result would wait for its parent.
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
_LONGEST_POLL_MS = (1 << 31) - 1
WORKER_PATIENCE = 86_400.0
"""The same for a worker of `spread`, whose cases have limits of their own."""


@dataclass(slots=True)
class End:
    """How a child ended: with a value, with the text of an error, or by a signal."""

    value: Any = None
    error: str | None = None
    signal: int | None = None

    @property
    def killed(self) -> bool:
        """Whether it was killed with SIGKILL, as `FaultyFiles.kill_at` does."""
        return self.signal == signal.SIGKILL

    def finding(self) -> str | None:
        """Return what is wrong with this end; None for a child that ended well."""
        if self.signal is not None:
            return f"died by {signal.Signals(self.signal).name}"
        return self.error

    def result(self, who: str = "the child") -> Any:
        """Return the value; fail with the finding if the child did not end well."""
        assert self.finding() is None, f"{who}: {self.finding()}"
        return self.value

    def was_killed(self) -> bool:
        """Return whether it was killed; fail if it ended badly in another way."""
        if not self.killed:
            self.result()
        return self.killed


class Child:
    """A forked child that runs `work`; the constructor starts it, `end` waits for it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._answer = tempfile.TemporaryFile(dir=in_memory())  # noqa: SIM115 - closed by `end`
        self.pid = os.fork()
        if self.pid == 0:
            answer(work, self._answer)

    def end(self, patience: float = PATIENCE) -> End:
        """Wait until it has ended, and return how; kill it if it takes too long."""
        hung = not self.ends_within(patient(patience))
        if hung:
            os.kill(self.pid, signal.SIGKILL)
        end = read_end(os.waitpid(self.pid, 0)[1], self._answer)
        return End(error=f"hung for {patience} s") if hung else end

    def kill(self) -> End:
        """Kill it, and return how it ended; perhaps it had ended before."""
        os.kill(self.pid, signal.SIGKILL)
        return self.end()

    def ends_within(self, seconds: float) -> bool:
        """Wait at most so long, and return whether it has ended; call `end` afterwards."""
        watch = os.pidfd_open(self.pid)
        ended = select.poll()
        ended.register(watch, select.POLLIN)
        try:
            return bool(ended.poll(min(seconds * 1000, _LONGEST_POLL_MS)))
        finally:
            os.close(watch)

    def stop(self) -> None:
        """Stop it (SIGSTOP) without waiting for that."""
        os.kill(self.pid, signal.SIGSTOP)

    def stopped(self) -> bool:
        """Wait until it is stopped (True) or has ended (False); call `end` afterwards."""
        # WNOWAIT leaves an end to be collected by `end`.
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        with open(f"/proc/{self.pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"

    def go_on(self) -> None:
        """Let it continue after a stop."""
        os.kill(self.pid, signal.SIGCONT)


def answer(work: Callable[[], Any], file: Any) -> NoReturn:
    """Run `work` in a child, write what it returned or raised into a file, and end the child."""
    gc.disable()
    result: Any
    try:
        result = work(), None
    except BaseException:  # noqa: BLE001 - reported to the parent
        result = None, traceback.format_exc(limit=-8)
    try:
        file.write(pickle.dumps(result))
        file.flush()
    finally:
        os._exit(0)


def read_end(status: int, file: Any) -> End:
    """Return how a child ended that wrote its `answer` into a file, and close the file."""
    with file:
        if os.WIFSIGNALED(status):
            return End(signal=os.WTERMSIG(status))
        file.seek(0)
        data = file.read()
    return End(*pickle.loads(data)) if data else End(error="ended without a result")


def run(work: Callable[[], Any], patience: float = PATIENCE) -> End:
    """Run `work` in a child and return how it ended."""
    return Child(work).end(patience)


def call(work: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """Run `work` in a child and return its result; fail if the child does not end well."""
    return run(work, patience).result()


def was_killed(work: Callable[[], Any]) -> bool:
    """Run `work` in a child that a fault may kill; return whether it was killed."""
    return run(work).was_killed()


def spread(
    cases: Iterable[Any],
    check: Callable[..., Any],
    workers: int = WORKERS,
    enough: int = ENOUGH,
    **options: Any,
) -> list[Any]:
    """Run ``check(case, **options)`` for many cases in forked workers.

    Returns the values in the order of the cases.  A check that raises, or kills
    its worker, raises an AssertionError here that names the case.  A worker stops
    after `enough` failures; who looks for a planted bug needs one.
    """
    listed = list(cases)
    gc.collect()
    gc.freeze()  # what is not touched by the collector is not copied in the children
    children = [
        Child(lambda part=listed[number::workers]: list(_check_each(check, part, enough, options)))
        for number in range(workers)
    ]
    ends = [child.end(WORKER_PATIENCE) for child in children]
    results_of_workers = [end.result("a worker") for end in ends]
    errors = [error for results in results_of_workers for _, error in results if error is not None]
    text = "".join(errors)
    assert not errors, f"{len(errors)} or more of {len(listed)} cases failed\n{text}"
    values: list[Any] = [None] * len(listed)
    for number, results in enumerate(results_of_workers):
        values[number::workers] = [value for value, _ in results]
    return values


def _check_each(
    check: Callable[..., Any], cases: list[Any], enough: int, options: dict[str, Any]
) -> Iterator[tuple[Any, str | None]]:
    """Check the cases, until enough of them have failed."""
    failed = 0
    for case in cases:
        try:
            yield check(case, **options), None
        except Exception:  # noqa: BLE001 - a finding
            yield None, f"--- {case}\n{traceback.format_exc(limit=-6)}"
            failed += 1
            if failed == enough:
                return


def evenly(cases: Sequence[Any], limit: int | None) -> list[Any]:
    """Return at most `limit` of the cases, evenly chosen; None means all of them."""
    if limit is None or len(cases) <= limit:
        return list(cases)
    return [cases[number * len(cases) // limit] for number in range(limit)]


def until(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Wait until the condition returns something true, and return that."""
    deadline = time.monotonic() + patient(seconds)
    while not (result := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.0005)
    return result


def in_memory() -> str | None:
    """Return a directory in memory, for files that need no disk; None if there is none."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def tell(text: str) -> None:
    """Write a line into the output of a test."""
    sys.stdout.write(f"{text}\n")
