"""How long does it take to open a log after a clean close, and after a kill?

`EMBEDLOG_BENCH_GB=10` stores ten gigabytes before the kill; the default is one.
"""

import multiprocessing
import os
import shutil
import signal

import pytest

import embedlog
from embedlog import batch

GIGABYTES = int(os.environ.get("EMBEDLOG_BENCH_GB", "1"))


@pytest.fixture(scope="module")
def thousand_partitions(tmp_path_factory, single):
    path = tmp_path_factory.mktemp("open") / "log"
    with embedlog.open(path) as log:
        log.create_topic("t", partitions=1000)
        for number in range(1000):
            log.partition("t", number).append([single])
    return path


def bench_open_clean(benchmark, note, thousand_partitions):
    """1,000 partitions, closed by their last user."""
    opened = []

    def close_last():
        while opened:
            opened.pop().close()

    def open_log():
        opened.append(embedlog.open(thousand_partitions))

    note(partitions=1000)
    benchmark.pedantic(open_log, setup=close_last, rounds=20, warmup_rounds=2)
    assert opened[0].root.startup_report == []
    assert opened[0].partition("t", 999).end_offset() == 1
    close_last()


def bench_ends_of_all(benchmark, note, thousand_partitions):
    """The ends of all 1,000 partitions, from a handle that never saw them."""
    with embedlog.open(thousand_partitions) as log:

        def read_ends():
            log.root._partitions.clear()
            return sum(log.partition("t", number).end_offset() for number in range(1000))

        note(partitions=1000)
        assert benchmark.pedantic(read_ends, rounds=10, warmup_rounds=1) == 1000


def bench_length_of_many_partitions(benchmark, note, tmp_path):
    """The first `len` of a topic of 20,000 partitions that were never written to."""
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t", partitions=20_000)
    note(partitions=20_000)

    def length():
        with embedlog.open(tmp_path / "log", maintenance=False) as log:
            return len(log.topic("t"))

    assert benchmark.pedantic(length, rounds=5) == 0


def append_and_die(path, topic):
    log = embedlog.open(path)
    log.partition(topic, 0).append([batch.encode_lists([b"last"], None, 5)])
    os.kill(os.getpid(), signal.SIGKILL)


def kill_writer(path, topic):
    process = multiprocessing.get_context("spawn").Process(
        target=append_and_die, args=(path, topic)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def bench_reopen_after_kill(benchmark, note, tmp_path, thousand):
    """The only process was killed while it wrote."""
    path, total, opened = tmp_path / "log", 0, []
    if shutil.disk_usage(tmp_path).free < GIGABYTES * 3 << 30:
        pytest.skip(f"{3 * GIGABYTES} GiB must be free")
    with embedlog.open(path) as log:
        log.create_topic("t")
        part, many = log.partition("t", 0), [thousand] * 64
        for _ in range(GIGABYTES * 10**9 // (64 * thousand.size)):
            total = part.append(many)[-1].next_offset

    def close_and_kill():
        while opened:
            opened.pop().close()
        kill_writer(path, "t")

    def open_log():
        opened.append(embedlog.open(path))
        return opened[-1].partition("t", 0).end_offset()

    note(bytes=GIGABYTES * 10**9, records=total)
    end = benchmark.pedantic(open_log, setup=close_and_kill, rounds=5, warmup_rounds=1)
    assert end == total + 6
    while opened:
        opened.pop().close()
    shutil.rmtree(path)


def bench_reopen_after_kill_with_1000_partitions(benchmark, note, thousand_partitions):
    """The same with 1,000 partitions."""
    opened = []

    def close_and_kill():
        while opened:
            opened.pop().close()
        kill_writer(thousand_partitions, "t")

    note(partitions=1000)
    benchmark.pedantic(
        lambda: opened.append(embedlog.open(thousand_partitions)), setup=close_and_kill, rounds=5
    )
    assert opened[0].partition("t", 0).end_offset() >= 6
    opened.pop().close()


def bench_import(benchmark):
    """`import embedlog` in a new interpreter."""
    import subprocess
    import sys

    def run_code(code):
        return subprocess.run([sys.executable, "-c", code], check=True).returncode

    bare = min(_seconds(lambda: run_code("pass")) for _ in range(5))
    assert benchmark.pedantic(run_code, ("import embedlog",), rounds=10, warmup_rounds=1) == 0
    benchmark.extra_info["interpreter_ms"] = round(bare * 1000, 1)


def _seconds(call):
    import time

    began = time.perf_counter()
    call()
    return time.perf_counter() - began
