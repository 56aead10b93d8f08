"""Listeners: what clients tell of a log to those who subscribed to a topic, once per batch."""

from __future__ import annotations

import pytest
from support.roots import open_root

from embedlog.api import Log
from embedlog.listeners import Listener


class Heard(Listener):
    """Adds the events of a client to a list, with their topics."""

    def __init__(self, client, events):
        self.client, self.events = client, events

    def written(self, log, receipt, batch, identity):
        self.events.append(("written", log.topic, receipt.base_offset, batch.count))

    def assigned(self, log, committed, *, late):
        self.events.append(("assigned", log.topic, committed, late))

    def read(self, log, batch, first, stop):
        self.events.append(("read", log.topic, first, stop))

    def committed(self, positions):
        offsets = {partition: position.offset for partition, position in positions.items()}
        self.events.append(("committed", offsets))

    def ceased(self, log):
        self.events.append(("ceased", log.topic))

    def closed(self):
        self.events.append(("closed", self.client.kind, self.client.name))


@pytest.fixture
def log(tmp_path):
    """A log with a topic of any kind, and a compacted one."""
    with Log(open_root(tmp_path / "log")) as log:
        log.create_topic("other")
        log.create_topic("t", config={"cleanup.policy": "compact"})
        yield log


def listen(log):
    """Subscribe to compacted topics; return the list of events."""
    events = []

    def create(client):
        events.append(("created", client.kind, client.name))
        return Heard(client, events)

    log.root.listeners.subscribe(lambda config: config.compacts, create)
    return events


def test_a_listener_hears_of_what_is_written_to_its_topics(log):
    """It is created for the first of them, once for each client; of others it hears nothing."""
    events = listen(log)
    with log.producer(producer_name="p") as producer:
        producer.send("other", b"x").result()
        assert events == []
        producer.send("t", b"x", b"k").result()
        producer.send_batch("t", [b"x"] * 3, keys=[b"k"] * 3).result()

    assert events == [
        ("created", "producer", "p"),
        ("written", "t", 0, 1),
        ("written", "t", 1, 3),
        ("closed", "producer", "p"),
    ]


def test_a_listener_hears_of_what_a_member_reads_and_commits(log):
    """Each batch once, also if its records are returned one by one."""
    events = listen(log)
    with log.producer() as producer:
        for topic in ("t", "other"):
            producer.send_batch(topic, [b"x"] * 3, keys=[b"k"] * 3).result()
    options = {"group_id": "g", "auto_offset_reset": "earliest", "enable_auto_commit": False}
    with log.consumer("t", "other", **options) as consumer:
        for _ in range(6):
            next(consumer)
        consumer.commit()

    assert events[-6:] == [
        ("created", "group", "g"),
        ("assigned", "t", None, False),
        ("read", "t", 0, 3),
        ("committed", {("t", 0): 3, ("other", 0): 3}),
        ("ceased", "t"),
        ("closed", "group", "g"),
    ]


def test_a_consumer_without_a_group_tells_nothing(log):
    """It may read what others read, and commits nothing."""
    events = listen(log)
    with log.producer() as producer:
        producer.send("other", b"x").result()
    log.alter_topic("other", {"cleanup.policy": "compact,delete"})
    with log.consumer("other", auto_offset_reset="earliest") as consumer:
        next(consumer)

    assert events == []


def test_a_subscription_ends_with_the_setting(log):
    """The client notices a change of the topic's settings, and tells the listener of the end."""
    events = listen(log)
    with log.producer() as producer:
        producer.send("t", b"x", b"k").result()
        log.alter_topic("t", {"cleanup.policy": "delete"})
        producer.send("t", b"x", b"k").result()

    assert events[1:] == [("written", "t", 0, 1), ("ceased", "t"), ("closed", "producer", "")]


def test_a_listener_hears_of_a_publication_once_it_is_visible(log):
    """As of a producer, but for topics that it did not subscribe to."""
    events = listen(log)
    with log.transaction("app") as transaction:
        for topic in ("t", "other"):
            transaction.send(topic, b"v", b"k", None, 0, 0)
            transaction.flush()
        assert events == []

    assert events == [
        ("created", "producer", "app"),
        ("written", "t", 0, 1),
        ("closed", "producer", "app"),
    ]
