"""Mistakes arrive in PySpark as its own exceptions, with the sentence of embedlog as their text."""

import glob
import os

import pytest
from support.roots import encoded
from support.spark_errors import error_of, sentence_of
from support.tiers import sample

from embedlog.errors import (
    CorruptBatchError,
    DataLossError,
    InvalidConfigError,
    InvalidRecordError,
    InvalidTopicError,
    NotALogError,
    OffsetOutOfRangeError,
    SerializationError,
    UnknownTopicOrPartitionError,
)

pa = pytest.importorskip("pyarrow")
errors = pytest.importorskip("pyspark.errors")

JVM = pytest.mark.parametrize("reader", ["jvm"])
TYPED = pa.schema(
    [pa.field("id", pa.int32(), nullable=False), ("at", pa.timestamp("us", tz="UTC"))]
)


@pytest.fixture
def typed(log):
    """The name of a typed topic of the log."""
    log.create_topic("typed", schema=TYPED)
    return "typed"


READS = [
    ({"subscrib": "t"}, InvalidConfigError),
    ({"topic": "t"}, InvalidConfigError),
    ({"failOnDataLoss": "maybe"}, InvalidConfigError),
    ({"startingOffsets": "{"}, InvalidConfigError),
    ({"startingOffsets": "latest"}, InvalidConfigError),
    ({"startingOffsets": '{"t": {"0": 0}}'}, InvalidConfigError),
    ({"startingOffsets": '{"t": {"0": 1, "1": 9}}'}, DataLossError),
    ({"endingOffsets": '{"t": {"0": 99, "1": 0}}'}, OffsetOutOfRangeError),
    ({"startingTimestamp": "yesterday-ish"}, InvalidConfigError),
    ({"maxOffsetsPerTrigger": "-1"}, InvalidConfigError),
    ({"kafka.auto.offset.reset": "latest"}, InvalidConfigError),
    ({"values": "struct"}, InvalidConfigError),
    ({"subscribe": "nothing"}, UnknownTopicOrPartitionError),
    ({"assign": '{"t": [7]}'}, UnknownTopicOrPartitionError),
    ({"subscribe": "t,typed"}, InvalidConfigError),
    ({"path": "relative:/no"}, NotALogError),
    ({"path": ""}, InvalidConfigError),
    ({"schema": "nope int"}, InvalidConfigError),
    ({"schema": "value string"}, InvalidConfigError),
    ({"subscribe": "typed", "schema": "id string"}, InvalidConfigError),
]


@JVM
@pytest.mark.tier("test")
def test_a_wrong_read_is_an_analysis_exception(spark, options, typed):
    """Of `load()`, or of the first action."""
    for changes, expected in sample(READS, 6):
        error = sentence_of(lambda changes=changes: read(spark, options, changes))
        assert isinstance(error, expected), (changes, error)
        is_refused = expected is not DataLossError
        assert isinstance(error.__cause__, errors.AnalysisException) is is_refused, changes


def read(spark, options, changes):
    changes = dict(changes)
    schema = changes.pop("schema", None)
    reader = spark.read.format("embedlog").options(**options(**changes))
    (reader if schema is None else reader.schema(schema)).load().collect()


WRITES = [
    ("1 value", {"topic": "t"}, InvalidConfigError),
    ("'v' key", {"topic": "t"}, InvalidConfigError),
    ("'v' value", {}, InvalidConfigError),
    ("'v' value", {"topic": "t", "topik": "t"}, InvalidConfigError),
    ("'v' value", {"topic": "a/b"}, InvalidTopicError),
    ("'v' value", {"topic": "t", "mode": "overwrite"}, InvalidConfigError),
    ("'v' value", {"topic": "t", "txnAppId": "a"}, InvalidConfigError),
    ("'v' value", {"topic": "t", "compression": "zip"}, InvalidConfigError),
    ("'v' value, timestamp_ntz'2026-01-01' timestamp", {"topic": "t"}, InvalidConfigError),
    ("1 id, 2 nope", {"topic": "typed"}, SerializationError),
    ("'x' id", {"topic": "typed"}, SerializationError),
    ("1 id, date'2026-01-01' at", {"topic": "typed"}, SerializationError),
    ("now() at", {"topic": "typed"}, InvalidConfigError),
    ("1 id", {"topic": "typed", "topik": "t"}, InvalidConfigError),
]
ROWS = [
    ("'v' value, cast(null as string) topic", {}, InvalidRecordError),
    ("'v' value, 'nope' topic", {}, UnknownTopicOrPartitionError),
    ("'v' value, 9 partition", {"topic": "t"}, UnknownTopicOrPartitionError),
    (
        "'v' value, array(struct(cast(null as string) key, binary('x') value)) headers",
        {"topic": "t"},
        SerializationError,
    ),
]


def writer_of(spark, log, columns, options):
    options = {"path": log.path, "mode": "append", **options}
    mode = options.pop("mode")
    return spark.sql(f"select {columns}").write.format("embedlog").mode(mode).options(**options)


@JVM
@pytest.mark.tier("test")
def test_a_wrong_write_is_refused_by_its_sentence(spark, log, typed):
    """Before the tasks, or by a task, whose error is not wrapped either."""
    for row in [*sample(WRITES, 4), *sample(ROWS, 2)]:
        columns, changes, expected = row
        error = sentence_of(writer_of(spark, log, columns, changes).save)
        assert isinstance(error, expected), (columns, error)
        is_refused = row in WRITES
        assert isinstance(error.__cause__, errors.AnalysisException) is is_refused, columns
    assert len(log["t"]) == len(log["typed"]) == 0


@JVM
def test_an_error_of_a_task_that_reads_is_its_sentence(spark, log, options):
    """Damage, and records that are lost after the plan."""
    log.partition("t", 0).append([encoded(b"abcdefgh" * 50)])
    frame = spark.read.format("embedlog").options(**options()).load()
    (path,) = [p for p in glob.glob(f"{log.path}/topics/t-*/0/*.arrows") if os.path.getsize(p)]
    with open(path, "r+b") as file:
        data = file.read()
        file.seek(data.index(b"abcdefgh"))
        file.write(b"z")
    try:
        assert isinstance(sentence_of(frame.collect), CorruptBatchError)
        os.rename(path, f"{path}.gone")
        assert isinstance(sentence_of(frame.collect), DataLossError)
    finally:
        os.rename(f"{path}.gone", path)
        with open(path, "wb") as file:
            file.write(data)


@JVM
def test_an_error_of_a_stream_has_the_sentence(spark, options, tmp_path):
    """Spark wraps it: its own exception says which query it is."""
    stream = spark.readStream.format("embedlog").options(**options(subscribe="nothing")).load()
    query = stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c"))
    error = error_of(query.start().awaitTermination)
    assert isinstance(error, UnknownTopicOrPartitionError)
    assert isinstance(error.__cause__, errors.StreamingQueryException)


@pytest.mark.parametrize("reader", ["python"])
def test_the_reader_in_python_shows_no_java_either(spark, log, options, typed):
    """Spark adds words, and Python's traceback, to what Python raises."""
    for changes, expected in READS:
        error = error_of(read, spark, options, changes)
        assert isinstance(error, expected), changes
    for columns, changes, expected in [*WRITES, *ROWS]:
        error = error_of(writer_of(spark, log, columns, changes).save)
        assert isinstance(error, expected), columns
