"""Typed topics in Spark: types, reads and writes by its Python source.

What tasks do is tested without Spark, over random schemas; with Spark, that it fits together.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql.types import StructType
from support import random_columns
from support.random_columns import canonical
from support.spark_reads import arrow_schema_of, spark_schema_of
from support.tiers import choose

import embedlog
from embedlog.api import Log
from embedlog.errors import (
    InvalidConfigError,
    InvalidRecordError,
    InvalidSchemaError,
    SerializationError,
)
from embedlog.schemas.topic_schema import first_version
from embedlog.spark import batch_write
from embedlog.spark import columns as spark_columns
from embedlog.spark.columns import arrow_type, spark_schema, spark_type, type_name
from embedlog.spark.errors import to_embedlog_error
from embedlog.spark.input_partitions import plan_batch
from embedlog.spark.options import (
    SinkOptions,
    SourceOptions,
    check_table,
    reader_options,
    writer_options,
)
from embedlog.spark.partition_reader import read_input_partition
from embedlog.spark.query_schemas import QuerySchemas, current_schemas

FLIGHTS = pa.schema(
    [
        pa.field("tailnum", pa.string(), nullable=False),
        ("delay", pa.uint16()),
        ("at", pa.timestamp("ns")),
        ("day", pa.time32("s")),
        ("tags", pa.list_(pa.string())),
        ("halves", pa.list_(pa.struct([("x", pa.float16())]))),
    ]
)
DAY = dt.datetime(2026, 1, 31, 12)  # noqa: DTZ001 - for a column without a zone


def flight(number: int, **fields: Any) -> dict[str, Any]:
    """Return a value of the topic."""
    value = {"tailnum": f"N{number % 3}", "delay": number, "at": DAY, "day": dt.time(number % 24)}
    return {**value, "tags": ["a", None], "halves": [{"x": 0.5}, None], **fields}


@pytest.fixture
def log(tmp_path: Path) -> Any:
    """A log with a typed topic "flights" of two partitions, verified after the test."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("flights", schema=FLIGHTS, key="tailnum", partitions=2)
        log.create_topic("copy", schema=FLIGHTS, key="tailnum", partitions=3)
        yield log
        assert log.housekeeping.verify() == []


def send(log: Log, topic: str, *values: Any) -> None:
    with log.producer() as producer:
        for value in values:
            producer.send(topic, value)


def read(
    log: Log, columns: str | list[Any] | None = None, topic: str = "flights", **options: str
) -> pa.Table:
    """Plan and read a batch query as Spark does, without Spark, in the order of partitions.

    Args:
        log: The log.
        columns: A user's schema, as `struct_of` takes it, or as the fields of Spark's JSON.
        topic: The topics.
        options: Of the reader.
    """
    parsed = SourceOptions.parse({"path": log.path, "subscribe": topic, **options})
    schemas = current_schemas(parsed)
    struct = schemas.columns() if columns is None else struct_of(columns)
    assert struct is not None
    schemas.select(struct["fields"])
    return read_planned(parsed, schemas, struct)


def struct_of(columns: str | list[Any]) -> dict[str, Any]:
    """Return the JSON of a schema such as "delay int, tailnum string NOT NULL".

    Spark parses such text only with a session.
    """
    if isinstance(columns, list):
        return {"type": "struct", "fields": columns}
    fields = []
    for column in re.split(r", (?![^<]*>)", columns):
        name, kind = column.removesuffix(" NOT NULL").split(" ", 1)
        inner = re.fullmatch(r"struct<(.*)>", kind)
        spark = struct_of(inner[1]) if inner else _LONG_NAMES.get(kind, kind)
        fields.append(spark_columns.field_json(name, spark, not column.endswith(" NOT NULL")))
    return {"type": "struct", "fields": fields}


_LONG_NAMES = {"int": "integer", "bigint": "long"}


def read_planned(options: Any, schemas: QuerySchemas, struct: Any) -> pa.Table:
    names = tuple(field["name"] for field in struct["fields"])
    expected = arrow_schema_of(StructType.fromJson(struct))
    batches = []
    for partition in plan_batch(options, schemas=schemas):
        for batch in read_input_partition(partition, names, True, struct["fields"]):
            # As Spark checks the first batch.
            assert batch.schema.equals(expected)
            batch.validate(full=True)
            batches.append(batch)
    table = pa.Table.from_batches(batches, expected)
    order = [name for name in ("partition", "offset") if name in names]
    return table.sort_by([(name, "ascending") for name in order]) if order else table


def write(log: Log, table: pa.Table, topic: str = "copy", **options: str) -> int:
    """Check, stage and publish rows as the driver and a task do, without Spark."""
    parsed = SinkOptions.parse({"path": log.path, "topic": topic, **options})
    fields = fields_of(table.schema)
    task = batch_write.plan_write(parsed, fields)
    staged = task.stage(table.to_batches(), 0, 0)
    return batch_write.publish(parsed, [staged], None).records


def fields_of(schema: pa.Schema) -> list[Any]:
    """Return the fields of Spark for an Arrow schema that Spark passes."""
    fields: list[Any] = json.loads(spark_schema_of(schema).json())["fields"]
    return fields


def records(log: Log, topic: str) -> list[Any]:
    """Return the records of a topic, in any order of partitions."""
    return sorted(
        repr((canonical(record.value), record.key, record.timestamp, record.headers))
        for record in log.topic(topic)
    )


# Types


def test_each_type_has_its_place_in_the_table_of_the_documentation():
    """The table says what `spark_type` returns."""
    page = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
    for arrow, spark in {
        "`bool`": pa.bool_(),
        "`uint8`": pa.uint8(),
        "`uint16`": pa.uint16(),
        "`uint32`": pa.uint32(),
        "`uint64`": pa.uint64(),
        "`float16`": pa.float16(),
        "`date32`": pa.date32(),
    }.items():
        assert f"| {arrow} | {type_name(spark_type(spark, 'x'))} |" in page


@given(st.lists(random_columns.types(), min_size=1, max_size=4), st.booleans())
def test_spark_and_pyspark_agree_on_every_type(types, as_struct):
    """The JSON is that of pyspark, and so is the Arrow type; a decimal may be too long."""
    schema = first_version(pa.schema(list(zip("abcd", types, strict=False))), None, None)
    try:
        struct = spark_schema(schema, as_struct=as_struct, headers=True, tombstones=True)
    except InvalidSchemaError:
        assert any(map(has_long_decimal, types))
        return
    of_spark = StructType.fromJson(struct)
    assert json.loads(of_spark.json()) == struct
    assert [type_name(field["type"]) for field in struct["fields"]] == [
        field.dataType.simpleString() for field in of_spark
    ]
    for field, expected in zip(struct["fields"], arrow_schema_of(of_spark), strict=True):
        assert arrow_type(field["type"]).equals(expected.type, check_metadata=True)
    spark_columns.check_projection(
        struct["fields"], schema, as_struct=as_struct, headers=True, tombstones=True
    )


@pytest.mark.parametrize("name", ["timestampType", "TIMESTAMPTYPE", "_tombstone", "offset"])
def test_a_topic_cannot_have_the_columns_of_every_record(log, name):
    """Spark does not tell names by their case."""
    with pytest.raises(InvalidSchemaError, match="uses the name"):
        log.create_topic("t", schema=pa.schema([(name, pa.int64())]))


def test_a_decimal_with_too_many_digits_is_refused_unless_it_is_left_out(log):
    """Spark has 38 digits."""
    columns = [("a", pa.int64()), ("long", pa.decimal256(39, 2))]
    log.create_topic("t", schema=pa.schema(columns))
    send(log, "t", {"a": 1})
    with pytest.raises(InvalidSchemaError, match=r"Column long .*at most 38 digits.*Leave it out"):
        read(log, topic="t")
    assert read(log, "a bigint", topic="t").to_pylist() == [{"a": 1}]


def test_nanoseconds_are_read_as_microseconds_or_as_a_number(log):
    """What Spark cannot hold is an error that names the column, and the way out."""
    send(log, "flights", flight(1))
    assert read(log, "at timestamp_ntz").to_pylist() == [{"at": DAY}]
    table = pa.table({"tailnum": ["N9"], "at": pa.array([1_000_000_001], pa.timestamp("ns"))})
    with log.producer() as producer:
        producer.append_table("flights", table)
    with pytest.raises(InvalidRecordError, match=r"Column at .*\.schema\('at bigint'\)"):
        read(log)
    numbers = read(log, "tailnum string, at bigint")
    assert 1_000_000_001 in numbers["at"].to_pylist()
    assert write(log, numbers) == 2
    assert log.topic("copy").to_arrow(["at"]).sort_by("at")["at"].cast("int64").to_pylist() == [
        1_000_000_001,
        1_769_860_800_000_000_000,
    ]


# Random schemas


def in_spark(value: Any, data_type: pa.DataType) -> Any:
    """Return a value of a stored type as Spark has it: what the documentation says."""
    types = pa.types
    if value is None:
        return None
    if types.is_time(data_type):
        return dt.timedelta(
            hours=value.hour,
            minutes=value.minute,
            seconds=value.second,
            microseconds=value.microsecond,
        )
    if types.is_uint64(data_type):
        return Decimal(value)
    if types.is_map(data_type):
        return {
            in_spark(key, data_type.key_type): in_spark(item, data_type.item_type)
            for key, item in value.items()
        }
    if types.is_struct(data_type):
        return {field.name: in_spark(value[field.name], field.type) for field in data_type}
    if isinstance(value, list):
        return [in_spark(item, data_type.value_type) for item in value]
    return value


def of_spark(value: Any, data_type: pa.DataType) -> Any:
    """Return a value that was read from Arrow, with maps as dicts."""
    if isinstance(value, list) and pa.types.is_map(data_type):
        return {key: of_spark(item, data_type.item_type) for key, item in value}
    if isinstance(value, list):
        return [of_spark(item, data_type.value_type) for item in value]
    if isinstance(value, dict):
        return {field.name: of_spark(value[field.name], field.type) for field in data_type}
    return value


def has_long_decimal(data_type: pa.DataType) -> bool:
    if pa.types.is_decimal(data_type):
        try:
            spark_type(data_type, "x")
        except InvalidSchemaError:
            return True
    return any(
        has_long_decimal(data_type.field(index).type) for index in range(data_type.num_fields)
    )


@settings(
    max_examples=choose(test=15, all=200, nightly=2000),
    suppress_health_check=list(HealthCheck),
    deadline=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)
@given(st.data())
def test_what_embedlog_has_is_what_spark_reads_and_writes(tmp_path_factory, data):
    """Whatever the columns are: all or some, as columns or a struct; then written and read."""
    types = random_columns.types().filter(lambda kind: not has_long_decimal(kind))
    names = data.draw(
        st.lists(st.sampled_from(random_columns.NAMES), min_size=1, max_size=4, unique=True)
    )
    columns = {name: data.draw(types, label=name) for name in names}
    row = st.fixed_dictionaries(
        {
            name: random_columns.or_none(random_columns.values(kind))
            for name, kind in columns.items()
        }
    )
    rows = data.draw(st.lists(row, min_size=1, max_size=5))
    schema = pa.schema(list(columns.items()))
    table = pa.table(
        [random_columns.arrow([row[name] for row in rows], columns[name]) for name in names],
        schema=schema,
    )
    with embedlog.open(tmp_path_factory.mktemp("typed") / "log", maintenance=False) as log:
        compression = data.draw(st.sampled_from(["none", "lz4", "zstd"]))
        for topic in ("t", "copy"):
            log.create_topic(topic, schema=schema, config={"compression.type": compression})
        with log.producer() as producer:
            for start in range(0, len(rows), 2):
                producer.append_table("t", table.slice(start, 2))
        whole = read(log, topic="t")
        for name in names:
            found = [of_spark(value, columns[name]) for value in whole[name].to_pylist()]
            wanted = [in_spark(row[name], columns[name]) for row in rows]
            assert canonical(found) == canonical(wanted)
        fields = [field for field in all_columns(log, "t") if field["name"] in (*names, "offset")]
        some = data.draw(st.lists(st.sampled_from(fields), min_size=1, unique_by=str))
        pruned = read(log, some, topic="t")
        assert pruned.num_rows == len(rows)
        for name in pruned.column_names:
            assert canonical(pruned[name].to_pylist()) == canonical(whole[name].to_pylist())
        as_struct = read(log, topic="t", values="struct")
        for name, column in zip(names, as_struct["value"].combine_chunks().flatten(), strict=True):
            assert canonical(column.to_pylist()) == canonical(whole[name].to_pylist())
        write(log, data.draw(st.sampled_from([whole, as_struct])))
        assert records(log, "copy") == records(log, "t")
        assert log.housekeeping.verify() == []


def all_columns(log: Log, topic: str) -> list[Any]:
    options = SourceOptions.parse({"path": log.path, "subscribe": topic})
    struct = current_schemas(options).columns()
    assert struct is not None
    fields: list[Any] = struct["fields"]
    return fields


# Reading


def test_a_topic_has_the_columns_of_every_record_and_its_own(log):
    """In this order; headers and tombstones only if they are asked for."""
    send(log, "flights", flight(1))
    record = ["topic", "partition", "offset", "timestamp", "timestampType"]
    assert read(log).column_names == [*record, *FLIGHTS.names]
    options = {"includeHeaders": "true", "includeTombstones": "true", "values": "struct"}
    assert read(log, **options).column_names == [*record, "_tombstone", "value", "headers"]
    (row,) = read(log).to_pylist()
    assert (row["topic"], row["offset"], row["timestampType"]) == ("flights", 0, 0)
    assert row["day"] == dt.timedelta(hours=1)
    assert read(log, topic="flights").equals(
        read_planned(*planned({"path": log.path, "topic": "flights"}))
    )


def planned(options: dict[str, str]) -> Any:
    parsed = SourceOptions.parse(options)
    schemas = current_schemas(parsed)
    return parsed, schemas, schemas.columns()


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ("nope int", {}, "The topic has no column nope. Its columns are tailnum, delay"),
        ("delay bigint", {}, "Column delay is int, and not bigint"),
        ("value struct<delay int>", {}, "The topic has no column value"),
        ("headers string", {}, "no column headers.*Set includeHeaders to true"),
        ("_tombstone boolean", {}, "no column _tombstone.*Set includeTombstones to true"),
        ("delay int", {"values": "struct"}, "no column delay.*field of the column value"),
        ("value struct<nope int>", {"values": "struct"}, "no column nope"),
        ("value int", {"values": "struct"}, "The column value is a struct, and not int"),
        ("offset int", {}, "Column offset is bigint, and not int"),
        ("delay bigint", {"values": "rows"}, "'values' must be one of columns, struct"),
    ],
)
def test_a_schema_that_the_topic_does_not_have_is_refused(log, columns, options, message):
    """Before a task begins."""
    with pytest.raises(InvalidConfigError, match=message):
        read(log, columns, **options)


def test_a_struct_is_pruned_too(log):
    """Only the named fields are read."""
    send(log, "flights", flight(1))
    table = read(log, "value struct<delay int, tailnum string>", values="struct")
    assert table.to_pylist() == [{"value": {"delay": 1, "tailnum": "N1"}}]


def test_a_query_without_the_topics_columns_reads_no_values(log):
    """There are as many rows."""
    send(log, "flights", *(flight(number) for number in range(10)))
    assert read(log, "topic string").num_rows == 10


def test_columns_that_must_not_be_null_are_checked(log):
    """Spark would take garbage for the value."""
    send(log, "flights", flight(1, delay=None))
    with pytest.raises(InvalidRecordError, match=r"A record has no delay.*NOT NULL"):
        read(log, "delay int NOT NULL")
    assert read(log, "tailnum string NOT NULL").to_pylist() == [{"tailnum": "N1"}]


def test_tombstones_are_left_out_unless_they_are_asked_for(log):
    """Then a column marks them, and a copy has them as well."""
    with log.producer() as producer:
        producer.send("flights", flight(1), headers=[("h", b"1")])
        producer.send("flights", None, key="N1")
        producer.send("flights", flight(1))
        producer.send("flights", None, key="N2", headers=[("h", None)])
    assert read(log)["delay"].to_pylist() == [1, 1]
    assert "_tombstone" not in read(log).column_names
    table = read(log, includeTombstones="true", includeHeaders="true")
    by_offset = table.select(["tailnum", "_tombstone", "delay"]).to_pylist()
    assert {"tailnum": "N2", "_tombstone": True, "delay": None} in by_offset
    assert table["_tombstone"].to_pylist().count(True) == 2
    assert write(log, table.drop_columns(["partition"])) == 4
    assert records(log, "copy") == records(log, "flights")


def test_options_of_typed_topics_are_refused_for_topics_of_bytes(log):
    """They would change nothing."""
    log.create_topic("bytes")
    for option in ({"values": "struct"}, {"includeTombstones": "true"}):
        with pytest.raises(InvalidConfigError, match="for topics with columns"):
            read(log, "value binary", topic="bytes", **option)


def test_several_topics_must_have_the_same_columns(log):
    """Or a schema names columns that all of them have."""
    send(log, "flights", flight(1))
    send(log, "copy", flight(2))
    assert sorted(read(log, topic="flights,copy")["delay"].to_pylist()) == [1, 2]
    log.create_topic("other", schema=pa.schema([("delay", pa.int32()), ("x", pa.int8())]))
    send(log, "other", {"delay": 3})
    with pytest.raises(InvalidConfigError, match=r"flights and other have other columns.* x"):
        read(log, topic="flights,other")
    log.create_topic("bytes")
    with pytest.raises(InvalidConfigError, match=r"topic flights are columns.*bytes are bytes"):
        read(log, topic="flights,bytes")
    options = SourceOptions.parse({"path": log.path, "subscribe": "flights,other"})
    schemas, struct = QuerySchemas(options), struct_of("delay int")
    schemas.select(struct["fields"])
    assert sorted(read_planned(options, schemas, struct)["delay"].to_pylist()) == [1, 3]


def test_a_table_may_have_a_topic_for_writes_besides_those_that_it_reads():
    """The option topic alone says both."""
    assert "topic" not in reader_options({"path": "/l", "subscribe": "a", "topic": "b"})
    assert check_table({"path": "/l", "topic": "b"}).subscription.topics == ("b",)
    assert writer_options({"path": "/l", "topic": "b"})["topic"] == "b"


# Changes of the schema


def changed(log: Log) -> None:
    """Rename a column, widen one, drop one, and add one with a default."""
    columns = [
        pa.field("tailnum", pa.string(), nullable=False),
        ("late", pa.uint32()),
        ("at", pa.timestamp("ns")),
        ("tags", pa.list_(pa.string())),
        FLIGHTS.field("halves"),
        pa.field("carrier", pa.string(), nullable=False),
    ]
    log.alter_topic(
        "flights",
        schema=pa.schema(columns),
        rename={"delay": "late"},
        defaults={"carrier": "AA"},
    )


def test_a_query_sees_records_of_every_version_through_its_own(log):
    """One that began before the change keeps its columns; a later one has the new ones."""
    send(log, "flights", flight(1))
    before = planned({"path": log.path, "topic": "flights"})
    changed(log)
    new = {"tailnum": "N1", "late": 70, "carrier": "UA"}
    send(log, "flights", new)
    rows = read_planned(*before).select(["delay", "day", "tags"]).to_pylist()
    assert rows == [
        {"delay": 1, "day": dt.timedelta(hours=1), "tags": ["a", None]},
        # A dropped column is null in the records after.
        {"delay": 70, "day": None, "tags": None},
    ]
    after = read(log).select(["late", "carrier"]).to_pylist()
    assert after == [{"late": 1, "carrier": "AA"}, {"late": 70, "carrier": "UA"}]
    with pytest.raises(InvalidConfigError, match="no column delay"):
        read(log, "delay int")


def test_a_new_topic_of_a_pattern_must_have_the_columns_of_the_stream(log):
    """It is refused when it appears."""
    options = SourceOptions.parse({"path": log.path, "subscribePattern": "f.*"})
    schemas = current_schemas(options)
    struct = schemas.columns()
    assert struct is not None
    schemas.select(struct["fields"])
    log.create_topic("fine", schema=FLIGHTS)
    schemas.update(log.root)
    log.create_topic("few", schema=FLIGHTS.remove(1))
    with pytest.raises(InvalidConfigError, match="no column delay"):
        schemas.update(log.root)


# Writing


ROW = {"tailnum": pa.array(["N1"]), "delay": pa.array([1], pa.int32())}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"nope": pa.array([1])}, "The topic has no column 'nope'"),
        ({"key": pa.array([b"k"])}, "The topic has no column 'key'"),
        ({"tailnum": None}, "has no column tailnum, which must not be null"),
        ({"delay": pa.array(["1"])}, "Column delay is string, and the topic's is uint16"),
        ({"tags": pa.array(["1"])}, "Column tags is string"),
        ({"partition": pa.array(["0"])}, r"partition must be a\(n\) int"),
        ({"_tombstone": pa.array([1])}, r"_tombstone must be a\(n\) boolean"),
        ({"timestamp": pa.array([1])}, r"timestamp must be a\(n\) timestamp"),
        ({"timestamp": pa.array([1], pa.timestamp("us"))}, "It is timestamp_ntz: cast it"),
        ({"value": pa.array([{"nope": 1}])}, "The topic has no column 'nope'"),
    ],
)
def test_a_frame_that_does_not_fit_is_refused_before_its_tasks(log, columns, message):
    """By the types alone: nothing is staged, and nothing was written."""
    table = {name: column for name, column in {**ROW, **columns}.items() if column is not None}
    parsed = SinkOptions.parse({"path": log.path, "topic": "copy"})
    fields = fields_of(pa.table(table).schema)
    with pytest.raises((InvalidConfigError, SerializationError), match=message):
        batch_write.plan_write(parsed, fields)
    assert not (Path(log.path) / "staging").exists()
    assert len(log["copy"]) == 0


ZONED = {"timestamp": pa.timestamp("us", tz="UTC")}
WITHOUT_ZONE = {"timestamp_ntz": pa.timestamp("us"), "date": pa.date32()}
TIMES = {**ZONED, **WITHOUT_ZONE}


@pytest.mark.parametrize("inside", [False, True], ids=["column", "inside"])
@pytest.mark.parametrize("target", TIMES)
@pytest.mark.parametrize("source", TIMES)
def test_no_time_zone_is_assumed_for_times_without_one(log, source, target, inside):
    """Spark casts these by the time zone of its session, which only the query knows."""
    data_type = pa.list_(TIMES[target]) if inside else TIMES[target]
    log.create_topic("times", schema=pa.schema([("at", data_type)]))
    column = pa.array([0], pa.int32() if source == "date" else pa.int64()).cast(TIMES[source])
    table = pa.table(
        {"at": pa.array([column.to_pylist()], pa.list_(column.type)) if inside else column}
    )

    if (source in ZONED) is (target in ZONED):
        if not inside or source == target or target != "date":
            assert write(log, table, "times") == 1
    else:
        with pytest.raises(SerializationError, match=r"Column at.*[Cc]ast the column"):
            batch_write.plan_write(
                SinkOptions.parse({"path": log.path, "topic": "times"}),
                fields_of(table.schema),
            )


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"delay": pa.array([70_000], pa.int32())}, "Row 0 of column delay cannot become uint16"),
        ({"tailnum": pa.array([None], pa.string())}, "Row 0 has no tailnum"),
        (
            {"day": pa.array([dt.timedelta(days=1)], pa.duration("us"))},
            "Column day cannot become time32.*no time of day",
        ),
        (
            {"_tombstone": pa.array([True]), "tailnum": pa.array([None], pa.string())},
            "Row 0 has no tailnum",
        ),
        (
            {"halves": pa.array([[{"x": 0.1}]], pa.list_(pa.struct([("x", pa.float32())])))},
            "too many digits for a half float",
        ),
        (
            {"headers": pa.array([[{"key": None, "value": b"v"}]])},
            "A header has no key",
        ),
    ],
)
def test_a_value_that_does_not_fit_fails_its_task(log, columns, message):
    """And removes what it staged."""
    table = pa.table({**ROW, **columns})
    if "headers" in columns:
        headers = arrow_type(spark_columns.RECORD_COLUMNS["headers"])
        table = table.set_column(2, "headers", table["headers"].cast(headers))
    with pytest.raises(SerializationError, match=message):
        write(log, table)
    assert len(log["copy"]) == 0


def test_missing_columns_are_null_or_have_their_default(log):
    """As for other writers."""
    changed(log)
    assert write(log, pa.table({"tailnum": ["N1"]}), topic="flights") == 1
    (value,) = (record.value for record in log.topic("flights"))
    none = dict.fromkeys(["late", "at", "tags", "halves"])
    assert value == {"tailnum": "N1", **none, "carrier": "AA"}


def test_arrays_and_structs_without_values_fit_every_column(log):
    """They are void inside, as `array()` is."""
    halves = pa.array([[{"x": None}]], pa.list_(pa.struct([("x", pa.null())])))
    table = pa.table({**ROW, "tags": pa.array([[]], pa.list_(pa.null())), "halves": halves})
    assert write(log, table) == 1
    (value,) = (record.value for record in log.topic("copy"))
    assert (value["tags"], value["halves"]) == ([], [{"x": None}])


def test_keys_go_where_producers_send_them_and_partitions_take_precedence(log):
    """A null partition leaves it to the key."""
    values = [flight(number, tailnum=f"N{number}") for number in range(40)]
    send(log, "copy", *values)
    placed = {record.value["tailnum"]: record.partition for record in log.topic("copy")}
    log.create_topic("again", schema=FLIGHTS, key="tailnum", partitions=3)
    table = read(log, topic="copy").drop_columns(["partition"])
    explicit = pa.array([None] * 39 + [2], pa.int32())
    write(log, table.append_column("partition", explicit), topic="again")
    moved = table["tailnum"][39].as_py()
    found = {record.value["tailnum"]: record.partition for record in log.topic("again")}
    assert found == {**placed, moved: 2}


def test_a_tombstone_needs_a_key_column(log):
    """A topic without one has none."""
    log.create_topic("plain", schema=pa.schema([("a", pa.int64())]))
    table = pa.table({"a": [1], "_tombstone": [False]})
    with pytest.raises(InvalidConfigError, match="has no key column"):
        write(log, table, topic="plain")


def test_the_timestamp_is_that_of_the_column_of_the_topic(log):
    """Also of a tombstone; else the column timestamp has it."""
    schema = pa.schema([("k", pa.int32()), ("at", pa.timestamp("s", tz="UTC"))])
    log.create_topic("timed", schema=schema, key="k", timestamp="at")
    at = pa.array([dt.datetime(2026, 1, day, tzinfo=dt.UTC) for day in (1, 2)])
    table = pa.table({"k": pa.array([1, 2], pa.int32()), "at": at, "_tombstone": [False, True]})
    write(log, table, topic="timed")
    times = [record.timestamp for record in log.topic("timed")]
    assert times == [1_767_225_600_000, 1_767_312_000_000]
    write(log, pa.table({**ROW, "timestamp": pa.array([at[0].as_py()])}))
    assert [record.timestamp for record in log.topic("copy")] == [1_767_225_600_000]


def test_a_schema_that_changes_after_the_tasks_converts_what_they_staged(log):
    """The batches are fitted when they are published, or refused as a whole."""
    parsed = SinkOptions.parse({"path": log.path, "topic": "flights"})
    table = pa.table(ROW)
    task = batch_write.plan_write(parsed, fields_of(table.schema))
    staged = task.stage(table.to_batches(), 0, 0)
    changed(log)
    assert batch_write.publish(parsed, [staged], None).records == 1
    (value,) = (record.value for record in log.topic("flights"))
    assert (value["late"], value["carrier"]) == (1, "AA")


def test_rows_that_name_their_topic_cannot_go_to_a_typed_one(log):
    """Their columns are those of bytes."""
    table = pa.table({"topic": ["copy"], "value": [b"v"]})
    parsed = SinkOptions.parse({"path": log.path})
    task = batch_write.plan_write(parsed, fields_of(table.schema))
    with pytest.raises(InvalidConfigError, match=r"topic copy are columns.*option topic"):
        task.stage(table.to_batches(), 0, 0)


# With Spark


def frame(spark: Any, log: Log, topic: str = "flights", **options: str) -> Any:
    reader = spark.read.format("embedlog").option("path", log.path).option("topic", topic)
    return reader.options(**options).load()


def save(rows: Any, log: Log, topic: str = "copy") -> None:
    writer = rows.write.format("embedlog").mode("append").option("path", log.path)
    writer.option("topic", topic).save()


@pytest.mark.tier("test")
def test_spark_reads_and_writes_a_typed_topic(spark, log):
    """Own columns, filters on offsets, a projection, a struct; a copy; an error in one line."""
    send(log, "flights", *(flight(number) for number in range(20)))
    whole = frame(spark, log)
    assert whole.columns[5:] == FLIGHTS.names
    assert whole.where("delay >= 5 and offset < 1000").count() == 15
    assert whole.agg({"delay": "sum"}).collect()[0][0] == sum(range(20))
    assert whole.where("partition = 0 and offset < 2").count() == 2
    save(whole.drop("partition").where("delay < 10"), log)
    save(frame(spark, log, values="struct").where("value.delay >= 10").drop("partition"), log)
    assert records(log, "copy") == records(log, "flights")
    with pytest.raises(Exception, match="no column 'nope'") as refused:
        save(whole.withColumn("nope", whole.delay), log)
    assert isinstance(to_embedlog_error(refused.value), SerializationError)
    assert len(log["copy"]) == 20
    with pytest.raises(Exception, match=r"tags is map.*which a topic cannot store"):
        save(spark.sql("SELECT 'N1' AS tailnum, 1 AS delay, map() AS tags"), log)
    save(spark.sql("SELECT 'empty' AS tailnum, 1 AS delay, array() AS tags, NULL AS day"), log)
    values = [record.value for record in log["copy"]]
    assert [value["tags"] for value in values if value["tailnum"] == "empty"] == [[]]
