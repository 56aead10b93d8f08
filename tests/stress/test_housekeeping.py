"""Readers and writers in other processes run through retention and compaction that never pause."""

from __future__ import annotations

import pytest
from support.faulty_files import scratch_directory
from support.forks import tell
from support.housekeeping import HousekeepingRun, check_housekeeping
from support.patience import until_enough
from support.tiers import choose

pytestmark = pytest.mark.stress


def run(case: HousekeepingRun) -> dict[str, int]:
    with scratch_directory() as directory:
        done = check_housekeeping(case, directory)
    tell(f"{case}: {dict(sorted(done.items()))}")
    return done


@pytest.mark.tier("all")
def test_nobody_notices_that_the_house_is_kept() -> None:
    """P20, D8: no error but where data was deleted; each key ends with what was acked last."""
    share = choose(test=0.1, all=1.0)
    least = dict.fromkeys(("read", "grouped", "sent"), 1_000 * share)
    least |= dict.fromkeys(("overtaken", "passes", "times", "verified"), 1)
    # Where data goes as fast as it is read, chance may have most tables overtaken.
    least["latest"] = 100 * share
    done = until_enough(lambda seed: run(HousekeepingRun(8 * share, seed=seed)), least)
    assert done["kills"] + done["stops"] >= 5 * share


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("seed", range(2, 7))
@pytest.mark.parametrize("delay_ms", [0, 50])
def test_nobody_notices_for_a_minute(seed: int, delay_ms: int) -> None:
    """The same for 60 s, and with files that go at once."""
    done = run(HousekeepingRun(seed=seed, delay_ms=delay_ms))
    assert done["kills"] + done["stops"] >= 100
    assert done["read"] >= 100_000
