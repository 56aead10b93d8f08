"""How soon does another process, asleep, see an append?

The time between two clocks read in two processes of one machine; the table has
the median and the 99th percentile.  `p50_us` counts from the publication, when
the append's transaction is committed and the append about to wake the others:
until then there is nothing to see.  `from_call_p50_us` counts from before the
append, which writes and commits in between.
A run that measures CPU time (`--benchmark-timer`) leaves these alone.
"""

import multiprocessing
import time

import pytest
from conftest import delays

import embedlog
from embedlog import batch
from embedlog.files import Files, WakePage

PAIRS = 1500
SPAWN = multiprocessing.get_context("spawn")


def stamps_of_wakes(path, pipe, pairs):
    files = Files(path)
    page, found = WakePage(files), []
    page.join()
    pipe.send(None)
    for seen in range(pairs):
        while page.value() == seen:
            page.wait(seen, 1.0)
        found.append(time.perf_counter_ns())
    pipe.send(found)


def bench_floor_of_a_wake(benchmark, note, published, tmp_path):
    """The kernel alone: one process counts, one that slept reads the clock."""
    files = Files(tmp_path)
    page, sent = WakePage(files), []
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=stamps_of_wakes, args=(tmp_path, theirs, PAIRS))
    process.start()
    ours.recv()

    def once():
        time.sleep(0.0015)  # it is asleep again
        sent.append(time.perf_counter_ns())
        page.advance()

    benchmark.pedantic(once, rounds=PAIRS)
    seen = ours.recv()
    process.join()
    note(**delays(sent, published[-PAIRS:], seen))
    assert len(seen) == PAIRS
    page.close()
    files.close_all()


def stamps_of_reads(path, pipe, pairs, look):
    with embedlog.open(path) as log:
        reader, wake, found = log.partition("t", 0).reader(0), log.root.wake, []
        wake.join()
        pipe.send(None)
        while len(found) < pairs:
            seen = wake.value()
            got = reader.read()
            if not got:
                wake.wait(seen, 1.0)
                continue
            rows = sum(len(look(one)) for one in got)
            found += [time.perf_counter_ns()] * rows
        pipe.send(found)


def values(one):
    return one.lists()[2]


def columns(one):
    return one.columns()["value"]


@pytest.mark.parametrize(
    ("durability", "look"),
    [("os", values), ("os", columns), ("fsync", values)],
    ids=["os", "os-columns", "fsync"],
)
def bench_wake(benchmark, note, log, published, durability, look):
    """From an append to the verified record in another process that slept."""
    log.create_topic("t")
    part, sent = log.partition("t", 0), []
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=stamps_of_reads, args=(log.path, theirs, PAIRS, look))
    process.start()
    ours.recv()
    one = [batch.encode_lists([b"v" * 100], [b"k"], 5)]

    def once():
        time.sleep(0.0015)
        sent.append(time.perf_counter_ns())
        part.append(one, durability=durability)

    benchmark.pedantic(once, rounds=PAIRS)
    seen = ours.recv()
    process.join()
    note(**delays(sent, published[-PAIRS:], seen))
    assert part.end_offset() == len(seen) == PAIRS


def idle(path, pipe, seconds):
    with embedlog.open(path) as log:
        reader, wake = log.partition("t", 0).reader(0), log.root.wake
        wake.join()
        pipe.send(None)
        began, until = time.process_time(), time.monotonic() + seconds
        while time.monotonic() < until:
            seen = wake.value()
            assert reader.read() == []
            wake.wait(seen, 0.1)
        pipe.send(time.process_time() - began)


def bench_idle_tail(benchmark, note, log):
    """CPU of a process that waits two seconds for nothing."""
    log.create_topic("t")
    log.partition("t", 0).tail()
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=idle, args=(log.path, theirs, 2.0))
    process.start()
    ours.recv()
    used = benchmark.pedantic(ours.recv, rounds=1)
    process.join()
    note(cpu_percent=round(used / 2.0 * 100, 2))
    assert used < 0.2
