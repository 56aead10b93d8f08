"""Message streams are iterators that share the partitions of topics (E26)."""

from __future__ import annotations

import threading
import time

import pytest
from support import forks
from support.patience import patient
from support.roots import open_root

from embedlog.api.consumer_group import ConsumerGroup
from embedlog.config import TopicConfig
from embedlog.consumer.consumer import Consumer
from embedlog.consumer.rebalance_notifier import ConsumerRebalanceListener
from embedlog.errors import ClosedError, IllegalStateError, InvalidGroupIdError
from embedlog.producer import Producer
from embedlog.record import TopicPartition

RECORDS = 200


@pytest.fixture
def shared(tmp_path):
    """A root with the system's clock, and 200 records in four partitions of a topic."""
    root = open_root(tmp_path / "root", clock=lambda: time.time_ns() // 1_000_000)
    root.create_topic("t", 4, TopicConfig())
    fill(root, range(RECORDS))
    yield root
    root.close()


def fill(root, numbers):
    with Producer(root) as producer:
        for number in numbers:
            producer.send("t", b"%d" % number, partition=number % 4)


def reader(root, **settings):
    config = {"group_id": "g", "auto_offset_reset": "earliest"} | settings
    return Consumer(root, **config)


def numbers(records):
    return sorted(int(record.value) for record in records)


def test_each_partition_feeds_exactly_one_stream(shared):
    """Two streams have two partitions each, and every record comes once."""
    with reader(shared, consumer_timeout_ms=100) as consumer:
        first, second = consumer.create_message_streams({"t": 2})["t"]

        assert len(first.assignment()) == len(second.assignment()) == 2
        assert not first.assignment() & second.assignment()
        assert numbers([*first, *second]) == list(range(RECORDS))


def test_all_streams_are_closed_although_the_listener_of_one_raises(shared):
    """The error comes once no member of the group is left."""

    class Raising(ConsumerRebalanceListener):
        def on_partitions_revoked(self, revoked):
            raise OSError("the state cannot be saved")

    consumer = reader(shared)
    first, second = consumer.create_message_streams({"t": 2})["t"]
    first.subscribe(["t"], listener=Raising())
    first.poll(0)
    with pytest.raises(OSError, match="cannot be saved"):
        consumer.close()
    assert not ConsumerGroup(shared, "g").members()
    with pytest.raises(ClosedError):
        second.poll(0)


def test_streams_read_only_their_topic(shared):
    """Each topic gets the requested number of streams."""
    shared.create_topic("u", 1, TopicConfig())
    with Producer(shared) as producer:
        producer.send("u", b"u")
    with reader(shared, consumer_timeout_ms=100) as consumer:
        streams = consumer.create_message_streams({"t": 3, "u": 1})

        assert [len(of_topic) for of_topic in streams.values()] == [3, 1]
        assert [record.value for record in streams["u"][0]] == [b"u"]
        assert {record.topic for stream in streams["t"] for record in stream} == {"t"}


def test_with_more_streams_than_partitions_some_read_nothing(shared):
    """They end at their timeout, and take over partitions when others end."""
    with reader(shared, consumer_timeout_ms=50) as consumer:
        streams = consumer.create_message_streams({"t": 6})["t"]

        assert sorted(len(stream.assignment()) for stream in streams) == [0, 0, 1, 1, 1, 1]
        assert [list(stream) for stream in streams if not stream.assignment()] == [[], []]


def test_a_timeout_ends_an_iterator_that_can_be_resumed(shared):
    """consumer_timeout_ms raises StopIteration; the next iteration continues from there."""
    with reader(shared, consumer_timeout_ms=50) as consumer:
        [stream] = consumer.create_message_streams({"t": 1})["t"]
        assert numbers(stream) == list(range(RECORDS))
        with pytest.raises(StopIteration):
            next(stream)

        fill(shared, [RECORDS])

        assert int(next(stream).value) == RECORDS


def test_closing_the_consumer_ends_streams_that_wait_in_threads(shared):
    """Each returns its records, commits and ends; the next consumer finds no record left."""
    consumer = reader(shared)
    streams = consumer.create_message_streams({"t": 2})["t"]
    records, complete = [], threading.Event()

    def read(stream):
        for record in stream:
            records.append(record)
            if len(records) == RECORDS:
                complete.set()

    threads = [threading.Thread(target=read, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    assert complete.wait(patient(20))
    consumer.close()
    for thread in threads:
        thread.join(patient(20))

    assert not any(thread.is_alive() for thread in threads)
    assert numbers(records) == list(range(RECORDS))
    with reader(shared, consumer_timeout_ms=50) as next_consumer:
        next_consumer.subscribe(["t"])
        assert list(next_consumer) == []
    with pytest.raises(ClosedError):
        streams[0].poll()


def test_close_commits_only_what_was_returned(shared):
    """The next member continues after the last record that the iteration returned."""
    consumer = reader(shared)
    [stream] = consumer.create_message_streams({"t": 1})["t"]
    iterator = iter(stream)
    records = [next(iterator) for _ in range(70)]

    consumer.close()

    records += iterator
    with reader(shared, consumer_timeout_ms=50) as next_consumer:
        next_consumer.subscribe(["t"])
        records += next_consumer
    assert len(records) == RECORDS
    assert numbers(records) == list(range(RECORDS))


def test_a_close_in_another_thread_notifies_the_listener(shared):
    """E24: the listener may commit, as in a close on its own thread."""
    revocations = []

    class Listener(ConsumerRebalanceListener):
        def on_partitions_revoked(self, revoked):
            if revoked:
                consumer.commit({TopicPartition("t", 0): 7})
                revocations.append(revoked)

    consumer = reader(shared, enable_auto_commit=False)
    consumer.subscribe(["t"], listener=Listener())
    thread = threading.Thread(target=lambda: list(consumer))
    thread.start()
    forks.until(consumer._assignment.partitions)
    time.sleep(0.1)
    consumer.close()
    thread.join(patient(20))

    assert not thread.is_alive()
    assert revocations == [{TopicPartition("t", number) for number in range(4)}]
    assert reader(shared).committed(TopicPartition("t", 0)) == 7


def test_close_does_not_wait_forever_for_a_call(shared):
    """After its timeout, the member leaves without a commit."""
    inside, go_on = threading.Event(), threading.Event()

    def slow(value):
        inside.set()
        go_on.wait(patient(20))
        return value

    consumer = reader(shared, value_deserializer=slow)
    consumer.subscribe(["t"])
    thread = threading.Thread(target=lambda: list(consumer))
    thread.start()
    assert inside.wait(patient(20))

    consumer.close(timeout_ms=50)
    go_on.set()
    thread.join(patient(20))

    assert not thread.is_alive()
    assert reader(shared).committed(TopicPartition("t", 0)) is None


def test_static_streams_have_instance_ids_of_their_own(shared):
    """A group_instance_id belongs to one member: each stream appends its topic and number."""
    with reader(shared, group_instance_id="host") as consumer:
        streams = consumer.create_message_streams({"t": 2})["t"]

        names = [stream.group_metadata().group_instance_id for stream in streams]
        assert names == ["host-t-0", "host-t-1"]


@pytest.mark.parametrize("create", [{}, {"allow_auto_create_topics": True}])
def test_streams_create_topics_if_the_consumer_does(shared, create):
    """E19: only if the program said so."""
    with reader(shared, **create) as consumer:
        consumer.create_message_streams({"new": 1})

    assert ("new" in shared.topics()) is bool(create)


@pytest.mark.parametrize("count", [0, -1, True, "2"])
def test_a_number_of_streams_below_one_is_refused(shared, count):
    """No stream joins the group."""
    with reader(shared) as consumer, pytest.raises(ValueError):
        consumer.create_message_streams({"t": count})


def test_a_consumer_that_reads_topics_itself_creates_no_streams(shared):
    """It is a member with partitions already; and a consumer without a group has no streams."""
    with reader(shared) as consumer:
        consumer.subscribe(["t"])
        with pytest.raises(IllegalStateError):
            consumer.create_message_streams({"t": 1})
    with Consumer(shared) as groupless, pytest.raises(InvalidGroupIdError):
        groupless.create_message_streams({"t": 1})
