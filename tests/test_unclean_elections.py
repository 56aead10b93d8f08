"""Elections of copies that are not in sync: by an operator only, and of the longest copy (H15)."""

from __future__ import annotations

import pytest
from support.replicas import assignment, bring_back, send, values

import embedlog
from embedlog import TopicPartition
from embedlog.errors import (
    EligibleLeadersNotAvailableError,
    InvalidConfigError,
)
from embedlog.kafka import KafkaAdminClient
from embedlog.kafka import errors as kafka_errors
from embedlog.kafka.admin import NewTopic
from embedlog.kafka.confluent import ElectionType
from embedlog.kafka.confluent import admin as confluent
from embedlog.replication import reassign
from embedlog.replication import root as replicated_root

T = TopicPartition("t", 0)
BROKEN = OSError("It was unplugged")


def go_offline(log, *directories):
    """Take directories offline that can still be read, as after a write that failed."""
    for each in directories:
        log.root.controller.take_offline({each: BROKEN})


def lengths(log, directories, counts, readable=()):
    """Give each copy its own number of records, and leave the longest one in a lost directory.

    Args:
        log: A log with the topic ``t`` in all directories.
        directories: Its directories.
        counts: How many records each of directories 1 to 3 gets; all different.
        readable: The directories that stay offline and can be read; the longest one is taken
            away unless it is one of them.
    """
    order = sorted(counts, key=counts.__getitem__)
    sent = 0
    for each in order:
        send(log, "t", [b"%d" % n for n in range(sent, counts[each])])
        sent = counts[each]
        go_offline(log, each) if each != order[-1] else None
    longest = order[-1]
    # Two of three must be online: the longest one goes once another one is back.
    replicated_root.try_bring_back(log.root)
    go_offline(log, longest)
    if longest not in readable:
        directories.take(longest)
    assert assignment(log, "t").leader is None


@pytest.fixture
def log(directories):
    """A log over three directories with one topic, in all of them, directory 1 preferred."""
    with directories.open() as log:
        log.create_topic("t", replicas=[(1, 2, 3)])
        yield log


@pytest.mark.parametrize("segment_bytes", [1 << 30, 1200])
@pytest.mark.parametrize(
    ("counts", "leader"),
    [({1: 4, 2: 9, 3: 20}, 2), ({2: 4, 1: 9, 3: 20}, 1), ({3: 7, 2: 3, 1: 9}, 3)],
)
def test_the_longest_copy_that_can_be_had_leads(log, directories, segment_bytes, counts, leader):
    """Not the first of the assignment, as in Kafka; the only longer one is gone."""
    log.alter_topic("t", {"segment.bytes": segment_bytes})
    lengths(log, directories, counts)
    assert log.replicas.elect_leaders() == []
    assert log.replicas.elect_leaders(election="unclean") == [T]
    assert assignment(log, "t").leader == leader
    assert assignment(log, "t").isr == (leader,)
    assert values(log, "t") == [b"%d" % n for n in range(counts[leader])]
    directories.put_back(max(counts, key=counts.__getitem__))
    bring_back(log)
    directories.assert_equal_copies("t")


def test_a_copy_with_fewer_records_than_one_that_can_be_read_does_not_lead(log, directories):
    """The error names both; nothing is changed.  Once the other is back, nothing is lost."""
    lengths(log, directories, {1: 4, 2: 9, 3: 20}, readable={3})
    before = assignment(log, "t")

    with pytest.raises(EligibleLeadersNotAvailableError) as raised:
        log.replicas.elect_leaders(election="unclean")

    text = str(raised.value)
    assert f"{directories.path(2)} has 9 records" in text
    assert f"{directories.path(3)}, which is offline, has 20" in text
    assert assignment(log, "t") == before
    bring_back(log)
    assert values(log, "t") == [b"%d" % n for n in range(20)]


def test_a_directory_that_is_given_up_is_not_counted(log, directories):
    """Then the longest of the others leads."""
    lengths(log, directories, {1: 4, 2: 9, 3: 20}, readable={3})
    log.replicas.remove(str(directories.path(3)), force=True)
    assert assignment(log, "t").leader == 2
    assert values(log, "t") == [b"%d" % n for n in range(9)]


def test_records_of_another_history_are_not_counted(log, directories):
    """Of a copy that has a history of its own only what it shares with the log counts."""
    partition = TopicPartition("u", 0)
    log.create_topic("u", replicas=[(1, 2)])
    send(log, "u", [b"shared"])
    directories.lose(log, 1)
    send(log, "u", [b"of 2"] * 5)
    directories.put_back(1)
    replicated_root.try_bring_back(log.root)
    directories.lose(log, 2)
    assert log.replicas.elect_leaders([partition], election="unclean") == [partition]
    send(log, "u", [b"of 1"])
    directories.put_back(2)
    replicated_root.try_bring_back(log.root)
    go_offline(log, 1)

    with pytest.raises(EligibleLeadersNotAvailableError, match=r"has 1 record, .* has 2 \["):
        log.replicas.elect_leaders([partition], election="unclean")

    bring_back(log)
    assert values(log, "u") == [b"shared", b"of 1"]


def test_a_partition_that_another_process_changed_meanwhile_is_left_alone(
    log, directories, monkeypatch
):
    """What was counted says nothing about another assignment; the result does not name it."""
    lengths(log, directories, {1: 4, 2: 9, 3: 20})
    longest = reassign._longest

    def choose_late(*arguments):
        choice = longest(*arguments)
        directories.put_back(3)
        with directories.open() as other:
            bring_back(other)
        return choice

    monkeypatch.setattr(reassign, "_longest", choose_late)
    assert log.replicas.elect_leaders(election="unclean") == []
    assert values(log, "t") == [b"%d" % n for n in range(20)]


def test_no_program_asks_for_unclean_elections_of_its_own(log, directories, command_line):
    """`unclean.leader.election.enable` can only be false, by every door."""
    name = "unclean.leader.election.enable"
    log.create_topic("false", config={name: "false"})
    for wrong in (True, "true"):
        with pytest.raises(InvalidConfigError, match="must be false"):
            log.create_topic("u", config={name: wrong})
        with pytest.raises(InvalidConfigError, match="must be false"):
            log.alter_topic("t", {name: wrong})
    root = str(directories.path(1))
    code, _, err = command_line("--root", root, "topics", "create", "u", "-c", f"{name}=true")
    assert code == 2
    assert "must be false" in err
    admin = KafkaAdminClient(bootstrap_servers=f"embedlog://{root}")
    with pytest.raises(kafka_errors.KafkaError, match="must be false"):
        admin.create_topics([NewTopic("u", 1, 1, topic_configs={name: "true"})])
    admin.close()
    with confluent.AdminClient({"bootstrap.servers": f"embedlog://{root}"}) as client:
        future = client.create_topics([confluent.NewTopic("u", 1, config={name: "true"})])["u"]
        with pytest.raises(confluent.KafkaException, match="must be false"):
            future.result()
    assert "u" not in log.topics()


def test_every_door_refuses_to_lose_what_another_copy_has(log, directories, command_line):
    """The command line fails; the clients of Kafka have Kafka's error."""
    lengths(log, directories, {1: 4, 2: 9, 3: 20}, readable={3})
    root = str(directories.path(1))
    admin = KafkaAdminClient(bootstrap_servers=f"embedlog://{root}")
    with pytest.raises(kafka_errors.EligibleLeadersNotAvailableError):
        admin.elect_leaders(1, {"t": [0]})
    admin.close()
    with confluent.AdminClient({"bootstrap.servers": f"embedlog://{root}"}) as client:
        kind = ElectionType.UNCLEAN
        partition = confluent.TopicPartition("t", 0)
        (error,) = client.elect_leaders(kind, [partition]).result().values()
        assert error.args[0].name() == "ELIGIBLE_LEADERS_NOT_AVAILABLE"
    command = ("--root", root, "elect-leaders", "t:0", "--election-type", "unclean")
    assert assignment(log, "t").leader is None
    code, _, err = command_line(*command)
    # A command is a process that brings nothing back by itself.
    assert code == 4
    assert "has 9 records" in err
    assert "`embedlog replicas remove PATH --force`" in err


def test_the_command_line_fails_if_a_partition_is_left_without_a_leader(directories, command_line):
    """Its only copy is in a directory that is gone."""
    with directories.open() as log:
        log.create_topic("t", replicas=[(3,)])
        directories.lose(log, 3)
    root = str(directories.path(1))
    for kind in ("preferred", "unclean"):
        code, out, err = command_line("--root", root, "elect-leaders", "--election-type", kind)
        assert (code, out) == (1, "")
        assert "Still without a leader: t-0" in err
    with embedlog.open(root, mode="r") as log:
        assert log.replicas.leaderless == (T,)
