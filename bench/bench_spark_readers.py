"""How fast does Spark read a log: in the JVM, in Python, from Kafka and from Parquet?

    python bench/bench_spark_readers.py                # the tables of docs/performance.md
    python bench/bench_spark_readers.py --scale        # 20 M rows, 100 partitions, 10,000 segments
    python bench/bench_spark_readers.py --scale --master 'local-cluster[2,1,1024]'
    python bench/bench_spark_readers.py --quick        # a few rows and rounds: does it still run?

All sources hold the same rows, and take turns in each round, so that a slow second of the
machine affects all of them.  A cell has the median of the wall times, and the median of the
CPU times of Spark's JVM and of all Python processes under it.  The CPU time of the broker is
in its own column.  Kafka needs Maven, and is left out where the broker or Spark's connector
cannot be had.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from spark_sources import KAFKA_CONNECTOR, Cost, Meter, Source, kafka, maven_jars, start_session

import embedlog
from embedlog import batch

BATCH_ROWS = 2500
"""As many as a producer puts into 256 KiB."""
VALUE_BYTES = 96
START_MS = 1_700_000_000_000
WARM_ROUNDS = 8
"""Java's compiler needs so many rounds until the times no longer fall."""
MICRO_BATCHES = 20


def write_log(
    path: Path, rows: int, partitions: int, segment_bytes: int, batch_rows: int = BATCH_ROWS
) -> None:
    """Write a topic "t" whose k-th partition has rows in proportion to 1 / (k + 1).

    With two partitions, both have half of the rows.
    """
    weights = [1.0, 1.0] if partitions == 2 else [1 / (k + 1) for k in range(partitions)]
    batches = [max(int(rows / batch_rows * weight / sum(weights)), 1) for weight in weights]
    batches[0] += rows // batch_rows - sum(batches)
    with embedlog.open(path, maintenance=False) as log:
        log.create_topic("t", partitions, {"segment.bytes": segment_bytes})
        first = 0
        for number, count in enumerate(batches):
            for _ in range(count):
                log.partition("t", number).append([_batch(first, batch_rows)])
                first += batch_rows


def _batch(first: int, rows: int) -> Any:
    # Random bytes: Parquet stores equal values once, and would have nothing to read.
    data = memoryview(os.urandom(VALUE_BYTES * rows))
    values = [data[at : at + VALUE_BYTES] for at in range(0, len(data), VALUE_BYTES)]
    numbers = range(first, first + rows)
    keys = [b"k%09d" % number for number in numbers]
    return batch.encode_lists(values, keys, [START_MS + number for number in numbers])


def write_single_records(path: Path, rows: int) -> None:
    """Write a topic of one-record batches, as programs do that wait for each record."""
    value = os.urandom(VALUE_BYTES)
    with embedlog.open(path, maintenance=False) as log:
        log.create_topic("t", 2)
        for number in range(rows):
            encoded = batch.encode_one(value, b"k%09d" % number, START_MS + number)
            log.partition("t", number % 2).append([encoded])


class Bench:
    """One session, and the sources that are compared in it."""

    def __init__(self, spark: Any, meter: Meter, directory: Path, rows: int) -> None:
        self.spark, self.meter, self.directory, self.rows = spark, meter, directory, rows
        self._number = 0

    def count(self, source: Source) -> None:
        """Count the rows."""
        assert source.frame(self.spark).count() == self.rows

    def all_columns(self, source: Source) -> None:
        """Read all columns, and drop them."""
        source.frame(self.spark).write.format("noop").mode("overwrite").save()

    def key_and_timestamp(self, source: Source) -> None:
        """Read two of the columns."""
        columns = source.frame(self.spark).select("key", "timestamp")
        columns.write.format("noop").mode("overwrite").save()

    def sum_of_lengths(self, source: Source) -> None:
        """Aggregate one column."""
        row = source.frame(self.spark).selectExpr("sum(length(value))").first()
        assert row[0] == self.rows * VALUE_BYTES

    def to_parquet(self, source: Source) -> None:
        """Read all columns, and write them."""
        writer = source.frame(self.spark).write.option("compression", "none").mode("overwrite")
        writer.parquet(str(self.directory / "out"))

    def stream(self, source: Source) -> None:
        """Read all rows as a stream that stops at the end."""
        assert self._run(source.stream(self.spark)) == self.rows

    def micro_batches(self, source: Source) -> None:
        """Read the last rows in micro-batches of 100 rows."""
        first = (self.rows - MICRO_BATCHES * 100) // 2
        offsets = json.dumps({"t": {"0": first, "1": first}})
        options = {"startingOffsets": offsets, "maxOffsetsPerTrigger": 100}
        assert self._run(source.stream(self.spark, **options)) == MICRO_BATCHES * 100

    def _run(self, frame: Any) -> int:
        """Run a query to the end of the log; return the number of its rows."""
        self._number += 1
        checkpoint = self.directory / f"checkpoint-{self._number}"
        writer = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        return sum(progress.numInputRows for progress in query.recentProgress)

    def compare(
        self,
        title: str,
        action: Callable[[Source], None],
        sources: list[Source],
        rounds: int,
        warm_rounds: int = WARM_ROUNDS,
    ) -> None:
        """Let the sources take turns, and print a row of the table."""
        costs: dict[str, list[Cost]] = {source.name: [] for source in sources}
        for number in range(warm_rounds + rounds):
            for source in sources:
                cost = self.meter.cost(lambda source=source: action(source))  # type: ignore[misc]
                if number >= warm_rounds:
                    costs[source.name].append(cost)
        cells = [_cell(costs[name]) if name in costs else "–" for name in self.columns]
        print(f"| {title} | {' | '.join(cells)} |", flush=True)

    columns: tuple[str, ...] = ()

    def begin_table(self, sources: list[Source]) -> None:
        """Print the head of the table."""
        self.columns = tuple(source.name for source in sources)
        print(f"| wall (CPU), s | {' | '.join(self.columns)} |")
        print("|---|" + "--:|" * len(self.columns))


def _cell(costs: list[Cost]) -> str:
    wall, cpu, broker = (statistics.median(column) for column in zip(*costs, strict=True))
    extra = f" + {broker:.2f}" if broker >= 0.005 else ""
    return f"{wall:.2f} ({cpu:.2f}{extra})"


def log_sources(path: Path) -> list[Source]:
    """Return a log as read by the JVM and as read by Python."""
    options = {"path": str(path), "subscribe": "t"}
    return [
        Source("embedlog, JVM", "embedlog", options, "jvm"),
        Source("embedlog, Python", "embedlog", options, "python"),
    ]


def copy_rows(bench: Bench, log: Source, address: str | None) -> list[Source]:
    """Copy the rows of a log to Parquet files, and to Kafka if there is an address."""
    rows = log.frame(bench.spark)
    files = str(bench.directory / "rows")
    rows.write.option("compression", "none").parquet(files)
    copies = [Source("Parquet", "parquet", {"path": files})]
    if address is not None:
        options = {"kafka.bootstrap.servers": address, "subscribe": "t"}
        writer = rows.select("key", "value", "partition").write.format("kafka")
        writer.options(**{**options, "topic": "t"}).save()
        copies.append(Source("Kafka", "kafka", options))
    return copies


def measure_reads(arguments: argparse.Namespace, directory: Path) -> None:
    """Compare all sources, and then a fresh session for each."""
    write_log(directory / "log", arguments.rows, 2, 64 << 20)
    write_single_records(directory / "singles", arguments.rows // 10)
    with ExitStack() as stack:
        broker = stack.enter_context(kafka()) if shutil.which("mvn") else None
        jars = maven_jars(KAFKA_CONNECTOR) if broker else []
        address = broker[0] if broker and jars else None
        spark = start_session(arguments.master, jars)
        stack.callback(spark.stop)
        bench = Bench(spark, Meter(spark, broker[1] if broker else None), directory, arguments.rows)
        logs = log_sources(directory / "log")
        if address:
            create_kafka_topic(bench, address)
        copies = copy_rows(bench, logs[0], address)
        sources = [*logs, *copies]
        bench.begin_table(sources)
        rounds, warm = arguments.rounds, arguments.warm_rounds
        bench.compare("all columns", bench.all_columns, sources, rounds, warm)
        bench.compare("→ Parquet", bench.to_parquet, sources, rounds, min(warm, 2))
        bench.compare("`count()`", bench.count, sources, rounds, warm)
        bench.compare("`key`, `timestamp`", bench.key_and_timestamp, sources, rounds, warm)
        bench.compare("`sum(length(value))`", bench.sum_of_lengths, sources, rounds, warm)
        streams = [source for source in sources if source.format != "parquet"]
        bench.compare("stream, `availableNow`", bench.stream, streams, rounds, min(warm, 3))
        bench.compare(
            f"{MICRO_BATCHES} micro-batches of 100 rows",
            bench.micro_batches,
            streams,
            rounds,
            min(warm, 3),
        )
        singles = log_sources(directory / "singles")
        bench.compare("one-record batches", bench.all_columns, singles, rounds, min(warm, 3))
        measure_first_queries(sources, arguments, jars)


def create_kafka_topic(bench: Bench, address: str) -> None:
    """Create a topic of two partitions with the client in Spark's connector."""
    jvm = bench.spark.sparkContext._jvm
    settings = jvm.java.util.HashMap()
    settings.put("bootstrap.servers", address)
    topic = jvm.org.apache.kafka.clients.admin.NewTopic("t", 2, 1)
    topics = jvm.java.util.ArrayList()
    topics.add(topic)
    admin = jvm.org.apache.kafka.clients.admin.Admin.create(settings)
    admin.createTopics(topics).all().get()
    admin.close()


def measure_first_queries(
    sources: list[Source], arguments: argparse.Namespace, jars: list[str]
) -> None:
    """Print the time of a fresh session's first query, and the memory after three of them."""
    answers: dict[str, list[dict[str, float]]] = {source.name: [] for source in sources}
    for _ in range(max(arguments.rounds // 2, 1)):
        for source in sources:
            request = json.dumps([source, arguments.master, jars, arguments.rows])
            command = [sys.executable, __file__, "--fresh-session", request]
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            answers[source.name].append(json.loads(printed.splitlines()[-1]))
    for fact, title in (
        ("first", "first query of a session: all columns, s"),
        ("memory", "peak memory of the JVM and Python processes, MiB"),
    ):
        medians = (statistics.median(answer[fact] for answer in answers[name]) for name in answers)
        form = "{:.2f}" if fact == "first" else "{:.0f}"
        print(f"| {title} | {' | '.join(form.format(median) for median in medians)} |", flush=True)


def measure_fresh_session(request: str) -> None:
    """Answer a request of `measure_first_queries`, in a process of its own."""
    source, master, jars, rows = json.loads(request)
    with tempfile.TemporaryDirectory() as directory:
        spark = start_session(master, jars)
        bench = Bench(spark, Meter(spark, None), Path(directory), rows)
        first = bench.meter.cost(lambda: bench.all_columns(Source(*source)))
        for _ in range(2):
            bench.all_columns(Source(*source))
        print(json.dumps({"first": first.wall, "memory": bench.meter.peak_mib()}))
        spark.stop()


def measure_scale(arguments: argparse.Namespace, directory: Path) -> None:
    """Read many segments of partitions of very different sizes."""
    rows, batch_rows = arguments.rows * 10, 500
    # Four batches of 124 bytes a row.
    write_log(directory / "log", rows, 100, 4 * batch_rows * 128, batch_rows)
    with embedlog.open(directory / "log", mode="r") as log:
        segments = sum(len(log.partition("t", number).segments) for number in range(100))
    print(f"{rows:,} rows in 100 partitions and {segments:,} segments, {arguments.master}\n")
    spark = start_session(arguments.master, [])
    bench = Bench(spark, Meter(spark, None), directory, rows)
    logs = log_sources(directory / "log")
    sources = [*logs, *copy_rows(bench, logs[0], None)]
    bench.begin_table(sources)
    for title, action in (
        ("all columns", bench.all_columns),
        ("`count()`", bench.count),
        ("`sum(length(value))`", bench.sum_of_lengths),
    ):
        bench.compare(title, action, sources, arguments.rounds, 1)
    bench.compare("stream, `availableNow`", bench.stream, logs, max(arguments.rounds // 2, 1), 0)
    spark.stop()


def main(words: list[str] | None = None) -> None:
    """Measure, and print tables in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows of the first table")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each query")
    parser.add_argument("--warm-rounds", type=int, default=WARM_ROUNDS)
    parser.add_argument("--master", default="local[2]", help="Spark's master URL")
    parser.add_argument("--scale", action="store_true", help="ten times the rows, many segments")
    parser.add_argument("--quick", action="store_true", help="few rows and rounds, for a test")
    parser.add_argument("--fresh-session", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.fresh_session:
        measure_fresh_session(arguments.fresh_session)
        return
    if arguments.quick:
        arguments.rows, arguments.rounds, arguments.warm_rounds = 20_000, 1, 0
    with tempfile.TemporaryDirectory(prefix="embedlog-bench-") as directory:
        (measure_scale if arguments.scale else measure_reads)(arguments, Path(directory))


if __name__ == "__main__":
    main()
