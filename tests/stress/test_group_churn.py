"""Groups whose members join, leave, are killed and stopped; and many groups side by side."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import pytest
from support import forks
from support.faulty_files import scratch_directory
from support.forks import tell, until
from support.group_consumers import (
    GroupThreads,
    Partitions,
    PipedChild,
    RecordingListener,
    partitions,
)
from support.patience import patient, until_enough
from support.roots import encoded, fill
from support.tiers import choose

import embedlog
from embedlog.consumer.group_member import GroupMember
from embedlog.errors import CommitFailedError
from embedlog.record import TopicPartition

GROUP = "churn"
WORK_SECONDS = 0.1
"""The maximum for the records of one poll."""
COMMIT_SECONDS = 0.1
"""So rarely that a killed reader has sometimes read records without committing them."""


class Churn(NamedTuple):
    """The parameters of a run."""

    seconds: float = 60.0
    pause: float = 0.1
    """Seconds from one event to the next."""
    members: int = 6
    partitions: int = 12
    session_ms: int = 1000
    stops: tuple[float, ...] = (0.02, 0.2, 0.5, 1.6)
    """Seconds for which a member is stopped; if shorter than the session, it loses nothing."""
    strategy: str = "cooperative-sticky"
    static: bool = False
    """Whether a new member has the instance id of the one that it replaces (M13)."""
    seed: int = 1


# One member


class _Journal:
    """Lines that are in the file as soon as they are written."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def put(self, lines: list[str]) -> None:
        os.write(self._fd, "".join(f"{line}\n" for line in lines).encode())


class Worker:
    """A member that reads, keeps a journal, and commits, until it has to leave."""

    def __init__(self, case: Churn, directory: Path, life: int) -> None:
        self._journal = _Journal(directory / f"member-{life}")
        self._log = embedlog.open(directory / "root")
        self._read: Partitions = set()
        self._dice = random.Random(life)
        self.member = self._log.consumer(
            group_id=GROUP,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=case.session_ms,
            heartbeat_interval_ms=case.session_ms // 8,
            partition_assignment_strategy=case.strategy,
            client_id=f"life{life}",
            group_instance_id=f"slot{life // 10_000}" if case.static else None,
        )
        listener = RecordingListener(
            assigned=self._assigned, revoked=self._revoked, lost=self._lost
        )
        self.member.subscribe(["t"], listener=listener)

    def run(self, pipe: Connection) -> None:
        pipe.send("here")
        committed = time.monotonic()
        while not pipe.poll(0):
            polled = self.member.poll(50)
            self._journal.put(
                [f"r {tp[1]} {rows[0].offset} {rows[-1].offset}" for tp, rows in polled.items()]
            )
            self._read |= set(polled)
            # Work takes its time: most stops come here, and the next thing is a commit.
            time.sleep(self._dice.random() * WORK_SECONDS if polled else 0)
            if self._read and time.monotonic() - committed > COMMIT_SECONDS:
                self.commit(self._read & self.member.assignment())
                self._read, committed = set(), time.monotonic()
        self.member.close()
        self._log.close()

    def _assigned(self, partitions: Partitions) -> None:
        now = time.monotonic_ns()
        self._journal.put(
            [f"a {tp.partition} {self.member.position(tp)} {now}" for tp in partitions]
        )

    def _revoked(self, partitions: Partitions) -> None:
        kind = "revoked" if self.commit(partitions) else "lost"
        self._journal.put([f"e {tp.partition} {kind}" for tp in partitions])

    def _lost(self, partitions: Partitions) -> None:
        self._journal.put([f"e {tp.partition} lost" for tp in partitions])

    def commit(self, partitions: Partitions) -> bool:
        offsets = {tp: self.member.position(tp) for tp in partitions}
        now = time.monotonic_ns()
        lines = [f"{tp.partition} {offset} {now}" for tp, offset in offsets.items()]
        self._journal.put([f"b {line}" for line in lines])
        try:
            self.member.commit(offsets)
        except CommitFailedError as error:
            self._journal.put([f"x {error}"])
            return False
        self._journal.put([f"c {line}" for line in lines])
        return True


def _write(case: Churn, directory: Path, pipe: Connection) -> None:
    """Append to all partitions until a message comes."""
    dice = random.Random(case.seed)
    # A member that is stopped may hold a lock, for long on a busy machine: that is P16's matter.
    with embedlog.open(directory / "root", lock_timeout=patient(60)) as log:
        pipe.send("here")
        while not pipe.poll(0.002):
            number = dice.randrange(case.partitions)
            log.partition("t", number).append([encoded(*[b"v"] * dice.randint(1, 5))])


# All of them


class _Slot:
    """A sequence of members, of which one is alive most of the time."""

    def __init__(self, case: Churn, directory: Path, number: int) -> None:
        self._case, self._directory, self._number, self._life = case, directory, number, 0
        self.remote: PipedChild | None = None
        self.stopped_until: float | None = None
        self.leaving = False

    def start(self) -> None:
        self._life += 1
        life = self._number * 10_000 + self._life
        case, directory = self._case, self._directory
        self.remote = PipedChild(lambda pipe: Worker(case, directory, life).run(pipe))

    def kill(self) -> None:
        assert self.remote is not None
        remote, self.remote = self.remote, None
        remote.kill()

    def stop(self, until: float) -> None:
        assert self.remote is not None
        self.remote.stop()
        self.stopped_until = until

    def go_on(self) -> None:
        if self.remote is not None and self.stopped_until is not None:
            self.remote.go_on()
        self.stopped_until = None

    def leave(self) -> None:
        assert self.remote is not None
        self.remote.say("leave")
        self.leaving = True

    def left(self) -> bool:
        """Return whether it has left; that takes longer while a stopped member holds a lock."""
        if self.remote is not None and self.leaving and self.remote.over():
            remote, self.remote, self.leaving = self.remote, None, False
            remote.end()
        return self.remote is None


def check_churn(case: Churn, directory: Path) -> Counter[str]:
    """Run it, and compare the journals with the log and with each other."""
    with embedlog.open(directory / "root") as log:
        log.create_topic("t", case.partitions)
    slots = [_Slot(case, directory, number) for number in range(case.members)]
    writer = PipedChild(lambda pipe: _write(case, directory, pipe))
    writer.hear()
    try:
        done = _disturb(case, slots)
        writer.say("stop")
        writer.end()
        for slot in slots:
            slot.go_on()
            if slot.left():
                slot.start()
        ends = _wait_until_read(case, directory)
        for slot in slots:
            if not slot.leaving:
                slot.leave()
        forks.until(lambda: all(slot.left() for slot in slots))
    finally:
        for slot in slots:
            if slot.remote is not None:
                slot.go_on()
                slot.kill()
    done += _compare(ends, directory)
    return done


def _disturb(case: Churn, slots: list[_Slot]) -> Counter[str]:
    done, dice = Counter[str](), random.Random(case.seed)
    until = time.monotonic() + case.seconds
    while (now := time.monotonic()) < until:
        for slot in slots:
            if slot.stopped_until is not None and now >= slot.stopped_until:
                slot.go_on()
        slot = dice.choice(slots)
        if slot.left():
            slot.start()
            done["joins"] += 1
        elif slot.stopped_until is None and not slot.leaving:
            what = dice.choice(("kills", "stops", "leaves"))
            done[what] += 1
            if what == "kills":
                slot.kill()
            elif what == "leaves":
                slot.leave()
            else:
                slot.stop(now + dice.choice(case.stops))
        time.sleep(max(0.0, case.pause - (time.monotonic() - now)))
    return done


def _wait_until_read(case: Churn, directory: Path) -> list[int]:
    with embedlog.open(directory / "root") as log:
        ends = [log.partition("t", number).end_offset() for number in range(case.partitions)]
        watcher = log.consumer(group_id=GROUP)
        expected = [end or None for end in ends]
        partitions = [TopicPartition("t", number) for number in range(case.partitions)]
        forks.until(lambda: [watcher.committed(tp) for tp in partitions] == expected, 30)
    return ends


# What the journals say


@dataclass
class Ownership:
    """One member's time with one partition."""

    life: str
    partition: int
    begin: int
    """The offset it began at."""
    assigned_ns: int
    runs: list[tuple[int, int]] = field(default_factory=list)
    commits: list[tuple[int, int]] = field(default_factory=list)
    """Offset, and when the call began; of those that succeeded."""
    end: str = "killed"


def _ownerships(directory: Path, done: Counter[str]) -> list[Ownership]:
    ownerships = []
    for path in sorted(directory.glob("member-*")):
        having: dict[int, Ownership] = {}
        for line in path.read_text().splitlines():
            kind, *rest = line.split(" ")
            if kind == "x":
                done["refused"] += 1
                continue
            number = int(rest[0])
            if kind == "a":
                having[number] = Ownership(path.name, number, int(rest[1]), int(rest[2]))
                ownerships.append(having[number])
            elif kind == "r":
                having[number].runs.append((int(rest[1]), int(rest[2])))
            elif kind == "c":
                having[number].commits.append((int(rest[1]), int(rest[2])))
            elif kind == "e":
                having.pop(number).end = rest[1]
    return sorted(ownerships, key=lambda ownership: ownership.assigned_ns)


def _compare(ends: list[int], directory: Path) -> Counter[str]:
    done = Counter[str]()
    ownerships = _ownerships(directory, done)
    done["ownerships"] = len(ownerships)
    for ownership in ownerships:
        done[f"ended {ownership.end}"] += 1
        _check_order(ownership)
    for number, end in enumerate(ends):
        own = [ownership for ownership in ownerships if ownership.partition == number]
        _check_commits(own)
        done += _count(own, end)
    return done


def _check_order(ownership: Ownership) -> None:
    due = ownership.begin
    for first, last in ownership.runs:
        assert first == due, f"{ownership}: read {first} when {due} was due"
        due = last + 1
    for (before, _), (after, _) in pairwise(ownership.commits):
        assert before <= after, f"{ownership}: a commit went back"


def _check_commits(own: list[Ownership]) -> None:
    """No commit that began after the partition had another owner was written."""
    for ownership, after in pairwise(own):
        for offset, began in ownership.commits:
            assert began < after.assigned_ns, f"{ownership} committed {offset} as {after} had it"
        if ownership.commits:
            assert after.begin >= ownership.commits[-1][0], f"{after} began before {ownership}"


def _count(own: list[Ownership], end: int) -> Counter[str]:
    """All was read; records read twice were first read by a member that did not leave cleanly."""
    done, readers = Counter[str](), dict[int, list[Ownership]]()
    for ownership in own:
        for first, last in ownership.runs:
            for offset in range(first, last + 1):
                readers.setdefault(offset, []).append(ownership)
    assert sorted(readers) == list(range(end)), "records were never read"
    for offset, owners in readers.items():
        done["records"] += 1
        done["twice"] += len(owners) - 1
        for ownership in owners[:-1]:
            done["twice after a clean end"] += ownership.end == "revoked"
            assert ownership.end != "revoked", f"{offset} of {ownership} was read again: {owners}"
    return done


pytestmark = pytest.mark.stress


def churn(case: Churn) -> dict[str, int]:
    with scratch_directory() as directory:
        done = check_churn(case, directory)
    tell(f"seed {case.seed}, {case.strategy}: {dict(sorted(done.items()))}")
    assert done["twice after a clean end"] == 0
    if max(case.stops) * 1000 < case.session_ms:
        assert (done["ended lost"], done["refused"]) == (0, 0)
    return done


def with_long_sessions(**how) -> Churn:
    """With a session that is longer than any stop: only killed members are removed."""
    return Churn(session_ms=8000, stops=(0.02, 0.2, 0.5), strategy="range", **how)


SECONDS = choose(test=1.0, all=5.0)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Churn(seconds=SECONDS), id="short"),
        pytest.param(with_long_sessions(seconds=SECONDS), id="long", marks=pytest.mark.tier("all")),
    ],
)
def test_under_churn_every_record_is_read_and_commits_are_fenced(case):
    """M22, P14: at least once, in order, none twice of members that left cleanly; and no
    member commits for others.  With short and with long sessions."""
    until_enough(lambda seed: churn(case._replace(seed=seed)), {"ownerships": 20, "records": 300})


@pytest.mark.tier("nightly")
@pytest.mark.parametrize(
    "case",
    [Churn(seed=2), with_long_sessions(seed=3), Churn(seed=4), Churn(seed=5, strategy="range")],
)
def test_churn_for_a_minute(case):
    """As above."""
    done = churn(case)
    assert done["ownerships"] >= 300


def no_fence(monkeypatch):
    monkeypatch.setattr(GroupMember, "_check_not_removed", lambda self, txn: None)
    monkeypatch.setattr(GroupMember, "_check_owned", lambda self, *claim: None)


def no_commit_when_revoked(monkeypatch):
    monkeypatch.setattr(Worker, "commit", lambda self, revoked: True)


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("plant", [no_fence, no_commit_when_revoked])
def test_the_check_finds_what_is_wrong(monkeypatch, plant):
    """The check finds planted bugs."""
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        churn(Churn(seconds=10, strategy="range"))


@pytest.mark.tier("all")
def test_eight_groups_of_eight_members_do_not_disturb_each_other():
    """M17: in threads and processes; each group reads everything, once."""
    with scratch_directory() as directory:
        path = directory / "root"
        tps = sorted(partitions("t", 8))

        def work(pipe):
            with embedlog.open(path) as log:
                crowd = GroupThreads(log, groups=8, members=3)
                pipe.send("here")
                pipe.recv()
                return crowd.end()

        with embedlog.open(path) as log:
            log.create_topic("t", 8)
            fill(log.partition("t", 0), 20, size=5)
        with PipedChild(work) as first, PipedChild(work) as second, embedlog.open(path) as log:
            crowd = GroupThreads(log, groups=8, members=2)
            first.hear(), second.hear()
            for number in range(200):
                fill(log.partition("t", number % 8), 1, size=5)
            ends = [log.partition(*tp).end_offset() for tp in tps]
            watchers = [log.consumer(group_id=f"g{number}") for number in range(8)]
            for watcher in watchers:
                until(lambda watcher=watcher: [watcher.committed(tp) for tp in tps] == ends, 30)
            first.say("stop"), second.say("stop")
            shares = [crowd.end(), first.end(), second.end()]
        everything = {(n, at) for n, end in enumerate(ends) for at in range(end)}
        for number in range(8):
            read = [position for share in shares for position in share[number]]
            assert len(read) == len(everything) and set(read) == everything
