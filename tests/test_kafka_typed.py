"""Kafka's clients on typed topics: dicts in place of bytes."""

from __future__ import annotations

import json
import re
from contextlib import closing

import pyarrow as pa
import pytest

import embedlog
from embedlog.kafka import KafkaConsumer, KafkaProducer, errors
from embedlog.kafka.confluent import (
    Consumer,
    DeserializingConsumer,
    Producer,
    SerializingProducer,
)
from embedlog.kafka.confluent.error import ValueDeserializationError

NOT_A_DICT = r"a value must be a dict of them, got {} \[t\]. Send a dict with a, n; set no value"
TAKES_DICTS = "The values of a typed topic are dicts.*set no deserializers, or ones that take them"
ROW = {"a": "x", "n": 1}


@pytest.fixture
def log(tmp_path):
    """A log with a typed topic."""
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t", 2, schema=pa.schema([("a", pa.string()), ("n", pa.int64())]), key="a")
        yield log
        assert log.housekeeping.verify() == []


def as_json(value, *_):
    """Serialize to JSON, as programs for Kafka do."""
    return json.dumps(value).encode()


# kafka-python


@pytest.fixture
def producer(log):
    """Makes producers for kafka-python."""
    made = []

    def make(**configs):
        made.append(KafkaProducer(bootstrap_servers=f"embedlog://{log.path}", **configs))
        return made[-1]

    yield make
    for producer in made:
        producer.close()


def consumed(log, **configs):
    """Return what a consumer for kafka-python reads."""
    servers = {"bootstrap_servers": f"embedlog://{log.path}", "consumer_timeout_ms": 100}
    with closing(
        KafkaConsumer("t", auto_offset_reset="earliest", **servers, **configs)
    ) as consumer:
        return list(consumer)


def test_a_program_without_serializers_sends_and_gets_dicts(log, producer):
    """The sizes of what has no bytes are unknown."""
    metadata = producer().send("t", ROW).get(10)
    (record,) = consumed(log)

    assert (record.key, record.value, record.offset) == ("x", ROW, metadata.offset)
    assert (metadata.serialized_key_size, metadata.serialized_value_size) == (-1, -1)
    assert (record.serialized_key_size, record.serialized_value_size) == (-1, -1)


def test_the_key_may_be_passed_beside_the_value(log, producer):
    """As programs for Kafka do, also through a serializer; it must be that of the column."""
    plain, serializing = producer(), producer(key_serializer=str.encode)
    plain.send("t", ROW, key="x").get(10)
    plain.send("t", ROW, key=b"x").get(10)
    serializing.send("t", ROW, key="x").get(10)

    assert [record.value for record in consumed(log)] == [ROW] * 3
    for client in (plain, serializing):
        with pytest.raises(errors.KafkaError, match=r"key .* is not that of the columns a"):
            client.send("t", ROW, key="y")
    assert len(log.topic("t")) == 3


@pytest.mark.parametrize(
    ("kind", "key", "data"),
    [
        (pa.string(), "\N{SNOWMAN}", "\N{SNOWMAN}".encode()),
        (pa.int32(), -2, (-2).to_bytes(4, "big", signed=True)),
        (pa.uint64(), 1 << 63, (1 << 63).to_bytes(8, "big")),
        (pa.binary(), b"\xff", b"\xff"),
    ],
)
def test_a_tombstone_has_the_key_or_its_bytes(log, producer, kind, key, data):
    """Those of Kafka's own serializers."""
    log.create_topic("k", schema=pa.schema([("key_", kind)]), key="key_")
    client = producer()
    for sent in (key, data):
        client.send("k", {"key_": key}).get(10)
        assert log.topic("k").get(key) == {"key_": key}
        client.send("k", None, key=sent).get(10)
        assert log.topic("k").get(key) is None


@pytest.mark.parametrize("value", [b"x", "x", bytearray(b"x")], ids=repr)
def test_bytes_are_refused_with_what_to_send(log, producer, value):
    """Also with a key beside them; nothing is written."""
    for key in (None, b"x"):
        with pytest.raises(TypeError, match=NOT_A_DICT.format(type(value).__name__)):
            producer().send("t", value, key=key)
    assert len(log.topic("t")) == 0


def test_serializers_apply_to_dicts(log, producer):
    """One that returns a dict is used, one that returns bytes refused."""
    producer(value_serializer=lambda row: {**row, "n": 2}).send("t", {"a": "x"}).get(10)
    with pytest.raises(TypeError, match=NOT_A_DICT.format("bytes")):
        producer(value_serializer=as_json).send("t", ROW)

    assert [record.value for record in consumed(log)] == [{"a": "x", "n": 2}]


def test_deserializers_apply_to_dicts(log, producer):
    """The error of one for bytes says what to do."""
    producer().send("t", ROW).get(10)

    (record,) = consumed(log, value_deserializer=lambda row: row["n"], key_deserializer=str.upper)
    assert (record.key, record.value) == ("X", 1)
    for configs in ({"value_deserializer": json.loads}, {"key_deserializer": bytes.decode}):
        with pytest.raises(TypeError) as caught:
            consumed(log, **configs)
        assert re.search(TAKES_DICTS, "\n".join(caught.value.__notes__))


def test_a_wrong_column_is_named(log, producer):
    """By the log's own error."""
    with pytest.raises(TypeError, match="wing"):
        producer().send("t", {"a": "x", "wing": 1})
    with pytest.raises(TypeError, match="Column n"):
        producer().send("t", {"a": "x", "n": "one"})


def test_a_transaction_writes_rows(log, producer):
    """When it is committed."""
    client = producer(transactional_id="me")
    client.init_transactions()
    client.begin_transaction()
    client.send("t", ROW)
    client.flush()
    before = len(log.topic("t"))
    client.commit_transaction()
    assert len(log.topic("t")) == before + 1


# confluent_kafka


@pytest.fixture
def settings(log):
    """The settings of a client for confluent_kafka."""
    return {"bootstrap.servers": f"embedlog://{log.path}"}


def polled(kind, settings, **more):
    """Return the first record that a consumer reads."""
    consumer = kind({**settings, "group.id": "g", "auto.offset.reset": "earliest", **more})
    consumer.subscribe(["t"])
    try:
        return consumer.poll(10)
    finally:
        consumer.close()


def test_confluent_sends_and_gets_dicts(log, settings):
    """With or without the key beside them; reports have the dict too."""
    reports = []
    producer = Producer(settings)
    for key in (None, "x", b"x"):
        producer.produce("t", ROW, key, on_delivery=lambda *report: reports.append(report))
    producer.produce("t", None, "x")
    assert producer.flush(10) == 0

    assert [(error, message.value()) for error, message in reports] == [(None, ROW)] * 3
    message = polled(Consumer, settings)
    assert (message.key(), message.value(), message.error()) == ("x", ROW, None)
    assert log.topic("t").get("x") is None


def test_confluent_refuses_bytes(log, settings):
    """At once, with what to send."""
    producer = Producer(settings)
    for value in (b"x", "x"):
        for key in (None, "x"):
            with pytest.raises(TypeError, match=NOT_A_DICT.format("bytes")):
                producer.produce("t", value, key)
    producer.flush(10)
    assert len(log.topic("t")) == 0


def test_confluent_reports_a_key_of_another_row(log, settings):
    """As other records that are refused."""
    reports = []
    producer = Producer(settings)
    producer.produce("t", ROW, "y", on_delivery=lambda *report: reports.append(report))
    producer.flush(10)

    assert "is not that of the columns a" in reports[0][0].str()


def test_confluent_serializers_apply_to_dicts(log, settings):
    """One for bytes fails, and the error says what to do."""
    adds = SerializingProducer({**settings, "value.serializer": lambda row, _: {**row, "n": 2}})
    adds.produce("t", value={"a": "x"})
    adds.flush(10)
    encodes = SerializingProducer({**settings, "value.serializer": as_json})
    with pytest.raises(TypeError, match=NOT_A_DICT.format("bytes")):
        encodes.produce("t", value=ROW)

    takes = {"value.deserializer": lambda row, _: row["n"]}
    assert polled(DeserializingConsumer, settings, **takes).value() == 2
    with pytest.raises(ValueDeserializationError) as caught:
        polled(
            DeserializingConsumer,
            {**settings, "group.id": "h"},
            **{"value.deserializer": lambda data, _: json.loads(data), "group.id": "h"},
        )
    assert re.search(TAKES_DICTS, "\n".join(caught.value.__cause__.__notes__))


def test_a_transaction_of_confluent_writes_rows(log, settings):
    """When it is committed."""
    producer = Producer({**settings, "transactional.id": "me"})
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce("t", ROW)
    producer.flush()
    before = len(log.topic("t"))
    producer.commit_transaction()
    assert len(log.topic("t")) == before + 1
