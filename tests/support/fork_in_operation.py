"""A process forks in the middle of an operation, and both processes go on (P18)."""

from __future__ import annotations

import os
import signal
from typing import Any, NamedTuple

from support import forks, journal_check
from support.faulty_files import OPERATIONS, FaultyFiles
from support.log_programs import ProgramProcess, Step, journal_of
from support.program_faults import PARTITIONS, Scenario, Templates, judge, play

PROGRAM: list[Step] = [
    ("open", "os"),
    ("send", "a", 0, 2),
    ("produce", "a", 1, 2, "fsync"),
    ("many", "b", 0, 4, None),
    ("roll", "a", 0),
    ("flush",),
    ("send", "c", 0, 1),
    ("produce", "a", 1, 1, None),
    ("send", "a", 0, 1, "fsync"),
]
SCENARIO = Scenario(tuple(PROGRAM), "killed")
ENDS = ("leave", "kill", "exec", "close")


class ForkingFiles(FaultyFiles):
    """Forks in the middle of one operation; the child calls `child`, and ends there."""

    fork_at: int = -1
    child: Any = None
    pid = 0

    def _fault(self, kind: str) -> Any:
        if kind in OPERATIONS and self.fork_at >= 0:
            self.fork_at -= 1
            if self.fork_at < 0:
                self.pid = os.fork()
                if self.pid == 0:
                    self.child()
                    os._exit(0)
        return super()._fault(kind)


class Fork(NamedTuple):
    """Fork at the `n`-th operation; and how the child ends."""

    n: int
    end: str


def fork_cases(templates: Templates) -> list[Fork]:
    """Every operation of the program; the ends in turn, so that both halves get all."""
    operations = sum(templates.count(SCENARIO).values())
    return [Fork(n, ENDS[(n + turn) % 4]) for turn in (0, 1) for n in range(operations)]


def check_fork(case: Fork, *, templates: Templates) -> bool:
    """Fork at one operation; whether the program got that far."""
    root = templates.fresh("killed")
    said = root.with_suffix(".said")
    said.unlink(missing_ok=True)

    def work() -> bool:
        processes: list[ProgramProcess] = []

        def order(files: Any) -> None:
            files.fork_at, files.child = case.n, lambda: _be_a_child(processes, case.end, said)

        play(root, SCENARIO, order, files=ForkingFiles, first_send=100, began=processes.append)
        pid = processes[0].log.root.context.files.pid
        if pid == 0:
            return False
        status = os.waitpid(pid, 0)[1]
        expected = signal.SIGKILL if case.end == "kill" else 0
        # What the parent has is its own, whatever became of the child.
        for key in PARTITIONS:
            processes[0].do(("send", *key))
        assert said.read_text() == "done" if said.exists() else case.end == "none", "no word"
        assert status == expected, f"the child: {status}"
        journal_check.check(processes[0].log, journal_of(root), company=True, goes_on=False)
        return True

    forked = forks.call(work)
    judge(root)
    return bool(forked)


def _be_a_child(processes: list[ProgramProcess], end: str, said: Any) -> None:
    """Go on with what was inherited, in the middle of a call of the parent; then end."""
    import traceback

    try:
        process = processes[0]
        process.sends = 150
        for key in PARTITIONS:
            process.do(("send", *key, 1))
            process.do(("send", *key, 1, "fsync"))
            journal_check.sends_of(journal_check.rows(process.log, *key))
        if end == "close" and process.log is not None:
            process.do(("close",))
        said.write_text("done")
    except BaseException:  # noqa: BLE001 - the parent reads the traceback
        said.write_text(traceback.format_exc())
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "exec":
        os.execvp("true", ["true"])
