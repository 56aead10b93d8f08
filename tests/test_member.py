"""One member joins, acquires, commits, releases, leaves, dies, is stopped, returns (M5–M22)."""

import os
import signal
import threading
import time

import pytest
from support import forks
from support.children import PausedChild, in_child
from support.groups import (
    RANGE,
    SESSION_MS,
    STICKY,
    Uptime,
    at,
    complete_rebalance,
    crash,
    follow,
    join,
    make_group,
    make_topics,
    owner_rows,
    owners,
)
from support.patience import patient
from support.roots import fill, open_root

from embedlog.assignor import RebalanceStep
from embedlog.consumer.group_member import GroupMember
from embedlog.errors import (
    CommitFailedError,
    FencedInstanceIdError,
    GroupMaxSizeReachedError,
    InconsistentGroupProtocolError,
    UnknownMemberIdError,
    UnknownTopicOrPartitionError,
)
from embedlog.groups.offsets import LONGEST_GROUP_ID
from embedlog.record import OffsetAndMetadata, TopicPartition

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
ALL = [TopicPartition("t", n) for n in range(4)]


@pytest.fixture
def uptime():
    return Uptime()


@pytest.fixture
def group(root, uptime):
    """The group "g" of a root that has a topic "t" with four partitions."""
    make_topics(root, t=4)
    return make_group(root, "g", uptime)


def offset_of(group, tp=T0):
    committed = group.committed([tp])[tp]
    return None if committed is None else committed.position.offset


# Joining

CLIENTS = {
    "": "consumer-",
    "reader": "reader-",
    "a reader/of \N{SNOWMAN}": "a-reader-of--",
    "nul\0nul": "nul-nul-",
    "x" * 500: "x" * 100 + "-",
    "\N{SNOWMAN}" * 500: "--",
}


@pytest.mark.parametrize("client", CLIENTS, ids=ascii)
def test_any_client_id_is_accepted(root, client):
    """The member id begins with up to 100 characters of it, made safe for a file name."""
    make_topics(root, t=1)
    group = make_group(root, "g" * LONGEST_GROUP_ID)
    member = join(group, client_id=client)
    complete_rebalance(member)
    member.commit(at(3))

    assert member.id.startswith(CLIENTS[client])
    assert group.read().members[member.id].client_id == client
    assert offset_of(group) == 3
    assert group.remove_members([member.id]) == [member.id]


def test_a_new_member_owns_nothing_before_it_acquires(group):
    """Its partitions are first added, then acquired, then kept."""
    member = join(group)
    assert member.owned == set()
    assert member.changed()
    assert member.check_assignment(RANGE).step == RebalanceStep((), (), tuple(ALL), ())
    assert owners(group) == {}

    assert sorted(member.acquire(from_end=False)) == ALL
    assert member.owned == set(ALL)
    assert member.check_assignment(RANGE).step == RebalanceStep(tuple(ALL), (), (), ())
    assert not member.changed()


def test_a_member_that_is_refused_leaves_nothing_behind(group):
    """Neither a member nor a lock file remains (M5, M12)."""
    join(group)
    with pytest.raises(InconsistentGroupProtocolError):
        join(group, assignors=list(STICKY))
    with pytest.raises(GroupMaxSizeReachedError):
        join(group, max_members=1)

    assert len(group.read().members) == 1
    assert sum(name.startswith("member-") for name in group.context.files.list("locks")) == 1


@pytest.mark.parametrize(
    "options", [{"max_members": 1}, {"assignors": list(STICKY)}], ids=["max_members", "assignors"]
)
def test_a_dead_member_does_not_keep_another_out(group, options):
    """Neither the maximum of members nor the common assignors count it (M5, M10, M12)."""
    crash(join(group))
    member = join(group, **options)
    assert list(group.read().members) == [member.id]


def test_a_topic_that_does_not_exist_is_assigned_when_it_is_created(group, root):
    """Until then its subscriber owns nothing (E19, M16)."""
    member = join(group, ["late"])
    complete_rebalance(member)
    assert member.owned == set()
    make_topics(root, late=2)
    group.check_topics()
    complete_rebalance(member)

    assert member.owned == {TopicPartition("late", 0), TopicPartition("late", 1)}


# Acquiring


def test_a_partition_is_acquired_only_after_its_owner_has_released_it(group):
    """A partition never has two owners (M22)."""
    member, other = join(group), join(group)
    follow(member)
    other.check_assignment(RANGE)
    late = join(group)
    late.check_assignment(RANGE)
    before = owners(group)
    acquired = [*other.acquire(from_end=False), *late.acquire(from_end=False)]
    assert not before.keys() & set(acquired)

    complete_rebalance(member, other, late)
    assert sorted(owners(group)) == ALL
    assert sorted(len(participant.owned) for participant in (member, other, late)) == [1, 1, 2]


def test_an_assigned_partition_with_an_owner_is_awaited_and_then_added(group):
    """Members go on reading the partitions that they keep (M20)."""
    member = join(group)
    complete_rebalance(member)
    other = join(group)
    step = other.check_assignment(RANGE).step
    assert (step.added, len(step.awaited)) == ((), 2)
    assert other.acquire(from_end=False) == {}

    own_step = member.check_assignment(RANGE).step
    assert (len(own_step.kept), own_step.revoked) == (2, step.awaited)
    member.commit(at(5, own_step.kept[0].partition))
    member.release(own_step.revoked)
    assert other.changed()
    assert other.check_assignment(RANGE).step.added == step.awaited
    assert sorted(other.acquire(from_end=False)) == list(step.awaited)


def test_every_owner_has_a_higher_epoch(group):
    """The epoch is higher than those of all previous owners (M22)."""
    member = join(group)
    for epoch in range(1, 5):
        complete_rebalance(member)
        assert {owner.epoch for owner in owner_rows(group).values()} == {epoch}
        member.leave() if epoch % 2 else (crash(member), group.remove_dead_members())
        member = join(group)


STARTS = {
    # (committed, from_end) → (committed, end)
    "nothing committed, from the start": (None, False, None),
    "nothing committed, from the end": (None, True, 3),
    "something committed": (2, False, None),
    "something committed, from the end": (2, True, 3),
    "zero committed, from the end": (0, True, 3),
}


@pytest.mark.parametrize("start", STARTS)
def test_acquire_returns_where_to_begin(group, root, start):
    """It is the committed offset, even 0, or else where the group began to read (E1, E2)."""
    committed, from_end, _ = STARTS[start]
    fill(root.partition("t", 0), 3)
    if committed is not None:
        group.commit(at(committed))
    start_position = follow(join(group), from_end=from_end)[T0]

    assert start_position.committed == (None if committed is None else OffsetAndMetadata(committed))
    assert start_position.end == (3 if from_end and committed is None else None)


def test_the_next_owner_begins_where_the_group_began(group, root):
    """It does not begin at the current end: no member has read the records before it (E1)."""
    member = join(group)
    assert {start.end for start in follow(member, from_end=True).values()} == {0}
    other = join(group)
    fill(root.partition("t", 0), 3)
    member.leave()
    assert {start.end for start in follow(other, from_end=True).values()} == {0}

    other.leave()
    assert follow(join(group), from_end=True)[T0].end == 3


def test_the_next_owner_begins_at_the_commit_before_the_release(group):
    """The committed offset is read in the transaction that acquires the partition (M23)."""
    member = join(group)
    complete_rebalance(member)
    for partition in ALL:
        member.commit(at(7 + partition.partition, partition.partition))
    other = join(group)
    member.release(member.check_assignment(RANGE).step.revoked)

    for partition, start in follow(other).items():
        assert start.committed.offset == 7 + partition.partition


# Committing


def removed_after_session_timeout(group, uptime, root):
    member = join(group)
    complete_rebalance(member)
    uptime.advance(SESSION_MS)
    group.remove_dead_members()
    return member


def replaced_after_session_timeout(group, uptime, root):
    member = removed_after_session_timeout(group, uptime, root)
    complete_rebalance(join(group))
    return member


def released(group, uptime, root):
    member = join(group)
    complete_rebalance(member)
    member.release([T0])
    return member


def given_away(group, uptime, root):
    member = join(group)
    complete_rebalance(member)
    other = join(group)
    complete_rebalance(member, other)
    return other if T0 in member.owned else member


def fenced(group, uptime, root):
    member = join(group, instance_id="i")
    complete_rebalance(member)
    complete_rebalance(join(group, instance_id="i"))
    return member


def of_another_topic(group, uptime, root):
    member = join(group)
    complete_rebalance(member)
    root.delete_topic("t")
    make_topics(root, t=4)
    return member


def of_an_older_epoch(group, uptime, root):
    """Another handle of the member acquired the partition again, as after a lost answer."""
    member = join(group)
    complete_rebalance(member)
    second = GroupMember(group, member.info, member._lock)
    second.check_assignment(RANGE)
    second.acquire(from_end=False)
    return member


def joined_only(group, uptime, root):
    member = join(group)
    member.check_assignment(RANGE)
    return member


STALE = {
    "its session ended": (removed_after_session_timeout, "no longer a member"),
    "another member owns it": (replaced_after_session_timeout, "no longer a member"),
    "it released it": (released, "is not assigned"),
    "another member acquired it": (given_away, "is not assigned"),
    "its instance id was taken over": (fenced, "Another member, process"),
    "the topic was created again": (of_another_topic, "deleted and created again"),
    "it owns it with another epoch": (
        of_an_older_epoch,
        "no longer owns the partition with epoch 1; the owner is .* 2",
    ),
    "it never acquired it": (joined_only, "is not assigned"),
}


@pytest.mark.parametrize("stale", STALE)
def test_a_commit_of_a_member_that_is_not_the_owner_is_refused(group, uptime, root, stale):
    """The check is in the transaction of the write; no offset is written (E23, P14, M22)."""
    group.commit({**at(1), **at(1, 1)})
    make_stale, message = STALE[stale]
    member = make_stale(group, uptime, root)
    before = offset_of(group, T0), offset_of(group, T1)
    with pytest.raises(CommitFailedError, match=message) as raised:
        member.commit({**at(9, 1), **at(9)})

    assert (raised.value.group, raised.value.member) == ("g", member.id)
    assert "poll" in str(raised.value)
    assert (offset_of(group, T0), offset_of(group, T1)) == before


def test_a_commit_writes_all_offsets_or_none(group):
    """None if only one of its partitions has another owner (E23)."""
    member, other = join(group), join(group)
    complete_rebalance(member, other)
    own_partition, other_partition = sorted(member.owned)[0], sorted(other.owned)[0]
    with pytest.raises(CommitFailedError) as raised:
        member.commit({own_partition: OffsetAndMetadata(5), other_partition: OffsetAndMetadata(5)})

    assert (raised.value.topic, raised.value.partition) == tuple(other_partition)
    assert offset_of(group, own_partition) is None
    member.commit({own_partition: OffsetAndMetadata(5)})
    assert (offset_of(group, own_partition), offset_of(group, other_partition)) == (5, None)


def test_a_commit_for_a_deleted_topic_raises(group, root):
    """The error is UnknownTopicOrPartitionError."""
    member = join(group)
    complete_rebalance(member)
    root.delete_topic("t")
    with pytest.raises(UnknownTopicOrPartitionError):
        member.commit(at(1))


def test_an_owner_may_commit_during_a_rebalance(group):
    """Commits of the old generation are accepted until the release of the partition (E23)."""
    member = join(group)
    complete_rebalance(member)
    join(group)
    member.commit(at(5))
    member.check_assignment(RANGE)
    member.commit({partition: OffsetAndMetadata(6) for partition in ALL})

    assert offset_of(group) == 6


# Checking the assignment


def test_a_member_checks_again_until_the_target_is_current(group, monkeypatch):
    """No other member may be left to notice a change during the rebalance."""
    member = join(group)
    rebalance = group.rebalance

    def rebalance_then_crash_another(assignors):
        rebalance(assignors)
        crashed = join(group)
        crash(crashed)
        monkeypatch.undo()

    monkeypatch.setattr(group, "rebalance", rebalance_then_crash_another)
    member.check_assignment(RANGE)
    assert not group.read().target_is_current
    assert member.changed()


def lose_answer(group, step):
    """Run a step that commits, but raises before the member has the answer."""

    class BrokenWake:
        def advance(self):
            raise KeyboardInterrupt

    wake, group.context.wake = group.context.wake, BrokenWake()
    with pytest.raises(KeyboardInterrupt):
        step()
    group.context.wake = wake


def test_a_partition_released_without_an_answer_can_be_acquired_again(group):
    """The rows count: a member keeps only the partitions that it owns according to them."""
    member = join(group)
    complete_rebalance(member)
    lose_answer(group, lambda: member.release([T0]))
    with pytest.raises(CommitFailedError, match="the owner is no member with epoch 1"):
        member.commit(at(3))

    assert member.check_assignment(RANGE).step == RebalanceStep(tuple(ALL[1:]), (), (T0,), ())
    assert list(member.acquire(from_end=False)) == [T0]
    member.commit(at(3))


def test_a_partition_acquired_without_an_answer_is_acquired_again(group):
    """The second time it has a new epoch."""
    member = join(group)
    member.check_assignment(RANGE)
    lose_answer(group, lambda: member.acquire(from_end=False))
    assert member.owned == set()

    assert member.check_assignment(RANGE).step.added == tuple(ALL)
    complete_rebalance(member)
    member.commit(at(3))
    assert {owner.epoch for owner in owner_rows(group).values()} == {2}


def test_a_partition_acquired_without_an_answer_is_released_if_assigned_to_another(group):
    """Otherwise no member could ever acquire it."""
    member = join(group)
    member.check_assignment(RANGE)
    lose_answer(group, lambda: member.acquire(from_end=False))
    other = join(group)
    complete_rebalance(other, member)

    assert (len(member.owned), len(other.owned)) == (2, 2)
    assert sorted(owners(group)) == ALL


def test_partitions_may_be_released_from_any_iterable(group):
    """A partition that the iterable repeats is released once."""
    member = join(group)
    complete_rebalance(member)
    member.release(partition for partition in (T0, T0, T1))
    member.release([])

    assert member.owned == set(ALL[2:])
    assert sorted(owners(group)) == ALL[2:]


def test_a_topic_that_was_created_again_is_released_and_acquired_again(group, root):
    """The new topic has other rows (A38)."""
    member = join(group)
    complete_rebalance(member)
    member.commit(at(5))
    root.delete_topic("t")
    make_topics(root, t=2)
    group.check_topics()

    step = member.check_assignment(RANGE).step
    assert (step.kept, step.revoked) == ((), tuple(ALL))
    assert member.acquire(from_end=False) == {}, "it must first release the old ones"
    member.release(step.revoked)
    assert {start.committed for start in follow(member).values()} == {None}
    assert sorted(owners(group)) == [T0, T1]


# Leaving


def test_a_dynamic_member_that_leaves_is_removed_at_once(group):
    """`leave` may be repeated (M11, E24)."""
    member, other = join(group), join(group)
    complete_rebalance(member, other)
    member.leave()
    member.leave()

    assert list(group.read().members) == [other.id]
    follow(other)
    assert set(owners(group).values()) == {other.id}
    assert len(owners(group)) == 4


CALLS = {
    "heartbeat": lambda member: member.heartbeat(),
    "check_assignment": lambda member: member.check_assignment(RANGE),
    "acquire": lambda member: member.acquire(from_end=False),
    "resubscribe": lambda member: member.resubscribe(["t"]),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_of_a_removed_member_raises(group, call):
    """It has lost its partitions, and must join again (M11)."""
    member = join(group)
    complete_rebalance(member)
    group.remove_members([member.id])
    with pytest.raises(UnknownMemberIdError, match="was removed from the group"):
        CALLS[call](member)
    member.release(member.owned)
    member.leave()


def test_a_static_member_that_returns_keeps_its_partitions_without_a_rebalance(group):
    """No target assignment is computed, and no partition moves (M13)."""
    member, other = join(group, instance_id="i"), join(group)
    complete_rebalance(member, other)
    owned, generation = member.owned, group.read().generation
    member.leave()
    returned = join(group, instance_id="i")
    step = returned.check_assignment(RANGE).step

    assert set(step.added) == owned
    assert follow(returned).keys() == owned
    assert other.check_assignment(RANGE).step.kept == tuple(sorted(other.owned))
    assert group.read().generation == generation
    returned.commit({partition: OffsetAndMetadata(3) for partition in owned})


@pytest.mark.parametrize("call", CALLS)
def test_a_second_member_of_the_same_instance_id_fences_the_first(group, call):
    """The next call of the first one raises FencedInstanceIdError (M13)."""
    member = join(group, instance_id="i")
    complete_rebalance(member)
    second = join(group, instance_id="i")
    with pytest.raises(FencedInstanceIdError, match="'i'"):
        CALLS[call](member)

    member.leave()
    complete_rebalance(second)
    assert second.owned == set(ALL)


@pytest.mark.parametrize("late", [False, True], ids=["before it is back", "after it is back"])
def test_a_static_member_that_returns_releases_what_is_assigned_to_others_meanwhile(group, late):
    """Its previous run acquired them, and it releases them (M13, M22)."""
    member = join(group, instance_id="i")
    complete_rebalance(member)
    member.leave()
    other = None if late else join(group)
    if other is not None:
        follow(other)
    returned = join(group, instance_id="i")
    other = other or join(group)
    complete_rebalance(other, returned)

    assert (len(returned.owned), len(other.owned)) == (2, 2)
    assert group.snapshot().state == "Stable"


def test_a_static_member_does_not_wait_for_a_topic_it_is_no_longer_subscribed_to(group, root):
    """It returns with another subscription (M13)."""
    make_topics(root, u=1)
    member = join(group, instance_id="i")
    complete_rebalance(member)
    member.leave()
    returned, other = join(group, ["u"], instance_id="i"), join(group)
    complete_rebalance(returned, other)

    assert returned.owned == {TopicPartition("u", 0)}
    assert other.owned == set(ALL)


# Processes


def join_and_acquire(path, ready):
    """Join in a child, and acquire everything."""
    root = open_root(path)
    member = join(make_group(root))
    complete_rebalance(member)
    ready()


def test_a_killed_owner_is_found_dead_at_once(group, root):
    """The survivors own everything before its session times out (M10, P15)."""
    with PausedChild(lambda ready: join_and_acquire(root.path, ready)) as child:
        member = join(group)
        follow(member)
        assert member.owned == set()
        assert group.remove_dead_members() == []
        (dead,) = (
            member_info
            for member_info in group.read().members.values()
            if member_info.pid == child.pid
        )
        child.kill()
        started = time.monotonic()
        assert group.remove_dead_members() == [dead.id]
        follow(member)
        seconds = time.monotonic() - started

    assert member.owned == set(ALL)
    assert seconds < patient(1)


def test_a_child_of_a_killed_owner_does_not_keep_it_alive(group, root, tmp_path):
    """A fork closes the lock that it inherited (P18)."""
    pid_file = tmp_path / "pid"

    def parent_of_one(ready):
        owner = open_root(root.path)
        complete_rebalance(join(make_group(owner)))
        written, write_end = os.pipe()
        if os.fork() == 0:
            # Here the child has closed what it inherited, which may take it a while.
            pid_file.write_text(str(os.getpid()))
            os.write(write_end, b".")
            time.sleep(60)
        os.read(written, 1)
        ready()

    with PausedChild(parent_of_one) as child:
        try:
            (dead,) = group.read().members
            child.kill()
            assert group.remove_dead_members() == [dead]
        finally:
            os.kill(int(pid_file.read_text()), signal.SIGKILL)


def test_a_child_does_not_end_the_membership_of_its_parent(group):
    """The child may use the inherited objects, and end (P18)."""
    member = join(group)
    complete_rebalance(member)

    def leave():
        group.context.live.get(b"x")
        member.leave()

    in_child(leave)
    assert group.remove_dead_members() == []
    member.commit(at(3))
    follow(member)
    assert member.owned == set(ALL)


def test_a_stopped_owner_is_replaced_and_its_commit_refused(group, root, uptime):
    """It is replaced after its session timeout; when it resumes its calls raise (P14, M22)."""

    def stops_and_commits():
        member_in_child = join(make_group(open_root(root.path)))
        complete_rebalance(member_in_child)
        member_in_child.commit(at(1))
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(CommitFailedError):
            member_in_child.commit(at(2))
        with pytest.raises(UnknownMemberIdError):
            member_in_child.heartbeat()
        return member_in_child.id

    child = forks.Child(stops_and_commits)
    assert child.stopped()
    member = join(group)
    follow(member)
    assert group.remove_dead_members() == [], "the owner is stopped, not dead"
    uptime.advance(SESSION_MS)
    (removed_id,) = group.remove_dead_members(exclude=member.id)
    assert follow(member)[T0].committed.offset == 1
    member.commit(at(9))
    child.go_on()

    end = child.end()
    assert (end.finding(), end.value) == (None, removed_id)
    assert offset_of(group) == 9


def test_processes_that_join_at_once_own_each_partition_once(group, root):
    """Each step of a member is one transaction (M22)."""

    def share():
        member = join(make_group(open_root(root.path)))
        deadline = time.monotonic() + patient(20)
        unchanged_rounds = 0
        while time.monotonic() < deadline and unchanged_rounds < 50:
            follow(member)
            unchanged_rounds = (
                unchanged_rounds + 1
                if not member.changed() and len(member.group.read().members) == 3
                else 0
            )
            time.sleep(0.001)
        member.commit({partition: OffsetAndMetadata(1) for partition in member.owned})
        os.kill(os.getpid(), signal.SIGSTOP)
        return sorted(member.owned)

    children = [forks.Child(share) for _ in range(3)]
    assert all(child.stopped() for child in children)
    assert len(group.read().members) == 3
    final_owners = owners(group)
    for child in children:
        child.go_on()
    assignments = [child.end().value for child in children]

    assert (
        sorted(member for assignment in assignments for member in assignment)
        == ALL
        == sorted(final_owners)
    )
    assert sorted(map(len, assignments)) == [1, 1, 2]
    assert {offset_of(group, partition) for partition in ALL} == {1}


def test_threads_that_join_and_leave_end_with_one_owner_per_partition(group):
    """Twelve members join and leave in four threads; then the last one owns everything."""
    errors = []

    def come_and_go():
        try:
            for _ in range(3):
                member = join(group)
                for _ in range(3):
                    follow(member)
                member.leave()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    last = join(group)
    complete_rebalance(last)
    assert owners(group) == dict.fromkeys(ALL, last.id)
