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

VERSION = "4.1.0"
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


@contextmanager
def broker(seconds: float) -> Iterator[str]:
    """Run a broker, and yield its address; skips the test if it cannot be had.

    Args:
        seconds: How long it may take to start.
    """
    java = ["java", "-Xmx512m", "-XX:+UseSerialGC", "-cp", f"{_jars()}/*"]
    with TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        port, controller = _free_ports(2)
        settings = Path(directory) / "server.properties"
        settings.write_text(SETTINGS.format(port=port, controller=controller, directory=directory))
        format_ = ["kafka.tools.StorageTool", "format", "-t", "MkU3OEVBNTcwNTJENDM2Qg"]
        subprocess.run([*java, *format_, "-c", settings], check=True, capture_output=True)
        output = Path(directory) / "output"
        with output.open("w") as file:
            process = subprocess.Popen(
                [*java, "kafka.Kafka", settings], stdout=file, stderr=subprocess.STDOUT
            )
        try:
            _wait(process, port, monotonic() + seconds, output)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, deadline: float, output: Path) -> None:
    """Wait until the broker listens; clients wait until it answers."""
    while process.poll() is None and monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            sleep(0.2)
    raise AssertionError(f"the broker did not start: {output.read_text()[-2000:]}")
