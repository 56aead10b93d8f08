"""Cases that each run in a child process and count states, so that a SIGBUS is a finding."""

from __future__ import annotations

import faulthandler
import gc
import mmap
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from support import forks
from support.patience import patient
from support.power_cut import remove_scratch_of

PATIENCE = 60.0
"""Seconds that one check may take before its child counts as hung."""
ENOUGH = 5
"""Findings after which a case stops: the first ones tell what is wrong."""


@dataclass
class Outcome:
    """The results of the checks of one case, or of many."""

    count: int = 0
    keys: set[Any] = field(default_factory=set)
    """What makes a state distinct; counted over all cases."""
    findings: list[str] = field(default_factory=list)
    tally: dict[str, int] = field(default_factory=dict)

    def add(self, other: Outcome) -> None:
        self.count += other.count
        self.keys |= other.keys
        self.findings += other.findings
        for name, number in other.tally.items():
            self.note(name, number)

    def note(self, name: str, number: int = 1) -> None:
        self.tally[name] = self.tally.get(name, 0) + number

    @contextmanager
    def finding(self, where: Callable[[], str]) -> Iterator[None]:
        """Turn an exception into a finding that begins with ``where()``."""
        try:
            yield
        except Exception:  # noqa: BLE001 - any exception is a finding
            lines = traceback.format_exc().splitlines()[-12:]
            self.findings.append("\n".join([where(), *lines]))

    @property
    def enough(self) -> bool:
        """Whether a case with so many findings stops."""
        return len(self.findings) >= ENOUGH

    def __str__(self) -> str:
        words = [f"-> {self.distinct} states", f"{len(self.findings)} findings"]
        words += [f"{name}: {number}" for name, number in sorted(self.tally.items())]
        return ", ".join(words) + "".join(f"\n{text}" for text in self.findings[:ENOUGH])

    @property
    def distinct(self) -> int:
        return len(self.keys) or self.count


class Progress:
    """What a child is working on, in memory that its parent can read after its death."""

    SIZE = 4096

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, self.SIZE)
        self.report("nothing yet")

    def report(self, what: str) -> None:
        data = what.encode()[: self.SIZE - 16]
        self._map[:16] = b"%8d%8d" % (len(data), int(time.monotonic() * 10) % 10**8)
        self._map[16 : 16 + len(data)] = data

    def last(self) -> str:
        """Return the last report."""
        return self._map[16 : 16 + int(self._map[:8])].decode(errors="replace")

    def age(self) -> float:
        """Return the seconds since the last report."""
        return time.monotonic() % 10**7 - int(self._map[8:16]) / 10


Work = Callable[[Any, Outcome, Progress], None]


def share_out(work: Work, cases: Iterable[Any]) -> Outcome:
    """Run ``work(case, outcome, progress)`` in a child for each case; return the sum of all."""
    total = Outcome()
    for outcome in forks.spread(cases, partial(_run_case, work)):
        total.add(outcome)
    return total


def _run_case(work: Work, case: Any) -> Outcome:
    progress = Progress()
    child = forks.Child(lambda: _work(work, case, progress))
    hung = False
    while not hung and not child.ends_within(1.0):
        hung = progress.age() > patient(PATIENCE)
    end = child.kill() if hung else child.end()
    if not hung and end.finding() is None:
        outcome: Outcome = end.value
        return outcome
    remove_scratch_of(child.pid)
    how = "hung" if hung else end.finding()
    return Outcome(findings=[f"case {case!r}: the child {how} at {progress.last()}"])


def _work(work: Work, case: Any, progress: Progress) -> Outcome:
    outcome = Outcome()
    # The death of a child is a finding; its stack in the output would look like the parent's.
    faulthandler.disable()
    # The objects of the parent are no garbage; to look at them would take a tenth of the time.
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()
    with outcome.finding(lambda: f"case {case!r} at {progress.last()}:"):
        work(case, outcome, progress)
    return outcome
