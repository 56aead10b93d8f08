"""Records of a share group are handled and put aside while processes are killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.forks import tell
from support.share_kills import ShareWorkload, check
from support.tiers import choose

RECORDS = {"test": 250, "all": 10_000}


@pytest.mark.parametrize("is_async", choose(test=[False], all=[False, True]))
def test_no_record_is_lost_and_each_poison_one_is_one_dead_letter(
    tmp_path: Path, is_async: bool
) -> None:
    """S20: whenever processes are killed, in handlers and around transactions."""
    work = ShareWorkload(
        choose(**RECORDS),
        is_async,
        kills=choose(test=0.1, all=0.03),
        poisoned=choose(test=20, all=100),
    )
    done = check(work, tmp_path)
    tell(f"{work}: {done}")


@pytest.mark.tier("all")
def test_the_same_with_every_step_flushed(tmp_path: Path) -> None:
    """S20: dead letters become visible with a checkpoint, which others wait for."""
    work = ShareWorkload(1000, False, kills=0.02, poisoned=20, durability="fsync")
    tell(f"{work}: {check(work, tmp_path)}")
