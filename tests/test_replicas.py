"""A log over several directories: acknowledgements, failover, and coming back (H1-H4)."""

import gc
import multiprocessing
import os
import pickle
import shutil

import pytest
from support import forks
from support.replicas import Directories, assignment, bring_back, notice, numbered, send, values
from support.tiers import sample

import embedlog
from embedlog import errors
from embedlog.files import Files
from embedlog.kafka import confluent
from embedlog.record import TopicPartition
from embedlog.replication import catch_up, reassign
from embedlog.replication import root as replicated_root
from embedlog.root.startup import CLEAN_FILE


@pytest.fixture
def log(replicated_log):
    """The whole log, over three directories; in other files `log` is that of a partition."""
    return replicated_log


# Opening


def test_any_directory_opens_the_whole_log(directories):
    """Each directory knows the others: a path leads to all of them."""
    with directories.open() as log:
        log.create_topic("t", partitions=3)
        send(log, "t", [b"x"])

    for path in directories.paths:
        with embedlog.open(path, maintenance=False) as log:
            assert log.root.replicated
            assert len(log.root.controller.online) == 3
            assert values(log, "t") == [b"x"]


def test_a_log_in_one_directory_gets_others(tmp_path):
    """Opening it with more directories adds them; its topics stay where they are."""
    first, second = tmp_path / "first", tmp_path / "second"
    with embedlog.open(first, maintenance=False) as log:
        log.create_topic("old")
        send(log, "old", [b"x"])

    with embedlog.open([first, second], maintenance=False) as log:
        log.create_topic("new")
        send(log, "new", [b"y"])
        assert assignment(log, "old").replicas == (1,)
        assert sorted(assignment(log, "new").replicas) == [1, 2]
        assert values(log, "old") == [b"x"]
        assert log.housekeeping.verify() == []


@pytest.mark.parametrize("is_open", [True, False])
def test_a_log_that_was_begun_in_the_place_of_a_directory_is_not_overwritten(
    directories, log, is_open
):
    """Another program opened the path of a directory that was lost; it has records of its own."""
    log.create_topic("t", partitions=3)
    directories.lose(log, 2)
    with directories.alone(2) as stranger:
        stranger.create_topic("precious")
        send(stranger, "precious", [b"1"])
        if is_open:
            assert bring_back(log) == []
            assert not (directories.path(2) / ".probe").exists()
            send(stranger, "precious", [b"2"])
    assert bring_back(log) == []
    (lost,) = [each for each in log.replicas if not each.online]
    assert (lost.id, "another log is there" in lost.reason) == (2, True)

    with directories.alone(2) as stranger:
        assert stranger.topics() == ["precious"]
        assert values(stranger, "precious") == ([b"1", b"2"] if is_open else [b"1"])
    with directories.open() as again:
        assert replicated_root.try_bring_back(again.root) == []

    shutil.rmtree(directories.path(2))
    directories.put_back(2)
    assert bring_back(log) == [2]


def test_a_directory_of_another_log_in_the_place_of_one_is_offline(directories, tmp_path):
    """The log goes on with the others, and can give that one up."""
    with directories.open() as log:
        log.create_topic("t", partitions=3)
        send(log, "t", [b"x"])
    with embedlog.open([tmp_path / "a", tmp_path / "b"], maintenance=False) as other:
        other.create_topic("precious")
    directories.take(3)
    shutil.copytree(tmp_path / "b", directories.path(3))

    with embedlog.open(directories.path(1), maintenance=False) as found:
        assert [each.id for each in found.replicas if each.online] == [1, 2]
        assert values(found, "t") == [b"x"]
        assert replicated_root.try_bring_back(found.root) == []
        found.replicas.remove(directories.path(3), force=True)
        assert [each.id for each in found.replicas] == [1, 2]
    assert (directories.path(3) / "topics").exists()
    with pytest.raises(errors.NotALogError, match="belong to different logs"):
        directories.open()
    shutil.rmtree(directories.path(3))


def test_a_closed_log_says_so(directories):
    """As one in a single directory does."""
    log = directories.open()
    log.close()
    for call in (
        log.topics,
        log.housekeeping.verify,
        lambda: list(log.replicas),
        log.replicas.elect_leaders,
        log.replicas.reassign,
    ):
        with pytest.raises(errors.ClosedError):
            call()


@pytest.mark.parametrize("count", [1, 3])
def test_who_opens_a_log_while_the_last_process_closes_it_checks_it_as_the_first(
    directories, monkeypatch, count
):
    """Otherwise the mark of the clean close would stay, and count after the next kill."""
    log = embedlog.open(directories.paths[:count], maintenance=False)
    log.create_topic("t", replication_factor=count)
    close_all, opened = Files.close_all, []

    def open_first(files):
        monkeypatch.undo()
        opened.append(embedlog.open(directories.paths[:count], maintenance=False, lock_timeout=5))
        assert not list(directories.path(1).parent.parent.glob(f"*/log/{CLEAN_FILE}"))
        close_all(files)

    gc.collect()  # What other tests left closes its files when it is collected.
    monkeypatch.setattr(Files, "close_all", open_first)
    log.close()
    (other,) = opened
    send(other, "t", [b"x"])
    other.close()
    assert len(list(directories.path(1).parent.parent.glob(f"*/log/{CLEAN_FILE}"))) == count


def test_a_log_that_was_moved_as_a_whole_is_closed(directories, caplog):
    """With a warning, as one in a single directory; where it is now, it is whole."""
    log = directories.open()
    log.create_topic("t")
    for number in (1, 2, 3):
        directories.take(number)
    log.close()
    assert "moved while it was open" in caplog.text
    moved = [directories.aside(number) for number in (1, 2, 3)]
    with embedlog.open(moved, maintenance=False) as log:
        assert all(each.online for each in log.replicas)
        assert log.housekeeping.verify() == []


@pytest.mark.parametrize("lost", [1, 2])
def test_a_log_closes_without_a_directory_that_was_lost(directories, lost):
    """The others are as after every close."""
    with directories.open() as log:
        log.create_topic("t", partitions=3)
        send(log, "t", [b"x"])
        directories.take(lost)
    with directories.open() as log:
        assert [each.id for each in log.replicas if not each.online] == [lost]
        assert log.root.startup_report == []
        assert values(log, "t") == [b"x"]
        directories.put_back(lost)
        assert bring_back(log) == [lost]
        assert log.housekeeping.verify(replicas=True) == []


def test_no_directory_is_inside_another_one(directories, log, tmp_path):
    """Nothing is created."""
    for inner in (directories.path(1) / "sub", directories.path(2) / "topics" / "t-9"):
        with pytest.raises(errors.NotALogError, match=f"inside {inner.parents[-1]}"):
            log.replicas.add(inner)
        assert not inner.exists()
    with pytest.raises(errors.NotALogError, match="inside"):
        log.replicas.add(directories.path(3).parent)
    for paths in ([tmp_path / "a", tmp_path / "a/b"], [tmp_path / "a/b", tmp_path / "a"]):
        with pytest.raises(errors.NotALogError, match="inside"):
            embedlog.open(paths)
    assert not (tmp_path / "a").exists()
    beside = [tmp_path / "a", tmp_path / "a-2", tmp_path / "a.b"]
    with embedlog.open(beside, maintenance=False) as three:
        assert len(three.replicas) == 3


def test_two_logs_are_not_one(tmp_path):
    """Bad input changes nothing."""
    for name in ("a", "b"):
        embedlog.open(tmp_path / name, maintenance=False).close()

    with pytest.raises(errors.NotALogError, match="two logs"):
        embedlog.open([tmp_path / "a", tmp_path / "b"])

    embedlog.open(tmp_path / "a", maintenance=False).close()


def test_a_log_pickles_with_its_directories(log):
    """As for workers of a pool."""
    with pickle.loads(pickle.dumps(log)) as copy:
        assert copy.root.controller.image.online == (1, 2, 3)


def test_a_forked_child_goes_on(log):
    """It attaches again, as to any log."""
    log.create_topic("t")
    send(log, "t", [b"parent"])
    context = multiprocessing.get_context("fork")
    child = context.Process(target=send, args=(log, "t", [b"child"]))
    child.start()
    child.join()

    assert child.exitcode == 0
    assert values(log, "t") == [b"parent", b"child"]


def test_a_forked_child_begins_no_new_log(directories, log):
    """All directories are gone that it knows, but for one that was replaced by an empty disk."""
    log.create_topic("t")
    for each in (1, 2, 3):
        directories.take(each)
    directories.path(3).mkdir()

    def child() -> str:
        with pytest.raises(errors.NotALogError) as raised:
            log.topics()
        return str(raised.value)

    assert "has the log any more" in forks.call(child)
    assert [each.exists() for each in directories.paths] == [False, False, True]
    directories.path(3).rmdir()
    for each in (1, 2, 3):
        directories.put_back(each)


# Copies


def test_all_in_sync_copies_are_equal_byte_for_byte(directories, log):
    """Offsets, timestamps, epochs and sequence numbers included, for every kind of write."""
    log.create_topic("t", partitions=3, config={"segment.bytes": 4000})
    log.create_topic(
        "c",
        config={"cleanup.policy": "compact", "segment.bytes": 2000, "min.cleanable.dirty.ratio": 0},
    )
    send(log, "t", numbered(b"a", 100))
    with log.producer() as producer:
        producer.send_batch("t", numbered(b"b", 200))
        for number in range(200):
            producer.send("c", b"%d" % number, key=b"%d" % (number % 5))
    transactional = confluent.Producer(
        {"bootstrap.servers": f"embedlog://{directories.paths[0]}", "transactional.id": "x"}
    )
    transactional.init_transactions()
    transactional.begin_transaction()
    for number in range(50):
        transactional.produce("t", b"in a transaction", b"%d" % number)
    transactional.commit_transaction()
    log.housekeeping.compact("c", force=True)
    log.delete_records({TopicPartition("t", 0): 10})
    log.housekeeping.run()

    for topic in ("t", "c"):
        directories.assert_equal_copies(topic)


@pytest.mark.parametrize("factor", [0, 4, -1])
def test_a_topic_has_at_most_as_many_copies_as_there_are_directories(log, factor):
    """Nothing is created."""
    with pytest.raises(errors.InvalidReplicationFactorError):
        log.create_topic("t", replication_factor=factor)
    assert log.topics() == []


def test_a_log_in_one_directory_has_no_copies(tmp_path):
    """The error says how to get some."""
    with (
        embedlog.open(tmp_path / "log", maintenance=False) as log,
        pytest.raises(errors.InvalidReplicationFactorError, match=r"replicas\.add"),
    ):
        log.create_topic("t", replication_factor=2)


def test_copies_are_only_where_they_are_assigned(directories, log):
    """Two of three directories have the files."""
    log.create_topic("t", replication_factor=2)
    send(log, "t", [b"x"])

    replicas = assignment(log, "t").replicas
    have = [number for number, files in directories.copies("t").items() if files]
    assert sorted(replicas) == have


# Losing a directory


@pytest.mark.parametrize("lost", sample([1, 2, 3], 1))
def test_a_program_goes_on_when_any_directory_is_lost(directories, log, lost):
    """Whoever led, whatever was acknowledged and committed is there, and appends work."""
    log.create_topic("t", partitions=3)
    sent = send(log, "t", numbered(b"before", 30))
    consumer = log.consumer("t", group_id="g", auto_offset_reset="earliest", max_poll_records=10)
    consumer.poll(timeout_ms=1000)
    consumer.commit()
    committed = {tp: consumer.committed(tp) for tp in consumer.assignment()}

    directories.lose(log, lost)
    sent += send(log, "t", numbered(b"after", 30))

    assert {tp: consumer.committed(tp) for tp in consumer.assignment()} == committed
    rest = 0
    while polled := consumer.poll(timeout_ms=500):
        rest += sum(map(len, polled.values()))
    assert rest == 50
    consumer.close()
    assert len(values(log, "t")) == len(sent) == 60
    directories.put_back(lost)


def test_a_lost_directory_comes_back_and_catches_up(directories, log):
    """It gets what it missed; then all copies are equal, and it is in sync again."""
    log.create_topic("t", partitions=3, config={"segment.bytes": 2000})
    send(log, "t", numbered(b"before", 50))
    directories.lose(log, 2)
    send(log, "t", numbered(b"without", 50))
    log.create_topic("new")
    send(log, "new", [b"x"])
    directories.put_back(2)

    assert bring_back(log) == [2]
    send(log, "t", numbered(b"after", 5))

    assert all(set(assignment(log, "t", n).isr) == {1, 2, 3} for n in range(3))
    directories.assert_equal_copies("t")


def test_a_directory_on_a_new_disk_gets_everything(directories, log):
    """An empty directory in the place of the old one becomes a copy of the others."""
    log.create_topic("t", partitions=3)
    send(log, "t", numbered(b"before", 50))
    directories.lose(log, 1)
    directories.replace(1)

    assert bring_back(log) == [1]

    directories.assert_equal_copies("t")


def test_the_only_copy_is_not_replaced_by_an_empty_disk(directories):
    """Its partition stays offline: only an unclean election may begin it anew."""
    with directories.open() as log:
        log.create_topic("t", partitions=3, replication_factor=1)
        send(log, "t", numbered(b"x", 30))
        lost = assignment(log, "t", 0).leader
        directories.lose(log, lost)
        directories.replace(lost)
        bring_back(log)

        assert assignment(log, "t", 0).leader is None
        with pytest.raises(errors.ReplicaNotAvailableError, match="lost"):
            log.partition("t", 0).reader(0)
        assert log.replicas.elect_leaders(election="unclean") == [TopicPartition("t", 0)]
        assert log.partition("t", 0).end_offset() == 0


def test_the_only_copy_is_whole_after_its_databases_were_damaged(directories):
    """Nobody knows whether it has everything; an unclean election goes on with what it has."""
    with directories.open() as log:
        log.create_topic("t", replication_factor=1, config={"segment.bytes": 1200})
        send(log, "t", numbered(b"x", 30))
        leader = assignment(log, "t").leader
        directories.lose(log, leader)
        for name in ("state", "live"):
            data = directories.aside(leader) / name / "data.mdb"
            data.write_bytes(b"damaged" * 1000)
        directories.put_back(leader)
        bring_back(log)

        with pytest.raises(errors.ReplicaNotAvailableError, match="lost"):
            values(log, "t")
        assert log.replicas.elect_leaders(election="unclean") == [TopicPartition("t", 0)]
        assert values(log, "t") == numbered(b"x", 30)
        assert log.housekeeping.verify() == []


def test_the_only_copy_leads_again_when_it_comes_back(directories, log):
    """Nothing of it is lost."""
    log.create_topic("t", replication_factor=1)
    send(log, "t", [b"x"])
    leader = assignment(log, "t").leader
    directories.lose(log, leader)
    with pytest.raises(errors.ReplicaNotAvailableError):
        log.partition("t", 0).reader(0)
    directories.put_back(leader)
    bring_back(log)

    assert values(log, "t") == [b"x"]


def test_without_a_majority_nothing_is_changed(directories, log):
    """Two of three are lost: the third must not decide alone, but can be read."""
    log.create_topic("t")
    send(log, "t", [b"x"])
    directories.lose(log, 1)
    directories.take(2)
    with pytest.raises(errors.NotEnoughReplicasError, match="1 of 3"):
        notice(log)
    assert values(log, "t") == [b"x"]
    directories.put_back(2)
    directories.put_back(1)
    bring_back(log)


def test_a_single_directory_of_three_opens_to_read_only(directories):
    """What it has can be read; the error of a writer says what to do."""
    with directories.open() as log:
        log.create_topic("t")
        send(log, "t", [b"x"])
    for lost in (1, 2):
        directories.take(lost)

    with pytest.raises(errors.NotEnoughReplicasError, match='mode="r"'):
        embedlog.open(directories.path(3))
    with embedlog.open(directories.path(3), mode="r") as log:
        assert values(log, "t") == [b"x"]


def test_of_two_directories_one_goes_on(tmp_path):
    """Each of two may go on without the other, but not both: then a person must decide."""
    directories = Directories(tmp_path, 2)
    with directories.open() as log:
        log.create_topic("t")
        send(log, "t", [b"x"])
    directories.take(1)
    with directories.open() as log:
        send(log, "t", [b"y"])
    directories.put_back(1)
    with directories.open() as log:
        bring_back(log)
        assert values(log, "t") == [b"x", b"y"]
        assert log.housekeeping.verify() == []
    for lost in (1, 2):
        directories.take(lost)
        with embedlog.open(directories.path(3 - lost), maintenance=False) as log:
            send(log, "t", [b"of %d" % lost])
        directories.put_back(lost)

    with pytest.raises(errors.ReplicasDivergedError):
        directories.open()


# Acknowledgements


def test_acks_all_needs_enough_in_sync_copies(directories, log):
    """H1: refused before anything is written; acks=1 goes on."""
    log.create_topic("t", replication_factor=2, config={"min.insync.replicas": 2})
    send(log, "t", [b"x"])
    lost = assignment(log, "t").isr[1]
    directories.lose(log, lost)

    with pytest.raises(errors.NotEnoughReplicasError, match=r"1 of 2 replicas.* is 2"):
        send(log, "t", [b"refused"], delivery_timeout_ms=300, request_timeout_ms=100)
    send(log, "t", [b"y"], acks=1)
    directories.put_back(lost)
    bring_back(log)
    send(log, "t", [b"z"])

    assert values(log, "t") == [b"x", b"y", b"z"]


def test_altered_settings_of_replicas_hold_from_the_next_call_on(directories, log):
    """Also for producers that are open; a copy that lags longer than allowed leaves the ISR."""
    log.create_topic("t", replication_factor=2)
    with log.producer(delivery_timeout_ms=300, request_timeout_ms=100) as producer:
        producer.send("t", b"x").result()
        _, lost = assignment(log, "t").isr
        directories.lose(log, lost)
        log.alter_topic("t", {"min.insync.replicas": 2})
        with pytest.raises(errors.NotEnoughReplicasError):
            producer.send("t", b"refused").result()
        log.alter_topic("t", {"min.insync.replicas": 1})
        producer.send("t", b"y").result()
    directories.put_back(lost)
    bring_back(log)


def test_a_transaction_needs_enough_in_sync_copies(directories, log):
    """H1, of all its partitions: nothing is published."""
    log.create_topic("t", config={"min.insync.replicas": 3})
    producer = confluent.Producer(
        {"bootstrap.servers": f"embedlog://{directories.paths[0]}", "transactional.id": "x"}
    )
    producer.init_transactions()
    directories.lose(log, 3)
    producer.begin_transaction()
    producer.produce("t", b"x")

    with pytest.raises(confluent.KafkaException):
        producer.commit_transaction()
    assert values(log, "t") == []
    directories.put_back(3)


@pytest.mark.parametrize("acks", [0, 1])
def test_a_record_is_in_all_in_sync_copies_before_it_can_be_read_whatever_acks_says(
    directories, log, acks
):
    """H1: so nothing that was read is lost with the leader's disk, nor with a program that ends."""
    log.create_topic("t", replication_factor=2, config={"min.insync.replicas": 2})
    with directories.open() as short_lived:
        send(short_lived, "t", numbered(b"one", 10), acks=acks)
    directories.assert_equal_copies("t", 2)
    send(log, "t", numbered(b"two", 10), acks=acks)
    directories.lose(log, assignment(log, "t").leader)

    assert values(log, "t") == [*numbered(b"one", 10), *numbered(b"two", 10)]


def test_a_leader_that_was_not_in_sync_truncates(directories, log):
    """Readers past the cut are told, and offsets go on there."""
    log.create_topic("t", replication_factor=2)
    send(log, "t", [b"all"])
    leader, follower = assignment(log, "t").isr
    directories.lose(log, follower)
    send(log, "t", numbered(b"one", 10))
    reader_epoch = log.partition("t", 0).tail().leader_epoch
    directories.put_back(follower)
    replicated_root.try_bring_back(log.root)
    directories.lose(log, leader)
    assert reassign.elect_unclean(log.root, [TopicPartition("t", 0)])

    assert values(log, "t") == [b"all"]
    assert send(log, "t", [b"next"])[0].offset == 1
    with pytest.raises(errors.LogTruncatedError):
        log.partition("t", 0).reader(5, reader_epoch)
    directories.put_back(leader)
    bring_back(log)
    directories.assert_equal_copies("t", 2)


def test_a_preferred_leader_loses_nothing(directories, log):
    """Also not what was appended with acks=1 since."""
    log.create_topic("t", replication_factor=2)
    preferred = assignment(log, "t").leader
    directories.lose(log, preferred)
    send(log, "t", [b"x"])
    directories.put_back(preferred)
    bring_back(log)
    assert assignment(log, "t").leader != preferred
    send(log, "t", numbered(b"one", 10), acks=1)

    assert reassign.elect_preferred(log.root) == [TopicPartition("t", 0)]

    assert assignment(log, "t").leader == preferred
    assert values(log, "t") == [b"x", *numbered(b"one", 10)]


# With mirrors


def test_a_mirror_goes_on_when_the_target_loses_a_directory(directories, log, tmp_path):
    """Its topics have copies like all others, and keep the offsets and epochs of the source."""
    with embedlog.open(tmp_path / "source", maintenance=False) as source:
        source.create_topic("t", partitions=3)
        for lost in (1, 2, 3):
            send(source, "t", numbered(b"%d" % lost, 30))
            embedlog.mirror(source, log, topics="t", progress=False)
            directories.lose(log, lost)
            send(source, "t", numbered(b"without-%d" % lost, 30))
            embedlog.mirror(source, log, topics="t", progress=False)
            directories.put_back(lost)
            assert bring_back(log) == [lost]

        assert values(log, "t") == values(source, "t")
    assert sorted(assignment(log, "t").isr) == [1, 2, 3]
    directories.assert_equal_copies("t")


# Moving copies


def test_copies_move_to_another_directory(directories, log):
    """The new copy catches up before the old one is deleted."""
    log.create_topic("t", partitions=2, replication_factor=1, config={"segment.bytes": 1000})
    send(log, "t", numbered(b"x", 60))
    moves = {
        TopicPartition("t", number): [each for each in (1, 2, 3) if each not in (first,)][:1]
        for number in range(2)
        for first in assignment(log, "t", number).replicas
    }
    before = values(log, "t")

    assert reassign.begin(log.root, moves) == 2
    catch_up.replicate(log.root)
    assert reassign.finish(log.root) == 2

    assert [list(assignment(log, "t", n).replicas) for n in range(2)] == list(moves.values())
    assert values(log, "t") == before
    for number, files in directories.copies("t").items():
        partitions = {int(path.split("/")[2]) for path in files}
        assert partitions == {n for n in range(2) if number in assignment(log, "t", n).replicas}


def test_a_reassignment_to_a_directory_that_is_not_there_is_refused(log):
    """Bad input changes nothing."""
    log.create_topic("t")
    with pytest.raises(errors.InvalidReplicationAssignmentError, match="no directory 9"):
        reassign.begin(log.root, {TopicPartition("t", 0): [9]})
    assert not assignment(log, "t").is_reassigning


# Two processes


def test_another_process_notices_a_lost_directory_at_its_next_operation(directories, log):
    """The one that finds it elects; the other one looks at the epoch page."""
    log.create_topic("t")
    context = multiprocessing.get_context("spawn")
    to_child, to_parent = context.Queue(), context.Queue()

    child = context.Process(
        target=_child, args=(os.fspath(directories.path(1)), to_child, to_parent)
    )
    child.start()
    assert to_parent.get(timeout=60) == "open"
    leader = assignment(log, "t").leader
    directories.lose(log, leader)
    send(log, "t", [b"parent"])
    to_child.put("go")

    assert to_parent.get(timeout=60) == [1, 2, 3]
    child.join()
    assert values(log, "t") == [b"parent", *numbered(b"child", 3)]
    directories.put_back(leader)


def _child(path, to_child, to_parent):
    with embedlog.open(path, maintenance=False) as log:
        to_parent.put("open")
        to_child.get()
        to_parent.put([each.offset for each in send(log, "t", numbered(b"child", 3))])


def test_a_log_closes_although_a_partition_is_offline(directories, caplog):
    """What it could not flush is logged; all others are flushed, and commits are saved."""
    with directories.open() as log:
        for number in (1, 2):
            log.create_topic(f"t{number}", replicas=[(number,)])
            send(log, f"t{number}", [b"x"])
        with log.consumer("t2", group_id="g", auto_offset_reset="earliest") as consumer:
            next(consumer)
        directories.lose(log, 1)
    assert "Not flushed: The partition is offline" in caplog.text
    directories.put_back(1)
    with directories.open() as log:
        bring_back(log)
        assert values(log, "t1") == values(log, "t2") == [b"x"]
        assert TopicPartition("t2", 0) in log.groups["g"].lag()
