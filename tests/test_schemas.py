"""Schemas of typed topics: which there are, how they change, and what fits into their columns."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
from decimal import Decimal
from typing import Annotated, Literal
from uuid import UUID

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.random_columns import (
    arrow,
    as_variant,
    canonical,
    inferred,
    or_none,
    types,
    values,
    variants,
    widened,
    wider,
)
from support.roots import healthy_log
from support.tiers import sample

import embedlog
from embedlog.errors import (
    InvalidConfigError,
    InvalidRecordError,
    InvalidSchemaError,
    SerializationError,
    TopicAlreadyExistsError,
)
from embedlog.schemas.column_types import MAX_LEVELS, is_widening
from embedlog.schemas.conform import conform
from embedlog.schemas.evolution import changed_schema
from embedlog.schemas.infer import columns_of
from embedlog.schemas.rows import python_rows
from embedlog.schemas.topic_schema import first_version
from embedlog.schemas.values import arrow_array, checker_of, nullable, python_values

log = healthy_log


def schema_of(*fields, key=None, timestamp=None):
    """The first version of a schema."""
    return first_version(pa.schema(fields), key, timestamp)


# Values


@given(st.data())
def test_values_come_back_from_a_column_of_any_type(data):
    """What a program sends is what Arrow stores, and what a reader gets."""
    data_type = data.draw(types())
    items = data.draw(st.lists(or_none(values(data_type)), max_size=5))

    check = checker_of(data_type)
    column = arrow_array([None if item is None else check(item) for item in items], data_type)

    column.validate(full=True)
    assert column.type == data_type
    batch = pa.RecordBatch.from_arrays([column], ["c"])
    assert canonical([row["c"] for row in python_rows(batch, ["c"])]) == canonical(items)


@given(st.data())
def test_columns_of_other_types_are_stored_without_loss(data):
    """Dictionaries, runs, views, large, null and extension types, in any order of fields."""
    data_type = data.draw(types())
    items = data.draw(st.lists(or_none(values(data_type)), max_size=5))
    variant = data.draw(st.one_of(variants(data_type), st.just(inferred(items, data_type))))
    start = data.draw(st.integers(0, len(items)))
    table = pa.table({"c": as_variant(items, data_type, variant)}).slice(start)
    if data.draw(st.booleans()):
        start, table = len(items), pa.Table.from_batches([], table.schema)

    column = conform(table, schema_of(pa.field("c", data_type)), "t")["c"]

    column.validate(full=True)
    assert column.type == data_type
    assert canonical(column.to_pylist(maps_as_pydicts="strict")) == canonical(items[start:])


@given(st.data())
def test_a_wider_type_has_the_same_values(data):
    """Whatever the types say is a widening changes no value."""
    before = data.draw(types())
    after = data.draw(wider(before))
    items = data.draw(st.lists(or_none(values(before)), max_size=5))

    assert is_widening(before, after)
    column = arrow(items, before).cast(after)
    expected = [widened(item, before, after) for item in items]
    assert canonical(column.to_pylist(maps_as_pydicts="strict")) == canonical(expected)


@given(types())
def test_a_column_without_a_type_is_nulls_of_any_type(data_type):
    """pandas and Arrow give a column in which all is missing the type null."""
    table = pa.table({"c": pa.nulls(2)})

    assert conform(table, schema_of(pa.field("c", data_type)), "t")["c"].null_count == 2


@given(types(), types())
def test_a_type_that_is_no_widening_is_refused(before, after):
    """Either a column may change to a type, or the change is refused, with the column named."""
    schema = schema_of(pa.field("c", before))
    columns = pa.schema([pa.field("c", after)])
    if is_widening(before, after):
        assert changed_schema(schema, columns).columns.field("c").type == after
        return
    with pytest.raises(InvalidSchemaError) as caught:
        changed_schema(schema, columns)
    assert caught.value.column == "c"


class Colour(enum.Enum):
    """An enum of text."""

    RED = "red"


UTC = dt.UTC
ACCEPTED = {
    "numpy int": (pa.int8(), np.int64(5), 5),
    "numpy float": (pa.float64(), np.float32(0.5), 0.5),
    "numpy bool": (pa.bool_(), np.bool_(True), True),
    "whole float": (pa.int16(), 3.0, 3),
    "whole decimal": (pa.int16(), Decimal("3.00"), 3),
    "int as float": (pa.float32(), 2**24, float(2**24)),
    "rounded float": (pa.float32(), 0.1, float(np.float32(0.1))),
    "infinity": (pa.float32(), float("inf"), float("inf")),
    "enum": (pa.string(), Colour.RED, "red"),
    "uuid as text": (pa.string(), UUID(int=1), str(UUID(int=1))),
    "uuid as bytes": (pa.binary(16), UUID(int=1), bytes(15) + b"\1"),
    "bytearray": (pa.binary(), bytearray(b"x"), b"x"),
    "memoryview": (pa.binary(), memoryview(b"x"), b"x"),
    "int as decimal": (pa.decimal128(5, 2), 7, Decimal("7.00")),
    "decimal with zeros": (pa.decimal128(3, 1), Decimal("1." + "0" * 100), Decimal("1.0")),
    "zero of many decimals": (pa.decimal128(3, 1), Decimal("0E-200"), Decimal("0.0")),
    "large exponent": (pa.decimal128(3, -2), Decimal("9E4"), Decimal("9.00E+4")),
    "midnight": (pa.date32(), dt.datetime(2020, 1, 2), dt.date(2020, 1, 2)),  # noqa: DTZ001
    "numpy date": (pa.date32(), np.datetime64("2020-01-02"), dt.date(2020, 1, 2)),
    "numpy time": (
        pa.timestamp("us"),
        np.datetime64("2020-01-02T03:04:05"),
        dt.datetime(2020, 1, 2, 3, 4, 5),  # noqa: DTZ001
    ),
    "pandas time": (
        pa.timestamp("ns", tz="UTC"),
        pd.Timestamp("2020-01-02T03:04:05.000000007", tz="UTC"),
        pd.Timestamp("2020-01-02T03:04:05.000000007", tz="UTC"),
    ),
    "pandas duration": (pa.duration("ns"), pd.Timedelta(7, "ns"), pd.Timedelta(7, "ns")),
    "tuple": (pa.list_(pa.int8()), (1, None), [1, None]),
    "numpy array": (pa.list_(pa.int8()), np.array([1, 2]), [1, 2]),
    "pairs": (pa.map_(pa.string(), pa.int8()), [("a", 1)], {"a": 1}),
    "struct without a field": (
        pa.struct([("x", pa.int8()), ("y", pa.int8())]),
        {"y": 1},
        {"x": None, "y": 1},
    ),
}


@pytest.mark.parametrize(("data_type", "value", "expected"), ACCEPTED.values(), ids=ACCEPTED)
def test_objects_of_other_libraries_are_values(data_type, value, expected):
    """What has exactly one meaning is taken."""
    column = arrow_array([checker_of(data_type)(value)], data_type)

    assert column.to_pylist(maps_as_pydicts="strict") == [expected]


REFUSED = {
    "text for a number": (pa.int8(), "1"),
    "bool for a number": (pa.int8(), True),
    "too large": (pa.int8(), 128),
    "too small": (pa.uint8(), -1),
    "fraction": (pa.int64(), 1.5),
    "infinite int": (pa.int64(), float("inf")),
    "nan as int": (pa.int64(), float("nan")),
    "int of many digits": (pa.float64(), 2**53 + 1),
    "int of many digits for 32 bits": (pa.float32(), 2**24 + 1),
    "float too large": (pa.float32(), 1e300),
    "float too large for 16 bits": (pa.float16(), 1e6),
    "bool for a float": (pa.float64(), False),
    "int for a bool": (pa.bool_(), 1),
    "bytes for text": (pa.string(), b"x"),
    "half a character": (pa.string(), "\ud800"),
    "text for bytes": (pa.binary(), "x"),
    "too few bytes": (pa.binary(3), b"xy"),
    "float for a decimal": (pa.decimal128(5, 2), 1.5),
    "too many decimals": (pa.decimal128(5, 2), Decimal("1.234")),
    "too many digits": (pa.decimal128(5, 2), Decimal("1234.00")),
    "a tiny decimal": (pa.decimal128(5, 2), Decimal("1E-100")),
    "a huge decimal": (pa.decimal128(5, 2), Decimal("1E100")),
    "no number": (pa.decimal128(5, 2), Decimal("NaN")),
    "a time for a date": (pa.date32(), dt.datetime(2020, 1, 2, 3)),  # noqa: DTZ001
    "text for a date": (pa.date32(), "2020-01-02"),
    "no zone": (pa.timestamp("us", tz="UTC"), dt.datetime(2020, 1, 2)),  # noqa: DTZ001
    "a zone": (pa.timestamp("us"), dt.datetime(2020, 1, 2, tzinfo=UTC)),
    "numpy without zone": (pa.timestamp("us", tz="UTC"), np.datetime64("2020-01-02")),
    "microseconds": (pa.timestamp("ms"), dt.datetime(2020, 1, 2, 3, 4, 5, 6)),  # noqa: DTZ001
    "nanoseconds": (pa.timestamp("us"), pd.Timestamp("2020-01-02T03:04:05.000000007")),
    "not a time": (pa.timestamp("us"), pd.NaT),
    "out of range": (pa.timestamp("ns"), dt.datetime(9999, 1, 1)),  # noqa: DTZ001
    "seconds of a time": (pa.time32("s"), dt.time(1, 2, 3, 4)),
    "time with a zone": (pa.time64("us"), dt.time(1, tzinfo=UTC)),
    "fraction of a duration": (pa.duration("s"), dt.timedelta(milliseconds=1)),
    "text for a list": (pa.list_(pa.string()), "abc"),
    "wrong item": (pa.list_(pa.int8()), [1, 300]),
    "wrong length": (pa.list_(pa.int8(), 2), [1]),
    "unknown field": (pa.struct([("x", pa.int8())]), {"y": 1}),
    "wrong field": (pa.struct([("x", pa.int8())]), {"x": "1"}),
    "null key": (pa.map_(pa.string(), pa.int8()), {None: 1}),
    "no map": (pa.map_(pa.string(), pa.int8()), 5),
}


@pytest.mark.parametrize(("data_type", "value"), REFUSED.values(), ids=REFUSED)
def test_a_value_that_does_not_fit_is_refused_with_its_column(log, data_type, value):
    """By `send` and by `send_batch`, which also says which record; nothing is written."""
    schema = pa.schema([pa.field("id", pa.int8(), False), ("c", data_type)])
    topic = log.create_topic("t", schema=schema)
    with log.producer() as producer:
        with pytest.raises(SerializationError) as caught:
            producer.send("t", {"id": 1, "c": value})
        assert caught.value.facts["column"].split(".")[0] == "c"
        with pytest.raises(SerializationError) as caught:
            producer.send_batch("t", [{"id": 1}, {"id": 2, "c": value}])
        assert caught.value.facts["row"] == 1
    assert len(topic) == 0


# Tables


REFUSED_TABLES = {
    "unknown column": ({"id": [1], "zz": [1]}, "zz", None),
    "missing column": ({"f": [1.0]}, "id", 0),
    "null": ({"id": [1, None]}, "id", 1),
    "text for a number": ({"id": ["1"]}, "id", None),
    "number for text": ({"id": [1], "t": [1]}, "t", None),
    "too large": ({"id": [1, 2, 2**40]}, "id", 2),
    "fraction": ({"id": [1.0, 1.5]}, "id", 1),
    "infinite": ({"id": [1, 2], "f": [0.5, 1e300]}, "f", 1),
    "time of a date": (
        {"id": [1, 2], "d": [dt.datetime(2020, 1, 1), dt.datetime(2020, 1, 1, 3)]},  # noqa: DTZ001
        "d",
        1,
    ),
    "zone": ({"id": [1], "at": [dt.datetime(2020, 1, 1)]}, "at", None),  # noqa: DTZ001
    "microseconds": (
        {"id": [1], "at": [dt.datetime(2020, 1, 1, 1, 1, 1, 1, tzinfo=UTC)]},
        "at",
        0,
    ),
    "decimals": ({"id": [1, 2], "dec": [Decimal("1.20"), Decimal("1.234")]}, "dec", 1),
    "float as decimal": ({"id": [1], "dec": [1.5]}, "dec", None),
    "item of a list": ({"id": [1, 2], "l": [[1], [2, 300]]}, "l", 1),
    "float of a list": ({"id": [1], "lf": pa.array([[1e300]])}, "lf", None),
    "time in a list": (
        {"id": [1], "ld": pa.array([[1]], pa.list_(pa.timestamp("ms")))},
        "ld",
        None,
    ),
    "field": ({"id": [1], "s": [{"y": 1}]}, "s", None),
    "field of a field": ({"id": [1], "s": [{"x": "a"}]}, "s.x", None),
    "two columns": (pa.table([pa.array([1])] * 2, names=["id", "id"]), "id", None),
}
TABLE_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int32(), False),
        ("f", pa.float32()),
        ("t", pa.string()),
        ("d", pa.date32()),
        ("at", pa.timestamp("ms", tz="UTC")),
        ("dec", pa.decimal128(6, 2)),
        ("l", pa.list_(pa.int8())),
        ("lf", pa.list_(pa.float32())),
        ("ld", pa.list_(pa.date32())),
        ("s", pa.struct([("x", pa.int8())])),
    ]
)


@pytest.mark.parametrize(
    ("table", "column", "row"), REFUSED_TABLES.values(), ids=REFUSED_TABLES.keys()
)
def test_a_table_that_does_not_fit_is_refused_with_row_and_column(log, table, column, row):
    """A table is written as a whole, or not at all."""
    topic = log.create_topic("t", schema=TABLE_SCHEMA)
    with log.producer() as producer:
        with pytest.raises(SerializationError) as caught:
            producer.append_table("t", pa.table(table))
        assert caught.value.facts["column"] == column
        assert caught.value.facts.get("row") == row
        assert f"Row {row}" in str(caught.value) or row is None
    assert len(topic) == 0


def test_only_the_rows_of_a_slice_must_fit(log):
    """Arrow casts the items of all rows of a list, also of those that a slice leaves out."""
    topic = log.create_topic("t", schema=TABLE_SCHEMA)
    table = pa.table({"id": [1, 2, 3], "l": [[300], [7], [300]]})
    with log.producer() as producer:
        producer.append_table("t", table.slice(1, 1)).result()
    assert topic.to_arrow(["l"])["l"].to_pylist() == [[7]]


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame, pa.table])
def test_frames_of_every_library_are_appended(log, frame):
    """pandas, Polars and Arrow: missing nullable columns are null, and integers may be narrower."""
    topic = log.create_topic("t", schema=TABLE_SCHEMA)
    with log.producer() as producer:
        producer.append_table("t", frame({"t": ["ä", None], "id": [1, 2]})).result()
    assert topic.to_arrow(["id", "t", "f"]).to_pylist() == [
        {"id": 1, "t": "ä", "f": None},
        {"id": 2, "t": None, "f": None},
    ]


def test_what_was_read_can_be_written_again(log):
    """The columns that a table has from reading are ignored."""
    topic = log.create_topic("t", schema=TABLE_SCHEMA)
    copy = log.create_topic("copy", schema=topic)
    with log.producer() as producer:
        producer.send("t", {"id": 1, "l": [1, None]}, headers=[("h", b"x")])
        producer.flush()
        producer.append_table("copy", topic.to_arrow()).result()
    assert copy.to_arrow().equals(topic.to_arrow())


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame, pa.Table.from_pylist])
def test_lists_and_structs_without_values_have_any_type(log, frame):
    """Libraries infer Arrow's null type for what is inside, as they do for a column of nulls."""
    rows = [
        {"id": 1, "l": [], "s": {"x": None}, "ls": []},
        {"id": 2, "l": [None], "s": None, "ls": [{"x": None}]},
    ]
    inner = pa.list_(pa.struct([("x", pa.int8())]))
    topic = log.create_topic("t", schema=TABLE_SCHEMA.append(pa.field("ls", inner)))
    with log.producer() as producer:
        producer.append_table("t", frame(rows)).result()
    assert topic.to_arrow(["id", "l", "s", "ls"]).to_pylist() == rows


@pytest.mark.parametrize("kind", [pl.Categorical, pl.Enum(["UA", "AA"])], ids=repr)
@pytest.mark.parametrize("settings", [{"value": "json"}, {"key": "str"}, {}], ids=repr)
def test_categories_are_text_in_every_topic(log, kind, settings):
    """Polars has dictionaries of views, for which Arrow has no casts."""
    plain = pl.DataFrame({"key": ["UA", "AA", None], "value": ["1", "2", "3"]})
    topics = [log.create_topic(name, **settings) for name in ("text", "categories")]
    values = pl.Enum(["1", "2", "3"])
    frames = [plain, plain.with_columns(pl.col("key").cast(kind), pl.col("value").cast(values))]
    with log.producer() as producer:
        for topic, frame in zip(topics, frames, strict=True):
            producer.append_table(topic.name, frame, value="value").result()
    text, categories = ([(record.key, record.value) for record in topic] for topic in topics)
    assert len(text) == 3
    assert categories == text


WITHOUT_TYPE = {
    "bytes and a number": (pd.DataFrame({"a": ["x", "y", "z"], "c": [b"x", b"y", 1]}), "c", 2),
    "a large number": (pd.DataFrame({"c": [1, 2**70]}), "c", 1),
    "a list and text": (pd.DataFrame({"c": [[1], "a"]}), "c", 1),
    "an object": (pd.DataFrame({"c": [None, object()]}), "c", 1),
    "half a character": (pd.DataFrame({"c": ["\udc80"]}, dtype=object), "c", 0),
    "two columns of a name": (pd.DataFrame([[1, 2]], columns=["c", "c"]), None, None),
    "integers of 128 bits": (pl.DataFrame({"c": [2**100]}, {"c": pl.Int128}), None, None),
}


@pytest.mark.parametrize(("frame", "column", "row"), WITHOUT_TYPE.values(), ids=WITHOUT_TYPE)
@pytest.mark.parametrize(
    "arguments", [{"schema": pa.schema([("c", pa.int8())])}, {"value": "json"}]
)
def test_a_frame_that_arrow_cannot_convert_is_refused(log, frame, column, row, arguments):
    """With column and row where there is one, whatever the error of Arrow, pandas or Polars."""
    topic = log.create_topic("t", **arguments)
    with log.producer() as producer, pytest.raises(SerializationError) as caught:
        producer.append_table("t", frame)
    assert (caught.value.facts.get("column"), caught.value.facts.get("row")) == (column, row)
    assert caught.value.facts["topic"] == "t"
    with pytest.raises(InvalidSchemaError):
        log.create_topic("example", schema=frame)
    assert len(topic) == 0
    assert log.topics() == ["t"]


def test_a_timestamp_that_no_record_can_have_is_refused(log):
    """A timestamp column of seconds can hold times that 64 bits of milliseconds cannot."""
    schema = pa.schema([("at", pa.timestamp("s"))])
    topic = log.create_topic("t", schema=schema, timestamp="at")
    with log.producer() as producer, pytest.raises(SerializationError) as caught:
        producer.append_table("t", pa.table({"at": pa.array([0, 2**60], pa.timestamp("s"))}))
    assert caught.value.facts["row"] == 1
    assert len(topic) == 0


# Schemas


@dataclasses.dataclass
class Inner:
    """Inside of another one."""

    x: int
    y: str | None = None


@dataclasses.dataclass
class Everything:
    """A field of each type hint that has an Arrow type."""

    a: int
    b: float | None
    c: str
    d: bytes
    e: bool
    f: dt.datetime
    g: dt.date
    h: dt.timedelta
    i: list[Inner]
    j: dict[str, int]
    k: Annotated[Decimal, pa.decimal128(5, 2)]
    m: Literal["x", "y"]
    n: Colour
    o: Inner | None = None
    p: Annotated[int | None, pa.int8()] = None


def test_a_dataclass_is_a_schema_and_comes_back(log):
    """Each field has a type and says whether it may be None; readers get instances."""
    topic = log.create_topic("t", schema=Everything, key="a")
    at = dt.datetime(2020, 1, 2, tzinfo=UTC)
    value = Everything(
        *(1, None, "c", b"d", True, at, dt.date(2020, 1, 2), dt.timedelta(1)),
        *([Inner(1)], {"z": 2}, Decimal("1.50"), "x", "red", Inner(3, "y"), 5),
    )
    with log.producer() as producer:
        producer.send("t", value)
    consumer = log.consumer("t", auto_offset_reset="earliest", value_deserializer=Everything)
    (record,) = consumer.iter_records(until="end")
    assert record.value == value
    consumer.close()
    columns = topic.schema_history()[-1].columns
    nullable = [field.name for field in columns if field.nullable]
    assert nullable == ["b", "o", "p"]
    assert columns.field("p").type == pa.int8()


@pytest.mark.parametrize(
    "example",
    [
        pd.DataFrame({"a": [1], "b": ["x"]}),
        pl.DataFrame({"a": [1], "b": ["x"]}),
        pl.DataFrame({"a": [1], "b": ["x"]}).schema,
        pa.table({"a": [1], "b": ["x"]}),
        pa.record_batch({"a": [1], "b": ["x"]}),
        pa.schema([("a", pa.int64()), ("b", pa.large_string())]),
    ],
    ids=["pandas", "polars", "polars schema", "table", "batch", "schema"],
)
def test_anything_that_speaks_arrow_is_a_schema(example):
    """A frame as an example, or the schema of any library."""
    schema = first_version(columns_of(example), "a", None)
    assert schema.plain == pa.schema([("a", pa.int64()), ("b", pa.string())])


@pytest.mark.parametrize("timestamp", [None, "at"])
def test_what_was_read_from_a_topic_is_a_schema(log, tmp_path, timestamp):
    """The columns that come with every record are not columns of the new topic."""
    columns = pa.schema([pa.field("a", pa.int8()), pa.field("at", pa.timestamp("us"), False)])
    topic = log.create_topic("t", schema=columns, timestamp=timestamp)
    with log.producer() as producer:
        producer.send("t", {"a": 1, "at": dt.datetime(2020, 1, 2)}, headers=[("h", b"")])  # noqa: DTZ001
    table = topic.to_arrow()
    assert "headers" in table.column_names
    pq.write_table(table, tmp_path / "t.parquet")
    file = pq.read_schema(tmp_path / "t.parquet")
    examples = [topic, topic[:], topic.schema(), table, topic.to_pandas(), topic.to_polars(), file]
    for number, example in enumerate(examples):
        copy = log.create_topic(f"copy-{number}", schema=example, timestamp=timestamp)
        plain = copy.schema_history()[-1].plain
        assert [(field.name, field.type) for field in plain] == [
            (field.name, field.type) for field in columns
        ]
        log.alter_topic(copy.name, schema=example)
        assert len(copy.schema_history()) == 1


def nested(levels):
    """A type with a number of levels."""
    data_type = pa.int8()
    for level in range(levels - 1):
        data_type = pa.list_(data_type) if level % 2 else pa.struct([("x", data_type)])
    return data_type


@dataclasses.dataclass
class Tree:
    """A value inside of itself."""

    left: Tree | None


def test_a_column_may_have_as_many_levels_as_are_allowed(log):
    """Every reader gets its values."""
    data_type = nested(MAX_LEVELS)
    topic = log.create_topic("t", schema=pa.schema([("a", data_type)]))
    value = 1
    for level in range(MAX_LEVELS - 1):
        value = [value] if level % 2 else {"x": value}
    with log.producer() as producer:
        producer.send("t", {"a": value})
        producer.append_table("t", pa.table({"a": pa.array([value], data_type)}))
    assert topic.to_arrow()["a"].to_pylist() == [value] * 2
    assert topic.to_polars()["a"].to_list() == [value] * 2
    assert [record.value["a"] for record in topic] == [value] * 2


RESERVED_NAMES = ("topic", "Partition", "OFFSET", "timestamp", "key", "value", "headers")
RESERVED_NAMES += ("_timestamp", "_key", "_headers", "_offset", "_Tombstone")
REFUSED_SCHEMAS = {
    "no columns": ({"schema": pa.schema([])}, None),
    "no name": ({"schema": pa.schema([("", pa.int8())])}, ""),
    "name with a zero": ({"schema": pa.schema([("a\0", pa.int8())])}, "a\0"),
    "two of a name": ({"schema": pa.schema([("a", pa.int8()), ("a", pa.int8())])}, "a"),
    "null type": ({"schema": pa.schema([("a", pa.null())])}, "a"),
    "nested null type": ({"schema": pa.schema([("a", pa.list_(pa.null()))])}, "a"),
    "union": ({"schema": pa.schema([("a", pa.dense_union([pa.field("x", pa.int8())]))])}, "a"),
    "interval": ({"schema": pa.schema([("a", pa.month_day_nano_interval())])}, "a"),
    "too many levels": ({"schema": pa.schema([("a", nested(MAX_LEVELS + 1))])}, "a"),
    "hundreds of levels": ({"schema": pa.schema([("a", nested(900))])}, "a"),
    "a dataclass in itself": ({"schema": Tree}, None),
    "empty struct": ({"schema": pa.schema([("a", pa.struct([]))])}, "a"),
    "no such key": ({"schema": pa.schema([("a", pa.int8())]), "key": "b"}, "b"),
    "key of a list": ({"schema": pa.schema([("a", pa.list_(pa.int8()))]), "key": "a"}, "a"),
    "key of a decimal": ({"schema": pa.schema([("a", pa.decimal128(3))]), "key": "a"}, "a"),
    "key named twice": ({"schema": pa.schema([("a", pa.int8())]), "key": ["a", "a"]}, None),
    "key of an int": ({"schema": pa.schema([("a", pa.int8())]), "key": 5}, None),
    "no such timestamp": ({"schema": pa.schema([("a", pa.int8())]), "timestamp": "b"}, "b"),
    "timestamp of an int": ({"schema": pa.schema([("a", pa.int64())]), "timestamp": "a"}, "a"),
    "timestamp of a date": ({"schema": pa.schema([("a", pa.date32())]), "timestamp": "a"}, "a"),
    "no schema": ({"schema": 5}, None),
    **{
        f"reserved {name}": ({"schema": pa.schema([(name, pa.int8())])}, name)
        for name in RESERVED_NAMES
    },
}


@pytest.mark.parametrize(("arguments", "column"), REFUSED_SCHEMAS.values(), ids=REFUSED_SCHEMAS)
def test_a_schema_that_a_topic_cannot_have_is_refused(log, arguments, column):
    """With the column named, and no topic created."""
    with pytest.raises(InvalidSchemaError) as caught:
        log.create_topic("t", **arguments)
    assert caught.value.column == column
    assert log.topics() == []


REFUSED_SETTINGS = {
    "compacted without a key": ({"config": {"cleanup.policy": "compact"}}, "cleanup.policy"),
    "serializer": ({"value": "json"}, "value.serializer"),
    "append time": (
        {"timestamp": "at", "config": {"message.timestamp.type": "LogAppendTime"}},
        "message.timestamp.type",
    ),
}


@pytest.mark.parametrize(("arguments", "setting"), REFUSED_SETTINGS.values(), ids=REFUSED_SETTINGS)
def test_a_setting_that_contradicts_the_schema_is_refused(log, arguments, setting):
    """When the topic is created, and when it is altered."""
    schema = pa.schema([("a", pa.int8()), ("at", pa.timestamp("ms"))])
    with pytest.raises(InvalidConfigError) as caught:
        log.create_topic("t", schema=schema, **arguments)
    assert caught.value.facts["setting"] == setting
    assert log.topics() == []
    timestamp = arguments.get("timestamp")
    log.create_topic("t", schema=schema, timestamp=timestamp)
    config = arguments.get("config", {"value.serializer": "json"})
    with pytest.raises(InvalidConfigError):
        log.alter_topic("t", config)
    assert log.topic("t").schema_history()[-1].version == 1


def test_a_topic_that_exists_keeps_its_schema(log):
    """With ``exist_ok`` the same schema is fine, and another one is an error."""
    schema = pa.schema([("a", pa.int8())])
    log.create_topic("t", schema=schema, key="a")
    log.create_topic("bytes")
    assert log.create_topic("t", schema=schema, key="a", exist_ok=True).name == "t"
    for other in ({"schema": schema}, {"schema": pa.schema([("b", pa.int8())]), "key": "b"}):
        with pytest.raises(TopicAlreadyExistsError):
            log.create_topic("t", **other, exist_ok=True)
    with pytest.raises(TopicAlreadyExistsError):
        log.create_topic("bytes", schema=schema, exist_ok=True)


# Evolution

START = schema_of(
    pa.field("id", pa.int32(), False),
    ("n", pa.int16()),
    ("s", pa.struct([("x", pa.int8()), ("y", pa.string())])),
    ("at", pa.timestamp("ms", tz="UTC")),
    key="id",
    timestamp="at",
)


def altered(**columns):
    """The columns of `START`, some of them others; None drops one."""
    fields = {field.name: field for field in START.plain}
    for name, field in columns.items():
        fields[name] = pa.field(name, field) if isinstance(field, pa.DataType) else field
    return pa.schema([field for field in fields.values() if field is not None])


REFUSED_CHANGES = {
    "narrower": ({"columns": altered(n=pa.int8())}, "n"),
    "another type": ({"columns": altered(n=pa.string())}, "n"),
    "unsigned": ({"columns": altered(n=pa.uint16())}, "n"),
    "half a float": ({"columns": altered(n=pa.float16())}, "n"),
    "required": ({"columns": altered(n=pa.field("n", pa.int16(), False))}, "n"),
    "required and new": ({"columns": altered(z=pa.field("z", pa.int8(), False))}, "z"),
    "key of another type": ({"columns": altered(id=pa.field("id", pa.int64(), False))}, "id"),
    "drop the key": ({"columns": altered(id=None)}, "id"),
    "drop the timestamp": ({"columns": altered(at=None)}, "at"),
    "zone": ({"columns": altered(at=pa.timestamp("ms"))}, "at"),
    "unit": ({"columns": altered(at=pa.timestamp("s", tz="UTC"))}, "at"),
    "all fields of a struct": ({"columns": altered(s=pa.struct([("z", pa.int8())]))}, "s"),
    "field of another type": (
        {"columns": altered(s=pa.struct([("x", pa.string()), ("y", pa.string())]))},
        "s",
    ),
    "rename what is missing": ({"columns": altered(), "rename": {"q": "n"}}, "q"),
    "rename and keep": ({"columns": altered(m=pa.int16()), "rename": {"n": "m"}}, "n"),
    "rename to nothing": ({"columns": altered(n=None), "rename": {"n": "m"}}, "n"),
    "rename to a column": ({"columns": altered(n=None), "rename": {"n": "s"}}, "n"),
    "default of a column": ({"columns": altered(), "defaults": {"n": 1}}, "n"),
    "default without a column": ({"columns": altered(), "defaults": {"q": 1}}, "q"),
    "default of another type": ({"columns": altered(z=pa.int8()), "defaults": {"z": "a"}}, "z"),
    "reserved": ({"columns": altered(offset=pa.int8())}, "offset"),
}


@pytest.mark.parametrize(("arguments", "column"), REFUSED_CHANGES.values(), ids=REFUSED_CHANGES)
def test_a_change_that_would_lose_something_is_refused(arguments, column):
    """The error names the column."""
    with pytest.raises(InvalidSchemaError) as caught:
        changed_schema(START, **arguments)
    assert caught.value.column == column


def test_a_refused_change_leaves_the_topic_as_it_was(log):
    """Also of a topic of bytes, which has no schema."""
    topic = log.create_topic("t", schema=START.plain, key="id", timestamp="at")
    with pytest.raises(InvalidSchemaError):
        log.alter_topic("t", schema=altered(n=pa.int8()))
    with pytest.raises(InvalidConfigError):
        log.alter_topic("t", {"retention.ms": 5}, schema=altered(n=pa.int32()))
    log.create_topic("bytes")
    with pytest.raises(InvalidSchemaError):
        log.alter_topic("bytes", schema=altered())
    (only,) = topic.schema_history()
    assert only.plain == START.plain


def test_a_schema_that_changes_nothing_is_no_version(log):
    """Nor does it roll a segment."""
    topic = log.create_topic("t", schema=START.plain, key="id", timestamp="at")
    log.alter_topic("t", schema=START.plain)
    log.alter_topic("t", rename={})
    assert len(topic.schema_history()) == 1


def test_a_rename_keeps_key_and_timestamp(log):
    """Their names change, and records are found as before."""
    topic = log.create_topic("t", schema=START.plain, key="id", timestamp="at")
    at = dt.datetime(2020, 1, 2, tzinfo=UTC)
    with log.producer() as producer:
        producer.send("t", {"id": 7, "at": at}).result()
        log.alter_topic("t", rename={"id": "number", "at": "when"})
        producer.send("t", {"number": 8, "when": at}).result()
    assert topic.get(7) == {"number": 7, "n": None, "s": None, "when": at}
    assert [record.key for record in topic] == [7, 8]
    assert [record.timestamp for record in topic] == [1577923200000] * 2


@pytest.mark.parametrize(
    "rename", [{"a": "b", "b": "a"}, {"a": "b", "b": "c", "c": "a"}, {"b": "d", "a": "b"}], ids=repr
)
def test_columns_swap_their_names(log, rename):
    """Each keeps its values under its new name, and so do filters and old segments."""
    columns = pa.schema([("a", pa.int64()), ("b", pa.string()), ("c", pa.bool_())])
    values = {"a": 1, "b": "x", "c": True}
    for number in (1, 2):
        topic = log.create_topic(f"t{number}", schema=columns)
        after = {rename.get(name, name): item for name, item in values.items()}
        with log.producer() as producer:
            producer.send(topic.name, values).result()
            schema = pa.schema([f.with_name(rename.get(f.name, f.name)) for f in columns])
            log.alter_topic(topic.name, schema=schema if number == 1 else None, rename=rename)
            producer.send(topic.name, after).result()
        assert topic.to_arrow([*after]).to_pylist() == [after, after]
        for name, item in after.items():
            assert topic.to_arrow([name], where=pc.field(name) == item).num_rows == 2


def test_a_column_that_was_dropped_does_not_come_back(log):
    """A new column of the same name is another one."""
    topic = log.create_topic("t", schema=pa.schema([("a", pa.int8()), ("b", pa.int8())]))
    with log.producer() as producer:
        producer.send("t", {"a": 1, "b": 2}).result()
        log.alter_topic("t", schema=pa.schema([("a", pa.int8())]))
        producer.send("t", {"a": 3}).result()
        log.alter_topic("t", schema=pa.schema([("a", pa.int8()), ("b", pa.string())]))
        producer.send("t", {"a": 4, "b": "x"}).result()
    assert topic.to_arrow(["a", "b"]).to_pylist() == [
        {"a": 1, "b": None},
        {"a": 3, "b": None},
        {"a": 4, "b": "x"},
    ]


def test_a_field_that_was_dropped_cannot_come_back(log):
    """Fields of structs have no ids, so an old value would be taken for a new one."""

    def column(*names):
        fields = pa.struct([(name, pa.string() if name == "x" else pa.int8()) for name in names])
        return pa.schema([("a", pa.list_(fields))])

    log.create_topic(
        "t", schema=pa.schema([("a", pa.list_(pa.struct([("x", pa.int8()), ("y", pa.int8())])))])
    )
    log.alter_topic("t", schema=column("y"))
    with pytest.raises(InvalidSchemaError) as caught:
        log.alter_topic("t", schema=column("x", "y"))
    assert caught.value.column == "a"
    log.alter_topic("t", schema=column("y", "z"))


def test_a_default_is_widened_with_its_column(log):
    """And it is what rows have that were written without the column, then and now."""
    topic = log.create_topic("t", schema=pa.schema([("a", pa.int8())]))
    with log.producer() as producer:
        producer.send("t", {"a": 1}).result()
        log.alter_topic(
            "t", schema=pa.schema([("a", pa.int8()), ("b", pa.int8())]), defaults={"b": 5}
        )
        producer.send("t", {"a": 2}).result()
        producer.send("t", {"a": 3, "b": None}).result()
        producer.append_table("t", pa.table({"a": [4, 5]})).result()
        producer.append_table("t", pa.table({"a": [6], "b": pa.nulls(1)})).result()
        log.alter_topic("t", schema=pa.schema([("a", pa.int8()), ("b", pa.float64())]))
        producer.send("t", {"a": 7}).result()
    values = [5.0, 5.0, None, 5.0, 5.0, None, 5.0]
    assert topic.to_arrow(["b"])["b"].to_pylist() == values
    assert [record.value["b"] for record in topic] == values


def test_a_required_column_with_a_default_takes_no_null(log):
    """The default is for rows without the column."""
    log.create_topic("t", schema=pa.schema([("a", pa.int8())]))
    columns = pa.schema([("a", pa.int8()), pa.field("b", pa.int8(), False)])
    log.alter_topic("t", schema=columns, defaults={"b": 5})
    with log.producer() as producer:
        with pytest.raises(SerializationError):
            producer.send("t", {"a": 2, "b": None})
        with pytest.raises(SerializationError):
            producer.append_table("t", pa.table({"a": [2], "b": pa.nulls(1)}))


def test_history_has_all_versions(log):
    """The last one is the current one."""
    topic = log.create_topic("t", schema=pa.schema([("a", pa.int8())]))
    log.alter_topic("t", schema=pa.schema([("a", pa.int16())]))
    log.alter_topic("t", rename={"a": "b"})
    assert [(s.version, s.columns.names, s.columns.types) for s in topic.schema_history()] == [
        (1, ["a"], [pa.int8()]),
        (2, ["a"], [pa.int16()]),
        (3, ["b"], [pa.int16()]),
    ]


# Keys


def test_a_key_of_another_kind_is_refused(log):
    """When it is looked up, and when it is deleted."""
    topic = log.create_topic(
        "t", schema=pa.schema([("a", pa.int32()), ("b", pa.string())]), key=["a", "b"]
    )
    with log.producer() as producer:
        for key in ("x", 5, (1,), (1, 2), (1, "x", 3), {"a": 1, "z": 2}):
            with pytest.raises(SerializationError):
                producer.send("t", None, key=key)
            with pytest.raises(SerializationError):
                topic.get(key)
        with pytest.raises(InvalidRecordError):
            producer.send("t", None)
        with pytest.raises(InvalidRecordError):
            producer.send("t", {"a": 1}, key=(1, "x"))
        for key in (None, (None, None)):
            with pytest.raises(InvalidRecordError):
                topic.get(key)
        producer.send("t", {"a": 1, "b": None}).result()
    assert topic.get((1, None)) == topic.get({"a": 1, "b": None}) == {"a": 1, "b": None}
    assert len(topic) == 1


EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
FIRST, LAST = (
    int((dt.datetime(*day, tzinfo=dt.UTC) - EPOCH).total_seconds())
    for day in ((1, 1, 2), (9999, 12, 30))
)


@pytest.mark.parametrize(("unit", "per_second"), [("s", 1), ("ms", 10**3), ("us", 10**6)])
@pytest.mark.parametrize("zone", sample([None, "UTC", "+01:00", "Europe/Berlin"], 2))
@given(seconds=st.lists(st.none() | st.integers(FIRST, LAST)), part=st.integers(0, 999_999))
def test_times_become_the_objects_that_pyarrow_makes(unit, per_second, zone, seconds, part):
    """But faster."""

    def column(counts):
        return pa.array(counts, pa.int64()).view(pa.timestamp(unit, zone))

    times = column([None if s is None else s * per_second + part % per_second for s in seconds])
    assert repr(python_values(times)) == repr(times.to_pylist())


@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "inside"])
@pytest.mark.parametrize(
    ("kind", "stored", "value"),
    [
        (pa.time32("s"), pa.int32(), 86_400),
        (pa.time64("us"), pa.int64(), -1),
        (pa.decimal128(3, 1), pa.decimal128(9, 1), 12_345),
    ],
    ids=str,
)
def test_a_value_that_its_type_does_not_have_is_refused(tmp_path, kind, stored, value, wrap):
    """A table may hold one, and no reader could decode the batch."""
    buffers = pa.array([value], stored).buffers()
    column = pa.Array.from_buffers(kind, 1, buffers)
    if wrap:
        column = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), column)
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        topic = log.create_topic("t", schema=pa.schema([("x", column.type)]))
        with pytest.raises(SerializationError, match="Column x has an invalid value"):
            log.producer().append_table("t", pa.table({"x": column}))
        assert len(topic) == 0


def test_a_value_below_a_null_may_be_anything(tmp_path):
    """Arrow leaves it as it was in memory, and no reader decodes it."""
    ones, null = pa.array([0, 1, 2], pa.int32()), pa.array([True, False])
    times = pa.Array.from_buffers(pa.time64("us"), 2, pa.array([-1, 5], pa.int64()).buffers())
    names = pa.array(["a", "b"])
    columns = {
        "list": pa.ListArray.from_arrays(ones, times, mask=null),
        "fixed": pa.FixedSizeListArray.from_arrays(times, 1, mask=null),
        "struct": pa.StructArray.from_arrays([times], ["at"], mask=null),
        "map": pa.MapArray.from_arrays(ones, names, times, mask=null),
    }
    columns["nested"] = pa.StructArray.from_arrays([columns["fixed"]], ["times"])
    table = pa.table(columns)
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        topic = log.create_topic("t", schema=table.schema)
        log.producer().append_table("t", table).result()
        row = table.to_pylist()[1]
        assert topic[1].value == {**row, "map": dict(row["map"])}
        assert log.topic("t").to_arrow([*columns]).to_pylist() == table.to_pylist()
        with pytest.raises(SerializationError, match="Column map has an invalid value"):
            table = pa.table({"map": pa.MapArray.from_arrays(ones, names, times)})
            log.producer().append_table("t", table)


def test_a_timestamp_of_a_record_does_not_wrap_around(tmp_path):
    """One in seconds may not fit in milliseconds."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        topic = log.create_topic("t", schema=pa.schema([("x", pa.int64())]))
        times = pa.array([1 << 60], pa.int64()).view(pa.timestamp("s"))
        with pytest.raises(SerializationError, match="Column timestamp"):
            log.producer().append_table("t", pa.table({"x": [1], "timestamp": times}))
        times = pa.array([1999], pa.int64()).view(pa.timestamp("us"))
        log.producer().append_table("t", pa.table({"x": [1], "timestamp": times})).result()
        assert topic[0].timestamp == 1


TIMES = [pa.timestamp(unit, zone) for unit in ("s", "ms", "us") for zone in (None, "Asia/Tokyo")]
TIMES += [pa.timestamp("ns", "UTC"), pa.date32(), *map(pa.duration, ("s", "ms", "us", "ns"))]


@pytest.mark.parametrize("kind", TIMES, ids=str)
@given(data=st.data())
def test_a_time_of_any_size_is_an_object_that_can_be_sent_again(kind, data):
    """Also the year 10000, the infinity of databases, and what is inside of other values."""
    bits = kind.bit_width
    # The smallest number is numpy's NaT.
    counts = data.draw(st.lists(st.none() | st.integers(1 - (1 << bits - 1), (1 << bits - 1) - 1)))
    items = pa.array(counts, pa.int32() if bits == 32 else pa.int64()).view(kind)
    ends = pa.array(range(len(items) + 1), pa.int32())
    columns = [items, pa.StructArray.from_arrays([items], ["x"])]
    columns += [
        pa.ListArray.from_arrays(ends, items),
        pa.MapArray.from_arrays(ends, ends[1:], items),
    ]

    for column in columns:
        check = nullable(checker_of(column.type))
        sent = [check(value) for value in python_values(column)]
        assert arrow_array(sent, column.type).equals(column)
