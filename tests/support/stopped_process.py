"""A process is stopped at one operation, and others wait for its locks (P16)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import embedlog
from embedlog.errors import LockTimeoutError
from support import forks, journal_check
from support.log_programs import ProgramProcess, Step, journal_of
from support.patience import patient
from support.program_faults import PARTITIONS, Scenario, Templates, judge, play
from support.tiers import sample

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
    operations = sample(range(sum(templates.count(SCENARIO).values())), 12)
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
