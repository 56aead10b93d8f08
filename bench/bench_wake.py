"""How soon does another process that sleeps see an append?

A delay is the difference between clocks read in two processes of one machine; the
table has the median and the 99th percentile.  `p50_us` counts from the publication:
the transaction is committed, and the append is about to wake the readers.
`from_call_p50_us` counts from before the append, which writes and commits in between.
`--benchmark-timer` has no effect on these times.
"""

import time
from contextlib import ExitStack

import pytest
from conftest import PAIRS, start_process

import embedlog
from embedlog import batch
from embedlog.files import Files, WakePage


def times_of_wakes(path, pairs, pipe):
    files = Files(path)
    page, times = WakePage(files), []
    page.join()
    pipe.send(None)
    for seen in range(pairs):
        while page.value() == seen:
            page.wait(seen, 1.0)
        times.append(time.perf_counter_ns())
    pipe.send(times)


def bench_floor_of_a_wake(measure_delays, tmp_path):
    """The kernel alone: one process advances a counter, the other wakes and reads the clock."""
    files = Files(tmp_path)
    page = WakePage(files)
    measure_delays(page.advance, times_of_wakes, tmp_path, PAIRS)
    page.close()
    files.close_all()


def times_of_reads(path, pairs, read_values, pipe):
    with embedlog.open(path) as log:
        reader, wake, times = log.partition("t", 0).reader(0), log.root.wake, []
        wake.join()
        pipe.send(None)
        while len(times) < pairs:
            value = wake.value()
            batches = reader.read()
            if not batches:
                wake.wait(value, 1.0)
                continue
            rows = sum(len(read_values(batch)) for batch in batches)
            times += [time.perf_counter_ns()] * rows
        pipe.send(times)


def values(batch):
    return batch.lists()[2]


def columns(batch):
    return batch.columns()["value"]


@pytest.mark.parametrize(
    ("durability", "read_values"),
    [("os", values), ("os", columns), ("fsync", values)],
    ids=["os", "os-columns", "fsync"],
)
def bench_wake(measure_delays, log, durability, read_values):
    """From an append to the verified record in another process that slept."""
    log.create_topic("t")
    part, encoded = log.partition("t", 0), [batch.encode_lists([b"v" * 100], [b"k"], 5)]
    measure_delays(
        lambda: part.append(encoded, durability=durability),
        *(times_of_reads, log.path, PAIRS, read_values),
    )
    assert part.end_offset() == PAIRS


def idle(path, seconds, pipe):
    with embedlog.open(path) as log:
        reader, wake = log.partition("t", 0).reader(0), log.root.wake
        wake.join()
        time.sleep(1.5)  # until the background jobs have started
        pipe.send(None)
        began, deadline = time.process_time(), time.monotonic() + seconds
        while time.monotonic() < deadline:
            value = wake.value()
            assert reader.read() == []
            wake.wait(value, 0.1)
        pipe.send(time.process_time() - began)


def bench_idle_tail(benchmark, note, log):
    """CPU time of a process that waits two seconds for nothing."""
    log.create_topic("t")
    log.partition("t", 0).tail()
    with ExitStack() as processes:
        pipe = start_process(processes, idle, log.path, 2.0)
        pipe.recv()
        used = benchmark.pedantic(pipe.recv, rounds=1)
    note(cpu_percent=round(used / 2.0 * 100, 2))
    assert used < 0.2
