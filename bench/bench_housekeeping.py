"""What does an append that somebody waits for cost while retention and compaction never pause?"""

import os
import signal
import threading
import time
from statistics import quantiles

import pytest

import embedlog
from embedlog import batch
from embedlog.maintenance import Maintenance, owner
from embedlog.maintenance.jobs import JOBS

CONFIG = {
    "cleanup.policy": "compact,delete",
    "segment.bytes": 4 << 20,
    "retention.bytes": 8 << 20,
    "retention.ms": -1,
    "min.cleanable.dirty.ratio": 0.01,
    "file.delete.delay.ms": 0,
}
WINDOWS, SECONDS, PAUSE = 6, 1.5, 2e-3
"""Windows of each kind, in turn, and the pause between two appends."""


@pytest.fixture(scope="module")
def batches():
    """1,000 records, a tenth of them of keys that come again: work for a compaction."""
    keys = [[b"k%09d" % (n * 900 + row) for row in range(1000)] for n in range(100)]
    return [batch.encode_lists([b"v" * 100] * 1000, some, 1_700_000_000_000) for some in keys]


class House:
    """Housekeeping without a pause, in a thread of this process or in another one."""

    def __init__(self, path, going, rounds):
        self.going, self.rounds = going, rounds
        self.log = embedlog.open(path, maintenance=False)
        owner._FIRST_SECONDS = 0.001

    def start(self):
        """Let the background do nothing else; its jobs wait while they are not to go on."""
        jobs = [
            job._replace(
                every_seconds=0.001, run=lambda context, run=job.run: self.run(context, run)
            )
            for job in JOBS
            if job.name in ("retention", "compaction")
        ]
        self.house = Maintenance(self.log.root, jobs)
        self.house.start()

    def run(self, context, run):
        while not self.going():
            time.sleep(0.005)
            if context.should_stop():
                return
        run(context)
        self.rounds()

    def stop(self):
        self.house.close()
        self.log.close()


@pytest.mark.parametrize("where", ["process", "thread"])
@pytest.mark.parametrize("records", [1, 1000], ids="records={}".format)
def bench_append_beside_housekeeping(benchmark, note, tmp_path, batches, where, records):
    """Windows with and without it in turn, so that both see the same machine."""
    path, flag, count = tmp_path / "log", tmp_path / "going", tmp_path / "rounds"
    with embedlog.open(path, maintenance=False) as log:
        log.create_topic("t", config=CONFIG)
        part = log.partition("t", 0)
        part.append(batches[:50])
    rounds = []

    def tell():
        with open(count, "ab") as file:
            file.write(b".")

    def going():
        return flag.exists()

    child = None
    if where == "process":
        child = os.fork()
        if child == 0:
            House(path, going, tell).start()
            while True:
                signal.pause()
    house = House(path, going, tell) if where == "thread" else None
    if house:
        house.start()
    single = batch.encode_lists([b"v" * 100], [b"k%09d" % 7], 1_700_000_000_000)
    took = {False: [], True: []}
    try:
        with embedlog.open(path, maintenance=False) as log:
            part = log.partition("t", 0)

            def window(on):
                (flag.touch if on else lambda: flag.unlink(missing_ok=True))()
                threading.Event().wait(0.05)
                until, number = time.monotonic() + SECONDS, 0
                while time.monotonic() < until:
                    number += 1
                    # The log goes on growing, whatever is measured, so that there is work.
                    large = [batches[number % 100]]
                    some = [single] if records == 1 else large
                    if records == 1 and number % 4 == 0:
                        part.append(large)
                    begin = time.perf_counter_ns()
                    part.append(some)
                    took[on].append(time.perf_counter_ns() - begin)
                    time.sleep(PAUSE)

            def all_windows():
                for number in range(2 * WINDOWS):
                    window(number % 2 == 1)

            benchmark.pedantic(all_windows, rounds=1)
            rounds = count.stat().st_size
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if house:
            flag.touch()
            house.stop()
    figures = {}
    for on, times in took.items():
        cuts = [cut / 1000 for cut in quantiles(times, n=1000)]
        name = "with" if on else "without"
        figures |= {f"{name}_p50_us": round(cuts[499], 1), f"{name}_p99_us": round(cuts[989], 1)}
        figures |= {f"{name}_p999_us": round(cuts[998], 1), f"{name}_appends": len(times)}
    note(records=records, rounds_of_housekeeping=rounds, **figures)
    print(where, records, rounds, figures)
    assert rounds >= 2 * WINDOWS
    with embedlog.open(path, maintenance=False) as log:
        assert log.verify() == []
        assert log.partition("t", 0).start_offset() > 0
