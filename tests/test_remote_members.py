"""Members on the wire of groups of the log: one group with programs in Python (M28 to M34)."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from typing import Any

import pytest
from support.patience import patient
from support.tiers import choose
from support.wire_members import Classic, Modern, Partitions, partitions, subscription

import embedlog
from embedlog.errors import InconsistentGroupProtocolError
from embedlog.record import TopicPartition
from embedlog.server import heartbeat_answers
from embedlog.server.error_codes import ErrorCode

SHORT = 300
"""A timeout in ms that tests wait for."""
ALL = partitions(*range(4))


@pytest.fixture
def log(embedlog_log):
    embedlog_log.create_topic("t", 4)
    return embedlog_log


@pytest.fixture
def clients(log, kafka_server):
    """Return a function that makes a client, of a kind, with its topics and fields."""
    with ExitStack() as stack:

        def make(kind: Any, *topics: str, address: str = "", **fields: Any) -> Any:
            address = address or kafka_server.bootstrap_servers
            client = kind(address, *(topics or ("t",)), **fields)
            stack.callback(client.close)
            return client

        yield make


def generation(log: Any) -> int:
    return int(log.groups["g"].describe().generation)


def owners(log: Any) -> dict[TopicPartition, str]:
    """Return the owners of partitions, by the rows."""
    members = log.groups["g"].members()
    return {tp: member.member_id for member in members for tp in member.partitions}


def until_stable(*members: Any) -> None:
    """Have members ask until all partitions have found their owners."""
    for _ in range(50):
        before = [set(each.has) for each in members]
        for each in members:
            if isinstance(each, Modern):
                assert each.confirm() == 0
            elif each.heartbeat() != 0:
                assert each.join().error_code == 0
                each.sync()
        if sum(len(each.has) for each in members) == 4 and before == [each.has for each in members]:
            return
    raise AssertionError("the assignment keeps changing")


# KIP-848


def test_a_partition_moves_once_it_was_given_up(log, clients):
    """The epoch of its owner advances only then, and the other waits for it."""
    first, second = clients(Modern), clients(Modern)
    assert first.join() == ALL
    assert first.epoch == 2
    assert second.join() == set()
    assert second.epoch == 3
    before = set(first.has)
    assert first.beat() == 0
    assert (first.epoch, len(first.has)) == (2, 2)
    assert second.confirm() == 0
    assert second.has == set()
    assert set(owners(log).values()) == {first.id}
    assert first.confirm() == 0
    assert first.epoch == 3
    assert second.confirm() == 0
    assert second.has == before - first.has
    assert set(owners(log).values()) == {first.id, second.id}
    assert first.ask().assignment is None  # It has not changed.


def test_epochs_are_checked(log, clients):
    """An answer may have been lost; anything else gives up all, and joins again."""
    member = clients(Modern)
    member.join()
    member.confirm()
    assert member.beat(subscribed_topic_names=["t", "other"]) == 0
    assert member.epoch == 3
    assert member.ask(member_epoch=2, topic_partitions=member.owned()).member_epoch == 3
    fenced = ErrorCode.FENCED_MEMBER_EPOCH
    assert member.ask(member_epoch=2).error_code == fenced
    assert member.ask(member_epoch=4).error_code == fenced
    assert member.ask(member_id="nobody").error_code == ErrorCode.UNKNOWN_MEMBER_ID
    member.epoch, member.has = 0, set()
    assert member.join() == ALL
    assert member.ask(member_epoch=-1).member_epoch == -1
    assert member.ask().error_code == ErrorCode.UNKNOWN_MEMBER_ID
    assert log.groups["g"].state == "Empty"


def test_commits_name_an_epoch(log, clients):
    """One that has the partition since, or the current one of a partition that nobody has."""
    first, second = clients(Modern), clients(Modern)
    first.join()
    second.join()
    stale = ErrorCode.STALE_MEMBER_EPOCH
    assert first.commit(3, 0) == first.commit(3, 3) == 0
    assert first.commit(3, generation_id_or_member_epoch=first.epoch + 1) == stale
    assert second.commit(4, 3) == stale  # The first has it still.
    assert second.commit(4, member_id="nobody") == ErrorCode.UNKNOWN_MEMBER_ID
    until_stable(first, second)
    moved = next(iter(second.has)).partition
    assert first.commit(9, moved) == stale
    assert second.commit(5, moved) == 0
    assert second.commit(6, moved, generation_id_or_member_epoch=second.epoch - 2) == stale
    assert log.groups["g"].describe().partitions[moved].current_offset == 5
    fields: dict[str, Any] = {"group_id": "g", "topics": None, "member_id": first.id}
    for epoch, code in ((first.epoch, 0), (first.epoch - 1, stale)):
        groups = [{**fields, "member_epoch": epoch}]
        answer = first.client.ask("OffsetFetch", 9, groups=groups).groups[0]
        assert answer.error_code == code
    topics = [{"name": "t", "partition_indexes": [0]}]
    for name in ("no", ""):
        of_no_group = [{**fields, "group_id": name, "topics": topics, "member_epoch": 1}]
        answer = first.client.ask("OffsetFetch", 9, groups=of_no_group).groups[0]
        assert (answer.error_code, answer.topics[0].partitions[0].committed_offset) == (0, -1)


def test_a_static_member_comes_back(log, clients):
    """It gets what it had, without a rebalance; while it lives, nobody takes its place."""
    first = clients(Modern, instance_id="one")
    other = clients(Modern, instance_id="two")
    first.join()
    other.join()
    until_stable(first, other)
    had, number = set(first.has), generation(log)
    again = clients(Modern, instance_id="one")
    assert again.beat() == ErrorCode.UNRELEASED_INSTANCE_ID
    assert first.ask(member_epoch=-2).member_epoch == -2
    assert set(owners(log).values()) == {first.id, other.id}
    assert again.join() == had
    assert first.ask().error_code == ErrorCode.FENCED_INSTANCE_ID
    assert first.commit(1, next(iter(had)).partition) == ErrorCode.UNKNOWN_MEMBER_ID
    assert generation(log) == number


def test_a_static_member_that_died_is_replaced(log, clients, monkeypatch):
    """Once its time is over, by whoever comes first: there may be no other member (M8, M13)."""
    monkeypatch.setattr(heartbeat_answers, "SESSION_MS", SHORT)
    assert clients(Modern, instance_id="one").join() == ALL
    again = clients(Modern, instance_id="one")
    time.sleep(2 * SHORT / 1000)
    assert again.join() == ALL


def test_a_pattern_follows_the_topics(log, clients):
    """It is one of RE2, of the whole name, and not of internal topics."""
    member = clients(Modern, subscribed_topic_names=None, subscribed_topic_regex=r"(?i)T\d?|no")
    assert member.join() == ALL
    log.create_topic("t1")
    log.create_topic("xt1")
    assert member.confirm() == 0
    assert member.has == ALL | partitions(0, topic="t1")
    log.delete_topic("t1")
    assert member.confirm() == 0
    assert member.has == ALL
    every = clients(Modern, group="other", subscribed_topic_names=[], subscribed_topic_regex=".*")
    assert {tp.topic for tp in every.join()} == {"t", "xt1"}
    for wrong in ("a)(b", "[", "(?=t)"):
        code = clients(Modern, subscribed_topic_regex=wrong).beat()
        assert code == ErrorCode.INVALID_REGULAR_EXPRESSION


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"member_id": ""}, ErrorCode.INVALID_REQUEST),
        ({"member_id": "x" * 141}, ErrorCode.INVALID_REQUEST),
        ({"member_id": "a\0b"}, ErrorCode.INVALID_REQUEST),
        ({"group_id": ""}, ErrorCode.INVALID_REQUEST),
        ({"group_id": "a\0b"}, ErrorCode.INVALID_GROUP_ID),
        ({"instance_id": ""}, ErrorCode.INVALID_REQUEST),
        ({"rebalance_timeout_ms": -1}, ErrorCode.INVALID_REQUEST),
        ({"topic_partitions": None}, ErrorCode.INVALID_REQUEST),
        ({"subscribed_topic_names": None}, ErrorCode.INVALID_REQUEST),
        ({"member_epoch": -3}, ErrorCode.INVALID_REQUEST),
        ({"member_epoch": -2}, ErrorCode.INVALID_REQUEST),
        ({"member_epoch": 5}, ErrorCode.UNKNOWN_MEMBER_ID),
        ({"server_assignor": "mine"}, ErrorCode.UNSUPPORTED_ASSIGNOR),
    ],
)
def test_a_heartbeat_that_cannot_be_is_refused(log, clients, fields, code):
    """And the group has no member by it."""
    assert clients(Modern).beat(**fields) == code
    assert list(log.groups) == []


def test_who_does_not_give_up_in_time_is_removed(log, clients):
    """Though it sends heartbeats."""
    first, second = clients(Modern, rebalance_timeout_ms=SHORT), clients(Modern)
    first.join()
    second.join()
    while first.ask().error_code == 0:
        second.confirm()
        time.sleep(0.02)
    until_stable(second)
    assert second.has == ALL


def test_a_silent_client_is_removed(log, clients, monkeypatch):
    """After its session, by whoever of the group asks next, also a program in Python."""
    monkeypatch.setattr(heartbeat_answers, "SESSION_MS", SHORT)
    clients(Modern).join()
    with log.consumer("t", group_id="g", heartbeat_interval_ms=50) as consumer:
        while consumer.assignment() != ALL:
            consumer.poll(timeout_ms=20)


# Classic members


@pytest.mark.parametrize("cooperative", [False, True])
def test_a_classic_member_is_assigned_by_the_server(log, clients, cooperative):
    """It leads nothing, and joins again when it must give up partitions or may have more."""
    first, second = (clients(Classic, cooperative=cooperative) for _ in range(2))
    assert first.settle() == ALL
    answer = second.join()
    assert (answer.leader, answer.members) == ("", [])
    assert second.sync() == 0
    assert second.has == set()
    assert first.heartbeat() == ErrorCode.REBALANCE_IN_PROGRESS
    first.settle()
    assert second.heartbeat() == ErrorCode.REBALANCE_IN_PROGRESS
    second.settle()
    assert first.has | second.has == ALL
    assert not first.has & second.has
    assert second.leave() == 0
    assert second.heartbeat() == ErrorCode.UNKNOWN_MEMBER_ID
    assert first.heartbeat() == ErrorCode.REBALANCE_IN_PROGRESS
    assert first.settle() == ALL
    first.generation += 1
    assert first.heartbeat() == first.commit(1) == ErrorCode.ILLEGAL_GENERATION


def test_a_static_classic_member_comes_back(log, clients):
    first = clients(Classic, instance="one")
    assert first.settle() == ALL
    again = clients(Classic, instance="one")
    assert again.settle() == ALL
    assert generation(log) == 1
    assert first.heartbeat() == ErrorCode.FENCED_INSTANCE_ID
    assert first.commit(1, group_instance_id="one") == ErrorCode.FENCED_INSTANCE_ID


def test_a_classic_member_says_what_it_has_joined_with(log, clients):
    """In a request to sync; and a refusal to join names no protocol, or null from version 7 on."""
    member = clients(Classic)
    assert member.settle() == ALL
    who = {"group_id": "g", "member_id": member.id, "generation_id": member.generation}
    for name, code in {
        "roundrobin": ErrorCode.INCONSISTENT_GROUP_PROTOCOL,
        "range": ErrorCode.NONE,
        None: ErrorCode.NONE,
    }.items():
        answer = member.client.ask("SyncGroup", 5, **who, protocol_name=name, assignments=[])
        assert answer.error_code == code
    for version, name in {6: "", 7: None}.items():
        fields = {"group_id": "g", "session_timeout_ms": 0, "protocol_type": "consumer"}
        answer = member.client.ask("JoinGroup", version, **fields, protocols=[])
        assert (answer.error_code, answer.protocol_name) == (
            ErrorCode.INCONSISTENT_GROUP_PROTOCOL,
            name,
        )


def test_whoever_commits_for_a_group_without_members(log, clients):
    """As with Kafka, which does not ask who it is then; a generation is one of a member."""
    member = clients(Classic)
    member.id = "somebody"
    assert member.commit(3) == ErrorCode.NONE
    member.generation = 4
    assert member.commit(5) == ErrorCode.UNKNOWN_MEMBER_ID
    with log.consumer(group_id="g") as consumer:
        assert consumer.committed(TopicPartition("t", 0)) == 3
    other = clients(Classic)
    other.settle()
    member.generation = -1
    assert member.commit(7) == ErrorCode.UNKNOWN_MEMBER_ID


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_described_group_says_what_a_client_may_do(log, clients, is_asked):
    """All that there is: delete, read, describe, and alter and describe its settings."""
    member = clients(Classic)
    member.settle()
    asked = {"groups": ["g"], "include_authorized_operations": is_asked}
    (described,) = member.client.ask("DescribeGroups", 6, **asked).groups
    assert described.authorized_operations == (3400 if is_asked else -(1 << 31))


def test_a_classic_member_that_does_not_join_again_is_removed(log, clients):
    first, second = clients(Classic, rebalance_timeout_ms=SHORT), clients(Classic)
    first.settle()
    second.join()
    while first.heartbeat() == ErrorCode.REBALANCE_IN_PROGRESS:
        second.heartbeat()
        time.sleep(0.02)
    assert second.settle() == ALL


def test_a_classic_member_that_was_removed_keeps_nothing(log, clients):
    """What it has when it joins again may be another one's, which has read on (M29)."""
    first, second = (clients(Classic, cooperative=True) for _ in range(2))
    assert first.settle() == ALL
    log.groups["g"].remove_members(first.id)
    assert second.settle() == ALL
    assert second.commit(9) == 0
    second.leave()
    assert first.join().error_code == ErrorCode.UNKNOWN_MEMBER_ID
    first.has = set()
    assert first.settle() == ALL


def test_kafkajs_has_a_name_of_its_own_for_round_robin(log, clients):
    """Its members and programs share a group, too."""
    protocols = [{"name": "RoundRobinAssigner", "metadata": subscription(("t",), set())}]
    member = clients(Classic, protocols=protocols)
    answer = member.join()
    assert (answer.leader, answer.protocol_name) == ("", "RoundRobinAssigner")
    assert member.sync() == 0
    assert member.has == ALL
    options = {"group_id": "g", "partition_assignment_strategy": ["roundrobin"]}
    with log.consumer("t", **options) as consumer:
        consumer.poll(timeout_ms=0)
        member.settle()
        consumer.poll(timeout_ms=0)
        assert len(member.has) == len(consumer.assignment()) == 2


# Groups of several kinds


def test_programs_and_clients_share_a_group(log, clients):
    """Of both protocols; each partition has one owner, and commits of all are the group's."""
    modern, classic = clients(Modern), clients(Classic, cooperative=True)
    modern.join()
    with log.consumer("t", group_id="g", enable_auto_commit=False) as consumer:
        classic.join()
        classic.sync()
        for _ in range(10):
            consumer.poll(timeout_ms=0)
            modern.confirm()
            if classic.heartbeat():
                classic.join()
                classic.sync()
        has = [modern.has, classic.has, set(consumer.assignment())]
        assert sorted(map(len, has)) == [1, 1, 2]
        assert set.union(*has) == ALL
        for tp in modern.has:
            assert modern.commit(1, tp.partition) == 0
        for tp in classic.has:
            assert classic.commit(1, tp.partition) == 0
            assert modern.commit(2, tp.partition) == ErrorCode.STALE_MEMBER_EPOCH
        consumer.commit({tp: embedlog.OffsetAndMetadata(1) for tp in consumer.assignment()})
        ask = modern.client.ask
        (listed,) = ask("ListGroups", 5).groups
        assert (listed.group_type, listed.group_state) == ("consumer", "Stable")
        (described,) = ask("ConsumerGroupDescribe", 1, group_ids=["g"]).groups
        assert (described.error_code, described.group_state) == (0, "Stable")
        assert sorted(each.member_type for each in described.members) == [0, 1, 1]
        for each in described.members:
            assert each.assignment == each.target_assignment
        (older,) = ask("DescribeGroups", 5, groups=["g"]).groups
        assert len(older.members) == 3
    assert [part.current_offset for part in log.groups["g"].describe().partitions] == [1] * 4
    until_stable(modern, classic)


def test_another_server_goes_on(log, clients):
    """All that members are is in the log: neither a restart nor a second server is noticed."""
    modern, classic = clients(Modern), clients(Classic)
    modern.join()
    classic.join()
    classic.sync()
    until_stable(modern, classic)
    number, had = generation(log), owners(log)
    for _ in range(2):
        with embedlog.serve(log) as server:
            address = server.bootstrap_servers
            later, older = clients(Modern, address=address), clients(Classic, address=address)
            later.id, later.epoch, later.has = modern.id, modern.epoch, set(modern.has)
            older.id, older.generation, older.has = classic.id, classic.generation, classic.has
            assert later.beat() == older.heartbeat() == 0
            assert later.assigned == modern.has
            for each in (later, older):
                assert each.commit(7, next(iter(each.has)).partition) == 0
    assert (generation(log), owners(log)) == (number, had)


def test_who_has_other_assignors_is_told(log, clients):
    """A group has the members of the log, or members that assign among themselves."""
    modern = clients(Modern)
    modern.join()
    mine = {"protocols": [{"name": "mine", "metadata": b""}]}
    assert clients(Classic, **mine).join().error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    own = clients(Classic, group="own", **mine)
    assert own.join().leader == own.id
    refused = clients(Modern, group="own")
    assert refused.beat() == ErrorCode.GROUP_ID_NOT_FOUND
    (described,) = refused.client.ask("ConsumerGroupDescribe", 1, group_ids=["own"]).groups
    assert described.error_code == ErrorCode.GROUP_ID_NOT_FOUND


def test_a_group_in_memory_keeps_others_out(log, clients):
    """Programs and other servers, as long as it has members and its server lives (M32)."""
    mine = {"protocols": [{"name": "mine", "metadata": b""}], "group": "own"}
    refused = pytest.raises(InconsistentGroupProtocolError, match="in the memory of a server")
    with embedlog.serve(log) as server:
        member = clients(Classic, address=server.bootstrap_servers, **mine)
        assert member.join().leader == member.id
        assert member.sync() == member.commit(5) == 0
        other = clients(Classic, **mine)
        assert other.join().error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
        with refused, log.consumer("t", group_id="own") as consumer:
            consumer.poll(timeout_ms=0)
        assert log.groups["own"].describe().partitions[0].current_offset == 5
    assert other.join().leader == other.id
    with refused, log.consumer("t", group_id="own") as consumer:
        consumer.poll(timeout_ms=0)
    other.leave()
    with log.consumer("t", group_id="own") as consumer:
        consumer.poll(timeout_ms=0)
        assert consumer.assignment() == ALL


class Program:
    """A consumer in Python, as a member that asks when a test says so."""

    def __init__(self, log: Any) -> None:
        self.consumer = log.consumer("t", group_id="g", enable_auto_commit=False)

    @property
    def has(self) -> Partitions:
        return set(self.consumer.assignment())

    def ask(self) -> None:
        self.consumer.poll(timeout_ms=0)

    def leave(self) -> None:
        self.consumer.close()


@pytest.mark.parametrize("seed", range(choose(test=2, all=60, nightly=600)))
def test_no_partition_has_two_owners(seed, log, clients):
    """Whatever members of all kinds do in whatever order, through two servers."""
    dice = random.Random(seed)
    members: list[Any] = []

    def leave(member: Any) -> None:
        members.remove(member)
        if isinstance(member, Modern):
            assert member.ask(member_epoch=-1).error_code == 0
        else:
            member.leave()

    def ask(member: Any) -> None:
        if isinstance(member, Modern):
            # What it was told to give up it has given up by now, or not yet.
            had = set(member.has)
            code = member.beat() if dice.random() < 0.5 else member.confirm()
            assert code == 0
            if dice.random() < 0.7:
                member.has |= had - (member.assigned or set())
        elif isinstance(member, Classic):
            if member.generation < 0 or (dice.random() < 0.8 and member.heartbeat()):
                assert member.join().error_code == 0
                if dice.random() < 0.9:
                    member.sync()
        else:
            member.ask()

    with embedlog.serve(log) as second, ExitStack() as stack:
        kinds: list[Any] = [
            lambda: clients(Modern, address=dice.choice(["", second.bootstrap_servers])),
            lambda: clients(Classic),
            lambda: clients(Classic, cooperative=True, address=second.bootstrap_servers),
            lambda: Program(log),
        ]
        for _ in range(100):
            if len(members) < 2 or (len(members) < 5 and dice.random() < 0.15):
                members.append(dice.choice(kinds)())
                if isinstance(members[-1], Program):
                    stack.callback(members[-1].leave)
                ask(members[-1])
            elif dice.random() < 0.1:
                leave(dice.choice(members))
            else:
                ask(dice.choice(members))
            readers = [tp for each in members for tp in each.has]
            assert len(readers) == len(set(readers))
            rows = owners(log)
            for each in members:
                if not isinstance(each, Program):
                    assert {rows.get(tp) for tp in each.has} <= {each.id}
        deadline = time.monotonic() + patient(20)
        while sum(len(each.has) for each in members) < 4:
            assert time.monotonic() < deadline
            for each in members:
                if isinstance(each, Modern):
                    each.confirm()
                elif isinstance(each, Program):
                    each.ask()
                # One that has not synced since it joined has nothing to do by its heartbeat.
                elif each.generation < 0 or each.heartbeat() or each.sync():
                    each.join()
                    each.sync()
