"""Fixtures for pytest: a log, its clock, its disk, and a bootstrap address for Kafka's clients.

pytest finds this module through its entry point; nothing needs to be imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from embedlog.api import Log
    from embedlog.record import Record
    from embedlog.testing import DiskFaults, ManualClock


@pytest.fixture
def embedlog_clock() -> ManualClock:
    """The clock of `embedlog_log`, which stands still until the test moves it."""
    from embedlog.testing import ManualClock

    return ManualClock()


@pytest.fixture
def embedlog_faults() -> DiskFaults:
    """What makes appends to `embedlog_log` fail, until the end of the test."""
    from embedlog.testing import DiskFaults

    return DiskFaults()


@pytest.fixture
def embedlog_log(
    tmp_path: Path, embedlog_clock: ManualClock, embedlog_faults: DiskFaults
) -> Iterator[Log]:
    """An open, empty log of its own for each test, without background jobs."""
    from embedlog.testing import open_log

    log = open_log(tmp_path / "embedlog", clock=embedlog_clock, faults=embedlog_faults)
    with log:
        yield log
        embedlog_faults.clear()


@pytest.fixture
def kafka_bootstrap(embedlog_log: Log) -> str:
    """The address of `embedlog_log` for the clients of `embedlog.kafka`: ``embedlog:///path``."""
    return f"embedlog://{embedlog_log.path}"


@pytest.fixture
def records_of(embedlog_log: Log) -> Callable[..., list[Record]]:
    """Return the records of a topic: ``records_of("orders")``.

    First flushes the producers of this process.  With ``count`` it waits until the topic has
    that many records, and fails after ``timeout`` seconds.
    """

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
