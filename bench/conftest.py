"""What the benchmarks share: batches, logs, other processes, and facts beside the times.

Every benchmark names its floor: another benchmark of the same run, and the least
number of its operations that the work needs.  `report.py` computes the ratio.
"""

from __future__ import annotations

import multiprocessing
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import quantiles
from typing import Any

import pytest

import embedlog
from embedlog import batch
from embedlog.api import Log
from embedlog.batch import EncodedBatch
from embedlog.files import WakePage

ROWS = 1000
PAIRS = 1500
"""Appends whose delay another process measures."""
SPAWN = multiprocessing.get_context("spawn")
# The present, since retention runs and would delete old records.
NOW = int(time.time() * 1000)


@pytest.fixture(scope="session")
def thousand() -> EncodedBatch:
    """1,000 records of 100-byte values and 10-byte keys, encoded: the batch of the budget."""
    keys = [b"k%09d" % number for number in range(ROWS)]
    return batch.encode_lists([b"v" * 100] * ROWS, keys, NOW)


@pytest.fixture(scope="session")
def single() -> EncodedBatch:
    """One record of the same size."""
    return batch.encode_lists([b"v" * 100], [b"k%09d" % 7], NOW)


@pytest.fixture(autouse=True)
def remove_files(tmp_path: Path) -> Iterator[None]:
    """Remove what a benchmark wrote, so that its pages leave memory to the next one."""
    yield
    shutil.rmtree(tmp_path)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """An empty log with the defaults; verified after the benchmark."""
    with embedlog.open(tmp_path / "log") as log:
        yield log
        assert log.housekeeping.verify() == []


@pytest.fixture
def note(benchmark: Any) -> Callable[..., None]:
    """Attach facts: ``records`` and ``bytes`` of one call, ``floor`` and ``floors`` of it."""

    def note(**facts: Any) -> None:
        benchmark.extra_info.update(facts)

    return note


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The times when this thread published appends: after the commit, before the wake."""
    stamps: list[int] = []
    advance, appender = WakePage.advance, threading.get_ident()

    def stamped(page: WakePage) -> None:
        if threading.get_ident() == appender:  # not the housekeeping of another log
            stamps.append(time.perf_counter_ns())
        advance(page)

    monkeypatch.setattr(WakePage, "advance", stamped)
    return stamps


def delays(called: list[int], published: list[int], seen: list[int]) -> dict[str, float]:
    """Return quantiles of the delays in µs: from the publication, and from the call."""
    quantile_us = {}
    for name, begins in (("", published), ("from_call_", called)):
        cuts = quantiles([end - begin for begin, end in zip(begins, seen, strict=True)], n=100)
        quantile_us |= {f"{name}p50_us": cuts[49] / 1000, f"{name}p99_us": cuts[98] / 1000}
    return {name: round(value, 1) for name, value in quantile_us.items()}


@pytest.fixture
def measure_delays(
    benchmark: Any, note: Callable[..., None], published: list[int]
) -> Callable[..., list[int]]:
    """Append beside a process that sleeps; note how soon it saw each append.

    ``target(*arguments, pipe)`` sends a message when it is ready, and then a list of times.
    """

    def measure(append: Callable[[], object], target: Any, *arguments: Any) -> list[int]:
        sent: list[int] = []

        def append_one() -> None:
            time.sleep(0.0015)  # until the process sleeps again
            sent.append(time.perf_counter_ns())
            append()

        with ExitStack() as processes:
            pipe = start_process(processes, target, *arguments)
            pipe.recv()
            benchmark.pedantic(append_one, rounds=PAIRS)
            seen: list[int] = pipe.recv()
        note(**delays(sent, published[-PAIRS:], seen))
        assert len(seen) == PAIRS
        return seen

    return measure


def start_process(processes: ExitStack, target: Any, *arguments: Any) -> Connection:
    """Spawn a process that runs ``target(*arguments, pipe)``; return the other end of its pipe."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(*arguments, theirs))
    process.start()
    theirs.close()
    processes.callback(process.join)
    return ours


def anonymous_kib() -> int:
    """Return the private memory of this process; the kernel can drop maps of files at any time."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory, thousand: EncodedBatch) -> Iterator[Log]:
    """1.6 M records in three sealed segments of 64 MiB and an active one."""
    folder = tmp_path_factory.mktemp("filled")
    with embedlog.open(folder / "log") as log:
        log.create_topic("t", config={"segment.bytes": 64 << 20})
        part = log.partition("t", 0)
        for _ in range(100):
            part.append([thousand] * 16)
        yield log
        assert log.housekeeping.verify() == []
    shutil.rmtree(folder)
