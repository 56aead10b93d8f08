"""The sink with real Spark: batches and streams, as those of Kafka's suites, and each once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clock import START
from support.roots import values

import embedlog
from embedlog.api import Log
from embedlog.files import Files
from embedlog.partitioner import partition_for_key
from embedlog.publish import app_versions, staging


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """A log with "t" of three partitions and "u" of one; healthy when the test is done with it."""
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t", partitions=3)
        log.create_topic("u")
        yield log
        assert log.verify() == []
        staged = [name for _, _, names in os.walk(f"{log.path}/staging") for name in names]
        assert staged == []


def save(log: Log, frame: Any, **options: Any) -> None:
    mode = options.pop("mode", "append")
    writer = frame.write.format("embedlog").option("path", log.path).mode(mode)
    writer.options(**{name: str(value) for name, value in options.items()}).save()


def content(log: Log, topic: str) -> list[list[bytes | None]]:
    return [values(log.partition(topic, number)) for number in range(log.topic(topic).partitions)]


def everything(log: Log, topic: str) -> list[bytes | None]:
    return sorted(value for part in content(log, topic) for value in part)  # type: ignore[type-var]


# Batches


@pytest.mark.tier("test")
def test_a_frame_is_published_by_key_and_other_columns_are_left_out(spark, log):
    """Each row where Kafka would put it; the columns in any order."""
    frame = spark.range(500).selectExpr("id extra", "cast(id as string) value", "value as key")
    save(log, frame, topic="t")

    for number, found in enumerate(content(log, "t")):
        keys = [b"%d" % row for row in range(500)]
        assert sorted(found) == sorted(key for key in keys if partition_for_key(key, 3) == number)


def test_topics_and_partitions_by_column_headers_and_times(spark, log):
    """The whole contract of Kafka's sink, and the time of a record."""
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
    ("sql", "options", "told"),
    [
        ("select 1 as value", {"topic": "u"}, "value must be a(n) string or binary"),
        ("select 'v' as value", {"topic": "u", "mode": "overwrite"}, "never overwritten"),
    ],
)
def test_what_the_sink_does_not_take_is_told_before_anything_is_written(
    spark, log, sql, options, told
):
    """In the words of Kafka's sink; the others without Spark, in test_spark_staging.py."""
    with pytest.raises(Exception) as error:
        save(log, spark.sql(sql), **options)

    assert told in str(error.value)
    assert everything(log, "u") == []


def test_a_task_that_fails_publishes_nothing_of_the_others(spark, log):
    """All or nothing, over all partitions."""
    rows = "select cast(id as string) as value, if(id = 999, null, 'u') as topic from range(1000)"
    with pytest.raises(Exception, match="null topic present in the data"):
        save(log, spark.sql(rows).repartition(4))

    assert everything(log, "u") == []
    # Of a task that ended well while another one failed Spark tells nobody: that is swept later.
    staging.sweep(Files(log.path), now_ms=START * 1000)


def test_an_empty_frame_and_many_large_values(spark, log):
    """Nothing is nothing; and a batch is cut so that it fits."""
    save(log, spark.range(0).selectExpr("cast(id as string) value"), topic="u")
    assert everything(log, "u") == []

    save(log, spark.range(8).selectExpr("repeat('x', 900000) value"), topic="u")
    assert [len(value) for value in everything(log, "u")] == [900_000] * 8


def test_a_write_with_a_number_is_published_once(spark, log):
    """`txnAppId` and `txnVersion`, as Delta has them."""
    frame = spark.range(10).selectExpr("cast(id as string) value")
    for version in (1, 1, 0, 2):
        save(log, frame, topic="t", txnAppId="nightly", txnVersion=version)

    assert len(everything(log, "t")) == 20


# Streams


class Lines:
    """A stream of files of lines, each a micro-batch, into a topic."""

    def __init__(self, spark: Any, log: Log, directory: Path) -> None:
        self.spark, self.log, self.directory = spark, log, directory
        self.source, self.checkpoint = directory / "source", directory / "checkpoint"
        self.source.mkdir()
        self.sent: list[bytes] = []

    def put(self, count: int = 5) -> None:
        """Add a file with so many lines."""
        number = len(list(self.source.iterdir()))
        lines = [f"{number}-{row}" for row in range(count)]
        self.sent += [line.encode() for line in lines]
        aside = self.directory / "aside"
        aside.write_text("\n".join(lines))
        # Files are taken in the order of their times.
        os.utime(aside, (1_700_000_000 + number, 1_700_000_000 + number))
        aside.rename(self.source / f"{number:04d}.txt")

    def start(self, topic: str = "u", mode: str = "append", **options: Any) -> Any:
        given = {"path": self.log.path, "topic": topic, "checkpointLocation": self.checkpoint}
        writer = self.frame().writeStream.format(options.pop("format", "embedlog"))
        named = {name: str(value) for name, value in {**given, **options}.items()}
        return writer.outputMode(mode).options(**named).trigger(availableNow=True).start()

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
def test_each_micro_batch_is_published_and_the_next_run_goes_on(lines, log):
    """Restarted from its checkpoint, a query publishes what came since."""
    for count in (5, 1, 3):
        lines.put(count)
    query = lines.run()
    assert [each["sink"]["numOutputRows"] for each in query.recentProgress[:3]] == [5, 1, 3]
    lines.put()
    lines.run()

    assert content(log, "u") == [lines.sent]


def test_a_deleted_checkpoint_is_noticed_and_refused_unless_allowed(lines, log):
    """The query would publish everything again; it says so, and how to let it."""
    lines.put()
    lines.run()
    shutil.rmtree(lines.checkpoint)
    with pytest.raises(Exception, match=r"started over.*checkpoint") as told:
        lines.run()
    assert '.option("allowRestart", "true")' in str(told.value)
    assert content(log, "u") == [lines.sent]

    shutil.rmtree(lines.checkpoint)
    lines.run(allowRestart=True)
    assert content(log, "u") == [lines.sent * 2]


def test_a_query_starts_over_with_its_checkpoint_and_topic_made_again(lines, log):
    """The new topic has nothing of the first run, so nothing can be published twice."""
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
    """Its checkpoint was deleted; it may not go back to the first topic afterwards."""
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


def test_complete_mode_appends_what_it_has(spark, lines, log):
    """As Kafka's sink; `update` is refused by Spark for sinks in Python."""
    lines.put(4)
    counts = lines.frame().groupBy().count().selectExpr("cast(count as string) value")
    given = {"path": log.path, "topic": "u", "checkpointLocation": str(lines.checkpoint)}
    writer = counts.writeStream.format("embedlog").outputMode("complete").options(**given)
    writer.trigger(availableNow=True).start().awaitTermination()

    assert content(log, "u") == [[b"4"]]


@pytest.mark.parametrize("names", [("one", "one"), ("to u", "to t")])
def test_foreach_batch_writes_twice_and_each_once(lines, log, names):
    """Two sinks in one call, under one name as with Delta or under two; no repetition counts."""

    def both(frame: Any, number: int) -> None:
        for _ in range(2):
            for topic, name in zip(("u", "t"), names, strict=True):
                writer = frame.write.format("embedlog").option("path", log.path).mode("append")
                named = {"topic": topic, "txnAppId": name, "txnVersion": str(number)}
                writer.options(**named).save()

    lines.put()
    lines.put()
    query = lines.frame().writeStream.foreachBatch(both).trigger(availableNow=True)
    query.option("checkpointLocation", str(lines.checkpoint)).start().awaitTermination()

    assert content(log, "u") == [lines.sent]
    assert everything(log, "t") == sorted(lines.sent)


def test_a_process_of_a_job_may_produce_by_itself(spark, log):
    """foreachPartition with a producer inside, in Spark's own forked processes."""
    path = log.path

    def send(rows: Any) -> None:
        import embedlog

        with embedlog.open(path) as here, here.producer() as producer:
            for row in rows:
                producer.send("t", str(row["id"]).encode())

    spark.range(100).repartition(3).foreachPartition(send)

    assert len(everything(log, "t")) == 100


def test_markers_name_the_query_and_its_checkpoint(lines, log):
    """So a checkpoint that was moved is known by its query, one that was deleted by its place."""
    lines.put()
    query = lines.run()

    found = log.root.context.state.read(app_versions.every)
    topic = log.root.topic("u").id
    assert found.keys() == {(query.id, app_versions.ANY_TOPIC), (f"at {lines.checkpoint}", topic)}
    assert {one.source for one in found.values()} == {query.id}
