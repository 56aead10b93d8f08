"""A data source for the tests of the sink alone, with places at which its processes are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import DataSource

from embedlog.spark import sink, staging


def at(options: Any, place: str) -> None:
    """Kill this process if it is its turn: each name of a file in `kills` is a place, once."""
    kills = options.get("kills")
    if kills:
        try:
            os.unlink(os.path.join(kills, place))
        except FileNotFoundError:
            return
        victim = (os.environ.get("KILL_DRIVER") and _java()) or os.getpid()
        os.kill(victim, signal.SIGKILL)


def _java() -> int:
    from embedlog.files import processes

    found = processes.ancestor("java")
    assert found is not None
    return found.pid


class Killable(sink.StreamSink):
    """A stream's writer that dies where it is told to."""

    kills: dict[str, str] = {}  # noqa: RUF012 - set for each

    def write(self, iterator: Any) -> Any:
        at(self.kills, "before stage")

        def dying() -> Any:
            for one in iterator:
                for start in range(0, one.num_rows, 50):
                    yield one.slice(start, 50)
                    if start >= 100:
                        at(self.kills, "within stage")

        # So that something of it is written by then.
        staging.GATHERED_ROWS = 50
        told = super().write(dying())
        at(self.kills, "after stage")
        return told

    def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803
        from embedlog.log import journal

        at(self.kills, "before publish")
        reveal = journal.reveal

        def dying(txn: Any, rows: Any) -> None:
            at(self.kills, "within publish")
            reveal(txn, rows)

        journal.reveal = dying
        try:
            super().commit(messages, batchId)
        finally:
            journal.reveal = reveal
        at(self.kills, "after publish")


class SinkToKill(DataSource):
    """`format("killable")`: as `embedlog`, with the option ``kills``."""

    @classmethod
    def name(cls) -> str:
        return "killable"

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802
        kills = self.options.get("kills")
        given = {name: value for name, value in self.options.items() if name != "kills"}
        options = sink.sink_options.parse(given)
        made = Killable(options)
        made.kills = {"kills": kills}
        at(made.kills, "before plan")
        return made


def register(spark: Any) -> Any:
    """Let a session know `format("killable")`."""
    import sys

    from pyspark import cloudpickle

    # Spark's processes do not have the tests on their path.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    spark.dataSource.register(SinkToKill)
    return spark


def order(kills: Path, place: str) -> None:
    """Have the next process that comes to a place be killed there."""
    kills.mkdir(exist_ok=True)
    (kills / place).touch()
