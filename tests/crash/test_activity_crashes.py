"""Events reported by a process that is killed, or whose disk fails, at every operation."""

from __future__ import annotations

import errno
import json
import logging
import shutil
from pathlib import Path

import pytest
from support import forks
from support.faulty_files import FALLIBLE, OPERATIONS, FaultyFiles
from support.forks import tell
from support.roots import abandon, encoded, fill, healthy, make_log, open_root
from support.tiers import sample

from embedlog.catalog import ACTIVITY
from embedlog.failures import Failures
from embedlog.maintenance import activity
from embedlog.root.root import Root

SMALL = {"segment.bytes": 2 * encoded(b"v0").size}
FAILURES = Failures(logging.getLogger("embedlog.test"))
ALL = [("altered", "b"), ("created", "a"), ("created", "b"), ("rolled", "a-0"), ("rolled", "a-0")]


def not_fenced(_: object) -> None:
    """No process is fenced."""


def look(root: Root) -> None:
    activity.report(root, activity.detect_changes(root, not_fenced, FAILURES), 1)


def work(root: Root) -> None:
    """Change topics, and report the changes each time."""
    log = make_log(root, SMALL, "a")
    fill(log, 3)
    make_log(root, topic="b")
    look(root)
    fill(log, 3, first=3)
    root.alter_topic("b", {"retention.ms": 5})
    look(root)


def read_events(root: Root) -> list[tuple[str, str]]:
    if ACTIVITY not in root.topics():
        return []
    reader, events = root.partition(ACTIVITY, 0).reader(0), []
    while batches := reader.read(1 << 20):
        for batch in batches:
            _, keys, values, _ = batch.lists()
            pairs = zip(keys, values, strict=True)
            events += [(json.loads(value)["kind"], key.decode()) for key, value in pairs]
    return sorted(event for event in events if event[0] != "owner")


def check(root: Root) -> list[tuple[str, str]]:
    """Look twice more: nothing is reported that did not happen, and nothing more than once."""
    look(root)
    look(root)
    events = read_events(root)
    left = list(ALL)
    for event in events:
        assert event in left, f"{event} is not so, or told twice: {events}"
        left.remove(event)
    assert healthy(root)
    return events


@pytest.fixture(scope="module")
def counted(directory: Path) -> dict[str, int]:
    def run() -> dict[str, int]:
        root = open_root(directory / "count", files=FaultyFiles)
        root.context.files.counts.clear()  # type: ignore[attr-defined]
        work(root)
        counts = dict(root.context.files.counts)  # type: ignore[attr-defined]
        assert check(root) == ALL
        abandon(root)
        return counts

    result = forks.call(run)
    counts: dict[str, int] = result
    return counts


def check_kill(number: int, *, directory: Path) -> tuple[bool, int]:
    path = directory / f"kill-{number}"

    def run() -> None:
        root = open_root(path, files=FaultyFiles)
        root.context.files.kill_at(number, "after", tuple(OPERATIONS))  # type: ignore[attr-defined]
        work(root)

    def judge() -> int:
        root = open_root(path)
        count = len(check(root))
        root.close()
        return count

    killed, end = forks.run(run).killed, forks.run(judge)
    assert end.finding() is None, end.finding()
    shutil.rmtree(path, ignore_errors=True)
    return killed, end.value


def check_fault(case: tuple[int, bool], *, directory: Path) -> bool:
    number, forever = case
    path = directory / f"fault-{number}-{forever}"

    def run() -> bool:
        root = open_root(path, files=FaultyFiles)
        log = make_log(root, SMALL, "a")
        fill(log, 3)
        make_log(root, topic="b")
        files = root.context.files
        files.fail_at(  # type: ignore[attr-defined]
            number, (errno.EIO, errno.ENOSPC)[number % 2], forever, FALLIBLE
        )
        look(root)
        files.heal()  # type: ignore[attr-defined]
        whole = len(check(root)) == 3
        root.close()
        return whole

    result = forks.call(run)
    shutil.rmtree(path, ignore_errors=True)
    return bool(result)


def test_a_process_that_is_killed_tells_nothing_wrong_and_nothing_twice(directory, counted):
    """At every operation: an event may be missing, and the log is whole."""
    places = sample(range(sum(counted.values())), 16)
    ends = forks.spread(places, check_kill, directory=directory)
    tell(f"{sum(killed for killed, _ in ends)} kills, {sum(count for _, count in ends)} events")
    assert sum(killed for killed, _ in ends) > len(places) / 2


def test_a_disk_that_fails_is_no_failure_of_who_tells(directory, counted):
    """P8, P10: any operation, once or from then on; what is reported after it is as before."""
    total = sum(counted.get(kind, 0) for kind in FALLIBLE)
    cases = [(number, forever) for number in range(total) for forever in (False, True)]
    cases = sample(cases, 16)
    whole = forks.spread(cases, check_fault, directory=directory)
    tell(f"{len(cases)} faults, after {sum(whole)} of which nothing was missing")
    assert sum(whole) > 0
