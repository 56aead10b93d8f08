"""Disks of a log over several directories that break in the middle of an operation."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

import pytest
from support.failing_disks import FailingDisks
from support.replicas import assignment, bring_back, notice
from support.roots import encoded, rows, segment_files
from support.tiers import sample

from embedlog.errors import (
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    ReplicaNotAvailableError,
    StorageError,
)
from embedlog.files.paths import FORMAT_FILE
from embedlog.record import TopicPartition
from embedlog.replication import catch_up
from embedlog.replication import root as replicated_root
from embedlog.replication.store import ReplicatedStore


@pytest.fixture
def disks():
    return FailingDisks()


@pytest.fixture
def log(directories, disks):
    """A log over three directories, with a topic of one partition in all of them."""
    with directories.open(files=disks) as log:
        log.create_topic("t", replication_factor=3)
        yield log
        assert log.housekeeping.verify() == []


def partition(log, topic="t"):
    return log.root.partition(topic, 0)


def path(log, directory):
    return log.root.controller.image.directories[directory].path


def values(log, topic="t"):
    return [row[3] for row in rows(partition(log, topic))]


def replicas(log, topic="t"):
    """Return the leader and a follower."""
    found = assignment(log, topic)
    return found.leader, found.in_sync_followers[0]


def test_a_log_opens_although_one_of_its_disks_cannot_be_read(directories, disks):
    """The others say which directories there are; without them, no new log is begun."""
    with directories.open(files=disks) as log:
        log.create_topic("t")
        partition(log).append([encoded(b"a")])
        paths = [path(log, number) for number in (1, 2, 3)]

    disks.break_disk(paths[0], errno.EIO)
    with directories.open(files=disks) as log:
        assert log.root.controller.image.online == (2, 3)
        assert values(log) == [b"a"]

    for each in paths[1:]:
        disks.break_disk(each, errno.EIO)
    with pytest.raises(StorageError) as raised:
        directories.open(files=disks)
    assert raised.value.errno == errno.EIO


def test_a_reader_goes_on_when_the_leader_breaks_under_it(log, disks):
    """What was published is at the next one, too, whatever acks was."""
    leader, _ = replicas(log)
    partition(log).append([encoded(b"all")])
    reader = partition(log).reader(0)
    partition(log).append([encoded(b"one")], acks=1)

    disks.break_disk(path(log, leader), errno.EIO)
    batches = reader.read()

    assert [batch.base_offset for batch in batches] == [0, 1]
    assert values(log) == [b"all", b"one"]
    disks.repair(path(log, leader))
    bring_back(log)


def test_what_a_disk_loses_as_it_breaks_is_no_difference(log, disks):
    """It is found by the comparison before any other operation fails; the disk goes offline."""
    partition(log).append([encoded(b"a")])
    partition(log).roll()
    _, follower = replicas(log)
    file, *_ = segment_files(path(log, follower))
    os.truncate(file, os.path.getsize(file) - 8)
    assert [each.what for each in log.housekeeping.verify(replicas=True)]

    disks.break_disk(path(log, follower), errno.EROFS)

    assert log.housekeeping.verify(replicas=True) == []
    assert follower not in log.root.controller.image.online


def append(log, value, durability=None):
    """Append a record to the topic "two"."""
    partition(log, "two").append([encoded(value)], durability=durability)


def append_to_leader(log, value):
    """Append a record that only the leader has, which is alone in sync."""
    key = log.root.topic("two").key(0)
    log.root.controller.change_assignment(key, lambda now: now.shrink(now.in_sync_followers))
    append(log, value)


def append_at(log, value, durability=None):
    """Append it at a given offset, as a mirror does."""
    end = partition(log, "two").tail().log_end_offset
    partition(log, "two").append_at([(end, encoded(value))], durability=durability)


both_appends = pytest.mark.parametrize("append", [append, append_at])


@both_appends
@pytest.mark.parametrize("durability", ["os", "fsync"])
@pytest.mark.parametrize("broken", ["leader", "follower"])
def test_an_append_that_loses_too_many_copies_on_the_way_is_refused(
    log, disks, broken, durability, append
):
    """Nothing of it is in the log, also if the leader broke and the append is repeated."""
    log.create_topic("two", config={"min.insync.replicas": 2}, replication_factor=2)
    append(log, b"a")
    leader, follower = replicas(log, "two")
    directory = path(log, leader if broken == "leader" else follower)
    disks.break_disk(directory, errno.EROFS)

    with pytest.raises(NotEnoughReplicasError) as raised:
        append(log, b"b", durability)

    assert (raised.value.in_sync, raised.value.required) == (1, 2)
    assert values(log, "two") == [b"a"]
    disks.repair(directory)
    bring_back(log)
    partition(log, "two").append([encoded(b"c")])
    assert values(log, "two") == [b"a", b"c"]


@both_appends
def test_an_append_says_whether_it_lost_too_many_copies_before_or_after_it_was_written(
    log, disks, append
):
    """With "fsync" a copy may also fail in the flush, when the records can be read already."""
    log.create_topic("two", config={"min.insync.replicas": 2}, replication_factor=2)
    partition(log, "two").append([encoded(b"a")])
    _, follower = replicas(log, "two")
    written = {}
    for after in range(8):
        value = b"%d" % after
        disks.break_disk(path(log, follower), errno.EIO, after=after)
        try:
            append(log, value, "fsync")
        except NotEnoughReplicasError as error:
            facts = error.in_sync, error.required, value in values(log, "two")
            written.setdefault(type(error), set()).add(facts)
        disks.repair(path(log, follower))
        bring_back(log)
    assert written == {
        NotEnoughReplicasError: {(1, 2, False)},
        NotEnoughReplicasAfterAppendError: {(1, 2, True)},
    }


@both_appends
def test_what_was_acknowledged_can_be_read_although_the_only_copy_failed_in_the_flush(
    log, disks, append
):
    """No other copy may lead, so it is there again when that disk works again."""
    log.create_topic("two", replication_factor=2)
    partition(log, "two").append([encoded(b"a")])
    for after in range(8):
        leader, follower = replicas(log, "two")
        disks.break_disk(path(log, follower), errno.EIO)
        partition(log, "two").append([encoded(b"b")])
        disks.repair(path(log, follower))
        replicated_root.try_bring_back(log.root)
        assert assignment(log, "two").isr == (leader,)

        disks.break_disk(path(log, leader), errno.EIO, after=after)
        value, times = b"%d" % after, {1}
        try:
            append(log, value, "fsync")
        except (NotEnoughReplicasError, ReplicaNotAvailableError):
            times = {0, 1}
        disks.repair(path(log, leader))
        bring_back(log)
        assert values(log, "two").count(value) in times
    assert log.housekeeping.verify(replicas=True) == []


@pytest.mark.parametrize("work", sample(["roll", "append", "append_one"], 2))
def test_a_leader_that_breaks_in_a_call_leaves_no_damage_behind(log, disks, directories, work):
    """The next leader has all that was published, whatever acks was."""
    log.create_topic("two", replication_factor=2)
    leader, _ = replicas(log, "two")
    for after in range(6):
        partition(log, "two").append([encoded(b"all")])
        partition(log, "two").append([encoded(b"one")], acks=1)
        with directories.open(files=disks) as other:
            here = partition(other, "two")
            here.refresh()
            disks.break_disk(path(log, leader), errno.EIO, after=after, times=1, databases=False)
            if work == "roll":
                with suppress(NotLeaderOrFollowerError):
                    here.roll()
            else:
                here.append([encoded(b"next")], acks="all" if work == "append" else 1)
            disks.repair(path(log, leader))
        bring_back(log)
        log.replicas.elect_leaders()
    assert log.housekeeping.verify() == []


def test_a_leader_that_breaks_while_a_copy_catches_up_goes_offline_itself(log, disks, directories):
    """Not the directory that catches up."""
    log.create_topic("two", replication_factor=2)
    partition(log, "two").append([encoded(b"a")])
    leader, follower = replicas(log, "two")
    directories.lose(log, follower)
    partition(log, "two").append([encoded(b"b")])
    directories.put_back(follower)
    replicated_root.try_bring_back(log.root)
    disks.break_disk(path(log, leader), errno.EIO)

    catch_up.replicate(log.root)

    assert leader not in log.root.controller.image.online
    assert follower in log.root.controller.image.online
    disks.repair(path(log, leader))
    bring_back(log)
    assert values(log, "two") == [b"a", b"b"]


def test_a_directory_that_fails_in_the_startup_is_checked_before_it_is_used(directories, disks):
    """It works again a moment later, and still has the mark of a clean close."""
    with directories.open(files=disks) as log:
        log.create_topic("t")
        first = path(log, 1)
    failures = 0
    for after in range(0, 40, 3):
        disks.break_disk(first, errno.EIO, after=after, times=1)
        with directories.open(files=disks) as log:
            if log.root.controller.image.online == (2, 3):
                failures += 1
                # Its locks are free, so it can come back at once.
                assert bring_back(log) == [1]
            partition(log).append([encoded(b"a")])
            assert log.housekeeping.verify() == []
        disks.repair(first)
    assert failures > 2


def test_a_process_that_cannot_note_a_failure_goes_on_writing_to_all(log, disks):
    """Two of three disks fail for a moment: none of them is left out in silence."""
    paths = [path(log, number) for number in (2, 3)]
    for each in paths:
        disks.break_disk(each, errno.EIO)
    with pytest.raises(NotEnoughReplicasError):
        log.create_topic("refused")
    for each in paths:
        disks.repair(each)

    log.create_topic("u")

    controller = log.root.controller
    assert [each.id for each in controller.online] == [1, 2, 3]
    for directory in controller.online:
        assert len(list(directory.state.read(lambda txn: list(txn.cursor())))) > 0
    contents = [each.state.read(lambda txn: list(txn.cursor())) for each in controller.online]
    assert contents[0] == contents[1] == contents[2]


def test_an_unclean_leader_with_another_history_is_cut_where_it_begins(log, directories):
    """Records that were lost, and whose offsets others got, are not read again."""
    log.create_topic("two", replication_factor=2)
    partition(log, "two").append([encoded(b"a")])
    leader, follower = replicas(log, "two")
    append_to_leader(log, b"lost")
    directories.lose(log, leader)
    log.replicas.elect_leaders(election="unclean")
    partition(log, "two").append([encoded(b"next")])
    assert values(log, "two") == [b"a", b"next"]
    directories.put_back(leader)
    replicated_root.try_bring_back(log.root)

    directories.lose(log, follower)  # before the other one has caught up
    log.replicas.elect_leaders(election="unclean")

    assert assignment(log, "two").leader == leader
    assert values(log, "two") == [b"a"]
    directories.put_back(follower)
    bring_back(log)
    assert values(log, "two") == [b"a"]


def test_a_directory_that_returns_has_no_files_that_were_replaced(log, directories):
    """Also not if it leads at once."""
    log.create_topic("two", config={"file.delete.delay.ms": 0}, replication_factor=2)
    partition(log, "two").append([encoded(b"a")])
    leader, follower = replicas(log, "two")
    directories.lose(log, leader)
    partition(log, "two").truncate_to(0)
    directories.take(follower)
    directories.put_back(leader)
    directories.put_back(follower)

    bring_back(log)
    notice(log)

    names = {file.name for file in segment_files(path(log, leader))}
    assert names == {file.name for file in segment_files(path(log, follower))}


def test_a_directory_that_returns_does_not_keep_batches_where_a_segment_ends(log, directories):
    """Not even if all of them had been flushed."""
    log.create_topic("two", replication_factor=2)
    partition(log, "two").append([encoded(b"a")])
    leader, follower = replicas(log, "two")
    directories.lose(log, follower)
    partition(log, "two").append([encoded(b"b")], durability="fsync")
    partition(log, "two").flush()
    directories.put_back(follower)
    replicated_root.try_bring_back(log.root)
    directories.lose(log, leader)  # before the other one has caught up
    log.replicas.elect_leaders(election="unclean")
    partition(log, "two").roll()
    directories.put_back(leader)

    bring_back(log)

    assert values(log, "two") == [b"a"]
    directories.assert_equal_copies("two", 2)


def test_a_directory_that_returns_twice_is_not_trusted_for_what_it_never_copied(log, directories):
    """When it is lost again before it has caught up, its database knows more than its files."""
    log.create_topic("two", replication_factor=2)
    partition(log, "two").append([encoded(b"a")])
    leader, _ = replicas(log, "two")
    append_to_leader(log, b"lost" * 100)
    directories.lose(log, leader)
    log.replicas.elect_leaders(election="unclean")
    partition(log, "two").append([encoded(b"next")])
    partition(log, "two").roll()
    partition(log, "two").flush()
    directories.put_back(leader)
    replicated_root.try_bring_back(log.root)
    directories.lose(log, leader)
    directories.put_back(leader)

    bring_back(log)

    assert assignment(log, "two").leader != leader
    assert len(assignment(log, "two").isr) == 2
    directories.lose(log, assignment(log, "two").leader)
    assert values(log, "two") == [b"a", b"next"]
    directories.put_back(({1, 2, 3} - set(log.root.controller.image.online)).pop())
    bring_back(log)


def test_a_new_disk_counts_as_one_also_if_its_return_was_interrupted(log, directories, monkeypatch):
    """It has the rows of the others by then, and still no records."""
    log.create_topic("one", replication_factor=1)
    partition(log, "one").append([encoded(b"a")])
    leader = assignment(log, "one").leader
    directories.lose(log, leader)
    directories.replace(leader)

    def killed(*arguments, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ReplicatedStore, "write_held", killed)
        with pytest.raises(KeyboardInterrupt):
            replicated_root.try_bring_back(log.root)

    assert bring_back(log) == [leader]

    with pytest.raises(ReplicaNotAvailableError, match="lost"):
        partition(log, "one").tail()
    log.delete_topic("one")


def test_an_epoch_that_was_noted_and_never_came_is_not_waited_for(directories):
    """Its process was killed before the commit; meanwhile too few directories are left."""
    with directories.open() as log:
        log.create_topic("t")
        controller = log.root.controller
        for directory in controller.online:
            directory.note_epoch(controller.epoch + 1)
    for number in (2, 3):
        directories.path(number).rename(directories.path(number).with_name(f"away{number}"))

    with pytest.raises(NotEnoughReplicasError):
        directories.open()

    for number in (2, 3):
        directories.path(number).with_name(f"away{number}").rename(directories.path(number))
    with directories.open() as log:
        assert log.housekeeping.verify() == []


def test_a_program_frees_the_locks_of_a_directory_that_comes_back(directories):
    """Also while it still has its old files open; so it notices that it is the last one."""
    log = directories.open()
    log.create_topic("t")
    partition(log).append([encoded(b"a")])
    reader = partition(log).reader(0)
    assert reader.read()
    old = list(log.root.controller.directories.values())
    for number in (1, 2, 3):
        directories.lose(log, number)
        directories.put_back(number)
        bring_back(log)

    log.close()

    assert all((directories.path(number) / "closed").exists() for number in (1, 2, 3))
    assert old


def test_a_log_opens_after_a_reboot_although_a_partition_is_offline(directories, disks):
    """All others are recovered."""
    with directories.open(files=disks) as log:
        log.create_topic("one", replication_factor=1)
        log.create_topic("t")
        for topic in ("one", "t"):
            partition(log, topic).append([encoded(b"a")])
        leader = assignment(log, "one").leader
        log.root.flush()
        directories.lose(log, leader)

    disks.boot = "another boot"
    with directories.open(files=disks) as log:
        assert any("offline" in line for line in log.root.startup_report)
        assert values(log) == [b"a"]
        directories.put_back(leader)
        bring_back(log)
        assert values(log, "one") == [b"a"]


def test_a_disk_that_fails_once_when_it_returns_keeps_what_it_has(log, directories, disks):
    """It has the only copy; an error of the disk does not say that its databases are damaged."""
    log.create_topic("one", replication_factor=1)
    partition(log, "one").append([encoded(b"a")])
    leader = assignment(log, "one").leader
    directories.lose(log, leader)
    directories.put_back(leader)

    for after in range(30):
        disks.break_disk(path(log, leader), errno.EIO, after=after, times=1)
        replicated_root.try_bring_back(log.root)
        disks.repair(path(log, leader))
        bring_back(log)
        assert values(log, "one") == [b"a"], f"after {after} operations"
        directories.lose(log, leader)
        directories.put_back(leader)
    bring_back(log)


def test_no_log_is_begun_where_directories_are_not_mounted(directories, disks):
    """The one that is there, and cannot be read, may be a directory of the log."""
    directories.open(files=disks).close()
    directories.take(1)
    directories.take(2)
    (directories.path(3) / FORMAT_FILE).unlink()  # nothing of it can be read
    disks.hidden = {str(directories.path(3))}

    with pytest.raises(StorageError, match="open the root failed"):
        directories.open(files=disks)

    assert not directories.path(1).exists()
    assert not directories.path(2).exists()


def test_a_truncation_whose_leader_breaks_is_repeated_by_the_next_one(log, disks, directories):
    """Even if that one has no files at all, after an election by an operator."""
    broke = 0
    for after in range(7):
        name = f"t{after}"
        log.create_topic(name, replication_factor=2)
        partition(log, name).append([encoded(b"a"), encoded(b"b")])
        leader, follower = replicas(log, name)
        directories.lose(log, follower)
        directories.replace(follower)
        replicated_root.try_bring_back(log.root)
        disks.break_disk(path(log, leader), errno.ENOSPC, after=after, databases=False)

        with suppress(NotLeaderOrFollowerError, ReplicaNotAvailableError):
            partition(log, name).truncate_to(1)

        if assignment(log, name).leader is None:
            directories.take(leader)
            assert log.replicas.elect_leaders([TopicPartition(name, 0)], election="unclean")
            assert values(log, name) == []
            directories.put_back(leader)
            broke += 1
        assert values(log, name) in ([], [b"a"])
        disks.repair(path(log, leader))
        bring_back(log)
        bring_back(log)
    assert broke
    assert log.housekeeping.verify() == []


@pytest.mark.parametrize("acks", ["all", 1])
def test_what_a_leader_alone_has_is_not_acknowledged_after_it_broke(log, disks, directories, acks):
    """No other copy may lead; one that is elected by an operator lacks it."""
    log.create_topic("two", replication_factor=2)
    broke = 0
    for after in range(4):
        leader, follower = replicas(log, "two")
        directories.lose(log, follower)
        partition(log, "two").append([encoded(b"alone")])
        directories.put_back(follower)
        replicated_root.try_bring_back(log.root)
        disks.break_disk(path(log, leader), errno.EIO, after=after)

        value, times = b"%d" % after, {1}
        try:
            partition(log, "two").append([encoded(value)], acks=acks)
        except (NotEnoughReplicasError, ReplicaNotAvailableError):
            times = {0, 1}
            broke += 1
        disks.repair(path(log, leader))
        bring_back(log)
        assert values(log, "two").count(value) in times
    assert broke


def test_an_append_goes_on_after_another_program_has_taken_over(log, directories, disks):
    """A reader of this one has noticed that already."""
    log.create_topic("two", replication_factor=2)
    partition(log, "two").append([encoded(b"a")])
    with directories.open(files=disks) as other:
        leader, _ = replicas(log, "two")
        directories.lose(other, leader)
        partition(other, "two").append([encoded(b"b")])
        assert values(log, "two") == [b"a", b"b"]
        partition(log, "two").append([encoded(b"c")], acks=1)
    assert values(log, "two") == [b"a", b"b", b"c"]
    directories.put_back(leader)
    bring_back(log)


@pytest.mark.parametrize("first_breaks", [False, True])
def test_a_program_writes_nothing_without_a_directory_that_it_alone_cannot_open(
    log, directories, disks, monkeypatch, first_breaks
):
    """Another program has brought it back, and the third one is gone; as without descriptors.

    What is acknowledged is in all copies in sync.
    """
    monkeypatch.setattr(replicated_root, "REGAIN_SECONDS", 0)
    partition(log).append([encoded(b"a")])
    with directories.open() as other:
        directories.lose(other, 2)
        partition(log).append([encoded(b"b")])
        directories.put_back(2)
        disks.hidden = {str(directories.path(2))}
        assert bring_back(other) == [2]
        directories.lose(other, 3)
        assert set(assignment(other, "t").isr) == {1, 2}
        if first_breaks:
            directories.put_back(3)
            disks.break_disk(path(log, 1), errno.EROFS)

        for _ in range(3):
            with pytest.raises(NotEnoughReplicasError):
                partition(log).append([encoded(b"lost")])
            with pytest.raises(NotEnoughReplicasError):
                log.alter_topic("t", {"retention.ms": 1})

        assert values(log) == values(other) == [b"a", b"b"]
        disks.hidden = set()
        disks.repair(path(log, 1))
        partition(log).append([encoded(b"c")])
        assert values(log) == values(other) == [b"a", b"b", b"c"]
        copies = directories.copies("t")
        assert copies[1] == copies[2]
        if not first_breaks:
            directories.put_back(3)
    bring_back(log)
    directories.assert_equal_copies("t")
