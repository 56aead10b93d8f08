"""A batch query: what is planned from metadata, and what an executor reads; Spark is not needed."""

import os
import pickle
import random
from dataclasses import replace
from itertools import pairwise

import pyarrow as pa
import pytest
from support.clock import START
from support.roots import encoded
from support.sparks import values_of

import embedlog
from embedlog import batch
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
from embedlog.segment import create
from embedlog.spark import input_partitions, kafka_columns, partition_reader
from embedlog.spark.batch_scan import works
from embedlog.spark.input_partitions import PartitionOffsets, packed, parts_of, plan, tasks_for
from embedlog.spark.partition_reader import FileChunk, LogInputPartition, PartitionSlice
from embedlog.spark.source_options import parse

# What is read


def test_rows_have_the_columns_of_kafkas_source(rows, send):
    """Names and values, with times in microseconds UTC."""
    send("t", {1: [b"v"]}, key=b"k", headers=[("h", b"1"), ("h", None)])

    (row,) = rows()

    when = row.pop("timestamp")
    assert (when.timestamp() * 1000, str(when.tzinfo)) == (START, "UTC")
    assert row == {
        "key": b"k",
        "value": b"v",
        "topic": "t",
        "partition": 1,
        "offset": 0,
        "timestampType": 0,
        "headers": [{"key": "h", "value": b"1"}, {"key": "h", "value": None}],
    }


def test_nulls_stay_nulls_and_no_headers_are_null(rows, send):
    """As Kafka's source has it, whether the segment has headers or not."""
    send("t", {0: [None, b""]})
    assert [(row["key"], row["value"], row["headers"]) for row in rows()] == [
        (None, None, None),
        (None, b"", None),
    ]

    send("t", {0: [b"x"]}, headers=[("h", b"")])
    send("t", {0: [b"y"]})

    assert [row["headers"] for row in rows()] == [
        None,
        None,
        [{"key": "h", "value": b""}],
        None,
    ]


def test_the_schema_is_the_one_that_spark_compares_with(rows, send, options):
    """Types, order and nullability; a mistake here is an error of the first task."""
    types = pytest.importorskip("pyspark.sql.pandas.types")
    of = pytest.importorskip("pyspark.sql.types")
    pair = of.StructType([of.StructField("key", of.StringType())])
    pair.add("value", of.BinaryType())
    kinds = [
        *(of.BinaryType(), of.BinaryType(), of.StringType(), of.IntegerType(), of.LongType()),
        *(of.TimestampType(), of.IntegerType(), of.ArrayType(pair)),
    ]
    fields = zip(kafka_columns.KINDS, kinds, strict=True)
    schema = of.StructType([of.StructField(name, kind) for name, kind in fields])
    send("t", {0: [1, 2]}, headers=[("a", b"b")])

    (work,) = works(parse(options()))
    (found,) = partition_reader.read(work, tuple(schema.names), True)

    assert found.schema.equals(types.to_arrow_schema(schema, timezone="UTC"))
    assert [kind.simpleString() for kind in kinds] == list(kafka_columns.KINDS.values())


def test_a_time_set_by_the_log_is_told(log, rows, send):
    """timestampType 1, also where both kinds are in one segment."""
    send("t", {0: [1]})
    log.alter_topic("t", {"message.timestamp.type": "LogAppendTime"})
    send("t", {0: [2]})

    found = rows()

    assert [row["timestampType"] for row in found] == [0, 1]
    assert found[1]["timestamp"].timestamp() * 1000 > START


def test_a_schema_is_a_projection(rows, send):
    """In the user's order; what is not asked for is not even checked."""
    send("t", {0: [5]}, key=b"k")

    assert rows(("offset", "value")) == [{"offset": 0, "value": b"5"}]
    assert rows(("topic",)) == [{"topic": "t"}]
    assert rows(("timestampType", "partition")) == [{"timestampType": 0, "partition": 0}]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ([("value", "string")], "no column value of type string"),
        ([("valeu", "binary")], "no column valeu"),
        ([("headers", kafka_columns.KINDS["headers"])], "includeHeaders"),
    ],
)
def test_a_schema_of_other_columns_is_refused(fields, told):
    """With what there is."""
    with pytest.raises(InvalidConfigError, match=told):
        kafka_columns.chosen(fields, headers=False)


def test_a_time_too_far_away_for_spark_is_told(log, rows):
    """It counts microseconds; the other columns can be read."""
    log.partition("t", 0).append([encoded(b"x", at=(1 << 63) - 1)])

    with pytest.raises(InvalidRecordError, match="a time that Spark cannot hold"):
        rows()
    assert rows(("value",)) == [{"value": b"x"}]


def test_small_batches_are_gathered(log, options):
    """Spark takes longer for each batch than for a thousand rows."""
    part = log.partition("t", 0)
    for first in range(0, 70_000, 1000):
        some = [encoded(*[b"x"] * 10) for _ in range(100)]
        part.append(some)
        assert part.end_offset() == first + 1000

    (work,) = works(parse(options(assign='{"t": [0]}')))
    sizes = [one.num_rows for one in partition_reader.read(work, ("offset",), True)]

    assert sum(sizes) == 70_000
    assert all(size >= partition_reader.ROWS for size in sizes[:-1])
    assert all(size <= partition_reader.MOST_ROWS for size in sizes)


def test_large_batches_are_handed_on_in_parts(log, options):
    """At most 64 Ki rows at once."""
    log.alter_topic("t", {"max.message.bytes": 10 << 20})
    log.partition("t", 0).append([encoded(*[b""] * 150_000)])

    (work,) = works(parse(options(assign='{"t": [0]}')))
    sizes = [one.num_rows for one in partition_reader.read(work, ("offset",), True)]

    assert sizes == [65_536, 65_536, 18_928]


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_batches_are_read(log, rows, compression):
    """Each is decompressed by itself."""
    for first in range(3):
        some = [b"%d" % (first * 100 + row) for row in range(100)]
        log.partition("t", 0).append([encoded(*some, compression=compression)])

    assert values_of(rows()) == list(range(300))


def test_rows_come_from_all_segments(log, rows):
    """Sealed ones are mapped, the active one is read."""
    log.alter_topic("t", {"segment.bytes": 2000})
    for number in range(60):
        log.partition("t", 0).append([encoded(b"%d" % number)])
    assert len(log.partition("t", 0).segments) > 5

    assert values_of(rows()) == list(range(60))
    assert values_of(rows(minPartitions=7)) == list(range(60))


def test_a_range_may_begin_and_end_within_batches(rows, send):
    """Rows, not batches."""
    send("t", {0: list(range(100)), 1: list(range(1000, 1010))})

    found = rows(
        startingOffsets='{"t": {"0": 37, "1": -2}}', endingOffsets='{"t": {"0": 61, "1": 3}}'
    )

    assert values_of(found) == [*range(37, 61), 1000, 1001, 1002]


def test_gaps_are_not_losses(log, rows):
    """Compaction and mirrors leave some; what is there is read, with its offsets."""
    part = log.partition("t", 0)
    part.append_at([(5, encoded(b"5", b"6")), (20, encoded(b"20")), (21, encoded(b"21"))])

    assert [(row["offset"], row["value"]) for row in rows()] == [
        (offset, b"%d" % offset) for offset in (5, 6, 20, 21)
    ]
    assert values_of(rows(startingOffsets='{"t": {"0": 8, "1": 0}}')) == [20, 21]


def test_batches_with_offsets_of_their_own_are_read(log):
    """Compaction writes those: the rows of a range are found by offset, not by place."""
    schema = batch.schema(offsets=True)
    kept = [3, 10, 11, 40]
    table = pa.RecordBatch.from_pylist(
        [{"timestamp": START, "key": b"k", "value": b"%d" % n, "offset": n} for n in kept], schema
    )
    one = batch.encode(table, offsets=True)
    files = log.root.context.files
    file = create(files, "compacted.arrows", schema)
    size = file.write(one.stamp(0, 0, next_offset=50), file.start)
    chunk = FileChunk("compacted.arrows", True, False, 0, file.start + size)

    def read(first, stop):
        work = LogInputPartition(log.path, (PartitionSlice("t", 0, first, stop, 0, (chunk,)),))
        return [
            one["offset"]
            for some in partition_reader.read(work, columns_without, True)
            for one in some.to_pylist()
        ]

    columns_without = ("offset", "value", "timestampType")
    assert read(0, 50) == kept
    assert read(10, 40) == [10, 11]
    assert read(12, 40) == []
    os.unlink(os.path.join(log.path, "compacted.arrows"))


def test_an_empty_topic_has_no_tasks(log, options):
    """Spark makes one of None, which reads nothing."""
    assert works(parse(options())) == []
    log.create_topic("empty")
    assert works(parse(options(subscribe="t,empty"))) == []


# What to read


def test_topics_are_chosen_by_name_pattern_or_assignment(log, rows, send):
    """A pattern is of the whole name."""
    for name in ("flights", "flights-2", "weather"):
        log.create_topic(name, 2)
        send(name, {0: [1], 1: [2]})

    def topics(**given):
        return sorted({(row["topic"], row["partition"]) for row in rows(**given)})

    assert {topic for topic, _ in topics(subscribe="flights,weather")} == {"flights", "weather"}
    assert {topic for topic, _ in topics(subscribePattern="flights.*")} == {"flights", "flights-2"}
    assert {topic for topic, _ in topics(subscribePattern="flights")} == {"flights"}
    assert topics(subscribePattern="nothing") == []
    assert {topic for topic, _ in topics(subscribePattern=".*")} <= {*log.topics()}
    assert topics(assign='{"weather": [1], "flights": [0]}') == [("flights", 0), ("weather", 1)]


def test_what_is_named_and_not_there_is_an_error(log, rows):
    """With the nearest name; unless losses are not to fail."""
    log.create_topic("flights")

    with pytest.raises(UnknownTopicOrPartitionError, match="Did you mean 'flights'"):
        rows(subscribe="fligths")
    with pytest.raises(UnknownTopicOrPartitionError, match="no such partition"):
        rows(assign='{"flights": [0, 1]}')
    assert rows(subscribe="fligths", failOnDataLoss="false") == []


def test_a_path_without_a_log_is_told_and_not_made(tmp_path, options):
    """A typing error in a path would be an empty query."""
    with pytest.raises(NotALogError, match="there is no log here"):
        works(parse({"path": str(tmp_path / "nolog"), "subscribe": "t"}))
    assert not (tmp_path / "nolog").exists()


@pytest.mark.parametrize(
    "given",
    [
        {"startingOffsets": '{"t": {"0": 1}}'},
        {"startingOffsets": '{"t": {"0": 1, "1": 1, "2": 1}}'},
        {"startingOffsets": '{"u": "earliest", "t": "earliest"}'},
        {"endingOffsets": '{"u": {"0": 1}}'},
        {"startingOffsetsByTimestamp": '{"t": {"0": 1}}'},
    ],
    ids=str,
)
def test_offsets_name_all_partitions_and_no_others(rows, send, given):
    """Kafka's rule: what is forgotten would be read from somewhere."""
    send("t", {0: [1, 2], 1: [1, 2]})

    with pytest.raises(InvalidConfigError, match="other partitions than what is read"):
        rows(**given)


def test_times_choose_offsets(rows, send):
    """The first record at or after a time; at the end none is an end."""
    send("t", {0: range(10), 1: range(100, 110)}, at=START)

    assert values_of(rows(startingTimestamp=START + 7)) == [7, 8, 9, 107, 108, 109]
    assert values_of(rows(endingTimestamp=START + 2)) == [0, 1, 100, 101]
    assert len(rows(endingTimestamp=START + 99)) == 20
    each = {"0": START + 9, "1": START + 8}
    assert values_of(rows(startingOffsetsByTimestamp=str({"t": each}).replace("'", '"'))) == [
        9,
        108,
        109,
    ]


def test_a_time_that_no_record_has_reached_fails_or_is_the_end(rows, send):
    """startingOffsetsByTimestampStrategy."""
    send("t", {0: [1], 1: [1]})

    with pytest.raises(OffsetOutOfRangeError, match="no record is as young"):
        rows(startingTimestamp=START + 1)
    late = {"startingTimestamp": START + 1, "startingOffsetsByTimestampStrategy": "latest"}
    assert rows(**late) == []


def test_a_query_does_not_begin_behind_its_end(rows, send):
    """By offsets; by times that is merely nothing."""
    send("t", {0: range(10), 1: range(10)})
    both = '{{"t": {{"0": {}, "1": 0}}}}'

    with pytest.raises(OffsetOutOfRangeError, match="begins behind its end"):
        rows(startingOffsets=both.format(5), endingOffsets=both.format(4))
    with pytest.raises(OffsetOutOfRangeError, match="the log ends at 10"):
        rows(endingOffsets=both.format(11))
    assert rows(startingTimestamp=START + 5, endingTimestamp=START + 2) == []


def test_a_start_outside_of_the_log_is_a_loss(rows, send):
    """It fails, or is the nearest end."""
    send("t", {0: range(10), 1: []})
    late = {"startingOffsets": '{"t": {"0": 11, "1": 0}}'}

    with pytest.raises(DataLossError, match="starts at offset 11, but has offsets 0 to 10"):
        rows(**late)
    assert rows(**late, failOnDataLoss="false") == []


# Tasks


def test_tasks_pickle_to_little(log, options, send):
    """They travel with every task."""
    send("t", {0: range(100), 1: range(100)})

    tasks = works(parse(options()))

    assert len(tasks) == 2
    assert all(len(pickle.dumps(work)) < 1000 for work in tasks)


@pytest.mark.parametrize(
    ("sizes", "wanted", "parts"),
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
def test_ranges_are_cut_in_proportion(sizes, wanted, parts):
    """Large ones are split, small ones left alone."""
    assert parts_of(sizes, wanted) == parts


@pytest.mark.parametrize(
    ("sizes", "slots", "given", "tasks"),
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
def test_there_are_as_many_tasks_as_it_is_worth(sizes, slots, given, tasks):
    """A task costs tens of milliseconds; cores that idle cost as well."""
    options = parse({"path": "/p", "subscribe": "t", **{k: str(v) for k, v in given.items()}})

    assert tasks_for(sizes, slots, options) == tasks


def test_small_pieces_share_tasks_evenly():
    """The largest first, each to the task with the least."""
    pieces = [
        PartitionSlice("t", n, 0, 1, 0, (), size) for n, size in enumerate([5, 1, 1, 1, 3, 1])
    ]

    found = packed(pieces, 2)

    assert [sum(piece.size for piece in some) for some in found] == [6, 6]
    assert [[piece.partition for piece in some] for some in found] == [[0, 1], [2, 3, 4, 5]] or all(
        some == sorted(some, key=lambda piece: piece.partition) for some in found
    )


@pytest.mark.parametrize("seed", range(50))
def test_pieces_of_a_partition_are_in_the_order_of_the_tasks(seed):
    """So a copy has the order of its keys: what tasks wrote is published in theirs."""
    chance = random.Random(seed)
    parts = [(number, part) for number in range(4) for part in range(chance.randint(1, 6))]
    pieces = [
        PartitionSlice("t", *one, one[1] + 1, 0, (), chance.randint(90, 110)) for one in parts
    ]

    found = packed(pieces, chance.randint(1, 8))

    order = [(piece.partition, piece.first) for some in found for piece in some]
    assert sorted(order, key=lambda one: one[0]) == parts
    sizes = [sum(piece.size for piece in some) for some in found]
    assert max(sizes) - min(sizes) < 150


def _filled(log, segments):
    """Fill a partition with records of 1 KB, in so many segments of about 200 KB; nothing big."""
    log.create_topic("big", 1, {"segment.bytes": 200_000, "index.interval.bytes": 10_000})
    part = log.partition("big", 0)
    while len(part.segments) < segments:
        first = part.end_offset()
        part.append([encoded(*[b"%08d" % (first + row) + b"x" * 992 for row in range(5)])])
        part.refresh()
    return part


@pytest.mark.parametrize("tasks", [2, 3, 7, 20])
def test_cuts_lose_nothing_and_are_even(log, tasks):
    """Every offset in one task, and the bytes about the same."""
    part = _filled(log, 4)
    where = TopicPartition("big", 0)
    options = parse({"path": log.path, "subscribe": "big", "minPartitions": str(tasks)})

    made = plan(
        log.path,
        [PartitionOffsets(where, 3, part.end_offset())],
        lambda one: part,
        options,
        slots=2,
    )

    pieces = sorted((piece for work in made for piece in work.pieces), key=lambda one: one.first)
    assert len(made) == tasks
    assert pieces[0].first == 3
    assert pieces[-1].stop == part.end_offset()
    assert all(one.stop == two.first for one, two in pairwise(pieces))
    sizes = [piece.stop - piece.first for piece in pieces]
    assert max(sizes) < 2 * min(sizes) + 10
    offsets = [
        row
        for work in made
        for some in partition_reader.read(work, ("offset",), True)
        for row in some.column(0).to_pylist()
    ]
    assert sorted(offsets) == list(range(3, part.end_offset()))


def test_few_rows_in_one_batch_can_be_cut_as_well(rows, options, send):
    """By interpolation: the tasks read the same batch, and other rows of it."""
    send("t", {0: range(12)})

    tasks = works(parse(options(minPartitions=4)))

    assert len(tasks) == 4
    assert values_of(rows(minPartitions=4)) == list(range(12))
    assert len(works(parse(options(minPartitions=100)))) <= 12


def test_no_task_has_more_records_than_allowed(options, rows, send):
    """maxRecordsPerPartition."""
    send("t", {0: range(25), 1: range(100, 103)})

    tasks = works(parse(options(maxRecordsPerPartition=10)))

    sizes = [piece.stop - piece.first for work in tasks for piece in work.pieces]
    assert sorted(sizes) == [3, 8, 8, 9]
    assert len(rows(maxRecordsPerPartition=10)) == 28


def test_tasks_are_no_larger_than_allowed(log):
    """maxBytesPerPartition, about."""
    part = _filled(log, 4)
    options = parse({"path": log.path, "subscribe": "big", "maxBytesPerPartition": "100000"})

    tasks = works(options)

    assert len(tasks) >= part.size_bytes() // 100_000
    assert max(piece.size for work in tasks for piece in work.pieces) < 130_000


def test_planning_reads_no_data(log, options, send, monkeypatch):
    """Manifest and index only."""
    send("t", {0: range(100), 1: range(100)})
    files = type(log.root.context.files)
    opened = []
    really = files.open
    monkeypatch.setattr(
        files, "open", lambda self, path, **how: opened.append(path) or really(self, path, **how)
    )

    assert works(parse(options(minPartitions=5)))

    assert [path for path in opened if path.endswith(".arrows")] == []


# What went wrong meanwhile


def test_a_file_that_is_gone_is_a_loss(log, options, send):
    """It fails, or the rest is read."""
    send("t", {0: range(10), 1: range(100, 110)})
    tasks = works(parse(options()))
    log.delete_topic("t")

    with pytest.raises(DataLossError, match="was deleted after the query was planned"):
        values_of(
            row
            for work in tasks
            for some in partition_reader.read(work, ("value",), True)
            for row in some.to_pylist()
        )
    assert [some for work in tasks for some in partition_reader.read(work, ("value",), False)] == []


def test_a_log_that_was_cut_and_written_anew_is_a_loss(log, options, send):
    """Other records have these offsets now: their batches are of a later epoch."""
    send("t", {0: range(10)})
    (work,) = works(parse(options()))
    (piece,) = work.pieces
    (chunk,) = piece.chunks

    def read(piece):
        return list(partition_reader.read(replace(work, pieces=(piece,)), ("value",), True))

    shorter = replace(chunk, end_position=chunk.end_position + 800)
    with pytest.raises(DataLossError, match="was cut"):
        read(replace(piece, stop=20, chunks=(shorter,)))
    with pytest.raises(DataLossError, match="written anew"):
        read(replace(piece, leader_epoch=-1))
    log.partition("t", 0).truncate_to(5)
    with pytest.raises(DataLossError, match="was deleted"):
        read(piece)


def test_damage_is_an_error_whatever_losses_are(log, options, send):
    """failOnDataLoss is about what was deleted."""
    send("t", {0: [b"abcdefgh" * 50]})
    tasks = works(parse(options()))
    path = os.path.join(log.path, tasks[0].pieces[0].chunks[0].path)
    with open(path, "r+b") as file:
        data = file.read()
        file.seek(data.index(b"abcdefgh"))
        file.write(b"z")

    with pytest.raises(CorruptBatchError, match="CRC of column value"):
        list(partition_reader.read(tasks[0], ("value",), False))
    with open(path, "r+b") as file:
        file.write(data)


def test_a_roll_between_plan_and_read_changes_nothing(log, options, send):
    """The same bytes, sealed by now."""
    send("t", {0: range(10)})
    (work,) = works(parse(options()))
    log.partition("t", 0).roll()
    send("t", {0: range(10, 20)})

    assert (
        len(
            [
                row
                for some in partition_reader.read(work, ("value",), True)
                for row in some.to_pylist()
            ]
        )
        == 10
    )


def test_an_executor_on_another_host_is_told_what_it_lacks(tmp_path):
    """The path has to lead to the log everywhere."""
    work = LogInputPartition(str(tmp_path / "elsewhere"), ())

    with pytest.raises(NotALogError, match="the log is not on this host"):
        list(partition_reader.read(work, ("value",), True))


def test_an_executor_opens_no_database_and_takes_no_lock(log, options, send, monkeypatch):
    """It may be killed at any time, and read from another host."""
    import fcntl

    import lmdb

    send("t", {0: range(10)})
    (work,) = works(parse(options()))

    def never(*_, **__):
        raise AssertionError("an executor has no business here")

    monkeypatch.setattr(lmdb, "open", never)
    monkeypatch.setattr(lmdb, "Environment", never)
    monkeypatch.setattr(fcntl, "flock", never)

    assert sum(some.num_rows for some in partition_reader.read(work, ("value",), True)) == 10


def test_a_log_that_may_only_be_read_is_read(log, send, options, monkeypatch):
    """By another user, say."""
    send("t", {0: range(10)})
    monkeypatch.setattr("embedlog.spark.source.os.access", lambda path, how: False)

    assert len(works(parse(options()))) == 1


def test_slots_are_the_cores(log, send, options, monkeypatch):
    """A batch of many small partitions is read by as many tasks."""
    log.create_topic("many", 9)
    send("many", {number: [1] for number in range(9)})
    monkeypatch.setattr(input_partitions.os, "sched_getaffinity", lambda pid: {0, 1, 2})

    tasks = works(parse(options(subscribe="many")))

    assert sorted(len(work.pieces) for work in tasks) == [3, 3, 3]
    assert embedlog.__version__
