"""Assignors: pure functions that decide which member of a group reads which partition.

The result depends only on the arguments, not on the order of members and topics, the
time, randomness or hash order.  So any member in any process may compute the assignment,
and a test needs nothing but values.

- `members`: the input and output of an assignor, the claims of members, the check of a result.
- `range_roundrobin`: range and round robin.
- `sticky`: keeps owned partitions, also where subscriptions differ.
- `min_cost_flow`: finds the best of all assignments.
- `rebalance`: what each member may release and acquire now.
- `select`: configured assignors, and the one that a group uses.

Where Kafka's result depends on the order of a Java hash table, members are processed in
the order of `sort_members`.
"""

from __future__ import annotations

from embedlog.assignor.members import (
    Assignment,
    Assignor,
    Member,
    compute_target,
    sort_members,
    validate,
)
from embedlog.assignor.range_roundrobin import RangeAssignor, RoundRobinAssignor
from embedlog.assignor.rebalance import RebalanceStep, next_step
from embedlog.assignor.select import by_name, configured, select_assignor
from embedlog.assignor.sticky import CooperativeStickyAssignor, StickyAssignor

__all__ = [
    "Assignment",
    "Assignor",
    "CooperativeStickyAssignor",
    "Member",
    "RangeAssignor",
    "RebalanceStep",
    "RoundRobinAssignor",
    "StickyAssignor",
    "by_name",
    "compute_target",
    "configured",
    "next_step",
    "select_assignor",
    "sort_members",
    "validate",
]
