"""The server, used by unchanged clients and by requests of any version."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import aiokafka
import confluent_kafka
import pyarrow as pa
import pytest
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
)
from support import forks
from support.children import in_threads
from support.forks import until
from support.patience import patient
from support.random_messages import random_message
from support.tiers import choose, sample
from support.wire_client import WireClient, request_bytes
from test_server_batches import batch_of, stored

import embedlog
from embedlog.errors import InvalidConfigError
from embedlog.kafka.kafka_python import kafka
from embedlog.record import TopicPartition
from embedlog.server import server as server_module
from embedlog.server.error_codes import ErrorCode
from embedlog.server.fetch import Fetcher
from embedlog.server.record_batches import write_batches
from embedlog.server.server import APIS, offered

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
_NUMBERS = {"num_partitions": 1, "replication_factor": 1}


@pytest.fixture
def address(kafka_server):
    return kafka_server.bootstrap_servers


@pytest.fixture
def client(address):
    with WireClient(address) as client:
        yield client


def confluent(address: str, **config: Any) -> dict[str, Any]:
    dotted = {name.replace("_", "."): value for name, value in config.items()}
    return {"bootstrap.servers": address, **dotted}


def polled(consumer: Any, count: int) -> list[Any]:
    """Return so many messages of confluent-kafka's consumer."""
    messages: list[Any] = []
    while len(messages) < count:
        messages += (some := consumer.consume(count - len(messages), timeout=patient(30)))
        assert some, f"only {len(messages)} of {count} messages came"
        assert not [each.error() for each in some if each.error()]
    return messages


def produced(records: list[Any]) -> bytes:
    """Return the batch that a producer sends."""
    return b"".join(next(write_batches([stored(records, 0)])))


def produce(client: WireClient, topic: str, data: bytes | None, version: int = 9, acks: int = -1):
    """Send a batch to partition 0, and return the answer for it."""
    partition = {"index": 0, "records": data}
    topics = [{"name": topic, "partition_data": [partition]}]
    answer = client.ask("Produce", version, acks=acks, timeout_ms=1000, topic_data=topics)
    return answer.responses[0].partition_responses[0]


def fetch(client: WireClient, topic: str, offset: int, version: int = 11, **options: Any) -> Any:
    """Return the answer of partition 0."""
    partition = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 1 << 20}
    fields = {"max_wait_ms": 0, "min_bytes": 1, "max_bytes": 1 << 20, **options}
    topics = [{"topic": topic, "partitions": [partition]}]
    answer = client.ask("Fetch", version, topics=topics, **fields)
    assert not answer.error_code
    return answer.responses[0].partitions[0]


# Clients


@pytest.mark.parametrize("codec", sample(CODECS, 2))
def test_confluent_kafka_writes_what_python_reads(embedlog_log, address, codec):
    """Idempotently, with each codec; headers, null keys and null values are kept."""
    embedlog_log.create_topic("orders", 2)
    producer = confluent_kafka.Producer(
        confluent(address, compression_type=codec, enable_idempotence=True)
    )
    reports: list[Any] = []
    for number in range(100):
        producer.produce(
            "orders",
            None if number == 7 else b"%d" % number,
            key=None if number == 8 else b"k%d" % number,
            headers=[("h", b"x"), ("n", None)] if number == 9 else None,
            partition=number % 2,
            on_delivery=lambda error, message: reports.append((error, message.offset())),
        )
    assert producer.flush(patient(30)) == 0
    assert sorted(reports) == sorted((None, offset) for offset in [*range(50)] * 2)
    records = sorted(embedlog_log.topic("orders"), key=lambda each: (each.offset, each.partition))
    assert [each.value for each in records] == [None if n == 7 else b"%d" % n for n in range(100)]
    assert records[8].key is None
    assert records[9].headers == [("h", b"x"), ("n", None)]


def test_confluent_kafka_reads_what_python_writes(embedlog_log, address):
    """In a group, whose offsets are those of the log: Python sees them, and continues there."""
    with embedlog_log.producer(compression_type="zstd") as python:
        for number in range(300):
            headers = [("h", b"x")] if number == 3 else None
            python.send("orders", b"%d" % number, key=b"k", headers=headers)
    consumer = confluent_kafka.Consumer(
        confluent(address, group_id="g", auto_offset_reset="earliest", enable_auto_commit=False)
    )
    consumer.subscribe(["orders"])
    messages = polled(consumer, 300)
    assert [each.value() for each in messages] == [b"%d" % number for number in range(300)]
    assert messages[3].headers() == [("h", b"x")]
    assert [each.offset() for each in messages] == [*range(300)]
    consumer.commit(message=messages[199], asynchronous=False)
    consumer.close()
    described = embedlog_log.groups["g"].describe()
    assert [each.current_offset for each in described.partitions] == [200]
    with embedlog_log.consumer("orders", group_id="g") as python:
        assert next(python).value == b"200"


def test_kafka_python_over_the_wire(embedlog_log, address):
    """Admin, producer, and a group with a static member."""
    admin = kafka.KafkaAdminClient(bootstrap_servers=address)
    admin.create_topics([kafka.admin.NewTopic("orders", 3, 1)])
    producer = kafka.KafkaProducer(bootstrap_servers=address, acks="all")
    for number in range(30):
        producer.send("orders", b"%d" % number, key=b"%d" % number)
    producer.flush()
    producer.close()
    consumer = kafka.KafkaConsumer(
        "orders",
        bootstrap_servers=address,
        group_id="g",
        group_instance_id="one",
        auto_offset_reset="earliest",
        consumer_timeout_ms=int(patient(30_000)),
    )
    values = {next(consumer).value for _ in range(30)}
    assert values == {b"%d" % number for number in range(30)}
    consumer.commit()
    described = admin.describe_groups(["g"])["g"]
    assert described["group_state"] == "Stable"
    consumer.close()
    admin.close()
    assert embedlog_log.groups["g"].lag() == {TopicPartition("orders", n): 0 for n in range(3)}


def test_aiokafka_over_the_wire(embedlog_log, address):
    """Its producer and a group, on one loop."""
    embedlog_log.create_topic("orders", 2)

    async def run() -> list[bytes]:
        producer = aiokafka.AIOKafkaProducer(bootstrap_servers=address, enable_idempotence=True)
        await producer.start()
        for number in range(20):
            await producer.send_and_wait("orders", b"%d" % number, partition=number % 2)
        await producer.stop()
        consumer = aiokafka.AIOKafkaConsumer(
            "orders", bootstrap_servers=address, group_id="g", auto_offset_reset="earliest"
        )
        await consumer.start()
        values = [(await asyncio.wait_for(anext(consumer), patient(30))).value for _ in range(20)]
        await consumer.commit()
        await consumer.stop()
        return values

    assert sorted(asyncio.run(run()), key=int) == [b"%d" % number for number in range(20)]


def test_two_consumers_share_the_partitions(embedlog_log, address):
    """And one gets those of the other, which leaves."""
    embedlog_log.create_topic("orders", 4)
    settings = confluent(address, group_id="g", heartbeat_interval_ms=100)
    consumers = [confluent_kafka.Consumer(settings) for _ in range(2)]
    for consumer in consumers:
        consumer.subscribe(["orders"])
    counts: list[int] = []
    while counts != [2, 2]:
        for consumer in consumers:
            consumer.poll(0.05)
        counts = [len(consumer.assignment()) for consumer in consumers]
    consumers[0].close()
    while len(consumers[1].assignment()) < 4:
        consumers[1].poll(0.05)
    consumers[1].close()


def test_confluent_kafka_administers(embedlog_log, address):
    """Topics, partitions, settings, records and groups; three replicas are one here."""
    admin = AdminClient(confluent(address))
    for future in admin.create_topics([NewTopic("orders", 1, 3)]).values():
        future.result()
    for future in admin.create_partitions([NewPartitions("orders", 3)]).values():
        future.result()
    assert embedlog_log.root.partitions("orders") == 3
    operation = AlterConfigOpType.SET
    entry = ConfigEntry("retention.ms", "60000", incremental_operation=operation)
    resource = ConfigResource("TOPIC", "orders", incremental_configs=[entry])
    for future in admin.incremental_alter_configs([resource]).values():
        future.result()
    (future,) = admin.describe_configs([ConfigResource("TOPIC", "orders")]).values()
    assert future.result()["retention.ms"].value == "60000"
    with embedlog_log.producer() as producer:
        producer.send("orders", b"1", partition=0).result()
        producer.send("orders", b"2", partition=0).result()
    partition = confluent_kafka.TopicPartition("orders", 0, 1)
    (future,) = admin.delete_records([partition]).values()
    assert future.result().low_watermark == 1
    assert embedlog_log.topic("orders").ranges()[0].start == 1
    assert admin.describe_cluster().result().cluster_id == embedlog_log.root.id
    with pytest.raises(confluent_kafka.KafkaException) as refused:
        admin.create_topics([NewTopic("orders", 1, 1)])["orders"].result()
    assert refused.value.args[0].code() == ErrorCode.TOPIC_ALREADY_EXISTS
    for future in admin.delete_topics(["orders"]).values():
        future.result()
    assert "orders" not in embedlog_log


@pytest.mark.parametrize(
    ("partition", "replicas", "code"),
    [
        (0, [0], ErrorCode.NONE),
        (0, [1], ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (0, [], ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (0, None, ErrorCode.NO_REASSIGNMENT_IN_PROGRESS),
        (7, [0], ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    ],
)
def test_one_directory_is_a_cluster_of_one_broker(embedlog_log, client, partition, replicas, code):
    """A partition is where it is, and can be moved nowhere else."""
    embedlog_log.create_topic("orders")
    partitions = [{"partition_index": partition, "replicas": replicas}]
    topics = [{"name": "orders", "partitions": partitions}]
    answer = client.ask("AlterPartitionReassignments", 0, topics=topics)
    assert answer.error_code == 0
    assert answer.responses[0].partitions[0].error_code == code


@pytest.mark.skipif(shutil.which("kcat") is None, reason="there is no kcat")
def test_kcat(embedlog_log, address):
    kcat = ["kcat", "-b", address, "-t", "orders"]
    subprocess.run([*kcat, "-P", "-K:", "-z", "lz4"], input=b"k:one\nk:two\n", check=True)
    command = [*kcat, "-C", "-e", "-q", "-f", "%k=%s@%o "]
    read = subprocess.run(command, capture_output=True, check=True, timeout=patient(60))
    assert read.stdout == b"k=one@0 k=two@1 "
    assert [record.value for record in embedlog_log.topic("orders")] == [b"one", b"two"]


# Produce


def test_each_version_of_produce_and_fetch(embedlog_log, client):
    """The records come back as they were, by name and by the id of the topic."""
    embedlog_log.create_topic("orders")
    (topic,) = client.ask("Metadata", 12, topics=[{"name": "orders"}]).topics
    records = [(b"k", b"v", 1000, [])]
    first, last = offered()["Produce"]
    for number, version in enumerate(range(first, last + 1)):
        partition = {"index": 0, "records": produced(records)}
        topics = [
            {"name": "orders", "topic_id": topic.topic_id, "partition_data": [partition]},
        ]
        answer = client.ask("Produce", version, acks=1, timeout_ms=1000, topic_data=topics)
        (response,) = answer.responses[0].partition_responses
        assert (response.error_code, response.base_offset) == (0, number)
    first, last = offered()["Fetch"]
    for version in range(first, last + 1):
        partition = {"partition": 0, "fetch_offset": 1, "partition_max_bytes": 1 << 20}
        topics = [{"topic": "orders", "topic_id": topic.topic_id, "partitions": [partition]}]
        answer = client.ask("Fetch", version, max_bytes=1 << 20, topics=topics)
        (response,) = answer.responses[0].partitions
        assert (response.error_code, response.high_watermark) == (0, number + 1)
        batches = kafka.record.MemoryRecords(bytes(response.records))
        assert [(each.offset, each.value) for each in batches.next_batch()] == [(1, b"v")]


def test_without_acks_nothing_is_answered(embedlog_log, client):
    """The next answer is that of the next request."""
    embedlog_log.create_topic("orders")
    topics = [{"name": "orders", "partition_data": [{"index": 0, "records": batch_of()}]}]
    client.send(request_bytes("Produce", 9, acks=0, topic_data=topics))
    assert client.ask("Heartbeat", 4, group_id="g").error_code == ErrorCode.UNKNOWN_MEMBER_ID
    assert len(list(embedlog_log.topic("orders"))) == 1


def test_what_cannot_be_appended_has_kafkas_codes(embedlog_log, client):
    """And nothing of it is in the log (W2)."""
    embedlog_log.create_topic("orders", config={"max.message.bytes": 200})
    embedlog_log.create_topic("compacted", config={"cleanup.policy": "compact"})
    without_key = produced([(b"k", b"v", 1, []), (None, b"v", 1, [])])
    cases = [
        ("missing", batch_of(), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ("__audit", batch_of(), ErrorCode.INVALID_TOPIC_EXCEPTION),
        ("orders", None, ErrorCode.INVALID_RECORD),
        ("orders", batch_of(magic=1), ErrorCode.INVALID_RECORD),
        ("orders", batch_of(crc=1), ErrorCode.CORRUPT_MESSAGE),
        ("orders", produced([(b"k", bytes(300), 1, [])]), ErrorCode.MESSAGE_TOO_LARGE),
        ("compacted", without_key, ErrorCode.INVALID_RECORD),
    ]
    for topic, data, code in cases:
        assert produce(client, topic, data).error_code == code, (topic, code)
    (error,) = produce(client, "compacted", without_key).record_errors
    assert error.batch_index == 1
    assert produce(client, "orders", batch_of(), acks=2).error_code == (
        ErrorCode.INVALID_REQUIRED_ACKS
    )
    assert list(embedlog_log.topic("orders")) == list(embedlog_log.topic("compacted")) == []


@pytest.mark.parametrize("schema", [None, pa.schema([("seats", pa.int32())])])
def test_each_record_with_an_invalid_timestamp_has_an_error(
    embedlog_log, embedlog_clock, client, schema
):
    """The others of its batch have none, and nothing of the batch is in the log."""
    now, hour = embedlog_clock.now_ms, 3_600_000
    for setting, bad in (("before", now - 2 * hour), ("after", now + 2 * hour)):
        topic = f"orders-{setting}"
        config = {f"message.timestamp.{setting}.max.ms": hour}
        embedlog_log.create_topic(topic, config=config, schema=schema)
        records = [(None, b'{"seats": 1}', time, []) for time in (now, bad, now, bad)]
        refused = produce(client, topic, produced(records))
        assert refused.error_code == ErrorCode.INVALID_TIMESTAMP
        assert refused.error_message == (
            "One or more records have been rejected due to invalid timestamp"
        )
        assert [each.batch_index for each in refused.record_errors] == [1, 3]
        assert all(str(bad) in each.batch_index_error_message for each in refused.record_errors)
        assert list(embedlog_log.topic(topic)) == []


def test_sequence_numbers_are_checked(embedlog_log, client):
    """A batch that is sent again has its first offset, and one that skips numbers is refused."""
    embedlog_log.create_topic("orders")
    answer = client.ask("InitProducerId", 4, transactional_id=None)
    producer = {"pid": answer.producer_id, "pepoch": answer.producer_epoch}
    for seq, code, offset in ((0, 0, 0), (1, 0, 1), (0, 0, 0), (5, 45, -1)):
        response = produce(client, "orders", batch_of(**producer, seq=seq))
        assert (response.error_code, response.base_offset) == (code, offset)
    old = batch_of(pid=answer.producer_id, pepoch=answer.producer_epoch + 1, seq=0)
    assert produce(client, "orders", old).error_code == 0
    response = produce(client, "orders", batch_of(**producer, seq=2))
    assert response.error_code == ErrorCode.INVALID_PRODUCER_EPOCH


def test_the_time_of_the_append(embedlog_log, embedlog_clock, client):
    """Producers are told it, and consumers get it, with its kind."""
    config = {"message.timestamp.type": "LogAppendTime"}
    embedlog_log.create_topic("orders", config=config)
    response = produce(client, "orders", batch_of())
    assert response.log_append_time_ms == embedlog_clock.now_ms
    records = kafka.record.MemoryRecords(bytes(fetch(client, "orders", 0).records))
    (record,) = records.next_batch()
    assert (record.timestamp, record.timestamp_type) == (embedlog_clock.now_ms, 1)


# Fetch


def test_an_append_of_python_wakes_a_fetch(embedlog_log, address, client):
    """Which waits for it far longer than this test may take (W1)."""
    embedlog_log.create_topic("orders")
    assert fetch(client, "orders", 0).records == b""

    def append() -> None:
        threading.Event().wait(0.05)
        embedlog_log.producer().send("orders", b"v").result()

    with in_threads(append):
        response = fetch(client, "orders", 0, max_wait_ms=3_600_000)
    assert response.high_watermark == 1
    assert response.records


def test_offsets_out_of_range_and_at_the_end(embedlog_log, client):
    embedlog_log.create_topic("orders")
    assert fetch(client, "orders", 0).error_code == 0
    assert fetch(client, "orders", 1).error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    assert fetch(client, "orders", -1).error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    missing = fetch(client, "missing", 0)
    assert missing.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_a_fetch_returns_one_batch_in_any_case(embedlog_log, client):
    """However small its limit is (KIP-74), and from inside of a batch that batch (W3)."""
    with embedlog_log.producer() as producer:
        producer.send_batch("orders", [bytes(5000)] * 10, partition=0).result()
        producer.send_batch("orders", [bytes(5000)] * 10, partition=0).result()
    response = fetch(client, "orders", 15, max_bytes=1)
    records = [each.offset for each in offsets_of(response)]
    assert records == [*range(10, 20)]
    everything = fetch(client, "orders", 0, max_bytes=1 << 30)
    assert [each.offset for each in offsets_of(everything)] == [*range(20)]


def test_compressed_records_are_returned_up_to_the_limit(embedlog_log, client):
    """However much they are compressed; the next fetch continues where the first one ended."""
    with embedlog_log.producer(compression_type="zstd") as producer:
        for number in range(20):
            values = [b"%d" % number + bytes(100_000)] * 3
            producer.send_batch("orders", values, partition=0).result()
    offset, sizes = 0, []
    while records := offsets_of(response := fetch(client, "orders", offset)):
        assert [each.offset for each in records] == [*range(offset, offset + len(records))]
        assert all(each.value.startswith(b"%d\0" % (each.offset // 3)) for each in records)
        offset += len(records)
        sizes.append(len(response.records))
    assert offset == 60
    assert max(sizes) < 2 << 20


def test_what_follows_a_full_answer_is_converted_before_it_is_asked_for(
    embedlog_log, address, client, monkeypatch
):
    """And is what the log has; records that are deleted meanwhile are gone."""
    with embedlog_log.producer() as producer:
        for number in range(30):
            producer.send_batch("orders", [b"%d" % number * 100] * 9, partition=0).result()
    converted: list[int] = []

    def noting(fetcher: Fetcher, log: Any, reader: Any, limit: int) -> list[Any]:
        converted.append(reader.offset)
        return convert(fetcher, log, reader, limit)

    convert = Fetcher._converted
    monkeypatch.setattr(Fetcher, "_converted", noting)
    for limit in (500, 5000, 1 << 20):
        with WireClient(address) as reading:
            values, asked = list[bytes](), list[int]()
            while records := offsets_of(fetch(reading, "orders", len(values), max_bytes=limit)):
                asked.append(records[0].offset)
                values += [each.value for each in records]
        assert values == [each.value for each in embedlog_log.topic("orders")]
        assert converted[: len(asked)] == asked  # Each once.
        converted.clear()
    fetch(client, "orders", 0, max_bytes=600)
    until(lambda: converted == [0, 9], 10)
    embedlog_log.delete_records({TopicPartition("orders", 0): 18})
    refused = fetch(client, "orders", 9)
    assert refused.error_code == ErrorCode.OFFSET_OUT_OF_RANGE


def offsets_of(response: Any) -> list[Any]:
    batches, found = kafka.record.MemoryRecords(bytes(response.records)), []
    while batches.has_next():
        found += list(batches.next_batch())
    return found


def test_compacted_records_keep_their_offsets(embedlog_log, client):
    config = {"cleanup.policy": "compact"}
    embedlog_log.create_topic("orders", config=config)
    with embedlog_log.producer() as producer:
        for number in range(60):
            producer.send("orders", b"%d" % number, key=b"%d" % (number % 31)).result()
    embedlog_log.housekeeping.compact("orders", force=True)
    kept = [record.offset for record in embedlog_log.topic("orders")]
    assert len(kept) == 31
    assert [each.offset for each in offsets_of(fetch(client, "orders", 0))] == kept


@pytest.mark.parametrize(("kind", "name"), [(2, "orders"), (4, "0"), (32, "workers")])
def test_settings_have_documentation_for_who_asks(embedlog_log, client, kind, name):
    """For others not even an empty one: Java's admin client takes null for none."""
    embedlog_log.create_topic("orders")
    resources = [{"resource_type": kind, "resource_name": name, "configuration_keys": None}]
    for asks in (False, True):
        fields = {"resources": resources, "include_documentation": asks}
        (described,) = client.ask("DescribeConfigs", 4, **fields).results
        assert described.configs
        assert {each.documentation is not None for each in described.configs} == {asks}
    meanings = {each.name: each.documentation for each in described.configs}
    name, begins = {
        2: ("cleanup.policy", "delete, compact or compact,delete."),
        4: ("producer.id.expiration.check.interval.ms", "The interval of the check for producers"),
        32: ("errors.deadletterqueue.topic.name", "The topic of the records that the group gave"),
    }[kind]
    assert meanings[name].startswith(begins)


def test_topics_are_described_by_id(embedlog_log, client):
    """As Java's consumer asks for what a pattern has matched: with an empty name, or none."""
    embedlog_log.create_topic("orders")
    (named,) = client.ask("Metadata", 12, topics=[{"name": "orders"}]).topics
    unknown = uuid4()
    for name in ("", None):
        topics = [{"name": name, "topic_id": number} for number in (named.topic_id, unknown)]
        known, missing = client.ask("Metadata", 13, topics=topics).topics
        assert known == named
        assert (missing.name, missing.topic_id) == (None, unknown)
        assert missing.error_code == ErrorCode.UNKNOWN_TOPIC_ID


def test_a_topic_that_is_created_again_has_another_id(embedlog_log, client):
    """So that a consumer does not take its records for those of the first one."""
    ids = []
    for _ in range(2):
        embedlog_log.create_topic("orders")
        ids.append(client.ask("Metadata", 12, topics=[{"name": "orders"}]).topics[0].topic_id)
        embedlog_log.delete_topic("orders")
    assert ids[0] != ids[1]
    partition = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1}
    topics = [{"topic_id": ids[0], "partitions": [partition]}]
    answer = client.ask("Fetch", 15, topics=topics).responses[0].partitions[0]
    assert answer.error_code == ErrorCode.UNKNOWN_TOPIC_ID


def test_offsets_are_found_by_time_and_epoch(embedlog_log, client):
    with embedlog_log.producer() as producer:
        for number in range(5):
            producer.send("orders", b"v", timestamp_ms=1000 * number).result()
    expected = {-1: (5, -1), -2: (0, -1), 2500: (3, 3000), -3: (4, 4000), 9000: (-1, -1)}
    for spec, found in expected.items():
        topics = [{"name": "orders", "partitions": [{"partition_index": 0, "timestamp": spec}]}]
        (part,) = client.ask("ListOffsets", 7, topics=topics).topics[0].partitions
        assert (part.offset, part.timestamp) == found, spec
    topics = [{"name": "orders", "partitions": [{"partition_index": 0, "timestamp": -3}]}]
    (part,) = client.ask("ListOffsets", 6, topics=topics).topics[0].partitions
    assert (part.offset, part.error_code) == (-1, ErrorCode.UNSUPPORTED_VERSION)
    partition = {"partition": 0, "leader_epoch": 0, "current_leader_epoch": -1}
    topics = [{"topic": "orders", "partitions": [partition]}]
    answer = client.ask("OffsetForLeaderEpoch", 4, topics=topics)
    assert answer.topics[0].partitions[0].end_offset == 5


def codes(answer: Any) -> list[int]:
    """Return the error codes of the first list of an answer."""
    return [each.error_code for each in next(each for each in answer if isinstance(each, list))]


def test_what_no_broker_accepts_has_its_code(embedlog_log, client):
    """As compared in tests/kafka/test_server_against_kafka.py."""
    embedlog_log.create_topic("orders", config={"cleanup.policy": "compact"})
    unknown = [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    invalid = [ErrorCode.INVALID_REQUEST]
    parts = [{"partition_index": 0, "offset": 0, "timestamp": -1}]
    names = [{"name": "a b", "partitions": parts, "partition_indexes": [0], "count": 2}]
    for api, version in (("ListOffsets", 7), ("DeleteRecords", 2)):
        answer = client.ask(api, version, topics=names)
        assert [each.error_code for each in answer.topics[0].partitions] == unknown, api
    assert codes(client.ask("CreatePartitions", 3, topics=names)) == unknown
    by_neither = [{"name": None, "topic_id": UUID(int=0)}]
    assert codes(client.ask("DeleteTopics", 6, topics=by_neither)) == invalid
    topic = {"name": "new", "num_partitions": 1, "replication_factor": 1}
    assert codes(client.ask("CreateTopics", 7, topics=[topic, topic])) == invalid
    none = [{**topic, "replication_factor": 0}]
    refused = [ErrorCode.INVALID_REPLICATION_FACTOR]
    assert codes(client.ask("CreateTopics", 7, topics=none)) == refused
    fewer = [{"name": "orders", "count": 3, "assignments": [{"broker_ids": [0]}]}]
    refused = [ErrorCode.INVALID_REPLICA_ASSIGNMENT]
    assert codes(client.ask("CreatePartitions", 3, topics=fewer)) == refused
    topics = [{"name": "orders", "partitions": parts}]
    deleted = client.ask("DeleteRecords", 2, topics=topics).topics[0].partitions[0]
    assert (deleted.error_code, deleted.low_watermark) == (ErrorCode.POLICY_VIOLATION, -1)
    null = [{"name": "retention.ms", "value": None, "config_operation": 0}]
    for kind, name, settings in ((2, "orders", null), (2, "", []), (9, "orders", []), (4, "7", [])):
        resource = {"resource_type": kind, "resource_name": name, "configs": settings}
        for api in ("AlterConfigs", "IncrementalAlterConfigs"):
            assert codes(client.ask(api, 1, resources=[resource])) == invalid, (api, kind, name)
    assert "new" not in embedlog_log.topics()


def test_what_tools_print_of_refused_changes_has_kafkas_words(embedlog_log, client):
    embedlog_log.create_topic("orders")
    topic = {"name": "new", "num_partitions": 1, "replication_factor": 1}
    null = [{"name": name, "value": None} for name in ("retention.ms", "segment.ms")]
    for changed, text in (
        ({"name": "orders"}, "Topic 'orders' already exists."),
        ({"configs": null}, "Null value not supported for topic configs: retention.ms,segment.ms"),
    ):
        (refused,) = client.ask("CreateTopics", 7, topics=[{**topic, **changed}]).topics
        assert (refused.error_message, "new" in embedlog_log.topics()) == (text, False)

    def altered(*changes: tuple[int, str, str | None]) -> tuple[int, str | None]:
        configs = [{"name": n, "value": v, "config_operation": kind} for kind, n, v in changes]
        resource = {"resource_type": 2, "resource_name": "orders", "configs": configs}
        (answer,) = client.ask("IncrementalAlterConfigs", 1, resources=[resource]).responses
        return answer.error_code, answer.error_message

    before = embedlog_log.topic("orders").config
    twice = (0, "retention.ms", "5"), (0, "retention.ms", "6")
    null = "Null value not supported for : retention.ms"
    not_a_list = "to key compression.type because its type is not LIST."
    for changes, code, text in (
        (twice, ErrorCode.INVALID_REQUEST, "Error due to duplicate config keys"),
        ([(0, "retention.ms", None)], ErrorCode.INVALID_REQUEST, null),
        ([(2, "compression.type", "lz4")], ErrorCode.INVALID_CONFIG, f"Can't APPEND {not_a_list}"),
        ([(3, "compression.type", "x")], ErrorCode.INVALID_CONFIG, f"Can't SUBTRACT {not_a_list}"),
    ):
        assert altered(*changes) == (code, text)
    assert embedlog_log.topic("orders").config == before
    for name, value in (("retention.min.consumed", "billing"), ("cleanup.policy", "compact")):
        assert altered((2, name, value)) == (0, None), name


def test_a_directory_has_the_space_of_its_disk(embedlog_log, client):
    (described,) = client.ask("DescribeLogDirs", 4, topics=None).results
    disk = shutil.disk_usage(embedlog_log.path)
    assert described.total_bytes == disk.total
    # Root may use what is reserved.
    assert 0.9 * disk.free < described.usable_bytes < 1.1 * (disk.total - disk.used)


def test_a_page_of_topics_ends_where_the_limit_is_reached(embedlog_log, client):
    for name in ("a", "b", "c"):
        embedlog_log.create_topic(name, 2)
    pages, cursor = [], None
    while True:
        answer = client.ask(
            "DescribeTopicPartitions", 0, topics=[], response_partition_limit=2, cursor=cursor
        )
        pages.append([each.name for each in answer.topics])
        cursor = answer.next_cursor and answer.next_cursor._asdict()
        if cursor is None:
            break
    assert pages == [["a"], ["b"], ["c"]]


# Typed topics


def test_typed_topics_are_json_on_the_wire(embedlog_log, client, address):
    """Both ways, with keys and tombstones; what does not fit is refused with its number."""
    columns = pa.schema([("id", pa.int64()), ("name", pa.string())])
    embedlog_log.create_topic("users", schema=columns, key="id")
    embedlog_log.producer().send("users", {"id": 1, "name": "ada"}).result()
    response = fetch(client, "users", 0)
    (record,) = offsets_of(response)
    assert json.loads(record.value) == {"id": 1, "name": "ada"}
    assert record.key == (1).to_bytes(8, "big")
    two = (2).to_bytes(8, "big")
    good = [(two, b'{"id": 2, "name": "bob"}', 5, []), (record.key, None, 6, [("h", b"x")])]
    assert produce(client, "users", produced(good)).error_code == 0
    records = list(embedlog_log.topic("users"))
    assert [each.value for each in records] == [
        {"id": 1, "name": "ada"},
        {"id": 2, "name": "bob"},
        None,
    ]
    assert records[2].headers == [("h", b"x")]
    wrong = [
        [(two, b'{"id": 2, "name": "bob"}', 5, []), (two, b'{"id": 3}', 6, [])],
        [(two, b'{"id": 2, "name": "bob"}', 5, []), (two, b"text", 6, [])],
        [(two, b'{"id": 2, "name": "bob"}', 5, []), (None, None, 6, [])],
        [(two, b'{"id": 2, "name": "bob"}', 5, []), (None, b'{"id": 2.5}', 6, [])],
        [(record.key, None, 5, []), (two, b'{"id": 3}', 6, [])],
    ]
    for bad in wrong:
        refused = produce(client, "users", produced(bad))
        assert refused.error_code == ErrorCode.INVALID_RECORD
        assert [each.batch_index for each in refused.record_errors] in ([1], [])
    assert len(list(embedlog_log.topic("users"))) == 3
    values = [each.value for each in offsets_of(fetch(client, "users", 0))]
    assert [value and json.loads(value)["id"] for value in values] == [1, 2, None]


# Connections


def test_the_docs_list_what_is_answered():
    page = Path(__file__).parent.parent / "docs" / "serve.md"
    table = page.read_text(encoding="utf-8").partition("| area | APIs |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", table)) == sorted(APIS)


def test_each_client_is_told_the_address_that_it_has_connected_to(embedlog_log):
    with embedlog.serve(embedlog_log, "0.0.0.0", insecure=True) as server:
        for host in ("127.0.0.1", "127.0.0.2"):
            with WireClient(f"{host}:{server.port}") as client:
                (broker,) = client.ask("Metadata", 12, topics=[]).brokers
                assert (broker.host, broker.port) == (host, server.port)


def test_versions_are_negotiated_from_any_version(client):
    """A client that is newer than the server gets its versions in the oldest form."""
    client.send(struct.pack(">ihhih", 12, 18, 99, 5, -1) + b"\0\0")
    answer = client.decoded("ApiVersions", 0)
    assert answer.error_code == ErrorCode.UNSUPPORTED_VERSION
    versions = {each.api_key: (each.min_version, each.max_version) for each in answer.api_keys}
    assert versions[0] == (0, 13)


@pytest.mark.parametrize(
    ("software", "code"), [("apache-kafka.java", 0), ("", 42), ("a client", 42), ("kafka-", 42)]
)
def test_the_software_of_a_client_has_a_name(client, software, code):
    """As in Kafka, which counts clients by it."""
    names = {"client_software_name": software, "client_software_version": "4.3.1"}
    assert client.ask("ApiVersions", 4, **names).error_code == code


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff\x00\x00",
        b"\x00\x00\x00\x00\x00\x00",
        b"\x7f\xff\xff\xff\x00\x00",
        struct.pack(">ihhih", 10, 0, 2, 5, -1),
        struct.pack(">ihhih", 10, 999, 0, 5, -1),
        struct.pack(">ihhih", 10, 3, 1, 5, 1000),
        request_bytes("Metadata", 12, topics=[])[:-1] + b"\x7f",
    ],
    ids=["http", "negative", "empty", "huge", "old", "unknown", "name", "tags"],
)
def test_what_is_no_request_closes_its_connection(kafka_server, address, client, data, caplog):
    """With one line in the log, and no other connection is disturbed (W6)."""
    with WireClient(address) as hostile:
        hostile.send(data)
        assert hostile.answer() is None
    assert client.ask("Metadata", 12, topics=[]).brokers
    assert len([each for each in caplog.records if "Closed the connection" in each.message]) == 1


def test_large_requests_wait_until_there_is_memory_for_them(kafka_server, address, client):
    """Those that are announced and do not come, or have to wait, keep no others from answers."""
    with ExitStack() as stack:
        for _ in range(4):
            large = stack.enter_context(WireClient(address))
            large.send(struct.pack(">ihhih", 99 << 20, 0, 9, 1, -1) + bytes(100))
        assert client.ask("Metadata", 12, topics=[]).brokers
        with open("/proc/self/status") as status:
            resident = int(status.read().partition("VmRSS:")[2].split()[0])
        assert resident < 3 << 20  # In KiB: none of it was filled.


def test_a_server_counts_requests_errors_and_connections(
    embedlog_log, kafka_server, client, monkeypatch
):
    """One count for each request, under Kafka's names; those of the log have them, too."""
    batch, request = batch_of(), request_bytes("Metadata", 12, topics=[])
    missing = request_bytes("ListOffsets", 6, topics=[{"name": "x", "partitions": [{}]}])
    client.ask("CreateTopics", 7, topics=[{"name": "orders", **_NUMBERS}])
    assert produce(client, "orders", batch).error_code == 0
    answers = []
    for each in (request, request, missing):
        client.send(each)
        answers.append(len(client.answer()) + 4)

    def connections() -> float:
        return kafka_server.metrics()["socket-server-metrics"]["connection-count"]

    with WireClient(kafka_server.bootstrap_servers):
        until(lambda: connections() == 2)
    until(lambda: connections() == 1)
    until(lambda: "kafka.network.RequestMetrics.ListOffsets" in kafka_server.metrics())
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 1)
    with WireClient(kafka_server.bootstrap_servers) as refused:
        assert refused.answer() is None

    metrics = kafka_server.metrics()
    requests = metrics["kafka.network.RequestMetrics.Metadata"]
    assert requests["requests-total"] == 2
    assert requests["request-bytes-total"] == 2 * (len(request) - 4)
    assert requests["response-bytes-total"] == sum(answers[:2])
    assert 0 < requests["total-time-ms-max"] < requests["total-time-ms-total"]
    produced = metrics["kafka.network.RequestMetrics.Produce"]
    assert produced["requests-total"] == 1 and produced["request-bytes-total"] > len(batch)
    errors = metrics["kafka.network.RequestMetrics.errors.UNKNOWN_TOPIC_OR_PARTITION"]
    assert errors == {"errors-total": 1}
    sockets = metrics["socket-server-metrics"]
    assert (sockets["connection-creation-total"], sockets["connection-close-total"]) == (2, 1)
    assert sockets["connection-refused-total"] == 1
    of_log = embedlog_log.metrics()
    assert {key: of_log[f"server-1.{key}"] for key in metrics} == metrics
    counter = 'kafka_network_requestmetrics_requests_total{client_id="server-1",request="Produce"}'
    assert f"{counter} 1\n" in embedlog_log.prometheus()
    kafka_server.close()
    assert not [key for key in embedlog_log.metrics() if key.startswith("server-1")]


def test_a_server_is_closed_with_its_log(tmp_path):
    """Whoever forgets it has no thread that uses a closed log."""
    with embedlog.open(tmp_path / "log") as log:
        server = embedlog.serve(log)
    with pytest.raises(ConnectionRefusedError):
        WireClient(server.bootstrap_servers)


def test_a_forked_child_has_no_part_in_a_server(tmp_path):
    """It closes the log that it inherited, and keeps no port; the server goes on."""
    with embedlog.open(tmp_path / "log") as log:
        server = embedlog.serve(log)
        assert forks.call(lambda: (log.metrics(), log.close())[1]) is None
        with WireClient(server.bootstrap_servers) as client:
            assert client.ask("Metadata", 12, topics=[]).brokers
        child = forks.Child(lambda: signal.pause())
        server.close()
        with pytest.raises(ConnectionRefusedError):
            WireClient(server.bootstrap_servers)
        assert child.kill().killed


def test_random_bytes_do_no_harm(kafka_server, address, client):
    """Frames of random bytes, and requests with bytes that were changed or are missing."""
    dice = random.Random(7)
    topics = [{"name": "orders", "partition_data": [{"index": 0, "records": batch_of()}]}]
    good = request_bytes("Produce", 9, acks=-1, timeout_ms=9, topic_data=topics)
    others = [request_bytes("Metadata", 12, topics=[]), request_bytes("ListGroups", 5)]
    for number in range(choose(test=100, all=20_000, nightly=1_000_000)):
        frame = dice.randbytes(dice.randrange(6, 60))
        if number % 2:
            frame = bytearray(dice.choice((good, *others))[4:])
            for _ in range(dice.randrange(1, 4)):
                frame[dice.randrange(len(frame))] = dice.randrange(256)
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as hostile:
            hostile.sendall(struct.pack(">i", len(frame)) + frame)
            hostile.shutdown(socket.SHUT_WR)
            while hostile.recv(1 << 16):
                pass
    assert client.ask("Metadata", 12, topics=[]).brokers


def test_random_requests_are_answered(embedlog_log, address):
    """Whatever their fields are, in each version of each API; or the connection is closed."""
    embedlog_log.create_topic("abc")
    dice, client = random.Random(8), WireClient(address)
    for api, (first, last) in offered().items():
        for version in range(first, last + 1):
            for _ in range(choose(test=1, all=30)):
                fields = random_message(f"{api}Request", version, dice)
                # Those that wait may wait long.
                short = {"max_wait_ms": 0, "acks": 1, "session_timeout_ms": 0}
                fields |= {name: short[name] for name in short.keys() & fields.keys()}
                client.send(request_bytes(api, version, **fields))
                if client.answer() is None:
                    client.close()
                    client = WireClient(address)
    client.close()


def test_an_address_of_other_hosts_is_refused(embedlog_log):
    with pytest.raises(InvalidConfigError, match="insecure"):
        embedlog.serve(embedlog_log, "0.0.0.0")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_only_the_owner_of_the_directory_connects(embedlog_log, address):
    """The kernel says who is at the other end of a connection of this host (W7)."""
    connect = (
        "import os, socket, sys\n"
        "os.setuid(65534)\n"
        "host, port = sys.argv[1].split(':')\n"
        "end = socket.socket()\n"
        "end.connect((host, int(port)))\n"
        "sys.exit(bool(end.recv(1)))\n"
    )
    os.chmod(embedlog_log.path, 0o700)
    process = [sys.executable, "-S", "-c", connect, address]
    assert subprocess.run(process, timeout=patient(60)).returncode == 0
    with WireClient(address) as client:
        assert client.ask("Metadata", 12, topics=[]).brokers


def test_clients_of_ipv6_connect(embedlog_log, address):
    """To its address, and by sockets that are for both kinds, as those of Java are."""
    host, port = address.split(":")
    with socket.socket(socket.AF_INET6) as both:
        both.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        both.connect((f"::ffff:{host}", int(port)))
        both.sendall(request_bytes("Metadata", 12, topics=[]))
        assert both.recv(1)
    with embedlog.serve(embedlog_log, "::1") as server, WireClient(server.bootstrap_servers) as six:
        assert six.ask("Metadata", 12, topics=[]).brokers[0].host == "::1"


def test_closing_ends_requests_that_wait(embedlog_log):
    """And connections; what was answered is in the log."""
    embedlog_log.create_topic("orders")
    with embedlog.serve(embedlog_log) as server:
        client = WireClient(server.bootstrap_servers)
        produce(client, "orders", batch_of())
        partition = {"partition": 0, "fetch_offset": 1, "partition_max_bytes": 1}
        topics = [{"topic": "orders", "partitions": [partition]}]
        client.send(request_bytes("Fetch", 11, max_wait_ms=1 << 30, min_bytes=1, topics=topics))
    client.close()
    assert len(list(embedlog_log.topic("orders"))) == 1


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_the_command_serves_until_a_signal(tmp_path, number, code):
    """It creates the log and says where it listens; what it acknowledged is there."""
    command = [sys.executable, "-m", "embedlog", "serve", str(tmp_path / "log"), "--listen"]
    process = subprocess.Popen([*command, "127.0.0.1:0", "--json"], stdout=subprocess.PIPE)
    address = json.loads(process.stdout.readline())["bootstrap_servers"]
    with WireClient(address) as client:
        answer = client.ask("CreateTopics", 7, topics=[{"name": "orders", **_NUMBERS}])
        assert answer.topics[0].error_code == 0
        assert produce(client, "orders", batch_of()).error_code == 0
    process.send_signal(number)
    assert process.wait(patient(60)) == code
    process.stdout.close()
    with embedlog.open(tmp_path / "log") as log:
        assert len(list(log.topic("orders"))) == 1


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_command_creates_no_topics_by_itself_if_told_so(tmp_path, workers):
    """Neither for who asks for one, nor for who writes to it; clients may create it."""
    command = [sys.executable, "-m", "embedlog", "serve", str(tmp_path / "log"), "--json"]
    command += ["--listen", "127.0.0.1:0", "--workers", workers, "--no-auto-create-topics"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        addresses = json.loads(process.stdout.readline())["bootstrap_servers"].split(",")
        for address in addresses:
            with WireClient(address) as client:
                unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                asked = {"topics": [{"name": "orders"}], "allow_auto_topic_creation": True}
                assert client.ask("Metadata", 9, **asked).topics[0].error_code == unknown
                assert produce(client, "orders", batch_of()).error_code == unknown
        with WireClient(addresses[0]) as client:
            answer = client.ask("CreateTopics", 7, topics=[{"name": "orders", **_NUMBERS}])
            assert answer.topics[0].error_code == 0
            assert produce(client, "orders", batch_of()).error_code == 0
        process.terminate()


def test_a_log_that_is_read_only(embedlog_log):
    """Everything that would change it is refused; offsets and records can be read."""
    embedlog_log.create_topic("orders")
    embedlog_log.producer().send("orders", b"v").result()
    with embedlog.open(embedlog_log.path, mode="r") as log, embedlog.serve(log) as server:
        with WireClient(server.bootstrap_servers) as client:
            assert len(offsets_of(fetch(client, "orders", 0))) == 1
            refused = produce(client, "orders", batch_of())
            assert refused.error_code == ErrorCode.POLICY_VIOLATION
            answer = client.ask("CreateTopics", 7, topics=[{"name": "new", **_NUMBERS}])
            assert answer.topics[0].error_code == ErrorCode.POLICY_VIOLATION
            topics = [{"name": "orders", "partition_indexes": [0]}]
            answer = client.ask("OffsetFetch", 7, group_id="g", topics=topics)
            assert answer.topics[0].partitions[0].committed_offset == -1
