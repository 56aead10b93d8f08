"""``option("snapshot", …)``: Spark reads what `log.at` shows."""

from __future__ import annotations

import pyarrow as pa
import pytest
from support.clock import START
from support.spark_reads import read_all, values_of

from embedlog.errors import InvalidConfigError, UnknownSnapshotError, UnknownTopicOrPartitionError
from embedlog.record import TopicPartition
from embedlog.spark.input_partitions import plan_batch
from embedlog.spark.options import SourceOptions
from embedlog.spark.query_schemas import current_schemas

COLUMNS = pa.schema([("n", pa.int64())])


def plan(options, **more):
    return plan_batch(SourceOptions.parse(options(snapshot="s", **more)))


def test_a_batch_reads_a_snapshot(log, options, send):
    """Neither what is appended later, nor partitions and topics that are added."""
    send("t", {0: [*range(20)], 1: [*range(20, 30)]})
    log.snapshot("s")
    send("t", {0: [99], 1: [99]})
    log.create_partitions("t", 4)
    send("t", {3: [99]})

    assert values_of(read_all(plan(options))) == list(range(30))
    late = plan(options, startingOffsets='{"t": {"0": 15, "1": 8}}')
    assert values_of(read_all(late)) == [15, 16, 17, 18, 19, 28, 29]
    assert values_of(read_all(plan(options, startingTimestamp=str(START + 5)))) == [
        *range(5, 20),
        *range(25, 30),
    ]


def test_what_a_snapshot_does_not_have_is_an_error(log, options, send):
    """As is a stream, which has no end."""
    send("t", {0: [1]})
    with pytest.raises(UnknownSnapshotError):
        plan(options)
    log.create_topic("later")
    log.snapshot("s", "t")
    with pytest.raises(UnknownTopicOrPartitionError, match="does not have the topic"):
        plan(options, subscribe="later")
    with pytest.raises(InvalidConfigError, match="streaming query has no end"):
        SourceOptions.parse(options(snapshot="s")).check_stream()


def test_records_of_a_snapshot_that_were_deleted_are_missed(log, options, send):
    """`delete_records` ignores snapshots, and nothing fails in silence."""
    send("t", {0: [*range(20)]})
    log.snapshot("s")
    log.delete_records({TopicPartition("t", 0): 10})
    with pytest.raises(Exception, match="only from offset 10 on"):
        plan(options)
    assert values_of(read_all(plan(options, failOnDataLoss="false"))) == list(range(10, 20))


@pytest.mark.tier("test")
def test_a_frame_of_spark_equals_that_of_the_snapshot(spark, log, send):
    """Before and after new records and a new version of the schema."""
    log.create_topic("typed", 2, schema=COLUMNS)
    producer = log.producer()
    for number in range(100):
        producer.send("typed", {"n": number}, partition=number % 2)
    producer.flush()
    snapshot = log.snapshot("s")
    expected = sorted(log.at(snapshot)["typed"].to_arrow(["n"])["n"].to_pylist())
    producer.send("typed", {"n": 7}).result()
    log.alter_topic("typed", schema=COLUMNS.append(pa.field("more", pa.string())))

    reader = spark.read.format("embedlog").option("path", log.path).option("snapshot", "s")
    frame = reader.option("subscribe", "typed").load()
    assert "more" not in frame.columns
    assert sorted(row.n for row in frame.select("n").collect()) == expected
    schemas = current_schemas(
        SourceOptions.parse({"path": log.path, "subscribe": "typed", "snapshot": "s"})
    )
    assert schemas.schemas["typed"].version == 1
