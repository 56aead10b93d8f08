"""How fast does Spark read a log, compared with Parquet files of the same rows in the same run?

Each action is measured with both in turn, so that a busy machine slows both.
"""

import os
import shutil
import statistics
import time
import warnings

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from embedlog import batch

RECORDS = 2_000_000
SINGLE_RECORDS = 200_000
WARM, ROUNDS = 8, 6
"""Java's compiler needs many warm-up rounds."""
ROWS = 2500
"""Rows in a batch: as many as a producer puts into 256 KiB."""


class Ready(DataSource):
    """Rows in memory: the time to read them is Spark's own."""

    @classmethod
    def name(cls) -> str:
        return "ready"

    def schema(self) -> str:
        from embedlog.spark.kafka_columns import schema_ddl

        return schema_ddl(False)

    def reader(self, schema):
        return ReadyReader()


class ReadyReader(DataSourceReader):
    def partitions(self):
        return [InputPartition(0), InputPartition(1)]

    def read(self, partition):
        from embedlog.spark.arrow_columns import spark_batches
        from embedlog.spark.kafka_columns import schema_ddl

        rows = 31_250
        names = tuple(column.split()[0] for column in schema_ddl(False).split(", "))
        ends = np.arange(rows + 1, dtype=np.int32)
        columns = {
            name: pa.Array.from_buffers(
                pa.binary(),
                rows,
                [None, pa.py_buffer(ends * size), pa.py_buffer(b"v" * size * rows)],
            )
            for name, size in (("key", 10), ("value", 96))
        }
        columns["offset"] = pa.array(np.arange(rows))
        columns["timestamp"] = columns["offset"].cast(pa.timestamp("ms", tz="UTC"))
        (batch,) = spark_batches(pa.table(columns), names, "t", 0, 0)
        for _ in range(RECORDS // 2 // rows):
            yield batch


@pytest.fixture(scope="module")
def spark():
    if shutil.which("java") is None:
        pytest.skip("Java is not installed")
    import bench_spark
    from pyspark import cloudpickle

    from embedlog.spark import session

    cloudpickle.register_pickle_by_value(bench_spark)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet = {"spark.ui.enabled": "false", "spark.log.level": "OFF"}
        spark = session("bench", "local[2]", quiet)
        spark.dataSource.register(Ready)
        yield spark
        spark.stop()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A topic of two partitions: 10-byte keys, 96-byte values, different timestamps."""
    import embedlog

    path = tmp_path_factory.mktemp("spark") / "log"
    with embedlog.open(path) as log:
        log.create_topic("t", 2, {"segment.bytes": 64 << 20})
        for number in range(RECORDS // ROWS):
            offsets = range(number * ROWS, (number + 1) * ROWS)
            keys = [b"k%09d" % offset for offset in offsets]
            # Random bytes: Parquet stores equal values once, and would have nothing to read.
            data = memoryview(os.urandom(96 * ROWS))
            values = [data[row : row + 96] for row in range(0, len(data), 96)]
            times = [1_700_000_000_000 + offset for offset in offsets]
            encoded = batch.encode_lists(values, keys, times)
            log.partition("t", number % 2).append([encoded])
    return path


@pytest.fixture(scope="module")
def parquet(spark, path, tmp_path_factory):
    """The same rows in Parquet files that Spark wrote."""
    directory = str(tmp_path_factory.mktemp("parquet") / "rows")
    log_frame(spark, path).write.option("compression", "none").parquet(directory)
    return directory


@pytest.fixture(scope="module")
def single_records_path(tmp_path_factory):
    """A topic of one-record batches, as programs write that wait for each record."""
    import embedlog

    path = tmp_path_factory.mktemp("singles") / "log"
    with embedlog.open(path) as log:
        log.create_topic("t", 2)
        value = os.urandom(96)
        for number in range(SINGLE_RECORDS):
            encoded = batch.encode_one(value, b"k%09d" % number, 1_700_000_000_000 + number)
            log.partition("t", number % 2).append([encoded])
    return path


def log_frame(spark, path):
    return spark.read.format("embedlog").option("path", path).option("subscribe", "t").load()


def count(frame, _):
    assert frame.count() == RECORDS


def lengths(frame, _):
    assert frame.selectExpr("sum(length(value))").first()[0] == RECORDS * 96


def all_columns(frame, _):
    frame.write.format("noop").mode("overwrite").save()


def to_parquet(frame, directory):
    frame.write.option("compression", "none").mode("overwrite").parquet(str(directory / "out"))


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("action", [count, lengths, all_columns, to_parquet])
def bench_spark_read(benchmark, note, spark, path, parquet, action, tmp_path):
    """From `load` to the result, compared with Parquet and with rows in memory."""
    seconds = {"parquet": [], "ready": []}
    frames = {
        "parquet": lambda: spark.read.parquet(parquet),
        "ready": lambda: spark.read.format("ready").load(),
    }

    def read_others():
        for name, frame in frames.items():
            start = time.perf_counter()
            action(frame(), tmp_path)
            seconds[name].append(time.perf_counter() - start)

    def read():
        action(log_frame(spark, path), tmp_path)

    benchmark.pedantic(read, setup=read_others, rounds=ROUNDS, warmup_rounds=WARM)
    ours = benchmark.stats.stats.median
    medians = {name: statistics.median(times[-ROUNDS:]) for name, times in seconds.items()}
    facts = {f"{name}_s": round(median, 3) for name, median in medians.items()}
    ratios = {f"of_{name}": round(median / ours, 2) for name, median in medians.items()}
    note(records=RECORDS, **facts, **ratios)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
def bench_spark_single_records(benchmark, note, spark, single_records_path, tmp_path):
    """All columns of 200,000 batches of one record."""

    def read():
        all_columns(log_frame(spark, single_records_path), tmp_path)

    benchmark.pedantic(read, rounds=ROUNDS, warmup_rounds=1)
    note(records=SINGLE_RECORDS)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
def bench_spark_stream(benchmark, note, spark, path, tmp_path):
    """A stream over the whole log into a noop sink: rows per second in `addBatch`."""
    add_batch_ms = []

    def stream():
        reader = spark.readStream.format("embedlog").option("path", path).option("subscribe", "t")
        frame = reader.option("startingOffsets", "earliest").load()
        batches = [
            batch
            for batch in progress(frame, tmp_path / str(len(add_batch_ms)))
            if batch["numInputRows"]
        ]
        assert sum(batch["numInputRows"] for batch in batches) == RECORDS
        add_batch_ms.append(sum(batch["durationMs"]["addBatch"] for batch in batches))

    benchmark.pedantic(stream, rounds=ROUNDS)
    note(records=RECORDS, rows_s_in_add_batch=round(1000 * RECORDS / min(add_batch_ms)))


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
def bench_spark_empty_batch(benchmark, note, spark, path, tmp_path):
    """A micro-batch without rows, the first one of a query that starts at the end."""
    durations = []

    def stream():
        frame = spark.readStream.format("embedlog").option("path", path).option("subscribe", "t")
        (batch,) = progress(frame.load(), tmp_path / str(len(durations)))
        assert batch["numInputRows"] == 0
        durations.append(batch["durationMs"])

    benchmark.pedantic(stream, rounds=2 * ROUNDS)
    shortest = min(durations, key=lambda times: times["triggerExecution"])
    note(records=0, batch_ms=shortest["triggerExecution"], add_batch_ms=shortest["addBatch"])


def progress(frame, checkpoint):
    """Run a query to the end of the log; return the progress of its micro-batches."""
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return query.recentProgress
