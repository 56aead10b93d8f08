"""What does an acknowledged append cost while retention and compaction never pause?"""

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
"""Windows with and without housekeeping, their length, and the pause between appends."""


@pytest.fixture(scope="module")
def batches():
    """Batches of 1,000 records, with a tenth of their keys repeated: work for a compaction."""
    keys = [[b"k%09d" % (n * 900 + row) for row in range(1000)] for n in range(100)]
    return [
        batch.encode_lists([b"v" * 100] * 1000, batch_keys, 1_700_000_000_000)
        for batch_keys in keys
    ]


class BusyHousekeeping:
    """Housekeeping without a pause, in a thread of this process or in another process."""

    def __init__(self, path, going, rounds):
        self.going, self.rounds = going, rounds
        self.log = embedlog.open(path, maintenance=False)
        owner._FIRST_SECONDS = 0.001

    def start(self):
        """Run only retention and compaction; their jobs wait while `going` returns false."""
        jobs = [
            job._replace(
                every_seconds=0.001, run=lambda context, run=job.run: self.run(context, run)
            )
            for job in JOBS
            if job.name in ("retention", "compaction")
        ]
        self.maintenance = Maintenance(self.log.root, jobs)
        self.maintenance.start()

    def run(self, context, run):
        while not self.going():
            time.sleep(0.005)
            if context.should_stop():
                return
        run(context)
        self.rounds()

    def stop(self):
        self.maintenance.close()
        self.log.close()


@pytest.mark.parametrize("where", ["process", "thread"])
@pytest.mark.parametrize("records", [1, 1000], ids="records={}".format)
def bench_append_beside_housekeeping(benchmark, note, tmp_path, batches, where, records):
    """Windows with and without it take turns, so that both see the same machine."""
    path, flag, count = tmp_path / "log", tmp_path / "going", tmp_path / "rounds"
    with embedlog.open(path, maintenance=False) as log:
        log.create_topic("t", config=CONFIG)
        part = log.partition("t", 0)
        part.append(batches[:50])
    rounds = []

    def count_round():
        with open(count, "ab") as file:
            file.write(b".")

    def going():
        return flag.exists()

    child = None
    if where == "process":
        child = os.fork()
        if child == 0:
            BusyHousekeeping(path, going, count_round).start()
            while True:
                signal.pause()
    housekeeping = BusyHousekeeping(path, going, count_round) if where == "thread" else None
    if housekeeping:
        housekeeping.start()
    single = batch.encode_lists([b"v" * 100], [b"k%09d" % 7], 1_700_000_000_000)
    times_by_window = {False: [], True: []}
    try:
        with embedlog.open(path, maintenance=False) as log:
            part = log.partition("t", 0)

            def window(on):
                (flag.touch if on else lambda: flag.unlink(missing_ok=True))()
                threading.Event().wait(0.05)
                deadline, number = time.monotonic() + SECONDS, 0
                while time.monotonic() < deadline:
                    number += 1
                    # Large batches keep the log growing, so that housekeeping has work.
                    large = [batches[number % 100]]
                    measured = [single] if records == 1 else large
                    if records == 1 and number % 4 == 0:
                        part.append(large)
                    begin = time.perf_counter_ns()
                    part.append(measured)
                    times_by_window[on].append(time.perf_counter_ns() - begin)
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
        if housekeeping:
            flag.touch()
            housekeeping.stop()
    figures = {}
    for on, times in times_by_window.items():
        cuts = [cut / 1000 for cut in quantiles(times, n=1000)]
        name = "with" if on else "without"
        figures |= {f"{name}_p50_us": round(cuts[499], 1), f"{name}_p99_us": round(cuts[989], 1)}
        figures |= {f"{name}_p999_us": round(cuts[998], 1), f"{name}_appends": len(times)}
    note(records=records, rounds_of_housekeeping=rounds, **figures)
    print(where, records, rounds, figures)
    assert rounds >= 2 * WINDOWS
    with embedlog.open(path, maintenance=False) as log:
        assert log.housekeeping.verify() == []
        assert log.partition("t", 0).start_offset() > 0
