"""A topic as a table: the latest value of each key, whether or not compaction has run (D8, D19)."""

import pytest
from support.manual_compaction import keep
from support.patience import patient
from support.roots import encoded, healthy_log
from support.tiers import sample

import embedlog
from embedlog.errors import CorruptionError, InvalidConfigError, ReadOnlyError
from embedlog.partition.reader import PartitionReader
from embedlog.partitioner import partition_for_key

CONFIG = {"cleanup.policy": "compact"}


log = healthy_log


def send(log, *pairs, topic="t", partition=None):
    with log.producer() as producer:
        for key, value in pairs:
            producer.send(topic, value, key=key, partition=partition).result(patient(5))


PAIRS = [(b"a", b"1"), (b"b", b"2"), (b"a", b"3"), (b"c", b"4"), (b"c", None), (b"d", b"")]


@pytest.mark.parametrize("partitions", [1, 4])
@pytest.mark.parametrize("compacted", [False, True])
def test_the_latest_values_are_the_same_before_and_after(log, partitions, compacted):
    """A deleted key has no value; an empty value counts."""
    topic = log.create_topic("t", partitions, CONFIG)
    send(log, *PAIRS)
    if compacted:
        log.housekeeping.compact("t", force=True)

    assert dict(topic.items()) == {b"a": b"3", b"b": b"2", b"d": b""}
    assert [topic.get(key) for key in (b"a", b"b", b"c", b"d", b"e")] == [
        *(b"3", b"2", None, b"", None)
    ]
    assert topic.get(b"c", b"gone") == b"gone"
    table = topic.to_arrow(latest=True)
    assert table.schema == topic.to_arrow().schema
    rows = {row["key"]: (row["value"], row["partition"]) for row in table.to_pylist()}
    assert rows == {
        key: (value, partition_for_key(key, partitions)) for key, value in topic.items()
    }
    assert topic.to_arrow(["key"], latest=True).schema.names == ["key"]


def test_an_empty_topic_has_no_items(log):
    """A topic whose keys were all deleted has none either."""
    topic = log.create_topic("t", 2, CONFIG)
    assert (list(topic.items()), topic.get(b"a")) == ([], None)
    send(log, (b"a", None))
    assert (list(topic.items()), topic.get(b"a")) == ([], None)
    assert topic.to_arrow(latest=True).num_rows == 0


def test_a_topic_that_is_not_compacted_has_latest_values_too(log):
    """Any topic can be read as a table; records without a key are left out."""
    topic = log.create_topic("t")
    send(log, (None, b"0"), *PAIRS, (None, None))
    assert dict(topic.items()) == {b"a": b"3", b"b": b"2", b"d": b""}


def test_headers_come_with_the_last_record(log):
    """Some segments may have no column of headers."""
    topic = log.create_topic("t", 1, CONFIG)
    send(log, (b"a", b"1"))
    with log.producer() as producer:
        producer.send("t", b"2", key=b"b", headers=[("h", b"x")]).result(patient(5))
    rows = topic.to_arrow(["key", "headers"], latest=True).to_pylist()
    assert [(row["key"], row["headers"] or []) for row in rows] == [
        (b"a", []),
        (b"b", [{"key": "h", "value": b"x"}]),
    ]


def test_a_view_has_its_own_latest_values(log):
    """Only the records of the view count."""
    topic = log.create_topic("t", 1, CONFIG)
    send(log, *PAIRS)
    assert topic[0:2].to_arrow(["value"], latest=True)["value"].to_pylist() == [b"1", b"2"]
    assert topic.partition(0)[1:].to_arrow(["offset"], latest=True)["offset"].to_pylist() == [
        *(1, 2, 5)
    ]


def test_a_key_in_two_partitions_has_the_value_of_the_partition_it_hashes_to(log):
    """G5: when the topic has grown or the producer chose a partition; `get` and `items` agree."""
    topic = log.create_topic("t", 1, CONFIG)
    keys = [b"k%d" % number for number in range(20)]
    send(log, *[(key, b"old") for key in keys])
    log.create_partitions("t", 3)
    send(log, *[(key, b"new") for key in keys[::2]], (keys[4], None))
    send(log, (keys[1], b"elsewhere"), partition=2)

    latest_values = dict(topic.items())

    assert {key: value for key in keys if (value := topic.get(key)) is not None} == latest_values
    assert keys[4] not in latest_values
    for key in keys[6::2]:
        assert latest_values[key] == b"new"
    assert len(topic.to_arrow(latest=True)) == len(latest_values)


def test_the_newest_segment_is_read_first(log, monkeypatch):
    """`get` does not open older segments if a newer one has the key."""
    topic = log.create_topic("t", 1, CONFIG)
    for value in (b"1", b"2"):
        send(log, (b"a", value), (b"b", value))
        log.partition("t", 0).roll()
    partition = log.partition("t", 0)
    opened = []
    open_segment = partition.open_segment
    monkeypatch.setattr(
        partition,
        "open_segment",
        lambda info, **all: opened.append(info) or open_segment(info, **all),
    )
    assert topic.get(b"a") == b"2"
    assert 0 not in [info.base_offset for info in opened]


def test_a_compaction_during_a_read_repeats_nothing(log):
    """P20: compaction may merge records before and after the position into one batch."""
    topic = log.create_topic("t", 1, {**CONFIG, "segment.bytes": 1500})
    partition = log.partition("t", 0)
    for number in range(12):
        partition.append([encoded(b"v", keys=[b"%d" % number])])
    batches = topic.batches(["offset"])
    offsets_read = next(batches)["offset"].to_pylist()

    keep(partition, set(range(12)))

    for batch in batches:
        offsets_read += batch["offset"].to_pylist()
    assert offsets_read == list(range(12))


# In the foreground


def test_a_forced_compaction_includes_the_active_segment(log):
    """D19: the records to compact were just written, to the active segment."""
    topic = log.create_topic("t", 2, CONFIG)
    send(log, *PAIRS)
    progress = []

    assert log.housekeeping.compact("t") == []
    assert "active segment" in " ".join(topic.explain_compaction())
    results = log.housekeeping.compact("t", force=True, progress=lambda *now: progress.append(now))

    assert [result.partition for result in results] == [0, 1]
    assert sum(result.records_kept for result in results) == 4
    assert "removed" in results[0].why + results[1].why
    assert sum(1 for _ in topic) == 4
    assert all(0 <= done_bytes <= whole for done_bytes, whole in progress)
    assert "nothing to do" in " ".join(topic.explain_compaction())


def test_due_partitions_are_compacted_without_force(log):
    """`compact` does now what maintenance would do later."""
    log.create_topic("t", 1, CONFIG)
    send(log, *PAIRS)
    log.partition("t", 0).roll()
    (result,) = log.housekeeping.compact("t")
    assert result.records_kept == 4
    assert log.housekeeping.compact("t") == []


def test_a_topic_that_is_not_compacted_is_refused(log):
    """The error names the call that changes the policy."""
    log.create_topic("t")
    with pytest.raises(InvalidConfigError, match="alter_topic"):
        log.housekeeping.compact("t", force=True)
    with pytest.raises(InvalidConfigError, match="no setting"):
        log.alter_topic("t", CONFIG)
        log.housekeeping.compact("t", settings={"log.cleaner.nonsense": 1})


def test_a_read_only_log_is_not_compacted(tmp_path):
    """mode="r" changes nothing, but explains what compaction would do."""
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t", 1, CONFIG)
        send(log, *PAIRS)
    with embedlog.open(tmp_path / "log", mode="r") as log:
        with pytest.raises(ReadOnlyError):
            log.housekeeping.compact("t", force=True)
        assert log.topic("t").get(b"a") == b"3"
        assert "active segment" in " ".join(log.topic("t").explain_compaction())


def test_a_damaged_partition_raises_after_the_others_were_compacted(tmp_path):
    """D4: `compact` in the foreground compacts the other partitions first."""
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t", 2, CONFIG)
        for number in (0, 1):
            send(log, (b"a", b"1"), (b"a", b"2"), partition=number)
            log.partition("t", number).roll()
        path = next((tmp_path / "log").glob("topics/*/0/*-1.arrows"))
        data = bytearray(path.read_bytes())
        data[len(data) // 3 :] = bytes(len(data) - len(data) // 3)
        path.write_bytes(data)

        with pytest.raises(CorruptionError):
            log.housekeeping.compact("t", force=True)

        assert [record.offset for record in log.topic("t").partition(1)] == [1]


# While it is compacted


@pytest.mark.tier("test")
@pytest.mark.parametrize("moment", sample(range(1, 14), 5))
def test_a_key_is_not_lost_between_its_old_value_and_its_new_one(log, monkeypatch, moment):
    """D8: a compaction during a lookup removes the old value, which a later record replaced."""
    topic = log.create_topic("t", 1, {**CONFIG, "file.delete.delay.ms": 0, "segment.bytes": 900})
    send(log, *[(b"k%d" % number, b"old") for number in range(12)])
    calls = []
    read_batches = PartitionReader.read

    def read(reader, *args, **options):
        calls.append(None)
        if len(calls) == moment:
            send(log, *[(b"k%d" % number, b"new") for number in (0, 5, 11)], (b"k7", None))
            log.housekeeping.compact("t", force=True)
        return read_batches(reader, *args, **options)

    monkeypatch.setattr(PartitionReader, "read", read)
    items = list(topic.items())

    assert len(items) == len(dict(items))
    latest_values = dict(items)
    assert latest_values.pop(b"k7", b"old") == b"old"
    assert latest_values.keys() == {b"k%d" % number for number in range(12) if number != 7}
    for key in (b"k5", b"k11"):
        calls.clear()
        assert topic.get(key) in (b"old", b"new")


def test_the_title_of_a_compacted_topic_counts_records(log):
    """Removed offsets are not counted (D10)."""
    topic = log.create_topic("t", 1, CONFIG)
    assert repr(topic) == "<Topic t: 1 partition, 0 records>"
