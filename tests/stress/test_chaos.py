"""Many processes at once, at random: killed, stopped, overtaken."""

from __future__ import annotations

import pytest
from support.chaos import Chaos, check_chaos
from support.concurrent_deletes import check_concurrent_deletes
from support.faulty_files import scratch_directory
from support.forks import tell
from support.patience import until_enough
from support.tiers import choose

pytestmark = pytest.mark.stress


def chaos(case: Chaos) -> dict[str, int]:
    with scratch_directory() as directory:
        done = check_chaos(case, directory)
    tell(f"seed {case.seed}: {dict(done)}")
    return done


def test_random_kills_and_stops_lose_and_repeat_nothing() -> None:
    """P3: acked records are there, once; offsets never change under a reader, batches are whole."""
    case = choose(test=Chaos(seconds=1.5, least=40), all=Chaos())
    least = {"acked": 10 * case.least, "seen": 10 * case.least}
    done = until_enough(lambda seed: chaos(case._replace(seed=seed)), least)
    assert done["kills"] + done["stops"] >= case.least


def test_nothing_is_torn_from_readers_of_what_is_cut_and_deleted() -> None:
    """P20: they finish what they hold, or get OffsetOutOfRangeError; none dies of SIGBUS."""
    with scratch_directory() as directory:
        opens = choose(test=3_000, all=100_000)
        done = check_concurrent_deletes(directory, opens, seed=1)
    tell(f"seed 1: {dict(done)}")
    assert done["opens"] >= opens
    assert min(done[kind] for kind in ("cuts", "deletions", "overtaken", "held")) >= 10


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("seed", range(2, 12))
def test_random_kills_and_stops_for_hours(seed: int) -> None:
    """P3 in full: 10 × 10,000 kills and stops, with 3 to 8 writers."""
    writers = 3 + seed % 6
    done = chaos(Chaos(seconds=300, least=10_000, writers=writers, readers=3, seed=seed))
    assert done["kills"] + done["stops"] >= 10_000


@pytest.mark.tier("nightly")
def test_ten_million_opens_of_what_is_cut_and_deleted() -> None:
    """P20 in full."""
    for seed in range(2, 102):
        with scratch_directory() as directory:
            assert check_concurrent_deletes(directory, 100_000, seed)["opens"] >= 100_000
