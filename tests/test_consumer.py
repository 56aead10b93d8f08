"""Reading: positions, polling, iteration, waiting; as records and as columns."""

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest
from support.children import in_child
from support.clock import START
from support.group_consumers import drained
from support.patience import patient
from support.roots import abandon, encoded, fill, healthy, make_log, open_root, segment_files
from support.tiers import sample

from embedlog.config import TopicConfig
from embedlog.consumer.consumer import Consumer
from embedlog.consumer.deserialize import COLUMNS
from embedlog.errors import (
    ClosedError,
    CorruptBatchError,
    IllegalStateError,
    InvalidPartitionError,
    InvalidTopicError,
    LogTruncatedError,
    NoOffsetForPartitionError,
    OffsetOutOfRangeError,
    RecordDeserializationError,
    UnknownTopicOrPartitionError,
    WakeupError,
)
from embedlog.record import OffsetAndTimestamp, Record, TopicPartition

T0, T1, T2 = (TopicPartition("t", number) for number in range(3))


@pytest.fixture
def root(tmp_path):
    """A root that is healthy at the end."""
    root = open_root(tmp_path / "root")
    yield root
    assert healthy(root)
    # A flush is not tested here, and would take most of the time.
    abandon(root)


@pytest.fixture
def log(root):
    """A topic ``t`` of one partition: 4 batches of 3 records, v0 to v11."""
    log = make_log(root)
    fill(log, 4, size=3)
    return log


def earliest_consumer(root, *topics, **config):
    """Return a consumer that starts at the earliest offset."""
    return Consumer(root, *(topics or ("t",)), auto_offset_reset="earliest", **config)


def offsets(records):
    return [record.offset for record in records]


def make_partitions(root, partitions=3, batches=2, size=2):
    """Create a topic ``t`` of several partitions with the same records in each."""
    root.create_topic("t", partitions, TopicConfig())
    for number in range(partitions):
        fill(root.partition("t", number), batches, size=size)


# Records


def test_poll_returns_whole_records_in_offset_order(root):
    """E9; the fields are kafka-python's, null and empty differ (A3)."""
    log = make_log(root)
    log.append(
        [
            encoded(
                *(b"value", None, b""),
                keys=[b"key", b"", None],
                at=[START, START + 1, START + 2],
                headers=[[("h", b"1"), ("h", None)], [], [("x", b"")]],
            )
        ]
    )

    records = earliest_consumer(root).poll()[T0]

    assert records == [
        ("t", 0, 0, START, 0, b"key", b"value", [("h", b"1"), ("h", None)], 0),
        ("t", 0, 1, START + 1, 0, b"", None, [], 0),
        ("t", 0, 2, START + 2, 0, None, b"", [("x", b"")], 0),
    ]
    assert all(isinstance(record, Record) for record in records)
    assert records[0].topic_partition == T0


def test_a_record_survives_pickling_and_copying(root, log):
    """A record from a Spark worker is an ordinary `Record`."""
    record = earliest_consumer(root).poll()[T0][0]

    unpickled = pickle.loads(pickle.dumps(record))

    assert unpickled == record
    assert type(unpickled) is Record
    assert repr(unpickled) == repr(record)
    assert record._replace(value=b"x").value == b"x"


def test_the_headers_of_records_without_headers_cannot_be_changed(root, log):
    """All such records share one list."""
    first, second = earliest_consumer(root).poll(max_records=2)[T0]

    with pytest.raises(TypeError, match="share this list"):
        first.headers.append(("x", b""))
    with pytest.raises(TypeError, match="share this list"):
        first.headers += [("x", b"")]
    assert second.headers == []
    assert json.dumps(second.headers) == "[]"
    assert type(pickle.loads(pickle.dumps(second.headers))) is list


def test_log_append_time_is_marked_as_such(root):
    """A7: timestamp_type is 1 if the topic sets the timestamps."""
    log = make_log(root, {"message.timestamp.type": "LogAppendTime"})
    log.append([encoded(b"v", at=5)])

    record = earliest_consumer(root).poll()[T0][0]

    assert (record.timestamp_type, record.timestamp) == (1, START)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_batches_read_the_same(root, compression):
    """Compression is invisible to the reader."""
    log = make_log(root)
    log.append([encoded(*[b"x" * 100] * 50, compression=compression)])

    assert [record.value for record in drained(earliest_consumer(root))] == [b"x" * 100] * 50
    assert (
        next(earliest_consumer(root).iter_batches()).column("value").to_pylist()
        == [b"x" * 100] * 50
    )


# Poll


def test_poll_without_an_assignment_is_an_error(root):
    """E8."""
    consumer = Consumer(root)

    with pytest.raises(IllegalStateError, match="nothing to read"):
        consumer.poll()
    with pytest.raises(IllegalStateError):
        next(consumer)
    with pytest.raises(IllegalStateError):
        consumer.poll_batches()


def test_poll_without_a_timeout_does_not_wait(root, log):
    """E8: poll(0) returns the available records."""
    consumer = earliest_consumer(root)
    drained(consumer)

    start = time.monotonic()

    assert consumer.poll(0) == {}
    assert time.monotonic() - start < patient(0.05)


def test_poll_with_a_timeout_ends_after_it(root, log):
    """E8: without new records the result is empty."""
    consumer = earliest_consumer(root)
    drained(consumer)

    start = time.monotonic()

    assert consumer.poll(60) == {}
    assert 0.055 < time.monotonic() - start < patient(0.5)


def test_poll_returns_no_more_than_max_poll_records(root, log):
    """E9: the next poll returns the rest, without reading it again."""
    consumer = earliest_consumer(root, max_poll_records=5)

    first, second, third = (consumer.poll()[T0] for _ in range(3))

    assert [offsets(records) for records in (first, second, third)] == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
        [10, 11],
    ]
    assert consumer.poll() == {}


def test_one_poll_may_have_its_own_limit(root, log):
    """E9; a limit below 1 is an error."""
    consumer = earliest_consumer(root)

    assert offsets(consumer.poll(max_records=2)[T0]) == [0, 1]
    with pytest.raises(ValueError, match="max_records must be at least 1, got 0"):
        consumer.poll(max_records=0)


def test_partitions_take_turns(root):
    """E9: the partition that waited longest comes first, so none starves."""
    make_partitions(root)
    consumer = earliest_consumer(root, max_poll_records=3)

    polls = [
        [(record.partition, record.offset) for records in polled.values() for record in records]
        for polled in (consumer.poll() for _ in range(4))
    ]

    assert polls == [
        [(0, 0), (0, 1), (0, 2)],
        [(1, 0), (1, 1), (1, 2)],
        [(2, 0), (2, 1), (2, 2)],
        [(0, 3), (1, 3), (2, 3)],
    ]


def test_poll_reads_no_more_than_one_fetch_of_a_partition(root):
    """max_partition_fetch_bytes and fetch_max_bytes limit the memory; one batch is always read."""
    root.create_topic("t", 2, TopicConfig())
    for number in range(2):
        for _ in range(8):
            root.partition("t", number).append([encoded(b"x" * 100_000)])

    per_partition = earliest_consumer(root, max_partition_fetch_bytes=1).poll()
    per_fetch = earliest_consumer(root, fetch_max_bytes=1).poll()

    assert 1 <= len(per_partition[T0]) < 8 and 1 <= len(per_partition[T1]) < 8
    assert 1 <= len(per_fetch[T0]) < 8 and T1 not in per_fetch


def test_poll_waits_for_fetch_min_bytes_or_fetch_max_wait_ms(root):
    """A few records wait for that long."""
    log = make_log(root)
    consumer = earliest_consumer(root, fetch_min_bytes=3000, fetch_max_wait_ms=200)
    assert consumer.poll(210) == {}
    log.append([encoded(b"small")])

    start = time.monotonic()
    polled = consumer.poll(int(patient(5000)))

    assert len(polled[T0]) == 1
    assert 0.1 < time.monotonic() - start < patient(1)

    log.append([encoded(b"x" * 5000)])
    assert len(consumer.poll(0)[T0]) == 1


# Positions


def test_latest_is_the_default_and_the_end_at_the_time_of_assignment(root, log):
    """E1: records between the assignment and the first poll are returned."""
    consumer = Consumer(root, "t")
    fill(log, 1, first=100)

    assert [record.value for record in consumer.poll()[T0]] == [b"v100"]


def test_without_a_reset_rule_a_missing_position_is_an_error(root, log):
    """E1: NoOffsetForPartition, until the program calls seek."""
    consumer = Consumer(root, "t", auto_offset_reset="none")

    with pytest.raises(NoOffsetForPartitionError):
        consumer.poll()
    with pytest.raises(NoOffsetForPartitionError):
        consumer.position(T0)
    assert consumer.current_lag(T0) is None
    consumer.seek(T0, 10)
    assert offsets(consumer.poll()[T0]) == [10, 11]


@pytest.mark.parametrize(("reset", "position"), [("earliest", 0), ("latest", 12)])
def test_an_offset_out_of_range_is_reset(root, log, reset, position, caplog):
    """E1, E5: a seek past the end is allowed, and handled by the next poll."""
    consumer = Consumer(root, "t", auto_offset_reset=reset)
    consumer.seek(T0, 1000)
    assert consumer.position(T0) == 1000

    assert offsets(drained(consumer)) == list(range(position, 12))
    assert consumer.position(T0) == 12
    assert "offset 1000 is out of range" in caplog.text


def test_an_offset_out_of_range_without_a_reset_rule_raises_and_stays(root, log):
    """E1."""
    consumer = Consumer(root, "t", auto_offset_reset="none")
    consumer.seek(T0, 1000)

    for _ in range(2):
        with pytest.raises(OffsetOutOfRangeError):
            consumer.poll()
    assert consumer.position(T0) == 1000


@pytest.mark.parametrize("reset", ["earliest", "latest"])
@pytest.mark.parametrize("appended", [0, 2, 20])
def test_a_consumer_returns_to_the_point_of_a_truncation(root, log, reset, appended):
    """A36, KIP-320: no record is returned twice, and no new record is skipped."""
    consumer = Consumer(root, "t", auto_offset_reset=reset)
    consumer.seek(T0, 0)
    end = len(drained(consumer))
    log.truncate_to(6)
    assert end > 6
    fill(log, appended, first=100)

    assert offsets(drained(consumer)) == list(range(6, 6 + appended))
    assert consumer.position(T0) == 6 + appended


def test_without_a_reset_rule_a_truncation_raises_until_a_seek(root, log):
    """A36: auto_offset_reset is "none"; the error says where to continue."""
    consumer = Consumer(root, "t", auto_offset_reset="none")
    consumer.seek(T0, 0)
    end = len(drained(consumer))
    log.truncate_to(6)
    fill(log, 20, first=100)

    for _ in range(2):
        with pytest.raises(LogTruncatedError) as caught:
            consumer.poll()
        assert (caught.value.offset, caught.value.next_offset) == (end, 6)
        assert consumer.position(T0) == end
    consumer.seek(T0, caught.value.next_offset)
    assert offsets(drained(consumer)) == list(range(6, 26))


def test_records_fetched_ahead_and_then_truncated_are_not_returned(root, log):
    """A36: no returned record was truncated, so no error is raised, whatever the rule."""
    ahead = {"fetch_min_bytes": 1 << 20, "fetch_max_wait_ms": 0}
    consumer = Consumer(root, "t", auto_offset_reset="none", **ahead)
    consumer.seek(T0, 0)
    consumer.poll(max_records=2)
    log.truncate_to(6)
    fill(log, 3, first=100)

    records = drained(consumer)
    assert offsets(records) == list(range(2, 9))
    assert [record.value for record in records[-3:]] == [b"v100", b"v101", b"v102"]


@pytest.mark.parametrize(("offset", "error"), [(-1, ValueError), ("1", TypeError)])
def test_seek_takes_only_offsets(root, log, offset, error):
    """E5."""
    with pytest.raises(error):
        earliest_consumer(root).seek(T0, offset)


@pytest.mark.parametrize(
    "call",
    [
        lambda consumer: consumer.seek(T1, 0),
        lambda consumer: consumer.pause(T1),
        lambda consumer: consumer.position(T1),
    ],
)
def test_a_position_needs_an_assigned_partition(root, log, call):
    """E5, E11."""
    with pytest.raises(IllegalStateError, match="not assigned"):
        call(earliest_consumer(root))


def test_lag_is_the_distance_to_the_end(root, log):
    """E25: end 12, position 5: 7."""
    consumer = earliest_consumer(root)
    assert consumer.current_lag(T0) is None
    consumer.seek(T0, 5)
    assert consumer.current_lag(T0) == 7
    consumer.seek(T0, 1000)
    assert consumer.current_lag(T0) == 0


# Topics and offsets of the log


def test_beginning_and_end_offsets_need_no_assignment(root):
    """E7."""
    make_partitions(root)
    consumer = Consumer(root)

    assert consumer.beginning_offsets([T0, T2]) == {T0: 0, T2: 0}
    assert consumer.end_offsets([T0, ("t", 2)]) == {T0: 4, T2: 4}
    with pytest.raises(UnknownTopicOrPartitionError):
        consumer.end_offsets([TopicPartition("t", 3)])


def test_offsets_for_times_are_the_first_at_or_after(root, log):
    """E7, B10, B13: None without such a record; the batches are a millisecond apart."""
    consumer = Consumer(root)

    assert consumer.offsets_for_times({T0: START + 2}) == {T0: OffsetAndTimestamp(6, START + 2, 0)}
    assert consumer.offsets_for_times({T0: START + 4}) == {T0: None}
    with pytest.raises(ValueError, match="negative"):
        consumer.offsets_for_times({T0: -1})


def test_topics_and_partitions_can_be_listed(root):
    """partitions_for_topic returns None for an unknown topic, as in kafka-python."""
    make_partitions(root)
    consumer = Consumer(root)

    assert consumer.topics() == {"t"}
    assert consumer.partitions_for_topic("t") == {0, 1, 2}
    assert consumer.partitions_for_topic("nope") is None


# Assignment


def test_assign_reads_only_these_partitions(root):
    """A second assign keeps the positions of partitions that are in both."""
    make_partitions(root)
    consumer = Consumer(root, auto_offset_reset="earliest")
    consumer.assign([T0, T1])
    assert set(consumer.poll(max_records=100)) == {T0, T1}

    consumer.assign([T1, T2])

    assert consumer.assignment() == {T1, T2}
    assert consumer.position(T1) == 4
    assert set(consumer.poll()) == {T2}
    consumer.assign([])
    with pytest.raises(IllegalStateError):
        consumer.poll()


def test_assigning_an_unknown_partition_is_an_error(root, log):
    """The assignment does not change."""
    consumer = Consumer(root)
    consumer.assign([T0])

    with pytest.raises(UnknownTopicOrPartitionError):
        consumer.assign([T0, T1])
    with pytest.raises(TypeError):
        consumer.assign(["t"])
    assert consumer.assignment() == {T0}


def test_a_missing_topic_is_waited_for(root):
    """E19: polls return nothing until it is created; then it is read from its beginning."""
    consumer = Consumer(root, "t")
    assert consumer.poll() == {}
    assert consumer.assignment() == set()
    fill(make_log(root), 1)

    assert [record.value for record in consumer.poll()[T0]] == [b"v0"]


def test_a_missing_topic_is_created_if_the_setting_says_so(root):
    """E19: allow_auto_create_topics must be set; otherwise a misspelt name would create a topic."""
    Consumer(root, "t", allow_auto_create_topics=True)
    Consumer(root, "u")

    assert set(root.topics()) == {"t"}


def test_new_partitions_are_picked_up(root, log):
    """From their beginning, whatever auto_offset_reset is: they have no older records."""
    consumer = Consumer(root, "t")
    root.grow_topic("t", 2)
    fill(root.partition("t", 1), 1)

    assert offsets(consumer.poll()[T1]) == [0]
    assert consumer.assignment() == {T0, T1}


def test_a_topic_created_again_is_read_from_its_beginning(root, log):
    """A38: the new topic of that name is another topic."""
    consumer = earliest_consumer(root)
    consumer.poll(max_records=2)
    root.delete_topic("t")
    assert consumer.poll() == {}
    fill(make_log(root), 2)

    assert [record.value for record in drained(consumer)] == [b"v0", b"v1"]


def test_an_assigned_partition_that_was_deleted_is_an_error(root, log):
    """Every poll raises, until the partition is assigned again."""
    consumer = Consumer(root, auto_offset_reset="earliest")
    consumer.assign([T0])
    drained(consumer)
    root.delete_topic("t")

    for _ in range(2):
        with pytest.raises(UnknownTopicOrPartitionError):
            consumer.poll()
    fill(make_log(root), 1)
    with pytest.raises(UnknownTopicOrPartitionError, match="created again"):
        consumer.poll()
    consumer.assign([T0])
    assert offsets(consumer.poll()[T0]) == [0]


# Pause


def test_pause_takes_effect_within_an_iteration(root):
    """E11: the rest of the batch is returned after resume, and not before."""
    make_partitions(root, partitions=2)
    consumer = earliest_consumer(root)
    returned = []
    for record in consumer.iter_records(until="end"):
        returned.append((record.partition, record.offset))
        if record.partition == 0:
            consumer.pause(T0)
    consumer.resume(T0)
    rest = [(record.partition, record.offset) for record in consumer.iter_records(until="end")]

    assert returned == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert rest == [(0, 1), (0, 2), (0, 3)]


# Iteration


def test_iteration_continues_where_the_last_one_ended(root, log):
    """Loops, poll and next() share one position."""
    consumer = earliest_consumer(root)
    returned = []
    for record in consumer:
        returned.append(record.offset)
        if record.offset == 4:
            break
    returned.append(next(consumer).offset)
    returned += offsets(consumer.poll(max_records=2)[T0])
    returned += offsets(consumer.iter_records(until="end"))

    assert returned == list(range(12))


def test_two_iterations_at_once_share_the_records(root, log):
    """Each of them returns other records."""
    consumer = earliest_consumer(root)
    first, second = iter(consumer), iter(consumer)

    assert [next(iterator).offset for iterator in (first, second) * 4] == list(range(8))


def test_a_seek_within_the_loop_takes_effect_at_once(root, log):
    """The next record is at the new position."""
    consumer = earliest_consumer(root)
    returned = []
    for record in consumer.iter_records(until="end"):
        returned.append(record.offset)
        if record.offset == 1 and len(returned) == 2:
            consumer.seek(T0, 8)

    assert returned == [0, 1, 8, 9, 10, 11]


def test_iteration_ends_after_consumer_timeout_ms(root, log):
    """E26: the iteration can be resumed."""
    consumer = earliest_consumer(root, consumer_timeout_ms=30)

    assert offsets(consumer) == list(range(12))
    with pytest.raises(StopIteration):
        next(consumer)
    fill(log, 1)
    assert offsets(consumer) == [12]


def test_until_the_end_means_the_end_as_of_the_call(root, log):
    """Later records are left for another iteration, and the loop never waits."""
    consumer = earliest_consumer(root)
    returned = []
    for record in consumer.iter_records(until="end"):
        returned.append(record.offset)
        if record.offset < 3:
            fill(log, 1)

    assert returned == list(range(12))
    assert len(drained(consumer)) == 3
    assert list(consumer.iter_records(until="end")) == []


def test_until_may_be_offsets(root):
    """Also within a batch; partitions without an offset return nothing."""
    make_partitions(root)
    consumer = earliest_consumer(root)

    records = list(consumer.iter_records(until={T0: 3, T1: 0}))
    columns = list(consumer.iter_batches(until={T1: 3}))

    assert [(record.partition, record.offset) for record in records] == [(0, 0), (0, 1), (0, 2)]
    assert [batch.column("offset").to_pylist() for batch in columns] == [[0, 1], [2]]
    assert (consumer.position(T0), consumer.position(T1)) == (3, 3)
    with pytest.raises(ValueError, match="until"):
        consumer.iter_records(until="now")


def test_iterations_over_partitions_alternate_by_batch(root):
    """E9: one batch of each partition in turn."""
    make_partitions(root, partitions=2)

    records = earliest_consumer(root).iter_records(until="end")

    assert [(record.partition, record.offset) for record in records] == [
        *((0, 0), (0, 1), (1, 0), (1, 1)),
        *((0, 2), (0, 3), (1, 2), (1, 3)),
    ]


# Columns


def test_batches_are_arrow_columns(root, log):
    """Offset, partition, timestamp, key and value; the topic is in the schema's metadata."""
    (first, *_) = batches = earliest_consumer(root).poll_batches()[T0]

    assert [batch.num_rows for batch in batches] == [3, 3, 3, 3]
    assert first.schema.names == list(COLUMNS)
    assert first.schema.metadata == {b"embedlog.topic": b"t"}
    assert pa.Table.from_batches(batches).column("offset").to_pylist() == list(range(12))
    assert first.to_pylist()[1] == {
        "offset": 1,
        "partition": 0,
        "timestamp": first.column("timestamp")[1].as_py(),
        "key": None,
        "value": b"v1",
    }
    first.validate(full=True)


def test_batches_begin_and_end_where_asked(root, log):
    """A position or a limit within a batch cuts it."""
    consumer = earliest_consumer(root)
    consumer.seek(T0, 1)

    polled = [
        [batch.column("offset").to_pylist() for batch in consumer.poll_batches(max_records=4)[T0]]
        for _ in range(2)
    ]

    assert polled == [[[1, 2], [3, 4]], [[5], [6, 7, 8]]]
    assert consumer.position(T0) == 9
    assert offsets(drained(consumer)) == [9, 10, 11]


def test_records_and_batches_share_one_position(root, log):
    """Half of a batch as records, the other half as columns."""
    consumer = earliest_consumer(root)
    assert offsets(consumer.poll(max_records=1)[T0]) == [0]
    first = next(consumer.iter_batches())

    assert first.column("offset").to_pylist() == [1, 2]
    assert next(consumer).offset == 3


def test_only_the_requested_columns_are_returned(root):
    """In the requested order; headers only on request, null for records without headers."""
    log = make_log(root)
    log.append([encoded(b"a", keys=[b"k"])])
    log.append([encoded(b"b", headers=[[("h", b"1")]])])

    batches = list(
        earliest_consumer(root).iter_batches(columns=["value", "headers", "offset"], until="end")
    )

    table = pa.Table.from_batches(batches)
    assert table.schema.names == ["value", "headers", "offset"]
    assert table.column("headers").to_pylist() == [None, [{"key": "h", "value": b"1"}]]
    assert pa.Table.from_batches(earliest_consumer(root).iter_batches(until="end")).num_rows == 2
    offset = next(earliest_consumer(root).iter_batches(columns=["offset"]))
    assert offset.to_pylist() == [{"offset": 0}]
    with pytest.raises(ValueError, match="no column 'x'"):
        earliest_consumer(root).iter_batches(columns=["x"])
    with pytest.raises(ValueError, match="A column is named twice: key, key"):
        earliest_consumer(root).iter_batches(columns=["key", "key"])


def test_many_batches_give_every_offset_once(root):
    """Over many segments, and columns that are split: no gap and no repetition (A19)."""
    log = make_log(root, {"segment.bytes": 100_000})
    for number in range(25):
        log.append([encoded(*[b"v%d" % number] * 1000, at=START + number)])

    batches = list(earliest_consumer(root).iter_batches(until="end"))
    records = list(earliest_consumer(root, max_poll_records=333).iter_records(until="end"))

    assert len(log.segments) > 3
    assert pa.Table.from_batches(batches).column("offset").to_pylist() == list(range(25_000))
    assert offsets(records) == list(range(25_000))
    assert {record.value for record in records} == {b"v%d" % number for number in range(25)}


# Deserializers


class Upper:
    """A deserializer object, as in kafka-python."""

    def deserialize(self, topic, data):
        return f"{topic}:{data.decode().upper()}"


def test_deserializers_are_functions_or_objects(root):
    """None stays None, as in Kafka: tombstones are not deserialized."""
    log = make_log(root)
    log.append([encoded(b"1", None, b"[2]", keys=[b"a", b"b", None])])
    consumer = earliest_consumer(root, key_deserializer=Upper(), value_deserializer=json.loads)

    records = consumer.poll()[T0]

    assert [(record.key, record.value) for record in records] == [
        ("t:A", 1),
        ("t:B", None),
        (None, [2]),
    ]


def test_records_before_one_that_cannot_be_deserialized_come_first(root):
    """E10: then every poll raises the error, until the program seeks past the record."""
    log = make_log(root)
    log.append([encoded(b"1", b"2", b"oops", b"4", keys=[b"a", b"b", b"c", b"d"])])
    consumer = earliest_consumer(root, value_deserializer=json.loads)

    assert [record.value for record in consumer.poll()[T0]] == [1, 2]
    for _ in range(2):
        with pytest.raises(RecordDeserializationError) as caught:
            consumer.poll()
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.topic, error.partition, error.offset) == ("t", 0, 2)
    assert (error.key_bytes, error.value_bytes) == (b"c", b"oops")
    assert isinstance(caught.value.__cause__, ValueError)
    assert consumer.position(T0) == 2
    consumer.seek(T0, 3)
    assert [record.value for record in consumer.poll()[T0]] == [4]


def test_a_bad_key_is_an_error_like_a_bad_value(root):
    """E10: an iteration raises at that record."""
    log = make_log(root)
    log.append([encoded(b"x", b"y", keys=[b"1", b"bad"])])
    consumer = earliest_consumer(root, key_deserializer=int)
    keys = []

    with pytest.raises(RecordDeserializationError) as caught:
        for record in consumer:
            keys.append(record.key)

    assert keys == [1]
    assert caught.value.key_bytes == b"bad"


def test_the_other_partitions_are_read_beside_a_bad_record(root):
    """E10: after the error, the next poll returns records of other partitions."""
    root.create_topic("t", 2, TopicConfig())
    root.partition("t", 0).append([encoded(b"bad")])
    root.partition("t", 1).append([encoded(b"1", b"2")])
    consumer = earliest_consumer(root, value_deserializer=int)

    with pytest.raises(RecordDeserializationError):
        consumer.poll()
    assert [record.value for record in consumer.poll()[T1]] == [1, 2]
    with pytest.raises(RecordDeserializationError):
        consumer.poll()


# Damage


def change_byte_of(root, text):
    """Change the first byte of a text in the segments."""
    for path in segment_files(root.path):
        data = path.read_bytes()
        position = data.find(text)
        if position >= 0:
            with path.open("r+b") as file:
                file.seek(position)
                file.write(b"#")
            return
    raise AssertionError(f"{text!r} is in no segment")


@pytest.fixture
def damaged(tmp_path):
    """Three batches of two records; a value of the second one is damaged on the disk."""
    root = open_root(tmp_path / "damaged")
    log = make_log(root)
    log.append([encoded(*[b"batch%d" % number] * 2) for number in range(3)])
    change_byte_of(root, b"batch1")
    yield root
    abandon(root)


def test_good_records_come_before_a_corrupt_batch(damaged):
    """E10, E14, A32: the error has the position, the consumer stays there, seek skips the batch."""
    consumer = earliest_consumer(damaged)

    assert offsets(consumer.poll()[T0]) == [0, 1]
    for _ in range(2):
        with pytest.raises(CorruptBatchError) as caught:
            consumer.poll()
    error = caught.value
    assert (error.topic, error.partition, error.offset) == ("t", 0, 2)
    assert error.path and error.position and error.next_offset == 4
    assert consumer.position(T0) == 2
    consumer.seek(T0, error.next_offset)
    assert offsets(consumer.poll()[T0]) == [4, 5]


def test_a_corrupt_batch_is_detected_in_columns_too(damaged):
    """E14: only in the columns that are read."""
    consumer = earliest_consumer(damaged)

    assert [batch.num_rows for batch in consumer.poll_batches()[T0]] == [2]
    with pytest.raises(CorruptBatchError) as caught:
        consumer.poll_batches()
    assert caught.value.offset == 2
    with pytest.raises(CorruptBatchError):
        list(earliest_consumer(damaged).iter_batches())
    keys = list(earliest_consumer(damaged).iter_batches(columns=["offset", "key"], until="end"))
    assert len(keys) == 3


def test_without_check_crcs_damaged_values_are_returned(damaged):
    """E14: check.crcs=false, as in Kafka."""
    records = drained(earliest_consumer(damaged, check_crcs=False))

    assert records[2].value == b"#atch1"


@pytest.mark.parametrize(("interval", "next_offset"), [(0, 4), (65536, 6)])
def test_an_error_of_a_damaged_batch_header_says_where_to_continue(tmp_path, interval, next_offset):
    """E10, A32: the end of the batch is unknown; the index knows a later batch."""
    root = open_root(tmp_path / "root")
    log = make_log(root, {"index.interval.bytes": interval})
    for number in range(3):
        log.append([encoded(*[b"batch%d" % number] * 2)])
    path = segment_files(root.path)[0]
    data = path.read_bytes()
    heads = [position for position in range(len(data)) if data[position : position + 4] == b"EMBL"]
    with path.open("r+b") as file:
        file.seek(heads[1] + 20)
        file.write(b"\xff")
    consumer = earliest_consumer(root)

    assert offsets(consumer.poll()[T0]) == [0, 1]
    with pytest.raises(CorruptBatchError) as caught:
        consumer.poll()
    assert (caught.value.offset, caught.value.next_offset) == (2, next_offset)
    assert consumer.position(T0) == 2
    consumer.seek(T0, next_offset)
    assert offsets(drained(consumer)) == list(range(next_offset, 6))
    abandon(root)


# Threads


def test_wakeup_ends_a_wait_once(root, log):
    """E12: the waiting call raises, the next call does not, and no record is lost."""
    consumer = earliest_consumer(root)
    drained(consumer)
    threading.Timer(0.05, consumer.wakeup).start()

    start = time.monotonic()
    with pytest.raises(WakeupError):
        consumer.poll(int(patient(10_000)))

    assert time.monotonic() - start < patient(1)
    fill(log, 1)
    assert offsets(consumer.poll()[T0]) == [12]


def test_wakeup_without_a_wait_interrupts_the_next_call(root, log):
    """E12."""
    consumer = earliest_consumer(root)
    consumer.wakeup()

    with pytest.raises(WakeupError):
        consumer.poll()
    assert len(consumer.poll()[T0]) == 12


def test_only_one_thread_may_use_a_consumer(root, log):
    """E13: the second thread gets an error, the first one continues."""
    consumer = earliest_consumer(root)
    drained(consumer)
    polled = []
    thread = threading.Thread(target=lambda: polled.append(consumer.poll(int(patient(5000)))))
    thread.start()
    time.sleep(0.05)

    for call in (consumer.poll, lambda: consumer.position(T0), lambda: next(consumer)):
        with pytest.raises(IllegalStateError, match="Another thread"):
            call()
    assert (consumer.paused(), consumer.assignment()) == (set(), {T0})
    fill(log, 1)
    thread.join(patient(5))
    assert offsets(polled[0][T0]) == [12]


# Close, groups and visibility


def test_a_closed_consumer_refuses_everything(root, log):
    """`close` may be called twice; a running iteration ends."""
    with earliest_consumer(root) as consumer:
        for record in consumer:
            if record.offset == 3:
                consumer.close()
    consumer.close()

    assert record.offset == 3
    for call in (
        *(consumer.poll, consumer.assignment, consumer.iter_records, consumer.iter_batches),
        *(consumer.commit, lambda: consumer.subscribe(["t"])),
    ):
        with pytest.raises(ClosedError):
            call()


@pytest.mark.parametrize("topics", [{"topics": ["t", "new"]}, {"pattern": "t|n.*"}])
def test_without_a_group_a_subscription_is_all_partitions(root, log, topics):
    """E18: as of topics that are passed to the constructor, and of those created later."""
    with Consumer(root, auto_offset_reset="earliest") as consumer:
        consumer.subscribe(**topics)
        before = consumer.assignment()
        root.create_topic("new", 1, TopicConfig())

        assert {tp.topic for tp in before} == {"t"}
        assert consumer.assignment() == before | {TopicPartition("new", 0)}
        consumer.unsubscribe()
        assert consumer.assignment() == set()
        consumer.assign([TopicPartition("new", 0)])


def test_a_read_only_root_can_be_read(root, log):
    """With mode="r" a consumer reads, waits, and can be woken."""
    read_only = open_root(root.path, mode="r")
    consumer = earliest_consumer(read_only)
    assert len(drained(consumer)) == 12
    fill(log, 1)
    assert len(consumer.poll(int(patient(1000)))[T0]) == 1
    threading.Timer(0.05, consumer.wakeup).start()

    with pytest.raises(WakeupError):
        consumer.poll(int(patient(5000)))
    read_only.close()


def test_durable_visibility_shows_only_what_was_flushed(root, log):
    """A20: records that a power cut could remove are not returned."""
    durable = open_root(root.path, visibility="durable")
    consumer = earliest_consumer(durable)
    log.flush()
    fill(log, 1)

    assert len(drained(consumer)) == 12
    log.append([encoded(b"synced")], durability="fsync")
    assert offsets(drained(consumer)) == [12, 13]
    durable.close()


# Processes


def test_a_forked_child_reads_on_from_the_same_position(root, log):
    """The child has readers of its own, and the positions of the parent."""
    consumer = earliest_consumer(root)
    consumer.poll(max_records=2)

    read_by_child = in_child(lambda: offsets(drained(consumer)))

    assert read_by_child == list(range(2, 12))
    assert offsets(drained(consumer)) == read_by_child


def test_a_forked_child_notices_a_topic_created_again(root, log):
    """A38: also if the child opens the partition."""
    consumer = Consumer(root, auto_offset_reset="earliest")
    consumer.assign([T0])
    drained(consumer)

    def recreate():
        root.delete_topic("t")
        fill(make_log(root), 1)
        with pytest.raises(UnknownTopicOrPartitionError):
            consumer.poll()
        return True

    assert in_child(recreate)


def answer(path, pairs):
    """In another process: append each record of ``ping`` to ``pong`` at once."""
    root = open_root(path)
    log = root.partition("pong", 0)
    consumer = Consumer(root, "ping")
    log.append([encoded(b"ready")])
    for _ in range(pairs):
        (records,) = consumer.poll(int(patient(10_000))).values()
        # perf_counter is CLOCK_MONOTONIC here: the same in all processes.
        received_at = time.perf_counter_ns()
        log.append([encoded(records[0].value + b" %d" % received_at)])
    root.close()


def test_another_process_sees_a_record_at_once(root):
    """The append itself ends the wait; `bench` measures the microseconds."""
    pairs = 100
    for topic in ("ping", "pong"):
        root.create_topic(topic, 1, TopicConfig())
    consumer = Consumer(root, "pong")
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=answer, args=(root.path, pairs))
    process.start()
    assert consumer.poll(int(patient(20_000)))
    delays = []
    for _ in range(pairs):
        root.partition("ping", 0).append([encoded(b"%d" % time.perf_counter_ns())])
        (records,) = consumer.poll(int(patient(10_000))).values()
        sent, received = map(int, records[0].value.split())
        delays.append(received - sent)
    process.join(patient(10))

    assert process.exitcode == 0
    # A second without the wake; a millisecond on a busy machine, 100 µs on an idle one.
    assert sorted(delays)[pairs // 2] < patient(0.05) * 1e9


WAITING = """
    import sys, time
    sys.path[:0] = {paths!r}
    from support.roots import open_root
    from embedlog.consumer.consumer import Consumer
    consumer = Consumer(open_root({root!r}), "t")
    print("waiting", flush=True)
    start = time.process_time()
    try:
        {call}
    except KeyboardInterrupt:
        print("interrupted", time.process_time() - start, flush=True)
"""


@pytest.mark.tier("test")
@pytest.mark.parametrize("call", sample(["consumer.poll(60_000)", "next(consumer)"], 1))
def test_ctrl_c_ends_a_wait_at_once(root, log, call):
    """The wait uses no CPU."""
    tests = Path(__file__).parent
    program = WAITING.format(paths=[str(tests), str(tests.parent)], root=root.path, call=call)
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.3)
        start = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        word, seconds = process.stdout.readline().split()
        elapsed = time.monotonic() - start
        process.wait(patient(10))

    assert word == "interrupted"
    assert elapsed < patient(0.5)
    assert float(seconds) < patient(0.05)


@pytest.mark.tier("all")
@pytest.mark.stress
def test_records_from_many_processes_all_arrive_in_order(root):
    """A10 for readers: no record is lost or repeated, and the order of each writer is kept."""
    root.create_topic("t", 2, TopicConfig.parse({"segment.bytes": 20_000}))
    consumer = earliest_consumer(root)
    context = multiprocessing.get_context("spawn")
    writers = [
        context.Process(target=write_numbers, args=(root.path, writer, 150)) for writer in range(2)
    ]
    for writer in writers:
        writer.start()
    received = {tp: [] for tp in (T0, T1)}
    while sum(map(len, received.values())) < 600:
        polled = consumer.poll(int(patient(20_000)))
        assert polled, "a record is missing"
        for tp, records in polled.items():
            received[tp] += records
    for writer in writers:
        writer.join(patient(10))

    for records in received.values():
        assert offsets(records) == list(range(300))
        for key in (b"0", b"1"):
            numbers = [int(record.value) for record in records if record.key == key]
            assert numbers == list(range(150))


def write_numbers(path, writer, count):
    root = open_root(path)
    for number in range(count):
        for partition in range(2):
            batch = encoded(b"%d" % number, keys=[b"%d" % writer])
            root.partition("t", partition).append([batch])
    root.close()


@pytest.mark.parametrize("name", ["", "  ", None, 5, b"t"])
def test_an_invalid_topic_name_is_refused_with_a_typed_error(root, log, name):
    """The error is a ValueError, and the subscription does not change."""
    consumer = Consumer(root, "t", group_id="g")
    for call in (lambda: Consumer(root, name), lambda: consumer.subscribe(["t", name])):
        with pytest.raises(InvalidTopicError, match="topic must"):
            call()
    assert issubclass(InvalidTopicError, ValueError)
    assert consumer.subscription() == {"t"}
    consumer.close()


@pytest.mark.parametrize("number", [True, "0", 1.0, None])
def test_an_invalid_partition_is_refused_with_a_typed_error(root, log, number):
    """Also values that a dictionary would take for 1 or 0."""
    consumer, invalid = Consumer(root), TopicPartition("t", number)
    consumer.assign([T0])
    for call in (
        lambda: consumer.assign([invalid]),
        lambda: consumer.end_offsets([invalid]),
        lambda: consumer.offsets_for_times({invalid: 0}),
        lambda: consumer.assign(["t"]),
    ):
        with pytest.raises(InvalidPartitionError, match="partition must be"):
            call()
    assert consumer.assignment() == {T0}
