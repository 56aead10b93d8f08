"""Copying a partition at its offsets, killed, failing or without power at every operation."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import forks
from support.copy_faults import FAULTS
from support.faulty_files import FALLIBLE
from support.faulty_roots import Case
from support.forks import tell
from support.mutants import Change
from support.tiers import choose, sample


@pytest.fixture(scope="module")
def counted(directory: Path) -> dict[str, int]:
    return FAULTS.count(directory)


@pytest.mark.parametrize("company", [False, True], ids=["alone", "beside another"])
def test_when_it_is_killed_the_copy_is_a_prefix(directory, counted, company):
    """At every operation; the next call goes on exactly there."""
    total = sum(counted.values())
    cases = [Case(n, "after", company) for n in range(total)]
    assert FAULTS.check_kills(directory, sample(cases, 10)) >= choose(test=6, all=100)


def test_when_it_fails_nothing_is_lost(directory, counted):
    """Any operation, once or from then on; with the same handle all is done after."""
    total = sum(counted.get(kind, 0) for kind in FALLIBLE)
    cases = [Case(n, how) for n in range(total) for how in ("once", "forever")]
    assert FAULTS.check_faults(directory, sample(cases, 10)) >= choose(test=2, all=60)


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_after_a_power_cut_the_copy_is_a_prefix(directory, durability):
    """At every cut; with fsync it has all that was acknowledged, gaps or not."""
    limit = choose(test=30, all=1500)
    recording = FAULTS.record(directory, durability)
    assert FAULTS.check_power_cuts(recording, limit, directory, durability) >= limit / 6


APPEND_AT, APPEND = "embedlog.partition.append_at", "embedlog.partition.append"
BUGS = {
    "a gap is not named": Change(f"{APPEND}:PendingAppend.add", {"gap=base - expected": "gap=0"}),
    "the manifest does not learn of gaps": Change(
        f"{APPEND_AT}:_note_gaps", {"dense=False": "dense=True"}
    ),
    "a copy gets epochs of its own": Change(
        f"{APPEND}:PendingAppend.add", {"epoch if batch.leader_epoch is None else": "epoch or"}
    ),
    "a batch is read with its offsets as rows": Change(
        "embedlog.batch.add_headers:placed", {"if flags & EXPLICIT_OFFSETS else": "if 0 else"}
    ),
}


def hunt(bug: Change, directory: Path) -> str | None:
    directory.mkdir()
    bug()
    try:
        recording = FAULTS.record(directory, "fsync")
        FAULTS.check_power_cuts(recording, 60, directory, "fsync")
    except AssertionError as error:
        return str(error).strip().splitlines()[0]
    return None


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(directory, bug):
    """The checks of copies find what they are for."""
    message = forks.call(lambda: hunt(BUGS[bug], directory / bug), patience=300)
    tell(f"{bug}: {message}")
    assert message is not None
