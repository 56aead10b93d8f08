"""Members on the wire, step by step: clients that do what Kafka's do, when a test says so."""

from __future__ import annotations

import struct
from typing import Any
from uuid import UUID, uuid4

from embedlog.record import TopicPartition
from embedlog.server.error_codes import ErrorCode
from embedlog.server.protocol import decode, encode
from support.wire_client import DirectClient, WireClient

LONG = 1_000_000
"""A timeout in ms that no test waits for."""
Partitions = set[TopicPartition]
Server = str | DirectClient
"""The address of a server, or a client that asks one in this process."""


def partitions(*numbers: int, topic: str = "t") -> Partitions:
    """Return partitions of a topic."""
    return {TopicPartition(topic, number) for number in numbers}


class Modern:
    """A client with ``group.protocol=consumer``: what it has, and its epoch.

    Args:
        server: Whom it asks.
        topics: What it subscribes to.
        fields: Other fields of its first heartbeat.
    """

    def __init__(self, server: Server, *topics: str, group: str = "g", **fields: Any) -> None:
        self.client, self.group = _connected(server), group
        self.id, self.epoch = str(uuid4()), 0
        self.instance: str | None = fields.pop("instance_id", None)
        self.joining = {
            "rebalance_timeout_ms": LONG,
            "subscribed_topic_names": list(topics),
            **fields,
        }
        self._names: dict[UUID, str] = {}
        self.has: Partitions = set()
        """The partitions that it reads."""
        self.assigned: Partitions | None = None
        """What it was told last."""

    def names(self) -> dict[UUID, str]:
        """Return the names of topics by their ids, also of those that were deleted."""
        answer = self.client.ask("Metadata", 12, topics=None)
        self._names |= {topic.topic_id: topic.name for topic in answer.topics}
        return self._names

    def ask(self, **fields: Any) -> Any:
        """Send a heartbeat, and return the answer."""
        known = {"group_id": self.group, "member_id": self.id, "instance_id": self.instance}
        fields = {**known, "member_epoch": self.epoch, **fields}
        return self.client.ask("ConsumerGroupHeartbeat", 1, **fields)

    def beat(self, **fields: Any) -> int:
        """Join, or send a heartbeat; take what the answer gives, and return its code."""
        if self.epoch == 0:
            fields = {**self.joining, "topic_partitions": [], **fields}
        answer = self.ask(**fields)
        if answer.error_code == 0:
            self.epoch = answer.member_epoch
            if answer.assignment is not None:
                names = self.names()
                self.assigned = {
                    TopicPartition(names[topic.topic_id], number)
                    for topic in answer.assignment.topic_partitions
                    for number in topic.partitions
                }
                self.has &= self.assigned
        return int(answer.error_code)

    def confirm(self, **fields: Any) -> int:
        """Tell what it has, and begin to read what it is told in the answer."""
        code = self.beat(topic_partitions=self.owned(), **fields)
        if self.assigned is not None:
            self.has = set(self.assigned)
        return code

    def owned(self) -> list[dict[str, Any]]:
        """Return what it has, as heartbeats say it."""
        by_topic: dict[str, list[int]] = {}
        for topic, number in sorted(self.has):
            by_topic.setdefault(topic, []).append(number)
        ids = {name: number for number, name in self.names().items()}
        return [
            {"topic_id": ids[topic], "partitions": numbers} for topic, numbers in by_topic.items()
        ]

    def join(self) -> set[TopicPartition]:
        """Join, and return what it may read."""
        assert self.beat() == 0
        self.has = set(self.assigned or ())
        return self.has

    def commit(self, offset: int, partition: int = 0, **fields: Any) -> int:
        """Commit an offset, and return the code."""
        return commit(self.client, self.group, self.id, self.epoch, offset, partition, **fields)

    def close(self) -> None:
        """Close the connection, without leaving the group."""
        self.client.close()


class Classic:
    """A client that joins and syncs: what it has, and its generation.

    Args:
        server: Whom it asks.
        topics: What it subscribes to.
        cooperative: Whether it keeps its partitions when it joins again.
        options: Fields of its requests to join.
    """

    def __init__(
        self,
        server: Server,
        *topics: str,
        group: str = "g",
        cooperative: bool = False,
        instance: str | None = None,
        **options: Any,
    ) -> None:
        self.client, self.group = _connected(server), group
        self.id, self.generation, self.instance = "", -1, instance
        self.topics, self.cooperative = topics, cooperative
        self.options = {"session_timeout_ms": LONG, "rebalance_timeout_ms": LONG, **options}
        self.has: Partitions = set()

    def join(self) -> Any:
        """Join; one that is not cooperative first gives up what it has."""
        if not self.cooperative:
            self.has = set()
        said = subscription(self.topics, self.has)
        protocols = [{"name": name, "metadata": said} for name in ("cooperative-sticky", "range")]
        answer = self.client.ask(
            "JoinGroup",
            9,
            **{"protocols": protocols, **self.options},
            protocol_type="consumer",
            group_id=self.group,
            member_id=self.id,
            group_instance_id=self.instance,
        )
        if answer.error_code == ErrorCode.MEMBER_ID_REQUIRED:
            self.id = answer.member_id
            return self.join()
        if answer.error_code == 0:
            self.id, self.generation = answer.member_id, answer.generation_id
        return answer

    def sync(self) -> int:
        """Get the assignment, and return the code; cooperative ones join again if they must."""
        answer = self._ask("SyncGroup", 5, protocol_type="consumer", assignments=[])
        if answer.error_code == 0 and answer.assignment:
            said = decode("ConsumerProtocolAssignment", 0, answer.assignment[2:])
            self.has = {
                TopicPartition(each.topic, number)
                for each in said.assigned_partitions
                for number in each.partitions
            }
        return int(answer.error_code)

    def settle(self) -> Partitions:
        """Join and sync until the heartbeat says that there is nothing to do."""
        while True:
            assert self.join().error_code == 0
            if self.sync() == 0 and self.heartbeat() == 0:
                return self.has

    def heartbeat(self) -> int:
        """Send a heartbeat, and return its code."""
        return int(self._ask("Heartbeat", 4).error_code)

    def leave(self) -> int:
        """Leave the group, and return the code."""
        member = {"member_id": self.id, "group_instance_id": self.instance}
        answer = self.client.ask("LeaveGroup", 5, group_id=self.group, members=[member])
        return int(answer.members[0].error_code)

    def commit(self, offset: int, partition: int = 0, **fields: Any) -> int:
        """Commit an offset, and return the code."""
        return commit(
            *(self.client, self.group, self.id, self.generation, offset, partition), **fields
        )

    def _ask(self, api: str, version: int, **fields: Any) -> Any:
        who = {"group_id": self.group, "member_id": self.id, "group_instance_id": self.instance}
        return self.client.ask(api, version, generation_id=self.generation, **who, **fields)

    def close(self) -> None:
        """Close the connection, without leaving the group."""
        self.client.close()


def _connected(server: Server) -> WireClient | DirectClient:
    return WireClient(server) if isinstance(server, str) else server


def commit(
    client: WireClient | DirectClient,
    group: str,
    member: str,
    epoch: int,
    offset: int,
    number: int,
    *,
    topic: str = "t",
    **fields: Any,
) -> int:
    """Commit an offset, and return the code."""
    part = {"partition_index": number, "committed_offset": offset}
    who = {"generation_id_or_member_epoch": epoch, "member_id": member, **fields}
    topics = [{"name": topic, "partitions": [part]}]
    answer = client.ask("OffsetCommit", 9, group_id=group, topics=topics, **who)
    return int(answer.topics[0].partitions[0].error_code)


def subscription(topics: tuple[str, ...], owned: Partitions) -> bytes:
    """Return what a consumer says of itself when it joins."""
    by_topic: dict[str, list[int]] = {}
    for topic, number in sorted(owned):
        by_topic.setdefault(topic, []).append(number)
    parts = [{"topic": topic, "partitions": numbers} for topic, numbers in by_topic.items()]
    fields = {"topics": list(topics), "owned_partitions": parts}
    return struct.pack(">h", 1) + encode("ConsumerProtocolSubscription", 1, fields)
