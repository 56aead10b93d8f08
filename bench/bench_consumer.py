"""What does it cost to read through a consumer: as records, as columns, and to wait?"""

import time
from collections import deque

import pytest
from conftest import PAIRS

import embedlog
from embedlog import batch

RECORDS = 1_600_000
FLOOR = {"floor": "bench_pread_crc"}


@pytest.fixture
def measured(benchmark, note, filled, thousand):
    """Time a function of a fresh consumer that begins at the beginning and reads to the end."""

    def measured(read):
        blocks = RECORDS / 1000 * thousand.size / (64 << 20)
        note(records=RECORDS, **FLOOR, floors=blocks)
        count = benchmark.pedantic(
            lambda: read(filled.consumer("t", auto_offset_reset="earliest")),
            rounds=5,
            warmup_rounds=1,
        )
        assert count == RECORDS

    return measured


def bench_iterate_records(measured):
    """`for record in consumer`: an object for each record."""

    def read(consumer):
        last = deque(enumerate(consumer.iter_records(until="end"), 1), maxlen=1)
        return last[0][0]

    measured(read)


@pytest.mark.parametrize("most", [500, 10_000], ids="max_poll_records={}".format)
def bench_poll_records(measured, most):
    """`poll()`: the same objects, in lists."""

    def read(consumer):
        count = 0
        while polled := consumer.poll(max_records=most):
            count += sum(map(len, polled.values()))
        return count

    measured(read)


def bench_poll_batches(measured):
    """Arrow columns, every checksum verified."""

    def read(consumer):
        count = 0
        while polled := consumer.poll_batches():
            count += sum(len(batch) for batches in polled.values() for batch in batches)
        return count

    measured(read)


@pytest.mark.parametrize(
    "columns",
    [None, ("offset", "timestamp", "key"), ("offset",)],
    ids=lambda each: "+".join(each or ["all"]),
)
def bench_iterate_batches(measured, columns):
    """Only what is asked for is checked."""
    measured(lambda consumer: sum(map(len, consumer.iter_batches(columns, until="end"))))


def bench_iterate_records_of_single_appends(benchmark, note, log, single):
    """Every record in a batch of its own: what batching saves."""
    log.create_topic("t")
    for _ in range(5000):
        log.partition("t", 0).append([single])

    def read():
        consumer = log.consumer("t", auto_offset_reset="earliest")
        return sum(1 for _ in consumer.iter_records(until="end"))

    note(records=5000)
    assert benchmark.pedantic(read, rounds=5, warmup_rounds=1) == 5000


@pytest.mark.parametrize("partitions", [1, 500], ids="partitions={}".format)
def bench_idle_poll(benchmark, log, partitions):
    """What each wake costs a consumer for which nothing came."""
    log.create_topic("t", partitions=partitions)
    consumer = log.consumer("t")
    assert consumer.poll() == {}

    assert benchmark(consumer.poll) == {}


def record_times(path, pairs, pipe):
    """Send when each record came to a consumer that slept."""
    with embedlog.open(path) as log:
        consumer, times = log.consumer("t"), []
        pipe.send(None)
        while len(times) < pairs:
            for records in consumer.poll(10_000).values():
                # On a busy machine two appends may come at once.
                times += [time.perf_counter_ns()] * len(records)
        pipe.send(times)


def bench_poll_of_another_process(measure_delays, log):
    """From an append to the record in the hands of a process that slept in `poll`.

    `p50_us` counts from the publication, `from_call_p50_us` from before the append.
    """
    log.create_topic("t")
    part = log.partition("t", 0)
    measure_delays(
        lambda: part.append([batch.encode_lists([b"x" * 100], None, 0)]),
        *(record_times, log.path, PAIRS),
    )
