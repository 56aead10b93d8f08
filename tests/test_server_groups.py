"""Classic groups: what members are told when others join, leave, are silent, or come back."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import pytest
from support.children import in_threads
from support.wire_client import WireClient
from support.wire_members import Classic, Modern, commit

from embedlog.record import TopicPartition
from embedlog.server import classic_groups
from embedlog.server.error_codes import ErrorCode

LONG, SHORT = 1_000_000, 800
"""Timeouts in ms: one that no test waits for, and one that tests wait for."""


class Member:
    """A member of a group, with a connection of its own.

    Args:
        address: The address of the server.
        options: Fields of its requests to join.
    """

    def __init__(self, address: str, **options: Any) -> None:
        self.client = WireClient(address)
        self.id, self.generation = "", -1
        self.instance = options.pop("instance", None)
        self.options = {
            "session_timeout_ms": LONG,
            "rebalance_timeout_ms": LONG,
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": b"any"}],
            **options,
        }

    def join(self, version: int = 9) -> Any:
        """Join, with the id that the server gives if it asks for one."""
        fields = {"group_id": "g", "group_instance_id": self.instance, **self.options}
        answer = self.client.ask("JoinGroup", version, member_id=self.id, **fields)
        if answer.error_code == ErrorCode.MEMBER_ID_REQUIRED:
            self.id = answer.member_id
            return self.join(version)
        if not answer.error_code:
            self.id, self.generation = answer.member_id, answer.generation_id
        return answer

    def sync(self, **assignments: bytes) -> Any:
        """Get the assignment; a leader says those of all."""
        parts = [{"member_id": id_, "assignment": data} for id_, data in assignments.items()]
        return self._ask("SyncGroup", 5, assignments=parts)

    def heartbeat(self) -> int:
        return int(self._ask("Heartbeat", 4).error_code)

    def leave(self) -> Any:
        member = {"member_id": self.id, "group_instance_id": self.instance}
        return self.client.ask("LeaveGroup", 5, group_id="g", members=[member])

    def commit(self, offset: int) -> int:
        part = {"partition_index": 0, "committed_offset": offset}
        answer = self._ask(
            "OffsetCommit",
            8,
            generation_id_or_member_epoch=self.generation,
            topics=[{"name": "orders", "partitions": [part]}],
        )
        return int(answer.topics[0].partitions[0].error_code)

    def _ask(self, api: str, version: int, **fields: Any) -> Any:
        who = {"group_id": "g", "member_id": self.id, "group_instance_id": self.instance}
        return self.client.ask(api, version, **{"generation_id": self.generation, **who, **fields})


@pytest.fixture
def new_member(kafka_server, monkeypatch):
    # Those who join at the same time come within this, on a busy machine as well.
    monkeypatch.setattr(classic_groups, "FIRST_JOIN_SECONDS", 0.4)
    with ExitStack() as stack:

        def make(**options: Any) -> Member:
            member = Member(kafka_server.bootstrap_servers, **options)
            stack.callback(member.client.close)
            return member

        yield make


def joined(*members: Member) -> list[Any]:
    """Have members join at the same time, and return their answers."""
    answers: dict[Member, Any] = {}

    def join(member: Member) -> None:
        answers[member] = member.join()

    with in_threads(*(lambda member=each: join(member) for each in members)):
        pass
    return [answers[each] for each in members]


def settled(*members: Member) -> None:
    """Have members join and get assignments: each its own number."""
    answers = joined(*members)
    (leader,) = (each for each, answer in zip(members, answers, strict=True) if answer.members)
    parts = {each.id: b"%d" % number for number, each in enumerate(members)}
    with in_threads(*(each.sync for each in members if each is not leader)):
        leader.sync(**parts)
    assert [each.heartbeat() for each in members] == [0] * len(members)


def test_the_leader_assigns_for_all(new_member):
    """It alone gets the subscriptions; the others get what it assigned."""
    first = new_member(protocols=[{"name": n, "metadata": n.encode()} for n in ("a", "b")])
    second = new_member(protocols=[{"name": n, "metadata": n.encode()} for n in ("b", "c")])
    answers = joined(first, second)
    leaders = [answer for answer in answers if answer.members]
    assert len(leaders) == 1
    assert {each.metadata for each in leaders[0].members} == {b"b"}
    assert {each.protocol_name for each in answers} == {"b"}
    assert {each.generation_id for each in answers} == {1}
    leader, other = (first, second) if answers[0].members else (second, first)
    found: list[Any] = []
    with in_threads(lambda: found.append(other.sync())):
        assert leader.sync(**{leader.id: b"1", other.id: b"2"}).assignment == b"1"
    assert found[0].assignment == b"2"


def test_members_join_again_when_another_one_joins(new_member):
    """They learn it by their heartbeats, and the new one waits for them."""
    first, second = new_member(), new_member()
    settled(first)
    with in_threads(second.join):
        while not first.heartbeat():
            threading.Event().wait(0.01)
        assert first.heartbeat() == ErrorCode.REBALANCE_IN_PROGRESS
        answer = first.join()
    assert answer.generation_id == second.generation == 2
    assert len(answer.members) == 2


def test_a_member_that_leaves_is_replaced(new_member):
    first, second = new_member(), new_member()
    settled(first, second)
    assert second.leave().members[0].error_code == 0
    assert first.heartbeat() == ErrorCode.REBALANCE_IN_PROGRESS
    assert [each.member_id for each in first.join().members] == [first.id]
    assert second.heartbeat() == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_silent_member_is_removed(new_member):
    """After its session, also if it is the leader."""
    first, second = new_member(session_timeout_ms=SHORT), new_member()
    settled(first, second)
    while second.heartbeat() == 0:
        threading.Event().wait(0.02)
    assert len(second.join().members) == 1


def test_who_does_not_join_in_time_is_removed(new_member):
    first, second = (new_member(rebalance_timeout_ms=SHORT) for _ in range(2))
    settled(first, second)
    third = new_member(rebalance_timeout_ms=SHORT)
    with in_threads(third.join):
        while not first.heartbeat():
            threading.Event().wait(0.01)
        first.join()
    assert first.generation == third.generation == 2
    assert second.heartbeat() == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_leader_that_does_not_assign_is_removed(new_member):
    """The others join again, and one of them leads."""
    first, second = (new_member(rebalance_timeout_ms=SHORT) for _ in range(2))
    answers = joined(first, second)
    leader, other = (first, second) if answers[0].members else (second, first)
    assert other.sync().error_code == ErrorCode.REBALANCE_IN_PROGRESS
    assert len(other.join().members) == 1
    assert leader.heartbeat() == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_static_member_comes_back_without_a_rebalance(new_member):
    """It gets its assignment, under another id, and the earlier client is fenced."""
    first, second = new_member(instance="one"), new_member(instance="two")
    settled(first, second)
    for old in (first, second):
        again = new_member(instance=old.instance)
        answer = again.join()
        assert (answer.error_code, answer.generation_id) == (0, 1)
        # A leader must not assign again, though it is told of the members.
        assert answer.skip_assignment == (answer.leader == again.id)
        assert again.sync().assignment == (b"0" if old is first else b"1")
        assert old.heartbeat() == ErrorCode.FENCED_INSTANCE_ID
        assert old.commit(1) == ErrorCode.FENCED_INSTANCE_ID


def test_only_members_of_the_generation_commit(embedlog_log, new_member):
    embedlog_log.create_topic("orders")
    member, other = new_member(), new_member()
    assert other.commit(1) == 0  # The group has no members yet.
    settled(member)
    assert member.commit(7) == 0
    assert other.commit(8) == ErrorCode.UNKNOWN_MEMBER_ID
    member.generation += 1
    assert member.commit(8) == ErrorCode.ILLEGAL_GENERATION
    assert member.heartbeat() == ErrorCode.ILLEGAL_GENERATION
    (part,) = embedlog_log.groups["g"].describe().partitions
    assert part.current_offset == 7
    answer = member.client.ask("DeleteGroups", 2, groups_names=["g"])
    assert answer.results[0].error_code == ErrorCode.NON_EMPTY_GROUP


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"protocols": []}, ErrorCode.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocol_type": ""}, ErrorCode.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocol_type": "connect"}, ErrorCode.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocols": [{"name": "other"}]}, ErrorCode.INCONSISTENT_GROUP_PROTOCOL),
        ({"session_timeout_ms": 0}, ErrorCode.INVALID_SESSION_TIMEOUT),
        ({"group_id": ""}, ErrorCode.INVALID_GROUP_ID),
        ({"group_id": "x\0y"}, ErrorCode.INVALID_GROUP_ID),
    ],
)
def test_who_cannot_join_is_told_why(new_member, options, code):
    """And the members that the group has notice nothing."""
    member = new_member()
    settled(member)
    wrong = new_member(**{name: value for name, value in options.items() if name != "group_id"})
    if "group_id" in options:
        fields = {**wrong.options, "group_id": options["group_id"]}
        assert wrong.client.ask("JoinGroup", 3, **fields).error_code == code
    else:
        assert wrong.join().error_code == code
    unknown = new_member()
    unknown.id = "nobody"
    assert unknown.join().error_code == ErrorCode.UNKNOWN_MEMBER_ID
    assert member.heartbeat() == 0


def test_groups_of_both_kinds_are_listed(embedlog_log, new_member):
    """Those with members on the wire, and those of programs in Python: nobody joins both (W5)."""
    embedlog_log.create_topic("orders")
    member = new_member()
    settled(member)
    with embedlog_log.consumer("orders", group_id="python") as consumer:
        consumer.poll(timeout_ms=0)
        listed = member.client.ask("ListGroups", 5).groups
        assert {(each.group_id, each.group_state) for each in listed} == {
            ("g", "Stable"),
            ("python", "Stable"),
        }
        described = member.client.ask("DescribeGroups", 5, groups=["g", "python", "none"]).groups
        assert [each.group_state for each in described] == ["Stable", "Stable", "Dead"]
        assert [len(each.members) for each in described] == [1, 1, 0]
        fields = {**member.options, "group_id": "python", "member_id": ""}
        answer = member.client.ask("JoinGroup", 5, **fields)
        assert answer.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL


@pytest.mark.parametrize("options", [{}, {"protocols": [{"name": "mine", "metadata": b""}]}])
def test_groups_are_listed_by_state_and_type_in_any_case(embedlog_log, kafka_server, options):
    """Of rows and in memory: Java's tools ask for ``Classic`` and ``Consumer``."""
    embedlog_log.create_topic("orders")
    member = Classic(kafka_server.bootstrap_servers, "orders", **options)
    assert member.join().error_code == member.sync() == 0
    for filters, count in (
        ({"types_filter": ["Classic", "Consumer"]}, 1),
        ({"states_filter": [" stable "], "types_filter": ["classic"]}, 1),
        ({"types_filter": ["Share"]}, 0),
        ({"states_filter": ["Empty"]}, 0),
    ):
        assert len(member.client.ask("ListGroups", 5, **filters).groups) == count
    member.close()


def test_a_group_without_members_stays_what_it_was(embedlog_log, kafka_server):
    """One of KIP-848 if its last members were; who only commits makes a simple one (M34)."""
    embedlog_log.create_topic("t")
    address = kafka_server.bootstrap_servers
    with ExitStack() as stack:
        client = stack.enter_context(WireClient(address))

        def seen() -> tuple[str, ...]:
            (listed,) = client.ask("ListGroups", 5).groups
            (old,) = client.ask("DescribeGroups", 6, groups=["g"]).groups
            (new,) = client.ask("ConsumerGroupDescribe", 1, group_ids=["g"]).groups
            assert old.protocol_type == listed.protocol_type
            assert (new.error_code == 0) == (listed.group_type == "consumer")
            return listed.group_type, listed.protocol_type, listed.group_state

        assert commit(client, "g", "", -1, 3, 0) == 0
        assert seen() == ("classic", "", "Empty")
        for kind, group_type in ((Modern, "consumer"), (Classic, "classic"), (Modern, "consumer")):
            member = kind(address, "t")
            stack.callback(member.close)
            member.beat() if kind is Modern else member.settle()
            assert seen() == (group_type, "consumer", "Stable")
            member.ask(member_epoch=-1) if kind is Modern else member.leave()
            assert seen() == (group_type, "consumer", "Empty")


@pytest.mark.parametrize(
    ("fields", "epoch"),
    [({}, 2), ({"subscribed_topic_names": None, "subscribed_topic_regex": "no.*"}, 1)],
    ids=["topics", "pattern"],
)
def test_epochs_begin_as_in_kafka(embedlog_log, kafka_server, fields, epoch):
    """A group begins with 1, and topics that a member names change it; a generation is 1 (M30)."""
    embedlog_log.create_topic("t")
    member = Modern(kafka_server.bootstrap_servers, "t", **fields)
    assert (member.beat(), member.epoch) == (0, epoch)
    (group,) = member.client.ask("ConsumerGroupDescribe", 1, group_ids=["g"]).groups
    assert (group.group_epoch, group.assignment_epoch) == (epoch, epoch)
    assert group.members[0].subscribed_topic_regex == ("" if epoch == 2 else "no.*")
    classic = Classic(kafka_server.bootstrap_servers, "t", group="classic")
    assert classic.join().generation_id == 1
    member.close()
    classic.close()


def test_each_of_several_that_join_at_once_counts(embedlog_log, kafka_server):
    """Whether or not there is a target between them, as in Kafka (M2)."""
    embedlog_log.create_topic("t", 8)
    members = [Modern(kafka_server.bootstrap_servers, "t") for _ in range(8)]
    with in_threads(*(each.beat for each in members)):
        pass
    (group,) = members[0].client.ask("ConsumerGroupDescribe", 1, group_ids=["g"]).groups
    assert (group.group_epoch, group.assignment_epoch) == (9, 9)
    for member in members:
        member.close()


@pytest.mark.parametrize("group", ["missing", ""])
def test_who_commits_as_a_member_of_no_group_learns_that(embedlog_log, kafka_server, group):
    """Each version by a code that it knows; in a group that exists, it is an unknown member."""
    embedlog_log.create_topic("t")
    member = Modern(kafka_server.bootstrap_servers, "t")
    member.join()
    topics = [{"name": "t", "partitions": [{"partition_index": 0, "committed_offset": 1}]}]

    def code(version: int, group: str, member_id: str) -> int:
        fields = {"generation_id_or_member_epoch": member.epoch, "topics": topics}
        answer = member.client.ask(
            "OffsetCommit", version, group_id=group, member_id=member_id, **fields
        )
        return int(answer.topics[0].partitions[0].error_code)

    assert code(9, group, member.id) == ErrorCode.GROUP_ID_NOT_FOUND
    assert code(8, group, member.id) == ErrorCode.ILLEGAL_GENERATION
    for version in (8, 9):
        assert code(version, "g", "nobody") == ErrorCode.UNKNOWN_MEMBER_ID
    assert (code(8, "g", member.id), code(9, "g", member.id)) == (ErrorCode.UNSUPPORTED_VERSION, 0)
    member.close()


def test_share_groups_have_their_own_type(embedlog_log, new_member):
    """As in Kafka: listed as what they are, described by another request, not joined."""
    embedlog_log.create_topic("jobs")
    member = new_member()
    with embedlog_log.share_consumer("jobs", group="workers") as consumer:
        consumer.poll(0)
        ask = member.client.ask
        (listed,) = ask("ListGroups", 5).groups
        assert (listed.group_id, listed.group_type) == ("workers", "share")
        assert ask("ListGroups", 5, types_filter=["classic"]).groups == []
        (described,) = ask("DescribeGroups", 5, groups=["workers"]).groups
        assert (described.group_state, described.members) == ("Dead", [])
        fields = {**member.options, "group_id": "workers", "member_id": ""}
        answer = ask("JoinGroup", 5, **fields)
        assert answer.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL


@pytest.mark.parametrize(
    "subscription", [b"\0\0\0\0\0\1\0\6orders\xff\xff\xff\xff", b""], ids=["topics", "unreadable"]
)
def test_offsets_of_topics_that_members_read_stay(embedlog_log, new_member, subscription):
    """What cannot be read may name each topic, as in Kafka."""
    embedlog_log.create_topic("orders")
    member = new_member(protocols=[{"name": "mine", "metadata": subscription}])
    settled(member)
    assert member.commit(3) == 0
    topics = [{"name": "orders", "partitions": [{"partition_index": 0}]}]
    answer = member.client.ask("OffsetDelete", 0, group_id="g", topics=topics)
    assert answer.error_code == 0
    assert answer.topics[0].partitions[0].error_code == ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC
    member.leave()
    answer = member.client.ask("OffsetDelete", 0, group_id="g", topics=topics)
    assert (answer.error_code, answer.topics[0].partitions[0].error_code) == (0, 0)
    fields = {"group_id": "g", "topics": [{"name": "orders", "partition_indexes": [0]}]}
    answer = member.client.ask("OffsetFetch", 7, **fields)
    assert answer.topics[0].partitions[0].committed_offset == -1
    assert embedlog_log.groups["g"].lag() == {}


def test_a_group_without_a_name_does_not_exist(embedlog_log, kafka_server):
    """Who asks for it learns that, as of any other one; only members need a name."""
    embedlog_log.create_topic("orders")
    topics = [{"name": "orders", "partition_indexes": [0]}]
    with WireClient(kafka_server.bootstrap_servers) as client:
        missing = ErrorCode.GROUP_ID_NOT_FOUND
        assert client.ask("DescribeGroups", 6, groups=[""]).groups[0].error_code == missing
        assert client.ask("DescribeGroups", 5, groups=[""]).groups[0].error_code == 0
        assert client.ask("DeleteGroups", 2, groups_names=[""]).results[0].error_code == missing
        fetched = client.ask("OffsetFetch", 7, group_id="", topics=topics)
        assert fetched.error_code == 0
        assert fetched.topics[0].partitions[0].committed_offset == -1
        assert client.ask("OffsetFetch", 7, group_id="", topics=None).topics == []
        left = client.ask("LeaveGroup", 4, group_id="", members=[{"member_id": "a"}])
        assert left.error_code == ErrorCode.INVALID_GROUP_ID


def test_offsets_are_fetched_by_name_and_id(embedlog_log, new_member):
    """For several groups, and topics that are not there."""
    embedlog_log.create_topic("orders", 2)
    member = new_member()
    settled(member)
    member.commit(5)
    (topic,) = member.client.ask("Metadata", 12, topics=[{"name": "orders"}]).topics
    named = {"name": "orders", "partition_indexes": [0, 1]}
    groups = [
        {"group_id": "g", "topics": [named, {"name": "no", "partition_indexes": [0]}]},
        {"group_id": "other", "topics": [named]},
        {"group_id": "g", "topics": None},
    ]
    answer = member.client.ask("OffsetFetch", 8, groups=groups)
    found = [
        {
            TopicPartition(topic.name, part.partition_index): part.committed_offset
            for topic in group.topics
            for part in topic.partitions
        }
        for group in answer.groups
    ]
    assert found == [
        {("orders", 0): 5, ("orders", 1): -1, ("no", 0): -1},
        {("orders", 0): -1, ("orders", 1): -1},
        {("orders", 0): 5},
    ]
    by_id = [{"topic_id": topic.topic_id, "partition_indexes": [0]}]
    answer = member.client.ask("OffsetFetch", 10, groups=[{"group_id": "g", "topics": by_id}])
    (part,) = answer.groups[0].topics[0].partitions
    assert part.committed_offset == 5
