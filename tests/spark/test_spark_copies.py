"""Copies of a growing topic by a query whose processes are killed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import spark_kill_points
from support.forks import tell
from support.spark_copy import STARTS, InDriver, InSession, Matrix
from support.spark_rounds import ROUNDS, Rounds

import embedlog
from embedlog.api import Log

WORKERS = spark_kill_points.SOURCE + spark_kill_points.SINK
PLANNER = tuple(
    f"{when} {method}"
    for method, rounds in ROUNDS.items()
    if Rounds.copy_what_there_is in rounds
    for when in ("before", "after")
)
"""Points in the process that plans for the JVM."""
DRIVERS = WORKERS + spark_kill_points.CHECKPOINT
READ = ("within read",)
PYTHON = pytest.mark.parametrize("reader", ["python"], indirect=True)
"""These kill processes that only the Python source has, whatever the session prefers."""
FIRST = ("before partitions", "after partitions", "before publish", "within publish")
"""Kill points after the plan of a first batch, which may be empty and have no tasks."""


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        yield log
        assert log.housekeeping.verify() == []


def run_with_kills(
    log: Log,
    directory: Path,
    runner: Any,
    kill_points: list[str],
    run: Any = Matrix.run,
    *,
    typed: bool = False,
) -> Matrix:
    """Kill a process at each kill point, and then stop the query."""
    matrix = Matrix(log, directory, runner, typed)
    try:
        run(matrix, kill_points)
    finally:
        runner.stop()
        tell(matrix.report())
    return matrix


def shuffled(kill_points: tuple[str, ...], times: int) -> list[str]:
    """Return kill points in random order, those of new queries first: these copy everything."""
    repeated = list(kill_points) * times
    random.Random(1).shuffle(repeated)
    return sorted(repeated, key=lambda kill_point: kill_point.split()[-1] not in STARTS)


@PYTHON
@pytest.mark.parametrize("typed", [False, True], ids=["bytes", "columns"])
def test_a_copy_whose_processes_are_killed_has_every_record_once(spark, log, tmp_path, typed):
    """The source, a reading task and the commit are killed; records of a key stay in order."""
    kill_points = ["after latestOffset", "within read", "after publish"]
    runner = InSession(spark_kill_points.register(spark), tmp_path)
    matrix = run_with_kills(log, tmp_path, runner, kill_points, typed=typed)
    assert matrix.kills.total() == len(kill_points)


@pytest.mark.tier("nightly")
@PYTHON
def test_a_copy_whose_processes_are_killed_anywhere(spark, log, tmp_path):
    """The kills come before and after each step of reads and writes, in random order."""
    kill_points = shuffled(WORKERS, 7)
    runner = InSession(spark_kill_points.register(spark), tmp_path)
    assert run_with_kills(log, tmp_path, runner, kill_points).kills.total() >= 100


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("jvm_only", [True, False], ids=["its Python goes on", "with its Python"])
@pytest.mark.parametrize("typed", [False, True], ids=["bytes", "columns"])
def test_a_copy_whose_driver_is_killed_anywhere(log, tmp_path, jvm_only, typed):
    """The JVM is killed at the same points, and when a file appears in the checkpoint."""
    kill_points = shuffled(DRIVERS, 1)
    run_with_kills(log, tmp_path, InDriver(tmp_path, jvm_only), kill_points, typed=typed)


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("reader", ["jvm"], indirect=True)
@pytest.mark.parametrize("sink", ["the planner's", "killable"])
def test_a_copy_that_the_jvm_reads_whose_python_is_killed_anywhere(
    spark, faults, log, tmp_path, sink
):
    """A planner that is killed ends no query; a task or a sink that is killed does."""
    runner = InSession(spark_kill_points.register(spark), tmp_path, "jvm")
    points, times = (PLANNER, 6) if sink != "killable" else (spark_kill_points.SINK + READ, 7)
    kills = run_with_kills(log, tmp_path, runner, shuffled(points, times)).kills
    assert kills.total() == len(points) * times


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("jvm_only", [True, False], ids=["its planner goes on", "with its planner"])
def test_a_copy_that_the_jvm_reads_whose_driver_is_killed_anywhere(log, tmp_path, jvm_only):
    """The JVM is killed in each call of its planner, in a task, and by the checkpoint."""
    runner = InDriver(tmp_path, jvm_only, "jvm")
    kill_points = shuffled((*PLANNER, *READ, *spark_kill_points.CHECKPOINT), 1)
    run_with_kills(log, tmp_path, runner, kill_points)


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("reader", ["jvm", "python"])
def test_a_copy_whose_executors_are_killed(log, tmp_path, reader):
    """Their JVMs read, and Spark starts others; the query goes on."""
    runner = InDriver(tmp_path, True, reader, "local-cluster[2,1,1024]")
    run_with_kills(log, tmp_path, runner, ["within read"] * 4)


@pytest.mark.tier("nightly")
@PYTHON
def test_a_copy_that_starts_at_the_end_continues_from_there(spark, log, tmp_path):
    """After a kill, records that arrived after the plan of the first batch are not skipped."""
    runner = InSession(spark_kill_points.register(spark), tmp_path)
    run_with_kills(log, tmp_path, runner, shuffled(FIRST, 4), Matrix.run_from_the_end)


@pytest.mark.tier("nightly")
def test_a_copy_that_starts_at_the_end_continues_after_its_driver_was_killed(log, tmp_path):
    """The checkpoint may have only the offsets of the first batch."""
    kill_points = [*FIRST, *spark_kill_points.CHECKPOINT]
    run_with_kills(log, tmp_path, InDriver(tmp_path), kill_points, Matrix.run_from_the_end)
