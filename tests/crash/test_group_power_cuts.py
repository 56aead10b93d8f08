"""P4, P5: what a group committed survives a power cut, as far as was promised."""

from __future__ import annotations

import pytest
from support.case_workers import share_out
from support.power_cut_commits import CommitCut, cut_commits


@pytest.mark.parametrize(
    "states", [300, pytest.param(6_000, marks=pytest.mark.tier("nightly"))], ids="states={}".format
)
@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_commits_survive_a_power_cut(durability, states, record_property):
    """P4: with fsync, each that returned; P5: with os, those of the last checkpoint, and never
    one past the end of the log; and the group reads on from there."""
    lives = [(seed, subscribed) for seed in range(states // 300) for subscribed in (True, False)]
    cases = [CommitCut(durability, subscribed, 150, seed=seed) for seed, subscribed in lives]
    outcome = share_out(cut_commits, cases)
    record_property("states", str(outcome))

    assert not outcome.findings, str(outcome)
    assert outcome.distinct >= states * 0.8, f"-> {outcome.distinct} states"
