"""A source and sink for tests, with points at which Spark's processes are killed."""

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
from embedlog.spark.options import SinkOptions

SINK = (
    *("before plan", "before stage", "within stage", "after stage"),
    *("before publish", "within publish", "after publish"),
)
"""Points in the processes that write: planning, staging in a task, and committing."""
SOURCE = (
    *("before initialOffset", "after initialOffset", "before latestOffset", "after latestOffset"),
    *("before partitions", "after partitions", "within read", "before commit", "after commit"),
)
"""Points in the processes that read: the one that serves the query, and a task."""
CHECKPOINT = ("after offsets", "after commits")
"""Files in the checkpoint after which `watch` kills the JVM."""


def at(kills: str | None, kill_point: str) -> None:
    """Kill this process if there is a file with the point's name in `kills`, and delete the file.

    With KILL_DRIVER it kills the JVM: only that ("java"), so that this process goes on until
    it notices, or both ("both").
    """
    if kills:
        try:
            os.unlink(os.path.join(kills, kill_point))
        except FileNotFoundError:
            return
        victims = os.environ.get("KILL_DRIVER")
        if victims:
            os.kill(_java(), signal.SIGKILL)
        if victims != "java":
            os.kill(os.getpid(), signal.SIGKILL)


def _java() -> int:
    from embedlog.files import process_id

    jvm = process_id.ancestor("java")
    assert jvm is not None
    return jvm.pid


class KillableReader(datasource.StreamReader):
    """A stream reader that is killed where it is ordered."""

    def __init__(self, options: Any, schema: Any, kills: str | None) -> None:
        super().__init__(options, schema)
        self.kills = kills

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "kills": self.kills}

    def _call(self, name: str, *args: Any) -> Any:
        at(self.kills, f"before {name}")
        result = getattr(super(), name)(*args)
        at(self.kills, f"after {name}")
        return result

    def initialOffset(self) -> Any:  # noqa: N802
        return self._call("initialOffset")

    def latestOffset(self, start: Any = None, limit: Any = None) -> Any:  # noqa: N802
        return self._call("latestOffset", start, limit)

    def partitions(self, start: Any, end: Any) -> Any:
        return self._call("partitions", start, end)

    def commit(self, end: Any) -> None:
        self._call("commit", end)

    def read(self, partition: Any) -> Iterator[Any]:
        from embedlog.splits import read_slice

        # Small, so that a task yields several batches and has yielded one before it is killed.
        read_slice.TARGET_ROWS = 5
        for batch in super().read(partition):
            yield batch
            at(self.kills, "within read")


class KillableWriter(sink.StreamSink):
    """A stream writer that is killed where it is ordered."""

    kills: str | None = None

    def write(self, iterator: Any) -> Any:
        from embedlog.spark import data_writer

        at(self.kills, "before stage")

        def rows_until_killed() -> Any:
            count = 0
            for batch in iterator:
                for start in range(0, batch.num_rows, 5):
                    yield batch.slice(start, 5)
                    count += 5
                    if count > 10:
                        at(self.kills, "within stage")

        # Small, so that some rows are written before the task is killed.
        data_writer.COMBINED_ROWS = 5
        message = super().write(rows_until_killed())
        at(self.kills, "after stage")
        return message

    def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803
        from embedlog.partition import journal

        at(self.kills, "before publish")
        reveal = journal.make_visible

        def reveal_or_die(*arguments: Any) -> None:
            at(self.kills, "within publish")
            reveal(*arguments)

        journal.make_visible = reveal_or_die
        try:
            super().commit(messages, batchId)
        finally:
            journal.make_visible = reveal
        at(self.kills, "after publish")


class Killable(DataSource):
    """`format("killable")`: `embedlog` with the option ``kills``, a directory of kill points."""

    @classmethod
    def name(cls) -> str:
        return "killable"

    def _split_options(self) -> tuple[str | None, dict[str, str]]:
        options = {name: value for name, value in self.options.items() if name != "kills"}
        return self.options.get("kills"), options

    def schema(self) -> Any:
        from pyspark.sql.types import StructType

        from embedlog.spark.columns import spark_schema

        return StructType.fromJson(spark_schema(None))

    def streamReader(self, schema: Any) -> Any:  # noqa: N802
        kills, options = self._split_options()
        return KillableReader(options, schema, kills)

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802
        kills, options = self._split_options()
        writer = KillableWriter(SinkOptions.parse(options), schema.jsonValue()["fields"])
        writer.kills = kills
        at(kills, "before plan")
        return writer


def die_within_read(kills: str) -> Any:
    """Return a function for `mapInArrow` that passes rows on, and is killed after some of them."""

    def pass_on(batches: Any) -> Any:
        for batch in batches:
            yield batch
            at(kills, "within read")

    return pass_on


def register(spark: Any) -> Any:
    """Make `format("killable")` known to a session."""
    from pyspark import cloudpickle

    # Spark's processes do not have the tests on their path.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    spark.dataSource.register(Killable)
    return spark


def order(kills: Path, kill_point: str) -> None:
    """Kill the next process that comes to a point."""
    kills.mkdir(exist_ok=True)
    (kills / kill_point).touch()


def newest(directory: Path) -> int:
    """Return the last batch with a file in a directory of a checkpoint, or -1."""
    if not directory.exists():
        return -1
    return max((int(name) for name in os.listdir(directory) if name.isdigit()), default=-1)


def watch(checkpoint: Path, kills: Path, victim: int) -> None:
    """Kill the JVM, from a thread, as soon as an ordered file appears in its checkpoint.

    Spark calls none of our code at these steps, so the thread polls every half millisecond.
    """

    def poll() -> None:
        while True:
            for kill_point in CHECKPOINT:
                if (kills / kill_point).exists():
                    _await_next(checkpoint / kill_point.removeprefix("after "))
                    (kills / kill_point).unlink()
                    os.kill(victim, signal.SIGKILL)
            time.sleep(0.01)

    threading.Thread(target=poll, daemon=True).start()


def _await_next(directory: Path) -> None:
    before = newest(directory)
    while newest(directory) == before:
        time.sleep(0.0005)
