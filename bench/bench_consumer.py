"""What does it cost to read through a consumer, as records or as columns, and to wait?"""

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
    """A function that measures how long a new consumer takes from the first to the last record."""

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


@pytest.mark.parametrize("max_records", [500, 10_000], ids="max_poll_records={}".format)
def bench_poll_records(measured, max_records):
    """`poll()`: the same objects, in lists."""

    def read(consumer):
        count = 0
        while polled := consumer.poll(max_records=max_records):
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
    ids=lambda columns: "+".join(columns or ["all"]),
)
def bench_iterate_batches(measured, columns):
    """Only the requested columns are verified."""
    measured(lambda consumer: sum(map(len, consumer.iter_batches(columns, until="end"))))


def bench_iterate_records_of_single_appends(benchmark, note, log, single):
    """Every record has its own batch; the difference is what batches save."""
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
    """The cost of a wake for a consumer without new records."""
    log.create_topic("t", partitions=partitions)
    consumer = log.consumer("t")
    assert consumer.poll() == {}

    assert benchmark(consumer.poll) == {}


def record_times(path, pairs, pipe):
    """Send the time at which each record came to a consumer that slept."""
    with embedlog.open(path) as log:
        consumer, times = log.consumer("t"), []
        pipe.send(None)
        while len(times) < pairs:
            for records in consumer.poll(10_000).values():
                # On a busy machine two appends may come at once.
                times += [time.perf_counter_ns()] * len(records)
        pipe.send(times)


def bench_poll_of_another_process(measure_delays, log):
    """From an append to the record in a process that slept in `poll`.

    `p50_us` counts from the publication, `from_call_p50_us` from before the append.
    """
    log.create_topic("t")
    part = log.partition("t", 0)
    measure_delays(
        lambda: part.append([batch.encode_lists([b"x" * 100], None, 0)]),
        *(record_times, log.path, PAIRS),
    )
