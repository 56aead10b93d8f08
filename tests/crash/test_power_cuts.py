"""P4, P5, P6: what a power cut leaves opens by itself and keeps what was promised."""

from __future__ import annotations

from typing import Any

import pytest
from support.case_workers import Work, share_out
from support.power_cut_workload import Cut, cut_everywhere, cut_the_recovery
from support.tiers import choose

EACH = choose(test=20, all=400)
"""States of each workload: the few of a small tier come from as many workloads as possible."""


def cases(states: int, cuts: int, synced: tuple[float, ...], first: int = 0) -> list[Cut]:
    """Enough workloads for so many states; some more, since a small one may have fewer."""
    count = states * (102 if cuts > 100 else 112) // 100 // cuts + 1
    return [
        Cut(first + seed, cuts, synced[seed % len(synced)], uniform=seed % 4 == 3)
        for seed in range(count)
    ]


def check(work: Work, cuts: list[Cut], states: int, record_property: Any) -> None:
    """Fail if a state is wrong, or if there are fewer of them."""
    outcome = share_out(work, cuts)
    record_property("states", str(outcome))
    assert not outcome.findings, str(outcome)
    assert outcome.distinct >= states, f"-> {outcome.distinct} states"


@pytest.mark.parametrize(
    "states",
    [choose(test=40, all=20_000), pytest.param(1_000_000, marks=pytest.mark.tier("nightly"))],
    ids="states={}".format,
)
def test_what_was_acknowledged_under_fsync_survives_a_power_cut(states, record_property):
    """P4: it opens by itself, each partition is a prefix, and no acknowledged record is lost."""
    check(cut_everywhere, cases(states, EACH, (1.0, 1.0, 0.6)), states, record_property)


@pytest.mark.parametrize(
    "states",
    [choose(test=20, all=10_000), pytest.param(500_000, marks=pytest.mark.tier("nightly"))],
    ids="states={}".format,
)
def test_without_fsync_a_prefix_survives_that_holds_what_was_flushed(states, record_property):
    """P5: never a hole, never less than the last flush, never a record that was not sent."""
    check(
        cut_everywhere,
        cases(states, EACH, (0.0, 0.0, 0.2), first=1_000_000),
        states,
        record_property,
    )


@pytest.mark.parametrize(
    "states",
    [choose(test=25, all=2_000), pytest.param(50_000, marks=pytest.mark.tier("nightly"))],
    ids="states={}".format,
)
def test_a_recovery_that_is_cut_short_is_done_again(states, record_property):
    """P6: the second recovery finds what the first one kept, and nothing it had cut."""
    check(
        cut_the_recovery,
        cases(states, choose(test=25, all=100), (0.0, 1.0, 0.5), first=2_000_000),
        states,
        record_property,
    )


@pytest.mark.tier("all")
def test_a_directory_that_a_power_cut_lost_is_flushed_with_the_first_file_in_it():
    """P6: the root's entry of ``topics`` was never on the disk, and the next open made it again."""
    outcome = share_out(cut_the_recovery, [Cut(2_000_011, 100, 0.5, 20, uniform=True)])

    assert not outcome.findings, str(outcome)
    assert outcome.distinct > 0


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(
            Cut(24, 25, 1.0),
            id="an append after a gap that a truncation left",
            marks=pytest.mark.tier("all"),
        ),
        pytest.param(
            Cut(1_000_010, 25, 0.0),
            id="a close after the writer of a partition died",
            marks=pytest.mark.tier("all"),
        ),
    ],
)
def test_what_is_not_promised_is_not_demanded(cut):
    """P5: a close flushes what its handle appended; a truncation keeps the gap before its end."""
    outcome = share_out(cut_everywhere, [cut])

    assert not outcome.findings, str(outcome)
    assert outcome.distinct > 0
