"""One flush fails: what all processes see until `repair` (P9)."""

from __future__ import annotations

import errno
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from embedlog.errors import DurabilityError
from support import forks, journal_check
from support.faulty_files import FaultyFiles
from support.log_programs import ProgramProcess, Step, journal_of
from support.program_faults import (
    PARTITIONS,
    Scenario,
    Templates,
    judge,
    play,
    raises,
)

SYNCS = ("sync", "sync_directory")
ERRORS = (errno.EIO, errno.ENOSPC)
PROGRAM: list[Step] = [
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
SCENARIO = Scenario(tuple(PROGRAM), "killed")


class FailedFlush(NamedTuple):
    """Let the `n`-th flush fail; the disk may really have lost what was to be flushed."""

    n: int
    forever: bool
    lost: bool


def flush_cases(counted: dict[str, int]) -> list[FailedFlush]:
    """Return the failures of every flush of the program."""
    return [
        FailedFlush(n, forever, lost)
        for n in range(sum(counted.get(kind, 0) for kind in SYNCS))
        for forever in (False, True)
        for lost in (False, True)
    ]


def check_failed_flush(case: FailedFlush, *, templates: Templates) -> int:
    """Let a flush fail; return how many partitions became read-only."""
    root = templates.fresh("killed")
    failed_file = root.with_suffix(".failed")
    failed_file.unlink(missing_ok=True)
    repaired_file = root.with_suffix(".repaired")
    repaired_file.unlink(missing_ok=True)
    witness = forks.Child(lambda: _attend(root, failed_file, repaired_file))
    end = forks.run(lambda: _fail(root, case, failed_file, repaired_file))
    other = witness.kill() if end.finding() else witness.end()
    failed = end.result()
    other.result("the witness")
    judge(root, again=False)
    return len(failed)


def _fail(
    root: Path, case: FailedFlush, failed_file: Path, repaired_file: Path
) -> list[tuple[str, int]]:
    def order(files: FaultyFiles) -> None:
        files.fail_at(case.n, ERRORS[case.n % 2], case.forever, SYNCS)

    files = partial(FaultyFiles, record=case.lost)
    process = play(root, SCENARIO, order, files=files, forgiving=True)
    log = process.log
    failed = [key for key in PARTITIONS if log.partition(*key).tail().failed]
    assert process.errors, "a flush failed, and no call raised an error"
    assert all(isinstance(error, DurabilityError) for error in process.errors), process.errors
    assert process.errors[0].errno == ERRORS[case.n % 2]
    assert failed, f"no partition is read-only after {process.errors}"
    process.heal()
    _check_refused(process, failed)
    epochs = {key: log.partition(*key).tail().leader_epoch for key in failed}
    failed_file.with_suffix(".new").write_text(json.dumps(failed))
    failed_file.with_suffix(".new").rename(failed_file)
    forks.until(lambda: not failed_file.exists())
    _repair(process, failed, epochs)
    repaired_file.touch()
    return failed


def _check_refused(process: ProgramProcess, failed: list[tuple[str, int]]) -> None:
    """Check that no append, flush or roll of a failed partition reaches the disk."""
    files = process.log.root.context.files
    for key in failed:
        before = files.count(SYNCS), files.count({"write"})
        end = process.log.partition(*key).end_offset()
        assert len(journal_check.rows(process.log, *key)) == end
        for step in (("send", *key, 1, "os"), ("send", *key, 1, "fsync"), ("roll", *key)):
            process.forgiving = False
            with raises(DurabilityError):
                process.do(step)
        with raises(DurabilityError):
            process.log.partition(*key).flush()
        after = files.count(SYNCS), files.count({"write"})
        assert after == before, f"{key}: it was tried again: {after} after {before}, {failed}"
        assert process.log.partition(*key).end_offset() == end
    for key in PARTITIONS:
        if key not in failed:
            process.do(("send", *key, 1, "fsync"))


def _repair(process: ProgramProcess, failed: list[tuple[str, int]], epochs: dict[Any, int]) -> None:
    log = process.log
    dry = log.housekeeping.repair()
    assert len(dry) >= len(failed)
    assert all(log.partition(*key).tail().failed for key in failed), "a dry run changes nothing"
    before = log.root.context.files.counts["drop_cache"]
    for key in failed:
        process.journal.put("repaired", *key)
    log.housekeeping.repair(dry_run=False)
    assert log.root.context.files.counts["drop_cache"] >= before + len(failed)
    assert log.housekeeping.verify() == [], log.housekeeping.verify()
    for key in failed:
        tail = log.partition(*key).tail()
        assert not tail.failed
        assert tail.leader_epoch > epochs[key]
    journal_check.check(log, journal_of(process.path), goes_on=False)


def _attend(root: Path, failed_file: Path, repaired_file: Path) -> None:
    """Append in another process: refused where the flush failed until the repair, else accepted."""
    process = ProgramProcess(root, first_send=150)
    process.do(("open", "os"))
    for key in PARTITIONS:
        assert process.log.partition(*key).end_offset() >= 0
    failed = forks.until(lambda: failed_file.exists() and json.loads(failed_file.read_text()), 30)
    failed = [tuple(key) for key in failed]
    for key in PARTITIONS:
        for durability in ("os", "fsync"):
            if key in failed:
                with raises(DurabilityError):
                    process.do(("send", *key, 1, durability))
            else:
                process.do(("send", *key, 1, durability))
        assert (
            len(journal_check.rows(process.log, *key)) == process.log.partition(*key).end_offset()
        )
    failed_file.unlink()
    forks.until(repaired_file.exists, 30)
    for key in PARTITIONS:
        process.do(("send", *key, 2, "fsync"))
