"""What do the writers cost per row, compared with Parquet in the same run, and per micro-batch?

The rows come from Parquet, which Spark reads in a third of the time; micro-batches
come from a source that costs almost nothing, so that Spark and embedlog take their time.
"""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from spark_sources import Meter
from support import spark_session

from embedlog import batch
from embedlog.spark.spark_session import READER

ROWS = int(os.environ.get("EMBEDLOG_BENCH_SPARK_ROWS", "2000000"))
APPENDS = int(os.environ.get("EMBEDLOG_BENCH_SPARK_APPENDS", "60"))
ROUNDS = 5


class Stamps(DataSource):
    """A stream of the 8-byte words of a file, each the time at which it was written."""

    @classmethod
    def name(cls) -> str:
        return "stamps"

    def schema(self) -> str:
        return "value binary"

    def streamReader(self, schema: Any) -> Any:  # noqa: N802 - Spark's name
        return StampReader(self.options["path"])


class StampReader(DataSourceStreamReader):
    def __init__(self, path: str) -> None:
        self.path = path

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"at": 0}

    def latestOffset(self) -> dict[str, int]:  # noqa: N802
        return {"at": os.stat(self.path).st_size}

    def partitions(self, start: Any, end: Any) -> Any:
        return [InputPartition((start["at"], end["at"]))]

    def read(self, partition: Any) -> Any:
        start, end = partition.value
        with open(self.path, "rb") as file:
            data = file.read()[start:end]
        words = [data[position : position + 8] for position in range(0, len(data), 8)]
        yield pa.RecordBatch.from_pydict({"value": pa.array(words, pa.binary())})

    def commit(self, end: Any) -> None:
        pass

    def stop(self) -> None:
        pass


@pytest.fixture(scope="module")
def spark(tmp_path_factory):
    import bench_spark_sink
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(bench_spark_sink)
    spark = spark_session.begin(tmp_path_factory.mktemp("spark"), quick=False)
    spark.dataSource.register(Stamps)
    yield spark
    spark.stop()


@pytest.fixture(scope="module")
def frame(spark, tmp_path_factory):
    """Rows of 10-byte keys and 100-byte values in two Parquet files."""
    path = tmp_path_factory.mktemp("rows")
    for number in range(2):
        keys = [b"k%09d" % row for row in range(ROWS // 2)]
        # Random bytes: Parquet stores equal values once, and would have nothing to write.
        data = memoryview(os.urandom(50 * ROWS))
        values = [data[row : row + 100] for row in range(0, len(data), 100)]
        table = pa.table(
            {"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())}
        )
        pq.write_table(table, path / f"{number}.parquet", compression="none")
    return spark.read.parquet(str(path))


def bench_rows_read(benchmark, note, spark, frame):
    """The floor: Spark reads the rows and discards them."""
    note(records=ROWS)
    meter, cpu = Meter(spark, None), []
    write = frame.write.format("noop").mode("overwrite")
    benchmark.pedantic(
        lambda: cpu.append(meter.cost(write.save).cpu), rounds=ROUNDS, warmup_rounds=1
    )
    note(cpu_s=round(statistics.median(cpu[1:]), 2))


def bench_rows_to_parquet(benchmark, note, frame, tmp_path):
    """Spark's own format, uncompressed and not flushed."""
    note(records=ROWS, floor="bench_rows_read", floors=1)
    write = frame.write.mode("overwrite").option("compression", "none")
    benchmark.pedantic(lambda: write.parquet(str(tmp_path / "out")), rounds=ROUNDS, warmup_rounds=1)
    assert sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) > ROWS * 100


@pytest.fixture(params=["jvm", "python"])
def writer(request, spark):
    """The writer that serves, in the JVM or in Python."""
    spark.conf.set(READER, request.param)
    return request.param


@pytest.mark.parametrize("durability", ["os", "fsync"])
@pytest.mark.parametrize("partitions", [1, 4], ids="partitions={}".format)
def bench_rows_to_log(benchmark, note, spark, frame, log, writer, partitions, durability):
    """Tasks stage the rows, one step publishes them; keys are hashed if partitions > 1."""
    note(records=ROWS, floor="bench_rows_read", floors=1)
    log.create_topic("t", partitions=partitions)
    meter, cpu = Meter(spark, None), []
    write = frame.write.format("embedlog").mode("append").option("path", log.path)
    write = write.option("topic", "t").option("durability", durability)
    benchmark.pedantic(
        lambda: cpu.append(meter.cost(write.save).cpu), rounds=ROUNDS, warmup_rounds=1
    )
    note(cpu_s=round(statistics.median(cpu[1:]), 2))
    assert len(log["t"]) == (ROUNDS + 1) * ROWS


@pytest.mark.parametrize("source", ["words", "log"])
@pytest.mark.parametrize("durability", ["os", "fsync"])
def bench_micro_batch(benchmark, note, spark, log, tmp_path, writer, durability, source):
    """From an append to the source until a reader of the target topic sees the record."""
    log.create_topic("in")
    log.create_topic("out")
    append, stream = word_source(spark, tmp_path) if source == "words" else log_source(spark, log)
    options = {"path": log.path, "topic": "out", "durability": durability}
    query_options = {**options, "checkpointLocation": str(tmp_path / "checkpoint")}
    query = stream.writeStream.format("embedlog").options(**query_options).start()
    delays: list[float] = []
    done = threading.Event()

    def read_delays() -> None:
        with log.consumer("out", auto_offset_reset="earliest") as consumer:
            while not done.is_set():
                for records in consumer.poll(100).values():
                    now = time.perf_counter_ns()
                    delays.extend(
                        (now - int.from_bytes(record.value, "little")) / 1e6 for record in records
                    )

    reader = threading.Thread(target=read_delays)
    reader.start()
    warm_up, rng = 5, random.Random(1)
    try:
        for number in range(warm_up + APPENDS):
            append(time.perf_counter_ns().to_bytes(8, "little"))
            deadline = time.monotonic() + 60
            while len(delays) <= number:
                assert time.monotonic() < deadline, query.exception()
                time.sleep(0.005)
            time.sleep(0.05 + 0.1 * rng.random())
    finally:
        done.set()
        reader.join()
        query.stop()
    measured = sorted(delays[warm_up:])
    p50, best = statistics.median(measured), measured[0]
    note(records=1, p50_ms=round(p50, 1), best_ms=round(best, 1))
    benchmark.pedantic(lambda: None, rounds=1)
    assert len(measured) == APPENDS


def word_source(spark, directory):
    """Return a function that appends to a source of almost no cost, and a stream of it."""
    path = directory / "stamps"
    path.touch()

    def append(word: bytes) -> None:
        with path.open("ab") as file:
            file.write(word)

    return append, spark.readStream.format("stamps").load(str(path))


def log_source(spark, log):
    """Return a function that appends to a topic, and a stream of it."""
    options = {"path": log.path, "subscribe": "in", "startingOffsets": "earliest"}
    stream = spark.readStream.format("embedlog").options(**options).load().select("value")

    def append(word: bytes) -> None:
        now = time.time_ns() // 1_000_000
        log.partition("in", 0).append([batch.encode_lists([word], None, now)])

    return append, stream
