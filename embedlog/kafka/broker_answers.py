"""A log answers the requests that kafka-python's admin client sends to the brokers of a cluster."""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from embedlog.api import Log
from embedlog.catalog import INTERNAL
from embedlog.config import MaintenanceConfig, TopicConfig
from embedlog.config.values import setting_text
from embedlog.errors import EmbedlogError, InvalidConfigError
from embedlog.kafka.admin_service import AdminService, changed_setting
from embedlog.kafka.cluster import (
    BROKER_VERSION,
    HOST,
    NO_LEADER,
    PORT,
    LogCluster,
    cluster_id,
    controller_id,
    nodes,
    placement,
)
from embedlog.kafka.errors import translated
from embedlog.kafka.kafka_python import kafka
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.replication import reassign
from embedlog.replication.root import ReplicatedRoot

_TYPES = {bool: "BOOLEAN", type(None): "BOOLEAN", int: "LONG", float: "DOUBLE", str: "STRING"}
_ELECTION_ERRORS = {
    "": kafka.errors.NoError,
    "ELECTION_NOT_NEEDED": kafka.errors.ElectionNotNeededError,
    "ELIGIBLE_LEADERS_NOT_AVAILABLE": kafka.errors.EligibleLeadersNotAvailableError,
    "PREFERRED_LEADER_NOT_AVAILABLE": kafka.errors.PreferredLeaderNotAvailableError,
}
_messages: Any = kafka.protocol.consumer.metadata
_resource_types: Any = kafka.admin.ConfigResourceType

Fields = dict[str, Any]
"""A response of kafka-python's protocol, or a part of one; what is left out has its default."""

_failures: ContextVar[list[EmbedlogError]] = ContextVar("failures")
"""The errors that answers have as codes, of the call of the admin client that runs."""


class LogBrokers(LogCluster):
    """The brokers of a log, in the place of kafka-python's connections to those of a cluster.

    ``CreateTopicsRequest`` is answered by the method ``_create_topics``, and so on.  A request
    without such a method is refused: it asks for what only a cluster has.
    """

    broker_version = BROKER_VERSION
    broker_version_data = kafka.protocol.broker_version_data.BrokerVersionData(BROKER_VERSION)
    config = kafka.net.manager.KafkaConnectionManager.DEFAULT_CONFIG

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self._service = AdminService(log)

    # What kafka-python calls

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run a coroutine of the admin client, and return its result.

        Raises:
            KafkaError: What it raises; for an error of embedlog that one with the same sentence.
        """
        _failures.set([])
        try:
            call(*args).send(None)
        except StopIteration as done:
            return done.value
        except kafka.errors.KafkaError as error:
            for cause in _failures.get():
                if type(_as_kafka(cause)) is type(error):
                    raise _as_kafka(cause) from cause
            raise
        raise AssertionError("nothing on a log is waited for")

    async def send(self, request: Any, node_id: int | None = None) -> Any:
        """Return the answer of a broker, by default of the controller."""
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", request.name.removesuffix("Request")).lower()
        answer = getattr(self, f"_{name}", None)
        if answer is None:
            raise kafka.errors.UnsupportedVersionError(
                f"{request.name} asks for what only a cluster of brokers has"
            )
        version = self.broker_version_data.api_version(request)
        # As a broker gets it: with structs for tuples, and text for numbers.
        request = type(request).decode(request.encode(version=version), version=version)
        request.with_header()
        kind = request.header.get_response_class()
        try:
            fields = answer(request, controller_id(self._log) if node_id is None else node_id)
        except EmbedlogError as error:
            raise _as_kafka(error) from error
        return kind(**{name: _structs(kind.fields[name], fields[name], version) for name in fields})

    async def sleep(self, seconds: float) -> None:
        """Wait before a request is repeated."""
        threading.Event().wait(seconds)

    async def get_connection(self, node_id: int) -> LogBrokers:
        """Return the object that knows the versions of a broker."""
        return self

    def get_coordinator(self, key: str, key_type: Any) -> int:
        """Return the broker that answers for a group."""
        return controller_id(self._log)

    # Outcomes

    def _outcome(self, call: Callable[..., Fields | None], *args: Any) -> Fields:
        """Return the fields that a call returns, or the code and the text of its error."""
        try:
            return {"error_code": 0, "error_message": None, **(call(*args) or {})}
        except EmbedlogError as error:
            return self._failure(error)

    def _failure(self, error: EmbedlogError) -> Fields:
        _failures.get().append(error)
        code = getattr(_as_kafka(error), "errno", None)
        return {"error_code": -1 if code is None else code, "error_message": str(error)}

    def _each(
        self, items: Iterable[Any], names: tuple[str, ...], call: Callable[[Any], Fields | None]
    ) -> list[Fields]:
        """Return the outcome of a call for each item, with the fields that identify the item."""
        return [
            {**{name: getattr(item, name) for name in names}, **self._outcome(call, item)}
            for item in items
        ]

    def _each_partition(
        self, topics: Iterable[Any], call: Callable[[TopicPartition, Any], Fields | None]
    ) -> list[Fields]:
        return _by_topic((part, self._outcome(call, part, item)) for part, item in _items(topics))

    # Topics and brokers

    def _metadata(self, request: Any, node: int) -> Fields:
        names = self._log.topics(internal=True)
        if request.topics is not None:
            names = [topic.name or topic.topic_id for topic in request.topics]
        topics = list(map(self._topic, names))
        return {"controller_id": controller_id(self._log), "topics": topics}

    def _topic(self, name: str | uuid.UUID | None) -> Fields:
        infos = self._log.root.topics()
        if isinstance(name, uuid.UUID):
            name = next((each for each, info in infos.items() if info.id == name.int), None)
        if name is None or name not in infos:
            return {"error_code": kafka.errors.UnknownTopicOrPartitionError.errno, "name": name}
        alive, partitions = nodes(self._log), []
        for part in self._log.describe_topic(name)["partitions"]:
            leader, replicas, isr = placement(self._log, name, part["partition"])
            missing = kafka.errors.LeaderNotAvailableError.errno if leader is None else 0
            partitions.append(
                {
                    "error_code": missing,
                    "partition_index": part["partition"],
                    "leader_id": NO_LEADER if leader is None else leader,
                    "leader_epoch": part["leader_epoch"],
                    "replica_nodes": list(replicas),
                    "isr_nodes": list(isr),
                    "offline_replicas": [each for each in replicas if each not in alive],
                }
            )
        topic_id, internal = uuid.UUID(int=infos[name].id), name.startswith(INTERNAL)
        facts = {"name": name, "topic_id": topic_id, "is_internal": internal}
        return {**facts, "partitions": partitions}

    def _describe_topic_partitions(self, request: Any, node: int) -> Fields:
        described, left, cursor = [], request.response_partition_limit, request.cursor
        for name in sorted(topic.name for topic in request.topics):
            if cursor is not None and name < cursor.topic_name:
                continue
            topic, first = self._topic(name), 0
            partitions = topic.get("partitions", [])
            if cursor is not None and name == cursor.topic_name:
                first = cursor.partition_index
            page = partitions[first : first + left]
            described.append({**topic, "partitions": page})
            left -= len(page)
            if first + len(page) < len(partitions):
                after = {"topic_name": name, "partition_index": first + len(page)}
                return {"topics": described, "next_cursor": after}
        return {"topics": described}

    def _create_topics(self, request: Any, node: int) -> Fields:
        def create(topic: Any) -> Fields:
            assigned = {each.partition_index: each.broker_ids for each in topic.assignments or ()}
            count = self._service.create_topic(
                *(topic.name, topic.num_partitions),
                {each.name: each.value for each in topic.configs or ()},
                replication_factor=topic.replication_factor,
                replicas=[assigned.get(n, ()) for n in range(max(assigned, default=-1) + 1)],
                validate_only=request.validate_only,
            )
            copies = topic.replication_factor
            if request.validate_only:
                return {"num_partitions": count, "replication_factor": copies}
            copies = len(placement(self._log, topic.name, 0).replicas)
            topic_id = uuid.UUID(int=self._log.root.topic(topic.name).id)
            return {"topic_id": topic_id, "num_partitions": count, "replication_factor": copies}

        return {"topics": self._each(request.topics, ("name",), create)}

    def _delete_topics(self, request: Any, node: int) -> Fields:
        def delete(topic: Any) -> Fields:
            name = topic.name or self._topic(topic.topic_id)["name"]
            topic_id = uuid.UUID(int=self._log.root.topic(name).id)
            self._log.delete_topic(name)
            return {"name": name, "topic_id": topic_id}

        return {"responses": self._each(request.topics, ("name",), delete)}

    def _create_partitions(self, request: Any, node: int) -> Fields:
        def create(topic: Any) -> None:
            only_check = request.validate_only
            self._service.create_partitions(topic.name, topic.count, validate_only=only_check)

        return {"results": self._each(request.topics, ("name",), create)}

    def _describe_cluster(self, request: Any, node: int) -> Fields:
        return {
            "cluster_id": cluster_id(self._log),
            "controller_id": controller_id(self._log),
            "brokers": [
                {"broker_id": each.id, "host": HOST, "port": PORT, "rack": each.rack}
                for each in nodes(self._log).values()
            ],
        }

    # Copies

    def _elect_leaders(self, request: Any, node: int) -> Fields:
        results = []
        for topic in request.topic_partitions:
            chosen = [TopicPartition(topic.topic, number) for number in topic.partitions]
            elected = self._service.elect_leaders(chosen, unclean=bool(request.election_type))
            partitions = [
                {"partition_id": part.partition, "error_code": _ELECTION_ERRORS[name].errno}
                for part, name in elected.items()
            ]
            results.append({"topic": topic.topic, "partition_result": partitions})
        return {"replica_election_results": results}

    def _alter_partition_reassignments(self, request: Any, node: int) -> Fields:
        root = self._log.root
        if not isinstance(root, ReplicatedRoot):
            text = "A log in one directory has no replicas"
            raise kafka.errors.UnsupportedVersionError(text)
        root.context.check_writable()

        def alter(partition: TopicPartition, item: Any) -> Fields | None:
            if item.replicas is not None:
                reassign.begin(root, {partition: item.replicas})
            elif not reassign.cancel(root, [partition]):
                # It may have ended, or been cancelled, a moment ago.
                return {"error_code": kafka.errors.NoReassignmentInProgressError.errno}
            return None

        return {"responses": self._each_partition(request.topics, alter)}

    def _list_partition_reassignments(self, request: Any, node: int) -> Fields:
        root, wanted = self._log.root, None
        if not isinstance(root, ReplicatedRoot):
            return {"topics": []}
        if request.topics is not None:
            wanted = {(topic.name, n) for topic in request.topics for n in topic.partition_indexes}
        moving = (
            (TopicPartition(info.name, number), assignment)
            for info, number, assignment in root.assignments()
            if assignment.is_reassigning
        )
        topics = _by_topic(
            (
                part,
                {
                    "replicas": list(moves.replicas),
                    "adding_replicas": [
                        each for each in moves.adding_replicas if each in moves.target_replicas
                    ],
                    "removing_replicas": list(moves.removing_replicas),
                },
            )
            for part, moves in moving
            if wanted is None or part in wanted
        )
        return {"topics": topics}

    def _describe_log_dirs(self, request: Any, node: int) -> Fields:
        topics = []
        for topic in request.topics:
            copies = []
            for number in topic.partitions:
                _, replicas, isr = placement(self._log, topic.topic, number)
                if node in replicas:
                    # The copies in sync have the same files.
                    size = self._log.root.partition(topic.topic, number).size_bytes()
                    lag = {"offset_lag": 0 if node in isr else -1}
                    copies.append({"partition_index": number, "partition_size": size, **lag})
            if copies:
                topics.append({"name": topic.topic, "partitions": copies})
        return {"results": [{"log_dir": self._broker(node).path, "topics": topics}]}

    def _alter_replica_log_dirs(self, request: Any, node: int) -> Fields:
        """Accept the directory of a broker, which is its only one.

        AlterPartitionReassignments moves copies to other directories.
        """
        path = self._broker(node).path
        other = kafka.errors.LogDirNotFoundError.errno
        results = [
            {
                "topic_name": topic.name,
                "partitions": [
                    {"partition_index": n, "error_code": 0 if directory.path == path else other}
                    for n in topic.partitions
                ],
            }
            for directory in request.dirs
            for topic in directory.topics
        ]
        return {"results": results}

    # Records

    def _delete_records(self, request: Any, node: int) -> Fields:
        def delete(partition: TopicPartition, item: Any) -> Fields:
            return {"low_watermark": self._log.delete_records({partition: item.offset})[partition]}

        return {"topics": self._each_partition(request.topics, delete)}

    def _list_offsets(self, request: Any, node: int) -> Fields:
        def offset(partition: TopicPartition, item: Any) -> Fields:
            found, timestamp, epoch = self._service.offset(*partition, int(item.timestamp))
            known = -1 if epoch is None else epoch
            return {"offset": found, "timestamp": timestamp, "leader_epoch": known}

        return {"topics": self._each_partition(request.topics, offset)}

    # Settings

    def _describe_configs(self, request: Any, node: int) -> Fields:
        results = []
        for resource in request.resources:
            if resource.resource_type == _resource_types.TOPIC:
                values = self._service.topic_config(resource.resource_name).to_dict()
                defaults, read_only = TopicConfig().to_dict(), False
            else:
                values, read_only = self._settings_of_broker(resource), True
                defaults = values
            keys = resource.configuration_keys
            configs = [
                _entry(name, value, defaults[name], read_only)
                for name, value in values.items()
                if keys is None or name in keys
            ]
            where = {"resource_type": resource.resource_type}
            results.append({**where, "resource_name": resource.resource_name, "configs": configs})
        return {"results": results}

    def _settings_of_broker(self, resource: Any) -> dict[str, Any]:
        is_broker = resource.resource_type == _resource_types.BROKER
        node = self._broker(int(resource.resource_name) if is_broker else NO_LEADER)
        values = MaintenanceConfig().to_dict() | {
            "auto.create.topics.enable": self._log.root.auto_create,
            "broker.id": node.id,
            "log.dirs": node.path,
            "num.partitions": 1,
        }
        return values if node.rack is None else {**values, "broker.rack": node.rack}

    def _broker(self, number: int) -> Any:
        alive = nodes(self._log)
        if number not in alive:
            names = ", ".join(map(str, alive))
            raise kafka.errors.InvalidRequestError(f"The brokers of the log are {names}")
        return alive[number]

    def _list_config_resources(self, request: Any, node: int) -> Fields:
        brokers = list(map(str, nodes(self._log)))
        names = {_resource_types.TOPIC: self._log.topics(), _resource_types.BROKER: brokers}
        return {
            "config_resources": [
                {"resource_type": kind, "resource_name": name}
                for kind, of_kind in names.items()
                for name in of_kind
                if not request.resource_types or kind in request.resource_types
            ]
        }

    def _incremental_alter_configs(self, request: Any, node: int) -> Fields:
        operation = kafka.admin.AlterConfigOp

        def changes(config: TopicConfig, entries: Any) -> dict[str, Any]:
            return {
                each.name: changed_setting(
                    config, each.name, operation(each.config_operation).name, each.value
                )
                for each in entries
            }

        return self._alter(request, changes)

    def _alter_configs(self, request: Any, node: int) -> Fields:
        def changes(config: TopicConfig, entries: Any) -> dict[str, Any]:
            return dict.fromkeys(config.overrides()) | {each.name: each.value for each in entries}

        return self._alter(request, changes)

    def _alter(
        self, request: Any, changes_of: Callable[[TopicConfig, Any], dict[str, Any]]
    ) -> Fields:
        def alter(resource: Any) -> None:
            if resource.resource_type != _resource_types.TOPIC:
                text = "Only the settings of topics can be changed"
                raise kafka.errors.UnsupportedVersionError(text)
            name = resource.resource_name
            changes = changes_of(self._service.topic_config(name), resource.configs or ())
            self._service.alter_topic(name, changes, validate_only=request.validate_only)

        identity = ("resource_type", "resource_name")
        return {"responses": self._each(request.resources, identity, alter)}

    # Groups

    def _list_groups(self, request: Any, node: int) -> Fields:
        states, groups = request.states_filter, []
        if node == controller_id(self._log) and "classic" in (request.types_filter or ["classic"]):
            for name in self._log.groups:
                state = self._log.groups[name].state
                if not states or state in states:
                    facts = {"group_id": name, "protocol_type": "consumer", "group_state": state}
                    groups.append({**facts, "group_type": "classic"})
        return {"groups": groups}

    def _describe_groups(self, request: Any, node: int) -> Fields:
        described = []
        for name in request.groups:
            group = self._service.group(name)
            if group is None:
                missing = kafka.errors.GroupIdNotFoundError.errno
                described.append(
                    {"error_code": missing, "group_id": name, "group_state": "Dead", "members": []}
                )
                continue
            described.append(
                {
                    "group_id": name,
                    "group_state": group.state,
                    "protocol_type": "consumer",
                    "protocol_data": group.assignor or "",
                    "members": list(map(_member, group.members)),
                }
            )
        return {"groups": described}

    def _delete_groups(self, request: Any, node: int) -> Fields:
        def delete(name: str) -> None:
            self._log.groups[name].delete()

        names = request.groups_names
        return {"results": [{"group_id": name, **self._outcome(delete, name)} for name in names]}

    def _offset_fetch(self, request: Any, node: int) -> Fields:
        groups = []
        for group in request.groups:
            wanted = None
            if group.topics is not None:
                wanted = [
                    (topic.name, n) for topic in group.topics for n in topic.partition_indexes
                ]
            topics = _by_topic(
                (part, _position(position))
                for part, position in self._service.committed(group.group_id, wanted).items()
            )
            groups.append({"group_id": group.group_id, "topics": topics})
        return {"groups": groups}

    def _offset_commit(self, request: Any, node: int) -> Fields:
        positions = {}
        for partition, item in _items(request.topics):
            epoch = item.committed_leader_epoch
            positions[partition] = OffsetAndMetadata(
                item.committed_offset, item.committed_metadata or "", None if epoch < 0 else epoch
            )
        outcomes = self._service.commit_offsets(request.group_id, positions)
        topics = _by_topic(
            (part, {"error_code": 0} if error is None else self._failure(error))
            for part, error in outcomes.items()
        )
        return {"topics": topics}

    def _offset_delete(self, request: Any, node: int) -> Fields:
        group = self._log.groups[request.group_id]
        topics = self._each_partition(
            request.topics, lambda partition, _: group.delete_offsets([partition])
        )
        return {"topics": topics}

    def _leave_group(self, request: Any, node: int) -> Fields:
        group = self._log.groups[request.group_id]

        def remove(member: Any) -> None:
            group.remove_members(member.member_id or member.group_instance_id)

        identity = ("member_id", "group_instance_id")
        return {"members": self._each(request.members, identity, remove)}


def _as_kafka(error: EmbedlogError) -> Any:
    """Return an error as kafka-python's admin client raises it."""
    if isinstance(error, InvalidConfigError):
        return kafka.errors.InvalidConfigurationError(str(error))
    return translated(error)


def _structs(field: Any, value: Any, version: int) -> Any:
    """Return a value of a message with kafka-python's structs in the place of dicts."""
    if field.is_struct_array():
        return [_structs(field.array_of, item, version) for item in value]
    if not isinstance(value, dict):
        return value
    parts = {
        name: _structs(field.fields[name], part, version)
        for name, part in value.items()
        if name in field.fields
    }
    return field.data_class(version=version, **parts)


def _items(topics: Iterable[Any]) -> Iterator[tuple[TopicPartition, Any]]:
    """Yield the partitions that a request names, with what it says of each."""
    for topic in topics:
        for item in topic.partitions:
            yield TopicPartition(topic.name, item.partition_index), item


def _by_topic(results: Iterable[tuple[TopicPartition, Fields]]) -> list[Fields]:
    """Return the results of partitions as a response has them."""
    topics: dict[str, list[Fields]] = {}
    for (topic, number), fields in results:
        topics.setdefault(topic, []).append({"partition_index": number, **fields})
    return [{"name": name, "partitions": partitions} for name, partitions in topics.items()]


def _entry(name: str, value: Any, default: Any, read_only: bool) -> Fields:
    """Return a setting as DescribeConfigs has it."""
    sources = kafka.admin.ConfigSourceType
    source = sources.DEFAULT_CONFIG if value == default else sources.DYNAMIC_TOPIC_CONFIG
    return {
        "name": name,
        "value": setting_text(value),
        "read_only": read_only,
        "config_source": sources.STATIC_BROKER_CONFIG if read_only else source,
        "config_type": kafka.admin.ConfigType[_TYPES[type(value)]],
    }


def _position(committed: OffsetAndMetadata | None) -> Fields:
    offset, metadata, epoch = committed or OffsetAndMetadata(-1, "", None)
    known = -1 if epoch is None else epoch
    return {"committed_offset": offset, "metadata": metadata, "committed_leader_epoch": known}


def _member(member: Any) -> Fields:
    by_topic: dict[str, list[int]] = {}
    for topic, number in sorted(member.partitions):
        by_topic.setdefault(topic, []).append(number)
    subscription = _messages.ConsumerProtocolSubscription(
        version=0, topics=list(member.topics), user_data=b""
    )
    assignment = _messages.ConsumerProtocolAssignment(
        version=0, assigned_partitions=list(by_topic.items()), user_data=b""
    )
    return {
        "member_id": member.member_id,
        "group_instance_id": member.group_instance_id,
        "client_id": member.client_id,
        "client_host": f"/{HOST}",
        "member_metadata": subscription.encode(),
        "member_assignment": assignment.encode(),
    }
