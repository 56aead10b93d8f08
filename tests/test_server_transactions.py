"""Transactions of clients on the wire: what they get, what others see, and who is fenced."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import aiokafka
import confluent_kafka
import pytest
from support.children import in_threads, run_python
from support.patience import patient
from support.tiers import choose
from support.wire_client import WireClient
from support.wire_members import Classic, Modern
from test_server_batches import stored

import embedlog
from embedlog import keyspace
from embedlog.checksum import crc32c
from embedlog.consumer.open_group import open_group
from embedlog.errors import InvalidProducerEpochError, StorageError
from embedlog.kafka.kafka_python import kafka
from embedlog.partition import checkpoint
from embedlog.producer.resumable_transactions import ResumableTransactions
from embedlog.publish import live_commit
from embedlog.record import TopicPartition
from embedlog.server import transaction_coordinator as coordinator
from embedlog.server.error_codes import ErrorCode
from embedlog.server.record_batches import HEAD, write_batches

OUT = TopicPartition("out", 0)
CLASSIC = {"Produce": 9, "EndTxn": 3, "TxnOffsetCommit": 3}
WITH_EPOCHS = {"Produce": 12, "EndTxn": 5, "TxnOffsetCommit": 5}
"""The versions of a client before KIP-890, and since."""
BOTH = pytest.mark.parametrize("versions", [CLASSIC, WITH_EPOCHS], ids=["classic", "KIP-890"])


def batch(value: bytes, identity: tuple[int, int], sequence: int) -> bytes:
    """Return a batch of one record, as a producer in a transaction sends it."""
    (wire,) = map(b"".join, write_batches([stored([(b"k", value, 5, [])], 0)]))
    fields = list(HEAD.unpack_from(wire))
    fields[5], fields[9:12] = 16, (*identity, sequence)
    data = bytearray(HEAD.pack(*fields) + wire[HEAD.size :])
    struct.pack_into(">I", data, 17, crc32c(bytes(data[21:])))
    return bytes(data)


class WireProducer:
    """A producer in transactions, with a connection of its own.

    Args:
        address: The address of the server.
        versions: Of its requests.
        name: Its ``transactional.id``.
    """

    def __init__(self, address: str, versions: dict[str, int], name: str = "name") -> None:
        self.client, self.versions, self.name = WireClient(address), versions, name
        self.identity, self.sequence = (-1, -1), 0

    def init(self, timeout_ms: int = 900_000, **fields: Any) -> int:
        """Become the producer of the name; return the code of the answer."""
        answer = self.client.ask(
            "InitProducerId",
            5,
            transactional_id=self.name,
            transaction_timeout_ms=timeout_ms,
            **fields,
        )
        if not answer.error_code:
            self.identity, self.sequence = (answer.producer_id, answer.producer_epoch), 0
        return int(answer.error_code)

    def _who(self) -> dict[str, Any]:
        number, epoch = self.identity
        return {"transactional_id": self.name, "producer_id": number, "producer_epoch": epoch}

    def add_partition(self, topic: str = "out") -> int:
        who = {f"v3_and_below_{name}": value for name, value in self._who().items()}
        topics = [{"name": topic, "partitions": [0]}]
        answer = self.client.ask("AddPartitionsToTxn", 3, v3_and_below_topics=topics, **who)
        return int(answer.results_by_topic_v3_and_below[0].results_by_partition[0][1])

    def produce(self, value: bytes, sequence: int | None = None) -> tuple[int, int]:
        """Send a record to partition 0 of ``out``; return the code and the offset."""
        if sequence is None:
            sequence, self.sequence = self.sequence, self.sequence + 1
        part = {"index": 0, "records": batch(value, self.identity, sequence)}
        answer = self.client.ask(
            "Produce",
            self.versions["Produce"],
            transactional_id=self.name,
            acks=-1,
            timeout_ms=1000,
            topic_data=[{"name": "out", "partition_data": [part]}],
        )
        response = answer.responses[0].partition_responses[0]
        return int(response.error_code), int(response.base_offset)

    def begin(self, value: bytes) -> tuple[int, int]:
        """Add the partition, if the client must, and send a record."""
        if self.versions is CLASSIC:
            assert self.add_partition() == 0
        return self.produce(value)

    def send_offset(self, offset: int, group: str = "g", **fields: Any) -> int:
        """Have a group commit an offset of partition 0 of ``in``."""
        if self.versions is CLASSIC:
            answer = self.client.ask("AddOffsetsToTxn", 3, group_id=group, **self._who())
            if answer.error_code:
                return int(answer.error_code)
        part = {"partition_index": 0, "committed_offset": offset, "committed_metadata": "m"}
        answer = self.client.ask(
            "TxnOffsetCommit",
            self.versions["TxnOffsetCommit"],
            group_id=group,
            topics=[{"name": "in", "partitions": [part]}],
            **{**self._who(), **fields},
        )
        return int(answer.topics[0].partitions[0].error_code)

    def end(self, committed: bool = True, identity: tuple[int, int] | None = None) -> int:
        """Commit or abort; return the code."""
        number, epoch = identity or self.identity
        who = {**self._who(), "producer_id": number, "producer_epoch": epoch}
        version = self.versions["EndTxn"]
        answer = self.client.ask("EndTxn", version, committed=committed, **who)
        if version >= 5 and not answer.error_code:
            self.identity, self.sequence = (answer.producer_id, answer.producer_epoch), 0
        return int(answer.error_code)


def values(log: Any, topic: str = "out") -> list[bytes]:
    return [record.value for record in log.topic(topic)]


def committed(log: Any, group: str = "g") -> int | None:
    """Return the offset that a group has committed of partition 0 of ``in``."""
    with log.consumer(group_id=group, enable_auto_commit=False) as consumer:
        return consumer.committed(TopicPartition("in", 0))


@pytest.fixture
def log(embedlog_log):
    for topic in ("in", "out"):
        embedlog_log.create_topic(topic, 1)
    return embedlog_log


@pytest.fixture
def new_producer(log, kafka_server):
    """Makes producers on the wire."""
    with ExitStack() as stack:

        def make(
            versions: dict[str, int] = CLASSIC, address: str | None = None, **options: Any
        ) -> WireProducer:
            where = address or kafka_server.bootstrap_servers
            made = WireProducer(where, versions, **options)
            stack.callback(lambda: made.client.close())
            return made

        yield make


# One transaction


@BOTH
def test_nothing_is_visible_before_the_commit(log, new_producer, versions):
    """Records and offsets become visible in one step; an aborted transaction leaves nothing."""
    producer = new_producer(versions)
    assert producer.init() == 0
    for number, commits in enumerate((True, False, True)):
        before = values(log), committed(log)
        assert producer.begin(b"%d" % number) == (0, len(before[0]))
        assert producer.produce(b"%d" % number) == (0, len(before[0]) + 1)
        assert producer.send_offset(number + 1) == 0
        assert (values(log), committed(log)) == before
        assert producer.end(committed=commits) == 0

    assert values(log) == [b"0", b"0", b"2", b"2"]
    assert committed(log) == 3


def test_offsets_are_answered_while_the_transaction_is_the_only_writer(log, new_producer):
    """Then they are right; as soon as somebody else writes, none is."""
    producer = new_producer()
    producer.init()
    answered = [producer.begin(b"first"), producer.produce(b"second")]
    with log.producer() as python:
        python.send("out", b"python").result()
    answered.append(producer.produce(b"third"))
    producer.end()

    assert answered == [(0, 0), (0, 1), (0, -1)]
    assert values(log) == [b"python", b"first", b"second", b"third"]


@BOTH
def test_batches_have_sequence_numbers(log, new_producer, versions):
    """A batch that is sent again is staged once, and one that skips numbers is refused."""
    producer = new_producer(versions)
    producer.init()
    assert producer.begin(b"0") == (0, 0)
    assert producer.produce(b"1") == (0, 1)
    assert producer.produce(b"0", sequence=0) == (0, 0)
    assert producer.produce(b"5", sequence=5)[0] == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert producer.end() == 0
    # With an epoch for each transaction they begin again.
    if versions is CLASSIC:
        assert producer.begin(b"2") == (0, 2)
        assert producer.produce(b"1", sequence=1) == (0, 1)
    else:
        code = producer.produce(b"1", sequence=1)[0]
        assert code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert producer.begin(b"2") == (0, 2)
    assert producer.end() == 0
    assert values(log) == [b"0", b"1", b"2"]


def test_what_does_not_belong_to_a_transaction_is_refused(log, new_producer):
    """Each with Kafka's code; nothing becomes visible."""
    producer, unknown = new_producer(), new_producer(name="unknown")
    unknown.identity = 1234, 0
    assert unknown.add_partition() == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert unknown.end() == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    for timeout in (0, coordinator.MAX_TIMEOUT_MS + 1):
        assert producer.init(timeout_ms=timeout) == ErrorCode.INVALID_TRANSACTION_TIMEOUT
    for name in ("", "x" * 400, "a\0b"):
        assert new_producer(name=name).init() == ErrorCode.INVALID_REQUEST
    for who in (producer, new_producer(name=None)):
        assert who.init(producer_id=5) == ErrorCode.INVALID_REQUEST
    assert producer.init() == 0
    assert producer.end() == ErrorCode.INVALID_TXN_STATE
    assert producer.produce(b"x", sequence=0)[0] == ErrorCode.INVALID_TXN_STATE
    topics = [{"name": "out", "partition_data": [{"index": 0, "records": batch(b"x", (1, 0), 0)}]}]
    answer = producer.client.ask("Produce", 9, acks=-1, topic_data=topics)
    code = answer.responses[0].partition_responses[0].error_code
    assert code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    assert producer.add_partition("nothing") == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert producer.begin(b"x") == (0, 0)
    part = {"partition_index": 0, "committed_offset": 1}
    topics = [{"name": "in", "partitions": [part]}, {"name": "nothing", "partitions": [part]}]
    answer = producer.client.ask(
        "TxnOffsetCommit", 3, group_id="other", topics=topics, **producer._who()
    )
    assert [topic.partitions[0].error_code for topic in answer.topics] == [
        ErrorCode.INVALID_TXN_STATE,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    assert producer.send_offset(-1) == ErrorCode.INVALID_REQUEST
    assert producer.send_offset(1, generation_id=3) == ErrorCode.ILLEGAL_GENERATION
    assert producer.send_offset(1, group="\0") == ErrorCode.INVALID_GROUP_ID
    assert producer.end(committed=False) == 0
    assert (values(log), committed(log)) == ([], None)


@BOTH
def test_an_end_that_is_repeated_finds_what_became_of_it(log, new_producer, versions):
    """A client whose answer was lost asks again, and nothing is done twice."""
    producer = new_producer(versions)
    producer.init()
    for commits in (True, False):
        producer.begin(b"%d" % commits)
        asked = producer.identity
        assert producer.end(committed=commits) == 0
        after = producer.identity
        assert producer.end(committed=commits, identity=asked) == 0
        assert producer.identity == after
        assert producer.end(not commits, identity=asked) == ErrorCode.INVALID_TXN_STATE
    assert values(log) == [b"1"]


def test_each_transaction_has_an_epoch_of_its_own(log, new_producer):
    """KIP-890: what is late belongs to an epoch that has ended, also after an empty abort."""
    producer = new_producer(WITH_EPOCHS)
    producer.init()
    epochs = []
    for commits in (True, False, False):
        late = producer.identity
        if len(epochs) < 2:
            producer.begin(b"x")
        assert producer.end(committed=commits) == 0
        epochs.append(producer.identity[1])
        number, producer.identity = producer.identity, late
        assert producer.produce(b"late", 1)[0] == ErrorCode.INVALID_PRODUCER_EPOCH
        producer.identity = number
    assert epochs == [1, 2, 3]
    assert producer.end() == ErrorCode.INVALID_TXN_STATE
    assert values(log) == [b"x"]


def test_an_exhausted_epoch_is_followed_by_a_new_id(log, new_producer):
    """As Kafka's: the client gets it with the end of its transaction."""
    producer = new_producer(WITH_EPOCHS)
    producer.init()
    number = producer.identity[0]
    log.root.context.state.write(
        lambda txn: keyspace.NAMED_PRODUCERS.put(txn, "name", value=(number, 0x7FFC))
    )
    producer.init()
    for value in (b"a", b"b", b"c"):
        asked = producer.identity
        assert producer.begin(value)[0] == 0
        assert producer.end() == 0
        assert producer.end(identity=asked) == 0
    assert producer.identity[0] > number
    assert values(log) == [b"a", b"b", b"c"]


# Who has the name


@BOTH
@pytest.mark.parametrize("newer", ["on the wire", "in Python"])
def test_a_newer_producer_fences_an_older_one(log, new_producer, versions, newer):
    """Whatever the older one asks then; what it had begun is dropped."""
    older = new_producer(versions)
    older.init()
    older.begin(b"older")
    older.send_offset(7)
    if newer == "in Python":
        with log.transaction("name") as transaction:
            transaction.send("out", b"newer")
    else:
        producer = new_producer(versions)
        assert producer.init() == 0
        assert producer.identity > older.identity
        producer.begin(b"newer")
        assert producer.end() == 0

    assert older.produce(b"x")[0] == ErrorCode.INVALID_PRODUCER_EPOCH
    assert older.add_partition() == ErrorCode.PRODUCER_FENCED
    fenced = ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH
    assert older.send_offset(1) in fenced
    assert (older.end(), older.end(committed=False)) == (fenced[0], fenced[0])
    number, epoch = older.identity
    assert older.init(producer_id=number, producer_epoch=epoch) == fenced[0]
    assert (values(log), committed(log)) == ([b"newer"], None)


@BOTH
def test_a_producer_on_the_wire_fences_one_in_python(log, new_producer, versions):
    """Both are producers of the log."""
    with log.producer(transactional_id="name") as python:
        python.init_transactions()
        python.begin_transaction()
        python.send("out", b"python")
        producer = new_producer(versions)
        assert producer.init() == 0
        producer.begin(b"wire")
        with pytest.raises(InvalidProducerEpochError):
            python.commit_transaction()
        assert producer.end() == 0
    assert values(log) == [b"wire"]


@BOTH
def test_a_newer_producer_that_comes_during_the_commit_decides(log, new_producer, versions):
    """A program in Python that begins after the server has looked, and before it commits."""
    producer = new_producer(versions)
    producer.init()
    producer.begin(b"older")
    current = log.root.context.catalog.named_producer
    with log.producer(transactional_id="name") as python:
        seen = current("name")
        python.init_transactions()
        with pytest.MonkeyPatch.context() as patch:
            catalog = type(log.root.context.catalog)
            patch.setattr(catalog, "named_producer", lambda self, name: seen)
            assert producer.end() == ErrorCode.PRODUCER_FENCED
    assert values(log) == []


def test_a_producer_may_raise_its_own_epoch(log, new_producer):
    """KIP-360: also if the answer was lost, but not after another one has begun."""
    producer = new_producer()
    producer.init()
    first = {"producer_id": producer.identity[0], "producer_epoch": producer.identity[1]}
    producer.begin(b"dropped")
    for _ in range(2):
        assert producer.init(**first) == 0
        assert producer.identity == (first["producer_id"], first["producer_epoch"] + 1)
    assert producer.begin(b"kept") == (0, 0)
    assert producer.end() == 0
    assert new_producer().init() == 0
    assert producer.init(**first) == ErrorCode.PRODUCER_FENCED
    assert values(log) == [b"kept"]


@BOTH
def test_a_transaction_that_takes_too_long_is_aborted(log, new_producer, versions, caplog):
    """And its producer is fenced, as by Kafka; one that ends in time is not."""
    caplog.set_level(logging.WARNING, "embedlog.server")
    producer, other = new_producer(versions), new_producer(versions, name="other")
    producer.init(timeout_ms=50)
    other.init()
    for each in (other, producer):
        each.begin(b"x")
    deadline = time.monotonic() + patient(10)
    while "took longer than 50 ms" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert producer.end() == ErrorCode.PRODUCER_FENCED
    assert producer.init() == 0
    producer.begin(b"again")
    assert (producer.end(), other.end()) == (0, 0)
    assert values(log) == [b"again", b"x"]


# Groups


@BOTH
def test_offsets_that_are_about_to_be_committed_are_unstable(log, new_producer, versions):
    """KIP-447: a consumer that takes the partition over waits for the transaction."""

    def offset_of(stable: bool, topics: Any) -> Any:
        groups = [{"group_id": "g", "topics": topics}]
        answer = producer.client.ask("OffsetFetch", 9, groups=groups, require_stable=stable)
        return [
            (part.committed_offset, part.error_code)
            for topic in answer.groups[0].topics
            for part in topic.partitions
        ]

    producer = new_producer(versions)
    producer.init()
    chosen = [{"name": "in", "partition_indexes": [0]}]
    for commits, offset in ((False, -1), (True, 4)):
        assert producer.send_offset(4) == 0
        for topics in (chosen, None):
            assert offset_of(True, topics) == [(-1, ErrorCode.UNSTABLE_OFFSET_COMMIT)]
        assert offset_of(False, chosen) == [(-1, 0)]
        assert producer.end(committed=commits) == 0
        assert offset_of(True, chosen) == [(offset, 0)]


@BOTH
def test_a_group_with_members_in_python_is_asked_at_the_commit(log, new_producer, versions):
    """The client must abort then, and can begin again."""
    producer = new_producer(versions)
    producer.init()
    producer.begin(b"x")
    assert producer.send_offset(4) == 0
    with log.consumer("in", group_id="g", enable_auto_commit=False) as consumer:
        consumer.poll(0)
        code = producer.end()
    aborts = {3: ErrorCode.INVALID_PRODUCER_ID_MAPPING, 5: ErrorCode.TRANSACTION_ABORTABLE}
    assert code == aborts[versions["EndTxn"]]
    assert producer.end(committed=False) == 0
    assert producer.begin(b"y")[0] == 0
    assert producer.end() == 0
    assert (values(log), committed(log)) == ([b"y"], None)


@BOTH
def test_a_member_in_python_commits_with_a_producer_on_the_wire(log, new_producer, versions):
    """The commit checks that it owns the partition since a generation that it has seen."""
    producer = new_producer(versions)
    producer.init()
    settings = {"group_id": "g", "enable_auto_commit": False}
    codes = []
    with log.consumer("in", **settings) as consumer:
        for generation in (0, 1):
            while not consumer.assignment():
                consumer.poll(10)
            member = consumer.group_metadata()
            producer.begin(b"x")
            who = {"member_id": member.member_id, "generation_id": member.generation_id}
            assert producer.send_offset(generation + 1, **who) == 0
            if generation:
                open_group(log.root, "g").remove_members([member.member_id])
            codes.append(producer.end())
    assert codes[0] == 0
    assert codes[1] in (ErrorCode.INVALID_PRODUCER_ID_MAPPING, ErrorCode.TRANSACTION_ABORTABLE)
    assert producer.end(committed=False) == 0
    assert (values(log), committed(log)) == ([b"x"], 1)


@BOTH
@pytest.mark.parametrize("kind", ["classic", "KIP-848", "in memory"])
def test_a_member_on_the_wire_commits_in_a_transaction(
    log, new_producer, kafka_server, versions, kind
):
    """Of each kind of group; who has another generation is told so before the commit."""
    producer, address = new_producer(versions), kafka_server.bootstrap_servers
    producer.init()
    with ExitStack() as stack:
        if kind == "KIP-848":
            member = Modern(address, "in")
            member.join()
            epoch = member.epoch
        else:
            member = Classic(address, "in")
            if kind == "in memory":
                other = [{"name": "of a program", "metadata": b""}]
                member.options["protocols"] = other
            member.join()
            assert member.sync() == 0
            epoch = member.generation
        stack.callback(member.close)
        who = {"member_id": member.id, "generation_id": epoch}
        producer.begin(b"x")
        wrong = producer.send_offset(4, **{**who, "generation_id": epoch + 1})
        assert wrong == ErrorCode.ILLEGAL_GENERATION
        unknown = producer.send_offset(4, **{**who, "member_id": "nobody"})
        assert unknown == ErrorCode.UNKNOWN_MEMBER_ID
        none = producer.send_offset(4, group="none", **who)
        assert none == ErrorCode.ILLEGAL_GENERATION
        assert producer.send_offset(4, **who) == 0
        assert producer.end() == 0
    assert (values(log), committed(log)) == ([b"x"], 4)


@pytest.mark.parametrize("is_named", [False, True])
def test_a_transaction_may_commit_for_a_partition_that_nobody_has_owned(
    log, new_producer, kafka_server, is_named
):
    """As in Kafka; who reads it later begins there, and only that member commits then (G26)."""
    log.create_topic("other")
    address, producer = kafka_server.bootstrap_servers, new_producer()
    producer.init()
    with closing(Modern(address, "other")) as member, closing(Modern(address, "in")) as reader:
        member.join()
        who = {"member_id": member.id, "generation_id": member.epoch} if is_named else {}
        for offset in (4, 5):
            assert producer.send_offset(offset, **who) == 0
            assert producer.end() == 0
            assert committed(log) == offset
        reader.join()
        assert member.beat() == 0
        code = producer.send_offset(6, member_id=member.id, generation_id=member.epoch)
        assert (code, producer.end() != 0, producer.end(committed=False)) == (0, True, 0)
        assert committed(log) == 5


def test_who_does_not_say_who_it_is_commits_as_the_owner(log, new_producer, kafka_server):
    """As clients before KIP-447 do; if the partition moved meanwhile, it must abort."""
    producer = new_producer()
    producer.init()
    with closing(Classic(kafka_server.bootstrap_servers, "in")) as member:
        member.settle()
        for value, offset in ((b"x", 4), (b"y", 5)):
            producer.begin(value)
            assert producer.send_offset(offset) == 0
            if offset == 5:
                member.leave()
            code = producer.end()
            assert code == (0 if offset == 4 else ErrorCode.INVALID_PRODUCER_ID_MAPPING)
    assert producer.end(committed=False) == 0
    assert (values(log), committed(log)) == ([b"x"], 4)


# Clients


def test_kafka_python_in_transactions(log, kafka_server):
    """As a consumer of its own library sees it, with the offsets of a group."""
    address = {"bootstrap_servers": kafka_server.bootstrap_servers}
    producer = kafka.KafkaProducer(transactional_id="name", **address)
    producer.init_transactions()
    offsets = {kafka.TopicPartition("in", 0): kafka.structs.OffsetAndMetadata(3, "", -1)}
    for end in (producer.commit_transaction, producer.abort_transaction):
        producer.begin_transaction()
        future = producer.send("out", end.__name__.encode())
        producer.send_offsets_to_transaction(offsets, "g")
        end()
    assert future.is_done
    producer.close()
    assert values(log) == [b"commit_transaction"]
    assert committed(log) == 3


def test_aiokafka_in_transactions(log, kafka_server):
    """Likewise; it has requests of the oldest versions."""

    async def run() -> None:
        address = {"bootstrap_servers": kafka_server.bootstrap_servers}
        async with aiokafka.AIOKafkaProducer(transactional_id="name", **address) as producer:
            async with producer.transaction():
                await producer.send_and_wait("out", b"committed")
                offsets = {aiokafka.TopicPartition("in", 0): 3}
                await producer.send_offsets_to_transaction(offsets, "g")
            with pytest.raises(ZeroDivisionError):
                async with producer.transaction():
                    await producer.send_and_wait("out", b"aborted")
                    raise ZeroDivisionError
            older = producer
            async with aiokafka.AIOKafkaProducer(transactional_id="name", **address):
                with pytest.raises(aiokafka.errors.ProducerFenced):
                    async with older.transaction():
                        await older.send_and_wait("out", b"fenced")

    asyncio.run(run())
    assert values(log) == [b"committed"]
    assert committed(log) == 3


@pytest.mark.tier("all")
def test_a_program_prints_the_same_on_the_wire_and_on_the_directory(tmp_path):
    """Transactions of confluent-kafka: records, positions, and the errors of who is fenced."""
    program = Path(__file__).parent / "support" / "confluent_program.py"
    environment = {**os.environ, "SECONDS": str(patient(10)), "PARTS": "transact transform"}
    server = KilledServer(tmp_path / "served")
    try:
        wire = {**environment, "CLIENT": "confluent_kafka", "BOOTSTRAP": server.address}
        on_the_wire = run_python(program, env=wire, seconds=100)
    finally:
        server.stop()
    directory = {**environment, "BOOTSTRAP": str(tmp_path / "log")}
    assert run_python(program, env=directory, seconds=100) == on_the_wire


# What others see


def test_producers_are_listed_and_described(log, new_producer, kafka_server, embedlog_clock):
    """As by Kafka's admin clients: by state, producer and pattern; also after a restart."""
    open_, done, dropped = (new_producer(name=name) for name in ("open", "done", "dropped"))
    for producer in (open_, done, dropped):
        assert producer.init(timeout_ms=800_000) == 0
    open_.begin(b"x")
    began_ms = embedlog_clock.now_ms
    embedlog_clock.advance(10)
    done.begin(b"y")
    assert done.end() == 0
    dropped.begin(b"z")
    assert dropped.end(committed=False) == 0
    with log.transaction("in Python") as transaction:
        transaction.send("out", b"p")

    def listed(client: WireClient, **filters: Any) -> dict[str, str]:
        answer = client.ask("ListTransactions", 2, **filters)
        assert not answer.error_code
        return {each.transactional_id: each.transaction_state for each in answer.transaction_states}

    states = {
        "open": "Ongoing",
        "done": "CompleteCommit",
        "dropped": "CompleteAbort",
        "in Python": "CompleteCommit",
    }
    with embedlog.serve(log) as other:
        for address in (kafka_server.bootstrap_servers, other.bootstrap_servers):
            with WireClient(address) as client:
                assert listed(client) == states
                assert listed(client, transactional_id_pattern="d.*").keys() == {"done", "dropped"}
                assert listed(client, state_filters=["Ongoing", "none"]) == {"open": "Ongoing"}
                assert listed(client, producer_id_filters=[done.identity[0]]).keys() == {"done"}
                answer = client.ask("ListTransactions", 2, transactional_id_pattern="(")
                assert answer.error_code == ErrorCode.INVALID_REGULAR_EXPRESSION
    with WireClient(kafka_server.bootstrap_servers) as client:
        assert listed(client, duration_filter=0) == {"open": "Ongoing"}
        assert listed(client, duration_filter=1_000_000) == {}
        answer = client.ask("ListTransactions", 2, state_filters=["none"])
        assert (answer.unknown_state_filters, answer.transaction_states) == (["none"], [])
        answer = client.ask("DescribeTransactions", 0, transactional_ids=["open", "no", ""])
        found, unknown, empty = answer.transaction_states
    assert (unknown.error_code, empty.error_code) == (
        ErrorCode.TRANSACTIONAL_ID_NOT_FOUND,
        ErrorCode.INVALID_REQUEST,
    )
    assert (found.producer_id, found.producer_epoch) == open_.identity
    assert (found.transaction_state, found.transaction_timeout_ms) == ("Ongoing", 800_000)
    assert [(each.topic, each.partitions) for each in found.topics] == [("out", [0])]
    assert found.transaction_start_time_ms == began_ms


# Memory


def test_what_is_large_goes_to_files(log, new_producer, monkeypatch):
    """All transactions together have a bound; the files are gone after the end."""
    monkeypatch.setattr(coordinator, "MAX_BUFFERED_BYTES", 1000)
    producers = [new_producer(name=f"{number}") for number in range(2)]
    staging = log.root.context.files
    for commits in (True, False):
        for producer in producers:
            producer.init()
            producer.begin(b"%s" % producer.name.encode())
            for number in range(20):
                assert producer.produce(b"x" * 100 + b"%d" % number)[0] == 0
        assert len(embedlog.publish.staging.job_directories(staging)) == 2
        assert [producer.end(committed=commits) for producer in producers] == [0, 0]
        assert embedlog.publish.staging.job_directories(staging) == []
    assert len(values(log)) == 42


def test_a_transaction_that_no_file_can_hold_must_be_aborted(log, new_producer, monkeypatch):
    """The record is refused, and so is the commit; the next transaction is a new one."""
    monkeypatch.setattr(coordinator, "MAX_BUFFERED_BYTES", 1000)
    producer = new_producer()
    producer.init()
    assert producer.begin(b"small") == (0, 0)
    staging = Path(log.path) / "staging"
    staging.touch()  # No directory can be made in it.
    code, _ = producer.produce(b"x" * 1000)
    staging.unlink()
    assert code == ErrorCode.KAFKA_STORAGE_ERROR
    assert producer.end() == ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert producer.end(committed=False) == 0
    assert producer.begin(b"after") == (0, 0)
    assert producer.end() == 0
    assert values(log) == [b"after"]


# A server that dies, and one that is started after it


@pytest.fixture(params=["in live", "in live, flushed", "published"])
def survivors(tmp_path, request, monkeypatch):
    """A log whose transactions are committed in each way, and a function that kills its server.

    The function forgets a server, as its death would, and returns the address of the next one.
    """
    if request.param == "published":
        monkeypatch.setattr(live_commit, "commit", lambda *_, **__: None)
    durability = "fsync" if "flushed" in request.param else "os"
    with embedlog.open(tmp_path / "log", durability=durability) as log, ExitStack() as stack:
        for topic in ("in", "out"):
            log.create_topic(topic, 1)

        def next_server() -> str:
            return stack.enter_context(embedlog.serve(log)).bootstrap_servers

        yield log, next_server
    with embedlog.open(tmp_path / "log") as log:
        assert log.housekeeping.verify() == []


def moved(producer: WireProducer, address: str) -> WireProducer:
    """Return the producer with a connection to another server."""
    producer.client.close()
    producer.client = WireClient(address)
    return producer


@BOTH
def test_a_transaction_that_was_lost_with_the_server_must_be_aborted(survivors, versions):
    """The producer is told so whatever it asks, and goes on after the abort."""
    log, next_server = survivors
    producer = WireProducer(next_server(), versions)
    producer.init()
    for number in range(2):
        producer.begin(b"committed %d" % number)
        assert producer.end() == 0
        producer.begin(b"lost")
        producer.send_offset(5)
        moved(producer, next_server())
        old = versions is CLASSIC
        assert producer.produce(b"x")[0] == (
            ErrorCode.INVALID_TXN_STATE if old else ErrorCode.INVALID_PRODUCER_EPOCH
        )
        assert producer.add_partition() == ErrorCode.INVALID_PRODUCER_ID_MAPPING
        if not old:
            assert producer.send_offset(5) == ErrorCode.TRANSACTION_ABORTABLE
        assert producer.end() == (
            ErrorCode.INVALID_PRODUCER_ID_MAPPING if old else ErrorCode.TRANSACTION_ABORTABLE
        )
        if number and old:
            # What a client does that cannot abort: the epoch before is its own.
            before = {"producer_id": producer.identity[0], "producer_epoch": producer.identity[1]}
            assert producer.init(**before) == 0
        else:
            assert producer.end(committed=False) == 0
    producer.begin(b"last")
    assert producer.end() == 0
    assert values(log) == [b"committed 0", b"committed 1", b"last"]
    assert committed(log) is None
    producer.client.close()


@BOTH
def test_a_producer_without_a_transaction_does_not_notice_that_a_server_died(survivors, versions):
    """It goes on with its identity and its sequence numbers."""
    log, next_server = survivors
    producer = WireProducer(next_server(), versions)
    producer.init()
    for number, commits in enumerate((True, False, True)):
        moved(producer, next_server())
        assert producer.begin(b"%d" % number)[0] == 0
        assert producer.end(committed=commits) == 0
    assert values(log) == [b"0", b"2"]
    producer.client.close()


@BOTH
def test_an_end_that_is_repeated_after_the_death_of_a_server(survivors, versions):
    """The answer did not come, so the client asks the next server, which knows."""
    log, next_server = survivors
    producer = WireProducer(next_server(), versions)
    producer.init()
    for number, commits in enumerate((True, False, True)):
        producer.begin(b"%d" % number)
        asked = producer.identity
        assert producer.end(committed=commits) == 0
        moved(producer, next_server())
        assert producer.end(not commits, identity=asked) == ErrorCode.INVALID_TXN_STATE
        assert producer.end(committed=commits, identity=asked) == 0
        assert producer.end(committed=commits, identity=asked) == 0
    assert values(log) == [b"0", b"2"]
    producer.client.close()


@BOTH
@pytest.mark.parametrize("survivors", ["published"], indirect=True)
def test_a_server_that_dies_after_a_publication_has_committed_it(survivors, versions, monkeypatch):
    """And could not note that: the next one finds the publication."""
    log, next_server = survivors
    producer = WireProducer(next_server(), versions)
    producer.init()
    producer.begin(b"x")
    asked, fence = producer.identity, live_commit.fence

    def dies(*args: Any, **options: Any) -> bool:
        if options:
            raise StorageError("It died here")
        return fence(*args)

    with monkeypatch.context() as patch:
        patch.setattr(live_commit, "fence", dies)
        assert producer.end() == 0
    moved(producer, next_server())
    assert producer.end(identity=asked) == 0
    assert producer.begin(b"y")[0] == 0
    assert producer.end() == 0
    assert values(log) == [b"x", b"y"]
    producer.client.close()


@BOTH
def test_a_commit_that_fails_late_is_tried_again(survivors, versions, monkeypatch):
    """It may have been made, so it cannot be aborted any more, and is not made twice."""
    log, next_server = survivors
    producer = WireProducer(next_server(), versions)
    producer.init()
    producer.begin(b"x")
    publish = ResumableTransactions._publish

    def fails_late(self: Any, version: int) -> None:
        publish(self, version)
        raise StorageError("It failed here")

    with monkeypatch.context() as patch:
        patch.setattr(ResumableTransactions, "_publish", fails_late)
        assert producer.end() == ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert producer.end(committed=False) == ErrorCode.INVALID_TXN_STATE
    assert producer.end() == 0
    assert producer.begin(b"y")[0] == 0
    assert producer.end() == 0
    assert values(log) == [b"x", b"y"]
    producer.client.close()


def test_what_began_before_the_machine_was_started_again_is_lost(log, new_producer):
    """Nothing in `live` says that a transaction has begun, or has not."""
    producer = new_producer()
    producer.init()
    log.root.context.live.write(checkpoint.TRANSACTIONS.delete_all)
    with embedlog.serve(log) as server:
        moved(producer, server.bootstrap_servers)
        assert producer.add_partition() == ErrorCode.INVALID_PRODUCER_ID_MAPPING
        assert producer.end(committed=False) == 0
        assert producer.begin(b"x") == (0, 0)
        assert producer.end() == 0
    assert values(log) == [b"x"]


class KilledServer:
    """``embedlog serve`` in a process of its own, which is killed, and started again.

    Args:
        path: The log.
    """

    def __init__(self, path: Path) -> None:
        self._command = [sys.executable, "-m", "embedlog", "serve", str(path), "--json"]
        self._start("127.0.0.1:0")

    def _start(self, address: str) -> None:
        command = [*self._command, "--listen", address]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.address = json.loads(self._process.stdout.readline())["bootstrap_servers"]

    def stop(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def restart(self) -> None:
        """Kill it, and start it again at the same address."""
        self.stop()
        self._start(self.address)


class Transformer:
    """Reads, transforms and writes in transactions, with confluent-kafka, until it is stopped.

    Args:
        address: The address of the server.
    """

    def __init__(self, address: str) -> None:
        self._address, self.stopped = address, threading.Event()
        self.outcomes: Counter[str] = Counter()

    def _client(self, kind: Any, **settings: Any) -> Any:
        names = {name.replace("_", "."): value for name, value in settings.items()}
        common = {
            "bootstrap.servers": self._address,
            "reconnect.backoff.ms": 10,
            "reconnect.backoff.max.ms": 200,
            "log_level": 0,
            # Otherwise librdkafka 2.16 waits for a group's coordinator that it has forgotten.
            "metadata.recovery.strategy": "none",
        }
        return kind({**common, **names})

    def run(self) -> None:
        """Begin again with new clients after each error that demands it."""
        while not self.stopped.is_set():
            producer = self._client(
                confluent_kafka.Producer, transactional_id="transformer", linger_ms=0
            )
            consumer = self._client(
                confluent_kafka.Consumer,
                group_id="g",
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                isolation_level="read_committed",
                heartbeat_interval_ms=200,
                # One that is closed while there is no server stays a member for so long.
                session_timeout_ms=6000,
            )
            consumer.subscribe(["in"])
            try:
                producer.init_transactions(patient(30))
                while not self.stopped.is_set() and self._step(producer, consumer):
                    pass
            except confluent_kafka.KafkaException as error:
                self.outcomes[f"begun again: {error.args[0].name()}"] += 1
            finally:
                consumer.close()

    def _step(self, producer: Any, consumer: Any) -> bool:
        """Do one transaction; return whether the consumer's position is that of the group."""
        messages = [each for each in consumer.consume(5, 0.1) if not each.error()]
        if not messages:
            return True
        producer.begin_transaction()
        try:
            for message in messages:
                producer.produce("out", message.value(), partition=message.partition())
            assignment = consumer.position(consumer.assignment())
            metadata = consumer.consumer_group_metadata()
            producer.send_offsets_to_transaction(assignment, metadata, patient(30))
            self._commit(producer)
            self.outcomes["committed"] += 1
            return True
        except confluent_kafka.KafkaException as error:
            if not error.args[0].txn_requires_abort():
                raise
            self.outcomes[f"aborted: {error.args[0].name()}"] += 1
            producer.abort_transaction(patient(30))
            return False

    def _commit(self, producer: Any) -> None:
        while True:
            try:
                return producer.commit_transaction(patient(30))
            except confluent_kafka.KafkaException as error:
                if not error.args[0].retriable():
                    raise


@pytest.mark.skipif(
    confluent_kafka.libversion()[1] < 0x020B0000,
    reason="librdkafka before 2.11 does not survive that its only broker is away",
)
def test_records_are_transformed_exactly_once_while_the_server_is_killed(tmp_path):
    """P1, G22: librdkafka's consumers and producers, whatever the server was doing."""
    count, kills, dice = choose(test=60, all=2000), choose(test=1, all=25), random.Random(7)
    with embedlog.open(tmp_path / "log") as log:
        for topic in ("in", "out"):
            log.create_topic(topic, 2)
        with log.producer() as python:
            for number in range(count):
                python.send("in", b"%d" % number, partition=number % 2)
        server = KilledServer(tmp_path / "log")
        transformer = Transformer(server.address)
        with in_threads(transformer.run):
            try:
                deadline = time.monotonic() + patient(60 + 4 * kills)
                for _ in range(kills):
                    before = len(values(log))
                    while len(values(log)) < min(before + dice.randrange(5, 60), count - 5):
                        assert time.monotonic() < deadline, transformer.outcomes
                        time.sleep(0.01)
                    time.sleep(dice.random() * 0.02)
                    server.restart()
                while len(values(log)) < count:
                    assert time.monotonic() < deadline, transformer.outcomes
                    time.sleep(0.05)
            finally:
                transformer.stopped.set()
        server.stop()
        assert sorted(values(log), key=int) == [b"%d" % number for number in range(count)]
        group = log.groups["g"].describe()
        assert sum(each.current_offset for each in group.partitions) == count
