"""Serializers: the built-in ones, and every form that Kafka's Python clients accept."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import pickle
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedlog.config import ConsumerConfig, ProducerConfig
from embedlog.errors import InvalidConfigError
from embedlog.serializers import NAMES, MessageField, SerializationContext, adapt, encode_json

confluent = pytest.importorskip("confluent_kafka.serialization")
kafka = pytest.importorskip("kafka.serializer")


def serialized(setting, item, headers=(), **options):
    """Return what a serializer of values makes of an item of the topic `t`."""
    return adapt(setting, "serialize", "value", **options).convert("t", list(headers), item)


def deserialized(setting, data, headers=(), **options):
    """Return what a deserializer of values makes of bytes of the topic `t`."""
    return adapt(setting, "deserialize", "value", **options).convert("t", list(headers), data)


INTS = st.integers(-(1 << 63), (1 << 63) - 1)
ITEMS = {
    "bytes": st.binary(),
    "str": st.text(),
    "int": INTS,
    "float": st.floats(allow_nan=False),
    "uuid": st.uuids(),
    "json": st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        # With halves of surrogate pairs, as in the names of files that are not UTF-8.
        | st.text()
        # Halves of surrogate pairs, as in the names of files that are not UTF-8.
        | st.sampled_from(["\ud800", "a\udcff"]),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=5,
    ),
    "pickle": st.sampled_from([{1: (2, {3})}, datetime.date(2024, 1, 31), b"\0"]),
}


@given(st.data())
def test_whatever_a_built_in_serializer_takes_comes_back(data):
    """In its type; None stays a tombstone."""
    assert {*ITEMS, "avro"} == {*NAMES}  # Avro needs a log, see test_avro.py.
    for name in ITEMS:
        item = data.draw(ITEMS[name], label=name)
        stored = serialized(name, item, allow_pickle=True)

        assert (item is None) == (stored is None)
        assert deserialized(name, stored, allow_pickle=True) == item


@pytest.mark.parametrize(
    ("name", "item", "stored"),
    [
        ("int", 1, b"\0\0\0\0\0\0\0\1"),
        ("float", 1.0, b"?\xf0\0\0\0\0\0\0"),
        ("uuid", uuid.UUID(int=5), b"00000000-0000-0000-0000-000000000005"),
        ("json", {"é": [1, None]}, '{"é":[1,null]}'.encode()),
    ],
)
def test_the_bytes_are_those_of_kafkas_serializers(name, item, stored):
    """LongSerializer, DoubleSerializer and UUIDSerializer; JSON is compact and UTF-8."""
    assert serialized(name, item) == stored


@pytest.mark.parametrize(
    ("name", "stored", "item"),
    [
        ("int", confluent.IntegerSerializer()(-7), -7),
        ("float", b"?\x80\0\0", 1.0),
        ("uuid", uuid.UUID(int=5).bytes, uuid.UUID(int=5)),
        ("json", b' {"a" : NaN}', {"a": math.nan}),
    ],
)
def test_other_forms_of_other_programs_are_read_too(name, stored, item):
    """Kafka's IntegerSerializer and FloatSerializer, the bytes of a UUID, and NaN."""
    assert repr(deserialized(name, stored)) == repr(item)


@pytest.mark.parametrize(
    ("name", "item", "reason"),
    [
        ("bytes", "x", "bytes is expected, not str"),
        ("str", b"x", "str is expected, not bytes"),
        ("int", True, "int is expected, not bool"),
        ("int", "1", "int is expected, not str"),
        ("int", 1 << 63, "does not fit in 64 bits"),
        ("float", "1", "float is expected, not str"),
        ("uuid", "x", "UUID is expected, not str"),
        ("json", b"{}", "JSON has no bytes"),
        ("json", math.nan, "not JSON compliant"),
        ("json", {"a": {1}}, "JSON has no set"),
        ("json", dataclasses.make_dataclass("D", ["x"]), "JSON has no type"),
    ],
)
def test_a_built_in_serializer_refuses_other_types(name, item, reason):
    """Nothing is converted by guess."""
    with pytest.raises((TypeError, ValueError), match=reason):
        serialized(name, item)


@dataclasses.dataclass
class Order:
    """A dataclass inside of which there is another one."""

    number: int
    parts: list
    at: object = None


def test_json_has_dataclasses_times_and_uuids():
    """Dataclasses become objects, as by `dataclasses.asdict`, and the others their text."""
    order = Order(1, [Order(2, [])], datetime.datetime(2024, 1, 31, 12, tzinfo=datetime.UTC))

    assert json.loads(encode_json(order)) == {
        **dataclasses.asdict(order),
        "at": "2024-01-31T12:00:00+00:00",
    }
    assert encode_json([datetime.date(2024, 1, 31), uuid.UUID(int=1)]) == (
        b'["2024-01-31","00000000-0000-0000-0000-000000000001"]'
    )


# The forms


class Topic2:
    """As for kafka-python 2."""

    def serialize(self, topic, data):
        return f"{topic}:{data}".encode()

    def deserialize(self, topic, data):
        return f"{topic}:{data.decode()}"


class Topic3(kafka.Serializer, kafka.Deserializer):
    """As for kafka-python 3."""

    def serialize(self, topic, headers, data):
        headers.append(("by", b"3"))
        return f"{topic}:{data}".encode()

    def deserialize(self, topic, headers, data):
        return f"{topic}:{len(headers)}:{data.decode()}"


class Variable:
    """Takes whatever kafka-python passes."""

    def serialize(self, *args):
        return repr(args).encode()


def with_context(item, ctx):
    """As for confluent-kafka."""
    return f"{ctx.topic}:{ctx.field}:{ctx.headers}:{item}".encode()


def with_optional_context(item, ctx=None):
    """As confluent-kafka's own, whose context may be left out."""
    return with_context(item, ctx)


@pytest.mark.parametrize(
    ("setting", "stored"),
    [
        (str.encode, b"x"),
        (json.dumps, '"x"'),
        (pickle.dumps, pickle.dumps("x")),
        (lambda item: item.encode(), b"x"),
        (Topic2(), b"t:x"),
        (Topic3(), b"t:x"),
        (Variable(), b"('t', [], 'x')"),
        (kafka.DefaultSerializer(), b"x"),
        (kafka.JsonSerializer(), b'"x"'),
        (kafka.SerializeWrapper(str.encode), b"x"),
        (with_context, b"t:value:[]:x"),
        (with_optional_context, b"t:value:[]:x"),
        (confluent.StringSerializer("utf_16_be"), b"\0x"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_form_of_a_serializer_is_called_as_its_client_would(setting, stored):
    """One by one and many at once; None does not reach it, except as in Kafka's clients."""
    adapter = adapt(setting, "serialize", "value")

    assert adapter.convert("t", [], "x") == stored
    assert adapter.convert("t", [], None) is None
    assert list(adapter.convert_all("t", [[], []], ["x", "x"])) == [stored, stored]
    assert list(adapter.convert_all("t", None, [None, "x"])) == [None, stored]


@pytest.mark.parametrize(
    ("setting", "item"),
    [
        (bytes.decode, "5"),
        (json.loads, 5),
        (int, 5),
        (Topic2(), "t:5"),
        (Topic3(), "t:1:5"),
        (kafka.JsonSerializer(), 5),
        (lambda data, ctx: (data, ctx.field, ctx.headers), (b"5", "value", [("h", b"1")])),
        (confluent.StringDeserializer(), "5"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_form_of_a_deserializer_is_called_as_its_client_would(setting, item):
    """With the topic and the headers of the record, where the form has them."""
    assert deserialized(setting, b"5", [("h", b"1")]) == item
    assert deserialized(setting, None) is None


def test_the_context_is_confluents_own_if_that_is_imported(monkeypatch):
    """Otherwise one of the same attributes."""

    def kind(item, ctx):
        return type(ctx), ctx.field

    kinds = (confluent.SerializationContext, confluent.MessageField.VALUE)
    assert serialized(kind, 1) == kinds
    monkeypatch.delitem(__import__("sys").modules, "confluent_kafka.serialization")
    assert serialized(kind, 1) == (SerializationContext, MessageField.VALUE)
    assert MessageField.KEY == "key"
    assert str(MessageField.KEY) == "key"


def test_none_is_passed_on_only_for_kafkas_clients():
    """kafka-python calls serializers with None too, and a program may rely on that."""
    adapter = adapt(lambda item: repr(item).encode(), "serialize", "value", pass_none=True)

    assert adapter.convert("t", [], None) == b"None"
    assert list(adapter.convert_all("t", None, [None, 1])) == [b"None", b"1"]


@pytest.mark.parametrize(
    "setting",
    [5, "jsn", "xml", kafka.JsonSerializer, object(), lambda a, b, c: a],
    ids=lambda setting: getattr(setting, "__name__", type(setting).__name__),
)
@pytest.mark.parametrize(
    ("config", "name"),
    [(ProducerConfig, "value_serializer"), (ConsumerConfig, "key_deserializer")],
)
def test_what_is_no_serializer_is_refused_when_the_client_is_made(config, name, setting):
    """The error names the setting; a class in place of an object is one of the mistakes."""
    with pytest.raises(InvalidConfigError, match=f"{name} must be"):
        config.parse({name: setting})


@pytest.mark.parametrize(
    ("config", "name"),
    [(ProducerConfig, "key_serializer"), (ConsumerConfig, "value_deserializer")],
)
def test_pickle_has_to_be_allowed(config, name):
    """Reading it can run any code."""
    with pytest.raises(InvalidConfigError, match="allow_pickle=True"):
        config.parse({name: "pickle"})
    assert getattr(config.parse({name: "pickle", "allow_pickle": True}), name) == "pickle"
