"""Fixtures for the Spark tests: one session for all of them, a log, and readers of it."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clock import START
from support.jvm_tasks import JvmTasks
from support.spark_reads import ALL, read_all
from support.spark_session import begin, faults_of

import embedlog
from embedlog.api import Log
from embedlog.spark.input_partitions import plan_batch
from embedlog.spark.options import SourceOptions
from embedlog.spark.spark_session import READER

IN_PYTHON = ("test_rows_arrive_complete",)
"""The tests that the tier `test` runs with the reader in Python as well: a read.

`test_both_writers_write_the_same_rows` writes in Python.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that use a JVM in one worker; each worker would start its own.

    Those with a session take a second or more.  The tier `test` runs only those marked with it:
    a read and a write of each kind, and with the reader in Python only `IN_PYTHON`.
    """
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if {"spark", "jvm"} & set(fixtures):
            item.add_marker(pytest.mark.xdist_group("spark"))
        if "spark" in fixtures and _is_large(item):
            item.add_marker(pytest.mark.tier("all"))


def _is_large(item: pytest.Item) -> bool:
    if item.get_closest_marker("tier") is None:
        return True
    parameters = getattr(item, "callspec", None)
    in_python = parameters is not None and parameters.params.get("reader") == "python"
    return in_python and item.name.partition("[")[0] not in IN_PYTHON


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """A log with a topic "t" of two partitions, verified after the test."""
    # Its records are from 2023: retention would delete them in the middle of a slow test.
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("t", partitions=2)
        yield log
        assert log.housekeeping.verify() == []


@pytest.fixture
def sink_log(tmp_path: Path) -> Iterator[Log]:
    """A log with "t" of three partitions and "u" of one, verified after the test."""
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t", partitions=3)
        log.create_topic("u")
        yield log
        assert log.housekeeping.verify() == []


@pytest.fixture
def send(log: Log) -> Callable[..., None]:
    """Append the records of each partition in one batch: ``send("t", {0: [b"a"], 1: [b"b"]})``."""

    def send(topic: str, values: dict[int, list[Any]], at: int = START, **fields: Any) -> None:
        with log.producer() as producer:
            for partition, partition_values in values.items():
                for step, value in enumerate(partition_values):
                    value = b"%d" % value if isinstance(value, int) else value
                    producer.send(
                        topic, value, partition=partition, timestamp_ms=at + step, **fields
                    )

    return send


@pytest.fixture
def options(log: Log) -> Callable[..., dict[str, str]]:
    """Return options of a reader of the log: of topic "t" unless they select other topics."""

    def options(**overrides: Any) -> dict[str, str]:
        selection = {"subscribe", "subscribePattern", "assign"} & overrides.keys()
        required = {"path": log.path} | ({} if selection else {"subscribe": "t"})
        return {**required, **{name: str(value) for name, value in overrides.items()}}

    return options


@pytest.fixture
def rows(options: Callable[..., dict[str, str]]) -> Callable[..., list[dict[str, Any]]]:
    """Plan and read a batch query in this process, without Spark, and return its rows."""

    def rows(names: tuple[str, ...] = ALL, **overrides: Any) -> list[dict[str, Any]]:
        return read_all(plan_batch(SourceOptions.parse(options(**overrides))), names)

    return rows


@pytest.fixture(params=["jvm", "python"])
def reader(request: pytest.FixtureRequest) -> str:
    """The reader that serves the test; a test for one of them says so by parametrizing this."""
    return str(request.param)


@pytest.fixture
def spark(spark_session: Any, reader: str) -> Any:
    """The session that all tests share, with one reader and then with the other."""
    spark_session.conf.set(READER, reader)
    return spark_session


@pytest.fixture(scope="session")
def jvm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JvmTasks]:
    """A JVM that reads input partitions, without Spark."""
    tasks = JvmTasks(tmp_path_factory.mktemp("jvm"))
    yield tasks
    tasks.close()


@pytest.fixture
def faults(spark: Any) -> Iterator[Path]:
    """The directory of faults of the planner, which is gone after the test.

    The session serves other tests, too.
    """
    directory = faults_of(spark)
    directory.mkdir()
    (directory / "journal").touch()
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def spark_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session on two cores."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("Java is not installed")
    with warnings.catch_warnings():
        # The imports and sockets of pyspark cause warnings.
        warnings.simplefilter("ignore")
        spark = begin(tmp_path_factory.mktemp("spark"))
    yield spark
    spark.stop()
