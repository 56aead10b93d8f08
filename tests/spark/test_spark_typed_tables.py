"""Typed topics as tables of Spark: created, filled, changed and dropped in SQL."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from support import random_columns, spark_errors

import embedlog
from embedlog.api import Log
from embedlog.errors import InvalidConfigError, InvalidSchemaError
from embedlog.spark.columns import spark_type, stored_type, type_name
from embedlog.spark.query_planner import QueryPlanner

COLUMNS = "carrier STRING NOT NULL, tailnum STRING, dep_delay INT, time_hour TIMESTAMP"
PROPERTIES = "key = 'tailnum', timestamp = 'time_hour', partitions = 2"
HOUR = "timestamp'2013-01-01 10:00:00Z'"
_numbers = itertools.count()


@pytest.fixture
def log(tmp_path: Path) -> Any:
    """An empty log, verified after the test."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        yield log
        assert log.housekeeping.verify() == []


@pytest.fixture
def sql(spark: Any, log: Log) -> Callable[[str], list[Any]]:
    """Run a statement, in which ``log`` is a catalog with the topics of the log."""
    name = f"typed_{next(_numbers)}"
    spark.conf.set(f"spark.sql.catalog.{name}", "embedlog.spark.LogCatalog")
    spark.conf.set(f"spark.sql.catalog.{name}.path", log.path)

    def sql(text: str) -> list[Any]:
        return list(spark.sql(text.replace("log.default.", f"{name}.default.")).collect())

    return sql


def create(sql: Any, columns: str = COLUMNS, properties: str = PROPERTIES) -> None:
    sql(f"CREATE TABLE log.default.flights ({columns}) TBLPROPERTIES ({properties})")


def error_of(call: Any, *args: Any) -> str:
    """Return the embedlog error that a call to Spark fails with, as its class and its message."""
    error = spark_errors.error_of(call, *args)
    return f"{type(error).__name__}: {error}"


def columns_of(log: Log, topic: str = "flights") -> dict[str, str]:
    """Return the stored types of a topic's columns, in their order."""
    columns = log.topic(topic).schema_history()[-1].columns
    return {field.name: f"{field.type}{'' if field.nullable else ' not null'}" for field in columns}


def values(log: Log, topic: str = "flights") -> list[Any]:
    """Return the values of a topic by their first column."""
    rows = [record.value for record in log.topic(topic)]
    return sorted(rows, key=lambda row: repr(next(iter(row.values()))))


# Types and statements, without Spark


@given(random_columns.types())
def test_a_type_of_spark_is_stored_so_that_it_is_read_again(stored):
    """Of each type that a reader has: Spark gives back what it was told."""
    try:
        wanted = spark_type(stored, "a")
    except InvalidSchemaError:
        return
    again = spark_type(stored_type(wanted, "a"), "a")
    assert (again, type_name(again)) == (wanted, type_name(wanted))


@pytest.mark.parametrize(
    "wanted",
    [
        *("void", "variant", "calendar_interval", "time(6)", "varchar(5)", "char(5)"),
        *("interval year to month", "interval day to hour"),
        {"type": "array", "elementType": "variant", "containsNull": True},
        {"type": "udt", "class": "a.b", "sqlType": "integer"},
    ],
)
def test_a_type_that_a_topic_does_not_have_is_refused(wanted):
    """Also one that Spark would read as another type."""
    with pytest.raises(InvalidSchemaError, match=r"Column a is .*, which a topic cannot store"):
        stored_type(wanted, "a")


def test_a_column_inside_of_another_is_changed_in_python_only(log):
    """Fields of structs have no ids."""
    log.create_topic("t", schema=pa.schema([("s", pa.struct([("x", pa.int32())]))]))
    planner = QueryPlanner()
    change = {"change": "drop", "column": ["s", "x"], "if_exists": False}
    with pytest.raises(InvalidConfigError, match=r"s\.x is inside of a column"):
        planner.alter_columns({"path": log.path}, "t", [change])
    assert not planner.alter_columns({"path": log.path}, "nothing", [change])
    planner.close()


# Created, filled and dropped


@pytest.mark.tier("test")
def test_a_typed_topic_is_created_filled_read_and_dropped(sql, log):
    """Its columns, key, timestamp, partitions and settings are those of the statement."""
    create(sql, properties=f"{PROPERTIES}, 'retention.ms' = '-1'")
    sql(f"INSERT INTO log.default.flights VALUES ('UA', 'N1', 5, {HOUR})")
    sql(
        "INSERT INTO log.default.flights "
        f"SELECT {HOUR} AS time_hour, 'N2' AS tailnum, cast(7 AS tinyint) AS dep_delay, "
        "'AA' AS carrier"
    )

    assert columns_of(log) == {
        "carrier": "string not null",
        "tailnum": "string",
        "dep_delay": "int32",
        "time_hour": "timestamp[us, tz=UTC] not null",
    }
    hour = dt.datetime(2013, 1, 1, 10, tzinfo=dt.UTC)
    first = {"carrier": "AA", "tailnum": "N2", "dep_delay": 7, "time_hour": hour}
    second = {"carrier": "UA", "tailnum": "N1", "dep_delay": 5, "time_hour": hour}
    assert values(log) == [first, second]
    assert {record.key for record in log.topic("flights")} == {"N1", "N2"}
    rows = sql("SELECT carrier, dep_delay FROM log.default.flights WHERE dep_delay > 5")
    assert [tuple(row) for row in rows] == [("AA", 7)]
    properties = {row.key: row.value for row in sql("SHOW TBLPROPERTIES log.default.flights")}
    assert properties == {
        "key": "tailnum",
        "timestamp": "time_hour",
        "partitions": "2",
        "retention.ms": "-1",
        "max.message.bytes": str(4 << 20),
    }
    sql("DROP TABLE log.default.flights")
    assert log.topics() == []


def test_a_table_is_described_and_can_be_created_from_its_description(sql, log):
    """`SHOW CREATE TABLE` names the columns of every record, which are not the topic's own."""
    create(sql, f"{COLUMNS}, gates ARRAY<STRUCT<x: DECIMAL(4,1), y: MAP<STRING, DATE>>>")
    described = [(row.col_name, row.data_type) for row in sql("DESCRIBE log.default.flights")]
    assert described == [
        *(("topic", "string"), ("partition", "int"), ("offset", "bigint")),
        *(("timestamp", "timestamp"), ("timestampType", "int")),
        *(("carrier", "string"), ("tailnum", "string")),
        *(("dep_delay", "int"), ("time_hour", "timestamp")),
        ("gates", "array<struct<x:decimal(4,1),y:map<string,date>>>"),
    ]
    ((statement,),) = sql("SHOW CREATE TABLE log.default.flights")
    before, partitions = columns_of(log), log.topic("flights").partitions
    sql("DROP TABLE log.default.flights")
    sql(statement)
    after = columns_of(log)
    assert after == {name: kind.replace(" not null", "") for name, kind in before.items()} | {
        "time_hour": before["time_hour"]
    }
    assert log.topic("flights").partitions == partitions


def test_options_are_properties_and_a_key_may_have_several_columns(sql, log):
    """As in `OPTIONS (…)`, which other formats take."""
    sql(
        "CREATE TABLE log.default.flights (carrier STRING COMMENT 'a name', flight INT, d DOUBLE) "
        "USING embedlog OPTIONS (key 'carrier, flight', partitions '3')"
    )
    sql("INSERT INTO log.default.flights (flight, carrier, d) VALUES (1, 'UA', 0.1)")
    (record,) = log.topic("flights")
    assert (record.key, record.value["d"]) == (("UA", 1), 0.1)
    assert log.topic("flights").partitions == 3


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("CREATE TABLE {new} (a INT, v VARIANT)", "Column v is variant, which a topic cannot"),
        ("CREATE TABLE {new} (a INT, v VARCHAR(9))", "Column v is varchar(9), which a topic"),
        ("CREATE TABLE {new} (a STRING COLLATE UTF8_LCASE)", "Column a is text with a collation"),
        ("CREATE TABLE {new} (a STRUCT<x: STRING COLLATE UTF8_LCASE>)", "with a collation"),
        ("CREATE TABLE {new} (a STRUCT<x: INT NOT NULL>)", "Elements inside column a must be"),
        ("CREATE TABLE {new} (a INT, key STRING)", "embedlog uses the name 'key' itself"),
        ("CREATE TABLE {new} (a INT, offset INT)", "embedlog uses the name 'offset' itself"),
        ("CREATE TABLE {new} (a INT DEFAULT 5)", "does not support column default value"),
        ("CREATE TABLE {new} (a INT) PARTITIONED BY (a)", "Set the number of its partitions"),
        ("CREATE TABLE {new} (a INT) TBLPROPERTIES (key = 'b')", "There is no column 'b', only a"),
        ("CREATE TABLE {new} (a INT) TBLPROPERTIES (timestamp = 'a')", "must be an Arrow timest"),
        ("CREATE TABLE {new} (a INT) TBLPROPERTIES (partitions = 0)", "from 1 to 20000, got 0"),
        ("CREATE TABLE {new} TBLPROPERTIES (key = 'key')", "a topic of bytes has none of its own"),
        ("CREATE TABLE {new} AS SELECT 1 AS a, NULL AS b", "Column b is void, which a topic can"),
        ("CREATE TABLE {new} AS SELECT * FROM {flights}", "Set TBLPROPERTIES ('partitions' ="),
        ("ALTER TABLE {flights} ADD COLUMN v VARIANT", "Column v is variant, which a topic"),
        ("ALTER TABLE {flights} ADD COLUMN a STRING COLLATE UTF8_LCASE", "with a collation"),
        ("ALTER TABLE {flights} ADD COLUMN a INT NOT NULL", "it must not be null"),
        ("ALTER TABLE {flights} ADD COLUMN a INT DEFAULT 5", "adds columns with defaults"),
        ("ALTER TABLE {flights} ADD COLUMN a INT AFTER offset", "comes with every record"),
        ("ALTER TABLE {flights} DROP COLUMN offset", "The column offset comes with every record"),
        ("ALTER TABLE {flights} DROP COLUMN tailnum", "is the key column and cannot be dropped"),
        ("ALTER TABLE {flights} ALTER COLUMN dep_delay TYPE STRING", "not all of its values can"),
        ("ALTER TABLE {flights} ALTER COLUMN dep_delay COMMENT 'x'", "Leave out comments"),
        ("ALTER TABLE {flights} SET TBLPROPERTIES (key = 'carrier')", "stays the same as long"),
        ("INSERT INTO {flights} VALUES ('UA', 'N1', 5)", "The topic has no column 'col1'"),
        ("INSERT INTO {flights} SELECT 'UA', 'N1', 5", "The topic has no column 'UA'"),
        (
            f"INSERT INTO {{flights}} SELECT *, 0 AS partition FROM VALUES ('UA', 'N1', 5, {HOUR})",
            "The topic has no column 'col1'",
        ),
        ("INSERT OVERWRITE {flights} SELECT 'UA' AS carrier", "never overwritten"),
    ],
)
@pytest.mark.parametrize("reader", ["jvm"], indirect=True)
def test_what_a_typed_topic_cannot_do_is_an_error(sql, log, statement, message):
    """And nothing is created, changed or written."""
    create(sql)
    before = columns_of(log)
    names = {"new": "log.default.new", "flights": "log.default.flights"}

    assert message in error_of(sql, statement.format(**names))

    assert log.topics() == ["flights"]
    assert columns_of(log) == before
    assert len(log["flights"]) == 0


def test_a_decimal_becomes_a_float_only_if_all_of_its_digits_do(sql, log):
    """In SQL, 1.5 is a decimal."""
    create(sql, "f FLOAT, d DOUBLE", "partitions = 1")
    sql("INSERT INTO log.default.flights VALUES (0.1, 123456789.123456)")
    assert "too many digits for a float" in error_of(
        sql, "INSERT INTO log.default.flights (f) VALUES (123456789.1)"
    )
    assert sql("SELECT cast(f AS decimal(2, 1)), d FROM log.default.flights") == [
        (Decimal("0.1"), 123456789.123456)
    ]


# CREATE TABLE … AS SELECT


def test_a_topic_is_created_from_a_query(sql, log):
    """With the query's columns, without those of every record; an empty one, too."""
    create(sql)
    for number in range(3):
        sql(f"INSERT INTO log.default.flights VALUES ('UA', 'N{number}', {number}, {HOUR})")
    sql(
        "CREATE TABLE log.default.copy TBLPROPERTIES (key = 'tailnum', partitions = 2) "
        "AS SELECT * FROM log.default.flights"
    )
    sql(
        "CREATE TABLE log.default.delays AS SELECT carrier, avg(dep_delay) AS delay, "
        "array(1, 2) AS numbers FROM log.default.flights GROUP BY carrier"
    )
    sql(
        "CREATE TABLE log.default.none AS "
        "SELECT value.carrier FROM (SELECT struct(*) AS value FROM log.default.flights) LIMIT 0"
    )

    assert values(log, "copy") == values(log)
    places = [(record.partition, record.timestamp) for record in log.topic("copy")]
    assert sorted(places) == sorted((r.partition, r.timestamp) for r in log.topic("flights"))
    assert values(log, "delays") == [{"carrier": "UA", "delay": 1.0, "numbers": [1, 2]}]
    assert columns_of(log, "delays")["numbers"] == "list<item: int32>"
    assert columns_of(log, "none") == {"carrier": "string"}
    assert len(log["none"]) == 0


def test_a_struct_named_value_has_the_columns(sql, spark, log):
    """As a reader with `values=struct` gives it, which a copy has then."""
    create(sql)
    sql(f"INSERT INTO log.default.flights VALUES ('UA', 'N1', 5, {HOUR})")
    options = {"path": log.path, "topic": "flights", "values": "struct"}
    spark.read.format("embedlog").options(**options).load().createOrReplaceTempView("structs")
    sql(
        "CREATE TABLE log.default.copy TBLPROPERTIES (timestamp = 'time_hour') "
        "AS SELECT value FROM structs"
    )
    assert values(log, "copy") == values(log)
    assert columns_of(log, "copy")["time_hour"] == "timestamp[us, tz=UTC] not null"


def test_a_query_that_fails_leaves_no_topic(sql, log):
    """In a task, or because the rows do not fit the key."""
    failing = "SELECT id, if(id = 7, raise_error('no'), 'x') AS text FROM range(10)"
    assert "no" in error_of(sql, f"CREATE TABLE log.default.new AS {failing}")
    nulls = "SELECT cast(NULL AS timestamp) AS at, 1 AS n"
    statement = f"CREATE TABLE log.default.new TBLPROPERTIES (timestamp = 'at') AS {nulls}"
    assert "has no at" in error_of(sql, statement)
    assert log.topics() == []


def test_programs_create_typed_topics_by_writing(spark, sql, log, tmp_path):
    """`writeTo`, `saveAsTable` and a stream."""
    create(sql)
    sql(f"INSERT INTO log.default.flights VALUES ('UA', 'N1', 5, {HOUR})")
    prefix = f"typed_{next(_numbers) - 1}.default."
    rows = spark.table(f"{prefix}flights").drop("partition")
    rows.writeTo(f"{prefix}a").tableProperty("key", "tailnum").create()
    rows.write.saveAsTable(f"{prefix}b")
    stream = spark.readStream.option("startingOffsets", "earliest").table(f"{prefix}flights")
    writer = stream.drop("partition").writeStream.trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).toTable(f"{prefix}c")
    query.awaitTermination()
    assert [values(log, topic) for topic in "abc"] == [values(log)] * 3
    assert [record.key for record in log.topic("a")] == ["N1"]


# ALTER TABLE


def test_columns_are_added_renamed_moved_widened_and_dropped(sql, log):
    """Every record is then seen through the new columns."""
    create(sql)
    sql(f"INSERT INTO log.default.flights VALUES ('UA', 'N1', 5, {HOUR})")
    sql("ALTER TABLE log.default.flights ADD COLUMNS (gate STRING COMMENT 'x', pax INT FIRST)")
    sql("ALTER TABLE log.default.flights ADD COLUMN seats INT AFTER tailnum")
    sql("ALTER TABLE log.default.flights RENAME COLUMN tailnum TO plane")
    sql("ALTER TABLE log.default.flights ALTER COLUMN dep_delay TYPE BIGINT")
    sql("ALTER TABLE log.default.flights ALTER COLUMN carrier DROP NOT NULL")
    sql("ALTER TABLE log.default.flights ALTER COLUMN gate AFTER pax")
    sql("ALTER TABLE log.default.flights DROP COLUMNS (seats)")
    sql("ALTER TABLE log.default.flights DROP COLUMN IF EXISTS seats")
    assert columns_of(log) == {
        "pax": "int32",
        "gate": "string",
        "carrier": "string",
        "plane": "string",
        "dep_delay": "int64",
        "time_hour": "timestamp[us, tz=UTC] not null",
    }
    sql(f"INSERT INTO log.default.flights VALUES (9, 'A1', NULL, 'N2', 1L << 40, {HOUR})")
    rows = sql("SELECT pax, gate, carrier, plane, dep_delay FROM log.default.flights")
    assert sorted(map(tuple, rows), key=repr) == [
        (9, "A1", None, "N2", 1 << 40),
        (None, None, "UA", "N1", 5),
    ]
    assert {record.key for record in log.topic("flights")} == {"N1", "N2"}


def test_a_type_that_spark_reads_already_stays_as_it_is_stored(sql, log):
    """`uint8` is smallint in Spark, so a change to smallint changes nothing."""
    log.create_topic("flights", schema=pa.schema([("a", pa.uint8()), ("h", pa.float16())]))
    sql("ALTER TABLE log.default.flights ALTER COLUMN a TYPE SMALLINT")
    sql("ALTER TABLE log.default.flights ALTER COLUMN h TYPE DOUBLE")
    assert columns_of(log) == {"a": "uint8", "h": "double"}


# Tables of Spark's own catalog


def test_a_table_of_sparks_own_catalog_has_columns_of_the_topic(spark, sql, log):
    """It may name some; it takes rows with any. The topic must exist."""
    options = f"OPTIONS (path '{log.path}', topic 'flights')"
    name = f"own_{next(_numbers)}"
    statement = f"CREATE TABLE {name} (carrier STRING, dep_delay INT) USING embedlog {options}"
    assert "There is no topic flights, so the table cannot have its columns" in error_of(
        sql, statement
    )
    create(sql)
    assert "The topic has no column gate" in error_of(
        sql, f"CREATE TABLE {name} (gate STRING) USING embedlog {options}"
    )
    sql(statement)
    try:
        sql(
            f"INSERT INTO {name} SELECT 'UA' AS carrier, 'N1' AS tailnum, 5 AS dep_delay, "
            f"{HOUR} AS time_hour"
        )
        assert [tuple(row) for row in sql(f"SELECT * FROM {name}")] == [("UA", 5)]
        assert [record.key for record in log.topic("flights")] == ["N1"]
    finally:
        sql(f"DROP TABLE {name}")
    assert len(log["flights"]) == 1
