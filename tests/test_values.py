"""Values come back: what a program sends to a topic with serializers is what every reader gets."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import pickle
import sys
import uuid

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.roots import healthy_log

import embedlog
from embedlog.api import frames
from embedlog.cli import main
from embedlog.errors import (
    InvalidConfigError,
    RecordDeserializationError,
    SerializationError,
)
from embedlog.schemas.column_types import MAX_LEVELS

kafka = pytest.importorskip("kafka.serializer")
confluent = pytest.importorskip("confluent_kafka.serialization")


log = healthy_log


@pytest.fixture
def orders(log):
    """A topic of JSON values with keys of text."""
    return log.create_topic("orders", key="str", value="json")


@dataclasses.dataclass
class Order:
    """A dataclass inside of which there are others."""

    number: int
    parts: list[object]
    note: str | None = None


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from(
        ["2024-01-31", "2024-01-31T12:00:00Z", "12:00", "", "null", "\ud800", 1 << 53]
    )
)
NAMES = st.sampled_from(["a", "b", "key", "value", "value.key", "offset", "é", ""]) | st.text()
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(NAMES, inner, max_size=4)
        | st.builds(Order, st.integers(), st.lists(inner, max_size=2))
    ),
    max_leaves=8,
)


def plain(value):
    """Return what JSON makes of a value; a dataclass is a dict."""
    return json.loads(json.dumps(value, default=dataclasses.asdict))


def produce_and_consume(root, topic, sent):
    """Send values by the command line; return what it prints."""
    lines = "".join(json.dumps({"value": plain(value)}) + "\n" for value in sent)
    output = io.TextIOWrapper(io.BytesIO())
    with contextlib.redirect_stdout(output), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
        assert main(["--root", root, "produce", "--json", topic]) == 0
        output.buffer.truncate(0)
        output.buffer.seek(0)
        assert main(["--root", root, "consume", "--json", topic]) == 0
    return [json.loads(line)["value"] for line in output.buffer.getvalue().splitlines()]


def without_nulls(value):
    """Return a value without the nulls in its objects: frames have them for missing fields."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def from_frame(rows):
    """Return the values of the rows of a frame; text may be the JSON of a value."""
    for row in rows:
        fields = {name: item for name, item in row.items() if name not in frames.STORED}
        yield row.get("value"), {name.removeprefix("value."): item for name, item in fields.items()}


def is_shown(shown, value):
    """Whether a frame shows a value as it is, or as JSON text."""
    if without_nulls(shown) == without_nulls(value):
        return True
    return isinstance(shown, str) and without_nulls(json.loads(shown)) == without_nulls(value)


def assert_in_frame(rows, sent):
    """Check that each value is in its row."""
    for (text, fields), value in zip(from_frame(rows), sent, strict=True):
        if text is not None or not isinstance(value, dict):
            assert is_shown(text, value)
        else:
            assert all(is_shown(fields[name], item) for name, item in value.items())


@settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(sent=st.lists(JSON, min_size=1, max_size=5))
def test_any_json_value_and_dataclass_comes_back(log, sent):
    """Through all ways to write, and all ways to read."""
    topic = log.create_topic(f"t{len(log.topics())}", key="int", value="json")
    name, expected = topic.name, [plain(value) for value in sent]
    with log.producer() as producer:
        for number, value in enumerate(sent):
            producer.send(name, value, key=number)
        producer.send_batch(name, sent, keys=list(range(100, 100 + len(sent))))
    expected *= 3
    assert produce_and_consume(log.path, name, sent) == expected

    def consumer():
        return log.consumer(name, auto_offset_reset="earliest")

    assert [record.value for record in topic] == expected
    assert topic[0].value == expected[0]
    assert [topic.get(number) for number in range(len(sent))] == expected[: len(sent)]
    assert dict(topic.items()) == {
        key: value
        for start in (0, 100)
        for key, value in enumerate(expected[: len(sent)], start)
        if value is not None
    }
    with consumer() as polled, consumer() as iterated:
        assert [each.value for each in polled.poll(1000)[embedlog.TopicPartition(name, 0)]] == (
            expected
        )
        assert [each.value for each in iterated.iter_records(until="end")] == expected
    assert_in_frame(topic.to_arrow().to_pylist(), expected)


# Frames


def columns(topic, values, **options):
    """Send values, and return the columns that a frame has in place of `value`."""
    with topic.producer() as producer:
        producer.send_batch("orders", values)
    return topic.topic("orders").to_arrow(**options)


def test_objects_have_a_column_for_each_field(log, orders):
    """Of their types; text that looks like a date stays text, and large integers exact."""
    values = [{"n": 1, "day": "2024-01-31", "x": [{"y": 1}]}, None, {"n": 1 << 53, "f": 0.5}]

    table = columns(log, values)

    assert table.column_names == ["offset", "partition", "timestamp", "key", "n", "day", "x", "f"]
    assert table["n"].to_pylist() == [1, None, 1 << 53]
    assert table["day"].to_pylist() == ["2024-01-31", None, None]
    assert table["x"].to_pylist() == [[{"y": 1}], None, None]
    assert orders.to_pandas()["f"].tolist()[2] == 0.5
    assert orders.to_polars()["n"].to_list() == [1, None, 1 << 53]
    assert orders.to_arrow(["key", "day"]).column_names == ["key", "day"]
    assert orders.to_arrow(["value"])["value"].to_pylist()[0].startswith('{"n":1,')


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2.5], {"value": [1.0, 2.5]}),
        (["2024-01-31", None], {"value": ["2024-01-31", None]}),
        ([1, "x"], {"value": ["1", '"x"']}),
        ([{"a": 1}, [2]], {"a": [1, None], "value": ['{"a":1}', "[2]"]}),
        ([{"a": 1}, {"a": "x"}], {"a": ["1", '"x"']}),
        ([{"a": 1}, {"a": True}], {"a": ["1", "true"]}),
        ([{"a": (1 << 53) + 1}, {"a": 0.5}], {"a": ["9007199254740993", "0.5"]}),
        ([{"a": 1 << 64}], {"a": ["18446744073709551616"]}),
        ([{"a": {"b": 1}}, {"a": {"b": []}}], {"a": ['{"b":1}', '{"b":[]}']}),
        ([{"offset": 1, "value": 2, "value.x": 3}],
         {"value.offset": [1], "value.value": [2], "value.value.x": [3]}),
        ([{"\ud800": 1}], {"value": ['{"\\ud800":1}']}),
        ([None], {"value": [None]}),
        ([{}], {}),
        # pyarrow's reader gets the lengths of such lists wrong.
        ([[None, None], [None]], {"value": [[None, None], [None]]}),
        ([[None, {}, None]], {"value": [[None, {}, None]]}),
    ],
)  # fmt: skip
def test_values_without_a_common_type_are_json_text(log, orders, values, expected):
    """No value is lost or changed, and no name collides."""
    table = columns(log, values)

    shown = {name: table[name].to_pylist() for name in table.column_names[4:]}
    assert shown == expected


def test_types_that_change_after_many_rows_are_found(log, orders):
    """The fast reader infers types in slices."""
    values = [{"a": 1}] * 1500 + [{"a": "x"}]

    assert columns(log, values)["a"].to_pylist() == ["1"] * 1500 + ['"x"']


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
@pytest.mark.parametrize("levels", [MAX_LEVELS - 1, MAX_LEVELS + 2, 100, 900])
def test_deeply_nested_values_stay_text(log, orders, opening, closing, levels):
    """pyarrow and Polars would overflow the stack of the process, of a reader or of a frame."""
    text = opening * levels + b'"]}"' + closing * levels
    with log.producer(value_serializer="bytes") as producer:
        producer.send("orders", text).result()
    name, value = ("value", text) if opening == b"[" else ("a", text[len(opening) : -1])

    (column,) = orders.to_arrow()[name].to_pylist()
    for frame in (orders.to_pandas(), orders.to_polars(), orders.scan().collect()):
        assert len(frame) == 1
    if levels > MAX_LEVELS:
        assert column == value.decode()
    else:
        assert column == json.loads(value)


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_values_that_python_cannot_read_are_named(log, orders, opening, closing):
    """With their offset, also if that is because of their levels."""
    with log.producer(value_serializer="bytes") as producer:
        producer.send("orders", b"1")
        producer.send("orders", opening * 100_000 + b"1" + closing * 100_000).result()
    with pytest.raises(RecordDeserializationError, match="RecursionError") as error:
        orders.to_arrow()
    assert error.value.offset == 1


def test_objects_with_too_many_fields_stay_text(log, orders):
    """Names that are data would make a table of millions of cells."""
    values = [{str(number): number} for number in range(frames.MAX_FIELDS + 1)]

    assert columns(log, values)["value"].to_pylist()[0] == '{"0":0}'


def test_a_column_that_does_not_exist_is_named(log, orders):
    """With those that do."""
    with pytest.raises(KeyError, match=r"There is no column 'nope', only offset, .*, value, a"):
        columns(log, [{"a": 1}], columns=["nope"])


def test_raw_views_and_frames_have_bytes(log, orders):
    """As Spark and programs in other languages see them."""
    with log.producer() as producer:
        producer.send("orders", {"a": 1}, key="k")
    raw = log.topic("orders", raw=True)

    assert (raw[0].key, raw[:1][0].value) == (b"k", b'{"a":1}')
    assert raw.get(b"k") == b'{"a":1}'
    assert list(raw.items()) == [(b"k", b'{"a":1}')]
    for table in (raw.to_arrow(), orders.to_arrow(raw=True), pa.Table.from_batches(raw.batches())):
        assert table["value"].to_pylist() == [b'{"a":1}']


def test_latest_and_arrows_stream_are_decoded_too(log, orders):
    """The last value of each key, in columns; other libraries see the same."""
    with log.producer() as producer:
        for number in range(3):
            producer.send("orders", {"n": number}, key="k")
        producer.send("orders", None, key="gone")

    assert orders.to_arrow(["key", "n"], latest=True).to_pylist() == [{"key": "k", "n": 2}]
    assert pl.DataFrame(orders)["n"].to_list() == [0, 1, 2, None]
    assert orders.get("gone", "default") == "default"
    assert "{&#x27;n&#x27;: 0}" in orders._repr_html_()


@pytest.mark.parametrize(
    ("name", "items", "column"),
    [
        ("str", ["a", None], ["a", None]),
        ("int", [-1, None], [-1, None]),
        ("float", [0.5, None], [0.5, None]),
        ("uuid", [uuid.UUID(int=1), None], [str(uuid.UUID(int=1)), None]),
        ("json", [[1], None], [[1], None]),
        ("pickle", [{1}, None], [pickle.dumps({1}), None]),
    ],
)
def test_keys_and_values_of_every_built_in_serializer_have_columns(log, name, items, column):
    """Pickled ones stay bytes."""
    topic = log.create_topic("orders", key=name, value=name)
    with log.producer(allow_pickle=True) as producer:
        producer.send_batch("orders", items, keys=items)
    table = topic.to_arrow()

    assert table["key"].to_pylist() == table["value"].to_pylist() == column


# Tables


def test_a_frame_becomes_one_object_per_row(log, orders):
    """Of all columns but those of keys, timestamps and headers; null stays null."""
    frame = pd.DataFrame(
        {
            "tail": ["N1", "N2", "N3"],
            "delay": [1.0, None, 1e300],
            "gate": ['a"b\n', "é", None],
            "day": pd.to_datetime(["2024-01-31"] * 3),
            "kind": pd.Categorical(["x", "y", "x"]),
            "value": [1, 2, 3],
            "late": [True, False, True],
            "legs": [["a"], [], None],
        }
    )
    with log.producer() as producer:
        producer.append_table("orders", frame, key="tail").result()
        producer.append_table("orders", frame[frame["value"] > 2], key="tail").result()

    records = list(orders)
    assert [record.key for record in records] == ["N1", "N2", "N3", "N3"]
    assert records[0].value == {
        "delay": 1.0, "gate": 'a"b\n', "day": "2024-01-31T00:00:00", "kind": "x", "value": 1,
        "late": True, "legs": ["a"],
    }  # fmt: skip
    assert records[1].value["delay"] is None
    assert isinstance(records[0].value["delay"], float)
    assert records[2].value == records[3].value


def test_stored_columns_are_written_as_they_are(log, orders):
    """So that a topic can be copied; and a column that is named is serialized alone."""
    log.create_topic("copy", key="str", value="json")
    with log.producer() as producer:
        producer.send("orders", {"a": 1}, key="k").result()
        producer.append_table("copy", orders.to_arrow(raw=True)).result()
        producer.append_table("copy", pa.table({"v": [[1], None]}), value="v").result()

    assert [record.value for record in log.topic("copy")] == [{"a": 1}, [1], None]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"key": ["a"], "value": ["x"], "other": [1]}, "a column value of text, and other columns"),
        ({"key": ["a"], "f": [float("inf")]}, "The column f cannot be written as JSON: it has NaN"),
        ({"key": ["a"], "b": [b"x"]}, "The column b cannot be written as JSON: JSON has no bytes"),
        ({"key": ["a"]}, "There is no column value"),
        ({"key": [1], "f": [1]}, "The key 1 of record 0 cannot be serialized"),
    ],
)
def test_a_table_that_cannot_be_json_is_refused(log, orders, table, message):
    """Nothing is written; the error names the column."""
    with log.producer() as producer, pytest.raises(SerializationError, match=message):
        producer.append_table("orders", pa.table(table))

    assert len(orders) == 0


@pytest.mark.parametrize("argument", ["key", "value", "timestamp"])
def test_a_column_of_a_table_that_does_not_exist_is_named(log, orders, argument):
    """With those that the table has, not with those that it would become."""
    with (
        log.producer() as producer,
        pytest.raises(SerializationError, match="There is no column nope, only a, b"),
    ):
        producer.append_table("orders", pa.table({"a": [1], "b": [2]}), **{argument: "nope"})


# Producers and consumers


def test_own_serializers_are_used_in_place_of_the_topics(log, orders):
    """kafka-python's and confluent-kafka's too; "bytes" converts nothing."""
    with log.producer(
        key_serializer=confluent.StringSerializer(), value_serializer=kafka.JsonSerializer()
    ) as producer:
        producer.send("orders", {"a": 1}, key="k")
    with log.producer(key_serializer="bytes", value_serializer="bytes") as producer:
        producer.send("orders", b"[2]", key=b"raw")
    options = {"auto_offset_reset": "earliest", "consumer_timeout_ms": 0}
    with (
        log.consumer("orders", **options) as typed,
        log.consumer("orders", **options, value_deserializer=len, key_deserializer="bytes") as own,
    ):
        assert [(each.key, each.value) for each in typed] == [("k", {"a": 1}), ("raw", [2])]
        assert [(each.key, each.value) for each in own] == [(b"k", 8), (b"raw", 3)]


def test_a_serializer_may_take_arrays(log):
    """Of which a comparison with None is an array, too."""
    arrays = [np.array([1, 2]), None, np.array([3, 4])]
    with log.producer(value_serializer=lambda array: array.tobytes()) as producer:
        producer.send_batch("t", arrays)
        producer.send_batch("t", arrays[:1])
        producer.send("t", arrays[0])

    first = arrays[0].tobytes()
    assert [record.value for record in log.topic("t")] == [
        *(first, None, arrays[2].tobytes()),
        *(first, first),
    ]


def test_a_serializer_may_add_headers(log):
    """As confluent-kafka's for schemas do: they are those of the record."""

    def with_schema(item, ctx):
        ctx.headers.append((f"{ctx.field}-schema", b"1"))
        return item.encode()

    given_headers = [("h", b"0")]
    with log.producer(key_serializer=with_schema, value_serializer=with_schema) as producer:
        producer.send("t", "v", key="k", headers=given_headers)
        producer.send_batch("t", ["v"], keys=["k"], headers=[given_headers])
        producer.send_batch("t", ["v"])

    added = [("key-schema", b"1"), ("value-schema", b"1")]
    assert [record.headers for record in log.topic("t")] == [
        given_headers + added,
        given_headers + added,
        added[1:],
    ]
    assert given_headers == [("h", b"0")]


def test_an_altered_topic_has_its_new_serializers_at_once(log):
    """In producers, consumers and views that exist."""
    topic = log.create_topic("t")
    consumer = log.consumer("t", auto_offset_reset="earliest")
    with log.producer() as producer:
        producer.send("t", b"1").result()
        assert consumer.poll(1000)[embedlog.TopicPartition("t", 0)][0].value == b"1"
        log.alter_topic("t", {"value.serializer": "json"})
        producer.send("t", {"a": 1}).result()

    assert consumer.poll(1000)[embedlog.TopicPartition("t", 0)][0].value == {"a": 1}
    assert [record.value for record in topic] == [1, {"a": 1}]
    assert log.describe_topic("t")["overrides"] == {"value.serializer": "json"}


@pytest.mark.parametrize(
    ("value", "key", "message"),
    [
        (b"{}", "k", "The value of the record with the key 'k' cannot be serialized: .*no bytes"),
        ({"a": {1}}, "k", "'json' can serialize"),
        ({}, b"k", "The key b'k' of the record cannot be serialized: .*str is expected"),
        (float("nan"), None, "The value of the record cannot be serialized"),
    ],
)
def test_what_cannot_be_serialized_is_named(log, orders, value, key, message):
    """Topic, key and record; already serialized bytes are refused with what to do."""
    with log.producer() as producer:
        with pytest.raises(SerializationError, match=message) as caught:
            producer.send("orders", value, key=key)
        assert (caught.value.topic, caught.value.key) == ("orders", key)
        assert ('value_serializer="bytes"' in str(caught.value)) == (value == b"{}")
        with pytest.raises(SerializationError, match="record 1") as caught:
            producer.send_batch("orders", [{}, value], keys=["k", key])
        assert (caught.value.index, caught.value.topic) == (1, "orders")

    assert len(orders) == 0


def test_what_cannot_be_deserialized_is_named(log, orders):
    """Topic, partition, offset and key; what comes before it is read first."""
    with log.producer(value_serializer="bytes") as producer:
        producer.send_batch("orders", [b"1", b"oops"], keys=["a", "bad"])
    consumer = log.consumer("orders", auto_offset_reset="earliest")
    reads = [
        lambda: list(orders),
        lambda: dict(orders.items()),
        lambda: orders.get("bad"),
        orders.to_arrow,
        lambda: orders[1],
        lambda: list(consumer.iter_records(until="end")),
    ]

    for read in reads:
        with pytest.raises(RecordDeserializationError, match="with the key b'bad'") as caught:
            read()
        error = caught.value
        assert (error.topic, error.partition, error.offset) == ("orders", 0, 1)
        assert (error.key_bytes, error.value_bytes, error.field) == (b"bad", b"oops", "value")
    assert orders[0].value == 1
    assert "oops" in orders._repr_html_()


def test_a_key_of_another_type_is_refused_by_get(log, orders):
    """The error names the type of the topic's keys."""
    with pytest.raises(SerializationError, match="are of the type 'str'"):
        orders.get(b"k")


def test_a_pickled_topic_needs_permission_to_be_read(tmp_path):
    """By each reader: from its setting, or for all of a log."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        topic = log.create_topic("p", value="pickle")
        with log.producer() as producer, pytest.raises(InvalidConfigError, match="allow_pickle"):
            producer.send("p", {1})
        with log.producer(allow_pickle=True) as producer:
            producer.send("p", {1}).result()
        for read in (
            lambda: topic[0],
            lambda: log.consumer("p", auto_offset_reset="earliest").poll(),
        ):
            with pytest.raises(InvalidConfigError, match="allow_pickle=True if you trust"):
                read()
        assert topic._repr_html_()
        with log.consumer("p", auto_offset_reset="earliest", allow_pickle=True) as consumer:
            assert [each.value for each in consumer.iter_records(until="end")] == [{1}]
    with embedlog.open(tmp_path / "log", maintenance=False, allow_pickle=True) as log:
        assert pickle.loads(pickle.dumps(log)).topic("p")[0].value == {1}
        with log.producer() as producer:
            producer.send("p", {2}).result()


def test_serializers_are_given_once(log):
    """As arguments or as settings, not as both."""
    for config in ({"value.serializer": "str"}, {"value_serializer": "str"}):
        with pytest.raises(InvalidConfigError, match="given twice, also as value"):
            log.create_topic("t", config=config, value="json")
    with pytest.raises(InvalidConfigError, match="must be one of bytes, str, int"):
        log.create_topic("t", value="xml")


# The command line


def run(log, *arguments, stdin=""):
    """Run a command, and return the lines that it prints."""
    output = io.TextIOWrapper(io.BytesIO())
    with contextlib.redirect_stdout(output), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        assert main(["--root", log.path, *arguments]) == 0
        output.flush()
    return output.buffer.getvalue().decode().splitlines()


def test_the_command_line_reads_and_prints_values(log):
    """Text as it is typed, JSON as JSON; what cannot be decoded as base64."""
    run(log, "topics", "create", "t", "--key", "int", "--value", "json")
    run(log, "produce", "t", "-K", "=", stdin='1={"a":"é"}\n2=null\n')
    run(log, "--json", "produce", "t", stdin='{"key": 3, "value": {"base64": "x"}}\n')
    with log.producer(value_serializer="bytes") as producer:
        producer.send("t", b"oops").result()

    assert run(log, "consume", "t", "-f", "%k %s\\n") == [
        *('1 {"a":"é"}', "2 ", '3 {"base64":"x"}', " oops"),
    ]
    printed = [json.loads(line) for line in run(log, "--json", "tail", "t", "-n", "3")]
    assert [(record["key"], record["value"]) for record in printed] == [
        *((2, None), (3, {"base64": "x"}), (None, {"base64": "b29wcw=="})),
    ]


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("json", "{}\nx\n", "Line 2 is not of the type 'json'"),
        ("int", "x", "Line 1 is not of the type 'int'"),
        ("uuid", "x", "Line 1 is not of the type 'uuid'"),
    ],
)
def test_a_line_of_another_type_is_refused(log, capsys, name, line, message):
    """And named; nothing is written."""
    log.create_topic("t", value=name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(line.encode())))
        assert main(["--root", log.path, "produce", "t"]) != 0

    assert message in capsys.readouterr().err
    assert len(log.topic("t")) == 0
