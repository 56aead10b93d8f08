"""The pipeline in a real Spark session: it is incremental, restartable and exactly once."""

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
from support.patience import patient
from support.spark_session import quick_python

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
def into(tmp_path):
    """The directory of the Parquet files."""
    return tmp_path / "parquet"


@pytest.fixture
def load(spark, log, into):
    """Load topics, and check that files and log agree."""

    def load(*topics, **options):
        report = pipeline.load(log.path, into, topics, spark=spark, **options)
        assert report.problems == []
        return report

    return load


def parquet(path, **options):
    # Imported here: it imports pandas, which every test that forks would copy.
    from pyarrow import dataset

    return dataset.dataset(path, format="parquet", **options)


def rows(into, columns=("topic", "partition", "offset")):
    """Return the rows that a reader of Parquet sees, sorted."""
    table = parquet(into, partitioning="hive").to_table(list(columns))
    return sorted(tuple(row.values()) for row in table.to_pylist())


def everything(log):
    return [
        (topic, offset_range.partition, offset)
        for topic in log.topics()
        for offset_range in log.topic(topic).ranges()
        for offset in range(offset_range.start, offset_range.stop)
    ]


@pytest.mark.tier("test")
def test_it_loads_new_records_once(load, log, send, into):
    """Files are partitioned by topic and day; the next run loads new records and topics."""
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


def test_a_pattern_without_a_topic_is_a_warning(load, log, send, into, caplog):
    """Nothing is loaded: the topic may be created later, or the pattern may have a typing error."""
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
    """Published records are recognised by their offsets, a new topic of the same name by its id."""
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


def test_a_repeated_micro_batch_is_not_published_again(load, log, send, into):
    """The process seems to have died before Spark recorded the end of the micro-batch."""
    send("t", {0: range(30), 1: range(20)})
    load("t", max_records_per_trigger=25)
    for path in (into / ".pipeline/checkpoint/commits").glob("*1*"):
        path.unlink()
    send("t", {0: range(9)})

    assert load("t").loaded == 9
    assert rows(into) == everything(log)


def test_errors_are_embedlog_errors(load, log, send, into, monkeypatch):
    """The message is one sentence, without Java's traceback."""
    with pytest.raises(UnknownTopicOrPartitionError):
        load("x")
    with ParquetOutput(into), pytest.raises(LockTimeoutError, match="Another pipeline"):
        load("t")
    send("t", {0: range(3)})
    monkeypatch.setattr(load_query, "_CODEC", "no such codec")
    with pytest.raises(SparkQueryError) as error:
        load("t")
    assert len(str(error.value).splitlines()) == 1
    with ParquetOutput(into) as output:
        output.publish(output.new_stage(), StreamOffset({embedlog.TopicPartition("t", 0): 1}))
    log.delete_records({embedlog.TopicPartition("t", 0): 2})
    monkeypatch.undo()
    with pytest.raises(DataLossError, match=r"has offsets \[2, 3\)"):
        load("t", checkpoint=into / "other")
    assert load("t", checkpoint=into / "third", fail_on_data_loss=False).loaded == 1


def start(log, into, tmp_path, *options, out=subprocess.DEVNULL):
    """Start the pipeline in a process of its own."""
    environment = {
        "PYTHONPATH": str(Path(embedlog.__file__).parents[1]),
        "PYSPARK_PYTHON": quick_python(tmp_path),
        "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1",
    }
    arguments = ["t", "--root", log.path, "--into", str(into), "--max-records-per-trigger", "50"]
    return subprocess.Popen(
        [sys.executable, "-m", "embedlog.pipeline", *arguments, *options],
        env={**os.environ, **environment},
        stdout=out,
        stderr=out,
        text=True,
        start_new_session=True,
    )


def wait_for(process, into, count):
    """Wait until this many rows can be read, and check that no row is ever duplicated."""
    rows_read, deadline = [], time.monotonic() + patient(120)
    while process.poll() is None and len(rows_read) < count and time.monotonic() < deadline:
        time.sleep(0.05)
        rows_read = rows(into) if any(into.glob("topic=*/date=*/*")) else []
        assert len(rows_read) == len({*rows_read})


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_with_follow_it_loads_new_records_until_a_signal(
    load, log, send, into, tmp_path, signal_number
):
    """After the signal it reports; the next run does not load these records again."""
    send("t", {0: range(30), 1: range(20)})
    options = ("--follow", "--every", "0.2")
    process = start(log, into, tmp_path, *options, out=subprocess.PIPE)
    try:
        wait_for(process, into, 50)
        send("t", {0: range(9)}, at=START + DAY)
        wait_for(process, into, 59)
        # The signal goes to Java as well, as from a terminal or a supervisor.
        os.killpg(process.pid, signal_number)
        out, err = process.communicate(timeout=patient(60))
    finally:
        process.kill()

    assert process.returncode == 0, err
    assert out.endswith("loaded 59, in files 59: files and log agree\n")
    assert " WARN " not in err
    assert "log4j" not in err
    assert load("t").loaded == 0
    assert rows(into) == everything(log)


def kill_within(log, into, tmp_path, file_count):
    """Kill the pipeline when this many files exist; return False if it ended before."""
    process = start(log, into, tmp_path)
    while process.poll() is None and len(list(into.glob("topic=*/date=*/*"))) < file_count:
        time.sleep(0.005)
    killed = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    return killed


@pytest.mark.tier("nightly")
def test_it_may_be_killed(load, log, send, into, tmp_path):
    """Another process continues after the kill."""
    send("t", {0: range(900), 1: range(600)})

    assert kill_within(log, into, tmp_path, file_count=3)
    loaded = rows(into)
    assert len(loaded) == len({*loaded}) < 1500

    load("t")
    assert rows(into) == everything(log)


@pytest.mark.tier("nightly")
def test_it_may_be_killed_often(load, log, send, into, tmp_path):
    """The kills come at random times, each time with more records to load."""
    rng, killed = random.Random(1), 0
    for _ in range(20):
        send("t", {0: range(400), 1: range(300)})
        files = len(list(into.glob("topic=*/date=*/*")))
        killed += kill_within(log, into, tmp_path, files + rng.randint(1, 8))
        loaded = rows(into)
        assert len(loaded) == len({*loaded})
    load("t")
    assert rows(into) == everything(log)
    assert killed >= 10
