"""The same requests to a Kafka broker and to a server, and how their answers differ.

A `Step` is a request whose fields may have functions in the place of values: each side puts there
what only it knows, such as the id of a topic.  Answers are compared once what must differ (ids,
addresses, times, texts, order) is replaced by what it stands for.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any, NamedTuple
from uuid import UUID

from embedlog.server.codecs import NAMES
from embedlog.server.error_codes import ErrorCode
from embedlog.server.record_batches import HEAD, WireBatch
from support.patience import patient
from support.random_messages import plain
from support.wire_client import WireClient, request_bytes

_OWN = -1
"""The connection for what a script must know."""
CLOSED, OPEN = "the connection was closed", "the connection stayed open"
REFUSED = "refused"
"""Is in the names of groups that no member may join."""
_IGNORED = {"throttle_time_ms", "host", "port", "client_host", "cluster_id", "documentation"}
_NODES = {"leader_id", "node_id", "controller_id", "broker_id", "replica_nodes", "isr_nodes"}
_TEXT = "a text"
_TEXTS = {"error_message", "batch_index_error_message"}
_IDENTITY = ("name", "topic", "group_id", "topic_id", "resource_type", "resource_name", "key")
_NUMBERS = ("partition_index", "partition", "index", "api_key", "member_id", "error_code")
READS = frozenset(
    {"Metadata", "DescribeTopicPartitions", "Fetch", "ListOffsets", "OffsetForLeaderEpoch"}
    | {"DescribeConfigs", "ListGroups", "DescribeGroups", "OffsetFetch", "DescribeCluster"}
    | {"FindCoordinator"}
)
"""A broker may take a moment until it answers these after a change: they are asked again."""
_REPEATS = 5
_LONGEST_ANSWER_SECONDS = 60


@dataclass
class Step:
    """A request.

    Args:
        case: What is special about it, after the name of the API.
        api: The API.
        fields: Of the request; a function is called with the side.
        since: The first version that can say this.
        until: The last one.
        learn: Is called with the side and its answer.
        has_answer: Whether one comes.
        connection: Which connection of the side is used.
    """

    case: str
    api: str
    fields: dict[str, Any] = field(default_factory=dict)
    since: int = 0
    until: int = 99
    learn: Callable[[Side, Any], object] | None = None
    has_answer: bool = True
    connection: int = 0
    repeats: bool = True
    """Whether it may be asked again."""

    @property
    def name(self) -> str:
        """What differences are listed by."""
        return f"{self.api}: {self.case}"


class Found(NamedTuple):
    """A difference of two answers."""

    step: str
    field: str
    kafka: Any
    embedlog: Any
    version: int


class Side:
    """A broker, or a server.

    Args:
        address: Where it is.
        prefix: That of all names in the script; others are not seen.
    """

    def __init__(self, address: str, prefix: str) -> None:
        self.address, self.prefix = address, prefix
        self._connections: dict[int, WireClient] = {}
        self.known: dict[str, Any] = {}
        """What the script calls ids that each side chose itself."""
        self.ids: dict[str, Any] = {}
        with WireClient(address) as client:
            answer = client.ask("ApiVersions", 2)
            self.versions = {
                each.api_key: (each.min_version, each.max_version) for each in answer.api_keys
            }
            self.node = client.ask("Metadata", 9, topics=[]).controller_id

    def close(self) -> None:
        """Close the connections."""
        for each in self._connections.values():
            each.close()

    def ask(self, step: Step, version: int) -> Any:
        """Send a request; return the answer, or what became of the connection."""
        client = self._connections.get(step.connection)
        if client is None:
            client = self._connections[step.connection] = WireClient(self.address)
            client.socket.settimeout(_LONGEST_ANSWER_SECONDS)
        try:
            client.send(request_bytes(step.api, version, **self._resolved(step.fields)))
            if not step.has_answer:
                client.ask("ApiVersions", 0)
                return OPEN
            answer = client.decoded(step.api, version)
        except (AssertionError, ConnectionError):
            self._connections.pop(step.connection).close()
            return CLOSED
        if step.learn is not None:
            step.learn(self, answer)
        return plain(answer)

    # What a script needs to know

    def topics(self) -> dict[str, int]:
        """Return how many partitions the topics of the script have; `ids` are theirs."""
        answer = self._asked("Metadata", 12, topics=None)
        own = [each for each in answer.topics if each.name.startswith(self.prefix)]
        self.ids = {f"id of {each.name}": each.topic_id for each in own}
        return {each.name: len(each.partitions) for each in own}

    def create(self, name: str, partitions: int, settings: dict[str, str]) -> None:
        """Create a topic."""
        configs = [{"name": key, "value": value} for key, value in settings.items()]
        topic = {"name": name, "num_partitions": partitions, "replication_factor": 1}
        fields = {"topics": [{**topic, "configs": configs}], "timeout_ms": 5000}
        (answer,) = self._asked("CreateTopics", 5, **fields).topics
        # It may be there, and not known to the broker yet.
        assert answer.error_code in (0, ErrorCode.TOPIC_ALREADY_EXISTS), answer

    def delete(self, name: str) -> None:
        """Delete a topic, if it is there."""
        self._asked("DeleteTopics", 5, topic_names=[name], timeout_ms=5000)

    def leads(self, topics: dict[str, int]) -> bool:
        """Whether the broker answers for all partitions."""
        asked = [
            {
                "name": name,
                "partitions": [{"partition_index": n, "timestamp": -1} for n in range(count)],
            }
            for name, count in topics.items()
        ]
        answer = self._asked("ListOffsets", 5, topics=asked, replica_id=-1)
        return not any(part.error_code for each in answer.topics for part in each.partitions)

    def wait_for_coordinators(self) -> None:
        """Wait until groups and producers can be coordinated, whatever their names are."""
        deadline = monotonic() + patient(30)
        for number in range(20):
            name = f"{self.prefix}group-{number}"
            while True:
                self._asked("FindCoordinator", 2, key=name, key_type=0)
                if not self._asked("OffsetFetch", 7, group_id=name, topics=None).error_code:
                    break
                assert monotonic() < deadline, "the coordinator of groups is not there"
                sleep(0.1)
        while self._asked("InitProducerId", 1, transactional_id=None).error_code:
            assert monotonic() < deadline, "no ids of producers"
            sleep(0.1)

    def end(self, topic: str, partition: int) -> int:
        """Return the end of a partition."""
        asked = [{"name": topic, "partitions": [{"partition_index": partition, "timestamp": -1}]}]
        answer = self._asked("ListOffsets", 5, topics=asked, replica_id=-1)
        return int(answer.topics[0].partitions[0].offset)

    def _asked(self, api: str, version: int, **fields: Any) -> Any:
        if _OWN not in self._connections:
            self._connections[_OWN] = WireClient(self.address)
        return self._connections[_OWN].ask(api, version, **fields)

    def _resolved(self, value: Any) -> Any:
        if callable(value):
            return value(self)
        if isinstance(value, dict):
            return {name: self._resolved(part) for name, part in value.items()}
        return [self._resolved(each) for each in value] if isinstance(value, list) else value

    def normal(self, answer: Any, name: str = "") -> Any:
        """Return an answer with what it stands for in the place of what must differ."""
        if isinstance(answer, dict):
            return {
                part: self.normal(value, part)
                for part, value in answer.items()
                if part not in _IGNORED
            }
        if isinstance(answer, list):
            items = [self.normal(each, name) for each in answer if self._is_seen(each)]
            return sorted(items, key=_sort_key) if items and isinstance(items[0], dict) else items
        if name in _NODES:
            # 0 is what a version has that does not have the field.
            return "the broker" if answer in (0, self.node) else answer
        if name in _TEXTS:
            # Kafka does not say whether a text is null or empty.
            return _TEXT if answer and answer != "NONE" else None
        if name in ("producer_id", "session_id") and answer > 0:
            return "an id"
        if name == "aborted_transactions":
            return answer or []
        if name == "log_append_time_ms":
            return "a time" if answer != -1 else answer
        if name == "records":
            return list(records_of(answer or b""))
        for known, value in self.known.items():
            if value == answer and not isinstance(answer, int):
                return f"<{known}>"
        return self._of_node(answer, name)

    def _of_node(self, answer: Any, name: str) -> Any:
        if name == "resource_name" and answer == str(self.node):
            return "the broker"
        if isinstance(answer, UUID):
            # Of a new topic.
            return "an id" if answer.version else str(answer)
        return answer

    def _is_seen(self, item: Any) -> bool:
        """Whether an item of an answer is of the script."""
        if not isinstance(item, dict):
            return True
        if "group_id" in item and "group_state" in item and "members" not in item:
            # Kafka may keep an empty group of a member that it has refused.
            return self.prefix in item["group_id"] and REFUSED not in item["group_id"]
        return True


def _sort_key(item: dict[str, Any]) -> Any:
    texts = [str(item.get(each)) for each in _IDENTITY if each in item]
    return texts, [repr(item.get(each)).zfill(12) for each in _NUMBERS if each in item]


def records_of(data: bytes) -> Iterator[Any]:
    """Yield the records of batches: offset, epoch, timestamp, key, value and headers."""
    view, at = memoryview(data), 0
    while at + HEAD.size <= len(view):
        base, length, epoch, _, _, attributes, last_delta, base_time, _ = HEAD.unpack_from(
            view, at
        )[:9]
        stop = at + 12 + length
        if stop > len(view):
            return  # A broker may send a part of the last batch.
        count = struct.unpack_from(">i", view, at + 57)[0]
        batch = WireBatch(
            *(base_time, -1, -1, -1, count, NAMES[attributes & 7]),
            *(view[at + HEAD.size : stop], view[at:stop]),
        )
        values, keys, times, headers = batch.lists()
        assert last_delta == count - 1
        for row in range(count):
            time = "append time" if attributes & 8 else times[row]
            yield base + row, epoch, time, keys[row], values[row], headers[row] if headers else []
        at = stop


def differences(kafka: Any, embedlog: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield where two normal answers differ, as a path of fields with the two values."""
    if isinstance(kafka, dict) and isinstance(embedlog, dict):
        for name in kafka.keys() | embedlog.keys():
            place = f"{path}.{name}" if path else name
            yield from differences(kafka.get(name), embedlog.get(name), place)
    elif path.endswith("configs") and isinstance(kafka, list) and isinstance(embedlog, list):
        # Each side has settings that the other does not have.
        ours = {each["name"]: each for each in embedlog}
        for each in kafka:
            if each["name"] in ours:
                yield from differences(each, ours[each["name"]], f"{path}[{each['name']}]")
    elif path.endswith("records") and isinstance(kafka, list) and isinstance(embedlog, list):
        yield from _of_records(kafka, embedlog, path)
    elif isinstance(kafka, list) and isinstance(embedlog, list):
        if len(kafka) != len(embedlog):
            yield f"{path}#", kafka, embedlog
            return
        for one, other in zip(kafka, embedlog, strict=True):
            yield from differences(one, other, path)
    elif kafka != embedlog and not (kafka is None and embedlog == _TEXT):
        # The server explains more of its errors.
        yield path, kafka, embedlog


def _of_records(kafka: list[Any], embedlog: list[Any], path: str) -> Iterator[tuple[str, Any, Any]]:
    """Batches are others: where they begin and how many fit may differ, not the records."""
    if not kafka or not embedlog:
        if kafka != embedlog:
            yield path, len(kafka), len(embedlog)
        return
    first = max(kafka[0][0], embedlog[0][0])
    pairs = zip(
        (each for each in kafka if each[0] >= first),
        (each for each in embedlog if each[0] >= first),
        strict=False,
    )
    for one, other in pairs:
        if one != other:
            yield path, one, other
            return


class Pair:
    """A broker and a server, which get the same requests."""

    def __init__(self, kafka: str, embedlog: str, prefix: str) -> None:
        self.kafka, self.embedlog = Side(kafka, prefix), Side(embedlog, prefix)
        self.prefix = prefix
        self.steps = 0

    def versions(self, key: int) -> tuple[int, int]:
        """Return the first and the last version that both have of an API; (0, -1) for none."""
        none = (0, -1)
        one, other = self.kafka.versions.get(key, none), self.embedlog.versions.get(key, none)
        return max(one[0], other[0]), min(one[1], other[1])

    def compare(
        self, step: Step, version: int, is_known: Callable[[Found], bool] = lambda _: False
    ) -> list[Found]:
        """Send a request to both, and return the differences of the answers.

        Args:
            step: The request.
            version: Of the request.
            is_known: Whether a difference will not go away.
        """
        self.steps += 1
        theirs = self._own(step, self.embedlog.ask(step, version))
        repeats = _REPEATS if step.repeats and step.api in READS else 0
        for left in range(repeats, -1, -1):
            kafkas = self._own(step, self.kafka.ask(step, version))
            found = [
                Found(step.name, *each, version)
                for each in differences(self.kafka.normal(kafkas), self.embedlog.normal(theirs))
            ]
            if all(map(is_known, found)) or not left:
                break
            sleep(0.1)
        return found

    def _own(self, step: Step, answer: Any) -> Any:
        """Return the answer for all topics without those of others."""
        if step.case == "all" and isinstance(answer, dict) and "topics" in answer:
            own = [each for each in answer["topics"] if each["name"].startswith(self.prefix)]
            answer = {**answer, "topics": own}
        return answer

    def close(self) -> None:
        """Close the connections."""
        self.kafka.close()
        self.embedlog.close()
