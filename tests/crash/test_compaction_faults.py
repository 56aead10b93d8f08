"""A compaction that is killed, fails or loses power anywhere: the old log or the new one (D24)."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import compaction_faults, forks
from support.forks import WORKERS, tell
from support.tiers import choose, sample

MOMENTS = 60
"""Those that the small tiers look at."""


@pytest.mark.parametrize("thorough", [12, pytest.param(1, marks=pytest.mark.tier("nightly"))])
def test_whatever_a_kill_leaves_is_the_old_log_or_the_new_one(
    directory: Path, thorough: int
) -> None:
    """D24, D25, P1: it opens by itself, reads the same, has no stray file, and compacts again.

    Before every operation, in the middle of every write, and between a write and what follows.
    """
    found = forks.spread(range(WORKERS), _moments, directory=directory, thorough=thorough)
    total, different, _ = found[0]
    looked = sum(one[2] for one in found)
    tell(f"{total} operations, {different} states, {looked} looked at")
    assert different >= 120
    assert looked == len(sample(range(different), MOMENTS))


def _moments(part: int, directory: Path, thorough: int) -> tuple[int, int, int]:
    return compaction_faults.check_moments(directory, part, WORKERS, thorough, MOMENTS)


@pytest.mark.parametrize("each", [40, pytest.param(1, marks=pytest.mark.tier("nightly"))])
def test_a_compaction_may_be_killed(directory: Path, each: int) -> None:
    """P1: for real, so that what the files held is what is left."""
    total, _ = compaction_faults.moments(directory / f"count-{each}")
    killed = forks.spread(
        sample(range(0, total, each), 10), compaction_faults.check_kill, directory=directory
    )
    tell(f"{sum(killed)} kills at {total} operations")
    assert sum(killed) >= 0.7 * len(killed)


@pytest.mark.parametrize("forever", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize("each", [6, pytest.param(1, marks=pytest.mark.tier("nightly"))])
def test_every_operation_of_a_compaction_may_fail(
    directory: Path, forever: bool, each: int
) -> None:
    """P8, P9, P10: the log is as it was; when the fault is over the next one goes through."""
    cases = sample(compaction_faults.failures(directory, each, forever=forever), 40)
    told = forks.spread(cases, compaction_faults.check_failure, directory=directory)
    tell(f"{len(cases)} faults: { {name: told.count(name) for name in sorted(set(told))} }")
    assert sum(map(bool, told)) >= len(cases) / 3


def test_a_compaction_may_be_interrupted_after_any_commit(directory: Path) -> None:
    """P1: what was swapped in stands, though nobody was told so."""
    calls = sample(range(1, 12), 5)
    forks.spread(calls, compaction_faults.check_lost_answer, directory=directory)


def test_a_compaction_may_be_cut_short_anywhere(directory: Path) -> None:
    """D22, D26: a truncation at any of its chunks stands, and loses nothing that was before it."""
    chunks = sample(range(1, 30), 10)
    noticed = forks.spread(chunks, compaction_faults.check_cut, directory=directory)
    assert sum(noticed) >= choose(test=2, all=5)


@pytest.mark.parametrize(
    "limit", [choose(test=150, all=900), pytest.param(20_000, marks=pytest.mark.tier("nightly"))]
)
def test_the_power_may_go_at_any_moment(directory: Path, limit: int) -> None:
    """D24, P4: what was flushed before the compaction is there after it, by its last values."""
    seen = sum(forks.spread(range(WORKERS), _cuts, directory=directory, limit=limit))
    tell(f"{seen} states")
    assert seen >= 0.4 * limit


def _cuts(part: int, directory: Path, limit: int) -> int:
    return compaction_faults.check_power_cuts(directory, limit, part, WORKERS)
