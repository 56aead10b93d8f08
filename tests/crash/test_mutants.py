"""The checks of this folder find bugs that were planted: else their silence means nothing."""

from __future__ import annotations

import errno
from functools import partial
from typing import Any

import pytest
from support.case_workers import Outcome, Progress, Work, share_out
from support.faulty_files import FaultyFiles, after_reboot
from support.mutants import MUTANTS, Mutant
from support.power_cut import SECTOR
from support.power_cut_workload import Cut, cut_everywhere, cut_the_recovery
from support.roots import abandon, encoded, make_log, open_root, rows, segment_files
from test_damaged_databases import STATE, damage_databases
from test_damaged_segments import mutate_in_memory, mutate_on_disk

from embedlog.errors import DurabilityError
from embedlog.partition import partition_log


def fail_a_flush(tmp_path: Any, outcome: Outcome, progress: Progress) -> None:
    """What a failed flush left in doubt is never shown, and no write follows it (P9)."""
    made = []

    def files(*args: Any, **options: Any) -> FaultyFiles:
        made.append(FaultyFiles(*args, **options))
        return made[-1]

    root = open_root(tmp_path / "root", files=files)
    # One batch is flushed and published under the lock, several are published twice.
    partition_log.UNDISPUTED = 1
    for topic, batches in (("t", 1), ("u", 2)):
        log = make_log(root, topic=topic)
        log.append([encoded(b"good")], durability="fsync")
        made[0].fail_at(0, errno.EIO, only={"sync"})
        outcome.count += 1
        for _ in range(2):
            try:
                log.append([encoded(b"in doubt")] * batches, durability="fsync")
                outcome.findings.append("appended after a failed flush")
            except DurabilityError:
                pass
            if [row[3] for row in rows(log)] != [b"good"]:
                outcome.findings.append(f"shown: {rows(log)}")
    abandon(root)


def tear_a_batch(tmp_path: Any, outcome: Outcome, progress: Progress) -> None:
    """A batch in preallocated space that lost any sector in a power cut is no record (P4, P12)."""
    root = open_root(tmp_path / "root")
    log = make_log(root)
    log.append([encoded(b"good")], durability="fsync")
    start = log.tail().log_end_position
    log.append([encoded(*(b"%d" % number * 400 for number in range(5)))])
    stop = log.tail().log_end_position
    abandon(root)
    (path,) = segment_files(tmp_path / "root")
    whole = path.read_bytes()
    assert len(whole) > stop + SECTOR
    for first in range(start, stop, SECTOR):
        edge = first - first % SECTOR
        torn = range(max(edge, start), min(edge + SECTOR, stop))
        path.write_bytes(whole[: torn.start] + bytes(len(torn)) + whole[torn.stop :])
        outcome.count += 1
        root = open_root(tmp_path / "root", files=after_reboot(f"boot {first}"))
        with outcome.finding(f"without the bytes {torn}"):
            assert [row[3] for row in rows(root.partition("t", 0))] == [b"good"]
        abandon(root)


CHECKS: dict[str, tuple[Work, list[Any]]] = {
    "fsync": (cut_everywhere, [Cut(seed, 150, 1.0) for seed in range(6)]),
    # Found by a search: most seeds leave no torn batch that only its checksum reveals.
    "os": (cut_everywhere, [Cut(seed, 150, 0.1) for seed in (100, 101, 201, 208, 224, 239)]),
    "uniform": (cut_everywhere, [Cut(seed, 150, 0.3, uniform=True) for seed in range(6)]),
    "recovery": (
        cut_the_recovery,
        [Cut(seed, 400, 0.0, uniform=True) for seed in range(204, 212)],
    ),
    "memory": (mutate_in_memory, [("plain", 0), ("zstd", 0)]),
    "disk": (mutate_on_disk, [(1, 40, "another boot")]),
    "state": (damage_databases, [(seed, 40, STATE, False) for seed in range(4)]),
}


def check_of(name: str, tmp_path: Any) -> tuple[Work, list[Any]]:
    """Return a check, and its cases."""
    alone = {"failed flush": fail_a_flush, "torn batch": tear_a_batch}
    return (alone[name], [tmp_path]) if name in alone else CHECKS[name]


def planted(mutant: Mutant, work: Work, case: Any, outcome: Outcome, progress: Progress) -> None:
    outcome.note("not planted")
    for change in mutant.changes:
        change()
    outcome.tally.clear()
    work(case, outcome, progress)


@pytest.mark.tier("all")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_planted_bug_is_found(mutant, tmp_path, record_property):
    """Every mutant must be caught by the check that is named for it."""
    work, cases = check_of(mutant.check, tmp_path)
    outcome = Outcome()
    # One by one, until one of them finds it.
    for first in range(0, len(cases), 2):
        outcome.add(share_out(partial(planted, mutant, work), cases[first : first + 2]))
        if outcome.findings:
            break
    record_property("states", f"found after {outcome}")

    assert outcome.findings, f"survived {outcome}"
    assert "not planted" not in outcome.tally, str(outcome)


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    "check", ["fsync", "os", "uniform", "recovery", "disk", "failed flush", "torn batch"]
)
def test_without_a_planted_bug_nothing_is_found(check, tmp_path):
    """The same small checks are silent on what is not mutated."""
    work, cases = check_of(check, tmp_path)
    outcome = share_out(work, cases[:2])

    assert not outcome.findings, str(outcome)
    assert outcome.count > 0
