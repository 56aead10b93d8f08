"""Tables of Spark over a log: of Spark's own catalog, of a catalog of topics, temporary views."""

import itertools
import re
from pathlib import Path

import pytest
from support import spark_errors

from embedlog.errors import InvalidConfigError, SparkSetupError
from embedlog.spark import EmbedlogDataSource
from embedlog.spark.options import check_catalog, check_table, reader_options, writer_options
from embedlog.spark.spark_session import READER

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
]
PAGE = Path(__file__).parents[2] / "docs" / "spark.md"
_numbers = itertools.count()


@pytest.fixture
def sql(spark):
    """Run a statement of SQL, and return its rows."""
    return lambda text, **values: spark.sql(text.format(**values)).collect()


@pytest.fixture
def table(spark, log):
    """Create a table of topic "t", or with other options; return its name."""
    names = []

    def table(columns="", **options):
        name = f"table_{next(_numbers)}"
        options = {"path": log.path, **(options or {"subscribe": "t"})}
        pairs = ", ".join(f"{name} '{value}'" for name, value in options.items() if value)
        spark.sql(f"CREATE TABLE {name} {columns} USING embedlog OPTIONS ({pairs})")
        names.append(name)
        return name

    yield table
    for name in names:
        spark.sql(f"DROP TABLE IF EXISTS {name}")


@pytest.fixture
def catalog(spark, log):
    """Return the name of a catalog with the topics of the log."""
    name = f"log_{next(_numbers)}"
    spark.conf.set(f"spark.sql.catalog.{name}", "embedlog.spark.LogCatalog")
    spark.conf.set(f"spark.sql.catalog.{name}.path", log.path)
    return name


def error_of(call, *args, **kwargs):
    """Return the embedlog error that a call to Spark fails with, as its class and its message."""
    error = spark_errors.error_of(call, *args, **kwargs)
    return f"{type(error).__name__}: {error}"


def values(log, topic="t"):
    """Return the values of a topic, sorted."""
    return sorted(record.value for record in log.topic(topic))


def copy(frame, into, checkpoint, **options):
    """Run a stream from a table to a table until all is copied; return its last progress."""
    writer = frame.writeStream.option("checkpointLocation", str(checkpoint)).options(**options)
    query = writer.trigger(availableNow=True).toTable(into)
    query.awaitTermination()
    return query.lastProgress


# Options


def test_each_side_gets_its_own_options_and_those_about_brokers():
    """A reader would refuse those of a writer, and a writer those of a reader."""
    options = {"path": "/log", "subscribe": "t", "Durability": "os", "kafka.acks": "all"}

    reader, writer = reader_options(options), writer_options(options)

    assert reader == {"path": "/log", "subscribe": "t", "kafka.acks": "all"}
    assert writer == {"path": "/log", "Durability": "os", "kafka.acks": "all", "topic": "t"}


def test_options_of_a_query_take_precedence_in_any_case():
    """Spark may pass the names in lower case."""
    options = {"path": "/log", "subscribe": "t", "startingOffsets": "earliest", "topic": "u"}

    reader = reader_options(options, {"startingoffsets": "latest"})
    writer = writer_options(options, {"TOPIC": "v"})

    assert reader == {"path": "/log", "subscribe": "t", "startingoffsets": "latest"}
    assert writer == {"path": "/log", "TOPIC": "v"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subscibe": "t"}, "A table has no option 'subscibe'. Did you mean 'subscribe'"),
        ({"subscribe": "t", "durabilty": "os"}, "Did you mean 'durability'"),
        ({"subscribe": "t", "compression": "zip"}, "'compression' must be one of none, lz4, zstd"),
        ({"subscribe": "t", "minPartitions": "0"}, "'minPartitions' must be a whole number"),
        ({"subscribe": "t", "checkpointLocation": "/c"}, "Set it on each streaming query"),
        ({"partitions": "1"}, "has no option .partitions."),
    ],
)
def test_a_wrong_option_of_a_table_is_refused(options, message):
    """Whichever side it belongs to."""
    with pytest.raises(InvalidConfigError, match=message):
        check_table({"path": "/log", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subscribe": "t,u"}, "The table reads the topics t, u, and has no topic to write to"),
        ({"subscribePattern": "t.*"}, "The table reads the topics of a pattern, and has no topic"),
        ({"assign": '{"t": [0], "u": [0]}'}, "has no topic to write to"),
    ],
)
def test_a_write_needs_one_topic(options, message):
    """The option `topic` names it, if several are read."""
    with pytest.raises(InvalidConfigError, match=message):
        writer_options({"path": "/log", **options})

    assert writer_options({"path": "/log", "topic": "w", **options})["topic"] == "w"


def test_a_catalog_has_no_options_about_topics():
    """Its tables are the topics."""
    with pytest.raises(InvalidConfigError, match="A catalog has no option 'subscribe'"):
        check_catalog({"path": "/log", "subscribe": "t"})
    with pytest.raises(InvalidConfigError, match="Did you mean 'includeHeaders'"):
        check_catalog({"path": "/log", "includeHeader": "true"})

    assert check_catalog({"path": "/log", "includeHeaders": "true"}) == "/log"


def test_without_the_jar_create_table_says_what_it_needs():
    """Spark passes a Python source the properties of a new table, and later nothing."""
    source = EmbedlogDataSource({"provider": "embedlog", "path": "/log", "subscribe": "t"})

    with pytest.raises(SparkSetupError, match=r"needs the jar.*CREATE TEMPORARY VIEW"):
        source.schema()


# Tables of Spark's own catalog


@pytest.mark.tier("test")
def test_a_table_is_read_in_each_way(spark, table, send, tmp_path):
    """By SQL, as a DataFrame and as a stream; each query sees the log as it is then."""
    send("t", {0: [b"a", b"b"], 1: [b"c"]})
    name = table()

    assert [row.n for row in spark.sql(f"SELECT count(*) AS n FROM {name}").collect()] == [3]
    send("t", {1: [b"d"]})
    read = sorted(bytes(row.value) for row in spark.table(name).collect())
    assert read == [b"a", b"b", b"c", b"d"]
    stream = spark.readStream.option("startingOffsets", "earliest").table(name)
    into = table(subscribe="copy")
    assert copy(stream.select("value"), into, tmp_path / "checkpoint")["numInputRows"] == 4
    assert spark.table(into).count() == 4


def test_rows_are_written_to_a_table_in_each_way(spark, table, sql, log):
    """By name, since the columns of a log and those of the rows differ."""
    name = table()
    rows = spark.createDataFrame([("k", "3")], ["key", "value"])

    sql("INSERT INTO {name} SELECT '1' AS value", name=name)
    sql("INSERT INTO {name} (key, value) VALUES ('k', '2')", name=name)
    rows.writeTo(name).append()
    rows.write.insertInto(name)
    rows.write.format("embedlog").mode("append").saveAsTable(name)

    assert values(log) == [b"1", b"2", b"3", b"3", b"3"]


def test_a_table_can_be_copied_into_another(spark, table, sql, log, send):
    """The topic of the target replaces the one in the column `topic`."""
    send("t", {0: [b"a", b"b"], 1: [b"c"]})
    source, target = table(), table(subscribe="copy")

    sql("INSERT INTO {target} SELECT * FROM {source}", target=target, source=source)

    assert values(log, "copy") == [b"a", b"b", b"c"]
    assert log.topic("copy").partitions == 2


def test_columns_of_a_table_are_a_projection(spark, table, send):
    """With comments, if the user wants them."""
    send("t", {0: [b"a"]})
    name = table("(offset BIGINT COMMENT 'its place', value BINARY)")

    assert [(row.offset, bytes(row.value)) for row in spark.table(name).collect()] == [(0, b"a")]
    described = spark.sql(f"DESCRIBE {name}").collect()
    assert [(row.col_name, row.comment) for row in described] == [
        ("offset", "its place"),
        ("value", None),
    ]


def test_options_of_both_kinds_and_properties_may_be_set(spark, table, sql, log, send):
    """A reader ignores those of a writer, and the other way around; properties are free."""
    send("t", {0: [b"a"], 1: [b"b"]})
    options = {"subscribe": "t", "startingOffsets": '{"t": {"0": 1, "1": -2}}', "durability": "os"}
    name = table(**options, compression="zstd", topic="other")
    spark.sql(f"ALTER TABLE {name} SET TBLPROPERTIES (team = 'x')")

    assert [bytes(row.value) for row in spark.table(name).collect()] == [b"b"]
    sql("INSERT INTO {name} SELECT '1' AS value", name=name)
    assert values(log, "other") == [b"1"]
    # Those of a query take precedence.
    assert spark.read.option("startingoffsets", "earliest").table(name).count() == 2
    spark.createDataFrame([("2",)], ["value"]).writeTo(name).option("TOPIC", "more").append()
    assert values(log, "more") == [b"2"]


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ("", {"subscibe": "t"}, "A table has no option 'subscibe'. Did you mean 'subscribe'?"),
        ("(value BINARY)", {"subscibe": "t"}, "Did you mean 'subscribe'?"),
        ("", {"subscribe": "t", "durability": "ram"}, "'durability' must be one of fsync, os"),
        ("(key STRING)", {"subscribe": "t"}, "The log has no column key of type string"),
        ("", {"subscribe": "t", "path": None}, "The option 'path' is missing"),
    ],
)
def test_a_wrong_option_is_an_error_of_create_table(spark, table, columns, options, message):
    """And no table is created."""
    before = {row.tableName for row in spark.sql("SHOW TABLES").collect()}

    error = error_of(table, columns, **options)

    assert error.startswith("InvalidConfigError: ")
    assert message in error
    assert {row.tableName for row in spark.sql("SHOW TABLES").collect()} == before


def test_a_table_of_several_topics_is_not_written_to(spark, table, log):
    """Unless the write names the topic."""
    name = table(subscribe="t,u")
    row = spark.createDataFrame([("1",)], ["value"])

    error = error_of(row.writeTo(name).append)
    assert error.startswith("InvalidConfigError: The table reads the topics t, u")
    assert "Set the option 'topic' of the table, or of the write." in error

    row.writeTo(name).option("topic", "t").append()
    assert values(log) == [b"1"]


def test_a_table_is_appended_to_only(spark, table, sql, log, send):
    """INSERT OVERWRITE changes nothing."""
    send("t", {0: [b"a"]})
    name = table()

    error = error_of(sql, f"INSERT OVERWRITE {name} SELECT 'b' AS value")

    assert error.startswith("InvalidConfigError: A log is appended to and never overwritten")
    assert values(log) == [b"a"]


def test_a_dropped_table_leaves_the_log_as_it_was(spark, table, log, send):
    """Also a table with options that are wrong by now, which cannot be read."""
    send("t", {0: [b"a"]})
    name = table()
    spark.sql(f"ALTER TABLE {name} SET TBLPROPERTIES ('option.nonsense' = '1')")
    assert "A table has no option 'nonsense'" in error_of(spark.table, name)

    spark.sql(f"DROP TABLE {name}")

    assert not spark.catalog.tableExists(name)
    assert values(log) == [b"a"]


# A catalog of topics


@pytest.mark.tier("test")
def test_topics_are_tables_of_a_catalog(spark, catalog, log, send):
    """With their names as they are; new topics appear, and internal ones do not."""
    log.create_topic("with.dots")
    log.create_topic("CAPITAL")
    log.root.create_topic("__internal", 1, log.root.topic("t").config)
    send("with.dots", {0: [b"a"]})
    send("CAPITAL", {0: [b"b"]})

    for namespace in (catalog, f"{catalog}.default"):
        tables = spark.sql(f"SHOW TABLES IN {namespace}").collect()
        assert [(row.namespace, row.tableName) for row in tables] == [
            ("default", "CAPITAL"),
            ("default", "t"),
            ("default", "with.dots"),
        ]
    assert [row.namespace for row in spark.sql(f"SHOW NAMESPACES IN {catalog}").collect()] == [
        "default"
    ]
    for name, value in (
        ("default.`with.dots`", b"a"),
        ("default.CAPITAL", b"b"),
        ("CAPITAL", b"b"),
    ):
        assert [bytes(row.value) for row in spark.table(f"{catalog}.{name}").collect()] == [value]
    for name in ("default.capital", "default.nothing", "elsewhere.t"):
        assert not spark.catalog.tableExists(f"{catalog}.{name}")
        assert "TABLE_OR_VIEW_NOT_FOUND" in error_of(spark.table, f"{catalog}.{name}")


@pytest.mark.tier("test")
def test_a_table_of_a_catalog_is_read_and_written(spark, catalog, sql, log, send, tmp_path):
    """Each query sees the topic as it is then."""
    send("t", {0: [b"a"], 1: [b"b"]})
    name = f"{catalog}.default.t"

    assert sql("SELECT count(*) AS n FROM {name}", name=name)[0].n == 2
    sql("INSERT INTO {name} SELECT 'c' AS value", name=name)
    assert sql("SELECT count(*) AS n FROM {name}", name=name)[0].n == 3
    spark.createDataFrame([("d",)], ["value"]).writeTo(name).append()
    stream = spark.readStream.option("startingOffsets", "earliest").table(name).select("value")
    progress = copy(stream, f"{catalog}.default.copy", tmp_path / "checkpoint")
    assert progress["numInputRows"] == 4
    assert values(log, "copy") == values(log) == [b"a", b"b", b"c", b"d"]


def test_settings_of_a_catalog_are_options_of_its_tables(spark, catalog, log, send):
    """Such as `includeHeaders`."""
    send("t", {0: [b"a"]}, headers=[("h", b"1")])
    spark.conf.set(f"spark.sql.catalog.{catalog}.includeHeaders", "true")
    spark.conf.set(f"spark.sql.catalog.{catalog}.compression", "zstd")

    rows = spark.table(f"{catalog}.t").collect()

    assert [(row.headers[0].key, bytes(row.headers[0].value)) for row in rows] == [("h", b"1")]


def test_a_topic_is_created_altered_and_deleted(spark, catalog, sql, log):
    """Its partitions and settings are properties of the table."""
    name = f"{catalog}.default.new"

    def properties():
        rows = sql("SHOW TBLPROPERTIES {name}", name=name)
        return {row.key: row.value for row in rows}

    sql(
        "CREATE TABLE {name} (key BINARY, value BINARY) "
        "TBLPROPERTIES (partitions = 3, 'retention.ms' = 86400000, 'cleanup.policy' = 'compact')",
        name=name,
    )
    assert properties() == {
        "partitions": "3",
        "retention.ms": "86400000",
        "cleanup.policy": "compact",
    }
    assert log.topic("new").partitions == 3
    assert log.topic("new").config["retention.ms"] == 86_400_000

    assert "TABLE_OR_VIEW_ALREADY_EXISTS" in error_of(sql, f"CREATE TABLE {name}")
    sql("CREATE TABLE IF NOT EXISTS {name}", name=name)

    sql("ALTER TABLE {name} SET TBLPROPERTIES (partitions = 5, 'retention.ms' = 9)", name=name)
    sql("ALTER TABLE {name} UNSET TBLPROPERTIES ('cleanup.policy')", name=name)
    assert properties() == {"partitions": "5", "retention.ms": "9"}
    assert log.topic("new").partitions == 5

    sql("DROP TABLE {name}", name=name)
    assert log.topics() == ["t"]
    assert not spark.catalog.tableExists(name)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("CREATE TABLE {name} (value BIGINT)", "A topic has no column value of type bigint"),
        ("CREATE TABLE {name} TBLPROPERTIES ('retetion.ms' = 1)", "Did you mean retention.ms?"),
        ("CREATE TABLE {name} TBLPROPERTIES (partitions = 'x')", "must be a whole number, got 'x'"),
        ("CREATE TABLE {name} TBLPROPERTIES (partitions = 0)", "from 1 to 20000, got 0"),
        ("CREATE TABLE {name} (key BINARY) PARTITIONED BY (key)", "Set the number of its part"),
        ("CREATE TABLE {name} USING csv", "A topic cannot be stored as csv"),
        ("CREATE TABLE {name} LOCATION '/data'", "Leave out LOCATION"),
        ("CREATE TABLE {name} OPTIONS (durability 'os')", "has no setting durability"),
        ("CREATE TABLE {name} COMMENT 'a topic'", "Leave out COMMENT"),
        ("CREATE TABLE {catalog}.`not a topic`", "is not a valid topic name"),
        ("CREATE TABLE {name} AS SELECT 1 AS value", "A topic has no column value of type int"),
        ("CREATE TABLE {catalog}.other.new", "SCHEMA_NOT_FOUND"),
        ("CREATE OR REPLACE TABLE {t} AS SELECT 'x' AS value", "The topic t cannot be replaced"),
        ("REPLACE TABLE {t} (value BINARY)", "The topic t cannot be replaced"),
        ("ALTER TABLE {t} SET TBLPROPERTIES (partitions = 1)", "cannot shrink to 1"),
        ("ALTER TABLE {t} SET TBLPROPERTIES (colour = 'red')", "has no setting colour"),
        ("ALTER TABLE {t} ADD COLUMN x INT", "The values of the topic are bytes"),
        ("ALTER TABLE {t} RENAME TO {name}", "The topic t cannot be renamed"),
        ("CREATE NAMESPACE {catalog}.other", "has one namespace, default"),
        ("DROP NAMESPACE {catalog}.default", "has one namespace, default"),
    ],
)
@pytest.mark.parametrize("reader", ["jvm"], indirect=True)
def test_what_a_topic_cannot_do_is_an_error(sql, catalog, log, send, statement, message):
    """And nothing is created, changed or deleted."""
    send("t", {0: [b"a"]})
    names = {"catalog": catalog, "name": f"{catalog}.default.new", "t": f"{catalog}.t"}

    assert message in error_of(sql, statement, **names)

    assert log.topics() == ["t"]
    assert values(log) == [b"a"]
    assert log.topic("t").partitions == 2


def test_a_topic_is_created_from_a_query(spark, catalog, sql, log, send):
    """A copy has as many partitions as its rows need; text becomes bytes."""
    send("t", {0: [b"a"], 1: [b"b"]})
    log.create_topic("empty")

    sql("CREATE TABLE {log}.copy AS SELECT * FROM {log}.t", log=catalog)
    sql("CREATE TABLE {log}.nothing AS SELECT * FROM {log}.empty", log=catalog)
    sql(
        "CREATE TABLE {log}.text TBLPROPERTIES (partitions = 3) "
        "AS SELECT cast(offset AS string) AS key, 'x' AS value FROM {log}.t",
        log=catalog,
    )

    assert values(log, "copy") == [b"a", b"b"]
    assert values(log, "text") == [b"x", b"x"]
    assert [log.topic(name).partitions for name in ("copy", "nothing", "text")] == [2, 1, 3]


def test_a_query_that_fails_creates_no_topic(catalog, sql, log, send):
    """Whether the table or the writer would have created it."""
    send("t", {0: [b"a"], 1: [b"b"]})

    for columns in ("value", "partition, value"):
        failing = f"SELECT {columns} FROM {catalog}.t WHERE raise_error('no') IS NULL"
        assert "no" in error_of(sql, f"CREATE TABLE {catalog}.new AS {failing}")
        assert log.topics() == ["t"]


def test_an_overwrite_does_not_delete_a_topic(spark, catalog, log, send):
    """Spark would drop the table before it finds out that it cannot be overwritten."""
    send("t", {0: [b"a"]})
    rows = spark.createDataFrame([("b",)], ["value"])

    overwrite = rows.write.mode("overwrite").saveAsTable
    assert "The topic t cannot be replaced" in error_of(overwrite, f"{catalog}.default.t")
    assert "cannot be replaced" in error_of(rows.writeTo(f"{catalog}.t").createOrReplace)

    assert values(log) == [b"a"]


@pytest.mark.parametrize("reader", ["jvm"], indirect=True)
def test_a_wrong_setting_of_a_catalog_is_an_error(spark, catalog, tmp_path):
    """It names the setting, or the option."""
    prefix = f"spark.sql.catalog.{catalog}"
    spark.conf.set(f"{prefix}x", "embedlog.spark.LogCatalog")
    assert f"Set {prefix}x.path to the directory" in error_of(
        spark.sql, f"SHOW TABLES IN {catalog}x"
    )
    spark.conf.set(f"{prefix}x.path", str(tmp_path / "nothing"))
    assert "NotALogError: There is no log here" in error_of(spark.sql, f"SHOW TABLES IN {catalog}x")
    spark.conf.set(f"{prefix}.subscribe", "t")
    assert "A catalog has no option 'subscribe'" in error_of(spark.sql, f"SHOW TABLES IN {catalog}")


# Views, and the choice of the reader


@pytest.mark.parametrize("reader", ["jvm"], indirect=True)
def test_a_temporary_view_shows_new_records(spark, options, sql, send):
    """Each query of it plans again."""
    spark.read.format("embedlog").options(**options()).load().createOrReplaceTempView("seen")
    counts = []
    for value in (b"a", b"b", b"c"):
        send("t", {0: [value]})
        counts.append(sql("SELECT count(*) AS n FROM seen")[0].n)

    assert counts == [1, 2, 3]


def test_a_temporary_view_can_be_created_in_sql(spark, log, sql, send):
    """Also by sessions without the jar."""
    send("t", {0: [b"a"]})

    options = f"path '{log.path}', subscribe 't'"
    sql(f"CREATE OR REPLACE TEMPORARY VIEW made USING embedlog OPTIONS ({options})")

    assert [bytes(row.value) for row in sql("SELECT value FROM made")] == [b"a"]


@pytest.mark.parametrize("reader", ["jvm"], indirect=True)
def test_a_wrong_choice_of_the_reader_breaks_no_other_format(spark, options, tmp_path):
    """Spark makes a source of each format to find one by its name."""
    (tmp_path / "text").write_text("a line\n")
    spark.conf.set(READER, "jvmm")

    lines = spark.read.format("text").load(str(tmp_path / "text"))
    assert [row.value for row in lines.collect()] == ["a line"]
    error = error_of(spark.read.format("embedlog").options(**options()).load)
    assert error.startswith(f"InvalidConfigError: {READER} must be jvm or python, got 'jvmm'")


def test_the_page_about_tables_runs_from_top_to_bottom(spark, log, sql, tmp_path):
    """All statements and programs of its section, in their order."""
    log.create_topic("flights")
    # A view of another test would hide the table.
    spark.catalog.dropTempView("flights")
    (section,) = re.findall(r"^## Tables\n.*?(?=^## )", PAGE.read_text(), re.M | re.S)
    section = section.replace("/data/log", log.path).replace("/data/", f"{tmp_path}/")
    name = f"log_{next(_numbers)}"
    section = re.sub(r"\blog(?=\.default|;)|(?<=catalog\.)log\b", name, section)
    names = {"spark": spark}
    try:
        for language, block in re.findall(r"```(python|sql)\n(.*?)```", section, re.S):
            if language == "python":
                exec(block, names)
            else:
                for statement in block.strip().removesuffix(";").split(";\n"):
                    sql(statement.replace("{", "{{").replace("}", "}}"))
            if "query" in names:
                names.pop("query").awaitTermination()
    finally:
        spark.catalog.dropTempView("recent")
        spark.sql("DROP TABLE IF EXISTS flights")

    assert log.topics() == ["average", "delays", "departures", "flights", "t"]
    assert len(log["departures"]) == 2
    assert [record.value["carrier"] for record in log.topic("average")]
    assert values(log, "flights") == [b"arrived", b"departed"]
    assert values(log, "delays") == [b"departed"]
    assert log.topic("delays").config["cleanup.policy"] == "compact"
