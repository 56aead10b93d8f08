"""A compaction that is killed, fails or loses power anywhere: the old log or the new one (D24)."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import compaction_faults, forks
from support.forks import WORKERS, tell
from support.tiers import choose, sample

STATES = 24
"""How many the small tiers check."""


@pytest.fixture(
    autouse=True,
    params=[False, pytest.param(True, marks=pytest.mark.tier("all"))],
    ids=["bytes", "typed"],
)
def typed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic of bytes, and a typed one."""
    monkeypatch.setattr(compaction_faults, "typed", request.param)


@pytest.mark.parametrize("thorough", [12, pytest.param(1, marks=pytest.mark.tier("nightly"))])
def test_whatever_a_kill_leaves_is_the_old_log_or_the_new_one(
    directory: Path, thorough: int
) -> None:
    """D24, D25, P1: it opens by itself, reads the same, has no stray file, and compacts again.

    Before every operation, in the middle of every write, and between a write and what follows.
    """
    options = {"directory": directory, "parts": WORKERS, "thorough": thorough, "most": STATES}
    counts = forks.spread(range(WORKERS), compaction_faults.check_file_states, **options)
    operations, states, _ = counts[0]
    checked = sum(count[2] for count in counts)
    tell(f"{operations} operations, {states} states, {checked} checked")
    assert states >= 120
    assert checked == len(sample(range(states), STATES))


@pytest.mark.parametrize("forever", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize("step", [6, pytest.param(1, marks=pytest.mark.tier("nightly"))])
def test_every_operation_of_a_compaction_may_fail(
    directory: Path, forever: bool, step: int
) -> None:
    """P8, P9, P10: the log is as it was; when the fault is over the next one goes through."""
    cases = sample(compaction_faults.failures(directory, step, forever=forever), 16)
    errors = forks.spread(cases, compaction_faults.check_failure, directory=directory)
    tell(f"{len(cases)} faults: { {name: errors.count(name) for name in sorted(set(errors))} }")
    assert sum(map(bool, errors)) >= len(cases) / 3


def test_a_compaction_may_be_interrupted_after_any_commit(directory: Path) -> None:
    """P1: what was swapped in stays, even if the call never returned."""
    calls = sample(range(1, 12), 3)
    forks.spread(calls, compaction_faults.check_lost_answer, directory=directory)


def test_a_compaction_may_be_cut_short_anywhere(directory: Path) -> None:
    """D22, D26: a truncation at any of its chunks stands, and loses nothing that was before it."""
    chunks = sample(range(1, 30), 6)
    fenced = forks.spread(chunks, compaction_faults.check_truncation, directory=directory)
    assert sum(fenced) >= choose(test=1, all=5)


@pytest.mark.parametrize(
    "limit", [choose(test=60, all=900), pytest.param(20_000, marks=pytest.mark.tier("nightly"))]
)
def test_the_power_may_go_at_any_moment(directory: Path, limit: int) -> None:
    """D24, P4: what was flushed before the compaction is readable after it, by its last values."""
    options = {"directory": directory, "limit": limit, "parts": WORKERS}
    seen = sum(forks.spread(range(WORKERS), compaction_faults.check_power_cuts, **options))
    tell(f"{seen} states")
    assert seen >= 0.4 * limit
