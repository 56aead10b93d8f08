"""What a task of a write makes of its rows, without Spark."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType
from support.clock import START
from support.roots import values

import embedlog
from embedlog.api import Log
from embedlog.errors import (
    InvalidConfigError,
    InvalidRecordError,
    SerializationError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.partitioner import partition_for_key
from embedlog.spark import batch_write, sink_options


@pytest.fixture
def log(tmp_path: Any) -> Iterator[Log]:
    """A log with "t" of three partitions and "u" of one; healthy when the test is done with it."""
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t", partitions=3)
        log.create_topic("u")
        yield log
        assert log.verify() == []


def write(log: Log, *batches: Any, number: int = 0, **options: str) -> Any:
    """Stage record batches and publish them, as a task and its driver do."""
    parsed = sink_options.parse({"path": log.path, **options})
    task = batch_write.plan_write(parsed)
    staged = task.stage(batches, number, 0)
    return batch_write.publish(parsed, [staged], None)


def columns(**given: Any) -> Any:
    kinds = {
        "value": pa.binary(),
        "key": pa.binary(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "timestamp": pa.timestamp("us", "Europe/Berlin"),
        "headers": pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()})),
    }
    arrays = {name: pa.array(some, kinds.get(name)) for name, some in given.items()}
    return pa.RecordBatch.from_pydict(arrays)


def content(log: Log, topic: str) -> list[list[bytes | None]]:
    return [values(log.partition(topic, number)) for number in range(log.topic(topic).partitions)]


def test_a_log_that_is_kept_open_is_the_one_at_its_path(tmp_path):
    """A stream's process keeps it, and it may be deleted and made anew between two queries."""
    options = sink_options.parse({"path": str(tmp_path / "log")})
    with batch_write.open_log(options, keep=True) as old:
        old.create_topic("t")
    with batch_write.open_log(options, keep=True) as same:
        assert same is old
    shutil.rmtree(tmp_path / "log")
    with batch_write.open_log(options, keep=True) as new:
        assert new.topics() == []
    new.close()


def test_keys_go_where_kafka_would_put_them(log):
    """Bit for bit, a column at a time."""
    keys = [b"key-%d" % number for number in range(100)]
    write(log, columns(key=keys, value=keys), topic="t")

    for number, found in enumerate(content(log, "t")):
        assert found == [key for key in keys if partition_for_key(key, 3) == number]


def test_the_partition_column_beats_the_key(log):
    """Where it is null the key decides."""
    write(
        log,
        columns(key=[b"k"] * 4, value=[b"0", b"1", b"2", b"?"], partition=[0, 1, 2, None]),
        topic="t",
    )

    found = content(log, "t")
    assert all(b"%d" % number in found[number] for number in range(3))
    assert b"?" in found[partition_for_key(b"k", 3)]


def test_rows_without_a_key_are_spread_alike_when_a_task_is_repeated(log):
    """Tasks begin at different partitions; a repeated one chooses as before."""
    for number in (0, 1, 2, 0):
        write(log, columns(value=[b"%d" % number] * 2), topic="t", number=number)

    assert content(log, "t") == [[b"0"] * 4, [b"1"] * 2, [b"2"] * 2]


def test_a_partition_that_is_not_there_is_told(log):
    """Nothing is staged of the task."""
    for wrong in (3, -1):
        with pytest.raises(UnknownTopicOrPartitionError, match="partitions 0 to 2"):
            write(log, columns(value=[b"v"], partition=[wrong]), topic="t")
    with pytest.raises(UnknownTopicOrPartitionError, match="partitions 0 to 0"):
        write(log, columns(value=[b"v"], partition=[1]), topic="u")


def test_the_topic_column_says_where_a_row_goes(log):
    """And the option beats it."""
    rows = columns(value=[b"1", b"2", b"3"], topic=["u", "t", "u"], key=[b"k"] * 3)
    write(log, rows)
    assert content(log, "u") == [[b"1", b"3"]]

    write(log, rows, topic="u")
    assert content(log, "u") == [[b"1", b"3", b"1", b"2", b"3"]]


def test_a_topic_that_is_not_there_is_told(log):
    """Only the one that the option names is made, as by any producer."""
    with pytest.raises(UnknownTopicOrPartitionError, match="Create it"):
        write(log, columns(value=[b"v"], topic=["new"]))
    write(log, columns(value=[b"v"]), topic="new")

    assert content(log, "new") == [[b"v"]]


def test_a_null_topic_is_an_error(log):
    """In the words of Kafka's sink."""
    with pytest.raises(InvalidRecordError, match="null topic present in the data"):
        write(log, columns(value=[b"v", b"w"], topic=["t", None]))


def test_text_and_bytes_are_the_same(log):
    """Text is stored as UTF-8; null is not the same as empty."""
    text = pa.RecordBatch.from_pydict({"key": ["ä", None, ""], "value": ["é", "", None]})
    write(log, text, topic="u")

    found = log.topic("u").to_arrow().to_pylist()
    assert [(row["key"], row["value"]) for row in found] == [
        ("ä".encode(), "é".encode()),
        (None, b""),
        (b"", None),
    ]


def test_times_are_kept_and_missing_ones_are_now(log):
    """Microseconds of any zone become milliseconds; a null is the time of the task."""
    write(log, columns(value=[b"1", b"2"], timestamp=[(START * 1000) + 999, None]), topic="u")
    write(log, columns(value=[b"3"]), topic="u")

    times = [int(row["timestamp"].timestamp() * 1000) for row in log["u"].to_arrow().to_pylist()]
    assert times[0] == START
    assert min(times[1:]) > START + 1000


def test_headers_come_back_as_they_were(log):
    """Twice the same, null values, and none; without any the column is left out."""
    some = [{"key": "h", "value": b"1"}, {"key": "h", "value": None}]
    write(log, columns(value=[b"1", b"2"], headers=[None, []]), topic="u")
    assert "headers" not in log["u"].to_arrow().column_names
    write(log, columns(value=[b"3", b"4"], headers=[some, None]), topic="u")

    with log.consumer("u", auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        found = [list(record.headers) for record in consumer]
    assert found == [[], [], [("h", b"1"), ("h", None)], []]


def test_a_header_without_a_name_is_an_error(log):
    """A3."""
    with pytest.raises((SerializationError, InvalidRecordError, pa.ArrowInvalid)):
        write(log, columns(value=[b"v"], headers=[[{"key": None, "value": b"1"}]]), topic="u")


def test_many_small_batches_are_gathered(log):
    """Spark hands out what it likes; the batches of the log are of a good size."""
    write(log, *(columns(value=[b"x" * 100] * 10) for _ in range(1000)), topic="u")

    (one, *_) = log.partition("u", 0).reader(0).read()
    assert one.count > 5_000
    assert len(log["u"]) == 10_000


def test_large_values_and_small_limits(log):
    """Cut so that each batch fits the topic; a single record that does not is refused."""
    log.create_topic("small", config={"max.message.bytes": 20_000})
    write(log, columns(value=[b"x" * 5_000] * 10), topic="small")
    assert len(log["small"]) == 10

    with pytest.raises(embedlog.errors.RecordTooLargeError):
        write(log, columns(value=[b"x" * 30_000]), topic="small")


@pytest.mark.parametrize("how", ["topic", "option"])
def test_batches_are_compressed_as_the_topic_or_the_option_says(log, how):
    """In the tasks, not in the driver."""
    config = {"compression.type": "zstd"} if how == "topic" else {}
    log.create_topic("c", config=config)
    more = {} if how == "topic" else {"compression": "zstd"}
    write(log, columns(value=[b"x" * 100] * 1_000), topic="c", **more)

    assert log["c"].size_bytes() < 20_000
    assert values(log.partition("c", 0)) == [b"x" * 100] * 1_000


def test_no_rows_are_no_file(log):
    """An empty task stages nothing."""
    assert write(log, topic="u").records == 0
    assert write(log, columns(value=[]), topic="u").records == 0


def test_a_task_that_cannot_reach_the_directory_says_what_is_possible(log):
    """An executor on another host without it."""
    parsed = sink_options.parse({"path": log.path, "topic": "u"})
    task = batch_write.plan_write(parsed)
    lost = type(task)("/nowhere", task.directory, task.topic, task.targets)

    with pytest.raises(StorageError, match="Executors write to the directory of the log"):
        lost.stage([columns(value=[b"v"])], 0, 0)


# Options


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "'path' is missing"),
        ({"path": "/x", "topik": "t"}, "Did you mean 'topic'"),
        ({"path": "/x", "kafka.key.serializer": "X"}, "not supported as keys are serialized"),
        ({"path": "/x", "kafka.value.serializer": "X"}, "not supported as values are"),
        ({"path": "/x", "durability": "maybe"}, "must be one of fsync, os"),
        ({"path": "/x", "txnVersion": "1"}, "without txnAppId"),
        ({"path": "/x", "txnVersion": "1", "txnAppId": ""}, "must not be empty"),
        ({"path": "/x", "txnAppId": "a", "txnVersion": "one"}, "must be a number"),
    ],
)
def test_an_option_that_says_nothing_is_refused(given, told):
    """At the start, with what to do."""
    with pytest.raises(InvalidConfigError, match=told):
        sink_options.parse(given)


def test_options_have_any_case_and_those_about_brokers_no_effect(caplog):
    """As Kafka's; one warning."""
    made = sink_options.parse({"PATH": "/x/../y", "Topic": "T", "kafka.acks": "all"})

    assert (made.path, made.topic, made.durability) == ("/y", "T", "fsync")
    assert "kafka.acks" in caplog.text


def test_a_batch_is_appended_and_numbered_as_a_whole():
    """No overwriting; an application without a version would be published once for ever."""
    with pytest.raises(InvalidConfigError, match="appended to"):
        sink_options.check_batch(sink_options.parse({"path": "/x"}), True)
    with pytest.raises(InvalidConfigError, match="without txnVersion"):
        sink_options.check_batch(sink_options.parse({"path": "/x", "txnAppId": "a"}), False)


TEXT, NUMBER = StringType(), IntegerType()


@pytest.mark.parametrize(
    ("kinds", "topic", "told"),
    [
        ({"value": TEXT}, None, "topic option required when no 'topic' attribute is present"),
        ({"key": TEXT}, "t", "Required attribute 'value' not found"),
        ({"value": NUMBER}, "t", r"value must be a\(n\) string or binary"),
        ({"value": TEXT, "key": NUMBER}, "t", r"key must be a\(n\) string or binary"),
        ({"value": TEXT, "topic": NUMBER}, None, r"topic must be a\(n\) string"),
        ({"value": TEXT, "headers": TEXT}, "t", r"headers must be a\(n\) array<struct<key:"),
        ({"value": TEXT, "partition": TEXT}, "t", r"partition must be a\(n\) int"),
        ({"value": TEXT, "timestamp": TEXT}, "t", r"timestamp must be a\(n\) timestamp"),
    ],
)
def test_a_column_that_the_sink_does_not_take_is_told_in_the_words_of_kafkas(kinds, topic, told):
    """Before anything is read or written."""
    schema = StructType([StructField(name, kind) for name, kind in kinds.items()])

    with pytest.raises(InvalidConfigError, match=told):
        sink_options.check_columns(schema, topic)


def test_columns_may_come_in_any_order_with_others_between_them():
    """Nullable or not; others are left out."""
    kinds = {"extra": NUMBER, "topic": TEXT, "value": BinaryType(), "partition": NUMBER}
    schema = StructType([StructField(name, kind, False) for name, kind in kinds.items()])

    sink_options.check_columns(schema, None)
