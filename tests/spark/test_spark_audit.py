"""The audit counts what Spark writes, and what the pipeline loads."""

from __future__ import annotations

import os

import pytest
from support.clock import START

from embedlog import pipeline
from embedlog.errors import SparkQueryError
from embedlog.pipeline.parquet_output import ParquetOutput

HOUR = 3_600_000


def by_tier(result, field="records"):
    """Return the sum of a count of each tier and name."""
    sums = {}
    for row in result.rows:
        key = row.who.tier, row.who.name or row.who.client
        sums[key] = sums.get(key, 0) + getattr(row.counts, field)
    return {key: count for key, count in sums.items() if count}


def test_a_write_and_a_load_are_counted(spark, log, send, tmp_path):
    """Each under its name; a load that was killed before it reported is counted by the next."""
    log.alter_topic("t", {"audit": True})
    frame = spark.range(500).selectExpr("cast(id as string) value", "value as key")
    writer = frame.write.format("embedlog").mode("append").option("path", log.path)
    writer.option("topic", "t").option("txnAppId", "job").option("txnVersion", 1).save()
    into = os.fspath(tmp_path / "parquet")

    pipeline.load(log.path, into, ["t"], spark=spark, max_records_per_trigger=200)
    result = log.audit("t", "1h")

    assert by_tier(result) == {
        ("log", ""): 500,
        ("producer", "spark job"): 500,
        ("pipeline", into): 500,
    }
    assert result.differences == []
    assert by_tier(result, "unreported") == {}

    send("t", {0: [b"x"] * 100, 1: [b"y"] * 50})
    assert by_tier(log.audit("t", "1h"), "unread") == {("pipeline", into): 150}


def test_a_load_that_dies_before_it_reports_is_counted_by_the_next(
    spark, log, send, tmp_path, monkeypatch
):
    """The micro-batch is published; the next one begins behind it."""
    log.alter_topic("t", {"audit": True})
    into = os.fspath(tmp_path / "parquet")
    send("t", {0: [b"x"] * 100}, at=START)
    with monkeypatch.context() as patched:
        patched.setattr(ParquetOutput, "publish", _then_die(ParquetOutput.publish))
        with pytest.raises(SparkQueryError, match="Python Proxy"):
            pipeline.load(log.path, into, ["t"], spark=spark)
    send("t", {0: [b"x"] * 70}, at=START + HOUR)
    pipeline.load(log.path, into, ["t"], spark=spark)

    result = log.audit("t", "1h")

    assert by_tier(result)["pipeline", into] == 170
    assert by_tier(result, "unreported") == {("pipeline", into): 100}
    assert result.differences == []


def _then_die(publish):
    def publish_and_die(*arguments):
        publish(*arguments)
        raise ZeroDivisionError

    return publish_and_die
