"""confluent_kafka's clients on a log: what programs written for it see."""

import copy
import gc
import json
import logging
import os
import pickle
import re
import threading
from pathlib import Path

import pytest
from support.children import in_threads, run_python
from support.patience import patient

import embedlog
from embedlog.consumer.open_group import open_group
from embedlog.kafka import bootstrap, confluent
from embedlog.kafka.confluent import (
    OFFSET_BEGINNING,
    OFFSET_INVALID,
    OFFSET_STORED,
    Consumer,
    ConsumerGroupTopicPartitions,
    DeserializingConsumer,
    KafkaError,
    KafkaException,
    Producer,
    SerializingProducer,
    TopicPartition,
)
from embedlog.kafka.confluent.admin import AdminClient, NewPartitions, NewTopic, OffsetSpec
from embedlog.kafka.confluent.error import KeySerializationError, ValueDeserializationError
from embedlog.kafka.confluent.serialization import (
    IntegerDeserializer,
    StringDeserializer,
    StringSerializer,
)

PARTITION = TopicPartition("t", 0, 0)
PROGRAM = Path(__file__).parent / "support" / "confluent_program.py"


@pytest.fixture
def log(tmp_path):
    """An open log, which the clients of the test share; healthy when it is done."""
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t", 2)
        yield log
        assert log.housekeeping.verify() == []


@pytest.fixture
def address(log):
    """The settings of a client of the log."""
    return {"bootstrap.servers": f"embedlog://{log.path}"}


def consumer_of(address, group="g", **settings):
    """Return a consumer that begins at the beginning."""
    dotted = {name.replace("_", "."): value for name, value in settings.items()}
    return Consumer({**address, "group.id": group, "auto.offset.reset": "earliest", **dotted})


def take(consumer, count):
    """Return so many records or events."""
    messages = consumer.consume(count, patient(10))
    assert len(messages) == count
    return messages


def code_of(call, *arguments, **named):
    """Return the name of the `KafkaError` that a call raises."""
    with pytest.raises(KafkaException) as caught:
        call(*arguments, **named)
    return caught.value.args[0].name()


def environment_of(bootstrap):
    """Return the environment of the program that uses everything, by its address."""
    return {**os.environ, "BOOTSTRAP": str(bootstrap), "SECONDS": str(patient(10))}


# Programs


def test_the_examples_of_confluent_kafka_run_with_another_import(address, capsys):
    """Its producer, consumer and admin client as its README shows them, in other words."""
    program = """
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

admin = AdminClient(address)
for topic, future in admin.create_topics([NewTopic("words", num_partitions=1)]).items():
    future.result()
    print("made", topic)

def report(error, message):
    print("failed" if error else "delivered", message.topic(), message.partition())

producer = Producer(**address)
for word in ("one", "two"):
    producer.poll(0)
    producer.produce("words", word.encode(), callback=report)
producer.flush()

consumer = Consumer({**address, "group.id": "readers", "auto.offset.reset": "earliest"})
consumer.subscribe(["words"])
words = []
while len(words) < 2:
    message = consumer.poll(1.0)
    if message is None:
        continue
    if message.error():
        print("error", message.error())
        continue
    words.append(message.value().decode())
consumer.close()
print(words)
"""
    exec(program.replace("confluent_kafka", "embedlog.kafka.confluent"), {"address": address})

    assert capsys.readouterr().out.splitlines() == [
        *("made words", "delivered words 0", "delivered words 0", "['one', 'two']")
    ]


# Where the clients come from


def test_host_and_port_make_clients_of_confluent_kafka():
    """So one variable of the environment moves a program between a log and a cluster."""
    original = pytest.importorskip("confluent_kafka", minversion="2.13")
    brokers = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0, "group.id": "g"}

    with Producer(brokers) as producer, Consumer(brokers) as consumer:
        assert type(producer) is original.Producer
        assert type(consumer) is original.Consumer
        # Its clients accept the types that programs import from here.
        consumer.assign([TopicPartition("t", 0)])
    assert confluent.KafkaException is original.KafkaException
    assert isinstance(
        AdminClient({"bootstrap.servers": "h:1", "log_level": 0}), original.admin.AdminClient
    )


def test_without_confluent_kafka_an_import_says_what_to_install():
    """The clients of kafka-python and the core do not need it."""
    modules = ("confluent", "confluent.admin", "confluent.schema_registry")
    program = (
        "import importlib, sys; sys.modules['confluent_kafka'] = None\n"
        "import embedlog, embedlog.testing\n"
        "from embedlog.kafka import KafkaProducer\n"
        f"for module in {modules}:\n"
        "    try: importlib.import_module(f'embedlog.kafka.{module}')\n"
        "    except ImportError as error: print(error)"
    )

    assert run_python("-c", program).splitlines() == [
        'confluent-kafka is not installed: run pip install "embedlog[confluent-kafka]"'
    ] * len(modules)


@pytest.mark.parametrize("kind", [Producer, SerializingProducer])
def test_a_derived_class_uses_a_log_or_brokers(address, kind):
    """The address decides which client its base is."""
    original = pytest.importorskip("confluent_kafka")

    class Mine(kind):
        def __init__(self, settings, name):
            super().__init__(settings)
            self.name = name

        def __bool__(self):
            return not super().__bool__()

    with Mine(address, "x") as producer:
        assert type(producer) is Mine
        assert (producer.name, bool(producer)) == ("x", False)
    producer = Mine({"bootstrap.servers": "127.0.0.1:1", "log_level": 0}, "y")
    assert (producer.name, bool(producer)) == ("y", False)
    assert isinstance(producer, Mine)
    assert isinstance(producer, kind)
    assert isinstance(producer, original.Producer)

    class Late(kind):
        def __init__(self):
            super().__init__({"bootstrap.servers": "127.0.0.1:1"})

    with pytest.raises(TypeError, match="add it there"):
        Late()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Consumer, {}),
        (Consumer, {"group.id": "g", "auto.offset.reset": "soon"}),
        (Producer, {"partitioner": "mine"}),
        (Producer, {"acks": "some"}),
    ],
)
def test_a_constructor_that_raises_gives_the_log_back(tmp_path, kind, settings):
    """At once, although the error refers to the client."""
    with pytest.raises((KafkaException, ValueError)) as caught:
        kind({"bootstrap.servers": str(tmp_path / "log"), **settings})

    assert str(tmp_path / "log") not in bootstrap._shared
    del caught


def test_values_are_bytes_also_in_a_topic_with_serializers(log, address):
    """Programs for confluent_kafka convert values themselves."""
    log.create_topic("documents", 1, {"value.serializer": "json"})
    produce(address, '{"a": 1}', topic="documents")

    with consumer_of(address) as consumer:
        consumer.subscribe(["documents"])
        assert take(consumer, 1)[0].value() == b'{"a": 1}'


def test_clients_share_the_open_log_and_leave_it_open(log, address):
    """The log of the program is used, with its clock; a directory is an address too."""
    with Producer({"bootstrap.servers": log.path}) as producer:
        producer.produce("t", "v")

    assert len(log.topic("t")) == 1
    assert not log.root.closed


# Settings


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"foo.bar": 1}, 'No such configuration property: "foo.bar"'),
        ({"bootstrap_servers": "x"}, 'No such configuration property: "bootstrap_servers"'),
        ({"linger.ms": "soon"}, 'Invalid value for configuration property "queue.buffering'),
        ({"partitioner": "mine"}, 'Invalid value for configuration property "partitioner"'),
        ({"partitioner": "fnv1a"}, 'Invalid value "fnv1a" for configuration property'),
        ({"acks": "some"}, 'Invalid value for configuration property "request.required.acks"'),
        ({"compression.type": "bz2"}, 'Invalid value "bz2" for configuration property'),
        ({"on_delivery": 5}, "on_delivery requires a callable object"),
        ({"linger.ms": None}, "cannot be set to empty value"),
        ({"default.topic.config": {"x": 1}}, 'No such configuration property: "x"'),
        ({"transactional.id": "x", "acks": 1}, "idempotence"),
        ({"transactional.id": "x", "retries": 0}, "idempotence"),
        ({"transactional.id": "x", "max.in.flight": 6}, "idempotence"),
        ({"transactional.id": "x", "enable.idempotence": "false"}, "idempotence"),
        ({"transactional.id": "x", "message.timeout.ms": 60_001}, "transaction.timeout.ms, 60000"),
    ],
)
def test_a_setting_that_librdkafka_refuses_is_refused(address, settings, text):
    """With the same exception and code."""
    with pytest.raises(KafkaException) as caught:
        Producer({**address, **settings})

    assert caught.value.args[0].code() == KafkaError._INVALID_ARG
    assert text in caught.value.args[0].str()


@pytest.mark.parametrize("kind", [Producer, Consumer, AdminClient])
def test_a_client_cannot_be_copied(address, kind):
    """Nor pickled, as confluent_kafka's."""
    client = kind({**address, "group.id": "g"})
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=f"{kind.__name__} of a log cannot be copied"):
            make(client)


needs_share_groups = pytest.mark.skipif(
    not hasattr(confluent, "AcknowledgeType"), reason="this version has no share groups"
)


@pytest.fixture
def share_settings(log, address):
    log.create_topic("jobs")
    log.groups["workers"].alter({"share.auto.offset.reset": "earliest"})
    with log.producer() as producer:
        for number in range(4):
            producer.send("jobs", b"%d" % number)
    return {**address, "group.id": "workers", "share.acknowledgement.mode": "explicit"}


@needs_share_groups
def test_a_share_consumer(log, share_settings):
    """With the library's records, results and errors."""
    seen = []
    with confluent.ShareConsumer(share_settings) as consumer:
        with pytest.raises(confluent.IllegalStateException):
            consumer.poll(0)
        consumer.subscribe(["jobs"])
        consumer.set_acknowledgement_commit_callback(lambda *told: seen.append(told))
        messages = consumer.poll(5)
        assert isinstance(messages, confluent.Messages)
        assert (messages[0].value(), messages[0].delivery_count()) == (b"0", 1)
        assert len(messages) == 4
        for message, verdict in zip(messages, (1, 2, 3, 1), strict=True):
            if verdict == 3:
                with pytest.raises(confluent.IllegalStateException):
                    consumer.poll(0)
            consumer.acknowledge(message, confluent.AcknowledgeType(verdict))
        assert consumer.commit_sync() == {TopicPartition("jobs", 0): None}
        assert seen == [({TopicPartition("jobs", 0): {0, 1, 2, 3}}, None)]
        (again,) = consumer.poll(5)
        assert (again.value(), again.delivery_count()) == (b"1", 2)
        consumer.acknowledge_offset("jobs", 0, 1)
        with pytest.raises(confluent.IllegalStateException):
            consumer.acknowledge_offset("jobs", 0, 3)

    assert log.groups["workers"].describe().lag == 0
    with pytest.raises(confluent.IllegalStateException):
        consumer.poll(0)


@needs_share_groups
def test_a_share_consumer_refuses_what_the_library_refuses(share_settings):
    with pytest.raises(ValueError, match="not applicable"):
        confluent.ShareConsumer({**share_settings, "auto.offset.reset": "earliest"})
    with pytest.raises(ValueError, match="group"):
        confluent.ShareConsumer({"bootstrap.servers": share_settings["bootstrap.servers"]})
    implicit = {**share_settings, "share.acknowledgement.mode": "implicit"}
    with confluent.ShareConsumer(implicit) as consumer:
        with pytest.raises(ValueError, match="subscribe"):
            consumer.subscribe(["jobs", "jobs"])
        consumer.subscribe(["jobs"])
        message = consumer.poll(5)[0]
        with pytest.raises(confluent.IllegalStateException, match="implicit"):
            consumer.acknowledge(message)


@needs_share_groups
def test_a_deserializing_share_consumer(share_settings):
    """A value that cannot be deserialized has an error, beside the others."""
    convert = {"value.deserializer": lambda data, context: 1 // int(data)}
    with confluent.DeserializingShareConsumer({**share_settings, **convert}) as consumer:
        consumer.subscribe(["jobs"])
        messages = consumer.poll(5)
        codes = [each.error() and each.error().code() for each in messages]
        assert codes == [KafkaError._VALUE_DESERIALIZATION, None, None, None]
        assert [each.value() for each in messages] == [b"0", 1, 0, 0]
        for message in messages:
            consumer.acknowledge(message)


def test_settings_of_a_network_are_ignored_with_one_line(address, caplog):
    """A program that ran on a cluster needs no change."""
    network = {"security.protocol": "SASL_SSL", "sasl.username": "me", "socket.timeout.ms": 50}
    with caplog.at_level(logging.INFO, "embedlog.kafka"):
        Producer({**address, **network, "log_level": 3}).close()

    [record] = [record for record in caplog.records if record.name == "embedlog.kafka"]
    assert record.levelno == logging.INFO
    assert "sasl.username, security.protocol, socket.timeout.ms" in record.message


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd", "none"])
def test_every_codec_of_kafka_is_accepted(log, address, codec):
    """Gzip is stored as zstd, and snappy as lz4."""
    with Producer({**address, "compression.codec": codec}) as producer:
        producer.produce("t", bytes(1000))

    assert log.topic("t")[0].value == bytes(1000)


@pytest.mark.parametrize(
    "partitioner", ["consistent", "consistent_random", "murmur2", "murmur2_random"]
)
def test_keys_go_to_the_partitions_that_librdkafka_chooses(log, address, partitioner):
    """By default that is CRC32, not murmur2 as with Java's and embedlog's own producer."""
    original = pytest.importorskip("confluent_kafka", minversion="2.13")
    log.create_topic("keys", 7)
    keys = [f"key-{number}".encode() for number in range(30)]
    with Producer({**address, "partitioner": partitioner}) as producer:
        for key in keys:
            producer.produce("keys", key=key)

    hashed = original.murmur2 if "murmur2" in partitioner else original.consistent
    chosen = {record.key: record.partition for record in log.topic("keys")}
    # The library's own murmur2 returns the hash, or the partition, depending on its version.
    assert chosen == {key: hashed(key, 7) % 7 for key in keys}


# The producer


def test_deliveries_are_reported_by_poll_and_flush_only(address):
    """In the program's thread, in order, with the message; records without a callback count."""
    reports = []
    producer = Producer({**address, "on_delivery": lambda *report: reports.append(report)})
    producer.produce("t", "é", key="k", partition=1, headers={"a": "b"}, timestamp=5)
    producer.produce("t", b"w", partition=1, callback=lambda *_: reports.append("own"))
    assert (len(producer), bool(producer), reports) == (2, True, [])

    assert producer.poll(patient(10)) >= 1
    assert producer.flush() == 0

    assert len(producer) == 0
    error, message = reports[0]
    assert (error, reports[1]) == (None, "own")
    assert (message.topic(), message.partition(), message.offset()) == ("t", 1, 0)
    assert (message.key(), message.value(), message.timestamp()) == (b"k", "é".encode(), (1, 5))
    assert 0 <= message.latency() < patient(10)
    assert len(message) == 2
    producer.close()
    with pytest.raises(RuntimeError, match="closed"):
        producer.produce("t", "v")


def test_a_full_queue_raises_buffer_error_until_it_is_polled(address):
    """What is delivered counts until it was reported, as in librdkafka."""
    with Producer({**address, "queue.buffering.max.messages": 2}) as producer:
        producer.produce("t", "1")
        producer.produce("t", "2")
        with pytest.raises(BufferError, match="Queue full"):
            producer.produce("t", "3")
        assert producer.poll(patient(10)) == 2
        producer.produce("t", "3")


def test_a_program_that_polls_does_not_fill_the_queue(address):
    """`poll` writes itself before the queue is full, although ``linger.ms`` has not passed."""
    settings = {"queue.buffering.max.messages": 10, "linger.ms": 60_000}
    with Producer({**address, **settings}) as producer:
        for number in range(50):
            producer.produce("t", str(number))
            producer.poll(0)


def test_a_failed_delivery_is_reported_with_the_code_of_kafka(tmp_path):
    """Also of a topic that cannot be created; nothing is raised by `produce`."""
    errors = []
    with embedlog.open(tmp_path / "strict", auto_create_topics=False) as log:
        log.create_topic("compacted", 1, {"cleanup.policy": "compact"})
        log.create_topic("recent", 1, {"message.timestamp.before.max.ms": 1000})
        with Producer({"bootstrap.servers": log.path}) as producer:
            for topic in ("compacted", "recent", "nothing"):
                producer.produce(
                    topic, "v", timestamp=5, callback=lambda error, _: errors.append(error.name())
                )
                producer.flush()

    assert errors == ["INVALID_RECORD", "INVALID_TIMESTAMP", "_UNKNOWN_TOPIC"]


def test_a_client_says_that_its_log_was_closed(tmp_path):
    """A program may keep it: records would be lost, and a loop would poll without waiting."""
    address = {"bootstrap.servers": f"embedlog://{tmp_path}/log"}
    with embedlog.open(tmp_path / "log"):
        producer, consumer = Producer(address), consumer_of(address)
        consumer.subscribe(["t"])
    with pytest.raises(RuntimeError, match=f"log of the producer was closed: {tmp_path}"):
        producer.produce("t", b"x")
    assert producer.flush() == 0
    with pytest.raises(RuntimeError, match=f"log of the consumer was closed: {tmp_path}"):
        consumer.poll(1)
    for client in (producer, consumer):
        client.close()
        client.close()


def test_an_exception_of_a_delivery_callback_is_raised_by_poll(address):
    """And the deliveries after it are reported by the next call."""

    def fail(error, message):
        raise LookupError("mine")

    reported = []
    with Producer(address) as producer:
        producer.produce("t", "1", callback=fail)
        producer.produce("t", "2", callback=lambda *_: reported.append(2))
        with pytest.raises(LookupError, match="mine"):
            producer.flush()
        assert producer.flush() == 0
    assert reported == [2]


def test_threads_share_a_producer(address):
    """One may poll while another produces: each delivery is reported once."""
    offsets, done = [], threading.Event()
    with Producer({**address, "linger.ms": 1}) as producer:

        def poll():
            while not done.is_set():
                producer.poll(0.001)

        with in_threads(poll, poll, done=done):
            for number in range(500):
                producer.produce(
                    "t", str(number), partition=0, callback=lambda _, m: offsets.append(m.offset())
                )
            producer.flush()
    assert sorted(offsets) == list(range(500))


def test_purged_records_are_reported_as_purged(log, address):
    """And the producer can be used on."""
    names = []
    with Producer({**address, "linger.ms": 60_000}) as producer:
        producer.produce("t", "v", callback=lambda error, _: names.append(error.name()))
        producer.purge()
        producer.produce("t", "w")
        producer.flush()

    assert names == ["_PURGE_QUEUE"]
    assert [record.value for record in log.topic("t")] == [b"w"]


def test_a_producer_that_is_collected_writes_what_was_produced(log, address):
    """A program need not close its clients."""
    producer = Producer({**address, "linger.ms": 60_000})
    producer.produce("t", "v")
    del producer
    gc.collect()

    assert len(log.topic("t")) == 1


def test_a_batch_says_which_records_were_refused(address):
    """`produce_batch` returns how many were accepted, and notes the errors of the others."""
    messages = [{"value": "a", "key": "k"}, {"value": bytes(2_000_000)}, {"value": "c"}]
    with Producer(address) as producer:
        assert producer.produce_batch("t", messages) == 2

    assert messages[1]["_error"].code() == KafkaError.MSG_SIZE_TOO_LARGE


def test_statistics_are_json(address):
    """`stats_cb` is called from `poll` every ``statistics.interval.ms``."""
    statistics = []
    settings = {"stats_cb": statistics.append, "statistics.interval.ms": 1}
    with Producer({**address, **settings, "client.id": "me"}) as producer:
        producer.poll(0.01)
        producer.poll(0)

    assert json.loads(statistics[0])["client_id"] == "me"


# Transactions


@pytest.fixture
def transactional(address):
    """Makes producers with a ``transactional.id``, and closes them."""
    producers = []

    def make(name="name", **settings):
        dotted = {name.replace("_", "."): value for name, value in settings.items()}
        producers.append(Producer({**address, "transactional.id": name, **dotted}))
        return producers[-1]

    yield make
    for producer in producers:
        producer.close()


def test_the_records_of_a_transaction_become_visible_together(log, transactional):
    """With its commit; those of an aborted one never.  Deliveries have no offset before."""
    reports = []
    producer = transactional()
    producer.init_transactions()
    for end in (producer.commit_transaction, producer.abort_transaction):
        producer.begin_transaction()
        for partition in (0, 1):
            producer.produce(
                "t", "v", partition=partition, callback=lambda *report: reports.append(report)
            )
        producer.produce("u", "v", key="k", headers={"a": "b"})
        assert producer.flush() == 0
        assert sum(map(len, map(log.topic, ("t", "u")))) in (0, 3)
        end(patient(10))
        assert len(producer) == 0
    assert [len(log.topic(topic)) for topic in ("t", "u")] == [2, 1]
    assert [(error, message.offset()) for error, message in reports[:2]] == [(None, None)] * 2
    producer.begin_transaction()
    producer.commit_transaction()


def test_calls_of_transactions_in_the_wrong_order_are_refused(address, transactional):
    """Each with librdkafka's error."""
    with Producer(address) as plain:
        for call in (plain.init_transactions, plain.begin_transaction, plain.commit_transaction):
            assert code_of(call) == "_NOT_CONFIGURED"
    producer = transactional()
    for call in (producer.begin_transaction, producer.commit_transaction):
        assert code_of(call) == "_STATE"
    producer.init_transactions()
    assert code_of(producer.produce, "t", "v") == "_STATE"
    producer.begin_transaction()
    assert code_of(producer.begin_transaction) == "_STATE"
    producer.abort_transaction()


def test_a_newer_producer_fences_an_older_one(log, transactional):
    """Its commit fails for good (``fatal``)."""
    older, newer = transactional(), transactional()
    older.init_transactions()
    older.begin_transaction()
    older.produce("t", "late")
    newer.init_transactions()

    with pytest.raises(KafkaException) as caught:
        older.commit_transaction()
    assert (caught.value.args[0].name(), caught.value.args[0].fatal()) == ("_FENCED", True)
    for call in (older.abort_transaction, older.begin_transaction, older.init_transactions):
        assert code_of(call) == "_FENCED"
    assert code_of(older.produce, "t", "late") == "_FATAL"
    assert len(log.topic("t")) == 0


def test_a_transaction_that_cannot_be_committed_must_be_aborted(log, transactional):
    """The error says so; the next transaction works."""
    log.create_topic("compacted", 1, {"cleanup.policy": "compact"})
    producer = transactional()
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce("t", "v")
    producer.produce("compacted", "without a key")
    with pytest.raises(KafkaException) as caught:
        producer.commit_transaction()
    assert caught.value.args[0].name() == "INVALID_RECORD"
    assert caught.value.args[0].txn_requires_abort()
    producer.abort_transaction()
    assert len(log.topic("t")) == 0
    producer.begin_transaction()
    producer.produce("t", "v")
    producer.commit_transaction()
    assert len(log.topic("t")) == 1


def test_a_transaction_may_be_larger_than_the_memory_of_its_producer(log, transactional):
    """That of ``queue.buffering.max.kbytes``: the rest waits in a file."""
    producer = transactional(queue_buffering_max_kbytes=1)
    producer.init_transactions()
    producer.begin_transaction()
    for _ in range(20):
        while True:
            try:
                producer.produce("t", bytes(600))
                break
            except BufferError:
                producer.poll(0.01)
    assert len(log.topic("t")) == 0
    producer.commit_transaction()
    assert len(log.topic("t")) == 20


# The consumer


def produce(address, *values, topic="t", partition=0):
    with Producer(address) as producer:
        for value in values:
            producer.produce(topic, value, partition=partition)


def test_offsets_are_committed_as_records_are_returned(address):
    """Not as they are fetched: the next consumer continues with the record after the last one."""
    produce(address, *"abcdef")
    for expected in ("ab", "cd"):
        with consumer_of(address) as consumer:
            consumer.subscribe(["t"])
            assert b"".join(take(consumer, 1)[0].value() for _ in range(2)).decode() == expected


def test_only_stored_offsets_are_committed_without_automatic_storing(address):
    """``enable.auto.offset.store=false`` gives at-least-once processing."""
    produce(address, *"abc")
    with consumer_of(address, enable_auto_offset_store=False) as consumer:
        consumer.subscribe(["t"])
        first, _ = take(consumer, 2)
        consumer.store_offsets(first)
        assert code_of(consumer.store_offsets, offsets=[TopicPartition("t", 9, 1)]) == (
            "_UNKNOWN_PARTITION"
        )

    with consumer_of(address) as consumer:
        assert consumer.committed([TopicPartition("t", 0)])[0].offset == 1
        assert code_of(consumer.store_offsets, first) == "_INVALID_ARG"


def test_stored_offsets_are_committed_at_intervals(address):
    """By a later `poll`; ``on_commit`` is told."""
    produce(address, *"abc")
    commits = []
    settings = {**address, "group.id": "g", "auto.offset.reset": "beginning"}
    settings |= {"auto.commit.interval.ms": 10, "on_commit": lambda *commit: commits.append(commit)}
    with Consumer(settings) as consumer, consumer_of(address, "other") as other:
        consumer.subscribe(["t"])
        take(consumer, 3)
        while not commits:
            consumer.poll(0.01)
        error, [partition] = commits[0]
        assert (error, partition.partition, partition.offset) == (None, 0, 3)
        assert other.memberid() is None


def test_a_commit_of_a_message_is_of_the_offset_after_it(address):
    """Also asynchronously, and of offsets with metadata."""
    produce(address, *"abc")
    partition = TopicPartition("t", 0)
    with consumer_of(address, enable_auto_commit=False) as consumer:
        consumer.subscribe(["t"])
        first, second, _ = take(consumer, 3)
        [committed] = consumer.commit(message=first, asynchronous=False)
        assert (committed.offset, committed.error) == (1, None)
        assert consumer.commit(second) is None
        assert consumer.committed([partition])[0].offset == 2
        consumer.commit(offsets=[TopicPartition("t", 0, 7, "note")], asynchronous=False)
        [committed] = consumer.committed([partition])
        assert (committed.offset, committed.metadata) == (7, "note")
        with pytest.raises(ValueError, match="mutually exclusive"):
            consumer.commit(message=first, offsets=[partition])


def test_a_callback_of_an_assignment_chooses_where_to_begin(address):
    """`assign` in ``on_assign`` sets offsets; partitions that are revoked are announced."""
    produce(address, *"abc")
    events = []

    def rewind(consumer, partitions):
        events.append(("assigned", len(partitions)))
        for partition in partitions:
            partition.offset = OFFSET_BEGINNING
        consumer.assign(partitions)

    def revoked(consumer, partitions):
        events.append(("revoked", len(partitions)))

    for _ in range(2):
        with consumer_of(address) as consumer:
            consumer.subscribe(["t"], on_assign=rewind, on_revoke=revoked)
            assert take(consumer, 1)[0].offset() == 0
    assert events == [("assigned", 2), ("revoked", 2)] * 2


def test_a_member_of_a_group_does_not_assign_by_itself(address):
    """It may set the offsets of what the group assigned; `unassign` stops the reading."""
    produce(address, *"abc")
    with consumer_of(address) as consumer:
        consumer.subscribe(["t"])
        take(consumer, 1)
        for partitions in ([TopicPartition("t", 0)], [TopicPartition("t", n) for n in range(3)]):
            assert code_of(consumer.assign, partitions) == "_STATE"
        assert code_of(consumer.incremental_assign, [TopicPartition("t", 0)]) == "_CONFLICT"
        consumer.assign([TopicPartition("t", 0, 2), TopicPartition("t", 1)])
        assert take(consumer, 1)[0].offset() == 2
        consumer.assign([TopicPartition("t", 0, 0), TopicPartition("t", 1)])
        assert take(consumer, 1)[0].offset() == 0
        consumer.unassign()
        assert consumer.poll(0) is None
        consumer.unsubscribe()
        consumer.assign([TopicPartition("t", 0)])
        # The record that was returned before was committed.
        assert take(consumer, 1)[0].offset() == 1


def test_a_consumer_without_an_assignment_waits(address):
    """As in librdkafka; a topic that was reported missing does not keep it busy."""
    with consumer_of(address) as consumer:
        assert consumer.poll(0.01) is None
        consumer.subscribe(["missing"])
        consumer.unsubscribe()
        assert consumer.poll(0.01).error().code() == KafkaError.UNKNOWN_TOPIC_OR_PART
        assert consumer.consume(1, 0.01) == []


def test_threads_share_a_consumer(address):
    """One may commit, pause and close while another waits for records."""
    results = []
    consumer = consumer_of(address)
    consumer.subscribe(["t"])

    def poll():
        with pytest.raises(RuntimeError, match="Consumer closed"):
            while True:
                results.append(consumer.poll())

    with in_threads(poll), consumer:
        while len(consumer.assignment()) < 2:
            pass
        for number in range(20):
            consumer.commit(offsets=[TopicPartition("t", 1, number)], asynchronous=False)
        produce(address, "a")
        while not results:
            assert consumer.committed([TopicPartition("t", 1)])[0].offset == 19
    assert [message.value() for message in results] == [b"a"]


def test_threads_that_poll_one_consumer_get_each_record_once(address):
    """Also where one batch ends and the next begins: they have one to three records."""
    count, offsets = 2000, []
    with Producer({**address, "linger.ms": 0}) as producer:
        for number in range(count):
            producer.produce("t", str(number), partition=0)
            if number % 3:
                producer.flush()
    with consumer_of(address) as consumer:
        consumer.assign([PARTITION])

        def poll():
            while len(offsets) < count:
                if (message := consumer.poll(0.01)) is not None:
                    offsets.append(message.offset())

        with in_threads(poll, poll):
            poll()
    assert sorted(offsets) == list(range(count))


def test_paused_partitions_return_nothing_and_lose_nothing(address):
    """Records that were fetched already come again after `resume`."""
    produce(address, *"abc")
    produce(address, *"xyz", partition=1)
    zero, one = TopicPartition("t", 0), TopicPartition("t", 1)
    with consumer_of(address) as consumer:
        consumer.assign([zero, one])
        first = take(consumer, 1)[0]
        paused, other = (zero, one) if first.partition() == 0 else (one, zero)
        consumer.pause([paused])
        assert {message.partition() for message in take(consumer, 3)} == {other.partition}
        assert consumer.poll(0) is None
        consumer.resume([paused])
        assert [message.offset() for message in take(consumer, 2)] == [1, 2]
        assert [part.offset for part in consumer.position([zero, one])] == [3, 3]


def test_the_end_of_a_partition_is_an_event(address):
    """Once for each end, with ``enable.partition.eof``."""
    produce(address, "a")
    with consumer_of(address, enable_partition_eof=True) as consumer:
        consumer.assign([TopicPartition("t", 0)])
        record, end = take(consumer, 2)
        assert (record.value(), end.error().code()) == (b"a", KafkaError._PARTITION_EOF)
        assert (end.topic(), end.partition(), end.offset()) == ("t", 0, 1)
        assert consumer.poll(0) is None
        produce(address, "b")
        assert [bool(message.error()) for message in take(consumer, 2)] == [False, True]


def test_a_topic_that_does_not_exist_is_an_event(address):
    """Once; when it is created, it is read."""
    with consumer_of(address, metadata_max_age_ms=1) as consumer:
        consumer.subscribe(["later"])
        [event] = take(consumer, 1)
        assert event.error().code() == KafkaError.UNKNOWN_TOPIC_OR_PART
        assert event.topic() == "later"
        produce(address, "v", topic="later")
        assert take(consumer, 1)[0].value() == b"v"


def test_an_error_of_reading_is_an_event(address):
    """``auto.offset.reset=error`` reports that there is no offset."""
    produce(address, "v")
    settings = {**address, "group.id": "g", "auto.offset.reset": "error"}
    with Consumer(settings) as consumer:
        consumer.assign([TopicPartition("t", 0)])
        assert take(consumer, 1)[0].error().code() == KafkaError._AUTO_OFFSET_RESET


@pytest.mark.parametrize("group", ["assign", "subscribe"])
def test_a_missing_position_is_reported_once(address, group):
    """With ``_AUTO_OFFSET_RESET``, also of one that is out of range; other partitions are read."""
    produce(address, *"abc")
    one = TopicPartition("t", 1, 0)
    with consumer_of(address, auto_offset_reset="error", enable_auto_commit=False) as consumer:
        if group == "subscribe":
            consumer.commit(offsets=[one], asynchronous=False)
            consumer.subscribe(["t"])
        else:
            consumer.assign([TopicPartition("t", 0), one])
        [event] = take(consumer, 1)
        assert (event.error().name(), event.partition()) == ("_AUTO_OFFSET_RESET", 0)
        produce(address, "x", partition=1)
        assert take(consumer, 1)[0].value() == b"x"
        assert consumer.consume(1, 0.2) == []
        assert code_of(consumer.seek, TopicPartition("t", 0, 1)) == "_STATE"
        consumer.assign([TopicPartition("t", 0, 99), one])
        event, record = sorted(take(consumer, 2), key=lambda message: message.partition())
        assert (event.error().name(), event.offset()) == ("_AUTO_OFFSET_RESET", 99)
        assert "Assign the partition again" in event.error().str()
        assert record.value() == b"x"
        assert consumer.consume(1, 0.2) == []
        consumer.assign([TopicPartition("t", 0, 2), one])
        assert {message.value() for message in take(consumer, 2)} == {b"c", b"x"}


def test_a_damaged_batch_is_reported_once(log, address, monkeypatch):
    """It is tried again in silence, while other partitions are read; `seek` goes past it."""
    produce(address, "damaged")
    produce(address, "good")
    [path] = Path(log.path).glob("topics/t-*/0/*.arrows")
    monkeypatch.setattr(confluent.consumer, "_REFRESH_SECONDS", 0.01)

    def change(old, new):
        with path.open("r+b") as file:
            file.seek(file.read().index(old))
            file.write(new)

    change(b"damaged", b"DAMAGED")
    with consumer_of(address) as consumer:
        consumer.assign([TopicPartition("t", 0), TopicPartition("t", 1)])
        [event] = take(consumer, 1)
        assert (event.error().name(), event.partition()) == ("INVALID_MSG", 0)
        assert consumer.consume(1, 0.2) == []
        produce(address, "x", partition=1)
        assert take(consumer, 1)[0].value() == b"x"
        consumer.seek(TopicPartition("t", 0, 1))
        assert take(consumer, 1)[0].value() == b"good"
        consumer.seek(TopicPartition("t", 0, 0))
        assert take(consumer, 1)[0].error().name() == "INVALID_MSG"
    change(b"DAMAGED", b"damaged")


@pytest.mark.parametrize("subscribed", [False, True])
@pytest.mark.parametrize(
    ("name", "code"),
    [(pattern, "_INVALID_ARG") for pattern in ("^[", "^(", "^*")] + [("a b", "TOPIC_EXCEPTION")],
)
def test_a_subscription_that_is_refused_changes_nothing(address, subscribed, name, code):
    """A pattern that cannot be compiled has the code of librdkafka."""
    produce(address, "a")
    with consumer_of(address) as consumer:
        consumer.subscribe(["^t"]) if subscribed else consumer.assign([TopicPartition("t", 0)])
        assert code_of(consumer.subscribe, ["other", name]) == code
        assert take(consumer, 1)[0].value() == b"a"


@pytest.mark.parametrize("offset", [OFFSET_INVALID, OFFSET_STORED])
@pytest.mark.parametrize("subscribed", [False, True])
@pytest.mark.parametrize("commit", [None, 1])
def test_a_partition_that_is_assigned_again_begins_at_the_commit(
    address, offset, subscribed, commit
):
    """Records that were read since are read again: the way to start again after an error."""
    produce(address, *"abcd")
    again = [TopicPartition("t", 0, offset), TopicPartition("t", 1)]
    with consumer_of(address, enable_auto_commit=False) as consumer:
        consumer.subscribe(["t"]) if subscribed else consumer.assign(again)
        take(consumer, 1)
        if commit is not None:
            consumer.commit(offsets=[TopicPartition("t", 0, commit)], asynchronous=False)
        take(consumer, 2)
        consumer.assign(again)
        assert [part.offset for part in consumer.position(again)] == [OFFSET_INVALID] * 2
        assert code_of(consumer.commit, asynchronous=False) == "_NO_OFFSET"
        assert take(consumer, 1)[0].offset() == (commit or 0)
        for wrong in (-5, -1002):
            partitions = [TopicPartition("t", 0, wrong)]
            assert code_of(consumer.assign, partitions) == "_INVALID_ARG"
        assert code_of(consumer.seek, TopicPartition("t", 0, OFFSET_STORED)) == "_INVALID_ARG"
        consumer.seek(TopicPartition("t", 0))
        assert take(consumer, 1)[0].offset() == 0


def test_what_is_stored_is_committed_before_a_partition_is_assigned_again(address):
    """With automatic commits it goes on after the last record."""
    produce(address, *"abc")
    with consumer_of(address) as consumer:
        consumer.assign([TopicPartition("t", 0)])
        take(consumer, 2)
        consumer.assign([TopicPartition("t", 0)])
        assert take(consumer, 1)[0].offset() == 2


def test_a_pause_lasts_until_resume(address):
    """Also while a partition is assigned again, or another member joins and the group moves it."""
    zero, one = TopicPartition("t", 0), TopicPartition("t", 1)
    produce(address, "a")
    produce(address, "b", partition=1)
    with consumer_of(address, "alone") as consumer:
        consumer.assign([zero])
        consumer.pause([zero, one])
        consumer.assign([zero, one])
        assert take(consumer, 1)[0].value() == b"b"
        consumer.unassign()
        consumer.assign([zero])
        consumer.seek(TopicPartition("t", 0, 0))
        assert consumer.consume(1, 0.1) == []
        consumer.resume([zero])
        assert take(consumer, 1)[0].value() == b"a"
    with consumer_of(address) as first, consumer_of(address) as second:
        first.subscribe(["t"])
        while len(first.assignment()) < 2:
            first.poll(0.01)
        first.pause([zero, one])
        second.subscribe(["t"])
        while not len(first.assignment()) == len(second.assignment()) == 1:
            assert first.poll(0.01) is None
            second.poll(0.01)
        for partition in (0, 1):
            produce(address, "later", partition=partition)
        assert first.consume(1, 0.1) == []
        first.resume(first.assignment())
        assert take(first, 1)[0].partition() == first.assignment()[0].partition


def test_a_program_that_polls_too_rarely_gets_an_event(address):
    """Once, and then its partitions again; without a callback there is no other sign."""
    produce(address, "a")
    interval = int(patient(300))
    settings = {"max_poll_interval_ms": interval, "session_timeout_ms": interval}
    with consumer_of(address, enable_auto_commit=False, **settings) as consumer:
        consumer.subscribe(["t"])
        take(consumer, 1)
        generation = consumer.memberid()
        group = open_group(consumer._log.root, "g")
        while group.read().members:
            threading.Event().wait(0.01)
        event, record = take(consumer, 2)
        assert event.error().name() == "_MAX_POLL_EXCEEDED"
        assert record.value() == b"a"
        assert consumer.memberid() != generation


def test_special_times_are_the_ends(address):
    """-1, -2 and -3, as at a broker; other negative times and unknown partitions are refused."""
    with Producer(address) as producer:
        for time in (10, 30, 20):
            producer.produce("t", "v", partition=0, timestamp=time)
    with consumer_of(address) as consumer:
        for time, offset in ((-1, 3), (-2, 0), (-3, 1), (15, 1), (31, -1)):
            [found] = consumer.offsets_for_times([TopicPartition("t", 0, time)])
            assert (found.offset, found.error) == (offset, None)
        unknown = TopicPartition("t", 9, 5)
        _, found = consumer.offsets_for_times([TopicPartition("t", 0, 5), unknown])
        assert (found.offset, found.error.name()) == (5, "_UNKNOWN_PARTITION")
        for partitions, code in (
            ([unknown], "_UNKNOWN_PARTITION"),
            ([TopicPartition("t", 0, -5)], "UNSUPPORTED_VERSION"),
            ([], "_INVALID_ARG"),
        ):
            assert code_of(consumer.offsets_for_times, partitions) == code


def test_patterns_and_names_can_be_subscribed_together(log, address):
    """A pattern begins with ``^`` and need not match to the end."""
    for topic in ("orders-eu", "orders.us", "order"):
        produce(address, topic, topic=topic)
    with consumer_of(address) as consumer:
        consumer.subscribe(["^orders.", "order"])
        assert {message.topic() for message in take(consumer, 3)} == set(log.topics()) - {"t"}


def test_a_slow_consumer_still_follows_its_group(address, monkeypatch):
    """Records that wait in the consumer are given back when partitions are to be shared."""
    monkeypatch.setattr(confluent.consumer, "_REFRESH_SECONDS", 0.0)
    produce(address, *"abcd")
    produce(address, *"wxyz", partition=1)
    with consumer_of(address) as slow:
        slow.subscribe(["t"])
        values = [take(slow, 1)[0].value()]
        with consumer_of(address) as second:
            second.subscribe(["t"])
            consumers = [slow, second]
            while len(values) < 8:
                for consumer in consumers:
                    message = consumer.poll(0.01)
                    if message is not None:
                        values.append(message.value())
            assert [len(consumer.assignment()) for consumer in consumers] == [1, 1]
    assert sorted(values) == sorted(bytes([byte]) for byte in b"abcdwxyz")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda consumer: consumer.subscribe("t"), TypeError),
        (lambda consumer: consumer.subscribe(["t"], on_assign=5), TypeError),
        (lambda consumer: consumer.subscribe([]), KafkaException),
        (lambda consumer: consumer.assign(5), TypeError),
        (lambda consumer: consumer.assign([5]), TypeError),
        (lambda consumer: consumer.consume(-1), ValueError),
        (lambda consumer: consumer.commit(message=5), TypeError),
        (lambda consumer: consumer.store_offsets(), ValueError),
        (lambda consumer: consumer.commit(asynchronous=False), KafkaException),
        (lambda consumer: iter(consumer), TypeError),
    ],
)
def test_wrong_calls_are_refused_as_confluent_kafka_refuses_them(address, call, error):
    """The type of the exception is the same."""
    with consumer_of(address) as consumer, pytest.raises(error):
        call(consumer)


def test_a_consumer_needs_a_group_and_ends_with_close(address):
    """Later calls raise RuntimeError; closing again does nothing."""
    with pytest.raises(ValueError, match=r"group\.id must be set"):
        Consumer(address)
    consumer = consumer_of(address)
    assert consumer.poll(0) is None
    consumer.close()
    consumer.close()
    for call in (consumer.poll, consumer.assignment, consumer.commit, consumer.memberid):
        with pytest.raises(RuntimeError, match="Consumer closed"):
            call()


def test_clients_of_a_log_that_was_closed_raise_its_errors(tmp_path):
    """As closed clients do; they can be closed."""
    log = embedlog.open(tmp_path / "log")
    log.create_topic("t")
    address = {"bootstrap.servers": log.path}
    consumer, producer, admin = consumer_of(address), Producer(address), AdminClient(address)
    consumer.subscribe(["t"])
    consumer.poll(0)
    log.close()

    for call in (
        *(consumer.assignment, consumer.unsubscribe, lambda: consumer.seek(PARTITION)),
        lambda: consumer.commit(asynchronous=False),
    ):
        with pytest.raises(RuntimeError, match="The log of the consumer was closed"):
            call()
    for call in (consumer.list_topics, consumer.cluster_id, admin.list_groups):
        assert code_of(call) == "_DESTROY"
    consumer.close()
    producer.close()


# Converters


def test_serializers_convert_keys_and_values(address):
    """`SerializingProducer` and `DeserializingConsumer`, with the context of the record."""
    contexts = []

    def to_json(value, context):
        contexts.append((context.topic, str(context.field)))
        return json.dumps(value).encode()

    serializers = {"key.serializer": StringSerializer(), "value.serializer": to_json}
    with SerializingProducer({**address, **serializers}) as producer:
        producer.produce("t", key="k", value={"a": 1})
        with pytest.raises(KeySerializationError):
            SerializingProducer({**address, "key.serializer": to_json}).produce("t", key={1})
    deserializers = {
        "key.deserializer": StringDeserializer(),
        "value.deserializer": lambda data, _: json.loads(data),
    }
    settings = {**address, "group.id": "g", "auto.offset.reset": "earliest"}
    with DeserializingConsumer({**settings, **deserializers}) as consumer:
        consumer.subscribe(["t"])
        message = consumer.poll(patient(10))
    assert (message.key(), message.value()) == ("k", {"a": 1})
    assert contexts[0] == ("t", "value")
    with DeserializingConsumer(
        {**settings, "group.id": "h", "value.deserializer": IntegerDeserializer()}
    ) as consumer:
        consumer.subscribe(["t"])
        with pytest.raises(ValueDeserializationError) as caught:
            consumer.poll(patient(10))
    assert caught.value.kafka_message.value() == b'{"a": 1}'


# Administration


def test_results_of_the_admin_client_are_futures_that_are_done(log, address):
    """A call is carried out before it returns; an error is in its future."""
    admin = AdminClient(address)
    futures = admin.create_topics([NewTopic("new", 3), NewTopic("t", 1), NewTopic("bad name", 1)])
    assert all(future.done() for future in futures.values())
    assert futures["new"].result() is None
    names = {name: future.exception() for name, future in futures.items() if future.exception()}
    assert {name: error.args[0].name() for name, error in names.items()} == {
        "t": "TOPIC_ALREADY_EXISTS",
        "bad name": "TOPIC_EXCEPTION",
    }
    assert len(log.describe_topic("new")["partitions"]) == 3
    assert code_of(admin.create_acls, []) == "UNSUPPORTED_VERSION"


def test_changes_can_be_validated_only(log, address):
    """With the errors of the change itself."""
    admin = AdminClient(address)

    def errors(futures):
        failures = [future.exception() for future in futures.values()]
        return [failure and failure.args[0].name() for failure in failures]

    topics = [NewTopic(name, 1) for name in ("new", "t", "bad name")]
    assert errors(admin.create_topics(topics, validate_only=True)) == [
        *(None, "TOPIC_ALREADY_EXISTS", "TOPIC_EXCEPTION")
    ]
    for total, error in ((2, "INVALID_PARTITIONS"), (3, None)):
        partitions = [NewPartitions("t", total)]
        assert errors(admin.create_partitions(partitions, validate_only=True)) == [error]
    assert log.topics() == ["t"]
    assert len(log.describe_topic("t")["partitions"]) == 2


def test_offsets_are_looked_up(address):
    """The ends, the record with the latest timestamp, and the first one after a time."""
    with Producer(address) as producer:
        for time in (10, 30, 20):
            producer.produce("t", "v", partition=0, timestamp=time)
    admin, partition = AdminClient(address), TopicPartition("t", 0)

    def lookup(spec):
        result = admin.list_offsets({partition: spec})[partition].result()
        return result.offset, result.timestamp

    assert lookup(OffsetSpec.earliest()) == (0, -1)
    assert lookup(OffsetSpec.latest()) == (3, -1)
    assert lookup(OffsetSpec.max_timestamp()) == (1, 30)
    assert lookup(OffsetSpec.for_timestamp(15)) == (1, 30)
    assert lookup(OffsetSpec.for_timestamp(31)) == (-1, -1)
    admin.delete_records([TopicPartition("t", 0, 2)])
    assert lookup(OffsetSpec.max_timestamp()) == (2, 20)


def test_offsets_of_groups_have_their_epoch_and_are_changed_one_by_one(address):
    """As at a broker: a partition that does not exist fails alone."""
    produce(address, *"ab")
    admin, unknown = AdminClient(address), TopicPartition("t", 9, 1)

    def rows(partitions):
        return [
            (p.partition, p.offset, p.metadata, p.leader_epoch, p.error and p.error.name())
            for p in partitions
        ]

    def listed(*partitions):
        request = ConsumerGroupTopicPartitions("g", list(partitions) or None)
        return rows(admin.list_consumer_group_offsets([request])["g"].result().topic_partitions)

    def altered(*partitions):
        request = ConsumerGroupTopicPartitions("g", list(partitions))
        return rows(admin.alter_consumer_group_offsets([request])["g"].result().topic_partitions)

    with consumer_of(address, enable_auto_commit=False) as consumer:
        consumer.commit(offsets=[TopicPartition("t", 0, 1, "note", 0)], asynchronous=False)
    assert listed() == [(0, 1, "note", 0, None)]
    assert listed(unknown) == [(9, -1001, None, None, None)]
    assert altered(TopicPartition("t", 0, 2, "m", 0), unknown) == [
        (0, 2, "m", 0, None),
        (9, 1, None, None, "UNKNOWN_TOPIC_OR_PART"),
    ]
    assert listed() == [(0, 2, "m", 0, None)]
    assert altered(TopicPartition("t", 0, 1, "x" * 5000))[0][-1] == "OFFSET_METADATA_TOO_LARGE"
    assert altered(TopicPartition("t", 0, 1)) == [(0, 1, None, None, None)]
    assert listed() == [(0, 1, None, None, None)]


def test_metadata_show_one_broker(address):
    """Programs look for the leader of a partition among the brokers."""
    with consumer_of(address) as consumer:
        metadata = consumer.list_topics()
        partition = metadata.topics["t"].partitions[1]
        assert metadata.brokers[partition.leader].host == "localhost"
        assert partition.replicas == partition.isrs == [partition.leader]
        missing = consumer.list_topics("missing").topics["missing"]
        assert missing.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART


PATCHED = """
import asyncio, sys
import embedlog.kafka
embedlog.kafka.patch(sys.argv[1])

import confluent_kafka
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from confluent_kafka.cimpl import KafkaError
from confluent_kafka.error import ProduceError
from confluent_kafka.serialization import StringSerializer

address = {"bootstrap.servers": "broker:9092"}
assert Producer.__module__ == "embedlog.kafka.confluent.producer"
AdminClient(address).create_topics([NewTopic("t", 1)])["t"].result()

async def run():
    from confluent_kafka.aio import AIOConsumer, AIOProducer

    producer = AIOProducer(address)
    delivery = await producer.produce("t", value=b"hello")
    await producer.flush()
    print((await delivery).offset())
    await producer.close()
    consumer = AIOConsumer({**address, "group.id": "g", "auto.offset.reset": "earliest"})
    await consumer.subscribe(["t"])
    print((await consumer.poll(SECONDS)).value())
    await consumer.close()

asyncio.run(run())
"""


@pytest.mark.tier("test")
def test_a_patched_program_that_imports_confluent_kafka_runs_on_a_log(tmp_path):
    """With its imports and addresses unchanged.

    Modules that are not replaced, such as the asyncio clients, use those that are.
    """
    pytest.importorskip("confluent_kafka.aio")
    program = PATCHED.replace("SECONDS", str(patient(10)))

    assert run_python("-c", program, tmp_path / "log").split() == ["0", "b'hello'"]


IMPORTED_BEFORE = """
import sys
import confluent_kafka, confluent_kafka.admin as its_admin
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient
before = (confluent_kafka, its_admin, Consumer, Producer, AdminClient)
import embedlog.kafka

address = {"bootstrap.servers": "broker:9092"}
with embedlog.kafka.patch(sys.argv[1]):
    producer = Producer(address)
    producer.produce("t", b"x")
    print(producer.flush(10))
    for client in (AdminClient, its_admin.AdminClient):
        print(*client(address).list_topics().topics)
    print(confluent_kafka.Consumer is Consumer, Consumer.__module__)
    producer.close()
print(before == (confluent_kafka, its_admin, Consumer, Producer, AdminClient))
"""


def test_patch_reaches_what_was_imported_from_confluent_kafka_before(tmp_path):
    """And takes everything back at its end."""
    pytest.importorskip("confluent_kafka")

    output = run_python("-c", IMPORTED_BEFORE, tmp_path / "log").splitlines()
    assert output == ["0", "t", "t", "True embedlog.kafka.confluent.consumer", "True"]


@pytest.mark.tier("all")
def test_patch_needs_none_of_the_libraries_of_the_registry(tmp_path):
    """The extra `[confluent-kafka]` does not install them."""
    pytest.importorskip("confluent_kafka")
    missing = "import sys; sys.modules |= dict.fromkeys(('attrs', 'certifi', 'httpx'))\n"

    output = run_python("-c", missing + IMPORTED_BEFORE, tmp_path / "log").splitlines()
    assert output == ["0", "t", "t", "True embedlog.kafka.confluent.consumer", "True"]


def test_the_page_of_the_docs_runs_from_top_to_bottom(tmp_path):
    """Its programs can be pasted into one session, in an empty directory, as they are."""
    page = (Path(__file__).parents[1] / "docs" / "kafka-clients.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(programs) == 4
    environment = dict(os.environ)
    environment.pop("KAFKA_BOOTSTRAP_SERVERS", None)

    output = run_python(
        "-c", "\n".join([*programs, "print(sorted(invoices))"]), cwd=tmp_path, env=environment
    )

    first, *_, last = output.splitlines()
    assert first == "b'table-7' b'two coffees'"
    assert last == str(sorted(f"invoice {number}" for number in range(10)))
    with embedlog.open(tmp_path / "orders.log") as log:
        assert [record.value for record in log.topic("orders")] == [b"two coffees", b"one tea"]


@pytest.mark.tier("all")
def test_a_program_prints_the_same_on_a_broker_and_on_a_log(tmp_path):
    """One variable of the environment chooses; offsets, errors and callbacks are the same."""
    pytest.importorskip("confluent_kafka")
    from support.kafka_broker import broker

    with broker(patient(60)) as address:
        on_broker = run_python(PROGRAM, env=environment_of(address), seconds=300)

    assert run_python(PROGRAM, env=environment_of(tmp_path / "log")) == on_broker
