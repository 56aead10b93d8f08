"""Share groups on the wire (KIP-932): one group with share consumers in Python (S1 to S21)."""

from __future__ import annotations

import json
import random
from contextlib import ExitStack
from time import monotonic
from typing import Any

import pyarrow as pa
import pytest
from support.children import in_threads
from support.patience import patient
from support.wire_client import WireClient
from test_server_batches import read_by_kafka_python
from test_server_transactions import KilledServer

from embedlog.record import TopicPartition
from embedlog.server import heartbeat_answers, share_fetch
from embedlog.server.cluster import topic_id
from embedlog.server.error_codes import ErrorCode
from embedlog.share.share_group import ShareGroup

GAP, ACCEPT, RELEASE, REJECT, RENEW = range(5)
LONG_MS = 600_000
"""A lock that no test waits for."""
SHORT_MS = 300
"""One that tests wait for."""
Delivery = tuple[int, int, bytes]
"""An offset, the number of deliveries, and the value."""


class Sharer:
    """A client of a share group: what it sends, when a test says so.

    Args:
        address: The address of a server.
        topic: The id of the topic that it fetches.
        name: What it is, as a member.
    """

    def __init__(self, address: str, topic: Any, name: str, partitions: int = 1) -> None:
        self.address, self.client = address, WireClient(address)
        self.topic, self.name = topic, name
        self.epoch = self.member_epoch = 0
        self.partitions = range(partitions)
        self.last: Any = None
        """The last answer."""

    def beat(self, epoch: int | None = None, **fields: Any) -> int:
        """Send a heartbeat, the first of which joins; return the code."""
        if self.member_epoch == 0:
            fields = {"subscribed_topic_names": ["jobs"], **fields}
        self.last = self.client.ask(
            "ShareGroupHeartbeat",
            1,
            **{"group_id": "g", "member_id": self.name, **fields},
            member_epoch=self.member_epoch if epoch is None else epoch,
        )
        if not self.last.error_code:
            self.member_epoch = self.last.member_epoch
        return int(self.last.error_code)

    def assigned(self) -> list[int] | None:
        """Return the partitions that the last heartbeat was answered."""
        found = self.last.assignment
        if found is None:
            return None
        return [number for topic in found.topic_partitions for number in topic.partitions]

    def ask(self, api: str, *said: tuple[int, int, int], partition: int = 0, **fields: Any) -> Any:
        """Fetch or acknowledge: first and last offsets, with what becomes of them."""
        batches = [
            {"first_offset": first, "last_offset": last, "acknowledge_types": [verdict]}
            for first, last, verdict in said
        ]
        parts = [
            {"partition_index": number, "acknowledgement_batches": batches * (number == partition)}
            for number in (self.partitions if api == "ShareFetch" else [partition])
        ]
        self.last = self.client.ask(
            api,
            2,
            topics=[{"topic_id": self.topic, "partitions": parts}],
            **{
                "group_id": "g",
                "member_id": self.name,
                "share_session_epoch": self.epoch,
                **fields,
            },
        )
        if not self.last.error_code:
            self.epoch += 1
        return self.last

    def fetch(self, *said: tuple[int, int, int], wait: float = 0, **fields: Any) -> list[Delivery]:
        """Fetch, and return the records that are the client's; it waits for the first."""
        fields = {
            "max_wait_ms": int(wait * 1000),
            "max_bytes": 1 << 20,
            "max_records": 500,
        } | fields
        self.ask("ShareFetch", *said, **fields)
        return [
            each
            for topic in self.last.responses
            for part in topic.partitions
            for each in deliveries(part)
        ]

    def acknowledge(self, *said: tuple[int, int, int], **fields: Any) -> int:
        """Acknowledge, and return the code of the request, or else of the partition."""
        answer = self.ask("ShareAcknowledge", *said, **fields)
        codes = [part.error_code for topic in answer.responses for part in topic.partitions]
        return int(answer.error_code or max(codes, default=0))

    def reconnect(self) -> None:
        """Go on with another connection, without the records of the last one."""
        self.client.close()
        self.client, self.epoch = WireClient(self.address), 0
        assert self.beat() == 0

    def refused(self) -> int:
        """Return the code of the acknowledgements of the last fetch."""
        (code,) = {
            part.acknowledge_error_code
            for topic in self.last.responses
            for part in topic.partitions
            if part.partition_index == 0
        }
        return int(code)


def deliveries(part: Any) -> list[Delivery]:
    """Return the acquired records of a partition: the others are none of the client's."""
    counts = {
        offset: each.delivery_count
        for each in part.acquired_records
        for offset in range(each.first_offset, each.last_offset + 1)
    }
    records = read_by_kafka_python(bytes(part.records))
    return [(offset, counts[offset], record[1]) for offset, record in records]


@pytest.fixture
def log(embedlog_log):
    embedlog_log.create_topic("jobs")
    settings = {"share.auto.offset.reset": "earliest", "share.record.lock.duration.ms": LONG_MS}
    embedlog_log.groups["g"].alter(settings)
    return embedlog_log


@pytest.fixture
def join(log, kafka_server):
    """Return a function that makes a member, and lets it join."""
    with ExitStack() as stack:

        def make(name: str = "a", address: str = "", partitions: int = 1) -> Sharer:
            number = topic_id(log, log.root.topic("jobs").id)
            sharer = Sharer(address or kafka_server.bootstrap_servers, number, name, partitions)
            stack.callback(lambda: sharer.client.close())
            assert sharer.beat() == 0
            return sharer

        yield make


def append(log: Any, *values: bytes, **options: Any) -> None:
    with log.producer() as producer:
        for value in values:
            producer.send("jobs", value, **options)


def lag(log: Any) -> int:
    return sum(log.groups["g"].lag().values())


# Members


def test_a_heartbeat_tells_the_partitions(log, join):
    """All partitions of its topics, for each member: to who joins, and with each other epoch."""
    first, second = join("a"), join("b")
    assert first.assigned() == second.assigned() == [0]
    assert (first.member_epoch, second.member_epoch) == (2, 3)
    assert (first.beat(), first.member_epoch, first.assigned()) == (0, 3, [0])
    # With another connection, too: who names the epoch has got what came with it.
    first.client.close()
    first.client = WireClient(first.address)
    assert (first.beat(), first.member_epoch, first.assigned()) == (0, 3, None)
    log.create_partitions("jobs", 3)
    assert (first.beat(epoch=3), first.assigned()) == (0, [0, 1, 2])
    # It did not get that answer.
    assert (first.beat(epoch=3), first.member_epoch, first.assigned()) == (0, 4, [0, 1, 2])
    assert first.beat(epoch=2) == ErrorCode.FENCED_MEMBER_EPOCH
    log.delete_topic("jobs")
    assert (first.beat(), first.member_epoch, first.assigned()) == (0, 5, [])
    assert first.beat(subscribed_topic_names=["others"]) == 0
    (group,) = first.client.ask("ShareGroupDescribe", 1, group_ids=["g"]).groups
    assert group.group_epoch == group.assignment_epoch == first.member_epoch == 6
    members = {each.member_id: each.topics for each in log.groups["g"].members()}
    assert members == {"a": ("others",), "b": ("jobs",)}


def test_a_heartbeat_that_makes_no_sense_is_refused(log, join):
    first = join("a")
    assert first.beat(epoch=7) == ErrorCode.FENCED_MEMBER_EPOCH
    assert first.beat(member_id="b") == ErrorCode.UNKNOWN_MEMBER_ID
    assert first.beat(epoch=-3) == ErrorCode.INVALID_REQUEST
    assert first.beat(epoch=0) == ErrorCode.INVALID_REQUEST  # It names no topics.
    with log.consumer("jobs", group_id="others") as consumer:
        consumer.poll(timeout_ms=0)
        code = first.beat(epoch=0, group_id="others", subscribed_topic_names=["jobs"])
        assert code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        (member,) = log.groups["others"].members()
        code = first.beat(epoch=1, group_id="others", member_id=member.member_id)
        assert code == ErrorCode.UNKNOWN_MEMBER_ID
    assert first.beat(epoch=-1) == 0
    assert log.groups["g"].members() == []


def test_a_silent_client_is_removed(log, join, monkeypatch):
    """It is told so by its next request, and its records are free."""
    append(log, b"x")
    monkeypatch.setattr(heartbeat_answers, "SESSION_MS", SHORT_MS)
    first = join("a")
    assert first.fetch() == [(0, 1, b"x")]
    monkeypatch.setattr(heartbeat_answers, "SESSION_MS", LONG_MS)
    second = join("b")
    while len(ShareGroup(log.root, "g").read().members) == 2:
        assert second.beat() == 0
    assert second.fetch(wait=patient(30)) == [(0, 2, b"x")]
    assert first.acknowledge((0, 0, ACCEPT)) == ErrorCode.SHARE_SESSION_NOT_FOUND
    assert first.fetch() == []
    assert first.last.error_code == ErrorCode.SHARE_SESSION_NOT_FOUND
    assert second.acknowledge((0, 0, ACCEPT)) == 0


# Records


def test_each_record_is_given_to_one_client(log, join, kafka_server):
    """Also to one of a client and a program in Python (S1); no error is counted."""
    append(log, *(b"%d" % number for number in range(10)))
    first, second = join("a"), join("b")
    assert [each[0] for each in first.fetch(max_records=3)] == [0, 1, 2]
    assert [each[0] for each in second.fetch(max_records=3)] == [3, 4, 5]
    with log.share_consumer("jobs", group="g", max_poll_records=2) as consumer:
        assert [record.offset for record in consumer.poll()] == [6, 7]
        consumer.commit()
        assert first.acknowledge((0, 2, ACCEPT)) == 0
        assert [each[0] for each in second.fetch((3, 4, REJECT), (5, 5, RELEASE))] == [5, 8, 9]
        assert [count for _, count, _ in second.fetch((5, 5, ACCEPT), (8, 9, ACCEPT))] == []
        assert consumer.poll() == []
    assert lag(log) == 0
    assert not [key for key in kafka_server.metrics() if ".errors." in key]


def test_confluent_kafkas_consumer_shares_a_group_with_python(log, kafka_server):
    """What it was given and has not accepted when it closes comes to the other one."""
    # Earlier ones have no share consumers.
    confluent_kafka = pytest.importorskip("confluent_kafka", "2.16")
    append(log, b"x", b"y", b"z")
    address = {"bootstrap.servers": kafka_server.bootstrap_servers, "log_level": 0}
    explicit = {"share.acknowledgement.mode": "explicit"}
    consumer = confluent_kafka.ShareConsumer({**address, **explicit, "group.id": "g"})
    consumer.subscribe(["jobs"])
    messages, ends_at = [], monotonic() + patient(60)
    while not messages and monotonic() < ends_at:
        messages = consumer.poll(1.0)
    assert [message.value() for message in messages] == [b"x", b"y", b"z"]
    for message, kind in zip(messages, ("ACCEPT", "REJECT", "RELEASE"), strict=True):
        consumer.acknowledge(message, getattr(confluent_kafka.AcknowledgeType, kind))
    assert set(consumer.commit_sync().values()) == {None}
    with log.share_consumer("jobs", group="g") as other:
        consumer.close()
        found = other.poll(patient(30_000))
        assert [(each.value, each.delivery_count > 1) for each in found] == [(b"z", True)]


def test_records_keep_what_they_have_where_a_part_of_a_batch_is_sent(log, join):
    """Keys, headers and nulls, whatever the batches of the log are."""
    with log.producer(linger_ms=1000) as producer:
        for number in range(100):
            headers = [("n", b"%d" % number)] if number % 3 == 0 else None
            value = None if number % 5 == 0 else b"%d" % number
            producer.send("jobs", value, key=b"k" * (number % 7), headers=headers)
    sharer, found = join(), []
    for _ in range(10):
        sharer.fetch(max_records=10)
        (part,) = sharer.last.responses[0].partitions
        found += read_by_kafka_python(bytes(part.records))
    assert [offset for offset, _ in found] == list(range(100))
    for number, (_, (key, value, _, headers)) in enumerate(found):
        assert value == (b"%d" % number if number % 5 else None)
        assert key == b"k" * (number % 7)
        assert list(headers) == ([("n", b"%d" % number)] if number % 3 == 0 else [])


def test_records_of_typed_topics_are_json(log, join):
    columns = pa.schema([("id", pa.int64()), ("name", pa.string())])
    log.create_topic("typed", schema=columns, key="id")
    with log.producer(linger_ms=1000) as producer:
        for number in range(50):
            producer.send("typed", {"id": number, "name": f"n{number}"})
    sharer = join()
    assert sharer.beat(subscribed_topic_names=["typed"]) == 0
    sharer.topic = topic_id(log, log.root.topic("typed").id)
    found = sharer.fetch(max_records=7) + sharer.fetch((0, 6, ACCEPT), max_records=7)
    assert [json.loads(value) for *_, value in found] == [
        {"id": number, "name": f"n{number}"} for number in range(14)
    ]


def test_what_finds_no_room_stays_available(log, join):
    """It does not count as delivered; the first record comes in any case (S5)."""
    append(log, *(bytes(1000) for _ in range(10)))
    first, second = join("a"), join("b")
    assert [each[0] for each in first.fetch(max_bytes=1)] == [0]
    assert [each[:2] for each in second.fetch(max_bytes=3500)] == [(1, 1), (2, 1), (3, 1)]
    assert [each[:2] for each in first.fetch((0, 0, ACCEPT))] == [(n, 1) for n in range(4, 10)]


def test_offsets_without_a_record_are_done(log, join):
    """Where a topic is compacted, nothing is acquired that is not there (S13)."""
    log.create_topic("other", config={"cleanup.policy": "compact"})
    with log.producer() as producer:
        for number in range(60):
            producer.send("other", b"%d" % number, key=b"%d" % (number % 31)).result()
    log.housekeeping.compact("other", force=True)
    kept = [(record.offset, 1, record.value) for record in log.topic("other")]
    assert len(kept) == 31
    sharer = join()
    assert sharer.beat(subscribed_topic_names=["other"]) == 0
    sharer.topic, found = topic_id(log, log.root.topic("other").id), []
    while len(found) < len(kept):
        found += sharer.fetch(max_records=20)
    assert found == kept
    first = kept[0][0]
    assert sharer.acknowledge((first, 59, ACCEPT)) == 0
    assert lag(log) == 0


def test_a_lock_that_ends_frees_its_records(log, join):
    """A late acknowledgement is refused; of its partition, all of the request (S4, S21)."""
    log.groups["g"].alter({"share.record.lock.duration.ms": SHORT_MS})
    append(log, b"x")
    first, second = join("a"), join("b")
    assert first.fetch() == [(0, 1, b"x")]
    log.groups["g"].alter({"share.record.lock.duration.ms": LONG_MS})
    assert second.fetch(wait=patient(30)) == [(0, 2, b"x")]
    assert first.acknowledge((0, 0, ACCEPT)) == ErrorCode.INVALID_RECORD_STATE
    assert second.acknowledge((0, 0, ACCEPT), (7, 7, ACCEPT)) == ErrorCode.INVALID_RECORD_STATE
    assert second.fetch((0, 0, ACCEPT)) == []
    assert second.refused() == 0
    assert lag(log) == 0


def test_a_renewed_lock_lasts_longer(log, join):
    """A request that renews asks for no records; the group may forbid it."""
    append(log, b"x", b"y")
    log.groups["g"].alter({"share.record.lock.duration.ms": SHORT_MS})
    first, second = join("a"), join("b")
    assert first.fetch(max_records=1) == [(0, 1, b"x")]
    log.groups["g"].alter({"share.record.lock.duration.ms": LONG_MS})
    assert first.acknowledge((0, 0, RENEW)) == ErrorCode.INVALID_REQUEST
    while first.fetch((0, 0, RENEW), is_renew_ack=True, max_bytes=0, max_records=0) or (
        first.refused()
    ):
        # The lock had ended before, on a slow machine.
        assert first.fetch(max_records=1) in ([], [(0, 2, b"x")])
    assert first.last.acquisition_lock_timeout_ms == LONG_MS
    assert second.fetch(wait=3 * SHORT_MS / 1000, max_records=1) == [(1, 1, b"y")]
    assert second.fetch(wait=2 * SHORT_MS / 1000) == []
    log.groups["g"].alter({"share.renew.acknowledge.enable": False})
    code = first.acknowledge((0, 0, RENEW), is_renew_ack=True)
    assert code == ErrorCode.INVALID_RECORD_STATE
    assert first.acknowledge((0, 0, ACCEPT)) == 0


@pytest.mark.parametrize(
    "said", [(1, 0, ACCEPT), (-1, 0, ACCEPT), (0, 0, 5), (0, 0, -1), (0, 0, RENEW)]
)
def test_acknowledgements_that_make_no_sense_are_refused(log, join, said):
    append(log, b"x")
    sharer = join()
    assert sharer.fetch() == [(0, 1, b"x")]
    assert sharer.acknowledge(said) == ErrorCode.INVALID_REQUEST
    assert sharer.acknowledge((0, 0, ACCEPT), (0, 0, ACCEPT)) == ErrorCode.INVALID_REQUEST
    assert sharer.acknowledge((0, 0, ACCEPT)) == 0


def test_a_client_cannot_say_that_others_records_are_not_there(log, join):
    """Of offsets that it was not given, now and in the future."""
    append(log, b"x")
    sharer = join()
    assert sharer.fetch() == [(0, 1, b"x")]
    assert sharer.acknowledge((0, 100, GAP)) == ErrorCode.INVALID_RECORD_STATE
    append(log, b"y")
    assert sharer.fetch((0, 0, GAP)) == [(1, 1, b"y")]
    assert sharer.refused() == 0


def test_who_waits_is_woken(log, join):
    """By an append, and by what another one releases, in Python or on the wire."""
    first, second = join("a"), join("b")
    with in_threads(lambda: append(log, b"x")):
        assert first.fetch(wait=patient(30)) == [(0, 1, b"x")]
    with in_threads(lambda: first.acknowledge((0, 0, RELEASE))):
        assert second.fetch(wait=patient(30)) == [(0, 2, b"x")]
    with in_threads(second.client.close):
        assert first.fetch(wait=patient(30)) == [(0, 3, b"x")]
    with log.share_consumer("jobs", group="g") as consumer:
        assert first.acknowledge((0, 0, RELEASE)) == 0
        assert [record.value for record in consumer.poll(patient(30_000))] == [b"x"]
        with in_threads(consumer.close):
            assert first.fetch(wait=patient(30))[0][0] == 0


# Sessions


def test_each_request_is_the_next_one_of_its_session(log, join):
    append(log, b"x")
    sharer = join()
    assert sharer.acknowledge((0, 0, ACCEPT)) == ErrorCode.INVALID_SHARE_SESSION_EPOCH
    assert sharer.fetch(share_session_epoch=1) == []
    assert sharer.last.error_code == ErrorCode.SHARE_SESSION_NOT_FOUND
    assert sharer.fetch((0, 0, ACCEPT)) == []
    assert sharer.last.error_code == ErrorCode.INVALID_REQUEST
    assert sharer.fetch() == [(0, 1, b"x")]
    assert sharer.fetch(share_session_epoch=5) == []
    assert sharer.last.error_code == ErrorCode.INVALID_SHARE_SESSION_EPOCH
    assert sharer.acknowledge((0, 0, ACCEPT), share_session_epoch=5) == (
        ErrorCode.INVALID_SHARE_SESSION_EPOCH
    )
    # The last one releases what the client has; and so does a new session.
    assert sharer.acknowledge(share_session_epoch=-1) == 0
    assert sharer.acknowledge(share_session_epoch=-1) == ErrorCode.SHARE_SESSION_NOT_FOUND
    sharer.epoch = 0
    assert sharer.fetch() == [(0, 2, b"x")]
    sharer.epoch = 0
    assert sharer.fetch() == [(0, 3, b"x")]
    assert lag(log) == 1


def test_a_session_ends_after_its_client_has_left(log, join):
    """As librdkafka's does; what it acknowledges then is refused, since its records are free."""
    for said, code in [((), 0), (((0, 0, ACCEPT),), ErrorCode.SHARE_SESSION_NOT_FOUND)]:
        append(log, b"x")
        first = join("a")
        assert len(first.fetch()) == 1
        assert first.beat(epoch=-1) == 0
        assert first.acknowledge(*said, share_session_epoch=-1) == code
        first.client.close()


def test_a_connection_has_so_many_sessions(log, join, monkeypatch):
    monkeypatch.setattr(share_fetch, "_MAX_SESSIONS", 1)
    first, second = join("a"), join("b")
    second.client.close()
    second.client = first.client
    first.fetch()
    second.fetch()
    assert second.last.error_code == ErrorCode.SHARE_SESSION_LIMIT_REACHED


def test_ranges_of_acquired_records_are_as_long_as_a_client_likes(log, join):
    """So that it can acknowledge them one by one; by default one range has all."""
    append(log, *(b"%d" % number for number in range(10)))
    sharer = join()
    for fields, ranges in (
        ({"max_records": 5, "batch_size": 2}, [(0, 1), (2, 3), (4, 4)]),
        ({"max_records": 5}, [(5, 9)]),
    ):
        assert len(sharer.fetch(**fields)) == 5
        found = sharer.last.responses[0].partitions[0].acquired_records
        assert [(each.first_offset, each.last_offset) for each in found] == ranges
    assert sharer.acknowledge((2, 3, ACCEPT)) == 0


def test_partitions_that_are_not_there(log, join):
    """The first response of a session has all partitions, as in Kafka; others have what is new."""
    sharer = join(partitions=2)

    def codes() -> dict[int, int]:
        parts = [part for topic in sharer.last.responses for part in topic.partitions]
        return {part.partition_index: part.error_code for part in parts}

    assert sharer.fetch(max_records=0) == []
    assert codes() == {1: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
    sharer.reconnect()
    assert sharer.fetch() == []
    assert codes() == {0: 0, 1: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
    assert sharer.fetch() == []
    assert codes() == {1: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
    log.delete_topic("jobs")
    assert sharer.fetch((0, 0, ACCEPT)) == []
    assert set(codes().values()) == {ErrorCode.UNKNOWN_TOPIC_ID}
    assert sharer.refused() == ErrorCode.UNKNOWN_TOPIC_ID


# Servers


def test_a_killed_server_loses_no_acknowledgement(log, join):
    """Its records are free at once, and its clients stay members of the group (S8)."""
    append(log, b"x", b"y", b"z")
    server = KilledServer(log.path)
    try:
        sharer = join("a", server.address)
        assert [each[0] for each in sharer.fetch()] == [0, 1, 2]
        assert sharer.acknowledge((0, 0, ACCEPT)) == 0
        with log.share_consumer("jobs", group="g", max_poll_records=1) as consumer:
            assert consumer.poll() == []
            server.stop()
            (record,) = consumer.poll(patient(30_000))
            assert (record.offset, record.delivery_count) == (1, 2)
            consumer.commit()
            server.restart()
            sharer.reconnect()
            assert sharer.fetch() == [(2, 2, b"z")]
            assert sharer.acknowledge((2, 2, ACCEPT)) == 0
    finally:
        server.stop()
    assert lag(log) == 0


@pytest.mark.tier("all")
def test_what_was_acknowledged_never_comes_again(log, join):
    """While servers are killed, and a program on the directory takes records of the group, too."""
    dice, done, count = random.Random(7), set[int](), 400
    log.groups["g"].alter({"share.delivery.count.limit": 1000})
    append(log, *(b"%d" % number for number in range(count)))
    server, kills = KilledServer(log.path), 0
    try:
        with log.share_consumer("jobs", group="g", max_poll_records=3) as consumer:
            sharer = join("a", server.address)
            while lag(log):
                if dice.random() < 0.3:
                    offsets = {record.offset for record in consumer.poll()}
                    assert not offsets & done
                    consumer.commit()
                    done |= offsets
                offsets = {offset for offset, *_ in sharer.fetch(max_records=dice.randrange(1, 9))}
                assert not offsets & done
                for offset in sorted(offsets):
                    if dice.random() < 0.03:
                        server.restart()
                        kills += 1
                        sharer.reconnect()
                        break
                    assert sharer.acknowledge((offset, offset, ACCEPT)) == 0
                    done.add(offset)
    finally:
        server.stop()
    assert kills
    assert done == set(range(count))


# Administration


def test_offsets_are_described_altered_and_deleted(log, join):
    """A group must have no members for that."""
    append(log, b"x", b"y", b"z")
    sharer = join()
    client, group = sharer.client, {"group_id": "g"}
    part = {"partition_index": 0, "start_offset": 2}
    altered = {"topics": [{"topic_name": "jobs", "partitions": [part]}], **group}
    deleted = {"topics": [{"topic_name": "jobs"}, {"topic_name": "none"}], **group}
    for api, fields in [
        ("AlterShareGroupOffsets", altered),
        ("DeleteShareGroupOffsets", deleted),
    ]:
        assert client.ask(api, 0, **fields).error_code == ErrorCode.NON_EMPTY_GROUP
    asked = {"groups": [{"group_id": "g", "topics": None}]}
    assert client.ask("OffsetFetch", 8, **asked).groups[0].topics == []
    asked["groups"][0]["topics"] = [{"name": "jobs", "partition_indexes": [0]}]
    (topic,) = client.ask("OffsetFetch", 8, **asked).groups[0].topics
    assert topic.partitions[0][:2] == (0, -1)
    none = {"group_id": "none"}
    answer = client.ask("DeleteShareGroupOffsets", 0, **{**deleted, **none})
    assert answer.error_code == ErrorCode.GROUP_ID_NOT_FOUND
    # A group may begin with the offsets that it is given.
    answer = client.ask("AlterShareGroupOffsets", 0, **{**altered, **none})
    assert answer.responses[0].partitions[0].error_code == 0
    assert log.groups["none"].describe().kind == "share"
    assert log.groups["none"].lag() == {TopicPartition("jobs", 0): 1}
    assert sharer.beat(epoch=-1) == 0
    answer = client.ask("AlterShareGroupOffsets", 0, **altered)
    assert answer.responses[0].partitions[0].error_code == 0

    def described() -> Any:
        asked = [{"group_id": "g", "topics": None}]
        answer = client.ask("DescribeShareGroupOffsets", 1, groups=asked)
        return [
            (topic.topic_name, part.start_offset, part.lag)
            for topic in answer.groups[0].topics
            for part in topic.partitions
        ]

    assert described() == [("jobs", 2, 1)]
    answer = client.ask("DeleteShareGroupOffsets", 0, **deleted)
    codes = [each.error_code for each in answer.responses]
    assert codes == [0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert described() == []
    # As Java's tools spell them.
    filters = {"states_filter": ["Empty"], "types_filter": ["Share"]}
    assert [each.group_id for each in client.ask("ListGroups", 5, **filters).groups] == [
        "g",
        "none",
    ]
    (group,) = client.ask("ShareGroupDescribe", 1, group_ids=["g"]).groups
    assert (group.error_code, group.group_state, group.members) == (0, "Empty", [])


def test_settings_of_groups(log, join):
    """They are described and altered as those of topics."""
    client, name = join().client, "share.delivery.count.limit"
    group = {"resource_type": 32, "resource_name": "g"}
    change = {"name": name, "config_operation": 0, "value": "3"}
    answer = client.ask("IncrementalAlterConfigs", 1, resources=[{**group, "configs": [change]}])
    assert answer.responses[0].error_code == 0
    assert log.groups["g"].config.share_delivery_count_limit == 3
    described = client.ask("DescribeConfigs", 4, resources=[{**group, "configuration_keys": None}])
    values = {each.name: each.value for each in described.results[0].configs}
    assert (values[name], values["share.auto.offset.reset"]) == ("3", "earliest")
    answer = client.ask("AlterConfigs", 2, resources=[{**group, "configs": []}])
    assert answer.responses[0].error_code == 0
    assert log.groups["g"].config.overrides() == {}
    change = {"name": "no.such", "config_operation": 0, "value": "3"}
    answer = client.ask("IncrementalAlterConfigs", 1, resources=[{**group, "configs": [change]}])
    assert answer.responses[0].error_code == ErrorCode.INVALID_CONFIG
