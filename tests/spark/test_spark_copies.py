"""Copies of a growing topic by a query whose processes are killed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import spark_kill_points
from support.forks import tell
from support.spark_copy import InDriver, InSession, Matrix

import embedlog
from embedlog.api import Log

WORKERS = spark_kill_points.SOURCE + spark_kill_points.SINK
DRIVERS = WORKERS + spark_kill_points.CHECKPOINT
FIRST = ("before partitions", "after partitions", "before publish", "within publish")
"""Kill points after the plan of a first batch, which may be empty and have no tasks."""


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        yield log
        assert log.verify() == []


def run_with_kills(
    log: Log, directory: Path, runner: Any, kill_points: list[str], run: Any = Matrix.run
) -> Matrix:
    """Kill a process at each kill point, and then stop the query."""
    matrix = Matrix(log, directory, runner)
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
    return sorted(repeated, key=lambda kill_point: "initialOffset" not in kill_point)


def test_a_copy_whose_processes_are_killed_has_every_record_once(spark, log, tmp_path):
    """The source, a reading task and the commit are killed; records of a key stay in order."""
    kill_points = ["after latestOffset", "within read", "after publish"]
    runner = InSession(spark_kill_points.register(spark), tmp_path)
    assert run_with_kills(log, tmp_path, runner, kill_points).kills.total() == len(kill_points)


@pytest.mark.tier("nightly")
def test_a_copy_whose_processes_are_killed_anywhere(spark, log, tmp_path):
    """The kills come before and after each step of reads and writes, in random order."""
    kill_points = shuffled(WORKERS, 7)
    runner = InSession(spark_kill_points.register(spark), tmp_path)
    assert run_with_kills(log, tmp_path, runner, kill_points).kills.total() >= 100


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("jvm_only", [True, False], ids=["its Python goes on", "with its Python"])
def test_a_copy_whose_driver_is_killed_anywhere(log, tmp_path, jvm_only):
    """The JVM is killed at the same points, and when a file appears in the checkpoint."""
    kill_points = shuffled(DRIVERS, 1)
    run_with_kills(log, tmp_path, InDriver(tmp_path, jvm_only), kill_points)


@pytest.mark.tier("nightly")
def test_a_copy_that_starts_at_the_end_continues_from_there(spark, log, tmp_path):
    """After a kill, records that arrived after the plan of the first batch are not skipped."""
    runner = InSession(spark_kill_points.register(spark), tmp_path)
    run_with_kills(log, tmp_path, runner, shuffled(FIRST, 4), Matrix.run_from_the_end)


@pytest.mark.tier("nightly")
def test_a_copy_that_starts_at_the_end_continues_after_its_driver_was_killed(log, tmp_path):
    """The checkpoint may have only the offsets of the first batch."""
    kill_points = [*FIRST, *spark_kill_points.CHECKPOINT]
    run_with_kills(log, tmp_path, InDriver(tmp_path), kill_points, Matrix.run_from_the_end)
