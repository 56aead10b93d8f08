"""A smaller tier runs an evenly spread sample of the cases; the larger tiers run them all."""

from __future__ import annotations

from itertools import pairwise

import pytest
from support import tiers
from support.tiers import TIERS, choose, runs, sample


@pytest.fixture(params=TIERS)
def tier(request, monkeypatch):
    monkeypatch.setattr(tiers, "_tier", request.param)
    return request.param


def test_a_tier_runs_what_the_smaller_ones_run(tier):
    """The tiers are ordered from quick to nightly."""
    assert [name for name in TIERS if runs(name)] == list(TIERS[: TIERS.index(tier) + 1])


def test_the_value_is_of_this_tier_or_of_the_nearest_smaller_one(tier):
    """A tier smaller than all that have a value uses the value of the smallest one."""
    assert choose(nightly=9, test=4, all=8) == {"all": 8, "nightly": 9}.get(tier, 4)
    assert choose(quick=1, all=3) == {"quick": 1, "test": 1}.get(tier, 3)


@pytest.mark.parametrize("count", [0, 1, 7, 100])
def test_the_larger_tiers_try_all_cases(monkeypatch, count):
    """`sample` returns every case in the tiers `all` and `nightly`."""
    for tier in ("all", "nightly"):
        monkeypatch.setattr(tiers, "_tier", tier)
        assert sample(range(count), 5) == list(range(count))


@pytest.mark.parametrize("tier", ["quick", "test"])
@pytest.mark.parametrize(("count", "most"), [(3, 5), (5, 5), (6, 5), (100, 2), (1000, 30)])
def test_a_sample_is_spread_evenly_with_both_ends(tier, monkeypatch, count, most):
    """It has at most `most` cases in order, with small gaps, and is the same each time."""
    monkeypatch.setattr(tiers, "_tier", tier)

    chosen = sample(range(count), most)

    assert len(chosen) == min(count, most)
    assert chosen == sorted(set(chosen)) == sample(range(count), most)
    assert (chosen[0], chosen[-1]) == (0, count - 1)
    if most > 2:
        gaps = [after - before for before, after in pairwise(chosen)]
        assert max(gaps) <= 2 * count / (most - 2) + 1


def test_a_sample_of_one_is_the_first(monkeypatch):
    """At most one is not both ends."""
    monkeypatch.setattr(tiers, "_tier", "test")

    assert sample(range(100), 1) == sample(range(1), 1) == [0]


def test_a_sample_of_kinds_that_take_turns_has_all_of_them(monkeypatch):
    """A sample at equal distances could contain only one kind."""
    monkeypatch.setattr(tiers, "_tier", "test")

    chosen = sample([("once", "forever")[number % 2] for number in range(400)], 40)

    assert min(chosen.count("once"), chosen.count("forever")) >= 10
