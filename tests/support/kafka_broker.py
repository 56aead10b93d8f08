"""A real Apache Kafka broker (KRaft, one node), from Maven Central; needs Java 17 and Maven."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from time import monotonic, sleep

import pytest

VERSION = "4.4.0"
JARS = Path(gettempdir()) / f"embedlog-tests-kafka-{VERSION}"
"""Kafka and what it needs, 100 MB; they are fetched once."""
POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
<modelVersion>4.0.0</modelVersion><groupId>embedlog</groupId>
<artifactId>broker</artifactId><version>1</version>
<dependencies>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId>
<version>{VERSION}</version></dependency>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka-tools</artifactId>
<version>{VERSION}</version></dependency>
</dependencies></project>
"""
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
log.cleaner.dedupe.buffer.size=8388608
log.cleaner.backoff.ms=200
log.retention.ms=-1
"""


def _jars() -> Path:
    for tool in ("java", "mvn"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}")
    if not JARS.exists():
        with TemporaryDirectory(dir=JARS.parent) as directory:
            (Path(directory) / "pom.xml").write_text(POM)
            copy = ["mvn", "-q", "-B", "dependency:copy-dependencies", "-DincludeScope=runtime"]
            command = [*copy, f"-DoutputDirectory={directory}/jars"]
            maven = subprocess.run(command, cwd=directory, capture_output=True, text=True)
            if maven.returncode:
                pytest.skip(f"Maven does not bring Kafka: {maven.stdout[-300:]}")
            # Another run may have done the same meanwhile.
            if not JARS.exists():
                (Path(directory) / "jars").rename(JARS)
    return JARS


def _free_ports(count: int) -> list[int]:
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
        self._java = ["java", "-Xmx512m", "-XX:+UseSerialGC", "-cp", f"{_jars()}/*"]
        if shutil.which("setpriv"):
            # It must not outlive the tests, however they end.
            self._java = ["setpriv", "--pdeathsig", "KILL", *self._java]
        self._directory, self._seconds = directory, seconds
        self._port, controller = _free_ports(2)
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
