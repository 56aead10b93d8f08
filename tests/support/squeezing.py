"""One compaction with one fault in it, and what must be true of what is left (D24, D25)."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from embedlog.compaction import clean, look
from embedlog.config import MaintenanceConfig
from embedlog.errors import DurabilityError, EmbedlogError
from embedlog.log import PartitionLog
from embedlog.log.repairing import repair_root
from embedlog.log.root import Root
from support import forks
from support.clock import START, ManualClock
from support.cruel import CruelFiles, materialise
from support.roots import abandon, encoded, healthy, make_log, open_root, rows, segment_files

CONFIG = {
    "cleanup.policy": "compact",
    "file.delete.delay.ms": 0,
    "segment.bytes": 2600,
    "index.interval.bytes": 600,
    "delete.retention.ms": 50,
}
RECORDS = 56
SMALL = MaintenanceConfig(log_cleaner_dedupe_buffer_size=24 * 6, log_cleaner_io_buffer_size=1500)


def seam(boot: str | None = None, **options: Any) -> Any:
    """Make `CruelFiles` of a boot, as a root takes them."""
    made = partial(CruelFiles, boot=boot, **options)
    made.create_root = CruelFiles.create_root  # type: ignore[attr-defined]
    return made


def build(path: Path, **options: Any) -> tuple[Root, PartitionLog]:
    """A root with some sealed segments: keys that repeat, tombstones, producers, headers."""
    root = open_root(path, files=seam(**options), clock=ManualClock())
    log = make_log(root, CONFIG)
    for number in range(RECORDS // 4):
        keys = [b"k%d" % ((number * 5 + row * row) % 9) for row in range(4)]
        values = [None if (number + row) % 7 == 0 else b"%d-%d" % (number, row) for row in range(4)]
        producer = (number % 3, 0, number // 3 * 4) if number % 3 else None
        headers = [[("h", b"x")]] * 4 if number > 10 else None
        log.append(
            [encoded(*values, keys=keys, at=START + number, producer=producer, headers=headers)]
        )
        if number == 6:
            clean(log, START, settings=SMALL)
    log.roll()
    log.flush()
    return root, log


def state(log: PartitionLog) -> dict[Any, Any]:
    """What a reader from 0 to the end makes of the log."""
    found: dict[Any, Any] = {}
    for offset, time, key, value, headers in rows(log):
        found.pop(key, None)
        if value is not None:
            found[key] = offset, time, value, headers
    return found


def squeeze(root: Root, log: PartitionLog) -> None:
    """Compact twice: the second time tombstones go."""
    clean(log, START + 20, settings=SMALL)
    clean(log, START + 100, settings=SMALL)


class Expected(NamedTuple):
    """What the log was, whatever may happen to it."""

    before: list[Any]
    state: dict[Any, Any]


def expected(path: Path) -> Expected:
    """Build one and look at it."""
    root, log = build(path)
    found = Expected(rows(log), state(log))
    abandon(root)
    return found


def judge(root: Root, wanted: Expected) -> None:
    """Raise AssertionError unless the log is the old one, the new one, or on the way between."""
    log = root.partition("t", 0)
    assert healthy(root)
    found = rows(log)
    known = {row[0]: row for row in wanted.before}
    assert all(known[row[0]] == row for row in found), "a record that was never there"
    assert [row[0] for row in found] == sorted({row[0] for row in found})
    assert state(log) == wanted.state
    assert (log.start_offset(), log.end_offset()) == (0, RECORDS)
    reader = log.reader(0)
    while reader.read():
        pass
    assert reader.offset == RECORDS, "a reader does not come to the end"


def go_on(root: Root, wanted: Expected) -> None:
    """Compact again, append, and look that no file is left that nothing names."""
    log = root.partition("t", 0)
    squeeze(root, log)
    judge(root, wanted)
    assert not look(log, START + 100).cleanable_bytes
    cleaned = [row for row in rows(log) if row[0] < RECORDS]
    assert len({row[2] for row in cleaned}) == len(cleaned)
    for producer in (1, 2):
        numbers = [number for number in range(RECORDS // 4) if number % 3 == producer]
        last = numbers[-1]
        keys = [b"x"] * 4
        again = encoded(*keys, keys=keys, at=START, producer=(producer, 0, last // 3 * 4))
        (receipt,) = log.append([again])
        assert receipt.duplicate and receipt.base_offset == 4 * last
    (receipt,) = log.append([encoded(b"v", keys=[b"new"])])
    assert receipt.base_offset == RECORDS
    named = {log.path_of(info) for info in log.segments.values()}
    there = {str(path.relative_to(root.path)) for path in segment_files(root.path)}
    assert there == named, "a stray file"


# Faults


class Kill(NamedTuple):
    """The process is killed at one operation of the compaction."""

    number: int
    when: str


class Failure(NamedTuple):
    """One operation of the compaction fails, and with ``forever`` all that follow."""

    number: int
    errno: int
    forever: bool


def count(directory: Path) -> int:
    """How many operations a compaction has."""
    root, log = build(_fresh(directory))
    before = root.context.files.count()
    squeeze(root, log)
    found: int = root.context.files.count() - before
    root.close()
    return found


def _fresh(directory: Path) -> Path:
    path = directory / f"run-{os.getpid()}"
    shutil.rmtree(path, ignore_errors=True)
    return path


def check_kill(case: Kill, directory: Path, wanted: Expected) -> bool:
    """Kill a compaction; whether it was still going on."""
    path = _fresh(directory)

    def work() -> None:
        root, log = build(path)
        root.context.files.kill_at(case.number, case.when)
        squeeze(root, log)

    end = forks.run(work)
    assert end.killed or end.finding() is None, end.finding()
    root = open_root(path, files=seam(), clock=ManualClock())
    judge(root, wanted)
    go_on(root, wanted)
    root.close()
    return end.killed


def check_failure(case: Failure, directory: Path, wanted: Expected) -> str:
    """Let an operation of a compaction fail; the name of the error that was raised."""
    path = _fresh(directory)
    root, log = build(path)
    files = root.context.files
    files.fail_at(case.number, case.errno, case.forever)
    told = _told(lambda: squeeze(root, log))
    files.heal()
    if log.tail().failed:
        assert told == DurabilityError.__name__
        judge_failed(root, wanted)
    else:
        judge(root, wanted)
    go_on(root, wanted)
    root.close()
    return told


def judge_failed(root: Root, wanted: Expected) -> None:
    """A directory that could not be flushed: read-only until it is repaired (P9)."""
    assert state(root.partition("t", 0)) == wanted.state
    repair_root(root, dry_run=False)


def _told(work: Callable[[], None]) -> str:
    try:
        work()
    except EmbedlogError as error:
        return type(error).__name__
    return ""


ERRORS = (errno.EIO, errno.ENOSPC)


def check_power_cuts(directory: Path, limit: int, wanted: Expected) -> int:
    """Cut the power everywhere in a compaction; how many states of the disk were looked at."""
    root, log = build(directory / "recorded", record=True)
    files = root.context.files
    files.note("built")
    squeeze(root, log)
    files.note("squeezed")
    recording = files.recording()
    abandon(root)
    after, previous, seen = directory / "after", None, 0
    after.mkdir()
    for number, image in enumerate(recording.states(limit, 1, 24)):
        if "built" not in image.notes:
            continue
        materialise(image, after, previous)
        previous = image
        seen += 1
        end = forks.run(partial(_after_a_cut, after, number, wanted))
        assert end.finding() is None, f"{image.explain()}\n{end.finding()}"
    return seen


def _after_a_cut(path: Path, number: int, wanted: Expected) -> None:
    root = open_root(path, files=seam(f"boot {number}"), clock=ManualClock())
    judge(root, wanted)
    go_on(root, wanted)
    root.close()
