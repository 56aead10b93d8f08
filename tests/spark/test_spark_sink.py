"""The sink in a real Spark session: batches and streams, after the tests of Kafka's sink."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clock import START
from support.roots import values

from embedlog.api import Log
from embedlog.files import Files
from embedlog.partitioner import partition_for_key
from embedlog.publish import app_versions, staging


@pytest.fixture
def log(sink_log: Log) -> Iterator[Log]:
    """A log with topics to write to, without staged files after the test."""
    yield sink_log
    staged = [name for _, _, names in os.walk(f"{sink_log.path}/staging") for name in names]
    assert staged == []


def save(log: Log, frame: Any, **options: Any) -> None:
    mode = options.pop("mode", "append")
    writer = frame.write.format("embedlog").option("path", log.path).mode(mode)
    writer.options(**{name: str(value) for name, value in options.items()}).save()


def content(log: Log, topic: str) -> list[list[bytes | None]]:
    return [values(log.partition(topic, number)) for number in range(log.topic(topic).partitions)]


def everything(log: Log, topic: str) -> list[bytes | None]:
    return sorted(value for partition_values in content(log, topic) for value in partition_values)  # type: ignore[type-var]


# Batches


@pytest.mark.tier("test")
def test_rows_are_partitioned_by_key_and_other_columns_are_ignored(spark, log):
    """Partitions are those of Kafka; columns may be in any order."""
    frame = spark.range(500).selectExpr("id extra", "cast(id as string) value", "value as key")
    save(log, frame, topic="t")

    for number, partition in enumerate(content(log, "t")):
        keys = [b"%d" % row for row in range(500)]
        assert sorted(partition) == sorted(
            key for key in keys if partition_for_key(key, 3) == number
        )


def test_topics_partitions_headers_and_timestamps_are_columns(spark, log):
    """The sink has the columns of Kafka's sink, and the timestamp of a record."""
    sql = """
        select 'a' as value, 'u' as topic, cast(null as int) as partition,
            array(struct('h' as key, cast('1' as binary) as value)) as headers,
            timestamp'2024-01-01 00:00:00' as timestamp
        union all select null, 't', 2, null, null
    """
    save(log, spark.sql(sql))

    assert content(log, "t") == [[], [], [None]]
    with log.consumer("u", auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        (record,) = consumer
    assert (record.value, list(record.headers)) == (b"a", [("h", b"1")])
    assert record.timestamp == 1_704_067_200_000


@pytest.mark.parametrize(
    ("sql", "options", "message"),
    [
        ("select 1 as value", {"topic": "u"}, "value must be a(n) string or binary"),
        ("select 'v' as value", {"topic": "u", "mode": "overwrite"}, "never overwritten"),
    ],
)
def test_invalid_writes_are_refused_before_anything_is_written(spark, log, sql, options, message):
    """The messages are those of Kafka's sink; test_spark_staging.py has more cases."""
    with pytest.raises(Exception) as error:
        save(log, spark.sql(sql), **options)

    assert message in str(error.value)
    assert everything(log, "u") == []


def test_a_task_that_fails_publishes_nothing_of_the_others(spark, log):
    """A write is published in all partitions or in none."""
    rows = "select cast(id as string) as value, if(id = 999, null, 'u') as topic from range(1000)"
    with pytest.raises(Exception, match="Null topic present in the data"):
        save(log, spark.sql(rows).repartition(4))

    assert everything(log, "u") == []
    # Spark drops the message of a task that succeeded while another failed; its file is swept
    # later.
    staging.sweep(Files(log.path), now_ms=START * 1000)


def test_a_topic_is_created_with_the_partitions_that_the_rows_name(spark, log):
    """A copy of a topic has its partitions."""
    save(log, spark.range(30).selectExpr("cast(id as string) value", "value key"), topic="t")
    reader = spark.read.format("embedlog").options(path=log.path, subscribe="t")
    save(log, reader.load(), topic="copy")
    assert content(log, "copy") == content(log, "t")

    mixed = "select 'v' as value, 'k' as key, if(id > 4, null, int(id)) as partition from range(9)"
    with pytest.raises(Exception, match="others only a key"):
        save(log, spark.sql(mixed), topic="mixed")
    assert "mixed" not in log.topics()


def test_an_empty_dataframe_and_large_values_can_be_written(spark, log):
    """Without rows nothing is published; large rows are split into batches that fit."""
    save(log, spark.range(0).selectExpr("cast(id as string) value"), topic="u")
    assert everything(log, "u") == []

    save(log, spark.range(8).selectExpr("repeat('x', 900000) value"), topic="u")
    assert [len(value) for value in everything(log, "u")] == [900_000] * 8


def test_a_version_is_published_once(spark, log):
    """`txnAppId` and `txnVersion` work as in Delta."""
    frame = spark.range(10).selectExpr("cast(id as string) value")
    for version in (1, 1, 0, 2):
        save(log, frame, topic="t", txnAppId="nightly", txnVersion=version)

    assert len(everything(log, "t")) == 20


# Streams


class Lines:
    """A query that writes text files into a topic, each file in a micro-batch."""

    def __init__(self, spark: Any, log: Log, directory: Path) -> None:
        self.spark, self.log, self.directory = spark, log, directory
        self.source, self.checkpoint = directory / "source", directory / "checkpoint"
        self.source.mkdir()
        self.sent: list[bytes] = []

    def put(self, count: int = 5) -> None:
        """Add a file with this many lines."""
        number = len(list(self.source.iterdir()))
        lines = [f"{number}-{row}" for row in range(count)]
        self.sent += [line.encode() for line in lines]
        temporary = self.directory / "temporary"
        temporary.write_text("\n".join(lines))
        # Spark reads files in the order of their modification times.
        os.utime(temporary, (1_700_000_000 + number, 1_700_000_000 + number))
        temporary.rename(self.source / f"{number:04d}.txt")

    def start(self, topic: str = "u", mode: str = "append", **options: Any) -> Any:
        required = {"path": self.log.path, "topic": topic, "checkpointLocation": self.checkpoint}
        writer = self.frame().writeStream.format(options.pop("format", "embedlog"))
        texts = {name: str(value) for name, value in {**required, **options}.items()}
        return writer.outputMode(mode).options(**texts).trigger(availableNow=True).start()

    def frame(self) -> Any:
        reader = self.spark.readStream.format("text").option("maxFilesPerTrigger", 1)
        return reader.load(str(self.source))

    def run(self, **options: Any) -> Any:
        query = self.start(**options)
        query.awaitTermination()
        return query


@pytest.fixture
def lines(spark, log, tmp_path):
    return Lines(spark, log, tmp_path)


@pytest.mark.tier("test")
def test_each_micro_batch_is_published_and_the_next_run_continues(lines, log):
    """A query restarted from its checkpoint publishes only the new rows."""
    for count in (5, 1, 3):
        lines.put(count)
    query = lines.run()
    assert [progress["sink"]["numOutputRows"] for progress in query.recentProgress[:3]] == [5, 1, 3]
    lines.put()
    lines.run()

    assert content(log, "u") == [lines.sent]


def test_a_deleted_checkpoint_is_an_error_unless_restarts_are_allowed(lines, log):
    """The query would publish everything again; the error says how to allow that."""
    lines.put()
    lines.run()
    shutil.rmtree(lines.checkpoint)
    with pytest.raises(Exception, match=r"started over.*checkpoint") as error:
        lines.run()
    assert '.option("allowRestart", "true")' in str(error.value)
    assert content(log, "u") == [lines.sent]

    shutil.rmtree(lines.checkpoint)
    lines.run(allowRestart=True)
    assert content(log, "u") == [lines.sent * 2]


def test_a_query_may_start_over_if_its_topic_was_created_again(lines, log):
    """The new topic has no records of the first run, so none can be published twice."""
    lines.put()
    lines.put()
    lines.run()
    shutil.rmtree(lines.checkpoint)
    log.delete_topic("u")
    log.create_topic("u")
    lines.run()
    assert content(log, "u") == [lines.sent]

    lines.put()
    lines.run()
    assert content(log, "u") == [lines.sent]
    shutil.rmtree(lines.checkpoint)
    with pytest.raises(Exception, match="started over"):
        lines.run()
    assert content(log, "u") == [lines.sent]


def test_a_query_starts_over_with_another_topic(lines, log):
    """It may without a checkpoint; then it cannot go back to the first topic."""
    lines.put()
    lines.run()
    shutil.rmtree(lines.checkpoint)
    lines.put()
    lines.run(topic="v")
    assert content(log, "v") == [lines.sent]

    shutil.rmtree(lines.checkpoint)
    with pytest.raises(Exception, match="started over"):
        lines.run()
    assert content(log, "u") == [lines.sent[:5]]


def test_complete_mode_appends_the_whole_result(spark, lines, log):
    """It does so in Kafka's sink, too; Spark refuses `update` for Python sinks."""
    lines.put(4)
    counts = lines.frame().groupBy().count().selectExpr("cast(count as string) value")
    options = {"path": log.path, "topic": "u", "checkpointLocation": str(lines.checkpoint)}
    writer = counts.writeStream.format("embedlog").outputMode("complete").options(**options)
    writer.trigger(availableNow=True).start().awaitTermination()

    assert content(log, "u") == [[b"4"]]


@pytest.mark.parametrize("names", [("one", "one"), ("to u", "to t")])
def test_foreach_batch_writes_to_two_topics_once_each(lines, log, names):
    """With one `txnAppId`, as in Delta, or with two; repetitions are skipped."""

    def write_both(frame: Any, batch_id: int) -> None:
        for _ in range(2):
            for topic, name in zip(("u", "t"), names, strict=True):
                writer = frame.write.format("embedlog").option("path", log.path).mode("append")
                options = {"topic": topic, "txnAppId": name, "txnVersion": str(batch_id)}
                writer.options(**options).save()

    lines.put()
    lines.put()
    query = lines.frame().writeStream.foreachBatch(write_both).trigger(availableNow=True)
    query.option("checkpointLocation", str(lines.checkpoint)).start().awaitTermination()

    assert content(log, "u") == [lines.sent]
    assert everything(log, "t") == sorted(lines.sent)


def test_tasks_may_use_a_producer(spark, log):
    """`foreachPartition` runs in processes that Spark forks."""
    path = log.path

    def send(rows: Any) -> None:
        import embedlog

        with embedlog.open(path) as log, log.producer() as producer:
            for row in rows:
                producer.send("t", str(row["id"]).encode())

    spark.range(100).repartition(3).foreachPartition(send)

    assert len(everything(log, "t")) == 100


def test_app_versions_name_the_query_and_its_checkpoint(lines, log):
    """A moved checkpoint is recognised by the query's id, a deleted one by its path."""
    lines.put()
    query = lines.run()

    table = app_versions.APP_VERSIONS
    versions = log.root.context.state.read(lambda txn: dict(table.scan_valid(txn)))
    topic = log.root.topic("u").id
    assert versions.keys() == {
        (query.id, app_versions.ANY_TOPIC),
        (f"at {lines.checkpoint}", topic),
    }
    assert {version.source for version in versions.values()} == {query.id}
