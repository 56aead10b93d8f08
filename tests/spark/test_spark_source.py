"""The source in a real Spark session, from end to end."""

import json
import warnings

import pyspark
import pytest
from support import spark_kill_points
from support.clock import START
from support.forks import until
from support.roots import encoded

from embedlog.spark import offsets_behind_latest

IS_LIMITED = tuple(map(int, pyspark.__version__.split(".")[:2])) >= (4, 2)
"""Whether Spark passes a reader in Python the limits of a micro-batch."""

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
]


@pytest.fixture
def load(spark, options):
    """Load a DataFrame from the log."""

    def load(schema=None, stream=False, **overrides):
        reader = (spark.readStream if stream else spark.read).format("embedlog")
        reader = reader.options(**options(**overrides))
        return (reader if schema is None else reader.schema(schema)).load()

    return load


@pytest.fixture
def run(spark, load, tmp_path):
    """Run a query to the end of the log; return the values that it read, sorted."""

    def run(checkpoint="checkpoint", **overrides):
        batches = []

        def collect(frame, batch_id):
            batches.extend((batch_id, int(row.value)) for row in frame.select("value").collect())

        overrides.setdefault("startingOffsets", "earliest")
        writer = load(stream=True, **overrides).writeStream.foreachBatch(collect)
        query = writer.option("checkpointLocation", str(tmp_path / checkpoint))
        run.query = start_query(query.trigger(availableNow=True).start)
        run.query.awaitTermination()
        run.batches = batches
        return sorted(value for _, value in batches)

    return run


def start_query(start):
    """Start a query; retry if the machine is too busy for Spark's timeout of ten seconds."""
    for _ in range(4):
        query = start()
        try:
            query.processAllAvailable()
        except Exception as error:
            if "failed to connect back" in str(error):
                continue
            raise
        return query
    return query


def values(frame):
    """Return the values as numbers, sorted."""
    return sorted(int(row.value) for row in frame.select("value").collect())


def error_of(action):
    """Return the message of an action that must fail."""
    with pytest.raises(Exception) as raised:
        action()
    return str(raised.value)


# Batches


def test_the_schema_is_kafkas(load):
    """Names, types and order are the same; headers only with includeHeaders."""
    without_headers = load().schema.simpleString()
    with_headers = load(includeHeaders="true").schema.simpleString()

    assert without_headers == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,"
        "timestamp:timestamp,timestampType:int>"
    )
    assert with_headers == without_headers[:-1] + ",headers:array<struct<key:string,value:binary>>>"


@pytest.mark.tier("test")
def test_rows_arrive_complete(load, send):
    """The rows have every column, nulls and headers."""
    send("t", {1: [b"v", None]}, key=b"k", headers=[("h", b"1"), ("h", None)])
    send("t", {1: [b"w"]}, at=START + 5)

    frame = load(includeHeaders="true").selectExpr("*", "unix_millis(timestamp) as ms")
    first, second, third = frame.orderBy("offset").collect()

    assert (first.key, first.value, first.topic, first.partition) == (b"k", b"v", "t", 1)
    assert (first.offset, first.ms, first.timestampType) == (0, START, 0)
    assert [tuple(header) for header in first.headers] == [("h", b"1"), ("h", None)]
    assert second.value is None
    assert (third.key, third.headers, third.ms) == (None, None, START + 5)


def test_counts_sums_filters_and_unions_are_right(load, log):
    """They read several segments and tasks; filters apply only to their own DataFrame."""
    log.alter_topic("t", {"segment.bytes": 40_000})
    for number in range(100):
        log.partition("t", number % 2).append([encoded(*[b"%d" % number] * 100)])
    frame = load(minPartitions=5)

    assert frame.rdd.getNumPartitions() >= 5
    assert frame.count() == 10_000
    assert frame.filter("offset >= 4900").count() == 200
    assert frame.count() == 10_000
    assert frame.union(frame.filter("offset >= 4990")).count() == 10_020
    assert frame.selectExpr("sum(cast(string(value) as int))").first()[0] == 4950 * 100


def test_a_schema_is_a_projection(load, send):
    """Only the columns of the schema are read."""
    send("t", {0: [1, 2, 3]})

    frame = load(schema="offset bigint, value binary")

    assert [tuple(row) for row in frame.orderBy("offset").collect()] == [
        (0, b"1"),
        (1, b"2"),
        (2, b"3"),
    ]
    assert "no column value of type string" in error_of(load(schema="value string").count)


def test_when_a_loaded_dataframe_sees_new_records(load, send, reader):
    """In each query of it; Python's is planned once, and a new load returns newer records."""
    send("t", {0: range(100)})
    frame = load()
    assert frame.count() == 100
    send("t", {0: range(100)})

    assert frame.count() == (200 if reader == "jvm" else 100)
    assert load().count() == 200


def test_an_action_of_the_same_query_reads_the_same_records(load, send):
    """Spark keeps the physical plan of a DataFrame."""
    send("t", {0: range(100)})
    frame = load()
    assert len(frame.collect()) == 100
    send("t", {0: range(100)})
    assert len(frame.collect()) == 100


def test_an_empty_topic_is_empty(load, log):
    """A pattern that matches no topic returns no rows either."""
    assert load().count() == 0
    assert load(subscribePattern="nothing").count() == 0


def test_sql_can_use_the_source(spark, log, send):
    """A view has the same options."""
    send("t", {0: range(7)})
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW flights USING embedlog "
        f"OPTIONS (path '{log.path}', subscribe 't')"
    )

    assert spark.sql("SELECT count(*), max(offset) FROM flights").first()[:] == (7, 6)


def test_a_wrong_option_is_an_error_of_load(load):
    """The error is not deferred to the first action."""
    message = error_of(lambda: load(subscribed="t"))
    assert "Did you mean 'subscribe'" in message
    assert "is not supported" in error_of(lambda: load(**{"kafka.auto.offset.reset": "latest"}))
    assert load(**{"kafka.bootstrap.servers": "a:9092"}).count() == 0


def test_an_error_that_needs_the_log_is_an_error_of_the_action(load, tmp_path):
    """`load` does not open the log."""
    assert "There is no such topic" in error_of(load(subscribe="nothing").count)
    assert "cannot start at the latest" in error_of(load(startingOffsets="latest").count)
    assert "There is no log here" in error_of(load(path=tmp_path / "no").count)


def test_spark_finds_the_format_on_its_own(spark, options, send):
    """It imports `pyspark_embedlog`; a new session does not have the formats of other sessions."""
    send("t", {0: range(5)})
    spark_kill_points.register(spark)
    new_session = spark.newSession()

    assert "DATA_SOURCE_NOT_FOUND" in error_of(new_session.read.format("killable").load)
    assert values(new_session.read.format("embedlog").options(**options()).load()) == list(range(5))


def test_data_loss_between_plan_and_action(load, log, send):
    """The query fails and says what to do, or skips the records."""
    send("t", {0: range(10)})
    strict, lenient = load(), load(failOnDataLoss="false")
    assert (len(strict.collect()), len(lenient.collect())) == (10, 10)
    log.delete_topic("t")

    assert "failOnDataLoss" in error_of(strict.collect)
    assert lenient.collect() == []
    log.create_topic("t", 2)


def test_python_workers_are_shared_with_other_jobs(spark, load, send):
    """Spark forks workers and reuses them for reads of the source and functions of users."""
    send("t", {0: range(50), 1: range(50, 100)})

    def unchanged(batches):
        yield from batches

    for _ in range(3):
        frame = load(schema="value binary").mapInArrow(unchanged, "value binary")
        assert values(frame) == list(range(100))


def test_a_consumer_and_a_producer_work_inside_tasks(spark, log, send):
    """A task may open the log like any process."""
    send("t", {0: range(5)})
    path = log.path
    log.create_topic("out")

    def copy(rows):
        import embedlog

        with embedlog.open(path) as log, log.producer() as producer:
            for row in rows:
                producer.send("out", b"%d" % row.id)
            yield len(list(log.topic("t")))

    counts = spark.range(20).rdd.mapPartitions(copy).collect()

    assert set(counts) == {5}
    assert sorted(int(record.value) for record in log.topic("out")) == list(range(20))


# Streams


@pytest.mark.tier("test")
def test_a_stream_continues_from_its_checkpoint(run, log, send, reader, tmp_path):
    """Each record is read once, unless it was lost."""
    send("t", {0: range(101), 1: range(200, 211)})
    assert run(maxOffsetsPerTrigger=50) == [*range(101), *range(200, 211)]
    offset = json.loads((tmp_path / "checkpoint/offsets/0").read_text().splitlines()[-1])
    if reader == "jvm" or IS_LIMITED:
        assert [batch_id for batch_id, _ in run.batches[:1] + run.batches[-1:]] == [0, 2]
        assert [progress["numInputRows"] for progress in run.query.recentProgress] == [49, 49, 14]
        assert offset["t"] == {"0": 45, "1": 4}
    assert offset["@base"]["t"] == {"0": 0, "1": 0}

    send("t", {0: [900], 1: [901]})
    assert run() == [900, 901]

    log.delete_topic("t")
    log.create_topic("t", 2)
    send("t", {0: range(300, 420)})
    assert "was deleted and created again" in error_of(run)
    assert run(failOnDataLoss="false") == list(range(300, 420))


def test_a_stream_reads_new_rows_partitions_and_topics(load, log, send, spark, reader):
    """It does so while it runs; its progress has the lag, and in the JVM names the topics."""
    send("t", {0: [1]})
    stream = load(stream=True, subscribePattern="t.*", startingOffsets="earliest")
    query = start_query(stream.writeStream.format("memory").queryName("seen").start)
    try:
        send("t", {1: [2, 3]})
        log.create_topic("t-2")
        send("t-2", {0: [4]})
        query.processAllAvailable()
        log.create_partitions("t", 3)
        send("t", {2: [5]})
        query.processAllAvailable()

        assert values(spark.table("seen")) == [1, 2, 3, 4, 5]
        assert offsets_behind_latest(query.lastProgress)["maxOffsetsBehindLatest"] == 0
        (source,) = query.lastProgress["sources"]
        if reader == "jvm":
            assert source["description"] == "embedlog t.*"
            lag = {"min": "0", "max": "0", "avg": "0.0"}
            assert source["metrics"] == {f"{k}OffsetsBehindLatest": v for k, v in lag.items()}
    finally:
        query.stop()


def test_a_stream_that_starts_at_the_end_skips_nothing(load, send, spark, log):
    """Spark calls `initialOffset` several times."""
    send("t", {0: range(10)})
    stream = load(stream=True)
    query = start_query(stream.writeStream.format("memory").queryName("tail").start)
    try:
        send("t", {0: range(10, 15)})
        query.processAllAvailable()

        assert values(spark.table("tail")) == list(range(10, 15))
    finally:
        query.stop()


def test_a_stopped_query_holds_no_lease(load, send, log):
    """Spark ends the process that holds the lease with a signal and no earlier call."""
    send("t", {0: range(10)})
    stream = load(stream=True, startingOffsets="earliest")
    query = start_query(stream.writeStream.format("noop").start)
    (lease,) = log.housekeeping.leases()
    query.stop()

    assert lease.name.startswith("spark-")
    until(lambda: log.housekeeping.leases() == [])


def test_a_failed_batch_is_repeated_with_the_same_rows(load, send, tmp_path):
    """The query fails and is started again, with more records in the log."""
    send("t", {0: range(10)})
    batches = []

    def fail(frame, batch_id):
        batches.append(values(frame))
        if len(batches) == 1:
            raise RuntimeError("for once")

    def start():
        writer = load(stream=True, startingOffsets="earliest").writeStream.foreachBatch(fail)
        writer = writer.option("checkpointLocation", str(tmp_path / "again"))
        start_query(writer.trigger(availableNow=True).start).awaitTermination()

    assert "for once" in error_of(start)
    send("t", {0: range(10, 20)})
    start()

    assert batches == [list(range(10)), list(range(10)), list(range(10, 20))]


def test_invalid_options_of_a_stream_are_errors(load):
    """Some are errors of `load`, some of the start of the query."""
    assert "Did you mean" in error_of(lambda: load(stream=True, startingOffset="earliest"))
    stream = load(stream=True, endingOffsets="latest")
    message = error_of(lambda: start_query(stream.writeStream.format("noop").start))
    assert "a streaming query has no end" in message
    assert "UnboundLocalError" not in message


def test_a_topic_can_be_joined_with_itself_by_watermarks(load, send, spark):
    """A query uses a source twice, with its timestamp as event time."""
    send("t", {0: range(10), 1: range(10)})
    left = load(stream=True, startingOffsets="earliest").withWatermark("timestamp", "1 minute")
    right = load(stream=True, startingOffsets="earliest", assign='{"t": [1]}')
    joined = (
        left.filter("partition = 0")
        .alias("a")
        .join(right.withWatermark("timestamp", "1 minute").alias("b"), "value")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        query = start_query(joined.writeStream.format("memory").queryName("joined").start)
    try:
        assert spark.table("joined").count() == 10
    finally:
        query.stop()
