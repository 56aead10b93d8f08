"""The planner of Spark's JVM dies, is stopped or prints garbage: no query notices, none hangs."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import planner_faults
from support.forks import tell, until
from support.patience import patient
from support.spark_rounds import EXCEPTIONS, OFTEN, ROUNDS, Rounds
from support.spark_session import faults_of

import embedlog
from embedlog.api import Log
from embedlog.spark.query_planner import QueryPlanner

pytestmark = pytest.mark.parametrize("reader", ["jvm"], indirect=True)

TIMEOUT = "spark.embedlog.planner.timeout"
MESSAGE = "(?s)embedlog.errors.{}: .*{}"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        yield log
        assert log.verify() == []


@pytest.fixture
def rounds(spark: Any, log: Log, tmp_path: Path) -> Rounds:
    return Rounds(spark, log, tmp_path)


@pytest.fixture
def faults(spark: Any) -> Iterator[Path]:
    """The directory of faults, which is gone after the test: the session serves others, too."""
    directory = faults_of(spark)
    directory.mkdir()
    (directory / "journal").touch()
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def planner_of(spark: Any) -> Callable[[], int]:
    """Return the pid of the session's planner, or 0."""
    jvm = spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid()

    def planner_of() -> int:
        for children in Path(f"/proc/{jvm}/task").glob("*/children"):
            for pid in children.read_text().split():
                if b"embedlog.spark.planner" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
        return 0

    return planner_of


@pytest.fixture
def timeout(spark: Any) -> Iterator[None]:
    """A planner is silent for too long sooner than a user would like it."""
    spark.conf.set(TIMEOUT, f"{int(patient(5))}s")
    yield
    spark.conf.unset(TIMEOUT)


def points() -> list[tuple[str, int]]:
    """Return where to kill, and after how many calls."""
    return [
        (f"{when} {method}", skip)
        for method in ROUNDS
        for when in ("before", "after")
        for skip in ((0, 1) if method in OFTEN else (0,))
    ]


FIRST = {("after latest_offset", 1), ("before plan_batch", 0)}
"""Those for the tier `test`."""


def test_every_method_of_the_planner_has_a_round(reader: str) -> None:
    assert set(QueryPlanner.METHODS) == ROUNDS.keys() | EXCEPTIONS.keys()
    assert not ROUNDS.keys() & EXCEPTIONS.keys()


@pytest.mark.parametrize(
    ("point", "skip"),
    [
        pytest.param(*case, marks=pytest.mark.tier("test" if case in FIRST else "all"))
        for case in points()
    ],
)
def test_no_query_notices_that_its_planner_is_killed(rounds, faults, point, skip):
    """Each record is read and copied once, and the successor releases the lease."""
    method = point.split()[1]
    for round_ in ROUNDS[method]:
        planner_faults.order(faults, point, skip=skip)
        round_(rounds)
        assert not (faults / point).exists(), f"no planner came to {point!r}"
        (faults / "journal").write_text("")
        # Nobody asks a planner again to close a stream: the lease ends by its time.
        left = rounds.leases_of_streams()
        assert len(left) <= (point == "before close_stream"), left
        for name in left:
            rounds.end_lease(name)
