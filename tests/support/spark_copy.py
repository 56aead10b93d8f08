"""Kills the processes of a query that copies a growing topic, and checks the copy.

The values of each key count up from 0.  So at any time the copy alone shows
whether a value is missing, duplicated, or out of order.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyspark

import embedlog
from embedlog.api import Log
from embedlog.publish import app_versions
from embedlog.spark.query_planner import QueryPlanner
from embedlog.spark.spark_session import READER
from support import spark_kill_points
from support.forks import until
from support.patience import patient
from support.roots import rows
from support.spark_session import begin, faults_of

KEYS = 12
PARTITIONS = 3
"""Of the copied topic; the copy has another number, so its keys are distributed differently."""
OPTIONS = {"maxOffsetsPerTrigger": 2000, "maxBytesPerPartition": 30_000}
"""Several micro-batches after each pause, and several tasks for a partition."""
SOURCE = {"segment.bytes": 30_000, "index.interval.bytes": 1000}
STARTS = ("initialOffset", "check_reader", "open_stream", "initial_offset")
"""Where only a query comes that starts, or only a new one."""
ENDS = ("prepare_for_available_now", "close_stream")
"""Where only a query comes that is to end soon."""
HANG_SECONDS = 240.0
"""Seconds without progress that count as a hang: on a busy machine a JVM starts in a minute."""


class Feed:
    """A thread that appends to topic "from" until it is stopped.

    Args:
        log: The log.
        sent: The number of values of each key; this is the list that counts them.
        typed: Whether the topic is typed.
    """

    def __init__(self, log: Log, sent: list[int] | None = None, typed: bool = False) -> None:
        self._log, self._typed = log, typed
        self._stop = threading.Event()
        self.sent = [0] * KEYS if sent is None else sent
        """The number of values of each key."""
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        rng = random.Random(1)
        with self._log.producer() as producer:
            while not self._stop.wait(0.05):
                for key in rng.choices(range(KEYS), k=2):
                    if self._typed:
                        producer.send("from", {"k": str(key), "v": self.sent[key]})
                    else:
                        producer.send("from", b"%d" % self.sent[key], key=b"%d" % key)
                    self.sent[key] += 1
                producer.flush()


class Copied:
    """The values that were copied to a topic, as far as they were read."""

    def __init__(
        self, log: Log, topic: str, first: list[int] | None = None, typed: bool = False
    ) -> None:
        self._log, self.topic, self._typed = log, topic, typed
        self.next_values = list(first or [0] * KEYS)
        """The next value of each key."""
        self._offsets = [0, 0]
        self.read = self.lost = self.duplicated = 0

    def update(self) -> list[int]:
        """Read new values; count those that are not the next value of their key."""
        for number, offset in enumerate(self._offsets):
            if self._typed:
                for record in self._log.topic(self.topic):
                    if record.partition == number and record.offset >= offset:
                        self._count(int(record.value["k"]), record.value["v"])
                        self._offsets[number] = record.offset + 1
                continue
            for record_offset, _, key, value, _ in rows(
                self._log.partition(self.topic, number), offset
            ):
                self._count(int(key or b""), int(value or b""))
                self._offsets[number] = record_offset + 1
        return self.next_values

    def _count(self, key: int, value: int) -> None:
        self.read += 1
        self.lost += max(value - self.next_values[key], 0)
        self.duplicated += value < self.next_values[key]
        self.next_values[key] = max(value + 1, self.next_values[key])

    def has(self, sent: list[int]) -> bool:
        """Whether at least this many values of each key were copied."""
        return all(copied >= count for copied, count in zip(self.update(), sent, strict=True))


class State(NamedTuple):
    """The progress of a query: the last batch of each kind, or -1 if there is none."""

    offsets: int
    published: int
    commits: int

    def step(self) -> str:
        """Return the last step of the last batch."""
        if self.offsets == self.commits:
            return "committed"
        return "published" if self.published == self.offsets else "planned"


def state(log: Log, directory: Path, topic: str) -> State:
    """Return the progress of a copy, from its checkpoint and from what was published."""
    checkpoint = directory / f"checkpoint of {topic}"
    metadata = checkpoint / "metadata"
    query = json.loads(metadata.read_text())["id"] if metadata.exists() else ""
    marker = app_versions.get(log.root.context.state, query)
    offsets, commits = (
        spark_kill_points.newest(checkpoint / name) for name in ("offsets", "commits")
    )
    return State(offsets, -1 if marker is None else marker.version, commits)


class Copy(NamedTuple):
    """A query that copies topic "from" to another one, exactly once."""

    topic: str
    starting: str = "earliest"
    reader: str = "python"
    sink: str = "killable"
    available_now: bool = False
    typed: bool = False

    def start(self, spark: Any, directory: Path) -> Any:
        """Start it, or let it continue from its checkpoint."""
        path, kills = str(directory / "log"), str(kills_of(self.reader, spark, directory))
        kill_options = {"path": path, "kills": kills}
        spark.conf.set(READER, self.reader)
        if self.reader == "jvm":
            reader = spark.readStream.format("embedlog").option("path", path)
        else:
            reader = spark.readStream.format("killable").options(**kill_options)
        reader = reader.options(subscribe="from", startingOffsets=self.starting, **OPTIONS)
        if self.typed:
            # Also so that the killable source need not know the columns of the topic.
            reader = reader.schema("k string, v bigint")
        columns = ("k", "v") if self.typed else ("key", "value")
        frame = reader.option("commitToGroup", self.topic).load().select(*columns)
        if self.reader == "jvm":
            frame = frame.mapInArrow(spark_kill_points.die_within_read(kills), frame.schema)
        checkpoint = str(directory / f"checkpoint of {self.topic}")
        writer = frame.writeStream.format(self.sink)
        writer = writer.options(**kill_options if self.sink == "killable" else {"path": path})
        if self.available_now:
            writer = writer.trigger(availableNow=True)
        return writer.options(topic=self.topic, checkpointLocation=checkpoint).start()


def kills_of(reader: str, spark: Any, directory: Path) -> Path:
    """Return the directory of ordered kills: that of the planner if it serves."""
    return faults_of(spark) if reader == "jvm" else directory / "kills"


class InSession:
    """Runs the query in a session that stays up: only Python processes are killed."""

    def __init__(self, spark: Any, directory: Path, reader: str = "python") -> None:
        self._spark, self._directory, self.reader = spark, directory, reader
        self.kills = kills_of(reader, spark, directory)
        self._query: Any = None

    def start(self, copy: Copy) -> None:
        self._query = copy.start(self._spark, self._directory)

    def gone(self) -> bool:
        return self._query is None or not self._query.isActive

    def survives(self, kill_point: str) -> bool:
        """Whether the query goes on after a kill, as if nothing had happened.

        It does after that of a planner, whose methods have the names of those of Python's source.
        """
        return self.reader == "jvm" and kill_point.split()[-1] in QueryPlanner.METHODS

    def finish(self) -> None:
        """Stop the query as a user does."""
        if self._query is not None:
            self._query.stop()

    def stop(self) -> None:
        """Stop the query, for example before another one."""
        self.finish()


class InDriver:
    """Runs the query in another application, whose JVM is killed.

    Args:
        directory: The directory of the log, the checkpoints and the ordered kills.
        jvm_only: Whether only the JVM is killed, and its Python goes on until it notices.
        reader: Who reads the log: "jvm" or "python".
        master: With executors in JVMs of their own, kills of tasks are kills of these.
    """

    def __init__(
        self,
        directory: Path,
        jvm_only: bool = True,
        reader: str = "python",
        master: str = "local[2]",
    ) -> None:
        self._directory, self.reader, self._master = directory, reader, master
        self._victims = "java" if jvm_only else "both"
        self._process: subprocess.Popen[bytes] | None = None
        self.kills = directory / ("spark/faults" if reader == "jvm" else "kills")

    def start(self, copy: Copy) -> None:
        tests = str(Path(__file__).parents[1])
        paths = os.pathsep.join([str(Path(embedlog.__file__).parents[1]), tests])
        (self._directory / "finish").unlink(missing_ok=True)
        arguments = [str(self._directory), self._master, json.dumps(copy)]
        environment = {
            "PYTHONPATH": paths,
            "KILL_DRIVER": self._victims,
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
            "SPARK_WORKER_DIR": str(self._directory / "work"),
        }
        with (self._directory / "errors").open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.spark_copy", *arguments],
                env={**os.environ, **environment},
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def gone(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def survives(self, kill_point: str) -> bool:
        """Whether the query goes on after a kill: Spark repeats tasks of lost executors."""
        return kill_point == "within read" and self._master.startswith("local-cluster")

    def finish(self) -> None:
        """Have the application stop the query as a user does."""
        (self._directory / "finish").touch()

    def stop(self) -> None:
        """Kill the application; its JVM exits when it notices."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


class Matrix:
    """Kills a query at one point after the other, and checks the copy after each kill."""

    def __init__(
        self, log: Log, directory: Path, runner: InSession | InDriver, typed: bool = False
    ) -> None:
        self._log, self._directory, self._runner, self._typed = log, directory, runner, typed
        self._starting = "earliest"
        self._numbers = itertools.count()
        self.kills: Counter[str] = Counter()
        self.states: dict[str, Counter[str]] = {}
        """The progress of the query when it was killed, by kill point."""
        self._copies: list[Copied] = []
        self._sink = "killable"
        self._available_now = False
        runner.kills.mkdir(parents=True, exist_ok=True)
        log.create_topic("from", PARTITIONS, SOURCE, **self._columns())

    def _columns(self) -> dict[str, Any]:
        if not self._typed:
            return {}
        return {"schema": pa.schema([("k", pa.string()), ("v", pa.int64())]), "key": "k"}

    def run(self, kill_points: list[str]) -> None:
        """Kill at each point in turn; for a point in the start of a query, start a new one."""
        if self._runner.reader == "jvm" and not set(kill_points) & set(spark_kill_points.SINK):
            self._sink = "embedlog"
        with Feed(self._log, typed=self._typed) as feed:
            topic = self._new_copy()
            copied = self._copy(topic)
            for kill_point in kill_points:
                if kill_point.split()[-1] in STARTS:
                    self._finish(copied, feed.sent)
                    topic = self._new_copy()
                    copied = self._copy(topic)
                self._kill(kill_point, topic)
                self._check(copied, kill_point)
                self._finish(copied, feed.sent)
        self._finish(copied, feed.sent)
        self._runner.stop()
        self._check(copied, "at all")
        assert copied.next_values == feed.sent

    def run_from_the_end(self, kill_points: list[str]) -> None:
        """Kill the first batch of queries that start at the end: they must continue from there."""
        self._starting = "latest"
        with Feed(self._log, typed=self._typed) as feed:
            for kill_point in kill_points:
                topic = self._new_copy()
                self._kill(kill_point, topic)
                copied = self._copy(topic, self._first_values(topic))
                self._finish(copied, feed.sent)
        self._runner.stop()

    def _first_values(self, topic: str) -> list[int]:
        """Return the first value of each key to copy, according to the query's checkpoint."""
        lines = (self._directory / f"checkpoint of {topic}" / "offsets" / "0").read_text()
        base = json.loads(lines.splitlines()[-1])["@base"]["from"]
        first = [0] * KEYS
        for number, offset in base.items():
            for record_offset, _, key, value, _ in rows(
                self._log.partition("from", int(number)), 0
            ):
                if record_offset < offset:
                    first[int(key or b"")] = int(value or b"") + 1
        assert sum(first) > 0, "the query does not start at the end"
        return first

    def _new_copy(self) -> str:
        """Stop the query, and create a topic for a new one."""
        self._runner.stop()
        topic = f"to-{next(self._numbers)}"
        self._log.create_topic(topic, 2, {"segment.bytes": 30_000}, **self._columns())
        return topic

    def _copy(self, topic: str, first: list[int] | None = None) -> Copied:
        self._copies.append(Copied(self._log, topic, first, self._typed))
        return self._copies[-1]

    def _kill(self, kill_point: str, topic: str) -> None:
        ordered = self._runner.kills / kill_point
        method = kill_point.split()[-1]
        if method == "prepare_for_available_now":
            self._runner.stop()
            self._available_now = True
        spark_kill_points.order(self._runner.kills, kill_point)
        if method == "close_stream":
            # Running, since records have been copied.
            self._runner.finish()
        self._run_until(topic, lambda: not ordered.exists(), f"no process came to {kill_point!r}")
        self._available_now = False
        if not self._runner.survives(kill_point):
            until(self._runner.gone, HANG_SECONDS)
        elif method not in ENDS:
            assert not self._runner.gone(), f"the query ended after a kill {kill_point}"
        self.kills[kill_point] += 1
        step = state(self._log, self._directory, topic).step()
        self.states.setdefault(kill_point, Counter())[step] += 1

    def _finish(self, copied: Copied, sent: list[int]) -> None:
        """Run the query until everything sent so far is copied."""
        sent = list(sent)
        self._run_until(
            copied.topic, lambda: copied.has(sent), "the query hangs", lambda: copied.read
        )
        self._check(copied, "and a recovery")

    def _run_until(self, topic: str, condition: Any, problem: str, progress: Any = None) -> None:
        """Run the query, restarted if it died, until a condition is met; fail if it hangs."""
        deadline, last = time.monotonic() + patient(HANG_SECONDS), None
        while not condition():
            if progress is not None and last != (last := progress()):
                deadline = time.monotonic() + patient(HANG_SECONDS)
            assert time.monotonic() < deadline, problem
            if self._runner.gone() and not condition():
                reader, available_now = self._runner.reader, self._available_now
                self._runner.start(
                    Copy(topic, self._starting, reader, self._sink, available_now, self._typed)
                )
            time.sleep(0.02)

    def _check(self, copied: Copied, kill_point: str) -> None:
        copied.update()
        assert (copied.lost, copied.duplicated) == (0, 0), f"after a kill {kill_point}"

    def report(self) -> str:
        """Return how often the query was killed where, and its progress at that time."""
        kills = ", ".join(
            f"{kill_point} {count} ({', '.join(f'{n} {step}' for step, n in steps.items())})"
            for kill_point, count in sorted(self.kills.items())
            for steps in [self.states[kill_point]]
        )
        lost, duplicated, read = (
            sum(getattr(copy, name) for copy in self._copies)
            for name in ("lost", "duplicated", "read")
        )
        counts = f"{lost} lost, {duplicated} duplicated of {read} values"
        return f"{self.kills.total()} kills, {counts}: {kills}"


def main(directory: Path, master: str, copy: Copy) -> None:
    """Run the application of `InDriver`: copy until it is killed, or told to finish."""
    spark = spark_kill_points.register(begin(directory / "spark", master=master))
    checkpoint = directory / f"checkpoint of {copy.topic}"
    kills = kills_of(copy.reader, spark, directory)
    spark_kill_points.watch(checkpoint, kills, spark.sparkContext._gateway.proc.pid)
    query = copy.start(spark, directory)
    while not query.awaitTermination(0.2):
        if (directory / "finish").exists():
            query.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Copy(*json.loads(sys.argv[3])))
