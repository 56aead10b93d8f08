"""The checks of P19: too few descriptors, too little address space, lost permissions."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import embedlog
from embedlog.errors import EmbedlogError, StorageError
from support import forks, journal_check
from support.log_programs import LIFE, Journal, Step, World, entries
from support.program_faults import Place, judge

NOBODY = 65534
PARTITIONS = (("a", 0), ("a", 1), ("b", 0), ("c", 0))
STEPS: list[Step] = [step for step in LIFE if step[0] not in ("cut", "drop")]


class Limit(NamedTuple):
    """So many descriptors, or bytes of address space, more than the process has now."""

    what: str
    more: int


def check_limit(case: Limit, *, place: Place) -> int:
    """Run out of something; returns how many steps failed, each with a typed error."""
    root = place.fresh("killed")

    def work() -> int:
        world = World(root, Journal(Place.journal(root)), forgiving=True, first_send=100)
        restore = _lower(case)
        exhausted = 0
        for step in STEPS:
            try:
                world.do(step)
            except MemoryError:
                # Python's own name for it; the step counts as not done.
                exhausted += 1
                world.journal.put("failed", "MemoryError", None, "", *step)
        restore()
        for error in world.errors:
            _check_error(error, case)
        failed = exhausted + len(world.errors)
        world.forgiving = False
        for key in PARTITIONS:
            world.do(("send", *key, 1))
            world.do(("send", *key, 1, "fsync"))
        return failed

    result = forks.call(work)
    judge(root, again=False)
    return int(result)


def _lower(case: Limit) -> Callable[[], None]:
    if case.what == "descriptors":
        # The limit is on the numbers, and the lowest that is free is taken.
        used = {int(name) for name in os.listdir("/proc/self/fd")}
        free = (number for number in range(1 << 20) if number not in used)
        kind, now = resource.RLIMIT_NOFILE, next(islice(free, case.more, None)) - case.more
    else:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        kind, now = resource.RLIMIT_AS, pages * resource.getpagesize()
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (now + case.more, hard))
    return lambda: resource.setrlimit(kind, (soft, hard))


def _check_error(error: EmbedlogError, case: Limit) -> None:
    """What ran out is said; a topic that could not be made is missing later."""
    if isinstance(error, StorageError):
        wanted = errno.EMFILE if case.what == "descriptors" else errno.ENOMEM
        assert error.errno == wanted, repr(error)


class Lost(NamedTuple):
    """A path of the root on which all permissions are taken away, or None for a whole root."""

    path: str | None


def lost_cases(place: Place) -> list[Lost]:
    """Everything that a root consists of; and the root as a whole, to be read by another user."""
    root = place.directory / "killed"
    found = sorted(str(path.relative_to(root)) for path in root.rglob("*"))
    return [Lost(None), Lost(""), *(Lost(path) for path in found if "lock.mdb" not in path)]


def check_lost(case: Lost, *, place: Place) -> str:
    """Use a root whose permissions were lost; returns the name of the error somebody got."""
    root = place.fresh("killed")
    os.chmod(place.directory, 0o755)
    if case.path is None:
        return _read_as_another(root)
    _give(root)
    journal = Journal(Place.journal(root))
    target = root / case.path
    mode = target.stat().st_mode & 0o777
    target.chmod(0)

    def work() -> str:
        _drop_rights()
        world = World(root, journal, forgiving=True, first_send=100)
        for step in (("open", "os"), *(("send", *key, 1) for key in PARTITIONS), ("flush",)):
            world.do(step)
        for error in world.errors:
            assert isinstance(error, EmbedlogError)
            if isinstance(error, StorageError):
                assert error.errno in (errno.EACCES, errno.EPERM, None), repr(error)
        return type(world.errors[0]).__name__ if world.errors else "none"

    end = forks.run(work)
    target.chmod(mode)
    assert end.finding() is None, end.finding()
    judge(root, again=False)
    return str(end.value)


def _check_denied(error: StorageError) -> None:
    assert error.errno in (errno.EACCES, errno.EPERM), repr(error)


def _give(root: Path) -> None:
    if os.geteuid() == 0:
        for path in (root, *root.rglob("*")):
            os.chown(path, NOBODY, NOBODY)


def _drop_rights() -> None:
    """Be somebody whom permissions bind."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def _read_as_another(root: Path) -> str:
    """A root that one may only read: everything can be read, nothing written, nothing locked."""
    for path in (root, *root.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}

    def work() -> str:
        _drop_rights()
        try:
            embedlog.open(root)
            raise AssertionError("it was opened for writing")
        except StorageError as error:
            _check_denied(error)
            name = type(error).__name__
        log = embedlog.open(root, mode="r")
        journal_check.check(log, entries(Place.journal(root)), goes_on=False)
        return name

    result = forks.call(work)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    shutil.rmtree(root)
    return str(result)


def describe(results: list[Any]) -> dict[Any, int]:
    """How often each result came."""
    return {one: results.count(one) for one in sorted(set(results))}
