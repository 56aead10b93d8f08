"""Too few descriptors or threads, too little address space, lost permissions (P19)."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import embedlog
from embedlog.errors import EmbedlogError, StorageError
from support import forks, journal_check
from support.log_programs import LIFE, ProgramProcess, Step, journal_of
from support.program_faults import PARTITIONS, Templates, judge

NOBODY = 65534
STEPS: list[Step] = [step for step in LIFE if step[0] not in ("cut", "drop")]


class Limit(NamedTuple):
    """A limit: so many descriptors, or bytes of address space, more than the process has now."""

    what: str
    more: int


def check_limit(case: Limit, *, templates: Templates) -> int:
    """Run out of a resource; return how many steps failed, each with a typed error."""
    root = templates.fresh("killed")

    def work() -> int:
        process = ProgramProcess(root, forgiving=True, first_send=100)
        restore = _lower(case)
        exhausted = 0
        for step in STEPS:
            try:
                process.do(step)
            except MemoryError:
                # Raised by Python itself; the step counts as not done.
                exhausted += 1
                process.journal.put("failed", "MemoryError", None, "", *step)
        restore()
        for error in process.errors:
            _check_error(error, case)
        failed = exhausted + len(process.errors)
        process.forgiving = False
        for key in PARTITIONS:
            process.do(("send", *key, 1))
            process.do(("send", *key, 1, "fsync"))
        return failed

    failed = forks.call(work)
    judge(root, again=False)
    return int(failed)


def _lower(case: Limit) -> Callable[[], None]:
    if case.what == "descriptors":
        # The limit is on the numbers, and the lowest that is free is taken.
        used = {int(name) for name in os.listdir("/proc/self/fd")}
        free = (number for number in range(1 << 20) if number not in used)
        kind, in_use = resource.RLIMIT_NOFILE, next(islice(free, case.more, None)) - case.more
    else:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        kind, in_use = resource.RLIMIT_AS, pages * resource.getpagesize()
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (in_use + case.more, hard))
    return lambda: resource.setrlimit(kind, (soft, hard))


@contextmanager
def no_thread(name: str, times: int) -> Iterator[list[str]]:
    """Let the first threads of a name not start; yields the names of those that did not."""
    start, refused = threading.Thread.start, list[str]()

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith(name) and len(refused) < times:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = limited  # type: ignore[method-assign]
    try:
        yield refused
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


def _check_error(error: EmbedlogError, case: Limit) -> None:
    """The errno names the resource; later steps may fail for a topic that was not created."""
    if isinstance(error, StorageError):
        expected = errno.EMFILE if case.what == "descriptors" else errno.ENOMEM
        assert error.errno == expected, repr(error)


class LostPermissions(NamedTuple):
    """A path of the root on which all permissions are taken away, or None for a whole root."""

    path: str | None


def permission_cases(templates: Templates) -> list[LostPermissions]:
    """Return every file and directory of a root; and the whole root, read by another user."""
    root = templates.directory / "killed"
    paths = sorted(str(path.relative_to(root)) for path in root.rglob("*"))
    return [
        LostPermissions(None),
        LostPermissions(""),
        *(LostPermissions(path) for path in paths if "lock.mdb" not in path),
    ]


def check_lost_permissions(case: LostPermissions, *, templates: Templates) -> str:
    """Use a root whose permissions were lost; return the name of the first error."""
    root = templates.fresh("killed")
    os.chmod(templates.directory, 0o755)
    if case.path is None:
        return _read_as_another(root)
    _give(root)
    target = root / case.path
    mode = target.stat().st_mode & 0o777
    target.chmod(0)

    def work() -> str:
        process = ProgramProcess(root, forgiving=True, first_send=100)
        _drop_rights()
        for step in (("open", "os"), *(("send", *key, 1) for key in PARTITIONS), ("flush",)):
            process.do(step)
        for error in process.errors:
            assert isinstance(error, EmbedlogError)
            if isinstance(error, StorageError):
                assert error.errno in (errno.EACCES, errno.EPERM, None), repr(error)
        return type(process.errors[0]).__name__ if process.errors else "none"

    end = forks.run(work)
    target.chmod(mode)
    name = end.result()
    judge(root, again=False)
    return str(name)


def _check_denied(error: StorageError) -> None:
    assert error.errno in (errno.EACCES, errno.EPERM), repr(error)


def _give(root: Path) -> None:
    """Let the user `NOBODY` own the root."""
    if os.geteuid() == 0:
        for path in (root, *root.rglob("*")):
            os.chown(path, NOBODY, NOBODY)


def _drop_rights() -> None:
    """Become a user for whom permissions matter."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def _read_as_another(root: Path) -> str:
    """Check that a root that may only be read can be read, and is neither written nor locked."""
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
        journal_check.check(log, journal_of(root), goes_on=False)
        return name

    name = forks.call(work)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    shutil.rmtree(root)
    return str(name)
