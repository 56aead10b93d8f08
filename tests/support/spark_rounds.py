"""Queries that visit every method of the planner, and must not notice that it dies in one."""

from __future__ import annotations

import itertools
import math
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from embedlog.api import Log
from embedlog.partition import leases
from support import planner_faults
from support.forks import until
from support.roots import rows
from support.spark_copy import HANG_SECONDS, KEYS, OPTIONS, PARTITIONS, SOURCE, Copied, Feed
from support.spark_session import faults_of

VALUES = 50
"""The values of each key in the topic when the first query starts."""


class Rounds:
    """Queries on a topic that grows, and checks that they read or write each record once.

    Args:
        spark: The session; its planner obeys the orders in `faults_of` it.
        log: A log without topics.
        directory: A directory for checkpoints.
    """

    def __init__(self, spark: Any, log: Log, directory: Path) -> None:
        self._spark, self._log, self._directory = spark, log, directory
        self._faults = faults_of(spark)
        self._numbers = itertools.count()
        self._sent = [VALUES] * KEYS
        """The number of values of each key in the topic."""
        log.create_topic("from", PARTITIONS, SOURCE | {"segment.bytes": 3000})
        with log.producer() as producer:
            for value in range(VALUES):
                for key in range(KEYS):
                    producer.send("from", b"%d" % value, key=b"%d" % key)
                # A batch each, and so several segments.
                producer.flush()

    def copy_what_there_is(self) -> None:
        """Copy the topic with Trigger.AvailableNow: exactly up to where it ended at the start."""
        with Feed(self._log, self._sent):
            copied, query = self.start("earliest", availableNow=True)
            # A query that has forgotten its targets goes on as long as there is something to read.
            _end(query, lambda: sum(copied.update()) > self._target())
        copied.update()
        assert copied.read == self._target()
        assert (copied.lost, copied.duplicated) == (0, 0)

    def _target(self) -> float:
        """Return how many records there were when the query was told to read no further."""
        targets = planner_faults.journal(self._faults, "prepare_for_available_now")
        assert len(targets) <= 1
        return sum(targets[0]["from"].values()) if targets else math.inf

    def copy_from_the_end(self) -> None:
        """Copy what is appended from now on, and stop the query."""
        with Feed(self._log, self._sent) as feed:
            copied, query = self.start("latest", processingTime="50 milliseconds")
            try:
                until(lambda: self._has_begun(query, "initial_offset"), HANG_SECONDS)
                starts = planner_faults.journal(self._faults, "initial_offset")
                # Spark asks until there is a first batch: the answer must not change.
                assert all(start == starts[0] for start in starts)
                copied.next_values = self._values_before(starts[0]["from"])
                sent = [count + 1 for count in feed.sent]
                until(lambda: copied.has(sent) or not query.isActive, HANG_SECONDS)
            finally:
                query.stop()
            assert query.exception() is None, str(query.exception())
        copied.update()
        assert (copied.lost, copied.duplicated) == (0, 0)

    def process_what_there_is(self, process: Callable[[Any, int], None]) -> None:
        """Pass the topic, as it is now, to a function in micro-batches."""
        writer = self._reader("earliest").load().writeStream.foreachBatch(process)
        writer = writer.option("checkpointLocation", str(self._directory / "processed"))
        _end(writer.trigger(availableNow=True).start())

    def count(self) -> None:
        """Count the records of the topic."""
        assert self._read().count() == sum(self._sent)

    def write(self) -> None:
        """Write a batch that may be repeated."""
        topic = self._new_topic()
        for _ in range(2):
            self._save(self._read(), topic, txnAppId=topic, txnVersion=1)
        self._check_copy(topic)

    def write_once(self) -> None:
        """Write a batch that must not be repeated."""
        topic = self._new_topic()
        self._save(self._read(), topic)
        self._check_copy(topic)

    def written_once(self) -> int:
        """Return how many records `write_once` has written at last."""
        return sum(Copied(self._log, self._last_topic).update())

    def fail_to_write(self) -> None:
        """Write a batch of which a task fails, so that what the others have staged is discarded."""
        topic = self._new_topic()
        broken = "if(value = '7' and key = '1', raise_error('a broken row'), value) as value"
        with pytest.raises(Exception, match="a broken row"):
            self._save(self._read().repartition(2).selectExpr("key", broken), topic)
        assert sum(Copied(self._log, topic).update()) == 0

    def use_a_table(self) -> None:
        """Create a table of Spark's catalog, write to it, and read it."""
        topic = self._new_topic()
        options = f"path '{self._log.path}', subscribe '{topic}'"
        self._sql(f"CREATE TABLE `{topic}` USING embedlog OPTIONS ({options})")
        try:
            writer = self._read().select("key", "value").writeTo(f"`{topic}`")
            writer.options(txnAppId=topic, txnVersion="1").append()
            self._check_copy(topic)
            assert self._spark.table(f"`{topic}`").count() == sum(self._sent)
        finally:
            self._sql(f"DROP TABLE `{topic}`")

    def use_the_catalog(self) -> None:
        """List, show, change and drop a topic as a table of a catalog."""
        topic = self._new_topic()
        name = self._new_catalog()
        tables = {row.tableName for row in self._sql(f"SHOW TABLES IN {name}.default")}
        assert tables == set(self._log.topics())
        table = f"{name}.default.`{topic}`"
        self._sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('partitions' = '5')")
        assert self._log.topic(topic).partitions == 5
        self._sql(f"DROP TABLE {table}")
        assert topic not in self._log.topics()

    def create_table(self, topic: str) -> None:
        """Create a topic as a table of a catalog."""
        self._sql(f"CREATE TABLE {self._new_catalog()}.default.`{topic}`")

    def add_column(self, topic: str) -> None:
        """Add a column to a typed topic."""
        self._sql(f"ALTER TABLE {self._new_catalog()}.default.`{topic}` ADD COLUMN b INT")

    def _new_catalog(self) -> str:
        """Return the name of a new catalog with the topics of the log; others keep theirs."""
        name = f"catalog_{uuid.uuid4().hex}"
        self._spark.conf.set(f"spark.sql.catalog.{name}", "embedlog.spark.LogCatalog")
        self._spark.conf.set(f"spark.sql.catalog.{name}.path", self._log.path)
        return name

    def _sql(self, text: str) -> list[Any]:
        return list(self._spark.sql(text).collect())

    def _save(self, frame: Any, topic: str, **options: Any) -> None:
        writer = frame.select("key", "value").write.format("embedlog").mode("append")
        writer.options(path=self._log.path, topic=topic, **options).save()

    def _check_copy(self, topic: str) -> None:
        copied = Copied(self._log, topic)
        assert copied.update() == self._sent
        assert (copied.lost, copied.duplicated) == (0, 0)

    def leases_of_streams(self) -> list[str]:
        """Return the names of leases, except those that batch queries share."""
        names = (lease.name for lease in self._log.housekeeping.leases())
        return [name for name in names if not name.startswith("spark-batch-")]

    def end_lease(self, name: str) -> None:
        """End a lease before its time."""
        leases.release(self._log.root.context, name)

    def _read(self) -> Any:
        options = {"path": self._log.path, "subscribe": "from"}
        return self._spark.read.format("embedlog").options(**options).load()

    def _new_topic(self) -> str:
        topic = self._last_topic = f"to_{next(self._numbers)}"
        self._log.create_topic(topic, 2, {"segment.bytes": 30_000})
        return topic

    def start(self, starting: str, **trigger: Any) -> tuple[Copied, Any]:
        """Start a query that copies the topic to a new one."""
        topic = self._new_topic()
        reader = self._reader(starting).option("commitToGroup", topic)
        writer = reader.load().select("key", "value").writeStream.format("embedlog")
        writer = writer.options(path=self._log.path, topic=topic)
        writer = writer.option("checkpointLocation", str(self._directory / topic))
        return Copied(self._log, topic), writer.trigger(**trigger).start()

    def _reader(self, starting: str) -> Any:
        options = OPTIONS | {"maxOffsetsPerTrigger": 200, "startingOffsets": starting}
        reader = self._spark.readStream.format("embedlog").options(**options)
        return reader.options(path=self._log.path, subscribe="from")

    def _has_begun(self, query: Any, method: str) -> bool:
        assert query.isActive, str(query.exception())
        return bool(planner_faults.journal(self._faults, method))

    def _values_before(self, offsets: dict[str, int]) -> list[int]:
        """Return the first value of each key at or after the offsets of the partitions."""
        first = [0] * KEYS
        for number, offset in offsets.items():
            for record_offset, _, key, value, _ in rows(
                self._log.partition("from", int(number)), 0
            ):
                if record_offset < offset:
                    first[int(key or b"")] = int(value or b"") + 1
        return first


def _end(query: Any, too_far: Callable[[], bool] = lambda: False) -> None:
    """Wait for the end of a query, or until it has gone too far."""
    try:
        until(lambda: query.awaitTermination(0.1) or too_far(), HANG_SECONDS)
    finally:
        query.stop()
    assert query.exception() is None, str(query.exception())


Round = Callable[[Rounds], None]
ROUNDS: dict[str, tuple[Round, ...]] = {
    "check_reader": (Rounds.copy_what_there_is, Rounds.count),
    "plan_batch": (Rounds.count, Rounds.write_once),
    "open_stream": (Rounds.copy_what_there_is, Rounds.copy_from_the_end),
    "initial_offset": (Rounds.copy_what_there_is, Rounds.copy_from_the_end),
    "latest_offset": (Rounds.copy_what_there_is, Rounds.copy_from_the_end),
    "report_latest_offset": (Rounds.copy_what_there_is,),
    "prepare_for_available_now": (Rounds.copy_what_there_is,),
    "plan_micro_batch": (Rounds.copy_what_there_is, Rounds.copy_from_the_end),
    "commit": (Rounds.copy_what_there_is,),
    "close_stream": (Rounds.copy_what_there_is, Rounds.copy_from_the_end),
    "is_typed_topic": (Rounds.write_once, Rounds.copy_what_there_is),
    "plan_write": (Rounds.write_once, Rounds.copy_what_there_is),
    "publish_batch": (Rounds.write,),
    "publish_micro_batch": (Rounds.copy_what_there_is, Rounds.copy_from_the_end),
    "discard": (Rounds.fail_to_write,),
    "check_table": (Rounds.use_a_table,),
    "table_reader_options": (Rounds.use_a_table,),
    "table_writer_options": (Rounds.use_a_table,),
    "tables": (Rounds.use_the_catalog,),
    "table": (Rounds.use_the_catalog,),
    "alter_table": (Rounds.use_the_catalog,),
    "drop_table": (Rounds.use_the_catalog,),
}
"""The queries that call a method of the planner.  A new method needs an entry here."""
EXCEPTIONS = dict.fromkeys(
    ("create_table", "alter_columns"),
    "It must not be repeated: its statement fails, as another test says",
)
"""Methods that no query of `ROUNDS` calls, and why."""
OFTEN = (
    *("latest_offset", "report_latest_offset", "plan_micro_batch", "commit"),
    "publish_micro_batch",
)
"""Methods that a stream calls for each micro-batch."""
