"""Which member of a group reads which partition: pure functions, the same for everybody.

Whichever process runs an assignor, on whatever order of members and topics, the
answer is the same: no clock, no chance, no order of a hash.  So any member may
work the target out, and a test needs nothing but values.

`members` says what goes in and comes out and holds an answer against the rules,
`dealing` is range and round robin, `sticky` keeps what is owned (`claims` says
who owns it), `levelling` does so where subscriptions differ, `min_cost_flow` finds
the best of all assignments, `moving` says what may change hands at once, and
`choosing` finds what a whole group agrees on.

Where Kafka depends on the order of a Java hash table, members go in the order
of `ordered` here (M26).
"""

from __future__ import annotations

from embedlog.assignor.members import Assignment, Assignor, Member, check, ordered, target
from embedlog.assignor.range_roundrobin import RangeAssignor, RoundRobinAssignor
from embedlog.assignor.rebalance import RebalanceStep, step, steps
from embedlog.assignor.select import by_name, choose, configured
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
    "check",
    "choose",
    "configured",
    "ordered",
    "step",
    "steps",
    "target",
]
