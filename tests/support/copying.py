"""A query that copies a topic which grows, its processes killed on the way, and what it copied.

The values of a key count up from 0.  So at any moment it can be told from the
copy alone whether something is missing, is there twice, or is out of order.
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

import embedlog
from embedlog.api import Log
from embedlog.publish import transaction
from support import killable
from support.forks import until
from support.patience import patient
from support.roots import rows

KEYS = 12
PARTITIONS = 3
"""Of the topic that is copied; a copy has another number, so keys are mixed anew."""
OPTIONS = {"maxOffsetsPerTrigger": 2000, "maxBytesPerPartition": 30_000}
"""Several micro-batches after each pause, and several tasks for a partition."""
SOURCE = {"segment.bytes": 30_000, "index.interval.bytes": 1000}
PATIENCE = 240.0
"""Seconds without any progress that are a hang: a JVM takes a minute to start when all is busy."""


class Feed:
    """A thread that appends to topic "from" until it is told to stop."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._stop = threading.Event()
        self.sent = [0] * KEYS
        """How many values each key has."""
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        chance = random.Random(1)
        with self._log.producer() as producer:
            while not self._stop.wait(0.05):
                for key in chance.choices(range(KEYS), k=2):
                    producer.send("from", b"%d" % self.sent[key], key=b"%d" % key)
                    self.sent[key] += 1
                producer.flush()


class Copied:
    """What a topic has of the values that were sent, as far as it was looked at."""

    def __init__(self, log: Log, topic: str, first: list[int] | None = None) -> None:
        self._log, self.topic = log, topic
        self.found = list(first or [0] * KEYS)
        """The next value of each key."""
        self._offsets = [0, 0]
        self.read = self.lost = self.doubled = 0

    def look(self) -> list[int]:
        """Read what is new; what is not the next value of its key is counted."""
        for number, offset in enumerate(self._offsets):
            for at, _, key, value, _ in rows(self._log.partition(self.topic, number), offset):
                self._see(int(key or b""), int(value or b""))
                self._offsets[number] = at + 1
        return self.found

    def _see(self, key: int, value: int) -> None:
        self.read += 1
        self.lost += max(value - self.found[key], 0)
        self.doubled += value < self.found[key]
        self.found[key] = max(value + 1, self.found[key])

    def has(self, sent: list[int]) -> bool:
        """Whether so many values of each key are there, at least."""
        return all(have >= some for have, some in zip(self.look(), sent, strict=True))


class State(NamedTuple):
    """How far a query is: the last batch of each kind, and -1 without any."""

    offsets: int
    published: int
    commits: int

    def place(self) -> str:
        """Where it is between two steps, in words."""
        if self.offsets == self.commits:
            return "committed"
        return "published" if self.published == self.offsets else "planned"


def state(log: Log, directory: Path, topic: str) -> State:
    """Look at the checkpoint of a copy and at what was published."""
    checkpoint = directory / f"checkpoint of {topic}"
    metadata = checkpoint / "metadata"
    query = json.loads(metadata.read_text())["id"] if metadata.exists() else ""
    marker = transaction.last_app_version(log.root, query)
    offsets, commits = (killable.newest(checkpoint / each) for each in ("offsets", "commits"))
    return State(offsets, -1 if marker is None else marker.version, commits)


def start(spark: Any, directory: Path, topic: str, starting: str) -> Any:
    """Start the query that copies topic "from" to another one, exactly once."""
    given = {"path": str(directory / "log"), "kills": str(directory / "kills")}
    reader = spark.readStream.format("killable").options(**given, subscribe="from", **OPTIONS)
    reader = reader.options(startingOffsets=starting, commitToGroup=topic)
    writer = reader.load().select("key", "value").writeStream
    checkpoint = str(directory / f"checkpoint of {topic}")
    writer = writer.format("killable").options(**given, checkpointLocation=checkpoint)
    return writer.option("topic", topic).start()


class InSession:
    """Runs the query in a session that stays: only processes of Python are killed."""

    def __init__(self, spark: Any, directory: Path) -> None:
        self._spark, self._directory = spark, directory
        self._query: Any = None

    def start(self, topic: str, starting: str) -> None:
        self._query = start(self._spark, self._directory, topic, starting)

    def gone(self) -> bool:
        return self._query is None or not self._query.isActive

    def stop(self) -> None:
        if self._query is not None:
            self._query.stop()


class InDriver:
    """Runs the query in an application of its own, whose JVM is killed.

    Args:
        directory: Of the log, the checkpoints and the places.
        alone: Whether the JVM is killed alone, and its Python goes on until it notices.
    """

    def __init__(self, directory: Path, alone: bool = True) -> None:
        self._directory = directory
        self._victims = "java" if alone else "both"
        self._running: subprocess.Popen[bytes] | None = None

    def start(self, topic: str, starting: str) -> None:
        tests = str(Path(__file__).parents[1])
        paths = os.pathsep.join([str(Path(embedlog.__file__).parents[1]), tests])
        with (self._directory / "errors").open("ab") as errors:
            self._running = subprocess.Popen(
                [sys.executable, "-m", "support.copying", str(self._directory), topic, starting],
                env={**os.environ, "PYTHONPATH": paths, "KILL_DRIVER": self._victims},
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def gone(self) -> bool:
        return self._running is None or self._running.poll() is not None

    def stop(self) -> None:
        """End it: its JVM ends when it notices that nobody is there."""
        if self._running is not None:
            self._running.send_signal(signal.SIGKILL)
            self._running.wait()


class Matrix:
    """Kills a query at one place after the other, and compares after each."""

    def __init__(self, log: Log, directory: Path, runner: InSession | InDriver) -> None:
        self._log, self._directory, self._runner = log, directory, runner
        self._starting = "earliest"
        self._numbers = itertools.count()
        self.kills: Counter[str] = Counter()
        self.states: dict[str, Counter[str]] = {}
        """Per place, how far the query had come when it was killed."""
        self._copies: list[Copied] = []
        (directory / "kills").mkdir()
        log.create_topic("from", PARTITIONS, SOURCE)

    def run(self, places: list[str]) -> None:
        """Kill at each place in turn; a new query begins where a place is in its beginning."""
        with Feed(self._log) as feed:
            topic = self._begin()
            copied = self._copy(topic)
            for place in places:
                if "initialOffset" in place:
                    self._finish(copied, feed.sent)
                    topic = self._begin()
                    copied = self._copy(topic)
                self._kill(place, topic)
                self._check(copied, place)
                self._finish(copied, feed.sent)
        self._finish(copied, feed.sent)
        self._runner.stop()
        self._check(copied, "at all")
        assert copied.found == feed.sent

    def run_from_the_end(self, places: list[str]) -> None:
        """Kill the first batch of queries that begin at the end: that is where they go on from."""
        self._starting = "latest"
        with Feed(self._log) as feed:
            for place in places:
                topic = self._begin()
                self._kill(place, topic)
                copied = self._copy(topic, self._first(topic))
                self._finish(copied, feed.sent)
        self._runner.stop()

    def _first(self, topic: str) -> list[int]:
        """Return the first value of each key that a query is to copy, as its checkpoint has it."""
        lines = (self._directory / f"checkpoint of {topic}" / "offsets" / "0").read_text()
        base = json.loads(lines.splitlines()[-1])["@base"]["from"]
        first = [0] * KEYS
        for number, offset in base.items():
            for at, _, key, value, _ in rows(self._log.partition("from", int(number)), 0):
                if at < offset:
                    first[int(key or b"")] = int(value or b"") + 1
        assert sum(first) > 0, "it does not begin at the end"
        return first

    def _begin(self) -> str:
        """Make a topic for a new query; the one before is stopped."""
        self._runner.stop()
        topic = f"to-{next(self._numbers)}"
        self._log.create_topic(topic, 2, {"segment.bytes": 30_000})
        return topic

    def _copy(self, topic: str, first: list[int] | None = None) -> Copied:
        self._copies.append(Copied(self._log, topic, first))
        return self._copies[-1]

    def _kill(self, place: str, topic: str) -> None:
        ordered = self._directory / "kills" / place
        killable.order(self._directory / "kills", place)
        self._alive(topic, lambda: not ordered.exists(), f"nobody came to {place!r}")
        until(self._runner.gone, PATIENCE)
        self.kills[place] += 1
        found = state(self._log, self._directory, topic).place()
        self.states.setdefault(place, Counter())[found] += 1

    def _finish(self, copied: Copied, sent: list[int]) -> None:
        """Have everything copied that was sent."""
        sent = list(sent)
        self._alive(copied.topic, lambda: copied.has(sent), "it hangs", lambda: copied.read)
        self._check(copied, "and a recovery")

    def _alive(self, topic: str, condition: Any, what: str, progress: Any = None) -> None:
        """Have the query run until something is so; it hangs if there is no progress for long."""
        deadline, known = time.monotonic() + patient(PATIENCE), None
        while not condition():
            if progress is not None and known != (known := progress()):
                deadline = time.monotonic() + patient(PATIENCE)
            assert time.monotonic() < deadline, what
            if self._runner.gone() and not condition():
                self._runner.start(topic, self._starting)
            time.sleep(0.02)

    def _check(self, copied: Copied, place: str) -> None:
        copied.look()
        assert (copied.lost, copied.doubled) == (0, 0), f"after a kill {place}"

    def told(self) -> str:
        """How often it was killed where, and how far the query was then."""
        each = ", ".join(
            f"{place} {count} ({', '.join(f'{n} {how}' for how, n in self.states[place].items())})"
            for place, count in sorted(self.kills.items())
        )
        lost, doubled, read = (
            sum(getattr(each, name) for each in self._copies)
            for name in ("lost", "doubled", "read")
        )
        found = f"{lost} lost, {doubled} doubled of {read} values"
        return f"{self.kills.total()} kills, {found}: {each}"


def main(directory: Path, topic: str, starting: str) -> None:
    """The application of `InDriver`: copies until it is killed."""
    from support.sessions import begin

    spark = killable.register(begin(directory / "spark"))
    checkpoint = directory / f"checkpoint of {topic}"
    killable.watch(checkpoint, directory / "kills", spark.sparkContext._gateway.proc.pid)
    start(spark, directory, topic, starting).awaitTermination()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
