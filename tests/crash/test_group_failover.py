"""Members of a group that are killed or stopped while they own partitions."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import forks
from support.faulty_files import FaultInjector, scratch_directory
from support.forks import tell
from support.group_consumers import partitions, poll_until_assigned
from support.patience import patient
from support.roots import copy_root, encoded
from support.tiers import choose

import embedlog
from embedlog.errors import LockTimeoutError

GROUP = "g"
STICKY = {"partition_assignment_strategy": "cooperative-sticky"}
BY_HAND = {"auto_offset_reset": "earliest", "enable_auto_commit": False, **STICKY}


def make_topic(path: Path, count: int, records: int = 0) -> None:
    with embedlog.open(path) as log:
        log.create_topic("t", count)
        for number in range(count):
            for _ in range(records):
                log.partition("t", number).append([encoded(b"a", b"b")])


# Killed at any operation


class Kill(NamedTuple):
    """Kill the process before or after its nth operation."""

    n: int
    when: str


def _live(root: Path, notes: Path, files: Any) -> None:
    """The life of a member: join, read, commit, rebalance with another one, and leave."""
    fd = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def commit(member: Any, offset: int) -> None:
        owned = sorted(member.assignment())
        for kind in ("b", "c"):
            if kind == "c":
                member.commit(dict.fromkeys(owned, offset))
            os.write(fd, "".join(f"{kind} {tp.partition} {offset}\n" for tp in owned).encode())

    log = embedlog.open(root, files=files, maintenance=False)
    first = log.consumer("t", group_id=GROUP, **BY_HAND)
    first.poll(0)
    commit(first, 1)
    second = log.consumer("t", group_id=GROUP, **BY_HAND)
    poll_until_assigned([first, second], partitions("t", 3), at_least=1)
    for member in (first, second):
        commit(member, 2)
    first.close()
    poll_until_assigned([second], partitions("t", 3))
    commit(second, 3)
    second.unsubscribe()
    log.close()


def count_operations(root: Path) -> int:
    """Return roughly how many operations such a life has: some are those of a thread."""
    injector = FaultInjector()
    _live(root, root.with_suffix(".notes"), injector)
    return injector.files.count()


def check_member_kill(case: Kill, *, template: Path) -> bool:
    """Kill a member; another one gets all partitions, and continues at the commits."""
    root = template.with_name(f"run-{os.getpid()}")
    notes = root.with_suffix(".notes")
    copy_root(template, root)
    notes.unlink(missing_ok=True)
    injector = FaultInjector(lambda files: files.kill_at(case.n, case.when))
    killed = forks.was_killed(lambda: _live(root, notes, injector))
    forks.call(lambda: _judge(root, notes))
    return killed


def _judge(root: Path, notes: Path) -> None:
    done, begun = [0, 0, 0], [0, 0, 0]
    for line in notes.read_text().splitlines() if notes.exists() else ():
        kind, number, offset = line.split()
        (done if kind == "c" else begun)[int(number)] = int(offset)
    with embedlog.open(root) as log:
        heir, offsets = log.consumer("t", group_id=GROUP, **BY_HAND), [[], [], []]
        started = time.monotonic()
        while any(len(records) == 0 or records[-1] < 5 for records in offsets):
            assert time.monotonic() - started < patient(5), (
                f"it has {heir.assignment()}, and {offsets}"
            )
            for tp, records in heir.poll(100).items():
                offsets[tp.partition] += [record.offset for record in records]
        for number, records in enumerate(offsets):
            assert done[number] <= records[0] <= begun[number], f"{records} after {begun}"
            assert records == list(range(records[0], 6))
        assert log.housekeeping.verify() == []


# Stopped with a lock


def check_stopped_with_lock(n: int, *, template: Path) -> bool:
    """Stop a member while it holds a lock; return whether another one waited for the lock.

    The error names the process and its state; once that is killed, the others go on.
    """
    root = template.with_name(f"run-{os.getpid()}")
    copy_root(template, root)
    injector = FaultInjector(lambda files: files.stop_at(n, only={"unlock"}))
    child = forks.Child(lambda: _live(root, root.with_suffix(".notes"), injector))
    if not child.stopped():
        child.end().result()
        return False
    other = forks.run(lambda: _meet(root, child))
    child.kill()
    met = other.result("the other")
    forks.call(lambda: _take_all(root))
    return bool(met)


def _meet(root: Path, child: forks.Child) -> bool:
    try:
        log = embedlog.open(root, lock_timeout=0.2)
        member = log.consumer("t", group_id=GROUP, **BY_HAND)
        member.poll(0)
    except LockTimeoutError as error:
        named = error.pid, error.state
    else:
        return False
    assert named == (child.pid, "T")
    return True


def _take_all(root: Path) -> None:
    with embedlog.open(root) as log:
        poll_until_assigned([log.consumer("t", group_id=GROUP, **BY_HAND)], partitions("t", 3))
        assert log.housekeeping.verify() == []


@pytest.mark.parametrize(
    "limit", [choose(test=4, all=60), pytest.param(None, marks=pytest.mark.tier("nightly"))]
)
def test_a_member_killed_at_any_operation_leaves_a_group_that_goes_on(limit):
    """P1, P15: what it reported as committed is so; no member waits, no partition is left out."""
    with scratch_directory() as directory:
        template = directory / "template"
        forks.call(lambda: make_topic(template, 3, records=3))
        root = directory / "counted"
        forks.run(lambda: make_topic(root, 3, records=3))
        counted = forks.call(lambda: count_operations(root))
        cases = [Kill(n, when) for n in range(counted) for when in ("before", "after")]
        died = forks.spread(forks.evenly(cases, limit), check_member_kill, template=template)
    tell(f"{sum(died)} of {len(died)} killed, {counted} operations in all")
    assert sum(died) >= 0.9 * len(died)


@pytest.mark.parametrize(
    "limit", [choose(test=3, all=12), pytest.param(None, marks=pytest.mark.tier("nightly"))]
)
def test_a_member_stopped_with_a_lock_is_named_by_those_who_wait_for_it(limit):
    """P16: in time; and nothing is left to mend once it is gone."""
    with scratch_directory() as directory:
        template = directory / "template"
        forks.call(lambda: make_topic(template, 3, records=3))
        named = forks.spread(
            forks.evenly(range(40), limit), check_stopped_with_lock, template=template
        )
    tell(f"{sum(named)} of {len(named)} were in the way")
    assert sum(named) >= len(named) // 3
