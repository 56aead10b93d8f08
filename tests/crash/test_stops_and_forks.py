"""Processes that are stopped in the middle of something, or fork there."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import fork_at_lines, fork_in_first_use, fork_in_operation, forks, journal_check
from support.children import PausedChild, run_python
from support.forks import tell
from support.log_programs import ProgramProcess, Step, encode, journal_of
from support.patience import patient
from support.program_faults import PARTITIONS, Scenario, Templates, judge, play
from support.tiers import choose, sample

import embedlog
from embedlog.errors import LockTimeoutError
from embedlog.files import Files

TIMEOUT = 0.015
"""Seconds that the others wait for a lock."""
PROGRAM: list[Step] = [
    ("open", "os"),
    ("send", "a", 0, 2),
    ("produce", "a", 1, 1, "fsync"),
    ("many", "b", 0, 3, None),
    ("roll", "a", 1),
    ("grow", "c", 2),
    ("send", "c", 1, 1),
    ("flush",),
    ("close",),
]
SCENARIO = Scenario(tuple(PROGRAM), "killed")


class StopSeries(NamedTuple):
    """The operations at which one process after the other is stopped, at the same root."""

    operations: tuple[int, ...]


def stop_series(templates: Templates, at_once: int = 20) -> list[StopSeries]:
    """Every operation of the program, as one process of many at a root makes them; or a sample."""
    operations = sample(range(sum(templates.count(SCENARIO).values())), 5)
    return [
        StopSeries(tuple(operations[first : first + at_once]))
        for first in range(0, len(operations), at_once)
    ]


def check_stop_series(case: StopSeries, *, templates: Templates) -> tuple[int, int]:
    """Stop processes; returns how many were, and how many calls of others met their locks."""
    root = templates.fresh("killed")
    stopped, refused = forks.call(lambda: _attend(root, case), patience=300)
    judge(root)
    return stopped, refused


def _attend(root: Path, case: StopSeries) -> tuple[int, int]:
    process = ProgramProcess(root, forgiving=True, first_send=50, lock_timeout=TIMEOUT)
    process.do(("open", "os"))
    stopped = refused = 0
    for number, n in enumerate(case.operations):
        first = 100 * (number + 1)

        def work(n: int = n, first: int = first) -> None:
            play(root, SCENARIO, lambda files: files.stop_at(n), first_send=first)

        child = forks.Child(work)
        process.sends = first + 50
        if child.stopped():
            stopped += 1
            refused += _meet(process, child.pid)
            child.go_on()
        child.end().result()
        assert not any(_try(process, step) for step in _steps()), process.errors[-1]
    journal_check.check(process.log, journal_of(root), company=True, goes_on=False)
    return stopped, refused


def _steps() -> list[Step]:
    return [*(("send", *key, 1) for key in PARTITIONS), ("send", "a", 1, 1, "fsync")]


def _meet(process: ProgramProcess, pid: int) -> int:
    """Do what can be done beside a stopped process; returns how much was refused."""
    before = {key: journal_check.rows(process.log, *key) for key in PARTITIONS}
    refused = 0
    for step in _steps():
        started = time.monotonic()
        error = _try(process, step)
        if error is not None:
            refused += 1
            _check_refusal(error, pid, time.monotonic() - started)
            key = step[1], step[2]
            assert journal_check.rows(process.log, *key)[: len(before[key])] == before[key]
    try:
        embedlog.open(process.path, lock_timeout=TIMEOUT).close()
    except LockTimeoutError as error:
        refused += 1
        _check_refusal(error, pid, 0.0)
    for key, rows in before.items():
        after = journal_check.rows(process.log, *key)
        assert after[: len(rows)] == rows
        journal_check.sends_of(after)
    return refused


def _try(process: ProgramProcess, step: Step) -> Any:
    errors_before = len(process.errors)
    process.do(step)
    return process.errors[-1] if len(process.errors) > errors_before else None


def _check_refusal(error: Exception, pid: int, seconds: float) -> None:
    assert isinstance(error, LockTimeoutError), repr(error)
    assert (error.pid, error.state) == (pid, "T"), str(error)
    assert f"Process {pid} (state T)" in str(error)
    # It may wait for the partition, then for a database; and the machine may be busy.
    assert seconds < patient(2 * TIMEOUT + 1.0)


def test_a_stopped_process_is_named_by_those_who_wait_for_it(templates: Templates) -> None:
    """P16: at every operation; others get LockTimeoutError in time, and change nothing."""
    cases = stop_series(templates)
    results = forks.spread(cases, check_stop_series, templates=templates)
    stopped, refused = (sum(column) for column in zip(*results, strict=True))
    tell(f"{stopped} processes stopped at all their operations, {refused} calls refused meanwhile")
    # The last ones are past the end of the program: all its operations were tried.
    assert choose(test=2, all=100) <= stopped < sum(len(case.operations) for case in cases)
    # Not each operation is one under a lock.
    assert refused >= choose(test=1, all=stopped / 2)


def test_a_fork_in_the_middle_of_anything_disturbs_neither_side(templates: Templates) -> None:
    """P18: both go on with the same handle, whatever the child does and however it ends."""
    cases = sample(forks.evenly(fork_in_operation.fork_cases(templates), 220), 4)
    forked = forks.spread(cases, fork_in_operation.check_fork, templates=templates)
    tell(f"{sum(forked)} forks at every operation, {len(cases)} in all")
    assert sum(forked) >= choose(test=3, all=200)


def test_forks_beside_busy_threads(tmp_path: Path) -> None:
    """P18: children of a process with appending threads append too; all receipts are true."""

    def work() -> int:
        log = embedlog.open(tmp_path / "root")
        log.create_topic("t", 2)
        stop, count = threading.Event(), choose(test=8, all=40)

        def append(first: int) -> None:
            while not stop.is_set() and first % 100_000 < 99_000:
                log.partition("t", first % 2).append([encode("t", first % 2, first, 1, 20)])
                first += 2

        threads = [threading.Thread(target=append, args=(n * 100_000 + n,)) for n in range(2)]
        for thread in threads:
            thread.start()

        def child(first: int) -> None:
            for number in range(4):
                log.partition("t", 0).append([encode("t", 0, first + number, 1, 20)])

        children = [forks.Child(lambda n=n: child(1_000_000 + 10 * n)) for n in range(count)]
        for forked in children:
            end = forked.end()
            assert end.finding() is None, end.finding()
        stop.set()
        for thread in threads:
            thread.join()
        bases = journal_check.sends_of(journal_check.rows(log, "t", 0))
        assert sum(send >= 1_000_000 for send in bases) == 4 * count
        assert log.housekeeping.verify() == []
        return count

    forks.call(work)


def test_a_fork_while_a_log_is_opened_keeps_no_lock(tmp_path: Path) -> None:
    """P18: also not of a log that is not open yet; the child runs on, and others go on."""
    children: list[PausedChild] = []

    class ForkingFiles(Files):
        def lock(self, fd: int, timeout: float, shared: bool = False) -> bool:
            waited = super().lock(fd, timeout, shared)
            children.append(PausedChild(lambda pause: pause()))
            return waited

    def work() -> None:
        with ExitStack() as stack:
            with embedlog.open(tmp_path / "root", files=ForkingFiles) as log:
                log.create_topic("t")
                append_one(log, 1)
            assert len(children) >= 3
            for child in children:
                stack.enter_context(child)
            with embedlog.open(tmp_path / "root", lock_timeout=patient(1)) as log:
                append_one(log, 2)

    forks.call(work)


@pytest.mark.parametrize("call", sample(list(fork_at_lines.CALLS), 3))
def test_a_fork_at_any_line_of_another_thread_disturbs_neither_side(
    tmp_path: Path, call: str
) -> None:
    """P18: the child makes the call that the thread is in the middle of, and both end."""
    lines = fork_at_lines.count_lines(tmp_path / "root", call)
    cases = forks.evenly(
        [fork_at_lines.Line(call, n) for n in range(lines)], choose(test=3, all=400)
    )
    reached = sum(fork_at_lines.check(case, root=tmp_path / "root") for case in cases)
    tell(f"{reached} forks at the {lines} lines of {call}")
    assert reached > len(cases) / 2


@pytest.mark.tier("all")  # it starts Python several times
@pytest.mark.parametrize("program", fork_in_first_use.PROGRAMS)
def test_a_fork_in_the_first_use_of_a_library_disturbs_neither_side(
    tmp_path: Path, program: str
) -> None:
    """P18: while another thread imports pyarrow or what it needs, in a fresh process."""
    imports = fork_in_first_use.count_imports(tmp_path, program)
    moments = range(0, imports, -(-imports // 20))
    for moment in moments:
        fork_in_first_use.check(tmp_path / str(moment), program, moment)
    tell(f"{len(moments)} forks in {imports} imports of {program}")


IMPORTS_A_LOGGER = """
import os, sys, threading, time
from embedlog.forks import finished_before_forks
assert "logging" not in sys.modules
import logging

reached = threading.Event()

@finished_before_forks
def step():
    reached.set()
    time.sleep(0.5)  # The fork begins meanwhile.
    logging.getLogger("as many libraries do when they are imported")
    done.append(True)

done = []
threading.Thread(target=step).start()
reached.wait()
before = time.monotonic()
child = os.fork()
assert done and time.monotonic() - before < 9, "the fork gave up waiting"
if not child:
    logging.getLogger("of the child")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_fork_waits_for_an_import_that_gets_a_logger() -> None:
    """P18: `logging` is imported after `embedlog.forks`, and takes its lock before each fork."""
    run_python("-c", IMPORTS_A_LOGGER)


def test_a_program_that_is_started_inherits_no_lock(tmp_path: Path) -> None:
    """P18: what runs on in an exec'd child does not hold the lock of its killed parent."""
    started = tmp_path / "started"

    def work() -> None:
        log = embedlog.open(tmp_path / "root")
        log.create_topic("t")
        log.partition("t", 0).acquire()
        child = subprocess.Popen(["sleep", "30"])
        started.write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)

    assert forks.run(work).killed
    try:
        log = embedlog.open(tmp_path / "root", lock_timeout=patient(1))
        log.partition("t", 0).append([encode("t", 0, 1, 1, 20)])
        log.close()
    finally:
        os.kill(int(started.read_text()), signal.SIGKILL)


def append_one(log: embedlog.Log, send: int) -> None:
    log.partition("t", 0).append([encode("t", 0, send, 1, 20)])
