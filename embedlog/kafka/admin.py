"""`KafkaAdminClient`: kafka-python's admin client on a log, whose directories are brokers."""

from __future__ import annotations

import collections
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from embedlog import errors as log_errors
from embedlog.catalog import INTERNAL
from embedlog.config import MaintenanceConfig, TopicConfig
from embedlog.config.values import setting_text
from embedlog.kafka import errors
from embedlog.kafka.admin_service import AdminService, changed_setting
from embedlog.kafka.client import LogClient, or_uses_brokers
from embedlog.kafka.cluster import (
    HOST,
    NO_LEADER,
    PORT,
    DirectoryNode,
    cluster_id,
    controller_id,
    nodes,
    placement,
)
from embedlog.kafka.errors import raises_kafka_errors, translated
from embedlog.kafka.kafka_python import kafka
from embedlog.kafka.library import public_name
from embedlog.kafka.structs import OffsetAndMetadata, OffsetAndTimestamp, TopicPartition
from embedlog.record import OffsetAndMetadata as LogPosition
from embedlog.record import TopicPartition as LogPartition
from embedlog.replication import reassign
from embedlog.replication.root import ReplicatedRoot

_ELECTION_ERRORS = {
    "": errors.NoError,
    "ELECTION_NOT_NEEDED": errors.ElectionNotNeededError,
    "ELIGIBLE_LEADERS_NOT_AVAILABLE": errors.EligibleLeadersNotAvailableError,
    "PREFERRED_LEADER_NOT_AVAILABLE": errors.PreferredLeaderNotAvailableError,
}
_CONFIG_TYPES = {bool: "BOOLEAN", int: "LONG", float: "DOUBLE", str: "STRING"}
_NO_ID = uuid.UUID(int=0)
_ResourceType: Any = kafka.admin.ConfigResourceType

CreatePartitionsResponse = collections.namedtuple("CreatePartitionsResponse", "results")
ElectLeadersResponse = collections.namedtuple(
    "ElectLeadersResponse", "error_code replica_election_results"
)


def __getattr__(name: str) -> Any:
    """Return a class of ``kafka.admin``."""
    return public_name(kafka.admin, name)


class KafkaAdminClient(LogClient):
    """Administers the log that ``bootstrap_servers`` names; see kafka-python's class.

    A log in one directory is a cluster of one broker, number 0, which leads all partitions; in
    several, each directory is a broker.  What only a cluster can answer, such as its users, quotas
    and features, is refused with `UnsupportedVersionError`.
    """

    _original = kafka.KafkaAdminClient

    DEFAULT_CONFIG: ClassVar[Mapping[str, Any]] = kafka.KafkaAdminClient.DEFAULT_CONFIG

    @or_uses_brokers
    def __init__(self, **configs: Any) -> None:
        if unknown := configs.keys() - self.DEFAULT_CONFIG.keys():
            raise errors.KafkaConfigurationError(f"Unrecognized configs: {unknown}")
        self._open(configs)
        self._service = AdminService(self._log)

    def close(self) -> None:
        """Close the client."""
        if not self._closed:
            self._closed = True
            self._handle.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    # Topics

    @raises_kafka_errors
    def list_topics(self) -> list[str]:
        """Return the names of all topics."""
        return self._log.topics(internal=True)

    @raises_kafka_errors
    def describe_topics(self, topics: Iterable[Any] | None = None) -> list[dict[str, Any]]:
        """Return topics with their partitions; by default all of them.

        Args:
            topics: Names, or topic ids.
        """
        names = self._log.topics(internal=True) if topics is None else topics
        return [self._describe_topic(name) for name in names]

    def _describe_topic(self, name: Any) -> dict[str, Any]:
        infos = self._log.root.topics()
        if isinstance(name, uuid.UUID):
            name = next((each for each, info in infos.items() if info.id == name.int), None)
        described = {
            "error_code": 0,
            "name": name,
            "topic_id": _NO_ID,
            "is_internal": name is not None and name.startswith(INTERNAL),
            "partitions": [],
            "topic_authorized_operations": set(),
        }
        if name not in infos:
            return described | {"error_code": errors.UnknownTopicOrPartitionError.errno}
        alive, partitions = nodes(self._log), []
        for part in self._log.describe_topic(name)["partitions"]:
            leader, replicas, isr = placement(self._log, name, part["partition"])
            code = errors.LeaderNotAvailableError.errno if leader is None else 0
            partitions.append(
                {
                    "error_code": code,
                    "partition_index": part["partition"],
                    "leader_id": NO_LEADER if leader is None else leader,
                    "leader_epoch": part["leader_epoch"],
                    "replica_nodes": list(replicas),
                    "isr_nodes": list(isr),
                    "offline_replicas": [each for each in replicas if each not in alive],
                }
            )
        return described | {"topic_id": uuid.UUID(int=infos[name].id), "partitions": partitions}

    @raises_kafka_errors
    def describe_topic_partitions(
        self,
        topics: Iterable[str],
        response_partition_limit: int = 2000,
        cursor: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return topics with their partitions, a page at a time."""
        described: list[dict[str, Any]] = []
        left, names = response_partition_limit, sorted(topics)
        for name in names if cursor is None else [n for n in names if n >= cursor["topic_name"]]:
            topic = self._describe_topic(name)
            first = cursor["partition_index"] if cursor and cursor["topic_name"] == name else 0
            page = topic["partitions"][first : first + left]
            for partition in page:
                partition |= {"eligible_leader_replicas": None, "last_known_elr": None}
            described.append({**topic, "partitions": page})
            left -= len(page)
            if first + len(page) < len(topic["partitions"]):
                after = {"topic_name": name, "partition_index": first + len(page)}
                return {"topics": described, "next_cursor": after}
        return {"topics": described, "next_cursor": None}

    def create_topics(
        self,
        new_topics: Any,
        timeout_ms: float | None = None,
        validate_only: bool = False,
        raise_errors: bool = True,
        wait_for_metadata: bool = False,
    ) -> dict[str, Any]:
        """Create topics.

        Args:
            new_topics: Names, `NewTopic` objects, or a dict of names to dicts with
                ``num_partitions``, ``replication_factor`` and ``configs``.  In a log in one
                directory there is always one replica.
            timeout_ms: Not needed by a log.
            validate_only: Create nothing.
            raise_errors: Raise the first error; otherwise the result has its code.
            wait_for_metadata: Not needed by a log.
        """
        if validate_only and wait_for_metadata:
            raise ValueError("validate_only and wait_for_metadata are mutually exclusive")

        def create(topic: Any) -> dict[str, Any]:
            count = self._service.create_topic(
                *(topic.name, topic.num_partitions, topic.topic_configs),
                replication_factor=topic.replication_factor,
                replicas=_replica_lists(topic.replica_assignments),
                validate_only=validate_only,
            )
            result = {"topic_id": _NO_ID, "num_partitions": count}
            if validate_only:
                return result | {"replication_factor": topic.replication_factor}
            copies = placement(self._log, topic.name, 0).replicas
            topic_id = uuid.UUID(int=self._log.root.topic(topic.name).id)
            return result | {"topic_id": topic_id, "replication_factor": len(copies)}

        topics = {topic.name: topic for topic in _new_topics(new_topics)}
        return {"topics": _result_list(topics, "name", create, raise_errors)}

    @raises_kafka_errors
    def wait_for_topics(self, topic_names: Iterable[str], timeout_ms: float = 10_000) -> None:
        """Return at once if the topics exist.

        Raises:
            KafkaTimeoutError: One does not.
        """
        missing = [name for name in topic_names if name not in self._log.root.topics()]
        if missing:
            raise errors.KafkaTimeoutError(f"Topics not ready: {missing}")

    def delete_topics(
        self, topics: Iterable[Any], timeout_ms: float | None = None, raise_errors: bool = True
    ) -> dict[str, Any]:
        """Delete topics, by name or id."""

        def delete(name: str) -> dict[str, Any]:
            info = self._log.root.topic(name)
            self._log.delete_topic(name)
            return {"topic_id": uuid.UUID(int=info.id)}

        names = {
            self._describe_topic(topic)["name"] if isinstance(topic, uuid.UUID) else topic: topic
            for topic in topics
        }
        return {"topics": _result_list({n: n for n in names}, "name", delete, raise_errors)}

    def create_partitions(
        self,
        topic_partitions: Mapping[str, Any],
        timeout_ms: float | None = None,
        validate_only: bool = False,
        raise_errors: bool = True,
    ) -> Any:
        """Increase the numbers of partitions; the values are totals."""

        def create(item: tuple[str, Any]) -> dict[str, Any]:
            name, count = item
            if isinstance(count, Mapping):
                count = count["count"]
            total = getattr(count, "total_count", count)
            self._service.create_partitions(name, total, validate_only=validate_only)
            return {}

        items = {name: (name, count) for name, count in topic_partitions.items()}
        results = _result_list(items, "name", create, raise_errors)
        return CreatePartitionsResponse(
            [(r["name"], r["error_code"], r["error_message"]) for r in results]
        )

    # Records and offsets

    def delete_records(
        self,
        records_to_delete: Mapping[Any, int],
        timeout_ms: float | None = None,
        partition_leader_id: int | None = None,
    ) -> dict[Any, dict[str, Any]]:
        """Delete the records below an offset of each partition; -1 is the log end."""
        results, failures = {}, {}
        for partition, offset in records_to_delete.items():
            where = LogPartition(*partition)
            try:
                start = self._log.delete_records({where: offset})[where]
            except log_errors.EmbedlogError as error:
                if isinstance(error, log_errors.UnknownTopicOrPartitionError):
                    raise translated(error) from error
                failures[partition] = error
                continue
            results[TopicPartition(*partition)] = {
                "partition_index": partition[1],
                "low_watermark": start,
                "error_code": 0,
            }
        if len(failures) == 1:
            (failure,) = failures.values()
            raise translated(failure) from failure
        if failures:
            texts = ", ".join(map(str, failures.values()))
            raise errors.BrokerResponseError(f"Some records were not deleted: {texts}")
        return results

    @raises_kafka_errors
    def list_partition_offsets(
        self,
        topic_partition_specs: Mapping[Any, Any],
        isolation_level: Any = None,
        timeout_ms: float | None = None,
    ) -> dict[Any, Any]:
        """Look up an offset of each partition: an `OffsetSpec`, or the first at or after a time."""
        for spec in topic_partition_specs.values():
            if not isinstance(spec, int):
                raise TypeError(f"Unsupported ts type {type(spec)}, expected int or OffsetSpec")
        return {
            TopicPartition(*partition): self._offset(partition, int(spec))
            for partition, spec in topic_partition_specs.items()
        }

    def _offset(self, partition: Any, spec: int) -> Any:
        topic, number = partition
        return OffsetAndTimestamp(*self._service.offset(topic, number, spec))

    # Settings

    @raises_kafka_errors
    def describe_configs(
        self,
        config_resources: Iterable[Any],
        include_synonyms: bool = False,
        config_filter: Any = "modified",
    ) -> dict[str, dict[str, Any]]:
        """Return settings by kind of resource, name and setting.

        Args:
            config_resources: `ConfigResource` objects of topics, and of brokers.
            include_synonyms: A log has none.
            config_filter: ``"modified"``, ``"all"`` and so on.
        """
        chosen = _FILTERS[kafka.admin.ConfigFilterType.build_from(config_filter).name]
        described: dict[str, dict[str, Any]] = {}
        for resource in config_resources:
            kind = resource.resource_type.name.lower()
            described.setdefault(kind, {})[str(resource.name)] = {
                name: entry
                for name, entry in self._settings_of(resource).items()
                if (resource.configs is None or name in resource.configs) and chosen(entry)
            }
        return described

    def _settings_of(self, resource: Any) -> dict[str, dict[str, Any]]:
        if resource.resource_type == _ResourceType.TOPIC:
            config = self._service.topic_config(resource.name)
            return _entries(config.to_dict(), TopicConfig().to_dict(), "DYNAMIC_TOPIC_CONFIG")
        node = self._broker(resource)
        values = MaintenanceConfig().to_dict() | {
            "auto.create.topics.enable": self._log.root.auto_create,
            "broker.id": node.id,
            "log.dirs": node.path,
            "num.partitions": 1,
        }
        if node.rack is not None:
            values["broker.rack"] = node.rack
        return _entries(values, values, "STATIC_BROKER_CONFIG", read_only=True)

    def _broker(self, resource: Any) -> DirectoryNode:
        try:
            number = int(resource.name)
        except ValueError:
            raise ValueError(
                "Broker resource names must be an integer or a string represented integer"
            ) from None
        alive = nodes(self._log)
        if resource.resource_type != _ResourceType.BROKER or number not in alive:
            names = ", ".join(map(str, alive))
            raise errors.InvalidRequestError(f"A log is broker {names}, and has no {resource.name}")
        return alive[number]

    @raises_kafka_errors
    def list_config_resources(self, resource_types: Any = None) -> dict[str, list[str]]:
        """Return the names of everything that has settings."""
        resources = {"topic": self._log.topics(), "broker": list(map(str, nodes(self._log)))}
        kinds = {_ResourceType.build_from(kind).name.lower() for kind in resource_types or ()}
        return {kind: names for kind, names in resources.items() if not kinds or kind in kinds}

    def alter_configs(
        self,
        config_resources: Iterable[Any],
        validate_only: bool = False,
        raise_on_unknown: bool = True,
        incremental: bool | None = None,
    ) -> dict[str, dict[str, str]]:
        """Change settings of topics.

        Args:
            config_resources: `ConfigResource` objects, whose configs are a dict of settings to
                values, or to pairs of an `AlterConfigOp` and a value.
            validate_only: Change nothing.
            raise_on_unknown: Raise `ValueError` for a setting that topics do not have.
            incremental: Settings that are not named stay as they are, in any case.
        """
        return self._alter(config_resources, validate_only, raise_on_unknown, _changes)

    def reset_configs(
        self,
        config_resources: Iterable[Any],
        validate_only: bool = False,
        raise_on_unknown: bool = True,
        incremental: bool | None = None,
    ) -> dict[str, dict[str, str]]:
        """Set settings of topics back to their defaults; by default all of them."""

        def reset(config: TopicConfig, resource: Any) -> dict[str, Any]:
            return dict.fromkeys(resource.configs or config.overrides())

        return self._alter(config_resources, validate_only, raise_on_unknown, reset)

    def _alter(
        self,
        resources: Iterable[Any],
        validate_only: bool,
        raise_on_unknown: bool,
        changes_of: Callable[[TopicConfig, Any], dict[str, Any]],
    ) -> dict[str, dict[str, str]]:
        results: dict[str, dict[str, str]] = {}
        for resource in resources:
            if resource.resource_type != _ResourceType.TOPIC:
                raise errors.UnsupportedVersionError("Only the settings of topics can be changed")
            unknown = set(resource.configs or ()) - TopicConfig().to_dict().keys()
            if unknown and raise_on_unknown:
                raise ValueError(f"Unrecognized configs: {unknown}")
            try:
                changes = changes_of(self._service.topic_config(resource.name), resource)
                self._service.alter_topic(resource.name, changes, validate_only=validate_only)
                result = "OK"
            except log_errors.InvalidConfigError as error:
                result = str(errors.InvalidConfigurationError(str(error)))
            except log_errors.EmbedlogError as error:
                result = str(translated(error))
            results.setdefault("topic", {})[resource.name] = result
        return results

    # Groups

    @raises_kafka_errors
    def list_groups(
        self, broker_ids: Any = None, states_filter: Any = None, types_filter: Any = None
    ) -> list[dict[str, Any]]:
        """Return all consumer groups."""
        states = {kafka.admin.GroupState.value_for(state) for state in states_filter or ()}
        types = {kafka.admin.GroupType.value_for(kind) for kind in types_filter or ("classic",)}
        groups = [
            {
                "group_id": name,
                "protocol_type": "consumer",
                "group_state": self._log.groups[name].state,
                "group_type": "classic",
            }
            for name in self._log.groups
        ]
        kept = [group for group in groups if not states or group["group_state"] in states]
        return kept if "classic" in types else []

    @raises_kafka_errors
    def describe_groups(
        self,
        group_ids: Iterable[str],
        group_coordinator_id: int | None = None,
        include_authorized_operations: bool = False,
    ) -> dict[str, dict[str, Any]]:
        """Return the state and the members of groups."""
        return {group_id: self._describe_group(group_id) for group_id in group_ids}

    def _describe_group(self, group_id: str) -> dict[str, Any]:
        described: dict[str, Any] = {
            "error": None,
            "group_id": group_id,
            "group_state": "Dead",
            "protocol_type": "",
            "protocol_data": "",
            "members": [],
            "authorized_operations": set(),
        }
        group = self._service.group(group_id)
        if group is None:
            return described | {"error": str(errors.GroupIdNotFoundError(group_id))}
        return described | {
            "group_state": group.state,
            "protocol_type": "consumer",
            "protocol_data": group.assignor or "",
            "members": list(map(_member_dict, group.members)),
        }

    def delete_groups(
        self, group_ids: Iterable[str], group_coordinator_id: int | None = None
    ) -> dict[str, str]:
        """Delete groups; the result is ``"OK"``, or the name of an error."""
        results = {}
        for group_id in group_ids:
            try:
                self._log.groups[group_id].delete()
                results[group_id] = "OK"
            except log_errors.EmbedlogError as error:
                results[group_id] = type(translated(error)).__name__
        return results

    @raises_kafka_errors
    def list_group_offsets(self, group_specs: Any) -> dict[str, dict[Any, Any]]:
        """Return the committed offsets of groups.

        Args:
            group_specs: A group, a list of groups, or a dict of groups to partitions (None is
                all with a commit).
        """
        if isinstance(group_specs, str):
            group_specs = [group_specs]
        specs = group_specs if isinstance(group_specs, Mapping) else dict.fromkeys(group_specs)
        if not specs:
            raise ValueError("Empty group_specs!")
        return {group_id: self._committed(group_id, spec) for group_id, spec in specs.items()}

    def _committed(self, group_id: str, partitions: Iterable[Any] | None) -> dict[Any, Any]:
        committed = self._service.committed(group_id, partitions)
        return {TopicPartition(*part): _position(position) for part, position in committed.items()}

    def alter_group_offsets(
        self,
        group_id: str,
        offsets: Mapping[Any, Any],
        group_coordinator_id: int | None = None,
    ) -> dict[Any, Any]:
        """Commit offsets for a group without members; return the class of an error for each."""
        positions = {
            LogPartition(*partition): LogPosition(offset, metadata or "", _epoch(*epoch))
            for partition, (offset, metadata, *epoch) in offsets.items()
        }
        outcomes = self._service.commit_offsets(group_id, positions)
        return {TopicPartition(*part): _class_of(error) for part, error in outcomes.items()}

    @raises_kafka_errors
    def reset_group_offsets(
        self,
        group_id: str,
        offset_specs: Mapping[Any, Any],
        group_coordinator_id: int | None = None,
    ) -> dict[Any, dict[str, Any]]:
        """Commit offsets for a group without members: `OffsetSpec`, time, or offset."""
        current = self._committed(group_id, None)
        targets = {}
        for partition, spec in offset_specs.items():
            if isinstance(spec, kafka.OffsetSpec | kafka.admin.OffsetTimestamp):
                offset = self._offset(partition, int(spec)).offset
            elif isinstance(spec, int):
                offset = spec
            else:
                raise TypeError(f"Unsupported reset target for {partition}: {spec!r}")
            log = self._log.root.partition(*partition)
            start, end = log.start_offset(), log.end_offset()
            offset = end if offset < 0 else min(max(offset, start), end)
            before = current.get(partition, OffsetAndMetadata(0, "", -1))
            targets[TopicPartition(*partition)] = before._replace(offset=offset)
        failures = self.alter_group_offsets(group_id, targets)
        return {
            partition: {"error": failures[partition], "offset": target.offset}
            for partition, target in targets.items()
        }

    @raises_kafka_errors
    def delete_group_offsets(
        self, group_id: str, partitions: Iterable[Any], group_coordinator_id: int | None = None
    ) -> dict[Any, Any]:
        """Delete committed offsets; return the class of an error for each partition."""
        group = self._log.groups[group_id]
        results = {}
        for partition in partitions:
            where = LogPartition(*partition)
            results[TopicPartition(*partition)] = _error_class(
                lambda where=where: group.delete_offsets([where])  # type: ignore[misc]
            )
        return results

    @raises_kafka_errors
    def remove_group_members(
        self, group_id: str, members: Iterable[Any], group_coordinator_id: int | None = None
    ) -> dict[str, Any]:
        """Remove members; return the class of an error for each."""
        group = self._log.groups[group_id]
        results = {}
        for member in members:
            name = member.member_id or member.group_instance_id
            results[name] = _error_class(
                lambda name=name: group.remove_members(name)  # type: ignore[misc]
            )
        return results

    # The cluster

    @raises_kafka_errors
    def describe_cluster(self) -> dict[str, Any]:
        """Return the log as a cluster, whose brokers are the directories that are online."""
        brokers = [
            {
                "broker_id": node.id,
                "host": HOST,
                "port": PORT,
                "rack": node.rack,
                "is_fenced": False,
            }
            for node in nodes(self._log).values()
        ]
        return {
            "cluster_id": cluster_id(self._log),
            "controller_id": controller_id(self._log),
            "brokers": brokers,
            "cluster_authorized_operations": set(),
        }

    @raises_kafka_errors
    def describe_log_dirs(
        self, topic_partitions: Any = None, brokers: Collection[int] | None = None
    ) -> list[dict[str, Any]]:
        """Return the directories of the log, and the sizes of partitions."""
        selected = self._partitions(topic_partitions)
        described = []
        for node in nodes(self._log).values():
            if brokers is None or node.id in brokers:
                topics = [
                    {"name": name, "partitions": self._copies(node.id, name, numbers)}
                    for name, numbers in selected.items()
                ]
                directory = {
                    "error_code": 0,
                    "log_dir": node.path,
                    "topics": [topic for topic in topics if topic["partitions"]],
                }
                described.append({"broker": node.id, "log_dirs": [directory]})
        return described

    def _copies(self, node: int, topic: str, numbers: Iterable[int]) -> list[dict[str, Any]]:
        """Return the partitions of a topic of which a directory has a copy."""
        return [
            {
                "partition_index": number,
                # The copies in sync have the same files.
                "partition_size": self._log.root.partition(topic, number).size_bytes(),
                "offset_lag": 0 if node in placement(self._log, topic, number).isr else -1,
                "is_future_key": False,
            }
            for number in numbers
            if node in placement(self._log, topic, number).replicas
        ]

    def _partitions(self, selected: Any) -> Mapping[str, Iterable[int]]:
        """Return partitions by topic; of a list of topics, or of all (None), all partitions."""
        if isinstance(selected, Mapping):
            return selected
        names = self._log.topics(internal=True) if selected is None else selected
        return {name: range(self._log.root.partitions(name)) for name in names}

    def alter_replica_log_dirs(self, replica_assignments: Mapping[Any, str]) -> dict[Any, Any]:
        """Accept the directory of a broker, its only one; return the class of an error for others.

        `alter_partition_reassignments` moves copies to other directories.
        """
        alive = nodes(self._log)
        return {
            replica: errors.NoError
            if replica[2] in alive and alive[replica[2]].path == path
            else errors.LogDirNotFoundError
            for replica, path in replica_assignments.items()
        }

    @raises_kafka_errors
    def elect_leaders(
        self,
        election_type: Any,
        topic_partitions: Any = None,
        timeout_ms: float | None = None,
        raise_errors: bool = True,
    ) -> Any:
        """Elect preferred leaders (0), or with 1 leaders that are not in sync.

        Returns an error for the partitions that got no other leader; it is raised unless no
        election was needed there, or ``raise_errors`` is false.
        """
        selected = self._partitions(topic_partitions)
        partitions = [LogPartition(name, n) for name, numbers in selected.items() for n in numbers]
        unclean = bool(int(getattr(election_type, "value", election_type)))
        names = self._service.elect_leaders(partitions, unclean=unclean)
        kinds = {partition: _ELECTION_ERRORS[name] for partition, name in names.items()}
        if raise_errors:
            for partition, kind in kinds.items():
                if kind not in (errors.NoError, errors.ElectionNotNeededError):
                    raise kind(f"{partition.topic}-{partition.partition}")
        results = [
            (name, [(n, kinds[LogPartition(name, n)].errno, None) for n in numbers])
            for name, numbers in selected.items()
        ]
        return ElectLeadersResponse(0, results)

    @raises_kafka_errors
    def alter_partition_reassignments(
        self, reassignments: Mapping[Any, Sequence[int] | None], timeout_ms: float | None = None
    ) -> dict[Any, Any]:
        """Begin to move copies, which the housekeeping of the log does; None cancels a move.

        Returns None for each partition, or the class of its error.
        """
        if not isinstance(self._log.root, ReplicatedRoot):
            raise errors.UnsupportedVersionError("A log in one directory has no replicas")
        return {
            TopicPartition(*partition): self._reassign(LogPartition(*partition), replicas)
            for partition, replicas in reassignments.items()
        }

    def _reassign(self, partition: LogPartition, replicas: Sequence[int] | None) -> Any:
        root = self._log.root
        assert isinstance(root, ReplicatedRoot)
        root.context.check_writable()
        kind = errors.NoError
        if replicas is not None:
            moves = {partition: replicas}
            kind = _error_class(lambda: reassign.begin(root, moves))
        else:
            counts: list[int] = []
            kind = _error_class(lambda: counts.append(reassign.cancel(root, [partition])))
            if counts == [0]:  # it may have ended, or been cancelled, a moment ago
                kind = errors.NoReassignmentInProgressError
        return None if kind is errors.NoError else kind

    @raises_kafka_errors
    def list_partition_reassignments(
        self, topic_partitions: Any = None, timeout_ms: float | None = None
    ) -> dict[Any, Any]:
        """Return the partitions that are being moved, with their replicas."""
        root = self._log.root
        if not isinstance(root, ReplicatedRoot):
            return {}
        if topic_partitions is not None and not isinstance(topic_partitions, Mapping):
            wanted = {LogPartition(*partition) for partition in topic_partitions}
        else:
            selected = self._partitions(topic_partitions)
            wanted = {LogPartition(name, n) for name, numbers in selected.items() for n in numbers}
        return {
            TopicPartition(info.name, number): {
                "replicas": list(assignment.replicas),
                "adding_replicas": [
                    each
                    for each in assignment.adding_replicas
                    if each in assignment.target_replicas
                ],
                "removing_replicas": list(assignment.removing_replicas),
            }
            for info, number, assignment in reassign.assignments(root)
            if assignment.is_reassigning and LogPartition(info.name, number) in wanted
        }

    def __getattr__(self, name: str) -> Any:
        """Refuse the other methods of kafka-python's admin client."""
        if name.startswith("_") or not hasattr(self._original, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise errors.UnsupportedVersionError(
                f"{name} asks for what only a cluster of brokers has"
            )

        return refuse


def _new_topics(new_topics: Any) -> list[Any]:
    """Return `NewTopic` objects."""
    topics = new_topics
    if isinstance(new_topics, Mapping):
        topics = [_topic(name, **options) for name, options in new_topics.items()]
    topics = [_topic(topic) if isinstance(topic, str) else topic for topic in topics]
    if not topics:
        raise ValueError(f"No valid topics found in new_topics: {new_topics}")
    return topics


def _topic(
    name: str,
    num_partitions: int = -1,
    replication_factor: int = -1,
    assignments: Any = None,
    configs: Any = None,
    **_: Any,
) -> Any:
    return kafka.admin.NewTopic(name, num_partitions, replication_factor, assignments, configs)


def _replica_lists(assignments: Mapping[int, Sequence[int]] | None) -> list[Sequence[int]] | None:
    """Return the replicas of each partition, from a dict by partition."""
    if not assignments:
        return None
    return [assignments.get(number, ()) for number in range(max(assignments) + 1)]


def _result_list(
    items: Mapping[str, Any], key: str, call: Callable[[Any], dict[str, Any]], raise_errors: bool
) -> list[dict[str, Any]]:
    """Call a function for each item, and return the results with names and error codes.

    All items are tried before the first error is raised.
    """
    results, first = [], None
    for name, item in items.items():
        result = {key: name, "error_code": 0, "error_message": None}
        try:
            result |= call(item)
        except log_errors.EmbedlogError as error:
            kafka_error = translated(error)
            if isinstance(error, log_errors.InvalidConfigError):
                kafka_error = errors.InvalidConfigurationError(str(error))
            code = getattr(kafka_error, "errno", None)
            result |= {"error_code": -1 if code is None else code, "error_message": str(error)}
            kafka_error.__cause__ = error
            first = first or kafka_error
        results.append(result)
    if first is not None and raise_errors:
        raise first
    return results


def _error_class(call: Callable[[], object]) -> Any:
    """Return `NoError`, or the class of the error that a call raises."""
    try:
        call()
    except log_errors.EmbedlogError as error:
        return _class_of(error)
    return errors.NoError


def _class_of(error: log_errors.EmbedlogError | None) -> Any:
    return errors.NoError if error is None else type(translated(error))


def _member_dict(member: Any) -> dict[str, Any]:
    by_topic: dict[str, list[int]] = {}
    for topic, number in sorted(member.partitions):
        by_topic.setdefault(topic, []).append(number)
    assigned = [{"topic": topic, "partitions": numbers} for topic, numbers in by_topic.items()]
    return {
        "member_id": member.member_id,
        "group_instance_id": member.group_instance_id,
        "client_id": member.client_id,
        "client_host": f"/{HOST}",
        "member_metadata": {"version": 0, "topics": list(member.topics), "user_data": b""},
        "member_assignment": {"version": 0, "assigned_partitions": assigned, "user_data": b""},
    }


def _entries(
    values: Mapping[str, Any], defaults: Mapping[str, Any], source: str, read_only: bool = False
) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "value": setting_text(value),
            "read_only": read_only,
            "config_source": source if read_only or value != defaults[name] else "DEFAULT_CONFIG",
            "is_sensitive": False,
            "synonyms": [],
            "config_type": _CONFIG_TYPES[type(value)],
            "documentation": None,
        }
        for name, value in values.items()
    }


_FILTERS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "ALL": lambda entry: True,
    "DYNAMIC": lambda entry: not entry["read_only"],
    "MODIFIED": lambda entry: entry["config_source"].startswith("DYNAMIC"),
    "DEFAULT": lambda entry: not entry["config_source"].startswith("DYNAMIC"),
    "STATIC": lambda entry: entry["read_only"],
}
"""The settings that a `ConfigFilterType` selects."""


def _changes(config: TopicConfig, resource: Any) -> dict[str, Any]:
    """Return the settings to change; None resets one."""
    changes: dict[str, Any] = {}
    for name, item in (resource.configs or {}).items():
        operation, value = item if isinstance(item, tuple) else ("SET", item)
        operation = kafka.admin.AlterConfigOp.build_from(operation).name
        changes[name] = changed_setting(config, name, operation, value)
    return changes


def _epoch(epoch: int | None = None) -> int | None:
    return None if epoch is None or epoch < 0 else epoch


def _position(committed: LogPosition | None) -> Any:
    offset, metadata, epoch = committed or LogPosition(-1, "", None)
    return OffsetAndMetadata(offset, metadata, -1 if epoch is None else epoch)
