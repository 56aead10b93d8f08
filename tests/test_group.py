"""A group as a whole: who is dead, what is settled, and what an administrator may do (M1–M17)."""

import errno
import os
import time

import pytest
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
    positions,
    settle,
)
from support.roots import abandon, fill, open_root

from embedlog.assignor import RangeAssignor
from embedlog.config import TopicConfig
from embedlog.errors import (
    AssignorError,
    CommitFailedError,
    GroupIdNotFoundError,
    GroupSubscribedToTopicError,
    NonEmptyGroupError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.files import Files
from embedlog.group import names
from embedlog.record import TopicPartition

T0, T1, U0 = TopicPartition("t", 0), TopicPartition("t", 1), TopicPartition("u", 0)


class Rebooted(Files):
    def boot_id(self):
        return "another boot"


@pytest.fixture
def uptime():
    return Uptime()


@pytest.fixture
def group(root, uptime):
    """The group g of a root with the topics t and u."""
    make_topics(root, t=4, u=1)
    return make_group(root, "g", uptime)


def lock_files(group):
    return [name for name in group.shared.files.list("locks") if name.startswith("member-")]


# Who is dead

SILENCES = {
    "less than its session": (SESSION_MS - 1, False),
    "its session": (SESSION_MS, True),
    "much longer": (10 * SESSION_MS, True),
}


@pytest.mark.parametrize("silence", SILENCES)
@pytest.mark.parametrize("instance", [None, "i"], ids=["dynamic", "static"])
def test_who_is_silent_for_a_session_is_removed(group, uptime, silence, instance):
    """By the clock that nobody sets, and whoever it is (M8)."""
    one = join(group, instance_id=instance)
    ms, over = SILENCES[silence]
    uptime.advance(ms)

    assert group.sweep() == ([one.id] if over else [])
    assert list(group.read().members) == ([] if over else [one.id])


SIGNS = {
    "a heartbeat": lambda one: one.beat(),
    "a commit": lambda one: one.commit(at(1)),
    "an empty commit": lambda one: one.commit({}),
}


@pytest.mark.parametrize("sign", SIGNS)
def test_a_sign_of_life_begins_the_session_anew(group, uptime, sign):
    """A commit is one as well (M7)."""
    one = join(group)
    settle(one)
    uptime.advance(SESSION_MS - 1)
    SIGNS[sign](one)
    uptime.advance(SESSION_MS - 1)

    assert group.sweep() == []
    uptime.advance(1)
    assert group.sweep() == [one.id]


def test_each_member_has_a_session_of_its_own(group, uptime):
    """As long as it asked for (M8)."""
    short, long = join(group, session_ms=10), join(group, session_ms=20)
    uptime.advance(10)
    assert group.sweep() == [short.id]
    uptime.advance(10)
    assert group.sweep() == [long.id]


def test_who_sweeps_knows_that_it_lives(group, uptime):
    """It does not remove itself."""
    one, other = join(group), join(group)
    uptime.advance(SESSION_MS)

    assert group.sweep(but=one.id) == [other.id]


def test_a_member_whose_lock_is_free_is_removed_at_once(group):
    """No timer is waited for: the kernel says that it is dead (M10, P15)."""
    one, other = join(group), join(group)
    settle(one, other)
    crash(one)

    assert group.sweep() == [one.id]
    assert len(follow(other)) == 2
    assert set(owners(group).values()) == {other.id}


def test_a_static_member_keeps_its_place_until_its_session_is_over(group, uptime):
    """That is what its name is for, even if its process died (M13)."""
    one = join(group, instance_id="i")
    settle(one)
    crash(one)

    assert group.sweep() == []
    assert set(owners(group).values()) == {one.id}
    uptime.advance(SESSION_MS)
    assert group.sweep() == [one.id]


def test_those_who_look_at_once_do_not_take_each_other_for_the_member(group):
    """They try for the lock together, and both see that it is free."""
    one = join(group)
    crash(one)
    files = group.shared.files
    other = files.open(one.info.lock)
    assert files.try_lock(other, shared=True)

    assert group.sweep() == [one.id]
    files.close(other)


def test_a_lock_that_cannot_be_looked_at_is_no_sign_of_death(group, monkeypatch):
    """Too many open files, perhaps; but a file that is gone is one (P19)."""
    one = join(group)

    def refuse(number):
        def open_(*_args, **_options):
            raise StorageError("refused", errno=number)

        monkeypatch.setattr(group.shared.files, "open", open_)

    refuse(errno.EMFILE)
    assert group.sweep() == []
    refuse(errno.ENOENT)
    assert group.sweep() == [one.id]


def test_the_number_of_a_process_says_nothing_about_a_member(group):
    """Another one may have it by now: only the lock counts (R4)."""
    one = join(group)
    assert one.info.pid == os.getpid()
    crash(one)

    assert group.sweep() == [one.id]


def test_a_sweep_that_finds_nothing_changes_nothing(group):
    """Nobody is made to look for it."""
    join(group)
    version = group.version()
    assert group.sweep() == []
    assert group.version() == version


ENDS = {
    "it leaves": lambda group, one: one.leave(),
    "it dies": lambda group, one: (crash(one), group.sweep()),
    "it is sent away": lambda group, one: group.remove_members([one.id]),
    "it is sent away and leaves": lambda group, one: (group.remove_members([one.id]), one.leave()),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_lock_file_goes_with_its_member(group, end):
    """However it ends."""
    ENDS[end](group, join(group))
    assert lock_files(group) == []
    assert not group.read().members


def test_a_static_member_that_comes_back_leaves_one_lock_file(group):
    """Its own (M13)."""
    join(group, instance_id="i").leave()
    again = join(group, instance_id="i")

    assert [f"locks/{name}" for name in lock_files(group)] == [again.info.lock]


def test_lock_files_of_a_lost_machine_are_removed_by_the_next_boot(tmp_path):
    """Nobody is attached then, so no member lives."""
    root = open_root(tmp_path)
    make_topics(root, t=1)
    join(make_group(root))
    abandon(root)

    root = open_root(tmp_path, files=Rebooted)
    assert lock_files(make_group(root)) == []
    root.close()


# Targets


def test_a_target_is_made_once_for_all(group):
    """Who looks next finds it (M2)."""
    members = [join(group) for _ in range(3)]
    for one in members:
        assert one.look(RANGE).generation == 1
    assert group.read().assignor == "range"


class Meddler(RangeAssignor):
    """Something happens while it thinks, once."""

    def __init__(self, work):
        self._work = [work]

    def assign(self, partitions, members):
        if self._work:
            self._work.pop()()
        return super().assign(partitions, members)


def test_a_target_for_other_members_is_made_again(group):
    """The group changed while the assignor ran, outside of any transaction."""
    one, late = join(group), []
    share = one.look({"range": Meddler(lambda: late.append(join(group)))})

    target = group.read().target
    assert target.keys() == {one.id, late[0].id}
    assert [len(target[each]) for each in (one.id, late[0].id)] == [2, 2]
    assert sorted(share.step.added) == sorted(target[one.id])


def test_an_assignor_that_fails_leaves_the_group_as_it_is(group):
    """The error is told to who looked; another one may do better."""

    def fail():
        raise KeyError("no")

    one, other = join(group), join(group)
    before = group.read()
    with pytest.raises(AssignorError, match="KeyError"):
        one.look({"range": Meddler(fail)})

    assert group.read() == before
    assert one.changed()
    assert other.look(RANGE).generation == 1


def test_who_is_no_member_any_more_need_not_know_the_assignor(group):
    """The others may have agreed on another one since: it is told what it is (M11)."""
    one = join(group)
    group.remove_members([one.id])
    join(group, assignors=list(STICKY))

    with pytest.raises(Exception, match="was removed from the group"):
        one.look(RANGE)


CHANGES = {
    "grows": lambda root: root.grow_topic("t", 6),
    "is deleted": lambda root: root.delete_topic("t"),
    "is created again": lambda root: (root.delete_topic("t"), make_topics(root, t=6)),
    "of another name comes": lambda root: root.create_topic("new", 2, TopicConfig()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_topic_that_changes_needs_a_new_target(group, root, change):
    """For those who read it, by whoever notices first (M16)."""
    one, other = join(group, ["t", "new"]), join(group, ["u"])
    settle(one, other)
    CHANGES[change](root)
    other.group.notice_topics()
    settle(one, other)

    here = root.topics()
    rows = {
        TopicPartition(name, n): here[name].id
        for name in ("t", "new") if name in here for n in range(here[name].partitions)
    }  # fmt: skip
    assert one.owned == rows.keys()
    assert group.read().generation == 2
    assert group.snapshot().state == "Stable"


def test_topics_of_others_do_not_matter(group, root):
    """No member reads it (M16, M27)."""
    one = join(group)
    settle(one)
    root.create_topic("new", 2, TopicConfig())
    group.notice_topics()

    assert group.read().settled
    assert group.read().generation == 1


def test_epochs_go_on_when_a_topic_is_read_again(group):
    """They never begin anew while the topic is there (M22)."""
    one = join(group, ["t", "u"])
    settle(one)
    one.resubscribe(["t"])
    settle(one)
    one.resubscribe(["t", "u"])
    settle(one)

    (owner,) = (each for each in owner_rows(group).values() if each.topic == "u")
    assert owner.epoch == 2


# Looked at from outside


def test_a_group_has_kafkas_states(group):
    """Empty, PreparingRebalance, CompletingRebalance, Stable, and Empty again (M1)."""
    group.commit(at(1))
    assert group.snapshot().state == "Empty"
    one = join(group, ["u"])
    assert group.snapshot().state == "PreparingRebalance"
    one.look(RANGE)
    assert group.snapshot().state == "CompletingRebalance"
    one.take(from_end=False)
    assert group.snapshot().state == "Stable"
    one.leave()
    assert group.snapshot().state == "Empty"


def test_a_snapshot_has_everything(group, root):
    """Members, owners, positions, and where the log begins and ends."""
    one = join(group, client_id="reader")
    settle(one)
    one.commit(at(0, 1))
    found = group.snapshot()

    assert (found.group, found.generation, found.assignor) == ("g", 1, "range")
    assert [each.client_id for each in found.members] == ["reader"]
    assert found.owners == {TopicPartition("t", n): one.id for n in range(4)}
    assert list(found.committed) == [T1]
    assert found.ends[T0] == (0, 0)


def test_a_snapshot_shows_no_partition_of_a_topic_that_is_gone(group, root):
    """Nor takes it for one of a new topic of the same name (A38)."""
    one = join(group)
    settle(one)
    one.commit(at(1))
    root.delete_topic("t")
    assert (group.snapshot().owners, group.snapshot().committed) == ({}, {})
    make_topics(root, t=1)
    assert (group.snapshot().owners, group.snapshot().committed) == ({}, {})


def test_a_group_is_there_once_it_has_members_or_positions(group, root):
    """Before that there is none, and after it was deleted (M1)."""
    context = root.context
    with pytest.raises(GroupIdNotFoundError):
        group.snapshot()
    with pytest.raises(GroupIdNotFoundError):
        group.delete()
    assert names(context.live, context.state) == []

    one = join(make_group(root, "h"))
    group.commit(at(1))
    assert names(context.live, context.state) == ["g", "h"]
    one.leave()
    group.delete()
    assert names(context.live, context.state) == ["h"]


def test_what_comes_too_late_does_not_make_a_group_again(group, root):
    """A member that was stopped, and leaves when its group was deleted."""
    one = join(group)
    settle(one)
    group.remove_members([one.id])
    group.delete()
    one.release(list(one.owned))
    one.leave()
    group.remove_members(["nobody"])

    assert names(root.context.live, root.context.state) == []


def test_two_groups_never_influence_each_other(group, root, uptime):
    """Not even of names that begin the same (M17)."""
    others = [make_group(root, name, uptime) for name in ("g2", "gg", "f", "g\x01")]
    members = [join(each) for each in others]
    for one in members:
        settle(one)
        one.commit(at(3))
    before = [(each.read(), owner_rows(each), positions(each)) for each in others]

    one = join(group)
    settle(one)
    one.commit(at(9))
    crash(one)
    group.sweep()
    group.reset(at(8))
    group.delete_offsets([T0])
    group.delete()

    assert before == [(each.read(), owner_rows(each), positions(each)) for each in others]
    assert not any(one.changed() and one.look(RANGE).step.revoked for one in members)


# Administration


def test_only_into_an_empty_group_may_anybody_commit(group):
    """Without being a member (M14)."""
    group.commit(at(3))
    one = join(group)
    with pytest.raises(CommitFailedError, match="the group has 1 members"):
        group.commit(at(4))
    one.leave()
    group.commit(at(5))

    assert group.committed([T0])[T0].position.offset == 5


WAYS = {
    "commit": (lambda group: group.commit(at(4)), 4),
    "reset": (lambda group: group.reset(at(4)), 4),
    "delete": (lambda group: group.delete(), None),
    "delete its offsets": (lambda group: group.delete_offsets([T0]), None),
}
REFUSED = (CommitFailedError, NonEmptyGroupError, GroupSubscribedToTopicError)


@pytest.mark.parametrize("way", WAYS)
def test_a_group_that_is_read_is_not_changed_from_outside(group, way):
    """Its members would not notice (M14, M15)."""
    group.commit(at(3))
    join(group)
    with pytest.raises(REFUSED):
        WAYS[way][0](group)
    assert group.committed([T0])[T0].position.offset == 3


@pytest.mark.parametrize("way", WAYS)
def test_members_that_died_are_not_in_the_way(group, way):
    """Nobody else is there to remove them (M10)."""
    group.commit(at(3))
    crash(join(group))
    step, offset = WAYS[way]
    step(group)

    found = group.committed([T0])[T0]
    assert (found and found.position.offset) == offset
    assert not group.read().members


def test_offsets_of_topics_that_nobody_reads_may_be_deleted(group):
    """Beside members that read others (M15)."""
    group.commit({**at(3), **at(3, topic="u")})
    join(group, ["u"])
    group.delete_offsets([T0])

    with pytest.raises(GroupSubscribedToTopicError, match="read u"):
        group.delete_offsets([U0])
    assert list(group.snapshot().committed) == [U0]


@pytest.mark.parametrize("forgotten", [False, True])
def test_who_reads_from_the_end_goes_on_there_until_offsets_are_deleted(group, root, forgotten):
    """Where the group began before is forgotten with them (E1)."""
    one, other = join(group), join(group, ["u"])
    assert follow(one, from_end=True)[T0].end == 0
    one.leave()
    fill(root.partition("t", 0), 3)
    if forgotten:
        group.delete_offsets([T0])

    assert other.changed()
    assert follow(join(group), from_end=True)[T0].end == (3 if forgotten else 0)


@pytest.mark.parametrize("way", ["reset", "delete"])
def test_what_an_administrator_did_survives_a_power_cut(tmp_path, way):
    """It is durable when the call returns."""
    root = open_root(tmp_path)
    make_topics(root, t=1)
    root.partition("t", 0).truncate_to(0)
    group = make_group(root)
    group.reset(at(0))
    if way == "delete":
        group.delete()
    abandon(root)

    root = open_root(tmp_path, files=Rebooted)
    found = make_group(root).committed([T0])[T0]
    assert (found is not None) == (way == "reset")
    assert names(root.context.live, root.context.state) == (["g"] if way == "reset" else [])
    root.close()


def test_a_group_of_an_earlier_boot_is_deleted_with_all_it_saved(tmp_path):
    """Also if nobody used it in this one (M15)."""
    root = open_root(tmp_path)
    make_topics(root, t=1)
    make_group(root).reset(at(0))
    abandon(root)

    root = open_root(tmp_path, files=Rebooted)
    make_group(root).delete()
    with pytest.raises(GroupIdNotFoundError):
        make_group(root).snapshot()
    root.close()
    root = open_root(tmp_path, files=Rebooted)
    assert names(root.context.live, root.context.state) == []
    root.close()


def test_what_was_committed_for_a_topic_goes_with_it(group, root):
    """Positions of its id mean nothing any more (A38)."""
    group.commit({**at(3), **at(3, topic="u")})
    root.delete_topic("t")

    assert len(positions(group)) == 1


def test_a_partition_that_is_not_there_has_no_position(group):
    """An error, and not None (E4)."""
    for one in (TopicPartition("t", 4), TopicPartition("t", -1), TopicPartition("x", 0)):
        with pytest.raises(UnknownTopicOrPartitionError):
            group.committed([one])
        with pytest.raises(UnknownTopicOrPartitionError):
            group.commit({one: at(1)[T0]})


def test_uptime_is_of_a_clock_that_nobody_sets(root, clock):
    """A jump of the wall clock neither ends a session nor makes one longer (P17)."""
    make_topics(root, t=1)
    group = make_group(root, "g", root.context.files.uptime_ms)
    one = join(group, session_ms=60_000)
    clock.advance(2 * 365 * 86_400_000)
    assert group.sweep() == []
    clock.advance(-4 * 365 * 86_400_000)
    one.beat()
    assert group.sweep() == []
    assert abs(root.context.files.uptime_ms() - time.clock_gettime(time.CLOCK_BOOTTIME) * 1e3) < 1e3
