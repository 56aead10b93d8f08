"""Conditional appends: a record is written only if nobody was faster (A40 to A43)."""

import errno
import gc
import logging
import pickle
import random

import pyarrow as pa
import pytest
from support import forks
from support.children import PausedChild
from support.failing_disks import FailingDisks
from support.faulty_files import FaultyFiles, after_reboot
from support.patience import patient
from support.replicas import Directories, assignment, bring_back
from support.roots import abandon, encoded, healthy_log, make_log, open_root, rows, segment_files
from support.tiers import choose

import embedlog
from embedlog.errors import (
    ConflictError,
    DurabilityError,
    IllegalStateError,
    InvalidRecordError,
    MirroredTopicError,
    RecordTooLargeError,
)
from embedlog.partition.append_condition import AppendCondition
from embedlog.producer import Producer
from embedlog.record import Appended

COMPACTED = {"cleanup.policy": "compact", "file.delete.delay.ms": 0}

log = healthy_log


def path(log, directory):
    return log.root.controller.image.directories[directory].path


@pytest.fixture
def producer(log):
    with log.producer() as producer:
        yield producer


def sent(producer, value, key=b"k", topic="t", **expected):
    """Send one record; return its offset."""
    return producer.send(topic, value, key=key, **expected).result(patient(5)).offset


def found(producer, value=b"refused", key=b"k", topic="t", **expected):
    """Send one record that is refused; return the offset that was found."""
    error = producer.send(topic, value, key=key, **expected).exception
    assert type(error) is ConflictError, error
    assert error.topic == topic
    assert not error.retriable
    return error.offset


def values(log, topic="t"):
    return [record.value for record in log.topic(topic)]


# What holds, and what does not


def test_the_end_of_the_partition_is_expected(log, producer):
    """A40: at the log end offset it is written, anywhere else nothing is."""
    log.create_topic("t")
    assert sent(producer, b"a", expected_offset=0) == 0
    assert found(producer, expected_offset=0) == 1
    assert found(producer, expected_offset=2) == 1
    assert sent(producer, b"b", expected_offset=1) == 1
    assert values(log) == [b"a", b"b"]


def test_the_last_record_of_the_key_is_expected(log, producer):
    """A41: its offset, or None for a key that is new; other keys do not count."""
    log.create_topic("t")
    assert sent(producer, b"a", expected_key_offset=None) == 0
    sent(producer, b"other", key=b"other")
    assert found(producer, expected_key_offset=None) == 0
    assert found(producer, expected_key_offset=1) == 0
    assert sent(producer, b"b", expected_key_offset=0) == 2
    assert found(producer, expected_key_offset=0) == 2
    assert found(producer, key=b"new", expected_key_offset=0) is None
    assert sent(producer, b"c", key=b"", expected_key_offset=None) == 3
    assert values(log) == [b"a", b"other", b"b", b"c"]


def test_both_may_be_expected(log, producer):
    """A40, A41: the end is compared first."""
    log.create_topic("t")
    sent(producer, b"a")
    sent(producer, b"x", key=b"x")
    assert found(producer, expected_offset=1, expected_key_offset=0) == 2
    assert found(producer, expected_offset=2, expected_key_offset=1) == 0
    assert sent(producer, b"b", expected_offset=2, expected_key_offset=0) == 2


@pytest.mark.parametrize("config", [{}, COMPACTED], ids=["delete", "compact"])
def test_a_key_whose_last_record_is_a_tombstone_is_new(log, producer, config):
    """A42: before and after compaction removes the tombstone, whose offset counts until then."""
    log.create_topic("t", config={**config, "delete.retention.ms": 0})
    sent(producer, b"a")
    assert sent(producer, None, expected_key_offset=0) == 1
    assert found(producer, expected_key_offset=0) == 1
    if config:
        for _ in range(3):
            sent(producer, b"", key=b"other")
            log.partition("t", 0).roll()
            log.housekeeping.compact("t", force=True)
        assert [record.key for record in log.topic("t")] == [b"other"]
        assert found(producer, expected_key_offset=1) is None
    else:
        assert sent(producer, None, expected_key_offset=1) == 2
    sent(producer, b"b", expected_key_offset=None)
    assert log.topic("t").get(b"k") == b"b"


def test_a_record_below_the_log_start_does_not_count(log, producer):
    """A41: as `get`, which does not find it either."""
    log.create_topic("t")
    sent(producer, b"a")
    sent(producer, b"b", key=b"other")
    log.delete_records({embedlog.TopicPartition("t", 0): 1})
    assert found(producer, expected_key_offset=0) is None
    assert sent(producer, b"c", expected_key_offset=None) == 2


def test_the_error_says_what_was_found(log, producer):
    """A40, A41: as text and as facts, also in another process."""
    log.create_topic("t")
    sent(producer, b"a")
    for expected, key in ({"expected_offset": 7}, None), ({"expected_key_offset": None}, b"k"):
        error = producer.send("t", b"b", key=b"k", **expected).exception
        error = pickle.loads(pickle.dumps(error))
        assert (error.topic, error.partition, error.key) == ("t", 0, key)
        assert "expected" in str(error)
        assert error.todo in str(error)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"expected_offset": -1}, InvalidRecordError),
        ({"expected_offset": "1"}, InvalidRecordError),
        ({"expected_offset": ...}, InvalidRecordError),
        ({"expected_offset": True}, InvalidRecordError),
        ({"expected_key_offset": -1}, InvalidRecordError),
        ({"expected_key_offset": 1.0}, InvalidRecordError),
        ({"expected_key_offset": 0, "key": None}, InvalidRecordError),
        ({"expected_offset": 0, "key": None}, IllegalStateError),
    ],
)
def test_what_no_partition_can_have_is_refused(log, producer, arguments, kind):
    """A40, A41: nothing is written, whatever the log has."""
    log.create_topic("t", 2)
    with pytest.raises(kind, match=r"expected|key|partition") as raised:
        producer.send("t", b"x", **{"key": b"k", **arguments})
    assert raised.value.todo
    assert values(log) == []


def test_a_record_that_is_refused_anyway_fails_as_without_a_condition(log, producer):
    """A40: its future has the error, or `send` raises it."""
    log.create_topic("t", config={**COMPACTED, "max.message.bytes": 2000})
    log.create_topic("copy", config={"mirror.source": "elsewhere/t"})
    error = producer.send("t", b"x", expected_offset=0).exception
    assert isinstance(error, InvalidRecordError)
    for size in 3000, 2 << 20:
        error = producer.send("t", bytes(size), key=b"k", expected_offset=0).exception
        assert isinstance(error, RecordTooLargeError)
    error = producer.send("copy", b"x", expected_offset=0).exception
    assert isinstance(error, MirroredTopicError)
    assert values(log) == []
    assert sent(producer, b"a", expected_offset=0, expected_key_offset=None) == 0


@pytest.mark.parametrize("settings", [{"acks": 0}, {"acks": 1}, {"enable_idempotence": False}])
def test_a_producer_without_idempotence_sends_no_conditions(log, settings):
    """A43: its retry would find the record itself."""
    log.create_topic("t")
    with log.producer(**settings) as producer, pytest.raises(IllegalStateError):
        producer.send("t", b"x", expected_offset=0)
    assert values(log) == []


# Which partition, which key


def test_a_partition_is_chosen_by_the_key_or_by_the_caller(log, producer):
    """A41: the key is looked up where the record goes, and only there."""
    log.create_topic("t", 3)
    places = [
        producer.send("t", b"a", key=b"k", partition=number, expected_key_offset=None).result()
        for number in range(3)
    ]
    assert [(place.partition, place.offset) for place in places] == [(0, 0), (1, 0), (2, 0)]
    assert found(producer, expected_key_offset=None) == 0
    assert producer.send("t", b"x", partition=2, expected_offset=1).result().offset == 1
    with log.producer(partitioner=lambda key, *_: len(key)) as other:
        place = other.send("t", b"y", key=b"kk", expected_offset=2, expected_key_offset=None)
        assert place.result()[1:3] == (2, 2)
    for arguments in {"partitioner": "round_robin"}, {"partitioner_ignore_keys": True}:
        with log.producer(**arguments) as other, pytest.raises(IllegalStateError):
            other.send("t", b"y", key=b"k", expected_key_offset=0)


def test_keys_are_those_that_serializers_store(log, producer):
    """A41: a key of the topic's own type; headers and timestamps are kept."""
    log.create_topic("t", key="json", value="json")
    key, headers = {"account": 7}, [("h", b"x"), ("n", None)]
    place = producer.send("t", [1], key, headers, None, 5, expected_key_offset=None).result()
    assert (place.offset, place.timestamp) == (0, 5)
    assert found(producer, [2], key=key, expected_key_offset=None) == 0
    assert sent(producer, [3], key=key, expected_key_offset=0) == 1
    (first, second) = log.topic("t")
    assert (first.headers, first.timestamp, second.value) == (headers, 5, [3])


@pytest.mark.parametrize("config", [{}, COMPACTED], ids=["delete", "compact"])
def test_a_typed_topic_has_the_key_of_its_columns(log, producer, config):
    """A41, A42: of several columns; tombstones have the key as `key`."""
    schema = pa.schema({"site": pa.string(), "number": pa.int32(), "x": pa.float64()})
    schema = pa.schema(
        [field.with_nullable(field.name == "x") for field in schema],
    )
    log.create_topic("t", 2, config, schema=schema, key=["site", "number"])

    def row(x, site="a"):
        return {"site": site, "number": 3, "x": x}

    offset = sent(producer, row(1.0), key=None, expected_key_offset=None)
    assert found(producer, row(2.0), key=None, expected_key_offset=None) == offset
    last = sent(producer, row(2.0), key=None, expected_key_offset=offset)
    log.alter_topic("t", schema=schema.append(pa.field("y", pa.int64())))
    last = sent(producer, {**row(3.0), "y": 1}, key=None, expected_key_offset=last)
    deleted = sent(producer, None, key=("a", 3), expected_key_offset=last)
    assert found(producer, row(4.0), key=None, expected_key_offset=last) == deleted
    sent(producer, row(5.0), key=None, expected_key_offset=None)
    assert log.topic("t").get(("a", 3))["x"] == 5.0


# Batches, order, and the rest of the producer


def test_what_was_sent_before_is_written_before_and_what_comes_after_waits(log):
    """A40: the order of a producer is kept, and other records are not disturbed."""
    log.create_topic("t")
    with log.producer(linger_ms=60_000) as producer:
        producer.send("t", b"1")
        assert found(producer, expected_offset=0) == 1
        later = [producer.send("t", b"%d" % number) for number in (2, 3)]
        assert sent(producer, b"4", expected_offset=3) == 3
        assert [future.result().offset for future in later] == [1, 2]
        producer.send("t", b"5")
        assert found(producer, expected_key_offset=2) == 3
        assert sent(producer, b"6", expected_offset=5, expected_key_offset=3) == 5
    assert values(log) == [b"%d" % number for number in range(1, 7)]


def hold(log, pause):
    """Hold the lock of a partition, in a process of its own."""
    with log.partition("t", 0).locked():
        pause()


@pytest.mark.parametrize("expected", [0, 1])
def test_a_record_that_must_wait_for_the_partition_keeps_its_place(log, expected):
    """A40: alone in its append, before the records that were sent after it."""
    log.create_topic("t")
    options = {"request_timeout_ms": 10, "delivery_timeout_ms": round(patient(60_000))}
    with (
        log.producer(linger_ms=0, **options) as producer,
        PausedChild(lambda pause: hold(log, pause)) as child,
    ):
        first = producer.send("t", b"first", expected_offset=expected)
        others = [producer.send("t", b"%d" % number) for number in range(3)]
        last = producer.send("t", b"last", expected_offset=3 if expected else 4)
        assert not first.done()
        child.kill()
        producer.flush()
        kept = [b"first"] * (not expected) + [b"0", b"1", b"2", b"last"]
        assert first.failed() is bool(expected)
        assert all(future.succeeded() for future in (*others, last))
    assert values(log) == kept


def test_a_conflict_that_nobody_looks_at_is_logged(log, caplog):
    """A40: as every record that fails; `flush` raises it on request."""
    log.create_topic("t")
    with log.producer() as producer:
        producer.send("t", b"a", expected_offset=5)
        (line,) = [each for each in caplog.records if each.name == "embedlog.producer"]
        assert line.levelno == logging.WARNING
        assert "not at 5 as expected" in line.getMessage()
        future = producer.send("t", b"a", expected_offset=5)
        with pytest.raises(embedlog.errors.DeliveryFailedError, match="as expected"):
            producer.flush(raise_errors=True)
        assert future.failed()
        del future
        gc.collect()
        assert values(log) == []


def test_callbacks_learn_of_both_outcomes(log, producer):
    """A40: the futures are those of all records."""
    log.create_topic("t")
    outcomes = []
    for number in 0, 0:
        future = producer.send("t", b"a", expected_offset=number)
        future.add_both(lambda outcome: outcomes.append(type(outcome).__name__))
    assert outcomes == ["RecordMetadata", "ConflictError"]


def test_a_producer_counts_refused_records_as_failed(log, producer):
    """A40: and continues its sequence numbers without a gap."""
    log.create_topic("t")
    for number in range(4):
        sent(producer, b"a", expected_offset=number)
        found(producer, expected_offset=number)
    metrics = producer.metrics()["producer-metrics"]
    assert (metrics["record-send-total"], metrics["record-error-total"]) == (4, 4)
    assert producer.last_sequence("t") == 3


# A retry is no conflict with itself


def test_a_batch_that_was_appended_before_is_no_conflict(log):
    """A43: the log recognizes it by its sequence number, and returns its offset."""
    part = make_log(log.root)
    first = encoded(b"a", keys=[b"k"], producer=(7, 0, 0))
    condition = AppendCondition(0, b"k", None)
    (receipt,) = part.append([first], condition=condition)
    part.append([encoded(b"b", keys=[b"k"])])
    (again,) = part.append([first], condition=condition)
    assert (again.base_offset, again.duplicate) == (receipt.base_offset, True)
    with pytest.raises(ConflictError):
        part.append([encoded(b"c", keys=[b"k"], producer=(7, 0, 1))], condition=condition)
    assert [row[3] for row in rows(part)] == [b"a", b"b"]


def test_a_retry_after_an_unknown_outcome_is_no_conflict(tmp_path):
    """A43: the first attempt was published, and failed in the flush that followed."""
    disks = FailingDisks()
    with Directories(tmp_path).open(files=disks, durability="fsync") as log:
        log.create_topic("t", replication_factor=2, config={"min.insync.replicas": 2})
        _, follower = assignment(log, "t").isr
        with log.producer() as producer:
            for after in range(8):
                disks.break_disk(path(log, follower), errno.EIO, after=after)
                future = producer.send("t", b"%d" % after, key=b"k", expected_offset=after)
                disks.repair(path(log, follower))
                bring_back(log)
                assert future.result(patient(10)).offset == after
            retried = producer.metrics()["producer-metrics"]
            assert retried["record-retry-total"] >= retried["batch-duplicate-total"] > 0
        assert values(log) == [b"%d" % number for number in range(8)]


def test_the_next_leader_finds_the_same(tmp_path):
    """A40, A41: of a log in several directories, of which that of the leader is lost."""
    directories = Directories(tmp_path)
    with directories.open() as log, log.producer() as producer:
        log.create_topic("t", replication_factor=2)
        assert sent(producer, b"a", expected_offset=0, expected_key_offset=None) == 0
        directories.lose(log, log.partition("t", 0).placement.leader)
        assert found(producer, expected_key_offset=None) == 0
        assert found(producer, expected_offset=0) == 1
        assert sent(producer, b"b", expected_offset=1, expected_key_offset=0) == 1
        assert values(log) == [b"a", b"b"]


# What nobody can read yet, and what is lost


def killed_before_the_flush(root_path):
    """A writer is killed after it published its record, and before the flush that shows it."""

    def work():
        made = []

        def files(*arguments, **options):
            made.append(FaultyFiles(*arguments, **options))
            return made[-1]

        root = open_root(root_path, files=files, durability="fsync")
        made[0].kill_at(0, only={"sync"})
        root.partition("t", 0).append([encoded(b"a", keys=[b"k"])])

    assert forks.run(work).killed


@pytest.mark.parametrize("durability", ["os", "fsync"])
@pytest.mark.parametrize(
    ("expected", "offset"), [({"expected_offset": 0}, 1), ({"expected_key_offset": None}, 0)]
)
def test_a_record_that_waits_for_its_flush_is_a_conflict_and_can_be_read_then(
    tmp_path, durability, expected, offset
):
    """A40: whoever is refused finds what was faster, also if its writer died before the flush."""
    with embedlog.open(tmp_path, maintenance=False, durability=durability) as log:
        log.create_topic("t")
        killed_before_the_flush(tmp_path)
        assert values(log) == []
        with log.producer() as producer:
            assert found(producer, **expected) == offset
            assert values(log) == [b"a"]
            sent(producer, b"b", expected_offset=1, expected_key_offset=0)
        assert values(log) == [b"a", b"b"]
        assert log.housekeeping.verify() == []


def test_a_reader_of_durable_records_can_read_what_was_found(tmp_path):
    """A40: with `visibility="durable"` a conflict flushes it."""
    with embedlog.open(tmp_path, maintenance=False, visibility="durable") as log:
        log.create_topic("t")
        with log.producer() as producer:
            sent(producer, b"a")
            assert values(log) == []
            assert found(producer, expected_offset=0) == 1
        assert values(log) == [b"a"]


def test_a_partition_that_is_read_only_says_so(tmp_path):
    """A40: its readers see less than was written, so a conflict would last for ever (P9)."""
    root = open_root(tmp_path, files=FaultyFiles, durability="fsync")
    part = make_log(root)
    root.context.files.fail_at(0, errno.EIO, only={"sync"})
    with pytest.raises(DurabilityError):
        part.append([encoded(b"a", keys=[b"k"])])
    with pytest.raises(DurabilityError):
        part.append([encoded(b"b", keys=[b"k"])], condition=AppendCondition(0))
    abandon(root)


def test_what_a_power_cut_took_is_not_expected_any_more(tmp_path):
    """A41: the log ends earlier after the reboot, and the record of the key is lost."""
    root = open_root(tmp_path)
    part = make_log(root)
    part.append([encoded(b"a", keys=[b"k"])])
    end = part.tail().log_end_position
    part.append([encoded(b"b", keys=[b"k"])])
    abandon(root)
    (file,) = segment_files(tmp_path)
    with file.open("r+b") as data:
        data.truncate(end)
    root = open_root(tmp_path, files=after_reboot())
    part = root.partition("t", 0)
    for stale, offset in (AppendCondition(2), 1), (AppendCondition(None, b"k", 1), 0):
        with pytest.raises(ConflictError) as raised:
            part.append([encoded(b"c", keys=[b"k"])], condition=stale)
        assert raised.value.offset == offset
    (receipt,) = part.append([encoded(b"c", keys=[b"k"])], condition=AppendCondition(1, b"k", 0))
    assert receipt == Appended(1, 2, None)
    root.close()


# Against a scan of the whole log


class Scan:
    """The end of a partition, and the last record of a key, by reading everything."""

    def __init__(self, log, key):
        part = log.partition("t", 0)
        self.end = part.tail().log_end_offset
        records = [row for row in rows(part) if row[2] == key]
        self.last = records[-1][0] if records else None
        self.is_new = not records or records[-1][3] is None

    def finds(self, end, key_offset):
        """Return what a condition finds: no conflict (None), or the offset in a tuple."""
        if end is not None and end != self.end:
            return (self.end,)
        if key_offset is ... or key_offset == self.last or (key_offset is None and self.is_new):
            return None
        return (self.last,)


@pytest.mark.parametrize("seed", range(choose(quick=4, all=100, nightly=2000)))
def test_a_condition_holds_if_a_scan_of_the_log_says_so(log, seed):
    """A40 to A42: whatever is appended, sealed, compacted, deleted and truncated in between, by
    this handle and by another one."""
    dice = random.Random(seed)
    compacts = dice.random() < 0.5
    log.create_topic(
        "t",
        config={
            "cleanup.policy": "compact,delete" if compacts else "delete",
            "delete.retention.ms": dice.choice([0, 10_000_000]),
            "file.delete.delay.ms": 0,
        },
    )
    keys = [b"a", b"b", b"c", b""]
    outcomes = {True: 0, False: 0}
    with embedlog.open(log.path, maintenance=False) as other:
        handles = [(each, Producer(each.root)) for each in (log, other)]
        for step in range(60):
            here, producer = dice.choice(handles)
            key, action = dice.choice(keys), dice.random()
            scan = Scan(here, key)
            if action < 0.15:
                producer.send("t", dice.choice([None, b"%d" % step]), key=key).result()
            elif action < 0.2:
                here.partition("t", 0).roll()
            elif action < 0.25:
                here.housekeeping.run()
            elif action < 0.3 and compacts:
                here.housekeeping.compact("t", force=True)
            elif action < 0.33:
                here.partition("t", 0).flush()
                start = here.partition("t", 0).start_offset()
                until = dice.randint(start, scan.end)
                here.delete_records({embedlog.TopicPartition("t", 0): until})
            elif action < 0.36:
                start = here.partition("t", 0).start_offset()
                here.partition("t", 0).truncate_to(dice.randint(start, scan.end))
                # Their sequence numbers may be rolled back with their records (A34).
                for _, each in handles:
                    each.close()
                handles = [(each, Producer(each.root)) for each in (log, other)]
            else:
                end = dice.choice([None, scan.end, scan.end, dice.randint(0, scan.end + 1)])
                offset = dice.choice([..., None, scan.last, scan.last, dice.randint(0, scan.end)])
                if end is None and offset is ...:
                    continue
                value = dice.choice([None, b"%d" % step, b"%d" % step])
                future = producer.send(
                    "t", value, key=key, expected_offset=end, expected_key_offset=offset
                )
                expected = scan.finds(end, offset)
                outcomes[expected is None] += 1
                if expected is None:
                    assert future.result().offset == scan.end
                else:
                    assert isinstance(future.exception, ConflictError)
                    assert (future.exception.offset,) == expected
                    assert Scan(here, key).end == scan.end
        for _, producer in handles:
            producer.close()
    assert min(outcomes.values()) > 3
