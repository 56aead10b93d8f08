"""Damage to one copy: its records are read from another one, and the copy is written again.

Each case damages one segment of one copy, in one of the moments in which that can happen, and
then does one of four things first.  If it was the only copy, it ends as in a log in one directory.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

import embedlog
from embedlog import Log
from embedlog.config import MaintenanceConfig
from embedlog.errors import CorruptionError, EmbedlogError
from embedlog.files import Files
from embedlog.replication.catch_up import repair_copies
from embedlog.replication.jobs import ReplicationJob
from embedlog.replication.root import ReplicatedRoot
from embedlog.root.repair import repair_root
from support.failing_disks import FailingDisks, count_commits
from support.forks import Child, in_memory
from support.replicas import assignment, bring_back, numbered, send

SENT = numbered(b"record", 30)
SEGMENT_BYTES = 4096


class Place(NamedTuple):
    """A batch in a segment file."""

    path: str
    """The file, relative to the directory."""
    position: int
    head_size: int
    size: int


def overwrite(file: Path, position: int, data: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(position)
        opened.write(data)


def flip(file: Path, position: int) -> None:
    overwrite(file, position, bytes([file.read_bytes()[position] ^ 4]))


DAMAGES: dict[str, Callable[[Path, Place], object]] = {
    "a bit in a head": lambda file, at: flip(file, at.position + at.head_size // 2),
    "a bit in a column": lambda file, at: flip(file, at.position + at.head_size + 1),
    "a bit in the schema": lambda file, _: flip(file, file.read_bytes().index(b"value")),
    "a bit in the metadata": lambda file, _: flip(file, file.read_bytes().index(b"base_offset")),
    "a page of zeros": lambda file, at: overwrite(file, at.position, bytes(512)),
    "cut in a batch": lambda file, at: os.truncate(file, at.position + at.size // 2),
    "cut after a batch": lambda file, at: os.truncate(file, at.position),
    "emptied": lambda file, _: os.truncate(file, 0),
    "a deleted segment": lambda file, _: file.unlink(),
    "a deleted partition": lambda file, _: shutil.rmtree(file.parent),
}
FIRST = ("read", "append", "verify", "repair", "read only")
MOMENTS = ("running", "closed", "rebooted")
SEGMENTS = ("sealed", "active")
CASES = list(itertools.product(DAMAGES, SEGMENTS, MOMENTS, FIRST))
COPIES = [(role, count) for role in ("leader", "follower") for count in (2, 3)]


def open_log(paths: list[Path]) -> Log:
    return embedlog.open(paths if len(paths) > 1 else paths[0], maintenance=False)


def begin(paths: list[Path], copies: int) -> tuple[Log, dict[str, list[Place]]]:
    """Return a log with flushed records, and the batches of a sealed and of the active segment."""
    log = open_log(paths)
    options = {"replicas": [tuple(range(1, copies + 1))]} if len(paths) > 1 else {}
    log.create_topic("t", config={"segment.bytes": SEGMENT_BYTES}, **options)
    send(log, "t", SENT)
    log.flush()
    partition = log.root.partition("t", 0)
    places = {}
    for info in partition.segments.values():
        file, path = partition.open_segment(info), partition.path_of(info)
        batches = file.scan(file.start, info.end_position or file.size())
        found = [Place(path, each.position, each.head_size, each.size) for each in batches]
        places.setdefault("sealed" if info.sealed else "active", found)
    assert places.keys() == set(SEGMENTS)
    return log, places


@contextmanager
def damaged(log: Log, file: Path, place: Place, damage: str, moment: str, paths: list[Path]):
    """Damage a file, while the log is open or closed, or before a reboot; yields the log then."""
    if moment == "running":
        DAMAGES[damage](file, place)
        yield log
        log.close()
        return
    log.close()
    DAMAGES[damage](file, place)
    with pytest.MonkeyPatch.context() as patch:
        if moment == "rebooted":
            patch.setattr(Files, "boot_id", lambda _: "another")
        with open_log(paths) as log:
            yield log


def read(log: Log) -> list[bytes]:
    return [record.value for record in log.topic("t")]


def keep_house(log: Log) -> None:
    job = ReplicationJob(MaintenanceConfig.parse({}))
    for _ in range(3):
        bring_back(log)
        job.run(log.root, lambda: False)


def do(log: Log, what: str) -> object:
    if what == "read":
        return read(log)
    if what == "read only":
        with embedlog.open(log.path, mode="r") as reader:
            return read(reader)
    if what == "append":
        return send(log, "t", [b"more"], retries=0)[0].offset
    return (
        log.housekeeping.verify(replicas=True)
        if what == "verify"
        else log.housekeeping.repair(dry_run=False)
    )


def check(tmp_path: Path, case: tuple[str, str, str, str], role: str, count: int) -> None:
    """Nothing that was acknowledged is lost, and all copies are equal and whole in the end."""
    damage, segment, moment, first = case
    paths = [tmp_path / str(number) for number in range(1, count + 1)]
    log, places = begin(paths, count)
    isr = assignment(log, "t").isr
    directory = paths[isr[0] - 1 if role == "leader" else isr[-1] - 1]
    place = places[segment][len(places[segment]) // 2]
    file = directory / place.path
    sent = list(SENT)
    with damaged(log, file, place, damage, moment, paths) as log:
        for number, what in enumerate((first, *FIRST)):
            found = do(log, what)
            is_unseen = number == 0 and moment != "rebooted"
            if what.startswith("read"):
                assert found == sent
            elif what == "append":
                assert found == len(sent)
                sent.append(b"more")
            elif what == "verify" and is_unseen:
                assert [each.copy for each in found] == [str(directory)]
            elif what == "repair" and is_unseen:
                assert "the copy is made again from a good one" in "".join(found)
        keep_house(log)
        assert sorted(assignment(log, "t").isr) == sorted(isr)
        assert read(log) == sent
        assert log.housekeeping.verify() == log.housekeeping.verify(replicas=True) == []
        assert log.housekeeping.repair() == []
    copies = [
        {str(each.relative_to(path)): each.read_bytes() for each in path.glob("topics/t-*/0/*")}
        for path in paths
    ]
    assert all(copy == copies[0] for copy in copies), "the copies differ"


def outcomes(paths: list[Path], base: Path, case: tuple[str, str, str, str]) -> list[object]:
    """Return what is seen of a damaged log of which there is one copy."""
    damage, segment, moment, first = case
    log, places = begin(paths, 1)
    place = places[segment][len(places[segment]) // 2]
    seen: list[object] = []
    with damaged(log, base / place.path, place, damage, moment, paths) as log:
        for what in (first, "repair", "read", "append", "read"):
            try:
                found = do(log, what)
                seen.append(len(found) > 0 if what in ("verify", "repair") else found)
            except EmbedlogError:
                seen.append("an error")
            if len(paths) > 1:
                keep_house(log)  # a directory may be offline for a file that was deleted
            if what == "verify":
                seen.pop()  # it compares copies
        assert log.housekeeping.verify() == []
    return seen


# Damage in several copies, and a repair that is killed

Harm = tuple[int, int, str]
"""The directory, the batch of the sealed segment, and what is done to it."""
SPREAD: dict[str, tuple[list[Harm], set[int]]] = {
    "different batches": ([(1, 1, "a bit in a head"), (2, 4, "a bit in a column")], set()),
    "one begins wrongly": ([(1, 0, "a bit in the schema"), (2, 2, "cut in a batch")], set()),
    "one is cut short": ([(1, 2, "cut after a batch"), (2, 1, "a bit in a column")], set()),
    "all are cut short": ([(1, 2, "cut after a batch"), (2, 5, "cut in a batch")], {5, 6, 7}),
    "one is missing": ([(1, 0, "a deleted segment"), (2, 2, "a bit in a head")], {2}),
    "the same batch": ([(1, 2, "a bit in a head"), (2, 2, "a bit in a column")], {2}),
    "the same batch, and others": (
        [(1, 2, "a bit in a column"), (2, 2, "a bit in a head"), (1, 6, "a bit in a head")],
        {2},
    ),
}
"""With the records of this segment that no copy has."""


def spread(paths: list[Path], kind: str) -> list[bytes]:
    """Damage both copies of a log; return the records that one of them has."""
    log, places = begin(paths, 2)
    log.close()
    assert len(places["sealed"]) == 8
    harms, lost = SPREAD[kind]
    for directory, batch, damage in harms:
        place = places["sealed"][batch]
        DAMAGES[damage](paths[directory - 1] / place.path, place)
    return [value for number, value in enumerate(SENT) if number not in lost]


def repair_and_die(paths: list[Path], at: int | None) -> int:
    """Repair a log, and die before an operation; return how many there are."""
    disks = FailingDisks()
    count_commits(disks)
    root = ReplicatedRoot(
        list(map(str, paths)),
        mode="rw",
        durability="os",
        visibility="append",
        clock=lambda: time.time_ns() // 1_000_000,
        lock_timeout=20.0,
        auto_create=False,
        unsafe_filesystem=False,
        files=disks,
    )
    root.topics()
    disks.operations, disks.kill_at = 0, at
    repair_root(root, False, without=repair_copies(root)[1])
    return disks.operations


def check_killed(case: tuple[str, int]) -> None:
    """A repair that was killed can be repeated, and a reader sees no less than before."""
    kind, at = case
    with tempfile.TemporaryDirectory(dir=in_memory()) as base:
        paths = [Path(base, "1"), Path(base, "2")]
        kept = spread(paths, kind)
        Child(lambda: repair_and_die(paths, at)).end()
        with open_log(paths) as log:
            with suppress(*(() if kept == SENT else (CorruptionError,))):
                assert set(kept) <= set(read(log))
            log.housekeeping.repair(dry_run=False)
            keep_house(log)
            assert read(log) == kept
            assert log.housekeeping.verify() == log.housekeeping.verify(replicas=True) == []
