"""What does Spark's sink cost: rows written, beside Parquet's in the same run, and micro-batches?

Rows come from Parquet, which Spark reads in a third of the time; a micro-batch
comes from a source that does next to nothing, so its time is Spark's and ours.
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
from support import sessions

from embedlog import batch

ROWS = int(os.environ.get("EMBEDLOG_BENCH_SPARK_ROWS", "2000000"))
APPENDS = int(os.environ.get("EMBEDLOG_BENCH_SPARK_APPENDS", "60"))
ROUNDS = 5


class Stamps(DataSource):
    """A stream of the 8-byte words of a file: when each was written."""

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
        words = [data[place : place + 8] for place in range(0, len(data), 8)]
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
    spark = sessions.begin(tmp_path_factory.mktemp("spark"), quick=False)
    spark.dataSource.register(Stamps)
    yield spark
    spark.stop()


@pytest.fixture(scope="module")
def frame(spark, tmp_path_factory):
    """Rows of 10-byte keys and 100-byte values, in two files of Parquet."""
    path = tmp_path_factory.mktemp("rows")
    for number in range(2):
        keys = [b"k%09d" % row for row in range(ROWS // 2)]
        # Of random bytes: Parquet keeps equal ones once, and would have nothing to write.
        data = memoryview(os.urandom(50 * ROWS))
        values = [data[row : row + 100] for row in range(0, len(data), 100)]
        table = pa.table(
            {"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())}
        )
        pq.write_table(table, path / f"{number}.parquet", compression="none")
    return spark.read.parquet(str(path))


def bench_rows_read(benchmark, note, frame):
    """The floor: Spark reads the rows and throws them away."""
    note(records=ROWS)
    write = frame.write.format("noop").mode("overwrite")
    benchmark.pedantic(write.save, rounds=ROUNDS, warmup_rounds=1)


def bench_rows_to_parquet(benchmark, note, frame, tmp_path):
    """What Spark writes natively, uncompressed and not flushed."""
    note(records=ROWS, floor="bench_rows_read", floors=1)
    write = frame.write.mode("overwrite").option("compression", "none")
    benchmark.pedantic(lambda: write.parquet(str(tmp_path / "out")), rounds=ROUNDS, warmup_rounds=1)
    assert sum(each.stat().st_size for each in (tmp_path / "out").iterdir()) > ROWS * 100


@pytest.mark.parametrize("durability", ["os", "fsync"])
@pytest.mark.parametrize("partitions", [1, 4], ids="partitions={}".format)
def bench_rows_to_log(benchmark, note, frame, log, partitions, durability):
    """Staged by the tasks, and published in one step; keys hashed where there are partitions."""
    note(records=ROWS, floor="bench_rows_read", floors=1)
    log.create_topic("t", partitions=partitions)
    write = frame.write.format("embedlog").mode("append").option("path", log.path)
    write = write.option("topic", "t").option("durability", durability)
    benchmark.pedantic(write.save, rounds=ROUNDS, warmup_rounds=1)
    assert len(log["t"]) == (ROUNDS + 1) * ROWS


@pytest.mark.parametrize("source", ["words", "log"])
@pytest.mark.parametrize("durability", ["os", "fsync"])
def bench_micro_batch(benchmark, note, spark, log, tmp_path, durability, source):
    """From an append to the source until a reader of the log sees it published."""
    log.create_topic("in")
    log.create_topic("out")
    append, stream = of_words(spark, tmp_path) if source == "words" else of_log(spark, log)
    options = {"path": log.path, "topic": "out", "durability": durability}
    named = {**options, "checkpointLocation": str(tmp_path / "checkpoint")}
    query = stream.writeStream.format("embedlog").options(**named).start()
    delays: list[float] = []
    done = threading.Event()

    def follow() -> None:
        with log.consumer("out", auto_offset_reset="earliest") as consumer:
            while not done.is_set():
                for records in consumer.poll(100).values():
                    now = time.perf_counter_ns()
                    delays.extend(
                        (now - int.from_bytes(one.value, "little")) / 1e6 for one in records
                    )

    reader = threading.Thread(target=follow)
    reader.start()
    warm, dice = 5, random.Random(1)
    try:
        for number in range(warm + APPENDS):
            append(time.perf_counter_ns().to_bytes(8, "little"))
            deadline = time.monotonic() + 60
            while len(delays) <= number:
                assert time.monotonic() < deadline, query.exception()
                time.sleep(0.005)
            time.sleep(0.05 + 0.1 * dice.random())
    finally:
        done.set()
        reader.join()
        query.stop()
    found = sorted(delays[warm:])
    note(records=1, p50_ms=round(statistics.median(found), 1), best_ms=round(found[0], 1))
    benchmark.pedantic(lambda: None, rounds=1)
    assert len(found) == APPENDS


def of_words(spark, directory):
    """A source that costs next to nothing: how to append to it, and a stream of it."""
    path = directory / "stamps"
    path.touch()

    def append(word: bytes) -> None:
        with path.open("ab") as file:
            file.write(word)

    return append, spark.readStream.format("stamps").load(str(path))


def of_log(spark, log):
    """The same of a topic."""
    options = {"path": log.path, "subscribe": "in", "startingOffsets": "earliest"}
    stream = spark.readStream.format("embedlog").options(**options).load().select("value")

    def append(word: bytes) -> None:
        now = time.time_ns() // 1_000_000
        log.partition("in", 0).append([batch.encode_lists([word], None, now)])

    return append, stream
