"""How fast does Spark read a log, beside Parquet with the same rows in the same run?

Each action is measured with both in turn, so that a busy machine slows both.
"""

import shutil
import time
import warnings

import pytest

from embedlog import batch

RECORDS = 2_000_000
ROWS = 2500
"""Of a batch: as many as a producer puts in one of 256 KiB."""


@pytest.fixture(scope="module")
def spark():
    if shutil.which("java") is None:
        pytest.skip("there is no Java")
    from embedlog.spark import session

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet = {"spark.ui.enabled": "false", "spark.log.level": "OFF"}
        made = session("bench", "local[2]", quiet)
        yield made
        made.stop()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A topic of two partitions: 10-byte keys, 96-byte values, times that differ."""
    import embedlog

    path = tmp_path_factory.mktemp("spark") / "log"
    keys = [b"k%09d" % number for number in range(ROWS)]
    with embedlog.open(path) as log:
        log.create_topic("t", 2, {"segment.bytes": 64 << 20})
        for number in range(RECORDS // ROWS):
            first = 1_700_000_000_000 + number * ROWS
            times = list(range(first, first + ROWS))
            some = batch.encode_lists([b"v" * 96] * ROWS, keys, times)
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
    """From `load` to the result; `parquet` is the best time of the same from Parquet."""
    others = []

    def beside():
        begin = time.perf_counter()
        action(spark.read.parquet(parquet), tmp_path)
        others.append(time.perf_counter() - begin)

    def read():
        action(of_log(spark, path), tmp_path)

    benchmark.pedantic(read, setup=beside, rounds=5, warmup_rounds=1)
    best = benchmark.stats.stats.min
    note(records=RECORDS, parquet_s=round(min(others), 3), of_parquet=round(min(others) / best, 2))


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
def bench_spark_stream(benchmark, note, spark, path, tmp_path):
    """A stream over all of it, in four batches, to nowhere: rows a second in `addBatch`."""
    made = []

    def stream():
        reader = spark.readStream.format("embedlog").option("path", path).option("subscribe", "t")
        reader = reader.option("startingOffsets", "earliest")
        frame = reader.option("maxOffsetsPerTrigger", RECORDS // 4).load()
        where = str(tmp_path / f"checkpoint{len(made)}")
        writer = frame.writeStream.format("noop").option("checkpointLocation", where)
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        done = [one for one in query.recentProgress if one["numInputRows"]]
        assert sum(one["numInputRows"] for one in done) == RECORDS
        made.append(min(one["durationMs"]["addBatch"] / one["numInputRows"] for one in done))

    benchmark.pedantic(stream, rounds=3)
    note(records=RECORDS, rows_s_in_add_batch=round(1000 / min(made)))
