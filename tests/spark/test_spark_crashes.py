"""Kills of a streaming write before and after each step: it loses and duplicates nothing."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import spark_kill_points
from support.forks import tell
from support.patience import patient
from support.roots import values

import embedlog
from embedlog.api import Log

PYTHON = pytest.mark.parametrize("reader", ["python"], indirect=True)
"""The sink in Python writes, whatever reads; `test_spark_planner_deaths` has the other one."""


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t", partitions=3, config={"segment.bytes": 30_000})
        yield log
        assert log.verify() == []


def put(source: Path, number: int, rows: int = 400) -> list[bytes]:
    """Add a file of rows, which becomes a micro-batch, and return the rows."""
    source.mkdir(exist_ok=True)
    lines = [f"{number}-{row}" for row in range(rows)]
    (source.parent / "temporary").write_text("\n".join(lines))
    (source.parent / "temporary").rename(source / f"{number:05d}.txt")
    return [line.encode() for line in lines]


def run(spark: Any, log: Log, directory: Path) -> Exception | None:
    """Run the query on all files; return the error that ended it, or None."""
    reader = spark.readStream.format("text").option("maxFilesPerTrigger", 1)
    frame = reader.load(str(directory / "source")).selectExpr("value", "value as key")
    options = {
        "path": log.path,
        "topic": "t",
        "checkpointLocation": str(directory / "checkpoint"),
        "kills": str(directory / "kills"),
    }
    writer = frame.repartition(2).writeStream.format("killable").options(**options)
    query = writer.trigger(availableNow=True).start()
    try:
        query.awaitTermination()
        return None
    except Exception as error:  # noqa: BLE001 - Spark's error about a killed process
        return error


def everything(log: Log) -> list[bytes]:
    partitions = [values(log.partition("t", number)) for number in range(3)]
    return sorted(itertools.chain(*partitions))  # type: ignore[arg-type]


def kill_at(spark: Any, log: Log, directory: Path, kill_points: list[str]) -> int:
    """Kill a process of one query at each kill point; return the number of kills."""
    sent: list[bytes] = []
    kills = 0
    for number, kill_point in enumerate(kill_points):
        sent += put(directory / "source", number)
        spark_kill_points.order(directory / "kills", kill_point)
        for _ in range(4):
            error = run(spark, log, directory)
            if error is None:
                break
        reached = not (directory / "kills" / kill_point).exists()
        assert reached, f"no process came to {kill_point!r}: {error}"
        kills += 1
        assert everything(log) == sorted(sent), f"after a kill {kill_point}"
    return kills


@PYTHON
def test_a_killed_process_loses_and_duplicates_nothing(spark, log, tmp_path):
    """The query restarts from its checkpoint, and published batches are recognised."""
    kill_points = ["within stage", "within publish", "after publish"]
    kills = kill_at(spark_kill_points.register(spark), log, tmp_path, kill_points)
    tell(f"{kills} kills")
    assert kills == len(kill_points)


@pytest.mark.tier("nightly")
@PYTHON
def test_many_killed_processes_lose_and_duplicate_nothing(spark, log, tmp_path):
    """More than a hundred processes are killed, in random order."""
    kill_points = list(spark_kill_points.SINK) * 16
    random.Random(1).shuffle(kill_points)
    kills = kill_at(spark_kill_points.register(spark), log, tmp_path, kill_points)
    tell(f"{kills} kills")
    assert kills >= 100


DRIVER = """
import sys
from pathlib import Path
import embedlog
from spark.test_spark_crashes import run
from support import spark_kill_points
from support.spark_session import begin
directory = Path(sys.argv[1])
spark = spark_kill_points.register(begin(directory / "spark"))
jvm = spark.sparkContext._gateway.proc.pid
spark_kill_points.watch(directory / "checkpoint", directory / "kills", jvm)
with embedlog.open(directory / "log") as log:
    sys.exit(3 if run(spark, log, directory) else 0)
"""


def run_in_application(directory: Path) -> bool:
    """Run the query in another application; return whether it got to the end."""
    paths = (Path(embedlog.__file__).parents[1], Path(__file__).parents[1])
    path = os.pathsep.join(map(str, paths))
    process = subprocess.run(
        [sys.executable, "-c", DRIVER, str(directory)],
        env={**os.environ, "KILL_DRIVER": "java", "PYTHONPATH": path},
        capture_output=True,
        timeout=patient(300),
    )
    return process.returncode == 0


@pytest.mark.tier("nightly")
def test_a_killed_driver_loses_and_duplicates_nothing(log, tmp_path):
    """The JVM is killed at each kill point and step of the checkpoint; a new one continues."""
    sent: list[bytes] = []
    kill_points = spark_kill_points.SINK + spark_kill_points.CHECKPOINT
    for number, kill_point in enumerate(kill_points):
        sent += put(tmp_path / "source", number)
        spark_kill_points.order(tmp_path / "kills", kill_point)
        run_in_application(tmp_path)
        assert not (tmp_path / "kills" / kill_point).exists(), f"no process came to {kill_point!r}"
        assert any(run_in_application(tmp_path) for _ in range(3))
        assert everything(log) == sorted(sent), f"after a kill {kill_point}"
    tell(f"{len(kill_points)} drivers killed, 0 lost, 0 duplicated of {len(sent)}")
