"""How fast is the server, by the CPU of the process and by the clock of one client?

The client is in another process, so that its interpreter does not take turns with the server's.
Requests are made before the clock starts.  The study of other servers has 745 and 1,478 µs of CPU
for produce requests of 148 and 2,400 records by numpy.
"""

import json
import os
import signal
import subprocess
import sys

import pytest
from support.wire_client import WireClient, request_bytes

from embedlog.batch import encode_lists, parse, schema
from embedlog.lazy import pa
from embedlog.server.record_batches import read_batch, write_batches

RECORDS = {"16 KB": 148, "256 KB": 2400}
VALUE_BYTES = 100


def batch_of(count):
    """Return a batch of a log, and the bytes of the same on the wire."""
    values = [os.urandom(VALUE_BYTES) for _ in range(count)]
    encoded = encode_lists(values, None, [1_700_000_000_000 + n // 100 for n in range(count)])
    message = pa.py_buffer(b"".join(encoded.stamp(0, 0)))
    batch = parse(message, 0, message.size, path="", position=0, schema=schema())
    return batch, next(iter(write_batches([batch])))


@pytest.fixture
def served(tmp_path):
    """Run the command, and return its process and its address."""
    command = [sys.executable, "-m", "embedlog", "serve", str(tmp_path / "log"), "--json"]
    process = subprocess.Popen([*command, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE)
    yield process, json.loads(process.stdout.readline())["bootstrap_servers"]
    process.send_signal(signal.SIGTERM)
    process.wait()
    process.stdout.close()


def cpu_seconds(process):
    """Return the CPU time of a process."""
    with open(f"/proc/{process.pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(process):
    """Return how much memory a process takes now."""
    with open(f"/proc/{process.pid}/status") as file:
        return file.read().partition("VmRSS:")[2].split("\n")[0].strip()


@pytest.mark.parametrize("size", RECORDS)
def bench_batches_to_columns(benchmark, size):
    """Decode a batch of the wire to what an append writes."""
    _, wire = batch_of(RECORDS[size])
    benchmark(lambda: read_batch(memoryview(wire)).encoded("none"))
    benchmark.extra_info["records"] = RECORDS[size]


@pytest.mark.parametrize("size", RECORDS)
def bench_columns_to_batches(benchmark, size):
    """Encode a batch of a log for the wire."""
    batch, _ = batch_of(RECORDS[size])
    benchmark(lambda: list(write_batches([batch])))
    benchmark.extra_info["records"] = RECORDS[size]


@pytest.mark.parametrize("size", RECORDS)
def bench_produce(benchmark, served, size):
    """Send one batch after the other, each of which is acknowledged before the next."""
    process, address = served
    _, wire = batch_of(RECORDS[size])
    topics = [{"name": "t", "partition_data": [{"index": 0, "records": wire}]}]
    request = request_bytes("Produce", 9, acks=-1, timeout_ms=1000, topic_data=topics)
    with WireClient(address) as client:
        client.ask("CreateTopics", 7, topics=[{"name": "t", "num_partitions": 1}])

        def produce():
            client.send(request)
            client.answer()

        produce()
        before = cpu_seconds(process)
        benchmark.pedantic(produce, rounds=300 if size == "16 KB" else 60, warmup_rounds=5)
        rounds = len(benchmark.stats.stats.data) + 5
        benchmark.extra_info["server_us"] = (cpu_seconds(process) - before) / rounds * 1e6


@pytest.mark.parametrize("size", RECORDS)
def bench_fetch(benchmark, served, size):
    """Read 100,000 records of segments that were written in batches of this size."""
    process, address = served
    count = RECORDS[size]
    _, wire = batch_of(count)
    topics = [{"name": "t", "partition_data": [{"index": 0, "records": wire}]}]
    produce = request_bytes("Produce", 9, acks=-1, timeout_ms=1000, topic_data=topics)
    with WireClient(address) as client:
        client.ask("CreateTopics", 7, topics=[{"name": "t", "num_partitions": 1}])
        total = 0
        # More than the server keeps in memory as it came: the first ones are converted.
        while total * VALUE_BYTES < 40 << 20:
            client.send(produce)
            client.answer()
            total += count

        def read():
            offset = 0
            while offset < 100_000:
                partition = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 1 << 20}
                fetched = client.ask(
                    "Fetch",
                    11,
                    max_bytes=1 << 20,
                    topics=[{"topic": "t", "partitions": [partition]}],
                )
                records = bytes(fetched.responses[0].partitions[0].records)
                offset = end_of(records)

        before = cpu_seconds(process)
        benchmark.pedantic(read, rounds=5)
        benchmark.extra_info["server_us_per_record"] = (cpu_seconds(process) - before) / 0.5
        benchmark.extra_info["memory"] = memory(process)


def end_of(data):
    """Return the offset after the last record of batches."""
    at = end = 0
    while at < len(data):
        end = int.from_bytes(data[at : at + 8], "big") + 1
        end += int.from_bytes(data[at + 23 : at + 27], "big")
        at += 12 + int.from_bytes(data[at + 8 : at + 12], "big")
    return end


def bench_synchronous_requests(benchmark, served):
    """Send one record, and wait for the acknowledgement."""
    _, address = served
    _, wire = batch_of(1)
    topics = [{"name": "t", "partition_data": [{"index": 0, "records": wire}]}]
    request = request_bytes("Produce", 9, acks=-1, timeout_ms=1000, topic_data=topics)
    with WireClient(address) as client:
        client.ask("CreateTopics", 7, topics=[{"name": "t", "num_partitions": 1}])

        def produce():
            client.send(request)
            client.answer()

        benchmark.pedantic(produce, rounds=1000, warmup_rounds=50)


def bench_start(benchmark, tmp_path):
    """Start the command until the first answer, on a new log."""
    numbers = iter(range(1000))

    def start():
        path = str(tmp_path / str(next(numbers)))
        command = [sys.executable, "-m", "embedlog", "serve", path, "--json"]
        process = subprocess.Popen([*command, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE)
        address = json.loads(process.stdout.readline())["bootstrap_servers"]
        with WireClient(address) as client:
            client.ask("Metadata", 12, topics=[])
        benchmark.extra_info["memory"] = memory(process)
        process.send_signal(signal.SIGTERM)
        process.wait()
        process.stdout.close()

    benchmark.pedantic(start, rounds=5)
