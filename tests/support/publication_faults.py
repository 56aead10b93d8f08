"""Publications that are killed, fail, or lose their power at any of their operations.

Each check is a plain function of its case, run in a child process.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from embedlog.config import TopicConfig
from embedlog.errors import DurabilityError, EmbedlogError
from embedlog.publish import app_versions, staging, transaction
from embedlog.publish.transaction import Publication
from embedlog.root.repair import repair_root
from embedlog.root.root import Root
from support import faulty_roots, forks
from support.durability_check import Rebooted
from support.faulty_files import FALLIBLE, OPERATIONS, FaultyFiles
from support.power_cut import Recording, materialise
from support.roots import abandon, encoded, healthy, open_root, segment_files, values
from support.staged_files import publish, stage

CONFIG: dict[str, tuple[int, dict[str, object]]] = {
    "a": (2, {}),
    # So small that a publication takes several segments.
    "b": (1, {"segment.bytes": 1700, "index.interval.bytes": 500}),
    # Nobody wrote to it before.
    "c": (1, {}),
}
VERSIONS = {
    1: {"a_0": 3, "a_1": 1, "b_0": 7},
    2: {"a_1": 2, "b_0": 1, "c_0": 2},
    3: {"a_0": 1, "b_0": 5, "c_0": 1},
}
"""What each publication has for each partition: so many batches."""
DAY = 86_400_000
PARTS = ("a_0", "a_1", "b_0", "c_0")
Tell = Callable[[str], None]


def share(version: int, part: str) -> list[bytes]:
    """The values that a publication has for a partition."""
    return [b"p%d %s %d" % (version, part.encode(), row) for row in range(VERSIONS[version][part])]


def plain(version: int) -> bytes:
    """The value that is appended after a publication."""
    return b"n%d" % version


def fill(root: Root) -> None:
    """Make the topics, with something in two of them."""
    for name, (partitions, config) in CONFIG.items():
        root.create_topic(name, partitions, TopicConfig.parse(config))
    for name in ("a", "b"):
        root.partition(name, 0).append([encoded(b"first")], durability="fsync")
    root.flush()


def send(root: Root, version: int, durability: str) -> Any:
    """Stage a publication and publish it, as a task and its driver do."""
    staged = stage(root, **{part: share(version, part) for part in VERSIONS[version]})
    try:
        return publish(root, [staged], version, durability=durability)
    finally:
        staging.remove(root.context.files, [staged])


def append(root: Root, version: int, durability: str) -> None:
    root.partition("a", 0).append([encoded(plain(version))], durability=durability)


def work(root: Root, durability: str, tell: Tell) -> None:
    """Three publications, each followed by an append of somebody else."""
    for version in VERSIONS:
        assert send(root, version, durability).repeated is None
        tell(f"p{version}")
        append(root, version, durability)
        tell(f"n{version}")


def found(root: Root) -> set[str]:
    """What is there, in every partition alike; raises if a publication is there in part."""
    # The ends first, and all at one instant: that is what a reader begins with.
    root.topics()
    there = {part: values(root.partition(*_place(part))) for part in PARTS}
    seen: set[str] = set()
    for version in VERSIONS:
        have = {part: share(version, part)[0] in there[part] for part in VERSIONS[version]}
        assert len(set(have.values())) == 1, f"publication {version} is there in part: {have}"
        seen |= {f"p{version}"} if all(have.values()) else set()
        seen |= {f"n{version}"} if plain(version) in there["a_0"] else set()
    for part in PARTS:
        assert there[part] == expected(part, seen), f"{part}: {there[part]}"
    return seen


def _place(part: str) -> tuple[str, int]:
    return part[0], int(part[2:])


def expected(part: str, seen: set[str]) -> list[bytes]:
    """What a partition holds if so much is there."""
    wanted = [b"first"] if part in ("a_0", "b_0") else []
    for version, shares in VERSIONS.items():
        if f"p{version}" in seen and part in shares:
            wanted += share(version, part)
        if f"n{version}" in seen and part == "a_0":
            wanted.append(plain(version))
    return wanted


def check_between(root: Root, told: set[str]) -> None:
    """All of each publication is there, or nothing, and what was acknowledged is."""
    seen = found(root)
    assert told <= seen, f"{told - seen} were acknowledged"
    order = [f"{kind}{version}" for version in VERSIONS for kind in "pn"]
    assert seen == set(order[: len(seen)]), f"{seen} is no beginning"


def jump(root: Root) -> None:
    """Let the clock jump, far and back, while other applications publish (P17).

    As if they were so many that every marker is dropped that may be.
    """
    clock: Any = root.clock
    with patch.multiple(app_versions, KEPT=0, CHECK_INTERVAL=1):
        for days in (40, 700, -1000, 260):
            clock.advance(days * DAY)
            for number in range(2):
                name = f"other {number}"
                version = (
                    0
                    if (last := transaction.last_app_version(root, name)) is None
                    else last.version
                )
                transaction.publish(root, [], Publication(name, version + 1, name))


def check_done(root: Root, durability: str) -> None:
    """Repeat everything: what was there is skipped, the rest is there after, each once."""
    # An append that died before its flush is published by the next one.
    root.partition("a", 0).flush()
    jump(root)
    for version in VERSIONS:
        there = f"p{version}" in found(root)
        told = send(root, version, durability)
        # One may be published and not seen yet: its process died before it could show it.
        assert told.repeated is not None or not there, f"publication {version}: {told}"
        assert f"p{version}" in found(root)
        if f"n{version}" not in found(root):
            append(root, version, durability)
    seen = found(root)
    assert seen == {f"{kind}{version}" for version in VERSIONS for kind in "pn"}
    assert healthy(root)
    jump(root)
    for version in VERSIONS:
        assert send(root, version, durability).repeated is not None
    assert found(root) == seen
    named = set()
    for part in PARTS:
        log = root.partition(*_place(part))
        log.refresh()
        named |= {log.path_of(info) for info in log.segments.values()}
    there_are = {str(path.relative_to(root.path)) for path in segment_files(root.path)}
    assert there_are == named, "a stray file"


# Kills and faults


class Case(NamedTuple):
    """At the `n`-th operation of these kinds something happens."""

    n: int
    what: str
    """``"after"``, ``"before"`` or ``"middle"``, when to kill; ``"once"`` or ``"forever"``."""
    durability: str
    company: bool = False
    """Whether another process has the log open, so that nobody mends it."""
    only: tuple[str, ...] = tuple(sorted(OPERATIONS))


def count(directory: Path, durability: str) -> dict[str, int]:
    """How many operations of each kind there are."""

    def run() -> Root:
        root = _begin(directory / f"count-{durability}", order=lambda files: None)
        work(root, durability, lambda told: None)
        check_between(root, set())
        return root

    return faulty_roots.count(run)


_begin = partial(faulty_roots.begin, fill=fill, parts=[_place(part) for part in PARTS])
_join = partial(faulty_roots.join, parts=[_place(part) for part in PARTS])


def check_kill(case: Case, *, directory: Path) -> bool:
    """Kill the process there; whether it was."""
    path = directory / f"kill-{case.n}-{case.what}-{case.durability}-{case.company}"
    journal = path.with_suffix(".told")
    company = None
    if case.company:
        company = open_root(path)
        fill(company)

    def order(files: FaultyFiles) -> None:
        files.kill_at(case.n, case.what, case.only)

    def tell(what: str) -> None:
        with journal.open("a") as file:
            file.write(f"{what}\n")

    def run() -> None:
        root = _join(path, order=order) if case.company else _begin(path, order=order)
        work(root, case.durability, tell)

    end = forks.run(run)
    assert end.killed or end.finding() is None, end.finding()
    told = set(journal.read_text().split()) if journal.exists() else set()
    if company is None:
        judge(path, told, case.durability)
    else:
        check_between(company, told)
        assert healthy(company)
        check_done(company, case.durability)
        company.close()
    shutil.rmtree(path, ignore_errors=True)
    journal.unlink(missing_ok=True)
    return end.killed


def judge(path: Path, told: set[str], durability: str) -> None:
    """Open it in a child, alone, and go on."""

    def look() -> None:
        root = open_root(path)
        assert healthy(root)
        # Before anybody writes: nobody has finished, or undone, what was left.
        check_between(root, told)
        check_done(root, durability)
        root.close()
        root = open_root(path)
        assert root.startup_report == []
        assert len(found(root)) == 2 * len(VERSIONS)
        root.close()

    end = forks.run(look)
    assert end.finding() is None, end.finding()


def check_fault(case: Case, *, directory: Path) -> bool:
    """Let an operation fail; whether anybody was told."""
    path = directory / f"fault-{case.n}-{case.what}-{case.durability}"
    number = (errno.EIO, errno.ENOSPC, errno.EDQUOT)[case.n % 3]

    def run() -> bool:
        def order(files: FaultyFiles) -> None:
            files.fail_at(case.n, number, case.what == "forever", FALLIBLE)

        root = _begin(path, order=order)
        told: set[str] = set()
        error = _error_of(lambda: work(root, case.durability, told.add))
        root.context.files.heal()  # type: ignore[attr-defined]
        failed = [part for part in PARTS if root.partition(*_place(part)).tail().failed]
        check_between(root, told)
        if failed:
            # A flush failed: that is final until a repair (P9).
            assert isinstance(error, DurabilityError), error
            repair_root(root, dry_run=False)
            check_between(root, told)
        check_done(root, case.durability)
        root.close()
        return error is not None

    end = forks.run(run)
    assert end.finding() is None, end.finding()
    shutil.rmtree(path, ignore_errors=True)
    return bool(end.value)


def _error_of(run: Callable[[], None]) -> EmbedlogError | None:
    try:
        run()
    except EmbedlogError as error:
        return error
    return None


# Power cuts


def record(directory: Path, durability: str) -> Recording:
    """Record the file operations, from a root that is all on the disk."""
    path = directory / f"recorded-{durability}"
    root = open_root(path)
    fill(root)
    root.close()
    root = open_root(path, files=lambda where, **how: FaultyFiles(where, record=True, **how))
    for part in PARTS:
        root.partition(*_place(part)).tail()
    files: Any = root.context.files
    work(root, durability, files.note)
    recording: Recording = files.recording()
    abandon(root)
    return recording


def cut_everywhere(
    recording: Recording, limit: int, directory: Path, durability: str
) -> tuple[int, list[str]]:
    """Look at states that a power cut may leave; returns how many, and what is wrong first."""
    findings: list[str] = []
    seen, previous = 0, None
    target = directory / f"after-{durability}"
    target.mkdir()
    check = _check_synced if durability == "fsync" else _check_unsynced
    for image in recording.states(limit, 1, 24):
        materialise(image, target, previous)
        previous = image
        seen += 1
        try:
            check(target, set(image.notes), seen)
        except Exception as error:  # noqa: BLE001 - whatever it is, this state leads to it
            findings.append(f"{error!r} after {image.explain()}")
            break
    return seen, findings


def _reopened(path: Path, number: int) -> Root:
    return open_root(path, files=lambda where, **how: Rebooted(where, boot=f"boot {number}", **how))


def _check_synced(path: Path, told: set[str], number: int) -> None:
    root = _reopened(path, number)
    try:
        assert healthy(root)
        check_between(root, told)
        check_done(root, "fsync")
    finally:
        abandon(root)


def _check_unsynced(path: Path, told: set[str], number: int) -> None:
    """A prefix of each partition; and a repetition brings back what was lost."""
    root = _reopened(path, number)
    everything = {f"{kind}{version}" for version in VERSIONS for kind in "pn"}
    try:
        assert healthy(root)
        for part in PARTS:
            there = values(root.partition(*_place(part)))
            assert there == expected(part, everything)[: len(there)], f"{part}: {there}"
        # Nobody repeats what came before the last one.
        marker = transaction.last_app_version(root, "q")
        for version in VERSIONS:
            if marker is None or version >= marker.version:
                send(root, version, "os")
                assert _whole(root, version), f"publication {version} is not there after all"
        assert healthy(root)
    finally:
        abandon(root)


def _whole(root: Root, version: int) -> bool:
    return all(
        set(share(version, part)) <= set(values(root.partition(*_place(part))))
        for part in VERSIONS[version]
    )
