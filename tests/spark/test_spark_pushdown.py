"""What Spark leaves to the JVM reader: columns, filters, limits and counts."""

import re

import pytest
from support.clock import START

pytestmark = pytest.mark.parametrize("reader", ["jvm"], indirect=True)


@pytest.fixture
def load(spark, options):
    """Load topic "t", with options of a reader."""

    def load(**overrides):
        return spark.read.format("embedlog").options(**options(**overrides)).load()

    return load


def scan_of(frame):
    """Return the descriptions of the plan's scans of a log."""
    plan = frame._jdf.queryExecution().executedPlan().toString()
    return re.findall(r"embedlog t \([^\n]*", plan)


def counted(frame):
    """Return the count of the rows, and whether it took no scan of the log."""
    count = frame.groupBy().count()
    return count.first()[0], scan_of(count) == []


def test_a_scan_says_what_it_reads(load, send):
    """`explain` shows the columns, the filters that narrow the plan, and the limit."""
    send("t", {0: [b"a"], 1: [b"b"]})
    frame = load().where("partition = 1 and offset >= 0").select("value").limit(7)

    (scan,) = scan_of(frame)

    assert scan.startswith("embedlog t (read by the JVM): value; filters [")
    assert "partition" in scan and "limit 7" in scan


@pytest.mark.tier("test")
def test_a_count_is_taken_from_the_plan(load, send):
    """Offsets without gaps tell how many records there are, also with exact filters."""
    send("t", {0: [b"a"] * 30, 1: [b"b"] * 12})

    assert counted(load()) == (42, True)
    assert counted(load().where("partition = 0 and offset >= 25")) == (5, True)
    assert counted(load().where("topic = 'other'")) == (0, True)
    assert load().selectExpr("count(*)", "count(1) + 1").collect() == [(42, 43)]


@pytest.mark.parametrize(
    "condition", [f"timestamp >= timestamp_millis({START + 10})", "value = 'a'", "offset % 2 = 0"]
)
def test_rows_are_counted_if_a_filter_depends_on_them(load, send, condition):
    """The plan does not tell how many rows pass such a filter."""
    send("t", {0: [b"a" if number % 3 else b"b" for number in range(30)]})
    frame = load().where(condition)

    number, planned = counted(frame)

    assert (number, planned) == (len(frame.collect()), False)
    assert 0 < number < 30


def test_groups_and_other_aggregates_are_counted_from_the_rows(load, send):
    """Only `count(*)` of everything is in the plan."""
    send("t", {0: [b"a"] * 3, 1: [b"b"] * 2})

    groups = load().groupBy("partition").count().orderBy("partition").collect()
    (row,) = load().selectExpr("count(*)", "count(key)", "max(offset)").collect()

    assert [tuple(group) for group in groups] == [(0, 3), (1, 2)]
    assert tuple(row) == (5, 0, 2)
    assert load().limit(4).count() == 4
    assert load().select("partition").distinct().count() == 2


def test_a_count_sees_new_records(load, send, spark):
    """Each query of a view makes a plan of its own."""
    send("t", {0: [b"a"] * 3})
    load().createOrReplaceTempView("counted")
    before = spark.sql("select count(*) from counted").first()[0]
    send("t", {0: [b"a"] * 4})

    assert (before, spark.sql("select count(*) from counted").first()[0]) == (3, 7)


@pytest.mark.tier("test")
def test_a_compacted_topic_is_counted_from_its_rows(load, log, send):
    """Compaction leaves gaps between offsets, which only the batches tell."""
    log.alter_topic("t", {"cleanup.policy": "compact", "segment.bytes": 2000})
    for number in range(40):
        send("t", {0: [b"v" * 50]}, key=b"%d" % (number % 3))
    log.partition("t", 0).roll()
    log.housekeeping.compact("t", force=True)
    with log.consumer("t", auto_offset_reset="earliest") as consumer:
        records = sum(1 for _ in consumer.iter_records(until="end"))

    assert records < 40
    assert counted(load()) == (records, False)
