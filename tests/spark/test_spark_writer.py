"""The writer in Spark's JVM: the same rows as the sink in Python writes, each of them once."""

from __future__ import annotations

import os
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest
from support import planner_faults
from support.clock import START
from support.roots import rows, values
from support.tiers import choose

from embedlog import batch as batches
from embedlog.api import Log
from embedlog.files import Files
from embedlog.publish import staging
from embedlog.spark.data_writer import COMBINED_ROWS
from embedlog.spark.errors import to_embedlog_error
from embedlog.spark.spark_session import READER

JVM = pytest.mark.parametrize("reader", ["jvm"], indirect=True)
BOTH_WRITERS = pytest.mark.parametrize("reader", ["jvm"], indirect=True)
"""The test changes the setting itself."""
SEEDS = range(choose(test=1, all=40, nightly=500))
TIME = pa.timestamp("us", "UTC")
HEADERS = pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()}))


@pytest.fixture
def log(sink_log: Log) -> Log:
    """A log with "t" of three partitions and "u" of one."""
    return sink_log


def save(log: Log, frame: Any, **options: Any) -> None:
    writer = frame.write.format("embedlog").option("path", log.path).mode("append")
    writer.options(**{name: str(value) for name, value in options.items()}).save()


def records(log: Log, topic: str) -> list[list[Any]]:
    """Return the records of each partition: timestamp, key, value and headers."""
    return [
        [record[1:] for record in rows(log.partition(topic, number), 0)]
        for number in range(log.topic(topic).partitions)
    ]


# The same rows


class RandomFrame:
    """Random rows of a sink, and the options to write them with."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._count = dice.choice([0, 1, 7, 64, 500, 3000])
        self._sizes = dice.choice([(0, 1, 2), (0, 8, 9, 200), (100, 5000), (0, 3, 90_000)])
        # Otherwise rows without a key go to other partitions.
        assert self._count < COMBINED_ROWS

    def table(self, *, topics: bool) -> pa.Table:
        """Return columns: always the value, and some of the others."""
        dice, count = self._dice, self._count
        partition_count = 3 if topics else 4
        columns = {"value": pa.array(self._bytes(count), pa.binary())}
        if dice.random() < 0.2:
            columns["value"] = pa.array([f"é{dice.random()}" for _ in range(count)], pa.string())
        if dice.random() < 0.8:
            columns["key"] = pa.array(self._bytes(count), pa.binary())
        if dice.random() < 0.2:
            columns["key"] = pa.array([dice.choice([None, "", "ü", "key"]) for _ in range(count)])
        if topics:
            columns["topic"] = pa.array([dice.choice("abc") for _ in range(count)], pa.string())
        if dice.random() < 0.5:
            numbers = [dice.choice([None, dice.randrange(partition_count)]) for _ in range(count)]
            columns["partition"] = pa.array(numbers, pa.int32())
        if dice.random() < 0.5:
            columns["headers"] = pa.array([self._headers() for _ in range(count)], HEADERS)
        columns["timestamp"] = pa.array([self._time_us() for _ in range(count)], TIME)
        columns["extra"] = pa.array([1.5] * count)
        names = dice.sample(list(columns), len(columns))
        return pa.table({name: columns[name] for name in names})

    def options(self) -> dict[str, str]:
        options = {"durability": self._dice.choice(["os", "fsync"])}
        if self._dice.random() < 0.7:
            options["compression"] = self._dice.choice(["none", "lz4", "zstd"])
        return options

    def config(self) -> dict[str, Any]:
        """Return the settings of a topic."""
        return {
            "compression.type": self._dice.choice(["producer", "lz4", "zstd"]),
            "segment.bytes": self._dice.choice([300_000, 1 << 20, 1 << 30]),
            "max.message.bytes": self._dice.choice([120_000, 1 << 20]),
        }

    def _bytes(self, count: int) -> list[bytes | None]:
        dice = self._dice
        sizes = [dice.choice(self._sizes) for _ in range(count)]
        if sum(sizes) > 20 << 20:
            sizes = [dice.choice([0, 10, 20]) for _ in range(count)]
        repeated = dice.random() < 0.5
        return [
            None
            if dice.random() < 0.1
            else dice.randbytes(4) * (size // 4 + 1)
            if repeated
            else dice.randbytes(size)
            for size in sizes
        ]

    def _headers(self) -> list[dict[str, Any]] | None:
        dice = self._dice
        if dice.random() < 0.6:
            return None
        return [
            {"key": dice.choice(["", "h", "ö"]), "value": dice.choice([None, b"", b"v" * 70])}
            for _ in range(dice.randrange(4))
        ]

    def _time_us(self) -> int:
        dice = self._dice
        # Also before 1970, which is cut towards it.
        return dice.choice(
            [START * 1000 + dice.randrange(10**9), -1500, -1, 0, dice.randrange(9**17)]
        )


@pytest.mark.tier("test")
@BOTH_WRITERS
@pytest.mark.parametrize("seed", SEEDS)
def test_both_writers_write_the_same_rows(spark, log, seed):
    """Random columns, topics and options; in all partitions, in the same order."""
    dice = random.Random(seed)
    frames = RandomFrame(dice)
    topics = dice.random() < 0.4
    table, options, config = frames.table(topics=topics), frames.options(), frames.config()
    frame = spark.createDataFrame(table).coalesce(1)
    if dice.random() < 0.5:
        # With a shuffle the rows are in other memory than those of Arrow.
        frame = frame.repartitionByRange(1, "value").sortWithinPartitions(*table.column_names[:2])
        frame = frame.persist()
        frame.count()
    names = "abc" if topics else "a"
    written = {}
    for writer in ("jvm", "python"):
        spark.conf.set(READER, writer)
        for name in names:
            log.create_topic(name, 3 if topics else 4, config)
        save(log, frame, **options, **({} if topics else {"topic": "a"}))
        written[writer] = {name: records(log, name) for name in names}
        assert log.housekeeping.verify() == []
        for name in names:
            log.delete_topic(name)

    assert written["jvm"] == written["python"]
    counts = [len(part) for of_topic in written["jvm"].values() for part in of_topic]
    assert sum(counts) == table.num_rows


@pytest.mark.tier("test")
@JVM
def test_a_batch_has_the_bytes_that_python_would_write(spark, log):
    """Without compression; so Python reads it on its fast path."""
    table = pa.table(
        {
            "key": pa.array([b"k", None, b""], pa.binary()),
            "value": pa.array([b"hello", b"", None], pa.binary()),
            "timestamp": pa.array([START * 1000, START * 1000 + 1000, 5000], TIME),
        }
    )
    save(log, spark.createDataFrame(table).coalesce(1), topic="u")

    (batch,) = log.partition("u", 0).reader(0).read()
    columns = [table["timestamp"].cast(pa.timestamp("ms", "UTC")), table["key"], table["value"]]
    expected = batches.encode(
        pa.table(columns, schema=batches.schema()).combine_chunks().to_batches()[0]
    )
    encoded = batches.to_encoded(batch)
    assert b"".join(map(bytes, encoded.stamp(0, 0))) == b"".join(map(bytes, expected.stamp(0, 0)))


@JVM
def test_rows_of_many_partitions_are_written_before_they_take_much_memory(spark, log):
    """40 MB for 300 partitions, which would be in memory until the end: no batch is full."""
    log.create_topic("many", 300)
    rows = spark.range(0, 40_000, 1, 1).selectExpr(
        "cast(repeat(chr(65 + id % 26), 1000) as binary) value", "int(id % 300) partition"
    )
    save(log, rows, topic="many")
    assert len(log["many"]) == 40_000
    counts = [batch.count for batch in log.partition("many", 7).reader(0).read()]
    assert len(counts) > 1
    assert sum(counts) in (133, 134)


@JVM
@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_values_of_many_megabytes_are_written(spark, log, compression):
    """Of several blocks of lz4, some of which do not compress, and larger than most batches."""
    log.create_topic("large", config={"max.message.bytes": 64 << 20})
    noise = random.Random(1).randbytes(3 << 20)
    table = pa.table({"value": pa.array([noise + b"x" * (20 << 20), b"", noise], pa.binary())})
    save(log, spark.createDataFrame(table).coalesce(1), topic="large", compression=compression)

    assert values(log.partition("large", 0)) == table["value"].to_pylist()
    assert log["large"].size_bytes() < (8 << 20 if compression != "none" else 28 << 20)


# Errors


ERRORS = [
    ("select 'v' value, cast(null as string) topic", {}),
    ("select 'v' value, null topic", {}),
    ("select 'v' value, 'missing' topic", {}),
    ("select 'v' value, 3 partition", {"topic": "t"}),
    ("select 'v' value, -1 partition", {"topic": "t"}),
    ("select 'v' value, 1 partition", {"topic": "u"}),
    ("select 'v' value, 20000 partition", {"topic": "new"}),
    ("select 'v' value, 'k' key, int(null) partition union all select 'v', 'k', 3", {"topic": "n"}),
    ("select repeat('x', 2000000) value", {"topic": "t"}),
    ("select 'v' value, timestamp'2001-01-01' timestamp", {"topic": "recent"}),
    ("select 'v' value", {"topic": "keyed"}),
    (
        "select 'v' value, array(struct(string(null) key, binary('a') value)) headers",
        {"topic": "t"},
    ),
    ("select 'v' value", {}),
    ("select 'v' key", {"topic": "t"}),
    ("select 1 value", {"topic": "t"}),
    ("select 'v' value", {"topic": "t", "topik": "t"}),
    ("select 'v' value", {"topic": "a/b"}),
    ("select 'v' value", {"topic": "t", "txnAppId": "a"}),
]


@BOTH_WRITERS
@pytest.mark.parametrize(("sql", "options"), ERRORS)
def test_both_writers_refuse_the_same_rows_with_the_same_words(spark, log, sql, options):
    """Nothing is written, nothing is left behind."""
    log.create_topic("keyed", config={"cleanup.policy": "compact"})
    log.create_topic("recent", config={"message.timestamp.before.max.ms": 86_400_000})
    errors = {}
    for writer in ("jvm", "python"):
        spark.conf.set(READER, writer)
        with pytest.raises(Exception) as error:
            save(log, spark.sql(sql).coalesce(1), **options)
        errors[writer] = to_embedlog_error(error.value)
    # The times in a message.
    texts = {name: re.sub(r"\d{8,}", "#", str(error)) for name, error in errors.items()}

    assert texts["jvm"] == texts["python"]
    assert type(errors["jvm"]) is type(errors["python"])
    assert type(errors["jvm"]).__name__ != "SparkQueryError"
    assert {topic: len(log[topic]) for topic in log.topics()} == dict.fromkeys(log.topics(), 0)
    assert set(log.topics()) == {"t", "u", "keyed", "recent"}
    assert staged_files(log) == []


def staged_files(log: Log) -> list[str]:
    return [name for _, _, names in os.walk(f"{log.path}/staging") for name in names]


@JVM
def test_a_row_larger_than_any_batch_is_refused(spark, log):
    """Before it is copied."""
    # Not a constant, of which the plan would have several copies.
    value = "cast(repeat(chr(int(120 + id)), 67108865) as binary) value"
    frame = spark.range(0, 1, 1, 1).selectExpr(value)
    with pytest.raises(Exception, match=r"A batch of \d+ bytes is larger than"):
        save(log, frame, topic="t")
    assert len(log["t"]) == 0


@BOTH_WRITERS
@pytest.mark.parametrize("mode", ["error", "ignore", "overwrite"])
def test_other_modes_than_append_are_refused(spark, log, mode):
    """Spark refuses the first two, as for any source that creates no tables."""
    for writer in ("jvm", "python"):
        spark.conf.set(READER, writer)
        frame = spark.range(1).selectExpr("string(id) value").write.format("embedlog")
        with pytest.raises(Exception, match=r"(?i)append"):
            frame.options(path=log.path, topic="u").mode(mode).save()
    assert len(log["u"]) == 0


@JVM
def test_a_failed_attempt_leaves_nothing_and_its_repetition_is_written_once(spark, log):
    """The file of a task that fails is removed at once, and that of others with the job."""
    rows = "select string(id) value, if(id = 900, 'none', 'u') topic from range(0, 1000, 1, 4)"
    with pytest.raises(Exception, match="There is no such topic"):
        save(log, spark.sql(rows))
    # Spark drops the message of a task that succeeded while another failed.
    staging.sweep(Files(log.path), now_ms=time.time_ns() // 1_000_000 + 8 * 86_400_000)
    assert staged_files(log) == []
    save(log, spark.sql(rows).where("topic = 'u'"))
    assert len(log["u"]) == 999


@JVM
def test_writes_at_the_same_time_do_not_disturb_each_other(spark, log):
    """They share the planner, an open log, and the directory of staged files until it is empty."""

    def write_some(number: int) -> None:
        for _ in range(4):
            save(log, spark.range(3).selectExpr(f"'{number}' value"), topic="tu"[number % 2])

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(write_some, range(6)))
    assert (len(log["t"]), len(log["u"])) == (36, 36)
    assert staged_files(log) == []


# Streams


@JVM
def test_update_mode_appends_the_rows_that_changed(spark, log, tmp_path):
    """As Kafka's sink does; Spark refuses it for sinks in Python."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "1.txt").write_text("a\nb\na")
    counts = spark.readStream.format("text").load(str(source)).groupBy("value").count()
    counts = counts.selectExpr("value key", "string(count) value").coalesce(1)

    def run() -> None:
        writer = counts.writeStream.format("embedlog").outputMode("update")
        writer = writer.options(path=log.path, topic="u", checkpointLocation=str(tmp_path / "c"))
        writer.trigger(availableNow=True).start().awaitTermination()

    run()
    assert sorted(values(log.partition("u", 0))) == [b"1", b"2"]
    (source / "2.txt").write_text("a")
    run()
    assert sorted(values(log.partition("u", 0))) == [b"1", b"2", b"3"]


# Publications that are repeated


@pytest.fixture
def numbers(spark: Any) -> Any:
    return spark.range(0, 100, 1, 3).selectExpr("string(id) value")


@JVM
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_batch_whose_planner_dies_while_it_publishes_is_not_published_again(
    log, numbers, faults, when
):
    """Nobody knows whether it was published: the error says how to find out."""
    planner_faults.order(faults, f"{when} publish_batch")
    with pytest.raises(Exception, match=r"publish_batch: .* may be in the log or not"):
        save(log, numbers, topic="u")

    assert len(log["u"]) == (100 if when == "after" else 0)
    assert staged_files(log) == []


@JVM
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_version_whose_planner_dies_while_it_publishes_is_published_once(
    log, numbers, faults, when
):
    """The request is repeated; if the first one was carried out, its staged files are gone."""
    planner_faults.order(faults, f"{when} publish_batch")
    save(log, numbers, topic="u", txnAppId="a", txnVersion=1)

    assert not (faults / f"{when} publish_batch").exists()
    assert len(log["u"]) == 100
    assert staged_files(log) == []


@JVM
def test_a_new_topic_whose_planner_dies_after_it_was_published_is_written_once(spark, log, faults):
    """The repetition finds the topic that the first request created."""
    frame = spark.range(30).selectExpr("string(id) value", "int(id % 3) partition")
    planner_faults.order(faults, "after publish_batch")
    save(log, frame, topic="new", txnAppId="a", txnVersion=1)

    assert log.topic("new").partitions == 3
    assert len(log["new"]) == 30


@JVM
def test_a_failed_write_is_discarded_even_if_the_planner_dies(spark, log, faults):
    """What it left behind is swept by a later write, once Spark's driver has ended."""
    planner_faults.order(faults, "before discard")
    with pytest.raises(Exception, match="Null topic"):
        save(log, spark.sql("select 'v' value, if(id = 9, null, 'u') topic from range(10)"))
    assert len(log["u"]) == 0
    save(log, spark.sql("select 'v' value, 'u' topic"))
    assert len(log["u"]) == 1


@JVM
def test_a_repeated_publication_of_each_micro_batch_is_skipped(spark, log, tmp_path, faults):
    """Of a stream with several: each planner dies when it has published one."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(3):
        (source / f"{number}.txt").write_text(f"{number}a\n{number}b")
    stream = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(source))
    planner_faults.order(faults, "after publish_micro_batch", times=2)
    writer = stream.writeStream.format("embedlog").option("checkpointLocation", str(tmp_path / "c"))
    query = writer.options(path=log.path, topic="u").trigger(availableNow=True).start()
    query.awaitTermination()

    assert sorted(values(log.partition("u", 0))) == [b"0a", b"0b", b"1a", b"1b", b"2a", b"2b"]
    assert sum(progress["sink"]["numOutputRows"] for progress in query.recentProgress) == 6
