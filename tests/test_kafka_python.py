"""`embedlog.kafka`: kafka-python's clients on a log."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import sys
import threading
from contextlib import suppress
from pathlib import Path
from uuid import UUID

import pytest
from support.children import in_threads, run_python
from support.clock import ManualClock
from support.tiers import sample

import embedlog
import embedlog.kafka
from embedlog import errors as log_errors
from embedlog.errors import InvalidConfigError
from embedlog.kafka import (
    AsyncConsumerRebalanceListener,
    ConsumerRebalanceListener,
    DefaultSerializer,
    JsonSerializer,
    KafkaAdminClient,
    KafkaConsumer,
    KafkaProducer,
    OffsetAndMetadata,
    OffsetSpec,
    TopicPartition,
    bootstrap,
    errors,
)
from embedlog.kafka.__main__ import main
from embedlog.kafka.admin import ConfigResource, NewPartitions, NewTopic
from embedlog.kafka.kafka_python import kafka
from embedlog.publish import live_commit

T0 = TopicPartition("t", 0)


@pytest.fixture
def servers(tmp_path):
    """The address of a log."""
    return f"embedlog://{tmp_path}/log"


@pytest.fixture
def client(servers):
    """Makes clients of the log, and closes them."""
    clients = []

    def make(kind, *topics, **configs):
        made = kind(*topics, bootstrap_servers=servers, **configs)
        clients.append(made)
        return made

    yield make
    for made in clients:
        made.close()


@pytest.fixture
def consume(client):
    """Makes consumers that read from the beginning, and stop soon."""

    def make(*topics, **configs):
        defaults = {"auto_offset_reset": "earliest", "consumer_timeout_ms": 50}
        return client(KafkaConsumer, *topics, **(defaults | configs))

    return make


def send(client, *values, topic="t", **configs):
    """Send values and return the metadata of each."""
    producer = client(KafkaProducer, **configs)
    return [future.get(10) for future in [producer.send(topic, value) for value in values]]


# Where a client goes


@pytest.mark.parametrize(
    "address", ["localhost:9092", "localhost", ["a:1", "b:2"], "a:1,b:2", "SSL://a:1", None, []]
)
def test_brokers_are_not_a_log(address):
    """What kafka-python takes leads to kafka-python."""
    assert bootstrap.log_address(address) is None


@pytest.mark.parametrize("form", ["embedlog://{}", "file://{}", "{}", "{}/", "{}/../log"])
@pytest.mark.parametrize("wrap", [str, lambda address: [address]])
def test_a_log_has_many_addresses(tmp_path, form, wrap):
    """A URL or a directory, alone or in a list."""
    address = wrap(form.format(tmp_path / "log"))

    assert bootstrap.log_address(address) == (str(tmp_path / "log"), ())


def test_an_address_has_the_options_of_open(tmp_path):
    """As a query; a path may have blanks."""
    address = bootstrap.log_address(f"embedlog://{tmp_path}/a%20b?durability=fsync&lock_timeout=3")

    assert address == (f"{tmp_path}/a b", (("durability", "fsync"), ("lock_timeout", 3.0)))
    client = threading.Event()
    handle = bootstrap.attach(address, client)
    assert (handle.log.durability, handle.log.root.lock_timeout) == ("fsync", 3.0)
    with pytest.raises(InvalidConfigError, match="durability=fsync, not os"):
        bootstrap.attach(address._replace(options=(("durability", "os"),)), client)
    handle.close()
    assert handle.log.root.closed


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("embedlog://data/log", "three slashes"),
        ("embedlog:///data/build#2", "has a '#'.*write %23"),
        ("embedlog:///data?mode=r", "no option 'mode'"),
        ("embedlog:///data?maintenance=2", "cannot be '2'"),
        (["/data/a", "/data/b"], "Name one log"),
        (["/data/a", "localhost:9092"], "Name one log"),
    ],
)
def test_a_wrong_address_is_refused(address, message):
    """With the error of kafka-python, and a sentence about what to do."""
    with pytest.raises(errors.KafkaConfigurationError, match=message):
        KafkaProducer(bootstrap_servers=address)


def test_the_clients_of_a_process_share_a_log_until_the_last_is_closed(servers):
    """It is opened once, whatever the spelling of its address."""
    first = KafkaProducer(bootstrap_servers=servers)
    second = KafkaConsumer(bootstrap_servers=[Path(servers.removeprefix("embedlog://"))])
    log = first._log

    assert second._log is log
    first.close()
    first.close()
    assert second.bootstrap_connected()
    assert not first.bootstrap_connected()
    second.close()
    assert log.root.closed


def test_a_log_that_the_program_opened_is_used_with_its_clock(tmp_path, consume):
    """And left open: clients do not close what they did not open."""
    clock = ManualClock(1_234)
    with embedlog.open(tmp_path / "log", clock=clock, maintenance=False) as log:
        with KafkaProducer(bootstrap_servers=str(tmp_path / "log")) as producer:
            assert producer.send("t", b"x").get(10).timestamp == 1_234
        assert len(log.topic("t")) == 1


def test_brokers_lead_to_the_client_of_kafka_python():
    """The very class, which counts as an instance of ours, and is the base of a subclass."""

    class UnreachableError(Exception):
        """Instead of a connection."""

    def refuse(**_):
        raise UnreachableError

    with pytest.raises(UnreachableError):
        KafkaConsumer(bootstrap_servers="127.0.0.1:1", kafka_client=refuse)
    client = object.__new__(kafka.KafkaConsumer)
    assert isinstance(client, KafkaConsumer)
    assert not isinstance(client, KafkaAdminClient)

    class Mine(KafkaConsumer):
        """A subclass of a program."""

        def __init__(self, name, topic):
            clients.append(self)
            super().__init__(topic, bootstrap_servers=name, kafka_client=refuse)

    class Derived(Mine):
        """A subclass of that."""

    clients = []
    with pytest.raises(UnreachableError):
        Derived("127.0.0.1:1", "t")
    assert isinstance(clients[0], KafkaConsumer)
    assert type(clients[0]).__mro__[1:] == (Derived, Mine, kafka.KafkaConsumer, object)
    assert not isinstance(client, Mine)


def test_a_subclass_is_a_client_of_a_log(servers):
    """Programs extend the clients."""

    class Mine(KafkaProducer):
        """A subclass of a program."""

        def __init__(self, name, **configs):
            super().__init__(**configs)
            self.name = name

        def send(self, topic, value=None, **options):
            return super().send(topic, value and value.upper(), **options)

    with Mine("x", bootstrap_servers=servers) as producer:
        assert isinstance(producer, Mine)
        assert isinstance(producer, KafkaProducer)
        assert producer.send("t", b"x").get(10).offset == 0


@pytest.mark.parametrize(
    ("kind", "configs"),
    [
        (KafkaProducer, {"value_serializer": 5}),
        (KafkaProducer, {"acks": "some"}),
        (KafkaConsumer, {"value_deserializer": 5}),
        (KafkaConsumer, {"partition_assignment_strategy": "mine"}),
        (KafkaConsumer, {"fetch_min_bytes": "x"}),
    ],
)
def test_a_constructor_that_raises_gives_the_log_back(servers, kind, configs):
    """At once, although the error refers to the client."""
    with pytest.raises((TypeError, ValueError, errors.KafkaError)) as caught:
        kind(bootstrap_servers=servers, **configs)

    assert servers.removeprefix("embedlog://") not in bootstrap._shared
    del caught


@pytest.mark.parametrize("kind", [KafkaProducer, KafkaConsumer, KafkaAdminClient])
def test_a_client_cannot_be_copied(client, kind):
    """Nor pickled, as kafka-python's: a copy would look for a broker on localhost."""
    original = client(kind)
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=f"{kind.__name__} of a log cannot be copied"):
            make(original)


def test_a_client_that_is_collected_gives_the_log_back(servers):
    """As kafka-python's closes itself then; what was sent is written."""
    producer = KafkaProducer(bootstrap_servers=servers, linger_ms=60_000)
    log = producer._log
    consumer = KafkaConsumer("t", bootstrap_servers=servers, group_id="g")
    consumer.poll(0)
    producer.send("t", b"x")
    del producer, consumer
    gc.collect()

    assert log.root.closed
    with embedlog.open(log.path, mode="r") as log:
        assert [record.value for record in log.topic("t")] == [b"x"]


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (KafkaProducer, ValueError),
        (KafkaConsumer, errors.KafkaConfigurationError),
        (KafkaAdminClient, errors.KafkaConfigurationError),
    ],
)
def test_unknown_settings_are_refused_as_kafka_python_does(servers, kind, error, caplog):
    """With the same errors; settings of a network are known, and ignored with one line."""
    caplog.set_level("INFO", "embedlog.kafka")
    with pytest.raises(error, match=r"Unrecognized configs: \{'nonsense'"):
        kind(bootstrap_servers=servers, nonsense=1)
    with kind(bootstrap_servers=servers, security_protocol="SSL", ssl_cafile="x") as client:
        assert client.config["ssl_cafile"] == "x"
        assert client.config["request_timeout_ms"] == 30_000
    assert [line for line in caplog.messages if "security_protocol" in line] == [
        "Settings without effect on a log are ignored: security_protocol, ssl_cafile"
    ]


# Producing


def test_a_future_is_that_of_kafka_python(client):
    """Its metadata has the sizes of what was sent."""
    producer = client(KafkaProducer, value_serializer=JsonSerializer(), key_serializer=str.encode)
    done = []

    future = producer.send("t", {"a": 1}, key="kö", headers=[("h", b"abc")], timestamp_ms=7)
    future.add_callback(lambda *arguments: done.append(arguments), 5)
    metadata = future.get(timeout=10)

    assert metadata == ("t", 0, T0, 0, 7, None, 3, 8, 4)
    assert metadata.serialized_header_size == 4
    assert future.is_done
    assert future.succeeded()
    assert not future.failed()
    assert (future.value, future.exception) == (metadata, None)
    producer.flush()
    assert done == [(5, metadata)]
    assert producer.partitions_for("t") == {0}
    assert producer.send("t", key="k").get().serialized_value_size == -1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "Need at least one"),
        ({"value": "text"}, TypeError, "must be bytes"),
        ({"value": b"x", "partition": 9}, ValueError, "partitions 0 to 0"),
        ({"value": b"x", "headers": (("a", b"b"),)}, TypeError, "must be list-type"),
        ({"value": b"x", "headers": [("a", "b")]}, TypeError, "tuples"),
        ({"value": b"x" * (1 << 20)}, errors.MessageSizeTooLargeError, "max_request_size"),
    ],
)
def test_send_refuses_what_kafka_python_refuses(client, arguments, error, message):
    """With the same errors."""
    producer = client(KafkaProducer)
    with pytest.raises(error, match=message):
        producer.send("t", **arguments)
    producer.close()
    with pytest.raises(errors.IllegalStateError):
        producer.send("t", b"x")


def test_a_record_fails_with_an_error_of_kafka_python(client, servers):
    """The sentence and the cause are embedlog's."""
    with client(KafkaAdminClient) as admin:
        admin.create_topics({"c": {"configs": {"cleanup.policy": "compact"}}})
    failed = []
    future = client(KafkaProducer).send("c", b"without a key").add_errback(failed.append)

    with pytest.raises(errors.InvalidRecordError, match="key") as raised:
        future.get(10)
    assert isinstance(raised.value.__cause__, embedlog.errors.InvalidRecordError)
    assert str(raised.value.__cause__) in str(raised.value)
    assert isinstance(future.exception, errors.InvalidRecordError)
    assert future.failed()
    assert not future.retriable()
    assert [type(error) for error in failed] == [errors.InvalidRecordError]


def test_a_time_that_the_topic_refuses_has_kafkas_error(client):
    """Not that of a record without a key."""
    topic = NewTopic("t", 1, 1, topic_configs={"message.timestamp.before.max.ms": "1000"})
    client(KafkaAdminClient).create_topics([topic])
    with pytest.raises(errors.InvalidTimestampError, match="not within"):
        client(KafkaProducer).send("t", b"v", timestamp_ms=5).get(10)


CONFLICTS = {"acks": 1, "retries": 0, "max_in_flight_requests_per_connection": 6}
"""Settings that switch idempotence off."""


@pytest.mark.parametrize("name", [*CONFLICTS, "enable_idempotence"])
def test_settings_that_exclude_idempotence_are_refused_or_switch_it_off(client, name):
    """As in kafka-python: refused with transactions, which need it; `config` says what is used."""
    conflict = {name: CONFLICTS.get(name, False)}
    assert client(KafkaProducer).config["enable_idempotence"] is True
    assert client(KafkaProducer, **conflict).config["enable_idempotence"] is False
    with pytest.raises(errors.KafkaConfigurationError, match="idempotence"):
        client(KafkaProducer, transactional_id="x", **conflict)


@pytest.mark.parametrize("name", ["a b", "", ".", "x" * 250, None, 5])
def test_a_name_that_no_topic_can_have_is_refused(client, name):
    """At once, as in kafka-python, with ValueError or TypeError; it would be waited for in vain."""
    producer, consumer = client(KafkaProducer), client(KafkaConsumer, group_id="g")
    error = ValueError if isinstance(name, str) else TypeError
    for call in (
        lambda: producer.send(name, b"v"),
        lambda: producer.partitions_for(name),
        lambda: consumer.subscribe([name]),
        lambda: client(KafkaConsumer, name),
    ):
        with pytest.raises(error):
            call()
    assert not isinstance(name, str) or consumer.partitions_for_topic(name) == set()


def test_a_poll_without_a_subscription_returns_nothing(client, consume):
    """As in kafka-python; the consumer can be used later."""
    send(client, b"a")
    for group in (None, "g"):
        consumer = consume(group_id=group)
        assert consumer.poll(10) == {}
        consumer.subscribe(["t"])
        assert consumer.poll(10_000)[T0][0].value == b"a"
        consumer.unsubscribe()
        assert consumer.poll(0) == {}
        consumer.assign([T0])
        assert consumer.poll(0) is not None


def test_partitioners_of_kafka_python_choose(client, consume):
    """Objects with its method, and the callables of older releases."""
    client(KafkaAdminClient).create_topics([NewTopic("t", 4, 1)])

    class Last:
        """Chooses the last partition."""

        def partition(self, topic, key, serialized_key, value, serialized_value, cluster):
            assert (topic, key, serialized_key) == ("t", "k", b"k")
            return max(cluster.partitions_for_topic(topic))

    producer = client(KafkaProducer, partitioner=Last(), key_serializer=str.encode)
    assert producer.send("t", b"x", key="k").get().partition == 3
    older = client(KafkaProducer, partitioner=lambda key, everyone, available: everyone[1])
    assert older.send("t", b"x").get().partition == 1
    assert older.send("t", b"x", partition=2).get().partition == 2


def test_gzip_and_snappy_are_stored_as_zstd_and_lz4(client, consume):
    """Programs that name them run, and compress."""
    for codec in (None, "gzip", "snappy", "lz4", "zstd"):
        send(client, b"x" * 1000, compression_type=codec)
    assert [len(record.value) for record in consume("t")] == [1000] * 5
    with pytest.raises(errors.KafkaConfigurationError, match="compression_type"):
        client(KafkaProducer, compression_type="bzip2")


# Consuming


def test_a_record_has_the_fields_of_kafka_python_in_their_order(client, consume):
    """Sizes are those of the bytes; absent things have -1."""
    producer = client(KafkaProducer)
    producer.send("t", b"12", key=b"1", headers=[("é", b"abc")], timestamp_ms=5)
    producer.send("t", None, key=b"1", timestamp_ms=6)
    producer.send("t", b"", timestamp_ms=7)
    producer.flush()

    records = list(consume("t", value_deserializer=lambda data: data and int(data)))

    assert [tuple(record) for record in records] == [
        ("t", 0, 0, 0, 5, 0, b"1", 12, [("é", b"abc")], None, 1, 2, 5),
        ("t", 0, 0, 1, 6, 0, b"1", None, [], None, 1, -1, -1),
        ("t", 0, 0, 2, 7, 0, None, b"", [], None, -1, 0, -1),
    ]
    assert records[0]._fields[8:] == (
        *("headers", "checksum"),
        *("serialized_key_size", "serialized_value_size", "serialized_header_size"),
    )
    assert pickle.loads(pickle.dumps(records[0])) == records[0]
    assert repr(records[0]).startswith("ConsumerRecord(topic='t', partition=0, leader_epoch=0")


def test_the_error_of_a_deserializer_comes_through(client, consume):
    """As from kafka-python, after the records before it, with embedlog's sentence as a note."""
    send(client, b"1", b"two", b"3")
    consumer = consume("t", value_deserializer=int)

    assert next(consumer).value == 1
    with pytest.raises(ValueError, match="invalid literal") as raised:
        next(consumer)
    assert "offset 1" in raised.value.__notes__[0]
    consumer.seek(T0, 2)
    assert [record.value for record in consumer] == [3]


def test_raw_bytes_are_the_default_whatever_the_topic_keeps(client, consume, servers):
    """As in Kafka: a topic's serializer is for embedlog's own producers and consumers."""
    with embedlog.open(servers.removeprefix("embedlog://")) as log:
        log.create_topic("t", config={"value.serializer": "json"})
        send(client, b"[1]")
        assert [record.value for record in consume("t")] == [b"[1]"]
        assert log.topic("t").name == "t"


def test_a_consumer_without_a_group_subscribes(client, consume):
    """As kafka-python's does: to all partitions, also of topics that match a pattern."""
    client(KafkaAdminClient).create_topics({"t": {"num_partitions": 2}, "other": {}})
    consumer = consume()
    assert consumer.subscription() is None
    with pytest.raises(ValueError, match="topics or pattern"):
        consumer.subscribe()
    with pytest.raises(TypeError):
        consumer.subscribe("t")

    consumer.subscribe(pattern="t")
    assert consumer.assignment() == {T0, TopicPartition("t", 1)}
    with pytest.raises(errors.IllegalStateError):
        consumer.assign([T0])
    consumer.unsubscribe()
    consumer.assign([T0])
    assert consumer.assignment() == {T0}
    consumer.assign([])
    assert consumer.assignment() == set()


def test_positions(client, consume):
    """Seeks, pauses, high watermarks, and a poll that leaves the positions."""
    send(client, b"a", b"b", b"c")
    consumer = consume()
    consumer.assign([T0])

    assert consumer.position(T0, timeout_ms=100) == 0
    assert consumer.highwater(T0) == 3
    assert [r.value for r in consumer.poll(100, 2, update_offsets=False)[T0]] == [b"a", b"b"]
    assert [r.value for r in consumer.poll(100, max_records=2)[T0]] == [b"a", b"b"]
    consumer.pause(T0)
    consumer.seek_to_beginning(T0)
    assert consumer.paused() == {T0}
    assert consumer.poll(0) == {}
    consumer.resume(T0)
    assert [record.value for record in consumer] == [b"a", b"b", b"c"]
    consumer.seek_to_end()
    assert consumer.position(T0) == 3
    assert consumer.beginning_offsets([T0]) == {T0: 0}
    assert consumer.end_offsets([T0]) == {T0: 3}
    for call, error in (
        (lambda: consumer.seek(TopicPartition("t", 1), 0), ValueError),
        (lambda: consumer.seek(T0, -1), ValueError),
        (lambda: consumer.position("t"), TypeError),
        (lambda: consumer.position(TopicPartition("t", 1)), errors.IllegalStateError),
        (lambda: consumer.poll(-1), ValueError),
        (lambda: consumer.poll(0, "1"), TypeError),
        (lambda: consumer.end_offsets([TopicPartition("t", 1)]), errors.KafkaTimeoutError),
        (lambda: consumer.commit(), errors.IllegalStateError),
    ):
        with pytest.raises(error):
            call()
    consumer.close()
    assert list(consumer) == []
    with pytest.raises(errors.IllegalStateError):
        consumer.poll(0)


def test_commits(client, consume):
    """With kafka-python's tuples, of two and of three fields."""
    send(client, b"a", b"b", b"c")
    consumer = consume(group_id="g", enable_auto_commit=False)
    consumer.assign([T0])

    consumer.commit({T0: OffsetAndMetadata(1, "note", -1)})
    assert consumer.committed(T0) == 1
    assert consumer.committed(T0, metadata=True) == OffsetAndMetadata(1, "note", -1)
    consumer.commit({T0: (2, "note")})
    assert consumer.committed(T0) == 2
    reports = []
    future = consumer.commit_async(
        {T0: OffsetAndMetadata(3, "", -1)}, lambda *report: reports.append(report)
    )
    outcomes = []
    future.add_callback(outcomes.append).add_errback(outcomes.append)
    consumer.poll(0)
    assert reports == [({T0: OffsetAndMetadata(3, "", None)}, None)]
    assert (future.is_done, future.succeeded(), future.failed()) == (True, True, False)
    assert (future.value, future.exception, outcomes) == (None, None, [None])
    future = consumer.commit_async({TopicPartition("t", 9): OffsetAndMetadata(3, "", -1)})
    future.add_both(outcomes.append)
    assert (future.succeeded(), future.failed(), future.retriable()) == (False, True, True)
    assert isinstance(future.exception, errors.UnknownTopicOrPartitionError)
    assert [type(outcome) for outcome in outcomes[1:]] == [type(future.exception)]
    consumer.close(autocommit=False)
    assert client(KafkaAdminClient).list_group_offsets("g") == {
        "g": {T0: OffsetAndMetadata(3, "", -1)}
    }


@pytest.mark.parametrize("asynchronous", [False, True])
def test_rebalance_listeners_of_kafka_python_are_called(client, consume, asynchronous):
    """Also those whose methods are coroutines."""
    client(KafkaAdminClient).create_topics(["t"])
    calls = []

    class Listener(ConsumerRebalanceListener):
        """Notes its calls."""

        def on_partitions_revoked(self, revoked):
            calls.append(("revoked", revoked))

        def on_partitions_assigned(self, assigned):
            calls.append(("assigned", assigned))

    class AsyncListener(AsyncConsumerRebalanceListener):
        """Notes its calls."""

        async def on_partitions_revoked(self, revoked):
            calls.append(("revoked", revoked))

        async def on_partitions_assigned(self, assigned):
            calls.append(("assigned", assigned))

    consumer = consume(group_id="g")
    consumer.subscribe(["t"], listener=(AsyncListener if asynchronous else Listener)())
    consumer.poll(0)
    assert ("assigned", {T0}) in calls
    assert consumer.group_metadata().group_id == "g"
    assert consumer.group_metadata().state == "<stable>"
    consumer.close()
    assert calls[-1] == ("revoked", {T0})
    with pytest.raises(TypeError, match="listener"):
        consume(group_id="g").subscribe(["t"], listener=print)


def test_the_assignment_may_be_asked_for_while_another_thread_polls(client, consume):
    """As a program does that watches its consumers."""
    client(KafkaAdminClient).create_topics(["t"])
    consumer = consume("t", group_id="g")
    consumer.poll(0)
    polling = threading.Thread(target=consumer.poll, args=(10_000,))
    polling.start()
    assert consumer.assignment() == {T0}
    assert consumer.paused() == set()
    assert consumer.group_metadata().generation_id > 0
    send(client, b"x")
    polling.join()


# Administration


def test_topics(client):
    """Create, describe, grow and delete them."""
    admin = client(KafkaAdminClient)

    (created,) = admin.create_topics(
        {"t": {"num_partitions": 2, "replication_factor": 1, "configs": {"retention.ms": 5}}}
    )["topics"]
    assert (created["name"], created["error_code"], created["num_partitions"]) == ("t", 0, 2)
    with pytest.raises(errors.TopicAlreadyExistsError):
        admin.create_topics(["t"])
    (failed,) = admin.create_topics(["t"], raise_errors=False)["topics"]
    assert failed["error_code"] == errors.TopicAlreadyExistsError.errno
    with pytest.raises(errors.InvalidConfigurationError):
        admin.create_topics({"u": {"configs": {"nonsense": "1"}}}, validate_only=True)
    with pytest.raises(errors.TopicAlreadyExistsError):
        admin.create_topics(["t"], validate_only=True)
    with pytest.raises(errors.InvalidTopicError):
        admin.create_topics(["bad name"], validate_only=True)
    admin.create_topics(["u"], validate_only=True)
    admin.create_partitions({"t": 3}, validate_only=True)
    assert admin.create_partitions({"t": NewPartitions(3)}).results == [("t", 0, None)]
    with pytest.raises(errors.InvalidPartitionsError):
        admin.create_partitions({"t": 2})
    (topic,) = admin.describe_topics(["t"])
    assert [part["partition_index"] for part in topic["partitions"]] == [0, 1, 2]
    assert admin.describe_topics([UUID(topic["topic_id"])]) == [topic]
    page = admin.describe_topic_partitions(["t"], response_partition_limit=2)
    assert page["next_cursor"] == {"topic_name": "t", "partition_index": 2}
    rest = admin.describe_topic_partitions(["t"], cursor=page["next_cursor"])
    assert [part["partition_index"] for part in rest["topics"][0]["partitions"]] == [2]
    assert admin.list_topics() == ["t"]
    admin.delete_topics([UUID(topic["topic_id"])])
    assert admin.list_topics() == []
    assert admin.describe_topics(["t"])[0]["error_code"] == 3
    admin.create_topics(["t"])
    admin.delete_topics(["t"])
    assert admin.list_topics() == []


def test_settings_of_topics(client):
    """Described with their source; set, appended to and reset."""
    admin = client(KafkaAdminClient)
    admin.create_topics(["t"])

    def change(**configs):
        names = {name.replace("_", "."): value for name, value in configs.items()}
        return admin.alter_configs([ConfigResource("topic", "t", names)])

    def modified():
        described = admin.describe_configs([ConfigResource("TOPIC", "t")])["topic"]["t"]
        return {name: entry["value"] for name, entry in described.items()}

    assert modified() == {}
    assert change(retention_ms="60000") == {"topic": {"t": "OK"}}
    assert change(cleanup_policy=("APPEND", "compact")) == {"topic": {"t": "OK"}}
    assert modified() == {"retention.ms": "60000", "cleanup.policy": "compact,delete"}
    change(cleanup_policy=("SUBTRACT", "delete"))
    assert modified()["cleanup.policy"] == "compact"
    assert "InvalidConfigurationError" in change(retention_ms="soon")["topic"]["t"]
    with pytest.raises(ValueError, match="Unrecognized configs"):
        change(nonsense="1")
    admin.reset_configs([ConfigResource("topic", "t", ["retention.ms"])])
    assert modified() == {"cleanup.policy": "compact"}
    admin.reset_configs([ConfigResource("topic", "t", {})])
    assert modified() == {}


def test_offsets_and_groups(client, consume):
    """Look them up, change, reset and delete them."""
    producer, admin = client(KafkaProducer), client(KafkaAdminClient)
    for time in (10, 30, 20):
        producer.send("t", b"x", timestamp_ms=time)
    producer.flush()

    def offset(spec):
        found = admin.list_partition_offsets({T0: spec})[T0]
        return found.offset, found.timestamp

    assert offset(OffsetSpec.EARLIEST) == (0, -1)
    assert offset(OffsetSpec.LATEST) == (3, -1)
    assert offset(OffsetSpec.MAX_TIMESTAMP) == (1, 30)
    assert offset(15) == (1, 30)
    assert offset(31) == (-1, -1)
    unknown = TopicPartition("t", 9)
    changes = {T0: OffsetAndMetadata(1, "m", -1), unknown: OffsetAndMetadata(1, "", -1)}
    assert admin.alter_group_offsets("g", changes) == {
        T0: errors.NoError,
        unknown: errors.UnknownTopicOrPartitionError,
    }
    reset = admin.reset_group_offsets("g", {T0: 99})
    assert reset == {T0: {"error": errors.NoError, "offset": 3}}
    assert admin.list_group_offsets(["g"])["g"][T0] == OffsetAndMetadata(3, "m", -1)
    with consume("t", group_id="g") as member:
        member.poll(0)
        group = admin.describe_groups(["g"])["g"]
        assert (group["group_state"], len(group["members"])) == ("Stable", 1)
        assert group["members"][0]["member_assignment"]["assigned_partitions"] == [
            {"topic": "t", "partitions": [0]}
        ]
        assert admin.delete_groups(["g"]) == {"g": "NonEmptyGroupError"}
        assert admin.alter_group_offsets("g", {T0: OffsetAndMetadata(1, "", -1)}) == {
            T0: errors.UnknownMemberIdError
        }
    assert [group["group_id"] for group in admin.list_groups()] == ["g"]
    assert admin.delete_group_offsets("g", [T0]) == {T0: errors.NoError}
    assert admin.describe_groups(["none"])["none"]["group_state"] == "Dead"


def test_records_are_deleted(client):
    """The first error of an offset is raised, and an unknown partition."""
    send(client, b"a", b"b")
    admin = client(KafkaAdminClient)

    assert admin.delete_records({T0: 1}) == {
        T0: {"low_watermark": 1, "error_code": 0, "partition_index": 0}
    }
    with pytest.raises(errors.OffsetOutOfRangeError):
        admin.delete_records({T0: 9})
    with pytest.raises(errors.UnknownTopicOrPartitionError):
        admin.delete_records({TopicPartition("t", 1): 1})


def test_the_largest_time_is_that_of_a_record_that_is_left(client):
    """Also after the record with a larger one was deleted; -1 is an empty partition's alone."""
    producer, admin = client(KafkaProducer), client(KafkaAdminClient)
    for time in (100, 400, 150, 160, 140):
        producer.send("t", b"v", timestamp_ms=time).get(10)
    found = {}
    for start in range(6):
        admin.delete_records({T0: start})
        newest = admin.list_partition_offsets({T0: OffsetSpec.MAX_TIMESTAMP})[T0]
        found[start] = (newest.offset, newest.timestamp)

    assert found == {
        **dict.fromkeys((0, 1), (1, 400)),
        **dict.fromkeys((2, 3), (3, 160)),
        4: (4, 140),
        5: (-1, -1),
    }


def test_the_log_is_a_cluster_of_one_broker(client, tmp_path):
    """What is about replicas, users and transactions is refused in words."""
    admin = client(KafkaAdminClient)

    assert [broker["broker_id"] for broker in admin.describe_cluster()["brokers"]] == [0]
    assert admin.describe_log_dirs()[0]["log_dirs"][0]["log_dir"] == f"{tmp_path}/log"
    assert admin.list_partition_reassignments() == {}
    with pytest.raises(errors.UnsupportedVersionError, match="only a cluster"):
        admin.describe_metadata_quorum()
    with pytest.raises(AttributeError):
        admin.nonsense()


def test_clients_of_a_log_that_was_closed_raise_its_errors(tmp_path):
    """As kafka-python's IllegalStateError; they can be closed."""
    log = embedlog.open(tmp_path / "log")
    log.create_topic("t")
    kinds = (KafkaProducer, KafkaConsumer, KafkaAdminClient)
    producer, consumer, admin = (kind(bootstrap_servers=log.path) for kind in kinds)
    consumer.assign([T0])
    log.close()

    for call in (
        lambda: producer.send("t", b"x"),
        *(lambda: consumer.poll(0), lambda: next(consumer), lambda: list(consumer)),
        *(lambda: consumer.seek(T0, 0), lambda: consumer.end_offsets([T0]), consumer.topics),
        *(admin.describe_cluster, admin.list_topics, admin.list_config_resources),
    ):
        with pytest.raises(errors.IllegalStateError):
            call()
    for client in (producer, consumer, admin):
        assert not client.bootstrap_connected()
        client.close()


# Patched programs

PROGRAM = """
import sys, warnings
import kafka
from kafka import KafkaConsumer, KafkaProducer
from kafka.admin import KafkaAdminClient, NewTopic
from kafka.errors import KafkaError, TopicAlreadyExistsError
from kafka.structs import TopicPartition

admin = KafkaAdminClient(bootstrap_servers="localhost:9092")
admin.create_topics([NewTopic("t", 2, 1)])
try:
    admin.create_topics([NewTopic("t", 2, 1)])
except kafka.errors.TopicAlreadyExistsError as error:
    print(isinstance(error, KafkaError), error.errno)
producer = KafkaProducer(value_serializer=str.encode)
print(producer.send("t", "hello", partition=1).get(timeout=5).topic_partition)
consumer = KafkaConsumer(auto_offset_reset="earliest", consumer_timeout_ms=100)
consumer.assign([TopicPartition("t", 1)])
print([record.value for record in consumer], sys.argv[1:])
"""
OUTPUT = ["True 36", "TopicPartition(topic='t', partition=1)", "[b'hello'] ['--fast']"]


@pytest.mark.tier("test")
def test_an_unchanged_program_runs_on_a_log(tmp_path):
    """With ``python -m embedlog.kafka``."""
    (tmp_path / "program.py").write_text(PROGRAM)
    arguments = [str(tmp_path / "log"), str(tmp_path / "program.py"), "--fast"]
    main = f"from embedlog.kafka.__main__ import main\nmain({arguments!r})"

    output = run_python("-W", "error", "-c", main)

    assert output.splitlines() == OUTPUT
    with embedlog.open(tmp_path / "log", mode="r") as log:
        assert [record.value for record in log.topic("t")] == [b"hello"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["log", "-m"], "usage:"),
        (["log", "missing.py"], "There is no script missing.py"),
        (["localhost:9092", "program.py"], "localhost:9092 is not the directory of a log"),
        (["program.py", "log"], "program.py is not the directory of a log"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, monkeypatch, arguments, message):
    """Before a log is created, and before the program runs."""
    monkeypatch.chdir(tmp_path)
    Path("program.py").touch()

    with pytest.raises(SystemExit, match=message):
        main(arguments)

    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (log_errors.ClosedError("Closed"), errors.IllegalStateError),
        (log_errors.DiskFullError("Full"), errors.KafkaStorageError),
        (log_errors.LockTimeoutError("Held"), errors.KafkaTimeoutError),
        (log_errors.CorruptBatchError("Cut"), errors.CorruptRecordError),
        (log_errors.UnknownMemberIdError("Gone"), errors.UnknownMemberIdError),
        (log_errors.SerializationError("Text"), TypeError),
        (log_errors.EmbedlogError("Other"), errors.KafkaError),
        (ValueError("A program's own"), ValueError),
    ],
)
def test_errors_are_translated_with_their_sentence(error, kind):
    """To the nearest error of kafka-python."""
    translated = errors.translated(error)
    assert type(translated) is kind
    assert str(error) in str(translated)


def test_a_truncation_says_where_to_continue():
    """As kafka-python's error does."""
    error = log_errors.LogTruncatedError("Cut", topic="t", partition=0, offset=9, next_offset=5)
    translated = errors.translated(error)
    assert type(translated) is errors.LogTruncationError
    assert translated.divergent_offsets == {T0: (5, "", -1)}


def test_patch_reaches_classes_that_were_imported_before(tmp_path):
    """And `unpatch` takes everything back."""
    before = kafka.KafkaProducer
    attributes = dict(vars(before))

    class Mine(before):
        """A subclass of a program, which was defined before."""

        def __init__(self, servers):
            super().__init__(bootstrap_servers=servers)

    with embedlog.kafka.patch(tmp_path / "log"):
        assert not isinstance(before, (KafkaProducer, KafkaConsumer))
        with Mine("localhost:9092") as producer:
            assert isinstance(producer, Mine)
            assert isinstance(producer, KafkaProducer)
            assert producer.send("t", b"x").get(10).offset == 0
        assert kafka.KafkaProducer is KafkaProducer
        for kind in (before, kafka.KafkaProducer):
            with kind(bootstrap_servers="localhost:9092") as producer:
                producer.send("t", b"x").get(10)
        with kafka.KafkaConsumer() as consumer:
            assert consumer.end_offsets([kafka.TopicPartition("t", 0)]) == {T0: 3}
        with kafka.KafkaAdminClient() as admin, pytest.raises(errors.UnsupportedVersionError):
            admin.describe_features()

    assert kafka.KafkaProducer is before
    assert dict(vars(before)) == attributes
    with pytest.raises(ZeroDivisionError):
        before(bootstrap_servers="127.0.0.1:1", kafka_client=lambda **_: 1 / 0)
    assert bootstrap.log_address("localhost:9092") is None
    with pytest.raises(InvalidConfigError, match="does not name a log"):
        embedlog.kafka.patch("localhost:9092")
    embedlog.kafka.patch()
    embedlog.kafka.unpatch()
    assert kafka.KafkaProducer is before


def test_patches_may_end_in_any_order(tmp_path):
    """The last one that is in force decides; afterwards everything is as before."""
    before = kafka.KafkaProducer

    def path():
        return bootstrap.log_address("localhost:9092").path

    first = embedlog.kafka.patch(tmp_path / "first")
    second = embedlog.kafka.patch(tmp_path / "second")
    third = embedlog.kafka.patch()
    assert path() == str(tmp_path / "second")
    first.undo()
    assert path() == str(tmp_path / "second")
    assert kafka.KafkaProducer is KafkaProducer
    second.undo()
    second.undo()
    assert bootstrap.log_address("localhost:9092") is None
    third.undo()
    assert kafka.KafkaProducer is before


PACKAGES = """
import sys
def modules():
    return {name: module for name, module in sys.modules.items()
            if name.partition(".")[0] in ("kafka", "confluent_kafka")}
"""


@pytest.mark.tier("all")
def test_patch_leaves_the_modules_as_they_were(tmp_path):
    """Also those that a program imports meanwhile, such as confluent_kafka's asyncio clients."""
    pytest.importorskip("confluent_kafka.aio")
    code = f"""{PACKAGES}
import confluent_kafka.aio, embedlog.kafka
embedlog.kafka.patch(sys.argv[1]).undo()
before, producer, early = modules(), confluent_kafka.Producer, confluent_kafka
with embedlog.kafka.patch(sys.argv[1]):
    with early.Producer({{"bootstrap.servers": "broker:9092"}}) as made:
        print(type(made).__module__, isinstance(made, producer))
    import confluent_kafka
    from confluent_kafka import aio
    from confluent_kafka.serializing_producer import SerializingProducer
    assert aio.__spec__ is not before["confluent_kafka.aio"].__spec__
    with SerializingProducer({{"bootstrap.servers": "broker:9092"}}) as made:
        print(isinstance(made, confluent_kafka.Producer), made.produce("t", value=b"x"))
assert modules() == before
import confluent_kafka
assert confluent_kafka.Producer is producer
assert confluent_kafka.aio is before["confluent_kafka.aio"]
"""

    assert run_python("-c", code, tmp_path / "log").splitlines() == [
        *("embedlog.kafka.confluent.producer True", "True None")
    ]


def hidden(*packages):
    """Return code that has Python not find some packages."""
    return f"import sys\nfor name in {packages!r}: sys.modules[name] = None\n"


def test_without_kafka_python_an_import_says_what_to_install():
    """The core, `embedlog.testing`, and the clients of confluent_kafka do not need it."""
    names = ("KafkaConsumer", "errors", "TopicPartition", "admin", "consumer")
    code = f"""{hidden("kafka")}
import embedlog, embedlog.kafka, embedlog.testing
from embedlog.kafka import confluent, patch
for name in {names}:
    try:
        exec(f"from embedlog.kafka import {{name}}")
    except ImportError as error:
        print(error)
"""
    assert run_python("-c", code).splitlines() == [
        'kafka-python is not installed: run pip install "embedlog[kafka-python]"'
    ] * len(names)


def test_a_library_that_is_too_old_is_refused(tmp_path):
    """By the import and by `patch`, with the version that is needed."""
    (tmp_path / "kafka.py").write_text("__version__ = '2.0.2'")
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import embedlog.kafka
for use in (lambda: embedlog.kafka.KafkaProducer, embedlog.kafka.patch):
    try: use()
    except ImportError as error: print(error)
"""
    text = 'kafka-python 2.0.2 is older than 3.0: run pip install "embedlog[kafka-python]"'
    assert run_python("-c", code, tmp_path).splitlines() == [text, text]


def test_patch_replaces_the_library_that_is_installed(tmp_path):
    """Kafka-python, confluent_kafka or aiokafka alone; without any there is nothing to patch."""
    code = """
import embedlog.kafka
with embedlog.kafka.patch(sys.argv[1]):
    import {0}
    print({0}.{1}.__module__)
"""
    libraries = [
        ("kafka", "confluent_kafka", "Producer"),
        ("confluent_kafka", "kafka", "KafkaProducer"),
        ("kafka", "aiokafka", "AIOKafkaProducer"),
    ]
    for absent, present, client in sample(libraries, 1):
        output = run_python("-c", hidden(absent) + code.format(present, client), tmp_path / "log")
        assert output.startswith("embedlog.kafka.")
    code = """
import embedlog.kafka
try: embedlog.kafka.patch(sys.argv[1])
except ImportError as error: print(error)
"""
    output = run_python("-c", hidden("kafka", "confluent_kafka", "aiokafka") + code, tmp_path)
    assert 'pip install "embedlog[kafka-python]", "embedlog[confluent-kafka]"' in output


def test_patch_replaces_confluent_kafka_too(tmp_path):
    """Both libraries' clients use one log."""
    with embedlog.kafka.patch(tmp_path / "log"):
        confluent = importlib.import_module("confluent_kafka")
        producer = confluent.Producer({"bootstrap.servers": "localhost:9092"})
        producer.produce("t", b"x")
        producer.flush()
        with KafkaConsumer() as consumer:
            assert consumer.end_offsets([T0]) == {T0: 1}
        producer.close()

    assert sys.modules.get("confluent_kafka") is not confluent


# The README of kafka-python


def test_what_the_readme_of_kafka_python_shows(client, consume):
    """Its examples, in other words; that of transactions has a test of its own."""
    producer = client(KafkaProducer)
    for _ in range(100):
        producer.send("foobar", b"some_message_bytes")
    assert producer.send("foobar", b"another_message").get(timeout=60).offset == 100
    producer.flush()
    producer.send("foobar", key=b"foo", value=b"bar")
    encoded = [("content-encoding", b"base64")]
    producer.send("foobar", value=b"c29tZSB2YWx1ZQ==", headers=encoded)
    client(KafkaProducer, value_serializer=JsonSerializer()).send("fizzbuzz", {"foo": "bar"})
    text = client(KafkaProducer, key_serializer=DefaultSerializer())
    text.send("flipflap", key="ping", value=b"1234")
    zipped = client(KafkaProducer, compression_type="gzip")
    for number in range(1000):
        zipped.send("foobar", b"msg %d" % number)
    for made in (producer, text, zipped):
        made.flush()
        assert made.metrics()["producer-metrics"]["record-send-total"]

    shown = [repr(record) for record in consume("foobar")]
    assert len(shown) == 1103
    assert shown[0].startswith("ConsumerRecord(topic='foobar'")
    grouped = consume("foobar", group_id="my_favorite_group")
    assert next(grouped).value == b"some_message_bytes"
    assigned = consume()
    assigned.assign([TopicPartition("foobar", 0)])
    assert next(assigned).offset == 0
    assert assigned.metrics()["consumer-fetch-manager-metrics"]["records-consumed-total"] > 0
    decoded = consume(value_deserializer=JsonSerializer())
    decoded.subscribe(["fizzbuzz"])
    client(KafkaProducer, value_serializer=JsonSerializer()).send("fizzbuzz", {}).get(10)
    assert all(isinstance(record.value, dict) for record in decoded)
    assert consume("flipflap", key_deserializer=DefaultSerializer()).poll(1000)
    assert next(consume("foobar", isolation_level="read_committed")).headers == []


# Transactions


@pytest.fixture
def values(consume):
    """Reads the values of two topics that consumers see."""
    return lambda: [record.value for record in consume("t", "u")]


def test_the_records_of_a_transaction_become_visible_together(client, values):
    """As in the README of kafka-python; those of an aborted one never."""
    producer = client(KafkaProducer, transactional_id="fizzbuzz", key_serializer=str.encode)
    producer.init_transactions()

    producer.begin_transaction()
    metadata = producer.send("t", b"yes", key="k", headers=[("h", b"x")]).get()
    producer.send("u", b"and", key="k")
    assert (metadata.topic, metadata.offset, metadata.serialized_key_size) == ("t", -1, 1)
    assert values() == []
    producer.commit_transaction()
    assert sorted(values()) == [b"and", b"yes"]
    producer.begin_transaction()
    producer.send("t", b"no", key="k").get()
    producer.abort_transaction()
    assert sorted(values()) == [b"and", b"yes"]
    producer.begin_transaction()
    producer.commit_transaction()


def test_a_newer_producer_fences_the_transactions_of_an_older_one(client, values):
    """Even if the newer one has committed nothing yet."""
    older = client(KafkaProducer, transactional_id="name")
    older.init_transactions()
    older.begin_transaction()
    older.send("t", b"late")
    newer, other = (client(KafkaProducer, transactional_id=name) for name in ("name", "other"))
    newer.init_transactions()
    other.init_transactions()

    with pytest.raises(errors.ProducerFencedError, match="newer producer"):
        older.commit_transaction()
    for producer in (newer, other):
        producer.begin_transaction()
        producer.send("t", b"x")
        producer.commit_transaction()
    assert values() == [b"x", b"x"]


@pytest.mark.parametrize("first", ["commit_transaction", "abort_transaction"])
def test_a_producer_that_was_fenced_stays_so(client, values, first):
    """Every later call raises it, so that a loop that aborts and tries again ends."""
    older = client(KafkaProducer, transactional_id="name")
    older.init_transactions()
    older.begin_transaction()
    older.send("t", b"late")
    client(KafkaProducer, transactional_id="name").init_transactions()

    for call in (
        getattr(older, first),
        *(older.abort_transaction, older.begin_transaction, older.commit_transaction),
        *(older.init_transactions, lambda: older.send("t", b"later")),
    ):
        with pytest.raises(errors.ProducerFencedError, match="newer producer"):
            call()
    assert values() == []


@pytest.mark.parametrize("initialized", [False, True])
def test_a_producer_that_was_closed_begins_no_transaction(client, values, initialized):
    """Though other clients keep its log open."""
    client(KafkaProducer)
    producer = client(KafkaProducer, transactional_id="name")
    if initialized:
        producer.init_transactions()
    producer.close()
    for call in (
        *(producer.init_transactions, producer.begin_transaction, producer.commit_transaction),
        *(producer.abort_transaction, lambda: producer.send("t", b"x")),
    ):
        with pytest.raises(errors.IllegalStateError, match="closed"):
            call()
    assert values() == []


def test_a_commit_may_be_repeated_and_publishes_once(client, values, monkeypatch):
    """If it failed after the records were published, as when the disk is full just then."""
    producer = client(KafkaProducer, transactional_id="name")
    producer.init_transactions()
    producer.begin_transaction()
    producer.send("t", b"x")

    commit = live_commit.commit

    def commit_and_fail(*arguments, **options):
        commit(*arguments, **options)
        raise log_errors.DiskFullError("The disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(live_commit, "commit", commit_and_fail)
        with pytest.raises(errors.KafkaStorageError):
            producer.commit_transaction()
    producer.commit_transaction()
    assert values() == [b"x"]
    producer.begin_transaction()
    producer.send("t", b"y")
    producer.commit_transaction()
    assert values() == [b"x", b"y"]


def test_calls_in_the_wrong_order_are_refused(client, values):
    """Each with an error that says what to call."""
    producer = client(KafkaProducer, transactional_id="name")
    for call in (
        producer.begin_transaction,
        producer.commit_transaction,
        producer.abort_transaction,
        lambda: producer.send("t", b"x"),
        client(KafkaProducer).init_transactions,
    ):
        with pytest.raises(errors.IllegalStateError):
            call()
    producer.init_transactions()
    producer.init_transactions()
    producer.begin_transaction()
    with pytest.raises(errors.IllegalStateError):
        producer.begin_transaction()
    with pytest.raises(ValueError, match="partitions 0 to 0"):
        producer.send("t", b"x", partition=1)
    assert values() == []


def test_a_transaction_may_be_larger_than_the_memory_of_its_producer(client, values, caplog):
    """But no record than ``max_request_size``; what is closed in a transaction is dropped."""
    producer = client(KafkaProducer, transactional_id="name")
    producer.init_transactions()
    producer.begin_transaction()
    with pytest.raises(errors.MessageSizeTooLargeError):
        producer.send("t", bytes(1 << 20))
    producer.abort_transaction()
    producer.begin_transaction()
    for number in range(40):
        producer.send("t", b"%d" % number + bytes(1_000_000))
    assert values() == []
    producer.commit_transaction()
    assert [value.rstrip(b"\0") for value in values()] == [b"%d" % number for number in range(40)]
    producer.begin_transaction()
    producer.send("t", b"x")
    producer.close()
    assert "transactional.id name that are dropped: 1" in caplog.text
    assert len(values()) == 40


def test_threads_send_in_a_transaction(client, values):
    """Each record is in the transaction during which it was sent, or refused."""
    producer = client(KafkaProducer, transactional_id="name")
    producer.init_transactions()
    sent = []

    def send():
        for number in range(200):
            with suppress(errors.IllegalStateError):
                sent.append(producer.send("t", b"%d" % number, partition=0))

    producer.begin_transaction()
    with in_threads(send, send):
        producer.commit_transaction()
    assert len(values()) <= len(sent) <= 400


def test_a_transaction_that_cannot_be_published_publishes_nothing(client, values):
    """It can be aborted, and the next one works; no staged file is left."""
    client(KafkaAdminClient).create_topics({"c": {"configs": {"cleanup.policy": "compact"}}})
    producer = client(KafkaProducer, transactional_id="name")
    producer.init_transactions()
    producer.begin_transaction()
    producer.send("t", b"x")
    producer.send("c", b"without a key")

    with pytest.raises(errors.InvalidRecordError):
        producer.commit_transaction()
    assert values() == []
    producer.abort_transaction()
    producer.begin_transaction()
    producer.send("t", b"x")
    producer.commit_transaction()
    assert values() == [b"x"]
    staged = Path(producer._log.path) / "staging"
    assert not staged.exists() or not list(staged.iterdir())
