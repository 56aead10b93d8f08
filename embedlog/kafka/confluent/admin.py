"""`AdminClient` with confluent_kafka's interface: each call returns futures that are done."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

from embedlog.catalog import INTERNAL, refuse_internal
from embedlog.config import TopicConfig
from embedlog.config.values import setting_text
from embedlog.consumer.group_client import open_group
from embedlog.errors import EmbedlogError, GroupIdNotFoundError
from embedlog.kafka import admin_operations as operations
from embedlog.kafka.cluster import (
    HOST,
    PORT,
    DirectoryNode,
    cluster_id,
    controller_id,
    nodes,
    placement,
)
from embedlog.kafka.confluent import admin_types as kinds
from embedlog.kafka.confluent import common_types as common
from embedlog.kafka.confluent.admin_types import *  # noqa: F403 - their names in confluent_kafka
from embedlog.kafka.confluent.client import LogClient
from embedlog.kafka.confluent.common_types import KafkaError as KafkaError
from embedlog.kafka.confluent.common_types import KafkaException, TopicPartition
from embedlog.kafka.confluent.kafka_errors import error_of, exception, translated
from embedlog.record import OffsetAndMetadata
from embedlog.record import TopicPartition as Partition

OFFSET_INVALID = common.OFFSET_INVALID
RESOURCE_UNKNOWN, RESOURCE_ANY, RESOURCE_TOPIC, RESOURCE_GROUP, RESOURCE_BROKER = range(5)
RESOURCE_TRANSACTIONAL_ID = 5
CONFIG_SOURCE_UNKNOWN_CONFIG, CONFIG_SOURCE_DYNAMIC_TOPIC_CONFIG = 0, 1
CONFIG_SOURCE_DYNAMIC_BROKER_CONFIG, CONFIG_SOURCE_DYNAMIC_DEFAULT_BROKER_CONFIG = 2, 3
CONFIG_SOURCE_STATIC_BROKER_CONFIG, CONFIG_SOURCE_DEFAULT_CONFIG = 4, 5
CONFIG_SOURCE_GROUP_CONFIG = 8

_STATES = {
    "PreparingRebalance": common.ConsumerGroupState.PREPARING_REBALANCING,
    "CompletingRebalance": common.ConsumerGroupState.COMPLETING_REBALANCING,
    "Stable": common.ConsumerGroupState.STABLE,
    "Dead": common.ConsumerGroupState.DEAD,
    "Empty": common.ConsumerGroupState.EMPTY,
}

K = TypeVar("K", bound=Hashable)
Futures = dict[K, Future[Any]]


def _future(call: Callable[[], Any], codes: Mapping[str, str] | None = None) -> Future[Any]:
    """Return a future with the result of a call, or with its error as a `KafkaException`.

    ``codes`` are those of `error_of`.
    """
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    try:
        future.set_result(call())
    except KafkaException as error:
        future.set_exception(error)
    except EmbedlogError as error:
        translated = KafkaException(error_of(error, **codes or {}))
        translated.__cause__ = error
        future.set_exception(translated)
    return future


def _futures(
    items: Iterable[Any], key: Callable[[Any], K], call: Callable[[Any], Any], **codes: str
) -> Futures[K]:
    return {key(item): _future(partial(call, item), codes) for item in items}


class AdminClient(LogClient):
    """Creates and changes topics and groups of a log.

    Each call is carried out before it returns; its futures are done.
    """

    _original = ("confluent_kafka.admin", "AdminClient")

    # Topics

    def create_topics(
        self, new_topics: list[Any], *, validate_only: bool = False, **_: Any
    ) -> Futures[str]:
        """Create topics from `NewTopic`; a log in one directory ignores the number of replicas."""

        def create(topic: Any) -> None:
            operations.create_topic(
                self._log,
                topic.topic,
                topic.num_partitions,
                topic.config or {},
                replication_factor=topic.replication_factor,
                replicas=topic.replica_assignment,
                validate_only=validate_only,
            )

        return _futures(new_topics, lambda topic: topic.topic, create)

    def delete_topics(self, topics: list[str], **_: Any) -> Futures[str]:
        """Delete topics, with their records."""
        return _futures(topics, str, self._log.delete_topic)

    def create_partitions(
        self, new_partitions: list[Any], *, validate_only: bool = False, **_: Any
    ) -> Futures[str]:
        """Add partitions to topics, from `NewPartitions`."""

        def grow(item: Any) -> None:
            operations.create_partitions(
                self._log, item.topic, item.new_total_count, validate_only=validate_only
            )

        return _futures(new_partitions, lambda item: item.topic, grow)

    def describe_topics(self, topics: Any, **_: Any) -> Futures[str]:
        """Describe the topics of a `TopicCollection`."""
        if not hasattr(topics, "topic_names"):
            raise TypeError("Expected input to be instance of TopicCollection")

        def describe(name: str) -> Any:
            info, alive = self._log.root.topic(name), nodes(self._log)
            partitions = []
            for number in range(info.partitions):
                leader, replicas, isr = placement(self._log, name, number)
                partitions.append(
                    common.TopicPartitionInfo(
                        number,
                        None if leader is None else _node(leader, alive),
                        [_node(each, alive) for each in replicas],
                        [_node(each, alive) for each in isr],
                    )
                )
            topic_id = common.Uuid(0, info.id)
            return kinds.TopicDescription(name, topic_id, name.startswith(INTERNAL), partitions)

        return _futures(topics.topic_names, str, describe)

    def describe_cluster(self, **_: Any) -> Future[Any]:
        """Describe the log as a cluster, whose brokers are the directories that are online."""

        def describe() -> Any:
            alive = nodes(self._log)
            return kinds.DescribeClusterResult(
                _node(controller_id(self._log), alive),
                [_node(each, alive) for each in alive],
                cluster_id(self._log),
            )

        return _future(describe)

    def elect_leaders(
        self, election_type: Any, partitions: list[Any] | None = None, **_: Any
    ) -> Future[Any]:
        """Elect preferred leaders, or with `ElectionType.UNCLEAN` leaders that are not in sync.

        The future has a dict of partitions to None, or to the error of those that got no other
        leader.
        """
        if not isinstance(election_type, common.ElectionType):
            raise TypeError("Expected 'election_type' to be of type 'ElectionType'")

        def elect() -> dict[Any, Any]:
            chosen = [
                Partition(name, number)
                for name in self._log.topics(internal=True)
                for number in range(self._log.root.partitions(name))
            ]
            if partitions is not None:
                chosen = [Partition(part.topic, part.partition) for part in partitions]
            unclean = election_type is common.ElectionType.UNCLEAN
            results = operations.election_results(self._log, chosen, unclean=unclean)
            return {
                TopicPartition(*part): exception(name) if name else None
                for part, name in results.items()
            }

        return _future(elect)

    # Settings

    def describe_configs(self, resources: list[Any], **_: Any) -> Futures[Any]:
        """Return the settings of topics, as a dict of `ConfigEntry` by name."""
        return _futures(resources, lambda resource: resource, self._describe_config)

    def _describe_config(self, resource: Any) -> dict[str, Any]:
        if not _is_topic(resource):
            return {}  # a log has no broker with settings
        config = self._log.root.topic(resource.name).config
        overrides = config.overrides()
        return {
            name: kinds.ConfigEntry(
                name,
                setting_text(value),
                kinds.ConfigSource.DYNAMIC_TOPIC_CONFIG
                if name in overrides
                else kinds.ConfigSource.DEFAULT_CONFIG,
                is_default=name not in overrides,
            )
            for name, value in config.to_dict().items()
        }

    def alter_configs(
        self, resources: list[Any], *, validate_only: bool = False, **_: Any
    ) -> Futures[Any]:
        """Replace all settings of topics: those that are not named go back to their defaults."""

        def alter(resource: Any) -> None:
            overrides = self._topic_config(resource).overrides()
            changes = dict.fromkeys(overrides) | resource.set_config_dict
            operations.alter_topic(self._log, resource.name, changes, validate_only=validate_only)

        return _futures(resources, lambda resource: resource, alter)

    def incremental_alter_configs(
        self, resources: list[Any], *, validate_only: bool = False, **_: Any
    ) -> Futures[Any]:
        """Change the settings of topics that are named, and no others."""

        def alter(resource: Any) -> None:
            config = self._topic_config(resource)
            changes = {
                entry.name: operations.changed_setting(
                    config, entry.name, entry.incremental_operation.name, entry.value
                )
                for entry in resource.incremental_configs
            }
            operations.alter_topic(self._log, resource.name, changes, validate_only=validate_only)

        return _futures(resources, lambda resource: resource, alter)

    def _topic_config(self, resource: Any) -> TopicConfig:
        if not _is_topic(resource):
            raise exception("INVALID_REQUEST", f"Only topics have settings, got {resource}")
        return self._log.root.topic(resource.name).config

    # Records

    def list_offsets(self, topic_partition_offsets: Mapping[Any, Any], **_: Any) -> Futures[Any]:
        """Return the offsets that an `OffsetSpec` per partition asks for."""

        def offset(partition: Any) -> Any:
            spec = topic_partition_offsets[partition]._value
            offset, timestamp, epoch = operations.lookup_offset(
                self._log, partition.topic, partition.partition, spec
            )
            return kinds.ListOffsetsResultInfo(offset, timestamp, -1 if epoch is None else epoch)

        return _futures(
            topic_partition_offsets,
            lambda partition: partition,
            offset,
            UnknownTopicOrPartitionError="_NOENT",
        )

    def delete_records(self, topic_partition_offsets: list[Any], **_: Any) -> Futures[Any]:
        """Delete the records below the offset of each partition; `OFFSET_END` deletes all."""

        def delete(item: Any) -> Any:
            partition = Partition(item.topic, item.partition)
            refuse_internal(item.topic)
            return kinds.DeletedRecords(
                self._log.delete_records({partition: item.offset})[partition]
            )

        return _futures(topic_partition_offsets, lambda item: item, delete)

    # Groups

    def list_consumer_groups(
        self, *, states: set[Any] | None = None, types: set[Any] | None = None, **_: Any
    ) -> Future[Any]:
        """Return the groups with members or commits, or those in some states."""

        def listing() -> Any:
            result = []
            for name in self._log.groups():
                state = _STATES.get(self._log.group(name).state)
                kind = common.ConsumerGroupType.CLASSIC
                if (not states or state in states) and (not types or kind in types):
                    result.append(kinds.ConsumerGroupListing(name, False, state, kind))
            return kinds.ListConsumerGroupsResult(result, [])

        return _future(listing)

    def list_groups(self, group: str | None = None, timeout: float = -1) -> list[Any]:
        """Return `GroupMetadata` of all groups, or of one."""
        groups = []
        with translated():
            for name in self._log.groups():
                if group in (None, name):
                    entry: Any = kinds.GroupMetadata()
                    entry.id, entry.state = name, self._log.group(name).state
                    entry.protocol_type = "consumer"
                    groups.append(entry)
        return groups

    def describe_consumer_groups(self, group_ids: list[str], **_: Any) -> Futures[str]:
        """Describe groups with their members; one that does not exist is in the state DEAD."""
        if not isinstance(group_ids, list):
            raise TypeError("Expected input to be list of group ids to be described")
        if not group_ids:
            raise ValueError("Expected at least one group to be described")
        return _futures(group_ids, str, self._describe_group)

    def _describe_group(self, name: str) -> Any:
        group, members, assignor = self._log.group(name), [], ""
        state = _STATES.get(group.state)
        with suppress(GroupIdNotFoundError):
            description = group.describe()
            assignor = description.assignor or ""
            for member in description.members:
                assigned = [TopicPartition(*part) for part in member.partitions]
                members.append(
                    kinds.MemberDescription(
                        member.member_id,
                        member.client_id,
                        "localhost",
                        kinds.MemberAssignment(assigned),
                        member.group_instance_id,
                    )
                )
        return kinds.ConsumerGroupDescription(
            *(name, False, members, assignor, state),
            _node(controller_id(self._log), nodes(self._log)),
            type=common.ConsumerGroupType.CLASSIC,
        )

    def delete_consumer_groups(self, group_ids: list[str], **_: Any) -> Futures[str]:
        """Delete groups without members, with their commits."""
        return _futures(group_ids, str, lambda name: self._log.group(name).delete())

    def list_consumer_group_offsets(
        self, list_consumer_group_offsets_request: list[Any], **_: Any
    ) -> Futures[str]:
        """Return the commits of a group, as `ConsumerGroupTopicPartitions`."""

        def offsets(request: Any) -> Any:
            committed = {}
            with suppress(GroupIdNotFoundError):
                committed = open_group(self._log.root, request.group_id).snapshot().committed
            wanted = request.topic_partitions
            names = (
                committed if wanted is None else [Partition(i.topic, i.partition) for i in wanted]
            )
            rows = {name: row.position for name, row in committed.items()}
            result = [common.committed_partition(name, rows.get(name)) for name in names]
            return common.ConsumerGroupTopicPartitions(request.group_id, result)

        return _futures(list_consumer_group_offsets_request, lambda item: item.group_id, offsets)

    def alter_consumer_group_offsets(
        self, alter_consumer_group_offsets_request: list[Any], **_: Any
    ) -> Futures[str]:
        """Commit offsets for a group without members."""

        def alter(request: Any) -> Any:
            offsets = {
                Partition(item.topic, item.partition): OffsetAndMetadata(
                    item.offset, item.metadata or "", item.leader_epoch
                )
                for item in request.topic_partitions
            }
            outcomes = operations.commit_offsets(self._log, request.group_id, offsets)
            results = []
            for partition, error in outcomes.items():
                offset, metadata, epoch = offsets[partition]
                result = common.PartitionResult(*partition, offset, metadata or None, epoch)
                result.error = error and error_of(error)
                results.append(result)
            return common.ConsumerGroupTopicPartitions(request.group_id, results)

        return _futures(alter_consumer_group_offsets_request, lambda item: item.group_id, alter)

    # What a log does not have

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        """Raise `KafkaException`: a log has no ACLs or users."""
        raise exception("_NOT_IMPLEMENTED", "A log has no ACLs or users")

    create_acls = describe_acls = delete_acls = _refuse
    describe_user_scram_credentials = alter_user_scram_credentials = _refuse

    def poll(self, timeout: float = -1) -> int:
        """Return 0: nothing is pending."""
        return 0

    def __exit__(self, *_: object) -> None:
        self._handle.close()


def _node(number: int, alive: Mapping[int, DirectoryNode]) -> Any:
    """Return a directory as a broker."""
    node = alive.get(number)
    return common.Node(number, HOST, PORT, None if node is None else node.rack)


def _is_topic(resource: Any) -> bool:
    return int(resource.restype.value) == RESOURCE_TOPIC
