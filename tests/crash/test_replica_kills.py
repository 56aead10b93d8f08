"""A process of a log over several directories that is killed between any two operations."""

from __future__ import annotations

import pytest
from support import forks, replica_kills
from support.replica_kills import WORKS, Kill
from support.tiers import choose, sample

CHOSEN = sample(WORKS, choose(test=3, all=len(WORKS)))


@pytest.mark.parametrize("work", CHOSEN, ids=lambda work: work.replace(" ", "-"))
def test_a_kill_loses_nothing_and_leaves_the_copies_equal(work: str) -> None:
    """Whether the others go on, or open the log anew; also between the commits of databases."""
    operations = forks.call(lambda: replica_kills.check(Kill(work, None, True)))
    assert operations is not None, "it was killed without being told to"

    kills = [Kill(work, at, alive) for at in range(1, operations + 1) for alive in (True, False)]
    forks.spread(sample(kills, 2), replica_kills.check)
