"""Sealed segments that were replaced by compacted ones, whose offsets have gaps (D10, D25)."""

import pytest
from support.manual_compaction import keep
from support.roots import (
    abandon,
    bases,
    fill,
    healthy,
    make_log,
    offsets,
    open_root,
    rows,
    segment_files,
)

from embedlog import catalog
from embedlog.api.topic import Topic
from embedlog.consumer.consumer import Consumer
from embedlog.errors import FencedError
from embedlog.partition import replace
from embedlog.record import TopicPartition
from embedlog.root.repair import repair_root
from embedlog.segment import SegmentFile

CONFIG = {"segment.bytes": 3000, "index.interval.bytes": 0, "file.delete.delay.ms": 0}
KEPT = {1, 2, 7, 19, 20}
REMAINING = [1, 2, 7, 19, 20, 33, 34, 35]


@pytest.fixture
def log(root):
    """Twelve batches of three records: [0, 18) and [18, 33) sealed, [33, 36) active."""
    log = make_log(root, CONFIG)
    fill(log, 12, size=3)
    assert bases(log) == [0, 18, 33]
    return log


def uncommitted_files(log):
    return log.context.state.read(lambda txn: catalog.uncommitted_files(txn, log.key))


@pytest.mark.parametrize("kept_offsets", [set(), {0}, {32}, {17}, {18}], ids=str)
def test_a_reader_reaches_the_end_for_any_remaining_records(root, log, kept_offsets):
    """D11: an empty batch marks the end of the segment, so a consumer at the end has no lag."""
    log.roll()
    keep(log, kept_offsets)

    assert offsets(log) == sorted(kept_offsets)
    with Consumer(root, "t", auto_offset_reset="earliest") as consumer:
        polled = [record.offset for records in consumer.poll().values() for record in records]
        assert polled == sorted(kept_offsets)
        assert consumer.poll() == {}
        assert consumer.position(TopicPartition("t", 0)) == 36
    for offset in range(37):
        with Consumer(root) as consumer:
            partition = TopicPartition("t", 0)
            consumer.assign([partition])
            consumer.seek(partition, offset)
            row_counts = [batch.num_rows for batch in consumer.iter_batches(until="end")]
            assert sum(row_counts) == sum(number >= offset for number in kept_offsets)


def test_a_damaged_compacted_segment_is_repaired(root, log):
    """P12: good batches keep their offsets, even if the schema is damaged."""
    keep(log, KEPT, parts=3)
    (path, *_) = segment_files(root.path)
    data = bytearray(path.read_bytes())
    start = SegmentFile(root.context.files, str(path.relative_to(root.path))).start
    data[30] ^= 0xFF
    data[start + 200] ^= 0xFF
    path.write_bytes(data)

    messages = repair_root(root, dry_run=False)

    assert any("dropped" in message for message in messages)
    assert offsets(log) == [7, 19, 20, 33, 34, 35]


@pytest.mark.parametrize("later_batches", [0, 8])
def test_a_state_that_is_older_than_a_compaction_adopts_it(tmp_path, later_batches):
    """P13: the copy of `state` lists deleted files; their replacements are adopted."""
    root = open_root(tmp_path / "root")
    log = make_log(root, CONFIG)
    fill(log, 12, size=3)
    root.close()
    root = open_root(tmp_path / "root")
    log = root.partition("t", 0)
    fill(log, later_batches, first=12, size=3)
    log.roll()
    keep(log, KEPT)
    keep(log, KEPT)
    fill(log, later_batches, first=50, size=3)
    expected = rows(log)
    log.flush()
    abandon(root)
    (tmp_path / "root/state/data.mdb").write_bytes(b"damaged" * 5000)

    reopened = open_root(tmp_path / "root")

    assert any("in the place of" in message for message in reopened.startup_report)
    assert rows(reopened.partition("t", 0)) == expected
    fill(reopened.partition("t", 0), 1, first=99)
    assert healthy(reopened)
    reopened.close()


# What is refused


def test_segments_that_are_not_flushed_are_not_replaced(root, log):
    """Past the recovery point, recovery would treat gaps as lost records."""
    segments = [segment for segment in log.segments.values() if segment.sealed]
    replacement = replace.Replacement(log, 0, log.active_segment)
    with pytest.raises(FencedError, match="not on the disk"):
        replacement.swap(segments)
    replacement.abandon()


def test_one_process_at_a_time_rewrites_a_partition(root, log):
    """The next process removes the files of one that was killed."""
    with replace.rewrite_lock(log) as first:
        replace.Replacement(log, 0, log.active_segment)
        with replace.rewrite_lock(log) as second:
            assert (first, second) == (True, False)
    assert len(uncommitted_files(log)) == 1
    assert healthy(root), "an uncommitted file is no garbage"

    with replace.rewrite_lock(log):
        assert uncommitted_files(log) == []
    assert len(segment_files(root.path)) == 3


def test_a_view_counts_the_records_that_are_left(root, log):
    """D10: removed offsets have no row, as removed items are not in a list."""
    keep(log, KEPT)
    view = Topic(root, "t")

    assert [record.offset for record in view] == REMAINING
    assert [view[row].offset for row in range(len(view))] == REMAINING
    with pytest.raises(IndexError, match=f"Row {len(REMAINING)} is out of range"):
        view[len(REMAINING)]
    assert [record.offset for record in view[1:3]] == REMAINING[1:3]
    assert view.to_arrow(["offset"])["offset"].to_pylist() == REMAINING
