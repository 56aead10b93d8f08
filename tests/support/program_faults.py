"""The checks of P1, P2, P8 and P11: one run of a program with one fault, and what is left of it.

Each is a plain function of its case, so that the tests that plant bugs run
them too.  They are to be called in a child process or a worker (`forks.spread`).
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import embedlog
from embedlog.errors import DiskFullError, DurabilityError, EmbedlogError, StorageError
from embedlog.files import Files
from embedlog.root import startup
from support import forks, journal_check
from support.faulty_files import FALLIBLE, OPERATIONS, FaultyFiles
from support.log_programs import TEMPLATE, Journal, Step, World, entries, short_program
from support.tiers import sample

Order = Callable[[FaultyFiles], None]

planted: list[Callable[[], None]] = []
"""Bugs for the processes that work, and not for those that judge; see `test_kill_mutants`."""


def plant() -> None:
    """Have the bugs in this process, which is a child that is about to work."""
    while planted:
        planted.pop()()


class Scene(NamedTuple):
    """What a program finds: nothing, or what `TEMPLATE` left, and in which way it was left."""

    program: tuple[Step, ...]
    before: str = "nothing"
    """``"nothing"``, ``"killed"``, ``"closed"`` or ``"rebooted"``."""
    first: int | None = None
    """Fault only its first so many operations: the others are the same as in another scene."""


class Place:
    """A directory in memory for the roots of many runs, with the templates they begin from."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        for before in ("killed", "closed", "rebooted"):
            self._make(before)

    def _make(self, before: str) -> None:
        target = self.directory / before

        def work() -> None:
            world = World(target, Journal(self.directory / f"{before}.journal"))
            world.run([*TEMPLATE, *([("close",)] if before == "closed" else [])])

        forks.call(work)

    def fresh(self, before: str, name: str | None = None) -> Path:
        """A root for one run, in a directory of this process's own; the one before is removed."""
        root = self.directory / (name or f"run-{os.getpid()}")
        shutil.rmtree(root, ignore_errors=True)
        journal = self.journal(root)
        if before == "nothing":
            journal.write_bytes(b"")
            return root
        shutil.copytree(self.directory / before, root)
        shutil.copy(self.directory / f"{before}.journal", journal)
        if before != "rebooted":
            # A copy would count as another root, as after a reboot.
            files = Files(root)
            (root / startup.BOOT_FILE).write_bytes(startup._boot(files))
            files.close_all()
        return root

    @staticmethod
    def journal(root: Path) -> Path:
        return root.with_suffix(".journal")


def play(
    root: Path,
    scene: Scene,
    order: Order | None = None,
    *,
    files: Callable[..., FaultyFiles] | None = None,
    forgiving: bool = False,
    first_send: int = 100,
    began: Callable[[World], Any] = lambda world: None,
    **options: Any,
) -> World:
    """Do the program in this process; the fault counts from the first opening of the root."""
    made: list[FaultyFiles] = []
    plant()
    world = World(
        root,
        Journal(Place.journal(root)),
        one_seam(made, files or FaultyFiles, order),
        forgiving=forgiving,
        first_send=first_send,
        **options,
    )
    world.heal = lambda: [one.heal() for one in made]
    began(world)
    world.run(list(scene.program))
    return world


def one_seam(
    made: list[FaultyFiles], files: Callable[..., FaultyFiles], order: Order | None
) -> Callable[..., FaultyFiles]:
    """Seams for all openings of a process: the second goes on counting where the first ended."""

    def seam(path: Any, **how: Any) -> FaultyFiles:
        one = files(path, **how)
        if made:
            one._faults, one.counts = made[-1]._faults, made[-1].counts
            one.__dict__.update({k: v for k, v in made[-1].__dict__.items() if k == "_torn"})
        elif order is not None:
            order(one)
        made.append(one)
        return one

    return seam


def count(place: Place, scene: Scene) -> dict[str, int]:
    """How many operations of each kind the program makes when nothing happens to it."""

    def work() -> dict[str, int]:
        root = place.fresh(scene.before)
        world = play(root, scene)
        last = world.log if world.log is not None else None
        return dict(_counts(world, last))

    result = forks.call(work)
    counted: dict[str, int] = result
    return counted


def _counts(world: World, log: Any) -> dict[str, int]:
    if log is None:
        world.do(("open", "os"))
    counts: dict[str, int] = world.log.root.context.files.counts
    return counts


def judge(
    root: Path,
    *,
    again: bool = True,
    repair: Collection[tuple[str, int]] = (),
    journal: Path | None = None,
) -> None:
    """Open the root, without any manual step, and compare it with the journal.

    Here and not in a child of its own: whoever calls it is one, and a fork is a third of a case.

    Args:
        again: Close it, and see that the next opening finds nothing to mend.
        repair: Partitions that a failed flush made read-only: they must say so, and be mended.
    """
    path = journal or Place.journal(root)
    with embedlog.open(root) as log:
        if repair:
            told = {(one.topic, one.partition) for one in log.verify()}
            assert told == set(repair), f"{told} need a repair, not {repair}"
            told_of = Journal(path)
            for key in repair:
                told_of.put("repaired", *key)
            told_of.close()
            log.repair(dry_run=False)
        journal_check.check(log, entries(path))
    if again:
        with embedlog.open(root) as log:
            assert log.root.startup_report == [], log.root.startup_report
            assert log.verify() == []


# P1


class Kill(NamedTuple):
    """Kill the process before or after its `n`-th operation of these kinds."""

    scene: int
    n: int
    when: str
    only: tuple[str, ...]


def operations(scene: Scene, counted: dict[str, int], kinds: Collection[str]) -> range:
    """The numbers of the operations of these kinds that are to be tried."""
    total = sum(counted.get(kind, 0) for kind in kinds)
    return range(total if scene.first is None else min(total, scene.first))


def kill_cases(scenes: list[Scene], counts: list[dict[str, int]]) -> list[Kill]:
    """Every state that a kill between two operations can leave, of every scene.

    After one operation is before the next, but for what LMDB does between them:
    its commits lie between a lock and its unlock.
    """
    every = tuple(sorted(OPERATIONS))
    return [
        Kill(scene, n, when, only)
        for scene, counted in enumerate(counts)
        for only, when in ((every, "after"), (("unlock",), "before"))
        for n in operations(scenes[scene], counted, only)
    ]


def check_kill(case: Kill, *, place: Place, scenes: list[Scene]) -> bool:
    """Kill a process at one operation; whether it was, for its last operations may differ."""
    scene = scenes[case.scene]
    root = place.fresh(scene.before)

    def work() -> None:
        play(root, scene, lambda files: files.kill_at(case.n, case.when, case.only))

    killed = forks.was_killed(work)
    judge(root, again=case.n % 4 == 0)
    return killed


# P1 and P2, with others that have the root open and see nothing of it


class TornFiles(FaultyFiles):
    """Dies within one write, after a part of its bytes."""

    def tear_at(self, n: int, part: float) -> None:
        """Let the `n`-th write do only this part, from 0 to 1, and die there."""
        self._torn = [n, part]

    def _pwritev(self, fd: int, buffers: Any, position: int) -> int:  # type: ignore[override]
        torn = getattr(self, "_torn", None)
        if torn is not None:
            torn[0] -= 1
            if torn[0] < 0:
                whole = b"".join(map(bytes, buffers))
                os.pwrite(fd, whole[: min(int(len(whole) * torn[1]), len(whole) - 1)], position)
                os.kill(os.getpid(), signal.SIGKILL)
        return super()._pwritev(fd, buffers, position)


class Deaths(NamedTuple):
    """Processes that come and die one after the other at a root that others have open."""

    seed: int
    deaths: tuple[tuple[int, str | float], ...]
    """For each: at which operation, "before" or "after"; or in which write, after which part."""


def death_cases(count: int, torn: bool, at_once: int = 50, most: int | None = None) -> list[Deaths]:
    """So many deaths, at every operation (or part of a write) that a short program has.

    In the small tiers a sample of `most` of them, where that is given.
    """
    if torn:
        all_of_them: list[tuple[int, str | float]] = [
            (number % 7, (number // 7 % 16 + 0.5) / 16) for number in range(count)
        ]
    else:
        all_of_them = [(n % 90, ("before", "after")[n // 90 % 2]) for n in range(count)]
    if most is not None:
        all_of_them = sample(all_of_them, most)
    return [
        Deaths(first, tuple(all_of_them[first : first + at_once]))
        for first in range(0, len(all_of_them), at_once)
    ]


def check_deaths(case: Deaths, *, place: Place) -> int:
    """Let processes die at a root while one appends and one reads; returns how many died."""
    root = place.fresh("killed")
    stop = root.with_suffix(".stop")
    stop.unlink(missing_ok=True)
    reader = forks.Child(lambda: watch(root, stop))
    witness = forks.Child(lambda: _attend(root, case))
    end = witness.end(patience=300)
    stop.touch()
    seen = reader.end()
    assert end.finding() is None, end.finding()
    assert seen.finding() is None, f"the reader: {seen.finding()}"
    judge(root)
    died, final = end.value
    for key, found in seen.value.items():
        for offset, value in found.items():
            assert final[key][offset] == value, f"{key}: offset {offset} changed under a reader"
    return int(died)


def _attend(root: Path, case: Deaths) -> tuple[int, dict[Any, dict[int, bytes]]]:
    """Have the root open while others die, append after each of them, and compare in the end."""
    plant()
    journal = Journal(Place.journal(root))
    world = World(root, journal, first_send=50)
    world.do(("open", "os"))
    died = 0
    for number, (n, how) in enumerate(case.deaths):
        first = 100 * (number + 1)
        program = Scene(tuple(short_program(case.seed + number)))

        def work(program: Scene = program, first: int = first, n: int = n, how: Any = how) -> None:
            play(root, program, _dying(n, how), files=TornFiles, first_send=first)

        killed = forks.was_killed(work)
        died += killed
        world.sends = first + 50
        for topic, partition in (("a", 0), ("a", 1), ("b", 0), ("c", 0)):
            # No error, and no manual step; the dead may have left half a write there.
            world.do(("send", topic, partition, 1 + number % 2))
    journal_check.check(world.log, entries(Place.journal(root)), company=True, goes_on=False)
    found = [("a", 0), ("a", 1), ("b", 0), ("c", 0)]
    final = {key: dict(journal_check.rows(world.log, *key)) for key in found}
    return died, final


def _dying(n: int, how: str | float) -> Callable[[Any], None]:
    if isinstance(how, str):
        return lambda files: files.kill_at(n, how)
    return lambda files: files.tear_at(n, how)


def watch(root: Path, stop: Path) -> dict[tuple[str, int], dict[int, bytes]]:
    """Read everything, as it comes, until told to stop; every checksum and offset is checked."""
    log = embedlog.open(root)
    seen: dict[tuple[str, int], dict[int, bytes]] = {
        key: {} for key in (("a", 0), ("a", 1), ("b", 0), ("c", 0))
    }
    readers = {key: log.partition(*key).reader(0) for key in seen}
    while True:
        last, busy = stop.exists(), False
        for key, reader in readers.items():
            while found := reader.read():
                busy = True
                for one in found:
                    one.verify()
                    assert one.base_offset == len(seen[key]), f"{key}: a hole"
                    rows = zip(one.offsets().to_pylist(), one.lists()[2], strict=True)
                    seen[key].update(rows)
        if last:
            return seen
        if not busy:
            log.root.wake.wait(log.root.wake.value(), 0.002)


# P8: errors


class Fault(NamedTuple):
    """Let the `n`-th operation of these kinds fail, and perhaps all after it."""

    scene: int
    n: int
    errno: int
    forever: bool
    only: tuple[str, ...] = tuple(sorted(FALLIBLE))


ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT)


def fault_cases(
    scenes: list[Scene], counts: list[dict[str, int]], *, full: bool = False
) -> list[Fault]:
    """Every operation of every scene, once or from then on; in full both, with every error."""
    return [
        Fault(scene, n, number, forever)
        for scene, counted in enumerate(counts)
        for n in operations(scenes[scene], counted, FALLIBLE)
        for forever in ((False, True) if full else ((n + scene) % 2 == 1,))
        for number in (ERRORS if full else (ERRORS[(n + scene) % 3],))
    ]


def check_fault(case: Fault, *, place: Place, scenes: list[Scene]) -> bool:
    """Let an operation fail; whether somebody was told of it."""
    scene = scenes[case.scene]
    root = place.fresh(scene.before)

    def work() -> tuple[bool, set[tuple[str, int]]]:
        def order(files: FaultyFiles) -> None:
            files.fail_at(case.n, case.errno, case.forever, case.only)

        world = play(root, scene, order, forgiving=True)
        _check_errors(world, case)
        failed = _check_healed(world)
        if case.n % 2 and not failed:
            # After a clean close the next process looks at nothing: what is left must be known.
            world.do(("close",))
        return bool(world.errors), failed

    result = forks.call(work)
    told, failed = result
    judge(root, again=False, repair=failed)
    return told


def _check_errors(world: World, case: Fault) -> None:
    """The first error is the one of the system; the others follow from it."""
    for number, error in enumerate(world.errors):
        assert isinstance(error, EmbedlogError)
        if number == 0:
            assert isinstance(error, StorageError), repr(error)
            assert error.errno == case.errno, repr(error)
            full = case.errno in (errno.ENOSPC, errno.EDQUOT)
            assert isinstance(error, DurabilityError) or full == isinstance(error, DiskFullError)
        elif not case.forever:
            # One fault is one failed step, unless it was a flush: that one is final.
            assert isinstance(error, DurabilityError), repr(error)


def _check_healed(world: World) -> set[tuple[str, int]]:
    """Once the fault has passed the same handle goes on; returns the partitions that may not."""
    world.heal()
    world.forgiving, failed = False, set()
    if world.log is None:
        world.do(("open", "os"))
    for topic in world.log.topics():
        for partition in range(world.log.root.partitions(topic)):
            if world.log.partition(topic, partition).tail().failed:
                failed.add((topic, partition))
                with raises(DurabilityError):
                    world.do(("send", topic, partition))
            else:
                world.do(("send", topic, partition))
                world.do(("send", topic, partition, 2, "fsync"))
    return failed


class Faults(NamedTuple):
    """Many faults in one process, which goes on after each of them."""

    seed: int
    faults: tuple[tuple[int, int, bool], ...]
    """For each the operation, the errno, and whether all after it fail too."""


def row_cases(count: int, at_once: int = 40, most: int | None = None) -> list[Faults]:
    """So many faults, at every operation that a short program has; a sample as in `death_cases`."""
    every = [(n // 2 % 24, ERRORS[n % 3], bool(n % 2)) for n in range(count)]
    if most is not None:
        every = sample(every, most)
    return [Faults(n, tuple(every[n : n + at_once])) for n in range(0, len(every), at_once)]


def check_faults(case: Faults, *, place: Place) -> int:
    """Let operations fail one after the other; returns how often somebody was told."""
    root = place.fresh("killed")

    def work() -> int:
        made: list[FaultyFiles] = []
        world = World(root, Journal(Place.journal(root)), one_seam(made, FaultyFiles, None))
        world.heal = lambda: [one.heal() for one in made]
        world.do(("open", "os"))
        told = 0
        for number, (n, code, forever) in enumerate(case.faults):
            world.sends = world.first_send = 100 * (number + 1)
            world.sequences.clear()
            world.unsure.clear()
            world.errors, world.forgiving = [], True
            made[-1].fail_at(n, code, forever)
            # Leaving and coming back is a part of every fourth.
            again: list[Step] = [("close",), ("open", "os")] if number % 4 == 0 else []
            world.run([*again, *short_program(case.seed + number)[1:]])
            _check_errors(world, Fault(0, n, code, forever))
            told += bool(world.errors)
            _mend(world, _check_healed(world))
        return told

    result = forks.call(work)
    judge(root)
    return int(result)


def _mend(world: World, failed: set[tuple[str, int]]) -> None:
    for key in failed:
        world.journal.put("repaired", *key)
    if failed:
        world.log.repair(dry_run=False)
        assert world.log.verify() == []


@contextmanager
def raises(kind: type[Exception]) -> Iterator[None]:
    """As `pytest.raises`, in a process that has no pytest."""
    try:
        yield
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


# P11: short writes


class Short(NamedTuple):
    """Let the `n`-th write do only so many bytes; then perhaps the disk is full."""

    scene: int
    n: int
    bytes: int
    full: bool


SHORT = (0, False), (1, False), (100, False), (300, False), (100, True)
"""How much of a write is done, and whether the rest meets a full disk."""


def short_cases(counts: list[dict[str, int]], each: int = len(SHORT)) -> list[Short]:
    """Every write of every scene, shortened in ``each`` ways, which take turns."""
    return [
        Short(scene, n, *SHORT[(n * each + way) % len(SHORT)])
        for scene, counted in enumerate(counts)
        for n in range(counted["write"])
        for way in range(each)
    ]


def check_short(case: Short, *, place: Place, scenes: list[Scene]) -> bool:
    """Shorten a write: it is completed, or cut back off if it cannot be."""
    scene = scenes[case.scene]
    root = place.fresh(scene.before)

    def order(files: FaultyFiles) -> None:
        files.short_at(case.n, case.bytes)
        if case.full:
            files.fail_at(case.n + 1, errno.ENOSPC, only={"write"})

    def work() -> bool:
        world = play(root, scene, order, forgiving=case.full)
        assert case.full or not world.errors
        for error in world.errors:
            assert isinstance(error, DiskFullError), repr(error)
        _check_healed(world)
        return bool(world.errors)

    result = forks.call(work)
    judge(root, again=False)
    return bool(result) == case.full


def partial(check: Callable[..., Any], **options: Any) -> Callable[[Any], Any]:
    """The check as a function of the case alone."""
    return functools.partial(check, **options)
