"""How long does a snapshot take, and how much does a backup slow down those who write?"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import SPAWN

import embedlog
from embedlog import batch

WRITERS = 8
OLD_MB = 128
"""What there is to copy, besides what the writers append."""
WINDOW_SECONDS, WINDOWS = 3.0, 12
"""Windows without and with a backup take turns: the machine is never quiet."""


@pytest.mark.parametrize("partitions", [10, 1000])
def bench_snapshot(benchmark: Any, note: Any, tmp_path: Path, partitions: int) -> None:
    """Take a snapshot of partitions that are on the disk already, and delete it."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("t", partitions)
        for number in range(partitions):
            log.partition("t", number).append([batch.encode_lists([b"v"], None, 1)])
        log.flush()

        def take() -> None:
            log.snapshot("s")
            log.snapshots.delete("s")

        note(partitions=partitions)
        benchmark.pedantic(take, rounds=10, warmup_rounds=1)


def bench_backup_again(benchmark: Any, note: Any, tmp_path: Path) -> None:
    """A backup of 1,000 segments of which the target has all."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        encoded = batch.encode_lists([b"v" * 100] * 10, None, 1)
        log.create_topic("t", 1, {"segment.bytes": encoded.size, "retention.ms": -1})
        log.partition("t", 0).append([encoded] * 1000)
        log.backup(tmp_path / "backup")
        note(segments=1000)
        result = benchmark.pedantic(lambda: log.backup(tmp_path / "backup"), rounds=5)
        assert result.copied_files == 0


def write(path: str, number: int, count: Any, stop: Any) -> None:
    """Append records of 100 bytes one by one, and count them."""
    with embedlog.open(path, maintenance=False) as log:
        part = log.partition("t", number)
        while not stop.is_set():
            part.append([batch.encode_lists([b"v" * 100], None, int(time.time() * 1000))])
            count.value += 1


def bench_backup_beside_writers(benchmark: Any, note: Any, tmp_path: Path) -> None:
    """The appends of eight processes, in windows without and with `embedlog backup`, in turns."""
    path = tmp_path / "log"
    with embedlog.open(path, maintenance=False) as log:
        config = {"segment.bytes": 16 << 20, "retention.ms": -1}
        log.create_topic("t", WRITERS, config)
        log.create_topic("old", 1, config)
        log.partition("old", 0).append([batch.encode_lists([b"v" * 1000] * 1000, None, 1)] * OLD_MB)
        counts = [SPAWN.Value("q", 0, lock=False) for _ in range(WRITERS)]
        stop = SPAWN.Event()
        writers = [
            SPAWN.Process(target=write, args=(str(path), number, counts[number], stop))
            for number in range(WRITERS)
        ]
        for writer in writers:
            writer.start()
        while not all(count.value for count in counts):
            time.sleep(0.1)

        def window() -> float:
            before, begin = sum(count.value for count in counts), time.perf_counter()
            time.sleep(WINDOW_SECONDS)
            return (sum(count.value for count in counts) - before) / (time.perf_counter() - begin)

        def window_of_backups() -> float:
            """As `window`, beside backups, of which the last one is killed."""
            loop = (
                f'while :; do rm -rf "$0"; {sys.executable} -m embedlog -r "$1" backup "$0"; done'
            )
            command = ["sh", "-c", loop, str(tmp_path / "backup"), str(path)]
            process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
            try:
                return window()
            finally:
                os.killpg(process.pid, signal.SIGKILL)
                done.append(len((process.communicate()[0] or b"").splitlines()))

        ratios: list[float] = []
        done: list[int] = []

        def measure() -> None:
            for _ in range(WINDOWS):
                alone = window()
                ratios.append(window_of_backups() / alone)

        try:
            benchmark.pedantic(measure, rounds=1)
        finally:
            stop.set()
            for writer in writers:
                writer.join()
        left = statistics.median(ratios)
        note(left=round(left, 3), backups=sum(done), writers=WRITERS)
        print(
            f"with a backup writers have {left:.3f} of their speed; {sum(done)} backups; {ratios}"
        )
