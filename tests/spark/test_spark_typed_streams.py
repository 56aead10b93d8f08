"""Streams of typed topics: output modes, and changes of the schema, with both readers."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import embedlog
from embedlog.api import Log

JVM = pytest.mark.parametrize("reader", ["jvm"], indirect=True)
COUNTS = pa.schema([("word", pa.string()), ("n", pa.int64())])


@pytest.fixture
def log(tmp_path: Path) -> Any:
    """A log with the typed topics "counts", "from" and "to", verified after the test."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        for topic in ("counts", "from", "to"):
            log.create_topic(topic, 2, schema=COUNTS, key="word")
        yield log
        assert log.housekeeping.verify() == []


def counted(log: Log, topic: str = "counts") -> list[tuple[str, int]]:
    """Return the values of a topic, sorted."""
    return sorted((record.value["word"], record.value["n"]) for record in log.topic(topic))


def send(log: Log, *values: Any, topic: str = "from") -> None:
    with log.producer() as producer:
        for value in values:
            producer.send(topic, value)


@pytest.fixture
def count_words(spark: Any, log: Log, tmp_path: Path) -> Callable[..., None]:
    """Count the words of files, with a new one, in a stream with an output mode."""
    source = tmp_path / "source"
    source.mkdir()

    def count_words(text: str, mode: str) -> None:
        (source / f"{len(list(source.iterdir()))}.txt").write_text(text)
        words = spark.readStream.format("text").load(str(source))
        counts = words.groupBy("value").count().selectExpr("value AS word", "count AS n")
        writer = counts.coalesce(1).writeStream.format("embedlog").outputMode(mode)
        options = {"path": log.path, "topic": "counts", "checkpointLocation": str(tmp_path / "c")}
        query = writer.options(**options).trigger(availableNow=True).start()
        query.awaitTermination()
        assert query.exception() is None

    return count_words


@JVM
def test_update_mode_appends_the_rows_that_changed(count_words, log):
    """As for topics of bytes."""
    count_words("a\nb\na", "update")
    assert counted(log) == [("a", 2), ("b", 1)]
    count_words("a", "update")
    assert counted(log) == [("a", 2), ("a", 3), ("b", 1)]


def test_complete_mode_appends_the_whole_result(count_words, log):
    """As for topics of bytes."""
    count_words("a\nb\na", "complete")
    count_words("a", "complete")
    assert counted(log) == [("a", 2), ("a", 3), ("b", 1), ("b", 1)]


@JVM
def test_a_batch_is_never_an_overwrite(spark, log):
    """Whoever encodes the rows."""
    rows = spark.createDataFrame([("a", 1)], "word string, n bigint")
    writer = rows.write.format("embedlog").mode("overwrite").option("path", log.path)
    with pytest.raises(Exception, match="appended to and never overwritten"):
        writer.option("topic", "counts").save()
    assert len(log["counts"]) == 0


# Changes of the schema


def changed(log: Log, topic: str) -> None:
    """Rename a column, widen another, and add two, of which one has a default."""
    columns = [("name", pa.string()), ("n", pa.float64()), ("of", pa.string())]
    log.alter_topic(
        topic,
        schema=pa.schema([*columns, pa.field("total", pa.int32(), nullable=False)]),
        rename={"word": "name"},
        defaults={"total": 7},
    )


@pytest.fixture(params=["int", "widened"])
def topic(request: Any, log: Log) -> str:
    """A topic whose records have several versions of the schema, and some are tombstones."""
    schema = pa.schema([("word", pa.string()), ("n", pa.int32())])
    log.create_topic("changing", 2, schema=schema, key="word")
    for number in range(20):
        send(log, {"word": f"w{number % 7}", "n": number}, topic="changing")
    with log.producer() as producer:
        producer.send("changing", None, key="w1")
    if request.param == "widened":
        changed(log, "changing")
        for number in range(20):
            value = {"name": f"w{number % 5}", "n": number / 2, "total": number}
            send(log, value, topic="changing")
        with log.producer() as producer:
            producer.send("changing", None, key="w2")
        log.alter_topic("changing", schema=pa.schema([("name", pa.string()), ("n", pa.float64())]))
        send(log, {"name": "w9", "n": 0.5}, topic="changing")
    return "changing"


def start_copy(spark: Any, log: Log, directory: Path, **trigger: Any) -> Any:
    """Start a stream from topic "from" to topic "to"."""
    options = {"path": log.path, "topic": "from", "startingOffsets": "earliest"}
    rows = spark.readStream.format("embedlog").options(**options).load().drop("partition")
    writer = rows.writeStream.format("embedlog").option("path", log.path).option("topic", "to")
    return writer.option("checkpointLocation", str(directory)).trigger(**trigger).start()


def test_a_stream_that_runs_keeps_its_columns_and_a_restart_has_the_new_ones(spark, log, tmp_path):
    """Every record is copied once; what is new of a record is not copied before the restart."""
    query = start_copy(spark, log, tmp_path / "checkpoint", processingTime="0 seconds")
    try:
        send(log, {"word": "a", "n": 1})
        query.processAllAvailable()
        for name in ("from", "to"):
            log.alter_topic(name, schema=COUNTS.append(pa.field("new", pa.int32())))
        send(log, {"word": "b", "n": 2, "new": 3})
        query.processAllAvailable()
    finally:
        query.stop()
    send(log, {"word": "c", "n": 4, "new": 5})
    restarted = start_copy(spark, log, tmp_path / "checkpoint", availableNow=True)
    restarted.awaitTermination()
    assert restarted.exception() is None
    copied = sorted((r.value["word"], r.value["n"], r.value["new"]) for r in log.topic("to"))
    assert copied == [("a", 1, None), ("b", 2, None), ("c", 4, 5)]


@pytest.mark.parametrize(
    ("before", "after", "fits", "outgrown"),
    [
        (pa.int16(), pa.decimal128(12, 2), 3, "3.5"),
        (pa.int64(), pa.decimal128(30, 2), -(1 << 62), "1e20"),
        (pa.int32(), pa.float64(), 3, "3.5"),
        (pa.float32(), pa.float64(), 0.5, "0.1"),
        (pa.uint8(), pa.int64(), 255, "70000"),
        (pa.decimal128(4, 1), pa.decimal128(8, 3), Decimal("1.5"), "1.25"),
    ],
)
def test_a_query_goes_on_with_the_type_that_a_column_had(spark, log, before, after, fits, outgrown):
    """Both readers: a wider value that the old type has is read, and any other is an error."""
    log.create_topic("t", schema=pa.schema([("n", before)]))
    send(log, {"n": fits}, topic="t")
    options = {"path": log.path, "topic": "t", "startingOffsets": "earliest"}
    rows = spark.readStream.format("embedlog").options(**options).load().select("n")
    query = rows.writeStream.format("memory").queryName("rows").start()
    try:
        query.processAllAvailable()
        log.alter_topic("t", schema=pa.schema([("n", after)]))
        send(log, {"n": fits}, topic="t")
        query.processAllAvailable()
        assert [row.n for row in spark.table("rows").collect()] == [fits, fits]
        wider = float(outgrown) if pa.types.is_floating(after) else Decimal(outgrown)
        send(log, {"n": int(wider) if pa.types.is_integer(after) else wider}, topic="t")
        with pytest.raises(Exception, match=r"[Cc]olumn n "):
            query.processAllAvailable()
    finally:
        query.stop()


def test_a_value_that_outgrew_a_running_stream_ends_it_and_a_restart_goes_on(spark, log, tmp_path):
    """The error names the column, and no record is lost or copied twice."""
    for name in ("small", "copy of small"):
        log.create_topic(name.replace(" ", "-"), schema=pa.schema([("n", pa.int32())]))
    options = {"path": log.path, "topic": "small", "startingOffsets": "earliest"}

    def start(**trigger: Any) -> Any:
        rows = spark.readStream.format("embedlog").options(**options).load()
        writer = rows.writeStream.format("embedlog").option("path", log.path)
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        return writer.option("topic", "copy-of-small").trigger(**trigger).start()

    query = start(processingTime="0 seconds")
    try:
        send(log, {"n": 1}, topic="small")
        query.processAllAvailable()
        for name in ("small", "copy-of-small"):
            log.alter_topic(name, schema=pa.schema([("n", pa.int64())]))
        send(log, {"n": 1 << 40}, topic="small")
        with pytest.raises(Exception, match=r"[Cc]olumn n "):
            query.processAllAvailable()
    finally:
        query.stop()
    start(availableNow=True).awaitTermination()
    assert [record.value["n"] for record in log.topic("copy-of-small")] == [1, 1 << 40]
