"""The check of P18: a process forks in the middle of an operation, and both go on."""

from __future__ import annotations

import os
import signal
from typing import Any, NamedTuple

from support import forks, journal_check
from support.faulty_files import OPERATIONS, FaultyFiles
from support.log_programs import Step, World, entries
from support.program_faults import Place, Scene, count, judge, play

PARTITIONS = (("a", 0), ("a", 1), ("b", 0), ("c", 0))
SPLITS: list[Step] = [
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
SCENE = Scene(tuple(SPLITS), "killed")
ENDS = ("leave", "kill", "exec", "close")


class ForkingFiles(FaultyFiles):
    """Forks in the middle of one operation; the child does what it was told, and ends there."""

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


class Split(NamedTuple):
    """Fork at the `n`-th operation; and how the child ends."""

    n: int
    end: str


def split_cases(place: Place) -> list[Split]:
    """Every operation of the program; the ends in turn, so that both halves get all."""
    operations = sum(count(place, SCENE).values())
    return [Split(n, ENDS[(n + turn) % 4]) for turn in (0, 1) for n in range(operations)]


def check_split(case: Split, *, place: Place) -> bool:
    """Fork at one operation; whether the program got that far."""
    root = place.fresh("killed")
    said = root.with_suffix(".said")
    said.unlink(missing_ok=True)

    def work() -> bool:
        made: list[ForkingFiles] = []
        worlds: list[World] = []

        def files(path: Any, **options: Any) -> ForkingFiles:
            one = ForkingFiles(path, **options)
            made.append(one)
            return one

        def order(one: Any) -> None:
            one.fork_at, one.child = case.n, lambda: _be_a_child(worlds, case.end, said)

        play(root, SCENE, order, files=files, first_send=100, began=worlds.append)
        pid = made[0].pid
        if pid == 0:
            return False
        status = os.waitpid(pid, 0)[1]
        wanted = signal.SIGKILL if case.end == "kill" else 0
        # What the parent has is its own, whatever became of the child.
        for key in PARTITIONS:
            worlds[0].do(("send", *key))
        assert said.read_text() == "done" if said.exists() else case.end == "none", "no word"
        assert status == wanted, f"the child: {status}"
        journal_check.check(
            worlds[0].log, entries(Place.journal(root)), company=True, goes_on=False
        )
        return True

    result = forks.call(work)
    judge(root)
    return bool(result)


def _be_a_child(worlds: list[World], end: str, said: Any) -> None:
    """Go on with what was inherited, in the middle of a call of the parent; then end."""
    import traceback

    try:
        world = worlds[0]
        world.sends = 150
        for key in PARTITIONS:
            world.do(("send", *key, 1))
            world.do(("send", *key, 1, "fsync"))
            journal_check.sends_of(journal_check.rows(world.log, *key))
        if end == "close" and world.log is not None:
            world.do(("close",))
        said.write_text("done")
    except BaseException:  # noqa: BLE001 - it is told to the parent
        said.write_text(traceback.format_exc())
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "exec":
        os.execvp("true", ["true"])
