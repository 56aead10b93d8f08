"""Share groups against those of a Kafka broker, by Kafka's own Java clients: the same random steps.

And against those of another log, by the same clients, which a server of it takes for a broker.

What differs on purpose is in docs/differences-from-kafka.md, and has a test of its own here.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from random import Random
from time import monotonic, sleep

import pytest
from support.clock import MovedUptime
from support.kafka_topics import KafkaTopics, rows_of
from support.patience import patient
from support.roots import healthy, open_root
from support.share_scripts import (
    Frozen,
    KafkaSide,
    LogSide,
    Members,
    Plan,
    Script,
    TooSlowError,
)
from support.tiers import choose

import embedlog
from embedlog.config import TopicConfig
from embedlog.dead_letter_queue import ENABLED, PREFIX

EARLIEST = {"share.auto.offset.reset": "earliest"}
STEPS = {
    "produce": 4,
    "poll": 6,
    "acknowledge": 3,
    "acknowledge_all": 5,
    "acknowledge_other": 1,
    "commit": 2,
    "close": 1,
}
KAFKAS = {"topic", "partition", "offset", "group", "delivery.count"}
"""The headers of dead letters that Kafka has, too, and whose text is no prose."""
MANY = {"share.delivery.count.limit": "10"}
"""Deliveries: more than any script has, so that polls are not made smaller."""
ATTEMPTS = 5
PLANS = {
    "explicit": Plan(STEPS, settings=EARLIEST | MANY),
    "from the end": Plan(STEPS, settings=MANY),
    "implicit": Plan(
        {"produce": 4, "poll": 5, "commit": 2, "close": 2},
        modes=("implicit",),
        settings=EARLIEST | MANY,
    ),
    "both modes": Plan(STEPS, modes=("explicit", "implicit"), settings=EARLIEST | MANY),
    "few deliveries": Plan(
        STEPS, limits=(1,), settings=EARLIEST | {"share.delivery.count.limit": "3"}
    ),
    "locks that end": Plan({**STEPS, "end_locks": 2}, settings=EARLIEST | MANY),
    "few deliveries, locks that end": Plan(
        {**STEPS, "end_locks": 3},
        limits=(1,),
        settings=EARLIEST | {"share.delivery.count.limit": "2"},
    ),
    "deleted records": Plan({**STEPS, "delete": 2}, settings=EARLIEST | MANY),
    "transactions": Plan(
        {**STEPS, "commit_transaction": 2, "abort_transaction": 2},
        # In Kafka control records, and those that were aborted, take places of a poll.
        limits=(1,),
        settings=EARLIEST | MANY | {"share.isolation.level": "read_committed"},
    ),
}


@pytest.fixture(scope="module", params=["broker", "server"])
def members(request, tmp_path_factory):
    """A process with Kafka's clients, of a broker or of a server of another log."""
    with ExitStack() as stack:
        if request.param == "broker":
            members = Members(request.getfixturevalue("broker").address)
        else:
            log = stack.enter_context(embedlog.open(tmp_path_factory.mktemp("served")))
            server = stack.enter_context(embedlog.serve(log))
            members = Members(server.bootstrap_servers, keeps_aborted=False)
        stack.callback(members.close)
        yield members


@pytest.fixture
def kafka(members, request):
    """Topics of one test, on either."""
    topics = KafkaTopics(members.servers, request.node.originalname.removeprefix("test_")[:60])
    yield topics
    topics.delete()


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(MovedUptime, "ms", 0)
    root = open_root(tmp_path / "log", files=Frozen)
    yield root
    healthy(root)
    root.close()


@pytest.mark.parametrize("kind", PLANS)
def test_random_steps(root, members, kind):
    """What is delivered, in which order, how often, and which errors come, is the same."""
    plan, done = PLANS[kind], Counter()
    for seed in range(choose(test=2, all=6, nightly=40)):
        done += played(root, members, kind, plan, seed).done
    assert done["poll"]


def played(root, members, kind, plan, seed):
    """Play one script, again if it shows nothing, or a difference that may be one of time.

    What differs each time is a difference.  But Kafka's consumers take records in their background
    if an answer comes while they ask again, and locks end while the machine is slow.
    """
    seconds = 2.0 if "end_locks" in plan.steps else 60.0
    for attempt in range(ATTEMPTS):
        name = f"{kind.replace(' ', '-').replace(',', '')}-{seed}-{attempt}"
        settings = {**plan.settings, "share.record.lock.duration.ms": f"{seconds * 1000:.0f}"}
        sides = LogSide(root, name, 1, settings), KafkaSide(members, name, 1, settings)
        script = Script(Random(seed), plan, *sides, seconds)
        try:
            script.run(30)
            return script
        except (AssertionError, TooSlowError) as error:
            script.end()
            seconds = min(2 * seconds, 60.0)
            failure = error
    raise failure


@pytest.fixture
def groups(root, members, request):
    """Makes a group of each side, and polls once, so that both begin."""

    def make(partitions=1, **settings):
        name = request.node.name.removeprefix("test_").replace("[", "-").replace("]", "")[:60]
        settings = EARLIEST | {key.replace("_", "."): str(each) for key, each in settings.items()}
        return LogSide(root, name, partitions, settings), KafkaSide(
            members, name, partitions, settings
        )

    return make


def polled(side, member):
    """Poll for what must come."""
    return side.poll(member, waits=True) if isinstance(side, KafkaSide) else side.poll(member)


def drained(side, count):
    """Accept so many records, and return how often each was delivered."""
    side.open("rest", "implicit", 500)
    found = {}
    while len(found) < count and (got := polled(side, "rest")):
        found |= dict(got)
    side.close("rest")
    return found


def test_partitions_of_one_topic_all_come(groups):
    """In each poll and partition in the order of offsets; between partitions there is none."""
    for side in groups(partitions=3):
        for number in range(12):
            side.produce(2, number % 3)
        found = []
        side.open("a", "implicit", 4)
        while got := side.poll("a"):
            found += got
            numbers = [number for number, _ in got]
            assert all(
                offsets == sorted(offsets)
                for each in range(3)
                for offsets in [[n for n in numbers if side.at(n)[0] == each]]
            )
        side.close("a")
        assert sorted(found) == [(number, 1) for number in range(24)]


def test_the_window_counts_records_that_are_not_done(groups):
    """So a record that takes long does not stop its partition."""
    for side in groups(share_partition_max_record_locks=100):
        side.produce(250)
        side.open("slow", "explicit", 1)
        assert polled(side, "slow") == [(0, 1)]
        # Kafka's consumer may have taken the next one, too.
        assert drained(side, 248).keys() >= {*range(2, 250)}
        side.close("slow")


def test_dead_letters_have_the_same_headers(groups, kafka, members, root):
    """KIP-1191: of a record that is rejected, and of one that is released too often."""
    letters = f"dlq.{kafka.prefix}"
    members.ask("topic", letters, 1, f"{ENABLED}=true")
    root.create_topic(letters, 1, TopicConfig.parse({ENABLED: True}))
    ours, theirs = groups(
        share_delivery_count_limit=2,
        errors_deadletterqueue_topic_name=letters,
        errors_deadletterqueue_copy_record_enable="true",
    )
    for side in (ours, theirs):
        side.produce(3)
        side.open("a", "explicit", 1)
        for expected, verdict in [
            ((0, 1), "reject"),
            ((1, 1), "release"),
            ((1, 2), "release"),
            ((2, 1), "accept"),
        ]:
            assert polled(side, "a") == [expected]
            side.acknowledge("a", expected[0], verdict)
            side.commit("a")
        side.close("a")

    def found(read):
        deadline = monotonic() + min(patient(2), 60)
        while len(rows := read()) < 2 and monotonic() < deadline:
            sleep(0.2)
        return [
            (value, {name: text for name, text in headers if name.removeprefix(PREFIX) in KAFKAS})
            for *_, value, headers in rows
        ]

    of_kafka = found(lambda: kafka.rows(letters))
    of_log = found(lambda: rows_of(embedlog.Log(root), letters))
    assert [value for value, _ in of_kafka] == [b"0", b"1"]
    assert of_log == of_kafka
