"""What the admin client takes: kafka-python's classes if it is installed, otherwise the like."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any, Self

from embedlog.kafka.installed import installed, pick


class _Named:
    """Finds the member of an enumeration by value or name."""

    @classmethod
    def build_from(cls, value: Any) -> Self:
        """Return the member of that value, or of that name in any case."""
        members: Any = cls
        if isinstance(value, str) and value.upper().replace("-", "_") in members.__members__:
            return members[value.upper().replace("-", "_")]  # type: ignore[no-any-return]
        return members(value)  # type: ignore[no-any-return]

    @classmethod
    def value_for(cls, value: Any) -> Any:
        """Return the value of that member."""
        member: Any = cls.build_from(value)
        return member.value


def _numbers(name: str, **members: int) -> Any:
    return IntEnum(name, members, type=_Named)


def _words(name: str, **members: str) -> Any:
    return Enum(name, members, type=type("_Word", (_Named, str), {}))


class _NewTopic:
    """A topic to create."""

    def __init__(
        self,
        name: str,
        num_partitions: int = -1,
        replication_factor: int = -1,
        replica_assignments: Any = None,
        topic_configs: Any = None,
    ) -> None:
        self.name, self.num_partitions = name, num_partitions
        self.replication_factor = replication_factor
        self.replica_assignments = replica_assignments or {}
        self.topic_configs = topic_configs or {}


class _NewPartitions:
    """How many partitions a topic shall have."""

    def __init__(self, total_count: int, new_assignments: Any = None) -> None:
        self.total_count, self.new_assignments = total_count, new_assignments


class _ConfigResource:
    """What has settings: a topic or a broker."""

    def __init__(self, resource_type: Any, name: Any, configs: Any = None) -> None:
        if not isinstance(resource_type, ConfigResourceType):
            resource_type = ConfigResourceType[str(resource_type).upper()]
        self.resource_type, self.name, self.configs = resource_type, name, configs


class _MemberToRemove:
    """A member to remove from its group."""

    def __init__(
        self,
        member_id: str | None = None,
        group_instance_id: str | None = None,
        reason: str | None = None,
    ) -> None:
        self.member_id, self.group_instance_id, self.reason = member_id, group_instance_id, reason


class _OffsetTimestamp(int):
    """A time in milliseconds since 1970."""


def _admin(name: str, own: Any) -> Any:
    return pick("kafka.admin", name, own)


NewTopic: Any = _admin("NewTopic", _NewTopic)
NewPartitions: Any = _admin("NewPartitions", _NewPartitions)
ConfigResource: Any = _admin("ConfigResource", _ConfigResource)
MemberToRemove: Any = _admin("MemberToRemove", _MemberToRemove)
OffsetTimestamp: Any = _admin("OffsetTimestamp", _OffsetTimestamp)
ConfigResourceType: Any = _admin(
    "ConfigResourceType",
    _numbers(
        "ConfigResourceType",
        UNKNOWN=0,
        TOPIC=2,
        BROKER=4,
        BROKER_LOGGER=8,
        CLIENT_METRICS=16,
        GROUP=32,
    ),
)
AlterConfigOp: Any = _admin(
    "AlterConfigOp", _numbers("AlterConfigOp", SET=0, DELETE=1, APPEND=2, SUBTRACT=3)
)
ConfigFilterType: Any = pick(
    "kafka.admin._configs",
    "ConfigFilterType",
    _numbers("ConfigFilterType", ALL=0, DYNAMIC=1, MODIFIED=2, DEFAULT=3, STATIC=4),
)
OffsetSpec: Any = _admin(
    "OffsetSpec",
    _numbers(
        "OffsetSpec",
        LATEST=-1,
        EARLIEST=-2,
        MAX_TIMESTAMP=-3,
        EARLIEST_LOCAL=-4,
        LATEST_TIERED=-5,
    ),
)
IsolationLevel: Any = pick(
    "kafka",
    "IsolationLevel",
    _numbers("IsolationLevel", READ_UNCOMMITTED=0, READ_COMMITTED=1),
)
GroupState: Any = _admin(
    "GroupState",
    _words(
        "GroupState",
        UNKNOWN="Unknown",
        PREPARING_REBALANCE="PreparingRebalance",
        COMPLETING_REBALANCE="CompletingRebalance",
        STABLE="Stable",
        DEAD="Dead",
        EMPTY="Empty",
        ASSIGNING="Assigning",
        RECONCILING="Reconciling",
    ),
)
GroupType: Any = _admin(
    "GroupType",
    _words("GroupType", UNKNOWN="Unknown", CLASSIC="classic", CONSUMER="consumer", SHARE="share"),
)


def __getattr__(name: str) -> Any:
    """Return the other classes of ``kafka.admin``, such as those of ACLs, if it is installed."""
    module = installed("kafka.admin")
    if module is None or name.startswith("_") or not hasattr(module, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)
