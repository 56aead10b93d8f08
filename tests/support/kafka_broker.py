"""A real Apache Kafka broker (KRaft, one node), from Maven Central; needs Java 17 and Maven."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from time import monotonic, sleep

import pytest

VERSION = "4.4.0"
BROKER = tuple(f"org.apache.kafka:{name}:{VERSION}" for name in ("kafka_2.13", "kafka-tools"))
"""Kafka and its tools in Maven Central, with what they need 100 MB."""
SETTINGS = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={directory}/data
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=4
group.share.min.record.lock.duration.ms=1000
group.share.min.heartbeat.interval.ms=200
group.share.heartbeat.interval.ms=200
group.share.min.assignment.interval.ms=0
group.share.assignment.interval.ms=0
log.cleaner.dedupe.buffer.size=8388608
log.cleaner.backoff.ms=200
log.retention.ms=-1
"""


def java_command(name: str = f"kafka-{VERSION}", artifacts: Sequence[str] = BROKER) -> list[str]:
    """Return the command that runs a Java program with Kafka on its class path, or skip the test.

    The program does not outlive this process.

    Args:
        name: A name for what is on the class path.
        artifacts: What that is, as ``group:artifact:version``.
    """
    java = ["java", "-Xmx512m", "-XX:+UseSerialGC", "-cp", f"{jars(name, artifacts)}/*"]
    return ["setpriv", "--pdeathsig", "KILL", *java] if shutil.which("setpriv") else java


def jars(name: str, artifacts: Sequence[str]) -> Path:
    """Return a directory with jars and what they need, fetched once; or skip the test."""
    for tool in ("java", "mvn"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}")
    there = Path(gettempdir()) / f"embedlog-tests-{name}"
    if not there.exists():
        with TemporaryDirectory(dir=there.parent) as directory:
            (Path(directory) / "pom.xml").write_text(_pom(artifacts))
            copy = ["mvn", "-q", "-B", "dependency:copy-dependencies", "-DincludeScope=runtime"]
            command = [*copy, f"-DoutputDirectory={directory}/jars"]
            maven = subprocess.run(command, cwd=directory, capture_output=True, text=True)
            if maven.returncode:
                pytest.skip(f"Maven does not bring {name}: {maven.stdout[:500]}")
            # Another run may have done the same meanwhile.
            if not there.exists():
                (Path(directory) / "jars").rename(there)
    return there


def _pom(artifacts: Sequence[str]) -> str:
    dependencies = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId>"
        f"<version>{version}</version></dependency>"
        for group, artifact, version in (each.split(":") for each in artifacts)
    )
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>embedlog</groupId><artifactId>jars</artifactId><version>1</version>"
        f"<dependencies>{dependencies}</dependencies></project>"
    )


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listening.getsockname()[1] for listening in sockets]
    for listening in sockets:
        listening.close()
    return ports


class KafkaBroker:
    """A broker in a directory, which can be killed and started again.

    Args:
        directory: Where its data is.
        seconds: How long it may take to start.
    """

    def __init__(self, directory: Path, seconds: float) -> None:
        self._java = java_command()
        self._directory, self._seconds = directory, seconds
        self._port, controller = free_ports(2)
        self.address = f"127.0.0.1:{self._port}"
        self._settings = directory / "server.properties"
        self._settings.write_text(
            SETTINGS.format(port=self._port, controller=controller, directory=directory)
        )
        format_ = ["kafka.tools.StorageTool", "format", "-t", "MkU3OEVBNTcwNTJENDM2Qg"]
        subprocess.run(
            [*self._java, *format_, "-c", self._settings], check=True, capture_output=True
        )
        self.start()

    def start(self) -> None:
        """Start it, and wait until it listens; clients wait until it answers."""
        output = self._directory / "output"
        with output.open("a") as file:
            self._process = subprocess.Popen(
                [*self._java, "kafka.Kafka", self._settings], stdout=file, stderr=subprocess.STDOUT
            )
        try:
            _wait(self._process, self._port, monotonic() + self._seconds, output)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._process.pid

    def kill(self) -> None:
        """Kill it; its data stays."""
        self._process.kill()
        self._process.wait()


@contextmanager
def broker(seconds: float) -> Iterator[str]:
    """Run a broker, and yield its address; skips the test if it cannot be had.

    Args:
        seconds: How long it may take to start.
    """
    with TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        running = KafkaBroker(Path(directory), seconds)
        try:
            yield running.address
        finally:
            running.kill()


def _wait(process: subprocess.Popen[bytes], port: int, deadline: float, output: Path) -> None:
    """Wait until the broker listens; clients wait until it answers."""
    while process.poll() is None and monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            sleep(0.2)
    raise AssertionError(f"the broker did not start: {output.read_text()[-2000:]}")
