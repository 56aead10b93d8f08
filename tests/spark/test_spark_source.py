"""The source in a real Spark: that it does what the tests without one say, from end to end."""

import json
import warnings

import pytest
from support import killable
from support.clock import START
from support.forks import until
from support.roots import encoded

from embedlog.spark import offsets_behind_latest

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
]


@pytest.fixture
def load(spark, options):
    """A data frame of the log."""

    def load(schema=None, stream=False, **given):
        reader = (spark.readStream if stream else spark.read).format("embedlog")
        reader = reader.options(**options(**given))
        return (reader if schema is None else reader.schema(schema)).load()

    return load


@pytest.fixture
def run(spark, load, tmp_path):
    """Run a query over what is there, on one checkpoint; return the values it wrote, sorted."""

    def run(checkpoint="checkpoint", **given):
        seen = []

        def keep(frame, number):
            seen.extend((number, int(row.value)) for row in frame.select("value").collect())

        given.setdefault("startingOffsets", "earliest")
        writer = load(stream=True, **given).writeStream.foreachBatch(keep)
        query = writer.option("checkpointLocation", str(tmp_path / checkpoint))
        run.query = patiently(query.trigger(availableNow=True).start)
        run.query.awaitTermination()
        run.batches = seen
        return sorted(value for _, value in seen)

    return run


def patiently(start):
    """Start a query, again if a busy machine takes more than Spark's ten seconds for a process."""
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
    """The values as numbers, sorted."""
    return sorted(int(row.value) for row in frame.select("value").collect())


def refused(action):
    """What an action that must fail says."""
    with pytest.raises(Exception) as raised:
        action()
    return str(raised.value)


# Batches


def test_the_schema_is_kafkas(load):
    """Names, types and order; headers when they are asked for."""
    plain = load().schema.simpleString()
    rich = load(includeHeaders="true").schema.simpleString()

    assert plain == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,"
        "timestamp:timestamp,timestampType:int>"
    )
    assert rich == plain[:-1] + ",headers:array<struct<key:string,value:binary>>>"


def test_rows_arrive_whole(load, send):
    """Every column, nulls and headers."""
    send("t", {1: [b"v", None]}, key=b"k", headers=[("h", b"1"), ("h", None)])
    send("t", {1: [b"w"]}, at=START + 5)

    frame = load(includeHeaders="true").selectExpr("*", "unix_millis(timestamp) as ms")
    first, second, third = frame.orderBy("offset").collect()

    assert (first.key, first.value, first.topic, first.partition) == (b"k", b"v", "t", 1)
    assert (first.offset, first.ms, first.timestampType) == (0, START, 0)
    assert [tuple(one) for one in first.headers] == [("h", b"1"), ("h", None)]
    assert second.value is None
    assert (third.key, third.headers, third.ms) == (None, None, START + 5)


def test_counts_sums_filters_and_unions(load, log):
    """Over several segments and tasks; a filter of one frame is not another's."""
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
    """Only these columns are read at all."""
    send("t", {0: [1, 2, 3]})

    frame = load(schema="offset bigint, value binary")

    assert [tuple(row) for row in frame.orderBy("offset").collect()] == [
        (0, b"1"),
        (1, b"2"),
        (2, b"3"),
    ]
    assert "no column value of type string" in refused(load(schema="value string").count)


def test_a_loaded_frame_keeps_its_plan(load, send):
    """Load it again to see more: Spark asks for the tasks once."""
    send("t", {0: range(100)})
    frame = load()
    assert frame.count() == 100
    send("t", {0: range(100)})

    assert frame.count() == 100
    assert load().count() == 200


def test_an_empty_topic_is_empty(load, log):
    """Also one of several."""
    assert load().count() == 0
    assert load(subscribePattern="nothing").count() == 0


def test_sql_knows_the_source(spark, log, send):
    """As a table, with the same options."""
    send("t", {0: range(7)})
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW flights USING embedlog "
        f"OPTIONS (path '{log.path}', subscribe 't')"
    )

    assert spark.sql("SELECT count(*), max(offset) FROM flights").first()[:] == (7, 6)


def test_a_wrong_option_is_an_error_of_load(load):
    """Not of the first action."""
    told = refused(lambda: load(subscribed="t"))
    assert "InvalidConfigError" in told
    assert "did you mean 'subscribe'" in told
    assert "is not supported" in refused(lambda: load(**{"kafka.auto.offset.reset": "latest"}))
    assert load(**{"kafka.bootstrap.servers": "a:9092"}).count() == 0


def test_what_only_the_log_knows_is_an_error_of_the_action(load, tmp_path):
    """There `load` has not looked yet."""
    assert "no such topic" in refused(load(subscribe="nothing").count)
    assert "cannot start at the latest" in refused(load(startingOffsets="latest").count)
    assert "there is no log here" in refused(load(path=tmp_path / "no").count)


def test_a_session_knows_the_format_by_itself(spark, options, send):
    """Spark imports `pyspark_embedlog`; a new session knows nothing that others registered."""
    send("t", {0: range(5)})
    killable.register(spark)
    fresh = spark.newSession()

    assert "DATA_SOURCE_NOT_FOUND" in refused(fresh.read.format("killable").load)
    assert values(fresh.read.format("embedlog").options(**options()).load()) == list(range(5))


def test_a_loss_between_plan_and_action(load, log, send):
    """It fails with what to do, or is left out."""
    send("t", {0: range(10)})
    strict, lenient = load(), load(failOnDataLoss="false")
    assert (strict.count(), lenient.count()) == (10, 10)
    log.delete_topic("t")

    assert "failOnDataLoss" in refused(strict.count)
    assert lenient.count() == 0
    log.create_topic("t", 2)


def test_data_of_other_kinds_of_jobs_is_read_by_the_same_workers(spark, load, send):
    """Python workers are forked and used again: for our reads and for functions of users."""
    send("t", {0: range(50), 1: range(50, 100)})

    def same(batches):
        yield from batches

    for _ in range(3):
        frame = load(schema="value binary").mapInArrow(same, "value binary")
        assert values(frame) == list(range(100))


def test_a_consumer_and_a_producer_work_inside_of_tasks(spark, log, send):
    """Executors are processes like any other."""
    send("t", {0: range(5)})
    path = log.path
    log.create_topic("out")

    def copy(rows):
        import embedlog

        with embedlog.open(path) as here, here.producer() as producer:
            for row in rows:
                producer.send("out", b"%d" % row.id)
            yield len(list(here.topic("t")))

    counts = spark.range(20).rdd.mapPartitions(copy).collect()

    assert set(counts) == {5}
    assert sorted(int(one.value) for one in log.topic("out")) == list(range(20))


# Streams


def test_a_stream_goes_on_from_its_checkpoint(run, log, send, tmp_path):
    """In batches of some rows; nothing twice and nothing left out, unless it was lost."""
    send("t", {0: range(101), 1: range(200, 211)})
    assert run(maxOffsetsPerTrigger=50) == [*range(101), *range(200, 211)]
    assert [number for number, _ in run.batches[:1] + run.batches[-1:]] == [0, 2]
    assert [one["numInputRows"] for one in run.query.recentProgress] == [49, 49, 14]
    kept = json.loads((tmp_path / "checkpoint/offsets/0").read_text().splitlines()[-1])
    assert kept["t"] == {"0": 45, "1": 4}
    assert kept["@base"]["t"] == {"0": 0, "1": 0}

    send("t", {0: [900], 1: [901]})
    assert run() == [900, 901]

    log.delete_topic("t")
    log.create_topic("t", 2)
    send("t", {0: range(300, 420)})
    assert "was deleted and created again" in refused(run)
    assert run(failOnDataLoss="false") == list(range(300, 420))


def test_a_stream_sees_what_is_new(load, log, send, spark):
    """Continuously: rows, partitions and topics; and its lag is told."""
    send("t", {0: [1]})
    stream = load(stream=True, subscribePattern="t.*", startingOffsets="earliest")
    query = patiently(stream.writeStream.format("memory").queryName("seen").start)
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
    finally:
        query.stop()


def test_a_stream_that_begins_at_the_end_skips_nothing(load, send, spark, log):
    """Spark asks again and again where it begins."""
    send("t", {0: range(10)})
    stream = load(stream=True)
    query = patiently(stream.writeStream.format("memory").queryName("tail").start)
    try:
        send("t", {0: range(10, 15)})
        query.processAllAvailable()

        assert values(spark.table("tail")) == list(range(10, 15))
    finally:
        query.stop()


def test_a_query_that_is_stopped_holds_nothing(load, send, log):
    """Spark ends the process that holds the lease with a signal, and says nothing before."""
    send("t", {0: range(10)})
    stream = load(stream=True, startingOffsets="earliest")
    query = patiently(stream.writeStream.format("noop").start)
    (lease,) = log.leases()
    query.stop()

    assert lease.name.startswith("spark-")
    until(lambda: log.leases() == [])


def test_a_failed_batch_is_repeated_with_the_same_rows(load, send, tmp_path):
    """After the query failed and was started again, with more data by then."""
    send("t", {0: range(10)})
    seen = []

    def fail(frame, number):
        seen.append(values(frame))
        if len(seen) == 1:
            raise RuntimeError("for once")

    def start():
        writer = load(stream=True, startingOffsets="earliest").writeStream.foreachBatch(fail)
        writer = writer.option("checkpointLocation", str(tmp_path / "again"))
        patiently(writer.trigger(availableNow=True).start).awaitTermination()

    assert "for once" in refused(start)
    send("t", {0: range(10, 20)})
    start()

    assert seen == [list(range(10)), list(range(10)), list(range(10, 20))]


def test_wrong_options_of_a_stream(load):
    """Some at `load`, some when the query starts."""
    assert "did you mean" in refused(lambda: load(stream=True, startingOffset="earliest"))
    stream = load(stream=True, endingOffsets="latest")
    told = refused(lambda: patiently(stream.writeStream.format("noop").start))
    assert "a streaming query has no end" in told


def test_watermarks_and_joins_of_a_topic_with_itself(load, send, spark):
    """One source twice in a query, and its timestamp as event time."""
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
        query = patiently(joined.writeStream.format("memory").queryName("joined").start)
    try:
        assert spark.table("joined").count() == 10
    finally:
        query.stop()
