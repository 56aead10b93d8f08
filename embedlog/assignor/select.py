"""The assignors that a member has configured, and the one that its group uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from embedlog.assignor.members import Assignor
from embedlog.assignor.range_roundrobin import RangeAssignor, RoundRobinAssignor
from embedlog.assignor.sticky import CooperativeStickyAssignor, StickyAssignor
from embedlog.errors import InconsistentGroupProtocolError, InvalidConfigError

BUILT_IN: dict[str, type[Assignor]] = {
    "range": RangeAssignor,
    "roundrobin": RoundRobinAssignor,
    "sticky": StickyAssignor,
    "cooperative-sticky": CooperativeStickyAssignor,
}
"""The assignors that a program may name, as in Kafka."""
_MAX_MEMBERS_SHOWN = 5


def by_name(name: str) -> Assignor:
    """Return the built-in assignor that has this name in Kafka.

    >>> by_name("roundrobin").cooperative
    False

    Raises:
        InvalidConfigError: No assignor has this name.
    """
    if name not in BUILT_IN:
        raise InvalidConfigError(
            f"Unknown assignor {name!r}; the built-in ones are {', '.join(BUILT_IN)}",
            todo="Pass a custom assignor as an object instead of its name.",
        )
    return BUILT_IN[name]()


def configured(strategies: Iterable[str | Assignor | type[Assignor]]) -> dict[str, Assignor]:
    """Parse `partition_assignment_strategy` into assignors by name, in order of preference.

    Args:
        strategies: Names or custom assignors; classes are accepted too, as in kafka-python.

    Raises:
        InvalidConfigError: There is none, a name is unknown, or a name is repeated.
    """
    assignors: dict[str, Assignor] = {}
    for strategy in [strategies] if isinstance(strategies, str) else strategies:
        if isinstance(strategy, str):
            assignor = by_name(strategy)
        else:
            assignor = strategy() if isinstance(strategy, type) else strategy
        if assignor.name in assignors:
            raise InvalidConfigError(f"partition_assignment_strategy has {assignor.name!r} twice")
        assignors[assignor.name] = assignor
    if not assignors:
        raise InvalidConfigError("partition_assignment_strategy is empty")
    return assignors


def select_assignor(supported: Mapping[str, Sequence[str]]) -> str:
    """Return the assignor that all members support and most of them prefer.

    Each member votes for the first of its assignors that all support.  Kafka resolves a
    tie arbitrarily; here the first name wins.

    >>> votes = {"a": ["range", "sticky"], "b": ["sticky", "range"], "c": ["sticky", "range"]}
    >>> select_assignor(votes)
    'sticky'

    Args:
        supported: The names of each member's assignors by member id, in order of
            preference; at least one member.

    Raises:
        InconsistentGroupProtocolError: No assignor is supported by all members.
    """
    common = set.intersection(*map(set, supported.values()))
    if not common:
        lists = [f"{id_} has {', '.join(names) or 'none'}" for id_, names in supported.items()]
        hidden = len(lists) - _MAX_MEMBERS_SHOWN
        more = f"; and {hidden} more" if hidden > 0 else ""
        raise InconsistentGroupProtocolError(
            "No assignor is common to all members: "
            f"{'; '.join(sorted(lists)[:_MAX_MEMBERS_SHOWN])}{more}",
            todo="Give all members one `partition_assignment_strategy` in common.",
        )
    votes = Counter(next(name for name in names if name in common) for names in supported.values())
    return min(votes, key=lambda name: (-votes[name], name))
