"""Moving the log start offset: which segments are deleted, when, and what readers see."""

from __future__ import annotations

from contextlib import closing

import pytest
from support.clock import MovedUptime
from support.faulty_files import REBOOTED
from support.roots import (
    abandon,
    bases,
    encoded,
    fill,
    healthy,
    make_log,
    offsets,
    open_root,
    segment_files,
)

from embedlog import catalog
from embedlog.errors import DurabilityError, OffsetOutOfRangeError
from embedlog.partition import PartitionLog, flush, log_start, producer_state, tail, unnamed_files
from embedlog.partition.log_start import move_log_start

SIZE = encoded(b"v0").size
TWO_RECORDS = {"segment.bytes": 2 * SIZE}
UNLINKED_AT_ONCE = {**TWO_RECORDS, "file.delete.delay.ms": 0}


def ten_records(root, config):
    """Create a topic of one partition with ten records in five segments."""
    log = make_log(root, config)
    fill(log, 10)
    return log


def damage_state(path):
    data = path / "state" / "data.mdb"
    data.write_bytes(b"\xff" * data.stat().st_size)


@pytest.fixture
def log(root):
    """Ten records in five segments, whose files are unlinked at once."""
    return ten_records(root, UNLINKED_AT_ONCE)


def test_a_start_inside_a_segment_hides_what_is_below_it(log):
    """A30: the records below it are invisible though their bytes remain."""
    move_log_start(log, 5)

    assert (log.start_offset(), bases(log), offsets(log)) == (5, [4, 6, 8], [5, 6, 7, 8, 9])


def test_the_start_never_moves_back(log):
    """A30: a lower offset is no error, and changes nothing."""
    move_log_start(log, 6)

    assert move_log_start(log, 3) == (6, 0, 0)
    assert move_log_start(log, 0, whole=True) == (6, 0, 0)


def test_the_start_cannot_pass_the_end(log):
    """A30: an offset beyond the high watermark is refused, and nothing is deleted."""
    with pytest.raises(OffsetOutOfRangeError, match="ends at offset 10"):
        move_log_start(log, 11)
    with pytest.raises(OffsetOutOfRangeError):
        move_log_start(log, -1)

    assert log.start_offset() == 0


def test_all_records_can_be_deleted_and_offsets_continue(root, log):
    """C4: the active segment is rolled first; an empty segment and the end offset remain."""
    move_log_start(log, 10)

    assert (log.start_offset(), log.end_offset(), bases(log)) == (10, 10, [10])
    fill(log, 1, first=10)
    assert offsets(log) == [10]
    assert move_log_start(log, 10) == (10, 0, 0)


def test_a_reader_below_the_start_gets_an_error_and_never_skips(log):
    """A21, P20: batches that were read stay valid; then its offset is out of range."""
    reader = log.reader(0)
    batches = reader.read(1)
    move_log_start(log, 6)

    assert [batch.lists()[2] for batch in batches] == [[b"v0"]]
    with pytest.raises(OffsetOutOfRangeError, match=r"outside 6\.\.10"):
        reader.read()
    with pytest.raises(OffsetOutOfRangeError):
        log.reader(5)


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_a_reader_with_an_old_tail_skips_nothing(root, log, offset):
    """A21: the manifest that it reads next begins past its offset."""
    with closing(open_root(root.path)) as other:
        reader = other.partition("t", 0).reader(offset)
        if offset:
            reader.read(1)
        old_tail = reader._log.tail()
        move_log_start(log, 6)
        with pytest.raises(OffsetOutOfRangeError):
            while True:
                assert reader.read(1, old_tail)[0].base_offset <= 2


def test_a_lookup_by_time_is_repeated_if_the_start_moves(root, log, monkeypatch):
    """B10: it then searches from the new log start offset."""
    with closing(open_root(root.path)) as other:
        other_log = other.partition("t", 0)
        assert other_log.segments
        version = other.context.catalog.version
        move_log_start(log, 6)
        # Twice it sees the old version, so that it does not notice the change of the manifest.
        old_versions = iter([other_log.snapshot_version] * 2)
        monkeypatch.setattr(
            other.context.catalog, "version", lambda: next(old_versions, None) or version()
        )
        position = other_log.offset_for_timestamp(0)

    assert position.offset == 6


def test_a_limit_is_checked_in_the_transaction_that_moves_the_start(log):
    """P14: a process that may not delete is stopped there, and nothing is changed."""
    transactions = []

    def limit(txn):
        transactions.append(txn.id())
        return 5

    assert move_log_start(log, 8, whole=True, limit=limit).start_offset == 4
    assert len(transactions) == 2

    def refuse(txn):
        raise KeyError("fenced")

    with pytest.raises(KeyError):
        move_log_start(log, 8, limit=refuse)
    assert log.start_offset() == 4


def test_a_decision_from_another_epoch_deletes_nothing(log):
    """A36: the segments that it was based on may have been replaced."""
    epoch = log.tail().leader_epoch
    log.truncate_to(6)

    assert move_log_start(log, 4, epoch=epoch) == (0, 0, 0)
    assert move_log_start(log, 4, epoch=epoch + 1).start_offset == 4


def test_files_stay_for_their_delay(tmp_path):
    """A39: file.delete.delay.ms; until then they are no strays, and any process may sweep."""
    MovedUptime.ms = 0
    with closing(open_root(tmp_path / "root", files=MovedUptime)) as root:
        log = ten_records(root, {**TWO_RECORDS, "file.delete.delay.ms": 1_000})
        move_log_start(log, 6)
        assert len(segment_files(root.path)) == 5
        assert healthy(root)
        assert root.context.state and unnamed_files.sweep(root.context) == 0
        MovedUptime.ms = 1_001
        with closing(open_root(root.path, files=MovedUptime)) as other:
            assert unnamed_files.sweep(other.context) == 3
        assert len(segment_files(root.path)) == 2
        assert unnamed_files.pending_paths(root.context.live) == set()


def test_a_topic_that_is_deleted_during_an_open_does_not_end_it(tmp_path, monkeypatch):
    """Another process deletes it between the list of topics and the recovery of its partitions."""
    with closing(open_root(tmp_path / "root")) as root:
        ten_records(root, TWO_RECORDS)
    recover = PartitionLog.tail

    def deleted_meanwhile(log):
        monkeypatch.setattr(PartitionLog, "tail", recover)
        log.context.catalog.delete_topic(log.context.catalog.topic(log.topic))
        return recover(log)

    monkeypatch.setattr(PartitionLog, "tail", deleted_meanwhile)
    with closing(open_root(tmp_path / "root", files=REBOOTED)) as root:
        assert root.startup_report
        assert not root.topics()
        assert healthy(root)


def test_after_a_clean_close_the_next_one_sweeps(tmp_path):
    """A39: pending deletes survive the close, and are no strays."""
    with closing(open_root(tmp_path / "root")) as root:
        log = ten_records(root, TWO_RECORDS)
        move_log_start(log, 6)
    with closing(open_root(tmp_path / "root")) as root:
        assert root.startup_report == []
        assert healthy(root)
        assert unnamed_files.sweep(root.context, early=True) == 3


def test_a_truncation_after_an_interrupted_deletion_keeps_the_start(log, monkeypatch):
    """A30: it never moves back within a boot."""
    monkeypatch.setattr(log_start, "_drop", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        move_log_start(log, 6)
    log.truncate_to(8)

    assert (log.start_offset(), log.end_offset()) == (6, 8)


def test_a_restored_state_knows_what_was_deleted_since_its_copy(tmp_path):
    """P13: segments that retention deleted since then are dropped, and the start is moved."""
    with closing(open_root(tmp_path / "root")) as root:
        log = ten_records(root, UNLINKED_AT_ONCE)
    with closing(open_root(tmp_path / "root")) as root:
        log = root.partition("t", 0)
        fill(log, 4, first=10)
        move_log_start(log, 6)
        abandon(root)
    damage_state(tmp_path / "root")
    with closing(open_root(tmp_path / "root")) as root:
        log = root.partition("t", 0)
        assert "offsets below 6 were deleted after the copy was made" in root.startup_report
        assert (log.start_offset(), offsets(log)) == (6, list(range(6, 14)))
        assert healthy(root)


def test_a_file_that_is_missing_in_the_middle_is_still_an_error(tmp_path):
    """R7: retention can only have deleted the first ones."""
    with closing(open_root(tmp_path / "root")) as root:
        ten_records(root, UNLINKED_AT_ONCE)
    segment_files(tmp_path / "root")[1].unlink()
    damage_state(tmp_path / "root")
    with closing(open_root(tmp_path / "root")) as root:
        assert any("missing" in str(line) or "opened" in str(line) for line in root.startup_report)


def test_what_is_deleted_counts_as_flushed(tmp_path):
    """A reader of durable records is not left below the start, and flush works."""
    with closing(open_root(tmp_path / "root", visibility="durable")) as root:
        log = ten_records(root, UNLINKED_AT_ONCE)
        assert log.end_offset() == 0
        move_log_start(log, 6)
        assert (log.start_offset(), log.end_offset()) == (6, 6)
        log.flush()
        assert offsets(log) == [6, 7, 8, 9]
        assert healthy(root)


def test_a_flush_skips_segments_that_are_deleted_meanwhile(root, log, monkeypatch):
    """A22: a segment that retention deletes needs no flush."""
    sync_data, deletions = flush.sync_data, []

    def delete_and_sync(*arguments):
        if not deletions:
            deletions.append(move_log_start(log, 6))
            raise OffsetOutOfRangeError("as if the file to open were deleted")
        sync_data(*arguments)

    log.append([encoded(b"v10")])
    monkeypatch.setattr(flush, "sync_data", delete_and_sync)
    append = log.append([encoded(b"v11")], durability="fsync")

    assert append[0].base_offset == 11
    assert deletions
    assert log.tail().durable_offset == 12


def test_the_first_epoch_is_clipped_to_the_start(root, log):
    """A37: epochs below the start become one; a reader at the old epoch still gets an error."""
    reader = log.reader(9)
    log.truncate_to(4)
    fill(log, 6, first=4)
    log.truncate_to(8)
    fill(log, 2, first=8)
    move_log_start(log, 6)

    epochs = root.context.state.read(lambda txn: catalog.epochs(txn, log.key))
    assert epochs == [(1, 6), (2, 8)]
    with pytest.raises(OffsetOutOfRangeError):
        reader.read()


def test_a_producer_is_remembered_though_its_records_are_gone(root, log):
    """G16, G19: it expires by time only; a repetition gets the offset of the first append."""
    log.append([encoded(b"a", producer=(7, 0, 0))])
    move_log_start(log, 11)

    resent = log.append([encoded(b"a", producer=(7, 0, 0))])
    assert resent[0][:2] == (10, 11)
    assert resent[0].duplicate
    assert root.context.live.get(producer_state.key(log.key, 7)) is not None


def test_a_partition_whose_flush_failed_is_left_as_it_is(log):
    """P9: nothing is deleted before `repair`."""

    def fail(txn):
        row = txn.get(log.tail_key)
        txn.put(log.tail_key, tail.unpack(row)._replace(failed=True).pack())

    context = log.context
    row = context.live.get(log.tail_key)
    context.live.write(fail)
    with pytest.raises(DurabilityError):
        move_log_start(log, 4)
    context.live.write(lambda txn: txn.put(log.tail_key, row))

    assert move_log_start(log, 4).start_offset == 4
