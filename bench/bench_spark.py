"""How fast does Spark read a log, beside Parquet with the same rows in the same run?

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
WARM, ROUNDS = 8, 6
"""Java compiles what it runs for longer than one would think."""
ROWS = 2500
"""Of a batch: as many as a producer puts in one of 256 KiB."""


class Ready(DataSource):
    """The same rows, made before anyone asks: what is left is Spark's own part."""

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
        from embedlog.spark.kafka_columns import schema_ddl
        from embedlog.spark.kafka_columns import spark_batches as of_source

        rows = 31_250
        names = tuple(each.split()[0] for each in schema_ddl(False).split(", "))
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
        (made,) = of_source(pa.table(columns), names, "t", 0, 0)
        for _ in range(RECORDS // 2 // rows):
            yield made


@pytest.fixture(scope="module")
def spark():
    if shutil.which("java") is None:
        pytest.skip("there is no Java")
    import bench_spark
    from pyspark import cloudpickle

    from embedlog.spark import session

    cloudpickle.register_pickle_by_value(bench_spark)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet = {"spark.ui.enabled": "false", "spark.log.level": "OFF"}
        made = session("bench", "local[2]", quiet)
        made.dataSource.register(Ready)
        yield made
        made.stop()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A topic of two partitions: 10-byte keys, 96-byte values, times that differ."""
    import embedlog

    path = tmp_path_factory.mktemp("spark") / "log"
    with embedlog.open(path) as log:
        log.create_topic("t", 2, {"segment.bytes": 64 << 20})
        for number in range(RECORDS // ROWS):
            offsets = range(number * ROWS, (number + 1) * ROWS)
            keys = [b"k%09d" % offset for offset in offsets]
            # Of random bytes: Parquet keeps equal ones once, and would have nothing to read.
            data = memoryview(os.urandom(96 * ROWS))
            values = [data[row : row + 96] for row in range(0, len(data), 96)]
            times = [1_700_000_000_000 + offset for offset in offsets]
            some = batch.encode_lists(values, keys, times)
            log.partition("t", number % 2).append([some])
    return path


@pytest.fixture(scope="module")
def parquet(spark, path, tmp_path_factory):
    """The same rows, as Spark writes them."""
    where = str(tmp_path_factory.mktemp("parquet") / "rows")
    of_log(spark, path).write.option("compression", "none").parquet(where)
    return where


def of_log(spark, path):
    return spark.read.format("embedlog").option("path", path).option("subscribe", "t").load()


def count(frame, _):
    assert frame.count() == RECORDS


def lengths(frame, _):
    assert frame.selectExpr("sum(length(value))").first()[0] == RECORDS * 96


def all_columns(frame, _):
    frame.write.format("noop").mode("overwrite").save()


def to_parquet(frame, where):
    frame.write.option("compression", "none").mode("overwrite").parquet(str(where / "out"))


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("action", [count, lengths, all_columns, to_parquet])
def bench_spark_read(benchmark, note, spark, path, parquet, action, tmp_path):
    """From `load` to the result; beside the same from Parquet, and from rows that are ready."""
    others = {"parquet": [], "ready": []}
    frames = {
        "parquet": lambda: spark.read.parquet(parquet),
        "ready": lambda: spark.read.format("ready").load(),
    }

    def beside():
        for name, frame in frames.items():
            begin = time.perf_counter()
            action(frame(), tmp_path)
            others[name].append(time.perf_counter() - begin)

    def read():
        action(of_log(spark, path), tmp_path)

    benchmark.pedantic(read, setup=beside, rounds=ROUNDS, warmup_rounds=WARM)
    ours = benchmark.stats.stats.median
    each = {name: statistics.median(times[-ROUNDS:]) for name, times in others.items()}
    seconds = {f"{name}_s": round(time, 3) for name, time in each.items()}
    ratios = {f"of_{name}": round(time / ours, 2) for name, time in each.items()}
    note(records=RECORDS, **seconds, **ratios)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
def bench_spark_stream(benchmark, note, spark, path, tmp_path):
    """A stream over all of it to nowhere: rows a second in `addBatch`."""
    made = []

    def stream():
        reader = spark.readStream.format("embedlog").option("path", path).option("subscribe", "t")
        frame = reader.option("startingOffsets", "earliest").load()
        done = [one for one in progress(frame, tmp_path / str(len(made))) if one["numInputRows"]]
        assert sum(one["numInputRows"] for one in done) == RECORDS
        made.append(sum(one["durationMs"]["addBatch"] for one in done))

    benchmark.pedantic(stream, rounds=ROUNDS)
    note(records=RECORDS, rows_s_in_add_batch=round(1000 * RECORDS / min(made)))


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
def bench_spark_empty_batch(benchmark, note, spark, path, tmp_path):
    """A micro-batch without a row: the first one of a query that begins at the end."""
    made = []

    def stream():
        frame = spark.readStream.format("embedlog").option("path", path).option("subscribe", "t")
        (one,) = progress(frame.load(), tmp_path / str(len(made)))
        assert one["numInputRows"] == 0
        made.append(one["durationMs"])

    benchmark.pedantic(stream, rounds=2 * ROUNDS)
    least = min(made, key=lambda times: times["triggerExecution"])
    note(records=0, batch_ms=least["triggerExecution"], add_batch_ms=least["addBatch"])


def progress(frame, checkpoint):
    """Run a query up to what there is; returns what it tells of its micro-batches."""
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return query.recentProgress
