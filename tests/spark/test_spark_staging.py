"""The files that a write task stages, and options and columns of a writer.

What the tasks of both writers do is tested with both: without Spark, and in Spark's JVM.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import IntegerType, StringType, TimestampNTZType
from support.clock import START
from support.roots import values

import embedlog
from embedlog.api import Log
from embedlog.errors import (
    InvalidConfigError,
    InvalidRecordError,
    NotALogError,
    SerializationError,
    UnknownTopicOrPartitionError,
)
from embedlog.partitioner import partition_for_key
from embedlog.spark import batch_write
from embedlog.spark.columns import check_column_types
from embedlog.spark.errors import to_embedlog_error
from embedlog.spark.options import SinkOptions
from embedlog.spark.spark_session import READER

FIELDS = [{"name": "topic", "type": "string"}, {"name": "value", "type": "binary"}]
"""Columns that every topic of bytes takes."""


@pytest.fixture
def log(sink_log: Log) -> Log:
    """A log with topics to write to."""
    return sink_log


def write_in_python(log: Log, *batches: Any, partition_id: int = 0, **options: str) -> int:
    """Stage record batches and publish them, as a task and its driver do; return how many rows."""
    parsed = SinkOptions.parse({"path": log.path, **options})
    task = batch_write.plan_write(parsed, FIELDS)
    staged = task.stage(batches, partition_id, 0)
    return batch_write.publish(parsed, [staged], None).records


def write_in_jvm(
    spark: Any, log: Log, *batches: Any, partition_id: int = 0, **options: str
) -> None:
    """Write the rows in one task of Spark; the tasks with smaller numbers have none."""
    spark.conf.set(READER, "jvm")
    rows = (
        pa.Table.from_batches(batches) if batches else pa.table({"value": pa.array([], "binary")})
    )
    frame = spark.createDataFrame(rows).coalesce(1)
    if partition_id:
        # An RDD: for rows of which Spark knows that there are none it plans no tasks.
        empty = spark.sparkContext.parallelize([], partition_id)
        frame = spark.createDataFrame(empty, frame.schema).union(frame)
    try:
        writer = frame.write.format("embedlog").mode("append").option("path", log.path)
        writer.options(**options).save()
    except Exception as error:
        raise to_embedlog_error(error) from error


IN_JVM = pytest.param("jvm", marks=[pytest.mark.tier("all"), pytest.mark.xdist_group("spark")])


@pytest.fixture(params=["python", IN_JVM])
def write(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A function that writes record batches with one of the writers."""
    if request.param == "python":
        return write_in_python
    return partial(write_in_jvm, request.getfixturevalue("spark_session"))


def columns(**values: Any) -> Any:
    types = {
        "value": pa.binary(),
        "key": pa.binary(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "timestamp": pa.timestamp("us", "Europe/Berlin"),
        "headers": pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()})),
    }
    arrays = {name: pa.array(column, types.get(name)) for name, column in values.items()}
    return pa.RecordBatch.from_pydict(arrays)


def content(log: Log, topic: str) -> list[list[bytes | None]]:
    return [values(log.partition(topic, number)) for number in range(log.topic(topic).partitions)]


def test_a_cached_log_is_the_one_at_its_path(tmp_path):
    """The process of a stream caches it; between two queries the log may be created again."""
    options = SinkOptions.parse({"path": str(tmp_path / "log")})
    with batch_write.open_log(options, keep=True) as first_log:
        first_log.create_topic("t")
    with batch_write.open_log(options, keep=True) as second_log:
        assert second_log is first_log
    shutil.rmtree(tmp_path / "log")
    with batch_write.open_log(options, keep=True) as new_log:
        assert new_log.topics() == []
    new_log.close()


def test_the_partition_column_takes_precedence_over_the_key(write, log):
    """If it is null, the key decides."""
    write(
        log,
        columns(key=[b"k"] * 4, value=[b"0", b"1", b"2", b"?"], partition=[0, 1, 2, None]),
        topic="t",
    )

    partitions = content(log, "t")
    assert all(b"%d" % number in partitions[number] for number in range(3))
    assert b"?" in partitions[partition_for_key(b"k", 3)]


def test_rows_without_a_key_are_spread_alike_when_a_task_is_repeated(write, log):
    """Tasks start at different partitions; a repeated task chooses the same ones."""
    for number in (0, 1, 2, 0):
        write(log, columns(value=[b"%d" % number] * 2), topic="t", partition_id=number)

    assert content(log, "t") == [[b"0"] * 4, [b"1"] * 2, [b"2"] * 2]


def test_a_partition_that_does_not_exist_is_an_error(write, log):
    """The error says which partitions there are."""
    for partition in (3, -1):
        with pytest.raises(UnknownTopicOrPartitionError, match="partitions 0 to 2"):
            write(log, columns(value=[b"v"], partition=[partition]), topic="t")
    with pytest.raises(UnknownTopicOrPartitionError, match="partitions 0 to 0"):
        write(log, columns(value=[b"v"], partition=[1]), topic="u")


def test_a_topic_that_does_not_exist_is_an_error(write, log):
    """Only the topic named in the option is created, as by any producer."""
    with pytest.raises(UnknownTopicOrPartitionError, match="Create it"):
        write(log, columns(value=[b"v"], topic=["new"]))
    write(log, columns(value=[b"v"]), topic="new")

    assert content(log, "new") == [[b"v"]]


def test_a_new_topic_has_one_partition_if_no_row_needs_more(write, log):
    """The column may be there and empty; keys then need no other partition either."""
    rows = columns(value=[b"1", b"2", b"3"], key=[b"k", b"l", None], partition=[None, 0, None])
    write(log, rows, topic="new")
    write(log, columns(value=[b"1"], key=[b"k"], partition=[None]), topic="newer")

    assert content(log, "new") == [[b"1", b"2", b"3"]]
    assert content(log, "newer") == [[b"1"]]


def test_a_new_topic_is_created_for_the_rows_of_all_tasks(log):
    """The highest partition counts, and rows with only a key fit no topic of several."""
    options = SinkOptions.parse({"path": log.path, "topic": "new"})
    task = batch_write.plan_write(options, FIELDS)
    staged = [
        task.stage([columns(value=[b"%d" % number], partition=[number])], number, 0)
        for number in (0, 2, 1)
    ]
    keyed = task.stage([columns(value=[b"v"], key=[b"k"], partition=[None])], 3, 0)

    with pytest.raises(InvalidRecordError, match=r"others only a key.*would have 3.*Create the"):
        batch_write.publish(options, [*staged, keyed], None)
    assert "new" not in log.topics()
    batch_write.publish(options, staged, None)
    assert content(log, "new") == [[b"0"], [b"1"], [b"2"]]


@pytest.mark.parametrize("partition", [-1, 20_000, 2**31 - 1])
def test_a_partition_that_no_topic_can_have_creates_none(write, log, partition):
    """The topic would be too large."""
    with pytest.raises(UnknownTopicOrPartitionError, match="at most 20000 partitions"):
        write(log, columns(value=[b"v"], partition=[partition]), topic="new")
    assert "new" not in log.topics()


@pytest.mark.parametrize(
    ("partitions", "error"),
    [(1, "Add partitions"), (2, "others only a key"), (4, "others only a key")],
)
def test_a_topic_that_is_created_during_the_write_is_used_if_the_rows_fit(log, partitions, error):
    """Rows with only a key were not hashed for several partitions."""
    options = SinkOptions.parse({"path": log.path, "topic": "new"})
    task = batch_write.plan_write(options, FIELDS)
    explicit = task.stage([columns(value=[b"v"], partition=[1])], 0, 0)
    keyed = task.stage([columns(value=[b"w"], key=[b"k"], partition=[0])], 1, 0)
    hashed = task.stage([columns(value=[b"x"], key=[b"k"], partition=[None])], 2, 0)
    log.create_topic("new", partitions=partitions)

    with pytest.raises((InvalidRecordError, UnknownTopicOrPartitionError), match=error):
        batch_write.publish(options, [explicit, keyed, hashed], None)
    assert len(log["new"]) == 0
    if partitions > 1:
        batch_write.publish(options, [explicit, keyed], None)
        assert content(log, "new")[:2] == [[b"w"], [b"v"]]


@pytest.mark.parametrize("others", [{}, {"partition": []}], ids=["no partition", "partition"])
def test_without_rows_a_new_topic_is_not_created(write, log, others):
    """It may need any number of partitions later."""
    assert not write(log, columns(value=[], **others), topic="new")
    assert "new" not in log.topics()


def test_a_write_that_fails_leaves_no_topic_behind(write, log):
    """Whichever task fails: the topic is created once all of them are done."""
    rows = columns(value=[b"v"], headers=[[{"key": None, "value": b"x"}]])
    with pytest.raises(SerializationError, match="A header has no key"):
        write(log, rows, topic="new")
    assert "new" not in log.topics()


@pytest.mark.parametrize("name", ["a/b", ".."])
def test_a_name_that_no_topic_can_have_is_an_error_before_the_tasks(log, name):
    """The driver checks it, although it creates the topic later."""
    options = SinkOptions.parse({"path": log.path, "topic": name})
    with pytest.raises(embedlog.errors.InvalidTopicError):
        batch_write.plan_write(options, FIELDS)


def test_a_null_topic_is_an_error(write, log):
    """The message is that of Kafka's sink."""
    with pytest.raises(InvalidRecordError, match="Null topic present in the data"):
        write(log, columns(value=[b"v", b"w"], topic=["t", None]))


def test_text_is_stored_as_utf8(write, log):
    """Null and empty values stay different."""
    text = pa.RecordBatch.from_pydict({"key": ["ä", None, ""], "value": ["é", "", None]})
    write(log, text, topic="u")

    rows = log.topic("u").to_arrow().to_pylist()
    assert [(row["key"], row["value"]) for row in rows] == [
        ("ä".encode(), "é".encode()),
        (None, b""),
        (b"", None),
    ]


def test_missing_timestamps_are_the_current_time(write, log):
    """Timestamps in microseconds of any time zone become milliseconds."""
    write(log, columns(value=[b"1", b"2"], timestamp=[(START * 1000) + 999, None]), topic="u")
    write(log, columns(value=[b"3"]), topic="u")

    times = [int(row["timestamp"].timestamp() * 1000) for row in log["u"].to_arrow().to_pylist()]
    assert times[0] == START
    assert min(times[1:]) > START + 1000


def test_a_header_without_a_name_is_an_error(write, log):
    """The key of a header must not be null (A3), and neither the header."""
    for header in ({"key": None, "value": b"1"}, None):
        with pytest.raises(SerializationError, match="A header has no key"):
            write(log, columns(value=[b"v"], headers=[[header]]), topic="u")


def test_many_small_batches_are_combined(write, log):
    """The batches of the log are large, even if those of Spark are small."""
    write(log, *(columns(value=[b"x" * 100] * 10) for _ in range(1000)), topic="u")

    (batch, *_) = log.partition("u", 0).reader(0).read()
    assert batch.count > 5_000
    assert len(log["u"]) == 10_000


def test_batches_fit_the_limits_of_the_topic(write, log):
    """Rows are split into several batches; a single record that is too large is refused."""
    log.create_topic("small", config={"max.message.bytes": 20_000})
    write(log, columns(value=[b"x" * 5_000] * 10), topic="small")
    assert len(log["small"]) == 10

    with pytest.raises(embedlog.errors.RecordTooLargeError):
        write(log, columns(value=[b"x" * 30_000]), topic="small")


@pytest.mark.parametrize("setting", ["topic", "option"])
def test_batches_are_compressed_as_the_topic_or_the_option_says(write, log, setting):
    """The tasks compress, not the driver."""
    config = {"compression.type": "zstd"} if setting == "topic" else {}
    log.create_topic("c", config=config)
    options = {} if setting == "topic" else {"compression": "zstd"}
    write(log, columns(value=[b"x" * 100] * 1_000), topic="c", **options)

    assert log["c"].size_bytes() < 20_000
    assert values(log.partition("c", 0)) == [b"x" * 100] * 1_000


def test_a_task_without_rows_stages_no_file(write, log):
    """Its input may have no batches or empty ones."""
    assert not write(log, topic="u")
    assert not write(log, columns(value=[]), topic="u")
    assert len(log["u"]) == 0


@pytest.mark.parametrize("place", ["nowhere", "nothing is mounted here"])
def test_a_task_that_cannot_reach_the_log_says_what_to_do(log, tmp_path, place):
    """It may run on another host, on which the log's disk is not mounted."""
    (tmp_path / "nothing is mounted here").mkdir()
    parsed = SinkOptions.parse({"path": log.path, "topic": "u"})
    task = batch_write.plan_write(parsed, FIELDS)
    remote = replace(task, path=str(tmp_path / place))

    with pytest.raises(NotALogError, match=r"not on this host.*mount the log"):
        remote.stage([columns(value=[b"v"])], 0, 0)
    assert not list((tmp_path / "nothing is mounted here").iterdir())


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "'path' is missing"),
        ({"path": "/x", "topik": "t"}, "Did you mean 'topic'"),
        ({"path": "/x", "kafka.key.serializer": "X"}, "not supported as keys are serialized"),
        ({"path": "/x", "kafka.value.serializer": "X"}, "not supported as values are"),
        ({"path": "/x", "durability": "maybe"}, "must be one of fsync, os"),
        ({"path": "/x", "txnVersion": "1"}, "without txnAppId"),
        ({"path": "/x", "txnVersion": "1", "txnAppId": ""}, "must not be empty"),
        ({"path": "/x", "txnAppId": "a", "txnVersion": "one"}, "must be a number"),
        ({"path": "/x", "txnAppId": "a", "txnVersion": "inf"}, "without a fraction, got 'inf'"),
        ({"path": "/x", "txnAppId": "a", "txnVersion": "1.5"}, "without a fraction, got '1.5'"),
        ({"path": "/x", "txnAppId": "a", "txnVersion": "-1"}, "at least 0 .* got '-1'"),
    ],
)
def test_an_invalid_option_is_refused(options, message):
    """The message says what is wrong."""
    with pytest.raises(InvalidConfigError, match=message):
        SinkOptions.parse(options)


@pytest.mark.parametrize(("text", "version"), [("9007199254740993", 2**53 + 1), ("1.0", 1)])
def test_a_version_of_an_application_is_read_exactly(text, version):
    """Spark passes numbers as text; a float has no odd numbers above 2**53."""
    options = {"path": "/x", "txnAppId": "a", "txnVersion": text}
    assert SinkOptions.parse(options).txn_version == version


def test_options_may_be_in_any_case_and_those_about_brokers_have_no_effect(caplog):
    """One warning lists the options about brokers."""
    parsed = SinkOptions.parse({"PATH": "/x/../y", "Topic": "T", "kafka.acks": "all"})

    assert (parsed.path, parsed.topic, parsed.durability) == ("/y", "T", "fsync")
    assert "kafka.acks" in caplog.text


@pytest.mark.parametrize("value", ["true", "false", "", "anything"])
def test_include_headers_has_no_effect(write, log, caplog, value):
    """Kafka's sink accepts it, so a pipeline may pass the same options to both sides."""
    headers = [[{"key": "h", "value": b"1"}]]
    write(log, columns(value=[b"v"], headers=headers), topic="u", includeHeaders=value)

    assert "headers" in log["u"].to_arrow().column_names
    assert caplog.records == []


def test_a_batch_cannot_overwrite_and_an_application_needs_a_version():
    """Without a version, an application could publish only once."""
    with pytest.raises(InvalidConfigError, match="appended to"):
        SinkOptions.parse({"path": "/x"}).check_batch(True)
    with pytest.raises(InvalidConfigError, match="without txnVersion"):
        SinkOptions.parse({"path": "/x", "txnAppId": "a"}).check_batch(False)


TEXT, INT, NTZ = StringType(), IntegerType(), TimestampNTZType()


@pytest.mark.parametrize(
    ("types", "topic", "message"),
    [
        ({"value": TEXT}, None, "topic option required when no 'topic' attribute is present"),
        ({"key": TEXT}, "t", "Required attribute 'value' not found"),
        ({"value": INT}, "t", r"value must be a\(n\) string or binary"),
        ({"value": TEXT, "key": INT}, "t", r"key must be a\(n\) string or binary"),
        ({"value": TEXT, "topic": INT}, None, r"topic must be a\(n\) string"),
        ({"value": TEXT, "headers": TEXT}, "t", r"headers must be a\(n\) array<struct<key:"),
        ({"value": TEXT, "partition": TEXT}, "t", r"partition must be a\(n\) int"),
        ({"value": TEXT, "timestamp": TEXT}, "t", r"timestamp must be a\(n\) timestamp"),
        # Only the session's time zone says which instant it is.
        ({"value": TEXT, "timestamp": NTZ}, "t", "It is timestamp_ntz: cast it"),
    ],
)
def test_an_invalid_column_is_refused_with_the_message_of_kafkas_sink(types, topic, message):
    """The columns are checked before any read or write."""
    names = {name: column_type.simpleString() for name, column_type in types.items()}

    with pytest.raises(InvalidConfigError, match=message):
        check_column_types(names, topic)


def test_columns_may_be_in_any_order_with_others_between_them():
    """Other columns are ignored."""
    types = {"extra": "int", "topic": "string", "value": "binary", "partition": "int"}

    check_column_types(types, None)
