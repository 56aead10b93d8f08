"""Gathering small batches, killed, failing or without power at every operation."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.faulty_files import FALLIBLE
from support.faulty_roots import Case
from support.rebatch_faults import FAULTS
from support.tiers import choose, sample


@pytest.fixture(scope="module")
def counted(directory: Path) -> dict[str, int]:
    return FAULTS.count(directory)


@pytest.mark.parametrize("company", [False, True], ids=["alone", "beside another"])
def test_when_it_is_killed_the_segment_is_the_old_one_or_the_new_one(directory, counted, company):
    """At every operation; the next call finishes it, and no file is left over."""
    total = sum(counted.values())
    cases = [Case(n, "after", company) for n in range(total)]
    assert FAULTS.check_kills(directory, sample(cases, 8)) >= choose(test=5, all=40)


def test_when_it_fails_nothing_is_lost(directory, counted):
    """Any operation, once or from then on; with the same handle all is done after."""
    total = sum(counted.get(kind, 0) for kind in FALLIBLE)
    cases = [Case(n, how) for n in range(total) for how in ("once", "forever")]
    assert FAULTS.check_faults(directory, sample(cases, 6)) >= choose(test=1, all=20)


def test_after_a_power_cut_the_segment_is_the_old_one_or_the_new_one(directory):
    """At every cut; what was done before is durable."""
    limit = choose(test=20, all=400)
    assert FAULTS.check_power_cuts(FAULTS.record(directory), limit, directory) >= limit / 4
