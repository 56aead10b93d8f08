"""Checkpoints: after a boot, what was promised is there, and of transactions all or nothing."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from support.faulty_files import FaultyFiles
from support.roots import abandon, encoded, open_root, values
from support.staged_files import publish, stage

import embedlog
from embedlog.consumer.open_group import open_group
from embedlog.errors import ConflictError, DurabilityError
from embedlog.partition import checkpoint, flush
from embedlog.publish import live_commit
from embedlog.record import TopicPartition
from embedlog.root.repair import repair_root
from embedlog.segment import SegmentFile

IN = TopicPartition("in", 0)


@pytest.fixture
def log(tmp_path):
    """Two topics of a partition each, and one transaction that is not flushed."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        for topic in ("in", "out", "audit"):
            log.create_topic(topic, 1)
        log.producer().send_batch("in", [b"x"] * 9)
        log.flush()
        with patch.object(checkpoint, "CHECKPOINT_SECONDS", 1e9):
            transform(log, 1)
            checkpoint.take(log.root.context)
            transform(log, 2)
            yield log


def transform(log, number):
    """Send to two topics, and commit a position, in one transaction."""
    with log.transaction("name") as t:
        t.send("out", b"t%d" % number)
        t.send("audit", b"t%d" % number, key=b"%d" % number)
        t.send_offsets_to_transaction({IN: number}, "g")


def boot(log):
    """Let the machine boot, without a loss of bytes; return the log's root."""

    class Booted(FaultyFiles):
        def boot_id(self):
            return "another boot"

    abandon(log.root)
    return open_root(log.path, files=Booted)


def contents(root):
    """Return what there is of the transactions: in both topics, and the position."""
    (row,) = open_group(root, "g").committed([IN]).values()
    assert not root.context.state.read(checkpoint.points_of)
    return *(values(root.partition(topic, 0)) for topic in ("out", "audit")), row.position.offset


def test_a_boot_ends_the_log_at_the_last_checkpoint(log):
    """Records and positions alike, in all partitions."""
    root = boot(log)
    assert contents(root) == ([b"t1"], [b"t1"], 1)
    assert root.partition("out", 0).tail().leader_epoch == 1
    abandon(root)


def flushed_append(log):
    log.root.partition("out", 0).append([encoded(b"a")], durability="fsync")


def os_append(log):
    log.producer().send("out", b"a").result()


def publication(log):
    publish(log.root, [stage(log.root, out_0=[b"a"])])


DOORS = {
    "an append that is flushed": flushed_append,
    "an append": os_append,
    "a publication": publication,
    "a flush": lambda log: log.root.partition("audit", 0).flush(),
    "a roll": lambda log: log.root.partition("out", 0).roll(),
    "a gap": lambda log: log.root.partition("out", 0).skip_to(7),
    "a truncation": lambda log: log.root.partition("out", 0).truncate_to(1),
    "a snapshot": lambda log: log.snapshot("s"),
    "a checkpoint of a group": lambda log: open_group(log.root, "other").checkpoint(always=True),
    "an offset that is made durable": lambda log: open_group(log.root, "g").reset({IN: at(5)}),
    "housekeeping": lambda log: log.housekeeping.run(),
    "compaction": lambda log: log.housekeeping.compact("audit", force=True),
    "the next with its name": lambda log: log.producer(transactional_id="name").init_transactions(),
    "a close": lambda log: log.close(),
}


def at(offset):
    return embedlog.OffsetAndMetadata(offset)


@pytest.mark.parametrize("door", DOORS)
def test_whoever_promises_durability_takes_a_checkpoint(log, door):
    """Of all partitions of the transaction: none of them is cut at its rollback point."""
    if door == "compaction":
        log.alter_topic("audit", {"cleanup.policy": "compact,delete"})
    DOORS[door](log)
    root = boot(log)
    out, audit, position = contents(root)
    expected = [b"t1"] if door == "a truncation" else [b"t1", b"t2"]
    if door in ("an append that is flushed", "an append", "a publication"):
        expected = [b"t1", b"t2", b"a"]
    assert (out, audit) == (expected, [b"t1", b"t2"])
    assert position == (5 if "offset" in door else 2)
    abandon(root)


@pytest.fixture
def broken(monkeypatch):
    """Names of topics whose segments cannot be flushed."""
    topics: set[str] = set()
    sync = SegmentFile.sync

    def fail(file):
        if any(file.path.startswith(f"topics/{topic}") for topic in topics):
            raise DurabilityError("A test lets a flush fail", errno=5)
        sync(file)

    monkeypatch.setattr(SegmentFile, "sync", fail)
    return topics


def test_a_transaction_of_which_a_part_cannot_be_flushed_is_undone_everywhere(tmp_path, broken):
    """Its partitions are read-only until the repair, after which it may be committed again."""
    with embedlog.open(tmp_path / "log", durability="fsync", maintenance=False) as log:
        for topic in ("in", "out", "audit", "other"):
            log.create_topic(topic, 1)
        log.producer().send_batch("in", [b"x"] * 9)
        transform(log, 1)
        producer = log.producer(transactional_id="name")
        producer.init_transactions()
        producer.begin_transaction()
        producer.send("out", b"t2")
        producer.send("audit", b"t2")
        producer.send_offsets_to_transaction({IN: 2}, "g")
        broken.add(log.root.topic("audit").directory.split("/")[1])
        for _ in range(2):
            with pytest.raises(DurabilityError):
                producer.commit_transaction()
        tails = {name: log.root.partition(name, 0).tail() for name in ("out", "audit", "other")}
        assert [name for name, tail in tails.items() if tail.failed] == ["out", "audit"]
        shown = (*([each.value for each in log.topic(t)] for t in ("out", "audit")), position(log))
        assert shown == ([b"t1"], [b"t1"], 1)
        with log.transaction("another") as t:
            t.send("other", b"a")

        broken.clear()
        repair_root(log.root, dry_run=False)
        producer.commit_transaction()
        log.root.context.checkpoint()
        assert contents(log.root) == ([b"t1", b"t2"], [b"t1", b"t2"], 2)
        assert [each.value for each in log.topic("other")] == [b"a"]


def test_what_readers_saw_stays_after_a_flush_failed(log, broken, caplog):
    """As far as the disk has it; the others are flushed, and the group goes on."""
    broken.add(log.root.topic("audit").directory.split("/")[1])
    log.root.context.checkpoint()
    assert "Transactions are not flushed: A flush failed" in caplog.text
    assert [log.root.partition(name, 0).tail().failed for name in ("out", "audit")] == [False, True]
    broken.clear()
    repair_root(log.root, dry_run=False)
    transform(log, 3)
    log.root.context.checkpoint()
    root = boot(log)
    assert contents(root) == ([b"t1", b"t2", b"t3"], [b"t1", b"t2", b"t3"], 3)
    abandon(root)


def position(log):
    (row,) = open_group(log.root, "g").committed([IN]).values()
    return row.position.offset


def test_who_finds_a_record_that_waits_for_a_flush_has_it_flushed(tmp_path):
    """A condition counts it, also if its process has died: it must become visible."""
    with embedlog.open(tmp_path / "log", durability="fsync", maintenance=False) as log:
        log.create_topic("out", 1)
        with patch.object(live_commit, "_flush"), log.transaction("name") as t:
            t.send("out", b"a")
        assert list(log.topic("out")) == []
        with pytest.raises(ConflictError):
            log.producer().send("out", b"b", expected_offset=0).result()
        assert [each.value for each in log.topic("out")] == [b"a"]


def test_a_flush_of_a_partition_shows_no_part_of_a_transaction(tmp_path):
    """That waits for its checkpoint, and a flush of another process takes it."""
    with (
        embedlog.open(tmp_path / "log", durability="fsync", maintenance=False) as log,
        embedlog.open(tmp_path / "log", durability="fsync", maintenance=False) as other,
    ):
        for topic in ("out", "audit"):
            log.create_topic(topic, 1)
        with patch.object(live_commit, "_flush"), log.transaction("name") as t:
            t.send("out", b"a")
            t.send("audit", b"a")
        seen = []
        publish = flush.publish

        def look(partition, txn, flushed):
            result = publish(partition, txn, flushed)
            seen.append(checkpoint.peek_tail(txn, partition.key).high_watermark)
            return result

        with patch.object(flush, "publish", look):
            other.root.partition("out", 0).flush()
        assert seen[0] == 0
        assert [len(log.topic(topic)) for topic in ("out", "audit")] == [1, 1]
