"""Fixtures for pytest: a log, its clock, its disk, and a bootstrap address for Kafka's clients.

pytest finds this module through its entry point; nothing needs to be imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import pytest

if TYPE_CHECKING:
    from embedlog.api import Log
    from embedlog.record import Record
    from embedlog.server.server import KafkaServer
    from embedlog.testing import DiskFaults, ManualClock


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of ``pytest.ini`` and ``pyproject.toml``."""
    parser.addini(
        "embedlog_scope",
        "How long a log of embedlog's fixtures lasts: function (the default), class, module, "
        "package or session.",
        default="function",
    )


def _scope(fixture_name: str, config: pytest.Config) -> Any:
    """Return the scope of the fixtures that belong to one log."""
    return config.getini("embedlog_scope")


@pytest.fixture(scope=_scope)
def embedlog_clock() -> ManualClock:
    """The clock of `embedlog_log`, which stands still until the test moves it."""
    from embedlog.testing import ManualClock

    return ManualClock()


@pytest.fixture(scope=_scope)
def embedlog_faults() -> DiskFaults:
    """What makes appends to `embedlog_log` fail, for as long as that log lasts."""
    from embedlog.testing import DiskFaults

    return DiskFaults()


@pytest.fixture(scope=_scope)
def embedlog_log(
    request: pytest.FixtureRequest, embedlog_clock: ManualClock, embedlog_faults: DiskFaults
) -> Iterator[Log]:
    """An open, empty log of its own for each test, without background jobs.

    With ``embedlog_scope = session`` in the settings of pytest, it is one log for all tests.
    """
    from embedlog.testing import open_log

    if request.scope == "function":
        directory: Path = request.getfixturevalue("tmp_path") / "embedlog"
    else:
        directory = request.getfixturevalue("tmp_path_factory").mktemp("embedlog")
    with open_log(directory, clock=embedlog_clock, faults=embedlog_faults) as log:
        yield log
        embedlog_faults.clear()


@pytest.fixture(scope=_scope)
def kafka_bootstrap(embedlog_log: Log) -> str:
    """The address of `embedlog_log` for the clients of `embedlog.kafka`: ``embedlog:///path``."""
    return f"embedlog://{quote(embedlog_log.path)}"


@pytest.fixture(scope=_scope)
def kafka_server(embedlog_log: Log) -> Iterator[KafkaServer]:
    """A server of Kafka's protocol on `embedlog_log`, for clients in any language.

    They connect to ``kafka_server.bootstrap_servers``.
    """
    from embedlog.server.server import serve

    with serve(embedlog_log) as server:
        yield server


@pytest.fixture
def records_of(request: pytest.FixtureRequest, embedlog_log: Log) -> Callable[..., list[Record]]:
    """Return the records of a topic: ``records_of("orders")``.

    First flushes the producers of this process.  With ``count`` it waits until the topic has
    that many records, and fails after ``timeout`` seconds.
    """
    if "kafka_bootstrap" in request.fixturenames:
        address = str(request.getfixturevalue("kafka_bootstrap"))
        if embedlog_log.path not in unquote(address):
            pytest.fail(
                f"kafka_bootstrap is {address!r}, but records_of reads the log of the fixture "
                f"embedlog_log, {embedlog_log.path}. Delete the suite's own kafka_bootstrap.",
                pytrace=False,
            )

    def read(topic: str, count: int = 0, timeout: float = 10.0) -> list[Record]:
        from embedlog.producer import flush_producers

        flush_producers(embedlog_log.root, timeout)
        if count:
            _wait_for_records(embedlog_log, topic, count, timeout)
        return list(embedlog_log.topic(topic)) if topic in embedlog_log else []

    return read


def _wait_for_records(log: Log, topic: str, count: int, timeout: float) -> None:
    deadline, present = time.monotonic() + timeout, 0
    with log.consumer(topic, auto_offset_reset="earliest", metadata_max_age_ms=20) as consumer:
        while present < count:
            left = deadline - time.monotonic()
            if left <= 0:
                pytest.fail(f"Topic {topic} has {present} of {count} records after {timeout} s")
            present += sum(map(len, consumer.poll(timeout_ms=left * 1000).values()))
