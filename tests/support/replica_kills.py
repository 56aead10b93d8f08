"""A process of a log over several directories that is killed between any two of its operations.

The operations are those of its files, and the commits of its databases, one after the other.
After each kill another process goes on, or opens the log anew, and all is compared:
`ReplicasModel` knows what must be there.
"""

from __future__ import annotations

from typing import NamedTuple

from support.replicas_model import KILLED, ReplicasModel


class Kill(NamedTuple):
    """Where to kill, and whether another process has the log open meanwhile."""

    work: str
    at: int | None
    alive: bool


WORKS = (
    *("append", *KILLED),
    *("go offline", "go offline with an append", "come back", "come back empty"),
    *("lead again", "open", "open after a kill", "open without a directory"),
)


def check(kill: Kill) -> int | None:
    """Do some work, with a kill, and compare everything; return how many operations it took."""
    model = ReplicasModel()
    try:
        model.begin(3, [(2, 2, 1, False), (1, 3, 2, True)])
        for which in (0, 2, 2, 0, 2):
            model.append(which, 0, 2, 0, "all", None)
            model.produce(which, 0, 2, "all", False)
        model.roll(2, 0)
        model.append(0, 0, 1, 0, 1, None)
        model.append(2, 0, 3, 0, "all", None)
        model.commit(0, 0, 3)
        model.check()
        operations = model.kill_in(*_prepare(model, kill.work), kill.at)
        if not kill.alive and model.roots:
            model.end_all(crash=True)
        if not model.roots:
            model.open_again()
        model.check()
        for which in range(len(model.parts)):
            model.append(which, 0, 2, 0, "all", None)
        model.check()
    except BaseException:
        model.abandon()
        raise
    model.teardown()
    return operations


def _prepare(model: ReplicasModel, work: str) -> tuple[str, object]:
    """Bring the model to where the work begins; return what the child does, and where."""
    part = model.part(0)
    if work == "compact":
        part = model.part(2)
    if work.startswith("go offline"):
        assignment = model.assignment(part)
        assert assignment is not None
        model.unmount((assignment.leader or 0) - 1, False)
        return ("append" if work.endswith("append") else "keep_house"), part
    if work.startswith(("come back", "lead again")):
        assignment = model.assignment(part)
        assert assignment is not None
        model.unmount((assignment.leader or 0) - 1, False)
        model.keep_house(0, False)
        model.append(0, 0, 2, 0, "all", None)
        model.bring_back((assignment.leader or 0) - 1, work.endswith("empty"))
        if work == "lead again":
            model.keep_house(0, False)
            model.append(0, 0, 2, 0, 1, None)
            return "elect_preferred", part
        return "keep_house", part
    if work.startswith("open"):
        model.end_all(crash=work == "open after a kill")
        if work == "open without a directory":
            model.unmount(0, False)
        return "open", part
    return work, part
