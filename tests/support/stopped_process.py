"""The check of P16: a process is stopped at one operation, and others meet its locks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import embedlog
from embedlog.errors import LockTimeoutError
from support import forks, journal_check
from support.log_programs import Journal, Step, World, entries
from support.patience import patient
from support.program_faults import Place, Scene, count, judge, play
from support.tiers import sample

TIMEOUT = 0.015
"""Seconds that the others wait for a lock."""
PARTITIONS = (("a", 0), ("a", 1), ("b", 0), ("c", 0))

STOPS: list[Step] = [
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
SCENE = Scene(tuple(STOPS), "killed")


class Stops(NamedTuple):
    """The operations at which one process after the other is stopped, at the same root."""

    operations: tuple[int, ...]


def stop_cases(place: Place, at_once: int = 20) -> list[Stops]:
    """Every operation of the program, as one process of many at a root makes them; or a sample."""
    operations = sample(range(sum(count(place, SCENE).values())), 24)
    return [
        Stops(tuple(operations[first : first + at_once]))
        for first in range(0, len(operations), at_once)
    ]


def check_stops(case: Stops, *, place: Place) -> tuple[int, int]:
    """Stop processes; returns how many were, and how many calls of others met their locks."""
    root = place.fresh("killed")
    result = forks.call(lambda: _attend(root, case), patience=300)
    judge(root)
    stopped, refused = result
    return stopped, refused


def _attend(root: Path, case: Stops) -> tuple[int, int]:
    world = World(
        root, Journal(Place.journal(root)), forgiving=True, first_send=50, lock_timeout=TIMEOUT
    )
    world.do(("open", "os"))
    stopped = refused = 0
    for number, n in enumerate(case.operations):
        first = 100 * (number + 1)

        def work(n: int = n, first: int = first) -> None:
            play(root, SCENE, lambda files: files.stop_at(n), first_send=first)

        child = forks.Child(work)
        world.sends = first + 50
        if child.stopped():
            stopped += 1
            refused += _meet(world, child.pid)
            child.go_on()
        end = child.end()
        assert end.finding() is None, end.finding()
        assert not any(_try(world, step) for step in _steps()), world.errors[-1]
    journal_check.check(world.log, entries(Place.journal(root)), company=True, goes_on=False)
    return stopped, refused


def _steps() -> list[Step]:
    return [*(("send", *key, 1) for key in PARTITIONS), ("send", "a", 1, 1, "fsync")]


def _meet(world: World, pid: int) -> int:
    """Do what can be done beside a stopped process; returns how much was refused."""
    before = {key: journal_check.rows(world.log, *key) for key in PARTITIONS}
    refused = 0
    for step in _steps():
        started = time.monotonic()
        error = _try(world, step)
        if error is not None:
            refused += 1
            _check_refusal(error, pid, time.monotonic() - started)
            key = step[1], step[2]
            assert journal_check.rows(world.log, *key)[: len(before[key])] == before[key]
    try:
        embedlog.open(world.path, lock_timeout=TIMEOUT).close()
    except LockTimeoutError as error:
        refused += 1
        _check_refusal(error, pid, 0.0)
    for key, rows in before.items():
        after = journal_check.rows(world.log, *key)
        assert after[: len(rows)] == rows
        journal_check.sends_of(after)
    return refused


def _try(world: World, step: Step) -> Any:
    known = len(world.errors)
    world.do(step)
    return world.errors[-1] if len(world.errors) > known else None


def _check_refusal(error: Exception, pid: int, seconds: float) -> None:
    assert isinstance(error, LockTimeoutError), repr(error)
    assert (error.pid, error.state) == (pid, "T"), str(error)
    assert f"process {pid} (state T)" in str(error)
    # It may wait for the partition, then for a database; and the machine may be busy.
    assert seconds < patient(2 * TIMEOUT + 1.0)
