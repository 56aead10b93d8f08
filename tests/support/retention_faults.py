"""A round of retention that is killed, fails, or loses its power at any of its operations.

Each check is a plain function of its case, run in a child process.
"""

from __future__ import annotations

import errno
import shutil
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import embedlog
from embedlog.config import TopicConfig
from embedlog.errors import EmbedlogError, OffsetOutOfRangeError
from embedlog.files import Files
from embedlog.partition import pending_deletes
from embedlog.record import TopicPartition
from embedlog.retention import delete_records, retain
from embedlog.root.repair import repair_root
from embedlog.root.root import Root
from support import faulty_roots, forks
from support.clock import START
from support.faulty_files import FALLIBLE, OPERATIONS, FaultyFiles
from support.power_cut import Recording, materialise
from support.roots import abandon, encoded, healthy, open_root, rows, segment_files

DAY = 86_400_000
NOW = START + 30 * DAY
SIZE = encoded(b"v0").size
GOALS = {"aged": (7, 8), "large": (4, 8), "asked": (5, 8), "whole": (8, 8)}
"""Where each topic begins when all is done, and where it ends."""
PARTS = [TopicPartition(name, 0) for name in GOALS]
CONFIG: dict[str, dict[str, object]] = {
    # Its last segment holds a young record.
    "aged": {"retention.ms": DAY, "file.delete.delay.ms": 0},
    "large": {"retention.bytes": 2500, "file.delete.delay.ms": 1},
    "asked": {"file.delete.delay.ms": 0},
    "whole": {"retention.ms": DAY, "file.delete.delay.ms": 0},
}


class Slow(FaultyFiles):
    """A machine on which every delay is over at once."""

    def uptime_ms(self) -> int:
        self.ups = getattr(self, "ups", 0) + 10
        return super().uptime_ms() + self.ups


def fill(root: Root) -> None:
    """Make the topics, with eight records in four segments each, flushed."""
    for name, more in CONFIG.items():
        usual: dict[str, object] = {"segment.bytes": 2 * SIZE, "retention.ms": -1}
        root.create_topic(name, 1, TopicConfig.parse(usual | more))
        log = root.partition(name, 0)
        for number in range(8):
            young = name == "aged" and number == 7
            at = NOW if young else START + number
            log.append([encoded(b"%02d" % number, at=at)])
    root.flush()


def work(root: Root) -> list[EmbedlogError]:
    """One round, and deletes that are asked for; returns what was raised."""
    errors = []
    try:
        retain(root, NOW)
    except EmbedlogError as error:
        errors.append(error)
    try:
        delete_records(root.partition("asked", 0), 5)
    except EmbedlogError as error:
        errors.append(error)
    return errors


def check_between(root: Root, *, full: bool = False) -> None:
    """Every topic is the old one or the new one; no record between is missing or double.

    On a full disk a round is content with fewer segments.
    """
    for name, (goal, end) in GOALS.items():
        log = root.partition(name, 0)
        start = log.start_offset()
        known = range(0, goal, 2) if full else (0,)
        assert start in (*known, goal), f"{name} begins at {start}, neither 0 nor {goal}"
        assert log.end_offset() == end, f"{name} ends at {log.end_offset()}"
        found = [(row[0], row[3]) for row in rows(log)]
        assert found == [(n, b"%02d" % n) for n in range(start, end)], f"{name}: {found}"


def check_done(root: Root) -> None:
    """All is done, and no file is there that the manifest does not name."""
    assert work(root) == []
    pending_deletes.sweep(root.context, early=True)
    for name, (goal, end) in GOALS.items():
        log = root.partition(name, 0)
        assert (log.start_offset(), log.end_offset()) == (goal, end)
        log.refresh()
        named = {info.file_name for info in log.segments.values()}
        there = {path.name for path in segment_files(root.path) if path.parts[-3].startswith(name)}
        assert there == named, f"{name}: {there} are there, {named} are named"
    assert pending_deletes.paths(root.context.live) == set()
    assert healthy(root)


def judge(path: Path) -> None:
    """Open it in a child, alone, and go on."""

    def look() -> None:
        root = open_root(path, files=Slow)
        check_between(root)
        assert healthy(root)
        check_done(root)
        for name in GOALS:
            assert root.partition(name, 0).append([encoded(b"08")])[0].base_offset == 8
        root.close()
        root = open_root(path)
        assert root.startup_report == []
        root.close()

    end = forks.run(look)
    assert end.finding() is None, end.finding()


class Case(NamedTuple):
    """At the `n`-th operation of these kinds something happens."""

    n: int
    what: str
    """``"after"`` or ``"before"``, when to kill; or ``"once"`` or ``"forever"``, how to fail."""
    company: bool = False
    """Whether another process has the log open, so that nobody mends it."""
    only: tuple[str, ...] = tuple(sorted(OPERATIONS))


def count(directory: Path) -> dict[str, int]:
    """How many operations of each kind there are."""

    def run() -> Root:
        root = _begin(directory / "count", order=lambda files: None)
        assert work(root) == []
        check_between(root)
        return root

    return faulty_roots.count(run)


_begin = partial(faulty_roots.begin, fill=fill, parts=PARTS, files=Slow)
_join = partial(faulty_roots.join, parts=PARTS, files=Slow)


def check_kill(case: Case, *, directory: Path) -> bool:
    """Kill the process there; whether it was."""
    path = directory / f"kill-{case.n}-{case.what}-{case.company}"
    company = None
    if case.company:
        company = open_root(path, files=Slow)
        fill(company)

    def order(files: FaultyFiles) -> None:
        files.kill_at(case.n, case.what, case.only)

    def run() -> None:
        work(_join(path, order=order) if case.company else _begin(path, order=order))

    end = forks.run(run)
    assert end.killed or end.finding() is None, end.finding()
    if company is None:
        judge(path)
    else:
        check_between(company)
        assert healthy(company)
        check_done(company)
        company.close()
    shutil.rmtree(path, ignore_errors=True)
    return end.killed


def check_fault(case: Case, *, directory: Path) -> bool:
    """Let an operation fail; whether anybody was told."""
    path = directory / f"fault-{case.n}-{case.what}"
    number = (errno.EIO, errno.ENOSPC, errno.EDQUOT)[case.n % 3]

    def run() -> bool:
        def order(files: FaultyFiles) -> None:
            files.fail_at(case.n, number, case.what == "forever", FALLIBLE)

        root = _begin(path, order=order)
        errors = work(root)
        assert not errors or errors[0].errno == number, errors  # type: ignore[attr-defined]
        root.context.files.heal()  # type: ignore[attr-defined]
        failed = [name for name in GOALS if root.partition(name, 0).tail().failed]
        if not failed:
            check_between(root, full=number != errno.EIO)
            check_done(root)
        else:
            # A flush failed, in the roll of a segment: that is final until a repair (P9).
            repair_root(root, dry_run=False)
            check_done(root)
        root.close()
        return bool(errors)

    end = forks.run(run)
    assert end.finding() is None, end.finding()
    judge_after(path)
    shutil.rmtree(path, ignore_errors=True)
    return bool(end.value)


def judge_after(path: Path) -> None:
    """What was closed cleanly is as it was done."""

    def look() -> None:
        root = open_root(path)
        assert root.startup_report == []
        check_done(root)
        root.close()

    end = forks.run(look)
    assert end.finding() is None, end.finding()


def record(directory: Path) -> Recording:
    """Record the file operations of a round, from a root that is all on the disk."""
    path = directory / "recorded"
    root = open_root(path)
    fill(root)
    root.close()
    root = open_root(path, files=lambda where, **how: Slow(where, record=True, **how))
    for part in PARTS:
        root.partition(*part).tail()
    files: Any = root.context.files
    files.note("begun")
    assert work(root) == []
    files.note("done")
    recording: Recording = files.recording()
    abandon(root)
    return recording


def cut_everywhere(recording: Recording, limit: int, directory: Path) -> tuple[int, list[str]]:
    """Look at the states that a power cut may leave; returns how many, and what is wrong."""
    findings: list[str] = []
    seen = 0
    previous = None
    target = directory / "after"
    target.mkdir()
    for image in recording.states(limit, 1, 24):
        materialise(image, target, previous)
        previous = image
        seen += 1
        try:
            _check_state(target, list(image.notes))
        except Exception as error:  # noqa: BLE001 - whatever it is, this state leads to it
            findings.append(f"{error!r} after {image.explain()}")
            if len(findings) > 3:
                break
    return seen, findings


def _check_state(path: Path, notes: list[Any]) -> None:
    root = open_root(path, files=lambda where, **how: Slow(where, boot=f"{path}", **how))
    try:
        check_between(root)
        if "done" in notes:
            for name, (goal, _) in GOALS.items():
                assert root.partition(name, 0).start_offset() == goal, f"{name} went back"
        assert healthy(root)
        check_done(root)
    finally:
        abandon(root)


def read_through(path: Path, stop: Path) -> tuple[int, int]:
    """Read a topic from its start, again and again, until told to stop.

    Returns how many records were read, and how often the reader was overtaken.
    """
    log = embedlog.open(path, maintenance=False)
    here, read, overtaken = log.partition("t", 0), 0, 0
    while not stop.exists():
        try:
            reader = here.reader(here.start_offset())
            expected = reader.offset
            while not stop.exists():
                found = reader.read(2_000)
                if not found:
                    break
                for one in found:
                    one.verify()
                    numbers = one.offsets().to_pylist()
                    at = [int(value) for value in one.lists()[2]]
                    assert at == numbers, "a record of another offset"
                    assert max(one.base_offset, expected) == expected, "a record was skipped"
                    expected = one.next_offset
                    read += one.count
            here.offset_for_timestamp(START)
            list(here.segments)
        except OffsetOutOfRangeError as error:
            if error.offset >= here.start_offset():
                raise  # nothing was deleted there
            overtaken += 1
    log.close()
    return read, overtaken


def churn(path: Path, stop: Path) -> int:
    """Append and delete until told to stop; returns how many records were deleted."""
    root = open_root(path, files=Files)
    log = root.partition("t", 0)
    while not stop.exists():
        base = log.tail().log_end_offset
        log.append([encoded(*(b"%d" % (base + row) for row in range(3)))])
        if base % 15 == 0:
            retain(root, START)
    deleted = log.start_offset()
    root.close()
    return deleted
