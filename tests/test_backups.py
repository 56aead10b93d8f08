"""Backups, the logs that are restored from them, and clones: they equal the log."""

from __future__ import annotations

import json
import os
import threading

import pyarrow as pa
import pytest
from support.clock import START, ManualClock
from support.faulty_files import REBOOTED
from support.roots import encoded, open_root
from support.staged_files import publish, stage
from support.tiers import choose

import embedlog
from embedlog.consumer.open_group import open_group
from embedlog.errors import (
    CorruptionError,
    IllegalStateError,
    InvalidProducerEpochError,
    LockTimeoutError,
    NotALogError,
    OutOfOrderSequenceError,
    StorageError,
    UnknownSnapshotError,
)
from embedlog.files.remote import plain_files
from embedlog.partition import journal
from embedlog.publish import transaction
from embedlog.publish.transaction import GroupOffsets
from embedlog.record import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition
from embedlog.root.verify import verify_root
from embedlog.snapshots import backup

COLUMNS = pa.schema([("id", pa.string()), ("n", pa.int64())])
SMALL = {"segment.bytes": 1500, "file.delete.delay.ms": 0}


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def log(tmp_path, clock):
    """A log with topics of each kind, a group, a named producer, schemas and a compaction."""
    with embedlog.open(tmp_path / "log", maintenance=False, clock=clock) as log:
        log.create_topic("plain", 3, SMALL)
        log.create_topic(
            "typed", 2, {**SMALL, "cleanup.policy": "compact"}, schema=COLUMNS, key="id"
        )
        log.create_topic("avro", value="avro")
        log.create_topic("empty", 12)
        subject = {"type": "record", "name": "r", "fields": [{"name": "n", "type": "int"}]}
        log.schema_registry.register("avro-value", json.dumps(subject))
        send(log, range(300))
        log.housekeeping.compact("typed", force=True, progress=False)
        log.alter_topic("typed", schema=COLUMNS.append(pa.field("more", pa.int8())))
        send(log, range(300, 360))
        log.delete_records({TopicPartition("plain", 1): 7})
        log.housekeeping.retention_bytes = 1 << 40
        with log.consumer("plain", group_id="g", auto_offset_reset="earliest") as consumer:
            for _ in range(50):
                next(consumer)
            consumer.commit()
        yield log


def send(log, numbers):
    with log.producer(producer_name="named") as producer:
        for number in numbers:
            at = START + number
            headers = [("h", b"x")] if number % 90 == 0 else None
            partition = number % 3
            producer.send(
                "plain", b"%d" % number, headers=headers, partition=partition, timestamp_ms=at
            )
            row = {"id": f"k{number % 40}", "n": number}
            producer.send("typed", row, partition=number % 2, timestamp_ms=at)


def check_equal(path, log, clock):
    """The log at a path has what a log has, and both verify."""
    with embedlog.open(path, maintenance=False, clock=clock) as other:
        assert other.root.id != log.root.id
        assert other.housekeeping.verify() == log.housekeeping.verify() == []
        assert other.topics(internal=True) == log.topics(internal=True)
        for name in log.topics():
            found, expected = other.describe_topic(name), log.describe_topic(name)
            for fact in ("id", "created_ms", "config", "overrides"):
                assert found[fact] == expected[fact]
            for mine, its in zip(found["partitions"], expected["partitions"], strict=True):
                assert mine["leader_epoch"] > its["leader_epoch"]
                for fact in ("start_offset", "end_offset"):
                    assert mine[fact] == its[fact]
            assert other.topic(name).to_arrow().equals(log.topic(name).to_arrow())
            assert index_of(other, name) == index_of(log, name)
        assert (
            other["typed"].schema_history()[1].columns == log["typed"].schema_history()[1].columns
        )
        assert dict(other["typed"].items()) == dict(log["typed"].items())
        assert other.groups["g"].describe().lag == log.groups["g"].describe().lag
        assert other.schema_registry.subjects() == log.schema_registry.subjects()
        assert other.housekeeping.retention_bytes == 1 << 40
        assert not other.snapshots


def index_of(log, name):
    """The indexes of the sealed segments of a topic."""
    from embedlog.partition import lookup

    found = []
    for number in range(log.root.partitions(name)):
        part = log.partition(name, number)
        part.refresh()
        found += [lookup.entries(part, info) for info in part.segments.values() if info.sealed]
    return found


def test_a_restored_backup_equals_the_log(log, tmp_path, clock):
    """Its records, settings, schemas, groups, and what keeps a producer from sending twice."""
    result = log.backup(tmp_path / "backup")
    assert result.copied_files == result.files > 20
    name = embedlog.restore(tmp_path / "backup", tmp_path / "restored")
    assert name == result.name
    check_equal(tmp_path / "restored", log, clock)
    assert not log.snapshots

    with embedlog.open(tmp_path / "restored", clock=clock) as restored:
        before = restored.root.producer_identity("named")
        assert before == (log.root.producer_identity("named"))
        send(restored, range(100))
        assert len(restored["plain"]) == len(log["plain"]) + 100
    with embedlog.open(tmp_path / "restored", clock=clock, files=REBOOTED) as restored:
        assert restored.housekeeping.verify() == []


def test_a_backup_is_incremental_and_each_can_be_restored(log, tmp_path, clock):
    """Sealed segments are copied once; `at` chooses an earlier one."""
    target = tmp_path / "backup"
    first = log.backup(target)
    expected = {name: log.topic(name).to_arrow() for name in ("plain", "typed")}
    again = log.backup(target)
    assert (again.copied_files, again.copied_bytes) == (0, 0)
    clock.now += 1000
    send(log, range(360, 480))
    last = log.backup(target)
    assert 0 < last.copied_files < last.files
    clock.now -= 500_000  # A clock that goes back does not change the order.
    assert log.backup(target).name > last.name

    embedlog.restore(target, tmp_path / "first", at=int(first.name.removeprefix("backup-")))
    with embedlog.open(tmp_path / "first", maintenance=False, clock=clock) as restored:
        for name, table in expected.items():
            assert restored.topic(name).to_arrow().equals(table)
        assert restored.housekeeping.verify() == []
    embedlog.restore(target, tmp_path / "last")
    check_equal(tmp_path / "last", log, clock)
    opened = embedlog.open_snapshot(target / f"snapshots/{first.name}.json")
    assert opened["plain"].to_arrow().equals(expected["plain"])
    with pytest.raises(UnknownSnapshotError):
        embedlog.restore(target, tmp_path / "none", at=0)


def test_compaction_and_retention_after_a_backup_change_nothing_in_it(log, tmp_path, clock):
    """The next one copies the new segments, and the old one stays what it was."""
    target = tmp_path / "backup"
    first = log.backup(target)
    expected = log["typed"].to_arrow()
    log.housekeeping.compact("typed", force=True, progress=False)
    log.delete_records({TopicPartition("plain", 0): -1})
    log.backup(target)
    embedlog.restore(target, tmp_path / "old", at=int(first.name.removeprefix("backup-")))
    with embedlog.open(tmp_path / "old", maintenance=False, clock=clock) as restored:
        assert restored["typed"].to_arrow().equals(expected)
    embedlog.restore(target, tmp_path / "new")
    check_equal(tmp_path / "new", log, clock)


def test_a_backup_goes_to_a_store_and_comes_back(log, tmp_path, clock):
    """By fsspec."""
    memory = pytest.importorskip("fsspec").filesystem("memory")
    try:
        log.backup("memory://bucket/backup")
        send(log, range(360, 400))
        again = log.backup("memory://bucket/backup")
        assert 0 < again.copied_files < again.files
        embedlog.restore("memory://bucket/backup", tmp_path / "restored")
        check_equal(tmp_path / "restored", log, clock)
        names = memory.ls("/bucket/backup/snapshots", detail=False)
        assert len(names) == 2
        opened = embedlog.open_snapshot(f"memory:/{max(names)}")
        assert opened["plain"].to_arrow().equals(log["plain"].to_arrow())
    finally:
        memory.rm("/bucket", recursive=True)


def test_damage_of_a_backup_is_found(log, tmp_path):
    """By a restore always; by a backup that repeats it with ``verify``."""
    target = tmp_path / "backup"
    log.backup(target)
    files = sorted(target.glob("topics/plain-*/0/*.arrows"))
    data = bytearray(files[0].read_bytes())
    data[-20] ^= 1
    files[0].write_bytes(data)
    with pytest.raises(CorruptionError, match="checksum"):
        embedlog.restore(target, tmp_path / "restored")
    assert not (tmp_path / "restored/embedlog.toml").exists()
    with pytest.raises(NotALogError):
        embedlog.open(tmp_path / "restored")
    assert log.backup(target).copied_files == 0
    assert log.backup(target, verify=True).copied_files == 1
    files[1].write_bytes(files[1].read_bytes()[:100])
    files[2].unlink()
    assert log.backup(target).copied_files == 2
    embedlog.restore(target, tmp_path / "restored")  # It continues.
    assert (tmp_path / "restored/embedlog.toml").exists()


def test_a_wrong_target_or_directory_is_refused(log, tmp_path, clock):
    """And nothing in it is changed."""
    log.backup(tmp_path / "backup")
    with embedlog.open(tmp_path / "other", maintenance=False) as other:
        with pytest.raises(IllegalStateError, match="another log"):
            other.backup(tmp_path / "backup")
    for directory, error in (("other", IllegalStateError), ("files", NotALogError)):
        (tmp_path / "files").mkdir(exist_ok=True)
        (tmp_path / "files/x").touch()
        for make in (
            lambda path: embedlog.restore(tmp_path / "backup", path),
            log.clone,
        ):
            before = sorted((tmp_path / directory).rglob("*"))
            with pytest.raises(error):
                make(tmp_path / directory)
            assert sorted((tmp_path / directory).rglob("*")) == before
    with pytest.raises(IllegalStateError, match="is a log"):
        log.backup(log.path)
    log.snapshot("backup-1")
    for source in ("files", "log"):
        with pytest.raises(UnknownSnapshotError):
            embedlog.restore(tmp_path / source, tmp_path / "new")
    with pytest.raises(StorageError):
        embedlog.restore(tmp_path / "missing", tmp_path / "new")
    files = log.root.context.files
    with files.opened("locks/backup", write=True, create=True) as fd:
        files.lock(fd, 1)
        with embedlog.open(log.path, clock=clock, maintenance=False, lock_timeout=0.1) as second:
            with pytest.raises(LockTimeoutError):
                second.backup(tmp_path / "backup")


def test_a_clone_shares_sealed_segments(log, tmp_path, clock):
    """Both go on by themselves: a file that is deleted or replaced in one stays in the other."""
    log.clone(tmp_path / "clone")
    check_equal(tmp_path / "clone", log, clock)
    sealed = [path for path in (tmp_path / "clone").rglob("*.arrows") if os.stat(path).st_nlink > 1]
    assert len(sealed) > 15
    expected = log["plain"].to_arrow()
    with embedlog.open(tmp_path / "clone", maintenance=False, clock=clock) as clone:
        send(clone, range(100))
        clone.flush()
        clone.housekeeping.compact("typed", force=True, progress=False)
        clone.delete_records({TopicPartition("plain", 0): -1})
        assert clone.housekeeping.verify() == []
        cloned = clone["plain"].to_arrow()
        assert log["plain"].to_arrow().equals(expected)
        log.housekeeping.compact("typed", force=True, progress=False)
        log.partition("plain", 1).truncate_to(20)
        log.delete_topic("plain")
        assert clone["plain"].to_arrow().equals(cloned)
        assert clone.housekeeping.verify() == log.housekeeping.verify() == []


def test_a_clone_copies_where_it_cannot_share(log, tmp_path, clock, monkeypatch):
    """Such as on another file system."""
    files = type(log.root.context.files)
    monkeypatch.setattr(files, "hard_link", lambda *_: False)
    log.clone(tmp_path / "clone")
    check_equal(tmp_path / "clone", log, clock)


@pytest.mark.tier("all")
def test_a_log_over_several_directories_becomes_one_in_one(tmp_path, clock):
    """By a backup and as a clone; its snapshots are read from the leaders' directories."""
    paths = [tmp_path / name for name in "abc"]
    with embedlog.open(paths, maintenance=False, clock=clock) as log:
        log.create_topic("t", 4, SMALL, replication_factor=2)
        for number in range(200):
            log.partition("t", number % 4).append([encoded(b"%d" % number)])
        snapshot = log.snapshot("s", expires=None)
        expected = log.at(snapshot)["t"].to_arrow()
        for number in range(200):
            log.partition("t", number % 4).append([encoded(b"%d" % number)])
        log.housekeeping.run()
        found = [path for path in paths if (path / "snapshots/s.json").exists()]
        opened = embedlog.open_snapshot(found[0] / "snapshots/s.json")
        assert opened["t"].to_arrow().equals(expected)
        log.backup(tmp_path / "backup")
        log.clone(tmp_path / "clone")
        embedlog.restore(tmp_path / "backup", tmp_path / "restored")
        for name in ("clone", "restored"):
            with embedlog.open(tmp_path / name, maintenance=False, clock=clock) as other:
                assert other["t"].to_arrow().equals(log["t"].to_arrow())
                assert other.housekeeping.verify() == []
    with embedlog.open(paths, maintenance=False, clock=clock, files=REBOOTED) as log:
        log.alter_topic("t", {"retention.ms": 1})
        clock.now += 3_600_000
        log.housekeeping.run()
        assert log.at(log.snapshots["s"])["t"].to_arrow().equals(expected)
        log.snapshots.delete("s")
        log.housekeeping.run()
        assert len(log["t"]) < 100


def test_a_producer_of_a_restored_log_cannot_send_twice(tmp_path):
    """Its last batches, and the epochs that fence older ones, are in the backup (G15, G17)."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("t")
        part = log.partition("t", 0)
        part.append([encoded(b"a", producer=(7, 3, 0))])
        part.append([encoded(b"b", producer=(7, 3, 1))])
        log.backup(tmp_path / "backup")
    embedlog.restore(tmp_path / "backup", tmp_path / "restored")
    with embedlog.open(tmp_path / "restored", maintenance=False) as log:
        part = log.partition("t", 0)
        assert part.append([encoded(b"b", producer=(7, 3, 1))])[0].base_offset == 1
        with pytest.raises(OutOfOrderSequenceError):
            part.append([encoded(b"x", producer=(7, 3, 5))])
        with pytest.raises(InvalidProducerEpochError):
            part.append([encoded(b"x", producer=(7, 2, 0))])
        assert part.append([encoded(b"c", producer=(7, 3, 2))])[0].base_offset == 2


def test_an_application_continues_in_a_restored_log(tmp_path):
    """Whatever instant the backup is of: each version is there once, after it is repeated (P1)."""
    root = open_root(tmp_path / "log")
    root.create_topic("t", 3, embedlog.TopicConfig())
    versions, done, failed = [0], threading.Event(), []

    def work():
        try:
            while not done.is_set():
                version = versions[0]
                value = [b"%d" % version]
                publish(root, [stage(root, t_0=value, t_1=value, t_2=value)], version)
                versions[0] += 1
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=work)
    thread.start()
    logs = []
    while len(logs) < choose(quick=4, all=12) or versions[0] < choose(quick=30, all=100):
        target = tmp_path / f"backup{len(logs)}"
        target.mkdir()
        backup.back_up(root, plain_files(str(target), writable=True))
        logs.append(target)
    done.set()
    thread.join()
    assert not failed
    for number, target in enumerate(logs):
        embedlog.restore(target, tmp_path / f"restored{number}")
        restored = open_root(tmp_path / f"restored{number}")
        counts = {restored.partition("t", part).end_offset() for part in range(3)}
        assert len(counts) == 1
        (count,) = counts
        if count:
            value = [b"again"]
            again = stage(restored, t_0=value, t_1=value, t_2=value)
            assert publish(restored, [again], count - 1).records == 0
        value = [b"%d" % count]
        new = stage(restored, t_0=value, t_1=value, t_2=value)
        assert publish(restored, [new], count).records == 3
        assert verify_root(restored) == []
        restored.close()
    root.close()


def test_a_publication_that_is_not_visible_yet_is_in_neither(tmp_path, monkeypatch):
    """Its process died between the two commits: it is finished here, and repeated there."""
    root = open_root(tmp_path / "log")
    root.create_topic("t", 2, embedlog.TopicConfig())
    publish(root, [stage(root, t_0=[b"0"], t_1=[b"0"])], 0)
    first = TopicPartition("t", 0)

    def again(root):
        """Publish with an offset that a group commits."""
        group = open_group(root, "g")
        rows = group.encode({first: OffsetAndMetadata(1)})
        offsets = GroupOffsets(group, ConsumerGroupMetadata("g"), rows)
        return publish(root, [stage(root, t_0=[b"1"], t_1=[b"1"])], 1, offsets=offsets).records

    def committed(root):
        return open_group(root, "g").committed([first])[first]

    with monkeypatch.context() as patch:
        patch.setattr(journal, "make_visible", lambda *_: None)
        patch.setattr(transaction, "_resolve", lambda *_: None)
        assert again(root) == 2
    (tmp_path / "backup").mkdir()
    backup.back_up(root, plain_files(str(tmp_path / "backup"), writable=True))
    embedlog.restore(tmp_path / "backup", tmp_path / "restored")
    for path, records in (("restored", 2), ("log", 0)):
        if path == "restored":
            tried = open_root(tmp_path / path)
            assert committed(tried) is None
        else:
            tried = root
        assert again(tried) == records
        assert committed(tried).position.offset == 1
        assert [tried.partition("t", part).end_offset() for part in (0, 1)] == [2, 2]
        assert verify_root(tried) == []
        tried.close()


def test_a_log_with_a_snapshot_of_a_pending_truncation_is_backed_up(log, tmp_path, clock):
    """A truncation in between leaves a later epoch, and the backup is of after it."""
    log.partition("plain", 0).truncate_to(30)
    log.backup(tmp_path / "backup")
    embedlog.restore(tmp_path / "backup", tmp_path / "restored")
    with embedlog.open(tmp_path / "restored", maintenance=False, clock=clock) as restored:
        assert restored["plain"].to_arrow().equals(log["plain"].to_arrow())
        assert restored.housekeeping.verify() == []
