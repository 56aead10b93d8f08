"""Members of a group that are killed or stopped while they own partitions."""

from __future__ import annotations

import pytest
from support import forks
from support.faulty_files import scratch_directory
from support.forks import tell
from support.group_failover import (
    Kill,
    check_member_kill,
    check_stopped_with_lock,
    count_operations,
    make_topic,
)
from support.tiers import choose


@pytest.mark.parametrize(
    "limit", [choose(test=20, all=60), pytest.param(None, marks=pytest.mark.tier("nightly"))]
)
def test_a_member_killed_at_any_operation_leaves_a_group_that_goes_on(limit):
    """P1, P15: what it reported as committed is so; no member waits, no partition is left out."""
    with scratch_directory() as directory:
        template = directory / "template"
        forks.call(lambda: make_topic(template, 3, records=3))
        root = directory / "counted"
        forks.run(lambda: make_topic(root, 3, records=3))
        counted = forks.call(lambda: count_operations(root))
        cases = [Kill(n, when) for n in range(counted) for when in ("before", "after")]
        died = forks.spread(forks.evenly(cases, limit), check_member_kill, template=template)
    tell(f"{sum(died)} of {len(died)} killed, {counted} operations in all")
    assert sum(died) >= 0.9 * len(died)


@pytest.mark.parametrize(
    "limit", [choose(test=6, all=12), pytest.param(None, marks=pytest.mark.tier("nightly"))]
)
def test_a_member_stopped_with_a_lock_is_named_by_those_who_wait_for_it(limit):
    """P16: in time; and nothing is left to mend once it is gone."""
    with scratch_directory() as directory:
        template = directory / "template"
        forks.call(lambda: make_topic(template, 3, records=3))
        named = forks.spread(
            forks.evenly(range(40), limit), check_stopped_with_lock, template=template
        )
    tell(f"{sum(named)} of {len(named)} were in the way")
    assert sum(named) >= len(named) // 3
