"""Gathering the small batches of sealed segments into large ones."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clock import START, ManualClock
from support.roots import encoded, rows

import embedlog
from embedlog.batch import is_over, to_encoded
from embedlog.compaction.rebatch import min_rows, rebatch
from embedlog.config import LONG_MAX, TopicConfig
from embedlog.errors import FencedError
from embedlog.partition import segment_statistics

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])


@pytest.fixture
def log(tmp_path):
    with embedlog.open(tmp_path / "log", clock=ManualClock(START), maintenance=False) as log:
        yield log


def batches(partition):
    """Return the batches of all segments, in order."""
    found = []
    for info in partition.segments.values():
        file = partition.open_segment(info)
        end = info.end_position if info.sealed else partition.tail().log_end_position
        found += list(file.scan(file.start, end))
    return found


def sizes(partition):
    """Return the number of records of each batch."""
    return [batch.count for batch in batches(partition)]


@pytest.fixture
def partition(log):
    """Ten batches of one record in a sealed segment, and one in the active one."""
    log.create_topic("t")
    partition = log.root.partition("t", 0)
    for number in range(11):
        if number == 10:
            partition.roll()
        partition.append([encoded(b"%d" % number, at=START + number)])
    return partition


def test_records_offsets_and_timestamps_stay(log, partition):
    """One batch takes the place of ten."""
    before = rows(partition)

    result = rebatch(partition, LONG_MAX)

    assert (result.segments, result.batches_before, result.batches_after) == (1, 10, 1)
    assert result.bytes_after < result.bytes_before
    assert sizes(partition) == [10, 1]
    assert rows(partition) == before
    assert not list(log.housekeeping.verify())


def test_a_segment_of_large_batches_stays(partition):
    """By their average."""
    assert rebatch(partition, 1).segments == 0
    assert sizes(partition) == [1] * 11


def test_a_reader_in_the_middle_goes_on(partition):
    """Its segment is replaced under it."""
    reader = partition.reader(0)
    first = reader.read(1)[0]
    reader.offset = first.next_offset

    rebatch(partition, LONG_MAX)

    offsets = [n for batch in _all(reader) for n in range(batch.base_offset, batch.next_offset)]
    assert sorted(set(offsets)) == list(range(11))


def _all(reader):
    while found := reader.read():
        yield from found


def test_times_are_found_after_it(partition):
    """The index and the times of the new segment are its own."""
    rebatch(partition, LONG_MAX)

    assert partition.offset_for_timestamp(START + 7).offset == 7


def test_batches_of_several_epochs_codecs_and_append_times_are_not_mixed(log, partition):
    """Each run of one kind becomes a batch."""
    partition.truncate_to(9)
    for codec in ("lz4", "lz4", "none"):
        partition.append([encoded(b"x", b"y", compression=codec)])
    partition.roll()

    rebatch(partition, LONG_MAX)

    found = [(batch.leader_epoch, batch.codec, batch.count) for batch in batches(partition)]
    assert found == [(0, "none", 9), (1, "lz4", 4), (1, "none", 2)]


def test_the_append_time_of_each_batch_stays(log):
    """A batch has one append time."""
    clock = log.root.clock
    log.create_topic("s", config={"message.timestamp.type": "LogAppendTime"})
    partition = log.root.partition("s", 0)
    for number in range(4):
        partition.append([encoded(b"%d" % number)])
        if number % 2:
            clock.advance(1000)
    partition.roll()
    before = rows(partition)

    assert rebatch(partition, LONG_MAX).batches_after == 2
    assert rows(partition) == before


def test_the_last_batch_of_a_producer_keeps_its_sequence(log):
    """So that a repeated batch is known also by the segment."""
    log.create_topic("p")
    partition = log.root.partition("p", 0)
    for number in range(5):
        partition.append([encoded(b"%d" % number, producer=(7, 0, number))])
    partition.append([encoded(b"z")])
    partition.roll()

    rebatch(partition, LONG_MAX)

    found = [(batch.count, batch.producer_id, batch.base_sequence) for batch in batches(partition)]
    assert found == [(4, None, None), (1, 7, 4), (1, None, None)]
    assert partition.append([encoded(b"4", producer=(7, 0, 4))])[0].duplicate
    assert partition.append([encoded(b"2", producer=(7, 0, 2))])[0].duplicate


def test_a_lease_holds_the_segment(log, partition):
    """What a query has planned to read stays where it is."""
    with (
        log.housekeeping.hold("query", {embedlog.TopicPartition("t", 0): 0}),
        pytest.raises(FencedError, match="lease"),
    ):
        rebatch(partition, LONG_MAX)
    assert sizes(partition) == [1] * 11


def test_compacted_segments_and_those_with_gaps_stay(log):
    """Compaction writes large batches itself."""
    log.create_topic("c", config={"cleanup.policy": "compact"})
    partition = log.root.partition("c", 0)
    for number in range(6):
        partition.append([encoded(b"%d" % number, keys=[b"k%d" % (number % 2)])])
    partition.roll()
    log.housekeeping.compact("c", force=True)
    before = sizes(partition)

    rebatch(partition, LONG_MAX)

    assert sizes(partition) == before


@pytest.mark.parametrize(
    ("setting", "typed", "expected"),
    [(None, False, 0), (None, True, 1000), (0, True, 0), (50, False, 50), (50, True, 50)],
)
def test_the_default_depends_on_the_kind_of_topic(setting, typed, expected):
    """Small batches cost most where columns are read."""
    config = TopicConfig.parse({} if setting is None else {"rebatch.min.rows": setting})
    assert min_rows(config, typed) == expected


def test_housekeeping_gathers_what_the_setting_says(log):
    """And computes the statistics that are missing."""
    producer = log.producer()
    for name, typed in (("typed", True), ("plain", False)):
        log.create_topic(name, **({"schema": SCHEMA, "key": "k"} if typed else {}))
        partition = log.root.partition(name, 0)
        for number in range(3):
            value = {"k": "a", "n": number} if typed else b"%d" % number
            producer.send(name, value).result()
        partition.roll()
    typed, plain = (log.root.partition(name, 0) for name in ("typed", "plain"))
    first = next(iter(typed.segments.values()))
    log.root.context.state.write(lambda txn: segment_statistics.put(txn, typed, first, None))

    results = log.housekeeping.run()

    assert [result.topic for result in results["rebatch"]] == ["typed"]
    # The last batch of a producer stays.
    assert sizes(typed) == [2, 1]
    assert sizes(plain) == [1, 1, 1]
    assert segment_statistics.statistics_of(typed, next(iter(typed.segments.values()))).count == 3
    assert log.housekeeping.run()["rebatch"] == []


def test_optimize_gathers_the_active_segment_too(log):
    topic = log.create_topic("t", schema=SCHEMA, key="k", partitions=2)
    with log.producer() as producer:
        for number in range(20):
            producer.send("t", {"k": f"k{number}", "n": number}).result()
    before = topic.to_arrow()

    results = topic.optimize()

    assert [(result.partition, result.batches_after) for result in results] == [(0, 2), (1, 2)]
    assert topic.to_arrow().equals(before)
    assert topic.optimize() == []


@given(counts=st.lists(st.integers(1, 5), min_size=2, max_size=9), limit=st.integers(200, 4000))
def test_batches_stay_within_the_limits_of_the_topic(tmp_path_factory, counts, limit):
    """As large as ``max.message.bytes`` allows."""
    with embedlog.open(tmp_path_factory.mktemp("limits"), maintenance=False) as log:
        topic = log.create_topic("t", schema=SCHEMA, key="k", config={"max.message.bytes": limit})
        with log.producer() as producer:
            for count in counts:
                producer.send_batch("t", [{"k": "a", "n": n} for n in range(count)]).result()
        before = topic.to_arrow()

        topic.optimize()

        assert topic.to_arrow().equals(before)
        for batch in batches(log.root.partition("t", 0)):
            assert batch.count == 1 or not is_over(to_encoded(batch), limit)
