"""Random requests that mean something, for a broker and a server: `AREAS`.

Each area returns scenarios, which are lists of steps; those of several steps belong together.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from time import monotonic, sleep
from typing import Any
from uuid import UUID

from test_server_batches import CODECS, compressed, stored

from embedlog.checksum import crc32c
from embedlog.server.protocol import api_names
from embedlog.server.record_batches import HEAD, write_batches
from support.patience import patient
from support.random_messages import random_records
from support.wire_pair import REFUSED, Found, Pair, Side, Step

NO_ID = UUID(int=0)
OTHER_ID = UUID(int=77)
BASE_TOPICS: dict[str, tuple[int, dict[str, str]]] = {
    "plain": (2, {}),
    "compacted": (1, {"cleanup.policy": "compact"}),
    "append-time": (1, {"message.timestamp.type": "LogAppendTime"}),
    "small": (1, {"max.message.bytes": "600"}),
}
"""Partitions and settings of topics that are always there."""
Scenario = list[Step]


class World:
    """What a script knows of both sides.

    Args:
        prefix: That of all names.
        dice: Chooses.
    """

    def __init__(self, prefix: str, dice: random.Random) -> None:
        self.prefix, self.dice = prefix, dice
        self.topics: dict[str, int] = {}
        """The topics that there are, with how many partitions they have."""
        self.ends: dict[tuple[str, int], int] = {}
        self.scenarios = 0

    def name(self, text: str) -> str:
        """Return a name of the script."""
        return f"{self.prefix}{text}"

    def topic(self) -> str:
        """Return a topic that there is."""
        return self.dice.choice(sorted(self.topics))

    def extra(self) -> str:
        """Return a topic that may be deleted, or was."""
        return self.name(f"extra-{self.dice.randrange(4)}")

    def victim(self) -> str:
        """Return a topic that may be deleted, if there is one."""
        extra = [each for each in sorted(self.topics) if "extra-" in each]
        return self.dice.choice(extra) if extra else self.extra()

    def new(self, kind: str) -> str:
        """Return a name that was not used before."""
        self.scenarios += 1
        return self.name(f"{kind}-{self.scenarios}")


def id_of(name: str) -> Callable[[Side], UUID]:
    """Return what a side calls a topic."""
    return lambda side: side.known.get(f"id of {name}", OTHER_ID)


def number_of(side: Side) -> str:
    """Return the number of the broker as a resource."""
    return str(side.node)


# Topics


def create_topics(world: World) -> list[Scenario]:
    """CreateTopics."""
    name, dice = world.extra(), world.dice
    fresh = world.new("fresh")

    def topic(**fields: Any) -> dict[str, Any]:
        topic = {"name": fresh, "num_partitions": 1, "replication_factor": 1, **fields}
        settings = [{"name": key, "value": each} for key, each in fields.get("configs", {}).items()]
        return topic | {"configs": settings}

    def assigned(*numbers: int, brokers: Any = None) -> list[dict[str, Any]]:
        ids = brokers or [lambda side: side.node]
        return [{"partition_index": number, "broker_ids": ids} for number in numbers]

    by_hand = {"num_partitions": -1, "replication_factor": -1}
    cases: dict[str, list[dict[str, Any]]] = {
        "perhaps existing": [topic(name=name, num_partitions=dice.randrange(1, 4))],
        "existing": [topic(name=world.topic())],
        "defaults": [topic(num_partitions=-1, replication_factor=-1)],
        "settings": [
            topic(name=name, configs={"retention.ms": "1000000", "cleanup.policy": "compact"})
        ],
        "no partitions": [topic(num_partitions=0)],
        "negative partitions": [topic(num_partitions=-2)],
        "no copies": [topic(replication_factor=0)],
        "too many copies": [topic(replication_factor=3)],
        "unknown setting": [topic(configs={"no.such.setting": "1"})],
        "wrong setting": [topic(configs={"retention.ms": "soon"})],
        "wrong policy": [topic(configs={"cleanup.policy": "shrink"})],
        "setting out of range": [topic(configs={"min.insync.replicas": "0"})],
        "null setting": [topic(configs={"retention.ms": None})],
        "two of one name": [topic(), topic()],
        "assignment": [topic(**by_hand, assignments=assigned(0, 1))],
        "assignment and partitions": [topic(num_partitions=2, assignments=assigned(0, 1))],
        "assignment with a gap": [topic(**by_hand, assignments=assigned(0, 2))],
        "assignment to no broker": [topic(**by_hand, assignments=assigned(0, brokers=[99]))],
        "none": [],
        "one good, one bad": [topic(), topic(name="a b")],
    }
    for bad in ("a b", "", ".", "..", "x" * 250, "ä", "__consumer_offsets", "a/b"):
        cases[f"name {bad[:20]!r}"] = [topic(name=bad)]
    if any("extra-" in each for each in world.topics):
        cases["name that collides"] = [topic(name=world.name("plain").replace("-", "."))]
    return [
        [Step(case, "CreateTopics", {"topics": topics, "timeout_ms": 5000, **options})]
        for case, topics in cases.items()
        for options in ({}, {"validate_only": True})
    ]


def create_partitions(world: World) -> list[Scenario]:
    """CreatePartitions."""
    name = world.victim()
    now = world.topics.get(name, 1)

    def step(case: str, *topics: dict[str, Any]) -> list[Scenario]:
        fields = {"topics": list(topics), "timeout_ms": 5000}
        return [
            [Step(case, "CreatePartitions", {**fields, "validate_only": only})]
            for only in (True, False)
        ]

    def topic(count: int, name: str = name, **fields: Any) -> dict[str, Any]:
        return {"name": name, "count": count, "assignments": None, **fields}

    own = {"broker_ids": [lambda side: side.node]}
    return [
        *step("perhaps more", topic(min(now + 1, 4))),
        *step("as many", topic(now)),
        *step("fewer", topic(now - 1)),
        *step("negative", topic(-1)),
        *step("unknown topic", topic(3, world.name("missing"))),
        *step("wrong name", topic(3, "a b")),
        *step("twice", topic(9), topic(9)),
        *step("too few assignments", topic(now + 2, assignments=[own])),
        *step("assignment to no broker", topic(now + 1, assignments=[{"broker_ids": [99]}])),
    ]


def delete_topics(world: World) -> list[Scenario]:
    """DeleteTopics."""
    victim = world.victim()

    def named(case: str, *names: str) -> Scenario:
        topics = [{"name": name, "topic_id": NO_ID} for name in names]
        fields = {"topics": topics, "topic_names": list(names), "timeout_ms": 5000}
        return [Step(case, "DeleteTopics", fields)]

    def by_id(case: str, *topics: dict[str, Any]) -> Scenario:
        return [Step(case, "DeleteTopics", {"topics": list(topics), "timeout_ms": 5000}, since=6)]

    return [
        named("a topic that may be there", victim),
        named("unknown", world.name("missing")),
        named("wrong name", "a b"),
        named("two of one name", world.name("missing"), world.name("missing")),
        named("none"),
        by_id("by id", {"name": None, "topic_id": id_of(world.victim())}),
        by_id("by an unknown id", {"name": None, "topic_id": OTHER_ID}),
        by_id("by name and id", {"name": victim, "topic_id": id_of(victim)}),
        by_id("by neither", {"name": None, "topic_id": NO_ID}),
    ]


def metadata(world: World) -> list[Scenario]:
    """Metadata, DescribeTopicPartitions, DescribeCluster."""
    topic, dice = world.topic(), world.dice

    def step(case: str, topics: Any, since: int = 0, **fields: Any) -> Scenario:
        options = {"allow_auto_topic_creation": False, **fields}
        return [Step(case, "Metadata", {"topics": topics, **options}, since=since)]

    def names(*names: str) -> list[dict[str, Any]]:
        return [{"topic_id": NO_ID, "name": name} for name in names]

    def partitions(case: str, *names: str, limit: int = 100, cursor: Any = None) -> Scenario:
        topics = [{"name": name} for name in names]
        fields = {"topics": topics, "response_partition_limit": limit, "cursor": cursor}
        return [Step(case, "DescribeTopicPartitions", fields)]

    at = {"topic_name": topic, "partition_index": dice.randrange(3)}
    missing = world.name("missing")
    return [
        step("all", None, since=1),
        step("none", [], since=1),
        step("some", names(*dice.sample(sorted(world.topics), 2))),
        step("unknown", names(topic, missing), since=4),
        step("wrong name", names("a b"), since=4),
        step("empty name", names(""), since=4),
        step("by id", [{"name": None, "topic_id": id_of(topic)}], since=12),
        step("by an unknown id", [{"name": None, "topic_id": OTHER_ID}], since=12),
        step("by id and name", [{"name": topic, "topic_id": id_of(topic)}], since=12),
        step("by neither", [{"name": None, "topic_id": NO_ID}], since=12),
        step(
            "operations",
            names(topic),
            since=8,
            include_cluster_authorized_operations=True,
            include_topic_authorized_operations=True,
        ),
        partitions("some", *dice.sample(sorted(world.topics), 2), missing),
        partitions("wrong name", "a b"),
        partitions("a page", *sorted(world.topics), limit=dice.randrange(1, 4)),
        partitions("from a cursor", *sorted(world.topics), limit=2, cursor=at),
        partitions("no room", topic, limit=0),
        partitions("beyond", topic, cursor={**at, "partition_index": 50}),
        partitions("negative cursor", topic, cursor={**at, "partition_index": -1}),
        [Step("plain", "DescribeCluster", {"endpoint_type": 1})],
        [Step("controllers", "DescribeCluster", {"endpoint_type": 2}, since=1)],
        [Step("no such endpoint", "DescribeCluster", {"endpoint_type": 9}, since=1)],
        [
            Step(
                "operations",
                "DescribeCluster",
                {"endpoint_type": 1, "include_cluster_authorized_operations": True},
            )
        ],
        [Step("mechanism", "SaslHandshake", {"mechanism": "PLAIN"}, since=1, connection=9)],
    ]


# Records


def batch(dice: random.Random, number: int | None = None, records: Any = None) -> bytes:
    """Return the batch of a producer."""
    records = records or random_records(number or dice.choice((1, 3, 30)), dice)
    return b"".join(next(write_batches([stored(records, 0)])))


def patched(data: bytes, *, seal: bool = True, **fields: int) -> bytes:
    """Return a batch with other fields in its head."""
    places = {
        "magic": (16, ">b"),
        "crc": (17, ">I"),
        "attributes": (21, ">h"),
        "delta": (23, ">i"),
        "length": (8, ">i"),
        "first_time": (27, ">q"),
        "max_time": (35, ">q"),
        "producer": (43, ">q"),
        "epoch": (51, ">h"),
        "sequence": (53, ">i"),
        "count": (57, ">i"),
        "base": (0, ">q"),
        "leader_epoch": (12, ">i"),
    }
    out = bytearray(data)
    for name, value in fields.items():
        at, code = places[name]
        struct.pack_into(code, out, at, value)
    if seal:
        struct.pack_into(">I", out, 17, crc32c(bytes(out[21:])))
    return bytes(out)


def produce_step(
    case: str, topic: str, data: Any, number: int = 0, *, by_id: bool = True, **options: Any
) -> Step:
    """Return a request that produces to one partition."""
    fields = {"acks": -1, "timeout_ms": 5000, "transactional_id": None}
    fields |= {key: options.pop(key) for key in list(options) if key in fields}
    ids = id_of(topic) if by_id else OTHER_ID
    parts = [{"index": number, "records": data}]
    topics = [{"name": topic, "topic_id": ids, "partition_data": parts}]
    return Step(case, "Produce", {**fields, "topic_data": topics}, **options)


def produce(world: World) -> list[Scenario]:
    """Produce."""
    dice, plain = world.dice, world.name("plain")
    topic = plain
    good = batch(dice)
    cases: dict[str, Any] = {
        "good": good,
        "wrong CRC": patched(good, seal=False, crc=1),
        "magic 1": patched(good, magic=1),
        "magic 0": patched(good, magic=0),
        "magic 3": patched(good, magic=3),
        "empty": b"",
        "cut": good[: len(good) - 3],
        "half a head": good[:30],
        "a byte more": good + b"\0",
        "two batches": good + batch(dice),
        "control batch": patched(good, attributes=32),
        "sent with append time": patched(good, attributes=8),
        "codec 5": patched(good, attributes=5),
        "codec 7": patched(good, attributes=7),
        "codec but not compressed": patched(good, attributes=1),
        "one record too few": patched(batch(dice, 3), count=2, delta=1),
        "one record too many": patched(batch(dice, 3), count=4, delta=3),
        "count and delta differ": patched(batch(dice, 3), delta=5),
        "no records": patched(batch(dice, 1)[: HEAD.size], count=0, delta=-1, length=49),
        "negative count": patched(batch(dice, 1), count=-1),
        "damaged records": patched(good[:-4] + b"\xff\xff\xff\xff"),
        "base offset 7": patched(good, base=7),
        "leader epoch 9": patched(good, leader_epoch=9),
        "wrong maximal time": patched(batch(dice, 3), max_time=5),
        "negative time": patched(batch(dice, 1), first_time=-5, max_time=-5),
        "in the future": patched(batch(dice, 1), first_time=1 << 50, max_time=1 << 50),
        "producer without a sequence": patched(good, producer=999_999, epoch=0),
        "producer with a negative epoch": patched(good, producer=999_999, epoch=-1, sequence=0),
    }
    scenarios = [[produce_step(case, topic, data)] for case, data in cases.items()]
    scenarios += [
        [produce_step(f"codec {name}", plain, compressed(batch(dice), *codec))]
        for name, codec in CODECS.items()
        if name != "lz4"  # Arrow's has blocks that need each other, which Kafka cannot read.
    ]
    keyed = [(b"k", b"v", 1_700_000_000_000, [])]
    scenarios += [
        [produce_step("acks 1", plain, good, acks=1)],
        [produce_step("acks 2", plain, good, acks=2)],
        [produce_step("acks -2", plain, good, acks=-2)],
        [produce_step("acks 0", plain, good, acks=0, has_answer=False, connection=5)],
        [
            produce_step(
                "acks 0, wrong CRC",
                plain,
                patched(good, seal=False, crc=1),
                acks=0,
                has_answer=False,
                connection=5,
            )
        ],
        [
            produce_step(
                "acks 0, unknown topic",
                world.name("missing"),
                good,
                acks=0,
                has_answer=False,
                connection=5,
            )
        ],
        [produce_step("unknown topic", world.name("missing"), good)],
        [produce_step("wrong name", "a b", good)],
        [produce_step("internal topic", "__consumer_offsets", good, until=12)],
        [produce_step("unknown id", plain, good, by_id=False, since=13)],
        [produce_step("unknown partition", plain, good, 7)],
        [produce_step("negative partition", plain, good, -1)],
        [produce_step("compacted", world.name("compacted"), batch(dice, records=keyed))],
        [
            produce_step(
                "compacted without key",
                world.name("compacted"),
                batch(dice, records=[*keyed, (None, b"v", 1_700_000_000_000, [])]),
            )
        ],
        [produce_step("append time", world.name("append-time"), batch(dice))],
        [produce_step("fits", world.name("small"), batch(dice, records=keyed))],
        [
            produce_step(
                "too large",
                world.name("small"),
                batch(dice, records=[(b"k", b"v" * 700, 1_700_000_000_000, [])]),
            )
        ],
        [Step("no topics", "Produce", {"acks": -1, "timeout_ms": 5000, "topic_data": []})],
        [_several_partitions(world, good)],
        idempotent(world),
    ]
    return scenarios


def _several_partitions(world: World, good: bytes) -> Step:
    parts = [{"index": number, "records": good} for number in (0, 1, 5)]
    topic = world.name("plain")
    topics = [{"name": topic, "topic_id": id_of(topic), "partition_data": parts}]
    fields = {"acks": -1, "timeout_ms": 5000, "transactional_id": None, "topic_data": topics}
    return Step("several partitions", "Produce", fields)


def idempotent(world: World) -> Scenario:
    """Sequences and epochs of one producer."""
    dice, topic = world.dice, world.name("plain")
    three = batch(dice, 3)

    def learn(side: Side, answer: Any) -> None:
        side.known["producer"] = answer.producer_id

    def send(case: str, epoch: int, sequence: int, data: bytes = three, number: int = 1) -> Step:
        def sealed(side: Side) -> bytes:
            producer = side.known["producer"]
            return patched(data, producer=producer, epoch=epoch, sequence=sequence)

        return produce_step(f"sequence {case}", topic, sealed, number)

    begin = {"transactional_id": None, "producer_id": -1, "producer_epoch": -1}
    steps = [
        Step("plain", "InitProducerId", {**begin, "transaction_timeout_ms": 1000}, learn=learn),
        send("first", 0, 0),
        send("next", 0, 3),
        send("duplicate", 0, 3),
        send("earlier duplicate", 0, 0),
        send("gap", 0, 9),
        send("overlap", 0, 4),
        send("last", 0, 6),
        *(send("more", 0, 9 + 3 * number) for number in range(6)),
        send("old duplicate", 0, 0),
        send("next epoch with a gap", 1, 5),
        send("next epoch", 1, 0),
        send("old epoch", 0, 27),
        send("epochs later", 5, 0),
        send("unknown to a partition", 5, 40, number=0),
        send("other partition goes on", 5, 43, number=0),
    ]
    wrong = {
        "with an id": {"producer_id": 5, "producer_epoch": 0},
        "with half an id": {"producer_id": 5, "producer_epoch": -1},
        "no timeout": {"transaction_timeout_ms": 0},
        "negative timeout": {"transaction_timeout_ms": -1},
    }
    timeout = {"transaction_timeout_ms": 1000}
    return steps + [
        Step(case, "InitProducerId", {**begin, **timeout, **fields})
        for case, fields in wrong.items()
    ]


def fetch_step(case: str, *topics: tuple[str, int, int], **options: Any) -> Step:
    """Return a request that fetches from partitions at offsets."""
    fields = {"max_wait_ms": 0, "min_bytes": 1, "max_bytes": 1 << 20, "isolation_level": 0}
    fields |= {"session_id": 0, "session_epoch": -1, "replica_id": -1, "rack_id": ""}
    each = {"current_leader_epoch": -1, "partition_max_bytes": 1 << 20, "log_start_offset": -1}
    each |= {"last_fetched_epoch": -1}
    fields |= {key: options.pop(key) for key in list(options) if key in fields}
    each |= {key: options.pop(key) for key in list(options) if key in each}
    number = options.pop("topic_id", None)
    forgotten = [
        {"topic": name, "topic_id": id_of(name), "partitions": [part]}
        for name, part in options.pop("forget", ())
    ]
    asked = [
        {
            "topic": name,
            "topic_id": number or id_of(name),
            "partitions": [{**each, "partition": part, "fetch_offset": offset}],
        }
        for name, part, offset in topics
    ]
    fields |= {"topics": asked, "forgotten_topics_data": forgotten}
    return Step(case, "Fetch", fields, **options)


def fetch(world: World) -> list[Scenario]:
    """Fetch."""
    plain, missing = world.name("plain"), world.name("missing")
    end = world.ends.get((plain, 0), 0)
    at = world.dice.randrange(end + 1)
    return [
        [fetch_step("in range", (plain, 0, at))],
        [fetch_step("read committed", (plain, 0, at), isolation_level=1)],
        [fetch_step("at the end", (plain, 0, end))],
        [fetch_step("beyond", (plain, 0, end + 5))],
        [fetch_step("negative", (plain, 0, -1))],
        [fetch_step("few bytes", (plain, 0, at), max_bytes=1)],
        [fetch_step("few bytes of a partition", (plain, 0, at), partition_max_bytes=1)],
        [fetch_step("no bytes", (plain, 0, at), max_bytes=0)],
        [fetch_step("two partitions, few bytes", (plain, 0, 0), (plain, 1, 0), max_bytes=1)],
        [fetch_step("compacted", (world.name("compacted"), 0, 0))],
        [fetch_step("append time", (world.name("append-time"), 0, 0))],
        [fetch_step("unknown topic", (missing, 0, 0))],
        [fetch_step("wrong name", ("a b", 0, 0), until=12)],
        [fetch_step("unknown partition", (plain, 9, 0))],
        [fetch_step("negative partition", (plain, -1, 0))],
        [fetch_step("unknown id", (plain, 0, 0), since=13, topic_id=OTHER_ID)],
        [fetch_step("no id", (plain, 0, 0), since=13, topic_id=NO_ID)],
        [fetch_step("leader epoch", (plain, 0, at), current_leader_epoch=0, since=9)],
        [fetch_step("later leader epoch", (plain, 0, at), current_leader_epoch=7, since=9)],
        [fetch_step("fetched epoch", (plain, 0, end), last_fetched_epoch=0, since=12)],
        [fetch_step("later fetched epoch", (plain, 0, end), last_fetched_epoch=7, since=12)],
        [fetch_step("nothing")],
        fetch_session(world),
    ]


def fetch_session(world: World) -> Scenario:
    """A session, with its errors."""
    plain = world.name("plain")
    end = world.ends.get((plain, 0), 0)

    def learn(side: Side, answer: Any) -> None:
        if answer.session_id:
            side.known["session"] = answer.session_id

    def step(case: str, epoch: int, *topics: Any, **options: Any) -> Step:
        options = {"session_id": lambda side: side.known.get("session", 0), **options}
        of_session = {"since": 7, "connection": 7, "repeats": False, "session_epoch": epoch}
        return fetch_step(f"session {case}", *topics, **options, **of_session, learn=learn)

    return [
        step("begins", 0, (plain, 0, end), (plain, 1, 0), session_id=0),
        step("goes on", 1),
        produce_step("good", plain, batch(world.dice, 1)),
        step("has news", 2),
        step("gets another offset", 3, (plain, 0, end + 1)),
        step("forgets", 4, forget=[(plain, 1)]),
        step("gets a partition that is none", 5, (plain, 9, 0)),
        step("still has it", 6),
        step("repeats an epoch", 6),
        step("leaves out an epoch", 9),
        step("unknown", 1, session_id=123_456_789),
        step("none", 1, session_id=0),
        step("ends", -1, (plain, 0, end)),
        step("is over", 7),
    ]


def offsets(world: World) -> list[Scenario]:
    """ListOffsets, OffsetForLeaderEpoch, DeleteRecords."""
    dice, plain = world.dice, world.name("plain")
    topic, missing = world.topic(), world.name("missing")
    end = world.ends.get((plain, 0), 0)

    def listed(case: str, time: int, topic: str = topic, number: int = 0, **options: Any) -> Any:
        isolation, epoch = options.pop("isolation", 0), options.pop("epoch", -1)
        part = {"partition_index": number, "current_leader_epoch": epoch, "timestamp": time}
        fields = {"replica_id": -1, "isolation_level": isolation, "timeout_ms": 1000}
        fields["topics"] = [{"name": topic, "partitions": [part]}]
        return [Step(case, "ListOffsets", fields, **options)]

    def ended(case: str, epoch: int, current: int = -1, topic: str = plain, n: int = 0) -> Any:
        part = {"partition": n, "current_leader_epoch": current, "leader_epoch": epoch}
        topics = [{"topic": topic, "partitions": [part]}]
        return [Step(case, "OffsetForLeaderEpoch", {"replica_id": -1, "topics": topics})]

    def deleted(case: str, offset: int, topic: str = plain, number: int = 0) -> Scenario:
        parts = [{"partition_index": number, "offset": offset}]
        topics = [{"name": topic, "partitions": parts}]
        return [Step(case, "DeleteRecords", {"topics": topics, "timeout_ms": 5000})]

    return [
        listed("latest", -1),
        listed("latest of committed", -1, isolation=1, since=2),
        listed("earliest", -2),
        listed("maximal time", -3, plain, since=7),
        listed("earliest local", -4, since=8),
        listed("latest tiered", -5, since=9),
        listed("earliest to upload", -6, since=11),
        listed("special -7", -7),
        listed("time", 1_700_000_000_000 + dice.randrange(-6_000, 6_000), plain),
        listed("time 0", 0, plain),
        listed("far time", 1 << 60, plain),
        listed("unknown topic", -1, missing),
        listed("wrong name", -1, "a b"),
        listed("unknown partition", -1, plain, 9),
        listed("negative partition", -1, plain, -1),
        listed("leader epoch", -1, plain, epoch=0, since=4),
        listed("later leader epoch", -1, plain, epoch=7, since=4),
        ended("first", 0),
        ended("later", 7),
        ended("negative", -1),
        ended("with the leader epoch", 0, 0),
        ended("with a later leader epoch", 0, 7),
        ended("unknown topic", 0, topic=missing),
        ended("unknown partition", 0, n=9),
        deleted("before an offset", dice.randrange(end + 1)),
        deleted("beyond", end + 100),
        deleted("negative", -2),
        deleted("all", -1, world.name("small")),
        deleted("of a compacted topic", 0, world.name("compacted")),
        deleted("unknown topic", 0, missing),
        deleted("unknown partition", 0, plain, 9),
    ]


# Settings


def configs(world: World) -> list[Scenario]:
    """DescribeConfigs, AlterConfigs, IncrementalAlterConfigs."""
    victim, missing, dice = world.victim(), world.name("missing"), world.dice
    topic = world.topic()

    def described(case: str, kind: int, name: Any, keys: Any = None, **fields: Any) -> Scenario:
        resource = {"resource_type": kind, "resource_name": name, "configuration_keys": keys}
        return [Step(case, "DescribeConfigs", {"resources": [resource], **fields})]

    def altered(case: str, api: str, kind: int, name: Any, *settings: Any) -> list[Scenario]:
        entries = [
            {"name": key, "value": value, "config_operation": (*more, 0)[0]}
            for key, value, *more in settings
        ]
        resource = {"resource_type": kind, "resource_name": name, "configs": entries}
        return [
            [Step(case, api, {"resources": [resource], "validate_only": only})]
            for only in (True, False)
        ]

    both = [
        scenario
        for api in ("AlterConfigs", "IncrementalAlterConfigs")
        for scenario in (
            *altered(
                "may be there", api, 2, victim, ("retention.ms", f"{dice.randrange(9)}000000")
            ),
            *altered("unknown topic", api, 2, missing, ("retention.ms", "1000000")),
            *altered("wrong topic", api, 2, "a b", ("retention.ms", "1000000")),
            *altered("empty topic", api, 2, "", ("retention.ms", "1000000")),
            *altered("unknown setting", api, 2, topic, ("no.such.setting", "1")),
            *altered("wrong value", api, 2, topic, ("retention.ms", "soon")),
            *altered("value out of range", api, 2, topic, ("min.insync.replicas", "0")),
            *altered("null value", api, 2, topic, ("retention.ms", None)),
            *altered("unknown type", api, 99, topic, ("retention.ms", "1")),
            *altered("no such broker", api, 4, "77", ("log.retention.ms", "1")),
            *altered("broker of no number", api, 4, "x", ("log.retention.ms", "1")),
        )
    ]
    incremental = "IncrementalAlterConfigs"
    policy = "cleanup.policy"
    return [
        described("topic", 2, topic),
        described("topic with synonyms", 2, topic, include_synonyms=True),
        described("some settings", 2, topic, ["retention.ms", policy, "no.such.setting"]),
        described("no settings", 2, topic, []),
        described("unknown topic", 2, missing),
        described("wrong topic", 2, "a b"),
        described("empty topic", 2, ""),
        described("broker", 4, number_of, ["broker.id", "num.partitions"]),
        described("no such broker", 4, "77"),
        described("broker of no number", 4, "x"),
        described("all brokers", 4, "", ["num.partitions"]),
        described("unknown type", 99, topic),
        *both,
        *altered("delete", incremental, 2, victim, ("retention.ms", None, 1)),
        *altered("delete unknown", incremental, 2, topic, ("no.such.setting", None, 1)),
        *altered("append", incremental, 2, victim, (policy, "compact", 2)),
        *altered("subtract", incremental, 2, victim, (policy, "compact", 3)),
        *altered("append wrong", incremental, 2, victim, (policy, "shrink", 2)),
        *altered("append to a number", incremental, 2, victim, ("retention.ms", "1", 2)),
        *altered("append null", incremental, 2, victim, (policy, None, 2)),
        *altered(
            *("twice", incremental, 2, topic),
            *(("retention.ms", "1"), ("retention.ms", "2")),
        ),
        *altered("none", incremental, 2, victim),
    ]


# Groups


def group_offsets(world: World) -> list[Scenario]:
    """FindCoordinator, OffsetCommit, OffsetFetch, OffsetDelete, and groups without members."""
    group, plain, missing = world.name("group"), world.name("plain"), world.name("missing")
    nobody = world.name("nobody")

    def commit(case: str, offset: int, topic: str = plain, number: int = 0, **fields: Any) -> Any:
        text, epoch = fields.pop("text", "m"), fields.pop("epoch", -1)
        part = {"partition_index": number, "committed_offset": offset, "committed_metadata": text}
        part["committed_leader_epoch"] = epoch
        topics = [{"name": topic, "topic_id": id_of(topic), "partitions": [part]}]
        defaults = {"group_id": group, "generation_id_or_member_epoch": -1, "member_id": ""}
        body = {**defaults, "retention_time_ms": -1, "topics": topics, **fields}
        return Step(case, "OffsetCommit", body)

    def fetched(case: str, group: str, *parts: tuple[str, int], **options: Any) -> Step:
        topics = [
            {
                "name": topic,
                "topic_id": id_of(topic),
                "partition_indexes": [number for name, number in parts if name == topic],
            }
            for topic in dict.fromkeys(name for name, _ in parts)
        ] or None
        of_group = {"group_id": group, "topics": topics, "member_id": None, "member_epoch": -1}
        fields = {"groups": [of_group], "group_id": group, "topics": topics}
        return Step(case, "OffsetFetch", fields, since=1 if parts else 2, **options)

    def delete(case: str, group: str, topic: str = plain, number: int = 0) -> Step:
        parts = [{"partition_index": number}]
        topics = [{"name": topic, "partitions": parts}]
        return Step(case, "OffsetDelete", {"group_id": group, "topics": topics})

    def find(case: str, key: str, kind: int = 0) -> Scenario:
        fields = {"key": key, "key_type": kind, "coordinator_keys": [key]}
        return [Step(case, "FindCoordinator", fields, since=1 if kind else 0)]

    def groups(case: str, api: str, *names: str) -> Step:
        return Step(case, api, {"groups": list(names), "groups_names": list(names)})

    def listed(case: str, since: int = 0, **filters: Any) -> Step:
        fields = {"states_filter": [], "types_filter": [], **filters}
        return Step(case, "ListGroups", fields, since=since)

    life = [
        commit("plain", 3),
        commit("other partition", 5, number=1, text=None, epoch=0),
        fetched("some", group, (plain, 0), (plain, 1), (plain, 7), (missing, 0)),
        fetched("all", group),
        listed("plain"),
        listed("empty", states_filter=["Empty"], since=4),
        listed("stable", states_filter=["Stable"], since=4),
        listed("wrong state", states_filter=["Sleepy"], since=4),
        listed("classic", types_filter=["classic"], since=5),
        listed("consumer", types_filter=["consumer"], since=5),
        listed("wrong type", types_filter=["sleepy"], since=5),
        listed("in capitals", states_filter=["EMPTY"], types_filter=["CLASSIC"], since=5),
        groups("empty", "DescribeGroups", group),
        Step(
            "operations",
            "DescribeGroups",
            {"groups": [group], "include_authorized_operations": True},
            since=3,
        ),
        delete("one", group),
        delete("once more", group),
        fetched("after a deletion", group, (plain, 0), (plain, 1)),
        groups("empty", "DeleteGroups", group),
        fetched("after the group", group, (plain, 0)),
        groups("unknown", "DeleteGroups", group),
        groups("none", "DeleteGroups"),
        groups("without a name", "DeleteGroups", ""),
    ]
    return [
        find("group", group),
        find("without a name", ""),
        find("wrong kind", group, 9),
        [commit("unknown topic", 3, missing)],
        [commit("wrong name", 3, "a b")],
        [commit("unknown partition", 3, number=9)],
        [commit("negative partition", 3, number=-1)],
        [commit("negative offset", -1)],
        [commit("more negative offset", -5)],
        [commit("large metadata", 3, text="x" * 5000)],
        [commit("with a leader epoch", 3, epoch=0)],
        [commit("unknown member", 3, member_id="somebody")],
        [commit("generation without member", 3, generation_id_or_member_epoch=4)],
        [commit("no group", 3, group_id="")],
        [fetched("unknown group", nobody, (plain, 0))],
        [fetched("unknown group, all", nobody)],
        [fetched("no group", "", (plain, 0))],
        [delete("unknown group", nobody)],
        [delete("no group", "")],
        [commit("plain", 3), delete("unknown topic", group, missing)],
        [commit("plain", 3), delete("unknown partition", group, plain, 9)],
        [groups("unknown", "DescribeGroups", nobody)],
        [groups("without a name", "DescribeGroups", "")],
        life,
    ]


def member(world: World) -> list[Scenario]:
    """JoinGroup, SyncGroup, Heartbeat and LeaveGroup of one member, with errors."""
    group, plain = world.new("members"), world.name("plain")

    def learn(side: Side, answer: Any) -> None:
        if answer.member_id:
            side.known["member"] = answer.member_id
        if answer.generation_id > 0:
            side.known["generation"] = answer.generation_id

    def me(side: Side) -> str:
        return str(side.known.get("member", "nobody"))

    def join(case: str, member: Any = "", **fields: Any) -> Step:
        protocols = [{"name": "range", "metadata": b"\0\0\0\0\0\0\0\0\0\0"}]
        body = {"group_id": group, "session_timeout_ms": 10_000, "rebalance_timeout_ms": 10_000}
        body |= {"member_id": member, "group_instance_id": None, "protocol_type": "consumer"}
        return Step(case, "JoinGroup", {**body, "protocols": protocols, **fields}, learn=learn)

    def now(side: Side) -> int:
        return int(side.known.get("generation", 1))

    def rest(case: str, api: str, generation: Any = now, member: Any = me, **fields: Any) -> Step:
        body = {"group_id": group, "generation_id": generation, "member_id": member}
        body |= {"group_instance_id": None, "protocol_type": "consumer", "protocol_name": "range"}
        return Step(case, api, {**body, **fields})

    def leave(case: str, member: Any = me) -> Step:
        members = [{"member_id": member, "group_instance_id": None, "reason": None}]
        return Step(
            case, "LeaveGroup", {"group_id": group, "member_id": member, "members": members}
        )

    def commit(case: str, generation: Any, member: Any = me) -> Step:
        part = {"partition_index": 0, "committed_offset": 1, "committed_metadata": ""}
        topics = [{"name": plain, "topic_id": id_of(plain), "partitions": [part]}]
        body = {"generation_id_or_member_epoch": generation, "member_id": member}
        body |= {"group_id": group, "retention_time_ms": -1, "topics": topics}
        return Step(case, "OffsetCommit", body)

    assigned = [{"member_id": me, "assignment": b"mine"}]
    of_group = {"groups": [group], "groups_names": [group]}
    life = [
        join("new"),
        join("with its id", me),
        rest("wrong generation", "SyncGroup", 99),
        rest("unknown member", "SyncGroup", now, "nobody"),
        rest("wrong protocol", "SyncGroup", now, protocol_name="roundrobin"),
        rest("wrong type", "SyncGroup", now, protocol_type="connect"),
        commit("before the sync", now),
        rest("leader", "SyncGroup", now, assignments=assigned),
        rest("again", "SyncGroup", now),
        rest("plain", "Heartbeat", now),
        rest("wrong generation", "Heartbeat", 0),
        rest("unknown member", "Heartbeat", now, "nobody"),
        Step("stable", "DescribeGroups", of_group),
        Step("with a member", "DeleteGroups", of_group),
        Step("with a member", "ListGroups", {"states_filter": [], "types_filter": []}),
        commit("of a member", now),
        commit("wrong generation", 7),
        commit("of nobody", -1, ""),
        commit("of another member", now, "nobody"),
        join("other protocol", protocols=[{"name": "other", "metadata": b""}]),
        join("other type", protocol_type="connect"),
        leave("unknown member", "nobody"),
        leave("plain"),
        leave("again"),
        rest("after it left", "Heartbeat", now),
        Step("after all left", "DescribeGroups", of_group),
        join("unknown id", "nobody"),
    ]
    other = world.new(REFUSED)
    nobody = {"group_id": other}
    return [
        life,
        [join("no group", group_id="")],
        [join("unknown id of an unknown group", "nobody", **nobody)],
        # Before version 4 it would make a member of whom the server takes.
        [replace(join("short session", session_timeout_ms=1, **nobody), since=4)],
        [join("long session", session_timeout_ms=1 << 30, **nobody)],
        [join("no protocols", protocols=[], **nobody)],
        [join("no type", protocol_type="", **nobody)],
        [rest("unknown group", "Heartbeat", now, "nobody", **nobody)],
        [rest("unknown group", "SyncGroup", now, "nobody", **nobody)],
        [rest("no group", "Heartbeat", now, "nobody", group_id="")],
        [rest("no group", "SyncGroup", now, "nobody", group_id="")],
    ]


def shares(world: World) -> list[Scenario]:
    """Share groups: requests of nobody, and wrong ones; scripts of members compare the others."""
    group, other, plain = world.new("shares"), world.new("shares"), world.name("plain")
    nobody = world.name("no-shares")

    def beat(case: str, epoch: int, **fields: Any) -> Step:
        body = {"group_id": group, "member_id": "a", "member_epoch": epoch, "rack_id": None}
        return Step(case, "ShareGroupHeartbeat", {**body, "subscribed_topic_names": None, **fields})

    def ask(
        case: str, api: str, epoch: int, *said: tuple[int, int, list[int]], **fields: Any
    ) -> Step:
        batches = [
            {"first_offset": first, "last_offset": last, "acknowledge_types": types}
            for first, last, types in said
        ]
        parts = [{"partition_index": 0, "acknowledgement_batches": batches}]
        body = {"group_id": group, "member_id": "a" * 22, "share_session_epoch": epoch}
        body |= {"topics": [{"topic_id": id_of(plain), "partitions": parts}], "max_wait_ms": 0}
        body |= {"min_bytes": 0, "max_bytes": 1000, "max_records": 0, "batch_size": 1, **fields}
        return Step(case, api, body, repeats=False)

    topics = [{"topic_name": plain, "partitions": [0]}]
    part = {"partition_index": 0, "start_offset": 0}
    described = {"groups": [{"group_id": nobody, "topics": topics}]}
    altered = {"group_id": nobody, "topics": [{"topic_name": plain, "partitions": [part]}]}
    deleted = {"group_id": nobody, "topics": [{"topic_name": plain}]}
    wrong = {
        "backwards": (1, 0, [1]),
        "nothing said": (0, 0, []),
        "too much said": (0, 1, [1, 1, 1]),
        "unknown type": (0, 0, [9]),
        "negative type": (0, 0, [-1]),
        "not held": (0, 0, [1]),
    }
    refused = [
        beat("first without topics", 0),
        beat("no member", 0, member_id="", subscribed_topic_names=[plain]),
        beat("no group", 0, group_id="", subscribed_topic_names=[plain]),
        beat("no rack", 0, rack_id="", subscribed_topic_names=[plain]),
        beat("wrong epoch", -2, subscribed_topic_names=[plain]),
        ask("without a session", "ShareFetch", 1),
        ask("last without a session", "ShareFetch", -1),
        ask("first with acknowledgements", "ShareFetch", 0, (0, 0, [1])),
        ask("no group", "ShareFetch", 0, group_id=None),
        ask("no member", "ShareFetch", 0, member_id=None),
        ask("without a session", "ShareAcknowledge", 1, (0, 0, [1])),
        ask("last without a session", "ShareAcknowledge", -1),
        ask("first", "ShareAcknowledge", 0, (0, 0, [1])),
        ask("no group", "ShareAcknowledge", 1, group_id=None),
        ask("no member", "ShareAcknowledge", 1, member_id=None),
        Step("unknown group", "ShareGroupDescribe", {"group_ids": [nobody]}),
        Step("unknown group", "DescribeShareGroupOffsets", described),
    ]
    created = [
        Step("unknown group", "AlterShareGroupOffsets", altered),
        Step("of a share group", "OffsetDelete", {"group_id": nobody, "topics": []}),
        Step("of a share group", "DescribeGroups", {"groups": [nobody]}),
        Step("without members", "DeleteShareGroupOffsets", deleted),
    ]
    session = {"member_id": "b" * 22, "group_id": other}
    life = [
        beat("joins", 0, subscribed_topic_names=[plain], **session),
        ask("first", "ShareFetch", 0, **session),
        ask("wrong epoch", "ShareFetch", 5, **session),
        ask("wrong epoch", "ShareAcknowledge", 5, **session),
        *(
            ask(case, "ShareAcknowledge", epoch, said, **session)
            for epoch, (case, said) in enumerate(wrong.items(), 1)
        ),
        ask("last", "ShareAcknowledge", -1, **session),
        ask("after the last", "ShareAcknowledge", 1, **session),
        beat("unknown member", 3, **{**session, "member_id": "c" * 22}),
        beat("later epoch", 1000, **session),
        Step("with a member", "DeleteShareGroupOffsets", {**deleted, "group_id": other}),
        beat("leaves", -1, **session),
        beat("left", -1, **session),
    ]
    return [*([each] for each in refused), created, life]


AREAS: list[Callable[[World], list[Scenario]]] = [
    *(create_topics, create_partitions, delete_topics, metadata, produce, fetch, offsets),
    *(configs, group_offsets, member, shares),
]
"""What scripts are made of."""


class Script:
    """Runs scenarios on a pair, and collects the differences.

    Args:
        pair: The broker and the server.
        dice: Chooses.
        is_known: Whether a difference is expected.
    """

    def __init__(
        self, pair: Pair, dice: random.Random, is_known: Callable[[Found], bool] = lambda _: False
    ) -> None:
        self.pair, self.dice, self._is_known = pair, dice, is_known
        self.world, self.found = World(pair.prefix, dice), list[Found]()
        self.versions = {name: pair.versions(key) for key, name in api_names().items()}
        # Both name the versions before, and close the connection of a client that uses one.
        self.versions["Produce"] = max(3, self.versions["Produce"][0]), self.versions["Produce"][1]
        self._settle()
        for side in (pair.kafka, pair.embedlog):
            side.wait_for_coordinators()

    def every(self) -> None:
        """Run each scenario in the first, the last and another version of its first API."""
        for area in AREAS:
            for number in range(len(area(self.world))):
                step = area(self.world)[number][0]
                first, last = self.versions[step.api]
                first, last = max(first, step.since), min(last, step.until)
                if first <= last:
                    for version in sorted({first, self.dice.randint(first, last), last}):
                        self.run(area(self.world)[number], version)

    def some(self, number: int) -> None:
        """Run scenarios at random."""
        for _ in range(number):
            self.run(self.dice.choice(self.dice.choice(AREAS)(self.world)), None)

    def run(self, scenario: Scenario, version: int | None) -> None:
        """Run the steps of a scenario, in this version as far as their APIs have it."""
        for step in scenario:
            first, last = self.versions[step.api]
            first, last = max(first, step.since), min(last, step.until)
            if first > last:
                continue
            chosen = self.dice.randint(first, last) if version is None else version
            chosen = min(max(chosen, first), last)
            self.found += self.pair.compare(step, chosen, self._is_known)
            if step.api in _CHANGES:
                self._settle()

    def _settle(self) -> None:
        """Wait until the broker knows its topics, have what must be there, and learn of it."""
        kafka, embedlog = self.pair.kafka, self.pair.embedlog
        deadline = monotonic() + patient(20)
        for attempt in count():
            for side in (kafka, embedlog):
                topics = side.topics()
                for name, (partitions, settings) in BASE_TOPICS.items():
                    if self.pair.prefix + name not in topics:
                        side.create(self.pair.prefix + name, partitions, settings)
            theirs, ours = kafka.topics(), embedlog.topics()
            if theirs == ours and len(ours) >= len(BASE_TOPICS) and kafka.leads(theirs):
                others = self._topics_that_differ()
                if not others:
                    break
                # One of the two has refused records, which was a difference: begin anew.
                for name in others:
                    kafka.delete(name)
                    embedlog.delete(name)
            assert monotonic() < deadline, f"Kafka has the topics {theirs}, embedlog {ours}"
            if attempt % 20 == 19:
                # One of the two has refused something, which was a difference: go on.
                for name, _ in theirs.items() ^ ours.items():
                    kafka.delete(name)
                    embedlog.delete(name)
            sleep(0.05)
        self.world.topics = ours
        for side in (kafka, embedlog):
            # An id stays known when its topic is gone.
            side.known |= side.ids
        plain = self.world.name("plain")
        self.world.ends = {(plain, number): embedlog.end(plain, number) for number in range(2)}

    def _topics_that_differ(self) -> list[str]:
        names = [(self.pair.prefix + name, each) for name, (each, _) in BASE_TOPICS.items()]
        return [
            name
            for name, partitions in names
            for number in range(partitions)
            if self.pair.kafka.end(name, number) != self.pair.embedlog.end(name, number)
        ]


_CHANGES = frozenset(
    {"CreateTopics", "CreatePartitions", "DeleteTopics", "Produce", "AlterConfigs"}
    | {"IncrementalAlterConfigs"}
)
