"""A compaction that is killed, fails or loses power anywhere: the old log or the new one (D24)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from support import forks, squeezing
from support.cruel import scratch_directory
from support.forks import tell
from support.squeezing import ERRORS, Expected, Failure, Kill


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with scratch_directory() as path:
        yield path


@pytest.fixture(scope="module")
def wanted(directory: Path) -> Expected:
    return squeezing.expected(directory / "expected")


def test_a_compaction_may_be_killed_at_every_operation(directory: Path, wanted: Expected) -> None:
    """D24, D25, P1: it opens by itself, reads the same, has no stray file, and compacts again."""
    total = squeezing.count(directory)
    # Half a write, and what else has a middle, at every third.
    cases = [Kill(number, "before") for number in range(total)]
    cases += [Kill(number, "middle") for number in range(0, total, 3)]
    check = partial(squeezing.check_kill, directory=directory, wanted=wanted)
    killed = forks.spread(cases, check)
    tell(f"{sum(killed)} kills at {total} operations")
    assert sum(killed) >= 0.9 * len(cases)


@pytest.mark.parametrize(("forever", "each"), [(False, 1), (True, 4)], ids=["once", "for ever"])
def test_every_operation_of_a_compaction_may_fail(
    directory: Path, wanted: Expected, forever: bool, each: int
) -> None:
    """P8, P9, P10: the log is as it was; when the fault is over the next one goes through."""
    total = squeezing.count(directory)
    cases = [
        Failure(number, ERRORS[number % len(ERRORS)], forever) for number in range(0, total, each)
    ]
    check = partial(squeezing.check_failure, directory=directory, wanted=wanted)
    told = forks.spread(cases, check)
    tell(f"{len(cases)} faults: { {name: told.count(name) for name in sorted(set(told))} }")
    assert sum(map(bool, told)) >= len(cases) / 3


def test_the_power_may_go_at_any_moment(directory: Path, wanted: Expected) -> None:
    """D24, P4: what was flushed before the compaction is there after it, by its last values."""
    seen = squeezing.check_power_cuts(directory, 900, wanted)
    tell(f"{seen} states")
    assert seen >= 400
