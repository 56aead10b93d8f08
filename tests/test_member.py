"""One member: joins, takes, commits, releases, leaves; dies, is stopped, and returns (M5–M22)."""

import os
import signal
import threading
import time

import pytest
from support import forks
from support.children import Held, in_child
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
from embedlog.errors import (
    CommitFailedError,
    FencedInstanceIdError,
    GroupMaxSizeReachedError,
    InconsistentGroupProtocolError,
    UnknownMemberIdError,
    UnknownTopicOrPartitionError,
)
from embedlog.groups.member import GroupMember
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


def offset_of(group, one=T0):
    found = group.committed([one])[one]
    return None if found is None else found.position.offset


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
def test_a_client_may_have_any_name(root, client):
    """It goes before the member's id, as far as a key can have it."""
    make_topics(root, t=1)
    group = make_group(root, "g" * 200)
    one = join(group, client_id=client)
    settle(one)
    one.commit(at(3))

    assert one.id.startswith(CLIENTS[client])
    assert group.read().members[one.id].client_id == client
    assert offset_of(group) == 3
    assert group.remove_members([one.id]) == [one.id]


def test_who_joins_owns_nothing_before_it_takes(group):
    """It is told what is meant for it, takes that, and then has it."""
    one = join(group)
    assert one.owned == set()
    assert one.changed()
    assert one.look(RANGE).step == RebalanceStep((), (), tuple(ALL), ())
    assert owners(group) == {}

    assert sorted(one.take(from_end=False)) == ALL
    assert one.owned == set(ALL)
    assert one.look(RANGE).step == RebalanceStep(tuple(ALL), (), (), ())
    assert not one.changed()


def test_who_is_refused_leaves_nothing_behind(group):
    """Neither a member nor its lock (M5, M12)."""
    join(group)
    with pytest.raises(InconsistentGroupProtocolError):
        join(group, assignors=list(STICKY))
    with pytest.raises(GroupMaxSizeReachedError):
        join(group, most=1)

    assert len(group.read().members) == 1
    assert sum(name.startswith("member-") for name in group.shared.files.list("locks")) == 1


@pytest.mark.parametrize("wish", [{"most": 1}, {"assignors": list(STICKY)}], ids=["room", "wish"])
def test_one_that_died_does_not_keep_another_out(group, wish):
    """Neither by its place nor by its assignors (M5, M10, M12)."""
    crash(join(group))
    one = join(group, **wish)
    assert list(group.read().members) == [one.id]


def test_a_topic_that_is_not_there_is_waited_for(group, root):
    """It is taken when it was created (E19, M16)."""
    one = join(group, ["late"])
    settle(one)
    assert one.owned == set()
    make_topics(root, late=2)
    group.notice_topics()
    settle(one)

    assert one.owned == {TopicPartition("late", 0), TopicPartition("late", 1)}


# Taking


def test_a_partition_is_taken_only_when_its_owner_has_released_it(group):
    """No instant has two owners (M22)."""
    one, other = join(group), join(group)
    follow(one)
    other.look(RANGE)
    late = join(group)
    late.look(RANGE)
    before = owners(group)
    taken = [*other.take(from_end=False), *late.take(from_end=False)]
    assert not before.keys() & set(taken)

    settle(one, other, late)
    assert sorted(owners(group)) == ALL
    assert sorted(len(each.owned) for each in (one, other, late)) == [1, 1, 2]


def test_what_is_meant_for_a_member_is_awaited_and_then_added(group):
    """One after the other, without anybody stopping what it keeps (M20)."""
    one = join(group)
    settle(one)
    other = join(group)
    step = other.look(RANGE).step
    assert (step.added, len(step.awaited)) == ((), 2)
    assert other.take(from_end=False) == {}

    mine = one.look(RANGE).step
    assert (len(mine.kept), mine.revoked) == (2, step.awaited)
    one.commit(at(5, mine.kept[0].partition))
    one.release(mine.revoked)
    assert other.changed()
    assert other.look(RANGE).step.added == step.awaited
    assert sorted(other.take(from_end=False)) == list(step.awaited)


def test_every_owner_has_a_higher_epoch(group):
    """Than all before it (M22)."""
    one = join(group)
    for epoch in range(1, 5):
        settle(one)
        assert {owner.epoch for owner in owner_rows(group).values()} == {epoch}
        one.leave() if epoch % 2 else (crash(one), group.sweep())
        one = join(group)


STARTS = {
    # (committed, from_end) → (committed, end)
    "nothing committed, from the start": (None, False, None),
    "nothing committed, from the end": (None, True, 3),
    "something committed": (2, False, None),
    "something committed, from the end": (2, True, 3),
    "zero committed, from the end": (0, True, 3),
}


@pytest.mark.parametrize("start", STARTS)
def test_who_takes_a_partition_is_told_where_to_begin(group, root, start):
    """At what was committed, even if that is 0; else where the group began to read (E1, E2)."""
    committed, from_end, _ = STARTS[start]
    fill(root.partition("t", 0), 3)
    if committed is not None:
        group.commit(at(committed))
    found = follow(join(group), from_end=from_end)[T0]

    assert found.committed == (None if committed is None else OffsetAndMetadata(committed))
    assert found.end == (3 if from_end and committed is None else None)


def test_the_next_owner_begins_where_the_group_began(group, root):
    """Not at the end of later: what came in between nobody has read (E1)."""
    one = join(group)
    assert {start.end for start in follow(one, from_end=True).values()} == {0}
    other = join(group)
    fill(root.partition("t", 0), 3)
    one.leave()
    assert {start.end for start in follow(other, from_end=True).values()} == {0}

    other.leave()
    assert follow(join(group), from_end=True)[T0].end == 3


def test_what_was_committed_before_a_release_is_where_the_next_owner_begins(group):
    """It is read in the transaction that takes the partition (M23)."""
    one = join(group)
    settle(one)
    for each in ALL:
        one.commit(at(7 + each.partition, each.partition))
    other = join(group)
    one.release(one.look(RANGE).step.revoked)

    for each, start in follow(other).items():
        assert start.committed.offset == 7 + each.partition


# Committing


def stopped(group, uptime, root):
    one = join(group)
    settle(one)
    uptime.advance(SESSION_MS)
    group.sweep()
    return one


def overtaken(group, uptime, root):
    one = stopped(group, uptime, root)
    settle(join(group))
    return one


def released(group, uptime, root):
    one = join(group)
    settle(one)
    one.release([T0])
    return one


def given_away(group, uptime, root):
    one = join(group)
    settle(one)
    other = join(group)
    settle(one, other)
    return other if T0 in one.owned else one


def fenced(group, uptime, root):
    one = join(group, instance_id="i")
    settle(one)
    settle(join(group, instance_id="i"))
    return one


def of_another_topic(group, uptime, root):
    one = join(group)
    settle(one)
    root.delete_topic("t")
    make_topics(root, t=4)
    return one


def of_an_older_epoch(group, uptime, root):
    """What another handle of the same member took over, after a lost answer perhaps."""
    one = join(group)
    settle(one)
    second = GroupMember(group, one.info, one._lock)
    second.look(RANGE)
    second.take(from_end=False)
    return one


def joined_only(group, uptime, root):
    one = join(group)
    one.look(RANGE)
    return one


STALE = {
    "it was silent for too long": (stopped, "no member any more"),
    "somebody else has it by now": (overtaken, "no member any more"),
    "it released it": (released, "is not assigned"),
    "it gave it to another one": (given_away, "is not assigned"),
    "its name was taken over": (fenced, "Another member, process"),
    "the topic is another one": (of_another_topic, "deleted and created again"),
    "it has it by another epoch": (of_an_older_epoch, "by epoch 2, no longer to this"),
    "it never took it": (joined_only, "is not assigned"),
}


@pytest.mark.parametrize("stale", STALE)
def test_a_commit_of_one_who_is_not_the_owner_is_refused(group, uptime, root, stale):
    """In the transaction that would write it, with all that came with it (E23, P14, M22)."""
    group.commit({**at(1), **at(1, 1)})
    make, words = STALE[stale]
    one = make(group, uptime, root)
    before = offset_of(group, T0), offset_of(group, T1)
    with pytest.raises(CommitFailedError, match=words) as raised:
        one.commit({**at(9, 1), **at(9)})

    assert (raised.value.group, raised.value.member) == ("g", one.id)
    assert "poll" in str(raised.value)
    assert (offset_of(group, T0), offset_of(group, T1)) == before


def test_all_of_a_commit_lands_or_nothing(group):
    """Also if one of its partitions only is somebody else's (E23)."""
    one, other = join(group), join(group)
    settle(one, other)
    mine, yours = sorted(one.owned)[0], sorted(other.owned)[0]
    with pytest.raises(CommitFailedError) as raised:
        one.commit({mine: OffsetAndMetadata(5), yours: OffsetAndMetadata(5)})

    assert (raised.value.topic, raised.value.partition) == tuple(yours)
    assert offset_of(group, mine) is None
    one.commit({mine: OffsetAndMetadata(5)})
    assert (offset_of(group, mine), offset_of(group, yours)) == (5, None)


def test_a_commit_for_a_topic_that_is_gone_says_so(group, root):
    """There is nothing to commit for."""
    one = join(group)
    settle(one)
    root.delete_topic("t")
    with pytest.raises(UnknownTopicOrPartitionError):
        one.commit(at(1))


def test_an_owner_may_commit_while_the_group_changes(group):
    """Commits of the old generation are accepted until it gives the partition up (E23)."""
    one = join(group)
    settle(one)
    join(group)
    one.commit(at(5))
    one.look(RANGE)
    one.commit({each: OffsetAndMetadata(6) for each in ALL})

    assert offset_of(group) == 6


# Looking


def test_a_member_looks_again_until_the_group_is_settled(group, monkeypatch):
    """If it is unsettled between two steps of a look, nobody else may be there to settle it."""
    one = join(group)
    settle_first = group.settle

    def unsettle_after(assignors):
        settle_first(assignors)
        crashed = join(group)
        crash(crashed)
        monkeypatch.undo()

    monkeypatch.setattr(group, "settle", unsettle_after)
    one.look(RANGE)
    assert not group.read().settled
    assert one.changed()


def answer_lost(group, work):
    """Do a step that is committed, but of which the member does not learn."""

    class Broken:
        def advance(self):
            raise KeyboardInterrupt

    wake, group.shared.wake = group.shared.wake, Broken()
    with pytest.raises(KeyboardInterrupt):
        work()
    group.shared.wake = wake


def test_what_was_released_without_an_answer_can_be_taken_again(group):
    """The rows count: what they do not say it owns, it does not keep."""
    one = join(group)
    settle(one)
    answer_lost(group, lambda: one.release([T0]))
    with pytest.raises(CommitFailedError, match="belongs to nobody by epoch 1"):
        one.commit(at(3))

    assert one.look(RANGE).step == RebalanceStep(tuple(ALL[1:]), (), (T0,), ())
    assert list(one.take(from_end=False)) == [T0]
    one.commit(at(3))


def test_what_was_taken_without_an_answer_is_taken_again(group):
    """By a new epoch."""
    one = join(group)
    one.look(RANGE)
    answer_lost(group, lambda: one.take(from_end=False))
    assert one.owned == set()

    assert one.look(RANGE).step.added == tuple(ALL)
    settle(one)
    one.commit(at(3))
    assert {owner.epoch for owner in owner_rows(group).values()} == {2}


def test_what_was_taken_without_an_answer_is_given_back_if_it_is_meant_for_another(group):
    """Else nobody would ever get it."""
    one = join(group)
    one.look(RANGE)
    answer_lost(group, lambda: one.take(from_end=False))
    other = join(group)
    settle(other, one)

    assert (len(one.owned), len(other.owned)) == (2, 2)
    assert sorted(owners(group)) == ALL


def test_partitions_may_be_released_from_any_iterable(group):
    """Once each, whatever is given twice."""
    one = join(group)
    settle(one)
    one.release(each for each in (T0, T0, T1))
    one.release([])

    assert one.owned == set(ALL[2:])
    assert sorted(owners(group)) == ALL[2:]


def test_a_topic_that_was_created_again_is_released_and_taken_anew(group, root):
    """Its rows are others (A38)."""
    one = join(group)
    settle(one)
    one.commit(at(5))
    root.delete_topic("t")
    make_topics(root, t=2)
    group.notice_topics()

    step = one.look(RANGE).step
    assert (step.kept, step.revoked) == ((), tuple(ALL))
    assert one.take(from_end=False) == {}, "first it must let go of the old ones"
    one.release(step.revoked)
    assert {start.committed for start in follow(one).values()} == {None}
    assert sorted(owners(group)) == [T0, T1]


# Leaving


def test_a_dynamic_member_that_leaves_is_gone_at_once(group):
    """And may leave as often as it likes (M11, E24)."""
    one, other = join(group), join(group)
    settle(one, other)
    one.leave()
    one.leave()

    assert list(group.read().members) == [other.id]
    follow(other)
    assert set(owners(group).values()) == {other.id}
    assert len(owners(group)) == 4


CALLS = {
    "beat": lambda one: one.beat(),
    "look": lambda one: one.look(RANGE),
    "take": lambda one: one.take(from_end=False),
    "resubscribe": lambda one: one.resubscribe(["t"]),
}


@pytest.mark.parametrize("call", CALLS)
def test_who_was_removed_is_told_so_by_whatever_it_does(group, call):
    """Then all it had is lost, and it must join anew (M11)."""
    one = join(group)
    settle(one)
    group.remove_members([one.id])
    with pytest.raises(UnknownMemberIdError, match="was removed from the group"):
        CALLS[call](one)
    one.release(one.owned)
    one.leave()


def test_a_static_member_that_comes_back_gets_what_it_had_and_nobody_notices(group):
    """No target is made, and nothing moves (M13)."""
    one, other = join(group, instance_id="i"), join(group)
    settle(one, other)
    had, generation = one.owned, group.read().generation
    one.leave()
    again = join(group, instance_id="i")
    step = again.look(RANGE).step

    assert set(step.added) == had
    assert follow(again).keys() == had
    assert other.look(RANGE).step.kept == tuple(sorted(other.owned))
    assert group.read().generation == generation
    again.commit({each: OffsetAndMetadata(3) for each in had})


@pytest.mark.parametrize("call", CALLS)
def test_a_second_one_of_the_same_instance_fences_the_first(group, call):
    """Which is told by its next call (M13)."""
    one = join(group, instance_id="i")
    settle(one)
    second = join(group, instance_id="i")
    with pytest.raises(FencedInstanceIdError, match="'i'"):
        CALLS[call](one)

    one.leave()
    settle(second)
    assert second.owned == set(ALL)


@pytest.mark.parametrize("late", [False, True], ids=["before it is back", "after it is back"])
def test_a_static_member_that_comes_back_gives_up_what_is_meant_for_others_by_now(group, late):
    """Though it never took it itself (M13, M22)."""
    one = join(group, instance_id="i")
    settle(one)
    one.leave()
    other = None if late else join(group)
    if other is not None:
        follow(other)
    again = join(group, instance_id="i")
    other = other or join(group)
    settle(other, again)

    assert (len(again.owned), len(other.owned)) == (2, 2)
    assert group.snapshot().state == "Stable"


def test_a_static_member_does_not_wait_for_a_topic_it_does_not_want_any_more(group, root):
    """It comes back with another subscription (M13)."""
    make_topics(root, u=1)
    one = join(group, instance_id="i")
    settle(one)
    one.leave()
    again, other = join(group, ["u"], instance_id="i"), join(group)
    settle(again, other)

    assert again.owned == {TopicPartition("u", 0)}
    assert other.owned == set(ALL)


# Processes


def joined(path, ready):
    """In a child: join, take everything, and stay."""
    root = open_root(path)
    one = join(make_group(root))
    settle(one)
    ready()


def test_a_killed_owner_is_found_dead_at_once(group, root):
    """No timer goes by: survivors own everything (M10, P15)."""
    with Held(lambda ready: joined(root.path, ready)) as child:
        one = join(group)
        follow(one)
        assert one.owned == set()
        assert group.sweep() == []
        (dead,) = (each for each in group.read().members.values() if each.pid == child.pid)
        child.kill()
        started = time.monotonic()
        assert group.sweep() == [dead.id]
        follow(one)
        took = time.monotonic() - started

    assert one.owned == set(ALL)
    assert took < patient(1)


def test_a_child_of_a_killed_owner_does_not_keep_it_alive(group, root, tmp_path):
    """A fork closes the lock it inherited (P18)."""
    told = tmp_path / "pid"

    def parent_of_one(ready):
        owner = open_root(root.path)
        settle(join(make_group(owner)))
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
        told.write_text(str(pid))
        ready()

    with Held(parent_of_one) as child:
        try:
            (dead,) = group.read().members
            child.kill()
            assert group.sweep() == [dead]
        finally:
            os.kill(int(told.read_text()), signal.SIGKILL)


def test_a_child_does_not_end_the_membership_of_its_parent(group):
    """Whatever it does with what it inherited, and however it ends (P18)."""
    one = join(group)
    settle(one)

    def leave():
        group.shared.live.get(b"x")
        one.leave()

    in_child(leave)
    assert group.sweep() == []
    one.commit(at(3))
    follow(one)
    assert one.owned == set(ALL)


def test_an_owner_that_was_stopped_is_overtaken_and_its_commit_refused(group, root, uptime):
    """After its session, not for ever; and when it wakes it does no harm (P14, M22)."""

    def stops_and_commits():
        own = join(make_group(open_root(root.path)))
        settle(own)
        own.commit(at(1))
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(CommitFailedError):
            own.commit(at(2))
        with pytest.raises(UnknownMemberIdError):
            own.beat()
        return own.id

    child = forks.Child(stops_and_commits)
    assert child.stopped()
    one = join(group)
    follow(one)
    assert group.sweep() == [], "it is stopped, and not dead"
    uptime.advance(SESSION_MS)
    (gone,) = group.sweep(but=one.id)
    assert follow(one)[T0].committed.offset == 1
    one.commit(at(9))
    child.go_on()

    end = child.end()
    assert (end.finding(), end.value) == (None, gone)
    assert offset_of(group) == 9


def test_processes_that_join_at_once_share_everything_once(group, root):
    """Each step is one transaction (M22)."""

    def share():
        one = join(make_group(open_root(root.path)))
        deadline = time.monotonic() + patient(20)
        rest = 0
        while time.monotonic() < deadline and rest < 50:
            follow(one)
            rest = rest + 1 if not one.changed() and len(one.group.read().members) == 3 else 0
            time.sleep(0.001)
        one.commit({each: OffsetAndMetadata(1) for each in one.owned})
        os.kill(os.getpid(), signal.SIGSTOP)
        return sorted(one.owned)

    children = [forks.Child(share) for _ in range(3)]
    assert all(child.stopped() for child in children)
    assert len(group.read().members) == 3
    now = owners(group)
    for child in children:
        child.go_on()
    parts = [child.end().value for child in children]

    assert sorted(one for part in parts for one in part) == ALL == sorted(now)
    assert sorted(map(len, parts)) == [1, 1, 2]
    assert {offset_of(group, each) for each in ALL} == {1}


def test_threads_that_join_and_leave_end_with_one_owner_each(group):
    """Twelve members in four threads; the last one has everything."""
    errors = []

    def come_and_go():
        try:
            for _ in range(3):
                one = join(group)
                for _ in range(3):
                    follow(one)
                one.leave()
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
