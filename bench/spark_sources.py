"""What the benchmarks of Spark share: a session, sources of rows, a meter, and a Kafka broker.

The broker and Spark's connectors come from Maven Central, and are fetched once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from embedlog.spark import session

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from support import kafka_broker
from support.patience import patient

KAFKA_CONNECTOR = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"
"""Also runs with Spark 4.3, for which there is none."""
POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
<modelVersion>4.0.0</modelVersion><groupId>embedlog</groupId>
<artifactId>connector</artifactId><version>1</version>
<dependencies><dependency><groupId>{}</groupId>
<artifactId>{}</artifactId><version>{}</version>
<exclusions><exclusion><groupId>org.scala-lang</groupId><artifactId>*</artifactId></exclusion>
</exclusions></dependency></dependencies></project>
"""
TICKS = os.sysconf("SC_CLK_TCK")


class Source(NamedTuple):
    """Where the rows are read from: a format of Spark, and its options."""

    name: str
    format: str
    options: dict[str, str]
    reader: str | None = None
    """Which reader of the log serves."""

    def frame(self, spark: Any, schema: str | None = None, **options: str) -> Any:
        """Load the rows; with a schema only these columns."""
        self._choose(spark)
        reader = spark.read.format(self.format).options(**self.options, **options)
        return (reader if schema is None else reader.schema(schema)).load()

    def stream(self, spark: Any, **options: Any) -> Any:
        """Load the rows as a stream, unless the options say otherwise from their beginning."""
        self._choose(spark)
        options = {"startingOffsets": "earliest", **self.options, **options}
        return spark.readStream.format(self.format).options(**options).load()

    def _choose(self, spark: Any) -> None:
        if self.reader is not None:
            spark.conf.set("spark.embedlog.reader", self.reader)


class Cost(NamedTuple):
    """What a query took, in seconds."""

    wall: float
    cpu: float
    broker: float


class Meter:
    """Measures queries by the processes that they use."""

    def __init__(self, spark: Any, broker: int | None) -> None:
        self.jvm = spark.sparkContext._gateway.proc.pid
        self.broker = broker

    def cost(self, work: Callable[[], object]) -> Cost:
        """Do the work, and return what it took."""
        cpu, broker, wall = self._cpu(self.jvm), self._cpu(self.broker), time.perf_counter()
        work()
        wall = time.perf_counter() - wall
        return Cost(wall, self._cpu(self.jvm) - cpu, self._cpu(self.broker) - broker)

    def peak_mib(self) -> int:
        """Return the largest resident memory of the JVM and of the processes under it, added."""
        return sum(_peak_kib(pid) for pid in process_tree(self.jvm)) >> 10

    @staticmethod
    def _cpu(root: int | None) -> float:
        return 0.0 if root is None else sum(_cpu_seconds(pid) for pid in process_tree(root))


def process_tree(root: int) -> list[int]:
    """Return a process and all below it."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path("/proc", name, "stat").read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(name))
    tree = [root]
    for pid in tree:
        tree += children.get(pid, [])
    return tree


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return 0.0
    return sum(int(ticks) for ticks in fields[11:15]) / TICKS


def _peak_kib(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line), 0)


@contextmanager
def kafka() -> Iterator[tuple[str, int] | None]:
    """Run a broker; yield its address and process, or None if there can be none."""
    with ExitStack() as stack:
        try:
            address = stack.enter_context(kafka_broker.broker(patient(60)))
        except pytest.skip.Exception as error:
            print(f"Without Kafka: {error}", file=sys.stderr)
            yield None
            return
        words = {pid: _command(pid) for pid in process_tree(os.getpid())}
        yield address, next(pid for pid, command in words.items() if "kafka.Kafka" in command)


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def maven_jars(artifact: str, groups: str = "") -> list[str]:
    """Return the paths of a connector's jars; empty if Maven does not bring them.

    Args:
        artifact: Group, name and version of the connector, separated by colons.
        groups: If given, only the jars of these groups, which Spark does not have itself.
    """
    group, name, version = artifact.split(":")
    jars = Path(tempfile.gettempdir()) / f"embedlog-bench-{name}-{version}"
    if not jars.exists():
        with tempfile.TemporaryDirectory(dir=jars.parent) as directory:
            Path(directory, "pom.xml").write_text(POM.format(group, name, version))
            command = ["mvn", "-q", "-B", "dependency:copy-dependencies", "-DincludeScope=runtime"]
            command += [f"-DoutputDirectory={directory}/jars", f"-DincludeGroupIds={groups}"]
            try:
                subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                reason = getattr(error, "stdout", "")[-300:] or error
                print(f"Without {name}: {reason}", file=sys.stderr)
                return []
            Path(directory, "jars").rename(jars)
    return sorted(map(str, jars.glob("*.jar")))


def start_session(master: str, jars: list[str], conf: Mapping[str, str] | None = None) -> Any:
    """Return a quiet session with the connectors' jars."""
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "OFF",
        "spark.driver.memory": "2g",
        **(conf or {}),
    }
    if jars:
        settings["spark.jars"] = ",".join(jars)
    return session("bench", master, settings)
