"""Damage to one copy: its records are read from another one, and the copy is written again."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from support import forks
from support.damaged_copies import (
    CASES,
    COPIES,
    SENT,
    SPREAD,
    check,
    check_killed,
    keep_house,
    open_log,
    outcomes,
    read,
    repair_and_die,
    spread,
)
from support.tiers import sample

from embedlog.errors import CorruptionError


@pytest.mark.parametrize("case", sample(CASES, 5), ids="-".join)
@pytest.mark.parametrize(("role", "count"), sample(COPIES, 2))
def test_no_record_is_lost_that_another_copy_has(tmp_path, case, role, count):
    """H14: whatever is damaged, whenever, and whatever is done first."""
    check(tmp_path, case, role, count)


@pytest.mark.parametrize("case", sample(CASES, 3), ids="-".join)
def test_the_only_copy_is_repaired_as_that_of_a_log_in_one_directory(tmp_path, case):
    """Damaged records are dropped, as they were reported, and the rest stays."""
    alone = [tmp_path / "alone"]
    several = [tmp_path / str(number) for number in (1, 2, 3)]

    assert outcomes(several, several[0], case) == outcomes(alone, alone[0], case)


# Damage in several copies, and a repair that is killed


@pytest.mark.parametrize("kind", sample(list(SPREAD), 3))
@pytest.mark.parametrize("first", ["read", "repair"])
def test_a_record_is_kept_if_any_copy_has_it(tmp_path, kind, first):
    """H14: no copy is whole, but of each record there is a good one."""
    paths = [tmp_path / "1", tmp_path / "2"]
    kept = spread(paths, kind)
    with open_log(paths) as log:
        if first == "read":
            with nullcontext() if kept == SENT else pytest.raises(CorruptionError):
                assert read(log) == SENT
        log.housekeeping.repair(dry_run=False)
        keep_house(log)
        assert read(log) == kept
        assert log.housekeeping.verify() == log.housekeeping.verify(replicas=True) == []


@pytest.mark.parametrize("kind", sample(list(SPREAD), 2))
def test_a_repair_that_is_killed_at_any_operation_is_done_when_repeated(tmp_path, kind):
    """H14: it only ever writes where another copy has a whole batch."""
    spread([tmp_path / "1", tmp_path / "2"], kind)
    operations = forks.call(lambda: repair_and_die([tmp_path / "1", tmp_path / "2"], None))
    cases = [(kind, at) for at in range(1, operations + 1)]
    forks.spread(sample(cases, 3), check_killed)
