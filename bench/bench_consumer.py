"""What does it cost to read: as records, as columns, and to wait for another process?

100-byte values, 10-byte keys, 1,000-record batches.  The floor of all of them
is `bench_floor`: every byte of the same files through the CRC, once.
"""

import multiprocessing
import statistics
import time
from collections import deque

import pytest
from support.roots import open_root

from embedlog import batch
from embedlog.checksum import crc32c
from embedlog.config import TopicConfig
from embedlog.consumer import Consumer
from embedlog.record import TopicPartition

BATCHES, ROWS = 200, 1000
RECORDS = BATCHES * ROWS
KEYS = [b"k%09d" % number for number in range(ROWS)]
VALUES = [b"v" * 100] * ROWS


@pytest.fixture(scope="module", params=["sealed", "active"])
def root(request, tmp_path_factory):
    """200,000 records, in mapped segments or all in the one that is still written."""
    root = open_root(tmp_path_factory.mktemp("bench") / "root")
    segment_bytes = (4 << 20) if request.param == "sealed" else (1 << 30)
    root.create_topic("t", 1, TopicConfig.parse({"segment.bytes": segment_bytes}))
    log = root.partition("t", 0)
    for number in range(BATCHES):
        log.append([batch.encode_lists(VALUES, KEYS, number, None)])
    yield root
    root.close()


def measured(benchmark, root, read):
    """Run `read` on a fresh consumer that begins at the beginning, a few times."""
    found = benchmark.pedantic(
        lambda: read(Consumer(root, "t", auto_offset_reset="earliest")), rounds=7, warmup_rounds=1
    )
    seconds = benchmark.stats.stats.min
    benchmark.extra_info.update(records=RECORDS, records_per_second=round(RECORDS / seconds))
    assert found == RECORDS


def polled(consumer, poll, size):
    count = 0
    while got := poll(consumer):
        count += sum(size(each) for found in got.values() for each in found)
    return count


def bench_iterate_records(benchmark, root):
    """`for record in consumer`: an object for each record."""

    def read(consumer):
        records = deque(enumerate(consumer.iter_records(until="end"), 1), maxlen=1)
        return records[0][0]

    measured(benchmark, root, read)


@pytest.mark.parametrize("most", [500, 10_000], ids="max_poll_records={}".format)
def bench_poll_records(benchmark, root, most):
    """`poll()`: the same objects, in lists."""

    def read(consumer):
        count = 0
        while got := consumer.poll(max_records=most):
            count += sum(map(len, got.values()))
        return count

    measured(benchmark, root, read)


def bench_poll_batches(benchmark, root):
    """Arrow columns, every checksum verified."""

    def read(consumer):
        return polled(consumer, Consumer.poll_batches, len)

    measured(benchmark, root, read)


@pytest.mark.parametrize(
    "columns", [None, ("timestamp", "key"), ("offset",)], ids=lambda each: "+".join(each or ["all"])
)
def bench_iterate_batches(benchmark, root, columns):
    """Only what is asked for is checked."""

    def read(consumer):
        return sum(map(len, consumer.iter_batches(columns=columns, until="end")))

    measured(benchmark, root, read)


def bench_floor(benchmark, root):
    """The CRC of every message of the log, and nothing else: what memory and CPU give."""
    log = root.partition("t", 0)

    def read():
        count, reader = 0, log.reader(0)
        while found := reader.read():
            for one in found:
                crc32c(one._source.buffer.slice(one._start, one.size))
                count += one.count
        return count

    assert benchmark.pedantic(read, rounds=7, warmup_rounds=1) == RECORDS
    benchmark.extra_info["records_per_second"] = round(RECORDS / benchmark.stats.stats.min)


@pytest.mark.parametrize("partitions", [1, 500], ids="partitions={}".format)
def bench_idle_poll(benchmark, tmp_path, partitions):
    """What each wake costs a consumer for which nothing came."""
    root = open_root(tmp_path / "root")
    root.create_topic("t", partitions, TopicConfig())
    consumer = Consumer(root, "t")
    assert consumer.poll() == {}

    assert benchmark(consumer.poll) == {}
    root.close()


def echo(path, pairs):
    root = open_root(path)
    log = root.partition("pong", 0)
    consumer = Consumer(root, "ping")
    log.append([batch.encode_lists([b"ready"], None, 0)])
    for _ in range(pairs):
        (records,) = consumer.poll(60_000).values()
        seen = time.perf_counter_ns()
        log.append([batch.encode_lists([records[0].value + b" %d" % seen], None, 0)])
    root.close()


def bench_wake_of_another_process(benchmark, tmp_path):
    """From before an append in one process to the record in the hands of another that slept."""
    pairs = 1000
    root = open_root(tmp_path / "root")
    for topic in ("ping", "pong"):
        root.create_topic(topic, 1, TopicConfig())
    consumer, log = Consumer(root, "pong"), root.partition("ping", 0)
    process = multiprocessing.get_context("spawn").Process(target=echo, args=(root.path, pairs))
    process.start()
    assert consumer.poll(60_000)[TopicPartition("pong", 0)]
    delays = []

    def once():
        sent = time.perf_counter_ns()
        log.append([batch.encode_lists([b"%d" % sent], None, 0)])
        (records,) = consumer.poll(60_000).values()
        delays.append(int(records[0].value.split()[1]) - sent)

    benchmark.pedantic(once, rounds=pairs)
    process.join(30)
    root.close()
    cuts = statistics.quantiles(delays, n=100)
    benchmark.extra_info.update(p50_us=round(cuts[49] / 1000), p99_us=round(cuts[98] / 1000))
    assert len(delays) == pairs
