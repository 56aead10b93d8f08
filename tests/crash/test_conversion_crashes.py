"""A conversion, killed, failing or without power at every operation: nothing lost or doubled."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.conversion_faults import FAULTS
from support.faulty_files import FALLIBLE
from support.faulty_roots import Case
from support.tiers import choose, sample


@pytest.fixture(scope="module")
def counted(directory: Path) -> dict[str, int]:
    return FAULTS.count(directory)


@pytest.mark.parametrize("company", [False, True], ids=["alone", "beside another"])
def test_when_it_is_killed_it_goes_on_where_it_was(directory, counted, company):
    """At every operation: each record is there once, in its partition and order."""
    total = sum(counted.values())
    cases = [Case(n, "after", company) for n in range(total)]
    assert FAULTS.check_kills(directory, sample(cases, 6)) >= choose(test=3, all=40)


def test_when_it_fails_nothing_is_lost(directory, counted):
    """Any operation, once or from then on; a repetition completes it."""
    total = sum(counted.get(kind, 0) for kind in FALLIBLE)
    cases = [Case(n, how) for n in range(total) for how in ("once", "forever")]
    assert FAULTS.check_faults(directory, sample(cases, 6)) >= choose(test=1, all=20)


def test_after_a_power_cut_it_goes_on_where_it_was(directory):
    """Records and offsets are flushed together; what was acknowledged is durable."""
    limit = choose(test=20, all=400)
    assert FAULTS.check_power_cuts(FAULTS.record(directory), limit, directory) >= limit / 4
