"""One run of a program with one fault, and what must be left of it (P1, P2, P8, P11).

Each check is a plain function of its case, so that the tests that plant bugs run
it too.  Call the checks in a child process or a worker (`forks.spread`).
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import embedlog
from embedlog.errors import DiskFullError, DurabilityError, EmbedlogError, StorageError
from support import forks, journal_check
from support.faulty_files import FALLIBLE, OPERATIONS, FaultInjector, FaultyFiles
from support.log_programs import TEMPLATE, Journal, ProgramProcess, Step, journal_of, short_program
from support.roots import copy_root
from support.tiers import sample
from support.typed_bytes import lists

Order = Callable[[FaultyFiles], None]
PARTITIONS = (("a", 0), ("a", 1), ("b", 0), ("c", 0))
"""The partitions of the template."""

planted: list[Callable[[], None]] = []
"""Bugs for the processes that run programs, and not for those that check; `test_kill_mutants`."""


def plant() -> None:
    """Plant the bugs in this process, a child that is about to run a program."""
    while planted:
        planted.pop()()


class Scenario(NamedTuple):
    """A program, and the root that it opens: a new one, or one that `TEMPLATE` filled."""

    program: tuple[Step, ...]
    before: str = "nothing"
    """How the template was left: ``"killed"``, ``"closed"``, ``"rebooted"``; or ``"nothing"``."""
    first: int | None = None
    """Fault only this many operations: the others are the same as in another scenario."""


class Templates:
    """A directory in memory for the roots of many runs, and templates to copy them from."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        for before in ("killed", "closed", "rebooted"):
            forks.call(lambda before=before: self._make(before))

    def _make(self, before: str) -> None:
        process = ProgramProcess(self.directory / before)
        process.run([*TEMPLATE, *([("close",)] if before == "closed" else [])])

    def fresh(self, before: str, name: str | None = None) -> Path:
        """Return a root for one run, in a directory of this process; the last one is removed."""
        root = self.directory / (name or f"run-{os.getpid()}")
        shutil.rmtree(root, ignore_errors=True)
        journal = journal_of(root)
        if before == "nothing":
            journal.write_bytes(b"")
            return root
        template = self.directory / before
        if before == "rebooted":
            # A plain copy counts as another root, as after a reboot.
            shutil.copytree(template, root)
        else:
            copy_root(template, root)
        shutil.copy(journal_of(template), journal)
        return root

    def count(self, scenario: Scenario) -> dict[str, int]:
        """Return how many operations of each kind a program makes without a fault."""

        def work() -> dict[str, int]:
            process = play(self.fresh(scenario.before), scenario)
            if process.log is None:
                process.do(("open", "os"))
            return dict(process.log.root.context.files.counts)

        return forks.call(work)


def play(
    root: Path,
    scenario: Scenario,
    order: Order = lambda files: None,
    *,
    files: Callable[..., FaultyFiles] = FaultyFiles,
    first_send: int = 100,
    began: Callable[[ProgramProcess], Any] = lambda process: None,
    **options: Any,
) -> ProgramProcess:
    """Run the program in this process; the fault counts from the first opening of the root."""
    plant()
    injector = FaultInjector(order, files)
    process = ProgramProcess(root, files=injector, first_send=first_send, **options)
    began(process)
    process.run(scenario.program)
    return process


def judge(
    root: Path,
    *,
    again: bool = True,
    repair: Collection[tuple[str, int]] = (),
    journal: Path | None = None,
) -> None:
    """Open the root, without any manual step, and compare it with the journal.

    Not in a child of its own: the callers are children, and a fork takes a third of a case.

    Args:
        again: Whether to close the log, and check that the next opening repairs nothing.
        repair: Partitions that a failed flush made read-only, which need a repair.
    """
    path = journal or journal_of(root)
    with embedlog.open(root) as log:
        if repair:
            reported = {(finding.topic, finding.partition) for finding in log.housekeeping.verify()}
            assert reported == set(repair), f"{reported} need a repair, not {repair}"
            for key in repair:
                Journal(path).put("repaired", *key)
            log.housekeeping.repair(dry_run=False)
        journal_check.check(log, path)
    if again:
        with embedlog.open(root) as log:
            assert log.root.startup_report == [], log.root.startup_report
            assert log.housekeeping.verify() == []


# P1


class Kill(NamedTuple):
    """Kill the process before or after its `n`-th operation of these kinds."""

    scenario: int
    n: int
    when: str
    only: tuple[str, ...]


def operations(scenario: Scenario, counted: dict[str, int], kinds: Collection[str]) -> range:
    """Return the numbers of the operations of these kinds that get a fault."""
    total = sum(counted.get(kind, 0) for kind in kinds)
    return range(total if scenario.first is None else min(total, scenario.first))


def kill_cases(scenarios: list[Scenario], counts: list[dict[str, int]]) -> list[Kill]:
    """Return a kill for each state between two operations, of every scenario.

    After one operation is the same as before the next, except for the commits of
    LMDB, which come between a lock and its unlock.
    """
    every = tuple(sorted(OPERATIONS))
    return [
        Kill(scenario, n, when, only)
        for scenario, counted in enumerate(counts)
        for only, when in ((every, "after"), (("unlock",), "before"))
        for n in operations(scenarios[scenario], counted, only)
    ]


def check_kill(case: Kill, *, templates: Templates, scenarios: list[Scenario]) -> bool:
    """Kill a process at one operation; return whether it was: its last operations may differ."""
    scenario = scenarios[case.scenario]
    root = templates.fresh(scenario.before)

    def work() -> None:
        play(root, scenario, lambda files: files.kill_at(case.n, case.when, case.only))

    killed = forks.was_killed(work)
    judge(root, again=case.n % 4 == 0)
    return killed


# P1 and P2, while other processes have the root open


class KillSeries(NamedTuple):
    """Processes that are killed one after the other, at a root that other processes have open."""

    seed: int
    kills: tuple[tuple[int, str | float], ...]
    """For each the operation, "before" or "after"; or the write, and how much of it is done."""


def kill_series(
    count: int, torn: bool, at_once: int = 50, most: int | None = None
) -> list[KillSeries]:
    """Return so many kills, at every operation (or part of a write) of a short program.

    The small tiers kill a sample of `most` processes, if given.
    """
    if torn:
        kills: list[tuple[int, str | float]] = [
            (number % 7, (number // 7 % 16 + 0.5) / 16) for number in range(count)
        ]
    else:
        kills = [(n % 90, ("before", "after")[n // 90 % 2]) for n in range(count)]
    if most is not None:
        kills = sample(kills, most)
    return [
        KillSeries(first, tuple(kills[first : first + at_once]))
        for first in range(0, len(kills), at_once)
    ]


def check_kill_series(case: KillSeries, *, templates: Templates) -> int:
    """Kill processes at a root while one appends and one reads; return how many were killed."""
    root = templates.fresh("killed")
    stop = root.with_suffix(".stop")
    stop.unlink(missing_ok=True)
    reader = forks.Child(lambda: read_until(stop, root))
    witness = forks.Child(lambda: _append_after_kills(root, case))
    end = witness.end(patience=300)
    stop.touch()
    read = reader.end()
    killed, final = end.result("the witness")
    records_read = read.result("the reader")
    judge(root)
    for key, records in records_read.items():
        for offset, value in records.items():
            assert final[key][offset] == value, f"{key}: offset {offset} changed under a reader"
    return int(killed)


def _append_after_kills(root: Path, case: KillSeries) -> tuple[int, dict[Any, dict[int, bytes]]]:
    """Have the root open while others are killed, append after each, and compare in the end."""
    plant()
    process = ProgramProcess(root, first_send=50)
    process.do(("open", "os"))
    killed = 0
    for number, (n, how) in enumerate(case.kills):
        first = 100 * (number + 1)
        scenario = Scenario(tuple(short_program(case.seed + number)))

        def order(files: FaultyFiles, n: int = n, how: Any = how) -> None:
            if isinstance(how, str):
                files.kill_at(n, how)
            else:
                files.kill_at(n, "middle", only=("write",), part=how)

        def run(scenario: Scenario = scenario, order: Any = order, first: int = first) -> None:
            play(root, scenario, order, first_send=first)

        killed += forks.was_killed(run)
        process.sends = first + 50
        for key in PARTITIONS:
            # No error, and no manual step; a killed process may have left half a write there.
            process.do(("send", *key, 1 + number % 2))
    journal_check.check(process.log, journal_of(root), company=True, goes_on=False)
    return killed, {key: dict(journal_check.rows(process.log, *key)) for key in PARTITIONS}


def read_until(stop: Path, root: Path) -> dict[tuple[str, int], dict[int, bytes]]:
    """Read all records as they come until the file exists; check every checksum and offset."""
    log = embedlog.open(root)
    records: dict[tuple[str, int], dict[int, bytes]] = {key: {} for key in PARTITIONS}
    readers = {key: log.partition(*key).reader(0) for key in PARTITIONS}
    while True:
        last, busy = stop.exists(), False
        for key, reader in readers.items():
            while batches := reader.read():
                busy = True
                for batch in batches:
                    batch.verify()
                    assert batch.base_offset == len(records[key]), f"{key}: a hole"
                    rows = zip(batch.offsets().to_pylist(), lists(batch)[2], strict=True)
                    records[key].update(rows)
        if last:
            return records
        if not busy:
            log.root.wake.wait(log.root.wake.value(), 0.002)


# P8: errors


class Fault(NamedTuple):
    """Let the `n`-th operation of these kinds fail, and perhaps all after it."""

    scenario: int
    n: int
    errno: int
    forever: bool
    only: tuple[str, ...] = tuple(sorted(FALLIBLE))


ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT)


def fault_cases(
    scenarios: list[Scenario], counts: list[dict[str, int]], *, full: bool = False
) -> list[Fault]:
    """Every operation of every scenario, once or from then on; in full both, with every error."""
    return [
        Fault(scenario, n, number, forever)
        for scenario, counted in enumerate(counts)
        for n in operations(scenarios[scenario], counted, FALLIBLE)
        for forever in ((False, True) if full else ((n + scenario) % 2 == 1,))
        for number in (ERRORS if full else (ERRORS[(n + scenario) % 3],))
    ]


def check_fault(case: Fault, *, templates: Templates, scenarios: list[Scenario]) -> bool:
    """Let an operation fail; return whether a call raised an error."""
    scenario = scenarios[case.scenario]
    root = templates.fresh(scenario.before)

    def work() -> tuple[bool, set[tuple[str, int]]]:
        def order(files: FaultyFiles) -> None:
            files.fail_at(case.n, case.errno, case.forever, case.only)

        process = play(root, scenario, order, forgiving=True)
        _check_errors(process, case)
        failed = _check_healed(process)
        if case.n % 2 and not failed:
            # After a clean close the next process repairs nothing: what is left must be complete.
            process.do(("close",))
        return bool(process.errors), failed

    raised, failed = forks.call(work)
    judge(root, again=False, repair=failed)
    return raised


def _check_errors(process: ProgramProcess, case: Fault) -> None:
    """The first error is the one of the system; the others follow from it."""
    for number, error in enumerate(process.errors):
        assert isinstance(error, EmbedlogError)
        if number == 0:
            assert isinstance(error, StorageError), repr(error)
            assert error.errno == case.errno, repr(error)
            full = case.errno in (errno.ENOSPC, errno.EDQUOT)
            assert isinstance(error, DurabilityError) or full == isinstance(error, DiskFullError)
        elif not case.forever:
            # One fault is one failed step, unless it was a flush: that one is final.
            assert isinstance(error, DurabilityError), repr(error)


def _check_healed(process: ProgramProcess) -> set[tuple[str, int]]:
    """Check that the same handle goes on after the fault; return the partitions that cannot."""
    process.heal()
    process.forgiving, failed = False, set()
    if process.log is None:
        process.do(("open", "os"))
    for topic in process.log.topics():
        for partition in range(process.log.root.partitions(topic)):
            if process.log.partition(topic, partition).tail().failed:
                failed.add((topic, partition))
                with raises(DurabilityError):
                    process.do(("send", topic, partition))
            else:
                process.do(("send", topic, partition))
                process.do(("send", topic, partition, 2, "fsync"))
    return failed


class FaultSeries(NamedTuple):
    """Many faults in one process, which goes on after each of them."""

    seed: int
    faults: tuple[tuple[int, int, bool], ...]
    """For each the operation, the errno, and whether all later operations fail too."""


def fault_series(count: int, at_once: int = 40, most: int | None = None) -> list[FaultSeries]:
    """Return so many faults, at every operation of a short program; samples as `kill_series`."""
    faults = [(n // 2 % 24, ERRORS[n % 3], bool(n % 2)) for n in range(count)]
    if most is not None:
        faults = sample(faults, most)
    return [FaultSeries(n, tuple(faults[n : n + at_once])) for n in range(0, len(faults), at_once)]


def check_fault_series(case: FaultSeries, *, templates: Templates) -> int:
    """Let operations fail one after the other; return how many faults raised an error."""
    root = templates.fresh("killed")

    def work() -> int:
        injector = FaultInjector()
        process = ProgramProcess(root, files=injector)
        process.do(("open", "os"))
        raised = 0
        for number, (n, code, forever) in enumerate(case.faults):
            process.sends = process.first_send = 100 * (number + 1)
            process.sequences.clear()
            process.unsure.clear()
            process.errors, process.forgiving = [], True
            injector.files.fail_at(n, code, forever)
            # Every fourth program begins with a new opening.
            again: list[Step] = [("close",), ("open", "os")] if number % 4 == 0 else []
            process.run([*again, *short_program(case.seed + number)[1:]])
            _check_errors(process, Fault(0, n, code, forever))
            raised += bool(process.errors)
            _repair(process, _check_healed(process))
        return raised

    raised = forks.call(work)
    judge(root)
    return int(raised)


def _repair(process: ProgramProcess, failed: set[tuple[str, int]]) -> None:
    for key in failed:
        process.journal.put("repaired", *key)
    if failed:
        process.log.housekeeping.repair(dry_run=False)
        assert process.log.housekeeping.verify() == []


@contextmanager
def raises(kind: type[Exception]) -> Iterator[None]:
    """Like `pytest.raises`, for processes that did not import pytest."""
    try:
        yield
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


# P11: short writes


class ShortWrite(NamedTuple):
    """Let the `n`-th write do only so many bytes; then the disk may be full."""

    scenario: int
    n: int
    bytes: int
    full: bool


SHORT = (0, False), (1, False), (100, False), (300, False), (100, True)
"""How much of a write is done, and whether the rest meets a full disk."""


def short_cases(counts: list[dict[str, int]], ways: int = len(SHORT)) -> list[ShortWrite]:
    """Every write of every scenario, shortened in so many ``ways``, which take turns."""
    return [
        ShortWrite(scenario, n, *SHORT[(n * ways + way) % len(SHORT)])
        for scenario, counted in enumerate(counts)
        for n in range(counted["write"])
        for way in range(ways)
    ]


def check_short(case: ShortWrite, *, templates: Templates, scenarios: list[Scenario]) -> bool:
    """Shorten a write: it is completed, or cut back off if it cannot be."""
    scenario = scenarios[case.scenario]
    root = templates.fresh(scenario.before)

    def order(files: FaultyFiles) -> None:
        files.short_at(case.n, case.bytes)
        if case.full:
            files.fail_at(case.n + 1, errno.ENOSPC, only={"write"})

    def work() -> bool:
        process = play(root, scenario, order, forgiving=case.full)
        assert case.full or not process.errors
        for error in process.errors:
            assert isinstance(error, DiskFullError), repr(error)
        _check_healed(process)
        return bool(process.errors)

    failed = forks.call(work)
    judge(root, again=False)
    return bool(failed) == case.full
