"""Share groups: records one by one, to any number of consumers."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections import Counter
from datetime import timedelta
from time import monotonic

import pyarrow as pa
import pytest
from support import forks
from support.children import PausedChild
from support.clock import MovedUptime
from support.patience import patient
from support.roots import abandon, healthy, open_root

import embedlog
from embedlog.api.consumer_group import ConsumerGroup
from embedlog.config import TopicConfig
from embedlog.errors import (
    ClosedError,
    CommitFailedError,
    DiskFullError,
    IllegalStateError,
    InconsistentGroupProtocolError,
    InvalidConfigError,
    InvalidRecordStateError,
    NonEmptyGroupError,
    RecordDeserializationError,
    UnknownTopicOrPartitionError,
)
from embedlog.producer import Producer
from embedlog.publish import live_commit
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.retention import delete_records
from embedlog.share.share_consumer import ShareConsumer
from embedlog.share.share_group import ShareGroup

LOCK_MS = 30_000


START_MS = 10_000_000


class Machine(MovedUptime):
    """A machine that a test reboots; its uptime stands still."""

    boot = 0

    def uptime_ms(self) -> int:
        return START_MS + MovedUptime.ms

    def boot_id(self):
        return f"boot {Machine.boot}"


class World:
    """A log, whose clocks a test moves, with a share group."""

    def __init__(self, path, **options):
        self.path, self.options, self.consumers = path, options, []
        self.open()

    def open(self):
        self.root = open_root(self.path, files=Machine, **self.options)
        self.group = ConsumerGroup(self.root, "g")

    def create(self, name="t", partitions=1, **config):
        settings = {key.replace("_", "."): value for key, value in config.items()}
        self.root.create_topic(name, partitions, TopicConfig.parse(settings))

    def append(self, *values, topic="t", partition=0, key=None):
        with Producer(self.root) as producer:
            for value in values:
                producer.send(topic, value, key, partition=partition)

    def consumer(self, *topics, group="g", **config):
        consumer = ShareConsumer(self.root, *(topics or ("t",)), group=group, **config)
        self.consumers.append(consumer)
        return consumer

    def wait(self, seconds):
        """Let time pass for locks and delays."""
        MovedUptime.ms += int(seconds * 1000)

    def reboot(self):
        """Cut the power, and begin again."""
        abandon(self.root)
        self.consumers.clear()
        Machine.boot += 1
        self.open()

    def lag(self):
        return self.group.lag()[TopicPartition("t", 0)]

    def partition(self):
        return self.group.describe().partitions[0]


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(MovedUptime, "ms", 0)
    world = World(tmp_path / "log")
    world.create()
    world.group.alter({"share.auto.offset.reset": "earliest"})
    yield world
    for consumer in world.consumers:
        consumer.close()
    healthy(world.root)
    world.root.close()


def values(records):
    return [record.value for record in records]


NUMBERS = [b"%d" % number for number in range(10)]


# Sharing


def test_each_record_is_given_to_one_consumer(world):
    """S1: two members share one partition; what they accept is done, in any order."""
    world.append(*NUMBERS)
    first, second = world.consumer(), world.consumer()

    assert values(first.poll(max_records=3)) == NUMBERS[:3]
    assert values(second.poll(max_records=4)) == NUMBERS[3:7]
    assert second.commit() == {TopicPartition("t", 0): None}
    assert (world.partition().current_offset, world.partition().in_flight) == (0, 3)
    assert world.lag() == 6
    assert values(first.poll()) == NUMBERS[7:]
    first.commit()
    assert (world.partition().current_offset, world.lag()) == (10, 0)
    assert first.poll() == second.poll() == []


def test_records_of_all_partitions_are_shared(world):
    """S1: there may be more consumers than partitions, and fewer."""
    world.create("many", 5)
    for partition in range(5):
        world.append(*NUMBERS, topic="many", partition=partition)
    consumers = [world.consumer("many") for _ in range(7)]
    taken = Counter()
    for turn in range(60):
        taken.update(record[:3] for record in consumers[turn % 7].poll(max_records=2))

    assert taken == {("many", part, number): 1 for part in range(5) for number in range(10)}


def test_no_partition_waits_for_another_one(world):
    """S1: the one that was served longest ago comes first."""
    world.create("many", 3)
    for partition in range(3):
        world.append(*NUMBERS, topic="many", partition=partition)
    consumer = world.consumer("many")
    served = [record.partition for _ in range(6) for record in consumer.poll(max_records=2)]

    assert [Counter(served[:6]), Counter(served[6:])] == [Counter({0: 2, 1: 2, 2: 2})] * 2


@pytest.mark.parametrize("verdict", ["accept", "reject", 1, 3])
def test_what_is_accepted_or_rejected_is_not_delivered_again(world, verdict):
    """S3: also if another consumer takes it."""
    world.append(b"a", b"b")
    consumer = world.consumer()
    first, _ = consumer.poll()
    consumer.acknowledge(first, verdict)
    consumer.commit()
    consumer.close()

    assert world.consumer().poll() == []


def test_what_is_released_is_delivered_again(world):
    """S3, S5: with the next number, also to the consumer that released it."""
    world.append(b"a", b"b")
    consumer = world.consumer()
    first, second = consumer.poll()
    assert (first.delivery_count, second.delivery_count) == (1, 1)
    consumer.acknowledge(first, "release")
    (again,) = consumer.poll()

    assert (again.value, again.delivery_count) == (b"a", 2)
    assert world.partition().in_flight == 1


def test_a_release_may_have_a_delay(world):
    """S7: the record is not delivered before; others are."""
    world.append(b"a", b"b")
    consumer, retry = world.consumer(), embedlog.Retry(backoff=[5, 60])
    (record,) = consumer.poll(max_records=1)
    consumer.acknowledge(record, "release", delay=retry)
    (other,) = consumer.poll()
    consumer.acknowledge(other)
    assert other.value == b"b"
    world.wait(4.9)
    assert consumer.poll() == []
    world.wait(0.2)
    (record,) = consumer.poll()
    consumer.acknowledge(record, "release", delay=retry)
    assert consumer.poll() == []
    world.wait(30)
    assert consumer.poll() == []
    world.wait(31)

    assert values(consumer.poll()) == [b"a"]


def test_a_waiting_consumer_gets_what_another_one_releases(world):
    """S8: at once, since the release wakes it."""
    world.append(b"a")
    first, second = world.consumer(), world.consumer()
    (record,) = first.poll()

    async def hand_over():
        waiting = asyncio.create_task(second.getone())
        await asyncio.sleep(0.05)
        first.acknowledge(record, "release")
        first.commit()
        return await asyncio.wait_for(waiting, patient(10))

    assert asyncio.run(hand_over()).delivery_count == 2


def test_a_lock_that_ends_frees_its_records(world):
    """S4: others get them, and a late acknowledgement is refused, without harm to others."""
    world.append(b"a", b"b", b"c")
    slow, other = world.consumer(), world.consumer()
    late = slow.poll(max_records=2)
    world.wait(LOCK_MS / 1000 - 1)
    assert values(other.poll()) == [b"c"]
    world.wait(2)
    again = other.poll(max_records=1)
    assert [(record.value, record.delivery_count) for record in again] == [(b"a", 2)]
    (fresh,) = slow.poll(max_records=1)  # This accepts what it had, too late.
    assert fresh == late[1]
    slow.acknowledge(fresh)
    results = slow.commit()
    assert results == {TopicPartition("t", 0): None}

    assert world.partition().current_offset == 0
    other.commit()
    assert world.partition().current_offset == 3


def test_a_late_acknowledgement_is_refused_by_record(world):
    """S4: the error names the offsets; the other records of the same commit are done."""
    world.append(*NUMBERS)
    consumer, other = world.consumer(), world.consumer()
    early = consumer.poll(max_records=3)
    world.wait(20)
    other.poll(max_records=2)
    world.wait(11)
    assert values(other.poll(max_records=1)) == [b"0"]
    results = consumer.commit()

    error = results[TopicPartition("t", 0)]
    assert isinstance(error, InvalidRecordStateError)
    assert error.offsets == (0, 1, 2)
    assert error.group == "g"
    assert len(early) == 3
    assert world.partition().current_offset == 0


def test_one_commit_of_good_and_late_records(world):
    """S4: each by itself."""
    world.append(*NUMBERS)
    consumer = world.consumer(share_acknowledgement_mode="explicit")
    records = consumer.poll(max_records=2)
    consumer.acknowledge(records[1], "renew")
    world.wait(20)
    consumer.commit()
    world.wait(15)
    for record in records:
        consumer.acknowledge(record)
    error = consumer.commit()[TopicPartition("t", 0)]

    assert isinstance(error, InvalidRecordStateError)
    assert error.offsets == (0,)
    assert values(consumer.poll(max_records=2)) == [b"0", b"2"]


def test_the_records_of_a_killed_process_are_free_at_once(world):
    """S8: the kernel frees its lock, long before those of its records end."""
    world.append(b"a", b"b")

    def take(pause):
        consumer = ShareConsumer(world.root, "t", group="g")
        consumer.poll()
        pause()

    consumer = world.consumer()
    with PausedChild(take) as child:
        assert consumer.poll() == []
        child.kill()
        records = consumer.poll(patient(10) * 1000)

    assert [(record.value, record.delivery_count) for record in records] == [(b"a", 2), (b"b", 2)]
    assert len(world.group.members()) == 1


def test_a_consumer_that_is_garbage_loses_its_records(world):
    """S8: as one whose process ended."""
    world.append(b"a")
    consumer = ShareConsumer(world.root, "t", group="g")
    consumer.poll()
    del consumer

    assert values(world.consumer().poll(patient(10) * 1000)) == [b"a"]


@pytest.mark.parametrize("commits", [False, True])
def test_a_renewed_lock_lasts_longer(world, commits):
    """S6: a renewed record is returned by the next poll, before any others, as in Kafka."""
    world.append(b"a", b"b")
    consumer, other = world.consumer(share_acknowledgement_mode="explicit"), world.consumer()
    (record,) = consumer.poll(max_records=1)
    for _ in range(3):
        world.wait(20)
        consumer.acknowledge(record, "renew")
        if commits:
            assert consumer.commit() == {TopicPartition("t", 0): None}
        assert consumer.poll() == [record]
        with pytest.raises(IllegalStateError, match="not acknowledged"):
            consumer.poll()
    assert record.delivery_count == 1
    assert values(other.poll()) == [b"b"]
    consumer.acknowledge(record)
    consumer.commit()
    other.commit()

    assert world.lag() == 0


def test_renewals_can_be_forbidden(world):
    world.group.alter({"share.renew.acknowledge.enable": "false"})
    world.append(b"a")
    consumer = world.consumer()
    (record,) = consumer.poll()

    with pytest.raises(IllegalStateError, match="must not renew"):
        consumer.acknowledge(record, "renew")


def test_the_window_is_limited(world):
    """S9: records that are done do not count, wherever the start is."""
    world.group.alter({"share.partition.max.record.locks": 4})
    world.append(*NUMBERS)
    slow, fast = world.consumer(), world.consumer()
    assert values(slow.poll(max_records=1)) == [b"0"]
    assert values(fast.poll()) == NUMBERS[1:4]
    assert values(fast.poll()) == NUMBERS[4:7]
    assert values(slow.poll()) == [NUMBERS[7]]


def test_one_slow_record_delays_no_other(world):
    """S9."""
    world.group.alter({"share.partition.max.record.locks": 10})
    slow, fast = world.consumer(), world.consumer()
    world.append(b"slow", *NUMBERS * 10)
    slow.poll(max_records=1)
    done = sum(len(fast.poll()) for _ in range(20))

    assert done == 100


# Giving up


@pytest.mark.parametrize("how", ["release", "lock", "kill"])
def test_a_record_is_given_up_after_its_last_delivery(world, how):
    """S10: without a topic of dead letters it is archived."""
    world.group.alter({"share.delivery.count.limit": 2})
    world.append(b"a")
    for count in (1, 2):
        consumer = world.consumer()
        (record,) = consumer.poll(patient(10) * 1000)
        assert record.delivery_count == count
        if how == "release":
            consumer.acknowledge(record, "release")
            consumer.commit()
        elif how == "lock":
            world.wait(31)
        else:
            consumer._session.unlock()
    assert world.consumer().poll() == []
    assert world.lag() == 0


def test_a_rejected_record_becomes_a_dead_letter(world):
    """S11: once, with its reason, when the commit returns."""
    world.group.alter({"errors.deadletterqueue.topic.name": "dlq"})
    world.append(b"a", b"b", key=b"k")
    consumer = world.consumer()
    first, second = consumer.poll()
    consumer.acknowledge(first, "reject", cause=ValueError("bad"))
    consumer.acknowledge(second, "reject")
    consumer.commit()
    with embedlog.open(world.path, maintenance=False) as log:
        letters = list(log.dead_letters("dlq"))

    assert [letter.record.value for letter in letters] == [b"a", b"b"]
    assert [letter.record.key for letter in letters] == [b"k", b"k"]
    failures = [letter.failure for letter in letters]
    assert [(each.topic, each.offset, each.group) for each in failures] == [
        ("t", 0, "g"),
        ("t", 1, "g"),
    ]
    assert [(each.exception, each.message) for each in failures] == [
        ("ValueError", "bad"),
        ("", "The record was rejected"),
    ]
    assert world.lag() == 0


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_a_record_that_failed_too_often_becomes_a_dead_letter(tmp_path, durability):
    """S10, S11: whoever finds it; several that do write it once."""
    world = World(tmp_path / "log", durability=durability)
    world.create()
    world.group.alter(
        {
            "share.auto.offset.reset": "earliest",
            "share.delivery.count.limit": 1,
            "errors.deadletterqueue.topic.name": "dlq",
        }
    )
    world.append(b"a")
    consumers = [world.consumer() for _ in range(3)]
    for consumer in consumers:
        consumer.poll(max_records=1)
    world.wait(31)
    for consumer in consumers:
        assert consumer.poll() == []
    letters = world.root.partition("dlq", 0)
    assert letters.end_offset() == 1
    healthy(world.root)
    world.root.close()


def test_dead_letters_that_are_published(world, monkeypatch):
    """S11: what does not fit into the active segment is published, with the states at its end."""
    world.group.alter({"errors.deadletterqueue.topic.name": "dlq"})
    world.append(*NUMBERS)
    consumer, other = world.consumer(), world.consumer()
    records = consumer.poll(max_records=4)
    announce = ShareGroup.announce
    # It is in the thread of the publication, for which it would wait.
    other._session.letters.due_at = monotonic() + 3600

    def announced(*arguments):
        # Another member takes a step after the publication has begun.
        assert len(other.poll(max_records=1)) == 1
        return announce(*arguments)

    monkeypatch.setattr(live_commit, "escalates", lambda *_: True)
    monkeypatch.setattr(ShareGroup, "announce", announced)
    for record in records[:3]:
        consumer.acknowledge(record, "reject")
    consumer.acknowledge(records[3])
    consumer.commit()
    assert world.root.partition("dlq", 0).end_offset() == 3
    assert (world.partition().current_offset, world.partition().in_flight) == (4, 1)
    other.commit()

    assert world.lag() == 5


def test_the_last_delivery_comes_alone(world):
    """S12: what kills its process takes no other record's last delivery along."""
    world.group.alter({"share.delivery.count.limit": 3})
    world.append(*NUMBERS[:4])
    for _ in range(2):
        consumer = world.consumer()
        assert len(consumer.poll(patient(10) * 1000)) == 4
        consumer._session.unlock()
    consumer = world.consumer()
    polls = [consumer.poll(patient(10) * 1000) for _ in range(4)]

    assert [values(records) for records in polls] == [[number] for number in NUMBERS[:4]]
    assert {record.delivery_count for records in polls for record in records} == {3}
    assert consumer.poll() == []


def test_without_its_topic_a_dead_letter_is_not_waited_for(world, monkeypatch):
    """S11: a failure to write it is tried again, unless the group has no topic for it any more."""
    world.group.alter({"errors.deadletterqueue.topic.name": "dlq"})
    world.append(b"a")
    consumer = world.consumer()
    (record,) = consumer.poll()
    world.root.delete_topic("dlq")
    world.create("dlq")
    consumer.acknowledge(record, "reject")
    consumer.commit()
    assert world.lag() == 1
    world.group.alter({"errors.deadletterqueue.topic.name": None})
    assert consumer.poll() == []

    assert world.lag() == 0


def test_acknowledgements_of_a_step_that_failed_are_committed_by_the_next(world, monkeypatch):
    """S3: nothing is lost if a lock, or the disk, refuses it."""
    world.append(b"a")
    consumer = world.consumer()
    consumer.poll()
    live = world.root.context.live
    with monkeypatch.context() as patch:
        patch.setattr(live, "write", lambda *_: (_ for _ in ()).throw(DiskFullError("It is full")))
        with pytest.raises(DiskFullError):
            consumer.commit()
    assert consumer.commit() == {TopicPartition("t", 0): None}

    assert world.lag() == 0


def test_a_dead_letter_of_a_typed_topic_has_no_copy_of_its_record(tmp_path):
    """S11: it says where the record is."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("typed", schema=pa.schema([("n", pa.int64())]), key=["n"])
        log.groups["g"].alter(
            {
                "share.auto.offset.reset": "earliest",
                "errors.deadletterqueue.topic.name": "dlq",
            }
        )
        with log.producer() as producer:
            producer.send("typed", {"n": 1})
            producer.send("typed", None, 2)
        with log.share_consumer("typed", group="g") as consumer:
            for record in consumer.poll():
                consumer.acknowledge(record, "reject", cause=ValueError(record.key))
            consumer.commit()

        letters = list(log.dead_letters("dlq"))
        assert [each.failure.message for each in letters] == ["1", "2"]
        assert {each.record[5:7] for each in letters} == {(None, None)}


def test_a_topic_that_cannot_have_dead_letters_is_refused_at_the_first_poll(world):
    """S11: before any record is taken."""
    world.create("other")
    world.group.alter({"errors.deadletterqueue.topic.name": "other"})
    world.append(b"a")

    with pytest.raises(InvalidConfigError, match="not one for dead letters"):
        world.consumer().poll()
    world.group.alter({"errors.deadletterqueue.topic.name": None})


# The log


def test_records_that_retention_deleted_are_done(world):
    """S13: in the window, too; what remains is delivered."""
    world.append(*NUMBERS)
    consumer = world.consumer()
    records = consumer.poll(max_records=4)
    consumer.acknowledge(records[3], "release")
    for record in records[:3]:
        consumer.acknowledge(record)
    delete_records(world.root.partition("t", 0), 6)
    assert consumer.commit() == {TopicPartition("t", 0): None}

    assert world.partition().current_offset == 6
    assert values(consumer.poll()) == NUMBERS[6:]


def test_offsets_without_records_are_done(world):
    """S13: of a log with gaps, such as after compaction."""
    world.append(b"a", b"b")
    world.root.partition("t", 0).skip_to(5000)
    world.append(b"c")
    consumer = world.consumer()
    taken = []
    while records := consumer.poll(max_records=500):
        taken += values(records)
    consumer.commit()

    assert taken == [b"a", b"b", b"c"]
    assert world.partition().current_offset == 5001


def test_a_topic_that_is_created_again_begins_anew(world):
    """S14: acknowledgements of the old one do nothing to the new one."""
    world.append(*NUMBERS)
    consumer = world.consumer()
    consumer.poll()
    world.root.delete_topic("t")
    world.create()
    world.append(b"new")
    results = consumer.commit()
    assert isinstance(results[TopicPartition("t", 0)], UnknownTopicOrPartitionError)

    assert values(consumer.poll()) == [b"new"]


@pytest.mark.parametrize(
    ("reset", "first"),
    [("earliest", 0), ("latest", None), ("by_duration:PT1H", 5), ("by_duration:PT1M", None)],
)
def test_where_a_group_begins(world, reset, first):
    """S2: at the start, the end, or at a time; a partition that is added later at its start."""
    world.group.alter({"share.auto.offset.reset": reset})
    world.append(*NUMBERS[:5])
    world.root.clock.advance(timedelta(hours=2) // timedelta(milliseconds=1))
    world.append(*NUMBERS[5:])
    world.root.clock.advance(timedelta(minutes=30) // timedelta(milliseconds=1))
    consumer = world.consumer()
    expected = [] if first is None else NUMBERS[first:]
    assert values(consumer.poll()) == expected
    world.root.grow_topic("t", 2)
    world.append(b"later", partition=1)

    assert values(consumer.poll()) == [b"later"]


def test_a_topic_that_does_not_exist_yet_is_waited_for(world):
    """S2: and read from its start."""
    world.group.alter({"share.auto.offset.reset": "latest"})
    consumer = world.consumer("t", "later")
    assert consumer.poll() == []
    world.create("later")
    world.append(b"a", topic="later")

    assert values(consumer.poll()) == [b"a"]


def test_a_value_that_cannot_be_deserialized(world):
    """S15: an error that names it, beside the others; it is released, or rejected."""
    world.append(b"1", b"x", b"3")
    consumer = world.consumer(value_deserializer="json")
    assert values(consumer.poll()) == [1, 3]
    with pytest.raises(RecordDeserializationError) as raised:
        consumer.poll()
    assert raised.value.offset == 1
    with pytest.raises(RecordDeserializationError) as raised:
        consumer.poll()  # It was released.
    consumer.acknowledge(raised.value, "reject")

    assert consumer.poll() == []
    assert world.lag() == 0


# Modes


@pytest.mark.parametrize(("seconds", "again"), [(0, [b"b"]), (31, [b"a", b"b"])])
def test_in_explicit_mode_each_record_must_be_acknowledged(world, seconds, again):
    """S3: before more are asked for, also if its lock has ended, as in Kafka."""
    world.append(b"a", b"b")
    consumer = world.consumer(**{"share.acknowledgement.mode": "explicit"})
    first, second = consumer.poll()
    consumer.acknowledge(first)
    world.wait(seconds)
    with pytest.raises(IllegalStateError, match="not acknowledged"):
        consumer.poll()
    consumer.acknowledge(second, "release")

    assert values(consumer.poll()) == again


def test_a_record_is_acknowledged_once(world):
    """S3: and only by the consumer that holds it."""
    world.append(b"a")
    consumer, other = world.consumer(), world.consumer()
    (record,) = consumer.poll()
    with pytest.raises(IllegalStateError):
        other.acknowledge(record)
    with pytest.raises(ValueError, match="verdict"):
        consumer.acknowledge(record, "maybe")
    consumer.acknowledge(record)
    consumer.commit()

    with pytest.raises(IllegalStateError):
        consumer.acknowledge(record)


def test_close_releases_what_is_not_acknowledged(world):
    """S3: what was taken and not given to the program does not count as a delivery."""
    world.append(*NUMBERS)
    consumer = world.consumer()
    consumer._chunk = 5
    for record in consumer:
        if record.value == b"1":
            break
    consumer.close()
    records = world.consumer().poll()

    assert values(records) == NUMBERS[1:]
    assert [record.delivery_count for record in records] == [2] + [1] * 8
    with pytest.raises(ClosedError):
        consumer.poll()


def test_iteration_accepts_a_record_when_the_next_one_is_asked_for(world):
    """S3."""
    world.append(*NUMBERS)
    taken = []
    with world.consumer(consumer_timeout_ms=50) as consumer:
        for record in consumer:
            taken.append(record.value)

    assert taken == NUMBERS
    assert world.lag() == 0


def test_a_callback_gets_what_was_committed_and_refused(world):
    world.append(b"a", b"b")
    consumer, seen = world.consumer(), []
    consumer.set_acknowledgement_commit_callback(lambda *told: seen.append(told))
    consumer.poll(max_records=1)
    consumer.poll()
    world.wait(31)
    consumer.commit()

    partition = TopicPartition("t", 0)
    assert seen[0] == ({partition: {0}}, None)
    assert seen[1][0] == {partition: {1}}
    assert isinstance(seen[1][1], InvalidRecordStateError)


def test_a_callback_is_not_told_what_closing_releases(world):
    """As in Kafka: the program said nothing of it; of a renewal it is told."""
    world.append(b"a", b"b", b"c")
    consumer, seen = world.consumer(), []
    consumer.set_acknowledgement_commit_callback(lambda *told: seen.append(told))
    for record, verdict in zip(consumer.poll(), ("accept", "renew", None), strict=True):
        if verdict is not None:
            consumer.acknowledge(record, verdict)
    consumer.close()

    assert seen == [({TopicPartition("t", 0): {0, 1}}, None)]
    assert [each.delivery_count for each in world.consumer().poll()] == [2, 2]


def test_a_record_is_a_record(world):
    """It can be pickled, and compared with others."""
    world.append(b"a")
    (record,) = world.consumer().poll()
    copy = pickle.loads(pickle.dumps(record))

    assert copy == record
    assert copy.delivery_count == 1


# Tasks


def test_each_task_has_its_own_records(world):
    """S16: a task that asks for more accepts only what it has."""
    world.append(*NUMBERS)

    async def work():
        consumer = world.consumer()
        slow = await consumer.getone()

        async def drain():
            taken = []
            while len(taken) < 9:
                taken.append((await consumer.getone()).value)
            return taken

        taken = await asyncio.create_task(drain())
        assert slow.value not in taken
        assert world.partition().current_offset == 0
        await consumer.commit()
        assert world.partition().current_offset == 9
        await consumer.aclose()

    asyncio.run(work())


def test_a_loop_in_a_task(world):
    """S16: ``async for`` does as the loop without one."""
    world.append(*NUMBERS)

    async def work():
        taken = []
        async with world.consumer(consumer_timeout_ms=50) as consumer:
            async for record in consumer:
                taken.append(record.value)
        return taken

    assert asyncio.run(work()) == NUMBERS
    assert world.lag() == 0


# Groups


def test_a_group_is_of_one_kind(world):
    """S17: the other kind is refused, as long as the group exists, also after a reboot."""
    world.append(b"a")
    world.consumer().poll()
    plain = embedlog.Consumer(world.root, "t", group_id="g")
    with pytest.raises(InconsistentGroupProtocolError, match="share group"):
        plain.poll()
    world.consumers.pop().close()
    outside = embedlog.Consumer(world.root, group_id="g")
    for _ in range(2):
        with pytest.raises((InconsistentGroupProtocolError, CommitFailedError)):
            outside.commit({TopicPartition("t", 0): OffsetAndMetadata(1)})
        world.reboot()
        outside = embedlog.Consumer(world.root, group_id="g")
    with Producer(world.root, transactional_id="") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send_offsets_to_transaction({TopicPartition("t", 0): 1}, "g")
        with pytest.raises(InconsistentGroupProtocolError):
            producer.commit_transaction()
        producer.abort_transaction()

    assert world.lag() == 1
    assert world.group.describe().kind == "share"


def test_a_consumer_group_is_no_share_group(world):
    """S17."""
    with embedlog.Consumer(world.root, "t", group_id="g", auto_offset_reset="earliest") as plain:
        plain.poll()
        with pytest.raises(InconsistentGroupProtocolError, match="consumer group"):
            world.consumer().poll()
        world.append(b"a")
        plain.poll()
        plain.commit()
    with pytest.raises(InconsistentGroupProtocolError, match="consumer group"):
        world.consumer().poll()
    world.group.delete()
    world.group.alter({"share.auto.offset.reset": "earliest"})

    assert values(world.consumer().poll()) == [b"a"]


def test_metadata_of_other_groups_cannot_be_that_of_a_share_group(world):
    """S17: a commit that would make one of a consumer group is refused."""
    outside = embedlog.Consumer(world.root, group_id="other")

    with pytest.raises(ValueError, match="must not begin"):
        outside.commit({TopicPartition("t", 0): OffsetAndMetadata(1, "\0share:")})


def test_describe_reset_and_delete(world):
    """S18: as for other groups, while there are no members."""
    world.append(*NUMBERS)
    consumer = world.consumer()
    (record,) = consumer.poll(max_records=1)
    consumer.acknowledge(record, "release", delay=60)
    consumer.poll(max_records=5)
    consumer.commit()
    described = world.group.describe()
    assert (described.state, described.kind, described.lag) == ("Stable", "share", 5)
    assert [member.pid for member in described.members] == [os.getpid()]
    assert described.partitions[0].metadata == ""
    with pytest.raises(NonEmptyGroupError):
        world.group.reset_offsets("earliest", dry_run=False)
    consumer.close()
    assert world.group.state == "Empty"
    world.group.reset_offsets(3, dry_run=False)
    assert values(world.consumer().poll()) == NUMBERS[3:]
    world.consumers.pop().close()
    world.group.delete()

    assert world.group.state == "Dead"
    assert world.group.config.overrides() == {}


def test_settings_are_checked(world):
    with pytest.raises(InvalidConfigError, match="share_delivery_count_limit"):
        world.group.alter({"share.delivery.count.limit": 0})
    with pytest.raises(InvalidConfigError, match="by_duration"):
        world.group.alter({"share.auto.offset.reset": "by_duration:x"})
    with pytest.raises(InvalidConfigError, match="no setting"):
        world.group.alter({"share.locks": 0})
    with pytest.raises(InvalidConfigError, match="no setting auto_offset_reset"):
        world.consumer(auto_offset_reset="earliest")
    with pytest.raises(InvalidConfigError, match="no setting"):
        world.consumer(share_record_lock_duration_ms=1)

    assert world.group.config.overrides() == {"share.auto.offset.reset": "earliest"}


def test_a_member_that_was_removed_joins_again(world):
    """S8: an administrator removed it; others have its records."""
    world.append(b"a")
    consumer = world.consumer()
    consumer.poll()
    world.group.remove_members(world.group.members()[0].member_id)
    assert values(world.consumer().poll(patient(10) * 1000)) == [b"a"]
    results = consumer.commit()

    assert isinstance(results[TopicPartition("t", 0)], InvalidRecordStateError)
    assert consumer.poll() == []
    assert len(world.group.members()) == 2


def test_a_forked_child_has_no_records_of_its_parent(world):
    """S8: it joins by itself, and its parent keeps what it has."""
    world.append(b"a", b"b")
    consumer = world.consumer()
    consumer.poll(max_records=1)

    def child():
        records = values(consumer.poll())
        consumer.commit()
        consumer.close()
        return records

    assert forks.call(child) == [b"b"]
    assert consumer.commit() == {TopicPartition("t", 0): None}
    assert world.lag() == 0


def test_after_a_power_cut_nothing_is_lost(world):
    """S19: the group is as of its last checkpoint; what was acquired is delivered again."""
    world.append(*NUMBERS)
    world.root.flush()
    consumer = world.consumer()
    records = consumer.poll(max_records=4)
    consumer.acknowledge(records[0], "release", delay=60)
    consumer.acknowledge(records[2])
    consumer.commit()
    consumer.poll(max_records=1)
    world.root.context.checkpoint()
    consumer.poll(max_records=3)
    world.reboot()
    again = world.consumer().poll()

    assert values(again) == [b"0", *NUMBERS[4:]]
    assert [record.delivery_count for record in again[:3]] == [2, 2, 1]


def test_records_that_a_power_cut_took_are_delivered_when_they_are_written_again(world):
    """S19: what was accepted past the recovered end does not count for the next records there."""
    world.append(b"a")
    world.root.flush()
    world.append(b"b", b"c")
    consumer = world.consumer()
    consumer.poll(max_records=1)
    records = consumer.poll(max_records=2)
    consumer.acknowledge(records[1])
    consumer.commit()
    world.root.context.checkpoint()
    log = world.root.partition("t", 0)
    path = world.path / log.path_of(log.active_segment)
    size = log.tail().log_end_position - 8
    abandon(world.root)
    os.truncate(path, size)
    world.reboot()
    end = world.root.partition("t", 0).end_offset()
    assert end < 3
    world.append(b"x", b"y", b"z")
    taken = values(world.consumer().poll())

    assert taken[-3:] == [b"x", b"y", b"z"]


def test_records_behind_a_truncation_are_delivered(world):
    """S19: what was accepted there says nothing of the records that are there now."""
    world.append(*NUMBERS)
    consumer = world.consumer()
    consumer.poll()
    consumer.commit()
    world.root.partition("t", 0).truncate_to(4)
    world.append(*[b"new"] * 8)

    assert values(consumer.poll()) == [b"new"] * 8


def test_threads_are_refused_as_by_other_consumers(world):
    """Only `wakeup` and `close` may be called from others."""
    consumer = world.consumer()
    consumer.wakeup()
    with pytest.raises(embedlog.errors.WakeupError):
        consumer.poll(1000)
    with consumer._guard:

        async def other():
            with pytest.raises(IllegalStateError, match="Another thread"):
                await asyncio.to_thread(consumer.poll)

        asyncio.run(other())
