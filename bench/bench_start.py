"""How much CPU time does the start of a program or a command take?

It is that of whole processes; a bare Python is the floor.
"""

import itertools
import os
import resource
import subprocess
import sys

import pytest

import embedlog
from embedlog.testing import open_log

LMDB = """
import lmdb, os
with lmdb.open(os.environ["EMBEDLOG_ROOT"] + ".lmdb") as env, env.begin(write=True) as txn:
    txn.put(b"k", b"v")
"""
SQLITE = """
import os, sqlite3
with sqlite3.connect(os.environ["EMBEDLOG_ROOT"] + ".sqlite") as database:
    database.execute("create table if not exists t (k, v)")
    database.execute("insert into t values (?, ?)", (b"k", b"v"))
"""
OPEN = "import embedlog, os; log = embedlog.open(os.environ['EMBEDLOG_ROOT']); "
STARTS = {
    "python": ["-c", "pass"],
    "import": ["-c", "import embedlog"],
    "open": ["-c", OPEN + "log.topics()"],
    "first record": ["-c", OPEN + "print(log.producer().send('t', b'v', key=b'k').result())"],
    "first read": ["-c", OPEN + "print(log.topic('t')[0])"],
    "pyarrow": ["-c", "import pyarrow"],
    "topics list": ["-m", "embedlog", "topics", "list"],
    "tail": ["-m", "embedlog", "tail", "t"],
    "consume": ["-m", "embedlog", "consume", "t"],
    "produce": ["-m", "embedlog", "produce", "t"],
    "groups lag": ["-m", "embedlog", "groups", "lag", "g"],
    "lmdb": ["-c", LMDB],
    "sqlite": ["-c", SQLITE],
}


def cpu_seconds(arguments, environment):
    """Run a program, and return its CPU time; `os.times` has a resolution of 10 ms only."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *arguments],
        input=b"a line\n",
        stdout=subprocess.DEVNULL,
        env=environment,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("start", STARTS)
def bench_start(benchmark, note, tmp_path, start):
    """Whole processes, whose modules are compiled, as after an installation by pip.

    To the first record 60 ms more than a bare Python, and 120 ms of CPU for a command.
    """
    environment = {**os.environ, "EMBEDLOG_ROOT": str(tmp_path / "log")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t")
        with log.producer() as producer:
            producer.send_batch("t", [b"%d" % number for number in range(10)])
        with log.consumer("t", group_id="g", auto_offset_reset="earliest") as consumer:
            consumer.poll()
            consumer.commit()
    seconds = []
    benchmark.pedantic(
        lambda: seconds.append(cpu_seconds(STARTS[start], environment)),
        rounds=10,
        warmup_rounds=1,
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
