"""A source and sink for tests alone, with places at which the processes of Spark are killed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import DataSource

from embedlog.spark import datasource, sink
from embedlog.spark.source_options import parse

SINK = (
    *("before plan", "before stage", "within stage", "after stage"),
    *("before publish", "within publish", "after publish"),
)
"""Where a process is killed that writes: the planner, a task, or who commits."""
SOURCE = (
    *("before initialOffset", "after initialOffset", "before latestOffset", "after latestOffset"),
    *("before partitions", "after partitions", "within read", "before commit", "after commit"),
)
"""Where a process is killed that reads: the one that serves the query, or a task."""
CHECKPOINT = ("after offsets", "after commits")
"""When the JVM is killed by who watches its checkpoint (`watch`): what is there by then."""


def at(kills: str | None, place: str) -> None:
    """Kill this process if it is its turn: each name of a file in `kills` is a place, once.

    With KILL_DRIVER it is the JVM: alone ("java"), so that this process goes on
    until it notices, or together with this one ("both").
    """
    if kills:
        try:
            os.unlink(os.path.join(kills, place))
        except FileNotFoundError:
            return
        victims = os.environ.get("KILL_DRIVER")
        if victims:
            os.kill(_java(), signal.SIGKILL)
        if victims != "java":
            os.kill(os.getpid(), signal.SIGKILL)


def _java() -> int:
    from embedlog.files import process_id

    found = process_id.ancestor("java")
    assert found is not None
    return found.pid


class KillableReader(datasource.StreamReader):
    """A stream's reader that dies where it is told to."""

    def __init__(self, options: Any, schema: Any, kills: str | None) -> None:
        super().__init__(options, schema)
        self.kills = kills

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "kills": self.kills}

    def _between(self, name: str, *given: Any) -> Any:
        at(self.kills, f"before {name}")
        told = getattr(super(), name)(*given)
        at(self.kills, f"after {name}")
        return told

    def initialOffset(self) -> Any:  # noqa: N802
        return self._between("initialOffset")

    def latestOffset(self, start: Any = None, limit: Any = None) -> Any:  # noqa: N802
        return self._between("latestOffset", start, limit)

    def partitions(self, start: Any, end: Any) -> Any:
        return self._between("partitions", start, end)

    def commit(self, end: Any) -> None:
        self._between("commit", end)

    def read(self, partition: Any) -> Iterator[Any]:
        from embedlog.spark import partition_reader

        # So that a task hands on several times, and has handed on something by then.
        partition_reader.ROWS = 5
        for one in super().read(partition):
            yield one
            at(self.kills, "within read")


class KillableWriter(sink.StreamSink):
    """A stream's writer that dies where it is told to."""

    kills: str | None = None

    def write(self, iterator: Any) -> Any:
        from embedlog.spark import data_writer

        at(self.kills, "before stage")

        def dying() -> Any:
            seen = 0
            for one in iterator:
                for start in range(0, one.num_rows, 5):
                    yield one.slice(start, 5)
                    seen += 5
                    if seen > 10:
                        at(self.kills, "within stage")

        # So that something of it is written by then.
        data_writer.GATHERED_ROWS = 5
        told = super().write(dying())
        at(self.kills, "after stage")
        return told

    def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803
        from embedlog.partition import journal

        at(self.kills, "before publish")
        reveal = journal.make_visible

        def dying(txn: Any, rows: Any) -> None:
            at(self.kills, "within publish")
            reveal(txn, rows)

        journal.make_visible = dying
        try:
            super().commit(messages, batchId)
        finally:
            journal.make_visible = reveal
        at(self.kills, "after publish")


class Killable(DataSource):
    """`format("killable")`: as `embedlog`, with the option ``kills``."""

    @classmethod
    def name(cls) -> str:
        return "killable"

    def _given(self) -> tuple[str | None, dict[str, str]]:
        given = {name: value for name, value in self.options.items() if name != "kills"}
        return self.options.get("kills"), given

    def schema(self) -> str:
        from embedlog.spark import kafka_columns

        return kafka_columns.ddl(False)

    def streamReader(self, schema: Any) -> Any:  # noqa: N802
        kills, given = self._given()
        return KillableReader(parse(given), schema, kills)

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802
        kills, given = self._given()
        made = KillableWriter(sink.sink_options.parse(given))
        made.kills = kills
        at(kills, "before plan")
        return made


def register(spark: Any) -> Any:
    """Let a session know `format("killable")`."""
    from pyspark import cloudpickle

    # Spark's processes do not have the tests on their path.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    spark.dataSource.register(Killable)
    return spark


def order(kills: Path, place: str) -> None:
    """Have the next process that comes to a place be killed there."""
    kills.mkdir(exist_ok=True)
    (kills / place).touch()


def newest(directory: Path) -> int:
    """Return the last batch of which there is a file in a directory of a checkpoint; or -1."""
    if not directory.exists():
        return -1
    return max((int(each) for each in os.listdir(directory) if each.isdigit()), default=-1)


def watch(checkpoint: Path, kills: Path, victim: int) -> None:
    """Let a thread kill the JVM as soon as a file comes into its checkpoint that is ordered.

    No process of ours is asked at these steps, so it looks every half millisecond.
    """

    def look() -> None:
        while True:
            for place in CHECKPOINT:
                if (kills / place).exists():
                    _await_next(checkpoint / place.removeprefix("after "))
                    (kills / place).unlink()
                    os.kill(victim, signal.SIGKILL)
            time.sleep(0.01)

    threading.Thread(target=look, daemon=True).start()


def _await_next(directory: Path) -> None:
    known = newest(directory)
    while newest(directory) == known:
        time.sleep(0.0005)
