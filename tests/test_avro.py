"""Values of Avro come back: through producers, consumers, views, files and Confluent's client."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import subprocess
import sys
import uuid
from collections import Counter
from decimal import Decimal
from functools import partial

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.patience import patient
from support.roots import healthy_log
from support.tiers import sample

import embedlog
import embedlog.kafka
from embedlog import AvroDeserializer, AvroSerializer
from embedlog.errors import (
    IncompatibleSchemaError,
    InvalidConfigError,
    InvalidSchemaError,
    RecordDeserializationError,
    SerializationError,
    UnknownSchemaError,
)
from embedlog.registry import avro_values

fastavro = pytest.importorskip("fastavro")
pytest.importorskip("avro")
confluent = pytest.importorskip("confluent_kafka.schema_registry.avro")
serialization = pytest.importorskip("confluent_kafka.serialization")

UTC = datetime.UTC
NULLABLE = {"type": ["null", "double"], "default": None}
ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "item", "type": "string"}, {"name": "price", **NULLABLE}],
}
TEA, CUP = {"item": "tea", "price": 3.5}, {"item": "cup", "price": None}
TEA_BYTES = b"\0\0\0\0\1\6tea\2" + b"\0\0\0\0\0\0\x0c@"


@dataclasses.dataclass
class Part:
    """Inside of an order."""

    name: str


@dataclasses.dataclass
class Order:
    """An order with lists and dicts of others."""

    item: str
    price: float | None = None
    parts: list[Part] = dataclasses.field(default_factory=list)


log = healthy_log


@pytest.fixture
def orders(log):
    """A topic of Avro with a schema, and keys of text."""
    log.schema_registry.register("orders-value", ORDER)
    return log.create_topic("orders", key="str", value="avro")


def consumed(log, topic, **options):
    """Return the values that a consumer gets."""
    with log.consumer(topic, auto_offset_reset="earliest", **options) as consumer:
        return [record.value for record in consumer.iter_records(until="end")]


def send_bytes(log, topic, *values):
    """Store bytes as they are."""
    with log.producer(value_serializer="bytes") as producer:
        producer.send_batch(topic, list(values)).result()


# Producers, consumers and views


def test_a_topic_of_avro_stores_confluents_wire_format(log, orders):
    """A zero, the id of the schema with 32 bits, and Avro's binary encoding."""
    with log.producer() as producer:
        producer.send("orders", TEA, key="ann")
        producer.send_batch("orders", [CUP, None, {"item": "tin"}], keys=["bob", "ann", "cho"])

    assert log.topic("orders", raw=True)[0].value == TEA_BYTES
    values = [TEA, CUP, None, {"item": "tin", "price": None}]
    assert [record.value for record in orders] == values == consumed(log, "orders")
    assert orders.get("bob") == CUP
    assert dict(orders.items()) == {"bob": CUP, "cho": values[3]}
    assert consumed(log, "orders", value_deserializer="bytes")[0] == TEA_BYTES


def test_without_a_schema_nothing_is_written(log):
    """The error says how to register one, and then the same producer goes on."""
    log.create_topic("orders", value="avro")
    with log.producer() as producer:
        with pytest.raises(SerializationError, match=r"log\.schema_registry\.register") as refused:
            producer.send("orders", TEA)
        assert isinstance(refused.value.__cause__, UnknownSchemaError)
        assert "'orders-value'" in str(refused.value)
        log.schema_registry.register("orders-value", ORDER)
        producer.send("orders", TEA).result()
    assert len(log["orders"]) == 1


def test_producers_take_over_the_latest_version(tmp_path, log, orders):
    """Also that of another process; records keep the schema that they were written with."""
    wider = {**ORDER, "fields": [*ORDER["fields"], {"name": "n", "type": "int", "default": 0}]}
    with log.producer() as producer:
        producer.send("orders", TEA).result()
        code = "import embedlog, json, sys; embedlog.open(sys.argv[1]).schema_registry.register("
        code += "'orders-value', json.loads(sys.argv[2]))"
        command = [sys.executable, "-c", code, str(tmp_path / "log"), json.dumps(wider)]
        subprocess.run(command, check=True, timeout=patient(60))
        producer.send("orders", {**TEA, "n": 5}).result()
    assert [record.value for record in orders] == [TEA, {**TEA, "n": 5}]
    both = {
        "type": "record",
        "name": "Order",
        "fields": [{"name": "n", "type": "long", "default": 7}],
    }
    assert consumed(log, "orders", value_deserializer=AvroDeserializer(both)) == [
        {"n": 7},
        {"n": 5},
    ]


def test_keys_can_be_avro_too(log):
    """Their subject is TOPIC-key."""
    log.schema_registry.register("t-key", "long")
    topic = log.create_topic("t", key="avro", value="json")
    with log.producer() as producer:
        producer.send_batch("t", [1, 2, 3], keys=[5, 6, 5])
    assert log.topic("t", raw=True)[0].key == b"\0\0\0\0\1\x0a"
    assert (topic.get(5), topic.get(6), topic.get(7)) == (3, 2, None)
    assert dict(topic.items()) == {5: 3, 6: 2}
    with pytest.raises(SerializationError, match="an int is expected"):
        topic.get("5")


def test_dataclasses_are_written_as_dicts(log):
    """Also those inside of them."""
    part = {"type": "record", "name": "Part", "fields": [{"name": "name", "type": "string"}]}
    schema = {
        **ORDER,
        "fields": [*ORDER["fields"], {"name": "parts", "type": {"type": "array", "items": part}}],
    }
    with log.producer(value_serializer=AvroSerializer(schema)) as producer:
        producer.send("orders", Order("tea", 1.5, [Part("leaf"), Part("bag")]))
    assert consumed(log, "orders", value_deserializer="avro") == [
        {"item": "tea", "price": 1.5, "parts": [{"name": "leaf"}, {"name": "bag"}]}
    ]


def test_a_serializer_with_a_schema_registers_it(log):
    """When it is first used; a change that is not compatible is refused, and nothing written."""
    log.create_topic("orders")
    with log.producer(value_serializer=AvroSerializer(ORDER)) as producer:
        assert log.schema_registry.subjects() == []
        producer.send("orders", TEA).result()
        producer.send("others", TEA).result()
    assert log.schema_registry.subjects() == ["orders-value", "others-value"]
    assert log.topic("orders")[0].value == TEA_BYTES == log.topic("others")[0].value
    with log.producer(value_serializer=AvroSerializer("int")) as producer:
        with pytest.raises(SerializationError, match="cannot read version 1") as refused:
            producer.send("orders", 5)
        assert isinstance(refused.value.__cause__, IncompatibleSchemaError)
    assert len(log["orders"]) == 1


def test_a_serializer_may_find_its_schema_in_a_subject(log):
    """With `register=False`, or by the name of another subject."""
    strict = AvroSerializer(ORDER, register=False)
    with (
        log.producer(value_serializer=strict) as producer,
        pytest.raises(SerializationError, match="no subject 'orders-value'"),
    ):
        producer.send("orders", TEA)
    log.schema_registry.register("Order", ORDER)
    for serializer in (
        AvroSerializer(ORDER, subject="Order", register=False),
        AvroSerializer(subject="Order"),
    ):
        with log.producer(value_serializer=serializer) as producer:
            producer.send("orders", TEA).result()
    assert consumed(log, "orders", value_deserializer=AvroDeserializer()) == [TEA, TEA]
    assert log.schema_registry.subjects() == ["Order"]


def test_a_program_that_is_wrong_about_serializers_is_told_so(log):
    """When the client is made, or in the clients for brokers, which have no registry."""
    with pytest.raises(InvalidConfigError):
        log.producer(value_serializer=AvroDeserializer())
    with pytest.raises(InvalidConfigError):
        log.consumer(value_deserializer=AvroSerializer(ORDER))
    with pytest.raises(InvalidSchemaError):
        AvroSerializer({"type": "recor"})
    with pytest.raises(InvalidSchemaError):
        AvroDeserializer("recor")
    producer = embedlog.kafka.KafkaProducer(
        bootstrap_servers=log.path, value_serializer=AvroSerializer(ORDER)
    )
    with pytest.raises(InvalidConfigError, match=r"log\.producer\(\)"):
        producer.send("orders", TEA)
    producer.close()


# What is refused

FIELDS = {
    "int": "int",
    "long": "long",
    "float": "float",
    "double": "double",
    "flag": "boolean",
    "text": "string",
    "data": "bytes",
    "list": {"type": "array", "items": "long"},
    "texts": {"type": "array", "items": "string"},
    "map": {"type": "map", "values": "int"},
    "inner": {"type": "record", "name": "I", "fields": [{"name": "n", "type": "int"}]},
    "time": {"type": "long", "logicalType": "timestamp-micros"},
    "day": {"type": "int", "logicalType": "date"},
    "sum": {"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 2},
    "id": {"type": "string", "logicalType": "uuid"},
    "enum": {"type": "enum", "name": "E", "symbols": ["a"]},
    "fixed": {"type": "fixed", "name": "F", "size": 2},
    "union": ["null", "int", "string"],
}
FIELDS |= {f"nullable {name}": ["null", FIELDS[name]] for name in ("float", "day", "id", "inner")}
WRONG = [
    *(("int", value) for value in (1.5, "1", True, None, 1 << 31, -(1 << 31) - 1, Decimal(1))),
    *(("long", value) for value in (1.5, float("nan"), False, 1 << 63)),
    *(("float", value) for value in ("1", True, 1e39, None)),
    *(("double", value) for value in ("1", False)),
    *(("flag", value) for value in (1, "true", None)),
    *(("text", value) for value in (5, b"x", None)),
    *(("data", value) for value in ("x", 5)),
    *(("list", value) for value in ("12", [1.5], {"a": 1}, 5, None, [None])),
    *(("texts", value) for value in ("ab", {"a": 1}, [1])),
    *(("map", value) for value in ([1], {"a": 1.5}, {1: 1}, 5)),
    *(("inner", value) for value in (5, {}, {"n": 1.5}, {"n": 1, "m": 2}, None)),
    *(("time", value) for value in (1.5, True, 1 << 60, -1 << 60)),
    *(("day", value) for value in (1.5, "x", 1 << 30, datetime.datetime(2024, 1, 1, tzinfo=UTC))),
    *(("sum", value) for value in (1.5, 1, "1", Decimal("1.234"), Decimal("12345.6"))),
    *(("id", value) for value in ("x", 5)),
    *(("enum", value) for value in ("b", 0)),
    *(("fixed", value) for value in (b"x", "xx")),
    *(("union", value) for value in (1.5, b"x", True)),
    *(("nullable float", value) for value in (1e39, "x", True)),
    *(("nullable day", value) for value in (1 << 30, datetime.datetime(2024, 1, 1, tzinfo=UTC))),
    *(("nullable id", value) for value in ("x", 5)),
    *(("nullable inner", value) for value in ({"n": 1.5}, {"n": 1, "m": 2}, {}, 5)),
]


def test_a_value_that_does_not_fit_is_refused(log):
    """Rather than cut, as 1.5 to 1, or taken for something else; nothing is written."""
    for number, kind in enumerate(FIELDS.values()):
        schema = {"type": "record", "name": "R", "fields": [{"name": "x", "type": kind}]}
        log.create_topic(f"t{number}", value="avro")
        log.schema_registry.register(f"t{number}-value", schema)
    topics = {field: f"t{number}" for number, field in enumerate(FIELDS)}
    accepted = []
    with log.producer() as producer:
        for field, value in WRONG:
            with contextlib.suppress(SerializationError):
                producer.send(topics[field], {"x": value}).result()
                accepted.append((field, value))
        with pytest.raises(SerializationError, match="record 1"):
            producer.send_batch(topics["int"], [{"x": 1}, {"x": 1.5}])
    assert accepted == []
    assert {len(log[name]) for name in topics.values()} == {0}


def test_columns_without_a_common_type_are_text(log):
    """Also of values that JSON does not have."""
    topic = log.create_topic("t", value="avro")
    log.schema_registry.register(
        "t-value", ["double", FIELDS["fixed"], FIELDS["id"], FIELDS["sum"]]
    )
    values = [float("nan"), b"\xff\0", uuid.UUID(int=5), Decimal("1.50")]
    with log.producer() as producer:
        producer.send_batch("t", values).result()
    texts = topic.to_arrow()["value"].to_pylist()
    assert texts == ["NaN", '"\\u00ff\\u0000"', '"00000000-0000-0000-0000-000000000005"', '"1.50"']


@pytest.mark.parametrize("value", [{}, {"price": 1.0}, {**TEA, "x": 1}, 5, "tea", [TEA], b"x"])
def test_a_record_has_exactly_the_fields_of_the_schema(log, orders, value):
    """But for those with defaults."""
    with log.producer() as producer, pytest.raises(SerializationError):
        producer.send("orders", value)
    assert len(orders) == 0


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "do not begin with a zero"),
        (b"\0\0\0\0", "do not begin with a zero"),
        (b'{"item": "tea"}', "do not begin with a zero"),
        (b"\0\0\0\0\7\6tea", "no schema with the id 7"),
        (b"\0\xff\xff\xff\xff\6tea", "no schema with the id 4294967295"),
        (b"\0\0\0\0\1", "do not fit the schema"),
        (TEA_BYTES[:-1], "do not fit the schema"),
        (b"\0\0\0\0\1\2\xff\0", "do not fit the schema"),
        (b"\0\0\0\0\1\2x\x08", "do not fit the schema"),
        (TEA_BYTES + b"x", "1 bytes follow the value"),
    ],
)
def test_bytes_that_avro_did_not_write_are_an_error_with_their_place(log, orders, data, reason):
    """The records before them are returned first."""
    send_bytes(log, "orders", TEA_BYTES, data, TEA_BYTES)
    seen = []
    with log.consumer("orders", auto_offset_reset="earliest") as consumer:
        with pytest.raises(RecordDeserializationError, match=reason) as failed:
            while True:
                seen += [
                    record.value for records in consumer.poll(100).values() for record in records
                ]
        assert seen == [TEA]
        assert (failed.value.topic, failed.value.partition, failed.value.offset) == ("orders", 0, 1)
        assert failed.value.value_bytes == data
        consumer.seek(embedlog.TopicPartition("orders", 0), 2)
        assert [record.value for record in consumer.iter_records(until="end")] == [TEA]
    for read in (lambda: list(orders), orders.to_pandas, lambda: orders.scan().collect()):
        with pytest.raises(Exception, match=reason):
            read()
    assert "orders" in orders._repr_html_()


# Any schema and value

NAMES = st.text("abcdefg", min_size=1, max_size=3)
SMALL = st.integers(-(1 << 31), (1 << 31) - 1)
MOMENTS = st.datetimes(*(datetime.datetime(year, 1, 1) for year in (1, 9999)))  # noqa: DTZ001


def of_millis(moment):
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000)


def _decimals(places):
    return st.integers(-99_999, 99_999).map(lambda number: Decimal(number).scaleb(-places))


LEAVES = {
    "null": ("null", st.none()),
    "boolean": ("boolean", st.booleans()),
    "int": ("int", SMALL),
    "long": ("long", st.integers(-(1 << 63), (1 << 63) - 1)),
    "float": ("float", st.floats(width=32, allow_nan=False)),
    "double": ("double", st.floats(allow_nan=False)),
    "bytes": ("bytes", st.binary(max_size=20)),
    "string": ("string", st.text(max_size=20)),
    "uuid": (FIELDS["id"], st.uuids()),
    "date": (FIELDS["day"], st.dates()),
    "micros": (FIELDS["time"], MOMENTS.map(lambda at: at.replace(tzinfo=UTC))),
    "millis": (
        {"type": "long", "logicalType": "timestamp-millis"},
        MOMENTS.map(lambda at: of_millis(at).replace(tzinfo=UTC)),
    ),
    "local": ({"type": "long", "logicalType": "local-timestamp-micros"}, MOMENTS),
    "time": ({"type": "long", "logicalType": "time-micros"}, st.times()),
    "decimal": (FIELDS["sum"], _decimals(2)),
}


@st.composite
def schemas_and_values(draw, depth=2, names=None):
    """Return a schema, and a strategy of its values."""
    names = Counter() if names is None else names

    def new_name():
        names["all"] += 1
        return f"N{names['all']}"

    kinds = ["leaf"] * 3 + ["enum", "fixed"]
    kinds += ["array", "map", "record", "optional"] if depth else []
    kind = draw(st.sampled_from(kinds))
    if kind == "leaf":
        return LEAVES[draw(st.sampled_from(sorted(LEAVES)))]
    if kind == "enum":
        symbols = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
        schema = {"type": "enum", "name": new_name(), "symbols": symbols}
        return schema, st.sampled_from(symbols)
    if kind == "fixed":
        size = draw(st.integers(1, 5))
        schema = {"type": "fixed", "name": new_name(), "size": size}
        return schema, st.binary(min_size=size, max_size=size)
    if kind == "record":
        schema = {"type": "record", "name": new_name(), "fields": []}
        values = {}
        for name in draw(st.lists(NAMES, min_size=1, max_size=4, unique=True)):
            inner, values[name] = draw(schemas_and_values(depth - 1, names))
            schema["fields"].append({"name": name, "type": inner})
        return schema, st.fixed_dictionaries(values)
    inner, values = draw(schemas_and_values(depth - 1, names))
    if kind == "array":
        return {"type": "array", "items": inner}, st.lists(values, max_size=3)
    if kind == "map":
        return {"type": "map", "values": inner}, st.dictionaries(st.text(max_size=3), values)
    if inner == "null" or isinstance(inner, list):
        return inner, values
    return ["null", inner], st.none() | values


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_of_any_schema_comes_back(log, data):
    """In its type, by every reader; and the JSON of the command line leads back to it."""
    schema, strategy = data.draw(schemas_and_values())
    values = data.draw(st.lists(strategy.filter(lambda value: value is not None), max_size=3))
    topic = log.create_topic(f"t{len(log.topics())}", value="avro")
    log.schema_registry.register(f"{topic.name}-value", schema)
    with log.producer() as producer:
        producer.send_batch(topic.name, values).result()

    assert [record.value for record in topic] == values == consumed(log, topic.name)
    assert topic.to_pandas().shape[0] == len(values)
    parse = avro_values.parser_of(fastavro.parse_schema(schema))
    texts = topic.scan().collect()["value"].to_list()
    assert [parse(json.loads(text)) for text in texts] == [as_parsed(value) for value in values]


def as_parsed(value):
    """Return a value as `parser_of` leaves it to fastavro: UUIDs stay text."""
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, dict):
        return {name: as_parsed(item) for name, item in value.items()}
    return list(map(as_parsed, value)) if isinstance(value, list) else value


def test_a_schema_may_contain_itself(log):
    """Checks and conversions follow the names."""
    node = {
        "type": "record",
        "name": "Node",
        "fields": [
            {"name": "n", "type": "int"},
            {"name": "next", "type": ["null", "Node"], "default": None},
            {"name": "others", "type": {"type": "array", "items": "Node"}, "default": []},
        ],
    }
    topic = log.create_topic("t", value="avro")
    log.schema_registry.register("t-value", node)
    leaf = {"n": 2, "next": None, "others": []}
    tree = {"n": 1, "next": leaf, "others": [leaf, leaf]}
    with log.producer() as producer:
        producer.send("t", tree).result()
        with pytest.raises(SerializationError, match=r"an int is expected, not float \(2\.5\)"):
            producer.send("t", {**tree, "others": [{**leaf, "n": 2.5}]})
    assert topic[0].value == tree
    parse = avro_values.parser_of(fastavro.parse_schema(node))
    assert parse(json.loads(topic.to_arrow(["value"])["value"][0].as_py())) == tree


def test_json_of_a_union_takes_the_first_branch_that_fits():
    """Text for a time or a decimal, and otherwise what fastavro accepts."""
    parse = avro_values.parser_of(
        fastavro.parse_schema(["null", FIELDS["time"], FIELDS["sum"], "string", ORDER])
    )
    assert parse(None) is None
    assert parse("2024-01-31T00:00:00+00:00") == datetime.datetime(2024, 1, 31, tzinfo=UTC)
    assert parse("1.50") == Decimal("1.50")
    assert parse("tea") == "tea"
    assert parse(TEA) == TEA
    assert parse([5]) == [5]  # fastavro refuses it


# Tables and files


def test_frames_have_a_column_for_each_field(log, orders):
    """And back: rows of a frame become values of the topic."""
    frame = pd.DataFrame({"who": ["ann", "bob"], "item": ["tea", "cup"], "price": [3.5, 8.0]})
    with log.producer() as producer:
        producer.append_table("orders", frame, key="who").result()
        table = pa.table({"key": ["cho"], "value": [{"item": "tin", "price": None}]})
        producer.append_table("orders", table, value="value").result()
        raw = log.topic("orders", raw=True).to_arrow(["key", "value"])
        producer.append_table("orders", raw).result()
        with pytest.raises(SerializationError, match="more fields than the schema"):
            producer.append_table("orders", frame.assign(other=1), key="who")

    read = orders.to_pandas()
    assert list(read.columns) == ["offset", "partition", "timestamp", "key", "item", "price"]
    assert read["item"].tolist() == ["tea", "cup", "tin"] * 2
    assert orders.to_pandas(columns=["price"])["price"].head(2).tolist() == [3.5, 8.0]
    texts = orders.to_arrow(["value"])["value"].to_pylist()
    assert texts[0] == '{"item":"tea","price":3.5}'
    assert log.sql("select key, value from orders limit 1").rows() == [("ann", texts[0])]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_files_have_json_for_avro(log, orders, command_line, monkeypatch, tmp_path, suffix):
    """So they can be imported into a log whose schemas have other ids."""
    monkeypatch.setenv("EMBEDLOG_ROOT", log.path)
    with log.producer() as producer:
        producer.send_batch("orders", [TEA, CUP, None], keys=["ann", None, "bob"]).result()
    file = tmp_path / f"orders.{suffix}"
    assert command_line("export", "orders", file)[0] == 0
    with embedlog.open(tmp_path / "other", maintenance=False) as other:
        other.schema_registry.register("x", "int")
        other.schema_registry.register("orders-value", ORDER)
        other.create_topic("orders", key="str", value="avro")
    code, _, err = command_line("import", "orders", file, "--root", tmp_path / "other")
    assert code == 0, err
    with embedlog.open(tmp_path / "other", maintenance=False) as other:
        assert [(record.key, record.value) for record in other["orders"]] == [
            ("ann", TEA),
            (None, CUP),
            ("bob", None),
        ]


def test_the_command_line_produces_and_consumes_json(log, orders, command_line, monkeypatch):
    """A value per line, or as JSON records with keys."""
    monkeypatch.setenv("EMBEDLOG_ROOT", log.path)
    run = partial(command_line, "produce", "orders")
    assert run(stdin=b'{"item":"tea","price":3.5}\n')[0] == 0
    assert run("--json", stdin=b'{"key": "bob", "value": {"item": "cup"}}\n')[0] == 0
    for line in (b'{"item": 5}', b"tea", b'{"itm": "tea"}'):
        assert run(stdin=line + b"\n")[0] != 0
    assert [record.value for record in orders] == [TEA, CUP]
    send_bytes(log, "orders", b"\xff")
    lines = command_line("consume", "orders")[1].splitlines()
    assert [json.loads(line) for line in lines[:2]] == [TEA, CUP]
    lines = command_line("consume", "orders", "--json")[1].splitlines()
    assert [json.loads(line)["value"] for line in lines] == [TEA, CUP, {"base64": "/w=="}]


# Confluent's serializers


@pytest.fixture
def registry(log):
    """Confluent's client of the registry of the log."""
    from embedlog.kafka.confluent.schema_registry import SchemaRegistryClient

    with SchemaRegistryClient({"url": f"embedlog://{log.path}"}) as client:
        yield client


CONTEXT = serialization.SerializationContext("orders", serialization.MessageField.VALUE)
CASES = {
    "record": (ORDER, TEA),
    "string": ("string", "tea"),
    "bytes": ("bytes", b"tea"),
    "union": (["null", "int", "string"], 5),
    "time": (FIELDS["time"], datetime.datetime(2024, 1, 31, tzinfo=UTC)),
    "fixed": (FIELDS["fixed"], b"ab"),
}


@pytest.mark.parametrize("case", CASES)
def test_confluents_own_serializers_write_and_read_the_same_bytes(log, registry, case):
    """In both directions, and with the ids of the log."""
    if case == "bytes":  # Older ones write them as they are, which is not Avro.
        pytest.importorskip("confluent_kafka", minversion="2.13")
    schema, value = CASES[case]
    write = confluent.AvroSerializer(registry, json.dumps(schema))
    data = write(value, CONTEXT)
    assert log.schema_registry.latest("orders-value").id == 1

    with log.producer(value_serializer="avro") as producer:
        producer.send("orders", value).result()
    with log.producer(value_serializer=AvroSerializer(schema)) as producer:
        producer.send("orders", value).result()
    send_bytes(log, "orders", data)

    assert {record.value for record in log.topic("orders", raw=True)} == {data}
    assert confluent.AvroDeserializer(registry)(data, CONTEXT) == value
    assert consumed(log, "orders", value_deserializer=AvroDeserializer()) == [value] * 3


def test_confluents_deserializer_resolves_to_a_schema_as_ours_does(log, registry):
    """By Avro's rules."""
    reader = {**ORDER, "fields": [ORDER["fields"][0], {"name": "n", "type": "int", "default": 7}]}
    data = confluent.AvroSerializer(registry, json.dumps(ORDER))(TEA, CONTEXT)
    send_bytes(log, "orders", data)

    expected = {"item": "tea", "n": 7}
    assert confluent.AvroDeserializer(registry, json.dumps(reader))(data, CONTEXT) == expected
    assert consumed(log, "orders", value_deserializer=AvroDeserializer(reader)) == [expected]


def test_bytes_without_a_length_are_resolved_to_another_schema_too(log):
    """The schema `"bytes"` is written as Confluent writes it."""
    log.create_topic("t")
    with log.producer(value_serializer=AvroSerializer("bytes")) as producer:
        producer.send("t", b"tea").result()
    assert log.topic("t")[0].value == b"\0\0\0\0\1tea"
    assert consumed(log, "t", value_deserializer=AvroDeserializer("string")) == ["tea"]
    assert consumed(log, "t", value_deserializer=AvroDeserializer()) == [b"tea"]


def test_a_typed_topic_has_its_own_types(log):
    """A serializer of bytes is not for it, as those by name are not."""
    log.create_topic("typed", schema=pa.schema([("item", pa.string())]))
    with log.producer() as producer:
        producer.send("typed", {"item": "tea"}).result()
    for deserializer in ("avro", AvroDeserializer()):
        assert consumed(log, "typed", value_deserializer=deserializer) == [{"item": "tea"}]


def test_the_latest_version_of_confluents_serializer_is_that_of_the_log(log, registry):
    """With `use.latest.version`, as by the name "avro"."""
    log.schema_registry.register("orders-value", ORDER)
    conf = {"auto.register.schemas": False, "use.latest.version": True}
    write = confluent.AvroSerializer(registry, conf=conf)
    assert write(TEA, CONTEXT) == TEA_BYTES


def test_confluents_client_administers_the_registry(log, registry):
    """With its classes and errors; a registry of Confluent's is used by its url."""
    package = pytest.importorskip("confluent_kafka.schema_registry")
    schema = package.Schema(json.dumps(ORDER), "AVRO")
    assert registry.register_schema("a-value", schema) == 1
    registered = registry.get_latest_version("a-value")
    assert isinstance(registered, package.RegisteredSchema)
    assert registered == registry.get_version("a-value", 1)
    assert registered == registry.lookup_schema("a-value", schema)
    assert (registered.subject, registered.version, registered.schema_id) == ("a-value", 1, 1)
    assert json.loads(registry.get_schema(1).schema_str) == ORDER
    assert registry.get_subjects() == registry.get_subjects("a") == ["a-value"]
    assert registry.get_subjects("b") == []
    assert registry.get_versions("a-value") == [1]
    assert registry.get_schema_types() == ["AVRO"]
    assert registry.get_compatibility() == "BACKWARD"
    assert registry.set_compatibility("a-value", "NONE") == "NONE"
    assert log.schema_registry.compatibility("a-value") == "NONE"
    registry.set_compatibility("a-value", "FULL")
    assert registry.test_compatibility("a-value", schema)
    assert not registry.test_compatibility_all_versions("a-value", package.Schema('"int"', "AVRO"))
    refused = {
        40401: lambda: registry.get_latest_version("x"),
        40402: lambda: registry.get_version("a-value", 5),
        40403: lambda: registry.get_schema(5),
        409: lambda: registry.register_schema("a-value", package.Schema('"int"', "AVRO")),
        42201: lambda: registry.register_schema("a-value", package.Schema('"in"', "AVRO")),
        42203: lambda: registry.set_compatibility("a-value", "SOME"),
    }
    for code, call in refused.items():
        with pytest.raises(package.SchemaRegistryError) as error:
            call()
        assert error.value.error_code == code
        assert error.value.http_status_code == (code if code < 1000 else code // 100)
    with pytest.raises(package.SchemaRegistryError, match="no schemas of the type JSON"):
        registry.register_schema("a-value", package.Schema("{}", "JSON"))
    assert registry.delete_version("a-value", 1) == 1
    with pytest.raises(package.SchemaRegistryError):
        registry.delete_subject("a-value")
    other = type(registry)({"url": "http://localhost:8081"})
    assert type(other) is package.SchemaRegistryClient


PATCHED = """
import sys, embedlog.kafka
if sys.argv[3] == "before":
    embedlog.kafka.patch(sys.argv[1])
from confluent_kafka import SerializingProducer, DeserializingConsumer
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer, AvroDeserializer
if sys.argv[3] == "after":
    embedlog.kafka.patch(sys.argv[1])

registry = SchemaRegistryClient({"url": "http://localhost:8081"})
brokers = {"bootstrap.servers": "localhost:9092"}
write = AvroSerializer(registry, sys.argv[2])
producer = SerializingProducer({**brokers, "value.serializer": write})
producer.produce("orders", value={"item": "tea", "price": 3.5})
producer.flush()
settings = {"group.id": "g", "auto.offset.reset": "earliest"}
read = AvroDeserializer(registry)
consumer = DeserializingConsumer({**brokers, **settings, "value.deserializer": read})
consumer.subscribe(["orders"])
print(consumer.poll(30).value())
consumer.close()
"""


@pytest.mark.tier("test")
@pytest.mark.parametrize("when", sample(["before", "after"], 1))
def test_a_program_for_confluents_registry_runs_on_a_log_unchanged(tmp_path, when):
    """`patch`, before or after the imports, leads its client of the registry to the log, too."""
    command = [sys.executable, "-c", PATCHED, str(tmp_path / "log"), json.dumps(ORDER), when]
    output = subprocess.run(
        command, check=True, timeout=patient(60), capture_output=True, text=True
    ).stdout
    assert output == f"{TEA}\n"
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        assert log.topic("orders")[0].value == TEA_BYTES
