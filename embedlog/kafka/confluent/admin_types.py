"""confluent_kafka's types of the admin client, or equal ones if it is not installed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from embedlog.kafka.confluent.common_types import OrderedEnum
from embedlog.kafka.installed import use_installed

# Arguments


@dataclass(repr=False, order=True, unsafe_hash=True)
class NewTopic:
    """A topic to create; -1 partitions are one."""

    topic: str
    num_partitions: int = -1
    replication_factor: int = -1
    replica_assignment: list[list[int]] | None = field(default=None, compare=False)
    config: dict[str, Any] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        count = "" if self.num_partitions < 0 else f",num_partitions={self.num_partitions}"
        return f"NewTopic(topic={self.topic}{count})"


@dataclass(repr=False, order=True, unsafe_hash=True)
class NewPartitions:
    """A topic, and how many partitions it shall have."""

    topic: str
    new_total_count: int
    replica_assignment: list[list[int]] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"NewPartitions(topic={self.topic},new_total_count={self.new_total_count})"


class ResourceType(OrderedEnum):
    """What has settings."""

    UNKNOWN = 0
    ANY = 1
    TOPIC = 2
    GROUP = 3
    BROKER = 4
    TRANSACTIONAL_ID = 5


class ResourcePatternType(OrderedEnum):
    """How the names of resources are matched."""

    UNKNOWN = 0
    ANY = 1
    MATCH = 2
    LITERAL = 3
    PREFIXED = 4


class ConfigSource(Enum):
    """Where the value of a setting comes from."""

    UNKNOWN_CONFIG = 0
    DYNAMIC_TOPIC_CONFIG = 1
    DYNAMIC_BROKER_CONFIG = 2
    DYNAMIC_DEFAULT_BROKER_CONFIG = 3
    STATIC_BROKER_CONFIG = 4
    DEFAULT_CONFIG = 5
    GROUP_CONFIG = 8


class AlterConfigOpType(Enum):
    """What an incremental change does to a setting."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


class AclOperation(OrderedEnum):
    """What an ACL allows; a log has none."""

    UNKNOWN = 0
    ANY = 1
    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12


@dataclass(repr=False, eq=False)
class ConfigEntry:
    """A setting, and how it was set."""

    name: str
    value: str | None
    source: ConfigSource = ConfigSource.UNKNOWN_CONFIG
    is_read_only: bool = False
    is_default: bool = False
    is_sensitive: bool = False
    is_synonym: bool = False
    synonyms: dict[str, Any] = field(default_factory=dict)
    incremental_operation: AlterConfigOpType | None = None

    def __repr__(self) -> str:
        return f'ConfigEntry({self.name}="{self.value}")'

    def __str__(self) -> str:
        return f'{self.name}="{self.value}"'


class ConfigResource:
    """A topic or broker, and settings of it."""

    Type: ClassVar[type[ResourceType]] = ResourceType

    def __init__(
        self,
        restype: ResourceType | str | int,
        name: str,
        set_config: dict[str, str] | None = None,
        described_configs: dict[str, ConfigEntry] | None = None,
        error: Any = None,
        incremental_configs: list[ConfigEntry] | None = None,
    ) -> None:
        if name is None:
            raise ValueError("Expected resource name to be a string")
        if isinstance(restype, str):
            if restype.upper() not in ResourceType.__members__:
                raise ValueError(
                    f'Unknown resource type "{restype}": should be a ConfigResource.Type'
                )
            restype = ResourceType[restype.upper()]
        self.restype = ResourceType(restype)
        self.name, self.configs, self.error = name, described_configs, error
        self.set_config_dict = dict(set_config or {})
        self.incremental_configs = list(incremental_configs or [])

    def set_config(self, name: str, value: str, overwrite: bool = True) -> None:
        """Add a setting to change."""
        if overwrite or name not in self.set_config_dict:
            self.set_config_dict[name] = value

    def add_incremental_config(self, config_entry: ConfigEntry) -> None:
        """Add a setting to change incrementally."""
        self.incremental_configs.append(config_entry)

    def __repr__(self) -> str:
        error = "" if self.error is None else f",{self.error!r}"
        return f"ConfigResource({self.restype},{self.name}{error})"

    def __hash__(self) -> int:
        return hash((self.restype, self.name))

    def __eq__(self, other: object) -> bool:
        key = self.restype, self.name
        return isinstance(other, ConfigResource) and key == (other.restype, other.name)

    def __lt__(self, other: ConfigResource) -> bool:
        return (self.restype, self.name) < (other.restype, other.name)

    def __len__(self) -> int:
        return len(self.set_config_dict)


class OffsetSpec:
    """Which offset `AdminClient.list_offsets` returns."""

    def __init__(self, index: int) -> None:
        self._value = index

    def __lt__(self, other: OffsetSpec) -> bool:
        return self._value < other._value

    @classmethod
    def earliest(cls) -> OffsetSpec:
        """Return the spec of the first offset."""
        return cls(-2)

    @classmethod
    def latest(cls) -> OffsetSpec:
        """Return the spec of the end."""
        return cls(-1)

    @classmethod
    def max_timestamp(cls) -> OffsetSpec:
        """Return the spec of the record with the latest timestamp."""
        return cls(-3)

    @classmethod
    def for_timestamp(cls, timestamp: int) -> OffsetSpec:
        """Return the spec of the first record at or after a time, in milliseconds."""
        return cls(timestamp)


# Results


class ListOffsetsResultInfo:
    """An offset, with -1 for a timestamp that is not known."""

    def __init__(self, offset: int, timestamp: int, leader_epoch: int) -> None:
        self.offset, self.timestamp = offset, timestamp
        self.leader_epoch = None if leader_epoch < 0 else leader_epoch


@dataclass
class DeletedRecords:
    """The new log start offset of a partition."""

    low_watermark: int


@dataclass
class DescribeClusterResult:
    """The directories of the log, as brokers."""

    controller: Any
    nodes: list[Any]
    cluster_id: str | None = None
    authorized_operations: list[AclOperation] | None = None


@dataclass
class TopicDescription:
    """A topic and its partitions."""

    name: str
    topic_id: Any
    is_internal: bool
    partitions: list[Any]
    authorized_operations: list[AclOperation] | None = None


@dataclass
class ConsumerGroupListing:
    """A group in a list."""

    group_id: str
    is_simple_consumer_group: bool
    state: Any = None
    type: Any = None


@dataclass
class ListConsumerGroupsResult:
    """The groups, and the errors of those that could not be listed."""

    valid: list[ConsumerGroupListing] | None = None
    errors: list[Exception] | None = None


class MemberAssignment:
    """The partitions of a member."""

    def __init__(self, topic_partitions: list[Any] | None) -> None:
        self.topic_partitions = topic_partitions or []


@dataclass
class MemberDescription:
    """A member of a group."""

    member_id: str
    client_id: str
    host: str
    assignment: MemberAssignment
    group_instance_id: str | None = None
    target_assignment: MemberAssignment | None = None


@dataclass
class ConsumerGroupDescription:
    """A group with its members."""

    group_id: str
    is_simple_consumer_group: bool
    members: list[MemberDescription]
    partition_assignor: str
    state: Any
    coordinator: Any
    authorized_operations: list[AclOperation] | None = None
    type: Any = None


# Metadata, filled in by `cluster_metadata`


class ClusterMetadata:
    """The brokers and topics."""

    def __init__(self) -> None:
        self.cluster_id: str | None = None
        self.controller_id = self.orig_broker_id = -1
        self.orig_broker_name: str | None = None
        self.brokers: dict[int, Any] = {}
        self.topics: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"ClusterMetadata({self.cluster_id})"


class BrokerMetadata:
    """A broker."""

    def __init__(self) -> None:
        self.id = self.port = -1
        self.host: str | None = None

    def __repr__(self) -> str:
        return f"BrokerMetadata({self.id}, {self.host}:{self.port})"

    def __str__(self) -> str:
        return f"{self.host}:{self.port}/{self.id}"


class _Described:
    """A part of the metadata, with the error of reading it."""

    error: Any = None

    def _text(self, *parts: object) -> str:
        errors = () if self.error is None else (self.error,)
        return f"{type(self).__name__}({', '.join(map(str, (*parts, *errors)))})"


class TopicMetadata(_Described):
    """A topic."""

    def __init__(self) -> None:
        self.topic: str | None = None
        self.partitions: dict[int, Any] = {}

    def __repr__(self) -> str:
        return self._text(self.topic, f"{len(self.partitions)} partitions")

    def __str__(self) -> str:
        return str(self.topic)


class PartitionMetadata(_Described):
    """A partition."""

    def __init__(self) -> None:
        self.id = self.leader = -1
        self.replicas: list[int] = []
        self.isrs: list[int] = []

    def __repr__(self) -> str:
        return self._text(self.id)

    def __str__(self) -> str:
        return str(self.id)


class GroupMetadata(_Described):
    """A group, as `AdminClient.list_groups` returns it."""

    def __init__(self) -> None:
        self.broker: Any = None
        self.id: str | None = None
        self.state: str | None = None
        self.protocol_type: str | None = None
        self.protocol: str | None = None
        self.members: list[Any] = []

    def __repr__(self) -> str:
        return self._text(self.id)

    def __str__(self) -> str:
        return str(self.id)


class GroupMember:
    """A member, as `AdminClient.list_groups` returns it."""

    id: Any = None
    client_id: Any = None
    client_host: Any = None
    metadata: Any = None
    assignment: Any = None


__all__ = [
    "AclOperation",
    "AlterConfigOpType",
    "BrokerMetadata",
    "ClusterMetadata",
    "ConfigEntry",
    "ConfigResource",
    "ConfigSource",
    "ConsumerGroupDescription",
    "ConsumerGroupListing",
    "DeletedRecords",
    "DescribeClusterResult",
    "GroupMember",
    "GroupMetadata",
    "ListConsumerGroupsResult",
    "ListOffsetsResultInfo",
    "MemberAssignment",
    "MemberDescription",
    "NewPartitions",
    "NewTopic",
    "OffsetSpec",
    "PartitionMetadata",
    "ResourcePatternType",
    "ResourceType",
    "TopicDescription",
    "TopicMetadata",
]
use_installed(globals(), "confluent_kafka.admin", __all__)
