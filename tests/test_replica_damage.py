"""Copies that are damaged: the damage of one disk does not spread, and nothing good is dropped."""

import logging
from pathlib import Path

import pytest
from support.replicas import Directories, assignment, bring_back, numbered, send, values

from embedlog import errors
from embedlog.config import MaintenanceConfig
from embedlog.failures import Failures
from embedlog.files import Files
from embedlog.record import TopicPartition
from embedlog.replication import catch_up, reassign
from embedlog.replication import files as replicated_files
from embedlog.replication import root as replicated_root
from embedlog.replication.jobs import ReplicationJob


@pytest.fixture
def log(replicated_log):
    return replicated_log


def segment(directories, directory, topic="t", number=0):
    """Return the path of a segment file of partition 0."""
    return sorted(directories.path(directory).glob(f"topics/{topic}-*/0/*.arrows"))[number]


def flip(file: Path, at: int | bytes) -> bytes:
    """Change a byte, at a position or within the only occurrence; return what the file had."""
    before = file.read_bytes()
    data = bytearray(before)
    data[before.index(at) if isinstance(at, bytes) else at] ^= 0xFF
    file.write_bytes(data)
    return before


def run_job(log):
    """Do what the housekeeping does in its first round."""
    return ReplicationJob(MaintenanceConfig.parse({})).run(log.root, lambda: False)


@pytest.mark.parametrize("of_leader", [True, False])
def test_a_damaged_copy_is_made_again_from_a_good_one(directories, log, of_leader):
    """No record is dropped that another copy still has, whichever of them led."""
    log.create_topic("t", config={"segment.bytes": 2000})
    sent = numbered(b"x", 60)
    send(log, "t", sent)
    isr = assignment(log, "t").isr
    damaged = isr[0] if of_leader else isr[1]
    flip(segment(directories, damaged, number=1), b"x-5")

    (difference,) = log.housekeeping.verify(replicas=True)
    assert difference.copy == str(directories.path(damaged))
    would = log.housekeeping.repair()
    (message,) = log.housekeeping.repair(dry_run=False)

    assert would == [message]
    assert "the copy is made again" in message
    assert log.housekeeping.verify(replicas=True) == []
    assert sorted(assignment(log, "t").isr) == [1, 2, 3]
    assert values(log, "t") == sent
    directories.assert_equal_copies("t")


def test_a_damaged_leader_is_mended_before_it_is_copied(directories, log):
    """A copy that moves away from it would be deleted although it is good; as Kafka's followers."""
    log.create_topic("t", replication_factor=2, config={"segment.bytes": 2000})
    send(log, "t", numbered(b"x", 60))
    leader, follower = assignment(log, "t").isr
    (free,) = {1, 2, 3} - {leader, follower}
    file = segment(directories, leader, number=1)
    good = flip(file, b"x-5")

    log.replicas.reassign({TopicPartition("t", 0): [leader, free]})
    run_job(log)

    assert file.read_bytes() == good
    assert sorted(assignment(log, "t").replicas) == sorted([leader, free])
    assert values(log, "t") == numbered(b"x", 60)
    assert log.housekeeping.verify(replicas=True) == log.housekeeping.verify() == []


def test_the_only_copy_is_not_copied_while_it_is_damaged(directories, log):
    """Other partitions are moved all the same."""
    for topic in ("t", "u"):
        log.create_topic(topic, replication_factor=1, config={"segment.bytes": 2000})
        send(log, topic, numbered(b"x", 60))
    file = segment(directories, assignment(log, "t").leader, number=1)
    flip(file, b"x-5")
    moves = {
        TopicPartition(topic, 0): [each for each in (1, 2, 3) if each != leader][:1]
        for topic, leader in ((each, assignment(log, each).leader) for each in ("t", "u"))
    }

    with pytest.raises(errors.CorruptionError, match="is not copied") as caught:
        log.replicas.reassign(moves)
    assert caught.value.path == str(file)
    assert list(assignment(log, "u").replicas) == moves["u", 0]
    assert log.housekeeping.repair(dry_run=False)
    run_job(log)

    assert list(assignment(log, "t").replicas) == moves["t", 0]
    assert log.housekeeping.verify(replicas=True) == log.housekeeping.verify() == []


@pytest.mark.parametrize("of_both", [False, True])
def test_of_two_copies_that_differ_the_good_one_is_not_cut(directories, log, of_both):
    """The leader's may be the damaged one; also if the other one has damage before that."""
    log.create_topic("t", replication_factor=2)
    send(log, "t", [b"first", *(b"%d" % number + b"." * 400_000 for number in range(5)), b"last"])
    leader, follower = assignment(log, "t").isr
    directories.lose(log, follower)
    send(log, "t", [b"since"])
    file = segment(directories, leader)
    good = flip(file, b"last")
    directories.put_back(follower)
    copy = segment(directories, follower)
    # Damage of its own before that is replaced by what the leader has.
    whole = flip(copy, b"first") if of_both else copy.read_bytes()

    replicated_root.try_bring_back(log.root)
    with pytest.raises(errors.CorruptionError, match="is not copied"):
        catch_up.replicate(log.root)
    assert copy.read_bytes() == whole
    file.write_bytes(good)
    assert catch_up.replicate(log.root) == 1
    assert copy.read_bytes() == good


@pytest.mark.parametrize("has_follower", [False, True])
def test_a_copy_does_not_join_without_a_file_that_the_leader_lacks(directories, log, has_follower):
    """Another in-sync copy leads if it has the file, and is copied; or there is none to copy."""
    count = 1 + has_follower
    log.create_topic("t", replication_factor=count, config={"segment.bytes": 2000})
    sent = numbered(b"x", 60)
    send(log, "t", sent)
    leader, *_ = isr = assignment(log, "t").isr
    (new, *_) = {1, 2, 3} - {*isr}
    segment(directories, leader, number=1).unlink()
    reassign.begin(log.root, {TopicPartition("t", 0): [*isr, new]})

    failures = Failures(logging.getLogger("embedlog.replication"))
    for _ in range(4):
        catch_up.replicate(log.root, failures=failures)
        for each in set(assignment(log, "t").isr) - {leader}:
            assert len(directories.copies("t")[each]) == len(log.root.partition("t", 0).segments)
    if has_follower:
        assert {*assignment(log, "t").isr} == {*isr, new}
        assert values(log, "t") == sent
        directories.assert_equal_copies("t", 3)
    else:
        (error,) = failures.errors.values()
        assert "is not copied" in str(error)
        assert log.housekeeping.repair(dry_run=False)
        assert catch_up.replicate(log.root) == 1


@pytest.mark.parametrize("mode", ["rw", "r"])
def test_a_file_that_the_leader_lacks_is_read_in_another_copy(directories, log, mode):
    """H14: its directory stays online, and other partitions in it are not touched."""
    log.create_topic("t", config={"segment.bytes": 2000})
    sent = numbered(b"x", 60)
    send(log, "t", sent)
    leader = assignment(log, "t").leader
    segment(directories, leader, number=1).unlink()

    with directories.open(mode=mode) as other:
        assert values(other, "t") == sent
    assert log.root.controller.current().image.online == (1, 2, 3)
    assert (leader in assignment(log, "t").isr) == (mode == "r")
    assert values(log, "t") == sent
    assert catch_up.replicate(log.root) == 1
    directories.assert_equal_copies("t")


def test_a_copy_that_has_what_is_damaged_at_the_leader_joins_and_repairs_it(directories, log):
    """Nothing of that segment is missing, so nothing of it is read."""
    log.create_topic("t", replication_factor=2, config={"segment.bytes": 2000})
    sent = numbered(b"x", 20)
    send(log, "t", sent)
    log.flush()
    leader, follower = assignment(log, "t").isr
    directories.lose(log, follower)
    send(log, "t", [b"since"])
    directories.put_back(follower)
    flip(segment(directories, leader), 600)

    assert bring_back(log) == [follower]
    assert set(assignment(log, "t").isr) == {leader, follower}
    (message,) = log.housekeeping.repair(dry_run=False)
    assert "made again from a good one" in message
    assert values(log, "t") == [*sent, b"since"]


def test_what_a_copy_had_before_it_came_back_is_not_trusted_once_it_was_in_sync(directories, log):
    """It may be damaged later, and a repair takes it out of the ISR for that."""
    log.create_topic("t", replication_factor=2, config={"segment.bytes": 2000})
    send(log, "t", numbered(b"x", 20))
    log.flush()
    _, follower = assignment(log, "t").isr
    directories.lose(log, follower)
    directories.put_back(follower)
    replicated_root.try_bring_back(log.root)
    assert catch_up.replicate(log.root) == 1

    flip(segment(directories, follower), b"x-1")
    partition = log.root.partition("t", 0)
    log.root.controller.change_assignment(partition.key, lambda before: before.shrink([follower]))
    assert catch_up.replicate(log.root) == 1
    directories.assert_equal_copies("t", 2)


@pytest.mark.parametrize("where", [b"value", b"of t"])
def test_a_damaged_partition_does_not_stop_the_others(directories, log, where):
    """Whatever is damaged: here the name of a column, or a value."""
    for topic, replicas in (("t", [(1, 2)]), ("u", [(1, 2, 3)])):
        log.create_topic(topic, replicas=replicas)
        send(log, topic, [b"of " + topic.encode()])
    leader, lost = assignment(log, "t").isr
    directories.lose(log, lost)
    directories.replace(lost)
    replicated_root.try_bring_back(log.root)
    good = flip(segment(directories, leader), where)

    assert run_job(log) == 1
    assert len(assignment(log, "u").isr) == 3
    assert lost not in assignment(log, "t").isr
    segment(directories, leader).write_bytes(good)
    assert run_job(log) == 1


def test_repair_makes_copies_although_another_partition_has_no_good_one(directories, log):
    """In one call; the damaged records that no copy in sync has are dropped as with one copy."""
    for topic in ("t", "u"):
        log.create_topic(topic, replication_factor=2)
        send(log, topic, numbered(b"x", 20))
    leader, follower = assignment(log, "t").isr
    directories.lose(log, follower)
    send(log, "t", [b"lost", b"kept"])
    flip(segment(directories, leader), b"lost")
    directories.put_back(follower)
    with pytest.raises(errors.CorruptionError):
        bring_back(log)
    flip(segment(directories, assignment(log, "u").in_sync_followers[0], "u"), b"x-7")

    copied, dropped = log.housekeeping.repair(dry_run=False)

    assert "made again" in copied
    assert "dropped" in dropped
    assert values(log, "t") == [*numbered(b"x", 20), b"kept"]
    assert values(log, "u") == numbered(b"x", 20)
    catch_up.replicate(log.root)
    assert log.housekeeping.verify(replicas=True) == []


def test_after_a_power_cut_damage_of_one_partition_leaves_no_other_one_uncompared(
    tmp_path, monkeypatch
):
    """Copies that are not compared would count as in sync, with other bytes."""
    directories = Directories(tmp_path)
    with directories.open() as log:
        for topic in ("t", "u"):
            log.create_topic(topic, replication_factor=2)
            send(log, topic, numbered(b"x", 9))
        damaged, torn = (assignment(log, topic).isr for topic in ("t", "u"))
    flip(segment(directories, damaged[0]), b"x-7")
    copy = segment(directories, torn[1], "u")
    good = copy.read_bytes()
    copy.write_bytes(good[:-200] + bytes(200))
    # With "os" nothing of it was flushed; the clean close is that of another boot.
    monkeypatch.setattr(Files, "boot_id", lambda _: "another")

    with directories.open() as log:
        assert copy.read_bytes() == good
        assert len(assignment(log, "u").isr) == 2
        assert assignment(log, "t").isr == damaged
        assert values(log, "t") == numbered(b"x", 9)


@pytest.mark.parametrize("kept", [0, 8])
@pytest.mark.parametrize("role", [0, 1])
def test_an_end_mark_that_a_power_cut_took_from_one_copy_is_written_again(
    tmp_path, monkeypatch, role, kept
):
    """A roll does not flush it, although all batches before it may have been flushed."""
    directories = Directories(tmp_path)
    with directories.open(durability="fsync") as log:
        log.create_topic("t", config={"segment.bytes": 2000}, replication_factor=2)
        send(log, "t", numbered(b"x", 60))
        isr = assignment(log, "t").isr
    copy = segment(directories, isr[role])
    good = copy.read_bytes()
    copy.write_bytes(good[:-8] + bytes(kept))
    monkeypatch.setattr(Files, "boot_id", lambda _: "another")

    with directories.open() as log:
        assert log.housekeeping.verify(replicas=True) == []
        assert copy.read_bytes() == good
        assert assignment(log, "t").isr == isr


@pytest.mark.parametrize("rebooted", [False, True])
@pytest.mark.parametrize("where", ["t", b"x-4"])
def test_a_program_that_may_only_read_reads_around_damage_and_names_it(
    tmp_path, monkeypatch, rebooted, where
):
    """H14: it changes nothing, and each copy that is damaged is still compared."""
    directories = Directories(tmp_path)
    with directories.open() as log:
        log.create_topic("t")
        send(log, "t", numbered(b"x", 9))
        log.flush()
        leader = assignment(log, "t").leader
    file = segment(directories, leader)
    flip(file, b"value" if where == "t" else where)
    damaged = file.read_bytes()
    if rebooted:
        monkeypatch.setattr(Files, "boot_id", lambda _: "another")

    with directories.open(mode="r") as log:
        assert values(log, "t") == numbered(b"x", 9)
        (difference,) = log.housekeeping.verify(replicas=True)
        assert difference.copy == str(directories.path(leader))
    assert file.read_bytes() == damaged


def test_a_file_of_a_topic_that_is_deleted_at_that_moment_is_not_created(
    directories, log, monkeypatch
):
    """Nor its directory; and the error says what happened."""
    log.create_topic("t", replication_factor=2)
    send(log, "t", [b"x"])
    partition = log.root.partition("t", 0)
    path, make_parents = partition.path_of(partition.active_segment), replicated_files.make_parents
    follower = assignment(log, "t").in_sync_followers[0]
    (directories.path(follower) / path).unlink()
    with directories.open() as another:

        def delete_then(*arguments, **options):
            monkeypatch.undo()
            another.delete_topic("t")
            make_parents(*arguments, **options)

        monkeypatch.setattr(replicated_files, "make_parents", delete_then)
        with pytest.raises(errors.UnknownTopicOrPartitionError, match="just deleted"):
            log.root.context.files.open(path, write=True)

        another.housekeeping.run()
    assert [*directories.path(follower).glob("topics/*")] == []


@pytest.mark.parametrize("damage", ["missing", "damaged"])
@pytest.mark.parametrize("directory", [1, 2])
def test_a_directory_whose_databases_are_damaged_gets_those_of_the_others(
    tmp_path, directory, damage
):
    """Also if the copy of `state` from the last close is damaged; its segments are kept."""
    directories = Directories(tmp_path)
    with directories.open() as log:
        log.create_topic("t")
        send(log, "t", [b"x"])
    for file in directories.path(directory).glob("state*/data.mdb"):
        if damage == "missing":
            file.unlink()
        else:
            file.write_bytes(b"x" * file.stat().st_size)
    with directories.open() as log:
        send(log, "t", [b"y"])
        assert bring_back(log) == [directory]
        assert [each.online for each in log.replicas] == [True] * 3
        assert sorted(assignment(log, "t").isr) == [1, 2, 3]
        assert log.housekeeping.verify(replicas=True) == []
        assert values(log, "t") == [b"x", b"y"]
    with directories.open() as log:
        assert [each.online for each in log.replicas] == [True] * 3
        directories.assert_equal_copies("t")
