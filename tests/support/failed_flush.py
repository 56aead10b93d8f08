"""The check of P9: one flush fails, and what all processes then see, until `repair`."""

from __future__ import annotations

import errno
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from embedlog.errors import DurabilityError
from support import forks, journal_check
from support.faulty_files import FaultyFiles
from support.log_programs import Journal, Step, World, entries
from support.program_faults import Place, Scene, judge, play, raises

SYNCS = ("sync", "sync_directory")
ERRORS = (errno.EIO, errno.ENOSPC)
PARTITIONS = (("a", 0), ("a", 1), ("b", 0), ("c", 0))

FLUSHES: list[Step] = [
    ("open", "fsync"),
    ("send", "a", 0, 2),
    ("send", "c", 0, 1, "os"),
    ("send", "a", 1, 2, "os", 120),
    ("send", "a", 1, 1, "os", 120),
    ("produce", "a", 1, 2, None),
    ("many", "a", 0, 4, None),
    ("send", "c", 0, 1),
    ("flush",),
    ("roll", "a", 1),
    ("send", "a", 1, 1),
    ("alter", "c", 1300),
    ("many", "c", 0, 4, "fsync"),
    ("many", "b", 0, 3, "os"),
    ("send", "b", 0, 1),
    ("send", "a", 0, 1, "os"),
    ("flush",),
]
SCENE = Scene(tuple(FLUSHES), "killed")


class FailedFlush(NamedTuple):
    """Let the `n`-th flush fail; the disk may really have lost what was to be flushed."""

    n: int
    forever: bool
    lost: bool


def flush_cases(counted: dict[str, int]) -> list[FailedFlush]:
    """Every flush of the program."""
    return [
        FailedFlush(n, forever, lost)
        for n in range(sum(counted.get(kind, 0) for kind in SYNCS))
        for forever in (False, True)
        for lost in (False, True)
    ]


def check_failed_flush(case: FailedFlush, *, place: Place) -> int:
    """Let a flush fail; returns how many partitions became read-only by it."""
    root = place.fresh("killed")
    told = root.with_suffix(".told")
    told.unlink(missing_ok=True)
    mended = root.with_suffix(".mended")
    mended.unlink(missing_ok=True)
    witness = forks.Child(lambda: _attend(root, told, mended))
    end = forks.run(lambda: _fail(root, case, told, mended))
    seen = witness.kill() if end.finding() else witness.end()
    assert end.finding() is None, end.finding()
    assert seen.finding() is None, f"the witness: {seen.finding()}"
    judge(root, again=False)
    return len(end.value)


def _fail(root: Path, case: FailedFlush, told: Path, mended: Path) -> list[tuple[str, int]]:
    def order(files: FaultyFiles) -> None:
        files.fail_at(case.n, ERRORS[case.n % 2], case.forever, SYNCS)

    files = partial(FaultyFiles, record=case.lost)
    world = play(root, SCENE, order, files=files, forgiving=True)
    log = world.log
    failed = [key for key in PARTITIONS if log.partition(*key).tail().failed]
    assert [isinstance(error, DurabilityError) for error in world.errors] == [True] * len(
        world.errors
    ), world.errors
    assert world.errors, "a flush failed, and nobody was told"
    assert world.errors[0].errno == ERRORS[case.n % 2]
    assert failed, f"nobody was told of {world.errors}"
    world.heal()
    _check_refused(world, failed)
    epochs = {key: log.partition(*key).tail().leader_epoch for key in failed}
    told.with_suffix(".new").write_text(json.dumps(failed))
    told.with_suffix(".new").rename(told)
    forks.until(lambda: not told.exists())
    _repair(world, failed, epochs)
    mended.touch()
    return failed


def _check_refused(world: World, failed: list[tuple[str, int]]) -> None:
    """Neither durability, nor a flush, nor a roll is tried again on a failed partition."""
    files = world.log.root.context.files
    for key in failed:
        before = files.count(SYNCS), files.count({"write"})
        end = world.log.partition(*key).end_offset()
        assert len(journal_check.rows(world.log, *key)) == end
        for step in (("send", *key, 1, "os"), ("send", *key, 1, "fsync"), ("roll", *key)):
            world.forgiving = False
            with raises(DurabilityError):
                world.do(step)
        with raises(DurabilityError):
            world.log.partition(*key).flush()
        after = files.count(SYNCS), files.count({"write"})
        assert after == before, f"{key}: it was tried again: {after} after {before}, {failed}"
        assert world.log.partition(*key).end_offset() == end
    for key in PARTITIONS:
        if key not in failed:
            world.do(("send", *key, 1, "fsync"))


def _repair(world: World, failed: list[tuple[str, int]], epochs: dict[Any, int]) -> None:
    log = world.log
    dry = log.repair()
    assert len(dry) >= len(failed)
    assert all(log.partition(*key).tail().failed for key in failed), "a dry run changes nothing"
    before = log.root.context.files.counts["drop_cache"]
    for key in failed:
        world.journal.put("repaired", *key)
    log.repair(dry_run=False)
    assert log.root.context.files.counts["drop_cache"] >= before + len(failed)
    assert log.verify() == [], log.verify()
    for key in failed:
        now = log.partition(*key).tail()
        assert not now.failed
        assert now.leader_epoch > epochs[key]
    journal_check.check(log, entries(Place.journal(world_root(world))), goes_on=False)


def world_root(world: World) -> Path:
    return Path(world.path)


def _attend(root: Path, told: Path, mended: Path) -> None:
    """Another process: it is refused where the flush failed, elsewhere and after it goes on."""
    world = World(root, Journal(Place.journal(root)), first_send=150)
    world.do(("open", "os"))
    for key in PARTITIONS:
        assert world.log.partition(*key).end_offset() >= 0
    failed = forks.until(lambda: told.exists() and json.loads(told.read_text()), 30)
    failed = [tuple(key) for key in failed]
    for key in PARTITIONS:
        for durability in ("os", "fsync"):
            if key in failed:
                with raises(DurabilityError):
                    world.do(("send", *key, 1, durability))
            else:
                world.do(("send", *key, 1, durability))
        assert len(journal_check.rows(world.log, *key)) == world.log.partition(*key).end_offset()
    told.unlink()
    forks.until(mended.exists, 30)
    for key in PARTITIONS:
        world.do(("send", *key, 2, "fsync"))
