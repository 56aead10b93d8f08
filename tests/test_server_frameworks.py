"""Frameworks of the JVM, unchanged and from Maven Central, on `embedlog serve`."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support import spark_kafka
from support.children import run_python
from support.client_programs import HERE
from support.kafka_broker import VERSION, free_ports, jars, java_command
from support.patience import patient

import embedlog

pytestmark = [pytest.mark.tier("all"), pytest.mark.xdist_group("frameworks")]
ROOT = Path(__file__).parents[1]
CONNECT_VERSION, SPARK_VERSION = "4.3.1", "4.2.0"
"""The newest that were found whole in Maven Central."""


class Processes:
    """A server of the log and a program on it, which can be killed and started again."""

    def __init__(self, directory: Path) -> None:
        self.directory, self._stack = directory, ExitStack()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        (port,) = free_ports(1)
        self.address = f"127.0.0.1:{port}"
        serve = ["serve", str(directory / "log"), "--listen", self.address]
        self._commands = {"server": [sys.executable, "-m", "embedlog", *serve]}

    def start(self, name: str, command: list[str] | None = None) -> None:
        """Start one, as it was started before."""
        command = self._commands.setdefault(name, command or [])
        with self.output(name).open("ab") as output:
            self._running[name] = subprocess.Popen(command, stdout=output, stderr=output)

    def output(self, name: str) -> Path:
        """What it has printed."""
        return self.directory / f"{name}.txt"

    def stop(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send it a signal, and wait until it is gone."""
        process = self._running.pop(name)
        process.send_signal(number)
        process.wait(patient(60))

    def until(self, done: Callable[[], bool], seconds: float = 90) -> None:
        """Wait until something is so; fails if one of them ends, or time is over."""
        deadline = time.monotonic() + patient(seconds)
        while not done():
            for name, process in self._running.items():
                assert process.poll() is None, self.output(name).read_text()[-3000:]
            assert time.monotonic() < deadline, self.output("program").read_text()[-3000:]
            time.sleep(0.1)

    def close(self) -> None:
        """Kill all."""
        for name in list(self._running):
            self.stop(name)


@pytest.fixture
def processes(tmp_path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    try:
        started.start("server")
        yield started
    finally:
        started.close()


@pytest.fixture
def log(tmp_path) -> Iterator[embedlog.Log]:
    with embedlog.open(tmp_path / "log") as log:
        yield log


def count_of(log: embedlog.Log, topic: str) -> int:
    return len(log.topic(topic))


@pytest.mark.parametrize("killed", ["program", "server"])
def test_kafka_streams_counts_words_exactly(processes, log, killed):
    """Exactly once, v2, with a repartitioned topic, a changelog and RocksDB."""
    streams = java_command(f"streams-{VERSION}", [f"org.apache.kafka:kafka-streams:{VERSION}"])
    state = str(processes.directory / "state")
    program = [*streams, str(HERE / "WordCount.java"), processes.address, state]
    dice, expected = random.Random(1), Counter[str]()
    for topic, count in (("lines", 2), ("counts", 1)):
        log.create_topic(topic, count)

    def write(lines: int) -> None:
        with log.producer() as producer:
            for number in range(lines):
                words = [f"Word{dice.randrange(50)}" for _ in range(dice.randrange(1, 8))]
                expected.update(word.lower() for word in words)
                producer.send("lines", " ".join(words).encode(), partition=number % 2)

    def counted() -> dict[str, int]:
        found: dict[str, int] = {}
        for record in log.topic("counts"):
            (number,) = struct.unpack(">q", record.value)
            # What is counted twice, or forgotten after a restart, is no more than before.
            assert found.get(record.key.decode(), 0) < number
            found[record.key.decode()] = number
        return found

    write(500)
    processes.start("program", program)
    processes.until(lambda: count_of(log, "counts") > 0)
    write(5000)
    processes.until(lambda: sum(counted().values()) > 1000)
    processes.stop(killed)
    write(500)
    processes.start(killed)
    processes.until(lambda: sum(counted().values()) >= expected.total())
    assert counted() == expected
    processes.stop("program", signal.SIGTERM)


@pytest.mark.parametrize("killed", ["program", "server"])
def test_connect_brings_each_line_of_a_file_once(processes, log, killed):
    """Distributed, with an exactly-once source."""
    (port,) = free_ports(1)
    settings = processes.directory / "worker.properties"
    settings.write_text(CONNECT.format(address=processes.address, port=port))
    names = [f"org.apache.kafka:connect-{name}" for name in ("runtime", "file")]
    artifacts = [f"{name}:{CONNECT_VERSION}" for name in names]
    connect = "org.apache.kafka.connect.cli.ConnectDistributed"
    command = [*java_command(f"connect-{CONNECT_VERSION}", artifacts), connect, str(settings)]
    log.create_topic("lines", 1)
    path, lines = processes.directory / "lines.txt", list[bytes]()

    def write(count: int) -> None:
        with path.open("ab") as file:
            for _ in range(count):
                lines.append(b"line %d" % len(lines))
                file.write(lines[-1] + b"\n")

    write(3000)
    processes.start("program", command)
    connector = {
        "connector.class": "FileStreamSource",
        "file": str(path),
        "topic": "lines",
        "batch.size": "20",
        "exactly.once.support": "required",
        "transaction.boundary": "poll",
    }
    processes.until(lambda: put(f"http://127.0.0.1:{port}/connectors/file/config", connector))
    processes.until(lambda: count_of(log, "lines") > 100)
    processes.stop(killed)
    write(1000)
    processes.start(killed)

    def is_done() -> bool:
        # The connector keeps lines that it has read for as long as there is nothing more to read.
        write(1)
        return count_of(log, "lines") >= 4000

    processes.until(is_done)
    processes.stop("program", signal.SIGTERM)
    values = [record.value for record in log.topic("lines")]
    assert values == lines[: len(values)]


CONNECT = """
bootstrap.servers={address}
group.id=connect
listeners=http://127.0.0.1:{port}
key.converter=org.apache.kafka.connect.storage.StringConverter
value.converter=org.apache.kafka.connect.storage.StringConverter
exactly.once.source.support=enabled
config.storage.topic=connect-configs
offset.storage.topic=connect-offsets
status.storage.topic=connect-status
config.storage.replication.factor=1
offset.storage.replication.factor=1
status.storage.replication.factor=1
offset.storage.partitions=2
status.storage.partitions=2
session.timeout.ms=6000
heartbeat.interval.ms=1000
scheduled.rebalance.max.delay.ms=1000
"""
"""The last one since a worker that had to join again waits, by default five minutes."""


def put(url: str, fields: dict[str, Any]) -> bool:
    """Send an object to a worker of Connect; return whether it has taken it."""
    body, kind = json.dumps(fields).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(url, body, kind, method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=patient(10)):
            return True
    except OSError:
        return False  # It is about to start.


def test_kafkas_own_tools(embedlog_log, kafka_server):
    """They say what they say on a broker, and Python has what they did."""
    for tool, arguments, said in TOOLS:
        server = ("--bootstrap-server", kafka_server.bootstrap_servers)
        command = [*java_command(), f"org.apache.kafka.tools.{tool}", *server, *arguments.split()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60))
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(said, done.stdout), (tool, arguments, done.stdout)
    assert count_of(embedlog_log, "t") == 1100
    lags = {group: sum(embedlog_log.groups[group].lag().values()) for group in ("v", "c")}
    assert lags == {"v": 1100, "c": 0}


GROUPS = "consumer.group.ConsumerGroupCommand"
TOOLS = (
    ("TopicCommand", "--create --topic t --partitions 2 --config retention.ms=7200", "Created"),
    ("TopicCommand", "--describe --topic t", r"PartitionCount: 2.*retention\.ms=7200"),
    (
        "ProducerPerformance",
        "--topic t --num-records 1000 --record-size 50 --throughput -1",
        "1000 records sent",
    ),
    ("VerifiableProducer", "--topic t --max-messages 100", '"acked":100'),
    ("GetOffsetShell", "--topic t", r"t:0:\d+\nt:1:\d+"),
    ("ConsumerPerformance", "--topic t --group p --num-records 1100", r"\b1100\b"),
    ("VerifiableConsumer", "--topic t --group-id c --max-messages 1100", "shutdown_complete"),
    (
        "VerifiableConsumer",
        "--topic t --group-id v --max-messages 1100 --group-protocol consumer",
        "shutdown_complete",
    ),
    (GROUPS, "--describe --group v", r"v +t +0 +(\d+) +\1 +0 "),
    (GROUPS, "--reset-offsets --to-earliest --group v --topic t --execute", r"v +t +1 +0"),
)
"""Their arguments, and what they print."""


def test_sparks_own_connector_and_format_embedlog_read_what_the_other_wrote(
    tmp_path, embedlog_log, kafka_server
):
    """Keys, values and headers, by queries and by a stream."""
    home = ROOT / ".venv" / "spark-4.2"
    if not home.exists():
        pytest.skip("Spark 4.2 is not installed: run `make spark-versions`")
    # Spark has the others itself.
    names = ("kafka-clients", "spark-sql-kafka", "spark-token-provider-kafka", "commons-pool2")
    connector = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{SPARK_VERSION}"
    every = sorted(jars(f"spark-kafka-{SPARK_VERSION}", [connector]).iterdir())
    chosen = ",".join(str(path) for path in every if path.name.startswith(names))
    for topic in ("source", "batch", "stream", "back"):
        embedlog_log.create_topic(topic, 2)
    environment = {**os.environ, "PYTHONPATH": f"{home}:{ROOT / 'tests'}:{ROOT}"}
    arguments = (tmp_path / "spark", embedlog_log.path, kafka_server.bootstrap_servers, chosen)
    run_python(spark_kafka.__file__, *arguments, seconds=200, env=environment)

    def rows(topic: str) -> list[str]:
        records = embedlog_log.topic(topic)
        return sorted(repr((each.key, each.value, each.headers)) for each in records)

    expected = [
        (
            None if n % 5 == 0 else b"%d" % (n % 7),
            None if n % 10 == 1 else b"%d" % n,
            [("h", b"%d" % n)] if n % 3 == 0 else [],
        )
        for n in range(spark_kafka.COUNT)
    ]
    assert rows("source") == sorted(map(repr, expected))
    for topic in ("batch", "stream", "back"):
        assert rows(topic) == rows("source")
