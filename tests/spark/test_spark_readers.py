"""The reader in the JVM and the one in Python return the same rows; so does embedlog's consumer."""

from __future__ import annotations

import json
import operator
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from support.clock import START
from support.forks import in_memory
from support.jvm_tasks import consumer_rows, python_rows
from support.random_topics import fill_topics
from support.roots import encoded, segment_files
from support.spark_reads import ALL
from support.tiers import choose

import embedlog
from embedlog.record import TopicPartition
from embedlog.spark.input_partitions import plan_batch
from embedlog.spark.options import SourceOptions
from embedlog.spark.spark_session import READER

Row = dict[str, Any]
Truth = bool | None

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_COLUMNS = ("topic", "partition", "offset", "offset", "timestamp", "timestamp")
_LONGS = (-(1 << 63), (1 << 63) - 1, 0, -1, 1 << 31)
_TIMES = (0, -1, -1000, -62_135_596_800_000_000, 253_402_300_799_999_999)
"""In microseconds: about 1970, and the first and last that Spark can show."""


class Condition(NamedTuple):
    """A condition of a query."""

    sql: str
    holds: Callable[[Row], Truth]


def random_condition(dice: random.Random, rows: Sequence[Row], depth: int = 2) -> Condition:
    """Return a condition whose values are those of some of the rows, or near them."""
    kind = dice.randrange(10)
    if depth and kind < 3:
        return _both(*(random_condition(dice, rows, depth - 1) for _ in range(2)))
    if depth and kind < 5:
        return _either(*(random_condition(dice, rows, depth - 1) for _ in range(2)))
    if depth and kind == 5:
        return _negated(random_condition(dice, rows, depth - 1))
    column, row = dice.choice(_COLUMNS), dice.choice(rows)
    return dice.choice([_comparison, _comparison, _comparison, _listed, _special])(
        dice, column, rows if column != "topic" else [row]
    )


def _comparison(dice: random.Random, column: str, rows: Sequence[Row]) -> Condition:
    value = _near(dice, column, dice.choice(rows)[column])
    symbol, text = dice.choice(list(_OPERATORS)), _literal(dice, column, value)
    compare = _OPERATORS[symbol]
    if dice.random() < 0.1:
        return Condition(f"{column} {symbol} null", lambda row: None)
    if dice.random() < 0.3:
        return Condition(f"{text} {symbol} {column}", lambda row: compare(value, row[column]))
    return Condition(f"{column} {symbol} {text}", lambda row: compare(row[column], value))


def _listed(dice: random.Random, column: str, rows: Sequence[Row]) -> Condition:
    size = dice.choice([1, 2, 5, 20, 100, 101])
    values = [_near(dice, column, dice.choice(rows)[column]) for _ in range(size)]
    texts = [_literal(dice, column, value) for value in values]
    has_null = dice.random() < 0.2
    if has_null:
        texts.insert(dice.randrange(len(texts)), "null")

    def holds(row: Row) -> Truth:
        return True if row[column] in values else None if has_null else False

    return Condition(f"{column} in ({', '.join(texts)})", holds)


def _special(dice: random.Random, column: str, rows: Sequence[Row]) -> Condition:
    """Return a condition that needs a cast, or that says nothing or little about metadata."""
    number = dice.choice(rows)["offset"]
    odd = int(dice.random() < 0.5)
    bounds = sorted(dice.choice(rows)["timestamp"] for _ in range(2))
    day = dice.choice(rows)["timestamp"] // 86_400_000_000
    low, high = (_literal(dice, "timestamp", bound) for bound in bounds)
    return dice.choice(
        [
            Condition(f"cast(offset as string) = '{number}'", lambda row: row["offset"] == number),
            Condition(f"offset = '{number}'", lambda row: row["offset"] == number),
            Condition(f"offset > {number}.5", lambda row: row["offset"] > number),
            Condition(f"offset % 2 = {odd}", lambda row: row["offset"] % 2 == odd),
            Condition(f"cast(partition as bigint) = {odd}L", lambda row: row["partition"] == odd),
            Condition(f"partition <= {odd}.0D", lambda row: row["partition"] <= odd),
            Condition("topic like 'a%'", lambda row: row["topic"] == "a"),
            Condition("value is null", lambda row: row["value"] is None),
            Condition("key is not null and offset is not null", lambda row: row["key"] is not None),
            Condition("headers is null", lambda row: row["headers"] is None),
            Condition("timestamp is null", lambda row: False),
            Condition(f"offset <=> {number}", lambda row: row["offset"] == number),
            Condition("offset <=> null", lambda row: False),
            Condition(f"timestampType = {odd}", lambda row: row["timestampType"] == odd),
            Condition(
                "length(value) > 3",
                lambda row: None if row["value"] is None else len(row["value"]) > 3,
            ),
            Condition(
                f"timestamp between {low} and {high}",
                lambda row: bounds[0] <= row["timestamp"] <= bounds[1],
            ),
            Condition(
                f"cast(timestamp as date) = date_from_unix_date({day})",
                lambda row: row["timestamp"] // 86_400_000_000 == day,
            ),
        ]
    )


def _near(dice: random.Random, column: str, value: Any) -> Any:
    if column == "topic":
        return dice.choice([value, "a", "b", "", "c"])
    if column == "timestamp":
        step = dice.choice([0, 0, 0, -1, 1, -1000, 1000, 999, -5000, 5000, 60_000_000])
        return dice.choice(_TIMES) if dice.random() < 0.08 else value + step
    if column == "offset" and dice.random() < 0.08:
        return dice.choice(_LONGS)
    return value + dice.choice([0, 0, 0, -1, 1, 2, -10, 10])


def _literal(dice: random.Random, column: str, value: Any) -> str:
    if column == "topic":
        return f"'{value}'"
    if column == "timestamp":
        return f"timestamp_micros({_long(value)})"
    return _long(value) if column == "offset" or dice.random() < 0.5 else str(value)


def _long(value: int) -> str:
    # The least long has no literal: a sign is an operator.
    return f"{value}L" if value > -(1 << 63) else f"({value + 1}L - 1L)"


def _both(left: Condition, right: Condition) -> Condition:
    def holds(row: Row) -> Truth:
        truths = left.holds(row), right.holds(row)
        return False if False in truths else None if None in truths else True

    return Condition(f"({left.sql}) and ({right.sql})", holds)


def _either(left: Condition, right: Condition) -> Condition:
    def holds(row: Row) -> Truth:
        truths = left.holds(row), right.holds(row)
        return True if True in truths else None if None in truths else False

    return Condition(f"({left.sql}) or ({right.sql})", holds)


def _negated(part: Condition) -> Condition:
    def holds(row: Row) -> Truth:
        truth = part.holds(row)
        return None if truth is None else not truth

    return Condition(f"not ({part.sql})", holds)


functions = pytest.importorskip("pyspark.sql.functions")

LONGS = ("-9223372036854775807L - 1L", "9223372036854775807L")
SEEDS = range(choose(test=2, all=60, nightly=1000))


@pytest.fixture
def random_log():
    """Return a log with the random topics of a seed; in memory, since it flushes often."""
    with tempfile.TemporaryDirectory(prefix="embedlog-", dir=in_memory()) as directory:
        logs = []

        def random_log(dice, **options):
            logs.append(embedlog.open(f"{directory}/{len(logs)}", maintenance=False))
            fill_topics(logs[-1], dice, **options)
            assert logs[-1].housekeeping.verify() == []
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
    tasks = plan_batch(SourceOptions.parse({"path": log.path, "subscribe": "a,b"}))
    rows = jvm.read(tasks)
    assert rows == python_rows(tasks)
    assert sorted_rows(rows) == sorted_rows(consumer_rows(log, "a", "b"))

    for _ in range(12):
        tasks = plan_batch(SourceOptions.parse(random_options(log, dice)), cores=dice.randint(1, 3))
        names = tuple(dice.sample(ALL, dice.randint(1, len(ALL))))
        expected = python_rows(tasks, names)
        assert jvm.read(tasks, names) == expected, names
        assert len(jvm.read(tasks, ())) == len(expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_task_ends_at_its_limit_and_leaves_out_batches_of_other_times(jvm, random_log, seed):
    """It returns whole batches: Spark takes as many rows as it wants, and filters again."""
    dice = random.Random(seed)
    log = random_log(dice)
    for task in plan_batch(
        SourceOptions.parse({"path": log.path, "subscribe": "a,b", "minPartitions": "4"})
    ):
        names = ("timestamp", "offset", "partition")
        rows = jvm.read([task], names)
        for limit in (0, 1, len(rows) - 1, len(rows), dice.randint(0, len(rows))):
            limited = jvm.read([task], names, limit=max(limit, 0))
            assert limited == rows[: len(limited)]
            assert len(limited) >= min(limit, len(rows))
            assert bool(limited) == bool(limit > 0 and rows)
        times = [row[0] // 1000 for row in rows]
        for _ in range(8 if times else 0):
            first, last = sorted(dice.choice(times) + dice.choice([0, 0, -1, 1]) for _ in "ab")
            left = jvm.read([task], names, times=(first, last))
            wanted = [row for row, time in zip(rows, times, strict=True) if first <= time <= last]
            assert [row for row in left if first <= row[0] // 1000 <= last] == wanted
            assert not Counter(left) - Counter(rows)


@pytest.mark.parametrize("seed", SEEDS)
def test_only_what_is_lost_is_skipped(jvm, random_log, seed, caplog):
    """With failOnDataLoss=false a deleted file does not hide the files behind it."""
    dice = random.Random(seed)
    log = random_log(dice, steps=choose(test=40, all=60))
    for _ in range(choose(test=3, all=4)):
        tasks = plan_batch(SourceOptions.parse(random_options(log, dice)), cores=dice.randint(1, 3))
        parts = [(task, part) for task in tasks for part in task.slices]
        paths = sorted({chunk.path for _, part in parts for chunk in part.chunks})
        gone = set(dice.sample(paths, dice.randint(0, len(paths))))
        left, places = [], {True: set(), False: set()}
        for task, part in parts:
            for chunk in part.chunks:
                only = [replace(task, slices=(replace(part, chunks=(chunk,)),))]
                left += python_rows(only) if chunk.path not in gone else []
                places[chunk.path in gone].update(
                    python_rows(only, ("topic", "partition", "offset"))
                )
        caplog.clear()
        for path in gone:
            os.rename(f"{log.path}/{path}", f"{log.path}/{path}.gone")
        try:
            assert python_rows(tasks, fail_on_data_loss=False) == left
            assert jvm.read(tasks, fail_on_data_loss=False) == left
        finally:
            for path in gone:
                os.rename(f"{log.path}/{path}.gone", f"{log.path}/{path}")
        ranges = [record.args[:4] for record in caplog.records]
        named = {
            (topic, partition, offset)
            for start, end, topic, partition in ranges
            for offset in range(start, end)
        }
        assert places[True] <= named
        assert not places[False] & named
        assert len(ranges) <= len(gone) * len(parts)


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


QUERY_SEEDS = range(choose(test=1, all=12, nightly=200))


@pytest.mark.tier("test")
@pytest.mark.parametrize("seed", QUERY_SEEDS)
def test_queries_return_the_rows_that_python_selects(load, random_log, seed):
    """Columns, filters, sums and limits, of any ranges."""
    dice = random.Random(seed)
    log = random_log(dice, steps=12)
    for _ in range(choose(test=3, all=12)):
        options = random_options(log, dice)
        rows = with_names(python_rows(plan_batch(SourceOptions.parse(options))))
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


@pytest.fixture(params=["generated", "interpreted"])
def code(spark, request):
    """How Spark executes queries: by code that it generates for each, or without any."""
    settings = {"spark.sql.codegen.wholeStage": "false"}
    settings["spark.sql.codegen.factoryMode"] = "NO_CODEGEN"
    for name, value in settings.items() if request.param == "interpreted" else ():
        spark.conf.set(name, value)
    yield request.param
    for name in settings:
        spark.conf.unset(name)


@pytest.mark.parametrize("reader", ["jvm"])
@pytest.mark.parametrize("seed", QUERY_SEEDS)
def test_the_readers_differ_in_no_row(spark, load, random_log, code, seed):
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


@pytest.mark.tier("test")
@pytest.mark.parametrize("reader", ["jvm"])
def test_a_filter_by_time_selects_rows_within_a_batch(load, options, send):
    """The reader leaves out whole batches, so Spark filters again; the bound may be on the left."""
    send("t", {0: range(5)})
    frame, bound = load(options()), f"timestamp_millis({START + 1})"

    counts = {
        symbol: [
            len(frame.filter(f"timestamp {symbol} {bound}").collect()),
            len(frame.filter(f"{bound} {symbol} timestamp").collect()),
        ]
        for symbol in ("<", "<=", "=", ">=", ">")
    }

    assert counts == {"<": [1, 3], "<=": [2, 4], "=": [1, 1], ">=": [4, 2], ">": [3, 1]}


# Rows that outlive their batch


@pytest.fixture
def both(spark_session, load, log):
    """Load DataFrames of many small batches of all kinds: from the JVM, then from Python."""
    dice = random.Random(11)
    log.alter_topic("t", {"segment.bytes": 20_000})
    for number in range(120):
        size = dice.choice([1, 3, 50])
        values = [b"%d" % number * dice.randrange(9) for _ in range(size)]
        headers = [[(f"h{number}", value), ("x", None)][: dice.randrange(3)] for value in values]
        compression = dice.choice(["none", "lz4", "zstd"])
        keys = [b"k%d" % dice.randrange(9) for _ in values]
        batch = encoded(*values, keys=keys, headers=headers, compression=compression)
        log.partition("t", number % 2).append([batch])
    options = {"path": log.path, "subscribe": "t", "includeHeaders": "true"}

    def both():
        for name in ("jvm", "python"):
            spark_session.conf.set(READER, name)
            yield load(options)

    return both


def joined(frame):
    left = frame.selectExpr("partition", "offset", "value as left", "headers as first")
    return left.join(functions.broadcast(frame), ["partition", "offset"])


def cached(frame):
    cached = frame.cache()
    try:
        cached.count()
        return [cached.collect(), cached.filter("offset % 7 = 0").collect()]
    finally:
        cached.unpersist()


def window(frame):
    order = "over (partition by partition order by offset)"
    parts = (f"lag(value, 60) {order}", f"lead(headers, 3) {order}", f"first(headers) {order}")
    return frame.selectExpr("partition", "offset", *parts)


def aggregated(*columns):
    return lambda frame: frame.groupBy("partition").agg(*map(functions.expr, columns))


def in_python(frame):
    longer = functions.udf(lambda value, headers: f"{value} {headers}", "string")
    return frame.select("partition", "offset", longer("value", "headers"))


OPERATIONS = {
    "cache": cached,
    "sort": lambda frame: frame.orderBy("value", "partition", "offset").collect(),
    "sort headers": lambda frame: frame.orderBy("headers", "partition", "offset").collect(),
    "lists": aggregated("sort_array(collect_list(struct(offset, value, headers)))"),
    "greatest": aggregated("max(struct(offset, headers))", "max_by(headers, offset)"),
    "least": aggregated("min(value)", "min(headers)", "min_by(value, offset)"),
    "counts": aggregated("count(headers)", "sum(size(headers))", "count(distinct key)"),
    "distinct": lambda frame: frame.select("key", "headers").distinct(),
    "join": joined,
    "window": window,
    "pandas": lambda frame: frame.orderBy("partition", "offset").toPandas().values.tolist(),
    "python": in_python,
    "repartition": lambda frame: frame.repartition(3).sortWithinPartitions("offset"),
    "coalesce": lambda frame: frame.coalesce(1),
    "first key": lambda frame: frame.selectExpr("headers[0].key"),
    "first value": lambda frame: frame.selectExpr("offset", "headers[0].value", "value"),
    "keys": lambda frame: frame.selectExpr("headers.key"),
    "values": lambda frame: frame.selectExpr("headers.value", "offset"),
    "explode": lambda frame: frame.selectExpr("explode(headers) as h").selectExpr("h.value"),
    "explode keys": lambda frame: frame.selectExpr("offset", "explode(headers.key)"),
    "functions": lambda frame: frame.filter("size(headers) > 1").selectExpr(
        "reverse(headers)", "filter(headers, h -> h.value is null)", "element_at(headers, -1)"
    ),
    "values of a function": lambda frame: frame.selectExpr("transform(headers, h -> h.value)"),
    "a filter of headers": lambda frame: frame.filter("headers[0].value = '11'").select("offset"),
}


@pytest.mark.parametrize("reader", ["jvm"])
def test_rows_may_outlive_the_memory_of_their_batch(both, code):
    """The reader uses its memory again for the next batch, and frees it at the end of a task."""
    for name, operation in OPERATIONS.items():
        of_jvm, of_python = (sorted(map(repr, rows_of(operation(frame)))) for frame in both())
        assert of_jvm == of_python, name
        assert of_jvm, name


def rows_of(result):
    return result if isinstance(result, list) else result.collect()


# Records that are gone


def delete(log):
    log.delete_topic("t")


def create_again(log):
    log.delete_topic("t")
    log.create_topic("t", 2)
    log.partition("t", 0).append([encoded(*[b"new"] * 100)])


def truncate(log):
    log.partition("t", 0).truncate_to(25)


def write_again(log):
    log.partition("t", 0).truncate_to(25)
    log.partition("t", 0).append([encoded(*[b"new"] * 100)])


def delete_records(log):
    log.delete_records({TopicPartition("t", 0): 25})
    log.housekeeping.run()


LOSSES = [delete, create_again, truncate, write_again, delete_records]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_records_that_are_lost_between_plan_and_task(load, log, options, loss):
    """The query fails, or goes on with what is left of the records that were planned."""
    log.alter_topic("t", {"file.delete.delay.ms": 0})
    for number in range(5):
        log.partition("t", 0).append([encoded(*(b"%d" % (number * 10 + row) for row in range(10)))])
        if number in (0, 1, 2):
            log.partition("t", 0).roll()
    log.partition("t", 1).append([encoded(b"1000")])
    # A longer lease would keep the records.
    strict = load(options(readLeaseMs=1))
    lenient = load(options(readLeaseMs=1, failOnDataLoss="false"))
    for frame in (strict, lenient):
        assert len(frame.collect()) == 51
    loss(log)

    with pytest.raises(Exception, match="failOnDataLoss"):
        strict.collect()
    left = {(row.partition, int(row.value)) for row in lenient.collect()}
    planned = {(0, value) for value in range(50)} | {(1, 1000)}
    assert left <= planned
    kept = {
        "truncate": range(20),
        "write_again": range(20),
        "delete_records": range(25, 50),
    }.get(loss.__name__, ())
    assert left >= {(0, value) for value in kept}
    assert ((1, 1000) in left) == (loss not in (delete, create_again))


def test_retention_waits_for_a_query(load, log, options):
    """Its lease keeps the records from the plan to the last task."""
    log.alter_topic("t", {"file.delete.delay.ms": 0, "retention.ms": 1, "segment.bytes": 2000})
    for number in range(40):
        log.partition("t", 0).append([encoded(b"%d" % number)])
    frame = load(options())
    assert frame.count() == 40
    log.housekeeping.run()
    log.housekeeping.run()

    assert sorted(int(row.value) for row in frame.select("value").collect()) == list(range(40))


def test_a_log_that_was_repaired_is_read(load, log, options):
    """The damaged batch leaves a gap in its segment."""
    for number in range(4):
        log.partition("t", 0).append([encoded(*[b"%d" % number] * 10)])
    log.partition("t", 0).roll()
    (path,) = [path for path in segment_files(log.path) if path.stat().st_size > 1000]
    data = bytearray(path.read_bytes())
    data[data.index(b"1" * 10)] ^= 1
    path.write_bytes(data)
    with pytest.raises(Exception, match="the CRC of column value is wrong"):
        load(options()).collect()
    log.housekeeping.repair(dry_run=False)

    rows = load(options()).select("offset", "value").collect()

    assert sorted(row.offset for row in rows) == [*range(10), *range(20, 40)]
    assert {bytes(row.value) for row in rows} == {b"0", b"2", b"3"}
    assert load(options()).filter("offset >= 15").count() == 20
