"""What of groups no consumer shows: `test_consumer_group` and `test_groups` have the rest."""

import errno
import os
import signal
import time

import pytest
from support.children import PausedChild
from support.faulty_files import REBOOTED
from support.groups import (
    RANGE,
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
)
from support.roots import abandon, fill, open_root

from embedlog.config import TopicConfig
from embedlog.consumer.group_member import GroupMember
from embedlog.errors import (
    CommitFailedError,
    GroupIdNotFoundError,
    GroupMaxSizeReachedError,
    InconsistentGroupProtocolError,
    StorageError,
)
from embedlog.group import group_ids
from embedlog.groups.offsets import LONGEST_GROUP_ID
from embedlog.groups.ownership import topic_id
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


def test_each_member_has_its_own_session_timeout(group, uptime):
    """A shorter one expires earlier (M8)."""
    short, long = join(group, session_ms=10), join(group, session_ms=20)
    uptime.advance(10)
    assert group.remove_dead_members() == [short.id]
    uptime.advance(10)
    assert group.remove_dead_members() == [long.id]


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


def test_a_check_that_finds_no_dead_member_changes_nothing(group):
    """No member is woken."""
    join(group)
    version = group.version()
    assert group.remove_dead_members() == []
    assert group.version() == version


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


def test_a_removed_member_need_not_support_the_assignor(group):
    """The others may have chosen another one since; the error says that it was removed (M11)."""
    member = join(group)
    group.remove_members([member.id])
    join(group, assignors=list(STICKY))

    with pytest.raises(Exception, match="was removed from the group"):
        member.check_assignment(RANGE)


def test_topics_without_subscribers_do_not_matter(group, root):
    """Their changes need no new target (M16, M27)."""
    member = join(group)
    complete_rebalance(member)
    root.create_topic("new", 2, TopicConfig())
    group.check_topics()

    assert group.read().target_is_current
    assert group.read().generation == 1


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


# Administration


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


def test_a_group_forgets_where_it_started_in_a_topic_without_a_subscriber(group, root):
    """Its next subscriber begins at the end (E1); rows of a deleted topic go (A38)."""
    member, other = join(group), join(group, ["u"])
    follow(member, from_end=True)
    follow(other, from_end=True)
    member.leave()
    follow(other)
    fill(root.partition("t", 0), 3)
    member = join(group)
    assert follow(member, from_end=True)[T0].end == 3

    other.leave()
    deleted = root.topic("u").id
    root.delete_topic("u")
    follow(member)
    assert deleted not in {topic_id(row) for row in owner_rows(group)}


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


# Committing


def of_another_topic(group, root):
    member = join(group)
    complete_rebalance(member)
    root.delete_topic("t")
    make_topics(root, t=4)
    return member


def of_an_older_epoch(group, root):
    """Another handle of the member acquired the partition again, as after a lost answer."""
    member = join(group)
    complete_rebalance(member)
    second = GroupMember(group, member.info, member._lock)
    second.check_assignment(RANGE)
    second.acquire(from_end=False)
    return member


STALE = {
    "the topic was created again": (of_another_topic, "deleted and created again"),
    "it owns it with another epoch": (
        of_an_older_epoch,
        "no longer owns the partition with epoch 1; the owner is .* 2",
    ),
}


@pytest.mark.parametrize("stale", STALE)
def test_a_commit_of_a_member_that_is_not_the_owner_is_refused(group, root, stale):
    """The check is in the transaction of the write; no offset is written (E23, P14, M22)."""
    group.commit({**at(1), **at(1, 1)})
    make_stale, message = STALE[stale]
    member = make_stale(group, root)
    before = offset_of(group, T0), offset_of(group, T1)
    with pytest.raises(CommitFailedError, match=message) as raised:
        member.commit({**at(9, 1), **at(9)})

    assert (raised.value.group, raised.value.member) == ("g", member.id)
    assert "poll" in str(raised.value)
    assert (offset_of(group, T0), offset_of(group, T1)) == before


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


# Processes


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
