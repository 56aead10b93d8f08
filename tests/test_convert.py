"""`Log.convert` and `embedlog convert`: topics of Avro and JSON to columns, and back."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
from itertools import chain

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.children import PausedChild
from support.random_columns import arrow, canonical, key_types, or_none, types, values
from support.roots import healthy, healthy_log

import embedlog
from embedlog.cli import main
from embedlog.convert import stored_rows
from embedlog.errors import (
    IllegalStateError,
    InvalidConfigError,
    InvalidSchemaError,
    LockTimeoutError,
    ReadOnlyError,
    SerializationError,
    TopicAlreadyExistsError,
    UnknownSchemaError,
)

ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "item", "type": ["null", "string"], "default": None},
    ],
}
ROWS = [{"id": number, "item": None if number % 3 else f"item {number}"} for number in range(12)]


log = healthy_log


def orders(log, *, value="avro", key="int", partitions=3):
    """Create a topic whose records have keys, headers and timestamps; the last one deletes."""
    if value == "avro":
        log.schema_registry.register("orders-value", ORDER)
    log.create_topic("orders", partitions=partitions, key=key, value=value)
    with log.producer() as producer:
        for row in ROWS:
            headers = [("trace", b"1"), ("empty", None)] if row["id"] == 5 else None
            time = 1_700_000_000_000 + row["id"]
            producer.send("orders", row, key=row["id"], headers=headers, timestamp_ms=time)
        producer.send("orders", None, key=3, timestamp_ms=1_800_000_000_000)


def records(log, topic):
    """All of a topic's records but for its name and the epochs, by partition and offset."""
    return [tuple(record[1:-1]) for record in log.topic(topic)]


# There and back


@pytest.mark.parametrize("value", ["avro", "json"])
def test_records_are_the_same_there_and_back(log, value):
    """Partitions, offsets, timestamps, keys, values, headers and tombstones."""
    orders(log, value=value)
    result = log.convert("orders", "typed", key="id")
    assert (result.records, result.skipped, result.to) == (len(ROWS) + 1, 0, "typed")
    assert records(log, "typed") == records(log, "orders")
    assert log.topic("typed").get(3) is None
    assert log.describe_topic("typed")["schema"]["key"] == ["id"]
    back = log.convert("typed", "back", to=value)
    assert back.records == len(ROWS) + 1
    assert records(log, "back") == records(log, "orders")
    first, last = log.topic("orders", raw=True), log.topic("back", raw=True)
    assert [record.key for record in first] == [record.key for record in last]


def test_avro_remembers_the_key_and_the_timestamps(log):
    """The way back needs no options, and gives the same schema."""
    hour = dt.datetime(2013, 1, 1, 10, tzinfo=dt.UTC)
    columns = [
        pa.field("carrier", pa.string(), nullable=False),
        ("number", pa.uint16()),
        ("Ä ö", pa.duration("ms")),
        pa.field("hour", pa.timestamp("s", tz="UTC"), nullable=False),
    ]
    keys = ["carrier", "number"]
    log.create_topic("flights", schema=pa.schema(columns), key=keys, timestamp="hour")
    rows = [
        {"carrier": "UA", "number": 5, "Ä ö": dt.timedelta(seconds=1), "hour": hour},
        {"carrier": "UA", "number": None, "Ä ö": None, "hour": hour},
    ]
    with log.producer() as producer:
        producer.send_batch("flights", rows)
        producer.send("flights", None, key=("UA", 5))
    log.convert("flights", "avro")
    log.convert("avro", "again")
    before, after = (log.describe_topic(name)["schema"] for name in ("flights", "again"))
    assert before == after
    assert records(log, "again") == records(log, "flights")
    shown = {"carrier": "UA", "number": 5, "___": 1000, "hour": hour}
    assert log.topic("avro")[0].value == shown


@st.composite
def typed_topics(draw):
    """The schema of a topic, its key, and rows."""
    fields = draw(
        st.dictionaries(
            st.sampled_from(("a", "B2", "Ä ö", "a.b")),
            st.tuples(types(), st.booleans()),
            min_size=1,
            max_size=3,
        )
    )
    key = draw(st.none() | key_types())
    columns = [pa.field(name, kind, null) for name, (kind, null) in fields.items()]
    if key is not None:
        columns.append(pa.field("the key", key))
    count = draw(st.integers(1, 6))
    arrays = []
    for column in columns:
        items = values(column.type)
        items = or_none(items) if column.nullable else items
        chosen = draw(st.lists(items, min_size=count, max_size=count))
        arrays.append(arrow(chosen, column.type))
    schema = pa.schema(columns)
    return pa.Table.from_arrays(arrays, schema=schema), None if key is None else "the key"


@pytest.mark.tier("test")
@given(typed_topics(), st.integers(1, 3))
def test_random_rows_are_the_same_through_avro(tmp_path_factory, table, partitions):
    """Every type; keys keep their bytes, and so their partitions."""
    rows, key = table
    path = tmp_path_factory.mktemp("random")
    with embedlog.open(path, maintenance=False) as log:
        log.create_topic("first", schema=rows.schema, key=key, partitions=partitions)
        with log.producer() as producer:
            producer.append_table("first", rows)
        log.convert("first", "avro")
        log.convert("avro", "second")
        first, second = log.topic("first").to_arrow(), log.topic("second").to_arrow()
        assert second.schema == first.schema
        for before, after in zip(first.columns, second.columns, strict=True):
            assert list(map(canonical, before.to_pylist())) == list(
                map(canonical, after.to_pylist())
            )


def test_settings_go_with_the_records(log):
    """Otherwise the default retention could delete what was to be kept; but times stay."""
    orders(log)
    kept = {"retention.ms": -1, "cleanup.policy": "compact", "max.message.bytes": 2 << 20}
    log.alter_topic("orders", {**kept, "message.timestamp.type": "LogAppendTime"})
    log.convert("orders", "typed", key="id")
    assert log.describe_topic("typed")["overrides"] == kept
    assert records(log, "typed") == records(log, "orders")


# Keys


def test_a_key_that_is_no_column_gets_one(log):
    """Of the type of the keys' serializer."""
    orders(log)
    log.convert("orders", "typed", key="order_key")
    schema = log.topic("typed").schema(["order_key", "id", "item"])
    assert schema.types == [pa.int64(), pa.int64(), pa.string()]
    assert [record.key for record in log.topic("typed")] == [
        record.key for record in log.topic("orders")
    ]


@pytest.mark.parametrize(
    ("serializer", "keys", "expected"),
    [
        ("str", ["a", "é", None], pa.string()),
        ("bytes", [b"\xff", b"a", None], pa.binary()),
        ("int", [1, -5, None], pa.int64()),
        ("float", [1.5, None, 0.25], pa.float64()),
        ("json", ["a", "b", None], pa.string()),
        ("json", [1, 2, None], pa.int64()),
        ("avro", ["a", "b", None], pa.string()),
    ],
)
def test_keys_of_every_serializer_become_a_column(log, serializer, keys, expected):
    """A record without a key has null there."""
    log.schema_registry.register("orders-value", ORDER)
    if serializer == "avro":
        log.schema_registry.register("orders-key", '"string"')
    log.create_topic("orders", key=serializer, value="avro")
    with log.producer() as producer:
        for row, key in zip(ROWS[: len(keys)], keys, strict=True):
            producer.send("orders", row, key=key)
    log.convert("orders", "typed", key="k")
    assert log.topic("typed").schema(["k"]).types == [expected]
    assert [record.value["k"] for record in log.topic("typed")] == keys


def test_the_fields_of_a_key_may_be_columns(log):
    """Of an object of JSON, and of a record of Avro; tombstones have their key, too."""
    key = {"type": "record", "name": "k", "fields": [{"name": "id", "type": "long"}]}
    key["fields"].append({"name": "shop", "type": "string"})
    log.schema_registry.register("avro-key", key)
    for topic in ("avro", "json"):
        log.schema_registry.register(f"{topic}-value", ORDER)
        log.create_topic(topic, key=topic, value="avro")
        with log.producer() as producer:
            for row in ROWS:
                producer.send(topic, row, key={"id": row["id"], "shop": "x"})
            producer.send(topic, None, key={"id": 4, "shop": "x"})
        log.convert(topic, f"{topic}-typed", key=["id", "shop"])
        converted = list(log.topic(f"{topic}-typed"))
        assert [record.key for record in converted[:2]] == [(0, "x"), (1, "x")]
        assert (converted[-1].key, converted[-1].value) == ((4, "x"), None)


def test_keys_are_not_lost(log):
    """Without a column for them nothing is created."""
    orders(log)
    with pytest.raises(InvalidConfigError, match="A record has a key") as error:
        log.convert("orders", "typed")
    assert (error.value.topic, error.value.offset) == ("orders", 0)
    assert log.topics() == ["orders"]


def test_a_key_that_differs_from_its_column_is_refused(log):
    """The record is named; those before it are there."""
    orders(log, partitions=1)
    with log.producer() as producer:
        producer.send("orders", {"id": 100, "item": None}, key=99)
        producer.send("orders", {"id": 101, "item": None}, key=101)
    with pytest.raises(SerializationError, match="the key is 99, and the column 100") as error:
        log.convert("orders", "typed", key="id")
    assert (error.value.topic, error.value.partition) == ("orders", 0)
    assert (error.value.offset, error.value.column) == (len(ROWS) + 1, "id")
    assert len(log.topic("typed")) == len(ROWS) + 1


def test_keys_that_get_other_bytes_go_to_their_partitions(log):
    """Where producers to the new topic will send them; records of a key keep their order."""
    log.schema_registry.register("orders-value", ORDER)
    log.schema_registry.register("orders-key", '"long"')
    log.create_topic("orders", key="avro", value="avro", partitions=3)
    with log.producer() as producer:
        for number in chain(range(20), range(20)):
            producer.send("orders", {"id": number, "item": None}, key=number)
    log.convert("orders", "typed", key="id")
    log.create_topic(
        "expected", schema=log.topic("typed").schema(["id", "item"]), key="id", partitions=3
    )
    with log.producer() as producer:
        for number in range(20):
            producer.send("expected", {"id": number})
    expected = {record.key: record.partition for record in log.topic("expected")}
    assert {record.key: record.partition for record in log.topic("typed")} == expected
    assert len(log.topic("typed")) == 40


def test_another_number_of_partitions_places_records_by_key(log):
    """As a producer does."""
    orders(log)
    log.convert("orders", "typed", key="id", partitions=5)
    assert log.topic("typed").partitions == 5
    assert sorted(record.key for record in log.topic("typed")) == sorted(
        record.key for record in log.topic("orders")
    )
    assert all(log.topic("typed").get(number) for number in range(12) if number != 3)


def test_a_tombstone_without_a_key_is_refused(log):
    """A typed topic has no place for it."""
    log.schema_registry.register("orders-value", ORDER)
    log.create_topic("orders", value="avro")
    with log.producer() as producer:
        producer.send("orders", ROWS[0])
        producer.send("orders", None)
    with pytest.raises(SerializationError, match="a tombstone needs a key") as error:
        log.convert("orders", "typed")
    assert error.value.offset == 1


# Schemas


def test_records_of_older_schemas_are_read_by_the_latest(log):
    """Three versions: a field is added, one removed, and one widened."""
    log.create_topic("orders", value="avro")
    first = {**ORDER, "fields": [{"name": "id", "type": "int"}, {"name": "old", "type": "string"}]}
    second = {**ORDER, "fields": [*first["fields"], {"name": "n", "type": "int", "default": 7}]}
    third = {
        **ORDER,
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "n", "type": ["null", "double"], "default": None},
        ],
    }
    rows = [{"id": 1, "old": "a"}, {"id": 2, "old": "b", "n": 5}, {"id": 1 << 40, "n": None}]
    for schema, row in zip((first, second, third), rows, strict=True):
        log.schema_registry.register("orders-value", schema)
        with log.producer() as producer:
            producer.send("orders", row)
            producer.send("orders", row)
    log.convert("orders", "typed")
    expected = [{"id": 1, "n": None}, {"id": 2, "n": 5.0}, {"id": 1 << 40, "n": None}]
    assert [record.value for record in log.topic("typed")][::2] == expected


def test_a_topic_goes_on_with_an_evolved_schema(log):
    """New columns need an alter_topic of the target, which the error says by its column."""
    log.schema_registry.register("orders-value", ORDER)
    log.create_topic("orders", value="avro")
    with log.producer() as producer:
        producer.send("orders", ROWS[0])
    log.convert("orders", "typed")
    evolved = [*ORDER["fields"], {"name": "price", "type": "double", "default": 0.5}]
    log.schema_registry.register("orders-value", {**ORDER, "fields": evolved})
    with log.producer() as producer:
        producer.send("orders", {**ROWS[1], "price": 2.5})
    with pytest.raises(SerializationError, match="no column 'price'") as error:
        log.convert("orders", "typed")
    assert error.value.offset == 1
    columns = [*log.topic("typed").schema(["id", "item"]), pa.field("price", pa.float64())]
    log.alter_topic("typed", schema=pa.schema(columns))
    assert log.convert("orders", "typed").records == 1
    assert [record.value["price"] for record in log.topic("typed")] == [None, 2.5]


def test_the_columns_of_json_are_inferred_or_given(log):
    """A field that is always null has no type; line ends between the parts do not matter."""
    log.create_topic("clicks", value="json")
    with log.producer(value_serializer="bytes") as producer:
        producer.send("clicks", b'{"timestamp": "2026-01-31T10:00:00Z",\n "n": 1, "x": null}')
        producer.send("clicks", b'{"n": 2.0}')
    with pytest.raises(InvalidSchemaError, match="field x of the values is always null"):
        log.convert("clicks", "inferred")
    schema = pa.schema(
        [("timestamp", pa.timestamp("us", "UTC")), ("n", pa.int16()), ("x", pa.string())]
    )
    with pytest.raises(InvalidSchemaError, match="uses the name 'timestamp' itself"):
        log.convert("clicks", "typed", schema=schema)
    log.convert("clicks", "typed", schema=schema, rename={"timestamp": "at"})
    at = dt.datetime(2026, 1, 31, 10, tzinfo=dt.UTC)
    assert [record.value for record in log.topic("typed")] == [
        {"at": at, "n": 1, "x": None},
        {"at": None, "n": 2, "x": None},
    ]


@pytest.mark.parametrize("levels", [40, 900, 100_000])
def test_json_of_many_levels_is_refused(log, levels):
    """Nothing is created; pyarrow's reader would overflow the stack of the process."""
    log.create_topic("json", value="json")
    with log.producer(value_serializer="bytes") as producer:
        producer.send("json", b'{"a":' + b"[" * levels + b"]" * levels + b"}").result()
    with pytest.raises(InvalidSchemaError, match="inside of each other"):
        log.convert("json", "typed")
    assert log.topics() == ["json"]


def test_a_column_may_have_the_timestamps(log):
    """They replace those of the records; a tombstone keeps its own."""
    log.create_topic("clicks", key="str", value="json")
    with log.producer() as producer:
        producer.send("clicks", {"user": "a", "at": "2026-01-31T10:00:00"}, key="a")
        producer.send("clicks", None, key="a", timestamp_ms=1_800_000_000_000)
    log.convert("clicks", "typed", key="user", timestamp="at")
    assert [record.timestamp for record in log.topic("typed")] == [
        1_769_853_600_000,
        1_800_000_000_000,
    ]


# Records that do not fit


BAD = {
    "no prefix": b"\x01\x00\x00\x00\x01\x02\x00",
    "too short": b"\x00\x00",
    "unknown schema": b"\x00\x00\x00\x00\x63\x02\x00",
    "cut off": b"\x00\x00\x00\x00\x01\x02\x02\x08a",
    "too long": b"\x00\x00\x00\x00\x01\x02\x00\x00",
}


@pytest.mark.parametrize("name", BAD)
def test_a_record_that_does_not_fit_ends_the_conversion(log, name):
    """What precedes it is there, nothing after it; with skip_invalid only it is left out."""
    log.schema_registry.register("orders-value", ORDER)
    log.create_topic("orders", value="avro", partitions=1)
    with log.producer() as producer:
        producer.send_batch("orders", ROWS[:5])
    with log.producer(value_serializer="bytes") as producer:
        producer.send("orders", BAD[name])
    with log.producer() as producer:
        producer.send_batch("orders", ROWS[5:])
    for _ in range(2):
        with pytest.raises(SerializationError) as error:
            log.convert("orders", "typed")
        assert (error.value.partition, error.value.offset) == (0, 5)
        assert "with skip_invalid. Then repeat" in str(error.value)
        assert [record.value for record in log.topic("typed")] == ROWS[:5]
    result = log.convert("orders", "typed", skip_invalid=True)
    assert (result.records, result.skipped) == (len(ROWS) - 5, 1)
    assert [record.value for record in log.topic("typed")] == ROWS


@pytest.mark.parametrize("value", [b"[1]", b"nonsense", b"", b'{"id": 1}{"id": 2}', b'{"id": "x"}'])
def test_what_is_no_object_of_json_is_refused(log, value):
    """Also two objects in one value."""
    log.create_topic("orders", value="json")
    with log.producer(value_serializer="bytes") as producer:
        producer.send_batch("orders", [b'{"id": 1}', value, b'{"id": 3}'])
    schema = pa.schema([("id", pa.int64())])
    with pytest.raises(SerializationError) as error:
        log.convert("orders", "typed", schema=schema)
    assert error.value.offset == 1
    log.convert("orders", "typed", schema=schema, skip_invalid=True)
    assert [record.value["id"] for record in log.topic("typed")] == [1, 3]


def test_the_last_record_of_all_may_be_left_out(log):
    """The next call does not read it again."""
    log.schema_registry.register("orders-value", ORDER)
    log.create_topic("orders", value="avro")
    with log.producer(value_serializer="bytes") as producer:
        producer.send("orders", b"nonsense")
    assert log.convert("orders", "typed", skip_invalid=True).skipped == 1
    assert log.convert("orders", "typed", skip_invalid=True).skipped == 0


# Targets, and going on


def test_a_conversion_goes_on_where_it_was(log, monkeypatch):
    """It copies what has been appended since, in chunks of any size, and never twice."""
    monkeypatch.setattr(stored_rows, "CHUNK_ROWS", 2)
    orders(log)
    assert log.convert("orders", "typed", key="id").records == len(ROWS) + 1
    assert log.convert("orders", "typed").records == 0
    with log.producer() as producer:
        producer.send("orders", {"id": 50, "item": "new"}, key=50)
    assert log.convert("orders", "typed", key="id").records == 1
    assert records(log, "typed") == records(log, "orders")
    assert healthy(log.root)


def test_a_topic_with_other_records_is_no_target(log):
    """Nor one of another form, key or number of partitions."""
    orders(log)
    schema = pa.schema([pa.field("id", pa.int64(), False), ("item", pa.string())])
    log.create_topic("typed", schema=schema, key="id", partitions=3)
    with log.producer() as producer:
        producer.send("typed", ROWS[0])
    with pytest.raises(IllegalStateError, match="no conversion of orders"):
        log.convert("orders", "typed", key="id")
    log.create_topic("bytes")
    log.create_topic("empty", schema=schema, key="id", partitions=3)
    for target, options in (
        ("bytes", {"key": "id"}),
        ("empty", {"key": "item"}),
        ("empty", {"timestamp": "item"}),
        ("empty", {"partitions": 2}),
    ):
        with pytest.raises(TopicAlreadyExistsError):
            log.convert("orders", target, **options)
    assert log.convert("orders", "empty").records == len(ROWS) + 1


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("orders", {"to": "json"}, "A topic of the form avro cannot be converted to json"),
        ("typed", {"to": "typed"}, "A topic of the form typed cannot be converted to typed"),
        ("typed", {"key": "id"}, "key is for a target of columns"),
        ("plain", {}, "The values of the topic are bytes"),
        ("orders", {"schema": pa.schema([("id", pa.int64())])}, "schema is for values of JSON"),
    ],
)
def test_a_conversion_that_makes_no_sense_is_refused(log, source, options, message):
    """Before anything is created."""
    orders(log)
    log.convert("orders", "typed", key="id")
    log.create_topic("plain")
    before = log.topics()
    with pytest.raises(InvalidConfigError, match=message):
        log.convert(source, "new", **options)
    assert log.topics() == before


def test_avro_without_a_registered_schema_is_refused(log):
    """The error is the registry's."""
    log.create_topic("orders", value="avro")
    with pytest.raises(UnknownSchemaError):
        log.convert("orders", "typed")


def test_a_log_that_is_open_to_read_converts_nothing(log):
    """Nor does it create a topic."""
    orders(log)
    with embedlog.open(log.path, mode="r") as reader, pytest.raises(ReadOnlyError):
        reader.convert("orders", "typed", key="id")
    assert log.topics() == ["orders"]


def test_two_conversions_to_a_topic_exclude_each_other(log, tmp_path):
    """The second one could copy what the first one is copying."""
    orders(log)

    def work(pause):
        with embedlog.open(tmp_path / "log", maintenance=False) as other:
            other.convert("orders", "typed", key="id", progress=lambda done, total: pause())

    with PausedChild(work) as child:
        with pytest.raises(LockTimeoutError):
            log.convert("orders", "typed", key="id")
        child.kill()
    log.convert("orders", "typed", key="id")
    assert records(log, "typed") == records(log, "orders")


# The command line


@pytest.mark.tier("all")
def test_the_command_converts_there_and_back(log):
    """In processes of their own, while the log is open here."""
    log.create_topic("orders", key="str", value="json", partitions=2)
    with log.producer() as producer:
        for n in range(5):
            producer.send("orders", {"id": str(n), "at": n, "n": n * 0.5}, key=str(n))

    def run(*arguments):
        command = [sys.executable, "-m", "embedlog", "-r", log.path, "convert", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    shown = run("orders", "typed", "--key", "id", "--rename", "at=time")
    assert shown.startswith("Converted 5 records of orders to typed (typed)\n  partition 0")
    assert log.topic("typed").get("1") == {"id": "1", "time": 1, "n": 0.5}
    result = json.loads(run("typed", "avro", "--json"))
    assert (result["records"], result["skipped"], result["to"]) == (5, 0, "avro")
    assert log.topic("avro").get("1") == {"id": "1", "time": 1, "n": 0.5}


def test_the_command_says_how_to_go_on(log, capsys):
    """And what it left out."""
    log.create_topic("orders", value="json")
    with log.producer(value_serializer="bytes") as producer:
        producer.send_batch("orders", [b'{"id": 1}', b'{"id": "x"}'])
    log.create_topic("typed", schema=pa.schema([("id", pa.int64())]))
    assert main(["-r", log.path, "convert", "orders", "typed"]) != 0
    assert "[orders-0, offset 1]. The records before it were copied." in capsys.readouterr().err
    assert main(["-r", log.path, "convert", "orders", "typed", "--skip-invalid"]) == 0
    out, err = capsys.readouterr()
    assert err == "Left out 1 record that did not fit\n"
    assert out.startswith("Converted 0 records")
    assert main(["-r", log.path, "convert", "orders", "typed", "--rename", "x"]) != 0
    assert "--rename must be OLD=NEW" in capsys.readouterr().err
