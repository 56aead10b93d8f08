"""Cases shared out to child processes, so that a SIGBUS is a finding and not the end."""

from __future__ import annotations

import faulthandler
import gc
import mmap
import os
import pickle
import selectors
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from support.patience import patient
from support.power_cut import remove_scratch_of

WORKERS = 2
PATIENCE = 60.0
"""Seconds that one check may take before its child counts as hung."""
ENOUGH = 5
"""Findings after which a case stops: the first ones tell what is wrong."""


@dataclass
class Outcome:
    """What the checks of a case, or of many, came to."""

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

    def __str__(self) -> str:
        told = [f"-> {self.distinct} states", f"{len(self.findings)} findings"]
        told += [f"{name}: {number}" for name, number in sorted(self.tally.items())]
        return ", ".join(told) + "".join(f"\n{one}" for one in self.findings[:ENOUGH])

    @property
    def distinct(self) -> int:
        return len(self.keys) or self.count


class Desk:
    """Where a child says what it looks at, in memory its parent reads when it is dead."""

    SIZE = 4096

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, self.SIZE)
        self.say("nothing yet")

    def say(self, what: str) -> None:
        data = what.encode()[: self.SIZE - 16]
        self._map[:16] = b"%8d%8d" % (len(data), int(time.monotonic() * 10) % 10**8)
        self._map[16 : 16 + len(data)] = data

    def said(self) -> tuple[str, float]:
        length, when = int(self._map[:8]), int(self._map[8:16]) / 10
        return self._map[16 : 16 + length].decode(errors="replace"), when


Work = Callable[[Any, Outcome, Desk], None]


def share_out(work: Work, cases: Iterable[Any], workers: int = WORKERS) -> Outcome:
    """Run ``work(case, outcome, desk)`` in a child for each case; return all that came of it."""
    waiting, total = list(cases)[::-1], Outcome()
    with selectors.DefaultSelector() as selector:
        running: set[_Child] = set()
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    child = _Child(work, waiting.pop())
                    running.add(child)
                    selector.register(child.come, selectors.EVENT_READ, child)
                for key, _ in selector.select(timeout=1.0):
                    if key.data.read():
                        selector.unregister(key.data.come)
                        running.remove(key.data)
                        total.add(key.data.outcome())
                for child in running:
                    child.end_if_hung()
        finally:
            for child in running:
                child.kill()
    return total


class _Child:
    def __init__(self, work: Work, case: Any) -> None:
        self.case, self._desk, self._parts, self._hung = case, Desk(), [], False
        self.come, go = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self.come)
            _live(work, case, self._desk, go)
        os.close(go)

    def read(self) -> bool:
        """Take what is there; True at the end."""
        part = os.read(self.come, 1 << 20)
        self._parts.append(part)
        return not part

    def end_if_hung(self) -> None:
        _, when = self._desk.said()
        now = time.monotonic() % 10**7
        if now - when > patient(PATIENCE) and not self._hung:
            self._hung = True
            self.kill()

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def outcome(self) -> Outcome:
        os.close(self.come)
        _, status = os.waitpid(self._pid, 0)
        said = b"".join(self._parts)
        if said and not os.WIFSIGNALED(status):
            found: Outcome = pickle.loads(said)
            return found
        remove_scratch_of(self._pid)
        how = "hung" if self._hung else f"died of signal {os.waitstatus_to_exitcode(status)}"
        what, _ = self._desk.said()
        return Outcome(findings=[f"case {self.case!r}: the child {how} at {what}"])


def _live(work: Work, case: Any, desk: Desk, go: int) -> None:
    """The whole life of a child."""
    outcome = Outcome()
    # A child that dies is a finding; its last words would only look like ours.
    faulthandler.disable()
    # What the parent has is not garbage; looking at it would cost a tenth of the time.
    gc.freeze()
    gc.set_threshold(20_000)
    try:
        work(case, outcome, desk)
    except BaseException:  # noqa: BLE001 - the parent is told, whatever it is
        where, _ = desk.said()
        outcome.findings.append(f"case {case!r} at {where}:\n{traceback.format_exc()}")
    try:
        with os.fdopen(go, "wb") as out:
            pickle.dump(outcome, out)
    finally:
        os._exit(0)
