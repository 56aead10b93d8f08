"""One Spark session for all tests of the room, and short ways to a log and to a reader of it."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clock import START
from support.sessions import begin
from support.sparks import ALL, read_all

import embedlog
from embedlog.api import Log
from embedlog.spark.batch_scan import plan_batch
from embedlog.spark.source_options import parse


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests that use the session in one process: each would begin its own."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("spark"))


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """A log with a topic "t" of two partitions; healthy when the test is done with it."""
    # Its records are of 2023: who keeps house would delete them in the middle of a slow test.
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("t", partitions=2)
        yield log
        assert log.verify() == []


@pytest.fixture
def send(log: Log) -> Callable[..., None]:
    """Append records, each partition's in one batch: ``send("t", {0: [b"a"], 1: [b"b"]})``."""

    def send(topic: str, values: dict[int, list[Any]], at: int = START, **facts: Any) -> None:
        with log.producer() as producer:
            for partition, some in values.items():
                for step, value in enumerate(some):
                    value = b"%d" % value if isinstance(value, int) else value
                    producer.send(
                        topic, value, partition=partition, timestamp_ms=at + step, **facts
                    )

    return send


@pytest.fixture
def options(log: Log) -> Callable[..., dict[str, str]]:
    """Options of a reader of the log; of topic "t" unless they say something else."""

    def options(**given: Any) -> dict[str, str]:
        names = {"subscribe", "subscribePattern", "assign"} & given.keys()
        least = {"path": log.path} | ({} if names else {"subscribe": "t"})
        return {**least, **{name: str(value) for name, value in given.items()}}

    return options


@pytest.fixture
def rows(options: Callable[..., dict[str, str]]) -> Callable[..., list[dict[str, Any]]]:
    """What a batch query reads, without Spark: planned here, and read here as in an executor."""

    def rows(names: tuple[str, ...] = ALL, **given: Any) -> list[dict[str, Any]]:
        return read_all(plan_batch(parse(options(**given))), names)

    return rows


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session on two cores; the one that all tests share."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("there is no Java")
    with warnings.catch_warnings():
        # Of pyspark's own imports and sockets.
        warnings.simplefilter("ignore")
        made = begin(tmp_path_factory.mktemp("spark"))
    yield made
    made.stop()
