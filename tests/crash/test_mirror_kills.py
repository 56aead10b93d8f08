"""Mirrors, killed, failing or without power at every operation: nothing lost, nothing doubled."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.faulty_files import FALLIBLE
from support.faulty_roots import Case, RootFaults
from support.mirror_faults import MERGES, MIRRORS, run_chaos
from support.patience import until_enough
from support.tiers import choose, sample

MOST = 200
"""How many operations of one mirror are tried."""


@pytest.fixture
def own(directory: Path, faults: RootFaults) -> Path:
    """A directory for each kind of mirror."""
    path = directory / type(faults).__name__
    path.mkdir(exist_ok=True)
    return path


BOTH = pytest.mark.parametrize("faults", [MIRRORS, MERGES], ids=["copies", "merges"])


@BOTH
@pytest.mark.parametrize("company", [False, True], ids=["alone", "beside another"])
def test_a_mirror_that_is_killed_goes_on_where_it_was(own: Path, faults: RootFaults, company: bool):
    """At every operation: records, settings, schemas, starts and groups are those of the source."""
    total = sum(faults.count(own).values())
    step = max(total // MOST, 1)  # All of them would take an hour.
    cases = [Case(n, ("before", "middle", "after")[n % 3], company) for n in range(0, total, step)]
    assert faults.check_kills(own, sample(cases, 6)) >= choose(test=3, all=80)


@BOTH
def test_a_mirror_that_fails_loses_nothing(own: Path, faults: RootFaults):
    """Any operation, once or from then on; a repetition completes the copy."""
    counted = faults.count(own)
    total = sum(counted.get(kind, 0) for kind in FALLIBLE)
    step = max(total // MOST, 1)
    cases = [Case(n, ("once", "forever")[n // step % 2]) for n in range(0, total, step)]
    assert faults.check_faults(own, sample(cases, 6)) >= choose(test=1, all=20)


@BOTH
@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_after_a_power_cut_a_mirror_goes_on_where_the_copy_ends(
    own: Path, faults: RootFaults, durability: str
):
    """The target may lose what was not flushed, and gets it again."""
    limit = choose(test=10, all=300)
    recording = faults.record(own, durability)
    assert faults.check_power_cuts(recording, limit, own, durability) >= limit / 4


@pytest.mark.parametrize("merge", [False, True], ids=["copies", "merges"])
def test_writers_and_mirrors_that_are_killed_at_random_leave_the_same_records(
    tmp_path: Path, merge: bool
):
    """Real processes and SIGKILL, at any instant."""
    least = choose(test=1, all=20)

    def run(seed: int):
        return run_chaos(tmp_path / str(seed), choose(test=1, all=20), seed, merge=merge)

    until_enough(run, {"writers killed": least, "mirrors killed": least, "records": 100})
