"""A log answers the requests that aiokafka's admin client sends to the brokers of a cluster."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from embedlog.api import Log
from embedlog.config import TopicConfig
from embedlog.config.values import setting_text
from embedlog.errors import EmbedlogError
from embedlog.kafka.aiokafka.errors import translated
from embedlog.kafka.aiokafka.library import errors, structs
from embedlog.kafka.cluster import BROKER_VERSION, HOST, PORT, LogCluster
from embedlog.kafka.library import load
from embedlog.record import TopicPartition
from embedlog.server.admin_service import AdminService
from embedlog.server.cluster import NO_LEADER, cluster_id, controller_id, nodes, placement
from embedlog.tasks import in_thread

_types: Any = load("aiokafka.protocol.types")
_protocol: Any = load("aiokafka.coordinator.protocol")
_TOPIC, _BROKER = 2, 4
_NEWEST = 1 << 15

Fields = dict[str, Any]
"""A response of Kafka's protocol, or a part of one; what is left out has its default."""


class LogBrokers(LogCluster):
    """The brokers of a log, in the place of the client that has aiokafka's connections.

    ``CreateTopicsRequest`` is answered by the method ``_create_topics``, and so on.  A request
    without such a method is refused: it asks for what only a cluster has.
    """

    _request_timeout_ms = 40_000
    api_version = BROKER_VERSION

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self._service = AdminService(log)

    # What aiokafka calls

    @property
    def controller(self) -> Any:
        """The controller of the cluster."""
        return structs.BrokerMetadata(controller_id(self._log), HOST, PORT, None)

    def brokers(self) -> set[Any]:
        """Return the brokers."""
        return {
            structs.BrokerMetadata(node.id, HOST, PORT, node.rack)
            for node in nodes(self._log).values()
        }

    async def close(self) -> None:
        """Do nothing: the log is closed by its client."""

    def update_metadata(self, metadata: Any) -> None:
        """Do nothing: what is asked for is read from the log."""

    async def force_metadata_update(self) -> bool:
        """Return whether that is up to date, likewise."""
        return True

    def add_topic(self, topic: str) -> None:
        """Have a topic created, if the log allows that."""
        self._log.root.ensure_topic(topic)

    async def _wait_on_metadata(self, topic: str) -> set[int] | None:
        """Return the partitions of a topic, which is created if the log allows that."""
        self.add_topic(topic)
        return self.partitions_for_topic(topic)

    async def ready(self, node_id: int) -> bool:
        """Return whether a broker can be asked."""
        return True

    def get_random_node(self) -> int:
        """Return the id of a broker."""
        return controller_id(self._log)

    async def send(self, node_id: int, request: Any) -> Any:
        """Return the answer of a broker to a request."""
        asked = request.prepare(_AllVersions())
        kind = asked.RESPONSE_TYPE
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(request).__name__.removesuffix("Request"))
        answer = getattr(self, f"_{name.lower()}", None)
        if answer is None:
            raise errors.UnsupportedVersionError(
                f"{type(request).__name__} asks for what only a cluster of brokers has"
            )
        fields = await in_thread(answer, _fields(asked.SCHEMA, vars(asked)))
        return kind(*_row(kind.SCHEMA, fields))

    # Outcomes

    def _outcome(self, call: Callable[..., Fields | None], *args: Any) -> Fields:
        """Return the fields that a call returns, or the code and the text of its error."""
        try:
            return {"error_message": None, **(call(*args) or {})}
        except EmbedlogError as error:
            code = getattr(translated(error), "errno", None)
            code = errors.UnknownError.errno if code is None else code
            return {"error_code": code, "error_message": str(error)}

    def _each(
        self, items: Iterable[Fields], names: tuple[str, ...], call: Callable[[Any], Fields | None]
    ) -> list[Fields]:
        return [{**{n: item[n] for n in names}, **self._outcome(call, item)} for item in items]

    # Topics and brokers

    def _metadata(self, asked: Fields) -> Fields:
        names = self._log.topics(internal=True) if asked["topics"] is None else asked["topics"]
        brokers = [
            {"node_id": each.id, "host": HOST, "port": PORT, "rack": each.rack}
            for each in nodes(self._log).values()
        ]
        return {
            "brokers": brokers,
            "cluster_id": cluster_id(self._log),
            "controller_id": controller_id(self._log),
            "topics": list(map(self._topic, names)),
        }

    def _topic(self, name: str) -> Fields:
        info = self._log.root.topics().get(name)
        if info is None:
            return {"error_code": errors.UnknownTopicOrPartitionError.errno, "topic": name}
        partitions = []
        for number in range(info.partitions):
            leader, replicas, isr = placement(self._log, name, number)
            partitions.append(
                {
                    "error_code": 0 if leader is not None else errors.LeaderNotAvailableError.errno,
                    "partition": number,
                    "leader": NO_LEADER if leader is None else leader,
                    "replicas": list(replicas),
                    "isr": list(isr),
                }
            )
        return {"topic": name, "is_internal": name.startswith("__"), "partitions": partitions}

    def _create_topics(self, asked: Fields) -> Fields:
        def create(topic: Fields) -> None:
            assigned = {
                each["partition_id"]: each["replicas"] for each in topic["replica_assignment"]
            }
            self._service.create_topic(
                *(topic["topic"], topic["num_partitions"]),
                {each["config_key"]: each["config_value"] for each in topic["configs"]},
                replication_factor=topic["replication_factor"],
                replicas=[assigned.get(n, ()) for n in range(max(assigned, default=-1) + 1)],
                validate_only=asked["validate_only"],
            )

        return {"topic_errors": self._each(asked["create_topic_requests"], ("topic",), create)}

    def _delete_topics(self, asked: Fields) -> Fields:
        topics = [{"topic": name} for name in asked["topics"]]
        deleted = self._each(topics, ("topic",), lambda each: self._log.delete_topic(each["topic"]))
        return {"topic_error_codes": deleted}

    def _create_partitions(self, asked: Fields) -> Fields:
        def create(topic: Fields) -> None:
            total = topic["new_partitions"]["count"]
            only_check = asked["validate_only"]
            self._service.create_partitions(topic["topic"], total, validate_only=only_check)

        return {"topic_errors": self._each(asked["topic_partitions"], ("topic",), create)}

    def _describe_configs(self, asked: Fields) -> Fields:
        def describe(resource: Fields) -> Fields:
            is_topic, wanted = resource["resource_type"] == _TOPIC, resource["config_names"]
            values: Mapping[str, Any] = {"broker.id": controller_id(self._log)}
            if is_topic:
                values = self._log.root.topic(resource["resource_name"]).config.to_dict()
            defaults = TopicConfig().to_dict() if is_topic else values
            entries = [
                {
                    "config_names": name,
                    "config_value": setting_text(value),
                    "read_only": not is_topic,
                    # Kafka's numbers for settings of the topic, and for defaults.
                    "config_source": 5 if value == defaults[name] else 1,
                }
                for name, value in values.items()
                if wanted is None or name in wanted
            ]
            return {"config_entries": entries}

        names = "resource_type", "resource_name"
        return {"resources": self._each(asked["resources"], names, describe)}

    def _alter_configs(self, asked: Fields) -> Fields:
        def alter(resource: Fields) -> None:
            topic = resource["resource_name"]
            given = {
                each["config_name"]: each["config_value"] for each in resource["config_entries"]
            }
            # The request has all settings of the topic: others get their defaults.
            before = dict.fromkeys(self._log.root.topic(topic).config.overrides())
            only_check = asked["validate_only"]
            self._service.alter_topic(topic, {**before, **given}, validate_only=only_check)

        names = "resource_type", "resource_name"
        return {"resources": self._each(asked["resources"], names, alter)}

    def _delete_records(self, asked: Fields) -> Fields:
        def delete(partition: TopicPartition, offset: int) -> Fields:
            return {"low_watermark": self._log.delete_records({partition: offset})[partition]}

        return {
            "topics": [
                {
                    "name": topic["name"],
                    "partitions": [
                        {
                            "partition_index": each["partition_index"],
                            "low_watermark": -1,
                            **self._outcome(
                                delete,
                                TopicPartition(topic["name"], each["partition_index"]),
                                each["offset"],
                            ),
                        }
                        for each in topic["partitions"]
                    ],
                }
                for topic in asked["topics"]
            ]
        }

    # Groups

    def _find_coordinator(self, asked: Fields) -> Fields:
        return {"coordinator_id": controller_id(self._log), "host": HOST, "port": PORT}

    def _list_groups(self, asked: Fields) -> Fields:
        return {"groups": [{"group": n, "protocol_type": "consumer"} for n in self._log.groups]}

    def _describe_groups(self, asked: Fields) -> Fields:
        groups = []
        for name in asked["groups"]:
            group = self._service.group(name)
            facts: Fields = {"group": name, "state": "Dead", "protocol": ""}
            if group is not None:
                members = list(map(_member, group.members))
                facts |= {"state": group.state, "protocol_type": "consumer", "members": members}
                facts["protocol"] = group.assignor or ""
            groups.append(facts)
        return {"groups": groups}

    def _offset_fetch(self, asked: Fields) -> Fields:
        wanted = asked["topics"] and [
            (topic["topic"], number) for topic in asked["topics"] for number in topic["partitions"]
        ]
        by_topic = defaultdict(list)
        for (topic, number), position in self._service.committed(
            asked["consumer_group"], wanted
        ).items():
            offset, metadata = (-1, "") if position is None else position[:2]
            by_topic[topic].append({"partition": number, "offset": offset, "metadata": metadata})
        return {"topics": [{"topic": name, "partitions": by_topic[name]} for name in by_topic]}


class _AllVersions(dict):  # type: ignore[type-arg]
    """The versions of a broker that knows all."""

    def __missing__(self, _: int) -> tuple[int, int]:
        return 0, _NEWEST

    def __contains__(self, _: object) -> bool:
        return True


def _member(member: Any) -> Fields:
    by_topic = defaultdict(list)
    for topic, number in member.partitions:
        by_topic[topic].append(number)
    metadata = _protocol.ConsumerProtocolMemberMetadata(0, list(by_topic), b"")
    assignment = _protocol.ConsumerProtocolMemberAssignment(0, list(by_topic.items()), b"")
    return {
        "member_id": member.member_id,
        "client_id": member.client_id or "",
        "client_host": f"/{HOST}",
        "member_metadata": metadata.encode(),
        "member_assignment": assignment.encode(),
    }


def _fields(schema: Any, item: Any) -> Fields:
    """Return a request, or a part of one, by the names of its schema; aiokafka's refuses None."""
    values = [item[name] for name in schema.names] if isinstance(item, dict) else item
    return {
        name: _plain(kind, value)
        for name, kind, value in zip(schema.names, schema.fields, values, strict=True)
    }


def _plain(kind: Any, value: Any) -> Any:
    if isinstance(kind, _types.Array):
        return None if value is None else [_plain(kind.array_of, each) for each in value]
    return _fields(kind, value) if isinstance(kind, _types.Schema) else value


def _row(schema: Any, fields: Fields) -> list[Any]:
    """Return the values of a response, or of a part of one, in the order of its schema."""
    return [
        _value(kind, fields.get(name))
        for name, kind in zip(schema.names, schema.fields, strict=True)
    ]


def _value(kind: Any, value: Any) -> Any:
    if isinstance(kind, _types.Array):
        return [_value(kind.array_of, each) for each in value or ()]
    if isinstance(kind, _types.Schema):
        return tuple(_row(kind, value))
    if value is None and kind is _types.TaggedFields:
        return {}
    is_text = isinstance(kind, _types.String) or kind in (_types.Bytes, _types.CompactString)
    return 0 if value is None and not is_text else value
