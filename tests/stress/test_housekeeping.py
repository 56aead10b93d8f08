"""Readers and writers in other processes run through retention and compaction that never pause."""

from __future__ import annotations

from collections import Counter

import pytest
from support.cruel import scratch_directory
from support.forks import tell
from support.household import Household, check_household

pytestmark = pytest.mark.stress


def household(case: Household) -> dict[str, int]:
    with scratch_directory() as directory:
        done = check_household(case, directory)
    tell(f"{case}: {dict(sorted(done.items()))}")
    return done


def test_nobody_notices_that_the_house_is_kept() -> None:
    """P20, D8: no error but where data was deleted; each key ends with what was acked last."""
    done = Counter(household(Household(seconds=8)))
    # Where data goes as fast as it is read, chance may have most tables overtaken.
    for seed in (2, 3):
        if done["latest"] < 100:
            done += Counter(household(Household(seconds=8, seed=seed)))
    assert done["kills"] + done["stops"] >= 5
    assert min(done[kind] for kind in ("read", "grouped", "sent")) >= 1_000
    assert done["latest"] >= 100
    assert min(done[kind] for kind in ("overtaken", "passes", "times", "verified")) >= 1


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 7))
@pytest.mark.parametrize("delay_ms", [0, 50])
def test_nobody_notices_for_a_minute(seed: int, delay_ms: int) -> None:
    """The same for 60 s, and with files that go at once."""
    done = household(Household(seed=seed, delay_ms=delay_ms))
    assert done["kills"] + done["stops"] >= 100
    assert done["read"] >= 100_000
