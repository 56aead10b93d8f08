"""Names and votes: which assignor a group uses (M5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from embedlog.assignor.members import Assignor
from embedlog.assignor.range_roundrobin import RangeAssignor, RoundRobinAssignor
from embedlog.assignor.sticky import CooperativeStickyAssignor, StickyAssignor
from embedlog.errors import InconsistentGroupProtocolError, InvalidConfigError

_OURS: dict[str, type[Assignor]] = {
    "range": RangeAssignor,
    "roundrobin": RoundRobinAssignor,
    "sticky": StickyAssignor,
    "cooperative-sticky": CooperativeStickyAssignor,
}
_SHOWN = 5


def by_name(name: str) -> Assignor:
    """Return the assignor that Kafka calls so.

    >>> by_name("roundrobin").cooperative
    False

    Raises:
        InvalidConfigError: There is none of that name.
    """
    if name not in _OURS:
        raise InvalidConfigError(
            f"there is no assignor {name!r}; there are {', '.join(_OURS)}",
            todo="A user's own is given as an object, not as a name.",
        )
    return _OURS[name]()


def configured(strategies: Iterable[str | Assignor | type[Assignor]]) -> dict[str, Assignor]:
    """Read `partition_assignment_strategy`: by name, the assignors a member can use, best first.

    Args:
        strategies: Names, or assignors of the user's own; classes too, as kafka-python has them.

    Raises:
        InvalidConfigError: There is none (E16), a name is unknown, or one comes twice.
    """
    found: dict[str, Assignor] = {}
    for each in [strategies] if isinstance(strategies, str) else strategies:
        made = (
            by_name(each) if isinstance(each, str) else each() if isinstance(each, type) else each
        )
        if made.name in found:
            raise InvalidConfigError(f"partition_assignment_strategy has {made.name!r} twice")
        found[made.name] = made
    if not found:
        raise InvalidConfigError("partition_assignment_strategy is empty")
    return found


def choose(supported: Mapping[str, Sequence[str]]) -> str:
    """Return the assignor that all members have and most of them like best (M5).

    Each votes for the first in its list that all have.  Between equals Kafka
    takes either; here it is the first by name.

    >>> choose({"a": ["range", "sticky"], "b": ["sticky", "range"], "c": ["sticky", "range"]})
    'sticky'

    Args:
        supported: For each member id, its assignors' names, best first; at least one member.

    Raises:
        InconsistentGroupProtocolError: No assignor is common to all.
    """
    common = set.intersection(*map(set, supported.values()))
    if not common:
        told = [f"{each} has {', '.join(names) or 'none'}" for each, names in supported.items()]
        more = f"; and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
        raise InconsistentGroupProtocolError(
            f"no assignor is common to all members: {'; '.join(sorted(told)[:_SHOWN])}{more}",
            todo="Give all members one `partition_assignment_strategy` in common.",
        )
    votes = Counter(next(each for each in names if each in common) for names in supported.values())
    return min(votes, key=lambda each: (-votes[each], each))
