"""One member: joins, takes, commits, releases, leaves; dies, is stopped, and returns (M5–M22)."""

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
    crash,
    follow,
    join,
    make_group,
    make_topics,
    owner_rows,
    owners,
    settle,
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
from embedlog.record import OffsetAndMetadata, TopicPartition

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
ALL = [TopicPartition("t", n) for n in range(4)]


@pytest.fixture
def uptime():
    return Uptime()


@pytest.fixture
def group(root, uptime):
    """The group g of a root with the topic t of four partitions."""
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
    """The member id begins with it, as far as an LMDB key can have it."""
    make_topics(root, t=1)
    group = make_group(root, "g" * 200)
    member = join(group, client_id=client)
    settle(member)
    member.commit(at(3))

    assert member.id.startswith(CLIENTS[client])
    assert group.read().members[member.id].client_id == client
    assert offset_of(group) == 3
    assert group.remove_members([member.id]) == [member.id]


def test_a_new_member_owns_nothing_before_it_acquires(group):
    """Its assignment is added, acquired, and then kept."""
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
    """Neither a member nor a lock file (M5, M12)."""
    join(group)
    with pytest.raises(InconsistentGroupProtocolError):
        join(group, assignors=list(STICKY))
    with pytest.raises(GroupMaxSizeReachedError):
        join(group, max_members=1)

    assert len(group.read().members) == 1
    assert sum(name.startswith("member-") for name in group.context.files.list("locks")) == 1


@pytest.mark.parametrize(
    "wish", [{"max_members": 1}, {"assignors": list(STICKY)}], ids=["room", "wish"]
)
def test_a_dead_member_does_not_keep_another_out(group, wish):
    """Neither by the maximum of members nor by its assignors (M5, M10, M12)."""
    crash(join(group))
    member = join(group, **wish)
    assert list(group.read().members) == [member.id]


def test_a_topic_that_does_not_exist_is_waited_for(group, root):
    """It is assigned once it is created (E19, M16)."""
    member = join(group, ["late"])
    settle(member)
    assert member.owned == set()
    make_topics(root, late=2)
    group.check_topics()
    settle(member)

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
    taken = [*other.acquire(from_end=False), *late.acquire(from_end=False)]
    assert not before.keys() & set(taken)

    settle(member, other, late)
    assert sorted(owners(group)) == ALL
    assert sorted(len(each.owned) for each in (member, other, late)) == [1, 1, 2]


def test_an_assigned_partition_with_an_owner_is_awaited_and_then_added(group):
    """Members go on reading the partitions that they keep (M20)."""
    member = join(group)
    settle(member)
    other = join(group)
    step = other.check_assignment(RANGE).step
    assert (step.added, len(step.awaited)) == ((), 2)
    assert other.acquire(from_end=False) == {}

    mine = member.check_assignment(RANGE).step
    assert (len(mine.kept), mine.revoked) == (2, step.awaited)
    member.commit(at(5, mine.kept[0].partition))
    member.release(mine.revoked)
    assert other.changed()
    assert other.check_assignment(RANGE).step.added == step.awaited
    assert sorted(other.acquire(from_end=False)) == list(step.awaited)


def test_every_owner_has_a_higher_epoch(group):
    """Higher than those of all owners before it (M22)."""
    member = join(group)
    for epoch in range(1, 5):
        settle(member)
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
    """At the committed offset, even 0; without one where the group began to read (E1, E2)."""
    committed, from_end, _ = STARTS[start]
    fill(root.partition("t", 0), 3)
    if committed is not None:
        group.commit(at(committed))
    found = follow(join(group), from_end=from_end)[T0]

    assert found.committed == (None if committed is None else OffsetAndMetadata(committed))
    assert found.end == (3 if from_end and committed is None else None)


def test_the_next_owner_begins_where_the_group_began(group, root):
    """Not at the current end: no member has read the records in between (E1)."""
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
    settle(member)
    for each in ALL:
        member.commit(at(7 + each.partition, each.partition))
    other = join(group)
    member.release(member.check_assignment(RANGE).step.revoked)

    for each, start in follow(other).items():
        assert start.committed.offset == 7 + each.partition


# Committing


def stopped(group, uptime, root):
    member = join(group)
    settle(member)
    uptime.advance(SESSION_MS)
    group.remove_dead_members()
    return member


def overtaken(group, uptime, root):
    member = stopped(group, uptime, root)
    settle(join(group))
    return member


def released(group, uptime, root):
    member = join(group)
    settle(member)
    member.release([T0])
    return member


def given_away(group, uptime, root):
    member = join(group)
    settle(member)
    other = join(group)
    settle(member, other)
    return other if T0 in member.owned else member


def fenced(group, uptime, root):
    member = join(group, instance_id="i")
    settle(member)
    settle(join(group, instance_id="i"))
    return member


def of_another_topic(group, uptime, root):
    member = join(group)
    settle(member)
    root.delete_topic("t")
    make_topics(root, t=4)
    return member


def of_an_older_epoch(group, uptime, root):
    """Another handle of the member acquired the partition again, as after a lost answer."""
    member = join(group)
    settle(member)
    second = GroupMember(group, member.info, member._lock)
    second.check_assignment(RANGE)
    second.acquire(from_end=False)
    return member


def joined_only(group, uptime, root):
    member = join(group)
    member.check_assignment(RANGE)
    return member


STALE = {
    "its session ended": (stopped, "no longer a member"),
    "another member owns it": (overtaken, "no longer a member"),
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
    """In the transaction that would write it, with all offsets of the call (E23, P14, M22)."""
    group.commit({**at(1), **at(1, 1)})
    make, words = STALE[stale]
    member = make(group, uptime, root)
    before = offset_of(group, T0), offset_of(group, T1)
    with pytest.raises(CommitFailedError, match=words) as raised:
        member.commit({**at(9, 1), **at(9)})

    assert (raised.value.group, raised.value.member) == ("g", member.id)
    assert "poll" in str(raised.value)
    assert (offset_of(group, T0), offset_of(group, T1)) == before


def test_a_commit_writes_all_offsets_or_none(group):
    """Also if just one of its partitions has another owner (E23)."""
    member, other = join(group), join(group)
    settle(member, other)
    mine, yours = sorted(member.owned)[0], sorted(other.owned)[0]
    with pytest.raises(CommitFailedError) as raised:
        member.commit({mine: OffsetAndMetadata(5), yours: OffsetAndMetadata(5)})

    assert (raised.value.topic, raised.value.partition) == tuple(yours)
    assert offset_of(group, mine) is None
    member.commit({mine: OffsetAndMetadata(5)})
    assert (offset_of(group, mine), offset_of(group, yours)) == (5, None)


def test_a_commit_for_a_deleted_topic_raises(group, root):
    """The error is the one for an unknown topic."""
    member = join(group)
    settle(member)
    root.delete_topic("t")
    with pytest.raises(UnknownTopicOrPartitionError):
        member.commit(at(1))


def test_an_owner_may_commit_during_a_rebalance(group):
    """Commits of the old generation are accepted until it releases the partition (E23)."""
    member = join(group)
    settle(member)
    join(group)
    member.commit(at(5))
    member.check_assignment(RANGE)
    member.commit({each: OffsetAndMetadata(6) for each in ALL})

    assert offset_of(group) == 6


# Checking the assignment


def test_a_member_checks_again_until_the_target_is_current(group, monkeypatch):
    """After a change during the rebalance there may be no other member to notice it."""
    member = join(group)
    rebalance = group.rebalance

    def unsettle_after(assignors):
        rebalance(assignors)
        crashed = join(group)
        crash(crashed)
        monkeypatch.undo()

    monkeypatch.setattr(group, "rebalance", unsettle_after)
    member.check_assignment(RANGE)
    assert not group.read().settled
    assert member.changed()


def answer_lost(group, work):
    """Run a step that is committed, but whose answer does not reach the member."""

    class Broken:
        def advance(self):
            raise KeyboardInterrupt

    wake, group.context.wake = group.context.wake, Broken()
    with pytest.raises(KeyboardInterrupt):
        work()
    group.context.wake = wake


def test_a_partition_released_without_an_answer_can_be_acquired_again(group):
    """The rows count: a member keeps only what they say it owns."""
    member = join(group)
    settle(member)
    answer_lost(group, lambda: member.release([T0]))
    with pytest.raises(CommitFailedError, match="the owner is no member with epoch 1"):
        member.commit(at(3))

    assert member.check_assignment(RANGE).step == RebalanceStep(tuple(ALL[1:]), (), (T0,), ())
    assert list(member.acquire(from_end=False)) == [T0]
    member.commit(at(3))


def test_a_partition_acquired_without_an_answer_is_acquired_again(group):
    """With a new epoch."""
    member = join(group)
    member.check_assignment(RANGE)
    answer_lost(group, lambda: member.acquire(from_end=False))
    assert member.owned == set()

    assert member.check_assignment(RANGE).step.added == tuple(ALL)
    settle(member)
    member.commit(at(3))
    assert {owner.epoch for owner in owner_rows(group).values()} == {2}


def test_a_partition_acquired_without_an_answer_is_released_if_assigned_to_another(group):
    """Otherwise no member would ever get it."""
    member = join(group)
    member.check_assignment(RANGE)
    answer_lost(group, lambda: member.acquire(from_end=False))
    other = join(group)
    settle(other, member)

    assert (len(member.owned), len(other.owned)) == (2, 2)
    assert sorted(owners(group)) == ALL


def test_partitions_may_be_released_from_any_iterable(group):
    """Each once, even if the iterable repeats it."""
    member = join(group)
    settle(member)
    member.release(each for each in (T0, T0, T1))
    member.release([])

    assert member.owned == set(ALL[2:])
    assert sorted(owners(group)) == ALL[2:]


def test_a_topic_that_was_created_again_is_released_and_acquired_again(group, root):
    """The new topic has other rows (A38)."""
    member = join(group)
    settle(member)
    member.commit(at(5))
    root.delete_topic("t")
    make_topics(root, t=2)
    group.check_topics()

    step = member.check_assignment(RANGE).step
    assert (step.kept, step.revoked) == ((), tuple(ALL))
    assert member.acquire(from_end=False) == {}, "first it must let go of the old ones"
    member.release(step.revoked)
    assert {start.committed for start in follow(member).values()} == {None}
    assert sorted(owners(group)) == [T0, T1]


# Leaving


def test_a_dynamic_member_that_leaves_is_removed_at_once(group):
    """And may leave repeatedly (M11, E24)."""
    member, other = join(group), join(group)
    settle(member, other)
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
    """Its partitions are lost, and it must join again (M11)."""
    member = join(group)
    settle(member)
    group.remove_members([member.id])
    with pytest.raises(UnknownMemberIdError, match="was removed from the group"):
        CALLS[call](member)
    member.release(member.owned)
    member.leave()


def test_a_static_member_that_returns_keeps_its_partitions_without_a_rebalance(group):
    """No target is computed, and nothing moves (M13)."""
    member, other = join(group, instance_id="i"), join(group)
    settle(member, other)
    had, generation = member.owned, group.read().generation
    member.leave()
    again = join(group, instance_id="i")
    step = again.check_assignment(RANGE).step

    assert set(step.added) == had
    assert follow(again).keys() == had
    assert other.check_assignment(RANGE).step.kept == tuple(sorted(other.owned))
    assert group.read().generation == generation
    again.commit({each: OffsetAndMetadata(3) for each in had})


@pytest.mark.parametrize("call", CALLS)
def test_a_second_member_of_the_same_instance_id_fences_the_first(group, call):
    """The next call of the first one raises that (M13)."""
    member = join(group, instance_id="i")
    settle(member)
    second = join(group, instance_id="i")
    with pytest.raises(FencedInstanceIdError, match="'i'"):
        CALLS[call](member)

    member.leave()
    settle(second)
    assert second.owned == set(ALL)


@pytest.mark.parametrize("late", [False, True], ids=["before it is back", "after it is back"])
def test_a_static_member_that_returns_releases_what_is_assigned_to_others_meanwhile(group, late):
    """Although it never acquired it itself (M13, M22)."""
    member = join(group, instance_id="i")
    settle(member)
    member.leave()
    other = None if late else join(group)
    if other is not None:
        follow(other)
    again = join(group, instance_id="i")
    other = other or join(group)
    settle(other, again)

    assert (len(again.owned), len(other.owned)) == (2, 2)
    assert group.snapshot().state == "Stable"


def test_a_static_member_does_not_wait_for_a_topic_it_is_no_longer_subscribed_to(group, root):
    """It returns with another subscription (M13)."""
    make_topics(root, u=1)
    member = join(group, instance_id="i")
    settle(member)
    member.leave()
    again, other = join(group, ["u"], instance_id="i"), join(group)
    settle(again, other)

    assert again.owned == {TopicPartition("u", 0)}
    assert other.owned == set(ALL)


# Processes


def joined(path, ready):
    """In a child: join, acquire everything, and stay."""
    root = open_root(path)
    member = join(make_group(root))
    settle(member)
    ready()


def test_a_killed_owner_is_found_dead_at_once(group, root):
    """Without any timeout the survivors own everything (M10, P15)."""
    with PausedChild(lambda ready: joined(root.path, ready)) as child:
        member = join(group)
        follow(member)
        assert member.owned == set()
        assert group.remove_dead_members() == []
        (dead,) = (each for each in group.read().members.values() if each.pid == child.pid)
        child.kill()
        started = time.monotonic()
        assert group.remove_dead_members() == [dead.id]
        follow(member)
        took = time.monotonic() - started

    assert member.owned == set(ALL)
    assert took < patient(1)


def test_a_child_of_a_killed_owner_does_not_keep_it_alive(group, root, tmp_path):
    """A fork closes the lock that it inherited (P18)."""
    pid_file = tmp_path / "pid"

    def parent_of_one(ready):
        owner = open_root(root.path)
        settle(join(make_group(owner)))
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
        pid_file.write_text(str(pid))
        ready()

    with PausedChild(parent_of_one) as child:
        try:
            (dead,) = group.read().members
            child.kill()
            assert group.remove_dead_members() == [dead]
        finally:
            os.kill(int(pid_file.read_text()), signal.SIGKILL)


def test_a_child_does_not_end_the_membership_of_its_parent(group):
    """Whatever it does with inherited objects, and however it ends (P18)."""
    member = join(group)
    settle(member)

    def leave():
        group.context.live.get(b"x")
        member.leave()

    in_child(leave)
    assert group.remove_dead_members() == []
    member.commit(at(3))
    follow(member)
    assert member.owned == set(ALL)


def test_a_stopped_owner_is_replaced_and_its_commit_refused(group, root, uptime):
    """After its session; and when it wakes it does no harm (P14, M22)."""

    def stops_and_commits():
        own = join(make_group(open_root(root.path)))
        settle(own)
        own.commit(at(1))
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(CommitFailedError):
            own.commit(at(2))
        with pytest.raises(UnknownMemberIdError):
            own.heartbeat()
        return own.id

    child = forks.Child(stops_and_commits)
    assert child.stopped()
    member = join(group)
    follow(member)
    assert group.remove_dead_members() == [], "it is stopped, and not dead"
    uptime.advance(SESSION_MS)
    (gone,) = group.remove_dead_members(exclude=member.id)
    assert follow(member)[T0].committed.offset == 1
    member.commit(at(9))
    child.go_on()

    end = child.end()
    assert (end.finding(), end.value) == (None, gone)
    assert offset_of(group) == 9


def test_processes_that_join_at_once_own_each_partition_once(group, root):
    """Each step is one transaction (M22)."""

    def share():
        member = join(make_group(open_root(root.path)))
        deadline = time.monotonic() + patient(20)
        rest = 0
        while time.monotonic() < deadline and rest < 50:
            follow(member)
            rest = rest + 1 if not member.changed() and len(member.group.read().members) == 3 else 0
            time.sleep(0.001)
        member.commit({each: OffsetAndMetadata(1) for each in member.owned})
        os.kill(os.getpid(), signal.SIGSTOP)
        return sorted(member.owned)

    children = [forks.Child(share) for _ in range(3)]
    assert all(child.stopped() for child in children)
    assert len(group.read().members) == 3
    now = owners(group)
    for child in children:
        child.go_on()
    parts = [child.end().value for child in children]

    assert sorted(member for part in parts for member in part) == ALL == sorted(now)
    assert sorted(map(len, parts)) == [1, 1, 2]
    assert {offset_of(group, each) for each in ALL} == {1}


def test_threads_that_join_and_leave_end_with_one_owner_per_partition(group):
    """Twelve members in four threads; the last one owns everything."""
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
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert errors == []
    last = join(group)
    settle(last)
    assert owners(group) == dict.fromkeys(ALL, last.id)
