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
from embedlog.config.documentation import meanings
from embedlog.config.settings import Settings
from embedlog.config.values import setting_text
from embedlog.consumer.open_group import open_group
from embedlog.errors import (
    EmbedlogError,
    GroupIdNotFoundError,
    GroupSubscribedToTopicError,
    InvalidGroupIdError,
    InvalidReplicationAssignmentError,
    InvalidReplicationFactorError,
    InvalidTopicError,
)
from embedlog.groups.membership import CONSUMER, MODERN, SHARE
from embedlog.keyspace import GROUP_CONFIGS
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
_LISTS = frozenset({"cleanup.policy", "retention.min.consumed", "statistics.columns"})
_TYPES_BY_NAME = dict.fromkeys(_LISTS, 7) | dict.fromkeys(_INTS, 3)
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
_ALLOWED_ON_TOPIC = {"topic_authorized_operations": 0b1101_1111_1000}
_ALLOWED_ON_CLUSTER = {"cluster_authorized_operations": 0b1_1111_1010_0000}
_ALLOWED_ON_GROUP = {"authorized_operations": 0b1101_0100_1000}
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
        self,
        topics: Iterable[Any],
        call: Callable[[TopicPartition, Any], Fields | None],
        name: str = "name",
        number: str = "partition_index",
    ) -> list[Fields]:
        """Return the outcome of a call for each partition of a request, by topic.

        ``name`` and ``number`` are the fields of topics and partitions that identify them.
        """
        asked = partitions_of(topics, name, number)
        results = ((part, self.outcome(call, part, item)) for part, item in asked)
        return by_topic(results, name, number=number)

    def topic_name(self, number: UUID) -> str | None:
        """Return the name of the topic that has an id; None without one."""
        version = self.log.root.version()
        if version != self._names[0]:
            infos = self.log.root.topics()
            self._names = version, {topic_id(self.log, each.id): n for n, each in infos.items()}
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

    def _topic_info(self, name: str) -> TopicInfo:
        try:
            return self.log.root.topic(name)
        except InvalidTopicError as error:
            raise _unknown(error) from error

    # Topics and brokers

    def metadata(self, request: Any, caller: Caller) -> Fields:
        """Answer: brokers, and topics with their partitions."""
        log = self.log
        allowed = _ALLOWED_ON_TOPIC if request.include_topic_authorized_operations else {}
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
            # Brokers say so of topics that they do not have, too.
            "topics": [{**each, **allowed} for each in topics],
            **_operations_on_cluster(request),
        }

    def _asked_topic(self, name: str | None, number: UUID, create: bool) -> Fields:
        root, number = self.log.root, number or _NO_ID  # kafka-python's requests have None.
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
            "topic_id": topic_id(self.log, info.id),
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
        start, at = ("", 0) if cursor is None else (cursor.topic_name, cursor.partition_index)
        left = min(max(request.response_partition_limit, 1), _MAX_DESCRIBED)
        names = [topic.name for topic in request.topics] or self.log.root.topics()
        if at < 0:
            failed = self.failure(ApiError(ErrorCode.INVALID_REQUEST, "The cursor is negative"))
            return {"topics": [{"name": topic.name, **failed} for topic in request.topics]}
        for name in sorted(name for name in names if name >= start):
            if left == 0:
                return {"topics": described, "next_cursor": {"topic_name": name}}
            topic, first = self._asked_topic(name, _NO_ID, False), at if name == start else 0
            partitions = topic.get("partitions", [])
            page = partitions[first : first + left]
            described.append({**topic, "partitions": page, **_ALLOWED_ON_TOPIC})
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
            if nulls := [name for name, value in settings.items() if value is None]:
                text = f"Null value not supported for topic configs: {','.join(nulls)}"
                raise ApiError(ErrorCode.INVALID_CONFIG, text)
            if topic.name in self.log.root.topics():
                text = f"Topic '{topic.name}' already exists."
                raise ApiError(ErrorCode.TOPIC_ALREADY_EXISTS, text)
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
                "topic_id": topic_id(self.log, info.id),
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
            deleted = topic_id(self.log, self._topic_info(name).id)
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
            added = topic.count - self._topic_info(topic.name).partitions
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

        asked = self._asked_partitions(request.topic_partitions)
        results = ((partition, self.outcome(elect, partition)) for partition in asked)
        found = by_topic(results, "topic", "partition_result", "partition_id")
        return {"replica_election_results": found}

    def _asked_partitions(self, topics: Any) -> list[TopicPartition]:
        """Return the partitions that a request names by their numbers; by default all."""
        if topics is None:
            return self.service.partitions()
        return [TopicPartition(each.topic, n) for each in topics for n in each.partitions]

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
            for info, number, moves in root.assignments()
            for part in [TopicPartition(info.name, number)]
            if moves.is_reassigning and (wanted is None or part in wanted)
        )
        return {"topics": by_topic(moving)}

    def describe_log_dirs(self, request: Any, caller: Caller) -> Fields:
        """Answer: how many bytes the copies of partitions have."""
        copies = []
        for partition in self.service.existing(self._asked_partitions(request.topics)):
            _, replicas, isr = self.cluster.placement(*partition)
            if caller.node in replicas:
                # The copies in sync have the same files.
                size = self.log.root.partition(*partition).size_bytes()
                lag = 0 if caller.node in isr else -1
                copies.append((partition, {"partition_size": size, "offset_lag": lag}))
        path, root = self._broker(caller.node).path, self.log.root
        files = root.context.files
        if isinstance(root, ReplicatedRoot):
            files = root.controller.directories[caller.node].files
        space = {"total_bytes": files.total_bytes(), "usable_bytes": files.free_bytes()}
        return {"results": [{"log_dir": path, "topics": by_topic(copies), **space}]}

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
            check_epoch(self.partition(*partition), item.current_leader_epoch)
            since = _SPECS_SINCE.get(item.timestamp)
            if item.timestamp < 0 and (since is None or caller.version < since):
                text = f"There is no offset for the timestamp {item.timestamp}"
                raise ApiError(ErrorCode.UNSUPPORTED_VERSION, text)
            found, timestamp, epoch = self.service.offset(*partition, int(item.timestamp))
            known = -1 if epoch is None else epoch
            return {"offset": found, "timestamp": timestamp, "leader_epoch": known}

        return {"topics": self.each_partition(request.topics, offset)}

    def offset_for_leader_epoch(self, request: Any, caller: Caller) -> Fields:
        """Answer: where epochs of the log end."""

        def end(partition: TopicPartition, item: Any) -> Fields:
            log, asked = self.partition(*partition), item.leader_epoch
            current = check_epoch(log, item.current_leader_epoch)
            if asked == current:
                return {"leader_epoch": asked, "end_offset": log.end_offset()}
            known = log.context.state.read(lambda txn: epochs(txn, log.key))
            later = [start for epoch, start in known if epoch > asked]
            if asked < 0 or not later:
                return {"leader_epoch": -1, "end_offset": -1}
            earlier = [epoch for epoch, _ in known if epoch <= asked]
            return {"leader_epoch": max(earlier, default=asked), "end_offset": min(later)}

        return {"topics": self.each_partition(request.topics, end, "topic", "partition")}

    # Settings

    def describe_configs(self, request: Any, caller: Caller) -> Fields:
        """Answer: the settings of topics, brokers and groups."""

        def describe(resource: Any) -> Fields:
            kind = resource.resource_type
            if kind in _SOURCES:
                config: Settings = self._config_of(resource)
                values, defaults = config.to_dict(), type(config)().to_dict()
            else:
                values, defaults = self._settings_of_broker(resource), None
                config = MaintenanceConfig()
            keys = resource.configuration_keys
            if keys is not None:
                values = {name: value for name, value in values.items() if name in keys}
            source = _SOURCES.get(kind, _OF_BROKER)
            texts = meanings(type(config)) if request.include_documentation else None
            entries = _entries(values, defaults, source, request.include_synonyms, texts)
            return {"configs": entries}

        names = "resource_type", "resource_name"
        return {"results": self.each(request.resources, names, describe)}

    def _config_of(self, resource: Any) -> TopicConfig | ShareGroupConfig:
        """Return the settings of a topic or a group."""
        name = resource.resource_name
        if resource.resource_type == TOPIC:
            return self.log.root.topic(name).config
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
        state, brokers = self.log.root.context.state, list(map(str, self.cluster.nodes()))
        groups = state.read(lambda txn: [name for (name,) in GROUP_CONFIGS.keys(txn)])
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
                if operation == "DELETE" and each.name not in known:
                    continue  # It has no value, as asked.
                if operation in _OPERATIONS[2:] and each.name in known.keys() - _LISTS:
                    text = f"Can't {operation} to key {each.name} because its type is not LIST."
                    raise ApiError(ErrorCode.INVALID_CONFIG, text)
                value = None if operation == "DELETE" else _given(each)
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
                text = "Error due to duplicate config keys" if name else "Name the topic or group"
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
            try:
                group = open_group(self.log.root, name).snapshot()
            except GroupIdNotFoundError:
                continue  # It was deleted meanwhile.
            kind, state = group.type, group.state
            if kind == MODERN:
                state = MODERN_STATES.get(state, state)
            if is_listed(request, state, kind):
                protocol = SHARE if kind == SHARE else _protocol_type(group)
                facts = {"group_id": name, "protocol_type": protocol, "group_type": kind}
                groups.append({**facts, "group_state": state})
        return {"groups": groups}

    def described_group(self, name: str, caller: Caller) -> Fields:
        """Return a group as DescribeGroups has it."""
        group = self.service.group(name)
        if group is None or group.kind == SHARE:  # which another request describes
            code = self.failure(unknown_group(name)) if caller.version >= 6 else {}
            return {"group_id": name, "group_state": "Dead", "members": [], **code}
        return {
            "group_id": name,
            "group_state": group.state,
            "protocol_type": _protocol_type(group),
            "protocol_data": group.assignor or "",
            "members": [_member(each, caller.host) for each in group.members],
        }

    def delete_groups(self, request: Any, caller: Caller) -> Fields:
        """Answer: deletes groups with their offsets."""

        def delete(name: str) -> None:
            check_group(self.log, name)
            self.log.groups[name].delete()

        names = request.groups_names
        return {"results": [{"group_id": name, **self.outcome(delete, name)} for name in names]}

    def offset_fetch(
        self, request: Any, caller: Caller, check: Callable[[Any], object] = lambda _: None
    ) -> Fields:
        """Answer: the committed offsets of groups; ``check`` raises if a group is not shown."""

        def fetch(asked: Any) -> Fields:
            check(asked)
            return self._offsets_of(asked.group_id, asked.topics, stable, caller)

        stable = getattr(request, "require_stable", False)
        if caller.version < 8:
            asked = request.group_id, request.topics, stable, caller
            return {"topics": [], **self.outcome(self._offsets_of, *asked)}
        return {"groups": self.each(request.groups, ("group_id",), fetch)}

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
                topic["topic_id"] = topic_id(self.log, infos[topic["name"]].id)
        return {"topics": found + unknown}

    def offset_commit(self, request: Any, caller: Caller, commit: Commit | None = None) -> Fields:
        """Answer: commits offsets, by default of a group that has no members."""
        if commit is None:
            durable = caller.is_admin
            commit = partial(self.service.commit_offsets, request.group_id, durable=durable)
        every = [
            (TopicPartition(name or "", item.partition_index), position_of(item))
            for topic in request.topics
            for name in [topic.name or self.topic_name(topic.topic_id)]
            for item in topic.partitions
        ]
        named = {part: each for part, each in every if part.topic}
        positions = {part: each for part, each in named.items() if each.offset >= 0}
        negative = ApiError(ErrorCode.INVALID_REQUEST, "An offset must not be negative")
        outcomes = {part: self.failure(negative) for part in named.keys() - positions}
        outcomes |= {
            part: {"error_code": 0}
            if error is None
            else self.failure(_unknown(error) if isinstance(error, InvalidTopicError) else error)
            for part, error in commit(positions).items()
        }
        no_topic = {"error_code": int(ErrorCode.UNKNOWN_TOPIC_ID)}
        return offsets_committed(request, (outcomes.get(part, no_topic) for part, _ in every))

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


def check_epoch(log: PartitionLog, epoch: int) -> int:
    """Return the leader epoch of a partition, which the caller may know.

    Raises:
        ApiError: It knows another one.
    """
    current = log.tail().leader_epoch
    if -1 < epoch != current:
        fenced = epoch < current
        raise ApiError(
            ErrorCode.FENCED_LEADER_EPOCH if fenced else ErrorCode.UNKNOWN_LEADER_EPOCH,
            f"The leader epoch is {current}, not {epoch}",
        )
    return current


def has_group(log: Log, name: str) -> bool:
    """Whether a group exists; none can have a name that is not valid."""
    try:
        return open_group(log.root, name).exists()
    except InvalidGroupIdError:
        return False


def check_group(log: Log, name: str) -> None:
    """Raise unless a group exists.

    Raises:
        ApiError: It does not.
    """
    if not has_group(log, name):
        raise unknown_group(name)


def _protocol_type(group: Any) -> str:
    """Return the protocol of a group of consumers; one that only ever committed has none."""
    return CONSUMER if group.generation or group.members else ""


def unknown_group(name: str) -> ApiError:
    """Return the error of a group that does not exist, in Kafka's words."""
    return ApiError(ErrorCode.GROUP_ID_NOT_FOUND, f"Group {name} not found.")


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
        text = f"Null value not supported for : {entry.name}"
        raise ApiError(ErrorCode.INVALID_REQUEST, text)
    return entry.value


def _no_settings() -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, "Only topics, brokers and groups have settings")


def with_operations(groups: list[Fields], request: Any) -> list[Fields]:
    """Return described groups with what a client may do, if it asks."""
    is_asked = request.include_authorized_operations
    return [
        each | _ALLOWED_ON_GROUP if is_asked and not each.get("error_code") else each
        for each in groups
    ]


def _operations_on_cluster(request: Any) -> Fields:
    return _ALLOWED_ON_CLUSTER if request.include_cluster_authorized_operations else {}


def _in_order(assigned: dict[int, Any]) -> list[Any]:
    """Return the replicas of partitions that are numbered from 0 on."""
    if sorted(assigned) != list(range(len(assigned))):
        raise InvalidReplicationAssignmentError(
            "The partitions of a replica assignment are not numbered from 0 on without a gap"
        )
    return [assigned[number] for number in range(len(assigned))]


def partitions_of(
    topics: Iterable[Any], name: str = "name", number: str = "partition_index"
) -> Iterator[tuple[TopicPartition, Any]]:
    """Yield the partitions that a request names, with what it says of each."""
    for topic in topics:
        for item in topic.partitions:
            yield TopicPartition(getattr(topic, name), getattr(item, number)), item


def by_topic(
    results: Iterable[tuple[tuple[Any, int], Fields]],
    name: str = "name",
    partitions: str = "partitions",
    number: str = "partition_index",
) -> list[Fields]:
    """Return the results of partitions as a response has them, which has fields of these names."""
    topics: dict[Any, list[Fields]] = {}
    for (topic, partition), fields in results:
        topics.setdefault(topic, []).append({number: partition, **fields})
    return [{name: topic, partitions: found} for topic, found in topics.items()]


def numbers_by_topic(partitions: Iterable[tuple[Any, int]], name: str) -> list[Fields]:
    """Return the numbers of partitions as messages have them; ``name`` is that of the topic."""
    topics: dict[Any, list[int]] = {}
    for topic, number in sorted(partitions):
        topics.setdefault(topic, []).append(number)
    return [{name: topic, "partitions": numbers} for topic, numbers in topics.items()]


def offsets_committed(request: Any, codes: Iterable[Fields]) -> Fields:
    """Return the answer to a request to commit offsets, of which each partition has a code."""
    following = iter(codes)
    return {
        "topics": [
            {
                "name": topic.name,
                "topic_id": topic.topic_id,
                "partitions": [
                    {"partition_index": item.partition_index, **next(following)}
                    for item in topic.partitions
                ],
            }
            for topic in request.topics
        ]
    }


def _entries(
    values: dict[str, Any],
    defaults: dict[str, Any] | None,
    changed: int = _OF_TOPIC,
    synonyms: bool = False,
    texts: Mapping[str, str] | None = None,
) -> list[Fields]:
    """Return settings as DescribeConfigs has them; those without defaults are of a broker.

    ``texts`` is what they mean, if who asks wants to know.
    """
    entries = []
    for name, value in values.items():
        is_default = defaults is not None and value == defaults[name]
        source = _DEFAULT if is_default else changed
        entry: Fields = {
            "name": name,
            "value": setting_text(value),
            "read_only": defaults is None,
            "config_source": source,
            "config_type": _TYPES_BY_NAME.get(name, _TYPES[type(value)]),
            "documentation": None if texts is None else texts.get(name, ""),
        }
        if synonyms:
            found = {source: value}
            if defaults is not None:
                found[_DEFAULT] = defaults[name]
            entry["synonyms"] = [
                {"name": name, "value": setting_text(each), "source": number}
                for number, each in found.items()
            ]
        entries.append(entry)
    return entries


def position_of(item: Any) -> OffsetAndMetadata:
    """Return what a request commits in a partition."""
    epoch = item.committed_leader_epoch
    metadata = item.committed_metadata or ""
    return OffsetAndMetadata(item.committed_offset, metadata, None if epoch < 0 else epoch)


def _position(committed: OffsetAndMetadata | None) -> Fields:
    offset, metadata, epoch = committed or OffsetAndMetadata(-1, "", None)
    known = -1 if epoch is None else epoch
    return {"committed_offset": offset, "metadata": metadata, "committed_leader_epoch": known}


def _member(member: Any, host: str) -> Fields:
    """Return a member of a group of the log as a consumer would have described itself."""
    assigned = numbers_by_topic(member.partitions, "topic")
    return {
        "member_id": member.member_id,
        "group_instance_id": member.group_instance_id,
        "client_id": member.client_id,
        "client_host": f"/{member.client_host or host}",
        "member_metadata": versioned("ConsumerProtocolSubscription", topics=list(member.topics)),
        "member_assignment": versioned("ConsumerProtocolAssignment", assigned_partitions=assigned),
    }


def versioned(name: str, **fields: Any) -> bytes:
    """Return a message of consumers to each other, with its version before it."""
    return struct.pack(">h", 0) + encode(name, 0, fields)
