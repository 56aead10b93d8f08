"""Batch queries, planned from metadata and read as in an executor, without Spark."""

import json
import os
import pickle
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from support.clock import START
from support.roots import encoded
from support.spark_reads import arrow_schema_of, read_all, values_of

from embedlog.errors import (
    CorruptBatchError,
    DataLossError,
    InvalidConfigError,
    InvalidRecordError,
    NotALogError,
    OffsetOutOfRangeError,
    UnknownTopicOrPartitionError,
)
from embedlog.record import TopicPartition
from embedlog.spark import columns as spark_columns
from embedlog.spark import input_partitions, partition_reader
from embedlog.spark.input_partitions import (
    pack_slices,
    plan_batch,
    plan_input_partitions,
    task_count,
)
from embedlog.spark.options import SourceOptions
from embedlog.spark.plan import LogInputPartition
from embedlog.splits.locate import split_counts
from embedlog.splits.slices import PartitionOffsets, PartitionSlice


def row_counts(partition, names=("offset",)):
    """Read an input partition, and return the number of rows of each Arrow batch."""
    batches = partition_reader.read_input_partition(partition, names, True)
    return [rows.num_rows for rows in batches]


# Rows


def test_rows_have_the_columns_of_kafkas_source(rows, send):
    """Names and values are the same, with timestamps in microseconds UTC."""
    send("t", {1: [b"v"]}, key=b"k", headers=[("h", b"1"), ("h", None)])

    (row,) = rows()

    timestamp = row.pop("timestamp")
    assert (timestamp.timestamp() * 1000, str(timestamp.tzinfo)) == (START, "UTC")
    assert row == {
        "key": b"k",
        "value": b"v",
        "topic": "t",
        "partition": 1,
        "offset": 0,
        "timestampType": 0,
        "headers": [{"key": "h", "value": b"1"}, {"key": "h", "value": None}],
    }


def test_the_schema_is_the_one_that_spark_expects(rows, send, options):
    """With other types, order or nullability the first task would fail."""
    sql = pytest.importorskip("pyspark.sql.types")
    header = sql.StructType([sql.StructField("key", sql.StringType())])
    header.add("value", sql.BinaryType())
    column_types = [
        *(sql.BinaryType(), sql.BinaryType(), sql.StringType(), sql.IntegerType(), sql.LongType()),
        *(sql.TimestampType(), sql.IntegerType(), sql.ArrayType(header)),
    ]
    fields = zip(spark_columns.SPARK_TYPES, column_types, strict=True)
    schema = sql.StructType([sql.StructField(name, column_type) for name, column_type in fields])
    send("t", {0: [1, 2]}, headers=[("a", b"b")])

    (partition,) = plan_batch(SourceOptions.parse(options()))
    (rows_batch,) = partition_reader.read_input_partition(partition, tuple(schema.names), True)

    assert rows_batch.schema.equals(arrow_schema_of(schema))
    assert [column_type.simpleString() for column_type in column_types] == list(
        spark_columns.SPARK_TYPES.values()
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([("value", "string")], "no column value of type string"),
        ([("valeu", "binary")], "no column valeu"),
        ([("headers", spark_columns.SPARK_TYPES["headers"])], "includeHeaders"),
    ],
)
def test_a_schema_with_unknown_columns_is_refused(fields, message):
    """The column "headers" is unknown without includeHeaders."""
    with pytest.raises(InvalidConfigError, match=message):
        spark_columns.check_bytes_projection(
            [spark_columns.field_json(*field) for field in fields], headers=False
        )


def test_a_timestamp_out_of_sparks_range_is_an_error(log, rows):
    """Spark counts microseconds; the other columns can be read."""
    log.partition("t", 0).append([encoded(b"x", at=(1 << 63) - 1)])

    with pytest.raises(InvalidRecordError, match="a timestamp that Spark cannot hold"):
        rows()
    assert rows(("value",)) == [{"value": b"x"}]


def test_large_batches_are_yielded_in_parts(log, options):
    """A part has at most 65,536 rows."""
    log.alter_topic("t", {"max.message.bytes": 10 << 20})
    log.partition("t", 0).append([encoded(*[b""] * 150_000)])

    (partition,) = plan_batch(SourceOptions.parse(options(assign='{"t": [0]}')))
    sizes = row_counts(partition)

    assert sizes == [65_536, 65_536, 18_928]


# Topics and offsets


def test_topics_are_chosen_by_name_pattern_or_assignment(log, rows, send):
    """A pattern must match the whole name."""
    for name in ("flights", "flights-2", "weather"):
        log.create_topic(name, 2)
        send(name, {0: [1], 1: [2]})

    def partitions_read(**selection):
        return sorted({(row["topic"], row["partition"]) for row in rows(**selection)})

    assert {topic for topic, _ in partitions_read(subscribe="flights,weather")} == {
        "flights",
        "weather",
    }
    assert {topic for topic, _ in partitions_read(subscribePattern="flights.*")} == {
        "flights",
        "flights-2",
    }
    assert {topic for topic, _ in partitions_read(subscribePattern="flights")} == {"flights"}
    assert partitions_read(subscribePattern="nothing") == []
    assert {topic for topic, _ in partitions_read(subscribePattern=".*")} <= {*log.topics()}
    assert partitions_read(assign='{"weather": [1], "flights": [0]}') == [
        ("flights", 0),
        ("weather", 1),
    ]


def test_a_topic_or_partition_that_does_not_exist_is_an_error(log, rows):
    """It suggests the nearest name; with failOnDataLoss=false nothing is read."""
    log.create_topic("flights")

    with pytest.raises(UnknownTopicOrPartitionError, match="Did you mean 'flights'"):
        rows(subscribe="fligths")
    with pytest.raises(UnknownTopicOrPartitionError, match="There is no such partition"):
        rows(assign='{"flights": [0, 1]}')
    assert rows(subscribe="fligths", failOnDataLoss="false") == []


def test_a_path_without_a_log_is_an_error_and_not_created(tmp_path, options):
    """Otherwise a typing error in the path would give an empty result."""
    with pytest.raises(NotALogError, match="There is no log here"):
        plan_batch(SourceOptions.parse({"path": str(tmp_path / "nolog"), "subscribe": "t"}))
    assert not (tmp_path / "nolog").exists()


@pytest.mark.parametrize(
    "bounds",
    [
        {"startingOffsets": '{"t": {"0": 1}}'},
        {"startingOffsets": '{"t": {"0": 1, "1": 1, "2": 1}}'},
        {"startingOffsets": '{"u": "earliest", "t": "earliest"}'},
        {"endingOffsets": '{"u": {"0": 1}}'},
        {"startingOffsetsByTimestamp": '{"t": {"0": 1}}'},
    ],
    ids=str,
)
def test_offsets_name_all_partitions_and_no_others(rows, send, bounds):
    """This is Kafka's rule: a forgotten partition would have no defined start."""
    send("t", {0: [1, 2], 1: [1, 2]})

    with pytest.raises(InvalidConfigError, match="other partitions than the query reads"):
        rows(**bounds)


def test_timestamps_select_offsets(rows, send):
    """A bound is the first record at or after a time, or the end of the log."""
    send("t", {0: range(10), 1: range(100, 110)}, at=START)

    assert values_of(rows(startingTimestamp=START + 7)) == [7, 8, 9, 107, 108, 109]
    assert values_of(rows(endingTimestamp=START + 2)) == [0, 1, 100, 101]
    assert len(rows(endingTimestamp=START + 99)) == 20
    times = json.dumps({"t": {"0": START + 9, "1": START + 8}})
    assert values_of(rows(startingOffsetsByTimestamp=times)) == [9, 108, 109]


def test_a_starting_time_after_all_records_fails_or_is_the_end(rows, send):
    """The option startingOffsetsByTimestampStrategy decides."""
    send("t", {0: [1], 1: [1]})

    with pytest.raises(OffsetOutOfRangeError, match="No record has a timestamp at or after"):
        rows(startingTimestamp=START + 1)
    start_options = {"startingTimestamp": START + 1, "startingOffsetsByTimestampStrategy": "latest"}
    assert rows(**start_options) == []


def test_a_query_cannot_start_after_its_end(rows, send):
    """With offsets it is an error; with timestamps the result is empty."""
    send("t", {0: range(10), 1: range(10)})
    offsets = '{{"t": {{"0": {}, "1": 0}}}}'

    with pytest.raises(OffsetOutOfRangeError, match="starts after its end"):
        rows(startingOffsets=offsets.format(5), endingOffsets=offsets.format(4))
    with pytest.raises(OffsetOutOfRangeError, match="past the end of the log, which is 10"):
        rows(endingOffsets=offsets.format(11))
    assert rows(startingTimestamp=START + 5, endingTimestamp=START + 2) == []


def test_a_start_outside_the_log_is_a_data_loss(rows, send):
    """The query fails, or starts at the nearest end of the log."""
    send("t", {0: range(10), 1: []})
    start_options = {"startingOffsets": '{"t": {"0": 11, "1": 0}}'}

    with pytest.raises(DataLossError, match=r"starts at offset 11, but has offsets \[0, 10\)"):
        rows(**start_options)
    assert rows(**start_options, failOnDataLoss="false") == []


# Tasks


def test_input_partitions_pickle_to_few_bytes(log, options, send):
    """Spark sends them with each task."""
    send("t", {0: range(100), 1: range(100)})

    tasks = plan_batch(SourceOptions.parse(options()))

    assert len(tasks) == 2
    assert all(len(pickle.dumps(partition)) < 1000 for partition in tasks)


@pytest.mark.parametrize(
    ("sizes", "total", "counts"),
    [
        ([5], 1, [1]),
        ([5], 4, [4]),
        ([1, 1, 1], 2, [1, 1, 1]),
        ([1000, 1000], 4, [2, 2]),
        ([10_000, 1], 4, [3, 1]),
        ([10_000, 1, 1], 3, [1, 1, 1]),
        ([10_000, 1, 1], 5, [3, 1, 1]),
        ([0, 100], 3, [1, 2]),
        ([0, 0], 9, [1, 1]),
        ([10, 20, 30], 12, [2, 4, 6]),
    ],
)
def test_ranges_are_split_in_proportion_to_their_sizes(sizes, total, counts):
    """Large ranges are split, small ones stay whole."""
    assert split_counts(sizes, total) == counts


@pytest.mark.parametrize(
    ("sizes", "cores", "limits", "tasks"),
    [
        ([1, 1, 1, 1], 2, {}, 2),
        ([1], 8, {}, 1),
        ([64 << 20], 4, {}, 4),
        ([17 << 20], 4, {}, 2),
        ([1 << 30], 2, {}, 8),
        ([1 << 30], 2, {"maxBytesPerPartition": 1 << 28}, 4),
        ([1, 1], 2, {"minPartitions": 5}, 5),
        ([], 2, {}, 0),
    ],
)
def test_the_number_of_tasks_depends_on_bytes_and_cores(sizes, cores, limits, tasks):
    """A task costs tens of milliseconds, and so does an idle core."""
    options = SourceOptions.parse(
        {"path": "/p", "subscribe": "t", **{k: str(v) for k, v in limits.items()}}
    )

    assert task_count(sizes, cores, options) == tasks


def test_small_slices_share_tasks_evenly():
    """The largest slices are assigned first, each to the smallest task."""
    slices = [
        PartitionSlice("t", number, 0, 1, 0, (), size)
        for number, size in enumerate([5, 1, 1, 1, 3, 1])
    ]

    tasks = pack_slices(slices, 2)

    assert [sum(part_slice.size for part_slice in task) for task in tasks] == [6, 6]
    assert [[part_slice.partition for part_slice in task] for task in tasks] == [
        [0, 1],
        [2, 3, 4, 5],
    ] or all(task == sorted(task, key=lambda part_slice: part_slice.partition) for task in tasks)


@pytest.mark.parametrize("seed", range(50))
def test_the_slices_of_a_partition_are_in_the_order_of_the_tasks(seed):
    """Writes are published in the order of tasks, so a copy keeps the order of each key."""
    rng = random.Random(seed)
    starts = [(number, start) for number in range(4) for start in range(rng.randint(1, 6))]
    slices = [
        PartitionSlice("t", number, start, start + 1, 0, (), rng.randint(90, 110))
        for number, start in starts
    ]

    tasks = pack_slices(slices, rng.randint(1, 8))

    order = [
        (part_slice.partition, part_slice.from_offset) for task in tasks for part_slice in task
    ]
    assert sorted(order, key=lambda pair: pair[0]) == starts
    sizes = [sum(part_slice.size for part_slice in task) for task in tasks]
    assert max(sizes) - min(sizes) < 150


def _filled(log, segments):
    """Fill a partition with 1 KB records, up to this many segments of about 200 KB."""
    log.create_topic("big", 1, {"segment.bytes": 200_000, "index.interval.bytes": 10_000})
    partition_log = log.partition("big", 0)
    while len(partition_log.segments) < segments:
        first = partition_log.end_offset()
        partition_log.append([encoded(*[b"%08d" % (first + row) + b"x" * 992 for row in range(5)])])
        partition_log.refresh()
    return partition_log


@pytest.mark.parametrize("tasks", [2, 3, 7, 20])
def test_a_split_is_complete_and_even(log, monkeypatch, tasks):
    """Each offset is in one task, and tasks read about the same number of bytes."""
    partition_log = _filled(log, 4)
    options = SourceOptions.parse(
        {"path": log.path, "subscribe": "big", "minPartitions": str(tasks)}
    )
    monkeypatch.setattr(input_partitions.os, "sched_getaffinity", lambda pid: {0, 1})

    offset_range = PartitionOffsets(TopicPartition("big", 0), 3, partition_log.end_offset())
    planned = plan_input_partitions(
        options, {offset_range.topic_partition: partition_log}, [offset_range]
    )

    slices = sorted(
        (part_slice for partition in planned for part_slice in partition.slices),
        key=lambda part_slice: part_slice.from_offset,
    )
    assert len(planned) == tasks
    assert slices[0].from_offset == 3
    assert slices[-1].until_offset == partition_log.end_offset()
    assert all(first.until_offset == second.from_offset for first, second in pairwise(slices))
    sizes = [part_slice.until_offset - part_slice.from_offset for part_slice in slices]
    assert max(sizes) < 2 * min(sizes) + 10
    assert sorted(row["offset"] for row in read_all(planned, ("offset",))) == list(
        range(3, partition_log.end_offset())
    )


def test_few_rows_in_one_batch_can_be_split_too(rows, options, send):
    """The tasks read the same batch and take different rows of it."""
    send("t", {0: range(12)})

    tasks = plan_batch(SourceOptions.parse(options(minPartitions=4)))

    assert len(tasks) == 4
    assert values_of(rows(minPartitions=4)) == list(range(12))
    assert len(plan_batch(SourceOptions.parse(options(minPartitions=100)))) <= 12


def test_no_task_has_more_records_than_allowed(options, rows, send):
    """The limit is maxRecordsPerPartition."""
    send("t", {0: range(25), 1: range(100, 103)})

    tasks = plan_batch(SourceOptions.parse(options(maxRecordsPerPartition=10)))

    sizes = [
        part_slice.until_offset - part_slice.from_offset
        for partition in tasks
        for part_slice in partition.slices
    ]
    assert sorted(sizes) == [3, 8, 8, 9]
    assert len(rows(maxRecordsPerPartition=10)) == 28


def test_tasks_are_no_larger_than_allowed(log):
    """The limit is maxBytesPerPartition; it is approximate."""
    partition_log = _filled(log, 4)
    options = SourceOptions.parse(
        {"path": log.path, "subscribe": "big", "maxBytesPerPartition": "100000"}
    )

    tasks = plan_batch(options)

    assert len(tasks) >= partition_log.size_bytes() // 100_000
    sizes = [part_slice.size for partition in tasks for part_slice in partition.slices]
    assert max(sizes) < 130_000


def test_planning_reads_no_data(log, options, send, monkeypatch):
    """It uses only the manifest and the index."""
    send("t", {0: range(100), 1: range(100)})
    files = type(log.root.context.files)
    opened = []
    open_file = files.open
    monkeypatch.setattr(
        files, "open", lambda self, path, **how: opened.append(path) or open_file(self, path, **how)
    )

    assert plan_batch(SourceOptions.parse(options(minPartitions=5)))

    assert [path for path in opened if path.endswith(".arrows")] == []


# Changes between plan and read


def test_a_deleted_file_is_a_data_loss(log, options, send):
    """The query fails, or reads the rest."""
    send("t", {0: range(10), 1: range(100, 110)})
    tasks = plan_batch(SourceOptions.parse(options()))
    log.delete_topic("t")

    with pytest.raises(DataLossError, match="was deleted after the query was planned"):
        read_all(tasks, ("value",))
    assert [
        rows
        for partition in tasks
        for rows in partition_reader.read_input_partition(partition, ("value",), False)
    ] == []


def test_a_log_that_was_truncated_and_written_again_is_a_data_loss(log, options, send):
    """Other records have these offsets; their batches have a later leader epoch."""
    send("t", {0: range(10)})
    (partition,) = plan_batch(SourceOptions.parse(options()))
    (part_slice,) = partition.slices
    (chunk,) = part_slice.chunks

    def read(part_slice):
        return list(
            partition_reader.read_input_partition(
                replace(partition, slices=(part_slice,)), ("value",), True
            )
        )

    shorter = chunk._replace(end_position=chunk.end_position + 800)
    with pytest.raises(DataLossError, match="was truncated"):
        read(replace(part_slice, until_offset=20, chunks=(shorter,)))
    with pytest.raises(DataLossError, match="written again"):
        read(replace(part_slice, leader_epoch=-1))
    log.partition("t", 0).truncate_to(5)
    with pytest.raises(DataLossError, match="was deleted"):
        read(part_slice)


def test_damage_is_an_error_even_without_fail_on_data_loss(log, options, send):
    """failOnDataLoss is about deleted records only."""
    send("t", {0: [b"abcdefgh" * 50]})
    tasks = plan_batch(SourceOptions.parse(options()))
    path = os.path.join(log.path, tasks[0].slices[0].chunks[0].path)
    with open(path, "r+b") as file:
        data = file.read()
        file.seek(data.index(b"abcdefgh"))
        file.write(b"z")

    with pytest.raises(CorruptBatchError, match="CRC of column value"):
        list(partition_reader.read_input_partition(tasks[0], ("value",), False))
    with open(path, "r+b") as file:
        file.write(data)


def test_an_executor_without_the_log_says_so(log, options, send, tmp_path):
    """The log must have the same path on every host."""
    send("t", {0: range(10)})
    (planned,) = plan_batch(SourceOptions.parse(options()))
    partition = LogInputPartition(str(tmp_path / "elsewhere"), planned.slices)

    with pytest.raises(NotALogError, match="The log is not on this host"):
        list(partition_reader.read_input_partition(partition, ("value",), True))


def test_an_executor_opens_no_database_and_takes_no_lock(log, options, send, monkeypatch):
    """It may be killed at any time, and read from another host."""
    import fcntl

    import lmdb

    send("t", {0: range(10)})
    (partition,) = plan_batch(SourceOptions.parse(options()))

    def never(*_, **__):
        raise AssertionError("An executor must not call this")

    monkeypatch.setattr(lmdb, "open", never)
    monkeypatch.setattr(lmdb, "Environment", never)
    monkeypatch.setattr(fcntl, "flock", never)

    assert sum(row_counts(partition, ("value",))) == 10


def test_a_log_that_is_not_writable_can_be_read(log, send, options, monkeypatch):
    """Another user may read it."""
    send("t", {0: range(10)})
    monkeypatch.setattr("embedlog.spark.log_cache.os.access", lambda path, how: False)

    assert len(plan_batch(SourceOptions.parse(options()))) == 1
