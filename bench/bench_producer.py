"""What does a record cost from `send` to its publication, for each method of the producer?"""

import os

import pyarrow as pa
import pytest
from support.roots import open_root

from embedlog.batch import encode_lists
from embedlog.config import TopicConfig
from embedlog.producer import Producer

VALUE = bytes(100)


@pytest.fixture
def root(tmp_path):
    """A root with topics of one and of four partitions."""
    root = open_root(tmp_path / "log")
    root.create_topic("p1", 1, TopicConfig())
    root.create_topic("p4", 4, TopicConfig())
    yield root
    root.close()


@pytest.fixture
def producer(root):
    with Producer(root) as producer:
        yield producer


def ends(root, topic):
    return sum(root.partition(topic, n).end_offset() for n in range(root.partitions(topic)))


def bench_floor_write(benchmark, tmp_path):
    """The floor: 256 KiB written 16 times to a growing file."""
    chunk, fd = bytes(256 << 10), os.open(tmp_path / "floor", os.O_CREAT | os.O_WRONLY)

    def write():
        for _ in range(16):
            os.write(fd, chunk)

    benchmark.extra_info.update(bytes=16 * len(chunk))
    benchmark(write)
    os.close(fd)


def bench_floor_append(benchmark, root):
    """The floor of send().result(): encode and append one record without a producer."""
    log = root.partition("p1", 0)
    benchmark(lambda: log.append([encode_lists([VALUE], None, 5)]))
    assert ends(root, "p1") > 0


@pytest.mark.parametrize("topic", ["p1", "p4"])
def bench_send_and_wait(benchmark, root, producer, topic):
    """One acknowledged record: budget 40 µs in the median."""
    benchmark(lambda: producer.send(topic, VALUE, b"key-000001").result())
    assert ends(root, topic) == producer.metrics()["producer-metrics"]["record-send-total"]


@pytest.mark.parametrize("topic", ["p1", "p4"])
@pytest.mark.parametrize("keyed", [False, True], ids=["no key", "key"])
def bench_send(benchmark, root, producer, topic, keyed):
    """Records one at a time with their futures, then a flush: at least 0.5 M per second."""
    count = 50_000
    keys = [b"k%09d" % n if keyed else None for n in range(count)]

    def send():
        futures = [producer.send(topic, VALUE, key) for key in keys]
        producer.flush()
        return futures

    benchmark.extra_info.update(records=count)
    assert all(future.done() for future in benchmark(send)[::1000])
    assert ends(root, topic) == producer.metrics()["producer-metrics"]["record-send-total"]


@pytest.mark.parametrize("topic", ["p1", "p4"])
@pytest.mark.parametrize("count", [1000, 100_000], ids="records={}".format)
def bench_send_batch(benchmark, root, producer, topic, count):
    """Lists of 100-byte values and 10-byte keys: at least 4 M records per second."""
    values, keys = [VALUE] * count, [b"k%09d" % n for n in range(count)]
    benchmark.extra_info.update(records=count)
    benchmark(lambda: producer.send_batch(topic, values, keys))
    assert ends(root, topic) == producer.metrics()["producer-metrics"]["record-send-total"]


@pytest.mark.parametrize("topic", ["p1", "p4"])
@pytest.mark.parametrize("keyed", [False, True], ids=["no key", "key"])
def bench_append_table(benchmark, root, producer, topic, keyed):
    """An Arrow table of 100-byte values: at least 1,500 MB per second to one partition."""
    count = 200_000
    columns = {"value": pa.array([VALUE] * count, pa.binary())}
    if keyed:
        columns["key"] = pa.array([b"k%09d" % n for n in range(count)], pa.binary())
    table = pa.table(columns)
    benchmark.extra_info.update(records=count, bytes=table.nbytes)
    benchmark(lambda: producer.append_table(topic, table))
    assert ends(root, topic) == producer.metrics()["producer-metrics"]["record-send-total"]
