"""The reader in the JVM and the one in Python return the same rows; so does embedlog's consumer."""

import json
import random
import tempfile
from collections import Counter

import pytest
from support.clock import START
from support.forks import in_memory
from support.jvm_tasks import JvmTasks, consumer_rows, python_rows
from support.random_conditions import random_condition
from support.random_topics import fill_topics
from support.spark_reads import ALL
from support.tiers import choose

import embedlog
from embedlog.spark.input_partitions import plan_batch
from embedlog.spark.jvm_reader import READER
from embedlog.spark.source_options import parse

LONGS = ("-9223372036854775807L - 1L", "9223372036854775807L")
SEEDS = range(choose(test=6, all=60, nightly=1000))


@pytest.fixture(scope="module")
def jvm(tmp_path_factory):
    """A JVM that reads input partitions."""
    tasks = JvmTasks(tmp_path_factory.mktemp("jvm"))
    yield tasks
    tasks.close()


@pytest.fixture
def random_log():
    """Return a log with the random topics of a seed; in memory, since it flushes often."""
    with tempfile.TemporaryDirectory(prefix="embedlog-", dir=in_memory()) as directory:
        logs = []

        def random_log(dice, **options):
            logs.append(embedlog.open(f"{directory}/{len(logs)}", maintenance=False))
            fill_topics(logs[-1], dice, **options)
            assert logs[-1].verify() == []
            return logs[-1]

        yield random_log
        for log in logs:
            log.close()


def random_options(log, dice):
    """Return options of a reader that select some of the rows."""
    options = {"path": log.path, "subscribe": "a,b", "includeHeaders": "true"}
    for name, most in (("minPartitions", 9), ("maxRecordsPerPartition", 200)):
        if dice.random() < 0.3:
            options[name] = str(dice.randint(1, most))
    if dice.random() < 0.2:
        options["maxBytesPerPartition"] = str(dice.choice([300, 3000, 50_000]))
    kind = dice.randrange(6)
    partitions = [(topic, part) for topic in "ab" for part in range(log.root.partitions(topic))]
    bounds = {}
    for topic, number in partitions:
        part = log.partition(topic, number)
        first, end = part.start_offset(), part.end_offset()
        start = dice.randint(first, end)
        bounds.setdefault(topic, {})[str(number)] = start, dice.randint(start, end)
    if kind in (1, 2):
        starts = {t: {p: bound[0] for p, bound in of.items()} for t, of in bounds.items()}
        options["startingOffsets"] = json.dumps(starts)
    if kind in (2, 3):
        ends = {t: {p: bound[1] for p, bound in of.items()} for t, of in bounds.items()}
        options["endingOffsets"] = json.dumps(ends) if kind == 2 else "latest"
    if kind == 4:
        options["startingTimestamp"] = str(START + dice.randrange(-60, 60))
        options["startingOffsetsByTimestampStrategy"] = "latest"
    if kind == 5:
        options["endingTimestamp"] = str(START + dice.randrange(-60, 560))
    return options


def sorted_rows(rows):
    return sorted(rows, key=repr)


# Rows


@pytest.mark.parametrize("seed", SEEDS)
def test_tasks_return_the_rows_that_python_and_a_consumer_return(jvm, random_log, seed):
    """Any columns of any ranges of any topics."""
    dice = random.Random(seed)
    log = random_log(dice)
    tasks = plan_batch(parse({"path": log.path, "subscribe": "a,b"}))
    rows = jvm.read(tasks)
    assert rows == python_rows(tasks)
    assert sorted_rows(rows) == sorted_rows(consumer_rows(log, "a", "b"))

    for _ in range(12):
        tasks = plan_batch(parse(random_options(log, dice)), cores=dice.randint(1, 3))
        names = tuple(dice.sample(ALL, dice.randint(1, len(ALL))))
        expected = python_rows(tasks, names)
        assert jvm.read(tasks, names) == expected, names
        assert len(jvm.read(tasks, ())) == len(expected)


# Queries


@pytest.fixture
def load(spark):
    """Load a DataFrame from a log; Spark shows times in UTC."""
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    yield lambda options: spark.read.format("embedlog").options(**options).load()
    spark.conf.unset("spark.sql.session.timeZone")


SELECTED = {
    "timestamp": "unix_micros(timestamp) as timestamp",
    "headers": "transform(headers, h -> struct(cast(h.key as binary), h.value)) as headers",
}


def collected(frame, names):
    """Return the rows of a DataFrame, as `python_rows` does."""
    rows = frame.selectExpr(*(SELECTED.get(name, f"`{name}`") for name in names)).collect()
    return [tuple(map(plain, row)) for row in rows]


def plain(value):
    if isinstance(value, list):
        return [tuple(map(plain, pair)) for pair in value]
    return bytes(value) if isinstance(value, bytearray) else value


def with_names(rows):
    return [dict(zip(ALL, row, strict=True)) for row in rows]


QUERY_SEEDS = range(choose(test=2, all=12, nightly=200))


@pytest.mark.tier("test")
@pytest.mark.parametrize("seed", QUERY_SEEDS)
def test_queries_return_the_rows_that_python_selects(load, random_log, seed):
    """Columns, filters, sums and limits, of any ranges."""
    dice = random.Random(seed)
    log = random_log(dice, steps=12)
    for _ in range(choose(test=5, all=12)):
        options = random_options(log, dice)
        rows = with_names(python_rows(plan_batch(parse(options))))
        names = dice.sample(ALL, dice.randint(1, len(ALL)))
        frame = load(options)
        if rows and dice.random() < 0.8:
            condition = random_condition(dice, rows)
            rows = [row for row in rows if condition.holds(row) is True]
            frame = frame.filter(condition.sql)
        expected = [tuple(row[name] for name in names) for row in rows]
        kind = dice.randrange(8)
        if kind == 0:
            assert frame.count() == len(rows)
        elif kind == 1:
            lengths = [len(row["value"]) for row in rows if row["value"] is not None]
            sums = frame.selectExpr("sum(length(value))", "count(value)", "min(offset)").first()
            least = min((row["offset"] for row in rows), default=None)
            assert tuple(sums) == (sum(lengths) if lengths else None, len(lengths), least)
        elif kind == 2:
            limit = dice.choice([0, 1, 5, 100, len(rows), len(rows) + 1])
            assert frame.limit(limit).count() == min(limit, len(rows))
            limited = collected(frame.limit(limit), names)
            assert len(limited) == min(limit, len(rows))
            assert not Counter(map(repr, limited)) - Counter(map(repr, expected))
        elif kind == 3:
            keys = dice.sample(["topic", "partition", "timestampType"], dice.randint(1, 3))
            counts = Counter(tuple(row[key] for key in keys) for row in rows)
            assert {tuple(row)[:-1]: row[-1] for row in frame.groupBy(keys).count().collect()} == (
                counts
            )
        else:
            assert sorted_rows(collected(frame, names)) == sorted_rows(expected)


@pytest.mark.parametrize("reader", ["jvm"])
@pytest.mark.parametrize("seed", QUERY_SEEDS)
def test_the_readers_differ_in_no_row(spark, load, random_log, seed):
    """By `exceptAll` in both directions, which counts rows that occur twice."""
    log = random_log(random.Random(seed), steps=12)
    options = {"path": log.path, "subscribe": "a,b", "includeHeaders": "true"}
    of_jvm = load(options)
    assert "(read by the JVM)" in plan_of(of_jvm)
    spark.conf.set(READER, "python")
    of_python = load(options)
    assert "(read by the JVM)" not in plan_of(of_python)

    assert of_jvm.exceptAll(of_python).count() == 0
    assert of_python.exceptAll(of_jvm).count() == 0


def plan_of(frame):
    """Return the plan of a DataFrame as text."""
    return frame._jdf.queryExecution().toString()


@pytest.mark.parametrize("reader", ["jvm"])
def test_a_filter_by_the_least_or_greatest_time_is_right(load, log, options, send):
    """They have no opposite, and no next one; from Spark, Python's source gets an overflow."""
    send("t", {0: range(3)})
    frame = load(options())
    least, greatest = (f"timestamp_micros({number})" for number in LONGS)

    counts = [
        frame.filter(f"timestamp {symbol} {bound}").count()
        for bound in (least, greatest)
        for symbol in ("<", "<=", "=", ">=", ">")
    ]

    assert counts == [0, 0, 0, 3, 3, 3, 3, 0, 0, 0]
    assert frame.filter(f"timestamp in ({least}, {greatest})").count() == 0
