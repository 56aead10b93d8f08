"""A group as a whole: dead members, assignments, and the calls of an administrator (M1–M17)."""

import errno
import os
import time

import pytest
from support.faulty_files import REBOOTED
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
    positions,
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
from embedlog.group import group_ids
from embedlog.record import TopicPartition

T0, T1, U0 = TopicPartition("t", 0), TopicPartition("t", 1), TopicPartition("u", 0)


@pytest.fixture
def uptime():
    return Uptime()


@pytest.fixture
def group(root, uptime):
    """The group g of a root with the topics t and u."""
    make_topics(root, t=4, u=1)
    return make_group(root, "g", uptime)


def lock_files(group):
    return [name for name in group.context.files.list("locks") if name.startswith("member-")]


# Dead members

SILENT_FOR = {
    "less than its session": (SESSION_MS - 1, False),
    "its session": (SESSION_MS, True),
    "much longer": (10 * SESSION_MS, True),
}


@pytest.mark.parametrize("silent_for", SILENT_FOR)
@pytest.mark.parametrize("instance", [None, "i"], ids=["dynamic", "static"])
def test_a_member_that_is_silent_for_its_session_is_removed(group, uptime, silent_for, instance):
    """The clock is never set; static members are removed too (M8)."""
    member = join(group, instance_id=instance)
    ms, expired = SILENT_FOR[silent_for]
    uptime.advance(ms)

    assert group.remove_dead_members() == ([member.id] if expired else [])
    assert list(group.read().members) == ([] if expired else [member.id])


RENEWALS = {
    "a heartbeat": lambda member: member.heartbeat(),
    "a commit": lambda member: member.commit(at(1)),
    "an empty commit": lambda member: member.commit({}),
}


@pytest.mark.parametrize("renewal", RENEWALS)
def test_a_heartbeat_or_a_commit_renews_the_session(group, uptime, renewal):
    """Each of them restarts it (M7)."""
    member = join(group)
    complete_rebalance(member)
    uptime.advance(SESSION_MS - 1)
    RENEWALS[renewal](member)
    uptime.advance(SESSION_MS - 1)

    assert group.remove_dead_members() == []
    uptime.advance(1)
    assert group.remove_dead_members() == [member.id]


def test_each_member_has_its_own_session_timeout(group, uptime):
    """A shorter one expires earlier (M8)."""
    short, long = join(group, session_ms=10), join(group, session_ms=20)
    uptime.advance(10)
    assert group.remove_dead_members() == [short.id]
    uptime.advance(10)
    assert group.remove_dead_members() == [long.id]


def test_a_member_does_not_remove_itself(group, uptime):
    """It excludes itself from the members that it checks."""
    member, other = join(group), join(group)
    uptime.advance(SESSION_MS)

    assert group.remove_dead_members(exclude=member.id) == [other.id]


def test_a_member_whose_lock_is_free_is_removed_at_once(group):
    """Without a timeout: the free lock proves that it is dead (M10, P15)."""
    member, other = join(group), join(group)
    complete_rebalance(member, other)
    crash(member)

    assert group.remove_dead_members() == [member.id]
    assert len(follow(other)) == 2
    assert set(owners(group).values()) == {other.id}


def test_a_static_member_is_removed_only_after_its_session(group, uptime):
    """Even if its process died (M13)."""
    member = join(group, instance_id="i")
    complete_rebalance(member)
    crash(member)

    assert group.remove_dead_members() == []
    assert set(owners(group).values()) == {member.id}
    uptime.advance(SESSION_MS)
    assert group.remove_dead_members() == [member.id]


def test_two_concurrent_checks_do_not_mistake_each_other_for_the_member(group):
    """Both try the lock, and both see that it is free."""
    member = join(group)
    crash(member)
    files = group.context.files
    other = files.open(member.info.lock)
    assert files.try_lock(other, shared=True)

    assert group.remove_dead_members() == [member.id]
    files.close(other)


def test_a_lock_file_that_cannot_be_opened_does_not_prove_death(group, monkeypatch):
    """There may be too many open files; only a missing file proves death (P19)."""
    member = join(group)

    def refuse(number):
        def open_(*_args, **_options):
            raise StorageError("refused", errno=number)

        monkeypatch.setattr(group.context.files, "open", open_)

    refuse(errno.EMFILE)
    assert group.remove_dead_members() == []
    refuse(errno.ENOENT)
    assert group.remove_dead_members() == [member.id]


def test_a_process_id_says_nothing_about_a_member(group):
    """Another process may have the same id: only the lock counts (R4)."""
    member = join(group)
    assert member.info.pid == os.getpid()
    crash(member)

    assert group.remove_dead_members() == [member.id]


def test_a_check_that_finds_no_dead_member_changes_nothing(group):
    """No member is woken."""
    join(group)
    version = group.version()
    assert group.remove_dead_members() == []
    assert group.version() == version


ENDS = {
    "it leaves": lambda group, member: member.leave(),
    "it dies": lambda group, member: (crash(member), group.remove_dead_members()),
    "it is removed": lambda group, member: group.remove_members([member.id]),
    "it is removed and leaves": lambda group, member: (
        group.remove_members([member.id]),
        member.leave(),
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_lock_file_is_deleted_with_its_member(group, end):
    """Whichever way it leaves the group."""
    ENDS[end](group, join(group))
    assert lock_files(group) == []
    assert not group.read().members


def test_a_static_member_that_returns_has_one_lock_file(group):
    """The one of its current process (M13)."""
    join(group, instance_id="i").leave()
    returned = join(group, instance_id="i")

    assert [f"locks/{name}" for name in lock_files(group)] == [returned.info.lock]


def test_lock_files_are_deleted_after_a_reboot(tmp_path):
    """No process is attached then, so no member is alive."""
    root = open_root(tmp_path)
    make_topics(root, t=1)
    join(make_group(root))
    abandon(root)

    root = open_root(tmp_path, files=REBOOTED)
    assert lock_files(make_group(root)) == []
    root.close()


# Targets


def test_a_target_is_computed_once_for_all_members(group):
    """The next member reads it (M2)."""
    members = [join(group) for _ in range(3)]
    for member in members:
        assert member.check_assignment(RANGE).generation == 1
    assert group.read().assignor == "range"


class InterruptedAssignor(RangeAssignor):
    """Runs a callback once, during its first assignment."""

    def __init__(self, work):
        self._work = [work]

    def assign(self, partitions, members):
        if self._work:
            self._work.pop()()
        return super().assign(partitions, members)


def test_a_target_is_computed_again_if_the_members_changed_meanwhile(group):
    """The assignor runs outside of transactions."""
    member, late = join(group), []
    assignment = member.check_assignment(
        {"range": InterruptedAssignor(lambda: late.append(join(group)))}
    )

    target = group.read().target
    assert target.keys() == {member.id, late[0].id}
    assert [len(target[name]) for name in (member.id, late[0].id)] == [2, 2]
    assert sorted(assignment.step.added) == sorted(target[member.id])


def test_an_assignor_that_fails_does_not_change_the_group(group):
    """The caller gets the error; the assignor of another member may succeed."""

    def fail():
        raise KeyError("no")

    member, other = join(group), join(group)
    before = group.read()
    with pytest.raises(AssignorError, match="KeyError"):
        member.check_assignment({"range": InterruptedAssignor(fail)})

    assert group.read() == before
    assert member.changed()
    assert other.check_assignment(RANGE).generation == 1


def test_a_removed_member_need_not_support_the_assignor(group):
    """The others may have chosen another one since; the error says that it was removed (M11)."""
    member = join(group)
    group.remove_members([member.id])
    join(group, assignors=list(STICKY))

    with pytest.raises(Exception, match="was removed from the group"):
        member.check_assignment(RANGE)


CHANGES = {
    "grows": lambda root: root.grow_topic("t", 6),
    "is deleted": lambda root: root.delete_topic("t"),
    "is created again": lambda root: (root.delete_topic("t"), make_topics(root, t=6)),
    "of another name is created": lambda root: root.create_topic("new", 2, TopicConfig()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_topic_needs_a_new_target(group, root, change):
    """The first subscriber that notices the change computes it (M16)."""
    member, other = join(group, ["t", "new"]), join(group, ["u"])
    complete_rebalance(member, other)
    CHANGES[change](root)
    other.group.check_topics()
    complete_rebalance(member, other)

    topics = root.topics()
    expected = {
        TopicPartition(name, number): topics[name].id
        for name in ("t", "new") if name in topics for number in range(topics[name].partitions)
    }  # fmt: skip
    assert member.owned == expected.keys()
    assert group.read().generation == 2
    assert group.snapshot().state == "Stable"


def test_topics_without_subscribers_do_not_matter(group, root):
    """Their changes need no new target (M16, M27)."""
    member = join(group)
    complete_rebalance(member)
    root.create_topic("new", 2, TopicConfig())
    group.check_topics()

    assert group.read().target_is_current
    assert group.read().generation == 1


def test_epochs_continue_when_a_topic_is_subscribed_to_again(group):
    """They never restart while the topic exists (M22)."""
    member = join(group, ["t", "u"])
    complete_rebalance(member)
    member.resubscribe(["t"])
    complete_rebalance(member)
    member.resubscribe(["t", "u"])
    complete_rebalance(member)

    (owner,) = (row for row in owner_rows(group).values() if row.topic == "u")
    assert owner.epoch == 2


# Snapshots


def test_a_group_has_kafkas_states(group):
    """Empty, PreparingRebalance, CompletingRebalance, Stable, and Empty again (M1)."""
    group.commit(at(1))
    assert group.snapshot().state == "Empty"
    member = join(group, ["u"])
    assert group.snapshot().state == "PreparingRebalance"
    member.check_assignment(RANGE)
    assert group.snapshot().state == "CompletingRebalance"
    member.acquire(from_end=False)
    assert group.snapshot().state == "Stable"
    member.leave()
    assert group.snapshot().state == "Empty"


def test_a_snapshot_is_complete(group, root):
    """Members, owners, committed offsets, and the start and end of each partition."""
    member = join(group, client_id="reader")
    complete_rebalance(member)
    member.commit(at(0, 1))
    snapshot = group.snapshot()

    assert (snapshot.group, snapshot.generation, snapshot.assignor) == ("g", 1, "range")
    assert [info.client_id for info in snapshot.members] == ["reader"]
    assert snapshot.owners == {TopicPartition("t", number): member.id for number in range(4)}
    assert list(snapshot.committed) == [T1]
    assert snapshot.ends[T0] == (0, 0)


def test_a_snapshot_has_no_partition_of_a_deleted_topic(group, root):
    """A new topic of the same name does not get them either (A38)."""
    member = join(group)
    complete_rebalance(member)
    member.commit(at(1))
    root.delete_topic("t")
    assert (group.snapshot().owners, group.snapshot().committed) == ({}, {})
    make_topics(root, t=1)
    assert (group.snapshot().owners, group.snapshot().committed) == ({}, {})


def test_a_group_exists_once_it_has_members_or_commits(group, root):
    """It does not exist before that, nor after it was deleted (M1)."""
    context = root.context
    with pytest.raises(GroupIdNotFoundError):
        group.snapshot()
    with pytest.raises(GroupIdNotFoundError):
        group.delete()
    assert group_ids(context.live, context.state) == []

    member = join(make_group(root, "h"))
    group.commit(at(1))
    assert group_ids(context.live, context.state) == ["g", "h"]
    member.leave()
    group.delete()
    assert group_ids(context.live, context.state) == ["h"]


def test_a_late_leave_does_not_create_a_deleted_group_again(group, root):
    """A stopped member may leave after its group was deleted."""
    member = join(group)
    complete_rebalance(member)
    group.remove_members([member.id])
    group.delete()
    member.release(list(member.owned))
    member.leave()
    group.remove_members(["nobody"])

    assert group_ids(root.context.live, root.context.state) == []


def test_groups_never_affect_each_other(group, root, uptime):
    """Not even if one name is a prefix of the other (M17)."""
    others = [make_group(root, name, uptime) for name in ("g2", "gg", "f", "g\x01")]
    members = [join(other) for other in others]
    for member in members:
        complete_rebalance(member)
        member.commit(at(3))
    before = [(other.read(), owner_rows(other), positions(other)) for other in others]

    member = join(group)
    complete_rebalance(member)
    member.commit(at(9))
    crash(member)
    group.remove_dead_members()
    group.reset(at(8))
    group.delete_offsets([T0])
    group.delete()

    assert before == [(other.read(), owner_rows(other), positions(other)) for other in others]
    assert not any(
        member.changed() and member.check_assignment(RANGE).step.revoked for member in members
    )


# Administration


def test_only_an_empty_group_accepts_commits_of_non_members(group):
    """A group with members refuses them (M14)."""
    group.commit(at(3))
    member = join(group)
    with pytest.raises(CommitFailedError, match="not a member of the group"):
        group.commit(at(4))
    member.leave()
    group.commit(at(5))

    assert group.committed([T0])[T0].position.offset == 5


CHANGES_FROM_OUTSIDE = {
    "commit": (lambda group: group.commit(at(4)), 4),
    "reset": (lambda group: group.reset(at(4)), 4),
    "delete": (lambda group: group.delete(), None),
    "delete its offsets": (lambda group: group.delete_offsets([T0]), None),
}
REFUSED = (CommitFailedError, NonEmptyGroupError, GroupSubscribedToTopicError)


@pytest.mark.parametrize("change", CHANGES_FROM_OUTSIDE)
def test_a_group_with_members_is_not_changed_from_outside(group, change):
    """Its members would not notice the change (M14, M15)."""
    group.commit(at(3))
    join(group)
    with pytest.raises(REFUSED):
        CHANGES_FROM_OUTSIDE[change][0](group)
    assert group.committed([T0])[T0].position.offset == 3


@pytest.mark.parametrize("change", CHANGES_FROM_OUTSIDE)
def test_dead_members_do_not_prevent_administration(group, change):
    """They are removed first, because no other member is there to do it (M10)."""
    group.commit(at(3))
    crash(join(group))
    step, offset = CHANGES_FROM_OUTSIDE[change]
    step(group)

    committed = group.committed([T0])[T0]
    assert (committed and committed.position.offset) == offset
    assert not group.read().members


def test_offsets_of_topics_without_subscribers_may_be_deleted(group):
    """Members that subscribe to other topics do not prevent it (M15)."""
    group.commit({**at(3), **at(3, topic="u")})
    join(group, ["u"])
    group.delete_offsets([T0])

    with pytest.raises(GroupSubscribedToTopicError, match="subscribed to u"):
        group.delete_offsets([U0])
    assert list(group.snapshot().committed) == [U0]


@pytest.mark.parametrize("deleted", [False, True])
def test_a_group_at_latest_continues_where_it_started_until_its_offsets_are_deleted(
    group, root, deleted
):
    """Deleting offsets also deletes the start of the group (E1)."""
    member, other = join(group), join(group, ["u"])
    assert follow(member, from_end=True)[T0].end == 0
    member.leave()
    fill(root.partition("t", 0), 3)
    if deleted:
        group.delete_offsets([T0])

    assert other.changed()
    assert follow(join(group), from_end=True)[T0].end == (3 if deleted else 0)


@pytest.mark.parametrize("call", ["reset", "delete"])
def test_administration_survives_a_power_cut(tmp_path, call):
    """Every change is durable when the call returns."""
    root = open_root(tmp_path)
    make_topics(root, t=1)
    root.partition("t", 0).truncate_to(0)
    group = make_group(root)
    group.reset(at(0))
    if call == "delete":
        group.delete()
    abandon(root)

    root = open_root(tmp_path, files=REBOOTED)
    committed = make_group(root).committed([T0])[T0]
    assert (committed is not None) == (call == "reset")
    assert group_ids(root.context.live, root.context.state) == (["g"] if call == "reset" else [])
    root.close()


def test_a_group_of_an_earlier_boot_is_deleted_with_its_checkpoint(tmp_path):
    """Also if it was not used since the boot (M15)."""
    root = open_root(tmp_path)
    make_topics(root, t=1)
    make_group(root).reset(at(0))
    abandon(root)

    root = open_root(tmp_path, files=REBOOTED)
    make_group(root).delete()
    with pytest.raises(GroupIdNotFoundError):
        make_group(root).snapshot()
    root.close()
    root = open_root(tmp_path, files=REBOOTED)
    assert group_ids(root.context.live, root.context.state) == []
    root.close()


def test_offsets_of_a_topic_are_deleted_with_it(group, root):
    """Offsets of a deleted topic id are useless (A38)."""
    group.commit({**at(3), **at(3, topic="u")})
    root.delete_topic("t")

    assert len(positions(group)) == 1


def test_committed_of_an_unknown_partition_raises(group):
    """None would mean that there is no commit (E4)."""
    for tp in (TopicPartition("t", 4), TopicPartition("t", -1), TopicPartition("x", 0)):
        with pytest.raises(UnknownTopicOrPartitionError):
            group.committed([tp])
        with pytest.raises(UnknownTopicOrPartitionError):
            group.commit({tp: at(1)[T0]})


def test_uptime_comes_from_a_clock_that_is_never_set(root, clock):
    """A jump of the wall clock neither ends nor extends a session (P17)."""
    make_topics(root, t=1)
    group = make_group(root, "g", root.context.files.uptime_ms)
    member = join(group, session_ms=60_000)
    clock.advance(2 * 365 * 86_400_000)
    assert group.remove_dead_members() == []
    clock.advance(-4 * 365 * 86_400_000)
    member.heartbeat()
    assert group.remove_dead_members() == []
    assert abs(root.context.files.uptime_ms() - time.clock_gettime(time.CLOCK_BOOTTIME) * 1e3) < 1e3
