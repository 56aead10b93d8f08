"""What the benchmarks share: the batch of the budget, and how a fact is noted beside a time.

Every benchmark names its floor: another benchmark of the same run, and how
many of its operations the work needs at the very least.  `report.py` divides.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
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
# Retention works while the benches run: what is dated longer ago than it keeps would go.
NOW = int(time.time() * 1000)


@pytest.fixture(scope="session")
def thousand() -> EncodedBatch:
    """1,000 records of 100-byte values and 10-byte keys, encoded: the batch of the budget."""
    keys = [b"k%09d" % number for number in range(ROWS)]
    return batch.encode_lists([b"v" * 100] * ROWS, keys, NOW)


@pytest.fixture(scope="session")
def single() -> EncodedBatch:
    """One such record."""
    return batch.encode_lists([b"v" * 100], [b"k%09d" % 7], NOW)


@pytest.fixture(autouse=True)
def removed(tmp_path: Path) -> Iterator[None]:
    """What a benchmark wrote goes with it: its pages would fill the memory the next one needs."""
    yield
    shutil.rmtree(tmp_path)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """An empty log with the defaults; healthy when the benchmark is done with it."""
    with embedlog.open(tmp_path / "log") as log:
        yield log
        assert log.verify() == []


@pytest.fixture
def note(benchmark: Any) -> Callable[..., None]:
    """Attach facts: ``records`` and ``bytes`` of one call, ``floor`` and ``floors`` of it."""

    def note(**facts: Any) -> None:
        benchmark.extra_info.update(facts)

    return note


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """When this thread published what it appended: the commit is over, nobody is woken yet."""
    stamps: list[int] = []
    advance, appender = WakePage.advance, threading.get_ident()

    def stamped(page: WakePage) -> None:
        if threading.get_ident() == appender:  # not the housekeeping of another log
            stamps.append(time.perf_counter_ns())
        advance(page)

    monkeypatch.setattr(WakePage, "advance", stamped)
    return stamps


def delays(called: list[int], published: list[int], seen: list[int]) -> dict[str, float]:
    """Return what the table has of a wake, in µs: from the publication, and from the call."""
    found = {}
    for name, begun in (("", published), ("from_call_", called)):
        cuts = quantiles([two - one for one, two in zip(begun, seen, strict=True)], n=100)
        found |= {f"{name}p50_us": cuts[49] / 1000, f"{name}p99_us": cuts[98] / 1000}
    return {name: round(value, 1) for name, value in found.items()}


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory, thousand: EncodedBatch) -> Iterator[Log]:
    """Three sealed segments of 64 MiB and one that is still written: 1.6 M records."""
    folder = tmp_path_factory.mktemp("filled")
    with embedlog.open(folder / "log") as log:
        log.create_topic("t", config={"segment.bytes": 64 << 20})
        part = log.partition("t", 0)
        for _ in range(100):
            part.append([thousand] * 16)
        yield log
        assert log.verify() == []
    shutil.rmtree(folder)
