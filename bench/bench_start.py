"""How much CPU time does the start of a program or a command take?

It is that of whole processes; a bare Python is the floor.
"""

import itertools
import resource
import subprocess
import sys

import pytest

import embedlog
from embedlog.testing import open_log

STARTS = {
    "python": ["-c", "pass"],
    "import": ["-c", "import embedlog"],
    "open": ["-c", "import embedlog, os; embedlog.open(os.environ['EMBEDLOG_ROOT']).topics()"],
    "command": ["-m", "embedlog", "topics", "list"],
}


def cpu_seconds(arguments, environment):
    """Return the CPU time of a program; `os.times` has a resolution of 10 ms only."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *arguments], stdout=subprocess.DEVNULL, env=environment, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("start", STARTS)
def bench_start(benchmark, note, tmp_path, monkeypatch, start):
    """Whole processes; importing the library and opening a log may take 60 ms of it."""
    monkeypatch.setenv("EMBEDLOG_ROOT", str(tmp_path / "log"))
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t")
    seconds = []
    benchmark.pedantic(
        lambda: seconds.append(cpu_seconds(STARTS[start], None)), rounds=10, warmup_rounds=1
    )
    note(cpu_ms=min(seconds) * 1000)
    assert min(seconds) > 0


def bench_first_record_of_a_test(benchmark, note, tmp_path):
    """What a fixture costs: an empty log for a test, its first record, and its end (20 ms)."""
    numbers = itertools.count()

    def run():
        with open_log(tmp_path / str(next(numbers))) as log:
            log.producer().send("orders", b"1").result()
            assert log.topic("orders")[0].value == b"1"

    benchmark.pedantic(run, rounds=30, warmup_rounds=3)
    note(ms=benchmark.stats.stats.median * 1000)
