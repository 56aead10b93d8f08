"""The administration of a log over several directories, in Python."""

import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from support.tiers import sample

import embedlog
from embedlog import TopicPartition
from embedlog.cli import main
from embedlog.errors import (
    ClosedError,
    IllegalStateError,
    InvalidConfigError,
    InvalidPartitionError,
    InvalidReplicationAssignmentError,
    InvalidReplicationFactorError,
    LockTimeoutError,
    NotALogError,
    NotEnoughReplicasError,
    ReadOnlyError,
    ReplicaNotAvailableError,
    ReplicasDivergedError,
    UnknownTopicOrPartitionError,
)
from embedlog.files.paths import FORMAT_FILE
from embedlog.replication import catch_up, jobs, reassign
from embedlog.replication import root as replicated_root
from embedlog.replication.controller import Controller
from embedlog.replication.metadata import MetadataImage
from embedlog.root import root as root_module


@pytest.fixture(autouse=True)
def try_directories_again_soon(monkeypatch):
    """Try a directory that is offline again after a shorter time than a second."""
    monkeypatch.setattr(jobs, "RETRY_SECONDS", 0.05)


def disks(tmp_path, count=3):
    return [str(tmp_path / f"disk{number}") for number in range(1, count + 1)]


def open_log(paths, **options):
    """Open a log without housekeeping, so that nothing moves by itself."""
    return embedlog.open(paths, **{"maintenance": False, **options})


def fill(log, topic="flights", count=100, first=0, **options):
    with log.producer(**options) as producer:
        for number in range(first, first + count):
            producer.send(topic, value=b"%d" % number, partition=number % log[topic].partitions)


def values(log, topic="flights"):
    return sorted(int(record.value) for record in log[topic])


def unplug(path):
    shutil.move(path, f"{path}.unplugged")


def plug_in(path):
    shutil.move(f"{path}.unplugged", path)


def bring_back(log):
    """Run the housekeeping until directories that work are online and have caught up."""
    log.housekeeping.run()
    time.sleep(jobs.RETRY_SECONDS + 0.05)
    log.housekeeping.run()


def placements(log, topic="flights"):
    return {part["partition"]: part["replicas"] for part in log.describe_topic(topic)["partitions"]}


def all_at(*replicas, topic="flights", partitions=3):
    return {TopicPartition(topic, number): replicas for number in range(partitions)}


def healthy(log):
    return log.housekeeping.verify() == [] and log.housekeeping.verify(replicas=True) == []


def leave_isr(log):
    """Have all followers leave the ISRs, as if their disks were slow."""
    controller = log.root.controller
    controller.change_assignments(
        list(controller.image.assignments),
        lambda _key, before, _image: before.shrink(before.in_sync_followers),
    )


# Listing


def test_directories_are_listed_with_leaders_copies_sizes_and_lags(tmp_path):
    """Counts are those of the assignments, and a lag is what a copy lacks of the leader's."""
    with open_log(disks(tmp_path), racks={tmp_path / "disk2": "b"}) as log:
        log.create_topic("flights", 3, replication_factor=2)
        fill(log)
        directories = log.replicas
        assert [each.id for each in directories] == [1, 2, 3]
        assert [each.rack for each in directories] == [None, "b", None]
        everywhere = [number for part in placements(log).values() for number in part]
        assert [each.leaders for each in directories] == [1, 1, 1]
        assert [each.replicas for each in directories] == [*map(everywhere.count, (1, 2, 3))]
        assert [each.in_sync for each in directories] == [each.replicas for each in directories]
        assert [each.is_controller for each in directories] == [True, False, False]
        assert all(each.bytes > 1000 and each.lag_bytes == 0 for each in directories)
        leave_isr(log)
        fill(log)
        assert sum(each.lag_bytes for each in log.replicas) > 1000
        text = repr(log.replicas)
        assert "3 of 3 directories online" in text
        assert disks(tmp_path)[2] in text
        assert "<th>in sync</th>" in log.replicas._repr_html_()


def test_a_log_in_one_directory_is_listed_as_its_only_one(tmp_path):
    """Programs need not ask whether a log has replicas."""
    with open_log(tmp_path / "log") as log:
        log.create_topic("flights", 2)
        (directory,) = log.replicas
        assert (directory.id, directory.leaders, directory.in_sync) == (1, 2, 2)
        assert placements(log) == {0: [1], 1: [1]}
        assert log.housekeeping.verify(replicas=True) == []
        assert log.replicas.elect_leaders() == []
        with pytest.raises(IllegalStateError, match="has one directory"):
            log.replicas.reassign()


@pytest.mark.parametrize(
    "partitions", ["nope", ["t"], TopicPartition("flights", 0), [("flights",)], 7], ids=repr
)
def test_partitions_are_a_list_of_them(tmp_path, partitions):
    """The error says what to pass."""
    with open_log(disks(tmp_path, 1)) as log:
        log.create_topic("flights", 2)
        with pytest.raises(InvalidPartitionError, match=r"such as .*TopicPartition\("):
            log.replicas.elect_leaders(partitions)
        log.replicas.elect_leaders([TopicPartition("flights", 0), ("flights", 1)])


def test_an_offline_directory_is_listed_with_its_reason_and_what_has_no_leader(tmp_path):
    """A surviving directory that is opened alone says what it lacks."""
    paths = disks(tmp_path)
    with open_log(paths) as log:
        log.create_topic("flights", 3)
        log.create_topic("lonely", 3, replication_factor=1)
        fill(log)
        fill(log, "lonely")
    unplug(paths[1])
    unplug(paths[2])
    with open_log(paths[0], mode="r") as log:
        directories = log.replicas
        assert [each.online for each in directories] == [True, False, False]
        assert "directory" in directories[1].reason
        assert "1 of 3 directories online" in repr(log)
        assert directories[1].bytes is None
        assert len(directories.leaderless) == 2
        assert "without a leader: lonely-" in repr(directories)
        assert values(log) == list(range(100))
        offline = [p for p in log.describe_topic("lonely")["partitions"] if p["leader"] is None]
        assert {p["partition"] for p in offline} == {p.partition for p in directories.leaderless}
        assert all(p["end_offset"] >= 33 for p in offline)
        with pytest.raises(ReplicaNotAvailableError, match="disk"):
            values(log, "lonely")
    with pytest.raises(NotEnoughReplicasError, match="1 of 3 directories"):
        open_log(paths[0])


# Adding


def test_a_log_in_one_directory_gets_a_second_one_while_it_is_open(tmp_path):
    """What was written stays, and views of topics and groups from before use both."""
    first, second = disks(tmp_path, 2)
    with open_log(first) as log:
        topic, group = log.create_topic("flights", 3), log.groups["g"]
        housekeeping, replicas, root = log.housekeeping, log.replicas, log.root
        fill(log)
        assert log.replicas.add(second, rack="b") == 2
        assert [each.rack for each in log.replicas] == [None, "b"]
        assert values(log) == list(range(100))
        assert (len(topic), len(replicas), log.root) == (100, 2, root)
        assert group.reset_offsets("earliest", topics="flights", dry_run=False)
        assert housekeeping.run()["offsets"] == 0
        assert placements(log) == {0: [1], 1: [1], 2: [1]}
        log.replicas.reassign(all_at(1, 2))
        assert placements(log) == {0: [1, 2], 1: [1, 2], 2: [1, 2]}
        assert healthy(log)
    unplug(first)
    with open_log(second) as log:
        assert values(log) == list(range(100))


def test_a_second_directory_is_refused_while_others_know_only_the_first(tmp_path):
    """They would write to one directory, which the others take for damage."""
    first, second = disks(tmp_path, 2)
    with open_log(first, lock_timeout=0.2) as log, open_log(first) as other:
        log.create_topic("flights")
        with pytest.raises(LockTimeoutError, match="Other processes have the log open"):
            log.replicas.add(second)
        assert not log.root.replicated
        assert log.housekeeping.run()["retention"] == []
        fill(other, count=10)
        assert values(log) == list(range(10))
    with open_log(first) as log:
        producer = log.producer()
        with pytest.raises(IllegalStateError, match="producers, consumers or servers"):
            log.replicas.add(second)
        producer.close()
        assert log.replicas.add(second) == 2


@pytest.mark.parametrize("count", [1, 2])
def test_a_directory_with_other_contents_is_not_added(tmp_path, count):
    """Neither one of the log, nor another log, nor somebody's files; nothing is changed."""
    paths = disks(tmp_path, count)
    other, files = tmp_path / "other", tmp_path / "files"
    open_log(other).close()
    files.mkdir()
    (files / "thesis.tex").write_text("mine")
    with open_log(paths if count > 1 else paths[0]) as log:
        for path, error in (
            (paths[-1], IllegalStateError),
            (other, NotALogError),
            (files, NotALogError),
            (f"{paths[0]}/inside", NotALogError),
        ):
            with pytest.raises(error):
                log.replicas.add(path)
        assert [each.path for each in log.replicas] == paths
        assert os.listdir(files) == ["thesis.tex"]
        assert log.root.replicated is (count > 1)
        with open_log(paths[0], mode="r") as reader, pytest.raises(ReadOnlyError):
            reader.replicas.add(tmp_path / "more")


def test_a_log_does_not_begin_with_a_directory_with_other_contents(tmp_path):
    """The new or existing directory beside it can be used alone."""
    for new in (True, False):
        first, bad = tmp_path / f"first-{new}", tmp_path / f"bad-{new}"
        if not new:
            open_log(first).close()
        bad.mkdir()
        (bad / "thesis.tex").write_text("mine")
        with pytest.raises(NotALogError, match="other files"):
            open_log([first, bad])
        with open_log(first) as log:
            assert not log.root.replicated


def test_a_closed_log_gets_no_directory(tmp_path):
    """It stays closed."""
    first, second = disks(tmp_path, 2)
    log = open_log(first)
    log.close()
    with pytest.raises(ClosedError):
        log.replicas.add(second)
    assert not os.path.exists(second)


def test_a_partition_is_not_a_name(tmp_path):
    """The error says what to pass; a topic's name is no partition."""
    with open_log(disks(tmp_path, 2)) as log:
        log.create_topic("flights")
        for call in (
            log.replicas.reassign,
            log.delete_records,
            partial(log.housekeeping.hold, "x"),
        ):
            with pytest.raises(InvalidPartitionError, match="TopicPartition"):
                call({"flights": 0})


def test_directories_can_be_written_into_the_file_of_a_log(tmp_path):
    """`replicas = [...]` in embedlog.toml: the next open for writing adds them."""
    first, second, third = disks(tmp_path)
    with open_log(first) as log:
        log.create_topic("flights", 2)
        fill(log)
    with open(f"{first}/{FORMAT_FILE}", "a", encoding="utf-8") as file:
        file.write(f'replicas = [\n  "{first}",  # this one\n  "../disk2", \'{third}\',\n]\n')
    with open_log(first, mode="r") as log:
        assert values(log) == list(range(100))
        assert not log.root.replicated
    with open_log(first) as log:
        assert [each.path for each in log.replicas] == [first, second, third]
        assert values(log) == list(range(100))
    with open_log(third) as log:
        assert len(log.replicas) == 3


def test_a_list_of_directories_that_is_no_list_of_texts_is_refused(tmp_path):
    """The error shows what to write."""
    first = tmp_path / "log"
    open_log(first).close()
    with open(first / FORMAT_FILE, "a", encoding="utf-8") as file:
        file.write("replicas = [1, 2]\n")
    with pytest.raises(NotALogError, match=r"must be a list of directories, got \[1, 2\]"):
        open_log(first)


def test_directories_that_were_to_be_added_are_added_by_the_next_process(tmp_path, monkeypatch):
    """A process that is killed between two of them does not lose the rest of the list."""
    from embedlog.replication import root as replicated_root

    first, second, third = disks(tmp_path)
    add_directory, calls = replicated_root.add_directory, []

    def killed(root, path, rack=None):
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return add_directory(root, path, rack)

    monkeypatch.setattr(replicated_root, "add_directory", killed)
    with pytest.raises(KeyboardInterrupt):
        open_log([first, second, third])
    monkeypatch.undo()
    with open_log(first) as log:
        assert [each.path for each in log.replicas] == [first, second, third]


def test_racks_are_those_of_the_last_open_that_named_them(tmp_path):
    """As Kafka's broker.rack, which a broker brings along when it starts."""
    paths = disks(tmp_path, 2)
    with open_log(paths, racks={paths[0]: "a", paths[1]: "b"}) as log:
        assert [each.rack for each in log.replicas] == ["a", "b"]
    with open_log(paths[0]) as log:
        assert [each.rack for each in log.replicas] == ["a", "b"]
    with open_log(paths[0], racks={paths[1]: "c"}) as log:
        assert [each.rack for each in log.replicas] == ["a", "c"]


# Reassignments


def test_a_plan_makes_copies_even_and_changes_nothing_yet(tmp_path):
    """The plan is shown first; executing it moves just that."""
    paths = disks(tmp_path, 2)
    with open_log(paths) as log:
        log.create_topic("flights", 4, replication_factor=1)
        log.replicas.reassign(all_at(1, partitions=4))
        fill(log)
        plan = log.replicas.reassign(dry_run=True)
        assert plan.dry_run
        assert [move.after for move in plan.values()] == [(2,), (2,)]
        assert placements(log) == {number: [1] for number in range(4)}
        assert "dry run" in repr(plan)
        done = log.replicas.reassign()
        assert dict(done) == dict(plan)
        assert [each.replicas for each in log.replicas] == [2, 2]
        assert log.replicas.reassign() == {}
        assert repr(log.replicas.reassign()) == "Reassignment: nothing to move"
        assert healthy(log)
        assert values(log) == list(range(100))


def test_moved_copies_are_deleted_where_they_were(tmp_path):
    """A move frees the space of the directory that it leaves."""
    paths = disks(tmp_path, 2)
    with open_log(paths) as log:
        log.create_topic("flights", 1, replication_factor=1)
        log.replicas.reassign(all_at(1, partitions=1))
        fill(log)
        log.replicas.reassign(all_at(2, partitions=1))
        sizes = [each.bytes for each in log.replicas]
        assert sizes[0] == 0
        assert sizes[1] > 1000


def test_a_reassignment_reports_its_progress_and_keeps_to_its_throttle(tmp_path):
    """Bytes are counted up to the total, and take as long as the limit says."""
    paths = disks(tmp_path, 2)
    with open_log(paths) as log:
        log.create_topic("flights", 1, replication_factor=1)
        log.replicas.reassign(all_at(1, partitions=1))
        with log.producer() as producer:
            for _ in range(20):
                producer.send("flights", value=os.urandom(100_000))
        seen = []
        began = time.monotonic()
        log.replicas.reassign(
            all_at(1, 2, partitions=1), throttle=4e6, progress=lambda *args: seen.append(args)
        )
        assert time.monotonic() - began > 0.3  # Never faster than the limit.
        done, total = seen[-1]
        assert done == total
        assert total > 2_000_000
        for throttle in (0, -1):
            with pytest.raises(InvalidConfigError, match="throttle must be more than 0"):
                log.replicas.reassign(throttle=throttle)


def test_bad_moves_are_refused_before_anything_moves(tmp_path):
    """An unknown directory, one that occurs twice, none at all, an unknown partition."""
    with open_log(disks(tmp_path)) as log:
        log.create_topic("flights", 3, replication_factor=1)
        before = placements(log)
        for replicas in ((1, 9), (1, 1), ()):
            with pytest.raises(InvalidReplicationAssignmentError):
                log.replicas.reassign({**all_at(1), TopicPartition("flights", 2): replicas})
        with pytest.raises(UnknownTopicOrPartitionError):
            log.replicas.reassign({TopicPartition("flights", 3): (1,)})
        with pytest.raises(UnknownTopicOrPartitionError):
            log.replicas.reassign({TopicPartition("fleet", 0): (1,)})
        assert placements(log) == before


def test_a_move_to_a_directory_that_is_offline_waits_and_can_be_cancelled(tmp_path):
    """It is pending; cancelling keeps the old copies; otherwise it ends when the disk is back."""
    paths = disks(tmp_path)
    with open_log(paths) as log:
        log.create_topic("flights", 1, replication_factor=1)
        log.replicas.reassign(all_at(1, partitions=1))
        fill(log)
        unplug(paths[2])
        log.root.controller.take_offline({3: OSError("unplugged")})
        result = log.replicas.reassign(all_at(3, partitions=1))
        assert result.pending == (TopicPartition("flights", 0),)
        assert "wait for a directory" in repr(result)
        assert log.replicas.cancel_reassignment() == 1
        assert placements(log) == {0: [1]}
        assert log.replicas.reassign(all_at(3, partitions=1)).pending
        plug_in(paths[2])
    with open_log(paths) as log:
        bring_back(log)
        assert placements(log) == {0: [3]}
        assert values(log) == list(range(100))
        assert healthy(log)


def test_a_move_that_is_cancelled_while_it_copies_leaves_nothing(tmp_path):
    """The process that copies removes the files, unless the move was begun again at once."""
    paths = disks(tmp_path)
    with open_log(paths) as log:
        log.create_topic("flights", 1, replication_factor=1)
        log.replicas.reassign(all_at(1, partitions=1))
        fill(log)
        partition = log.root.partition("flights", 0)
        directory = log.root.controller.directories[3]

        def copy_while(again: bool) -> bool:
            assert reassign.begin(log.root, all_at(3, partitions=1)) == 1

            def cancel(_: int) -> None:
                log.replicas.cancel_reassignment()
                if again:
                    reassign.begin(log.root, all_at(3, partitions=1))

            return catch_up.copy_partition(partition, directory, progress=cancel)

        def has_files() -> bool:
            return any((Path(paths[2]) / partition.directory).rglob("*.arrows"))

        assert not copy_while(again=False)
        assert placements(log) == {0: [1]}
        assert not has_files()
        assert not copy_while(again=True)  # the cancelled one; this is another move
        assert has_files()
        log.housekeeping.run()
        assert values(log) == list(range(100))
        assert placements(log) == {0: [3]}
        assert healthy(log)


def test_a_move_that_is_cancelled_loses_nothing_although_a_new_copy_leads(tmp_path):
    """Also not what was sent with acks=1 while it led."""
    with open_log(disks(tmp_path)) as log:
        log.create_topic("flights", 1, replication_factor=2)
        log.replicas.reassign(all_at(1, 2, partitions=1))
        fill(log, count=10)
        reassign.begin(log.root, all_at(3, 2, partitions=1))
        catch_up.replicate(log.root)
        assert reassign.elect_preferred(log.root)
        fill(log, count=10, first=10, acks=1)

        assert log.replicas.cancel_reassignment() == 1

        assert sorted(placements(log)[0]) == [1, 2]
        assert values(log) == list(range(20))
        assert healthy(log)


def test_nothing_is_moved_to_a_directory_that_is_removed_at_that_moment(tmp_path, monkeypatch):
    """It was there when the moves were checked."""
    paths = disks(tmp_path)
    with open_log(paths) as log:
        log.create_topic("flights", 1, replication_factor=1)
        log.replicas.reassign(all_at(1, partitions=1))
        check = reassign.check

        def remove_then(root, moves):
            keys = check(root, moves)
            monkeypatch.undo()
            reassign.remove_directories(log.root, [3])
            return keys

        monkeypatch.setattr(reassign, "check", remove_then)
        with pytest.raises(InvalidReplicationAssignmentError, match="no directory 3"):
            reassign.begin(log.root, all_at(1, 3, partitions=1))

        assert placements(log) == {0: [1]}
        assert healthy(log)


def test_a_directory_that_was_just_removed_does_not_come_back(tmp_path):
    """The housekeeping had found that it is offline, a moment before."""
    paths = disks(tmp_path)
    with open_log(paths) as log:
        log.root.controller.take_offline({3: OSError("unplugged")})
        reassign.remove_directories(log.root, [3], force=True)

        assert not replicated_root.bring_back(log.root, 3)

        assert len(log.root.controller.image.online) == 2


def test_files_of_a_cancelled_move_are_removed_when_the_disk_comes_back(tmp_path):
    """They could not be before, and nothing else would ever do it."""
    paths = disks(tmp_path)
    with open_log(paths) as log:
        log.create_topic("flights", 1, replication_factor=1)
        log.replicas.reassign(all_at(1, partitions=1))
        fill(log)
        reassign.begin(log.root, all_at(1, 3, partitions=1))
        catch_up.replicate(log.root)
        unplug(paths[2])
        log.root.controller.take_offline({3: OSError("unplugged")})
        assert log.replicas.cancel_reassignment() == 1
        plug_in(paths[2])
        files = Path(paths[2]) / log.root.topic("flights").directory / "0"
        assert list(files.iterdir())
        bring_back(log)
        assert not files.exists()
        assert placements(log) == {0: [1]}
        assert healthy(log)


def test_housekeeping_finishes_a_reassignment_whose_process_was_killed(tmp_path):
    """What is in the metadata needs no particular process."""
    with open_log(disks(tmp_path, 2)) as log:
        log.create_topic("flights", 2, replication_factor=1)
        fill(log)
        moves = {TopicPartition("flights", number): (1, 2) for number in range(2)}
        assert reassign.begin(log.root, moves) == 2
        log.housekeeping.run()
        assert all(set(replicas) == {1, 2} for replicas in placements(log).values())
        assert healthy(log)


def test_housekeeping_leaves_new_copies_to_the_process_that_runs_a_reassignment(tmp_path):
    """Otherwise the throttle of the reassignment would mean nothing."""
    with open_log(disks(tmp_path, 2)) as log, open_log(disks(tmp_path, 2)) as other:
        log.create_topic("flights", 1, replication_factor=1)
        log.replicas.reassign(all_at(1, partitions=1))
        fill(log)
        with reassign.lock(other.root) as free:
            assert free
            reassign.begin(log.root, all_at(1, 2, partitions=1))
            log.housekeeping.run()
            assert log.describe_topic("flights")["partitions"][0]["isr"] == [1]
        log.housekeeping.run()
        assert log.describe_topic("flights")["partitions"][0]["isr"] == [1, 2]


# Elections


def test_preferred_leaders_are_elected_by_hand(tmp_path):
    """Only the partitions that have another leader change."""

    def leaders(log):
        return [part["leader"] for part in log.describe_topic("flights")["partitions"]]

    with open_log(disks(tmp_path, 2)) as log:
        log.create_topic("flights", 4, replication_factor=2)
        before = leaders(log)
        assert sorted(before) == [1, 1, 2, 2]
        log.root.controller.take_offline({2: OSError("unplugged")})
        assert leaders(log) == [1, 1, 1, 1]
        bring_back(log)
        assert [part["isr"] for part in log.describe_topic("flights")["partitions"]] == [
            [leader, 3 - leader] for leader in before
        ]
        assert leaders(log) == [1, 1, 1, 1]
        moved = [TopicPartition("flights", n) for n, leader in enumerate(before) if leader == 2]
        assert log.replicas.elect_leaders(moved[:1]) == moved[:1]
        assert log.replicas.elect_leaders() == moved[1:]
        assert leaders(log) == before
        assert log.replicas.elect_leaders() == []
        with pytest.raises(UnknownTopicOrPartitionError):
            log.replicas.elect_leaders([TopicPartition("flights", 4)])
        with pytest.raises(InvalidConfigError, match="preferred or unclean"):
            log.replicas.elect_leaders(election="best")


@pytest.mark.parametrize("segment_bytes", [1 << 30, 2_000])
def test_an_unclean_election_goes_on_with_what_the_survivor_has(tmp_path, segment_bytes):
    """Records that only the others have are lost, also whole segments; the rest is healthy."""
    paths = disks(tmp_path, 5)
    with open_log(paths) as log:
        log.create_topic("flights", 1, {"segment.bytes": segment_bytes})
        log.replicas.reassign(all_at(1, 3, partitions=1))
        fill(log, count=50)
        log.root.controller.take_offline({3: OSError("unplugged")})
        for first in range(50, 1000, 50):
            fill(log, count=50, first=first)
    unplug(paths[0])
    with open_log(paths[1]) as log:
        bring_back(log)
        assert log.replicas.leaderless == (TopicPartition("flights", 0),)
        with pytest.raises(ReplicaNotAvailableError) as caught:
            values(log)
        assert caught.value.replicas == (str(paths[0]),)  # the copy in the other one is too old
        assert log.replicas.elect_leaders() == []
        assert log.replicas.elect_leaders(election="unclean") == [TopicPartition("flights", 0)]
        assert values(log) == list(range(50))
        fill(log, count=10, first=50)
        assert values(log) == list(range(60))
        assert healthy(log)
        plug_in(paths[0])
        bring_back(log)
        assert log.describe_topic("flights")["partitions"][0]["isr"] == [1, 3]
        assert healthy(log)


# Removing


def test_a_directory_is_removed_after_its_copies_have_moved(tmp_path):
    """No record is lost, the factor stays if it can, and the directory is empty then."""
    paths = disks(tmp_path)
    with open_log(paths) as log:
        log.create_topic("flights", 3, replication_factor=2)
        fill(log)
        with pytest.raises(TypeError, match="at least one directory"):
            log.replicas.remove()
        log.replicas.remove(paths[0])
        assert [each.id for each in log.replicas] == [2, 3]
        assert all(len(replicas) == 2 for replicas in placements(log).values())
        assert os.listdir(paths[0]) == []
        assert values(log) == list(range(100))
        fill(log, first=100)
        assert healthy(log)
    with open_log(paths[2]) as log:
        assert values(log) == list(range(200))
        assert log.replicas.add(paths[0]) == 4


def test_topics_get_more_or_fewer_copies(tmp_path):
    """As after a log in one directory got others; the new copies are even."""
    paths = disks(tmp_path)
    with open_log(paths[:1]) as log:
        log.create_topic("flights", 6)
        log.create_topic("other")
        fill(log)
    with open_log(paths) as log:
        planned = log.replicas.reassign(replication_factor={"flights": 2}, dry_run=True)
        assert all(each == [1] for each in placements(log).values())
        done = log.replicas.reassign(replication_factor={"flights": 2})
        assert dict(done) == dict(planned)
        assert all(len(each) == 2 for each in placements(log).values())
        assert len(placements(log, "other")[0]) == 1
        assert sorted(each.replicas for each in log.replicas) == [4, 4, 5]
        assert log.replicas.reassign(replication_factor={"flights": 2}) == {}
        log.replicas.reassign(replication_factor=3)
        assert all(sorted(each) == [1, 2, 3] for each in placements(log).values())
        assert sorted(placements(log, "other")[0]) == [1, 2, 3]
        log.replicas.reassign(replication_factor=1)
        assert all(len(each) == 1 for each in placements(log).values())
        assert values(log) == list(range(100))
        assert healthy(log)


def test_wrong_numbers_of_copies_change_nothing(tmp_path):
    """A directory has one copy at most."""
    paths = disks(tmp_path, 2)
    with open_log(paths) as log:
        log.create_topic("flights", 2)
        before = placements(log)
        for factor in (0, 3, {"flights": 3}):
            with pytest.raises(InvalidReplicationFactorError, match="1 to 2 copies"):
                log.replicas.reassign(replication_factor=factor)
        with pytest.raises(UnknownTopicOrPartitionError):
            log.replicas.reassign(replication_factor={"nope": 1})
        with pytest.raises(InvalidConfigError, match="not both"):
            log.replicas.reassign(all_at(1), replication_factor=1)
        for wrong in (True, "2", 2.0, {"flights": None}):
            with pytest.raises(InvalidConfigError, match="must be an int"):
                log.replicas.reassign(replication_factor=wrong)
        assert placements(log) == before


def test_a_topic_with_a_copy_everywhere_has_one_less_after_a_removal(tmp_path):
    """There is nowhere else for its copy."""
    paths = disks(tmp_path, 2)
    with open_log(paths) as log:
        log.create_topic("flights", 2, replication_factor=2)
        fill(log)
        log.replicas.remove(paths[0])
        assert placements(log) == {0: [2], 1: [2]}
        assert values(log) == list(range(100))
        with pytest.raises(IllegalStateError, match="No directory that is online would be left"):
            log.replicas.remove(paths[1], force=True)
        with pytest.raises(IllegalStateError, match="no such directory"):
            log.replicas.remove(tmp_path / "elsewhere")


def test_a_removal_leaves_no_fewer_copies_because_another_directory_is_offline(tmp_path):
    """That one may come back a moment later; until then a second loss would be final."""
    paths = disks(tmp_path)
    with open_log(paths) as log:
        log.create_topic("flights", replication_factor=2)
        fill(log)
        log.replicas.reassign({TopicPartition("flights", 0): [1, 2]})
        unplug(paths[2])
        log.root.controller.check_directories()
        with pytest.raises(NotEnoughReplicasError, match=r"flights-0, since \S+disk3 cannot"):
            log.replicas.remove(paths[1])
        assert placements(log) == {0: [1, 2]}
        plug_in(paths[2])
        bring_back(log)
        log.replicas.remove(paths[1])
        assert placements(log) == {0: [1, 3]}
        assert log.replicas.add(paths[1]) == 4
        unplug(paths[2])
        log.root.controller.check_directories()
        log.replicas.remove(paths[1], force=True)
        assert values(log) == list(range(100))


def test_other_handles_go_on_after_a_removal(tmp_path):
    """Also if the directory was the one that they read, and led their partition."""
    paths = disks(tmp_path)
    with open_log(paths) as log, open_log(paths) as other:
        log.create_topic("flights", 3)
        with other.producer() as producer:
            producer.send("flights", value=b"0", partition=0).result()
            log.replicas.remove(paths[0])
            for number in range(1, 30):
                producer.send("flights", value=b"%d" % number, partition=number % 3).result()
        assert values(other) == list(range(30))
        assert [each.id for each in other.replicas] == [2, 3]
        assert healthy(other)


def test_a_broken_disk_is_replaced_by_a_new_one(tmp_path):
    """Add the new one, remove the old one: the copies are made from those that live."""
    paths = disks(tmp_path, 4)
    with open_log(paths[:3]) as log:
        log.create_topic("flights", 3, replication_factor=2)
        fill(log)
    shutil.rmtree(paths[1])
    with open_log(paths[0]) as log:
        assert [each.online for each in log.replicas] == [True, False, True]
        log.replicas.add(paths[3])
        log.replicas.remove(paths[1])
        assert [each.online for each in log.replicas] == [True, True, True]
        assert [each.id for each in log.replicas] == [1, 3, 4]
        assert all(len(replicas) == 2 for replicas in placements(log).values())
        assert values(log) == list(range(100))
        assert healthy(log)


def test_the_only_copy_is_not_given_up_without_force(tmp_path):
    """With it, these partitions begin again, empty; the others lose nothing."""
    paths = disks(tmp_path)
    with open_log(paths) as log:
        log.create_topic("flights", 3)
        log.create_topic("lonely", 3, replication_factor=1)
        fill(log)
        fill(log, "lonely")
    shutil.rmtree(paths[2])
    with open_log(paths[0]) as log:
        (lost,) = log.replicas.leaderless
        with pytest.raises(ReplicaNotAvailableError, match=f"no copy: lonely-{lost.partition}"):
            log.replicas.remove(paths[2])
        assert len(log.replicas) == 3
        log.replicas.remove(paths[2], force=True)
        with open_log(paths[0], mode="r") as reader:  # before anything is written
            kept = values(reader, "lonely")
            assert reader.housekeeping.verify() == []
        assert log.replicas.leaderless == ()
        assert values(log) == list(range(100))
        assert values(log, "lonely") == kept
        assert kept == [n for n in range(100) if n % 3 != lost.partition]
        fill(log, "lonely", first=100)
        assert values(log, "lonely") == [*kept, *range(100, 200)]
        assert healthy(log)


def test_a_partition_that_is_locked_does_not_stop_a_removal(tmp_path):
    """The next program that writes makes its log that of the new leader."""
    paths = disks(tmp_path)
    with open_log(paths, lock_timeout=0.2) as log, open_log(paths) as other:
        log.create_topic("flights", 3)
        fill(log)
        leader = log.partition("flights", 0).placement.leader
        with other.partition("flights", 0).locked():
            unplug(paths[leader - 1])
            log.replicas.remove(paths[leader - 1], force=True)
        assert len(log.replicas) == 2
        assert values(other) == list(range(100))


def test_one_survivor_of_three_decides_alone_once_the_others_are_given_up(tmp_path):
    """The quorum is then one of the directories that are left."""
    paths = disks(tmp_path)
    with open_log(paths) as log:
        log.create_topic("flights", 3)
        fill(log)
    unplug(paths[1])
    unplug(paths[2])
    with pytest.raises(NotEnoughReplicasError):
        open_log(paths[0])
    with open_log(paths[0], mode="r") as log:
        with pytest.raises(ReadOnlyError):
            log.replicas.remove(paths[1])
        log.replicas.remove(paths[1], force=True)
        assert [each.path for each in log.replicas] == [paths[0], paths[2]]
    with open_log(paths[0]) as log:
        fill(log, first=100)
        assert values(log) == list(range(200))
    plug_in(paths[2])
    with open_log(paths[0]) as log:
        bring_back(log)
        assert all(
            set(part["isr"]) == {1, 3} for part in log.describe_topic("flights")["partitions"]
        )
        assert healthy(log)
    plug_in(paths[1])
    for named in (paths, paths[1]):
        with pytest.raises(
            NotALogError, match=f"was removed.*The log is in {paths[0]}, {paths[2]}"
        ):
            open_log(named)


def test_directories_that_went_on_without_each_other_are_found_after_a_removal(tmp_path):
    """Also if one has given the other up: each may have what the other lacks."""
    paths = disks(tmp_path)
    with open_log(paths) as log:
        log.create_topic("flights", 3)
        fill(log)
    unplug(paths[0])
    with open_log(paths[1]) as log:
        fill(log, first=100)
    unplug(paths[1])
    unplug(paths[2])
    plug_in(paths[0])
    with open_log(paths[0], mode="r") as log:
        log.replicas.remove(paths[1], paths[2], force=True)
    with open_log(paths[0]) as log:
        fill(log, first=200)
    plug_in(paths[1])
    for named in (paths, paths[1]):
        with pytest.raises(ReplicasDivergedError):
            open_log(named)
    with open_log(paths[0]) as log:  # The one that counts, opened alone.
        assert values(log) == [*range(100), *range(200, 300)]


def test_a_running_program_goes_on_after_the_others_were_given_up(tmp_path):
    """It need not be restarted when the quorum is back."""
    paths = disks(tmp_path)
    with open_log(paths) as log:
        log.create_topic("flights", 1)
        fill(log)
        unplug(paths[1])
        unplug(paths[2])
        with pytest.raises(NotEnoughReplicasError):
            log.root.controller.take_offline({2: OSError("gone"), 3: OSError("gone")})
        log.replicas.remove(paths[1], paths[2], force=True)
        fill(log, first=100)
        assert values(log) == list(range(200))


@pytest.mark.parametrize("step", sample(["before", "after", "members", "files"], 2))
def test_a_removal_that_was_interrupted_is_done_or_can_be_repeated(tmp_path, monkeypatch, step):
    """Between any two of its steps the log is whole, whichever directory opens it."""
    paths = disks(tmp_path)
    with open_log(paths) as log:
        log.create_topic("flights", 3, replication_factor=2)
        fill(log)

    def interrupt(*_arguments, **_named):
        raise KeyboardInterrupt

    def remove_and_interrupt(self, *arguments, **named):
        remove(self, *arguments, **named)
        raise KeyboardInterrupt

    remove = Controller.remove
    with monkeypatch.context() as patched, open_log(paths) as log:
        if step == "before":
            patched.setattr(Controller, "remove", interrupt)
        elif step == "after":
            patched.setattr(Controller, "remove", remove_and_interrupt)
        elif step == "members":
            patched.setattr(reassign, "_clear", interrupt)
        else:
            patched.setattr(reassign.startup, "remove_tree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            log.replicas.remove(paths[0])
        patched.undo()
    for path in paths[1:]:
        with open_log(path) as log:
            ids = [each.id for each in log.replicas]
            assert ids == ([1, 2, 3] if step == "before" else [2, 3])
            assert values(log) == list(range(100))
            assert healthy(log)
    with open_log(paths[1]) as log:
        if step == "before":
            log.replicas.remove(paths[0])
        fill(log, first=100)
        assert values(log) == list(range(200))
        assert [each.id for each in log.replicas] == [2, 3]


def test_a_topic_that_is_created_during_a_removal_keeps_no_copy_there(tmp_path, monkeypatch):
    """The removal looks again, in the write that removes the directory."""
    paths = disks(tmp_path)
    with open_log(paths) as log, open_log(paths) as other:
        log.create_topic("flights", 3)
        fill(log)
        run = reassign.run

        def run_and_create(*arguments, **named):
            pending = run(*arguments, **named)
            if "fleet" not in other.topics():
                other.create_topic("fleet", replicas=[(1,)])
                fill(other, "fleet")
            return pending

        monkeypatch.setattr(reassign, "run", run_and_create)
        log.replicas.remove(paths[0])
        assert 1 not in placements(log, "fleet")[0]
        assert values(log, "fleet") == list(range(100))
        assert healthy(log)


# Comparing copies


def test_a_byte_that_differs_in_a_copy_is_found_at_its_offset(tmp_path):
    """verify reads the leader; verify(replicas=True) reads the others as well."""
    paths = disks(tmp_path)
    with open_log(paths) as log:
        log.create_topic("flights", 1)
        for first in (0, 10, 20):
            fill(log, count=10, first=first)
        leader = log.describe_topic("flights")["partitions"][0]["leader"]
        follower = next(each for each in log.replicas if each.id != leader)
        assert log.housekeeping.verify(replicas=True) == []
        directory = next((tmp_path / os.path.basename(follower.path) / "topics").iterdir()) / "0"
        (segment,) = directory.glob("*.arrows")
        data = bytearray(segment.read_bytes())
        data[-9] ^= 1  # in the last batch
        segment.write_bytes(data)
        assert log.housekeeping.verify() == []
        (difference,) = log.housekeeping.verify(replicas=True)
        assert (difference.topic, difference.partition) == ("flights", 0)
        assert difference.copy == follower.path
        assert difference.offset == 20


def test_what_a_follower_does_not_have_yet_is_no_difference(tmp_path):
    """After it left the ISR it lags until the housekeeping copies it."""
    with open_log(disks(tmp_path)) as log:
        log.create_topic("flights", 2)
        fill(log)
        leave_isr(log)
        fill(log)
        assert sum(each.lag_bytes for each in log.replicas) > 0
        assert log.housekeeping.verify(replicas=True) == []
        log.housekeeping.run()
        assert sum(each.lag_bytes for each in log.replicas) == 0


# The metadata


def test_an_image_without_directories_is_of_no_log():
    """So a directory whose rows are gone is never taken for one that removed all others."""
    assert MetadataImage().online == ()


# Monitoring


def test_metrics_count_what_is_offline_and_what_has_too_few_copies(tmp_path):
    """With Kafka's names; a partition that is offline does not hide the others."""
    paths = disks(tmp_path)
    with open_log(paths) as log:
        log.create_topic(
            "flights", 3, {"min.insync.replicas": 2}, replicas=[(1, 2), (2, 3), (3, 1)]
        )
        log.create_topic("lonely", replicas=[(2,)])
        fill(log)
        fill(log, "lonely")
        metrics = log.metrics()
        assert metrics["kafka.server.ReplicaManager"] == {
            "PartitionCount": 7,
            "LeaderCount": 4,
            "UnderReplicatedPartitions": 0,
            "UnderMinIsrPartitionCount": 0,
            "AtMinIsrPartitionCount": 4,
            "OfflineReplicaCount": 0,
            "ReassigningPartitions": 0,
            "isr-shrinks-total": 0,
            "isr-expands-total": 0,
        }
        log.housekeeping.run()  # notes how things are
    unplug(paths[1])
    with open_log(paths) as log:
        log.housekeeping.run()
        metrics = log.metrics()
        manager, controller = (
            metrics[f"kafka.{name}"]
            for name in ("server.ReplicaManager", "controller.KafkaController")
        )
        assert manager["OfflineReplicaCount"] == 4  # with that of __activity
        assert manager["UnderMinIsrPartitionCount"] == 3  # and lonely-0 has no leader
        assert manager["isr-shrinks-total"] == 2
        assert controller["ActiveBrokerCount"] == 2
        assert controller["OfflinePartitionsCount"] == 1
        assert controller["leader-elections-total"] == 2
        assert controller["unclean-leader-elections-total"] == 0
        assert metrics["kafka.log.LogManager"] == {"OfflineLogDirectoryCount": 1}
        offline = metrics[f"kafka.log.LogManager.{paths[1]}"]
        assert (offline["LogDirectoryOffline"], offline["LeaderCount"]) == (1, 0)
        assert metrics["kafka.log.lonely-0"] == {"Offline": 1}
        assert metrics["kafka.log.flights-0"]["LogEndOffset"] == 34
        assert f'kafka_log_logmanager_logdirectoryoffline{{logDirectory="{paths[1]}"}} 1' in (
            log.prometheus()
        )


def test_what_happens_to_directories_and_copies_is_in_the_activity(tmp_path):
    """A directory that is lost, and comes back; elections, ISRs, moves."""
    paths = disks(tmp_path)

    def events(log, first):
        records = [json.loads(record.value) for record in log["__activity"]][first:]
        return [record for record in records if record["kind"] in kinds]

    kinds = ("offline", "online", "removed", "elected", "isr", "reassigned")
    with open_log(paths) as log:
        log.create_topic("flights", replicas=[(2, 3)])
        fill(log)
        log.housekeeping.run()
        assert events(log, 0) == []
    unplug(paths[1])
    with open_log(paths) as log:
        log.housekeeping.run()
        (offline, elected, isr) = events(log, 0)
        assert offline["kind"] == "offline"
        assert (offline["directory"], offline["path"]) == (2, paths[1])
        assert offline["reason"]
        assert (elected["before"], elected["leader"], elected["unclean"]) == (2, 3, False)
        assert (isr["topic"], isr["before"], isr["isr"]) == ("flights", [2, 3], [3])
        plug_in(paths[1])
        seen = len(log["__activity"])
        bring_back(log)
        assert [event["kind"] for event in events(log, seen)] == ["online", "isr"]
        seen = len(log["__activity"])
        log.replicas.reassign(all_at(1, partitions=1))
        log.replicas.remove(paths[2])
        log.housekeeping.run()
        found = events(log, seen)
        assert {event["kind"] for event in found} == {"removed", "elected", "isr", "reassigned"}
        moved = next(event for event in found if event["kind"] == "reassigned")
        assert (moved["before"], moved["replicas"]) == ([2, 3], [1])
    code = main(["--root", paths[0], "activity", "--kind", "offline", "--kind", "elected"])
    assert code == 0


# Processes that are killed while they change the metadata

KILLED = """
import os, sys
import embedlog
from embedlog import kv
from embedlog.replication.controller import Controller

log = embedlog.open(sys.argv[1], maintenance=False)
key = log.root.partition("flights", 0).key
controller = log.root.controller
if sys.argv[2] == "before":
    kv._commit_all = lambda *_: os._exit(9)
else:
    Controller.refresh = lambda self: os._exit(9)
controller.change_assignment(key, lambda assignment: assignment.shrink([2]))
"""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_others_notice_a_change_whose_process_was_killed(tmp_path, moment):
    """Also right after the commit: otherwise they would go on with replicas that are none."""
    paths = disks(tmp_path)
    with open_log(paths) as log:
        log.create_topic("flights", replicas=[(1, 2, 3)])
        fill(log)
        epoch = log.root.controller.current().epoch
        done = subprocess.run([sys.executable, "-c", KILLED, paths[0], moment], check=False)
        assert done.returncode == 9
        part = log.describe_topic("flights")["partitions"][0]
        assert part["isr"] == ([1, 2, 3] if moment == "before" else [1, 3])
        controller = log.root.controller.current()
        assert controller.epoch == epoch + (moment == "after")
        # An epoch that nobody committed stops nothing, and the housekeeping ends the search.
        fill(log, first=100)
        assert values(log) == list(range(200))
        for _ in range(4):
            log.housekeeping.run()
        assert not controller.current().moved()
        assert log.describe_topic("flights")["partitions"][0]["isr"] == [1, 2, 3]
        assert healthy(log)


# What another process changes meanwhile


def cancelling(log, then=None):
    """Return a function for the progress of a reassignment: once, it cancels all of them."""

    def cancel(*_):
        if log.replicas.cancel_reassignment() and then is not None:
            then()

    return cancel


@pytest.mark.parametrize("what", ["cancel", "replace", "delete"])
def test_a_move_that_another_process_undoes_is_not_done(tmp_path, what):
    """The result names it, whether it was cancelled, replaced, or its topic deleted."""
    paths = disks(tmp_path)
    with open_log(paths) as log, open_log(paths) as other:
        log.create_topic("flights", replicas=[(1,), (1,)], partitions=2)
        fill(log)
        moves = {TopicPartition("flights", number): (2,) for number in range(2)}

        def undo(*_):
            other.replicas.cancel_reassignment([TopicPartition("flights", 0)])
            if what == "replace":
                reassign.begin(other.root, {TopicPartition("flights", 0): (3,)})
            if what == "delete" and "flights" in other.topics():
                other.delete_topic("flights")

        result = log.replicas.reassign(moves, progress=undo)

        undone = list(moves) if what == "delete" else list(moves)[:1]
        assert list(result.superseded) == undone
        assert result.pending == ()
        assert f"{len(undone)} move" in result.title
        assert "cancelled or replaced by another process" in result.title
        assert "done" not in result.title
        assert [row[-1] for row in result.rows()[1]].count("superseded") == len(undone)
        assert result.to_dict()["superseded"] == [each._asdict() for each in undone]
        if what != "delete":
            assert placements(log)[1] == [2]
            assert values(log) == list(range(100))


def test_a_move_that_was_cancelled_and_begun_again_is_done(tmp_path):
    """What counts is where the copies are in the end."""
    paths = disks(tmp_path)
    with open_log(paths) as log, open_log(paths) as other:
        log.create_topic("flights", replicas=[(1,)])
        fill(log)
        target = all_at(2, partitions=1)

        def begin_again():
            reassign.begin(other.root, target)

        result = log.replicas.reassign(target, progress=cancelling(other, then=begin_again))
        assert (result.pending, result.superseded) == ((), ())
        assert "done" in result.title
        assert placements(log) == {0: [2]}


def test_a_removal_whose_moves_another_process_cancels_fails(tmp_path):
    """The directory is still part of the log, with all it had; repeated, the call removes it."""
    paths = disks(tmp_path)
    with open_log(paths) as log, open_log(paths) as other:
        log.create_topic("flights", replicas=[(1,)])
        fill(log)
        with pytest.raises(NotEnoughReplicasError, match="another process cancelled the moves"):
            log.replicas.remove(paths[0], progress=cancelling(other))
        assert [each.id for each in log.replicas] == [1, 2, 3]
        assert placements(log) == {0: [1]}
        log.replicas.remove(paths[0])
        assert values(log) == list(range(100))


def test_a_directory_that_another_process_adds_at_the_same_moment_is_added_once(
    tmp_path, monkeypatch
):
    """Both had seen that it was not part of the log."""
    paths = disks(tmp_path)
    with open_log(paths[:2]) as log, open_log(paths[:2]) as other:
        read_member = replicated_root.read_member

        def add_first(files):
            monkeypatch.undo()
            other.replicas.add(paths[2])
            return read_member(files) and None

        monkeypatch.setattr(replicated_root, "read_member", add_first)
        with pytest.raises((IllegalStateError, NotALogError), match=r"belongs to the log|a log"):
            log.replicas.add(paths[2])
        assert [each.path for each in log.replicas] == paths
        assert healthy(log)


@pytest.mark.parametrize("function", ["read_member", "write_format"])
def test_an_empty_directory_that_two_processes_bring_back_at_the_same_moment_stays_one_of_the_log(
    tmp_path, monkeypatch, function
):
    """One has found it empty, or is about to write its format file, when the other one does it."""
    paths = disks(tmp_path)
    module = replicated_root if function == "read_member" else root_module
    with open_log(paths) as log, open_log(paths) as other:
        shutil.rmtree(paths[2])
        log.root.controller.check_directories()
        os.makedirs(paths[2])
        # As a process leaves it that is killed while it writes the format file.
        Path(paths[2], ".embedlog.new").touch()
        step, returned = getattr(module, function), []

        def bring_back_first(files):
            monkeypatch.undo()
            found = step(files) if function == "read_member" else None
            returned.extend(replicated_root.try_bring_back(other.root))
            return step(files) if function == "write_format" else found

        monkeypatch.setattr(module, function, bring_back_first)
        assert replicated_root.try_bring_back(log.root) == []
        assert returned == [3]
        assert [each.reason for each in log.replicas] == [None] * 3
    with open_log(paths[2]) as log:
        assert [each.path for each in log.replicas] == paths
        assert healthy(log)


# What must stay where it is


def test_a_new_replication_factor_moves_nothing_of_other_topics(tmp_path):
    """An administrator may have placed them on purpose; the new copies are where they fit."""
    with open_log(disks(tmp_path, 4)) as log:
        log.create_topic("a", replicas=[(1,)])
        for name in "bcd":
            log.create_topic(name, replicas=[(1, 2)])
        result = log.replicas.reassign(replication_factor={"a": 2})
        assert list(result) == [TopicPartition("a", 0)]
        assert result.copies == 1
        assert 1 in placements(log, "a")[0]
        # What has this number already stays, too.
        assert log.replicas.reassign(replication_factor={"b": 2}) == {}


def test_a_removal_moves_what_was_there_and_nothing_else(tmp_path):
    """Copies elsewhere stay, also of the partitions that lose one."""
    paths = disks(tmp_path, 4)
    with open_log(paths) as log:
        log.create_topic("pinned", replicas=[(1, 2)] * 3, partitions=3)
        log.create_topic("moving", replicas=[(1, 4)] * 3, partitions=3)
        log.replicas.remove(paths[3])
        assert all(each == [1, 2] for each in placements(log, "pinned").values())
        moved = placements(log, "moving").values()
        assert all(1 in each and len(each) == 2 for each in moved)
        assert {replica for each in moved for replica in each} >= {1, 3}


def test_partitions_get_fewer_copies_if_too_few_directories_are_left(tmp_path):
    """Also one whose copies were all in the directories that are removed."""
    paths = disks(tmp_path)
    with open_log(paths) as log:
        log.create_topic("flights", replicas=[(2, 3)])
        fill(log)
        log.replicas.remove(*paths[1:])
        assert placements(log) == {0: [1]}
        assert values(log) == list(range(100))
