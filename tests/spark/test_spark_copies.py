"""Kills the processes of a query that copies a growing topic, and compares the copy."""

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
"""In a first batch after it was planned: it may be empty, and then no task stages anything."""


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        yield log
        assert log.verify() == []


def killed(
    log: Log, directory: Path, runner: Any, places: list[str], run: Any = Matrix.run
) -> Matrix:
    """Kill a process at each of these places, and stop the query in any case."""
    matrix = Matrix(log, directory, runner)
    try:
        run(matrix, places)
    finally:
        runner.stop()
        tell(matrix.report())
    return matrix


def shuffled(places: tuple[str, ...], times: int) -> list[str]:
    """Return places in random order, but first those of new queries, which copy everything."""
    repeated = list(places) * times
    random.Random(1).shuffle(repeated)
    return sorted(repeated, key=lambda place: "initialOffset" not in place)


def test_a_copy_whose_processes_are_killed_has_every_record_once(spark, log, tmp_path):
    """The source's process, a reading task, and the committing process; keys keep their order."""
    places = ["after latestOffset", "within read", "after publish"]
    runner = InSession(spark_kill_points.register(spark), tmp_path)
    assert killed(log, tmp_path, runner, places).kills.total() == len(places)


@pytest.mark.tier("nightly")
def test_a_copy_whose_processes_are_killed_anywhere(spark, log, tmp_path):
    """Before and after each step of reading and of writing, in any order."""
    places = shuffled(WORKERS, 7)
    runner = InSession(spark_kill_points.register(spark), tmp_path)
    assert killed(log, tmp_path, runner, places).kills.total() >= 100


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("jvm_only", [True, False], ids=["its Python goes on", "with its Python"])
def test_a_copy_whose_driver_is_killed_anywhere(log, tmp_path, jvm_only):
    """The JVM is killed at the same places, and when a file appears in the checkpoint."""
    places = shuffled(DRIVERS, 1)
    killed(log, tmp_path, InDriver(tmp_path, jvm_only), places)


@pytest.mark.tier("nightly")
def test_a_copy_that_starts_at_the_end_continues_from_there(spark, log, tmp_path):
    """Records that arrive after its first batch was planned are not skipped after a kill."""
    runner = InSession(spark_kill_points.register(spark), tmp_path)
    killed(log, tmp_path, runner, shuffled(FIRST, 4), Matrix.run_from_the_end)


@pytest.mark.tier("nightly")
def test_a_copy_that_starts_at_the_end_continues_after_its_driver_was_killed(log, tmp_path):
    """Also if the checkpoint has only the offsets of the first batch."""
    places = [*FIRST, *spark_kill_points.CHECKPOINT]
    killed(log, tmp_path, InDriver(tmp_path), places, Matrix.run_from_the_end)
