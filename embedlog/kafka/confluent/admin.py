"""`AdminClient` with confluent_kafka's interface: each call returns futures that are done."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, NoReturn, TypeVar

from embedlog.api.consumer_group import DEAD
from embedlog.catalog import INTERNAL, refuse_internal
from embedlog.config import TopicConfig
from embedlog.config.values import setting_text
from embedlog.errors import EmbedlogError
from embedlog.kafka.cluster import HOST, PORT
from embedlog.kafka.confluent.client import LogClient
from embedlog.kafka.confluent.kafka_errors import KafkaException, error_of, exception, translated
from embedlog.kafka.confluent.library import (
    PartitionResult,
    committed_partition,
    confluent_kafka,
    filled,
)
from embedlog.kafka.confluent.library import admin as library
from embedlog.kafka.library import public_name
from embedlog.record import OffsetAndMetadata
from embedlog.record import TopicPartition as Partition
from embedlog.server.admin_service import AdminService, changed_setting
from embedlog.server.cluster import DirectoryNode, cluster_id, controller_id, nodes, placement

TopicPartition: Any = confluent_kafka.TopicPartition
_GroupState: Any = confluent_kafka.ConsumerGroupState
_CLASSIC: Any = confluent_kafka.ConsumerGroupType.CLASSIC
_STATES = {
    "PreparingRebalance": _GroupState.PREPARING_REBALANCING,
    "CompletingRebalance": _GroupState.COMPLETING_REBALANCING,
    "Stable": _GroupState.STABLE,
    DEAD: _GroupState.DEAD,
    "Empty": _GroupState.EMPTY,
}

K = TypeVar("K", bound=Hashable)
Futures = dict[K, Future[Any]]


def __getattr__(name: str) -> Any:
    """Return a class of ``confluent_kafka.admin``."""
    return public_name(library, name)


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


def _itself(item: Any) -> Any:
    return item


class AdminClient(LogClient):
    """Creates and changes topics and groups of a log.

    Each call is carried out before it returns; its futures are done.  What only a cluster can
    answer raises `KafkaException` with ``UNSUPPORTED_VERSION``.
    """

    _original = library.AdminClient

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        self._service = AdminService(self._log)

    # Topics

    def create_topics(
        self, new_topics: list[Any], *, validate_only: bool = False, **_: Any
    ) -> Futures[str]:
        """Create topics from `NewTopic`; a log in one directory ignores the number of replicas."""

        def create(topic: Any) -> None:
            self._service.create_topic(
                *(topic.topic, topic.num_partitions, topic.config or {}),
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
            total = item.new_total_count
            self._service.create_partitions(item.topic, total, validate_only=validate_only)

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
                    confluent_kafka.TopicPartitionInfo(
                        number,
                        None if leader is None else _node(leader, alive),
                        [_node(each, alive) for each in replicas],
                        [_node(each, alive) for each in isr],
                    )
                )
            topic_id = confluent_kafka.Uuid(0, info.id)
            return library.TopicDescription(name, topic_id, name.startswith(INTERNAL), partitions)

        return _futures(topics.topic_names, str, describe)

    def describe_cluster(self, **_: Any) -> Future[Any]:
        """Describe the log as a cluster, whose brokers are the directories that are online."""

        def describe() -> Any:
            alive = nodes(self._log)
            return library.DescribeClusterResult(
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
        if not isinstance(election_type, confluent_kafka.ElectionType):
            raise TypeError("Expected 'election_type' to be of type 'ElectionType'")

        def elect() -> dict[Any, Any]:
            chosen = self._service.partitions()
            if partitions is not None:
                chosen = [Partition(part.topic, part.partition) for part in partitions]
            unclean = election_type is confluent_kafka.ElectionType.UNCLEAN
            results = self._service.elect_leaders(chosen, unclean=unclean)
            return {
                TopicPartition(*part): exception(name) if name else None
                for part, name in results.items()
            }

        return _future(elect)

    # Settings

    def describe_configs(self, resources: list[Any], **_: Any) -> Futures[Any]:
        """Return the settings of topics, as a dict of `ConfigEntry` by name."""

        def describe(resource: Any) -> dict[str, Any]:
            if not _is_topic(resource):
                return {}  # a log has no broker with settings
            config, source = self._log.root.topic(resource.name).config, library.ConfigSource
            changed = config.overrides()
            return {
                name: library.ConfigEntry(
                    *(name, setting_text(value)),
                    source.DYNAMIC_TOPIC_CONFIG if name in changed else source.DEFAULT_CONFIG,
                    is_default=name not in changed,
                )
                for name, value in config.to_dict().items()
            }

        return _futures(resources, _itself, describe)

    def alter_configs(
        self, resources: list[Any], *, validate_only: bool = False, **_: Any
    ) -> Futures[Any]:
        """Replace all settings of topics: those that are not named go back to their defaults."""
        return self._alter(
            *(resources, validate_only),
            lambda config, named: dict.fromkeys(config.overrides()) | named.set_config_dict,
        )

    def incremental_alter_configs(
        self, resources: list[Any], *, validate_only: bool = False, **_: Any
    ) -> Futures[Any]:
        """Change the settings of topics that are named, and no others."""

        def changes(config: TopicConfig, resource: Any) -> dict[str, Any]:
            return {
                entry.name: changed_setting(
                    config, entry.name, entry.incremental_operation.name, entry.value
                )
                for entry in resource.incremental_configs
            }

        return self._alter(resources, validate_only, changes)

    def _alter(
        self,
        resources: list[Any],
        validate_only: bool,
        changes_of: Callable[[TopicConfig, Any], dict[str, Any]],
    ) -> Futures[Any]:
        def alter(resource: Any) -> None:
            if not _is_topic(resource):
                raise exception("INVALID_REQUEST", f"Only topics have settings, got {resource}")
            changes = changes_of(self._log.root.topic(resource.name).config, resource)
            self._service.alter_topic(resource.name, changes, validate_only=validate_only)

        return _futures(resources, _itself, alter)

    # Records

    def list_offsets(self, topic_partition_offsets: Mapping[Any, Any], **_: Any) -> Futures[Any]:
        """Return the offsets that an `OffsetSpec` per partition asks for."""

        def offset(partition: Any) -> Any:
            spec = topic_partition_offsets[partition]._value
            offset, time, epoch = self._service.offset(partition.topic, partition.partition, spec)
            return library.ListOffsetsResultInfo(offset, time, -1 if epoch is None else epoch)

        unknown = {"UnknownTopicOrPartitionError": "_NOENT"}
        return _futures(topic_partition_offsets, _itself, offset, **unknown)

    def delete_records(self, topic_partition_offsets: list[Any], **_: Any) -> Futures[Any]:
        """Delete the records below the offset of each partition; `OFFSET_END` deletes all."""

        def delete(item: Any) -> Any:
            partition = Partition(item.topic, item.partition)
            refuse_internal(item.topic)
            return library.DeletedRecords(
                self._log.delete_records({partition: item.offset})[partition]
            )

        return _futures(topic_partition_offsets, _itself, delete)

    # Groups

    def list_consumer_groups(
        self, *, states: set[Any] | None = None, types: set[Any] | None = None, **_: Any
    ) -> Future[Any]:
        """Return the groups with members or commits, or those in some states."""

        def listing() -> Any:
            result = []
            for name in self._log.groups:
                state = _STATES.get(self._log.groups[name].state)
                if (not states or state in states) and (not types or _CLASSIC in types):
                    result.append(library.ConsumerGroupListing(name, False, state, _CLASSIC))
            return library.ListConsumerGroupsResult(result, [])

        return _future(listing)

    def list_groups(self, group: str | None = None, timeout: float = -1) -> list[Any]:
        """Return `GroupMetadata` of all groups, or of one."""
        groups = []
        with translated():
            for name in self._log.groups:
                if group in (None, name):
                    state = self._log.groups[name].state
                    entry = filled(library.GroupMetadata(), id=name, state=state)
                    groups.append(filled(entry, protocol_type="consumer"))
        return groups

    def describe_consumer_groups(self, group_ids: list[str], **_: Any) -> Futures[str]:
        """Describe groups with their members; one that does not exist is in the state DEAD."""
        if not isinstance(group_ids, list):
            raise TypeError("Expected input to be list of group ids to be described")
        if not group_ids:
            raise ValueError("Expected at least one group to be described")

        def describe(name: str) -> Any:
            group = self._service.group(name)
            members = [_member(member) for member in (group.members if group else ())]
            return library.ConsumerGroupDescription(
                *(name, False, members, (group and group.assignor) or ""),
                _STATES.get(group.state if group else DEAD),
                _node(controller_id(self._log), nodes(self._log)),
                type=_CLASSIC,
            )

        return _futures(group_ids, str, describe)

    def delete_consumer_groups(self, group_ids: list[str], **_: Any) -> Futures[str]:
        """Delete groups without members, with their commits."""
        return _futures(group_ids, str, lambda name: self._log.groups[name].delete())

    def list_consumer_group_offsets(
        self, list_consumer_group_offsets_request: list[Any], **_: Any
    ) -> Futures[str]:
        """Return the commits of a group, as `ConsumerGroupTopicPartitions`."""

        def offsets(request: Any) -> Any:
            wanted = request.topic_partitions
            chosen = None if wanted is None else [(each.topic, each.partition) for each in wanted]
            committed = self._service.committed(request.group_id, chosen)
            result = [committed_partition(*item) for item in committed.items()]
            return confluent_kafka.ConsumerGroupTopicPartitions(request.group_id, result)

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
            results = []
            for part, error in self._service.commit_offsets(request.group_id, offsets).items():
                result = committed_partition(part, offsets[part], PartitionResult)
                result.error = error and error_of(error)
                results.append(result)
            return confluent_kafka.ConsumerGroupTopicPartitions(request.group_id, results)

        return _futures(alter_consumer_group_offsets_request, lambda item: item.group_id, alter)

    # What a log does not have

    def __getattr__(self, name: str) -> Any:
        """Refuse the other methods of confluent_kafka's admin client."""
        if name.startswith("_") or not hasattr(self._original, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def refuse(*_: Any, **__: Any) -> NoReturn:
            text = f"{name} asks for what only a cluster of brokers has"
            raise exception("UNSUPPORTED_VERSION", text)

        return refuse

    def poll(self, timeout: float = -1) -> int:
        """Return 0: nothing is pending."""
        return 0

    def __exit__(self, *_: object) -> None:
        self._handle.close()


def _node(number: int, alive: Mapping[int, DirectoryNode]) -> Any:
    """Return a directory as a broker."""
    node = alive.get(number)
    return confluent_kafka.Node(number, HOST, PORT, None if node is None else node.rack)


def _member(member: Any) -> Any:
    assigned = [TopicPartition(*part) for part in member.partitions]
    return library.MemberDescription(
        *(member.member_id, member.client_id, HOST),
        library.MemberAssignment(assigned),
        member.group_instance_id,
    )


def _is_topic(resource: Any) -> bool:
    return bool(int(resource.restype.value) == library.RESOURCE_TOPIC)
