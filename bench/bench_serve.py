"""How fast is the server, by the CPU of the process and by the clock of one client?

The client is in another process, so that its interpreter does not take turns with the server's.
Requests are made before the clock starts.  Beside it a Kafka broker, which the same client sends
the same bytes to; it needs Java and Maven.
"""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count

import pytest
from support.kafka_broker import KafkaBroker
from support.wire_client import WireClient, request_bytes

from embedlog.batch import encode_lists, parse, schema
from embedlog.lazy import pa
from embedlog.server.record_batches import read_batch, write_batches

RECORDS = {"16 KB": 148, "256 KB": 2400}
VALUE_BYTES = 100


def batch_of(records):
    """Return a batch of a log, and the bytes of the same on the wire."""
    values = [os.urandom(VALUE_BYTES) for _ in range(records)]
    encoded = encode_lists(values, None, [1_700_000_000_000 + n // 100 for n in range(records)])
    message = pa.py_buffer(b"".join(encoded.stamp(0, 0)))
    batch = parse(message, 0, message.size, path="", position=0, schema=schema())
    return batch, b"".join(next(write_batches([batch])))


class Server:
    """The command, until it is closed.

    Args:
        directory: An empty one.
        options: Of the command.
    """

    def __init__(self, directory, *options):
        command = [sys.executable, "-m", "embedlog", "serve", str(directory / "log"), "--json"]
        self._command = [*command, "--listen", "127.0.0.1:0", *options]
        self.start()

    def start(self):
        """Start it, and wait until it listens."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE)
        self.pid = self._process.pid
        addresses = json.loads(self._process.stdout.readline())["bootstrap_servers"]
        self.address = addresses.partition(",")[0]

    def kill(self):
        """End it."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()
        self._process.stdout.close()


SERVERS = {"embedlog": Server, "kafka": partial(KafkaBroker, seconds=120)}


@pytest.fixture(scope="module", params=SERVERS)
def served(request, tmp_path_factory):
    """A server, and a broker."""
    server = SERVERS[request.param](tmp_path_factory.mktemp("served"))
    yield server
    server.kill()


@pytest.fixture
def client(served):
    """A client of a server that answers."""
    with answering(served) as client:
        yield client


@contextmanager
def answering(server):
    """Return a client once the server answers: a broker listens before it has a controller."""
    while True:
        with WireClient(server.address) as client:
            if client.ask("Metadata", 12, topics=[]).brokers:
                yield client
                return


@pytest.fixture
def topic(client):
    """A new topic of one partition."""
    name = f"t{next(numbers)}"
    topics = [{"name": name, "num_partitions": 1, "replication_factor": 1}]
    client.ask("CreateTopics", 7, topics=topics, timeout_ms=30_000)
    while client.ask("Metadata", 11, topics=[{"name": name}]).topics[0].error_code:
        pass
    return name


numbers = count()


def cpu_seconds(server):
    """Return the CPU time of a server."""
    with open(f"/proc/{server.pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(server):
    """Return how much memory a server takes now."""
    with open(f"/proc/{server.pid}/status") as file:
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


def produce_bytes(topic, records, partition=0):
    """Return a request that appends so many records."""
    _, wire = batch_of(records)
    topics = [{"name": topic, "partition_data": [{"index": partition, "records": wire}]}]
    return request_bytes("Produce", 9, acks=-1, timeout_ms=1000, topic_data=topics)


def send(client, request):
    """Send a request, and wait for its answer."""
    client.send(request)
    client.answer()


@pytest.mark.parametrize("size", RECORDS)
def bench_produce(benchmark, note, served, client, topic, size):
    """Send one batch after the other, each of which is acknowledged before the next."""
    request, rounds = produce_bytes(topic, RECORDS[size]), 300 if size == "16 KB" else 60
    for _ in range(rounds):
        send(client, request)
    before = cpu_seconds(served)
    benchmark.pedantic(send, (client, request), rounds=rounds)
    note(records=RECORDS[size], server_us=round((cpu_seconds(served) - before) / rounds * 1e6))


@pytest.mark.parametrize("workers", [1, 2])
def bench_workers(benchmark, note, tmp_path, workers):
    """Four clients at once send 100 batches of 16 KB each to a partition of their own."""
    server = Server(tmp_path, "--workers", str(workers))
    with ExitStack() as stack:
        stack.callback(server.kill)
        client = stack.enter_context(answering(server))
        topics = [{"name": "t", "num_partitions": 4, "replication_factor": 1}]
        client.ask("CreateTopics", 7, topics=topics, timeout_ms=30_000)
        found = client.ask("Metadata", 12, topics=[{"name": "t"}])
        ports = {each.node_id: each.port for each in found.brokers}
        leaders = {each.partition_index: each.leader_id for each in found.topics[0].partitions}
        clients = {
            partition: stack.enter_context(WireClient(f"127.0.0.1:{ports[leader]}"))
            for partition, leader in leaders.items()
        }
        requests = {each: produce_bytes("t", RECORDS["16 KB"], each) for each in clients}

        def send_all(partition):
            for _ in range(100):
                send(clients[partition], requests[partition])

        threads = stack.enter_context(ThreadPoolExecutor(len(clients)))
        benchmark.pedantic(lambda: list(threads.map(send_all, clients)), rounds=10, warmup_rounds=2)
    note(records=400 * RECORDS["16 KB"])


@pytest.mark.parametrize("size", RECORDS)
def bench_fetch(benchmark, note, served, client, topic, size):
    """Read 100,000 records of segments that were written in batches of this size."""
    request, total = produce_bytes(topic, RECORDS[size]), 0
    # More than the server keeps in memory as it came: the first ones are converted.
    while total * VALUE_BYTES < 40 << 20:
        send(client, request)
        total += RECORDS[size]

    def read():
        offset = 0
        while offset < 100_000:
            partition = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 1 << 20}
            topics = [{"topic": topic, "partitions": [partition]}]
            fetched = client.ask("Fetch", 11, max_bytes=1 << 20, topics=topics)
            offset = end_of(bytes(fetched.responses[0].partitions[0].records))

    read()
    before = cpu_seconds(served)
    benchmark.pedantic(read, rounds=5)
    note(records=100_000, server_ms=round((cpu_seconds(served) - before) / 5 * 1e3))
    note(memory=memory(served))


def end_of(data):
    """Return the offset after the last record of batches."""
    at = end = 0
    while at < len(data):
        end = int.from_bytes(data[at : at + 8], "big") + 1
        end += int.from_bytes(data[at + 23 : at + 27], "big")
        at += 12 + int.from_bytes(data[at + 8 : at + 12], "big")
    return end


def bench_synchronous_requests(benchmark, client, topic):
    """Send one record, and wait for the acknowledgement."""
    request = produce_bytes(topic, 1)
    benchmark.pedantic(send, (client, request), rounds=2000, warmup_rounds=500)


def bench_latency(benchmark, served, client, topic):
    """Send one record, until a consumer that waits for it has it."""
    offsets = count()
    with WireClient(served.address) as consumer:
        request = produce_bytes(topic, 1)

        def deliver():
            partition = {"partition": 0, "fetch_offset": next(offsets), "partition_max_bytes": 1000}
            topics = [{"topic": topic, "partitions": [partition]}]
            fetch = request_bytes("Fetch", 11, max_wait_ms=5000, min_bytes=1, topics=topics)
            consumer.send(fetch)
            client.send(request)
            consumer.answer()
            client.answer()

        benchmark.pedantic(deliver, rounds=1000, warmup_rounds=200)


@pytest.mark.parametrize("kind", SERVERS)
def bench_start(benchmark, note, tmp_path, kind):
    """Start until the first answer."""
    server = SERVERS[kind](tmp_path)
    server.kill()

    def start():
        server.start()
        with answering(server):
            note(memory=memory(server))

    benchmark.pedantic(start, teardown=server.kill, rounds=5)
