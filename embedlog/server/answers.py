"""A log answers the requests of Kafka's protocol that administer it, as a cluster would.

`Answers.create_topics` answers ``CreateTopicsRequest``, and so on, for clients on the wire as for
the admin client of kafka-python on a log.  A request has the fields of Kafka's schemas as
attributes, and an answer is a dict of those of the response; what is left out has its default.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

from embedlog.api import Log
from embedlog.catalog import INTERNAL, TopicInfo, epochs
from embedlog.config import MaintenanceConfig, ShareGroupConfig, TopicConfig
from embedlog.config.settings import Settings
from embedlog.config.values import setting_text
from embedlog.errors import (
    EmbedlogError,
    GroupIdNotFoundError,
    GroupSubscribedToTopicError,
    InvalidReplicationAssignmentError,
    InvalidReplicationFactorError,
    InvalidTopicError,
)
from embedlog.groups.membership import MODERN, SHARE
from embedlog.partition import PartitionLog
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.replication import reassign
from embedlog.replication.root import ReplicatedRoot
from embedlog.server.admin_service import AdminService, changed_setting
from embedlog.server.cluster import NO_LEADER, Cluster, cluster_id, controller_id, topic_id
from embedlog.server.error_codes import ApiError, ErrorCode, code_of
from embedlog.server.protocol import encode

Fields = dict[str, Any]
"""A response, or a part of one."""

TOPIC, BROKER, GROUP = 2, 4, 32
"""Kafka's numbers for resources that have settings."""
_TYPES = {bool: 1, type(None): 1, int: 5, float: 6, str: 2}
"""Kafka's numbers for types of settings."""
_INTS = frozenset(
    {"broker.id", "index.interval.bytes", "max.message.bytes", "min.insync.replicas"}
    | {"num.partitions", "segment.bytes", "segment.index.bytes", "share.delivery.count.limit"}
    | {"share.partition.max.record.locks", "share.record.lock.duration.ms"}
)
_TYPES_BY_NAME = {"cleanup.policy": 7, **dict.fromkeys(_INTS, 3)}
"""Where a value of Python does not tell: lists, and what has 32 bits in Kafka."""
_OF_TOPIC, _OF_BROKER, _DEFAULT, _OF_GROUP = 1, 4, 5, 8
"""Kafka's numbers for where the value of a setting is from."""
_SOURCES = {TOPIC: _OF_TOPIC, GROUP: _OF_GROUP}
"""Of values that are not defaults, by what has settings that can be changed."""
_SPECS_SINCE = {-1: 0, -2: 0, -3: 7, -4: 8, -5: 9, -6: 11}
"""The first version of ListOffsets that has each of Kafka's numbers for offsets to look up."""
_OPERATIONS = ("SET", "DELETE", "APPEND", "SUBTRACT")
"""By their numbers in IncrementalAlterConfigs."""


MODERN_STATES = {"PreparingRebalance": "Assigning", "CompletingRebalance": "Reconciling"}
"""Kafka's names for states of groups with members of KIP-848, by those of classic groups."""
_NO_ID = UUID(int=0)
_ALL_OPERATIONS_ON_TOPIC, _ALL_OPERATIONS_ON_CLUSTER = 0b1101_1111_1000, 0b1_1111_1010_0000
_ALL_OPERATIONS_ON_GROUP = 0b1101_0100_1000
"""What a client may do, as bits: everything, since there are no access control lists."""
_MAX_DESCRIBED = 2000
"""How many partitions DescribeTopicPartitions describes at most."""
_BROKERS, _CONTROLLERS = 1, 2
"""Kafka's numbers for what DescribeCluster describes."""
Commit = Callable[
    [dict[TopicPartition, OffsetAndMetadata]],
    Mapping[TopicPartition, EmbedlogError | ApiError | None],
]
"""Commits positions, and returns the error of each partition."""


class Caller(NamedTuple):
    """Who asks, as far as answers depend on it."""

    host: str
    """The address at which the caller has reached the log, which answers give as that of all
    brokers."""
    port: int
    node: int
    """The broker that is asked."""
    client_id: str = ""
    client_host: str = ""
    version: int = 1 << 15
    """The version of the request."""
    is_admin: bool = False
    """Whether it is an admin client in this process, whose commits are durable."""
    is_worker: bool = False
    """Whether another process of the server asks, for what this one has in memory."""


class _TopicPartitions(NamedTuple):
    topic: str
    partitions: list[int]


class Answers:
    """Answers requests.

    Args:
        log: The log.
        note: Is passed the errors that answers have as codes.
        cluster: What clients see; by default the directories.
    """

    def __init__(
        self,
        log: Log,
        note: Callable[[EmbedlogError | ApiError], object] = lambda _: None,
        cluster: Cluster | None = None,
    ) -> None:
        self.log, self.note, self.cluster = log, note, cluster or Cluster(log)
        self.service = AdminService(log)
        self._names: tuple[int, dict[UUID, str]] = -1, {}
        self.unstable: Callable[[str, Caller], Collection[TopicPartition]] = lambda *_: ()
        """Returns the partitions of a group whose offsets open transactions commit."""

    # Outcomes

    def outcome(self, call: Callable[..., Fields | None], *args: Any) -> Fields:
        """Return the fields that a call returns, or the code and the text of its error."""
        try:
            return {"error_code": 0, "error_message": None, **(call(*args) or {})}
        except (EmbedlogError, ApiError) as error:
            return self.failure(error)
        except ValueError as error:  # Of an argument that no client of embedlog passes.
            return self.failure(ApiError(ErrorCode.INVALID_REQUEST, str(error)))

    def failure(self, error: EmbedlogError | ApiError) -> Fields:
        """Return the code and the text of an error."""
        self.note(error)
        return {"error_code": int(code_of(error)), "error_message": str(error)}

    def each(
        self, items: Iterable[Any], names: tuple[str, ...], call: Callable[[Any], Fields | None]
    ) -> list[Fields]:
        """Return the outcome of a call for each item, with the fields that identify the item."""
        return [
            {**{name: getattr(item, name) for name in names}, **self.outcome(call, item)}
            for item in items
        ]

    def each_partition(
        self, topics: Iterable[Any], call: Callable[[TopicPartition, Any], Fields | None]
    ) -> list[Fields]:
        """Return the outcome of a call for each partition of a request, by topic."""
        return by_topic((part, self.outcome(call, part, item)) for part, item in _items(topics))

    def topic_name(self, number: UUID) -> str | None:
        """Return the name of the topic that has an id; None without one."""
        version = self.log.root.version()
        if version != self._names[0]:
            infos = self.log.root.topics()
            self._names = version, {topic_id(self.log, each): n for n, each in infos.items()}
        return self._names[1].get(number)

    def named(self, name: str | None, number: UUID) -> str:
        """Return the name of a topic that a request names, or has the id of.

        Raises:
            ApiError: No topic has the id.
        """
        found = name or self.topic_name(number)
        if found is None:
            raise ApiError(ErrorCode.UNKNOWN_TOPIC_ID, f"There is no topic with the id {number}")
        return found

    def partition(self, name: str, number: int) -> PartitionLog:
        """Return a partition.

        Raises:
            ApiError: There is none, and there cannot be one of that name.
            UnknownTopicOrPartitionError: There is none.
        """
        try:
            return self.log.root.partition(name, number)
        except InvalidTopicError as error:
            raise _unknown(error) from error

    # Topics and brokers

    def metadata(self, request: Any, caller: Caller) -> Fields:
        """Answer: brokers, and topics with their partitions."""
        log = self.log
        if request.topics is None or (caller.version == 0 and not request.topics):
            every = (self._asked_topic(name, _NO_ID, False) for name in log.root.topics())
            topics = [each for each in every if not each["error_code"]]
        else:
            create = caller.version < 4 or request.allow_auto_topic_creation
            topics = [
                self._asked_topic(each.name, each.topic_id, create) for each in request.topics
            ]
        return {
            "brokers": self._brokers(caller, "node_id"),
            "cluster_id": cluster_id(log),
            "controller_id": controller_id(log),
            "topics": _with_operations(topics, request.include_topic_authorized_operations),
            **_operations_on_cluster(request),
        }

    def _asked_topic(self, name: str | None, number: UUID, create: bool) -> Fields:
        root = self.log.root
        try:
            # An id counts, not a name, which Java's consumer of a pattern leaves empty beside it.
            if name is None or number != _NO_ID:
                name = self.named(None, number)
            return self._topic(root.ensure_topic(name) if create else root.topic(name))
        except (EmbedlogError, ApiError) as error:
            name = name if number == _NO_ID else None
            return {"name": name, "topic_id": number, **self.failure(error)}

    def _topic(self, info: TopicInfo) -> Fields:
        """Return a topic as Metadata and DescribeTopicPartitions have it."""
        alive, partitions = self.cluster.nodes(), []
        tails = self.log.root.tails([info])
        for number in range(info.partitions):
            leader, replicas, isr = self.cluster.placement(info.name, number)
            tail = tails.get(TopicPartition(info.name, number))
            partitions.append(
                {
                    "error_code": int(ErrorCode.LEADER_NOT_AVAILABLE) if leader is None else 0,
                    "partition_index": number,
                    "leader_id": NO_LEADER if leader is None else leader,
                    "leader_epoch": 0 if tail is None else tail.leader_epoch,
                    "replica_nodes": list(replicas),
                    "isr_nodes": list(isr),
                    "offline_replicas": [each for each in replicas if each not in alive],
                    # Java's client takes no null for none.
                    "eligible_leader_replicas": [],
                    "last_known_elr": [],
                }
            )
        return {
            "error_code": 0,
            "name": info.name,
            "topic_id": topic_id(self.log, info),
            "is_internal": info.name.startswith(INTERNAL),
            "partitions": partitions,
        }

    def _brokers(self, caller: Caller, name: str) -> list[Fields]:
        return [
            {name: each.id, **self.address(each.id, caller), "rack": each.rack}
            for each in self.cluster.nodes().values()
        ]

    def address(self, node: int, caller: Caller) -> Fields:
        """Return where a caller reaches a broker."""
        return {"host": caller.host, "port": self.cluster.port(node) or caller.port}

    def describe_topic_partitions(self, request: Any, caller: Caller) -> Fields:
        """Answer: topics with their partitions, a page of them."""
        described, cursor = list[Fields](), request.cursor
        left = min(max(request.response_partition_limit, 1), _MAX_DESCRIBED)
        names = [topic.name for topic in request.topics] or self.log.root.topics()
        if cursor is not None and cursor.partition_index < 0:
            failed = self.failure(ApiError(ErrorCode.INVALID_REQUEST, "The cursor is negative"))
            return {"topics": [{"name": topic.name, **failed} for topic in request.topics]}
        for name in sorted(names):
            if cursor is not None and name < cursor.topic_name:
                continue
            if left == 0:
                return {"topics": described, "next_cursor": {"topic_name": name}}
            topic, first = self._asked_topic(name, _NO_ID, False), 0
            partitions = topic.get("partitions", [])
            if cursor is not None and name == cursor.topic_name:
                first = cursor.partition_index
            page = partitions[first : first + left]
            described += _with_operations([{**topic, "partitions": page}], True)
            left -= len(page)
            if first + len(page) < len(partitions):
                after = {"topic_name": name, "partition_index": first + len(page)}
                return {"topics": described, "next_cursor": after}
        return {"topics": described}

    def create_topics(self, request: Any, caller: Caller) -> Fields:
        """Answer: creates topics, or checks that it could."""

        def create(topic: Any) -> Fields:
            assigned = {each.partition_index: each.broker_ids for each in topic.assignments or ()}
            if topic.replication_factor < 1 and topic.replication_factor != -1:
                raise InvalidReplicationFactorError(
                    f"A replication factor is at least 1, got {topic.replication_factor}"
                )
            by_hand = topic.num_partitions == topic.replication_factor == -1
            if names.count(topic.name) > 1 or (assigned and not by_hand):
                text = "A topic is there once, with either an assignment or numbers"
                raise ApiError(ErrorCode.INVALID_REQUEST, text)
            settings = {each.name: each.value for each in topic.configs or ()}
            if None in settings.values():
                raise ApiError(ErrorCode.INVALID_CONFIG, "The value of a setting is null")
            count = self.service.create_topic(
                *(topic.name, topic.num_partitions, settings),
                replication_factor=topic.replication_factor,
                replicas=_in_order(assigned),
                validate_only=request.validate_only,
            )
            if request.validate_only:
                copies = topic.replication_factor if self.log.root.replicated else 1
                return {"num_partitions": count, "replication_factor": copies}
            info = self.log.root.topic(topic.name)
            return {
                "topic_id": topic_id(self.log, info),
                "num_partitions": count,
                "replication_factor": len(self.cluster.placement(topic.name, 0).replicas),
                "configs": _entries(info.config.to_dict(), TopicConfig().to_dict()),
            }

        names = [topic.name for topic in request.topics]
        # A name that is there twice has one answer.
        topics = {topic.name: topic for topic in request.topics}.values()
        return {"topics": self.each(topics, ("name",), create)}

    def delete_topics(self, request: Any, caller: Caller) -> Fields:
        """Answer: deletes topics."""

        def delete(name: str | None, number: UUID) -> Fields:
            # kafka-python's requests have None where they have no id.
            if (name is None) == (number in (None, _NO_ID)):
                raise ApiError(ErrorCode.INVALID_REQUEST, "Either the name or the id")
            name = self.named(name, number)
            try:
                deleted = topic_id(self.log, self.log.root.topic(name))
            except InvalidTopicError as error:
                raise _unknown(error) from error
            self.log.delete_topic(name)
            return {"name": name, "topic_id": deleted}

        asked = [(topic.name, topic.topic_id) for topic in request.topics or ()]
        asked += [(name, _NO_ID) for name in getattr(request, "topic_names", None) or ()]
        return {
            "responses": [
                {"name": name, "topic_id": number, **self.outcome(delete, name, number)}
                for name, number in asked
            ]
        }

    def create_partitions(self, request: Any, caller: Caller) -> Fields:
        """Answer: adds partitions."""

        def create(topic: Any) -> None:
            only_check = request.validate_only
            try:
                added = topic.count - self.log.root.topic(topic.name).partitions
            except InvalidTopicError as error:
                raise _unknown(error) from error
            if added > 0 and topic.assignments and len(topic.assignments) != added:
                text = f"{added} more partitions, but {len(topic.assignments)} assignments of them"
                raise ApiError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, text)
            self.service.create_partitions(topic.name, topic.count, validate_only=only_check)

        return {"results": self.each(request.topics, ("name",), create)}

    def describe_cluster(self, request: Any, caller: Caller) -> Fields:
        """Answer: brokers.

        Raises:
            ApiError: It is asked for others.
        """
        if request.endpoint_type == _CONTROLLERS:
            text = "These are brokers, and clients of the log do not reach its controllers"
            raise ApiError(ErrorCode.MISMATCHED_ENDPOINT_TYPE, text)
        if request.endpoint_type != _BROKERS:
            raise ApiError(ErrorCode.UNSUPPORTED_ENDPOINT_TYPE, "There are only brokers")
        return {
            "cluster_id": cluster_id(self.log),
            "controller_id": controller_id(self.log),
            "brokers": self._brokers(caller, "broker_id"),
            **_operations_on_cluster(request),
        }

    # Copies

    def elect_leaders(self, request: Any, caller: Caller) -> Fields:
        """Answer: elects leaders."""

        def elect(partition: TopicPartition) -> Fields:
            unclean = bool(request.election_type)
            (name,) = self.service.elect_leaders([partition], unclean=unclean).values()
            return {"error_code": int(ErrorCode[name or "NONE"]), "error_message": ""}

        topics = request.topic_partitions
        if topics is None:
            topics = self._all_partitions()
        return {
            "replica_election_results": [
                {
                    "topic": topic.topic,
                    "partition_result": [
                        {
                            "partition_id": number,
                            **self.outcome(elect, TopicPartition(topic.topic, number)),
                        }
                        for number in topic.partitions
                    ],
                }
                for topic in topics
            ]
        }

    def _all_partitions(self) -> list[Any]:
        """Return all topics with the numbers of their partitions, as requests have them."""
        infos = self.log.root.topics()
        return [_TopicPartitions(each, list(range(infos[each].partitions))) for each in infos]

    def alter_partition_reassignments(self, request: Any, caller: Caller) -> Fields:
        """Answer: begins or cancels moves of copies."""
        root = self.log.root
        root.context.check_writable()

        def alter(partition: TopicPartition, item: Any) -> Fields | None:
            if not isinstance(root, ReplicatedRoot):
                root.partition(*partition)
                if item.replicas is None:
                    return {"error_code": int(ErrorCode.NO_REASSIGNMENT_IN_PROGRESS)}
                if tuple(item.replicas) != self.cluster.placement(*partition).replicas:
                    raise InvalidReplicationAssignmentError("The log has one directory")
            elif item.replicas is not None:
                reassign.begin(root, {partition: item.replicas})
            elif not reassign.cancel(root, [partition]):
                # It may have ended, or been cancelled, a moment ago.
                return {"error_code": int(ErrorCode.NO_REASSIGNMENT_IN_PROGRESS)}
            return None

        return {"responses": self.each_partition(request.topics, alter)}

    def list_partition_reassignments(self, request: Any, caller: Caller) -> Fields:
        """Answer: the moves of copies that are not finished."""
        root, wanted = self.log.root, None
        if not isinstance(root, ReplicatedRoot):
            return {"topics": []}
        if request.topics is not None:
            wanted = {(topic.name, n) for topic in request.topics for n in topic.partition_indexes}
        moving = (
            (TopicPartition(info.name, number), assignment)
            for info, number, assignment in root.assignments()
            if assignment.is_reassigning
        )
        topics = by_topic(
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

    def describe_log_dirs(self, request: Any, caller: Caller) -> Fields:
        """Answer: how many bytes the copies of partitions have."""
        topics = []
        infos = self.log.root.topics()
        for topic in self._all_partitions() if request.topics is None else request.topics:
            copies = []
            known = infos[topic.topic].partitions if topic.topic in infos else 0
            for number in (each for each in topic.partitions if 0 <= each < known):
                _, replicas, isr = self.cluster.placement(topic.topic, number)
                if caller.node in replicas:
                    # The copies in sync have the same files.
                    size = self.log.root.partition(topic.topic, number).size_bytes()
                    lag = {"offset_lag": 0 if caller.node in isr else -1}
                    copies.append({"partition_index": number, "partition_size": size, **lag})
            if copies:
                topics.append({"name": topic.topic, "partitions": copies})
        return {"results": [{"log_dir": self._broker(caller.node).path, "topics": topics}]}

    def alter_replica_log_dirs(self, request: Any, caller: Caller) -> Fields:
        """Accept the directory of a broker, which is its only one.

        AlterPartitionReassignments moves copies to other directories.
        """
        path = self._broker(caller.node).path
        other = int(ErrorCode.LOG_DIR_NOT_FOUND)
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

    def delete_records(self, request: Any, caller: Caller) -> Fields:
        """Answer: deletes the records before an offset; -1 is the end."""

        def delete(partition: TopicPartition, item: Any) -> Fields:
            offset, log = item.offset, self.partition(*partition)
            if "delete" not in self.log.root.topic(partition.topic).config.cleanup_policy:
                text = "The records of a compacted topic are not deleted"
                raise ApiError(ErrorCode.POLICY_VIOLATION, text)
            if offset == -1:
                offset = log.end_offset()
            return {"low_watermark": self.log.delete_records({partition: offset})[partition]}

        topics = self.each_partition(request.topics, delete)
        for topic in topics:
            topic["partitions"] = [{"low_watermark": -1, **each} for each in topic["partitions"]]
        return {"topics": topics}

    def list_offsets(self, request: Any, caller: Caller) -> Fields:
        """Answer: offsets by time, and the first and last ones."""

        def offset(partition: TopicPartition, item: Any) -> Fields:
            self.check_epoch(partition, item.current_leader_epoch)
            since = _SPECS_SINCE.get(item.timestamp)
            if item.timestamp < 0 and (since is None or caller.version < since):
                text = f"There is no offset for the timestamp {item.timestamp}"
                raise ApiError(ErrorCode.UNSUPPORTED_VERSION, text)
            found, timestamp, epoch = self.service.offset(*partition, int(item.timestamp))
            known = -1 if epoch is None else epoch
            return {"offset": found, "timestamp": timestamp, "leader_epoch": known}

        return {"topics": self.each_partition(request.topics, offset)}

    def check_epoch(self, partition: TopicPartition, epoch: int) -> int:
        """Return the leader epoch of a partition, which the caller may know.

        Raises:
            ApiError: It knows another one.
        """
        current = self.partition(*partition).tail().leader_epoch
        if -1 < epoch != current:
            fenced = epoch < current
            raise ApiError(
                ErrorCode.FENCED_LEADER_EPOCH if fenced else ErrorCode.UNKNOWN_LEADER_EPOCH,
                f"The leader epoch is {current}, not {epoch}",
            )
        return current

    def offset_for_leader_epoch(self, request: Any, caller: Caller) -> Fields:
        """Answer: where epochs of the log end."""

        def end(name: str, item: Any) -> Fields:
            partition = TopicPartition(name, item.partition)
            current = self.check_epoch(partition, item.current_leader_epoch)
            log, asked = self.log.root.partition(*partition), item.leader_epoch
            if asked == current:
                return {"leader_epoch": asked, "end_offset": log.end_offset()}
            known = log.context.state.read(lambda txn: epochs(txn, log.key))
            later = [start for epoch, start in known if epoch > asked]
            if asked < 0 or not later:
                return {"leader_epoch": -1, "end_offset": -1}
            earlier = [epoch for epoch, _ in known if epoch <= asked]
            return {"leader_epoch": max(earlier, default=asked), "end_offset": min(later)}

        topics = []
        for topic in request.topics:
            partitions = [
                {"partition": item.partition, **self.outcome(end, topic.topic, item)}
                for item in topic.partitions
            ]
            topics.append({"topic": topic.topic, "partitions": partitions})
        return {"topics": topics}

    # Settings

    def describe_configs(self, request: Any, caller: Caller) -> Fields:
        """Answer: the settings of topics, brokers and groups."""

        def describe(resource: Any) -> Fields:
            kind = resource.resource_type
            if kind in _SOURCES:
                config = self._config_of(resource)
                values, defaults = config.to_dict(), type(config)().to_dict()
            else:
                values, defaults = self._settings_of_broker(resource), None
            keys = resource.configuration_keys
            if keys is not None:
                values = {name: value for name, value in values.items() if name in keys}
            source = _SOURCES.get(kind, _OF_BROKER)
            return {"configs": _entries(values, defaults, source, request.include_synonyms)}

        names = "resource_type", "resource_name"
        return {"results": self.each(request.resources, names, describe)}

    def _config_of(self, resource: Any) -> TopicConfig | ShareGroupConfig:
        """Return the settings of a topic or a group."""
        name = resource.resource_name
        if resource.resource_type == TOPIC:
            return self.service.topic_config(name)
        return self.log.groups[name].config

    def _settings_of_broker(self, resource: Any) -> dict[str, Any]:
        if resource.resource_type != BROKER:
            raise _no_settings()
        name = resource.resource_name
        node = self._broker(int(name) if name.isdecimal() else NO_LEADER)
        values = MaintenanceConfig().to_dict() | {
            "auto.create.topics.enable": self.log.root.auto_create,
            "broker.id": node.id,
            "log.dirs": node.path,
            "num.partitions": 1,
        }
        return values if node.rack is None else {**values, "broker.rack": node.rack}

    def _broker(self, number: int) -> Any:
        alive = self.cluster.nodes()
        if number not in alive:
            names = ", ".join(map(str, alive))
            raise ApiError(ErrorCode.INVALID_REQUEST, f"The brokers of the log are {names}")
        return alive[number]

    def list_config_resources(self, request: Any, caller: Caller) -> Fields:
        """Answer: what has settings."""
        brokers, groups = list(map(str, self.cluster.nodes())), self.service.configured_groups()
        names = {TOPIC: self.log.topics(), BROKER: brokers, GROUP: groups}
        return {
            "config_resources": [
                {"resource_type": kind, "resource_name": name}
                for kind, of_kind in names.items()
                for name in of_kind
                if not request.resource_types or kind in request.resource_types
            ]
        }

    def incremental_alter_configs(self, request: Any, caller: Caller) -> Fields:
        """Answer: changes some settings of topics and groups."""

        def changes(config: Settings, entries: Any) -> dict[str, Any]:
            known, changed = config.to_dict(), {}
            for each in entries:
                if not 0 <= each.config_operation < len(_OPERATIONS):
                    continue
                operation = _OPERATIONS[each.config_operation]
                if operation != "DELETE":
                    value = _given(each)
                elif each.name in known:
                    value = None
                else:
                    continue  # It has no value, as asked.
                changed[each.name] = changed_setting(config, each.name, operation, value)
            return changed

        return self._alter(request, changes)

    def alter_configs(self, request: Any, caller: Caller) -> Fields:
        """Answer: sets all settings of topics and groups; others get their defaults."""

        def changes(config: Settings, entries: Any) -> dict[str, Any]:
            given = {each.name: _given(each) for each in entries}
            return dict.fromkeys(config.overrides()) | given

        return self._alter(request, changes)

    def _alter(self, request: Any, changes_of: Callable[[Settings, Any], dict[str, Any]]) -> Fields:
        def alter(resource: Any) -> None:
            kind, name = resource.resource_type, resource.resource_name
            if kind == BROKER:
                self._settings_of_broker(resource)
                text = "Only the settings of topics and groups can be changed"
                raise ApiError(ErrorCode.UNSUPPORTED_VERSION, text)
            if kind not in _SOURCES:
                raise _no_settings()
            settings = [each.name for each in resource.configs or ()]
            if not name or len(settings) > len(set(settings)):
                text = "Name the topic or group, and each setting once"
                raise ApiError(ErrorCode.INVALID_REQUEST, text)
            config = self._config_of(resource)
            changes = changes_of(config, resource.configs or ())
            if request.validate_only:
                config.changed(changes)
            elif kind == TOPIC:
                self.log.alter_topic(name, changes)
            else:
                self.log.groups[name].alter(changes)

        identity = ("resource_type", "resource_name")
        return {"responses": self.each(request.resources, identity, alter)}

    # Groups

    def list_groups(self, request: Any, caller: Caller) -> Fields:
        """Answer: the groups."""
        groups = []
        for name in self.log.groups:
            if self.cluster.coordinator(name) != caller.node:
                continue
            group = self.service.group(name)
            if group is None:
                continue  # It was deleted meanwhile.
            kind = self.service.group_type(name)
            state = MODERN_STATES.get(group.state, group.state) if kind == MODERN else group.state
            if is_listed(request, state, kind):
                facts = {"group_id": name, "protocol_type": group.kind, "group_type": kind}
                groups.append({**facts, "group_state": state})
        return {"groups": groups}

    def describe_groups(self, request: Any, caller: Caller) -> Fields:
        """Answer: groups with their members."""
        return {"groups": [self.described_group(name, caller) for name in request.groups]}

    def described_group(self, name: str, caller: Caller) -> Fields:
        """Return a group as DescribeGroups has it."""
        group = self.service.group(name)
        if group is None or group.kind == SHARE:  # which another request describes
            error = ApiError(ErrorCode.GROUP_ID_NOT_FOUND, f"Group {name} not found.")
            code = self.failure(error) if caller.version >= 6 else {}
            return {"group_id": name, "group_state": "Dead", "members": [], **code}
        return {
            "group_id": name,
            "group_state": group.state,
            "protocol_type": "consumer",
            "protocol_data": group.assignor or "",
            "members": [_member(each, caller.host) for each in group.members],
        }

    def delete_groups(self, request: Any, caller: Caller) -> Fields:
        """Answer: deletes groups with their offsets."""
        outcome, delete, names = self.outcome, self.service.delete_group, request.groups_names
        return {"results": [{"group_id": name, **outcome(delete, name)} for name in names]}

    def offset_fetch(self, request: Any, caller: Caller) -> Fields:
        """Answer: the committed offsets of groups."""
        stable = getattr(request, "require_stable", False)
        if caller.version < 8:
            asked = request.group_id, request.topics, stable, caller
            found = self.outcome(self._offsets_of, *asked)
            return {"topics": [], **found}
        return {
            "groups": [
                {
                    "group_id": each.group_id,
                    **self.outcome(self._offsets_of, each.group_id, each.topics, stable, caller),
                }
                for each in request.groups
            ]
        }

    def _offsets_of(self, group: str, topics: Any, stable: bool, caller: Caller) -> Fields:
        """Return the committed offsets of a group, by default all of them.

        With ``stable`` those of open transactions have a code by which clients wait.
        """
        wanted, unknown = None, []
        if topics is not None:
            wanted = []
            for topic in topics:
                # Only the newest versions have ids.
                number = getattr(topic, "topic_id", _NO_ID)
                name = topic.name or self.topic_name(number)
                if name is None:
                    code = {**_position(None), "error_code": int(ErrorCode.UNKNOWN_TOPIC_ID)}
                    parts = [{"partition_index": n, **code} for n in topic.partition_indexes]
                    unknown.append({"topic_id": number, "partitions": parts})
                    continue
                wanted += [(name, number) for number in topic.partition_indexes]
        # Before the offsets: a transaction that ends meanwhile has not committed these.
        unstable = self.unstable(group, caller) if stable else ()
        committed = dict(self.service.committed(group, wanted))
        wait = {"error_code": int(ErrorCode.UNSTABLE_OFFSET_COMMIT)}
        if wanted is None:
            committed |= dict.fromkeys(unstable)
        found = by_topic(
            (part, _position(None) | wait if part in unstable else _position(position))
            for part, position in committed.items()
        )
        infos = self.log.root.topics()
        for topic in found:
            if topic["name"] in infos:
                topic["topic_id"] = topic_id(self.log, infos[topic["name"]])
        return {"topics": found + unknown}

    def offset_commit(self, request: Any, caller: Caller, commit: Commit | None = None) -> Fields:
        """Answer: commits offsets, by default of a group that has no members."""
        if commit is None:
            durable = caller.is_admin
            commit = partial(self.service.commit_offsets, request.group_id, durable=durable)
        names = [topic.name or self.topic_name(topic.topic_id) for topic in request.topics]
        named = list(zip(names, request.topics, strict=True))
        every = [(name, item) for name, topic in named for item in topic.partitions]
        positions = {
            TopicPartition(name, item.partition_index): _committed(item)
            for name, item in every
            if name is not None and item.committed_offset >= 0
        }
        negative = ApiError(ErrorCode.INVALID_REQUEST, "An offset must not be negative")
        outcomes = {
            TopicPartition(name, item.partition_index): self.failure(negative)
            for name, item in every
            if name is not None and item.committed_offset < 0
        }
        outcomes |= {
            part: {"error_code": 0}
            if error is None
            else self.failure(_unknown(error) if isinstance(error, InvalidTopicError) else error)
            for part, error in commit(positions).items()
        }
        no_topic = {"error_code": int(ErrorCode.UNKNOWN_TOPIC_ID)}
        return {
            "topics": [
                {
                    "name": topic.name,
                    "topic_id": topic.topic_id,
                    "partitions": [
                        {
                            "partition_index": n,
                            **outcomes.get(TopicPartition(name or "", n), no_topic),
                        }
                        for n in (item.partition_index for item in topic.partitions)
                    ],
                }
                for name, topic in named
            ]
        }

    def offset_delete(self, request: Any, caller: Caller, read: Collection[str] = ()) -> Fields:
        """Answer: deletes committed offsets, but for topics that members of another kind read."""
        group = self.log.groups[request.group_id]
        if group.describe().kind == SHARE:  # or it raises: for all partitions
            raise GroupIdNotFoundError("The group is a share group", group=group.name)

        def delete(partition: TopicPartition, _: Any) -> None:
            if partition.topic in read:
                text = f"Members of the group are subscribed to {partition.topic}"
                raise GroupSubscribedToTopicError(text, group=group.name)
            group.delete_offsets([partition])

        return {"topics": self.each_partition(request.topics, delete)}

    def leave_group(self, request: Any, caller: Caller) -> Fields:
        """Answer: removes members of a group."""
        group = self.log.groups[request.group_id]

        def remove(member: Any) -> None:
            group.remove_members(member.member_id or member.group_instance_id)

        identity = ("member_id", "group_instance_id")
        return {"members": self.each(request.members, identity, remove)}


def is_listed(request: Any, state: str, kind: str) -> bool:
    """Whether a request to list groups asks for those of a state and a type, in any case."""
    asked = (request.states_filter, state), (request.types_filter, kind)
    return all(
        not names or value.lower() in {name.strip().lower() for name in names}
        for names, value in asked
    )


def _unknown(error: InvalidTopicError) -> ApiError:
    """Return what brokers say of a name that no topic can have: they check that of new ones."""
    return ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, str(error))


def _given(entry: Any) -> Any:
    """Return the value that a request has for a setting.

    Raises:
        ApiError: It is null.
    """
    if entry.value is None:
        raise ApiError(ErrorCode.INVALID_REQUEST, f"The value of {entry.name} is null")
    return entry.value


def _no_settings() -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, "Only topics, brokers and groups have settings")


def with_operations(groups: list[Fields], request: Any) -> list[Fields]:
    """Return described groups with what a client may do, if it asks."""
    allowed = {"authorized_operations": _ALL_OPERATIONS_ON_GROUP}
    is_asked = request.include_authorized_operations
    return [each | allowed if is_asked and not each.get("error_code") else each for each in groups]


def _with_operations(topics: list[Fields], is_asked: bool) -> list[Fields]:
    """Return described topics with what a client may do, if it asks."""
    allowed = {"topic_authorized_operations": _ALL_OPERATIONS_ON_TOPIC}
    # Brokers say so of topics that they do not have, too.
    return [{**topic, **allowed} for topic in topics] if is_asked else topics


def _operations_on_cluster(request: Any) -> Fields:
    if not request.include_cluster_authorized_operations:
        return {}
    return {"cluster_authorized_operations": _ALL_OPERATIONS_ON_CLUSTER}


def _in_order(assigned: dict[int, Any]) -> list[Any]:
    """Return the replicas of partitions that are numbered from 0 on."""
    if sorted(assigned) != list(range(len(assigned))):
        raise InvalidReplicationAssignmentError(
            "The partitions of a replica assignment are not numbered from 0 on without a gap"
        )
    return [assigned[number] for number in range(len(assigned))]


def _items(topics: Iterable[Any]) -> Iterator[tuple[TopicPartition, Any]]:
    """Yield the partitions that a request names, with what it says of each."""
    for topic in topics:
        for item in topic.partitions:
            yield TopicPartition(topic.name, item.partition_index), item


def by_topic(results: Iterable[tuple[TopicPartition, Fields]]) -> list[Fields]:
    """Return the results of partitions as a response has them."""
    topics: dict[str, list[Fields]] = {}
    for (topic, number), fields in results:
        topics.setdefault(topic, []).append({"partition_index": number, **fields})
    return [{"name": name, "partitions": partitions} for name, partitions in topics.items()]


def _entries(
    values: dict[str, Any],
    defaults: dict[str, Any] | None,
    changed: int = _OF_TOPIC,
    synonyms: bool = False,
) -> list[Fields]:
    """Return settings as DescribeConfigs has them; those without defaults are of a broker."""
    entries = []
    for name, value in values.items():
        source = changed
        if defaults is not None and value == defaults[name]:
            source = _DEFAULT
        entry: Fields = {
            "name": name,
            "value": setting_text(value),
            "read_only": defaults is None,
            "config_source": source,
            "config_type": _TYPES_BY_NAME.get(name, _TYPES[type(value)]),
            "documentation": None,
        }
        if synonyms:
            found = [(value, source)]
            if source == changed and defaults is not None:
                found.append((defaults[name], _DEFAULT))
            entry["synonyms"] = [
                {"name": name, "value": setting_text(each), "source": number}
                for each, number in found
            ]
        entries.append(entry)
    return entries


def _committed(item: Any) -> OffsetAndMetadata:
    epoch = item.committed_leader_epoch
    metadata = item.committed_metadata or ""
    return OffsetAndMetadata(item.committed_offset, metadata, None if epoch < 0 else epoch)


def _position(committed: OffsetAndMetadata | None) -> Fields:
    offset, metadata, epoch = committed or OffsetAndMetadata(-1, "", None)
    known = -1 if epoch is None else epoch
    return {"committed_offset": offset, "metadata": metadata, "committed_leader_epoch": known}


def _member(member: Any, host: str) -> Fields:
    """Return a member of a group of the log as a consumer would have described itself."""
    assigned: dict[str, list[int]] = {}
    for topic, number in sorted(member.partitions):
        assigned.setdefault(topic, []).append(number)
    partitions = [{"topic": name, "partitions": numbers} for name, numbers in assigned.items()]
    return {
        "member_id": member.member_id,
        "group_instance_id": member.group_instance_id,
        "client_id": member.client_id,
        "client_host": f"/{member.client_host or host}",
        "member_metadata": versioned("ConsumerProtocolSubscription", topics=list(member.topics)),
        "member_assignment": versioned(
            "ConsumerProtocolAssignment", assigned_partitions=partitions
        ),
    }


def versioned(name: str, **fields: Any) -> bytes:
    """Return a message of consumers to each other, with its version before it."""
    return struct.pack(">h", 0) + encode(name, 0, fields)
