"""What embedlog logs for the programs that use it: by room, by level, and how often."""

from __future__ import annotations

import fcntl
import logging
import re
import threading
import time
from contextlib import contextmanager

import pytest
from support.roots import encoded

import embedlog
from embedlog import TopicPartition
from embedlog.errors import InvalidConfigError, LockTimeoutError
from embedlog.maintenance import Maintenance, owner

GROUP = {"group_id": "g", "auto_offset_reset": "earliest", "enable_auto_commit": False}
NETWORK = {
    "bootstrap_servers": "kafka:9092",
    "security_protocol": "SASL_SSL",
    "sasl_plain_password": "secret",
    "ssl_cafile": None,
    "api_version": (2, 5),
    "client_dns_lookup": "use_all_dns_ips",
    "receive_buffer_bytes": 32768,
}


@pytest.fixture
def log(tmp_path):
    """An open log with topic "t" of two partitions."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("t", partitions=2)
        yield log


@pytest.fixture
def lines(caplog):
    """Return the messages of a level, by the name of their logger."""
    caplog.set_level(logging.DEBUG, "embedlog")

    def lines(level, logger):
        records = [record for record in caplog.records if record.levelno == level]
        return [record.getMessage() for record in records if record.name == f"embedlog.{logger}"]

    return lines


@contextmanager
def held(path):
    """Hold the lock of a file, as another process would."""
    with open(path, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


# Settings


@pytest.mark.parametrize("kind", ["producer", "consumer"])
def test_a_client_lists_the_settings_of_a_network_that_it_ignores(log, lines, kind):
    """In one line at INFO, without values that may be secret; `strict` refuses them."""
    getattr(log, kind)(**NETWORK).close()

    (line,) = lines(logging.INFO, kind)
    assert line == (
        f"The {kind} has no network, and ignores bootstrap_servers ('kafka:9092' is not "
        "contacted), security_protocol, sasl_plain_password, api_version, client_dns_lookup, "
        "receive_buffer_bytes"
    )
    with pytest.raises(InvalidConfigError, match="bootstrap_servers is a setting for connections"):
        getattr(log, kind)(**NETWORK, strict=True)
    getattr(log, kind)(strict=True).close()
    assert len(lines(logging.INFO, kind)) == 1


@pytest.mark.parametrize(
    ("settings", "timeout_ms"),
    [({"default_api_timeout_ms": 20}, None), ({"request_timeout_ms": 20}, None), ({}, 20)],
)
@pytest.mark.parametrize("member", [True, False])
def test_a_commit_waits_as_long_as_its_timeout(log, settings, timeout_ms, member):
    """Not for the `lock_timeout` of the log, which is 10 s."""
    with log.consumer(**GROUP, **settings) as consumer:
        if member:
            consumer.subscribe(["t"])
            consumer.poll(0)
        else:
            consumer.assign([TopicPartition("t", 0)])
        with (
            held(f"{log.path}/locks/live"),
            pytest.raises(LockTimeoutError, match=r"held the lock for 0\.02 s"),
        ):
            consumer.commit({TopicPartition("t", 0): 0}, timeout_ms=timeout_ms)
        consumer.commit({TopicPartition("t", 0): 0})


# Topics and groups


def test_a_topic_that_is_created_by_itself_is_logged(log, lines):
    """At INFO, once; a misspelt name is found that way."""
    with log.producer() as producer:
        producer.send("flihgts", b"v").result()
        producer.send("flihgts", b"v").result()

    assert lines(logging.INFO, "root") == [
        "Created the topic flihgts by itself, with one partition and defaults"
    ]


@pytest.mark.parametrize("config", [{}, GROUP], ids=["alone", "in a group"])
def test_a_subscription_without_a_topic_is_warned_of_once(log, lines, config):
    """Not in each poll; again only when another topic is missing."""
    with log.consumer("t", "flihgts", **config) as consumer:
        for _ in range(3):
            consumer.poll(0)
        log.create_topic("other")
        consumer.poll(0)
        assert lines(logging.WARNING, "consumer") == [
            "The consumer waits for topics that do not exist: flihgts"
        ]

        log.create_topic("flihgts")
        consumer.poll(0)
        log.delete_topic("t")
        consumer.poll(0)
        assert lines(logging.WARNING, "consumer")[1:] == [
            "The consumer waits for topics that do not exist: t"
        ]


@pytest.mark.parametrize(
    ("config", "subscriptions"), [({}, 1), (GROUP, 2)], ids=["alone", "in a group"]
)
def test_a_pattern_without_a_topic_is_warned_of_once(log, lines, config, subscriptions):
    """In a group again for the next subscription."""
    with log.consumer(**config) as consumer:
        for _ in range(subscriptions):
            consumer.subscribe(pattern="flight.*")
            consumer.poll(0)
            log.create_topic(f"u{len(log.topics())}")
            consumer.poll(0)

    warning = "The consumer waits for a topic that matches the pattern 'flight.*'"
    assert lines(logging.WARNING, "consumer") == [warning] * subscriptions


def test_a_rebalance_is_one_line_of_each_member(log, lines):
    """At INFO: who joins, what each generation assigns, who leaves."""
    first = log.consumer("t", **GROUP, client_id="a")
    first.poll(0)
    second = log.consumer("t", **GROUP, client_id="b")
    for _ in range(3):
        second.poll(0)
        first.poll(0)
    second.close()
    first.poll(0)
    first.close()

    shown = [re.sub(r"-[0-9a-f-]{36}", "", line) for line in lines(logging.INFO, "consumer")]
    assert sorted(shown) == sorted(
        [
            "Group g: member a joined, subscribed to t",
            "Group g, generation 1: member a is assigned t-0, t-1",
            "Group g: member b joined, subscribed to t",
            "Group g, generation 2: member b is assigned t-1",
            "Group g, generation 2: member a is assigned t-0",
            "Group g: member b left",
            "Group g, generation 3: member a is assigned t-0, t-1",
            "Group g: member a left",
        ]
    )
    assert lines(logging.INFO, "group") == [
        "Group g, generation 1: range assigns 2 partitions to 1 member",
        "Group g, generation 2: range assigns 2 partitions to 2 members",
        "Group g, generation 3: range assigns 2 partitions to 1 member",
    ]


def test_a_member_without_partitions_is_warned_of_once(log, lines):
    """Once per rebalance, and not while the topic has no partition at all."""
    consumers = [log.consumer("t", **GROUP, client_id=name) for name in "abc"]
    for _ in range(4):
        for consumer in consumers:
            consumer.poll(0)

    (warning,) = lines(logging.WARNING, "consumer")
    assert re.match(r"Group g has 3 members for 2 partitions, so member c-\S+ gets no", warning)
    for consumer in consumers:
        consumer.close()


def test_commits_and_positions_are_debugged(log, lines):
    """DEBUG has where each partition begins, what is committed, and each seek."""
    zero = TopicPartition("t", 0)
    with log.consumer(**GROUP) as consumer:
        consumer.assign([zero])
        consumer.poll(0)
        consumer.seek(zero, 0)
        consumer.commit({zero: 0})

    assert lines(logging.DEBUG, "consumer") == [
        "t-0: begins at offset 0, without a commit",
        "t-0: seek to offset 0",
        "Group g: committed t-0: 0",
    ]


# The disk


def test_steps_of_a_partition_are_debugged(log, lines):
    """DEBUG has recoveries, rolls, lock waits and decisions of retention."""
    partition = log.partition("t", 0)
    partition.append([encoded(b"v0")])
    partition.roll()
    with held(f"{log.path}/locks/1-0") as file:
        threading.Timer(0.05, fcntl.flock, [file, fcntl.LOCK_UN]).start()
        partition.append([encoded(b"v1")])
    log.alter_topic("t", {"retention.bytes": 0})
    log.housekeeping.run()

    recovery, roll, wait = lines(logging.DEBUG, "partition")[:3]
    assert wait == "t-0: waited for the lock of a process"
    assert recovery.startswith("t-0: recovery from offset 0: the log ends at offset 0; ")
    assert re.match(r"t-0: rolled to segment 0{19}1-\d+\.arrows, after one of \d+ bytes", roll)
    assert lines(logging.DEBUG, "retention") == [
        "t-0: 2 of 2 segments are due, 2 are deleted; kept by: nothing"
    ]
    assert lines(logging.INFO, "retention") == ["t-0: deleted 2 segments below offset 2"]


# Housekeeping


def test_the_owner_of_housekeeping_is_logged(log, lines, monkeypatch):
    """At INFO, when a process begins and ends, so that an operator finds the owner."""
    monkeypatch.setattr(owner, "_FIRST_SECONDS", 0.0)
    maintenance = Maintenance(log.root, ())
    maintenance.start()
    while maintenance.epoch is None:
        assert maintenance._thread.is_alive()
        time.sleep(0.001)
    maintenance.close()

    begins, ends = lines(logging.INFO, "maintenance")
    assert re.match(r"Process \d+ runs the housekeeping of .* from now on$", begins)
    assert re.match(r"Process \d+ no longer runs the housekeeping of ", ends)


# Cost


def test_nothing_is_logged_for_each_record(log, monkeypatch):
    """A program that logs nothing pays nothing: calls are per batch, roll or rebalance."""
    calls = []
    for method in ("debug", "info", "warning", "log", "isEnabledFor"):
        monkeypatch.setattr(logging.Logger, method, lambda *args: calls.append(args[1:]))
    with log.producer() as producer:
        for number in range(2000):
            producer.send("t", b"%d" % number, key=b"%d" % number)
    with log.consumer("t", auto_offset_reset="earliest") as consumer:
        records = list(consumer.iter_records(until="end"))

    assert len(records) == 2000
    assert len(calls) < 100
