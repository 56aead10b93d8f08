"""The pipeline with real Spark: incremental, restartable, exactly once."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.clock import START
from support.sessions import quick_python

import embedlog
from embedlog import pipeline
from embedlog.errors import (
    DataLossError,
    LockTimeoutError,
    SparkQueryError,
    UnknownTopicOrPartitionError,
)
from embedlog.pipeline import load_query
from embedlog.pipeline.parquet_output import ParquetOutput
from embedlog.spark.stream_offset import StreamOffset

DAY = 86_400_000


@pytest.fixture
def log(tmp_path):
    """A log that deletes nothing, though its records are old."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("t", partitions=2)
        yield log
        assert log.verify() == []


@pytest.fixture
def into(tmp_path):
    return tmp_path / "parquet"


@pytest.fixture
def load(spark, log, into):
    """Load topics; the report agrees with the log."""

    def load(*topics, **given):
        report = pipeline.load(log.path, into, topics, spark=spark, **given)
        assert report.problems == []
        return report

    return load


def parquet(path, **how):
    # Here, for it imports pandas, and every test that forks would copy that.
    from pyarrow import dataset

    return dataset.dataset(path, format="parquet", **how)


def rows(into, columns=("topic", "partition", "offset")):
    """What a plain reader finds, sorted."""
    found = parquet(into, partitioning="hive").to_table(list(columns))
    return sorted(tuple(row.values()) for row in found.to_pylist())


def everything(log):
    return [
        (topic, part.partition, offset)
        for topic in log.topics()
        for part in log.topic(topic).ranges()
        for offset in range(part.start, part.stop)
    ]


def test_it_loads_what_is_new_and_nothing_twice(load, log, send, into):
    """By topic and day; again, there is nothing; with more, and topics that come later, that."""
    send("t", {0: range(30), 1: range(20)})
    send("t", {0: range(10)}, at=START + DAY, headers=[("h", b"x")], key=b"k")

    assert load(pattern="[tu]").loaded == 60
    assert load(pattern="[tu]").loaded == 0
    log.create_topic("u", partitions=1)
    send("t", {1: range(7)}, at=START + 2 * DAY)
    send("u", {0: range(5)})
    assert load(pattern="[tu]", max_records_per_trigger=8).loaded == 12

    assert rows(into) == everything(log)
    days = {path.name for path in into.glob("topic=t/date=*")}
    assert days == {"date=2023-11-14", "date=2023-11-15", "date=2023-11-16"}
    day = parquet(into / "topic=t" / "date=2023-11-15").to_table()
    assert day.schema.names == "key value partition offset timestamp timestampType headers".split()
    assert day["value"].to_pylist() == [b"%d" % number for number in range(10)]
    assert day["headers"][0].as_py() == [{"key": "h", "value": b"x"}]


def test_a_pattern_that_no_topic_has_is_told(load, log, send, into, caplog):
    """Nothing is loaded, which is right: a topic may come; but it may be a slip as well."""
    assert load(pattern="u").loaded == 0
    assert "matches the pattern 'u'" in caplog.text
    log.create_topic("u", partitions=1)
    send("u", {0: range(5)})
    assert load(pattern="u").loaded == 5
    assert len(caplog.records) == 1

    shutil.rmtree(into / ".pipeline/checkpoint")
    assert load(pattern="tt").loaded == 0
    assert "matches the pattern 'tt'" in caplog.text


def test_a_checkpoint_may_be_deleted(load, log, send, into, tmp_path):
    """What is published is known by its offsets; so is a topic that is another one by now."""
    send("t", {0: range(30), 1: range(20)})
    load("t")
    send("t", {0: range(5)})
    assert load("t", checkpoint=tmp_path / "other").loaded == 5
    assert rows(into) == everything(log)

    log.delete_topic("t")
    log.create_topic("t", partitions=2)
    send("t", {0: range(90), 1: range(90)})
    with pytest.raises(DataLossError, match="created again"):
        load("t", checkpoint=tmp_path / "third")


def test_a_batch_that_is_repeated_is_not_published_again(load, log, send, into):
    """The process died after it was published, before Spark had noted that."""
    send("t", {0: range(30), 1: range(20)})
    load("t", max_records_per_trigger=25)
    for path in (into / ".pipeline/checkpoint/commits").glob("*1*"):
        path.unlink()
    send("t", {0: range(9)})

    assert load("t").loaded == 9
    assert rows(into) == everything(log)


def test_errors_are_ours(load, log, send, into, monkeypatch):
    """A sentence, and nothing of Java's."""
    with pytest.raises(UnknownTopicOrPartitionError):
        load("x")
    with ParquetOutput(into), pytest.raises(LockTimeoutError, match="Another pipeline"):
        load("t")
    send("t", {0: range(3)})
    monkeypatch.setattr(load_query, "_CODEC", "no such codec")
    with pytest.raises(SparkQueryError) as found:
        load("t")
    assert len(str(found.value).splitlines()) == 1
    with ParquetOutput(into) as output:
        output.publish(output.new_stage(), StreamOffset({embedlog.TopicPartition("t", 0): 1}))
    log.delete_records({embedlog.TopicPartition("t", 0): 2})
    monkeypatch.undo()
    with pytest.raises(DataLossError, match="has offsets 2 to 3"):
        load("t", checkpoint=into / "other")
    assert load("t", checkpoint=into / "third", fail_on_data_loss=False).loaded == 1


def start(log, into, tmp_path, *more, out=subprocess.DEVNULL):
    """Start the pipeline in a process of its own."""
    environment = {
        "PYTHONPATH": str(Path(embedlog.__file__).parents[1]),
        "PYSPARK_PYTHON": quick_python(tmp_path),
        "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1",
    }
    words = ["t", "--root", log.path, "--into", str(into), "--max-records-per-trigger", "50"]
    return subprocess.Popen(
        [sys.executable, "-m", "embedlog.pipeline", *words, *more],
        env={**os.environ, **environment},
        stdout=out,
        stderr=out,
        text=True,
        start_new_session=True,
    )


def wait_for(process, into, count):
    """Until so many rows can be read; none are read twice on the way."""
    found, until = [], time.monotonic() + 120
    while process.poll() is None and len(found) < count and time.monotonic() < until:
        time.sleep(0.05)
        found = rows(into) if any(into.glob("topic=*/date=*/*")) else []
        assert len(found) == len({*found})


@pytest.mark.full
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_one_that_follows_loads_what_comes_until_it_is_told_to_end(
    load, log, send, into, tmp_path, kind
):
    """Then it reports, as any other; what it loaded is not loaded again."""
    send("t", {0: range(30), 1: range(20)})
    more = ("--follow", "--every", "0.2")
    process = start(log, into, tmp_path, *more, out=subprocess.PIPE)
    try:
        wait_for(process, into, 50)
        send("t", {0: range(9)}, at=START + DAY)
        wait_for(process, into, 59)
        # As a terminal does, and a supervisor: to Java as well.
        os.killpg(process.pid, kind)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()

    assert process.returncode == 0, err
    assert out.endswith("loaded 59, in files 59: files and log agree\n")
    assert " WARN " not in err
    assert "log4j" not in err
    assert load("t").loaded == 0
    assert rows(into) == everything(log)


def kill_within(log, into, tmp_path, after):
    """Kill it when so many files are there; False if it was quicker."""
    process = start(log, into, tmp_path)
    while process.poll() is None and len(list(into.glob("topic=*/date=*/*"))) < after:
        time.sleep(0.005)
    died = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    return died


@pytest.mark.full
def test_it_may_be_killed(load, log, send, into, tmp_path):
    """Another process goes on from there."""
    send("t", {0: range(900), 1: range(600)})

    assert kill_within(log, into, tmp_path, after=3)
    found = rows(into)
    assert len(found) == len({*found}) < 1500

    load("t")
    assert rows(into) == everything(log)


@pytest.mark.full
def test_it_may_be_killed_often(load, log, send, into, tmp_path):
    """At any moment, with more to load each time."""
    dice, died = random.Random(1), 0
    for _ in range(20):
        send("t", {0: range(400), 1: range(300)})
        there = len(list(into.glob("topic=*/date=*/*")))
        died += kill_within(log, into, tmp_path, there + dice.randint(1, 8))
        found = rows(into)
        assert len(found) == len({*found})
    load("t")
    assert rows(into) == everything(log)
    assert died >= 10
