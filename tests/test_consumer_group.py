"""Consumers that share topics as a group: subscribing, committing, listeners, members."""

from __future__ import annotations

import gc
import logging
import pickle
import random
import threading
import time
from itertools import product

import pytest
from support import forks
from support.children import in_child
from support.group_consumers import (
    PipedChild,
    RecordingListener,
    drained,
    partitions,
    poll_until_assigned,
)
from support.patience import patient
from support.roots import abandon, fill, healthy, open_root
from support.tiers import choose, sample

import embedlog
from embedlog.config import TopicConfig
from embedlog.consumer.consumer import Consumer
from embedlog.consumer.open_group import open_group
from embedlog.errors import (
    AssignorError,
    ClosedError,
    CommitFailedError,
    FencedInstanceIdError,
    IllegalStateError,
    InconsistentGroupProtocolError,
    InvalidConfigError,
    InvalidGroupIdError,
    LockTimeoutError,
    OffsetMetadataTooLargeError,
    ReadOnlyError,
    RecordDeserializationError,
    UnknownTopicOrPartitionError,
    WakeupError,
)
from embedlog.record import OffsetAndMetadata, TopicPartition

T0, T1, T2, T3 = (TopicPartition("t", number) for number in range(4))
COOPERATIVE = {"partition_assignment_strategy": "cooperative-sticky"}


@pytest.fixture
def root(tmp_path):
    """A root that is healthy at the end."""
    root = open_root(tmp_path / "root")
    yield root
    assert healthy(root)
    abandon(root)


@pytest.fixture
def join(root):
    """Make consumers of the group ``g`` that start at the earliest offset, and close them."""
    consumers = []

    def join(*topics, **config):
        options = {"group_id": "g", "auto_offset_reset": "earliest", "enable_auto_commit": False}
        # Members are sorted by their ids (M26), so here in the order of their creation.
        options["client_id"] = f"m{len(consumers)}"
        consumers.append(Consumer(root, *topics, **{**options, **config}))
        return consumers[-1]

    yield join
    for consumer in consumers:
        consumer.close(autocommit=False)
    assert heartbeat_threads() == []


def make_topic(root, topic="t", count=2, batches=2, size=2):
    """Create a topic with the same records in each partition."""
    root.create_topic(topic, count, TopicConfig())
    for number in range(count):
        fill(root.partition(topic, number), batches, size=size)


def group(root, name="g"):
    return open_group(root, name)


def committed(root, tp=T0, name="g"):
    commit = group(root, name).committed([tp])[tp]
    return None if commit is None else commit.position.offset


# Subscribing


def test_members_share_the_partitions_and_read_each_record_once(root, join):
    """M11, E9: together they read everything, and each partition has one reader."""
    make_topic(root, count=4)
    members = [join("t") for _ in range(2)]

    count = poll_until_assigned(members, partitions("t", 4), at_least=2)
    records = [record for member in members for record in drained(member)]

    assert count + len(records) >= 16
    assert {member.position(tp) for member in members for tp in member.assignment()} == {4}


def test_a_pattern_must_match_the_whole_name(root, join):
    """E17: internal topics are hidden, and matching topics that are created later are added."""
    for name in ("ab", "abc", "xab", "__ab"):
        make_topic(root, name, 1)
    member = join()
    member.subscribe(pattern="_*ab.?")
    member.poll(0)
    assert {tp.topic for tp in member.assignment()} == {"ab", "abc"} == member.subscription()

    make_topic(root, "abd", 1)
    root.delete_topic("abc")
    poll_until_assigned([member], {TopicPartition("ab", 0), TopicPartition("abd", 0)})

    with_internal = join(group_id="h", exclude_internal_topics=False)
    with_internal.subscribe(pattern="__.*")
    with_internal.poll(0)
    assert with_internal.assignment() == {TopicPartition("__ab", 0)}


def test_a_new_subscription_replaces_the_old_one_at_the_next_poll(root, join):
    """E16: it takes effect in the poll; a topic in both keeps its positions."""
    for name in ("a", "b", "c"):
        make_topic(root, name, 1)
    a, b, c = (TopicPartition(name, 0) for name in "abc")
    member = join("a", "b", **COOPERATIVE)
    drained(member)
    member.seek(b, 1)

    member.subscribe(["b", "c"])
    assert member.assignment() == {a, b}
    assert member.subscription() == {"b", "c"}
    records = member.poll(0)

    assert member.assignment() == {b, c}
    assert [record.offset for record in records[b]] == [1, 2, 3]
    assert [record.offset for record in records[c]] == [0, 1, 2, 3]


def test_subscribing_again_to_the_same_topics_causes_no_rebalance(root, join):
    """M4: the generation stays; another subscription begins a new one."""
    make_topic(root)
    make_topic(root, "u")
    member = join("t", "u")
    for topics, generation in ((["u", "t"], 1), (["t"], 2)):
        member.subscribe(topics)
        member.poll(0)
        assert member.group_metadata().generation_id == generation


def test_subscribing_to_nothing_unsubscribes(root, join):
    """E16: the member leaves at once, and the program may assign partitions afterwards."""
    make_topic(root)
    member, other = join("t"), join("t")
    poll_until_assigned([member, other], partitions("t", 2), at_least=1)

    member.subscribe([])

    assert (member.subscription(), member.assignment()) == (set(), set())
    with pytest.raises(IllegalStateError):
        member.poll(0)
    poll_until_assigned([other], partitions("t", 2))
    member.assign([T0])
    assert len(member.poll(0)[T0]) == 4


def test_subscribing_and_assigning_exclude_each_other(root, join):
    """E16, until unsubscribe."""
    make_topic(root)
    subscribed, assigned = join("t"), join()
    assigned.assign([T0])

    with pytest.raises(IllegalStateError):
        subscribed.assign([T0])
    for arguments in ({"topics": ["t"]}, {"pattern": "t"}):
        with pytest.raises(IllegalStateError):
            assigned.subscribe(**arguments)
    with pytest.raises(IllegalStateError):
        join().subscribe(["t"], pattern="t")
    assigned.unsubscribe()
    assigned.subscribe(["t"])
    assert poll_until_assigned([assigned], partitions("t", 2)) == 8


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"topics": "t"}, TypeError),
        ({"topics": [7]}, ValueError),
        ({"topics": [" "]}, ValueError),
        ({"topics": ["no such name!"]}, ValueError),
        ({"topics": ["t"], "listener": print}, TypeError),
        ({"pattern": "("}, Exception),
    ],
    ids=str,
)
def test_an_invalid_subscription_is_refused_and_the_old_one_stays(root, join, arguments, error):
    """E16: names that no topic can have are errors; they would be waited for in vain."""
    make_topic(root)
    member = join("t")
    member.poll(0)

    with pytest.raises(error):
        member.subscribe(**arguments)

    assert member.subscription() == {"t"}
    assert len(drained(member)) == 0
    assert member.assignment() == {T0, T1}


def test_without_a_group_there_is_no_commit(root):
    """E18: calls that need a group are refused."""
    make_topic(root)
    consumer = Consumer(root, "t")
    for call in (consumer.commit, consumer.commit_async, lambda: consumer.committed(T0)):
        with pytest.raises(InvalidGroupIdError):
            call()
    with pytest.raises(InvalidConfigError):
        Consumer(root, "t", enable_auto_commit=True)
    assert consumer.group_metadata() == (None, -1, "", None)
    consumer.close()


@pytest.mark.parametrize("name", ["", "\0", "x" * 361, "a\0b"])
def test_an_invalid_group_id_is_refused_by_the_constructor(root, name):
    with pytest.raises((InvalidGroupIdError, InvalidConfigError)):
        Consumer(root, "t", group_id=name)


def test_a_consumer_waits_for_a_topic_that_does_not_exist(root, join):
    """E19: without an error; all records are returned once it is created."""
    member = join("t")
    assert member.poll(0) == {}
    assert member.assignment() == set()

    with soon(lambda: make_topic(root)):
        records = member.poll(int(patient(5000)))

    assert sum(map(len, records.values())) + len(drained(member)) == 8


def soon(work):
    """Run a callback in another thread shortly after the block starts."""

    class Delayed:
        def __enter__(self):
            self._timer = threading.Timer(0.05, work)
            self._timer.start()

        def __exit__(self, *_):
            self._timer.join()

    return Delayed()


@pytest.mark.parametrize("strategy", ["range", "roundrobin", "sticky", "cooperative-sticky"])
def test_a_topic_that_grows_is_assigned_again(root, join, strategy):
    """M16: the next poll of any member notices, and all members continue."""
    make_topic(root)
    members = [join("t", partition_assignment_strategy=strategy) for _ in range(2)]
    poll_until_assigned(members, partitions("t", 2), at_least=1)

    root.grow_topic("t", 6)
    fill(root.partition("t", 5), 1)

    assert poll_until_assigned(members, partitions("t", 6), at_least=3) >= 1


def test_a_topic_that_was_created_again_is_read_from_its_beginning(root, join):
    """A38, M16: commits of the old topic do not apply to the new one."""
    make_topic(root)
    make_topic(root, "u")
    member = join("t", "u", **COOPERATIVE)
    poll_until_assigned([member], partitions("t", 2) | partitions("u", 2))
    drained(member)
    member.commit()

    root.delete_topic("t")
    poll_until_assigned([member], partitions("u", 2))
    make_topic(root, count=1)
    count = poll_until_assigned([member], partitions("t", 1) | partitions("u", 2))

    assert count + len(drained(member)) == 4
    assert member.committed(T0) is None


# Committing


def test_committed_returns_what_was_committed(root, join):
    """E4: metadata and leader epoch; kafka-python's -1 is no epoch."""
    make_topic(root)
    member = join("t")
    poll_until_assigned([member], partitions("t", 2))

    member.commit({T0: OffsetAndMetadata(1, "note ☃", 7), T1: OffsetAndMetadata(2, "", -1)})

    assert member.committed(T0) == 1
    assert member.committed(T0, metadata=True) == OffsetAndMetadata(1, "note ☃", 7)
    assert member.committed(T1, metadata=True) == OffsetAndMetadata(2, "", None)


def test_committed_needs_no_assignment_and_is_none_without_a_commit(root, join):
    """E4."""
    make_topic(root)
    assert join().committed(T1) is None
    with pytest.raises(UnknownTopicOrPartitionError):
        join().committed(TopicPartition("t", 2))
    with pytest.raises(TypeError):
        join().committed("t")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({T0: OffsetAndMetadata(-1)}, ValueError),
        ({T0: OffsetAndMetadata(1, "x" * 4097)}, OffsetMetadataTooLargeError),
        ({T0: "1"}, TypeError),
        ({"t": 1}, TypeError),
        ([T0], TypeError),
        ({TopicPartition("u", 0): 1}, UnknownTopicOrPartitionError),
        ({T1: 1, TopicPartition("t", 9): 1}, UnknownTopicOrPartitionError),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_invalid_commit_changes_nothing(root, join, arguments, error):
    """E21: all of it is committed, or nothing."""
    make_topic(root)
    member = join("t")
    poll_until_assigned([member], partitions("t", 2))
    for call in (member.commit, member.commit_async):
        with pytest.raises(error):
            call(arguments)
            # Errors that only the commit detects are in the future.
            raise_error_of(member.commit_async(arguments))

    assert (committed(root), committed(root, T1)) == (None, None)


def raise_error_of(future):
    future.result(timeout=patient(5))


def test_an_offset_past_the_end_and_an_empty_commit_are_accepted(root, join):
    """E21."""
    make_topic(root)
    member = join("t")
    poll_until_assigned([member], partitions("t", 2))

    member.commit({T0: 1000})
    member.commit({})

    assert member.committed(T0) == 1000


def test_a_partition_of_another_member_cannot_be_committed(root, join):
    """M22: stricter than Kafka; nothing of the commit is written."""
    make_topic(root)
    members = [join("t") for _ in range(2)]
    poll_until_assigned(members, partitions("t", 2), at_least=1)
    own, foreign = (next(iter(member.assignment())) for member in members)

    with pytest.raises(CommitFailedError) as caught:
        members[0].commit({own: 1, foreign: 1})

    assert (caught.value.topic, caught.value.partition) == foreign
    assert committed(root, own) is None


def test_a_commit_before_the_first_poll_is_refused(root, join):
    """E23: the consumer owns no partition yet."""
    make_topic(root)
    with pytest.raises(CommitFailedError, match="poll"):
        join("t").commit({T0: 1})


def test_callbacks_run_in_order_on_the_polling_thread(root, join):
    """E22: never before the next call, and each with the offsets of its commit."""
    make_topic(root)
    member, calls = join("t"), []
    poll_until_assigned([member], partitions("t", 2))

    def callback(offsets, error):
        calls.append((offsets[T0].offset, error, threading.get_ident()))

    for number in (1, 3, 2):
        member.commit_async({T0: number}, callback=callback)
    assert calls == []
    member.poll(0)
    member.commit_async({T0: 4}, callback=callback)
    member.commit({T0: 5})
    member.commit_async({T0: 6}, callback=callback)
    member.close()

    assert [call[0] for call in calls] == [1, 3, 2, 4, 6]
    assert {call[1:] for call in calls} == {(None, threading.get_ident())}
    assert committed(root) == 6


def test_commits_are_written_in_the_order_of_the_calls(root, join):
    """E22: an older commit never overwrites a newer one."""
    make_topic(root)
    member = join("t")
    poll_until_assigned([member], partitions("t", 2))

    future = member.commit_async({T0: 3})
    member.commit({T0: 1})

    assert future.result(timeout=patient(5)) == {T0: OffsetAndMetadata(3)}
    assert committed(root) == 1


def test_a_failed_commit_is_reported_to_its_callback_and_not_retried(root, join):
    """E22, E23."""
    make_topic(root)
    members, calls = [join("t") for _ in range(2)], []
    poll_until_assigned(members, partitions("t", 2), at_least=1)
    (foreign,) = members[1].assignment()

    future = members[0].commit_async(
        {foreign: 1}, callback=lambda *arguments: calls.append(arguments)
    )
    members[0].poll(0)

    assert isinstance(future.exception(timeout=patient(5)), CommitFailedError)
    ((offsets, error),) = calls
    assert isinstance(error, CommitFailedError) and list(offsets) == [foreign]
    assert committed(root, foreign) is None


def test_an_error_of_a_callback_is_raised_once(root, join):
    make_topic(root)
    member, calls = join("t"), []
    poll_until_assigned([member], partitions("t", 2))

    def fail(offsets, error):
        raise ZeroDivisionError

    member.commit_async({T0: 1}, callback=fail)
    member.commit_async({T0: 2}, callback=lambda *arguments: calls.append(arguments))
    with pytest.raises(ZeroDivisionError):
        member.poll(0)
    member.poll(0)

    assert len(calls) == 1


# Auto-commit


def test_auto_commit_waits_for_its_interval(root, join):
    """E20, M20b: the interval restarts when partitions are assigned."""
    make_topic(root, count=1)
    started = time.monotonic()
    member = join("t", enable_auto_commit=True, auto_commit_interval_ms=150, max_poll_records=1)
    member.poll(0)
    while committed(root) is None:
        member.poll(0, max_records=1)
        assert time.monotonic() < started + patient(30)

    assert time.monotonic() - started >= 0.14


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_auto_commit_commits_before_a_revocation(root, join, strategy):
    """E20, M19: the next owner starts at the position of the previous one."""
    make_topic(root)
    options = {"enable_auto_commit": True, "partition_assignment_strategy": strategy}
    first = join("t", **options)
    first.poll(0, max_records=1)
    first.poll(0, max_records=3)
    positions = {tp: first.position(tp) for tp in (T0, T1)}
    second = join("t", **options)
    # Its partition is paused, so that it reads nothing.
    second.subscribe(["t"], listener=RecordingListener(assigned=lambda tps: second.pause(*tps)))
    second.poll(0)
    poll_until_assigned([first, second], partitions("t", 2), at_least=1)

    (moved,) = second.assignment()
    assert second.position(moved) == positions[moved] == committed(root, moved)


def test_an_exception_in_the_with_block_commits_nothing(root):
    """E20: the last record may not be processed yet."""
    make_topic(root, count=1)
    options = {"group_id": "g", "auto_offset_reset": "earliest"}
    with pytest.raises(ZeroDivisionError), Consumer(root, "t", **options) as member:
        member.poll(0)
        raise ZeroDivisionError
    assert committed(root) is None

    with Consumer(root, "t", **options) as member:
        assert len(member.poll(0)[T0]) == 4
    assert committed(root) == 4


def test_iteration_commits_only_what_it_returned(root, join):
    """E20: including the last returned record."""
    make_topic(root, count=1, size=4)
    member = join("t", enable_auto_commit=True, auto_commit_interval_ms=0)
    for record in member:
        if record.offset == 2:
            break
    assert (member.position(T0), committed(root)) == (3, None)
    member.commit()
    assert committed(root) == 3
    # The next call returns the rest of the batch.
    assert next(member).offset == 3
    member.close()

    assert committed(root) == 4


def test_iteration_auto_commits_between_batches(root, join):
    """E20: after the interval."""
    make_topic(root, count=1, batches=5, size=2)
    member = join("t", enable_auto_commit=True, auto_commit_interval_ms=0, consumer_timeout_ms=50)
    pairs = [(record.offset, committed(root)) for record in member]

    assert [offset for offset, _ in pairs] == list(range(10))
    assert all(commit is None or commit <= offset for offset, commit in pairs)
    assert committed(root) == 10


# The start of a group


def test_latest_is_the_start_of_the_group_for_later_owners(root, join):
    """E1, M25: an owner without a commit starts where the group started."""
    make_topic(root)
    first = join("t", auto_offset_reset="latest")
    first.poll(0)
    second = join("t", auto_offset_reset="latest")
    poll_until_assigned([first, second], partitions("t", 2), at_least=1)
    (moved,) = second.assignment()
    fill(root.partition(*moved), 1, first=9)
    second.close()

    count = poll_until_assigned([first], partitions("t", 2))
    records = drained(first)

    assert count + len(records) == 1


def test_latest_reads_later_partitions_from_their_start(root, join):
    """E1, M16: new partitions and topics are read from their first record."""
    make_topic(root)
    member = join(auto_offset_reset="latest")
    member.subscribe(pattern="t.*")
    member.poll(0)
    root.grow_topic("t", 3)
    root.create_topic("tt", 1, TopicConfig())
    for partition in (("t", 2), ("tt", 0)):
        fill(root.partition(*partition), 1, first=9)

    assert [record.value for record in drained(member)] == [b"v9", b"v9"]


def test_an_empty_group_forgets_its_start(root, join):
    """E1: without a commit the next member starts at the current end."""
    make_topic(root)
    first = join("t", auto_offset_reset="latest")
    first.poll(0)
    first.close()
    fill(root.partition("t", 0), 1, first=9)

    member = join("t", auto_offset_reset="latest")
    member.poll(0)

    assert member.position(T0) == 5


def test_a_committed_offset_past_the_end_is_reset(root, join):
    """E1, E21: like any position that is out of range."""
    make_topic(root, count=1)
    first = join("t")
    first.poll(0)
    first.commit({T0: OffsetAndMetadata(1000)})
    first.close()

    assert [record.offset for record in join("t").poll(0)[T0]] == [0, 1, 2, 3]


# Manual assignment in a group


def test_a_commit_without_membership_needs_an_empty_group(root, join):
    """M14: a member would not notice the commit."""
    make_topic(root)
    consumer, member = join(), join("t")
    consumer.assign([T0])
    consumer.commit({T0: 1})
    member.poll(0)

    with pytest.raises(CommitFailedError):
        consumer.commit({T0: 2})
    member.close()
    consumer.commit({T0: 3})

    assert committed(root) == 3


# Listeners


@pytest.fixture
def with_listener(root, join):
    """Make consumers with listeners: ``with_listener("range")`` returns both."""

    def with_listener(strategy, **callbacks):
        listener = RecordingListener(**callbacks)
        member = join(partition_assignment_strategy=strategy)
        member.subscribe(["t"], listener=listener)
        return member, listener

    return with_listener


def test_an_eager_listener_is_notified_of_all_partitions(root, with_listener):
    """M19: revoked(all) then assigned(all), also the first time, with nothing to revoke."""
    make_topic(root)
    first, listener = with_listener("range")
    first.poll(0)
    assert listener.taken() == [("revoked", set()), ("assigned", {T0, T1})]

    second, other = with_listener("range")
    poll_until_assigned([first, second], partitions("t", 2), at_least=1)

    assert other.entries[0] == ("revoked", set())
    assert [entry for entry in other.taken() if entry[1]] == [("assigned", {T1})]
    assert listener.taken() == [("revoked", {T0, T1}), ("assigned", {T0})]

    second.close()
    poll_until_assigned([first], partitions("t", 2))
    assert other.taken() == [("revoked", {T1})]
    assert listener.taken() == [("revoked", {T0}), ("assigned", {T0, T1})]
    first.close()
    assert listener.taken() == [("revoked", {T0, T1})]


def test_a_cooperative_listener_is_notified_of_changes(root, with_listener):
    """M20: only of the changes, and of one assignment in each generation, which may be empty."""
    make_topic(root)
    first, listener = with_listener("cooperative-sticky")
    first.poll(0)
    assert listener.taken() == [("assigned", {T0, T1})]

    second, other = with_listener("cooperative-sticky")
    poll_until_assigned([first, second], partitions("t", 2), at_least=1)
    assert listener.taken() == [("revoked", {T1}), ("assigned", set())]
    assert [entry for entry in other.taken() if entry[1]] == [("assigned", {T1})]

    second.close()
    poll_until_assigned([first], partitions("t", 2))
    assert [entry for entry in listener.taken() if entry[1]] == [("assigned", {T1})]
    first.unsubscribe()
    assert listener.taken() == [("revoked", {T0, T1})]


def test_a_consumer_with_an_eager_assignor_is_eager(root, with_listener):
    """As in Kafka: a program that migrates has both range and cooperative-sticky."""
    make_topic(root)
    member, listener = with_listener(("range", "cooperative-sticky"))
    member.poll(0)

    assert listener.taken() == [("revoked", set()), ("assigned", {T0, T1})]


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_the_old_owner_releases_before_the_new_one_is_notified(root, with_listener, strategy):
    """M22, M23: the new owner starts at the commit of the revoked callback."""
    make_topic(root)
    events = []
    positions = {}

    def revoked(tps):
        events.append(("revoked", tps))
        first.commit(dict.fromkeys(tps, 3))

    def assigned(tps):
        events.append(("assigned", tps))
        positions.update({tp: second.position(tp) for tp in tps})

    first, _ = with_listener(strategy, revoked=revoked)
    first.poll(0)
    events.clear()
    second, _ = with_listener(strategy, assigned=assigned)
    poll_until_assigned([first, second], partitions("t", 2), at_least=1)

    assert positions == {T1: 3}
    kinds = [kind for kind, tps in events if T1 in tps]
    assert kinds[:2] == ["revoked", "assigned"]


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_a_seek_within_assigned_counts_for_the_first_fetch(root, with_listener, strategy):
    """E6."""
    make_topic(root, count=1)
    member, _ = with_listener(strategy, assigned=lambda tps: [member.seek(tp, 2) for tp in tps])

    assert [record.offset for record in member.poll(0)[T0]] == [2, 3]


def test_a_listener_sees_the_old_partitions_then_the_new_ones(root, with_listener):
    """M20b: during revoked the previous assignment, during assigned the new one."""
    make_topic(root)
    assignments = []
    first, _ = with_listener(
        "cooperative-sticky",
        revoked=lambda tps: assignments.append(first.assignment()),
        assigned=lambda tps: assignments.append(first.assignment()),
    )
    first.poll(0)
    second, _ = with_listener("cooperative-sticky")
    poll_until_assigned([first, second], partitions("t", 2), at_least=1)

    assert assignments == [{T0, T1}, {T0, T1}, {T0}]


CALLS = {
    "subscribe": lambda member: member.subscribe(["u"]),
    "subscribe to nothing": lambda member: member.subscribe([]),
    "unsubscribe": lambda member: member.unsubscribe(),
    "assign": lambda member: member.assign([T0]),
    "poll": lambda member: member.poll(0),
    "iterate": lambda member: next(iter(member)),
    "close": lambda member: member.close(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["assigned", "revoked"])
def test_calls_that_a_listener_must_not_make_are_refused(root, with_listener, call, kind):
    """M18; in Kafka this is undefined."""
    make_topic(root)
    remaining = [True]
    member, _ = with_listener(
        "range", **{kind: lambda tps: remaining and remaining.pop() and CALLS[call](member)}
    )

    with pytest.raises(IllegalStateError):
        member.poll(0)
    assert poll_until_assigned([member], partitions("t", 2)) == 8
    assert member.subscription() == {"t"}


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
@pytest.mark.parametrize("kind", ["assigned", "revoked"])
def test_poll_raises_an_error_of_a_listener_after_the_rebalance(
    root, with_listener, strategy, kind
):
    """M24: the revocation and the assignment are completed, and no record is lost."""
    make_topic(root)
    failing = {}

    def fail(tps):
        if failing:
            failing.clear()
            raise ZeroDivisionError

    first, listener = with_listener(strategy, **{kind: fail})
    first.poll(0, max_records=1)
    listener.taken()
    failing.update(now=True)
    second, _ = with_listener(strategy)
    second.poll(0)
    with pytest.raises(ZeroDivisionError):
        forks.until(lambda: first.poll(0, max_records=1) and False)

    poll_until_assigned([first, second], partitions("t", 2), at_least=1)
    assert {kind for kind, _ in listener.entries} == {"revoked", "assigned"}
    assert not [record for record in drained(first) if record.partition == 1]


def test_close_raises_an_error_of_a_listener_at_its_end(root, with_listener):
    """E24."""
    make_topic(root)
    first, _ = with_listener("cooperative-sticky", revoked=lambda tps: 1 / 0)
    first.poll(0)

    with pytest.raises(ZeroDivisionError):
        first.close()

    assert group(root).read().members == {}
    first.close()


def test_a_listener_may_commit_seek_pause_and_read_positions(root, with_listener):
    """E6, M18."""
    make_topic(root)

    def revoked(tps):
        for tp in tps:
            member.commit({tp: member.position(tp)})
            member.pause(tp)
            member.seek(tp, 0)
            assert member.committed(tp) == 4
        generations.append(member.group_metadata().generation_id)

    generations = []
    member, _ = with_listener("cooperative-sticky", revoked=revoked)
    poll_until_assigned([member], partitions("t", 2))
    drained(member)
    member.close()

    assert generations == [1]
    assert (committed(root), committed(root, T1)) == (4, 4)


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_a_revoked_partition_starts_again_at_its_committed_offset(root, with_listener, strategy):
    """M25: the program may have dropped uncommitted records.  A kept one stays paused."""
    make_topic(root)
    first, _ = with_listener(strategy)
    drained(first)
    first.commit({T0: 1})
    first.pause(T0)
    second, _ = with_listener(strategy)
    second.poll(0)

    assert len(drained(first)) == 0
    assert first.assignment() == first.paused() == {T0}
    first.resume(T0)
    returned_again = [record.offset for record in drained(first)]

    assert returned_again == ([1, 2, 3] if strategy == "range" else [])
    assert first.position(T0) == 4


def test_without_a_listener_kept_partitions_continue_with_any_assignor(root, join):
    """M25, E11: position, fetched records and pause stay."""
    make_topic(root)
    first = join("t")
    first.poll(0, max_records=1)
    first.poll(0, max_records=2)
    first.pause(T0)
    position = first.position(T0)
    second = join("t")
    poll_until_assigned([first, second], partitions("t", 2), at_least=1)

    assert first.assignment() == first.paused() == {T0}
    assert first.position(T0) == position


def test_records_fetched_ahead_of_a_revoked_partition_are_discarded(root, join):
    """E9: only the new owner returns them."""
    make_topic(root, batches=10, size=5)
    first = join("t", **COOPERATIVE)
    first.poll(0, max_records=1)
    first.poll(0, max_records=1)
    second = join("t", **COOPERATIVE)
    second.poll(0)
    polled = first.poll(0, max_records=1)
    assert set(polled) <= {T0}
    assert first.assignment() == {T0}

    assert {record.partition for record in drained(first)} == {0}
    poll_until_assigned([first, second], partitions("t", 2), at_least=1)


# Members


def test_group_metadata_identifies_the_member(root, join):
    make_topic(root)
    member = join("t", group_instance_id="i", client_id="c")
    assert member.group_metadata() == ("g", -1, "", "i")
    member.poll(0)

    metadata = member.group_metadata()
    assert metadata.member_id in group(root).read().members
    assert (metadata.group_id, metadata.generation_id, metadata.group_instance_id) == ("g", 1, "i")


def test_a_program_that_does_not_poll_loses_its_partitions(root, join):
    """M9: it leaves the group; its next poll reports them as lost, and it joins again."""
    make_topic(root)
    listener = RecordingListener()
    interval = int(patient(60))
    slow = join(max_poll_interval_ms=interval, **COOPERATIVE)
    slow.subscribe(["t"], listener=listener)
    slow.poll(0)
    other = join("t", **COOPERATIVE)
    started = time.monotonic()

    poll_until_assigned([other], partitions("t", 2))
    assert interval * 0.6e-3 < time.monotonic() - started < patient(2)
    with pytest.raises(CommitFailedError):
        slow.commit()
    assert slow.assignment() == {T0, T1}
    listener.taken()
    slow.poll(0)
    assert listener.taken()[0] == ("lost", {T0, T1})

    poll_until_assigned([slow, other], partitions("t", 2), at_least=1)


def test_a_poll_that_waits_does_not_count_as_idle(root, join):
    """M7, M9: only the time between two polls counts."""
    make_topic(root, batches=0)
    listener = RecordingListener()
    interval_ms = int(patient(20))
    member = join(
        max_poll_interval_ms=2 * interval_ms,
        session_timeout_ms=6 * interval_ms,
        heartbeat_interval_ms=interval_ms,
    )
    member.subscribe(["t"], listener=listener)
    member.poll(12 * interval_ms)
    member.poll(0)

    assert [kind for kind, _ in listener.entries] == ["revoked", "assigned"]


def test_heartbeats_are_sent_while_the_program_works(root, join):
    """M7, M8: a call of the program may take longer than the session."""
    make_topic(root)
    listener = RecordingListener()
    session = int(patient(80))
    member = join(session_timeout_ms=session, heartbeat_interval_ms=session // 5)
    member.subscribe(["t"], listener=listener)
    member.poll(0)
    threading.Event().wait(3 * session / 1000)
    group(root).remove_dead_members()
    member.commit({T0: 1})
    member.poll(0)

    assert [kind for kind, _ in listener.entries] == ["revoked", "assigned"]


def test_a_stopped_process_is_fenced_when_it_wakes(tmp_path):
    """M8, M21, M22, P14: its commit fails, its partitions are lost, and it joins again."""
    path = tmp_path / "root"
    interval_ms = int(patient(30))
    options = {
        "session_timeout_ms": 5 * interval_ms,
        "heartbeat_interval_ms": interval_ms,
        "group_id": "g",
    }
    options |= {"auto_offset_reset": "earliest", "enable_auto_commit": False, **COOPERATIVE}

    def work(pipe):
        log, listener = embedlog.open(path), RecordingListener()
        member = log.consumer(**options)
        member.subscribe(["t"], listener=listener)
        records = member.poll(0)
        pipe.send(sorted(member.assignment()))
        assert pipe.recv() == "commit"
        with pytest.raises(CommitFailedError):
            member.commit()
        listener.taken()
        forks.until(lambda: member.poll(0) is not None and member.assignment())
        pipe.send((listener.taken(), sorted(member.assignment())))
        pipe.recv()
        log.close()
        return len(records)

    with embedlog.open(path) as log:
        make_topic(log.root)
    with PipedChild(work) as stopped:
        assert stopped.hear() == [T0, T1]
        with embedlog.open(path) as log:
            stopped.stop()
            other = log.consumer("t", **options)
            poll_until_assigned([other], partitions("t", 2))
            other.commit()
            stopped.go_on()
            stopped.say("commit")
            poll_until_assigned([other], {T0})
            entries, owned = stopped.hear()
            assert entries[0] == ("lost", {T0, T1})
            assert owned == [T1]
            assert (other.committed(T0), other.committed(T1)) == (4, 4)
            stopped.say("end")
            stopped.end()


def test_a_killed_process_is_replaced_at_once(tmp_path):
    """M10: it does not depend on the timeouts."""
    path = tmp_path / "root"

    def work(pipe):
        member = embedlog.open(path).consumer("t", group_id="g")
        member.poll(0)
        pipe.send(len(member.assignment()))
        pipe.recv()

    with embedlog.open(path) as log:
        make_topic(log.root)
    with PipedChild(work) as owner:
        assert owner.hear() == 2
        with embedlog.open(path) as log:
            other = log.consumer("t", group_id="g")
            forks.until(lambda: other.poll(0) is None or group(log.root).read().target_is_current)
            killed_at = owner.kill()
            poll_until_assigned([other], partitions("t", 2))
            assert time.monotonic() - killed_at < patient(2)


def test_the_members_of_a_process_share_a_thread(root, join, tmp_path, caplog):
    """E29, M10: each stays a member, is replaced when it is silent, and notices a death."""
    make_topic(root)
    session = {"session_timeout_ms": 500, "heartbeat_interval_ms": 50}
    silent = join("t", **session, max_poll_interval_ms=50)
    members = [join("t", **session) for _ in range(20)]
    others = [join("t", group_id=f"g{number}", **session) for number in range(20)]
    for member in (silent, *members, *others):
        member.poll(0)
    with caplog.at_level(logging.CRITICAL):
        forks.until(lambda: len(group(root).read().members) == 20)
    assert len(heartbeat_threads()) == 1

    def work(pipe):
        pipe.send(len(embedlog.open(root.path).consumer("t", group_id="g").poll(0)))
        pipe.recv()

    with PipedChild(work) as child:
        child.hear()
        assert len(group(root).read().members) == 21
        child.kill()
        forks.until(lambda: len(group(root).read().members) == 20)
    time.sleep(0.6)  # longer than a session
    assert len(group(root).read().members) == 20
    assert all(group(root, f"g{number}").read().members for number in range(20))
    assert len(heartbeat_threads()) == 1


def test_a_heartbeat_that_fails_leaves_those_of_others(root, join, monkeypatch, caplog):
    """An error that nobody expects ends the heartbeat of that member only, with its traceback."""
    make_topic(root)
    broken, member = (join("t", heartbeat_interval_ms=10, session_timeout_ms=300) for _ in "12")
    for consumer in (broken, member):
        consumer.poll(0)
    inner = broken._group._member

    def fail():
        raise MemoryError

    with caplog.at_level(logging.CRITICAL):
        monkeypatch.setattr(inner, "heartbeat", fail)
        forks.until(lambda: len(group(root).read().members) == 1)
    time.sleep(0.4)  # longer than a session
    assert list(group(root).read().members) == [member._group._member.id]
    assert len(heartbeat_threads()) == 1


def test_a_static_member_that_returns_gets_its_partitions(root, join):
    """M13: close does not leave the group, no other member notices, it continues at its commit."""
    make_topic(root)
    static = join("t", group_instance_id="i")
    listener = RecordingListener()
    other = join()
    other.subscribe(["t"], listener=listener)
    poll_until_assigned([static, other], partitions("t", 2), at_least=1)
    before = static.assignment()
    drained(static)
    static.commit()
    static.close()
    listener.taken()
    other.poll(0)
    assert len(other.assignment()) == 1

    returned = join("t", group_instance_id="i")
    returned.poll(0)
    other.poll(0)

    assert returned.assignment() == before
    assert listener.taken() == []
    assert drained(returned) == []


def test_a_second_holder_of_an_instance_id_fences_the_first(root, join):
    """M13, E23: permanently; its commits are refused."""
    make_topic(root)
    listener = RecordingListener()
    first = join(group_instance_id="i")
    first.subscribe(["t"], listener=listener)
    first.poll(0)
    second = join("t", group_instance_id="i")
    second.poll(0)
    assert second.assignment() == {T0, T1}
    listener.taken()

    with pytest.raises((CommitFailedError, FencedInstanceIdError)):
        first.commit({T0: 1})
    for _ in range(2):
        with pytest.raises(FencedInstanceIdError):
            first.poll(0)
    assert listener.taken() == [("lost", {T0, T1})]
    with pytest.raises(FencedInstanceIdError):
        first.commit({T0: 1})
    first.close()
    second.commit({T0: 2})
    assert committed(root) == 2


def test_a_dead_static_member_keeps_its_partitions_for_its_session(tmp_path):
    """M13 takes precedence over M10."""
    path = tmp_path / "root"
    interval_ms = int(patient(30))
    options = {
        "group_id": "g",
        "session_timeout_ms": 7 * interval_ms,
        "heartbeat_interval_ms": interval_ms,
    }

    def work(pipe):
        member = embedlog.open(path).consumer("t", group_instance_id="i", **options)
        member.poll(0)
        pipe.send(len(member.assignment()))
        pipe.recv()

    with embedlog.open(path) as log:
        make_topic(log.root)
    with PipedChild(work) as owner:
        assert owner.hear() == 2
        killed_at = owner.kill()
    with embedlog.open(path) as log:
        other = log.consumer("t", **options)
        poll_until_assigned([other], partitions("t", 2))
        assert time.monotonic() - killed_at > 5 * interval_ms / 1000


# Threads


def test_close_from_another_thread_ends_the_poll_and_leaves(root, join):
    """E24: what earlier polls returned is committed, and the listener is notified."""
    make_topic(root, count=1)
    listener = RecordingListener()
    member = join(enable_auto_commit=True)
    member.subscribe(["t"], listener=listener)
    drained(member)
    with soon(member.close), pytest.raises(ClosedError):
        member.poll(10_000)

    forks.until(lambda: not group(root).read().members)
    assert committed(root) == 4
    assert listener.entries[-1] == ("revoked", {T0})


def test_close_does_not_wait_for_a_blocked_thread(root, join):
    """E24: the member leaves the group anyway, and does not join again."""
    make_topic(root, count=1)
    entered, release = threading.Event(), threading.Event()

    def assigned(tps):
        entered.set()
        release.wait(patient(10))

    member = join()
    member.subscribe(["t"], listener=RecordingListener(assigned=assigned))
    caught = []

    def poll():
        try:
            member.poll(10_000)
        except ClosedError as error:
            caught.append(error)

    thread = threading.Thread(target=poll)
    thread.start()
    entered.wait(patient(10))
    started = time.monotonic()
    member.close(timeout_ms=50)
    assert time.monotonic() - started < patient(5)
    assert group(root).read().members == {}
    release.set()
    thread.join()

    assert group(root).read().members == {}
    assert len(caught) <= 1


def test_iteration_ends_when_another_thread_closes(root, join):
    make_topic(root, count=1)
    member = join("t", enable_auto_commit=True)
    closing, returned = threading.Timer(0.05, member.close), 0
    for returned, _ in enumerate(member, 1):
        if returned == 4:
            closing.start()
    closing.join()
    assert returned == 4
    forks.until(lambda: not group(root).read().members)
    assert committed(root) == 4


def test_a_consumer_that_is_garbage_collected_leaves(root, caplog):
    """The other members need not wait for the end of its session."""
    make_topic(root)
    member = Consumer(root, "t", group_id="g")
    member.poll(0)
    del member

    def has_left():
        # Again and again: its thread may hold it for a moment, and it is part of a cycle.
        gc.collect()
        return not group(root).read().members

    with caplog.at_level(logging.CRITICAL):
        forks.until(has_left)
        forks.until(lambda: not heartbeat_threads())


def heartbeat_threads():
    return [
        thread for thread in threading.enumerate() if thread.name.startswith("embedlog-heartbeat")
    ]


def test_closing_the_log_closes_its_members(tmp_path):
    """They leave the group, and commit the returned records."""
    with embedlog.open(tmp_path / "root") as log:
        make_topic(log.root, count=1)
        member = log.consumer("t", group_id="g", auto_offset_reset="earliest")
        member.poll(0)
    assert heartbeat_threads() == []
    with pytest.raises(ClosedError):
        member.poll(0)
    member.close()

    with embedlog.open(tmp_path / "root") as log:
        assert log.consumer(group_id="g").committed(T0) == 4
        assert group(log.root).read().members == {}


# Processes


def test_a_pickled_consumer_is_another_member(root, join):
    """It has the arguments of the original, but not its positions."""
    make_topic(root)
    member = join("t")
    member.poll(0)

    unpickled = pickle.loads(pickle.dumps(member))
    try:
        assert unpickled.group_metadata().member_id == ""
        unpickled.poll(0)
        assert unpickled.group_metadata().member_id != member.group_metadata().member_id
    finally:
        unpickled.close()
        unpickled._root.close()


def test_a_forked_child_is_a_new_member_and_does_not_affect_the_parent(tmp_path):
    """P18: whatever the child does with the inherited consumer, and however it ends."""
    with embedlog.open(tmp_path / "root") as log:
        make_topic(log.root, batches=0)
        listener = RecordingListener()
        member = log.consumer(group_id="g", enable_auto_commit=False, **COOPERATIVE)
        member.subscribe(["t"], listener=listener)
        member.poll(0)
        own = member.group_metadata().member_id

        def child():
            before = member.group_metadata().member_id
            with pytest.raises(CommitFailedError):
                member.commit({T0: 7})
            forks.until(lambda: member.poll(10) is not None and member.assignment())
            after = member.group_metadata().member_id
            member.close()
            return before, after

        with polling_meanwhile(member):
            before, after = in_child(child)
            assert before == ""
            assert after not in ("", own)
            assert in_child(lambda: member.close()) is None
            assert in_child(lambda: log.close()) is None
        poll_until_assigned([member], partitions("t", 2))

        assert member.group_metadata().member_id == own
        assert "lost" not in dict(listener.entries)
        assert member.committed(T0) is None
        member.commit({T0: 0})


class polling_meanwhile:  # noqa: N801 - reads as a statement
    """Polls a consumer in another thread during the block."""

    def __init__(self, member):
        self._member, self._done = member, threading.Event()
        self._thread = threading.Thread(target=self._poll)

    def _poll(self):
        while not self._done.is_set():
            self._member.poll(20)

    def __enter__(self):
        self._thread.start()

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()


# Failures


class FailingWrites:
    """Fails one write of the main thread, to which `left` counts down, before or after it."""

    def __init__(self, root, monkeypatch, error):
        self._live, self._error, self.left, self.after = root.context.live, error, -1, False
        self._write = self._live.write
        monkeypatch.setattr(self._live, "write", self)

    def __call__(self, step, timeout=None):
        in_main_thread = threading.current_thread() is threading.main_thread()
        self.left -= in_main_thread
        if in_main_thread and self.left == 0 and not self.after:
            raise self._error("planted")
        result = self._write(step, timeout)
        if in_main_thread and self.left == 0:
            raise self._error("planted")
        return result


@pytest.mark.parametrize(
    ("error", "strategy"),
    sample([*product([LockTimeoutError, KeyboardInterrupt], ["range", "cooperative-sticky"])], 2),
)
def test_a_rebalance_that_fails_halfway_is_completed_by_the_next_poll(
    root, join, monkeypatch, strategy, error
):
    """M22, M24: whether a write failed, or was interrupted after it was done."""
    make_topic(root)
    writes, failures = FailingWrites(root, monkeypatch, error), 0
    for number in range(20):
        writes.left, writes.after = number // 2 + 1, bool(number % 2)
        options = {"partition_assignment_strategy": strategy, "group_id": f"g{number}"}
        first, second = join("t", **options), join("t", **options)
        listener = RecordingListener()
        if number % 4 >= 2:
            first.subscribe(["t"], listener=listener)
        offsets = set()
        for _ in range(12):
            for member in (first, second):
                try:
                    for records in member.poll(0).values():
                        offsets |= {(record.partition, record.offset) for record in records}
                except error:
                    failures += 1
        assert len(first.assignment()) == len(second.assignment()) == 1
        assert len(offsets) == 8
        writes.left = -1
        for member in (first, second):
            member.commit()
            member.close()
    assert failures >= 10


def test_a_commit_that_fails_changes_nothing_and_may_be_repeated(root, join, monkeypatch):
    make_topic(root)
    member = join("t")
    poll_until_assigned([member], partitions("t", 2))
    writes = FailingWrites(root, monkeypatch, LockTimeoutError)
    writes.left = 1

    with pytest.raises(LockTimeoutError):
        member.commit({T0: 3})
    assert committed(root) is None
    member.commit({T0: 3})

    assert committed(root) == 3


@pytest.mark.parametrize("write", range(1, 5))
def test_a_close_that_fails_leaves_no_thread_and_no_lock(root, join, monkeypatch, write):
    """E24: the other members see that it left, although a write failed."""
    make_topic(root)
    member, other = join("t", enable_auto_commit=True), join("t")
    member.poll(0)
    writes = FailingWrites(root, monkeypatch, LockTimeoutError)
    writes.left = write
    try:
        member.close()
    except LockTimeoutError:
        pass
    writes.left = -1

    assert len(heartbeat_threads()) == 0
    poll_until_assigned([other], partitions("t", 2))


def test_a_read_only_log_has_no_members(tmp_path):
    """A member has to write."""
    with embedlog.open(tmp_path / "root") as log:
        make_topic(log.root)
    with embedlog.open(tmp_path / "root", mode="r") as log:
        with pytest.raises(ReadOnlyError):
            log.consumer("t", group_id="g")
        consumer = log.consumer(group_id="g", auto_offset_reset="earliest")
        consumer.assign([T0])
        assert len(consumer.poll(0)[T0]) == 4
        with pytest.raises(ReadOnlyError):
            consumer.commit({T0: 1})
        assert consumer.committed(T0) is None


@pytest.mark.parametrize(
    "call",
    [
        lambda member: member.position(T1),
        lambda member: member.seek(T1, 0),
        lambda member: member.pause(T1),
        lambda member: member.resume(T1),
        lambda member: member.current_lag(T1),
        lambda member: member.seek_to_end(T1),
    ],
)
def test_a_revoked_partition_is_no_longer_assigned(root, join, call):
    """E3, E11, M25: its position is dropped."""
    make_topic(root)
    first, second = join("t"), join("t")
    poll_until_assigned([first, second], partitions("t", 2), at_least=1)
    assert first.assignment() == {T0}

    with pytest.raises(IllegalStateError):
        call(first)


@pytest.mark.tier("test")
def test_members_may_be_closed_from_any_thread_at_any_time(root, monkeypatch):
    """E13, E24: seeded threads close, wake and drop each other's consumers while they read."""
    make_topic(root, count=6)
    done, shared, failures = threading.Event(), [], []
    monkeypatch.setattr(
        threading, "excepthook", lambda arguments: failures.append(arguments.exc_value)
    )
    expected = (ClosedError, WakeupError, IllegalStateError, CommitFailedError)

    def work(rng):
        while not done.is_set():
            member = Consumer(root, "t", group_id="g", auto_commit_interval_ms=5, **COOPERATIVE)
            shared.append(member)
            try:
                for _ in range(rng.randrange(1, 20)):
                    member.poll(rng.choice([0, 1, 10]))
                    other = rng.choice(shared[-6:])
                    rng.choice([member.commit, other.wakeup, member.unsubscribe, other.close])()
                    other.close(timeout_ms=rng.choice([0, 50])) if rng.random() < 0.1 else None
                    member.subscribe(["t"])
                member.close()
            except expected:
                pass

    threads = [threading.Thread(target=work, args=(random.Random(seed),)) for seed in range(6)]
    for thread in threads:
        thread.start()
    threading.Event().wait(choose(test=0.7, all=2))
    done.set()
    for thread in threads:
        thread.join()
    for member in shared:
        member.close()

    assert failures == []
    assert heartbeat_threads() == []
    assert group(root).read().members == {}


def test_auto_commit_retries_retriable_errors(root, join, monkeypatch):
    """E20: after retry_backoff_ms; the poll does not fail."""
    make_topic(root, count=1)
    options = {"auto_commit_interval_ms": 20, "retry_backoff_ms": 30}
    member = join("t", enable_auto_commit=True, **options)
    member.poll(0)
    writes = FailingWrites(root, monkeypatch, LockTimeoutError)
    writes.left = 1
    threading.Event().wait(0.03)

    member.poll(0)
    assert (writes.left, committed(root)) == (0, None)
    member.poll(0)
    assert committed(root) is None
    threading.Event().wait(0.04)
    member.poll(0)

    assert committed(root) == 4


def test_auto_commit_logs_other_errors_and_goes_on(root, join, caplog):
    """E20: a later commit may succeed."""
    make_topic(root)
    consumer, member = join(enable_auto_commit=True, auto_commit_interval_ms=0), join("t")
    consumer.assign([T0])
    member.poll(0)
    consumer.poll(0)
    with caplog.at_level(logging.WARNING):
        consumer.poll(0)

    assert "Auto-commit" in caplog.text
    assert committed(root) is None


def test_a_record_that_cannot_be_deserialized_is_not_committed(root, join):
    """E10, E20: the records before it are committed."""
    make_topic(root, count=1)

    def refuse(data):
        if data == b"v2":
            raise ValueError
        return data

    member = join("t", value_deserializer=refuse, enable_auto_commit=True)
    assert [record.offset for record in member.poll(0)[T0]] == [0, 1]
    for _ in range(2):
        with pytest.raises(RecordDeserializationError):
            member.poll(0)
    member.commit()
    assert committed(root) == 2
    member.seek(T0, 3)

    assert [record.offset for record in member.poll(0)[T0]] == [3]


def test_members_may_poll_columns(root, join):
    """Positions and commits are the same as with records."""
    make_topic(root, count=1, batches=3)
    member = join("t", consumer_timeout_ms=20)
    assert [batch.num_rows for batch in member.poll_batches(0, max_records=3)[T0]] == [2, 1]
    member.commit()
    assert committed(root) == 3
    assert [batch.num_rows for batch in member.iter_batches()] == [1, 2]
    member.commit()

    assert committed(root) == 6


def test_a_consumer_without_a_common_assignor_cannot_join(root, join):
    """M5: its poll raises an error, and the other members continue."""
    make_topic(root)
    first = join("t", partition_assignment_strategy="range")
    other = join("t", partition_assignment_strategy="sticky")
    first.poll(0)
    for _ in range(2):
        with pytest.raises(InconsistentGroupProtocolError):
            other.poll(0)
    first.poll(0)
    assert first.assignment() == {T0, T1}
    first.close()

    assert len(drained(other)) == 8


def test_poll_raises_an_error_of_the_assignor(root, join):
    """The group does not change; it continues once the assignor works."""
    make_topic(root)

    class OwnAssignor:
        name, cooperative, works = "own", True, False

        def assign(self, counts, members):
            if not self.works:
                raise ZeroDivisionError
            return {member.id: sorted(partitions("t", counts["t"])) for member in members}

    own = OwnAssignor()
    member = join("t", partition_assignment_strategy=[own])
    for _ in range(2):
        with pytest.raises(AssignorError):
            member.poll(0)
    own.works = True

    assert len(drained(member)) == 8


def test_the_lag_of_a_member_needs_a_position(root, join):
    """E3, E25: a poll resolves every position, also of partitions without records."""
    make_topic(root)
    member = join("t")
    (first,) = member.poll(0, max_records=3)
    (other,) = {T0, T1} - {first}

    assert (member.current_lag(first), member.current_lag(other)) == (1, 4)
    member.seek_to_end(other)
    assert member.current_lag(other) is None
    assert member.position(other) == 4
    assert member.current_lag(other) == 0
